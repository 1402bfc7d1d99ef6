"""In which ways a tensor can fill an array, as far as their shapes tell.

A file has the matrices of linear layers as (out, in), as PyTorch, or as (in, out), as GPT-2; with
the heads of attention one after the other in the rows, or columns. ``_FORMS`` has what arrays make
of it. Any of these may also be stacked, in the array or in the tensor, or share an array or a
tensor with others: in a dimension for these, one after the other, or head by head.

All ways that fit are returned, for the caller to decide, or not to. The numbers themselves say
nothing: whether rows are ordered for one rotary embedding or another, nobody can see from shapes.

A *form* is the dimensions of a tensor, written as in a rule: ``"(h d) in"`` is a matrix with the
heads, each of d rows, one after the other. The names of axes are those of `_FORMS`:

    out, in   the features that a layer returns and takes    e         experts
    h, d      heads, and the features of each                x, y, z   the window of a convolution
    k, g      heads of keys, and the queries of each         one       of size 1 in the tensor
    part, p   the parts of a fused side                      a, b      any others
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .tensor_layouts import Dimensions, names_in
from .tensor_rules import Tensor

Shape: TypeAlias = tuple[int, ...]
Order: TypeAlias = Literal["out in", "in out"]  # of the matrices in a file

# Dimensions of tensors in a file of the order "out in" → the dimensions that arrays may have. The
# first of these are what kernels of Flax have.
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
    """What the names of a tensor and its array say of the dimensions."""

    # The usual order of such an array: a kernel is "in, out", an embedding "as the tensor".
    order: Literal["in, out", "as the tensor"] | None
    # The features that are heads, so the array may split them; None if nothing is known.
    heads: Literal["in", "out"] | None


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
        left, right = self._sides()
        firsts = [names[0] for names in left]
        order = [firsts.index(names[0]) for names in right if names[0] in firsts]
        return order != sorted(order)

    @property
    def operation(self) -> str:
        """Text that is equal for two candidates that do the same with other names of axes.

        ``"out in -> in out"`` and ``"a b -> b a"`` are both ``"([[0], [1], [1], [0]], [], [])"``.
        """
        left, right = self._sides()
        # Axes are numbered in the order of the tensor. Those that it lacks, such as {0} and
        # "part", keep their names. They may be in `put`, but not in `take`.
        number = {axis: i for i, axis in enumerate(names_in(left))}
        sides = [[number.get(axis, axis) for axis in names] for names in (*left, *right)]
        taken = [(number[axis], part) for axis, part in self.tensor.take.items()]
        put = [(number.get(axis, axis), part) for axis, part in self.tensor.put.items()]
        return repr((sides, taken, put))

    def rule(self, path: str) -> Tensor:
        """Returns the rule that does this for the array at a path."""
        tensor = self.tensor
        left, right = self._sides()
        if left == right and not tensor.put and not tensor.take:
            return Tensor(path)  # the array is the tensor, which needs no names of axes
        return Tensor(path, tensor.dimensions, take=tensor.take, put=tensor.put, **tensor.sizes)

    def described(self) -> str:
        """Says in a few words what it does, for the table of matches."""
        tensor = self.tensor
        texts = ["(out, in) to (in, out)"] if self.is_transposed else []
        if "(" in str(tensor.dimensions):  # "(h d) in -> in h d": one dimension of several axes
            texts.append("split into heads")
        if self.stacked_at:
            texts.append(f"stacked in dimension {', '.join(map(str, self.stacked_at))}")
        # Index 0 of "one", an axis of size 1, is all of the tensor.
        if tensor.put or tensor.take.keys() - {"one"}:
            # Which part it is, the names of tensors and arrays have told, as of q in qkv.
            texts.append(f"a part of {'an array' if tensor.put else 'a tensor'}, by its name")
        return ", ".join(texts)

    def _sides(self) -> tuple[Dimensions, Dimensions]:
        """Returns the axes of each dimension of the tensor, and of each one of the array."""
        return self.tensor.sides(0)  # any rank: candidates always have `dimensions`


class _Layout(NamedTuple):
    """How the dimensions of a tensor become those of an array: the arguments of a ``Tensor``."""

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
      shape: the shape of the tensor.
      target: the shape of the array.
      order: the order of the matrices in the file.
      convention: what names say of the dimensions.
      stacks: what is a dimension on one of the sides only.
      fused: which part of the other side it is; None if nothing is fused.
    """
    # What only the array has as a dimension, and what only the tensor has.
    array_stacks = {stack.axis: stack.size for stack in stacks if stack.tensor_index is None}
    tensor_stacks = [stack for stack in stacks if stack.tensor_index is not None]
    known_sizes = {**array_stacks}  # of axes of the array
    if fused:
        known_sizes["part"] = len(fused.shapes)  # if the array has a dimension for the parts
    ways: list[Candidate] = []
    for form, array_forms in _FORMS.items():
        dimensions = _in_order(form, order)  # "(h d) in" → ["(h d)", "in"]
        if not _may_split_heads(dimensions, convention):
            continue
        # A tensor has what it stacks in front.
        left = " ".join([*(stack.axis for stack in tensor_stacks), *dimensions])
        for array_form in array_forms:
            is_usual = _is_usual(array_form.split(), dimensions, convention)
            # An array may have what it stacks in any dimension.
            for axes in _inserted(array_form.split(), [*array_stacks]):
                for layout in _layouts(left, axes, target, fused):
                    tensor = _tensor(layout, target, known_sizes, tensor_stacks)
                    if tensor is None or not _fits(tensor, shape, target):
                        continue
                    stacked_at = tuple(layout.axes.index(axis) for axis in array_stacks)
                    ways.append(Candidate(tensor, is_usual, stacked_at))
    return tuple(distinct(ways))


def distinct(ways: Iterable[Candidate]) -> list[Candidate]:
    """Returns one of those ways that do the same: a usual one, if one of them is."""
    by_operation: dict[str, Candidate] = {}
    for way in ways:
        if way.is_usual or way.operation not in by_operation:
            by_operation[way.operation] = way
    return [*by_operation.values()]


def _in_order(form: str, order: Order) -> list[str]:
    """Returns the dimensions of a tensor of this form in a file with matrices in this order.

    ``"out (h d)"`` gives ``["out", "(h d)"]``, or for the order "in out", ``["(h d)", "out"]``.
    """
    dimensions = re.findall(r"\(.*?\)|\w+", form)
    # The last two are a matrix, but for convolutions, whose last dimension is x, and for "one a b".
    is_matrix = len(dimensions) > 1 and dimensions[-1] not in ("a", "b", "x")
    if order == "in out" and is_matrix:  # experts, the "e" of "e out in", stay in front
        dimensions[-2:] = reversed(dimensions[-2:])
    return dimensions


def _may_split_heads(dimensions: list[str], convention: Convention) -> bool:
    """Whether names allow that the array splits the dimension of the tensor that has heads."""
    has_heads = any(dimension.startswith("(") for dimension in dimensions)
    if not has_heads or len(dimensions) == 1:
        return True
    split = "in" if "out" in dimensions else "out"  # the other dimension of the matrix
    return convention.heads in (None, split)


def _is_usual(axes: list[str], dimensions: list[str], convention: Convention) -> bool:
    """Whether these axes of an array are the usual ones for a tensor of these dimensions."""
    if convention.order == "in, out":  # all inputs before all outputs, as in all kernels of Flax
        return axes[0] == "in" or axes[-1] == "out" or {"in", "out"}.isdisjoint(axes)
    return convention.order == "as the tensor" and axes == dimensions


def _tensor(
    layout: _Layout,
    target: Shape,
    known_sizes: Mapping[str, int],
    tensor_stacks: Sequence[Stacked],
) -> Tensor | None:
    """Returns the rule of a layout, such as ``Tensor("", "(h d) in -> in h d")``.

    It has no path, since the same rule serves all arrays of this shape. It is None if an array of
    this shape cannot have the layout: the number of axes differs, or a size that is known.

    Args:
      layout: the dimensions of both sides, and which parts of them belong together.
      target: the shape of the array.
      known_sizes: the sizes of some of the array's axes.
      tensor_stacks: what is stacked in the tensor: the array has one index of each.
    """
    if len(layout.axes) != len(target):
        return None
    for axis, size in zip(layout.axes, target, strict=True):
        if known_sizes.get(axis, size) != size:
            return None
    indices = {x.axis: x.tensor_index for x in tensor_stacks if x.tensor_index is not None}
    stack_sizes = {stack.axis: stack.size for stack in tensor_stacks}
    return Tensor(
        "",
        f"{layout.left} -> {' '.join(layout.axes)}",
        take={**indices, **layout.take},
        put=layout.put,
        **{**stack_sizes, **layout.sizes},
    )


def _fits(tensor: Tensor, shape: Shape, target: Shape) -> bool:
    """Whether a tensor of this shape fits into an array of the shape ``target`` by the rule."""
    # Of what is stacked, each ``{i}`` of the dimensions, the first index shows whether it fits.
    numbers = [int(number) for number in re.findall(r"{(\d+)}", str(tensor.dimensions))]
    groups = ["0"] * (1 + max(numbers, default=-1))
    try:
        return tensor.place("", groups, target).tensor_shape == shape
    except ValueError:
        return False


def _inserted(axes: list[str], labels: list[str]) -> Iterator[list[str]]:
    """Yields the axes with these labels among them, in all places: each label may be in any.

    For ``["in", "out"]`` and ``["{0}"]`` it yields ``["{0}", "in", "out"]``,
    ``["in", "{0}", "out"]`` and ``["in", "out", "{0}"]``.
    """
    rank = len(axes) + len(labels)
    for places in itertools.permutations(range(rank), len(labels)):  # the final place of each label
        result = [*axes]
        # From the left, because a label that is inserted later must not move one that is there.
        for place, label in sorted(zip(places, labels, strict=True)):
            result.insert(place, label)
        yield result


def _layouts(
    left: str, axes: list[str], target: Shape, fused: FusedPart | None
) -> Iterator[_Layout]:
    """Yields the layouts in which an array may have a tensor, or one part of the fused side.

    Args:
      left: the dimensions of the tensor, such as ``"(h d) in"``.
      axes: the dimensions of the array without one for parts, such as ``["in", "h", "d"]``.
      target: the shape of the array.
      fused: which part of the other side it is; None if nothing is fused.
    """
    if "one" in left.split():  # "one a": an axis of size 1 in the tensor that arrays do not have
        yield _Layout(left, axes, take={"one": 0}, sizes={"one": 1})
    elif fused is None:
        yield _Layout(left, axes)
    elif len(axes) != len(target):  # one more: the array may have a dimension for the parts
        if not fused.is_tensor_fused:
            for with_part in _inserted(axes, ["part"]):
                yield _Layout(left, with_part, put={"part": fused.number})
    else:
        # The axis along which parts follow each other: the rows of a matrix, or its heads.
        outer = next(axis for axis in ("out", "h", "k") if axis in re.findall(r"\w+", left))
        size = target[axes.index(outer)]
        if fused.is_tensor_fused:
            yield from _layouts_in_tensor(left, axes, outer, size, fused)
        # The array has the parts one after the other. If each were a single row, its dimension
        # would be one for parts, as above. In each head, a part is no range of a dimension.
        elif size != len(fused.shapes) and not fused.by_head:
            # Of the rows, each part has a share, in proportion to its elements.
            elements = [math.prod(shape) for shape in fused.shapes]
            start = size * sum(elements[: fused.number]) // sum(elements)
            stop = size * sum(elements[: fused.number + 1]) // sum(elements)
            if start < stop:
                yield _Layout(left, axes, put={outer: slice(start, stop)})


def _layouts_in_tensor(
    left: str, axes: list[str], outer: str, size: int, fused: FusedPart
) -> Iterator[_Layout]:
    """Yields the layouts of an array that is a part of a tensor, in its rows or in each head.

    In a tensor of 8 heads of queries q, 2 of keys k and 2 of values v, each head of d rows, the
    order may be one of these:

        one after the other    q q q q q q q q  k k  v v
        by head of keys        q q q q k v  q q q q k v

    The array of queries takes the heads 0:8 of 12 of the first. Of the second, which is
    ``"(h p d) in"`` with h = 2 and p = 6, it takes the slice 0:4 of p, and keys take the index 4.

    Args:
      left: the dimensions of the tensor, without one for parts, such as ``"(h d) in"``.
      axes: the dimensions of the array, such as ``["in", "h", "d"]``.
      outer: the axis along which parts follow each other: ``"out"``, ``"h"`` or ``"k"``.
      size: the size of this axis in the array: 8 for queries.
      fused: which part the array is.
    """
    # The numbers of elements. Those of q, k and v are 8, 2 and 2 times those of a head.
    elements = [math.prod(shape) for shape in fused.shapes]
    own, total, smallest = elements[fused.number], sum(elements), min(elements)
    before = sum(elements[: fused.number])
    # Whether there are fewer heads of keys and values than of queries.
    is_grouped = len({*elements}) > 1
    # Parts one after the other. By `own` elements per `size`, the array starts at the quotient.
    if (is_grouped or not fused.by_head) and own and size * before % own == 0:
        start = size * before // own
        rows = slice(start, start + size)
        yield _Layout(left, axes, take={outer: rows}, sizes={outer: size * total // own})
    # The first row of each part, the second of each, and so on.
    if fused.may_alternate and outer == "out":
        alternating = left.replace("out", "(out p)")
        yield _Layout(alternating, axes, take={"p": fused.number}, sizes={"p": len(elements)})
    # By head of keys, which are the smallest part. If there is only one such head, all parts
    # follow each other, which is the first layout.
    has_one_head = is_grouped and size * smallest == own
    if fused.by_head and outer == "h" and smallest and not has_one_head:
        # In each head of keys, where the part begins, how many heads it has, and all parts have.
        first, num_heads, num_all_heads = before // smallest, own // smallest, total // smallest
        by_head, sizes = left.replace("h d", "h p d"), {"p": num_all_heads}
        if num_heads == 1:
            yield _Layout(by_head, axes, take={"p": first}, sizes=sizes)
        else:
            merged = ["(h p)" if axis == "h" else axis for axis in axes]
            yield _Layout(by_head, merged, take={"p": slice(first, first + num_heads)}, sizes=sizes)
