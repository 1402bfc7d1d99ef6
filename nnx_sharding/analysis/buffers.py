"""What the compiler keeps in memory, and when: the files that it writes with ``xla_dump_to``."""

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
        """The bytes in use at each position: those of live values, and all that is held."""
        changes = [0] * (len(self.schedule) + 1)
        for one in self.allocations:
            if one.is_result or one.parameter is not None:
                changes[0] += one.size
                continue
            for value in one.values:
                changes[value.first] += value.size
                changes[value.last + 1] -= value.size
        return [*itertools.accumulate(changes[:-1])]


def read_buffers(folder: Path) -> Buffers | None:
    """Reads what the compiler has written into a folder; None if it wrote no such files."""
    assignments = sorted(folder.glob("*optimizations-buffer-assignment.txt"))
    ranges = sorted(folder.glob("*optimizations-live-range.txt"))
    if len(assignments) != 1 or len(ranges) != 1:
        return None
    schedule, _, live = ranges[0].read_text().partition("BufferLiveRange:")
    names = tuple(_STEP.findall(schedule))
    spans = {
        (name, index): (int(first), min(int(last), len(names) - 1))
        for name, index, first, last in _RANGE.findall(live)
    }
    allocations = []
    for block in re.split(r"\n(?![ \t])", assignments[0].read_text()):  # one for each allocation
        head, _, values_in_it = block.partition("\n")
        size = _ALLOCATION.match(head)
        # Other memory, such as a TPU's vector memory, has a colour. That of a thread is on a stack.
        if size is None or re.search(r", (color [1-9]|thread-local|constant)", head):
            continue
        number = re.search(r", parameter (\d+),", head)
        found = [
            Buffer(name, _numbers(index), int(length), int(offset), *spans[name, index])
            for name, index, length, offset in _VALUE.findall(values_in_it)
            if (name, index) in spans
        ]
        parameter, values = int(number[1]) if number else None, tuple(_one_after_another(found))
        allocations.append(Allocation(int(size[1]), parameter, "maybe-live-out" in head, values))
    return Buffers(tuple(allocations), names) if allocations and names else None


def _one_after_another(values: Sequence[Buffer]) -> Iterator[Buffer]:
    """The values; one that an operation replaces in place ends before the result begins."""
    places: defaultdict[int, list[Buffer]] = defaultdict(list)
    for value in sorted(values, key=lambda value: (value.first, value.last)):
        places[value.offset].append(value)
    for place in places.values():
        for value, following in itertools.zip_longest(place, place[1:]):
            last = value.last if following is None else min(value.last, following.first - 1)
            if last >= value.first:
                yield dataclasses.replace(value, last=last)


def _numbers(index: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, index.split(","))))


# As BufferAssignment::ToVerboseString and HloLiveRange::ToString write them, without a format.
_STEP = re.compile(r"^ +\d+:(\S+)$", re.MULTILINE)
_RANGE = re.compile(r"^ +(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)")
_VALUE = re.compile(r"value: <\d+ (\S+?)(?:\{([\d,]+)\})? @\d+> \(size=(\d+),offset=(\d+)\)")
