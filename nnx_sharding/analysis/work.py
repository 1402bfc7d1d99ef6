"""What a program computes, reads and writes: as XLA counts, but in all runs of loops.

XLA's `HloCostAnalysis` is followed instruction by instruction (`work_of`): a flop for each element
of an elementwise operation, 2·m·k·n for a product (`product_flops`), operands and results for the
bytes (`_bytes`), of which slices and updates in place count their own size. The work of a
computation then counts as often as it runs (`Module.runs`), where XLA counts a loop once; of a
conditional the branch with the most work. Kernels count with their authors' estimates.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .cost import Cost, Operation
from .hlo import Module
from .instructions import Instruction, Shape, total_bytes
from .opcodes import ELEMENTWISE, FREE, PRODUCTS, SLICES, TRANSCENDENTAL, base

WITH_LOOPS = "after optimisation, one device, loops multiplied out"
UNKNOWN_LENGTH = "those of unknown length once"
BRANCHES = "of conditionals the largest branch"
CUSTOM_CALLS = "custom calls of unknown cost"
MAIN_MEMORY = "bytes of the main memory"

_MOST = 1 << 100  # larger figures may overflow
_HOST = 5  # the memory space of the host in layouts, as XLA numbers it


class Work(NamedTuple):
    """An amount of work, with the figures of :class:`~nnx_sharding.analysis.Cost`."""

    flops: int = 0
    transcendentals: int = 0
    bytes_accessed: int = 0
    int8_flops: int = 0
    fp8_flops: int = 0
    host_bytes: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """This plus ``times`` times the other."""
        return Work(*[a + times * b for a, b in zip(self, other, strict=True)])


def with_loops(cost: Cost, module: Module) -> Cost | None:
    """Replaces XLA's estimates by those with loops; None if a part of the program is not read."""
    # Slices count with their own size; for TPUs, only bytes of the main memory count.
    if module.unread:
        return None
    parts = executed_work(module)
    executed = Work()
    for name, part in parts.items():
        executed = executed.plus(_sum(work for _, work in part), module.runs[name].least)
    figures: dict[str, float | None] = {
        name: float(min(figure, _MOST)) for name, figure in executed._asdict().items()
    }
    remarks = _remarks(module)
    for name in ("flops", "transcendentals", "bytes_accessed"):
        is_open = name != "bytes_accessed" and CUSTOM_CALLS in remarks
        if is_open or getattr(cost, name) is None:
            figures[name] = None
    operations = () if None in figures.values() else _operations(module, parts)
    stage = ", ".join([WITH_LOOPS, *remarks])
    return dataclasses.replace(cost, **figures, stage=stage, operations=operations)


def _operations(
    module: Module, parts: Mapping[str, list[tuple[Instruction, Work]]]
) -> tuple[Operation, ...]:
    """Lists what the device does one after the other, without what it copies or sends meanwhile.

    Operations whose ratios of flops to bytes differ by less than a fifth are added up: their sum
    takes about as long as they do, and reports of large programs stay small.
    """
    fused: dict[str, Work] = {}  # what a run of a computation takes
    sums: dict[tuple[int, bool, bool], Work] = {}
    for name in module.callees_first or ():
        own = {instruction.name: work for instruction, work in parts.get(name, ())}
        runs, total = module.runs[name], Work()
        for instruction in module.by_name[name].instructions if name in parts else ():
            callees = instruction.callees if module.fused(instruction) else ()
            inside = [fused[callee] for callee in callees]
            work = _sum([own.get(instruction.name, Work()), *inside])
            total = total.plus(work)
            is_beside = instruction.collective or instruction.opcode.endswith(("-start", "-done"))
            if runs.is_fused or is_beside or not work.flops + work.bytes_accessed:
                continue
            ratio = math.log2(work.flops + 1) - math.log2(work.bytes_accessed + 1)
            kind = round(4 * ratio), work.int8_flops > 0, work.fp8_flops > 0
            sums[kind] = sums.get(kind, Work()).plus(work, runs.least)
        fused[name] = total
    names = [field.name for field in dataclasses.fields(Operation)]
    return tuple(
        Operation(*(float(min(getattr(work, name), _MOST)) for name in names))
        for work in sums.values()
    )


def _remarks(module: Module) -> list[str]:
    """Lists what the figures leave open."""
    remarks = {
        MAIN_MEMORY: module.is_for_tpu,
        UNKNOWN_LENGTH: any(
            loop.name not in module.trip_counts for _, loop in module.with_opcode("while")
        ),
        BRANCHES: bool(module.with_opcode("conditional")),
        CUSTOM_CALLS: any(
            call.target not in _WITHOUT_WORK
            and _KNOWN.match(call.target) is None
            and product_flops(call, module.within[home.name]) is None
            and custom_work(call) is None
            for home, call in module.with_opcode("custom-call")
        ),
    }
    return [remark for remark, holds in remarks.items() if holds]


def executed_work(module: Module) -> dict[str, list[tuple[Instruction, Work]]]:
    """Lists the instructions that do work in each computation that runs, with that of one run.

    What is applied to elements, and the bytes of what is fused, are the work of their callers.
    """
    executed: dict[str, list[tuple[Instruction, Work]]] = {}
    inside: dict[str, Work] = {}  # what an application of a computation takes
    for name in module.callees_first or ():
        if name not in module.by_name:
            continue
        by_name, runs = module.within[name], module.runs[name]
        parts = []
        for instruction in module.by_name[name].instructions:
            if instruction.opcode in _NO_WORK:
                continue
            work = work_of(instruction, by_name, None if runs.is_fused else module)
            if count := applications(instruction, by_name):
                for callee in instruction.callees:
                    work = work.plus(inside.get(callee, Work()), count)
            if any(work):
                parts.append((instruction, work))
        if runs.is_applied:
            inside[name] = _sum(work for _, work in parts)
        else:
            executed[name] = parts
    # Any measure of work finds the largest branch.
    weights = {name: sum(sum(work) for _, work in parts) for name, parts in executed.items()}
    taken = module.taken(weights)
    return {name: parts for name, parts in executed.items() if name in taken}


def _sum(parts: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(Work(), *parts, strict=True)))


def work_of(instruction: Instruction, by_name: ByName, module: Module | None) -> Work:
    """Counts the work of an instruction without what it calls; without a module, no bytes."""
    opcode, operands = instruction.opcode, instruction.operand_names
    custom_call = instruction.target if opcode == "custom-call" else ""
    if opcode in _NO_WORK or custom_call in _WITHOUT_WORK:
        return Work()
    elements = _elements(instruction.results)
    accessed = 0 if module is None else _bytes(instruction, by_name, module)
    if opcode in TRANSCENDENTAL:
        return Work(0, elements, accessed)
    if opcode in ELEMENTWISE:
        return Work(elements, 0, accessed)
    if base(opcode) in _COPIES:
        return Work(bytes_accessed=accessed, host_bytes=_host_bytes(instruction, by_name))
    if opcode in ("all-reduce", "all-reduce-start"):  # an addition for each element
        return Work(sum(math.prod(shape.dims) for shape in instruction.results), 0, accessed)
    if opcode == "sort" or _SORTS.match(custom_call):  # n log n, also of the first elements only
        elements = max([elements, *(_elements(made_by(by_name, x)) for x in operands)])
        return Work(elements * max(elements - 1, 0).bit_length(), 0, accessed)
    if opcode == "fft":  # the lengths of its dimensions, each 8 n log n
        lengths = re.findall(r"\d{1,9}", instruction.attributes.get("fft_length", ""))
        steps = math.prod(max(int(length) - 1, 0).bit_length() for length in lengths)
        return Work(8 * elements * steps, 0, accessed)
    if opcode == "custom-call" and (estimate := custom_work(instruction)) is not None:
        return estimate
    flops = product_flops(instruction, by_name)
    if flops is None:
        return Work(0, 0, accessed)
    inputs = {by_name[name].results[0].dtype for name in operands[:2]}
    int8, fp8 = (all(map(kind.match, inputs)) for kind in (_INT8, _FP8))
    return Work(flops, 0, accessed, flops * int8, flops * fp8)


_COPIES = SLICES | {"copy", "dynamic-update-slice"}
_NO_WORK = FREE | {"async-start"}
# What the compilers themselves call, to pass values on and to mark them.
_WITHOUT_WORK = {"AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone"}
_WITHOUT_WORK |= {"AsyncCollectiveStart", "ConcatBitcast", "GatherScatterIndicesBitpacked"}
_WITHOUT_WORK |= {"LayoutConstraint", "MoveToDevice", "MoveToHost", "PinToDevice", "Sharding"}
_WITHOUT_WORK |= {"SPMDFullToShardShape", "SPMDShardToFullShape", "SliceId", "X64Combine"}
_WITHOUT_WORK |= {"X64SplitHigh", "X64SplitLow", "ZeroCrop"}
_WITHOUT_WORK.add("annotate_device_placement")
_SORTS = re.compile(r"(__gpu\$)?TopK|__topk|__cub\$")
_KNOWN = re.compile(rf"{_SORTS.pattern}|xla_\w*python_\w*callback")  # which runs on the host
_INT8, _FP8 = re.compile("[su][248]$"), re.compile("f[468]e")


def applications(instruction: Instruction, by_name: ByName) -> int:
    """Counts how often an instruction applies a computation to elements, as a reduction does."""
    opcode = instruction.opcode
    if opcode not in ("reduce", "reduce-window", "select-and-scatter", "scatter", "map"):
        return 0
    result = _elements(instruction.results)
    operands = [_elements(made_by(by_name, name)) for name in instruction.operand_names] or [0]
    if opcode == "reduce":
        return max(operands[0] - result, 0)
    if opcode == "reduce-window":
        sizes, dims = window_of(instruction).get("size", [1]), instruction.results[0].dims
        # Windows that cover all elements at any position: a reduction whose result is repeated.
        if all(n == 1 or n >= 2 * dim - 1 for n, dim in zip(sizes, dims, strict=False)):
            return operands[0]
        return (math.prod(sizes) - 1) * result
    if opcode == "select-and-scatter":
        sources = operands[min(1, len(operands) - 1)]
        return math.prod(window_of(instruction).get("size", [1])) * sources
    return operands[-1] if opcode == "scatter" else result


def custom_work(instruction: Instruction) -> Work | None:
    """Reads the work of a custom call from its author's estimate, as in Pallas kernels."""
    estimate = _ESTIMATE.search(instruction.attributes.get("backend_config", ""))
    figures = dict(re.findall(r'"(\w+)"\s*:\s*"?(\d{1,18})', estimate[1])) if estimate else {}
    return Work(*(int(figures.get(name, 0)) for name in Work._fields)) if estimate else None


_ESTIMATE = re.compile(r'"cost_estimate"\s*:\s*\{([^{}]*)\}')


def _elements(shapes: Sequence[Shape]) -> int:
    return math.prod(shapes[0].dims) if shapes else 0


def _host_bytes(instruction: Instruction, by_name: ByName) -> int:
    """Counts the bytes that a copy moves between device and host."""
    # The array, and for updates what is written.
    operands = [made_by(by_name, name) for name in instruction.operand_names[:2]]
    if instruction.opcode.endswith(("-done", "-update")) or not operands:
        return 0
    read = operands[0]
    written: Sequence[Shape] = instruction.results
    moved = written
    if base(instruction.opcode) == "dynamic-update-slice" and len(operands) > 1:
        written, read, *_ = operands
        moved = read
    return total_bytes(moved) if _is_on_host(read) != _is_on_host(written) else 0


def _is_on_host(shapes: Sequence[Shape]) -> bool:
    return any(shape.memory_space == _HOST for shape in shapes)


def _bytes(instruction: Instruction, by_name: ByName, module: Module) -> int:
    """Counts the bytes that an operation reads and writes; for TPUs, those of the main memory."""
    if instruction.opcode.endswith(("-done", "-update")):  # the start has counted them
        return 0
    total = 0
    opcode = base(instruction.opcode)
    parts = _read(instruction, module) if opcode in _READ_PARTS else itertools.repeat(None)
    for name, part in zip(instruction.operand_names, parts, strict=False):
        total += _counted(made_by(by_name, name), module, part)
    written = _written(instruction, by_name, module) if opcode != "send" else []
    if is_library_call(instruction):  # what they make last is memory to work in
        written = written[:-1] or written
    return total + sum(_counted([shape], module, part) for shape, part in written)


def _counted(shapes: Iterable[Shape], module: Module, part: int | None) -> int:
    size = sum([s.bytes for s in shapes if not (s.memory_space and module.is_for_tpu)])
    return size if part is None else min(size, part)


_READ_PARTS = SLICES | {"dynamic-update-slice", "fusion"}


def _read(instruction: Instruction, module: Module) -> Sequence[int | None]:
    """Counts the bytes that an operation reads of each operand; None for all of it.

    A fusion reads as much of an operand as the slices and updates in it, if nothing else uses it.
    """
    opcode, count = base(instruction.opcode), len(instruction.operand_names)
    if opcode in SLICES:
        return [total_bytes(instruction.results), *[0] * (count - 1)][:count]
    if opcode == "dynamic-update-slice":
        return [0, None, *[0] * (count - 2)][:count]  # in place: only what is written is read
    callee = module.fused(instruction)
    if callee is None:
        return [None] * count
    parts: dict[int, int | None] = dict.fromkeys(range(count), 0)
    views: dict[str, int] = {}  # the operand whose bytes an instruction of the fusion has
    for user in callee.instructions:
        if user.opcode == "parameter" and user.number is not None:
            views[user.name] = user.number
            continue
        used = [(i, views[name]) for i, name in enumerate(user.operand_names) if name in views]
        if not used:
            continue
        is_view = user.opcode in ("bitcast", "fusion") and _is_view(user, module)
        if is_view and not user.is_root:
            views[user.name] = used[0][1]
        elif is_view or base(user.opcode) not in _READ_PARTS:
            parts |= dict.fromkeys([operand for _, operand in used])  # all of it
        else:
            read = _read(user, module)
            for i, operand in used:
                known, more = parts.get(operand), read[i]
                parts[operand] = None if known is None or more is None else known + more
    return [parts[operand] for operand in range(count)]


def _is_view(instruction: Instruction, module: Module) -> bool:
    """Tells whether an operation gives the bytes of its operand another shape."""
    callee = module.fused(instruction)
    codes = {inner.opcode for inner in callee.instructions} if callee else {instruction.opcode}
    return codes <= {"parameter", "bitcast"}


def _written(
    instruction: Instruction, by_name: ByName, module: Module
) -> list[tuple[Shape, int | None]]:
    """Lists the arrays that an operation makes, with the bytes that it writes; None for all."""
    names = instruction.operand_names
    parts: list[int | None] = []
    if instruction.opcode == "dynamic-update-slice" and len(names) > 1:
        parts = [total_bytes(made_by(by_name, names[1]))]
    elif callee := module.fused(instruction):
        inner, root = module.within[callee.name], module.roots.get(callee.name)
        results: Sequence[str] = ()
        if root is not None:
            results = root.operand_names if root.opcode == "tuple" else (root.name,)
        for name in results:
            made = inner.get(name)
            while made is not None and made.opcode == "bitcast":
                made = inner.get(made.operand_names[0])
            written = [] if made is None else _written(made, inner, module)
            parts += [part for _, part in written] or [None]
    return list(zip(instruction.results, parts or [None] * len(instruction.results), strict=False))


ByName: TypeAlias = Mapping[str, Instruction]  # the instructions of a computation

# Above this number of kernel positions, they are not examined one by one, and padding counts.
_MAX_POSITIONS = 1 << 22


def product_flops(instruction: Instruction, by_name: ByName) -> int | None:
    """Counts the flops of a product; None for others, and for masks that depend on values."""
    operands = [made_by(by_name, name) for name in instruction.operand_names]
    if len(operands) < 2 or not instruction.results or not all(operands[:2]):
        return None
    lhs, rhs, result = operands[0][0].dims, operands[1][0].dims, instruction.results[0].dims
    if instruction.opcode == "convolution" or instruction.target.startswith("__cudnn$conv"):
        # The window of a backward pass is that of the forward pass.
        if instruction.target == "__cudnn$convBackwardInput":
            lhs, result = result, lhs
        elif instruction.target == "__cudnn$convBackwardFilter":
            rhs, result = result, rhs
        return _convolution_flops(instruction, lhs, rhs, result)
    config = instruction.attributes.get("backend_config", "")
    if instruction.target.startswith("__cudnn$fmha"):
        return _attention_flops(config, [shapes[0].dims for shapes in operands if shapes])
    # The dimensions that a product sums over; those of a library are in its configuration.
    summed = instruction.attributes.get("lhs_contracting_dims")
    if summed is None and instruction.opcode == "custom-call" and (match := _SUMMED.search(config)):
        summed = match[1]
    if summed is None and instruction.opcode not in PRODUCTS:
        return None
    axes = [int(axis) for axis in re.findall(r"\d{1,3}", summed or "")]
    if any(axis >= len(lhs) for axis in axes):
        return None
    return 2 * math.prod(result) * math.prod(lhs[axis] for axis in axes)


_SUMMED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def is_library_call(instruction: Instruction) -> bool:
    """Tells whether an instruction calls cuBLAS or cuDNN."""
    is_call = instruction.opcode == "custom-call"
    return is_call and instruction.target.startswith(("__cublas$", "__cudnn$"))


def made_by(by_name: ByName, name: str) -> Sequence[Shape]:
    """Returns the arrays that an instruction makes; none for one that damaged text lacks."""
    return by_name[name].results if name in by_name else ()


def _attention_flops(config: str, operands: Sequence[Sequence[int]]) -> int | None:
    """Counts the flops of attention in cuDNN, at the positions that its mask leaves.

    Forward there are two products, with keys and with values; backward the scores again, and two
    products for the gradient of each factor.
    """
    matches = [pattern.search(config) for pattern in _ATTENTION]
    scores, mask, window = (match[1] if match else "" for match in matches)
    if not scores or len(operands) < 3 or not all(operands) or _PAGED in config:
        return None
    *batch, queries, keys = (int(size) for size in re.findall(r"\d{1,18}", scores))
    width = int(window or keys) or keys
    if mask == "CAUSAL":
        most = min(width, keys)  # of the keys of one query
        growing = min(queries, most)  # the first queries have 1, 2, 3 … keys
        positions = growing * (growing + 1) // 2 + (queries - growing) * most
    elif mask in ("NO_MASK", "ALIBI") and width == keys:
        positions = queries * keys
    else:
        return None
    key_width, value_width = operands[0][-1], operands[2][-1]
    per_position = key_width + value_width
    if "_grad_gemm" in config:
        per_position = 3 * key_width + 2 * value_width
    return 2 * math.prod(batch) * positions * per_position


_ATTENTION = [
    re.compile(pattern)
    for pattern in (
        r'"intermediate_tensor_shape":\{"dimensions":\[([^\]]*)\]',
        r'"mask_type":"(\w+)"',
        r'"sliding_window_length":"?(\d{1,18})',
    )
]
_PAGED = '"is_paged_attention":true'


def _convolution_flops(
    instruction: Instruction, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]
) -> int | None:
    """Counts two for each multiplication, except with zeros of padding or between elements."""
    labels = _LABELS.fullmatch(instruction.attributes.get("dim_labels", ""))
    if labels is None:
        return None
    dims = zip(labels.groups(), (lhs, rhs, result), strict=True)
    inputs, kernel, outputs = (dict(zip(names, sizes, strict=False)) for names, sizes in dims)
    window = window_of(instruction)
    count: int = kernel.get("i", 0) * outputs.get("b", 0) * outputs.get("f", 0)
    for axis in filter(str.isdigit, kernel):
        dimension = int(axis)
        stride, low, dilation, spacing = (
            window[key][dimension] if dimension < len(window.get(key, ())) else default
            for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        count *= positions(
            inputs.get(axis, 0), kernel[axis], outputs.get(axis, 0), stride, low, dilation, spacing
        )
    return 2 * count


@functools.lru_cache(maxsize=1024)
def positions(
    size: int, kernel: int, outputs: int, stride: int, low: int, dilation: int, spacing: int
) -> int:
    """Counts the elements in all windows of a kernel in one dimension, without padding.

    Args:
      size: of the input.
      kernel: its size.
      outputs: how many windows there are.
      stride: from window to window.
      low: the padding before the first element.
      dilation: of the input, which has zeros between elements.
      spacing: of the elements of the kernel.
    """
    if kernel * outputs > _MAX_POSITIONS or not dilation:
        return kernel * outputs
    place = np.arange(outputs)[:, None] * stride + np.arange(kernel) * spacing - low
    return int(((place >= 0) & (place % dilation == 0) & (place // dilation < size)).sum())


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def window_of(instruction: Instruction) -> dict[str, list[int]]:
    """Reads the numbers of a window by name; of paddings, which are pairs, the lower one."""
    text = instruction.attributes.get("window", "")
    return {
        name: [int(number) for number in re.findall(r"(?:^|x)(-?\d{1,9})", numbers)]
        for name, numbers in re.findall(r"(\w+)=([-\dx_]+)", text)
    }
