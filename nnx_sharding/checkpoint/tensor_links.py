"""Links the tensors of a file with the arrays of a model that they fill, by their names alone.

Names that differ only in their *numbers*, such as that of a layer, are a *group*; what they have in
common is its *template* (`tensor_names.py`). A *link* is a group of tensors, and the group of
arrays that these fill:

    tensors   h.{}.mlp.w1.weight    names by numbers: (0,), (1,), …
    arrays    blocks/{}/up/kernel   names by numbers: (0,), (1,), …

Numbers have *counters*: here both sides count layers, so equal numbers belong together. If only the
tensors count something, an array has all of them *stacked* in a dimension, and the reverse.

One side may have *fused* what is apart on the other, such as queries, keys and values. Then each
*part* has a link of its own with the fused group.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .tensor_candidates import FusedPart, Shape, Stacked
from .tensor_names import (
    FUSED,
    GATE_UP_OF_EITHER_ORDER,
    QKV_BY_HEAD,
    Template,
    pair,
    read_name,
    settled,
)

Numbers: TypeAlias = tuple[int, ...]

# Tensors that PyTorch stores, but computes again; and causal masks, which are (1, 1, n, n).
_BUFFERS = re.compile(r"(.*\.)?(inv_freq|position_ids|masked_bias|num_batches_tracked)")
_MASKS = re.compile(r"(.*\.)?(attn|attention)\.bias")


class Group(NamedTuple):
    """The tensors, or the arrays, whose names have one template."""

    template: Template
    names: dict[Numbers, str]
    shapes: dict[Numbers, Shape]

    @property
    def is_buffer(self) -> bool:
        """Whether these tensors are no weights, so a model without them is not incomplete."""
        are_masks = all(len(x) == 4 and x[:2] == (1, 1) for x in self.shapes.values())
        pattern = _MASKS if are_masks else _BUFFERS
        return pattern.fullmatch(self.template.text) is not None


def grouped(shapes: Mapping[str, Shape]) -> list[Group]:
    """Groups names, which come with their shapes, by their templates."""
    groups: dict[str, Group] = {}
    for name, shape in shapes.items():
        template, numbers = read_name(name)
        group = groups.setdefault(template.text, Group(template, {}, {}))
        group.names[numbers], group.shapes[numbers] = name, tuple(shape)
    # What some names mean depends on which others there are.
    templates = settled([group.template for group in groups.values()])
    return [g._replace(template=t) for g, t in zip(groups.values(), templates, strict=True)]


@dataclasses.dataclass
class Link:
    """Tensors of one template that fill arrays of one template.

    Attributes:
      tensors: the tensors.
      arrays: the arrays.
      parts: the groups that are fused in the other side's one, in order; empty if none are.
      part: the index in these of the group that is linked.
      is_tensor_fused: whether the tensors have the parts; otherwise the arrays have.
      note: what the table of matches says of it.
    """

    tensors: Group
    arrays: Group
    parts: Sequence[Group] = ()
    part: int = 0
    is_tensor_fused: bool = False
    note: str = ""

    @property
    def stacked(self) -> list[str]:
        """The counters of tensors that are dimensions of arrays."""
        of_arrays = self.arrays.template.counters
        return [counter for counter in self.tensors.template.counters if counter not in of_arrays]

    @functools.cached_property
    def sources(self) -> Mapping[Numbers, list[Numbers]]:
        """The numbers of an array → those of the tensors that fill it.

        They are equal in what both sides count. Arrays without tensors are left out.
        """
        of_tensors, of_arrays = self.tensors.template.counters, self.arrays.template.counters
        shared = [counter for counter in of_tensors if counter in of_arrays]
        tensors_by_shared: dict[Numbers, list[Numbers]] = {}
        for numbers in self.tensors.names:
            key = tuple(numbers[of_tensors.index(counter)] for counter in shared)
            tensors_by_shared.setdefault(key, []).append(numbers)
        sources: dict[Numbers, list[Numbers]] = {}
        for numbers in self.arrays.names:
            key = tuple(numbers[of_arrays.index(counter)] for counter in shared)
            if key in tensors_by_shared:
                sources[numbers] = tensors_by_shared[key]
        return sources

    def path(self, numbers: Numbers) -> str:
        """Returns the path of an array in a rule: {0} is the first number in a tensor's name.

        ``blocks/{0}/up/kernel``, or ``blocks/3/up/kernel`` if tensors do not count blocks.
        """
        of_tensors = self.tensors.template.counters
        texts = iter(
            f"{{{of_tensors.index(counter)}}}" if counter in of_tensors else str(number)
            for counter, number in zip(self.arrays.template.counters, numbers, strict=True)
        )
        return re.sub("{}", lambda _: next(texts), self.arrays.template.text)

    def stacks_of(self, numbers: Numbers) -> tuple[Stacked, ...]:
        """Returns what is a dimension of an array with these numbers, or of its tensor, only."""
        of_tensors, of_arrays = self.tensors.template.counters, self.arrays.template.counters
        columns = [*zip(*self.sources[numbers], strict=True)]  # by counter, a number per tensor
        in_array = [
            Stacked(f"{{{i}}}", size=len({*columns[i]}), tensor_index=None)
            for i, counter in enumerate(of_tensors)
            if counter in self.stacked
        ]
        in_tensor = [
            Stacked(f"{counter}s", size=self._counts[i], tensor_index=numbers[i])
            for i, counter in enumerate(of_arrays)
            if counter not in of_tensors
        ]
        return (*in_array, *in_tensor)

    @functools.cached_property
    def _counts(self) -> list[int]:
        """How many different numbers arrays have of each counter."""
        return [len({*numbers}) for numbers in zip(*self.arrays.names, strict=True)]

    def fused_part(self, numbers: Numbers, source: Numbers) -> FusedPart | None:
        """Returns which part of the fused side an array and its first tensor are; None if none is.

        ``numbers`` are those of the array, ``source`` those of the tensor.
        """
        if not self.parts:
            return None
        key = numbers if self.is_tensor_fused else source
        # If one of the parts is missing, none fits: nothing has the shape (0,).
        shapes = tuple(group.shapes.get(key, (0,)) for group in self.parts)
        names = self.tensors.template.part, self.arrays.template.part
        return FusedPart(
            number=self.part,
            shapes=shapes,
            is_tensor_fused=self.is_tensor_fused,
            by_head=QKV_BY_HEAD in names,
            may_alternate=GATE_UP_OF_EITHER_ORDER in names,
        )


class _GroupPair(NamedTuple):
    """Tensors and arrays that may mean the same."""

    tensors: Group
    arrays: Group

    def fused(self, *, is_tensor_fused: bool) -> Group:
        """Returns the side that has several parts."""
        return self.tensors if is_tensor_fused else self.arrays


class Links:
    """What of a file and a model belongs together by names.

    Args:
      tensors: the tensors of the file.
      arrays: the arrays of the model.

    Attributes:
      links: tensors with the arrays that they fill.
      ambiguous: pairs of which each array has several, so that none is a link.
    """

    def __init__(self, tensors: Sequence[Group], arrays: Sequence[Group]):
        self._tensors, self._arrays = tensors, arrays
        self.links: list[Link] = []
        self.ambiguous: list[_GroupPair] = []
        for part in dict.fromkeys(group.template.part for group in arrays):
            clear, ambiguous = self._pairs(part, part)
            self.links += [Link(pair.tensors, pair.arrays) for pair in clear]
            self.ambiguous += ambiguous
        for fused, members in FUSED.items():  # such as "qkv" and ("q", "k", "v")
            self._link_fused(fused, members, is_tensor_fused=False)
            self._link_fused(fused, members, is_tensor_fused=True)
        if not any(group.template.part == "head" for group in tensors):
            clear, _ = self._pairs("embed", "head", again=True)
            note = "tied: the file has no head, so it is the embedding"
            self.links += [Link(pair.tensors, pair.arrays, note=note) for pair in clear]

    def _link_fused(self, fused: str, members: Sequence[str], *, is_tensor_fused: bool) -> None:
        """Links one group of tensors with several of arrays, or several of tensors with one.

        Nothing is linked unless each member of the fused part is there.

        Args:
          fused: the part of the one group, such as ``qkv``.
          members: the parts of the several, such as ``("q", "k", "v")``.
          is_tensor_fused: whether the tensors have the fused part.
        """
        pairs: list[_GroupPair] = []
        for member in members:
            tensor_part, array_part = (fused, member) if is_tensor_fused else (member, fused)
            pairs += self._pairs(tensor_part, array_part).clear
        by_fused: dict[str, list[_GroupPair]] = {}  # by the template of the fused group
        for group_pair in pairs:
            template = group_pair.fused(is_tensor_fused=is_tensor_fused).template
            by_fused.setdefault(template.text, []).append(group_pair)
        for _, own in sorted(by_fused.items()):
            if len(own) == len(members):
                parts = [pair.arrays if is_tensor_fused else pair.tensors for pair in own]
                self.links += [
                    Link(pair.tensors, pair.arrays, parts, index, is_tensor_fused)
                    for index, pair in enumerate(own)
                ]

    def _pairs(self, tensor_part: str, array_part: str, *, again: bool = False) -> _Pairs:
        """Pairs tensors and arrays that have no link, by the parts of a model that they are.

        Args:
          tensor_part: the part that tensors are, such as ``q``.
          array_part: the part that arrays are.
          again: whether tensors may have a link.
        """
        linked = {id(x) for link in self.links for x in (link.tensors, link.arrays)}
        tensors = [
            group
            for group in self._tensors
            if group.template.part == tensor_part and (again or id(group) not in linked)
        ]
        arrays = [
            group
            for group in self._arrays
            if group.template.part == array_part and id(group) not in linked
        ]
        pairs = _Pairs([], [])
        for place in dict.fromkeys(group.template.place for group in arrays):
            left = {group.template: group for group in tensors if group.template.place == place}
            right = {group.template: group for group in arrays if group.template.place == place}
            clear, possible = pair([*left], [*right])
            pairs.clear.extend(_GroupPair(left[x], right[y]) for x, y in clear)
            pairs.ambiguous.extend(_GroupPair(left[x], right[y]) for x, y in possible)
        return pairs


class _Pairs(NamedTuple):
    """Tensors and arrays that mean the same by their names."""

    clear: list[_GroupPair]
    ambiguous: list[_GroupPair]  # those that are possible among others
