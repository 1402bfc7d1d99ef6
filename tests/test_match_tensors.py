"""``match_tensors``: logits of models that it filled, against NumPy, and all that it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import published
from nnx_sharding import StateSharding, stack
from nnx_sharding.checkpoint import (
    Tensor,
    TensorRules,
    load_safetensors,
    match_tensors,
    save_safetensors,
)
from nnx_sharding.errors import CheckpointError, NoCheckpointError
from nnx_sharding.partition import abstract_init
from published import EMBED, HEAD_DIM, HEADS, HIDDEN, KV, LAYERS, THETA, VOCAB
from zoo import mesh_of

safetensors = pytest.importorskip("safetensors.numpy")

MESH = mesh_of((2, 4), ("data", "model"))
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 11)


def zeros(*shape):
    """A parameter; what is not loaded shows."""
    return nnx.Param(jnp.full(shape, jnp.nan))


def rotary(x):
    """As Llama in Hugging Face: (length, heads, d), feature i with i + d / 2."""
    angles = jnp.arange(len(x))[:, None] * THETA ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q, k, v):
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def bare(kind, *args, **options):
    return kind(*args, use_bias=False, rngs=nnx.Rngs(0), **options)


class Attention(nnx.Module):
    """Kernels of Flax, with names of our own."""

    def __init__(self):
        self.query = bare(nnx.LinearGeneral, EMBED, (HEADS, HEAD_DIM))
        self.key = bare(nnx.LinearGeneral, EMBED, (KV, HEAD_DIM))
        self.value = bare(nnx.LinearGeneral, EMBED, (KV, HEAD_DIM))
        self.out = bare(nnx.LinearGeneral, (HEADS, HEAD_DIM), EMBED, axis=(-2, -1))

    def __call__(self, x):
        return self.out(attend(rotary(self.query(x)), rotary(self.key(x)), self.value(x)))


class FusedAttention(nnx.Module):
    """One array for all heads, of which the first ones are queries."""

    def __init__(self):
        self.qkv = bare(nnx.LinearGeneral, EMBED, (HEADS + 2 * KV, HEAD_DIM))
        self.o_proj = bare(nnx.LinearGeneral, (HEADS, HEAD_DIM), EMBED, axis=(-2, -1))

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(x), (HEADS, HEADS + KV), 1)
        return self.o_proj(attend(rotary(q), rotary(k), v))


class EinsumAttention(nnx.Module):
    """Arrays as in Gemma's own code: heads first, and keys and values in one."""

    def __init__(self):
        self.q_einsum = zeros(HEADS, EMBED, HEAD_DIM)
        self.kv_einsum = zeros(2, KV, EMBED, HEAD_DIM)
        self.attn_vec_einsum = zeros(HEADS, HEAD_DIM, EMBED)

    def __call__(self, x):
        q = jnp.einsum("te,hed->thd", x, self.q_einsum[...])
        k, v = jnp.einsum("te,khed->kthd", x, self.kv_einsum[...])
        y = attend(rotary(q), rotary(k), v)
        return jnp.einsum("thd,hde->te", y, self.attn_vec_einsum[...])


class MLP(nnx.Module):
    def __init__(self):
        self.gate = bare(nnx.Linear, EMBED, HIDDEN)
        self.up = bare(nnx.Linear, EMBED, HIDDEN)
        self.down = bare(nnx.Linear, HIDDEN, EMBED)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class FusedMLP(nnx.Module):
    def __init__(self, *shape):
        self.gate_up = zeros(*shape)
        self.down_proj = bare(nnx.Linear, HIDDEN, EMBED)

    def __call__(self, x):
        kernel = self.gate_up[...]
        equations = {(EMBED, 2, HIDDEN): "te,ekh->kth", (2, EMBED, HIDDEN): "te,keh->kth"}
        if kernel.ndim == 2:
            gate, up = jnp.split(x @ kernel, 2, -1)
        else:
            gate, up = jnp.einsum(equations[kernel.shape], x, kernel)
        return self.down_proj(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    def __init__(self, attention, mlp):
        self.ln_1 = nnx.RMSNorm(EMBED, rngs=nnx.Rngs(0))
        self.attn = attention()
        self.ln_2 = nnx.RMSNorm(EMBED, rngs=nnx.Rngs(0))
        self.mlp = mlp()

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Llama(nnx.Module):
    def __init__(self, attention=Attention, mlp=MLP, *, stacked=False, tied=False):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=nnx.Rngs(0))
        if stacked:
            self.blocks = stack(lambda rngs: Block(attention, mlp), LAYERS, rngs=nnx.Rngs(0))
        else:
            self.blocks = nnx.List(Block(attention, mlp) for _ in range(LAYERS))
        self.final_norm = nnx.RMSNorm(EMBED, rngs=nnx.Rngs(0))
        self.lm_head = None if tied else bare(nnx.Linear, EMBED, VOCAB)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        return self.embed.attend(x) if self.lm_head is None else self.lm_head(x)


def written(folder, tensors):
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


MODELS = {
    "plain": Llama,
    "fused heads, two halves": lambda: Llama(FusedAttention, lambda: FusedMLP(EMBED, 2 * HIDDEN)),
    "einsum, first dimension": lambda: Llama(EinsumAttention, lambda: FusedMLP(2, EMBED, HIDDEN)),
    "stacked": lambda: Llama(stacked=True),
    "stacked and fused": lambda: Llama(
        FusedAttention, lambda: FusedMLP(EMBED, 2, HIDDEN), stacked=True
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_llama(tmp_path, name):
    tensors = published.decoder_tensors()
    folder = written(tmp_path, tensors)
    model = MODELS[name]()
    rules = match_tensors(nnx.eval_shape(MODELS[name]), folder)
    load_safetensors(folder, model, rules)
    expected = published.llama(tensors, TOKENS)
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-4)
