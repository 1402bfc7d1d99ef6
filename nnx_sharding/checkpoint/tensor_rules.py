"""Where the tensors of a file belong in a model, and how their dimensions are arranged there."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..errors import CheckpointError, by_kind, raise_listed
from .names import OF_ANOTHER_DTYPE, is_castable, suggestions
from .tensor_files import Box, Region

# The axes that each dimension is made of.
Dimensions: TypeAlias = list[list[str]]

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
      >>> from nnx_sharding.checkpoint import Tensor
      >>> rules = {
      ...     r"embed\.weight": "embed/embedding",
      ...     r"layers\.(\d+)\.q\.weight": Tensor("blocks/{0}/q/kernel", "(h d) e -> e h d", h=8),
      ... }
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
        options = {"take": dict(take or {}), "put": dict(put or {}), "sizes": sizes}
        vars(self).update(options, path=path, dimensions=dimensions)
        for reason in self._faults():
            raise ValueError(f"Tensor({path!r}, {dimensions!r}): {reason}.")

    def __hash__(self) -> int:
        return hash((self.path, self.dimensions))

    def _faults(self) -> Iterator[str]:
        """What is wrong; anything after the first of these may not make sense."""
        take, put, sizes = self.take, self.put, self.sizes
        if self.dimensions is None:
            if take or put or sizes:
                yield "take, put and sizes need names of axes, as in 'out in -> in out'"
            return
        sides = self.dimensions.split("->")
        one = rf"(?:{_NAME}|{_INDEX})"
        form = rf"\s*(?:(?:{one}|\((?:\s*{_NAME})+\s*\))\s*)*"
        if len(sides) != 2 or not all(re.fullmatch(form, side) for side in sides):
            yield "expected dimensions such as '(h d) e -> e h d'"
        left, right = (_names_in(side) for side in self.sides(0))
        if any(len(set(names)) < len(names) for names in (left, right)):
            yield "an axis is named twice on one side"
        if re.search(_INDEX, sides[0]):
            yield "an index such as {0} belongs to the dimensions of the array, after '->'"
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
        for x in (*take.values(), *put.values()):
            is_range = isinstance(x, slice) and x.step in (None, 1)
            if not isinstance(x, int) and not (is_range and 0 <= (x.start or 0) < (x.stop or 0)):
                yield f"expected an index or a slice with start < stop, got {x!r}"

    def sides(self, rank: int) -> tuple[Dimensions, Dimensions]:
        """The axes of each dimension of the tensor, and of an array of this rank."""
        if self.dimensions is None:
            names = [[f"axis{i}"] for i in range(rank)]
            return names, names
        left, right = (
            [re.findall(_NAME, word) or [word] for word in re.findall(r"\(.*?\)|[^\s()]+", side)]
            for side in self.dimensions.split("->")
        )
        return left, right

    def place(self, name: str, groups: Sequence[str], shape: Sequence[int]) -> Placement:
        """The place of a tensor in an array; a ValueError if the dimensions do not fit."""
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
        for axis in _names_in(left):
            if axis not in axes:
                axes[axis] = Axis(self.sizes[axis], _bounds(self.take[axis])[0], 0, 0, 1)
        return Placement(name, left, right, axes)

    def _known(self, axis: str) -> int | None:
        """The size of an axis in the array, if it is known without the array."""
        if axis in self.put or axis.startswith("{"):
            return None
        if axis in self.take:
            first, last = _bounds(self.take[axis])
            return last - first
        return self.sizes.get(axis)

    def _axis(self, axis: str, size: int, groups: Sequence[str]) -> Axis:
        index = int(groups[int(axis[1:-1])]) if axis.startswith("{") else self.put.get(axis)
        start, end = (0, size) if index is None else _bounds(index)
        if end > size:
            raise ValueError(
                f"{axis} has the size {size} in the array, and the tensor is {start}:{end}"
            )
        is_new = isinstance(index, int)
        begin, stop = _bounds(self.take[axis]) if axis in self.take else (0, end - start)
        total = self.sizes[axis] if axis in self.take else end - start
        if stop > total or stop - begin != end - start:
            raise ValueError(f"{axis}: {begin}:{stop} of {total} does not fit {start}:{end}")
        return Axis(0 if is_new else total, begin, size, start, end - start)


def _bounds(x: Any) -> tuple[int, int]:
    return (x, x + 1) if isinstance(x, int) else (x.start or 0, x.stop)


def _names_in(dimensions: Dimensions) -> list[str]:
    """The axes of all dimensions."""
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
        """The place of the array in the tensor."""
        swapped = {
            axis: Axis(x.array_size, x.array_start, x.tensor_size, x.tensor_start, x.length)
            for axis, x in self.axes.items()
        }
        return Placement(name, self.right, self.left, swapped)

    @property
    def is_identity(self) -> bool:
        """Whether the array is the tensor."""
        whole = all(x.tensor_size == x.array_size == x.length for x in self.axes.values())
        return whole and self.left == self.right

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape that the tensor has to have."""
        return tuple(math.prod(self.axes[n].tensor_size for n in names) for names in self.left)

    @property
    def region(self) -> list[tuple[int, int]]:
        """The region of the array that the tensor fills."""
        region = []
        for first, *rest in self.right:
            axis, inner = self.axes[first], math.prod(self.axes[n].array_size for n in rest)
            region.append((axis.array_start * inner, (axis.array_start + axis.length) * inner))
        return region

    def parts(self, wanted: Region) -> Iterator[Part]:
        """Finds what a region of the array shares with the tensor, as boxes of the tensor."""
        ranges: list[list[tuple[slice, Region]]] = []  # of each dimension of the array
        for names, (first, last), (start, end) in zip(self.right, self.region, wanted, strict=True):
            lengths = [self.axes[name].length for name in names]
            split = _split(max(first, start) - first, min(last, end) - first, lengths)
            moved = first - start  # from the tensor's part of the dimension to the wanted one
            ranges.append([(slice(a + moved, b + moved), parts) for a, b, parts in split])
        left, right = _names_in(self.left), _names_in(self.right)
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
        return view.transpose(np.argsort(self.order))


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
    """The shape of an array and the regions of its tensors, by axes if all agree on these."""
    axes = [[[p.axes[n] for n in names] for names in p.right] for p in placements]
    flat = [[*itertools.chain(*each)] for each in axes]
    if len({tuple(tuple(x.array_size for x in dim) for dim in each) for each in axes}) == 1:
        regions = [[(x.array_start, x.array_start + x.length) for x in each] for each in flat]
        return [x.array_size for x in flat[0]], regions
    return [math.prod(x.array_size for x in dim) for dim in axes[0]], [p.region for p in placements]


def gaps(placements: Sequence[Placement], noun: str, *, once: bool = True) -> list[str]:
    """The parts of an array that no placement fills, or, with ``once``, more than one does."""
    if not placements:
        return [""]
    shape, regions = boxes(placements)
    edges = [sorted({0, n, *(e for r in regions for e in r[i])}) for i, n in enumerate(shape)]
    count = np.zeros([len(each) - 1 for each in edges], np.int32)
    for region in regions:
        box = zip(edges, region, strict=True)
        count[tuple(slice(each.index(first), each.index(last)) for each, (first, last) in box)] += 1
    texts = []
    for fault, what in ((count == 0, f"no {noun}"), ((count > 1) & once, f"several {noun}s")):
        for index in np.argwhere(fault)[:1]:
            bounds = (f"{each[i]}:{each[i + 1]}" for each, i in zip(edges, index, strict=True))
            texts.append(f": {what} for [{', '.join(bounds)}]")
    return texts


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
        """The arrays that a tensor belongs to; None without a rule."""
        for pattern, tensors in self.pairs:
            if match := pattern.fullmatch(name):
                groups = match.groups(default="")
                return [Target(t, t.path.format(*groups), groups) for t in tensors]
        return None


def read_rules(caller: str, rules: Mapping[str, Rule]) -> Rules:
    """The rules that a user wrote."""
    pairs, wrong, kinds = [], [], []
    for text, rule in rules.items():
        several: Any = rule if isinstance(rule, list | tuple) else [rule] * (rule is not None)
        if not all(isinstance(each, str | Tensor) for each in several):
            kinds.append(f"  {text!r}: {rule!r}")
            continue
        tensors = [Tensor(each) if isinstance(each, str) else each for each in several]
        try:
            pattern = re.compile(text)
            for tensor in tensors:
                for words in tensor.path, tensor.dimensions or "":
                    words.format(*[""] * pattern.groups)
        except (re.error, IndexError, KeyError, ValueError) as error:
            wrong.append(f"  {text!r}: {error}")
            continue
        pairs.append((pattern, tensors))
    raise_listed(TypeError, f"{caller}: expected paths, Tensors or None in rules, got:", kinds)
    raise_listed(ValueError, f"{caller}: these rules cannot be understood:", wrong)
    return Rules(pairs)


def matched(
    head: str,
    rules: Rules,
    tensors: Mapping[str, Any],
    arrays: Mapping[str, Any],
    everything: Collection[str],
    *,
    cast: bool = False,
    reverse: bool = False,
    nouns: tuple[str, str] = ("tensor", "array"),
) -> dict[str, list[tuple[Placement, str]]]:
    """What fills each array, or in reverse each tensor; an error lists all that does not fit.

    Of ``tensors`` by name and ``arrays`` by path, shapes and dtypes count. Tensors of other paths
    in ``everything`` are ignored. ``nouns`` are what is read and what is filled, for messages.
    """
    sources, goals = (arrays, tensors) if reverse else (tensors, arrays)
    filled: dict[str, list[tuple[Placement, str]]] = {
        name: [] for name in goals if not reverse or rules.targets(name) != []
    }
    used: dict[str, list[Placement]] = {path: [] for path in arrays}
    unknown, shapes, dtypes, misfits = [], [], [], set()
    kinds = (jnp.floating, jnp.integer) if cast else ()
    near = suggestions(len(tensors))
    for name, tensor in tensors.items():
        targets = rules.targets(name)
        if targets is None and not reverse:
            unknown.append(f"  {name}: no rule matches")
        for rule, path, groups in targets or ():
            if path not in everything:
                unknown.append(f"  {name}: no array {path}{near(path, everything)}")
            if path not in arrays:
                continue
            leaf, where = arrays[path], f"  {name}, shape {tensor.shape}: {path}, shape"
            goal, source = (name, path) if reverse else (path, name)
            try:
                placement = rule.place(name, groups, leaf.shape)
            except ValueError as error:
                misfits |= {goal, path}
                shapes.append(f"{where} {leaf.shape}: {error}")
                continue
            used[path].append(placement)
            filled[goal].append((placement.inverse(path) if reverse else placement, source))
            if placement.tensor_shape != tensor.shape:
                misfits |= {goal} if reverse else set()
                shapes.append(f"{where} {leaf.shape} needs {placement.tensor_shape}")
            elif not is_castable(sources[source].dtype, goals[goal].dtype, kinds):
                here, there = (f"{x}: {y[x].dtype}" for x, y in ((source, sources), (goal, goals)))
                dtypes.append(f"  {here}, {there}")
    missing = [
        f"  {name}, shape {goals[name].shape}{gap}"
        for name, found in filled.items()
        if name not in misfits or (found and not reverse)
        for gap in gaps([placement for placement, _ in found], nouns[0])
    ]
    unknown += [
        f"  {path}, shape {arrays[path].shape}{gap}"
        for path, found in used.items()
        if reverse and path not in misfits
        for gap in gaps(found, nouns[1], once=False)
    ]
    one = ["an array" if noun == "array" else f"a {noun}" for noun in nouns]
    problems = {
        f"{nouns[1].capitalize()}s without {one[0]}": missing,
        f"{nouns[0].capitalize()}s without {one[1]}": unknown,
        "Of another shape": shapes,
        OF_ANOTHER_DTYPE: dtypes,
    }
    raise_listed(CheckpointError, head, by_kind(problems))
    return filled


def names_of_array(rules: Rules, path: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The tensors that an array is written to, and their shapes; a ValueError if there are none."""
    names: dict[str, tuple[int, ...]] = {}
    kept: list[Placement] = []  # the first of each rule
    for pattern, tensors in rules.pairs:
        for tensor in tensors:
            found = list(_written(rules, pattern, tensor, path, shape))
            pairs = (zip(found[0].region, x.region, strict=True) for x in kept if found)
            # If the same array can be read from several names, the first is written.
            if found and not any(all(a < d and c < b for (a, b), (c, d) in x) for x in pairs):
                kept.append(found[0])
                names |= {placement.name: placement.tensor_shape for placement in found}
    if not names:
        raise ValueError("no rule has this path")
    return names


def _written(
    rules: Rules, pattern: re.Pattern[str], tensor: Tensor, path: str, shape: Sequence[int]
) -> Iterator[Placement]:
    groups_of = (_GROUP.fullmatch(part) for part, *_ in _PART.findall(pattern.pattern))
    texts = [each[1] for each in groups_of if each]
    place = re.escape(tensor.path).replace(r"\{", "{").replace(r"\}", "}")
    repeated: set[int] = set()

    def group(match: re.Match[str]) -> str:
        number = int(match[1])
        if number in repeated:
            return f"(?P=group{number})"
        repeated.add(number)
        return f"(?P<group{number}>{texts[number] if number < len(texts) else '.+'})"

    found = re.fullmatch(re.sub(r"{(\d+)}", group, place), path)
    if found is None:
        return
    known = {int(name[5:]): value for name, value in found.groupdict().items()}
    right = tensor.sides(len(shape))[1]
    if len(right) != len(shape):
        raise ValueError(f"{len(right)} dimensions in {tensor.dimensions!r}")
    stacked = {
        int(names[0][1:-1]): size
        for names, size in zip(right, shape, strict=True)
        if names[0].startswith("{")
    }
    for indices in itertools.product(*map(range, stacked.values())):
        groups = known | dict(zip(stacked, map(str, indices), strict=True))
        name = _name(pattern, groups)
        targets = rules.targets(name) or []
        if not any(t.tensor == tensor and t.path == path for t in targets):
            raise ValueError(f"its tensor would be {name}, which the rules read into another array")
        yield tensor.place(name, [groups[i] for i in range(pattern.groups)], shape)


def _name(pattern: re.Pattern[str], groups: Mapping[int, str]) -> str:
    """The name that a pattern matches with these groups."""
    parts = [part for part, *_ in _PART.findall(pattern.pattern) if part]
    is_plain = all(map(_GROUP.fullmatch, parts)) and not _PART.sub("", pattern.pattern)
    if not is_plain or set(groups) != set(range(pattern.groups)):
        raise ValueError(
            f"no name can be made of {pattern.pattern!r}: it is not a name with groups, or a group "
            "is neither in the path nor among the dimensions"
        )
    numbers = itertools.count()
    return _PART.sub(lambda m: groups[next(numbers)] if m[1] else m[2] or m[3], pattern.pattern)
