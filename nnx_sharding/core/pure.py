"""The pure function of flat arrays that JAX transforms in place of the user's function.

It builds the graph around the arrays, calls the user's function, flattens the graph again and
compares. Outputs are as few as possible: an array that the function did not change is not an
output, and the caller's object keeps it. What the outputs mean is known only after tracing and may
depend on shapes, so it is the static part of the output (:class:`~.outcome.Outcome`), of which JAX
keeps one for each trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..specs.fitting import OnIndivisible, axes_of_type, like, spec_and_mesh, variants
from ..specs.state_sharding import StateSharding
from .call_context import CALLER, Caller, called_by
from .flatten import Flat, flatten
from .interrupts import release
from .known_faults import wrong_gradients
from .naming import name_as, name_of
from .outcome import Outcome, OutputGroup
from .problems import Problem, refuse, warn
from .resolve import FilterUse, NamedLocation, check_filters, locate, resolve, slot_names
from .retyping import Retyped, first_axes, mesh_of_types, type_mesh, typed_as
from .signature import Signature, join_call
from .snapshot import Snapshot
from .spec_checks import check_arrays, fit_specs, shape_of
from .structure import NodeEntry, RefEntry, StaticEntry, Structure, VariableEntry
from .targets import Target, target
from .trace_checks import check_captured, check_donated, check_objects, check_output
from .transform import Transform
from .unflatten import Built, assemble, kept_places, node_changes, restore, unflatten


class Pure(NamedTuple):
    """The pure function, as a value: functions with equal keys have the same trace.

    Attributes:
      transform: what the transform decides.
      signature: the roles of the arguments.
      structure: the structure of the arguments.
      targets: the graph objects among the arguments, with their specs.
      known: the name and the final spec of each Variable of the arguments.
      object_specs: the final specs of all arrays that belong to objects, by slot.
      on_indivisible: by slot, the option that has priority over that of the transform.
      donated: slots whose arrays are always outputs.
      must_be_used: donated slots whose buffers an output has to use.
      names: the expression for the array in each slot.
      uses: the decisions of each ``StateSharding`` among the arguments.
      graph: whether shared references are kept (graph mode) or refused (tree mode).
      updates: whether changes of structure are written back.
      batch_axes: the mesh axes over which the first dimension of arrays outside of objects is
        sharded, if activations are; in a trace also those in the types of arrays.
      batch_slots: these arrays, without those whose sharding is declared.
      typed: the declared shardings over Explicit axes of arrays outside of objects, by slot. JAX
        omits them from the types of uncommitted arrays.
    """

    transform: Transform
    signature: Signature
    structure: Structure
    targets: tuple[Target, ...]
    known: dict[int, tuple[str, Any]]
    object_specs: dict[int, Any]
    on_indivisible: dict[int, OnIndivisible]
    donated: frozenset[int]
    must_be_used: frozenset[int]
    names: Sequence[str]
    uses: tuple[FilterUse, ...]
    graph: bool
    updates: bool
    batch_axes: frozenset[Any] = frozenset()
    batch_slots: tuple[int, ...] = ()
    typed: tuple[tuple[int, NamedSharding], ...] = ()

    @property
    def key(self) -> Hashable:
        """What the trace depends on, besides the types of the arrays."""
        return (
            self.transform.trace_key,
            self.signature,
            self.structure,
            self.targets,
            tuple(self.object_specs.items()),
            tuple(spec for _, spec in self.known.values()),
            tuple(self.on_indivisible.items()),
            self.donated,
            self.must_be_used,
            self.graph,
            self.updates,
            self.batch_axes,
            self.batch_slots,
            self.typed,
        )

    def group_specs(self) -> tuple[Any, ...]:
        """The spec of each group of outputs: all specs that outputs can have."""
        transform = self.transform
        written = [part.spec for target in self.targets for part in target.parts]
        specs = [transform.spec_of(None), *transform.own_specs]
        for rule in (*transform.out_specs.rules, *written):
            has_filters = isinstance(rule, StateSharding)
            action = (has_filters and rule.on_indivisible) or transform.on_indivisible
            for spec in map(transform.spec_of, rule.shardings if has_filters else [rule]):
                specs.append(spec)
                pair = spec_and_mesh(spec, transform.context)
                if pair is not None:
                    specs += [like(spec, part) for part in variants(pair[0], action)]
        return tuple(dict.fromkeys([*specs, *self.object_specs.values()]))

    def function(self, fun: Any) -> Callable[..., Any]:
        """The function to pass to JAX, with the user's names for its many arguments.

        It has no reference to ``fun``: cached traces must not keep that alive.
        """

        def pure(*leaves: Any) -> Any:
            fields = CALLER.get()
            assert fields is not None
            caller = Caller(*fields)
            if caller.plan is not None:
                release()  # nothing has run yet, and tracing may take long
            forget = None
            if caller.observer is not None:
                forget = caller.observer.traced(self, caller.fun, leaves, nested=caller.nested)
            try:
                with called_by(None):
                    return self._call(caller, leaves)
            except BaseException:
                if forget is not None:
                    forget()
                raise

        name_as(pure, fun, self.names)
        return pure

    def _call(self, caller: Caller, leaves: Sequence[Any]) -> Any:
        arrays = self.transform.entered(self._typed(leaves, nested=caller.nested))
        # The caller's own static objects: the structure may be that of an earlier, equal call.
        statics = {i: caller.objects[i] for i in self.structure.static_indices()}
        built = unflatten(self.structure, arrays.inside, statics)
        try:
            return self._called(caller, arrays, built)
        finally:
            restore(self.structure, built.objects)

    def _typed(self, leaves: Sequence[Any], *, nested: bool) -> Sequence[Any]:
        """The arrays with the declared shardings in their types; in a trace, untyped ones only."""
        goals, context = dict(self.typed), self.transform.context
        if not nested and context is not None and not axes_of_type(context, AxisType.Explicit):
            auto = NamedSharding(context, PartitionSpec())
            goals = dict.fromkeys(self.structure.root_slots, auto)
        typed = [*leaves]
        for slot, goal in goals.items():
            if not nested or type_mesh(leaves[slot]) is None:
                typed[slot] = typed_as(leaves[slot], goal)
        return typed

    def _called(self, caller: Caller, arrays: Retyped, built: Built) -> Any:
        fun, leaves = caller.fun, arrays.leaves
        statics = [assemble(c, iter(()), built.objects) for c in self.structure.statics]
        args, kwargs = join_call(self.signature, statics, built.root)
        types = (getattr(jax.typeof(leaves[s]), "sharding", None) for s in self.batch_slots)
        batch_axes = self.batch_axes | first_axes(types, self.transform.context)
        pure = self._replace(batch_axes=batch_axes)
        tracing = self.transform.tracing(pure, caller, built, arrays.inside)
        with arrays.context(), tracing as call:
            before_call = Snapshot(self.structure, built.objects)
            out = call(*args, **kwargs)
        if not self.graph:
            flatten(out, graph=False)  # refuses objects that are shared within the output
        borrowed = {id(static.value) for static in self.structure.identities()}
        carried = self.transform.carried_objects(self)
        nodes = {i for i, x in enumerate(self.structure.entries) if isinstance(x, NodeEntry)}
        after = flatten(
            out,
            graph=self.graph,
            known=built.objects,
            copied=frozenset() if self.updates else nodes - carried,
            borrowed=borrowed.union(id(built.objects[i]) for i in self.structure.static_indices()),
            snapshot=before_call,
        )
        name, updates = self.transform.name, self.updates
        check_objects(self.structure, after, self.targets, borrowed, name=name, updates=updates)
        if not updates:
            check_output(after, self.known, carried, name=name)
        written, option = self.transform.out_specs.tree, f"{name}: {self.transform.out_name}"
        output = target("output", written, out, after.structure.root, option)
        # Known Variables keep their spec and name, so only new things are located.
        changed = updates and not self._is_unchanged(after.structure)
        locations = locate(after.structure, [*self.targets, output] if changed else [output])
        names = self._output_names(after.structure, locations)
        if not self.transform.returns_any:
            check_arrays(Problem.RESULT_IS_NOT_ARRAY, names, after.leaves, name=name)
        specs = self._output_specs(leaves, after, locations, names)
        details = {"name": name, "option": self.transform.out_name}
        after = arrays.leave_as(self.structure, after, specs, names, **details)
        self.transform.check_outputs(name_of(fun), names, after.leaves, specs)
        check_captured(fun, name=name, strict=self.transform.strict)
        mesh = mesh_of_types(leaves, self.transform.context)
        is_program = self.transform.shards and not caller.nested and mesh is not None
        if is_program and (faults := wrong_gradients(mesh, self.batch_axes)):
            warn(Problem.WRONG_GRADIENT, faults, name=name, strict=self.transform.strict)
        return self._pack(name_of(fun), leaves, after, specs, names)

    def _is_unchanged(self, after: Structure) -> bool:
        """Whether the objects are the same as before, and no module changed or holds arrays."""
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
        locations: Sequence[NamedLocation],
        names: Sequence[str],
    ) -> list[Any]:
        """The final spec of each array after the call."""
        transform = self.transform
        resolved = resolve(
            locations,
            after.objects,
            after.leaves,
            transform.spec_of,
            known=self.known,
            settled={target.name for target in self.targets},
        )
        uses = (*self.uses, *resolved.uses)
        check_filters(uses, name=transform.name, strict=transform.strict)
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
        for index, slots in enumerate(self.structure.slots):
            if not slots or not isinstance(after.structure.entries[index], NodeEntry):
                continue
            for slot, old in kept_places(self.structure, after.structure, index):
                if resolved.slots[slot] is None:  # an attribute, as what it replaces
                    resolved.slots[slot] = self.object_specs[old]
        open_spec, others = transform.spec_of(None), transform.written_specs(self, after)
        declared = (others.get(slot, spec) for slot, spec in enumerate(resolved.slots))
        specs = [open_spec if spec is None else spec for spec in declared]
        shapes = [shape_of(leaf) for leaf in after.leaves]
        return fit_specs(
            transform, names, shapes, specs, on_indivisible, outputs=True, before=before
        )

    def _output_names(self, after: Structure, locations: Sequence[NamedLocation]) -> list[str]:
        names = slot_names(after.num_leaves, locations)
        for index, (name, _) in self.known.items():
            for slot in after.slots[index]:
                names[slot] = name
        return names

    def _pack(
        self,
        fun_name: str,
        leaves: Sequence[Any],
        after: Flat,
        specs: Sequence[Any],
        names: Sequence[str],
    ) -> tuple[Any, ...]:
        """Sorts the arrays into outputs and unchanged ones, and notes what changed."""
        structure = after.structure
        sources: dict[int, tuple[int, int]] = {}
        values, metadata, nodes, statics, copied = [], [], [], [], []
        for index, old in enumerate(self.structure.entries):
            entry, slots = structure.entries[index], structure.slots[index]
            if isinstance(entry, NodeEntry) and not self.updates:
                copied.append(index)
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
                change = node_changes(index, old, structure, fresh)
                nodes += [] if change is None else [change]
            elif isinstance(entry, StaticEntry):
                statics.append(index)
        groups = self.group_specs()
        numbers = {spec: number for number, spec in enumerate(groups)}
        # The specs that the function in a prefix of `nnx.prefix` gives are not known before.
        if unknown := [(names[s], x) for s, x in enumerate(specs) if x not in numbers]:
            refuse(Problem.UNKNOWN_SPEC, unknown, name=self.transform.name)
        outputs: list[list[Any]] = [[] for _ in groups]
        labels: list[list[str]] = [[] for _ in groups]
        inputs = {id(leaf): slot for slot, leaf in enumerate(leaves)}
        refs = structure.slots_of(RefEntry)
        for slot, leaf in enumerate(after.leaves):
            is_ref = slot in refs and _compat.is_ref(leaf)
            if is_ref and id(leaf) in inputs:
                sources[slot] = (-1, inputs[id(leaf)])
            elif slot not in sources:
                number = numbers[specs[slot]]
                sources[slot] = (number, len(outputs[number]))
                # A ref cannot leave a trace; its value can, and becomes a new ref outside.
                outputs[number].append(leaf[...] if is_ref else leaf)
                labels[number].append(names[slot])
        donated = {slot: (self.names[slot], leaves[slot]) for slot in sorted(self.must_be_used)}
        check_donated(donated, itertools.chain(*outputs), name=self.transform.name, fun=fun_name)
        by_slot = tuple(sources[slot] for slot in range(len(after.leaves)))
        changes = tuple(values), tuple(metadata), tuple(nodes), tuple(statics), tuple(copied)
        packed = map(OutputGroup, map(tuple, labels), outputs)
        return (*packed, Outcome(structure, by_slot, *changes, _compat.trace_has_effects()))

    def _unchanged(
        self, index: int, leaves: Sequence[Any], after: Flat, specs: Sequence[Any]
    ) -> dict[int, int]:
        """The unchanged arrays of one object: slot after the call to slot before."""
        return {
            slot: old
            for slot, old in kept_places(self.structure, after.structure, index)
            if after.leaves[slot] is leaves[old]
            and old not in self.donated
            and specs[slot] == self.object_specs[old]
        }
