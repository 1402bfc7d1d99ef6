"""What the compiler keeps in memory, and when: the files that it writes with ``xla_dump_to``.

The buffer assignment has an *allocation* for each block of memory, and the *buffers* in it, with
their offsets; the live ranges say at which steps of the schedule each is in use. Figures of memory
that JAX reports are sums over these.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """An array in memory: what an instruction made, or the part of its result at an index."""

    name: str
    index: tuple[int, ...]
    size: int
    offset: int  # in its allocation
    first: int  # position of the schedule at which it is live
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A block of the main memory of a device, which several values use one after another."""

    size: int
    parameter: int | None  # the number of the argument that it holds
    is_result: bool
    values: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The allocations of a program, and the names of its instructions as scheduled."""

    allocations: tuple[Allocation, ...]
    schedule: tuple[str, ...]

    def in_use(self) -> list[int]:
        """Sums the bytes in use at each step: live buffers, and blocks that are always held."""
        changes = [0] * (len(self.schedule) + 1)
        for allocation in self.allocations:
            if allocation.is_result or allocation.parameter is not None:
                changes[0] += allocation.size
                continue
            for buffer in allocation.values:
                changes[buffer.first] += buffer.size
                changes[buffer.last + 1] -= buffer.size
        return [*itertools.accumulate(changes[:-1])]


def read_buffers(folder: Path) -> Buffers | None:
    """Reads which memory the program uses when, from the files that the compiler wrote.

    None if the folder has no such files.
    """
    # Names that begin with the module's.
    assignments = sorted(folder.glob("*optimizations-buffer-assignment.txt"))
    ranges = sorted(folder.glob("*optimizations-live-range.txt"))
    if len(assignments) != 1 or len(ranges) != 1:
        return None
    schedule, _, live = ranges[0].read_text().partition("BufferLiveRange:")
    names = tuple(_STEP.findall(schedule))
    # The first and the last step at which each array is live, by instruction and index.
    spans = {
        (name, index): (int(first), min(int(last), len(names) - 1))
        for name, index, first, last in _RANGE.findall(live)
    }
    allocations = []
    for block in re.split(r"\n(?![ \t])", assignments[0].read_text()):  # one for each allocation
        head, _, values_in_it = block.partition("\n")
        size = _ALLOCATION.match(head)
        # Other memory, such as a TPU's vector memory, has a colour. The memory of a thread is on a
        # stack.
        if size is None or re.search(r", (color [1-9]|thread-local|constant)", head):
            continue
        number = re.search(r", parameter (\d+),", head)
        buffers = [
            Buffer(name, _numbers(index), int(length), int(offset), *spans[name, index])
            for name, index, length, offset in _VALUE.findall(values_in_it)
            if (name, index) in spans
        ]
        parameter = int(number[1]) if number else None
        values = tuple(_one_after_another(buffers))
        allocations.append(Allocation(int(size[1]), parameter, "maybe-live-out" in head, values))
    return Buffers(tuple(allocations), names) if allocations and names else None


def _one_after_another(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yields buffers; one that an operation replaces in place ends before the result begins."""
    by_offset: defaultdict[int, list[Buffer]] = defaultdict(list)
    for buffer in sorted(buffers, key=lambda buffer: (buffer.first, buffer.last)):
        by_offset[buffer.offset].append(buffer)
    for place in by_offset.values():
        for buffer, following in itertools.zip_longest(place, place[1:]):
            last = buffer.last if following is None else min(buffer.last, following.first - 1)
            if last >= buffer.first:  # else another one took its place at once
                yield dataclasses.replace(buffer, last=last)


def _numbers(index: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, index.split(","))))


# As BufferAssignment::ToVerboseString and HloLiveRange::ToString write them, without a format.
_STEP = re.compile(r"^ +\d+:(\S+)$", re.MULTILINE)
_RANGE = re.compile(r"^ +(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)")
# A loop or a conditional has values of its own for what it carries: `(phi)`.
_VALUE = re.compile(
    r"value: <\d+ (\S+?)(?:\{([\d,]+)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
