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

# The powers of two that are tried: as many times the devices, as many microbatches, or as small a
# part of the batch.
_FACTORS = (2, 4, 8, 16, 32, 64)


def remedies(search: Search, reports: Mapping[str, ProgramReport | Failure]) -> Iterator[str]:
    """Yields what would fit, as lines: memory, devices, remat, microbatches, offload, batch."""
    limit, smallest = search.limit, _candidate_with_least(search, reports)
    if limit is None or smallest is None:
        return
    candidate, variant = smallest.candidate, smallest.variant
    arguments, rest, rows = smallest.arguments, smallest.rest, candidate.rows
    # More memory.
    yield f"{bytes_text(arguments + rest)} on each device, for {candidate.name}"
    # More devices.
    yield from _more_devices(search, smallest, limit)
    # Recomputed activations. If the user chose `remat` of the stacks, or the search tried it, this
    # is what needs least with it. The rest is 0 if nothing was compiled, and so unknown.
    if rest and "remat" not in variant.chosen:
        yield f"remat, for blocks in a Stack: of {bytes_text(rest)} besides the arguments"
    # Microbatches: the whole batch is still an argument, but activations are those of a part.
    divisors = [n for n in _FACTORS if rows and rows % n == 0]
    enough = [n for n in divisors if arguments + rest / n <= limit]
    if rest and enough and "microbatches" not in variant.chosen:
        needs = arguments + rest / enough[0]
        yield f"{enough[0]} microbatches of accumulate_gradients: {_about_on_each(needs)}"
    # The state of the optimizer on the host.
    if not variant.offload:
        held = search.arguments_of(candidate, variant, offload=True)
        if held < arguments and held + rest <= limit:
            yield f"offload of the optimizer's state: {_about_on_each(held + rest)}"
    # The largest batch that fits.
    for n in divisors:
        needs = search.arguments_of(candidate, variant, rows=rows // n) + rest / n
        if needs <= limit:
            yield f"a batch of {rows // n} rows: {_about_on_each(needs)}"
            break


def _candidate_with_least(
    search: Search, reports: Mapping[str, ProgramReport | Failure]
) -> Needs | None:
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
    """Yields a line with the smallest mesh of more devices that fits, if there is one.

    Parameters are sharded over data there, by ``fsdp``, and the new devices are along the axis
    ``data``, so that each has a smaller part of the parameters and fewer rows of the batch. Nothing
    is known of a function of the user.

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
    [axis] = search.axes.data  # only the role "model" may have two axes
    for factor in _FACTORS:
        sizes = {**candidate.sizes, axis: candidate.sizes.get(axis, 1) * factor}
        larger = dataclasses.replace(candidate, strategy=strategy, sizes=sizes)
        needs = search.arguments_of(larger, smallest.variant) + smallest.rest / factor
        if needs <= limit:
            text = " × ".join(f"{name} {size}" for name, size in sizes.items())
            num_devices = math.prod(sizes.values())
            yield f"{num_devices} devices, {strategy}, {text}: {_about_on_each(needs)}"
            break


def _about_on_each(size: float) -> str:
    """Returns the text of what an estimate says that each device needs: "about 3 GiB on each"."""
    return f"about {bytes_text(int(size))} on each"
