"""In what two structures differ, in the user's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import _compat
from .structure import (
    LEAF,
    Child,
    Container,
    NodeEntry,
    Path,
    Static,
    Structure,
    VariableEntry,
    accessor,
    container_keys,
)


def differences(old: Structure, new: Structure, names: Sequence[str], limit: int = 10) -> list[str]:
    """Where two calls differ: ``model.dropout.deterministic: False → True``.

    Args:
      old: the structure of the arguments of one call, whose root is ``(positional, keywords)``.
      new: that of another call.
      names: the names of the positional arguments.
      limit: how many differences to name.
    """

    def name(path: Path) -> str:
        if len(path) < 2:
            return "the arguments"
        label = path[1] if path[0] == 1 else names[path[1]] if path[1] < len(names) else "args"
        return accessor(str(label), path[2:])

    found: list[str] = []
    for line in _compare(old, old.root, new, new.root, (), {}, name):
        found.append(line)
        if len(found) == limit:
            found.append("…")
            break
    return found


def _compare(
    old: Structure,
    a: Child,
    new: Structure,
    b: Child,
    path: Path,
    pairs: dict[tuple[str, int], int],
    name: Callable[[Path], str],
) -> Iterator[str]:
    if isinstance(a, int) and isinstance(b, int):
        before, after = pairs.setdefault(("old", a), b), pairs.setdefault(("new", b), a)
        if (before, after) != (b, a):
            yield f"{name(path)}: shared with other objects than before"
        elif ("done", a) not in pairs:
            pairs["done", a] = b
            yield from _compare_entries(old, a, new, b, path, pairs, name)
    elif isinstance(a, Container) and isinstance(b, Container):
        parts_a = dict(zip(container_keys(a.treedef), a.children, strict=True))
        parts_b = dict(zip(container_keys(b.treedef), b.children, strict=True))
        yield from _compare_parts(old, parts_a, new, parts_b, path, pairs, name)
        if a.treedef != b.treedef and parts_a.keys() == parts_b.keys():
            yield f"{name(path)}: {a.treedef} → {b.treedef}"
    elif a != b:
        yield f"{name(path)}: {_show(old, a)} → {_show(new, b)}"


def _compare_entries(
    old: Structure,
    a: int,
    new: Structure,
    b: int,
    path: Path,
    pairs: dict[tuple[str, int], int],
    name: Callable[[Path], str],
) -> Iterator[str]:
    x, y = old.entries[a], new.entries[b]
    if type(x) is not type(y) or (x is not None and y is not None and x.type is not y.type):
        yield f"{name(path)}: {_show(old, a)} → {_show(new, b)}"
    elif isinstance(x, NodeEntry) and isinstance(y, NodeEntry):
        parts_a = {(k,): c for k, c in zip(x.keys, x.children, strict=True)}
        parts_b = {(k,): c for k, c in zip(y.keys, y.children, strict=True)}
        yield from _compare_parts(old, parts_a, new, parts_b, path, pairs, name)
    elif isinstance(x, VariableEntry) and isinstance(y, VariableEntry):
        settings_a, settings_b = dict(x.metadata), dict(y.metadata)
        for key in sorted({*settings_a, *settings_b}):
            if settings_a.get(key) != settings_b.get(key):
                before, after = (_setting(s, key) for s in (settings_a, settings_b))
                yield f"{name(path)}, metadata {key!r}: {before} → {after}"
        yield from _compare(old, x.value, new, y.value, path, pairs, name)


def _compare_parts(
    old: Structure,
    parts_a: dict[Path, Child],
    new: Structure,
    parts_b: dict[Path, Child],
    path: Path,
    pairs: dict[tuple[str, int], int],
    name: Callable[[Path], str],
) -> Iterator[str]:
    for key, child in parts_a.items():
        if key not in parts_b:
            yield f"{name(path + key)}: {_show(old, child)} → missing"
        elif key != (_compat.STATUSES,):  # which attributes are data shows in themselves
            yield from _compare(old, child, new, parts_b[key], path + key, pairs, name)
    for key, child in parts_b.items():
        if key not in parts_a:
            yield f"{name(path + key)}: missing → {_show(new, child)}"


def _setting(settings: dict[str, Static], key: str) -> str:
    return repr(settings[key].value) if key in settings else "missing"


def _show(structure: Structure, child: Child) -> str:
    if child is LEAF:
        return "an array"
    if isinstance(child, Static):
        return repr(child.value)
    if isinstance(child, Container):
        return str(child.treedef)
    assert isinstance(child, int)
    entry: Any = structure.entries[child]
    return f"a {entry.type.__name__}"
