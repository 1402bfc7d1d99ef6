"""Specs from logical names of dimensions, such as ``embed``, and rules that give them mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from ..errors import UnusedFilterWarning, report
from ..filters import to_predicate
from ..fitting import axes_of, suggested_spec, suggestion, with_entries
from ..state_sharding import StateSharding
from .given import (
    PatternKind,
    annotation,
    from_patterns,
    problem_line,
    read_pairs,
)
from .paths import exact, variables


class Unsharded(NamedTuple):
    """A dimension that got no mesh axis, its logical name, and why its rules were passed over."""

    dimension: int
    name: str
    reason: str


@dataclasses.dataclass(frozen=True, init=False)
class LogicalRules:
    """Ordered rules that say which mesh axes cut a dimension of a certain logical name.

    Args:
      rules: pairs, or a mapping, of a logical name and a mesh axis, a sequence of mesh axes that
        cut it together, or None to leave it whole. Earlier rules have priority. A name may come
        several times: where the axes of its first rule are taken by another dimension of the
        same array, the next one counts.

    Attributes:
      rules: the pairs in the order in which they are tried.

    Raises:
      TypeError: it is no mapping and no sequence of pairs.
      ValueError: names or axes are no strings, or an axis comes twice in a rule; all are named.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import LogicalRules
      >>> rules = LogicalRules([("mlp", "model"), ("embed", "model"), ("embed", "data")])
      >>> rules.spec(("embed", "mlp")) == P("data", "model")
      True

    The convention is that of ``flax.linen.logical_to_mesh_axes``. Beyond it, a dimension may
    have a tuple of names, and two dimensions the same name; a name without a rule is an error.
    """

    rules: tuple[tuple[str, Any], ...]

    def __init__(self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]):
        pairs = read_pairs("LogicalRules", rules)
        pairs = [(name, tuple(axes) if type(axes) is list else axes) for name, axes in pairs]
        wrong = [repr(pair) for pair in pairs if not _is_rule(*pair)]
        if wrong:
            raise ValueError(
                f"LogicalRules: these are no rules: {', '.join(wrong)}. A rule is a name and a "
                "mesh axis, several different ones or None: ('batch', 'data'), ('mlp', ('x', 'y'))."
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
          names: for each dimension its logical name, None to leave it whole, a tuple of names,
            or ``PartitionSpec.UNCONSTRAINED``.
          shape: the shape of the array. With a mesh, a rule whose axes do not divide the
            dimension is passed over. None: divisibility is not looked at.
          mesh: the mesh. Axes that it does not have are left out of the rules. None: every
            axis counts.

        Raises:
          ValueError: names have no rule, are no names, or are not one for each dimension.

        Example:
          >>> from jax.sharding import AbstractMesh, PartitionSpec as P
          >>> from nnx_sharding.partition import LogicalRules
          >>> rules = LogicalRules([("heads", "model"), ("batch", ("pod", "data"))])
          >>> mesh = AbstractMesh((2, 4), ("data", "model"))
          >>> rules.spec(("batch", "heads"), (8, 6), mesh) == P("data", None)
          True
        """
        slots = self._resolve(names, shape, mesh)
        entries = list(_entries(names))
        for dimension, entry in enumerate(_entries(names)):
            own = [slot for slot in slots if slot.dimension == dimension]
            if len(own) == 1:
                entries[dimension] = own[0].entry
            elif isinstance(entry, tuple):
                entries[dimension] = tuple(axis for slot in own for axis in axes_of(slot.entry))
        given = names if isinstance(names, PartitionSpec) else PartitionSpec()
        return with_entries(given, entries)

    def unsharded(
        self, names: Sequence[Any], shape: Sequence[int] | None = None, mesh: Any = None
    ) -> list[Unsharded]:
        """The names that :meth:`spec` leaves whole although a rule has axes for them, and why.

        The arguments and errors are those of :meth:`spec`.

        Example:
          >>> from nnx_sharding.partition import LogicalRules
          >>> LogicalRules([("mlp", "model"), ("embed", "model")]).unsharded(("embed", "mlp"))
          [Unsharded(dimension=0, name='embed', reason="'model' is taken by 'mlp'")]
        """
        return [
            Unsharded(slot.dimension, slot.name, "; ".join(slot.refusals))
            for slot in self._resolve(names, shape, mesh)
            if slot.refusals and slot.entry is None
        ]

    def _problems(self, names: Any, shape: Sequence[int] | None = None) -> list[str]:
        if not isinstance(names, PartitionSpec | tuple | list):
            return [f"this is no tuple of names{suggested_spec(names)}"]
        flat = [name for entry in _entries(names) for name in axes_of(entry)]
        if not all(isinstance(name, str) for name in flat):
            return ["a dimension has a name, None, or a tuple of names"]
        unknown = [name for name in dict.fromkeys(flat) if name not in self.names]
        problems = [f"no rule for {name!r}{suggestion(name, self.names)}" for name in unknown]
        if shape is not None and len(names) != len(shape):
            problems.append(f"{len(names)} names for {len(shape)} dimensions")
        return problems

    def _resolve(self, names: Any, shape: Any, mesh: Any) -> list[_Slot]:
        problems = self._problems(names, shape)
        if problems:
            raise ValueError(
                f"LogicalRules: {names!r}: {'; '.join(problems)}. The names with rules are "
                f"{', '.join(map(repr, self.names)) or 'none'}; None leaves a dimension whole."
            )
        slots = [
            _Slot(d, name) for d, entry in enumerate(_entries(names)) for name in axes_of(entry)
        ]
        for name, entry in self.rules:
            for slot in slots:
                if slot.name == name and slot.is_open:
                    _offer(slot, entry, slots, shape, mesh)
        return slots


def _entries(names: Any) -> Sequence[Any]:
    entries: Sequence[Any] = names.partitions if isinstance(names, PartitionSpec) else names
    return entries


@dataclasses.dataclass(eq=False)
class _Slot:
    """One logical name in one dimension, and what the rules give it."""

    dimension: int
    name: str
    entry: Any = None
    is_open: bool = True
    refusals: list[str] = dataclasses.field(default_factory=list)


def _offer(slot: _Slot, entry: Any, slots: list[_Slot], shape: Any, mesh: Any) -> None:
    """Gives a slot what a rule says, or notes why not."""
    axes = axes_of(entry)
    present = [axis for axis in axes if mesh is None or axis in mesh.axis_names]
    taken = {axis: other.name for other in slots for axis in axes_of(other.entry)}
    refusals = [f"{axis!r} is taken by {taken[axis]!r}" for axis in present if axis in taken]
    if axes and not present:
        refusals = [f"the mesh has no axis {', '.join(map(repr, axes))}"]
    elif not refusals and present and shape is not None and mesh is not None:
        beside = [axis for s in slots if s.dimension == slot.dimension for axis in axes_of(s.entry)]
        size = shape[slot.dimension]
        parts = math.prod(mesh.shape[axis] for axis in (*beside, *present))
        if size % parts:
            together = " × ".join(map(repr, (*beside, *present)))
            refusals = [f"{size} is not divisible by {together} ({parts})"]
    slot.refusals += refusals
    if not refusals:
        slot.entry, slot.is_open = tuple(present) if present else entry, False


def _is_rule(name: Any, axes: Any) -> bool:
    own = axes_of(axes)
    return all(isinstance(x, str) and x for x in (name, *own)) and len(set(own)) == len(own)


def from_logical(
    model: Any,
    rules: LogicalRules | Mapping[str, Any] | Iterable[tuple[str, Any]],
    names: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
    *,
    kind: PatternKind = "regex",
    mesh: Any = None,
    strict: bool = False,
) -> StateSharding:
    """The shardings of a model whose dimensions have logical names.

    Args:
      model: a model, an optimizer or a pytree of them, placed or abstract.
      rules: which mesh axes cut a dimension of a name: :class:`LogicalRules`, or what makes them.
      names: names by path, which come before those in the metadata (``out_sharding``): pairs,
        or a mapping, of a pattern for paths, or an NNX filter, and one name for each dimension,
        or None to leave the array whole. The first that matches counts.
      kind: how patterns that are strings are read: ``"regex"`` or ``"glob"``.
      mesh: as in :meth:`LogicalRules.spec`: what it does not have, or what does not divide a
        dimension, is passed over.
      strict: makes it an error if an entry of ``names`` decides about no Variable.

    Returns:
      The spec of each path; ``PartitionSpec()`` for what has no names.

    Raises:
      TypeError: ``rules`` or ``names`` are no pairs, or a filter is none.
      ValueError: names have no rule or are not as many as the dimensions, with all paths; or a
        pattern cannot be read.
      StrictError: ``strict``, and an entry of ``names`` decides about nothing. Otherwise that is
        an :class:`~nnx_sharding.errors.UnusedFilterWarning`.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import from_logical
      >>> model = nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
      >>> names = {"kernel$": ("embed", "mlp"), "bias$": ("mlp",)}
      >>> sharding = from_logical(model, {"embed": None, "mlp": "model"}, names)
      >>> sharding.map_prefix(("kernel",), model.kernel) == P(None, "model")
      True
    """
    rules = rules if isinstance(rules, LogicalRules) else LogicalRules(rules)
    pairs = read_pairs("from_logical", names)
    filters = from_patterns((own for own, _ in pairs), kind)
    predicates = list(map(to_predicate, filters))
    specs, wrong, used = {}, [], set()
    for found in variables(model):
        index = next((i for i, p in enumerate(predicates) if p(found.path, found.variable)), None)
        used.add(index)
        own = annotation(found.variable) if index is None else pairs[index][1]
        shape = found.shape
        if own is None or isinstance(own, Sharding | Format):
            specs[found.path] = PartitionSpec() if own is None else own
        elif problems := rules._problems(own, shape):
            wrong.append(problem_line(found, own, problems))
        else:
            specs[found.path] = rules.spec(own, shape, mesh)
    if wrong:
        raise ValueError(
            "from_logical: these names give no spec:\n"
            + "\n".join(wrong)
            + f"\nThe names with rules are {', '.join(map(repr, rules.names)) or 'none'}."
        )
    unused = [repr(own) for i, own in enumerate(filters) if i not in used]
    if unused:
        message = f"from_logical: these names are for no Variable: {', '.join(unused)}."
        report(UnusedFilterWarning, message, strict=strict)
    return exact(specs)
