"""Plans the training of 7 billion parameters on 256 devices: ``python examples/plan_7b.py``.

No device is needed: the model consists of shapes, and the training step is compiled for 256 virtual
CPU devices, once for each strategy. The table shows which strategies fit a device.

The memory of the state can be computed by hand. A parameter is stored in float32, and Adam stores
two moments of it: 12 bytes, so 75.3 GiB for 6.74 billion. With ``dp`` each device holds all of it,
with ``fsdp`` a 256th.

The layers are one loop (``nnx.scan``), which compiles in the time of one layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding.partition import (
    fsdp,
    replicated,
    tensor_parallel,
    with_sharding_constraint,
    zero1,
)
from nnx_sharding.report import Comparison, Strategy, compare


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of the model (that of Llama 2 7B) and of a batch."""

    vocabulary: int = 32000
    features: int = 4096
    hidden: int = 11008
    heads: int = 32
    layers: int = 32
    context: int = 2048
    batch: int = 256


CONFIG = Config()


class Block(nnx.Module):
    """Attention, then a gated MLP, each on a normalised input and added to it."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        features, hidden = config.features, config.hidden
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm_attention = nnx.RMSNorm(features, **options)
        self.attention = nnx.MultiHeadAttention(
            config.heads, features, decode=False, use_bias=False, **options
        )
        self.norm_mlp = nnx.RMSNorm(features, **options)
        self.gate = nnx.Linear(features, hidden, use_bias=False, **options)
        self.up = nnx.Linear(features, hidden, use_bias=False, **options)
        self.down = nnx.Linear(hidden, features, use_bias=False, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for ``x`` of shape (batch, length, features)."""
        # The carry of the loop over the layers is sharded over the batch in all strategies.
        x = with_sharding_constraint(x, P("data"))
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_attention(x), mask=mask)
        h = self.norm_mlp(x)
        x = x + self.down(nnx.silu(self.gate(h)) * self.up(h))
        return with_sharding_constraint(x, P("data"))


class Transformer(nnx.Module):
    """Predicts the next token at each place of a text."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.tokens = nnx.Embed(config.vocabulary, config.features, **options)
        stacked = nnx.vmap(lambda rngs: Block(config, rngs))
        self.blocks = stacked(rngs.split(config.layers))
        self.norm = nnx.RMSNorm(config.features, **options)
        self.head = nnx.Linear(config.features, config.vocabulary, use_bias=False, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of shape (batch, length, vocabulary) for ``tokens`` of shape (batch, length)."""
        # Only the input of each layer is stored; the rest is recomputed for the gradients.
        layer = nnx.remat(lambda block, x: block(x))
        scan = nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        x = scan(self.blocks, self.tokens(tokens))
        return self.head(self.norm(x))


def make(config: Config) -> tuple[Transformer, nnx.Optimizer[Transformer]]:
    """A model and its optimizer."""
    model = Transformer(config, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-4), wrt=nnx.Param)


def train_step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
    """One step on tokens of shape (batch, context + 1); returns the loss."""

    def loss_of(model: Any) -> jax.Array:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def strategies(data: Mapping[str, int], both: Mapping[str, int]) -> dict[str, Strategy]:
    """The strategies, on a mesh with the axis ``data`` and on one that also has ``model``."""

    def dp(model: Any, optimizer: Any, tokens: Any) -> Any:
        sharding = replicated(model, optimizer=optimizer)
        return sharding, sharding, P("data")

    def sharded_moments(model: Any, optimizer: Any, tokens: Any) -> Any:
        sharding = zero1(model, optimizer=optimizer)
        return sharding, sharding, P("data")

    def sharded_state(model: Any, optimizer: Any, tokens: Any) -> Any:
        sharding = fsdp(model, optimizer=optimizer)
        return sharding, sharding, P("data")

    def both_axes(model: Any, optimizer: Any, tokens: Any) -> Any:
        sharding = fsdp(model, base=tensor_parallel(model), optimizer=optimizer)
        return sharding, sharding, P("data")

    return {
        "dp": Strategy(dp, mesh=data),
        "zero1": Strategy(sharded_moments, mesh=data),
        "fsdp": Strategy(sharded_state, mesh=data),
        "tp × fsdp": Strategy(both_axes, mesh=both),
    }


def plan(config: Config = CONFIG, ways: Mapping[str, Strategy] | None = None) -> Comparison:
    """The strategies side by side, for devices with 16 GiB; by default 256 of them."""
    model, optimizer = nnx.eval_shape(lambda: make(config))
    tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32)
    return compare(
        strategies({"data": 256}, {"data": 32, "model": 8}) if ways is None else ways,
        train_step,
        model,
        optimizer,
        tokens,
        memory_limit="16 GiB",
        donate_argnums=(0, 1),
        auto_axes=True,  # the loss is outside of modules; logits stay sharded over the vocabulary
    )


def size_of(config: Config) -> int:
    """The number of parameters."""
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    return sum(array.size for array in jax.tree.leaves(nnx.state(model, nnx.Param)))


def main() -> None:
    """Prints the table, and the time and memory of the planning."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()

    config = Config(layers=options.layers)
    start = time.perf_counter()
    count = size_of(config)
    kept = 12 * count / 2**30
    tokens = config.batch * config.context
    print(f"{count / 1e9:.2f} billion parameters: with Adam {kept:.1f} GiB,", end=" ")
    print(f"on each of 256 devices {kept / 256:.3f} GiB")
    # 2 for each parameter and token forward, 4 backward, 2 for the recomputation.
    print(f"about {8 * count * tokens / 256:.3g} flops on each device for {tokens} tokens")
    print(plan(config))
    # In KiB on Linux, in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
    print(f"planned in {time.perf_counter() - start:.0f} s and {peak:.2f} GiB on this machine")


if __name__ == "__main__":
    main()
