"""The arrays of a tree: their names in a checkpoint, the choice of some of them, new values.

An array has a path (``blocks/0/kernel``), for users, and a name, which are the keys that Orbax
stores. These are the keys of the flattened ``nnx.state``, in which each Variable is a level of its
own with the key ``value``.
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
from ..core.structure import Container, Location, VariableEntry, locations_in, parts_of
from ..errors import raise_if_any, shortened
from ..specs.filters import to_predicate
from ..specs.fitting import suggestion
from ..specs.paths import Path, path_string

Name: TypeAlias = tuple[str, ...]

# The key of a Variable's value when JAX or Orbax flattens an ``nnx.State``.
VALUE = "value"

# The heading, in the errors of all readers, for arrays whose dtypes differ.
OF_ANOTHER_DTYPE = "Of another dtype (cast=True converts among floats and among integers)"
_MOST = 40  # the largest number of names that are compared with each other for suggestions


class NamedArray(NamedTuple):
    """One array of a tree."""

    slot: int  # the index in the flat list of arrays
    leaf: Any  # the array, a number, or a reference to an array
    name: Name  # the keys in a checkpoint of the `nnx.state` of the tree
    plain_name: Name  # the keys in `nnx.to_pure_dict`, without the key of the Variable's value
    path: str  # the path for messages
    variable_path: Path  # the path of the Variable, as NNX filters see it
    variable: Any  # the Variable, or the array itself outside of any


def named_arrays(flat: Flat) -> list[NamedArray]:
    """Lists the arrays of a tree, each by its first path.

    The kernel of ``{"up": nnx.Linear(…)}`` has the path ``up/kernel``, the name
    ``("up", "kernel", "value")`` and the plain name ``("up", "kernel")``.
    """
    return _named(flat, locations_in(flat.structure))


def arrays_of_parts(flat: Flat) -> list[NamedArray]:
    """Lists the arrays of each part of a tree: one of two parts twice, with the name in each.

    The parts of ``{"params": model, "rest": [model.norm]}`` are ``params`` and ``rest/0``. In a
    module, which is one part, each array has its first path. The list is empty if the tree is a
    module, or if nothing in it is shared.
    """
    structure = flat.structure
    if not structure.shares or not isinstance(structure.root, Container):
        return []
    slots = iter(structure.root_slots)
    return _named(
        flat,
        (
            location._replace(path=path + location.path)
            for path, part in parts_of(structure.root).items()
            for location in structure.walk(part, slots)
        ),
    )


def _named(flat: Flat, locations: Iterable[Location]) -> list[NamedArray]:
    """Returns the arrays of a tree at these locations, in their order."""
    arrays = []
    # A location is a Variable, or an array outside of any, with the slots of its arrays.
    for location in locations:
        index = location.object_index  # None for a bare array
        entry = None if index is None else flat.structure.entries[index]
        has_value_key = isinstance(entry, VariableEntry)
        # If the tree is a single array, it has an empty path, but its name needs a key.
        if not location.path:
            has_value_key = True
        value_key = (VALUE,) if has_value_key else ()
        # The paths of arrays in the pytree that a Variable may hold; [()] for a single array.
        inner_paths = keys_inside(flat, index, len(location.slots))
        for slot, inner_path in zip(location.slots, inner_paths, strict=True):
            leaf = flat.leaves[slot]
            array = NamedArray(
                slot=slot,
                leaf=leaf,
                name=tuple(map(str, (*location.path, *value_key, *inner_path))),
                plain_name=tuple(map(str, (*location.path, *inner_path))),
                path=path_string((*location.path, *inner_path)) or "the root",
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
    """Returns a short text that is the same for facts with the same ``repr``."""
    # Eight digits are enough, because the text is for finding mistakes, not attacks.
    return f"of digest {hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def check_unique(caller: str, arrays: Sequence[NamedArray]) -> None:
    """Raises a ValueError that lists arrays with equal keys once Orbax joins these by dots."""
    counts = Counter(".".join(array.name) for array in arrays)
    clashing = [f"  {array.path}" for array in arrays if counts[".".join(array.name)] > 1]
    head = f"{caller}: these paths are the same once their keys are joined by dots:"
    raise_if_any(ValueError, head, clashing, "Rename a key.")


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
      arrays: the arrays of a model.
      only: an NNX filter; None for all.
      is_supported: says whether the caller can store an array.
      what: the kinds of arrays that the caller can store, for messages.
      remedy: what to do with other arrays, for messages.

    Raises:
      TypeError: selected arrays are not supported; all are listed.
      ValueError: there are arrays, but none is selected.
    """
    is_wanted = to_predicate(... if only is None else only)  # a function of path and Variable
    wanted = [array for array in arrays if is_wanted(array.variable_path, array.variable)]
    if arrays and not wanted:
        paths = ", ".join(shortened(array.path for array in arrays))
        raise ValueError(f"{caller}: only={only!r} matches none of the arrays: {paths}.")
    wrong = [f"  {x.path}: {kind_of(x.leaf)}" for x in wanted if not is_supported(x.leaf)]
    raise_if_any(TypeError, f"{caller}: these are not {what}:", wrong, remedy)
    return wanted


def filled(
    flat: Flat,
    values: Iterable[tuple[NamedArray, Any]],
    caller: str,
    finish: Callable[[], object] = lambda: None,
) -> Any:
    """Returns the tree with new arrays, which modules and Variables in it get in place.

    Args:
      flat: the tree, flattened.
      values: arrays of the tree, each with its new value.
      caller: the function that the user called, for messages.
      finish: a function that is called before anything changes. This function waits for devices,
        which may still compute the values, and may raise an error.
    """
    leaves, references = list(flat.leaves), []
    for array, value in values:
        if is_reference(array.leaf):  # a `jax.Ref` is kept, and gets another value below
            references.append((array.leaf, value))
        else:
            leaves[array.slot] = value
    # All values have the shapes and dtypes of the tree, so nothing below should fail. References
    # are written last, because `rebuild` checks what it can before it writes.
    tree = rebuild(flat, leaves, caller, finish=finish)
    for reference, value in references:
        reference[...] = value
    return tree


def present_sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding of an array; None if it has none or is uncommitted."""
    # JAX moves an uncommitted array where it is needed, so its device is not a choice of the user.
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
    """Whether ``x`` is an array, which may be abstract, or a number that Orbax can store."""
    if isinstance(x, int):  # an int or a bool: Orbax stores numbers in 64 bits
        return -(2**63) <= x < 2**63
    kinds = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | float | complex
    is_array_or_number = isinstance(x, kinds) and not isinstance(x, jax.core.Tracer)
    # A reference is accepted because its value, an array, is stored.
    if not is_array_or_number and not is_reference(x):
        return False
    return not hasattr(x, "dtype") or is_keys(x) or _has_tensorstore(x.dtype)


@functools.cache
def _has_tensorstore(dtype: np.dtype[Any]) -> bool:
    """Whether TensorStore, which stores the arrays for Orbax, has this dtype."""
    try:
        return dtype.kind not in "OSUMmT" and bool(tensorstore.dtype(dtype))
    except ValueError:  # TensorStore has no such dtype, for example uint4
        return False


def kind_of(x: object) -> str:
    """Returns the name of the type of ``x`` for messages."""
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return f"{type(x).__name__.removesuffix('Impl')} of {x.dtype}"
    return "int of more than 64 bits" if isinstance(x, int) else type(x).__name__


def suggestions(count: int) -> Callable[[str, Iterable[str]], str]:
    """Returns the function ``suggestion``, or one that returns "" if there are many names.

    Comparing many names with each other would take too long.
    """
    return suggestion if count < _MOST else lambda name, names: ""


def is_castable(source: np.dtype[Any] | str, target: np.dtype[Any] | str, cast: bool) -> bool:
    """Whether dtypes are equal or, with ``cast``, of one kind: floats, integers or complex.

    A dtype that NumPy does not have is a string.
    """
    if isinstance(source, str):
        return False
    # The order of bytes does not count: files have one order, and NumPy arrays may have any.
    if isinstance(target, np.dtype):
        source, target = native(source), native(target)
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating) if cast else ()
    are_both = (jnp.issubdtype(source, kind) and jnp.issubdtype(target, kind) for kind in kinds)
    return bool(source == target) or any(are_both)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns a dtype in the order of bytes of this machine, as files and JAX have it."""
    # The dtypes of PRNG keys are not NumPy's and have no `isnative`. These dtypes are returned
    # unchanged.
    return dtype if getattr(dtype, "isnative", True) else dtype.newbyteorder("=")


def may_wrap(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether some integer of the source dtype is out of the range of the target dtype."""
    if not jnp.issubdtype(source, jnp.integer):
        return False
    info: Any = jnp.iinfo(source)  # type: ignore[no-untyped-call]
    return bool(out_of_range(np.array([info.min, info.max], source), target))
