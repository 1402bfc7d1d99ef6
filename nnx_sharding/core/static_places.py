"""Checks that static places hold no arrays, and finds the static objects that a trace cannot copy.

A *static place* is a static argument, or an attribute of a module that is not data. A trace gets
copies of the objects in static places, because it may change them. An object that is equal only to
itself cannot be copied, so the trace gets the caller's object, and all that this holds. The arrays
of a module or Variable in such an object would become constants of the program, and later changes
would be missed. The same holds for Variables, and modules with arrays, that only static values
refer to.

A static object is an entry in the table of all objects (``structure.py``), and has an *index*
there. If it cannot change, it is a *child* of the entry that holds it instead. The *slots* of an
entry are the positions of its arrays in the list of all arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

import jax
from flax import nnx

from .. import _compat
from ..errors import raise_if_any
from ..specs.paths import accessor
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


# The first are equal to no other object. The others cannot be made empty and then get attributes.
_WITHOUT_COPY = (Copying.UNIQUE, Copying.FIXED_WITH_ATTRIBUTES)


def check_static_places(
    structure: Structure, arguments: Iterable[tuple[str, Child]], statics: Iterable[str]
) -> None:
    """Raises a ``ValueError`` for Variables, and modules with arrays, in static places.

    Arrays of JAX are allowed in attributes, where they are compared by value, but not in static
    arguments. Without a line for the message, ``raise_if_any`` raises nothing.

    Args:
      structure: the structure of the arguments.
      arguments: the dynamic arguments and their parts, with the expressions for them.
      statics: the names of the static arguments.
    """
    uncopied = not_copied(structure)
    static_arguments = zip(statics, structure.statics, strict=True)
    starts = [_Place(name, child, in_argument=True) for name, child in static_arguments]
    # Searching a model takes long, so dynamic arguments are searched only if something may be wrong
    # in them: a static value that is a Variable or a module with arrays, or arrays of an object
    # that is not copied.
    has_hidden_arrays = any(map(_is_hidden, structure.identities()))
    uncopied_have_arrays = any(structure.slots[index] for index in uncopied)
    if has_hidden_arrays or uncopied_have_arrays:
        starts += [_Place(name, child, in_argument=False) for name, child in arguments]
    raise_if_any(
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

    Any module is taken for one with arrays. This is safe because a module without arrays, or one
    that is also met as data, is an entry of the structure and no static value.
    """
    value = static.value
    is_variable = _compat.is_graph_object(value) or _compat.is_hijax_variable(value)
    return static.by_identity and (is_variable or _compat.is_ref(value))


class _Place(NamedTuple):
    """A place in the arguments of a call."""

    expression: str  # the user's expression for the place
    child: Child  # describes what is in the place
    in_argument: bool  # whether the place is in a static argument
    in_uncopied: bool = False  # whether it is in a static object that a trace does not copy


def _misplaced(structure: Structure, starts: Iterable[_Place], uncopied: Set[int]) -> Iterator[str]:
    """Yields a line of a message for each Variable or array in a static place.

    Args:
      uncopied: the indices of the objects that a trace does not copy.
    """
    # The objects that were searched: the index, and whether the place was in a static argument.
    seen: set[tuple[int, bool]] = set()
    pending = [*starts]
    while pending:  # a loop, because statics may be nested too deeply for recursion
        place = pending.pop()
        child = place.child
        inner_places: list[_Place] = []
        # 1. A static value. Arrays in it are compared by value, which is right for attributes. In a
        # static argument they are refused, as `jax.jit` does.
        if isinstance(child, Static):
            if _is_hidden(child):
                yield f"  {place.expression}: {type(child.value).__name__} with arrays"
            elif place.in_argument:
                yield from _arrays_in(place.expression, child.value)
        # 2. A pytree, or a static object that cannot change, such as a tuple of settings.
        elif isinstance(child, Container | StaticObject):
            inner_places = _places_below(place, child, in_uncopied=place.in_uncopied)
        # 3. An object of the table.
        elif isinstance(child, int):
            entry = structure.entries[child]
            if place.in_uncopied and entry is not None and not isinstance(entry, StaticObject):
                # A trace gets the caller's own module or Variable: its holder is not copied.
                if _has_arrays(structure, child):
                    yield f"  {place.expression}: {entry.type.__name__} with arrays"
            elif (child, place.in_argument) not in seen:  # not shared with an earlier place
                seen.add((child, place.in_argument))
                inner_places = _places_below(place, entry, in_uncopied=child in uncopied)
        # Places are popped from the end, so this keeps the lines in the order of places.
        pending += reversed(inner_places)


def _has_arrays(structure: Structure, index: int) -> bool:
    """Whether an object, or what it holds at any depth, has arrays."""
    return any(structure.slots[reached] for reached in links_below(structure, [index]))


def _places_below(
    place: _Place, holder: Entry | Container | None, *, in_uncopied: bool
) -> list[_Place]:
    """Returns the places in an object that are searched.

    Args:
      holder: describes the object. An object that is not described (None) has no places.
      in_uncopied: whether a trace gets no copy of the object, or of an object that it is in.
    """
    places = []
    for path, part in parts_of(holder).items():
        if isinstance(part, Static):
            # Two places are allowed to hold arrays.
            # `Rngs` in a Variable's metadata: `nnx.Param(x, rngs=rngs)` puts them there, and public
            # models do so by mistake. They are safe because a program cannot draw from them: each
            # draw counts, and Flax refuses to write to the caller's counter in a trace.
            is_random_stream = isinstance(part.value, nnx.Rngs | nnx.RngStream)
            if is_random_stream and isinstance(holder, VariableEntry):
                continue
            # A cached_property: its value follows from the other attributes, and is dropped after a
            # trace.
            if isinstance(holder, StaticObject) and is_cache(holder.type, path[-1]):
                continue
        # The contents of a module are copied with it, so only the parts of a static object can be
        # without a copy.
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
    """Yields a line of a message for each array in a value that is compared by value.

    Such a value is an array, or a tuple, frozenset or dataclass of such values. A list or dict is
    not searched here, because it can change, so it is an object of the table.
    """
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, jax.Array):
        yield f"  {place}: an array, {jax.typeof(value).str_short()}"
    elif isinstance(value, tuple | frozenset):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        # A field with `init=False` may not be set. None then stands for the field.
        parts = ((name, getattr(value, name, None)) for name in names)
    for key, part in parts:
        yield from _arrays_in(accessor(place, (key,)), part)
