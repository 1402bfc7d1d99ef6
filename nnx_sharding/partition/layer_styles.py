"""Finds the dimensions of a layer that tensor parallelism shards.

A *style* is one way to shard a layer: its outputs (a *column* of the kernel on each device) or its
inputs (a *row*). A *rule* gives the styles of a kind of layer, best first:

    COLUMN   kernel (in, out/n)   bias (out/n)   outputs are sharded
    ROW      kernel (in/n, out)   bias (out)     inputs are sharded, outputs summed over n devices

A column layer and then a row layer, such as the two of an MLP, need one sum for both.

`RULES` has the rules of Flax's layers. In a module of a user's class, each parameter that has two
dimensions or more without the dimensions of stacked layers gets the first of these rules that fits:

1. The class has the subscripts of one einsum, and one kernel for them. The rule is the one of
   ``nnx.Einsum``.
2. Two matrices (a, b) and (b, a) lead into hidden features and back: a column and a row.
3. A matrix is called an embedding, or it is the only matrix of a class that is called so. The rule
   is the one of ``nnx.Embed``. Tables of positions stay whole, because they are added to
   activations.
4. A kernel is the only one of its module, and the module holds no other module. The kernel is a
   linear layer, and its name is the name of the module. A bias tells which features are outputs.
   An array that is called a bias or a scale is no kernel; it is sharded as the outputs of the
   kernel, if it has their shape.
5. The parameter has the name of a layer, for example ``wq``, ``o_proj`` or ``w_down``. It is a
   linear layer.

Whatever the rule chooses, numbers are right, but a wrong guess costs communication. So a parameter
stays whole if neither its name nor its shape says what it is for.

Names override sizes: a layer called ``down`` or ``o_proj`` is a row layer (`_ROWS`), and a layer
called ``up`` or ``q_proj`` is a column layer (`_COLUMNS`). In a style, dimensions count from the
end: -1 of a kernel (in, out) is the outputs. A bias with -1 is sharded like the outputs. A bias
with None is whole, because it is added once to the sum that a row layer returns. `_order_styles`
puts columns or rows first, by the name of a layer, or else by its sizes.

Parameters are listed as ``NamedVariable``, whose ``layer_shape`` is the shape for one layer, or ()
if it is not known.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from flax import nnx

from .. import _compat
from ..specs.layer_names import AFFIXES, IN, NAMES, OUT
from ..specs.paths import Path
from .layers import has_sizes
from .variables import NamedVariable, Shape


class Style(NamedTuple):
    """One way to shard a layer."""

    # The part of the layer that a device has, for reports: ``column``, ``row``, … Empty if unknown.
    role: str
    # The sharded dimension of each parameter, by its path in the layer. Dimensions are counted from
    # the end; None: the parameter is whole.
    dimensions: Mapping[str, int | None]
    # What the dimensions of a kernel were taken for, if its name and their number alone tell it:
    # ``(in, heads, features)``. Stacked layers that were not found would be wrongly taken so.
    taken_as: str = ""

    @property
    def deciding(self) -> str:
        """The path of the parameter that decides whether the style can be used: the first one."""
        return next(iter(self.dimensions))

    @property
    def row_layer(self) -> Path | None:
        """The path, in this layer, of the layer whose outputs are sums over the axis.

        The path is ``()`` for this layer itself, and None if no layer in it returns such sums.
        """
        if self.role == "row":
            return ()
        # `HEADS`, the style of `MultiHeadAttention`, has a row layer inside: ``out``.
        return ("out",) if "out/kernel" in self.dimensions else None


# The size of the inputs or of the outputs: the number of features, or a pair of the number of
# dimensions and the number of features.
_Size = TypeVar("_Size", int, tuple[int, int])

# The styles for a layer, best first, or a function of a layer and its name that returns the styles.
Rule: TypeAlias = "Sequence[Style] | Callable[[Any, str], Sequence[Style]]"


def _in_each(layers: str, **dimensions: int | None) -> dict[str, int | None]:
    """Returns the same dimensions for each of several inner layers, by path (``query/kernel``)."""
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

# The names of column layers, whose outputs are sharded, and of row layers, whose inputs are.
_ROWS = OUT | NAMES["o"] | NAMES["down"]
_COLUMNS = IN.union(*NAMES.values()) - _ROWS
# Layers with these names are row layers even if they have as many outputs as inputs, because they
# are then output projections of attention. With more outputs, they may be heads of a model.
_SQUARE_ROWS = frozenset({"proj", "output"})
# The outputs of these layers are heads. Only whole heads are sharded, because devices would have to
# exchange halves of a head.
_TO_HEADS = re.compile("query|key|value|(to_|w)?(q|k|v|qk|kv|qkv)(_proj|_einsum)?")
_FROM_HEADS = re.compile("(w|to_)?o(ut)?(_proj|_einsum)?|attn_out|output_proj")


def names_layer(name: str) -> bool:
    """Whether a name says what a layer is for, as ``down_proj`` and ``kv_einsum`` do."""
    is_heads = _TO_HEADS.fullmatch(name) or _FROM_HEADS.fullmatch(name)
    return name in _COLUMNS | _ROWS | _SQUARE_ROWS or bool(is_heads)


def _order_styles(
    name: str, inputs: _Size, outputs: _Size, columns: Sequence[Style], rows: Sequence[Style]
) -> list[Style]:
    """Returns all styles, columns first or rows first.

    The name of the layer decides, or the sizes if the name tells nothing.
    """
    # A layer with fewer outputs than inputs leads back, for example from the hidden features of an
    # MLP, so it is a row layer.
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
    """Returns a style for each output dimension and each input dimension, in their order.

    Outputs (heads, features) are sharded by heads first, because a shard of the features would
    split each head.
    """
    # The kernel is (*inputs, *outputs) and the bias (*outputs), so an output dimension counted from
    # the end has the same number in both.
    inputs, outputs = layer.in_features, layer.out_features
    rank = len(inputs) + len(outputs)
    columns = [Style("column", {"kernel": d, "bias": d}) for d in range(-len(outputs), 0)]
    # A layer to heads, such as ``q_proj``, is sharded by heads or not at all, because attention
    # would gather parts of heads.
    if len(outputs) > 1 and _TO_HEADS.fullmatch(name):
        return columns[:1]
    rows = [Style("row", {"kernel": d, "bias": None}) for d in range(-rank, -len(outputs))]
    return _order_styles(name, math.prod(inputs), math.prod(outputs), columns, rows)


def _einsum(layer: Any, name: str) -> list[Style]:
    return _einsum_styles(layer.einsum_str or "", "kernel", layer.kernel_shape, name)


def _einsum_styles(subscripts: str, parameter: str, shape: Sequence[int], name: str) -> list[Style]:
    """Lists the ways to shard an einsum of inputs and a kernel, best first.

    In ``btd,dnh->btnh``, the letters n and h of the kernel are outputs, because the result has
    them, so each of them gives a column style. The letter d is summed over, so it gives a row
    style. With the kernel dimensions d = -3, n = -2, h = -1 and a bias (n, h), the styles are

        column {kernel: -2, bias: -2}    column {kernel: -1, bias: -1}    row {kernel: -3}

    Args:
      subscripts: the subscripts of the einsum, with the kernel as the second operand.
      shape: the shape of the kernel.
      name: the name of the layer, such as ``q_proj``.
    """
    operands, _, result = subscripts.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    rank = len(shape)
    # The letters do not tell what each dimension is for, so a style for each dimension is offered,
    # the last dimension first. The role is empty, because the dimension may be outputs or inputs.
    if len(kernel) != rank or "." in kernel:
        return [Style("", {parameter: d, "bias": None}) for d in range(-1, -rank - 1, -1)]
    dimensions = {letter: d - rank for d, letter in enumerate(kernel)}  # counted from the end
    summed = [letter for letter in kernel if letter not in result]
    kept = [letter for letter in result if letter in dimensions]  # the dimensions of the bias
    # The position in the result where the letters of the inputs begin: 1 in ``btd,kdnh->kbtnh``.
    first_input = min((i for i, letter in enumerate(result) if letter in inputs), default=0)

    def preference(letter: str) -> tuple[bool, bool]:
        """Returns the sorting key of an output. False comes before true, so the best is first."""
        # A letter that the inputs have as well is a batch, not a feature.
        is_batch = letter in inputs
        # A letter in front of the inputs counts kernels, such as the 3 (k) of a fused q, k and v.
        # If it were sharded, a device would have all of q and nothing of v.
        is_in_front = result.index(letter) < first_input
        return is_batch, is_in_front

    columns = [
        Style("column", {parameter: dimensions[letter], "bias": kept.index(letter) - len(kept)})
        for letter in sorted(kept, key=preference)
    ]
    # A layer to heads, such as ``q_proj``, is sharded by heads or not at all, because attention
    # would gather parts of heads.
    if len(columns) > 1 and _TO_HEADS.fullmatch(name):
        return columns[:1]
    rows = [Style("row", {parameter: dimensions[letter], "bias": None}) for letter in summed]
    features = [letter for letter in kept if letter not in inputs]

    def size(letters: Sequence[str]) -> int:
        return math.prod(shape[dimensions[letter]] for letter in letters)

    # The number of letters counts before their sizes, because the sizes may be equal. For example,
    # ``btnh,nhd->btd`` leads from heads to features. It has two letters of inputs and one of
    # outputs, so it is a row layer.
    input_size, output_size = (len(summed), size(summed)), (len(features), size(features))
    return _order_styles(name, input_size, output_size, columns, rows)


def _conv_transpose(layer: Any, name: str) -> list[Style]:
    # Transposed kernels have the output features before the input features.
    if not layer.transpose_kernel:
        return [COLUMN, ROW]
    column, row = {"kernel": -2, "bias": -1}, {"kernel": -1, "bias": None}
    return [Style("column", column), Style("row", row)]


# Subclasses follow the rule of their base class unless they have a rule of their own. A layer has
# priority over the layers in it, so the rules of attention and cells apply to the linear layers in
# them.
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
      A pair of the rules and the attributes of the module whose parameters they are for. The
      attributes are None for a layer of Flax, because its rule is for all parameters in it,
      including the parameters of its own layers. Both are empty if ``layer`` is not a module.
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
    """Yields the rules for a module of a user's class: the five rules of the module docstring.

    Args:
      shapes: the shapes of its own parameters, for one layer, by attribute.
    """
    # 1. The subscripts of an einsum, such as "btd,dnh->btnh", and one kernel for it.
    subscripts = [x for x in attributes.values() if isinstance(x, str) and _SUBSCRIPTS.fullmatch(x)]
    if len(subscripts) == 1:
        rule = _rule_of_einsum(subscripts[0], attributes, shapes)  # None without one kernel for it
        if rule is not None:
            yield rule
            return
    # 2. Matrices (a, b) and (b, a). All of them shard the size b, columns in dimension -1 and rows
    # in dimension -2, so either both rules can be used or none.
    columns, rows = _pairs(
        {x: shape for x, shape in shapes.items() if not isinstance(attributes[x], nnx.LoRAParam)}
    )
    paired = [*columns, *rows]
    if paired:
        yield [Style("column", dict.fromkeys(columns, -1))]
        yield [Style("row", dict.fromkeys(rows, -2))]
    # Subscripts that rule 1 has not accepted use the other matrices in a way that is not known, so
    # these matrices stay whole.
    if subscripts:
        return
    # The parameters that rules 3 to 5 may be for. Left out are vectors that were reshaped for
    # broadcasting, the biases and scales (heads, features) of kernels to heads, which follow the
    # kernel, and the factors of LoRA, which follow the adapted layer.
    matrices = {
        name: shape
        for name, shape in shapes.items()
        if sum(size > 1 for size in shape) > 1
        and name not in paired
        and not _BESIDE_KERNELS.search(name)
        and not isinstance(attributes[name], nnx.LoRAParam)
    }
    # The name of the class, or of the module, tells what a matrix is for if it is the only one.
    is_alone = len(matrices) == 1 and not paired and not _POSITIONS.search(class_name)
    has_modules = any(isinstance(x, nnx.Module) for x in attributes.values())
    for name in matrices:
        rule = _rule_of_matrix(
            name,
            shapes,
            class_name=class_name if is_alone else "",
            is_only_kernel=is_alone and not has_modules,
        )
        if rule is not None:
            yield rule


def _rule_of_matrix(
    name: str, shapes: Mapping[str, Shape], class_name: str, *, is_only_kernel: bool
) -> Rule | None:
    """Returns the rule of a matrix by its name or its place: rules 3 to 5 of the module docstring.

    None if neither tells what the matrix is for.

    Args:
      shapes: the shapes of all parameters of the module, by name.
      class_name: the name of the class of the module; empty if the module has several matrices.
      is_only_kernel: whether the module has no other matrix and holds no module.
    """
    shape = shapes[name]
    # 3. A table of words: (words, features), or (features, words) in an output layer. There are
    # more words than features. Both dimensions are styles, the words first.
    if len(shape) == 2 and _is_table(name, class_name):
        words, features = (-2, -1) if shape[0] >= shape[1] else (-1, -2)
        return [Style("vocabulary", {name: words}), Style("features", {name: features})]
    # 4. A linear layer. The layer's name is the name of the module. That is not known here, so the
    # rule is a function of the module and its name.
    if is_only_kernel and not _POSITIONS.search(name):
        others = {other: x for other, x in shapes.items() if other != name and x != ()}
        return functools.partial(_kernel_styles, name, shape, others)
    # 5. The parameter has the name of a layer, once an affix that says "parameter" is removed:
    # ``w_up`` → ``up``.
    layer_name = AFFIXES.sub("", name.lower())
    # A gate next to kernels of experts, which have a dimension more, is the router of the experts.
    # A router stays whole.
    has_experts = any(len(other) > len(shape) for other in shapes.values())
    is_router = layer_name == "gate" and has_experts
    if layer_name in _COLUMNS | _ROWS and not is_router:
        return _kernel_styles(name, shape, others={}, _=None, name=layer_name)
    return None


def _rule_of_einsum(
    subscripts: str, attributes: Mapping[str, object], shapes: Mapping[str, Shape]
) -> Rule | None:
    """Returns the rule of an einsum for a user's class; None without exactly one kernel for it.

    Args:
      subscripts: the subscripts of the einsum, such as ``btd,dnh->btnh``.
      shapes: the shapes of its parameters.
    """
    match = _SUBSCRIPTS.fullmatch(subscripts)
    assert match is not None  # the caller has chosen them by this pattern
    rank = len(match["kernel"])  # a letter for each dimension of the kernel, the second operand
    # Factors of LoRA are left out, because they are added to the kernel and follow another rule.
    kernels = [
        name
        for name, shape in shapes.items()
        if len(shape) >= rank and not isinstance(attributes[name], nnx.LoRAParam)
    ]
    if len(kernels) != 1:
        return None
    [kernel] = kernels
    # Further dimensions are in front of these: stacked layers that were not recognized as such.
    kernel_shape = shapes[kernel][len(shapes[kernel]) - rank :]

    def styles(_: object, layer_name: str) -> list[Style]:
        """Has the signature of a rule; its first argument, the module, is not needed."""
        return _einsum_styles(subscripts, kernel, kernel_shape, layer_name)

    return styles


def _pairs(shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """Returns the names of columns and of rows among matrices with the shapes (a, b) and (b, a).

    Such matrices lead into hidden features and back, for example in an MLP. Both of them shard the
    hidden features, which are the larger size: ``up`` (8, 32) is a column and ``down`` (32, 8) is a
    row. Both may have the same dimensions of experts in front. Both lists are empty if there are no
    such shapes.

    Args:
      shapes: the shapes of parameters, by name. The name decides before the shape whether a matrix
        is a column or a row.
    """
    columns, rows = list[str](), list[str]()
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        *experts, num_inputs, num_outputs = shape
        # A square matrix is left out, because it has no larger side that would tell its role.
        if num_inputs == num_outputs or (*experts, num_outputs, num_inputs) not in shapes.values():
            continue
        # A row leads back from the hidden features, so it has more inputs than outputs.
        if name in _ROWS or (num_inputs > num_outputs and name not in _COLUMNS):
            rows.append(name)
        else:
            columns.append(name)
    return columns, rows


def _is_table(parameter: str, class_name: str) -> bool:
    """Whether a matrix is an embedding of words: a table whose rows are looked up.

    Args:
      parameter: the name of the matrix, such as ``embedding`` or ``wte``.
      class_name: the name of the class of its module, such as ``TokenEmbedder``. It is empty if the
        module has several matrices, because the name does not say which of them is the table.
    """
    # A table of positions, such as `pos_embed`, is added to activations, not looked up.
    if _POSITIONS.search(parameter):
        return False
    if _TABLE.search(parameter):
        return True
    # In a class that is called an embedding, a parameter called `kernel`, and any parameter of an
    # embedding of patches, is the kernel of a linear layer.
    is_linear = parameter == "kernel" or "patch" in class_name.lower()
    return bool(_TABLE.search(class_name)) and not is_linear


def _kernel_styles(
    parameter: str, shape: Shape, others: Mapping[str, Shape], _: Any, name: str
) -> Sequence[Style]:
    """Lists the ways to shard a kernel of a user's class as a linear layer, best first.

    Args:
      shape: (…, in, out); (in, heads, features) and (heads, features, out) if the name says so; or
        (out, in) if a bias has the size of the first dimension only.
      others: the shapes of other parameters, by name. One of them may be added to the outputs.
      _: the module, which each rule gets; it is not needed here.
    """
    if len(shape) == 3 and _TO_HEADS.fullmatch(name):  # ``q_proj``: (in, heads, features)
        # A bias or scale (…, heads, features) has the heads in dimension -2, as the kernel has.
        beside = [other for other, other_shape in others.items() if other_shape[-2:] == shape[1:]]
        sharded = {parameter: -2, **dict.fromkeys(beside, -2)}
        return [Style("heads", sharded, taken_as="(in, heads, features)")]
    if len(shape) == 3 and _FROM_HEADS.fullmatch(name):  # ``o_proj``: (heads, features, out)
        beside = [other for other, other_shape in others.items() if other_shape[-1:] == shape[-1:]]
        taken_as, whole = "(heads, features, out)", dict.fromkeys(beside, None)
        return [Style("row", {parameter: d, **whole}, taken_as) for d in (-3, -2)]
    vectors = {other: _vector(x) for other, x in others.items()}
    # A bias has the number of outputs as its size, which tells (out, in) from (in, out).
    sizes = {vector.size for vector in vectors.values() if vector}
    is_transposed = shape[-2] in sizes and shape[-1] not in sizes
    input_dim, output_dim = (-1, -2) if is_transposed else (-2, -1)
    inputs, outputs = shape[input_dim], shape[output_dim]
    # The sharded dimension of each vector of the outputs. If there are as many inputs, only a bias
    # is known to be one of the outputs.
    of_outputs = {
        other: vector.dimension
        for other, vector in vectors.items()
        if vector and vector.size == outputs and (inputs != outputs or "bias" in other)
    }
    # If outputs are sharded, so are their biases and scales. If inputs are, these are whole.
    column = Style("column", {parameter: output_dim, **of_outputs})
    row = Style("row", {parameter: input_dim, **dict.fromkeys(of_outputs, None)})
    return _order_styles(name, inputs, outputs, [column], [row])


class _Vector(NamedTuple):
    """The only dimension of an array with more than one element."""

    size: int
    dimension: int  # counted from the end


def _vector(shape: Shape) -> _Vector | None:
    """Returns the dimension along which an array is a vector; None for scalars and matrices.

    A shape (1, 16) is a vector as well: a scale that was computed with ``keepdims=True``.
    """
    if len(shape) == 1:
        return _Vector(shape[0], -1)
    dimensions = [d for d in range(-len(shape), 0) if shape[d] > 1]
    return _Vector(shape[dimensions[0]], dimensions[0]) if len(dimensions) == 1 else None


# Names of arrays beside a kernel that are no kernels: biases, and the scales of int8 kernels.
_BESIDE_KERNELS = re.compile("(bias|scale)s?$", re.IGNORECASE)
# The subscripts of an einsum, ``btd,dnh->btnh``; the group is its second operand, ``dnh``.
_SUBSCRIPTS = re.compile(r"[\w. ]+, *(?P<kernel>\w+) *->[\w. ]+")
# Names of an embedding of words: ``embedding``, ``wte``.
_TABLE = re.compile("embed|wte|vocab", re.IGNORECASE)
# Names of tables that are added to activations, ``pos_embed``, or are activations, ``cls_token``.
_POSITIONS = re.compile("pos(ition(al)?)?s?(_|$|emb|enc)|tokens?$", re.IGNORECASE)
