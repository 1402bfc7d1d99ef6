"""Measures the figures of the devices at hand, for estimates of the time of a step.

The fastest device does 10,000 times as many products per second as a virtual device of a CPU that
shares its cores with seven others, so no size of matrices suits both. The time of a first product
of small matrices says how large the other matrices may be, and each measurement repeats its calls
as often as its *share* of the time limit allows (`_Clock`). Arrays have a leading dimension of
devices, so that each device computes with matrices of its own, of ``side`` rows and columns.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..analysis.hardware import HARDWARE, Hardware
from ..transforms.jit import jit

_ROUNDS = 7  # the maximum number of rounds of a measurement; the median counts
# The maximum number of calls in flight at once. Several are in flight, as in training, because
# waiting for each call takes a GPU longer than a small program.
_CALLS = 8
_CHAIN = 8  # the number of matrix products in one program
_SMALLEST_SIDE, _LARGEST_SIDE = 256, 4096  # the side of matrices: in the first product, at most
_SIZES = 7  # the number of sizes of all-gathers
# The time limit has so many shares. Each of the 13 measurements may repeat its calls for one share.
_SHARES = 16
_STEPS = 3  # the number of training steps whose times are compared with estimates
_STEP_FLOPS = 20  # a training step has this many times side ** 3 floating-point operations


def calibrate(
    devices: Sequence[jax.Device] | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    side: int | None = None,
    time_limit: float = 40.0,
) -> Hardware:
    """Measures what the devices at hand reach, while all of them work.

    The flops are measured with products of square matrices, and the bandwidth of the memory by
    reading and writing a large array. The latency and the bandwidth of the interconnect come from
    all-gathers of several sizes: a line is fitted through time and bytes (Hockney, 1994,
    https://doi.org/10.1016/S0167-8191(06)80021-9). Then training steps of perceptrons of several
    widths are run. ``spread`` is the largest relative difference between their times and the times
    that the roofline estimates from these figures.

    A roofline with these figures is an estimate with this spread. The roofline counts no time for
    the launch of a program, so its estimate is too short for programs of a few microseconds.

    Args:
      devices: the devices to measure, all of one kind; None for all. They should be idle.
      dtype: the dtype of the products; give ``float32`` for programs in float32.
      side: the number of rows and columns of the matrices. None takes the largest side that the
        time allows, up to 4096. A device needs about 160 ``side ** 2`` bytes of memory.
      time_limit: seconds after which no other measurement starts. The flops, the bandwidths and one
        training step are measured in any case, if only once. ``sources`` says how many sizes of
        all-gathers and how many training steps were measured in this time. The latency is None if
        only one size was measured.

    Returns:
      The figures, with the name of the kind of device and the date. Figures that cannot be measured
      are taken from ``HARDWARE`` if it has this kind of device. Otherwise the
      ``interconnect_bandwidth`` of a single device is ``math.inf``.

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
    mesh = Mesh(np.array(devices), ("device",))
    clock = _Clock(time_limit)
    peak = HARDWARE.get(kind)  # None if the kind is unknown
    side = side or _side_in_time(clock, mesh, dtype)
    # Name of a measured figure → how it was measured.
    made_with = f"calibrate, jax {jax.__version__}, {len(devices)} devices"
    sources = {"flops": made_with, "memory_bandwidth": made_with}
    # Measure compute.
    flops = _measure_flops(clock, mesh, side, dtype)
    # Measure the memory: adding 1 reads and writes all of an array that is larger than any cache.
    large = _ones_on_each(mesh, (max(4 * side**2, 2**22),), jnp.float32)
    add_seconds = clock.median_seconds(jax.jit(lambda x: x + 1), large)
    bytes_of_device = large.nbytes / mesh.size
    memory_bandwidth = 2 * bytes_of_device / add_seconds
    # Measure the interconnect. A single device has none, so the figure of its kind counts.
    if len(devices) > 1:
        interconnect = _fit_interconnect(clock, mesh, side)
        fitted = f"{made_with}, {interconnect.num_sizes} of {_SIZES} sizes"
        sources |= {"interconnect_bandwidth": fitted, "latency": fitted}
    else:
        bandwidth = math.inf if peak is None else peak.interconnect_bandwidth
        interconnect = _Interconnect(latency=None, bandwidth=bandwidth, num_sizes=0)
    # If a device does not report its memory, that of its kind counts, or a part of the host's.
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    memory_bytes = host_bytes if peak is None else peak.memory_bytes
    reported = devices[0].memory_stats() or {}  # None on CPUs
    measured = Hardware(
        name=f"{kind if peak is None else peak.name}, measured {datetime.date.today()}",
        flops=flops,
        memory_bytes=reported.get("bytes_limit", memory_bytes),
        memory_bandwidth=memory_bandwidth,
        interconnect_bandwidth=interconnect.bandwidth,
        sources=sources,
        latency=interconnect.latency,
    )
    # Measure how far estimates by these figures are off.
    errors = [*_errors_of_steps(clock, mesh, side=side, dtype=dtype, hardware=measured)]
    sources["spread"] = f"{made_with}, {len(errors)} of {_STEPS} training steps"
    return dataclasses.replace(measured, spread=max(errors, default=None))


class _Clock:
    """Measures the seconds of calls until a time limit.

    Attributes:
      share: the seconds for which one measurement may repeat its calls.
      _end: the time of ``time.monotonic`` after which no other measurement starts.
    """

    def __init__(self, time_limit: float):
        self._end = time.monotonic() + time_limit
        self.share = time_limit / _SHARES

    @property
    def has_time(self) -> bool:
        """Whether another measurement may start."""
        return time.monotonic() < self._end

    def median_seconds(self, fun: Callable[..., Any], *args: Any) -> float:
        """Returns the seconds of one call of a function while several calls are in flight.

        The first call compiles and does not count. Then rounds of calls run, for a share of the
        time or until the limit, but one round at least. The median of the rounds counts.
        """
        jax.block_until_ready(fun(*args))
        share = min(self.share, self._end - time.monotonic())
        end = time.monotonic() + share
        # A round has so many calls that there is time for three rounds. Then the median leaves out
        # what other programs do on the machine now and then.
        one_call = _mean_seconds(fun, args, calls=1)
        calls = min(_CALLS, max(1, int(share / 3 / one_call)))
        rounds = [_mean_seconds(fun, args, calls=calls)]
        while len(rounds) < _ROUNDS and time.monotonic() < end:
            rounds.append(_mean_seconds(fun, args, calls=calls))
        return float(np.median(rounds))


def _mean_seconds(fun: Callable[..., Any], args: Sequence[Any], *, calls: int) -> float:
    """Returns the mean seconds of a call while ``calls`` calls are in flight together."""
    start = time.perf_counter()
    for _ in range(calls):
        result = fun(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _side_in_time(clock: _Clock, mesh: Mesh, dtype: Any) -> int:
    """Returns the largest side with which a training step takes at most an eighth of a share.

    Each measurement (`_Clock`) then has time for about eight calls. The side is at least
    `_SMALLEST_SIDE`, even if that takes longer.
    """
    side = _LARGEST_SIDE
    flops_per_second = _measure_flops(clock, mesh, _SMALLEST_SIDE, dtype)
    while side > _SMALLEST_SIDE and _STEP_FLOPS * side**3 / flops_per_second > clock.share / 8:
        side //= 2
    return side


def _ones_on_each(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array of ones, (devices, *shape), of which each device has (1, *shape)."""
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


class _Interconnect(NamedTuple):
    """The figures of the links between devices."""

    latency: float | None  # in seconds; None if noise hides it, or with one measured size only
    bandwidth: float  # the bytes per second that a device sends
    num_sizes: int  # the number of sizes of all-gathers that were measured


def _fit_interconnect(clock: _Clock, mesh: Mesh, side: int) -> _Interconnect:
    """Fits ``seconds = latency + bytes / bandwidth`` to all-gathers of several sizes.

    The largest all-gather collects 4 ``side`` ** 2 numbers of 4 bytes on each device, but a MiB at
    least.

    Raises:
      ValueError: larger all-gathers take no more time than smaller ones.
    """
    # Replicating a sharded array is an all-gather and nothing else.
    all_gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    # Lengths are the numbers that one device has: 1 / mesh.size of the gathered ones. A MiB has
    # 2**18 numbers of 4 bytes. The shortest shard, of 64 numbers, takes nearly the latency alone.
    longest = max(4 * side**2, 2**18) // mesh.size
    *shorter_lengths, longest = np.geomspace(64, longest, _SIZES).astype(int).tolist()
    # Both sides of the equation are divided by the seconds, 1 = latency / seconds + …, so that
    # relative errors count, and small sizes too: (1 / seconds, bytes / seconds).
    rows = list[tuple[float, float]]()
    # The largest size is the first, because it alone gives nearly the bandwidth if time ends then.
    # The smallest sizes are next, because they take nearly the latency.
    for length in (longest, *shorter_lengths):
        if not rows or clock.has_time:
            shards = _ones_on_each(mesh, (length,), jnp.float32)
            seconds = clock.median_seconds(all_gather, shards)
            sent = (mesh.size - 1) * length * 4  # bytes: a device sends its shard to all others
            rows.append((1 / seconds, sent / seconds))
    if len(rows) == 1:
        [(_, bytes_per_second)] = rows  # the seconds include the latency
        return _Interconnect(latency=None, bandwidth=bytes_per_second, num_sizes=1)
    latency, seconds_per_byte = np.linalg.lstsq(np.array(rows), np.ones(len(rows)))[0].tolist()
    if seconds_per_byte <= 0:
        raise ValueError(
            f"calibrate: side={side} is too small: larger all-gathers take no more time than small."
        )
    return _Interconnect(
        latency=latency if latency > 0 else None,  # noise may make it negative
        bandwidth=1 / seconds_per_byte,
        num_sizes=len(rows),
    )


def _errors_of_steps(
    clock: _Clock, mesh: Mesh, *, side: int, dtype: Any, hardware: Hardware
) -> Iterator[float]:
    """Yields the relative difference between time and estimate for some training steps.

    The steps train a perceptron. One step is measured in any case, further ones while there is
    time. Steps without an estimate are left out.

    Args:
      clock: measures the seconds of the steps.
      mesh: all devices, along the axis ``device``.
    """

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.square(jax.nn.relu(x @ weights[0]) @ weights[1]).mean(dtype=jnp.float32)

    def step(weights: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads)

    # A variant is a width, and the spec of the weights. Sharded weights are gathered, and their
    # gradients scattered. Gradients of replicated weights are all-reduced, and with half the width,
    # all-reduces take more of the time of a step. So the times of the three steps depend on
    # different figures.
    variants = ((side, P("device")), (side, P()), (side // 2, P()))
    for i, (width, spec) in enumerate(variants):
        if i > 0 and not clock.has_time:
            return
        shardings = NamedSharding(mesh, spec), NamedSharding(mesh, P("device"))  # weights, rows
        compiled = jit(step, in_shardings=shardings, out_shardings=shardings[0])
        weights = [jnp.ones(shape, dtype) for shape in ((width, 2 * width), (2 * width, width))]
        args = jax.device_put((weights, jnp.ones((width * mesh.size, width), dtype)), shardings)
        # `compiled` is by `jit` of this library, whose programs have a roofline.
        program = compiled.lower(*args).compile()
        estimate = program.roofline(hardware).estimate
        if estimate:  # the estimate is None if the compiler does not say what the program costs
            yield abs(clock.median_seconds(program, *args) / estimate - 1)
