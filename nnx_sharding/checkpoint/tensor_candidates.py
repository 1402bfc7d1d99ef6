"""In which ways a tensor can fill an array, as far as their shapes tell.

A file has the matrices of linear layers as (out, in), as PyTorch, or as (in, out), as GPT-2; with
the heads of attention one after the other in the rows, or columns. ``_FORMS`` has what arrays make
of it. Any of these may also be stacked, in the array or in the tensor, or share an array or a
tensor with others: in a dimension for these, one after the other, or head by head.

All ways that fit are returned, for the caller to decide, or not to. The numbers themselves say
nothing: whether rows are ordered for one rotary embedding or another, nobody can see from shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from .tensor_layouts import names_in
from .tensor_rules import Tensor

Shape: TypeAlias = tuple[int, ...]
Order: TypeAlias = Literal["out in", "in out"]  # of the matrices in a file

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
    "e out in": ("e in out", "e out in"),
    "out in x": ("x in out", "out in x"),
    "out in y x": ("y x in out", "out in y x"),
    "out in z y x": ("z y x in out", "out in z y x"),
    "one a": ("a",),
    "one a b": ("a b",),
}


class Convention(NamedTuple):
    """What is known of dimensions without their sizes."""

    order: Literal["in, out", "as the tensor"] | None  # the usual one of such an array
    heads: Literal["in", "out"] | None  # the dimension of the tensor that an array may split


class Share(NamedTuple):
    """Which of several tensors, or arrays, that the other side has in one."""

    part: int
    shapes: tuple[Shape, ...]  # of all of them
    of_tensor: bool  # whether the tensor is the fused one
    by_head: bool = False  # whether each head has all parts, instead of each part all heads
    in_turns: bool = False  # whether rows of all parts may alternate


class Stacked(NamedTuple):
    """What one side has as a dimension, and the other one counts by names."""

    axis: str
    size: int
    at: int | None  # the index in the tensor; None if the array has the dimension


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
        order = [firsts.index(names[0]) for names in right if names[0] in firsts]
        return order != sorted(order)

    @property
    def operation(self) -> str:
        """What it does: its axes as numbers, as two forms may do the same."""
        left, right = self.tensor.sides(0)
        number = {axis: i for i, axis in enumerate(names_in(left))}
        sides = [[number.get(axis, axis) for axis in names] for names in (*left, *right)]
        taken = [(number[axis], part) for axis, part in self.tensor.take.items()]
        put = [(number.get(axis, axis), part) for axis, part in self.tensor.put.items()]
        return repr((sides, taken, put))

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
            texts.append(f"a part of {'an array' if tensor.put else 'a tensor'}, by its name")
        return ", ".join(texts)


@functools.lru_cache(4096)  # most layers have the same shapes
def candidates(
    shape: Shape,
    target: Shape,
    order: Order,
    convention: Convention,
    stack: tuple[Stacked, ...] = (),
    share: Share | None = None,
) -> tuple[Candidate, ...]:
    """Returns all ways in which a tensor of this shape can fill an array of the shape ``target``.

    ``stack`` has what is a dimension on one of the sides only.
    """
    known = {x.axis: x.size for x in stack if x.at is None}
    taken: dict[str, Any] = {x.axis: x.size for x in stack if x.at is not None}
    indices = {x.axis: x.at for x in stack if x.at is not None}
    fixed = known | ({"part": len(share.shapes)} if share else {})
    found = dict[str, Candidate]()  # by what is done, as two forms may do the same
    for form, right in ((form, right) for form, rights in _FORMS.items() for right in rights):
        matrix = _in_order(form, order)
        split = "in" if "out" in matrix else "out"
        if "(" in form and len(matrix) > 1 and convention.heads not in (None, split):
            continue
        is_usual = {
            "in, out": _is_in_out(right.split()),
            "as the tensor": right == " ".join(matrix),
            None: False,
        }[convention.order]
        for stacked in _inserted(right.split(), [*known]):
            layouts = _shared(" ".join([*taken, *matrix]), stacked, target, share)
            for left, axes, options in layouts:
                sizes = dict(zip(axes, target, strict=False))
                if len(axes) != len(target) or not fixed.items() <= {**fixed, **sizes}.items():
                    continue
                options["take"] = indices | options.get("take", {})
                dimensions = f"{left} -> {' '.join(axes)}"
                tensor = Tensor("", dimensions, **{**taken, **options})
                if _fits(tensor, shape, target):
                    places = tuple(axes.index(axis) for axis in known)
                    way = Candidate(tensor, is_usual, places)
                    if is_usual or way.operation not in found:
                        found[way.operation] = way
    return tuple(found.values())


def _in_order(form: str, order: Order) -> list[str]:
    """Returns the dimensions of a tensor of this form in a file with matrices in this order."""
    dimensions = re.findall(r"\(.*?\)|\w+", form)
    is_matrix = len(dimensions) > 1 and dimensions[-1] not in "abx"
    if order == "in out" and is_matrix:
        dimensions[-2:] = reversed(dimensions[-2:])
    return dimensions


def _is_in_out(axes: list[str]) -> bool:
    """Whether all axes of inputs are before those of outputs, as in all kernels of Flax."""
    return axes[0] == "in" or axes[-1] == "out" or {"in", "out"}.isdisjoint(axes)


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


# The dimensions of the tensor, the axes of the array, and further options of ``Tensor``.
Layout: TypeAlias = tuple[str, list[str], dict[str, Any]]


def _shared(left: str, axes: list[str], target: Shape, share: Share | None) -> Iterator[Layout]:
    """Yields the layouts of an array, or of its share if it shares an array or a tensor."""
    names = re.findall(r"\w+", left)
    outer = next(axis for axis in ("out", "h", "k", "one") if axis in names)
    if outer == "one":
        yield left, axes, {"take": {"one": 0}, "one": 1}
    elif share is None:
        yield left, axes, {}
    elif not share.of_tensor and len(axes) != len(target):
        for place in _inserted(axes, ["part"]):
            yield left, place, {"put": {"part": share.part}}
    elif len(axes) == len(target):
        size, parts = target[axes.index(outer)], [math.prod(each) for each in share.shapes]
        if share.of_tensor:
            yield from _part_of_tensor(left, axes, outer, size, share, parts)
        elif size != len(parts) and not share.by_head:
            # Parts have as many rows as numbers, in proportion.
            ends = [size * sum(parts[: share.part + k]) // sum(parts) for k in range(2)]
            if ends[0] < ends[1]:
                yield left, axes, {"put": {outer: slice(*ends)}}


def _part_of_tensor(
    left: str, axes: list[str], outer: str, size: int, share: Share, parts: list[int]
) -> Iterator[Layout]:
    """Yields the layouts of an array that is a part of a tensor, in its rows or in each head.

    ``size`` is that of the outermost axis of the array's part of the rows.
    """
    before, part, least = sum(parts[: share.part]), parts[share.part], min(parts)
    is_grouped = len({*parts}) > 1
    if not (share.by_head and not is_grouped) and part and size * before % part == 0:
        start = size * before // part
        rows = {"take": {outer: slice(start, start + size)}, outer: size * sum(parts) // part}
        yield left, axes, rows
    if share.in_turns and outer == "out":
        rows = {"take": {"p": share.part}, "p": len(parts)}
        yield left.replace("out", "(out p)"), axes, rows
    # With one head of keys, this would be the same.
    if share.by_head and outer == "h" and least and not (is_grouped and size * least == part):
        start, count = before // least, part // least
        options: dict[str, Any] = {"take": {"p": start}, "p": sum(parts) // least}
        if count > 1:
            axes = ["(h p)" if axis == "h" else axis for axis in axes]
            options["take"] = {"p": slice(start, start + count)}
        yield left.replace("h d", "h p d"), axes, options
