"""The bytes that single instructions read and write; for TPUs, in main memory.

An instruction reads its operands and writes its results. Slices, gathers, scatters and updates in
place count only the bytes that they touch. Inside a fusion they count likewise, if no other
instruction in the fusion uses the operand (`_bytes_read`):

    %y = f32[2,8] dynamic-slice(f32[64,8] %x, …)               reads 64 B of %x, writes 64 B
    %z = f32[64,8] dynamic-update-slice(f32[64,8] %x, %y, …)   reads 64 B of %y, writes 64 B
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from .hlo import Module
from .instructions import Computation, Instruction, Operands, Shape, operands_of, total_bytes
from .opcodes import SLICES, base

_HOST = 5  # the number that XLA gives to the memory space of the host in layouts
# Custom calls by which the TPU compiler reads and writes complex and 64-bit numbers as two arrays
# of half the width.
HALVES = {"X64Combine", "X64SplitHigh", "X64SplitLow"}


def accessed_bytes(instruction: Instruction, operands: Operands, module: Module) -> int:
    """Counts the bytes that an operation reads and writes; for TPUs, in main memory.

    ``module`` is the program, ``operands`` are the shapes of what the instruction takes.
    """
    # The start of an asynchronous operation has counted the bytes.
    if instruction.opcode.endswith(("-done", "-update")):
        return 0
    opcode = base(instruction.opcode)
    sizes: Sequence[int | None] = [None] * len(operands)  # None: all of the operand is read
    if opcode in _READ_PARTS:
        sizes = _bytes_read(instruction, operands, module)
    read = sum(
        counted_bytes(arrays, module, at_most=size)
        # `strict=False` because damaged text may lack operands.
        for arrays, size in zip(operands, sizes, strict=False)
    )
    # A send returns the array that it was given, and a token, so it writes nothing.
    written = _bytes_written(instruction, operands, module) if opcode != "send" else []
    # If a call of cuBLAS or cuDNN has several results, the last one is its workspace, which is no
    # result of the operation.
    is_call = instruction.opcode == "custom-call"
    if is_call and instruction.target.startswith(("__cublas$", "__cudnn$")) and len(written) > 1:
        written = written[:-1]
    return read + sum(counted_bytes([shape], module, at_most=size) for shape, size in written)


def counted_bytes(shapes: Iterable[Shape], module: Module, at_most: int | None = None) -> int:
    """Sums the bytes of arrays; for TPUs, only of arrays in main memory.

    A sum larger than ``at_most`` counts as ``at_most``. In layouts, memory space 0 is the main
    memory of a TPU. Its vector memory and the host have other numbers.
    """
    size = sum([s.bytes for s in shapes if not (s.memory_space and module.is_for_tpu)])
    return size if at_most is None else min(size, at_most)


# Opcodes of operations that copy elements, and compute nothing.
COPIES = SLICES | {"copy", "dynamic-update-slice"}
_GPU_CALLBACK = re.compile(r"xla_\w*python_gpu_callback")
# Opcodes of operations that may read only a part of an operand.
_READ_PARTS = SLICES | {"dynamic-update-slice", "fusion", "scatter", "custom-call"}


def _bytes_read(
    instruction: Instruction, operands: Operands, module: Module
) -> Sequence[int | None]:
    """Counts the bytes that an operation reads of each operand.

    A fusion reads as much of an operand as the slices and updates in the fusion read, if no other
    instruction in the fusion uses the operand.

    Args:
      operands: the shapes of what it takes.

    Returns:
      For each operand the bytes; None if all of the operand is read.
    """
    opcode = base(instruction.opcode)
    count = len(operands)
    if opcode in SLICES:
        # The operands are an array and indices. The indices are too small to count.
        sizes = [total_bytes(instruction.results), *[0] * (count - 1)]
        return sizes[:count]  # Damaged text may have no operands.
    if opcode == "dynamic-update-slice":
        # The operands are an array, its update, and indices. Only the update is read.
        return [0, None, *[0] * (count - 2)][:count]
    if opcode == "scatter":
        # The operands are n arrays, which are updated in place, indices, and n updates. Indices and
        # updates are read as a whole.
        read_of_arrays = _bytes_read_by_scatter(instruction, operands, module)
        return [*read_of_arrays, *[None] * (count // 2 + 1)]
    if instruction.target in HALVES:
        # X64SplitLow, for example, returns half of the bytes of its operand, and reads only these.
        return [total_bytes(instruction.results)] * count
    callee = module.fused(instruction)
    return [None] * count if callee is None else _bytes_read_by_fusion(callee, count, module)


def _bytes_read_by_fusion(callee: Computation, count: int, module: Module) -> list[int | None]:
    """Counts the bytes that a fusion reads of each operand.

    Returns:
      For each operand the bytes; None if all of the operand is read.
    """
    read = Counter[int]()  # the bytes read, by the number of the operand
    read_as_whole = set[int]()  # the numbers of the operands that are read as a whole
    # Name of an instruction that returns an operand, perhaps in another shape → the operand's
    # number.
    views: dict[str, int] = {}
    for user in callee.instructions:
        if user.opcode == "parameter" and user.number is not None:
            views[user.name] = user.number
            continue
        # Position among the operands of ``user`` → number of the operand of the fusion.
        used = {i: views[name] for i, name in enumerate(user.operand_names) if name in views}
        if not used:
            continue
        is_view = user.opcode in ("bitcast", "fusion") and _is_view(user, module)
        if is_view and not user.is_root:
            views[user.name] = next(iter(used.values()))  # A view has one operand.
        elif is_view or base(user.opcode) not in _READ_PARTS:
            # A view that is the root returns all of the operand; other operations use all of it.
            read_as_whole.update(used.values())
        else:  # The user is a slice or an update, for example.
            sizes = _bytes_read(user, operands_of(user, module.within[callee.name]), module)
            for i, operand in used.items():
                size = sizes[i]
                if size is None:
                    read_as_whole.add(operand)
                else:
                    read[operand] += size
    return [None if operand in read_as_whole else read[operand] for operand in range(count)]


def _bytes_read_by_scatter(
    scatter: Instruction, operands: Operands, module: Module
) -> Sequence[int | None]:
    """Counts the bytes that a scatter reads of each array: as many as it writes, if it adds.

    The *combiner* is the computation that a scatter applies to elements. The parameters 0 to n - 1
    of the combiner are an element of each array, and n to 2n - 1 are an element of each update. A
    combiner that only assigns does not use the elements of arrays, so the scatter does not read
    them.
    """
    update_bytes = _update_bytes_of_scatter(operands)
    combiner = next(map(module.by_name.get, scatter.callees), None)
    if combiner is None:
        return update_bytes
    # Only parameters have a number.
    numbers = {x.name: x.number for x in combiner.instructions if x.number is not None}
    used = set[int]()  # the numbers of the parameters that the combiner uses
    for instruction in combiner.instructions:
        used.update(numbers[name] for name in instruction.operand_names if name in numbers)
    root = module.roots.get(combiner.name)
    # A root with a number is a parameter, which the combiner returns unchanged.
    if root is not None and root.number is not None:
        used.add(root.number)
    return [size if number in used else 0 for number, size in enumerate(update_bytes)]


def _update_bytes_of_scatter(operands: Operands) -> list[int | None]:
    """Counts the bytes of the update of each array of a scatter.

    The operands are n arrays, indices, and n updates.
    """
    return [total_bytes(arrays) for arrays in operands[len(operands) // 2 + 1 :]]


def _is_view(instruction: Instruction, module: Module) -> bool:
    """Tells whether an operation only gives the bytes of its operand another shape."""
    callee = module.fused(instruction)
    codes = {inner.opcode for inner in callee.instructions} if callee else {instruction.opcode}
    return codes <= {"parameter", "bitcast"}


def _bytes_written(
    instruction: Instruction, operands: Operands, module: Module
) -> list[tuple[Shape, int | None]]:
    """Returns the arrays that an operation makes, each with the bytes that are written of it.

    The bytes are None if all of the array is written. Only updates in place and scatters, alone or
    within a fusion, write a part.
    """
    fused = module.fused(instruction)
    sizes: list[int | None] = []  # the bytes written of each result
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
        sizes = [total_bytes(operands[1])]
    elif instruction.opcode == "scatter":
        sizes = _update_bytes_of_scatter(operands)
    elif fused is not None:
        sizes = _bytes_written_by_fusion(fused, module)
    # Without sizes, all results are written as a whole. `strict=False` because damaged text may
    # lack some of the instructions that make results.
    return list(zip(instruction.results, sizes or itertools.repeat(None), strict=False))


def _bytes_written_by_fusion(fused: Computation, module: Module) -> list[int | None]:
    """Counts the bytes that a fusion writes of each result; None if all of a result is written.

    Each result is made by an instruction in the fusion, and the fusion writes of it what that
    instruction writes. An update in place writes one array. A scatter writes several, which are
    results one after another.
    """
    inner = module.within[fused.name]  # the instructions in the fusion, by name
    root = module.roots.get(fused.name)
    if root is None:  # Only damaged text lacks the root.
        return []
    names_of_makers = root.operand_names if root.opcode == "tuple" else (root.name,)
    sizes: list[int | None] = []
    for name in names_of_makers:
        maker = inner.get(name)
        while maker is not None and maker.opcode == "bitcast":  # A bitcast writes nothing itself.
            maker = inner.get(maker.operand_names[0])
        if maker is None:  # Damaged text lacks the instruction.
            sizes.append(None)
        else:
            # Pairs of an array that the instruction makes, and the bytes that it writes of it.
            written = _bytes_written(maker, operands_of(maker, inner), module)
            # An instruction that makes no array still stands for one result.
            sizes += [size for _, size in written] or [None]
    return sizes


def host_bytes(instruction: Instruction, operands: Operands) -> int:
    """Counts the bytes that an operation moves between device and host.

    Such operations are copies, slices and updates in place between the two memories; transfers
    (``send``, ``recv``, ``infeed``, ``outfeed``); and callbacks to Python from a GPU. Each may be
    asynchronous: a ``copy-start``, with a ``copy-done`` later. Other operations move 0 bytes.
    """
    # The start of an asynchronous operation counts the bytes.
    if instruction.opcode.endswith(("-done", "-update")):
        return 0
    # A program with sends between devices is not understood, so a send here goes to the host.
    if instruction.opcode in ("send", "recv", "infeed"):
        return total_bytes(instruction.results)
    if _GPU_CALLBACK.match(instruction.target) or instruction.opcode == "outfeed":
        shapes = [*instruction.results, *itertools.chain.from_iterable(operands)]
        return total_bytes(shapes)
    if base(instruction.opcode) not in COPIES or not operands:
        return 0
    if base(instruction.opcode) == "dynamic-update-slice" and len(operands) > 1:
        # The operands are an array, and what is written to a part of it.
        target, source = operands[0], operands[1]
        moved = total_bytes(source)
    else:  # A slice moves only what it returns.
        source, target = operands[0], instruction.results
        moved = total_bytes(target)
    return moved if _is_on_host(source) != _is_on_host(target) else 0


def _is_on_host(shapes: Sequence[Shape]) -> bool:
    """Tells whether the host's memory has one of these arrays."""
    return any(shape.memory_space == _HOST for shape in shapes)
