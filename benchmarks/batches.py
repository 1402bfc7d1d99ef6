"""How much of the loading ``shard_batches`` hides: ``python -m benchmarks.batches [--repeats N]``.

A loader waits, as for a disk, or computes, as for decoding. A step is waited for while the cores of
the host rest, as with an accelerator, or computes on them, where it competes with all else. The
loss is read after each step. Hidden is what a loop takes less than loading alone and steps alone
take together, as a fraction of the shorter of both, the most that can be hidden. Ways take turns;
figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

DEVICES = 8
SECONDS = 0.02  # of loading a batch, and of a step
ROWS, FEATURES = 512, 1024  # 2 MiB


class Setting(NamedTuple):
    """What all ways use: the step, which is waited for, the batches, and where these go."""

    step: Callable[[Any], None]
    batches: list[Any]
    sharding: Any


Way = Callable[[Iterable[Any], Setting], None]


def main() -> None:
    options = _options()
    # Only the CPU heeds it; it has to be there before JAX is imported.
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={DEVICES}".strip()
    from . import report

    print(report.describe_machine(report.machine()))
    setting, steps = _setting(options.batches)
    what = f"{ROWS} rows, {SECONDS * 1e3:g} ms each to load; per batch"
    print(f"\n{options.batches} batches of {what}")
    for kind, step in steps.items():
        for name, load in (("waits", _waiting), ("computes", _computing)):
            print(f"\nloader {name}, step {kind}")
            print(f"  {'':32} {'step, ms':>10} {'load, ms':>10} {'loop, ms':>10} {'hidden':>8}")
            for line in _overlap(setting._replace(step=step), load, options.repeats):
                print(f"  {line}", flush=True)
    print("\nmemory that NumPy allocates at most, in batches")
    print(f"  {'':32} {'full':>10} {'uneven':>10}")
    for name, way in _WAYS.items():
        full, uneven = _copies(way, setting)
        print(f"  {name:32} {full:>10.2f} {uneven:>10}")


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches")
    parser.add_argument("--repeats", type=int, default=5, help="how often each way is measured")
    parser.add_argument("--batches", type=int, default=30, help="how many batches a loop has")
    return parser.parse_args()


def _setting(count: int) -> tuple[Setting, dict[str, Callable[[Any], None]]]:
    """Batches, and steps that take about ``SECONDS`` on this machine."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    weights = np.ones((FEATURES, FEATURES), np.float32) / FEATURES
    weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    batches = [np.full((ROWS, FEATURES), number, np.float32) for number in range(count)]

    def computing(layers: int) -> Callable[[Any], None]:
        def loss(x: Any, weights: Any) -> Any:
            for _ in range(layers):
                x = jnp.tanh(x @ weights)
            return x.mean()

        compiled = jax.jit(loss)
        return lambda x: compiled(x, weights).block_until_ready()

    def waiting(x: Any) -> None:
        x.block_until_ready()
        time.sleep(SECONDS)

    placed = jax.device_put(batches[0], sharding)
    few = computing(4)
    few(placed)
    seconds = min(_timed(lambda: few(placed)) for _ in range(5))
    steps = {
        "waits": waiting,
        "computes": computing(max(1, round(4 * SECONDS / seconds))),
    }
    return Setting(waiting, batches, sharding), steps


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _waiting(batches: list[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(SECONDS)
        yield batch


def _computing(batches: list[Any]) -> Iterator[Any]:
    import numpy as np

    memory = np.empty_like(batches[0])
    for batch in batches:
        end = time.thread_time() + SECONDS
        while time.thread_time() < end:
            np.sqrt(batch, out=memory)
        yield batch


def _plain(batches: Iterable[Any], setting: Setting) -> None:
    import jax

    _loop((jax.device_put(batch, setting.sharding) for batch in batches), setting)


def _sharded(prefetch: int) -> Way:
    def way(batches: Iterable[Any], setting: Setting) -> None:
        from nnx_sharding.placement import shard_batches

        pairs = shard_batches(batches, setting.sharding, prefetch=prefetch, uneven="pad")
        _loop((batch for batch, _ in pairs), setting)

    return way


_WAYS: dict[str, Way] = {
    "for b in loader: device_put(b)": _plain,
    "shard_batches(prefetch=0)": _sharded(0),
    "shard_batches(prefetch=1)": _sharded(1),
    "shard_batches(prefetch=2)": _sharded(2),
}


def _loop(batches: Iterable[Any], setting: Setting) -> None:
    for batch in batches:
        setting.step(batch)


def _overlap(
    setting: Setting, load: Callable[[list[Any]], Iterator[Any]], repeats: int
) -> Iterator[str]:
    """A line for each way."""
    import jax

    placed = [jax.device_put(batch, setting.sharding) for batch in setting.batches]
    steps, loads = [], []
    loops: dict[str, list[float]] = {name: [] for name in _WAYS}
    for way in _WAYS.values():
        way(setting.batches[:2], setting)
    for _ in range(repeats):
        steps.append(_timed(lambda: _loop(placed, setting)))
        loads.append(_timed(lambda: list(load(setting.batches))))
        for name, way in _WAYS.items():
            loops[name].append(_timed(lambda way=way: way(load(setting.batches), setting)))
    step, loading = statistics.median(steps), statistics.median(loads)
    for name, times in loops.items():
        loop = statistics.median(times)
        hidden = (loading + step - loop) / min(loading, step)
        each = (f"{x / len(placed) * 1e3:>10.1f}" for x in (step, loading, loop))
        yield f"{name:32} {' '.join(each)} {hidden:>8.0%}"


def _copies(way: Way, setting: Setting) -> tuple[float, str]:
    """The most that Python allocates in a loop, in batches: all full, and with an uneven last."""
    full = setting.batches[:4]
    found = _allocated(way, full, setting)
    try:
        uneven = f"{_allocated(way, [*full, full[0][: ROWS // 2 + 1]], setting):.2f}"
    except ValueError:
        uneven = "fails"
    return found, uneven


def _allocated(way: Way, batches: list[Any], setting: Setting) -> float:
    way(batches[:1], setting)
    tracemalloc.start()
    try:
        way(batches, setting)
        return tracemalloc.get_traced_memory()[1] / batches[0].nbytes
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()
