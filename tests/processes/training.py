"""Trains the transformer example and the demo, and prints their losses."""

import json
import os
import sys
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding.placement import process_rows, shard_batches

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import demo
import transformer

STEPS = 11
CONFIG = transformer.Config(context=16, features=32, layers=1, batch=8)


def losses_of_demo():
    """The loss at each step of an epoch."""
    mesh, digits = demo.make_mesh(demo.mesh_sizes(8)), demo.Digits.load(0)
    with jax.set_mesh(mesh):
        model, optimizer = demo.create_sharded(nnx.Rngs(0), steps=STEPS)
        rows = process_rows(P("data"), demo.BATCH)
        [epoch] = digits.epochs(1, seed=0)
        batches = [(images[rows], labels[rows]) for images, labels in epoch[:STEPS]]
        losses = []
        for images, labels in shard_batches(batches, P("data"), uneven="error"):
            losses.append(float(demo.train_step(model, optimizer, images, labels)))
    assert jax.process_count() == 1 or not model.up.kernel[...].is_fully_addressable
    return losses


def main():
    """Prints the losses of both, in processes that have joined each other."""
    os.environ.pop("JAX_COORDINATOR_ADDRESS")  # with which the example joins them
    sys.argv[1:] = ["--steps", str(STEPS)]
    transformer.main(CONFIG)
    print(json.dumps({"demo": losses_of_demo()}), flush=True)
