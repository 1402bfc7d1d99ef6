"""Calls of modules with Auto axes in the place of Explicit ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..core.constrain import type_spec
from ..core.flatten import flatten
from ..core.rebuild import rebuild
from ..core.retyping import AxisTypeChange, RetypedArrays, call_retyped
from ..specs.fitting import axes_of_type, only_axes, spec_axes


def with_auto_axes(
    tree: Any,
    call: Callable[[Any], Any],
    axes: frozenset[Any],
    leave: Callable[[jax.Array], jax.Array],
) -> Any:
    """Calls a function of a tree with some Explicit axes Auto; ``leave`` types what it returns."""
    mesh = jax.sharding.get_abstract_mesh()
    retyping = AxisTypeChange.of(mesh, axes, AxisType.Auto, name="activation_shardings")
    if retyping is None:
        return call(tree)
    flat = flatten(tree)
    arrays = RetypedArrays.of(retyping, flat.leaves)
    try:
        after = call_retyped(flat, arrays, call)
    except BaseException:
        rebuild(flat._replace(leaves=arrays.inside), flat.leaves, foreign=True)
        raise
    left, untyped = arrays.leave(flat.structure, after)
    for slot, x in untyped.items():
        left[slot] = leave(x)
    return rebuild(after, left, foreign=True)


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
