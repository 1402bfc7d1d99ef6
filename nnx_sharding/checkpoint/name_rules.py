"""Maps names of tensors to paths of arrays and back, by regular expressions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..errors import raise_listed
from .tensor_files import Region
from .tensor_rules import Placement, Tensor, gaps

# What a tensor becomes: an array by its path, one in another layout, several, or nothing.
Rule: TypeAlias = str | Tensor | Sequence[str | Tensor] | None

# The parts of a pattern from which names can be made: groups, escaped and plain characters.
_PART = re.compile(r"(\((?:[^()\\]|\\.)*\))|\\(\W)|([\w\-/.:])")


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
    """The rules that a user wrote.

    Raises:
      TypeError: one is not of these types.
      ValueError: one is not a regular expression, or names a group that it does not have.
    """
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


def names_of_array(rules: Rules, path: str, shape: Sequence[int]) -> list[Placement]:
    """The tensors that an array is written to.

    Raises:
      ValueError: no rule has this path, no name can be made from such a rule, or the tensors do not
        fill the array.
    """
    placements: list[Placement] = []
    kept: list[Placement] = []  # the first of each rule
    for pattern, tensors in rules.pairs:
        for tensor in tensors:
            found = list(_written(rules, pattern, tensor, path, shape))
            # If the same array can be read from several names, the first is written.
            if found and not any(_overlap(found[0].region, other.region) for other in kept):
                kept.append(found[0])
                placements += found
    if not placements:
        raise ValueError("no rule has this path")
    if missing := gaps(shape, placements):
        raise ValueError(f"it is not written exactly once{missing[0]}")
    return placements


def _overlap(one: Region, other: Region) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _written(
    rules: Rules, pattern: re.Pattern[str], tensor: Tensor, path: str, shape: Sequence[int]
) -> Iterator[Placement]:
    texts = [part[1:-1] for part, *_ in _PART.findall(pattern.pattern) if part]
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
    if _PART.sub("", pattern.pattern) or set(groups) != set(range(pattern.groups)):
        raise ValueError(
            f"no name can be made of {pattern.pattern!r}: it is not a name with groups, or a group "
            "is neither in the path nor among the dimensions"
        )
    numbers = itertools.count()
    return _PART.sub(lambda m: groups[next(numbers)] if m[1] else m[2] or m[3], pattern.pattern)
