"""In which ways a tensor can fill an array, as far as their shapes tell.

PyTorch stores the matrix of a linear layer as (out, in), with the heads of attention one after the
other in its rows. ``_FORMS`` has what arrays make of it. Any of these may also be stacked, or share
an array or a tensor with others: in a dimension for these, or one after the other.

All ways that fit are returned, for the caller to decide, or not to. The numbers themselves say
nothing: whether rows are ordered for one rotary embedding or another, nobody can see from shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from .tensor_rules import Tensor

Shape: TypeAlias = tuple[int, ...]

# Dimensions of tensors, and those of arrays. The first ones are what kernels of Flax have.
_FORMS = {
    "out": ("out",),
    "(h d)": ("h d",),
    "(k g d)": ("k g d",),  # each head of keys and values, and its group of queries
    "out in": ("in out", "out in"),
    "(h d) in": ("in h d", "h in d", "h d in"),
    "out (h d)": ("h d out", "out h d"),
    "(k g d) in": ("in k g d", "k in g d", "k g in d", "k g d in"),
    "out (k g d)": ("k g d out", "out k g d"),
    "out in x": ("x in out", "out in x"),
    "e out in": ("e in out",),
    "out in y x": ("y x in out", "out in y x"),
    "out in z y x": ("z y x in out", "out in z y x"),
    "one a": ("a",),
    "one a b": ("a b",),
}


class Convention(NamedTuple):
    """What is known of dimensions without their sizes."""

    order: Literal["in, out", "as the tensor"] | None  # the usual one of such an array
    heads: Literal["rows", "columns"] | None  # of the tensor, which an array may split


class Share(NamedTuple):
    """Which of several tensors, or arrays, that the other side has in one."""

    part: int
    shapes: tuple[Shape, ...]  # of all of them
    of_tensor: bool  # whether the tensor is the fused one


class Candidate(NamedTuple):
    """One way in which a tensor can fill an array."""

    tensor: Tensor  # without a path
    is_usual: bool  # whether it is the convention
    stacked_at: tuple[int, ...]  # dimensions of the array

    @property
    def is_transposed(self) -> bool:
        """Whether the dimensions of the tensor are in another order in the array."""
        left, right = self.tensor.sides(0)
        firsts = [names[0] for names in left]
        order = [firsts.index(name) for [name] in right if name in firsts]
        return order != sorted(order)

    def rule(self, path: str) -> Tensor:
        """Returns what does this to an array at a path."""
        x = self.tensor
        left, right = x.sides(0)
        if left == right and not x.put and not x.take:
            return Tensor(path)
        return Tensor(path, x.dimensions, take=x.take, put=x.put, **x.sizes)

    def described(self) -> str:
        """Says in a few words what it does."""
        tensor = self.tensor
        texts = ["(out, in) to (in, out)"] if self.is_transposed else []
        if "(" in str(tensor.dimensions):
            texts.append("split into heads")
        if self.stacked_at:
            texts.append(f"stacked in dimension {', '.join(map(str, self.stacked_at))}")
        if tensor.put or tensor.take.keys() - {"one"}:
            texts.append(f"a part of a fused {'array' if tensor.put else 'tensor'}, by its name")
        return ", ".join(texts)


@functools.lru_cache(4096)  # most layers have the same shapes
def candidates(
    shape: Shape,
    target: Shape,
    convention: Convention,
    stack: tuple[tuple[str, int], ...] = (),
    share: Share | None = None,
) -> tuple[Candidate, ...]:
    """Returns all ways in which a tensor of this shape can fill an array of the shape ``target``.

    ``stack`` has a label and a size for each index that the array has as a dimension.
    """
    known = dict(stack) | ({"part": len(share.shapes)} if share else {})
    found = []
    for left, right in ((left, right) for left, forms in _FORMS.items() for right in forms):
        heads = (
            {"(": "rows", "o": "columns"}[left[0]] if ") in" in left or "out (" in left else None
        )
        if heads and convention.heads not in (None, heads):
            continue
        kind = "as the tensor" if right == left else "in, out"
        for stacked in _inserted(right.split(), [*dict(stack)]):
            for axes, options in _shared(left, stacked, shape, target, share):
                sizes = dict(zip(axes, target, strict=False))
                if len(axes) != len(target) or not known.items() <= {**known, **sizes}.items():
                    continue
                tensor = Tensor("", f"{left} -> {' '.join(axes)}", **options)
                if _fits(tensor, shape, target):
                    places = tuple(axes.index(label) for label, _ in stack)
                    found.append(Candidate(tensor, kind == convention.order, places))
    return tuple(found)


def _fits(tensor: Tensor, shape: Shape, target: Shape) -> bool:
    """Whether a tensor of this shape, at the first index of what is stacked, has a place."""
    try:
        return tensor.place("", ["0"] * len(target), target).tensor_shape == shape
    except ValueError:
        return False


def _inserted(axes: list[str], labels: list[str]) -> Iterator[list[str]]:
    """Yields the axes with these labels among them, in all places."""
    rank = len(axes) + len(labels)
    for places in itertools.permutations(range(rank), len(labels)):
        row = [*axes]
        for place, label in sorted(zip(places, labels, strict=True)):
            row.insert(place, label)
        yield row


def _shared(
    left: str, axes: list[str], shape: Shape, target: Shape, share: Share | None
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yields the axes of an array, and the options of ``Tensor`` for its share, if it is one."""
    first = left.strip("(").split()[0]  # the outermost axis of rows, in which parts follow
    if first == "one":
        yield axes, {"take": {"one": 0}, "one": 1}
    elif share is None:
        yield axes, {}
    elif share.of_tensor:
        size = target[axes.index(first)] if len(axes) == len(target) else 0
        columns = math.prod(shape[1:])
        rows = [math.prod(each) // columns for each in share.shapes]
        if size and sum(rows) == shape[0] and rows[share.part] % size == 0:
            unit = rows[share.part] // size  # rows of each index of the axis
            start = sum(rows[: share.part]) // unit
            yield axes, {"take": {first: slice(start, start + size)}, first: sum(rows) // unit}
    elif len(axes) == len(target):
        size, rows = target[axes.index(first)], [each[0] for each in share.shapes]
        start, stop = (size * sum(rows[: share.part + k]) // sum(rows) for k in range(2))
        if start < stop and size != len(rows):  # otherwise it is a dimension for the parts
            yield axes, {"put": {first: slice(start, stop)}}
    else:
        for place in _inserted(axes, ["part"]):
            yield place, {"put": {"part": share.part}}
