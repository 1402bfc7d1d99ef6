"""Candidates with their predictions, which compiled programs correct.

Predictions of similar candidates are off by about the same factor.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..analysis.program import ProgramReport
from ..report.comparison import Failure
from ..report.compiling import Lower
from .candidates import Candidate
from .memory import memory_need
from .predictions import Prediction
from .variants import Variant


class PredictedCandidate(NamedTuple):
    """A candidate before it is compiled."""

    candidate: Candidate
    variant: Variant
    prediction: Prediction
    args: tuple[Any, ...]  # the arguments of the step, with the rows of this candidate
    seconds: dict[str, float]  # resource → predicted seconds that it alone takes
    exposed: float  # the share of the interconnect's time that compute may not hide
    least: float | None  # a lower bound of the seconds of a step; None if unknown
    lower: Lower  # the function that traces and lowers the step

    @property
    def variant_and_strategy(self) -> tuple[str, str]:
        """The names of the variant and the strategy.

        The predictions of candidates with equal names are about equally far off.
        """
        return self.variant.name, self.candidate.strategy


class Corrections:
    """Corrects predictions by how far the predictions of compiled programs were off.

    The predicted time of each resource is multiplied by the mean ratio of compiled to predicted
    times. The mean is over the candidates with the same variant and strategy; if none of these was
    compiled, over the candidates with the same variant; else over all (`_groups`). The share of
    communication that is exposed is the mean over the same candidates.

    The predicted bytes are increased by the least that any candidate of the variant needed besides
    its arguments. A mean would take some candidates that fit for candidates that do not.

    Args:
      entries: name → candidate, for all candidates.
      reports: name → the report, for the candidates that were compiled so far.

    Attributes:
      _bytes: the name of a variant → the least bytes that a candidate of this variant needed
        besides its arguments. A variant without a compiled candidate is missing.
      _mean_ratios: group of candidates → resource → the mean ratio of compiled to predicted time.
      _mean_shares: group of candidates → the mean share of communication that was exposed.
    """

    def __init__(
        self,
        entries: Mapping[str, PredictedCandidate],
        reports: Mapping[str, ProgramReport | Failure],
    ):
        """Compares the reports of compiled programs with their predictions."""
        self._bytes: dict[str, int] = {}
        # Group of candidates → resource → the ratios of its members. A candidate belongs to three
        # groups (`_groups`).
        ratios: defaultdict[tuple[str, ...], defaultdict[str, list[float]]]
        ratios = defaultdict(lambda: defaultdict(list))
        # Group of candidates → the shares of communication that were exposed.
        shares: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        for name, report in reports.items():
            entry = entries[name]
            memory = memory_need(report, entry.prediction.arguments)
            if memory is not None and memory.rest is not None:
                variant = entry.variant.name
                self._bytes[variant] = min(self._bytes.get(variant, memory.rest), memory.rest)
            roofline = None if isinstance(report, Failure) else report.roofline
            if roofline is None:
                continue
            for group in _groups(entry):
                # Resources without a time are left out, because their ratio is 0 or undefined.
                for resource, seconds in roofline.times.items():
                    if seconds and entry.seconds[resource]:
                        ratios[group][resource].append(seconds / entry.seconds[resource])
                if roofline.interconnect_s and roofline.exposed_s is not None:
                    shares[group].append(roofline.exposed_s / roofline.interconnect_s)
        self._mean_ratios = {
            group: {resource: statistics.geometric_mean(x) for resource, x in by_resource.items()}
            for group, by_resource in ratios.items()
        }
        # This is an arithmetic mean because shares may be 0, for which no geometric mean exists.
        self._mean_shares = {group: statistics.fmean(x) for group, x in shares.items()}

    def bytes(self, entry: PredictedCandidate) -> int:
        """Returns the bytes that a candidate needs at least besides its arguments."""
        return self._bytes.get(entry.variant.name, 0)

    def seconds(self, entry: PredictedCandidate) -> tuple[float, float]:
        """Returns the corrected seconds of a step, and the sum of the seconds of its resources."""
        # `group` is the smallest group of this candidate in which some program was compiled.
        compiled_groups = self._mean_ratios.keys() | self._mean_shares.keys()
        group = next((group for group in _groups(entry) if group in compiled_groups), ())
        ratios = self._mean_ratios.get(group, {})
        times = {name: time * ratios.get(name, 1.0) for name, time in entry.seconds.items()}
        exposed = times["interconnect"] * self._mean_shares.get(group, entry.exposed)
        # A step takes as long as its slowest resource. If the slowest resource is not the
        # interconnect, the step also waits for the exposed communication.
        step = max(times["interconnect"], max(times["compute"], times["memory"]) + exposed)
        return step, sum(times.values())


def _groups(entry: PredictedCandidate) -> list[tuple[str, ...]]:
    """Lists the groups of a candidate, smallest first: (variant, strategy), (variant,), ()."""
    variant, strategy = entry.variant_and_strategy
    return [(variant, strategy), (variant,), ()]
