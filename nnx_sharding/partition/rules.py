"""``StateSharding`` from rules for paths or logical names, and from arrays that are placed.

A *pattern* chooses Variables by their path: a regular expression, a glob, an NNX filter. A *logical
name* says what a dimension is for, such as ``embed``. A *logical rule* says which mesh axes shard
the dimensions with a logical name. The metadata of a Variable have its names (``out_sharding``).
They are its *annotation*, which may also be a ``PartitionSpec`` or a sharding. A *spec* is a
``PartitionSpec``. A spec has an *entry* for each dimension: a mesh axis, a tuple of mesh axes, or
None.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from flax.linen import get_logical_axis_rules
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..errors import UnusedFilterWarning, listed, raise_if_any, shortened, warn_or_raise
from ..specs.filters import PathRegex, glob_hint, to_predicate
from ..specs.fitting import (
    OnIndivisible,
    axes_of,
    pad_entries,
    show,
    suggested_spec,
    suggestion,
    with_entries,
)
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyMesh
from .variables import FOLLOWING, NamedVariable, SpecsByPath, from_paths, variables

Pairs: TypeAlias = Mapping[Any, Any] | Iterable[tuple[Any, Any]]


def _read_pairs(caller: str, pairs: Pairs) -> list[tuple[Any, Any]]:
    """Returns the pairs of a mapping or of an iterable of pairs; raises a TypeError for others.

    ``caller`` is the function that the user called, for the error.
    """
    items: Any = pairs.items() if isinstance(pairs, Mapping) else pairs
    # Only a tuple or a list is a pair, because a text of two letters could be unpacked as well.
    are_pairs = False
    if isinstance(items, Iterable) and not isinstance(items, str):
        items = list(items)
        are_pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in items)
    if not are_pairs:
        raise TypeError(f"{caller} takes a mapping or a sequence of pairs, not {show(pairs)}.")
    return [(first, second) for first, second in items]


def read_patterns(caller: str, pairs: Pairs) -> list[tuple[Any, Any]]:
    """Returns a user's rules as pairs of an NNX filter and a value, in their order.

    A string or a compiled expression becomes a :class:`PathRegex`; other filters stay as they are.

    Args:
      caller: the function that the user called, for messages.
      pairs: a mapping from patterns to values, or pairs of a pattern and a value.

    Raises:
      ValueError: expressions are invalid; all are listed.
    """
    rules: list[tuple[Any, Any]] = []
    invalid: list[str] = []
    for pattern, value in _read_pairs(caller, pairs):
        is_regex = isinstance(pattern, str | re.Pattern)
        try:
            rules.append((PathRegex(pattern) if is_regex else pattern, value))
        except ValueError as error:
            invalid.append(str(error))
    if invalid:
        raise ValueError("\n".join(listed(invalid)))
    return rules


@_compat.api_boundary
def from_rules(
    rules: Pairs,
    *,
    default: PartitionSpec | Sharding | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> StateSharding:
    """Shards by patterns for paths; the first pattern that matches decides.

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
    # A last rule for everything is the default.
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
        raise TypeError(f"override changes a nnx_sharding.StateSharding, got {show(sharding)}.")
    pairs = read_patterns("override", rules)
    # The old rules come last, as the first filter that matches decides.
    pairs += zip(sharding.filters, sharding.shardings, strict=True)
    return StateSharding(
        pairs, on_indivisible=sharding.on_indivisible, activations=sharding.activations
    )


@_compat.api_boundary
def from_arrays(model: object) -> StateSharding:
    """Reads the shardings of the arrays of a model, to place another model in the same way.

    Args:
      model: a model, an optimizer or a pytree of them; the arrays may be abstract.

    Returns:
      The sharding of each path; None, which leaves the choice to JAX, for arrays without a sharding
      or not committed to a device, and for Variables whose arrays differ.
    """
    specs: SpecsByPath = {}
    for variable in variables(model):
        # A spec is for all arrays of a Variable, so they have to agree.
        shardings = {_committed_sharding(array) for array in variable.arrays}
        specs[variable.path] = shardings.pop() if len(shardings) == 1 else None
    return from_paths(specs, by="from_arrays")


def _committed_sharding(array: object) -> Sharding | None:
    """Returns the sharding of an array; None if JAX has only put it on the default device."""
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
        """Brings the rules into hashable form; raises a ValueError if some are invalid."""
        pairs = _read_pairs("LogicalRules", self.rules)
        pairs = [(name, tuple(axes) if type(axes) is list else axes) for name, axes in pairs]
        wrong = [show(pair) for pair in pairs if not _is_rule(*pair)]
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
        self,
        names: Sequence[object],
        shape: Sequence[int] | None = None,
        mesh: AnyMesh | None = None,
    ) -> PartitionSpec:
        """Returns the partition spec of an array.

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

    def _spec(
        self, names: Sequence[object], shape: Sequence[int] | None, mesh: AnyMesh | None
    ) -> PartitionSpec:
        """Returns the same as :meth:`spec`; callers add the name of the array to its errors.

        Each rule, in order, gives its axes to the dimensions with its name, unless an earlier rule
        has taken one of the axes, or they do not divide the dimension. A rule with None replicates
        the dimension, so that later rules for its name are not used.
        """
        if not isinstance(names, PartitionSpec | tuple | list):
            raise ValueError(f"expected a tuple of names{suggested_spec(names)}")
        # A spec with names may have further fields, such as ``unreduced``, which are kept.
        original = names if isinstance(names, PartitionSpec) else PartitionSpec()
        entries: list[Any] = list(names.partitions if isinstance(names, PartitionSpec) else names)
        # A dimension may have several names, and several dimensions the same name.
        named = [
            _NamedDimension(dimension, name)
            for dimension, entry in enumerate(entries)
            for name in axes_of(entry)
        ]
        self._check([named_dimension.name for named_dimension in named], len(entries), shape)
        # The rules are the outer loop, because an earlier rule gets its axes before all later ones.
        for rule_name, axis_entry in self.rules:
            axes = axes_of(axis_entry)  # () if the rule replicates the dimension
            if mesh is not None and axes:
                axes = tuple(axis for axis in axes if axis in mesh.axis_names)
                # The rule is for another mesh. A later rule for the name may be for this one.
                if not axes:
                    continue
            for named_dimension in named:
                is_undecided = named_dimension.axes is None
                if named_dimension.name != rule_name or not is_undecided:
                    continue
                if _can_have_axes(named_dimension.dimension, axes, named, shape, mesh):
                    named_dimension.axes = axes
        # Entries without names, None and UNCONSTRAINED, stay as they are.
        for dimension in {named_dimension.dimension for named_dimension in named}:
            entries[dimension] = _axes_at(dimension, named)
        return with_entries(original, entries)

    def _check(self, names: Sequence[object], rank: int, shape: Sequence[int] | None) -> None:
        """Raises an error for names that are not strings or have no rule, and for another rank.

        Args:
          names: the names of all dimensions. A dimension may have several names, or none.
          rank: the number of dimensions that the user has written entries for.
          shape: the shape of the array; None if it is not known.
        """
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
        """The last line of errors: which names have rules."""
        names = ", ".join(map(repr, self.names)) or "none"
        return f"The names with rules are {names}; None replicates a dimension."


@dataclasses.dataclass
class _NamedDimension:
    """One name of a dimension, and the mesh axes that a rule has given it."""

    dimension: int
    name: Any
    axes: tuple[str, ...] | None = None  # None until a rule is used; () if it replicates


def _axes_at(dimension: int, named: Sequence[_NamedDimension]) -> tuple[str, ...]:
    """Returns the mesh axes that all names of a dimension have been given so far."""
    return tuple(axis for x in named if x.dimension == dimension for axis in x.axes or ())


def _can_have_axes(
    dimension: int,
    axes: Sequence[str],
    named: Sequence[_NamedDimension],
    shape: Sequence[int] | None,
    mesh: AnyMesh | None,
) -> bool:
    """Whether a rule may give mesh axes to a dimension of an array.

    No dimension may have one of the axes already. The axes also have to divide the dimension,
    together with the axes that it has by other names; this is not checked without a shape or mesh.
    """
    used_axes = {axis for x in named for axis in x.axes or ()}
    if not used_axes.isdisjoint(axes):
        return False
    if mesh is None or shape is None:
        return True
    all_axes = (*_axes_at(dimension, named), *axes)
    num_parts: int = math.prod(mesh.shape[axis] for axis in all_axes)
    return shape[dimension] % num_parts == 0


def _is_rule(name: object, entry: object) -> bool:
    """Whether a pair is a rule: a text, and one mesh axis, several different ones or none."""
    axes = axes_of(entry)
    are_names = all(isinstance(x, str) and x for x in (name, *axes))
    return are_names and len(set(axes)) == len(axes)


@_compat.api_boundary
def from_logical(
    model: object,
    rules: LogicalRules | Mapping[str, Any] | Iterable[tuple[str, Any]],
    names: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
    *,
    mesh: AnyMesh | None = None,
    strict: bool = False,
) -> StateSharding:
    """Shards a model whose dimensions have logical names.

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
      The shardings, with a spec for each path; ``PartitionSpec()`` for an array without names.

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
    used_pairs = set[int]()  # the indices of pairs that decide for some Variable

    def use_first_match(variable: NamedVariable) -> Any:
        """Returns the names of the first pattern that matches, else the names in the metadata.

        Adds the index of the pair to ``used_pairs``.
        """
        for index, matches in enumerate(predicates):
            if matches(variable.path, variable.variable):
                used_pairs.add(index)
                _, names_of_pair = pairs[index]
                return names_of_pair
        return variable.annotation

    def spec_of(variable: NamedVariable, names_of_dimensions: Any) -> PartitionSpec:
        return rules._spec(names_of_dimensions, variable.shape, mesh)

    sharding = _from_names(
        "from_logical",
        model,
        names_of=use_first_match,
        spec_of=spec_of,
        fault="these names give no spec",
        hint=rules._hint,
    )
    unused = [filter_ for index, (filter_, _) in enumerate(pairs) if index not in used_pairs]
    if unused:
        # A glob such as `blocks/*/up` is a valid regular expression with another meaning, so users
        # get a hint. `glob_hint` returns "" for other patterns. One hint is enough, and `max`
        # prefers any hint to "".
        hints = [glob_hint(pattern.text) for pattern in unused if isinstance(pattern, PathRegex)]
        hint = max(hints, default="")
        patterns = ", ".join(shortened(map(repr, unused)))
        text = f"from_logical: these names are for no Variable: {patterns}.{hint}"
        warn_or_raise(UnusedFilterWarning, text, strict=strict)
    return sharding


@_compat.api_boundary
def from_metadata(
    model: object,
    rules: LogicalRules | Mapping[str, object] | Iterable[tuple[str, object]] | None = None,
    *,
    mesh: AnyMesh | None = None,
) -> StateSharding:
    """Reads the shardings in the metadata of the Variables.

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
    return _from_names(
        "from_metadata",
        model,
        names_of=lambda variable: variable.annotation,
        spec_of=functools.partial(_spec_of_annotation, rules, mesh),
        fault="this metadata gives no sharding",
    )


def _from_names(
    caller: str,
    model: object,
    names_of: Callable[[NamedVariable], object],
    spec_of: Callable[[NamedVariable, object], PartitionSpec],
    *,
    fault: str,
    hint: str = "",
) -> StateSharding:
    """Returns the shardings of a model by names.

    Args:
      caller: the function that the user called, for messages.
      names_of: returns the names for a Variable, a sharding instead of names, or None to replicate.
      spec_of: returns the spec for a Variable and its names; raises a TypeError or ValueError if
        the names give none.
      fault: the first line of the error, after ``caller``: "these names give no spec".

    Raises:
      ValueError: names give no spec; the errors of all Variables are listed.
    """
    specs: SpecsByPath = {}
    lines = []
    for variable in variables(model):
        names = names_of(variable)
        try:
            if names is None:
                specs[variable.path] = PartitionSpec()
            # A sharding, or a sharding with a layout in memory (``Format``), is used as it is.
            elif isinstance(names, Sharding | Format):
                specs[variable.path] = names
            else:
                specs[variable.path] = spec_of(variable, names)
        except (TypeError, ValueError) as error:
            lines.append(f"  {variable.name}, shape {variable.shape}, {names!r}: {error}")
    raise_if_any(ValueError, f"{caller}: {fault}:", lines, hint)
    return from_paths(specs, by=caller)


def _spec_of_annotation(
    rules: LogicalRules, mesh: AnyMesh | None, variable: NamedVariable, annotation: object
) -> PartitionSpec:
    """Returns the spec of a Variable from the names in its metadata, by rules for these names.

    A name with a rule becomes mesh axes. A name without a rule is a mesh axis itself, as in Flax.

    Args:
      rules: the rules for all Variables. The rules in the metadata of this Variable come first.
      mesh: the mesh; None if it is not known, which leaves names without a rule unchecked.
      annotation: the names in its metadata, one for each dimension.

    Raises:
      TypeError, ValueError: the annotation is invalid; callers add the name of the Variable.
    """
    if not isinstance(annotation, PartitionSpec | tuple | list):
        raise TypeError(f"expected a tuple of names{suggested_spec(annotation)}")
    shape = variable.shape
    # The names in the form of a spec, whose further fields, such as ``unreduced``, are kept.
    named = annotation if isinstance(annotation, PartitionSpec) else PartitionSpec(*annotation)
    if shape is not None and len(named) > len(shape):
        raise ValueError(f"{len(named)} names for {len(shape)} dimensions")
    own_rules = _read_pairs("sharding_rules", variable.metadata.get("sharding_rules") or ())
    rules = LogicalRules((*own_rules, *rules.rules))
    names = [name for entry in named.partitions for name in axes_of(entry)]
    axes = [name for name in names if name not in rules.names]
    _check_axes(axes, rules.names, mesh)
    # Without rules, all names are axes, and the annotation is the spec. It is returned unchanged,
    # even if the axes do not divide the shape, because `nnx.get_partition_spec` does so.
    if not rules.rules:
        return named
    # Each axis in the annotation gets a rule that maps its name to itself. These rules come first,
    # so that no rule for another name takes the axis.
    rules = LogicalRules((*((axis, axis) for axis in axes), *rules.rules))
    rank = len(named) if shape is None else len(shape)
    spec = rules.spec(pad_entries(named, rank), shape, mesh)
    return with_entries(named, spec.partitions)


def _check_axes(axes: Sequence[object], rule_names: Sequence[str], mesh: AnyMesh | None) -> None:
    """Raises a ValueError for names in an annotation that have no rule, and are no mesh axes.

    Args:
      axes: the names without a rule, in the order of the dimensions. A name that two dimensions
        have is in it twice, which is an error as well.
      rule_names: the names with a rule; the error suggests one if it is similar.
      mesh: the mesh; None if it is not known.
    """
    problems = [f"{axis!r} shards {n} dimensions" for axis, n in Counter(axes).items() if n > 1]
    for axis in axes:
        if not isinstance(axis, str):
            problems.append(f"{axis!r} is not a name")
        elif mesh is not None and axis not in mesh.axis_names:
            near = suggestion(axis, (*rule_names, *mesh.axis_names))
            problems.append(f"{axis!r} has no rule and is not an axis of the mesh{near}")
    if problems:
        raise ValueError("; ".join(problems))
