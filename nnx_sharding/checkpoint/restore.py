"""Reading a checkpoint into a tree: all of it or, after an error, nothing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.resharding import finished_on_cpu, other_memory
from ..core.transfer import transfer
from ..errors import CheckpointError, raise_listed
from ..partition.constrain import assign
from ..specs.fitting import fit_sharding, unsummed
from .names import (
    Name,
    NamedArray,
    filled,
    is_key,
    is_storable,
    named_arrays,
    present_sharding,
    selected,
)
from .sources import NUMBERS, Finder, Piece, Target, check_fit
from .stored import Stored, key_kind, load, opened

_range_of: Any = jnp.iinfo
_ON_HOST = (np.ndarray, np.generic, *NUMBERS)  # these keep their types


def restore_into(
    folder: Any,
    tree: Any,
    sharding: Any,
    mesh: Any,
    only: Any,
    cast: bool,
    rename: Mapping[str, str] | None,
) -> Any:
    """Reads and checks everything, then fills the tree and returns it."""
    flat = flatten(tree)
    if not _compat.trace_is_clean():
        raise ValueError("restore: a checkpoint cannot be read inside a traced function.")
    arrays = selected("restore", named_arrays(flat), only, is_storable)
    shardings = _shardings(tree, flat, arrays, sharding, mesh)
    stored = opened("restore", folder)
    finder = Finder(stored, rename)
    targets = [Target(x, finder.source(x), shardings[x.slot]) for x in arrays]
    check_fit(stored, targets, is_part=only is not None, cast=cast)
    values = load("restore", stored, _wanted(stored, targets))
    return filled(flat, _converted(targets, values), "restore")


def _shardings(
    tree: Any, flat: Flat, arrays: Sequence[NamedArray], sharding: Any, mesh: Any
) -> dict[int, Any]:
    """The sharding of each slot; None for the default device, and for what stays on the host."""
    declared: list[Any] = [None] * len(flat.leaves)
    if sharding is not None:
        options: Any = {"strict": False, "caller": "restore", "needs_mesh": True}
        assigned = assign(tree, flat, sharding, mesh=mesh, **options)
        declared = [assignment.sharding for assignment in assigned]
    result: dict[int, Any] = {}
    problems = []
    for array in arrays:
        slot, leaf = array.slot, array.leaf
        target = None if isinstance(leaf, _ON_HOST) else declared[slot] or present_sharding(leaf)
        if isinstance(target, NamedSharding):
            onto = target.mesh if sharding is not None or mesh is None else mesh
            fit = fit_sharding(target.spec, onto, leaf.shape)
            if isinstance(onto, AbstractMesh):
                fit = fit.refuse("the mesh is abstract, without devices; give a mesh")
            if fit.problems:
                problems.append(fit.line(array.path))
            elif onto != target.mesh:
                target = NamedSharding(onto, target.spec, memory_kind=other_memory(target))
        result[slot] = target
    raise_listed(ValueError, "restore: these shardings cannot be used:", problems)
    return result


def _wanted(stored: Stored, targets: Sequence[Target]) -> dict[Name, Any]:
    """The sharding with which each array is read; None for a NumPy array."""
    wanted: dict[Name, Any] = {}
    for target in targets:
        for piece in target.source.pieces:
            # Integers that may wrap are read to the host: JAX may shorten them while it reads them.
            is_host = not _is_global(target.sharding) or _may_wrap(stored, target, piece)
            sharding = None if is_host else _piece_sharding(target, piece)
            wanted[piece.name] = wanted.get(piece.name, sharding) and sharding
    return wanted


def _is_global(sharding: Any) -> bool:
    """Whether an array is read with its sharding; one of this process alone is not."""
    return sharding is not None and not (jax.process_count() > 1 and sharding.is_fully_addressable)


def _piece_sharding(target: Target, piece: Piece) -> Any:
    """The sharding of what is read for an array, which may have more or fewer dimensions."""
    levels = len(target.source.stacked)
    if not levels and not piece.layer:
        return target.sharding
    if not isinstance(target.sharding, NamedSharding):
        return None
    entries = target.sharding.spec.partitions[levels:]
    spec = PartitionSpec(*[None] * len(piece.layer), *entries)
    return NamedSharding(_auto(target.sharding).mesh, spec)


def _auto(sharding: NamedSharding) -> NamedSharding:
    """A sharding in the default memory, on Auto axes, where any operation is possible."""
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(*sharding.spec.partitions))


def _may_wrap(stored: Stored, target: Target, piece: Piece) -> bool:
    """Whether integers of the checkpoint may be out of range for the dtype in the model."""
    there, leaf = stored.entries[piece.name].array.dtype, target.array.leaf
    if isinstance(leaf, NUMBERS):
        return False
    if not all(jnp.issubdtype(dtype, jnp.integer) for dtype in (there, leaf.dtype)):
        return False
    old, new = _range_of(there), _range_of(leaf.dtype)
    return bool(old.min < new.min or old.max > new.max)


def _converted(targets: Sequence[Target], values: dict[Name, Any]) -> list[tuple[NamedArray, Any]]:
    """Each array in the form of the model's; what was read is freed once nothing else needs it."""
    uses = Counter(piece.name for target in targets for piece in target.source.pieces)
    converted, wrapping = [], []
    # Layers of one stack follow each other.
    for target in sorted(targets, key=lambda target: target.source.pieces[0].name):
        array, value = target.array, _assembled(target, values)
        if line := _wrapping(value, array.leaf):
            wrapping.append(f"  {array.path}: {line}")
        else:
            converted.append((array, _like(value, array.leaf, target.sharding)))
        for piece in target.source.pieces:
            uses[piece.name] -= 1
            if not uses[piece.name]:
                del values[piece.name]
    raise_listed(
        CheckpointError,
        "restore: cast=True would wrap these integers (range in the checkpoint, dtype in the "
        "model):",
        sorted(wrapping),
        "Use a larger dtype in the model.",
    )
    return converted


def _wrapping(value: Any, leaf: Any) -> str:
    """The range of integers (on the host) that a smaller dtype cannot hold; empty if it can."""
    dtype: Any = getattr(leaf, "dtype", np.dtype(object))
    is_read = isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu"
    if not is_read or not jnp.issubdtype(dtype, jnp.integer):
        return ""
    low, high, info = int(value.min()), int(value.max()), _range_of(dtype)
    return "" if info.min <= low and high <= info.max else f"{low} to {high}, {dtype}"


def _assembled(target: Target, values: Mapping[Name, Any]) -> Any:
    """An array as it was read, one layer of it, or stacked layers."""
    pieces, stacked = target.source
    parts = [(values[piece.name], piece.layer) for piece in pieces]
    if not stacked and not pieces[0].layer:
        return parts[0][0]
    if not all(isinstance(array, jax.Array) for array, _ in parts):
        return _built(parts, stacked, np)
    [built] = finished_on_cpu([_assembly(stacked, _auto(target.sharding))(parts)])
    return transfer([built], [unsummed(target.sharding)])[0]


@functools.lru_cache(maxsize=64)
def _assembly(stacked: tuple[int, ...], sharding: Any) -> Any:
    """A function that builds arrays of one sharding, which compiles once for each shape."""
    build = functools.partial(_built, stacked=stacked, numpy=jnp)
    return jax.jit(build, out_shardings=sharding)


def _built(parts: Sequence[tuple[Any, Any]], stacked: tuple[int, ...], numpy: Any) -> Any:
    layers = [array[index] if index else array for array, index in parts]
    return numpy.stack(layers).reshape(*stacked, *layers[0].shape) if stacked else layers[0]


def _like(value: Any, leaf: Any, sharding: Any) -> Any:
    """What was read, with the dtype and sharding of the model."""
    if isinstance(leaf, NUMBERS):
        return type(leaf)(np.asarray(value).item())
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(value)
    if isinstance(leaf, np.ndarray):
        return np.array(value, leaf.dtype)
    if is_key(leaf):
        words = _placed(value, value.dtype, sharding)
        return jax.random.wrap_key_data(words, impl=key_kind(leaf.dtype))
    return _placed(value, leaf.dtype, sharding, bool(getattr(leaf, "weak_type", False)))


def _placed(value: Any, dtype: Any, sharding: Any, is_weak: bool = False) -> Any:
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        value = jnp.asarray(host) if sharding is None else transfer([host], [sharding])[0]
    elif value.dtype == dtype and unsummed(sharding) is not sharding:
        value = transfer([value], [sharding])[0]
    is_like = value.dtype == dtype and value.weak_type == is_weak
    return value if is_like else _conversion(dtype, is_weak, sharding)(value)


@functools.lru_cache(maxsize=64)
def _conversion(dtype: Any, is_weak: bool, sharding: Any) -> Any:
    """A function that converts arrays of one sharding, which compiles once for each shape."""
    return jax.jit(lambda x: _compat.converted(x, dtype, is_weak), out_shardings=sharding)
