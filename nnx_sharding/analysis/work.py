"""What a program computes, reads and writes, in all runs of loops.

A program (`Module`) consists of computations, lists of instructions that call each other. Each has
the *shapes* of its results. A flop is an addition, multiplication or other operation on a pair of
real numbers, so that figures compare with peak rates, of which a multiply-add is two (`work_of`):

    elementwise   1 for each element, as XLA counts; of complex ones `_COMPLEX` (6 to multiply)
    product       2·m·k·n (`product_flops`); complex 8·m·k·n
    window        those on elements, without padding (`elements_in_windows`)
    fft           5·n·log2(n) for n complex points, half of that for real ones
    sort          a comparison counts 1; n·log2(n) of them for each row of n

Bytes are those of operands and results, of which slices, gathers, and updates and scatters in place
count what they touch (`_bytes`). The work of a computation counts as often as it runs
(`Module.runs`), where XLA counts a loop once; of a conditional the branch with the most work.
Kernels count with their authors' estimates. Work that is unknown, of other custom calls and in
loops of unknown length, is counted too (`Work.unknown_flops`, `Work.unknown_runs`): sums that
contain it become None (`Work.cost`).

From other modules:

    Module        the HLO program. ``maker`` is the instruction that makes a value, ``passed`` the
                  values that a value is handed on from, ``around`` the calls around a computation,
                  ``runs`` how often each runs
    Instruction   one instruction: ``opcode``, ``results`` (the shapes of the arrays that it makes),
                  ``callees`` (the names of the computations that it runs), ``target`` (what a
                  custom call calls), ``attributes`` (texts by name)
    Shape         of one array: dtype and dims
    Operands      the shapes of the arrays of each operand; mostly one array each
    base          an opcode without ``-start`` and ``-done``
    total_bytes   the bytes of several arrays, without padding
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .cost import COMPILED, Cost, Operation
from .hlo import Module
from .instructions import Computation, Instruction, Shape, total_bytes
from .opcodes import ELEMENTWISE, FREE, PRODUCTS, REARRANGING, SLICES, TRANSCENDENTAL, base
from .values import Value

WITH_LOOPS = "after optimisation, one device, loops multiplied out"
BRANCHES = "of conditionals the largest branch"
UNKNOWN_LENGTH = "loops of unknown length"
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
    unknown_flops: int = 0  # runs of operations whose flops are not known
    unknown_runs: int = 0  # operations that run an unknown number of times, here counted once

    def plus(self, other: Work, times: int = 1) -> Work:
        """Returns this plus ``times`` times the other."""
        return Work(*[a + times * b for a, b in zip(self, other, strict=True)])

    def cost(self, stage: str = COMPILED) -> Cost:
        """Returns the figures as floats; None for those that operations of unknown work add to.

        If some run an unknown number of times, no figure is known. ``stage`` says where the figures
        come from.
        """
        names = (*_OF_FLOPS, "bytes_accessed", "host_bytes")
        figures: dict[str, Any] = {name: float(min(getattr(self, name), _MOST)) for name in names}
        if self.unknown_runs:
            figures = dict.fromkeys(names)
        elif self.unknown_flops:
            figures |= dict.fromkeys(_OF_FLOPS)
        return Cost(stage=stage, **figures)


# The figures that are unknown if the flops of an operation are.
_OF_FLOPS = ("flops", "transcendentals", "int8_flops", "fp8_flops")


def with_loops(cost: Cost, module: Module) -> Cost | None:
    """Replaces XLA's estimates by figures that count loops; None if something was not read.

    ``cost`` has XLA's estimates of the program ``module``.
    """
    if module.unread:
        return None
    executed = executed_work(module)
    total = Work()
    for name, parts in executed.items():
        total = total.plus(_sum(work for _, work in parts), times=module.runs[name].least)
    remarks = {MAIN_MEMORY: module.is_for_tpu, BRANCHES: bool(module.with_opcode("conditional"))}
    stage = [WITH_LOOPS, *(remark for remark, holds in remarks.items() if holds)]
    is_known = not total.unknown_flops and not total.unknown_runs
    return dataclasses.replace(
        total.cost(", ".join(stage)),
        optimal_seconds=cost.optimal_seconds,
        operations=_operations(module, executed) if is_known else (),
        why="; ".join(why_unknown(module, executed)) or None,
    )


# Name of a computation → its instructions that do work, each with that of one run.
ExecutedWork: TypeAlias = Mapping[str, list[tuple["Instruction", Work]]]


def why_unknown(module: Module, executed: ExecutedWork) -> list[str]:
    """Returns texts that name the loops and the custom calls because of which figures are unknown.

    Such as ``loops of unknown length: jit(f)/while``. ``executed`` is from :func:`executed_work`.
    """
    reasons: defaultdict[str, dict[str, None]] = defaultdict(dict)  # unique names, in order
    for name, parts in executed.items():
        for instruction, work in parts:
            if work.unknown_runs:
                reasons[UNKNOWN_LENGTH] |= {
                    caller.operation or caller.name: None
                    for _, caller in module.around(name)
                    if caller.opcode == "while" and caller.name not in module.trip_counts
                }
            if work.unknown_flops:
                reasons[CUSTOM_CALLS][instruction.target or instruction.opcode] = None
    return [f"{reason}: {', '.join([*names][:3])}" for reason, names in reasons.items()]


def _operations(module: Module, executed: ExecutedWork) -> tuple[Operation, ...]:
    """Returns what the device does one after the other, without what it copies or sends meanwhile.

    Operations whose ratios of flops to bytes differ by less than a fifth are added up: their sum
    takes about as long as they do, and reports of large programs stay small.
    """
    work_of_run: dict[str, Work] = {}  # by computation, with what it fuses
    # By the ratio in quarters of a power of two, and whether there are 8-bit integers or floats,
    # which have rates of their own.
    sums: dict[tuple[int, bool, bool], Work] = {}
    for name in module.callees_first or ():
        own = {instruction.name: work for instruction, work in executed.get(name, ())}
        runs = module.runs[name]
        total = Work()
        for instruction in module.by_name[name].instructions if name in executed else ():
            callees = instruction.callees if module.fused(instruction) else ()
            inside = [work_of_run[callee] for callee in callees]
            work = _sum([own.get(instruction.name, Work()), *inside])
            total = total.plus(work)
            is_beside = instruction.collective or instruction.opcode.endswith(("-start", "-done"))
            if runs.is_fused or is_beside or not work.flops + work.bytes_accessed:
                continue
            ratio = math.log2(work.flops + 1) - math.log2(work.bytes_accessed + 1)
            key = round(4 * ratio), work.int8_flops > 0, work.fp8_flops > 0  # 2 ** (1 / 4) is 1.19
            sums[key] = sums.get(key, Work()).plus(work, times=runs.least)
        work_of_run[name] = total
    figures = [field.name for field in dataclasses.fields(Operation)]  # ``Work`` has them, too
    return tuple(
        Operation(**{figure: float(min(getattr(work, figure), _MOST)) for figure in figures})
        for work in sums.values()
    )


def executed_work(module: Module) -> ExecutedWork:
    """Returns the instructions that do work in each computation that runs, with that of one run.

    What is applied to elements, such as the addition of a ``reduce``, and the bytes of what is
    fused, are the work of their callers.
    """
    executed: dict[str, list[tuple[Instruction, Work]]] = {}
    inside: dict[str, Work] = {}  # what one application of a computation to an element takes
    for name in module.callees_first or ():  # so that what a caller applies is known
        if name not in module.by_name:
            continue
        by_name = module.within[name]
        runs = module.runs[name]
        parts = []
        for instruction in module.by_name[name].instructions:
            if instruction.opcode in _NO_WORK:
                continue
            operands = operands_of(instruction, by_name)
            work = work_of(instruction, operands, None if runs.is_fused else module)
            if work.flops and not module.is_for_tpu and instruction.opcode in PRODUCTS:
                dtypes = [
                    _dtype_before_conversion(instruction, factor, home=name, module=module)
                    for factor in (0, 1)
                ]
                work = _with_narrow_flops(work, dtypes)
            for callee, count in applications(instruction, operands):
                work = work.plus(inside.get(callee, Work()), times=count)
            if any(work):
                is_known = runs.is_applied or runs.times is not None
                parts.append((instruction, work if is_known else work._replace(unknown_runs=1)))
        if runs.is_applied:
            inside[name] = _sum(work for _, work in parts)
        else:
            executed[name] = parts
    # Of conditionals only the largest branch counts, which any measure of work finds.
    weights = {name: sum(sum(work) for _, work in parts) for name, parts in executed.items()}
    taken = module.taken(weights)
    return {name: parts for name, parts in executed.items() if name in taken}


def _sum(parts: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(Work(), *parts, strict=True)))


# The arrays of each operand of an instruction; mostly one.
Operands: TypeAlias = Sequence[Sequence[Shape]]


def operands_of(instruction: Instruction, by_name: Mapping[str, Instruction]) -> Operands:
    """Returns the arrays of each operand; no array for one that damaged text lacks.

    ``by_name`` are the instructions of the same computation.
    """
    makers = map(by_name.get, instruction.operand_names)
    return [() if maker is None else maker.results for maker in makers]


def work_of(instruction: Instruction, operands: Operands, module: Module | None) -> Work:
    """Counts the work of one instruction, without that of the computations that it calls.

    ``module`` is the program; None for an instruction in a fusion, whose bytes do not count.
    """
    opcode = instruction.opcode
    if opcode in _NO_WORK or instruction.target in _WITHOUT_WORK:
        return Work()
    if opcode == "custom-call" and (estimate := custom_work(instruction)) is not None:
        return _work_of_kernel(instruction, operands, module=module, estimate=estimate)
    accessed = 0 if module is None else _bytes(instruction, operands, module)
    if base(opcode) in _COPIES or instruction.target in _HALVES:
        return Work(bytes_accessed=accessed, host_bytes=_host_bytes(instruction, operands))
    if opcode in TRANSCENDENTAL or opcode in ("rng", "rng-bit-generator"):  # as XLA counts
        return Work(transcendentals=_elements(instruction.results), bytes_accessed=accessed)
    flops = product_flops(instruction, operands)
    if flops is None:  # no product
        flops = _other_flops(instruction, operands)
        is_unknown = flops is None
        return Work(flops=flops or 0, bytes_accessed=accessed, unknown_flops=int(is_unknown))
    factors = [arrays[0].dtype for arrays in operands[:2]]
    return _with_narrow_flops(Work(flops=flops, bytes_accessed=accessed), factors)


def _with_narrow_flops(work: Work, dtypes: Collection[str]) -> Work:
    """Returns the work of a product with its flops counted as 8-bit ones, too, if they are.

    They are if all factors, of these dtypes, are integers of 8 bits or less, or all are floats of
    8 bits or less.
    """
    is_int8 = all(_INT8.match(dtype) for dtype in dtypes)
    is_fp8 = all(_FP8.match(dtype) for dtype in dtypes)
    return work._replace(
        int8_flops=work.flops if is_int8 else 0, fp8_flops=work.flops if is_fp8 else 0
    )


def _dtype_before_conversion(
    product: Instruction, factor: int, *, home: str, module: Module
) -> str:
    """Finds the type that a factor of a product has before the compiler converts it.

    CPUs multiply no numbers of 8 bits: their compiler converts both factors first. It names the
    conversion after the product, by which it is told from one that the user wrote.

    Args:
      product: the product.
      factor: which of its operands, 0 or 1.
      home: the computation that the product is in.
      module: the program.

    Returns:
      The type; empty for one that damaged text lacks.
    """
    value = Value(home, product.operand_names[factor])
    dtype = ""
    for _ in range(_MAX_STEPS):  # back from the factor to what it is converted from
        maker = module.maker(value)
        if maker is None:
            break
        if maker.opcode == "convert" and maker.operation == product.operation:
            dtype = ""  # the type of its operand counts, which the next step finds
            sources = module.operands(value)[:1]
        else:
            dtype = dtype or maker.results[0].dtype
            is_moved = maker.opcode in REARRANGING
            sources = module.operands(value)[:1] if is_moved else module.passed(value)
        if len(sources) != 1:  # it is computed here, or carried by a loop
            break
        value = sources[0]
    return dtype


def _work_of_kernel(
    kernel: Instruction, operands: Operands, *, module: Module | None, estimate: Work
) -> Work:
    """Corrects what the author of a kernel estimates, who takes all arrays to be in main memory.

    The compiler may have copied some into the vector memory, and their bytes do not count. Of the
    compiler's own kernel for ``ragged_dot`` the type of the factors is known, its last operands.
    """
    if module is not None:
        shapes = [*kernel.results, *itertools.chain.from_iterable(operands)]
        in_vector_memory = total_bytes(shapes) - _counted_bytes(shapes, module)
        accessed = max(estimate.bytes_accessed - in_vector_memory, 0)
        estimate = estimate._replace(bytes_accessed=accessed)
    if "ragged_dot_tiling" in kernel.rest:
        factors = [arrays[0].dtype for arrays in operands[-2:]]
        estimate = _with_narrow_flops(estimate, factors)
    return estimate


def _other_flops(instruction: Instruction, operands: Operands) -> int | None:
    """Counts the flops of an instruction that is not a product; None if unknown.

    Those of a computation that it applies to elements are not counted here (`applications`).
    """
    opcode, results = instruction.opcode, instruction.results
    elements = _elements(results)
    if opcode in ELEMENTWISE:
        firsts = (arrays[:1] for arrays in operands)
        is_complex = any(_is_complex(shape) for shapes in (results, *firsts) for shape in shapes)
        return elements * (_COMPLEX.get(opcode, 1) if is_complex else 1)
    if opcode in ("all-reduce", "all-reduce-start"):  # an addition for each element
        return sum(math.prod(x.dims) * (2 if _is_complex(x) else 1) for x in results)
    if opcode in ("sort", "topk") or _SORTS.match(instruction.target):
        # The result of a `topk` has fewer elements than are sorted, so the largest array counts.
        dims = max([results, *operands], key=_elements)[0].dims or (1,)
        axis = re.search(r"\d{1,3}", instruction.attributes.get("dimensions", ""))  # {1}
        row = dims[int(axis[0]) if axis else -1]
        return math.prod(dims) * max(row - 1, 0).bit_length()  # log2(row), rounded up
    if opcode == "fft":
        return _fft_flops(instruction)
    # A callback runs on the host.
    has_no_flops = _CALLBACK.match(instruction.target) or instruction.operation == _METADATA
    is_unknown = opcode == "custom-call" and not has_no_flops
    return None if is_unknown or opcode in _UNKNOWN else 0


def _fft_flops(fft: Instruction) -> int:
    """Counts the flops of an FFT over the last dimensions, whose sizes are ``fft_length={n,m}``."""
    dims = fft.results[0].dims
    lengths = [int(text) for text in re.findall(r"\d{1,9}", fft.attributes["fft_length"])]
    rows = math.prod(dims[: len(dims) - len(lengths)])
    points = math.prod(lengths)  # an FFT over n × m is m FFTs of n, and n of m
    is_real = "RFFT" in fft.attributes.get("fft_type", "")
    return round((2.5 if is_real else 5) * rows * points * math.log2(max(points, 1)))


_COPIES = SLICES | {"copy", "dynamic-update-slice"}
_NO_WORK = FREE | {"async-start"}
# Real operations for one of complex numbers: (a + bi)(c + di) is 4 multiplications and 2 additions,
# a quotient multiplies by the conjugate and divides twice. Others, such as `select`, count 1.
_COMPLEX = {"add": 2, "subtract": 2, "negate": 2, "multiply": 6, "divide": 11, "abs": 3}
# Opcodes that compilers expand, or replace by custom calls.
_UNKNOWN = {"batch-norm-grad", "batch-norm-inference", "batch-norm-training", "cholesky", "scan"}
_UNKNOWN |= {"scaled-dot", "triangular-solve"}
# What the compilers themselves call, to pass values on and to mark them.
_WITHOUT_WORK = {"AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone"}
_WITHOUT_WORK |= {"AsyncCollectiveStart", "ConcatBitcast", "GatherScatterIndicesBitpacked"}
_WITHOUT_WORK |= {"LayoutConstraint", "MoveToDevice", "MoveToHost", "PinToDevice", "Sharding"}
_WITHOUT_WORK |= {"SPMDFullToShardShape", "SPMDShardToFullShape", "SliceId", "ZeroCrop"}
_WITHOUT_WORK.add("annotate_device_placement")
# How the TPU compiler reads and writes complex and 64-bit numbers, as two arrays of half the width.
_HALVES = {"X64Combine", "X64SplitHigh", "X64SplitLow"}
_SORTS = re.compile(r"(__gpu\$)?TopK|__topk|__cub\$")
_CALLBACK = re.compile(r"xla_\w*python_\w*callback")
# The TPU compiler's kernel that finds the rows of each group in front of a `ragged_dot`; it adds up
# one integer for each group.
_METADATA = "ragged-dot-metadata"
_MAX_STEPS = 16  # from a product to what it multiplies: out of a fusion, and through some copies
_INT8, _FP8 = re.compile("[su][248]$"), re.compile("f[468]e")


def _is_complex(shape: Shape) -> bool:
    return shape.dtype in ("c64", "c128")


def applications(instruction: Instruction, operands: Operands) -> list[tuple[str, int]]:
    """Returns the computations that an instruction applies to elements, and how often.

    A ``reduce`` of 8 numbers to one, for example, applies its addition 7 times.
    """
    opcode, callees = instruction.opcode, instruction.callees
    if opcode not in ("reduce", "reduce-window", "select-and-scatter", "scatter", "map"):
        return []
    first, *others = operands or [()]  # damaged text may have no operands
    results, last = instruction.results, (others or [first])[-1]
    if opcode == "select-and-scatter":
        # Selects one element in each window of the first operand, by its first computation, and
        # adds an element of the second there, by the other.
        source = (others or [first])[0]
        counts = [_joined_in_windows(instruction, first, source), _elements(source)]
        return [*zip(callees, counts, strict=False)]
    if opcode == "reduce":
        count = max(_elements(first) - _elements(results), 0)
    elif opcode == "reduce-window":
        count = _joined_in_windows(instruction, first, results)
    elif opcode == "scatter":
        count = _elements(last)  # the last operand is an update
    else:  # map
        count = _elements(results)
    return [(callee, count) for callee in callees]


def _joined_in_windows(
    instruction: Instruction, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> int:
    """Counts how often two elements are joined to reduce each window of ``inputs`` to one.

    ``outputs`` has one element for each window. 0 if the text is damaged.
    """
    window = window_of(instruction)
    sizes = window.get("size", [])
    if not inputs or not outputs or len(sizes) != len(inputs[0].dims):
        return 0
    # Windows that cover all elements at any position: a reduction whose result is repeated.
    if all(n == 1 or n >= 2 * dim - 1 for n, dim in zip(sizes, outputs[0].dims, strict=False)):
        return _elements(inputs)
    elements = 1  # in all windows, without padding
    windows = 1  # that are not empty
    for axis, dims in enumerate(zip(inputs[0].dims, sizes, outputs[0].dims, strict=True)):
        size, kernel, count = dims
        in_window = elements_in_windows(size, kernel, count, **_along(window, axis))
        elements *= int(in_window.sum())
        windows *= int((in_window > 0).sum())
    return elements - windows


def custom_work(instruction: Instruction) -> Work | None:
    """Reads the work of a custom call from its author's estimate, as Pallas kernels have one.

    It is in the configuration: ``"cost_estimate": {"flops": "4096", …}``. None without one.
    """
    estimate = _ESTIMATE.search(instruction.attributes.get("backend_config", ""))
    if estimate is None:
        return None
    figures = dict(re.findall(r'"(\w+)"\s*:\s*"?(\d{1,18})', estimate[1]))
    return Work(*(int(figures.get(name, 0)) for name in Work._fields))


_ESTIMATE = re.compile(r'"cost_estimate"\s*:\s*\{([^{}]*)\}')


def _elements(shapes: Sequence[Shape]) -> int:
    """Counts the elements of the first array; 0 without one."""
    return math.prod(shapes[0].dims) if shapes else 0


def _host_bytes(instruction: Instruction, operands: Operands) -> int:
    """Counts the bytes that a copy, or an update in place, moves between device and host."""
    # What a start moves is counted at the start.
    if instruction.opcode.endswith(("-done", "-update")) or not operands:
        return 0
    if base(instruction.opcode) == "dynamic-update-slice" and len(operands) > 1:
        target, source = operands[:2]  # an array, and what is written to a part of it
        moved = total_bytes(source)
    else:
        source, target = operands[0], instruction.results
        moved = total_bytes(target)
    return moved if _is_on_host(source) != _is_on_host(target) else 0


def _is_on_host(shapes: Sequence[Shape]) -> bool:
    return any(shape.memory_space == _HOST for shape in shapes)


def _bytes(instruction: Instruction, operands: Operands, module: Module) -> int:
    """Counts the bytes that an operation reads and writes; for TPUs, in main memory."""
    if instruction.opcode.endswith(("-done", "-update")):  # the start has counted them
        return 0
    total = 0
    opcode = base(instruction.opcode)
    is_partial = opcode in _READ_PARTS
    parts = _read_bytes(instruction, operands, module) if is_partial else itertools.repeat(None)
    for arrays, part in zip(operands, parts, strict=False):
        total += _counted_bytes(arrays, module, part)
    written = _written(instruction, operands, module) if opcode != "send" else []
    # The last result of cuBLAS and cuDNN is memory to work in.
    is_call = instruction.opcode == "custom-call"
    if is_call and instruction.target.startswith(("__cublas$", "__cudnn$")):
        written = written[:-1] or written
    return total + sum(_counted_bytes([shape], module, part) for shape, part in written)


def _counted_bytes(shapes: Iterable[Shape], module: Module, part: int | None = None) -> int:
    """Sums the bytes of arrays, for TPUs of those in main memory; no more than ``part``, if given.

    Layouts number the main memory of a TPU 0, and its vector memory and the host otherwise.
    """
    size = sum([s.bytes for s in shapes if not (s.memory_space and module.is_for_tpu)])
    return size if part is None else min(size, part)


# Opcodes of operations that may read only a part of an operand.
_READ_PARTS = SLICES | {"dynamic-update-slice", "fusion", "scatter", "custom-call"}


def _read_bytes(
    instruction: Instruction, operands: Operands, module: Module
) -> Sequence[int | None]:
    """Counts the bytes that an operation reads of each operand; None for all of it.

    A fusion reads as much of an operand as the slices and updates in it, if nothing else uses it.
    """
    opcode = base(instruction.opcode)
    count = len(operands)
    if opcode in SLICES:  # of an array, at indices that are too small to count
        return [total_bytes(instruction.results), *[0] * (count - 1)][:count]
    if opcode == "dynamic-update-slice":  # of an array, with another: only the latter is read
        return [0, None, *[0] * (count - 2)][:count]
    if opcode == "scatter":  # in place, too: arrays, indices and an update of each array
        return [*_read_by_scatter(instruction, operands, module), *[None] * (count // 2 + 1)]
    if instruction.target in _HALVES:
        return [total_bytes(instruction.results)] * count
    callee = module.fused(instruction)
    return [None] * count if callee is None else _read_by_fusion(callee, count, module)


def _read_by_fusion(callee: Computation, count: int, module: Module) -> list[int | None]:
    """Counts the bytes that a fusion of this computation reads of each of ``count`` operands."""
    read = Counter[int]()  # bytes, by the number of the operand
    whole = set[int]()  # the operands that are read as a whole
    # Name of an instruction that is an operand, perhaps in another shape → the operand's number.
    views: dict[str, int] = {}
    for user in callee.instructions:
        if user.opcode == "parameter" and user.number is not None:
            views[user.name] = user.number
            continue
        # Which of its own operands is which operand of the fusion.
        used = {i: views[name] for i, name in enumerate(user.operand_names) if name in views}
        if not used:
            continue
        is_view = user.opcode in ("bitcast", "fusion") and _is_view(user, module)
        if is_view and not user.is_root:
            views[user.name] = next(iter(used.values()))
        elif is_view or base(user.opcode) not in _READ_PARTS:
            whole.update(used.values())
        else:
            sizes = _read_bytes(user, operands_of(user, module.within[callee.name]), module)
            whole.update(operand for i, operand in used.items() if sizes[i] is None)
            for i, operand in used.items():
                read[operand] += sizes[i] or 0
    return [None if operand in whole else read[operand] for operand in range(count)]


def _read_by_scatter(
    scatter: Instruction, operands: Operands, module: Module
) -> Sequence[int | None]:
    """Counts the bytes that a scatter reads of each array: as many as it writes, if it adds.

    Its *combiner* is the computation that it applies to elements of all arrays, then of all
    updates. One that only assigns uses the latter, and so reads nothing of the arrays.
    """
    update_bytes = _update_bytes_of_scatter(operands)
    combiner = next(map(module.by_name.get, scatter.callees), None)
    if combiner is None:
        return update_bytes
    parameters = {x.name: x.number for x in combiner.instructions if x.number is not None}
    used = {
        parameters[name]
        for instruction in combiner.instructions
        for name in instruction.operand_names
        if name in parameters
    }
    root = module.roots.get(combiner.name)
    if root is not None and root.number is not None:  # it returns a parameter as it is
        used.add(root.number)
    return [size if number in used else 0 for number, size in enumerate(update_bytes)]


def _update_bytes_of_scatter(operands: Operands) -> list[int | None]:
    """Counts the bytes of the update of each array: operands are n arrays, indices, n updates."""
    return [total_bytes(arrays) for arrays in operands[len(operands) // 2 + 1 :]]


def _is_view(instruction: Instruction, module: Module) -> bool:
    """Tells whether an operation gives the bytes of its operand another shape."""
    callee = module.fused(instruction)
    codes = {inner.opcode for inner in callee.instructions} if callee else {instruction.opcode}
    return codes <= {"parameter", "bitcast"}


def _written(
    instruction: Instruction, operands: Operands, module: Module
) -> list[tuple[Shape, int | None]]:
    """Returns the arrays that an operation makes, each with the bytes that it writes of it.

    The bytes are None if all of the array is written: only updates in place and scatters, also
    within a fusion, write a part.
    """
    parts: list[int | None] = []  # empty if all of each is written
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
        parts = [total_bytes(operands[1])]
    elif instruction.opcode == "scatter":
        parts = _update_bytes_of_scatter(operands)
    elif callee := module.fused(instruction):
        # As much of each result as the instruction in the fusion writes that makes it.
        inner = module.within[callee.name]
        root = module.roots.get(callee.name)
        results: Sequence[str] = ()  # the names of those instructions
        if root is not None:
            results = root.operand_names if root.opcode == "tuple" else (root.name,)
        for name in results:
            maker = inner.get(name)
            while maker is not None and maker.opcode == "bitcast":
                maker = inner.get(maker.operand_names[0])
            written = [] if maker is None else _written(maker, operands_of(maker, inner), module)
            parts += [part for _, part in written] or [None]
    return list(zip(instruction.results, parts or [None] * len(instruction.results), strict=False))


# Larger windows, or more in one dimension, are not examined one by one, and padding counts.
_MAX_WINDOWS = 1 << 22
_MAX_WINDOW = 1 << 30


def product_flops(instruction: Instruction, operands: Operands) -> int | None:
    """Counts the flops of a dot, a convolution, or a library's call for one or for attention.

    None for other instructions, and for attention with a mask that depends on values.
    """
    if len(operands) < 2 or not instruction.results or not all(operands[:2]):
        return None
    lhs, rhs, result = operands[0][0].dims, operands[1][0].dims, instruction.results[0].dims
    if instruction.opcode == "convolution" or instruction.target.startswith("__cudnn$conv"):
        # The backward pass has the window of the forward pass.
        if instruction.target == "__cudnn$convBackwardInput":
            lhs, result = result, lhs
        elif instruction.target == "__cudnn$convBackwardFilter":
            rhs, result = result, rhs
        return _convolution_flops(instruction, lhs, rhs, result)
    if instruction.target.startswith("__cudnn$fmha"):
        config = instruction.attributes.get("backend_config", "")
        return _attention_flops(config, [shapes[0].dims for shapes in operands if shapes])
    return _dot_flops(instruction, lhs, result)


def _dot_flops(instruction: Instruction, lhs: Sequence[int], result: Sequence[int]) -> int | None:
    """Counts the flops of a product, by the shapes of its first operand and its result.

    None if it is no product, or its text is damaged. The dimensions of ``lhs`` that it sums over
    are an attribute, ``lhs_contracting_dims={1}``; those of a library's product are in its
    configuration.
    """
    summed = instruction.attributes.get("lhs_contracting_dims")
    if summed is None and instruction.opcode == "custom-call":
        match = _SUMMED.search(instruction.attributes.get("backend_config", ""))
        summed = match[1] if match else None
    if summed is None and instruction.opcode not in PRODUCTS:
        return None
    axes = [int(axis) for axis in re.findall(r"\d{1,3}", summed or "")]
    if any(axis >= len(lhs) for axis in axes):
        return None
    flops = 2 * math.prod(result) * math.prod(lhs[axis] for axis in axes)
    return flops * _real_per_complex(instruction)


def _real_per_complex(product: Instruction) -> int:
    """Counts the real multiply-adds for each of a product: 4 of complex numbers."""
    return 4 if _is_complex(product.results[0]) else 1


_SUMMED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def _attention_flops(config: str, operands: Sequence[Sequence[int]]) -> int | None:
    """Counts the flops of attention in cuDNN, at the positions that its mask leaves.

    Forward there are two products, with keys and with values; backward the scores again, and two
    products for the gradient of each factor. ``config`` is the text in which XLA configures the
    call, ``operands`` are the shapes of queries, keys and values.
    """
    matches = [pattern.search(config) for pattern in _ATTENTION]
    scores, mask, window = (match[1] if match else "" for match in matches)
    if not scores or len(operands) < 3 or not all(operands) or _PAGED in config:
        return None
    *batch, queries, keys = (int(size) for size in re.findall(r"\d{1,18}", scores))
    width = int(window or keys) or keys  # how many keys a query attends to; 0 stands for all
    # Pairs of a query and a key that the mask leaves.
    if mask == "CAUSAL":
        most = min(width, keys)  # of the keys of one query
        growing = min(queries, most)  # the first queries have 1, 2, 3 … keys
        positions = growing * (growing + 1) // 2 + (queries - growing) * most
    elif mask in ("NO_MASK", "ALIBI") and width == keys:
        positions = queries * keys
    else:  # a mask that depends on values
        return None
    key_width = operands[0][-1]
    value_width = operands[2][-1]
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
    """Counts the flops of a convolution, without products with zeros of padding or dilation.

    ``lhs``, ``rhs`` and ``result`` are the shapes of input, kernel and output.
    """
    labels = _LABELS.fullmatch(instruction.attributes.get("dim_labels", ""))
    if labels is None:
        return None
    # The size of each dimension, by its label: `b01f_01io->b01f` for an image. b is the batch, f
    # features, i and o those of the kernel, digits are spatial.
    dims = zip(labels.groups(), (lhs, rhs, result), strict=True)
    inputs, kernel, outputs = (dict(zip(names, sizes, strict=False)) for names, sizes in dims)
    window = window_of(instruction)
    products: int = kernel.get("i", 0) * outputs.get("b", 0) * outputs.get("f", 0)
    products *= _real_per_complex(instruction)
    for axis in filter(str.isdigit, kernel):
        in_window = elements_in_windows(
            size=inputs.get(axis, 0),
            kernel=kernel[axis],
            outputs=outputs.get(axis, 0),
            **_along(window, int(axis)),
        )
        products *= int(in_window.sum())
    return 2 * products


def _along(window: Mapping[str, Sequence[int]], axis: int) -> dict[str, int]:
    """Returns what a window is in one dimension, as arguments of :func:`elements_in_windows`."""

    def number(key: str, default: int) -> int:
        return window[key][axis] if axis < len(window.get(key, ())) else default

    return {
        "stride": number("stride", 1),
        "low": number("pad", 0),
        "dilation": number("lhs_dilate", 1),
        "spacing": number("rhs_dilate", 1),
    }


@functools.lru_cache(maxsize=1024)
def elements_in_windows(
    size: int, kernel: int, outputs: int, stride: int, low: int, dilation: int, spacing: int
) -> np.ndarray:
    """Counts the elements in each window of a kernel in one dimension, without padding.

    Args:
      size: the size of the input.
      kernel: the size of the kernel.
      outputs: how many windows there are.
      stride: the distance from window to window.
      low: the padding before the first element of the input.
      dilation: the distance of elements of the input, with zeros in between.
      spacing: the distance of elements of the kernel.

    Returns:
      The counts, of shape (outputs,).
    """
    largest = max(size, kernel, stride, abs(low), dilation, spacing)
    if outputs > _MAX_WINDOWS or largest > _MAX_WINDOW or min(dilation, spacing) < 1:
        return np.array([kernel * outputs])
    # A window begins at `start`, and its element k is at position start + k·spacing: within the
    # array for k from `first` to `last`. Elements of the array are at multiples of the dilation,
    # which this is for each `step`-th k, from `offset` on, if at all (`common` divides `start`).
    start = np.arange(outputs) * stride - low
    first = np.maximum(0, -(start // spacing))
    last = np.minimum(kernel - 1, ((size - 1) * dilation - start) // spacing)
    common = math.gcd(spacing, dilation)
    step = dilation // common
    offset = -start // common * pow(spacing // common, -1, step) % step
    counts = (last - offset) // step - (first - 1 - offset) // step
    return np.where((start % common == 0) & (last >= first), counts, 0)


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")


def window_of(instruction: Instruction) -> dict[str, list[int]]:
    """Reads the numbers of a window by name; of paddings, which are pairs, the lower one.

    For example, ``{size=3x3 pad=1_1x0_0}`` as ``{"size": [3, 3], "pad": [1, 0]}``.
    """
    text = instruction.attributes.get("window", "")
    return {
        name: [int(number) for number in re.findall(r"(?:^|x)(-?\d{1,9})", numbers)]
        for name, numbers in re.findall(r"(\w+)=([-\dx_]+)", text)
    }
