"""The pure function of flat arrays that stands for the user's function in JAX.

It builds the graph around the arrays, calls the user's function, takes the graph apart again
and compares. Outputs are as few as possible: an array that the function left alone is not an
output, the caller's object simply keeps it. How the outputs belong together is known only
after tracing and may depend on shapes, so it travels as the static part of the output
(:class:`Outcome`), of which JAX keeps one for each trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from .. import _compat
from ..diagnostics.retraces import fun_name
from ..diagnostics.specs import (
    FitOptions,
    check_captured,
    check_filters,
    check_results,
    fitted,
    shape_of,
)
from ..diagnostics.trace_log import TraceLimit, TraceLog
from ..errors import StrictError
from ..fitting import OnIndivisible, spec_and_mesh, variants
from ..paths import accessor
from ..state_sharding import StateSharding
from . import unflatten as merge
from .flatten import Flat, flatten
from .resolve import FilterUse, NamedLocation, reach, resolve, slot_names
from .signature import Signature, join_call
from .specs import Specs, Target, target
from .statics import Static
from .structure import (
    Container,
    Group,
    NodeEntry,
    RefEntry,
    StaticEntry,
    Structure,
    VariableEntry,
    children_of,
    identities_in,
    parts_of,
)


class Caller(NamedTuple):
    """Who makes a call.

    A plan serves equal functions and equal static objects, too; a trace must get those of the call
    that it is made in.

    Attributes:
      fun: the function.
      objects: the objects of its arguments.
      limit: how often the wrapper that was called may trace.
      nested: whether the call is part of a trace.
      plan: the plan of the call, if JAX compiles it as part of the call; else None.
      leaves: the arrays, in this case.
    """

    fun: Any
    objects: Sequence[Any]
    limit: TraceLimit | None = None
    nested: bool = False
    plan: Any = None
    leaves: Sequence[Any] = ()


# A plain tuple of these fields, because it is made at each call. None while a function is traced.
CALLER: ContextVar[tuple[Any, ...] | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def called_by(caller: Caller | None) -> Iterator[None]:
    """Traces within the block belong to this call."""
    token = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(token)


def _on_compilation(event: str, duration_secs: float, **details: Any) -> None:
    fields = CALLER.get()
    if event != _compat.COMPILATION or fields is None:
        return
    caller = Caller(*fields)
    # JAX also compiles what moves arguments to where they belong.
    if caller.plan is not None and details.get("fun_name") == f"jit({caller.plan.fun_name})":
        caller.plan.log.add_compilation(caller.plan, caller.leaves)


jax.monitoring.register_event_duration_secs_listener(_on_compilation)


class Rules(Protocol):
    """What a transform decides about the inside of the pure function."""

    @property
    def name(self) -> str:
        """What messages call the transform."""

    @property
    def out_specs(self) -> Specs:
        """The specs of outputs as the user wrote them."""

    @property
    def trace_key(self) -> Hashable:
        """All options on which a trace depends."""

    @property
    def terms(self) -> FitOptions:
        """What it says about fitting specs to arrays."""

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Sequence[Any], specs: Sequence[Any]
    ) -> None:
        """Refuses arrays that must not come out with these specs."""

    def with_spec(self, spec: Any, partition: PartitionSpec) -> Any:
        """A final spec with another ``PartitionSpec`` in it."""

    def spec_of(self, spec: Any) -> Any:
        """The final, hashable form of a spec that the user wrote."""


class OutputGroup:
    """Outputs of one spec, each with the name under which JAX's messages and HLO show it.

    JAX wants the shardings of outputs before it traces, when their number is not known yet.
    The specs are known: they are those that the user wrote. So there is a group for each.
    """

    __slots__ = ("arrays", "names")

    def __init__(self, names: tuple[str, ...], arrays: Any):
        self.names = names
        self.arrays = arrays


jax.tree_util.register_pytree_with_keys(
    OutputGroup,
    lambda group: (
        tuple(zip(map(jax.tree_util.GetAttrKey, group.names), group.arrays, strict=True)),
        group.names,
    ),
    OutputGroup,  # called at every call: a function around it would cost as much again
    lambda group: (group.arrays, group.names),
)


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
      statics: indices of static objects of the inputs that were changed in place.
      update: room for what those who write back have worked out from all this.
    """

    __slots__ = ("metadata", "nodes", "sources", "statics", "structure", "update", "values")

    def __init__(
        self,
        structure: Structure,
        sources: tuple[tuple[int, int], ...],
        values: tuple[int, ...],
        metadata: tuple[int, ...],
        nodes: tuple[merge.NodeChange, ...],
        statics: tuple[int, ...],
    ):
        self.structure = structure
        self.sources = sources
        self.values = values
        self.metadata = metadata
        self.nodes = nodes
        self.statics = statics
        self.update: Any = None

    def arrays(self, inputs: Sequence[Any], groups: Sequence[OutputGroup]) -> list[Any]:
        """For each array of ``structure`` what the inputs or the outputs hold for it."""
        outputs = [group.arrays for group in groups]
        return [inputs[i] if group < 0 else outputs[group][i] for group, i in self.sources]

    def _key(self) -> tuple[Any, ...]:
        return (
            self.structure,
            self.sources,
            self.values,
            self.metadata,
            self.nodes,
            self.statics,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclasses.dataclass(frozen=True)
class Pure:
    """The pure function, as a value: equal ones trace alike.

    Attributes:
      rules: what the transform decides.
      signature: the roles of the arguments.
      structure: the structure of the arguments.
      targets: the graph objects among the arguments, with their specs.
      known: for each Variable of the arguments, what messages call it, and its final spec.
      object_specs: the final specs of all arrays that belong to objects, by slot.
      on_indivisible: by slot, what to do where a spec does not divide, if not what ``rules`` say.
      donated: slots whose arrays are always outputs.
      to_use: slots that are donated, and whose memory an output has to use.
      names: for each slot what the user would write to reach it.
      uses: what each ``StateSharding`` decided about among the arguments.
      graph: whether references are kept (graph mode) or refused (tree mode).
      updates: whether changes of structure reach the caller.
    """

    rules: Rules
    signature: Signature
    structure: Structure
    targets: tuple[Target, ...]
    known: dict[int, tuple[str, Any]]
    object_specs: dict[int, Any]
    on_indivisible: dict[int, OnIndivisible]
    donated: frozenset[int]
    to_use: frozenset[int]
    names: Sequence[str]
    uses: tuple[FilterUse, ...]
    graph: bool
    updates: bool

    @property
    def key(self) -> Hashable:
        """What the trace depends on, besides the types of the arrays."""
        return (
            self.rules.trace_key,
            self.signature,
            self.structure,
            self.targets,
            tuple(self.object_specs.items()),
            tuple(self.on_indivisible.items()),
            self.donated,
            self.to_use,
            self.graph,
            self.updates,
        )

    def group_specs(self) -> tuple[Any, ...]:
        """The spec of each group of outputs: every spec that an output can have."""
        parts = [part.spec for goal in self.targets for part in goal.parts]
        final = [self.rules.spec_of(None)]
        for spec in (*self.rules.out_specs.rules, *parts):
            is_rules = isinstance(spec, StateSharding)
            how = (is_rules and spec.on_indivisible) or self.rules.terms.on_indivisible
            for written in spec.shardings if is_rules else [spec]:
                own = self.rules.spec_of(written)
                final.append(own)
                pair = spec_and_mesh(own, self.rules.terms.mesh)
                if pair is not None:
                    final += [self.rules.with_spec(own, part) for part in variants(pair[0], how)]
        return tuple(dict.fromkeys([*final, *self.object_specs.values()]))

    def function(self, fun: Any, log: TraceLog) -> Callable[..., Any]:
        """The function to give to JAX, with the user's names for its many arguments.

        It does not hold ``fun``: traces that are kept for later must not keep it alive.
        """

        def pure(*leaves: Any) -> Any:
            fields = CALLER.get()
            assert fields is not None
            caller = Caller(*fields)
            name = fun_name(caller.fun)
            nested = caller.nested
            forget = log.add_trace(self, name, self.names, leaves, caller.limit, nested=nested)
            try:
                with called_by(None):
                    return self._call(caller, leaves)
            except BaseException:
                forget()
                raise

        while isinstance(fun, functools.partial):
            fun = fun.func
        pure.__name__ = _name_of(fun)
        pure.__qualname__ = getattr(fun, "__qualname__", pure.__name__)
        code = getattr(inspect.unwrap(fun), "__code__", None)
        if code is not None:
            # JAX names functions in messages by file and line, which it finds through this.
            source = types.SimpleNamespace(__code__=code, __name__=pure.__name__)
            pure.__wrapped__ = source  # type: ignore[attr-defined]
        if len(set(self.names)) == len(self.names):
            parameters = [_SlotParameter(name) for name in self.names]
            pure.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pure

    def _call(self, caller: Caller, leaves: Sequence[Any]) -> Any:
        # The caller's own static objects: the structure may be that of an earlier, equal call.
        statics = {i: caller.objects[i] for i in self.structure.static_indices()}
        built = merge.unflatten(self.structure, leaves, statics)
        try:
            return self._called(caller.fun, leaves, built)
        finally:
            merge.restore(self.structure, built.objects)

    def _called(self, fun: Any, leaves: Sequence[Any], built: merge.Built) -> Any:
        statics = [merge.assemble(c, iter(()), built.objects) for c in self.structure.statics]
        args, kwargs = join_call(self.signature, statics, built.root)
        out = fun(*args, **kwargs)
        if not self.graph:
            flatten(out, graph=False)  # refuses objects that are shared within the output
        borrowed = {id(static.value) for static in self.structure.identities()}
        after = flatten(
            out,
            graph=self.graph,
            known=built.objects,
            describe_known=lambda obj: self.updates or not _compat.is_node(obj),
            borrowed=borrowed.union(id(built.objects[i]) for i in self.structure.static_indices()),
        )
        self._check_objects(after, borrowed)
        if not self.updates:
            self._check_output(after)
        goal = target("output", self.rules.out_specs.tree, out, after.structure.root)
        # What is known keeps its spec and its name, so only new things are looked for.
        changed = self.updates and not self._is_unchanged(after.structure)
        reached = reach(after.structure, [*self.targets, goal] if changed else [goal])
        names = self._output_names(after.structure, reached)
        check_results(self.rules.name, names, after.leaves)
        specs = self._output_specs(leaves, after, reached, names)
        self.rules.check_outputs(_name_of(fun), names, after.leaves, specs)
        check_captured(self.rules.terms, fun, _compat.trace_constants())
        return self._pack(_name_of(fun), leaves, after, specs, names)

    def _check_objects(self, after: Flat, borrowed: Set[int]) -> None:
        """Refuses what would reach the caller's objects, but means nothing outside of the trace.

        Raises:
          ValueError: an object that the function captured is returned or attached; a class was
            changed; without graph updates, a static object was changed.
          UnexpectedTracerError: a traced array is kept as a static value.
        """
        structure, count = after.structure, len(self.structure.entries)
        leaks, foreign, other_class, changed = [], [], [], []
        for index, entry in enumerate(structure.entries):
            before = self.structure.entries[index] if index < count else None
            leaks += [(index, path) for path in _tracers(entry, borrowed)]
            if isinstance(entry, NodeEntry | VariableEntry):
                if before is None and not _compat.can_update(after.objects[index]):
                    foreign.append((index, ()))
                elif before is not None and before.type is not entry.type:
                    other_class.append((index, ()))
            elif (
                isinstance(entry, StaticEntry) and not self.updates and before not in (None, entry)
            ):
                changed.append((index, ()))
        if not (leaks or foreign or other_class or changed):
            return
        starts = [
            (accessor(goal.name, part.keys), part.child)
            for goal in self.targets
            for part in goal.parts
        ]
        known = structure.names([*starts, ("output", structure.root)])
        known.update(self.structure.names(starts))

        def listed(places: Sequence[tuple[int, Any]]) -> str:
            return "\n".join(
                f"  {accessor(known.get(index, 'an object'), path)}: "
                f"{type(after.objects[index]).__name__}"
                for index, path in places
            )

        name = self.rules.name
        if leaks:
            raise jax.errors.UnexpectedTracerError(
                f"{name}: these static values hold traced arrays, which do not exist outside of "
                f"the function:\n{listed(leaks)}\nKeep them in a Variable or as an attribute of a "
                "module (nnx.data), or return them."
            )
        if foreign:
            raise ValueError(
                f"{name}: these objects were captured from outside of the function, and cannot be "
                f"returned or attached to its arguments:\n{listed(foreign)}\nPass them as "
                "arguments, or return a copy made by nnx.clone."
            )
        if other_class:
            raise ValueError(
                f"{name}: the function assigned another __class__ to these objects:\n"
                f"{listed(other_class)}\nMake an object of the other class instead."
            )
        raise ValueError(
            f"{name} without graph updates cannot change static objects, but the function changed "
            f"these:\n{listed(changed)}\nUse graph=True and graph_updates=True, or make the change "
            "outside of the function."
        )

    def _is_unchanged(self, after: Structure) -> bool:
        """Whether there are the same objects as before, and no module changed or holds arrays."""
        before = self.structure.entries
        return len(before) == len(after.entries) and all(
            new == old and not slots
            for old, new, slots in zip(before, after.entries, after.slots, strict=True)
            if isinstance(old, NodeEntry)
        )

    def _output_specs(
        self,
        leaves: Sequence[Any],
        after: Flat,
        reached: Sequence[NamedLocation],
        names: Sequence[str],
    ) -> list[Any]:
        """The final spec of each array after the call."""
        resolved = resolve(
            reached,
            after.objects,
            after.leaves,
            self.rules.spec_of,
            known=self.known,
            settled={g.name for g in self.targets},
        )
        check_filters(self.rules.terms, (*self.uses, *resolved.uses))
        on_indivisible = resolved.on_indivisible
        before: dict[int, tuple[int, ...] | None] = {}
        for index in self.known:
            old_slots = self.structure.slots[index]
            for position, slot in enumerate(after.structure.slots[index]):
                resolved.slots[slot] = resolved.variables[index][1]
                if old_slots:
                    old = old_slots[min(position, len(old_slots) - 1)]
                    before[slot] = shape_of(leaves[old])
                    if old in self.on_indivisible:
                        on_indivisible[slot] = self.on_indivisible[old]
        unspecified = self.rules.spec_of(None)
        specs = [unspecified if spec is None else spec for spec in resolved.slots]
        shapes = [shape_of(leaf) for leaf in after.leaves]
        terms = self.rules.terms
        return fitted(terms, names, shapes, specs, on_indivisible, outputs=True, before=before)

    def _output_names(self, after: Structure, reached: Sequence[NamedLocation]) -> list[str]:
        names = slot_names(after.num_leaves, reached)
        for index, (where, _) in self.known.items():
            for slot in after.slots[index]:
                names[slot] = where
        return names

    def _pack(
        self,
        fun_name: str,
        leaves: Sequence[Any],
        after: Flat,
        specs: Sequence[Any],
        names: Sequence[str],
    ) -> tuple[Any, ...]:
        """Sorts the arrays into outputs and those left alone, and notes what changed."""
        structure = after.structure
        sources: dict[int, tuple[int, int]] = {}
        values, metadata, nodes, statics = [], [], [], []
        for index, old in enumerate(self.structure.entries):
            entry = structure.entries[index]
            slots = structure.slots[index]
            if not slots and entry == old:
                continue
            unchanged = self._unchanged(index, leaves, after, specs)
            sources.update((slot, (-1, before)) for slot, before in unchanged.items())
            fresh = {slot for slot in slots if slot not in unchanged}
            if isinstance(entry, VariableEntry) and entry != old:
                metadata.append(index)
            elif isinstance(entry, VariableEntry) and fresh:
                values.append(index)
            elif isinstance(entry, NodeEntry) and isinstance(old, NodeEntry) and self.updates:
                change = merge.node_changes(index, old, structure, fresh)
                if change is not None:
                    nodes.append(change)
            elif isinstance(entry, StaticEntry):
                statics.append(index)
        groups = self.group_specs()
        outputs: dict[Any, list[Any]] = {spec: [] for spec in groups}
        labels: dict[Any, list[str]] = {spec: [] for spec in groups}
        inputs = {id(leaf): slot for slot, leaf in enumerate(leaves)}
        refs = structure.slots_of(RefEntry)
        for slot, leaf in enumerate(after.leaves):
            is_ref = slot in refs and _compat.is_ref(leaf)
            if is_ref and id(leaf) in inputs:
                sources[slot] = (-1, inputs[id(leaf)])
            elif slot not in sources:
                spec = specs[slot]
                sources[slot] = (groups.index(spec), len(outputs[spec]))
                # A ref cannot leave a trace; its value can, and becomes a new ref outside.
                outputs[spec].append(leaf[...] if is_ref else leaf)
                labels[spec].append(names[slot])
        results = [x for arrays in outputs.values() for x in arrays]
        self._check_donated(fun_name, leaves, results)
        by_slot = tuple(sources[slot] for slot in range(len(after.leaves)))
        return (
            *(OutputGroup(tuple(labels[spec]), outputs[spec]) for spec in groups),
            Outcome(
                structure, by_slot, tuple(values), tuple(metadata), tuple(nodes), tuple(statics)
            ),
        )

    def _check_donated(self, fun_name: str, leaves: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Every donated array should have an output of its type, which can use its memory.

        Raises:
          StrictError: one has not.
        """
        left = Counter(map(_shape_and_dtype, outputs))
        left.subtract(_shape_and_dtype(leaves[slot]) for slot in self.to_use)
        lines = [
            f"  {self.names[slot]}, {jax.typeof(leaves[slot]).str_short()}"
            for slot in sorted(self.to_use)
            if left[_shape_and_dtype(leaves[slot])] < 0
        ]
        if lines:
            raise StrictError(
                f"{self.rules.name}: these arguments are donated, but {fun_name} has no result "
                "of their shape and dtype that could use their memory:\n"
                + "\n".join(lines)
                + "\nDo not donate them (donate_argnums, donate_argnames)."
            )

    def _unchanged(
        self, index: int, leaves: Sequence[Any], after: Flat, specs: Sequence[Any]
    ) -> dict[int, int]:
        """The arrays of one object that were left alone: slot after the call to slot before."""
        entries = self.structure.entries[index], after.structure.entries[index]
        if all(map(merge.is_leaf_variable, entries)):  # nearly all are: no need to look for parts
            pairs = [(after.structure.slots[index][0], self.structure.slots[index][0])]
        else:
            before = merge.parts(self.structure, index)
            pairs = []
            for key, (child, slots) in merge.parts(after.structure, index).items():
                old_child, old_slots = before.get(key, (None, ()))
                if child == old_child:
                    pairs += zip(slots, old_slots, strict=True)
        return {
            slot: old
            for slot, old in pairs
            if after.leaves[slot] is leaves[old]
            and old not in self.donated
            and specs[slot] == self.object_specs[old]
        }

    def _check_output(self, after: Flat) -> None:
        """Without graph updates no Variable may stand in two places of input and output."""
        lines = []
        slots = iter(after.structure.root_slots)
        for place in after.structure.walk(after.structure.root, slots):
            where = accessor("output", place.path)
            if place.entry is not None and place.entry in self.known:
                lines.append(f"  {self.known[place.entry][0]} and {where}")
            elif place.entry is not None and not _compat.can_update(after.objects[place.entry]):
                lines.append(f"  {where}: a Variable captured from outside of the function")
        if lines:
            raise ValueError(
                f"{self.rules.name} without graph updates does not support Variable aliasing: it "
                "cannot return Variables that are inputs or were captured:\n"
                + "\n".join(lines)
                + "\nReturn a copy made by nnx.clone, or use graph=True and graph_updates=True."
            )


def _shape_and_dtype(leaf: Any) -> tuple[Any, Any]:
    aval = jax.typeof(leaf)
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)


def _name_of(fun: Any) -> str:
    """The name of a function, behind any ``functools.partial``."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return str(getattr(fun, "__name__", "<unnamed function>"))  # as JAX calls it


def _tracers(entry: Any, borrowed: Set[int]) -> Iterator[tuple[Any, ...]]:
    """The paths to traced arrays among the static values of an entry, without borrowed ones."""
    if not any(isinstance(s.value, jax.core.Tracer) for s in identities_in(children_of(entry))):
        return
    stack = list(parts_of(entry).items())
    while stack:
        path, child = stack.pop()
        if isinstance(child, Container):
            stack += [(path, aux) for aux in child.aux]
        elif isinstance(child, Group):
            stack += [(path + key, part) for key, part in parts_of(child).items()]
        elif isinstance(child, Static) and id(child.value) not in borrowed:
            yield from [path] * isinstance(child.value, jax.core.Tracer)


class _SlotParameter(inspect.Parameter):
    """A parameter whose name is the path of an array, so that JAX's messages and HLO show it."""

    def __init__(self, label: str):
        super().__init__("_", inspect.Parameter.POSITIONAL_ONLY)
        # The constructor takes only identifiers; a path says more.
        self._name = label
