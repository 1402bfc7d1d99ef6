"""Tensor parallelism: shards each layer over the model axis, by the rules of `layer_styles`.

A *style* is one way to shard a layer: it has the dimension to shard for each parameter, by name. A
*column* layer has its outputs sharded, and a *row* layer has its inputs sharded, so the outputs of
a row layer are sums over the axis. A *rule* gives the styles of a layer, best first, and the first
style that the sizes allow is used. A layer that a model holds several times is one layer with one
set of Variables::

    style    row: {"kernel": -2, "bias": None}     the last but one dimension of the kernel
    deciding "kernel"                              the first parameter: it has to be sharded

A parameter is a ``NamedVariable``: ``path``, ``variable``, ``shape`` (None if its arrays differ),
and ``layers`` (which dimensions are stacked layers). Dimensions of a style count in one layer;
``NamedVariable.dimension`` returns the dimension of the array, and None if stacked layers are
ambiguous. ``known`` has the parameters by a key: the id of a Variable, or the path of a bare array
(`_key_of`). ``before`` has the specs that the strategy adds to, by path.

A ``Listing`` is the flattened model with its parameters, ``variables``. `Listing.modules` yields
the path and the index of each module, and `Listing.below` the Variables and bare arrays in a
module, with their paths in it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..errors import UnshardedWarning, message, warn_or_raise
from ..specs.filters import Paths
from ..specs.fitting import axes_of
from ..specs.paths import WRAPPERS, Path, path_string
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyMesh, AxisName
from .heads import notes_of_split_heads
from .layer_styles import Rule, Style, names_layer, rules_of_layer
from .optimizer import with_optimizer
from .strategies import (
    SEVERAL_SHAPES,
    activations_of,
    ambiguous_layers,
    base_specs,
    mesh_and_axes,
    remarks_on,
    shard_dimension,
)
from .variables import Listing, NamedVariable, SpecsByPath, listing_of

# A warning names a replicated parameter if it has this share of all elements, and at least this
# number of elements. The number keeps small models, which users try first, from being warned,
# because sharding saves nothing there.
_LARGE_SHARE, _LARGE_SIZE = 0.05, 2**16


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
      ``gate``, ``fc1``, ``wi``, ``query``, ``lm_head`` …), or the input features with a replicated
      bias (``down``, ``out``, ``fc2``, ``wo`` …), so that a pair of layers needs one sum over the
      axis. In a layer with another name, the inputs are sharded if they outnumber the outputs, or
      if both are as many and it is called ``proj`` or ``output``; else the outputs. ``LoRA`` and
      ``LoRALinear`` follow the adapted layer.
    * ``MultiHeadAttention``: the heads of query, key, value, caches and ``out``. Other layers of
      these names (``q_proj``, ``kv_einsum`` …) with several dimensions of outputs: the heads, the
      first of them, or nothing if the axis does not divide it, as for few heads of keys and values.
    * ``Embed``: the vocabulary, then the features. ``Conv``, ``ConvTranspose``: the output
      features, then the input features. Recurrent cells: the hidden features of all gates.
    * In modules of your own classes, a parameter that is called an embedding, as ``Embed``; the
      only kernel of a module, or one with the name of a layer (``wq``, ``o_proj`` …), as
      ``Linear``, with a ``bias`` and a ``scale`` of the outputs; matrices (a, b) and (b, a) as a
      pair of layers, also with a dimension of experts in front; one parameter next to the
      subscripts of an einsum, as ``Einsum``.

    The name of a module that holds one layer, such as an adapter, counts as the name of the layer.
    All other parameters are replicated, such as tables of positions, and matrices of your own
    modules if neither name nor shape says what they are for. Subclasses of a layer follow its rule.
    If the inputs of a layer are sharded, its output is a sum over the axis. The compiler adds this
    sum on Auto axes, and the layer on Explicit axes. On Explicit axes, the outputs of the model are
    not sharded over the axis.

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
      The spec of each path. All of them divide the shapes.
      :func:`~nnx_sharding.report.check_sharding` says why other parameters are replicated, and
      which heads are split. An :class:`~nnx_sharding.errors.UnshardedWarning` says it of replicated
      parameters with more than 5 % of all elements, and at least 65,536.

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
    listing = listing_of(model)
    parameters = listing.variables
    before = base_specs("tensor_parallel", parameters, base, mesh)
    known = {_key_of(parameter.path, parameter.variable): parameter for parameter in parameters}
    sharded = _ShardedLayers(mesh, axes, before)
    # Inner layers come first, so that the rule of attention replaces the rules of its layers.
    for layer in _layers(listing, known):
        sharded.add(layer, _parameters_of(layer, listing, known))
    specs, notes = sharded.specs, sharded.notes(parameters)
    activations = activations_of(base)
    if sequence:
        # The outputs, (batch, positions, features), are sharded over the positions.
        free = PartitionSpec.UNCONSTRAINED
        by_position = PartitionSpec(free, axes if len(axes) > 1 else axes[0], free)
        row_layers = [*sharded.row_layers.values()]
        # The model of an `nnx.ModelAndOptimizer` is called as `optimizer.model`.
        if isinstance(optimizer, nnx.ModelAndOptimizer):
            row_layers += [("model", *path) for path in row_layers]
        activations = activations.extended({Paths(row_layers): by_position})
    if sharded.num_shards > 1:  # on one device nothing can be sharded
        _warn_of_large(parameters, notes, axes)
    # Notes of sharded parameters come last, because the warning takes parameters with a note for
    # whole.
    notes |= sharded.taken_as | notes_of_split_heads(listing, specs, mesh)
    remarks = remarks_on(
        specs, "tensor_parallel", base, parameters, axes, roles=sharded.roles, notes=notes
    )
    return with_optimizer(specs, parameters, optimizer, activations, remarks)


class _ShardedLayers:
    """The layers of a model that were sharded so far, and their specs. Paths start at the model.

    Attributes:
      specs: the spec of each parameter of the model, by path; initially the specs of ``base``.
      roles: by the path of a parameter, the part of it that a device has, such as a ``column``.
      row_layers: the paths of layers whose outputs are sums over the axes, by the path of the
        deciding parameter. The rule of attention replaces the entries of its linear layers.
      taken_as: by path, a note on each sharded kernel of three dimensions that only its name
        explains.

    Its private attributes:

        _mesh, _axes    the mesh, and the axes of it that the strategy shards over
        _before         the specs of ``base``, by path, to which the axes are added
        _whole          by path, why a parameter for which there is a rule stays whole, for
                        :meth:`notes`
    """

    def __init__(self, mesh: AnyMesh, axes: Sequence[AxisName], before: SpecsByPath):
        """Starts with no layers; ``before`` has the specs of ``base``, by path."""
        self._mesh, self._axes, self._before = mesh, axes, before
        self.specs, self.roles = dict(before), dict[Path, str]()
        self.row_layers = dict[Path, Path]()
        self.taken_as = dict[Path, str]()
        self._whole = dict[Path, str]()

    @property
    def num_shards(self) -> int:
        """The number of devices along the axes."""
        return math.prod(self._mesh.shape[axis] for axis in self._axes)

    @property
    def _names(self) -> str:
        """The names of the axes, for notes."""
        return ", ".join(map(repr, self._axes))

    def add(self, layer: _RuledLayer, parameters: Mapping[str, NamedVariable]) -> None:
        """Shards a layer in the first style of its rule that its sizes allow.

        Args:
          parameters: the parameters that the rule is for, by their path in the layer, such as
            ``query/kernel``.
        """
        styles = layer.styles()
        # A style can only be used if the layer has the parameter that the style has to shard.
        usable_styles = [style for style in styles if style.deciding in parameters]
        specs, style = _apply_first_style(
            usable_styles, parameters, self._before, self._axes, self._mesh
        )
        self.specs.update(specs)
        for path in specs:
            # The rule of a layer within this one has set entries for these paths before. It no
            # longer counts.
            self.row_layers.pop(path, None)
        # If no style fits, the specs are those of `base`, and the parameters have no role.
        self.roles.update(dict.fromkeys(specs, "" if style is None else style.role))
        for key, parameter in parameters.items():
            # The rule for a layer of Flax (no attributes) is for all parameters in it. The rule for
            # a module of a user's class is only for the parameters in its styles.
            if layer.attributes is None or any(key in x.dimensions for x in styles):
                self._whole[parameter.path] = (
                    self._why_no_style_fits(usable_styles, parameters)
                    if style is None
                    else self._why_whole(style, key, parameter)
                )
        if style is None:
            return
        path = parameters[style.deciding].path
        if style.row_layer is not None:
            self.row_layers[path] = (*layer.path, *style.row_layer)
        if style.taken_as:
            self.taken_as[path] = (
                f"taken as {style.taken_as} by its name; if a dimension is of stacked layers, give "
                "it a spec by override(...)"
            )

    def _why_no_style_fits(
        self, styles: Sequence[Style], parameters: Mapping[str, NamedVariable]
    ) -> str:
        """Returns why the parameters of a layer stay whole: which sizes the axes do not divide.

        Args:
          styles: the styles of the layer whose deciding parameter is in ``parameters``.
        """
        sizes_tried = _sizes_tried(styles, parameters)
        undivided = sorted(size for size in sizes_tried if size % self.num_shards)
        if undivided:
            sizes = " or ".join(map(str, undivided))
            return f"{self._names} ({self.num_shards}) divides no dimension to shard: {sizes}"
        return f"of a layer in which no dimension can have {self._names}"

    def _why_whole(self, style: Style, key: str, parameter: NamedVariable) -> str:
        """Returns why a parameter stays whole although a style shards its layer.

        Args:
          key: the path of the parameter in the layer.
        """
        index = style.dimensions.get(key)
        dimension = None if index is None else parameter.dimension(index)
        if dimension is not None and parameter.shape is not None:
            size = parameter.shape[dimension]
            return (
                f"{self._names} ({self.num_shards}) does not divide the dimension to shard: {size}"
            )
        is_factor = isinstance(parameter.variable, nnx.LoRAParam)  # it is in front of the outputs
        if style.row_layer is not None and key in style.dimensions and not is_factor:
            relation = "added to" if "bias" in key else "of outputs that are"
            return f"{relation} sums over {self._names}"
        return f"{self._names} shards {style.deciding} of its layer instead"

    def notes(self, parameters: Iterable[NamedVariable]) -> dict[Path, str]:
        """Returns notes for ``check_sharding``, by path: why a parameter stays replicated."""
        notes = {}
        for parameter in parameters:
            spec = self.specs[parameter.path]
            # A parameter that is sharded, or has another sharding of the user, needs no note.
            if not isinstance(spec, PartitionSpec) or any(map(axes_of, spec.partitions)):
                continue
            # The first reason that holds is noted: the kind of the parameter, then the reason why
            # the rule of its layer left it whole, then that there is no rule.
            if isinstance(parameter.variable, nnx.RngState):
                is_count = isinstance(parameter.variable, nnx.RngCount)
                note = "the count of a random stream" if is_count else "the key of a random stream"
            elif parameter.layers.is_ambiguous:
                note = ambiguous_layers(parameter)
            elif parameter.is_norm:
                note = "of a normalization layer"
            elif parameter.shape is None:
                note = SEVERAL_SHAPES
            elif parameter.path in self._whole:
                note = self._whole[parameter.path]
            elif not _is_parameter(parameter.variable):
                kind = type(parameter.variable).__name__
                note = f"{kind} is not an nnx.Param, and tensor_parallel shards only these"
            elif len(parameter.layer_shape) < 2:
                # Such a vector is the scale of a norm of the user's. Those of Flax stay whole, too.
                note = "a vector of no layer that tensor_parallel knows, as of a norm of your own"
            else:
                note = "of no layer that tensor_parallel knows. Give it a spec by override(...)"
            notes[parameter.path] = note
        return notes


def _is_parameter(variable: object) -> bool:
    """Whether a Variable is an ``nnx.Param``, or a bare array, which may be a parameter."""
    return not _compat.is_any_variable(variable) or isinstance(variable, nnx.Param)


def _warn_of_large(
    parameters: Iterable[NamedVariable], notes: Mapping[Path, str], axes: Sequence[AxisName]
) -> None:
    """Warns of replicated parameters that are a large part of the model.

    Args:
      notes: by path, why a parameter is replicated; sharded parameters have no note.
    """
    sizes: dict[Path, int] = {}  # in elements
    for parameter in parameters:
        # Caches and other state do not count. Bare arrays count, because they are the parameters of
        # a model without Variables.
        if _is_parameter(parameter.variable):
            sizes[parameter.path] = sum(math.prod(shape) for shape in parameter.shapes)
    total = sum(sizes.values())
    large = []
    for path, size in sizes.items():
        is_large = size >= _LARGE_SIZE and size > _LARGE_SHARE * total
        if is_large and path in notes:  # a parameter with a note is replicated
            large.append(path)
    if not large:
        return
    lines = []
    for path in sorted(large, key=lambda path: -sizes[path]):
        # The remedy after the first sentence is left out, because the last line says it.
        reason, _, _ = notes[path].partition(". ")
        lines.append(f"  {path_string(path)}, {sizes[path] / total:.0%} of all: {reason}")
    head = f"tensor_parallel: these parameters stay replicated over {', '.join(map(repr, axes))}:"
    text = message(head, lines, "To shard one, give it a spec: override(sharding, {path: spec}).")
    warn_or_raise(UnshardedWarning, text, strict=False)


def _key_of(path: Path, subject: object) -> int | Path:
    """Returns the key by which a parameter is known: the id of a Variable, the path of an array.

    A Variable is the same object in each place that holds it, so its first path is not needed.

    Args:
      path: the path of the Variable or bare array in the model.
    """
    return _compat.identity(subject) if _compat.is_any_variable(subject) else path


class _RuledLayer(NamedTuple):
    """A layer of the model with one of the rules for it."""

    path: Path
    entry: int  # the index of the module in the flattened model
    module: Any
    name: str  # the name of the attribute that holds the layer: ``q_proj``
    rule: Rule
    # In a module of a user's class, the attributes with the parameters that the rule is for. None
    # for a layer of Flax: the rule is for all parameters in it, including those in its layers.
    attributes: Sequence[str] | None

    def styles(self) -> Sequence[Style]:
        """Returns the ways to shard the layer, best first."""
        return self.rule(self.module, self.name) if callable(self.rule) else self.rule


def _layers(listing: Listing, known: Mapping[int | Path, NamedVariable]) -> Iterator[_RuledLayer]:
    """Yields each layer of a model once for each of its rules; inner layers come first.

    Args:
      known: its parameters by their keys (`_key_of`).
    """
    found = []
    num_layers = collections.Counter[Path]()  # by the path of a module: the layers in it
    for path, index in listing.modules():
        module = listing.flat.objects[index]
        rules, attributes = rules_of_layer(module, known)  # no rules for most modules
        if not rules:
            continue
        found.append((path, index, module, rules, attributes))
        # Adapters belong to the layer that they adapt, so they do not count.
        if not isinstance(module, nnx.LoRA):
            num_layers.update(path[:length] for length in range(len(path)))
    layers = []
    for path, index, module, rules, attributes in found:
        name = _layer_name(path, num_layers)
        layers += [_RuledLayer(path, index, module, name, rule, attributes) for rule in rules]
    return iter(sorted(layers, key=lambda layer: -len(layer.path)))


def _layer_name(path: Path, num_layers: Mapping[Path, int]) -> str:
    """Returns the nearest name on the path of a layer that says what the layer is for.

    A module that holds no other layer is a wrapper, such as an adapter, and the name of the wrapper
    counts as well: ``q_proj`` for ``q_proj/inner``. Without such a name, it is the last attribute.
    Indices and the attributes in `WRAPPERS` are left out: ``up`` for ``up/0/base_module``.

    Args:
      num_layers: how many layers a module holds, by its path.
    """
    last_name = ""
    for length in range(len(path), 0, -1):
        key = path[length - 1]
        if isinstance(key, str) and key not in WRAPPERS:
            if names_layer(key):
                return key
            last_name = last_name or key
        # The module that holds the layer under this key has others, whose names it would give.
        if last_name and num_layers[path[: length - 1]] > 1:
            break
    return last_name


def _parameters_of(
    layer: _RuledLayer, listing: Listing, known: Mapping[int | Path, NamedVariable]
) -> dict[str, NamedVariable]:
    """Returns the parameters that the rule of a layer is for, by their path in the layer.

    Args:
      known: the parameters of the model by their keys (`_key_of`).

    Returns:
      The parameters by texts like ``query/kernel``.
    """
    parameters = {}
    for path, subject in listing.below(layer.entry):  # paths start at the layer
        path_in_layer = path_string(path)
        is_for_rule = layer.attributes is None or path_in_layer in layer.attributes
        parameter = known.get(_key_of((*layer.path, *path), subject))
        if parameter is not None and is_for_rule:
            parameters[path_in_layer] = parameter
    return parameters


def _apply_first_style(
    styles: Sequence[Style],
    parameters: Mapping[str, NamedVariable],
    before: SpecsByPath,
    axes: Sequence[AxisName],
    mesh: AnyMesh,
) -> tuple[SpecsByPath, Style | None]:
    """Shards the parameters of a layer in the first style that its sizes allow.

    A style has to shard its deciding parameter. Other parameters, such as a bias, keep their spec
    if the axes do not divide them. The specs start from ``before``, so they replace those of a rule
    for an inner layer, such as a linear layer in attention.

    Args:
      styles: the ways to shard the layer, best first. The deciding parameter of each is in
        ``parameters``.
      parameters: the parameters of the layer, by the path in it.
      before: the specs of the model that the axes are added to.
      axes: the mesh axes. If no style can use all, the last ones are left out one by one.

    Returns:
      A pair: the specs of the parameters in the style, by the path in the model, and the style. If
      no style fits: the specs of ``before`` for the parameters in any style, and None.
    """

    def shard(
        parameter: NamedVariable, index: int | None, axes: Sequence[AxisName]
    ) -> PartitionSpec | None:
        """Returns the spec with the axes in a dimension of one layer; None if it is impossible."""
        # The dimension of the array, which may have stacked layers; None if they are ambiguous.
        dimension = None if index is None else parameter.dimension(index)
        if dimension is None:
            return None
        return shard_dimension(before[parameter.path], parameter.shape, dimension, axes, mesh)

    # All axes in any style are better than fewer axes in the best style.
    for count in range(len(axes), 0, -1):
        for style in styles:
            sharded = {
                key: shard(parameters[key], index, axes[:count])
                for key, index in style.dimensions.items()
                if key in parameters
            }
            if sharded[style.deciding] is None:
                continue
            specs: SpecsByPath = {}
            for key, spec in sharded.items():
                path = parameters[key].path
                specs[path] = before[path] if spec is None else spec
            return specs, style
    keys = {key for style in styles for key in style.dimensions if key in parameters}
    paths = [parameters[key].path for key in keys]
    return {path: before[path] for path in paths}, None


def _sizes_tried(styles: Sequence[Style], parameters: Mapping[str, NamedVariable]) -> set[int]:
    """Returns the sizes that decide whether the styles of a layer fit.

    Each style has to shard one dimension of its deciding parameter. The sizes of these dimensions
    are returned.

    Args:
      styles: styles of the layer whose deciding parameter is in ``parameters``.
      parameters: the parameters of the layer, by the path in it.
    """
    sizes = set()
    for style in styles:
        parameter, index = parameters[style.deciding], style.dimensions[style.deciding]
        # The index counts the dimensions of one layer, and `dimension` counts the dimensions of the
        # array. The dimension is None if stacked layers are ambiguous.
        dimension = None if index is None else parameter.dimension(index)
        if dimension is not None and parameter.shape is not None:
            sizes.add(parameter.shape[dimension])
    return sizes
