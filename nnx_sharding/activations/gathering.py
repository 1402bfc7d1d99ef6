"""Gathers a module's own parameters while it runs, as FSDP does.

A loop over layers, such as a ``Stack``, gives its module a slice of each stacked array, so the spec
of a slice is found from that of the whole array (:func:`spec_of_slice`).

From other modules: the `Tag` of a module has its ``path``, the ``axes`` over which its parameters
are gathered, and the ``specs`` of its Variables; `type_spec` returns the spec in the type of an
array on Explicit axes, else None; `keep_axes` leaves out all other axes of a spec.
"""

from __future__ import annotations

import itertools

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

    These are the ones whose arrays are gathered over the axes of the module's tag.

    Args:
      module: the module.
      tag: its tag.
      mesh: the mesh of the trace, if there is one.
      axes: its axes that are not manual.
    """
    is_explicit = bool(axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Explicit))
    if not is_explicit and not tag.axes:
        return []
    ahead = PREFETCHED.value or ()  # what the loop around this has gathered already
    variables: list[Variable] = []
    arrays: list[jax.Array] = []
    targets: list[NamedSharding] = []
    for path, variable in own_variables(module):
        value = _compat.get_value(variable)
        if not isinstance(value, jax.Array) or (tag.name, tag.path, path) in ahead:
            continue
        target = _sharding_in_use(value, variable, path, tag=tag, mesh=mesh, axes=axes)
        if target is not None:
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

    Args:
      value: the value; None is returned if it is used as it is.
      variable: the Variable.
      path: its path in the module.
      tag: that of the module.
      mesh: the mesh of the trace, if there is one.
      axes: its axes that are not manual.
    """
    spec = type_spec(value)
    if spec is not None:  # on Explicit axes
        kept = spec
        if is_parameter(variable) and not tag.axes.isdisjoint(spec_axes(spec)):
            kept = with_entries(spec, keep_axes(spec, axes - tag.axes).partitions)
        if spec.reduced:  # JAX counts some gradients of such arrays several times
            kept = with_reduced(kept, ())
        return None if kept == spec else NamedSharding(jax.typeof(value).sharding.mesh, kept)
    known = tag.specs.get(path)
    if mesh is None or known is None or not known.is_gathered:
        return None
    return NamedSharding(mesh_in_trace(mesh), spec_of_slice(known.inside, known.shape, value.shape))


def _gather(arrays: list[jax.Array], targets: list[NamedSharding]) -> list[jax.Array]:
    """Returns arrays with these shardings: resharded on Explicit axes, else constrained.

    Those of one kind go together, which takes less time to trace.
    """
    are_typed = {type_spec(array) is not None for array in arrays}
    if len(are_typed) > 1:  # a module may also hold an array that is on no mesh
        pairs = zip(arrays, targets, strict=True)
        return [gathered for array, target in pairs for gathered in _gather([array], [target])]
    if True in are_typed:
        return jax.sharding.reshard(arrays, targets)  # type: ignore[no-any-return]
    return apply_shardings(arrays, targets) if arrays else []


def spec_of_slice(spec: PartitionSpec, shape: Shape, inner: Shape) -> PartitionSpec:
    """Returns the spec of a loop's slice of an array.

    Which dimensions were removed is inferred from the shapes; unsharded dimensions are preferred,
    then leading ones. ``P(None, "model")`` of shape (4, 8) becomes ``P("model")`` for (8,).

    Args:
      spec: that of the array, with an entry for each dimension.
      shape: the shape of the array.
      inner: the shape of the slice.
    """
    # The dimensions of the array that the slice may have kept, in all ways that fit its shape.
    choices = [
        kept
        for kept in itertools.combinations(range(len(shape)), len(inner))
        if all(shape[dimension] == size for dimension, size in zip(kept, inner, strict=True))
    ]
    # Their entries; first for the choice that keeps the last dimensions, so removes leading ones.
    specs = [[spec.partitions[dimension] for dimension in kept] for kept in reversed(choices)]
    # That with the most sharded dimensions; the first one of several.
    most_sharded = max(specs, key=lambda entries: sum(map(bool, entries)), default=())
    return PartitionSpec(*most_sharded)
