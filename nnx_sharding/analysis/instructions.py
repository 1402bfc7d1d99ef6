"""Instructions of HLO text and the shapes of arrays in it; parts are parsed on access.

    ROOT %sum = f32[8,64]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
         name   shape, with its layout  opcode     operands and attributes

A tuple has a shape of shapes, `(f32[8], (s32[], f32[4]))`. A *computation* is a list of
instructions that instructions of other computations call; ROOT marks the instruction whose result
it returns. An asynchronous operation is a pair of instructions, whose opcodes end in `-start` and
`-done`. The start returns a tuple of operands, results and a context.

Large programs have megabytes of text, and callers ask for little of it. An `Instruction` therefore
keeps pieces of text, and its properties read them by regular expressions when they are asked for.
The expressions are possessive or bounded, so that damaged text cannot make them slow.

From `opcodes.py`: `OPCODES` are the opcodes that are understood, `CALLERS` those that can call
computations, and `base(opcode)` is the opcode without `-start`, `-update` and `-done`.

`_split` splits text at commas outside of brackets. It returns the parts, and the position behind
the bracket where it ended: ``_split("%x, %y), index=1", 0, ")")`` is ``(["%x", " %y"], 7)``. The
``rest`` of an instruction begins behind the bracket that opens its operands.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .device_groups import Groups, number_lists, read_groups
from .opcodes import CALLERS, COLLECTIVES, OPCODES, base

# The most bytes or runs of a program. Only damaged text has more.
MAX_SIZE = 1 << 62


class Shape(NamedTuple):
    """The shape of one array."""

    dtype: str  # the dtype in the words of HLO, such as `bf16`
    dims: tuple[int, ...]  # the sizes; for a dynamic dimension, its upper bound
    bytes: int  # the size on one device, without padding
    memory_space: int = 0  # the number in the layout; 5 is the memory of the host


Shapes: TypeAlias = "Shape | tuple[Shapes, ...]"


@functools.lru_cache(maxsize=4096)
def read_shape(text: str) -> Shapes:
    """Reads the shape of an array or of a tuple, as far as it is understood.

    For example, ``(bf16[8,64]{1,0:T(8,128)}, (u32[]))`` is a tuple of a ``Shape`` and of a tuple
    with a ``Shape``.
    """
    # The parts of the tuples that are being read, the innermost tuple last. The first list has the
    # shapes outside of brackets: one shape, unless the text is damaged.
    levels: list[list[Shapes]] = [[]]
    # Damaged text may not close all brackets. Superfluous closing brackets do no harm.
    missing = ")" * text.count("(")
    # A token is a bracket, or an array such as f32[8]{0}.
    for token in _SHAPE_TOKEN.finditer(text + missing):
        if token[0] == "(":
            levels.append([])
        elif token[0] == ")" and len(levels) > 1:
            part = tuple(levels.pop())
            levels[-1].append(part)
        elif token["dtype"]:
            levels[-1].append(_array(*token.group("dtype", "dims"), token["layout"] or ""))
    [shapes] = levels
    return shapes[0] if len(shapes) == 1 else tuple(shapes)


@functools.lru_cache(maxsize=4096)
def is_shape(text: str) -> bool:
    """Tells whether all of the text of a shape is understood, so that its bytes are known.

    The text is understood if it consists of arrays and balanced brackets, and if each dtype names
    its width, as ``bf16`` does, or needs none.
    """
    # The text without arrays, their layouts, round brackets, comments, and commas at its ends.
    other_text = _SHAPE_TOKEN.sub("", text).strip(", ")
    dtypes = {token["dtype"] for token in _SHAPE_TOKEN.finditer(text) if token["dtype"]}
    has_widths = all(_DTYPE.fullmatch(dtype) for dtype in dtypes)
    return not other_text and has_widths and text.count("(") == text.count(")")


# A dtype with its width, or one that needs none.
_DTYPE = re.compile(r"pred|token|opaque|[a-z]+\d+\w*")


def arrays(shape: Shapes) -> Iterator[Shape]:
    """Yields the arrays of a shape, in order."""
    stack = [shape]
    while stack:
        top = stack.pop()
        if isinstance(top, Shape):
            yield top
        else:
            stack.extend(reversed(top))


def total_bytes(shapes: Iterable[Shape]) -> int:
    """Sums the bytes of several arrays."""
    return sum(shape.bytes for shape in shapes)


def padded_bytes(text: str) -> int:
    """Counts the bytes of the arrays of a shape, with the padding of tiles.

    The minor dimensions are rounded up to multiples of the first tile: with the layout
    ``{1,0:T(8,128)}``, an array ``f32[5,100]`` takes 8 × 128 elements.
    """
    total = 0
    for token in _SHAPE_TOKEN.finditer(text):
        if not token["dtype"]:  # The token is a bracket or a comment.
            continue
        layout = token["layout"] or ""
        shape = _array(*token.group("dtype", "dims"), layout)
        # A layout is the order of the dimensions, minor first, then the tiles: `1,0:T(8,128)`. If
        # there are several tiles, `T(8,128)(4,1)`, the second one divides the first, and adds no
        # padding.
        order, _, tiling = layout.partition(":")
        first_tile = re.match(r"T\(([\d,]+)\)", tiling)
        count = math.prod(shape.dims)
        if first_tile is None or not count:
            total += shape.bytes
            continue
        # Tiles are written major first, so the order of the dimensions is reversed.
        major_first = reversed(re.findall(r"\d{1,3}", order))
        sizes = [shape.dims[int(i)] for i in major_first]
        tile = [int(size) for size in first_tile[1].split(",")]
        # If array and tile differ in the number of dimensions, the shorter shape gets leading ones:
        # an array of 5×100 in tiles of 128 is in tiles of 1×128.
        sizes = [1] * (len(tile) - len(sizes)) + sizes
        tile = [1] * (len(sizes) - len(tile)) + tile
        padded = [-(-n // step) * step for n, step in zip(sizes, tile, strict=True)]  # rounded up
        total += shape.bytes * math.prod(padded) // count
    return total


# An array, as `f32[8,64]{1,0:T(8,128)}`; a round bracket; or a comment.
_SHAPE_TOKEN = re.compile(
    r"/\*.*?\*/|(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\[\]]*)\](?:\{(?P<layout>[^{}]*)\})?|[()]"
)


@functools.lru_cache(maxsize=4096)
def _array(dtype: str, dims: str, layout: str) -> Shape:
    """Returns the shape of an array, given as ``s4``, ``8,64`` and ``1,0:E(4)S(5)``.

    In the layout, ``E`` are the bits of an element, and ``S`` is the memory space. Without ``E``,
    each element takes whole bytes: an ``s4`` takes 8 bits.
    """
    sizes = tuple(int(size) for size in re.findall(r"\d{1,18}", dims))
    width = re.search(r"\d{1,4}", dtype)  # 32 for f32
    bits_without_width = 8 if dtype == "pred" else 0  # A token, for example, takes no bits.
    dtype_bits = int(width[0]) if width else bits_without_width
    packed_bits = re.search(r"E\((\d{1,4})\)", layout)
    element_bits = int(packed_bits[1]) if packed_bits else -(-dtype_bits // 8) * 8
    memory_space = re.search(r"S\((\d{1,4})\)", layout)
    num_bytes = -(-math.prod(sizes) * element_bits // 8)  # rounded up
    return Shape(
        dtype=dtype,
        dims=sizes,
        bytes=min(num_bytes, MAX_SIZE),  # Damaged text may have any size.
        memory_space=int(memory_space[1]) if memory_space else 0,
    )


class _Written(NamedTuple):
    """The parts of an instruction's text."""

    name: str
    opcode: str
    shape_text: str
    rest: str  # the text behind the bracket that opens the operands: operands and attributes
    is_root: bool  # whether its computation returns the result of this instruction


class Instruction(_Written):
    """One instruction: its parts as written, without the percent sign of the name."""

    @property
    def shape(self) -> Shapes:
        """The shape of the result; for a tuple, the shapes of its parts."""
        return read_shape(self.shape_text)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands as written, such as ``%x``.

        For a constant, this is its literal; for a parameter, its number.
        """
        parts, _ = _split(self.rest, 0, ")")
        # XLA numbers the items of long lists in comments.
        cleaned = (_COMMENT.sub("", part).strip() for part in parts)
        return tuple(part for part in cleaned if part)

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands, without percent signs and shapes."""
        # Most instructions have no brackets, strings or comments in their operands, so a single
        # expression finds the names. That is faster than splitting the text.
        simple = _SIMPLE.match(self.rest)
        if simple is not None:
            return tuple(_NAME.findall(simple[1]))
        return tuple(text.rpartition(" ")[2].lstrip("%") for text in self.operands)

    @property
    def number(self) -> int | None:
        """The number of a parameter; None for other instructions."""
        text = self.rest.partition(")")[0] if self.opcode == "parameter" else ""
        return int(text) if text.isdecimal() else None

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """The attributes as written, by name, such as ``{"to_apply": "%add"}``."""
        attributes: dict[str, str] = {}
        _, end_of_operands = _split(self.rest, 0, ")")
        parts, _ = _split(self.rest, end_of_operands, "")  # all parts to the end of the text
        for part in parts:
            key, equals, value = part.partition("=")
            if equals:  # The first part, before the first comma, is empty.
                # `setdefault` keeps the first value if damaged text has an attribute twice.
                attributes.setdefault(key.strip(), value.strip())
        return attributes

    @property
    def tuple_index(self) -> int | None:
        """The index of a ``get-tuple-element``; None without one."""
        text = self.attributes.get("index", "")
        return int(text) if text.isdecimal() else None

    @property
    def replica_groups(self) -> Groups | None:
        """The groups of devices that take part; None if they are not understood.

        Empty means that all devices form one group.
        """
        attributes = self.attributes
        text = attributes.get("replica_groups", "{}")
        # In ``mesh['a'=4] {'a'}, device_ids=(…)``, the order of devices is an attribute of its own,
        # so it has to be joined to the groups.
        if text.startswith("mesh[") and "device_ids" in attributes:
            text += f", device_ids={attributes['device_ids']}"
        return read_groups(text)

    @property
    def source_target_pairs(self) -> Groups:
        """The pairs of devices between which a permutation sends."""
        return number_lists(self.attributes.get("source_target_pairs", ""))

    @property
    def operation(self) -> str | None:
        """The operation of the trace that it was made from, such as ``jit(f)/mlp/dot_general``.

        None if the text has no such name.
        """
        name = OP_NAME.search(self.attributes.get("metadata", ""))
        # The expression removes escapes: ``\"`` becomes ``"``.
        return re.sub(r"\\(.)", r"\1", name[1]) if name else None

    @property
    def trip_count(self) -> int | None:
        """How often the body of a ``while`` runs; None if XLA does not know."""
        count = _TRIP_COUNT.search(self.attributes.get("backend_config", ""))
        return int(count[1]) if count and self.opcode == "while" else None

    @property
    def results(self) -> tuple[Shape, ...]:
        """The arrays that it makes; for the start of a pair, those that the pair makes."""
        return _results(self.shape_text, self.opcode)

    @property
    def is_known(self) -> bool:
        """Whether this instruction is understood: what it does, and with which devices.

        If one instruction is not understood, figures of its program count as unknown.
        """
        rest = self.rest
        kind = self.opcode if self.opcode in OPCODES else base(self.opcode)
        if kind not in OPCODES or not is_shape(self.shape_text):
            return False
        # `parse` rewrites a `fusion-start` as an `async-start`, unless its shape is not understood.
        if kind in ABBREVIATED and kind != self.opcode:
            return False
        # This is for a collective, or the start of one. The end of one has no groups to read.
        if self.collective is not None:
            return self.replica_groups is not None
        # A `send` to the host is understood. If the host sends on to other slices, `parse` has
        # replaced the `send` by a collective, so one that is still here was not understood.
        if self.opcode == "send":
            return "is_host_transfer=true" in rest and "xla_megascale" not in rest
        # A library's function with side effects may exchange data with other devices. A function
        # without side effects cannot, because the compiler may repeat it or leave it out. Pallas
        # kernels and callbacks (`_LOCAL`) do not exchange data, unless a kernel says so.
        has_effects = kind == "custom-call" and "custom_call_has_side_effect=true" in rest
        if has_effects and _LOCAL.search(rest) is None:
            return False
        # Compilers may move a collective to the hosts; such a collective is not understood.
        is_on_hosts = '"MegaScaleCollective' in rest
        return not is_on_hosts and not self.is_sending_kernel

    @property
    def is_sending_kernel(self) -> bool:
        """Whether it is a Pallas kernel that sends to other devices.

        The text does not say how much such a kernel sends.
        """
        # The first test is fast, and false for nearly all instructions.
        return '"has_communication"' in self.rest and _SENDS.search(self.rest) is not None

    @property
    def target(self) -> str:
        """The name of what a custom call calls; empty for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def collective(self) -> str | None:
        """The kind of collective that it is or starts; None for other instructions."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    def __str__(self) -> str:
        return f"{self.name} = {self.shape_text} {self.opcode}({self.rest}"

    @functools.cached_property
    def calls(self) -> list[tuple[str, str]]:
        """The computations that it runs, each after the attribute that names it.

        For example, a ``while`` has ``[("condition", "c"), ("body", "b")]``.
        """
        if base(self.opcode) not in CALLERS:  # Most instructions need no search.
            return []
        # A search for ` body=%b` in the text is faster than reading all attributes. Inside of a
        # string, such a text means nothing, so the search ends at the first string. If there may be
        # another computation (`%c`) behind the string, all attributes are read instead.
        before_strings, _, after = self.rest.partition('"')
        if "%" in after or self.opcode == "custom-call":
            named = [(key, text) for key, text in self.attributes.items() if key in _CALLS]
        else:
            named = _CALLED.findall(before_strings)
        # The text is `%b`, or several in braces: `{%b, %c}`.
        return [(key, name) for key, text in named for name in re.findall(r"[^\s,{}%]+", text)]

    @property
    def callees(self) -> list[str]:
        """The names of the computations that it runs."""
        return [name for _, name in self.calls]


@functools.lru_cache(maxsize=1 << 14)
def _results(shape_text: str, opcode: str) -> tuple[Shape, ...]:
    """Returns the arrays that an instruction makes, from the shape as it is written.

    For most instructions, the shape has just these arrays. The shape of a start has operands or a
    context as well::

        all-reduce-start    results, or from some compilers ((operand, ...), results)
        copy-start          (result, operand, ...)
        send, recv          (array, ...)
        other starts        (operands, results, ...)
    """
    shape = read_shape(shape_text)
    if not isinstance(shape, Shape) and len(shape) > 1:
        is_result_first = opcode in ("copy-start", "send", "recv")
        if opcode == "all-reduce-start":
            has_operands = not isinstance(shape[0], Shape)  # Operands are a tuple in front.
        else:
            has_operands = opcode.endswith("-start") and not is_result_first
        if is_result_first:
            shape = shape[0]
        elif has_operands:
            shape = shape[1]
    return tuple(arrays(shape))


class Computation(NamedTuple):
    """A list of instructions, in the order of the text."""

    name: str  # without the percent sign; empty for instructions outside of any
    is_entry: bool  # whether the program begins with it
    instructions: list[Instruction]


def spell_out(computation: Computation) -> list[Computation]:
    """Rewrites each abbreviated ``fusion-start`` as an ``async-start``, in place.

    XLA abbreviates an asynchronous computation that has a single instruction: it prints the opcode
    of this instruction with a suffix::

        %a = ((f32[8]), f32[8], u32[]) fusion-start(%x), calls=%f
        %b = f32[8] fusion-done(%a)

    In the instructions of ``computation``, these become::

        %a = ((f32[8]), f32[8], u32[]) async-start(%x), calls=%a.async
        %b = f32[8] async-done(%a)

    Returns:
      The computations that the new starts call, such as ``a.async`` (`_async_computation`).
    """
    made = []
    for position, instruction in enumerate(computation.instructions):
        kind = base(instruction.opcode)  # "fusion-start" → "fusion"
        # An opcode without a suffix is a plain instruction.
        if kind not in ABBREVIATED or kind == instruction.opcode:
            continue
        opcode = f"async{instruction.opcode.removeprefix(kind)}"  # -start, -update or -done
        rest = instruction.rest
        if opcode == "async-start":
            called = _async_computation(instruction, kind)
            if called is None:
                continue  # The start stays abbreviated, so that it counts as not understood.
            made.append(called)
            _, end_of_operands = _split(rest, 0, ")")
            metadata = instruction.attributes.get("metadata")
            # The instruction in the new computation has the other attributes.
            rest = f"{rest[:end_of_operands]}, calls=%{called.name}"
            rest += f", metadata={metadata}" if metadata else ""
        computation.instructions[position] = instruction._replace(opcode=opcode, rest=rest)
    return made


def _async_computation(start: Instruction, kind: str) -> Computation | None:
    """Returns the computation that an abbreviated start, such as a ``fusion-start``, runs.

    For the example of `spell_out`, of the kind ``fusion``::

        %a.async {
          %a.operand.0 = f32[8] parameter(0)
          ROOT %a.call = f32[8] fusion(%a.operand.0), calls=%f
        }

    None if the shape of the start is not ``((operand, ...), result, context, ...)``.
    """
    # "((f32[8]), f32[8], u32[])" → "(f32[8])" and ["f32[8]", "u32[]"]
    (given, *others), _ = _split(start.shape_text, 1, ")")
    if not given.startswith("(") or not others:
        return None
    shapes, _ = _split(given, 1, ")")  # the shapes of the operands
    names = [f"{start.name}.operand.{number}" for number in range(len(shapes))]
    parameters = [
        Instruction(
            name=name,
            opcode="parameter",
            shape_text=shape.strip(),
            rest=f"{number})",  # ``rest`` is the text behind ``parameter(``
            is_root=False,
        )
        for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    _, end_of_operands = _split(start.rest, 0, ")")
    operands = ", ".join(f"%{name}" for name in names)
    called = Instruction(
        name=f"{start.name}.call",
        opcode=kind,
        shape_text=others[0].strip(),  # the shape of the result
        rest=f"{operands}){start.rest[end_of_operands:]}",
        is_root=True,
    )
    return Computation(
        name=f"{start.name}.async", is_entry=False, instructions=[*parameters, called]
    )


# Opcodes of instructions whose asynchronous form XLA abbreviates.
ABBREVIATED = ("call", "custom-call", "fusion")


def _split(text: str, start: int, closing: str) -> tuple[list[str], int]:
    """Splits text at commas that are in no bracket, from ``start`` to a closing bracket.

    For example, ``"%x, f(a, b)), index=1"`` from 0 to ``")"`` is ``["%x", " f(a, b)"]`` and 12.

    Returns:
      The parts, and the position behind the bracket. Without a closing bracket, the parts are
      those of all the text, and the position is its end.
    """
    parts: list[str] = []
    depth = 0
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if len(token) > 1:  # A string, a comment, or a pair of brackets is passed over.
            continue
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


def nesting(text: str) -> int:
    """Counts the brackets that a text opens, minus those that it closes."""
    text = _QUOTED.sub("", text)
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIP_COUNT = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d{1,18})"?')
_SENDS = re.compile(r'"has_communication"\s*:\s*true')
# Pallas kernels for TPUs, and callbacks to Python.
_LOCAL = re.compile(r'custom_call_target="(?:tpu_custom_call|xla_\w*python_\w*callback)"')
_CALLS = {"calls", "to_apply", "body", "condition", "branch_computations", "called_computations"}
_CALLS |= {"true_computation", "false_computation", "select", "scatter"}
# ` body=%b`, or ` branch_computations={%b, %c}`
_CALLED = re.compile(rf" ({'|'.join(sorted(_CALLS))})=(\{{[^{{}}]*\}}|[^\s,{{}}]+)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/')
# A pair of brackets without other brackets inside.
_FLAT = rf'[(\[{{](?:[^"()\[\]{{}}/]|{_QUOTED.pattern})*+[)\]}}]'
_TOKEN = re.compile(rf"{_QUOTED.pattern}|{_FLAT}|[()\[\]{{}},]")
_NAME = re.compile(r"([^\s,%]+)\s*(?:,|$)")
_SIMPLE = re.compile(r'([^()\[\]{}"/]*)\)')
_COMMENT = re.compile(r"/\*.*?\*/")


def dims_at(instruction: Instruction, index: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions of the array at an index of the result of an instruction.

    For ``(f32[2], (f32[3,4]))`` and the index (1, 0), these are (3, 4). Returns () if the index
    leads to a tuple, or to nothing.
    """
    shape = instruction.shape
    for i in index:
        if isinstance(shape, Shape) or i >= len(shape):
            return ()
        shape = shape[i]
    return shape.dims if isinstance(shape, Shape) else ()


# The arrays of each operand of an instruction; mostly one.
Operands: TypeAlias = Sequence[Sequence[Shape]]


def operands_of(instruction: Instruction, by_name: Mapping[str, Instruction]) -> Operands:
    """Returns the arrays of each operand; none for an operand that damaged text lacks.

    ``by_name`` has the instructions of the same computation.
    """
    makers = map(by_name.get, instruction.operand_names)
    return [() if maker is None else maker.results for maker in makers]
