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
    """A tensor in an array of a certain shape."""

    name: str
    left: Dimensions
    right: Dimensions
    axes: Mapping[str, Axis]

    def inverse(self, name: str) -> Placement:
        """Returns the place of the array in the tensor."""
        swapped = {
            axis: Axis(x.array_size, x.array_start, x.tensor_size, x.tensor_start, x.length)
            for axis, x in self.axes.items()
        }
        return Placement(name, self.right, self.left, swapped)

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether the array is the tensor."""
        whole = all(x.tensor_size == x.array_size == x.length for x in self.axes.values())
        return whole and self.left == self.right

    def arranged(self, tensor: Any) -> Any:
        """Returns what the array has of a tensor of NumPy or JAX, one dimension for each axis."""
        left, right = names_in(self.left), names_in(self.right)
        shared = [axis for axis in right if axis in left]
        taken = [axis for axis in left if axis not in right]  # by an index, so of length 1
        starts = [(self.axes[axis].tensor_start, self.axes[axis].length) for axis in left]
        x = tensor.reshape([self.axes[axis].tensor_size for axis in left])  # left axes, whole
        x = x[tuple(slice(start, start + length) for start, length in starts)]  # left axes
        return x.transpose([left.index(axis) for axis in (*shared, *taken)])  # right axes, ones

    @functools.cached_property
    def tensor_shape(self) -> tuple[int, ...]:
        """Returns the shape that the tensor has to have."""
        return tuple(math.prod(self.axes[n].tensor_size for n in names) for names in self.left)

    @functools.cached_property
    def region(self) -> list[tuple[int, int]]:
        """Returns the region of the array that the tensor fills."""
        region = []
        for first, *rest in self.right:
            axis, inner = self.axes[first], math.prod(self.axes[n].array_size for n in rest)
            region.append((axis.array_start * inner, (axis.array_start + axis.length) * inner))
        return region

    def overlaps(self, other: Placement) -> bool:
        """Whether both fill some of the same elements of one array."""
        pairs = zip(self.region, other.region, strict=True)
        return all(first < end and start < last for (first, last), (start, end) in pairs)

    def parts(self, wanted: Region) -> Iterator[Part]:
        """Finds what a region of the array shares with the tensor, as boxes of the tensor."""
        if self.is_identity:  # as for most tensors: the region is the box
            shape = [end - start for start, end in wanted]
            if 0 not in shape:
                place = tuple(slice(0, size) for size in shape)
                yield Part(place, Box(self.tensor_shape, wanted), shape, range(len(shape)))
            return
        ranges: list[list[tuple[slice, Region]]] = []  # of each dimension of the array
        for names, (first, last), (start, end) in zip(self.right, self.region, wanted, strict=True):
            lengths = [self.axes[name].length for name in names]
            split = _split(max(first, start) - first, min(last, end) - first, lengths)
            moved = first - start  # from the tensor's part of the dimension to the wanted one
            ranges.append([(slice(a + moved, b + moved), parts) for a, b, parts in split])
        left, right = names_in(self.left), names_in(self.right)
        shared = [name for name in left if name in right]
        order = [shared.index(name) for name in right if name in shared]
        sizes = tuple(self.axes[name].tensor_size for name in left)
        for chosen in itertools.product(*ranges):
            inside = dict(zip(right, itertools.chain(*(parts for _, parts in chosen)), strict=True))
            box = []
            for name in left:
                first, last = inside.get(name, (0, 1))  # an axis of the tensor alone is an index
                start = self.axes[name].tensor_start
                box.append((start + first, start + last))
            lengths = [inside[name][1] - inside[name][0] for name in shared]
            yield Part(tuple(place for place, _ in chosen), Box(sizes, box), lengths, order)


class Part(NamedTuple):
    """A box of a tensor, and where its elements are in a region of an array."""

    place: tuple[slice, ...]  # in the region
    box: Box
    lengths: Sequence[int]  # of the axes that tensor and array have, in the order of the tensor
    order: Sequence[int]  # of these axes in the array

    def view(self, region: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the values of a region of the array at this place, in the order of the tensor.

        It is a view, of shape ``lengths``: splitting and transposing dimensions copies nothing.
        """
        lengths = [self.lengths[axis] for axis in self.order]
        place: Any = (*self.place, ...)  # the ellipsis keeps an array without dimensions an array
        view: np.ndarray[Any, Any] = region[place].reshape(lengths)
        return view.transpose([self.order.index(axis) for axis in range(len(lengths))])


def _split(first: int, last: int, lengths: Sequence[int]) -> list[tuple[int, int, Region]]:
    """Splits a range of a dimension into parts that are a range of each of its axes.

    A dimension of axes of 3 and 4 has the elements 2 to 11 in three parts: those of the first index
    from 2 on, all of the second one, and those of the last one below 3. Each part is where it
    begins and ends in the dimension, and the range of each axis.
    """
    if first >= last:
        return []
    if len(lengths) == 1:
        return [(first, last, [(first, last)])]
    _, *rest = lengths
    inner = math.prod(rest)
    parts: list[tuple[int, int, Region]] = []
    while first < last:
        index = first // inner
        if first % inner == 0 and last - first >= inner:  # whole indices
            stop = last // inner
            end = stop * inner
            parts.append((first, end, [(index, stop), *((0, n) for n in rest)]))
        else:  # a part of one index
            begin = index * inner
            end = min(last, begin + inner)
            for a, b, ranges in _split(first - begin, end - begin, rest):
                parts.append((begin + a, begin + b, [(index, index + 1), *ranges]))
        first = end
    return parts


def boxes(placements: Sequence[Placement]) -> tuple[list[int], Sequence[Region]]:
    """Returns the shape of an array, and the region that each placement fills.

    Both are by axes if all placements split the array alike, since tensors that share a dimension
    by an inner axis fill no range of it; otherwise they are by dimensions.
    """
    # One list for each placement, of its dimensions, of their axes.
    axes = [[[p.axes[name] for name in names] for names in p.right] for p in placements]
    sizes = {tuple(tuple(axis.array_size for axis in dim) for dim in dims) for dims in axes}
    if len(sizes) > 1:
        shape = [math.prod(axis.array_size for axis in dim) for dim in axes[0]]
        return shape, [p.region for p in placements]
    flat = [list(itertools.chain(*dims)) for dims in axes]
    regions = [[(x.array_start, x.array_start + x.length) for x in each] for each in flat]
    return [axis.array_size for axis in flat[0]], regions


def gaps(placements: Sequence[Placement], noun: str, *, once: bool = True) -> list[str]:
    """Describes a part of an array that no placement fills, and one that several do.

    Several are no fault without ``once``. Without placements, the description is empty text.
    """
    if not placements:
        return [""]
    shape, regions = boxes(placements)
    if len(regions) == 1 and list(regions[0]) == [(0, size) for size in shape]:  # as most are
        return []
    # The edges of all regions divide the array into cells, each of which has one count.
    edges = [
        sorted({0, size, *(edge for region in regions for edge in region[axis])})
        for axis, size in enumerate(shape)
    ]
    count = np.zeros([len(each) - 1 for each in edges], np.int32)
    for region in regions:
        pairs = zip(edges, region, strict=True)
        cells = [slice(each.index(first), each.index(last)) for each, (first, last) in pairs]
        count[tuple(cells)] += 1
    if (count == 1).all():
        return []
    faults = {f"no {noun}": count == 0}
    if once:
        faults[f"several {noun}s"] = count > 1
    texts = []
    for what, cells_at_fault in faults.items():
        for index in np.argwhere(cells_at_fault)[:1]:  # one place is enough for a message
            bounds = (f"{each[i]}:{each[i + 1]}" for each, i in zip(edges, index, strict=True))
            texts.append(f": {what} for [{', '.join(bounds)}]")
    return texts
