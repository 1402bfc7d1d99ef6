"""Finds the dimensions of Variables that are stacked layers, which a loop slices.

A ``Stack`` puts the dimensions of its layers first. ``vmap`` and ``scan`` put them where their axes
say, and Variables do not record these axes. But a layer of Flax knows the shapes of its parameters,
so the dimensions that a parameter has in addition to that shape are stacked layers:

    nnx.Linear(256, 1024)   kernel (256, 8, 1024)   bias (8, 1024)   → dimension 1, dimension 0

If sizes are equal, there are several *candidates*. A candidate is a tuple of dimensions, one for
each transform around the layer. One ``vmap`` gives all Variables of a class the same axis, counted
from the front or from the back, so the candidates that disagree with another known Variable of the
class in the same module are dropped. The Variables of a user's own modules follow the known
Variables next to them. Names in the metadata decide before all sizes: ``layers``, which Flax's
users declare as ``nnx.PARTITION_NAME``, and each name that a known dimension of layers has.

If several candidates remain, the array is `Stacked.is_ambiguous`, and none of the candidates is
sharded. A model without any of these signs counts as not stacked. A *slot* is the position of an
array in the flattened model (``Flat``). A *known* Variable is a parameter of a layer of Flax, whose
shape for one layer is known. If a parameter is in a `Stack` and was made by ``vmap`` as well, the
dimensions of the `Stack` come first.

Helpers in this file: `_shapes` returns the shapes for one layer of a layer of Flax, by attribute,
and an empty mapping for any other object. `_candidates` compares such a shape with a parameter's.
`_names` returns the names of the dimensions in the metadata, or () without them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..core.flatten import Flat
from ..specs.paths import Path, plain_key
from ..transforms.stack import count_layer_dimensions

Shape: TypeAlias = tuple[int, ...]
# Flax's guides and MaxText give the dimension of layers this name.
_COMMON_NAME = "layers"


class Stacked(NamedTuple):
    """The dimensions of an array that are, or may be, stacked layers; none by default."""

    dimensions: tuple[int, ...] = ()
    is_ambiguous: bool = False  # whether some of ``dimensions`` are not stacked layers

    @classmethod
    def from_candidates(cls, candidates: Set[tuple[int, ...]]) -> Stacked:
        """Returns the union of all candidates, which is ambiguous if there are several."""
        union = {d for candidate in candidates for d in candidate}
        return cls(tuple(sorted(union)), len(candidates) > 1)


class _Axes(NamedTuple):
    """Axes that transforms may have given to all Variables of a class, from the front or back."""

    axes: tuple[int, ...]  # numbers like `vmap(out_axes=…)`: negative if counted from the back
    sizes: tuple[int, ...]  # the number of layers along each axis

    def dimensions(self, shape: Shape) -> tuple[int, ...] | None:
        """Returns the dimensions of a shape along these axes, sorted.

        None if the shape lacks one of the axes, two of them are the same dimension of it, or its
        sizes along the axes are not ``sizes``.
        """
        rank = len(shape)
        dimensions = [axis if axis >= 0 else axis + rank for axis in self.axes]
        are_in_range = all(0 <= d < rank for d in dimensions)
        are_different = len(set(dimensions)) == len(dimensions)
        if not are_in_range or not are_different:
            return None
        if tuple(shape[d] for d in dimensions) != self.sizes:
            return None
        return tuple(sorted(dimensions))


class _KnownVariable(NamedTuple):
    """A parameter of a layer of Flax, whose shape for one layer is known."""

    path: Path  # the path in the layer, until `LayerDimensions` puts the layer's path before it
    layer: int  # the index of the layer among the objects of the flattened model
    variable: nnx.Variable[Any]
    shape: Shape  # the shape with the dimensions of stacked layers
    candidates: Set[tuple[int, ...]]  # choices of dimensions that may be stacked layers, by shape

    def axes(self, count: int) -> set[_Axes]:
        """Returns the axes that ``count`` nested transforms may have given to the Variable.

        The kernel (256, 8, 1024) of a ``Linear(256, 1024)`` has got axis 1 from one transform or,
        counted from the back, axis -2. Other Variables of its class may have the same axes.
        """
        # A candidate has a dimension for each transform around the layer. ``count`` may be smaller,
        # because only some of these transforms are around the module that is compared.
        choices = {
            dimensions
            for candidate in self.candidates
            for dimensions in itertools.combinations(candidate, count)
        }
        rank = len(self.shape)
        result: set[_Axes] = set()
        for dimensions in choices:
            sizes = tuple(self.shape[d] for d in dimensions)
            # Each transform may count from the front or the back: (1,) of 3 → (1,) and (-2,).
            front_or_back = ((d, d - rank) for d in dimensions)
            result.update(_Axes(axes, sizes) for axes in itertools.product(*front_or_back))
        return result


class LayerDimensions:
    """Finds the dimensions of stacked layers of each array in a model.

    The constructor looks at the whole model: it compares the shapes of Flax's layers with the
    shapes that these layers have without transforms. :meth:`find` then answers for one array.

    Its private attributes:

        _stack_counts   by slot, how many first dimensions of the array are those of a `Stack`
        _slots          by the id of a Variable, the slots of its arrays; empty without a `Stack`,
                        because only `_stack_counts` is read by slot
        _norms          the ids of the Variables of normalization layers
        _resolved       by the id of a known Variable, its dimensions of stacked layers; empty if no
                        layer is stacked
        _common_axes    by the path of a module, and by class: the axes that transforms may have
                        given to all known Variables of this class in the module; empty if no layer
                        is stacked
        _names          the names that metadata give to dimensions of layers, such as ``layers``
    """

    def __init__(self, flat: Flat):
        """Compares the shapes of all layers of Flax in a flattened model.

        Decides, for each of their parameters, which dimensions are stacked layers.
        """
        self._stack_counts = count_layer_dimensions(flat)
        self._slots: dict[int, tuple[int, ...]] = {}
        if self._stack_counts:
            self._slots = {
                _compat.identity(variable): flat.structure.slots[index]
                for index, variable in enumerate(flat.objects)
                if _compat.is_any_variable(variable)
            }
        self._norms: set[int] = set()
        self._common_axes: dict[Path, dict[type, set[_Axes]]] = {}
        self._names = {_COMMON_NAME}
        self._resolved: dict[int, Stacked] = {}

        known_variables = self._read_layers(flat)  # fills `_norms`
        # If () is the only candidate of all of them, no layer is stacked. Most models are so, and
        # the rest is skipped because it would find nothing.
        is_any_stacked = any(candidate for x in known_variables for candidate in x.candidates)
        if is_any_stacked:
            paths = flat.structure.paths_to_objects([((), flat.structure.root)])
            # A shared layer has several paths. The first one counts.
            path_of_layer = {
                i: tuple(map(plain_key, layer_paths[0])) for i, layer_paths in paths.items()
            }
            # Paths in the layer, ("kernel",), become paths in the model.
            known_variables = [
                x._replace(path=(*path_of_layer[x.layer], *x.path)) for x in known_variables
            ]
            # The common axes of all modules come first, because `_resolve` reads them.
            self._find_common_axes(known_variables)
            for known in known_variables:
                self._resolve(known)
        # `_resolve` adds None if a dimension of layers has no name. That is a sign in parameters of
        # Flax's layers only: in a user's Variable, any dimension may lack a name.
        self._names.discard(None)

    def is_norm(self, subject: object) -> bool:
        """Whether a Variable is a parameter or a statistic of a normalization layer."""
        return _compat.identity(subject) in self._norms

    def find(self, path: Path, subject: object, slots: Sequence[int], shape: Shape) -> Stacked:
        """Finds the dimensions of layers of a Variable or bare array.

        Four sources are asked in this order, and the first answer counts: names in the metadata,
        the shape that a layer of Flax knows for its parameter, known Variables in the closest
        module around the subject, and the `Stack` around it.

        Args:
          path: the path of the subject in the model.
          subject: the Variable or array.
          slots: the slots of its arrays.
          shape: the shape of these arrays.
        """
        # A `Stack` puts the dimensions of its layers first.
        in_stack = tuple(range(self._stack_counts.get(slots[0], 0)))
        # 1. Names in the metadata: a dimension whose name is in `self._names` is stacked layers.
        # `names` has the name of each dimension. It is () for most Variables, which have none, and
        # the set is then left out to save time.
        names = _names(subject, len(shape))
        named = {d for d, name in enumerate(names) if name in self._names} if names else None
        if named:
            return Stacked(tuple(sorted(named.union(in_stack))))
        # 2. A parameter of a layer of Flax: the constructor has decided.
        resolved = self._resolved.get(_compat.identity(subject))
        if resolved is not None:
            return resolved
        # 3. The axes that known Variables in the closest module around the subject have in common.
        # Modules further out tell less, because they hold layers stacked in different ways.
        if self._common_axes:  # empty in most models, because no layer is stacked
            modules_around = (path[:length] for length in reversed(range(len(path))))
            closest = next((x for x in modules_around if x in self._common_axes), None)
            if closest is not None:
                like_neighbors = self._follow_neighbors(self._common_axes[closest], subject, shape)
                # In a `Stack`, the neighbors' dimensions include the dimensions of the `Stack`.
                # They are only of use if there are more: the dimensions of a `vmap`.
                if len(like_neighbors.dimensions) > len(in_stack):
                    return like_neighbors
        # 4. The `Stack` around the subject; no dimensions without one.
        return Stacked(in_stack)

    def _read_layers(self, flat: Flat) -> list[_KnownVariable]:
        """Returns the parameters of Flax's layers, with the dimensions that may be stacked layers.

        Also fills ``_norms`` with the ids of the parameters of normalization layers.
        """
        known_variables = []
        for index, layer in enumerate(flat.objects):
            kind: Any = type(layer)
            layer_class = _layer_class(kind)
            if layer_class is None:  # shapes are known for layers of Flax only
                continue
            # The cached class is asked because `isinstance` of a module runs Python code in `abc`.
            is_norm = layer_class in _NORMS
            for name, layer_shape in _shapes(layer).items():
                variable: Any = getattr(layer, name, None)
                if is_norm:
                    self._norms.add(_compat.identity(variable))
                if not _compat.is_any_variable(variable):
                    continue
                shape = getattr(variable.get_raw_value(), "shape", None)
                if shape is None:  # a Variable of None or of a pytree
                    continue
                slots = self._slots.get(_compat.identity(variable), ())
                # The number of its first dimensions that are those of a `Stack`.
                stack_count = self._stack_counts.get(slots[0], 0) if slots else 0
                candidates = _candidates(shape, layer_shape, stack_count)
                path_in_layer = (name,)  # the constructor puts the path of the layer before it
                known = _KnownVariable(path_in_layer, index, variable, shape, candidates)
                known_variables.append(known)
        return known_variables

    def _find_common_axes(self, known: Sequence[_KnownVariable]) -> None:
        """Fills ``_common_axes``: the axes that all Variables of a class in a module may have.

        A transform gives all Variables of a class the same axis, counted from one end, so the
        possible axes of these Variables are intersected.
        """
        groups: dict[tuple[Path, type], list[_KnownVariable]] = {}
        for x in known:
            for length in range(len(x.path)):  # each module around the Variable
                groups.setdefault((x.path[:length], type(x.variable)), []).append(x)
        for (module_path, cls), members in groups.items():
            # The Variable with the fewest dimensions of layers tells how many transforms are around
            # the whole module. Other Variables in the module may be stacked once more.
            count = min(len(candidate) for x in members for candidate in x.candidates)
            # The set is empty if the module holds layers that were stacked in different ways.
            common = set.intersection(*(x.axes(count) for x in members))
            self._common_axes.setdefault(module_path, {})[cls] = common

    def _resolve(self, known: _KnownVariable) -> None:
        """Decides which dimensions of a parameter of Flax's layers are stacked layers.

        The candidates that are possible by shape are reduced to the ones that agree with the other
        Variables of the class, and then to the ones that the metadata name. The result is stored in
        ``_resolved``. If the result is not ambiguous, the names that the metadata give to its
        dimensions are added to ``_names``. These names count as names for layers from then on: for
        the parameters that come later in the model, and in :meth:`find`.
        """
        remaining = self._agreeing_with_others(known)  # never empty
        names = _names(known.variable, len(known.shape))  # for example ("embed", "layers", "mlp")
        if names:
            named = {
                candidate
                for candidate in remaining
                # The candidate () means "not stacked". This candidate has no dimensions, so `all`
                # would accept it with any names.
                if candidate and all(names[d] in self._names for d in candidate)
            }
            remaining = named or remaining
        stacked = Stacked.from_candidates(remaining)
        self._resolved[_compat.identity(known.variable)] = stacked
        if names and not stacked.is_ambiguous:
            # The name is None if the dimension has no name. Later parameters of Flax's layers may
            # be decided by it; the constructor removes it at the end.
            self._names.update(names[d] for d in stacked.dimensions)

    def _agreeing_with_others(self, known: _KnownVariable) -> Set[tuple[int, ...]]:
        """Returns the candidates with axes that all Variables of the class have in common.

        The modules around the parameter are compared one after the other, from the whole model to
        the layer itself. A module with which no candidate agrees is skipped.
        """
        remaining = known.candidates
        for length in range(len(known.path)):
            # The common axes of this class in the module, each as dimensions of this parameter;
            # None if the parameter has other sizes along these axes.
            common_axes = self._common_axes[known.path[:length]][type(known.variable)]
            allowed = [axes.dimensions(known.shape) for axes in common_axes]
            agreeing: set[tuple[int, ...]] = set()
            for dimensions in allowed:
                if dimensions is not None:
                    # A candidate may have more dimensions, from transforms within the module.
                    agreeing.update(c for c in remaining if set(c).issuperset(dimensions))
            # `agreeing` is empty if the module holds layers that were stacked in different ways.
            remaining = agreeing or remaining
        return remaining

    def _follow_neighbors(
        self, common_axes: Mapping[type, Set[_Axes]], subject: object, shape: Shape
    ) -> Stacked:
        """Infers the stacked dimensions of a user's Variable from Flax's layers in its module.

        Args:
          common_axes: by class of Variables, the axes that transforms may have given to all known
            Variables in the module around the subject.
          shape: the shape of the subject.
        """
        cls = type(subject)
        is_known_class = cls in common_axes
        axes = common_axes[cls] if is_known_class else set().union(*common_axes.values())
        # The dimensions of this shape along the axes; None if the shape has other sizes there.
        choices = {x.dimensions(shape) for x in axes}
        candidates = {dimensions for dimensions in choices if dimensions is not None}
        if not is_known_class:
            # Each class may have axes of its own, `StateAxes({nnx.Param: 1, ...: 0})`. Axis 0 is
            # the most common, so the first dimensions are candidates as well if their sizes fit.
            for sizes in {x.sizes for x in axes}:
                if shape[: len(sizes)] == sizes:
                    candidates.add(tuple(range(len(sizes))))
        return Stacked.from_candidates(candidates)


def _candidates(
    shape: Shape, layer_shape: Sequence[int | None], stack_count: int
) -> Set[tuple[int, ...]]:
    """Returns the choices of dimensions that may be stacked layers, by shape alone; never empty.

    If the dimensions of a choice are removed, the shape for one layer remains. For the shape
    (8, 8, 4) and the layer's (8, 4), the choices are ``{(0,), (1,)}``. The choice ``()`` means that
    the parameter is not stacked.

    Args:
      shape: the shape of a parameter.
      layer_shape: the shape for one layer. None stands for any size.
      stack_count: how many first dimensions are those of a `Stack`; every choice includes them.
    """
    num_stacked = len(shape) - len(layer_shape)
    # Negative: a subclass gives the parameter fewer dimensions, and nothing is known about it.
    if num_stacked <= 0:
        return {()}
    in_stack = set(range(stack_count))
    candidates = set()
    for removed in itertools.combinations(range(len(shape)), num_stacked):
        remaining_shape = [size for d, size in enumerate(shape) if d not in removed]
        pairs = zip(remaining_shape, layer_shape, strict=True)
        if in_stack.issubset(removed) and all(want in (None, size) for size, want in pairs):
            candidates.add(removed)
    # No candidate fits if a subclass gives its parameter another shape. The layers are then most
    # likely the first dimensions.
    return candidates or {tuple(range(num_stacked))}


def _names(subject: object, rank: int) -> tuple[Any, ...]:
    """Returns the names that metadata give the dimensions: an entry for each, None without a name.

    ``()`` without such metadata, or if their number is not ``rank``.
    """
    if not _compat.is_any_variable(subject):  # a bare array
        return ()
    names = subject.get_metadata().get("out_sharding")
    if isinstance(names, PartitionSpec):
        names = names.partitions
    if not isinstance(names, tuple | list) or len(names) != rank:
        return ()
    return tuple(names)


_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)


def _shapes(layer: object) -> Mapping[str, Sequence[int | None]]:
    """Returns the shapes of the parameters of a layer of Flax, by attribute; None is any size.

    The mapping is empty for all other objects.
    """
    layer_type: Any = type(layer)
    cls = _layer_class(layer_type)
    if cls is None or not has_sizes(layer, cls):
        return {}
    return _SHAPES[cls](layer)


def has_sizes(layer: object, cls: type) -> bool:
    """Whether a layer has the sizes that the constructor of its class of Flax keeps.

    A subclass that does not call ``super().__init__`` lacks them, and counts as a user's class.
    """
    return all(hasattr(layer, name) for name in _SIZES.get(cls, ()))


# By class, the attributes that `_SHAPES` and the rules of tensor parallelism read from a layer.
_SIZES: dict[type, tuple[str, ...]] = {
    nnx.Linear: ("in_features", "out_features"),
    nnx.LinearGeneral: ("in_features", "out_features", "batch_axis"),
    nnx.Einsum: ("einsum_str", "kernel_shape", "bias_shape"),
    nnx.Embed: ("num_embeddings", "features"),
    nnx.LoRA: ("in_features", "out_features"),
    nnx.Conv: ("kernel_shape", "out_features"),
    nnx.ConvTranspose: ("kernel_shape", "out_features", "transpose_kernel"),
}


@functools.lru_cache(maxsize=1024)
def _layer_class(cls: type) -> type | None:
    """Returns the class of Flax's layers that a class is derived from; None for other classes."""
    return next((base for base in cls.__mro__ if base in _SHAPES), None)


def _norm_shapes(layer: Any) -> dict[str, Any]:
    """Returns the shapes of a normalization layer, by attribute."""
    # None is any size. A subclass that does not call `super().__init__` lacks the attribute, and
    # counts as a norm all the same.
    features = getattr(layer, "num_features", None)
    # `nnx.GroupNorm` keeps the number and the size of its groups, not the number of features.
    if hasattr(layer, "group_size"):
        features = layer.num_groups * layer.group_size
    return dict.fromkeys(("scale", "bias", "mean", "var"), (features,))


def _linear_general_shapes(layer: Any) -> dict[str, Any]:
    batch = tuple(layer.batch_axis.values())
    outputs = (*batch, *layer.out_features)
    return {"kernel": (*batch, *layer.in_features, *layer.out_features), "bias": outputs}


def _einsum_shapes(layer: Any) -> dict[str, Any]:
    bias = {} if layer.bias_shape is None else {"bias": layer.bias_shape}
    return {"kernel": layer.kernel_shape, **bias}


def _convolution_shapes(layer: Any) -> dict[str, Any]:
    return {"kernel": layer.kernel_shape, "bias": (layer.out_features,)}


_SHAPES: dict[type, Callable[[Any], Mapping[str, Any]]] = {
    **dict.fromkeys(_NORMS, _norm_shapes),
    nnx.Linear: lambda x: {"kernel": (x.in_features, x.out_features), "bias": (x.out_features,)},
    nnx.LinearGeneral: _linear_general_shapes,
    nnx.Einsum: _einsum_shapes,
    nnx.Embed: lambda x: {"embedding": (x.num_embeddings, x.features)},
    nnx.LoRA: lambda x: {"lora_a": (x.in_features, None), "lora_b": (None, x.out_features)},
    nnx.Conv: _convolution_shapes,
    nnx.ConvTranspose: _convolution_shapes,
}
