"""Finds the module of the user's model, and the pass, that each instruction of a program is for.

JAX names each operation after the calls of modules around it (`names.py`) and after transforms, and
XLA keeps the name in the instructions that it makes of the operation:

    %dot.7 = f32[8,64] dot(...), metadata={op_name="jit(step)/transpose(jvp(model))/up/dot_general"}
    in the backward pass (`transpose`) of `model.up`, the innermost path that is a module's

Module and pass together are the *place* of the instruction. If a name has no module in it, such as
that of a loss, the operation is *outside of modules*. XLA joins the names of operations that it
merges; the place of such an instruction is the innermost module around all of these operations.
Instructions that the compiler made have no name. Their place follows from the first rule that finds
one:

 1. A fusion or a call has the place of the last instruction in it that has one.
 2. An instruction that takes a parameter has the module of the parameter.
 3. An instruction has the innermost module around the nearest instructions that have a place, among
    those that it is computed from and those that are computed from it.
 4. If no instruction near has a place, the instruction has the place of the innermost call around
    its computation.
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
    """The module that an instruction belongs to, and whether it is for the backward pass.

    `line_places.py` uses a line of code, as ``file:line``, instead of the module.
    """

    path: str | None  # the path of the module; empty outside of modules, None if it is unknown
    backward: bool


UNKNOWN = Place(None, False)  # the place of an instruction for which no rule finds one

# Instructions that pass values on, or whose values are known before the program runs: they have
# no time of their own in the schedule.
_UNTIMED = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
# Instructions that consist of others, whose names may say what they are for.
_COMPOSED = {"fusion", "call", "async-start"}
# The most steps from an instruction without a place to the nearest instructions that have one. Only
# a few copies and slices lie between.
_MAX_DISTANCE = 8


class _Nearest(NamedTuple):
    """The known places at one distance from an instruction."""

    before: list[Place]  # places of instructions from which the instruction is computed
    after: list[Place]  # places of instructions that are computed from the instruction


class PlaceFinder:
    """Finds the places of the instructions of one program.

    A method that finds a place by one of the rules 1 to 3 returns None if it finds none, so that
    its caller tries the next rule. After rule 4, and in `places_of_schedule`, `UNKNOWN` says that
    there is none.

    Args:
      module: the program.
      module_paths: the paths of the user's modules.
      parameter_modules: for arguments that are parameters, by number, the paths of their modules.

    Attributes:
      _module: as given, like ``_module_paths`` and ``_parameter_modules``.
      _places_of_operations: the places that names of operations say, by the name; a cache.
      _places: the results of `place_of`, by the name of the instruction; a cache. None if rules 1
        to 3 find no place.
    """

    def __init__(
        self, module: Module, module_paths: Collection[str], parameter_modules: Mapping[int, str]
    ):
        self._module = module
        self._module_paths, self._parameter_modules = module_paths, parameter_modules
        self._places_of_operations: dict[str, Place] = {}
        self._places: dict[str, Place | None] = {}

    def place_of(self, instruction: Instruction) -> Place | None:
        """Finds the place of an instruction by its name, or by rules 1 to 3 of this file.

        Returns None if these find none. Callers then use :meth:`place_around` the computation of
        the instruction (rule 4).
        """
        name = instruction.name
        if name not in self._places:
            place = self._place_by_names(instruction)  # The instruction's own name, or rule 1.
            home = self._module.homes.get(name)  # the computation that the instruction is in
            # Rules 2 and 3 are not for instructions inside of a fusion: without a name, these have
            # the place of the fusion (rule 4).
            if place is None and home is not None and not self._module.runs[home].is_fused:
                place = self._place_nearby(Value(home, name))
            self._places[name] = place
        return self._places[name]

    def place_around(self, computation: str) -> Place:
        """Applies rule 4: returns the place of the innermost call around a computation.

        Calls without a place are passed over. Returns `UNKNOWN` if no call has one.
        """
        # ``around`` yields the calls innermost first, and the places are found one by one, so the
        # search ends at the first call with a place.
        places = (self.place_of(caller) for _, caller in self._module.around(computation))
        return next(filter(None, places), UNKNOWN)

    def place_of_collective(self, collective: Collective) -> Place:
        """Finds the place of a collective: by its report, else as for other instructions."""
        place = self._recorded_place(collective)
        instruction = self._module.maker(Value(collective.computation, collective.name))
        if place is None and instruction is not None:
            place = self.place_of(instruction)
        return place or self.place_around(collective.computation)

    def places_of_schedule(self, schedule: Iterable[str]) -> list[Place]:
        """Lists the place at each step of a schedule.

        A step without a place of its own gets the place of the step before, so that it does not
        split the time in which a module runs.

        Args:
          schedule: the names of instructions in the order in which they run. The program may lack
            some of them.
        """
        places: list[Place] = []
        place = UNKNOWN  # the place of the last step that has one
        for name in schedule:
            home = self._module.homes.get(name)  # None if the program lacks the instruction
            instruction = None if home is None else self._module.within[home][name]
            if instruction is not None and instruction.opcode not in _UNTIMED:
                place = self.place_of(instruction) or place
            places.append(place)
        return places

    # `line_places.py` overrides the next three methods, because there a place is a line. All other
    # methods find places through these three.

    def _written_place(self, instruction: Instruction) -> Place | None:
        """Reads the place from the name of the operation that the compiler made `instruction` of.

        Returns None for an instruction of the compiler's own.
        """
        return self._place_of_operation(instruction.operation)

    def _recorded_place(self, collective: Collective) -> Place | None:
        """Reads the place from the operation of a collective; None if that is unknown.

        The collective may have an operation even if its instruction has none, because
        `compiled_collectives.py` looks for the operation around the instruction, too.
        """
        return self._place_of_operation(collective.operation)

    def _joined(self, paths: Sequence[str], instruction: Instruction) -> str:
        """Returns the path of the innermost module around all that are near an instruction."""
        del instruction  # A subclass reads it.
        return common(paths)

    def _place_of_operation(self, operation: str | None) -> Place | None:
        """Reads the place from the name of an operation; None for one that the compiler chose.

        ``jit(step)/transpose(jvp(model))/up/dot_general`` is in ``model.up``, backward.
        """
        # JAX's names begin with the traced function, ``jit(step)/``. A name without a slash is the
        # compiler's own, or the path of a parameter.
        if operation is None or "/" not in operation:
            return None
        if operation not in self._places_of_operations:
            names = operations(operation)
            modules = [module_of(name, self._module_paths) for name in names]
            paths = [path for path in modules if path is not None]
            # JAX makes the backward pass by transposing what is linear in a tangent. An instruction
            # that XLA has merged from both passes counts as forward.
            backward = all("transpose(" in name for name in names)
            place = Place(common(paths) if paths else "", backward)
            self._places_of_operations[operation] = place
        return self._places_of_operations[operation]

    def _place_by_names(self, instruction: Instruction) -> Place | None:
        """Reads the place from the name of an instruction, else from those inside it (rule 1).

        Returns None if no name says a place.
        """
        place = self._written_place(instruction)
        if place is None and instruction.opcode in _COMPOSED:
            place = next(filter(None, map(self._place_inside, instruction.callees)), None)
        return place

    def _place_inside(self, callee: str) -> Place | None:
        """Finds the place of the last instruction of a computation that has one, else None."""
        computation = self._module.by_name.get(callee)
        instructions = computation.instructions if computation else []
        return next(filter(None, map(self._place_by_names, reversed(instructions))), None)

    def _place_nearby(self, value: Value) -> Place | None:
        """Applies rules 2 and 3 to the instruction of a value; None if nothing near has a place.

        A place outside of modules counts only if no place in a module is near.
        """
        within = self._module.within[value.computation]
        outside: Place | None = None  # the nearest place outside of modules
        # At distance 0 are the operands and the users of the instruction itself.
        for distance, (before, after) in enumerate(self._places_by_distance(value)):
            places = before + after
            if not places:
                continue
            # An instruction that is computed from the backward pass runs in the backward pass. One
            # that the backward pass uses may run in the forward pass, so it counts as backward only
            # if all places near are backward.
            is_from_backward = any(place.backward for place in before)
            backward = is_from_backward or all(place.backward for place in places)
            # The pass has to come from a neighbour, so rule 2 needs one as well.
            paths = self._modules_of_parameters(value) if distance == 0 else []  # rule 2
            paths = paths or [place.path for place in places if place.path]  # rule 3
            if paths:
                return Place(self._joined(paths, within[value.name]), backward)
            outside = outside or Place("", backward)
        return outside

    def _places_by_distance(self, value: Value) -> Iterator[_Nearest]:
        """Yields the places next to the instruction of a value, then those one step further, ….

        The search goes on only from instructions without a place, for `_MAX_DISTANCE` steps. A
        place outside of modules is a place, too, so it ends the search there.
        """
        within = self._module.within[value.computation]
        users = self._module.users[value.computation]
        seen = {value.name}
        # The names of instructions from which the search goes on, in both directions.
        from_before, from_after = {value.name}, {value.name}
        for _ in range(_MAX_DISTANCE):
            operands = {operand for name in from_before for operand in within[name].operand_names}
            before = (operands & within.keys()) - seen  # Damaged text may lack operands.
            seen |= before
            after = {user.instruction.name for name in from_after for user in users.get(name, ())}
            after -= seen
            seen |= after
            # Names are sorted, so that results do not depend on the order of sets.
            places = {name: self._place_by_names(within[name]) for name in sorted(before | after)}
            known_places = {name: place for name, place in places.items() if place is not None}
            yield _Nearest(
                before=[place for name, place in known_places.items() if name in before],
                after=[place for name, place in known_places.items() if name in after],
            )
            from_before = before - known_places.keys()
            from_after = after - known_places.keys()

    def _modules_of_parameters(self, value: Value) -> list[str]:
        """Lists the modules of the parameters that the instruction of a value takes.

        A parameter counts as taken even if copies, slices or transposes lie between, whether the
        user wrote them or the compiler.
        """
        paths = []
        for operand in self._module.operands(value):
            source = computing_value(self._module, operand, past_user_moves=True)
            number = self._module.argument(source)  # None if the source is no argument
            if number is not None and number in self._parameter_modules:
                paths.append(self._parameter_modules[number])
        return paths
