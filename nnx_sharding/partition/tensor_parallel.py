"""Tensor parallelism: how each kind of layer is sharded over the model axis.

A *style* is one way to shard a layer: its outputs (a *column* of the kernel on each device) or its
inputs (a *row*). A *rule* gives the styles of a kind of layer, best first; the first one whose
dimension the axes divide is used:

    COLUMN   kernel (in, out/n)   bias (out/n)   outputs are sharded
    ROW      kernel (in/n, out)   bias (out)     inputs are sharded, outputs summed over n devices

A column layer and then a row layer, such as the two of an MLP, need one sum for both.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypeVar

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..specs.filters import Paths
from ..specs.fitting import axes_of
from ..specs.paths import Path
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyMesh, AxisName
from .optimizer import with_optimizer
from .strategies import (
    activations_of,
    ambiguous_layers,
    base_specs,
    mesh_and_axes,
    shard_dimension,
)
from .variables import NamedVariable, Shape, SpecsByPath, variables

# The sharded dimension of each parameter of one layer, by the path in the layer; counted from the
# end, None for none. The first parameter decides whether the style can be used.
Style: TypeAlias = Mapping[str, "int | None"]

# What tells inputs and outputs apart: their number, or those of their dimensions and features.
_Size = TypeVar("_Size", int, tuple[int, int])

# The styles for a layer, best first, or a function of a layer and its name that returns them.
Rule: TypeAlias = "Sequence[Style] | Callable[[Any, str], Sequence[Style]]"


def _style_of(layers: str, **dimensions: int | None) -> dict[str, int | None]:
    """Returns a style with these dimensions of parameters in each of several inner layers."""
    return {f"{layer}/{name}": d for layer in layers.split() for name, d in dimensions.items()}


COLUMN: Style = {"kernel": -1, "bias": -1}
ROW: Style = {"kernel": -2, "bias": None}
HEADS: Style = {
    **_style_of("query key value", kernel=-2, bias=-2),
    **_style_of("out", kernel=-3, bias=None),
    "cached_key": -2,
    "cached_value": -2,
}
GATES: Style = _style_of("hi hf hg ho ii if_ ig io", kernel=-1, bias=-1)
FUSED_GATES: Style = _style_of("dense_h dense_i", kernel=-1, bias=-1)

# The names of layers whose outputs are sharded, and of those whose inputs are.
_COLUMN_NAMES = """up gate in fc1 wi wi_0 wi_1 w1 w3 linear1 dense1 c_fc fc_in up_proj gate_proj
in_proj query key value q k v qkv q_proj k_proj v_proj qkv_proj c_attn to_q to_k to_v"""
_ROW_NAMES = """down out fc2 wo w2 linear2 dense2 c_proj fc_out down_proj out_proj o o_proj to_out
output_proj attn_out"""
# Those whose outputs are heads: these are sharded, or nothing. Half a head has to be exchanged.
_HEAD_NAMES = re.compile("query|key|value|(to_)?(q|k|v|qk|kv|qkv)(_proj|_einsum)?")
_SQUARE_ROW_NAMES = frozenset({"proj", "output"})  # of attention; others may be heads of a model
_COLUMNS, _ROWS = frozenset(_COLUMN_NAMES.split()), frozenset(_ROW_NAMES.split())


def _order_styles(
    name: str, inputs: _Size, outputs: _Size, columns: Sequence[Style], rows: Sequence[Style]
) -> list[Style]:
    """Returns columns first or rows first: by the layer's name, else by its numbers of features."""
    is_row = outputs < inputs or (outputs == inputs and name in _SQUARE_ROW_NAMES)
    rows_first = name in _ROWS or (is_row and name not in _COLUMNS)
    return [*rows, *columns] if rows_first else [*columns, *rows]


def _linear(layer: Any, name: str) -> list[Style]:
    return _order_styles(name, layer.in_features, layer.out_features, [COLUMN], [ROW])


def _lora(layer: Any, name: str) -> list[Style]:
    """Shards the factor that has the sharded features of the adapted layer."""
    columns: list[Style] = [{"lora_b": -1, "lora_a": None}]
    rows: list[Style] = [{"lora_a": -2, "lora_b": None}]
    return _order_styles(name, layer.in_features, layer.out_features, columns, rows)


def _linear_general(layer: Any, name: str) -> list[Style]:
    """Offers each output or input dimension: heads, which come first, before features."""
    inputs, outputs = layer.in_features, layer.out_features  # kernel: (*inputs, *outputs)
    rank = len(inputs) + len(outputs)
    columns: list[Style] = [{"kernel": d, "bias": d} for d in range(-len(outputs), 0)]
    if len(outputs) > 1 and _HEAD_NAMES.fullmatch(name):
        return columns[:1]
    rows: list[Style] = [{"kernel": d, "bias": None} for d in range(-rank, -len(outputs))]
    return _order_styles(name, math.prod(inputs), math.prod(outputs), columns, rows)


def _einsum(layer: Any, name: str) -> list[Style]:
    return _einsum_styles(layer.einsum_str or "", "kernel", layer.kernel_shape, name)


def _einsum_styles(subscripts: str, parameter: str, shape: Sequence[int], name: str) -> list[Style]:
    """Returns the styles of an einsum of inputs and a kernel, as in ``btd,dnh->btnh``.

    Columns are the letters of the kernel in the result (n, h), rows those summed over (d).

    Args:
      subscripts: those of the einsum.
      parameter: the name of the kernel.
      shape: its shape.
      name: the name of the layer.
    """
    operands, _, result = subscripts.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    rank = len(shape)
    if len(kernel) != rank or "." in kernel:  # nothing is known of the dimensions
        return [{parameter: d, "bias": None} for d in range(-1, -rank - 1, -1)]
    dimensions = {letter: d - rank for d, letter in enumerate(kernel)}
    summed = [letter for letter in kernel if letter not in result]
    kept = [letter for letter in result if letter in dimensions]  # in the bias, too
    # Letters that only the kernel has come first: others are batches of the inputs. Of those, what
    # the result has in front of the inputs, such as the 3 of a fused q, k and v, comes last.
    first_input = min((i for i, letter in enumerate(result) if letter in inputs), default=0)
    columns: list[Style] = [
        {parameter: dimensions[letter], "bias": kept.index(letter) - len(kept)}
        for letter in sorted(kept, key=lambda x: (x in inputs, result.index(x) < first_input))
    ]
    if len(columns) > 1 and _HEAD_NAMES.fullmatch(name):
        return columns[:1]
    rows: list[Style] = [{parameter: dimensions[letter], "bias": None} for letter in summed]
    added = [letter for letter in kept if letter not in inputs]

    def size(letters: Sequence[str]) -> int:
        return math.prod(shape[dimensions[letter]] for letter in letters)

    # More letters count before more features: heads to features are rows.
    inner, outer = (len(summed), size(summed)), (len(added), size(added))
    return _order_styles(name, inner, outer, columns, rows)


def _rule_of_user_class(layer: object, known: Mapping[int | Path, NamedVariable]) -> Rule | None:
    """Finds a rule for a user's class: an einsum of one parameter, or matrices into and out of."""
    attributes = vars(layer) if isinstance(layer, nnx.Module) else {}
    shapes = {
        key: known[id(x)].layer_shape
        for key, x in attributes.items()
        if isinstance(x, nnx.Param) and id(x) in known
    }
    return _rule_of_einsum(attributes, shapes) or _rule_of_pairs(shapes)


def _rule_of_einsum(attributes: Mapping[str, object], shapes: Mapping[str, Shape]) -> Rule | None:
    """Finds a rule for a class that has the subscripts of one einsum and one kernel for it."""
    matches = [_SUBSCRIPTS.fullmatch(x) for x in attributes.values() if isinstance(x, str)]
    einsums = [(match[0], len(match["kernel"])) for match in matches if match]
    # With several einsums nobody knows which one the kernel is for.
    if len(einsums) != 1:
        return None
    [(subscripts, rank)] = einsums
    kernels = [
        (name, shape)
        for name, shape in shapes.items()
        if len(shape) >= rank and not isinstance(attributes[name], nnx.LoRAParam)
    ]
    if len(kernels) != 1:
        return None
    [(parameter, shape)] = kernels
    # A stack of layers that is not known to be one has them in front.
    inner_shape = shape[len(shape) - rank :]
    return lambda _, name: _einsum_styles(subscripts, parameter, inner_shape, name)


def _rule_of_pairs(shapes: Mapping[str, Shape]) -> Rule:
    """Finds a rule for a class with matrices into hidden features and back: (a, b) and (b, a)."""
    style = {}
    for name, (*stack, rows, columns) in ((k, x) for k, x in shapes.items() if len(x) > 1):
        # A square matrix has no larger side, by which its role could be known.
        if rows != columns and (*stack, columns, rows) in shapes.values():
            is_row = name in _ROWS or (rows > columns and name not in _COLUMNS)
            style[name] = -2 if is_row else -1
    return [style] if style else []


def _conv_transpose(layer: Any, name: str) -> list[Style]:
    # Transposed kernels have the output features before the input features.
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
    axis: AxisName | tuple[AxisName, ...] = "model",
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
    known = {_identity(variable): variable for variable in variables(model)}
    specs = dict(before)
    row_layers = list[Path]()  # whose outputs are sums over the axes
    covered = set[Path]()  # the parameters of all layers that have a rule
    # From the inside, so that the rule of attention replaces those of its linear layers.
    for path, layer, name, rule in _layers(model, known):
        parameters = {
            variable.name: known[_identity(variable, path)]
            for variable in variables(layer)
            if _identity(variable, path) in known
        }
        styles = rule(layer, name) if callable(rule) else rule
        styled, style = _apply_first_style(styles, parameters, before, axes, mesh)
        specs.update(styled)
        covered.update(variable.path for variable in parameters.values())
        # A bias is added once to a sum, so in such layers it is not sharded.
        biases = (name for name, d in style.items() if name.endswith("bias") and d is None)
        row_layers += [(*path, *name.split("/")[:-1]) for name in biases]
    activations = activations_of(base)
    if sequence:
        if isinstance(optimizer, nnx.ModelAndOptimizer):
            row_layers += [("model", *path) for path in row_layers]
        entry, rest = axes if len(axes) > 1 else axes[0], PartitionSpec.UNCONSTRAINED
        # The outputs: (batch, positions, features).
        activations = activations.extended({Paths(row_layers): PartitionSpec(rest, entry, rest)})
    notes = _notes(known.values(), specs, covered, axes)
    return with_optimizer(specs, model, optimizer, activations, notes)


def _notes(
    parameters: Iterable[NamedVariable],
    specs: SpecsByPath,
    covered: Set[Path],
    axes: Sequence[AxisName],
) -> dict[Path, str]:
    """Says why parameters stay replicated, by path, for ``check_sharding``.

    Args:
      parameters: all parameters of the model.
      specs: their specs.
      covered: the paths of those in layers that have a rule.
      axes: the axes of the strategy.
    """
    notes = {}
    for x in parameters:
        spec = specs[x.path]
        if isinstance(spec, PartitionSpec) and not any(map(axes_of, spec.partitions)):
            names = ", ".join(map(repr, axes))
            # The most specific reason first.
            if x.layers.is_ambiguous:
                notes[x.path] = ambiguous_layers(x)
            elif x.is_norm:
                notes[x.path] = "of a normalization layer"
            elif x.path in covered:
                notes[x.path] = f"added to sums over {names}, or not divided by it in its layer"
            else:
                remedy = "Give it a spec by override(...)."
                notes[x.path] = f"of no layer that tensor_parallel knows. {remedy}"
    return notes


def _identity(variable: NamedVariable, start: Path = ()) -> int | Path:
    """Returns what identifies a parameter in the model and in a layer at the path ``start``.

    A layer shares its Variables with the model; a bare array is known by its path only.
    """
    is_variable = isinstance(variable.variable, nnx.Variable)
    return id(variable.variable) if is_variable else (*start, *variable.path)


def _layers(
    model: object, known: Mapping[int | Path, NamedVariable]
) -> Iterator[tuple[Path, Any, str, Rule]]:
    """Yields the path, the layer, its name and its rule for all layers that have one.

    Inner layers come first. The name is that of the attribute that holds the layer.
    """
    layers = []
    for path, node in nnx.iter_graph(model, graph=True):
        # The closest base class decides.
        rules = (RULES[kind] for kind in type(node).__mro__ if kind in RULES)
        rule = next(rules, None) or _rule_of_user_class(node, known)
        if rule:
            layers.append((path, node, rule))
    for path, node, rule in sorted(layers, key=lambda layer: -len(layer[0])):
        names = (key for key in reversed(path) if isinstance(key, str) and key not in _WRAPPERS)
        yield path, node, next(names, ""), rule


def _apply_first_style(
    styles: Sequence[Style],
    parameters: Mapping[str, NamedVariable],
    before: SpecsByPath,
    axes: Sequence[AxisName],
    mesh: AnyMesh,
) -> tuple[SpecsByPath, Style]:
    """Shards the parameters of a layer in the first style that fits its first parameter.

    Args:
      styles: the styles, best first.
      parameters: the parameters of the layer, by the path in it.
      before: the specs of the model that are added to.
      axes: the mesh axes; if no style takes all, the last ones are left out one by one.
      mesh: the mesh.

    Returns:
      The specs by the path in the model, and the style. If none fits, the specs of ``before``,
      which replace those that a rule for a layer inside of this one has chosen, and an empty style.
    """

    def shard(x: NamedVariable, index: int | None, axes: Sequence[AxisName]) -> Any:
        dimension = None if index is None else x.dimension(index)
        if dimension is None:
            return None
        return shard_dimension(before[x.path], x.shape, dimension, axes, mesh)

    usable = [style for style in styles if next(iter(style)) in parameters]
    for count, style in itertools.product(range(len(axes), 0, -1), usable):
        styled = {name: x for name, x in parameters.items() if name in style}
        specs = {name: shard(x, style[name], axes[:count]) for name, x in styled.items()}
        if specs[next(iter(style))] is not None:
            return {x.path: specs[name] or before[x.path] for name, x in styled.items()}, style
    names = {name for style in usable for name in style} & parameters.keys()
    return {parameters[name].path: before[parameters[name].path] for name in names}, {}
