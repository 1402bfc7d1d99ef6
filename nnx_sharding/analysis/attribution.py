"""Sums the work and the memory of a compiled program by module of the user's model.

Each instruction has one *place*, a module and a pass (`places.py`), also `UNKNOWN`, so that flops,
bytes accessed and bytes sent sum to the totals. Each array in memory has an *owner*, a place and a
use, such as "activations" (`owners.py`). Bytes in memory are those at the *peak*, the step of the
schedule with the most in use.

A collective that the compiler merged from those of several modules is divided by their bytes.

What is approximate: a fusion belongs to one module, though the compiler may have fused the end of
one with the beginning of the next; shapes decide what is a gradient; and what an array without a
name is for remains unknown (`ModuleTable.unattributed`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    # Blocks of memory together are larger than what is in use at any time, because there are gaps
    # between the arrays in them, and not all blocks are full at once.
    if required is None:
        required = sum(allocation.size for allocation in buffers.allocations)
    in_use = max(buffers.in_use())  # `in_use` lists the bytes of each step, so this is the peak.
    held = [figure.at_peak.total() for figure in figures.values() if figure.at_peak is not None]
    return ModuleTable(
        ordered(table),
        peak=max(required, in_use),
        in_use=in_use,
        reserved=max(required - in_use, 0),
        unattributed=in_use - sum(held),
        over_time=MemoryOverTime(phases),
        why=why,
    )


class PlaceFigures(NamedTuple):
    """What one device does and holds for a place. A field is None if it is unknown."""

    cost: Cost
    collectives: Collectives | None
    # The time as estimated from the cost, the collectives and the hardware (`roofline.py`).
    seconds: float | None
    at_peak: Counter[MemoryUse] | None  # the bytes held at the peak, by use
    measured: float | None  # the seconds in a profile; None without a profile


_UNKNOWN_COST = Cost(None, None, None, COMPILED)


class FiguresByPlace(NamedTuple):
    """What a program computes, sends and holds, by place."""

    figures: dict[Place, PlaceFigures]
    phases: Sequence[Phase]  # the phases of the schedule
    unknown: list[str]  # the reasons why figures are unknown


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
      arguments: the arguments of the program, which know what each is for.
      program: the program.
      places: places that are listed even if nothing belongs to them.
      measured: the seconds that a profile has measured by place; None without one.
    """
    module, buffers, collectives = program.module, program.buffers, program.collectives
    # The work that the program executes; None if a part of the program is not understood.
    executed = program.executed
    work = None if executed is None else _work_by_place(module, executed, finder)
    sent: defaultdict[Place, list[Collective]] = defaultdict(list)
    for collective in collectives or ():
        for place, share in _shares_by_place(collective, finder):
            sent[place].append(share)
    held: Mapping[Place, Counter[MemoryUse]] = {}
    phases: Sequence[Phase] = ()
    if buffers is not None:
        owners = BufferOwners(module, finder, arguments, buffers)
        held = _held_at_peak(owners, buffers)
        phases = _phases(owners.places, buffers.in_use())
    # If the program is not understood, `UNKNOWN` is listed even if nothing else belongs to it, so
    # that there is a row of unknown figures.
    if work is None:
        places = [*places, UNKNOWN]
    figures = {}
    # Places without cost are listed, too, because they may take time: copies, for example.
    all_places = dict.fromkeys([*places, *(work or {}), *sent, *held, *(measured or {})])
    for place in all_places:
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
    # The first reasons name loops and calls whose work is unknown.
    reasons = why_unknown(module, executed or {})
    if executed is None and module.unread:
        reasons.append(f"not understood: {module.unread[0]:.120}")
    if buffers is None:
        reasons.append("the compiler does not say what it assigns")
    return FiguresByPlace(figures, phases, reasons)


def _shares_by_place(
    collective: Collective, finder: PlaceFinder
) -> Iterator[tuple[Place, Collective]]:
    """Divides a collective that moves arrays of several places, as the compiler merges gradients.

    Yields each place, with a collective that moves the bytes of this place only.
    """
    sizes: Counter[Place] = Counter()  # the bytes of each place
    for part in collective.parts:
        alone = dataclasses.replace(
            collective,
            operation=part.operation or collective.operation,
            source=part.source or collective.source,
        )
        sizes[finder.place_of_collective(alone)] += part.bytes
    if len(sizes) < 2 or not sizes.total():
        yield finder.place_of_collective(collective), collective
        return
    # Each share is rounded down to bytes, and the last one is what the others leave.
    left, left_sent = sizes.total(), collective.bytes_sent
    for place, size in sizes.items():
        sent = left_sent * size // left if left else 0
        yield place, dataclasses.replace(collective, bytes=size, bytes_sent=sent, parts=())
        left, left_sent = left - size, left_sent - sent


def seconds_by_place(finder: PlaceFinder, measured: Measured) -> dict[Place, float]:
    """Sums measured times by the places to which instructions belong."""
    module = measured.module
    sums = defaultdict[Place, float](float)
    for name, time in measured.seconds.items():
        home = module.homes[name]
        instruction = module.within[home][name]
        fused = module.fused(instruction)
        # A product takes most of the time of its fusion, so its place counts first.
        products = [x for x in fused.instructions if x.opcode in PRODUCTS] if fused else []
        places = map(finder.place_of, (*products, instruction))  # None for those without one
        place = next(filter(None, places), None) or finder.place_around(home)
        sums[place] += time
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
        place_of_caller = finder.place_around(name)
        for instruction, work in parts:
            place = finder.place_of(instruction) or place_of_caller
            # The compiler may repeat an operation outside of modules, such as the scaling of an
            # input, in the fusions of several modules that need it. In such a fusion, it counts
            # with the module.
            if not place.path and place_of_caller.path and runs.is_fused:
                place = place_of_caller
            # Loops of unknown length count once here. `Work.cost` then returns no figures.
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
        unclaimed = allocation.size
        # Several owners may claim the same bytes: a buffer may use the bytes of an argument that is
        # not needed any more. The first owner gets them, so that no byte counts twice.
        for owner, size in _owners_at(peak, owners, allocation):
            taken = min(size, unclaimed)
            unclaimed -= taken
            if owner.place is not None and taken:
                held[owner.place][owner.use] += taken
    return held


def _owners_at(step: int, owners: BufferOwners, allocation: Allocation) -> list[tuple[Owner, int]]:
    """Lists the owners of an allocation at a step of the schedule, each with the bytes that it has.

    An allocation may belong to an argument or a result for the whole run, and to temporary buffers
    in between. Buffers come first in the list, and the one made last comes before other buffers.
    The caller gives each byte to the first owner only, so the argument or result gets the bytes
    that the buffers leave.
    """
    live = [buffer for buffer in allocation.values if buffer.first <= step <= buffer.last]
    owned = [(owners.owner_of(buffer, allocation), buffer.size) for buffer in reversed(live)]
    if allocation.parameter is not None:
        owned.append((owners.arguments.owner(allocation.parameter), allocation.size))
    elif allocation.is_result and allocation.values:
        # The memory of a result is reserved from the beginning. It belongs to the buffer that lives
        # at the end.
        result = max(allocation.values, key=lambda buffer: buffer.last)
        owned.append((owners.owner_of(result, allocation), result.size))
    return owned


def _phases(places: Sequence[Place], in_use: Sequence[int]) -> list[Phase]:
    """Joins successive steps of the schedule that belong to the same place.

    Args:
      in_use: the bytes in use at each step.

    Returns:
      The phases in order, each with the largest number of bytes in use at one of its steps.
    """
    phases: list[Phase] = []
    for step, (place, size) in enumerate(zip(places, in_use, strict=True)):
        start, most = step, size
        last = phases[-1] if phases else None
        if last is not None and Place(last.path, last.backward) == place:  # The phase goes on.
            phases.pop()
            start, most = last.start, max(last.bytes, size)
        phases.append(Phase(start, path=place.path, backward=place.backward, bytes=most))
    return phases
