"""Trains a mixture of experts: ``python examples/train_moe.py``.

A decoder-only transformer whose blocks have experts instead of one MLP predicts the next byte of
Python's language reference. Experts are sharded over the axis ``expert``, all else over ``data``
(fsdp), and tokens are sent to the devices of their experts and back.

* ``--experts-axis 4``: the size of that axis; ``data`` has all other devices.
* ``--capacity 0`` drops no tokens; ``--capacity 24`` lets an expert take 24 of each sequence.
* ``--balance 0.01``: the weight of the loss that keeps experts equally busy.
* ``--explicit``: on a mesh with Explicit axes.
* ``--check``: the losses are compared with those of one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from typing import Any

# For the CPU only; JAX reads it when it is initialized.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from train_deep import batches

from nnx_sharding import jit, value_and_grad
from nnx_sharding.experimental import ExpertStatistics, dispatch_to_experts, expert_parallel
from nnx_sharding.partition import fsdp, make_mesh, sharded_init
from nnx_sharding.report import ProgramReport


@dataclasses.dataclass(frozen=True)
class Config:
    """What a run computes, and how. Each field is an option of the command line."""

    steps: int = 20
    batch: int = 32
    context: int = 64
    layers: int = 2
    features: int = 64
    heads: int = 4
    experts: int = 8
    chosen: int = 2
    capacity: int = 0
    balance: float = 0.01
    experts_axis: int = 4
    explicit: bool = False
    learning_rate: float = 0.1
    seed: int = 0


class Experts(nnx.Module):
    """A router and gated MLPs, of which each token gets the sum of a few."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        size, number = config.features, config.experts
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(size, number, use_bias=False, rngs=rngs)
        self.gate = nnx.Param(init(rngs.params(), (number, size, 2 * size)))
        self.up = nnx.Param(init(rngs.params(), (number, size, 2 * size)))
        self.down = nnx.Param(init(rngs.params(), (number, 2 * size, size)))
        self.config = config

    def mlps(self, rows: jax.Array, matmul: Any) -> jax.Array:
        """All experts, each for its rows."""
        hidden = nnx.silu(matmul(rows, self.gate[...])) * matmul(rows, self.up[...])
        return matmul(hidden, self.down[...])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ExpertStatistics]:
        """The output for ``x`` of shape (batch, length, features), and how experts were used."""
        logits = self.router(x)
        weights, indices = jax.lax.top_k(nnx.softmax(logits), self.config.chosen)
        return dispatch_to_experts(
            x,
            weights / weights.sum(-1, keepdims=True),
            indices,
            self.mlps,
            num_experts=self.config.experts,
            capacity=self.config.capacity or None,
            logits=logits,
        )


class Block(nnx.Module):
    """Attention and experts, each with a normalized input and a residual connection."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        size = config.features
        self.norm_attention = nnx.RMSNorm(size, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads, size, use_bias=False, decode=False, rngs=rngs
        )
        self.norm_experts = nnx.RMSNorm(size, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ExpertStatistics]:
        """The output for ``x`` of shape (batch, length, features), and how experts were used."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_attention(x), mask=mask)
        y, statistics = self.experts(self.norm_experts(x))
        return x + y, statistics


class Model(nnx.Module):
    """Predicts the next byte at each position of a text."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(256, config.features, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.features, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.features, rngs=rngs)
        self.head = nnx.Linear(config.features, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, ExpertStatistics]:
        """Logits of shape (batch, length, 256), and the statistics of each block."""
        x, found = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])), []
        for block in self.blocks:
            x, statistics = block(x)
            found.append(statistics)
        return self.head(self.norm(x)), jax.tree.map(lambda *each: jnp.stack(each), *found)


def make(config: Config) -> tuple[Model, nnx.Optimizer[Model]]:
    """A model and its optimizer."""
    model = Model(config, rngs=nnx.Rngs(config.seed))
    return model, nnx.Optimizer(model, optax.sgd(config.learning_rate), wrt=nnx.Param)


def mesh_of(config: Config) -> Mesh:
    """All devices, over data and experts."""
    kind = AxisType.Explicit if config.explicit else AxisType.Auto
    return make_mesh({"data": -1, "expert": config.experts_axis}, kind)


def sharding_of(config: Config, model: Any, optimizer: Any, mesh: Mesh) -> Any:
    """The sharding of the model and its optimizer."""
    base = expert_parallel(model, experts=config.experts, mesh=mesh)
    return fsdp(model, mesh=mesh, optimizer=optimizer, base=base, min_size=0)


def train_step(
    model: Any, optimizer: Any, tokens: jax.Array, *, balance: float
) -> tuple[jax.Array, ExpertStatistics]:
    """One step on a batch; returns the mean loss before it, and how experts were used."""

    def loss_of(model: Any) -> Any:
        logits, statistics = model(tokens[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return loss + balance * statistics.balance_loss.mean(), (loss, statistics)

    (_, results), grads = value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, grads)
    return results


def train(
    config: Config, mesh: Mesh | None
) -> tuple[list[float], list[ExpertStatistics], ProgramReport]:
    """Loss and statistics of each step on a mesh, or on one device; and what the step costs."""
    fun, build = (
        functools.partial(train_step, balance=config.balance),
        functools.partial(make, config),
    )
    if mesh is None:
        model, optimizer = build()
        step = jit(fun, donate_argnums=(0, 1))
    else:
        sharding = sharding_of(config, *nnx.eval_shape(build), mesh)
        model, optimizer = sharded_init(build, (sharding,) * 2, mesh)
        shardings = sharding, sharding, P(("data", "expert"))
        step = jit(fun, in_shardings=shardings, mesh=mesh, donate_argnums=(0, 1))
    report = step.lower(model, optimizer, next(batches(config))).compile().report()
    results = [jax.device_get(step(model, optimizer, batch)) for batch in batches(config)]
    return [float(loss) for loss, _ in results], [each for _, each in results], report


def main() -> None:
    """Trains, and prints losses, how busy the experts are, and what the step sends and holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Config):
        kind = {} if field.type == "bool" else {"type": type(field.default)}
        action = "store_true" if field.type == "bool" else "store"
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, default=field.default, action=action, **kind)
    parser.add_argument("--check", action="store_true", help="compare with one device")
    options = vars(parser.parse_args())
    check, config = options.pop("check"), Config(**options)
    losses, statistics, report = train(config, mesh_of(config))
    print(report)
    for name, each in (("first", statistics[0]), ("last", statistics[-1])):
        share = each.tokens / each.tokens.sum(-1, keepdims=True)
        dropped = each.dropped.sum() / each.tokens.sum()
        print(
            f"{name} step: an expert gets {share.min():.1%} to {share.max():.1%} of the tokens, "
            f"{dropped:.1%} are dropped, balance loss {each.balance_loss.mean():.3f}"
        )
    print(f"loss: {losses[0]:.3f} before training, {losses[-1]:.3f} after {config.steps} steps")
    if check:
        alone, *_ = train(config, None)
        np.testing.assert_allclose(losses, alone, rtol=1e-4)
        print("the losses are those of one device")


if __name__ == "__main__":
    main()
