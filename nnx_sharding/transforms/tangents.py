"""The arrays that have tangents, and pytrees of tangents in the form of the user's objects.

JAX differentiates lists of arrays. Users give and get tangents and cotangents in the form of their
arguments and results, the *values*. The tangent of a module is another one of the same structure,
with tangents in place of its arrays (:class:`TangentForm`). Integers have no tangent; JAX writes it
as zeros of dtype `float0`. A *slot* is the position of an array among flattened objects (``Flat``).
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
from ..errors import raise_if_any
from ..specs.paths import Path, accessor
from .in_trace import replace_slots, tree_text, type_text


def is_inexact(x: object) -> bool:
    """Whether something is an array with a derivative: floating-point or complex, and no ref."""
    is_array = _compat.is_array_like(x) and not _compat.is_ref(x)
    dtype = getattr(jax.typeof(x), "dtype", None) if is_array else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def tangent_type(x: object) -> Any:
    """Returns the type of tangents of an array or a hijax value; None for values without tangent.

    Integers and flags have no tangent, and neither has a hijax value whose type has no derivatives.
    """
    if is_inexact(x):
        return jax.typeof(x)
    if not _compat.is_array_like(x):
        return None
    own_type: Any = jax.typeof(x)
    if hasattr(own_type, "dtype"):  # an array of a dtype without derivatives, such as integers
        return None
    try:
        aval = own_type.to_tangent_aval()
    except NotImplementedError:  # a hijax type without derivatives
        return None
    # A hijax type has tangents of a hijax type or arrays. An array is a tangent only if its dtype
    # is floating-point or complex.
    dtype = getattr(aval, "dtype", None)
    return aval if dtype is None or jnp.issubdtype(dtype, jnp.inexact) else None


def as_array(x: object, aval: Any = None) -> Any:
    """Makes a JAX array of a number or an array; a hijax value, which is no array, stays as it is.

    Args:
      x: the number, array or hijax value.
      aval: the type whose dtype the array gets, for a tangent; None for the dtype of ``x``, which
        an array that is differentiated keeps.
    """
    own_type: Any = jax.typeof(x)
    if not hasattr(own_type, "dtype"):
        return x
    return jnp.asarray(x, own_type.dtype if aval is None else aval.dtype)


def without_tangent(x: Any) -> Any:
    """Returns what stands for the tangent of a value without one.

    An array, a number or a flag gets zeros of dtype ``float0``, as in JAX. Any other value, such as
    a ``jax.Ref``, stands for itself.
    """
    if not _compat.is_array_like(x) or _compat.is_ref(x):
        return x
    return np.zeros(np.shape(x), jax.dtypes.float0)


def slots_by_path(structure: Structure, child: Child | None = None) -> dict[Path, tuple[int, ...]]:
    """Returns the slots of the arrays in a structure, by path: ``{(0, "kernel"): (3,)}``.

    With ``child``, only the arrays in this part of the root count, such as one argument, and paths
    start there. The root must have no array outside of objects before ``child``, because the slots
    of such arrays are taken in order.
    """
    child = structure.root if child is None else child
    locations = structure.walk(child, iter(structure.root_slots))
    return {location.path: location.slots for location in locations}


class TangentForm:
    """The form of tangents: some pytrees of objects and arrays, and which arrays have tangents.

    Attributes:
      slots: the slots of the arrays that have tangents.
      _structure: the structure of all the values.
      _value_slots: the slots of each Variable and array that may have a tangent, by its path. A
        Variable that holds a pytree has several slots.
      _types: the type of each tangent, by the slot of its array. It has the arrays of
        ``_value_slots`` except integers.
      _zeros: what `build` puts into all other slots: zeros of ``float0``.
    """

    def __init__(self, flat: Flat, value_slots: Mapping[Path, tuple[int, ...]]):
        """Keeps the structure and the types of some values, without the values.

        Args:
          flat: the values, flattened.
          value_slots: the slots of the Variables and arrays that may have tangents, by path. A path
            has to start where a path in the user's tangents starts (`tangents_in`), because both
            are compared.
        """
        self._structure, self._value_slots = flat.structure, value_slots
        self._types: dict[int, Any] = {}
        for slots in value_slots.values():
            for slot in slots:
                aval = tangent_type(flat.leaves[slot])
                if aval is not None:
                    self._types[slot] = aval
        self.slots = [*self._types]
        # The zeros stand for the caller's arrays, because `build` may be called when these are
        # donated or gone, for example in a pullback.
        self._zeros = [without_tangent(x) for x in flat.leaves]

    def build(self, tangents: Sequence[object]) -> Any:
        """Builds new objects in the form of all the values, with a tangent in each of ``slots``."""
        leaves = replace_slots(self._zeros, self.slots, tangents)
        return unflatten(self._structure, leaves, share=True).root

    def tangents_in(self, name: str, given: object, *, may_omit: bool = False) -> list[Any]:
        """Returns the tangents in objects that the user gave, as JAX takes them: a list of arrays.

        Args:
          name: a name for messages: the transform and what is given, such as ``jvp: tangents``.
          given: the objects, in the form of the values.
          may_omit: whether None may stand for an object or a pytree whose tangents are zeros.

        Returns:
          The tangent for each of ``slots``; None if it was omitted.

        Raises:
          ValueError: the objects have another structure.
          TypeError: some tangents have another shape or dtype than the values.
        """
        flat = flatten(given)
        given_slots = slots_by_path(flat.structure)
        # `value_slots` has the slots of the values that need a tangent, by path.
        value_slots = self._slots_without_omitted(given) if may_omit else self._value_slots
        *_, what = name.split(" ")  # "jvp: tangents" -> "tangents", as in `tangents[0].kernel`
        mismatches = []
        for path in dict.fromkeys((*value_slots, *given_slots)):
            problem = _mismatch(value_slots.get(path), given_slots.get(path))
            if problem:
                mismatches.append(f"  {accessor(what, path)}: {problem}")
        head = f"{name}: the structure of {tree_text(given)} is not that of their values:"
        raise_if_any(ValueError, head, mismatches)
        tangents: dict[int, Any] = {}  # by the slot of the value
        wrong_types = []
        for path, slots in value_slots.items():
            for slot, given_slot in zip(slots, given_slots[path], strict=True):
                tangent = flat.leaves[given_slot]
                expected = self._types.get(slot)
                if expected is None:  # an integer has no tangent, so the given one is ignored
                    continue
                if _fits(tangent, expected):
                    tangents[slot] = as_array(tangent, expected)
                else:
                    types = f"{type_text(tangent)}, expected {expected.str_short()}"
                    wrong_types.append(f"  {accessor(what, path)}: {types}")
        head = f"{name}: these tangents have other types than their values:"
        raise_if_any(TypeError, head, wrong_types)
        return [tangents.get(slot) for slot in self.slots]

    def _slots_without_omitted(self, given: object) -> Mapping[Path, tuple[int, ...]]:
        """Returns ``_value_slots`` without the values for which ``given`` has None.

        For ``(model, x)`` and the tangents ``(None, dx)``, only the slot of ``x`` is left. None may
        also stand for a pytree of modules and arrays, but not for a Variable in a module.
        """
        leaves = leaves_by_path(given, lambda x: x is None or _compat.is_graph_object(x))
        omitted = [path for path, leaf in leaves.items() if leaf is None]
        remaining_slots = {}
        for path, slots in self._value_slots.items():
            is_omitted = any(path[: len(start)] == start for start in omitted)
            if not is_omitted:
                remaining_slots[path] = slots
        return remaining_slots


def _mismatch(expected: tuple[int, ...] | None, given: tuple[int, ...] | None) -> str:
    """Returns a text about how the arrays at one path differ in number; ``""`` if they do not.

    Args:
      expected: the slots of the values; None if there is nothing at this path.
      given: the slots of the user's tangents; None if there is nothing at this path.
    """
    if expected is None or given is None:
        return "missing" if given is None else "unexpected"
    if len(expected) == len(given):
        return ""
    return f"{len(given)} arrays, expected {len(expected)}"


def _fits(x: object, aval: Any) -> bool:
    """Whether something can be a tangent of a type that :func:`tangent_type` returns."""
    if not _compat.is_array_like(x):
        return False
    own_type: Any = jax.typeof(x)
    # A hijax type has no dtype; its class says when two types are equal.
    if not hasattr(aval, "dtype") or not hasattr(own_type, "dtype"):
        return bool(own_type == aval)
    # A Python number has a weak type. It takes the dtype of the tangent, which is floating-point or
    # complex; but a complex number is no tangent of a real one.
    is_real = jnp.issubdtype(aval.dtype, jnp.floating)
    is_promoted = own_type.weak_type and not (is_real and jnp.iscomplexobj(x))
    return bool(own_type.shape == aval.shape and (own_type.dtype == aval.dtype or is_promoted))
