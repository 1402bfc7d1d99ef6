"""In which ways a tensor can fill an array, as far as their shapes tell.

PyTorch stores the matrix of a linear layer as (out, in), with the heads of attention one after the
other in its rows. An array of a model has the same numbers in some of these forms:

    (in, out)             transposed, as the kernels of Flax
    (in, heads, dim)      split into heads
    (layers, in, out)     stacked, in any dimension
    (2, in, out)          with other tensors, in a dimension for these
    (in, out + out)       with other tensors, one after the other

All forms that fit are returned, for the caller to decide, or not to. The numbers themselves say
nothing: whether rows are ordered for one rotary embedding or another, nobody can see from shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .tensor_rules import Tensor

Shape: TypeAlias = tuple[int, ...]


class Convention(NamedTuple):
    """What is known of dimensions without their sizes."""

    order: Literal["in, out", "as the tensor"] | None  # the usual one of such an array
    heads: Literal["rows", "columns"] | None  # of the tensor, which an array may split


# The axes of rows and of columns that are split into so many dimensions.
_ROWS = {1: ("out",), 2: ("h", "d"), 3: ("k", "g", "d")}
_COLUMNS = {**_ROWS, 1: ("in",)}
_SPATIAL = ("z", "y", "x")


class Share(NamedTuple):
    """Which of several tensors, or arrays, that the other side has in one."""

    part: int
    shapes: Sequence[Shape]  # of all of them
    of_tensor: bool  # whether the tensor is the fused one


class Candidate(NamedTuple):
    """One way in which a tensor can fill an array."""

    left: tuple[tuple[str, ...], ...]  # the axes of each dimension of the tensor
    right: tuple[tuple[str, ...], ...]  # of the array
    is_usual: bool = False  # whether it is the convention
    stacked_at: tuple[int, ...] = ()
    take: Mapping[str, slice | int] = {}
    put: Mapping[str, slice | int] = {}
    sizes: Mapping[str, int] = {}

    @property
    def dimensions(self) -> str:
        """As ``Tensor`` has them."""
        return " -> ".join(" ".join(map(_dimension, side)) for side in (self.left, self.right))

    def tensor(self, path: str) -> Tensor:
        """Returns the rule that does this."""
        if self.left == self.right and not (self.take or self.put):
            return Tensor(path)
        return Tensor(path, self.dimensions, take=self.take, put=self.put, **self.sizes)

    @property
    def is_transposed(self) -> bool:
        """Whether the dimensions of the tensor are in another order in the array."""
        firsts = [(names[0],) for names in self.left]
        places = [self.right.index(name) for name in firsts if name in self.right]
        return places != sorted(places)

    def described(self) -> str:
        """Says in a few words what it does."""
        texts = ["(out, in) to (in, out)"] if self.is_transposed else []
        if any(len(names) > 1 for names in self.left):
            texts.append("split into heads")
        if self.stacked_at:
            texts.append(f"stacked in dimension {', '.join(map(str, self.stacked_at))}")
        if self.take or self.put:
            texts.append(f"a part of a fused {'tensor' if self.take else 'array'}, by its name")
        return ", ".join(texts)


def _dimension(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def candidates(
    shape: Shape,
    target: Shape,
    convention: Convention,
    stack: Sequence[tuple[str, int]] = (),
    share: Share | None = None,
) -> list[Candidate]:
    """Returns all ways in which a tensor of this shape can fill an array of the shape ``target``.

    ``stack`` has a label and a size for each index that the array has as a dimension.
    """
    result = []
    for places in itertools.permutations(range(len(target)), len(stack)):
        if any(target[i] != size for i, (_, size) in zip(places, stack, strict=True)):
            continue
        inner = tuple(size for i, size in enumerate(target) if i not in places)
        for found in _shared(shape, inner, convention, share):
            right = [*found.right]
            for i, (label, _) in sorted(zip(places, stack, strict=True)):
                right.insert(i, (label,))
            result.append(found._replace(right=tuple(right), stacked_at=places))
    return result


def _shared(
    shape: Shape, target: Shape, convention: Convention, share: Share | None
) -> Iterator[Candidate]:
    """Yields the ways of one tensor, which may be a part, or have parts."""
    if share is None:
        yield from _plain(shape, target, convention)
    elif share.of_tensor:
        yield from _taken(shape, target, convention, share)
    else:
        yield from _put(shape, target, convention, share)


def _put(shape: Shape, target: Shape, convention: Convention, share: Share) -> Iterator[Candidate]:
    """Yields the ways of a tensor into its part of an array."""
    count, rows = len(share.shapes), [shape[0] for shape in share.shapes]
    for i, size in enumerate(target):
        if size == count and len(set(share.shapes)) == 1:  # a dimension for the parts
            for found in _plain(shape, (*target[:i], *target[i + 1 :]), convention):
                right = (*found.right[:i], ("part",), *found.right[i:])
                yield found._replace(right=right, put={"part": share.part})
            continue
        starts = [0, *itertools.accumulate(size * n for n in rows)]  # times all rows
        if any(start % sum(rows) for start in starts):
            continue
        start, stop = (starts[share.part + k] // sum(rows) for k in range(2))
        for found in _plain(shape, (*target[:i], stop - start, *target[i + 1 :]), convention):
            [axis], first = found.right[i], found.left[0][0]
            if axis == first:  # parts follow each other in rows, so in the outermost axis of these
                yield found._replace(put={axis: slice(start, stop)})


def _taken(
    shape: Shape, target: Shape, convention: Convention, share: Share
) -> Iterator[Candidate]:
    """Yields the ways of a part of a tensor into its array."""
    columns = math.prod(shape[1:])
    rows = [math.prod(each) // columns for each in share.shapes]
    if sum(rows) != shape[0]:
        return
    start = sum(rows[: share.part])
    for found in _plain((rows[share.part], *shape[1:]), target, convention):
        axis = found.left[0][0]
        [size] = [n for names, n in zip(found.right, target, strict=True) if names == (axis,)]
        unit = rows[share.part] // size
        if shape[0] % unit == start % unit == 0:
            begin = start // unit
            taken = {axis: slice(begin, begin + size)}
            yield found._replace(take=taken, sizes={axis: shape[0] // unit})


def _plain(shape: Shape, target: Shape, convention: Convention) -> Iterator[Candidate]:
    """Yields the ways of a whole tensor into a whole array."""
    if len(shape) == 2 and len(target) > 1:
        yield from _matrices(shape, target, convention)
    elif len(shape) == 1 and math.prod(target) == shape[0] and len(target) in _ROWS:
        yield _candidate([_ROWS[len(target)]], _ROWS[len(target)], is_usual=True)
    elif len(shape) == len(target):
        yield from _same_rank(shape, target, convention)
    elif shape == (1, *target):
        names = [f"axis{i}" for i in range(len(target))]
        found = _candidate([["one"], *([x] for x in names)], names, is_usual=True)
        yield found._replace(take={"one": 0}, sizes={"one": 1})
    elif len(shape) == 4 and len(target) == 2:  # a convolution as a matrix of its patches
        for patch in (("in", "y", "x"), ("y", "x", "in")):
            if target == (math.prod(shape[1:]), shape[0]):
                yield Candidate((("out",), ("in",), ("y",), ("x",)), (patch, ("out",)))


def _matrices(shape: Shape, target: Shape, convention: Convention) -> Iterator[Candidate]:
    """Yields the ways of (out, in) into an array that may split one of both into heads."""
    rank = len(target)
    for count in range(1, rank):
        if (count > 1 and rank - count > 1) or max(count, rank - count) not in _ROWS:
            continue
        for places in itertools.combinations(range(rank), count):  # the dimensions that are rows
            others = [i for i in range(rank) if i not in places]
            if shape != tuple(math.prod(target[i] for i in group) for group in (places, others)):
                continue
            split = "rows" if count > 1 else "columns"
            if rank > 2 and convention.heads not in (None, split):
                continue
            rows, columns = _ROWS[count], _COLUMNS[rank - count]
            named = {
                **dict(zip(places, rows, strict=True)),
                **dict(zip(others, columns, strict=True)),
            }
            usual = (*columns, *rows) if convention.order == "in, out" else (*rows, *columns)
            right = tuple(named[i] for i in range(rank))
            is_usual = convention.order is not None and right == usual
            yield _candidate([rows, columns], right, is_usual=is_usual)


def _same_rank(shape: Shape, target: Shape, convention: Convention) -> Iterator[Candidate]:
    """Yields the ways of a convolution, of matrices of experts, or of anything as it is."""
    axes = ["out", "in", *_SPATIAL[5 - len(shape) :]] if 2 < len(shape) < 6 else []
    same = [f"axis{i}" for i in range(len(shape))]
    orders = [(same, same)]
    if axes:
        orders.append((axes, [*axes[2:], "in", "out"]))
    if len(shape) == 3:
        orders.append((["e", "out", "in"], ["e", "in", "out"]))
    for left, right in orders:
        sizes = dict(zip(left, shape, strict=True))
        if tuple(sizes[axis] for axis in right) == target:
            kind = "as the tensor" if left == right else "in, out"
            yield _candidate([[x] for x in left], right, is_usual=convention.order == kind)


def _candidate(left: Sequence[Sequence[str]], right: Sequence[str], *, is_usual: bool) -> Candidate:
    """Returns the candidate for an array with one axis in each dimension."""
    return Candidate(tuple(map(tuple, left)), tuple((x,) for x in right), is_usual)
