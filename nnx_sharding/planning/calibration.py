"""Measures the figures of the devices at hand, for estimates of the time of a step.

The fastest device does 10,000 times as many products per second as a virtual device of a CPU that
shares its cores with seven others, so no size suits both. A first product of small matrices says
how large the others may be, and each measurement repeats its calls as often as its *share* of the
time limit allows (`_Clock`). Arrays have a leading dimension of devices, so that each device
computes with matrices of its own, of ``side`` rows and columns.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..analysis.hardware import HARDWARE, Hardware
from ..transforms.jit import jit

_ROUNDS = 7  # at most, of one measurement; the median counts
_CALLS = 8  # in flight, as in training: waiting for each takes a GPU longer than a small program
_CHAIN = 8  # matrix products in one program
_SMALLEST_SIDE, _LARGEST_SIDE = 256, 4096  # of the matrices: in the first product, and at most
_SIZES = 7  # of all-gathers
_SHARES = 16  # parts of the time limit; each of the 13 measurements may repeat its calls for one
_STEPS = 3  # training steps, whose estimates are compared with their times
_STEP_FLOPS = 20  # a training step has this many times side ** 3 floating-point operations


def calibrate(
    devices: Sequence[jax.Device] | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    side: int | None = None,
    time_limit: float = 40.0,
) -> Hardware:
    """Measures what the devices at hand reach, while all of them work.

    The flops are measured with products of square matrices, the bandwidth of the memory by reading
    and writing a large array. Of all-gathers of several sizes, a line is fitted through time and
    bytes: the latency and the bandwidth of the interconnect (Hockney, 1994,
    https://doi.org/10.1016/S0167-8191(06)80021-9). Then training steps of perceptrons of several
    widths are run: ``spread`` is the largest relative difference between their times and those that
    the roofline estimates from these figures.

    A roofline with these figures is an estimate with this spread. It counts no time for the launch
    of a program, so it is too short for programs of a few microseconds.

    Args:
      devices: the devices to measure, all of one kind; None for all. They should be idle.
      dtype: of the products; for programs in float32, that.
      side: of the matrices; None for as large as the time allows, up to 4096. The memory that is
        needed on a device is about 160 ``side ** 2`` bytes.
      time_limit: seconds after which no other measurement starts. The flops, the bandwidths and one
        training step are measured in any case, if only once. ``sources`` says how many sizes of
        all-gathers and how many training steps were measured in this time. The latency is None if
        it was one size.

    Returns:
      The figures, with the name of the kind of device and the date. Those that cannot be measured
      are those of ``HARDWARE`` if it has this kind; ``interconnect_bandwidth`` of a single device
      is ``math.inf`` otherwise.

    Raises:
      ValueError: the devices are of several kinds, or belong to several processes; or ``side`` is
        so small that the time of a collective does not depend on its bytes.

    Example:
      >>> import jax
      >>> from nnx_sharding.planning import calibrate
      >>> measured = calibrate(jax.devices()[:1], side=256)
      >>> measured.flops > 0 and measured.spread > 0
      True
    """
    devices = jax.devices() if devices is None else [*devices]
    kinds = {device.device_kind for device in devices}
    if len(kinds) != 1 or len({device.process_index for device in devices}) != 1:
        raise ValueError(
            "calibrate: expected devices of one kind and of one process, got "
            f"{', '.join(sorted(kinds)) or 'none'}."
        )
    [kind] = kinds
    mesh, clock = Mesh(np.array(devices), ("device",)), _Clock(time_limit)
    known = HARDWARE.get(kind)
    side = side or _side_in_time(clock, mesh, dtype)
    # What was measured, by the name of the figure; each of them says how.
    made_with = f"calibrate, jax {jax.__version__}, {len(devices)} devices"
    sources = {"flops": made_with, "memory_bandwidth": made_with}
    # Compute.
    flops = _measure_flops(clock, mesh, side, dtype)
    # Memory: adding 1 reads and writes all of an array that is larger than any cache.
    large = _ones_on_each(mesh, (max(4 * side**2, 2**22),), jnp.float32)
    add_seconds = clock.median_seconds(jax.jit(lambda x: x + 1), large)
    memory_bandwidth = 2 * large.nbytes / mesh.size / add_seconds
    # Interconnect.
    latency, interconnect = None, math.inf if known is None else known.interconnect_bandwidth
    if len(devices) > 1:
        latency, interconnect, num_sizes = _fit_interconnect(clock, mesh, side)
        fitted = f"{made_with}, {num_sizes} of {_SIZES} sizes"
        sources |= {"interconnect_bandwidth": fitted, "latency": fitted}
    # A device that does not report its memory has that of its kind, or its part of the host's.
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    memory_bytes = host_bytes if known is None else known.memory_bytes
    measured = Hardware(
        name=f"{kind if known is None else known.name}, measured {datetime.date.today()}",
        flops=flops,
        memory_bytes=(devices[0].memory_stats() or {}).get("bytes_limit", memory_bytes),
        memory_bandwidth=memory_bandwidth,
        interconnect_bandwidth=interconnect,
        sources=sources,
        latency=latency,
    )
    # How far estimates by these figures are off.
    errors = [*_errors_of_steps(clock, mesh, side=side, dtype=dtype, hardware=measured)]
    sources["spread"] = f"{made_with}, {len(errors)} of {_STEPS} training steps"
    return dataclasses.replace(measured, spread=max(errors, default=None))


class _Clock:
    """Times calls until a limit.

    Attributes:
      share: the seconds for which one measurement may repeat its calls.
    """

    def __init__(self, time_limit: float):
        self._end = time.monotonic() + time_limit
        self.share = time_limit / _SHARES

    @property
    def has_time(self) -> bool:
        """Whether another measurement may start."""
        return time.monotonic() < self._end

    def median_seconds(self, fun: Callable[..., Any], *args: Any) -> float:
        """Returns the seconds of one call of a function, as in training: several are in flight.

        The first call compiles and does not count. Then rounds of calls run, for a share of the
        time or until the limit; the median of the rounds counts.
        """
        jax.block_until_ready(fun(*args))
        share = min(self.share, self._end - time.monotonic())
        end = time.monotonic() + share
        # As many calls in a round as leave time for three, so that the median leaves out what
        # others do on the machine now and then.
        one_call = _mean_seconds(fun, args, calls=1)
        calls = min(_CALLS, max(1, int(share / 3 / one_call)))
        rounds = [_mean_seconds(fun, args, calls=calls)]
        while len(rounds) < _ROUNDS and time.monotonic() < end:
            rounds.append(_mean_seconds(fun, args, calls=calls))
        return float(np.median(rounds))


def _mean_seconds(fun: Callable[..., Any], args: Sequence[Any], *, calls: int) -> float:
    """Returns the mean seconds of so many calls that are in flight together."""
    start = time.perf_counter()
    for _ in range(calls):
        result = fun(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _side_in_time(clock: _Clock, mesh: Mesh, dtype: Any) -> int:
    """Returns the largest side with which a training step takes an eighth of a share.

    So each measurement (`_Clock`) has time for at least eight calls.
    """
    side = _LARGEST_SIDE
    flops_per_second = _measure_flops(clock, mesh, _SMALLEST_SIDE, dtype)
    while side > _SMALLEST_SIDE and _STEP_FLOPS * side**3 / flops_per_second > clock.share / 8:
        side //= 2
    return side


def _ones_on_each(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns ones, (devices, *shape): each device has an array of this shape."""
    return jnp.ones((mesh.size, *shape), dtype, device=NamedSharding(mesh, P("device")))


def _measure_flops(clock: _Clock, mesh: Mesh, side: int, dtype: Any) -> float:
    """Returns the flops per second that each device reaches in products of square matrices."""

    def chain(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(_CHAIN):
            y = jnp.einsum("dij,djk->dik", x, y)  # (devices, side, side)
        return y

    seconds = clock.median_seconds(jax.jit(chain), _ones_on_each(mesh, (side, side), dtype))
    return _CHAIN * 2 * side**3 / seconds


def _fit_interconnect(clock: _Clock, mesh: Mesh, side: int) -> tuple[float | None, float, int]:
    """Fits ``seconds = latency + bytes / bandwidth`` to all-gathers of several sizes.

    The largest gathers 4 ``side`` ** 2 numbers on each device, or a MiB.

    Returns:
      The latency in seconds, None if noise hides it or there was time for one size only; the bytes
      per second that a device sends; and how many sizes were measured.
    """
    # Replicating a sharded array is an all-gather and nothing else.
    all_gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    largest = max(4 * side**2, 2**18) // mesh.size  # the numbers that each device has of it
    *others, last = np.geomspace(64, largest, _SIZES).astype(int).tolist()
    # Both sides of the equation are divided by the seconds, 1 = latency / seconds + …, so that
    # relative errors count, and small sizes too: (1 / seconds, bytes / seconds).
    rows = list[tuple[float, float]]()
    # The largest first: if time is over then, it alone gives nearly the bandwidth. Next are the
    # smallest ones, which take nearly the latency.
    for length in (last, *others):
        if not rows or clock.has_time:
            parts = _ones_on_each(mesh, (length,), jnp.float32)
            seconds = clock.median_seconds(all_gather, parts)
            sent = (mesh.size - 1) * length * 4  # bytes: each device sends its part to all others
            rows.append((1 / seconds, sent / seconds))
    if len(rows) == 1:
        [(_, bytes_per_second)] = rows  # the latency is in it
        return None, bytes_per_second, 1
    latency, seconds_per_byte = np.linalg.lstsq(np.array(rows), np.ones(len(rows)))[0].tolist()
    if seconds_per_byte <= 0:
        raise ValueError(
            f"calibrate: side={side} is too small: larger all-gathers take no more time than small."
        )
    return latency if latency > 0 else None, 1 / seconds_per_byte, len(rows)


def _errors_of_steps(
    clock: _Clock, mesh: Mesh, *, side: int, dtype: Any, hardware: Hardware
) -> Iterator[float]:
    """Yields by which fraction the times of training steps differ from their estimates.

    They are steps of a perceptron: one in any case, others while there is time.

    Args:
      clock: times them.
      mesh: all devices, along its axis ``device``.
      side: the width of the perceptron.
      dtype: of its weights.
      hardware: the figures for the estimates.
    """

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.square(jax.nn.relu(x @ weights[0]) @ weights[1]).mean(dtype=jnp.float32)

    def step(weights: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads)

    # The width, and the spec of the weights. Sharded weights are gathered, and their gradients
    # scattered; gradients of whole ones are all-reduced. With half the width, these take more of
    # the time of a step. So the three depend on the figures to different degrees.
    variants = ((side, P("device")), (side, P()), (side // 2, P()))
    for i, (width, spec) in enumerate(variants):
        if i > 0 and not clock.has_time:
            return
        shardings = NamedSharding(mesh, spec), NamedSharding(mesh, P("device"))  # weights, rows
        compiled = jit(step, in_shardings=shardings, out_shardings=shardings[0])
        weights = [jnp.ones(shape, dtype) for shape in ((width, 2 * width), (2 * width, width))]
        args = jax.device_put((weights, jnp.ones((width * mesh.size, width), dtype)), shardings)
        program = compiled.lower(*args).compile()  # of `jit` of this library, which has a roofline
        estimate = program.roofline(hardware).estimate
        if estimate:  # None if the compiler does not say what the program costs
            yield abs(clock.median_seconds(program, *args) / estimate - 1)
