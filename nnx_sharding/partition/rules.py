"""``StateSharding`` from patterns for paths, from a placed model, and from metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flax.linen import get_logical_axis_rules
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..specs.fitting import OnIndivisible, axes_of, suggested_spec, suggestion, with_entries
from ..specs.state_sharding import StateSharding
from .logical import LogicalRules
from .patterns import PatternKind, read_pairs, read_patterns
from .variables import FOLLOWING, NamedVariable, from_paths, from_variables, variables

Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]


@_compat.api_boundary
def from_rules(
    rules: Pairs,
    *,
    kind: PatternKind = "regex",
    default: PartitionSpec | Sharding | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> StateSharding:
    """Shardings by patterns for paths; the first pattern that matches decides.

    Args:
      rules: pairs, or a mapping, of a pattern and a sharding. A pattern is a string, a compiled
        regular expression, or an NNX filter. A sharding is a ``PartitionSpec``, a ``Sharding``,
        or None to leave the choice to JAX.
      kind: how strings are read: ``"regex"`` as :class:`~nnx_sharding.filters.PathRegex`,
        ``"glob"`` as :class:`~nnx_sharding.filters.PathGlob`.
      default: the sharding where no pattern matches. Without it such a Variable is an error where
        the rules are used; a last rule ``(..., None)`` leaves the rest to JAX.
      on_indivisible: as in :class:`~nnx_sharding.StateSharding`.

    Raises:
      TypeError: ``rules`` are not pairs, or a filter or sharding is invalid.
      ValueError: patterns are invalid; all of them are listed.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import from_rules
      >>> sharding = from_rules({"up/kernel$": P(None, "model"), "norm": P()}, default=P("data"))
      >>> sharding.map_prefix(("blocks", 3, "up", "kernel"), None)
      P(None, 'model')
    """
    pairs = read_patterns("from_rules", rules, kind)
    if default is not None:
        pairs.append((..., default))
    return StateSharding(pairs, on_indivisible=on_indivisible, activations=FOLLOWING)


@_compat.api_boundary
def override(
    base: StateSharding, overrides: Pairs, *, kind: PatternKind = "regex"
) -> StateSharding:
    """Replaces the shardings of a part of a model; the rest keeps those of ``base``.

    Args:
      base: the shardings to start from; its ``on_indivisible`` and ``activations`` are kept.
      overrides: what has priority over them, in the form of ``rules`` of :func:`from_rules`.
      kind: as for :func:`from_rules`.

    Raises:
      TypeError: ``base`` is not a ``StateSharding``; or as :func:`from_rules`.
      ValueError: as :func:`from_rules`.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import override
      >>> base = StateSharding({...: P("data")})
      >>> override(base, {"^head/": P()}).map_prefix(("head", "kernel"), None)
      P()
    """
    if not isinstance(base, StateSharding):
        raise TypeError(f"override changes a nnx_sharding.StateSharding, got {base!r}.")
    pairs = read_patterns("override", overrides, kind)
    pairs += zip(base.filters, base.shardings, strict=True)
    return StateSharding(pairs, on_indivisible=base.on_indivisible, activations=base.activations)


@_compat.api_boundary
def from_arrays(model: Any) -> StateSharding:
    """The shardings of the arrays of a model, to place another model in the same way.

    Args:
      model: a model, an optimizer or a pytree of them; the arrays may be abstract.

    Returns:
      The sharding of each path; None, which leaves the choice to JAX, for arrays without a sharding
      or not committed to a device, and for Variables whose arrays differ.

    Example:
      >>> import jax
      >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
      >>> from nnx_sharding.partition import from_arrays
      >>> columns = NamedSharding(AbstractMesh((4,), ("model",)), P(None, "model"))
      >>> kernel = jax.ShapeDtypeStruct((4, 8), "float32", sharding=columns)
      >>> from_arrays({"kernel": kernel}).map_prefix(("kernel",), kernel) == columns
      True
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


@_compat.api_boundary
def from_metadata(
    model: Any,
    rules: LogicalRules | Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
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

    Raises:
      TypeError: ``rules`` are not pairs.
      ValueError: metadata is not a sharding, or does not fit the array or the mesh; all paths are
        listed.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding.partition import from_metadata
      >>> with nnx.use_eager_sharding(False):
      ...     kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", "mlp"))
      >>> sharding = from_metadata({"kernel": kernel}, {"embed": None, "mlp": "model"})
      >>> sharding.map_prefix(("kernel",), kernel)
      P(None, 'model')
    """
    rules = get_logical_axis_rules() if rules is None else rules
    rules = rules if isinstance(rules, LogicalRules) else LogicalRules(rules)
    return from_variables(
        "from_metadata: this metadata gives no sharding:",
        model,
        lambda each: _annotated(each, rules, mesh),
        lambda each: each.annotation,
    )


def _annotated(each: NamedVariable, rules: LogicalRules, mesh: Any) -> Any:
    """The sharding in the metadata of a Variable."""
    annotation, shape = each.annotation, each.shape
    if annotation is None or isinstance(annotation, Sharding | Format):
        return PartitionSpec() if annotation is None else annotation
    if not isinstance(annotation, PartitionSpec | tuple | list):
        raise TypeError(f"expected a tuple of names{suggested_spec(annotation)}")
    named = annotation if isinstance(annotation, PartitionSpec) else PartitionSpec(*annotation)
    if shape is not None and len(named) > len(shape):
        raise ValueError(f"{len(named)} names for {len(shape)} dimensions")
    local = read_pairs("sharding_rules", each.metadata.get("sharding_rules") or ())
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
    missing = 0 if shape is None else len(shape) - len(named)
    with_axes = LogicalRules((*((axis, axis) for axis in axes), *rules.rules))
    entries = with_axes.spec((*named.partitions, *[None] * missing), shape, mesh).partitions
    return with_entries(named, entries)
