"""What is worked out once per structure, and what each call does with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from . import merge
from .arguments import Call, Layout, Parameters, align_specs
from .pure import Outcome, OutputGroup, Pure, Rules
from .resolve import Specs, Target, argument_targets, reach, resolve, slot_names
from .split import Flat
from .structure import RefEntry, Static, Structure, VariableEntry

Committed: TypeAlias = Literal["refuse", "move", "leave"]


class Transform(Rules, Protocol):
    """What ``jit`` and ``shard_map`` each decide for themselves."""

    @property
    def in_name(self) -> str:
        """The name of its option for the specs of inputs."""

    @property
    def in_specs(self) -> Specs:
        """The specs of inputs as the user wrote them."""

    @property
    def committed(self) -> Committed:
        """What is done with Variables that are committed to another layout than declared."""

    @property
    def tells_layouts(self) -> bool:
        """Whether JAX hears of the layouts of inputs by an option, and not by their types."""

    def sort_call(
        self,
        parameters: Parameters,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layout: Layout,
    ) -> Call:
        """The arguments of a call by their roles, which a transform may refine."""

    def key(self, leaves: Sequence[Any]) -> Hashable:
        """What a plan depends on besides the call's structure, such as the mesh in context."""

    def in_context(self) -> Transform:
        """This transform with the mesh in context filled in, if it needs one."""

    def slot_specs(self, specs: list[Any], leaves: Sequence[Any]) -> list[Any]:
        """The specs of all inputs, those filled in that the user left open."""

    def layout_of(self, spec: Any) -> jax.sharding.Sharding | None:
        """The layout that a Variable with this final spec is brought to and kept in."""

    def compile(
        self,
        pure: Callable[..., Any],
        in_specs: Sequence[Any],
        out_specs: Sequence[Any],
        donated: tuple[int, ...],
    ) -> Program:
        """The JAX form of a pure function whose outputs come in groups of one spec each."""


class Program(NamedTuple):
    """A pure function made ready by JAX.

    Attributes:
      staged: the form with ``trace``, ``lower`` and ``eval_shape``.
      top_level: what a call executes outside of any trace.
      inline: what a call executes inside another trace.
    """

    staged: Any
    top_level: Callable[..., Any]
    inline: Callable[..., Any]


class Plan(NamedTuple):
    """All that a call needs after its arguments were split.

    Attributes:
      fun_name: the name of the function.
      structure: the structure of the arguments that the plan serves.
      layout: the roles of the arguments.
      statics: the static arguments.
      targets: the dynamic arguments, taken apart.
      names: for each slot what the user would write to reach it.
      program: the pure function in JAX's hands.
      layouts: for each slot the layout that is declared for it, or None.
      variables: the slots that belong to Variables.
      declared: the slots whose type says the layout where nothing else does.
      committed: what is done with Variables that are committed to another layout.
    """

    fun_name: str
    structure: Structure
    layout: Layout
    statics: tuple[Static, ...]
    targets: list[Target]
    names: list[str]
    program: Program
    layouts: tuple[jax.sharding.Sharding | None, ...]
    variables: frozenset[int]
    declared: frozenset[int]
    committed: Committed


def make_plan(
    fun: Callable[..., Any],
    transform: Transform,
    parameters: Parameters,
    call: Call,
    flat: Flat,
    graph: bool,
    updates: bool,
    traced: MutableMapping[Hashable, Callable[..., Any]],
) -> Plan:
    """Works out the plan for a structure.

    Args:
      fun: the user's function.
      transform: what to do with it.
      parameters: its parameters.
      call: the arguments by their roles.
      flat: the arguments taken apart.
      graph: whether references are kept.
      updates: whether changes of structure reach the caller.
      traced: pure functions of ``fun`` that were made before, by their keys. Options that do
        not matter to the trace, such as compiler options, then do not cost another one.

    Raises:
      ValueError: the specs do not fit the arguments.
    """
    layout, structure = call.layout, flat.structure
    transform = transform.in_context()
    specs = align_specs(transform.in_specs.tree, parameters, layout, transform.in_name)
    goals = argument_targets(structure, call.tree, specs, [layout.names[i] for i in layout.dynamic])
    resolved = resolve(structure, flat.objects, flat.leaves, goals, transform.spec_of)
    slot_specs = transform.slot_specs(resolved.slots, flat.leaves)
    donated = _donated_slots(structure, layout, goals)
    names = [name or f"array {slot}" for slot, name in enumerate(slot_names(structure, goals))]
    unspecified = transform.spec_of(None)
    object_specs = {
        slot: unspecified if slot_specs[slot] is None else slot_specs[slot]
        for slots in structure.slots
        for slot in slots
    }
    pure = Pure(
        fun=_weak(fun),
        rules=transform,
        layout=layout._replace(donated=frozenset(), donated_keywords=frozenset()),
        statics=call.statics,
        structure=structure,
        targets=tuple(goal.objects_only() for goal in goals),
        known=_known_variables(structure, goals, object_specs),
        object_specs=object_specs,
        donated=donated.intersection(object_specs),
        graph=graph,
        updates=updates,
    )
    function = traced.get(pure.key)
    if function is None:
        function = traced.setdefault(pure.key, pure.function(names))
    program = transform.compile(function, slot_specs, pure.group_specs(), tuple(sorted(donated)))
    variables = structure.slots_of(VariableEntry)
    return Plan(
        fun_name=function.__name__,
        structure=structure,
        layout=layout,
        statics=call.statics,
        targets=goals,
        names=names,
        program=program,
        layouts=tuple(map(transform.layout_of, slot_specs)),
        variables=variables,
        declared=variables if transform.tells_layouts else frozenset(range(len(names))),
        committed=transform.committed,
    )


def _donated_slots(structure: Structure, layout: Layout, goals: Sequence[Target]) -> frozenset[int]:
    donated = {layout.names[i] for i in layout.donated} | layout.donated_keywords
    places = (f.place for f in reach(structure, goals) if f.target.name in donated)
    slots = frozenset(slot for place in places for slot in place.slots)
    return slots - structure.slots_of(RefEntry)


def _known_variables(
    structure: Structure, goals: Sequence[Target], object_specs: Mapping[int, Any]
) -> dict[int, tuple[str, Any]]:
    """For each Variable of the arguments its first name and its spec."""
    known: dict[int, tuple[str, Any]] = {}
    for found in reach(structure, goals):
        index, slots = found.place.entry, found.place.slots
        if index is not None and index not in known:
            known[index] = (found.name, object_specs.get(slots[0]) if slots else None)
    return known


def run(plan: Plan, flat: Flat, execute: Callable[..., Any]) -> Any:
    """One call: gather, place, execute, write back.

    Nothing of the caller's is touched before ``execute`` returned. Nothing here waits for
    the device.

    Args:
      plan: the plan for the structure of ``flat``.
      flat: the arguments of this call, taken apart.
      execute: takes the arrays and returns the outputs: JAX's jitted function, or an
        executable compiled from it.

    Raises:
      TraceContextError: the function changed objects that belong to another trace.
    """
    leaves, placed = _place(plan, flat.leaves)
    *groups, outcome = execute(*leaves)
    return write_back(plan, flat.objects, leaves, groups, outcome, placed)


def _place(plan: Plan, leaves: list[Any]) -> tuple[list[Any], list[int]]:
    """Lays Variables out as declared, those that are not laid out yet.

    Raises:
      ValueError: a Variable is committed to another layout, or has a shape that does not fit.
    """
    slots = [
        slot
        for slot, layout in enumerate(plan.layouts)
        if layout is not None
        and slot in plan.variables
        and not _is_placed(leaves[slot], layout)
        and not (plan.committed == "leave" and _is_committed(leaves[slot]))
    ]
    if not slots or not _compat.trace_is_clean():
        return leaves, []
    _check_placing(plan, leaves, slots)
    placed = jax.device_put([leaves[s] for s in slots], [plan.layouts[s] for s in slots])
    leaves = list(leaves)
    for slot, array in zip(slots, placed, strict=True):
        leaves[slot] = array
    return leaves, slots


def _is_placed(leaf: Any, layout: jax.sharding.Sharding) -> bool:
    if not isinstance(leaf, jax.Array):
        # An abstract array has no data to place; a NumPy array or a number does.
        return isinstance(leaf, jax.ShapeDtypeStruct) or _compat.is_ref(leaf)
    if isinstance(leaf, jax.core.Tracer):
        return True
    own = leaf.sharding
    return (
        own is layout
        or own == layout
        or (leaf.committed and own.is_equivalent_to(layout, leaf.ndim))
    )


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed


def _check_placing(plan: Plan, leaves: Sequence[Any], slots: Sequence[int]) -> None:
    lines = []
    for slot in slots:
        leaf, layout = leaves[slot], plan.layouts[slot]
        assert layout is not None
        shape = jnp.shape(leaf)
        where = f"  {plan.names[slot]}, shape {shape}: "
        spec = getattr(layout, "spec", ())
        if len(spec) > len(shape):
            lines.append(f"{where}{spec} has more entries than the array has dimensions")
            continue
        try:
            layout.shard_shape(shape)
        except ValueError as error:
            lines.append(f"{where}not divisible: {error}")
            continue
        if _is_committed(leaf):
            same_devices = leaf.sharding.device_set == layout.device_set
            if plan.committed == "refuse" or not same_devices:
                lines.append(f"{where}committed to {leaf.sharding}, declared {layout}")
    if lines:
        raise ValueError(
            "cannot lay out these arrays as declared:\n"
            + "\n".join(lines)
            + "\nDeclare what they are, or move them with jax.device_put; a dimension must be a "
            "multiple of the mesh axes that cut it."
        )


def as_declared(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """Arrays to trace with: where their layout is still open, they have the declared one."""
    return [
        abstract(leaf, layout) if layout and slot in plan.declared and _is_open(leaf) else leaf
        for slot, (leaf, layout) in enumerate(zip(leaves, plan.layouts, strict=True))
    ]


def abstract(leaf: Any, layout: jax.sharding.Sharding | None = None) -> Any:
    """The type of an array, with a layout."""
    if layout is None and not isinstance(leaf, _DATA):
        return leaf
    aval = jax.typeof(leaf)
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout, weak_type=weak_type)


_DATA = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def _is_open(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer) or _compat.is_ref(leaf):
        return False
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is None
    return isinstance(leaf, _DATA) and not _is_committed(leaf)


def _weak(fun: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(fun)
    except TypeError:  # some callables of NumPy; nothing is kept for them beyond their callers
        return lambda: fun


def write_back(
    plan: Plan,
    objects: Sequence[Any],
    leaves: Sequence[Any],
    groups: Sequence[OutputGroup],
    outcome: Outcome,
    placed: Sequence[int] = (),
) -> Any:
    """Brings the caller's objects to the state after the call, and returns the output.

    All new objects are made, and all checks done, before the first old one is changed.
    """
    after = outcome.structure
    arrays = outcome.arrays(leaves, groups)
    built = merge.unflatten(after, arrays, dict(enumerate(objects)))
    variables = [*outcome.values, *outcome.metadata]
    stale = [
        index
        for index in (*variables, *(change.node for change in outcome.nodes))
        if not _compat.can_update(objects[index])
    ]
    if stale:
        raise _compat.TraceContextError(
            "the function changed objects that belong to another trace, where they cannot be "
            f"updated: {', '.join(_object_names(plan, stale))}. Pass them into the transformed "
            "function that is being traced, instead of capturing them."
        )
    values = []
    for index in variables:
        entry = after.entries[index]
        assert isinstance(entry, VariableEntry)
        own = (arrays[slot] for slot in after.slots[index])
        values.append(merge.assemble(entry.value, own, built.objects))
    attributes = merge.node_values(outcome.nodes, arrays, built.objects)
    if placed:
        _keep_placed(plan, objects, leaves, placed)
    for index, value in zip(variables, values, strict=True):
        _compat.set_value(objects[index], value)
    for index in outcome.metadata:
        entry = after.entries[index]
        assert isinstance(entry, VariableEntry)
        _compat.set_metadata(objects[index], merge.metadata_of(entry))
    for change, new in zip(outcome.nodes, attributes, strict=True):
        merge.write_node(change, new, after, arrays, built.objects)
    return built.root


def _keep_placed(
    plan: Plan, objects: Sequence[Any], leaves: Sequence[Any], placed: Sequence[int]
) -> None:
    """Lets Variables hold the placed arrays, so that the next call finds nothing to move."""
    moved = set(placed)
    for index, entry in enumerate(plan.structure.entries):
        slots = plan.structure.slots[index]
        if isinstance(entry, VariableEntry) and not moved.isdisjoint(slots):
            own = (leaves[slot] for slot in slots)
            _compat.set_value(objects[index], merge.assemble(entry.value, own, objects))


def _object_names(plan: Plan, indices: Sequence[int]) -> list[str]:
    known = _known_variables(plan.structure, plan.targets, {})
    types = [getattr(entry, "type", object).__name__ for entry in plan.structure.entries]
    return [known[index][0] if index in known else f"a {types[index]}" for index in indices]
