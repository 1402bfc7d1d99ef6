"""Arrays of a call and their declared shardings (``in_shardings``): which are moved there.

JAX itself moves uncommitted arrays to the sharding that a program declares for its inputs, in each
call anew. So a call moves Variables itself, once, and the caller's model keeps the moved arrays.
Committed arrays are where the user put them: they are only moved if the user asked for that, by the
option ``on_committed``: "error" (nothing is moved), "reshard" (on the same devices), "move" (from
any devices), or "leave" (each keeps its sharding).

From other modules:

    Plan           ``shardings`` has the declared one of each array, by slot (None where the user
                   gave none); ``placed_slots`` are those of arrays that a call moves itself
    place_arrays   moves arrays to shardings, in as few transfers as possible
    obstacle       says why an array cannot get a sharding on any path; None if it can
    fit_specs      raises an error for specs that do not fit the shapes of arrays
    is_equivalent  whether two shardings put the same parts on each device, and give arrays the same
                   type; ``Sharding.is_equivalent_to`` of JAX compares the parts only
    Operation      a function and its arguments, which changes an object when it is run
    other_memory   the memory kind of a sharding, such as that of the host; None for main memory.
                   ``memory_of`` is that of an array
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
from ..errors import message, raise_listed, see
from ..specs.fitting import is_equivalent
from ..specs.types import AnyArray, Arrays
from .flatten import Flat
from .memory import memory_of, other_memory
from .place import obstacle, place_arrays
from .plan import Plan
from .problems import DeclaredArray, array_line, committed_elsewhere
from .rebuild import AttributeValue, NodeChange, update_operations
from .spec_checks import fit_specs
from .static_parts import Operation
from .structure import LEAF, VariableEntry
from .transform import OnCommitted, Sharded

# Arrays and what becomes one, and with `_DATA` also abstract ones. Tracers are a `jax.Array`.
_CONCRETE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
_DATA = (*_CONCRETE, jax.ShapeDtypeStruct)


def abstract(leaf: AnyArray, sharding: Sharding | None = None) -> Any:
    """Returns the ``jax.ShapeDtypeStruct`` of an array or of an array's type, with a sharding.

    If ``sharding`` is None, what is neither, such as a ``jax.ShapeDtypeStruct``, is returned
    unchanged.
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
    is_data: bool = isinstance(leaf, _DATA)  # no type guard: what is committed has a sharding
    if not is_data or isinstance(leaf, jax.core.Tracer) or _compat.is_ref(leaf):
        return "keep"
    if getattr(leaf, "sharding", None) == declared:
        return "keep"
    if not is_committed(leaf):
        return "move"
    # Committed: the user, or an earlier call, put it where it is.
    if on_committed == "leave":
        return "keep"
    # A later call may have an array of fewer dimensions, with which JAX cannot compare a longer
    # spec. To move it is refused, with its shape.
    if len(getattr(declared, "spec", ())) > leaf.ndim:
        return "move"
    if is_equivalent(leaf.sharding, declared, leaf.ndim):
        return "keep"
    if on_committed == "reshard":
        return "move" if leaf.sharding.device_set == declared.device_set else "refuse"
    # The second condition: if only the type differs, as on a mesh with other axis types, all data
    # stay where they are.
    if on_committed == "move" or leaf.sharding.is_equivalent_to(declared, leaf.ndim):
        return "move"
    return "refuse"


_get_sharding = operator.attrgetter("sharding")


def place_as_declared(plan: Plan, leaves: Arrays) -> tuple[Sequence[Any], Sequence[int]]:
    """Moves Variables that are not where ``in_shardings`` say; returns all arrays of the call.

    ``leaves`` are the arrays of the call, by slot.

    Returns:
      The arrays by slot, and the slots of those that were moved.

    Raises:
      ValueError: arrays cannot be moved there, or are committed elsewhere.
    """
    try:
        # Lists compare by identity first, so this is all the work from the second call on.
        if list(map(_get_sharding, plan.pick_placed(leaves))) == plan.placed_shardings:
            return leaves, ()
    except AttributeError:  # a NumPy array or a number, which has no sharding yet, or a ref
        pass
    transform = plan.transform
    assert isinstance(transform, Sharded)
    elsewhere: dict[int, DeclaredArray] = {}  # arrays that are not where declared, by slot
    refused: list[DeclaredArray] = []  # those among them that must not be moved
    for slot, sharding in zip(plan.placed_slots, plan.placed_shardings, strict=True):
        if isinstance(leaves[slot], jax.ShapeDtypeStruct):
            continue
        decision = decide(leaves[slot], sharding, transform.on_committed)
        if decision != "keep":
            elsewhere[slot] = DeclaredArray(plan.names[slot], leaves[slot], sharding)
        if decision == "refuse":
            refused.append(elsewhere[slot])
    # In a trace nothing can be moved before the program runs, of which these are constants.
    if not elsewhere or not _compat.trace_is_clean():
        return leaves, ()
    # First what no option can change; then what the user has not allowed.
    _check_obstacles(plan, elsewhere)
    if error := committed_elsewhere(transform.name, refused):
        raise error
    arrays = [x.array for x in elsewhere.values()]
    placed = place_arrays(arrays, [x.declared for x in elsewhere.values()])
    leaves = list(leaves)
    for slot, array in zip(elsewhere, placed, strict=True):
        leaves[slot] = array
    return leaves, [*elsewhere]


def _check_obstacles(plan: Plan, arrays: Mapping[int, DeclaredArray]) -> None:
    """Raises a ``ValueError`` for arrays that cannot get their declared shardings.

    ``arrays`` are by slot: those that a call wants to move.
    """
    # A later call may have other shapes than the one for which the plan was made. Called for its
    # error: where specs are to be corrected, the plan has the corrected ones.
    names = [x.name for x in arrays.values()]
    shapes = [jnp.shape(x.array) for x in arrays.values()]
    specs = [plan.specs[slot] for slot in arrays]
    fit_specs(plan.transform, names, shapes, specs, on_indivisible={})
    lines = []
    for x in arrays.values():
        if reason := obstacle(x.array, x.declared):  # such as devices of another process
            lines.append(f"  {x.name}: {reason}")
    head = f"{plan.transform.name}: these arrays cannot be placed as declared:"
    raise_listed(ValueError, head, lines)


def as_declared(plan: Plan, leaves: Arrays) -> list[Any]:
    """Returns the arrays that a trace without a call, as by ``lower``, is made with.

    Nothing is moved for such a trace. Instead, an array that a call would move is replaced by an
    abstract one with the declared sharding. The user may also pass abstract arrays: these get the
    declared sharding here unless JAX gives it to them.
    """
    transform = plan.transform
    result = list(leaves)
    if not isinstance(transform, Sharded):
        return result
    placed = frozenset(plan.placed_slots)
    for slot, (leaf, sharding) in enumerate(zip(leaves, plan.shardings, strict=True)):
        if sharding is None:
            continue
        is_replaced = slot in placed
        if isinstance(leaf, jax.ShapeDtypeStruct):
            # JAX gives abstract arrays the shardings that it gets as an option, if they have none.
            # `nnx.eval_shape` makes some that have one, while a mesh is in context.
            is_left_to_jax = transform.passes_shardings and not leaf.sharding
            is_replaced |= not is_left_to_jax
        if is_replaced and decide(leaf, sharding, transform.on_committed) == "move":
            result[slot] = abstract(leaf, sharding)
    return result


def note_host_arrays(plan: Plan, leaves: Arrays, error: Exception) -> None:
    """Names the arguments in host memory in a note to an error about kinds of memory.

    Nothing is added if there are none. What users keep there is mostly the state of an optimizer,
    so the note says how to update with that. ``leaves`` are the arrays of the call, by slot.
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

    So they are moved only once.

    Args:
      plan: has the structure of the arguments, and ``attributes``, the JAX arrays that modules hold
        themselves: by slot, the index of the module and the name.
      flat: the arguments before the move.
      leaves: their arrays after it, by slot.
      placed: the slots of those that were moved.
    """
    moved = set(placed)
    structure = plan.structure
    variables = [
        index
        for index, slots in enumerate(structure.slots)
        if isinstance(structure.entries[index], VariableEntry) and not moved.isdisjoint(slots)
    ]
    changes: list[NodeChange] = []  # of modules that hold such an array themselves
    for slot in moved.intersection(plan.attributes):
        module, name = plan.attributes[slot]  # its index, and the name of the attribute
        old = flat.leaves[slot]
        # A NumPy array stays one, as the user made it. What was assigned meanwhile stays, too.
        if isinstance(old, jax.Array) and vars(flat.objects[module]).get(str(name)) is old:
            new = AttributeValue(LEAF, (slot,))  # the array in this slot
            changes.append(NodeChange(module, changed=((name, new),), removed=()))
    return update_operations(structure, leaves, flat.objects, variables, nodes=changes)
