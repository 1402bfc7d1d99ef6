"""``match_tensors`` by names and shapes of published architectures, into a model of other names.

What goes where is proved by logits in `test_match_published.py`, for some of these.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_sharding.checkpoint import load_safetensors, match_tensors
from nnx_sharding.errors import CheckpointError
from published import EMBED, EXPERTS, HEAD_DIM, HEADS, HIDDEN, KV, VOCAB
from test_match_tensors import shaped, written

pytest.importorskip("safetensors.numpy")

ROWS, GROUP = HEADS * HEAD_DIM, KV * HEAD_DIM


def matrix(name, *shape, bias=False):
    return {f"{name}.weight": shape, **({f"{name}.bias": shape[:1]} if bias else {})}


def norm(name, bias=False):
    return matrix(name, EMBED, bias=bias)


def attention(module, q="q_proj", k="k_proj", v="v_proj", o="o_proj", *, bias=False):
    return {
        **matrix(f"{module}.{q}", ROWS, EMBED, bias=bias),
        **matrix(f"{module}.{k}", GROUP, EMBED, bias=bias),
        **matrix(f"{module}.{v}", GROUP, EMBED, bias=bias),
        **matrix(f"{module}.{o}", EMBED, ROWS),
    }


def gated(module="mlp", gate="gate_proj", up="up_proj", down="down_proj", size=HIDDEN):
    return {
        **matrix(f"{module}.{gate}", size, EMBED),
        **matrix(f"{module}.{up}", size, EMBED),
        **matrix(f"{module}.{down}", EMBED, size),
    }


def experts(module, *names):
    return {k: v for i in range(EXPERTS) for k, v in gated(f"{module}.{i}", *names).items()}


NORMS = norm("input_layernorm") | norm("post_attention_layernorm")
LLAMA = NORMS | attention("self_attn") | gated()
SHARED = gated("mlp.shared_expert", size=HIDDEN + 1)
FALCON = matrix("self_attention.dense", EMBED, ROWS) | {
    "mlp.dense_h_to_4h.weight": (HIDDEN, EMBED),
    "mlp.dense_4h_to_h.weight": (EMBED, HIDDEN),
}

# How each calls layers, their parts, and the embedding, the last norm and the head.
ENDS = "model.embed_tokens", "model.norm", "lm_head"
OF_FALCON = "transformer.word_embeddings", "transformer.ln_f", "lm_head"
ARCHITECTURES = {
    "Mistral": ("model.layers", LLAMA, *ENDS),
    "Llama without a prefix": ("layers", LLAMA, "embed_tokens", "norm", "lm_head"),
    "Llama with a tied head": ("model.layers", LLAMA, *ENDS[:2], None),
    "Llama of Meta": (
        "layers",
        norm("attention_norm") | norm("ffn_norm") | attention("attention", "wq", "wk", "wv", "wo")
        | gated("feed_forward", "w1", "w3", "w2"),
        "tok_embeddings", "norm", "output",
    ),
    "Qwen2": ("model.layers", NORMS | attention("self_attn", bias=True) | gated(), *ENDS),
    "Phi-3": (
        "model.layers",
        NORMS | matrix("self_attn.qkv_proj", ROWS + 2 * GROUP, EMBED)
        | matrix("self_attn.o_proj", EMBED, ROWS) | matrix("mlp.gate_up_proj", 2 * HIDDEN, EMBED)
        | matrix("mlp.down_proj", EMBED, HIDDEN),
        *ENDS,
    ),
    "Qwen2-MoE": (
        "model.layers",
        NORMS | attention("self_attn") | matrix("mlp.gate", EXPERTS, EMBED)
        | experts("mlp.experts") | SHARED | matrix("mlp.shared_expert_gate", 1, EMBED),
        *ENDS,
    ),
    "Falcon 7B": (
        "transformer.h",
        norm("input_layernorm", bias=True) | FALCON
        | matrix("self_attention.query_key_value", ROWS + 2 * HEAD_DIM, EMBED),
        *OF_FALCON,
    ),
    "Falcon 40B": (
        "transformer.h",
        norm("ln_attn") | norm("ln_mlp") | FALCON
        | matrix("self_attention.query_key_value", ROWS + 2 * GROUP, EMBED),
        *OF_FALCON,
    ),
    "OPT": (
        "model.decoder.layers",
        norm("self_attn_layer_norm") | norm("final_layer_norm")
        | attention("self_attn", o="out_proj") | matrix("fc1", HIDDEN, EMBED)
        | matrix("fc2", EMBED, HIDDEN),
        "model.decoder.embed_tokens", "model.decoder.final_layer_norm", None,
    ),
    "GPT-J": (
        "transformer.h",
        norm("ln_1") | attention("attn", o="out_proj") | matrix("mlp.fc_in", HIDDEN, EMBED)
        | matrix("mlp.fc_out", EMBED, HIDDEN),
        "transformer.wte", "transformer.ln_f", "lm_head",
    ),
    "gpt-oss": (
        "model.layers",
        NORMS | attention("self_attn") | matrix("mlp.router", EXPERTS, EMBED) | {
            "mlp.experts.gate_up_proj": (EXPERTS, EMBED, 2 * HIDDEN),
            "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * HIDDEN),
            "mlp.experts.down_proj": (EXPERTS, HIDDEN, EMBED),
        },
        *ENDS,
    ),
    "Granite with experts": (
        "model.layers",
        NORMS | attention("self_attn") | matrix("block_sparse_moe.router.layer", EXPERTS, EMBED) | {
            "block_sparse_moe.input_linear.weight": (EXPERTS, 2 * HIDDEN, EMBED),
            "block_sparse_moe.output_linear.weight": (EXPERTS, EMBED, HIDDEN),
        },
        *ENDS,
    ),
}  # fmt: skip

# What is refused, and the reason. Rules by hand help.
REFUSED = {
    # Both the parts of each group of heads together, and one part after the other, are published.
    "Falcon 40B": r"as '\(h d\) in -> in h d' or '\(h p d\) in -> in \(h p\) d'",
    # Llama 4 has halves, but no biases.
    "gpt-oss": r"as 'experts in out -> in out' or 'experts in \(out p\) -> in out'",
    # These names are of any two layers elsewhere.
    "Granite with experts": "Tensors without an array:\n.*input_linear",
}


def model(parts, head):
    """The same architecture in our own names, with kernels of Flax, split into heads."""
    names = [name for name in parts if not name.endswith("bias")]
    has_bias = any(name.endswith("bias") and "attn" in name for name in parts)
    heads = {"q": HEADS, "k": KV, "v": KV}
    if parts.get("self_attention.query_key_value.weight") == (ROWS + 2 * HEAD_DIM, EMBED):
        heads |= {"k": 1, "v": 1}
    shapes = {f"attn__{x}__kernel": (EMBED, n, HEAD_DIM) for x, n in heads.items()}
    if has_bias:
        shapes |= {f"attn__{x}__bias": (n, HEAD_DIM) for x, n in heads.items()}
    shapes["attn__out__kernel"] = (HEADS, HEAD_DIM, EMBED)
    shapes["norm1__scale"] = (EMBED,)
    if sum("norm" in name or "ln_" in name for name in names) > 1:
        shapes["norm2__scale"] = (EMBED,)
    if "input_layernorm.bias" in parts:
        shapes["norm1__bias"] = (EMBED,)
    matrices = {"up": (EMBED, HIDDEN), "down": (HIDDEN, EMBED)}
    if any("gate" in name or "w3" in name or "input_linear" in name for name in names):
        matrices["gate"] = (EMBED, HIDDEN)
    modules = ["mlp"]
    if any("expert" in name or "router" in name for name in names):
        modules = [f"mlp__experts__{i}" for i in range(EXPERTS)]
        shapes["mlp__router__kernel"] = (EMBED, EXPERTS)
    shapes |= {f"{m}__{x}__kernel": shape for m in modules for x, shape in matrices.items()}
    if "mlp.experts.gate_up_proj_bias" in parts:
        shapes |= {f"{m}__{x}__bias": (HIDDEN,) for m in modules for x in ("gate", "up")}
    if "mlp.shared_expert_gate.weight" in parts:
        shapes["mlp__shared_gate__kernel"] = (EMBED, 1)
        size = HIDDEN + 1
        shapes |= {f"mlp__shared__{x}__kernel": (EMBED, size) for x in ("gate", "up")}
        shapes["mlp__shared__down__kernel"] = (size, EMBED)
    ends = {"tok__embedding": (VOCAB, EMBED), "final_norm__scale": (EMBED,)}
    ends |= {"head__kernel": (EMBED, VOCAB)} if head else {}
    return shaped(**{f"blocks__{i}__{k}": v for i in range(2) for k, v in shapes.items()}, **ends)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_names(tmp_path, name):
    layers, parts, embed, last, head = ARCHITECTURES[name]
    shapes = {f"{layers}.{i}.{part}": shape for i in range(2) for part, shape in parts.items()}
    shapes |= {f"{embed}.weight": (VOCAB, EMBED), f"{last}.weight": (EMBED,)}
    shapes |= {f"{head}.weight": (VOCAB, EMBED)} if head else {}
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    folder = written(tmp_path, tensors)
    if name in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[name]):
            match_tensors(model(parts, head), folder)
        return
    rules = match_tensors(model(parts, head), folder)
    loaded = load_safetensors(folder, model(parts, head), rules)
    # Each number of the file is in the model once.
    arrays = np.concatenate([np.ravel(x) for x in jax.tree.leaves(nnx.state(loaded))])
    numbers = np.concatenate([x.ravel() for x in tensors.values()])
    np.testing.assert_array_equal(np.sort(arrays), np.sort(numbers))
