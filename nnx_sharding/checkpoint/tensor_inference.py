r"""``match_tensors``: rules for a file that nobody has described, or an error that says why not.

    names of tensors ─┐ tensor_links: which mean     ┌─ shapes, tensor_candidates:
    paths of arrays ──┘ the same                ────►│  in which ways they fit      ────► rules

Names alone decide what belongs together, and shapes alone how. Nothing is chosen among several
*ways* that fit, with four exceptions, each of which the rules mention:

- A square matrix fits in two ways. An array that is called ``kernel`` is (in, out), as all of Flax
  are, and ``embedding`` is as PyTorch has it. Matrices of a file are (out, in), unless those that
  are not square show the other order.
- All arrays of stacked layers have these in the same dimension.
- Tensors called ``query_key_value`` have the parts of each head together, others all heads of each.
- In a file without a tensor for the head, the embedding is the head.

What a file cannot show is not seen here: the order of rotary dimensions within heads, a norm that
adds 1 to its scale, or which of two halves an activation is applied to. The model has to be as the
file's, or the rules have to be edited.

From other modules:

    Group      tensors, or arrays, whose names have one ``template`` and differ in their *numbers*,
               such as of layers: ``names`` and ``shapes`` by numbers
    Link       a group of tensors that fill a group of arrays. ``sources`` are the numbers of the
               tensors that fill an array, by the numbers of the array
    Candidate  one way in which a tensor can fill an array; ``is_usual`` if it is the convention
    Order      of the matrices in a file: "out in" or "in out"
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from flax import nnx

from .. import _compat
from ..core.flatten import flatten
from ..errors import CheckpointError, by_kind, raise_listed
from . import names, tensor_files
from .safetensors import WEIGHTS, selected_weights
from .tensor_candidates import Candidate, Convention, Order, Shape, candidates
from .tensor_links import Group, Link, Links, Numbers, grouped
from .tensor_matching import fill_by_rules
from .tensor_names import QKV_BY_HEAD
from .tensor_rules import Rule, Tensor, read_rules
from .tensor_table import Match, TensorRules, loaded_rules

_MATCH = "match_tensors"

# Tensors next to quantised weights, of which these are no use alone.
_OF_QUANTISED = re.compile(
    r".*(weight_scale(_inv)?|qweight|qzeros|g_idx|SCB|absmax|quant_map|_(blocks|scales))"
)


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
    arrays = selected_weights(_MATCH, everything, only)
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
        taken = {target.path for name in tensors for target in known.targets(name) or ()}
        # Tensors of arrays that `only` leaves out have rules, too.
        to_match = selected_weights(_MATCH, everything, WEIGHTS) | arrays
        # An Einsum has text for the order of its dimensions, so its kernel may have any.
        einsums = {id(x.kernel) for x in flat.objects if isinstance(x, nnx.Einsum)}
        matching = _Matching(
            {name: tensors[name].shape for name in sorted(tensors) if known.targets(name) is None},
            {path: array.leaf.shape for path, array in to_match.items() if path not in taken},
            in_any_order={path for path, x in to_match.items() if id(x.variable) in einsums},
        )
        problems = by_kind(matching.problems({*arrays}))
        remedy = "Say what is not inferred by rules={pattern: path, Tensor or None}."
        missing = [arrays[path] for path in matching.without_tensor({*arrays})]
        kinds = [type(array.variable) for array in missing]
        if any(issubclass(x, nnx.Variable) and not issubclass(x, nnx.Param) for x in kinds):
            remedy += (
                " Caches and other Variables that are no parameters are left out by only=nnx.Param,"
                " here and in load_safetensors."
            )
        if any(_OF_QUANTISED.fullmatch(name) for name in tensors):
            remedy = "The file is quantised, but only numbers without scales can be loaded."
        raise_listed(CheckpointError, head, problems, remedy)
        result = TensorRules({**given, **matching.rules()}, matching.matches)
        # Rules are believed only if they fill each array completely, and once.
        leaves = {name: array.leaf for name, array in arrays.items()}
        paths = {array.path for array in everything}
        fill_by_rules(head, read_rules(_MATCH, result), tensors, leaves, paths, cast=True)
    return result


@dataclasses.dataclass
class _Fit:
    """One array of a link, the tensors that fill it, and the ways in which they may.

    Attributes:
      link: the link.
      numbers: those of the array.
      sources: the numbers of the tensors.
      by_order: all ways, if matrices of the file are in this order.
      ways: those that are possible next to other arrays (`_agree_on_order`, `_agree_on_stacks`).
    """

    link: Link
    numbers: Numbers
    sources: list[Numbers]
    by_order: Mapping[Order, Sequence[Candidate]]
    ways: Sequence[Candidate] = ()

    @property
    def path(self) -> str:
        """The path of the array."""
        return self.link.arrays.names[self.numbers]

    @property
    def tensor_names(self) -> list[str]:
        """The names of the tensors."""
        return [self.link.tensors.names[source] for source in self.sources]

    @property
    def tensor_shape(self) -> Shape:
        """The shape of the first tensor."""
        return self.link.tensors.shapes[self.sources[0]]

    @property
    def array_shape(self) -> Shape:
        """The shape of the array."""
        return self.link.arrays.shapes[self.numbers]

    def orders(self) -> set[Order]:
        """Returns the orders in which it fits; of those only the usual ones, if there are any."""
        fitting = {order for order, ways in self.by_order.items() if ways}
        usual = {order for order in fitting if any(x.is_usual for x in self.by_order[order])}
        return usual or fitting

    def chosen_way(self) -> Candidate | None:
        """Returns the only way, or the only usual one of several; None if it is ambiguous."""
        usual = [way for way in self.ways if way.is_usual]
        possible = usual if len(usual) == 1 else self.ways
        return possible[0] if len(possible) == 1 else None


class _Matching:
    """Matches tensors and arrays by names, then by shapes, and collects what of both failed.

    Args:
      tensors: the shapes of tensors, by name.
      arrays: the shapes of arrays, by path.
      in_any_order: the paths of kernels whose dimensions may be in any order.
    """

    def __init__(
        self,
        tensors: Mapping[str, Shape],
        arrays: Mapping[str, Shape],
        in_any_order: Collection[str],
    ):
        self._tensors, self._arrays = grouped(tensors), grouped(arrays)
        self._in_any_order = in_any_order
        # By the template of tensors, then by their numbers: what they fill.
        self._rules: dict[str, dict[Numbers, list[Tensor]]] = {}
        self._ambiguous, self._misfits = list[str](), list[str]()  # lines of the error
        self._settled: set[str] = set()  # names and paths that have a rule, or another problem
        self._table_keys: set[tuple[str | None, ...]] = set()  # of what has a row in the table
        self.matches: list[Match] = []
        links = Links(self._tensors, self._arrays)
        self._links = links.links
        self._note_ambiguous_names(links)
        self._choose_ways()

    def _note_ambiguous_names(self, links: Links) -> None:
        """Notes arrays that several groups of tensors may fill, by their names."""
        for array in {x.arrays.template.text: x.arrays for x in links.ambiguous}.values():
            rivals = [pair.tensors for pair in links.ambiguous if pair.arrays is array]
            for numbers, path in array.names.items():
                several = " or ".join(x.names.get(numbers, x.template.text) for x in rivals)
                self._ambiguous.append(f"  {path}: {several}")
            self._settled |= {*array.names.values()}
            self._settled |= {name for rival in rivals for name in rival.names.values()}

    def _choose_ways(self) -> None:
        """Decides by shapes how tensors fill arrays, or notes why that is not possible."""
        fits = [fit for link in self._links for fit in self._fits(link)]
        _agree_on_order(fits)
        _agree_on_stacks(fits)
        for fit in fits:
            source = fit.tensor_names[0]
            self._settled |= {fit.path, *fit.tensor_names}
            way = fit.chosen_way()
            if way is not None:
                self._add_rule(fit, way)
            elif fit.ways:
                several = " or ".join(repr(way.tensor.dimensions) for way in fit.ways)
                self._ambiguous.append(f"  {fit.path}: {source} as {several}")
            else:
                several = f" of {len(fit.sources)}" if len(fit.sources) > 1 else ""
                line = f"  {source}, shape {fit.tensor_shape}{several}: "
                line += f"{fit.path}, shape {fit.array_shape}"
                if fit.link.parts and fit.link.tensors.template.part == QKV_BY_HEAD:
                    line += '; an array without heads needs "(h p d) in -> in (h d)", h=…, p=3'
                self._misfits.append(line)

    def _fits(self, link: Link) -> Iterator[_Fit]:
        """Yields the arrays of a link that have tensors, and all ways in which these fit."""
        for numbers, path in link.arrays.names.items():
            sources = link.sources.get(numbers)
            if not sources:
                continue
            shapes = {link.tensors.shapes[source] for source in sources}
            by_order: dict[Order, Sequence[Candidate]] = {}
            for order in get_args(Order):
                if len(shapes) == 1:  # tensors of different shapes cannot be stacked
                    [shape] = shapes
                    by_order[order] = candidates(
                        shape,
                        link.arrays.shapes[numbers],
                        order,
                        _convention(link, in_any_order=path in self._in_any_order),
                        stacks=link.stacks_of(numbers),
                        fused=link.fused_part(numbers, sources[0]),
                    )
            yield _Fit(link, numbers, sources, by_order)

    def _add_rule(self, fit: _Fit, way: Candidate) -> None:
        """Adds the rule of an array, and a row of the table for the first of its template."""
        link = fit.link
        template, path = link.tensors.template.text, link.path(fit.numbers)
        tensor = way.rule(path)
        by_numbers = self._rules.setdefault(template, {})
        for numbers in fit.sources:
            by_numbers.setdefault(numbers, []).append(tensor)
        key = template, link.arrays.template.text, tensor.dimensions
        if key in self._table_keys:
            return
        self._table_keys.add(key)
        notes = [way.described(), link.note]
        if len(fit.ways) > 1:
            usual = "a kernel is (in, out)" if way.is_transposed else "it stays as it is"
            notes.insert(1, f"by convention, as {len(fit.ways)} ways fit: {usual}")
        note = "; ".join(filter(None, notes))
        self.matches.append(Match(template, path, fit.tensor_shape, fit.array_shape, note))

    def without_tensor(self, wanted: Collection[str]) -> dict[str, Shape]:
        """Returns the shapes of the wanted arrays that have no rule, by path."""
        return {
            path: group.shapes[numbers]
            for group in self._arrays
            for numbers, path in group.names.items()
            if path in wanted and path not in self._settled
        }

    def problems(self, wanted: Collection[str]) -> dict[str, list[str]]:
        """Returns what has no rule, as lines of an error by the kind of the problem.

        Of arrays, only those whose paths are ``wanted`` count.
        """
        spare: dict[str, str] = {}  # name of a tensor without an array → its line
        sizes: dict[str, int] = {}  # the numbers of elements of these tensors
        for group in self._tensors:
            for numbers, name in group.names.items():
                if name not in self._settled and not group.is_buffer:
                    spare[name] = self._spare_tensor(name, group, numbers)
                    sizes[name] = math.prod(group.shapes[numbers])
        missing: list[str] = []
        for path, shape in self.without_tensor(wanted).items():
            alike = [name for name in sizes if sizes[name] == math.prod(shape)][:3]
            hint = f"; of this size: {' or '.join(alike)}" if alike else ""
            missing.append(f"  {path}, shape {shape}{hint}")
        return {
            "Arrays without a tensor": missing,
            "Tensors without an array": [*spare.values()],
            "Ambiguous": self._ambiguous,
            "Of another shape": self._misfits,
        }

    def _spare_tensor(self, name: str, group: Group, numbers: Numbers) -> str:
        """Writes the line of a tensor without an array, with the one that took the array, if any.

        ``numbers`` are those of its name, which has the template of ``group``.
        """
        for link in self._links:
            path = link.arrays.names.get(numbers)
            if path and link.arrays.template.role == group.template.role:
                others = [link.tensors.names[source] for source in link.sources.get(numbers, ())]
                return f"  {name}: {path} has {', '.join(others)}"
        return f"  {name}, shape {group.shapes[numbers]}"

    def rules(self) -> dict[str, Rule]:
        """Returns the rules of all tensors, in the order of the file; sorts the table likewise.

        A template has one rule, unless its tensors differ in more than their numbers.
        """
        rules: dict[str, Rule] = {}
        for group in self._tensors:
            template = group.template.text
            if group.is_buffer and template not in self._rules:
                rules[_pattern(template)] = None  # nothing has to be filled with it
                continue
            by_numbers = self._rules[template]
            first = next(iter(by_numbers.values()))
            is_alike = all(tensors == first for tensors in by_numbers.values())
            for numbers, tensors in by_numbers.items():
                rule = [x.path if x.dimensions is None else x for x in tensors]
                pattern = _pattern(template, None if is_alike else numbers)
                rules[pattern] = rule[0] if len(rule) == 1 else rule
        order = {group.template.text: index for index, group in enumerate(self._tensors)}
        self.matches.sort(key=lambda match: order[match.tensor])
        return rules


def _convention(link: Link, *, in_any_order: bool) -> Convention:
    """Returns what names say of the dimensions of an array and its tensor.

    ``in_any_order`` says that the kernel is one of those whose dimensions may be in any order.
    """
    leaf, part = link.arrays.template.text.rpartition("/")[2], link.tensors.template.part
    order: Literal["in, out", "as the tensor"] | None = None
    if leaf == "embedding" or link.arrays.template.part in {"embed", "pos", "cls"}:
        order = "as the tensor"
    elif leaf == "kernel" and not in_any_order:
        order = "in, out"
    if part in {"q", "k", "v", "kv", "qkv", QKV_BY_HEAD}:
        return Convention(order, heads="out")  # these projections return heads
    return Convention(order, heads="in" if part == "o" else None)  # this one takes them


def _agree_on_order(fits: Sequence[_Fit]) -> None:
    """Sets the ways of arrays to those for the order of matrices that other arrays show.

    Square matrices do not show it, and those outside of layers say nothing of layers.
    """
    # Whether tensors are in layers, and their rank → the orders that these show.
    shown: dict[tuple[bool, int], set[Order]] = {}
    unclear: list[tuple[_Fit, set[Order]]] = []  # each with the orders that others like it show
    for fit in fits:
        key = fit.link.tensors.template.in_layer, len(fit.tensor_shape)
        shown_by_others = shown.setdefault(key, set())
        own = fit.orders()
        if len(own) == 1:
            shown_by_others |= own
            fit.ways = [way for order in own for way in fit.by_order[order]]
        else:
            unclear.append((fit, shown_by_others))  # the set will have those of later ones, too
    for fit, shown_by_others in unclear:
        word = fit.link.tensors.template.words[-1]
        # Without others, layers of GPT-2 and of its heirs may have either.
        default: set[Order] = {"out in", "in out"} if word.startswith("c_") else {"out in"}
        orders = [order for order in get_args(Order) if order in (shown_by_others or default)]
        ways = {way.operation: way for order in orders for way in fit.by_order[order]}
        usual = {way.operation for order in orders for way in fit.by_order[order] if way.is_usual}
        fit.ways = [way._replace(is_usual=name in usual) for name, way in ways.items()]


def _agree_on_stacks(fits: Sequence[_Fit]) -> None:
    """Removes ways in which an array has its layers in another dimension than all others."""
    for counter in dict.fromkeys(counter for fit in fits for counter in fit.link.stacked):
        # Index of the fit → the dimension of the stack in each of its ways.
        dimensions_of = {
            index: [way.stacked_at[fit.link.stacked.index(counter)] for way in fit.ways]
            for index, fit in enumerate(fits)
            if counter in fit.link.stacked and fit.ways
        }
        common = set.intersection(*map(set, dimensions_of.values())) if dimensions_of else set()
        for index, dimensions in dimensions_of.items() if common else ():
            pairs = zip(fits[index].ways, dimensions, strict=True)
            fits[index].ways = [way for way, dimension in pairs if dimension in common]


def _pattern(template: str, numbers: Numbers | None = None) -> str:
    r"""Returns the regular expression for the names of a template, with a group for each number.

    Without ``numbers``, the groups match any. ``h.{}.up`` becomes ``h\.(\d+)\.up``.
    """
    first, *rest = map(re.escape, template.split("{}"))
    groups = [r"(\d+)"] * len(rest) if numbers is None else [f"({number})" for number in numbers]
    return first + "".join(group + text for group, text in zip(groups, rest, strict=True))
