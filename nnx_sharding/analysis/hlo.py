"""A reader of HLO text, as ``HloModule::ToString`` writes it, and how often computations run.

    HloModule jit_step, num_partitions=8, ...
    %body (p: (s32[], f32[8])) -> (s32[], f32[8]) {                  a computation
      %p = (s32[], f32[8]) parameter(0)                              an instruction
      ROOT %t = (s32[], f32[8]) tuple(%i, %x), metadata={...}        its result
    }
    ENTRY %main (...) -> ... { ... while(...), condition=%c, body=%body ... }

There is no stable form of compiled programs but the text: jaxlib has no Python schema of its
protocol buffers. So `parse` only splits it into instructions, whose parts are parsed on access, and
lists what it does not understand (`Module.unread`); then figures of the program are unknown rather
than wrong.

A computation *calls* others: a `while` its condition and body, a `fusion` what it runs as one
kernel, a `reduce` what it *applies* to pairs of elements (`Call`, with the attribute that names the
callee). Lines of the user's code are in tables before the computations, by the number of a frame.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from .instructions import ABBREVIATED, MAX_SIZE, Computation, Instruction, nesting, spell_out
from .slices import with_exchanges
from .values import Call, Value, Values, trip_counts


class Runs(NamedTuple):
    """How often a computation runs in one call, if each branch of a conditional is taken.

    The defaults are those of the entry computation, which runs once.
    """

    times: int | None = 1  # None in a loop of unknown length
    least: int = 1  # a lower bound of ``times``: loops of unknown length count as one run
    in_loop: bool = False
    # Whether the computation is a part of one operation: a fusion runs it, or an instruction
    # applies it to elements.
    is_fused: bool = False
    # Whether an instruction applies the computation to elements, as a reduction does.
    is_applied: bool = False
    # Whether the computation is in a branch of a conditional, which may not be taken.
    in_branch: bool = False

    def plus(self, other: Runs) -> Runs:
        """Returns how often the computation runs if another caller runs it, too."""
        times = None if self.times is None or other.times is None else self.times + other.times
        return Runs(
            times=times,
            least=self.least + other.least,
            # If one caller is in a loop, the computation runs in a loop. It is a part of an
            # operation only if all callers fuse it, because otherwise it also runs on its own.
            in_loop=self.in_loop or other.in_loop,
            is_fused=self.is_fused and other.is_fused,
            is_applied=self.is_applied and other.is_applied,
            in_branch=self.in_branch or other.in_branch,
        )


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
        return next((x for x in self.computations if x.is_entry), None)

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters of the program by number."""
        instructions = self.entry.instructions if self.entry else ()
        return {op.number: op for op in instructions if op.number is not None}

    def argument(self, value: Value) -> int | None:
        """Returns the number of the argument that a value is; None for other values."""
        if self.entry is None or value.computation != self.entry.name:
            return None
        maker = self.maker(value)
        return None if maker is None else maker.number

    def fused(self, instruction: Instruction) -> Computation | None:
        """Returns the computation of a fusion; None for other instructions."""
        callees = instruction.callees if instruction.opcode == "fusion" else ()
        return next(map(self.by_name.get, callees), None)

    @functools.cached_property
    def num_devices(self) -> int | None:
        """The number of partitions times the number of replicas; None if neither is given."""
        options = re.search(r"^HloModule .*", self.head, re.MULTILINE)
        counts = _COUNT.findall(options[0]) if options else ()
        return math.prod(map(int, counts)) if counts else None

    @property
    def is_for_tpu(self) -> bool:
        """Whether the TPU compiler wrote the text: only its layouts have tiles."""
        return ":T(" in self.head

    @functools.cached_property
    def unread(self) -> list[str]:
        """What is not understood; unless this is empty, the behaviour of the program is unknown."""
        unread = [*self.skipped]
        if not self.computations or (self.name and self.entry is None):
            unread.append("no entry computation")
        if self.callees_first is None:  # HLO has no cycles, so the text is damaged.
            unread.append("computations that call each other")
        for computation in self.computations:
            unread += map(_unread_text, (x for x in computation.instructions if not x.is_known))
            for call in self.calls[computation.name]:
                # The computation that a ``reduce`` applies to elements (``to_apply``) may be
                # missing, because it sends nothing. A ``call`` has the same attribute, but may run
                # anything.
                is_applied = call.attribute == "to_apply" and call.instruction.opcode != "call"
                if call.callee not in self.by_name and not is_applied:
                    unread.append(f"{call.callee}, which {call.instruction.name} calls")
        return unread

    @functools.cached_property
    def callees_first(self) -> list[str] | None:
        """The names of computations, each after its callees; None if there are cycles."""
        callees = {name: [call.callee for call in calls] for name, calls in self.calls.items()}
        try:
            return [*graphlib.TopologicalSorter(callees).static_order()]
        except graphlib.CycleError:  # Only damaged text has cycles.
            return None

    @functools.cached_property
    def trip_counts(self) -> Mapping[str, int]:
        """How often the body of each ``while`` runs, by the name of the instruction, if known."""
        return {} if self.callees_first is None else trip_counts(self)

    @functools.cached_property
    def runs(self) -> Mapping[str, Runs]:
        """How often each computation runs, by name, summed over its callers; once without one."""
        runs: dict[str, Runs] = {}
        # Callers come before their callees, so that all runs of a caller are known. In damaged text
        # with cycles, computations come in the order of the text, and callees are undercounted.
        callers_first = reversed(self.callees_first or [*self.calls])
        for name in callers_first:
            caller = runs.setdefault(name, Runs())
            for call in self.calls.get(name, ()):
                called = self._runs_of_callee(caller, call)
                if call.callee in runs:  # Another instruction calls it as well.
                    called = runs[call.callee].plus(called)
                # Only damaged text has so many runs.
                if called.times is not None and called.times > MAX_SIZE:
                    called = called._replace(times=None)
                runs[call.callee] = called
        return runs

    def _runs_of_callee(self, caller: Runs, call: Call) -> Runs:
        """Returns how often one call runs its callee.

        Args:
          caller: how often the computation of the calling instruction runs.
          call: the instruction, the callee, and the attribute that names it, such as ``body``.
        """
        instruction = call.instruction
        is_loop = instruction.opcode == "while"
        times = self.trip_counts.get(instruction.name) if is_loop else 1  # None if unknown
        if times is not None and call.attribute == "condition":
            times += 1  # The condition runs once more than the body: the last time it is false.
        is_applied = instruction.opcode not in _CALLS
        return Runs(
            times=None if times is None or caller.times is None else caller.times * times,
            least=caller.least * (1 if times is None else times),
            in_loop=caller.in_loop or is_loop,
            # A computation that is applied to elements is a part of the instruction, like one that
            # a fusion runs.
            is_fused=caller.is_fused or instruction.opcode == "fusion" or is_applied,
            is_applied=caller.is_applied or is_applied,
            in_branch=caller.in_branch or instruction.opcode == "conditional",
        )

    def taken(self, weights: Mapping[str, int]) -> set[str]:
        """Returns the computations that run if conditionals take the branch with the most weight.

        Computations outside of conditionals run, too. Left out are branches that are not taken, and
        computations that only such branches call.

        Args:
          weights: the weight of each computation by name, without its callees; for example the
            bytes that it sends.

        Returns:
          The names of the computations. If they call each other in cycles, as in damaged text, only
          the names of those without a caller.
        """
        if not self.with_opcode("conditional"):
            return {*self.calls}
        largest = self._largest_branches(weights)
        # The calls are followed from the entry, which is the only computation without a caller.
        # Callers come before their callees, so it is known whether they run.
        taken = {name for name in self.calls if name not in self.callers}
        for name in reversed(self.callees_first or ()):
            if name not in taken:
                continue
            for call in self.calls.get(name, ()):
                branch = largest.get(call.instruction.name)  # None for other instructions
                if branch is None or branch == call.callee:
                    taken.add(call.callee)
        return taken

    def _largest_branches(self, weights: Mapping[str, int]) -> dict[str, str]:
        """Finds the branch of each conditional with the most weight, by the conditional's name.

        ``weights`` is as in `taken`. The weight of a branch includes its callees, in all runs of
        loops.
        """
        sums = Counter(weights)  # The weights of callees are added below.
        largest: dict[str, str] = {}
        # Callees come before their callers, so that their weights are known.
        for name in self.callees_first or ():
            # Name of a conditional in this computation → its branches.
            branches = defaultdict[str, list[str]](list)
            for call in self.calls.get(name, ()):
                op = call.instruction
                if op.opcode == "conditional":
                    branches[op.name].append(call.callee)
                else:
                    sums[name] += sums[call.callee] * self.trip_counts.get(op.name, 1)
            for conditional, callees in branches.items():
                # If several branches have the most weight, the last one counts.
                largest[conditional] = max(reversed(callees), key=sums.__getitem__)
            # A branch that several conditionals of the computation take counts once.
            sums[name] += sum(sums[callee] for callee in {largest[x] for x in branches})
        return largest

    def source(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Lists the lines of code that led to an instruction: (file, line), innermost first.

        ``metadata={… stack_frame_id=7}`` is the number of the innermost frame in the table of
        frames, each of which has the number of its parent: the frame that called it.
        """
        innermost = _FRAME_ID.search(instruction.attributes.get("metadata", ""))
        number = int(innermost[1]) if innermost else 0  # No frame has the number 0.
        visited: dict[int, _Frame] = {}  # number → frame, innermost first
        # Frames are visited once, because damaged text may have cycles.
        while number in self._frames and number not in visited:
            visited[number] = self._frames[number]
            number = visited[number].parent
        return [(frame.file, frame.line) for frame in visited.values() if frame.file is not None]

    @functools.cached_property
    def _frames(self) -> Mapping[int, _Frame]:
        """The calls in the user's code by number, from the tables of files, lines and calls.

        FileNames           1 "/home/me/model.py"
        FunctionNames       1 "step"
        FileLocations       4 {file_name_id=1 … line=12 …}
        StackFrames         7 {file_location_id=4 parent_frame_id=6}
        """
        # The table of functions looks like that of files, so only the text before it is read for
        # files.
        before_functions, _, tables = self.head.partition("\nFunctionNames")
        files = {int(n): name for n, name in _FILE.findall(before_functions)}
        locations = {  # number → (file, line)
            int(n): (files.get(int(file)), int(line)) for n, file, line in _LOCATION.findall(tables)
        }
        frames: dict[int, _Frame] = {}
        for n, location, parent in _FRAME.findall(tables):
            file, line = locations.get(int(location), (None, 0))
            frames[int(n)] = _Frame(file, line, parent=int(parent or 0))
        # Up to jax 0.12 the number of a parent is one too high. A frame that is numbered right
        # after its parent, as in the first chain of calls, then names itself as its parent.
        if any(number == frame.parent for number, frame in frames.items()):
            frames = {n: frame._replace(parent=frame.parent - 1) for n, frame in frames.items()}
        return frames


class _Frame(NamedTuple):
    """A call in the user's code."""

    file: str | None  # None if the text lacks it
    line: int
    parent: int  # the number of the frame that called it; 0 for none


# Opcodes of instructions that run a computation once, or as a loop. Other instructions apply their
# computation to elements.
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
    module = _split(text)
    computations = module.computations
    # Two forms that compilers use are rewritten here, so that nothing else has to know them. The
    # first is a collective between slices: ``send`` to the host and ``recv`` from it →
    # ``all-reduce``.
    if "xla_megascale" in text:
        for computation in computations:
            computation.instructions[:] = with_exchanges(computation.instructions)
    # The second is an abbreviation: ``fusion-start(%x), calls=%f`` → ``async-start(%x), calls=%a``,
    # and a computation ``a`` that has the fusion.
    if any(f" {kind}-start(" in text for kind in ABBREVIATED):
        for computation in [*computations]:
            # `spell_out` rewrites the instructions in place, and returns new computations.
            computations += spell_out(computation)
    return module


def _split(text: str) -> Module:
    """Splits a text into instructions, by computation.

    The kinds of lines are tried in this order: an instruction; more of the last instruction, if
    that has open brackets; the header of a computation; the end of a computation. Any other line
    before the first computation is a part of the head, and any after it is not understood
    (``skipped``).
    """
    head_lines: list[str] = []
    computations: list[Computation] = []
    skipped: list[str] = []
    is_open = False  # whether the last computation goes on
    # The number of open brackets of the last instruction; None if they were not counted. Counting
    # takes long and is seldom needed, because another instruction, or the end of the computation,
    # follows nearly all instructions.
    depth: int | None = None
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is not None:
            if not is_open:  # The text is a part of a module, without a header.
                computations.append(Computation("", False, []))
            root, name, shape, opcode, rest = match.groups()
            instruction = Instruction(name, opcode, shape, rest, is_root=bool(root))
            computations[-1].instructions.append(instruction)
            is_open, depth = True, None
            continue
        if is_open and computations[-1].instructions:
            last = computations[-1].instructions[-1]
            if depth is None:
                # ``rest`` is the text behind the bracket before the operands, so this one is open.
                depth = 1 + nesting(last.rest)
            if depth > 0 and len(last.rest) < _LONGEST:
                depth += nesting(line)
                continued = last._replace(rest=f"{last.rest}\n{line}")
                computations[-1].instructions[-1] = continued
                continue
        # Only a line with a bracket at its end can be a header.
        header = _HEADER.match(line) if line.rstrip().endswith("{") else None
        if header is not None:
            entry, name = header.groups()
            computations.append(Computation(name, bool(entry), []))
            is_open = True
        elif line.lstrip().startswith("}"):
            is_open = False
        elif not computations:
            head_lines.append(line)
        elif line.strip():
            skipped.append(line.strip())
    if is_open and computations[-1].name:  # The text was cut off.
        skipped.append(f"the end of {computations[-1].name}")
    head = "\n".join(head_lines)
    title = re.search(r"^HloModule ([^\s,]+)", head, re.MULTILINE)
    return Module(title[1] if title else "", head, computations, tuple(skipped))


# `ROOT %name = shape opcode(operands), ...`; the shape may be a tuple and have a layout such
# as `{1,0:T(8,128)}`, where no parenthesis follows a word after a space.
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?(\S+) = ([^\s(]\S*|\S.*?)\s([a-z][a-z0-9\-]*)\((.*)")
# The most characters of an instruction of several lines. Only damaged text has more.
_LONGEST = 1 << 18
# `ENTRY %main (p: f32[8]) -> f32[8] {`
_HEADER = re.compile(r"\s*(ENTRY\s+)?%?([^\s({]+)\s*(?:\(.*)?\{\s*$")
_COUNT = re.compile(r"\b(?:num_partitions|replica_count)=(\d{1,9})\b")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)


def _unread_text(instruction: Instruction) -> str:
    """Says what is not understood: that a kernel sends, or else the text of the instruction."""
    if instruction.is_sending_kernel:
        name = f"{instruction.name} ({instruction.operation or instruction.target})"
        return f"{name} is a kernel that sends to other devices by itself"
    return str(instruction)


def why_unread(hlo: str | None) -> str:
    """Says why figures that are read from a program's text are unknown."""
    if hlo is None:
        return "there is no text of the compiled program"
    unread = parse(hlo).unread
    return f"not understood: {unread[0]:.120}" if unread else "the backend does not report it"
