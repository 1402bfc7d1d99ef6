"""Distillation into a Qwen decoder with LoRA, by a trainer as in Tunix.

https://github.com/google/tunix/blob/main/tunix/models/qwen3/model.py
https://github.com/google/tunix/blob/main/tunix/distillation/distillation_trainer.py
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from .layers import apply_rope
from .trainer import GradientAccumulator, TrainingInput

RematConfig = enum.Enum("RematConfig", ["NONE", "BLOCK"])


@dataclasses.dataclass(slots=True, frozen=True)
class ShardingConfig:
    q_weight_dnh: tuple[str | None, ...] = ("fsdp", "tp", None)
    o_weight_nhd: tuple[str | None, ...] = ("tp", None, "fsdp")
    ffw_weight_df: tuple[str | None, ...] = ("fsdp", "tp")


@dataclasses.dataclass(slots=True)
class ModelConfig:
    num_layers: int = 1
    embed_dim: int = 32
    num_heads: int = 4
    lora_rank: int | None = None
    remat_config: RematConfig = RematConfig.BLOCK
    shd_config: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    dtype: jnp.dtype = jnp.float32


class Einsum(nnx.Module):
    def __init__(self, einsum_str, shape, sharding, config, *, rngs):
        self.einsum_str, self.shape, self.config = einsum_str, shape, config
        init = nnx.initializers.glorot_uniform()
        self.w = nnx.Param(init(rngs.params(), shape), out_sharding=sharding)
        if config.lora_rank:
            rank = (shape[0], config.lora_rank), (config.lora_rank, *shape[1:])
            self.w_lora_a = nnx.LoRAParam(init(rngs.lora(), rank[0]))
            self.w_lora_b = nnx.LoRAParam(jnp.zeros(rank[1]))

    @jax.named_scope("einsum")
    def __call__(self, x):
        w = jnp.astype(self.w[...], self.config.dtype)
        if self.config.lora_rank:
            w += jnp.tensordot(self.w_lora_a[...], self.w_lora_b[...], 1)
        return jnp.einsum(self.einsum_str, x, w)


class DecoderLayer(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config, shd_config = config, config.shd_config
        q, kv = (config.embed_dim, config.num_heads, 8), (config.embed_dim, 2, 8)
        einsum = functools.partial(Einsum, config=config, rngs=rngs)
        self.q_proj = einsum("BTD,DNH->BTNH", q, shd_config.q_weight_dnh)
        self.k_proj = einsum("BTD,DNH->BTNH", kv, shd_config.q_weight_dnh)
        self.v_proj = einsum("BTD,DNH->BTNH", kv, shd_config.q_weight_dnh)
        self.o_proj = einsum("BTNH,NHD->BTD", (*q[1:], q[0]), shd_config.o_weight_nhd)
        self.gate_proj = einsum("BTD,DF->BTF", (q[0], 64), shd_config.ffw_weight_df)
        self.down_proj = einsum("BTF,FD->BTD", (64, q[0]), shd_config.ffw_weight_df[::-1])
        self.norm = nnx.RMSNorm(q[0], rngs=rngs)

    def block(self, x, positions):
        y = self.norm(x)
        query, key = apply_rope(self.q_proj(y), positions), apply_rope(self.k_proj(y), positions)
        y = jax.nn.dot_product_attention(query, key, self.v_proj(y), is_causal=True)
        x += self.o_proj(y)
        return x + self.down_proj(nnx.silu(self.gate_proj(x)))

    def __call__(self, x, positions):
        if self.config.remat_config == RematConfig.BLOCK:
            return nnx.remat(self.block.__func__)(self, x, positions)
        return self.block(x, positions)


class Qwen3(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config = config
        self.embedder = nnx.Embed(64, config.embed_dim, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(self, tokens):
        x = self.embedder(tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        for layer in self.layers:
            x = layer(x, positions)
        return self.embedder.attend(x)


@nnx.use_eager_sharding(False)
def make():
    teacher = Qwen3(ModelConfig(), rngs=nnx.Rngs(1))
    student = Qwen3(ModelConfig(lora_rank=4), rngs=nnx.Rngs(0, lora=2))
    optimizer = nnx.Optimizer(student, optax.adamw(1e-2), wrt=nnx.LoRAParam)
    return student, optimizer, GradientAccumulator(student, nnx.LoRAParam), teacher


def batch(step):
    tokens = jax.random.randint(jax.random.key(step), (8, 12), 0, 64)
    return TrainingInput(tokens), jnp.bool(step % 2)


def train_step(model, optimizer, grad_accumulator, teacher, inputs, is_update_step):
    targets = nnx.softmax(teacher(inputs.input_tokens) / inputs.temperature)

    def loss_fn(model):
        log_probs = nnx.log_softmax(model(inputs.input_tokens) / inputs.temperature)
        losses = optax.losses.kl_divergence(log_probs, targets)
        return losses.mean(), {"perplexity": jnp.exp(losses).mean()}

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    (loss, aux), grads = nnx.value_and_grad(loss_fn, argnums=wrt, has_aux=True)(model)
    grad_accumulator.add(grads)

    def apply_updates(model, optimizer, grad_accumulator):
        grads = grad_accumulator.get()
        optimizer.update(model, grads)
        grad_accumulator.reset()
        return optax.tree.norm(grads)

    objects = model, optimizer, grad_accumulator
    norm = nnx.cond(is_update_step, apply_updates, lambda *_: jnp.zeros(()), *objects)
    return loss, aux, norm


def train(jit, objects, steps):
    step_fn = nnx.cached_partial(jit(train_step, **OPTIONS), *objects)
    return [step_fn(*batch(step)) for step in range(steps)]


def shardings(strategy, student, optimizer, grad_accumulator, teacher):
    following = (strategy(tree, student) for tree in (optimizer, grad_accumulator))
    return strategy(student), *following, strategy(teacher)


BATCH = P("data"), P()
OPTIONS = {"donate_argnames": ("optimizer", "grad_accumulator")}
LOGICAL = {"fsdp": "data", "tp": "model"}
RULES = {r"(q|o)_proj/w$": P("data", "model")}
