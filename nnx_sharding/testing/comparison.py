"""What differs between a step on one device and on a mesh, and in which module first.

The records of one call of the step are compared in the order in which the modules ran, backwards
for gradients, so the first difference is where the error is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..specs.fitting import spec_axes
from .arrays import (
    Array,
    all_equal,
    distance_of_shards,
    largest_difference,
    numbers,
    unequal_arrays,
)
from .recording import RESULT, Outcome
from .rounding import QUANTILE, SAMPLES, Rounding

_CHANCE = 1e-6  # of equal masks from different keys, below which two masks count as one


class _Error(NamedTuple):
    """How far an array is from the same one on one device, and how far it may be."""

    distance: float  # NaN where only one of them is NaN
    limit: float

    @property
    def is_wrong(self) -> bool:
        """Whether it is too far; a NaN is, which is why this is not ``distance > limit``."""
        return not self.distance <= self.limit

    def __str__(self) -> str:
        return f"max error {self.distance:.2g}, tolerance {self.limit:.2g}"


class Spread:
    """How far the arrays and records of rounded runs are from those of an exact one.

    For each, the root of the mean square of the largest difference in each run: the estimate of its
    standard deviation. It is NaN where only one of the runs is NaN.
    """

    def __init__(self, exact: Outcome, rounded: Iterable[Outcome]):
        squares: dict[Any, Any] = defaultdict(float)
        for outcome in rounded:
            for name, array in exact.arrays.items():
                distance = largest_difference(numbers(array), numbers(outcome.arrays[name]))
                squares[name] += distance**2 / SAMPLES
            for key, devices in exact.values.items():
                for calls, others in zip(
                    devices.values(), outcome.values.get(key, {}).values(), strict=False
                ):
                    for index, (x, other) in enumerate(zip(calls, others, strict=False)):
                        distance = largest_difference(numbers(x), numbers(other))
                        squares[(*key, index)] += distance**2 / SAMPLES
        self._squares = squares

    def __getitem__(self, key: Any) -> float:
        return float(self._squares.get(key, 0.0) ** 0.5)


class _MaskPair(NamedTuple):
    """What one dropout keeps on two devices."""

    module: str
    axes: list[str]  # along which the devices differ
    masks: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    has_equal_inputs: bool


class Comparison:
    """One call of a step on one device, there with rounding errors, and on the mesh."""

    def __init__(
        self,
        before: dict[str, np.ndarray[Any, Any]],
        on_device: Outcome,
        spread: Spread,
        on_mesh: Outcome,
        rounding: Rounding,
        mesh: Mesh,
    ):
        self._on_device, self._spread, self._on_mesh = on_device, spread, on_mesh
        self._before, self._rounding, self._mesh = before, rounding, mesh

    def _limit(self, x: Array, key: Any) -> float:
        """Returns by how much an array may differ from ``x``, its value on one device."""
        return self._rounding.of_array(x) + QUANTILE * self._spread[key]

    def differences(self) -> list[str]:
        """Lists the arrays that differ after the call, after the first module that does."""
        lines = []
        for name, array in self._on_mesh.arrays.items():
            lines += self._difference(name, array)
        return [self._first_wrong_module(lines), *lines] if lines else []

    def _difference(self, name: str, array: jax.Array) -> list[str]:
        """Describes how an array of the mesh differs from that of one device; empty if not."""
        if name in self._on_device.arrays:
            expected = numbers(self._on_device.arrays[name])
            limit = self._limit(self._on_device.arrays[name], name)
        else:  # only the mesh has it, so it is wrong
            expected, limit = np.array(np.nan), 0.0
        # Each shard is compared, as replicas may differ, of which `np.asarray` shows only one.
        shards = [(shard.index, numbers(shard.data)) for shard in array.addressable_shards]
        distance = max(
            largest_difference(shard, expected[index] if expected.ndim else expected)
            for index, shard in shards
        )
        error = _Error(distance, limit)
        if not error.is_wrong:
            return []
        # A sum over the wrong axes multiplies what the step adds to an array, not the array.
        start = self._before.get(name, np.zeros_like(expected))
        factor = _multiple(numbers(array) - start, expected - start, limit, self._mesh)
        return [f"  {name}: {error}{factor}{_unequal_replicas(array, shards, limit)}"]

    def _first_wrong_module(self, lines: list[str]) -> str:
        """Describes the first module, in the order of execution, that computes something else.

        Outputs are looked at first, then gradients. On Manual axes a device may hold a term of a
        sum that comes later, so a wrong value there counts last, and only if nothing else is wrong.

        Args:
          lines: what :meth:`differences` has found.
        """
        # If what the step returns is right, a wrong output on Manual axes is a term of a sum.
        returns_something = any(name.startswith(RESULT) for name in self._on_mesh.arrays)
        is_result_right = returns_something and not any(
            line.startswith(f"  {RESULT}") for line in lines
        )
        for backward, with_manual in ((False, not is_result_right), (True, True), (False, True)):
            if text := self._first_wrong_site(backward, with_manual):
                return text
        # All that modules took and returned is right. So a module changed its own state wrongly, or
        # computed the wrong gradient of its parameters; if several did, it was the update.
        text = "is the first module with an array that differs"
        names = {line.split(": ")[0].strip() for line in lines}
        for site in self._on_mesh.sites:
            if names.intersection(site.states):
                return f"  {site.module} {text}"
        modules = {site.module: site.module.split(" ")[0] for site in self._on_mesh.sites}
        owners = set()
        for name in names:
            if enclosing := [
                label for label, path in modules.items() if name.startswith(f"{path}.")
            ]:
                owners.add(max(enclosing, key=len))
        if len(owners) == 1:
            return f"  {owners.pop()} {text}"
        return "  outside of modules: their outputs and gradients are the same"

    def _first_wrong_site(self, backward: bool, with_manual: bool) -> str:
        """Describes the first site with a wrong value, or gradient; empty if there is none.

        Args:
          backward: look at gradients, in the order of the backward pass, where what a module
            computes is the gradient of its input.
          with_manual: look also at sites on Manual axes, outside of modules that are right.
        """
        sites = self._on_mesh.sites
        computed_side = "input" if backward else "output"
        errors = {}
        for number in range(len(sites)):
            if error := self._site_error(number, backward):
                errors[number] = error
        wrong = [number for number, error in errors.items() if error.is_wrong]
        # Calls of modules are named by their first site.
        checked_calls = {sites[i].start for i in errors if sites[i].side == computed_side}
        wrong_calls = {sites[i].start for i in wrong if sites[i].side == computed_side}
        right_calls = checked_calls - wrong_calls
        last_site = {site.start: number for number, site in enumerate(sites)}
        for number in sorted(wrong, reverse=backward):
            site = sites[number]
            if site.axes:
                is_within_right = any(start <= number <= last_site[start] for start in right_calls)
                if is_within_right or not with_manual:
                    continue
            if site.side == computed_side:
                what = "gradient" if backward else "output"
                text = f"{site.module} is the first module whose {what} differs"
            else:
                place = "after" if backward else "before"
                text = f"outside of modules, {place} {site.module}"
            return f"  {text}: {errors[number]}\n    inputs: {', '.join(site.inputs)}"
        return ""

    def _site_error(self, number: int, backward: bool) -> _Error | None:
        """Returns the largest error of a site over its limit; None if it is unknown.

        A site in a loop has several values. It is unknown if the runs did not record as many.
        """
        key, site = (number, backward), self._on_mesh.sites[number]
        if site.side == "mask" or self._on_device.sites[number][:2] != site[:2]:
            return None
        shards = dict(sorted(self._on_mesh.values.get(key, {}).items()))
        expected = [*self._on_device.values.get(key, {}).values()]
        if len(expected) != 1 or not shards:
            return None
        calls = [expected[0], *shards.values()]
        if len({*map(len, calls)}) > 1:
            return None
        axis_sizes = [index + 1 for index in max(shards)]
        errors = []
        for index, (x, *parts) in enumerate(zip(*calls, strict=True)):
            stacked = np.array([*map(numbers, parts)])
            by_axis = stacked.reshape(*axis_sizes, *stacked.shape[1:])
            distance = distance_of_shards(numbers(x), by_axis)
            if distance is None:
                return None
            errors.append(_Error(distance, self._limit(x, (number, backward, index))))
        return max(errors, key=lambda error: error.is_wrong, default=None)

    def has_masks(self) -> bool:
        """Whether a dropout drew a mask on each device."""
        return any(site.side == "mask" for site in self._on_mesh.sites)

    def shared_masks(self) -> list[str]:
        """Lists each dropout that drops the same elements of shards with different inputs."""
        axes_by_module = {}
        for pair in self._mask_pairs():
            kept = np.mean(pair.masks[0])
            # Masks with different keys are equal with this probability.
            by_chance = (kept**2 + (1 - kept) ** 2) ** np.size(pair.masks[0])
            if np.array_equal(*pair.masks) and by_chance <= _CHANCE and not pair.has_equal_inputs:
                axes_by_module[pair.module] = pair.axes
        text = "drops the same elements of shards with different inputs, over"
        remedy = "Give each its own key: jax.random.fold_in(key, jax.lax.axis_index(...))."
        return [
            f"  {module} {text} {' and '.join(map(repr, axes))}.\n    {remedy}"
            for module, axes in axes_by_module.items()
        ]

    def masks_of_replicas(self, dropping: Outcome) -> list[str]:
        """Lists what is declared replicated and is not, after the dropouts that made it differ.

        Masks may differ for equal inputs, if what follows is not declared replicated, or is
        averaged. So the step runs once more, with its dropouts.

        Args:
          dropping: what the mesh computes if elements are dropped.
        """
        differing = []
        for name, array in dropping.arrays.items():
            shards = [(shard.index, numbers(shard.data)) for shard in array.addressable_shards]
            if text := _unequal_replicas(array, shards, self._rounding.of_array(array)):
                differing.append(f"  {name}{text.replace(';', ':')}")
        pairs = [pair for pair in self._mask_pairs() if pair.has_equal_inputs]
        pairs = [pair for pair in pairs if not np.array_equal(*pair.masks)]
        if not differing or not pairs:
            return []
        axes = " and ".join(map(repr, pairs[0].axes))
        text = f"  {pairs[0].module} drops other elements of replicas, over {axes}."
        remedy = "Give replicas the same key: fold in only the axes over which inputs differ."
        return [f"{text}\n    {remedy}", *differing]

    def _mask_pairs(self) -> Iterator[_MaskPair]:
        """Yields the masks of each dropout on each two devices, in the order of execution."""
        for (number, backward), masks in sorted(self._on_mesh.values.items()):
            site = self._on_mesh.sites[number]
            if backward or site.side != "mask":
                continue
            inputs = self._on_mesh.values[number - 1, False]
            for device, other in itertools.combinations(masks, 2):
                indices = zip(site.axes, device, other, strict=True)
                yield _MaskPair(
                    site.module,
                    [axis for axis, i, j in indices if i != j],
                    (np.array(masks[device]), np.array(masks[other])),
                    np.array_equal(inputs[device], inputs[other]),
                )


def _unequal_replicas(
    array: jax.Array, shards: list[tuple[Any, np.ndarray[Any, Any]]], limit: float
) -> str:
    """Says so, if devices have different values of the same part of an array.

    Args:
      array: the array.
      shards: the index and the numbers of each shard.
      limit: by how much they may differ.
    """
    first = {str(index): shard for index, shard in reversed(shards)}
    distance = max(largest_difference(shard, first[str(index)]) for index, shard in shards)
    if distance <= limit or not isinstance(array.sharding, NamedSharding):
        return ""
    used = [*spec_axes(array.sharding.spec)]
    unused = [axis for axis in array.sharding.mesh.axis_names if axis not in used]
    return f"; its replicas over {', '.join(map(repr, unused))} are not equal"


def _multiple(
    x: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], limit: float, mesh: Mesh
) -> str:
    """Says so, if an array is the right one, multiplied or divided by the sizes of mesh axes."""
    if x.shape != expected.shape or not np.isfinite(x).all() or not np.isfinite(expected).all():
        return ""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            factor = int(np.prod([mesh.shape[axis] for axis in chosen]))
            names = " and ".join(map(repr, chosen))
            if largest_difference(x, factor * expected) <= factor * limit:
                return f"; {factor} times as large: summed once too often over {names}"
            if (
                largest_difference(x * factor, expected)
                <= factor * limit
                < np.abs(expected).max(initial=0)
            ):
                return f"; {factor} times too small: not summed over {names}, or divided twice"
    return ""


def unequal_runs(first: Outcome, second: Outcome) -> list[str]:
    """Lists what two runs of one program on one mesh have not in common, bit for bit."""
    lines = []
    for number, site in enumerate(first.sites):
        for backward in (False, True):
            key = number, backward
            runs = [outcome.values.get(key, {}) for outcome in (first, second)]
            pairs = [(runs[0][device], runs[1].get(device, [])) for device in runs[0]]
            if not all(map(all_equal, *zip(*pairs, strict=True))) if pairs else False:
                what = "gradient" if backward else site.side
                lines.append(f"  the {what} of {site.module} differs first")
                break
        if lines:
            break
    return lines + unequal_arrays(first.arrays, second.arrays)
