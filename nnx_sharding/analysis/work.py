"""What single instructions compute, read and write, counted as XLA does."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
    int8_flops: int = 0
    fp8_flops: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """This plus ``times`` times the other."""
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))


def shapes_of(computation: Computation) -> dict[str, list[Shape]]:
    """The arrays that each instruction makes."""
    return {one.name: one.results for one in computation.instructions}


def executed_work(module: Module) -> dict[str, list[tuple[Instruction, Work]]]:
    """The instructions of each computation that runs, with their work in one run.

    Of the branches of a conditional, only that which does most is taken to run. What is applied to
    elements, and the bytes of what is fused, are part of the work of their callers.
    """
    found: dict[str, list[tuple[Instruction, Work]]] = {}
    inside: dict[str, Work] = {}  # what an application of a computation takes
    for name in module.callees_first or ():
        if name not in module.by_name:
            continue
        computation, runs = module.by_name[name], module.runs[name]
        shapes, found[name] = shapes_of(computation), []
        for one in computation.instructions:
            own = work_of(one, shapes, None if runs.is_fused else module)
            count = applications(one, shapes)
            for _, callee in one.calls() if count else ():
                own = own.plus(inside.get(callee, Work()), count)
            found[name].append((one, own))
        if runs.is_applied:
            for _, own in found.pop(name):
                inside[name] = inside.get(name, Work()).plus(own)
    weights = {name: sum(sum(own) for _, own in parts) for name, parts in found.items()}
    taken = module.taken(weights)
    return {name: parts for name, parts in found.items() if name in taken}


def work_of(one: Instruction, shapes: Mapping[str, list[Shape]], module: Module | None) -> Work:
    """The work of an instruction itself, without the computations that it calls.

    Without the module, bytes are not counted.
    """
    if one.opcode in _NO_WORK:
        return Work()
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
    flops = _product_flops(one, shapes)
    inputs = {shapes[name][0].dtype for name in one.operand_names[:2]} if flops else set()
    int8, fp8 = (bool(inputs) and all(map(kind.match, inputs)) for kind in (_INT8, _FP8))
    return Work(flops, 0, accessed, flops * int8, flops * fp8)


_NO_WORK = FREE | {"async-start"}
_INT8, _FP8 = re.compile("[su][248]$"), re.compile("f[468]e")


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
    """The bytes that one operation reads and writes; for TPUs, those of the main memory."""
    if one.opcode in {*FREE, "async-start"} or one.opcode.endswith(("-done", "-update")):
        return 0
    total = 0
    for index, name in enumerate(one.operand_names):
        size = _counted(shapes.get(name, []), module)
        total += size and _least(size, _read(one, index, shapes, module))
    written = _written(one, shapes, module) if base(one.opcode) != "send" else {}
    return total + sum(_least(_counted([shape], module), part) for shape, part in written)


def _counted(shapes: Iterable[Shape], module: Module) -> int:
    return sum(shape.bytes for shape in shapes if not (module.is_for_tpu and shape.memory_space))


def _least(size: int, part: int | None) -> int:
    return size if part is None else min(size, part)


def _read(
    one: Instruction, index: int, shapes: Mapping[str, list[Shape]], module: Module
) -> int | None:
    """The bytes that an operation reads of an operand; None for all of it."""
    opcode = base(one.opcode)
    if opcode in SLICES:
        return 0 if index else total_bytes(shapes[one.name])
    if opcode == "dynamic-update-slice":
        return None if index == 1 else 0
    callee = module.fused(one)
    if callee is None:
        return None
    own, total = shapes_of(callee), 0
    views = {user.name for user in callee.instructions if user.number == index}
    for user in callee.instructions:
        for place, name in enumerate(user.operand_names):
            if name not in views:
                continue
            if user.is_root and _is_view(user, module):
                return None
            if _is_view(user, module):
                views.add(user.name)
            elif (part := _read(user, place, own, module)) is None:
                return None
            else:
                total += part
    return total


def _is_view(one: Instruction, module: Module) -> bool:
    """Whether it gives the bytes of its operand another shape."""
    callee = module.fused(one)
    return one.opcode == "bitcast" or (
        callee is not None
        and all(inner.opcode in ("parameter", "bitcast") for inner in callee.instructions)
    )


def _written(
    one: Instruction, shapes: Mapping[str, list[Shape]], module: Module
) -> list[tuple[Shape, int | None]]:
    """The arrays that an operation makes, each with the bytes that it writes; None for all."""
    results, names = shapes[one.name], one.operand_names
    parts: list[int | None] = []
    if one.opcode == "dynamic-update-slice" and len(names) > 1:
        parts = [total_bytes(shapes.get(names[1], []))]
    elif callee := module.fused(one):
        own, by_name = shapes_of(callee), {inner.name: inner for inner in callee.instructions}
        for root in (inner for inner in callee.instructions if inner.is_root):
            for name in root.operand_names if root.opcode == "tuple" else [root.name]:
                made = by_name.get(name)
                while made is not None and made.opcode == "bitcast":
                    made = by_name.get(made.operand_names[0])
                some = [] if made is None else _written(made, own, module)
                parts += [part for _, part in some] or [None]
    return list(zip(results, parts or [None] * len(results), strict=False))
