"""The pure function of flat arrays that JAX transforms in place of the user's function.

It builds the graph around the arrays, calls the user's function, flattens the graph again and
compares. Outputs are as few as possible: an array that the function did not change is not an
output, and the caller's object keeps it. What the outputs mean is known only after tracing and may
depend on shapes, so it is the static part of the output (:class:`~.outcome.Outcome`), of which JAX
keeps one for each trace.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from .. import _compat
from ..errors import raise_listed
from ..specs.fitting import OnIndivisible, in_type
from ..specs.state_sharding import StateSharding
from .call_context import Caller, called_by, caller_here
from .flatten import Flat, flatten
from .functions import name_as, name_of
from .interrupts import release
from .known_faults import dodge_faults
from .outcome import Outcome, OutputGroup
from .problems import not_arrays
from .resolve import FilterUse, NamedLocation, check_filters, locate, resolve, slot_names
from .retyping import Retyped, first_axes, mesh_of_types
from .signature import Signature, join_call
from .snapshot import Snapshot
from .spec_checks import fit_specs, shape_of
from .static_places import not_copied
from .structure import NodeEntry, RefEntry, StaticObject, Structure, VariableEntry
from .targets import Target, target
from .trace_checks import check_captured, check_donated, check_objects, check_output
from .transform import Sharded, Transform
from .unflatten import Built, assemble, kept_places, node_changes, restore, unflatten

R = TypeVar("R")


def on_one_chunk(function: Callable[..., R], *args: Any) -> R:
    """Calls a function with room for its calls in one chunk of Python's stack.

    CPython releases before the fix of https://github.com/python/cpython/issues/142183 in March 2026
    map and unmap memory at each call that crosses the end of a 16 KiB chunk. Traces are deep enough
    to make such calls in their loops, which can take a third of their time.
    """
    return function(*args)


# This frame takes half of a chunk of 256 KiB; those of about 800 further calls take the rest.
on_one_chunk.__code__ = on_one_chunk.__code__.replace(co_stacksize=1 << 14)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Pure:
    """The pure function, as a value: functions with equal keys have the same trace."""

    transform: Transform  # what the transform decides, with the mesh that applies
    signature: Signature  # the roles of the arguments
    structure: Structure  # the structure of the arguments
    targets: tuple[Target, ...]  # the graph objects among the arguments, with their specs
    names: Sequence[str]  # the expression for the array in each slot: ``model.up.kernel``
    specs: Sequence[Any]  # the final spec of each slot, or None
    # the name and the final spec of each Variable of the arguments
    known: dict[int, tuple[str, Any]]
    on_indivisible: dict[int, OnIndivisible]  # by slot, before that of the transform
    donated: frozenset[int]  # slots; those of objects are always outputs
    uses: tuple[FilterUse, ...]  # the decisions of each ``StateSharding`` among the arguments
    graph: bool  # whether shared references are kept, or refused (tree mode)
    updates: bool  # whether changes of structure are written back
    # mesh axes that shard the first dimension of arrays outside of objects, if activations
    # are sharded; in a trace also those in types
    batch_axes: frozenset[Any] = frozenset()
    batch_slots: tuple[int, ...] = ()  # these arrays, without those whose sharding is declared

    @functools.cached_property
    def object_specs(self) -> dict[int, Any]:
        """The final specs of all arrays that belong to objects, by slot."""
        open_spec, specs = self.transform.spec_of(None), self.specs
        slots = itertools.chain.from_iterable(self.structure.slots)
        return {slot: open_spec if specs[slot] is None else specs[slot] for slot in slots}

    @functools.cached_property
    def typed(self) -> tuple[tuple[int, NamedSharding], ...]:
        """The declared shardings over Explicit axes of arrays outside of objects, by slot."""
        parts = ((slot, in_type(self.specs[slot])) for slot in self.structure.root_slots)
        return tuple((slot, part) for slot, part in parts if part is not None)

    @functools.cached_property
    def must_be_used(self) -> frozenset[int]:
        """The donated slots whose buffers an output has to use."""
        return self.donated if self.transform.strict else frozenset()

    @functools.cached_property
    def key(self) -> Hashable:
        """What the trace depends on, besides the types of the arrays."""
        return (
            self.transform.trace_key,
            self.signature._replace(donated=frozenset(), donated_keywords=frozenset()),
            self.structure,
            self.targets,
            tuple(self.object_specs.items()),
            tuple(spec for _, spec in self.known.values()),
            tuple(self.on_indivisible.items()),
            self.donated.intersection(self.object_specs),
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
        specs = [transform.spec_of(None), *transform.own_specs]
        written = (part.spec for target in self.targets for part in target.parts)
        for rule in (*transform.out_specs.rules, *written):
            has_filters = isinstance(rule, StateSharding)
            for spec in map(transform.spec_of, rule.shardings if has_filters else [rule]):
                option = rule.on_indivisible if has_filters else None
                specs += [spec, *transform.corrected(spec, option)]
        return tuple(dict.fromkeys([*specs, *self.object_specs.values()]))

    def function(self, fun: Any) -> Callable[..., Any]:
        """The function to pass to JAX, with the user's names for its many arguments.

        It has no reference to ``fun``: cached traces must not keep that alive.
        """

        def pure(*leaves: Any) -> Any:
            caller = caller_here()
            assert caller is not None
            if caller.plan is not None:
                release()  # nothing has run yet, and tracing may take long
            forget = None
            if caller.observer is not None:
                forget = caller.observer.traced(self, caller.fun, leaves, nested=caller.nested)
            try:
                with called_by(None):
                    return on_one_chunk(self._call, caller, leaves)
            except BaseException:
                if forget is not None:
                    forget()
                raise

        name_as(pure, fun, self.names)
        return pure

    def _call(self, caller: Caller, leaves: Sequence[Any]) -> Any:
        arrays = self.transform.entered(self, leaves, nested=caller.nested)
        # Copies of the others, or another thread's changes would be taken for the function's.
        own = {i: caller.objects[i] for i in not_copied(self.structure)}
        built = unflatten(self.structure, arrays.inside, own)
        try:
            return self._called(caller, arrays, built)
        finally:
            restore(self.structure, built.objects, own)

    def _called(self, caller: Caller, arrays: Retyped, built: Built) -> Any:
        transform, name = self.transform, self.transform.name
        fun, leaves, fun_name = caller.fun, arrays.leaves, name_of(caller.fun)
        out, before = self._user_call(caller, arrays, built)
        carried = transform.carried_objects(self)
        after = self._flatten_after(out, built, carried, before)
        changed = self.updates and not self._is_unchanged(after.structure)
        option = f"{name}: {transform.out_name}"
        output = target("output", transform.out_specs.tree, out, after.structure.root, option)
        # Known Variables keep their spec and name, so only new things are located.
        locations = locate(after.structure, [*self.targets, output] if changed else [output])
        names = slot_names(after.structure.num_leaves, locations)
        for index, (variable, _) in self.known.items():
            for slot in after.structure.slots[index]:
                names[slot] = variable
        if not transform.returns_any:
            head = f"{name}: these results are not arrays:"
            if error := not_arrays(head, names, after.leaves, "Return only arrays or numbers."):
                raise error
        specs = self._output_specs(leaves, after, locations, names)
        details = {"name": name, "option": transform.out_name}
        after = arrays.leave_as(self.structure, after, specs, names, **details)
        transform.check_outputs(fun_name, names, after.leaves, specs)
        check_captured(fun, leaves, name=name, strict=transform.strict)
        if isinstance(transform, Sharded):
            mesh = mesh_of_types(leaves, transform.context)
            dodge_faults(mesh, name=name, strict=transform.strict, nested=caller.nested)
        return self._pack(fun_name, leaves, after, specs, names)

    def _user_call(self, caller: Caller, arrays: Retyped, built: Built) -> tuple[Any, Snapshot]:
        """What the user's function returns for the objects of the trace, as they were before."""
        statics = [assemble(c, iter(()), built.objects) for c in self.structure.statics]
        args, kwargs = join_call(self.signature, statics, built.root)
        slots, context = self.batch_slots, self.transform.context
        types = (getattr(jax.typeof(arrays.leaves[s]), "sharding", None) for s in slots)
        pure = dataclasses.replace(self, batch_axes=self.batch_axes | first_axes(types, context))
        tracing = self.transform.tracing(pure, caller, built, arrays.inside)
        with arrays.context(), tracing as call:
            before = Snapshot(self.structure, built.objects)
            return call(*args, **kwargs), before

    def _flatten_after(self, out: Any, built: Built, carried: Set[int], before: Snapshot) -> Flat:
        """The graph after the call, with the objects of the arguments first."""
        structure, updates, name = self.structure, self.updates, self.transform.name
        borrowed = {_compat.identity(static.value) for static in structure.identities()}
        nodes = {i for i, x in enumerate(structure.entries) if isinstance(x, NodeEntry)}
        after = flatten(
            out,
            graph=self.graph,
            known=built.objects,
            copied=frozenset() if updates else nodes - carried,
            borrowed=borrowed.union(
                _compat.identity(built.objects[i]) for i in structure.static_indices()
            ),
            snapshot=before,
        )
        if not self.graph:
            after.structure.check_tree()  # of the output
        check_objects(structure, after, self.targets, borrowed, name=name, updates=updates)
        if not updates:
            check_output(after, self.known, carried, name=name)
        return after

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
            unchanged = {
                slot: (-1, before)
                for slot, before in kept_places(self.structure, structure, index)
                if after.leaves[slot] is leaves[before]
                and before not in self.donated
                and specs[slot] == self.object_specs[before]
            }
            sources |= unchanged
            fresh = {slot for slot in slots if slot not in unchanged}
            if isinstance(entry, VariableEntry) and entry != old:
                metadata.append(index)
            elif isinstance(entry, VariableEntry) and fresh:
                values.append(index)
            elif isinstance(entry, NodeEntry) and isinstance(old, NodeEntry) and self.updates:
                change = node_changes(index, old, structure, fresh)
                nodes += [] if change is None else [change]
            elif isinstance(entry, StaticObject):
                statics.append(index)
        groups = self.group_specs()
        numbers = {spec: number for number, spec in enumerate(groups)}
        # The specs that the function in a prefix of `nnx.prefix` gives are not known before.
        unknown = [f"  {names[s]}: {x!r}" for s, x in enumerate(specs) if x not in numbers]
        raise_listed(
            ValueError,
            f"{self.transform.name}: nnx.prefix gives these new Variables what it gave none when "
            "it was called:",
            unknown,
            "Give its filters as StateSharding, or in vmap and scan as StateAxes.",
        )
        outputs: list[list[Any]] = [[] for _ in groups]
        labels: list[list[str]] = [[] for _ in groups]
        inputs = {_compat.identity(leaf): slot for slot, leaf in enumerate(leaves)}
        refs = structure.slots_of(RefEntry)
        for slot, leaf in enumerate(after.leaves):
            is_ref = slot in refs and _compat.is_ref(leaf)
            if is_ref and _compat.identity(leaf) in inputs:
                sources[slot] = (-1, inputs[_compat.identity(leaf)])
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
