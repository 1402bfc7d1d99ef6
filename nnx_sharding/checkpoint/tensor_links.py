"""Links the tensors of a file with the arrays of a model that they fill, by their names alone.

Names that differ only in their *numbers*, such as that of a layer, are a *group*; what they have in
common is its *template* (`tensor_names.py`). A *link* is a group of tensors, and the group of
arrays that these fill:

    tensors   h.{}.mlp.w1.weight    names by numbers: (0,), (1,), …
    arrays    blocks/{}/up/kernel   names by numbers: (0,), (1,), …

Each number has a *counter*, the word for what it counts: here both sides count layers, so equal
numbers belong together. If only the tensors count something, an array has all of them *stacked* in
a dimension, and the reverse.

A template has a *part*, which both sides share whatever they call it: ``q``, ``up``, ``embed``,
``head``. One side may have *fused* parts that are apart on the other: ``qkv`` instead of ``q``,
``k`` and ``v``. Then each of these has a link of its own with the fused group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from .tensor_candidates import FusedPart, Shape, Stacked
from .tensor_names import (
    FUSED,
    GATE_UP_OF_EITHER_ORDER,
    QKV_BY_HEAD,
    Template,
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
        template, numbers = read_name(name)  # "h.3.up" → the template "h.{}.up" and (3,)
        group = groups.setdefault(template.text, Group(template, {}, {}))
        group.names[numbers], group.shapes[numbers] = name, tuple(shape)
    # Some parts are only known once all names are: `mlp.gate` is a router next to experts that have
    # gates, and a gate otherwise. The texts of templates stay the same.
    templates = settled([group.template for group in groups.values()])
    return [
        group._replace(template=template)
        for group, template in zip(groups.values(), templates, strict=True)
    ]


@dataclasses.dataclass
class Link:
    """Tensors of one template that fill arrays of one template.

    Attributes:
      tensors: the tensors.
      arrays: the arrays.
      parts: the groups that are fused in the other side's one, in order, such as those of queries,
        keys and values; empty if none are. One of them is ``arrays`` if the tensors are fused, or
        ``tensors`` if the arrays are.
      part: the index of this one in ``parts``.
      is_tensor_fused: whether each tensor has all parts; otherwise each array has.
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
        """The counters that only tensors have in their names: they are dimensions of arrays."""
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
        """Returns the path that a rule has for an array, whose numbers are given.

        It is ``blocks/{0}/up/kernel`` if tensors count blocks, too: {0} is the first number in the
        name of a tensor. If they do not, it is ``blocks/3/up/kernel``, with the array's number.
        """
        tensor_counters = self.tensors.template.counters
        texts = []  # for each {} in the template of the arrays
        for counter, number in zip(self.arrays.template.counters, numbers, strict=True):
            if counter in tensor_counters:
                texts.append(f"{{{tensor_counters.index(counter)}}}")
            else:
                texts.append(str(number))
        holes = iter(texts)
        return re.sub("{}", lambda _: next(holes), self.arrays.template.text)

    def stacks_of(self, numbers: Numbers) -> tuple[Stacked, ...]:
        """Returns the dimensions that only one side has, as the other side counts by names.

        ``numbers`` are those of the array. If tensors ``h.0.up`` and ``h.1.up`` fill ``blocks/up``,
        the array has the dimension ``{0}`` of size 2. If the tensor ``up`` fills ``blocks/0/up``
        and ``blocks/1/up``, the tensor has the dimension ``layers`` of size 2.
        """
        tensor_counters = self.tensors.template.counters
        array_counters = self.arrays.template.counters
        stacks = []
        # For each counter of tensors, the numbers of the tensors that fill the array.
        columns = [*zip(*self.sources[numbers], strict=True)]
        for i, counter in enumerate(tensor_counters):
            if counter not in array_counters:
                stacks.append(Stacked(f"{{{i}}}", size=len({*columns[i]}), tensor_index=None))
        for i, counter in enumerate(array_counters):
            if counter not in tensor_counters:
                # Any key may count, such as "my-blocks", but only some words can name an axis.
                axis = (
                    f"{counter}s" if re.fullmatch("(?!dimension)[a-z_]+", counter) else f"stack{i}"
                )
                size = self._array_counts[i]
                stacks.append(Stacked(axis, size=size, tensor_index=numbers[i]))
        return tuple(stacks)

    @functools.cached_property
    def _array_counts(self) -> list[int]:
        """How many different numbers arrays have of each counter in their names."""
        return [len({*numbers}) for numbers in zip(*self.arrays.names, strict=True)]

    def fused_part(self, numbers: Numbers, source: Numbers) -> FusedPart | None:
        """Returns which part of the fused side is linked here, or None if no side is fused.

        ``numbers`` are those of an array, and ``source`` those of a tensor that fills it.
        """
        if not self.parts:
            return None
        # The parts are groups of arrays if tensors are fused, otherwise groups of tensors. The
        # other parts of the same layer have the same numbers as the one that is linked.
        key = numbers if self.is_tensor_fused else source
        # If one of them is missing there, no way may fit: nothing has the shape (0,).
        shapes = tuple(group.shapes.get(key, (0,)) for group in self.parts)
        fused_names = self.tensors.template.part, self.arrays.template.part
        return FusedPart(
            number=self.part,
            shapes=shapes,
            is_tensor_fused=self.is_tensor_fused,
            by_head=QKV_BY_HEAD in fused_names,
            may_alternate=GATE_UP_OF_EITHER_ORDER in fused_names,
        )


# Tensors and arrays that mean the same, or may do so.
_Pairs: TypeAlias = list[tuple[Group, Group]]


class Links:
    """What of a file and a model belongs together by names.

    Args:
      tensors: the tensors of the file.
      arrays: the arrays of the model.

    Attributes:
      links: tensors with the arrays that they fill.
      ambiguous: pairs that are no links, because several groups of tensors may fill the arrays.
    """

    def __init__(self, tensors: Sequence[Group], arrays: Sequence[Group]):
        self._tensors, self._arrays = tensors, arrays
        self.links: list[Link] = []
        self.ambiguous: _Pairs = []
        # 1. Equal parts of a model, such as "q" and "q".
        for part in dict.fromkeys(group.template.part for group in arrays):
            clear, ambiguous = self._pairs(part, part)
            self.links += [Link(*pair) for pair in clear]
            self.ambiguous += ambiguous
        # 2. Of what has no link yet, fused parts: "qkv" and ("q", "k", "v"), on either side.
        for fused, members in FUSED.items():
            self._link_fused(fused, members, is_tensor_fused=False)
            self._link_fused(fused, members, is_tensor_fused=True)
        # 3. Without a head in the file, the embedding is the head, too, although it has a link.
        if not any(group.template.part == "head" for group in tensors):
            clear, _ = self._pairs("embed", "head", may_have_link=True)
            note = "tied: the file has no head, so it is the embedding"
            self.links += [Link(*pair, note=note) for pair in clear]

    def _link_fused(self, fused: str, members: Sequence[str], *, is_tensor_fused: bool) -> None:
        """Links one group of tensors with several of arrays, or several of tensors with one.

        Nothing is linked unless each member of the fused part is there.

        Args:
          fused: the part of the one group, such as ``qkv``.
          members: the parts of the several, such as ``("q", "k", "v")``.
          is_tensor_fused: whether the tensors have the fused part.
        """
        # The template of the fused group → its pairs, in the order of `members`. As clear pairs
        # share no group, these are one for each member at most.
        pairs_of: dict[str, _Pairs] = {}
        for member in members:
            tensor_part, array_part = (fused, member) if is_tensor_fused else (member, fused)
            clear, _ = self._pairs(tensor_part, array_part)
            for tensors, arrays in clear:
                group = tensors if is_tensor_fused else arrays
                pairs_of.setdefault(group.template.text, []).append((tensors, arrays))
        for _, pairs in sorted(pairs_of.items()):
            if len(pairs) != len(members):
                continue
            parts = [arrays if is_tensor_fused else tensors for tensors, arrays in pairs]
            for index, (tensors, arrays) in enumerate(pairs):
                self.links.append(Link(tensors, arrays, parts, index, is_tensor_fused))

    def _pairs(
        self, tensor_part: str, array_part: str, *, may_have_link: bool = False
    ) -> tuple[_Pairs, _Pairs]:
        """Pairs tensors and arrays that have no link, by the parts of a model that they are.

        Both must also be alike in whether they are in layers, and weight or bias.

        Args:
          tensor_part: the part that tensors are, such as ``q``.
          array_part: the part that arrays are.
          may_have_link: whether the tensors may have a link already, as an embedding that is also
            the head.

        Returns:
          Pairs that are clear, which share no group; and all pairs that are ambiguous.
        """
        linked = {id(x) for link in self.links for x in (link.tensors, link.arrays)}
        clear: _Pairs = []
        ambiguous: _Pairs = []
        for in_layer, kind in dict.fromkeys(group.template.role[:2] for group in self._arrays):
            tensors = [
                group
                for group in self._tensors
                if group.template.role == (in_layer, kind, tensor_part)
                and (may_have_link or id(group) not in linked)
            ]
            arrays = [
                group
                for group in self._arrays
                if group.template.role == (in_layer, kind, array_part) and id(group) not in linked
            ]
            found, possible = _pair(tensors, arrays)
            clear += found
            ambiguous += possible
        return clear, ambiguous


def _pair(tensors: Sequence[Group], arrays: Sequence[Group]) -> tuple[_Pairs, _Pairs]:
    """Pairs groups of tensors and of arrays that all have one role, such as "q" weights.

    Groups are a pair if they are the only ones on their sides with the same spelling, or the same
    words, such as ``("layers", "cross_attn", "q")``. If the words differ, the same context will do,
    such as ``{"cross_attn"}``. If one group is left on each side, nothing else can be meant.

    Returns:
      The pairs; then, of the groups that are left, all pairs that are possible.
    """
    left, right = [*tensors], [*arrays]  # what has no pair yet
    pairs: _Pairs = []
    for key in map(attrgetter, ("template.spelling", "template.words", "template.context")):
        for value in dict.fromkeys(map(key, left)):  # a copy, as `left` changes
            tensors_with_key = [group for group in left if key(group) == value]
            arrays_with_key = [group for group in right if key(group) == value]
            if len(tensors_with_key) == len(arrays_with_key) == 1:
                [tensor], [array] = tensors_with_key, arrays_with_key
                pairs.append((tensor, array))
                left.remove(tensor)
                right.remove(array)
    # A group may be of the other's half of a model: a model alone often does not name its half.
    possible = []
    for tensor, array in itertools.product(left, right):
        halves = tensor.template.towers, array.template.towers
        if halves[0] <= halves[1] or halves[1] <= halves[0]:
            possible.append((tensor, array))
    if len(left) == len(right) == 1:
        return pairs + possible, []
    return pairs, possible
