"""Reading a checkpoint into a tree: all of it or, after an error, nothing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.resharding import finished_on_cpu, other_memory, rebuilt, sharding_of
from ..core.transfer import transfer
from ..errors import CheckpointError, raise_listed
from ..partition.constrain import assign
from ..specs.filters import to_predicate
from ..specs.fitting import fit_sharding, unsummed
from .names import Name, NamedArray, is_key, is_reference, is_storable, kind_of, named_arrays
from .sources import NUMBERS, Finder, Piece, Target, check_fit
from .stored import Stored, key_kind, load, opened

_range_of: Any = jnp.iinfo
_ON_HOST = (np.ndarray, np.generic, *NUMBERS)  # these keep their types
_SHOWN = 40  # paths in a message


def prepare(
    folder: Any,
    tree: Any,
    sharding: Any,
    mesh: Any,
    only: Any,
    cast: bool,
    rename: Mapping[str, str] | None,
) -> Callable[[], Any]:
    """Reads and checks everything; returns a function that fills the tree and returns it."""
    flat = flatten(tree)
    if not _compat.trace_is_clean():
        raise ValueError("restore: a checkpoint cannot be read inside a traced function.")
    arrays = _selected(named_arrays(flat), only)
    shardings = _shardings(tree, flat, arrays, sharding, mesh)
    stored = opened("restore", folder)
    finder = Finder(stored, rename)
    targets = [Target(x, finder.source(x), shardings[x.slot]) for x in arrays]
    check_fit(stored, targets, is_part=only is not None, cast=cast)
    values = load("restore", stored, _wanted(stored, targets))
    leaves, references = list(flat.leaves), []
    for array, value in _converted(targets, values):
        if is_reference(array.leaf):
            references.append((array.leaf, value))
        else:
            leaves[array.slot] = value

    def fill() -> Any:
        restored = rebuilt(flat, leaves, "restore")
        for reference, value in references:
            reference[...] = value
        return restored

    return fill


def _selected(arrays: Sequence[NamedArray], only: Any) -> list[NamedArray]:
    """The arrays that a filter selects, all of which can be restored."""
    keep = to_predicate(... if only is None else only)
    selected = [array for array in arrays if keep(array.variable_path, array.variable)]
    if arrays and not selected:
        paths = ", ".join(array.path for array in arrays[:_SHOWN])
        more = ", …" if len(arrays) > _SHOWN else ""
        raise ValueError(f"restore: only={only!r} matches none of the arrays: {paths}{more}.")
    wrong = [f"  {x.path}: {kind_of(x.leaf)}" for x in selected if not is_storable(x.leaf)]
    raise_listed(TypeError, "restore: these are not arrays or numbers:", wrong)
    return selected


def _shardings(
    tree: Any, flat: Flat, arrays: Sequence[NamedArray], sharding: Any, mesh: Any
) -> dict[int, Any]:
    """The sharding of each slot; None for the default device, and for what stays on the host."""
    declared: list[Any] = [None] * len(flat.leaves)
    if sharding is not None:
        _, declared = assign(tree, flat, sharding, mesh=mesh, caller="restore")
    result: dict[int, Any] = {}
    problems = []
    for slot, leaf, *_, path, _, _ in arrays:
        target = None if isinstance(leaf, _ON_HOST) else declared[slot] or _present(leaf)
        if isinstance(target, NamedSharding):
            onto = target.mesh if sharding is not None or mesh is None else mesh
            fit = fit_sharding(target.spec, onto, leaf.shape)
            if isinstance(onto, AbstractMesh):
                fit = fit.refuse("the mesh is abstract, without devices; give a mesh")
            if fit.problems:
                problems.append(fit.line(path))
            elif onto != target.mesh:
                target = NamedSharding(onto, target.spec, memory_kind=other_memory(target))
        result[slot] = target
    raise_listed(ValueError, "restore: these shardings cannot be used:", problems)
    return result


def _present(leaf: Any) -> Any:
    """The sharding of an array; None if it is uncommitted."""
    is_free = isinstance(leaf, jax.Array) and not is_reference(leaf) and not leaf.committed
    present = None if is_free else sharding_of(leaf)
    return present.sharding if isinstance(present, Format) else present


def _wanted(stored: Stored, targets: Sequence[Target]) -> dict[Name, Any]:
    """The sharding with which each array is read; None for a NumPy array."""
    wanted: dict[Name, Any] = {}
    for target in targets:
        for piece, levels in target.pieces():
            # Integers that may wrap are read to the host: JAX may shorten them while it reads them.
            is_host = not _is_global(target.sharding) or _may_wrap(stored, target, piece)
            sharding = None if is_host else _piece_sharding(target, piece, levels)
            wanted[piece.name] = wanted.get(piece.name, sharding) and sharding
    return wanted


def _is_global(sharding: Any) -> bool:
    """Whether an array is read with its sharding; one of this process alone is not."""
    return sharding is not None and not (jax.process_count() > 1 and sharding.is_fully_addressable)


def _piece_sharding(target: Target, piece: Piece, levels: int) -> Any:
    """The sharding of what is read for an array, which may have more or fewer dimensions."""
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
    uses = Counter(piece.name for target in targets for piece, _ in target.pieces())
    converted, wrapping = [], []
    # Layers of one stack follow each other.
    for target in sorted(targets, key=lambda target: next(target.pieces())[0].name):
        array, value = target.array, _assembled(target, values)
        if line := _wrapping(value, array.leaf):
            wrapping.append(f"  {array.path}: {line}")
        else:
            converted.append((array, _like(value, array.leaf, target.sharding)))
        for piece, _ in target.pieces():
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

    def found(source: Any) -> Any:
        if isinstance(source, Piece):
            return values[source.name], source.layer
        return [found(part) for part in source]

    source = target.source
    if isinstance(source, Piece) and not source.layer:
        return values[source.name]
    if all(isinstance(values[piece.name], jax.Array) for piece, _ in target.pieces()):
        built = finished_on_cpu([_assembly(_auto(target.sharding))(found(source))])
        return transfer(built, [unsummed(target.sharding)])[0]
    return _built(found(source), np)


@functools.lru_cache(maxsize=64)
def _assembly(sharding: Any) -> Any:
    """A function that builds arrays of one sharding, which compiles once for each shape."""
    return jax.jit(functools.partial(_built, numpy=jnp), out_shardings=sharding)


def _built(source: Any, numpy: Any) -> Any:
    if isinstance(source, list):
        return numpy.stack([_built(part, numpy) for part in source])
    array, index = source
    return array[index] if index else array


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
    return _placed(value, leaf.dtype, sharding)


def _placed(value: Any, dtype: Any, sharding: Any) -> Any:
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        return jnp.asarray(host) if sharding is None else transfer([host], [sharding])[0]
    if value.dtype == dtype:
        return value if unsummed(sharding) is sharding else transfer([value], [sharding])[0]
    return _conversion(dtype, sharding)(value)


@functools.lru_cache(maxsize=64)
def _conversion(dtype: Any, sharding: Any) -> Any:
    """A function that converts arrays of one sharding, which compiles once for each shape."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)
