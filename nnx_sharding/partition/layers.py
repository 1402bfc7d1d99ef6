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
the flattened model (``Flat``). A *known* Variable is a parameter of a layer of Flax, whose shape
for one layer is known. Of the dimensions of stacked layers, those of a `Stack` come first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
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

    axes: tuple[int, ...]  # as in `vmap(out_axes=…)`: negative if counted from the back
    sizes: tuple[int, ...]  # the number of layers along each

    def dimensions(self, shape: Shape) -> tuple[int, ...] | None:
        """Returns the dimensions of a shape along these axes; None if other sizes are there."""
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

    path: Path  # from its layer, or in the model
    layer: int  # the index of that
    variable: nnx.Variable[Any]
    shape: Shape
    candidates: Set[tuple[int, ...]]  # the dimensions that may be stacked layers, by shape

    def axes(self, count: int) -> set[_Axes]:
        """Returns the axes that ``count`` nested transforms may have given to the Variable.

        Of the kernel (256, 8, 1024) of a ``Linear(256, 1024)``, one transform gave the axis 1 or,
        counted from the back, -2. These may be the axes of other Variables of its class, too.
        """
        # A candidate has a dimension for each transform around the layer; these may be fewer, those
        # around a module that holds several layers.
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

    The constructor looks at the whole model: it compares the layers of Flax, which know their
    shapes, and what transforms may have done to them. :meth:`find` then answers for one array.

    Its private attributes:

        _stack_counts   by slot, how many first dimensions of the array are those of a `Stack`
        _slots          by the id of a Variable, the slots of its arrays; empty without a `Stack`
        _norms          the ids of the Variables of normalization layers
        _resolved       by the id of a known Variable, what was found for it
        _common_axes    by the path of a module, and by class: the axes that transforms may have
                        given to all known Variables of this class in the module
        _names          the names that metadata give to dimensions of layers, such as ``layers``
    """

    def __init__(self, flat: Flat):
        """Compares the shapes of all layers of Flax in a flattened model."""
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

        known = list(self._known_variables(flat))  # this fills `_norms`, too
        # Without any candidate but (), no layer is stacked. That is so in most models, and nothing
        # of the following is needed.
        is_any_stacked = any(candidate for x in known for candidate in x.candidates)
        if is_any_stacked:
            paths = flat.structure.paths_to_objects([((), flat.structure.root)])
            # A shared layer has several paths, of which the first counts.
            path_of_layer = {i: tuple(map(plain_key, found[0])) for i, found in paths.items()}
            # From paths in the layer, ("kernel",), to those in the model.
            known = [x._replace(path=(*path_of_layer[x.layer], *x.path)) for x in known]
            self._find_common_axes(known)  # of all, before any of them is decided
            for variable in known:
                self._resolve(variable)
        # Among parameters of Flax's layers, the dimension of layers may be known by having no name.
        # In other Variables, any dimension may have none.
        self._names.discard(None)

    def is_norm(self, subject: object) -> bool:
        """Whether a Variable is a parameter or a statistic of a normalization layer."""
        return _compat.identity(subject) in self._norms

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
        in_stack = tuple(range(self._stack_counts.get(slots[0], 0)))  # a `Stack` has them first
        # 1. Names in its metadata: of the dimensions of an array, some are names for layers.
        names = _names(subject, len(shape))
        named = {d for d, name in enumerate(names) if name in self._names}
        if named:
            return Stacked(tuple(sorted(named.union(in_stack))))
        # 2. A parameter of a layer of Flax, which has been compared with the shape for one layer.
        resolved = self._resolved.get(_compat.identity(subject))
        if resolved is not None:
            return resolved
        # 3. The axes that known Variables in the closest module around it have in common. Modules
        # further out say less, as they hold layers that are stacked in different ways.
        modules_around = (path[:length] for length in reversed(range(len(path))))
        closest = None
        if self._common_axes:  # in most models no layer is stacked
            closest = next((x for x in modules_around if x in self._common_axes), None)
        if closest is not None:
            like_neighbors = self._follow_neighbors(self._common_axes[closest], subject, shape)
            # In a `Stack`, these include its dimensions. Only if there are more of them, those of a
            # `vmap`, do they say more than the `Stack` itself.
            if len(like_neighbors.dimensions) > len(in_stack):
                return like_neighbors
        # 4. The `Stack` around it, if any.
        return Stacked(in_stack)

    def _known_variables(self, flat: Flat) -> Iterator[_KnownVariable]:
        """Yields the parameters of Flax's layers, with the dimensions that may be stacked layers.

        Also fills ``_norms`` with those of normalization layers.
        """
        for index, layer in enumerate(flat.objects):
            is_norm = isinstance(layer, _NORMS)
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
                path_in_layer = (name,)  # the constructor puts that of the layer before it
                yield _KnownVariable(path_in_layer, index, variable, shape, candidates)

    def _find_common_axes(self, known: Sequence[_KnownVariable]) -> None:
        """Fills ``_common_axes``: which axes may all Variables of a class in a module have?

        A transform gives all Variables of a class the same axis, counted from one end.
        """
        groups: dict[tuple[Path, type], list[_KnownVariable]] = {}
        for x in known:
            for length in range(len(x.path)):  # each module around the Variable
                groups.setdefault((x.path[:length], type(x.variable)), []).append(x)
        for (module_path, cls), members in groups.items():
            # The number of transforms around all of the module is that of its Variable with the
            # fewest dimensions of layers. Others in it may be stacked once more.
            count = min(len(candidate) for x in members for candidate in x.candidates)
            common = set.intersection(*(x.axes(count) for x in members))
            self._common_axes.setdefault(module_path, {})[cls] = common

    def _resolve(self, known: _KnownVariable) -> None:
        """Decides which dimensions of a parameter of Flax's layers are stacked layers.

        Its candidates, which are possible by shape, are reduced to those that agree with the other
        Variables of its class, and then to those that the metadata name. What the metadata call
        the dimensions that are found is a name for layers from then on: for the parameters that are
        decided after this one, in the order of the model, and for all that :meth:`find` is asked.
        """
        remaining = self._agreeing_with_others(known)
        names = _names(known.variable, len(known.shape))  # such as ("embed", "layers", "mlp")
        if names:
            named = {
                candidate
                for candidate in remaining
                # The candidate () is that of a parameter that is not stacked.
                if candidate and all(names[d] in self._names for d in candidate)
            }
            remaining = named or remaining
        stacked = Stacked.from_candidates(remaining)
        self._resolved[_compat.identity(known.variable)] = stacked
        if names and not stacked.is_ambiguous:
            self._names.update(names[d] for d in stacked.dimensions)  # None, if it has no name

    def _agreeing_with_others(self, known: _KnownVariable) -> Set[tuple[int, ...]]:
        """Returns the candidates with axes that all Variables of the class have in common.

        Each module around the parameter is asked, from the whole model to the layer itself.
        """
        remaining = known.candidates
        for length in range(len(known.path)):
            # The axes of this class in the module, each as dimensions of this parameter; None if
            # its shape has other sizes there.
            common = self._common_axes[known.path[:length]][type(known.variable)]
            allowed = [axes.dimensions(known.shape) for axes in common]
            agreeing: set[tuple[int, ...]] = set()
            for dimensions in allowed:
                if dimensions is not None:
                    # A candidate may have more dimensions: those of transforms within the module.
                    agreeing.update(c for c in remaining if set(c).issuperset(dimensions))
            # None agrees in a module that was put together from layers stacked in different ways.
            remaining = agreeing or remaining
        return remaining

    def _follow_neighbors(
        self, common_axes: Mapping[type, Set[_Axes]], subject: object, shape: Shape
    ) -> Stacked:
        """Finds the stacked dimensions of a user's Variable by those of Flax's layers beside it.

        Args:
          common_axes: by class of Variables, the axes that transforms may have given to all known
            Variables in the module around this one.
          subject: the Variable or bare array.
          shape: its shape.
        """
        cls = type(subject)
        is_known_class = cls in common_axes
        axes = common_axes[cls] if is_known_class else set().union(*common_axes.values())
        # The dimensions of this shape along these axes; None if it has other sizes there.
        found = {x.dimensions(shape) for x in axes}
        candidates = {dimensions for dimensions in found if dimensions is not None}
        if not is_known_class:
            # Each class may have axes of its own, `StateAxes({nnx.Param: 1, ...: 0})`, and 0 is the
            # most common: so the first dimensions are candidates, too, if they have the sizes.
            for sizes in {x.sizes for x in axes}:
                if shape[: len(sizes)] == sizes:
                    candidates.add(tuple(range(len(sizes))))
        return Stacked.from_candidates(candidates)


def _candidates(
    shape: Shape, layer_shape: Sequence[int | None], stack_count: int
) -> Set[tuple[int, ...]]:
    """Returns the choices of dimensions that may be stacked layers, by shape alone.

    Without the dimensions of a choice, the shape for one layer remains. For the shape (8, 8, 4) and
    the layer's (8, 4), these are ``{(0,), (1,)}``.

    Args:
      shape: the shape of a parameter.
      layer_shape: that for one layer, in which None is any size.
      stack_count: how many first dimensions are those of a `Stack`, which every choice has.
    """
    extra = len(shape) - len(layer_shape)
    if extra <= 0:  # not stacked; or a subclass gives it fewer dimensions, and nothing is known
        return {()}
    in_stack = set(range(stack_count))
    candidates = set()
    for removed in itertools.combinations(range(len(shape)), extra):
        rest = [size for d, size in enumerate(shape) if d not in removed]
        pairs = zip(rest, layer_shape, strict=True)
        if in_stack.issubset(removed) and all(want in (None, size) for size, want in pairs):
            candidates.add(removed)
    # Without any, a subclass gives its parameter another shape. Its first dimensions are then most
    # likely those of the layers.
    return candidates or {tuple(range(extra))}


def _names(subject: object, rank: int) -> tuple[Any, ...]:
    """Returns the names that metadata give the dimensions; ``()`` unless each has an entry."""
    metadata = subject.get_metadata() if _compat.is_any_variable(subject) else {}
    names = metadata.get("out_sharding")
    names = names.partitions if isinstance(names, PartitionSpec) else names
    return tuple(names) if isinstance(names, tuple | list) and len(names) == rank else ()


_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)


def _shapes(layer: object) -> Mapping[str, Sequence[int | None]]:
    """Returns the shapes of the parameters of a layer of Flax, by attribute; None is any size."""
    kind: Any = type(layer)
    cls = _layer_class(kind)
    return {} if cls is None or not has_sizes(layer, cls) else _SHAPES[cls](layer)


def has_sizes(layer: object, cls: type) -> bool:
    """Whether a layer has the sizes that the constructor of its class of Flax keeps.

    A subclass that does not call ``super().__init__`` has not, and counts as a user's class.
    """
    return all(hasattr(layer, name) for name in _SIZES.get(cls, ()))


# The attributes that are read of each layer: here, and by the rules of tensor parallelism.
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
    # None is any size: a subclass that does not call `super().__init__` is a norm all the same.
    features = getattr(layer, "num_features", None)
    if hasattr(layer, "group_size"):  # of `nnx.GroupNorm`, which does not keep their number
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
