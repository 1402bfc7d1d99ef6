"""The arrays of a tree: their names in a checkpoint, which of them are wanted, new values.

An array has a path (``blocks/0/kernel``), for users, and a name, the keys that Orbax stores: those
of the flattened ``nnx.state``, where each Variable is a level of its own with the key ``value``.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.experimental.layout import Format
from jax.sharding import Sharding

from .. import _compat
from ..analysis.parameters import keys_inside
from ..core.constrain import sharding_of
from ..core.flatten import Flat
from ..core.memory import is_keys
from ..core.problems import out_of_range
from ..core.rebuild import rebuild
from ..core.structure import VariableEntry
from ..errors import raise_listed, shortened
from ..specs.filters import to_predicate
from ..specs.fitting import suggestion
from ..specs.paths import Path, path_string

Name: TypeAlias = tuple[str, ...]

# The key of a Variable's value when JAX or Orbax flattens an ``nnx.State``.
VALUE = "value"

# The heading of arrays whose dtypes differ in the errors of all readers.
OF_ANOTHER_DTYPE = "Of another dtype (cast=True converts among floats and among integers)"
_MOST = 40  # names that are compared with each other for suggestions


class NamedArray(NamedTuple):
    """One array of a tree."""

    slot: int  # its index in the flat list
    leaf: Any
    name: Name  # its keys in a checkpoint of the `nnx.state` of the tree
    plain_name: Name  # without the key of the Variable's value, as in `nnx.to_pure_dict`
    path: str  # for messages
    variable_path: Path  # of its Variable, as NNX filters see it
    variable: Any  # or the array itself outside of any


def named_arrays(flat: Flat) -> list[NamedArray]:
    """Lists the arrays of a tree, each by its first path.

    The kernel of ``{"up": nnx.Linear(…)}`` has the path ``up/kernel``, the name
    ``("up", "kernel", "value")`` and the plain name ``("up", "kernel")``.
    """
    structure, arrays = flat.structure, []
    # A location is a Variable, or an array outside of any, with the slots of its arrays.
    for location in structure.walk(structure.root, slots=iter(structure.root_slots)):
        index = location.object_index  # None for a bare array
        entry = None if index is None else structure.entries[index]
        has_value_key = isinstance(entry, VariableEntry)
        if not location.path:  # the tree is one array, which needs some key, too
            has_value_key = True
        value_key = (VALUE,) if has_value_key else ()
        # A Variable may hold a pytree: the paths of its arrays in that. Otherwise it is one, ().
        paths = keys_inside(flat, index, len(location.slots))
        for slot, inside in zip(location.slots, paths, strict=True):
            leaf = flat.leaves[slot]
            array = NamedArray(
                slot=slot,
                leaf=leaf,
                name=tuple(map(str, (*location.path, *value_key, *inside))),
                plain_name=tuple(map(str, (*location.path, *inside))),
                path=path_string((*location.path, *inside)) or "the root",
                variable_path=location.path,
                variable=leaf if index is None else flat.objects[index],
            )
            arrays.append(array)
    return arrays


def digest(arrays: Iterable[NamedArray]) -> str:
    """Returns a short text that is the same for arrays of the same names, shapes and dtypes."""
    kinds = [(x.name, np.shape(x.leaf), str(getattr(x.leaf, "dtype", ""))) for x in arrays]
    return f"{len(kinds)} {digest_of(kinds)}"


def digest_of(facts: object) -> str:
    """Returns a short text that is the same for facts of the same ``repr``."""
    # Eight digits are enough: it finds mistakes, not attacks.
    return f"of digest {hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def check_unique(caller: str, arrays: Sequence[NamedArray]) -> None:
    """Raises a ValueError that lists arrays which are one to Orbax, as it joins keys by dots."""
    counts = Counter(".".join(array.name) for array in arrays)
    same = [f"  {array.path}" for array in arrays if counts[".".join(array.name)] > 1]
    head = f"{caller}: these paths are the same once their keys are joined by dots:"
    raise_listed(ValueError, head, same, "Rename a key.")


def selected(
    caller: str,
    arrays: Sequence[NamedArray],
    only: Any,
    is_supported: Callable[[Any], bool],
    what: str = "arrays or numbers",
    remedy: str = "",
) -> list[NamedArray]:
    """Returns the arrays that a filter selects.

    Args:
      caller: the function that the user called, for messages.
      arrays: those of a model.
      only: an NNX filter; None for all.
      is_supported: whether the caller can store an array.
      what: what it can store, for messages.
      remedy: what to do with others, for messages.

    Raises:
      TypeError: some of those that are selected are not supported.
      ValueError: there are arrays, but none is selected.
    """
    is_wanted = to_predicate(... if only is None else only)  # of path and Variable
    found = [array for array in arrays if is_wanted(array.variable_path, array.variable)]
    if arrays and not found:
        paths = ", ".join(shortened(array.path for array in arrays))
        raise ValueError(f"{caller}: only={only!r} matches none of the arrays: {paths}.")
    wrong = [f"  {x.path}: {kind_of(x.leaf)}" for x in found if not is_supported(x.leaf)]
    raise_listed(TypeError, f"{caller}: these are not {what}:", wrong, remedy)
    return found


def filled(
    flat: Flat,
    values: Iterable[tuple[NamedArray, Any]],
    caller: str,
    finish: Callable[[], object] = lambda: None,
) -> Any:
    """Returns the tree with new arrays, which modules and Variables in it get in place.

    Args:
      flat: the tree.
      values: arrays of it, each with what takes its place.
      caller: the function that the user called, for messages.
      finish: is called before anything changes, while devices may still compute the values.
    """
    leaves, references = list(flat.leaves), []
    for array, value in values:
        if is_reference(array.leaf):  # a `jax.Ref` stays where it is, and gets another value
            references.append((array.leaf, value))
        else:
            leaves[array.slot] = value
    # All values have the shapes and dtypes of the tree, so nothing below should fail. `rebuild`
    # checks first what it can, and then writes.
    tree = rebuild(flat, leaves, caller, finish=finish)
    for reference, value in references:
        reference[...] = value
    return tree


def present_sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding of an array; None if it has none or is uncommitted."""
    # JAX moves an uncommitted array where it is needed, so its device says nothing.
    if isinstance(leaf, jax.Array) and not is_reference(leaf) and not leaf.committed:
        return None
    present: Sharding | Format | None = sharding_of(leaf)
    return present.sharding if isinstance(present, Format) else present


def is_reference(x: object) -> bool:
    """Whether ``x`` refers to an array instead of being one."""
    return _compat.is_ref(x) or _compat.is_hijax_variable(x)


def is_global(x: object) -> bool:
    """Whether ``x`` is an array of which this process does not have all shards."""
    return isinstance(x, jax.Array) and not is_reference(x) and not x.is_fully_addressable


def is_storable(x: object) -> bool:
    """Whether ``x`` is an array or a number that Orbax can store; it may be abstract."""
    if isinstance(x, int):  # also a bool; Orbax stores numbers as those of 64 bits
        return -(2**63) <= x < 2**63
    kinds = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | float | complex
    is_array_or_number = isinstance(x, kinds) and not isinstance(x, jax.core.Tracer)
    # A reference is stored as its value, which is an array.
    if not is_array_or_number and not is_reference(x):
        return False
    return not hasattr(x, "dtype") or is_keys(x) or _has_tensorstore(x.dtype)


@functools.cache
def _has_tensorstore(dtype: np.dtype[Any]) -> bool:
    """Whether TensorStore, which stores the arrays for Orbax, has this dtype."""
    try:
        return dtype.kind not in "OSUMmT" and bool(tensorstore.dtype(dtype))
    except ValueError:  # such as uint4
        return False


def kind_of(x: object) -> str:
    """Returns the name of the type of ``x`` for messages."""
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return f"{type(x).__name__.removesuffix('Impl')} of {x.dtype}"
    return "int of more than 64 bits" if isinstance(x, int) else type(x).__name__


def suggestions(count: int) -> Callable[[str, Iterable[str]], str]:
    """Returns ``suggestion``, or for so many names that comparing all takes too long, no hints."""
    return suggestion if count < _MOST else lambda name, names: ""


def is_castable(source: np.dtype[Any] | str, target: np.dtype[Any] | str, cast: bool) -> bool:
    """Whether dtypes are equal or, with ``cast``, of one kind: floats, integers or complex.

    A dtype that NumPy does not have is a string.
    """
    if isinstance(source, str):
        return False
    if isinstance(target, np.dtype):  # files have one order of bytes, and NumPy arrays any
        source, target = native(source), native(target)
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating) if cast else ()
    same = (jnp.issubdtype(source, kind) and jnp.issubdtype(target, kind) for kind in kinds)
    return bool(source == target) or any(same)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns a dtype in the order of bytes of this machine, as files and JAX have it."""
    # Also of PRNG keys, whose dtypes are not of NumPy.
    return dtype if getattr(dtype, "isnative", True) else dtype.newbyteorder("=")


def may_wrap(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether some integer of the source dtype is out of the range of the target dtype."""
    if not jnp.issubdtype(source, jnp.integer):
        return False
    info: Any = jnp.iinfo(source)  # type: ignore[no-untyped-call]
    return bool(out_of_range(np.array([info.min, info.max], source), target))
