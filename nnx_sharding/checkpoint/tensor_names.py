r"""What the names of weights mean, so that those of a file and of a model can be compared.

    model.layers.3.self_attn.q_proj.weight  ┐  the "q" of layer 3, a weight
    blocks/3/attention/query/kernel         ┘

A name is read from its end: its *kind* (weight, bias), its *part* (``q``, by a table of synonyms,
otherwise the last word), its numbers (which layer, which expert), and the words around it. Names
that differ only in their numbers are one *template*, ``model.layers.{}.self_attn.q_proj.weight``.

Part, kind, and whether it is in a layer are the *role* of a name, which names of two sides that
mean the same have in common (``tensor_links``).

*Towers* are the halves of a model that have parts of the same names, such as encoder and decoder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# The words of one concept, one way of writing them each, before the tables below are used.
_SPELLINGS = (
    (r"(?<=[a-z0-9])(?=[A-Z])", "_"),  # LayerNorm as layer_norm; what follows is in lower case
    (r"layer_?norm|rms_?norm|(?<![a-z])ln(?![a-z])", "norm"),
    (r"feed_?forward|ffn|ffw", "mlp"),
    (r"self_attention|self_attn|attention", "attn"),
    (r"encoder_attn|crossattn", "cross_attn"),
    (r"(?<![a-z])query(?![a-z])", "q"),
    (r"(?<![a-z])key(?![a-z])", "k"),
    (r"(?<![a-z])value(?![a-z])", "v"),
    (r"projection", "proj"),
    (r"embedd?ings?|embeds|embedder", "embed"),
    (r"_(?=\d+$)|^_+", ""),  # norm_1 as norm1
    ("shared_experts?", "shared"),
)
_KINDS = {
    **dict.fromkeys(("weight", "kernel", "scale", "embedding", "w", "gamma"), "weight"),
    **dict.fromkeys(("bias", "b", "beta"), "bias"),
    **{"running_mean": "mean", "mean": "mean", "running_var": "var", "var": "var"},
}
_LAYERS = {"layer", "layers", "block", "blocks", "h", "resblocks"}
# A number that counts layers or the like: a segment of its own, or at the end of `layers_3`.
_NUMBER = re.compile(r"((?:^|[./])(?:(?:layers?|blocks?|experts?)_)?)([0-9]+)(?=[./]|$)")
_WRAPPERS = {"model", "transformer", "language_model", "text_model", "module", "params", "backbone"}
# What tells apart the halves of a model that have parts of the same names.
_TOWERS = re.compile("(encoder|decoder|vision|audio|cross|shared|draft).*")

QKV_BY_HEAD = "qkv by head"  # as in GPT-NeoX, BLOOM and Falcon
# Halves in Llama 4, but in turns in gpt-oss, whose experts have biases.
GATE_UP_OF_EITHER_ORDER = "gate_up of experts with biases"

# How parts are called, the words of a name joined by dots. `proj` and the like may follow.
# The first that matches applies, so what depends on the surroundings is first.
_IN_LAYERS = (
    ("q_norm", "q_norm|norm_q"),
    ("k_norm", "k_norm|norm_k"),
    ("norm_attn_after", r"post_attn_norm|attn\.output\.norm"),
    ("norm_mlp_after", r"post_mlp_norm|output\.norm"),
    ("norm_attn", r"(input|pre_attn|pre_self_attn|attn|self_attn)_norm|norm1|norm_(before|attn)"),
    ("norm_mlp", r"(pre_)?mlp_norm|norm2|norm_(after|mlp)|final_norm"),
    (QKV_BY_HEAD, "q_k_v"),
    ("qkv", r"w?qkv|c_attn|attn\.in"),
    ("kv", "w?kv"),
    ("q", "w?q"),
    ("k", "w?k"),
    ("v", "w?v"),
    ("down", r"mlp\.(wo|c_proj|proj|out|output)|down|w2|fc2|fc_out|linear2|dense_4h_to_h"),
    ("o", r"\w*attn\.(output\.dense|dense|output|c_proj|proj)|w?o|out|attn_vec"),
    ("down", r"output\.dense"),
    ("gate_up", "gate_up|gating"),
    ("gate", "gate(?=_)|w1|wi_?0"),
    ("gate or router", "gate"),
    ("up", r"up|w3|wi_?1|c_fc|fc1|fc_in|linear1|intermediate\.dense|dense_h_to_4h"),
    ("router", "router"),
)
_ELSEWHERE = (
    ("patch", r"patch_embed(\.proj)?|conv_proj|\w*embed\.proj"),
    ("cls", "cls(_token)?|class_(token|embed)"),
    ("pos", "wpe|embed_positions?|pos(ition(al)?)?(_embed)?"),
    ("embed", "embed(_tokens|_in)?|(tok(en)?|word|input|vocab)_embed|wte|tok(en)?s?|vocab|shared"),
    ("norm", "((final|out|output|post|decoder|encoder)_)?norm|norm_f|f_norm"),
    ("head", "(lm_)?head|classifier|logits|unembed|embed_out|output|proj_out"),
)
_QKV = ("q", "k", "v")
_GATE_UP = ("gate", "up")
FUSED = {
    **{"qkv": _QKV, QKV_BY_HEAD: _QKV, "kv": ("k", "v")},
    **{"gate_up": _GATE_UP, GATE_UP_OF_EITHER_ORDER: _GATE_UP},
}


class Template(NamedTuple):
    """Names that differ only in their numbers."""

    text: str  # with {} for each number
    words: tuple[str, ...]  # in one spelling, without wrappers, numbers and the kind
    counters: tuple[str, ...]  # what each number counts, such as ("layer", "expert")
    in_layer: bool
    part: str
    kind: str

    @property
    def spelling(self) -> tuple[str, ...]:
        """The words before the last one as the name has them, where ``up`` and ``Up`` differ."""
        return (*re.split("[./]", self.text)[:-1],)

    @property
    def role(self) -> tuple[bool, str, str]:
        """What it is, as far as the name says; a few templates of one side may have the same."""
        return self.in_layer, self.kind, self.part

    @property
    def context(self) -> frozenset[str]:
        """The words around the part, as far as they may tell it from others."""
        return frozenset(self.words[:-1]) - _LAYERS - {"attn", "mlp"}

    @property
    def is_in_expert(self) -> bool:
        """Whether it belongs to one of several experts."""
        return any(word.startswith("expert") for word in self.words)

    @property
    def towers(self) -> frozenset[str]:
        """The half of a model that it belongs to."""
        return frozenset(word for word in self.words if _TOWERS.fullmatch(word))


def read_name(name: str) -> tuple[Template, tuple[int, ...]]:
    """Returns the template of a name and its numbers: ``h.3.up`` is ``h.{}.up`` and ``(3,)``."""
    text = _NUMBER.sub(r"\1{}", name)
    return _template(text), tuple(int(number) for _, number in _NUMBER.findall(name))


@functools.lru_cache(4096)  # a model has few templates, but each for all layers and experts
def _template(text: str) -> Template:
    """Reads what a name with {} for each number means.

    ``model.layers.{}.LayerNorm.weight`` has the words ``("layers", "norm")``, the counter
    ``layer``, the part ``norm`` and the kind ``weight``.
    """
    words, counters = list[str](), list[str]()
    # At dots and slashes, and between a word and its number: `layers_{}` is `layers` and `{}`.
    for segment in re.split(r"[./]|_(?={})", text):
        if segment != "{}":
            words.append(segment)
            continue
        container = words[-1] if words else ""
        counter = "layer" if container in _LAYERS else container.removesuffix("s")
        # In T5, `block.3.layer.1` is the second part of a block: counters need different names.
        counters.append(f"{counter}{len(counters)}" if counter in counters else counter)
    words, kind = _without_kind(words or [""])  # the names in a list of arrays are numbers only
    spelled = [_spelled(word) for word in words]
    # A name always has a word, if only "model".
    words = [word for word in spelled if word not in _WRAPPERS] or spelled[-1:]
    # Only words around a layer tell that `output` is the attention's or the MLP's, not the head.
    in_layer = not _LAYERS.isdisjoint(words)
    part = _part(words, _IN_LAYERS if in_layer else _ELSEWHERE)
    return Template(text, tuple(words), tuple(counters), in_layer, part, kind)


def _without_kind(words: list[str]) -> tuple[list[str], str]:
    """Returns the words before those that only say what kind of array it is, and the kind.

    For ``["mlp", "up", "bias"]`` it is ``(["mlp", "up"], "bias")``. A name without such words, such
    as ``pos_embed``, is a weight, and one word always stays, as that is the part.
    """
    *words, last = words
    joined = re.fullmatch(r"(\w+)_(weight|bias)", last)  # in_proj_bias of PyTorch
    words += joined.groups() if joined else [last]
    kind = "weight"
    while len(words) > 1 and words[-1] in _KINDS:
        kind = _KINDS[words.pop()]  # of `embedding.weight`, both are kinds, and the first counts
    return words, kind


def _spelled(word: str) -> str:
    """Writes a word as the tables of parts do: ``LayerNorm_1`` is ``norm1``."""
    for pattern, spelling in _SPELLINGS:
        word = re.sub(pattern, spelling, word)
        word = word.lower()
    return word


def _part(words: Sequence[str], table: Iterable[tuple[str, str]]) -> str:
    """Returns the first part in a table whose pattern the words end like; else the last word."""
    text = ".".join(words)
    for part, pattern in table:
        if re.fullmatch(rf"(.*\.)?({pattern})(_proj|_einsum|_dense|_layer)?", text):
            return part
    return words[-1] if words else ""


def settled(templates: Sequence[Template]) -> list[Template]:
    """Decides parts whose meaning depends on the other templates of the same side.

    In a model with experts, ``mlp.gate`` is a router, which chooses them. In a model without, it is
    the gate of the MLP.
    """
    parts = {(t.towers, t.part) for t in templates if t.in_layer}
    parts_of_modules = {(t.words[:-1], t.part) for t in templates}  # (("layers", "mlp"), "up")
    has_experts = any(t.is_in_expert for t in templates)
    experts_have_biases = any(
        t.is_in_expert and (t.part, t.kind) == ("gate_up", "bias") for t in templates
    )

    def has(template: Template, *others: str) -> bool:
        """Whether layers of the template's half of the model have one of these parts."""
        return any((template.towers, part) in parts for part in others)

    result = []
    for template in templates:
        part = template.part
        if part == "gate or router":
            # A router is outside of experts, in a model that has experts or other gates.
            may_be_router = has_experts or has(template, "gate", "gate_up")
            # But `mlp.gate` next to `mlp.up` is its gate, unless `mlp.gate_proj` is that.
            module = template.words[:-1]
            has_up = (module, "up") in parts_of_modules
            is_gate_of_up = has_up and (module, "gate") not in parts_of_modules
            is_router = may_be_router and not template.is_in_expert and not is_gate_of_up
            part = "router" if is_router else "gate"
        elif part == "gate_up" and template.is_in_expert and experts_have_biases:
            part = GATE_UP_OF_EITHER_ORDER  # as in gpt-oss
        elif template.words[-1] == "w1" and not has(template, "up"):
            part = "up"  # `w1` and `w2` alone; with `w3`, which is "up", `w1` is the gate
        elif part == "norm_attn_after" and not has(template, "norm_mlp"):
            # `post_attention_layernorm` is the one before the MLP in Llama. Gemma has both.
            part = "norm_mlp"
        result.append(template._replace(part=part))
    return result
