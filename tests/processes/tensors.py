"""A model from safetensors files and back to them; each process has a part of each array."""

import json
import sys
from pathlib import Path

import preamble  # isort: skip  (joins the others before anything is computed)
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding
from nnx_sharding.checkpoint import Tensor, load_safetensors, save_safetensors
from nnx_sharding.errors import CheckpointError
from nnx_sharding.partition import abstract_init

RULES = {
    r"layers\.(\d)\.up": Tensor("up", "(h d) e -> {0} e h d", h=4),
    r"layers\.(\d)\.down": Tensor("down", "e o -> {0} o e"),
    "norm": "norm",
}
SPECS = StateSharding(
    {
        nnx.PathContains("up"): P(None, "data", "model"),
        nnx.PathContains("down"): P("data", None, "model"),
        nnx.PathContains("norm"): P(),
    }
)


def make():
    shapes = {"up": (2, 8, 4, 2), "down": (2, 4, 8), "norm": (8,)}
    return nnx.Dict({name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items()})


def tensors():
    rng = np.random.default_rng(0)
    found = {"norm": rng.normal(size=8)}
    for i in range(2):
        found |= {
            f"layers.{i}.up": rng.normal(size=(8, 8)),
            f"layers.{i}.down": rng.normal(size=(8, 4)),
        }
    return {name: x.astype(np.float32) for name, x in found.items()}


def arrays(tensors):
    layers = [(tensors[f"layers.{i}.up"], tensors[f"layers.{i}.down"]) for i in range(2)]
    return {
        "up": np.stack([up.T.reshape(8, 4, 2) for up, _ in layers]),
        "down": np.stack([down.T for _, down in layers]),
        "norm": tensors["norm"],
    }


def main(folder):
    model = load_safetensors(folder, abstract_init(make, SPECS, preamble.mesh_of()), RULES)
    for name, expected in arrays(tensors()).items():
        array = model[name].get_raw_value()
        preamble.assert_holds(array, expected)
        assert preamble.spans_all(array)
    model.local = nnx.Variable(jnp.arange(3.0))  # each process has one of its own
    save_safetensors(folder / "new", model, RULES | {"local": "local"}, max_shard_size=400)
    index = json.loads((folder / "new" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3, index
    blocked = folder / "blocked0"  # by a file
    for where, first, other in (
        (folder / "new", "overwrite=True", "process 0"),
        (blocked, "cannot use", "process 0"),
    ):
        try:
            save_safetensors(where, model, RULES | {"local": "local"})
        except CheckpointError as error:
            assert (first if preamble.RANK == 0 else other) in str(error), error
        else:
            raise AssertionError("no error")
    print("ok", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
