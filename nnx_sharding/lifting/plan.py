"""What is worked out once per structure: the pure function, its JAX object, the write-back.

A plan turns ``fun``, which takes and changes NNX objects, into a function of flat arrays
that JAX can transform. Outputs are as few as possible: an array that ``fun`` left alone is
not an output, the caller's object simply keeps it. How the outputs belong together is known
only after tracing and may depend on shapes, so it travels as the static part of the output
(:class:`Outcome`), of which JAX keeps one for each trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .. import _compat
from . import merge
from .arguments import Call, Layout, Parameters, align_specs, join_call
from .resolve import Specs, Target, argument_targets, reachable_slots, resolve, slot_names, target
from .split import Flat, flatten
from .structure import NodeEntry, RefEntry, Static, Structure, VariableEntry, accessor


class Transform(Protocol):
    """What ``jit`` and ``shard_map`` each decide for themselves."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def in_name(self) -> str:
        """The name of its option for the specs of inputs."""

    @property
    def in_specs(self) -> Specs:
        """The specs of inputs as the user wrote them."""

    @property
    def out_specs(self) -> Specs:
        """The specs of outputs as the user wrote them."""

    @property
    def moves_committed(self) -> bool:
        """Whether Variables that are committed to another layout are moved as well."""

    def sort_call(
        self, parameters: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """The arguments of a call by their roles."""

    def key(self, leaves: Sequence[Any]) -> Hashable:
        """What a plan depends on besides the call's structure, such as the mesh in context."""

    def in_context(self) -> Transform:
        """This transform with the mesh in context filled in, if it needs one."""

    def spec_of(self, spec: Any) -> Any:
        """The final, hashable form of a spec that the user wrote."""

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


@jax.tree_util.register_static
class Outcome:
    """The static part of what a call did: what came out, and what changed.

    Attributes:
      structure: the graph after the call. The objects that went in have the first indices;
        its root is the output of the function.
      sources: for each array of ``structure`` where it is found: ``(group, position)`` among
        the outputs, or ``(-1, slot)`` for an input that was left alone.
      values: indices of input Variables whose arrays changed.
      metadata: indices of input Variables whose metadata or kind of value changed.
      nodes: the attributes of input modules that changed.
    """

    __slots__ = ("metadata", "nodes", "sources", "structure", "values")

    def __init__(
        self,
        structure: Structure,
        sources: tuple[tuple[int, int], ...],
        values: tuple[int, ...],
        metadata: tuple[int, ...],
        nodes: tuple[merge.NodeChange, ...],
    ):
        self.structure = structure
        self.sources = sources
        self.values = values
        self.metadata = metadata
        self.nodes = nodes

    def arrays(self, inputs: Sequence[Any], groups: Sequence[OutputGroup]) -> list[Any]:
        """For each array of ``structure`` what the inputs or the outputs hold for it."""
        outputs = [group.arrays for group in groups]
        return [inputs[i] if group < 0 else outputs[group][i] for group, i in self.sources]

    def _key(self) -> tuple[Any, ...]:
        return self.structure, self.sources, self.values, self.metadata

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class OutputGroup:
    """Outputs of one spec, each with the name under which JAX's messages and HLO show it."""

    __slots__ = ("arrays", "names")

    def __init__(self, arrays: Sequence[Any], names: tuple[str, ...]):
        self.arrays = arrays
        self.names = names


jax.tree_util.register_pytree_with_keys(
    OutputGroup,
    lambda group: (
        tuple(zip(map(jax.tree_util.GetAttrKey, group.names), group.arrays, strict=True)),
        group.names,
    ),
    lambda names, arrays: OutputGroup(arrays, names),  # type: ignore[arg-type]
    lambda group: (group.arrays, group.names),
)


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
      donated: the slots that are donated.
      moves_committed: whether Variables committed to another layout are moved as well.
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
    donated: frozenset[int]
    moves_committed: bool


def make_plan(
    fun: Callable[..., Any],
    transform: Transform,
    parameters: Parameters,
    call: Call,
    flat: Flat,
    graph: bool,
    updates: bool,
) -> Plan:
    """Works out the plan for a structure.

    Raises:
      ValueError: the specs do not fit the arguments.
    """
    layout, structure = call.layout, flat.structure
    transform = transform.in_context()
    specs = align_specs(transform.in_specs.tree, parameters, layout, transform.in_name)
    names = [layout.names[i] for i in layout.dynamic]
    goals = argument_targets(structure, call.tree, specs, names)
    resolved = resolve(structure, flat.objects, flat.leaves, goals, transform.spec_of)
    slot_specs = transform.slot_specs(resolved.slots, flat.leaves)
    donated_names = {layout.names[i] for i in layout.donated} | layout.donated_keywords
    donated = frozenset(reachable_slots(structure, goals, donated_names))
    donated -= {
        s
        for i, e in enumerate(structure.entries)
        if isinstance(e, RefEntry)
        for s in structure.slots[i]
    }
    groups = _Groups(transform, slot_specs)
    labels = slot_names(structure, goals)
    pure = _Pure(
        fun, transform, call.layout, call.statics, structure, goals, slot_specs, groups,
        donated, graph, updates,
    ).function(labels)  # fmt: skip
    return Plan(
        fun_name=pure.__name__,
        structure=structure,
        layout=layout,
        statics=call.statics,
        targets=goals,
        names=labels,
        program=transform.compile(pure, slot_specs, groups.specs, tuple(sorted(donated))),
        layouts=tuple(map(transform.layout_of, slot_specs)),
        variables=frozenset(
            slot
            for entry, slots in zip(structure.entries, structure.slots, strict=True)
            if isinstance(entry, VariableEntry)
            for slot in slots
        ),
        donated=donated,
        moves_committed=transform.moves_committed,
    )


class _Groups:
    """The groups of outputs, one for each spec that an output can have.

    JAX wants the shardings of outputs before it traces, when their number is not known yet.
    The specs are known: they are those that the user wrote.
    """

    def __init__(self, transform: Transform, slot_specs: Sequence[Any]):
        written = (*transform.in_specs.written, *transform.out_specs.written)
        final = (transform.spec_of(spec) for spec in (None, *written))
        self.specs = tuple(dict.fromkeys([*final, *(s for s in slot_specs if s is not None)]))
        self.index = {spec: i for i, spec in enumerate(self.specs)}


class _Pure:
    """The pure function over flat arrays: merge, call, split again, keep what changed."""

    def __init__(
        self,
        fun: Callable[..., Any],
        transform: Transform,
        layout: Layout,
        statics: tuple[Static, ...],
        structure: Structure,
        goals: list[Target],
        slot_specs: Sequence[Any],
        groups: _Groups,
        donated: Set[int],
        graph: bool,
        updates: bool,
    ):
        self.fun = fun
        self.transform = transform
        self.layout = layout
        self.statics = statics
        self.structure = structure
        self.goals = [goal.objects_only() for goal in goals]
        unspecified = transform.spec_of(None)
        self.slot_specs = [unspecified if spec is None else spec for spec in slot_specs]
        self.known_specs = _specs_of_objects(structure, goals, slot_specs)
        self.groups = groups
        self.donated = donated
        self.graph = graph
        self.updates = updates

    def function(self, labels: Sequence[str]) -> Callable[..., Any]:
        """The pure function as JAX gets it, with the user's names for its many arguments."""

        def pure(*leaves: Any) -> Any:
            return self(leaves)

        pure.__name__ = getattr(self.fun, "__name__", type(self.fun).__name__)
        pure.__qualname__ = getattr(self.fun, "__qualname__", pure.__name__)
        pure.__wrapped__ = self.fun  # type: ignore[attr-defined]
        pure.__signature__ = inspect.Signature([*map(_SlotParameter, labels)])  # type: ignore[attr-defined]
        return pure

    def __call__(self, leaves: Sequence[Any]) -> Any:
        built = merge.unflatten(self.structure, leaves)
        args, kwargs = join_call(self.layout, self.statics, built.root)
        out = self.fun(*args, **kwargs)
        after = flatten(
            out,
            graph=self.graph,
            known=built.objects,
            describe_known=lambda obj: self.updates or not _compat.is_node(obj),
        )
        if not self.updates:
            self._check_output(after)
        goal = target("output", self.transform.out_specs.tree, out, after.structure.root)
        goals = [*self.goals, goal] if self.updates else [goal]
        names = slot_names(after.structure, [*self.goals, goal])
        for index, (where, _) in self.known_specs.items():
            for slot in after.structure.slots[index]:
                names[slot] = where
        return self._pack(leaves, after, self._output_specs(after, goals), names)

    def _output_specs(self, after: Flat, goals: Sequence[Target]) -> list[Any]:
        resolved = resolve(
            after.structure,
            after.objects,
            after.leaves,
            goals,
            self.transform.spec_of,
            known=self.known_specs,
            settled={g.name for g in self.goals},
        )
        for index, (_, spec) in self.known_specs.items():
            for slot in after.structure.slots[index]:
                resolved.slots[slot] = resolved.variables.get(index, (None, spec))[1]
        unspecified = self.transform.spec_of(None)
        return [unspecified if spec is None else spec for spec in resolved.slots]

    def _pack(
        self, leaves: Sequence[Any], after: Flat, specs: Sequence[Any], names: Sequence[str]
    ) -> tuple[Any, ...]:
        """Sorts the arrays into outputs and those left alone, and notes what changed."""
        structure, before = after.structure, self.structure
        outputs: tuple[list[Any], ...] = tuple([] for _ in self.groups.specs)
        labels: tuple[list[str], ...] = tuple([] for _ in self.groups.specs)
        sources: list[Any] = [None] * len(after.leaves)
        values: list[int] = []
        metadata: list[int] = []
        nodes: list[merge.NodeChange] = []
        for index, old in enumerate(before.entries):
            entry = structure.entries[index]
            inputs = {id(leaves[slot]): slot for slot in before.slots[index]}
            fresh: set[int] = set()
            for slot in structure.slots[index]:
                unchanged = inputs.get(id(after.leaves[slot]))
                if (
                    unchanged is None
                    or unchanged in self.donated
                    or (specs[slot] != self.slot_specs[unchanged])
                ):
                    fresh.add(slot)
                else:
                    sources[slot] = (-1, unchanged)
            if isinstance(entry, VariableEntry) and entry != old:
                metadata.append(index)
            elif isinstance(entry, VariableEntry) and fresh:
                values.append(index)
            elif isinstance(entry, NodeEntry) and self.updates:
                assert isinstance(old, NodeEntry)
                change = merge.node_changes(index, old, structure, fresh)
                if change is not None:
                    nodes.append(change)
        new_refs = {
            slot
            for entry, slots in zip(structure.entries, structure.slots, strict=True)
            if isinstance(entry, RefEntry)
            for slot in slots
        }
        for slot, source in enumerate(sources):
            if source is None:
                leaf = after.leaves[slot]
                group = self.groups.index[specs[slot]]
                sources[slot] = (group, len(outputs[group]))
                # A ref cannot leave a trace; its value can, and becomes a new ref outside.
                outputs[group].append(leaf[...] if slot in new_refs else leaf)
                labels[group].append(names[slot])
        outcome = Outcome(structure, tuple(sources), tuple(values), tuple(metadata), tuple(nodes))
        return *map(OutputGroup, outputs, map(tuple, labels)), outcome

    def _check_output(self, after: Flat) -> None:
        """Without graph updates no Variable may stand in two places of input and output."""
        seen: dict[int, str] = {i: n for i, (n, _) in self.known_specs.items()}
        slots = iter(after.structure.root_slots)
        lines = []
        for place in after.structure.walk(after.structure.root, slots):
            where = accessor("output", place.path)
            if place.entry is not None and place.entry in seen:
                lines.append(f"  {seen[place.entry]} and {where}")
            elif place.entry is not None and not _compat.can_update(after.objects[place.entry]):
                lines.append(f"  {where}: a Variable captured from outside of the function")
        if lines:
            raise ValueError(
                f"{self.transform.name} without graph updates cannot return Variables that are "
                "inputs or were captured:\n" + "\n".join(lines) + "\nReturn a copy made by "
                "nnx.clone, or use graph=True and graph_updates=True."
            )


def _specs_of_objects(
    structure: Structure, goals: Sequence[Target], slot_specs: Sequence[Any]
) -> dict[int, tuple[str, Any]]:
    """For each Variable of the input its first name and its spec."""
    found: dict[int, tuple[str, Any]] = {}
    slots = iter(structure.root_slots)
    for goal in goals:
        for keys, _, part in goal.parts:
            for place in structure.walk(part, slots):
                if place.entry is not None and place.entry not in found:
                    spec = slot_specs[place.slots[0]] if place.slots else None
                    found[place.entry] = (accessor(goal.name, (*keys, *place.path)), spec)
    return found


class _SlotParameter(inspect.Parameter):
    """A parameter whose name is the path of an array, so that JAX's messages and HLO show it."""

    __slots__ = ("_label",)

    def __init__(self, label: str):
        super().__init__("_", inspect.Parameter.POSITIONAL_ONLY)
        self._label = label

    @property
    def name(self) -> str:
        return self._label


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
    """Lays Variables out as declared, those that no one committed to another layout."""
    slots = [
        slot
        for slot, layout in enumerate(plan.layouts)
        if layout is not None
        and slot in plan.variables
        and _needs_placing(leaves[slot], layout, plan.moves_committed)
    ]
    if not slots or not _compat.trace_is_clean():
        return leaves, []
    placed = jax.device_put([leaves[s] for s in slots], [plan.layouts[s] for s in slots])
    leaves = list(leaves)
    for slot, array in zip(slots, placed, strict=True):
        leaves[slot] = array
    return leaves, slots


def as_declared(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """Arrays to trace with: where their layout is still open, they have the declared one."""
    return [
        leaf
        if layout is None or not _is_open(leaf)
        else jax.ShapeDtypeStruct(
            jnp.shape(leaf),
            jax.dtypes.result_type(leaf),
            sharding=layout,
            weak_type=getattr(jax.typeof(leaf), "weak_type", False),
        )
        for leaf, layout in zip(leaves, plan.layouts, strict=True)
    ]


def _is_open(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer) or _compat.is_ref(leaf):
        return False
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is None
    return not (isinstance(leaf, jax.Array) and leaf.committed)


def _needs_placing(leaf: Any, layout: jax.sharding.Sharding, moves_committed: bool) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return not isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct)
    own = leaf.sharding
    if own is layout or own == layout:
        return False
    return not leaf.committed or (
        moves_committed
        and own.device_set == layout.device_set
        and not own.is_equivalent_to(layout, leaf.ndim)
    )


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
    names: dict[int, str] = {}
    slots = iter(plan.structure.root_slots)
    for goal in plan.targets:
        for keys, _, part in goal.parts:
            for place in plan.structure.walk(part, slots):
                if place.entry is not None:
                    names.setdefault(place.entry, accessor(goal.name, (*keys, *place.path)))
    return [
        names.get(i, plan.structure.entries[i].type.__name__)  # type: ignore[union-attr]
        for i in indices
    ]
