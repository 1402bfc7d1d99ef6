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

from ..analysis.program import ProgramReport
from ..analysis.units import bytes_text
from ..report.comparison import Failure
from .candidates import split_name
from .search import Needs, Search

_MOST_TIMES = 64  # as many devices, or microbatches; and a batch that is as small a part


def remedies(search: Search, reports: Mapping[str, ProgramReport | Failure]) -> Iterator[str]:
    """Yields what would fit, as lines: memory, devices, remat, microbatches, offload, batch."""
    limit, smallest = search.limit, _smallest(search, reports)
    if limit is None or smallest is None:
        return
    candidate, variant = smallest.candidate, smallest.variant
    arguments, rest, rows = smallest.arguments, smallest.rest, candidate.rows
    yield f"{bytes_text(arguments + rest)} on each device, for {candidate.name}"
    yield from _more_devices(search, smallest, limit)
    if rest and "remat" not in variant.chosen:  # that of a Stack was tried
        yield f"remat, for blocks in a Stack: of {bytes_text(rest)} besides the arguments"
    # The powers of two into which the batch can be divided.
    divisors = [2**i for i in range(1, _MOST_TIMES.bit_length()) if rows and rows % 2**i == 0]
    count = next((n for n in divisors if arguments + rest / n <= limit), None)
    if rest and count and "microbatches" not in variant.chosen:
        yield f"{count} microbatches of accumulate_gradients: {_about(arguments + rest / count)}"
    if not variant.offload:
        held = search.arguments_of(candidate, variant, offload=True)
        if held < arguments and held + rest <= limit:
            yield f"offload of the optimizer's state: {_about(held + rest)}"
    for n in divisors:
        held = search.arguments_of(candidate, variant, rows=rows // n)
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
                variant=entry.variant,
                arguments=memory.arguments,
                rest=memory.peak - memory.arguments,
            )
            compiled.append(needs)
    return min(compiled, key=lambda x: x.arguments + x.rest, default=search.smallest)


def _more_devices(search: Search, smallest: Needs, limit: int) -> Iterator[str]:
    """Yields the least power of two times as many devices, with parameters sharded over data.

    Nothing if none is enough, or if the strategy is a function of the user.

    Args:
      search: predicts the arguments.
      smallest: the candidate, on fewer devices, and what it needs.
      limit: the bytes of a device.
    """
    candidate = smallest.candidate
    if search.functions.get(candidate.strategy) is not None:  # of the user
        return
    _, styles = split_name(candidate.strategy)
    strategy = " + ".join(("fsdp", *styles))
    [axis] = search.axes.data
    for i in range(1, _MOST_TIMES.bit_length()):
        sizes = {**candidate.sizes, axis: candidate.sizes.get(axis, 1) * 2**i}
        larger = dataclasses.replace(candidate, strategy=strategy, sizes=sizes)
        needs = search.arguments_of(larger, smallest.variant) + smallest.rest / 2**i
        if needs <= limit:
            text = " × ".join(f"{name} {size}" for name, size in sizes.items())
            yield f"{math.prod(sizes.values())} devices, {strategy}, {text}: {_about(needs)}"
            return


def _about(size: float) -> str:
    return f"about {bytes_text(int(size))} on each"
