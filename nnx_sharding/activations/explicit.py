"""Layers on Explicit axes: how the output is sharded where JAX cannot infer it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..apply import called, rebuilt
from ..core.axis_types import Retyped, Retyping, retyped, type_spec, with_reduced
from ..core.flatten import flatten
from ..fitting import axes_of, only_axes, spec_axes
from .variables import Replaced, Saved, own_variables


def takes_out_sharding(call: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a method has an ``out_sharding`` that this call leaves open."""
    parameters = inspect.signature(call).parameters
    return "out_sharding" in parameters and kwargs.get("out_sharding") is None


class Untyped(NamedTuple):
    """A call of a module in which JAX cannot infer how an output is sharded."""

    module: Any
    error: Exception
    inputs: tuple[str, ...]  # types of its input arrays and of its own Variables
    specs: tuple[PartitionSpec, ...]  # values of ``out_sharding`` with which it works


def inferred(
    module: Any,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    untyped: Callable[[Untyped], None] | None = None,
) -> Any:
    """Calls a method, with an ``out_sharding`` or Auto axes if JAX cannot type an operation in it.

    Args:
      module: the module.
      call: its method.
      args: the arguments.
      kwargs: the keyword arguments.
      untyped: is notified of a call that needs this, with all specs that would work.

    Raises:
      Exception: whatever the method raises even with Auto axes.
    """
    saved = Saved((module, args, kwargs))
    try:
        return call(*args, **kwargs)
    except _compat.TYPE_ERRORS as error:
        original = error
    saved.restore()
    if untyped is not None and (changes := _without_reduced(module)):
        with Replaced(changes):
            return inferred(module, call, args, kwargs, untyped)
    specs = _output_specs(module, args, kwargs) if takes_out_sharding(call, kwargs) else iter(())
    usable = []
    for spec in dict.fromkeys(specs):
        try:
            out = call(*args, **{**kwargs, "out_sharding": spec})
        except _compat.TYPE_ERRORS:
            saved.restore()
            continue
        if untyped is None:
            return out
        usable.append(spec)
        saved.restore()
    try:
        out = with_auto_axes(module, call, args, kwargs)
    except _compat.TYPE_ERRORS:
        saved.restore()
        raise original from None
    if untyped is not None:
        values = [_compat.get_value(variable) for _, variable in own_variables(module)]
        avals = map(jax.typeof, _arrays((args, kwargs, values)))
        types = tuple(aval.str_short(short_dtypes=True) for aval in avals)
        untyped(Untyped(module, original, types, tuple(usable)))
    return out


def _without_reduced(module: Any) -> list[tuple[Any, Any]]:
    """A module's own Variables of a reduced type, each with its value of the usual type."""
    changes = []
    for _, variable in own_variables(module):
        value = _compat.get_value(variable)
        spec = type_spec(value)
        if spec is not None and spec.reduced:
            goal = NamedSharding(jax.typeof(value).sharding.mesh, with_reduced(spec, ()))
            changes.append((variable, jax.sharding.reshard(value, goal)))
    return changes


def _output_specs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[PartitionSpec]:
    """Specs for the output of a layer, best first.

    The first dimensions of the output are those of the input that are not summed over, the last
    ones those of the kernel.
    """
    first = _first_typed((args, kwargs))
    if first is None:
        return
    values = (_compat.get_value(variable) for _, variable in own_variables(module))
    kernels = [spec for x in values if (spec := type_spec(x)) is not None and len(spec) > 1]
    summed = {axis for spec in kernels for axis in spec_axes(spec)}
    batch, *others = jax.typeof(first).sharding.spec.partitions
    others = [*only_axes(PartitionSpec(*others), _axes(others) - summed).partitions]
    is_index = jnp.issubdtype(first.dtype, jnp.integer)  # of an embedding
    # Several for nnx.LinearGeneral.
    inputs, outputs = (_rank(module, name) for name in ("in_features", "out_features"))
    leading = [batch, *others] if is_index else [batch, *others[:-inputs]]
    last = kernels[0].partitions[-outputs:] if kernels else ()
    last = only_axes(PartitionSpec(*last), _axes(last) - _axes(leading)).partitions
    if any(last):
        yield PartitionSpec(*leading, *last)
    for count in (len(leading), 1, 0):
        yield PartitionSpec(*leading[:count])


def _rank(module: Any, name: str) -> int:
    """The number of dimensions of a layer's features."""
    features = getattr(module, name, None)
    return len(features) if isinstance(features, tuple) else 1


def without_open(
    spec: PartitionSpec, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PartitionSpec:
    """A spec for the output of a layer, with UNCONSTRAINED entries replaced by inferred ones."""
    if PartitionSpec.UNCONSTRAINED not in spec.partitions:
        return spec
    inferred_spec = next(_output_specs(module, args, kwargs), PartitionSpec())
    free = only_axes(inferred_spec, _axes(inferred_spec.partitions).difference(spec_axes(spec)))
    others = [*free.partitions, *[None] * len(spec)]
    pairs = zip(spec.partitions, others, strict=False)
    entries = (old if new is PartitionSpec.UNCONSTRAINED else new for new, old in pairs)
    return PartitionSpec(*entries)


def _axes(entries: Iterable[Any]) -> set[Any]:
    return {axis for entry in entries for axis in axes_of(entry)}


def with_auto_axes(
    module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method with all axes Auto; its outputs are sharded like its first input.

    Args:
      module: the module.
      call: its method.
      args: its arguments.
      kwargs: its keyword arguments.
    """
    first = _first_typed((args, kwargs))
    mesh = jax.sharding.get_abstract_mesh()
    flat = flatten((module, args, kwargs))
    retyping = Retyping.of(mesh, None, AxisType.Auto, name="auto_axes")
    arrays = Retyped.of(retyping, flat.leaves, summed_axes(module, (args, kwargs)))
    after = called(flat, arrays, lambda tree: call(*tree[1], **tree[2]))
    left, untyped = arrays.leave(flat.structure, after)
    for slot, x in untyped.items():
        left[slot] = retyped(x, mesh, _as_input(x, first))
    return rebuilt(after, left, foreign=True)


# Layers that compute each row independently.
_BY_ROWS = (
    nnx.Linear,
    nnx.LinearGeneral,
    nnx.Einsum,
    nnx.Conv,
    nnx.ConvTranspose,
    nnx.Embed,
    nnx.LayerNorm,
    nnx.RMSNorm,
    nnx.GroupNorm,
    nnx.LoRA,
)


def summed_axes(module: Any, inputs: Any) -> frozenset[Any]:
    """The axes over which the gradients of a layer are sums over rows: those of its first input.

    There, parameters may have a reduced type. Elsewhere JAX may count their gradients once for each
    device: where axes become Auto, and where an embedding looks up replicated indices.
    """
    spec = type_spec(_first_typed(inputs))
    if spec is None or not spec.partitions or not isinstance(module, _BY_ROWS):
        return frozenset()
    owner = next((kind for kind in type(module).__mro__ if "__call__" in vars(kind)), None)
    return frozenset(axes_of(spec.partitions[0])) if owner in _BY_ROWS else frozenset()


def _first_typed(inputs: Any) -> Any:
    return next((x for x in _arrays(inputs) if type_spec(x) is not None), None)


def _as_input(x: jax.Array, first: Any) -> PartitionSpec:
    """The spec of an output whose first dimensions are those of an input."""
    spec, entries = type_spec(first), list[Any]()
    if spec is not None:
        for size, other, entry in zip(x.shape[:-1], first.shape, spec.partitions, strict=False):
            if size != other:
                break
            entries.append(entry)
    return PartitionSpec(*entries)


def as_inputs(out: Any, inputs: Any, axes: Iterable[Any]) -> Any:
    """The outputs of a model, sharded only over ``axes`` and those of its inputs.

    Code around a model expects this: a loss that picks the logits of labels cannot be typed if
    these are sharded over the vocabulary. Layers within a model may be followed by further layers.
    """
    kept = {axis for x in _arrays(inputs) if (spec := type_spec(x)) for axis in spec_axes(spec)}
    kept.update(axes)

    def resharded(x: Any) -> Any:
        spec = type_spec(x)
        if spec is None or kept.issuperset(spec_axes(spec)):
            return x
        mesh = jax.typeof(x).sharding.mesh
        return jax.sharding.reshard(x, NamedSharding(mesh, only_axes(spec, kept)))

    return jax.tree.map(resharded, out, is_leaf=_compat.is_graph_object)


def _arrays(tree: Any) -> list[jax.Array]:
    leaves = jax.tree.leaves(tree, is_leaf=_compat.is_graph_object)
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
