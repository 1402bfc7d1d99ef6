"""What a program computes, and how much memory it reads and writes: the estimates of XLA.

They are sums over a program. Before it is compiled, that is the program of all devices together;
afterwards that of one device. `work.py` counts what XLA does not, such as the runs of loops.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from .opcodes import CALLBACK, MARKERS
from .tables import Pictured, Table, text
from .units import bound_text, bytes_text, count_text

LOWERED = "before optimisation, all devices, bodies of loops once"
COMPILED = "after optimisation, one device"
CUSTOM_CALLS = "custom calls of unknown cost"  # a reason why figures are unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What operations of one kind compute and access: sums over all their runs in one call."""

    flops: float
    bytes_accessed: float
    int8_flops: float  # the part of ``flops`` in products of integers of 8 bits or less
    fp8_flops: float  # the part of ``flops`` in products of floats of 8 bits or less


@dataclasses.dataclass(frozen=True, slots=True)
class Cost(Pictured):
    """Estimates of XLA; a figure that it does not know is None.

    XLA counts the body of a loop once; the stage says whether bodies count as often as they run,
    which this library counts by itself, in the same way.
    Before optimisation the program is that of all devices together, but the inside of a
    ``shard_map``, which is written for one device, counts as written; and each sharding annotation
    counts as -1 flop and -1 byte.

    Attributes:
      flops: additions and multiplications, so 2·m·k·n for a matrix product.
      bytes_accessed: the bytes that operations read and write.
      transcendentals: exponentials, logarithms, roots and similar operations, which are not in
        ``flops``.
      stage: what the figures are for.
      optimal_seconds: the compiler's own estimate of the time of a call, for the device that it
        compiles for, with the bodies of loops counted once. Only the TPU compiler makes one.
      host_bytes: the bytes copied between device and host memory, with loops counted as often as
        they run; None before that is known.
      int8_flops, fp8_flops: the part of ``flops`` in products of integers, or of floats, of
        8 bits or less, with loops counted as often as they run; None before that is known.
      operations: the same of the operations that the device runs one after the other; those with a
        similar ratio of flops and bytes are one. Empty before that is known.
      why: why figures are None, if some are: loops of unknown length, or custom calls.
      at_least: if figures are None, the cost of all else: lower bounds, which count no run of loops
        of unknown length, and no flops of these custom calls. None if that is unknown, too.
    """

    flops: float | None
    bytes_accessed: float | None
    transcendentals: float | None
    stage: str
    optimal_seconds: float | None = None
    host_bytes: float | None = None
    int8_flops: float | None = None
    fp8_flops: float | None = None
    operations: tuple[Operation, ...] = dataclasses.field(default=(), repr=False, compare=False)
    why: str | None = None
    at_least: Cost | None = None

    @property
    def arithmetic_intensity(self) -> float | None:
        """Flops per byte; None if either is unknown or no bytes are accessed."""
        if self.flops is None or not self.bytes_accessed:  # a program of constants accesses none
            return None
        return self.flops / self.bytes_accessed

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: the figures, why some are unknown, copies to the host."""
        # Without bounds, each figure stands for itself: a known one has no bound.
        least = self.at_least or self
        rows = [
            ("flops", bound_text(self.flops, least.flops, count_text)),
            (
                "bytes accessed",
                bound_text(self.bytes_accessed, least.bytes_accessed, bytes_text),
            ),
            (
                "transcendentals",
                bound_text(self.transcendentals, least.transcendentals, count_text),
            ),
        ]
        yield Table((f"cost {self.stage}", ""), rows, numbers=1)
        if self.why:
            yield text(f"unknown: {self.why}", "yellow")
        if self.host_bytes:
            yield text(f"copied between device and host in one call: {bytes_text(self.host_bytes)}")


def cost_of(analysis: Any, stage: str) -> Cost | None:
    """Reads the cost that JAX's ``cost_analysis`` reports; None if it reports nothing.

    Args:
      analysis: what the method of the stage returned: numbers by name.
      stage: what the figures are for, such as `COMPILED`.
    """
    if not isinstance(analysis, Mapping) or not analysis:
        return None
    return Cost(
        flops=_figure(analysis, "flops"),
        bytes_accessed=_figure(analysis, "bytes accessed"),
        transcendentals=_figure(analysis, "transcendentals"),
        stage=stage,
        # A compiler without an estimate of the time reports 0.
        optimal_seconds=_figure(analysis, "optimal_seconds") or None,
    )


def cost_of_lowered(lowered: jax.stages.Lowered) -> Cost | None:
    """Reads what XLA estimates of a program before its optimisation; None if it estimates nothing.

    XLA counts each custom call as -1, which is lost in the sum. So the figures of a program are
    unknown if it calls a library (LAPACK) or a kernel.
    """
    try:
        cost = cost_of(lowered.cost_analysis(), LOWERED)
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # The devices have no runtime.
        return None
    module = lowered.compiler_ir("stablehlo")
    if cost is None or module is None:
        return cost
    # The limit leaves out the elements of large constants, which may be most of the text.
    program = module.operation.get_asm(large_elements_limit=16)
    targets = dict.fromkeys(_CUSTOM_CALL.findall(program))  # unique, in order
    unknown = [x for x in targets if x not in MARKERS and not CALLBACK.match(x)]
    if not unknown:
        return cost
    return Cost(None, None, None, LOWERED, why=f"{CUSTOM_CALLS}: {', '.join(unknown[:3])}")


_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$]+)")


def _figure(figures: Mapping[str, Any], name: str) -> float | None:
    """Reads a figure by XLA's name; None if XLA does not know it.

    XLA omits figures that are zero, and writes -1 for those that it does not know.
    """
    value = float(figures.get(name, 0.0))
    return value if math.isfinite(value) and value >= 0 else None
