"""Describes how two calls differ: ``model.dropout.rate: 0.1 → 0.2``.

What a call depends on is described by *facts*, one for each part of the arguments, or of what the
function captures, by the expression for the part, its *label*. Facts are texts, so that they
outlive the user's objects. Two calls differ in the facts that differ; of these, the outermost are
shown.

The parts of arguments are those of their `Structure`, a table of *entries* for the objects, in
whose place other parts have the index (`core/structure.py`). A *static* value is compared, not
traced, by equality or by identity.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .. import _compat
from ..core.fingerprint import fingerprint_of
from ..core.functions import captured_values, closure
from ..core.listing import holds_values, is_constant
from ..core.problems import shorten, show
from ..core.signature import Signature
from ..core.static_equality import Static
from ..core.static_parts import StaticKind
from ..core.structure import LEAF, Container, StaticObject, Structure, parts_of
from ..errors import shortened
from ..specs.paths import accessor

# The arguments of one of two calls.
Side: TypeAlias = tuple[Signature, Structure]


class Fact(NamedTuple):
    """A description of one part of the arguments, without references to the user's objects.

    Two facts differ if their texts, origins or contents do. If only the rest does, the difference
    may be in a part of the part, which is then shown in its place.
    """

    text: str  # the part in a message
    origin: str = ""  # where its class or its code is defined
    content: Any = None  # everything else that is compared, except its own parts
    rest: Any = None  # what is compared if none of its own parts differs
    by_identity: str = ""  # the reason, if `rest` compares identities


_MAX_FACTS = 1000  # about one static value, which may refer to any number of objects
_MAX_CAPTURED = 200  # about all that a function captures: about a millisecond of each trace


class Facts(NamedTuple):
    """The facts about a call by the expression for each part, also as a set of pairs."""

    facts: dict[str, Fact]
    items: frozenset[tuple[str, Fact]]
    arguments: frozenset[str]


def differences(old: Side, new: Side) -> list[str]:
    """Lists how the arguments of two calls differ, as far as both calls have them."""
    return shortened(compare(facts_of(*old), facts_of(*new)))


def facts_of(signature: Signature, structure: Structure) -> Facts:
    """Describes the arguments of a call."""
    facts = _facts(signature, structure)
    dynamic = [signature.names[i] for i in signature.dynamic]
    static = [f"static argument {name}" for name in signature.static_names]
    arguments = frozenset([*dynamic, *signature.dynamic_keywords, *static])
    return Facts(facts, frozenset(facts.items()), arguments)


def facts_of_captured(fun: object) -> Facts:
    """Describes what a function captures: closures and globals, also of captured functions.

    What libraries define is left out, and captured modules and arrays are not opened: a trace has
    their values as constants, which are never compared.
    """
    facts: dict[str, Fact] = {}
    seen: set[int] = set()
    pending = [(f"captured {name}", value) for name, value in _captured_by(fun)]
    while pending and len(facts) < _MAX_CAPTURED:
        label, value = pending.pop(0)
        is_of_library = callable(value) and is_constant(value)
        if id(value) in seen or is_of_library or isinstance(value, types.ModuleType):
            continue
        seen.add(id(value))
        if holds_values(value):
            facts[label] = Fact(_show_safely(value))
            continue
        facts |= {label + key: fact for key, fact in _facts_of_value(value, _show_safely).items()}
        if isinstance(value, types.FunctionType):
            inner = captured_values(value)
            pending += [(f"{label}, captured {name}", part) for name, part in inner]
    return Facts(facts, frozenset(facts.items()), frozenset())


def unlisted_captures(fun: object) -> list[str]:
    """Says which of the things that a function captures make each call trace it anew."""
    lines = []
    for name, value in _captured_by(fun):
        if fingerprint_of([value]) is not None:
            continue
        parts = itertools.islice(_walk(value), _MAX_CAPTURED)
        arrays = ((suffix, part) for suffix, part, _ in parts if holds_values(part))
        if isinstance(value, types.ModuleType):
            line = f"{name}: the module {value.__name__}, which has state"
        elif (first := next(arrays, None)) is not None:
            line = f"{name}{first[0]}: {_show_safely(first[1])}, which is a constant of a trace"
        else:
            line = f"{name}: {_show_safely(value)}, whose content cannot be listed"
        lines.append(f"captured {line}, so each call traces; pass it as an argument")
    return lines


def _captured_by(fun: object) -> Iterator[tuple[str, Any]]:
    """Yields what a function captures; of a bound method the object, too."""
    if isinstance(fun, types.MethodType):
        yield "__self__", fun.__self__
    yield from captured_values(fun)


def distance(old: Facts, new: Facts) -> int:
    """Counts the facts that differ; much faster than comparing them."""
    return len(old.items ^ new.items)


def compare(old: Facts, new: Facts) -> list[str]:
    """Returns a line for each of the outermost differences between two calls, in order.

    If an attribute was replaced by an object of another class, for example, the attributes of that
    are not listed.
    """
    before, after = old.facts, new.facts
    different = {label for label, _ in old.items ^ new.items}
    order = [label for label in after | before if label in different]
    # An argument that only one call has is told by the way in which the function was called.
    changed = dict.fromkeys(old.arguments ^ new.arguments, "")
    wholes: list[str] = []  # which differ in themselves only if none of their parts does
    covered = [start for label in changed for start in _below(label)]  # parts of what has changed
    for label in order:
        old_fact = before.get(label)
        new_fact = after.get(label)
        if label in changed or label.startswith(tuple(covered)):
            continue
        if (
            old_fact is None
            or new_fact is None
            or (old_fact.origin, old_fact.content) != (new_fact.origin, new_fact.content)
        ):
            changed[label] = _change(old_fact, new_fact)
            covered += _below(label)
        elif old_fact.rest != new_fact.rest:
            wholes.append(label)
    for label in reversed(wholes):  # from the inside
        if not any(other.startswith(_below(label)) for other in changed):
            changed[label] = _change(before[label], after[label])
    lines = ((label or "the arguments", changed[label]) for label in order if changed.get(label))
    return [f"{shorten(label, 200)}{change}" for label, change in lines]


def _below(label: str) -> tuple[str, ...]:
    """Returns the prefixes of labels for the parts of a part."""
    return (f"{label}.", f"{label}[", f"{label},") if label else ("",)


def _change(a: Fact | None, b: Fact | None) -> str:
    """Returns the text for how fact ``a`` became fact ``b``, to follow their label.

    A fact is None if a call has no such part.
    """
    if a is None or b is None or a.text != b.text:
        before, after = ("missing" if fact is None else fact.text for fact in (a, b))
        return f": {before} → {after}"
    if a.origin != b.origin:
        return f": {a.text} ({a.origin}) → {b.text} ({b.origin})"
    if b.by_identity:
        return (
            f" is a new object that looks the same (compared by identity: {b.by_identity}); "
            "create it once, outside the loop"
        )
    if (difference := _difference(a, b)) is not None:
        return difference
    return f": {a.text} → {b.text} (they look the same, but compare unequal)"


def _difference(a: Fact, b: Fact) -> str | None:
    """Returns a text with the first element in which two NumPy arrays of one type differ.

    None for facts that are not of such arrays.
    """
    arrays = []
    for fact in (a, b):
        match fact.rest:
            case StaticKind(type=kind, detail=(dtype, shape, bytes(data))) if issubclass(
                kind, np.ndarray
            ):
                arrays.append(np.frombuffer(data, cast(Any, dtype)).reshape(cast(Any, shape)))
            case _:
                return None
    # NaNs are equal if their bits are.
    raw = [np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, -1) for x in arrays]
    indices = np.flatnonzero((raw[0] != raw[1]).any(axis=1))
    if not indices.size:
        return None
    where = [int(i) for i in np.unravel_index(indices[0], arrays[0].shape)]
    old, new = (x.flat[indices[0]].item() for x in arrays)
    more = f", and {len(indices) - 1} other elements" if len(indices) > 1 else ""
    return f"{where or ''}: {old} → {new}{more}"


def _facts(signature: Signature, structure: Structure) -> dict[str, Fact]:
    """Returns a fact for each part of the arguments, by the expression for the part.

    Goes from the arguments to what they hold, through the entries of the structure.
    """
    names = [*(signature.names[i] for i in signature.dynamic), "args"]
    facts: dict[str, Fact] = {}
    first_labels: dict[int, str] = {}  # of objects, by index
    statics = zip(signature.static_names, structure.statics, strict=True)
    stack = [*((f"static argument {name}", child) for name, child in statics), ("", structure.root)]
    while stack:  # not recursive, because models may be nested deeply
        label, child = stack.pop()
        if isinstance(child, Static):  # a value that is not traced
            # What is compared by identity is of a user's class, whose `__repr__` may do anything.
            to_text = _show_safely if child.by_identity else show
            child.note = notes = child.note or _facts_of_value(child.value, to_text)
            facts |= {label + suffix: fact for suffix, fact in notes.items()}
            kind = facts[label].by_identity if child.by_identity else ""
            facts[label] = facts[label]._replace(rest=_identity(child), by_identity=kind)
            continue
        text = show_child(structure, child)
        x = cast(Any, child)
        if isinstance(child, int):
            x = structure.entries[child]
            if child in first_labels:
                text = f"{text}, shared with {shorten(first_labels[child])}"
                facts[label] = Fact(text, content=first_labels[child])
                continue
            first_labels[child] = label
        facts[label] = _fact(text, x)
        for path, part in reversed(parts_of(x).items()):
            if label == "" and isinstance(x, Container) and len(path) > 1:  # all arguments
                is_keyword, argument, *rest = path
                start = argument if is_keyword else names[min(argument, len(names) - 1)]
                stack.append((accessor(start, tuple(rest)), part))
            elif path != (_compat.STATUSES,):  # the attributes show what is data
                stack.append((accessor(label, path) if path else f"{label}[...]", part))
    return facts


def _fact(text: str, x: Any) -> Fact:
    """Describes a part that is not a single static value."""
    if x is LEAF or isinstance(x, Container):
        return Fact(text, content=type(x), rest=getattr(x, "treedef", None))
    if isinstance(x, StaticObject):
        why = "" if x.identity is None else f"{x.type.__name__} defines no __eq__"
        rest = x.kind if x.identity is None else (x.kind, _identity(x.identity))
        return Fact(text, _origin(x.type), rest=rest, by_identity=why)
    return Fact(text, _origin(x.type), rest=getattr(x, "metadata", None))


def _identity(static: Static) -> Any:
    """Returns what a static value is compared by, also if it is an object that is gone."""
    return static.identity if static.by_identity else static


def arguments_of(signature: Signature) -> str:
    """Writes how a function was called: ``(model, x, train=)``."""
    return f"({', '.join((*signature.names, *(f'{k}=' for k in signature.keywords)))})"


def show_child(structure: Structure, child: object, depth: int = 3) -> str:
    """Writes a child of an entry, or the root of a structure, as messages show it."""
    if child is LEAF:
        return "an array"
    if isinstance(child, Static):
        return show(child.value)
    if isinstance(child, Container):
        return shorten(str(child.treedef))
    entry: Any = structure.entries[child] if isinstance(child, int) else child
    cls = entry.type
    brackets = _BRACKETS.get(cls)
    if issubclass(cls, np.ndarray):
        return _array_text(*entry.kind.detail[:2])
    if brackets and depth:
        parts = [show_child(structure, part, depth - 1) for part in entry.children]
        if cls is dict:
            parts = [f"{key}: {part}" for key, part in zip(parts[::2], parts[1::2], strict=False)]
        return shorten(f"{brackets[0]}{', '.join(parts)}{brackets[1]}")
    return _named(cls)


def _array_text(dtype: object, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _named(cls: type) -> str:
    return f"{'an' if cls.__name__[:1] in 'AEIOUaeiou' else 'a'} {cls.__name__}"


_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", dict: "{}", set: "{}"}


def note_identities(structure: Structure) -> None:
    """Stores the text for static objects that may no longer exist when a message is made."""
    for static in structure.identities():
        if static.note is None:
            static.note = _facts_of_value(static.value, _show_safely)


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, np.ufunc),
    *(jax.custom_jvp, jax.custom_vjp, _compat.JittedFunction),
)


def _show_safely(value: Any) -> str:
    """Writes a value without a call of the user's ``__repr__``, since every trace needs it."""
    cls = type(value)
    if cls in _PLAIN or issubclass(cls, (*_NAMED, Mesh, AbstractMesh)):
        return show(value)
    if isinstance(value, jax.Array | np.ndarray):
        return _array_text(value.dtype, value.shape)
    size = f" of {len(value)}" if cls in _BRACKETS else ""  # the user's own __len__ is not called
    return f"{_named(cls)}{size}"


def _facts_of_value(value: object, show: Callable[[object], str]) -> dict[str, Fact]:
    """Describes a static value and its parts, by the accessor of each part."""
    facts: dict[str, Fact] = {}
    for suffix, part, parts in itertools.islice(_walk(value), _MAX_FACTS):
        text = show(part)
        cls = type(part)
        why = f"{cls.__name__} defines no __eq__"
        if cast(Any, cls).__eq__ is not object.__eq__:
            why = "part of an object without __eq__"
        facts[suffix] = Fact(text, _origin(part), None if parts else text, None, why)
    return facts


def _walk(value: object) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields a value and what is in it, with accessors, each followed by its own parts."""
    stack = [("", value)]
    seen: set[int] = set()
    while stack:
        suffix, part = stack.pop()
        parts = {} if id(part) in seen else _parts_of_value(part)
        seen.add(id(part))  # parts may refer to each other
        yield suffix, part, parts
        stack += [(suffix + key, inner) for key, inner in reversed(parts.items())]


def _origin(x: object) -> str:
    """Says where a function or the class of something is defined."""
    if isinstance(x, types.FunctionType):
        return f"{x.__code__.co_filename}:{x.__code__.co_firstlineno}"
    cls = x if isinstance(x, type) else type(x)
    return f"{cls.__module__}.{cls.__qualname__}"


def _parts_of_value(value: object) -> dict[str, Any]:
    """Returns what a static value consists of, by accessor; nothing where users know no parts."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{key}": part for key, part in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    if isinstance(value, dict):
        return {f"[{_show_safely(key)}]": part for key, part in value.items()}
    if isinstance(value, functools.partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {".__func__": value.__func__, ".__self__": value.__self__}
    if isinstance(value, types.FunctionType):
        defaults = (value.__defaults__, value.__kwdefaults__)
        variables = {f", captured {key}": part for key, part in closure(value).items()}
        return {**variables, ", its defaults": defaults}
    if isinstance(value, type | jax.Array | types.ModuleType | Mesh | AbstractMesh):
        return {}
    eq: Any = type(value).__eq__
    if dataclasses.is_dataclass(value) or eq is object.__eq__:
        return {f".{key}": part for key, part in getattr(value, "__dict__", {}).items()}
    return {}
