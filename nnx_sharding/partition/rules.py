"""``StateSharding`` from rules for paths or logical names, and from arrays that are placed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax.linen import get_logical_axis_rules
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..errors import UnusedFilterWarning, listed, raise_listed, shortened, warn_or_raise
from ..specs.filters import PathRegex, glob_hint, to_predicate
from ..specs.fitting import OnIndivisible, axes_of, padded, suggested_spec, suggestion, with_entries
from ..specs.state_sharding import StateSharding
from .variables import FOLLOWING, NamedVariable, from_paths, variables

Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]


def _read_pairs(caller: str, pairs: Any) -> list[tuple[Any, Any]]:
    """The pairs of a mapping or of an iterable of pairs."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    items = list(items) if isinstance(items, Iterable) and not isinstance(items, str) else [items]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in items):
        raise TypeError(f"{caller} takes a mapping or a sequence of pairs, not {pairs!r}.")
    return [(first, second) for first, second in items]


def read_patterns(caller: str, pairs: Any) -> list[tuple[Any, Any]]:
    """Pairs of a filter and a value; strings are regular expressions for paths."""
    result: list[tuple[Any, Any]] = []
    wrong: list[str] = []
    for pattern, value in _read_pairs(caller, pairs):
        try:
            is_regex = isinstance(pattern, str | re.Pattern)
            result.append((PathRegex(pattern) if is_regex else pattern, value))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(listed(wrong)))
    return result


@_compat.api_boundary
def from_rules(
    rules: Pairs,
    *,
    default: PartitionSpec | Sharding | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> StateSharding:
    """Shardings by patterns for paths; the first pattern that matches decides.

    Args:
      rules: pairs, or a mapping, of a pattern and a sharding. A pattern is a regular expression,
        as a string or compiled, that is searched for in paths such as ``blocks/3/up/kernel``; a
        :class:`~nnx_sharding.filters.PathGlob`; or any other NNX filter. A sharding is a
        ``PartitionSpec``, a ``Sharding``, or None to leave the choice to JAX.
      default: the sharding where no pattern matches. Without it such a Variable is an error where
        the rules are used; a last rule ``(..., None)`` leaves the rest to JAX.
      on_indivisible: as in :class:`~nnx_sharding.StateSharding`.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import from_rules
      >>> sharding = from_rules({"up/kernel$": P(None, "model"), "norm": P()}, default=P("data"))
      >>> sharding.map_prefix(("blocks", 3, "up", "kernel"), None)
      P(None, 'model')
    """
    pairs = read_patterns("from_rules", rules)
    if default is not None:
        pairs.append((..., default))
    return StateSharding(pairs, on_indivisible=on_indivisible, activations=FOLLOWING)


@_compat.api_boundary
def override(sharding: StateSharding, rules: Pairs) -> StateSharding:
    """Replaces the shardings of a part of a model; the rest keeps its own.

    The rules are checked where the result is used. State of an optimizer has paths that end like
    those of its parameters, so a pattern without ``^`` covers both.

    Args:
      sharding: what to change; its ``on_indivisible`` and ``activations`` are kept.
      rules: what has priority, in the form of ``rules`` of :func:`from_rules`.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import override
      >>> sharding = StateSharding({...: P("data")})
      >>> override(sharding, {"^head/": P()}).map_prefix(("head", "kernel"), None)
      P()
    """
    if not isinstance(sharding, StateSharding):
        raise TypeError(f"override changes a nnx_sharding.StateSharding, got {sharding!r}.")
    pairs = read_patterns("override", rules)
    pairs += zip(sharding.filters, sharding.shardings, strict=True)
    return StateSharding(
        pairs, on_indivisible=sharding.on_indivisible, activations=sharding.activations
    )


@_compat.api_boundary
def from_arrays(model: Any) -> StateSharding:
    """The shardings of the arrays of a model, to place another model in the same way.

    Args:
      model: a model, an optimizer or a pytree of them; the arrays may be abstract.

    Returns:
      The sharding of each path; None, which leaves the choice to JAX, for arrays without a sharding
      or not committed to a device, and for Variables whose arrays differ.
    """
    specs = {}
    for each in variables(model):
        shardings = set(map(_committed_sharding, each.arrays))
        specs[each.path] = shardings.pop() if len(shardings) == 1 else None
    return from_paths(specs)


def _committed_sharding(array: Any) -> Sharding | None:
    sharding = getattr(array, "sharding", None)
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    return sharding if getattr(array, "committed", False) else None


@dataclasses.dataclass(frozen=True)
class LogicalRules:
    """Ordered rules for the mesh axes that shard a dimension with a logical name.

    Like ``flax.linen.logical_to_mesh_axes``; in addition, a dimension may have a tuple of names,
    and two dimensions the same name. A name without a rule is an error.

    Args:
      rules: pairs, or a mapping, of a logical name and a mesh axis, a sequence of mesh axes that
        shard it together, or None to replicate it. Earlier rules have priority. A name may have
        several rules: where another dimension of the array already has the axes of the first, the
        next one is used.

    Example:
      >>> from nnx_sharding.partition import LogicalRules
      >>> rules = LogicalRules([("mlp", "model"), ("embed", "model"), ("embed", "data")])
      >>> rules.spec(("embed", "mlp"))
      P('data', 'model')
    """

    rules: Any

    def __post_init__(self) -> None:
        pairs = _read_pairs("LogicalRules", self.rules)
        pairs = [(name, tuple(axes) if type(axes) is list else axes) for name, axes in pairs]
        wrong = [repr(pair) for pair in pairs if not _is_rule(*pair)]
        if wrong:
            raise ValueError(
                f"LogicalRules: invalid rules: {', '.join(wrong)}. A rule is a name and a mesh "
                "axis, several different ones or None: ('batch', 'data'), ('mlp', ('x', 'y'))."
            )
        object.__setattr__(self, "rules", tuple(pairs))

    @property
    def names(self) -> tuple[str, ...]:
        """The logical names that have a rule."""
        return tuple(dict.fromkeys(name for name, _ in self.rules))

    def spec(
        self, names: Sequence[Any], shape: Sequence[int] | None = None, mesh: Any = None
    ) -> PartitionSpec:
        """The partition spec of an array.

        Args:
          names: for each dimension its logical name, None to replicate it, a tuple of names,
            or ``PartitionSpec.UNCONSTRAINED``.
          shape: the shape of the array; with a mesh, rules whose axes do not divide the dimension
            are skipped.
          mesh: the mesh; axes that it does not have are left out of the rules.
        """
        try:
            return self._spec(names, shape, mesh)
        except ValueError as error:
            raise ValueError(f"LogicalRules: {names!r}: {error}. {self._hint}") from None

    def _spec(self, names: Any, shape: Sequence[int] | None, mesh: Any) -> PartitionSpec:
        if not isinstance(names, PartitionSpec | tuple | list):
            raise ValueError(f"expected a tuple of names{suggested_spec(names)}")
        start = names if isinstance(names, PartitionSpec) else PartitionSpec()
        entries = list(start.partitions if isinstance(names, PartitionSpec) else names)
        slots = [(d, name) for d, entry in enumerate(entries) for name in axes_of(entry)]
        self._check([name for _, name in slots], len(entries), shape)
        found: dict[int, tuple[str, ...]] = {}  # the mesh axes of each slot

        def axes_at(dimension: int) -> list[str]:
            parts = (found.get(slot, ()) for slot, (d, _) in enumerate(slots) if d == dimension)
            return list(itertools.chain.from_iterable(parts))

        for logical, entry in self.rules:
            axes = axes_of(entry)
            present = tuple(axis for axis in axes if mesh is None or axis in mesh.axis_names)
            for slot, (d, name) in enumerate(slots):
                taken = set(itertools.chain.from_iterable(found.values()))
                is_usable = taken.isdisjoint(present) and (present or not axes)
                if name != logical or slot in found or not is_usable:
                    continue
                sizes = {} if mesh is None or shape is None else mesh.shape
                parts = math.prod(sizes.get(axis, 1) for axis in (*axes_at(d), *present))
                if shape is None or shape[d] % parts == 0:
                    found[slot] = present
        for d, entry in enumerate(entries):
            if axes_of(entry):
                entries[d] = tuple(axes_at(d))
        return with_entries(start, entries)

    def _check(self, names: list[Any], rank: int, shape: Sequence[int] | None) -> None:
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a dimension has a name, None, or a tuple of names")
        unknown = [name for name in dict.fromkeys(names) if name not in self.names]
        problems = [f"no rule for {name!r}{suggestion(name, self.names)}" for name in unknown]
        if shape is not None and rank != len(shape):
            problems.append(f"{rank} names for {len(shape)} dimensions")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def _hint(self) -> str:
        names = ", ".join(map(repr, self.names)) or "none"
        return f"The names with rules are {names}; None replicates a dimension."


def _is_rule(name: Any, entry: Any) -> bool:
    axes = axes_of(entry)
    return all(isinstance(x, str) and x for x in (name, *axes)) and len(set(axes)) == len(axes)


@_compat.api_boundary
def from_logical(
    model: Any,
    rules: LogicalRules | Mapping[str, Any] | Iterable[tuple[str, Any]],
    names: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
    *,
    mesh: Any = None,
    strict: bool = False,
) -> StateSharding:
    """The shardings of a model whose dimensions have logical names.

    Args:
      model: a model, an optimizer or a pytree of them, placed or abstract.
      rules: the mesh axes for each logical name: :class:`LogicalRules` or its argument.
      names: names by path, which have priority over those in the metadata (``out_sharding``):
        pairs, or a mapping, of a pattern as in :func:`from_rules`, and one name for each
        dimension, or None to replicate the array. The first pattern that matches decides.
      mesh: as in :meth:`LogicalRules.spec`.
      strict: whether an entry of ``names`` that applies to no Variable is an error, not an
        :class:`~nnx_sharding.errors.UnusedFilterWarning`.

    Returns:
      The spec of each path; ``PartitionSpec()`` for an array without names.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding.partition import from_logical
      >>> model = nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
      >>> names = {"kernel$": ("embed", "mlp"), "bias$": ("mlp",)}
      >>> sharding = from_logical(model, {"embed": None, "mlp": "model"}, names)
      >>> sharding.map_prefix(("kernel",), model.kernel)
      P(None, 'model')
    """
    rules = rules if isinstance(rules, LogicalRules) else LogicalRules(rules)
    pairs = read_patterns("from_logical", names)
    predicates = [to_predicate(filter_) for filter_, _ in pairs]
    used = set()

    def names_of(each: NamedVariable) -> Any:
        matches = (i for i, p in enumerate(predicates) if p(each.path, each.variable))
        index = next(matches, None)
        used.add(index)
        return each.annotation if index is None else pairs[index][1]

    def spec_of(each: NamedVariable, names: Any) -> PartitionSpec:
        return rules._spec(names, each.shape, mesh)

    title = "from_logical: these names give no spec:"
    sharding = _from_names(title, model, names_of, spec_of, rules._hint)
    unused = [filter_ for i, (filter_, _) in enumerate(pairs) if i not in used]
    if unused:
        hints = (glob_hint(x.text) for x in unused if isinstance(x, PathRegex))
        listed = ", ".join(shortened(map(repr, unused)))
        text = f"from_logical: these names are for no Variable: {listed}.{max(hints, default='')}"
        warn_or_raise(UnusedFilterWarning, text, strict=strict)
    return sharding


@_compat.api_boundary
def from_metadata(
    model: Any,
    rules: LogicalRules | Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    *,
    mesh: Any = None,
) -> StateSharding:
    """The shardings in the metadata of the Variables.

    Args:
      model: a model, an optimizer or a pytree of them, placed or abstract. The metadata is
        ``out_sharding`` (in older models ``sharding`` or ``sharding_names``): names, a
        ``PartitionSpec`` or a sharding.
      rules: mesh axes for logical names: :class:`~nnx_sharding.partition.LogicalRules` or its
        argument. None for those of ``nnx.logical_axis_rules``. The ``sharding_rules`` of
        the Variable itself have priority. A name without a rule is a mesh axis.
      mesh: as in :meth:`LogicalRules.spec <nnx_sharding.partition.LogicalRules.spec>`; names
        without a rule have to be axes of it.

    Returns:
      The sharding of each path; ``PartitionSpec()`` where the metadata has none. Without rules
      they are those of ``nnx.get_partition_spec``; with rules no axis is used twice.
    """
    rules = get_logical_axis_rules() if rules is None else rules
    rules = rules if isinstance(rules, LogicalRules) else LogicalRules(rules)
    title = "from_metadata: this metadata gives no sharding:"
    spec_of = functools.partial(_annotated, rules, mesh)
    return _from_names(title, model, lambda each: each.annotation, spec_of)


def _from_names(
    title: str,
    model: Any,
    names_of: Callable[[NamedVariable], Any],
    spec_of: Callable[[NamedVariable, Any], PartitionSpec],
    hint: str = "",
) -> StateSharding:
    """The shardings that names give Variables; all errors are raised as one."""
    specs, lines = {}, []
    for each in variables(model):
        names = names_of(each)
        try:
            if names is None or isinstance(names, Sharding | Format):
                specs[each.path] = PartitionSpec() if names is None else names
            else:
                specs[each.path] = spec_of(each, names)
        except (TypeError, ValueError) as error:
            lines.append(f"  {each.name}, shape {each.shape}, {names!r}: {error}")
    raise_listed(ValueError, title, lines, hint)
    return from_paths(specs)


def _annotated(
    rules: LogicalRules, mesh: Any, each: NamedVariable, annotation: Any
) -> PartitionSpec:
    """The spec that the metadata of a Variable give."""
    shape = each.shape
    if not isinstance(annotation, PartitionSpec | tuple | list):
        raise TypeError(f"expected a tuple of names{suggested_spec(annotation)}")
    named = annotation if isinstance(annotation, PartitionSpec) else PartitionSpec(*annotation)
    if shape is not None and len(named) > len(shape):
        raise ValueError(f"{len(named)} names for {len(shape)} dimensions")
    local = _read_pairs("sharding_rules", each.metadata.get("sharding_rules") or ())
    rules = LogicalRules((*local, *rules.rules))
    # Names without a rule are mesh axes.
    names = [name for entry in named.partitions for name in axes_of(entry)]
    axes = [name for name in names if name not in rules.names]
    problems = [f"{axis!r} shards {n} dimensions" for axis, n in Counter(axes).items() if n > 1]
    for axis in axes:
        if not isinstance(axis, str):
            problems.append(f"{axis!r} is not a name")
        elif mesh is not None and axis not in mesh.axis_names:
            near = suggestion(axis, (*rules.names, *mesh.axis_names))
            problems.append(f"{axis!r} has no rule and is not an axis of the mesh{near}")
    if problems:
        raise ValueError("; ".join(problems))
    if not rules.rules:
        return named
    with_axes = LogicalRules((*((axis, axis) for axis in axes), *rules.rules))
    rank = len(named) if shape is None else len(shape)
    entries = with_axes.spec(tuple(padded(named, rank)), shape, mesh).partitions
    return with_entries(named, entries)
