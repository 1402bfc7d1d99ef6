"""Says what may fit if no candidate of a plan fits.

The candidate that needs least is changed in one way at a time. The bytes of the changed arguments
are predicted from shapes. All other memory of the candidate (``rest``), its activations and
temporaries, only shrinks as far as a device computes fewer rows at once:

    rows at once = rows of the batch / devices that divide them / microbatches

A device computes at least one row at once, so a change that leaves this number as it is leaves the
rest as it is, and a change for which this number is not whole is impossible and has no line. How
much a smaller number saves is read from two compiled programs that only differ in their
microbatches (`_Rest`). Without two programs, the line says what the estimate assumes. If the rest
is unknown, the lines count the arguments alone, and say so. All lines are estimates, so the user
should plan again with them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from ..analysis.program import ProgramReport
from ..analysis.units import bytes_text
from ..report.comparison import Failure
from .chains import split_name
from .predictions import Prediction
from .search import Needs, Search
from .variants import can_recompute, microbatches_of

# The powers of two that are tried: so many times the devices, so many times the microbatches, or
# the batch divided by so many.
_FACTORS = (2, 4, 8, 16, 32, 64)


def remedies(search: Search, reports: Mapping[str, ProgramReport | Failure]) -> Iterator[str]:
    """Yields lines that say what may fit: memory, devices, remat, microbatches, offload, batch.

    Yields nothing if the memory limit is unknown, or if there is no candidate to start from.
    """
    limit, smallest = search.limit, _candidate_with_least(search, reports)
    if limit is None or smallest is None:
        return
    candidate, variant, memory, prediction = smallest
    estimates = _Rest(search, smallest, reports)
    # More memory.
    source = " (by the compiler's error)" if memory.is_refused and memory.rest is not None else ""
    unknown = _UNKNOWN if memory.rest is None else ""
    size = _size(memory.arguments, memory.rest)
    yield f"{size} on each device, for {candidate.name}{source}{unknown}"
    # More devices.
    yield from _more_devices(search, smallest, estimates, limit)
    # Recomputed activations. There is no line if the candidate already has them, or if the user
    # chose a value of `remat`.
    if memory.rest and can_recompute(variant):
        part = f"a part of the {bytes_text(memory.rest)} besides the arguments"
        yield f"remat, for blocks in a Stack: saves {part}, which is not estimated"
    # Microbatches. The whole batch is still an argument, but the activations are those of a part.
    count = microbatches_of(variant)
    for n in _FACTORS:
        if memory.rest is None or prediction.rows == 0 or prediction.rows % (n * count):
            continue
        rest, condition = estimates.with_rows(prediction.rows // (n * count))
        if memory.arguments + rest <= limit:
            what = f"{n * count} microbatches of accumulate_gradients"
            yield f"{what}: {_on_each(memory.arguments + rest, condition)}"
            break
    # The state of the optimizer on the host.
    offloaded = None if variant.offload else search.predicted_with(smallest, offload=True)
    if offloaded is not None and offloaded.arguments < memory.arguments:
        rest, condition = estimates.with_rows(prediction.rows // count)
        if offloaded.arguments + rest <= limit:
            needs = _on_each(offloaded.arguments + rest, condition)
            yield f"offload of the optimizer's state: {needs}"
    # The largest batch that fits.
    for n in _FACTORS:
        if candidate.rows and candidate.rows % n == 0:
            rows = candidate.rows // n
            changed = search.predicted_with(smallest, rows=rows)
            line = estimates.line(f"a batch of {rows} rows", changed, limit)
            if line:
                yield line
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
            needs.append(Needs(entry.candidate, entry.variant, memory, entry.prediction))

    def rank(needs: Needs) -> tuple[bool, int]:
        """Returns a sort key: the bytes; candidates with an unknown rest come last."""
        memory = needs.memory
        return memory.rest is None, memory.arguments + (memory.rest or 0)

    return min(needs, key=rank, default=search.smallest)


class _Rest:
    """Estimates what a candidate needs besides its arguments, for fewer rows at once.

    Args:
      search: all candidates.
      start: the candidate, and what it needs.
      reports: the compiled programs. Those that only differ from ``start`` in their microbatches
        say what a row at once costs.

    Attributes:
      _start: the candidate, and what it needs.
      _count: the microbatches of the candidate.
      _rows: the rows that a device computes at once; 0 without a batch.
      _known: rows at once → the bytes besides the arguments, by the compiled programs.
    """

    def __init__(
        self, search: Search, start: Needs, reports: Mapping[str, ProgramReport | Failure]
    ):
        """Collects the bytes of compiled programs by their rows at once."""
        self._start, self._count = start, microbatches_of(start.variant)
        self._rows = start.prediction.rows // self._count
        self._known: dict[int, int] = {}
        for name in reports:
            entry, memory = search.entries[name], search.memory_need(name, reports)
            is_alike = (
                # Candidates with equal keys shard everything alike.
                entry.prediction.key == start.prediction.key
                and entry.candidate.rows == start.candidate.rows
                and entry.variant.without_microbatches == start.variant.without_microbatches
            )
            if is_alike and memory is not None and memory.rest is not None:
                rows = entry.prediction.rows // microbatches_of(entry.variant)
                self._known[rows] = min(memory.rest, self._known.get(rows, memory.rest))

    def with_rows(self, rows: int) -> tuple[float, str]:
        """Returns the bytes besides the arguments, and what the estimate of them assumes.

        The bytes are 0 if nothing is known of them.

        Args:
          rows: the rows that a device computes at once.
        """
        rest = self._start.memory.rest
        if rest is None:
            return 0.0, _UNKNOWN
        if rows >= self._rows:  # nothing shrinks
            return float(rest), ""
        if rows in self._known:
            return float(self._known[rows]), ""
        least = rest * rows / self._rows  # if all of it belongs to the rows
        more_rows = min((known for known in self._known if known > self._rows), default=None)
        if more_rows is None:
            return least, ", if all but the arguments shrinks with the rows"
        of_row = (self._known[more_rows] - rest) / (more_rows - self._rows)
        estimate = rest - max(of_row, 0.0) * (self._rows - rows)
        return max(estimate, least), ""

    def line(self, what: str, changed: Prediction | None, limit: int) -> str:
        """Returns the line of a change, which may need fewer microbatches; "" if it does not fit.

        Args:
          changed: the prediction of the changed candidate; None if it is impossible.
          limit: the bytes of a device.
        """
        if changed is None:
            return ""
        # A device may now have too few rows for so many microbatches.
        count = math.gcd(self._count, changed.rows)
        rest, condition = self.with_rows(changed.rows // count)
        if changed.arguments + rest > limit:
            return ""
        with_count = "" if count == self._count else f", microbatches={count}"
        return f"{what}{with_count}: {_on_each(changed.arguments + rest, condition)}"


def _more_devices(search: Search, start: Needs, estimates: _Rest, limit: int) -> Iterator[str]:
    """Yields a line with the smallest mesh of more devices that fits, if there is one.

    The new devices are along the axis ``data``, and ``fsdp`` shards the parameters over this axis.
    So each device has a smaller part of the parameters and fewer rows of the batch. There is no
    line if the strategy is a function of the user, because nothing is known of its axes.

    Args:
      start: the candidate, on fewer devices, and what it needs.
      limit: the bytes of a device.
    """
    candidate = start.candidate
    if search.functions.get(candidate.strategy) is not None:  # a function of the user
        return
    _, styles = split_name(candidate.strategy)
    strategy = " + ".join(("fsdp", *styles))
    [axis] = search.axes.data  # only the role "model" may have two axes
    for factor in _FACTORS:
        sizes = {**candidate.sizes, axis: candidate.sizes.get(axis, 1) * factor}
        larger = dataclasses.replace(candidate, strategy=strategy, sizes=sizes)
        mesh = " × ".join(f"{name} {size}" for name, size in sizes.items())
        what = f"{math.prod(sizes.values())} devices, {strategy}, {mesh}"
        line = estimates.line(what, search.predicted_with(start._replace(candidate=larger)), limit)
        if line:
            yield line
            break


def _size(arguments: int, rest: int | None) -> str:
    """Returns a text for the bytes that a candidate needs on each device."""
    if rest is None:
        return f"at least {bytes_text(arguments)}"
    return bytes_text(arguments + rest)


def _on_each(size: float, condition: str) -> str:
    """Returns a text for the estimated bytes of each device: "about 3 GiB on each".

    Args:
      size: the bytes.
      condition: what the estimate assumes, or that the bytes are those of the arguments alone.
    """
    about = "at least" if condition == _UNKNOWN else "about"
    return f"{about} {bytes_text(int(size))} on each{condition}"


# The end of a line that counts the arguments alone.
_UNKNOWN = ", activations unknown"
