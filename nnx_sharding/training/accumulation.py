"""Gradients of microbatches: summed in one program, or by several and reduced once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.names import around
from ..core.retyping import mesh_of_types, type_mesh, type_spec
from ..core.targets import PathFunction
from ..errors import raise_listed
from ..partition.axis_modes import explicit_axes
from ..specs.fitting import axes_of, axes_of_type, only_axes, padded, spec_axes, suggestion
from ..specs.paths import Path, accessor, path_key
from ..transforms import Carry, scan, value_and_grad
from ..transforms.grad import ValueAndGrad
from ..transforms.in_trace import described
from ..transforms.partial_sums import PartialSums, with_sums


@_compat.api_boundary
def accumulate_gradients(
    loss: Any = None,
    *,
    steps: int,
    argnums: Any = 0,
    wrt: Any = None,
    has_aux: bool = False,
    batch: str | Sequence[str] | None = None,
    axis: Any = None,
    dtype: Any = None,
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
    as those of ``BatchNorm`` and of your own modules, are reduced for each microbatch.

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
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise TypeError(f"accumulate_gradients: steps must be a positive integer, got {steps!r}.")
    modes: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}

    def loop(gradient: ValueAndGrad[..., Any], given: Any, rest: Any, microbatches: Any) -> Any:
        given.arguments.update(rest)
        sums = _partial_sums_of(microbatches)
        prepared = gradient.prepared(given.args, given.kwargs, sums)
        likes = prepared.arrays()
        zeros = [
            sums.zeros(x, dtype) if sums and slot in prepared.partial else jnp.zeros_like(x, dtype)
            for slot, x in zip(prepared.slots, likes, strict=True)
        ]

        def step(totals: Any, rest: Any, microbatch: Any) -> Any:
            given.arguments.update(rest | microbatch)
            one = gradient.prepared(given.args, given.kwargs, sums)
            value, new = with_sums(sums, gradient.of, one, sums)
            _check_aux(value[1] if has_aux else ())
            pairs = zip(totals, new, strict=True)
            return [total + x.astype(total.dtype) for total, x in pairs], value

        in_axes = (Carry, None, 1)
        run = scan(step, in_axes=in_axes, out_axes=(Carry, 0), length=steps, **modes)
        totals, values = run(zeros, rest, microbatches)
        names = [prepared.plan.names[slot] for slot in prepared.slots]
        means = [
            _reduced(x, like, name) / steps
            for x, like, name in zip(totals, likes, names, strict=True)
        ]
        value = (values[0].mean(), values[1]) if has_aux else values.mean()
        return value, prepared.in_form(means)

    options = {"argnums": argnums, "wrt": wrt, "has_aux": has_aux, **modes}
    divided = functools.partial(_divided, steps=steps)
    return _with_batch("accumulate_gradients", loss, options, batch, axis, loop, divided)


def _with_batch(
    name: str,
    loss: Any,
    options: Mapping[str, Any],
    batch: str | Sequence[str] | None,
    axis: Any,
    call: Callable[..., Any],
    divided: Callable[[str, Any], Any] = lambda name, value: value,
) -> Any:
    """A loss, or a decorator of losses, called with what differentiates it and with its arguments.

    ``call`` gets what ``value_and_grad`` returns, the bound arguments, and those without and with
    rows, which are ``divided`` before.
    """

    def decorate(loss: Callable[..., Any]) -> Callable[..., Any]:
        gradient = value_and_grad(loss, **options)
        parameters = inspect.signature(gradient._fun)

        @functools.wraps(loss)
        @_compat.api_boundary
        def decorated(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*gradient._bound, *args, **kwargs)
            names = _batch_names(name, gradient, given, batch)
            _check_rows(name, given, names)
            rows = {name: divided(name, given.arguments[name]) for name in names}
            rest = {name: x for name, x in given.arguments.items() if name not in names}

            def inner(rest: Any, rows: Any) -> Any:
                return call(gradient, given, rest, rows)

            if axis is None:
                return inner(rest, rows)
            in_sharding = (_types_over_others(axis), _types_over_others(axis, rows=True))
            return explicit_axes(inner, axes=axis, in_sharding=in_sharding)(rest, rows)

        return decorated

    return decorate if loss is None else decorate(loss)


def _types_over_others(axis: Any, *, rows: bool = False) -> PathFunction:
    """Specs that keep how other Explicit axes shard arrays; ``axis`` shards the rows, if any."""
    axes = axes_of(axis)

    def spec_of(_: Path, x: Any) -> PartitionSpec:
        value = _compat.get_value(x) if _compat.is_variable(x) else x
        spec = type_spec(value)
        if spec is None or not value.ndim:
            return PartitionSpec(axis) if rows else PartitionSpec()
        if rows and {*axes} <= {*axes_of(padded(spec, 1)[0])}:
            return PartitionSpec(*spec.partitions)
        first, *others = padded(only_axes(spec, {*spec_axes(spec)}.difference(axes)), value.ndim)
        return PartitionSpec((*axes, *axes_of(first)) if rows else first, *others)

    return PathFunction(spec_of, {})


def _batch_names(
    name: str,
    gradient: ValueAndGrad[..., Any],
    given: inspect.BoundArguments,
    batch: str | Sequence[str] | None,
) -> list[str]:
    """The arguments with the rows of the batch."""
    arguments = given.arguments
    if batch is not None:
        names = [batch] if isinstance(batch, str) else [*batch]
        unknown = [f"  {x!r}{suggestion(x, arguments)}" for x in names if x not in arguments]
        title = f"{name}: batch names unknown arguments:"
        raise_listed(ValueError, title, unknown, f"The arguments: {', '.join(arguments)}.")
        return names
    prepared = gradient.prepared(given.args, given.kwargs)
    differentiated = {x.target.name for x in prepared.wanted}

    def is_batch(value: Any) -> bool:
        leaves = jax.tree.leaves(value, is_leaf=_compat.is_graph_object)
        return bool(leaves) and all(_compat.is_array_like(x) and jnp.ndim(x) for x in leaves)

    names = [x for x, value in arguments.items() if x not in differentiated and is_batch(value)]
    if not names:
        raise ValueError(
            f"{name}: no argument is a batch of arrays: each is a scalar, holds "
            "modules, or is differentiated. Name those that are with batch=..."
        )
    return names


def _check_rows(name: str, given: inspect.BoundArguments, names: Sequence[str]) -> None:
    """Checks that all arrays of the batch have equally many rows, and no other argument has some.

    Where they differ, nobody knows which arrays are the batch, and which are constants.
    """
    shapes = {
        accessor(argument, tuple(map(path_key, path))): jnp.shape(x)
        for argument in names
        for path, x in jax.tree_util.tree_flatten_with_path(given.arguments[argument])[0]
    }
    if len({shape[:1] for shape in shapes.values()}) > 1:
        raise_listed(
            ValueError,
            f"{name}: not all arrays of the batch have equally many rows, the first dimension:",
            [f"  {place}: shape {shape}" for place, shape in shapes.items()],
            "Name the arguments that have the rows: batch='x', or batch=('x', 'y'). All others, "
            "such as weights of classes, are the same for all rows.",
        )


def _divided(name: str, value: Any, steps: int) -> Any:
    """Arrays whose rows become two dimensions, the second of microbatches: none has to move."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    wrong = [
        f"  {accessor(name, tuple(map(path_key, path)))}: shape {jnp.shape(x)}{fault}"
        for path, x in leaves
        if (fault := _indivisible(x, steps))
    ]
    title = f"accumulate_gradients: these cannot be divided into {steps} equal microbatches:"
    remedy = "The first dimension is that of the rows; each shard of them is divided."
    raise_listed(ValueError, title, wrong, remedy)
    divided = [jnp.reshape(x, (x.shape[0] // steps, steps, *x.shape[1:])) for _, x in leaves]
    return jax.tree_util.tree_unflatten(treedef, divided)


def _indivisible(x: Any, steps: int) -> str:
    """Why the rows of an array cannot be divided; empty if they can."""
    if not jnp.ndim(x):
        return ", which has no rows"
    axes = [] if (spec := type_spec(x)) is None else axes_of(padded(spec, 1)[0])
    sizes = {axis: type_mesh(x).shape[axis] for axis in axes}
    counts, rows = (steps, *sizes.values()), jnp.shape(x)[0]
    if rows % math.prod(counts) == 0:
        return ""
    product = " × ".join(map(str, counts)) + f" = {math.prod(counts)}" * bool(sizes)
    listed = " × ".join(f"{axis!r} ({size})" for axis, size in sizes.items())
    sharded = f", rows sharded over {listed}" * bool(sizes)
    return f"{sharded}: {rows} rows are not a multiple of {product}"


def _check_aux(aux: Any) -> None:
    """Checks that auxiliary data can be stacked."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(aux, is_leaf=_compat.is_graph_object)
    wrong = [
        f"  {accessor('aux', tuple(map(path_key, path)))}: {described(x)}"
        for path, x in leaves
        if not (_compat.is_array_like(x) or _compat.is_graph_object(x))
    ]
    title = "accumulate_gradients: what the loss returns besides the scalar is stacked; not arrays:"
    raise_listed(TypeError, title, wrong, "Return only arrays or numbers.")


def _partial_sums_of(
    microbatches: Mapping[str, Any], *, gathers: bool = False
) -> PartialSums | None:
    """Partial sums over the Explicit axes that shard the rows, if there are any."""
    typed = [x for x in jax.tree.leaves(microbatches) if type_spec(x) is not None and x.ndim]
    entries = [jax.typeof(x).sharding.spec.partitions[0] for x in typed]
    rows = max(entries, key=lambda entry: len(axes_of(entry)), default=None)
    return None if rows is None else PartialSums(type_mesh(typed[0]), rows, gathers=gathers)


def _reduced(x: Any, like: Any, name: str) -> Any:
    """A sum in the sharding of the parameter with this name."""
    module = around(name)[-1] if around(name) else name
    with _reduction_scope(module):
        total = x.sum(-1) if x.ndim > like.ndim else x
    spec = type_spec(like)
    return total if spec is None else jax.sharding.reshard(total, jax.typeof(like).sharding)


def _reduction_scope(module: str) -> AbstractContextManager[None]:
    """The scope of operations of the backward pass, by which reports know sums of gradients.

    To sum over devices is the transpose of using a parameter on each of them. JAX names what it
    transposes itself in the same way.
    """
    return jax.named_scope(f"transpose({module})")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["gradient", "count"], meta_fields=["specs"]
)
@dataclasses.dataclass(frozen=True)
class _PartialGradients:
    """A sum of gradients."""

    gradient: Any  # in the form of the differentiated arguments
    count: jax.Array  # of microbatches
    # Of the parameter of each array whose first dimension is that of partial sums; else None.
    specs: tuple[PartitionSpec | None, ...]

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, _PartialGradients):
            return NotImplemented
        forms: Any = [(jax.tree.structure(x), jax.tree.leaves(x)) for x in (self, other)]
        if len({(treedef, *map(jnp.shape, leaves)) for treedef, leaves in forms}) > 1:
            raise ValueError(
                "partial_gradients: these partial gradients cannot be added: they are of different "
                "parameters, or the rows of their microbatches are sharded differently."
            )
        return jax.tree.map(lambda x, y: x if _is_empty(x) else x + y, self, other)


@_compat.api_boundary
def partial_gradients(
    loss: Any = None,
    *,
    argnums: Any = 0,
    wrt: Any = None,
    has_aux: bool = False,
    batch: str | Sequence[str] | None = None,
    axis: Any = None,
    dtype: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function that returns the value of a loss and its gradient, not yet reduced.

    It is for training loops that call one compiled program for each microbatch. The partial
    gradients leave :func:`~nnx_sharding.jit`, are added with ``+``, in the same program or in
    another one, and are reduced once, by :func:`reduce_gradients` in the program of the update. Use
    :func:`accumulate_gradients` where all microbatches are in one program.

    The gradients that are not reduced are those of layers that compute each row independently, such
    as ``nnx.Linear``. All others are reduced in each call, and added as they are. Layers gather
    parameters that are sharded over the axes of the rows, as by ``fsdp``, and each device holds
    partial sums of whole gradients.

    Args:
      loss: the function, as for :func:`~nnx_sharding.value_and_grad`: the mean over its rows.
      argnums: as for ``value_and_grad``.
      wrt: as for ``value_and_grad``.
      has_aux: as for ``value_and_grad``.
      batch: as for :func:`accumulate_gradients`; the arguments with the rows of the microbatch.
      axis: on Auto mesh axes, the axis that shards the rows, or a tuple of them. Parameters are
        replicated over it, and over all Explicit axes, in the loss.
      dtype: the dtype in which gradients are summed and returned; None for their own.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function that returns ``(value, partial)``. The value is that of ``value_and_grad``;
      ``partial`` is a pytree of the partial gradients. An array that is not reduced has a leading
      dimension for the devices of the axes of the rows, sharded over these axes, so that each
      device holds one array of the shape of the parameter.

    Raises:
      ValueError: when called, if the axes of the mesh are Auto and ``axis`` is not given.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import value_and_grad
      >>> from nnx_sharding.training import partial_gradients, reduce_gradients
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> def loss(model, x):
      ...     return (model(x) ** 2).mean()
      >>> x = jnp.arange(16.0).reshape(8, 2)
      >>> _, one = partial_gradients(loss)(model, x[:4])
      >>> _, other = partial_gradients(loss)(model, x[4:])
      >>> gradient = reduce_gradients(one + other)
      >>> _, expected = value_and_grad(loss)(model, x)
      >>> bool(jnp.allclose(gradient["kernel"][...], expected["kernel"][...]))
      True
    """

    def differentiate(gradient: Any, given: Any, rest: Any, microbatch: Any) -> Any:
        given.arguments.update(rest | microbatch)
        sums = _partial_sums_of(microbatch, gathers=True)
        if sums is None:
            _check_axis(microbatch)
        prepared = gradient.prepared(given.args, given.kwargs, sums)
        value, arrays = with_sums(sums, gradient.of, prepared, sums)
        specs = [  # None would be no leaf
            type_spec(x) if slot in prepared.partial else False
            for slot, x in zip(prepared.slots, prepared.arrays(), strict=True)
        ]
        arrays = [
            x if spec is False else jnp.moveaxis(x, -1, 0)
            for x, spec in zip(arrays, specs, strict=True)
        ]
        arrays = [x if _is_empty(x) else x.astype(dtype or x.dtype) for x in arrays]
        leaves = jax.tree.leaves(prepared.in_form(specs))
        found = tuple(x if isinstance(x, PartitionSpec) else None for x in leaves)
        return value, _PartialGradients(prepared.in_form(arrays), jnp.ones(()), found)

    options = {
        "argnums": argnums,
        "wrt": wrt,
        "has_aux": has_aux,
        "graph": graph,
        "graph_updates": graph_updates,
    }
    return _with_batch("partial_gradients", loss, options, batch, axis, differentiate)


@_compat.api_boundary
def reduce_gradients(partial: Any) -> Any:
    """Reduces partial gradients over the devices.

    Call it in the :func:`~nnx_sharding.jit` of the update, so that the compiler can combine the
    reductions, and scatter what they return if the update needs only shards of it.

    Args:
      partial: what the function of :func:`partial_gradients` returns besides the value, or a sum
        of several.

    Returns:
      The mean of the gradients of the microbatches, in the form of the gradient that
      :func:`~nnx_sharding.value_and_grad` returns, on Explicit axes sharded like the parameters.

    Raises:
      TypeError: if ``partial`` is something else.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding.training import partial_gradients, reduce_gradients
      >>> square = partial_gradients(lambda x, y: (x * y**2).mean())
      >>> _, one = square(1.0, jnp.arange(2.0))
      >>> _, other = square(1.0, jnp.arange(2.0, 4.0))
      >>> float(reduce_gradients(one + other))
      3.5
    """
    if not isinstance(partial, _PartialGradients):
        raise TypeError(
            "reduce_gradients takes the partial gradients that a function of partial_gradients "
            f"returns after the value, or a sum of them; got {type(partial).__name__}."
        )
    specs = iter(partial.specs)

    def reduced(x: Any) -> Any:
        spec = next(specs)
        return x if _is_empty(x) else _summed(x, spec) / partial.count.astype(x.dtype)

    return jax.tree.map(reduced, partial.gradient)


def _summed(x: Any, spec: PartitionSpec | None) -> Any:
    """The sum of partial sums, sharded like the parameter on Explicit axes."""
    if spec is None:
        return x
    mesh = type_mesh(x)
    with _reduction_scope(""):
        total = x.sum(0)
    if type_spec(total) is None:
        return total
    goal = only_axes(spec, axes_of_type(mesh, AxisType.Explicit))
    return jax.sharding.reshard(total, NamedSharding(mesh, goal))


def _is_empty(x: Any) -> bool:
    """Whether an array is what a gradient has in place of arrays that are not differentiated."""
    return jnp.result_type(x) == jax.dtypes.float0


def _check_axis(microbatch: Any) -> None:
    mesh = mesh_of_types(jax.tree.leaves(microbatch))
    axes = () if mesh is None else axes_of_type(mesh, AxisType.Auto)
    if auto := sorted(axis for axis in axes if mesh.shape[axis] > 1):
        raise ValueError(
            f"partial_gradients: the mesh has the Auto axes {', '.join(map(repr, auto))}, on which "
            "JAX does not say how the rows of the microbatch are sharded. Name the axis that "
            "shards them: partial_gradients(loss, axis=...)."
        )
