"""What single instructions compute, read and write, counted as XLA does."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .hlo import Module
from .instructions import Computation, Instruction, Shape, total_bytes
from .opcodes import ELEMENTWISE, FREE, SLICES, TRANSCENDENTAL, base

# Above this number of kernel positions, they are not examined one by one, and padding counts.
_MAX_POSITIONS = 1 << 22


class Work(NamedTuple):
    """An amount of work, with the figures of :class:`~nnx_sharding.analysis.Cost`."""

    flops: int = 0
    transcendentals: int = 0
    bytes_accessed: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """This plus ``times`` times the other."""
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))


def shapes_of(computation: Computation, module: Module) -> dict[str, list[Shape]]:
    """The arrays that each instruction makes; those in a TPU's vector memory have 0 bytes."""
    shapes = {one.name: one.results for one in computation.instructions}
    if not module.is_for_tpu:
        return shapes
    return {
        name: [shape._replace(bytes=0) if shape.memory_space else shape for shape in some]
        for name, some in shapes.items()
    }


def work_of(one: Instruction, shapes: Mapping[str, list[Shape]], module: Module | None) -> Work:
    """The work of an instruction itself, without the computations that it calls.

    Without the module, bytes are not counted.
    """
    elements = _elements(shapes[one.name])
    accessed = 0 if module is None else _bytes(one, shapes, module)
    if one.opcode in TRANSCENDENTAL:
        return Work(0, elements, accessed)
    if one.opcode in ELEMENTWISE:
        return Work(elements, 0, accessed)
    if one.opcode in ("all-reduce", "all-reduce-start"):
        return Work(sum(math.prod(shape.dims) for shape in shapes[one.name]), 0, accessed)
    if one.opcode == "sort":
        return Work(elements * max(elements - 1, 0).bit_length(), 0, accessed)
    if one.opcode == "fft":
        lengths = re.findall(r"\d{1,9}", one.attributes.get("fft_length", ""))
        steps = math.prod(max(int(length) - 1, 0).bit_length() for length in lengths)
        return Work(8 * elements * steps, 0, accessed)
    if one.opcode == "custom-call" and (estimate := custom_work(one)) is not None:
        return estimate
    return Work(_product_flops(one, shapes), 0, accessed)


def applications(one: Instruction, shapes: Mapping[str, list[Shape]]) -> int:
    """How often an instruction applies a computation to elements, as a reduction does."""
    if one.opcode not in ("reduce", "reduce-window", "select-and-scatter", "scatter", "map"):
        return 0
    result = _elements(shapes[one.name])
    operands = [_elements(shapes.get(name, [])) for name in one.operand_names] or [0]
    if one.opcode == "reduce":
        return max(operands[0] - result, 0)
    if one.opcode == "reduce-window":
        sizes, dims = _window(one).get("size", [1]), shapes[one.name][0].dims
        # Windows that cover all elements at any position: a reduction whose result is repeated.
        if all(n == 1 or n >= 2 * dim - 1 for n, dim in zip(sizes, dims, strict=False)):
            return operands[0]
        return (math.prod(sizes) - 1) * result
    if one.opcode == "select-and-scatter":
        return math.prod(_window(one).get("size", [1])) * operands[min(1, len(operands) - 1)]
    return operands[-1] if one.opcode == "scatter" else result


def custom_work(one: Instruction) -> Work | None:
    """The work of a custom call by its author's estimate, as in Pallas kernels."""
    estimate = _ESTIMATE.search(one.attributes.get("backend_config", ""))
    figures = dict(re.findall(r'"(\w+)"\s*:\s*"?(\d{1,18})', estimate[1])) if estimate else {}
    return Work(*(int(figures.get(name, 0)) for name in Work._fields)) if estimate else None


_ESTIMATE = re.compile(r'"cost_estimate"\s*:\s*\{([^{}]*)\}')


def _elements(shapes: Sequence[Shape]) -> int:
    return math.prod(shapes[0].dims) if shapes else 0


def _product_flops(one: Instruction, shapes: Mapping[str, list[Shape]]) -> int:
    """2·m·k·n for a matrix product, likewise for a convolution, 0 for everything else."""
    if one.opcode not in ("dot", "ragged-dot", "convolution", "custom-call"):
        return 0
    operands = [shapes.get(name, []) for name in one.operand_names[:2]]
    results = shapes[one.name]
    if len(operands) < 2 or not results or not all(operands):
        return 0
    lhs, rhs, result = operands[0][0].dims, operands[1][0].dims, results[0].dims
    attributes = one.attributes
    if one.opcode == "convolution":
        return 2 * _multiplications(one, lhs, rhs, result)
    # The dimensions that a product sums over; for a library GEMM, they are in its configuration.
    gemm = _GEMM.search(attributes.get("backend_config", ""))
    text = attributes.get("lhs_contracting_dims", gemm[1] if gemm else None)
    axes = [int(axis) for axis in re.findall(r"\d{1,3}", text or "")]
    if (text is None and one.opcode == "custom-call") or any(axis >= len(lhs) for axis in axes):
        return 0
    return 2 * math.prod(result) * math.prod(lhs[axis] for axis in axes)


_GEMM = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def _multiplications(
    one: Instruction, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]
) -> int:
    """The multiplications of a convolution, except with zeros of padding or between elements."""
    labels = _LABELS.fullmatch(one.attributes.get("dim_labels", ""))
    if labels is None:
        return 0
    dims = zip(labels.groups(), (lhs, rhs, result), strict=True)
    inputs, kernel, outputs = (dict(zip(names, sizes, strict=False)) for names, sizes in dims)
    window = _window(one)
    count: int = kernel.get("i", 0) * outputs.get("b", 0) * outputs.get("f", 0)
    for axis in filter(str.isdigit, kernel):
        at = int(axis)
        stride, low, dilation, spacing = (
            window[key][at] if at < len(window.get(key, ())) else default
            for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        count *= _positions(
            inputs.get(axis, 0), kernel[axis], outputs.get(axis, 0), stride, low, dilation, spacing
        )
    return count


@functools.lru_cache(maxsize=1024)
def _positions(
    size: int, kernel: int, outputs: int, stride: int, low: int, dilation: int, spacing: int
) -> int:
    """The number of elements in all windows of a kernel in one dimension, without padding."""
    if kernel * outputs > _MAX_POSITIONS or not dilation:
        return kernel * outputs
    at = np.arange(outputs)[:, None] * stride + np.arange(kernel) * spacing - low
    return int(((at >= 0) & (at % dilation == 0) & (at // dilation < size)).sum())


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def _window(one: Instruction) -> dict[str, list[int]]:
    """The numbers of a window by name; for paddings, which are pairs, the lower one."""
    text = one.attributes.get("window", "")
    return {
        name: [int(number) for number in re.findall(r"(?:^|x)(-?\d{1,9})", numbers)]
        for name, numbers in re.findall(r"(\w+)=([-\dx_]+)", text)
    }


def _bytes(one: Instruction, shapes: Mapping[str, list[Shape]], module: Module) -> int:
    """The bytes that one operation reads and writes."""
    opcode = one.opcode
    if opcode in FREE or opcode.endswith(("-done", "-update")) or opcode == "async-start":
        return 0
    operands = [total_bytes(shapes.get(name, [])) for name in one.operand_names]
    result = total_bytes(shapes[one.name])
    opcode = base(opcode)
    if opcode in SLICES:
        return 2 * result
    if opcode == "dynamic-update-slice":
        return 2 * operands[1] if len(operands) > 1 else 0
    if opcode == "fusion":
        callee = module.by_name.get(one.attributes.get("calls", "").lstrip("%"))
        return 0 if callee is None else _fusion_bytes(callee, operands, result, module)
    return sum(operands) + result


def _fusion_bytes(callee: Computation, operands: list[int], result: int, module: Module) -> int:
    """The bytes of a fusion; for arrays that it slices, only the slices read or replaced."""
    shapes = shapes_of(callee, module)
    users: dict[str, list[Instruction]] = {}
    by_name = {one.name: one for one in callee.instructions}
    accessed = result
    for one in callee.instructions:
        for name in one.operand_names:
            users.setdefault(name, []).append(one)
        if one.is_root:
            results = one.operand_names if one.opcode == "tuple" else [one.name]
            updates = [by_name[name] for name in results if name in by_name]
            for update in updates:
                if update.opcode == "dynamic-update-slice" and len(update.operand_names) > 1:
                    slice_size = total_bytes(shapes.get(update.operand_names[1], []))
                    accessed -= max(total_bytes(shapes[update.name]) - slice_size, 0)
    for one in callee.instructions:
        if one.number is None:
            continue
        uses = users.get(one.name, [])
        size = operands[one.number] if one.number < len(operands) else 0
        if all(use.opcode in SLICES and use.operand_names[0] == one.name for use in uses):
            accessed += min(size, sum(total_bytes(shapes[use.name]) for use in uses))
        elif not all(_is_updated(one.name, use) for use in uses):
            accessed += size
    return max(accessed, 0)


def _is_updated(name: str, use: Instruction) -> bool:
    """Whether an instruction only replaces a slice of the array."""
    return use.opcode == "dynamic-update-slice" and use.operand_names.index(name) == 0
