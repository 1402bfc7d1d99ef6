"""What the compiler keeps in memory, and when: the files that it writes with ``xla_dump_to``.

The buffer assignment has an *allocation* for each block of memory, and the *buffers* in it, with
their offsets; the live ranges say at which steps of the schedule each is in use. Figures of memory
that JAX reports are sums over these. Parts of the two files:

    allocation 0: size 1024, parameter 0, …
     value: <7 dot.1{0} @0> (size=512,offset=0)…     an array in it, item 0 of what dot.1 makes

      3:dot.1                                        step 3 of the schedule
    BufferLiveRange:
      dot.1{0}:3-9                                   the array is live from step 3 to step 9
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """An array in memory: what an instruction made, or the part of its result at an index."""

    name: str  # the name of the instruction
    index: tuple[int, ...]  # the part of its result; () for all of it
    size: int  # in bytes
    offset: int  # in bytes, from the beginning of its allocation
    first: int  # the first step of the schedule at which it is live
    last: int  # the last such step


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A block of the main memory of a device, which several values use one after another."""

    size: int  # in bytes
    parameter: int | None  # the number of the argument that it holds; None if it holds none
    is_result: bool  # whether it holds a result, perhaps after other arrays
    values: tuple[Buffer, ...]  # the arrays in it that have a live range


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The allocations of a program, and the names of its instructions as scheduled."""

    allocations: tuple[Allocation, ...]
    schedule: tuple[str, ...]  # step of the schedule → the name of the instruction

    def in_use(self) -> list[int]:
        """Sums the bytes in use at each step: live buffers, and blocks that are always held."""
        # Step → the bytes that begin to be in use there, less those that end with the step before.
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
    """Reads from the compiler's files which memory a program uses at which step.

    Returns None if the folder does not have one file of each kind, or if these have no allocations
    or no instructions.
    """
    # The names of files begin with that of the program.
    assignments = sorted(folder.glob("*optimizations-buffer-assignment.txt"))
    ranges = sorted(folder.glob("*optimizations-live-range.txt"))
    if len(assignments) != 1 or len(ranges) != 1:
        return None
    schedule, _, live = ranges[0].read_text().partition("BufferLiveRange:")
    names = tuple(_STEP.findall(schedule))  # the names of the instructions in order
    # (instruction, index as written) → the first and the last step at which the array is live. For
    # a result of the program, the file says one step more than there are, so `min` cuts it.
    spans = {
        (name, index): (int(first), min(int(last), len(names) - 1))
        for name, index, first, last in _RANGE.findall(live)
    }
    # Each allocation is a block of text, in which the lines of its values are indented.
    blocks = re.split(r"\n(?![ \t])", assignments[0].read_text())
    allocations = [*filter(None, (_read_allocation(block, spans) for block in blocks))]
    return Buffers(tuple(allocations), names) if allocations and names else None


def _read_allocation(
    block: str, spans: Mapping[tuple[str, str], tuple[int, int]]
) -> Allocation | None:
    """Reads an allocation; None for one that is not in main memory, or for another text.

    Args:
      block: the text of the allocation: a line about the allocation, and a line for each value.
      spans: the first and the last step at which each array is live, by the name of its instruction
        and the index as it is written. Arrays that are missing here are left out.
    """
    head, _, lines_of_values = block.partition("\n")
    size = _ALLOCATION.match(head)
    # Only the main memory counts. Other memory, such as a TPU's vector memory, has a colour other
    # than 0; the memory of a thread is on a stack; constants are a part of the program.
    if size is None or re.search(r", (color [1-9]|thread-local|constant)", head):
        return None
    number = re.search(r", parameter (\d+),", head)
    buffers = []
    for name, index, length, offset in _VALUE.findall(lines_of_values):
        if (name, index) in spans:
            first, last = spans[name, index]
            part = tuple(int(i) for i in index.split(",") if i)  # "1,0" → (1, 0), "" → ()
            buffers.append(Buffer(name, part, int(length), int(offset), first, last))
    return Allocation(
        size=int(size[1]),
        parameter=int(number[1]) if number else None,
        is_result="maybe-live-out" in head,
        values=tuple(_one_after_another(buffers)),
    )


def _one_after_another(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yields buffers so that one that is replaced in place ends before its replacement begins.

    In the compiler's live ranges, both are live at that step, although they are the same memory.
    Buffers are the same memory if they begin at the same offset.
    """
    by_offset: defaultdict[int, list[Buffer]] = defaultdict(list)
    for buffer in sorted(buffers, key=lambda buffer: (buffer.first, buffer.last)):
        by_offset[buffer.offset].append(buffer)
    for in_one_place in by_offset.values():
        for buffer, following in itertools.zip_longest(in_one_place, in_one_place[1:]):
            # `min` changes nothing if the following buffer begins after this one has ended.
            last = buffer.last if following is None else min(buffer.last, following.first - 1)
            # A buffer that is replaced in its first step is left out.
            if last >= buffer.first:
                yield dataclasses.replace(buffer, last=last)


# XLA's BufferAssignment::ToVerboseString and HloLiveRange::ToString write these texts. The format
# is not documented; the top of this file has examples.
_STEP = re.compile(r"^ +\d+:(\S+)$", re.MULTILINE)
_RANGE = re.compile(r"^ +(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)")
# A loop or a conditional has values of its own for what it carries: `(phi)`.
_VALUE = re.compile(
    r"value: <\d+ (\S+?)(?:\{([\d,]+)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
