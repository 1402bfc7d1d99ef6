"""What loops add to XLA's estimates, which count each loop body once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .cost import Cost
from .hlo import Module
from .instructions import Computation, Shape, total_bytes
from .opcodes import SLICES, base
from .work import Work, custom_work, executed_work

WITH_LOOPS = "after optimisation, one device, loops multiplied out"
UNKNOWN_LENGTH = "those of unknown length once"
BRANCHES = "of conditionals the largest branch"
CUSTOM_CALLS = "custom calls of unknown cost"
MAIN_MEMORY = "bytes of the main memory"


def with_loops(cost: Cost, module: Module) -> Cost | None:
    """XLA's estimate for a program, with loop bodies counted as often as they run.

    This adds the work of loop bodies in all runs but the first. A slice of an array counts with its
    own size, not that of the array. The name of the stage says what the figures leave open. For
    TPUs, XLA also counts what stays in vector memory; here only bytes of main memory count. None if
    the program is not understood.
    """
    if module.unread:
        return None
    once = executed = Work()
    for name, parts in executed_work(module).items():
        runs = module.runs[name]
        for _, own in parts:
            once, executed = once.plus(own, runs.listed), executed.plus(own, runs.least)
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
        _copied(computation) * (module.runs[computation.name].least)
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
