"""Where the tensors of a file belong in a model, and how their dimensions are arranged there."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .tensor_files import Region

# The axes that each dimension is made of.
Dimensions: TypeAlias = list[list[str]]

_NAME, _INDEX = r"[A-Za-z_]\w*", r"\{\d+\}"


@dataclasses.dataclass(frozen=True, init=False)
class Tensor:
    r"""The array of a model that a tensor of a safetensors file belongs to.

    ``dimensions`` is written as for ``einops.rearrange``: first the dimensions of the tensor, then
    those of the array, by names of axes; parentheses make one dimension of several axes.

    - ``"out in -> in out"`` transposes.
    - ``"(h d) e -> e h d", h=32`` splits rows into heads.
    - ``"(h d two) e -> (h two d) e", h=32, two=2`` permutes the rows of each head.
    - ``"out in -> {1} in out"`` stacks; the second group of the pattern is the first index.
    - ``"(h d) e -> e h d", h=48, take={"h": slice(0, 32)}`` takes 32 heads of a fused tensor of 48.
    - ``"out in -> in out", put={"out": slice(0, 64)}`` fills 64 columns of an array that several
      tensors share.

    Args:
      path: the path of the array, such as ``blocks/{0}/up/kernel``, where ``{0}`` is the first
        group of the pattern that matched the name of the tensor.
      dimensions: how the dimensions of the tensor become those of the array; None if they are the
        same. ``{0}`` among those of the array is an index by a group of the pattern.
      take: for axes of which the array has only a part, a slice of the tensor; or an index, for
        axes that the array does not have.
      put: for axes of which the tensor has only a part, a slice of the array; or an index, for axes
        that the tensor does not have. Of several axes in one dimension, only the first can be in
        ``put``.
      **sizes: the sizes of axes in the tensor. One axis of each dimension of the array may be left
        out, unless ``take`` has it.

    Raises:
      ValueError: ``dimensions``, ``take`` or ``put`` cannot be understood, or do not fit together.

    Example:
      >>> from nnx_sharding.checkpoint import Tensor
      >>> rules = {
      ...     r"embed\.weight": "embed/embedding",
      ...     r"layers\.(\d+)\.q\.weight": Tensor("blocks/{0}/q/kernel", "(h d) e -> e h d", h=8),
      ... }
    """

    path: str
    dimensions: str | None
    take: Mapping[str, slice | int]
    put: Mapping[str, slice | int]
    sizes: Mapping[str, int]

    def __init__(
        self,
        path: str,
        dimensions: str | None = None,
        *,
        take: Mapping[str, slice | int] | None = None,
        put: Mapping[str, slice | int] | None = None,
        **sizes: int,
    ):
        for name, value in {"take": take or {}, "put": put or {}, "sizes": sizes}.items():
            object.__setattr__(self, name, dict(value))
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "dimensions", dimensions)
        self._check()

    def _check(self) -> None:
        def refuse(reason: str) -> None:
            raise ValueError(f"Tensor({self.path!r}, {self.dimensions!r}): {reason}.")

        if self.dimensions is None:
            if self.take or self.put or self.sizes:
                refuse("take, put and sizes need names of axes, as in 'out in -> in out'")
            return
        sides = self.dimensions.split("->")
        one = rf"(?:{_NAME}|{_INDEX})"
        form = rf"\s*(?:(?:{one}|\((?:\s*{_NAME})+\s*\))\s*)*"
        if len(sides) != 2 or not all(re.fullmatch(form, side) for side in sides):
            refuse("expected dimensions such as '(h d) e -> e h d'")
        left, right = (names_in(side) for side in self.sides(0))
        for names in left, right:
            if len(set(names)) < len(names):
                refuse("an axis is named twice on one side")
        if re.search(_INDEX, sides[0]):
            refuse("an index such as {0} belongs to the dimensions of the array, after '->'")
        of_tensor = {name for name in left if isinstance(self.take.get(name), int)}
        of_array = {name for name in right if isinstance(self.put.get(name), int)}
        of_array |= {name for name in right if name.startswith("{")}
        if different := (set(left) - of_tensor) ^ (set(right) - of_array):
            refuse(f"on one side only: {', '.join(sorted(different))}")
        if unknown := [n for n in {**self.take, **self.sizes} if n not in left]:
            refuse(f"the tensor has no axis {', '.join(unknown)}")
        if unknown := [n for n in self.put if n not in right]:
            refuse(f"the array has no axis {', '.join(unknown)}")
        if unsized := [n for n in self.take if n not in self.sizes]:
            refuse(f"give the size in the tensor of {', '.join(unsized)}")
        inner = {name for group in self.sides(0)[1] for name in group[1:]}
        if inner & {*self.put}:
            refuse("only the first axis of a dimension can be in put")
        for option in {**self.take, **self.put}.values():
            is_range = isinstance(option, slice) and option.step in (None, 1)
            if not isinstance(option, int) and not (
                is_range and 0 <= (option.start or 0) < (option.stop or 0)
            ):
                refuse(f"expected an index or a slice with start < stop, got {option!r}")

    def sides(self, rank: int) -> tuple[Dimensions, Dimensions]:
        """The axes of each dimension of the tensor, and of an array of this rank."""
        if self.dimensions is None:
            names = [[f"axis{i}"] for i in range(rank)]
            return names, names
        left, right = (
            [re.findall(_NAME, word) or [word] for word in re.findall(r"\(.*?\)|[^\s()]+", side)]
            for side in self.dimensions.split("->")
        )
        return left, right

    def place(self, name: str, groups: Sequence[str], shape: Sequence[int]) -> Placement:
        """The place of a tensor in an array of this shape.

        Raises:
          ValueError: the dimensions do not fit the shape.
        """
        left, right = self.sides(len(shape))
        if len(right) != len(shape):
            raise ValueError(f"{len(right)} dimensions in {self.dimensions!r}")
        axes: dict[str, Axis] = {}
        for names, size in zip(right, shape, strict=True):
            known = {axis: self._known(axis) for axis in names}
            product = math.prod(n for n in known.values() if n is not None)
            free = [axis for axis, n in known.items() if n is None]
            if len(free) > 1:
                raise ValueError(f"give the size of {' or '.join(free)} in {self.dimensions!r}")
            if size % product or (not free and size != product):
                product_text = " × ".join(f"{axis} ({known[axis] or '?'})" for axis in names)
                raise ValueError(f"{size} is not {product_text}")
            for axis in names:
                axes[axis] = self._axis(axis, known[axis] or size // product, groups)
        for axis in names_in(left):
            if axis not in axes:
                axes[axis] = Axis(self.sizes[axis], _bounds(self.take[axis])[0], 0, 0, 1)
        return Placement(name, left, right, axes)

    def _known(self, axis: str) -> int | None:
        """The size of an axis in the array, if it is known without the array."""
        if axis in self.put or axis.startswith("{"):
            return None
        if axis in self.take:
            first, last = _bounds(self.take[axis])
            return last - first
        return self.sizes.get(axis)

    def _axis(self, axis: str, size: int, groups: Sequence[str]) -> Axis:
        index = int(groups[int(axis[1:-1])]) if axis.startswith("{") else self.put.get(axis)
        start, end = (0, size) if index is None else _bounds(index)
        if end > size:
            raise ValueError(
                f"{axis} has the size {size} in the array, and the tensor is {start}:{end}"
            )
        is_new = isinstance(index, int)
        begin, stop = _bounds(self.take[axis]) if axis in self.take else (0, end - start)
        total = self.sizes[axis] if axis in self.take else end - start
        if stop > total or stop - begin != end - start:
            raise ValueError(f"{axis}: {begin}:{stop} of {total} does not fit {start}:{end}")
        return Axis(0 if is_new else total, begin, size, start, end - start)


def _bounds(x: Any) -> tuple[int, int]:
    return (x, x + 1) if isinstance(x, int) else (x.start or 0, x.stop)


def names_in(dimensions: Dimensions) -> list[str]:
    """The axes of all dimensions."""
    return [*itertools.chain(*dimensions)]


class Axis(NamedTuple):
    """One axis: its size in the tensor and in the array, and the part that both have."""

    tensor_size: int
    tensor_start: int
    array_size: int
    array_start: int
    length: int


class Piece(NamedTuple):
    """A box of an array that is also a box of a tensor, viewed with one dimension for each axis."""

    array: tuple[slice, ...]
    tensor: Region


@dataclasses.dataclass
class Placement:
    """A tensor in an array of a certain shape."""

    name: str
    left: Dimensions
    right: Dimensions
    axes: Mapping[str, Axis]

    @property
    def tensor_axes(self) -> list[int]:
        """The sizes of the axes of the tensor."""
        return [self.axes[name].tensor_size for name in names_in(self.left)]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that the tensor has to have."""
        return tuple(math.prod(self.axes[n].tensor_size for n in names) for names in self.left)

    @property
    def region(self) -> list[tuple[int, int]]:
        """The region of the array that the tensor fills."""
        region = []
        for first, *rest in self.right:
            axis, inner = self.axes[first], math.prod(self.axes[n].array_size for n in rest)
            region.append((axis.array_start * inner, (axis.array_start + axis.length) * inner))
        return region

    def pieces(self, wanted: Region) -> Iterator[Piece]:
        """The boxes of the tensor within a region of the array."""
        ranges = []
        for names, (first, last), (start, end) in zip(self.right, self.region, wanted, strict=True):
            low, high = max(first, start), min(last, end)
            if low >= high:
                return
            lengths = [self.axes[name].length for name in names]
            ranges.append([(first, box) for box in _boxes(low - first, high - first, lengths)])
        for combined in itertools.product(*ranges):
            within, slices = {}, []
            for names, (first, box) in zip(self.right, combined, strict=True):
                begin, count = first, 1
                for name, (low, high) in zip(reversed(names), reversed(box), strict=True):
                    within[name] = (low, high)
                    begin += low * count
                    count *= self.axes[name].length
                slices.append(slice(begin, begin + math.prod(high - low for low, high in box)))
            region = []
            for name in names_in(self.left):
                low, high = within.get(name, (0, 1))
                begin = self.axes[name].tensor_start
                region.append((begin + low, begin + high))
            yield Piece(tuple(slices), region)

    def to_array(self, data: Any) -> Any:
        """A box of the tensor, arranged as in the array."""
        names = names_in(self.left)
        order = [names.index(n) for n in names_in(self.right) if n in names]
        alone = [i for i in range(len(names)) if i not in order]
        sizes = dict(zip(names, data.shape, strict=True))
        shape = [math.prod(sizes.get(name, 1) for name in group) for group in self.right]
        return data.transpose(*alone, *order).reshape(shape)

    def to_tensor(self, data: Any, region: Region) -> Any:
        """A box of the array, arranged as in this region of the tensor."""
        names = names_in(self.left)
        order = [name for name in names_in(self.right) if name in names]
        order = [name for name in names if name not in order] + order
        lengths = [last - first for first, last in region]
        shape = [lengths[names.index(name)] for name in order]
        return data.reshape(shape).transpose([order.index(name) for name in names])


def _boxes(start: int, end: int, sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """A range of a flat index as boxes of an array of these sizes, in order."""
    inner = math.prod(sizes[1:])
    first, last = start // inner, end // inner
    if len(sizes) == 1 or (start % inner == 0 and end % inner == 0):
        yield [(first, last), *((0, size) for size in sizes[1:])]
        return
    if start % inner:
        stop = min(end, (first + 1) * inner)
        for box in _boxes(start % inner, stop - first * inner, sizes[1:]):
            yield [(first, first + 1), *box]
        start, first = stop, first + 1
    if first < last:
        yield [(first, last), *((0, size) for size in sizes[1:])]
        start = last * inner
    if start < end:
        for box in _boxes(0, end - last * inner, sizes[1:]):
            yield [(last, last + 1), *box]


def gaps(shape: Sequence[int], placements: Sequence[Placement]) -> list[str]:
    """The parts of an array that no tensor fills, or more than one does."""
    if not placements:
        return [""]
    regions = [placement.region for placement in placements]
    edges = [sorted({0, n, *(e for r in regions for e in r[i])}) for i, n in enumerate(shape)]
    count = np.zeros([len(each) - 1 for each in edges], np.int32)
    for region in regions:
        box = zip(edges, region, strict=True)
        count[tuple(slice(each.index(first), each.index(last)) for each, (first, last) in box)] += 1
    texts = []
    for fault, what in ((count == 0, "no tensor"), (count > 1, "several tensors")):
        for index in np.argwhere(fault)[:1]:
            bounds = (f"{each[i]}:{each[i + 1]}" for each, i in zip(edges, index, strict=True))
            texts.append(f": {what} for [{', '.join(bounds)}]")
    return texts
