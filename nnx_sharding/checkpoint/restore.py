"""Reading a checkpoint into a tree: all of it or, after an error, nothing.

    find      where each array of the model is in the checkpoint
    check     shapes and dtypes, before anything is read; one error lists all that does not fit
    load      with the model's shardings, so that each process reads its own shards
    convert   cast and place, one array after the other
    fill      the model, once all arrays are there

A *target* is an array of the model, its *leaf* there, with the name that it has in the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .. import _compat
from ..core.agreement import Operation
from ..core.flatten import Flat, flatten
from ..core.memory import is_keys, other_memory
from ..core.place import finish_on_cpu, place_arrays
from ..core.problems import out_of_range
from ..core.tree_shardings import assign_shardings
from ..errors import CheckpointError, by_kind, raise_listed
from ..specs.fitting import fit_sharding, without_reductions
from . import names
from .names import Name, NamedArray
from .stored import KEY_KINDS, Entry, FilePath, Stored, key_words, load, opened

if TYPE_CHECKING:
    from .files import ModelRestore

_NUMBERS = (bool, int, float, complex)

# The type of the Python number that an array with a weak type was, by the kind of its dtype.
_NUMBER_KINDS = {"i": int, "f": float, "c": complex}
_ON_HOST = (np.ndarray, np.generic, *_NUMBERS)  # these keep their types


def restore_into(folder: FilePath, given: ModelRestore) -> Any:
    """Reads a checkpoint and fills the tree of a ``ModelRestore``, which it returns.

    All steps come before the last line, so that an error on any process changes nothing.
    """
    with Operation("restore", folder) as operation:
        flat = flatten(given.tree)
        if not _compat.trace_is_clean():  # values would become its constants
            raise ValueError("restore: a checkpoint cannot be read inside a traced function.")
        # What is wanted: the arrays that `only` selects, and where they go.
        arrays = names.selected("restore", names.named_arrays(flat), given.only, names.is_storable)
        names.check_unique("restore", arrays)
        shardings = _shardings(given, flat, arrays)
        # Where it is in the checkpoint, and whether it fits.
        stored = opened("restore", folder)
        # Orbax alone may have stored plain names, as `nnx.to_pure_dict` makes them.
        by_plain_name = {entry.plain_name: name for name, entry in stored.entries.items()}
        targets = []
        for array in arrays:
            name = array.name
            if name not in stored.entries:
                name = by_plain_name.get(array.plain_name, array.plain_name)
            targets.append(_Target(array, shardings[array.slot], name))
        _check_fit(stored, targets, is_part=given.only is not None, cast=given.cast)
        operation.agree(arrays=lambda: names.digest(arrays))  # before anything is read
        values = load(stored, _wanted(stored, targets), operation)
        converted = operation.wait_for(lambda: _converted(targets, values))
    return names.filled(flat, converted, "restore")  # now that no process has failed


def _shardings(
    given: ModelRestore, flat: Flat, arrays: Sequence[NamedArray]
) -> dict[int, Sharding | None]:
    """Returns the sharding of each array by its slot: the user's, else that which the model has.

    A ``mesh`` without a ``sharding`` replaces the mesh of the model's shardings, whose specs stay.
    None is for the default device, and for what stays a NumPy array or a number.
    """
    declared: list[Any] = [None] * len(flat.leaves)
    if given.sharding is not None:
        _, declared = assign_shardings(
            given.tree, flat, given.sharding, mesh=given.mesh, caller="restore"
        )
    result: dict[int, Sharding | None] = {}
    problems = []
    for array in arrays:
        leaf = array.leaf
        sharding = declared[array.slot] or names.present_sharding(leaf)
        if isinstance(leaf, _ON_HOST):
            sharding = None
        if isinstance(sharding, NamedSharding):
            # The model's own shardings fit, but a mesh of another size may not divide the arrays,
            # and that of an abstract model has no devices. The user's shardings have their mesh.
            mesh = sharding.mesh
            if given.sharding is None and given.mesh is not None:
                mesh = given.mesh
            fit = fit_sharding(sharding.spec, mesh, leaf.shape)
            if isinstance(mesh, AbstractMesh):
                fit = fit.refuse("the mesh is abstract, without devices; give a mesh")
            if fit.problems:
                problems.append(fit.line(array.path))
            elif mesh != sharding.mesh:
                sharding = NamedSharding(mesh, sharding.spec, memory_kind=other_memory(sharding))
        result[array.slot] = sharding
    raise_listed(ValueError, "restore: these shardings cannot be used:", problems)
    return result


class _Target(NamedTuple):
    """One array to restore, and where it is in the checkpoint."""

    array: NamedArray
    sharding: Sharding | None  # None for the default device, and for the host
    name: Name  # in the checkpoint, which may lack it


def _type_of(leaf: Any, entry: Entry) -> tuple[tuple[int, ...], np.dtype[Any] | type]:
    """Returns the shape and dtype that the checkpoint should have; of a number, its type."""
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        return (), type(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.weak_type:  # it was a number
        return tuple(leaf.shape), _NUMBER_KINDS.get(leaf.dtype.kind, leaf.dtype)
    if is_keys(leaf) and not is_keys(entry.array):  # Orbax does not record that they are keys
        leaf = key_words(leaf)
    return tuple(leaf.shape), leaf.dtype


def _check_fit(stored: Stored, targets: Sequence[_Target], *, is_part: bool, cast: bool) -> None:
    """Raises an error that lists how the checkpoint differs from the arrays to restore.

    Args:
      stored: the checkpoint.
      targets: the arrays to restore.
      is_part: whether the checkpoint may have more than these.
      cast: whether dtypes may differ.
    """
    missing: dict[str, str] = {}  # lines by path in the model
    shapes, dtypes = list[str](), list[str]()
    for target in targets:
        leaf, path = target.array.leaf, target.array.path
        entry = stored.entries.get(target.name)
        if entry is None:
            missing[path] = f"  {path}, shape {np.shape(leaf)}"
            continue
        shape, dtype = _type_of(leaf, entry)
        stored_shape, stored_dtype = entry.array.shape, entry.array.dtype
        if stored_shape != shape:
            shapes.append(f"  {path}: {stored_shape} in the checkpoint, {shape} in the model")
        elif not _is_same_dtype(stored_dtype, dtype, cast):
            text = dtype.__name__ if isinstance(dtype, type) else dtype
            dtypes.append(f"  {path}: {stored_dtype} in the checkpoint, {text} in the model")
    read = {target.name for target in targets}
    unread = [entry for name, entry in stored.entries.items() if name not in read]
    unknown = [entry.array.path or "the root" for entry in unread]
    near = names.suggestions(len(missing) + len(unknown))  # near(path, paths): the one meant
    problems = {
        "Missing in the checkpoint": [x + near(path, unknown) for path, x in missing.items()],
        "Not in the model": [] if is_part else [f"  {x}{near(x, missing)}" for x in unknown],
        "Of another shape": shapes,
        names.OF_ANOTHER_DTYPE: dtypes,
    }
    head = f"restore: {stored.folder} does not fit the model."
    raise_listed(CheckpointError, head, by_kind(problems), _remedy(missing, unknown, is_part))


def _remedy(missing: Collection[str], unknown: Sequence[str], is_part: bool) -> str:
    """Says what to pass if the checkpoint has more, has it as a part, or another optimizer state.

    Args:
      missing: the paths in the model that the checkpoint lacks.
      unknown: the paths in the checkpoint that the model lacks.
      is_part: whether the checkpoint may have more than the model.
    """
    others = set(unknown)
    for top in dict.fromkeys(path.partition("/")[0] for path in unknown):
        if missing and others.issuperset(f"{top}/{path}" for path in missing):
            key = int(top) if top.isdecimal() else top
            part = f"{{{key!r}: model}}" if key else "(model,)"
            return f"The checkpoint has the model below {top}/: pass {part}, with only=... for it."
    if missing and all("opt_state" in path.split("/") for path in (*missing, *unknown)):
        return (
            "The optimizer is of another Optax transformation than the saved one. Use that one, or "
            "pass only=nnx.Not(nnx.PathContains('opt_state')) to start with new moments."
        )
    if is_part or missing or not unknown:
        return ""
    return "To restore only what the model has, pass only=... or another filter."


def _is_same_dtype(stored: Any, wanted: np.dtype[Any] | type, cast: bool) -> bool:
    """Whether a stored array may fill one of the wanted dtype, or a number of the wanted type.

    ``cast`` allows others of the same kind. ``stored`` is a dtype of NumPy, or of PRNG keys.
    """
    if isinstance(wanted, type):  # asked for first, as a dtype may be equal to float
        kinds = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
        return bool(np.issubdtype(stored, kinds[wanted]))
    return names.is_castable(stored, wanted, cast)


def _wanted(stored: Stored, targets: Sequence[_Target]) -> dict[Name, Sharding | None]:
    """Returns the sharding with which each stored array is read, each process its own shards.

    None is to read the array to the host of each process.
    """
    wanted: dict[Name, Sharding | None] = {}
    for target in targets:
        stored_dtype = stored.entries[target.name].array.dtype
        dtype = getattr(target.array.leaf, "dtype", stored_dtype)
        # An array of this process alone is not read with its sharding; and integers that may wrap
        # are read to the host, since JAX may shorten them while it reads them.
        is_to_host = names.may_wrap(stored_dtype, dtype) or (
            jax.process_count() > 1
            and target.sharding is not None
            and target.sharding.is_fully_addressable
        )
        wanted[target.name] = None if is_to_host else target.sharding
    return wanted


def _converted(targets: Sequence[_Target], values: dict[Name, Any]) -> list[tuple[NamedArray, Any]]:
    """Returns each array of the model with its new value; integers that would wrap are an error.

    ``values`` are what was read, by name; it is emptied, so that memory is free for what comes.
    """
    converted, wrapping = [], []
    for target in targets:
        leaf = target.array.leaf
        value = values.pop(target.name)  # which frees it before the next one needs memory
        dtype = getattr(leaf, "dtype", None)
        # Those of a jax.Array do not wrap: see `_wanted`.
        if dtype and isinstance(value, np.ndarray) and (limits := out_of_range(value, dtype)):
            wrapping.append(f"  {target.array.path}: {limits}, {dtype}")
        else:
            converted.append((target.array, _like(leaf, value, target.sharding)))
    raise_listed(
        CheckpointError,
        "restore: cast=True would wrap these integers (range in the checkpoint, dtype in the "
        "model):",
        sorted(wrapping),
        "Use a larger dtype in the model.",
    )
    return converted


def _like(leaf: Any, value: Any, sharding: Sharding | None) -> Any:
    """Returns what was read as the kind of value that the model has in its place.

    Args:
      leaf: what the model has: an array, PRNG keys, or a number.
      value: what was read; of keys, their words.
      sharding: where to place an array.
    """
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(value)
    if isinstance(leaf, _NUMBERS):
        return type(leaf)(np.asarray(value).item())
    if isinstance(leaf, np.ndarray):
        return np.array(value, leaf.dtype)
    if is_keys(leaf):  # which were read as their words
        words = _on_devices(value, sharding, value.dtype, is_weak=False)
        return jax.random.wrap_key_data(words, impl=KEY_KINDS[str(leaf.dtype)])
    is_weak = bool(getattr(leaf, "weak_type", False))
    return _on_devices(value, sharding, leaf.dtype, is_weak=is_weak)


def _on_devices(
    value: Any, sharding: Sharding | None, dtype: np.dtype[Any], *, is_weak: bool
) -> jax.Array:
    """Converts the dtype and places the result; without a sharding, on the default device."""
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        value = jax.device_put(host) if sharding is None else place_arrays([host], [sharding])[0]
    if value.dtype != dtype or value.weak_type != is_weak:
        # Orbax lacks unreduced and reduced arrays, so it was read without these axes.
        convert = _conversion(without_reductions(sharding), dtype, is_weak)
        [value] = finish_on_cpu([convert(value)])
    [placed] = place_arrays([value], [sharding])
    return cast(jax.Array, placed)


@functools.lru_cache(maxsize=64)  # the programs of a model, which has few shardings
def _conversion(
    sharding: Sharding | None, dtype: np.dtype[Any], is_weak: bool
) -> Callable[[jax.Array], jax.Array]:
    """Returns a compiled function that converts the dtype; JAX caches it by shape."""
    return jax.jit(lambda x: _compat.converted(x, dtype, is_weak), out_shardings=sharding)
