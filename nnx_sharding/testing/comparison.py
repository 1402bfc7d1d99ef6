"""Finds what differs between a step on one device and on a mesh, and in which module first.

The records of one call of the step (`Outcome`, in `recording.py`) are compared in the order in
which the modules ran, backwards for gradients, so the first difference is where the error is. A
*site* is an array that a call of a module takes or returns (``side`` "input" or "output"), or the
draws of a dropout ("key" or "mask"). Sites have numbers in the order of execution. ``start`` is the
number of the first site of the call, and ``axes`` are the Manual mesh axes, along which each device
has a value of its own. ``values`` maps ``(number, backward)`` to the values of each device, where
``backward`` is True for the gradients of the site. Each device has a list of values, because a call
in a loop takes and returns several. ``draws`` maps the number of a site to the `Draw` records of
each device in the same way: ``source`` is the random key, or the mask where the key is unknown, and
``input`` the array whose elements are dropped.

An array may differ by its *limit*, the sum of two errors: `Rounding` derives the rounding error of
the array's own last sum, and `Spread` measures how the errors of earlier values move the array.

Methods that describe what is wrong return a text or a list of lines, which is empty if nothing is
wrong. Only `_first_wrong_owner` always returns a text.
"""

from __future__ import annotations

import collections
import itertools
import math
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
from .recording import RESULT, Outcome, Site
from .rounding import QUANTILE, SAMPLES, Rounding

# Two equal masks of which the keys are unknown count as one mask if different keys would give equal
# masks with this probability at most.
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


# Mesh axes along which two devices have different indices.
_Axes: TypeAlias = "frozenset[str]"
# The bytes of the sources of draws → the bytes of the inputs that each is used for.
_Uses: TypeAlias = "dict[bytes, set[bytes]]"


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
        is one of draws, the two steps have different sites or recorded different numbers of values,
        or no layout of the shards has the shape of the value on one device.
        """
        site, on_device = self._on_mesh.sites[number], self._on_device.sites[number]
        is_same_site = (site.module, site.side) == (on_device.module, on_device.side)
        if not is_same_site:
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
            by_axis = stacked.reshape((*axis_sizes, *stacked.shape[1:]))
            distance = distance_of_shards(numbers(x), by_axis)
            if distance is None:  # no layout of these shards has the shape of `x`
                return []
            errors.append(_Error(distance, self._limit(x, (*key, index))))  # a key of `Spread`
        return errors

    def has_draws(self) -> bool:
        """Whether a dropout has drawn a mask on each device."""
        return bool(self._on_mesh.draws)

    def shared_masks(self) -> list[str]:
        """Lists each dropout that drops the same elements of shards with different inputs."""
        axes_by_module: dict[str, list[_Axes]] = defaultdict(list)
        for site, axes, uses, other_uses in self._pairs_of_devices():
            # Keys are never equal by chance, but small masks often are, so they prove nothing.
            sources = {
                source
                for source in uses.keys() & other_uses.keys()
                if site.side == "key" or _chance_of_equal(source) <= _CHANCE
            }
            if any(uses[source] != other_uses[source] for source in sources):
                axes_by_module[site.module].append(axes)
        text = "drops the same elements of shards with different inputs, over"
        lines = []
        for module, found in axes_by_module.items():
            names = _fewest(found, self._mesh)
            index = f"jax.lax.axis_index({repr(names[0]) if len(names) == 1 else tuple(names)})"
            remedy = f"Give each its own key: jax.random.fold_in(key, {index})."
            lines.append(f"  {module} {text} {' and '.join(map(repr, names))}.\n    {remedy}")
        return lines

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
        axes_by_module: dict[str, list[_Axes]] = defaultdict(list)
        for site, axes, uses, other_uses in self._pairs_of_devices():
            inputs, other_inputs = (set[bytes]().union(*x.values()) for x in (uses, other_uses))
            if inputs == other_inputs and uses != other_uses:
                axes_by_module[site.module].append(axes)
        if not differing or not axes_by_module:
            return []
        module, found = next(iter(axes_by_module.items()))
        axes_text = " and ".join(map(repr, _fewest(found, self._mesh)))
        text = f"  {module} drops other elements of replicas, over {axes_text}."
        remedy = "Give replicas the same key: fold in only the axes over which inputs differ."
        return [f"{text}\n    {remedy}", *differing]

    def _pairs_of_devices(self) -> Iterator[tuple[Site, _Axes, _Uses, _Uses]]:
        """Yields what each two devices draw in a dropout, in the order of execution.

        Yields:
          (the site of the draws, the Manual axes along which the two devices have different
          indices, the draws of the one, those of the other).
        """
        for number, draws in sorted(self._on_mesh.draws.items()):
            site = self._on_mesh.sites[number]
            uses_by_device: dict[tuple[int, ...], _Uses] = {}
            for device, records in draws.items():
                uses: _Uses = defaultdict(set)
                for draw in records:  # A call in a loop has several.
                    uses[draw.source.tobytes()].add(draw.input.tobytes())
                uses_by_device[device] = uses
            for device, other in itertools.combinations(uses_by_device, 2):
                # A device is named by its indices along the Manual axes, such as (0, 1).
                indices = zip(site.axes, device, other, strict=True)
                axes = frozenset(axis for axis, i, j in indices if i != j)
                yield site, axes, uses_by_device[device], uses_by_device[other]


def _chance_of_equal(mask: bytes) -> float:
    """Returns the probability that masks from different keys are equal, for the bytes of one."""
    kept = np.frombuffer(mask, bool)
    if not kept.size:
        return 1.0
    share = float(kept.mean())
    # Both masks keep an element, or both drop it.
    return float((share**2 + (1 - share) ** 2) ** kept.size)


def _fewest(found: Sequence[_Axes], mesh: Mesh) -> list[str]:
    """Returns the axes that explain pairs of devices, in the order of the mesh.

    Devices that differ along 'data' and 'model' say no more than devices that differ along 'data'
    alone, if there are such pairs. So a set of axes that contains another one does not count.

    Args:
      found: for each pair of devices, the axes along which they differ.
    """
    smallest = [axes for axes in found if not any(other < axes for other in found)]
    return [axis for axis in mesh.axis_names if any(axis in axes for axes in smallest)]


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
      limit: by how much a right array may differ from it.
    """
    if x.shape != expected.shape or not np.isfinite(x).all() or not np.isfinite(expected).all():
        return ""
    largest = np.abs(expected).max(initial=0)
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    # Few axes come first, because they are the simplest explanation.
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(sizes, count):
            factor = math.prod(sizes[axis] for axis in chosen)
            # A factor multiplies the error of the array as well, so the limit grows with it.
            if largest_difference(x, factor * expected) <= factor * limit:
                explanation = f"summed once too often {_sums_of(factor, sizes)}"
                return f"; {factor} times as large: {explanation}"
            # The limit has to be below the largest element, because otherwise zeros would pass for
            # the array divided by any factor.
            if largest_difference(x * factor, expected) <= factor * limit < largest:
                explanation = f"not summed, or divided twice, {_sums_of(factor, sizes)}"
                return f"; {factor} times too small: {explanation}"
    return ""


# The most sums over axes in one explanation of a factor.
_MAX_SUMS = 3


def _sums_of(factor: int, sizes: Mapping[str, int]) -> str:
    """Lists the mesh axes over which sums can make a factor, such as 4 on a mesh of 2 × 4.

    The text is then ``over 'model', or twice over 'data'``, because the number alone does not tell
    which one it was. Few sums come first.

    Args:
      factor: the product of the sizes of some axes.
      sizes: the sizes of the mesh axes, by name.
    """
    explanations = []
    most = max(_MAX_SUMS, len(sizes))
    for count in range(1, most + 1):
        for axes in itertools.combinations_with_replacement(sizes, count):
            if math.prod(sizes[axis] for axis in axes) == factor:
                explanations.append(collections.Counter(axes))
    # Each axis once is simpler than one axis several times.
    explanations.sort(key=lambda times: max(times.values()))
    texts = []
    for times in explanations:
        parts = []
        for count in sorted({*times.values()}):
            names = " and ".join(repr(axis) for axis in times if times[axis] == count)
            prefix = {1: "", 2: "twice "}.get(count, f"{count} times ")
            parts.append(f"{prefix}over {names}")
        texts.append(" and ".join(parts))
    return ", or ".join(texts)


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
        first_values = _records(first, *key)  # by device; empty if the site has no gradient
        second_values = _records(second, *key)
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


def _records(outcome: Outcome, number: int, backward: bool) -> dict[tuple[int, ...], list[Array]]:
    """Returns the values of a site, or the arrays of its draws, by device; empty for none."""
    records: Mapping[tuple[int, ...], Any] = outcome.values.get((number, backward), {})
    if not backward:
        records = records or outcome.draws.get(number, {})
    return {device: jax.tree.leaves(arrays) for device, arrays in records.items()}
