"""The fingerprint of a function: a key for all that it can read besides arrays.

Python reads the world when a function runs; JAX keeps what it read then as constants of a trace. So
a trace is only right for another call if everything that the function can read is the same. This
module lists that:

  A trace is used again only if everything that its function can reach is listed and the same.

What can be reached starts at the function, and at the classes and static values of its arguments,
whose methods it may call. From there it goes on

    function   its code, defaults, attributes, closure cells, and the globals that the code names
    class      its bases, methods and other attributes
    object     its class, its items and attributes; of a bound method and a partial, their parts
    module     the attributes that some listed code names

down to numbers, strings and the like, which are compared by value. The code of JAX, Flax, NumPy and
of the parts of the standard library that have no state is not opened; the configuration of JAX and
Flax is part of the context of a trace. Arrays, Variables and modules are never listed: a trace has
their values as constants, so a function that captures one is traced at each call. The same holds
for everything whose content Python does not show, or that reads the state of the process, such as
``open``.

``jit`` asks for it within a trace only. At top level it keeps, like ``jax.jit``, what its function
captured when it was traced.

From other modules:

    Listing   goes through what is reached: ``tokens`` is the list, ``codes`` and ``weak`` are the
              objects whose ids are in it; raises `NotListed` at what cannot be listed
    is_constant   whether one object reaches nothing that can change: not a class or function of
              the user
    Static    a static value with its rule of comparison: by value, or ``by_identity``
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

from .. import _compat
from .listing import Listing, NotListed, is_constant
from .static_equality import Static
from .structure import Child, Container, StaticObject, Structure, children_of
from .treedefs import node_types


@dataclasses.dataclass(eq=False, repr=False)
class Fingerprint:
    """A key that is equal as long as everything that a function can read is the same.

    Codes and classes are in the list by their ids, since comparing two codes compares their
    instructions. Codes are kept alive, so that no other code gets the id. Classes are not, as they
    may hold the function; when one is gone, the fingerprint equals no other.
    """

    tokens: tuple[Hashable, ...]  # the list (``listing.py``): plain values and ids
    codes: list[types.CodeType]  # whose ids are in it
    weak: list[weakref.ref[Any]]  # to the other objects whose ids are in it

    def __post_init__(self) -> None:
        """Hashes the list once, as it may be long; a ``TypeError`` if that is not possible."""
        self._hash = hash(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or self.tokens != other.tokens:
            return False
        return all(reference() is not None for reference in self.weak)

    def __hash__(self) -> int:
        return self._hash


def fingerprint_of(values: Iterable[object]) -> Fingerprint | None:
    """Returns the fingerprint of some functions, classes and static values.

    Args:
      values: where to start.

    Returns:
      A key for everything that can be reached from them. None if something cannot be listed, so
      that no trace may be used again.
    """
    listing = Listing()
    try:
        for value in values:
            listing.add(value)
        # Last: only now it is known which modules and which names of attributes there are.
        listing.add_module_attributes()
    except NotListed:
        return None
    # A trace also depends on Flax's settings in context, such as the rules for logical axes, which
    # decide the specs of new Variables. Those of JAX are in the keys of its own caches.
    tokens = (*listing.tokens, _compat.context_settings())
    try:
        return Fingerprint(tokens, listing.codes, listing.weak)
    except TypeError:  # something listed by value has no hash after all
        return None


def values_in(structure: Structure) -> list[Any]:
    """Returns the classes and static values in the arguments of a function, as it may call methods.

    What never changes is left out, such as numbers and the classes of Flax. So are static objects
    that can change, which each call has itself; only their classes are returned.

    Args:
      structure: describes the arguments: an entry for each object, whose children are static
        values, containers, and the indices of other objects.
    """
    values: dict[int, Any] = {}  # by id: they need not be hashable, and each counts once
    pending: list[Child] = [structure.root, *structure.statics]
    for entry in structure.entries:
        if entry is not None:
            values[id(entry.type)] = entry.type
            pending += children_of(entry)
    while pending:
        child = pending.pop()
        if isinstance(child, Static):
            values[id(child)] = child
        elif isinstance(child, StaticObject):  # one that cannot change, such as a tuple
            values[id(child.type)] = child.type
            pending += child.children
        elif isinstance(child, Container):
            for cls in node_types(child.treedef):
                values[id(cls)] = cls
            # Besides its children, the data that its classes keep, such as names of fields.
            pending += (*child.children, *child.aux)
        # Anything else is an array, or the index of an object, which has an entry.
    return [value for value in values.values() if not _reaches_nothing_that_changes(value)]


def _reaches_nothing_that_changes(value: object) -> bool:
    """Whether nothing that can change is reached from a class or a static value."""
    if not isinstance(value, Static):  # a class
        return is_constant(value)
    if value.by_identity:
        return isinstance(value.value, type | types.FunctionType) and is_constant(value.value)
    return _has_constant_parts(value)


# Most metadata and settings are shared by models; holding them keeps no other object alive.
@functools.lru_cache(maxsize=4096)
def _has_constant_parts(static: Static) -> bool:
    """Whether nothing that can change is reached from a value that is compared by value.

    That the value is equal does not say so: a member of an enum of the user stays equal to itself
    when a method of its class is replaced.
    """
    listing = Listing()
    try:
        listing.add(static.value)
    except NotListed:
        return False
    return all(map(is_constant, listing.met))  # ``met``: the value, and all objects listed below it
