"""``match_tensors``: logits of models that it filled, against NumPy, and all that it refuses."""

from __future__ import annotations

import json
import re
from unittest import mock

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
    load_safetensors,
    match_tensors,
    save_safetensors,
    tensor_files,
)
from nnx_sharding.checkpoint.tensor_table import TensorRules
from nnx_sharding.errors import CheckpointError
from nnx_sharding.partition import abstract_init
from published import EMBED, HEAD_DIM, HEADS, HIDDEN, KV, LAYERS, THETA, VOCAB
from zoo import fails, mesh_of

safetensors = pytest.importorskip("safetensors.numpy")

MESH = mesh_of((2, 4), ("data", "model"))
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 11)


def zeros(*shape):
    """A parameter; what is not loaded shows."""
    return nnx.Param(jnp.full(shape, jnp.nan))


def rotary(x, theta=THETA, head_dim=HEAD_DIM):
    """As Llama in Hugging Face: (length, heads, d), feature i with i + d / 2."""
    angles = jnp.arange(len(x))[:, None] * theta ** (-jnp.arange(0, head_dim, 2) / head_dim)
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


@nnx.jit
def logits(model):
    return model(TOKENS)


def assert_logits(model, expected):
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_llama(tmp_path, name):
    tensors = published.decoder_tensors()
    folder = written(tmp_path, tensors)
    rules = match_tensors(nnx.eval_shape(MODELS[name]), folder)
    model = load_safetensors(folder, MODELS[name](), rules)
    assert_logits(model, published.llama(tensors, TOKENS))
    # Rules are text, which becomes the same rules again, and leads back to the same file.
    rules.save(tmp_path / "rules")
    assert TensorRules.load(tmp_path / "rules") == rules
    save_safetensors(tmp_path / "again", model, tmp_path / "rules")
    again = safetensors.load_file(tmp_path / "again" / "model.safetensors")
    assert {*again} == {*tensors}
    assert all((again[name] == tensors[name]).all() for name in tensors)


LAYER = r"model\.layers\.(\d+)\."
WRONG = {
    "rotary in pairs": {
        rf"{LAYER}self_attn\.q_proj\.weight": Tensor(
            "blocks/{0}/attn/query/kernel", "(h d two) e -> e h (two d)", h=HEADS, two=2
        )
    },
    "queries in another order": {
        rf"{LAYER}self_attn\.q_proj\.weight": Tensor(
            "blocks/{0}/attn/query/kernel", "(d h) e -> e h d", h=HEADS
        )
    },
    "gate and up": {
        rf"{LAYER}mlp\.gate_proj\.weight": Tensor("blocks/{0}/mlp/up/kernel", "o i -> i o"),
        rf"{LAYER}mlp\.up_proj\.weight": Tensor("blocks/{0}/mlp/gate/kernel", "o i -> i o"),
    },
    "keys and values": {
        rf"{LAYER}self_attn\.k_proj\.weight": Tensor(
            "blocks/{0}/attn/value/kernel", "(h d) e -> e h d", h=KV
        ),
        rf"{LAYER}self_attn\.v_proj\.weight": Tensor(
            "blocks/{0}/attn/key/kernel", "(h d) e -> e h d", h=KV
        ),
    },
    "norms": {
        rf"{LAYER}input_layernorm\.weight": "blocks/{0}/ln_2/scale",
        rf"{LAYER}post_attention_layernorm\.weight": "blocks/{0}/ln_1/scale",
    },
}


@pytest.mark.parametrize("mistake", WRONG)
def test_rules_that_fit_but_are_wrong_fail_the_proof(tmp_path, mistake):
    tensors = published.decoder_tensors()
    folder = written(tmp_path, tensors)
    rules = match_tensors(nnx.eval_shape(Llama), folder, rules=WRONG[mistake])
    model = load_safetensors(folder, Llama(), rules)
    with pytest.raises(AssertionError):
        assert_logits(model, published.llama(tensors, TOKENS))


class Adapted(nnx.Module):
    """An adapter of our own for a layer to heads."""

    def __init__(self, base):
        self.base = base
        inputs, *outputs = base.kernel.shape
        self.lora_a = nnx.LoRAParam(jnp.full((inputs, 2), jnp.nan))
        self.lora_b = nnx.LoRAParam(jnp.full((2, *outputs), jnp.nan))

    def __call__(self, x):
        return self.base(x) + jnp.tensordot(x @ self.lora_a[...], self.lora_b[...], 1)


class AdaptedAttention(Attention):
    def __init__(self):
        super().__init__()
        self.query, self.value = Adapted(self.query), Adapted(self.value)


class AdaptedMLP(MLP):
    """Both kinds of Flax: one is around a layer, and the other is in it."""

    def __init__(self):
        super().__init__()
        rngs = nnx.Rngs(0)
        self.up = nnx.LoRA(EMBED, 2, HIDDEN, base_module=self.up, rngs=rngs)
        self.down = nnx.LoRALinear(HIDDEN, EMBED, lora_rank=2, use_bias=False, rngs=rngs)


@pytest.mark.parametrize("stacked", [False, True])
def test_bases_and_adapters(tmp_path, stacked):
    """Names of wrappers do not hide those of layers, and adapters have the names of PEFT."""
    adapters, merged, tensors = published.Made(1), {}, published.decoder_tensors()
    for name, x in tensors.items():
        merged[name] = x
        if re.search("(q|v|up|down)_proj", name):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            adapters.matrix(a := f"{prefix}.lora_A.weight", 2, x.shape[1])
            adapters.matrix(b := f"{prefix}.lora_B.weight", x.shape[0], 2)
            merged[name] = x + adapters[b] @ adapters[a]
    (tmp_path / "base").mkdir()
    base = written(tmp_path / "base", tensors)
    model = Llama(AdaptedAttention, AdaptedMLP, stacked=stacked)
    model, _ = loaded(base, model, only=nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    model, rules = loaded(written(tmp_path, adapters), model, only=nnx.LoRAParam)
    assert_logits(model, published.llama(merged, TOKENS))
    save_safetensors(tmp_path / "again", model, rules, only=nnx.LoRAParam)
    again = safetensors.load_file(tmp_path / "again" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, again, {**adapters})


class OwnMLP(nnx.Module):
    """Parameters of our own, without modules of Flax, called in one of several ways."""

    def __init__(self, gate="w_gate", up="w_up", down="w_down"):
        self.names = gate, up, down
        for name, shape in zip(self.names, [(EMBED, HIDDEN)] * 2 + [(HIDDEN, EMBED)], strict=True):
            setattr(self, name, zeros(*shape))

    def __call__(self, x):
        gate, up, down = (getattr(self, name)[...] for name in self.names)
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class Table(nnx.Module):
    def __init__(self):
        self.table = zeros(VOCAB, EMBED)

    def __call__(self, tokens):
        return self.table[...][tokens]


def own_llama(*names):
    model = Llama(mlp=lambda: OwnMLP(*names))
    model.embed = Table()
    return model


OWN_NAMES = [
    (), ("w1", "w3", "w2"), ("gate_w", "up_w", "down_w"), ("w_1", "w_3", "w_2"),
    ("kernel_gate", "kernel_up", "kernel_down"), ("w_gate", "w_in", "w_out"),
]  # fmt: skip


@pytest.mark.parametrize("names", OWN_NAMES, ids=str)
def test_names_of_parameters_of_our_own(tmp_path, names):
    tensors = published.decoder_tensors()
    model, _ = loaded(written(tmp_path, tensors), own_llama(*names))
    assert_logits(model, published.llama(tensors, TOKENS))


@pytest.mark.parametrize("names", [("w1", "w2", "w3"), ("w0", "w1", "w2")], ids=str)
def test_numbers_that_do_not_say_what_a_layer_is_for(tmp_path, names):
    folder = written(tmp_path, published.decoder_tensors())
    with pytest.raises(CheckpointError, match=f"without a tensor:\n  blocks/0/mlp/{names[0]},"):
        match_tensors(nnx.eval_shape(lambda: own_llama(*names)), folder)


def linear(rows, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def shaped(**shapes):
    """An abstract model of parameters of these names and shapes; ``__`` leads into modules."""
    tree: dict = {}
    for name, shape in shapes.items():
        *outer, last = name.split("__")
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32))

    def as_module(x):
        return nnx.Dict({k: as_module(v) for k, v in x.items()}) if type(x) is dict else x

    return as_module(tree)


def numbered(name, count, *shape):
    """Tensors whose numbers are all different."""
    size = int(np.prod(shape))
    return {
        name.format(i): (i * size + np.arange(size, dtype=np.float32)).reshape(shape)
        for i in range(count)
    }


def loaded(folder, model, **options):
    rules = match_tensors(model, folder, **options)
    only = {key: options[key] for key in options if key == "only"}
    return load_safetensors(folder, model, rules, **only), rules


def test_square_matrices_go_by_convention_and_the_rule_says_so(tmp_path):
    w = linear(16, 16)
    folder = written(tmp_path, {"up_proj.weight": w})
    model, rules = loaded(
        folder, nnx.eval_shape(lambda: nnx.Dict(up_proj=bare(nnx.Linear, 16, 16)))
    )
    np.testing.assert_array_equal(model.up_proj.kernel, w.T)
    assert "by convention" in repr(rules)


@pytest.mark.parametrize("model", [shaped(up_proj__w=(16, 16)), None], ids=["own", "einsum"])
def test_square_matrices_without_a_convention_are_ambiguous(tmp_path, model):
    folder = written(tmp_path, {"up_proj.weight": linear(16, 16)})

    def einsum():
        return nnx.Dict(up_proj=nnx.Einsum("ti,oi->to", (16, 16), rngs=nnx.Rngs(0)))

    with pytest.raises(
        CheckpointError, match=r"up_proj.weight as '.* -> in out' or '.* -> out in'"
    ):
        match_tensors(nnx.eval_shape(einsum) if model is None else model, folder)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_layers_in_any_dimension(tmp_path, place):
    name = "model.layers.{}.mlp.up_proj.weight"
    tensors = numbered(name, 3, 5, 4) | numbered("model.layers.{}.input_layernorm.weight", 3, 4)
    shape, norm = [4, 5], [4]
    for each in shape, norm:
        each.insert(place if place >= 0 else len(each), 3)
    model = shaped(layers__mlp__up__kernel=tuple(shape), layers__norm1__scale=tuple(norm))
    model, _ = loaded(written(tmp_path, tensors), model)
    expected = np.stack([tensors[name.format(i)].T for i in range(3)], place)
    np.testing.assert_array_equal(model["layers"]["mlp"]["up"]["kernel"], expected)


def test_layers_are_in_the_dimension_that_all_arrays_allow(tmp_path):
    """Alone, (2, 2, 8) has two dimensions that may count the layers."""
    name = "layers.{}.self_attn.q_proj.bias"
    tensors = numbered(name, 2, 16) | numbered("layers.{}.input_layernorm.weight", 2, 16)
    bias = shaped(layers__attn__q__bias=(2, 2, 8))
    folder = written(tmp_path, tensors)
    rest = {r".*norm\.weight": None}
    with pytest.raises(CheckpointError, match="Ambiguous"):
        match_tensors(bias, folder, rules=rest)
    model, _ = loaded(folder, shaped(layers__attn__q__bias=(2, 2, 8), layers__ln1__scale=(2, 16)))
    expected = np.stack([tensors[name.format(i)].reshape(2, 8) for i in range(2)])
    np.testing.assert_array_equal(model["layers"]["attn"]["q"]["bias"], expected)


def test_fused_tensors_fill_several_arrays(tmp_path):
    qkv, gate_up = linear(8 * 3 + 2 * 2 * 3, 20), linear(14, 20)
    names = "layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight"
    folder = written(tmp_path, dict(zip(names, (qkv, gate_up), strict=True)))
    block = shaped(
        attn__q__kernel=(20, 8, 3), attn__k__kernel=(20, 2, 3), attn__v__kernel=(20, 2, 3),
        mlp__gate__kernel=(20, 7), mlp__up__kernel=(20, 7),
    )  # fmt: skip
    model, _ = loaded(folder, nnx.Dict(blocks=nnx.List([block])))
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    np.testing.assert_array_equal(attn.q.kernel, qkv[:24].T.reshape(20, 8, 3))
    np.testing.assert_array_equal(attn.k.kernel, qkv[24:30].T.reshape(20, 2, 3))
    np.testing.assert_array_equal(attn.v.kernel, qkv[30:].T.reshape(20, 2, 3))
    np.testing.assert_array_equal(mlp.gate.kernel, gate_up[:7].T)
    np.testing.assert_array_equal(mlp.up.kernel, gate_up[7:].T)


def test_layers_of_different_kinds(tmp_path):
    """Layers 0 and 2 have other sizes than layer 1: only these are split into heads."""
    sizes = {0: (12, 8), 1: (6, 8), 2: (12, 8)}
    tensors = {f"layers.{i}.attn.wq.weight": linear(*size, i) for i, size in sizes.items()}
    shapes = {0: (8, 4, 3), 1: (8, 6), 2: (8, 4, 3)}
    layers = [shaped(q__kernel=shape) for shape in shapes.values()]
    model, rules = loaded(written(tmp_path, tensors), nnx.Dict(layers=nnx.List(layers)))
    assert [*rules] == [rf"layers\.{i}\.attn\.wq\.weight" for i in range(3)]
    for i, layer in enumerate(model["layers"]):
        w = tensors[f"layers.{i}.attn.wq.weight"]
        np.testing.assert_array_equal(layer.q.kernel, w.T.reshape(shapes[i]))


def test_two_numbers_of_the_same_word(tmp_path):
    """As in T5, whose blocks have layers."""
    name = "encoder.block.{}.layer.{}.o.weight"
    tensors = {name.format(i, j): linear(4, 3, 2 * i + j) for i in range(2) for j in range(2)}
    shapes = {f"block__{i}__layer__{j}__o__kernel": (3, 4) for i in range(2) for j in range(2)}
    model, _ = loaded(written(tmp_path, tensors), shaped(**shapes))
    for i, j in np.ndindex(2, 2):
        kernel = model["block"][str(i)]["layer"][str(j)]["o"]["kernel"]
        np.testing.assert_array_equal(kernel, tensors[name.format(i, j)].T)


# Tensors, and a model whose arrays each get one of them, or all of them stacked.
UNUSUAL_NAMES = {
    "only a word that others have around them": ({"model": linear(4, 3)}, shaped(model=(4, 3))),
    "only a number": (numbered("{}", 2, 4, 3), nnx.List([zeros(4, 3), zeros(4, 3)])),
    "the third of three numbers is stacked": (
        numbered("layers.0.experts.0.stages.{}.up.bias", 2, 4),
        shaped(layers__0__experts__0__stages__up__bias=(2, 4)),
    ),
    "words that are no names of axes, stacked in the file": (
        {"my-blöcke 2.up.bias": linear(2, 4)},
        nnx.Dict({"my-blöcke 2": nnx.List([shaped(up__bias=(4,)), shaped(up__bias=(4,))])}),
    ),
    "a word that Tensor has as a keyword, stacked in the file": (
        {"dimensions.up.bias": linear(2, 4)},
        nnx.Dict(dimensions=nnx.List([shaped(up__bias=(4,)), shaped(up__bias=(4,))])),
    ),
    "quotes and dots": (
        numbered("a\"'b\n.c.{}.up.bias", 2, 4),
        nnx.Dict({"a\"'b\n.c": nnx.List([shaped(up__bias=(4,)), shaped(up__bias=(4,))])}),
    ),
    "an empty word": (numbered(".{}.up.bias", 2, 4), nnx.Dict({"": shaped(up__bias=(2, 4))})),
    "only the case differs": (
        {**numbered("Up.bias", 1, 4), "up.bias": np.zeros(4, np.float32)},
        nnx.Dict(Up=shaped(bias=(4,)), up=shaped(bias=(4,))),
    ),
    "leading zeros in the file": (
        numbered("h.0{}.up.bias", 2, 4),
        nnx.Dict(h=nnx.List([shaped(up__bias=(4,)), shaped(up__bias=(4,))])),
    ),
    "leading zeros on both sides": (
        numbered("h.0{}.up.bias", 2, 4),
        shaped(h__00__up__bias=(4,), h__01__up__bias=(4,)),
    ),
    "leading zeros, stacked": (numbered("h.{:02}.up.bias", 11, 4), shaped(h__up__bias=(11, 4))),
    "digits of another script": (
        numbered("h.\u0660{}.up.bias", 1, 4),
        shaped(**{"h__\u06600__up__bias": (4,)}),
    ),
}


@pytest.mark.parametrize("case", UNUSUAL_NAMES)
def test_unusual_names(tmp_path, case):
    tensors, model = UNUSUAL_NAMES[case]
    model, rules = loaded(written(tmp_path, tensors), model)
    filled = np.concatenate([x.reshape(-1) for x in jax.tree.leaves(nnx.state(model))])
    np.testing.assert_array_equal(filled, np.concatenate([x.reshape(-1) for x in tensors.values()]))
    rules.save(tmp_path / "rules")
    save_safetensors(tmp_path / "again", model, tmp_path / "rules")
    again = safetensors.load_file(tmp_path / "again/model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, again, tensors)


def test_names_with_braces_need_rules(tmp_path):
    """Braces of a rule's path are for groups, and two of them are one of a name."""
    folder = written(tmp_path, {"a{0}.up.bias": np.arange(4, dtype=np.float32)})
    model = shaped(**{"b{0}__up__bias": (4,)})
    with pytest.raises(
        CheckpointError, match=r"braces have no rules:\n  a\{.*\n  b\{(.|\n)*and }}"
    ):
        match_tensors(model, folder)
    model, rules = loaded(folder, model, rules={r"a\{0\}\.up\.bias": "b{{0}}/up/bias"})
    save_safetensors(tmp_path / "again", model, rules)
    again = safetensors.load_file(tmp_path / "again/model.safetensors")
    np.testing.assert_array_equal(again["a{0}.up.bias"], np.arange(4))


class TestTiedEmbedding:
    def test_in_the_file(self, tmp_path):
        tensors = published.decoder_tensors(tied=True)
        model, rules = loaded(written(tmp_path, tensors), Llama())
        assert "tied" in repr(rules)
        assert_logits(model, published.llama(tensors, TOKENS))

    def test_in_both(self, tmp_path):
        tensors = published.decoder_tensors(tied=True)
        model, _ = loaded(written(tmp_path, tensors), Llama(tied=True))
        assert_logits(model, published.llama(tensors, TOKENS))

    def test_in_the_model_and_the_file_has_a_head(self, tmp_path):
        """Whether it is the embedding again, only its user knows without reading it."""
        tensors = published.decoder_tensors(tied=True)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        folder = written(tmp_path, tensors)
        with pytest.raises(CheckpointError, match=r"without an array:\n  lm_head.weight"):
            match_tensors(nnx.eval_shape(lambda: Llama(tied=True)), folder)
        model, _ = loaded(folder, Llama(tied=True), rules={r"lm_head\.weight": None})
        assert_logits(model, published.llama(tensors, TOKENS))


def llama_with(**changes):
    """Tensors of Llama with some replaced, added, or, if None, taken away."""
    tensors = dict(published.decoder_tensors())
    for name, x in changes.items():
        tensors.pop(name, None)
        if x is not None:
            tensors[name] = x
    return tensors


Q = "model.layers.1.self_attn.q_proj.weight"

REFUSED = {
    "a tensor is missing": ({Q: None}, r"without a tensor:\n  blocks/1/attn/query/kernel"),
    "one of its size has another name": (
        {Q: None, "model.layers.1.attn.queries": linear(48, EMBED)},
        "blocks/1/attn/query/kernel, shape .*; of this size: model.layers.1.attn.queries",
    ),
    "only one has its size": (
        {"model.embed_tokens.weight": None, "model.words.weight": linear(VOCAB, EMBED)},
        re.escape(
            f"embed/embedding, shape {(VOCAB, EMBED)}; of this size: model.words.weight; if it is "
            r'this one: rules={r"model\.words\.weight": "embed/embedding"}'
        ),
    ),
    "the tensors of the same layer": (
        {f"model.layers.{i}.{x}": linear(48, EMBED) for i in range(2) for x in ("a", "b")}
        | {Q: None, Q.replace(".1.", ".0."): None},
        r"blocks/1/attn/query/kernel, .*; of this size: model.layers.1.a or model.layers.1.b\n",
    ),
    "a tensor is left over": (
        {"model.extra.weight": linear(3, 3)},
        r"without an array:\n  model.extra.weight, shape \(3, 3\)",
    ),
    "a model with fewer layers": (
        published.decoder_tensors() and {Q.replace(".1.", ".2."): linear(48, EMBED)},
        f"without an array:\n  {Q.replace('.1.', '.2.')}",
    ),
    "two tensors for one parameter": (
        {Q.replace("q_proj", "wq"): linear(48, EMBED)},
        f"{Q.replace('q_proj', 'wq')}|blocks/1/attn/query/kernel: {Q}",
    ),
    "a model of another size": (
        {Q: linear(40, EMBED)},
        rf"another shape:\n  {Q}, shape \(40, 24\): blocks/1/attn/query/kernel, shape \(24, 6, 8\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(tmp_path, reason):
    changes, message = REFUSED[reason]
    folder = written(tmp_path, llama_with(**changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        match_tensors(nnx.eval_shape(Llama), folder)
    assert str(tmp_path) in str(caught.value)


AMBIGUOUS = {
    "two fit": ((8, 4), (8, 4), "a.up.weight or b.up.weight"),
    "one fits": ((8, 4), (16, 4), "a.up.weight, by its shape, but not by its name"),
    "none fits": ((16, 4), (16, 4), "a.up.weight or b.up.weight"),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
@pytest.mark.parametrize("stacked", [False, True])
def test_ambiguous_names_have_the_tensors_that_fit(tmp_path, case, stacked):
    *shapes, expected = AMBIGUOUS[case]
    names = [f"layers.{{}}.{name}.up.weight" for name in "ab"]
    folder = written(
        tmp_path, numbered(names[0], 2, *shapes[0]) | numbered(names[1], 2, *shapes[1])
    )
    shape = (2, 4, 8) if stacked else (4, 8)
    modules = [shaped(c__up__kernel=shape, d__up__kernel=shape) for _ in range(1 if stacked else 2)]
    model = nnx.Dict(layers=modules[0] if stacked else nnx.List(modules))
    number = "{}" if stacked else "0"
    lines = expected.replace("a.", f"layers.{number}.a.").replace("b.", f"layers.{number}.b.")
    path = "layers/c/up/kernel" if stacked else "layers/0/c/up/kernel"
    with pytest.raises(CheckpointError, match=re.escape(f"Ambiguous:\n  {path}: {lines}\n")):
        match_tensors(model, folder)


def test_tensors_of_different_shapes_are_not_stacked(tmp_path):
    tensors = {f"layers.{i}.up.weight": linear(4 + i, 8) for i in range(2)}
    model = shaped(layers__up__kernel=(2, 8, 4))
    message = r"Of another shape:\n  layers.0.up.weight, shape \(4, 8\) of 2: layers/up/kernel"
    with pytest.raises(CheckpointError, match=message):
        match_tensors(model, written(tmp_path, tensors))


def test_one_error_has_all_problems(tmp_path):
    changes = {Q: linear(40, EMBED), "extra": linear(2, 2), "model.norm.weight": None}
    folder = written(tmp_path, llama_with(**changes))
    with fails(
        CheckpointError, "final_norm/scale", "extra", Q, "Say what is not inferred by rules="
    ):
        match_tensors(nnx.eval_shape(Llama), folder)


def test_the_table_has_all_tensors(tmp_path):
    """Those with a rule of the user and those that are ignored, too, in the order of the file."""
    extra = {"own.a": np.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4)}
    tensors = llama_with(**extra)
    folder = written(tmp_path, tensors)
    pattern = r"model\.layers\.(\d+)\.self_attn\.(q|o)_proj\.weight"
    rules = match_tensors(nnx.eval_shape(Llama), folder, rules={r"own\..*": None})
    templates = dict.fromkeys(re.sub(r"\.\d", ".{}", name) for name in sorted(tensors))
    assert [row.tensor for row in rules.table] == [*templates]
    ignored = {row.tensor: row.note for row in rules.table if not row.path}
    assert ignored == {"own.a": "given", "model.layers.{}.self_attn.rotary_emb.inv_freq": ""}
    again = match_tensors(nnx.eval_shape(Llama), folder, rules=rules)
    assert {row[:4] for row in again.table} == {row[:4] for row in rules.table}
    assert {row.note for row in again.table} == {"given"} and "given" not in repr(again)
    stacked = shaped(attn__q_proj=(2, 4, 3), attn__o_proj=(2, 4, 3))
    tensors = {
        f"model.layers.{i}.self_attn.{x}_proj.weight": linear(3, 4) for i in range(2) for x in "qo"
    }
    given = {pattern: Tensor("attn/{1}_proj", "out in -> {0} in out")}
    found = match_tensors(stacked, written(tmp_path, tensors), rules=given)
    assert [row.path for row in found.table] == ["attn/o_proj", "attn/q_proj"]
    assert {row[2:] for row in found.table} == {((3, 4), (2, 4, 3), "given")}


def test_rules_that_are_given_come_first(tmp_path):
    own = linear(EMBED, 48).reshape(EMBED, HEADS, HEAD_DIM)
    folder = written(tmp_path, llama_with(**{Q: None, "own.queries": own}))
    rules = {r"own\.queries": "blocks/1/attn/query/kernel"}
    model, found = loaded(folder, Llama(), rules=rules)
    assert [*found][:1] == [*rules]
    np.testing.assert_array_equal(model.blocks[1].attn.query.kernel, own)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_file_that_is_downloaded_in_part(tmp_path, kept):
    path = written(tmp_path, published.decoder_tensors()) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept if kept > 1 else kept * len(data))])
    with pytest.raises(CheckpointError, match=str(path)):
        match_tensors(nnx.eval_shape(Llama), tmp_path)


def raw(path, tensors, codes):
    """Writes a file in which some tensors have a dtype by its code, without values of it."""
    header, data = {}, b""
    for name, x in tensors.items():
        first, data = len(data), data + x.tobytes()
        code = codes.get(name, "F32")
        offsets = [first, len(data)]
        header[name] = {"dtype": code, "shape": x.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def indexed(folder, text, name="model-1.safetensors"):
    written(folder, published.decoder_tensors()).joinpath("model.safetensors").rename(folder / name)
    (folder / "model.safetensors.index.json").write_text(text)


def as_code(folder, code, shape=(48, EMBED), *, scale=None):
    """A file with one tensor of another dtype, of one byte or less, and maybe its scale."""
    added = {f"{Q}_{scale}": np.ones((1, 1), np.float32)} if scale else {}
    tensors = llama_with(**{Q: np.zeros(shape, np.uint8)}) | added
    raw(folder / "model.safetensors", tensors, {Q: code})


# Folders that cannot be read, and what the error says besides the path.
UNREADABLE = {
    "a folder that is none": (lambda folder: folder.rmdir(), "No such file"),
    "nothing in the folder": (lambda folder: None, r"model\.safetensors: No such file"),
    "only weights of PyTorch": (
        lambda folder: (folder / "pytorch_model.bin").touch(),
        "The folder has pytorch_model.bin",
    ),
    "several files without an index": (
        lambda folder: [(folder / f"model-{i}-of-2.safetensors").touch() for i in (1, 2)],
        r"has model-1-of-2.safetensors, model-2-of-2.safetensors\.",
    ),
    "a pointer of Git LFS": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github"),
        "pointer of Git LFS",
    ),
    "an index that is cut off": (lambda folder: indexed(folder, '{"weight_map": {'), "damaged"),
    "an index without files": (lambda folder: indexed(folder, "{}"), "damaged.*weight_map"),
    "an index with a file that is none": (
        lambda folder: indexed(folder, '{"weight_map": {"a": null}}'),
        "None is not the name of a file",
    ),
    "an index that names a file that is not there": (
        lambda folder: indexed(folder, '{"weight_map": {"a": "model-2.safetensors"}}'),
        r"model-2\.safetensors: No such file",
    ),
    "an index that names a tensor that is not there": (
        lambda folder: indexed(folder, '{"weight_map": {"a": "model-1.safetensors"}}'),
        "not in the file.*\n  a: model-1.safetensors",
    ),
    "integers": (
        lambda folder: as_code(folder, "I8"),
        f"Of another dtype.*\n  {Q}: int8, blocks/1/attn/query/kernel: float32",
    ),
    "integers with scales": (
        lambda folder: as_code(folder, "I8", scale="scale"),
        f"{Q}_scale(.|\n)*The file is quantised",
    ),
    "float8 with scales": (
        lambda folder: as_code(folder, "F8_E4M3", scale="scale_inv"),
        f"{Q}_scale_inv(.|\n)*The file is quantised",
    ),
    "a dtype of half a byte": (
        lambda folder: as_code(folder, "F4", (48, EMBED // 2)),
        f"dtype that JAX does not have:\n  {Q}: F4",
    ),
    "a dtype that is larger than its bytes": (
        lambda folder: as_code(folder, "F16"), "damaged.*has bytes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", UNREADABLE)
def test_refuses_a_folder(tmp_path, reason):
    prepare, message = UNREADABLE[reason]
    folder = tmp_path / "model"
    folder.mkdir()
    prepare(folder)
    model = Llama()
    before = jax.tree.leaves(nnx.state(model))
    with pytest.raises(CheckpointError, match=message) as caught:
        match_tensors(model, folder)
    assert str(folder) in str(caught.value)
    with pytest.raises(CheckpointError, match=str(folder)):
        load_safetensors(folder, model, {".*": None})
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_only_a_part_of_the_model(tmp_path):
    """A cache has no tensor, and what is not wanted needs none."""

    class Cached(Llama):
        def __init__(self):
            super().__init__()
            self.cache = nnx.Cache(jnp.zeros((4, 4)))

    tensors = published.decoder_tensors()
    folder = written(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"(?s)without a tensor:\n  cache.*by only=nnx"):
        match_tensors(nnx.eval_shape(Cached), folder)
    rules = match_tensors(nnx.eval_shape(Cached), folder, only=nnx.Param)
    model = load_safetensors(folder, Cached(), rules, only=nnx.Param)
    assert_logits(model, published.llama(tensors, TOKENS))


def test_onto_a_mesh(tmp_path):
    """Only headers are read to match, and each device gets its slices."""
    tensors = published.decoder_tensors()
    folder = written(tmp_path, tensors)
    columns = StateSharding({nnx.PathContains("query"): P(None, None, "model"), ...: P()})
    model = abstract_init(Llama, columns, MESH)
    with mock.patch.object(tensor_files, "read_box", side_effect=AssertionError):
        rules = match_tensors(model, folder)
    load_safetensors(folder, model, rules)
    assert model.blocks[0].attn.query.kernel.sharding.spec == P(None, None, "model")
    assert_logits(model, published.llama(tensors, TOKENS))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': print(1)}", "line 1: print"),
        ("{'a': Tensor('b', 'c -> d')}", "on one side only"),
        ("{'a':\n __import__('os')}", "line 2: __import__"),
        ("{'a': Tensor('b', **c)}", "line 1: Tensor"),
        ("{'a'", "has no rules"),
        ("'a'", "has no rules, but 'a'"),
        ("{'a': 1}", "expected paths"),
        ("{'(': 'a'}", "cannot be understood"),
    ],
)
def test_files_that_have_no_rules(tmp_path, text, message):
    (tmp_path / "rules").write_text(text)
    with pytest.raises((CheckpointError, TypeError, ValueError), match=re.escape(message)):
        TensorRules.load(tmp_path / "rules")


def test_rules_of_all_kinds_are_saved(tmp_path):
    rules = TensorRules(
        {
            r'a"b\.(\d+)': Tensor("x/{0}", "(h d) e -> e h d", h=8, take={"h": slice(0, 4)}),
            "b": ["x", Tensor("y", "one a -> a", one=1, take={"one": 0})],
            "c": None,
            "d": Tensor("z", "a -> part a", put={"part": 3}),
            "e": Tensor("z", "(in out) -> in out", **{"in": 4}),
        }
    )
    rules.save(tmp_path / "rules")
    assert TensorRules.load(tmp_path / "rules") == rules


def test_each_device_reads_its_own_slices(tmp_path):
    """By the rules that are inferred, each number is read once, for the device that has it."""
    tensors = published.decoder_tensors()
    folder = written(tmp_path, tensors)
    columns = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
    model = abstract_init(Llama, columns, MESH)
    rules = match_tensors(model, folder)
    read, boxes = tensor_files.read_box, []

    def count(tensor, box, out=None):
        boxes.append((tensor.shape, int(np.prod(box.shape))))
        return read(tensor, box, out)

    with mock.patch.object(tensor_files, "read_box", count):
        load_safetensors(folder, model, rules)
    assert sum(size for _, size in boxes) == sum(x.size for x in tensors.values())
    of_up = [size for shape, size in boxes if shape == (HIDDEN, EMBED)]
    quarter, whole = HIDDEN * EMBED // 4, HIDDEN * EMBED  # of `up`, and of `gate`
    assert sorted(of_up) == LAYERS * 4 * [quarter] + LAYERS * [whole]
