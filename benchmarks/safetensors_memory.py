"""Time and memory of ``load_safetensors``: ``python -m benchmarks.safetensors_memory``.

Of several processes, ``python -m nnx_sharding launch --processes 2 --devices-per-process 4 -m
benchmarks.safetensors_memory``. The peak is that of resident memory above what the process had
before, as a multiple of the bytes that it holds of the model. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.checkpoints import Model, held, read_status, reset_peak, shared_folder, warm_up

import jax  # isort: skip  (after the number of its devices is set)
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding
from nnx_sharding.checkpoint import Tensor, load_safetensors, save_safetensors
from nnx_sharding.partition import abstract_init, make_mesh, sharded_init

SPECS = {"rows": P("model"), "columns": P(None, "model"), "both": P("data", "model")}
RULES = {
    "as stored": {r"layers\.(\d+)\.weight": "layers/{0}"},
    "transposed": {r"layers\.(\d+)\.weight": Tensor("layers/{0}", "out in -> in out")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096, help="64 MiB a layer with 4096")
    options = parser.parse_args()
    if "SLURM_PROCID" in os.environ:
        jax.distributed.initialize()
    mesh = make_mesh({"data": 1, "model": jax.device_count()})
    square = make_mesh({"data": 2, "model": jax.device_count() // 2})
    make = functools.partial(Model, options.layers, options.width)
    with shared_folder() as folder:
        warm_up(folder / "small", mesh)
        model = sharded_init(make, StateSharding({...: SPECS["rows"]}), mesh)
        jax.block_until_ready(nnx.state(model))
        with measured("save", model):
            save_safetensors(folder / "model", model, RULES["as stored"])
        del model
        for way, rules in RULES.items():
            for name, spec in SPECS.items():
                onto = square if name == "both" else mesh
                target = abstract_init(make, StateSharding({...: spec}), onto)
                with measured(f"{way}, {name}", target):
                    load_safetensors(folder / "model", target, rules)
                del target
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("all files are read")


@contextlib.contextmanager
def measured(name: str, model: Any) -> Iterator[None]:
    """Prints the time of a block, and its peak memory as a multiple of what it holds of a model."""
    size, before, started = held(model), reset_peak(), time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    peak = (read_status("VmHWM") - before) / size
    print(f"{name:25} {seconds:6.2f} s  peak {peak:.2f} ×", flush=True)


if __name__ == "__main__":
    main()
