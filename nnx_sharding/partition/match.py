"""Partition specs by regular expressions over paths."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .. import _compat
from ..core.fit import shape_of
from ..errors import UnusedFilterWarning, report
from ..fitting import axis_problems, shape_problems, suggested_spec, with_entries
from ..paths import Path, path_key, path_string, plain_key
from .given import from_patterns, read_pairs
from .paths import Found, variables

_MIN_SIZE = 16384


def match_partition_rules(
    rules: Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
    *,
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    r"""Partition specs by regular expressions that are searched for in paths; the first one wins.

    Rules that match nothing, or only what earlier ones take, are listed in a warning
    (:class:`~nnx_sharding.errors.UnusedFilterWarning`); a last rule that matches everything is
    not.

    Args:
      rules: pairs of a regular expression and a spec (None: leave it to JAX). Paths are written
        ``blocks/3/up/kernel`` and end at the Variable.
      tree: arrays or modules, also abstract ones. Only shapes are looked at.
      min_size: arrays with fewer elements than this get ``P()``, as scalars do. None takes the
        environment variable ``MIN_SHARDING_SIZE``, or 16384.
      strict: whether ``min_size`` counts, scalars get ``P()``, and specs that are longer than the
        rank of their array are cut. If false, everything gets what its first rule has, whatever
        that is.
      mesh: what the specs have to fit; None checks nothing.

    Returns:
      The tree with specs in the place of arrays: an ``nnx.State`` for a module, a spec for a
      Variable. It goes wherever a prefix of specs does.

    Raises:
      TypeError: the rules are not pairs, or, with ``strict``, a spec is invalid.
      ValueError: a regular expression is none; arrays match no rule; or specs do not fit the
        mesh. Each time all are named.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import match_partition_rules
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> specs = match_partition_rules([("kernel$", P(None, "model")), (".*", P())], model)
      >>> specs["kernel"] == P(None, "model"), specs["bias"] == P()
      (True, True)
    """
    pairs = read_pairs("match_partition_rules", rules)
    wrong = [
        f"  {own!r}: {spec!r}{suggested_spec(spec)}"
        for own, spec in pairs
        if strict and spec is not None and not isinstance(spec, PartitionSpec)
    ]
    if wrong:
        message = "match_partition_rules: these rules have no PartitionSpec:\n"
        raise TypeError(message + "\n".join(wrong))
    filters = from_patterns([pattern for pattern, _ in pairs], "regex")
    small = int(os.environ.get("MIN_SHARDING_SIZE", _MIN_SIZE)) if min_size is None else min_size
    seen: list[list[int]] = []
    unmatched: list[str] = []
    misfits: list[str] = []

    def choose(path: Path, found: Found) -> Any:
        shapes = [shape for shape in map(shape_of, found.arrays) if shape is not None]
        if strict and not shapes:
            return None
        seen.append([number for number, own in enumerate(filters) if own(path, found.variable)])
        if strict and all(math.prod(shape) < max(small, 2) for shape in shapes):
            return PartitionSpec()
        if not seen[-1]:
            shape = f", shape {shapes[0]}" if shapes else ""
            unmatched.append(f"  {path_string(path)}{shape}")
            return None
        spec = pairs[seen[-1][0]][1]
        if spec is not None and strict:
            spec = _cut(spec, min(map(len, shapes)))
        if isinstance(spec, PartitionSpec) and shapes and mesh is not None:
            problems = axis_problems(spec, mesh) or [
                problem for shape in shapes for problem in shape_problems(spec, mesh, shape)
            ]
            if problems:
                where = f"{path_string(path)}, shape {shapes[0]}, {spec}"
                misfits.append(f"  {where}: {'; '.join(problems)}")
        return spec

    specs = by_variable(tree, choose)
    problems = {"no rule matches": unmatched, "these specs do not fit the mesh": misfits}
    listed = [f"{what}:\n" + "\n".join(lines) for what, lines in problems.items() if lines]
    if listed:
        raise ValueError("match_partition_rules: " + "\n".join(listed))
    _report_useless([pattern for pattern, _ in pairs], seen)
    return specs


def _cut(spec: PartitionSpec, rank: int) -> PartitionSpec:
    return with_entries(spec, spec.partitions[:rank])


def _report_useless(patterns: Sequence[Any], seen: Sequence[Sequence[int]]) -> None:
    """Warns of rules that decide about nothing.

    Args:
      patterns: the rules.
      seen: for each path the numbers of those that match it, in order.
    """
    lines = []
    for number, pattern in enumerate(patterns):
        over = {numbers[0] for numbers in seen if number in numbers}
        rests = number == len(patterns) - 1 and all(number in numbers for numbers in seen)
        if number in over or rests:
            continue
        taken = ", ".join(repr(patterns[other]) for other in sorted(over))
        what = f"matches only what is taken by {taken} before it" if over else "matches nothing"
        lines.append(f"  {pattern!r} {what}")
    if lines:
        message = "match_partition_rules: these rules are of no use:\n" + "\n".join(lines)
        report(UnusedFilterWarning, message, strict=False)


def create_pattern_based_partition_spec(
    pattern: str,
    mesh: Mesh | AbstractMesh | None = None,
    default_spec: PartitionSpec | None = None,
) -> Callable[[str, Any], PartitionSpec]:
    """Reads rules such as ``"attention|mlp->data,hidden->None.model"``.

    Args:
      pattern: rules with commas between them, each a regular expression, ``->`` and the axes of
        the dimensions with dots (or commas) between them; the first that is found in a name
        counts. ``None`` leaves a dimension whole, ``data+model`` cuts it by several axes.
      mesh: where given, it must have the axes.
      default_spec: for names that no rule matches; None for ``P()``.

    Returns:
      A function of a name and its array (or anything with a shape) to the spec, cut to the rank.

    Raises:
      ValueError: it is no such text, or the mesh does not have the axes.

    Example:
      >>> import numpy as np
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import create_pattern_based_partition_spec
      >>> spec_of = create_pattern_based_partition_spec("up->None.data+model,down->model")
      >>> spec_of("mlp/up/kernel", np.ones((4, 8))) == P(None, ("data", "model"))
      True
    """
    rules: list[tuple[str, list[Any]]] = []
    for piece in pattern.split(","):
        own, arrow, dimensions = map(str.strip, piece.rpartition("->"))
        if arrow:
            rules.append((own, []))
        entries = [tuple(map(str.strip, entry.split("+"))) for entry in dimensions.split(".")]
        if not rules or not all(map(all, entries)) or (arrow and not own):
            raise ValueError(
                f"expected rules such as 'up|gate->None.model', got {piece!r} in {pattern!r}."
            )
        rules[-1][1].extend(
            None if axes == ("None",) else axes if axes[1:] else axes[0] for axes in entries
        )
    specs = [default_spec or PartitionSpec(), *(PartitionSpec(*entries) for _, entries in rules)]
    problems = [] if mesh is None else [p for spec in specs for p in axis_problems(spec, mesh)]
    if problems:
        raise ValueError(f"{pattern!r} does not fit the mesh: {'; '.join(problems)}.")
    filters = from_patterns([own for own, _ in rules], "regex")

    def spec_of(name: str, array: Any) -> PartitionSpec:
        found = (spec for own, spec in zip(filters, specs[1:], strict=True) if own((name,), array))
        return _cut(next(found, specs[0]), len(shape_of(array) or ()))

    return spec_of


def by_variable(tree: Any, choose: Callable[[Path, Found], Any]) -> Any:
    """The tree with something for each Variable and array: modules become States of it."""
    parts, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_compat.is_graph_object)
    chosen = []
    for keys, part in parts:
        prefix = tuple(plain_key(path_key(key)) for key in keys)
        found = {own.path: choose((*prefix, *own.path), own) for own in variables(part)}
        chosen.append(nnx.from_flat_state(found) if _compat.is_node(part) else found.get(()))
    return jax.tree_util.tree_unflatten(treedef, chosen)
