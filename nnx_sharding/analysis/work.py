"""What a program computes, reads and writes: as XLA counts, but in all runs of loops."""

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
    """A program's work in one call, of which XLA does not know loops; None if it is not read."""
    # Slices count with their own size; for TPUs, only bytes of the main memory count.
    if module.unread:
        return None
    found = executed_work(module)
    executed = Work()
    for name, parts in found.items():
        executed = executed.plus(_sum(own for _, own in parts), module.runs[name].least)
    figures: dict[str, float | None] = {
        name: float(min(figure, _MOST)) for name, figure in executed._asdict().items()
    }
    remarks = _remarks(module)
    for name in ("flops", "transcendentals", "bytes_accessed"):
        is_open = name != "bytes_accessed" and CUSTOM_CALLS in remarks
        if is_open or getattr(cost, name) is None:
            figures[name] = None
    operations = () if None in figures.values() else _operations(module, found)
    stage = ", ".join([WITH_LOOPS, *remarks])
    return dataclasses.replace(cost, **figures, stage=stage, operations=operations)


def _operations(
    module: Module, found: Mapping[str, list[tuple[Instruction, Work]]]
) -> tuple[Operation, ...]:
    """What the device does one after the other, without what it copies or sends beside."""
    fused: dict[str, Work] = {}  # what a run of a computation takes
    sums: dict[tuple[int, bool, bool], Work] = {}
    for name in module.callees_first or ():
        own = {one.name: work for one, work in found.get(name, ())}
        runs, total = module.runs[name], Work()
        for one in module.by_name[name].instructions if name in found else ():
            inside = [fused[callee] for _, callee in one.calls if module.fused(one)]
            work = _sum([own.get(one.name, Work()), *inside])
            total = total.plus(work)
            is_beside = one.collective or one.opcode.endswith(("-start", "-done"))
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
    """What the figures leave open."""
    remarks = {
        MAIN_MEMORY: module.is_for_tpu,
        UNKNOWN_LENGTH: any(
            one.name not in module.trip_counts for _, one in module.with_opcode("while")
        ),
        BRANCHES: bool(module.with_opcode("conditional")),
        CUSTOM_CALLS: any(
            one.target not in _WITHOUT_WORK
            and _KNOWN.match(one.target) is None
            and product_flops(one, module.within[home.name]) is None
            and custom_work(one) is None
            for home, one in module.with_opcode("custom-call")
        ),
    }
    return [remark for remark, holds in remarks.items() if holds]


def executed_work(module: Module) -> dict[str, list[tuple[Instruction, Work]]]:
    """The instructions that do work in each computation that runs, and that work in one run."""
    # What is applied to elements, and the bytes of what is fused, are the work of their callers.
    found: dict[str, list[tuple[Instruction, Work]]] = {}
    inside: dict[str, Work] = {}  # what an application of a computation takes
    for name in module.callees_first or ():
        if name not in module.by_name:
            continue
        by_name, runs = module.within[name], module.runs[name]
        parts = []
        for one in module.by_name[name].instructions:
            if one.opcode in _NO_WORK:
                continue
            own = work_of(one, by_name, None if runs.is_fused else module)
            if count := applications(one, by_name):
                for _, callee in one.calls:
                    own = own.plus(inside.get(callee, Work()), count)
            if any(own):
                parts.append((one, own))
        if runs.is_applied:
            inside[name] = _sum(own for _, own in parts)
        else:
            found[name] = parts
    weights = {name: sum(sum(own) for _, own in parts) for name, parts in found.items()}
    taken = module.taken(weights)
    return {name: parts for name, parts in found.items() if name in taken}


def _sum(parts: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(Work(), *parts, strict=True)))


def work_of(one: Instruction, by_name: ByName, module: Module | None) -> Work:
    """The work of an instruction itself, without what it calls; without a module, no bytes."""
    if one.opcode in _NO_WORK or (one.opcode == "custom-call" and one.target in _WITHOUT_WORK):
        return Work()
    elements = _elements(one.results)
    accessed = 0 if module is None else _bytes(one, by_name, module)
    if one.opcode in TRANSCENDENTAL:
        return Work(0, elements, accessed)
    if one.opcode in ELEMENTWISE:
        return Work(elements, 0, accessed)
    if base(one.opcode) in _COPIES:
        return Work(bytes_accessed=accessed, host_bytes=_host_bytes(one, by_name))
    if one.opcode in ("all-reduce", "all-reduce-start"):
        return Work(sum(math.prod(shape.dims) for shape in one.results), 0, accessed)
    if one.opcode == "sort" or (one.opcode == "custom-call" and _SORTS.match(one.target)):
        elements = max([elements, *(_elements(made_by(by_name, x)) for x in one.operand_names)])
        return Work(elements * max(elements - 1, 0).bit_length(), 0, accessed)
    if one.opcode == "fft":
        lengths = re.findall(r"\d{1,9}", one.attributes.get("fft_length", ""))
        steps = math.prod(max(int(length) - 1, 0).bit_length() for length in lengths)
        return Work(8 * elements * steps, 0, accessed)
    if one.opcode == "custom-call" and (estimate := custom_work(one)) is not None:
        return estimate
    flops = product_flops(one, by_name)
    if flops is None:
        return Work(0, 0, accessed)
    inputs = {by_name[name].results[0].dtype for name in one.operand_names[:2]}
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


def applications(one: Instruction, by_name: ByName) -> int:
    """How often an instruction applies a computation to elements, as a reduction does."""
    if one.opcode not in ("reduce", "reduce-window", "select-and-scatter", "scatter", "map"):
        return 0
    result = _elements(one.results)
    operands = [_elements(made_by(by_name, name)) for name in one.operand_names] or [0]
    if one.opcode == "reduce":
        return max(operands[0] - result, 0)
    if one.opcode == "reduce-window":
        sizes, dims = window_of(one).get("size", [1]), one.results[0].dims
        # Windows that cover all elements at any position: a reduction whose result is repeated.
        if all(n == 1 or n >= 2 * dim - 1 for n, dim in zip(sizes, dims, strict=False)):
            return operands[0]
        return (math.prod(sizes) - 1) * result
    if one.opcode == "select-and-scatter":
        return math.prod(window_of(one).get("size", [1])) * operands[min(1, len(operands) - 1)]
    return operands[-1] if one.opcode == "scatter" else result


def custom_work(one: Instruction) -> Work | None:
    """The work of a custom call by its author's estimate, as in Pallas kernels."""
    estimate = _ESTIMATE.search(one.attributes.get("backend_config", ""))
    figures = dict(re.findall(r'"(\w+)"\s*:\s*"?(\d{1,18})', estimate[1])) if estimate else {}
    return Work(*(int(figures.get(name, 0)) for name in Work._fields)) if estimate else None


_ESTIMATE = re.compile(r'"cost_estimate"\s*:\s*\{([^{}]*)\}')


def _elements(shapes: Sequence[Shape]) -> int:
    return math.prod(shapes[0].dims) if shapes else 0


def _host_bytes(one: Instruction, by_name: ByName) -> int:
    """The bytes that a copy moves between device and host."""
    operands = [made_by(by_name, name) for name in one.operand_names[:2]]
    if one.opcode.endswith(("-done", "-update")) or not operands:
        return 0
    read = operands[0]
    written: Sequence[Shape] = one.results
    moved = written
    if base(one.opcode) == "dynamic-update-slice" and len(operands) > 1:
        written, read, *_ = operands
        moved = read
    return total_bytes(moved) * (_is_on_host(read) != _is_on_host(written))


def _is_on_host(shapes: Sequence[Shape]) -> bool:
    return any(shape.memory_space == _HOST for shape in shapes)


def _bytes(one: Instruction, by_name: ByName, module: Module) -> int:
    """The bytes that one operation reads and writes; for TPUs, those of the main memory."""
    if one.opcode.endswith(("-done", "-update")):
        return 0
    total = 0
    parts = _read(one, module) if base(one.opcode) in _READ_PARTS else itertools.repeat(None)
    for name, part in zip(one.operand_names, parts, strict=False):
        total += _counted(made_by(by_name, name), module, part)
    written = _written(one, by_name, module) if base(one.opcode) != "send" else []
    if is_library_call(one):  # what they make last is memory to work in
        written = written[:-1] or written
    return total + sum(_counted([shape], module, part) for shape, part in written)


def _counted(shapes: Iterable[Shape], module: Module, part: int | None) -> int:
    size = sum([s.bytes for s in shapes if not (s.memory_space and module.is_for_tpu)])
    return size if part is None else min(size, part)


_READ_PARTS = SLICES | {"dynamic-update-slice", "fusion"}


def _read(one: Instruction, module: Module) -> Sequence[int | None]:
    """The bytes that an operation reads of each operand; None for all of it."""
    opcode, count = base(one.opcode), len(one.operand_names)
    if opcode in SLICES:
        return [total_bytes(one.results), *[0] * (count - 1)][:count]
    if opcode == "dynamic-update-slice":
        return [0, None, *[0] * (count - 2)][:count]
    callee = module.fused(one)
    if callee is None:
        return [None] * count
    parts: dict[int, int | None] = dict.fromkeys(range(count), 0)
    views: dict[str, int] = {}  # the operand whose bytes an instruction has
    for user in callee.instructions:
        if user.opcode == "parameter" and user.number is not None:
            views[user.name] = user.number
            continue
        of = [(at, views[name]) for at, name in enumerate(user.operand_names) if name in views]
        if not of:
            continue
        is_view = user.opcode in ("bitcast", "fusion") and _is_view(user, module)
        if is_view and not user.is_root:
            views[user.name] = of[0][1]
        elif is_view or base(user.opcode) not in _READ_PARTS:
            parts |= dict.fromkeys([operand for _, operand in of])
        else:
            read = _read(user, module)
            for at, operand in of:
                known, more = parts.get(operand), read[at]
                parts[operand] = None if known is None or more is None else known + more
    return [parts[operand] for operand in range(count)]


def _is_view(one: Instruction, module: Module) -> bool:
    """Whether it gives the bytes of its operand another shape."""
    callee = module.fused(one)
    codes = {inner.opcode for inner in callee.instructions} if callee else {one.opcode}
    return codes <= {"parameter", "bitcast"}


def _written(one: Instruction, by_name: ByName, module: Module) -> list[tuple[Shape, int | None]]:
    """The arrays that an operation makes, each with the bytes that it writes; None for all."""
    names = one.operand_names
    parts: list[int | None] = []
    if one.opcode == "dynamic-update-slice" and len(names) > 1:
        parts = [total_bytes(made_by(by_name, names[1]))]
    elif callee := module.fused(one):
        inner, root = module.within[callee.name], module.roots.get(callee.name)
        names = (
            () if root is None else root.operand_names if root.opcode == "tuple" else (root.name,)
        )
        for name in names:
            made = inner.get(name)
            while made is not None and made.opcode == "bitcast":
                made = inner.get(made.operand_names[0])
            some = [] if made is None else _written(made, inner, module)
            parts += [part for _, part in some] or [None]
    return list(zip(one.results, parts or [None] * len(one.results), strict=False))


ByName: TypeAlias = Mapping[str, Instruction]  # the instructions of a computation

# Above this number of kernel positions, they are not examined one by one, and padding counts.
_MAX_POSITIONS = 1 << 22


def product_flops(one: Instruction, by_name: ByName) -> int | None:
    """The flops of a product; None for other instructions, and for masks that depend on values."""
    operands = [made_by(by_name, name) for name in one.operand_names]
    if len(operands) < 2 or not one.results or not all(operands[:2]):
        return None
    lhs, rhs, result = operands[0][0].dims, operands[1][0].dims, one.results[0].dims
    if one.opcode == "convolution" or one.target.startswith("__cudnn$conv"):
        # The window of a backward pass is that of the forward pass.
        if one.target == "__cudnn$convBackwardInput":
            lhs, result = result, lhs
        elif one.target == "__cudnn$convBackwardFilter":
            rhs, result = result, rhs
        return _convolution_flops(one, lhs, rhs, result)
    config = one.attributes.get("backend_config", "")
    if one.target.startswith("__cudnn$fmha"):
        return _attention_flops(config, [shapes[0].dims for shapes in operands if shapes])
    # The dimensions that a product sums over; those of a library are in its configuration.
    summed = one.attributes.get("lhs_contracting_dims")
    if summed is None and one.opcode == "custom-call" and (found := _SUMMED.search(config)):
        summed = found[1]
    if summed is None and one.opcode not in PRODUCTS:
        return None
    axes = [int(axis) for axis in re.findall(r"\d{1,3}", summed or "")]
    if any(axis >= len(lhs) for axis in axes):
        return None
    return 2 * math.prod(result) * math.prod(lhs[axis] for axis in axes)


_SUMMED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def is_library_call(one: Instruction) -> bool:
    """Whether it calls cuBLAS or cuDNN."""
    return one.opcode == "custom-call" and one.target.startswith(("__cublas$", "__cudnn$"))


def made_by(by_name: ByName, name: str) -> Sequence[Shape]:
    """The arrays that an instruction makes; none for one that damaged text lacks."""
    return by_name[name].results if name in by_name else ()


def _attention_flops(config: str, operands: Sequence[Sequence[int]]) -> int | None:
    """Two products forward, four backward and the scores again, where the mask leaves them."""
    found = [pattern.search(config) for pattern in _ATTENTION]
    scores, mask, window = (match[1] if match else "" for match in found)
    if not scores or len(operands) < 3 or not all(operands) or _PAGED in config:
        return None
    *batch, queries, keys = (int(size) for size in re.findall(r"\d{1,18}", scores))
    width = int(window or keys) or keys
    if mask == "CAUSAL":
        most = min(width, keys)  # of the keys of one query
        growing = min(queries, most)
        positions = growing * (growing + 1) // 2 + (queries - growing) * most
    elif mask in ("NO_MASK", "ALIBI") and width == keys:
        positions = queries * keys
    else:
        return None
    of_scores, of_values = operands[0][-1], operands[2][-1]
    each = 3 * of_scores + 2 * of_values if "_grad_gemm" in config else of_scores + of_values
    return 2 * math.prod(batch) * positions * each


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
    one: Instruction, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]
) -> int | None:
    """Two for each multiplication, except with zeros of padding or between elements."""
    labels = _LABELS.fullmatch(one.attributes.get("dim_labels", ""))
    if labels is None:
        return None
    dims = zip(labels.groups(), (lhs, rhs, result), strict=True)
    inputs, kernel, outputs = (dict(zip(names, sizes, strict=False)) for names, sizes in dims)
    window = window_of(one)
    count: int = kernel.get("i", 0) * outputs.get("b", 0) * outputs.get("f", 0)
    for axis in filter(str.isdigit, kernel):
        at = int(axis)
        stride, low, dilation, spacing = (
            window[key][at] if at < len(window.get(key, ())) else default
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
    """The number of elements in all windows of a kernel in one dimension, without padding."""
    if kernel * outputs > _MAX_POSITIONS or not dilation:
        return kernel * outputs
    at = np.arange(outputs)[:, None] * stride + np.arange(kernel) * spacing - low
    return int(((at >= 0) & (at % dilation == 0) & (at // dilation < size)).sum())


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def window_of(one: Instruction) -> dict[str, list[int]]:
    """The numbers of a window by name; for paddings, which are pairs, the lower one."""
    text = one.attributes.get("window", "")
    return {
        name: [int(number) for number in re.findall(r"(?:^|x)(-?\d{1,9})", numbers)]
        for name, numbers in re.findall(r"(\w+)=([-\dx_]+)", text)
    }
