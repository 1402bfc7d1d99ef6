"""Says what would fit if no candidate of a plan fits.

The candidate that needs least is changed in one way at a time. The bytes of the changed arguments
are predicted from shapes. All other memory of the candidate (``rest``), its activations and
temporaries, is taken to grow with the rows that a device computes at once. So the remedies are
estimates, and the user should plan again with them. If the rest is unknown, the lines count the
arguments alone, and say so.

From other modules: a `Variant` is the step with values of options (``chosen``).
`Search.arguments_of` predicts the bytes of a candidate's arguments on each device, or returns
infinity if the strategy fails. `Search.memory_need` returns the bytes of a compiled candidate, or
None. `Needs` has a candidate and its bytes: ``arguments``, and ``rest``, which is None if unknown.
The name of a strategy is a name for the batch and styles for layers, such as ``fsdp + tensor``
(`split_name`).
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

# The powers of two that are tried: so many times the devices, so many microbatches, or the batch
# divided by so many.
_FACTORS = (2, 4, 8, 16, 32, 64)


def remedies(search: Search, reports: Mapping[str, ProgramReport | Failure]) -> Iterator[str]:
    """Yields lines that say what would fit: memory, devices, remat, microbatches, offload, batch.

    Yields nothing if the memory limit is unknown, or if there is no candidate to start from.
    """
    limit, smallest = search.limit, _candidate_with_least(search, reports)
    if limit is None or smallest is None:
        return
    candidate, variant, memory = smallest
    arguments, rows = memory.arguments, candidate.rows
    is_known = memory.rest is not None
    rest = memory.rest or 0  # 0 if it is unknown
    # More memory.
    source = " (by the compiler's error)" if memory.is_refused and is_known else ""
    size = bytes_text(arguments + rest) if is_known else f"at least {bytes_text(arguments)}"
    yield f"{size} on each device, for {candidate.name}{source}{_what_is_left(is_known)}"
    # More devices.
    yield from _more_devices(search, smallest, limit)
    # Recomputed activations. This line is left out if the candidate already has a value of `remat`,
    # because the user chose it or the search tried it.
    if rest and "remat" not in variant.chosen:
        yield f"remat, for blocks in a Stack: of {bytes_text(rest)} besides the arguments"
    # Microbatches. The whole batch is still an argument, but the activations are those of a part.
    divisors = [n for n in _FACTORS if rows and rows % n == 0]
    sufficient = [n for n in divisors if arguments + rest / n <= limit]
    if rest and sufficient and "microbatches" not in variant.chosen:
        needs = _on_each(arguments + rest / sufficient[0], is_known)
        yield f"{sufficient[0]} microbatches of accumulate_gradients: {needs}"
    # The state of the optimizer on the host.
    if not variant.offload:
        offloaded_bytes = search.arguments_of(candidate, variant, offload=True)
        if offloaded_bytes < arguments and offloaded_bytes + rest <= limit:
            needs = _on_each(offloaded_bytes + rest, is_known)
            yield f"offload of the optimizer's state: {needs}"
    # The largest batch that fits.
    for n in divisors:
        needed = search.arguments_of(candidate, variant, rows=rows // n) + rest / n
        if needed <= limit:
            yield f"a batch of {rows // n} rows: {_on_each(needed, is_known)}"
            break


def _candidate_with_least(
    search: Search, reports: Mapping[str, ProgramReport | Failure]
) -> Needs | None:
    """Finds the candidate that needs least, by the compiled programs, or without them by shapes."""
    needs = []
    for name in reports:
        memory = search.memory_need(name, reports)
        if memory is not None:
            entry = search.entries[name]
            needs.append(Needs(entry.candidate, entry.variant, memory))

    def rank(needs: Needs) -> tuple[bool, int]:
        """Returns a sort key: the bytes; candidates with an unknown rest come last."""
        memory = needs.memory
        return memory.rest is None, memory.arguments + (memory.rest or 0)

    return min(needs, key=rank, default=search.smallest)


def _more_devices(search: Search, smallest: Needs, limit: int) -> Iterator[str]:
    """Yields a line with the smallest mesh of more devices that fits, if there is one.

    The new devices are along the axis ``data``, and ``fsdp`` shards the parameters over this axis.
    So each device has a smaller part of the parameters and fewer rows of the batch. There is no
    line if the strategy is a function of the user, because nothing is known of its axes.

    Args:
      search: predicts the arguments.
      smallest: the candidate, on fewer devices, and what it needs.
      limit: the bytes of a device.
    """
    candidate, variant, memory = smallest
    if search.functions.get(candidate.strategy) is not None:  # a function of the user
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
    """Returns a text for the estimated bytes of each device: "about 3 GiB on each".

    ``is_known`` is False if ``size`` counts the arguments alone, because the rest is unknown.
    """
    about = "about" if is_known else "at least"
    return f"{about} {bytes_text(int(size))} on each{_what_is_left(is_known)}"


def _what_is_left(is_known: bool) -> str:
    """Returns the end of a line: that activations are unknown, or "" if they are known."""
    return "" if is_known else ", activations unknown"
