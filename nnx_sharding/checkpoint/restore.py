"""Reading a checkpoint into a tree: all of it or, after an error, nothing.

    find      where each array of the model is in the checkpoint: under its name, or a new one
    check     shapes and dtypes, before anything is read; one error lists all that does not fit
    load      with the model's shardings, so that each process reads its own shards
    convert   stack or unstack layers, cast, place, one array after the other
    fill      the model, once all arrays are there

A checkpoint of a list of layers fits a *stack* of them (one array with a leading dimension of
layers), and the reverse: an array of the model then consists of several *pieces*, which are stored
arrays, or is one layer of a piece. Names tell which: ``blocks/layers/kernel`` in a stack is
``blocks/0/kernel``, ``blocks/1/kernel``, … in a list. A *target* is an array of the model, its
*leaf* there, together with its pieces. *Levels* count dimensions of layers, of which nested stacks
have several.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.agreement import Operation
from ..core.flatten import Flat, flatten
from ..core.memory import other_memory
from ..core.place import finish_on_cpu, is_keys, place_arrays
from ..core.problems import out_of_range
from ..core.tree_shardings import assign_shardings
from ..errors import CheckpointError, by_kind, raise_listed
from ..specs.fitting import fit_sharding, without_reductions
from ..specs.paths import path_string
from . import names
from .names import Name, NamedArray
from .stored import KEY_KINDS, Entry, FilePath, Stored, key_words, load, opened

if TYPE_CHECKING:
    from .files import ModelRestore

_NUMBERS = (bool, int, float, complex)

# The type of the Python number that an array with a weak type was, by the kind of its dtype.
_NUMBER_KINDS = {"i": int, "f": float, "c": complex}
_LAYERS = "layers"  # the attribute of a `Stack` in the place of the index into a list
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
        shardings = _shardings(given, flat, arrays)
        # Where it is in the checkpoint, and whether it fits.
        stored = opened("restore", folder)
        finder = _Finder(stored, given.rename)
        targets = [finder.target(array, shardings[array.slot]) for array in arrays]
        _check_fit(stored, targets, is_part=given.only is not None, cast=given.cast)
        operation.agree(arrays=lambda: names.digest(arrays))  # before anything is read
        values = load(stored, _wanted(stored, targets), operation)
        converted = operation.wait_for(lambda: _converted(targets, values))
    return names.filled(flat, converted, "restore")  # now that no process has failed


def _shardings(
    given: ModelRestore, flat: Flat, arrays: Sequence[NamedArray]
) -> dict[int, Sharding | None]:
    """Decides where each array goes: by the user's shardings, else by those that the model has.

    A ``mesh`` without a ``sharding`` replaces the mesh of the model's shardings, whose specs stay.

    Returns:
      The sharding of each, by its index in ``flat.leaves``; None for one that goes to the default
      device, or stays a NumPy array or a number.
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


class _Piece(NamedTuple):
    """An array of a checkpoint, or one layer of it."""

    name: Name
    layer: tuple[int, ...] = ()  # its index in the leading dimensions; () for all of the array


class _Target(NamedTuple):
    """One array to restore, and where it is in the checkpoint."""

    array: NamedArray
    sharding: Sharding | None  # None for the default device, and for the host
    pieces: Sequence[_Piece]
    stacked: tuple[int, ...]  # the leading dimensions that the pieces become; () for one piece


class _Finder:
    """Finds the arrays of a checkpoint under the paths that they have in a model."""

    def __init__(self, stored: Stored, rename: Mapping[str, str] | None):
        """Applies the rules of ``rename``, as :func:`restore` describes them, to all paths.

        A rule that matches nothing, and two arrays that get the same path, are a ValueError.
        """
        self._entries = stored.entries
        self._names = dict[Name, Name]()  # the names under which the model looks → stored names
        rename = rename or {}
        used_rules = set[str]()
        old_paths: dict[str, list[str]] = {}  # by new path
        for name, entry in stored.entries.items():
            path = entry.array.path
            rule = next((rule for rule in rename if re.search(rule, path)), None)
            if rule is None:
                self._names[name] = name
                self._names.setdefault(entry.plain_name, name)  # as in `nnx.to_pure_dict`
            else:
                used_rules.add(rule)
                path = re.sub(rule, rename[rule], path, count=1)
                self._names[tuple(path.split("/"))] = name
            old_paths.setdefault(path, []).append(entry.array.path)
        if rename:  # without it, Orbax alone may have stored equal paths
            same = [f"  {new}: {', '.join(old)}" for new, old in old_paths.items() if len(old) > 1]
            raise_listed(ValueError, "restore: rename gives several arrays the same path:", same)
        unused = [f"  {rule!r}" for rule in rename if rule not in used_rules]
        head = f"restore: these rules of rename match no path in {stored.folder}:"
        raise_listed(ValueError, head, unused)

    def target(self, array: NamedArray, sharding: Sharding | None) -> _Target:
        """Finds an array; a missing one is a piece whose name the checkpoint does not have."""
        name, leaf = array.plain_name, array.leaf
        if array.name in self._names:
            name = array.name
        if piece := self._piece(name, leaf):
            return _Target(array, sharding, [piece], ())
        # `blocks/layers/kernel` may be stored as `blocks/0/kernel`, `blocks/1/kernel`, …
        for places in _subsets(i for i, key in enumerate(name) if key == _LAYERS):
            first = self._piece(_replaced(name, dict.fromkeys(places, "0")), leaf, len(places))
            if first is None:
                continue
            # Layers share an array that has no dimension for them: the first one has it.
            count = min(len(places), -self._extra_dimensions(first, leaf))
            stacked = np.shape(leaf)[: max(count, 0)]
            pieces = []
            for index in np.ndindex(*stacked):
                numbers = itertools.chain(map(str, index), itertools.repeat("0"))
                layer = _replaced(name, dict(zip(places, numbers, strict=False)))
                pieces.append(self._piece(layer, leaf, len(places)) or _Piece(layer))
            return _Target(array, sharding, pieces, stacked)
        return _Target(array, sharding, [_Piece(name)], ())

    def _piece(self, name: Name, leaf: Any, levels: int = 0) -> _Piece | None:
        """Finds a stored array, or the stored stack that has it as a layer.

        ``blocks/3/kernel`` may be layer 3 of ``blocks/layers/kernel``. In nested stacks, several
        keys are indices of layers; those of other lists stay as they are. The first ``levels``
        dimensions of the leaf are not those of the piece.
        """
        for places in _subsets(i for i, key in enumerate(name) if key.isdecimal()):
            stored_name = self._names.get(_replaced(name, dict.fromkeys(places, _LAYERS)))
            if stored_name is not None:
                # Layers share an array that has no dimension for them.
                count = self._extra_dimensions(_Piece(stored_name), leaf, levels)
                layer = tuple(int(name[i]) for i in places)
                return _Piece(stored_name, layer[: max(count, 0)])
        return None

    def _extra_dimensions(self, piece: _Piece, leaf: Any, levels: int = 0) -> int:
        """Counts the dimensions that a piece has beyond those of a leaf without its first ones."""
        entry = self._entries[piece.name]
        shape, _ = _type_of(leaf, entry)
        return len(entry.array.shape) - len(piece.layer) - len(shape[levels:])


def _subsets(places: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yields all choices of some of these places, the empty one first."""
    every = tuple(places)
    for count in range(len(every) + 1):
        yield from itertools.combinations(every, count)


def _replaced(name: Name, keys: Mapping[int, str]) -> Name:
    """Returns a name with other keys at some places."""
    return tuple(keys.get(i, key) for i, key in enumerate(name))


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

    ``is_part`` is whether the checkpoint may have more than these, ``cast`` whether dtypes may
    differ.
    """
    missing: dict[str, str] = {}  # lines by path in the model
    shapes, dtypes = list[str](), list[str]()
    layers: dict[Name, set[tuple[int, ...]]] = {}  # that the model has of each stored array
    pieces = [(target, piece) for target in targets for piece in target.pieces]
    for target, piece in pieces:
        leaf, levels = target.array.leaf, len(target.stacked)
        entry = stored.entries.get(piece.name)
        path = path_string(piece.name) if levels else target.array.path
        # A stored stack may have fewer layers than the model.
        if entry is None or any(map(operator.ge, piece.layer, entry.array.shape)):
            missing[path] = f"  {path}, shape {np.shape(leaf)[levels:]}"
            continue
        layers.setdefault(piece.name, set()).add(piece.layer)
        path = entry.array.path if levels else path
        shape, dtype = _type_of(leaf, entry)
        stored_shape, stored_dtype = entry.array.shape[len(piece.layer) :], entry.array.dtype
        if stored_shape != (layer_shape := shape[levels:]):
            shapes.append(f"  {path}: {stored_shape} in the checkpoint, {layer_shape} in the model")
        elif not _is_same_dtype(stored_dtype, dtype, cast):
            text = dtype.__name__ if isinstance(dtype, type) else dtype
            dtypes.append(f"  {path}: {stored_dtype} in the checkpoint, {text} in the model")
    unread = [entry for name, entry in stored.entries.items() if name not in layers]
    unknown = [entry.array.path or "the root" for entry in unread]
    near = names.suggestions(len(missing) + len(unknown))
    problems = {
        "Missing in the checkpoint": [x + near(path, unknown) for path, x in missing.items()],
        "Not in the model": [] if is_part else [f"  {x}{near(x, missing)}" for x in unknown],
        "Of another shape": shapes + ([] if is_part else list(_unwanted_layers(stored, layers))),
        names.OF_ANOTHER_DTYPE: dtypes,
    }
    head = f"restore: {stored.folder} does not fit the model."
    raise_listed(CheckpointError, head, by_kind(problems), _remedy(missing, unknown, is_part))


def _unwanted_layers(
    stored: Stored, layers: Mapping[Name, Collection[tuple[int, ...]]]
) -> Iterator[str]:
    """Describes the stored stacks of which the model has only some layers."""
    for name, indices in layers.items():
        array = stored.entries[name].array
        count = math.prod(array.shape[: len(min(indices))])
        if len(indices) < count:
            yield f"  {array.path}: {count} layers in the checkpoint, {len(indices)} in the model"


def _remedy(missing: Collection[str], unknown: Sequence[str], is_part: bool) -> str:
    """Says what to pass if the checkpoint has more than the model, or has it as a part."""
    others = set(unknown)
    for top in dict.fromkeys(path.partition("/")[0] for path in unknown):
        if missing and others.issuperset(f"{top}/{path}" for path in missing):
            key = int(top) if top.isdecimal() else top
            part = f"{{{key!r}: model}}" if key else "(model,)"
            return f"The checkpoint has the model below {top}/: pass {part}, with only=... for it."
    if is_part or missing or not unknown:
        return ""
    return "To restore only what the model has, pass only=... or another filter."


def _is_same_dtype(there: Any, here: np.dtype[Any] | type, cast: bool) -> bool:
    """Whether an array of the checkpoint may fill one of this dtype, or a number of this type."""
    if isinstance(here, type):  # a dtype would be equal to float
        kind = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
        return bool(np.issubdtype(there, kind[here]))
    return names.is_castable(there, here, cast)


def _wanted(stored: Stored, targets: Sequence[_Target]) -> dict[Name, Sharding | None]:
    """Returns the sharding with which each stored array is read, each process its own shards.

    None is to read the array to the host of each process.
    """
    wanted: dict[Name, Sharding | None] = {}
    for target in targets:
        # An array of this process alone is not read with its sharding.
        is_local = target.sharding is None or (
            jax.process_count() > 1 and target.sharding.is_fully_addressable
        )
        for piece in target.pieces:
            # Integers that may wrap are read to the host: JAX may shorten them while it reads them.
            stored_dtype = stored.entries[piece.name].array.dtype
            dtype = getattr(target.array.leaf, "dtype", stored_dtype)
            is_to_host = is_local or names.may_wrap(stored_dtype, dtype)
            sharding = None if is_to_host else _piece_sharding(target, piece)
            # A stored stack may be read for several targets, and is read once: to the host if one
            # of them needs that, else with the sharding of any, from which the others are placed.
            is_on_host = piece.name in wanted and wanted[piece.name] is None
            wanted[piece.name] = None if is_on_host else sharding
    return wanted


def _piece_sharding(target: _Target, piece: _Piece) -> Sharding | None:
    """Returns the sharding of what is read, which may have more or fewer dimensions of layers."""
    if not target.stacked and not piece.layer:
        return target.sharding
    if not isinstance(target.sharding, NamedSharding):
        return None
    entries = target.sharding.spec.partitions[len(target.stacked) :]
    spec = PartitionSpec(*[None] * len(piece.layer), *entries)
    return names.on_auto_axes(target.sharding.update(spec=spec))


def _converted(targets: Sequence[_Target], values: dict[Name, Any]) -> list[tuple[NamedArray, Any]]:
    """Returns each array of the model with its new value; integers that would wrap are an error.

    They are converted one after the other: an array that was read is removed from ``values`` once
    nothing needs it any more.
    """
    uses = Counter(piece.name for target in targets for piece in target.pieces)
    converted, wrapping = [], []
    # Layers of one stack follow each other.
    for target in sorted(targets, key=lambda target: target.pieces[0].name):
        layers = [(values[piece.name], piece.layer) for piece in target.pieces]
        dtype = getattr(target.array.leaf, "dtype", None)
        if all(isinstance(array, jax.Array) for array, _ in layers):
            # Its integers do not wrap: see `_wanted`.
            converted.append((target.array, _like(target, layers, target.stacked)))
        else:
            value = _joined(layers, target.stacked, np)
            if dtype and isinstance(value, np.ndarray) and (limits := out_of_range(value, dtype)):
                wrapping.append(f"  {target.array.path}: {limits}, {dtype}")
            else:
                converted.append((target.array, _like(target, [(value, ())], ())))
        for piece in target.pieces:
            uses[piece.name] -= 1
            if not uses[piece.name]:
                del values[piece.name]  # before the next one needs memory
    raise_listed(
        CheckpointError,
        "restore: cast=True would wrap these integers (range in the checkpoint, dtype in the "
        "model):",
        sorted(wrapping),
        "Use a larger dtype in the model.",
    )
    return converted


# Arrays that were read, and the index of the layer to take of each; () for all of it.
_Layers: TypeAlias = Sequence[tuple[Any, tuple[int, ...]]]


def _like(target: _Target, layers: _Layers, stacked: tuple[int, ...]) -> Any:
    """Returns what was read as the kind of value that the model has in its place.

    ``layers`` were read with their shardings, or are one array on the host; ``stacked`` are the
    leading dimensions into which they are stacked, () for a single one.
    """
    leaf, value = target.array.leaf, layers[0][0]
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(value)
    if isinstance(leaf, _NUMBERS):
        return type(leaf)(np.asarray(value).item())
    if isinstance(leaf, np.ndarray):
        return np.array(value, leaf.dtype)
    if is_keys(leaf):  # which were read as their words
        words = _on_devices(layers, stacked, target.sharding, value.dtype, is_weak=False)
        return jax.random.wrap_key_data(words, impl=KEY_KINDS[str(leaf.dtype)])
    is_weak = bool(getattr(leaf, "weak_type", False))
    return _on_devices(layers, stacked, target.sharding, leaf.dtype, is_weak=is_weak)


def _on_devices(
    layers: _Layers,
    stacked: tuple[int, ...],
    sharding: Sharding | None,
    dtype: np.dtype[Any],
    *,
    is_weak: bool,
) -> jax.Array:
    """Stacks layers, as :func:`_like` gets them, converts the dtype, and places the result.

    Without a sharding, it goes to the default device.
    """
    value, layer = layers[0]
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        value = jax.device_put(host) if sharding is None else place_arrays([host], [sharding])[0]
        layers = [(value, layer)]
    # Orbax lacks unreduced and reduced arrays, so it was read without these axes.
    summed = without_reductions(sharding)
    if stacked or layer:  # on Auto axes, on which an index needs no `out_sharding`
        summed = names.on_auto_axes(summed)
    if stacked or layer or value.dtype != dtype or value.weak_type != is_weak:
        [value] = finish_on_cpu([_program(summed, stacked, dtype, is_weak)(layers)])
    [placed] = place_arrays([value], [sharding])
    return cast(jax.Array, placed)


@functools.lru_cache(maxsize=64)  # the programs of a model, which has few shardings
def _program(
    sharding: Sharding | None, stacked: tuple[int, ...], dtype: np.dtype[Any], is_weak: bool
) -> Callable[[_Layers], jax.Array]:
    """Returns a compiled function from layers to an array of the model; JAX caches it by shape."""

    def build(layers: _Layers) -> jax.Array:
        return _compat.converted(_joined(layers, stacked, jnp), dtype, is_weak)

    return jax.jit(build, out_shardings=sharding)


def _joined(layers: _Layers, stacked: tuple[int, ...], numpy: ModuleType) -> Any:
    """Takes the layers of arrays of NumPy or JAX, and stacks them to these leading dimensions."""
    parts = [array[index] if index else array for array, index in layers]
    return numpy.stack(parts).reshape(*stacked, *parts[0].shape) if stacked else parts[0]
