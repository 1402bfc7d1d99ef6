"""Gradients of microbatches: summed in one program, and reduced over the devices once.

``accumulate_gradients`` differentiates the loss of one microbatch in each step of a scan::

    total = 0
    for microbatch in microbatches:                                # one `scan`
        total += grad(loss)(model, microbatch)
    gradient = total / steps

Microbatch i has the rows i, i + steps, i + 2·steps, …: the rows, (batch, …), are reshaped to
(batch / steps, steps, …), and the scan runs over the second dimension. So each device keeps the
rows that it has; blocks of successive rows would be on some of the devices only.

If rows are sharded over devices, each gradient is a sum over these. The totals of parameters in
layers that compute each row by itself are kept as *partial sums*, one for each device
(``transforms/partial_sums.py``), and these are added up once, after the scan. Partial sums need
Explicit axes, on which the type of an array says how it is sharded.

What it builds on:

* `ValueAndGrad.prepare` finds the arrays that are differentiated in a call (``PreparedCall``: their
  *slots*, which are their numbers among all arrays of the arguments, in ``slots``; those with
  partial sums in ``partial``); `value_and_gradients` returns the value and a list with their
  gradients; `PreparedCall.build_gradient` puts such a list into the form of the arguments.
* `type_spec` is the spec in the type of an array; None if none of its axes is Explicit.
* `axes_of` lists the mesh axes in one entry of a spec; `pad_entries` the entries of a spec, filled
  with None for the last dimensions.
* `raise_listed` raises an error with a line for each item, and does nothing without items.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..activations.axis_types import output_spec, with_auto_axes
from ..core.constrain import retype, type_mesh, type_spec
from ..core.prefixes import PathFunction
from ..errors import raise_listed
from ..partition.axis_modes import explicit_axes
from ..partition.pipeline_1f1b import accumulate_interleaved
from ..partition.pipeline_schedule import has_interleaved_pipeline
from ..partition.shard_sums import add_up
from ..specs.fitting import axes_of, axes_of_type, keep_axes, pad_entries, spec_axes, suggestion
from ..specs.paths import Path, accessor, path_key
from ..transforms import Carry, scan, value_and_grad
from ..transforms.grad import PreparedCall, ValueAndGrad
from ..transforms.in_trace import type_text
from ..transforms.partial_sums import PartialSums, with_sums

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

    It replaces :func:`~nnx_sharding.value_and_grad` where the activations of a full batch do not
    fit into memory. The microbatches run one after the other in one loop, so the program has the
    size of one of them. For a loss that is a mean over the rows of the batch, the results are those
    of the full batch. Side effects of the loss, such as on the statistics of BatchNorm and on
    random streams, happen once for each microbatch.

    On Explicit mesh axes, and on Auto axes that ``axis`` names, the gradients of layers that
    compute each row independently, such as ``nnx.Linear``, are summed on each device and reduced
    once, after the loop, if the parameter is replicated over the axes of the rows. All others, such
    as those of ``BatchNorm`` and of your own modules, are reduced for each microbatch. With
    ``pipeline(schedule="1f1b")`` these are reduced once, too.

    Args:
      loss: the function, as for ``value_and_grad``: the mean over its rows.
      steps: the number of microbatches. It divides the first dimension of all arrays in the batch;
        on a mesh, the axes that shard that dimension divide what remains.
      argnums: as for ``value_and_grad``.
      wrt: as for ``value_and_grad``.
      has_aux: as for ``value_and_grad``. The auxiliary data of all microbatches are stacked.
      batch: the names of the arguments that are divided into microbatches; all their arrays have
        the rows of the batch in the first dimension. All other arguments, such as the weights of
        classes, are the same for all microbatches. By default, all that hold arrays but no modules
        or Variables and are not differentiated, apart from scalars; if these arrays do not have
        equally many rows, it is an error.
      axis: on Auto mesh axes, the axis that shards the rows, or a tuple of them. It is Explicit
        within the loop, where parameters are replicated over it, so that the reduction follows the
        loop. What other axes shard, they shard in the loop too.
      dtype: the dtype in which gradients are summed and returned; None for their own.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, gradient)`` like that of ``value_and_grad``.

    Raises:
      TypeError: ``steps`` is not a positive integer. When called: auxiliary data are not arrays.
      ValueError: when called, if no argument is a batch, arrays of the batch differ in the number
        of rows, ``batch`` names an unknown argument, or the rows are not a multiple of the steps
        times the devices that shard them.

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
    # A traced number would be no length of a scan.
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise TypeError(f"accumulate_gradients: steps must be a positive integer, got {steps!r}.")
    modes: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}

    # Without a loss, `accumulate_gradients(steps=4)` is itself the decorator of one.
    def decorate(loss: Callable[..., object]) -> Callable[..., Any]:
        gradient = value_and_grad(loss, argnums=argnums, wrt=wrt, has_aux=has_aux, **modes)
        accumulation = _Accumulation(gradient, steps, batch, axis, dtype, has_aux, modes)

        @functools.wraps(loss)
        @_compat.api_boundary
        def accumulated(*args: object, **kwargs: object) -> Any:
            return accumulation.run(args, kwargs)

        return accumulated

    return decorate if loss is None else decorate(loss)


@dataclasses.dataclass(frozen=True)
class _Accumulation:
    """What differentiates a loss, and the options of :func:`accumulate_gradients`."""

    gradient: ValueAndGrad[..., Any]
    steps: int
    batch: str | Sequence[str] | None
    axis: str | tuple[str, ...] | None
    dtype: Any
    has_aux: bool
    modes: Mapping[str, Any]  # of Flax: graph and graph_updates

    def run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
        """Returns the value and the gradient for the arguments of the loss."""
        signature = inspect.signature(self.gradient._fun)
        # In front, the object of a loss that is a method.
        bound = signature.bind(*self.gradient._bound, *args, **kwargs)
        names = _batch_names(self.gradient, bound, self.batch)
        _check_rows(bound.arguments, names)
        batch = {name: _split_rows(name, bound.arguments[name], self.steps) for name in names}
        rest = {name: x for name, x in bound.arguments.items() if name not in names}
        if self.axis is None:
            return self._accumulate(bound, rest, batch)
        # Parameters and other arguments are replicated over the axis, as partial sums need it.
        in_sharding = (_types_over_others(self.axis), _types_over_others(self.axis, rows=True))

        # Both are arguments and not in `bound`: `explicit_axes` changes only the types of these.
        def accumulate(rest: _Arguments, batch: _Arguments) -> tuple[Any, Any]:
            return self._accumulate(bound, rest, batch)

        explicit = explicit_axes(accumulate, axes=self.axis, in_sharding=in_sharding)
        return explicit(rest, batch)  # type: ignore[no-any-return]

    def _accumulate(
        self, bound: inspect.BoundArguments, rest: _Arguments, batch: _Arguments
    ) -> tuple[Any, Any]:
        """Returns the mean value and gradient of the microbatches, which a scan runs over.

        Args:
          bound: the arguments of the loss, by name; changed here.
          rest: those of them that are the same for all microbatches.
          batch: those with rows, reshaped to (batch / steps, steps, …).

        Returns:
          The value, with ``has_aux`` a pair of it and the auxiliary data of all microbatches,
          (steps, …); and the gradient in the form of the differentiated arguments.
        """
        bound.arguments.update(rest)  # with the types that `explicit_axes` has given them
        sums = _partial_sums_over_rows(batch)
        # Of the whole batch: which arrays are differentiated does not depend on the rows.
        prepared = self.gradient.prepare(bound.args, bound.kwargs, sums)
        if has_interleaved_pipeline(prepared.flat.objects):
            return self._interleave(bound, rest, batch, sums)

        def step(totals: list[Any], rest: _Arguments, microbatch: _Arguments) -> Any:
            """Adds the gradients of one microbatch to the totals, and returns its value."""
            bound.arguments.update({**rest, **microbatch})
            call = self.gradient.prepare(bound.args, bound.kwargs, sums)
            value, gradients = with_sums(sums, self.gradient.value_and_gradients, call, sums)
            _check_aux(value[1] if self.has_aux else ())
            pairs = zip(totals, gradients, strict=True)
            return [total + d.astype(total.dtype) for total, d in pairs], value

        # Totals are carried, modules stay whole, and the rows are split along axis 1, the steps of
        # (batch / steps, steps, …). Values are stacked: (steps,).
        run = scan(
            step, in_axes=(Carry, None, 1), out_axes=(Carry, 0), length=self.steps, **self.modes
        )
        totals, values = run(self._zeros(prepared, sums), rest, batch)
        # Microbatches are equally large, so the mean of their means is the mean of the batch.
        value = (values[0].mean(), values[1]) if self.has_aux else values.mean()
        return value, prepared.build_gradient(self._means(prepared, totals))

    def _interleave(
        self,
        bound: inspect.BoundArguments,
        rest: _Arguments,
        batch: _Arguments,
        sums: PartialSums | None,
    ) -> tuple[Any, Any]:
        """Does the same as `_accumulate` with microbatches interleaved in the stages of a pipeline.

        The whole loss runs with Auto axes, as layers do: what is sent from stage to stage, and what
        these keep, is sharded as the compiler chooses. Results get their types on Explicit axes
        back: gradients those of their parameters, auxiliary data those of the rows.

        Args:
          bound: the arguments of the loss, by name; changed here.
          rest: those of them that are the same for all microbatches.
          batch: those with rows, reshaped to (batch / steps, steps, …).
          sums: knows the Explicit axes of the rows; None if there are none.
        """
        mesh = jax.sharding.get_abstract_mesh()
        microbatches = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)  # (steps, rows, …)
        typed = [x for x in jax.tree.leaves(microbatches) if type_spec(x) is not None]
        rows = typed[0] if typed else None
        call = self.gradient.prepare(bound.args, bound.kwargs)
        gradient_specs = [type_spec(x) for x in call.arrays()]
        row_axes = () if sums is None else axes_of(sums.rows)
        # Those that other devices have parts of would take their memory.
        is_replicated = [
            spec is not None and {*row_axes}.isdisjoint(spec_axes(spec)) for spec in gradient_specs
        ]

        def run(inputs: tuple[_Arguments, _Arguments]) -> tuple[Any, list[jax.Array]]:
            """Returns the mean value and the mean gradient of each differentiated array."""
            rest, microbatches = inputs
            first = jax.tree.map(lambda x: x[0], microbatches)  # (rows, …)
            bound.arguments.update({**rest, **first})
            call = self.gradient.prepare(bound.args, bound.kwargs)  # of arrays on Auto axes
            pairs = [*zip(jax.tree.leaves(first), jax.tree.leaves(microbatches), strict=True)]
            value, totals = accumulate_interleaved(
                self.gradient, call, pairs, self.dtype, row_axes, is_replicated
            )
            _check_aux(value[1] if self.has_aux else ())
            gradients = []
            for total, spec in zip(totals, gradient_specs, strict=True):
                mean = total / self.steps
                gradients.append(mean if spec is None else retype(mean, mesh, spec))
            return value, gradients

        def retype_aux(x: jax.Array) -> jax.Array:
            """Types auxiliary data, (steps, …), as what a module returns for the rows."""
            spec = PartitionSpec() if rows is None else output_spec(x, rows, None)
            typed: jax.Array = retype(x, mesh, spec)
            return typed

        explicit = axes_of_type(mesh, AxisType.Explicit)
        inputs = (rest, microbatches)
        value, gradients = cast(Any, with_auto_axes(inputs, run, explicit, retype_aux))
        return value, call.build_gradient(gradients)

    def _zeros(self, prepared: PreparedCall, sums: PartialSums | None) -> list[jax.Array]:
        """Returns a total of zero for each array that is differentiated.

        It has the shape of the array; of one with partial sums, (*shape, shards of the rows).
        """
        zeros = []
        for slot, array in zip(prepared.slots, prepared.arrays(), strict=True):
            if sums is not None and slot in prepared.partial:
                zeros.append(sums.zeros(array, self.dtype))
            else:
                zeros.append(jnp.zeros_like(array, self.dtype))
        return zeros

    def _means(self, prepared: PreparedCall, totals: Sequence[jax.Array]) -> list[jax.Array]:
        """Reduces the totals of all microbatches, and divides them by the number of these."""
        names = [prepared.plan.names[slot] for slot in prepared.slots]
        return [
            _reduce_total(total, parameter, name) / self.steps
            for total, parameter, name in zip(totals, prepared.arrays(), names, strict=True)
        ]


def _types_over_others(axis: str | tuple[str, ...], *, rows: bool = False) -> PathFunction:
    """Returns the ``in_sharding`` of arguments for a loop in which ``axis`` is Explicit.

    Other Explicit axes shard the arguments as before. ``axis`` shards the first dimension of
    arguments with ``rows``, and nothing of others. For the axis ``"data"``, an array with the spec
    ``P(None, "model")`` keeps it, and gets ``P("data", "model")`` with ``rows``.
    """
    axes = axes_of(axis)

    def spec_of(_: Path, subject: Any) -> PartitionSpec:
        array = _compat.get_value(subject) if _compat.is_variable(subject) else subject
        spec = type_spec(array)
        if spec is None or not array.ndim:  # no Explicit axis shards it
            return PartitionSpec(axis) if rows else PartitionSpec()
        if rows and set(axes).issubset(axes_of(pad_entries(spec, 1)[0])):
            return PartitionSpec(*spec.partitions)  # as it is, with its order of axes
        other_axes = set(spec_axes(spec)).difference(axes)
        first, *others = pad_entries(keep_axes(spec, other_axes), array.ndim)
        if rows:
            first = (*axes, *axes_of(first))
        return PartitionSpec(first, *others)

    return PathFunction(spec_of, {})


def _batch_names(
    gradient: ValueAndGrad[..., object],
    bound: inspect.BoundArguments,
    batch: str | Sequence[str] | None,
) -> list[str]:
    """Returns the names of the arguments of the loss with the rows of the batch, to be divided.

    Args:
      gradient: what differentiates the loss, and knows by which arguments.
      bound: the arguments of the call.
      batch: the name, or names, that the user gave; None to find them.

    Raises:
      ValueError: a name is unknown, or no argument has rows.
    """
    arguments = bound.arguments
    if batch is not None:
        # A name that is misspelt would silently make its rows the same for all microbatches.
        names = [batch] if isinstance(batch, str) else list(batch)
        raise_listed(
            ValueError,
            "accumulate_gradients: batch names unknown arguments:",
            [f"  {name!r}{suggestion(name, arguments)}" for name in names if name not in arguments],
            f"The arguments: {', '.join(arguments)}.",
        )
        return names
    prepared = gradient.prepare(bound.args, bound.kwargs)
    differentiated = {target.argument.name for target in prepared.targets}

    def is_batch(value: object) -> bool:
        leaves = jax.tree.leaves(value, is_leaf=_compat.is_graph_object)
        # Scalars, such as a step count, have no rows.
        return bool(leaves) and all(_compat.is_array_like(x) and jnp.ndim(x) for x in leaves)

    # Parameters given as bare arrays are differentiated, and no batch.
    names = [
        name for name, value in arguments.items() if name not in differentiated and is_batch(value)
    ]
    if not names:
        raise ValueError(
            "accumulate_gradients: no argument is a batch of arrays: each is a scalar, holds "
            "modules, or is differentiated. Name those that are with batch=..."
        )
    return names


def _check_rows(arguments: _Arguments, names: Sequence[str]) -> None:
    """Checks that all arrays of the batch have equally many rows.

    Where they differ, nobody knows which arrays are the batch, and which are constants.
    """
    shapes: dict[str, tuple[int, ...]] = {}  # by the expression for an array: batch['x']
    for name in names:
        for path, array in jax.tree_util.tree_leaves_with_path(arguments[name]):
            shapes[accessor(name, tuple(map(path_key, path)))] = jnp.shape(array)
    if len({shape[:1] for shape in shapes.values()}) > 1:
        raise_listed(
            ValueError,
            "accumulate_gradients: not all arrays of the batch have equally many rows, the first "
            "dimension:",
            [f"  {place}: shape {shape}" for place, shape in shapes.items()],
            "Name the arguments that have the rows: batch='x', or batch=('x', 'y'). All others, "
            "such as weights of classes, are the same for all rows.",
        )


def _split_rows(name: str, value: object, steps: int) -> Any:
    """Reshapes each array of an argument from (batch, …) to (batch / steps, steps, …).

    Raises:
      ValueError: lists the arrays whose rows ``steps`` does not divide; ``name`` is the argument.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    indivisible: list[str] = []
    for path, x in leaves:
        reason = _why_indivisible(x, steps)
        if reason:
            place = accessor(name, tuple(map(path_key, path)))
            indivisible.append(f"  {place}: shape {jnp.shape(x)}{reason}")
    raise_listed(
        ValueError,
        f"accumulate_gradients: these cannot be divided into {steps} equal microbatches:",
        indivisible,
        "The first dimension is that of the rows; each shard of them is divided.",
    )
    split = [jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:])) for _, x in leaves]
    return jax.tree_util.tree_unflatten(treedef, split)


def _why_indivisible(x: Any, steps: int) -> str:
    """Says why the rows of an array, its first dimension, cannot be divided; empty if they can.

    The text follows the shape of the array: ``: 6 rows are not a multiple of 4``.
    """
    if not jnp.ndim(x):
        return ", which has no rows"
    rows = jnp.shape(x)[0]
    spec = type_spec(x)
    axes = () if spec is None else axes_of(pad_entries(spec, 1)[0])  # those that shard the rows
    sizes = {axis: type_mesh(x).shape[axis] for axis in axes}
    # Each device divides its own rows, so that none has to move.
    factors = (steps, *sizes.values())
    parts = math.prod(factors)
    if rows % parts == 0:
        return ""
    if not sizes:
        return f": {rows} rows are not a multiple of {steps}"
    shards = " × ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
    product = f"{' × '.join(map(str, factors))} = {parts}"
    return f", rows sharded over {shards}: {rows} rows are not a multiple of {product}"


def _check_aux(aux: object) -> None:
    """Raises a TypeError unless the auxiliary data of a loss are arrays, which can be stacked."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(aux, is_leaf=_compat.is_graph_object)
    raise_listed(
        TypeError,
        "accumulate_gradients: what the loss returns besides the scalar is stacked; not arrays:",
        [
            f"  {accessor('aux', tuple(map(path_key, path)))}: {type_text(x)}"
            for path, x in leaves
            if not (_compat.is_array_like(x) or _compat.is_graph_object(x))
        ],
        "Return only arrays or numbers.",
    )


def _partial_sums_over_rows(batch: _Arguments) -> PartialSums | None:
    """Returns partial sums over the Explicit axes that shard the rows; None if there are none.

    Arrays of the batch may be sharded over fewer axes than others; the most are taken.
    """
    typed = [x for x in jax.tree.leaves(batch) if type_spec(x) is not None and x.ndim]
    row_entries = [jax.typeof(x).sharding.spec.partitions[0] for x in typed]  # None if unsharded
    rows = max(row_entries, key=lambda entry: len(axes_of(entry)), default=None)
    return None if rows is None else PartialSums(type_mesh(typed[0]), rows)


def _reduce_total(total: jax.Array, parameter: jax.Array, name: str) -> jax.Array:
    """Adds up the partial sums of the devices to the gradient of a parameter.

    Args:
      total: the sum over microbatches: of the parameter's shape, or (*shape, devices) if each
        device has its own.
      parameter: the parameter, whose sharding the gradient gets.
      name: the expression for it, such as ``model.up.kernel``.
    """
    if total.ndim > parameter.ndim:
        total = add_up(total, -1, name)  # (*parameter.shape, shards of the rows) → parameter.shape
    if type_spec(parameter) is None:
        return total
    # Gradients that were not partial sums may have left it sharded in another way.
    reduced: jax.Array = jax.sharding.reshard(total, jax.typeof(parameter).sharding)
    return reduced
