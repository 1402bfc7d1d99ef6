"""What would fit where no candidate of a plan does.

The candidate that needs least is changed in one way at a time. Its arguments then are those that
are predicted from shapes; all else that it needs (``rest``), its activations and temporaries, is
taken to grow with the rows that a device computes at once. So these are estimates, to be planned
again. Where the rest is unknown, lines count the arguments alone, and say so.

From other modules: a `Variant` is the step with values of options (``chosen``);
`Search.arguments_of` predicts the bytes of a candidate's arguments on each device, and `Needs` has
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
    candidate, variant, memory = smallest
    arguments, rows = memory.arguments, candidate.rows
    rest, is_known = memory.rest or 0, memory.rest is not None
    # More memory.
    source = " (by the compiler's error)" if memory.is_refused and is_known else ""
    size = bytes_text(arguments + rest) if is_known else f"at least {bytes_text(arguments)}"
    yield f"{size} on each device, for {candidate.name}{source}{_what_is_left(is_known)}"
    # More devices.
    yield from _more_devices(search, smallest, limit)
    # Recomputed activations. If the user chose `remat` of the stacks, or the search tried it, this
    # is what needs least with it.
    if rest and "remat" not in variant.chosen:
        yield f"remat, for blocks in a Stack: of {bytes_text(rest)} besides the arguments"
    # Microbatches: the whole batch is still an argument, but activations are those of a part.
    divisors = [n for n in _FACTORS if rows and rows % n == 0]
    enough = [n for n in divisors if arguments + rest / n <= limit]
    if rest and enough and "microbatches" not in variant.chosen:
        needs = _on_each(arguments + rest / enough[0], is_known)
        yield f"{enough[0]} microbatches of accumulate_gradients: {needs}"
    # The state of the optimizer on the host.
    if not variant.offload:
        held = search.arguments_of(candidate, variant, offload=True)
        if held < arguments and held + rest <= limit:
            yield f"offload of the optimizer's state: {_on_each(held + rest, is_known)}"
    # The largest batch that fits.
    for n in divisors:
        needed = search.arguments_of(candidate, variant, rows=rows // n) + rest / n
        if needed <= limit:
            yield f"a batch of {rows // n} rows: {_on_each(needed, is_known)}"
            break


def _candidate_with_least(
    search: Search, reports: Mapping[str, ProgramReport | Failure]
) -> Needs | None:
    """Finds the candidate that needs least: by its program if any was compiled, else by shapes."""
    needs = []
    for name in reports:
        if memory := search.memory_of(name, reports):
            entry = search.entries[name]
            needs.append(Needs(entry.candidate, entry.variant, memory))

    def rank(needs: Needs) -> tuple[bool, int]:
        """Ranks by all bytes, those of which only the arguments are known last."""
        memory = needs.memory
        return memory.rest is None, memory.arguments + (memory.rest or 0)

    return min(needs, key=rank, default=search.smallest)


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
    candidate, variant, memory = smallest
    if search.functions.get(candidate.strategy) is not None:  # of the user
        return
    _, styles = split_name(candidate.strategy)
    strategy = " + ".join(("fsdp", *styles))
    [axis] = search.axes.data  # only the role "model" may have two axes
    for factor in _FACTORS:
        sizes = {**candidate.sizes, axis: candidate.sizes.get(axis, 1) * factor}
        larger = dataclasses.replace(candidate, strategy=strategy, sizes=sizes)
        needed = search.arguments_of(larger, variant) + (memory.rest or 0) / factor
        if needed <= limit:
            text = " × ".join(f"{name} {size}" for name, size in sizes.items())
            on_each = _on_each(needed, memory.rest is not None)
            yield f"{math.prod(sizes.values())} devices, {strategy}, {text}: {on_each}"
            break


def _on_each(size: float, is_known: bool) -> str:
    """Returns the text of what an estimate says that each device needs: "about 3 GiB on each".

    ``is_known`` is whether ``size`` counts more than the arguments.
    """
    about = "about" if is_known else "at least"
    return f"{about} {bytes_text(int(size))} on each{_what_is_left(is_known)}"


def _what_is_left(is_known: bool) -> str:
    """Returns what to add to a size of the arguments alone; nothing if it counts all."""
    return "" if is_known else ", activations unknown"
