"""Finds modules that a checkpoint has under other names, and writes the call that reads them.

Blocks that ``nnx.vmap`` has stacked are at ``blocks/up/kernel`` in a checkpoint, and those of a
:func:`~nnx_sharding.stack` at ``blocks/layers/up/kernel`` in the model. Of ten modules and an
optimizer, all arrays are missing and all are unread. They differ in the beginnings of their paths
only, so two steps say it in a line:

    pair     each missing array with the unread array that has the longest common end of the path
             and, among those, the most keys in common; shape and dtype are equal
    divide   the tree of the checkpoint, from its root, until each part is one object of the model:

                 {'embed': model.embed,              # the same name
                  'blocks': model.blocks.layers}     # blocks/… is blocks/layers/…

The dict is what `restore` takes. A module that the user passed may be in it several times, because
`restore` reads each array from the part that the checkpoint has: a program that splits its model
saves ``{'params': …, 'rest': …}``, which ``{'params': model, 'rest': model}`` reads.

A path that fits two others equally well has no pair. Without a pair for each missing array of a
module, there is no call. Other arrays without a pair, such as the step of an optimizer, are left
out of the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flax import nnx

from ..specs.paths import Path, accessor, path_string

Keys: TypeAlias = tuple[str, ...]  # the keys of a path as text
Code: TypeAlias = "str | dict[str, Code]"  # an expression, or a dict of them by key

# Each missing array is compared with all that end alike. More would take too long for a message.
_MAX_MISSING = 3000
_MAX_CANDIDATES = 200
_MAX_LINES = 14  # of a call in a message, which has room for 24 lines of all kinds
_MAX_WIDTH = 199  # of a line of the call; a message wraps longer ones
_WIDTHS = (90, 170)  # of dicts in one line: the second if the first needs too many lines
_GIVEN = ("tree", "sharding", "mesh", "only")  # names in a call that stand for the user's arguments
_MAX_PLACES = 3  # the places of modules of one name that a line lists


class ModelArray(NamedTuple):
    """An array of the model."""

    keys: Keys  # the path
    variable_path: Path  # the path of its Variable, which Python code can name
    stored: Keys | None  # the path in the checkpoint; None if the checkpoint lacks it


class Renaming(NamedTuple):
    """Modules that the checkpoint has under other names.

    Attributes:
      names: the beginnings of paths in the checkpoint, each with that in the model.
      pairs: the missing arrays of these modules, each with its path in the checkpoint.
      tree: code for what `restore` has to fill; empty if modules have other missing arrays.
    """

    names: Mapping[Keys, Keys]
    pairs: Mapping[Keys, Keys]
    tree: Code

    def lines(self) -> list[str]:
        """Returns a line of a message for each new name, with the places of modules of this name.

        Parameters and their moments are such places: ``params`` and ``opt_state/0/mu``.
        """
        arrays = {*self.pairs.values()}
        places: dict[tuple[str, str], list[str]] = {}
        for stored, keys in self.names.items():
            # Both keep their last key: blocks and blocks/layers for a/blocks and a/blocks/layers.
            start = min(_common(stored, keys), len(stored) - 1, len(keys) - 1)
            below = () if stored in arrays else ("…",)
            renamed = path_string(stored[start:] + below), path_string(keys[start:] + below)
            places.setdefault(renamed, []).append(path_string(stored[:start]))
        lines = []
        for (stored_name, name), found in places.items():
            line = f"  {stored_name} of the checkpoint is {name} of the model"
            if found != [""]:
                more = len(found) - _MAX_PLACES
                listed = [place or "the root" for place in found[:_MAX_PLACES]]
                line += f", below {', '.join(listed)}" + (f" and {more} more" if more > 0 else "")
            lines.append(line)
        return lines

    def remedy(self, options: str = "", *, is_part: bool = False) -> str:
        """Returns the sentence with the call, if it is short enough for a message.

        ``options`` follow the tree, and ``is_part`` says whether missing arrays are not in the
        tree. Without a tree, the text is empty.
        """
        part = ", without what is missing" if is_part else ""
        for width in _WIDTHS:
            code = f"restore(path, {_layout(self.tree, width)}{options})"
            lines = code.split("\n")
            if self.tree and len(lines) <= _MAX_LINES and max(map(len, lines)) <= _MAX_WIDTH:
                # Names that are no attributes, keys of a dict or keywords.
                used = {*re.findall(r"(?<![\w.'])[a-z]+\b(?!=)", code)}
                given = [f"`{name}`" for name in _GIVEN if name in used]
                about = f", with the {' and '.join(given)} that you passed" if given else ""
                return f"To read it under its names{part}{about}:\n{code}"
        if not self.tree:
            return ""
        return "To read them, pass a dict with their names in the checkpoint."


def find_renaming(
    tree: Any,
    arrays: Sequence[ModelArray],
    unread: Sequence[Keys],
    fits: Callable[[Keys, Keys], bool],
) -> Renaming | None:
    """Returns the modules that a checkpoint has under other names; None without any.

    Args:
      tree: what `restore` is to fill.
      arrays: all arrays to restore.
      unread: the paths of the arrays in the checkpoint that are none of these.
      fits: whether an array of the model, by its path, has the shape and dtype of an unread array.
    """
    missing = [array.keys for array in arrays if array.stored is None]
    if len(missing) > _MAX_MISSING:
        return None
    pairs = _pairs(missing, unread, fits)
    if not pairs:
        return None
    stored = {array.keys: pairs.get(array.keys, array.stored) for array in arrays}
    unpaired = {*unread}.difference(pairs.values())
    writer = _Writer(arrays, stored, unpaired, _parts(tree))
    known = [array for array in arrays if stored[array.keys] is not None]
    code = writer.code((), known)
    # Other pairs are of arrays alone, so they may have nothing in common but a name and a shape.
    pairs = {
        keys: path
        for keys, path in pairs.items()
        if any(path[: len(name)] == name for name in writer.names)
    }
    # Other names are of arrays that are found, in another part of the tree than the first one.
    names = {
        name: keys
        for name, keys in writer.names.items()
        if any(path[: len(name)] == name for path in pairs.values())
    }
    if not pairs:
        return None
    is_complete = not any(writer.is_in_module(keys) for keys in missing if keys not in pairs)
    return Renaming(names, pairs, code if is_complete and code is not None else "")


def _pairs(
    missing: Sequence[Keys], unread: Sequence[Keys], fits: Callable[[Keys, Keys], bool]
) -> dict[Keys, Keys]:
    """Returns the path in the checkpoint of each missing array for which exactly one is best."""
    pairs: dict[Keys, Keys] = {}
    # Parameters are as much like their moments as like other parameters, until the moments have
    # pairs. So what is left is compared again.
    while True:
        taken = set(pairs.values())
        new = _best_pairs(
            [keys for keys in missing if keys not in pairs],
            [path for path in unread if path not in taken],
            fits,
        )
        if not new:
            return pairs
        pairs |= new


def _best_pairs(
    missing: Sequence[Keys], unread: Sequence[Keys], fits: Callable[[Keys, Keys], bool]
) -> dict[Keys, Keys]:
    """Returns the pairs of which each path is the best for the other one."""
    by_end: dict[Keys, list[Keys]] = {}  # the last keys of a path → the paths
    for path in unread:
        for length in range(1, len(path) + 1):
            by_end.setdefault(path[-length:], []).append(path)
    # The path in the checkpoint → the arrays of the model that choose it, each with its likeness.
    choices: dict[Keys, list[tuple[int, int, Keys]]] = {}
    for keys in missing:
        for length in range(len(keys), 0, -1):
            paths = by_end.get(keys[-length:], [])
            if len(paths) > _MAX_CANDIDATES:
                break
            ranked = sorted(
                (_common_keys(keys[:-length], path[:-length]), path)
                for path in paths
                if fits(keys, path)
            )
            if ranked:
                count, best = ranked[-1]
                if len(ranked) == 1 or ranked[-2][0] < count:
                    choices.setdefault(best, []).append((length, count, keys))
                break
    pairs = {}
    for path, chosen in choices.items():
        chosen.sort()
        if len(chosen) == 1 or chosen[-2][:2] < chosen[-1][:2]:
            pairs[chosen[-1][2]] = path
    return pairs


def _common_keys(one: Keys, other: Keys) -> int:
    """Returns the length of the longest common subsequence of two paths."""
    lengths = [0] * (len(other) + 1)  # for the keys of `one` so far, by the number of other keys
    for key in one:
        previous = lengths
        lengths = [0]
        for index, other_key in enumerate(other):
            longer = previous[index] + 1 if key == other_key else 0
            lengths.append(max(longer, previous[index + 1], lengths[index]))
    return lengths[-1]


def _layout(code: Code, width: int, indent: str = "") -> str:
    """Returns Python code, with a line for each key of a dict that is longer than ``width``."""
    if isinstance(code, str):
        return code
    parts = {key if key.isdecimal() else repr(key): part for key, part in code.items()}
    line = ", ".join(f"{key}: {_layout(part, width)}" for key, part in parts.items())
    if "\n" not in line and len(indent) + len(line) < width:
        return f"{{{line}}}"
    if len(parts) == 1:  # {1: {0: {…}}} has one pair of lines for all braces
        [(key, part)] = parts.items()
        return f"{{{key}: {_layout(part, width, indent)}}}"
    inner = f"{indent}    "
    lines = [f"{inner}{key}: {_layout(part, width, inner)},\n" for key, part in parts.items()]
    return f"{{\n{''.join(lines)}{indent}}}"


def _common(one: Keys, other: Keys) -> int:
    """Returns the number of keys with which both paths begin."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class _Writer:
    """Writes the tree of a checkpoint as Python code, in objects of the model.

    Attributes:
      names: the beginnings of paths in the checkpoint, each with another one in the model.
    """

    def __init__(
        self,
        arrays: Sequence[ModelArray],
        stored: Mapping[Keys, Keys | None],
        unpaired: Iterable[Keys],
        parts: Mapping[Path, Any],
    ):
        """Counts the arrays below each path of the model.

        Args:
          arrays: all arrays of the model.
          stored: the path of each in the checkpoint, by its path; None without one.
          unpaired: the paths of arrays in the checkpoint that are not read.
          parts: the objects that the user passed, by their paths.
        """
        self.names: dict[Keys, Keys] = {}
        self._stored, self._root_names = stored, _root_names(parts)
        self._modules = {
            tuple(map(str, path)) for path, part in parts.items() if isinstance(part, nnx.Module)
        }
        self._counts: dict[Keys, int] = {}
        for array in arrays:
            for length in range(len(array.keys) + 1):
                beginning = array.keys[:length]
                self._counts[beginning] = self._counts.get(beginning, 0) + 1
        self._unpaired = {path[:length] for path in unpaired for length in range(len(path) + 1)}

    def code(self, prefix: Keys, arrays: Sequence[ModelArray]) -> Code | None:
        """Returns code for the part of a checkpoint below a path; None if none can be written.

        Args:
          prefix: the path in the checkpoint.
          arrays: the arrays of the model that the checkpoint has below it.
        """
        target = self._target(prefix, arrays)
        if target is not None:
            keys = tuple(map(str, target))
            if keys != prefix:
                self.names[prefix] = keys
            for length in range(len(target), -1, -1):
                name = self._root_names.get(target[:length])
                if name is not None:
                    return accessor(name, target[length:])
            return None
        by_key: dict[str, list[ModelArray]] = {}  # the next key in the checkpoint → arrays
        for array in arrays:
            path = self._path(array)
            if len(path) == len(prefix):  # inside a Variable, or an array under another name
                return None
            by_key.setdefault(path[len(prefix)], []).append(array)
        # Every part is written, because this also finds their names.
        parts = {key: self.code((*prefix, key), part) for key, part in by_key.items()}
        known = {key: part for key, part in parts.items() if part is not None}
        return known if len(known) == len(parts) else None

    def is_in_module(self, keys: Keys) -> bool:
        """Whether an array is in a module that the user passed."""
        return any(keys[:length] in self._modules for length in range(len(keys)))

    def _target(self, prefix: Keys, arrays: Sequence[ModelArray]) -> Path | None:
        """Returns the path of the one object of the model that a part of a checkpoint fills.

        None if there is none. A part may fill some arrays of a module that the user passed, but has
        to fill all of another object. An object has another name only if it is not the whole tree,
        and if the checkpoint has no further arrays below its own name.
        """
        path = self._path(arrays[0])
        end = path[len(prefix) :]
        length = len(arrays[0].keys) - len(end)
        if length < 0 or length > len(arrays[0].variable_path):
            return None
        keys = arrays[0].keys[:length]
        has_further = self._counts[keys] != len(arrays)
        if has_further and keys not in self._modules:
            return None
        if any(keys + self._path(array)[len(prefix) :] != array.keys for array in arrays):
            return None
        is_certain = bool(keys and prefix) and prefix not in self._unpaired
        if not end:
            # The name and shape of one array are too little to compare, so its whole path has to be
            # the end of the other one: opt_state/0/count and 1/opt_state/0/count.
            shorter = min(len(keys), len(prefix))
            is_certain = is_certain and keys[-shorter:] == prefix[-shorter:]
        if keys != prefix and not is_certain:
            return None
        return arrays[0].variable_path[:length]

    def _path(self, array: ModelArray) -> Keys:
        """Returns the path of an array in the checkpoint, which has it."""
        path = self._stored[array.keys]
        assert path is not None
        return path


def _parts(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """Returns what a user passes in dicts, tuples and lists, by path: () for a tree without any."""
    if type(tree) not in (dict, tuple, list):
        return {path: tree}
    items = tree.items() if type(tree) is dict else enumerate(tree)
    parts: dict[Path, Any] = {}
    for key, part in items:
        parts |= _parts(part, (*path, key))
    return parts


def _root_names(parts: Mapping[Path, Any]) -> dict[Path, str]:
    """Returns names for parts of a tree: ``model``, ``optimizer``, and ``tree`` for the root."""
    names: dict[Path, str] = {(): "tree"}
    optimizers = [path for path, part in parts.items() if isinstance(part, nnx.Optimizer)]
    others = {path: part for path, part in parts.items() if path not in optimizers}
    models = [path for path, part in others.items() if isinstance(part, nnx.Module)]
    # The name of two models would be ambiguous.
    num_models = len({id(parts[path]) for path in models})
    names |= {path: "model" for path in models if num_models == 1}
    return names | {path: "optimizer" for path in optimizers if len(optimizers) == 1}
