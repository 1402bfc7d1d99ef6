"""Time and memory of ``load_safetensors``: ``python -m benchmarks.safetensors_memory``.

Of several processes, ``python -m nnx_sharding launch --processes 2 --devices-per-process 4 -m
benchmarks.safetensors_memory``. The peak is that of resident memory above what the process had
before, as a multiple of the bytes that it holds of the model. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import os

from benchmarks.checkpoints import Model, held, measured, shared_folder, warm_up

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
        with measured("save", functools.partial(held, model)):
            save_safetensors(folder / "model", model, RULES["as stored"])
        del model
        for way, rules in RULES.items():
            for name, spec in SPECS.items():
                onto = square if name == "both" else mesh
                target = abstract_init(make, StateSharding({...: spec}), onto)
                with measured(f"{way}, {name}", functools.partial(held, target)):
                    load_safetensors(folder / "model", target, rules)
                del target
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("all files are read")


if __name__ == "__main__":
    main()
