"""Attributes the work and the memory of a compiled program to modules of the user's model.

**Instructions.** Each operation is named after the calls of modules around it (`names.py`) and
after JAX's transforms, and XLA keeps the name in the instructions that it makes of the operation:

    %dot.7 = f32[8,64] dot(...), metadata={op_name="jit(step)/transpose(jvp(model))/up/dot_general"}
    in the backward pass (`transpose`) of `model.up`, the innermost path that is a module's

This module and pass are the *place* of an instruction. Operations that have a name, but no module
in it, such as a loss, are outside of modules; the update of an optimizer is named after that. XLA
joins the names of operations that it merges: then the place is the innermost module around all of
them. Instructions that the compiler made have no such name. Their place is, in this order, that of

 1. the last instruction in it that has one, if it is a fusion or a call;
 2. the module of a parameter that it is given;
 3. the module around the nearest instructions that it is computed from, or that are computed from
    it (`_place_nearby`);
 4. the innermost instruction around it.

Each instruction has one place, also `UNKNOWN`, so that flops, bytes accessed and bytes sent sum to
the totals.

**Arrays in memory** have the name of the instruction that makes them. Of these rules the first that
applies says what an array counts as:

 1. An argument, or a copy, a slice or the gathered whole of one, counts as what the argument is:
    `parameters`, `optimizer state` (of the module of the parameter whose path it ends in), …; or
    as `outputs` if the program returns it in other memory.
 2. Otherwise the array is followed through copies, tuples, calls and loops to the instruction that
    computes it, whose place it has. Outside of modules, such as in the update of an optimizer, it
    belongs to a parameter of its shape among what it is computed from.
 3. It is in `outputs` if the program returns it; in `gradients` if it has the shape of a parameter
    of its module and is from the backward pass; in `activations` if it is from the forward pass and
    still live at an instruction of the backward pass; else in `intermediates`.

With `x` → `up` → `down` → loss, a hidden layer that the compiler keeps for the gradient of `down`:

    schedule   up dot   down dot   loss   down dot, backward   up dot, backward
    %dot.1     made     read       .      read                 .        activations of model.up

What is approximate: a fusion belongs to one module, though the compiler may have fused the end of
one with the beginning of the next; shapes decide what is a gradient; and what an array without a
name is for remains unknown (`ModuleTable.unattributed`).

From other modules:

    Module      the HLO program. ``maker`` is the instruction that makes a value, ``passed`` the
                values that a value is handed on from, ``around`` the calls around a computation,
                ``runs`` how often each runs
    Buffers     what the compiler keeps in memory: allocations (blocks), buffers in them (arrays),
                and the first and last step of the schedule at which each is live
    Value       an array: the computation, the name of the instruction that makes it, and the index
                in its tuple
    module_of   the path of the innermost user's module in the name of an operation; None for none
    common      the innermost module around all of several; empty without one
    operations  the names that XLA has joined to the name of one instruction
    dims_at     the shape of the part of a result at an index; () if there is none
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..specs.paths import enclosing_paths
from .buffers import Allocation, Buffer, Buffers
from .by_module import MemoryOverTime, MemoryUse, ModuleRow, ModuleTable, Phase, ordered
from .collectives import Collective, Collectives
from .cost import COMPILED, Cost
from .hardware import Hardware
from .hlo import Module
from .instructions import Instruction, dims_at
from .meshes import MeshDescription
from .names import common, module_of, operations
from .opcodes import COLLECTIVES, MOVING, PRODUCTS, base
from .parameters import ParameterRow
from .purposes import inputs_of
from .roofline import roofline_of
from .values import Value
from .work import ExecutedWork, Work, why_unknown


class Place(NamedTuple):
    """The module that something belongs to, and whether it is for the backward pass.

    `line_attribution.py` has a line of code, as ``file:line``, in place of the module.
    """

    path: str | None  # empty outside of modules, None if it is unknown
    backward: bool


class Owner(NamedTuple):
    """What an array in memory counts as; the place is None if it is unknown."""

    place: Place | None
    use: MemoryUse


UNKNOWN = Place(None, False)


class CompiledProgram(NamedTuple):
    """A compiled program, and what is known of it besides its text."""

    module: Module
    buffers: Buffers | None  # what it keeps in memory; None if the compiler does not say
    required: int | None  # bytes that have to be free for a call; None for those of all buffers
    executed: ExecutedWork | None  # None if a part of the program is not understood
    collectives: Collectives | None  # None likewise
    mesh: MeshDescription | None
    hardware: Hardware | None = None  # for estimates of times; None for none


class Measured(NamedTuple):
    """What a profile has measured."""

    module: Module  # the program that ran
    seconds: Mapping[str, float]  # by the name of the instruction


def module_table(
    program: CompiledProgram,
    rows: Sequence[ParameterRow],
    paths: Iterable[str],
    measured: Measured | None = None,
) -> ModuleTable:
    """Sums memory and cost of a program by module.

    Args:
      program: the program, with the modules in the names of its operations.
      rows: its arguments.
      paths: the paths of all modules that were called.
      measured: the times of its instructions; None without a profile.
    """
    attribution = Attribution(program.module, rows, paths)
    seconds = None if measured is None else seconds_by_place(attribution, measured)
    figures, phases, reasons = figures_by_place(attribution, program, measured=seconds)
    table = []
    for place, figure in figures.items():
        sent = figure.collectives
        row = ModuleRow(
            *place,
            flops=figure.cost.flops,
            bytes_accessed=figure.cost.bytes_accessed,
            bytes_sent=None if sent is None or sent.has_unknown_times else sent.bytes_sent,
            seconds=figure.seconds,
            at_peak=None if figure.at_peak is None else dict(figure.at_peak.most_common()),
            measured=figure.measured,
        )
        table.append(row)
    why = "; ".join(reasons) or None
    buffers, required = program.buffers, program.required
    if buffers is None:
        return ModuleTable(ordered(table), why=why)
    if required is None:
        required = sum(allocation.size for allocation in buffers.allocations)  # with gaps in them
    in_use = max(buffers.in_use())
    attributed = sum((figure.at_peak or Counter()).total() for figure in figures.values())
    return ModuleTable(
        ordered(table),
        peak=max(required, in_use),
        in_use=in_use,
        reserved=max(required - in_use, 0),
        unattributed=in_use - attributed,
        over_time=MemoryOverTime(phases),
        why=why,
    )


class PlaceFigures(NamedTuple):
    """What one device does and holds for a place; None for what is unknown."""

    cost: Cost
    collectives: Collectives | None
    seconds: float | None  # the estimate
    at_peak: Counter[MemoryUse] | None
    measured: float | None  # seconds; None without a profile


_UNKNOWN_COST = Cost(None, None, None, COMPILED)


class FiguresByPlace(NamedTuple):
    """What a program computes, sends and holds, by place."""

    figures: dict[Place, PlaceFigures]
    phases: Sequence[Phase]  # of the schedule
    unknown: list[str]  # why figures are unknown


def figures_by_place(
    attribution: Attribution,
    program: CompiledProgram,
    places: Iterable[Place] = (),
    measured: Mapping[Place, float] | None = None,
) -> FiguresByPlace:
    """Sums what a program computes, sends and holds in memory by place: a module and a pass.

    Args:
      attribution: says which place an instruction or array belongs to.
      program: the program.
      places: places that are listed even if nothing belongs to them.
      measured: the seconds that a profile has measured by place; None without one.
    """
    module, buffers, collectives = program.module, program.buffers, program.collectives
    executed = program.executed
    work = None if executed is None else _work_by_place(module, executed, attribution)
    sent: defaultdict[Place, list[Collective]] = defaultdict(list)
    for collective in collectives or ():
        sent[attribution.place_of_collective(collective)].append(collective)
    held, phases = ({}, ()) if buffers is None else _memory_by_place(attribution, buffers)
    figures = {}
    # What has no cost may still take time, such as a copy.
    for place in dict.fromkeys([*places, *(work or {}), *sent, *held, *(measured or {})]):
        cost = _UNKNOWN_COST if work is None else work.get(place, Work()).cost()
        sent_here = None if collectives is None else Collectives(sent.get(place, ()))
        roofline = None
        if program.hardware is not None:
            roofline = roofline_of(cost, sent_here, program.hardware, program.mesh)
        figures[place] = PlaceFigures(
            cost=cost,
            collectives=sent_here,
            seconds=None if roofline is None else roofline.seconds,
            at_peak=None if buffers is None else held.get(place, Counter()),
            measured=None if measured is None else measured.get(place, 0.0),
        )
    reasons = why_unknown(module, executed or {})
    if buffers is None:
        reasons.append("the compiler does not say what it assigns")
    return FiguresByPlace(figures, phases, reasons)


def seconds_by_place(attribution: Attribution, measured: Measured) -> dict[Place, float]:
    """Sums measured times by the places to which instructions belong."""
    module = measured.module
    sums = defaultdict[Place, float](float)
    for name, time in measured.seconds.items():
        home = module.homes[name]
        instruction = module.within[home][name]
        fused = module.fused(instruction)
        # A product takes most of the time of what is fused with it.
        products = [x for x in fused.instructions if x.opcode in PRODUCTS] if fused else []
        places = [attribution.place(x) for x in (*products, instruction)]
        first_known = next(filter(None, places), attribution.place_around(home))
        sums[first_known] += time
    return sums


def _work_by_place(
    module: Module, executed: ExecutedWork, attribution: Attribution
) -> dict[Place, Work]:
    """Sums the work of each place, with the bodies of loops counted as often as they run.

    ``executed`` has the instructions of each computation by its name, with the work of one run.
    """
    sums: defaultdict[Place, Work] = defaultdict(Work)
    for name, parts in executed.items():
        runs, around = module.runs[name], attribution.place_around(name)
        for instruction, work in parts:
            place = attribution.place(instruction) or around
            # What is outside of modules, such as a loss, may be repeated in fusions of modules that
            # need it, and counts with those.
            if not place.path and around.path and runs.is_fused:
                place = around
            sums[place] = sums[place].plus(work, times=runs.least)
    return sums


def _memory_by_place(
    attribution: Attribution, buffers: Buffers
) -> tuple[dict[Place, Counter[MemoryUse]], list[Phase]]:
    """Sums the bytes that each place holds at the step of the schedule with the most in use.

    ``buffers`` has the blocks of memory (allocations), and in each the arrays (buffers) that are
    there one after another, with their first and last step.

    Returns:
      The bytes by place and use, in which memory without a place is left out; and the phases.
    """
    in_use = buffers.in_use()
    places = attribution.places(buffers.schedule)
    peak = max(range(len(in_use)), key=in_use.__getitem__)  # the first step with the most bytes
    backward_steps = [step for step, place in enumerate(places) if place.backward]
    held: defaultdict[Place, Counter[MemoryUse]] = defaultdict(Counter)
    for allocation in buffers.allocations:
        # An allocation may belong to an argument or a result for the whole run, and to temporary
        # buffers in between. The last owner in this list takes its bytes first, and the others what
        # is left, so that no byte counts twice.
        owners = []
        live = [buffer for buffer in allocation.values if buffer.first <= peak <= buffer.last]
        if allocation.parameter is not None:
            owners.append((attribution.argument(allocation.parameter), allocation.size))
        elif allocation.is_result and allocation.values:
            # The memory of a result is reserved from the beginning, for the buffer made last.
            live.insert(0, max(allocation.values, key=lambda buffer: buffer.last))
        for buffer in live:
            owner = attribution.owner(buffer, allocation, backward_steps, len(places))
            owners.append((owner, buffer.size))
        rest = allocation.size
        for owner, size in reversed(owners):
            taken = min(size, rest)
            rest -= taken
            if owner.place is not None and taken:
                held[owner.place][owner.use] += taken
    return held, _phases(places, in_use)


def _phases(places: Sequence[Place], in_use: Sequence[int]) -> list[Phase]:
    """Joins the steps of the schedule that belong to one place, with the most bytes in use."""
    phases: list[Phase] = []
    for step, (place, size) in enumerate(zip(places, in_use, strict=True)):
        start = step
        if phases and place == (phases[-1].path, phases[-1].backward):  # the phase goes on
            last = phases.pop()
            start, size = last.start, max(last.bytes, size)
        phases.append(Phase(start, path=place.path, backward=place.backward, bytes=size))
    return phases


# Instructions that pass values on, or whose values are known before the program runs: they have
# no time of their own in the schedule.
_UNTIMED = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
# Instructions that consist of others, whose names may say what they are for.
_COMPOSED = {"fusion", "call", "async-start"}
# Instructions whose results have the elements of their operands.
_MOVES = MOVING | {"all-gather"}
# From an array to the instruction that computes it. Real programs need a few dozen steps; damaged
# text may have cycles.
_MAX_STEPS = 128
# From an instruction without a name to the nearest ones that have one: a few copies and slices.
_MAX_DISTANCE = 8


class Attribution:
    """Finds the modules of instructions and arrays, among ``paths`` and modules of arguments."""

    def __init__(self, module: Module, rows: Iterable[ParameterRow], paths: Iterable[str]):
        """Prepares the tables by which instructions and arrays are attributed.

        Args:
          module: the compiled program.
          rows: the arguments of the program, with their paths and uses.
          paths: the paths of the modules that were called.
        """
        self._module = module
        rows = [row for row in rows if row.used]
        self._places_by_operation: dict[str, Place | None] = {}
        self._places: dict[str, Place | None] = {}  # by the name of the instruction
        self._owners = owners_of_arguments(rows)  # for each row
        # Number of a parameter of the program → index of its row: the same, if rows are in the
        # order of parameters; else by the path, which the compiler may have kept; else None.
        by_path = {row.path: index for index, row in enumerate(rows)}
        in_order = bool(inputs_of(module, rows))
        self._rows = {
            number: number if in_order else by_path.get(parameter.operation or "")
            for number, parameter in module.parameters.items()
        }
        self._known_modules = {*paths}.union(*(enclosing_paths(row.path) for row in rows))
        # The modules around arguments, by what the arguments count as.
        paths_of_uses = defaultdict[str, set[str]](set)
        for row, owner in zip(rows, self._owners, strict=True):
            paths_of_uses[owner.use].update(enclosing_paths(row.path))
        self._optimizers = paths_of_uses["optimizer state"] - paths_of_uses["parameters"]
        # Module → the shapes that gradients of its own parameters may have: whole or a shard, and
        # without the first dimension in a loop over layers.
        self._parameter_dims: defaultdict[str | None, set[tuple[int, ...]]] = defaultdict(set)
        for row, owner in zip(rows, self._owners, strict=True):
            if owner.use == "parameters" and owner.place:
                shapes = {row.shape, row.shard_shape}
                self._parameter_dims[owner.place.path] |= shapes | {dims[1:] for dims in shapes}

    def argument(self, number: int) -> Owner:
        """Returns what the argument with this number counts as; of an unknown one, an input."""
        row = self._rows.get(number)
        return Owner(None, "inputs") if row is None else self._owners[row]

    def named(self, operation: str) -> Place | None:
        """Reads the place from the name of an operation; None for one that the compiler chose.

        For example, ``jit(step)/transpose(jvp(model))/up/dot_general`` is ``model.up``, backward.
        """
        if "/" not in operation:  # JAX's names begin with the name of the function
            return None
        if operation not in self._places_by_operation:
            names = operations(operation)
            modules = [module_of(name, self._known_modules) for name in names]
            paths = [path for path in modules if path is not None]
            # JAX makes the backward pass by transposing what is linear in a tangent.
            backward = all("transpose(" in name for name in names)
            self._places_by_operation[operation] = Place(common(paths) if paths else "", backward)
        return self._places_by_operation[operation]

    def place(self, instruction: Instruction) -> Place | None:
        """Finds the place of an instruction by rules 1 to 3 at the top of this file; None without.

        :meth:`place_around` is rule 4.
        """
        name = instruction.name
        if name not in self._places:
            place = self._named_place(instruction)
            home = self._module.homes.get(name)
            # What is fused has the place of the fusion.
            if place is None and home is not None and not self._module.runs[home].is_fused:
                place = self._place_nearby(Value(home, name))
            self._places[name] = place
        return self._places[name]

    def place_around(self, computation: str) -> Place:
        """Finds the place of the innermost instruction around a computation that has a place."""
        callers = (self.place(caller) for _, caller in self._module.around(computation))
        return next(filter(None, callers), UNKNOWN)

    def place_of_collective(self, collective: Collective) -> Place:
        """Finds the place of a collective, by its operation or as for other instructions.

        The operation may be known though the instruction has none: `collectives.py` looks for it.
        """
        place = self.named(collective.operation or "")
        instruction = self._module.maker(Value(collective.computation, collective.name))
        if place is None and instruction is not None:
            place = self.place(instruction)
        return place or self.place_around(collective.computation)

    def _named_place(self, instruction: Instruction) -> Place | None:
        """Finds the place of an instruction by its name, or by the names of what is in it.

        None if the compiler made it.
        """
        place = self._written_place(instruction)
        if place is None and instruction.opcode in _COMPOSED:
            place = next(filter(None, map(self._place_within, instruction.callees)), None)
        return place

    def _written_place(self, instruction: Instruction) -> Place | None:
        """Reads the place from what the compiler kept of the user's operation; None for its own."""
        return self.named(instruction.operation or "")

    def _place_within(self, callee: str) -> Place | None:
        """Finds the place of the last instruction of a computation that has one."""
        computation = self._module.by_name.get(callee)
        instructions = computation.instructions if computation else []
        return next(filter(None, map(self._named_place, reversed(instructions))), None)

    def _place_nearby(self, value: Value) -> Place | None:
        """Finds the place of an instruction without a name by its operands and users.

        Both are followed step by step, to the nearest that are in modules; those outside of modules
        count if no others are found. What is computed from the backward pass belongs to it.
        """
        outside = None  # the place outside of modules that was found first
        for distance, (before, after) in enumerate(self._places_by_distance(value)):
            known = before or after
            if not known:
                continue
            backward = any(p.backward for p in before) or all(p.backward for p in known)
            # The parameters that it is given itself come first (rule 2).
            of_parameters = self._modules_of_parameters(value) if distance == 0 else set[str]()
            paths = [*of_parameters] or [place.path for place in before + after if place.path]
            if paths:
                return Place(self._joined(paths), backward)
            outside = outside or Place("", backward)
        return outside

    def _places_by_distance(self, value: Value) -> Iterator[list[list[Place]]]:
        """Yields the places of the nearest operands and of the nearest users of an instruction.

        First those of its own operands and users, then step by step those of theirs, where they
        have no name.
        """
        home, name, _ = value
        within, users = self._module.within[home], self._module.users[home]

        def operands_of(name: str) -> list[str]:
            return [x for x in within[name].operand_names if x in within]

        def users_of(name: str) -> list[str]:
            return [user.name for user, _ in users.get(name, ())]

        seen = {name}
        frontiers = {operands_of: {name}, users_of: {name}}  # from which the search goes on
        for _ in range(_MAX_DISTANCE):
            found = []
            for linked_to, names in frontiers.items():
                linked = {x for name in names for x in linked_to(name)} - seen
                seen |= linked
                places = {x: self._named_place(within[x]) for x in sorted(linked)}
                found.append([place for place in places.values() if place is not None])
                frontiers[linked_to] = {x for x, place in places.items() if place is None}
            yield found

    def _joined(self, paths: Sequence[str]) -> str:
        """Returns the place of what serves several: the innermost module around all of them."""
        return common(sorted(paths))

    def _modules_of_parameters(self, value: Value) -> set[str]:
        """Collects the modules of the parameters that the instruction of a value is given."""
        owners = map(self._argument_behind, self._module.operands(value))
        return {
            owner.place.path or ""
            for owner in owners
            if owner is not None and owner.use == "parameters" and owner.place is not None
        }

    def _argument_behind(self, value: Value) -> Owner | None:
        """Returns what the argument counts as of which a value is a copy, a slice and so on."""
        number = self._module.argument(self._source(value, through_moves=True))
        return None if number is None or number not in self._rows else self.argument(number)

    def places(self, schedule: Iterable[str]) -> list[Place]:
        """Lists the place at each step of a schedule; an unknown one is that of the step before."""
        places = list[Place]()
        place = UNKNOWN
        for name in schedule:
            instruction = self._module.maker(Value(self._module.homes.get(name, ""), name))
            if instruction is not None and instruction.opcode not in _UNTIMED:
                place = self.place(instruction) or place
            places.append(place)
        return places

    def owner(
        self, buffer: Buffer, allocation: Allocation, backward_steps: Sequence[int], num_steps: int
    ) -> Owner:
        """Decides what a buffer counts as, by the rules at the top of this file.

        Args:
          buffer: a part of an allocation.
          allocation: the block of memory that it is in.
          backward_steps: the steps of the schedule that are in the backward pass, in order.
          num_steps: the number of all steps.
        """
        # Rule 1: an argument.
        is_result = allocation.is_result and buffer.last >= num_steps - 1
        if is_result and allocation.parameter is not None:  # a donated argument, updated in place
            return self.argument(allocation.parameter)
        if buffer.name not in self._module.homes:  # the compiler's own, such as a call's stack
            return Owner(None, "intermediates")
        array = Value(self._module.homes[buffer.name], buffer.name, buffer.index)
        if (argument := self._argument_behind(array)) is not None:
            return argument._replace(use="outputs") if is_result else argument
        # Rule 2: the place, which is that of the instruction that computes the array.
        computed = self._source(array)
        maker = self._module.maker(computed)
        assert maker is not None  # _source stops before what damaged text lacks
        place = self.place(maker)
        dims = dims_at(maker, computed.index)
        if place is None or not place.path or place.path in self._optimizers:
            place = self._place_of_parameter(computed, dims) or place
        # Rule 3: the use.
        if is_result or place is None:
            return Owner(place, "outputs" if is_result else "intermediates")
        if place.backward:  # a gradient may also be of a shard, or of one layer in a loop
            is_gradient = dims in self._parameter_dims[place.path]
            return Owner(place, "gradients" if is_gradient else "intermediates")
        # Of the forward pass: is there a step of the backward pass while it is live?
        first, last = buffer.first, self._carried_until(buffer, allocation, computed)
        num_before, num_until = (bisect.bisect(backward_steps, step) for step in (first, last))
        return Owner(place, "activations" if num_before < num_until else "intermediates")

    def _carried_until(self, buffer: Buffer, allocation: Allocation, source: Value) -> int:
        """Returns the last step at which an array is live, through loops that carry it on.

        The compiler names it anew before, in and after a loop: as several buffers, one after
        another in one place, that are computed by one instruction.

        Args:
          buffer: the array.
          allocation: the block of memory that it is in.
          source: the value that computes it.
        """
        last = buffer.last
        for later in allocation.values:
            is_next = buffer.first < later.first <= last + 1 and later.offset == buffer.offset
            if is_next and later.size == buffer.size and later.name in self._module.homes:
                home = self._module.homes[later.name]
                if self._source(Value(home, later.name, later.index)) == source:
                    last = max(last, later.last)
        return last

    def _source(self, value: Value, *, through_moves: bool = False) -> Value:
        """Follows an array back to the value that computes it, through what only passes it on.

        With ``through_moves``, also through copies, slices and so on that the user wrote.
        """
        # What a loop carries comes from two values: the initial one, and what its body returns. The
        # last is followed. Where the body only returns what it was given, that leads here again,
        # and then the initial one is.
        returned: set[Value] = set()  # by bodies, and followed
        for _ in range(_MAX_STEPS):
            sources = self._passed_from(value, through_moves)
            if len(sources) > 1:
                sources = [source for source in sources if source not in returned]
                returned.update(sources[-1:])
            if not sources or self._module.maker(sources[-1]) is None:
                break
            value = sources[-1]
        return value

    def _passed_from(self, value: Value, through_moves: bool) -> Sequence[Value]:
        """Lists the values whose elements an array has; nothing if its instruction computes them.

        Args:
          value: the array.
          through_moves: whether to follow copies, slices and transposes that the user wrote, too.
        """
        instruction = self._module.maker(value)
        operands = self._module.operands(value)
        if instruction is None:
            return ()
        opcode = instruction.opcode
        # A move with a name is part of what the user wrote: the array belongs to the move's module.
        is_followed = through_moves or instruction.operation is None
        if opcode == "fusion" and not self._only_moves(instruction, is_followed):
            return ()
        if opcode == "tuple" and not value.index:
            return ()
        if opcode == "dynamic-update-slice" and not through_moves:
            return operands[1:2]  # what is written into the array, as a loop over layers does
        if opcode.endswith(("-start", "-done")) and opcode != "async-start":
            # The start of a collective that sums computes; its end passes on what the start made.
            is_sum = base(opcode) in COLLECTIVES - {"all-gather"}
            return () if is_sum and opcode.endswith("-start") else operands[:1]
        if base(opcode) in _MOVES and is_followed:
            return operands[:1]
        return self._module.passed(value)

    def _only_moves(self, fusion: Instruction, is_followed: bool) -> bool:
        """Tells whether a search may go on through a fusion: it only moves arrays.

        Also if it updates an array in place, or makes several, of which each may be a moved one.
        ``is_followed`` says whether the search goes through moves at all.
        """
        fused = self._module.fused(fusion)
        root = None if fused is None else self._module.roots.get(fused.name)
        if root is not None and root.opcode in ("tuple", "dynamic-update-slice"):
            return True
        opcodes = {instruction.opcode for instruction in fused.instructions} if fused else set()
        return is_followed and opcodes <= _MOVES | {"parameter", "constant", "tuple"}

    def _place_of_parameter(self, value: Value, dims: tuple[int, ...]) -> Place | None:
        """Finds the module of a parameter of this shape that a value is computed from.

        Optimizers compute outside of modules, from gradients and parameters of one shape. The
        search goes breadth-first over operands of that shape, up to those that are in a module; a
        gradient is preferred to a parameter, as it says more.
        """
        pending = [value]
        seen = {value.name}
        best = None  # the place that was found last
        while pending and dims and len(seen) < _MAX_STEPS:
            value = pending.pop(0)
            instruction = self._module.maker(value)
            number = self._module.argument(value)
            if number is not None:
                place = self.argument(number).place
            else:
                place = None if instruction is None else self.place(instruction)
            if place is not None and place.path:  # the search ends at modules
                if dims in self._parameter_dims[place.path]:
                    best = place
                    if place.backward:
                        break
                continue
            # A loop mixes all that it carries.
            if instruction is None or instruction.opcode == "while":
                continue
            for operand in map(self._source, self._module.operands(value)):
                maker = self._module.maker(operand)
                if maker and maker.name not in seen and dims_at(maker, operand.index) == dims:
                    seen.add(maker.name)
                    pending.append(operand)
        return best


_KEY = re.compile(r"[^.\[\]'\"]+")


def owners_of_arguments(rows: Sequence[ParameterRow]) -> list[Owner]:
    """Decides what each argument counts as.

    The state of an optimizer belongs to the module of the parameter that its path ends like:
    ``optimizer.opt_state[0].mu.up.kernel`` to ``model.up``, of ``model.up.kernel``. If parameters
    of several modules end so, it belongs to where it is.
    """
    paths = [tuple(_KEY.findall(row.path)) for row in rows]  # ("model", "up", "kernel")
    modules_by_end: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    inside_arguments = set()  # the paths of parameters without the name of the argument
    for row, path in zip(rows, paths, strict=True):
        if row.role == "parameter":
            inside_arguments.add(path[1:])
            for start in range(len(path)):
                modules_by_end[path[start:]].add(_module_around(row.path))
    owners = []
    for row, path in zip(rows, paths, strict=True):
        module = _module_around(row.path)
        ends = [path[start:] for start in range(1, len(path))]  # longest first
        # Trees of arrays that mirror the parameters, such as Optax's own state.
        is_mirror = row.variable is None and any(end in inside_arguments for end in ends)
        use: MemoryUse = "other state"
        if row.role == "parameter":
            use = "parameters"
        elif is_mirror or row.role == "optimizer state":
            use = "optimizer state"
            modules = next((modules_by_end[end] for end in ends if end in modules_by_end), set())
            module = next(iter(modules)) if len(modules) == 1 else module
        elif row.variable is None:
            module, use = row.path, "inputs"
        owners.append(Owner(Place(module, False), use))
    return owners


def _module_around(path: str) -> str:
    """Returns the module that has an array at this path; the path itself without one."""
    return [path, *enclosing_paths(path)][-1]
