"""Plans: what is computed once for all calls whose arguments have the same structure.

A *structure* (``structure.py``) is to a graph of modules what a treedef is to a pytree: all but the
arrays. It is a table of objects. The position of an object in the table is its *index*, and the
position of an array in the flat list of all arrays is its *slot*. A *spec* is a sharding, or a
dimension that is mapped. :func:`make_plan` finds, in this order,

    which spec belongs to which argument, and to which graph object in it    arguments.py
    the name of each array and Variable, such as ``model.up.kernel``         locations.py
    the one spec of each, by the user's filters                              resolve.py
    whether each spec fits the mesh and the shape, or the part that fits     spec_checks.py
    which arrays a call moves to their sharding before it runs

JAX finds a trace by the identity of the traced function. So a plan has one pure function, and one
program, for each *fingerprint*: a key for all that the function can read (``fingerprint.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import NamedSharding, Sharding

from .._compat import cached_property
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
from .in_c import items_getter
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

# The most programs of one plan, one for each fingerprint; the oldest are dropped.
MAX_PROGRAMS = 16
# Stands for the fingerprint in ``jit`` at top level, where what the function can reach does not
# matter: as in `jax.jit`, a program keeps what its first trace has captured.
NOT_ASKED = "not asked"

# The pure functions that JAX has traced for one user's function, by what the traces depend on.
TracedFunctions: TypeAlias = MutableMapping[Hashable, Callable[..., Any]]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """All that a call needs to know before its function is traced.

    A plan holds no arrays, no modules, and the user's function only weakly. A final spec is in the
    form that the transform uses: for ``jit`` a sharding on the mesh that applies.
    """

    transform: Transform  # the transform with the mesh that applies
    fun: Callable[[], Any]  # returns the user's function, or None if it is gone
    fun_name: str
    graph: bool  # whether shared references are kept, or refused (tree mode)
    updates: bool  # whether changes of structure are written back

    signature: Signature  # the roles of the arguments
    structure: Structure
    arguments: Sequence[Argument]  # the dynamic arguments and their parts, with the user's specs
    variables: Mapping[int, NamedSpec]  # the name and the final spec of each Variable, by index
    filter_uses: Sequence[FilterUse]  # what each ``StateSharding`` of the arguments decided

    # By slot, for all arrays:
    names: Sequence[str]  # the expression for the array: ``model.up.kernel``
    specs: Sequence[Any]  # the final spec, or None
    shardings: Sequence[Sharding | None]  # the declared sharding
    # By slot, for some arrays:
    on_indivisible: Mapping[int, OnIndivisible]  # overrides the option of the transform
    donated: frozenset[int]  # the slots of donated arrays; those in objects are always outputs
    attributes: Mapping[int, ArrayAttribute]  # arrays that are themselves attributes of modules
    # The arrays that a call moves to their declared shardings: those in Variables and attributes,
    # or all arrays if committed arrays may be moved.
    placed_slots: Sequence[int]
    placed_shardings: list[Sharding]
    pick_placed: Callable[[Sequence[Any]], Sequence[Any]]  # returns these arrays from all arrays
    # If activations are sharded: the arrays outside of objects without a declared sharding, and the
    # mesh axes that shard the first dimension of any array outside of objects.
    batch_slots: tuple[int, ...]
    batch_axes: frozenset[AxisName]

    traced: TracedFunctions  # the pure functions of ``fun``, which all its plans share
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

        ``fingerprint`` is the key for what the user's function can read besides its arguments, by
        which a program is found again. If it is None, this is unknown, and the program is new.
        """
        program = None if fingerprint is None else self.programs.get(fingerprint)
        if program is not None:
            return program
        program = self.transform.make_program(self, self.pure_function(fingerprint))
        if fingerprint is not None:
            # Another thread may have added a program first, and all threads have to use the same.
            program = self.programs.setdefault(fingerprint, program)
            make_room(self.programs, MAX_PROGRAMS)
        return program

    def pure_function(self, fingerprint: Hashable | None) -> Callable[..., Any]:
        """Returns the function of arrays that JAX traces; a new one if the fingerprint is None.

        JAX finds a trace by the identity of this function. So plans share the function if they
        differ only in what no trace depends on, such as compiler options.
        """
        key = self.trace_key, fingerprint
        function = None if fingerprint is None else self.traced.get(key)
        if function is None:
            # Logs of traces hold the plan of a pure function, but must not keep its programs.
            plan = dataclasses.replace(self, programs={}, reported={})
            function = pure_function(plan, self.fun())
            if fingerprint is not None:
                # Another thread may have added one first, and all threads have to use the same.
                function = self.traced.setdefault(key, function)
        return function

    @cached_property
    def trace_key(self) -> Hashable:
        """Everything on which a trace depends, besides the types of the arrays.

        Plans with equal keys share a trace, so all that decides what a trace does has to be here.
        """
        return (
            # The options of the transform, which arguments are static, and the arguments.
            self.transform.trace_key,
            self.signature._replace(donated=frozenset()),
            self.structure,
            self.graph,
            self.updates,
            # The specs of outputs: of Variables that the function creates, and of updated ones.
            self.graph_arguments,
            tuple(self.object_specs.items()),
            tuple(variable.spec for variable in self.variables.values()),
            tuple(self.on_indivisible.items()),
            # Donated arrays of objects are outputs even if they are unchanged. With ``strict``, a
            # trace checks that outputs can reuse the buffers. No trace depends on other donations.
            self.donated.intersection(self.object_specs),
            self.slots_to_reuse,
            # The types of arrays in the trace, and how activations are sharded.
            self.batch_axes,
            self.batch_slots,
            self.explicit_root_shardings,
        )

    @cached_property
    def graph_arguments(self) -> tuple[Argument, ...]:
        """The parts of arguments that are graph objects, which a function can change in place."""
        return tuple(argument.objects_only() for argument in self.arguments)

    @cached_property
    def object_specs(self) -> dict[int, Any]:
        """The final specs of all arrays that belong to objects, by slot."""
        open_spec, specs = self.transform.spec_of(None), self.specs
        slots = itertools.chain(*self.structure.slots)
        return {slot: open_spec if specs[slot] is None else specs[slot] for slot in slots}

    @cached_property
    def out_specs(self) -> tuple[Any, ...]:
        """All specs that an output can have, without duplicates.

        JAX has to know the shardings of outputs before it traces, when the number of outputs is
        unknown. So the pure function returns one group of outputs for each of these specs.
        """
        transform = self.transform
        # 1. The spec that leaves the decision to the compiler, and the specs that the transform
        # chooses: `vmap` stacks some arrays along axis 0. All are in final form.
        specs = [transform.spec_of(None), *transform.own_specs]
        # 2. The user's specs for outputs, and for arguments, because a function may add Variables
        # to an argument. A rule is one spec, or a `StateSharding` with a spec for each filter.
        in_rules = [part.spec for argument in self.graph_arguments for part in argument.parts]
        for rule in (*transform.out_specs.rules, *in_rules):
            if isinstance(rule, StateSharding):
                written, on_indivisible = rule.shardings, rule.on_indivisible
            else:
                written, on_indivisible = (rule,), None
            for spec in map(transform.spec_of, written):
                # If a spec does not divide a shape, a part of the spec may be used.
                specs += [spec, *transform.corrected(spec, on_indivisible)]
        # 3. The specs of the arrays that a call may update.
        specs += self.object_specs.values()
        return tuple(dict.fromkeys(specs))

    @cached_property
    def explicit_root_shardings(self) -> tuple[tuple[int, NamedSharding], ...]:
        """The declared shardings over Explicit axes of arrays outside of objects, by slot."""
        parts = {slot: explicit_part(self.specs[slot]) for slot in self.structure.root_slots}
        return tuple((slot, part) for slot, part in parts.items() if part is not None)

    @cached_property
    def slots_to_reuse(self) -> frozenset[int]:
        """The donated slots whose buffers an output has to use."""
        return self.donated if self.transform.strict else frozenset()

    @cached_property
    def _classes_and_statics(self) -> list[Any]:
        return values_in(self.structure)  # each `Static` holds the user's object weakly

    def reached_from(self, objects: Objects) -> Iterator[Any]:
        """Yields what a function can reach from arguments with these ``objects``, except arrays."""
        for item in self._classes_and_statics:
            yield item.value if isinstance(item, Static) else item
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
      parameters: the function's parameters, with the user's roles (static, donated).
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
    # Static values with arrays are refused, because the arrays would be constants of the program.
    check_static_places(structure, named_parts(arguments), signature.static_names)
    locations, names = _locate_arrays(transform, arguments, flat)
    # 2. One spec for each array, by slot: by the user's filters, by the transform, by its shape.
    resolved = resolve(locations, flat.objects, leaves, transform.spec_of)
    specs = transform.input_specs(resolved.slots, leaves)
    specs = fit_specs(transform, names, [*map(shape_of, leaves)], specs, resolved.on_indivisible)
    # 3. The arrays that a call moves to their shardings before it runs. A call can replace the
    # caller's array in a Variable or, with graph updates, in an attribute of a module.
    shardings = tuple(map(transform.sharding_of, specs))
    attributes = array_attributes(structure, leaves) if graph and updates else {}
    to_place = _shardings_to_place(transform, structure, shardings, attributes)  # by slot
    # 4. If activations are sharded: the arrays outside of objects, such as those of a batch. The
    # rows of activations are sharded as the rows of these arrays are.
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
        placed_slots=tuple(to_place),
        placed_shardings=list(to_place.values()),
        pick_placed=items_getter(tuple(to_place)),
        # Only the trace knows the types of arrays of the batch without a declared spec.
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
      call: the arguments; ``call.tree`` has the dynamic ones, positional and by keyword.
    """
    signature, option = call.signature, transform.in_name
    # A prefix of specs for each dynamic argument: (by position, by keyword).
    prefixes = align_specs(transform.in_specs.tree, parameters, signature, option)
    # The name of each positional argument in the function's signature, or ``args[2]``.
    names = [signature.names[position] for position in signature.dynamic]
    caller = f"{transform.name}: {option}"  # for messages
    return split_arguments(structure, call.tree, prefixes, names, caller)


def _locate_arrays(
    transform: Transform, arguments: Sequence[Argument], flat: Flat
) -> tuple[list[NamedLocation], list[str]]:
    """Returns where the Variables and arrays are in the arguments, and the name of each array.

    Raises one error for all arguments that are not arrays, or for all specs with unknown axes.

    Args:
      transform: the transform. A transform with shardings takes arrays only.
    """
    locations = locate(flat.structure, arguments)  # of Variables and bare arrays
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
      signature: says which arguments are donated, by position or by keyword.
      arguments: the dynamic arguments: the positional ones, then those by keyword.
    """
    keys = (*signature.dynamic, *signature.dynamic_keywords)  # the keys of ``arguments``
    pairs = zip(keys, arguments, strict=True)
    donated_names = {argument.name for key, argument in pairs if key in signature.donated}
    donated: set[int] = set()
    for named in locations:
        if named.argument.name in donated_names:
            donated.update(named.location.slots)
    # JAX refuses to donate references, which a program changes in place anyway.
    return frozenset(donated - structure.slots_of(RefEntry))


def _shardings_to_place(
    transform: Transform,
    structure: Structure,
    shardings: Sequence[Sharding | None],
    attributes: Mapping[int, ArrayAttribute],
) -> dict[int, Sharding]:
    """Returns the shardings to which a call moves arrays before it runs, by slot.

    Args:
      transform: the transform; JAX itself moves all other arrays, or raises an error.
      shardings: the declared sharding of each array, or None.
      attributes: the arrays that are attributes of modules, and that a call may replace, by slot.
    """
    declared = {slot: sharding for slot, sharding in enumerate(shardings) if sharding is not None}
    # The user wants committed arrays to be moved. JAX would refuse them, so the call moves all.
    if isinstance(transform, Sharded) and transform.on_committed == "move":
        return declared
    # A moved array replaces the caller's in a Variable or attribute, so it is moved only once. Any
    # other array, such as a plain argument, would be moved again in each call.
    kept = structure.slots_of(VariableEntry).union(attributes)
    return {slot: sharding for slot, sharding in declared.items() if slot in kept}


def _shards_activations(transform: Transform, arguments: Sequence[Argument]) -> bool:
    """Whether shardings of activations are declared, for the call or for an argument."""
    if getattr(transform, "activation_shardings", None) is not None:
        return True
    specs = (part.spec for argument in arguments for part in argument.parts)
    return any(getattr(spec, "activations", None) is not None for spec in specs)
