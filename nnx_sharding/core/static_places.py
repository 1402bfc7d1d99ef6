"""Which objects in static values a trace copies, and the check that these hold no arrays.

A *static place* is a static argument, or an attribute of a module that is not data. A trace gets
copies of the objects there, which it may change. An object that is equal only to itself cannot be
copied, and what it holds is the caller's own as well. A module or Variable there would be the
caller's, whose arrays would become constants of the program: later changes would be missed. The
same holds for Variables, and modules with arrays, that only static values refer to.

A static object is an entry in the table of all objects (``structure.py``), known by its *index*,
or, if it cannot change, a *child* of the entry that holds it. The *slots* of an entry are the
positions of its arrays in the list of all arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

import jax
from flax import nnx

from .. import _compat
from ..errors import raise_listed
from ..specs.paths import accessor
from .flatten import flatten
from .static_equality import Static
from .static_parts import Copying, is_cache
from .structure import (
    Child,
    Container,
    Entry,
    StaticObject,
    Structure,
    VariableEntry,
    links_below,
    parts_of,
)


def not_copied(structure: Structure) -> frozenset[int]:
    """Returns the indices of static objects that cannot be copied, and of all that these hold."""
    starts = [
        index
        for index, entry in enumerate(structure.entries)
        if isinstance(entry, StaticObject) and entry.kind.copying in _WITHOUT_COPY
    ]
    return frozenset(links_below(structure, starts))


_WITHOUT_COPY = (Copying.UNIQUE, Copying.FIXED_WITH_ATTRIBUTES)


def check_static_places(
    structure: Structure, arguments: Iterable[tuple[str, Child]], statics: Iterable[str]
) -> None:
    """Raises a ``ValueError`` for Variables, and modules with arrays, in static places.

    Static arguments must not hold any arrays of JAX; arrays in attributes are compared by value.

    Args:
      structure: that of the arguments.
      arguments: the dynamic arguments and their parts, with the expressions for them.
      statics: the names of the static arguments.
    """
    uncopied = not_copied(structure)
    # Static arguments are searched in any case.
    static_arguments = zip(statics, structure.statics, strict=True)
    starts = [_Place(name, child, in_argument=True) for name, child in static_arguments]
    # To search a model takes long, so dynamic arguments are searched only if there may be something
    # wrong in them: a static value that is a Variable or a module with arrays, or arrays of an
    # object that is not copied.
    has_hidden = any(map(_is_hidden, structure.identities()))
    uncopied_have_arrays = any(structure.slots[index] for index in uncopied)
    if has_hidden or uncopied_have_arrays:
        starts += [_Place(name, child, in_argument=False) for name, child in arguments]
    raise_listed(
        ValueError,
        "static values must not hold Variables or arrays, which would become constants of the "
        "program:",
        [*_misplaced(structure, starts, uncopied)],
        "Pass them as ordinary arguments, or keep them in attributes of modules: what is static in "
        "a module is part of the key of the compiled function in any case.",
        anchor="static-argument-with-arrays",
    )


def _is_hidden(static: Static) -> bool:
    """Whether a static value is a Variable, a module with arrays, or a ref.

    A module without arrays, or one that is also met as data, is an entry of the structure and no
    static value.
    """
    value = static.value
    is_variable = _compat.is_graph_object(value) or _compat.is_hijax_variable(value)
    return static.by_identity and (is_variable or _compat.is_ref(value))


class _Place(NamedTuple):
    """A place in the arguments of a call."""

    expression: str  # the user's expression for it
    child: Child  # what is there
    in_argument: bool  # whether it is in a static argument
    in_uncopied: bool = False  # whether it is in a static object of which a trace gets no copy


def _misplaced(structure: Structure, starts: Iterable[_Place], uncopied: Set[int]) -> Iterator[str]:
    """Yields a line of a message for each Variable or array in a static place.

    Args:
      structure: describes all objects.
      starts: where the search begins.
      uncopied: the indices of the objects of which a trace gets no copy.
    """
    seen: set[tuple[int, bool]] = set()  # objects: the index, and whether in a static argument
    pending = [*starts]
    while pending:  # no recursion: statics may be nested deeply
        place = pending.pop()
        child = place.child
        below: list[_Place] = []  # to search next
        # 1. A static value. Arrays in it are compared by value, which is right for attributes. In a
        # static argument they are refused, as by `jax.jit`.
        if isinstance(child, Static):
            if _is_hidden(child):
                yield f"  {place.expression}: {type(child.value).__name__} with arrays"
            elif place.in_argument:
                yield from _arrays_in(place.expression, child.value)
        # 2. A pytree, or a static object that cannot change, such as a tuple of settings.
        elif isinstance(child, Container | StaticObject):
            below = _places_below(place, child, in_uncopied=place.in_uncopied)
        # 3. An object of the table.
        elif isinstance(child, int):
            entry = structure.entries[child]
            if place.in_uncopied and entry is not None and not isinstance(entry, StaticObject):
                # A module or Variable: the caller's own, as what holds it is not copied.
                if _has_arrays(structure, child):
                    yield f"  {place.expression}: {entry.type.__name__} with arrays"
            elif (child, place.in_argument) not in seen:  # else it is shared, or a cycle
                seen.add((child, place.in_argument))
                below = _places_below(place, entry, in_uncopied=child in uncopied)
        pending += reversed(below)  # it is popped from its end: lines come in the order of places


def _has_arrays(structure: Structure, index: int) -> bool:
    """Whether an object, or what it holds at any depth, has arrays."""
    return any(structure.slots[reached] for reached in links_below(structure, [index]))


def _places_below(
    place: _Place, holder: Entry | Container | None, *, in_uncopied: bool
) -> list[_Place]:
    """Returns the places in an object that are searched.

    Args:
      place: where the object is.
      holder: describes the object. None, for one that is not described, has no places.
      in_uncopied: whether this is an object of which a trace gets no copy, or is in one.
    """
    places = []
    for path, part in parts_of(holder).items():
        if isinstance(part, Static):
            # Two places are allowed to hold arrays.
            # `Rngs` in a Variable's metadata, as of `nnx.Param(x, rngs=rngs)`: public models have
            # these by mistake, and never draw from them. A program cannot: to draw is to count, and
            # Flax refuses to write to the caller's counter in a trace.
            is_random_stream = isinstance(part.value, nnx.Rngs | nnx.RngStream)
            if is_random_stream and isinstance(holder, VariableEntry):
                continue
            # What a cached_property stores follows from the rest, and is dropped after a trace.
            if isinstance(holder, StaticObject) and is_cache(holder.type, path[-1]):
                continue
        # What a module holds is copied with it. Only a static object passes on that it is not.
        part_in_uncopied = isinstance(holder, StaticObject) and in_uncopied
        part_place = _Place(
            expression=accessor(place.expression, path),
            child=part,
            in_argument=place.in_argument,
            in_uncopied=part_in_uncopied,
        )
        places.append(part_place)
    return places


def _arrays_in(place: str, value: object) -> Iterator[str]:
    """Yields a line of a message for each array in what is compared by value.

    That is an array, or a tuple, frozenset or dataclass, at any depth. A list or dict, which can
    change, is compared by content: it is an object of the table. ``place`` is the expression for
    the value.
    """
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, jax.Array):
        yield f"  {place}: an array, {jax.typeof(value).str_short()}"
    elif isinstance(value, tuple | frozenset):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        # None stands for a field that is not set, as one with `init=False` may not be.
        parts = ((name, getattr(value, name, None)) for name in names)
    for key, part in parts:
        yield from _arrays_in(accessor(place, (key,)), part)


def static_key(*values: object) -> Structure:
    """Returns a key for static values, equal for equal ones by the rule of ``static_equality``.

    It is a snapshot: hashable, also of what can be changed. Values that are compared by identity
    are held by weak references.
    """
    return flatten((), statics=values, keeps_alive=False).structure
