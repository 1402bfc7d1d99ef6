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


def llama(tensors: Tensors, tokens, *, norm=None, theta=THETA) -> np.ndarray:
    """Logits of one sequence; with ``norm`` those of Qwen3, which has it on queries and keys."""
    w = wide(tensors)
    x = w["model.embed_tokens.weight"][tokens]  # (length, embed)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        y = rms_norm(x, w[layer + "input_layernorm.weight"])
        x = x + self_attention(w, layer, y, norm=norm, theta=theta)
        y = rms_norm(x, w[layer + "post_attention_layernorm.weight"])
        x = x + gated_mlp(w, layer, y)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms_norm(x, w["model.norm.weight"]) @ head.T


def qwen3(tensors: Tensors, tokens, **options) -> np.ndarray:
    return llama(tensors, tokens, norm=rms_norm, **options)


def gelu(x):
    """The approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(w, name, x, eps=1e-5):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * w[name + ".weight"] + w[name + ".bias"]


def gelu_exact(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


# Gemma 3: each sixth layer sees everything, the others only so many tokens.
WINDOW, LOCAL_THETA, GLOBAL_THETA = 4, 10_000.0, 1_000_000.0
GEMMA_LAYERS = 6
QUERY_SCALE = 12.0  # `query_pre_attn_scalar`, which is not the size of a head


def gemma3_tensors(seed=0) -> Made:
    """Scales of norms are stored as what is added to 1."""
    made = Made(seed)
    made.matrix("model.embed_tokens.weight", VOCAB, EMBED)
    for i in range(GEMMA_LAYERS):
        layer = f"model.layers.{i}."
        for name, heads in ("q", HEADS), ("k", KV), ("v", KV):
            made.matrix(f"{layer}self_attn.{name}_proj.weight", heads * HEAD_DIM, EMBED)
        made.matrix(f"{layer}self_attn.o_proj.weight", EMBED, HEADS * HEAD_DIM)
        for name in "qk":
            made.vector(f"{layer}self_attn.{name}_norm.weight", HEAD_DIM)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            made.vector(f"{layer}{name}_layernorm.weight", EMBED)
        for name in ("gate", "up"):
            made.matrix(f"{layer}mlp.{name}_proj.weight", HIDDEN, EMBED)
        made.matrix(f"{layer}mlp.down_proj.weight", EMBED, HIDDEN)
    made.vector("model.norm.weight", EMBED)
    return made


def gemma3(tensors: Tensors, tokens, *, query_scale=QUERY_SCALE) -> np.ndarray:
    w = wide(tensors)

    def norm(x, weight):
        return rms_norm(x, 1 + weight)

    x = w["model.embed_tokens.weight"][tokens] * math.sqrt(EMBED)
    full = causal(len(tokens))
    local = full & ~np.tril(full, -WINDOW)  # itself and the WINDOW - 1 tokens before
    for i in range(GEMMA_LAYERS):
        layer = f"model.layers.{i}."
        is_global = i % 6 == 5
        y = self_attention(
            w,
            layer,
            norm(x, w[layer + "input_layernorm.weight"]),
            theta=GLOBAL_THETA if is_global else LOCAL_THETA,
            mask=full if is_global else local,
            scale=query_scale**-0.5,
            norm=norm,
        )
        x = x + norm(y, w[layer + "post_attention_layernorm.weight"])
        y = gated_mlp(w, layer, norm(x, w[layer + "pre_feedforward_layernorm.weight"]), gelu)
        x = x + norm(y, w[layer + "post_feedforward_layernorm.weight"])
    return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


EXPERTS, CHOSEN = 4, 2
MIXTRAL = ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2"))
QWEN3_MOE = ("mlp.gate", "mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj"))


def experts_tensors(names=MIXTRAL, seed=0, *, qk_norm=False) -> Made:
    router, expert, matrices = names
    made = decoder_tensors(seed, mlp=False, qk_norm=qk_norm)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        made.matrix(f"{layer}{router}.weight", EXPERTS, EMBED)
        for e in range(EXPERTS):
            shapes = (HIDDEN, EMBED), (HIDDEN, EMBED), (EMBED, HIDDEN)
            for name, shape in zip(matrices, shapes, strict=True):
                made.matrix(f"{layer}{expert.format(e, name)}.weight", *shape)
    return made


def mixtral(tensors: Tensors, tokens, names=MIXTRAL, *, norm=None, theta=THETA) -> np.ndarray:
    """Each token goes to its two best experts, whose weights sum to 1."""
    router, expert, matrices = names
    w = wide(tensors)
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        y = rms_norm(x, w[layer + "input_layernorm.weight"])
        x = x + self_attention(w, layer, y, norm=norm, theta=theta)
        y = rms_norm(x, w[layer + "post_attention_layernorm.weight"])
        scores = softmax(y @ w[f"{layer}{router}.weight"].T)  # (length, experts)
        added = np.zeros_like(x)
        for t, row in enumerate(scores):
            chosen = np.argsort(-row)[:CHOSEN]
            for e in chosen:
                gate, up, down = (w[f"{layer}{expert.format(e, m)}.weight"] for m in matrices)
                hidden = silu(gate @ y[t]) * (up @ y[t])
                added[t] += row[e] / row[chosen].sum() * (down @ hidden)
        x = x + added
    return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


IMAGE, PATCH, CHANNELS, CLASSES = 8, 4, 3, 7


def vit_tensors(seed=0) -> Made:
    made = Made(seed)
    width, heads = EMBED, "vit.encoder.layer.{}.attention.attention.{}"
    made.matrix("vit.embeddings.cls_token", 1, 1, width)
    made.matrix("vit.embeddings.position_embeddings", 1, (IMAGE // PATCH) ** 2 + 1, width)

    def linear(name, *shape):
        made.matrix(f"{name}.weight", *shape)
        made.vector(f"{name}.bias", shape[0])

    def norm(name):
        made.vector(f"{name}.weight", width, 1)
        made.vector(f"{name}.bias", width)

    linear("vit.embeddings.patch_embeddings.projection", width, CHANNELS, PATCH, PATCH)
    for i in range(LAYERS):
        layer = f"vit.encoder.layer.{i}."
        for name in ("query", "key", "value"):
            linear(heads.format(i, name), width, width)
        linear(layer + "attention.output.dense", width, width)
        linear(layer + "intermediate.dense", HIDDEN, width)
        linear(layer + "output.dense", width, HIDDEN)
        norm(layer + "layernorm_before")
        norm(layer + "layernorm_after")
    norm("vit.layernorm")
    linear("classifier", CLASSES, width)
    return made


def vit(tensors: Tensors, image, *, activation=None) -> np.ndarray:
    """Logits of an image (height, width, channels), by default with GELU as it is defined."""
    w = wide(tensors)
    activation = activation or gelu_exact

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        return layer_norm(w, name, x, 1e-12)

    side = IMAGE // PATCH
    patches = image.reshape(side, PATCH, side, PATCH, CHANNELS)
    kernel = w["vit.embeddings.patch_embeddings.projection.weight"]  # (width, channels, y, x)
    x = np.einsum("aybxc,wcyx->abw", patches, kernel).reshape(side * side, -1)
    x = x + w["vit.embeddings.patch_embeddings.projection.bias"]
    x = np.concatenate([w["vit.embeddings.cls_token"][0], x])
    x = x + w["vit.embeddings.position_embeddings"][0]
    for i in range(LAYERS):
        layer = f"vit.encoder.layer.{i}."
        y = norm(layer + "layernorm_before", x)
        q, k, v = (
            linear(f"{layer}attention.attention.{name}", y).reshape(len(y), HEADS, -1)
            for name in ("query", "key", "value")
        )
        everything = np.ones((len(y), len(y)), bool)
        y = attention(q, k, v, scale=(EMBED // HEADS) ** -0.5, mask=everything)
        x = x + linear(layer + "attention.output.dense", y)
        y = activation(linear(layer + "intermediate.dense", norm(layer + "layernorm_after", x)))
        x = x + linear(layer + "output.dense", y)
    return linear("classifier", norm("vit.layernorm", x)[0])


GPT_DIM = EMBED // HEADS  # of a head
POSITIONS = 16
ROTATED = GPT_DIM // 2  # features of each head that GPT-NeoX rotates, by `rotary_pct`


def _with_biases(made: Made, names: dict[str, tuple[int, ...]], norms: tuple[str, ...]) -> None:
    """Adds matrices of these shapes with a bias of the size of their outputs, and norms."""
    for name, (*shape, outputs) in names.items():
        made.matrix(name + ".weight", *shape)
        made.vector(name + ".bias", outputs)
    for name in norms:
        made.vector(name + ".weight", EMBED, 1)
        made.vector(name + ".bias", EMBED)


def gpt2_tensors(seed=0) -> Made:
    """Matrices are (in, out) in layers; `attn.bias` is the causal mask, which is stored, too."""
    made, wide = Made(seed), 4 * EMBED
    made.matrix("wte.weight", VOCAB, EMBED)
    made.matrix("wpe.weight", POSITIONS, EMBED)
    for i in range(LAYERS):
        made[f"h.{i}.attn.bias"] = causal(POSITIONS)[None, None].astype(np.float32)
        names = {
            f"h.{i}.attn.c_attn": (EMBED, 3 * EMBED, 3 * EMBED),
            f"h.{i}.attn.c_proj": (EMBED, EMBED, EMBED),
            f"h.{i}.mlp.c_fc": (EMBED, wide, wide),
            f"h.{i}.mlp.c_proj": (wide, EMBED, EMBED),
        }
        _with_biases(made, names, (f"h.{i}.ln_1", f"h.{i}.ln_2"))
    _with_biases(made, {}, ("ln_f",))
    return made


def gpt2(tensors: Tensors, tokens) -> np.ndarray:
    """The columns of `c_attn` are all queries, all keys and all values, each head by head."""
    w = wide(tensors)

    def linear(name, x):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for i in range(LAYERS):
        qkv = linear(f"h.{i}.attn.c_attn", layer_norm(w, f"h.{i}.ln_1", x))
        q, k, v = (y.reshape(len(x), HEADS, GPT_DIM) for y in np.split(qkv, 3, -1))
        y = attention(q, k, v, scale=GPT_DIM**-0.5, mask=causal(len(x)))
        x = x + linear(f"h.{i}.attn.c_proj", y)
        y = gelu(linear(f"h.{i}.mlp.c_fc", layer_norm(w, f"h.{i}.ln_2", x)))
        x = x + linear(f"h.{i}.mlp.c_proj", y)
    return layer_norm(w, "ln_f", x) @ w["wte.weight"].T


def neox_tensors(seed=0) -> Made:
    made, wide = Made(seed), 4 * EMBED
    made.matrix("gpt_neox.embed_in.weight", VOCAB, EMBED)
    for i in range(LAYERS):
        layer = f"gpt_neox.layers.{i}."
        made[layer + "attention.bias"] = causal(POSITIONS)[None, None]
        made[layer + "attention.masked_bias"] = np.array(-1e9, np.float32)
        made.vector(layer + "attention.rotary_emb.inv_freq", ROTATED // 2)
        names = {
            layer + "attention.query_key_value": (3 * EMBED, EMBED, 3 * EMBED),
            layer + "attention.dense": (EMBED, EMBED, EMBED),
            layer + "mlp.dense_h_to_4h": (wide, EMBED, wide),
            layer + "mlp.dense_4h_to_h": (EMBED, wide, EMBED),
        }
        norms = layer + "input_layernorm", layer + "post_attention_layernorm"
        _with_biases(made, names, norms)
    _with_biases(made, {}, ("gpt_neox.final_layer_norm",))
    made.matrix("embed_out.weight", VOCAB, EMBED)
    return made


def neox(tensors: Tensors, tokens) -> np.ndarray:
    """The rows of `query_key_value` are, head by head, its query, its key and its value."""
    w = wide(tensors)

    def linear(name, x):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def rotated(x):
        return np.concatenate([rotary(x[..., :ROTATED], THETA), x[..., ROTATED:]], -1)

    x = w["gpt_neox.embed_in.weight"][tokens]
    for i in range(LAYERS):
        layer = f"gpt_neox.layers.{i}."
        y = layer_norm(w, layer + "input_layernorm", x)
        qkv = linear(layer + "attention.query_key_value", y)
        q, k, v = np.split(qkv.reshape(len(x), HEADS, 3 * GPT_DIM), 3, -1)
        y = attention(rotated(q), rotated(k), v, scale=GPT_DIM**-0.5, mask=causal(len(x)))
        added = linear(layer + "attention.dense", y)
        # Attention and MLP see the same input, by `use_parallel_residual`.
        y = linear(
            layer + "mlp.dense_h_to_4h", layer_norm(w, layer + "post_attention_layernorm", x)
        )
        x = x + added + linear(layer + "mlp.dense_4h_to_h", gelu_exact(y))
    return layer_norm(w, "gpt_neox.final_layer_norm", x) @ w["embed_out.weight"].T
