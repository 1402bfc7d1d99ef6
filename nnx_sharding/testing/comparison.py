"""What differs between a step on one device and on a mesh, and in which module first.

The records of one call of the step (`Outcome`, in `recording.py`) are compared in the order in
which the modules ran, backwards for gradients, so the first difference is where the error is. A
*site* is an array that a call of a module takes or returns (``side`` "input" or "output"; "mask" is
what a dropout keeps). Sites have numbers in the order of execution; ``start`` is the first one of
the call, and ``axes`` are the Manual mesh axes, along which each device has a value of its own.
``values`` has those of each device by ``(number, backward)``, where ``backward`` is the gradient.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

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
# The index of a shard in its array, and its numbers.
_Shard: TypeAlias = tuple[Any, np.ndarray[Any, Any]]


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
    standard deviation. It is NaN where only one of the runs is NaN. Arrays have their names as
    keys, records (number of the site, backward, number of the call in a loop).
    """

    def __init__(self, exact: Outcome, rounded: Iterable[Outcome]):
        """Compares runs on one device: an exact one, and `SAMPLES` with rounding errors."""
        self._squares: dict[Any, float] = defaultdict(float)
        for outcome in rounded:
            for name, array in exact.arrays.items():
                self._add(name, array, outcome.arrays[name])
            for (number, backward), devices in exact.values.items():
                others = outcome.values.get((number, backward), {})
                # Not strict: a run in which a loop ended earlier has fewer records.
                for values, other_values in zip(devices.values(), others.values(), strict=False):
                    for index, pair in enumerate(zip(values, other_values, strict=False)):
                        self._add((number, backward, index), *pair)

    def _add(self, key: Any, exact: Array, rounded: Array) -> None:
        """Adds the difference of an array in one of the rounded runs."""
        distance = largest_difference(numbers(exact), numbers(rounded))
        self._squares[key] += distance**2 / SAMPLES

    def __getitem__(self, key: Any) -> float:
        """Returns the standard deviation; 0 for what no run has changed."""
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
        """Prepares to compare.

        Args:
          before: the numbers of all arrays in the arguments before the call, by name.
          on_device: what one device computes.
          spread: how far rounding errors move that.
          on_mesh: what the mesh computes.
          rounding: the errors of single arrays.
          mesh: the mesh.
        """
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
        """Returns a line if an array of the mesh differs from that of one device, else nothing."""
        if name in self._on_device.arrays:
            expected = numbers(self._on_device.arrays[name])
            limit = self._limit(self._on_device.arrays[name], name)
        else:  # only the mesh has it, so it is wrong
            expected, limit = np.array(np.nan), 0.0
        # Each shard is compared, as replicas may differ, of which `np.asarray` shows only one.
        shards = _shards_of(array)
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
        """
        # If what the step returns is right, a wrong output on Manual axes is a term of a sum.
        returns_something = any(name.startswith(RESULT) for name in self._on_mesh.arrays)
        is_result_wrong = any(line.startswith(f"  {RESULT}") for line in lines)
        is_result_right = returns_something and not is_result_wrong
        return (
            self._first_wrong_site(backward=False, with_manual=not is_result_right)
            or self._first_wrong_site(backward=True, with_manual=True)
            or self._first_wrong_site(backward=False, with_manual=True)
            or self._first_wrong_owner(lines)
        )

    def _first_wrong_owner(self, lines: list[str]) -> str:
        """Describes the module whose own arrays differ, if all that modules exchange is right.

        It changed its own state wrongly, or computed the wrong gradient of its parameters; if
        several did, it was the update. Each line is ``  name: how it differs``.
        """
        text = "is the first module with an array that differs"
        names = {line.split(": ")[0].strip() for line in lines}
        for site in self._on_mesh.sites:
            if names.intersection(site.states):
                return f"  {site.module} {text}"
        # By label, "model.up (Linear)", the path.
        paths = {site.module: site.module.split(" ")[0] for site in self._on_mesh.sites}
        owners = set()  # the innermost module of each array
        for name in names:
            enclosing = [label for label, path in paths.items() if name.startswith(f"{path}.")]
            if enclosing:
                owners.add(max(enclosing, key=len))
        if len(owners) == 1:
            return f"  {owners.pop()} {text}"
        return "  outside of modules: their outputs and gradients are the same"

    def _first_wrong_site(self, backward: bool, with_manual: bool) -> str:
        """Describes the first site with a wrong value, or gradient; empty if there is none.

        A wrong output means that the module is wrong; a wrong input before it, what runs outside.

        Args:
          backward: look at gradients, in the order of the backward pass, where what a module
            computes is the gradient of its input.
          with_manual: look also at sites on Manual axes, outside of modules that are right.
        """
        sites = self._on_mesh.sites
        computed_side = "input" if backward else "output"
        errors: dict[int, _Error] = {}  # by the number of the site, where it is known
        for number in range(len(sites)):
            error = self._site_error(number, backward)
            if error is not None:
                errors[number] = error
        wrong = [number for number, error in errors.items() if error.is_wrong]
        # Calls of modules are named by their first site; sites of calls in it are in between.
        checked_calls = {sites[i].start for i in errors if sites[i].side == computed_side}
        wrong_calls = {sites[i].start for i in wrong if sites[i].side == computed_side}
        right_calls = checked_calls - wrong_calls
        last_site = {site.start: number for number, site in enumerate(sites)}
        for number in sorted(wrong, reverse=backward):
            site = sites[number]
            if site.axes:
                # What a right module computes from it is right, so it is a term of a sum.
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
        site, on_device = self._on_mesh.sites[number], self._on_device.sites[number]
        is_same_site = (site.module, site.side) == (on_device.module, on_device.side)
        if site.side == "mask" or not is_same_site:
            return None
        key = number, backward
        # In the order of devices: by their indices along the Manual axes.
        shards = dict(sorted(self._on_mesh.values.get(key, {}).items()))
        expected = [*self._on_device.values.get(key, {}).values()]
        if len(expected) != 1 or not shards:
            return None
        runs = [expected[0], *shards.values()]  # of one device, and of each of the mesh
        if len({*map(len, runs)}) > 1:
            return None
        errors = self._errors(key, *runs, axis_sizes=[index + 1 for index in max(shards)])
        if errors and any(error.is_wrong for error in errors) and len(shards) == 1:
            # The elements of a `vmap` are recorded in an order of their own on each mesh.
            values = _closest(*runs)
            errors_of_elements = self._errors(key, expected[0], values, axis_sizes=[])
            if not any(error.is_wrong for error in errors_of_elements or errors):
                errors = errors_of_elements
        # The first wrong one, if any.
        return max(errors, key=lambda error: error.is_wrong) if errors else None

    def _errors(
        self,
        key: tuple[int, bool],
        expected: Sequence[np.ndarray[Any, Any]],
        *shards: Sequence[np.ndarray[Any, Any]],
        axis_sizes: Sequence[int],
    ) -> list[_Error]:
        """Returns the error of each value of a site; empty if one of them is unknown.

        Args:
          key: the number of the site, and whether these are its gradients.
          expected: its values on one device.
          *shards: those of each device of the mesh.
          axis_sizes: the sizes of the Manual axes along which these have values of their own.
        """
        errors = []
        for index, (x, *parts) in enumerate(zip(expected, *shards, strict=True)):
            stacked = np.array([*map(numbers, parts)])  # (devices, shape of a shard…)
            # (size of each Manual axis…, shape of a shard…)
            by_axis = stacked.reshape(*axis_sizes, *stacked.shape[1:])
            distance = distance_of_shards(numbers(x), by_axis)
            if distance is None:
                return []
            errors.append(_Error(distance, self._limit(x, (*key, index))))
        return errors

    def has_masks(self) -> bool:
        """Whether a dropout drew a mask on each device."""
        return any(site.side == "mask" for site in self._on_mesh.sites)

    def shared_masks(self) -> list[str]:
        """Lists each dropout that drops the same elements of shards with different inputs."""
        axes_by_module = {}
        for pair in self._mask_pairs():
            kept = np.mean(pair.masks[0])
            # Masks with different keys are equal with this probability: that both keep an element,
            # or both drop it, for each element.
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
            text = _unequal_replicas(array, _shards_of(array), self._rounding.of_array(array))
            if text:
                differing.append(f"  {name}{text.replace(';', ':')}")
        unequal = [
            pair
            for pair in self._mask_pairs()
            if pair.has_equal_inputs and not np.array_equal(*pair.masks)
        ]
        if not differing or not unequal:
            return []
        first = unequal[0]
        axes = " and ".join(map(repr, first.axes))
        text = f"  {first.module} drops other elements of replicas, over {axes}."
        remedy = "Give replicas the same key: fold in only the axes over which inputs differ."
        return [f"{text}\n    {remedy}", *differing]

    def _mask_pairs(self) -> Iterator[_MaskPair]:
        """Yields the masks of each dropout on each two devices, in the order of execution.

        A mask says which elements are kept. It is a site of its own, next to the dropout's input.
        """
        for (number, backward), masks in sorted(self._on_mesh.values.items()):
            site = self._on_mesh.sites[number]
            if backward or site.side != "mask":
                continue
            inputs = self._on_mesh.values[number - 1, False]  # recorded right before the mask
            for device, other in itertools.combinations(masks, 2):
                indices = zip(site.axes, device, other, strict=True)  # along the Manual axes
                yield _MaskPair(
                    module=site.module,
                    axes=[axis for axis, i, j in indices if i != j],
                    masks=(np.array(masks[device]), np.array(masks[other])),
                    has_equal_inputs=np.array_equal(inputs[device], inputs[other]),
                )


def _closest(
    expected: Sequence[np.ndarray[Any, Any]], found: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Returns for each expected value the closest of those found; each is used once."""
    remaining, chosen = [*found], []
    for x in expected:
        distances = [largest_difference(numbers(x), numbers(y)) for y in remaining]
        chosen.append(remaining.pop(int(np.argmin(np.nan_to_num(distances, nan=np.inf)))))
    return chosen


def _shards_of(array: jax.Array) -> list[_Shard]:
    """Returns all shards of an array, replicas as well, each after its index in the array."""
    return [(shard.index, numbers(shard.data)) for shard in array.addressable_shards]


def _unequal_replicas(array: jax.Array, shards: list[_Shard], limit: float) -> str:
    """Says so, if devices differ by more than a limit in the same part of an array; else empty.

    Such as ``; its replicas over 'data' are not equal``, the end of a line about the array.
    """
    # By index as text, as slices have a hash from Python 3.12 on only; of replicas the first stays.
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
    """Says so, if a wrong array is the right one times, or over, the sizes of mesh axes; or empty.

    Such as ``; 4 times as large: summed once too often over 'model'``.

    Args:
      x: the wrong array.
      expected: the right one.
      limit: by how much they may differ.
      mesh: the mesh.
    """
    if x.shape != expected.shape or not np.isfinite(x).all() or not np.isfinite(expected).all():
        return ""
    largest = np.abs(expected).max(initial=0)
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    for count in range(1, len(axes) + 1):  # few axes first: the simplest explanation
        for chosen in itertools.combinations(axes, count):
            factor = int(np.prod([mesh.shape[axis] for axis in chosen]))
            names = " and ".join(map(repr, chosen))
            if largest_difference(x, factor * expected) <= factor * limit:
                return f"; {factor} times as large: summed once too often over {names}"
            # If the limit is larger than the array, zeros would be a multiple as well.
            if largest_difference(x * factor, expected) <= factor * limit < largest:
                return f"; {factor} times too small: not summed over {names}, or divided twice"
    return ""


def unequal_runs(first: Outcome, second: Outcome) -> list[str]:
    """Lists what two runs of one program on one mesh have not in common, bit for bit.

    That is the first site that differs, and all arrays that do.
    """
    lines = unequal_arrays(first.arrays, second.arrays)
    for number, site in enumerate(first.sites):
        for backward in (False, True):
            values = first.values.get((number, backward), {})  # by device
            others = second.values.get((number, backward), {})
            if not all(all_equal(values[device], others.get(device, [])) for device in values):
                what = "gradient" if backward else site.side
                return [f"  the {what} of {site.module} differs first", *lines]
    return lines
