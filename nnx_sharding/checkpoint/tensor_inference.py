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

    Template   what names have in common that differ in their *numbers* only: its ``text`` is
               "h.{}.q.weight", what each number counts are its ``counters`` ("layer"), and its
               ``part`` is "q", whatever the name calls that
    Group      the tensors, or arrays, of one template: ``names`` and ``shapes`` by numbers, such as
               {(0,): "h.0.q.weight", (1,): "h.1.q.weight"}
    Link       a group of tensors that fill a group of arrays. ``sources`` are the numbers of the
               tensors that fill an array, by the numbers of the array. Counters that only tensors
               have are ``stacked``: dimensions of the array
    Candidate  one way in which a tensor can fill an array; ``is_usual`` if it is the convention
    Order      of the matrices in a file: "out in" or "in out"
"""

from __future__ import annotations

import dataclasses
import itertools
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
from .tensor_candidates import Candidate, Convention, Order, Shape, candidates, distinct
from .tensor_links import Group, Link, Links, Numbers, grouped
from .tensor_matching import fill_by_rules
from .tensor_names import QKV_BY_HEAD
from .tensor_rules import Rule, Tensor, read_rules
from .tensor_table import Match, TensorRules, loaded_rules

_MATCH = "match_tensors"

# Names of the tensors that a quantised weight needs beside it, such as its scales.
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
        # 1. Leave out the tensors that have a rule already, and the arrays that these fill.
        known_targets = {name: known.targets(name) for name in tensors}  # None without a rule
        filled = {target.path for targets in known_targets.values() for target in targets or ()}
        unknown = {name: x for name, x in tensors.items() if known_targets[name] is None}
        unread = [f"  {name}: {x.dtype}" for name, x in unknown.items() if isinstance(x.dtype, str)]
        raise_listed(CheckpointError, f"{head}\nOf a dtype that JAX does not have:", unread)

        # 2. Match the rest. Arrays that `only` leaves out count, as their tensors need rules, too.
        to_fill = selected_weights(_MATCH, everything, WEIGHTS) | arrays
        shapes = {path: x.leaf.shape for path, x in to_fill.items() if path not in filled}
        braces = [f"  {name}" for name in (*unknown, *shapes) if {"{", "}"} & {*name}]
        hint = "Say what becomes of them by rules=..., with {{ and }} for the braces of a path."
        raise_listed(CheckpointError, f"{head}\nNames with braces have no rules:", braces, hint)
        # An Einsum has text for the order of its dimensions, so its kernel may have any.
        einsums = {id(x.kernel) for x in flat.objects if isinstance(x, nnx.Einsum)}
        matching = _Matching(
            {name: unknown[name].shape for name in sorted(unknown)},
            shapes,
            in_any_order={path for path, x in to_fill.items() if id(x.variable) in einsums},
        )

        # 3. Refuse what has no match, or several.
        problems = by_kind(matching.problems({*arrays}))
        remedy = "Say what is not inferred by rules={pattern: path, Tensor or None}."
        unmatched = [type(arrays[path].variable) for path in matching.unmatched_arrays({*arrays})]
        if any(issubclass(x, nnx.Variable) and not issubclass(x, nnx.Param) for x in unmatched):
            remedy += (
                " Caches and other Variables that are no parameters are left out by only=nnx.Param,"
                " here and in load_safetensors."
            )
        if any(_OF_QUANTISED.fullmatch(name) for name in tensors):  # rules would not help
            remedy = "The file is quantised, but only numbers without scales can be loaded."
        raise_listed(CheckpointError, head, problems, remedy)

        # 4. Believe the rules only if they fill each array completely, and once.
        result = TensorRules({**given, **matching.rules()}, matching.matches)
        leaves = {name: array.leaf for name, array in arrays.items()}
        paths = {array.path for array in everything}
        fill_by_rules(head, read_rules(_MATCH, result), tensors, leaves, paths, cast=True)
    return result


@dataclasses.dataclass
class _Fit:
    """One array of a link, the tensors that fill it, and the ways in which they may.

    Attributes:
      link: the tensors and arrays that belong together; this is about one of the arrays.
      numbers: the numbers of the array.
      sources: the numbers of the tensors that fill it: several if they are stacked in the array.
      by_order: for each order that matrices of the file may have, all ways in which they fit; empty
        for stacked tensors of different shapes.
      ways: the ways that are left after `_agree_on_order` and `_agree_on_stacks`; none before.
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
        """The shape of the first tensor, which is that of all if any way fits."""
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

    def dimension_of(self, counter: str, way: Candidate) -> int:
        """Returns which dimension of the array a stacked counter is if it is filled in this way."""
        return way.stacked_at[self.link.stacked.index(counter)]

    def chosen_way(self) -> Candidate | None:
        """Returns the only way, or the only usual one of several; None if it is ambiguous."""
        usual = [way for way in self.ways if way.is_usual]
        possible = usual if len(usual) == 1 else self.ways
        return possible[0] if len(possible) == 1 else None


class _Matching:
    """Matches tensors and arrays by names, then by shapes, when it is made.

    Then ``rules`` has what matched, and ``problems`` what did not.

    Args:
      tensors: the shapes of tensors, by name.
      arrays: the shapes of arrays, by path.
      in_any_order: the paths of kernels whose dimensions may be in any order.

    Attributes:
      matches: the rows of the table of rules.
    """

    def __init__(
        self,
        tensors: Mapping[str, Shape],
        arrays: Mapping[str, Shape],
        in_any_order: Collection[str],
    ):
        self._tensors, self._arrays = grouped(tensors), grouped(arrays)
        # The template of tensors → their numbers → the paths of the arrays that each fills, with
        # the rules for these.
        self._rules: dict[str, dict[Numbers, dict[str, Tensor]]] = {}
        self._ambiguous, self._misfits = list[str](), list[str]()  # lines of the error
        # The names of tensors and the paths of arrays that are in a rule, or in one of these lines.
        self._settled: set[str] = set()
        # The templates of tensors and of arrays, and the dimensions, that have a row in `matches`.
        self._keys_of_matches: set[tuple[str, str, str | None]] = set()
        self.matches: list[Match] = []
        # Names decide what belongs together, and then shapes how.
        links = Links(self._tensors, self._arrays)
        self._links = links.links
        self._note_ambiguous_names(links)
        self._choose_ways(in_any_order)

    def _note_ambiguous_names(self, links: Links) -> None:
        """Adds lines for arrays that several groups of tensors may fill, by their names."""
        # An array's group is in `ambiguous` once for each group of tensors that may fill it.
        rivals_of: dict[str, list[Group]] = {}  # by the template of the arrays
        arrays_of: dict[str, Group] = {}
        for tensors, arrays in links.ambiguous:
            arrays_of[arrays.template.text] = arrays
            rivals_of.setdefault(arrays.template.text, []).append(tensors)
        for template, arrays in arrays_of.items():
            rivals = rivals_of[template]
            for numbers, path in arrays.names.items():
                # If tensors and arrays are not numbered alike, the template says which are meant.
                possible = [rival.names.get(numbers, rival.template.text) for rival in rivals]
                self._ambiguous.append(f"  {path}: {' or '.join(possible)}")
            for group in (arrays, *rivals):
                self._settled |= {*group.names.values()}

    def _choose_ways(self, in_any_order: Collection[str]) -> None:
        """Adds a rule for each array of a link, or a line that says why shapes allow none."""
        fits = [fit for link in self._links for fit in _fits(link, in_any_order)]
        _agree_on_order(fits)
        _agree_on_stacks(fits)
        for fit in fits:
            source = fit.tensor_names[0]
            self._settled |= {fit.path, *fit.tensor_names}
            way = fit.chosen_way()
            if way is not None:
                self._add_rule(fit, way)
            elif fit.ways:
                possible = " or ".join(repr(way.tensor.dimensions) for way in fit.ways)
                self._ambiguous.append(f"  {fit.path}: {source} as {possible}")
            else:
                count = f" of {len(fit.sources)}" if len(fit.sources) > 1 else ""  # if stacked
                line = f"  {source}, shape {fit.tensor_shape}{count}: "
                line += f"{fit.path}, shape {fit.array_shape}"
                # Queries, say, that are in turns with keys and values in the rows of each head. If
                # the array has no dimension for heads, shapes do not tell how many there are.
                if fit.link.parts and fit.link.tensors.template.part == QKV_BY_HEAD:
                    line += '; an array without heads needs "(h p d) in -> in (h d)", h=…, p=3'
                self._misfits.append(line)

    def _add_rule(self, fit: _Fit, way: Candidate) -> None:
        """Adds the rule of an array, and a row of the table for the first of its template."""
        link = fit.link
        template, path = link.tensors.template.text, link.path(fit.numbers)
        tensor = way.rule(path)
        # A fused tensor fills several arrays, so it is in several links.
        by_numbers = self._rules.setdefault(template, {})
        for numbers in fit.sources:
            by_numbers.setdefault(numbers, {})[fit.path] = tensor
        key = template, link.arrays.template.text, tensor.dimensions
        if key in self._keys_of_matches:
            return
        self._keys_of_matches.add(key)
        convention = ""
        if len(fit.ways) > 1:
            # One was usual: (in, out) for a kernel. Either this transposed the matrix, or the file
            # has the order already. An embedding, too, stays as it is.
            usual = "a kernel is (in, out)" if way.is_transposed else "it stays as it is"
            convention = f"by convention, as {len(fit.ways)} ways fit: {usual}"
        note = "; ".join(filter(None, [way.described(), convention, link.note]))
        self.matches.append(Match(template, path, fit.tensor_shape, fit.array_shape, note))

    def unmatched_arrays(self, wanted: Collection[str]) -> dict[str, Shape]:
        """Returns the shapes of the arrays that no tensor may fill, by path.

        Only arrays whose paths are ``wanted`` count. Those with several tensors, or with a tensor
        of another shape, are other problems.
        """
        return {
            path: group.shapes[numbers]
            for group in self._arrays
            for numbers, path in group.names.items()
            if path in wanted and path not in self._settled
        }

    def problems(self, wanted: Collection[str]) -> dict[str, list[str]]:
        """Returns what has no rule, as lines of an error by the kind of the problem.

        Args:
          wanted: the paths of the arrays that the user selects. If others have no tensor, that is
            no problem.
        """
        # Tensors that fill nothing. Models may do without buffers, such as masks.
        unmatched_tensors: list[str] = []
        names_by_size: dict[int, list[str]] = {}  # the number of elements → the names of these
        for group in self._tensors:
            for numbers, name in group.names.items():
                if name not in self._settled and not group.is_buffer:
                    unmatched_tensors.append(self._line_of_unmatched(name, group, numbers))
                    size = math.prod(group.shapes[numbers])
                    names_by_size.setdefault(size, []).append(name)
        # Arrays that nothing fills, with up to three tensors that might.
        unmatched_arrays: list[str] = []
        for path, shape in self.unmatched_arrays(wanted).items():
            alike = names_by_size.get(math.prod(shape), [])[:3]
            hint = f"; of this size: {' or '.join(alike)}" if alike else ""
            unmatched_arrays.append(f"  {path}, shape {shape}{hint}")
        return {
            "Arrays without a tensor": unmatched_arrays,
            "Tensors without an array": unmatched_tensors,
            "Ambiguous": self._ambiguous,
            "Of another shape": self._misfits,
        }

    def _line_of_unmatched(self, name: str, group: Group, numbers: Numbers) -> str:
        """Writes the line of a tensor that fills no array, and says which one fills that instead.

        Args:
          name: the name of the tensor.
          group: the group that it is in.
          numbers: its numbers, such as that of the layer.
        """
        for link in self._links:
            # An array in the same layer with the same role: the part, such as "q", and the kind,
            # such as "weight". If arrays count layers otherwise, the hint is left out.
            path = link.arrays.names.get(numbers)
            if path and link.arrays.template.role == group.template.role:
                others = [link.tensors.names[source] for source in link.sources.get(numbers, ())]
                return f"  {name}: {path} has {', '.join(others)}"
        return f"  {name}, shape {group.shapes[numbers]}"

    def rules(self) -> dict[str, Rule]:
        r"""Returns the rules of all tensors, in the order of the file; sorts the table likewise.

        If all tensors of a template have the same rule, its pattern is ``h\.(\d+)\.up``. If layers
        differ, as in every fourth one, each has a rule of its own, such as ``h\.3\.up``. So have
        names with numbers such as 03, which {0} would not write again.
        """
        rules: dict[str, Rule] = {}
        for group in self._tensors:
            template = group.template.text
            # PyTorch stores some tensors that are no weights; their rule None ignores them.
            if group.is_buffer and template not in self._rules:
                rules[_pattern(template)] = None
                continue
            by_numbers = self._rules[template]
            first, *others = ([*by_path.values()] for by_path in by_numbers.values())
            has_zeros = any(re.search(r"\b0[0-9]", name) for name in group.names.values())
            if all(tensors == first for tensors in others) and not has_zeros:
                rules[_pattern(template)] = _rule(first)
                continue
            for numbers, by_path in by_numbers.items():
                tensors = [_without_groups(*item, numbers) for item in by_path.items()]
                rules[re.escape(group.names[numbers])] = _rule(tensors)
        order = {group.template.text: index for index, group in enumerate(self._tensors)}
        self.matches.sort(key=lambda match: order[match.tensor])
        return rules


def _rule(tensors: Sequence[Tensor]) -> Rule:
    """Writes a rule as users do: a path if nothing is rearranged, and a list of several arrays."""
    entries = [tensor.path if tensor.dimensions is None else tensor for tensor in tensors]
    return entries[0] if len(entries) == 1 else entries


def _fits(link: Link, in_any_order: Collection[str]) -> Iterator[_Fit]:
    """Yields the arrays of a link that have tensors, each with all ways in which these fit.

    ``in_any_order`` are the paths of kernels whose dimensions may be in any order.
    """
    for numbers, path in link.arrays.names.items():
        sources = link.sources.get(numbers)
        if not sources:
            continue
        by_order: dict[Order, Sequence[Candidate]] = {}
        shapes = {link.tensors.shapes[source] for source in sources}
        if len(shapes) == 1:  # tensors of different shapes cannot be stacked: no way fits
            [shape] = shapes
            for order in get_args(Order):
                by_order[order] = candidates(
                    shape,
                    link.arrays.shapes[numbers],
                    order,
                    _convention(link, in_any_order=path in in_any_order),
                    stacks=link.stacks_of(numbers),
                    fused=link.fused_part(numbers, sources[0]),  # layers of a stack are alike
                )
        yield _Fit(link, numbers, sources, by_order)


def _convention(link: Link, *, in_any_order: bool) -> Convention:
    """Returns what names say of the dimensions of an array and its tensor.

    ``in_any_order`` says that the kernel is one of those whose dimensions may be in any order.
    """
    arrays, tensors = link.arrays.template, link.tensors.template
    leaf = arrays.text.rpartition("/")[2]  # "kernel" of "blocks/{}/up/kernel"
    order: Literal["in, out", "as the tensor"] | None = None
    # Tables of tokens, of positions and of the class token have the order (number, features) in
    # Flax and PyTorch alike.
    if leaf == "embedding" or arrays.part in {"embed", "pos", "cls"}:
        order = "as the tensor"
    elif leaf == "kernel" and not in_any_order:
        order = "in, out"
    heads: Literal["in", "out"] | None = None
    if tensors.part in {"q", "k", "v", "kv", "qkv", QKV_BY_HEAD}:
        heads = "out"  # these projections return heads
    elif tensors.part == "o":
        heads = "in"  # the output projection of attention takes them
    return Convention(order, heads)


def _agree_on_order(fits: Sequence[_Fit]) -> None:
    """Sets the ways of each array to those for the order of matrices that the file has.

    Matrices that are not square show the order. Those outside of layers say nothing of layers, and
    those of another rank nothing either.
    """
    # Whether tensors are in layers, and their rank → the orders that these show.
    shown: dict[tuple[bool, int], set[Order]] = {}
    unclear: list[tuple[_Fit, set[Order]]] = []  # each with the set of those like it in `shown`
    for fit in fits:
        key = fit.link.tensors.template.in_layer, len(fit.tensor_shape)
        shown_alike = shown.setdefault(key, set())
        own = fit.orders()
        if len(own) == 1:
            shown_alike |= own  # also in the pairs of `unclear`, which hold the same set
            [order] = own
            fit.ways = fit.by_order[order]
        else:
            unclear.append((fit, shown_alike))
    for fit, shown_alike in unclear:
        orders = shown_alike
        if not orders:
            # PyTorch has (out, in), but GPT-2 has (in, out) under names such as c_attn. Models that
            # copied these names may have either.
            word = fit.link.tensors.template.words[-1]
            orders = {"out in", "in out"} if word.startswith("c_") else {"out in"}
        # Two orders may offer the same way. A set has no order, but messages list the ways in one.
        both = (fit.by_order.get(order, ()) for order in get_args(Order) if order in orders)
        fit.ways = distinct(itertools.chain.from_iterable(both))


def _agree_on_stacks(fits: Sequence[_Fit]) -> None:
    """Removes ways in which an array has its layers in another dimension than all others.

    If no dimension is possible for all arrays, every way stays.
    """
    # What arrays have as a dimension and tensors count in their names, such as "layer".
    for counter in dict.fromkeys(counter for fit in fits for counter in fit.link.stacked):
        stacked_fits = [fit for fit in fits if counter in fit.link.stacked and fit.ways]
        possible = [{fit.dimension_of(counter, way) for way in fit.ways} for fit in stacked_fits]
        common = set.intersection(*possible) if possible else set()
        if common:
            for fit in stacked_fits:
                fit.ways = [way for way in fit.ways if fit.dimension_of(counter, way) in common]


def _pattern(template: str) -> str:
    r"""Returns the pattern of the names of a template: ``h\.(\d+)\.up`` of ``h.{}.up``."""
    return r"(\d+)".join(map(re.escape, template.split("{}")))


def _without_groups(path: str, tensor: Tensor, numbers: Numbers) -> Tensor:
    """Returns the rule of one tensor and one array, with its numbers in place of ``{0}``, …."""
    dimensions, put = tensor.dimensions, {**tensor.put}
    for i, number in enumerate(numbers):
        if dimensions and f"{{{i}}}" in dimensions:  # the array has what this number counts
            dimensions = dimensions.replace(f"{{{i}}}", f"stack{i}")
            put[f"stack{i}"] = number
    return Tensor(path, dimensions, take=tensor.take, put=put, **tensor.sizes)
