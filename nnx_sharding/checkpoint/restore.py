"""Reads a checkpoint into a tree: all of it or, after an error, nothing.

    find      the name in the checkpoint of each array of the model
    check     shapes and dtypes, before anything is read; one error lists all misfits
    load      arrays in the model's shardings, so that each process reads its own shards
    convert   arrays to the model's dtypes and shardings, one after the other
    fill      the model, once all arrays are there

A *target* is an array of the model, the *leaf*, with its name in the checkpoint.

At ``operation.agree()``, each process waits for all others; with named facts, an error is raised if
these differ among processes. ``operation.wait_for`` calls a function that may wait for devices of
other processes. If one process fails, all raise its error there.

A `NamedArray` has the array of the model (``leaf``), its index in the flat list of arrays
(``slot``), its keys in a checkpoint (``name``), also without the key of a Variable's value
(``plain_name``), and a path for messages. An `Entry` is an array in the checkpoint, before it is
read: ``entry.array`` has its path, shape and dtype.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.memory import is_keys, other_memory
from ..core.place import finish_on_cpu, place_arrays
from ..core.problems import out_of_range
from ..core.tree_shardings import assign_shardings
from ..errors import CheckpointError, by_kind, message, raise_if_any
from ..specs.fitting import fit_sharding, without_reductions
from ..specs.paths import path_string
from . import names
from .agreement import Operation
from .names import Name, NamedArray
from .optimizer_states import remedy_for_optimizer
from .renamed import ModelArray, Renaming, find_renaming
from .stored import KEY_KINDS, Entry, FilePath, Stored, digest, key_words, load, opened

if TYPE_CHECKING:
    from .files import ModelRestore

_LOGGER = logging.getLogger("nnx_sharding")

_NUMBERS = (bool, int, float, complex)

# An array with a weak type was a Python number: its type, by the kind of the dtype.
_NUMBER_KINDS = {"i": int, "f": float, "c": complex}
_ON_HOST = (np.ndarray, np.generic, *_NUMBERS)  # leaves of these types stay on the host


def restore_into(folder: FilePath, args: ModelRestore) -> Any:
    """Reads a checkpoint, and fills and returns the tree of a ``ModelRestore``.

    The tree changes in the last line only, so that an error on any process changes nothing.
    """
    with Operation("restore", folder) as operation:
        flat = flatten(args.tree)
        # In a trace, values would become constants of the program.
        if not _compat.trace_is_clean():
            raise ValueError("restore: a checkpoint cannot be read inside a traced function.")
        # The arrays that `only` selects, and their shardings.
        arrays = names.selected("restore", names.named_arrays(flat), args.only, names.is_storable)
        names.check_unique("restore", arrays)
        shardings = _shardings(args, flat, arrays)
        # Their names in the checkpoint. `_check_fit` raises an error unless all of them fit.
        stored = opened("restore", folder)
        stored_names = _names_in_checkpoint(stored, arrays, flat)
        targets = [_Target(x, shardings[x.slot], stored_names.get(x.slot, x.name)) for x in arrays]
        _check_fit(stored, targets, args)
        # The processes agree before anything is read, because they may have opened different
        # checkpoints if another job replaces it. Checksums would not show that for arrays that each
        # process reads completely.
        operation.agree(arrays=lambda: names.digest(arrays), checkpoint=lambda: digest(stored))
        values = load(stored, _shardings_to_read(stored, targets), operation)
        converted = operation.wait_for(lambda: _converted(targets, values))
    if args.only is not None:
        _warn_of_further(stored, targets, flat)
    return names.filled(flat, converted, "restore")  # safe because no process has failed


def _names_in_checkpoint(
    stored: Stored, arrays: Sequence[NamedArray], flat: Flat
) -> dict[int, Name]:
    """Returns the name of each array in the checkpoint, by its slot. Missing arrays are left out.

    The model's name is ``("up", "kernel", "value")``. A checkpoint that Orbax alone wrote may have
    ``("up", "kernel")`` instead, from `nnx.to_pure_dict`. Or the model has a bare array where the
    checkpoint has a Variable. So plain names, without the "value", are compared as well.

    An array that is missing under its first name may be in another part of the tree, too, and is
    then found by its name there: `{"params": model, "rest": model}` reads both halves of a split.

    Args:
      arrays: the arrays of the model that are to be restored.
      flat: the tree, flattened.
    """
    by_plain_name = {entry.plain_name: name for name, entry in stored.entries.items()}
    found: dict[int, Name] = {}
    # Equal names are compared first, and each stored name is used once. The order matters because a
    # dict may have the key "value": "a/value/b" may be a name of its own, or the name of "a/b" in a
    # Variable.
    unused = {*stored.entries}
    kinds_of_names: Sequence[Callable[[NamedArray], Name | None]] = (
        lambda array: array.name,
        lambda array: by_plain_name.get(array.plain_name),
        lambda array: array.plain_name,
    )

    def find(arrays: Sequence[NamedArray]) -> None:  # adds to `found`
        for stored_name_of in kinds_of_names:
            for array in arrays:
                name = stored_name_of(array)
                if array.slot not in found and name in unused:
                    found[array.slot] = name
                    unused.remove(name)

    find(arrays)
    missing = {array.slot for array in arrays}.difference(found)
    if missing:
        find([array for array in names.arrays_of_parts(flat) if array.slot in missing])
    return found


def _shardings(
    args: ModelRestore, flat: Flat, arrays: Sequence[NamedArray]
) -> dict[int, Sharding | None]:
    """Returns the sharding of each array by its slot: the user's, else the model's.

    A ``mesh`` without a ``sharding`` replaces the mesh of the model's shardings, whose specs stay.
    None is for the default device, and for leaves that stay NumPy arrays or numbers.

    Args:
      args: the user's ``sharding`` and ``mesh``, and the tree.
      arrays: the arrays of the tree that are to be restored.

    Raises:
      ValueError: shardings do not divide their arrays, or have no devices; all are listed.
    """
    declared: list[Any] = [None] * len(flat.leaves)
    if args.sharding is not None:
        _, declared = assign_shardings(flat, args.sharding, mesh=args.mesh, caller="restore")
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
            if args.sharding is None and args.mesh is not None:
                mesh = args.mesh
            # The model's own shardings fit, but a mesh of another size may not divide the arrays,
            # and the mesh of an abstract model has no devices. Both are errors, not corrected.
            fit = fit_sharding(sharding.spec, mesh, leaf.shape)
            if isinstance(mesh, AbstractMesh):
                # `refuse` adds a problem.
                fit = fit.refuse("the mesh is abstract, without devices; give a mesh")
            if fit.problems:
                problems.append(fit.line(array.path))
            elif mesh != sharding.mesh:
                sharding = NamedSharding(mesh, sharding.spec, memory_kind=other_memory(sharding))
        result[array.slot] = sharding
    raise_if_any(ValueError, "restore: these shardings cannot be used:", problems)
    return result


class _Target(NamedTuple):
    """One array to restore, and its name in the checkpoint."""

    array: NamedArray  # the array of the model
    sharding: Sharding | None  # None for the default device, and for the host
    name: Name  # the name in the checkpoint; if the checkpoint lacks the array, that in the model


def _type_of(leaf: Any, entry: Entry) -> tuple[tuple[int, ...], np.dtype[Any] | type]:
    """Returns the shape and dtype that the checkpoint should have for a leaf.

    For a number such as 3, the Python type ``int`` takes the place of a dtype, because Orbax stores
    it with 64 bits, and any integer fits. `_is_same_dtype` accepts dtypes and such types.

    Args:
      leaf: the leaf of the model: an array, PRNG keys, or a number.
      entry: the array that the checkpoint has for the leaf.
    """
    # A NumPy number is left out: np.float64 is a float to Python, but it keeps its dtype.
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        return (), type(leaf)
    # An abstract array with a weak type was a number.
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.weak_type:
        return tuple(leaf.shape), _NUMBER_KINDS.get(leaf.dtype.kind, leaf.dtype)
    # Checkpoints that Orbax wrote without this library do not say that words are keys, so the words
    # are compared.
    if is_keys(leaf) and not is_keys(entry.array):
        leaf = key_words(leaf)
    return tuple(leaf.shape), leaf.dtype


def _check_fit(stored: Stored, targets: Sequence[_Target], args: ModelRestore) -> None:
    """Raises a CheckpointError if the checkpoint differs from the arrays to restore.

    The error lists all differences.

    Args:
      args: says what the user passed, whether the checkpoint may have other arrays as well, and
        whether dtypes may differ.
    """
    is_part = args.only is not None
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
        elif not _is_same_dtype(stored_dtype, dtype, args.cast):
            text = dtype.__name__ if isinstance(dtype, type) else dtype
            dtypes.append(f"  {path}: {stored_dtype} in the checkpoint, {text} in the model")
    target_names = {target.name for target in targets}
    unread = [entry for name, entry in stored.entries.items() if name not in target_names]
    unknown = [entry.array.path or "the root" for entry in unread]
    remedy = _remedy(missing, unknown, is_part)
    renamed = list[str]()
    if missing and not remedy:
        paths = {target.array.path: target.array.variable_path for target in targets}
        found = [keys for path, keys in paths.items() if path not in missing]
        remedy = remedy_for_optimizer([paths[path] for path in missing], found, unknown)
    if missing and not remedy:
        renaming = _renaming(stored, targets, unread, args)
        if renaming is not None:
            # Each renamed module has one line, so its arrays are not listed.
            renamed = renaming.lines()
            for keys in renaming.pairs:
                missing.pop(path_string(keys), None)
            read = set(map(path_string, renaming.pairs.values()))
            unknown = [path for path in unknown if path not in read]
            options = _options(args, has_further=bool(unknown))
            remedy = "" if options is None else renaming.remedy(options, is_part=bool(missing))
    # `near(path, paths)` returns a hint, such as "; did you mean 'up'?", or an empty text.
    near = names.suggestions(len(missing) + len(unknown))
    problems = {
        "Under other names": renamed,
        "Missing in the checkpoint": [x + near(path, unknown) for path, x in missing.items()],
        "Not in the model": [] if is_part else [f"  {x}{near(x, [*missing])}" for x in unknown],
        "Of another shape": shapes,
        names.OF_ANOTHER_DTYPE: dtypes,
    }
    head = f"restore: {stored.folder} does not fit the model."
    raise_if_any(CheckpointError, head, by_kind(problems), remedy)


def _options(args: ModelRestore, *, has_further: bool) -> str | None:
    """Returns code for the options of a call that a message proposes, those that the user passed.

    None if an option may mean something else in a tree with other paths: a filter or a sharding
    that looks at paths.

    Args:
      has_further: whether the checkpoint has arrays that the model lacks.
    """
    filters = args.only if isinstance(args.only, tuple | list) else (args.only,)
    has_types = all(isinstance(part, type) for part in filters)
    if not (args.only is None or args.only is ... or has_types):
        return None
    if not isinstance(args.sharding, PartitionSpec | Sharding | None):
        return None
    options = "" if args.sharding is None else ", sharding=sharding"
    if args.mesh is not None:
        options += ", mesh=mesh"
    if args.only is ... or (args.only is None and has_further):
        options += ", only=..."
    elif args.only is not None:
        options += ", only=only"
    return options + (", cast=True" if args.cast else "")


def _renaming(
    stored: Stored, targets: Sequence[_Target], unread: Sequence[Entry], args: ModelRestore
) -> Renaming | None:
    """Returns the modules that the checkpoint has under other names; None without any."""
    entries = {entry.plain_name: entry for entry in unread}
    leaves = {target.array.plain_name: target.array.leaf for target in targets}

    def fits(keys: Name, path: Name) -> bool:
        """Whether an array of the model has the shape and dtype of one of the checkpoint."""
        entry = entries[path]
        shape, dtype = _type_of(leaves[keys], entry)
        return entry.array.shape == shape and _is_same_dtype(entry.array.dtype, dtype, args.cast)

    arrays = []
    for target in targets:
        entry = stored.entries.get(target.name)
        path = None if entry is None else entry.plain_name
        arrays.append(ModelArray(target.array.plain_name, target.array.variable_path, path))
    return find_renaming(args.tree, arrays, [*entries], fits)


def _remedy(missing: Collection[str], unknown: Sequence[str], is_part: bool) -> str:
    """Returns the last line of the error, which says what to pass to `restore`; maybe empty.

    Args:
      missing: the paths in the model that the checkpoint lacks.
      unknown: the paths in the checkpoint that the model lacks.
      is_part: whether the checkpoint may have more than the model.
    """
    # The checkpoint may have all missing arrays below one key, for example of {"model": model}, or
    # each below one of some keys, as of {"params": params, "rest": rest} after a split.
    below: dict[str, list[str]] = {}  # key → the missing arrays below it
    for path in unknown:
        top, _, inner_path = path.partition("/")
        if inner_path in missing:
            below.setdefault(top, []).append(inner_path)
    tops = [top for top, paths in below.items() if len(paths) == len(missing)][:1] or [*below]
    if missing and sorted(path for top in tops for path in below[top]) == sorted(missing):
        # An integer is a key of a tuple, list or dict. The key 0 is most often that of a tuple. A
        # dict can be passed for all others.
        keys = [int(top) if top.isdecimal() else top for top in tops]
        items = ", ".join(f"{key!r}: model" for key in keys)
        part = "(model,)" if keys == [0] else f"{{{items}}}"
        places = " and ".join(f"{top}/" for top in tops)
        return f"The checkpoint has the model below {places}: pass {part}, with only=... for it."
    if is_part or missing or not unknown:
        return ""
    return "To restore only what the model has, pass only=... or another filter."


def _warn_of_further(stored: Stored, targets: Sequence[_Target], flat: Flat) -> None:
    """Logs the arrays that ``only`` would have selected, if the model had them.

    If the model has six layers and the checkpoint has twelve, these are the arrays of layers 6 to
    11. The name of each differs only in numbers from the name of an array that was read. The first
    key has to be equal, because one model of a saved tuple may be restored alone.
    """

    def pattern(name: Name) -> Name:
        """Returns a name with 0 in place of each key that is a number, except the first key."""
        first, *rest = name or ("",)
        return (first, *("0" if key.isdecimal() else key for key in rest))

    read = {target.name for target in targets}
    patterns = set(map(pattern, read))
    # `only` may leave some of these out.
    all_arrays = [*names.named_arrays(flat), *names.arrays_of_parts(flat)]
    in_model = {array.plain_name for array in all_arrays}
    lines = [
        f"  {entry.array.path}"
        for name, entry in stored.entries.items()
        if name not in read and pattern(name) in patterns and entry.plain_name not in in_model
    ]
    if lines:
        head = f"restore: {stored.folder} has more of a list than the model; these were not read:"
        _LOGGER.warning("%s", message(head, lines))


def _is_same_dtype(stored: Any, wanted: np.dtype[Any] | type, cast: bool) -> bool:
    """Whether a stored array may fill an array of the wanted dtype, or a number of that type.

    Args:
      stored: a dtype of NumPy, or of PRNG keys.
      wanted: a dtype, or the type of a Python number. Stored numbers of any size fill a number.
      cast: whether another dtype of the same kind is accepted.
    """
    # A type is not compared with ==, because np.dtype("float64") == float.
    if isinstance(wanted, type):
        kinds = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
        return bool(np.issubdtype(stored, kinds[wanted]))
    return names.is_castable(stored, wanted, cast)


def _shardings_to_read(stored: Stored, targets: Sequence[_Target]) -> dict[Name, Sharding | None]:
    """Returns the sharding with which each array is read, by its name in the checkpoint.

    With a sharding, each process reads only its own shards. With None, each process reads the whole
    array to its host, and `_converted` places it.
    """
    result: dict[Name, Sharding | None] = {}
    for target in targets:
        stored_dtype = stored.entries[target.name].array.dtype
        dtype = getattr(target.array.leaf, "dtype", stored_dtype)
        # Integers that may wrap are read to the host, because JAX may shorten integers while it
        # reads them, and only the host can check whether they wrap.
        may_wrap = names.may_wrap(stored_dtype, dtype)
        # An array of one process alone is read to the host as well, because Orbax refuses to save
        # such arrays, so it may not make them either.
        is_of_this_process_alone = (
            jax.process_count() > 1
            and target.sharding is not None
            and target.sharding.is_fully_addressable
        )
        is_to_host = may_wrap or is_of_this_process_alone
        result[target.name] = None if is_to_host else target.sharding
    return result


def _converted(targets: Sequence[_Target], values: dict[Name, Any]) -> list[tuple[NamedArray, Any]]:
    """Returns each array of the model with its new value, in its dtype and sharding.

    ``targets`` are the arrays, all of which the checkpoint has, because `_check_fit` has raised an
    error otherwise. ``values`` has the arrays that were read, by name. The dict is emptied, so that
    the memory is free for the arrays that follow.

    Raises:
      CheckpointError: integers would wrap; all such arrays are listed.
    """
    converted, wrapping = [], []
    for target in targets:
        leaf = target.array.leaf
        value = values.pop(target.name)  # freed before the next array needs memory
        dtype = getattr(leaf, "dtype", None)
        # The range of the integers, if they do not fit; else an empty text. A jax.Array is not
        # checked, because arrays whose integers may wrap are read to the host
        # (`_shardings_to_read`).
        limits = ""
        if dtype and isinstance(value, np.ndarray):
            limits = out_of_range(value, dtype)
        if limits:
            wrapping.append(f"  {target.array.path}: {limits}, {dtype}")
        else:
            converted.append((target.array, _like(leaf, value, target.sharding)))
    raise_if_any(
        CheckpointError,
        "restore: cast=True would wrap these integers (range in the checkpoint, dtype in the "
        "model):",
        sorted(wrapping),
        "Use a larger dtype in the model.",
    )
    return converted


def _like(leaf: Any, value: Any, sharding: Sharding | None) -> Any:
    """Converts a value that was read to the kind of value that the model has in its place.

    Args:
      leaf: the leaf of the model: an array, PRNG keys, or a number.
      value: the value that was read; for keys, their words.
      sharding: the sharding of the new array; None for the default device.
    """
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(value)
    if isinstance(leaf, _NUMBERS):
        return type(leaf)(np.asarray(value).item())
    if isinstance(leaf, np.ndarray):
        return np.array(value, leaf.dtype)
    if is_keys(leaf):  # the value is the words of the keys
        words = _on_devices(value, sharding, value.dtype, is_weak=False)
        return jax.random.wrap_key_data(words, impl=KEY_KINDS[str(leaf.dtype)])
    is_weak = bool(getattr(leaf, "weak_type", False))
    return _on_devices(value, sharding, leaf.dtype, is_weak=is_weak)


def _on_devices(
    value: Any, sharding: Sharding | None, dtype: np.dtype[Any], *, is_weak: bool
) -> jax.Array:
    """Converts a value that was read to an array of a dtype, in its sharding.

    Args:
      value: the value, on devices or on the host.
      sharding: the sharding of the array; None for the default device.
      dtype: the dtype of the array in the model.
      is_weak: whether the array has a weak type, like an array made of a number.
    """
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        value = jax.device_put(host) if sharding is None else place_arrays([host], [sharding])[0]
    if value.dtype != dtype or value.weak_type != is_weak:
        # The array is converted where it is: Orbax has read it in this sharding, but without the
        # unreduced and reduced axes.
        convert = _conversion(without_reductions(sharding), dtype, is_weak)
        [value] = finish_on_cpu([convert(value)])
    # This adds unreduced and reduced axes. Without any, nothing moves.
    [placed] = place_arrays([value], [sharding])
    return cast(jax.Array, placed)


@functools.lru_cache(maxsize=64)  # a model has few shardings and dtypes, so programs are reused
def _conversion(
    sharding: Sharding | None, dtype: np.dtype[Any], is_weak: bool
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of ``jax.jit`` that converts an array, without moving it."""
    return jax.jit(lambda x: _compat.converted(x, dtype, is_weak), out_shardings=sharding)
