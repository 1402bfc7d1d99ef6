r"""Reads the meaning of weights' names, so that names of a file and of a model can be compared.

    model.layers.3.self_attn.q_proj.weight  ┐  the "q" of layer 3, a weight
    blocks/3/attention/query/kernel         ┘

A name is read from its end: its *kind* (weight, bias, factor of LoRA), its *part* (``q``, by a
table of synonyms, otherwise the last word), its numbers (which layer, which expert), and the words
around the part.
Names that differ only in their numbers have one *template*,
``model.layers.{}.self_attn.q_proj.weight``.

The *role* of a name is its part, its kind, and whether it is in a layer. Names that mean the same
on two sides have the same role (``tensor_links``).

*Towers* are the halves of a model that have parts of the same names, such as encoder and decoder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..specs.layer_names import AFFIXES, NAMES
from ..specs.paths import WRAPPERS

# Patterns for the ways in which a concept is written, and the one spelling that the tables below
# have for it.
_SPELLINGS = (
    (r"(?<=[a-z0-9])(?=[A-Z])", "_"),  # LayerNorm → Layer_Norm; `_spelled` makes it lower case
    (r"layer_?norm|rms_?norm|(?<![a-z])ln(?![a-z])", "norm"),
    (r"feed_?forward|ffn|ffw", "mlp"),
    (r"self_attention|self_attn|attention", "attn"),
    (r"encoder_attn|crossattn", "cross_attn"),
    (r"(?<![a-z])query(?![a-z])", "q"),
    (r"(?<![a-z])key(?![a-z])", "k"),
    (r"(?<![a-z])value(?![a-z])", "v"),
    (r"projection", "proj"),
    (r"embedd?ings?|embeds|embedder", "embed"),
    (r"_(?=\d+$)|^_+", ""),  # norm_1 → norm1
    ("shared_experts?", "shared"),
)
# The kinds of arrays, by the last words of their names.
_KINDS = {
    **dict.fromkeys(("weight", "kernel", "scale", "embedding", "table", "w", "gamma"), "weight"),
    **dict.fromkeys(("bias", "b", "beta"), "bias"),
    **{"running_mean": "mean", "mean": "mean", "running_var": "var", "var": "var"},
    # The factors of LoRA, in Flax and in PEFT, whose adapters have `q_proj.lora_A.weight`.
    **{"lora_a": "lora_a", "lora_A": "lora_a", "lora_b": "lora_b", "lora_B": "lora_b"},
}
# Words for a list of layers. A name with one of them is in a layer.
_LAYERS = {"layer", "layers", "block", "blocks", "h", "resblocks"}
# A number that counts layers or the like: a segment of its own, or the end of one, `layers_3`.
_NUMBER = re.compile(r"((?:^|[./])(?:(?:layers?|blocks?|experts?)_)?)([0-9]+)(?=[./]|$)")
# Words for a whole model, and for a layer in a wrapper. They are left out, because they tell
# nothing about the parts of the model.
_MODELS = "model base_model transformer language_model text_model module params backbone"
_LEFT_OUT = WRAPPERS | {*_MODELS.split()}
# Words that tell apart the halves of a model that have parts of the same names.
_TOWERS = re.compile("(encoder|decoder|vision|audio|cross|shared|draft).*")


def _spelled(word: str) -> str:
    """Returns a word in the spelling of the tables of parts: ``LayerNorm_1`` → ``norm1``."""
    for pattern, spelling in _SPELLINGS:
        word = re.sub(pattern, spelling, word)
        word = word.lower()
    return word


def _named(part: str) -> str:
    """Returns a pattern for the names that `NAMES` has for a part, in one spelling."""
    return "|".join(sorted({re.escape(_spelled(name)) for name in NAMES[part]}))


QKV_BY_HEAD = "qkv by head"  # GPT-NeoX, BLOOM and Falcon have this order
# Gate and up are halves in Llama 4, but in turns in gpt-oss, whose experts have biases.
GATE_UP_OF_EITHER_ORDER = "gate_up of experts with biases"

# Parts with patterns for their names. A pattern matches the words of a name, joined by dots; `proj`
# and the like may follow. The first pattern that matches applies, so patterns that depend on the
# surrounding words come first.
_IN_LAYERS = (
    ("q_norm", "q_norm|norm_q"),
    ("k_norm", "k_norm|norm_k"),
    ("norm_attn_after", r"post_attn_norm|attn\.output\.norm"),
    ("norm_mlp_after", r"post_mlp_norm|output\.norm"),
    ("norm_attn", r"(input|pre_attn|pre_self_attn|attn|self_attn)_norm|norm1|norm_(before|attn)"),
    ("norm_mlp", r"(pre_)?mlp_norm|norm2|norm_(after|mlp)|final_norm"),
    (QKV_BY_HEAD, "q_k_v"),
    ("qkv", rf"{_named('qkv')}|(to_)?qkv|attn\.in"),
    ("kv", "(to_|w)?kv"),
    ("q", _named("q")),
    ("k", _named("k")),
    ("v", _named("v")),
    ("down", rf"mlp\.(wo|c_proj|proj|out|output)|{_named('down')}|dense_4h_to_h"),
    ("o", rf"\w*attn\.(output\.dense|dense|output|c_proj|proj)|{_named('o')}|out|attn_vec"),
    ("down", r"output\.dense"),
    ("gate_up", f"{_named('gate_up')}|gating"),
    # `gate` alone may be a router as well.
    ("gate", f"gate(?=_)|(?!gate$)({_named('gate')})"),
    ("gate or router", "gate"),
    ("up", rf"mlp\.in|{_named('up')}|intermediate\.dense|dense_h_to_4h"),
    ("router", "router"),
)
_ELSEWHERE = (
    ("patch", r"patch_embed(\.proj)?|conv_proj|\w*embed\.proj"),
    ("cls", "cls(_token)?|class_(token|embed)"),
    ("pos", "wpe|embed_positions?|pos(ition(al)?)?(_emb(ed)?)?"),
    (
        "embed",
        "emb|embed(_tokens|_in)?|(tok(en)?|word|input|vocab)_emb(ed)?|wte|tok(en)?s?|vocab|shared",
    ),
    ("norm", "((final|out|output|post|decoder|encoder)_)?norm|norm_f|f_norm"),
    ("head", f"{_named('head')}|embed_out|output|proj_out"),
)
# `FUSED` has the parts of each fused part, in the order in which a fused tensor has them.
_QKV = ("q", "k", "v")
_GATE_UP = ("gate", "up")
FUSED = {
    **{"qkv": _QKV, QKV_BY_HEAD: _QKV, "kv": ("k", "v")},
    **{"gate_up": _GATE_UP, GATE_UP_OF_EITHER_ORDER: _GATE_UP},
}


class Template(NamedTuple):
    """Names that differ only in their numbers."""

    text: str  # the names, with {} for each number
    words: tuple[
        str, ...
    ]  # the words in one spelling, without those of `_LEFT_OUT`, numbers and the kind
    counters: tuple[str, ...]  # the word for what each number counts, such as ("layer", "expert")
    in_layer: bool  # whether the words have one of `_LAYERS`
    part: str  # a part of `_IN_LAYERS` or `_ELSEWHERE`, such as "q"; else the last word
    kind: str  # a value of `_KINDS`, such as "weight"

    @property
    def spelling(self) -> tuple[str, ...]:
        """The words before the last one, as they are written: ``up`` and ``Up`` differ."""
        return (*re.split("[./]", self.text)[:-1],)

    @property
    def role(self) -> tuple[bool, str, str]:
        """The role: whether it is in a layer, its kind and its part.

        A few templates of one side may have the same role.
        """
        return self.in_layer, self.kind, self.part

    @property
    def context(self) -> frozenset[str]:
        """The words around the part that may tell the part from other parts of the same name."""
        return frozenset(self.words[:-1]) - _LAYERS - {"attn", "mlp"}

    @property
    def is_in_expert(self) -> bool:
        """Whether the array belongs to one of several experts."""
        return any(word.startswith("expert") for word in self.words)

    @property
    def towers(self) -> frozenset[str]:
        """The words for the half of a model that the array belongs to; none without such words."""
        return frozenset(word for word in self.words if _TOWERS.fullmatch(word))


def read_name(name: str) -> tuple[Template, tuple[int, ...]]:
    """Returns the template of a name and its numbers: ``h.3.up`` is ``h.{}.up`` and ``(3,)``."""
    text = _NUMBER.sub(r"\1{}", name)
    return _template(text), tuple(int(number) for _, number in _NUMBER.findall(name))


@functools.lru_cache(4096)  # layers and experts have the same templates, so calls are repeated
def _template(text: str) -> Template:
    """Reads the meaning of a name with {} for each number.

    ``model.layers.{}.LayerNorm.weight`` has the words ``("layers", "norm")``, the counter
    ``layer``, the part ``norm`` and the kind ``weight``.
    """
    words, counters = list[str](), list[str]()
    # The text is split at dots and slashes, and between a word and its number: `layers_{}` becomes
    # `layers` and `{}`.
    for segment in re.split(r"[./]|_(?={})", text):
        if segment != "{}":
            words.append(segment)
            continue
        container = words[-1] if words else ""
        counter = "layer" if container in _LAYERS else container.removesuffix("s")
        # Counters need different names. In T5, `block.3.layer.1` is the second part of a block, and
        # both words would be the counter `layer`.
        counters.append(f"{counter}{len(counters)}" if counter in counters else counter)
    words, kind = _without_kind(words or [""])  # a name in a list of arrays is only a number
    spelled = [_spelled(word) for word in words]
    # Such a word stays if it is the only one, because a name needs a word.
    words = [word for word in spelled if word not in _LEFT_OUT] or spelled[-1:]
    # The tables differ because a word such as `output` is part of attention or an MLP in a layer,
    # and the head elsewhere.
    in_layer = not _LAYERS.isdisjoint(words)
    part = _part(words, _IN_LAYERS if in_layer else _ELSEWHERE)
    return Template(text, tuple(words), tuple(counters), in_layer, part, kind)


def _without_kind(words: list[str]) -> tuple[list[str], str]:
    """Returns the words of a name without those at its end for the kind of array, and the kind.

    For ``["mlp", "up", "bias"]``, the result is ``(["mlp", "up"], "bias")``. A name without words
    for the kind, such as ``pos_embed``, is a weight. One word always stays, because it is the part.
    """
    *words, last = words
    # For example `in_proj_bias` of PyTorch, and `token_table`.
    joined = re.fullmatch(r"(\w+)_(weight|bias|table)", last)
    words += joined.groups() if joined else [last]
    kind = "weight"
    # Several words may be kinds, as in `embedding.weight`. The first of them counts.
    while len(words) > 1 and words[-1] in _KINDS:
        kind = _KINDS[words.pop()]
    return words, kind


def _part(words: Sequence[str], table: Iterable[tuple[str, str]]) -> str:
    """Returns the first part in a table whose pattern the words end with; else the last word.

    If no pattern matches, the last word is read without an affix: ``w_up`` as ``up``.
    """
    *context, last = words
    for word in dict.fromkeys((last, _without_affix(last))):
        text = ".".join([*context, word])
        for part, pattern in table:
            if re.fullmatch(rf"(.*\.)?({pattern})(_proj|_einsum|_dense|_layer)?", text):
                return part
    return last


def _without_affix(word: str) -> str:
    """Returns a word without an affix that says that it is a parameter: ``w_up`` → ``up``."""
    # The direction of a kernel in PyTorch's weight_norm has this name. It is no `v` of attention.
    return word if word == "weight_v" else AFFIXES.sub("", word)


# Names of layers that are counted, of which `_IN_LAYERS` knows what the usual ones are for.
_COUNTED = re.compile("(?P<stem>w|fc|linear|dense)(?P<number>[0-3])")


def _with_unusual_numbers(
    templates: Sequence[Template], shapes: Sequence[tuple[int, ...]]
) -> set[str]:
    """Returns the texts of templates whose last word is counted in another way than usual.

    Usually ``w1`` is the gate, ``w3`` is up and ``w2`` is down; and ``fc1`` is up and ``fc2`` is
    down. This cannot be so if the module counts from 0; nor if ``w1`` and ``w2`` have one shape and
    ``w3`` has another, because then ``w3`` leads back from the hidden features (xFormers has this
    order).

    Args:
      shapes: the shape of an array of each template.
    """
    # (the words of the module, the kind, the stem) → number → (text of the template, shape)
    counted: dict[tuple[tuple[str, ...], str, str], dict[int, tuple[str, tuple[int, ...]]]] = {}
    for template, shape in zip(templates, shapes, strict=True):
        match = _COUNTED.fullmatch(_without_affix(template.words[-1]))
        if match is not None:
            key = template.words[:-1], template.kind, match["stem"]
            counted.setdefault(key, {})[int(match["number"])] = template.text, shape
    unusual: set[str] = set()
    for by_number in counted.values():
        first, second, third = (by_number.get(number, ("", None))[1] for number in (1, 2, 3))
        third_is_down = first is not None and first == second and third not in (None, first)
        if 0 in by_number or third_is_down:
            unusual.update(text for text, _ in by_number.values())
    return unusual


def with_settled_parts(
    templates: Sequence[Template], shapes: Sequence[tuple[int, ...]]
) -> list[Template]:
    """Returns the templates with the parts decided that depend on other templates of the same side.

    In a model with experts, ``mlp.gate`` is a router, which chooses experts. In a model without
    experts, it is the gate of the MLP.

    Args:
      shapes: the shape of an array of each template.
    """
    unusual = _with_unusual_numbers(templates, shapes)
    parts = {(t.towers, t.part) for t in templates if t.in_layer}
    parts_of_modules = {(t.words[:-1], t.part) for t in templates}  # (("layers", "mlp"), "up")
    has_experts = any(t.is_in_expert for t in templates)
    experts_have_biases = any(
        t.is_in_expert and (t.part, t.kind) == ("gate_up", "bias") for t in templates
    )

    def has_any(template: Template, *other_parts: str) -> bool:
        """Whether layers of the template's half of the model have one of these parts."""
        return any((template.towers, part) in parts for part in other_parts)

    def is_router(template: Template) -> bool:
        """Whether a template whose part is "gate or router" is a router."""
        # A router is outside of experts, in a model that has experts or other gates.
        if template.is_in_expert:
            return False
        if not has_experts and not has_any(template, "gate", "gate_up"):
            return False
        # `mlp.gate` next to `mlp.up` is the gate for it, unless there is a `mlp.gate_proj`.
        module = template.words[:-1]
        return (module, "up") not in parts_of_modules or (module, "gate") in parts_of_modules

    result = []
    for template in templates:
        part = template.part
        if template.text in unusual:
            part = template.words[-1]
        elif part == "gate or router":
            part = "router" if is_router(template) else "gate"
        elif part == "gate_up" and template.is_in_expert and experts_have_biases:
            part = GATE_UP_OF_EITHER_ORDER  # for example in gpt-oss
        elif template.words[-1] == "w1" and not has_any(template, "up"):
            part = "up"  # there is no `w3`, which would be "up" and make `w1` the gate
        elif part == "norm_attn_after" and not has_any(template, "norm_mlp"):
            # In Llama, `post_attention_layernorm` is the norm before the MLP. Gemma has both norms.
            part = "norm_mlp"
        result.append(template._replace(part=part))
    return result
