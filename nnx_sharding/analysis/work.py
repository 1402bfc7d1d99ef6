"""What a program computes, reads and writes, in all runs of loops.

A program (`Module`) consists of computations, lists of instructions that call each other. The work
of one instruction (`work_of`) is its flops (`flops.py`) and the bytes that it accesses
(`accessed_bytes.py`). The work of a computation counts as often as it runs (`Module.runs`); XLA's
own estimates count a loop once. A conditional counts as the branch with the most work. A kernel
counts with its author's estimate. The work of other custom calls, and of loops of unknown length,
is unknown: `Work.unknown_flops` and `Work.unknown_runs` count such operations, and `Work.cost`
returns None for the figures that they add to.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from .accessed_bytes import COPIES, HALVES, accessed_bytes, counted_bytes, host_bytes
from .cost import COMPILED, CUSTOM_CALLS, Cost, Operation
from .flops import applications, num_elements, other_flops, product_flops
from .hlo import Module
from .instructions import Instruction, Operands, operands_of, total_bytes
from .opcodes import FREE, MARKERS, PRODUCTS, REARRANGING, TRANSCENDENTAL, base
from .values import Value

WITH_LOOPS = "after optimisation, one device, loops multiplied out"
BRANCHES = "of conditionals the largest branch"
UNKNOWN_LENGTH = "loops of unknown length"
WITHOUT_UNKNOWN = "without what is unknown"
MAIN_MEMORY = "bytes of the main memory"

_MOST = 1 << 100  # the largest figure; larger ones may overflow a float


class Work(NamedTuple):
    """An amount of work, with the figures of :class:`~nnx_sharding.analysis.Cost`."""

    flops: int = 0
    transcendentals: int = 0
    bytes_accessed: int = 0
    int8_flops: int = 0
    fp8_flops: int = 0
    host_bytes: int = 0
    unknown_flops: int = 0  # the number of runs of operations whose flops are not known
    # The number of operations that run an unknown number of times; their other figures are of one
    # run.
    unknown_runs: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """Returns this plus ``times`` times the other."""
        return Work(*[a + times * b for a, b in zip(self, other, strict=True)])

    def cost(self, stage: str = COMPILED) -> Cost:
        """Returns the figures as floats; None for figures that operations of unknown work add to.

        If operations run an unknown number of times, all figures are None. ``stage`` says where the
        figures come from.
        """
        names = (*_OF_FLOPS, "bytes_accessed", "host_bytes")
        # Figures are cut at ``_MOST``, because `float` raises an error for larger integers.
        figures: dict[str, Any] = {name: float(min(getattr(self, name), _MOST)) for name in names}
        if self.unknown_runs:
            figures = dict.fromkeys(names)
        elif self.unknown_flops:
            figures |= dict.fromkeys(_OF_FLOPS)
        return Cost(stage=stage, **figures)


# The figures that are unknown if the flops of an operation are.
_OF_FLOPS = ("flops", "transcendentals", "int8_flops", "fp8_flops")


def with_loops(cost: Cost, module: Module) -> Cost | None:
    """Returns XLA's estimates with figures that count each run of loops instead of XLA's.

    Returns None if a part of the program was not understood. ``cost`` has XLA's estimates of the
    program ``module``; only its ``optimal_seconds`` are kept.
    """
    if module.unread:
        return None
    executed = executed_work(module)
    # Users read in ``Cost.stage`` what the figures count.
    stage = [WITH_LOOPS]
    if module.is_for_tpu:
        stage.append(MAIN_MEMORY)
    if module.with_opcode("conditional"):
        stage.append(BRANCHES)
    total = _total(module, executed).cost(", ".join(stage))
    total = dataclasses.replace(total, optimal_seconds=cost.optimal_seconds)
    reasons = why_unknown(module, executed)
    if not reasons:
        return dataclasses.replace(total, operations=_operations(module, executed))
    # Without the instructions in loops of unknown length. Unknown flops count as none.
    known = {
        name: [
            (instruction, work._replace(unknown_flops=0))
            for instruction, work in parts
            if not work.unknown_runs
        ]
        for name, parts in executed.items()
    }
    at_least = _total(module, known).cost(", ".join([*stage, WITHOUT_UNKNOWN]))
    at_least = dataclasses.replace(at_least, operations=_operations(module, known))
    return dataclasses.replace(total, why="; ".join(reasons), at_least=at_least)


def _total(module: Module, executed: ExecutedWork) -> Work:
    """Adds up the work of a program, in all runs of loops."""
    total = Work()
    for name, parts in executed.items():
        total = total.plus(sum_of(work for _, work in parts), times=module.runs[name].least)
    return total


# Name of a computation → its instructions that do work, each with the work of one run.
ExecutedWork: TypeAlias = Mapping[str, list[tuple["Instruction", Work]]]


def why_unknown(module: Module, executed: ExecutedWork) -> list[str]:
    """Returns texts that name the loops and the custom calls because of which figures are unknown.

    One text is ``loops of unknown length: jit(f)/while``, for example. A text has three names at
    most, because these are enough to find the cause. ``executed`` is the result of
    :func:`executed_work`.
    """
    reasons: defaultdict[str, dict[str, None]] = defaultdict(dict)  # reason → unique names
    for name, parts in executed.items():
        for instruction, work in parts:
            if work.unknown_runs:
                # Every loop of unknown length around the instruction is named, by the name of the
                # user's operation.
                for _, caller in module.around(name):
                    if caller.opcode == "while" and caller.name not in module.trip_counts:
                        reasons[UNKNOWN_LENGTH][caller.operation or caller.name] = None
            if work.unknown_flops:
                reasons[CUSTOM_CALLS][instruction.target or instruction.opcode] = None
    return [f"{reason}: {', '.join([*names][:3])}" for reason, names in reasons.items()]


def _operations(module: Module, executed: ExecutedWork) -> tuple[Operation, ...]:
    """Returns the operations that the device runs one after the other.

    Copies and sends, which run at the same time, are left out. Operations whose ratios of flops to
    bytes differ by less than a fifth are added up, because their sum takes about as long as they
    do, and reports of large programs stay small.
    """
    # Name of a computation → the work of one run, with that of its fusions.
    work_of_run: dict[str, Work] = {}
    sums: dict[_SimilarWork, Work] = {}
    # Callees come first, so that ``work_of_run`` has what a fusion runs before the fusion.
    for name in module.callees_first or ():
        own = {instruction.name: work for instruction, work in executed.get(name, ())}
        runs = module.runs[name]
        total = Work()
        instructions = module.by_name[name].instructions if name in executed else []
        for instruction in instructions:
            work = own.get(instruction.name, Work())
            # A fusion is one operation, with all that is in it. Bodies of loops, and computations
            # that are called, have operations of their own.
            if module.fused(instruction) is not None:
                work = sum_of([work, *(work_of_run[callee] for callee in instruction.callees)])
            total = total.plus(work)
            # Copies and collectives run next to the operations, so they are no operations
            # themselves. Neither are the instructions inside of a fusion, because the fusion is
            # one. Everything counts in ``total``.
            is_asynchronous = instruction.opcode.endswith(("-start", "-done"))
            is_operation = not (runs.is_fused or instruction.collective or is_asynchronous)
            if is_operation and (work.flops or work.bytes_accessed):
                kind = _SimilarWork.of(work)
                sums[kind] = sums.get(kind, Work()).plus(work, times=runs.least)
        work_of_run[name] = total
    figures = [field.name for field in dataclasses.fields(Operation)]  # `Work` has the same names.
    return tuple(
        Operation(**{figure: float(min(getattr(work, figure), _MOST)) for figure in figures})
        for work in sums.values()
    )


class _SimilarWork(NamedTuple):
    """What operations have in common whose work takes about as long together as apart."""

    # The binary logarithm of flops per byte, in quarters: ratios with the same number differ by
    # less than 2 ** (1 / 4), which is 1.19.
    ratio: int
    # Hardware has other rates for products of 8-bit numbers.
    has_int8: bool
    has_fp8: bool

    @classmethod
    def of(cls, work: Work) -> _SimilarWork:
        """Returns the kind of some work."""
        # One is added because flops and bytes may be 0.
        logarithm = math.log2(work.flops + 1) - math.log2(work.bytes_accessed + 1)
        return cls(round(4 * logarithm), work.int8_flops > 0, work.fp8_flops > 0)


def executed_work(module: Module) -> ExecutedWork:
    """Returns the instructions that do work in each computation that runs, with that of one run.

    There are three kinds of computations. One that is *applied* to elements, such as the addition
    of a ``reduce``, is left out, because its work counts as that of the caller. One that is *fused*
    has flops, but no bytes, because the fusion counts the bytes. Any other has flops and bytes.

    Each instruction in a loop of unknown length has ``unknown_runs=1``, so that sums with it are
    unknown.
    """
    executed: dict[str, list[tuple[Instruction, Work]]] = {}
    # Name of a computation → the work of applying it to one element.
    work_per_element: dict[str, Work] = {}
    # Callees come first, so that ``work_per_element`` has a computation before its caller.
    for name in module.callees_first or ():
        if name not in module.by_name:
            continue
        by_name = module.within[name]
        runs = module.runs[name]
        parts = []
        for instruction in module.by_name[name].instructions:
            if instruction.opcode in _NO_WORK:
                continue
            operands = operands_of(instruction, by_name)
            # Without the module, `work_of` counts no bytes.
            work = work_of(instruction, operands, None if runs.is_fused else module)
            if work.flops and not module.is_for_tpu and instruction.opcode in PRODUCTS:
                # Compilers for other hardware may convert 8-bit factors first. The hardware that
                # the figures are for multiplies 8-bit factors, so the type before counts.
                dtypes = [
                    _dtype_before_conversion(instruction, factor, home=name, module=module)
                    for factor in (0, 1)
                ]
                work = _with_narrow_flops(work, dtypes)
            for callee, count in applications(instruction, operands):
                work = work.plus(work_per_element.get(callee, Work()), times=count)
            if any(work):
                # The operands of the caller tell how often a computation is applied, so only the
                # caller has unknown runs.
                if runs.times is None and not runs.is_applied:
                    work = work._replace(unknown_runs=1)
                parts.append((instruction, work))
        if runs.is_applied:
            work_per_element[name] = sum_of(work for _, work in parts)
        else:
            executed[name] = parts
    # Only the branch of a conditional with the most work counts. A weight adds flops to bytes and
    # other figures, which have no common unit, but mostly one branch has more of all of them.
    weights = {name: sum(sum(work) for _, work in parts) for name, parts in executed.items()}
    taken = module.taken(weights)
    return {name: parts for name, parts in executed.items() if name in taken}


def sum_of(parts: Iterable[Work]) -> Work:
    """Adds up the work of several instructions or computations."""
    return Work(*map(sum, zip(Work(), *parts, strict=True)))


def work_of(instruction: Instruction, operands: Operands, module: Module | None) -> Work:
    """Counts the work of one instruction, without that of the computations that it calls.

    Args:
      instruction: the instruction.
      operands: the shapes of what it takes.
      module: the program; None for an instruction in a fusion, whose bytes do not count.
    """
    opcode = instruction.opcode
    if opcode in _NO_WORK or instruction.target in MARKERS:
        return Work()
    estimate = custom_work(instruction) if opcode == "custom-call" else None
    if estimate is not None:
        return _work_of_kernel(instruction, operands, module=module, estimate=estimate)
    accessed = 0 if module is None else accessed_bytes(instruction, operands, module)
    moved = Work(bytes_accessed=accessed, host_bytes=host_bytes(instruction, operands))
    # Copies, and calls that read or write 64-bit numbers as halves, compute nothing.
    if base(opcode) in COPIES or instruction.target in HALVES:
        return moved
    # Random numbers count as transcendentals because XLA counts them so.
    if opcode in TRANSCENDENTAL or opcode in ("rng", "rng-bit-generator"):
        return moved._replace(transcendentals=num_elements(instruction.results))
    flops = product_flops(instruction, operands)
    if flops is None:  # The instruction is no product.
        flops = other_flops(instruction, operands)
        return moved._replace(flops=flops or 0, unknown_flops=int(flops is None))
    factors = [arrays[0].dtype for arrays in operands[:2]]
    return _with_narrow_flops(moved._replace(flops=flops), factors)


def _with_narrow_flops(work: Work, dtypes: Collection[str]) -> Work:
    """Returns the work of a product with its flops as 8-bit flops, too, if all factors have 8 bits.

    Args:
      dtypes: the dtypes of its factors, at least one: ``["s8", "s8"]``. The flops count as
        ``int8_flops``, too, if all dtypes are integers of 8 bits or less, and as ``fp8_flops`` if
        all are floats of 8 bits or less.
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

    CPUs do not multiply numbers of 8 bits, so their compiler converts both factors first. It names
    the conversion after the product; a conversion that the user wrote has another name.

    Args:
      factor: which of its operands, 0 or 1.

    Returns:
      The type as HLO writes it; empty if damaged text lacks the instruction that makes the factor.
    """
    value = Value(home, product.operand_names[factor])
    # The type of the value in front of the last conversion by the compiler that was met.
    dtype = ""
    for _ in range(_MAX_STEPS):  # The search goes back through copies and out of fusions.
        maker = module.maker(value)
        if maker is None:
            break
        is_by_compiler = maker.opcode == "convert" and maker.operation == product.operation
        if is_by_compiler:
            dtype = ""  # The type of the next value on the way back counts instead.
        elif not dtype:
            dtype = maker.results[0].dtype
        if is_by_compiler or maker.opcode in REARRANGING:
            sources = module.operands(value)[:1]
        else:
            sources = module.passed(value)  # Empty if the instruction computes the value.
        if len(sources) != 1:  # The value is computed here, or a loop carries it.
            break
        value = sources[0]
    return dtype


def _work_of_kernel(
    kernel: Instruction, operands: Operands, *, module: Module | None, estimate: Work
) -> Work:
    """Returns the author's estimate of a kernel's work, corrected by what the compiler chose.

    Authors assume that all arrays are in main memory. The compiler may have copied some into the
    vector memory of a TPU; the bytes of these arrays are subtracted, because they do not count. The
    flops of the compiler's kernel for ``ragged_dot`` also count as 8-bit flops if they are so.

    Args:
      operands: the shapes of what it takes.
      module: the program; None for a kernel in a fusion, whose bytes do not count at all.
    """
    if module is not None:
        shapes = [*kernel.results, *itertools.chain.from_iterable(operands)]
        in_vector_memory = total_bytes(shapes) - counted_bytes(shapes, module)
        accessed = max(estimate.bytes_accessed - in_vector_memory, 0)
        estimate = estimate._replace(bytes_accessed=accessed)
    # Only the compiler's own kernel for ``ragged_dot`` has this text in its configuration. The last
    # two operands of this kernel are the factors.
    if "ragged_dot_tiling" in kernel.rest:
        factors = [arrays[0].dtype for arrays in operands[-2:]]
        estimate = _with_narrow_flops(estimate, factors)
    return estimate


# An ``async-start`` calls a computation that has the work.
_NO_WORK = FREE | {"async-start"}
# The most steps from a product back to a factor: out of a fusion, and through a few copies.
_MAX_STEPS = 16
_INT8, _FP8 = re.compile("[su][248]$"), re.compile("f[468]e")


def custom_work(instruction: Instruction) -> Work | None:
    """Reads the work of a custom call from its author's estimate; None without an estimate.

    Pallas kernels have an estimate in their configuration, with the names of the fields of `Work`:
    ``"cost_estimate": {"flops": "4096", "bytes_accessed": 512}``.
    """
    estimate = _ESTIMATE.search(instruction.attributes.get("backend_config", ""))
    if estimate is None:
        return None
    # Only 18 digits are read, because damaged text may have any number.
    figures = dict(re.findall(r'"(\w+)"\s*:\s*"?(\d{1,18})', estimate[1]))
    return Work(*(int(figures.get(name, 0)) for name in Work._fields))


_ESTIMATE = re.compile(r'"cost_estimate"\s*:\s*\{([^{}]*)\}')
