"""Finds the module of the user's model, and the pass, that each instruction of a program is for.

Each operation is named after the calls of modules around it (`names.py`) and after JAX's
transforms, and XLA keeps the name in the instructions that it makes of the operation:

    %dot.7 = f32[8,64] dot(...), metadata={op_name="jit(step)/transpose(jvp(model))/up/dot_general"}
    in the backward pass (`transpose`) of `model.up`, the innermost path that is a module's

This module and pass are the *place* of the instruction. An operation that has a name, but no module
in it, such as a loss, is outside of modules. XLA joins the names of operations that it merges: then
the place is the innermost module around all of them. Instructions that the compiler made have no
name. The first of these rules that finds a place decides:

 1. A fusion or a call has the place of the last instruction in it that has one.
 2. What takes a parameter has the module of the parameter.
 3. Otherwise it is the module around the nearest instructions that have a place, among those that
    it is computed from and those that are computed from it.
 4. Without any near, it is the place of the innermost instruction that calls the computation.

From other modules:

    Module      the HLO program. By the name of a computation, ``around`` are the calls around it,
                ``within`` its instructions, ``users`` the instructions that use each of them;
                ``homes`` is the computation of an instruction
    Value       an array: a computation, and the name of the instruction in it
    argument    the number of the argument that a value is; None for others
    module_of   the path of the innermost module in the name of an operation; None for none
    common      the innermost module around all of several; empty without one
    operations  the names that XLA has joined to the name of one instruction
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .collectives import Collective
from .hlo import Module
from .instructions import Instruction
from .moves import computing_value
from .names import common, module_of, operations
from .values import Value


class Place(NamedTuple):
    """The module that something belongs to, and whether it is for the backward pass.

    `line_places.py` has a line of code, as ``file:line``, in place of the module.
    """

    path: str | None  # empty outside of modules, None if it is unknown
    backward: bool


UNKNOWN = Place(None, False)

# Instructions that pass values on, or whose values are known before the program runs: they have
# no time of their own in the schedule.
_UNTIMED = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
# Instructions that consist of others, whose names may say what they are for.
_COMPOSED = {"fusion", "call", "async-start"}
# From an instruction without a name to the nearest ones that have one: a few copies and slices.
_MAX_DISTANCE = 8


class _Nearest(NamedTuple):
    """The known places at one distance from an instruction."""

    before: list[Place]  # of what it is computed from
    after: list[Place]  # of what is computed from it


class PlaceFinder:
    """Finds the places of the instructions of one program.

    Args:
      module: the program.
      module_paths: the paths of the user's modules.
      parameter_modules: for arguments that are parameters, by number, the paths of their modules.
    """

    def __init__(
        self, module: Module, module_paths: Collection[str], parameter_modules: Mapping[int, str]
    ):
        self._module = module
        self._module_paths, self._parameter_modules = module_paths, parameter_modules
        self._places_of_operations: dict[str, Place] = {}  # by the name of the operation
        self._places: dict[str, Place | None] = {}  # by the name of the instruction

    def place_of(self, instruction: Instruction) -> Place | None:
        """Finds the place of an instruction by its name, or by rules 1 to 3 of this file.

        Returns None if these find none; then :meth:`place_around` its computation counts (rule 4).
        """
        name = instruction.name
        if name not in self._places:
            place = self._place_by_names(instruction)  # its own, or rule 1
            home = self._module.homes.get(name)  # the computation that it is in
            # What is fused into one kernel has the place of the fusion, if it has no name itself.
            if place is None and home is not None and not self._module.runs[home].is_fused:
                place = self._place_nearby(Value(home, name))  # rules 2 and 3
            self._places[name] = place
        return self._places[name]

    def place_around(self, computation: str) -> Place:
        """Applies rule 4: the place of the innermost call around a computation that has a place."""
        places = (self.place_of(caller) for _, caller in self._module.around(computation))
        return next(filter(None, places), UNKNOWN)

    def place_of_collective(self, collective: Collective) -> Place:
        """Finds the place of a collective: by its own record, else as for other instructions."""
        place = self._recorded_place(collective)
        instruction = self._module.maker(Value(collective.computation, collective.name))
        if place is None and instruction is not None:
            place = self.place_of(instruction)
        return place or self.place_around(collective.computation)

    def places_of_schedule(self, schedule: Iterable[str]) -> list[Place]:
        """Lists the place at each step of a schedule.

        A step without a place of its own counts with the one before, so that it does not split the
        time in which a module runs.

        Args:
          schedule: the names of instructions in the order in which they run. The program may lack
            some of them.
        """
        places: list[Place] = []
        place = UNKNOWN
        for name in schedule:
            home = self._module.homes.get(name)  # the computation that has it
            instruction = None if home is None else self._module.within[home][name]
            if instruction is not None and instruction.opcode not in _UNTIMED:
                place = self.place_of(instruction) or place
            places.append(place)
        return places

    # What `line_places.py` replaces, where a place is a line:

    def _written_place(self, instruction: Instruction) -> Place | None:
        """Reads the place from what the compiler kept of the user's operation.

        Returns None for an instruction of the compiler's own.
        """
        return self._place_of_operation(instruction.operation)

    def _recorded_place(self, collective: Collective) -> Place | None:
        """Reads the place from the operation of a collective; None if that is unknown.

        It may be known though the instruction has none: `collectives.py` looks for it.
        """
        return self._place_of_operation(collective.operation)

    def _joined(self, paths: Sequence[str]) -> str:
        """Returns the path of what serves several: the innermost module around all of them."""
        return common(paths)

    def _place_of_operation(self, operation: str | None) -> Place | None:
        """Reads the place from the name of an operation; None for one that the compiler chose.

        ``jit(step)/transpose(jvp(model))/up/dot_general`` is in ``model.up``, backward.
        """
        # JAX's names begin with that of the traced function, ``jit(step)/``. A name without a slash
        # is the compiler's own, or the path of a parameter.
        if operation is None or "/" not in operation:
            return None
        if operation not in self._places_of_operations:
            names = operations(operation)
            modules = [module_of(name, self._module_paths) for name in names]
            paths = [path for path in modules if path is not None]
            # JAX makes the backward pass by transposing what is linear in a tangent. What XLA has
            # merged of both passes is of the forward pass.
            backward = all("transpose(" in name for name in names)
            place = Place(common(paths) if paths else "", backward)
            self._places_of_operations[operation] = place
        return self._places_of_operations[operation]

    def _place_by_names(self, instruction: Instruction) -> Place | None:
        """Reads the place from an instruction, else from what is in it (rule 1); None for none."""
        place = self._written_place(instruction)
        if place is None and instruction.opcode in _COMPOSED:
            place = next(filter(None, map(self._place_inside, instruction.callees)), None)
        return place

    def _place_inside(self, callee: str) -> Place | None:
        """Finds the place of the last instruction of a computation that has one."""
        computation = self._module.by_name.get(callee)
        instructions = computation.instructions if computation else []
        return next(filter(None, map(self._place_by_names, reversed(instructions))), None)

    def _place_nearby(self, value: Value) -> Place | None:
        """Applies rules 2 and 3 to the instruction of a value; None if nothing near has a place.

        Instructions outside of modules count if no others are near.
        """
        outside: Place | None = None  # the nearest place outside of modules
        # At distance 0 are the operands and the users of the instruction itself.
        for distance, (before, after) in enumerate(self._places_by_distance(value)):
            places = before + after
            if not places:
                continue
            # What is computed from the backward pass runs in it; what the backward pass uses may be
            # of the forward pass, unless nothing else is near.
            is_from_backward = any(place.backward for place in before)
            backward = is_from_backward or all(place.backward for place in places)
            # The pass has to come from a neighbour, so rule 2 needs one as well.
            paths = self._modules_of_parameters(value) if distance == 0 else []  # rule 2
            paths = paths or [place.path for place in places if place.path]  # rule 3
            if paths:
                return Place(self._joined(paths), backward)
            outside = outside or Place("", backward)
        return outside

    def _places_by_distance(self, value: Value) -> Iterator[_Nearest]:
        """Yields the places next to the instruction of a value, then those one step further, ….

        The search goes on from instructions without a name only, for `_MAX_DISTANCE` steps. A place
        outside of modules is a place, too.
        """
        within = self._module.within[value.computation]
        users = self._module.users[value.computation]
        seen = {value.name}
        before = after = {value.name}  # the names of instructions from which the search goes on
        for _ in range(_MAX_DISTANCE):
            before = {x for name in before for x in within[name].operand_names if x in within}
            before -= seen
            seen |= before
            after = {user.instruction.name for name in after for user in users.get(name, ())}
            after -= seen
            seen |= after
            # In the order of names, so that results do not depend on the order of sets.
            places = {name: self._place_by_names(within[name]) for name in sorted(before | after)}
            yield _Nearest(
                before=[x for name, x in places.items() if x is not None and name in before],
                after=[x for name, x in places.items() if x is not None and name in after],
            )
            before = {name for name in before if places[name] is None}
            after = {name for name in after if places[name] is None}

    def _modules_of_parameters(self, value: Value) -> list[str]:
        """Lists the modules of the parameters that the instruction of a value takes.

        Also of those that only copies, slices or transposes are between, by the user or not.
        """
        paths = []
        for operand in self._module.operands(value):
            source = computing_value(self._module, operand, past_user_moves=True)
            number = self._module.argument(source)  # None for what is computed
            if number is not None and number in self._parameter_modules:
                paths.append(self._parameter_modules[number])
        return paths
