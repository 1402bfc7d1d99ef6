r"""``match_tensors`` infers the rules for a file, or raises an error that says why it cannot.

    names of tensors ─┐ tensor_links: the names      ┌─ shapes, tensor_candidates:
    paths of arrays ──┘ that mean the same      ────►│  the ways in which they fit  ────► rules

Names alone decide which tensors and arrays belong together, and shapes alone decide how. If several
*ways* fit, none is chosen, with four exceptions, each of which the rules mention:

- A square matrix fits in two ways. An array that is called ``kernel`` is (in, out), like all
  kernels of Flax, and an ``embedding`` is like PyTorch's. Matrices of a file are (out, in), unless
  matrices that are not square show the other order.
- All arrays of stacked layers have the layers in the same dimension.
- A tensor called ``query_key_value`` has the parts of each head together. Other fused tensors have
  all heads of each part together.
- In a file without a tensor for the head, the embedding is the head.

Some facts cannot be seen in a file: the order of rotary dimensions within heads, a norm that adds 1
to its scale, or the half to which an activation is applied. The model has to do the same as the
file's model, or the rules have to be edited.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from flax import nnx

from .. import _compat
from ..core.flatten import flatten
from ..errors import CheckpointError, by_kind, raise_if_any
from . import names, tensor_files
from .safetensors import WEIGHTS, selected_weights
from .tensor_candidates import Candidate, Convention, Order, Shape, candidates, distinct
from .tensor_links import Group, Link, Links, Numbers, grouped
from .tensor_matching import fill_by_rules
from .tensor_names import QKV_BY_HEAD, read_name
from .tensor_rules import Rule, Tensor, read_rules
from .tensor_table import (
    GIVEN,
    Match,
    MatchTable,
    TensorRules,
    loaded_rules,
    matches_by_rules,
    rule_text,
)

_MATCH = "match_tensors"

# Names of tensors that belong to a quantised weight, such as its scales.
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

    It knows the names of Hugging Face, the names of Meta, and the usual names in Flax. Weights may
    be transposed, split into heads, fused (``qkv``, ``gate_up``) on either side, or stacked in any
    dimension, and the embedding may be the head as well. If there are several possibilities, none
    is taken, except for square kernels, which are (in, out), and the rules say so. Only headers are
    read.

    Rules say where numbers go, not what they mean. If the model orders rotary dimensions in
    another way than the file, or adds 1 to the scale of a norm, edit the rules or the model.

    Args:
      model: the model to fill, with arrays or abstract.
      path: a file or a folder, as for :func:`load_safetensors`.
      rules: rules that are known already, as for :func:`load_safetensors`. They come first.
      only: an NNX filter for the arrays to fill. The default is all but the state of random
        streams.

    Returns:
      Rules for :func:`load_safetensors` and :func:`save_safetensors`: a dict, printed as text to
      edit. ``rules.save(path)`` writes it to a file, which ``rules.load(path)`` and these
      functions read. ``rules.table`` has a row for each kind of tensor: what becomes what, and how.

    Raises:
      NoCheckpointError: the file does not exist.
      CheckpointError: a file is damaged; or arrays have no tensors, tensors have no arrays, shapes
        do not fit, or matches are ambiguous. One message lists all of these, with the candidates.

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
    all_arrays = names.named_arrays(flat)
    arrays = selected_weights(_MATCH, all_arrays, only)
    given_rules = loaded_rules(rules or {})
    compiled_rules = read_rules(_MATCH, given_rules)
    head = f"{_MATCH}: {os.fspath(path)} does not fit the model."
    with tensor_files.open_tensors(_MATCH, path) as tensors:
        # 1. Leave out the tensors that have a rule already, and the arrays that they fill.
        targets_by_rule = {name: compiled_rules.targets(name) for name in tensors}  # None: no rule
        filled = {target.path for targets in targets_by_rule.values() for target in targets or ()}
        unruled = {name: x for name, x in tensors.items() if targets_by_rule[name] is None}
        unread = [f"  {name}: {x.dtype}" for name, x in unruled.items() if isinstance(x.dtype, str)]
        raise_if_any(CheckpointError, f"{head}\nOf a dtype that JAX does not have:", unread)

        # 2. Match the others. Arrays that `only` leaves out are matched as well, because their
        # tensors need rules.
        to_fill = selected_weights(_MATCH, all_arrays, WEIGHTS) | arrays
        shapes = {path: x.leaf.shape for path, x in to_fill.items() if path not in filled}
        braces = [f"  {name}" for name in (*unruled, *shapes) if {"{", "}"} & {*name}]
        hint = "Say what becomes of them by rules=..., with {{ and }} for the braces of a path."
        raise_if_any(CheckpointError, f"{head}\nNames with braces have no rules:", braces, hint)
        # The kernel of an Einsum may have any order, because a text says the order of its
        # dimensions.
        einsums = {id(x.kernel) for x in flat.objects if isinstance(x, nnx.Einsum)}
        matching = _Matching(
            {name: unruled[name].shape for name in sorted(unruled)},
            shapes,
            in_any_order={path for path, x in to_fill.items() if id(x.variable) in einsums},
        )

        # 3. Raise an error for tensors and arrays without a match, or with several.
        problems = by_kind(matching.problems({*arrays}))
        unmatched = [arrays[path].variable for path in matching.unmatched_arrays({*arrays})]
        raise_if_any(CheckpointError, head, problems, _remedy(tensors, unmatched))

        # 4. Check that the rules fill each array completely, and once; raise an error otherwise.
        inferred_rules = matching.rules()
        result = TensorRules({**given_rules, **inferred_rules})
        leaves = {name: array.leaf for name, array in arrays.items()}
        all_leaves = {array.path: array.leaf for array in all_arrays}
        fill_by_rules(head, read_rules(_MATCH, result), tensors, leaves, all_leaves, cast=True)

        # 5. The table has the order of the file, as the rules have.
        ignoring = {pattern: rule for pattern, rule in inferred_rules.items() if rule is None}
        rows = [
            *matching.matches,
            *matches_by_rules(compiled_rules, tensors, all_leaves, GIVEN),
            *matches_by_rules(read_rules(_MATCH, ignoring), unruled, all_leaves, ""),
        ]
        templates = dict.fromkeys(read_name(name)[0].text for name in sorted(tensors))
        order = {template: index for index, template in enumerate(templates)}
        result.table = MatchTable(sorted(rows, key=lambda row: order[row.tensor]))
    return result


def _remedy(tensors: Iterable[str], unmatched: Iterable[object]) -> str:
    """Returns the last lines of an error about tensors and arrays without a rule: what to do.

    Args:
      tensors: the names of all tensors in the file.
      unmatched: the Variables, or bare arrays, that no tensor may fill.
    """
    if any(_OF_QUANTISED.fullmatch(name) for name in tensors):  # rules would not help
        return "The file is quantised, but only numbers without scales can be loaded."
    remedy = "Say what is not inferred by rules={pattern: path, Tensor or None}."
    if any(isinstance(x, nnx.Variable) and not isinstance(x, nnx.Param) for x in unmatched):
        remedy += (
            " Caches and other Variables that are no parameters are left out by only=nnx.Param,"
            " here and in load_safetensors."
        )
    return remedy


@dataclasses.dataclass
class _Fit:
    """One array of a link, the tensors that fill it, and the ways in which they may.

    Attributes:
      link: the group of tensors and the group of arrays that belong together.
      numbers: the numbers of the array.
      sources: the numbers of the tensors that fill it: several if they are stacked in the array.
      by_order: for each order that matrices of the file may have, all ways in which the tensors
        fit; empty for stacked tensors of different shapes.
      ways: the ways that are left after `_set_ways_by_order` and `_drop_ways_by_stack`; empty
        before.
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
        """The shape of the first tensor. If any way fits, all tensors have this shape."""
        return self.link.tensors.shapes[self.sources[0]]

    @property
    def array_shape(self) -> Shape:
        """The shape of the array."""
        return self.link.arrays.shapes[self.numbers]

    def orders(self) -> set[Order]:
        """Returns the orders in which a usual way fits.

        If there are none, returns the orders in which any way fits.
        """
        fitting = {order for order, ways in self.by_order.items() if ways}
        usual = {order for order in fitting if any(x.is_usual for x in self.by_order[order])}
        return usual or fitting

    def dimension_of(self, counter: str, way: Candidate) -> int:
        """Returns the dimension of the array that a stacked counter has in this way."""
        return way.stacked_at[self.link.stacked.index(counter)]

    def chosen_way(self) -> Candidate | None:
        """Returns the only way, or the only usual one of several.

        Returns None if there is no way, or if the choice is ambiguous.
        """
        usual = [way for way in self.ways if way.is_usual]
        possible = usual if len(usual) == 1 else self.ways
        return possible[0] if len(possible) == 1 else None


class _Matching:
    """Matches tensors and arrays by names, then by shapes; the constructor does so.

    ``rules`` then returns the rules of all that matched, and ``problems`` lines about all others.
    If there are no problems, each tensor has a rule, except for buffers.

    Args:
      tensors: the shapes of tensors, by name.
      arrays: the shapes of arrays, by path.
      in_any_order: the paths of kernels whose dimensions may be in any order.

    Attributes:
      matches: the rows of the table of rules, in any order.

    Private attributes:

        _tensors, _arrays   the groups of names on each side
        _links              the groups of tensors and of arrays that belong together by their names
        _rules              template of tensors → their numbers → path of each array that they fill
                            → the rule for it; without templates that fill nothing
        _ambiguous          lines of the error about arrays that may be filled in several ways
        _misfits            lines of the error about arrays that no way fits
        _settled            the names of tensors and the paths of arrays that are in a rule, or in a
                            line of `_ambiguous` or `_misfits`
        _keys_of_matches    the rows in ``matches``, as (template of tensors, template of arrays,
                            dimensions)
    """

    def __init__(
        self,
        tensors: Mapping[str, Shape],
        arrays: Mapping[str, Shape],
        in_any_order: Collection[str],
    ):
        """Matches the tensors and arrays: first by names, then by shapes."""
        self._tensors, self._arrays = grouped(tensors), grouped(arrays)
        self._rules: dict[str, dict[Numbers, dict[str, Tensor]]] = {}
        self._ambiguous, self._misfits = list[str](), list[str]()
        self._settled: set[str] = set()
        self._keys_of_matches: set[tuple[str, str, str | None]] = set()
        self.matches: list[Match] = []
        # Names decide which tensors and arrays belong together. Then shapes decide how.
        links = Links(self._tensors, self._arrays)
        self._links = links.links
        self._note_ambiguous_names(links, in_any_order)
        self._choose_ways(in_any_order)

    def _note_ambiguous_names(self, links: Links, in_any_order: Collection[str]) -> None:
        """Adds lines for arrays that several groups of tensors may fill, by their names.

        A line has the tensors that fit the array; all of them if none fits. All these names count
        as settled, so that no other line says that they are unmatched.

        ``in_any_order`` has the paths of kernels whose dimensions may be in any order.
        """
        # An array's group is in `ambiguous` once for each group of tensors that may fill it.
        rivals_of: dict[str, list[Group]] = {}  # by the template of the arrays
        arrays_of: dict[str, Group] = {}
        for tensors, arrays in links.ambiguous:
            arrays_of[arrays.template.text] = arrays
            rivals_of.setdefault(arrays.template.text, []).append(tensors)
        for template, arrays in arrays_of.items():
            rivals = rivals_of[template]
            fitting_paths = [_fitting_paths(Link(rival, arrays), in_any_order) for rival in rivals]
            for numbers, path in arrays.names.items():
                # If tensors and arrays are not numbered alike, the line has the template of the
                # tensors instead of a name.
                possible = [rival.names.get(numbers, rival.template.text) for rival in rivals]
                pairs = zip(possible, fitting_paths, strict=True)
                fitting = [name for name, paths in pairs if path in paths]
                note = ", by its shape, but not by its name" if len(fitting) == 1 else ""
                self._ambiguous.append(f"  {path}: {' or '.join(fitting or possible)}{note}")
            for group in (arrays, *rivals):
                self._settled |= {*group.names.values()}

    def _choose_ways(self, in_any_order: Collection[str]) -> None:
        """Adds a rule for each array of a link, or a line that says why there is none.

        ``in_any_order`` has the paths of kernels whose dimensions may be in any order.
        """
        fits = [fit for link in self._links for fit in _fits(link, in_any_order)]
        _set_ways_by_order(fits)
        _drop_ways_by_stack(fits)
        for fit in fits:
            self._settled |= {fit.path, *fit.tensor_names}
            way = fit.chosen_way()  # None if no way fits, or several do
            if way is not None:
                self._add_rule(fit, way)
                self._add_match(fit, way)
            elif fit.ways:
                possible = " or ".join(repr(way.tensor.dimensions) for way in fit.ways)
                self._ambiguous.append(f"  {fit.path}: {fit.tensor_names[0]} as {possible}")
            else:
                self._misfits.append(_line_of_misfit(fit))

    def _add_rule(self, fit: _Fit, way: Candidate) -> None:
        """Adds the rule of an array to the rules of each of its tensors.

        Args:
          way: the way in which the tensors fill it.
        """
        tensor = way.rule(fit.link.path(fit.numbers))
        # A fused tensor fills several arrays, so it is in several links, and gets several rules.
        by_numbers = self._rules.setdefault(fit.link.tensors.template.text, {})
        for numbers in fit.sources:
            by_numbers.setdefault(numbers, {})[fit.path] = tensor

    def _add_match(self, fit: _Fit, way: Candidate) -> None:
        """Adds a row of the table for an array, unless an array of its template has the same row.

        The arguments are those of :meth:`_add_rule`.
        """
        link = fit.link
        template, path = link.tensors.template.text, link.path(fit.numbers)
        key = template, link.arrays.template.text, way.rule(path).dimensions
        if key in self._keys_of_matches:
            return
        self._keys_of_matches.add(key)
        convention = ""
        if len(fit.ways) > 1:
            # One of the ways was usual. For a kernel, (in, out) is: the matrix is transposed, or
            # the file has this order already. An embedding always stays as it is.
            usual = "a kernel is (in, out)" if way.is_transposed else "it stays as it is"
            convention = f"by convention, as {len(fit.ways)} ways fit: {usual}"
        note = "; ".join(filter(None, [way.described(), convention, link.note]))
        self.matches.append(Match(template, path, fit.tensor_shape, fit.array_shape, note))

    def unmatched_arrays(self, wanted: Collection[str]) -> dict[str, Shape]:
        """Returns the shapes of the arrays that no tensor may fill, by path.

        Only arrays whose paths are ``wanted`` count. Arrays with several possible tensors, or with
        a tensor of another shape, are left out, because they are other problems.
        """
        return {
            path: group.shapes[numbers]
            for group in self._arrays
            for numbers, path in group.names.items()
            if path in wanted and path not in self._settled
        }

    def problems(self, wanted: Collection[str]) -> dict[str, list[str]]:
        """Returns lines of an error about tensors and arrays without a rule, by kind of problem.

        Args:
          wanted: the paths of the arrays that the user selects. Other arrays need no tensor.
        """
        # Tensors that fill nothing. Buffers, such as masks, are left out, because a model may do
        # without them.
        unmatched_tensors: list[str] = []
        # Number of elements → such tensors: the group, the numbers and the name of each.
        tensors_by_size: dict[int, list[tuple[Group, Numbers, str]]] = {}
        for group in self._tensors:
            for numbers, name in group.names.items():
                if name not in self._settled and not group.is_buffer:
                    unmatched_tensors.append(self._line_of_unmatched(name, group, numbers))
                    size = math.prod(group.shapes[numbers])
                    tensors_by_size.setdefault(size, []).append((group, numbers, name))
        # Arrays that nothing fills, each with up to three unmatched tensors of the same size.
        unmatched_arrays: list[str] = []
        unmatched_shapes = self.unmatched_arrays(wanted)
        num_arrays_of_size = collections.Counter(map(math.prod, unmatched_shapes.values()))
        for path, shape in unmatched_shapes.items():
            size = math.prod(shape)
            of_same_size = tensors_by_size.get(size, [])
            possible = _of_the_same_layer(path, of_same_size)[:3]
            hint = f"; of this size: {' or '.join(possible)}" if possible else ""
            if len(of_same_size) == num_arrays_of_size[size] == 1:
                [(group, numbers, name)] = of_same_size
                # Of a vector or a matrix that is not square, equal shapes are equal dimensions. A
                # tensor of another shape, or a square one, may be transposed.
                if group.shapes[numbers] == shape and len({*shape}) == len(shape):
                    hint += f"; if it is this one: rules={{{rule_text(re.escape(name), path)}}}"
            unmatched_arrays.append(f"  {path}, shape {shape}{hint}")
        return {
            "Arrays without a tensor": unmatched_arrays,
            "Tensors without an array": unmatched_tensors,
            "Ambiguous": self._ambiguous,
            "Of another shape": self._misfits,
        }

    def _line_of_unmatched(self, name: str, group: Group, numbers: Numbers) -> str:
        """Returns the line of an error about a tensor that fills no array.

        If another tensor fills the array with the same role, the line names both.

        Args:
          numbers: the numbers of the tensor, such as the number of its layer.
        """
        for link in self._links:
            # The array has the same numbers and the same role: the part, such as "q", and the kind,
            # such as "weight". If arrays count layers in another way, none is found.
            path = link.arrays.names.get(numbers)
            if path and link.arrays.template.role == group.template.role:
                sources = [link.tensors.names[source] for source in link.sources.get(numbers, ())]
                return f"  {name}: {path} has {', '.join(sources)}"
        return f"  {name}, shape {group.shapes[numbers]}"

    def rules(self) -> dict[str, Rule]:
        r"""Returns the rules of all tensors, by pattern, in the order of the file.

        If all tensors of a template have the same rule, the pattern is ``h\.(\d+)\.up``. If some
        layers differ, such as every fourth one, each name has a rule of its own, ``h\.3\.up``.
        Names with numbers such as 03 have rules of their own as well, because {0} would write them
        as 3.
        """
        rules: dict[str, Rule] = {}
        for group in self._tensors:
            template = group.template.text
            # PyTorch stores some tensors that are no weights. The rule None ignores them.
            if group.is_buffer and template not in self._rules:
                rules[_pattern(template)] = None
                continue
            # The template has rules, because `match_tensors` has raised an error if any tensor,
            # other than a buffer, has none.
            by_numbers = self._rules[template]
            # For each tensor of the template, the list of its rules, one for each array.
            first_rules, *later_rules = ([*by_path.values()] for by_path in by_numbers.values())
            are_equal = all(later == first_rules for later in later_rules)
            has_leading_zeros = any(re.search(r"\b0[0-9]", name) for name in group.names.values())
            if are_equal and not has_leading_zeros:
                rules[_pattern(template)] = _rule(first_rules)
                continue
            for numbers, by_path in by_numbers.items():
                tensors = [_with_numbers(path, x, numbers) for path, x in by_path.items()]
                rules[re.escape(group.names[numbers])] = _rule(tensors)
        return rules


def _of_the_same_layer(path: str, tensors: Iterable[tuple[Group, Numbers, str]]) -> list[str]:
    """Returns the names of the tensors that may belong to the layer of an array.

    If any tensor counts what the array counts, such as layers, and has the same numbers, those with
    other numbers are left out. Tensors that count something else stay.
    """
    template, numbers = read_name(path)
    array_numbers = dict(zip(template.counters, numbers, strict=True))
    same, other_layers = list[str](), list[str]()
    for group, tensor_numbers, name in tensors:
        pairs = zip(group.template.counters, tensor_numbers, strict=True)
        is_same = all(array_numbers.get(counter, number) == number for counter, number in pairs)
        (same if is_same else other_layers).append(name)
    return same or other_layers


def _line_of_misfit(fit: _Fit) -> str:
    """Returns the line of an error about an array that its tensors fill in no way."""
    count = f" of {len(fit.sources)}" if len(fit.sources) > 1 else ""  # of tensors to stack
    line = f"  {fit.tensor_names[0]}, shape {fit.tensor_shape}{count}: "
    line += f"{fit.path}, shape {fit.array_shape}"
    # The tensor has queries, keys and values in turns in the rows of each head. If the array has no
    # dimension for heads, shapes do not tell their number, so the user gets a hint.
    if fit.link.parts and fit.link.tensors.template.part == QKV_BY_HEAD:
        line += '; an array without heads needs "(h p d) in -> in (h d)", h=…, p=3'
    return line


def _rule(tensors: Sequence[Tensor]) -> Rule:
    """Returns a rule in the form that users write.

    The rule is a path if nothing is rearranged, else a ``Tensor``; and a list for several arrays.
    """
    entries = [tensor.path if tensor.dimensions is None else tensor for tensor in tensors]
    return entries[0] if len(entries) == 1 else entries


def _fits(link: Link, in_any_order: Collection[str]) -> Iterator[_Fit]:
    """Yields the arrays of a link that have tensors, each with all ways in which the tensors fit.

    ``in_any_order`` has the paths of kernels whose dimensions may be in any order.
    """
    for numbers, path in link.arrays.names.items():
        sources = link.sources.get(numbers)
        if not sources:
            continue
        by_order: dict[Order, Sequence[Candidate]] = {}
        shapes = {link.tensors.shapes[source] for source in sources}
        if len(shapes) == 1:  # no way fits tensors of different shapes, which cannot be stacked
            [tensor_shape] = shapes
            array_shape = link.arrays.shapes[numbers]
            convention = _convention(link, in_any_order=path in in_any_order)
            stacks = link.stacks_of(numbers)
            fused = link.fused_part(numbers, sources[0])  # the layers of a stack are alike
            for order in get_args(Order):
                by_order[order] = candidates(
                    tensor_shape, array_shape, order, convention, stacks=stacks, fused=fused
                )
        yield _Fit(link, numbers, sources, by_order)


def _fitting_paths(link: Link, in_any_order: Collection[str]) -> set[str]:
    """Returns the paths of the arrays of a link that their tensors fit in some way."""
    return {fit.path for fit in _fits(link, in_any_order) if any(fit.by_order.values())}


def _convention(link: Link, *, in_any_order: bool) -> Convention:
    """Returns the facts that names tell about the dimensions of an array and its tensor.

    Args:
      link: the groups of the array and the tensor.
      in_any_order: whether the array is a kernel whose dimensions may be in any order.
    """
    arrays, tensors = link.arrays.template, link.tensors.template
    leaf = arrays.text.rpartition("/")[2]  # "blocks/{}/up/kernel" → "kernel"
    order: Literal["in, out", "as the tensor"] | None = None
    # Tables of tokens, of positions and of the class token have the order (number, features) in
    # both Flax and PyTorch.
    if leaf == "embedding" or arrays.part in {"embed", "pos", "cls"}:
        order = "as the tensor"
    elif leaf == "kernel" and not in_any_order:
        order = "in, out"
    heads: Literal["in", "out"] | None = None
    if tensors.part in {"q", "k", "v", "kv", "qkv", QKV_BY_HEAD}:
        heads = "out"  # the outputs of a projection to queries, keys or values are heads
    elif tensors.part == "o":
        heads = "in"  # the inputs of the output projection of attention are heads
    return Convention(order, heads)


def _set_ways_by_order(fits: Sequence[_Fit]) -> None:
    """Sets the ``ways`` of each array: the ways for the order of matrices that the file has.

    Matrices that are not square show the order. They only show it for matrices of the same rank,
    and matrices outside of layers do not show it for those in layers.
    """
    # (whether tensors are in layers, their rank) → the orders that such tensors show.
    shown_orders: dict[tuple[bool, int], set[Order]] = {}
    unclear: list[tuple[_Fit, tuple[bool, int]]] = []  # fits that show no order, with their key
    for fit in fits:
        key = fit.link.tensors.template.in_layer, len(fit.tensor_shape)
        orders_of_fit = fit.orders()  # the orders in which a usual way fits, or else any way
        if len(orders_of_fit) == 1:
            shown_orders.setdefault(key, set()).update(orders_of_fit)
            [order] = orders_of_fit
            fit.ways = fit.by_order[order]
        else:
            unclear.append((fit, key))
    for fit, key in unclear:
        orders = shown_orders.get(key)
        if not orders:
            # PyTorch has (out, in), but GPT-2 has (in, out) under names such as c_attn. Models that
            # copied these names may have either.
            word = fit.link.tensors.template.words[-1]
            orders = {"out in", "in out"} if word.startswith("c_") else {"out in"}
        # Two orders may offer the same way, which `distinct` drops. The loop is over all orders,
        # not over the set, because messages list the ways in a fixed order.
        ways = (fit.by_order.get(order, ()) for order in get_args(Order) if order in orders)
        fit.ways = distinct(itertools.chain.from_iterable(ways))


def _drop_ways_by_stack(fits: Sequence[_Fit]) -> None:
    """Removes ways in which an array has its layers in another dimension than all others.

    If no dimension is possible for all arrays, every way stays.
    """
    # The counters, such as "layer", that are a dimension of arrays and a number in tensors' names.
    for counter in dict.fromkeys(counter for fit in fits for counter in fit.link.stacked):
        stacked_fits = [fit for fit in fits if counter in fit.link.stacked and fit.ways]
        possible = [{fit.dimension_of(counter, way) for way in fit.ways} for fit in stacked_fits]
        common = set.intersection(*possible) if possible else set()
        if common:
            for fit in stacked_fits:
                fit.ways = [way for way in fit.ways if fit.dimension_of(counter, way) in common]


def _pattern(template: str) -> str:
    r"""Returns the pattern for the names of a template: ``h.{}.up`` → ``h\.(\d+)\.up``."""
    return r"(\d+)".join(map(re.escape, template.split("{}")))


def _with_numbers(path: str, tensor: Tensor, numbers: Numbers) -> Tensor:
    """Returns the rule of one tensor and one array, with numbers in place of ``{0}``, ….

    Args:
      tensor: the rule of the array for all tensors of a template.
      numbers: the numbers of the tensor. The axis ``{i}`` of the array gets the name ``stack{i}``,
        and the tensor is put at its index ``numbers[i]``.
    """
    dimensions, put = tensor.dimensions, {**tensor.put}
    for i, number in enumerate(numbers):
        if dimensions and f"{{{i}}}" in dimensions:  # the number is an index of a dimension
            dimensions = dimensions.replace(f"{{{i}}}", f"stack{i}")
            put[f"stack{i}"] = number
    return Tensor(path, dimensions, take=tensor.take, put=put, **tensor.sizes)
