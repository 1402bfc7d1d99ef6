r"""``match_tensors``: rules for a file that nobody has described, or an error that says why not.

    names of tensors ─┐ tensor_names: which mean     ┌─ shapes, tensor_candidates:
    paths of arrays ──┘ the same                ────►│  in which ways they fit      ────► rules

Names alone decide what belongs together, and shapes alone how. Nothing is chosen among several
that are possible, with four exceptions, each of which the rules mention:

- A square matrix fits in two ways. An array that is called ``kernel`` is (in, out), as all of Flax
  are, and ``embedding`` is as PyTorch has it. Matrices of a file are (out, in), unless those that
  are not square show the other order.
- All arrays of stacked layers have these in the same dimension.
- Tensors called ``query_key_value`` have the parts of each head together, others all heads of each.
- In a file without a tensor for the head, the embedding is the head.

What a file cannot show is not seen here: the order of rotary dimensions within heads, a norm that
adds 1 to its scale, or which of two halves an activation is applied to. The model has to be as the
file's, or the rules have to be edited.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from flax import nnx

from .. import _compat
from ..core.flatten import flatten
from ..errors import CheckpointError, by_kind, raise_listed
from . import names, tensor_files
from .safetensors import WEIGHTS, weights
from .tensor_candidates import Candidate, Convention, Order, Shape, Share, Stacked, candidates
from .tensor_matching import fill_by_rules
from .tensor_names import (
    FUSED,
    GATE_UP_OF_EITHER_ORDER,
    QKV_BY_HEAD,
    Template,
    pair,
    read_name,
    settled,
)
from .tensor_rules import Rule, Tensor, read_rules
from .tensor_table import Match, TensorRules, loaded_rules

_MATCH = "match_tensors"

Numbers: TypeAlias = tuple[int, ...]

# Tensors that PyTorch stores, but computes again; and causal masks, which are (1, 1, n, n).
_BUFFERS = re.compile(r"(.*\.)?(inv_freq|position_ids|masked_bias|num_batches_tracked)")
_MASKS = re.compile(r"(.*\.)?(attn|attention)\.bias")


# Tensors next to quantised weights, of which these are no use alone.
_OF_QUANTISED = re.compile(
    r".*(weight_scale(_inv)?|qweight|qzeros|g_idx|SCB|absmax|quant_map|_(blocks|scales))"
)


class Group(NamedTuple):
    """The names of one template, with the shape of each, by their numbers."""

    template: Template
    names: dict[Numbers, str]
    shapes: dict[Numbers, Shape]

    @property
    def is_buffer(self) -> bool:
        """Whether these tensors are no weights, so a model without them is not incomplete."""
        are_masks = all(len(x) == 4 and x[:2] == (1, 1) for x in self.shapes.values())
        pattern = _MASKS if are_masks else _BUFFERS
        return pattern.fullmatch(self.template.text) is not None


@dataclasses.dataclass
class Link:
    """Tensors of one template that fill arrays of one template."""

    tensors: Group
    arrays: Group
    fused: Sequence[Group] = ()  # the tensors that share an array, or the arrays that share one
    index: int = 0  # which of these it is
    of_tensor: bool = False  # whether arrays share one tensor
    note: str = ""

    @property
    def stacked(self) -> list[str]:
        """What is counted by names of tensors, but by dimensions of arrays."""
        counted = self.arrays.template.numbers
        return [x for x in self.tensors.template.numbers if x not in counted]

    @functools.cached_property
    def sources(self) -> Mapping[Numbers, list[Numbers]]:
        """The numbers of the tensors that fill each array: equal ones of what both sides count."""
        tensors, arrays = self.tensors.template.numbers, self.arrays.template.numbers
        shared = [x for x in tensors if x in arrays]
        grouped: dict[Numbers, list[Numbers]] = {}
        for numbers in self.tensors.names:
            key = tuple(numbers[tensors.index(x)] for x in shared)
            grouped.setdefault(key, []).append(numbers)
        keys = {each: tuple(each[arrays.index(x)] for x in shared) for each in self.arrays.names}
        return {numbers: grouped[key] for numbers, key in keys.items() if key in grouped}

    @functools.cached_property
    def _counts(self) -> list[int]:
        """How many different numbers arrays have, of each that they count."""
        return [len({*numbers}) for numbers in zip(*self.arrays.names, strict=True)]

    def path(self, numbers: Numbers) -> str:
        """Returns the path in a rule, where {0} is the first number in the name of the tensor."""
        counted = self.tensors.template.numbers
        places = iter(
            f"{{{counted.index(x)}}}" if x in counted else str(number)
            for x, number in zip(self.arrays.template.numbers, numbers, strict=True)
        )
        return re.sub("{}", lambda _: next(places), self.arrays.template.text)

    def stack(self, numbers: Numbers) -> tuple[Stacked, ...]:
        """Returns what an array, or its tensor, has as a dimension instead of by names."""
        tensors, arrays = self.tensors.template.numbers, self.arrays.template.numbers
        columns = [*zip(*self.sources[numbers], strict=True)]
        of_array = [(i, len({*columns[i]})) for i, x in enumerate(tensors) if x in self.stacked]
        of_tensor = [i for i, x in enumerate(arrays) if x not in tensors]
        return (
            *(Stacked(f"{{{i}}}", size, None) for i, size in of_array),
            *(Stacked(f"{arrays[i]}s", self._counts[i], numbers[i]) for i in of_tensor),
        )

    def share(self, numbers: Numbers, source: Numbers) -> Share | None:
        """Returns which part of what is fused an array, or its tensor, is."""
        if not self.fused:
            return None
        key = numbers if self.of_tensor else source
        # Without one of them, none fits.
        shapes = tuple(group.shapes.get(key, (0,)) for group in self.fused)
        parts = self.tensors.template.part, self.arrays.template.part
        in_turns = GATE_UP_OF_EITHER_ORDER in parts
        return Share(self.index, shapes, self.of_tensor, QKV_BY_HEAD in parts, in_turns)


@dataclasses.dataclass
class Fit:
    """One array of a link, the tensors that fill it, and the ways in which they may."""

    link: Link
    numbers: Numbers
    sources: list[Numbers]
    by_order: Mapping[Order, Sequence[Candidate]]  # by that of the matrices in the file
    ways: Sequence[Candidate] = ()

    def orders(self) -> set[Order]:
        """Returns the orders in which it fits, and as usual if there is something usual."""
        fitting = {order for order, ways in self.by_order.items() if ways}
        usual = {order for order in fitting if any(x.is_usual for x in self.by_order[order])}
        return usual or fitting


@_compat.api_boundary
def match_tensors(
    model: Any,
    path: str | os.PathLike[str],
    *,
    rules: Mapping[str, Rule] | str | os.PathLike[str] | None = None,
    only: Any = WEIGHTS,
) -> TensorRules:
    r"""Infers the rules by which the tensors of a file fill a model, from names and shapes.

    It knows the names of Hugging Face, of Meta, and the usual ones in Flax. Weights may be
    transposed, split into heads, fused (``qkv``, ``gate_up``) on either side, stacked in any
    dimension, and the embedding may be the head, too. Of several possibilities none is taken, but
    for square kernels, which are (in, out), and the rules say so. Only headers are read.

    Rules say where numbers go, not what they mean. If the model orders rotary dimensions in
    another way than the file, or adds 1 to the scale of a norm, rules must be edited, or the model.

    Args:
      model: what is to be filled, with arrays or abstract.
      path: a file or a folder, as for :func:`load_safetensors`.
      rules: those that are known already, as for :func:`load_safetensors`. They come first.
      only: an NNX filter for what is to be filled. The default is all but the state of random
        streams.

    Returns:
      Rules for :func:`load_safetensors` and :func:`save_safetensors`: a dict, printed as text to
      edit. ``rules.save(path)`` writes it to a file, which ``rules.load(path)`` and these
      functions read. ``rules.table`` has a row for each kind of tensor: what becomes what, and how.

    Raises:
      NoCheckpointError: the file does not exist.
      CheckpointError: a file is damaged; or arrays without tensors, tensors without arrays, shapes
        that do not fit, and what is ambiguous, with the candidates, all in one message.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import Tensor, match_tensors, save_safetensors
      >>> layer = lambda: nnx.Dict(up=nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0)))
      >>> folder = tempfile.mkdtemp()
      >>> torch = {r"h\.(\d+)\.up_proj\.weight": Tensor("{0}/up/kernel", "o i -> i o")}
      >>> save_safetensors(folder, nnx.List([layer(), layer()]), torch)
      >>> print(match_tensors(nnx.Dict(blocks=nnx.List([layer(), layer()])), folder))
      {
          # (out, in) to (in, out)
          r"h\.(\d+)\.up_proj\.weight": Tensor("blocks/{0}/up/kernel", "out in -> in out"),
      }
    """
    flat = flatten(model)
    everything = names.named_arrays(flat)
    arrays = weights(_MATCH, everything, only)
    given = loaded_rules(rules or {})
    known = read_rules(_MATCH, given)
    head = f"{_MATCH}: {os.fspath(path)} does not fit the model."
    with tensor_files.open_tensors(_MATCH, path) as tensors:
        unread = [
            f"  {name}: {tensor.dtype}"
            for name, tensor in tensors.items()
            if isinstance(tensor.dtype, str) and known.targets(name) is None
        ]
        raise_listed(CheckpointError, f"{head}\nOf a dtype that JAX does not have:", unread)
        taken = {t.path for name in tensors for t in known.targets(name) or ()}
        # Tensors of arrays that `only` leaves out have rules, too.
        others = weights(_MATCH, everything, WEIGHTS) | arrays
        matching = _Matching(
            {name: tensors[name].shape for name in sorted(tensors) if known.targets(name) is None},
            {name: x.leaf.shape for name, x in others.items() if name not in taken},
        )
        matching.link_names()
        # An Einsum has text for the order of its dimensions, so its kernel may have any.
        einsums = {id(x.kernel) for x in flat.objects if isinstance(x, nnx.Einsum)}
        of_einsum = {name for name, x in others.items() if id(x.variable) in einsums}
        matching.choose_ways(of_einsum)
        problems = by_kind(matching.problems({*arrays}))
        remedy = "Say what is not inferred by rules={pattern: path, Tensor or None}."
        if any(_OF_QUANTISED.fullmatch(name) for name in tensors):
            remedy = "The file is quantised, but only numbers without scales can be loaded."
        raise_listed(CheckpointError, head, problems, remedy)
        result = TensorRules({**given, **matching.rules()}, matching.matches)
        # Rules are believed only if they fill each array completely, and once.
        leaves = {name: array.leaf for name, array in arrays.items()}
        paths = {array.path for array in everything}
        fill_by_rules(head, read_rules(_MATCH, result), tensors, leaves, paths, cast=True)
    return result


def _grouped(shapes: Mapping[str, Shape]) -> list[Group]:
    """Groups names by their templates."""
    groups: dict[str, Group] = {}
    for name, shape in shapes.items():
        template, numbers = read_name(name)
        group = groups.setdefault(template.text, Group(template, {}, {}))
        group.names[numbers], group.shapes[numbers] = name, tuple(shape)
    templates = settled([group.template for group in groups.values()])
    return [g._replace(template=t) for g, t in zip(groups.values(), templates, strict=True)]


class _Matching:
    """What belongs together by names, then how by shapes, and what of both failed."""

    def __init__(self, tensors: Mapping[str, Shape], arrays: Mapping[str, Shape]):
        self._tensors, self._arrays = _grouped(tensors), _grouped(arrays)
        self._links = list[Link]()
        self._rules = dict[str, dict[Numbers, list[Tensor]]]()  # by template and numbers
        self._ambiguous, self._misfits = list[str](), list[str]()
        self._settled = set[str]()  # names and paths that have a rule, or another problem
        self._rows = set[tuple[str | None, ...]]()  # what has a row in the table
        self.matches = list[Match]()

    def link_names(self) -> None:
        """Links tensors and arrays that mean the same by their names."""
        for part in dict.fromkeys(group.template.part for group in self._arrays):
            pairs, unclear = self._pairs(part, part)
            self._links += [Link(tensors, arrays) for tensors, arrays in pairs]
            for array in {arrays.template.text: arrays for _, arrays in unclear}.values():
                rivals = [tensors for tensors, other in unclear if other is array]
                for numbers, path in array.names.items():
                    several = " or ".join(x.names.get(numbers, x.template.text) for x in rivals)
                    self._ambiguous.append(f"  {path}: {several}")
                self._settled |= {*array.names.values()}
                self._settled |= {name for x in rivals for name in x.names.values()}
        for fused, members in FUSED.items():
            self._link_fused(fused, members, of_tensor=False)
            self._link_fused(fused, members, of_tensor=True)
        if not any(group.template.part == "head" for group in self._tensors):
            pairs, _ = self._pairs("embed", "head", again=True)
            note = "tied: the file has no head, so it is the embedding"
            self._links += [Link(*each, note=note) for each in pairs]

    def _link_fused(self, fused: str, members: Sequence[str], *, of_tensor: bool) -> None:
        """Links one tensor with several arrays, or several tensors with one array."""
        pairs = [self._pairs(*((fused, x) if of_tensor else (x, fused)))[0] for x in members]
        wholes = {x[not of_tensor].template.text for member_pairs in pairs for x in member_pairs}
        for text in sorted(wholes):
            own = [x for each in pairs for x in each if x[not of_tensor].template.text == text]
            if len(own) == len(members):
                parts = [x[of_tensor] for x in own]
                for i, (tensors, arrays) in enumerate(own):
                    self._links.append(Link(tensors, arrays, parts, i, of_tensor))

    def _pairs(
        self, part: str, target: str, *, again: bool = False
    ) -> tuple[list[tuple[Group, Group]], list[tuple[Group, Group]]]:
        """Pairs tensors and arrays of these parts that have no link; also those that may be pairs.

        With ``again``, tensors may have a link.
        """
        linked = {id(x) for link in self._links for x in (link.tensors, link.arrays)}
        tensors = [x for x in self._tensors if x.template.part == part]
        tensors = [x for x in tensors if again or id(x) not in linked]
        arrays = [x for x in self._arrays if x.template.part == target and id(x) not in linked]
        clear, unclear = list[tuple[Group, Group]](), list[tuple[Group, Group]]()
        for place in dict.fromkeys(x.template.place for x in arrays):
            left = {x.template: x for x in tensors if x.template.place == place}
            right = {x.template: x for x in arrays if x.template.place == place}
            pairs, possible = pair([*left], [*right])
            clear += [(left[x], right[y]) for x, y in pairs]
            unclear += [(left[x], right[y]) for x, y in possible]
        return clear, unclear

    def choose_ways(self, unusual: Collection[str]) -> None:
        """Decides how tensors fill arrays; by convention, unless a path is among ``unusual``."""
        fits = [fit for link in self._links for fit in self._fits(link, unusual)]
        _agree_on_order(fits)
        _agree_on_stacks(fits)
        for fit in fits:
            link = fit.link
            path, source = link.arrays.names[fit.numbers], link.tensors.names[fit.sources[0]]
            self._settled |= {path, *(link.tensors.names[x] for x in fit.sources)}
            usual = [way for way in fit.ways if way.is_usual]
            if not fit.ways:
                shapes = link.tensors.shapes[fit.sources[0]], link.arrays.shapes[fit.numbers]
                several = f" of {len(fit.sources)}" if len(fit.sources) > 1 else ""
                text = f"  {source}, shape {shapes[0]}{several}: {path}, shape {shapes[1]}"
                if link.fused and link.tensors.template.part == QKV_BY_HEAD:
                    text += '; an array without heads needs "(h p d) in -> in (h d)", h=…, p=3'
                self._misfits.append(text)
            elif len(fit.ways) > 1 and len(usual) != 1:
                several = " or ".join(repr(way.tensor.dimensions) for way in fit.ways)
                self._ambiguous.append(f"  {path}: {source} as {several}")
            else:
                self._choose(fit, (usual if len(usual) == 1 else fit.ways)[0])

    def _choose(self, fit: Fit, way: Candidate) -> None:
        """Notes the rule of an array, and a row of the table for the first of each template."""
        link = fit.link
        template, path = link.tensors.template.text, link.path(fit.numbers)
        tensor = way.rule(path)
        by_numbers = self._rules.setdefault(template, {})
        row = template, link.arrays.template.text, tensor.dimensions
        is_new = row not in self._rows
        self._rows.add(row)
        for numbers in fit.sources:
            by_numbers.setdefault(numbers, []).append(tensor)
        if is_new:
            notes = [way.described(), link.note]
            if len(fit.ways) > 1:
                usual = "a kernel is (in, out)" if way.is_transposed else "it stays as it is"
                notes.insert(1, f"by convention, as {len(fit.ways)} ways fit: {usual}")
            shapes = link.tensors.shapes[fit.sources[0]], link.arrays.shapes[fit.numbers]
            self.matches.append(
                Match(template, path, *shapes, "; ".join(note for note in notes if note))
            )

    def _fits(self, link: Link, unusual: Collection[str]) -> Iterator[Fit]:
        """Yields the arrays of a link that have tensors, and all ways in which these fit."""
        for numbers, path in link.arrays.names.items():
            if not (sources := link.sources.get(numbers)):
                continue
            shapes = {link.tensors.shapes[source] for source in sources}
            by_order: dict[Order, Sequence[Candidate]] = {}
            for order in get_args(Order):
                if len(shapes) == 1:  # tensors of different shapes cannot be stacked
                    by_order[order] = candidates(
                        *shapes,
                        link.arrays.shapes[numbers],
                        order,
                        _convention(link, is_unusual=path in unusual),
                        link.stack(numbers),
                        link.share(numbers, sources[0]),
                    )
            yield Fit(link, numbers, sources, by_order)

    def problems(self, wanted: Collection[str]) -> dict[str, list[str]]:
        """Returns what has no rule, of arrays only those that are wanted."""
        spare = {
            name: (group, numbers)
            for group in self._tensors
            if not group.is_buffer
            for numbers, name in group.names.items()
            if name not in self._settled
        }
        sizes = {name: math.prod(x.shapes[numbers]) for name, (x, numbers) in spare.items()}
        missing = list[str]()
        for group in self._arrays:
            for numbers, path in group.names.items():
                if path in wanted and path not in self._settled:
                    shape = group.shapes[numbers]
                    alike = [name for name in sizes if sizes[name] == math.prod(shape)][:3]
                    hint = f"; of this size: {' or '.join(alike)}" if alike else ""
                    missing.append(f"  {path}, shape {shape}{hint}")
        return {
            "Arrays without a tensor": missing,
            "Tensors without an array": [self._spare(name, *x) for name, x in spare.items()],
            "Ambiguous": self._ambiguous,
            "Of another shape": self._misfits,
        }

    def _spare(self, name: str, group: Group, numbers: Numbers) -> str:
        """Describes a tensor without an array, with the one that took the array, if any."""
        for link in self._links:
            path = link.arrays.names.get(numbers)
            if path and link.arrays.template.role == group.template.role:
                others = [link.tensors.names[source] for source in link.sources.get(numbers, ())]
                return f"  {name}: {path} has {', '.join(others)}"
        return f"  {name}, shape {group.shapes[numbers]}"

    def rules(self) -> dict[str, Rule]:
        """Returns the rules of all tensors, in the order of the file."""
        rules: dict[str, Rule] = {}
        order = {group.template.text: i for i, group in enumerate(self._tensors)}
        for group in self._tensors:
            text = group.template.text
            if group.is_buffer and text not in self._rules:
                rules[_pattern(text)] = None
                continue
            of_group = self._rules[text]
            first = next(iter(of_group.values()))
            is_alike = all(tensors == first for tensors in of_group.values())
            for numbers, tensors in of_group.items():
                rule = [x.path if x.dimensions is None else x for x in tensors]
                pattern = _pattern(text, None if is_alike else numbers)
                rules[pattern] = rule[0] if len(rule) == 1 else rule
        self.matches.sort(key=lambda match: order[match.tensor])
        return rules


def _convention(link: Link, *, is_unusual: bool) -> Convention:
    """Returns what the names say of dimensions."""
    leaf, part = link.arrays.template.text.rpartition("/")[2], link.tensors.template.part
    order: Literal["in, out", "as the tensor"] | None = None
    if leaf == "embedding" or link.arrays.template.part in {"embed", "pos", "cls"}:
        order = "as the tensor"
    elif leaf == "kernel" and not is_unusual:
        order = "in, out"
    if part in {"q", "k", "v", "kv", "qkv", QKV_BY_HEAD}:
        return Convention(order, "out")
    return Convention(order, "in" if part == "o" else None)


def _agree_on_order(fits: Sequence[Fit]) -> None:
    """Takes the ways of (in, out) where only these fit, and where other matrices have this order.

    Square matrices do not show it, and those outside of layers say nothing of layers.
    """
    shown: dict[tuple[bool, int], set[Order]] = {}
    unclear = list[tuple[Fit, set[Order]]]()
    for fit in fits:
        tensor = fit.link.tensors.template
        rank = len(fit.link.tensors.shapes[fit.sources[0]])
        orders = shown.setdefault((tensor.in_layer, rank), set())
        own = fit.orders()
        if len(own) == 1:
            orders |= own
            fit.ways = [way for order in own for way in fit.by_order[order]]
        else:
            unclear.append((fit, orders))
    for fit, others in unclear:
        words = fit.link.tensors.template.words[-1]
        # Without others, layers of GPT-2 and of its heirs may have either.
        orders = others or ({*get_args(Order)} if words.startswith("c_") else {"out in"})
        ways = {way.operation: way for order in orders for way in fit.by_order[order]}
        usual = {way.operation for order in orders for way in fit.by_order[order] if way.is_usual}
        fit.ways = [way._replace(is_usual=name in usual) for name, way in ways.items()]


def _agree_on_stacks(fits: Sequence[Fit]) -> None:
    """Removes ways in which an array has its layers in another dimension than all others."""
    for counted in dict.fromkeys(x for fit in fits for x in fit.link.stacked):
        own = [fit for fit in fits if counted in fit.link.stacked and fit.ways]

        def place(fit: Fit, way: Candidate, counted: str = counted) -> int:
            return way.stacked_at[fit.link.stacked.index(counted)]

        possible = [{place(fit, way) for way in fit.ways} for fit in own]
        common = set.intersection(*possible) if possible else set()
        for fit in own if common else ():
            fit.ways = [way for way in fit.ways if place(fit, way) in common]


def _pattern(text: str, numbers: Numbers | None = None) -> str:
    """Returns the pattern of a template, with a group for each number: any, if none are given."""
    first, *parts = map(re.escape, text.split("{}"))
    groups = [r"(\d+)"] * len(parts) if numbers is None else [f"({x})" for x in numbers]
    return first + "".join(a + b for a, b in zip(groups, parts, strict=True))
