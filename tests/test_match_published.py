"""``match_tensors`` for published architectures, and for models of other libraries if installed.

The truth are logits in NumPy (`published.py`); rules that fit, but are wrong, must not reach them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import published
from nnx_sharding.checkpoint import Tensor, load_safetensors, match_tensors
from published import (
    CHOSEN,
    EMBED,
    EXPERTS,
    GEMMA_LAYERS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV,
    QUERY_SCALE,
    VOCAB,
)
from test_match_tensors import TOKENS, Llama, attend, bare, rotary, written, zeros

safetensors = pytest.importorskip("safetensors.numpy")

LAYER = r"model\.layers\.(\d+)\."


@nnx.jit
def called(model, *args):
    return model(*args)


def filled(folder, tensors, model, rules=None):
    """The model with the tensors of a file, by the rules that are inferred, and some of ours."""
    written(folder, tensors)
    rules = match_tensors(model, folder, rules=rules)
    return load_safetensors(folder, model, rules)


def assert_close(actual, expected, *, fails=False):
    if fails:  # by far, not by rounding
        assert not np.allclose(np.squeeze(actual), expected, atol=1e-2)
    else:
        np.testing.assert_allclose(np.squeeze(actual), expected, atol=1e-4)


class Qwen3Attention(nnx.Module):
    def __init__(self):
        self.wq = bare(nnx.LinearGeneral, EMBED, (HEADS, HEAD_DIM))
        self.wk = bare(nnx.LinearGeneral, EMBED, (KV, HEAD_DIM))
        self.wv = bare(nnx.LinearGeneral, EMBED, (KV, HEAD_DIM))
        self.wo = bare(nnx.LinearGeneral, (HEADS, HEAD_DIM), EMBED, axis=(-2, -1))
        self.query_norm = nnx.RMSNorm(HEAD_DIM, rngs=nnx.Rngs(0))
        self.key_norm = nnx.RMSNorm(HEAD_DIM, rngs=nnx.Rngs(0))

    def __call__(self, x):
        q, k = self.query_norm(self.wq(x)), self.key_norm(self.wk(x))
        q, k, v = rotary(q)[None], rotary(k)[None], self.wv(x)[None]
        return self.wo(jax.nn.dot_product_attention(q, k, v, is_causal=True)[0])


def test_qwen3(tmp_path):
    tensors = published.decoder_tensors(qk_norm=True)
    model = filled(tmp_path, tensors, Llama(Qwen3Attention))
    assert_close(called(model, TOKENS), published.qwen3(tensors, TOKENS))


def test_qwen3_with_norms_of_queries_and_keys_exchanged(tmp_path):
    tensors = published.decoder_tensors(qk_norm=True)
    names = [("q", "key"), ("k", "query")]
    rules = {
        rf"{LAYER}self_attn\.{name}_norm\.weight": f"blocks/{{0}}/attn/{other}_norm/scale"
        for name, other in names
    }
    model = filled(tmp_path, tensors, Llama(Qwen3Attention), rules)
    with pytest.raises(AssertionError):
        assert_close(called(model, TOKENS), published.qwen3(tensors, TOKENS))


class Experts(nnx.Module):
    """All experts in one array of each kind, which all see all tokens."""

    def __init__(self):
        self.gate = zeros(EXPERTS, EMBED, HIDDEN)
        self.up = zeros(EXPERTS, EMBED, HIDDEN)
        self.down = zeros(EXPERTS, HIDDEN, EMBED)

    def __call__(self, x):
        hidden = jax.nn.silu(jnp.einsum("te,xeh->txh", x, self.gate[...]))
        hidden *= jnp.einsum("te,xeh->txh", x, self.up[...])
        return jnp.einsum("txh,xhe->txe", hidden, self.down[...])


class Expert(nnx.Module):
    def __init__(self):
        self.w1, self.w3 = bare(nnx.Linear, EMBED, HIDDEN), bare(nnx.Linear, EMBED, HIDDEN)
        self.w2 = bare(nnx.Linear, HIDDEN, EMBED)

    def __call__(self, x):
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class Mixture(nnx.Module):
    def __init__(self, *, stacked):
        self.gate = bare(nnx.Linear, EMBED, EXPERTS)  # which chooses experts
        self.experts = Experts() if stacked else nnx.List(Expert() for _ in range(EXPERTS))

    def __call__(self, x):
        scores, chosen = jax.lax.top_k(jax.nn.softmax(self.gate(x)), CHOSEN)
        scores = jnp.put_along_axis(
            jnp.zeros((len(x), EXPERTS)),
            chosen,
            scores / scores.sum(-1, keepdims=True),
            1,
            inplace=False,
        )
        if isinstance(self.experts, Experts):
            outputs = self.experts(x)
        else:
            outputs = jnp.stack([expert(x) for expert in self.experts], 1)
        return jnp.einsum("tx,txe->te", scores, outputs)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("layers_stacked", [True, False])
def test_mixtral(tmp_path, stacked, layers_stacked):
    tensors = published.experts_tensors()
    model = Llama(mlp=lambda: Mixture(stacked=stacked), stacked=layers_stacked)
    model = filled(tmp_path, tensors, model)
    assert_close(called(model, TOKENS), published.mixtral(tensors, TOKENS))


@pytest.mark.parametrize("mistake", ["gate and up", "order of experts"])
def test_mixtral_with_a_wrong_rule(tmp_path, mistake):
    expert = LAYER + r"block_sparse_moe\.experts\.(\d+)\."
    rules = {
        rf"{expert}{name}\.weight": Tensor(
            f"blocks/{{0}}/mlp/experts/{array}", "out in -> {1} in out"
        )
        for name, array in (("w1", "up"), ("w3", "gate"))
    }
    if mistake == "order of experts":
        rules = {
            rf"{LAYER}block_sparse_moe\.experts\.{e}\.w1\.weight": Tensor(
                "blocks/{0}/mlp/experts/gate", "out in -> x in out", put={"x": EXPERTS - 1 - e}
            )
            for e in range(EXPERTS)
        }
    tensors = published.experts_tensors()
    model = filled(tmp_path, tensors, Llama(mlp=lambda: Mixture(stacked=True)), rules)
    with pytest.raises(AssertionError):
        assert_close(called(model, TOKENS), published.mixtral(tensors, TOKENS))


@pytest.mark.parametrize("order", ["in out", "out in"])
@pytest.mark.parametrize("stacked", [True, False])
def test_experts_that_the_file_has_in_one_tensor(tmp_path, order, stacked):
    """As Llama 4 has them, (experts, in, out), or Granite, with gate and up one after the other."""
    tensors = published.experts_tensors()
    expected = published.mixtral(tensors, TOKENS)
    for i in range(published.LAYERS):
        names = f"model.layers.{i}.block_sparse_moe.experts."
        w1, w3, w2 = (
            np.stack([tensors.pop(f"{names}{x}.{name}.weight") for x in range(EXPERTS)])
            for name in ("w1", "w3", "w2")
        )  # (experts, out, in)
        both = {"gate_up_proj": np.concatenate([w1, w3], 1), "down_proj": w2}
        for name, x in both.items():
            x = np.swapaxes(x, 1, 2) if order == "in out" else x
            tensors[names + name] = np.ascontiguousarray(x)
    model = filled(tmp_path, tensors, Llama(mlp=lambda: Mixture(stacked=stacked)))
    assert_close(called(model, TOKENS), expected)


class AddedNorm(nnx.Module):
    """As Gemma has it: the scale is added to 1."""

    def __init__(self, size):
        self.scale = zeros(size)

    def __call__(self, x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + self.scale[...])


class GemmaBlock(nnx.Module):
    def __init__(self, index):
        self.is_global = index % 6 == 5
        self.q_einsum = zeros(HEADS, EMBED, HEAD_DIM)
        self.kv_einsum = zeros(2, KV, EMBED, HEAD_DIM)
        self.attn_vec_einsum = zeros(HEADS, HEAD_DIM, EMBED)
        self.q_norm, self.k_norm = AddedNorm(HEAD_DIM), AddedNorm(HEAD_DIM)
        self.gating_einsum = zeros(2, EMBED, HIDDEN)
        self.down_proj = zeros(HIDDEN, EMBED)
        self.pre_attention_norm, self.post_attention_norm = AddedNorm(EMBED), AddedNorm(EMBED)
        self.pre_ffw_norm, self.post_ffw_norm = AddedNorm(EMBED), AddedNorm(EMBED)

    def attention(self, x):
        q = self.q_norm(jnp.einsum("te,hed->thd", x, self.q_einsum[...]))
        k, v = jnp.einsum("te,khed->kthd", x, self.kv_einsum[...])
        theta = published.GLOBAL_THETA if self.is_global else published.LOCAL_THETA
        q, k = rotary(q, theta), rotary(self.k_norm(k), theta)
        window = None if self.is_global else (published.WINDOW - 1, 0)
        y = jax.nn.dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=QUERY_SCALE**-0.5,
            local_window_size=window,
        )[0]  # fmt: skip
        return jnp.einsum("thd,hde->te", y, self.attn_vec_einsum[...])

    def mlp(self, x):
        gate, up = jnp.einsum("te,keh->kth", x, self.gating_einsum[...])
        return (jax.nn.gelu(gate) * up) @ self.down_proj[...]

    def __call__(self, x):
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x)))
        return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))


class Gemma3(nnx.Module):
    def __init__(self):
        self.embedder = nnx.Embed(VOCAB, EMBED, rngs=nnx.Rngs(0))
        self.layers = nnx.List(GemmaBlock(i) for i in range(GEMMA_LAYERS))
        self.final_norm = AddedNorm(EMBED)

    def __call__(self, tokens):
        x = self.embedder(tokens) * math.sqrt(EMBED)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.attend(self.final_norm(x))


def test_gemma3(tmp_path):
    tensors = published.gemma3_tensors()
    model = filled(tmp_path, tensors, Gemma3())
    assert_close(called(model, TOKENS), published.gemma3(tensors, TOKENS))


class GPTBlock(nnx.Module):
    """Of GPT-2, or of GPT-NeoX: rotated in part, with attention and MLP side by side."""

    def __init__(self, *, neox):
        rngs, heads = nnx.Rngs(0), (HEADS, published.GPT_DIM)
        self.neox = neox
        self.ln_1, self.ln_2 = (nnx.LayerNorm(EMBED, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v = (nnx.LinearGeneral(EMBED, heads, rngs=rngs) for _ in range(3))
        self.o = nnx.LinearGeneral(heads, EMBED, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(EMBED, 4 * EMBED, rngs=rngs)
        self.down = nnx.Linear(4 * EMBED, EMBED, rngs=rngs)

    def __call__(self, x):
        y = self.ln_1(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        if self.neox:
            size = published.ROTATED
            q, k = (
                jnp.concatenate([rotary(each[..., :size], head_dim=size), each[..., size:]], -1)
                for each in (q, k)
            )
        y = x + self.o(attend(q, k, v))
        hidden = jax.nn.gelu(self.up(self.ln_2(x if self.neox else y)), approximate=not self.neox)
        return y + self.down(hidden)


class GPT(nnx.Module):
    def __init__(self, *, neox):
        rngs = nnx.Rngs(0)
        self.tok = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.pos = None if neox else nnx.Embed(published.POSITIONS, EMBED, rngs=rngs)
        self.blocks = nnx.List(GPTBlock(neox=neox) for _ in range(published.LAYERS))
        self.norm = nnx.LayerNorm(EMBED, epsilon=1e-5, rngs=rngs)
        self.head = bare(nnx.Linear, EMBED, VOCAB) if neox else None

    def __call__(self, tokens):
        x = self.tok(tokens)
        if self.pos is not None:
            x = x + self.pos(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.tok.attend(x) if self.head is None else self.head(x)


C_ATTN = r"h\.(\d+)\.attn\.c_attn\.weight"
QUERY_KEY_VALUE = r"gpt_neox\.layers\.(\d+)\.attention\.query_key_value\.weight"


def fused(dimensions, names="qkv", **sizes):
    """A rule by which arrays are thirds of a tensor along the axis of this size."""
    [(axis, size)] = sizes.items()
    third = size // 3
    takes = [slice(third * i, third * (i + 1)) if third > 1 else i for i in range(3)]
    return [
        Tensor(f"blocks/{{0}}/{name}/kernel", dimensions, take={axis: take}, **sizes)
        for name, take in zip(names, takes, strict=True)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        fused("in (h p d) -> in h d", p=3),
        fused("in (h d) -> in h d", "qvk", h=3 * HEADS),
    ],
    ids=["inferred", "by head", "keys and values"],
)
def test_gpt2(tmp_path, wrong):
    tensors = published.gpt2_tensors()
    model = filled(tmp_path, tensors, GPT(neox=False), {C_ATTN: wrong} if wrong else None)
    assert_close(called(model, TOKENS), published.gpt2(tensors, TOKENS), fails=bool(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        fused("(h d) in -> in h d", h=3 * HEADS),
        fused("(h p d) in -> in h d", "kqv", p=3),
    ],
    ids=["inferred", "one after the other", "queries and keys"],
)
def test_neox(tmp_path, wrong):
    tensors = published.neox_tensors()
    model = filled(tmp_path, tensors, GPT(neox=True), {QUERY_KEY_VALUE: wrong} if wrong else None)
    assert_close(called(model, TOKENS), published.neox(tensors, TOKENS), fails=bool(wrong))


class ViT(nnx.Module):
    """With the attention of Flax, which has biases."""

    def __init__(self):
        rngs, patch = nnx.Rngs(0), (published.PATCH, published.PATCH)
        tokens = (published.IMAGE // published.PATCH) ** 2 + 1
        self.patch_embed = nnx.Conv(published.CHANNELS, EMBED, patch, patch, rngs=rngs)
        self.cls_token, self.pos_embed = zeros(1, 1, EMBED), zeros(tokens, EMBED)
        self.blocks = nnx.List(ViTBlock(rngs) for _ in range(published.LAYERS))
        self.norm = nnx.LayerNorm(EMBED, epsilon=1e-12, rngs=rngs)
        self.head = nnx.Linear(EMBED, published.CLASSES, rngs=rngs)

    def __call__(self, image):  # (height, width, channels)
        patches = self.patch_embed(image[None]).reshape(-1, EMBED)
        x = jnp.concatenate([self.cls_token[0], patches]) + self.pos_embed[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[0])


class ViTBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(EMBED, epsilon=1e-12, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(EMBED, epsilon=1e-12, rngs=rngs)
        self.fc1 = nnx.Linear(EMBED, HIDDEN, rngs=rngs)
        self.fc2 = nnx.Linear(HIDDEN, EMBED, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False))


IMAGE = np.random.default_rng(2).normal(size=(published.IMAGE, published.IMAGE, 3))


def test_vit(tmp_path):
    tensors = published.vit_tensors()
    model = filled(tmp_path, tensors, ViT())
    assert_close(called(model, jnp.float32(IMAGE)), published.vit(tensors, IMAGE))


def test_vit_with_patches_in_another_order(tmp_path):
    rules = {
        r"vit\.embeddings\.patch_embeddings\.projection\.weight": Tensor(
            "patch_embed/kernel", "out in x y -> y x in out"
        )
    }
    tensors = published.vit_tensors()
    model = filled(tmp_path, tensors, ViT(), rules)
    with pytest.raises(AssertionError):
        assert_close(called(model, jnp.float32(IMAGE)), published.vit(tensors, IMAGE))


# Models of other libraries, where these are installed. None of them is ours.

theirs = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BATCH = jnp.asarray(TOKENS)[None]
POSITIONS = jnp.arange(len(TOKENS))[None]
MASK = jnp.tril(jnp.ones((1, len(TOKENS), len(TOKENS)), bool))
SIZES = {
    "num_layers": published.LAYERS, "vocab_size": VOCAB, "embed_dim": EMBED,
    "hidden_dim": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV, "head_dim": HEAD_DIM,
    "rope_theta": 1_000_000, "norm_eps": 1e-6,
}  # fmt: skip
TUNIX_THETA = 1e6  # as of 0.1.7, its Llama and Qwen3 use no other, whatever `rope_theta` is


@theirs
def test_llama_of_tunix(tmp_path):
    tunix = pytest.importorskip("tunix.models.llama3.model")
    tensors = published.decoder_tensors()
    model = nnx.eval_shape(lambda: tunix.Llama3(tunix.ModelConfig(**SIZES), rngs=nnx.Rngs(0)))
    model = filled(tmp_path, tensors, model)
    logits, _ = model(BATCH, POSITIONS, None, MASK)
    assert_close(logits, published.llama(tensors, TOKENS, theta=TUNIX_THETA))


@theirs
@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_of_tunix(tmp_path, tied):
    tunix = pytest.importorskip("tunix.models.qwen3.model")
    tensors = published.decoder_tensors(qk_norm=True, tied=tied)
    config = tunix.ModelConfig(**SIZES, use_tied_embedding=tied)
    model = filled(tmp_path, tensors, nnx.eval_shape(lambda: tunix.Qwen3(config, rngs=nnx.Rngs(0))))
    logits, _ = model(BATCH, POSITIONS, None, MASK)
    assert_close(logits, published.qwen3(tensors, TOKENS, theta=TUNIX_THETA))


@theirs
def test_qwen3_with_experts_of_tunix(tmp_path):
    tunix = pytest.importorskip("tunix.models.qwen3.model")
    tensors = published.experts_tensors(published.QWEN3_MOE, qk_norm=True)
    config = tunix.ModelConfig(**SIZES, num_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    model = filled(tmp_path, tensors, nnx.eval_shape(lambda: tunix.Qwen3(config, rngs=nnx.Rngs(0))))
    logits, _ = model(BATCH, POSITIONS, None, MASK)
    norm = published.rms_norm
    options = {"norm": norm, "theta": TUNIX_THETA}
    expected = published.mixtral(tensors, TOKENS, published.QWEN3_MOE, **options)
    assert_close(logits, expected)


@theirs
def test_gemma3_of_tunix(tmp_path):
    tunix = pytest.importorskip("tunix.models.gemma3.model")
    sizes = {name: SIZES[name] for name in SIZES if name not in ("rope_theta", "norm_eps")}
    sizes["num_embed"] = sizes.pop("vocab_size")
    config = tunix.ModelConfig(
        **sizes | {"num_layers": GEMMA_LAYERS},
        sliding_window_size=published.WINDOW,
        local_base_frequency=int(published.LOCAL_THETA),
        global_base_frequency=int(published.GLOBAL_THETA),
        param_dtype=jnp.float32,
    )
    tensors = published.gemma3_tensors()
    model = filled(
        tmp_path, tensors, nnx.eval_shape(lambda: tunix.Gemma3(config, rngs=nnx.Rngs(0)))
    )
    logits, _ = model(BATCH, POSITIONS, None, MASK)
    assert_close(logits, published.gemma3(tensors, TOKENS, query_scale=HEAD_DIM))


@theirs
def test_vit_of_bonsai(tmp_path):
    bonsai = pytest.importorskip("bonsai.models.vit.modeling")
    config = bonsai.ModelConfig(
        image_size=(published.IMAGE,) * 2, patch_size=(published.PATCH,) * 2, num_channels=3,
        hidden_dim=EMBED, attn_dropout_prob=0.0, dropout_prob=0.0, num_heads=HEADS,
        mlp_dim=HIDDEN, eps=1e-12, num_layers=published.LAYERS, num_labels=published.CLASSES,
    )  # fmt: skip
    tensors = published.vit_tensors()
    model = bonsai.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    model = filled(tmp_path, tensors, model)
    logits = model(jnp.float32(IMAGE)[None], rngs=nnx.Rngs(0))
    expected = published.vit(tensors, IMAGE, activation=published.gelu)  # as its authors wrote it
    assert_close(logits, expected)
