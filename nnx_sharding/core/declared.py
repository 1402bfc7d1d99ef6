"""Moves the arrays of a call to their declared shardings (``in_shardings``), if they may be moved.

JAX itself moves uncommitted arrays to the sharding that a program declares for its inputs, in each
call anew. So a call moves Variables itself, once, and the caller's model keeps the moved arrays.
Committed arrays are where the user put them. They are only moved if the user asks for that by the
option ``on_committed``: "error" (nothing is moved), "reshard" (on the same devices), "move" (from
any devices), or "leave" (each keeps its sharding).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Sharding

from .. import _compat
from ..errors import message, raise_if_any, see
from ..specs.fitting import is_equivalent
from ..specs.types import AnyArray, Arrays
from .flatten import Flat
from .in_c import Operation
from .memory import memory_of, other_memory
from .place import obstacle, place_arrays
from .plan import Plan
from .problems import DeclaredArray, array_line, committed_elsewhere
from .rebuild import AttributeValue, NodeChange, update_operations
from .spec_checks import fit_specs
from .structure import LEAF, VariableEntry
from .transform import OnCommitted, Sharded

# Types of arrays, and of numbers that become arrays. A tracer is a `jax.Array`.
_CONCRETE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
_DATA = (*_CONCRETE, jax.ShapeDtypeStruct)


def abstract(leaf: AnyArray, sharding: Sharding | None = None) -> Any:
    """Returns the ``jax.ShapeDtypeStruct`` of an array or of an array's type, with a sharding.

    A leaf that is neither, such as a ``jax.ShapeDtypeStruct``, is returned unchanged if
    ``sharding`` is None.
    """
    is_type = isinstance(leaf, jax.core.ShapedArray)  # what `jax.typeof` returns
    is_array = isinstance(leaf, _CONCRETE)
    if sharding is None and not is_type and not is_array:
        return leaf
    aval = leaf if is_type else jax.typeof(leaf)
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak_type)


def is_committed(leaf: AnyArray) -> bool:
    """Whether ``leaf`` is an array that must stay on its devices, perhaps an abstract one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        is_abstract = isinstance(getattr(leaf.sharding, "mesh", None), AbstractMesh)
        return leaf.sharding is not None and not is_abstract
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed


def decide(
    leaf: AnyArray, declared: Sharding, on_committed: OnCommitted
) -> Literal["keep", "move", "refuse"]:
    """Returns what a call does with an array for which ``in_shardings`` declare a sharding.

    Args:
      leaf: the array. References and traced arrays cannot be moved, and are kept.
      declared: its declared sharding.
      on_committed: the user's choice for arrays that are committed to another sharding.
    """
    # The annotation keeps mypy from narrowing the type of ``leaf``.
    is_data: bool = isinstance(leaf, _DATA)
    if not is_data or isinstance(leaf, jax.core.Tracer) or _compat.is_ref(leaf):
        return "keep"
    if getattr(leaf, "sharding", None) == declared:
        return "keep"
    if not is_committed(leaf):
        return "move"
    # The array is committed: the user, or an earlier call, has put it where it is.
    if on_committed == "leave":
        return "keep"
    # A later call may have an array with fewer dimensions than the spec. JAX cannot compare these,
    # so the decision is to move it, and the move then raises an error that shows the shape.
    if len(getattr(declared, "spec", ())) > leaf.ndim:
        return "move"
    if is_equivalent(leaf.sharding, declared, leaf.ndim):
        return "keep"
    if on_committed == "reshard":
        return "move" if leaf.sharding.device_set == declared.device_set else "refuse"
    # If only the type differs, as on a mesh with other axis types, the data stay where they are, so
    # the array may be moved even without the user's permission.
    if on_committed == "move" or leaf.sharding.is_equivalent_to(declared, leaf.ndim):
        return "move"
    return "refuse"


_get_sharding = operator.attrgetter("sharding")


def place_as_declared(plan: Plan, leaves: Arrays) -> tuple[Sequence[Any], Sequence[int]]:
    """Moves arrays of ``plan.placed_slots`` that do not have their declared shardings.

    ``leaves`` are the arrays of the call, by slot. Nothing is moved within a trace.

    Returns:
      All arrays by slot, and the slots of the moved arrays.

    Raises:
      ValueError: arrays cannot get their declared shardings, or are committed elsewhere.
    """
    try:
        # Lists compare their items by identity first, so this is fast. From the second call on, all
        # arrays are where they should be.
        if list(map(_get_sharding, plan.pick_placed(leaves))) == plan.placed_shardings:
            return leaves, ()
    except AttributeError:  # a NumPy array, a number or a ref has no sharding
        pass
    transform = plan.transform
    assert isinstance(transform, Sharded)
    elsewhere: dict[int, DeclaredArray] = {}  # arrays that are not where declared, by slot
    refused: list[DeclaredArray] = []  # arrays that must not be moved
    for slot, sharding in zip(plan.placed_slots, plan.placed_shardings, strict=True):
        if isinstance(leaves[slot], jax.ShapeDtypeStruct):
            continue
        decision = decide(leaves[slot], sharding, transform.on_committed)
        if decision != "keep":
            elsewhere[slot] = DeclaredArray(plan.names[slot], leaves[slot], sharding)
        if decision == "refuse":
            refused.append(elsewhere[slot])
    # Within a trace nothing is moved, because concrete arrays are constants of the program that is
    # being traced.
    if not elsewhere or not _compat.trace_is_clean():
        return leaves, ()
    # Arrays that no option allows to move raise first, then arrays that the user's option refuses.
    _check_obstacles(plan, elsewhere)
    if error := committed_elsewhere(transform.name, refused):  # None if ``refused`` is empty
        raise error
    arrays = [x.array for x in elsewhere.values()]
    placed = place_arrays(arrays, [x.declared for x in elsewhere.values()])
    leaves = list(leaves)
    for slot, array in zip(elsewhere, placed, strict=True):
        leaves[slot] = array
    return leaves, [*elsewhere]


def _check_obstacles(plan: Plan, arrays: Mapping[int, DeclaredArray]) -> None:
    """Raises a ``ValueError`` for arrays that cannot get their declared shardings.

    ``arrays`` has the arrays that a call wants to move, by slot.
    """
    # `fit_specs` is called for its error, because a later call may have other shapes than the call
    # for which the plan was made. Its result is not needed: the plan has the corrected specs.
    names = [x.name for x in arrays.values()]
    shapes = [jnp.shape(x.array) for x in arrays.values()]
    specs = [plan.specs[slot] for slot in arrays]
    fit_specs(plan.transform, names, shapes, specs, on_indivisible={})
    lines = []
    for x in arrays.values():
        reason = obstacle(x.array, x.declared)
        if reason is not None:
            lines.append(f"  {x.name}: {reason}")
    head = f"{plan.transform.name}: these arrays cannot be placed as declared:"
    raise_if_any(ValueError, head, lines)


def as_declared(plan: Plan, leaves: Arrays) -> list[Any]:
    """Returns the arrays for a trace without a call, such as that of ``lower``, by slot.

    Nothing is moved for such a trace. Instead, an abstract array with the declared sharding takes
    the place of an array that a call would move. The user may also pass abstract arrays. These get
    the declared sharding here unless JAX gives it to them, as it does if they have no sharding and
    JAX gets the declared ones as an option.
    """
    transform = plan.transform
    result = list(leaves)
    if not isinstance(transform, Sharded):
        return result
    placed = frozenset(plan.placed_slots)
    for slot, (leaf, sharding) in enumerate(zip(leaves, plan.shardings, strict=True)):
        if sharding is None:
            continue
        # JAX gives an abstract array without a sharding the one that it gets as an option.
        # `nnx.eval_shape` makes abstract arrays with shardings while a mesh is in context.
        is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        is_left_to_jax = is_abstract and transform.passes_shardings and not leaf.sharding
        may_be_replaced = slot in placed or (is_abstract and not is_left_to_jax)
        if may_be_replaced and decide(leaf, sharding, transform.on_committed) == "move":
            result[slot] = abstract(leaf, sharding)
    return result


def note_host_arrays(plan: Plan, leaves: Arrays, error: Exception) -> None:
    """Names the arguments in host memory in a note to an error about kinds of memory, if any.

    Users mostly keep the state of an optimizer in host memory, so the note says how to update with
    that. ``leaves`` are the arrays of the call, by slot.
    """
    lines = []
    for name, leaf, declared in zip(plan.names, leaves, plan.shardings, strict=True):
        if other_memory(declared) or memory_of(leaf):
            lines.append(array_line(name, leaf))
    if lines:
        head = "These arguments are in host memory, where nothing is computed:"
        remedy = (
            "Move them to the device where the function uses them, and back: with "
            "nnx_sharding.training.fetched(optimizer): optimizer.update(model, gradients)"
        )
        error.add_note(message(head, lines, remedy))
        see(error, anchor="arguments-in-host-memory")


def placing_operations(
    plan: Plan, flat: Flat, leaves: Arrays, placed: Sequence[int]
) -> list[Operation]:
    """Returns the operations by which the caller's objects get the arrays that a call moved.

    Because of these, later calls do not move the arrays again.

    Args:
      plan: has the structure of the arguments, and ``attributes``, the JAX arrays that modules hold
        themselves: by slot, the index of the module and the name.
      flat: the arguments before the move.
      leaves: the arrays after the move, by slot.
      placed: the slots of the arrays that were moved.
    """
    moved = set(placed)
    structure = plan.structure
    variables = [
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry) and not moved.isdisjoint(slots)
    ]
    changes: list[NodeChange] = []  # for modules that hold a moved array themselves
    for slot in moved.intersection(plan.attributes):
        module, name = plan.attributes[slot]  # the index of the module, the name of the attribute
        old_array = flat.leaves[slot]
        if not isinstance(old_array, jax.Array):  # a NumPy array stays one, as the user made it
            continue
        if vars(flat.objects[module]).get(str(name)) is old_array:  # no other value was assigned
            new_value = AttributeValue(LEAF, (slot,))
            changes.append(NodeChange(module, changed=((name, new_value),), removed=()))
    return update_operations(structure, leaves, flat.objects, variables, nodes=changes)
