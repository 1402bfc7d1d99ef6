"""What a program copies between device and host memory."""

from __future__ import annotations

from .hlo import Computation, Module
from .opcodes import SLICES, base
from .shapes import Shape

# The memory space of the host in layouts, as XLA numbers it.
HOST = 5


def host_bytes(module: Module) -> int:
    """The bytes copied in one call, in either direction; loops of unknown length count once."""
    return sum(
        _copied(computation) * (module.runs[computation.name].times or 1)
        for computation in module.computations
        if any(f"S({HOST})" in one.shape_text for one in computation.instructions)
    )


def _copied(computation: Computation) -> int:
    shapes = {one.name: one.results for one in computation.instructions}
    total = 0
    for one in computation.instructions:
        kind, operands = base(one.opcode), [shapes.get(name, []) for name in one.operand_names]
        if one.opcode.endswith(("-done", "-update")) or not operands:
            continue
        if kind == "dynamic-update-slice" and len(operands) > 1:
            written, read, *_ = operands
            size = _bytes(read)
        elif kind == "copy" or kind in SLICES:
            read, written = operands[0], shapes[one.name]
            size = _bytes(written)
        else:
            continue
        total += size if _is_on_host(read) != _is_on_host(written) else 0
    return total


def _bytes(shapes: list[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)


def _is_on_host(shapes: list[Shape]) -> bool:
    return any(shape.memory_space == HOST for shape in shapes)
