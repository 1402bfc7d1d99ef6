"""A reader of HLO text: computations, instructions, and how often each computation runs.

A line is cut into name, shape, opcode and the rest when the text is read; what stands in the
parts is read when it is asked for. So ten megabytes are read in about a second, and nothing that
is unknown can stop it: a line that is no instruction is passed over.

The format is that of ``HloModule::ToString`` in XLA; there is no specification of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Groups: TypeAlias = tuple[tuple[int, ...], ...]

# More bytes or runs than this are none that a program has, but damage of the text.
_MOST = 1 << 62


class Shape(NamedTuple):
    """The shape of one array.

    Attributes:
      dtype: as HLO writes it, such as ``f32`` or ``bf16``.
      dims: the sizes of its dimensions; of one that varies, the largest.
      bytes: the bytes of its elements, without padding.
      memory_space: the number of the memory that it is in; 5 is the memory of the host.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    memory_space: int = 0


Shapes: TypeAlias = "Shape | tuple[Shapes, ...]"


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      name: without the percent sign.
      opcode: such as ``all-gather-start``.
      shape_text: the shape of the result as it is written.
      rest: the text of the operands and attributes.
      is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shape_text: str
    rest: str
    is_root: bool

    @property
    def shape(self) -> Shapes:
        """The shape of the result: one array, or a tuple of shapes."""
        return read_shape(self.shape_text)

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands as they are written; those of a constant or parameter are its literal."""
        return _parts(self.rest)[0]

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands, without percent signs and shapes."""
        return tuple(text.rpartition(" ")[2].lstrip("%") for text in self.operands)

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes as they are written, by name."""
        found: dict[str, str] = {}
        for part in _parts(self.rest)[1]:
            key, is_pair, value = part.partition("=")
            if is_pair:
                found.setdefault(key.strip(), value.strip())
        return found

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
        """From which device to which a permutation sends."""
        return _number_lists(self.attributes.get("source_target_pairs", ""))

    @property
    def operation(self) -> str | None:
        """What it was made from, as ``jit(f)/mlp/dot_general``."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return re.sub(r"\\(.)", r"\1", found.group(1)) if found else None

    @property
    def trip_count(self) -> int | None:
        """How often the body of a ``while`` runs; None if XLA does not know."""
        if self.opcode != "while":
            return None
        found = _TRIP_COUNT.search(self.attributes.get("backend_config", ""))
        return int(found.group(1)) if found else None

    def calls(self) -> list[tuple[str, str]]:
        """The computations that it runs, each with the attribute that names it."""
        if not _MAY_CALL.search(self.rest):
            return []
        return [
            (attribute, name.lstrip("%"))
            for attribute, text in self.attributes.items()
            if attribute in _CALLS
            for name in re.split(r"[\s,{}]+", text)
            if name
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """A list of instructions in the order in which they are written.

    Attributes:
      name: without the percent sign; empty for instructions outside of any.
      is_entry: whether the program begins with it.
      instructions: what it consists of.
    """

    name: str
    is_entry: bool
    instructions: list[Instruction]


class Runs(NamedTuple):
    """How often a computation runs in one call of the program.

    Attributes:
      times: how often; of the branches of a conditional, each counts as taken. None in a loop of
        unknown length.
      in_loop: whether it is in a loop.
      is_fused: whether it is part of a single operation: a fusion, or what a reduction applies.
    """

    times: int | None
    in_loop: bool
    is_fused: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A program that was read from text.

    Attributes:
      name: the name of the module; empty if there is none.
      head: what stands before the first computation: options, and the tables of source lines.
      computations: in the order in which they are written.
    """

    name: str
    head: str
    computations: list[Computation]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Computation]:
        """The computations by name."""
        return {computation.name: computation for computation in self.computations}

    @property
    def entry(self) -> Computation | None:
        """The computation that the program begins with, if there is one."""
        return next((found for found in self.computations if found.is_entry), None)

    @property
    def num_devices(self) -> int | None:
        """The number of partitions times that of replicas; None if neither is told."""
        options = re.search(r"^HloModule .*", self.head, re.MULTILINE)
        line = options.group() if options else ""
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d{1,9})\b", line)
        return math.prod(map(int, counts)) if counts else None

    @functools.cached_property
    def runs(self) -> Mapping[str, Runs]:
        """How often each computation runs. What nothing calls counts once."""
        return _runs(self)

    def source(self, instruction: Instruction) -> list[tuple[str, int]]:
        """The lines that it was made from, as (file, line), innermost first."""
        metadata = instruction.attributes.get("metadata", "")
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        if frame:
            return self._frames(int(frame.group(1)))
        file = re.search(r'source_file="([^"]*)"', metadata)
        line = re.search(r"source_line=(\d+)", metadata)
        return [(file.group(1), int(line.group(1)))] if file and line else []

    def _frames(self, frame: int) -> list[tuple[str, int]]:
        files, locations, frames = self._tables
        found: list[tuple[str, int]] = []
        seen: set[int] = set()
        while frame in frames and frame not in seen:
            seen.add(frame)
            location, parent = frames[frame]
            file, line = locations.get(location, (0, 0))
            if file in files:
                found.append((files[file], line))
            frame = parent
        return found

    @functools.cached_property
    def _tables(self) -> tuple[dict[int, str], dict[int, tuple[int, int]], dict[int, Pair]]:
        """File names, locations as (file, line), and frames as (location, parent), by number."""
        head = self.head.partition("\nFunctionNames")
        files = {int(n): name for n, name in _FILE.findall(head[0])}
        locations = {int(n): (int(file), int(line)) for n, file, line in _LOCATION.findall(head[2])}
        frames = {int(n): (int(at), int(parent or 0)) for n, at, parent in _FRAME.findall(head[2])}
        # Up to jax 0.12 the number of a parent is one too high, and so can be that of its child.
        if any(number == parent for number, (_, parent) in frames.items()):
            frames = {number: (at, parent - 1) for number, (at, parent) in frames.items()}
        return files, locations, frames


Pair: TypeAlias = tuple[int, int]


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
    instructions: list[Instruction] | None = None
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found:
            if instructions is None:
                instructions = []
                computations.append(Computation("", False, instructions))
            root, name, shape, opcode = found.groups()
            instructions.append(Instruction(name, opcode, shape, line[found.end() :], bool(root)))
        elif line.rstrip().endswith("{") and (header := _HEADER.match(line)):
            instructions = []
            computations.append(Computation(header.group(2), bool(header.group(1)), instructions))
        elif line.lstrip().startswith("}"):
            instructions = None
        elif not computations:
            head.append(line)
    before = "\n".join(head)
    name = re.search(r"^HloModule ([^\s,]+)", before, re.MULTILINE)
    return Module(name.group(1) if name else "", before, computations)


# `ROOT %name = shape opcode(operands), ...`; the shape may be a tuple and have a layout such
# as `{1,0:T(8,128)}`, where no parenthesis follows a word after a space.
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?(\S+) = (\S.*?)\s([a-z][a-z0-9\-]*)\(")
_HEADER = re.compile(r"\s*(ENTRY\s+)?%?([^\s({]+)\s*(?:\(.*)?\{\s*$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d{1,18})"?')
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE)
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)
_MAY_CALL = re.compile(rf"\b(?:{'|'.join(_CALLS)})=")


# Shapes


def read_shape(text: str) -> Shapes:
    """Reads a shape; what is not understood of it is left out.

    Example:
      >>> from nnx_sharding.analysis.hlo import read_shape
      >>> read_shape("(bf16[8,64]{1,0:T(8,128)}, u32[])")[0].bytes
      1024
    """
    levels: list[list[Shapes]] = [[]]
    for found in _SHAPE_TOKEN.finditer(text):
        token = found.group()
        if token == "(":
            levels.append([])
        elif token == ")":
            if len(levels) > 1:
                inner = tuple(levels.pop())
                levels[-1].append(inner)
        elif found.group(1):
            levels[-1].append(_array(*found.groups(default="")))
    while len(levels) > 1:
        inner = tuple(levels.pop())
        levels[-1].append(inner)
    whole = levels[0]
    return whole[0] if len(whole) == 1 else tuple(whole)


def arrays(shape: Shapes) -> Iterator[Shape]:
    """The arrays of a shape, in order.

    Example:
      >>> from nnx_sharding.analysis.hlo import arrays, read_shape
      >>> [array.dtype for array in arrays(read_shape("((f32[2]), s8[3])"))]
      ['f32', 's8']
    """
    stack = [shape]
    while stack:
        top = stack.pop()
        if isinstance(top, Shape):
            yield top
        else:
            stack.extend(reversed(top))


_SHAPE_TOKEN = re.compile(r"/\*.*?\*/|([a-z][a-z0-9]*)\[([^\[\]]*)\](?:\{([^{}]*)\})?|[()]")


@functools.lru_cache(maxsize=4096)
def _array(dtype: str, dims: str, layout: str) -> Shape:
    sizes = tuple(int(size) for size in re.findall(r"\d{1,18}", dims))
    width = re.search(r"\d{1,4}", dtype)
    bits = int(width.group()) if width else 8 if dtype == "pred" else 0
    packed = re.search(r"E\((\d{1,4})\)", layout)
    bits = int(packed.group(1)) if packed else -(-bits // 8) * 8
    space = re.search(r"S\((\d{1,4})\)", layout)
    size = min(-(-math.prod(sizes) * bits // 8), _MOST)
    return Shape(dtype, sizes, size, int(space.group(1)) if space else 0)


# Operands and attributes


def _parts(rest: str) -> tuple[tuple[str, ...], list[str]]:
    """The operands, and the attributes that follow the bracket which closes them."""
    operands: list[str] = []
    attributes: list[str] = []
    into, depth, start = operands, 0, 0
    for found in _TOKEN.finditer(rest):
        token = found.group()
        if token in "([{":
            depth += 1
        elif token == ")" and depth == 0 and into is operands:
            operands.append(rest[start : found.start()])
            into, start = attributes, found.end()
        elif token in ")]}":
            depth = max(depth - 1, 0)
        elif token == "," and depth == 0:
            into.append(rest[start : found.start()])
            start = found.end()
    into.append(rest[start:])
    cleaned = (_COMMENT.sub("", text).strip() for text in operands)
    return tuple(text for text in cleaned if text), attributes


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[()\[\]{},]')
_COMMENT = re.compile(r"/\*.*?\*/")


# Groups of devices

# More devices than this are no devices but nonsense, for which no memory is taken.
_MAX_DEVICES = 1 << 22


@functools.lru_cache(maxsize=1024)
def read_groups(text: str) -> Groups | None:
    """Reads groups of devices in each form that XLA writes.

    Args:
      text: ``{{0,1},{2,3}}``, ``[2,4]<=[8]``, ``[4,2]<=[2,4]T(1,0)``, or
        ``mesh['data'=2,'model'=4] {'model'}``, with ``device_ids=(...)`` and parts of axes such
        as ``'z':(2)4``.

    Returns:
      The groups; empty if they are written as empty, which stands for all devices. None if the
      text is not understood.

    Example:
      >>> from nnx_sharding.analysis.hlo import read_groups
      >>> read_groups("[4,2]<=[2,4]T(1,0)")
      ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    try:
        if text.startswith("mesh["):
            return _mesh_groups(text)
        if "<=" in text:
            sizes, _, devices = text.partition("<=")
            return _tuples(_iota(devices).reshape(_sizes(sizes)))
        return _number_lists(text)
    except ValueError:
        return None


def _number_lists(text: str) -> Groups:
    """Reads ``{{0,1},{2,3}}``."""
    inner = re.findall(r"\{([\d,\s]*)\}", text)
    found = (tuple(int(number) for number in re.findall(r"\d{1,9}", one)) for one in inner)
    return tuple(group for group in found if group)


def _iota(text: str) -> np.ndarray:
    """Reads ``[2,4]T(1,0)``: counted up in this shape, then transposed."""
    dims, _, permutation = text.partition("T")
    sizes = _sizes(dims)
    count = math.prod(sizes)
    if not 0 < count <= _MAX_DEVICES:
        raise ValueError(f"{count} devices")
    numbers = np.arange(count).reshape(sizes)
    return numbers.transpose(_sizes(permutation)) if permutation else numbers


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in re.findall(r"\d{1,9}", text))


def _mesh_groups(text: str) -> Groups:
    """Reads ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(1)2,'b'}``."""
    mesh, _, axes = text.rpartition("{")
    mesh, _, order = mesh.partition("], device_ids=(")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d{1,9})", mesh)}
    count = math.prod(sizes.values())
    devices = _iota(f"[{count}]") if not order else _device_ids(order)
    dims: list[int] = []
    grouped: list[int] = []
    chosen = {
        name: (int(before), int(size)) if before else (1, sizes[name])
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d{1,9})\)(\d{1,9}))?", axes)
        if name in sizes
    }
    for name, size in sizes.items():
        before, taken = chosen.get(name, (size, 1))
        if not before or not taken or size % (before * taken):
            raise ValueError(f"{name} is not cut into {before} × {taken}")
        grouped.append(len(dims) + 1)
        dims += [before, taken, size // (before * taken)]
    cut = np.moveaxis(devices.reshape(dims), grouped, range(-len(grouped), 0))
    return _tuples(cut.reshape(-1, math.prod(dims[1::3])))


def _device_ids(text: str) -> np.ndarray:
    """Reads ``[2,4]T(1,0))`` or ``3,1,2,0)``."""
    return _iota(text) if text.startswith("[") else np.array(_sizes(text))


def _tuples(groups: np.ndarray) -> Groups:
    if groups.ndim != 2:
        raise ValueError("groups have two dimensions")
    return tuple(map(tuple, groups.tolist()))


# How often computations run


def _runs(module: Module) -> dict[str, Runs]:
    calls = {computation.name: _calls_of(computation) for computation in module.computations}
    order = _callers_first(module, calls)
    called = {callee for edges in calls.values() for callee, *_ in edges}
    entry = module.entry
    found: dict[str, Runs] = {}
    for name in order:
        is_start = name not in called if entry is None else name == entry.name
        own = found.setdefault(name, Runs(1, False, False)) if is_start else found.get(name)
        if own is None:  # nothing that runs calls it
            own = found[name] = Runs(1, False, False)
        for callee, times, loops, fuses in calls[name]:
            more = None if own.times is None or times is None else own.times * times
            more = None if more is None or more > _MOST else more
            known = found.get(callee)
            in_loop, is_fused = own.in_loop or loops, own.is_fused or fuses
            if known is not None:
                more = None if known.times is None or more is None else known.times + more
                in_loop, is_fused = in_loop or known.in_loop, is_fused and known.is_fused
            found[callee] = Runs(more, in_loop, is_fused)
    return found


_Call: TypeAlias = tuple[str, "int | None", bool, bool]


def _calls_of(computation: Computation) -> list[_Call]:
    """What it calls: computation, how often, whether in a loop, whether as part of an operation."""
    found: list[_Call] = []
    for instruction in computation.instructions:
        loops = instruction.opcode == "while"
        for attribute, callee in instruction.calls():
            times = instruction.trip_count if loops else 1
            if times is not None and attribute == "condition":
                times += 1
            fuses = attribute == "to_apply" and instruction.opcode != "call"
            found.append((callee, times, loops, fuses or instruction.opcode == "fusion"))
    return found


def _callers_first(module: Module, calls: Mapping[str, Sequence[_Call]]) -> list[str]:
    """The names of all computations, each after those that call it, as far as that can be."""
    done: dict[str, None] = {}
    started: set[str] = set()
    for computation in module.computations:
        stack = [(computation.name, False)]
        while stack:
            name, is_done = stack.pop()
            if is_done:
                done[name] = None
            elif name not in started and name in calls:
                started.add(name)
                stack.append((name, True))
                stack += [(callee, False) for callee, *_ in calls[name]]
    return list(reversed(done))
