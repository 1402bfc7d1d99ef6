"""``place``: a model, or any pytree, laid out on devices by a prefix of shardings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.fit import check_mesh, fit_specs, shape_of
from ..core.flatten import Flat, flatten
from ..core.resolve import check_filters, reach, resolve, slot_names
from ..core.specs import Specs, check_specs, target
from ..core.transfer import obstacle, transfer
from ..core.transform import Transform, check_options
from ..core.unflatten import unflatten
from ..errors import NoMeshError
from ..fitting import ON_INDIVISIBLE, OnIndivisible, describe, with_entries
from ..partition.apply import finished_on_cpu, mesh_here, rebuilt
from ..partition.constrain import is_array


@_compat.api_boundary
def place(
    tree: Any,
    sharding: Any,
    mesh: Mesh | None = None,
    *,
    copy: bool = False,
    donate: bool = False,
    on_indivisible: OnIndivisible = "error",
    strict: bool = False,
) -> Any:
    """Lays out a model, or any pytree, as shardings say.

    The arrays may be those of NumPy, on one device, on another mesh (of another shape, other
    devices, or the same in another order), or in the memory of the host
    (``NamedSharding(mesh, spec, memory_kind="pinned_host")``). Numbers become arrays. All that
    stays on its devices is laid out by one compiled program; what comes from elsewhere is copied
    in parts, without one (on one GPU or TPU, JAX compiles a small one for each shape to cut). If
    anything is wrong, nothing is moved, and one error lists it all.

    Until the call is done a device holds its part of the old arrays and of the new ones; the
    program that lays out anew may need as much again. ``donate=True`` gives up the old arrays:
    where parts have the same size, the program works in their buffers. The host holds the parts
    of one array at a time, and only of those that come from it, or from other devices cut
    otherwise. Measured on 8 virtual CPU devices, whose memory is that of the host: old, new and
    all between took 2.0 times the model from NumPy or from one device, 2.9 to 3.0 times where a
    program ran, 2.0 times with ``donate`` (``python -m benchmarks.placing``).

    With several processes each has to make the same call. Arrays that a process holds as a
    whole are taken to be the same in each; nobody compares them, and each process copies only
    the parts of its own devices. An array of several processes keeps its devices.

    Args:
      tree: a module, an optimizer, a Variable, an array, or a pytree of them, abstract ones
        (``jax.ShapeDtypeStruct``) included: they only get the sharding.
      sharding: a ``PartitionSpec``, a ``Sharding``, a :class:`~nnx_sharding.StateSharding`, or a
        prefix of ``tree`` with these as leaves; None leaves a part as it is.
      mesh: what a ``PartitionSpec`` refers to; None for the mesh in context.
      copy: whether to return a copy of the graph with its shared references and leave ``tree``
        as it is. The copy has no memory in common with it, but a ``jax.Ref`` is the same.
      donate: whether to delete the old arrays of JAX. One that ``tree`` still holds elsewhere
        stays.
      on_indivisible: what to do where a spec does not divide a shape, unless a ``StateSharding``
        says it: ``"error"``, ``"replicate"`` the array, or ``"drop"`` the axes.
      strict: whether warnings are errors.

    Returns:
      ``tree``: the same modules and Variables, changed in place, in new containers around them.
      With ``copy`` all is new.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      RuntimeError: JAX is tracing.
      TypeError: something else stands where a sharding or the mesh belongs, or what has a
        sharding is no array.
      ValueError: the shardings are no prefix, no filter matches, specs do not fit the mesh or
        the shapes, the mesh is abstract but an array is not, an array was deleted or would have
        to leave the devices of several processes, or ``copy`` and ``donate`` are both asked for.
      StrictError: ``strict``, and a filter matches nothing or a spec was corrected.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.placement import place
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> rules = StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})
      >>> model = place(nnx.Linear(4, 64, rngs=nnx.Rngs(0)), rules, mesh)
      >>> model.kernel.sharding.shard_shape(model.kernel.shape)
      (4, 16)
    """
    if not _compat.trace_is_clean():
        raise RuntimeError(
            "place moves data, which a function that JAX traces cannot. Place the arrays before "
            "they are passed in, or use nnx_sharding.partition.with_sharding_constraint."
        )
    if copy and donate:
        raise ValueError("place: copy=True keeps the old arrays, donate=True deletes them.")
    check_options("place", on_indivisible=(on_indivisible, ON_INDIVISIBLE))
    flat = flatten(tree)
    rules = Rules("place", mesh, on_indivisible, strict)
    shardings = assigned(tree, flat, sharding, rules)
    moved = transfer(flat.leaves, shardings, donate=donate, alias=not copy)
    leaves = finished_on_cpu(moved, flat.leaves)
    if not copy:
        return rebuilt(flat, leaves, "place")
    return unflatten(flat.structure, _detached(leaves, flat)).root


def _detached(leaves: Sequence[Any], flat: Flat) -> list[Any]:
    """The leaves of a copy: what was not laid out anew is copied, too."""
    return [
        new.copy() if new is old and is_array(old) and hasattr(old, "copy") else new
        for new, old in zip(leaves, flat.leaves, strict=True)
    ]


class Rules(NamedTuple):
    """What a caller says about fitting shardings to arrays.

    Attributes:
      caller: what messages call it.
      mesh: what a ``PartitionSpec`` refers to; None for the mesh in context.
      on_indivisible: what to do where a spec does not divide a shape.
      strict: whether warnings are errors.
      trims: whether a spec is cut to the rank of its array, and what is no array is left alone.
    """

    caller: str
    mesh: Any
    on_indivisible: OnIndivisible = "error"
    strict: bool = False
    trims: bool = False


def assigned(tree: Any, flat: Flat, sharding: Any, rules: Rules) -> list[Any]:
    """The concrete sharding of each array of a tree; None for "as it is".

    The errors are those of :func:`place`; ``flat`` is the tree, taken apart.
    """
    mesh = _mesh_of(rules)
    specs = Specs(sharding)
    check_specs(rules.caller, sharding=specs)
    reached = reach(flat.structure, [target("tree", specs.tree, tree, flat.structure.root)])
    resolved = resolve(reached, flat.objects, flat.leaves, lambda spec: spec)
    names = slot_names(len(flat.leaves), reached)
    found = list(resolved.slots)
    if rules.trims:
        found = [_trimmed(spec, leaf) for spec, leaf in zip(found, flat.leaves, strict=True)]
    if mesh is None:
        _check_mesh(rules.caller, names, found)
    transform = Transform(
        name=rules.caller,
        in_name="sharding",
        in_specs=specs,
        context=mesh,
        on_indivisible=rules.on_indivisible,
        strict=rules.strict,
    )
    if mesh is not None:
        check_mesh(transform, reached, flat.objects, flat.leaves)
    shapes = [shape_of(leaf) for leaf in flat.leaves]
    # A correction is reported last: with what is wrong otherwise it would be of no interest.
    _check_leaves(rules.caller, names, flat.leaves, found, mesh)
    found = fit_specs(transform, names, shapes, found, resolved.on_indivisible)
    check_filters(resolved.uses, name=rules.caller, strict=rules.strict)
    return [
        NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) and mesh is not None else spec
        for spec in found
    ]


def _mesh_of(rules: Rules) -> Any:
    mesh = rules.mesh
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{rules.caller}: mesh is a jax.sharding.Mesh, not {mesh!r}.")
    mesh = _compat.context_mesh() if mesh is None else mesh
    return None if mesh is None else mesh_here(mesh)


def _trimmed(spec: Any, leaf: Any) -> Any:
    """A spec without entries for dimensions that the array does not have."""
    if not is_array(leaf):
        return None
    rank = len(leaf.shape)
    if isinstance(spec, PartitionSpec) and len(spec) > rank:
        return with_entries(spec, spec.partitions[:rank])
    if isinstance(spec, NamedSharding) and len(spec.spec) > rank:
        return spec.update(spec=_trimmed(spec.spec, leaf))
    return spec


def _check_mesh(caller: str, names: Sequence[str], specs: Sequence[Any]) -> None:
    lines = [
        f"  {name}: {spec}"
        for name, spec in zip(names, specs, strict=True)
        if isinstance(spec, PartitionSpec)
    ]
    if lines:
        raise NoMeshError(
            f"{caller}: these partition specs have no mesh:\n"
            + "\n".join(lines)
            + "\nPass mesh=..., use `with jax.set_mesh(mesh):`, or give NamedShardings."
        )


def _check_leaves(
    caller: str, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[Any], mesh: Any
) -> None:
    """Everything that has a spec can be laid out by it, whatever its shape is."""
    triples = [t for t in zip(names, leaves, specs, strict=True) if t[2] is not None]
    wrong = [
        f"  {name}: a {type(leaf).__name__}"
        for name, leaf, _ in triples
        if not is_array(leaf) and not isinstance(leaf, bool | int | float | complex)
    ]
    if wrong:
        raise TypeError(
            f"{caller}: these have a sharding and are no arrays:\n"
            + "\n".join(wrong)
            + "\nGive them None, or keep them out of the tree."
        )
    lines = [
        f"  {name}, shape {shape_of(leaf)}, {describe(spec)}: {problem}"
        for name, leaf, spec in triples
        for problem in _problems(leaf, spec, mesh)
    ]
    if lines:
        raise ValueError(f"{caller}: these arrays cannot be placed:\n" + "\n".join(lines))


def _problems(leaf: Any, spec: Any, mesh: Any) -> Iterator[str]:
    spec = spec.sharding if isinstance(spec, Format) else spec
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        return
    if isinstance(spec, PartitionSpec):
        if PartitionSpec.UNCONSTRAINED in spec.partitions:
            yield "UNCONSTRAINED is for functions that are traced; write None"
            return
        spec = NamedSharding(mesh, PartitionSpec())
    problem = obstacle(leaf, spec) if isinstance(spec, Sharding) else None
    if problem is not None:
        yield problem
