"""A reader of HLO text, as ``HloModule::ToString`` writes it, and how often computations run.

Parts are parsed on access, and what is not understood is listed: then the program is unknown.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from .instructions import ABBREVIATED, MAX_SIZE, Computation, Instruction, nesting, spell_out
from .slices import with_exchanges
from .values import Value, Values, trip_counts


class Runs(NamedTuple):
    """How often a computation runs in one call, if each branch of a conditional is taken."""

    times: int | None = 1  # None if it is unknown
    least: int = 1  # with loops of unknown length once
    in_loop: bool = False
    is_fused: bool = False  # part of one operation: a fusion, or the computation of a reduction
    is_applied: bool = False  # to elements, as the computation of a reduction
    in_branch: bool = False  # of a conditional, which may not be taken


@dataclasses.dataclass(frozen=True)
class Module(Values):
    """A program that was read from text.

    Attributes:
      name: the name of the module; empty if it has none.
      head: the text before the first computation: options, and the tables of source lines.
      computations: in the order of the text.
      skipped: lines in or after computations that were not understood.
    """

    name: str
    head: str
    computations: list[Computation]
    skipped: tuple[str, ...] = ()

    @functools.cached_property
    def entry(self) -> Computation | None:
        """The entry computation, if there is one."""
        return next((one for one in self.computations if one.is_entry), None)

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters of the program by number."""
        instructions = self.entry.instructions if self.entry else ()
        return {x.number: x for x in instructions if x.number is not None}

    def argument(self, value: Value) -> int | None:
        """The number of the argument that a value is; None for other values."""
        one, is_outer = self.maker(value), self.entry and value.computation == self.entry.name
        return one.number if one is not None and is_outer else None

    def fused(self, one: Instruction) -> Computation | None:
        """The computation of a fusion; None for other instructions."""
        calls = one.calls if one.opcode == "fusion" else ()
        return next((self.by_name.get(callee) for _, callee in calls), None)

    @functools.cached_property
    def num_devices(self) -> int | None:
        """The number of partitions times the number of replicas; None if neither is given."""
        options = re.search(r"^HloModule .*", self.head, re.MULTILINE)
        counts = _COUNT.findall(options[0]) if options else ()
        return math.prod(map(int, counts)) if counts else None

    @property
    def is_for_tpu(self) -> bool:
        """Whether the TPU compiler, whose layouts have tiles, wrote it."""
        return ":T(" in self.head

    @functools.cached_property
    def unread(self) -> list[str]:
        """What is not understood; unless this is empty, the behaviour of the program is unknown."""
        unread = [*self.skipped]
        if not self.computations or (self.name and self.entry is None):
            unread.append("no entry computation")
        unread += ["computations that call each other"] * (self.callees_first is None)
        for computation in self.computations:
            unread += [str(one) for one in computation.instructions if not one.is_known]
            unread += [
                f"{name}, which {one.name} calls"
                for one, attribute, name in self.calls[computation.name]
                if name not in self.by_name and (attribute != "to_apply" or one.opcode == "call")
            ]
        return unread

    @functools.cached_property
    def callees_first(self) -> list[str] | None:
        """The names of computations, each after those that it calls; None if there are cycles."""
        callees = {name: [callee for *_, callee in calls] for name, calls in self.calls.items()}
        try:
            return [*graphlib.TopologicalSorter(callees).static_order()]
        except graphlib.CycleError:  # in damaged text
            return None

    @functools.cached_property
    def trip_counts(self) -> Mapping[str, int]:
        """How often the body of each ``while`` runs, by the name of the instruction, if known."""
        return {} if self.callees_first is None else trip_counts(self)

    @functools.cached_property
    def runs(self) -> Mapping[str, Runs]:
        """How often each computation runs. One that nothing calls counts once."""
        runs: dict[str, Runs] = {}
        for name in reversed(self.callees_first or [*self.calls]):
            caller = runs.setdefault(name, Runs())
            for one, attribute, callee in self.calls.get(name, ()):
                called, known = self._called(caller, one, attribute), runs.get(callee)
                if known is not None:
                    both = None not in (known.times, called.times)
                    called = Runs(
                        (known.times or 0) + (called.times or 0) if both else None,
                        known.least + called.least,
                        known.in_loop or called.in_loop,
                        known.is_fused and called.is_fused,
                        known.is_applied and called.is_applied,
                        known.in_branch or called.in_branch,
                    )
                is_plausible = called.times is not None and called.times <= MAX_SIZE
                runs[callee] = called if is_plausible else called._replace(times=None)
        return runs

    def _called(self, caller: Runs, one: Instruction, attribute: str) -> Runs:
        """How often an instruction of a computation calls another."""
        is_loop = one.opcode == "while"
        times = self.trip_counts.get(one.name) if is_loop else 1
        if times is not None:
            times += attribute == "condition"
        is_applied = one.opcode not in _CALLS
        return Runs(
            None if times is None or caller.times is None else caller.times * times,
            caller.least * (1 if times is None else times),
            caller.in_loop or is_loop,
            caller.is_fused or one.opcode == "fusion" or is_applied,
            caller.is_applied or is_applied,
            caller.in_branch or one.opcode == "conditional",
        )

    def taken(self, weights: Mapping[str, int]) -> set[str]:
        """The computations that run, if conditionals take the branch with the most weight."""
        if not self.with_opcode("conditional"):
            return {*self.calls}
        sums = Counter(weights)
        largest: dict[str, str] = {}  # the branch that each conditional takes
        for name in self.callees_first or ():
            for one, _, callee in self.calls.get(name, ()):
                if one.opcode != "conditional":
                    sums[name] += sums[callee] * self.trip_counts.get(one.name, 1)
                elif sums[callee] >= sums[largest.get(one.name, "")]:
                    largest[one.name] = callee
            taken = {
                largest[one.name] for one, *_ in self.calls.get(name, ()) if one.name in largest
            }
            sums[name] += sum(sums[callee] for callee in taken)
        taken = {name for name in self.calls if name not in self.callers}
        for name in reversed(self.callees_first or ()):
            calls = self.calls.get(name, ()) if name in taken else ()
            taken |= {callee for one, _, callee in calls if largest.get(one.name, callee) == callee}
        return taken

    def source(self, instruction: Instruction) -> list[tuple[str, int]]:
        """The lines that it was made from, as (file, line), innermost first."""
        metadata = instruction.attributes.get("metadata", "")
        innermost = re.search(r"stack_frame_id=(\d+)", metadata)
        if innermost is None:
            file = re.search(r'source_file="([^"]*)"', metadata)
            line = re.search(r"source_line=(\d+)", metadata)
            return [(file[1], int(line[1]))] if file and line else []
        files, locations, frames = self._tables
        lines: dict[int, tuple[str | None, int]] = {}  # by frame
        frame = int(innermost[1])
        while frame in frames and frame not in lines:
            location, parent = frames[frame]
            number, at = locations.get(location, (0, 0))
            lines[frame], frame = (files.get(number), at), parent
        return [(name, at) for name, at in lines.values() if name is not None]

    @functools.cached_property
    def _tables(self) -> tuple[dict[int, str], dict[int, _Pair], dict[int, _Pair]]:
        """File names, locations as (file, line), and frames as (location, parent), by number."""
        head, _, tables = self.head.partition("\nFunctionNames")
        files = {int(n): name for n, name in _FILE.findall(head)}
        locations = {int(n): (int(file), int(line)) for n, file, line in _LOCATION.findall(tables)}
        frames = {int(n): (int(at), int(parent or 0)) for n, at, parent in _FRAME.findall(tables)}
        # Up to jax 0.12 the number of a parent is one too high, so it can equal that of its child.
        if any(number == parent for number, (_, parent) in frames.items()):
            frames = {number: (at, parent - 1) for number, (at, parent) in frames.items()}
        return files, locations, frames


_Pair: TypeAlias = tuple[int, int]
# What runs a computation once, or as a loop; others apply it to elements.
_CALLS = {"async-start", "call", "conditional", "fusion", "while"}


def parse(text: str) -> Module:
    """Reads HLO text: a module, or any part of one.

    Example:
      >>> from nnx_sharding.analysis.hlo import parse
      >>> [computation] = parse("%sum = f32[64]{0} all-reduce(%x), to_apply=%add").computations
      >>> [instruction] = computation.instructions
      >>> instruction.opcode, instruction.operand_names, instruction.attributes
      ('all-reduce', ('x',), {'to_apply': '%add'})
    """
    computations: list[Computation] = []
    head: list[str] = []
    skipped: list[str] = []
    instructions: list[Instruction] | None = None
    depth: int | None = None  # of open brackets at the end of the last instruction
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None and instructions:
            *_, last = instructions
            depth = 1 + nesting(last.rest) if depth is None else depth
            if depth > 0 and len(last.rest) < _LONGEST:
                depth += nesting(line)
                instructions[-1] = last._replace(rest=f"{last.rest}\n{line}")
                continue
        if match:
            depth = None
            if instructions is None:
                instructions = []
                computations.append(Computation("", False, instructions))
            root, name, shape, opcode, rest = match.groups()
            instructions.append(Instruction(name, opcode, shape, rest, bool(root)))
        elif line.rstrip().endswith("{") and (header := _HEADER.match(line)):
            instructions = []
            computations.append(Computation(header[2], bool(header[1]), instructions))
        elif line.lstrip().startswith("}"):
            instructions = None
        elif not computations:
            head.append(line)
        elif line.strip():
            skipped.append(line.strip())
    if "xla_megascale" in text:
        for one in computations:
            one.instructions[:] = with_exchanges(one.instructions)
    if instructions is not None and computations[-1].name:
        skipped.append(f"the end of {computations[-1].name}")
    if any(f" {kind}-start(" in text for kind in ABBREVIATED):
        computations += [made for one in [*computations] for made in spell_out(one)]
    before = "\n".join(head)
    title = re.search(r"^HloModule ([^\s,]+)", before, re.MULTILINE)
    return Module(title[1] if title else "", before, computations, tuple(skipped))


# `ROOT %name = shape opcode(operands), ...`; the shape may be a tuple and have a layout such
# as `{1,0:T(8,128)}`, where no parenthesis follows a word after a space.
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?(\S+) = ([^\s(]\S*|\S.*?)\s([a-z][a-z0-9\-]*)\((.*)")
_LONGEST = 1 << 18  # of an instruction of several lines; more are in damaged text
_HEADER = re.compile(r"\s*(ENTRY\s+)?%?([^\s({]+)\s*(?:\(.*)?\{\s*$")
_COUNT = re.compile(r"\b(?:num_partitions|replica_count)=(\d{1,9})\b")
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
