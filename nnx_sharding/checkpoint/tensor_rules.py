r"""The rules that users write: they say where the tensors of a file belong in a model, and how.

    pattern of names   r"h\.(\d+)\.up\.weight"
    rule               Tensor("blocks/{0}/up/kernel", "out in -> in out")

To load, ``Rules.targets`` returns the arrays for the name of a tensor. To save, ``places_of_array``
returns the tensors for an array. Saving needs patterns that are names with *groups*, the parts in
parentheses, because ``{0}`` in the path is the text that the first group matched. Dimensions
consist of *axes*: ``(h d)`` is one dimension of two axes. An `Axis` has its size in the tensor and
in the array, and the part that both have. A `Placement` has all axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import raise_if_any
from .tensor_layouts import Axis, Dimensions, Placement, names_in

# Patterns for the two kinds of axes: a name such as h, and an index such as {0}.
_NAME, _INDEX = r"[A-Za-z_]\w*", r"\{\d+\}"


@dataclasses.dataclass(frozen=True, init=False)
class Tensor:
    r"""The array of a model that a tensor of a safetensors file belongs to.

    ``dimensions`` is written as for ``einops.rearrange``: the dimensions of the tensor, then the
    dimensions of the array, by names of axes. Parentheses make one dimension of several axes.

    - ``"out in -> in out"`` transposes.
    - ``"(h d) e -> e h d", h=32`` splits rows into heads.
    - ``"(h d two) e -> (h two d) e", h=32, two=2`` permutes the rows of each head.
    - ``"out in -> {1} in out"`` stacks; the second group of the pattern is the first index.
    - ``"(h d) e -> e h d", h=48, take={"h": slice(0, 32)}`` takes 32 heads of a fused tensor of 48.
    - ``"out in -> in out", put={"out": slice(0, 64)}`` fills 64 columns of an array that several
      tensors share.

    Args:
      path: the path of the array, such as ``blocks/{0}/up/kernel``, where ``{0}`` is the first
        group of the pattern that matched the name of the tensor.
      dimensions: how the dimensions of the tensor become dimensions of the array; None if they are
        the same. ``{0}`` on the side of the array is an index by a group of the pattern.
      take: by axis, a slice of the tensor, if the array has only a part of the axis; or an index of
        the tensor, if the array does not have the axis.
      put: by axis, a slice of the array, if the tensor has only a part of the axis; or an index of
        the array, if the tensor does not have the axis. If a dimension has several axes, only the
        first can be in ``put``.
      **sizes: the sizes of axes in the tensor. One axis of each dimension of the array may be left
        out, unless ``take`` has it.

    Raises:
      ValueError: ``dimensions``, ``take`` or ``put`` cannot be understood, or do not fit together.

    Example:
      See :func:`load_safetensors`.
    """

    path: str
    dimensions: str | None
    take: Mapping[str, slice | int]
    put: Mapping[str, slice | int]
    sizes: Mapping[str, int]

    def __init__(
        self,
        path: str,
        dimensions: str | None = None,
        *,
        take: Mapping[str, slice | int] | None = None,
        put: Mapping[str, slice | int] | None = None,
        **sizes: int,
    ):
        fields = vars(self)  # a frozen class refuses `self.path = path`
        fields.update(path=path, dimensions=dimensions)
        for name, axes in (("take", take), ("put", put), ("sizes", sizes)):
            # Integers of NumPy become ints, so that `TensorRules.save` can write them as text.
            fields[name] = {axis: _plain(part) for axis, part in (axes or {}).items()}
        fault = next(self._faults(), None)
        if fault is not None:
            raise ValueError(f"Tensor({path!r}, {dimensions!r}): {fault}.")

    def __hash__(self) -> int:
        return hash((self.path, self.dimensions))  # the other fields are dicts, which have no hash

    def _faults(self) -> Iterator[str]:
        """Yields the faults of the rule, as ends of error messages.

        The constructor stops at the first fault, so a check may rely on the checks before it. For
        example, axes are only read if ``dimensions`` has the right form.
        """
        take, put, sizes = self.take, self.put, self.sizes
        if self.dimensions is None:
            if take or put or sizes:
                yield "take, put and sizes need names of axes, as in 'out in -> in out'"
            return
        texts = self.dimensions.split("->")
        dimension = rf"(?:{_NAME}|{_INDEX}|\((?:\s*{_NAME})+\s*\))"  # e, {0} or (h d)
        form = rf"\s*(?:{dimension}\s*)*"  # one side: any number of dimensions
        if len(texts) != 2 or not all(re.fullmatch(form, text) for text in texts):
            yield "expected dimensions such as '(h d) e -> e h d'"
        # The rank has no effect, because there are `dimensions`.
        tensor_dimensions, array_dimensions = self.sides(rank=0)
        left, right = names_in(tensor_dimensions), names_in(array_dimensions)
        if any(len(set(names)) < len(names) for names in (left, right)):
            yield "an axis is named twice on one side"
        if re.search(_INDEX, texts[0]):
            yield "an index such as {0} belongs to the dimensions of the array, after '->'"
        # An axis with an index is on one side only, because the other side is one index of it.
        indexed_left = {axis for axis in left if isinstance(take.get(axis), int)}
        indexed_right = {axis for axis in right if isinstance(put.get(axis), int)}
        indexed_right |= {axis for axis in right if axis.startswith("{")}
        # All other axes have to be on both sides.
        if different := (set(left) - indexed_left) ^ (set(right) - indexed_right):
            yield f"on one side only: {', '.join(sorted(different))}"
        if unknown := [axis for axis in {**take, **sizes} if axis not in left]:
            yield f"the tensor has no axis {', '.join(unknown)}"
        if unknown := [axis for axis in put if axis not in right]:
            yield f"the array has no axis {', '.join(unknown)}"
        if unsized := [axis for axis in take if axis not in sizes]:
            yield f"give the size in the tensor of {', '.join(unsized)}"
        # `Placement.region` needs a range of the dimension, and a part of an inner axis is none.
        if any(axis in put for axes in array_dimensions for axis in axes[1:]):
            yield "only the first axis of a dimension can be in put"
        yield from self._faults_of_numbers()

    def _faults_of_numbers(self) -> Iterator[str]:
        """Yields the faults of sizes, indices and slices. All names have been checked before.

        A part beyond the end of an axis is refused because its bytes belong to other tensors.
        """
        for axis, size in self.sizes.items():
            if type(size) is not int or size < 1:
                yield f"expected a size of 1 or more for {axis}, got {size!r}"
        for axis, part in (*self.take.items(), *self.put.items()):
            if not _is_part(part):
                yield (
                    "expected an index of 0 or more, or a slice with 0 <= start < stop, for "
                    f"{axis}, got {part!r}"
                )
        for axis, part in self.take.items():
            _, stop = _start_and_stop(part)
            if stop > self.sizes[axis]:  # `_faults` has refused a `take` without a size
                yield f"{axis} has the size {self.sizes[axis]}, and take is {part!r}"
        for axis, part in self.put.items():
            # The length of the tensor's part of the axis has to be that of the array's part.
            if axis in self.take:
                first, last = _start_and_stop(self.take[axis])
                tensor_length = last - first
            elif axis in self.sizes:
                tensor_length = self.sizes[axis]
            else:
                continue  # without a size, the tensor's axis is as long as `put`
            start, stop = _start_and_stop(part)
            if stop - start != tensor_length:
                yield f"{axis}: {tensor_length} of the tensor do not fit into {part!r}"

    def sides(self, rank: int) -> tuple[Dimensions, Dimensions]:
        """Returns the axes of each dimension of the tensor, and of each dimension of the array.

        For ``"(h d) e -> {0} e h d"``, they are ``[["h", "d"], ["e"]]`` and
        ``[["{0}"], ["e"], ["h"], ["d"]]``. If ``dimensions`` is None, both sides are
        ``[["axis0"], ["axis1"], …]``, with one axis for each dimension of an array of this rank.
        """
        if self.dimensions is None:
            names = [[f"axis{i}"] for i in range(rank)]
            return names, names
        tensor_text, array_text = self.dimensions.split("->")
        return _axes_by_dimension(tensor_text), _axes_by_dimension(array_text)

    def place(self, name: str, groups: Sequence[str], shape: Sequence[int]) -> Placement:
        """Returns the place of a tensor in an array.

        Args:
          name: the name of the tensor.
          groups: the texts that the groups of the pattern matched in the name, such as ``["3"]``.
          shape: the shape of the array.

        Raises:
          ValueError: no tensor of this rule has a place in an array of this shape.
        """
        if self.dimensions is None:
            dimensions, _ = self.sides(len(shape))
            return Placement(name, dimensions, dimensions, _whole_axes(tuple(shape)))
        left, right = self.sides(len(shape))
        if len(right) != len(shape):
            raise ValueError(f"{len(right)} dimensions in {self.dimensions!r}")
        axes: dict[str, Axis] = {}
        for names, size in zip(right, shape, strict=True):
            # The size of one axis may be unknown. The size of this axis follows from the others.
            rule_sizes = {axis: self._size_by_rule(axis) for axis in names}
            product = math.prod(n for n in rule_sizes.values() if n is not None)
            unsized = [axis for axis, n in rule_sizes.items() if n is None]
            if len(unsized) > 1:
                raise ValueError(f"give the size of {' or '.join(unsized)} in {self.dimensions!r}")
            if size % product or (not unsized and size != product):
                product_text = " × ".join(f"{axis} ({rule_sizes[axis] or '?'})" for axis in names)
                raise ValueError(f"{size} is not {product_text}")
            for axis in names:
                axes[axis] = self._axis(axis, rule_sizes[axis] or size // product, groups)
        for axis in names_in(left):
            # The array lacks this axis. `_faults` has checked that `take` has an index of it.
            if axis not in axes:
                index, _ = _start_and_stop(self.take[axis])
                axes[axis] = Axis(
                    tensor_size=self.sizes[axis],
                    tensor_start=index,
                    array_size=0,
                    array_start=0,
                    length=1,
                )
        return Placement(name, left, right, axes)

    def _size_by_rule(self, axis: str) -> int | None:
        """Returns the size of an axis of the array; None if the rule does not tell it.

        The rule does not tell it if the tensor fills only a part of the axis (``put``) or one index
        of it (``put`` or ``{0}``), or if ``sizes`` leaves it out.
        """
        if axis in self.put or axis.startswith("{"):
            return None
        # `take` has a slice here, because the array lacks the axes that `take` indexes.
        if axis in self.take:
            start, stop = _start_and_stop(self.take[axis])
            return stop - start
        return self.sizes.get(axis)

    def _axis(self, axis: str, size: int, groups: Sequence[str]) -> Axis:
        """Returns an axis of the array, with the part of it that the tensor fills.

        Args:
          axis: the name of the axis, such as ``h``, or ``{0}`` for an index.
          size: the size of the axis in the array.
          groups: the texts that the groups matched. ``groups[0]`` is the index for ``{0}``.

        Raises:
          ValueError: the part is beyond the end of the axis, or a group has not matched an index.
        """
        filled: slice | int = self.put.get(axis, slice(0, size))
        if axis.startswith("{"):
            text = groups[int(axis[1:-1])]
            if not text.isdecimal():
                raise ValueError(f"{axis} is {text!r}, which is no index of 0 or more")
            filled = int(text)
        start, stop = _start_and_stop(filled)
        # This is not checked in `_faults`, because only the array tells the size.
        if stop > size:
            raise ValueError(
                f"{axis} has the size {size} in the array, and the tensor is {start}:{stop}"
            )
        length = tensor_size = stop - start
        tensor_start = 0
        if isinstance(filled, int):  # the tensor lacks this axis
            tensor_size = 0
        elif axis in self.take:  # the tensor has more of this axis than the array
            tensor_size = self.sizes[axis]
            tensor_start, _ = _start_and_stop(self.take[axis])
        return Axis(tensor_size, tensor_start, array_size=size, array_start=start, length=length)


def _axes_by_dimension(text: str) -> Dimensions:
    """Returns the axes of each dimension: ``"(h d) {0}"`` is ``[["h", "d"], ["{0}"]]``."""
    words = re.findall(r"\(.*?\)|[^\s()]+", text)  # "(h d)" and "{0}"
    # An index such as "{0}" has no name in it, so the text itself is the name of the axis.
    return [re.findall(_NAME, word) or [word] for word in words]


@functools.cache  # the tensors of a model have few different shapes
def _whole_axes(shape: tuple[int, ...]) -> Mapping[str, Axis]:
    """Returns the axes, by the names of ``Tensor.sides``, of a tensor that is the whole array."""
    return {
        f"axis{i}": Axis(
            tensor_size=size, tensor_start=0, array_size=size, array_start=0, length=size
        )
        for i, size in enumerate(shape)
    }


def _plain(part: Any) -> Any:
    """Returns a size, an index or a slice with ints in place of NumPy integers, for JSON."""
    if isinstance(part, slice):
        start = 0 if part.start is None else part.start
        return slice(_plain(start), _plain(part.stop), _plain(part.step))
    return int(part) if isinstance(part, np.integer) else part


def _is_part(part: Any) -> bool:
    """Whether a part is an index of 0 or more, or a slice of such indices without gaps."""
    if not isinstance(part, slice):
        return type(part) is int and part >= 0  # `type` excludes True and 1.0
    is_plain_slice = type(part.start) is type(part.stop) is int and part.step in (None, 1)
    return is_plain_slice and 0 <= part.start < part.stop


def _start_and_stop(part: slice | int) -> tuple[int, int]:
    """Returns where a part of an axis starts and stops; ``(3, 4)`` for the index 3."""
    return (part, part + 1) if isinstance(part, int) else (part.start, part.stop)


# A rule says what a tensor becomes: an array at a path, an array in another layout (`Tensor`),
# several arrays, or nothing (None).
Rule: TypeAlias = str | Tensor | Sequence[str | Tensor] | None


class Target(NamedTuple):
    """An array that a tensor belongs to, by the first rule that matches the tensor's name."""

    tensor: Tensor  # the rule
    path: str  # the path of the array
    groups: Sequence[str]  # the texts that the pattern's groups matched in the tensor's name


class Rules(NamedTuple):
    """Patterns for the names of tensors, each with the `Tensor` objects of its rule."""

    pairs: Sequence[tuple[re.Pattern[str], Sequence[Tensor]]]

    def targets(self, name: str) -> list[Target] | None:
        """Returns the arrays that a tensor belongs to; None without a rule."""
        for pattern, tensors in self.pairs:
            match = pattern.fullmatch(name)
            if match is not None:
                groups = match.groups(default="")
                return [Target(t, t.path.format(*groups), groups) for t in tensors]
        return None


def read_rules(caller: str, rules: Mapping[str, Rule]) -> Rules:
    """Compiles the rules that a user wrote.

    Raises:
      TypeError: rules are of other types; all are listed.
      ValueError: patterns or paths cannot be understood; all are listed.
    """
    pairs, wrong_types, wrong = [], [], []  # the last two have lines of errors
    for text, rule in rules.items():
        entries: Any = rule if isinstance(rule, list | tuple) else [rule]
        if rule is None:  # None ignores tensors: they fill nothing, and their arrays are not missed
            entries = []
        if not all(isinstance(entry, str | Tensor) for entry in entries):
            wrong_types.append(f"  {text!r}: {rule!r}")
            continue
        tensors = [Tensor(entry) if isinstance(entry, str) else entry for entry in entries]
        try:
            pattern = re.compile(text)
            for tensor in tensors:
                for words in tensor.path, tensor.dimensions or "":
                    # An error shows that the pattern lacks a group. The result is not needed.
                    words.format(*[""] * pattern.groups)
        except (re.error, IndexError, KeyError, ValueError) as error:
            wrong.append(f"  {text!r}: {error}")
            continue
        pairs.append((pattern, tensors))
    head = f"{caller}: expected paths, Tensors or None in rules, got:"
    raise_if_any(TypeError, head, wrong_types)
    raise_if_any(ValueError, f"{caller}: these rules cannot be understood:", wrong)
    return Rules(pairs)


def places_of_array(rules: Rules, path: str, shape: Sequence[int]) -> list[Placement]:
    """Returns the places, in an array, of the tensors that the array is written to.

    Raises:
      ValueError: no rule has this path, or no names can be made by the rules that have it.
    """
    all_placements: list[Placement] = []
    # The first placement of each `Tensor` in the rules that is written.
    first_placements: list[Placement] = []
    for pattern, tensors in rules.pairs:
        for tensor in tensors:
            placements = list(_places_by_rule(rules, pattern, tensor, path, shape))
            # If an array can be read from one of several names, only the first name is written. The
            # first placements tell whether two rules fill the same elements, because the tensors of
            # a stack fill all indices in order.
            if placements and not any(placements[0].overlaps(first) for first in first_placements):
                first_placements.append(placements[0])
                all_placements += placements
    if not all_placements:
        raise ValueError("no rule has this path")
    return all_placements


def _places_by_rule(
    rules: Rules, pattern: re.Pattern[str], tensor: Tensor, path: str, shape: Sequence[int]
) -> Iterator[Placement]:
    r"""Yields the places of all tensors that an array is written to by one rule.

    By the rule ``h\.(\d+)\.e\.(\d+)`` → ``Tensor("blocks/{0}/experts", "out in -> {1} in out")``,
    the array ``blocks/3/experts`` of shape (2, in, out) is written to the tensors ``h.3.e.0`` and
    ``h.3.e.1``. Nothing is yielded if the rule is not for this path.

    Args:
      pattern: the pattern of the rule, for the names of the tensors.
      shape: the shape of the array.

    Raises:
      ValueError: no name can be made, another rule would read the name, or the shape does not fit.
    """
    match = _path_pattern(pattern, tensor.path).fullmatch(path)
    if match is None:
        return
    # The groups that the path tells, by number: the match {"group0": "3"} → {0: "3"}.
    from_path = {int(name.removeprefix("group")): text for name, text in match.groupdict().items()}
    # The groups that count tensors along a dimension of the array, with its size: {1: 2}.
    stack_sizes: dict[int, int] = {}
    _, array_dimensions = tensor.sides(len(shape))
    # The numbers of dimensions may differ here, because `place` refuses that with a better message.
    for axes, size in zip(array_dimensions, shape, strict=False):
        if axes[0].startswith("{"):
            stack_sizes[int(axes[0][1:-1])] = size
    for indices in itertools.product(*map(range, stack_sizes.values())):
        groups = from_path | dict(zip(stack_sizes, map(str, indices), strict=True))
        name = _name(pattern, groups)
        # If an earlier rule matches this name as well, the array could not be read again.
        targets = rules.targets(name) or []
        if not any(target.tensor == tensor and target.path == path for target in targets):
            raise ValueError(f"its tensor would be {name}, which the rules read into another array")
        yield tensor.place(name, [groups[i] for i in range(pattern.groups)], shape)


# The parts of a pattern from which names can be made: `h\.(\d+)` has `h`, `\.` and `(\d+)`.
_PART = re.compile(
    r"(?P<group>\((?:[^()\\]|\\.)*\))|\\(?P<escaped>\W)|(?P<character>[^\\()\[\]{}|?*+^$])"
)
# A group that captures, with its content: `\d+` in `(\d+)` and in `(?P<layer>\d+)`.
_GROUP = re.compile(r"\((?:\?P<\w+>)?(?P<inside>(?!\?).*)\)", re.DOTALL)


@functools.lru_cache(maxsize=1024)  # each rule is compared with each array, so calls are repeated
def _path_pattern(pattern: re.Pattern[str], template: str) -> re.Pattern[str]:
    r"""Returns a pattern for the paths of a rule's arrays.

    The pattern ``h\.(\d+)\.up`` and the template ``blocks/{0}/up`` give
    ``blocks/(?P<group0>\d+)/up``. A number that comes again has to match the same text: the second
    ``{0}`` is ``(?P=group0)``.

    Args:
      pattern: the rule's pattern for the names of tensors.
    """
    contents = []  # the content of each group of the pattern: `\d+`
    for part in _PART.finditer(pattern.pattern):
        # A group such as `(?:x)` captures nothing, so `_GROUP` does not match it.
        group = _GROUP.fullmatch(part["group"] or "")
        if group is not None:
            contents.append(group["inside"])
    seen: set[int] = set()  # the numbers that have a group already

    def group_of_number(match: re.Match[str]) -> str:
        """Returns the group for a number in the template, or the brace for a double brace."""
        if match[1] is None:  # a brace is written twice, as in `str.format`
            return match[0][:2]
        number = int(match[1])
        if number in seen:
            return f"(?P=group{number})"
        seen.add(number)
        # If groups are nested, only the innermost are in `contents`, so there may be fewer than
        # numbers. Any text is allowed then, because `_name` refuses such patterns later.
        text = contents[number] if number < len(contents) else ".+"
        return f"(?P<group{number}>{text})"

    # Numbers and braces are replaced, and all other text is matched as it is. Escaping has made
    # `\{0\}` of `{0}`.
    escaped = re.escape(template)
    return re.compile(re.sub(r"\\{(\d+)\\}|\\{\\{|\\}\\}", group_of_number, escaped))


def _name(pattern: re.Pattern[str], groups: Mapping[int, str]) -> str:
    r"""Returns the name that a pattern matches with these groups, by their numbers.

    For ``h\.(\d+)\.up`` and ``{0: "3"}``, it is ``h.3.up``.

    Raises:
      ValueError: the pattern is more than a name with groups, or ``groups`` lacks one.
    """
    regex = pattern.pattern
    group_texts = [part["group"] for part in _PART.finditer(regex) if part["group"]]
    # A pattern with other parts has many names: `(?:a|b)` is a group that captures nothing, and the
    # `+` in `x+` is not matched by `_PART`.
    has_one_name = all(map(_GROUP.fullmatch, group_texts)) and not _PART.sub("", regex)
    if not has_one_name or set(groups) != set(range(pattern.groups)):
        raise ValueError(
            f"no name can be made of {regex!r}: it is not a name with groups, or a group "
            "is neither in the path nor among the dimensions"
        )
    group_numbers = itertools.count()  # groups are numbered in the order of their appearance

    def text_of(part: re.Match[str]) -> str:
        if part["group"]:
            return groups[next(group_numbers)]
        return part["escaped"] or part["character"]

    return _PART.sub(text_of, regex)
