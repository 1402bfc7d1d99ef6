"""Tensor parallelism: how each kind of layer is sharded over the model axis."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..specs.filters import Paths
from ..specs.fitting import axes_of
from ..specs.paths import Path
from ..specs.state_sharding import StateSharding
from .optimizer import with_optimizer
from .strategies import (
    activations_of,
    ambiguous_layers,
    base_specs,
    mesh_and_axes,
    shard_dimension,
)
from .variables import NamedVariable, Shape, variables

# The sharded dimension of each parameter of one layer, counted from the end; None for none. The
# first parameter decides whether the style can be used.
Style: TypeAlias = Mapping[str, "int | None"]

# The styles for a layer, best first, or a function of a layer and its name that returns them.
Rule: TypeAlias = "Sequence[Style] | Callable[[Any, str], Sequence[Style]]"


def _each(layers: str, **dimensions: int | None) -> dict[str, int | None]:
    return {f"{layer}/{name}": d for layer in layers.split() for name, d in dimensions.items()}


COLUMN: Style = {"kernel": -1, "bias": -1}
ROW: Style = {"kernel": -2, "bias": None}
HEADS: Style = {
    **_each("query key value", kernel=-2, bias=-2),
    **_each("out", kernel=-3, bias=None),
    "cached_key": -2,
    "cached_value": -2,
}
GATES: Style = _each("hi hf hg ho ii if_ ig io", kernel=-1, bias=-1)
FUSED_GATES: Style = _each("dense_h dense_i", kernel=-1, bias=-1)

# The names of layers whose outputs are sharded, and of those whose inputs are.
_COLUMN_NAMES = """up gate in fc1 wi wi_0 wi_1 w1 w3 linear1 dense1 c_fc fc_in up_proj gate_proj
in_proj query key value q k v qkv q_proj k_proj v_proj qkv_proj c_attn to_q to_k to_v"""
_ROW_NAMES = """down out fc2 wo w2 linear2 dense2 c_proj fc_out down_proj out_proj o o_proj to_out
output_proj attn_out"""
# Those whose outputs are heads: these are sharded, or nothing. Half a head has to be exchanged.
_HEAD_NAMES = re.compile("query|key|value|(to_)?(q|k|v|qk|kv|qkv)(_proj|_einsum)?")
_SQUARE_ROW_NAMES = frozenset({"proj", "output"})  # of attention; others may be heads of a model
_COLUMNS, _ROWS = frozenset(_COLUMN_NAMES.split()), frozenset(_ROW_NAMES.split())


def _ordered(
    name: str, inputs: Any, outputs: Any, columns: Sequence[Style], rows: Sequence[Style]
) -> list[Style]:
    """Columns first or rows first: by the name of the layer, else by the number of its features."""
    is_row = outputs < inputs or (outputs == inputs and name in _SQUARE_ROW_NAMES)
    rows_first = name in _ROWS or (is_row and name not in _COLUMNS)
    return [*rows, *columns] if rows_first else [*columns, *rows]


def _linear(layer: Any, name: str) -> list[Style]:
    return _ordered(name, layer.in_features, layer.out_features, [COLUMN], [ROW])


def _lora(layer: Any, name: str) -> list[Style]:
    """Like the adapted layer: the factor with its sharded features is sharded."""
    columns: list[Style] = [{"lora_b": -1, "lora_a": None}]
    rows: list[Style] = [{"lora_a": -2, "lora_b": None}]
    return _ordered(name, layer.in_features, layer.out_features, columns, rows)


def _linear_general(layer: Any, name: str) -> list[Style]:
    """The first output or input dimension that can be sharded: heads before features."""
    inputs, outputs = layer.in_features, layer.out_features
    both = len(inputs) + len(outputs)
    columns: list[Style] = [{"kernel": d, "bias": d} for d in range(-len(outputs), 0)]
    if len(outputs) > 1 and _HEAD_NAMES.fullmatch(name):
        return columns[:1]
    rows: list[Style] = [{"kernel": d, "bias": None} for d in range(-both, -len(outputs))]
    return _ordered(name, math.prod(inputs), math.prod(outputs), columns, rows)


def _einsum(layer: Any, name: str) -> list[Style]:
    return _product(layer.einsum_str or "", "kernel", layer.kernel_shape, name)


def _product(subscripts: str, parameter: str, shape: Sequence[int], name: str) -> list[Style]:
    """Columns are the letters of the second operand in the result, rows those summed over."""
    operands, _, result = subscripts.replace(" ", "").partition("->")
    inputs, _, letters = operands.partition(",")
    rank = len(shape)
    if len(letters) != rank or "." in letters:
        return [{parameter: d, "bias": None} for d in range(-1, -rank - 1, -1)]
    at = {letter: d - rank for d, letter in enumerate(letters)}
    summed = [letter for letter in letters if letter not in result]
    kept = [letter for letter in result if letter in at]
    batch = min((i for i, letter in enumerate(result) if letter in inputs), default=0)
    columns: list[Style] = [
        {parameter: at[letter], "bias": kept.index(letter) - len(kept)}
        for letter in sorted(kept, key=lambda x: (x in inputs, result.index(x) < batch))
    ]
    if len(columns) > 1 and _HEAD_NAMES.fullmatch(name):
        return columns[:1]
    rows: list[Style] = [{parameter: at[letter], "bias": None} for letter in summed]
    added = [letter for letter in kept if letter not in inputs]
    inside, outside = ((len(x), math.prod(shape[at[y]] for y in x)) for x in (summed, added))
    return _ordered(name, inside, outside, columns, rows)  # heads to features are rows


def _own_rule(layer: Any, known: Mapping[Any, NamedVariable]) -> Rule | None:
    """The rule for a user's class: an einsum with one parameter, or matrices into and out of."""
    attributes = vars(layer) if isinstance(layer, nnx.Module) else {}
    shapes = {
        key: known[id(x)].layer_shape
        for key, x in attributes.items()
        if isinstance(x, nnx.Param) and id(x) in known
    }
    return _own_einsum(attributes, shapes) or _own_pairs(shapes)


def _own_einsum(attributes: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Rule | None:
    """The rule for a user's class that has the subscripts of an einsum and one parameter."""
    matches = (_SUBSCRIPTS.fullmatch(x) for x in attributes.values() if isinstance(x, str))
    texts = [(match[0], match["kernel"]) for match in matches if match]
    kernels = [
        (key, shape)
        for key, shape in shapes.items()
        if texts and not isinstance(attributes[key], nnx.LoRAParam)
        if len(shape) >= len(texts[0][1])
    ]
    if len(texts) != 1 or len(kernels) != 1:
        return None
    [(text, letters)], [(key, shape)] = texts, kernels
    # A stack of layers that is not known to be one has them in front.
    return lambda _, name: _product(text, key, shape[len(shape) - len(letters) :], name)


def _own_pairs(shapes: Mapping[str, Shape]) -> Rule:
    """The rule for a user's class with matrices into hidden features, and back."""
    style = {}
    for name, (*stack, rows, columns) in ((k, x) for k, x in shapes.items() if len(x) > 1):
        if rows != columns and (*stack, columns, rows) in shapes.values():
            is_row = name in _ROWS or (rows > columns and name not in _COLUMNS)
            style[name] = -2 if is_row else -1
    return [style] if style else []


def _conv_transpose(layer: Any, name: str) -> list[Style]:
    if not layer.transpose_kernel:
        return [COLUMN, ROW]
    return [{"kernel": -2, "bias": -1}, {"kernel": -1, "bias": None}]


# Subclasses follow the same rule unless they have their own. A layer has priority over the layers
# in it: the rules of attention and cells apply to their linear layers.
RULES: dict[type, Rule] = {
    nnx.Linear: _linear,
    nnx.LinearGeneral: _linear_general,
    nnx.Einsum: _einsum,
    nnx.LoRA: _lora,
    nnx.Conv: (COLUMN, ROW),
    nnx.ConvTranspose: _conv_transpose,
    nnx.Embed: ({"embedding": -2}, {"embedding": -1}),
    nnx.MultiHeadAttention: (HEADS,),
    nnx.LSTMCell: (GATES,),
    nnx.OptimizedLSTMCell: (FUSED_GATES,),
    nnx.GRUCell: (FUSED_GATES,),
    nnx.SimpleCell: (FUSED_GATES,),
}

# The subscripts of an einsum, with those of its second operand.
_SUBSCRIPTS = re.compile(r"[\w. ]+, *(?P<kernel>\w+) *->[\w. ]+")

# Keys between a layer and the attribute that says what it is for.
_WRAPPERS = frozenset({"base_module", "layer_instance", "lora"})


@_compat.api_boundary
def tensor_parallel(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    optimizer: Any = None,
    base: StateSharding | None = None,
    axis: Any = "model",
    sequence: bool = False,
    across_slices: bool = False,
) -> StateSharding:
    """Shards the parameters of the usual layers over the model axis.

    The first of these dimensions that the axis divides is sharded, if any:

    * ``Linear``, ``LinearGeneral``, ``Einsum``: the output features with the bias (``up``,
      ``gate``, ``fc1``, ``wi``, ``query`` …), or the input features with a replicated bias
      (``down``, ``out``, ``fc2``, ``wo`` …), so that a pair of layers needs one sum over the axis.
      In a layer with another name, the inputs are sharded if they outnumber the outputs, or if both
      are as many and it is called ``proj`` or ``output``; else the outputs. Modules of other
      classes with one parameter, and the subscripts of an einsum as an attribute, count as
      ``Einsum``; ``LoRA`` and ``LoRALinear`` as the adapted layer.
    * Parameters of modules of other classes that are matrices of a and b features, and of b and a
      (also those of experts, with dimensions in front): the larger of them, by names as above.
    * ``MultiHeadAttention``: the heads of query, key, value, caches and ``out``. Other layers of
      these names (``q_proj``, ``kv_einsum`` …) with several dimensions of outputs: the heads, the
      first of them, or nothing if the axis does not divide it, as for few heads of keys and values.
    * ``Embed``: the vocabulary, then the features. ``Conv``, ``ConvTranspose``: the output
      features, then the input features. Recurrent cells: the hidden features of all gates.

    All else is replicated; subclasses of a layer follow its rule. Where the inputs of a layer are
    sharded, its output is a sum over the axis, which the compiler adds on Auto axes and the layer
    on Explicit ones. On Explicit axes, what the model returns is not sharded over the axis.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      optimizer: as for :func:`fsdp`.
      base: shardings to start from. Its specs are kept, and the axis comes after those that shard
        the same dimension.
      axis: as for :func:`fsdp`.
      sequence: whether three-dimensional outputs of layers whose inputs are sharded are sharded
        over the axis along their second dimension: Megatron's sequence parallelism. It takes less
        memory. Each sum may become a reduce-scatter and an all-gather, of as many bytes; the
        compiler chooses, and may gather kernels instead. ``collectives()`` shows what is sent.
      across_slices: whether the axis may have devices of several TPU slices, over whose network
        activations are then sent.

    Returns:
      The spec of each path. All of them divide the shapes. Why others are replicated is noted by
      :func:`~nnx_sharding.report.check_sharding`.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh
      >>> from nnx_sharding.partition import tensor_parallel
      >>> model = nnx.eval_shape(lambda: nnx.Dict(up=nnx.Linear(64, 256, rngs=nnx.Rngs(0))))
      >>> sharding = tensor_parallel(model, mesh=AbstractMesh((4,), ("model",)))
      >>> sharding.map_prefix(("up", "kernel"), model.up.kernel)
      P(None, 'model')

    Pairs of layers and heads are sharded as in Megatron-LM (Shoeybi et al., 2019,
    arXiv:1909.08053), sequences as by Korthikanti et al. (2022, arXiv:2205.05198).
    """
    mesh, axes = mesh_and_axes("tensor_parallel", mesh, axis, across_slices=across_slices)
    before = base_specs("tensor_parallel", model, base, mesh)
    known = {_identity(each): each for each in variables(model)}
    specs, rows, covered = dict(before), list[Path](), set[Path]()
    for path, layer, name, rule in _layers(model, known):
        parameters = {
            each.name: known[_identity(each, path)]
            for each in variables(layer)
            if _identity(each, path) in known
        }
        styles = rule(layer, name) if callable(rule) else rule
        styled, style = _styled(styles, parameters, before, axes, mesh)
        specs.update(styled)
        covered.update(each.path for each in parameters.values())
        summed = (name for name, d in style.items() if name.endswith("bias") and d is None)
        rows += [(*path, *name.split("/")[:-1]) for name in summed]
    activations = activations_of(base)
    if sequence:
        if isinstance(optimizer, nnx.ModelAndOptimizer):
            rows += [("model", *row) for row in rows]
        entry, rest = axes if len(axes) > 1 else axes[0], PartitionSpec.UNCONSTRAINED
        activations = activations.extended({Paths(rows): PartitionSpec(rest, entry, rest)})
    notes = _notes(known.values(), specs, covered, axes)
    return with_optimizer(specs, model, optimizer, activations, notes)


def _notes(
    parameters: Iterable[NamedVariable],
    specs: Mapping[Path, Any],
    covered: Set[Path],
    axes: Sequence[Any],
) -> dict[Path, str]:
    """Why parameters stay replicated, by path."""
    notes = {}
    for each in parameters:
        spec = specs[each.path]
        if isinstance(spec, PartitionSpec) and not any(map(axes_of, spec.partitions)):
            names = ", ".join(map(repr, axes))
            if each.layers.is_ambiguous:
                notes[each.path] = ambiguous_layers(each)
            elif each.is_norm:
                notes[each.path] = "of a normalization layer"
            elif each.path in covered:
                notes[each.path] = f"added to sums over {names}, or not divided by it in its layer"
            else:
                notes[each.path] = f"of no layer that tensor_parallel knows. {_REMEDY}"
    return notes


_REMEDY = "Give it a spec by override(...)."


def _identity(each: NamedVariable, start: Path = ()) -> Any:
    """What identifies a parameter of a layer: its Variable, or the path to a bare array."""
    is_variable = isinstance(each.variable, nnx.Variable)
    return id(each.variable) if is_variable else (*start, *each.path)


def _layers(
    model: Any, known: Mapping[Any, NamedVariable]
) -> Iterator[tuple[Path, Any, str, Rule]]:
    """The layers that have a rule, inner ones first, each with the attribute that holds it."""
    layers = []
    for path, node in nnx.iter_graph(model, graph=True):
        found = (RULES[kind] for kind in type(node).__mro__ if kind in RULES)
        rule = next(found, None) or _own_rule(node, known)
        if rule:
            layers.append((path, node, rule))
    for path, node, rule in sorted(layers, key=lambda layer: -len(layer[0])):
        names = (key for key in reversed(path) if isinstance(key, str) and key not in _WRAPPERS)
        yield path, node, next(names, ""), rule


def _styled(
    styles: Sequence[Style],
    parameters: Mapping[str, NamedVariable],
    before: Mapping[Path, Any],
    axes: Sequence[Any],
    mesh: Any,
) -> tuple[dict[Path, Any], Style]:
    """The specs of a layer's parameters in the first usable style, else their previous ones."""
    usable = [style for style in styles if next(iter(style)) in parameters]
    for count, style in itertools.product(range(len(axes), 0, -1), usable):
        specs = {
            name: None
            if (dimension := each.dimension(index)) is None
            else shard_dimension(before[each.path], each.shape, dimension, axes[:count], mesh)
            for name, each in parameters.items()
            if (index := style.get(name)) is not None
        }
        if specs[next(iter(style))] is not None:
            named = [(name, each.path) for name, each in parameters.items() if name in style]
            return {path: specs.get(name) or before[path] for name, path in named}, style
    names = {name for style in usable for name in style} & parameters.keys()
    return {parameters[name].path: before[parameters[name].path] for name in names}, {}
