"""What a program computes, reads and writes, in all runs of loops.

A program (`Module`) consists of computations, lists of instructions that call each other. The work
of one instruction (`work_of`) is its flops (`flops.py`) and the bytes that it accesses
(`accessed_bytes.py`). That of a computation counts as often as it runs (`Module.runs`), where XLA
counts a loop once; of a conditional the branch with the most work. Kernels count with their
authors' estimates. Work that is unknown, of other custom calls and in loops of unknown length, is
counted too (`Work.unknown_flops`, `Work.unknown_runs`): sums that contain it become None
(`Work.cost`).

From other modules:

    Module          the HLO program. ``maker`` is the instruction that makes a value, ``passed`` the
                    values that a value is handed on from, ``around`` the calls around a
                    computation, ``runs`` how often each runs
    Instruction     one instruction: ``opcode``, ``results`` (the shapes of the arrays that it
                    makes), ``callees`` (the names of the computations that it runs), ``target``
                    (what a custom call calls), ``attributes`` (texts by name)
    Operands        for each operand the shapes of its arrays, mostly one; from `operands_of`
    applications    the computations that an instruction applies to elements, and how often
    Runs            how often a computation runs: ``times`` (None if unknown), ``least`` (loops of
                    unknown length count once), ``is_fused`` (part of one operation), ``is_applied``
                    (to elements)
    base            an opcode without ``-start`` and ``-done``
    total_bytes     the bytes of several arrays, without padding
    counted_bytes   likewise; of a program for TPUs, of those in main memory
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
MAIN_MEMORY = "bytes of the main memory"

_MOST = 1 << 100  # larger figures may overflow


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
        # As ``_MOST`` at most: a float that is too large would raise an error.
        figures: dict[str, Any] = {name: float(min(getattr(self, name), _MOST)) for name in names}
        if self.unknown_runs:
            figures = dict.fromkeys(names)
        elif self.unknown_flops:
            figures |= dict.fromkeys(_OF_FLOPS)
        return Cost(stage=stage, **figures)


# The figures that are unknown if the flops of an operation are.
_OF_FLOPS = ("flops", "transcendentals", "int8_flops", "fp8_flops")


def with_loops(cost: Cost, module: Module) -> Cost | None:
    """Replaces XLA's estimates by figures that count loops.

    Returns None if a part of the program was not understood. ``cost`` has XLA's estimates of the
    program ``module``.
    """
    if module.unread:
        return None
    executed = executed_work(module)
    total = Work()
    for name, parts in executed.items():
        total = total.plus(sum_of(work for _, work in parts), times=module.runs[name].least)
    # What the figures are of, as users read it in ``Cost.stage``.
    stage = [WITH_LOOPS]
    if module.is_for_tpu:
        stage.append(MAIN_MEMORY)
    if module.with_opcode("conditional"):
        stage.append(BRANCHES)
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

    Such as ``loops of unknown length: jit(f)/while``, with three names at most, which is enough to
    find them. ``executed`` is from :func:`executed_work`.
    """
    reasons: defaultdict[str, dict[str, None]] = defaultdict(dict)  # unique names, in order
    for name, parts in executed.items():
        for instruction, work in parts:
            if work.unknown_runs:
                # All loops around it whose length is unknown, by the name of the user's operation.
                for _, caller in module.around(name):
                    if caller.opcode == "while" and caller.name not in module.trip_counts:
                        reasons[UNKNOWN_LENGTH][caller.operation or caller.name] = None
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
    for name in module.callees_first or ():  # so that what a fusion runs is known
        own = {instruction.name: work for instruction, work in executed.get(name, ())}
        runs = module.runs[name]
        total = Work()
        for instruction in module.by_name[name].instructions if name in executed else ():
            # A fusion is one operation, with all that is in it. Bodies of loops, and what is
            # called, have operations of their own.
            fused = instruction.callees if module.fused(instruction) else ()
            inside = [work_of_run[callee] for callee in fused]
            work = sum_of([own.get(instruction.name, Work()), *inside])
            total = total.plus(work)
            # Copies and collectives run beside the operations. In a fusion (``total``), all counts.
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

    A computation is one of three. What is *applied* to elements, such as the addition of a
    ``reduce``, is left out: it is the work of its caller. What is *fused* has flops, but no bytes,
    which are those of the fusion. All others have flops and bytes.

    Work in a loop of unknown length has one ``unknown_runs``, so that sums of it are unknown.
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
                # Other compilers may convert 8-bit factors first, but the flops are 8-bit ones on
                # the hardware that figures are for.
                dtypes = [
                    _dtype_before_conversion(instruction, factor, home=name, module=module)
                    for factor in (0, 1)
                ]
                work = _with_narrow_flops(work, dtypes)
            for callee, count in applications(instruction, operands):
                work = work.plus(inside.get(callee, Work()), times=count)
            if any(work):
                # How often something is applied is known from the operands of the caller.
                if runs.times is None and not runs.is_applied:
                    work = work._replace(unknown_runs=1)
                parts.append((instruction, work))
        if runs.is_applied:
            inside[name] = sum_of(work for _, work in parts)
        else:
            executed[name] = parts
    # Of conditionals only the largest branch counts. The sum of flops, bytes and the other figures
    # has no unit, but one branch mostly has more of all of them.
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
    if opcode == "custom-call" and (estimate := custom_work(instruction)) is not None:
        return _work_of_kernel(instruction, operands, module=module, estimate=estimate)
    accessed = 0 if module is None else accessed_bytes(instruction, operands, module)
    moved = Work(bytes_accessed=accessed, host_bytes=host_bytes(instruction, operands))
    # Copies, and calls that read or write 64-bit numbers as halves, compute nothing.
    if base(opcode) in COPIES or instruction.target in HALVES:
        return moved
    if opcode in TRANSCENDENTAL or opcode in ("rng", "rng-bit-generator"):  # as XLA counts
        return moved._replace(transcendentals=num_elements(instruction.results))
    flops = product_flops(instruction, operands)
    if flops is None:  # no product
        flops = other_flops(instruction, operands)
        return moved._replace(flops=flops or 0, unknown_flops=int(flops is None))
    factors = [arrays[0].dtype for arrays in operands[:2]]
    return _with_narrow_flops(moved._replace(flops=flops), factors)


def _with_narrow_flops(work: Work, dtypes: Collection[str]) -> Work:
    """Returns the work of a product, whose flops count as 8-bit ones, too, if its factors are so.

    Args:
      work: the work of the product.
      dtypes: those of its factors, at least one: ``["s8", "s8"]``. The flops are ``int8_flops`` if
        all are integers of 8 bits or less, and ``fp8_flops`` if all are such floats.
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
    dtype = ""  # of the value in front of the last conversion that was met
    for _ in range(_MAX_STEPS):  # back from the factor, through copies and out of fusions
        maker = module.maker(value)
        if maker is None:
            break
        is_compilers = maker.opcode == "convert" and maker.operation == product.operation
        if is_compilers:
            dtype = ""  # not this type counts, but that of the next value on the way back
        elif not dtype:
            dtype = maker.results[0].dtype
        if is_compilers or maker.opcode in REARRANGING:
            sources = module.operands(value)[:1]
        else:
            sources = module.passed(value)  # of what only passes arrays on, such as a fusion
        if len(sources) != 1:  # it is computed here, or carried by a loop
            break
        value = sources[0]
    return dtype


def _work_of_kernel(
    kernel: Instruction, operands: Operands, *, module: Module | None, estimate: Work
) -> Work:
    """Corrects what the author of a kernel estimates, who takes all arrays to be in main memory.

    The compiler may have copied some into the vector memory of a TPU, and their bytes do not count.

    Args:
      kernel: the custom call.
      operands: the shapes of what it takes.
      module: the program; None for a kernel in a fusion, whose bytes do not count at all.
      estimate: what its author estimates.
    """
    if module is not None:
        shapes = [*kernel.results, *itertools.chain.from_iterable(operands)]
        in_vector_memory = total_bytes(shapes) - counted_bytes(shapes, module)
        accessed = max(estimate.bytes_accessed - in_vector_memory, 0)
        estimate = estimate._replace(bytes_accessed=accessed)
    # The compiler's own kernel for ``ragged_dot``, which has this in its configuration. Its last
    # operands are the factors, so that it is known whether these have 8 bits.
    if "ragged_dot_tiling" in kernel.rest:
        factors = [arrays[0].dtype for arrays in operands[-2:]]
        estimate = _with_narrow_flops(estimate, factors)
    return estimate


_NO_WORK = FREE | {"async-start"}
_MAX_STEPS = 16  # from a product to what it multiplies: out of a fusion, and through some copies
_INT8, _FP8 = re.compile("[su][248]$"), re.compile("f[468]e")


def custom_work(instruction: Instruction) -> Work | None:
    """Reads the work of a custom call from its author's estimate, as Pallas kernels have one.

    It is in the configuration: ``"cost_estimate": {"flops": "4096", "bytes_accessed": 512}``, with
    the names of the fields of `Work`. None without one.
    """
    estimate = _ESTIMATE.search(instruction.attributes.get("backend_config", ""))
    if estimate is None:
        return None
    # At most 18 digits, since damaged text may have any number.
    figures = dict(re.findall(r'"(\w+)"\s*:\s*"?(\d{1,18})', estimate[1]))
    return Work(*(int(figures.get(name, 0)) for name in Work._fields))


_ESTIMATE = re.compile(r'"cost_estimate"\s*:\s*\{([^{}]*)\}')
