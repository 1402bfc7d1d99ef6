"""Architectures as they are published, in NumPy, from tensors in Hugging Face's names.

Each is small and random: ``*_tensors`` makes the weights, and a function of the same name computes
logits from these. Nothing here uses JAX or the library that is tested. Numbers are float64.
"""

from __future__ import annotations

import math

import numpy as np

Tensors = dict[str, np.ndarray]


class Made(Tensors):
    """Random tensors by name, of a size that keeps activations near 1."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int) -> None:
        scale = 1 / math.sqrt(math.prod(shape[1:]))
        self[name] = self._rng.normal(scale=scale, size=shape).astype(np.float32)

    def vector(self, name: str, size: int, mean: float = 0.0) -> None:
        self[name] = (mean + 0.3 * self._rng.normal(size=size)).astype(np.float32)


def wide(tensors: Tensors) -> Tensors:
    return {name: x.astype(np.float64) for name, x in tensors.items()}


def rms_norm(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rotary(x, theta, *, in_pairs=False):
    """Rotates (length, heads, d): feature i with i + d / 2, or as Meta, 2 i with 2 i + 1."""
    length, _, d = x.shape
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, d, 2) / d)  # (length, d / 2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if in_pairs else np.split(x, 2, -1)
    halves = a * cos - b * sin, b * cos + a * sin
    return np.stack(halves, -1).reshape(x.shape) if in_pairs else np.concatenate(halves, -1)


def attention(q, k, v, *, scale, mask):
    """Grouped queries: q (length, heads, d), k and v (length, kv heads, d)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)  # query head h reads h // group
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    weights = softmax(np.where(mask, scores, -np.inf))
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)  # (length, heads * d)


def causal(length):
    return np.tril(np.ones((length, length), bool))


# The configuration of the language models. All sizes differ, unless a test wants otherwise.
LAYERS, EMBED, HEADS, KV, HEAD_DIM, HIDDEN, VOCAB = 2, 24, 6, 3, 8, 40, 50
THETA = 10_000.0


def decoder_tensors(seed=0, *, mlp=True, qk_norm=False, tied=False, embed=EMBED) -> Made:
    """The tensors that Llama, Qwen3, Gemma and Mixtral have in common."""
    made = Made(seed)
    made.matrix("model.embed_tokens.weight", VOCAB, embed)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        made.vector(layer + "input_layernorm.weight", embed, 1)
        for name, heads in ("q", HEADS), ("k", KV), ("v", KV):
            made.matrix(f"{layer}self_attn.{name}_proj.weight", heads * HEAD_DIM, embed)
        made.matrix(f"{layer}self_attn.o_proj.weight", embed, HEADS * HEAD_DIM)
        if qk_norm:
            made.vector(layer + "self_attn.q_norm.weight", HEAD_DIM, 1)
            made.vector(layer + "self_attn.k_norm.weight", HEAD_DIM, 1)
        made.vector(layer + "post_attention_layernorm.weight", embed, 1)
        if mlp:
            made.matrix(layer + "mlp.gate_proj.weight", HIDDEN, embed)
            made.matrix(layer + "mlp.up_proj.weight", HIDDEN, embed)
            made.matrix(layer + "mlp.down_proj.weight", embed, HIDDEN)
    made.vector("model.norm.weight", embed, 1)
    if not tied:
        made.matrix("lm_head.weight", VOCAB, embed)
    return made


def self_attention(w, layer, x, *, theta=THETA, mask=None, scale=HEAD_DIM**-0.5, norm=None):
    """Attention of one layer; ``norm`` is that of queries and keys, before they are rotated."""
    q, k, v = (
        (x @ w[f"{layer}self_attn.{name}_proj.weight"].T).reshape(len(x), -1, HEAD_DIM)
        for name in "qkv"
    )
    if norm is not None:
        q = norm(q, w[layer + "self_attn.q_norm.weight"])
        k = norm(k, w[layer + "self_attn.k_norm.weight"])
    q, k = rotary(q, theta), rotary(k, theta)
    mask = causal(len(x)) if mask is None else mask
    return attention(q, k, v, scale=scale, mask=mask) @ w[layer + "self_attn.o_proj.weight"].T


def gated_mlp(w, layer, x, activation=silu):
    gate, up = (x @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (activation(gate) * up) @ w[layer + "mlp.down_proj.weight"].T


def llama(tensors: Tensors, tokens, *, norm=None) -> np.ndarray:
    """Logits of one sequence; with ``norm`` those of Qwen3, which has it on queries and keys."""
    w = wide(tensors)
    x = w["model.embed_tokens.weight"][tokens]  # (length, embed)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        y = rms_norm(x, w[layer + "input_layernorm.weight"])
        x = x + self_attention(w, layer, y, norm=norm)
        y = rms_norm(x, w[layer + "post_attention_layernorm.weight"])
        x = x + gated_mlp(w, layer, y)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms_norm(x, w["model.norm.weight"]) @ head.T


def qwen3(tensors: Tensors, tokens) -> np.ndarray:
    return llama(tensors, tokens, norm=rms_norm)
