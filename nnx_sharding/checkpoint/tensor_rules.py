r"""The rules that users write: where the tensors of a file belong in a model, and how.

    pattern of names   r"h\.(\d+)\.up\.weight"
    rule               Tensor("blocks/{0}/up/kernel", "out in -> in out")

``Rules.targets`` goes from the name of a tensor to arrays, to load; ``places_of_array`` goes from
an array to tensors, to save. The second needs patterns that are names with *groups*, the parts in
parentheses, as ``{0}`` in the path is what the first one matched. An *axis* is what dimensions
consist of: ``(h d)`` is one dimension of two axes. An `Axis` has its size in the tensor and in the
array, and which part of it both have; a `Placement` has all axes.
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

from ..errors import raise_listed
from .tensor_layouts import Axis, Dimensions, Placement, names_in

_NAME, _INDEX = r"[A-Za-z_]\w*", r"\{\d+\}"


@dataclasses.dataclass(frozen=True, init=False)
class Tensor:
    r"""The array of a model that a tensor of a safetensors file belongs to.

    ``dimensions`` is written as for ``einops.rearrange``: first the dimensions of the tensor, then
    those of the array, by names of axes; parentheses make one dimension of several axes.

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
      dimensions: how the dimensions of the tensor become those of the array; None if they are the
        same. ``{0}`` among those of the array is an index by a group of the pattern.
      take: for axes of which the array has only a part, a slice of the tensor; or an index, for
        axes that the array does not have.
      put: for axes of which the tensor has only a part, a slice of the array; or an index, for axes
        that the tensor does not have. Of several axes in one dimension, only the first can be in
        ``put``.
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
        vars(self).update(path=path, dimensions=dimensions)  # as the class is frozen
        for name, axes in (("take", take), ("put", put), ("sizes", sizes)):
            vars(self)[name] = {axis: _plain(part) for axis, part in (axes or {}).items()}
        for reason in self._faults():
            raise ValueError(f"Tensor({path!r}, {dimensions!r}): {reason}.")

    def __hash__(self) -> int:
        return hash((self.path, self.dimensions))  # all else is in dicts

    def _faults(self) -> Iterator[str]:
        """Says what is wrong; anything after the first of these may not make sense."""
        take, put, sizes = self.take, self.put, self.sizes
        if self.dimensions is None:
            if take or put or sizes:
                yield "take, put and sizes need names of axes, as in 'out in -> in out'"
            return
        sides = self.dimensions.split("->")
        one = rf"(?:{_NAME}|{_INDEX})"
        # Names, indices such as {0}, and names in parentheses.
        form = rf"\s*(?:(?:{one}|\((?:\s*{_NAME})+\s*\))\s*)*"
        if len(sides) != 2 or not all(re.fullmatch(form, side) for side in sides):
            yield "expected dimensions such as '(h d) e -> e h d'"
        left, right = (names_in(side) for side in self.sides(0))
        if any(len(set(names)) < len(names) for names in (left, right)):
            yield "an axis is named twice on one side"
        if re.search(_INDEX, sides[0]):
            yield "an index such as {0} belongs to the dimensions of the array, after '->'"
        # Axes that only one side has: the other one is at an index of them.
        of_tensor = {name for name in left if isinstance(take.get(name), int)}
        of_array = {n for n in right if isinstance(put.get(n), int) or n.startswith("{")}
        if different := (set(left) - of_tensor) ^ (set(right) - of_array):
            yield f"on one side only: {', '.join(sorted(different))}"
        if unknown := [n for n in {**take, **sizes} if n not in left]:
            yield f"the tensor has no axis {', '.join(unknown)}"
        if unknown := [n for n in put if n not in right]:
            yield f"the array has no axis {', '.join(unknown)}"
        if unsized := [n for n in take if n not in sizes]:
            yield f"give the size in the tensor of {', '.join(unsized)}"
        if any(name in put for group in self.sides(0)[1] for name in group[1:]):
            yield "only the first axis of a dimension can be in put"
        yield from self._faults_of_numbers()

    def _faults_of_numbers(self) -> Iterator[str]:
        """Says which sizes and positions are none: bytes beyond an axis are of other tensors."""
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
            if _bounds(part)[1] > self.sizes[axis]:
                yield f"{axis} has the size {self.sizes[axis]}, and take is {part!r}"
        for axis, part in self.put.items():
            start, stop = _bounds(part)
            first, last = _bounds(self.take.get(axis, slice(0, self.sizes.get(axis, stop - start))))
            if stop - start != last - first:
                yield f"{axis}: {last - first} of the tensor do not fit into {part!r}"

    def sides(self, rank: int) -> tuple[Dimensions, Dimensions]:
        """Returns the axes of each dimension of the tensor, and of an array of this rank."""
        if self.dimensions is None:
            names, _ = _same_axes((0,) * rank)
            return names, names
        left, right = (
            [re.findall(_NAME, word) or [word] for word in re.findall(r"\(.*?\)|[^\s()]+", side)]
            for side in self.dimensions.split("->")
        )
        return left, right

    def place(self, name: str, groups: Sequence[str], shape: Sequence[int]) -> Placement:
        """Returns the place of a tensor in an array of this shape; a ValueError if it has none.

        ``groups`` are those of the pattern that matched the name of the tensor.
        """
        if self.dimensions is None:
            dimensions, same = _same_axes(tuple(shape))
            return Placement(name, dimensions, dimensions, same)
        left, right = self.sides(len(shape))
        if len(right) != len(shape):
            raise ValueError(f"{len(right)} dimensions in {self.dimensions!r}")
        axes: dict[str, Axis] = {}
        for names, size in zip(right, shape, strict=True):
            known = {axis: self._known(axis) for axis in names}
            product = math.prod(n for n in known.values() if n is not None)
            free = [axis for axis, n in known.items() if n is None]
            if len(free) > 1:
                raise ValueError(f"give the size of {' or '.join(free)} in {self.dimensions!r}")
            if size % product or (not free and size != product):
                product_text = " × ".join(f"{axis} ({known[axis] or '?'})" for axis in names)
                raise ValueError(f"{size} is not {product_text}")
            for axis in names:
                axes[axis] = self._axis(axis, known[axis] or size // product, groups)
        for axis in names_in(left):
            if axis not in axes:
                # The array lacks this axis: `take` has an index of it.
                axes[axis] = Axis(self.sizes[axis], _bounds(self.take[axis])[0], 0, 0, 1)
        return Placement(name, left, right, axes)

    def _known(self, axis: str) -> int | None:
        """Returns the size of an axis in the array, if it is known without the array.

        It is not where the tensor is a part of the array, or one index of it, such as ``{0}``.
        """
        if axis in self.put or axis.startswith("{"):
            return None
        if axis in self.take:
            first, last = _bounds(self.take[axis])
            return last - first
        return self.sizes.get(axis)

    def _axis(self, axis: str, size: int, groups: Sequence[str]) -> Axis:
        """Returns an axis of this size in the array, with the part of it that the tensor fills.

        ``groups`` are what the pattern matched: the index of an axis called ``{0}`` is the first.
        """
        index = self.put.get(axis)
        if axis.startswith("{"):  # what a group of the pattern matched
            text = groups[int(axis[1:-1])]
            if not text.isdecimal():
                raise ValueError(f"{axis} is {text!r}, which is no index of 0 or more")
            index = int(text)
        start, end = (0, size) if index is None else _bounds(index)
        # The size is that of the model's array, so it is new here; the rest was checked before.
        if end > size:
            raise ValueError(
                f"{axis} has the size {size} in the array, and the tensor is {start}:{end}"
            )
        length = end - start
        if isinstance(index, int):  # the tensor lacks this axis
            return Axis(0, 0, size, start, length)
        begin = _bounds(self.take[axis])[0] if axis in self.take else 0
        total = self.sizes[axis] if axis in self.take else length
        return Axis(total, begin, size, start, length)


@functools.cache  # most tensors of a model have few different shapes
def _same_axes(shape: tuple[int, ...]) -> tuple[Dimensions, Mapping[str, Axis]]:
    """Returns the axes of a tensor that is an array of this shape."""
    axes = {f"axis{i}": Axis(size, 0, size, 0, size) for i, size in enumerate(shape)}
    return [[name] for name in axes], axes


def _plain(part: Any) -> Any:
    """Returns a size, an index or a slice with integers of NumPy as ints, which JSON can hold."""
    if isinstance(part, slice):
        start = 0 if part.start is None else part.start
        return slice(_plain(start), _plain(part.stop), _plain(part.step))
    return int(part) if isinstance(part, np.integer) else part


def _is_part(part: Any) -> bool:
    """Whether a part is an index, or a slice without gaps, of an axis of any size."""
    if not isinstance(part, slice):
        return type(part) is int and part >= 0  # neither True nor 1.0
    is_whole = type(part.start) is type(part.stop) is int and part.step in (None, 1)
    return is_whole and 0 <= part.start < part.stop


def _bounds(part: slice | int) -> tuple[int, int]:
    """Returns where a part of an axis, or one index of it, begins and ends."""
    return (part, part + 1) if isinstance(part, int) else (part.start, part.stop)


# What a tensor becomes: an array by its path, one in another layout, several, or nothing.
Rule: TypeAlias = str | Tensor | Sequence[str | Tensor] | None

# The parts of a pattern from which names can be made: groups, escaped and plain characters.
_PART = re.compile(r"(\((?:[^()\\]|\\.)*\))|\\(\W)|([\w\-/.:])")
_GROUP = re.compile(r"\((?:\?P<\w+>)?((?!\?).*)\)", re.DOTALL)  # one that captures, and its pattern


class Target(NamedTuple):
    """An array that a tensor belongs to, with the groups of the pattern."""

    tensor: Tensor
    path: str
    groups: Sequence[str]


class Rules(NamedTuple):
    """Patterns for the names of tensors, and what these become."""

    pairs: Sequence[tuple[re.Pattern[str], Sequence[Tensor]]]

    def targets(self, name: str) -> list[Target] | None:
        """Returns the arrays that a tensor belongs to; None without a rule."""
        for pattern, tensors in self.pairs:
            if match := pattern.fullmatch(name):
                groups = match.groups(default="")
                return [Target(t, t.path.format(*groups), groups) for t in tensors]
        return None


def read_rules(caller: str, rules: Mapping[str, Rule]) -> Rules:
    """Compiles the rules that a user wrote; an error lists all that cannot be understood."""
    pairs, wrong, kinds = [], [], []
    for text, rule in rules.items():
        several: Any = rule if isinstance(rule, list | tuple) else [rule]
        several = [] if rule is None else several
        if not all(isinstance(each, str | Tensor) for each in several):
            kinds.append(f"  {text!r}: {rule!r}")
            continue
        tensors = [Tensor(each) if isinstance(each, str) else each for each in several]
        try:
            pattern = re.compile(text)
            for tensor in tensors:
                for words in tensor.path, tensor.dimensions or "":
                    words.format(*[""] * pattern.groups)  # only to see that it has these groups
        except (re.error, IndexError, KeyError, ValueError) as error:
            wrong.append(f"  {text!r}: {error}")
            continue
        pairs.append((pattern, tensors))
    raise_listed(TypeError, f"{caller}: expected paths, Tensors or None in rules, got:", kinds)
    raise_listed(ValueError, f"{caller}: these rules cannot be understood:", wrong)
    return Rules(pairs)


def places_of_array(rules: Rules, path: str, shape: Sequence[int]) -> list[Placement]:
    """Returns where the tensors that an array is written to are in it; a ValueError if none are."""
    places: list[Placement] = []
    first_of_rules: list[Placement] = []  # of each rule, the place of its first tensor
    for pattern, tensors in rules.pairs:
        for tensor in tensors:
            placements = list(_places_by_rule(rules, pattern, tensor, path, shape))
            # If the same array can be read from several names, the first is written.
            if placements and not any(placements[0].overlaps(other) for other in first_of_rules):
                first_of_rules.append(placements[0])
                places += placements
    if not places:
        raise ValueError("no rule has this path")
    return places


def _places_by_rule(
    rules: Rules, pattern: re.Pattern[str], tensor: Tensor, path: str, shape: Sequence[int]
) -> Iterator[Placement]:
    """Yields the places of all tensors that one rule makes of an array: none if it is of others.

    Args:
      rules: all rules.
      pattern: the pattern of the rule, for the names of the tensors.
      tensor: the rule.
      path: that of the array.
      shape: the shape of the array.
    """
    match = _path_pattern(pattern, tensor.path).fullmatch(path)
    if match is None:
        return
    # Number of a group in the pattern → what it has to match: from the path, ``{"group0": "3"}``.
    known = {int(name.removeprefix("group")): text for name, text in match.groupdict().items()}
    # A dimension such as ``{1}`` has a tensor for each index: group 1 is each of these.
    # Without as many dimensions as the array has, `place` raises the error.
    dimensions = zip(tensor.sides(len(shape))[1], shape, strict=False)
    stacked = {int(axes[0][1:-1]): size for axes, size in dimensions if axes[0].startswith("{")}
    for indices in itertools.product(*map(range, stacked.values())):
        groups = known | dict(zip(stacked, map(str, indices), strict=True))
        name = _name(pattern, groups)
        targets = rules.targets(name) or []
        if not any(target.tensor == tensor and target.path == path for target in targets):
            raise ValueError(f"its tensor would be {name}, which the rules read into another array")
        yield tensor.place(name, [groups[i] for i in range(pattern.groups)], shape)


@functools.lru_cache(maxsize=1024)  # each rule is compared with each array
def _path_pattern(pattern: re.Pattern[str], template: str) -> re.Pattern[str]:
    r"""Makes a pattern for the paths of the arrays that a rule gives to what ``pattern`` matches.

    Of ``h\.(\d+)\.up`` and the template ``blocks/{0}/up`` it makes ``blocks/(?P<group0>\d+)/up``.
    A number that comes again has to match the same text.
    """
    groups = (_GROUP.fullmatch(part) for part, *_ in _PART.findall(pattern.pattern))
    inside = [group[1] for group in groups if group]  # of each group of the pattern: ``\d+``
    escaped = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    seen: set[int] = set()

    def group_of_number(match: re.Match[str]) -> str:
        number = int(match[1])
        if number in seen:
            return f"(?P=group{number})"
        seen.add(number)
        return f"(?P<group{number}>{inside[number] if number < len(inside) else '.+'})"

    return re.compile(re.sub(r"{(\d+)}", group_of_number, escaped))


def _name(pattern: re.Pattern[str], groups: Mapping[int, str]) -> str:
    """Returns the name that a pattern matches with these groups, by their numbers.

    Raises:
      ValueError: the pattern is more than a name with groups, or ``groups`` lacks one.
    """
    parts = [part for part, *_ in _PART.findall(pattern.pattern) if part]
    is_plain = all(map(_GROUP.fullmatch, parts)) and not _PART.sub("", pattern.pattern)
    if not is_plain or set(groups) != set(range(pattern.groups)):
        raise ValueError(
            f"no name can be made of {pattern.pattern!r}: it is not a name with groups, or a group "
            "is neither in the path nor among the dimensions"
        )
    numbers = itertools.count()
    return _PART.sub(lambda m: groups[next(numbers)] if m[1] else m[2] or m[3], pattern.pattern)
