"""Gradients of microbatches: summed in one program, and reduced over the devices once.

``accumulate_gradients`` differentiates the loss of one microbatch in each step of a scan::

    total = 0
    for microbatch in microbatches:                                # one `scan`
        total += grad(loss)(model, microbatch)
    gradient = total / steps

Microbatch i has the rows i, i + steps, i + 2·steps, …. The rows, (batch, …), are reshaped to
(batch / steps, steps, …), and the scan runs over the second dimension. In this way each device
keeps the rows that it has; blocks of successive rows would be on some of the devices only.

If rows are sharded over devices, each gradient is a sum over the devices. The totals of parameters
that are replicated over the axes of the rows are kept as *shard sums*, one for each device
(``partition/shard_sums.py``), and the shard sums are added up once, after the scan. On Explicit
axes the types say which parameters are replicated. On Auto axes, ``axis`` makes the axes Explicit
around the loop, so that parameters are gathered before it. In the loop they are Auto again, because
the loss is written for Auto axes.

This module builds on these functions:

* `ValueAndGrad.prepare` finds the arrays that are differentiated in a call (``PreparedCall``: their
  *slots*, which are their numbers among all arrays of the arguments; ``arrays()`` lists them);
  `ValueAndGrad.value_and_gradients` runs the call and returns the result of the loss and these
  gradients as a list; `ValueAndGrad.differentiate` does so with a function of the caller that
  differentiates the loss at chosen arrays; `PreparedCall.build_gradient` puts gradients into the
  form of the arguments.
* `ShardSums` has the mesh ``axes`` that shard the rows. ``zeros`` makes the first total of a
  parameter, ``(shards, *shape)``; ``evaluate`` calls a function that returns gradients by number,
  and returns some of them as shard sums. `add_up` sums over the shards.
* `with_auto_axes` calls a function of some inputs while axes are Auto; `retype` gives one array
  another type. `output_spec` is the spec of an output that is sharded like the rows of an input.
* `mesh_and_axes` checks the axes that the user names, and returns them as a tuple. `explicit_axes`
  runs a function while axes are Explicit; its ``in_sharding`` says how arguments are sharded then:
  a spec, or a `PathFunction`, which calls a function of path and value for the spec of each array.
* `type_spec` is the spec in the type of an array; None if none of its axes is Explicit.
* `axes_of` lists the mesh axes in one entry of a spec; `pad_entries` the entries of a spec, filled
  with None for the last dimensions.
* `raise_if_any` raises an error with a line for each item, and does nothing without items.
* `declared_rows` is the sharding that a strategy declares for the rows of an array, or None.
* `has_interleaved_pipeline` says whether a module has a 1F1B pipeline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..activations.axis_types import output_spec, with_auto_axes
from ..activations.tracing import declared_rows
from ..core.constrain import apply_shardings, retype, sharding_of, type_mesh, type_spec
from ..core.prefixes import PathFunction
from ..errors import NoMeshError, raise_if_any
from ..partition.axis_modes import explicit_axes
from ..partition.pipeline_1f1b import accumulate_interleaved
from ..partition.pipeline_schedule import has_interleaved_pipeline
from ..partition.shard_sums import ShardSums, add_up, dtype_of_sums
from ..partition.strategies import mesh_and_axes
from ..specs.fitting import (
    axes_of,
    axes_of_type,
    keep_axes,
    pad_entries,
    show,
    spec_axes,
    suggestion,
)
from ..specs.paths import Path, accessor, path_key
from ..specs.types import AxisName
from ..transforms import Carry, scan, value_and_grad
from ..transforms.grad import PreparedCall, ValueAndGrad
from ..transforms.in_trace import Function, replace_slots, traced_slots, type_text

# Values of arguments, by name.
_Arguments: TypeAlias = Mapping[str, Any]


@_compat.api_boundary
def accumulate_gradients(
    loss: Callable[..., object] | None = None,
    *,
    steps: int,
    argnums: object = 0,
    wrt: object = None,
    has_aux: bool = False,
    batch: str | Sequence[str] | None = None,
    axis: str | tuple[str, ...] | None = None,
    dtype: object = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the value and the gradient of a loss, microbatch by microbatch.

    It replaces :func:`~nnx_sharding.value_and_grad` if the activations of a full batch do not fit
    into memory. The microbatches run one after the other in one loop, so the program has the size
    of one of them. For a loss that is a mean over the rows of the batch, the results are those of
    the full batch. Side effects of the loss, such as on the statistics of BatchNorm and on random
    streams, happen once for each microbatch.

    On Explicit mesh axes, and on Auto axes that ``axis`` names, the gradients of parameters that
    are replicated over the axes of the rows are summed on each device, and reduced once, after the
    loop. Gradients of parameters that these axes shard are reduced for each microbatch, and so are
    values that a function computes in a ``shard_map``.

    Args:
      loss: the function, as for ``value_and_grad``: the mean over its rows.
      steps: the number of microbatches. It divides the first dimension of all arrays in the batch;
        on a mesh, the axes that shard that dimension divide what remains.
      argnums: as for ``value_and_grad``.
      wrt: as for ``value_and_grad``.
      has_aux: as for ``value_and_grad``. The auxiliary data of all microbatches are stacked.
      batch: the names of the arguments that are divided into microbatches; all their arrays have
        the rows of the batch in the first dimension. All other arguments, such as the weights of
        classes, are the same for all microbatches. By default, a batch is each argument that holds
        arrays but no modules or Variables, and is not differentiated, apart from scalars. If these
        arrays do not have equally many rows, or one argument has these rows and scalars, it is an
        error.
      axis: the axis that shards the rows, or a tuple of them, to reduce all gradients once: those
        of parameters that it shards, too, and those on Auto axes. Parameters that it shards are
        gathered before the loop: with whole parameters, each device adds up its own gradients, and
        the reduction follows the loop. Other axes shard the same arrays in the loop as before.
      dtype: the dtype in which gradients are summed and returned; None for their own. Complex
        gradients stay complex: they have a real and an imaginary part of this dtype, of at least
        float32.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, gradient)``, like the one of ``value_and_grad``.

    Raises:
      TypeError: ``steps`` is not a positive integer, or ``dtype`` has no floating-point numbers.
        When called: auxiliary data are not arrays.
      ValueError: when called, if no argument is a batch, arrays of the batch differ in the number
        of rows, ``batch`` names an unknown or differentiated argument, a differentiated argument
        may have the rows of the batch, or the number of rows is not a multiple of the steps times
        the devices that shard them.
      NoMeshError: when called with ``axis``, if neither the context nor an array has a mesh.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import accumulate_gradients, value_and_grad
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> def loss(model, x):
      ...     return (model(x) ** 2).mean()
      >>> x = jnp.arange(16.0).reshape(8, 2)
      >>> value, gradient = accumulate_gradients(loss, steps=4)(model, x)
      >>> expected, _ = value_and_grad(loss)(model, x)
      >>> bool(jnp.allclose(value, expected))
      True
    """
    # The steps have to be a Python int, because a traced number cannot be the length of a scan.
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise TypeError(
            f"accumulate_gradients: steps must be a positive integer, got {show(steps)}."
        )
    # A mean gradient is not an integer.
    if dtype is not None and not jnp.issubdtype(cast(Any, dtype), jnp.inexact):
        raise TypeError(
            f"accumulate_gradients: dtype={show(dtype)} cannot hold gradients, which are "
            "floating-point or complex numbers."
        )
    modes: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}

    # Without a loss, `accumulate_gradients(steps=4)` is itself the decorator of one.
    def decorate(loss: Callable[..., object]) -> Callable[..., Any]:
        """Returns the function with the arguments of ``loss`` that accumulates its gradients."""
        accumulation = _Accumulation(
            gradient=value_and_grad(loss, argnums=argnums, wrt=wrt, has_aux=has_aux, **modes),
            steps=steps,
            batch=batch,
            axis=axis,
            dtype=dtype,
            has_aux=has_aux,
            modes=modes,
        )

        @functools.wraps(loss)
        @_compat.api_boundary
        def accumulated(*args: object, **kwargs: object) -> Any:
            return accumulation.run(args, kwargs)

        return accumulated

    return decorate if loss is None else decorate(loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Accumulation:
    """The function that differentiates a loss, and the options of :func:`accumulate_gradients`.

    :meth:`run` is one call. It divides the batch, and :meth:`_accumulate` adds up the gradients by
    :meth:`_scan`, or by :meth:`_interleave` if the loss has a pipeline with the schedule 1F1B.

    Attributes:
      gradient: calls the loss, and differentiates it.
      steps, batch, axis, dtype, has_aux: the options.
      modes: the options of Flax, ``graph`` and ``graph_updates``.
    """

    gradient: ValueAndGrad[..., Any]
    steps: int
    batch: str | Sequence[str] | None
    axis: str | tuple[str, ...] | None
    dtype: Any
    has_aux: bool
    modes: Mapping[str, Any]

    def run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
        """Returns the value and the gradient for the arguments of the loss.

        ``args`` and ``kwargs`` are those arguments, with the whole batch. Raises the errors that
        :func:`accumulate_gradients` lists for a call.
        """
        signature = inspect.signature(self.gradient._fun)  # ``_fun`` is the loss
        # The object of a loss that is a method is the first argument.
        bound = signature.bind(*self.gradient._bound, *args, **kwargs)
        # This call has the whole batch. It serves to find the arrays that are differentiated, which
        # do not depend on the rows.
        call = self.gradient.prepare(bound.args, bound.kwargs)
        names = _batch_names(call, bound, self.batch)
        _check_rows(bound.arguments, names)  # raises unless all arrays have equally many rows
        shared = {name: x for name, x in bound.arguments.items() if name not in names}
        whole_batch = {name: bound.arguments[name] for name in names}
        # Declarations are for the user's arrays themselves, so they are read before the split.
        rows = [declared_rows(x) for x in jax.tree.leaves(whole_batch)]
        # (batch, …) → (batch / steps, steps, …); raises an error for rows that cannot be divided
        batch = {name: _split_rows(name, x, self.steps) for name, x in whole_batch.items()}
        if self.axis is None:
            return self._accumulate(bound, call, shared, batch, rows, auto=frozenset())
        return self._accumulate_on_explicit_axes(bound, call, shared, batch, rows)

    def _accumulate_on_explicit_axes(
        self,
        bound: inspect.BoundArguments,
        call: PreparedCall,
        shared: _Arguments,
        batch: _Arguments,
        rows: Sequence[NamedSharding | None],
    ) -> tuple[Any, Any]:
        """Runs `_accumulate` while the axes of the option ``axis`` are Explicit.

        Then types say how rows and parameters are sharded over these axes. In the loss, an axis
        that was Auto before is Auto again. The arguments and the result are those of `_accumulate`.

        Raises:
          NoMeshError: neither the context nor an array has a mesh.
        """
        assert self.axis is not None
        mesh = _mesh_of(call.flat.leaves)
        if mesh is None:
            raise NoMeshError(
                f"accumulate_gradients(axis={self.axis!r}): there is no mesh. Call within `with "
                "jax.set_mesh(mesh):`, or place the arguments on a mesh."
            )
        mesh, axes = mesh_and_axes("accumulate_gradients", mesh, self.axis, across_slices=True)
        explicit = axes_of_type(mesh, AxisType.Explicit)
        auto = frozenset(axes).difference(explicit)

        # `explicit_axes` retypes the arguments of this function, but nothing that it captures, such
        # as the values in `bound`. So all arguments of the loss are passed to it.
        def accumulate(shared: _Arguments, batch: _Arguments) -> tuple[Any, Any]:
            retyped = _replace_arguments(bound, shared)
            call = self.gradient.prepare(retyped.args, retyped.kwargs)
            return self._accumulate(retyped, call, shared, batch, rows, auto=auto)

        # The axes shard the rows of the batch, and nothing else, because shard sums need whole
        # parameters.
        shared_spec = functools.partial(_spec_without, axes)
        batch_spec = functools.partial(_spec_with_rows_over, axes)
        run = explicit_axes(
            accumulate,
            axes=self.axis,
            in_sharding=(_spec_of_each(shared_spec), _spec_of_each(batch_spec)),
        )
        # Outside of a trace, JAX needs the devices of the mesh, which types do not name.
        mesh_to_set = mesh if isinstance(mesh, Mesh) and _compat.trace_is_clean() else None
        try:
            with contextlib.nullcontext() if mesh_to_set is None else jax.set_mesh(mesh_to_set):
                return run(shared, batch)  # type: ignore[no-any-return]
        except ValueError as error:
            # The cause may be that the axes now shard the rows, but not in the user's types.
            _note_axes_added(error, axes, explicit, batch)
            raise

    def _accumulate(
        self,
        bound: inspect.BoundArguments,
        call: PreparedCall,
        shared: _Arguments,
        batch: _Arguments,
        rows: Sequence[NamedSharding | None],
        *,
        auto: frozenset[AxisName],
    ) -> tuple[Any, Any]:
        """Returns the mean value and gradient of the microbatches.

        The loss runs with Auto axes if it is written for these, and in the stages of a pipeline,
        because its layers do. Results get their types on Explicit axes back: gradients the types of
        their parameters, auxiliary data the types of the rows.

        Args:
          bound: the arguments of the loss, by name, with the whole batch.
          call: the call with these arguments, which says what is differentiated; it is not run.
          shared: the arguments that are the same for all microbatches.
          batch: the arguments with rows, reshaped to (batch / steps, steps, …).
          rows: how the rows of each array of the batch are declared to be sharded over Auto axes.
          auto: the axes that are Explicit around the loop, but Auto for the loss.

        Returns:
          The value, or with ``has_aux`` a pair of the value and the auxiliary data of all
          microbatches, (steps, …); and the gradient in the form of the differentiated arguments.
        """
        outer_mesh = jax.sharding.get_abstract_mesh()
        parameters = call.arrays()  # the arrays that are differentiated
        sums = _sums_over_rows(batch)  # None if no Explicit axis shards the rows
        is_split = [sums is not None and _is_whole_over(sums.axes, x) for x in parameters]
        microbatches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)  # (steps, rows, …)
        is_interleaved = has_interleaved_pipeline(call.flat.objects)  # schedule="1f1b"

        def mean_gradients(inputs: tuple[_Arguments, _Arguments]) -> tuple[Any, list[jax.Array]]:
            """Returns the mean value and the mean gradient of each differentiated array.

            ``inputs`` are ``shared`` and ``microbatches``. With ``has_aux``, the value is a pair of
            the mean and the auxiliary data.
            """
            shared, stacked = inputs
            arguments = _Microbatches(
                bound=bound, shared=shared, stacked=stacked, rows=rows, sums=sums, is_split=is_split
            )
            if is_interleaved:
                value, totals = self._interleave(arguments)
            else:
                value, totals = self._scan(arguments)
            means = [total / self.steps for total in totals]
            return value, [*map(_typed_like, means, parameters)]

        typed_batch = [x for x in jax.tree.leaves(microbatches) if type_spec(x) is not None]

        def retype_aux(x: jax.Array) -> jax.Array:
            """Types auxiliary data, (steps, …), as the output of a module for the rows is typed."""
            spec = output_spec(x, typed_batch[0], None) if typed_batch else PartitionSpec()
            return cast(jax.Array, retype(x, outer_mesh, spec))

        # The layers of a pipeline run in its stages, in which all axes are Auto.
        auto_in_loss = axes_of_type(outer_mesh, AxisType.Explicit) if is_interleaved else auto
        # This calls `mean_gradients` with these inputs, whose types are those of a mesh on which
        # `auto_in_loss` are Auto. In its result, `retype_aux` types only the auxiliary data:
        # gradients have their types already, and scalars need none.
        value, gradients = cast(
            tuple[Any, list[jax.Array]],
            with_auto_axes(
                (shared, microbatches), mean_gradients, frozenset(auto_in_loss), retype_aux
            ),
        )
        return value, call.build_gradient(gradients)

    def _scan(self, batch: _Microbatches) -> tuple[Any, Sequence[jax.Array]]:
        """Differentiates one microbatch after the other, in a scan.

        Returns:
          The mean value, or with ``has_aux`` a pair of it and the auxiliary data, (steps, …); and
          the sum of the gradients of each array that is differentiated.
        """

        def step(totals: list[Any], shared: _Arguments, microbatch: _Arguments) -> Any:
            """Adds the gradients of one microbatch to the totals, and returns its value.

            Args:
              totals: the totals so far, for each array that is differentiated; shard sums are
                (shards, *shape).
              shared: the arguments that are the same for all microbatches, by name.
              microbatch: the arguments with the rows of this one, (rows, …), by name.

            Returns:
              The new totals, and what the loss has returned.
            """
            value, gradients = batch.differentiate(self.gradient, shared, microbatch)
            if self.has_aux:
                _, aux = value
                _check_aux(aux)  # raises for values that cannot be stacked
            return [*map(_add, totals, gradients)], value

        # `prepare` finds the differentiated arrays without any rows.
        call = batch.prepare(self.gradient, batch.shared)
        # JAX makes no zeros of keys, and its error would name no path.
        self.gradient.check_types(call)
        # The scan carries totals. Shared arguments, such as modules, are the same in each step.
        # Values are stacked: (steps,).
        run = scan(
            step, in_axes=(Carry, None, 0), out_axes=(Carry, 0), length=self.steps, **self.modes
        )
        zeros = batch.zero_totals(call.arrays(), self.dtype)
        totals, values = run(zeros, batch.shared, batch.stacked)
        names = [call.plan.names[slot] for slot in call.slots]  # for example, ``model.up.kernel``
        whole_totals = []
        for total, name, has_shard_sums in zip(totals, names, batch.is_split, strict=True):
            if has_shard_sums:
                total = add_up(total, axis=0, name=name)  # (shards, *shape) → shape
            whole_totals.append(total)
        # Microbatches are equally large, so the mean of their means is the mean of the batch.
        value = (values[0].mean(), values[1]) if self.has_aux else values.mean()
        return value, whole_totals

    def _interleave(self, batch: _Microbatches) -> tuple[Any, Sequence[jax.Array]]:
        """Differentiates all microbatches in one loop of the pipeline that is in the loss.

        In a step of this loop, each stage runs the forward pass of one microbatch and the backward
        pass of another (1F1B). The result is that of `_scan`.
        """
        # (steps, rows, …) → (rows, …)
        first_microbatch = jax.tree.map(lambda x: x[0], batch.stacked)
        # The loss is traced for the first microbatch only. The loop replaces the arrays of this
        # microbatch, which it finds among the leaves of the call by their identity, by the others.
        call = batch.prepare(self.gradient, {**batch.shared, **first_microbatch})
        first_and_all = zip(
            jax.tree.leaves(first_microbatch), jax.tree.leaves(batch.stacked), strict=True
        )
        value, totals = accumulate_interleaved(
            self.gradient,
            call,
            batch=[*first_and_all],
            dtype=self.dtype,
            row_axes=() if batch.sums is None else batch.sums.axes,
            is_split=batch.is_split,
        )
        if self.has_aux:  # `_scan` makes the same check in each step, before it stacks
            _, aux = value
            _check_aux(aux)  # raises for values that cannot be stacked
        return value, totals


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Microbatches:
    """The arguments of a loss for all microbatches, and how their gradients are summed.

    Attributes:
      bound: the arguments by name, for the whole batch.
      shared: the arguments that are the same for all microbatches, by name.
      stacked: the arguments with rows, (steps, rows, …), by name.
      rows: the sharding over Auto axes that is declared for the rows of each array of ``stacked``,
        in the order of its leaves; None for an array without a declaration.
      sums: splits sums over rows; None if rows are not known to be sharded.
      is_split: for each array that is differentiated, whether its total is kept as shard sums. All
        are False without ``sums``.
    """

    bound: inspect.BoundArguments
    shared: _Arguments
    stacked: _Arguments
    rows: Sequence[NamedSharding | None]
    sums: ShardSums | None
    is_split: Sequence[bool]

    def as_declared(self, microbatch: _Arguments) -> _Arguments:
        """Constrains the rows of a microbatch like the declared rows of the whole batch.

        The scan takes microbatches out of the batch, and on Auto axes nothing says how such a slice
        is sharded. A pipeline in the loss has to know it, because it divides further arguments of
        layers only if their rows are known to be sharded.
        """
        if not any(self.rows):  # nothing is declared for any array
            return microbatch
        leaves, treedef = jax.tree.flatten(microbatch)
        constrained = apply_shardings(leaves, self.rows)
        return cast(_Arguments, jax.tree.unflatten(treedef, constrained))

    def prepare(self, gradient: ValueAndGrad[..., Any], arguments: _Arguments) -> PreparedCall:
        """Prepares a call of the loss in which some arguments have these values.

        All other arguments are those of ``bound``, that is, of the whole batch.
        """
        bound = _replace_arguments(self.bound, arguments)
        return gradient.prepare(bound.args, bound.kwargs)

    def differentiate(
        self, gradient: ValueAndGrad[..., Any], shared: _Arguments, microbatch: _Arguments
    ) -> tuple[Any, Sequence[jax.Array]]:
        """Calls and differentiates the loss of one microbatch.

        Args:
          shared: the arguments that are the same for all microbatches, as the scan passes them.
          microbatch: the arguments with the rows of this one, (rows, …), by name.

        Returns:
          The result of the loss, and the gradient of each array that is differentiated, (*shape) or
          as shard sums (shards, *shape).
        """
        microbatch = self.as_declared(microbatch)
        call = self.prepare(gradient, {**shared, **microbatch})
        if self.sums is None:
            return gradient.value_and_gradients(call)
        rows = jax.tree.leaves(microbatch)
        return _differentiate_by_shards(gradient, call, self.sums, rows, self.is_split)

    def zero_totals(self, parameters: Sequence[jax.Array], dtype: Any) -> list[jax.Array]:
        """Returns the totals with which the scan starts, in the form that ``is_split`` says.

        Args:
          dtype: the option of :func:`accumulate_gradients`.
        """
        totals = []
        for x, has_shard_sums in zip(parameters, self.is_split, strict=True):
            total_dtype = dtype_of_sums(x, dtype)
            if has_shard_sums:
                assert self.sums is not None
                totals.append(self.sums.zeros(x, total_dtype))  # (shards, *shape)
            else:
                totals.append(jnp.zeros_like(x, total_dtype))
        return totals


def _replace_arguments(bound: inspect.BoundArguments, values: _Arguments) -> inspect.BoundArguments:
    """Returns a copy of the arguments of a call, with other values of some of them, by name.

    ``bound`` keeps its values, because it outlives the trace that the new values are from.
    """
    arguments = OrderedDict({**bound.arguments, **values})
    return inspect.BoundArguments(bound.signature, arguments)


def _differentiate_by_shards(
    gradient: ValueAndGrad[..., Any],
    call: PreparedCall,
    sums: ShardSums,
    rows: Sequence[jax.Array],
    is_split: Sequence[bool],
) -> tuple[Any, Sequence[jax.Array]]:
    """Calls and differentiates the loss of one microbatch; some gradients are shard sums.

    `sums.evaluate` runs the backward pass operation by operation, and has to know which of its
    inputs have rows. So all arrays of the call are inputs here, not only the differentiated ones.
    An array is identified by its position among these inputs.

    Args:
      call: the call of the loss with the microbatch.
      is_split: for each array that is differentiated, whether its gradient is shard sums.

    Returns:
      The result of the loss, and the gradient of each array that is differentiated, (*shape) or as
      shard sums (shards, *shape).
    """
    gradient.check_types(call)  # raises for arrays without a derivative
    slots = traced_slots(call.flat.leaves)
    position_of = {slot: position for position, slot in enumerate(slots)}
    targets = [position_of[slot] for slot in call.slots]
    # Each input with rows has them in dimension 0. The call holds the same objects as ``rows``.
    ids_with_rows = {id(x) for x in rows}
    row_dims = [0 if id(call.flat.leaves[slot]) in ids_with_rows else None for slot in slots]
    numbers_to_split = [number for number, has_shard_sums in enumerate(is_split) if has_shard_sums]

    def derivative_of(function: Function, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the derivative and the outputs, for `gradient.differentiate`.

        Args:
          function: a function of all arrays of the call. It returns the value in a list, and all
            outputs of the call.
        """
        gradients_of = functools.partial(_gradients_at, function, targets)
        gradients, outputs = sums.evaluate(gradients_of, [*inputs], row_dims, numbers_to_split)
        return [*gradients.values()], outputs  # in the order of ``targets``

    return gradient.differentiate(call.plan, call.flat, slots, derivative_of)


def _gradients_at(
    function: Function, targets: Sequence[int], inputs: Sequence[Any]
) -> tuple[dict[int, Any], Any]:
    """Differentiates a function of a list of arrays with respect to some of them.

    Args:
      function: returns its value in a list of one item, and further outputs.
      targets: the positions of the arrays with respect to which it is differentiated.

    Returns:
      The gradients by their numbers in ``targets``, and the further outputs.
    """

    def value_at(target_arrays: Sequence[Any]) -> tuple[Any, Any]:
        [value], outputs = function(replace_slots(inputs, targets, target_arrays))
        return value, outputs

    derivative = jax.value_and_grad(value_at, has_aux=True)
    (_, outputs), gradients = derivative([inputs[i] for i in targets])
    return dict(enumerate(gradients)), outputs


def _add(total: jax.Array, gradient: jax.Array) -> jax.Array:
    """Adds a gradient to a total; the sum has the total's dtype and type on Explicit axes."""
    return total + _typed_like(gradient.astype(total.dtype), total)


def _typed_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Gives an array the type of another one on Explicit axes; returns it as it is without one."""
    spec = type_spec(like)
    return x if spec is None else cast(jax.Array, retype(x, type_mesh(like), spec))


def _is_whole_over(axes: Sequence[AxisName], parameter: jax.Array) -> bool:
    """Returns whether a parameter is known to be replicated over the axes of the rows.

    Only the total of such a parameter is kept as shard sums. If each device has a part of a
    parameter, shard sums would take the memory of the whole one.
    """
    spec = type_spec(parameter)
    return spec is not None and {*axes}.isdisjoint(spec_axes(spec))


def _spec_of_each(spec_of: Callable[[Any], PartitionSpec]) -> PathFunction:
    """Returns an ``in_sharding`` that calls a function for the spec of each array in an argument.

    The function is also called for a Variable, with the one array that the Variable holds.
    """

    def spec_of_subject(_: Path, subject: object) -> PartitionSpec:
        return spec_of(_compat.get_value(subject) if _compat.is_variable(subject) else subject)

    # A `PathFunction` calls its function for each path that is not in ``by_path``.
    return PathFunction(spec_of_subject, by_path={})


def _spec_without(axes: Collection[AxisName], array: Any) -> PartitionSpec:
    """Returns the spec in an array's type without some axes.

    For the axis ``"data"``, it is ``P(None, "model")`` for an array with ``P("data", "model")``.
    """
    spec = type_spec(array)
    if spec is None or not array.ndim:  # no Explicit axis shards it
        return PartitionSpec()
    other_axes = set(spec_axes(spec)).difference(axes)
    return PartitionSpec(*pad_entries(keep_axes(spec, other_axes), array.ndim))


def _spec_with_rows_over(axes: Sequence[AxisName], array: Any) -> PartitionSpec:
    """Returns the spec in an array's type, with its rows, the first dimension, sharded over axes.

    For the axis ``"data"``, it is ``P("data", "model")`` for an array with ``P(None, "model")``.
    """
    spec = type_spec(array)
    if spec is None:  # no Explicit axis shards it
        return PartitionSpec(tuple(axes))
    # All of the axes may shard the rows already, perhaps in another order or among others. Then
    # the spec is kept, because another order would move the rows.
    if set(axes).issubset(_row_axes(array)):
        return PartitionSpec(*spec.partitions)
    rows_entry, *other_entries = pad_entries(_spec_without(axes, array), array.ndim)
    # The axes come first: each of their shards is divided over the other axes of the rows.
    return PartitionSpec((*axes, *axes_of(rows_entry)), *other_entries)


def _mesh_of(arrays: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """Returns the mesh in context, or else the mesh of the first array that has one, or None.

    The mesh of a tracer is the one in its type, which is abstract.
    """
    meshes = (getattr(sharding_of(x), "mesh", None) for x in arrays)
    placed = (mesh for mesh in meshes if mesh is not None and not mesh.empty)
    return _compat.context_mesh() or next(placed, None)


def _batch_names(
    call: PreparedCall, bound: inspect.BoundArguments, batch: str | Sequence[str] | None
) -> list[str]:
    """Returns the names of the arguments of the loss that are divided into microbatches.

    Args:
      call: the call. An argument that it differentiates is no batch.
      batch: the name, or names, that the user gave; None to find them.

    Raises:
      ValueError: a name is unknown, or names a differentiated argument; or no argument has rows; or
        an argument has other values besides rows; or a differentiated one may have the rows, too.
    """
    # Differentiated arguments have to be known by name, because they may be bare arrays, too. Each
    # is a target of the call, and has the name that messages use, such as ``args[0]``.
    differentiated = _parameters_of(bound, {x.argument.name for x in call.targets})
    if batch is None:
        return _find_batch(bound.arguments, differentiated)
    # Names are checked because a misspelt one would make its rows the same for all microbatches.
    names = [batch] if isinstance(batch, str) else list(batch)
    arguments = bound.arguments
    raise_if_any(
        ValueError,
        "accumulate_gradients: batch names unknown arguments:",
        [f"  {name!r}{suggestion(name, arguments)}" for name in names if name not in arguments],
        f"The arguments: {', '.join(arguments)}.",
    )
    raise_if_any(
        ValueError,
        "accumulate_gradients: batch names arguments that are differentiated:",
        [f"  {name!r}" for name in names if name in differentiated],
        "The gradients of all microbatches are added up, which those of other rows cannot be.",
    )
    return names


def _find_batch(arguments: Mapping[str, Any], differentiated: Collection[str]) -> list[str]:
    """Returns the names of the arguments that hold arrays with rows, and nothing else.

    Raises:
      ValueError: as in `_batch_names`.
    """
    names = list[str]()
    # For arguments that hold rows and other values, and for differentiated arguments: the lengths
    # of the first dimension of their arrays.
    mixed, may_have_rows = dict[str, set[int]](), dict[str, set[int]]()
    contents = {name: _Contents.of(value) for name, value in arguments.items()}
    for name, content in contents.items():
        if content.has_modules or not content.row_counts:
            continue
        if name in differentiated:
            # Differentiated Variables are parameters. Bare arrays may be, or may have rows.
            if not content.has_variables:
                may_have_rows[name] = content.row_counts
        elif not content.has_others:
            names.append(name)
        elif not content.has_variables:
            mixed[name] = content.row_counts
    if not names and not mixed:
        raise ValueError(
            "accumulate_gradients: no argument is a batch of arrays: each is a scalar, holds "
            "modules, or is differentiated. Name those that are with batch=..."
        )
    batch_rows = set[int]().union(*(contents[name].row_counts for name in names))
    # The rows of these arguments would be the same for all microbatches, so this is an error. If
    # there is no other batch, all of them may be it.
    partly_batch = [name for name, rows in mixed.items() if not names or rows & batch_rows]
    raise_if_any(
        ValueError,
        "accumulate_gradients: these have the rows of the batch, and values without rows:",
        [f"  {name}" for name in partly_batch],
        "Pass what has no rows as an argument of its own, or name the arguments that have the rows "
        "with batch=...",
    )
    # Without modules and Variables, a single differentiated argument holds the parameters.
    has_objects = any(x.has_modules or x.has_variables for x in contents.values())
    if len(differentiated) > 1 or has_objects:
        with_rows = [name for name, rows in may_have_rows.items() if rows == batch_rows]
        batch_option = names[0] if len(names) == 1 else tuple(names)
        raise_if_any(
            ValueError,
            "accumulate_gradients: these are differentiated, and have as many rows as the batch:",
            [f"  {name}" for name in with_rows],
            "The gradients of all microbatches are added up, which those of other rows cannot be. "
            "If these are parameters, whose first dimension is as long by chance, pass "
            f"batch={batch_option!r}.",
        )
    return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Contents:
    """What an argument of the loss holds.

    Attributes:
      has_modules: whether it holds modules, which are no rows.
      has_variables: whether it holds Variables.
      row_counts: the lengths of the first dimension that its arrays and Variables have. Scalars,
        such as a step count, have none.
      has_others: whether it holds anything besides arrays and Variables with rows.
    """

    has_modules: bool
    has_variables: bool
    row_counts: set[int]
    has_others: bool

    @classmethod
    def of(cls, value: object) -> _Contents:
        """Returns the contents of an argument."""
        leaves = jax.tree.leaves(value, is_leaf=_compat.is_graph_object)
        variables = [x for x in leaves if _compat.is_variable(x)]
        # Modules are left out first, because JAX says that a module is no array in an error with
        # its text, which takes a tenth of the trace.
        modules = [x for x in leaves if _compat.is_graph_object(x) and not _compat.is_variable(x)]
        arrays = [] if modules else [x for x in leaves if _compat.is_array_like(x) and jnp.ndim(x)]
        return cls(
            has_modules=bool(modules),
            has_variables=bool(variables),
            row_counts={jnp.shape(x)[0] for x in arrays},
            has_others=len(arrays) < len(leaves),
        )


def _parameters_of(bound: inspect.BoundArguments, names: Collection[str]) -> set[str]:
    """Returns the parameters of the loss through which arguments with some names are passed.

    For ``f(x, *args, **kwargs)``, ``args[0]`` is passed through ``args``, and ``y`` through
    ``kwargs``.
    """
    parameters = {name for name in names if name in bound.arguments}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            holds_some = any(x.startswith(f"{name}[") for x in names)
        elif parameter.kind is parameter.VAR_KEYWORD:
            holds_some = any(x in bound.arguments.get(name, {}) for x in names)
        else:
            continue
        if holds_some:
            parameters.add(name)
    return parameters


def _check_rows(arguments: _Arguments, names: Sequence[str]) -> None:
    """Raises a ``ValueError`` unless all arrays of the batch have equally many rows.

    If the numbers differ, nobody knows which arrays are the batch, and which are constants.

    Args:
      names: the names of those that are divided into microbatches.
    """
    shapes: dict[str, tuple[int, ...]] = {}  # by the expression for an array: batch['x']
    for name in names:
        for path, array in jax.tree_util.tree_leaves_with_path(arguments[name]):
            shapes[accessor(name, tuple(map(path_key, path)))] = jnp.shape(array)
    if len({shape[:1] for shape in shapes.values()}) > 1:
        raise_if_any(
            ValueError,
            "accumulate_gradients: not all arrays of the batch have equally many rows, the first "
            "dimension:",
            [f"  {place}: shape {shape}" for place, shape in shapes.items()],
            "Name the arguments that have the rows: batch='x', or batch=('x', 'y'). All others, "
            "such as weights of classes, are the same for all rows.",
        )


def _note_axes_added(
    error: ValueError, axes: Sequence[AxisName], explicit: frozenset[AxisName], batch: _Arguments
) -> None:
    """Adds a note to an error of the loss if the option ``axis`` may be its cause.

    In the loop, ``axis`` shards the rows. It may be an Explicit axis that does not shard them in
    the types of the batch. Then the loss sees other types than the user's, and a ``shard_map`` in
    the loss that is written for the user's types fails.

    Args:
      batch: the arguments with rows, as the user has typed them.
    """
    axes_in_types = {axis for x in jax.tree.leaves(batch) for axis in _row_axes(x)}
    added = [repr(axis) for axis in axes if axis in explicit and axis not in axes_in_types]
    if added:
        error.add_note(
            "accumulate_gradients(axis=...) shards the rows of each microbatch over "
            f"{', '.join(added)}, too, which does not shard those of the batch. On Explicit axes, "
            "leave axis out: the types of the batch say which axes shard its rows."
        )


def _split_rows(name: str, value: object, steps: int) -> Any:
    """Reshapes each array of an argument from (batch, …) to (batch / steps, steps, …).

    Args:
      value: the argument: a pytree of arrays with rows.

    Raises:
      ValueError: the rows of some arrays cannot be divided (`_why_indivisible`).
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    indivisible: list[str] = []
    for path, x in leaves:
        reason = _why_indivisible(x, steps)
        if reason:
            place = accessor(name, tuple(map(path_key, path)))
            indivisible.append(f"  {place}: shape {jnp.shape(x)}{reason}")
    raise_if_any(
        ValueError,
        f"accumulate_gradients: these cannot be divided into {steps} equal microbatches:",
        indivisible,
        "The first dimension is that of the rows; each shard of them is divided.",
    )
    split = [jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:])) for _, x in leaves]
    return jax.tree_util.tree_unflatten(treedef, split)


def _why_indivisible(x: Any, steps: int) -> str:
    """Returns the reason why the rows of an array cannot be divided into microbatches.

    They can be if ``steps`` times the devices that shard the rows divides their number. On Auto
    axes only ``steps`` counts, because the type of an array says nothing of its devices.

    Returns:
      The end of a line of an error, after the shape: ``: 6 rows are not a multiple of 4``. Empty if
      the rows can be divided.
    """
    if not jnp.ndim(x):
        return ", which has no rows"
    rows = jnp.shape(x)[0]
    axis_sizes = {axis: type_mesh(x).shape[axis] for axis in _row_axes(x)}
    # Each device divides its own rows, so that no row has to move.
    factors = (steps, *axis_sizes.values())
    divisor = math.prod(factors)
    if rows % divisor == 0:
        return ""
    if not axis_sizes:  # no Explicit axis shards the rows
        return f": {rows} rows are not a multiple of {steps}"
    shards = " × ".join(f"{axis!r} ({size})" for axis, size in axis_sizes.items())
    product = f"{' × '.join(map(str, factors))} = {divisor}"
    return f", rows sharded over {shards}: {rows} rows are not a multiple of {product}"


def _row_axes(x: Any) -> tuple[Any, ...]:
    """Returns the Explicit mesh axes that shard the rows of an array, its first dimension."""
    spec = type_spec(x)  # None: no axis in the type is Explicit
    return () if spec is None else axes_of(pad_entries(spec, 1)[0])


def _check_aux(aux: object) -> None:
    """Raises a TypeError unless the auxiliary data of a loss are arrays, which can be stacked.

    Modules and Variables may be in them, too: `scan` stacks the arrays that they hold.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(aux, is_leaf=_compat.is_graph_object)
    raise_if_any(
        TypeError,
        "accumulate_gradients: what the loss returns besides the scalar is stacked; not arrays:",
        [
            f"  {accessor('aux', tuple(map(path_key, path)))}: {type_text(x)}"
            for path, x in leaves
            if not (_compat.is_array_like(x) or _compat.is_graph_object(x))
        ],
        "Return only arrays or numbers.",
    )


def _sums_over_rows(batch: _Arguments) -> ShardSums | None:
    """Returns shard sums over the Explicit axes that shard the rows; None if there are none.

    Arrays may be sharded over different axes. Then the array with the most axes decides. Any choice
    gives the right sums, because a sum may be split in any way. A sum that is split in another way
    than the rows only takes more time.
    """
    arrays = jax.tree.leaves(batch)
    most_sharded = max(arrays, key=lambda x: len(_row_axes(x)), default=None)
    if most_sharded is None or not _row_axes(most_sharded):
        return None
    return ShardSums(type_mesh(most_sharded), _row_axes(most_sharded))
