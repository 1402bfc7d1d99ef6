"""Time and memory of saving and restoring: ``python -m benchmarks.checkpoints``.

Memory is what this process needs at its peak above what it had before, as a multiple of the bytes
of the model that it holds; on virtual devices that is the memory of the devices, too. Linux only:
the peak is read from ``/proc``. With several processes: ``python -m nnx_sharding launch --processes
2 --devices-per-process 4 -m benchmarks.checkpoints``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
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
    options = parser.parse_args()
    if "SLURM_PROCID" in os.environ:
        jax.distributed.initialize()
    mesh = make_mesh({"model": jax.device_count()})
    make = functools.partial(Model, options.layers, options.width)
    with shared_folder() as folder:
        warm_up(folder / "small", mesh)
        measure_save(folder / "model", make, mesh)
        measure_restore("as saved", folder / "model", abstract_init(make, ROWS, mesh))
        measure_restore("other axis", folder / "model", abstract_init(make, COLUMNS, mesh))
        measure_restore("replicated", folder / "model", abstract_init(make, REPLICATED, mesh))
        if jax.process_count() == 1:
            measure_restore("on one device", folder / "model", nnx.eval_shape(make))


def measure_save(folder: Path, make: Callable[[], Any], mesh: Any) -> None:
    model = sharded_init(make, ROWS, mesh)
    total = sum(row.bytes_total for row in parameter_table(model))
    if jax.process_index() == 0:
        print(f"{total / 2**20:.0f} MiB, {jax.process_count()} process(es)", flush=True)
    with measured("save", lambda: held(model)):
        save(folder, model)


def measure_restore(name: str, folder: Path, target: Any) -> None:
    with measured(f"restore, {name}", lambda: held(target)):
        restore(folder, target)


def warm_up(folder: Path, mesh: Any) -> None:
    """What is loaded and compiled once does not count."""
    small = sharded_init(lambda: Model(1, 256), ROWS, mesh)
    save(folder, small)
    restore(folder, small)


def held(model: Any) -> int:
    """The bytes of the shards that this process holds."""
    arrays = jax.tree.leaves(nnx.state(model))
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


@contextlib.contextmanager
def measured(name: str, size: Callable[[], int]) -> Iterator[None]:
    """Prints the time and the peak of memory of what runs inside, and the bytes a second."""
    before, started = reset_peak(), time.perf_counter()
    yield
    seconds, peak = time.perf_counter() - started, read_status("VmHWM") - before
    speed = size() / 2**20 / seconds
    print(f"{name:24} {seconds:6.2f} s  {speed:7.0f} MiB/s  peak {peak / size():.2f} ×", flush=True)


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
