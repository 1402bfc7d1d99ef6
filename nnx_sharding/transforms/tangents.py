"""Which arrays have tangents, and pytrees of tangents in the form of the user's objects.

JAX differentiates lists of arrays. Users give and get tangents and cotangents in the form of their
arguments and results, the *values*: for a module another one of the same structure, with tangents
in place of its arrays (:class:`TangentForm`). Integers have no tangent; JAX writes it as zeros of
dtype `float0`. A *slot* is the position of an array in what was flattened (``Flat``).

From other modules:

    Flat             what ``flatten`` returns: ``structure``, ``leaves`` (arrays) and ``objects``
    unflatten        makes new objects from a structure and leaves; ``root`` is their pytree
    replace_slots    a copy of a list of arrays with others in some slots
    leaves_by_path   the leaves of a pytree by path; ``slots_by_path`` has the same paths
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.prefixes import leaves_by_path
from ..core.structure import Child, Structure
from ..core.unflatten import unflatten
from ..errors import raise_listed
from ..specs.paths import Path, accessor
from .in_trace import replace_slots, tree_text, type_text


def is_inexact(x: object) -> bool:
    """Whether something is an array that has a derivative; a ``jax.Ref`` has none."""
    is_array = _compat.is_array_like(x) and not _compat.is_ref(x)
    dtype = getattr(jax.typeof(x), "dtype", None) if is_array else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def tangent_type(x: object) -> Any:
    """Returns the type of tangents of an array or a hijax value; None for what has none."""
    if is_inexact(x):
        return jax.typeof(x)
    if not _compat.is_array_like(x):
        return None
    own_type: Any = jax.typeof(x)
    if hasattr(own_type, "dtype"):  # an array, but of integers or the like
        return None
    try:
        aval = own_type.to_tangent_aval()
    except NotImplementedError:  # a hijax type without derivatives
        return None
    # The tangents of a hijax type may be arrays, if of a floating-point dtype.
    return aval if jnp.issubdtype(getattr(aval, "dtype", float), jnp.inexact) else None


def as_array(x: object, aval: object = None) -> Any:
    """Makes an array of a number or an array, with the dtype of ``aval``, or its own without it.

    A value of a hijax type, which is no array, stays as it is.
    """
    own_type = jax.typeof(x)
    if not hasattr(own_type, "dtype"):
        return x
    return jnp.asarray(x, getattr(aval or own_type, "dtype", None))


def without_tangent(x: Any) -> Any:
    """Returns what JAX has for the tangent of an array that has none: zeros of ``float0``.

    What is no array stays as it is.
    """
    if not _compat.is_array_like(x) or _compat.is_ref(x):
        return x
    return np.zeros(np.shape(x), jax.dtypes.float0)


def slots_by_path(structure: Structure, child: Child | None = None) -> dict[Path, tuple[int, ...]]:
    """Returns the slots of the arrays in a structure, by path: ``{(0, "kernel"): (3,)}``.

    With ``child``, of a part of it only, such as one argument; paths start there.
    """
    child = structure.root if child is None else child
    locations = structure.walk(child, iter(structure.root_slots))
    return {location.path: location.slots for location in locations}


class TangentForm:
    """The form of tangents: some pytrees of objects and arrays, and which arrays have tangents.

    Attributes:
      slots: the slots of the arrays that have tangents.
    """

    def __init__(self, flat: Flat, places: Mapping[Path, tuple[int, ...]]):
        """Keeps the structure and the types of some values, without the values.

        Args:
          flat: the values, flattened.
          places: the slots of the Variables and arrays that may have tangents, by path. Paths
            start where those of the user's tangents do.
        """
        self._structure, self._places = flat.structure, places
        # A shared array has one tangent, at whichever path.
        distinct = dict.fromkeys(slot for slots in places.values() for slot in slots)
        types = {slot: tangent_type(flat.leaves[slot]) for slot in distinct}
        self._types = {slot: aval for slot, aval in types.items() if aval is not None}
        self.slots = [*self._types]
        # What `build` puts into all other slots. Not the caller's values: tangents may be built
        # when these are donated or gone.
        self._rest = [without_tangent(x) for x in flat.leaves]

    def build(self, tangents: Sequence[object]) -> Any:
        """Builds new objects in the form of the whole structure, with these tangents."""
        leaves = replace_slots(self._rest, self.slots, tangents)
        return unflatten(self._structure, leaves, share=True).root

    def tangents_in(self, name: str, given: object, *, may_omit: bool = False) -> list[Any]:
        """Returns the tangents in objects that the user gave, as JAX takes them: a list of arrays.

        Args:
          name: what they are, for messages: the transform and the kind, as in ``jvp: tangents``.
          given: the objects, in the form of the values.
          may_omit: whether None may stand for an object or a pytree whose tangents are zeros.

        Returns:
          For each of ``slots`` its tangent; None where it was omitted.

        Raises:
          ValueError: the objects have another structure.
          TypeError: some tangents have another shape or dtype than the values.
        """
        flat = flatten(given)
        given_slots = slots_by_path(flat.structure)
        value_slots = self._places_with_tangents(given) if may_omit else self._places
        what = name.rpartition(" ")[2]  # the last word, as in `tangents[0].kernel`
        lines = []
        for path in dict.fromkeys((*value_slots, *given_slots)):
            if problem := _mismatch(value_slots.get(path), given_slots.get(path)):
                lines.append(f"  {accessor(what, path)}: {problem}")
        head = f"{name}: the structure of {tree_text(given)} is not that of their values:"
        raise_listed(ValueError, head, lines)
        tangents: dict[int, Any] = {}  # by the slot of the value
        lines = []
        for path, slots in value_slots.items():
            for slot, given_slot in zip(slots, given_slots[path], strict=True):
                tangent = flat.leaves[given_slot]
                tangent_aval = self._types.get(slot)
                if tangent_aval is None:  # integers have no tangent
                    continue
                if _fits(tangent, tangent_aval):
                    tangents[slot] = as_array(tangent, tangent_aval)
                else:
                    types = f"{type_text(tangent)}, expected {tangent_aval.str_short()}"
                    lines.append(f"  {accessor(what, path)}: {types}")
        head = f"{name}: these tangents have other types than their values:"
        raise_listed(TypeError, head, lines)
        return [tangents.get(slot) for slot in self._types]

    def _places_with_tangents(self, given: object) -> Mapping[Path, tuple[int, ...]]:
        """Returns the places of values that are in no object or pytree that ``given`` omits."""
        leaves = leaves_by_path(given, lambda x: x is None or _compat.is_graph_object(x))
        omitted = [path for path, leaf in leaves.items() if leaf is None]
        return {
            path: slots
            for path, slots in self._places.items()
            if not any(path[: len(start)] == start for start in omitted)
        }


def _mismatch(expected: tuple[int, ...] | None, given: tuple[int, ...] | None) -> str:
    """Says how the arrays at one path differ in number; ``""`` if they do not.

    Args:
      expected: the slots of the values; None if there is nothing at this path.
      given: the slots of the user's tangents, likewise.
    """
    if expected is None or given is None:
        return "missing" if given is None else "unexpected"
    if len(expected) == len(given):
        return ""
    return f"{len(given)} arrays, expected {len(expected)}"


def _fits(x: object, aval: Any) -> bool:
    """Whether something can be a tangent of this type (of ``jax.typeof``)."""
    if not _compat.is_array_like(x):
        return False
    own_type: Any = jax.typeof(x)
    if not hasattr(aval, "dtype") or not hasattr(own_type, "dtype"):  # hijax types
        return bool(own_type == aval)
    # A Python number, whose type is weak, takes any dtype.
    has_dtype = own_type.dtype == aval.dtype or own_type.weak_type
    return bool(own_type.shape == aval.shape and has_dtype)
