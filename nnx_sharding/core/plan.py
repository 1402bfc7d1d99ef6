"""Plans: what is computed once for all calls whose arguments have the same structure.

A *structure* (``structure.py``) is to a graph of modules what a treedef is to a pytree: all but the
arrays. It is a table of objects, in which each has an *index*; the arrays are in a flat list, in
which each has a *slot*. A *spec* is a sharding, or a dimension that is mapped. :func:`make_plan`
finds, in this order,

    which spec belongs to which argument, and to which graph object in it    arguments.py
    the name of each array and Variable, such as ``model.up.kernel``         locations.py
    the one spec of each, by the user's filters                              resolve.py
    whether the spec fits the mesh and the shape, or what is left of it      spec_checks.py
    which arrays a call moves to their sharding before it runs

JAX finds a trace by the identity of the traced function. So a plan has one pure function, and one
program, for each *fingerprint*: a key for all that the function can read (``fingerprint.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, Sharding

from ..specs.fitting import OnIndivisible, explicit_part, first_axes
from ..specs.state_sharding import StateSharding
from ..specs.types import AxisName, Objects
from .argument_specs import align_specs
from .arguments import Argument, named_parts, split_arguments
from .bounded import make_room
from .constrain import shape_of
from .filter_uses import FilterUse
from .fingerprint import values_in
from .flatten import Flat
from .functions import name_of, weak_function
from .locations import NamedLocation, locate, slot_names
from .problems import arguments_not_arrays
from .pure import pure_function
from .rebuild import ArrayAttribute, array_attributes
from .resolve import NamedSpec, name_variables, resolve
from .signature import Parameters, Signature, SortedCall
from .spec_checks import check_axes, fit_specs
from .static_equality import Static
from .static_places import check_static_places
from .structure import RefEntry, Structure, VariableEntry
from .transform import Program, Sharded, Transform
from .unflatten import items_getter

# Programs of one plan, for functions that reach different things; the oldest are dropped.
MAX_PROGRAMS = 16
# The fingerprint of ``jit`` at top level, which does not ask what its function can reach.
NOT_ASKED = "not asked"

# The pure functions that JAX has traced for one user's function, by what the traces depend on.
TracedFunctions: TypeAlias = MutableMapping[Hashable, Callable[..., Any]]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """All that a call needs to know before its function is traced.

    It holds no arrays, no modules, and the user's function only weakly: ``fun`` returns it. A final
    spec is in the form that the transform uses: for ``jit`` a sharding on the mesh that applies.
    """

    transform: Transform  # with the mesh that applies
    fun: Callable[[], Any]  # returns the user's function, or None if it is gone
    fun_name: str
    graph: bool  # whether shared references are kept, or refused (tree mode)
    updates: bool  # whether changes of structure are written back

    signature: Signature  # the roles of the arguments
    structure: Structure
    arguments: Sequence[Argument]  # the dynamic arguments and their parts, with the user's specs
    variables: Mapping[int, NamedSpec]  # the name and the final spec of each Variable, by index
    filter_uses: Sequence[FilterUse]  # what each ``StateSharding`` of the arguments decided

    # Of each array, by slot:
    names: Sequence[str]  # the expression for it: ``model.up.kernel``
    specs: Sequence[Any]  # the final spec, or None
    shardings: Sequence[Sharding | None]  # the declared sharding
    # Of some arrays, by slot:
    on_indivisible: Mapping[int, OnIndivisible]  # before the option of the transform
    donated: frozenset[int]  # donated arrays of objects are always outputs
    attributes: Mapping[int, ArrayAttribute]  # JAX arrays in modules themselves, by slot
    # The arrays that a call moves to their declared shardings: of Variables and these attributes,
    # and if committed arrays may be moved, all.
    placed_slots: Sequence[int]
    placed_shardings: list[Sharding]
    pick_placed: Callable[[Sequence[Any]], Sequence[Any]]  # picks them from all arrays
    # If activations are sharded: the arrays outside of objects without a declared sharding, and the
    # mesh axes that shard the first dimension of any such array.
    batch_slots: tuple[int, ...]
    batch_axes: frozenset[AxisName]

    traced: TracedFunctions
    # The programs that JAX made, by the fingerprint of the user's function.
    programs: dict[Hashable, Program] = dataclasses.field(default_factory=dict)
    # What JAX has reported about an unfinished compilation.
    reported: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def program(self) -> Program:
        """The program of ``jit`` at top level, which keeps what its first trace has captured."""
        return self.program_for(NOT_ASKED)

    def program_for(self, fingerprint: Hashable | None) -> Program:
        """Returns the transformed function of arrays, such as ``jax.jit(pure)``.

        ``fingerprint`` is the key for what the user's function can read besides its arguments: if
        it is equal, a program is used again. If it is None, that is unknown, and the program new.
        """
        program = None if fingerprint is None else self.programs.get(fingerprint)
        if program is not None:
            return program
        program = self.transform.make_program(self, self.pure_function(fingerprint))
        if fingerprint is not None:
            # Another thread may have been first; all have to use the same one.
            program = self.programs.setdefault(fingerprint, program)
            make_room(self.programs, MAX_PROGRAMS)
        return program

    def pure_function(self, fingerprint: Hashable | None) -> Callable[..., Any]:
        """Returns the function of arrays that JAX traces; a new one if the fingerprint is None.

        JAX finds a trace by the identity of this function. So plans that differ only in what no
        trace depends on, such as compiler options, share it.
        """
        # What a trace depends on: of the call, and of what the user's function can read otherwise.
        key = self.trace_key, fingerprint
        function = None if fingerprint is None else self.traced.get(key)
        if function is None:
            # Logs of traces hold the plan of a pure function, but must not keep its programs.
            plan = dataclasses.replace(self, programs={}, reported={})
            function = pure_function(plan, self.fun())
            if fingerprint is not None:
                # Another thread may have been first; all have to use the same one.
                function = self.traced.setdefault(key, function)
        return function

    @functools.cached_property
    def trace_key(self) -> Hashable:
        """Everything on which a trace depends, besides the types of the arrays.

        Plans with equal keys share a trace, so all that decides what a trace does has to be here.
        """
        return (
            # What is called, and how.
            self.transform.trace_key,  # the options of the transform
            self.signature._replace(donated=frozenset()),  # which arguments are static
            self.structure,  # the arguments
            self.graph,
            self.updates,
            # The specs of outputs: of what is new in arguments, and of what the call updates.
            self.graph_arguments,
            tuple(self.object_specs.items()),
            tuple(variable.spec for variable in self.variables.values()),
            tuple(self.on_indivisible.items()),
            # Donation: arrays of objects are then outputs even if unchanged, and with ``strict``, a
            # trace checks that outputs can reuse the buffers. Otherwise, only the program differs.
            self.donated.intersection(self.object_specs),
            self.slots_to_reuse,
            # The types of arrays in the trace, and how activations are sharded.
            self.batch_axes,
            self.batch_slots,
            self.explicit_root_shardings,
        )

    @functools.cached_property
    def graph_arguments(self) -> tuple[Argument, ...]:
        """The arguments with graph objects only: what a function can change in place."""
        return tuple(argument.objects_only() for argument in self.arguments)

    @functools.cached_property
    def object_specs(self) -> dict[int, Any]:
        """The final specs of all arrays that belong to objects, by slot."""
        open_spec, specs = self.transform.spec_of(None), self.specs
        slots = itertools.chain(*self.structure.slots)
        return {slot: open_spec if specs[slot] is None else specs[slot] for slot in slots}

    @functools.cached_property
    def out_specs(self) -> tuple[Any, ...]:
        """All specs that an output can have, without duplicates.

        JAX has to know the shardings of outputs before it traces, when their number is unknown. So
        the pure function returns one group of outputs for each of these.
        """
        transform = self.transform
        # 1. No spec, which leaves the decision to the compiler, and what the transform itself may
        # choose: `vmap` stacks some arrays along axis 0. All are in final form.
        specs = [transform.spec_of(None), *transform.own_specs]
        # 2. What the user wrote for outputs, and for arguments, in which a function may create
        # something: one spec each, or a `StateSharding` with one for each filter.
        in_rules = [part.spec for argument in self.graph_arguments for part in argument.parts]
        for rule in (*transform.out_specs.rules, *in_rules):
            if isinstance(rule, StateSharding):
                written, on_indivisible = rule.shardings, rule.on_indivisible
            else:
                written, on_indivisible = (rule,), None
            for spec in map(transform.spec_of, written):
                # Also what may be left of it where it does not divide a shape.
                specs += [spec, *transform.corrected(spec, on_indivisible)]
        # 3. The specs of the arrays that a call may update.
        specs += self.object_specs.values()
        return tuple(dict.fromkeys(specs))

    @functools.cached_property
    def explicit_root_shardings(self) -> tuple[tuple[int, NamedSharding], ...]:
        """The declared shardings over Explicit axes of arrays outside of objects, by slot."""
        parts = {slot: explicit_part(self.specs[slot]) for slot in self.structure.root_slots}
        return tuple((slot, part) for slot, part in parts.items() if part is not None)

    @functools.cached_property
    def slots_to_reuse(self) -> frozenset[int]:
        """The donated slots whose buffers an output has to use."""
        return self.donated if self.transform.strict else frozenset()

    @functools.cached_property
    def _values(self) -> list[Any]:
        return values_in(self.structure)  # statics hold the user's objects weakly

    def reached_from(self, objects: Objects) -> Iterator[Any]:
        """Yields what a function can reach from its arguments, these objects, except arrays."""
        for value in self._values:
            yield value.value if isinstance(value, Static) else value
        for index in self.structure.static_indices():
            yield objects[index]


def make_plan(
    fun: Callable[..., Any],
    transform: Transform,
    parameters: Parameters,
    call: SortedCall,
    flat: Flat,
    traced: TracedFunctions,
    *,
    graph: bool,
    updates: bool,
) -> Plan:
    """Makes the plan for all calls with the structure of this one; raises errors for wrong specs.

    Args:
      fun: the user's function.
      transform: the transform, with the user's options.
      parameters: those of the function, with the roles that the user gave them (static, donated).
      call: the arguments by their roles.
      flat: the same arguments, flattened.
      traced: the pure functions that JAX has traced for ``fun``; the plan adds its own.
      graph: whether shared references are kept, or refused (tree mode).
      updates: whether changes of structure are written back.
    """
    transform = transform.in_context()  # with the mesh that applies now
    signature, structure, leaves = call.signature, flat.structure, flat.leaves
    if not graph:
        structure.check_tree()
    # 1. The parts of the arguments with the user's specs, then each Variable and array in them.
    arguments = _arguments(transform, parameters, call, structure)
    # Static values with arrays are refused, as these would become constants of the program.
    check_static_places(structure, named_parts(arguments), signature.static_names)
    locations, names = _locate_arrays(transform, arguments, flat)
    # 2. One spec for each array, by slot: by the user's filters, by the transform, by its shape.
    resolved = resolve(locations, flat.objects, leaves, transform.spec_of)
    specs = transform.input_specs(resolved.slots, leaves)
    specs = fit_specs(transform, names, [*map(shape_of, leaves)], specs, resolved.on_indivisible)
    # 3. The arrays that a call moves to their shardings before it runs. It can replace the caller's
    # array if that is in a Variable or, with graph updates, an attribute of a module.
    shardings = tuple(map(transform.sharding_of, specs))
    attributes = array_attributes(structure, leaves) if graph and updates else {}
    placed = _placed(transform, structure, shardings, attributes)  # slot → sharding
    # 4. If activations are sharded: the arrays outside of objects, such as those of a batch. How
    # the rows of these are sharded is how the rows of activations are.
    batch = structure.root_slots if _shards_activations(transform, arguments) else ()
    return Plan(
        transform=transform,
        fun=weak_function(fun),
        fun_name=name_of(fun),
        graph=graph,
        updates=updates,
        signature=signature,
        structure=structure,
        arguments=arguments,
        variables=name_variables(locations, specs, transform.spec_of(None), resolved),
        filter_uses=resolved.filter_uses,
        names=names,
        specs=tuple(specs),
        shardings=shardings,
        on_indivisible=resolved.on_indivisible,
        donated=_donated_slots(structure, signature, arguments, locations),
        attributes=attributes,
        placed_slots=tuple(placed),
        placed_shardings=list(placed.values()),
        pick_placed=items_getter(tuple(placed)),
        # Arrays of the batch without a declared spec: their types are only known in the trace.
        batch_slots=tuple(slot for slot in batch if not specs[slot]),
        batch_axes=first_axes((specs[slot] for slot in batch), transform.context),
        traced=traced,
    )


def _arguments(
    transform: Transform, parameters: Parameters, call: SortedCall, structure: Structure
) -> list[Argument]:
    """Returns the dynamic arguments, each with the specs that the user gave for its parts.

    Args:
      transform: has the user's specs (``in_specs``).
      parameters: those of the user's function.
      call: its arguments; ``call.tree`` are the dynamic ones, positional and by keyword.
      structure: describes them.
    """
    signature, option = call.signature, transform.in_name
    # A prefix of specs for each dynamic argument: (positional ones, those by keyword).
    prefixes = align_specs(transform.in_specs.tree, parameters, signature, option)
    # The name of each positional one in the function's signature, or ``args[2]``.
    names = [signature.names[position] for position in signature.dynamic]
    caller = f"{transform.name}: {option}"  # for messages
    return split_arguments(structure, call.tree, prefixes, names, caller)


def _locate_arrays(
    transform: Transform, arguments: Sequence[Argument], flat: Flat
) -> tuple[list[NamedLocation], list[str]]:
    """Returns where the Variables and arrays are in the arguments, and the name of each array.

    Raises one error for all arguments that are not arrays, or for all specs with unknown axes.

    Args:
      transform: those with shardings take arrays only.
      arguments: the dynamic arguments, with the user's specs.
      flat: the same, flattened.
    """
    locations = locate(flat.structure, arguments)
    expressions = slot_names(len(flat.leaves), locations)  # "" for an array without one
    names = [expression or f"array {slot}" for slot, expression in enumerate(expressions)]
    if isinstance(transform, Sharded):
        if error := arguments_not_arrays(names, flat.leaves):
            raise error
        check_axes(transform, locations, flat.objects, flat.leaves)
    return locations, names


def _donated_slots(
    structure: Structure,
    signature: Signature,
    arguments: Sequence[Argument],
    locations: Sequence[NamedLocation],
) -> frozenset[int]:
    """Returns the slots of the arrays in donated arguments, which JAX may overwrite.

    Args:
      structure: describes all arguments.
      signature: says which arguments are donated, by position or by keyword.
      arguments: the dynamic arguments: the positional ones, then those by keyword.
      locations: where the arrays are.
    """
    keys = (*signature.dynamic, *signature.dynamic_keywords)  # of the arguments, in their order
    pairs = zip(keys, arguments, strict=True)
    donated_names = {argument.name for key, argument in pairs if key in signature.donated}
    donated: set[int] = set()
    for named in locations:
        if named.argument.name in donated_names:
            donated.update(named.location.slots)
    # JAX refuses to donate references, which a program changes in place anyway.
    return frozenset(donated - structure.slots_of(RefEntry))


def _placed(
    transform: Transform,
    structure: Structure,
    shardings: Sequence[Sharding | None],
    attributes: Mapping[int, ArrayAttribute],
) -> dict[int, Sharding]:
    """Returns the shardings to which a call moves arrays before it runs, by slot.

    Args:
      transform: the transform; JAX itself moves what a call does not, or raises an error.
      structure: describes the arguments.
      shardings: the declared sharding of each array, or None.
      attributes: the arrays that are attributes of modules, and that a call may replace, by slot.
    """
    declared = {slot: sharding for slot, sharding in enumerate(shardings) if sharding is not None}
    # The user wants arrays from any devices to be moved, which JAX refuses.
    if isinstance(transform, Sharded) and transform.on_committed == "move":
        return declared
    # The moved arrays replace the caller's in Variables and attributes, so that each is moved once.
    # Any other array, such as a plain argument, would be moved again in each call.
    kept = structure.slots_of(VariableEntry).union(attributes)
    return {slot: sharding for slot, sharding in declared.items() if slot in kept}


def _shards_activations(transform: Transform, arguments: Sequence[Argument]) -> bool:
    """Whether shardings of activations are declared, for the call or for an argument."""
    if getattr(transform, "activation_shardings", None) is not None:
        return True
    specs = (part.spec for argument in arguments for part in argument.parts)
    return any(getattr(spec, "activations", None) is not None for spec in specs)
