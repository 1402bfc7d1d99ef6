"""``StateSharding`` from patterns for paths, from a placed model, and from metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flax.linen import get_logical_axis_rules
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..fitting import (
    OnIndivisible,
    axes_of,
    suggested_spec,
    suggestion,
    with_entries,
)
from ..state_sharding import StateSharding
from .given import (
    PatternKind,
    annotation,
    from_patterns,
    metadata,
    problem_line,
    read_pairs,
)
from .logical import LogicalRules
from .paths import Found, exact, variables

Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]


def from_rules(
    rules: Pairs,
    *,
    kind: PatternKind = "regex",
    default: PartitionSpec | Sharding | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> StateSharding:
    """Shardings by patterns for paths; the first pattern that matches counts.

    Args:
      rules: pairs, or a mapping, of a pattern and a sharding. A pattern is a string, what
        ``re.compile`` made, or an NNX filter (a tag is ``nnx.WithTag("...")``). A sharding is a
        ``PartitionSpec``, a ``Sharding``, or None for "leave it to JAX".
      kind: how strings are read: ``"regex"`` as :class:`~nnx_sharding.filters.PathRegex`,
        ``"glob"`` as :class:`~nnx_sharding.filters.PathGlob`.
      default: the sharding of what no pattern matches. Without it that is an error where the
        rules are used; a last rule ``(..., None)`` leaves the rest to JAX.
      on_indivisible: as in :class:`~nnx_sharding.StateSharding`.

    Raises:
      TypeError: there are no pairs, or something else stands where a filter or sharding belongs.
      ValueError: patterns cannot be read; all of them are named.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import from_rules
      >>> sharding = from_rules({"up/kernel$": P(None, "model"), "norm": P()}, default=P("data"))
      >>> sharding.map_prefix(("blocks", 3, "up", "kernel"), None) == P(None, "model")
      True
      >>> sharding.map_prefix(("embed", "embedding"), None) == P("data")
      True
    """
    pairs = _read(rules, "from_rules", kind)
    if default is not None:
        pairs.append((..., default))
    return StateSharding(pairs, on_indivisible=on_indivisible)


def override(
    base: StateSharding, overrides: Pairs, *, kind: PatternKind = "regex"
) -> StateSharding:
    """Other shardings for a part of a model; ``base`` stays as it is for the rest.

    Args:
      base: the shardings to begin with; its ``on_indivisible`` is kept.
      overrides: what comes before them, as ``rules`` of :func:`from_rules`.
      kind: how strings among the patterns are read: ``"regex"`` or ``"glob"``.

    Raises:
      TypeError: ``base`` is no ``StateSharding``; or as :func:`from_rules`.
      ValueError: patterns cannot be read; all of them are named.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import override
      >>> base = StateSharding({...: P("data")})
      >>> override(base, {"^head/": P()}).map_prefix(("head", "kernel"), None) == P()
      True
    """
    if not isinstance(base, StateSharding):
        raise TypeError(f"override changes a nnx_sharding.StateSharding, not {base!r}.")
    own = zip(base.filters, base.shardings, strict=True)
    return StateSharding(
        [*_read(overrides, "override", kind), *own], on_indivisible=base.on_indivisible
    )


def _read(rules: Pairs, caller: str, kind: PatternKind) -> list[tuple[Any, Any]]:
    pairs = read_pairs(caller, rules)
    filters = from_patterns((own for own, _ in pairs), kind)
    return list(zip(filters, (sharding for _, sharding in pairs), strict=True))


def from_arrays(model: Any) -> StateSharding:
    """The shardings that the arrays of a model have, to place another model in the same way.

    Args:
      model: a model, an optimizer or a pytree of them; the arrays may be abstract.

    Returns:
      The sharding of each path. None, which leaves it to JAX, for an array that has none, for
      one that is not committed to its device, and for a Variable whose arrays differ.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
      >>> from nnx_sharding.partition import from_arrays
      >>> columns = NamedSharding(AbstractMesh((4,), ("model",)), P(None, "model"))
      >>> array = jax.ShapeDtypeStruct((4, 8), "float32", sharding=columns)
      >>> model = nnx.Dict(kernel=nnx.Param(array))
      >>> from_arrays(model).map_prefix(("kernel",), model.kernel) == columns
      True
    """
    specs = {}
    for found in variables(model):
        own = set(map(_sharding_of, found.arrays))
        specs[found.path] = own.pop() if len(own) == 1 else None
    return exact(specs)


def _sharding_of(array: Any) -> Sharding | None:
    sharding = getattr(array, "sharding", None)
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    return sharding if getattr(array, "committed", False) else None


def from_metadata(
    model: Any,
    rules: LogicalRules | Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    mesh: Any = None,
) -> StateSharding:
    """The shardings that the metadata of the Variables ask for.

    Args:
      model: a model, an optimizer or a pytree of them, placed or abstract. In the metadata
        ``out_sharding`` is read (what ``nnx.with_partitioning`` writes; ``sharding`` and
        ``sharding_names`` of older models likewise): names, a ``PartitionSpec`` or a sharding.
      rules: mesh axes for logical names: :class:`~nnx_sharding.partition.logical.LogicalRules`
        or what makes them. None takes those of ``nnx.logical_axis_rules``. Before them come
        the ``sharding_rules`` of the Variable itself. A name without a rule is a mesh axis.
      mesh: the mesh, whose axes the names without a rule have to be; for rules as in
        :meth:`LogicalRules.spec <nnx_sharding.partition.LogicalRules.spec>`.

    Returns:
      The sharding of each path; ``PartitionSpec()`` where the metadata has none. Mesh axes that
      come without rules are those of ``nnx.get_partition_spec``; with rules no axis is used twice.

    Raises:
      TypeError: ``rules`` are no pairs.
      ValueError: what the metadata has is no sharding, or does not fit the array or the mesh;
        with all paths.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import from_metadata
      >>> columns = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
      >>> layer = lambda: nnx.Linear(4, 8, use_bias=False, kernel_init=columns, rngs=nnx.Rngs(0))
      >>> with nnx.use_eager_sharding(False):
      ...     model = nnx.eval_shape(layer)
      >>> sharding = from_metadata(model, {"embed": None, "mlp": "model"})
      >>> sharding.map_prefix(("kernel",), model.kernel) == P(None, "model")
      True
    """
    given = get_logical_axis_rules() if rules is None else rules
    given = given if isinstance(given, LogicalRules) else LogicalRules(given)
    specs, wrong = {}, []
    for found in variables(model):
        own = annotation(found.variable)
        try:
            specs[found.path] = _spec_of(found, own, given, mesh)
        except (TypeError, ValueError) as error:
            wrong.append(problem_line(found, own, [str(error)]))
    if wrong:
        raise ValueError("from_metadata: this metadata gives no sharding:\n" + "\n".join(wrong))
    return exact(specs)


def _spec_of(found: Found, own: Any, given: LogicalRules, mesh: Any) -> Any:
    if own is None or isinstance(own, Sharding | Format):
        return PartitionSpec() if own is None else own
    if not isinstance(own, PartitionSpec | tuple | list):
        raise TypeError(f"it is no tuple of names{suggested_spec(own)}")
    named = own if isinstance(own, PartitionSpec) else PartitionSpec(*own)
    shape = found.shape
    if shape is not None and len(named) > len(shape):
        raise ValueError(f"{len(named)} names for {len(shape)} dimensions")
    local = read_pairs("sharding_rules", metadata(found.variable).get("sharding_rules") or ())
    rules = LogicalRules((*local, *given.rules))
    axes = [
        name for entry in named.partitions for name in axes_of(entry) if name not in rules.names
    ]
    problems = _axis_problems(axes, rules, mesh)
    if problems:
        raise ValueError("; ".join(problems))
    if not rules.rules:
        return named
    missing = 0 if shape is None else len(shape) - len(named)
    with_axes = LogicalRules((*((axis, axis) for axis in axes), *rules.rules))
    entries = with_axes.spec((*named.partitions, *[None] * missing), shape, mesh).partitions
    return with_entries(named, entries)


def _axis_problems(axes: list[Any], rules: LogicalRules, mesh: Any) -> list[str]:
    """What is wrong with names that have no rule, and so are mesh axes."""
    problems = [f"{axis!r} cuts {n} dimensions" for axis, n in Counter(axes).items() if n > 1]
    for axis in axes:
        if not isinstance(axis, str):
            problems.append(f"{axis!r} is no name")
        elif mesh is not None and axis not in mesh.axis_names:
            near = suggestion(axis, (*rules.names, *mesh.axis_names))
            problems.append(f"{axis!r} has no rule and is no axis of the mesh{near}")
    return problems
