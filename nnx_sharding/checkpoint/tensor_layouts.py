"""The axes of tensors and arrays, which say how dimensions of one become dimensions of the other.

``"(h d) e -> e h d"`` names three axes. The tensor has them in two dimensions, the array in three.
Each axis has a size on both sides, and a *common part*, a range that both sides have. So one
description serves for taking a part of a tensor, filling a part of an array, splitting, merging,
transposing and stacking:

    axis          tensor           array
    h, taken      ....[####]..     [####]         the array has a part of the tensor's axis
    h, put        [####]           ..[####]....   the tensor has a part of the array's axis
    an index      (none)           ..#.....       one side lacks the axis, so its size there is 0

A *region* of an array is a range, (first, last), of each of its dimensions, where last is the index
after the range. A *piece* is a part of a region that is a box of the tensor.
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

# For each dimension, the names of its axes.
Dimensions: TypeAlias = list[list[str]]


def names_in(dimensions: Dimensions) -> list[str]:
    """Returns the axes of all dimensions, in order."""
    return [*itertools.chain(*dimensions)]


class Axis(NamedTuple):
    """One axis, and the part of it that both the tensor and the array have."""

    tensor_size: int  # 0 if the tensor lacks the axis, because it is one index of the array's axis
    tensor_start: int  # the index in the tensor at which the common part begins
    array_size: int  # 0 if the array lacks the axis, because it is one index of the tensor's axis
    array_start: int  # the index in the array at which the common part begins
    length: int  # the length of the common part


@dataclasses.dataclass
class Placement:
    """The place of a tensor in an array of a certain shape.

    Attributes:
      name: the name of the tensor.
      left: the axes of each dimension of the tensor.
      right: the axes of each dimension of the array.
      axes: the sizes and common parts of all axes, by name.
    """

    name: str
    left: Dimensions
    right: Dimensions
    axes: Mapping[str, Axis]

    def inverse(self, name: str) -> Placement:
        """Returns the place of the array in the tensor, with both sides swapped.

        ``name`` becomes the ``name`` of the result, whose tensor is what was the array.
        """
        swapped = {
            axis: Axis(x.array_size, x.array_start, x.tensor_size, x.tensor_start, x.length)
            for axis, x in self.axes.items()
        }
        return Placement(name, self.right, self.left, swapped)

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether the array equals the tensor: all axes are whole, and in the same order."""
        are_whole = all(x.tensor_size == x.array_size == x.length for x in self.axes.values())
        return are_whole and self.left == self.right

    def arranged(self, tensor: Any) -> Any:
        """Returns the part of a tensor that the array has, with one dimension for each axis.

        The tensor is an array of NumPy or JAX. The axes are in the order of the array. Axes that
        the array lacks come last, each of length 1, and ``reshape`` to the shape of the region
        drops them.
        """
        left, right = names_in(self.left), names_in(self.right)
        shared = [name for name in right if name in left]
        indexed = [name for name in left if name not in right]
        axes = [self.axes[name] for name in left]
        parts = [slice(axis.tensor_start, axis.tensor_start + axis.length) for axis in axes]
        # The shapes are those of "(h d) e -> e h d" that takes 32 of 48 heads.
        x = tensor.reshape([axis.tensor_size for axis in axes])  # (48, d, e)
        x = x[tuple(parts)]  # (32, d, e)
        return x.transpose([left.index(name) for name in (*shared, *indexed)])  # (e, 32, d)

    @functools.cached_property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that the tensor has to have."""
        return tuple(
            math.prod(self.axes[name].tensor_size for name in names) for names in self.left
        )

    @functools.cached_property
    def region(self) -> list[tuple[int, int]]:
        """The range of each dimension of the array that the tensor fills.

        ``Tensor`` only allows the outermost axis of a dimension to be filled in part, so the filled
        elements are a range. In an ``inverse``, inner axes may be filled in part as well. The range
        then has elements that are not filled (``fills_region``).
        """
        region = []
        for outer, *inner in self.right:
            axis = self.axes[outer]
            stride = math.prod(self.axes[name].array_size for name in inner)
            region.append((axis.array_start * stride, (axis.array_start + axis.length) * stride))
        return region

    @property
    def fills_region(self) -> bool:
        """Whether the tensor fills all of its region: all inner axes are complete."""
        inner = (self.axes[name] for _, *names in self.right for name in names)
        return all(axis.length == axis.array_size for axis in inner)

    def filled(self) -> list[np.ndarray[Any, Any]]:
        """Returns for each dimension which indices the tensor fills; it fills all combinations.

        A tensor at index 0 of the second axis of a dimension ``(4, 2)`` fills every other index.
        """
        filled_by_dimension = []
        for names in self.right:
            is_filled = np.ones((), np.bool_)
            for axis in (self.axes[name] for name in names):
                is_axis_filled = np.zeros(axis.array_size, np.bool_)
                is_axis_filled[axis.array_start : axis.array_start + axis.length] = True
                is_filled = np.logical_and.outer(is_filled, is_axis_filled)  # (axes…)
            filled_by_dimension.append(is_filled.reshape(-1))
        return filled_by_dimension

    def overlaps(self, other: Placement) -> bool:
        """Whether the regions of both in one array have elements in common."""
        pairs = zip(self.region, other.region, strict=True)
        return all(first < end and start < last for (first, last), (start, end) in pairs)

    def pieces(self, wanted: Region) -> Iterator[Piece]:
        """Splits the part of a region of the array that the tensor has into boxes of the tensor.

        A box is a range of each axis of the tensor. If rows of the array consist of the axes h and
        d, of sizes 3 and 4, the rows 2:11 need three boxes: ``h=0:1, d=2:4``, then
        ``h=1:2, d=0:4``, and ``h=2:3, d=0:3``.
        """
        if self.is_identity:  # the region is the box; most tensors are so
            shape = [end - start for start, end in wanted]
            if 0 not in shape:
                place = tuple(slice(0, size) for size in shape)
                yield Piece(place, Box(self.tensor_shape, wanted), shape, range(len(shape)))
            return
        # 1. In each dimension of the array, split the elements that both have into ranges of axes.
        splits: list[list[_Range]] = []
        for names, (first, last), (start, end) in zip(self.right, self.region, wanted, strict=True):
            # The tensor fills first:last of the dimension, and start:end of it is wanted.
            lengths = [self.axes[name].length for name in names]
            ranges = _split(max(first, start) - first, min(last, end) - first, lengths)
            # `_split` counts from the beginning of the tensor, pieces from that of the region.
            splits.append([x.shifted(first - start) for x in ranges])
        # 2. Each combination of ranges, with one range for each dimension, is a box.
        left, right = names_in(self.left), names_in(self.right)
        shared = [name for name in left if name in right]
        order = [shared.index(name) for name in right if name in shared]
        sizes = tuple(self.axes[name].tensor_size for name in left)
        for combination in itertools.product(*splits):
            by_axis = itertools.chain(*(x.by_axis for x in combination))
            range_of = dict(zip(right, by_axis, strict=True))
            box = []
            for name in left:
                # If the array lacks the axis, the box has one index of it, `tensor_start`.
                first, last = range_of.get(name, (0, 1))
                offset = self.axes[name].tensor_start
                box.append((offset + first, offset + last))
            place = tuple(slice(x.start, x.stop) for x in combination)
            lengths = [range_of[name][1] - range_of[name][0] for name in shared]
            yield Piece(place, Box(sizes, box), lengths, order)


class Piece(NamedTuple):
    """A box of a tensor, and the place of its elements in a region of an array.

    The axes here are the ones that tensor and array share. In ``"(h d) e -> e h d"``, the tensor
    has them in the order h, d, e, and the array in the order e, h, d.
    """

    place: tuple[slice, ...]  # the range of each dimension of the region
    box: Box
    lengths: Sequence[int]  # the lengths of the axes, in the order of the tensor
    order: Sequence[int]  # the axes in the order of the array, by index in the tensor's: [2, 0, 1]

    def view(self, region: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the values of a region of the array at this place, in the order of the tensor.

        The result is a view of shape ``lengths``, because splitting and transposing dimensions
        copies nothing.
        """
        array_lengths = [self.lengths[axis] for axis in self.order]
        place: Any = (*self.place, ...)  # the ellipsis keeps an array without dimensions an array
        # For "(h d) e -> e h d":
        view: np.ndarray[Any, Any] = region[place].reshape(array_lengths)  # (e, h, d)
        return view.transpose([self.order.index(axis) for axis in range(len(self.order))])


class _Range(NamedTuple):
    """A range ``start:stop`` of a dimension that is also a range of each of its axes."""

    start: int
    stop: int
    by_axis: Region  # (first, last) for each axis

    def shifted(self, distance: int) -> _Range:
        """Returns the range moved by ``distance`` elements in the dimension."""
        return self._replace(start=self.start + distance, stop=self.stop + distance)


def _split(first: int, last: int, lengths: Sequence[int]) -> list[_Range]:
    """Splits a range of a dimension into parts that are a range of each of its axes.

    The range is ``first:last``, and the dimension consists of axes of these ``lengths``. With axes
    of the lengths 3 and 4, the elements 2:11 become three parts:

        _Range(2, 4, [(0, 1), (2, 4)])      the end of index 0 of the first axis
        _Range(4, 8, [(1, 2), (0, 4)])      whole indices; several of them are one part
        _Range(8, 11, [(2, 3), (0, 3)])     the beginning of index 2
    """
    if first >= last:
        return []
    if len(lengths) == 1:
        return [_Range(first, last, [(first, last)])]
    _, *inner_lengths = lengths
    stride = math.prod(inner_lengths)  # the number of elements at one index of the first axis
    parts: list[_Range] = []
    while first < last:
        index = first // stride
        if first % stride == 0 and last - first >= stride:  # whole indices
            end_index = last // stride
            end = end_index * stride
            inner_ranges = [(0, length) for length in inner_lengths]
            parts.append(_Range(first, end, [(index, end_index), *inner_ranges]))
        else:  # a part of one index, which the inner axes split further
            begin = index * stride
            end = min(last, begin + stride)
            for part in _split(first - begin, end - begin, inner_lengths):  # counted from `begin`
                with_index = part._replace(by_axis=[(index, index + 1), *part.by_axis])
                parts.append(with_index.shifted(begin))
        first = end
    return parts


def boxes(placements: Sequence[Placement]) -> list[Region] | None:
    """Returns the region of an array that each placement fills; None if one of them fills no range.

    If all placements divide the dimensions into axes of the same sizes, each axis counts as a
    dimension in the regions. For example, two tensors of 4 heads each, in turns, fill
    ``[(0, 4), (0, 1)]`` and ``[(0, 4), (1, 2)]`` of the shape ``[4, 2]``, although they fill no
    ranges of a dimension of 8.
    """

    def axis_sizes(placement: Placement) -> list[list[int]]:
        """Returns the sizes of the axes of each dimension, in order; names of axes may differ."""
        return [[placement.axes[name].array_size for name in names] for names in placement.right]

    def axis_ranges(placement: Placement) -> Region:
        """Returns the range of each axis that the tensor fills, in order."""
        axes = [placement.axes[name] for name in names_in(placement.right)]
        return [(axis.array_start, axis.array_start + axis.length) for axis in axes]

    sizes = [axis_sizes(placement) for placement in placements]
    if all(x == sizes[0] for x in sizes):
        return [axis_ranges(placement) for placement in placements]
    if all(placement.fills_region for placement in placements):
        return [placement.region for placement in placements]
    return None


def gaps(placements: Sequence[Placement], noun: str, *, once: bool = True) -> list[str]:
    """Describes a part of an array that no placement fills, and a part that several fill.

    The result is empty if there is no such part.

    Args:
      placements: the placements that fill the array.
      noun: the word for one of them in the message, such as "tensor".
      once: whether it is a fault if several fill the same part.

    Returns:
      Texts that the caller puts after the array's path and shape in a line of an error: at most
      ``": no tensor for [0:8, 4:8]"`` and ``": several tensors for [0:8, 0:2]"``. Without
      placements, it is one empty text, so that the line still appears.
    """
    if not placements:
        return [""]
    if len(placements) == 1:
        [placement] = placements
        if all(axis.length == axis.array_size for axis in placement.axes.values()):
            return []  # it fills the whole array, as for most arrays
    # Each dimension is cut wherever a placement begins or ends. The cuts divide the array into
    # cells, and a placement fills a cell as a whole, or not at all.
    edges: list[list[int]] = []  # for each dimension, the indices where cells begin, then its size
    cells: list[np.ndarray[Any, Any]] = []  # for each dimension, (placements, cells)
    for filled in zip(*(placement.filled() for placement in placements), strict=True):
        by_index = np.stack(filled)  # (placements, size)
        begins = np.ones(by_index.shape[1], np.bool_)
        begins[1:] = (by_index[:, 1:] != by_index[:, :-1]).any(0)
        starts = np.flatnonzero(begins)
        edges.append([*starts.tolist(), len(begins)])
        cells.append(by_index[:, starts])
    # The number of placements that fill each cell. A placement fills a cell if it fills its index
    # in all dimensions.
    count = np.zeros([x.shape[1] for x in cells], np.int32)
    for i in range(len(placements)):
        count += functools.reduce(np.logical_and.outer, [x[i] for x in cells], np.True_)
    faults = {f"no {noun}": count == 0}
    if once:
        faults[f"several {noun}s"] = count > 1
    texts = []
    for fault, is_at_fault in faults.items():
        for cell in np.argwhere(is_at_fault)[:1]:  # one cell is enough for a message
            bounds = (f"{x[i]}:{x[i + 1]}" for x, i in zip(edges, cell, strict=True))
            texts.append(f": {fault} for [{', '.join(bounds)}]")
    return texts
