"""Links the tensors of a file with the arrays of a model that they fill, by their names alone.

Names that differ only in their *numbers*, such as the number of a layer, are a *group*, and their
common form is its *template* (`tensor_names.py`). A *link* is a group of tensors, and the group of
arrays that they fill:

    tensors   h.{}.mlp.w1.weight    names by numbers: (0,), (1,), …
    arrays    blocks/{}/up/kernel   names by numbers: (0,), (1,), …

Each number has a *counter*, the word for what it counts. In the example, both sides count layers,
so equal numbers belong together. If only the tensors count layers, an array has all layers
*stacked* in a dimension. If only the arrays count layers, a tensor has them stacked.

A template has a *part*, which both sides share whatever they call it: ``q``, ``up``, ``embed``,
``head``. One side may have *fused* parts that are separate on the other side: ``qkv`` instead of
``q``, ``k`` and ``v``. Each of the separate parts has a link of its own with the fused group.
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
    with_settled_parts,
)

Numbers: TypeAlias = tuple[int, ...]

# Tensors that PyTorch stores although it can compute them, and causal masks, (1, 1, n, n).
_BUFFERS = re.compile(r"(.*\.)?(inv_freq|position_ids|masked_bias|num_batches_tracked)")
_MASKS = re.compile(r"(.*\.)?(attn|attention)\.bias")


class Group(NamedTuple):
    """The tensors, or the arrays, whose names have one template."""

    template: Template
    names: dict[Numbers, str]  # the complete names, by the numbers in them
    shapes: dict[Numbers, Shape]  # the shapes, by the same numbers

    @property
    def is_buffer(self) -> bool:
        """Whether the tensors are no weights, so that a model may do without them."""
        are_masks = all(len(x) == 4 and x[:2] == (1, 1) for x in self.shapes.values())
        pattern = _MASKS if are_masks else _BUFFERS
        return pattern.fullmatch(self.template.text) is not None


def grouped(shapes: Mapping[str, Shape]) -> list[Group]:
    """Groups names by their templates; ``shapes`` has the shape of each name."""
    groups: dict[str, Group] = {}
    for name, shape in shapes.items():
        template, numbers = read_name(name)  # "h.3.up" → the template "h.{}.up" and (3,)
        group = groups.setdefault(template.text, Group(template, {}, {}))
        group.names[numbers], group.shapes[numbers] = name, tuple(shape)
    # Some parts depend on other names, so they are decided when all names are known: `mlp.gate` is
    # a router next to experts that have gates, and a gate otherwise. The texts of templates stay
    # the same.
    templates = with_settled_parts(
        [group.template for group in groups.values()],
        [next(iter(group.shapes.values())) for group in groups.values()],
    )
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
      parts: the groups that the other side has fused, in order, such as the groups of queries, keys
        and values; empty if nothing is fused. One of them is ``arrays`` if the tensors are fused,
        or ``tensors`` if the arrays are.
      part: the index in ``parts`` of the group that is linked.
      is_tensor_fused: whether each tensor has all parts; if not, each array has them.
      note: a note for the table of matches.
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
        array_counters = self.arrays.template.counters
        tensor_counters = self.tensors.template.counters
        return [counter for counter in tensor_counters if counter not in array_counters]

    @functools.cached_property
    def sources(self) -> Mapping[Numbers, list[Numbers]]:
        """The numbers of an array → the numbers of the tensors that fill it.

        The numbers of counters that both sides have are equal. Arrays without tensors are left out.
        """
        tensor_counters = self.tensors.template.counters
        array_counters = self.arrays.template.counters
        shared_counters = [counter for counter in tensor_counters if counter in array_counters]
        tensors_by_shared: dict[Numbers, list[Numbers]] = {}
        for numbers in self.tensors.names:
            key = tuple(numbers[tensor_counters.index(counter)] for counter in shared_counters)
            tensors_by_shared.setdefault(key, []).append(numbers)
        sources: dict[Numbers, list[Numbers]] = {}
        for numbers in self.arrays.names:
            key = tuple(numbers[array_counters.index(counter)] for counter in shared_counters)
            if key in tensors_by_shared:
                sources[numbers] = tensors_by_shared[key]
        return sources

    def path(self, numbers: Numbers) -> str:
        """Returns the path in a rule for an array with these numbers.

        It is ``blocks/{0}/up/kernel`` if tensors count blocks as well; {0} is the first number in
        the name of a tensor. If they do not, it is ``blocks/3/up/kernel``, with the array's number.
        """
        tensor_counters = self.tensors.template.counters
        texts = []  # the text for each {} in the template of the arrays
        for counter, number in zip(self.arrays.template.counters, numbers, strict=True):
            if counter in tensor_counters:
                texts.append(f"{{{tensor_counters.index(counter)}}}")
            else:
                texts.append(str(number))
        remaining_texts = iter(texts)
        return re.sub("{}", lambda _: next(remaining_texts), self.arrays.template.text)

    def stacks_of(self, numbers: Numbers) -> tuple[Stacked, ...]:
        """Returns the dimensions that only one side has, because the other side counts by names.

        If tensors ``h.0.up`` and ``h.1.up`` fill ``blocks/up``, the array has the dimension ``{0}``
        of size 2. If the tensor ``up`` fills ``blocks/0/up`` and ``blocks/1/up``, the tensor has
        the dimension ``layers`` of size 2.

        Args:
          numbers: the numbers of the array, which has tensors (``sources``).
        """
        tensor_counters = self.tensors.template.counters
        array_counters = self.arrays.template.counters
        stacks = []
        # A column for each counter of tensors, with the numbers of the tensors that fill the array.
        columns = [*zip(*self.sources[numbers], strict=True)]
        for i, counter in enumerate(tensor_counters):
            if counter not in array_counters:
                stacks.append(Stacked(f"{{{i}}}", size=len({*columns[i]}), tensor_index=None))
        for i, counter in enumerate(array_counters):
            if counter not in tensor_counters:
                # A counter may be any key, such as "my-blocks", but not every key can name an axis.
                axis = (
                    f"{counter}s" if re.fullmatch("(?!dimension)[a-z_]+", counter) else f"stack{i}"
                )
                size = self._array_counts[i]
                stacks.append(Stacked(axis, size=size, tensor_index=numbers[i]))
        return tuple(stacks)

    @functools.cached_property
    def _array_counts(self) -> list[int]:
        """For each counter in the names of arrays, how many different numbers they have."""
        return [len({*numbers}) for numbers in zip(*self.arrays.names, strict=True)]

    def fused_part(self, numbers: Numbers, source: Numbers) -> FusedPart | None:
        """Returns the part of the fused side that is linked; None if no side is fused.

        Args:
          numbers: the numbers of an array.
          source: the numbers of a tensor that fills it.
        """
        if not self.parts:
            return None
        # The parts are groups of arrays if tensors are fused, otherwise groups of tensors. All
        # parts of a layer have the same numbers.
        key = numbers if self.is_tensor_fused else source
        # A part that the layer lacks gets the shape (0,), which nothing has, so that no way fits.
        shapes = tuple(group.shapes.get(key, (0,)) for group in self.parts)
        fused_names = self.tensors.template.part, self.arrays.template.part
        return FusedPart(
            number=self.part,
            shapes=shapes,
            is_tensor_fused=self.is_tensor_fused,
            by_head=QKV_BY_HEAD in fused_names,
            may_alternate=GATE_UP_OF_EITHER_ORDER in fused_names,
        )


# Pairs of a group of tensors and a group of arrays that mean, or may mean, the same.
_Pairs: TypeAlias = list[tuple[Group, Group]]


class Links:
    """The tensors of a file and the arrays of a model that belong together by names.

    Args:
      tensors: the tensors of the file.
      arrays: the arrays of the model.

    Attributes:
      links: tensors with the arrays that they fill.
      ambiguous: pairs that are no links, because several groups of tensors may fill the arrays.

    ``_tensors`` and ``_arrays`` are the arguments. `_pairs` finds groups that belong together. It
    leaves out groups that ``links`` has already, so an earlier step of the constructor decides.
    """

    def __init__(self, tensors: Sequence[Group], arrays: Sequence[Group]):
        """Links the tensors and arrays."""
        self._tensors, self._arrays = tensors, arrays
        self.links: list[Link] = []
        self.ambiguous: _Pairs = []
        # 1. Link equal parts of a model, such as "q" and "q".
        for part in dict.fromkeys(group.template.part for group in arrays):
            clear, ambiguous = self._pairs(part, part)
            self.links += [Link(*pair) for pair in clear]
            self.ambiguous += ambiguous
        # 2. Link groups without a link that have fused parts, "qkv" and ("q", "k", "v"), on either
        # side.
        for fused, members in FUSED.items():
            self._link_fused(fused, members, is_tensor_fused=False)
            self._link_fused(fused, members, is_tensor_fused=True)
        # 3. If the file has no head, link the embedding as the head as well, although it has a
        # link.
        if not any(group.template.part == "head" for group in tensors):
            clear, _ = self._pairs("embed", "head", may_have_link=True)
            note = "tied: the file has no head, so it is the embedding"
            self.links += [Link(*pair, note=note) for pair in clear]

    def _link_fused(self, fused: str, members: Sequence[str], *, is_tensor_fused: bool) -> None:
        """Links a fused group of one side with groups of the other side, one for each member.

        Nothing is linked unless there is a group for each member of the fused part.

        Args:
          fused: the part of the fused group, such as ``qkv``.
          members: the parts of the other groups, such as ``("q", "k", "v")``.
          is_tensor_fused: whether the fused group is of tensors.
        """
        # The template of the fused group → its pairs, in the order of `members`. There is at most
        # one pair for each member, because clear pairs share no group.
        pairs_of: dict[str, _Pairs] = {}
        for member in members:
            tensor_part, array_part = (fused, member) if is_tensor_fused else (member, fused)
            # Ambiguous pairs get no link here, and no entry in `ambiguous`.
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

        Both sides of a pair are in layers, or both are not, and both have the same kind, weight or
        bias.

        Args:
          tensor_part: the part that tensors are, such as ``q``.
          may_have_link: whether the tensors may have a link already, for example an embedding that
            is the head as well.

        Returns:
          Two lists: pairs that are clear, which share no group, and all pairs that are ambiguous.
        """
        # The ids of groups that have a link. Groups hold dicts, so they cannot be in a set.
        linked = {id(x) for link in self.links for x in (link.tensors, link.arrays)}
        clear: _Pairs = []
        ambiguous: _Pairs = []
        # A role is (in_layer, kind, part).
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
            clear_pairs, possible_pairs = _pair(tensors, arrays)
            clear += clear_pairs
            ambiguous += possible_pairs
        return clear, ambiguous


def _pair(tensors: Sequence[Group], arrays: Sequence[Group]) -> tuple[_Pairs, _Pairs]:
    """Pairs groups of tensors and of arrays that all have one role, such as "q" weights.

    Groups are a pair if they are the only ones on their sides with the same spelling, or with the
    same words, such as ``("layers", "cross_attn", "q")``, or with the same context, such as
    ``{"cross_attn"}``. These are compared in this order. If one group is left on each side, the two
    are a pair as well, because nothing else can be meant. They are no pair if each of them names a
    tower that the other lacks, such as ``encoder`` and ``decoder``.

    Returns:
      Two lists: the pairs, which share no group, and all possible pairs of the groups that are
      left. A group may be in several of the latter.
    """
    unpaired_tensors, unpaired_arrays = [*tensors], [*arrays]
    pairs: _Pairs = []
    for key in map(attrgetter, ("template.spelling", "template.words", "template.context")):
        # The values are collected first, because `unpaired_tensors` changes in the loop.
        for value in dict.fromkeys(map(key, unpaired_tensors)):
            tensors_with_key = [group for group in unpaired_tensors if key(group) == value]
            arrays_with_key = [group for group in unpaired_arrays if key(group) == value]
            if len(tensors_with_key) == len(arrays_with_key) == 1:
                [tensor], [array] = tensors_with_key, arrays_with_key
                pairs.append((tensor, array))
                unpaired_tensors.remove(tensor)
                unpaired_arrays.remove(array)
    # A pair is possible if both may be in the same half of a model. One side may name fewer towers
    # than the other, because a half that is a model of its own often does not name itself.
    possible_pairs = []
    for tensor, array in itertools.product(unpaired_tensors, unpaired_arrays):
        tensor_towers, array_towers = tensor.template.towers, array.template.towers
        if tensor_towers <= array_towers or array_towers <= tensor_towers:
            possible_pairs.append((tensor, array))
    if len(unpaired_tensors) == len(unpaired_arrays) == 1:
        return pairs + possible_pairs, []
    return pairs, possible_pairs
