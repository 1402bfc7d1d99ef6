"""Calls of modules with other axis types: Auto for Explicit ones, Manual in convolutions."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.flatten import flatten
from ..core.resharding import called, rebuilt
from ..core.retyping import Retyped, Retyping, type_spec
from ..specs.fitting import axes_of_type, only_axes, spec_axes


def with_auto_axes(
    tree: Any,
    call: Callable[[Any], Any],
    axes: frozenset[Any],
    leave: Callable[[jax.Array], jax.Array],
) -> Any:
    """Calls a function of a tree with some Explicit axes Auto; ``leave`` types what it returns."""
    mesh = jax.sharding.get_abstract_mesh()
    retyping = Retyping.of(mesh, axes, AxisType.Auto, name="activation_shardings")
    if retyping is None:
        return call(tree)
    flat = flatten(tree)
    arrays = Retyped.of(retyping, flat.leaves)
    try:
        after = called(flat, arrays, call)
    except BaseException:
        rebuilt(flat._replace(leaves=arrays.inside), flat.leaves, foreign=True)
        raise
    left, untyped = arrays.leave(flat.structure, after)
    for slot, x in untyped.items():
        left[slot] = leave(x)
    return rebuilt(after, left, foreign=True)


def output_spec(x: jax.Array, first: jax.Array, spec: PartitionSpec | None) -> PartitionSpec:
    """How an output is sharded that leaves a call with Auto axes: by ``spec``, as far as it says.

    The rest is like the leading dimensions of the first input; all of it, for the same shape.
    """
    count = x.ndim if x.shape == first.shape and spec is None else max(x.ndim - 1, 0)
    entries = jax.typeof(first).sharding.spec.partitions
    dimensions = zip(x.shape[:count], first.shape, entries, strict=False)
    same = itertools.takewhile(lambda dimension: dimension[0] == dimension[1], dimensions)
    like = PartitionSpec(*(entry for *_, entry in same))
    if spec is None:
        return like
    free = only_axes(like, {*spec_axes(like)}.difference(spec_axes(spec))).partitions
    pairs = itertools.zip_longest(spec.partitions, free)
    return PartitionSpec(*(new if old is OPEN else old for old, new in pairs))


def opened(spec: PartitionSpec | None) -> PartitionSpec | None:
    """A spec that leaves dimensions without an axis open."""
    return None if spec is None else PartitionSpec(*(x or OPEN for x in spec.partitions))


OPEN = PartitionSpec.UNCONSTRAINED


def first_typed(inputs: Any) -> Any:
    """The first array with a sharding in its type, or None."""
    return next((x for x in arrays_in(inputs) if type_spec(x) is not None), None)


def arrays_in(tree: Any) -> list[jax.Array]:
    """The arrays in a pytree, without those in modules."""
    leaves = jax.tree.leaves(tree, is_leaf=_compat.is_graph_object)
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


def explicit_axes_here() -> frozenset[Any]:
    """The Explicit axes of the mesh in context."""
    return frozenset(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))


def with_right_gradient(
    module: Any, call: Callable[..., Any], batch_axes: Iterable[Any]
) -> Callable[..., Any]:
    """A method of a module, in which a grouped convolution has the right gradient.

    XLA multiplies that of the kernel by the size of each axis that does not shard the rows, so the
    convolution is mapped over these. Without Explicit axes, ``batch_axes`` shard the rows.
    """
    grouped = isinstance(module, nnx.Conv) and module.feature_group_count > 1
    if not grouped or module.conv_general_dilated is not jax.lax.conv_general_dilated:
        return call

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        convolution = functools.partial(_convolution, frozenset(batch_axes))
        vars(module)["conv_general_dilated"] = convolution
        try:
            return call(*args, **kwargs)
        finally:
            vars(module)["conv_general_dilated"] = jax.lax.conv_general_dilated

    return called


def _convolution(batch_axes: frozenset[Any], x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    mesh, spec, out = jax.sharding.get_abstract_mesh(), type_spec(x), kwargs.pop("out_sharding")
    manual = axes_of_type(mesh, AxisType.Manual)
    rows = tuple(axis for axis in mesh.axis_names if axis in batch_axes - manual)
    # Next to Explicit axes, XLA need not keep the rows sharded over Auto ones.
    if spec is not None or x.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
        rows = ()
    used = manual.union(rows if spec is None else spec_axes(spec))
    free = {axis for axis, size in mesh.shape.items() if size > 1} - used
    inner = None if out is None else only_axes(out, frozenset(mesh.axis_names) - free)

    def call(x: Any, kernel: Any) -> Any:
        options = kwargs | {"out_sharding": inner}
        return jax.lax.conv_general_dilated(x, kernel, *args, **options)

    if rows:  # nor where Explicit axes became Auto for this call
        x = _keep_rows(x, rows)
    if free and (own := type_spec(kernel)) is not None:
        kept = only_axes(own, frozenset(mesh.axis_names) - free)
        kernel = jax.sharding.reshard(kernel, NamedSharding(mesh, kept))
    everywhere, mapped = PartitionSpec(), call
    if free:
        mapped = jax.shard_map(call, in_specs=everywhere, out_specs=everywhere, axis_names=free)
    y = mapped(x, kernel)
    if rows:  # in the backward pass, too
        return _keep_rows(y, rows)
    return jax.sharding.reshard(y, NamedSharding(mesh, out)) if free and out is not None else y


def _keep_rows(x: Any, axes: tuple[Any, ...]) -> Any:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *[OPEN] * (x.ndim - 1)))
