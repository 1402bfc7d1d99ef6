"""What loops add to the estimates of XLA, which counts the body of each once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .cost import Cost
from .hlo import Instruction, Module
from .shapes import Shape
from .work import Work, applications, custom_work, shapes_of, work_of

WITH_LOOPS = "after optimisation, one device, loops multiplied out"
UNKNOWN_LENGTH = "those of unknown length once"
BRANCHES = "of conditionals the largest branch, so at most"
CUSTOM_CALLS = "custom calls of unknown cost left out"

# What instructions do, each loop counted once as XLA does, and as often as it runs.
_Both = tuple[Work, Work]
_NONE: _Both = (Work(), Work())


def with_loops(cost: Cost, module: Module) -> Cost | None:
    """XLA's estimate for a program with the body of each loop counted as often as it runs.

    Added is what bodies do in all runs but the first. A slice of an array counts for itself, not
    for the array. What the figures leave open is in the name of their stage.

    Returns:
      The estimate; None if the program is not understood.
    """
    if module.unread:
        return None
    once, executed = _work(module)
    more = executed.plus(once, -1)
    figures = {name: _plus(getattr(cost, name), n) for name, n in more._asdict().items()}
    stage = ", ".join([WITH_LOOPS, *_remarks(module)])
    return dataclasses.replace(cost, **figures, stage=stage)


def _plus(figure: float | None, more: int) -> float | None:
    return None if figure is None else figure + min(more, 1 << 100)  # larger ones may overflow


def _work(module: Module) -> _Both:
    """What a program does."""
    if not any(runs.in_loop for runs in module.runs.values()):
        return _NONE
    known: dict[str, _Both] = {}
    called: set[str] = set()
    for name in module.callees_first or ():
        computation = module.by_name.get(name)
        if computation is None:
            continue
        shapes = shapes_of(computation)
        parts = [_instruction(one, shapes, known, module) for one in computation.instructions]
        known[name] = _sum(parts)
        called.update(callee for one in computation.instructions for _, callee in one.calls())
    return _sum([both for name, both in known.items() if name not in called])


def _sum(parts: Sequence[_Both]) -> _Both:
    once, executed = _NONE
    for part in parts:
        once, executed = once.plus(part[0]), executed.plus(part[1])
    return once, executed


def _instruction(
    one: Instruction,
    shapes: Mapping[str, list[Shape]],
    known: Mapping[str, _Both],
    module: Module,
) -> _Both:
    """What an instruction does, with all that it calls."""
    own = work_of(one, shapes, module)
    called = {name: known.get(name, _NONE) for _, name in one.calls()}
    if not called:
        return own, own
    if one.opcode == "while":
        return _loop(one, called, module)
    if one.opcode == "conditional":
        once, executed = zip(*called.values(), strict=True)
        return _most(once), _most(executed)
    once, executed = _sum([*called.values()])
    if one.opcode in ("call", "async-start"):
        return once, executed
    times = 1 if one.opcode == "fusion" else applications(one, shapes)
    both = (own.plus(work._replace(bytes_accessed=0), times) for work in (once, executed))
    return next(both), next(both)


def _loop(one: Instruction, called: Mapping[str, _Both], module: Module) -> _Both:
    """A loop runs its condition once more than its body."""
    count = module.trip_counts.get(one.name)
    once = executed = Work()
    for attribute, name in one.calls():
        times = 1 if count is None else count + (attribute == "condition")
        once, executed = once.plus(called[name][0]), executed.plus(called[name][1], times)
    return once, executed


def _most(branches: Sequence[Work]) -> Work:
    return Work(*map(max, zip(*branches, strict=True)))


def _remarks(module: Module) -> list[str]:
    """What the figures leave open."""
    every = [one for computation in module.computations for one in computation.instructions]
    remarks = {
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
