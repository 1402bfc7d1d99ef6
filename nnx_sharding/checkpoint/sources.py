"""Where a checkpoint has each array of a model, and how the two differ.

An array is found by its path, after the rules of ``rename``. A ``Stack`` is also found as the list
of its layers (``blocks/layers/kernel`` as ``blocks/0/kernel``, …), and a list as a ``Stack``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import CheckpointError, by_kind, raise_listed
from ..specs.fitting import suggestion
from ..specs.paths import path_string
from .names import Name, NamedArray, is_key
from .stored import Entry, Stored, key_words

NUMBERS = (bool, int, float, complex)

_SUGGESTIONS = 40  # comparing all pairs of names takes too long for thousands of arrays
_NUMBER_KINDS = {"i": int, "f": float, "c": complex}
_LAYERS = "layers"  # the attribute of a `Stack` in the place of the index into a list


class Piece(NamedTuple):
    """An array of a checkpoint, or one layer of it."""

    name: Name
    layer: tuple[int, ...] = ()


Source: TypeAlias = "Piece | list[Source]"  # a list is to be stacked


class Target(NamedTuple):
    """One array to restore, where it is in the checkpoint, and its sharding or None."""

    array: NamedArray
    source: Any  # Source; mypy does not resolve types that contain themselves
    sharding: Any

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """What is read for it: pieces, each with the number of layer dimensions that it lacks."""
        return _pieces(self.source, 0)


def _pieces(source: Any, levels: int) -> Iterator[tuple[Piece, int]]:
    if isinstance(source, Piece):
        yield source, levels
    else:
        for part in source:
            yield from _pieces(part, levels + 1)


class Finder:
    """Finds the arrays of a checkpoint under the paths that they have in a model."""

    def __init__(self, stored: Stored, rename: Mapping[str, str] | None):
        self._entries = stored.entries
        self._names: dict[Name, Name] = {}
        paths: dict[str, list[str]] = {}
        unused = set(rename or ())
        for name, entry in stored.entries.items():
            path = entry.array.path
            rule = next((rule for rule in rename or () if re.search(rule, path)), None)
            if rename is None or rule is None:
                self._names[name] = name
                self._names.setdefault(entry.plain_name, name)
            else:
                unused.discard(rule)
                path = re.sub(rule, rename[rule], path, count=1)
                self._names[tuple(path.split("/"))] = name
            paths.setdefault(path, []).append(entry.array.path)
        same = [f"  {path}: {', '.join(old)}" for path, old in paths.items() if len(old) > 1]
        raise_listed(ValueError, "restore: rename gives several arrays the same path:", same)
        lines = [f"  {rule!r}" for rule in rename or () if rule in unused]
        head = f"restore: these rules of rename match no path in {stored.folder}:"
        raise_listed(ValueError, head, lines)

    def source(self, array: NamedArray) -> Source:
        """Where an array is; if it is missing, a piece with a name that does not exist."""
        name = array.name if array.name in self._names else array.plain_name
        return self._find(name, array.leaf, 0) or Piece(array.plain_name)

    def _find(self, name: Name, leaf: Any, levels: int) -> Source | None:
        """The source of an array, or of the part of it below some dimensions of layers."""
        if name in self._names:
            return Piece(self._names[name])
        for place in (i for i, key in enumerate(name) if key == _LAYERS):
            layers = [_with(name, place, str(i)) for i in range(_length(leaf, levels))]
            found = [self._find(layer, leaf, levels + 1) for layer in layers]
            if found and isinstance(found[0], Piece) and self._extra(found[0], leaf, levels) >= 0:
                return found[0]  # all layers share it
            if any(found):
                return [source or Piece(x) for source, x in zip(found, layers, strict=True)]
        digits = [i for i, key in enumerate(name) if key.isdecimal()]
        for count in range(1, len(digits) + 1):
            for places in itertools.combinations(digits, count):
                stack = name
                for place in places:
                    stack = _with(stack, place, _LAYERS)
                if stack in self._names:
                    piece = Piece(self._names[stack], tuple(int(name[i]) for i in places))
                    is_shared = self._extra(piece, leaf, levels) < 0
                    return Piece(piece.name) if is_shared else piece
        return None

    def _extra(self, piece: Piece, leaf: Any, levels: int) -> int:
        """How many more dimensions a piece has than the model needs."""
        entry = self._entries[piece.name]
        shape, _ = type_of(leaf, entry)
        return len(entry.array.shape) - len(piece.layer) - len(shape[levels:])


def _with(name: Name, place: int, key: str) -> Name:
    return (*name[:place], key, *name[place + 1 :])


def _length(leaf: Any, levels: int) -> int:
    """The number of layers in a stacked array; 1 for what they may share."""
    return leaf.shape[levels] if len(np.shape(leaf)) > levels else 1


def type_of(leaf: Any, entry: Entry) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype that an array should have in the checkpoint; for a number, its type."""
    if isinstance(leaf, NUMBERS):
        return (), type(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.weak_type:  # it was a number
        return tuple(leaf.shape), _NUMBER_KINDS.get(leaf.dtype.kind, leaf.dtype)
    if is_key(leaf) and not is_key(entry.array):  # Orbax does not record that they are keys
        leaf = key_words(leaf)
    return tuple(leaf.shape), leaf.dtype


def check_fit(stored: Stored, targets: Sequence[Target], *, is_part: bool, cast: bool) -> None:
    """Raises an error if the arrays of the checkpoint differ from those to restore."""
    entries = stored.entries
    missing: dict[str, str] = {}
    layers: dict[Name, set[tuple[int, ...]]] = {}
    shapes, dtypes = [], []
    for target in targets:
        for piece, levels in target.pieces():
            path = target.array.path if not levels else path_string(piece.name)
            entry = entries.get(piece.name)
            if entry is None or any(map(int.__ge__, piece.layer, entry.array.shape)):
                missing[path] = f"  {path}, shape {np.shape(target.array.leaf)[levels:]}"
                continue
            if levels:
                path = entry.array.path
            layers.setdefault(piece.name, set()).add(piece.layer)
            shape, dtype = type_of(target.array.leaf, entry)
            there, here = entry.array.shape[len(piece.layer) :], shape[levels:]
            line = f"  {path}: "
            if there != here:
                shapes.append(f"{line}{there} in the checkpoint, {here} in the model")
            elif not _is_same_dtype(entry.array.dtype, dtype, cast):
                text = dtype.__name__ if isinstance(dtype, type) else dtype
                dtypes.append(f"{line}{entry.array.dtype} in the checkpoint, {text} in the model")
    unknown = [entry.array.path or "the root" for x, entry in entries.items() if x not in layers]
    for name, indices in layers.items():
        shape = entries[name].array.shape[: len(min(indices))]
        if len(indices) < math.prod(shape) and not is_part:
            counts = f"{math.prod(shape)} layers in the checkpoint, {len(indices)} in the model"
            shapes.append(f"  {entries[name].array.path}: {counts}")
    may_suggest = len(missing) + len(unknown) < _SUGGESTIONS
    near = suggestion if may_suggest else lambda name, names: ""
    problems = {
        "Missing in the checkpoint": [x + near(path, unknown) for path, x in missing.items()],
        "Not in the model": []
        if is_part
        else [f"  {path}{near(path, missing)}" for path in unknown],
        "Of another shape": shapes,
        "Of another dtype (cast=True converts among floats and among integers)": dtypes,
    }
    head = f"restore: {stored.folder} does not fit the model."
    remedy = _remedy(missing, unknown, is_part)
    raise_listed(CheckpointError, head, by_kind(problems), remedy)


def _remedy(missing: Iterable[str], unknown: Sequence[str], is_part: bool) -> str:
    """What to pass if the checkpoint has more than the model, or has it as a part."""
    missing, others = list(missing), set(unknown)
    tops = dict.fromkeys(path.partition("/")[0] for path in unknown if missing)
    top = next((top for top in tops if others.issuperset(f"{top}/{x}" for x in missing)), None)
    if top is not None:
        key = int(top) if top.isdecimal() else top
        part = f"{{{key!r}: model}}" if key else "(model,)"
        return (
            f"The checkpoint has the model below {top}/: pass {part}, with only=... for it alone."
        )
    if is_part or missing or not unknown:
        return ""
    return "To restore only what the model has, pass only=... or another filter."


def _is_same_dtype(there: Any, here: Any, cast: bool) -> bool:
    if isinstance(here, type):  # a dtype would be equal to float
        kind = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
        return bool(np.issubdtype(there, kind[here]))
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    return bool(there == here) or (
        cast and any(jnp.issubdtype(there, k) and jnp.issubdtype(here, k) for k in kinds)
    )
