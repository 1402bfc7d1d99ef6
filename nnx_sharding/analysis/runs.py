"""How often each computation of a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .shapes import MAX_SIZE

if TYPE_CHECKING:
    from .hlo import Module


class Runs(NamedTuple):
    """How often a computation runs in one call of the program."""

    times: int | None  # each branch of a conditional counts as taken; None if it is unknown
    in_loop: bool
    is_fused: bool  # part of a single operation: a fusion, or the computation of a reduction
    in_branch: bool  # of a conditional, which may not be taken


class _Call(NamedTuple):
    callee: str
    times: int | None
    loops: bool
    fuses: bool
    branches: bool


def runs_of(module: Module) -> dict[str, Runs]:
    """How often each computation runs. One that nothing calls counts once."""
    calls = {name: list(_calls_of(name, module)) for name in module.calls}
    runs: dict[str, Runs] = {}
    for name in reversed(module.callees_first or [*calls]):
        caller = runs.setdefault(name, Runs(1, False, False, False))
        for call in calls.get(name, ()):
            known = runs.get(call.callee)
            unknown = caller.times is None or call.times is None
            times = None if unknown else (caller.times or 0) * (call.times or 0)
            in_loop, is_fused = caller.in_loop or call.loops, caller.is_fused or call.fuses
            in_branch = caller.in_branch or call.branches
            if known is not None:
                times = None if known.times is None or times is None else known.times + times
                in_loop, is_fused = in_loop or known.in_loop, is_fused and known.is_fused
                in_branch = in_branch or known.in_branch
            is_plausible = times is not None and times <= MAX_SIZE
            runs[call.callee] = Runs(times if is_plausible else None, in_loop, is_fused, in_branch)
    return runs


def _calls_of(name: str, module: Module) -> Iterator[_Call]:
    for one, attribute, callee in module.calls[name]:
        loops = one.opcode == "while"
        times = module.trip_counts.get(one.name) if loops else 1
        if times is not None and attribute == "condition":
            times += 1
        fuses = one.opcode == "fusion" or (attribute == "to_apply" and one.opcode != "call")
        yield _Call(callee, times, loops, fuses, one.opcode == "conditional")
