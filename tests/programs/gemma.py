"""A decoder with a KV cache, trained and sampled from, as in Flax's Gemma example.

https://github.com/google/flax/tree/main/examples/gemma
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from .layers import apply_rope
from .sampler import Sampler, Vocab

Kind = enum.Enum("Kind", ["GLOBAL", "LOCAL_SLIDING"])


@dataclasses.dataclass(frozen=True)
class SowConfig:
    after_attention: bool = False

    def maybe_sow(self, x, module):
        if self.after_attention:
            module.sow(nnx.Intermediate, "after_attention", x)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    embed_dim: int = 32
    num_heads: int = 4
    softcap: float | None = 30.0
    attention_types: tuple[Kind, ...] = (Kind.LOCAL_SLIDING, Kind.GLOBAL)


class Einsum(nnx.Module):
    def __init__(self, einsum_str, shape, *, rngs):
        self.einsum_str, self.shape = einsum_str, shape
        self.w = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class Attention(nnx.Module):
    def __init__(self, config, kind, *, rngs):
        self.kind, heads, dim = kind, config.num_heads, config.embed_dim
        self.qkv_einsum = Einsum("BTD,SNDH->SBTNH", (3, heads, dim, 8), rngs=rngs)
        self.attn_vec_einsum = Einsum("BTNH,NHD->BTD", (heads, 8, dim), rngs=rngs)
        self._query_norm = nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, x, positions, cache, mask):
        query, key, value = self.qkv_einsum(x)
        query, key = apply_rope(self._query_norm(query), positions), apply_rope(key, positions)
        if cache is not None:
            start = (0, cache["end_index"][0], 0, 0)
            key = jax.lax.dynamic_update_slice(cache["k"], key, start)
            value = jax.lax.dynamic_update_slice(cache["v"], value, start)
            cache = {"k": key, "v": value, "end_index": cache["end_index"] + x.shape[1]}
        if self.kind == Kind.LOCAL_SLIDING:
            mask = mask & (positions[:, :, None] - jnp.arange(key.shape[1]) < 4)
        logits = jnp.einsum("BTNH,BSNH->BNTS", query, key)
        probs = jax.nn.softmax(jnp.where(mask[:, None], logits, -1e30), -1)
        return cache, self.attn_vec_einsum(jnp.einsum("BNTS,BSNH->BTNH", probs, value))


class Block(nnx.Module):
    def __init__(self, config, kind, sow_config, *, rngs):
        self.pre_attention_norm = nnx.RMSNorm(config.embed_dim, rngs=rngs)
        self.attn = Attention(config, kind, rngs=rngs)
        self.gate_proj = nnx.Linear(config.embed_dim, 64, rngs=rngs)
        self.down_proj = nnx.Linear(64, config.embed_dim, use_bias=False, rngs=rngs)
        self.sow_config = sow_config

    def __call__(self, x, positions, cache, mask):
        cache, y = self.attn(self.pre_attention_norm(x), positions, cache, mask)
        self.sow_config.maybe_sow(x + y, self)
        return cache, x + y + self.down_proj(nnx.gelu(self.gate_proj(x + y)))


class Transformer(nnx.Module):
    def __init__(self, config, *, rngs, sow_config):
        self.config = config
        self.embedder = nnx.Embed(64, config.embed_dim, rngs=rngs)
        kinds = config.attention_types
        self.layers = nnx.List([Block(config, kind, sow_config, rngs=rngs) for kind in kinds])

    def __call__(self, tokens, positions, cache, mask):
        x = self.embedder(tokens) * jnp.sqrt(self.config.embed_dim)
        new_cache = {}
        for i, layer in enumerate(self.layers):
            layer_cache = cache[f"layer_{i}"] if cache else None
            new_cache[f"layer_{i}"], x = layer(x, positions, layer_cache, mask)
        softcap = self.config.softcap
        return softcap * jnp.tanh(self.embedder.attend(x) / softcap), new_cache

    def init_cache(self, batch, length):
        zeros = jnp.zeros((batch, length, self.config.num_heads, 8))
        layer = {"k": zeros, "v": zeros, "end_index": jnp.zeros(batch, jnp.int32)}
        return {f"layer_{i}": layer for i in range(len(self.layers))}


def make():
    model = Transformer(
        TransformerConfig(), rngs=nnx.Rngs(params=0), sow_config=SowConfig(after_attention=True)
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return model, nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)


def batch(step):
    tokens = jax.random.randint(jax.random.key(step), (8, 12), 1, 64)
    return ({"inputs": tokens, "inputs_position": jnp.broadcast_to(jnp.arange(12), (8, 12))},)


def train_step(model, optimizer, batch):
    tokens = batch["inputs"]
    mask = (tokens > 0)[:, None] & jnp.tril(jnp.ones((12, 12), bool))

    def loss_fn(model):
        forward = nnx.capture(model, nnx.Intermediate)
        (logits, _), sown = forward(tokens, batch["inputs_position"], None, mask)
        logits = logits[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), (logits, sown)

    (loss, (logits, sown)), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, {"accuracy": (logits.argmax(-1) == tokens[:, 1:]).mean(), "sown": sown}


def train(jit, objects, steps):
    step_fn = jit(train_step, **OPTIONS)
    metrics = [step_fn(*objects, *batch(step)) for step in range(steps)]
    sampler = Sampler(jit, objects[0], Vocab())
    prompts = jnp.zeros((2, 8), jnp.int32).at[:, :2].set(3)
    return metrics, [sampler(prompts, temperature=0.5) for _ in range(2)]


OPTIONS = {"donate_argnums": (0, 1)}
RULES = {
    r"qkv_einsum/w$": P(None, "model"),
    r"attn_vec_einsum/w$": P("model"),
    r"gate_proj/kernel$": P("data", "model"),
    r"down_proj/kernel$": P("model", "data"),
    r"embedding$": P("model"),
}
