"""A decoder with latent attention and a mixture of experts, as in DeepSeek V3.

https://github.com/google/tunix/blob/main/tunix/models/deepseek_v3/model.py
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(slots=True)
class ModelConfig:
    embed_dim: int = 32
    num_heads: int = 4
    latent_dim: int = 16
    rope_dim: int = 4
    num_experts: int = 4
    max_length: int = 16
    act: Callable[[jax.Array], jax.Array] = nnx.silu
    score: Callable[[jax.Array], jax.Array] = lambda x: jax.nn.sigmoid(x)
    extra: dict = dataclasses.field(default_factory=lambda: {"scale": 1.0})


class RouterBias(nnx.Variable):
    pass


class RotaryTables:
    """An ordinary object with NumPy arrays."""

    def __init__(self, config):
        frequency = 10_000 ** -(np.arange(0, config.rope_dim, 2) / config.rope_dim)
        angles = np.outer(np.arange(config.max_length), frequency)
        self.cos, self.sin = np.float32(np.cos(angles)), np.float32(np.sin(angles))


class LatentAttention(nnx.Module):
    def __init__(self, config, tables, *, rngs):
        self.config, heads, dim = config, config.num_heads, config.embed_dim
        self.tables, self.cos, self.sin = [tables], jnp.array(tables.cos), jnp.array(tables.sin)
        self.mask = jnp.tril(jnp.ones((config.max_length, config.max_length), bool))
        rope = config.rope_dim
        self.kv_down = nnx.Linear(dim, config.latent_dim + rope, use_bias=False, rngs=rngs)
        self.kv_norm = nnx.RMSNorm(config.latent_dim, rngs=rngs)
        self.kv_up = nnx.LinearGeneral(config.latent_dim, (heads, 16), use_bias=False, rngs=rngs)
        self.q_proj = nnx.LinearGeneral(dim, (heads, 8 + rope), use_bias=False, rngs=rngs)
        self.o_proj = nnx.LinearGeneral((heads, 8), dim, axis=(-2, -1), rngs=rngs)

    def rope(self, x):
        cos, sin = (table[: x.shape[1], None] for table in (self.cos, self.sin))
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def __call__(self, x):
        length, latent = x.shape[1], self.config.latent_dim
        query, down = self.q_proj(x), self.kv_down(x)
        key, value = jnp.split(self.kv_up(self.kv_norm(down[..., :latent])), 2, -1)
        shared = self.rope(down[..., None, latent:])
        logits = jnp.einsum("BTHD,BSHD->BHTS", query[..., :8], key)
        logits += jnp.einsum("BTHR,BSXR->BHTS", self.rope(query[..., 8:]), shared)
        logits = jnp.where(self.mask[:length, :length], logits * 8**-0.5, -1e30)
        return self.o_proj(jnp.einsum("BHTS,BSHD->BTHD", jax.nn.softmax(logits), value))


class MoE(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config = config
        experts, dim = config.num_experts, config.embed_dim
        self.router = nnx.Linear(dim, experts, use_bias=False, rngs=rngs)
        self.bias = RouterBias(jnp.zeros(experts))
        init = nnx.initializers.normal(0.1)
        self.gate_proj = nnx.Param(init(rngs.params(), (experts, dim, 32)))
        self.down_proj = nnx.Param(init(rngs.params(), (experts, 32, dim)))
        self.load = nnx.Intermediate(jnp.zeros(experts))

    def __call__(self, x):
        config = self.config
        scores = config.score(self.router(x))
        _, chosen = jax.lax.top_k(scores + self.bias[...], 2)
        dispatch = jax.nn.one_hot(chosen, config.num_experts).sum(-2)
        self.load[...] = dispatch.mean((0, 1))
        weights = dispatch * scores / (dispatch * scores).sum(-1, keepdims=True)
        hidden = config.act(jnp.einsum("BTD,EDF->BTEF", x, self.gate_proj[...]))
        x = jnp.einsum("BTEF,EFD,BTE->BTD", hidden, self.down_proj[...], weights)
        return config.extra["scale"] * x


class DecoderLayer(nnx.Module):
    def __init__(self, config, tables, *, rngs):
        self.attn_norm = nnx.RMSNorm(config.embed_dim, rngs=rngs)
        self.attn = LatentAttention(config, tables, rngs=rngs)
        self.mlp = MoE(config, rngs=rngs)

    def __call__(self, x):
        x += self.attn(self.attn_norm(x))
        return x + self.mlp(x)


class DeepSeek(nnx.Module):
    def __init__(self, config, *, rngs):
        self.embedder = nnx.Embed(64, config.embed_dim, rngs=rngs)
        tables = RotaryTables(config)
        self.layers = nnx.List([DecoderLayer(config, tables, rngs=rngs) for _ in range(1)])

    def __call__(self, tokens):
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.attend(x)


def make():
    model = DeepSeek(ModelConfig(), rngs=nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2))
    return (nnx.ModelAndOptimizer(model, tx, wrt=nnx.Param),)


def batch(step):
    return (jax.random.randint(jax.random.key(step), (8, 13), 0, 64),)


def train_step(optimizer, tokens):
    def loss_fn(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    for layer in optimizer.model.layers:
        layer.mlp.bias[...] += 0.01 * jnp.sign(0.5 - layer.mlp.load[...])
    return loss


def train(jit, objects, steps):
    step_fn = jit(train_step, **OPTIONS)
    return [step_fn(*objects, *batch(step)) for step in range(steps)]


def shardings(strategy, optimizer):
    return (strategy(optimizer, optimizer.model),)


OPTIONS = {"donate_argnums": 0}
RULES = {r"(gate|down)_proj$": P("model"), r"(q_proj|kv_up)/kernel$": P(None, "model")}
