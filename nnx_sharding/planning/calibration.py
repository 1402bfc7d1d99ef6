"""Measures the figures of the devices at hand, for estimates of the time of a step."""

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

_REPEATS = 7
_CALLS = 8  # in flight, as in training: waiting for each takes a GPU longer than a small program
_CHAIN = 8  # matrix products in one program


def calibrate(
    devices: Sequence[jax.Device] | None = None, *, dtype: Any = jnp.bfloat16, side: int = 4096
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
      side: of the matrices; the memory that is needed on a device is about 160 ``side ** 2`` bytes.

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
    mesh = Mesh(np.array(devices), ("device",))
    known = HARDWARE.get(kind)
    latency, interconnect = None, math.inf if known is None else known.interconnect_bandwidth
    if len(devices) > 1:
        latency, interconnect = _interconnect(mesh, side)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    of_device = host if known is None else known.memory_bytes
    made_with = f"calibrate, jax {jax.__version__}, {len(devices)} devices"
    large = _on_all(mesh, (4 * side, side), jnp.float32)  # larger than any cache
    measured = Hardware(
        f"{kind if known is None else known.name}, measured {datetime.date.today()}",
        _flops(mesh, side, dtype),
        (devices[0].memory_stats() or {}).get("bytes_limit", of_device),
        2 * large.nbytes / mesh.size / _seconds(jax.jit(lambda x: x + 1), large),
        interconnect,
        sources=dict.fromkeys(("flops", "memory_bandwidth", "latency"), made_with),
        latency=latency,
    )
    errors = [abs(real / estimate - 1) for real, estimate in _steps(mesh, side, dtype, measured)]
    return dataclasses.replace(measured, spread=max(errors, default=None))


def _seconds(fun: Callable[..., Any], *args: Any) -> float:
    """Returns the median seconds of a call among others in flight, after one that compiles."""
    jax.block_until_ready(fun(*args))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            result = fun(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / _CALLS)
    return float(np.median(times))  # others may use the machine now and then


def _on_all(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns ones, (devices, *shape): each device has an array of this shape."""
    return jnp.ones((mesh.size, *shape), dtype, device=NamedSharding(mesh, P("device")))


def _flops(mesh: Mesh, side: int, dtype: Any) -> float:
    """Returns the flops per second that each device reaches in products of square matrices."""

    def chain(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(_CHAIN):
            y = jnp.einsum("dij,djk->dik", x, y)
        return y

    return _CHAIN * 2 * side**3 / _seconds(jax.jit(chain), _on_all(mesh, (side, side), dtype))


def _interconnect(mesh: Mesh, side: int) -> tuple[float | None, float]:
    """Fits ``seconds = latency + bytes / bandwidth`` to all-gathers of seven sizes.

    The largest gathers 4 ``side`` ** 2 numbers on each device.

    Returns:
      The latency in seconds, None if noise hides it, and the bytes per second that a device sends.
    """
    all_gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))  # nothing else
    rows = []
    for length in np.geomspace(64, 4 * side**2 // mesh.size, 7).astype(int).tolist():
        seconds = _seconds(all_gather, _on_all(mesh, (length,), jnp.float32))
        sent = (mesh.size - 1) * length * 4  # bytes: each device sends its part to all others
        # Both sides divided by the seconds: so relative errors count, and small sizes too.
        rows.append((1 / seconds, sent / seconds))
    latency, per_byte = np.linalg.lstsq(np.array(rows), np.ones(len(rows)))[0].tolist()
    if per_byte <= 0:
        raise ValueError(
            f"calibrate: side={side} is too small: larger all-gathers take no more time than small."
        )
    return latency if latency > 0 else None, 1 / per_byte


def _steps(mesh: Mesh, side: int, dtype: Any, measured: Hardware) -> Iterator[tuple[float, float]]:
    """Yields the measured and the estimated seconds of training steps, replicated and sharded."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.square(jax.nn.relu(x @ weights[0]) @ weights[1]).mean(dtype=jnp.float32)

    def step(weights: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads)

    # Compute and each kind of collective.
    for width, spec in ((side, P()), (side, P("device")), (side // 2, P())):
        shardings = NamedSharding(mesh, spec), NamedSharding(mesh, P("device"))
        compiled = jit(step, in_shardings=shardings, out_shardings=shardings[0])
        weights = [jnp.ones(shape, dtype) for shape in ((width, 2 * width), (2 * width, width))]
        args = jax.device_put((weights, jnp.ones((width * mesh.size, width), dtype)), shardings)
        program = compiled.lower(*args).compile()
        estimate = program.roofline(measured).estimate
        if estimate:  # None if the compiler does not say what the program costs
            yield _seconds(program, *args), estimate
