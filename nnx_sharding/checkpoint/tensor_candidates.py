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
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

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


class FusedPart(NamedTuple):
    """One of several tensors, or arrays, that the other side has in one."""

    number: int  # its position among all parts
    shapes: tuple[Shape, ...]  # of all parts
    is_tensor_fused: bool  # whether the tensor has all parts; otherwise the array has
    by_head: bool  # whether each head has all parts, instead of each part all heads
    may_alternate: bool  # whether rows of all parts may be in turns


class Stacked(NamedTuple):
    """What one side has as a dimension, and the other one counts by names."""

    axis: str  # its name in a rule
    size: int
    tensor_index: int | None  # the index in the tensor; None if the array has the dimension


class Candidate(NamedTuple):
    """One way in which a tensor can fill an array."""

    tensor: Tensor  # without a path
    is_usual: bool  # whether it is the convention
    stacked_at: tuple[int, ...]  # dimensions of the array

    @property
    def is_transposed(self) -> bool:
        """Whether the dimensions of the tensor are in another order in the array."""
        left, right = self.tensor.sides(0)  # for each dimension the names of its axes
        firsts = [names[0] for names in left]
        order = [firsts.index(names[0]) for names in right if names[0] in firsts]
        return order != sorted(order)

    @property
    def operation(self) -> str:
        """What it does, without the names of axes: two forms may do the same."""
        left, right = self.tensor.sides(0)
        number = {axis: i for i, axis in enumerate(names_in(left))}
        sides = [[number.get(axis, axis) for axis in names] for names in (*left, *right)]
        taken = [(number[axis], part) for axis, part in self.tensor.take.items()]
        put = [(number.get(axis, axis), part) for axis, part in self.tensor.put.items()]
        return repr((sides, taken, put))

    def rule(self, path: str) -> Tensor:
        """Returns what does this to an array at a path."""
        tensor = self.tensor
        left, right = tensor.sides(0)
        if left == right and not tensor.put and not tensor.take:
            return Tensor(path)
        return Tensor(path, tensor.dimensions, take=tensor.take, put=tensor.put, **tensor.sizes)

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


class _Layout(NamedTuple):
    """How dimensions become others: the arguments of a ``Tensor``."""

    left: str  # the dimensions of the tensor: ``(h d) in``
    axes: list[str]  # the dimensions of the array: ``["in", "h", "d"]``
    take: Mapping[str, slice | int] = {}  # the part of the tensor's axes that the array has
    put: Mapping[str, slice | int] = {}  # the part of the array's axes that the tensor fills
    sizes: Mapping[str, int] = {}  # of axes of the tensor


@functools.lru_cache(4096)  # most layers have the same shapes
def candidates(
    shape: Shape,
    target: Shape,
    order: Order,
    convention: Convention,
    stacks: tuple[Stacked, ...] = (),
    fused: FusedPart | None = None,
) -> tuple[Candidate, ...]:
    """Returns all ways in which a tensor of this shape can fill an array of the shape ``target``.

    Args:
      shape: of the tensor.
      target: the shape of the array.
      order: of the matrices in the file.
      convention: what names say of the dimensions.
      stacks: what is a dimension on one of the sides only.
      fused: which part of the other side it is; None if nothing is fused.
    """
    in_array = {stack.axis: stack.size for stack in stacks if stack.tensor_index is None}
    in_tensor = [stack for stack in stacks if stack.tensor_index is not None]
    found: dict[str, Candidate] = {}  # by what is done, as two forms may do the same
    for form, array_forms in _FORMS.items():
        dimensions = _in_order(form, order)
        if not _may_split_heads(dimensions, convention):
            continue
        # A tensor has what it stacks in front.
        left = " ".join([*(stack.axis for stack in in_tensor), *dimensions])
        for array_form in array_forms:
            is_usual = {
                "in, out": _is_in_out(array_form.split()),
                "as the tensor": array_form == " ".join(dimensions),
                None: False,
            }[convention.order]
            for axes in _inserted(array_form.split(), [*in_array]):
                for layout in _layouts(left, axes, target, fused):
                    known_sizes = in_array | ({"part": len(fused.shapes)} if fused else {})
                    tensor = _tensor(layout, target, known_sizes, in_tensor)
                    if tensor is not None and _fits(tensor, shape, target):
                        stacked_at = tuple(layout.axes.index(axis) for axis in in_array)
                        way = Candidate(tensor, is_usual, stacked_at)
                        if is_usual or way.operation not in found:
                            found[way.operation] = way
    return tuple(found.values())


def _in_order(form: str, order: Order) -> list[str]:
    """Returns the dimensions of a tensor of this form in a file with matrices in this order.

    ``out (h d)`` is ``["out", "(h d)"]``, or reversed.
    """
    dimensions = re.findall(r"\(.*?\)|\w+", form)
    is_matrix = len(dimensions) > 1 and dimensions[-1] not in "abx"
    if order == "in out" and is_matrix:
        dimensions[-2:] = reversed(dimensions[-2:])
    return dimensions


def _may_split_heads(dimensions: list[str], convention: Convention) -> bool:
    """Whether names allow that the array splits the dimension of the tensor that has heads."""
    has_heads = any(dimension.startswith("(") for dimension in dimensions)
    if not has_heads or len(dimensions) == 1:
        return True
    split = "in" if "out" in dimensions else "out"  # the other dimension of the matrix
    return convention.heads in (None, split)


def _is_in_out(axes: list[str]) -> bool:
    """Whether all axes of inputs are before those of outputs, as in all kernels of Flax."""
    return axes[0] == "in" or axes[-1] == "out" or {"in", "out"}.isdisjoint(axes)


def _tensor(
    layout: _Layout, target: Shape, known_sizes: Mapping[str, int], in_tensor: Sequence[Stacked]
) -> Tensor | None:
    """Returns what places a tensor by a layout; None if an array of this shape cannot have that.

    Args:
      layout: the dimensions.
      target: the shape of the array.
      known_sizes: the sizes of some of the array's axes.
      in_tensor: what is stacked in the tensor.
    """
    if len(layout.axes) != len(target):
        return None
    sizes = zip(layout.axes, target, strict=True)
    if any(known_sizes.get(axis, size) != size for axis, size in sizes):
        return None
    indices = {stack.axis: stack.tensor_index or 0 for stack in in_tensor}
    stack_sizes = {stack.axis: stack.size for stack in in_tensor}
    return Tensor(
        "",
        f"{layout.left} -> {' '.join(layout.axes)}",
        take={**indices, **layout.take},
        put=layout.put,
        **{**stack_sizes, **layout.sizes},
    )


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


def _layouts(
    left: str, axes: list[str], target: Shape, fused: FusedPart | None
) -> Iterator[_Layout]:
    """Yields the ways to place one part if a side is fused; else the layout without parts.

    Args:
      left: the dimensions of the tensor.
      axes: those of the array, without one for parts.
      target: the shape of the array.
      fused: which part it is.
    """
    names = re.findall(r"\w+", left)
    outer = next(axis for axis in ("out", "h", "k", "one") if axis in names)  # has rows of parts
    if outer == "one":  # a dimension of the tensor that arrays do not have
        yield _Layout(left, axes, take={"one": 0}, sizes={"one": 1})
    elif fused is None:
        yield _Layout(left, axes)
    elif not fused.is_tensor_fused and len(axes) != len(target):  # a dimension for the parts
        for with_part in _inserted(axes, ["part"]):
            yield _Layout(left, with_part, put={"part": fused.number})
    elif len(axes) == len(target):
        size = target[axes.index(outer)]
        if fused.is_tensor_fused:
            yield from _layouts_in_tensor(left, axes, outer, size, fused)
        elif size != len(fused.shapes) and not fused.by_head:
            # Parts have as many rows as numbers, in proportion.
            counts = [math.prod(shape) for shape in fused.shapes]
            start = size * sum(counts[: fused.number]) // sum(counts)
            stop = size * sum(counts[: fused.number + 1]) // sum(counts)
            if start < stop:
                yield _Layout(left, axes, put={outer: slice(start, stop)})


def _layouts_in_tensor(
    left: str, axes: list[str], outer: str, size: int, fused: FusedPart
) -> Iterator[_Layout]:
    """Yields the layouts of an array that is a part of a tensor, in its rows or in each head.

    Args:
      left: the dimensions of the tensor, without one for parts.
      axes: those of the array.
      outer: the outermost axis of the rows.
      size: that of this axis in the array.
      fused: which part the array is.
    """
    counts = [math.prod(shape) for shape in fused.shapes]  # of numbers, by part
    own, before, least = counts[fused.number], sum(counts[: fused.number]), min(counts)
    # With fewer heads of keys and values than of queries.
    is_grouped = len({*counts}) > 1
    # Parts one after the other, with as many rows as numbers, in proportion.
    if (is_grouped or not fused.by_head) and own and size * before % own == 0:
        start = size * before // own
        rows = slice(start, start + size)
        yield _Layout(left, axes, take={outer: rows}, sizes={outer: size * sum(counts) // own})
    # The first row of each part, the second of each, and so on.
    if fused.may_alternate and outer == "out":
        alternating = left.replace("out", "(out p)")
        yield _Layout(alternating, axes, take={"p": fused.number}, sizes={"p": len(counts)})
    # Each head of keys with its queries and values; with one, this would be the first layout.
    has_one_head = is_grouped and size * least == own
    if fused.by_head and outer == "h" and least and not has_one_head:
        first, num_heads = before // least, own // least  # of this part, in each head of keys
        by_head, sizes = left.replace("h d", "h p d"), {"p": sum(counts) // least}
        if num_heads == 1:
            yield _Layout(by_head, axes, take={"p": first}, sizes=sizes)
        else:
            merged = ["(h p)" if axis == "h" else axis for axis in axes]
            yield _Layout(by_head, merged, take={"p": slice(first, first + num_heads)}, sizes=sizes)
