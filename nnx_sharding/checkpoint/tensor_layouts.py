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
    """One axis, and the part of it that both the tensor and the array have."""

    tensor_size: int  # 0 if the tensor lacks the axis: it is at one index of the array's
    tensor_start: int  # where the common part begins
    array_size: int  # 0 if the array lacks the axis
    array_start: int  # where the common part begins
    length: int  # of the common part


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

        The axes are in the order of the array. Axes that the array lacks follow, each of length 1,
        so that ``reshape`` to the shape of the region drops them.
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
        """Where the part that the tensor fills begins and ends in each dimension of the array.

        Only the outermost axis of a dimension can be filled in part, as ``Tensor`` refuses others.
        In an ``inverse``, inner axes can, too: then the region is around what is filled.
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
        """Returns which indices of each dimension the tensor fills; it fills all combinations.

        Of index 0 of the second axis of a dimension of ``(4, 2)``, every other one is True.
        """
        dimensions = []
        for names in self.right:
            is_filled = np.ones((), np.bool_)
            for axis in (self.axes[name] for name in names):
                of_axis = np.zeros(axis.array_size, np.bool_)
                of_axis[axis.array_start : axis.array_start + axis.length] = True
                is_filled = np.logical_and.outer(is_filled, of_axis)  # (axes…)
            dimensions.append(is_filled.reshape(-1))
        return dimensions

    def overlaps(self, other: Placement) -> bool:
        """Whether both fill some of the same elements of one array."""
        pairs = zip(self.region, other.region, strict=True)
        return all(first < end and start < last for (first, last), (start, end) in pairs)

    def pieces(self, wanted: Region) -> Iterator[Piece]:
        """Splits what a region of the array shares with the tensor into boxes of the tensor.

        A box is a range of each axis of the tensor. If rows of the array consist of the axes h and
        d, of sizes 3 and 4, the rows 2:11 need three boxes: ``h=0:1, d=2:4``, then
        ``h=1:2, d=0:4``, and ``h=2:3, d=0:3``.
        """
        if self.is_identity:  # as for most tensors: the region is the box
            shape = [end - start for start, end in wanted]
            if 0 not in shape:
                place = tuple(slice(0, size) for size in shape)
                yield Piece(place, Box(self.tensor_shape, wanted), shape, range(len(shape)))
            return
        # 1. Split what is shared in each dimension of the array into ranges of its axes.
        splits: list[list[_Range]] = []
        for names, (first, last), (start, end) in zip(self.right, self.region, wanted, strict=True):
            # The tensor fills first:last of the dimension, and start:end of it is wanted.
            lengths = [self.axes[name].length for name in names]
            ranges = _split(max(first, start) - first, min(last, end) - first, lengths)
            # `_split` counts from where the tensor begins, and pieces from where the region does.
            splits.append([x.shifted(first - start) for x in ranges])
        # 2. Each combination of such ranges, one for each dimension, is a box.
        left, right = names_in(self.left), names_in(self.right)
        shared = [name for name in left if name in right]
        order = [shared.index(name) for name in right if name in shared]
        sizes = tuple(self.axes[name].tensor_size for name in left)
        for combination in itertools.product(*splits):
            by_axis = itertools.chain(*(x.by_axis for x in combination))
            range_of = dict(zip(right, by_axis, strict=True))
            box = []
            for name in left:
                # Of an axis that the array lacks, it has the one index `tensor_start`.
                first, last = range_of.get(name, (0, 1))
                offset = self.axes[name].tensor_start
                box.append((offset + first, offset + last))
            place = tuple(slice(x.start, x.stop) for x in combination)
            lengths = [range_of[name][1] - range_of[name][0] for name in shared]
            yield Piece(place, Box(sizes, box), lengths, order)


class Piece(NamedTuple):
    """A box of a tensor, and where its elements are in a region of an array.

    Axes are those that tensor and array share: in ``"(h d) e -> e h d"``, the tensor has them in
    the order h, d, e, and the array in the order e, h, d.
    """

    place: tuple[slice, ...]  # in each dimension of the region
    box: Box
    lengths: Sequence[int]  # of the axes, in the order of the tensor
    order: Sequence[int]  # the axes in the order of the array, by index in the tensor's: [2, 0, 1]

    def view(self, region: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the values of a region of the array at this place, in the order of the tensor.

        It is a view, of shape ``lengths``: splitting and transposing dimensions copies nothing.
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
    by_axis: Region  # (first, last) of each axis

    def shifted(self, distance: int) -> _Range:
        """Returns it where ``distance`` more elements are before it in the dimension."""
        return self._replace(start=self.start + distance, stop=self.stop + distance)


def _split(first: int, last: int, lengths: Sequence[int]) -> list[_Range]:
    """Splits a range of a dimension into parts that are a range of each of its axes.

    With axes of the ``lengths`` 3 and 4, the elements 2:11 become three parts:

        _Range(2, 4, [(0, 1), (2, 4)])      the end of index 0 of the first axis
        _Range(4, 8, [(1, 2), (0, 4)])      whole indices; several of them are one part
        _Range(8, 11, [(2, 3), (0, 3)])     the beginning of index 2
    """
    if first >= last:
        return []
    if len(lengths) == 1:
        return [_Range(first, last, [(first, last)])]
    _, *rest = lengths
    stride = math.prod(rest)  # the number of elements at one index of the first axis
    parts: list[_Range] = []
    while first < last:
        index = first // stride
        if first % stride == 0 and last - first >= stride:  # whole indices
            end_index = last // stride
            end = end_index * stride
            parts.append(_Range(first, end, [(index, end_index), *((0, n) for n in rest)]))
        else:  # a part of one index, which the other axes split further
            begin = index * stride
            end = min(last, begin + stride)
            for part in _split(first - begin, end - begin, rest):  # counted from `begin`
                with_index = part._replace(by_axis=[(index, index + 1), *part.by_axis])
                parts.append(with_index.shifted(begin))
        first = end
    return parts


def boxes(placements: Sequence[Placement]) -> list[Region] | None:
    """Returns the region of an array that each placement fills; None if some fill no range.

    If all placements divide the dimensions into axes of the same sizes, each axis counts as a
    dimension here. Two tensors that have 4 heads each, in turns, fill ``[(0, 4), (0, 1)]`` and
    ``[(0, 4), (1, 2)]`` of the shape ``[4, 2]``. They fill no ranges of a dimension of 8.
    """

    def axes_of(placement: Placement) -> list[list[Axis]]:
        """Returns the axes of each dimension, in order; their names may differ."""
        return [[placement.axes[name] for name in names] for names in placement.right]

    sizes = [[[x.array_size for x in axes] for axes in axes_of(p)] for p in placements]
    if all(x == sizes[0] for x in sizes):
        return [
            [(x.array_start, x.array_start + x.length) for x in itertools.chain(*axes_of(p))]
            for p in placements
        ]
    return [p.region for p in placements] if all(p.fills_region for p in placements) else None


def gaps(placements: Sequence[Placement], noun: str, *, once: bool = True) -> list[str]:
    """Describes a part of an array that no placement fills, and one that several do.

    Args:
      placements: what fills the array.
      noun: what fills it, for the message, such as "tensor".
      once: whether it is a fault if several fill the same part.

    Returns:
      Texts that the caller puts after the array's path and shape in a line of an error: at most
      ``": no tensor for [0:8, 4:8]"`` and ``": several tensors for [0:8, 0:2]"``. Without
      placements, it is one empty text, so that the line still appears.
    """
    if not placements:
        return [""]
    if len(placements) == 1 and all(x.length == x.array_size for x in placements[0].axes.values()):
        return []  # as for most tensors
    # Each dimension is cut wherever a placement begins or ends, which divides the array into cells.
    # A cell is filled as a whole, or not.
    edges: list[list[int]] = []  # for each dimension, where cells begin, and its size
    cells: list[np.ndarray[Any, Any]] = []  # for each dimension, (placements, cells)
    for filled in zip(*(placement.filled() for placement in placements), strict=True):
        by_index = np.stack(filled)  # (placements, size)
        begins = np.ones(by_index.shape[1], np.bool_)
        begins[1:] = (by_index[:, 1:] != by_index[:, :-1]).any(0)
        starts = np.flatnonzero(begins)
        edges.append([*starts.tolist(), len(begins)])
        cells.append(by_index[:, starts])
    count = np.zeros([x.shape[1] for x in cells], np.int32)
    for i in range(len(placements)):  # which cells it has in each dimension, then in all
        count += functools.reduce(np.logical_and.outer, [x[i] for x in cells], np.True_)
    faults = {f"no {noun}": count == 0}
    if once:
        faults[f"several {noun}s"] = count > 1
    texts = []
    for fault, is_at_fault in faults.items():
        for cell in np.argwhere(is_at_fault)[:1]:  # one place is enough for a message
            bounds = (f"{x[i]}:{x[i + 1]}" for x, i in zip(edges, cell, strict=True))
            texts.append(f": {fault} for [{', '.join(bounds)}]")
    return texts
