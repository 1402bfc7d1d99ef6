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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

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

    Args:
      folder: the folder with the arrays.
      given: the tree, and the options of ``restore``.
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
        targets = [_Target(array, finder.source(array), shardings[array.slot]) for array in arrays]
        _check_fit(stored, targets, is_part=given.only is not None, cast=given.cast)
        operation.agree(arrays=names.digest(arrays))  # before anything is read
        values = load(stored, _wanted(stored, targets), operation)
        converted = operation.wait_for(lambda: _converted(targets, values))
    return names.filled(flat, converted, "restore")  # now that no process has failed


def _shardings(
    given: ModelRestore, flat: Flat, arrays: Sequence[NamedArray]
) -> dict[int, Sharding | None]:
    """Decides where each array goes: by the user's shardings, else by those that the model has.

    Args:
      given: the options of ``restore``. A ``mesh`` without a ``sharding`` replaces the mesh of the
        model's own shardings, whose specs stay.
      flat: its tree, flattened.
      arrays: the arrays of the tree that are restored.

    Returns:
      The sharding of each, by its index in ``flat.leaves``; None for one that goes to the default
      device, or stays a NumPy array or a number.
    """
    declared: list[Any] = [None] * len(flat.leaves)
    new_mesh = given.mesh
    if given.sharding is not None:
        new_mesh = None  # the user's shardings have their mesh
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
            # and that of an abstract model has no devices.
            mesh = sharding.mesh if new_mesh is None else new_mesh
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


class _Source(NamedTuple):
    """Where an array is: one piece, or several that are stacked in these leading dimensions."""

    pieces: Sequence[_Piece]
    stacked: tuple[int, ...] = ()


class _Target(NamedTuple):
    """One array to restore, and where it is in the checkpoint."""

    array: NamedArray
    source: _Source
    sharding: Sharding | None  # None for the default device, and for the host


class _Finder:
    """Finds the arrays of a checkpoint under the paths that they have in a model."""

    def __init__(self, stored: Stored, rename: Mapping[str, str] | None):
        """Applies the rules of ``rename`` to all paths of the checkpoint.

        Args:
          stored: the open checkpoint.
          rename: by regular expression for a stored path, what replaces the match. The first rule
            that matches a path changes it.

        Raises:
          ValueError: a rule matches nothing, or two arrays get the same path.
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

    def source(self, array: NamedArray) -> _Source:
        """Finds an array; for a missing one, returns a piece with a name that does not exist."""
        name = array.name if array.name in self._names else array.plain_name
        return self._find(name, array.leaf, 0) or _Source([_Piece(array.plain_name)])

    def _find(self, name: Name, leaf: Any, levels: int) -> _Source | None:
        """Finds an array, or the part of it below its first ``levels`` dimensions of layers."""
        if name in self._names:
            return _Source([_Piece(self._names[name])])
        return self._find_list(name, leaf, levels) or self._find_stack(name, leaf, levels)

    def _find_list(self, name: Name, leaf: Any, levels: int) -> _Source | None:
        """Finds the layers of a stacked array of the model that the checkpoint has as a list.

        ``blocks/layers/kernel`` becomes ``blocks/0/kernel``, ``blocks/1/kernel``, …; for nested
        stacks, each of these is searched in the same way.
        """
        for place in (i for i, key in enumerate(name) if key == _LAYERS):
            # One layer stands for what all of them may share.
            count = leaf.shape[levels] if len(np.shape(leaf)) > levels else 1
            layers = [(*name[:place], str(i), *name[place + 1 :]) for i in range(count)]
            sources = [self._find(layer, leaf, levels + 1) for layer in layers]
            present = next((source for source in sources if source is not None), None)
            if present is None:
                continue
            has_first = sources[0] is not None and not present.stacked
            if has_first and self._extra(present.pieces[0], leaf, levels) >= 0:
                return present  # it has the dimension of layers itself: all layers share it
            pieces: list[_Piece] = []
            for layer, source in zip(layers, sources, strict=True):
                # A missing one is kept under its name, for the error.
                pieces += [_Piece(layer)] if source is None else source.pieces
            return _Source(pieces, (count, *present.stacked))
        return None

    def _find_stack(self, name: Name, leaf: Any, levels: int) -> _Source | None:
        """Finds the stored stack of which an array of the model, in a list, is one layer.

        ``blocks/3/kernel`` is layer 3 of ``blocks/layers/kernel``. In nested stacks, several keys
        are indices of layers; those of other lists stay as they are.
        """
        numbers = [i for i, key in enumerate(name) if key.isdecimal()]
        for count in range(1, len(numbers) + 1):
            for replaced in itertools.combinations(numbers, count):
                stack = tuple(_LAYERS if i in replaced else key for i, key in enumerate(name))
                if stack not in self._names:
                    continue
                stored_name = self._names[stack]
                layer = _Piece(stored_name, tuple(int(name[i]) for i in replaced))
                # Without a dimension of layers, all layers share the array.
                is_shared = self._extra(layer, leaf, levels) < 0
                return _Source([_Piece(stored_name) if is_shared else layer])
        return None

    def _extra(self, piece: _Piece, leaf: Any, levels: int) -> int:
        """Counts the dimensions that a piece has beyond those that the model needs."""
        entry = self._entries[piece.name]
        shape, _ = _type_of(leaf, entry)
        return len(entry.array.shape) - len(piece.layer) - len(shape[levels:])


def _type_of(leaf: Any, entry: Entry) -> tuple[tuple[int, ...], np.dtype[Any] | type]:
    """Returns the shape and dtype that the checkpoint should have; of a number, its type."""
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        return (), type(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.weak_type:  # it was a number
        return tuple(leaf.shape), _NUMBER_KINDS.get(leaf.dtype.kind, leaf.dtype)
    if is_keys(leaf) and not is_keys(entry.array):  # Orbax does not record that they are keys
        leaf = key_words(leaf)
    return tuple(leaf.shape), leaf.dtype


class _Misfits:
    """Collects how arrays of a checkpoint differ from those to restore, for one error of all."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}  # lines by path in the model
        self.shapes = list[str]()
        self.dtypes = list[str]()
        # Which layers of each stored array are wanted: indices into its leading dimensions.
        self.layers: dict[Name, set[tuple[int, ...]]] = {}

    def compare(self, stored: Stored, target: _Target, piece: _Piece, *, cast: bool) -> None:
        """Compares one piece of a target, both without the dimensions of layers of one side."""
        leaf, levels = target.array.leaf, len(target.source.stacked)
        entry = stored.entries.get(piece.name)
        path = path_string(piece.name) if levels else target.array.path
        # A stored stack may have fewer layers than the model.
        if entry is None or any(map(operator.ge, piece.layer, entry.array.shape)):
            self.missing[path] = f"  {path}, shape {np.shape(leaf)[levels:]}"
            return
        self.layers.setdefault(piece.name, set()).add(piece.layer)
        shape, dtype = _type_of(leaf, entry)
        shape = shape[levels:]
        stored_shape, stored_dtype = entry.array.shape[len(piece.layer) :], entry.array.dtype
        path = entry.array.path if levels else path
        if stored_shape != shape:
            self.shapes.append(f"  {path}: {stored_shape} in the checkpoint, {shape} in the model")
        elif not _is_same_dtype(stored_dtype, dtype, cast):
            text = dtype.__name__ if isinstance(dtype, type) else dtype
            self.dtypes.append(f"  {path}: {stored_dtype} in the checkpoint, {text} in the model")


def _check_fit(stored: Stored, targets: Sequence[_Target], *, is_part: bool, cast: bool) -> None:
    """Raises an error that lists how the checkpoint differs from the arrays to restore.

    Args:
      stored: the open checkpoint.
      targets: the arrays to restore, and where they should be in it.
      is_part: whether the checkpoint may have more than these.
      cast: whether dtypes may differ.
    """
    misfits = _Misfits()
    for target in targets:
        for piece in target.source.pieces:
            misfits.compare(stored, target, piece, cast=cast)
    missing, layers = misfits.missing, misfits.layers
    unread = [entry for name, entry in stored.entries.items() if name not in layers]
    unknown = [entry.array.path or "the root" for entry in unread]
    near = names.suggestions(len(missing) + len(unknown))
    problems = {
        "Missing in the checkpoint": [x + near(path, unknown) for path, x in missing.items()],
        "Not in the model": [] if is_part else [f"  {x}{near(x, missing)}" for x in unknown],
        "Of another shape": misfits.shapes,
        names.OF_ANOTHER_DTYPE: misfits.dtypes,
    }
    if not is_part:
        problems["Of another shape"] += _unwanted_layers(stored, layers)
    head = f"restore: {stored.folder} does not fit the model."
    remedy = _remedy(missing, unknown, is_part)
    raise_listed(CheckpointError, head, by_kind(problems), remedy)


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
    """Decides how each stored array is read: with a sharding, each process its own shards.

    Args:
      stored: the open checkpoint.
      targets: the arrays of the model, each with the stored arrays that it is made of.

    Returns:
      By stored name the sharding; None to read the array to the host of each process.
    """
    wanted: dict[Name, Sharding | None] = {}
    for target in targets:
        # An array of this process alone is not read with its sharding.
        is_own = target.sharding is None or (
            jax.process_count() > 1 and target.sharding.is_fully_addressable
        )
        for piece in target.source.pieces:
            # Integers that may wrap are read to the host: JAX may shorten them while it reads them.
            stored_dtype = stored.entries[piece.name].array.dtype
            dtype = getattr(target.array.leaf, "dtype", stored_dtype)
            is_to_host = is_own or names.may_wrap(stored_dtype, dtype)
            sharding = None if is_to_host else _piece_sharding(target, piece)
            # A stored stack may be read for several targets, and is read once: to the host if one
            # of them needs that, else with the sharding of any, from which the others are placed.
            is_on_host = piece.name in wanted and wanted[piece.name] is None
            wanted[piece.name] = None if is_on_host else sharding
    return wanted


def _piece_sharding(target: _Target, piece: _Piece) -> Sharding | None:
    """Returns the sharding of what is read, which may have more or fewer dimensions of layers."""
    levels = len(target.source.stacked)
    if not levels and not piece.layer:
        return target.sharding
    if not isinstance(target.sharding, NamedSharding):
        return None
    entries = target.sharding.spec.partitions[levels:]
    spec = PartitionSpec(*[None] * len(piece.layer), *entries)
    return names.on_auto_axes(target.sharding.update(spec=spec))


def _converted(targets: Sequence[_Target], values: dict[Name, Any]) -> list[tuple[NamedArray, Any]]:
    """Converts what was read to the model's arrays, one after the other to save memory.

    Args:
      targets: the arrays of the model.
      values: what was read, by name. Each array is removed once nothing needs it any more.

    Returns:
      Each array of the model with its new value.

    Raises:
      CheckpointError: integers do not fit the model's dtype; all are listed.
    """
    uses = Counter(piece.name for target in targets for piece in target.source.pieces)
    converted, wrapping = [], []
    # Layers of one stack follow each other.
    for target in sorted(targets, key=lambda target: target.source.pieces[0].name):
        array, value = target.array, _assembled(target, values)
        dtype = getattr(array.leaf, "dtype", None)
        # What is on devices was checked, or is not cast to integers that may wrap.
        limits = out_of_range(value, dtype) if dtype and isinstance(value, np.ndarray) else ""
        if limits:
            wrapping.append(f"  {array.path}: {limits}, {dtype}")
        else:
            converted.append((array, _like(value, array.leaf, target.sharding)))
        for piece in target.source.pieces:
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


def _assembled(target: _Target, values: Mapping[Name, Any]) -> Any:
    """Puts a target together: an array as it was read, one layer of it, or stacked layers."""
    pieces, stacked = target.source
    parts = [(values[piece.name], piece.layer) for piece in pieces]
    if not stacked and not pieces[0].layer:  # nearly always: the array itself
        return values[pieces[0].name]
    if not all(isinstance(array, jax.Array) for array, _ in parts):
        return _built(parts, stacked, np)
    sharding = without_reductions(target.sharding)
    # The program has only Auto axes, on which an index needs no `out_sharding`.
    program = _program(names.on_auto_axes(sharding), stacked)
    [built] = finish_on_cpu([program(parts)])
    [placed] = place_arrays([built], [sharding])
    return placed


@functools.lru_cache(maxsize=64)  # the programs of a model, which has few shardings
def _program(
    sharding: Sharding | None,
    stacked: tuple[int, ...] = (),
    dtype: np.dtype[Any] | None = None,
    is_weak: bool = False,
) -> Callable[..., Any]:
    """Returns a compiled function from pieces to an array of the model; JAX caches it by shape.

    Args:
      sharding: that of the result.
      stacked: the leading dimensions into which layers are stacked; () for a single piece.
      dtype: that of the result; None for the one of the pieces.
      is_weak: whether the result has a weak type.
    """

    def build(parts: Sequence[tuple[Any, Any]]) -> Any:
        x = _built(parts, stacked, jnp)
        return x if dtype is None else _compat.converted(x, dtype, is_weak)

    return jax.jit(build, out_shardings=sharding)


def _built(
    parts: Sequence[tuple[Any, tuple[int, ...]]], stacked: tuple[int, ...], numpy: ModuleType
) -> Any:
    """Takes the layers of arrays of NumPy or JAX, and stacks them to these leading dimensions."""
    layers = [array[index] if index else array for array, index in parts]
    return numpy.stack(layers).reshape(*stacked, *layers[0].shape) if stacked else layers[0]


def _like(value: Any, leaf: Any, sharding: Sharding | None) -> Any:
    """Converts what was read to the kind of value that the model has in its place.

    Args:
      value: an array of NumPy or JAX; of PRNG keys, their words.
      leaf: what the model has: a number, a NumPy array, or an array, which may be abstract.
      sharding: where the new array goes; None for the default device.
    """
    if isinstance(leaf, _NUMBERS):
        return type(leaf)(np.asarray(value).item())
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(value)
    if isinstance(leaf, np.ndarray):
        return np.array(value, leaf.dtype)
    if is_keys(leaf):
        words = _placed(value, value.dtype, sharding)
        return jax.random.wrap_key_data(words, impl=KEY_KINDS[str(leaf.dtype)])
    return _placed(value, leaf.dtype, sharding, bool(getattr(leaf, "weak_type", False)))


def _placed(
    value: Any, dtype: np.dtype[Any], sharding: Sharding | None, is_weak: bool = False
) -> jax.Array:
    """Moves what was read to devices, and converts it to the dtype of the model's array.

    Args:
      value: an array of NumPy, or of JAX if it was read with its sharding.
      dtype: the dtype of the result.
      sharding: that of the result; None for the default device.
      is_weak: whether the result has a weak type.
    """
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        value = jax.device_put(host) if sharding is None else place_arrays([host], [sharding])[0]
    elif value.dtype == dtype and without_reductions(sharding) is not sharding:
        # It was read without the unreduced or reduced axes, which Orbax lacks.
        value = place_arrays([value], [sharding])[0]
    if value.dtype != dtype or value.weak_type != is_weak:
        pieces = [(value, ())]  # one, of which all layers are taken
        value = _program(sharding, (), dtype, is_weak)(pieces)
    placed: jax.Array = value
    return placed
