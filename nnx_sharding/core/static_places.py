"""Where static values are: which of their objects a trace copies, and what they must not hold.

A trace gets copies of static objects, which it may change. An object that is equal only to itself
cannot be copied, and what it holds is the caller's own as well. A module or Variable there would
be the caller's, whose arrays would become constants of the program: later changes would be missed.
The same holds for Variables, and modules with arrays, that only static values refer to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Set
from typing import Any

import jax

from .. import _compat
from ..errors import raise_listed
from ..specs.paths import accessor
from .flatten import flatten
from .static_equality import Static
from .static_parts import can_be_made, is_cache
from .structure import Child, StaticObject, Structure, atoms, children_of, parts_of


def not_copied(structure: Structure) -> frozenset[int]:
    """The objects of a structure that exist only once, and all that these hold."""
    pairs = enumerate(structure.entries)
    return _reachable(
        structure,
        (i for i, x in pairs if isinstance(x, StaticObject) and not can_be_made(x.kind)),
    )


def _reachable(structure: Structure, starts: Iterable[int]) -> frozenset[int]:
    found: set[int] = set()
    pending = [*starts]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            parts = atoms(children_of(structure.entries[index]))
            pending += (part for part in parts if isinstance(part, int))
    return frozenset(found)


def check_static_places(
    structure: Structure, arguments: Iterable[tuple[str, Child]], statics: Iterable[str]
) -> None:
    """Raises a ``ValueError`` for Variables, and modules with arrays, in static values.

    Static arguments must not hold any arrays of JAX; those in attributes are compared by value.

    Args:
      structure: that of the arguments.
      arguments: the dynamic arguments and their parts, with the expressions for them.
      statics: the names of the static arguments.
    """
    own = not_copied(structure)
    is_hidden = map(_is_hidden, structure.identities())
    has_arrays = (structure.slots[index] for index in own)
    named = zip(statics, structure.statics, strict=True)
    starts = [(name, child, True) for name, child in named]
    if any(is_hidden) or any(has_arrays):
        starts += [(name, child, False) for name, child in arguments]
    raise_listed(
        ValueError,
        "static values must not hold Variables or arrays, which would become constants of the "
        "program:",
        [f"  {place}: {what}" for place, what in _misplaced(structure, starts, own)],
        "Pass them as ordinary arguments, or keep them in attributes of modules: what is static in "
        "a module is part of the key of the compiled function in any case.",
        anchor="static-argument-with-arrays",
    )


def _is_hidden(static: Static) -> bool:
    """Whether a value is a Variable, or a module with arrays, that is no part of the graph."""
    value = static.value
    is_variable = _compat.is_graph_object(value) or _compat.is_hijax_variable(value)
    return static.by_identity and (is_variable or _compat.is_ref(value))


def _misplaced(
    structure: Structure, starts: list[tuple[str, Child, bool]], own: Set[int]
) -> Iterator[tuple[str, str]]:
    """The expression for each Variable or array in a static place, and what it is.

    Of the ``starts``, name and child, some are static arguments.
    """
    seen: set[tuple[int, bool]] = set()
    stack = [(place, child, is_argument, False) for place, child, is_argument in starts]
    while stack:
        place, child, is_argument, is_in_own = stack.pop()
        x: Any = child
        if isinstance(child, int):
            x = structure.entries[child]
            if is_in_own and not isinstance(x, StaticObject):
                if any(structure.slots[i] for i in _reachable(structure, [child])):
                    yield place, f"{x.type.__name__} with arrays"
                continue
            if (child, is_argument) in seen:
                continue
            seen.add((child, is_argument))
        elif isinstance(child, Static):
            if _is_hidden(child):
                yield place, f"{type(child.value).__name__} with arrays"
            elif is_argument:
                yield from _arrays_in(place, child.value)
        is_own = isinstance(x, StaticObject) and (child in own if child is not x else is_in_own)
        for path, part in reversed(parts_of(x).items()):
            is_cached = isinstance(x, StaticObject) and is_cache(x.type, path[-1])
            if not is_cached or not isinstance(part, Static):
                stack.append((accessor(place, path), part, is_argument, is_own))


def _arrays_in(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """The arrays in what is compared by value."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, jax.Array):
        yield place, f"an array, {jax.typeof(value).str_short()}"
    elif isinstance(value, tuple | frozenset):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((own.name, getattr(value, own.name, None)) for own in dataclasses.fields(value))
    for key, part in parts:
        yield from _arrays_in(accessor(place, (key,)), part)


def static_key(*values: Any) -> Structure:
    """A key for static values, equal for equal ones by the rule of ``static_equality``.

    It is a snapshot: hashable, also of what can be changed. Values that are compared by identity
    are held by weak references.
    """
    return flatten((), statics=values, held=False).structure
