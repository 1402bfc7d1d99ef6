"""Tensor parallelism: how each kind of layer is cut over the model axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..paths import Path
from ..state_sharding import StateSharding
from .cutting import base_specs, cut, mesh_and_axes, overridden
from .paths import Found, variables
from .strategies import with_optimizer

# Which dimension of each parameter of a layer is cut, counted from the end because layers may be
# stacked; None for none. The first parameter decides whether the style can be used.
Style: TypeAlias = Mapping[str, "int | None"]

# The styles for a layer, best first; or what gives them for a layer and its name.
Rule: TypeAlias = "Sequence[Style] | Callable[[Any, str], Sequence[Style]]"


def _each(layers: str, **dimensions: int | None) -> dict[str, int | None]:
    return {f"{own}/{name}": d for own in layers.split() for name, d in dimensions.items()}


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

# The names of layers that are cut over their outputs, and of those that are cut over their inputs.
_COLUMN_NAMES = """up gate in fc1 wi wi_0 wi_1 w1 w3 linear1 dense1 c_fc fc_in up_proj gate_proj
in_proj query key value q k v qkv q_proj k_proj v_proj qkv_proj c_attn to_q to_k to_v"""
_ROW_NAMES = "down out fc2 wo w2 linear2 dense2 c_proj fc_out down_proj out_proj o o_proj to_out"
COLUMN_NAMES, ROW_NAMES = frozenset(_COLUMN_NAMES.split()), frozenset(_ROW_NAMES.split())


def _in_order(
    name: str, inputs: int, outputs: int, columns: Sequence[Style], rows: Sequence[Style]
) -> list[Style]:
    """Columns first or rows first: by the name of the layer, else by whether it shrinks."""
    rows_first = name in ROW_NAMES or (outputs < inputs and name not in COLUMN_NAMES)
    return [*rows, *columns] if rows_first else [*columns, *rows]


def _linear(layer: Any, name: str) -> list[Style]:
    return _in_order(name, layer.in_features, layer.out_features, [COLUMN], [ROW])


def _lora(layer: Any, name: str) -> list[Style]:
    """As the layer that it adapts: the factor beside the rank that this one cuts."""
    columns: list[Style] = [{"lora_b": -1, "lora_a": None}]
    rows: list[Style] = [{"lora_a": -2, "lora_b": None}]
    return _in_order(name, layer.in_features, layer.out_features, columns, rows)


def _linear_general(layer: Any, name: str) -> list[Style]:
    """Over the first of its output or input dimensions that can be cut: heads before features."""
    inputs, outputs = layer.in_features, layer.out_features
    both = len(inputs) + len(outputs)
    columns: list[Style] = [{"kernel": d, "bias": d} for d in range(-len(outputs), 0)]
    rows: list[Style] = [{"kernel": d, "bias": None} for d in range(-both, -len(outputs))]
    return _in_order(name, math.prod(inputs), math.prod(outputs), columns, rows)


def _einsum(layer: Any, name: str) -> list[Style]:
    """By its letters: those that the kernel adds to the result, or those that are summed over."""
    shape, rank = layer.kernel_shape, len(layer.kernel_shape)
    operands, _, result = (layer.einsum_str or "").partition("->")
    inputs, _, letters = operands.partition(",")
    if len(letters) != rank or "." in letters:
        return [{"kernel": d, "bias": None} for d in range(-1, -rank - 1, -1)]
    at = {letter: d - rank for d, letter in enumerate(letters)}
    summed = [letter for letter in letters if letter not in result]
    kept = [letter for letter in result if letter in at]
    new_first = sorted(kept, key=lambda letter: letter in inputs)
    columns: list[Style] = [
        {"kernel": at[letter], "bias": kept.index(letter) - len(kept)} for letter in new_first
    ]
    rows: list[Style] = [{"kernel": at[letter], "bias": None} for letter in summed]
    before, after = (math.prod(shape[at[letter]] for letter in own) for own in (summed, kept))
    return _in_order(name, before, after, columns, rows)


def _conv_transpose(layer: Any, name: str) -> list[Style]:
    if not layer.transpose_kernel:
        return [COLUMN, ROW]
    return [{"kernel": -2, "bias": -1}, {"kernel": -1, "bias": None}]


# What holds for a subclass of these, too, unless it has an entry of its own. A layer goes before
# the layers in it: attention and cells decide about the linear layers that they are made of.
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

# What may lie between a layer and the attribute that says what it is for.
_WRAPPERS = frozenset({"base_module", "layer_instance", "lora"})


def tensor_parallel(
    model: Any,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    axis: Any = "model",
    base: StateSharding | None = None,
    optimizer: Any = None,
    overrides: Any = None,
) -> StateSharding:
    """Cuts the parameters of the usual layers over the model axis.

    What is cut, best first; where the axis does not divide it, the next; else nothing:

    * ``Linear``, ``LinearGeneral``, ``Einsum``: the output features with the bias (``up``,
      ``gate``, ``fc1``, ``wi``, ``query`` …), or the input features with a whole bias (``down``,
      ``out``, ``fc2``, ``wo`` …), so that a pair of layers needs one sum over the axis. Under
      another name a layer that shrinks is cut over its inputs, any other over its outputs.
    * ``MultiHeadAttention``: the heads of query, key, value, caches and ``out``. Heads that do
      not divide stay whole.
    * ``Embed``: the vocabulary, then the features.
    * ``Conv``, ``ConvTranspose``: the output features, then the input features.
    * ``LSTMCell``, ``OptimizedLSTMCell``, ``GRUCell``, ``SimpleCell``: the hidden features of all
      gates.
    * ``LoRA``, ``LoRALinear``: as the layer that is adapted, of its two factors the one that has
      the features that are cut.

    Norms, random streams and parameters of other modules are whole. These rules are the table
    ``RULES`` of this module; subclasses of a layer follow it.

    The layout is for axes of type Auto, where the compiler adds the communication. It changes
    where numbers are computed, not which.

    Args:
      model: the model, abstract (``nnx.eval_shape``) or not.
      mesh: the mesh; None for the one in context.
      axis: the mesh axis, or a tuple of axes that cut one dimension together; where they do not
        divide any, as many of the first of them as do.
      base: what is cut already. Its specs are kept, and the axis comes behind those that cut
        the same dimension.
      optimizer: the optimizer of the model, abstract or not, which the result is then for as
        well; see :func:`~nnx_sharding.partition.optimizer_sharding`.
      overrides: filters and specs, as for :class:`~nnx_sharding.StateSharding`, that go first. One
        that matches nothing is an ``UnusedFilterWarning``.

    Returns:
      The spec of each path. All of them divide the shapes.

    Raises:
      NoMeshError: there is no mesh.
      TypeError: ``mesh`` or ``base`` is something else.
      ValueError: the mesh has no such axis, or ``base`` or ``overrides`` do not fit it or the
        shapes.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.partition import tensor_parallel
      >>> class MLP(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.up = nnx.Linear(64, 256, rngs=rngs)
      ...         self.down = nnx.Linear(256, 64, rngs=rngs)
      >>> model = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
      >>> sharding = tensor_parallel(model, AbstractMesh((4,), ("model",)))
      >>> sharding.map_prefix(("up", "kernel"), model.up.kernel) == P(None, "model")
      True
      >>> sharding.map_prefix(("down", "kernel"), model.down.kernel) == P("model", None)
      True

    Pairs of layers and heads are cut as in Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053).
    """
    mesh, axes = mesh_and_axes("tensor_parallel", mesh, axis)
    whole = base_specs("tensor_parallel", model, base, mesh)
    paths = {id(found.variable): found.path for found in variables(model)}
    specs = dict(whole)
    for layer, name, rule in _layers(model):
        own = {found.name: found for found in variables(layer) if id(found.variable) in paths}
        before = {key: whole[paths[id(found.variable)]] for key, found in own.items()}
        styles = rule(layer, name) if callable(rule) else rule
        for key, spec in _styled(styles, own, before, axes, mesh).items():
            specs[paths[id(own[key].variable)]] = spec
    specs = overridden("tensor_parallel", "model", model, specs, overrides, mesh)
    return with_optimizer(specs, model, optimizer)


def _layers(model: Any) -> Iterator[tuple[Any, str, Rule]]:
    """The layers for which there is a rule, the inner ones first, each with its name."""
    found = []
    for path, node in nnx.iter_graph(model, graph=True):
        rule = next((RULES[kind] for kind in type(node).__mro__ if kind in RULES), None)
        if rule is not None:
            found.append((path, node, rule))
    for path, node, rule in sorted(found, key=lambda item: -len(item[0])):
        yield node, _name(path), rule


def _name(path: Path) -> str:
    """The attribute that says what a layer is for."""
    names = (key for key in reversed(path) if isinstance(key, str) and key not in _WRAPPERS)
    return next(names, "")


def _styled(
    styles: Sequence[Style],
    own: Mapping[str, Found],
    before: Mapping[str, Any],
    axes: Sequence[Any],
    mesh: Any,
) -> dict[str, Any]:
    """The specs of the parameters of a layer in the first style that can be used.

    Without one the parameters that the styles name are left as before.
    """
    usable = [style for style in styles if next(iter(style)) in own]
    for count in range(len(axes), 0, -1):
        for style in usable:
            cuts = {
                key: None if d is None else _cut(own[key], before[key], d, axes[:count], mesh)
                for key, d in style.items()
                if key in own
            }
            if cuts[next(iter(style))] is not None:
                return {key: before[key] if new is None else new for key, new in cuts.items()}
    return {key: before[key] for style in usable for key in style if key in own}


def _cut(
    found: Found, spec: Any, dimension: int, axes: Sequence[Any], mesh: Any
) -> PartitionSpec | None:
    shape = found.shape
    if shape is None or not isinstance(spec, PartitionSpec):
        return None
    return cut(spec, shape, dimension, axes, mesh)
