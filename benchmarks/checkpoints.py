"""Time and memory of saving and restoring: ``python -m benchmarks.checkpoints``.

Memory is what this process needs at its peak above what it had before, as a multiple of the bytes
of the model that it holds; on virtual devices that is the memory of the devices, too. Linux only:
the peak is read from ``/proc``. "orbax" is its ``StandardCheckpointer`` with
the same arrays. With several processes: ``python -m nnx_sharding launch --processes 2
--devices-per-process 4 -m benchmarks.checkpoints``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import itertools
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding
from nnx_sharding.analysis import parameter_table
from nnx_sharding.checkpoint import restore, save
from nnx_sharding.partition import abstract_init, make_mesh, sharded_init

ROWS = StateSharding({...: P("model")})
COLUMNS = StateSharding({...: P(None, "model")})
REPLICATED = StateSharding({...: P()})


class Model(nnx.Module):
    """Square arrays of random numbers, which do not compress."""

    def __init__(self, count: int, width: int):
        keys = jax.random.split(jax.random.key(0), count)
        self.layers = nnx.List(
            nnx.Param(jax.random.normal(key, (width, width), jnp.float32)) for key in keys
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048, help="16 MiB a layer with 2048")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if "SLURM_PROCID" in os.environ:
        jax.distributed.initialize()
    mesh = make_mesh({"model": jax.device_count()})
    make = functools.partial(Model, options.layers, options.width)
    with shared_folder() as folder:
        warm_up(folder / "small", mesh)
        model, repeats = folder / "model", options.repeats
        measure_save(model, make, mesh, repeats)
        for name, rules in ("as saved", ROWS), ("other axis", COLUMNS), ("replicated", REPLICATED):
            measure_restore(name, model, lambda r=rules: abstract_init(make, r, mesh), repeats)


def measure_save(folder: Path, make: Callable[[], Any], mesh: Any, repeats: int) -> None:
    model = sharded_init(make, ROWS, mesh)
    total = sum(row.bytes_total for row in parameter_table(model))
    if jax.process_index() == 0:
        print(f"{total / 2**20:.0f} MiB, {jax.process_count()} process(es)", flush=True)
    paths = (folder.with_name(f"{folder.name}{i}") for i in itertools.count())
    ways = {
        "orbax": lambda model: orbax_save(next(paths), nnx.state(model)),
        "": lambda model: save(next(paths), model),
    }
    measure("save", ways, lambda: model, repeats)
    save(folder, model)


def measure_restore(name: str, folder: Path, target: Callable[[], Any], repeats: int) -> None:
    ways = {
        "orbax": lambda model: orbax_restore(folder, nnx.state(model)),
        "": lambda model: restore(folder, model),
    }
    measure(f"restore, {name}", ways, target, repeats)


def measure(
    name: str, ways: dict[str, Callable[[Any], Any]], make: Callable[[], Any], repeats: int
) -> None:
    """Prints the median time and the peak of memory of each way, measured in turns."""
    size = held(make())
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            model = make()
            before, started = reset_peak(), time.perf_counter()
            run(model)
            seconds = time.perf_counter() - started
            found[way].append((seconds, (read_status("VmHWM") - before) / size))
    floor = statistics.median(seconds for seconds, _ in found["orbax"])
    for way, rows in found.items():
        seconds, peak = (statistics.median(column) for column in zip(*rows, strict=True))
        label = f"{name} {way and f'({way})'}"
        print(
            f"{label:40} {seconds:6.2f} s  {seconds / floor:5.2f} ×  peak {peak:.2f} ×", flush=True
        )


def orbax_save(folder: Path, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)


def orbax_restore(folder: Path, state: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, state)


def warm_up(folder: Path, mesh: Any) -> None:
    """What is loaded and compiled once does not count."""
    small = sharded_init(lambda: Model(1, 256), ROWS, mesh)
    save(folder, small)
    restore(folder, small)


def held(model: Any) -> int:
    """The bytes of the shards that this process holds, or will hold."""
    arrays = jax.tree.leaves(nnx.state(model))
    return sum(
        math.prod(x.sharding.shard_shape(x.shape))
        * x.dtype.itemsize
        * len(x.sharding.addressable_devices)
        for x in arrays
    )


def reset_peak() -> int:
    """Forgets the highest use of memory so far; the bytes in use now."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")
    return read_status("VmRSS")


def read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that is the same in all processes."""
    name = f"nnx_sharding_{os.environ.get('JAX_COORDINATOR_ADDRESS', os.getpid())}"
    folder = Path(tempfile.gettempdir()) / name.replace(":", "_").replace("/", "_")
    try:
        yield folder
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
