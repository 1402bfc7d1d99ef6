"""Measuring several ways to do the same, so that the machine's moods hit all of them alike."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

Way: TypeAlias = Callable[[], Any]

# Calls in a loop: so many rounds, in which each way is called so many times, or for so long.
ROUNDS, GROUP, LONG = 15, 100, 3e5  # microseconds
# A way so many times slower than the floor is measured in every 10th repeat, or 3 times in all.
SLOW, VERY_SLOW = 50, 1000
TOLERANCE = 1e-3
ENOUGH = 1e5  # microseconds to find out how slow a way is


class Unavailable(NamedTuple):
    """A way that there is not, and why."""

    reason: str


class Figure(NamedTuple):
    """What was measured: the median, the quartiles around it, and the maximum."""

    median: float
    low: float
    high: float
    repeats: int
    most: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        if len(values) < 2:
            return cls(values[0], values[0], values[0], len(values), values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values), max(values))


Ways: TypeAlias = Mapping[Any, Way | Unavailable]
Figures: TypeAlias = dict[Any, Figure | Unavailable]


class Times(NamedTuple):
    """Microseconds of calls, until they return and until their results are ready."""

    returned: Figures
    ready: Figures
    # the same of each call of a group without anything in between; empty if not measured
    loop_returned: Figures
    loop_ready: Figures


def time_calls(
    ways: Ways,
    repeats: int,
    floor: Any,
    ours: Sequence[Any],
    *,
    compare: bool = True,
    loop: bool = True,
    turns: bool = True,
) -> Times:
    """How long calls take after other work, as the second of two calls in turns, and in a loop.

    Args:
      ways: what to call.
      repeats: how often.
      floor: the name of the way that the others are compared with.
      ours: the names of those that must not fail; any other becomes ``Unavailable``.
      compare: whether the first call of each way has to give the same result.
      loop: whether they are measured in a loop.
      turns: whether they are measured after other work.
    """
    missing: Figures = {n: way for n, way in ways.items() if isinstance(way, Unavailable)}
    strides: dict[Any, int] = {}
    counts: dict[Any, int] = {}
    for name in (floor, *(n for n in ways if n != floor and n not in missing)):
        try:
            result, microseconds = _warm_up(ways[name])
        except Exception as error:
            if name == floor or name in ours:
                raise
            missing[name] = Unavailable(_in_short(error))
            continue
        if name == floor:
            expected, least = result, microseconds
        if compare:
            np.testing.assert_allclose(result, expected, TOLERANCE, TOLERANCE, err_msg=str(name))
        strides[name] = _stride(microseconds / least, repeats)
        counts[name] = max(3, min(GROUP // strides[name], repeats, int(LONG / microseconds)))
    found: list[Figures] = []
    for measure, own, wanted in ((_take_turns, strides, turns), (_in_groups, counts, loop)):
        times = measure(ways, own, repeats) if wanted else {}
        found += [
            {n: missing[n] if n in missing else Figure.of([t[i] for t in times[n]]) for n in ways}
            if wanted
            else {}
            for i in (0, 1)
        ]
    return Times(*found)


def _in_groups(
    ways: Ways, counts: Mapping[Any, int], repeats: int
) -> dict[Any, list[tuple[float, float]]]:
    times: dict[Any, list[tuple[float, float]]] = {name: [] for name in counts}
    for _, name in _turns(times, min(ROUNDS, repeats)):
        count = counts[name]

        def group(way: Any = ways[name], count: int = count) -> Any:
            for _ in range(count):
                result = way()
            return result

        _time(ways[name])
        returned, ready = _time(group)
        times[name].append((returned / count, ready / count))
    return times


def _take_turns(
    ways: Ways, strides: Mapping[Any, int], repeats: int
) -> dict[Any, list[tuple[float, float]]]:
    times: dict[Any, list[tuple[float, float]]] = {name: [] for name in strides}
    for repeat, name in _turns(strides, repeats):
        if repeat % strides[name] == 0:
            # After the other ways the processor's caches hold nothing of this one. The first
            # call is then up to three times as slow, which would hide what a way itself costs.
            _time(ways[name])
            times[name].append(_time(ways[name]))
    return times


def time_first_calls(makers: Ways, repeats: int) -> Figures:
    """Microseconds of the first call of something new, while JAX has nothing in its caches.

    Args:
      makers: each makes what is then called once.
      repeats: how often.
    """
    missing: Figures = {n: make for n, make in makers.items() if isinstance(make, Unavailable)}
    times: dict[str, list[float]] = {name: [] for name in makers if name not in missing}
    for repeat, name in _turns(times, repeats + 1):
        jax.clear_caches()
        call = makers[name]()
        with _without_gc():
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        if repeat > 0:  # the first time of all also imports and initialises
            times[name].append(seconds * 1e6)
    return {n: missing[n] if n in missing else Figure.of(times[n]) for n in makers}


def _turns(names: Iterable[Any], repeats: int) -> Iterator[tuple[int, Any]]:
    """All names in each repeat, each time beginning with another one."""
    order = list(names)
    for repeat in range(repeats):
        start = repeat % len(order)
        for name in order[start:] + order[:start]:
            yield repeat, name


def _warm_up(way: Way) -> tuple[Any, float]:
    """The result of the first call, and how long a later one takes at best."""
    first = jax.device_get(way())
    times = [_time(way) for _ in range(3)]  # some compile once more in their second call
    while len(times) < 10 and sum(ready for _, ready in times) < ENOUGH:
        times.append(_time(way))
    return first, min(returned for returned, _ in times)


def _stride(ratio: float, repeats: int) -> int:
    if ratio < SLOW:
        return 1
    return min(10, repeats) if ratio < VERY_SLOW else math.ceil(repeats / 3)


def _time(call: Way) -> tuple[float, float]:
    start = time.perf_counter()
    result = call()
    returned = time.perf_counter()
    jax.block_until_ready(result)
    ready = time.perf_counter()
    return (returned - start) * 1e6, (ready - start) * 1e6


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:100]
