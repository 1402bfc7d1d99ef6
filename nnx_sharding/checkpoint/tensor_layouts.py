"""How the dimensions of a tensor become those of an array: the axes that both consist of.

``"(h d) e -> e h d"`` names three axes. The tensor has them in two dimensions, the array in three.
Each axis has a size on both sides and a range that both have, so one description serves taking a
part of a tensor, filling a part of an array, splitting, merging, transposing and stacking:

    axis          tensor           array
    h, taken      ....[####]..     [####]         the array has a part of the tensor's axis
    h, put        [####]           ..[####]....   the tensor has a part of the array's axis
    an index      (none)           ..#.....       an axis that one side lacks has the size 0 there
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .tensor_files import Box, Region

# The axes that each dimension is made of.
Dimensions: TypeAlias = list[list[str]]


def names_in(dimensions: Dimensions) -> list[str]:
    """Returns the axes of all dimensions, in order."""
    return [*itertools.chain(*dimensions)]


class Axis(NamedTuple):
    """One axis: its size in the tensor and in the array, and the part that both have."""

    tensor_size: int
    tensor_start: int
    array_size: int
    array_start: int
    length: int


@dataclasses.dataclass
class Placement:
    """Which part of a tensor is which part of an array of a certain shape.

    Attributes:
      name: of the tensor.
      left: the axes of each dimension of the tensor.
      right: those of each dimension of the array.
      axes: the sizes and parts of all axes, by name.
    """

    name: str
    left: Dimensions
    right: Dimensions
    axes: Mapping[str, Axis]

    def inverse(self, name: str) -> Placement:
        """Returns the place of the array, as a tensor of this name, in the tensor."""
        swapped = {
            axis: Axis(x.array_size, x.array_start, x.tensor_size, x.tensor_start, x.length)
            for axis, x in self.axes.items()
        }
        return Placement(name, self.right, self.left, swapped)

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether the array is the tensor."""
        are_whole = all(x.tensor_size == x.array_size == x.length for x in self.axes.values())
        return are_whole and self.left == self.right

    def arranged(self, tensor: Any) -> Any:
        """Returns what the array has of a tensor of NumPy or JAX, one dimension for each axis.

        These are in the order of the array, and last those of which it has one index.
        """
        left, right = names_in(self.left), names_in(self.right)
        shared = [name for name in right if name in left]
        indexed = [name for name in left if name not in right]  # of length 1
        axes = [self.axes[name] for name in left]
        parts = [slice(axis.tensor_start, axis.tensor_start + axis.length) for axis in axes]
        x = tensor.reshape([axis.tensor_size for axis in axes])  # left axes, whole
        x = x[tuple(parts)]  # left axes, of their lengths
        return x.transpose([left.index(name) for name in (*shared, *indexed)])

    @functools.cached_property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that the tensor has to have."""
        return tuple(
            math.prod(self.axes[name].tensor_size for name in names) for names in self.left
        )

    @functools.cached_property
    def region(self) -> list[tuple[int, int]]:
        """The region of the array that the tensor fills: of each dimension, its outer axis."""
        region = []
        for outer, *rest in self.right:
            axis, inner = self.axes[outer], math.prod(self.axes[name].array_size for name in rest)
            region.append((axis.array_start * inner, (axis.array_start + axis.length) * inner))
        return region

    def overlaps(self, other: Placement) -> bool:
        """Whether both fill some of the same elements of one array."""
        pairs = zip(self.region, other.region, strict=True)
        return all(first < end and start < last for (first, last), (start, end) in pairs)

    def pieces(self, wanted: Region) -> Iterator[Piece]:
        """Splits what a region of the array shares with the tensor into boxes of the tensor.

        There are several where the region is no range of each axis: of the axes 3 and 4 in one
        dimension, the elements 2 to 11 are three boxes (`_split`).
        """
        if self.is_identity:  # as for most tensors: the region is the box
            shape = [end - start for start, end in wanted]
            if 0 not in shape:
                place = tuple(slice(0, size) for size in shape)
                yield Piece(place, Box(self.tensor_shape, wanted), shape, range(len(shape)))
            return
        splits: list[list[_Range]] = []  # for each dimension of the array
        for names, (first, last), (start, end) in zip(self.right, self.region, wanted, strict=True):
            lengths = [self.axes[name].length for name in names]
            # Counted from where the tensor begins in the dimension, then from the wanted region.
            split = _split(max(first, start) - first, min(last, end) - first, lengths)
            splits.append([part.shifted(first - start) for part in split])
        left, right = names_in(self.left), names_in(self.right)
        shared = [name for name in left if name in right]
        order = [shared.index(name) for name in right if name in shared]
        sizes = tuple(self.axes[name].tensor_size for name in left)
        for parts in itertools.product(*splits):  # a part of each dimension
            ranges = itertools.chain(*(part.by_axis for part in parts))
            by_name = dict(zip(right, ranges, strict=True))
            box = []
            for name in left:
                first, last = by_name.get(name, (0, 1))  # an axis of the tensor alone is an index
                offset = self.axes[name].tensor_start
                box.append((offset + first, offset + last))
            place = tuple(slice(part.start, part.stop) for part in parts)
            lengths = [by_name[name][1] - by_name[name][0] for name in shared]
            yield Piece(place, Box(sizes, box), lengths, order)


class Piece(NamedTuple):
    """A box of a tensor, and where its elements are in a region of an array."""

    place: tuple[slice, ...]  # in the region
    box: Box
    lengths: Sequence[int]  # of the axes that tensor and array have, in the order of the tensor
    order: Sequence[int]  # of these axes in the array

    def view(self, region: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the values of a region of the array at this place, in the order of the tensor.

        It is a view, of shape ``lengths``: splitting and transposing dimensions copies nothing.
        """
        lengths = [self.lengths[axis] for axis in self.order]  # in the order of the array
        place: Any = (*self.place, ...)  # the ellipsis keeps an array without dimensions an array
        view: np.ndarray[Any, Any] = region[place].reshape(lengths)
        return view.transpose([self.order.index(axis) for axis in range(len(lengths))])


class _Range(NamedTuple):
    """A range of a dimension that is a range of each of its axes."""

    start: int
    stop: int
    by_axis: Region

    def shifted(self, distance: int) -> _Range:
        """Returns it where ``distance`` more elements are before it in the dimension."""
        return self._replace(start=self.start + distance, stop=self.stop + distance)


def _split(first: int, last: int, lengths: Sequence[int]) -> list[_Range]:
    """Splits a range of a dimension into parts that are a range of each of its axes.

    With axes of the ``lengths`` 3 and 4, the elements 2 to 11 are three parts: those of the first
    index from 2 on, all of the second one, and those of the last one below 3.
    """
    if first >= last:
        return []
    if len(lengths) == 1:
        return [_Range(first, last, [(first, last)])]
    _, *rest = lengths
    inner = math.prod(rest)  # the elements of one index of the first axis
    parts: list[_Range] = []
    while first < last:
        index = first // inner
        if first % inner == 0 and last - first >= inner:  # whole indices
            end_index = last // inner
            end = end_index * inner
            parts.append(_Range(first, end, [(index, end_index), *((0, n) for n in rest)]))
        else:  # a part of one index
            begin = index * inner
            end = min(last, begin + inner)
            for part in _split(first - begin, end - begin, rest):
                within_index = part._replace(by_axis=[(index, index + 1), *part.by_axis])
                parts.append(within_index.shifted(begin))
        first = end
    return parts


def boxes(placements: Sequence[Placement]) -> tuple[list[int], Sequence[Region]]:
    """Returns the shape of an array, and the region that each placement fills.

    Both are by axes if all placements split the array alike, since tensors that share a dimension
    by an inner axis fill no range of it; otherwise they are by dimensions.
    """

    def sizes_of(placement: Placement) -> list[list[int]]:  # of the axes of each dimension
        return [[placement.axes[x].array_size for x in names] for names in placement.right]

    sizes = sizes_of(placements[0])
    if any(sizes_of(placement) != sizes for placement in placements):
        return [*map(math.prod, sizes)], [placement.region for placement in placements]
    regions = []
    for placement in placements:
        axes = [placement.axes[name] for name in names_in(placement.right)]
        regions.append([(axis.array_start, axis.array_start + axis.length) for axis in axes])
    return [*itertools.chain(*sizes)], regions


def gaps(placements: Sequence[Placement], noun: str, *, once: bool = True) -> list[str]:
    """Describes a part of an array that no placement fills, and one that several do.

    Args:
      placements: what fills the array.
      noun: what these are, such as "tensor".
      once: whether it is a fault if several fill the same part.

    Returns:
      Ends of lines, such as ``: no tensor for [0:8, 4:8]``; an empty one without placements.
    """
    if not placements:
        return [""]
    shape, regions = boxes(placements)
    if len(regions) == 1 and list(regions[0]) == [(0, size) for size in shape]:  # as most are
        return []
    # The edges of all regions divide the array into cells, each of which has one count.
    edges = [  # of each dimension
        sorted({0, size, *(edge for region in regions for edge in region[axis])})
        for axis, size in enumerate(shape)
    ]
    count = np.zeros([len(along) - 1 for along in edges], np.int32)
    for region in regions:
        pairs = zip(edges, region, strict=True)
        cells = [slice(along.index(first), along.index(last)) for along, (first, last) in pairs]
        count[tuple(cells)] += 1
    if (count == 1).all():
        return []
    faults = {f"no {noun}": count == 0}
    if once:
        faults[f"several {noun}s"] = count > 1
    texts = []
    for what, cells_at_fault in faults.items():
        for index in np.argwhere(cells_at_fault)[:1]:  # one place is enough for a message
            bounds = (f"{along[i]}:{along[i + 1]}" for along, i in zip(edges, index, strict=True))
            texts.append(f": {what} for [{', '.join(bounds)}]")
    return texts
