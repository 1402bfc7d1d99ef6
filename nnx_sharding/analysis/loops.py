"""What loops add to the estimates of XLA, which counts the body of each once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from .cost import Cost
from .hlo import Computation, Instruction, Module
from .shapes import Shape, arrays

WITH_LOOPS = "after optimisation, one device, loops multiplied out"

# Operations that move no data: names for it, and calls of computations, which count themselves.
_FREE = {
    "parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "while",
    "conditional", "call", "after-all", "add-dependency", "opt-barrier", "partition-id",
    "replica-id",
}  # fmt: skip
_SLICES = {"slice", "dynamic-slice", "gather"}


def with_loops(cost: Cost, module: Module) -> Cost:
    """XLA's estimate for a program with the body of each loop counted as often as it runs.

    Added are the flops of matrix products and convolutions, and the bytes of all operations. A
    slice of an array counts for itself, not for the array. Loops of unknown length count once.
    """
    flops = accessed = 0
    for computation in module.computations:
        runs = module.runs[computation.name]
        if runs.in_loop and runs.times is not None and runs.times > 1:
            shapes, more = _shapes(computation), runs.times - 1
            flops += more * sum(_flops(one, shapes) for one in computation.instructions)
            if not runs.is_fused:
                sizes = (_bytes(one, shapes, module) for one in computation.instructions)
                accessed += more * sum(sizes)
    return dataclasses.replace(
        cost,
        flops=_plus(cost.flops, flops),
        bytes_accessed=_plus(cost.bytes_accessed, accessed),
        stage=WITH_LOOPS,
    )


def _plus(figure: float | None, more: int) -> float | None:
    return None if figure is None else figure + min(more, 1 << 100)  # larger ones may overflow


def _shapes(computation: Computation) -> dict[str, list[Shape]]:
    """The arrays that each instruction makes."""
    return {one.name: list(arrays(one.shape)) for one in computation.instructions}


def _size(shapes: list[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)


def _flops(instruction: Instruction, shapes: Mapping[str, list[Shape]]) -> int:
    """2·m·k·n for a matrix product, the like for a convolution, 0 for all else."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    operands = [shapes.get(name, []) for name in instruction.operand_names[:2]]
    results = shapes[instruction.name]
    if len(operands) < 2 or not results or not all(operands):
        return 0
    lhs, rhs, outputs = operands[0][0].dims, operands[1][0].dims, math.prod(results[0].dims)
    attributes = instruction.attributes
    if instruction.opcode == "convolution":
        kernel = re.search(r"_(\w+)->", attributes.get("dim_labels", ""))
        features = kernel[1].find("o") if kernel else -1
        if not 0 <= features < len(rhs) or not rhs[features]:
            return 0
        return 2 * outputs * math.prod(rhs) // rhs[features]
    # The dimensions that a product sums over; of a GEMM of a library in its configuration.
    gemm = _GEMM.search(attributes.get("backend_config", ""))
    text = attributes.get("lhs_contracting_dims", gemm and gemm[1])
    axes = [int(axis) for axis in re.findall(r"\d{1,3}", text or "")]
    if text is None or any(axis >= len(lhs) for axis in axes):
        return 0
    return 2 * outputs * math.prod(lhs[axis] for axis in axes)


_GEMM = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def _bytes(instruction: Instruction, shapes: Mapping[str, list[Shape]], module: Module) -> int:
    """The bytes that one operation reads and writes."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    operands = [_size(shapes.get(name, [])) for name in instruction.operand_names]
    result = _size(shapes[instruction.name])
    if opcode in _SLICES:
        return 2 * result
    if opcode == "dynamic-update-slice":
        return 2 * operands[1] if len(operands) > 1 else 0
    callee = module.by_name.get(instruction.attributes.get("calls", "").lstrip("%"))
    if opcode == "fusion" and callee is not None:
        return _fusion_bytes(callee, operands, result)
    return sum(operands) + result


def _fusion_bytes(callee: Computation, operands: list[int], result: int) -> int:
    """The bytes of a fusion; of arrays that it slices, only the slices read or replaced."""
    shapes = _shapes(callee)
    users: dict[str, list[Instruction]] = {}
    for one in callee.instructions:
        for name in one.operand_names:
            users.setdefault(name, []).append(one)
    written, read = result, 0
    for one in callee.instructions:
        if one.opcode == "dynamic-update-slice" and one.is_root and len(one.operand_names) > 1:
            written = _size(shapes.get(one.operand_names[1], []))
        if one.opcode != "parameter" or not one.operands or not one.operands[0].isdecimal():
            continue
        number, uses = int(one.operands[0]), users.get(one.name, [])
        if all(use.opcode in _SLICES and use.operand_names[0] == one.name for use in uses):
            read += sum(_size(shapes[use.name]) for use in uses)
        elif not all(_is_updated(one.name, use) for use in uses):
            read += operands[number] if number < len(operands) else 0
    return written + read


def _is_updated(name: str, use: Instruction) -> bool:
    """Whether an instruction only replaces a slice of the array."""
    return use.opcode == "dynamic-update-slice" and use.operand_names.index(name) == 0
