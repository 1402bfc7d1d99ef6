"""A reader of HLO text: computations, instructions, and how often each computation runs.

Lines are split into name, shape, opcode and the rest when the text is read; the parts are parsed on
access. So ten megabytes take about a second, and nothing unknown can stop the reader: what is not
understood is listed, and then the behaviour of the program counts as unknown.

The format is that of ``HloModule::ToString`` in XLA; it has no specification.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from .device_groups import Groups, number_lists, read_groups
from .opcodes import COLLECTIVES, OPCODES, base
from .runs import Runs, runs_of
from .shapes import Shape, Shapes, arrays, is_shape, read_shape
from .trip_counts import trip_counts


class Instruction(NamedTuple):
    """One instruction: its parts as written, without the percent sign of the name."""

    name: str
    opcode: str
    shape_text: str
    rest: str  # operands and attributes
    is_root: bool  # whether it is the result of its computation

    @property
    def shape(self) -> Shapes:
        """The shape of the result, for a tuple those of its parts."""
        return read_shape(self.shape_text)

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands as written; for a constant or parameter, its literal."""
        cleaned = (_COMMENT.sub("", part).strip() for part in _split(self.rest, 0, ")")[0])
        return tuple(part for part in cleaned if part)

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands, without percent signs and shapes."""
        return tuple(text.rpartition(" ")[2].lstrip("%") for text in self.operands)

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes as written, by name."""
        attributes: dict[str, str] = {}
        _, end = _split(self.rest, 0, ")")
        for part in _split(self.rest, end, "")[0]:
            key, equals, value = part.partition("=")
            if equals:
                attributes.setdefault(key.strip(), value.strip())
        return attributes

    @property
    def replica_groups(self) -> Groups | None:
        """The groups of devices that take part; empty for all. None if they are not understood."""
        attributes = self.attributes
        text = attributes.get("replica_groups", "{}")
        if text.startswith("mesh[") and "device_ids" in attributes:
            text += f", device_ids={attributes['device_ids']}"
        return read_groups(text)

    @property
    def source_target_pairs(self) -> Groups:
        """The pairs of devices between which a permutation sends."""
        return number_lists(self.attributes.get("source_target_pairs", ""))

    @property
    def operation(self) -> str | None:
        """The operation that it was made from, such as ``jit(f)/mlp/dot_general``."""
        name = OP_NAME.search(self.attributes.get("metadata", ""))
        return re.sub(r"\\(.)", r"\1", name[1]) if name else None

    @property
    def trip_count(self) -> int | None:
        """How often the body of a ``while`` runs; None if XLA does not know."""
        if self.opcode != "while":
            return None
        count = _TRIP_COUNT.search(self.attributes.get("backend_config", ""))
        return int(count[1]) if count else None

    @property
    def results(self) -> list[Shape]:
        """The arrays that it makes, even if it is the start of a pair."""
        shape, opcode = self.shape, self.opcode
        # An all-reduce-start has the shape of the result, a copy-start is (result, operand, ...);
        # other starts are (operand, result, ...).
        is_start = opcode.endswith("-start") and opcode != "all-reduce-start"
        if is_start and not isinstance(shape, Shape) and len(shape) > 1:
            shape = shape[0 if opcode == "copy-start" else 1]
        return list(arrays(shape))

    def __str__(self) -> str:
        return f"{self.name} = {self.shape_text} {self.opcode}({self.rest}"

    def calls(self) -> Iterator[tuple[str, str]]:
        """The computations that it runs, each after the attribute that names it."""
        if _MAY_CALL.search(self.rest):
            for attribute, text in self.attributes.items():
                if attribute in _CALLS:
                    yield from ((attribute, name) for name in re.findall(r"[^\s,{}%]+", text))


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """A list of instructions, in the order of the text."""

    name: str  # without the percent sign; empty for instructions outside of any
    is_entry: bool  # whether the program begins with it
    instructions: list[Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
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
    def by_name(self) -> Mapping[str, Computation]:
        """The computations by name."""
        return {computation.name: computation for computation in self.computations}

    @property
    def entry(self) -> Computation | None:
        """The entry computation, if there is one."""
        return next((one for one in self.computations if one.is_entry), None)

    @property
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
    def calls(self) -> Mapping[str, list[tuple[Instruction, str, str]]]:
        """The calls of each computation, as instruction, attribute, and called computation."""
        return {
            one.name: [(i, *call) for i in one.instructions for call in i.calls()]
            for one in self.computations
        }

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[Computation, Instruction]]:
        """An instruction that calls each computation, and where it is."""
        return {
            callee: (computation, one)
            for computation in self.computations
            for one, _, callee in self.calls[computation.name]
        }

    @functools.cached_property
    def unread(self) -> list[str]:
        """What is not understood; unless this is empty, the behaviour of the program is unknown."""
        unread = [*self.skipped]
        if not self.computations or (self.name and self.entry is None):
            unread.append("no entry computation")
        unread += ["computations that call each other"] * (self.callees_first is None)
        for computation in self.computations:
            unread += [str(one) for one in computation.instructions if not _is_known(one)]
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
        return runs_of(self)

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


def parse(text: str) -> Module:
    """Reads HLO text.

    Args:
      text: a module, or any part of one.

    Returns:
      What was understood of it.

    Example:
      >>> from nnx_sharding.analysis.hlo import parse
      >>> [computation] = parse("%sum = f32[64]{0} all-reduce(%x), to_apply=%add").computations
      >>> [instruction] = computation.instructions
      >>> instruction.opcode, instruction.operand_names, instruction.attributes
      ('all-reduce', ('x',), {'to_apply': '%add'})
      >>> instruction.shape
      Shape(dtype='f32', dims=(64,), bytes=256, memory_space=0)
    """
    computations: list[Computation] = []
    head: list[str] = []
    skipped: list[str] = []
    instructions: list[Instruction] | None = None
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            if instructions is None:
                instructions = []
                computations.append(Computation("", False, instructions))
            root, name, shape, opcode = match.groups()
            instructions.append(Instruction(name, opcode, shape, line[match.end() :], bool(root)))
        elif line.rstrip().endswith("{") and (header := _HEADER.match(line)):
            instructions = []
            computations.append(Computation(header[2], bool(header[1]), instructions))
        elif line.lstrip().startswith("}"):
            instructions = None
        elif not computations:
            head.append(line)
        elif line.strip():
            skipped.append(line.strip())
    if instructions is not None and computations[-1].name:
        skipped.append(f"the end of {computations[-1].name}")
    before = "\n".join(head)
    title = re.search(r"^HloModule ([^\s,]+)", before, re.MULTILINE)
    return Module(title[1] if title else "", before, computations, tuple(skipped))


# `ROOT %name = shape opcode(operands), ...`; the shape may be a tuple and have a layout such
# as `{1,0:T(8,128)}`, where no parenthesis follows a word after a space.
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?(\S+) = (\S.*?)\s([a-z][a-z0-9\-]*)\(")
_HEADER = re.compile(r"\s*(ENTRY\s+)?%?([^\s({]+)\s*(?:\(.*)?\{\s*$")
_COUNT = re.compile(r"\b(?:num_partitions|replica_count)=(\d{1,9})\b")
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d{1,18})"?')
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
_CALLS = {"calls", "to_apply", "body", "condition", "branch_computations", "called_computations"}
_CALLS |= {"true_computation", "false_computation"}
_MAY_CALL = re.compile(rf"\b(?:{'|'.join(_CALLS)})=")


def _is_known(one: Instruction) -> bool:
    """Whether the behaviour and the devices of an instruction are understood."""
    kind = base(one.opcode)
    if not is_shape(one.shape_text):
        return False
    if kind in COLLECTIVES and not one.opcode.endswith("-done"):
        return one.replica_groups is not None
    if kind == "send":  # to the host, which may send it to other slices
        return "is_host_transfer=true" in one.rest and "xla_megascale" not in one.rest
    is_exchange = kind == "custom-call" and _COMMUNICATES.search(one.rest) is not None
    return kind in OPCODES and not is_exchange


# A Pallas kernel that sends to other devices.
_COMMUNICATES = re.compile(r'"has_communication"\s*:\s*true')


def _split(text: str, start: int, closing: str) -> tuple[list[str], int]:
    """The parts between commas that are in no bracket, up to a closing bracket; and its end."""
    if closing and (simple := _SIMPLE.match(text, start)):  # as most operands are
        return text[start : simple.end() - 1].split(","), simple.end()
    parts: list[str] = []
    depth = 0
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token in "([{":
            depth += 1
        elif token == closing and depth == 0:
            return [*parts, text[start : match.start()]], match.end()
        elif token in ")]}":
            depth = max(depth - 1, 0)
        elif token == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]], len(text)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[()\[\]{},]')
_SIMPLE = re.compile(r'[^()\[\]{}"/]*\)')
_COMMENT = re.compile(r"/\*.*?\*/")
