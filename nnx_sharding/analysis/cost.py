"""What a program computes, and how much memory it reads and writes: the estimates of XLA."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .units import bytes_text, count_text

LOWERED = "before optimisation, whole program"
COMPILED = "after optimisation, one device"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Estimates of XLA. What it does not know is None.

    XLA counts the body of a loop once, however often it runs. Before optimisation the program is
    that of all devices together, but the inside of a ``shard_map``, which is written for one
    device, counts as written; and each annotation of a sharding, like any other custom call, counts
    as -1 flop and -1 byte.

    Attributes:
      flops: additions and multiplications, each of them one, so 2·m·k·n for a matrix product.
      bytes_accessed: the bytes that operations read and write.
      transcendentals: exponentials, logarithms, roots and the like, which are not in ``flops``.
      stage: what the figures are for.
    """

    flops: float | None
    bytes_accessed: float | None
    transcendentals: float | None
    stage: str

    @property
    def arithmetic_intensity(self) -> float | None:
        """Flops for each byte; None if either is unknown, or there are no bytes."""
        if self.flops is None or not self.bytes_accessed:
            return None
        return self.flops / self.bytes_accessed

    def __str__(self) -> str:
        told = [
            f"{'flops':<20}{count_text(self.flops):>12}",
            f"{'bytes accessed':<20}{bytes_text(self.bytes_accessed):>12}",
            f"{'transcendentals':<20}{count_text(self.transcendentals):>12}",
        ]
        return "\n".join([self.stage, *told])


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """The estimates at each stage; None where there is none.

    Attributes:
      lowered: before optimisation, of the whole program.
      compiled: after optimisation, of one device.
      executed: the same with the bodies of loops counted as often as they run.
    """

    lowered: Cost | None
    compiled: Cost | None
    executed: Cost | None


def cost_of(analysis: Any, stage: str) -> Cost | None:
    """What JAX's ``cost_analysis`` tells; None if it tells nothing.

    Args:
      analysis: what the method of the stage returned: a dict, or a list of one.
      stage: what the figures are for.

    Example:
      >>> from nnx_sharding.analysis import cost_of
      >>> cost_of({"flops": 8.0, "bytes accessed": -1.0}, "one device")
      Cost(flops=8.0, bytes_accessed=None, transcendentals=0.0, stage='one device')
    """
    told = analysis[0] if isinstance(analysis, list | tuple) and analysis else analysis
    if not isinstance(told, Mapping) or not told:
        return None
    return Cost(
        flops=_figure(told, "flops"),
        bytes_accessed=_figure(told, "bytes accessed"),
        transcendentals=_figure(told, "transcendentals"),
        stage=stage,
    )


def _figure(told: Mapping[str, Any], name: str) -> float | None:
    """A figure; XLA leaves out those that are zero, and writes -1 for what it does not know."""
    value = float(told.get(name, 0.0))
    return value if math.isfinite(value) and value >= 0 else None
