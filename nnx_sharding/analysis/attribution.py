"""Sums the work and the memory of a compiled program by module of the user's model.

Each instruction has one *place*, a module and a pass (`places.py`), also `UNKNOWN`, so that flops,
bytes accessed and bytes sent sum to the totals. Each array in memory has an *owner*, a place and a
use, such as "activations" (`owners.py`). Bytes in memory are those at the *peak*, the step of the
schedule with the most in use.

What is approximate: a fusion belongs to one module, though the compiler may have fused the end of
one with the beginning of the next; shapes decide what is a gradient; and what an array without a
name is for remains unknown (`ModuleTable.unattributed`).

From other modules:

    PlaceFinder   finds the places: ``place_of`` an instruction, ``place_around`` a computation
    BufferOwners  finds the owners of arrays, and has the place of each step of the schedule
    Module        the HLO program. ``fused`` is the computation of a fusion, ``homes`` that of an
                  instruction by name, ``runs`` how often each runs
    Buffers       what the compiler keeps in memory: allocations (blocks), buffers in them (arrays),
                  and the first and last step of the schedule at which each is live
    Work          the flops and bytes of instructions; ``plus`` adds, ``cost`` makes a `Cost` of it
    ExecutedWork  the instructions of each computation that do work, each with that of one run
    Phase         steps of the schedule, one after the other, that belong to one place
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .buffers import Allocation, Buffers
from .by_module import MemoryOverTime, MemoryUse, ModuleRow, ModuleTable, Phase, ordered
from .collectives import Collective, Collectives
from .cost import COMPILED, Cost
from .hardware import Hardware
from .hlo import Module
from .meshes import MeshDescription
from .opcodes import PRODUCTS
from .owners import Arguments, BufferOwners, Owner
from .parameters import ParameterRow
from .places import UNKNOWN, Place, PlaceFinder
from .roofline import roofline_of
from .work import ExecutedWork, Work, why_unknown


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
    arguments = Arguments(program.module, rows)
    module_paths = {*paths, *arguments.modules}
    finder = PlaceFinder(program.module, module_paths, arguments.parameter_modules)
    seconds = None if measured is None else seconds_by_place(finder, measured)
    figures, phases, reasons = figures_by_place(finder, arguments, program, measured=seconds)
    # A row for each place.
    table = []
    for place, figure in figures.items():
        sent = figure.collectives
        row = ModuleRow(
            *place,
            flops=figure.cost.flops,
            bytes_accessed=figure.cost.bytes_accessed,
            bytes_sent=None if sent is None else sent.bytes_sent,
            seconds=figure.seconds,
            at_peak=None if figure.at_peak is None else dict(figure.at_peak.most_common()),
            measured=figure.measured,
        )
        table.append(row)
    why = "; ".join(reasons) or None
    buffers, required = program.buffers, program.required
    if buffers is None:
        return ModuleTable(ordered(table), why=why)
    # The totals. Blocks of memory are larger than what is in use at any time: there are gaps
    # between the arrays in them, and not all blocks are full at once.
    if required is None:
        required = sum(allocation.size for allocation in buffers.allocations)
    in_use = max(buffers.in_use())  # at the peak
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
    seconds: (
        float | None
    )  # estimated from the cost, the collectives and the hardware (`roofline.py`)
    at_peak: Counter[MemoryUse] | None  # bytes
    measured: float | None  # seconds in a profile; None without one


_UNKNOWN_COST = Cost(None, None, None, COMPILED)


class FiguresByPlace(NamedTuple):
    """What a program computes, sends and holds, by place."""

    figures: dict[Place, PlaceFigures]
    phases: Sequence[Phase]  # of the schedule
    unknown: list[str]  # why figures are unknown


def figures_by_place(
    finder: PlaceFinder,
    arguments: Arguments,
    program: CompiledProgram,
    places: Iterable[Place] = (),
    measured: Mapping[Place, float] | None = None,
) -> FiguresByPlace:
    """Sums what a program computes, sends and holds in memory by place: a module and a pass.

    Args:
      finder: finds the places of the program's instructions.
      arguments: what its arguments are for.
      program: the program.
      places: places that are listed even if nothing belongs to them.
      measured: the seconds that a profile has measured by place; None without one.
    """
    module, buffers, collectives = program.module, program.buffers, program.collectives
    # What the program computes; None if a part of it is not understood.
    executed = program.executed
    work = None if executed is None else _work_by_place(module, executed, finder)
    sent: defaultdict[Place, list[Collective]] = defaultdict(list)
    for collective in collectives or ():
        sent[finder.place_of_collective(collective)].append(collective)
    held: Mapping[Place, Counter[MemoryUse]] = {}
    phases: Sequence[Phase] = ()
    if buffers is not None:
        owners = BufferOwners(module, finder, arguments, buffers)
        held, phases = _held_at_peak(owners, buffers), _phases(owners.places, buffers.in_use())
    if work is None:  # its figures are unknown also if nothing is known to belong to a place
        places = [*places, UNKNOWN]
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
    reasons = why_unknown(module, executed or {})  # loops and calls of unknown work
    if executed is None and module.unread:
        reasons.append(f"not understood: {module.unread[0]:.120}")
    if buffers is None:
        reasons.append("the compiler does not say what it assigns")
    return FiguresByPlace(figures, phases, reasons)


def seconds_by_place(finder: PlaceFinder, measured: Measured) -> dict[Place, float]:
    """Sums measured times by the places to which instructions belong."""
    module = measured.module
    sums = defaultdict[Place, float](float)
    for name, time in measured.seconds.items():
        home = module.homes[name]
        instruction = module.within[home][name]
        fused = module.fused(instruction)
        # A product takes most of the time of what is fused with it, so its place is asked first.
        products = [x for x in fused.instructions if x.opcode in PRODUCTS] if fused else []
        places = [finder.place_of(x) for x in (*products, instruction)]
        known = [place for place in places if place is not None]
        sums[known[0] if known else finder.place_around(home)] += time
    return sums


def _work_by_place(
    module: Module, executed: ExecutedWork, finder: PlaceFinder
) -> dict[Place, Work]:
    """Sums the work of each place, with the bodies of loops counted as often as they run.

    ``executed`` has the instructions of each computation by its name, with the work of one run.
    """
    sums: defaultdict[Place, Work] = defaultdict(Work)
    for name, parts in executed.items():
        runs = module.runs[name]
        around = finder.place_around(name)  # of the instruction that calls the computation
        for instruction, work in parts:
            place = finder.place_of(instruction) or around
            # The compiler may repeat what is outside of modules, such as an input that is scaled,
            # in the fusions of several modules that need it. There it counts with the module.
            if not place.path and around.path and runs.is_fused:
                place = around
            # Loops of unknown length count once here; then `Work.cost` has no figures.
            sums[place] = sums[place].plus(work, times=runs.least)
    return sums


def _held_at_peak(owners: BufferOwners, buffers: Buffers) -> dict[Place, Counter[MemoryUse]]:
    """Sums the bytes that each place holds at the step of the schedule with the most in use.

    Returns:
      The bytes by place and use. Memory without a place is left out.
    """
    in_use = buffers.in_use()
    peak = max(range(len(in_use)), key=in_use.__getitem__)  # the first step with the most bytes
    held: defaultdict[Place, Counter[MemoryUse]] = defaultdict(Counter)
    for allocation in buffers.allocations:
        rest = allocation.size
        # Several may claim the same bytes: a buffer those of an argument that is not needed any
        # more. The first gets them, so that no byte counts twice.
        for owner, size in _owners_at(peak, owners, allocation):
            taken = min(size, rest)
            rest -= taken
            if owner.place is not None and taken:
                held[owner.place][owner.use] += taken
    return held


def _owners_at(step: int, owners: BufferOwners, allocation: Allocation) -> list[tuple[Owner, int]]:
    """Lists the owners of an allocation at a step of the schedule, each with the bytes that it has.

    An allocation may belong to an argument or a result for the whole run, and to temporary buffers
    in between. These come first, the one made last before others. The caller gives each byte to
    the first owner only, so that the argument or result gets what the buffers leave.
    """
    live = [buffer for buffer in allocation.values if buffer.first <= step <= buffer.last]
    owned = [(owners.owner_of(buffer, allocation), buffer.size) for buffer in reversed(live)]
    if allocation.parameter is not None:
        owned.append((owners.arguments.owner(allocation.parameter), allocation.size))
    elif allocation.is_result and allocation.values:
        # The memory of a result is reserved from the beginning, for the buffer that is there at the
        # end.
        result = max(allocation.values, key=lambda buffer: buffer.last)
        owned.append((owners.owner_of(result, allocation), result.size))
    return owned


def _phases(places: Sequence[Place], in_use: Sequence[int]) -> list[Phase]:
    """Joins the steps of the schedule, one after the other, that belong to one place.

    Args:
      places: the place of each step.
      in_use: the bytes in use at each step.

    Returns:
      The phases in order, each with the largest number of bytes in use at one of its steps.
    """
    phases: list[Phase] = []
    for step, (place, size) in enumerate(zip(places, in_use, strict=True)):
        start, most = step, size
        last = phases[-1] if phases else None
        if last is not None and Place(last.path, last.backward) == place:  # the phase goes on
            phases.pop()
            start, most = last.start, max(last.bytes, size)
        phases.append(Phase(start, path=place.path, backward=place.backward, bytes=most))
    return phases
