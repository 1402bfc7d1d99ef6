"""Finds what differs between a step on one device and on a mesh, and in which module first.

The records of one call of the step (`Outcome`, in `recording.py`) are compared in the order in
which the modules ran, backwards for gradients, so the first difference is where the error is. A
*site* is an array that a call of a module takes or returns (``side`` "input" or "output"; "mask" is
what a dropout keeps). Sites have numbers in the order of execution. ``start`` is the number of the
first site of the call, and ``axes`` are the Manual mesh axes, along which each device has a value
of its own. ``values`` maps ``(number, backward)`` to the values of each device, where ``backward``
is True for the gradients of the site. Each device has a list of values, because a call in a loop
takes and returns several.

An array may differ by its *limit*, the sum of two errors: `Rounding` derives the rounding error of
the array's own last sum, and `Spread` measures how the errors of earlier values move the array.

Methods that describe what is wrong return a text or a list of lines, which is empty if nothing is
wrong. Only `_first_wrong_owner` always returns a text.

From other modules: an `Outcome` is what one call of a step computed: ``arrays`` (the returned
arrays and those of the arguments, by expression), ``sites`` and ``values``. `RESULT` is the
beginning of the expressions for returned arrays. `numbers` returns an array as float64 or
complex128. `Rounding.of_array` returns the rounding error of an array, as an absolute number.
`largest_difference` returns 0 for equal arrays (equal NaN included) and NaN if
only one of two elements is NaN; `distance_of_shards` returns None if no layout of the shards has
the shape of the array.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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

# Two equal masks count as one mask if different keys would give equal masks with this probability
# at most.
_CHANCE = 1e-6
# The index of a shard in its array, and its numbers.
_Shard: TypeAlias = tuple[Any, np.ndarray[Any, Any]]


class _Error(NamedTuple):
    """How far an array is from the same one on one device, and how far it may be."""

    distance: float  # NaN where only one of them is NaN
    limit: float

    @property
    def is_wrong(self) -> bool:
        """Whether the array is too far from the same one on one device.

        A distance of NaN is wrong, so this is not ``distance > limit``. A distance of 0 is right
        even if the limit is NaN, because rounding errors can make an array NaN in the runs from
        which the limit is computed.
        """
        return self.distance != 0 and not self.distance <= self.limit

    def __str__(self) -> str:
        return f"max error {self.distance:.2g}, tolerance {self.limit:.2g}"


class Spread:
    """How far the arrays and records of rounded runs are from those of an exact run.

    Each array and each record gets an estimate of its standard deviation: the root of the mean
    square, over the runs, of its largest difference in a run. The estimate is NaN where only one
    of two runs is NaN. The key of an array is its name. The key of a record is (number of the site,
    backward, number of the call in a loop).

    Attributes:
      _mean_squares: key of an array or a record → the mean square. Keys without one stand for 0.
    """

    def __init__(self, exact: Outcome, rounded: Iterable[Outcome]):
        """Compares runs on one device: an exact one, and `SAMPLES` with rounding errors."""
        self._mean_squares: dict[Any, float] = defaultdict(float)
        for outcome in rounded:
            for name, array in exact.arrays.items():
                self._add(name, array, outcome.arrays[name])
            for (number, backward), records in exact.values.items():
                rounded_records = outcome.values.get((number, backward), {})
                for device, values in records.items():  # one device, because the runs use one
                    # `zip` is not strict, because a run in which a loop ended earlier has fewer
                    # records.
                    pairs = zip(values, rounded_records.get(device, ()), strict=False)
                    for index, (value, rounded_value) in enumerate(pairs):
                        self._add((number, backward, index), value, rounded_value)

    def _add(self, key: Any, exact: Array, rounded: Array) -> None:
        """Adds what one of the rounded runs contributes to the mean square of an array."""
        distance = largest_difference(numbers(exact), numbers(rounded))
        self._mean_squares[key] += distance**2 / SAMPLES

    def __getitem__(self, key: Any) -> float:
        """Returns the standard deviation of an array or record; 0 if no run has changed it."""
        return float(self._mean_squares.get(key, 0.0) ** 0.5)


class _MaskPair(NamedTuple):
    """The masks of one dropout on two devices: which elements it keeps."""

    module: str
    axes: list[str]  # the Manual axes along which the two devices have different indices
    masks: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    has_equal_inputs: bool


class Comparison:
    """Compares a call of a step on a mesh with the same call on one device.

    The call on one device runs exactly, and with rounding errors for the limits. The steps have
    run before: this class only compares.

    Attributes:
      _on_device: what one device computed in the exact run.
      _on_mesh: what the mesh computed.
      _spread: how far rounding errors of earlier values moved each array and record of one device,
        by the keys of `Spread`.
      _rounding: the rounding errors of the last sum of each array.
      _before: the numbers of the arguments' arrays before the call, by the names of arrays.
      _mesh: the mesh, whose axes the descriptions name.
    """

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
          spread: how far rounding errors in the arrays between modules moved the results of one
            device.
          on_mesh: what the mesh computes.
          rounding: the rounding errors of the last sum of each array, which need no other run.
          mesh: the mesh.
        """
        self._on_device, self._spread, self._on_mesh = on_device, spread, on_mesh
        self._before, self._rounding, self._mesh = before, rounding, mesh

    def _limit(self, x: Array, key: Any) -> float:
        """Returns by how much an array may differ from ``x``, its value on one device.

        Args:
          x: the array on one device.
          key: the key of the array or record in `Spread`.
        """
        return self._rounding.of_array(x) + QUANTILE * self._spread[key]

    def differences(self) -> list[str]:
        """Describes the first wrong module, and below it each array that differs after the call.

        The list is empty if no array differs.
        """
        lines = {}
        for name, array in self._on_mesh.arrays.items():
            if line := self._difference(name, array):
                lines[name] = line
        for name in self._on_device.arrays.keys() - self._on_mesh.arrays.keys():
            lines[name] = f"  {name}: missing; one device returns it"
        return [self._first_wrong_module(lines.keys()), *lines.values()] if lines else []

    def _difference(self, name: str, array: jax.Array) -> str:
        """Describes how an array of the mesh differs from the one of one device, in a line.

        The text is empty if the array does not differ.

        Args:
          name: the expression for the array.
          array: the array on the mesh.
        """
        if name in self._on_device.arrays:
            expected = numbers(self._on_device.arrays[name])
            # The shapes differ if the step returns the values of all devices joined, for example.
            if array.shape != expected.shape:
                return f"  {name}: shape {array.shape}, but {expected.shape} on one device"
            limit = self._limit(self._on_device.arrays[name], name)
        else:
            # Only the mesh has this array. It is compared with NaN, so any number in it is wrong.
            expected, limit = np.array(np.nan), 0.0
        # Each shard is compared, because replicas may differ and `np.asarray` shows one of them.
        shards = _shards_of(array)
        distances = []
        for index, shard in shards:
            is_scalar = expected.ndim == 0  # true for the NaN from above as well
            expected_part = expected if is_scalar else expected[index]
            distances.append(largest_difference(shard, expected_part))
        # `np.max` returns NaN if any distance is NaN; `max` would lose a NaN that is not the first.
        error = _Error(float(np.max(distances)), limit)
        if not error.is_wrong:
            return ""
        line = f"  {name}: {error}"
        # The changes of the array are compared, because a sum over the wrong axes multiplies what
        # the step adds to an array, not the array. An array that the step returns was not there
        # before, so its change is the array itself.
        start = self._before.get(name, np.zeros_like(expected))
        line += _multiple(numbers(array) - start, expected - start, limit, self._mesh)
        unequal = _unequal_replicas(array, shards, limit)
        return f"{line}; {unequal}" if unequal else line

    def _first_wrong_module(self, wrong_arrays: Set[str]) -> str:
        """Describes the first module, in the order of execution, that computes something else.

        On Manual axes a device may hold a term of a sum that comes later, so a wrong value on
        Manual axes counts last, and only if nothing else is wrong.

        Args:
          wrong_arrays: the names of the arrays that differ after the call.
        """
        # If what the step returns is right, a wrong output on Manual axes is a term of a sum.
        returned = {name for name in self._on_mesh.arrays if name.startswith(RESULT)}
        is_result_right = bool(returned) and returned.isdisjoint(wrong_arrays)
        # What goes wrong forward is wrong backward as well, so outputs come first. Each of these
        # texts is empty if nothing is wrong there.
        return (
            self._first_wrong_site(backward=False, with_manual=not is_result_right)
            or self._first_wrong_site(backward=True, with_manual=True)
            # Outputs that may be terms of a sum come only now.
            or self._first_wrong_site(backward=False, with_manual=True)
            or self._first_wrong_owner(wrong_arrays)
        )

    def _first_wrong_owner(self, wrong_arrays: Set[str]) -> str:
        """Describes the module whose own arrays differ, if all that modules exchange is right.

        The module changed its own state wrongly, or the gradient of its parameters is wrong. If
        arrays of several modules differ, the update of all of them is wrong. The update runs
        outside of modules, so the text says that instead.

        Args:
          wrong_arrays: the names of the arrays that differ, such as ``model.up.kernel``.
        """
        text = "is the first module with an array that differs"
        sites = self._on_mesh.sites
        for site in sites:
            if not wrong_arrays.isdisjoint(site.states):
                return f"  {site.module} {text}"
        # The label of a module, "model.up (Linear)", is mapped to its path, "model.up".
        paths = {site.module: site.module.split(" ")[0] for site in sites}
        owners = set()  # the innermost module of each array
        for name in wrong_arrays:
            enclosing = [label for label, path in paths.items() if name.startswith(f"{path}.")]
            if enclosing:
                owners.add(max(enclosing, key=len))
        if len(owners) == 1:
            return f"  {owners.pop()} {text}"
        return "  outside of modules: their outputs and gradients are the same"

    def _first_wrong_site(self, backward: bool, with_manual: bool) -> str:
        """Describes the first site with a wrong value, or gradient; empty if there is none.

        If the output of a module is wrong first, the module is wrong. If an input is wrong first,
        the code that runs between modules is wrong.

        Args:
          backward: look at gradients, in the order of the backward pass, in which a module computes
            the gradient of its input.
          with_manual: look also at sites on Manual axes, except in calls whose results are right.
        """
        sites = self._on_mesh.sites
        # Going backwards, a module takes the gradients of outputs and computes those of inputs.
        computed_side = "input" if backward else "output"
        errors: dict[int, _Error] = {}  # the known errors by the number of their site
        for number in range(len(sites)):
            error = self._site_error(number, backward)
            if error is not None:
                errors[number] = error
        wrong = [number for number, error in errors.items() if error.is_wrong]
        # In a call whose results are right, nothing can be wrong. A site on Manual axes that
        # differs inside such a call is a term of a sum that the call has computed.
        right_calls = self._right_calls(errors, computed_side)
        for number in sorted(wrong, reverse=backward):
            site = sites[number]
            is_within_right_call = any(number in call for call in right_calls)
            if site.axes and (is_within_right_call or not with_manual):
                continue
            if site.side == computed_side:
                what = "gradient" if backward else "output"
                text = f"{site.module} is the first module whose {what} differs"
            else:
                place = "after" if backward else "before"
                text = f"outside of modules, {place} {site.module}"
            return f"  {text}: {errors[number]}\n    inputs: {', '.join(site.inputs)}"
        return ""

    def _right_calls(self, errors: Mapping[int, _Error], computed_side: str) -> list[range]:
        """Returns the calls of modules whose results are right, each as its range of sites.

        The sites of the calls inside a call are in its range: if `outer` calls `inner`, the sites
        belong to outer, inner, inner, outer.

        Args:
          errors: the known errors, by the number of their site.
          computed_side: "output"; for gradients "input", because a module computes those.
        """
        # A call is identified by the number of its first site, ``start``.
        sites = self._on_mesh.sites
        last_site = {site.start: number for number, site in enumerate(sites)}
        checked_calls, wrong_calls = set(), set()
        for number, error in errors.items():
            if sites[number].side == computed_side:
                checked_calls.add(sites[number].start)
                if error.is_wrong:
                    wrong_calls.add(sites[number].start)
        return [range(start, last_site[start] + 1) for start in checked_calls - wrong_calls]

    def _site_error(self, number: int, backward: bool) -> _Error | None:
        """Returns the error of the first wrong value of a site, or of its first value.

        A site in a loop has several values. The result is None if the errors are unknown: the site
        is a mask, the two steps have different sites or recorded different numbers of values, or no
        layout of the shards has the shape of the value on one device.
        """
        site, on_device = self._on_mesh.sites[number], self._on_device.sites[number]
        is_same_site = (site.module, site.side) == (on_device.module, on_device.side)
        if site.side == "mask" or not is_same_site:
            return None
        key = number, backward
        # The keys are the indices of the devices along the Manual axes, sorted: (0, 0), (0, 1), …
        # Without Manual axes there is one key, ().
        shards = dict(sorted(self._on_mesh.values.get(key, {}).items()))
        runs_on_device = [*self._on_device.values.get(key, {}).values()]
        if len(runs_on_device) != 1 or not shards:
            return None
        [expected] = runs_on_device
        if any(len(values) != len(expected) for values in shards.values()):
            return None
        axis_sizes = [last_index + 1 for last_index in max(shards)]
        errors = self._errors_of_values(key, expected, [*shards.values()], axis_sizes)
        wrong = [error for error in errors if error.is_wrong]
        if wrong and len(shards) == 1:
            # Each mesh records the elements of a `vmap` in a different order. So the values are
            # right if they are right in an order in which each is next to the closest one.
            [values] = shards.values()
            reordered = self._errors_of_values(key, expected, [_closest(expected, values)], [])
            if reordered and not any(error.is_wrong for error in reordered):
                errors, wrong = reordered, []
        return next(iter(wrong or errors), None)

    def _errors_of_values(
        self,
        key: tuple[int, bool],
        expected: Sequence[np.ndarray[Any, Any]],
        shards: Sequence[Sequence[np.ndarray[Any, Any]]],
        axis_sizes: Sequence[int],
    ) -> list[_Error]:
        """Returns the error of each value of a site; empty if one of them is unknown.

        Args:
          key: the number of the site, and whether these are its gradients.
          expected: its values on one device, in the order in which a loop computes them.
          shards: for each device of the mesh, its shards of the same values.
          axis_sizes: the sizes of the Manual axes along which devices have shards of their own.
        """
        errors = []
        for index, (x, *parts) in enumerate(zip(expected, *shards, strict=True)):
            stacked = np.array([*map(numbers, parts)])  # (devices, shape of a shard…)
            # (size of each Manual axis…, shape of a shard…)
            by_axis = stacked.reshape(*axis_sizes, *stacked.shape[1:])
            distance = distance_of_shards(numbers(x), by_axis)
            if distance is None:  # no layout of these shards has the shape of `x`
                return []
            errors.append(_Error(distance, self._limit(x, (*key, index))))  # a key of `Spread`
        return errors

    def has_masks(self) -> bool:
        """Whether a dropout drew a mask on each device."""
        return any(site.side == "mask" for site in self._on_mesh.sites)

    def shared_masks(self) -> list[str]:
        """Lists each dropout that drops the same elements of shards with different inputs."""
        axes_by_module = {}  # the axes of the last pair of devices that shares masks
        for pair in self._mask_pairs():
            kept_share = np.mean(pair.masks[0])
            # Masks from different keys are equal with this probability, because both keep or both
            # drop each element. Small masks are often equal by chance, so they prove nothing.
            chance = (kept_share**2 + (1 - kept_share) ** 2) ** np.size(pair.masks[0])
            if np.array_equal(*pair.masks) and chance <= _CHANCE and not pair.has_equal_inputs:
                axes_by_module[pair.module] = pair.axes
        text = "drops the same elements of shards with different inputs, over"
        remedy = "Give each its own key: jax.random.fold_in(key, jax.lax.axis_index(...))."
        return [
            f"  {module} {text} {' and '.join(map(repr, axes))}.\n    {remedy}"
            for module, axes in axes_by_module.items()
        ]

    def masks_of_replicas(self, dropping: Outcome) -> list[str]:
        """Describes the first dropout with unequal masks, and each array with unequal replicas.

        The list is empty if no array has unequal replicas, or no dropout has unequal masks for
        equal inputs. Such masks are no mistake by themselves, because the values may be averaged
        over the devices later, or may not be declared replicated. The step has therefore run once
        more with masks that drop elements, and the arrays of this run are examined.

        Args:
          dropping: what the mesh computed in that run.
        """
        differing = []
        for name, array in dropping.arrays.items():
            text = _unequal_replicas(array, _shards_of(array), self._rounding.of_array(array))
            if text:
                differing.append(f"  {name}: {text}")
        # Only dropouts with equal inputs count, because different inputs make replicas differ too.
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

        A mask says which elements are kept. The mask has a site of its own, the next one after the
        site of the dropout's input.
        """
        for (number, backward), masks in sorted(self._on_mesh.values.items()):
            site = self._on_mesh.sites[number]
            if backward or site.side != "mask":
                continue
            inputs = self._on_mesh.values[number - 1, False]
            for device, other in itertools.combinations(masks, 2):
                # A device is named by its indices along the Manual axes, such as (0, 1).
                indices = zip(site.axes, device, other, strict=True)
                yield _MaskPair(
                    module=site.module,
                    axes=[axis for axis, i, j in indices if i != j],
                    masks=(np.array(masks[device]), np.array(masks[other])),
                    has_equal_inputs=np.array_equal(inputs[device], inputs[other]),
                )


def _closest(
    expected: Sequence[np.ndarray[Any, Any]], candidates: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Returns for each expected value the closest candidate; each candidate is used once."""
    remaining, chosen = [*candidates], []
    for x in expected:
        distances = [largest_difference(numbers(x), numbers(y)) for y in remaining]
        chosen.append(remaining.pop(int(np.argmin(np.nan_to_num(distances, nan=np.inf)))))
    return chosen


def _shards_of(array: jax.Array) -> list[_Shard]:
    """Returns (index in the array, numbers) for each shard of an array, replicas included."""
    return [(shard.index, numbers(shard.data)) for shard in array.addressable_shards]


def _unequal_replicas(array: jax.Array, shards: list[_Shard], limit: float) -> str:
    """Says whether replicas of one part of an array differ by more than a limit.

    The text is the end of a line about the array, for example ``its replicas over 'data' are not
    equal``. It is empty if the replicas are equal, or if the sharding names no mesh axes.
    """
    first_replicas: dict[str, np.ndarray[Any, Any]] = {}
    distances = []
    for index, shard in shards:
        # The key is the text of the index, because an index has slices, and slices have a hash from
        # Python 3.12 on only.
        replica = first_replicas.setdefault(str(index), shard)
        distances.append(largest_difference(shard, replica))
    is_unequal = any(_Error(distance, limit).is_wrong for distance in distances)
    if not is_unequal or not isinstance(array.sharding, NamedSharding):
        return ""
    # The array is declared replicated over all axes that its spec does not use.
    used = [*spec_axes(array.sharding.spec)]
    unused = [axis for axis in array.sharding.mesh.axis_names if axis not in used]
    return f"its replicas over {', '.join(map(repr, unused))} are not equal"


def _multiple(
    x: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], limit: float, mesh: Mesh
) -> str:
    """Says whether a wrong array is the right one, multiplied or divided by sizes of mesh axes.

    The text is the end of a line about the array, for example ``; 4 times as large: summed once too
    often over 'model'``. It is empty if the array is not such a multiple.

    Args:
      x: the wrong array.
      expected: the right one.
      limit: by how much a right array may differ from it.
      mesh: the mesh.
    """
    if x.shape != expected.shape or not np.isfinite(x).all() or not np.isfinite(expected).all():
        return ""
    largest = np.abs(expected).max(initial=0)
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    # Few axes come first, because they are the simplest explanation.
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            factor = int(np.prod([mesh.shape[axis] for axis in chosen]))
            names = " and ".join(map(repr, chosen))
            # A factor multiplies the error of the array as well, so the limit grows with it.
            if largest_difference(x, factor * expected) <= factor * limit:
                return f"; {factor} times as large: summed once too often over {names}"
            # The limit has to be below the largest element, because otherwise zeros would pass for
            # the array divided by any factor.
            if largest_difference(x * factor, expected) <= factor * limit < largest:
                return f"; {factor} times too small: not summed over {names}, or divided twice"
    return ""


def unequal_runs(first: Outcome, second: Outcome) -> list[str]:
    """Lists where two runs of one program on one mesh are not equal bit for bit.

    The list is empty if the runs are equal. The first line names the first site that differs, if
    any site does. A line for each array that differs follows.
    """
    lines = unequal_arrays(first.arrays, second.arrays)
    # The step computes the values of all sites in order, then the gradients in reverse order.
    numbers_of_sites = range(len(first.sites))
    order = [(i, False) for i in numbers_of_sites] + [(i, True) for i in reversed(numbers_of_sites)]
    for key in order:
        first_values = first.values.get(key, {})  # by device; empty if the site has no gradient
        second_values = second.values.get(key, {})
        # A device that recorded nothing in the second run differs. No device records values in the
        # second run alone, because the program is the same.
        if any(
            not all_equal(x, second_values.get(device, [])) for device, x in first_values.items()
        ):
            number, backward = key
            site = first.sites[number]
            what = "gradient" if backward else site.side
            return [f"  the {what} of {site.module} differs first", *lines]
    return lines
