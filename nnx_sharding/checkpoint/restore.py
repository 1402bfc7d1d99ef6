"""Reading a checkpoint into a tree: all of it or, after an error, nothing.

    find      where each array of the model is in the checkpoint
    check     shapes and dtypes, before anything is read; one error lists all that does not fit
    load      with the model's shardings, so that each process reads its own shards
    convert   cast and place, one array after the other
    fill      the model, once all arrays are there

A *target* is an array of the model, its *leaf* there, with the name that it has in the checkpoint.

At ``operation.agree()``, each process waits for all others; ``wait_for`` runs what may wait for
devices of other processes. If one process fails, all raise its error there.
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
from .stored import KEY_KINDS, Entry, FilePath, Stored, digest, key_words, load, opened

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
        # The arrays that `only` selects, and where they go.
        arrays = names.selected("restore", names.named_arrays(flat), given.only, names.is_storable)
        names.check_unique("restore", arrays)
        shardings = _shardings(given, flat, arrays)
        # Where they are in the checkpoint, and whether they fit.
        stored = opened("restore", folder)
        found = _names_in_checkpoint(stored, arrays)
        targets = [_Target(x, shardings[x.slot], found.get(x.slot, x.name)) for x in arrays]
        _check_fit(stored, targets, is_part=given.only is not None, cast=given.cast)
        # Before anything is read. If another job replaces the checkpoint, processes may have opened
        # different ones: checksums would not show it for arrays that each process reads completely.
        operation.agree(arrays=lambda: names.digest(arrays), checkpoint=lambda: digest(stored))
        values = load(stored, _shardings_to_read(stored, targets), operation)
        converted = operation.wait_for(lambda: _converted(targets, values))
    return names.filled(flat, converted, "restore")  # now that no process has failed


def _names_in_checkpoint(stored: Stored, arrays: Sequence[NamedArray]) -> dict[int, Name]:
    """Returns the name of each array in the checkpoint, by its slot, unless it is not there.

    The model's name is ``("up", "kernel", "value")``. Orbax alone may also have stored
    ``("up", "kernel")``, as `nnx.to_pure_dict` makes it; or the model has a bare array there, and
    the checkpoint a Variable. So plain names, without the "value", are compared, too.
    """
    by_plain_name = {entry.plain_name: name for name, entry in stored.entries.items()}
    found: dict[int, Name] = {}
    # Equal names come first, and each name is found once. A dict may have the key "value", so that
    # "a/value/b" has a name of its own, and is what "a/b" would be in a Variable.
    unused = {*stored.entries}
    kinds_of_names: Sequence[Callable[[NamedArray], Name | None]] = (
        lambda array: array.name,
        lambda array: by_plain_name.get(array.plain_name),
        lambda array: array.plain_name,
    )
    for stored_name_of in kinds_of_names:
        for array in arrays:
            name = stored_name_of(array)
            if array.slot not in found and name in unused:
                found[array.slot] = name
                unused.remove(name)
    return found


def _shardings(
    given: ModelRestore, flat: Flat, arrays: Sequence[NamedArray]
) -> dict[int, Sharding | None]:
    """Returns the sharding of each array by its slot: the user's, else that which the model has.

    A ``mesh`` without a ``sharding`` replaces the mesh of the model's shardings, whose specs stay.
    None is for the default device, and for what stays a NumPy array or a number.

    Raises:
      ValueError: lists the shardings that do not divide their arrays, or have no devices.
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
            # `assign_shardings` has given the user's shardings their mesh.
            mesh = sharding.mesh
            if given.sharding is None and given.mesh is not None:
                mesh = given.mesh
            # The model's own shardings fit. But a mesh of another size may not divide the arrays,
            # and that of an abstract model has no devices: these are errors, not corrected.
            fit = fit_sharding(sharding.spec, mesh, leaf.shape)
            if isinstance(mesh, AbstractMesh):
                fit = fit.refuse("the mesh is abstract, without devices; give a mesh")  # one more
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
    """Returns the shape and dtype that the checkpoint should have.

    Instead of a dtype, it is the Python type ``int`` for a number such as 3: Orbax stores it with
    64 bits, and it may be any integer. `_is_same_dtype` knows both.

    Args:
      leaf: what the model has: an array, PRNG keys, or a number.
      entry: what the checkpoint has in its place.
    """
    # np.float64 is a float to Python, but keeps its dtype.
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
    # `near(path, paths)` is a hint at the path that was meant, such as "; did you mean 'up'?".
    near = names.suggestions(len(missing) + len(unknown))
    problems = {
        "Missing in the checkpoint": [x + near(path, unknown) for path, x in missing.items()],
        "Not in the model": [] if is_part else [f"  {x}{near(x, [*missing])}" for x in unknown],
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
    # All that is missing may be below one key, as the checkpoint of {"model": model}.
    for top in dict.fromkeys(path.partition("/")[0] for path in unknown):
        if missing and others.issuperset(f"{top}/{path}" for path in missing):
            # Integers are keys of tuples, lists or dicts. The first part of a tuple is the usual
            # case; a dict does for all others.
            key = int(top) if top.isdecimal() else top
            part = "(model,)" if key == 0 else f"{{{key!r}: model}}"
            return f"The checkpoint has the model below {top}/: pass {part}, with only=... for it."
    if missing and all("opt_state" in path.split("/") for path in (*missing, *unknown)):
        return (
            "The optimizer is of another Optax transformation than the saved one. Use that one, or "
            "pass only=nnx.Not(nnx.PathContains('opt_state')): moments and schedules start anew. "
            "To keep moments, pass a dict that has them where the checkpoint has them, such as "
            "{'step': optimizer.step, 'opt_state': {0: optimizer.opt_state[1][0]}}."
        )
    if is_part or missing or not unknown:
        return ""
    return "To restore only what the model has, pass only=... or another filter."


def _is_same_dtype(stored: Any, wanted: np.dtype[Any] | type, cast: bool) -> bool:
    """Whether a stored array may fill one of the wanted dtype, or a number of the wanted type.

    Args:
      stored: a dtype of NumPy, or of PRNG keys.
      wanted: a dtype, or for a Python number its type. A number is filled by one of any size.
      cast: whether another dtype of the same kind will do.
    """
    if isinstance(wanted, type):  # not compared with ==, as np.dtype("float64") == float
        kinds = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
        return bool(np.issubdtype(stored, kinds[wanted]))
    return names.is_castable(stored, wanted, cast)


def _shardings_to_read(stored: Stored, targets: Sequence[_Target]) -> dict[Name, Sharding | None]:
    """Returns the sharding with which each array is read, by its name in the checkpoint.

    With a sharding, each process reads only its own shards. With None, each reads the whole array
    to its host, and `_converted` places it.
    """
    result: dict[Name, Sharding | None] = {}
    for target in targets:
        stored_dtype = stored.entries[target.name].array.dtype
        dtype = getattr(target.array.leaf, "dtype", stored_dtype)
        # JAX may shorten integers while it reads them: only on the host it can be seen whether they
        # wrap.
        may_wrap = names.may_wrap(stored_dtype, dtype)
        # Orbax refuses to save arrays of one process alone, so it is not asked to make any.
        is_of_this_process_alone = (
            jax.process_count() > 1
            and target.sharding is not None
            and target.sharding.is_fully_addressable
        )
        is_to_host = may_wrap or is_of_this_process_alone
        result[target.name] = None if is_to_host else target.sharding
    return result


def _converted(targets: Sequence[_Target], values: dict[Name, Any]) -> list[tuple[NamedArray, Any]]:
    """Returns each array of the model with its new value; integers that would wrap are an error.

    ``values`` are what was read, by name; it is emptied, so that memory is free for what comes.
    """
    converted, wrapping = [], []
    for target in targets:
        leaf = target.array.leaf
        value = values.pop(target.name)  # which frees it before the next one needs memory
        dtype = getattr(leaf, "dtype", None)
        # A jax.Array was read with its sharding, so its numbers do not wrap (`_shardings_to_read`).
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
    """Converts what was read to the kind of value that the model has in its place.

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
    """Converts what was read to an array of a dtype, in its sharding.

    Args:
      value: what was read, on devices or on the host.
      sharding: where it goes; None for the default device.
      dtype: the dtype of the model.
      is_weak: whether the array has a weak type, as that of a number.
    """
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        value = jax.device_put(host) if sharding is None else place_arrays([host], [sharding])[0]
    if value.dtype != dtype or value.weak_type != is_weak:
        # Where it is: Orbax has read it in this sharding, but for unreduced and reduced axes.
        convert = _conversion(without_reductions(sharding), dtype, is_weak)
        [value] = finish_on_cpu([convert(value)])
    [placed] = place_arrays([value], [sharding])  # with these axes; else nothing moves
    return cast(jax.Array, placed)


@functools.lru_cache(maxsize=64)  # the programs of a model, which has few shardings
def _conversion(
    sharding: Sharding | None, dtype: np.dtype[Any], is_weak: bool
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of ``jax.jit`` that converts an array, without moving it."""
    return jax.jit(lambda x: _compat.converted(x, dtype, is_weak), out_shardings=sharding)
