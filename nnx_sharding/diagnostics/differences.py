"""In what two calls differ, in the user's words."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax

from .. import _compat
from ..core.statics import Static
from ..core.structure import (
    LEAF,
    Child,
    Container,
    Group,
    NodeEntry,
    StaticEntry,
    Structure,
    parts_of,
)
from ..paths import Path, accessor

if TYPE_CHECKING:
    from ..core.signature import Signature


class Difference(NamedTuple):
    """One thing in which two calls differ.

    Attributes:
      text: what it is: ``model.dropout.deterministic: False → True``.
      look_alike: whether all that can be seen of the two values is the same, and they differ
        only in who they are.
    """

    text: str
    look_alike: bool = False


Side: TypeAlias = "tuple[Signature, Structure]"


def differences(old: Side, new: Side, limit: int = 10) -> list[str]:
    """Where two calls differ: ``model.dropout.deterministic: False → True``.

    Args:
      old: the roles and the structure of the arguments of one call.
      new: those of another call.
      limit: how many differences to name.
    """
    found = [d.text for d in itertools.islice(compare(old, new), limit + 1)]
    return found if len(found) <= limit else [*found[:limit], "…"]


_MISSING = object()

# A path as a chain, from the last key to the first: all paths of a deep model would be long. At its
# end stands the name of a static argument, or None for the pytree of all others.
_Link: TypeAlias = "tuple[_Link, Path] | str | None"


def compare(before: Side, after: Side) -> Iterator[Difference]:
    """Where the arguments of two calls differ; those that only one call has are left out.

    Args:
      before: the roles and the structure of the arguments of one call.
      after: those of another call.
    """
    (old_signature, old), (signature, new) = before, after
    names = [signature.names[i] for i in signature.dynamic]
    old_statics = dict(zip(old_signature.static_names, old.statics, strict=True))
    statics = dict(zip(signature.static_names, new.statics, strict=True))
    pairs = [
        (f"static argument {name}", old_statics[name], statics[name])
        for name in statics
        if name in old_statics
    ]
    partner: dict[tuple[str, int], int] = {}
    done: set[int] = set()
    stack: list[tuple[_Link, Any, Any]] = [(None, old.root, new.root), *reversed(pairs)]
    while stack:  # no recursion: models may be nested deeply
        link, a, b = stack.pop()
        if isinstance(a, int) and isinstance(b, int):
            if (partner.setdefault(("old", a), b), partner.setdefault(("new", b), a)) != (b, a):
                yield Difference(f"{_name(link, names)}: shared with other objects than before")
                continue
            if a in done:
                continue
            done.add(a)
            x, y = old.entries[a], new.entries[b]
            if type(x) is type(y) and (x is None or x.type is y.type):  # type: ignore[union-attr]
                pairs_below = _pairs(_parts_of(x), _parts_of(y), link)
                yield from _own_differences(x, y, _name(link, names))
                stack += pairs_below
                continue
        elif isinstance(a, Group) and isinstance(b, Group) and a.kind == b.kind:
            stack += _pairs(_parts_of(a), _parts_of(b), link)
            continue
        elif isinstance(a, Container) and isinstance(b, Container):
            parts_a, parts_b = _parts_of(a), _parts_of(b)
            if a.treedef != b.treedef and parts_a.keys() == parts_b.keys():
                shown = f"{_shorten(str(a.treedef))} → {_shorten(str(b.treedef))}"
                yield Difference(f"{_name(link, names)}: {shown}")
            if link is None:  # the arguments themselves
                common = {key[:2] for key in parts_a} & {key[:2] for key in parts_b}
                parts_a, parts_b = (
                    {key: part for key, part in parts.items() if key[:2] in common}
                    for parts in (parts_a, parts_b)
                )
            stack += _pairs(parts_a, parts_b, link)
            continue
        elif isinstance(a, Static) and isinstance(b, Static):
            yield from static_differences(_name(link, names), a, b)
            continue
        elif a is b:
            continue
        yield Difference(f"{_name(link, names)}: {show_child(old, a)} → {show_child(new, b)}")


def _own_differences(x: Any, y: Any, where: str) -> Iterator[Difference]:
    """What differs in two objects of one type besides their parts."""
    if isinstance(x, NodeEntry) and x.metadata != y.metadata:
        yield Difference(f"{where}: {show(x.metadata)} → {show(y.metadata)}")
    if not isinstance(x, StaticEntry):
        return
    if x.kind[1] != y.kind[1]:
        yield Difference(f"{where}: another content")
    elif x.kind != y.kind or x.children != y.children:
        return
    elif x.identity != y.identity:
        yield Difference(_replaced(where, [""], [x.type.__name__]), look_alike=True)


def _parts_of(x: Any) -> dict[Path, Child]:
    # Which attributes are data shows in themselves.
    return {path: child for path, child in parts_of(x).items() if path != (_compat.STATUSES,)}


def _pairs(
    parts_a: dict[Path, Child], parts_b: dict[Path, Child], link: _Link
) -> list[tuple[_Link, Any, Any]]:
    """The parts of two objects side by side, in reverse, as a stack wants them."""
    keys = reversed({**parts_a, **parts_b})
    return [((link, key), parts_a.get(key, _MISSING), parts_b.get(key, _MISSING)) for key in keys]


def _name(link: _Link, names: Sequence[str]) -> str:
    keys: list[Path] = []
    while isinstance(link, tuple):
        link, key = link
        keys.append(key)
    path = tuple(itertools.chain.from_iterable(reversed(keys)))
    if isinstance(link, str):
        return _shorten(accessor(link, path), 200)
    if len(path) < 2:
        return "the arguments"
    label = path[1] if path[0] == 1 else names[path[1]] if path[1] < len(names) else "args"
    return _shorten(accessor(str(label), path[2:]), 200)


def show_child(structure: Structure, child: Any, depth: int = 3) -> str:
    """What is in some place of a structure, in a message."""
    if child is _MISSING:
        return "missing"
    if child is LEAF:
        return "an array"
    if isinstance(child, Static):
        return show(child.value)
    if isinstance(child, Container):
        return _shorten(str(child.treedef))
    entry: Any = structure.entries[child] if isinstance(child, int) else child
    if isinstance(entry, StaticEntry | Group) and depth and _brackets(entry.kind[0]):
        brackets = _brackets(entry.kind[0])
        parts = [show_child(structure, part, depth - 1) for part in entry.children]
        if issubclass(entry.kind[0], dict):
            parts = [f"{key}: {part}" for key, part in zip(parts[::2], parts[1::2], strict=False)]
        return _shorten(f"{brackets[0]}{', '.join(parts)}{brackets[1]}")
    name = (entry.kind[0] if isinstance(entry, Group) else entry.type).__name__
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def _brackets(kind: type) -> str:
    found: dict[type, str] = {list: "[]", tuple: "()", dict: "{}", set: "{}"}
    return found.get(kind, "")


# Statics

_MAX_PARTS = 1000  # of one value: beyond them nobody reads, and an object may lead anywhere


class _Note(NamedTuple):
    """What is to be seen of one part of a value.

    Attributes:
      type: its type.
      code: where it is a function, its code.
      text: how it is shown.
      keys: what one would write behind it for each of its own parts; None if it is one piece.
      by_identity: whether it is compared by identity.
    """

    type: type
    code: types.CodeType | None
    text: str
    keys: tuple[str, ...] | None
    by_identity: bool


def note_of(value: Any) -> dict[str, _Note]:
    """What is to be seen of a value and its parts, without a reference to any of them."""
    notes: dict[str, _Note] = {}
    stack = [("", value)]
    seen: set[int] = set()
    while stack and len(notes) < _MAX_PARTS:
        suffix, part = stack.pop()
        parts = None if id(part) in seen else _value_parts(part)
        code = part.__code__ if isinstance(part, types.FunctionType) else None
        keys = None if parts is None else tuple(parts)
        notes[suffix] = _Note(type(part), code, show(part), keys, _has_no_eq(part))
        if parts:
            seen.add(id(part))
            stack += [(suffix + key, inner) for key, inner in reversed(parts.items())]
    return notes


def note_identities(structure: Structure) -> None:
    """Notes what is to be seen of static objects that may be gone when somebody asks."""
    for static in structure.identities():
        if static.note is None:
            static.note = note_of(static.value)


def static_differences(where: str, old: Static, new: Static) -> Iterator[Difference]:
    """In which parts two static values differ.

    Args:
      where: what the user would write to reach the value.
      old: what was there.
      new: what is there now.
    """
    if old == new:
        return
    a, b = (static.note or note_of(static.value) for static in (old, new))
    changed: list[str] = []
    replaced: list[str] = []
    for suffix, x in a.items():
        if any(suffix.startswith(above) for above in changed):
            continue
        y = b.get(suffix)
        if y is None or x[:2] != y[:2] or x.keys != y.keys or (not x.keys and x.text != y.text):
            changed.append(suffix)
        elif x.by_identity and not any(suffix.startswith(above) for above in replaced):
            replaced.append(suffix)
    if changed:
        for suffix in changed:
            yield Difference(f"{where}{suffix}: {_show_two(a[suffix], b.get(suffix))}")
    elif replaced:
        kinds = [a[suffix].type.__name__ for suffix in replaced]
        yield Difference(_replaced(where, replaced, kinds), look_alike=True)
    else:
        yield Difference(f"{where}: {_show_two(a[''], b[''])}")


def _replaced(where: str, suffixes: Sequence[str], kinds: Sequence[str]) -> str:
    inner = [suffix for suffix in suffixes if suffix]
    more = f" and {len(inner) - 3} more" if len(inner) > 3 else ""
    parts = f": {', '.join(inner[:3])}{more}" if inner else ""
    return (
        f"{where} is a new object each call, though it looks the same{parts} (compared by "
        f"identity: {', '.join(dict.fromkeys(kinds))} has no __eq__ of its own); make it once, "
        "outside of the loop"
    )


def _value_parts(value: Any) -> dict[str, Any] | None:
    """What a value consists of, by what one would write behind it; None if it is one piece."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{key}": part for key, part in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    if isinstance(value, _compat.HashableMapping):
        value = dict(_compat.mapping_items(value))
    if isinstance(value, dict):
        return {f"[{show(key)}]": part for key, part in value.items()}
    if isinstance(value, functools.partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {".__func__": value.__func__, ".__self__": value.__self__}
    if isinstance(value, types.FunctionType):
        parts: dict[str, Any] = {}
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                parts[f", its variable {key}"] = cell.cell_contents
        return {**parts, ", its defaults": (value.__defaults__, value.__kwdefaults__)}
    if isinstance(value, type | jax.Array | types.ModuleType):
        return None
    own = getattr(value, "__dict__", None)
    if dataclasses.is_dataclass(value) or _has_no_eq(value):
        return None if own is None else {f".{key}": part for key, part in own.items()}
    return None


def _has_no_eq(value: Any) -> bool:
    own: Any = type(value).__eq__
    return own is object.__eq__


def _show_two(a: _Note, b: _Note | None) -> str:
    before, after = a.text, "missing" if b is None else b.text
    if before != after:
        return f"{before} → {after}"
    one, other = a.code, None if b is None else b.code
    if one and other and one != other:
        lines = (f"{before} ({code.co_filename}:{code.co_firstlineno})" for code in (one, other))
        return " → ".join(lines)
    return f"{before} → {after} (they look the same, but compare unequal)"


def show(value: Any) -> str:
    """A value in a message: its name or its repr, without addresses, and not too long."""
    try:
        name = getattr(value, "__qualname__", None) if callable(value) else None
        text = name if isinstance(name, str) else repr(value)
    except Exception as error:  # the user's own
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return _shorten(re.sub(r" at 0x[0-9a-fA-F]+", "", text))


def _shorten(text: str, length: int = 120) -> str:
    text = " ".join(text.split())
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"
