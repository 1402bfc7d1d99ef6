"""What is computed once per structure: specs, names, and the pure function transformed by JAX."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import jax
from flax import nnx

from .. import _compat
from .bounded import make_room
from .flatten import Flat
from .functions import name_of
from .problems import arguments_not_arrays
from .pure import Pure
from .reach import Reach, values_in
from .resolve import NamedLocation, locate, resolve, slot_names
from .retyping import first_axes
from .signature import Call, Parameters, Signature, align_specs
from .spec_checks import check_mesh, fit_specs, shape_of
from .static_equality import Static
from .static_places import check_static_places
from .structure import LEAF, NodeEntry, RefEntry, Structure, VariableEntry
from .targets import Target, argument_targets, named_parts
from .transform import Program, Sharded, Transform
from .unflatten import parts, picker

# The limit of programs of one plan, for functions that reach different things.
MAX_PROGRAMS = 16
# What ``jit`` has at top level in the place of a `Reach`: it does not ask.
NOT_ASKED = "not asked"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(Pure):
    """A pure function with all that a call needs once its arguments are split."""

    fun: Callable[[], Any]  # the user's function, held weakly
    fun_name: str  # its name
    arguments: list[Target]  # the dynamic arguments and their parts
    # the pure function for what the user's function can reach; JAX finds traces by it
    pure_function: Callable[[Hashable], Callable[..., Any]]
    # the pure functions, transformed by JAX, by what the user's function can reach
    programs: dict[Hashable, Program] = dataclasses.field(default_factory=dict)
    out_specs: tuple[Any, ...]  # all specs that outputs can have
    # the declared sharding of each slot, or None
    shardings: tuple[jax.sharding.Sharding | None, ...]
    # by slot, for arrays that are attributes of modules: the module and the name; empty if
    # those are not updated
    attributes: Mapping[int, tuple[int, Any]]
    # of Variables and these attributes; if committed arrays may be moved, of all
    placed_slots: tuple[int, ...]
    placed_shardings: list[jax.sharding.Sharding]  # the shardings of these slots
    pick_placed: Callable[[Sequence[Any]], Sequence[Any]]  # picks these slots from all arrays
    # what JAX has reported about an unfinished compilation
    reported: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def program(self) -> Program:
        """The program of ``jit`` at top level, which keeps what its first trace has captured."""
        return self._kept_program(NOT_ASKED)

    def program_for(self, reach: Reach | None) -> Program:
        """The program for what the function can reach now; a new one if that is not listed."""
        return self._compiled(None) if reach is None else self._kept_program(reach)

    def _kept_program(self, reach: Hashable) -> Program:
        program = self.programs.get(reach)
        if program is None:
            program = self.programs.setdefault(reach, self._compiled(reach))
            make_room(self.programs, MAX_PROGRAMS)
        return program

    def _compiled(self, reach: Hashable | None) -> Program:
        function, donated = self.pure_function(reach), tuple(sorted(self.donated))
        return self.transform.compile(self, function, self.specs, self.out_specs, donated)

    @functools.cached_property
    def _values(self) -> list[Any]:
        return values_in(self.structure)

    def reached_from(self, objects: Sequence[Any]) -> Iterator[Any]:
        """What a function can reach from its arguments, which are these objects, except arrays."""
        for value in self._values:
            yield value.value if isinstance(value, Static) else value
        for index in self.structure.static_indices():
            yield objects[index]


def plan_key(transform: Transform, call: Call, flat: Flat) -> Hashable:
    """All of a call on which its plan depends."""
    structure, leaves = flat.structure, flat.leaves
    # Only arrays of JAX that are attributes of modules are placed.
    others = {s for s, x in enumerate(leaves) if type(x) is not _compat.ArrayImpl}
    others = others and others.intersection(structure.slots_of(NodeEntry))
    others = {s for s in others if not isinstance(leaves[s], (jax.Array, jax.ShapeDtypeStruct))}
    return call.signature, structure, transform.key(leaves), frozenset(others)


def resolve_call(
    transform: Transform,
    parameters: Parameters,
    call: Call,
    flat: Flat,
    *,
    graph: bool,
    updates: bool,
) -> tuple[Pure, list[Target]]:
    """The pure function for a call, and the arguments with the specs that the user wrote.

    All that is wrong with arguments and specs is found here, except for what the function returns.
    """
    transform = transform.in_context()
    signature, structure, leaves = call.signature, flat.structure, flat.leaves
    if not graph:
        structure.check_tree()
    prefixes = align_specs(transform.in_specs.tree, parameters, signature, transform.in_name)
    positional = [signature.names[i] for i in signature.dynamic]
    option = f"{transform.name}: {transform.in_name}"
    arguments = argument_targets(structure, call.tree, prefixes, positional, option)
    check_static_places(structure, named_parts(arguments), signature.static_names)
    locations = locate(structure, arguments)
    names = [
        name or f"array {slot}" for slot, name in enumerate(slot_names(len(leaves), locations))
    ]
    if isinstance(transform, Sharded):
        if error := arguments_not_arrays(names, leaves):
            raise error
        check_mesh(transform, locations, flat.objects, leaves)
    resolved = resolve(locations, flat.objects, leaves, transform.spec_of)
    specs = fit_specs(
        transform,
        names,
        list(map(shape_of, leaves)),
        transform.input_specs(resolved.slots, leaves),
        resolved.on_indivisible,
    )
    written = (part.spec for target in arguments for part in target.parts)
    declared = [getattr(spec, "activations", None) for spec in written]
    declared.append(getattr(transform, "activation_shardings", None))
    batch = structure.root_slots if any(x is not None for x in declared) else ()
    pure = Pure(
        transform=transform,
        signature=signature,
        structure=structure,
        targets=tuple(target.objects_only() for target in arguments),
        names=names,
        specs=tuple(specs),
        known=_known_variables(locations, specs, transform.spec_of(None), resolved.variables),
        on_indivisible=resolved.on_indivisible,
        donated=_donated_slots(structure, signature, arguments, locations),
        uses=tuple(resolved.uses),
        graph=graph,
        updates=updates,
        batch_axes=first_axes((specs[slot] for slot in batch), transform.context),
        batch_slots=tuple(slot for slot in batch if not specs[slot]),
    )
    return pure, arguments


def make_plan(
    fun: Callable[..., Any],
    pure: Pure,
    arguments: list[Target],
    leaves: Sequence[Any],
    traced: MutableMapping[Hashable, Callable[..., Any]],
) -> Plan:
    """Makes the plan for a structure.

    ``traced`` has the functions that JAX has traced for ``fun``, so that options that do not affect
    the trace, such as compiler options, do not cause another one.
    """
    weak, name = _weak(fun), name_of(fun)

    def pure_function(reach: Hashable | None) -> Callable[..., Any]:
        if reach is None:
            return pure.function(weak())
        key = pure.key, reach
        function = traced.get(key)
        return traced.setdefault(key, pure.function(weak())) if function is None else function

    transform, groups = pure.transform, pure.group_specs()
    shardings = tuple(map(transform.sharding_of, pure.specs))
    attributes = _attributes(pure.structure, leaves) if pure.graph and pure.updates else {}
    placed = {slot: sharding for slot, sharding in enumerate(shardings) if sharding is not None}
    if not isinstance(transform, Sharded) or transform.on_committed != "move":
        kept = pure.structure.slots_of(VariableEntry).union(attributes)
        placed = {slot: sharding for slot, sharding in placed.items() if slot in kept}
    return Plan(
        **{field.name: getattr(pure, field.name) for field in dataclasses.fields(pure)},
        fun=weak,
        fun_name=name,
        arguments=arguments,
        pure_function=pure_function,
        out_specs=groups,
        shardings=shardings,
        attributes=attributes,
        placed_slots=tuple(placed),
        placed_shardings=list(placed.values()),
        pick_placed=picker(tuple(placed)),
    )


def _attributes(structure: Structure, leaves: Sequence[Any]) -> dict[int, tuple[int, Any]]:
    """The slots of JAX arrays that are attributes of modules, each with its module and name."""
    return {
        slots[0]: (index, key)
        for index, entry in enumerate(structure.entries)
        if isinstance(entry, NodeEntry) and structure.slots[index]
        if issubclass(entry.type, nnx.Pytree)
        for key, (child, slots) in parts(structure, index).items()
        if child is LEAF and isinstance(leaves[slots[0]], (jax.Array, jax.ShapeDtypeStruct))
    }


def _donated_slots(
    structure: Structure,
    signature: Signature,
    arguments: Sequence[Target],
    locations: Sequence[NamedLocation],
) -> frozenset[int]:
    are_donated = [i in signature.donated for i in signature.dynamic]
    are_donated += [k in signature.donated_keywords for k in signature.dynamic_keywords]
    donated = {target.name for target, given in zip(arguments, are_donated, strict=True) if given}
    in_donated = (x.location.slots for x in locations if x.target.name in donated)
    return frozenset(slot for slots in in_donated for slot in slots) - structure.slots_of(RefEntry)


def _known_variables(
    locations: Sequence[NamedLocation],
    specs: Sequence[Any],
    open_spec: Any,
    declared: Mapping[int, tuple[str, Any]],
) -> dict[int, tuple[str, Any]]:
    """The first name and the spec of each Variable: the declared one if it holds no array yet."""
    known: dict[int, tuple[str, Any]] = {}
    for found in locations:
        index, slots = found.location.entry, found.location.slots
        if index is not None and index not in known:
            spec = specs[slots[0]] if slots else declared.get(index, ("", None))[1]
            known[index] = found.name, open_spec if slots and spec is None else spec
    return known


def _weak(fun: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(fun)
    except TypeError:  # some NumPy callables; nothing is kept for them beyond their wrappers
        return lambda: fun
