"""Loops over layers in which the parameters of the next layer are gathered while one computes.

The loop carries the gathered parameters of its layer, and gathers those of the next one from the
shards: an operation of the same iteration that does not depend on it. Differentiated as it is, the
loop would keep all gathered parameters for the backward pass. So it has a rule of its own, which
gathers them again, in a loop of the same form that runs from the last layer to the first. JAX
shows this form in ``tests/overlap_test.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..activations.tracing import PREFETCHED, spec_of_slice
from ..activations.variables import modules_in, own_variables
from ..core.constrain import apply_shardings, mesh_here, type_spec
from ..specs.fitting import spec_axes
from .in_trace import replace_slots
from .tangents import is_inexact


class Gather(NamedTuple):
    """How the parameter of one layer is sharded: as it is kept, and where it is used."""

    name: Any  # the name and the path of its module, and its path in that
    stacked: Any  # the parameter of all layers
    shard: NamedSharding
    whole: NamedSharding


# The parameters that loops gather ahead, by the identity of the stacked array.
_GATHERS: ContextVar[dict[int, Gather] | None] = ContextVar("_GATHERS", default=None)


@contextlib.contextmanager
def prefetching(layers: Any, ahead: int, others: Sequence[Any]) -> Iterator[None]:
    """Within the block, a loop over stacked layers gathers their parameters ahead.

    These are the parameters that a strategy gathers in the layers, but in none of ``others``,
    modules that have a loop of their own, if that or the stack asks for it.
    """
    own = {id(inner) for module in others for _, inner in modules_in(module)}
    gathers = dict[int, Gather]()
    for _, module in modules_in(layers):
        tag = _compat.tag_of(module)
        if tag is None or id(module) in own:
            continue
        if not max([ahead, *(source.prefetch for source in tag.sources)]):
            continue
        for path, variable in own_variables(module):
            value = _compat.get_value(variable)
            spec, shape, is_gathered, declared = tag.specs.get(path, (None, (), False, None))
            typed = type_spec(value)
            is_whole = typed is not None and tag.axes.isdisjoint(spec_axes(typed))
            if is_gathered and not is_whole and isinstance(value, jax.core.Tracer):
                mesh = mesh_here(tag.mesh)
                specs = (spec_of_slice(x, shape, value.shape) for x in (declared, spec))
                of_layer = (PartitionSpec(*x.partitions[1:]) for x in specs)
                shard, whole = (NamedSharding(mesh, x) for x in of_layer)
                name = tag.name, tag.path, path
                gathers[id(value)] = Gather(name, value, shard, whole)
    token = _GATHERS.set(gathers)
    try:
        yield
    finally:
        _GATHERS.reset(token)


def scan(
    step: Callable[..., Any], carry: Any, stacked: Sequence[Any], **options: Any
) -> tuple[Any, Any]:
    """``jax.lax.scan``, which gathers ahead what :func:`prefetching` names."""
    known = _GATHERS.get() or {}
    gathers = {i: known[id(x)] for i, x in enumerate(stacked) if id(x) in known}
    if not gathers:
        return jax.lax.scan(step, carry, stacked, **options)
    loop = _Loop(step, carry, stacked, gathers, options["unroll"])
    return loop.results()


class _Loop:
    """A loop over the layers, with its rule for the backward pass.

    The step is a jaxpr of flat arrays, traced once: constants, which are the same in all
    iterations; what is carried; the gathered parameters; and slices of everything else.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        carry: Any,
        stacked: Sequence[Any],
        gathers: dict[int, Gather],
        unroll: Any,
    ):
        self._gathers, self._length, self._unroll = [*gathers.values()], len(stacked[0]), unroll
        shards = [stacked[i] for i in gathers]
        rest = [x for i, x in enumerate(stacked) if i not in gathers]
        given, treedef = jax.tree.flatten(carry)

        def flat_step(given: Any, ready: Any, rest: Any) -> Any:
            of_parameters, others = dict(zip(gathers, ready, strict=True)), iter(rest)
            slices = [
                of_parameters[i] if i in gathers else next(others) for i in range(len(stacked))
            ]
            return step(jax.tree.unflatten(treedef, given), slices)

        first = given, self._gathered(shards, 0), _at(rest, 0)
        names = frozenset(x.name for x in self._gathers)
        with PREFETCHED(names | (PREFETCHED.value or frozenset())):
            self._jaxpr, out = jax.make_jaxpr(flat_step, return_shape=True)(*first)
        self._out, self._num_given = jax.tree.structure(out), len(given)
        inner = self._jaxpr.jaxpr
        # What no step changes is a constant.
        pairs = zip(inner.invars[: len(given)], inner.outvars, strict=False)
        self._is_changed = [before is not after for before, after in pairs]
        groups = dict[bool, list[Any]]({True: [], False: [*self._jaxpr.consts]})
        for x, is_changed in zip(given, self._is_changed, strict=True):
            groups[is_changed].append(x)
        self._arguments = groups[False], groups[True], shards, rest
        self._given = given

    def results(self) -> tuple[Any, Any]:
        """The last carry, and what the steps return, stacked."""
        run = jax.custom_vjp(lambda *arguments: self._run(False, *arguments)[0])
        run.defvjp(
            lambda *arguments: self._run(True, *arguments),
            lambda pullback, cotangents: pullback(cotangents),
        )
        last, results = run(*self._arguments)
        new = iter(last)
        pairs = zip(self._given, self._is_changed, strict=True)
        final = [next(new) if is_changed else x for x, is_changed in pairs]
        return jax.tree.unflatten(self._out, [*final, *results])  # type: ignore[no-any-return]

    def _gathered(self, shards: Sequence[Any], layer: Any) -> list[Any]:
        """The parameters of one layer."""
        return apply_shardings(_at(shards, layer), [x.whole for x in self._gathers])

    def _step(self, constants: Any, carry: Any, ready: Any, rest: Any) -> tuple[Any, Any]:
        """One layer: what is carried to the next one, and what is stacked."""
        count = len(self._jaxpr.consts)
        new, same = iter(carry), iter(constants[count:])
        given = (next(new if is_changed else same) for is_changed in self._is_changed)
        step = jaxpr_as_fun(self._jaxpr.replace(consts=constants[:count]))
        out = step(*given, *ready, *rest)
        pairs = zip(out, self._is_changed, strict=False)
        return [x for x, is_changed in pairs if is_changed], out[self._num_given :]

    def _run(self, keep: bool, constants: Any, carry: Any, shards: Any, rest: Any) -> Any:
        """The results, and if they are differentiated the backward pass."""
        form: list[Any] = []

        def body(state: Any, layer: Any) -> Any:
            carry, ready = state
            upcoming = self._gathered(shards, jnp.minimum(layer + 1, self._length - 1))
            arguments = constants, carry, ready, _at(rest, layer)
            if not keep:
                carry, results = self._step(*arguments)
                return (carry, upcoming), (results, [])
            leaves, treedef = jax.tree.flatten(arguments)
            slots = [slot for slot, x in enumerate(leaves) if is_inexact(x)]

            def differentiable(*some: Any) -> Any:
                every = jax.tree.unflatten(treedef, replace_slots(leaves, slots, some))
                carry, results = self._step(*every)
                return (_inexact(carry), _inexact(results)), (carry, results)

            some = [leaves[slot] for slot in slots]
            _, pullback, (carry, results) = jax.vjp(differentiable, *some, has_aux=True)
            kept, of_pullback = jax.tree.flatten(pullback)
            # What the backward pass can read or gather again is not kept.
            known = {id(x): i for i, x in enumerate(jax.tree.leaves((constants, ready)))}
            known |= {id(x): -1 - i for i, x in enumerate(arguments[3])}
            places = [known.get(id(x)) for x in kept]
            form[:] = treedef, slots, of_pullback, places
            new = [x for x, place in zip(kept, places, strict=True) if place is None]
            return (carry, upcoming), (results, new)

        layers = jnp.arange(self._length)
        first = carry, self._gathered(shards, 0)
        (last, _), (results, kept) = jax.lax.scan(body, first, layers, unroll=self._unroll)
        backward = functools.partial(self._backward, *form)
        residuals = jax.tree_util.Partial(backward, constants, shards, rest, kept)
        return (last, results), residuals if keep else None

    def _backward(
        self,
        treedef: Any,
        slots: Sequence[int],
        of_pullback: Any,
        places: Sequence[int | None],
        constants: Any,
        shards: Any,
        rest: Any,
        kept: Any,
        cotangents: Any,
    ) -> Any:
        """The cotangents of the arguments, from the last layer to the first."""

        def body(state: Any, inputs: Any) -> Any:
            sums, cotangents, ready = state
            layer, kept, of_results = inputs
            upcoming = self._gathered(shards, jnp.maximum(layer - 1, 0))
            known, slices, new = [*constants, *ready], _at(rest, layer), iter(kept)
            leaves = [
                next(new) if i is None else known[i] if i >= 0 else slices[-1 - i] for i in places
            ]
            pullback = jax.tree.unflatten(of_pullback, leaves)
            found = dict(zip(slots, pullback((cotangents, of_results)), strict=True))
            every = [found.get(slot) for slot in range(treedef.num_leaves)]
            of_constants, of_carry, of_ready, of_rest = jax.tree.unflatten(treedef, every)
            sums = jax.tree.map(jnp.add, sums, of_constants)
            scattered = apply_shardings(of_ready, [x.shard for x in self._gathers])
            present = [x for x in of_carry if x is not None]
            return (sums, present, upcoming), (scattered, of_rest)

        last, of_results = map(_inexact, cotangents)
        zeros = [jnp.zeros_like(x) if is_inexact(x) else None for x in constants]
        first = zeros, last, self._gathered(shards, self._length - 1)
        inputs = jnp.arange(self._length), kept, of_results
        (sums, of_carry, _), (of_shards, of_rest) = jax.lax.scan(
            body, first, inputs, reverse=True, unroll=self._unroll
        )
        new = iter(of_carry)
        every = [next(new) if is_inexact(x) else None for x in cotangents[0]]
        return sums, every, of_shards, of_rest


def _at(arrays: Sequence[Any], layer: Any) -> list[Any]:
    return [jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False) for x in arrays]


def _inexact(arrays: Sequence[Any]) -> list[Any]:
    return [x for x in arrays if is_inexact(x)]
