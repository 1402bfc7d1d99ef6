"""Finds the ways in which a tensor can fill an array, as far as their shapes tell.

A file has the matrices of linear layers as (out, in), like PyTorch, or as (in, out), like GPT-2.
The heads of attention follow each other in the rows or the columns. ``_FORMS`` has the dimensions
that arrays may have for each of these. Tensors may also be stacked, in the array or in the tensor,
and several tensors may be fused into one array, or several arrays into one tensor: along a
dimension of its own, one after the other, or head by head.

All ways that fit are returned, and the caller decides. Shapes tell nothing about the meaning of
numbers, for example whether rows are ordered for one rotary embedding or another.

A *form* is the dimensions of a tensor, written as in a rule: ``"(h d) in"`` is a matrix with the
heads, each of d rows, one after the other. The names of axes are those of `_FORMS`:

    out, in   the features that a layer returns and takes    e         experts
    h, d      heads, and the features of each                x, y, z   the window of a convolution
    k, g      heads of keys, and the queries of each         one       of size 1 in the tensor
    part, p   the parts of a fused side                      a, b      any other axes
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
Order: TypeAlias = Literal["out in", "in out"]  # the order of the matrices in a file

# Dimensions of tensors in a file of the order "out in" → the dimensions that arrays may have,
# first the dimensions of a kernel of Flax.
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
    """The facts about dimensions that the names of a tensor and its array tell."""

    # The usual order of such an array: a kernel is "in, out", an embedding "as the tensor".
    order: Literal["in, out", "as the tensor"] | None
    # The features that are heads, so the array may split them; None if nothing is known.
    heads: Literal["in", "out"] | None


class FusedPart(NamedTuple):
    """One of several tensors, or arrays, that the other side has fused into one."""

    number: int  # the position among all parts
    shapes: tuple[Shape, ...]  # the shapes of all parts
    is_tensor_fused: bool  # whether the tensor has all parts; if not, the array has them
    by_head: bool  # True: each head has all parts; False: each part has all heads
    may_alternate: bool  # whether rows of all parts may be in turns


class Stacked(NamedTuple):
    """A dimension of stacked layers on one side, which the other side counts by names."""

    axis: str  # the name of the dimension in a rule, such as {0} or layers
    size: int  # the number of layers that are stacked
    tensor_index: int | None  # the index in the tensor; None if the array has the dimension


class Candidate(NamedTuple):
    """One way in which a tensor can fill an array."""

    tensor: Tensor  # the rule, whose path is empty; `rule` returns it with a path
    is_usual: bool  # whether it is the convention
    # The dimensions of the array that are stacked, in the order of the counters in tensors' names.
    stacked_at: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        """Whether the dimensions of the tensor are in another order in the array."""
        left, right = self._sides()
        # A dimension of the tensor is known by its first axis. Dimensions of the array that begin
        # with another axis, such as the d of "(h d) in -> in h d", do not count.
        firsts = [names[0] for names in left]
        order = [firsts.index(names[0]) for names in right if names[0] in firsts]
        return order != sorted(order)

    @property
    def operation(self) -> str:
        """A text that is equal for two candidates that do the same with other names of axes.

        ``"out in -> in out"`` and ``"a b -> b a"`` are both ``"([[0], [1], [1], [0]], [], [])"``.
        """
        left, right = self._sides()
        # Axes are numbered in the order of the tensor. Axes that the tensor lacks, such as {0} and
        # "part", keep their names. Such axes may be in `put`, but not in `take`.
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
            return Tensor(path)  # the array is the tensor, so the rule needs no names of axes
        return Tensor(path, tensor.dimensions, take=tensor.take, put=tensor.put, **tensor.sizes)

    def described(self) -> str:
        """Returns a text that says what the candidate does, for the table of matches."""
        tensor = self.tensor
        texts = ["(out, in) to (in, out)"] if self.is_transposed else []
        if "(" in str(tensor.dimensions):  # "(h d) in -> in h d": one dimension of several axes
            texts.append("split into heads")
        if self.stacked_at:
            texts.append(f"stacked in dimension {', '.join(map(str, self.stacked_at))}")
        # The axis "one" is left out, because its index 0 is all of the tensor: its size is 1.
        if tensor.put or tensor.take.keys() - {"one"}:
            # The names of tensors and arrays have told which part it is, for example q of qkv.
            texts.append(f"a part of {'an array' if tensor.put else 'a tensor'}, by its name")
        return ", ".join(texts)

    def _sides(self) -> tuple[Dimensions, Dimensions]:
        """Returns the axes of each dimension of the tensor, and of each dimension of the array."""
        return self.tensor.sides(0)  # the rank has no effect, because there are `dimensions`


class _Layout(NamedTuple):
    """The arguments of a ``Tensor``: how dimensions of a tensor become dimensions of an array."""

    left: str  # the dimensions of the tensor: ``(h d) in``
    axes: list[str]  # the dimensions of the array: ``["in", "h", "d"]``
    take: Mapping[str, slice | int] = {}  # the part of the tensor's axes that the array has
    put: Mapping[str, slice | int] = {}  # the part of the array's axes that the tensor fills
    sizes: Mapping[str, int] = {}  # sizes of axes of the tensor


@functools.lru_cache(4096)  # most layers have the same shapes, so most calls are repeated
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
      convention: the facts that names tell about the dimensions.
      stacks: the stacked dimensions that only one of the sides has.
      fused: the part of the other side that the tensor or array is; None if nothing is fused.
    """
    # The stacked dimensions of the array (sizes by axis), and those of the tensor.
    array_stacks = {stack.axis: stack.size for stack in stacks if stack.tensor_index is None}
    tensor_stacks = [stack for stack in stacks if stack.tensor_index is not None]
    known_sizes = {**array_stacks}  # known sizes of axes of the array
    if fused:
        known_sizes["part"] = len(fused.shapes)  # the array may have a dimension for the parts
    ways: list[Candidate] = []
    for dimensions, array_axes, is_usual in _forms(order, convention):
        # A tensor has its stacked dimensions in front.
        left = " ".join([*(stack.axis for stack in tensor_stacks), *dimensions])
        # An array may have its stacked dimensions in any place.
        for axes in _inserted(array_axes, [*array_stacks]):
            for layout in _layouts(left, axes, target, fused):
                tensor = _tensor(layout, target, known_sizes, tensor_stacks)
                # None: an array of this shape cannot have the layout.
                if tensor is not None and _fits(tensor, shape, target):
                    stacked_at = tuple(layout.axes.index(axis) for axis in array_stacks)
                    ways.append(Candidate(tensor, is_usual, stacked_at))
    return tuple(distinct(ways))


def _forms(order: Order, convention: Convention) -> Iterator[tuple[list[str], list[str], bool]]:
    """Yields all forms of a tensor and an array that names allow, without stacks and fused parts.

    Args:
      order: the order of the matrices in the file.
      convention: the facts that names tell about the dimensions.

    Yields:
      The dimensions of the tensor, ``["(h d)", "in"]``; the axes of the array,
      ``["in", "h", "d"]``; and whether these are the usual ones.
    """
    for form, array_forms in _FORMS.items():
        dimensions = _in_order(form, order)
        if _may_split_heads(dimensions, convention):
            for array_form in array_forms:
                axes = array_form.split()
                yield dimensions, axes, _is_usual(axes, dimensions, convention)


def distinct(ways: Iterable[Candidate]) -> list[Candidate]:
    """Returns the ways, with one of several that do the same: a usual one, if there is one."""
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
    # The last two dimensions are a matrix. The exceptions are convolutions, whose last dimension is
    # x, and forms such as "one a b".
    is_matrix = len(dimensions) > 1 and dimensions[-1] not in ("a", "b", "x")
    if order == "in out" and is_matrix:
        dimensions[-2:] = reversed(dimensions[-2:])  # experts, the "e" of "e out in", stay in front
    return dimensions


def _may_split_heads(dimensions: list[str], convention: Convention) -> bool:
    """Whether names allow that the array splits the dimension of the tensor that has heads.

    True as well if the form has no heads, or is a vector. ``dimensions`` are the tensor's, such as
    ``["(h d)", "in"]``, and ``convention.heads`` is the dimension of heads; None if it is unknown.
    """
    has_heads = any(dimension.startswith("(") for dimension in dimensions)
    if not has_heads or len(dimensions) == 1:
        return True
    # The dimension with heads has no name of its own: it is the one that is missing.
    dimension_of_heads = "in" if "out" in dimensions else "out"
    return convention.heads in (None, dimension_of_heads)


def _is_usual(axes: list[str], dimensions: list[str], convention: Convention) -> bool:
    """Whether these axes of an array are the usual ones for a tensor of these dimensions.

    Nothing is usual if names do not tell an order (``convention.order`` is None).
    """
    # Kernels of Flax have all inputs before all outputs.
    if convention.order == "in, out":
        return axes[0] == "in" or axes[-1] == "out" or {"in", "out"}.isdisjoint(axes)
    return convention.order == "as the tensor" and axes == dimensions


def _tensor(
    layout: _Layout,
    target: Shape,
    known_sizes: Mapping[str, int],
    tensor_stacks: Sequence[Stacked],
) -> Tensor | None:
    """Returns the rule of a layout, such as ``Tensor("", "(h d) in -> in h d")``.

    The rule has no path, because it serves all arrays of this shape. The result is None if an array
    of this shape cannot have the layout: the number of axes differs, or a size that is known.

    Args:
      layout: the dimensions of both sides, and the parts of them that belong together.
      target: the shape of the array.
      known_sizes: the sizes of some of the array's axes.
      tensor_stacks: the stacked dimensions of the tensor. The array has one index of each.
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
    # Each ``{i}`` in the dimensions is an index of a stacked dimension. Index 0 is tried, because
    # all indices fit alike.
    numbers = [int(number) for number in re.findall(r"{(\d+)}", str(tensor.dimensions))]
    groups = ["0"] * (1 + max(numbers, default=-1))
    try:
        return tensor.place("", groups, target).tensor_shape == shape
    except ValueError:
        return False


def _inserted(axes: list[str], labels: list[str]) -> Iterator[list[str]]:
    """Yields the axes with these labels inserted, once for each choice of places of the labels.

    For ``["in", "out"]`` and ``["{0}"]`` it yields ``["{0}", "in", "out"]``,
    ``["in", "{0}", "out"]`` and ``["in", "out", "{0}"]``.
    """
    rank = len(axes) + len(labels)
    for places in itertools.permutations(range(rank), len(labels)):  # the final place of each label
        result = [*axes]
        # Labels are inserted from the left, because a later one must not move an earlier one.
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
      fused: the part of the other side that the tensor or array is; None if nothing is fused.
    """
    if "one" in left.split():  # "one a": an axis of size 1 in the tensor that arrays do not have
        yield _Layout(left, axes, take={"one": 0}, sizes={"one": 1})
    elif fused is None:
        yield _Layout(left, axes)
    elif len(axes) != len(target):  # if the array has one dimension more, it may be for the parts
        if not fused.is_tensor_fused:
            for with_part in _inserted(axes, ["part"]):
                yield _Layout(left, with_part, put={"part": fused.number})
    else:
        # The axis along which parts follow each other: the rows of a matrix, or its heads.
        outer = next(axis for axis in ("out", "h", "k") if axis in re.findall(r"\w+", left))
        size = target[axes.index(outer)]
        if fused.is_tensor_fused:
            yield from _layouts_in_tensor(left, axes, outer, size, fused)
        else:
            yield from _layouts_in_array(left, axes, outer, size, fused)


def _layouts_in_array(
    left: str, axes: list[str], outer: str, size: int, fused: FusedPart
) -> Iterator[_Layout]:
    """Yields the layout of an array that has the parts one after the other, if it may have it.

    Args:
      left: the dimensions of the tensor, which is one part, such as ``"(h d) in"``.
      axes: the dimensions of the array, such as ``["in", "h", "d"]``.
      outer: the axis along which parts follow each other: ``"out"``, ``"h"`` or ``"k"``.
      size: the size of this axis in the array.
    """
    # If each part were a single row, the axis would be a dimension for parts, which `_layouts`
    # yields. If each head had all parts, a part would be no range of the axis.
    if size == len(fused.shapes) or fused.by_head:
        return
    # Each part has a share of the rows, in proportion to its elements.
    elements = [math.prod(shape) for shape in fused.shapes]
    start = size * sum(elements[: fused.number]) // sum(elements)
    stop = size * sum(elements[: fused.number + 1]) // sum(elements)
    if start < stop:
        yield _Layout(left, axes, put={outer: slice(start, stop)})


def _layouts_in_tensor(
    left: str, axes: list[str], outer: str, size: int, fused: FusedPart
) -> Iterator[_Layout]:
    """Yields the layouts of an array that is a part of a tensor, in its rows or in each head.

    A tensor with 8 heads of queries q, 2 of keys k and 2 of values v, where each head has d rows,
    may have them in one of two orders:

        one after the other    q q q q q q q q  k k  v v
        by head of keys        q q q q k v  q q q q k v

    In the first order, the array of queries takes the heads 0:8 of 12. The second order is
    ``"(h p d) in"`` with h = 2 and p = 6: queries take the slice 0:4 of p, and keys the index 4.

    Args:
      left: the dimensions of the tensor, without one for parts, such as ``"(h d) in"``.
      axes: the dimensions of the array, such as ``["in", "h", "d"]``.
      outer: the axis along which parts follow each other: ``"out"``, ``"h"`` or ``"k"``.
      size: the size of this axis in the array: 8 for queries.
    """
    # The numbers of elements. In the example, q, k and v have 8, 2 and 2 times those of a head.
    elements = [math.prod(shape) for shape in fused.shapes]
    num_own, num_total, num_smallest = elements[fused.number], sum(elements), min(elements)
    num_before = sum(elements[: fused.number])
    # Whether there are fewer heads of keys and values than of queries.
    is_grouped = len({*elements}) > 1
    # 1. The parts are one after the other. The array's `num_own` elements are `size` indices of the
    # outer axis, so `num_before` elements are `size * num_before / num_own` indices.
    if (is_grouped or not fused.by_head) and num_own and size * num_before % num_own == 0:
        start = size * num_before // num_own
        rows = slice(start, start + size)
        yield _Layout(left, axes, take={outer: rows}, sizes={outer: size * num_total // num_own})
    # 2. The rows of the parts are in turns: the first row of each part, then the second, …
    if fused.may_alternate and outer == "out":
        alternating = left.replace("out", "(out p)")
        yield _Layout(alternating, axes, take={"p": fused.number}, sizes={"p": len(elements)})
    # 3. The parts are by head of keys, because keys are the smallest part. If there is only one
    # head of keys, all parts follow each other, which is the first layout.
    has_one_head = is_grouped and size * num_smallest == num_own
    if fused.by_head and outer == "h" and num_smallest and not has_one_head:
        # In each head of keys: the head at which the part begins, the number of heads of the part,
        # and the number of heads of all parts.
        first_head = num_before // num_smallest
        num_heads, num_all_heads = num_own // num_smallest, num_total // num_smallest
        by_head, sizes = left.replace("h d", "h p d"), {"p": num_all_heads}
        if num_heads == 1:
            yield _Layout(by_head, axes, take={"p": first_head}, sizes=sizes)
        else:
            merged = ["(h p)" if axis == "h" else axis for axis in axes]
            heads = slice(first_head, first_head + num_heads)
            yield _Layout(by_head, merged, take={"p": heads}, sizes=sizes)
