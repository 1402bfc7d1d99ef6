"""Gathers a module's own parameters while it runs, as FSDP does.

A loop over layers, such as a ``Stack``, gives its module a slice of each stacked array, so the spec
of a slice is inferred from the spec of the whole array (:func:`spec_of_slice`).
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.constrain import apply_shardings, mesh_in_trace, type_spec
from ..specs.fitting import axes_of_type, keep_axes, spec_axes, with_entries, with_reduced
from ..specs.paths import Path
from ..specs.types import AxisName
from .calls import Shape, Tag
from .trace_keys import PREFETCHED
from .variables import Variable, is_parameter, own_variables


def gathered_values(
    module: object, tag: Tag, mesh: Mesh | AbstractMesh | None, axes: frozenset[AxisName]
) -> list[tuple[Variable, jax.Array]]:
    """Returns the module's own Variables that have another value while it runs, with the value.

    The value is the array gathered over the axes of the module's tag.

    Args:
      module: the module.
      tag: its tag.
      mesh: the mesh of the trace; None if there is none.
      axes: the axes of the mesh that are not manual.
    """
    is_explicit = bool(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))
    # Without axes to gather over, only types on Explicit axes may need a change (`reduced` axes).
    if not is_explicit and not tag.axes:
        return []
    ahead = PREFETCHED.value or ()  # the parameters that a surrounding loop has gathered already
    variables: list[Variable] = []
    arrays: list[jax.Array] = []
    targets: list[NamedSharding] = []
    for path, variable in own_variables(module):
        value = _compat.get_value(variable)
        if not isinstance(value, jax.Array) or (tag.name, tag.path, path) in ahead:
            continue
        target = _sharding_in_use(value, variable, path, tag=tag, mesh=mesh, axes=axes)
        if target is not None:  # None: the value is used as it is sharded
            variables.append(variable)
            arrays.append(value)
            targets.append(target)
    return [*zip(variables, _gather(arrays, targets), strict=True)]


def _sharding_in_use(
    value: jax.Array,
    variable: Variable,
    path: Path,
    *,
    tag: Tag,
    mesh: Mesh | AbstractMesh | None,
    axes: frozenset[AxisName],
) -> NamedSharding | None:
    """Returns the sharding of a Variable's value while its module runs: whole over the tag's axes.

    On Explicit axes the sharding is made from the spec in the value's type. On Auto axes a type
    says nothing, so it is made from the declared spec, which the tag has.

    Args:
      mesh: the mesh of the trace; None if there is none.
      axes: the axes of the mesh without those of a `shard_map`, which no spec inside can name.

    Returns:
      The sharding, or None if the value is used as it is.
    """
    spec = type_spec(value)
    if spec is not None:  # on Explicit axes
        new_spec = spec
        if is_parameter(variable) and not tag.axes.isdisjoint(spec_axes(spec)):
            new_spec = with_entries(spec, keep_axes(spec, axes - tag.axes).partitions)
        # Over `reduced` axes, the gradient of an array is left as one summand on each device. These
        # axes are taken out, because JAX adds up some of these gradients several times.
        if spec.reduced:
            new_spec = with_reduced(new_spec, ())
        if new_spec == spec:
            return None
        return NamedSharding(jax.typeof(value).sharding.mesh, new_spec)
    declared = tag.specs.get(path)
    if mesh is None or declared is None or not declared.is_gathered:
        return None
    # The declared spec is for the whole array. In a loop over layers, the value is a slice of it.
    new_spec = spec_of_slice(declared.inside, declared.shape, value.shape)
    return NamedSharding(mesh_in_trace(mesh), new_spec)


def _gather(arrays: list[jax.Array], targets: list[NamedSharding]) -> list[jax.Array]:
    """Returns arrays with these shardings: resharded on Explicit axes, otherwise constrained.

    Arrays of one kind go into one operation, because that takes less time to trace. The kinds are
    arrays with a type over Explicit axes, and all others.
    """
    are_typed = [type_spec(array) is not None for array in arrays]
    if not any(are_typed):
        return apply_shardings(arrays, targets) if arrays else []
    if all(are_typed):
        return jax.sharding.reshard(arrays, targets)  # type: ignore[no-any-return]
    # A module may also hold an array that is on no mesh. Then each array is gathered by itself.
    gathered = []
    for array, target in zip(arrays, targets, strict=True):
        gathered += _gather([array], [target])
    return gathered


def spec_of_slice(spec: PartitionSpec, shape: Shape, slice_shape: Shape) -> PartitionSpec:
    """Returns the spec of a loop's slice of an array: without the dimensions that loops removed.

    ``P(None, "model")`` of shape (4, 8) becomes ``P("model")`` for (8,). Which dimensions were
    removed is inferred from the shapes. In (8, 8), it may be either dimension. Then a dimension
    that is not sharded counts as removed; among several of these, the leading one counts.

    Args:
      spec: the spec of the array, with an entry for each dimension.
      shape: the shape of the array.
      slice_shape: the shape of the slice.

    Returns:
      The spec. If ``slice_shape`` is not the shape of any slice, it is ``P()``, which shards
      nothing, for example for a value that the user's code has reshaped.
    """
    # `combinations` begins with the choice that keeps the leading dimensions. The order is reversed
    # because loops remove these: the choice that keeps the last dimensions comes first.
    choices = [*itertools.combinations(range(len(shape)), len(slice_shape))]
    # For each choice of kept dimensions that fits the shape, the entries of the spec that are left.
    # For (4, 8) → (8,), dimension 1 is kept, so the entries are ["model"].
    candidates: list[list[Any]] = []
    for kept_dimensions in reversed(choices):
        if tuple(shape[dimension] for dimension in kept_dimensions) == tuple(slice_shape):
            candidates.append([spec.partitions[dimension] for dimension in kept_dimensions])

    def count_sharded(entries: list[Any]) -> int:
        return sum(bool(entry) for entry in entries)

    # `max` returns the first of several choices with equally many sharded dimensions.
    return PartitionSpec(*max(candidates, key=count_sharded, default=()))
