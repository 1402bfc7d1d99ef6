"""Which dimensions of a layer tensor parallelism shards.

A *style* is one way to shard a layer: its outputs (a *column* of the kernel on each device) or its
inputs (a *row*). A *rule* gives the styles of a kind of layer, best first:

    COLUMN   kernel (in, out/n)   bias (out/n)   outputs are sharded
    ROW      kernel (in/n, out)   bias (out)     inputs are sharded, outputs summed over n devices

A column layer and then a row layer, such as the two of an MLP, need one sum for both.

Layers of Flax have the rules of `RULES`. In a module of a user's class, each parameter with two
dimensions or more, without those of stacked layers, has the first of these rules that fits:

1. The class has the subscripts of one einsum, and one kernel for it: as ``nnx.Einsum``.
2. Two matrices (a, b) and (b, a) lead into hidden features and back: a column and a row.
3. A matrix is called an embedding, or is the only one of a class that is: as ``nnx.Embed``. Tables
   of positions are added to activations, and stay whole.
4. A kernel is the only one of its module, and no other module is in it: a linear layer, whose name
   is that of the module. A bias tells which features are the outputs.
5. Its own name is that of a layer, as in ``wq``, ``o_proj`` and ``w_down``: a linear layer.

Whatever the rule chooses, numbers are right; a wrong guess costs communication. So no parameter is
sharded of which neither name nor shape says what it is for.

Names override sizes: a layer called ``down`` or ``o_proj`` is a row layer (`_ROWS`), one called
``up`` or ``q_proj`` a column layer (`_COLUMNS`). In a style, dimensions count from the end: of a
kernel (in, out), -1 are the outputs. A bias with -1 is sharded like the outputs; with None it is
whole, as it is added once to the sum that a row layer returns.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from flax import nnx

from .. import _compat
from ..specs.paths import Path
from .layers import has_sizes
from .variables import NamedVariable, Shape


class Style(NamedTuple):
    """One way to shard a layer."""

    # What a device has of it, for reports: ``column``, ``row``, … Empty where it is not known.
    role: str
    # The sharded dimension of each parameter, by the path in the layer; counted from the end, None
    # for none.
    dimensions: Mapping[str, int | None]

    @property
    def deciding(self) -> str:
        """The path of the parameter that decides whether the style can be used: the first one."""
        return next(iter(self.dimensions))

    @property
    def row_layer(self) -> Path | None:
        """The layer whose outputs are sums over the axis, by its path in this one; None if none."""
        if self.role == "row":
            return ()
        return ("out",) if "out/kernel" in self.dimensions else None  # of `MultiHeadAttention`


# What tells inputs and outputs apart: their number, or those of their dimensions and features.
_Size = TypeVar("_Size", int, tuple[int, int])

# The styles for a layer, best first, or a function of a layer and its name that returns them.
Rule: TypeAlias = "Sequence[Style] | Callable[[Any, str], Sequence[Style]]"


def _in_each(layers: str, **dimensions: int | None) -> dict[str, int | None]:
    """Returns these dimensions of parameters in each of several inner layers."""
    return {f"{layer}/{name}": d for layer in layers.split() for name, d in dimensions.items()}


COLUMN = Style("column", {"kernel": -1, "bias": -1})
ROW = Style("row", {"kernel": -2, "bias": None})
HEADS = Style(
    "heads",
    {
        **_in_each("query key value", kernel=-2, bias=-2),
        **_in_each("out", kernel=-3, bias=None),
        "cached_key": -2,
        "cached_value": -2,
    },
)
GATES = Style("gates", _in_each("hi hf hg ho ii if_ ig io", kernel=-1, bias=-1))
FUSED_GATES = Style("gates", _in_each("dense_h dense_i", kernel=-1, bias=-1))

# The names of layers whose outputs are sharded, and of those whose inputs are.
_COLUMN_NAMES = """up gate in fc1 wi wi_0 wi_1 w1 w3 linear1 dense1 c_fc fc_in up_proj gate_proj
gate_up gate_up_proj in_proj query key value q k v qkv q_proj k_proj v_proj qkv_proj wq wk wv wqkv
c_attn to_q to_k to_v head lm_head unembed classifier logits"""
_ROW_NAMES = """down out fc2 wo w2 linear2 dense2 c_proj fc_out down_proj out_proj o o_proj to_out
output_proj attn_out"""
_COLUMNS, _ROWS = frozenset(_COLUMN_NAMES.split()), frozenset(_ROW_NAMES.split())
_SQUARE_ROWS = frozenset({"proj", "output"})  # of attention; others may be heads of a model
# Layers whose outputs are heads: these are sharded, or nothing. Half a head has to be exchanged.
_TO_HEADS = re.compile("query|key|value|(to_|w)?(q|k|v|qk|kv|qkv)(_proj|_einsum)?")
_FROM_HEADS = re.compile("(w|to_)?o(ut)?(_proj|_einsum)?|attn_out|output_proj")


def _order_styles(
    name: str, inputs: _Size, outputs: _Size, columns: Sequence[Style], rows: Sequence[Style]
) -> list[Style]:
    """Returns all styles: columns first or rows first, by the layer's name, else by its sizes.

    Args:
      name: the name of the layer.
      inputs: the number of its input features, or anything that can be compared with ``outputs``.
      outputs: the number of its output features.
      columns: the styles that shard outputs, best first.
      rows: the styles that shard inputs.
    """
    # Fewer outputs than inputs lead back, as from the hidden features of an MLP.
    is_row = outputs < inputs or (outputs == inputs and name in _SQUARE_ROWS)
    rows_first = name in _ROWS or (is_row and name not in _COLUMNS)
    return [*rows, *columns] if rows_first else [*columns, *rows]


def _linear(layer: Any, name: str) -> list[Style]:
    return _order_styles(name, layer.in_features, layer.out_features, [COLUMN], [ROW])


def _lora(layer: Any, name: str) -> list[Style]:
    """Shards the factor that has the sharded features of the adapted layer."""
    column = Style("column", {"lora_b": -1, "lora_a": None})
    row = Style("row", {"lora_a": -2, "lora_b": None})
    return _order_styles(name, layer.in_features, layer.out_features, [column], [row])


def _linear_general(layer: Any, name: str) -> list[Style]:
    """Offers a style for each output and each input dimension, the first ones before the others.

    Of (heads, features), heads are first: to shard features of all heads splits each head.
    """
    # The kernel is (*inputs, *outputs), the bias (*outputs): the same dimensions from the end.
    inputs, outputs = layer.in_features, layer.out_features
    rank = len(inputs) + len(outputs)
    columns = [Style("column", {"kernel": d, "bias": d}) for d in range(-len(outputs), 0)]
    # To heads, as in ``q_proj``: these are sharded, or nothing. Attention would gather parts.
    if len(outputs) > 1 and _TO_HEADS.fullmatch(name):
        return columns[:1]
    rows = [Style("row", {"kernel": d, "bias": None}) for d in range(-rank, -len(outputs))]
    return _order_styles(name, math.prod(inputs), math.prod(outputs), columns, rows)


def _einsum(layer: Any, name: str) -> list[Style]:
    return _einsum_styles(layer.einsum_str or "", "kernel", layer.kernel_shape, name)


def _einsum_styles(subscripts: str, parameter: str, shape: Sequence[int], name: str) -> list[Style]:
    """Lists the ways to shard an einsum of inputs and a kernel, best first.

    In ``btd,dnh->btnh``, the letters n and h of the kernel are outputs, since the result has them:
    to shard one is a column style. The letter d is summed over: to shard it is a row style. With
    the kernel dimensions d = -3, n = -2, h = -1 and a bias (n, h), these are

        column {kernel: -2, bias: -2}    column {kernel: -1, bias: -1}    row {kernel: -3}

    Args:
      subscripts: those of the einsum, with the kernel as the second operand.
      parameter: the name of the kernel.
      shape: its shape.
      name: the name of the layer, such as ``q_proj``.
    """
    operands, _, result = subscripts.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    rank = len(shape)
    if len(kernel) != rank or "." in kernel:  # which dimension is for what is not known
        # So all are tried, the last one first, without saying whether it is of outputs or inputs.
        return [Style("", {parameter: d, "bias": None}) for d in range(-1, -rank - 1, -1)]
    dimensions = {letter: d - rank for d, letter in enumerate(kernel)}  # counted from the end
    summed = [letter for letter in kernel if letter not in result]
    kept = [letter for letter in result if letter in dimensions]  # the dimensions of the bias
    # Where the letters of the inputs begin in the result: at 1 in ``btd,kdnh->kbtnh``.
    first_input = min((i for i, letter in enumerate(result) if letter in inputs), default=0)

    def preference(letter: str) -> tuple[bool, bool]:
        """Sorts outputs, best first: false comes before true."""
        # A letter that the inputs have too is a batch, not a feature.
        is_batch = letter in inputs
        # In front of the inputs is what counts kernels, such as the 3 (k) of a fused q, k and v:
        # sharded, a device would have all of q and nothing of v.
        is_in_front = result.index(letter) < first_input
        return is_batch, is_in_front

    columns = [
        Style("column", {parameter: dimensions[letter], "bias": kept.index(letter) - len(kept)})
        for letter in sorted(kept, key=preference)
    ]
    # To heads, as in ``q_proj``: these are sharded, or nothing. Attention would gather parts.
    if len(columns) > 1 and _TO_HEADS.fullmatch(name):
        return columns[:1]
    rows = [Style("row", {parameter: dimensions[letter], "bias": None}) for letter in summed]
    features = [letter for letter in kept if letter not in inputs]

    def size(letters: Sequence[str]) -> int:
        return math.prod(shape[dimensions[letter]] for letter in letters)

    # The number of letters counts before their sizes, which may be equal: ``btnh,nhd->btd``, from
    # heads to features, has two of inputs and one of outputs, so it is a row layer.
    of_inputs, of_outputs = (len(summed), size(summed)), (len(features), size(features))
    return _order_styles(name, of_inputs, of_outputs, columns, rows)


def _conv_transpose(layer: Any, name: str) -> list[Style]:
    # Transposed kernels have the output features before the input features.
    if not layer.transpose_kernel:
        return [COLUMN, ROW]
    column, row = {"kernel": -2, "bias": -1}, {"kernel": -1, "bias": None}
    return [Style("column", column), Style("row", row)]


# Subclasses follow the same rule unless they have their own. A layer has priority over the layers
# in it: the rules of attention and cells apply to their linear layers.
RULES: dict[type, Rule] = {
    nnx.Linear: _linear,
    nnx.LinearGeneral: _linear_general,
    nnx.Einsum: _einsum,
    nnx.LoRA: _lora,
    nnx.Conv: (COLUMN, ROW),
    nnx.ConvTranspose: _conv_transpose,
    nnx.Embed: (Style("vocabulary", {"embedding": -2}), Style("features", {"embedding": -1})),
    nnx.MultiHeadAttention: (HEADS,),
    nnx.LSTMCell: (GATES,),
    nnx.OptimizedLSTMCell: (FUSED_GATES,),
    nnx.GRUCell: (FUSED_GATES,),
    nnx.SimpleCell: (FUSED_GATES,),
}


def rules_of_layer(
    layer: object, known: Mapping[int | Path, NamedVariable]
) -> tuple[Sequence[Rule], Sequence[str] | None]:
    """Finds the sharding rules for a module: by its class, or by the names in a user's class.

    Args:
      layer: the module. Anything else that a model holds, such as a list, has no rules.
      known: the parameters of the model: Variables by their identity, bare arrays by path. Only
        Variables are looked up here.

    Returns:
      The rules, and the attributes of the module whose parameters they are for. These are None for
      a layer of Flax, whose rule is for all parameters in it, also in its own layers; and empty
      without rules.
    """
    for kind in type(layer).__mro__:  # the closest base class decides
        if kind in RULES and has_sizes(layer, kind):
            return [RULES[kind]], None
    if not isinstance(layer, nnx.Module):
        return [], ()
    attributes = vars(layer)
    shapes = {
        name: known[_compat.identity(value)].layer_shape
        for name, value in attributes.items()
        if isinstance(value, nnx.Param) and _compat.identity(value) in known
    }
    return [*_rules_of_user_class(type(layer).__name__, attributes, shapes)], [*shapes]


def _rules_of_user_class(
    class_name: str, attributes: Mapping[str, object], shapes: Mapping[str, Shape]
) -> Iterator[Rule]:
    """Yields the rules for a module of a user's class: the five of the docstring at the top.

    Args:
      class_name: the name of the class.
      attributes: those of the module.
      shapes: the shapes of its own parameters, for one layer, by attribute.
    """
    # 1. The subscripts of an einsum, such as "btd,dnh->btnh", and one kernel for it.
    subscripts = [x for x in attributes.values() if isinstance(x, str) and _SUBSCRIPTS.fullmatch(x)]
    if len(subscripts) == 1 and (rule := _rule_of_einsum(subscripts[0], attributes, shapes)):
        yield rule
        return
    # 2. Matrices (a, b) and (b, a). All of them shard b, so either both of these rules apply or
    # none: columns in their last dimension, -1, and rows in the one before it, -2.
    columns, rows = _pairs(shapes)
    paired = [*columns, *rows]
    if paired:
        yield [Style("column", dict.fromkeys(columns, -1))]
        yield [Style("row", dict.fromkeys(rows, -2))]
    # With other subscripts, an einsum uses the rest in a way that is not known: it stays whole.
    if subscripts:
        return
    matrices = {
        name: shape
        for name, shape in shapes.items()
        if sum(size > 1 for size in shape) > 1  # others are vectors, made to broadcast
        and name not in paired
        and not name.endswith("bias")  # of heads, (heads, features): it follows its kernel
        and not isinstance(attributes[name], nnx.LoRAParam)  # it follows the adapted layer
    }
    # Then the name of the class, or of the module, tells what the matrix is for.
    is_alone = len(matrices) == 1 and not paired and not _POSITIONS.search(class_name)
    has_modules = any(isinstance(x, nnx.Module) for x in attributes.values())
    for name, shape in matrices.items():
        # 3. A table of words: (words, features), or (features, words) as of an output layer. The
        # words are more. Both ways are styles, the words first.
        if len(shape) == 2 and _is_table(name, class_name if is_alone else ""):
            words, features = (-2, -1) if shape[0] >= shape[1] else (-1, -2)
            yield [Style("vocabulary", {name: words}), Style("features", {name: features})]
            continue
        # 4. The only kernel of a module without others in it: a linear layer. Its name is that of
        # the module, which is not known yet, so this is a function of the module and its name.
        if is_alone and not has_modules and not _POSITIONS.search(name):
            biases = {other: size for other, size in shapes.items() if other != name and size}
            yield functools.partial(_kernel_styles, name, shape, biases)
            continue
        # 5. The name of a layer, without what says that it is a parameter: ``w_up`` → ``up``.
        role = _AFFIXES.sub("", name.lower())
        # Next to the kernels of experts, a gate is their router, which stays whole.
        is_router = role == "gate" and any(len(other) > len(shape) for other in shapes.values())
        if role in _COLUMNS | _ROWS and not is_router:
            yield _kernel_styles(name, shape, biases={}, _=None, name=role)


def _rule_of_einsum(
    subscripts: str, attributes: Mapping[str, object], shapes: Mapping[str, Shape]
) -> Rule | None:
    """Returns the rule of an einsum for a user's class; None without exactly one kernel for it.

    Args:
      subscripts: those of the einsum, such as ``btd,dnh->btnh``.
      attributes: the attributes of the module.
      shapes: the shapes of its parameters.
    """
    match = _SUBSCRIPTS.fullmatch(subscripts)
    assert match is not None  # the caller has chosen them by this pattern
    rank = len(match["kernel"])  # a letter for each dimension of the kernel, the second operand
    # The factors of LoRA are added to the kernel, and follow another rule.
    kernels = [
        name
        for name, shape in shapes.items()
        if len(shape) >= rank and not isinstance(attributes[name], nnx.LoRAParam)
    ]
    if len(kernels) != 1:
        return None
    [kernel] = kernels
    # Further dimensions are in front: stacked layers that are not known to be these.
    kernel_shape = shapes[kernel][len(shapes[kernel]) - rank :]

    def styles(_: object, layer_name: str) -> list[Style]:
        """Returns the styles as a rule does; the module, its first argument, is not needed."""
        return _einsum_styles(subscripts, kernel, kernel_shape, layer_name)

    return styles


def _pairs(shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """Returns the columns and the rows among matrices with the shapes (a, b) and (b, a).

    As in an MLP, they lead into hidden features and back. Both shard these, the larger size: of up
    (8, 32) and down (32, 8), up is a column and down is a row. Dimensions of experts in front are
    equal. Without such shapes there are none.

    Args:
      shapes: the shapes of parameters, by name, which may say which of the two a matrix is.
    """
    columns, rows = list[str](), list[str]()
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        *experts, num_inputs, num_outputs = shape
        # A square matrix has no larger side, by which its role could be known.
        if num_inputs == num_outputs or (*experts, num_outputs, num_inputs) not in shapes.values():
            continue
        # A row leads from the hidden features, of which there are more, back to others: it has more
        # inputs than outputs.
        is_row = name in _ROWS or (num_inputs > num_outputs and name not in _COLUMNS)
        (rows if is_row else columns).append(name)
    return columns, rows


def _is_table(parameter: str, class_name: str) -> bool:
    """Whether a matrix is an embedding of words: a table of which rows are looked up.

    Args:
      parameter: the name of the matrix, such as ``embedding`` or ``wte``.
      class_name: the name of the class of its module, such as ``TokenEmbedder``, if this is its
        only matrix, so that it says what that is for; else empty.
    """
    if _POSITIONS.search(parameter):  # `pos_embed`: it is added, and not looked up
        return False
    if _TABLE.search(parameter):
        return True
    # The kernel of an embedding of patches is a linear layer.
    is_linear = parameter == "kernel" or "patch" in class_name.lower()
    return bool(_TABLE.search(class_name)) and not is_linear


def _kernel_styles(
    parameter: str, shape: Shape, biases: Mapping[str, Shape], _: Any, name: str
) -> Sequence[Style]:
    """Lists the ways to shard a kernel of a user's class as that of a linear layer, best first.

    Args:
      parameter: the name of the kernel.
      shape: (…, in, out); (in, heads, features) and (heads, features, out) if the name says so; or
        (out, in) if a bias has the size of its first dimension only.
      biases: the shapes of other parameters, of which one may be added to the outputs.
      _: the module; a rule gets it, and this one does not need it.
      name: the name of the layer.
    """
    if len(shape) == 3 and _TO_HEADS.fullmatch(name):  # (in, heads, features), as in ``q_proj``
        # With a bias (heads, features), whose heads are -2, too.
        head_biases = [bias for bias, size in biases.items() if size == shape[1:]]
        return [Style("heads", {parameter: -2, **dict.fromkeys(head_biases, -2)})]
    if len(shape) == 3 and _FROM_HEADS.fullmatch(name):  # (heads, features, out), as in ``o_proj``
        return [Style("row", {parameter: -3}), Style("row", {parameter: -2})]
    vectors = {bias: size[0] for bias, size in biases.items() if len(size) == 1}
    # The size of a bias is the number of outputs, which tells (out, in) from (in, out).
    is_transposed = shape[-2] in vectors.values() and shape[-1] not in vectors.values()
    inputs, outputs = (-1, -2) if is_transposed else (-2, -1)
    added = [bias for bias, size in vectors.items() if size == shape[outputs] and "bias" in bias]
    # The only dimension of a bias, -1, is sharded with the outputs. With the inputs, it is whole.
    column = Style("column", {parameter: outputs, **dict.fromkeys(added, -1)})
    row = Style("row", {parameter: inputs, **dict.fromkeys(added, None)})
    return _order_styles(name, shape[inputs], shape[outputs], [column], [row])


# The subscripts of an einsum, ``btd,dnh->btnh``, with those of its second operand, ``dnh``.
_SUBSCRIPTS = re.compile(r"[\w. ]+, *(?P<kernel>\w+) *->[\w. ]+")
# Names of an embedding of words: ``embedding``, ``wte``.
_TABLE = re.compile("embed|wte|vocab", re.IGNORECASE)
# Names of what is added to activations, or is one of them: ``pos_embed``, ``cls_token``.
_POSITIONS = re.compile("pos(ition(al)?)?s?(_|$|emb|enc)|tokens?$", re.IGNORECASE)
# What names of parameters have besides the role, as in `w_up` and `query_kernel`.
_AFFIXES = re.compile("^(w|kernel|weight)_|_(w|kernel|weight)$")
