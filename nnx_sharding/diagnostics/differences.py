"""Describes how two calls differ: ``model.dropout.rate: 0.1 → 0.2``.

A call is described by *facts*: one fact for each part of the arguments, and of the values that the
function captures. A fact has a *label*, the expression for the part (``model.dropout.rate``; empty
for all arguments together). Facts are texts, so that they outlive the user's objects. Two calls
differ in the facts that differ. Only the outermost of these facts are shown.

The arguments are described by their `Structure` (`core/structure.py`), a table of *entries* for the
objects. An entry has *children*. A child is the index of an entry, ``LEAF`` for an array, a
`Container` for lists, dicts and tuples, or a `Static` or `StaticObject`. The last two are values
that are not traced but compared, by equality or by identity. `parts_of` returns the children of an
entry or a container by path.

Captured values have no structure: `_walk` opens a static value by following its attributes and
items. `show` writes a value by its ``repr``, `_show_safely` writes it without calling ``repr``. The
facts about a static value are kept in the ``note`` of its `Static`, which is None before.
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
from ..core.functions import NamedValue, captured_values, closure
from ..core.listing import holds_values
from ..core.signature import Signature
from ..core.stateless import is_constant
from ..core.static_equality import Static
from ..core.static_parts import StaticKind
from ..core.structure import (
    LEAF,
    Container,
    Entry,
    Leaf,
    RefEntry,
    StaticObject,
    Structure,
    parts_of,
)
from ..errors import shortened
from ..specs.fitting import shorten, show
from ..specs.paths import Path, accessor

# The arguments of one of two calls.
Side: TypeAlias = tuple[Signature, Structure]


class Fact(NamedTuple):
    """A description of one part of the arguments, without references to the user's objects.

    A part is *replaced* if its origin or its content differs. It is *altered* if only its rest
    differs: then the change may be in a part of the part.
    """

    text: str  # the part in a message: ``0.1``, ``a Linear``, ``float32[3]``
    origin: str = ""  # the definition of the part's class or code: ``flax.nnx.Linear``
    content: Any = None  # a value that is compared first, such as the text of a number
    rest: Any = None  # a value that is compared last: the keys of a dict, or an identity
    by_identity: str = ""  # why `rest` compares identities: ``Schedule defines no __eq__``


# The facts about one static value are limited, because it may refer to any number of objects.
_MAX_FACTS = 1000
# The facts about all captured values of a function; they take about a millisecond of each trace.
_MAX_CAPTURED = 200


class Facts(NamedTuple):
    """The facts about a call."""

    facts: dict[str, Fact]  # by label, from the outside to the inside
    arguments: frozenset[str]  # the labels of the arguments


class _StaticPart(NamedTuple):
    """A static value, or a part of it: ``.layers[0]`` of an object."""

    suffix: str  # follows the expression for the whole value; empty for the value itself
    value: Any
    parts: dict[str, Any]  # the part's own parts; keys follow `suffix`: ``{".rate": 0.1}``


def differences(old: Side, new: Side) -> list[str]:
    """Lists how the arguments of two calls differ, as far as both calls have them."""
    return shortened(compare(facts_of(*old), facts_of(*new)))


def facts_of(signature: Signature, structure: Structure) -> Facts:
    """Describes the arguments of a call.

    The label of a traced argument is its name, such as ``model``. The label of a static argument is
    ``static argument mode``, for example.
    """
    traced = [signature.names[index] for index in signature.dynamic]  # passed by position
    static = [f"static argument {name}" for name in signature.static_names]
    labels = frozenset([*traced, *signature.dynamic_keywords, *static])
    return Facts(_facts(signature, structure), arguments=labels)


def facts_of_captured(fun: object) -> Facts:
    """Describes what a function captures: closures and globals, also of captured functions.

    Classes and functions of libraries, and Python modules, are left out because they do not change.
    Arrays and objects that hold arrays, such as an ``nnx.Linear``, are not opened, because a trace
    has the arrays as constants, which are never compared. At most about `_MAX_CAPTURED` facts are
    made.
    """
    facts: dict[str, Fact] = {}
    seen: set[int] = set()
    pending = [(f"captured {name}", value) for name, value in _captured_by(fun)]
    while pending and len(facts) < _MAX_CAPTURED:
        # The search is breadth first, so that the limit keeps the values near the function.
        label, value = pending.pop(0)
        is_of_library = callable(value) and is_constant(value)
        if id(value) in seen or is_of_library or isinstance(value, types.ModuleType):
            continue
        seen.add(id(value))
        if holds_values(value):  # only the presence of a value with arrays is compared
            facts[label] = Fact(_show_safely(value))
            continue
        facts |= {label + key: fact for key, fact in _facts_of_value(value, _show_safely).items()}
        if isinstance(value, types.FunctionType):
            inner = captured_values(value)
            pending += [(f"{label}, captured {name}", part) for name, part in inner]
    return Facts(facts, arguments=frozenset())  # a capture is no argument


def unlisted_captures(fun: object) -> list[str]:
    """Lists the captured values that make each call of a function trace it anew.

    A fingerprint is a key that stays equal as long as a value has the same content. Values without
    a fingerprint are listed, because nothing tells whether they have changed since the last call.
    """
    return [
        f"captured {_why_unlisted(name, value)}, so each call traces; pass it as an argument"
        for name, value in _captured_by(fun)
        if fingerprint_of([value]) is None
    ]


def _why_unlisted(name: str, value: object) -> str:
    """Says why a captured value has no fingerprint: ``cfg.w: float32[3], which is a constant …``.

    ``name`` is the name of the variable, such as ``cfg``. The reason is an array in the value. If
    the value has no array, the reason is an object whose content Python does not show, such as an
    object of a class written in C.
    """
    if isinstance(value, types.ModuleType):
        return f"{name}: the module {value.__name__}, which has state"
    for part in itertools.islice(_walk(value), _MAX_CAPTURED):
        if holds_values(part.value):
            shown = _show_safely(part.value)
            return f"{name}{part.suffix}: {shown}, which is a constant of a trace"
    return f"{name}: {_show_safely(value)}, whose content cannot be listed"


def _captured_by(fun: object) -> Iterator[NamedValue]:
    """Yields each value that a function captures; for a bound method, its object first."""
    if isinstance(fun, types.MethodType):
        yield NamedValue("__self__", fun.__self__)
    yield from captured_values(fun)


def compare(old: Facts, new: Facts) -> list[str]:
    """Returns a line for each difference between two calls that no other difference explains.

    If a part was *replaced* (`Fact`), its own parts are not listed. If it was *altered*, it is only
    listed if none of its own parts is. For example::

        model             altered     not listed, because parts of it are
        model.act         replaced    listed: its class is another one
        model.act.slope   replaced    not listed, because model.act is
        model.heads       altered     listed: it compares unequal, but none of its parts does

    Arguments that only one call has get no line, because the caller writes how both functions were
    called: ``(model, x) → (model, x, train=)``.
    """
    before, after = old.facts, new.facts
    # The labels are in the order of the new call, a whole before its parts. Labels that only the
    # old call has come last.
    different = [label for label in after | before if before.get(label) != after.get(label)]
    unshared = old.arguments ^ new.arguments  # the arguments that only one call has
    explained = {*unshared}  # labels whose parts need no line
    # All labels of parts of the explained labels begin with one of these texts.
    starts = [start for label in unshared for start in _below(label)]
    altered: list[str] = []
    for label in different:
        if label in explained or label.startswith(tuple(starts)):
            continue
        if _is_replaced(before.get(label), after.get(label)):
            explained.add(label)
            starts += _below(label)
        elif before[label].rest != after[label].rest:
            altered.append(label)
    # In reversed order, parts come before their wholes. A part that is explained explains why its
    # whole was altered.
    for label in reversed(altered):
        if not any(part.startswith(_below(label)) for part in explained):
            explained.add(label)
    listed = explained - unshared
    return [
        f"{shorten(label or 'the arguments', 200)}{_change(before.get(label), after.get(label))}"
        for label in different
        if label in listed
    ]


def _is_replaced(old: Fact | None, new: Fact | None) -> bool:
    """Tells whether a part was replaced (`Fact`), or only one call has it (None)."""
    if old is None or new is None:
        return True
    return old.origin != new.origin or old.content != new.content


def _below(label: str) -> tuple[str, ...]:
    """Returns how the labels of parts begin: ``model.``, ``model[`` and ``model,`` for ``model``.

    The beginning with a comma is for ``model, captured x``. For the empty label of all arguments
    together, the result is the empty text, with which every label begins.
    """
    return (f"{label}.", f"{label}[", f"{label},") if label else ("",)


def _change(a: Fact | None, b: Fact | None) -> str:
    """Returns the text after a label that says how fact ``a`` became fact ``b``.

    A fact is None if the call has no such part.
    """
    if a is None or b is None or a.text != b.text:
        before, after = ("missing" if fact is None else fact.text for fact in (a, b))
        return f": {before} → {after}"
    if a.origin != b.origin:
        return f": {a.text} ({a.origin}) → {b.text} ({b.origin})"
    if b.by_identity:
        return (
            f" is a new object that looks the same (compared by identity: {b.by_identity}); "
            "create it once, outside of the loop or of the function that makes the model"
        )
    old, new = _array_of(a), _array_of(b)
    # The texts of the facts are equal, so the arrays have the same dtype and shape.
    difference = "" if old is None or new is None else _first_difference(old, new)
    return difference or f": {a.text} → {b.text} (they look the same, but compare unequal)"


def _array_of(fact: Fact) -> np.ndarray[Any, Any] | None:
    """Returns the NumPy array that a fact is about; None for other facts.

    The array itself may be gone, but ``Fact.rest`` keeps its kind, because kinds are compared. The
    detail of an array's kind is (dtype, shape, bytes). The bytes are None if the elements are
    Python objects.
    """
    kind = fact.rest
    if not isinstance(kind, StaticKind) or not issubclass(kind.type, np.ndarray):
        return None
    dtype, shape, data = cast(Any, kind.detail)
    return None if data is None else np.frombuffer(data, dtype).reshape(shape)


def _first_difference(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> str:
    """Writes the first element in which arrays of one dtype and shape differ; empty if none does.

    The text follows a label: ``[1, 0]: 2.0 → 3.0, and 4 other elements``.
    """
    # The bytes are compared, because NaNs count as equal if their bits are equal.
    old_bytes, new_bytes = (  # each (elements, bytes of an element)
        np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, -1) for x in (old, new)
    )
    indices = np.flatnonzero((old_bytes != new_bytes).any(axis=1))  # into the flat arrays
    if not indices.size:
        return ""
    first = int(indices[0])
    where = [int(i) for i in np.unravel_index(first, old.shape)]  # empty for a scalar
    more = f", and {len(indices) - 1} other elements" if len(indices) > 1 else ""
    return f"{where or ''}: {old.flat[first].item()} → {new.flat[first].item()}{more}"


def _facts(signature: Signature, structure: Structure) -> dict[str, Fact]:
    """Returns a fact for each part of the arguments, by label, from the outside to the inside.

    An object that is met again gets one fact, that it is shared with the first place. The labels of
    its parts begin with the label of the first place.
    """
    facts: dict[str, Fact] = {}
    first_labels: dict[int, str] = {}  # the first label of each object, by the index of its entry
    statics = zip(signature.static_names, structure.statics, strict=True)
    # The stack has the label and the child of each part that is still to be described. There is no
    # recursion, because models may be nested deeply.
    stack = [*((f"static argument {name}", child) for name, child in statics), ("", structure.root)]
    while stack:
        label, child = stack.pop()
        if isinstance(child, Static):
            facts |= _facts_of_static(label, child)
            continue
        text = show_child(structure, child)
        part: Any = child  # an array or a container; replaced below by the entry of an object
        if isinstance(child, int):
            if child in first_labels:
                first_label = first_labels[child]
                # The content is the first label, because an object that is shared with another
                # place in the next call is a difference.
                facts[label] = Fact(
                    f"{text}, shared with {shorten(first_label)}", content=first_label
                )
                continue
            first_labels[child] = label
            part = structure.entries[child]
        facts[label] = _fact(text, part)
        inner = [
            (_label_of_part(label, part, path, signature), below)
            for path, below in parts_of(part).items()
            # Flax's record of which attributes are data gets no fact, because the attributes
            # themselves show the same.
            if path != (_compat.STATUSES,)
        ]
        stack += reversed(inner)  # the first one is popped first
    return facts


def _label_of_part(label: str, whole: object, path: Path, signature: Signature) -> str:
    """Returns the expression for what is at a path in a part of the arguments.

    Args:
      label: the expression for the part, such as ``model``; empty for all arguments together.
      whole: the part: a container, or the entry of an object.
      path: where it is in the part: ``("up", "kernel")`` for ``model.up.kernel``; empty for the
        value of a Variable, ``model.step[...]``.
    """
    # All arguments together are the pair (args, kwargs). For a function of ``(model, x)``, the path
    # (0, 1, "image") is ``x['image']``, and (1, "train") is ``train``. A path of one key names
    # ``args`` or ``kwargs`` as a whole.
    if label == "" and isinstance(whole, Container) and len(path) > 1:
        is_keyword, argument, *rest = path
        if is_keyword:
            return accessor(argument, tuple(rest))
        traced_names = [signature.names[index] for index in signature.dynamic]
        # A function of ``(x, *args)`` may have more arguments than names.
        name = traced_names[argument] if argument < len(traced_names) else "args"
        return accessor(name, tuple(rest))
    return accessor(label, path) if path else f"{label}[...]"


def _facts_of_static(label: str, static: Static) -> dict[str, Fact]:
    """Returns the facts about a value that is not traced, and about its parts, by label.

    The facts are made once, and kept in the ``note`` of ``static``.
    """
    if static.note is None:
        # A value that is compared by identity may be of a user's class, whose `__repr__` may do
        # anything, so it is not called.
        to_text = _show_safely if static.by_identity else show
        # The facts are kept with the value, because its object may be gone when it is compared with
        # a later call.
        static.note = _facts_of_value(static.value, to_text)
    facts: dict[str, Fact] = {label + suffix: fact for suffix, fact in static.note.items()}
    # The parts are compared by their texts. The value as a whole has an empty suffix. It is also
    # compared as a trace does, by `rest`.
    fact_of_value = facts[label]
    reason = fact_of_value.by_identity if static.by_identity else ""
    facts[label] = fact_of_value._replace(rest=_identity(static), by_identity=reason)
    return facts


def _fact(text: str, part: Leaf | Container | Entry) -> Fact:
    """Describes a part, other than a single static value, without its own parts.

    Properties that change with the parts of a part are compared last (``rest``). If an item of a
    list becomes a dict, for example, the treedef of the list changes too, but the item is listed.

    Args:
      part: ``LEAF`` for an array, a container, or the entry of an object.
    """
    # The content is the kind of the part, so that an array that becomes a list counts as replaced.
    if isinstance(part, Leaf):
        return Fact(text, content=Leaf)
    if isinstance(part, Container):
        return Fact(text, content=Container, rest=part.treedef)
    origin = _origin(part.type)  # ``flax.nnx.Linear``, for example
    if isinstance(part, RefEntry):  # a `jax.Ref`; a trace knows nothing else about it
        return Fact(text, origin)
    if not isinstance(part, StaticObject):  # a module or a Variable
        return Fact(text, origin, rest=part.metadata)
    if part.identity is None:  # the static object is compared by its parts
        return Fact(text, origin, rest=part.kind)
    return Fact(
        text,
        origin,
        rest=(part.kind, _identity(part.identity)),
        by_identity=f"{part.type.__name__} defines no __eq__",
    )


def _identity(static: Static) -> Any:
    """Returns the key by which a static value is compared: its identity, or the value itself.

    The value compares by its ``__eq__``. The identity stays valid when the object is gone.
    """
    return static.identity if static.by_identity else static


def arguments_of(signature: Signature) -> str:
    """Writes how a function was called: ``(model, x, train=)``."""
    return f"({', '.join((*signature.names, *(f'{k}=' for k in signature.keywords)))})"


def show_child(structure: Structure, child: object, depth: int = 3) -> str:
    """Writes a child of an entry, or the root of a structure, as messages show it.

    A list becomes ``[0.5, an array, {'rate': 0.1}]``, an array of NumPy ``float32[3]``, and an
    object ``a Linear``. Lists, tuples and dicts are opened up to ``depth`` levels.
    """
    if child is LEAF:
        return "an array"
    if isinstance(child, Static):
        return show(child.value)
    if isinstance(child, Container):
        return shorten(str(child.treedef))
    # An index stands for the entry of an object. A static object that cannot change is an entry
    # itself.
    entry: Any = structure.entries[child] if isinstance(child, int) else child
    cls = entry.type
    if issubclass(cls, np.ndarray):
        dtype, shape, *_ = entry.kind.detail  # (dtype, shape, bytes)
        return _array_text(dtype, shape)
    if cls in _BRACKETS and depth:  # a list, tuple, dict or set
        parts = [show_child(structure, part, depth - 1) for part in entry.children]
        if cls is dict:  # the children of a dict are key, value, key, value, …
            parts = [f"{key}: {part}" for key, part in zip(parts[::2], parts[1::2], strict=False)]
        brackets = _BRACKETS[cls]
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


# Values whose ``repr`` is Python's own, if they are of exactly these classes.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Values, also of subclasses, that `show` writes by name or as a mesh, without their ``repr``.
_NAMED = (
    *(Mesh, AbstractMesh),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, np.ufunc),
    *(jax.custom_jvp, jax.custom_vjp, _compat.JittedFunction),
)


def _show_safely(value: Any) -> str:
    """Writes a value without a call of the user's ``__repr__``, since every trace needs it."""
    cls = type(value)
    if cls in _PLAIN or issubclass(cls, _NAMED):
        return show(value)
    if isinstance(value, jax.Array | np.ndarray):
        return _array_text(value.dtype, value.shape)
    size = f" of {len(value)}" if cls in _BRACKETS else ""  # the user's own __len__ is not called
    return f"{_named(cls)}{size}"


def _facts_of_value(value: object, show: Callable[[object], str]) -> dict[str, Fact]:
    """Describes a static value and its parts, by suffix (``.layers[0]``; empty for the value).

    ``show`` writes a value as text. Numbers and strings are compared by this text.
    """
    facts: dict[str, Fact] = {}
    for part in itertools.islice(_walk(value), _MAX_FACTS):
        text = show(part.value)
        # This text says why the value is compared by identity, if it is. A value whose class
        # defines ``__eq__`` is compared by identity only as a part of an object without ``__eq__``.
        cls = type(part.value)
        why = f"{cls.__name__} defines no __eq__"
        if cast(Any, cls).__eq__ is not object.__eq__:
            why = "part of an object without __eq__"
        facts[part.suffix] = Fact(
            text,
            _origin(part.value),
            # The text of a list repeats the texts of its items. It is not compared, because the
            # items have facts of their own.
            content=None if part.parts else text,
            by_identity=why,
        )
    return facts


def _walk(value: object) -> Iterator[_StaticPart]:
    """Yields a value and its parts, depth first. An object that is met again has no parts."""
    stack = [("", value)]
    seen: set[int] = set()  # ids, which stay valid as long as ``value`` holds the objects
    while stack:
        suffix, inner = stack.pop()
        parts = {} if id(inner) in seen else _parts_of_value(inner)
        seen.add(id(inner))  # parts may refer to each other
        yield _StaticPart(suffix, inner, parts)
        stack += [(suffix + key, part) for key, part in reversed(parts.items())]


def _origin(x: object) -> str:
    """Says where a function or the class of something is defined."""
    if isinstance(x, types.FunctionType):
        return f"{x.__code__.co_filename}:{x.__code__.co_firstlineno}"
    cls = x if isinstance(x, type) else type(x)
    return f"{cls.__module__}.{cls.__qualname__}"


def _parts_of_value(value: object) -> dict[str, Any]:
    """Returns the parts of a static value by the text that follows the value's expression.

    For ``(1, 2)`` the result is ``{"[0]": 1, "[1]": 2}``, for a closure ``{", captured rate": 0.1,
    ", its defaults": …}``. It is empty for classes, arrays, modules and meshes. It is empty for
    objects of a class that defines ``__eq__``, too, because ``__eq__`` need not compare the
    attributes. A dataclass compares its attributes, so it is opened.
    """
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
