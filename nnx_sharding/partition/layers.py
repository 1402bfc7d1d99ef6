"""Finds the dimensions of Variables that are stacked layers, which a loop slices.

A ``Stack`` has them first. ``vmap`` and ``scan`` put them where their axes say, which Variables do
not tell. But a layer of Flax knows the shapes of its parameters, and what a parameter has beyond
its shape are layers:

    nnx.Linear(256, 1024)   kernel (256, 8, 1024)   bias (8, 1024)   → dimension 1, dimension 0

Equal sizes leave several *candidates*, each a tuple of dimensions: one for each transform around
the layer. All Variables of a class get the same axis from one ``vmap``, counted from the front or
from the back, so of the candidates below a module those remain that all known Variables of the
class have in common. Other Variables, of a user's own modules, follow the known ones beside them. A
name in the metadata that a known dimension of layers has, or ``layers``, which Flax's users declare
as ``nnx.PARTITION_NAME``, decides before all sizes.

What is then still one of several is `Stacked.is_ambiguous`, and none of the candidates is sharded.
A model without any of these signs counts as not stacked. A *slot* is the position of an array in
the flattened model (``Flat``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from flax import nnx
from jax.sharding import PartitionSpec

from ..core.flatten import Flat
from ..specs.paths import Path, plain_key
from ..transforms.stack import count_layer_dimensions

Shape: TypeAlias = tuple[int, ...]
# What Flax's guides and MaxText call the dimension of layers.
_COMMON_NAME = "layers"


class Stacked(NamedTuple):
    """The dimensions of an array that are, or may be, stacked layers."""

    dimensions: tuple[int, ...] = ()
    is_ambiguous: bool = False  # some of them are not

    @classmethod
    def from_candidates(cls, candidates: Set[tuple[int, ...]]) -> Stacked:
        """Returns the union of the dimensions that may be stacked layers."""
        union = {d for candidate in candidates for d in candidate}
        return cls(tuple(sorted(union)), len(candidates) > 1)


class _Axes(NamedTuple):
    """Axes that transforms may have given to all Variables of a class, from the front or back."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def dimensions(self, shape: Shape) -> tuple[int, ...] | None:
        """Returns the dimensions of a shape along these axes; None if other sizes are there."""
        places = tuple(axis if axis >= 0 else axis + len(shape) for axis in self.axes)
        exist = all(0 <= d < len(shape) for d in places) and len({*places}) == len(places)
        if not exist or tuple(shape[d] for d in places) != self.sizes:
            return None
        return tuple(sorted(places))


class _KnownVariable(NamedTuple):
    """A parameter of a layer of Flax, whose shape for one layer is known."""

    path: Path
    variable: nnx.Variable[Any]
    shape: Shape
    candidates: Set[tuple[int, ...]]

    def axes(self, count: int) -> set[_Axes]:
        """Returns the axes that ``count`` nested transforms may have given to the Variable."""
        chosen = {c for x in self.candidates for c in itertools.combinations(x, count)}
        # One transform may count from the front, and another one from the back.
        ends = (0, len(self.shape))
        result: set[_Axes] = set()
        for dimensions in chosen:
            sizes = tuple(self.shape[dimension] for dimension in dimensions)
            # Each dimension may be counted from any of the ends.
            counted = ([dimension - end for end in ends] for dimension in dimensions)
            result |= {_Axes(axes, sizes) for axes in itertools.product(*counted)}
        return result


class LayerDimensions:
    """The dimensions of layers in all arrays of a flattened model."""

    def __init__(self, flat: Flat):
        """Finds the layer dimensions of all Variables in a flattened model."""
        self._stack_counts = count_layer_dimensions(flat)
        self._slots = {
            id(x): flat.structure.slots[i]
            for i, x in enumerate(flat.objects)
            if isinstance(x, nnx.Variable)
        }
        self._norms: set[int] = set()  # by id, the Variables of normalization layers
        known = [*self._known_variables(flat)]
        # By the path of a module and a class of Variables: the axes that all known ones of this
        # class below the module may have.
        self._common_axes: dict[Path, dict[type, set[_Axes]]] = {}
        self._names = {_COMMON_NAME}  # what names in the metadata call a dimension of layers
        self._resolved: dict[int, Stacked] = {}  # by id, the known Variables
        if any(candidate for x in known for candidate in x.candidates):
            self._find_common_axes(known)
            for x in known:
                self._resolved[id(x.variable)] = stacked = self._resolve(x)
                if not stacked.is_ambiguous:
                    names = _names(x.variable, len(x.shape))
                    self._names.update(names[d] for d in stacked.dimensions if names)
        self._names.discard(None)

    def is_norm(self, subject: object) -> bool:
        """Whether a Variable is a parameter or a statistic of a normalization layer."""
        return id(subject) in self._norms

    def find(self, path: Path, subject: object, slots: Sequence[int], shape: Shape) -> Stacked:
        """Finds the dimensions of layers of a Variable or bare array.

        The first that tells them decides: names in its metadata, the shape that its layer of Flax
        knows, known Variables in the closest module around it, the `Stack` around it.

        Args:
          path: its path.
          subject: the Variable or array.
          slots: the slots of its arrays.
          shape: their shape.
        """
        stack = Stacked(tuple(range(self._stack_counts.get(slots[0], 0))))
        names = _names(subject, len(shape))
        named = tuple(d for d, name in enumerate(names) if name in self._names)
        if named:
            return Stacked(tuple(sorted({*named, *stack.dimensions})))
        if id(subject) in self._resolved:
            return self._resolved[id(subject)]
        for length in reversed(range(len(path))):
            if path[:length] in self._common_axes:
                neighbors = self._follow_neighbors(self._common_axes[path[:length]], subject, shape)
                # A `vmap` around the stack adds to its dimensions; less than these is not an
                # answer.
                return neighbors if len(neighbors.dimensions) > len(stack.dimensions) else stack
        return stack

    def _known_variables(self, flat: Flat) -> Iterator[_KnownVariable]:
        """Yields the parameters of Flax's layers; records which belong to normalization layers."""
        layers = {i: x for i, x in enumerate(flat.objects) if _shapes(x)}
        paths = flat.structure.paths_to_objects([((), flat.structure.root)]) if layers else {}
        for index, layer in layers.items():
            path = tuple(map(plain_key, paths[index][0]))
            for name, layer_shape in _shapes(layer).items():
                variable = getattr(layer, name, None)
                value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
                shape = getattr(value, "shape", None)
                if isinstance(layer, _NORMS):
                    self._norms.add(id(variable))
                if isinstance(variable, nnx.Variable) and shape is not None:
                    slots = self._slots.get(id(variable), ())
                    stack_count = self._stack_counts.get(slots[0], 0) if slots else 0
                    candidates = _candidates(shape, layer_shape, stack_count)
                    yield _KnownVariable((*path, name), variable, shape, candidates)

    def _find_common_axes(self, known: Sequence[_KnownVariable]) -> None:
        """Fills ``_common_axes``."""
        groups: dict[tuple[Path, type], list[_KnownVariable]] = {}
        for x in known:
            for length in range(len(x.path)):
                groups.setdefault((x.path[:length], type(x.variable)), []).append(x)
        for (prefix, cls), members in groups.items():
            # Below the outer one of nested stacks, some have more dimensions of layers.
            count = min(len(candidate) for x in members for candidate in x.candidates)
            common = set.intersection(*(x.axes(count) for x in members))
            self._common_axes.setdefault(prefix, {})[cls] = common

    def _resolve(self, x: _KnownVariable) -> Stacked:
        """Returns the candidates that agree with other Variables, or with names."""
        remaining = x.candidates
        for length in range(len(x.path)):
            common = self._common_axes[x.path[:length]][type(x.variable)]
            allowed = [axes.dimensions(x.shape) for axes in common]
            agreeing = {
                candidate
                for candidate in remaining
                if any(dims is not None and {*dims} <= {*candidate} for dims in allowed)
            }
            # None agrees in a module that was put together from layers stacked in different ways.
            remaining = agreeing or remaining
        names = _names(x.variable, len(x.shape))
        named: set[Any] = set()  # the candidates whose dimensions all have the name of layers
        for candidate in remaining if names else ():
            if candidate and all(names[dimension] in self._names for dimension in candidate):
                named.add(candidate)
        return Stacked.from_candidates(named or remaining)

    def _follow_neighbors(
        self, common_axes: Mapping[type, Set[_Axes]], subject: object, shape: Shape
    ) -> Stacked:
        """Returns the dimensions of a Variable at the axes of known ones in the same module."""
        cls = type(subject)
        axes = common_axes[cls] if cls in common_axes else set().union(*common_axes.values())
        candidates = {d for x in axes if (d := x.dimensions(shape)) is not None}
        if cls not in common_axes:
            # A transform may have other axes for other classes: mostly the first.
            sizes = {x.sizes for x in axes}
            candidates |= {tuple(range(len(size))) for size in sizes if shape[: len(size)] == size}
        return Stacked.from_candidates(candidates)


def _candidates(
    shape: Shape, layer_shape: Sequence[int | None], stack_count: int
) -> Set[tuple[int, ...]]:
    """Returns the dimensions that may be stacked layers: without them, the layer's shape remains.

    Args:
      shape: the shape of a parameter.
      layer_shape: that for one layer, in which None is any size.
      stack_count: how many first dimensions are those of a `Stack`.
    """
    extra = len(shape) - len(layer_shape)
    if extra <= 0:
        return {()}

    def leaves_layer_shape(removed: tuple[int, ...]) -> bool:
        rest = (size for d, size in enumerate(shape) if d not in removed)
        pairs = zip(rest, layer_shape, strict=True)
        fits = all(expected in (None, size) for size, expected in pairs)
        return fits and {*range(stack_count)} <= {*removed}

    candidates = itertools.combinations(range(len(shape)), extra)
    # None fits in a subclass whose parameters have another shape; then the first ones are meant.
    return set(filter(leaves_layer_shape, candidates)) or {tuple(range(extra))}


def _names(subject: object, rank: int) -> tuple[Any, ...]:
    """Returns the names that metadata give the dimensions; ``()`` unless each has an entry."""
    metadata = subject.get_metadata() if isinstance(subject, nnx.Variable) else {}
    names = metadata.get("out_sharding")
    names = names.partitions if isinstance(names, PartitionSpec) else names
    return tuple(names) if isinstance(names, tuple | list) and len(names) == rank else ()


_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)


def _shapes(layer: object) -> Mapping[str, Sequence[int | None]]:
    """Returns the shapes of the parameters of a layer of Flax, by attribute; None is any size."""
    cls = next((cls for cls in type(layer).__mro__ if cls in _SHAPES), None)
    return {} if cls is None else _SHAPES[cls](layer)


def _norm_shapes(layer: Any) -> dict[str, Any]:
    is_grouped = isinstance(layer, nnx.GroupNorm)  # which does not keep their number
    features = layer.num_groups * layer.group_size if is_grouped else layer.num_features
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
