"""What would fit where no candidate of a plan does.

The candidate that needs least is changed in one way at a time. Its arguments then are those that
are predicted from shapes; all else that it needs (``rest``), its activations and temporaries, is
taken to grow with the rows that a device computes at once. So these are estimates, to be planned
again.

From other modules: a `Variant` is the step with values of options (``chosen``);
`Search.arguments_of` predicts the bytes of a candidate's arguments on each device, and `Needs` are
these and the rest; the name of a strategy is one for the batch and styles for layers, such as
``fsdp + tensor`` (`split_name`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..analysis.program import ProgramReport
from ..analysis.units import bytes_text
from ..report.comparison import Failure
from .candidates import Candidate, split_name
from .search import Needs, Search

_MOST_TIMES = 64  # as many devices, or microbatches; and a batch that is as small a part


def remedies(search: Search, reports: Mapping[str, ProgramReport | Failure]) -> Iterator[str]:
    """Yields what would fit, as lines: memory, devices, remat, microbatches, offload, batch."""
    limit, smallest = search.limit, _smallest(search, reports)
    if limit is None or smallest is None:
        return
    candidate, index, arguments, rest = smallest
    yield f"{bytes_text(arguments + rest)} on each device, for {candidate.name}"
    yield from _devices(search, candidate, index, rest)
    variant, rows = search.variants[index], candidate.rows
    if rest and "remat" not in variant.chosen:  # that of a Stack was tried
        yield f"remat, for blocks in a Stack: of {bytes_text(rest)} besides the arguments"
    # The powers of two into which the batch can be divided.
    divisors = [2**i for i in range(1, _MOST_TIMES.bit_length()) if rows and rows % 2**i == 0]
    count = next((n for n in divisors if arguments + rest / n <= limit), None)
    if rest and count and "microbatches" not in variant.chosen:
        yield f"{count} microbatches of accumulate_gradients: {_about(arguments + rest / count)}"
    if not variant.offload:
        held = search.arguments_of(candidate, index, offload=True)
        if held < arguments and held + rest <= limit:
            yield f"offload of the optimizer's state: {_about(held + rest)}"
    for n in divisors:
        held = search.arguments_of(candidate, index, rows=rows // n)
        if held + rest / n <= limit:
            yield f"a batch of {rows // n} rows: {_about(held + rest / n)}"
            return


def _smallest(search: Search, reports: Mapping[str, ProgramReport | Failure]) -> Needs | None:
    """Finds the candidate that needs least: by its program if any was compiled, else by shapes."""
    compiled = []
    for name, report in reports.items():
        memory = None if isinstance(report, Failure) else report.memory
        if memory is not None and memory.peak is not None and memory.arguments is not None:
            entry = search.entries[name]
            needs = Needs(
                candidate=entry.candidate,
                variant_index=entry.variant_index,
                arguments=memory.arguments,
                rest=memory.peak - memory.arguments,
            )
            compiled.append(needs)
    return min(compiled, key=lambda x: x.arguments + x.rest, default=search.smallest)


def _devices(search: Search, candidate: Candidate, index: int, rest: int) -> Iterator[str]:
    """Yields the least power of two times as many devices, with parameters sharded over data.

    Args:
      search: predicts the arguments, and has the limit.
      candidate: the candidate, on fewer devices.
      index: that of its variant.
      rest: its bytes besides the arguments.
    """
    _, styles = split_name(candidate.strategy)
    strategy = " + ".join(("fsdp", *styles))
    [axis] = search.axes.data
    if search.functions.get(candidate.strategy) is not None:  # of the user
        return
    for i in range(1, _MOST_TIMES.bit_length()):
        sizes: dict[str, Any] = {**candidate.sizes}
        sizes[axis] = sizes.get(axis, 1) * 2**i
        larger = dataclasses.replace(candidate, strategy=strategy, sizes=sizes)
        needs = search.arguments_of(larger, index) + rest / 2**i
        if needs <= (search.limit or 0):
            text = " × ".join(f"{name} {size}" for name, size in sizes.items())
            yield f"{math.prod(sizes.values())} devices, {strategy}, {text}: {_about(needs)}"
            return


def _about(size: float) -> str:
    return f"about {bytes_text(int(size))} on each"
