"""Layers on Explicit axes: how the output is sharded where JAX cannot know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..apply import called, rebuilt
from ..core.axis_types import Retyped, Retyping, retyped, type_spec
from ..core.flatten import flatten
from ..fitting import axes_of, only_axes, spec_axes
from .variables import Saved, own_variables


def takes_out_sharding(call: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a method has an ``out_sharding`` that this call leaves open."""
    parameters = inspect.signature(call).parameters
    return "out_sharding" in parameters and kwargs.get("out_sharding") is None


def inferred(
    module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method; if JAX cannot type an operation in it, with an ``out_sharding`` or Auto axes.

    Raises:
      Exception: whatever the method raises with Auto axes too.
    """
    saved = Saved((module, args, kwargs))
    try:
        return call(*args, **kwargs)
    except _compat.TYPE_ERRORS as error:
        original = error
    if takes_out_sharding(call, kwargs):
        for spec in _output_specs(module, args, kwargs):
            saved.restore()
            try:
                return call(*args, **{**kwargs, "out_sharding": spec})
            except _compat.TYPE_ERRORS:
                continue
    saved.restore()
    try:
        return with_auto_axes(saved.variables, call, args, kwargs)
    except _compat.TYPE_ERRORS:
        saved.restore()
        raise original from None


def _output_specs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[PartitionSpec]:
    """Specs for the output of a layer, best first.

    Its first dimensions are those of the input, and its last ones those of the kernel.
    """
    specs = [spec for x in _arrays((args, kwargs)) if (spec := type_spec(x)) is not None]
    leading = [*specs[0].partitions] if specs else []
    kernels = (type_spec(_compat.get_value(variable)) for _, variable in own_variables(module))
    last = [spec.partitions[-1] for spec in kernels if spec is not None and len(spec) > 1][:1]
    used = {axis for entry in last for axis in axes_of(entry)}
    leading = [*(only_axes(PartitionSpec(*leading), _axes(leading) - used)).partitions]
    for count in (len(leading), len(leading) - 1, 1):
        if 0 < count <= len(leading):
            if last and last[0] is not None:
                yield PartitionSpec(*leading[:count], *last)
            yield PartitionSpec(*leading[:count])
    yield PartitionSpec()


def _axes(entries: Sequence[Any]) -> set[Any]:
    return {axis for entry in entries for axis in axes_of(entry)}


def with_auto_axes(
    variables: Sequence[Any],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any = None,
) -> Any:
    """Calls a method with all axes Auto; its outputs are sharded as its first input, or as told.

    Args:
      variables: the Variables that it may read or change.
      call: the method.
      args: its arguments.
      kwargs: its keyword arguments.
      output: the spec of all arrays that it returns.
    """
    first = next((x for x in _arrays((args, kwargs)) if type_spec(x) is not None), None)
    mesh = jax.sharding.get_abstract_mesh()
    flat = flatten((tuple(variables), args, kwargs))
    retyping = Retyping.of(mesh, None, AxisType.Auto, name="auto_axes")
    arrays = Retyped.of(retyping, flat.leaves)
    after = called(flat, arrays, lambda tree: call(*tree[1], **tree[2]))
    left, untyped = arrays.leave(flat.structure, after)
    for slot, x in untyped.items():
        left[slot] = retyped(x, mesh, _as_input(x, first) if output is None else output)
    return rebuilt(after, left, foreign=True)


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
    """What a model returns, sharded over ``axes`` and those of its inputs only.

    Code around a model expects no other: a loss that picks the logits of labels cannot be typed if
    these are sharded over the vocabulary.
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
