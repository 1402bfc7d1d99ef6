"""What loops add to XLA's estimates, which count each loop body once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .cost import Cost
from .hlo import Module
from .instructions import Computation, Instruction, Shape, total_bytes
from .opcodes import FREE, SLICES, base
from .work import Work, applications, custom_work, shapes_of, work_of

WITH_LOOPS = "after optimisation, one device, loops multiplied out"
UNKNOWN_LENGTH = "those of unknown length once"
BRANCHES = "of conditionals the largest branch"
CUSTOM_CALLS = "custom calls of unknown cost"
MAIN_MEMORY = "bytes of the main memory"

# The work of instructions with each loop counted once, as in XLA, and as often as it runs.
_Both = tuple[Work, Work]
_NONE: _Both = (Work(), Work())


def with_loops(cost: Cost, module: Module) -> Cost | None:
    """XLA's estimate for a program, with loop bodies counted as often as they run.

    This adds the work of loop bodies in all runs but the first. A slice of an array counts with its
    own size, not that of the array. The name of the stage says what the figures leave open. For
    TPUs, XLA also counts what stays in vector memory; here only bytes of main memory count. None if
    the program is not understood.
    """
    if module.unread:
        return None
    once, executed = _work(module)
    more = executed.plus(once, -1)
    figures = {name: _plus(getattr(cost, name), n) for name, n in more._asdict().items()}
    for name in ("int8_flops", "fp8_flops"):
        figures[name] = float(min(getattr(executed, name), _MOST))
    if module.is_for_tpu and cost.bytes_accessed is not None:
        figures["bytes_accessed"] = float(min(executed.bytes_accessed, _MOST))
    remarks = _remarks(module)
    if CUSTOM_CALLS in remarks:
        figures |= dict.fromkeys(("flops", "transcendentals"))
    stage = ", ".join([WITH_LOOPS, *remarks])
    figures["host_bytes"] = float(host_bytes(module))
    return dataclasses.replace(cost, **figures, stage=stage)


_MOST = 1 << 100  # larger ones may overflow


def _plus(figure: float | None, more: int) -> float | None:
    return None if figure is None else figure + min(more, _MOST)


def _work(module: Module) -> _Both:
    """The work of a program."""
    known: dict[str, _Both] = {}
    for name in module.callees_first or ():
        computation = module.by_name.get(name)
        if computation is None:
            continue
        parts = [_called(i, known, module) for i in computation.instructions if i.opcode in _CALLS]
        shapes = shapes_of(computation)
        is_fused = module.runs[name].is_fused  # then its caller counts the bytes
        for one in computation.instructions:
            if one.opcode not in _NO_WORK:
                parts += [(_own(one, shapes, known, module, is_fused),) * 2]
        known[name] = _sum(parts)
    return _sum([both for name, both in known.items() if name not in module.callers])


def _sum(parts: Sequence[_Both]) -> _Both:
    once, executed = _NONE
    for part in parts:
        once, executed = once.plus(part[0]), executed.plus(part[1])
    return once, executed


_CALLS = {"while", "conditional", "call", "async-start"}
_NO_WORK = _CALLS | FREE


def _called(one: Instruction, known: Mapping[str, _Both], module: Module) -> _Both:
    """The work of the computations that an instruction calls, as often as it calls them."""
    called = [(attribute, known.get(name, _NONE)) for attribute, name in one.calls()]
    if one.opcode == "conditional" and called:
        once, executed = zip(*(both for _, both in called), strict=True)
        return _most(once), _most(executed)
    count = module.trip_counts.get(one.name, 1)
    is_counted = one.name in module.trip_counts
    once = executed = Work()
    for attribute, both in called:
        # A loop runs its condition once more than its body.
        times = count + (is_counted and attribute == "condition")
        once, executed = once.plus(both[0]), executed.plus(both[1], times)
    return once, executed


def _own(
    one: Instruction,
    shapes: Mapping[str, list[Shape]],
    known: Mapping[str, _Both],
    module: Module,
    is_fused: bool,
) -> Work:
    """The work of an instruction, including what it applies to elements or has fused."""
    own = work_of(one, shapes, None if is_fused else module)
    times = 1 if one.opcode == "fusion" else applications(one, shapes)
    for _, name in one.calls() if times else ():
        own = own.plus(known.get(name, _NONE)[0]._replace(bytes_accessed=0), times)
    return own


def _most(branches: Sequence[Work]) -> Work:
    return Work(*map(max, zip(*branches, strict=True)))


def _remarks(module: Module) -> list[str]:
    """What the figures leave open."""
    every = [one for computation in module.computations for one in computation.instructions]
    remarks = {
        MAIN_MEMORY: module.is_for_tpu,
        UNKNOWN_LENGTH: any(
            one.opcode == "while" and one.name not in module.trip_counts for one in every
        ),
        BRANCHES: any(one.opcode == "conditional" for one in every),
        CUSTOM_CALLS: any(
            one.opcode == "custom-call" and "_custom_call" in one.rest and custom_work(one) is None
            for one in every
        ),
    }
    return [remark for remark, holds in remarks.items() if holds]


def host_bytes(module: Module) -> int:
    """The bytes copied between device and host in one call; unknown loops count once."""
    return sum(
        _copied(computation) * (module.runs[computation.name].times or 1)
        for computation in module.computations
        if any(f"S({_HOST})" in one.shape_text for one in computation.instructions)
    )


_HOST = 5  # the memory space of the host in layouts, as XLA numbers it


def _copied(computation: Computation) -> int:
    shapes = {one.name: one.results for one in computation.instructions}
    total = 0
    for one in computation.instructions:
        kind, operands = base(one.opcode), [shapes.get(name, []) for name in one.operand_names]
        if one.opcode.endswith(("-done", "-update")) or not operands:
            continue
        if kind == "dynamic-update-slice" and len(operands) > 1:
            written, read, *_ = operands
            moved = read
        elif kind == "copy" or kind in SLICES:
            read, moved = operands[0], shapes[one.name]
            written = moved
        else:
            continue
        total += total_bytes(moved) * (_is_on_host(read) != _is_on_host(written))
    return total


def _is_on_host(shapes: Sequence[Shape]) -> bool:
    return any(shape.memory_space == _HOST for shape in shapes)
