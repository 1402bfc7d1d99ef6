"""The fingerprint of a function: a key for all that it can read besides arrays.

When a function runs, it reads globals, attributes and closures. JAX keeps what the function read
while it was traced as constants. So a trace is right for another call only if everything that the
function can read is the same. This module lists what a function can read, by one rule:

  A trace is used again only if everything that its function can reach is listed and the same.

The search starts at the function, and at the classes and static values of its arguments, because
the function may call their methods. From each of these, it goes on to

    function   its code, defaults, attributes, closure cells, and the globals that the code names
    class      its bases, methods and other attributes
    object     its class, its items and attributes; the parts of a bound method or a partial
    module     the attributes that some listed code names

and ends at numbers, strings and the like, which are compared by value. The code of JAX, Flax, NumPy
and of the parts of the standard library that have no state is not opened. The configuration of JAX
and Flax is part of the context of a trace. Arrays, Variables and modules are never listed. A trace
has their values as constants, so a function that captures one is traced at each call. The same
holds for objects whose content Python does not show, and for functions that read the state of the
process, such as ``open``.

``jit`` uses fingerprints within a trace only. At top level, a program keeps what its function
captured when it was traced, like ``jax.jit``.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

from .. import _compat
from .listing import Listing, NotListed
from .stateless import is_constant
from .static_equality import Static
from .structure import Child, Container, StaticObject, Structure, children_of
from .treedefs import containers_of


@dataclasses.dataclass(eq=False, repr=False)
class Fingerprint:
    """A key that is equal as long as everything that a function can read is the same.

    The list has the ids of codes and classes, because comparing two codes would compare their
    instructions. Codes are kept alive, so that no other code gets the id. Classes are not kept
    alive, because they may hold the function. Once a class is collected, the fingerprint equals no
    other. The private attribute ``_hash`` is the hash of the list.
    """

    tokens: tuple[Hashable, ...]  # the list (``listing.py``): plain values and ids
    codes: list[types.CodeType]  # the codes whose ids are in the list
    weak: list[weakref.ref[Any]]  # references to the other objects whose ids are in the list

    def __post_init__(self) -> None:
        """Hashes the list once, as it may be long; raises a ``TypeError`` if it has no hash."""
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
      values: the objects where the search starts.

    Returns:
      A key for everything that can be reached from the values. None if something cannot be listed,
      so that no trace may be used again.
    """
    listing = Listing()
    try:
        for value in values:
            listing.add(value)
        # Attributes of modules come last, because the other objects say which modules and which
        # names of attributes there are.
        listing.add_module_attributes()
    except NotListed:
        return None
    # A trace also depends on Flax's settings in context, such as the rules for logical axes, which
    # decide the specs of new Variables. JAX's settings are in the keys of its own caches.
    tokens = (*listing.tokens, _compat.context_settings())
    try:
        return Fingerprint(tokens, listing.codes, listing.weak)
    except TypeError:  # something listed by value has no hash after all
        return None


def values_in(structure: Structure) -> list[Any]:
    """Returns the classes and static values in the arguments of a function.

    The function may call methods of these. Values that never change are left out, such as numbers
    and the classes of Flax. A static object that can change is left out, because each call has such
    objects of its own, but its class is returned.

    Args:
      structure: describes the arguments: an entry for each object, whose children are static
        values, containers, and the indices of other objects.
    """
    values: dict[int, Any] = {}  # by id, because values need not be hashable
    pending: list[Child] = [structure.root, *structure.statics]
    for entry in structure.entries:
        if entry is not None:
            values[id(entry.type)] = entry.type
            pending += children_of(entry)
    while pending:
        child = pending.pop()
        if isinstance(child, Static):
            values[id(child)] = child
        elif isinstance(child, StaticObject):  # an object that cannot change, such as a tuple
            values[id(child.type)] = child.type
            pending += child.children
        elif isinstance(child, Container):
            for cls, _ in containers_of(child.treedef):
                values[id(cls)] = cls
            # ``aux`` is the data that the classes of the pytree keep, such as names of fields.
            pending += (*child.children, *child.aux)
        # Any other child is an array, or the index of an object, whose entry is searched as well.
    return [value for value in values.values() if not _reaches_nothing_that_changes(value)]


def _reaches_nothing_that_changes(value: object) -> bool:
    """Whether nothing that can change is reached from a class or a static value."""
    if not isinstance(value, Static):  # a class
        return is_constant(value)
    if value.by_identity:
        return isinstance(value.value, type | types.FunctionType) and is_constant(value.value)
    return _has_constant_parts(value)


# Models share most metadata and settings, so the results are cached. The cache keeps only values
# that are compared by value, and so no other object alive. A result holds for all equal values,
# because these have the same classes, also in all parts (``static_equality.value_key``).
@functools.lru_cache(maxsize=4096)
def _has_constant_parts(static: Static) -> bool:
    """Whether code can reach nothing that can change from a value that is compared by value.

    A value may be equal although what it reaches has changed: a member of a user's enum stays equal
    to itself when a method of its class is replaced.
    """
    listing = Listing()
    try:
        listing.add(static.value)
    except NotListed:
        return False
    return all(map(is_constant, listing.met))  # ``met`` has the value and all objects in it
