"""Which dimensions of a Variable are those of stacked layers, which a loop slices.

A ``Stack`` has them first. ``vmap`` and ``scan`` put them where their axes say, which Variables do
not tell. But a layer of Flax knows the shapes of its parameters, and what a parameter has beyond
its shape are layers:

    nnx.Linear(256, 1024)   kernel (256, 8, 1024)   bias (8, 1024)   → dimension 1, dimension 0

Equal sizes leave several candidates. All Variables of a class get the same axis from one ``vmap``,
counted from the front or from the back, so of the candidates below a module those remain that all
known Variables of the class have in common. Other Variables, of a user's own modules, follow the
known ones beside them. A name in the metadata that a known dimension of layers has, or ``layers``,
which Flax's users declare as ``nnx.PARTITION_NAME``, decides before all sizes.

What is then still one of several is `Stacked.is_ambiguous`, and none of the candidates is sharded.
A model without any of these signs counts as not stacked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from flax import nnx
from jax.sharding import PartitionSpec

from ..core.flatten import Flat
from ..specs.paths import Path, plain_key
from ..transforms.stack import layer_dimensions

Shape: TypeAlias = tuple[int, ...]
# What Flax's guides and MaxText call the dimension of layers.
_COMMON_NAME = "layers"


class Stacked(NamedTuple):
    """The dimensions of an array that are those of layers, or may be."""

    dimensions: tuple[int, ...] = ()
    is_ambiguous: bool = False  # some of them are not

    @classmethod
    def of(cls, candidates: Set[tuple[int, ...]]) -> Stacked:
        """One of several tuples of dimensions."""
        union = {d for candidate in candidates for d in candidate}
        return cls(tuple(sorted(union)), len(candidates) > 1)


class _Axes(NamedTuple):
    """Axes that transforms may have given to all Variables of a class, from the front or back."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def dimensions(self, shape: Shape) -> tuple[int, ...] | None:
        """The dimensions of a shape along these axes; None if it has others there."""
        found = tuple(axis if axis >= 0 else axis + len(shape) for axis in self.axes)
        fits = all(0 <= d < len(shape) for d in found) and len({*found}) == len(found)
        same = fits and tuple(shape[d] for d in found) == self.sizes
        return tuple(sorted(found)) if same else None


class _Known(NamedTuple):
    """A parameter of a layer of Flax, with the tuples of dimensions that may be those of layers."""

    path: Path
    variable: nnx.Variable[Any]
    shape: Shape
    candidates: Set[tuple[int, ...]]

    def axes(self, count: int) -> set[_Axes]:
        """The axes of ``count`` transforms that are possible."""
        chosen = {c for x in self.candidates for c in itertools.combinations(x, count)}
        ends = (0, len(self.shape))  # of two nested transforms, one may count from each
        return {
            _Axes(axes, tuple(self.shape[d] for d in dimensions))
            for dimensions in chosen
            for axes in itertools.product(*([d - end for end in ends] for d in dimensions))
        }


class LayerDimensions:
    """The dimensions of layers in all arrays of a flattened model."""

    def __init__(self, flat: Flat):
        self._counts = layer_dimensions(flat)  # those of a Stack, by slot
        self._slots = {
            id(x): flat.structure.slots[i]
            for i, x in enumerate(flat.objects)
            if isinstance(x, nnx.Variable)
        }
        self._norms: set[int] = set()  # by id, the Variables of normalization layers
        known = [*self._known(flat)]
        self._axes: dict[Path, dict[type, set[_Axes]]] = {}
        self._names = {_COMMON_NAME}
        self._resolved: dict[int, Stacked] = {}
        if any(len(c) > 0 for x in known for c in x.candidates):
            self._compare(known)
            for x in known:
                self._resolved[id(x.variable)] = stacked = Stacked.of(self._remaining(x))
                if not stacked.is_ambiguous:
                    names = _names(x.variable, len(x.shape))
                    self._names.update(names[d] for d in stacked.dimensions if names)
        self._names.discard(None)

    def is_norm(self, subject: Any) -> bool:
        """Whether a Variable is a parameter or a statistic of a normalization layer."""
        return id(subject) in self._norms

    def of(self, path: Path, subject: Any, slots: Sequence[int], shape: Shape) -> Stacked:
        """Finds the dimensions of layers of a Variable or array at a path.

        The first that tells them decides: a declared name of an axis, the shapes that the layer
        itself knows, an equal Variable beside it (for what optimizers keep), the `Stack` around it.
        """
        stack = Stacked(tuple(range(self._counts.get(slots[0], 0))))
        names = _names(subject, len(shape))
        named = tuple(d for d, name in enumerate(names) if name in self._names)
        if named:
            return Stacked(tuple(sorted({*named, *stack.dimensions})))
        if id(subject) in self._resolved:
            return self._resolved[id(subject)]
        for prefix in (path[:count] for count in range(len(path) - 1, -1, -1)):
            if prefix in self._axes:
                beside = self._beside(self._axes[prefix], subject, shape)
                return beside if len(beside.dimensions) > len(stack.dimensions) else stack
        return stack

    def _known(self, flat: Flat) -> Iterator[_Known]:
        layers = {i: x for i, x in enumerate(flat.objects) if _shapes(x)}
        paths = flat.structure.paths_to_objects([((), flat.structure.root)]) if layers else {}
        for index, layer in layers.items():
            path = tuple(map(plain_key, paths[index][0]))
            for name, inner in _shapes(layer).items():
                variable = getattr(layer, name, None)
                value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
                shape = getattr(value, "shape", None)
                if isinstance(layer, _NORMS):
                    self._norms.add(id(variable))
                if isinstance(variable, nnx.Variable) and shape is not None:
                    slots = self._slots.get(id(variable), ())
                    count = self._counts.get(slots[0], 0) if slots else 0
                    yield _Known((*path, name), variable, shape, _beyond(shape, inner, count))

    def _compare(self, known: Sequence[_Known]) -> None:
        """Notes, for each module and class of Variables, the axes that all of them may have."""
        groups: dict[tuple[Path, type], list[_Known]] = {}
        for x in known:
            for count in range(len(x.path)):
                groups.setdefault((x.path[:count], type(x.variable)), []).append(x)
        for (prefix, kind), members in groups.items():
            # Below the outer one of nested stacks, some have more dimensions of layers.
            count = min(len(c) for x in members for c in x.candidates)
            common = set.intersection(*(x.axes(count) for x in members))
            self._axes.setdefault(prefix, {})[kind] = common

    def _remaining(self, x: _Known) -> Set[tuple[int, ...]]:
        """The candidates that agree with what surrounding modules have in common."""
        remaining = x.candidates
        for count in range(len(x.path)):
            common = self._axes[x.path[:count]][type(x.variable)]
            places = (axes.dimensions(x.shape) for axes in common)
            allowed = [set(place) for place in places if place is not None]
            agreeing = {c for c in remaining if any(place <= set(c) for place in allowed)}
            remaining = agreeing or remaining
        names = _names(x.variable, len(x.shape))
        named = {c for c in remaining if c and all(names and names[d] in self._names for d in c)}
        return named or remaining

    def _beside(self, axes: Mapping[type, Set[_Axes]], subject: Any, shape: Shape) -> Stacked:
        """The dimensions of a Variable whose own shape is not known."""
        kind = type(subject)
        chosen = axes[kind] if kind in axes else set().union(*axes.values())
        found = {place for x in chosen if (place := x.dimensions(shape)) is not None}
        if kind not in axes:  # a transform may have other axes for other classes
            sizes = {x.sizes for x in chosen}
            found |= {tuple(range(len(size))) for size in sizes if shape[: len(size)] == size}
        return Stacked.of(found)


def _beyond(shape: Shape, inner: Sequence[int | None], count: int) -> Set[tuple[int, ...]]:
    """The dimensions that a shape may have beyond an inner one, of which None is any size.

    The first ``count`` are known to be.
    """
    extra = len(shape) - len(inner)
    if extra <= 0:
        return {()}

    def fits(removed: tuple[int, ...]) -> bool:
        rest = (size for d, size in enumerate(shape) if d not in removed)
        pairs = zip(rest, inner, strict=True)
        return all(size in (None, own) for own, size in pairs) and {*range(count)} <= {*removed}

    found = set(filter(fits, itertools.combinations(range(len(shape)), extra)))
    return found or {tuple(range(extra))}  # a subclass with a shape of its own


def _names(subject: Any, rank: int) -> tuple[Any, ...]:
    """The names that the metadata of a Variable give its dimensions; none unless to all."""
    metadata = subject.get_metadata() if isinstance(subject, nnx.Variable) else {}
    names = metadata.get("out_sharding")
    names = names.partitions if isinstance(names, PartitionSpec) else names
    return tuple(names) if isinstance(names, tuple | list) and len(names) == rank else ()


_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)


def _shapes(layer: Any) -> Mapping[str, Sequence[int | None]]:
    """The shapes of the parameters of a known layer, by attribute; None is any size."""
    kind = next((kind for kind in type(layer).__mro__ if kind in _SHAPES), None)
    return {} if kind is None else _SHAPES[kind](layer)


def _of_norm(layer: Any) -> dict[str, Any]:
    is_grouped = isinstance(layer, nnx.GroupNorm)  # which does not keep their number
    features = layer.num_groups * layer.group_size if is_grouped else layer.num_features
    return dict.fromkeys(("scale", "bias", "mean", "var"), (features,))


def _of_linear_general(layer: Any) -> dict[str, Any]:
    batch = tuple(layer.batch_axis.values())
    outputs = (*batch, *layer.out_features)
    return {"kernel": (*batch, *layer.in_features, *layer.out_features), "bias": outputs}


def _of_einsum(layer: Any) -> dict[str, Any]:
    bias = {} if layer.bias_shape is None else {"bias": layer.bias_shape}
    return {"kernel": layer.kernel_shape, **bias}


def _of_convolution(layer: Any) -> dict[str, Any]:
    return {"kernel": layer.kernel_shape, "bias": (layer.out_features,)}


_SHAPES: dict[type, Callable[[Any], Mapping[str, Any]]] = {
    **dict.fromkeys(_NORMS, _of_norm),
    nnx.Linear: lambda x: {"kernel": (x.in_features, x.out_features), "bias": (x.out_features,)},
    nnx.LinearGeneral: _of_linear_general,
    nnx.Einsum: _of_einsum,
    nnx.Embed: lambda x: {"embedding": (x.num_embeddings, x.features)},
    nnx.LoRA: lambda x: {"lora_a": (x.in_features, None), "lora_b": (None, x.out_features)},
    nnx.Conv: _of_convolution,
    nnx.ConvTranspose: _of_convolution,
}
