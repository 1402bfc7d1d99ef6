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


def with_loops(cost: Cost, module: Module) -> Cost:
    """The cost with the body of each loop counted as often as it runs.

    Added are the flops of matrix products and convolutions, and the bytes of all operations. A
    slice of an array counts for itself, not for the array. Loops of unknown length count once.

    Args:
      cost: the estimate of XLA.
      module: the compiled program.

    Example:
      >>> import jax
      >>> from nnx_sharding import jit
      >>> def layers(kernels, x):
      ...     return jax.lax.scan(lambda x, kernel: (x @ kernel, None), x, kernels)[0]
      >>> kernels = jax.ShapeDtypeStruct((10, 64, 64), "float32")
      >>> x = jax.ShapeDtypeStruct((32, 64), "float32")
      >>> compiled = jit(layers).lower(kernels, x).compile()
      >>> compiled.cost(loops=True).flops - compiled.cost().flops == 9 * (2 * 32 * 64 * 64)
      True
    """
    flops = accessed = 0
    for computation in module.computations:
        runs = module.runs[computation.name]
        if runs.in_loop and runs.times is not None and runs.times > 1:
            shapes = _shapes(computation)
            more = runs.times - 1
            flops += more * sum(_flops(one, shapes) for one in computation.instructions)
            if not runs.is_fused:
                accessed += more * sum(
                    _bytes(one, shapes, module) for one in computation.instructions
                )
    return dataclasses.replace(
        cost,
        flops=_plus(cost.flops, flops),
        bytes_accessed=_plus(cost.bytes_accessed, accessed),
        stage=WITH_LOOPS,
    )


def _plus(known: float | None, more: int) -> float | None:
    return None if known is None else known + min(more, 1 << 100)  # more is no float


def _shapes(computation: Computation) -> dict[str, list[Shape]]:
    """The arrays that each instruction makes."""
    return {one.name: list(arrays(one.shape)) for one in computation.instructions}


def _flops(instruction: Instruction, shapes: Mapping[str, list[Shape]]) -> int:
    """2·m·k·n for a matrix product, the like for a convolution, 0 for all else."""
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    attributes = instruction.attributes
    operands = [shapes.get(name, []) for name in instruction.operand_names[:2]]
    results = shapes[instruction.name]
    if len(operands) < 2 or not results or not all(operands):
        return 0
    [lhs], [rhs] = operands[0][:1], operands[1][:1]
    outputs = math.prod(results[0].dims)
    if instruction.opcode == "convolution":
        kernel = re.search(r"_(\w+)->", attributes.get("dim_labels", ""))
        place = kernel.group(1).find("o") if kernel else -1
        if not 0 <= place < len(rhs.dims) or not rhs.dims[place]:
            return 0
        return 2 * outputs * math.prod(rhs.dims) // rhs.dims[place]
    contracted = _contracted(attributes)
    if contracted is None or any(axis >= len(lhs.dims) for axis in contracted):
        return 0
    return 2 * outputs * math.prod(lhs.dims[axis] for axis in contracted)


def _contracted(attributes: Mapping[str, str]) -> list[int] | None:
    """The dimensions of the first operand that a product sums over; of a GEMM of a library, too."""
    text = attributes.get("lhs_contracting_dims")
    if text is None:
        found = _GEMM.search(attributes.get("backend_config", ""))
        text = found.group(1) if found else None
    return None if text is None else [int(axis) for axis in re.findall(r"\d{1,3}", text)]


_GEMM = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')

# What moves no data: names for it, and what runs other computations, which count themselves.
_FREE = frozenset(
    (
        "parameter",
        "constant",
        "iota",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "partition-id",
        "replica-id",
    )
)
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))


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
    """The bytes of a fusion: of arrays that it cuts, only the parts that it takes or replaces."""
    shapes = _shapes(callee)
    users: dict[str, list[Instruction]] = {}
    for one in callee.instructions:
        for name in one.operand_names:
            users.setdefault(name, []).append(one)
    total = result
    for one in callee.instructions:
        if one.opcode == "dynamic-update-slice" and one.is_root and len(one.operand_names) > 1:
            total = _size(shapes.get(one.operand_names[1], []))
        if one.opcode != "parameter" or not one.operands or not one.operands[0].isdecimal():
            continue
        number, own = int(one.operands[0]), users.get(one.name, [])
        if all(user.opcode in _SLICES and user.operand_names[0] == one.name for user in own):
            total += sum(_size(shapes[user.name]) for user in own)
        elif not all(_replaces(user, one.name) for user in own):
            total += operands[number] if number < len(operands) else 0
    return total


def _replaces(user: Instruction, name: str) -> bool:
    """Whether an array is only that in which a part is replaced."""
    return user.opcode == "dynamic-update-slice" and user.operand_names.index(name) == 0


def _size(shapes: list[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)
