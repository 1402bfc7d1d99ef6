"""Loops over layers in which the parameters of the next layer are gathered while one computes.

The loop carries the gathered parameters of its layer, and gathers the parameters of the next layer
from their shards. That gather is an operation of the same iteration which does not depend on the
layer's computation, so the compiler overlaps both.

    forward, layer l             backward, layer l
    ------------------------     ------------------------------------------
    gather parameters of l+1     gather parameters of l-1
    compute with those of l      cotangents of l, from its residuals and parameters
    keep the residuals           reduce-scatter the gradients of the parameters

If JAX differentiated the loop, the loop would keep all gathered parameters for the backward pass.
So it has a rule of its own, which gathers the parameters again, in a loop of the same form that
runs from the last layer to the first. JAX shows this form in ``tests/overlap_test.py``.

A *shard* is a parameter as it is kept, (layers, …) for the loop. The *pullback* of a layer takes
its cotangents from outputs to inputs. The backward pass rebuilds it from *residuals*, the arrays
that the forward pass keeps. Parameters are *ready* once they are gathered; the *rest* are slices
that need no gathering.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..activations.calls import Shape, Tag
from ..activations.gathering import spec_of_slice
from ..activations.trace_keys import PREFETCHED
from ..activations.variables import modules_in, own_variables
from ..core.constrain import apply_shardings, mesh_in_trace, type_spec
from ..specs.fitting import spec_axes
from ..specs.paths import Path
from ..specs.types import AnyMesh, Arrays
from .in_trace import replace_slots
from .tangents import is_inexact


class Gather(NamedTuple):
    """The two shardings of one parameter of a layer: as it is kept, and as it is used."""

    # The name for `PREFETCHED`: argument and path of the module, and the path in the module.
    name: tuple[str, Path, Path]
    stacked: jax.Array  # the parameter of all layers: (layers, …)
    shard: NamedSharding  # the sharding with which one layer's parameter is kept
    whole: NamedSharding  # the sharding with which one layer's parameter is used


# The parameters that loops gather ahead, by the `id` of the stacked array. `prefetching` sets it.
_GATHERS: ContextVar[dict[int, Gather] | None] = ContextVar("_GATHERS", default=None)


@contextlib.contextmanager
def prefetching(layers: object, ahead: int, modules_with_loops: Sequence[object]) -> Iterator[None]:
    """Within the block, :func:`scan` over stacked layers gathers their parameters ahead.

    Args:
      layers: the module with stacked Variables.
      ahead: how many layers ahead the stack asks for, 0 or 1. A strategy may ask as well.
      modules_with_loops: modules in ``layers`` that have a loop of their own, such as an inner
        ``Stack``. Their loop gathers their parameters, layer by layer; this loop would gather all
        of them at once.
    """
    excluded = {id(inner) for module in modules_with_loops for _, inner in modules_in(module)}
    gathers = dict[int, Gather]()
    for _, module in modules_in(layers):
        tag = _compat.tag_of(module)
        if tag is None or id(module) in excluded:
            continue
        # The stack may ask for it, or a strategy. The sources of a tag are its strategies.
        is_wanted = ahead > 0 or any(source.prefetch > 0 for source in tag.sources)
        if is_wanted:
            # The key is the `id`, because `scan` below gets the same tracers among its stacked
            # arrays. Each `Gather` holds its tracer, so no other object gets its id.
            gathers |= {id(gather.stacked): gather for gather in _gathers_of(module, tag)}
    token = _GATHERS.set(gathers)
    try:
        yield
    finally:
        _GATHERS.reset(token)


def _gathers_of(module: object, tag: Tag) -> Iterator[Gather]:
    """Yields the parameters of a module that its strategy gathers, and that are not whole yet."""
    for path, variable in own_variables(module):
        value = _compat.get_value(variable)
        # A value that is not a tracer belongs to a module that the function captures, so it is a
        # constant of the loop.
        if path not in tag.specs or not isinstance(value, jax.core.Tracer):
            continue
        specs = tag.specs[path]
        # On Explicit axes the type says whether the strategy's axes still shard it.
        actual = type_spec(value)
        is_whole = actual is not None and tag.axes.isdisjoint(spec_axes(actual))
        if specs.is_gathered and not is_whole:
            assert tag.mesh is not None  # without a mesh, nothing is gathered
            mesh = mesh_in_trace(tag.mesh)
            yield Gather(
                name=(tag.name, tag.path, path),
                stacked=value,
                shard=_sharding_of_layer(mesh, specs.outside, specs.shape, value.shape),
                whole=_sharding_of_layer(mesh, specs.inside, specs.shape, value.shape),
            )


def _sharding_of_layer(
    mesh: AnyMesh, spec: PartitionSpec, shape: Shape, stacked_shape: Shape
) -> NamedSharding:
    """Returns the sharding of one layer's parameter in a loop.

    For example, the user has a stack of 2 stacks of 4 layers. A kernel is (2, 4, in, out), with the
    spec ``P(None, None, "data", None)``. In the inner loop it is (4, in, out), and the kernel of
    one layer is (in, out), with ``P("data", None)``.

    Args:
      spec: the spec of the Variable as the user has it.
      shape: the shape of the Variable as the user has it.
      stacked_shape: the shape of the parameter of all layers of this loop: (layers, …).
    """
    # `spec_of_slice` leaves out the dimensions of loops around this one, as the shapes tell.
    entries = spec_of_slice(spec, shape, stacked_shape).partitions
    # The first dimension of the rest is that of the layers.
    return NamedSharding(mesh, PartitionSpec(*entries[1:]))


def scan(
    step: Callable[..., Any], carry: Any, stacked: Arrays, *, unroll: int | bool, **options: Any
) -> tuple[Any, Any]:
    """Runs ``jax.lax.scan``, and gathers the parameters ahead that :func:`prefetching` has chosen.

    Args:
      step: ``(carry, slices) → (carry, results)``, as for ``jax.lax.scan``.
      carry: the first carry.
      stacked: a list of arrays, (layers, …).
      unroll: how many layers one iteration runs, as for ``jax.lax.scan``.
      **options: the other options of ``jax.lax.scan``. A loop with parameters to gather ignores
        them: it is the loop of a ``Stack``, whose only option is the number of layers.
    """
    gathers_by_id = _GATHERS.get() or {}  # what `prefetching` has chosen, by `id`
    gathers = {
        position: gathers_by_id[id(x)]
        for position, x in enumerate(stacked)
        if id(x) in gathers_by_id
    }
    if not gathers:  # not within `prefetching`, or the loop is of another function within it
        return jax.lax.scan(step, carry, stacked, unroll=unroll, **options)
    loop = _Loop(step, carry, stacked, gathers, unroll)
    return loop.results()


class _Inputs(NamedTuple):
    """The arrays that one layer computes with."""

    constants: Arrays  # arrays that are captured, and arrays of the carry that no step changes
    carry: Arrays  # arrays of the carry that steps change
    ready: Arrays  # the gathered parameters of the layer
    rest: Arrays  # the layer's slices of all other stacked arrays


# A pullback takes a list of arrays and the cotangents of the layer's outputs. Its arrays are the
# inputs that the backward pass has again, then the residuals; see `_differentiated_step`.
_PullBack: TypeAlias = Callable[[Arrays, object], _Inputs]


class _Loop:
    """A loop over the layers, with its rule for the backward pass.

    The constructor traces the step to a jaxpr of flat arrays: the whole carry, then ``ready`` and
    ``rest`` of `_Inputs`. `results` runs the loop. The arguments of the loop are four lists like
    those of `_Inputs`, for all layers: ``constants``, the first ``carry``, ``shards`` (the
    parameters before they are gathered, (layers, …)), and ``rest`` (layers, …).

    Many arrays of a carry, such as a mask, never change. They are constants here. The ``carry`` in
    `_Inputs` and in the arguments has only the arrays that steps change.

    Attributes:
      _gathers: the `Gather` of each parameter, in the order of ``shards`` and ``ready``.
      _length: the number of layers.
      _unroll: how many layers one iteration runs, as for ``jax.lax.scan``.
      _jaxpr: the traced step, with the arrays that it captures as ``consts``. Its results are the
        whole next carry, then the results of the layer, all flat.
      _out_treedef: the structure of what the step returns, ``(carry, results)``.
      _num_carried: the number of arrays in the whole carry.
      _is_changed: for each array of the whole carry, whether a step changes it.
      _unchanged: the arrays of the carry that no step changes.
      _arguments: the arguments of the loop, the four lists above.
    """

    def __init__(
        self,
        step: Callable[..., object],
        carry: object,
        stacked: Arrays,
        gathers: dict[int, Gather],
        unroll: int | bool,
    ):
        """Traces the step once, and sorts the arguments of the loop into the lists of `_Inputs`.

        Args:
          step: takes the carry and the slices of one layer, as the body of ``jax.lax.scan``.
          stacked: arrays of all layers, (layers, …).
          gathers: what to gather, by the position of the stacked array in ``stacked``.
          unroll: how many layers one iteration runs, as in ``jax.lax.scan``.
        """
        self._gathers = [*gathers.values()]
        self._length = len(stacked[0])
        self._unroll = unroll
        shards = [stacked[i] for i in gathers]
        rest = [x for i, x in enumerate(stacked) if i not in gathers]
        initial, treedef = jax.tree.flatten(carry)

        # This is the step as a function of flat lists. It puts all slices into their order.
        def flat_step(carry: Arrays, ready: Arrays, rest: Arrays) -> Any:
            parameters = dict(zip(gathers, ready, strict=True))
            rest_slices = iter(rest)
            slices = [
                parameters[i] if i in gathers else next(rest_slices) for i in range(len(stacked))
            ]
            return step(jax.tree.unflatten(treedef, carry), slices)

        # While the step is traced, its modules must not gather these parameters themselves. The
        # value that a loop around this one has set is kept.
        names = frozenset(gather.name for gather in self._gathers)
        first_slices = self._gather(shards, layer=0), _slice_layer(rest, 0)
        with PREFETCHED(names | (PREFETCHED.value or frozenset())):
            self._jaxpr, out, initial = _trace_step(flat_step, initial, *first_slices)
        self._out_treedef = jax.tree.structure(out)  # the structure of (carry, results)
        self._num_carried = len(initial)

        # If a step returns an array of its carry unchanged, that array is one variable of the jaxpr
        # as input and output. It becomes a constant, because a constant is not copied in each
        # iteration, and its cotangents are summed over the layers, not carried.
        carry_in = self._jaxpr.jaxpr.invars[: len(initial)]
        carry_out = self._jaxpr.jaxpr.outvars[: len(initial)]
        pairs = zip(carry_in, carry_out, strict=True)
        self._is_changed = [variable_in is not variable_out for variable_in, variable_out in pairs]
        changed, self._unchanged = self._split_carry(initial)
        constants = [*self._jaxpr.consts, *self._unchanged]  # `_step` separates the two again
        self._arguments = constants, changed, shards, rest

    def _split_carry(self, carry: Arrays) -> tuple[list[Any], list[Any]]:
        """Returns the arrays of a whole carry that steps change, and those that none changes."""
        changed, unchanged = list[Any](), list[Any]()
        for x, is_changed in zip(carry, self._is_changed, strict=True):
            part = changed if is_changed else unchanged
            part.append(x)
        return changed, unchanged

    def _join_carry(self, changed: Arrays, unchanged: Arrays) -> list[Any]:
        """Joins the two parts of a carry into the whole: the inverse of `_split_carry`."""
        next_changed, next_unchanged = iter(changed), iter(unchanged)
        return [
            next(next_changed if is_changed else next_unchanged) for is_changed in self._is_changed
        ]

    def results(self) -> tuple[Any, Any]:
        """Runs the loop; returns the last carry, and the stacked results of the steps."""

        @jax.custom_vjp
        def run(*arguments: Arrays) -> Any:
            outputs, _ = self._run(*arguments, keep=False)
            return outputs

        # The backward rule gets the second result of the forward rule. JAX wants a pytree of arrays
        # there; a `jax.tree_util.Partial` is that, and a function as well.
        def forward(*arguments: Arrays) -> tuple[Any, Callable[..., Any]]:
            outputs, backward_pass = self._run(*arguments, keep=True)
            return outputs, backward_pass

        def backward(backward_pass: Callable[..., Any], cotangents: Any) -> Any:
            return backward_pass(cotangents)

        run.defvjp(forward, backward)
        last_changed, results = run(*self._arguments)
        leaves = [*self._join_carry(last_changed, self._unchanged), *results]
        return jax.tree.unflatten(self._out_treedef, leaves)  # type: ignore[no-any-return]

    def _gather(self, shards: Arrays, layer: object) -> list[Any]:
        """Gathers the parameters of one layer: (layers, …), sharded → (…), whole."""
        return apply_shardings(_slice_layer(shards, layer), [x.whole for x in self._gathers])

    def _step(self, inputs: _Inputs) -> tuple[list[Any], list[Any]]:
        """Runs the jaxpr of one layer.

        Returns:
          The arrays that steps change in the carry for the next layer, and the layer's results.
        """
        # The constants are the arrays that the jaxpr captures, then the unchanged carry.
        num_captured = len(self._jaxpr.consts)
        captured = inputs.constants[:num_captured]
        carry = self._join_carry(inputs.carry, inputs.constants[num_captured:])
        # The captured arrays are given to the jaxpr here. Otherwise they would have no cotangents.
        step = jaxpr_as_fun(self._jaxpr.replace(consts=captured))
        out = step(*carry, *inputs.ready, *inputs.rest)  # the lists of `flat_step`, flattened
        next_carry, results = out[: self._num_carried], out[self._num_carried :]
        next_changed, _ = self._split_carry(next_carry)
        return next_changed, results

    def _run(
        self, constants: Arrays, carry: Arrays, shards: Arrays, rest: Arrays, *, keep: bool
    ) -> Any:
        """Runs the loop forward.

        Args:
          constants: arrays that are captured, and arrays of the carry that no step changes.
          carry: the arrays of the first carry that steps change.
          shards: the parameters to gather: (layers, …).
          rest: all other stacked arrays: (layers, …).
          keep: whether to keep residuals, to differentiate the loop.

        Returns:
          A pair. Its first item is ``(last carry, stacked results)``, with only the arrays that
          steps change in the carry. Its second item is the backward pass: a function of the
          cotangents of the first item, and a pytree of the arrays that it needs. Without ``keep``,
          the second item is None.
        """
        # The trace of the body fills this list, because `jax.lax.scan` can only return arrays.
        # There is one pullback for each trace of the body, and all of them do the same.
        pullbacks: list[_PullBack] = []

        def body(state: tuple[Any, Any], layer: Any) -> Any:
            carry, ready = state
            # The last layer gathers itself again, because all iterations run one program.
            upcoming = self._gather(shards, jnp.minimum(layer + 1, self._length - 1))
            inputs = _Inputs(constants, carry, ready, _slice_layer(rest, layer))
            if not keep:
                carry, results = self._step(inputs)
                return (carry, upcoming), (results, [])
            carry, results, residuals, pull_back = self._differentiated_step(inputs)
            pullbacks.append(pull_back)
            return (carry, upcoming), (results, residuals)

        layers = jnp.arange(self._length)
        first_state = carry, self._gather(shards, layer=0)
        (last_carry, _), (results, residuals) = jax.lax.scan(
            body, first_state, layers, unroll=self._unroll
        )
        if not keep:
            return (last_carry, results), None
        # The arrays are arguments of the Partial, and so its leaves.
        backward = functools.partial(self._backward, pullbacks[-1])
        kept_arrays = constants, shards, rest, residuals
        return (last_carry, results), jax.tree_util.Partial(backward, *kept_arrays)

    def _differentiated_step(
        self, inputs: _Inputs
    ) -> tuple[list[Any], list[Any], list[Any], _PullBack]:
        """Runs one layer, and makes its pullback by ``jax.vjp``.

        The pullback is a function and also a pytree of the arrays that it has kept. All layers have
        the same operations, so their pullbacks have the same treedef, and the backward pass can
        rebuild them. Inputs of the layer are not kept, because the backward pass reads or gathers
        them again.

        Returns:
          Three lists of arrays: what the layer changes in the carry, its results, and the
          residuals; and the function that pulls cotangents back, which is the same for all layers.
        """
        leaves, treedef = jax.tree.flatten(inputs)
        # Only arrays of floating-point or complex numbers have cotangents. All outputs are also
        # auxiliary data, because the loop carries and stacks integers, too.
        slots = [slot for slot, x in enumerate(leaves) if is_inexact(x)]
        num_leaves = len(leaves)

        def differentiable(*inexact: object) -> Any:
            inputs = jax.tree.unflatten(treedef, replace_slots(leaves, slots, inexact))
            carry, results = self._step(inputs)
            return (_inexact(carry), _inexact(results)), (carry, results)

        inexact = [leaves[slot] for slot in slots]
        _, pullback, (carry, results) = jax.vjp(differentiable, *inexact, has_aux=True)
        arrays, pullback_treedef = jax.tree.flatten(pullback)
        # The backward pass has these inputs again, but it no longer has the carry.
        inputs_again = [*inputs.constants, *inputs.ready, *inputs.rest]
        residuals, positions = _find_residuals(arrays, inputs_again)

        def pull_back(arrays_again: Arrays, cotangents: object) -> _Inputs:
            """Returns the cotangents of the inputs of a layer, with None for integers.

            Args:
              arrays_again: the constants, then ``ready``, ``rest`` and the residuals of the layer.
              cotangents: for the arrays that the layer changes in the carry, and for its results.
            """
            pullback = jax.tree.unflatten(pullback_treedef, [arrays_again[i] for i in positions])
            by_slot = dict(zip(slots, pullback(cotangents), strict=True))
            d_leaves = [by_slot.get(slot) for slot in range(num_leaves)]
            d_inputs: _Inputs = jax.tree.unflatten(treedef, d_leaves)
            return d_inputs

        return carry, results, residuals, pull_back

    def _backward(
        self,
        pull_back: _PullBack,
        constants: Arrays,
        shards: Arrays,
        rest: Arrays,
        residuals: Arrays,
        cotangents: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """Runs the backward pass, from the last layer to the first.

        Args:
          pull_back: returns the cotangents of the inputs of a layer.
          constants: as in :meth:`_run`.
          shards: as in :meth:`_run`, (layers, …).
          rest: as in :meth:`_run`, (layers, …).
          residuals: the arrays that the forward pass has kept: (layers, …).
          cotangents: a pair, for the last carry and for the results, (layers, …).

        Returns:
          The cotangents of the arguments of the loop: constants, first carry, shards, rest.
        """

        def body(state: Any, inputs: Any) -> Any:
            d_constants, d_carry, ready = state  # ``ready``: the gathered parameters of this layer
            layer, layer_residuals, d_results = inputs
            # This gather runs while the layer computes. The first layer gathers itself again.
            upcoming = self._gather(shards, jnp.maximum(layer - 1, 0))
            arrays_again = [*constants, *ready, *_slice_layer(rest, layer), *layer_residuals]
            d_inputs = pull_back(arrays_again, (d_carry, d_results))
            # All layers use the constants, so their cotangents add up. None is no leaf for
            # `tree.map`, and both lists have it at the same places.
            d_constants = jax.tree.map(jnp.add, d_constants, d_inputs.constants)
            # The sharding of shards on gradients of whole parameters makes the compiler sum over
            # devices by a reduce-scatter.
            d_shards = apply_shardings(d_inputs.ready, [x.shard for x in self._gathers])
            d_carry = [x for x in d_inputs.carry if x is not None]  # the form of ``state``
            return (d_constants, d_carry, upcoming), (d_shards, d_inputs.rest)

        d_carry_out, d_results_out = cotangents
        # Pullbacks take cotangents of inexact arrays only.
        d_last, d_results = _inexact(d_carry_out), _inexact(d_results_out)
        zeros = [jnp.zeros_like(x) if is_inexact(x) else None for x in constants]
        first_state = zeros, d_last, self._gather(shards, self._length - 1)
        inputs = jnp.arange(self._length), residuals, d_results  # (layers, …)
        (d_constants, d_carry, _), (d_shards, d_rest) = jax.lax.scan(
            body, first_state, inputs, reverse=True, unroll=self._unroll
        )
        # The loop carried cotangents of inexact arrays only, but JAX wants an item for each array.
        d_inexact = iter(d_carry)
        d_first = [next(d_inexact) if is_inexact(x) else None for x in d_carry_out]
        return d_constants, d_first, d_shards, d_rest


def _find_residuals(arrays: Arrays, available: Arrays) -> tuple[list[Any], list[int]]:
    """Finds the arrays of a pullback that have to be kept for the backward pass.

    Args:
      available: the arrays that the backward pass has in any case.

    Returns:
      The residuals: the arrays that are not available, each once. And for each array of the
      pullback its position in ``[*available, *residuals]``.
    """
    # Arrays are found by identity, because a pullback that needs an input holds the same tracer.
    position_of = {id(x): position for position, x in enumerate(available)}
    residuals = list[Any]()
    for x in arrays:
        if id(x) not in position_of:
            position_of[id(x)] = len(available) + len(residuals)
            residuals.append(x)
    return residuals, [position_of[id(x)] for x in arrays]


def _trace_step(
    flat_step: Callable[..., object], initial: Arrays, ready: Arrays, rest: Arrays
) -> tuple[Any, Any, list[Any]]:
    """Traces a step with the dtypes that the carry has after it.

    Args:
      rest: the first layer's slices of all other stacked arrays.

    Returns:
      The jaxpr of the step; what the step returns, with types in place of arrays; and the first
      carry, in the dtypes of the jaxpr.
    """
    trace = jax.make_jaxpr(flat_step, return_shape=True)
    jaxpr, out = trace(initial, ready, rest)
    promoted = _promote_weak_types(initial, jaxpr.out_avals)
    # An array that keeps its dtype is the same object. Then nothing is traced again.
    if any(x is not y for x, y in zip(initial, promoted, strict=True)):
        jaxpr, out = trace(promoted, ready, rest)
    return jaxpr, out, promoted


def _promote_weak_types(initial: Arrays, out_avals: Sequence[Any]) -> list[Any]:
    """Gives arrays of a weak type in the first carry the dtypes that a step returns them in.

    ``jax.lax.scan`` does so too, and then traces the step again. A jaxpr has the dtypes of its
    trace in it, so it could not be called with the new ones.

    Args:
      initial: the first carry, such as a weak float32 of ``jnp.full``.
      out_avals: the types of what a step returns, the carry first, such as bfloat16.
    """
    promoted = []
    for x, aval in zip(initial, out_avals, strict=False):  # further results are not carried
        aval_in: Any = jax.typeof(x)
        if getattr(aval_in, "weak_type", False) and aval_in.dtype != aval.dtype:
            x = jax.lax.convert_element_type(x, jnp.result_type(x, aval.dtype))
        promoted.append(x)
    return promoted


def _slice_layer(arrays: Arrays, layer: object) -> list[Any]:
    """Returns the slices of one layer: (layers, …) → (…)."""
    return [jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for x in arrays]


def _inexact(arrays: Arrays) -> list[Any]:
    """Returns the arrays that have cotangents."""
    return [x for x in arrays if is_inexact(x)]
