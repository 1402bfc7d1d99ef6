"""Partition specs by regular expressions over paths, under the names of eformer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..errors import UnusedFilterWarning, by_kind, message, raise_listed, report
from ..filters import shadowed
from ..fitting import fit_sharding, suggested_spec, with_entries
from ..partition.patterns import read_patterns
from ..partition.variables import NamedVariable, map_variables


def match_partition_rules(
    rules: Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
    *,
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    r"""Partition specs by regular expressions that are searched for in paths; the first one wins.

    Rules that match nothing, or only what earlier ones match, are listed in a warning
    (:class:`~nnx_sharding.errors.UnusedFilterWarning`), except a last rule that matches everything.

    Args:
      rules: pairs of a regular expression and a spec (None: JAX chooses). Paths are written
        ``blocks/3/up/kernel`` and end at the Variable.
      tree: arrays or modules, also abstract ones.
      min_size: arrays with fewer elements get ``P()``, as scalars do. None for the environment
        variable ``MIN_SHARDING_SIZE``, or 16384.
      strict: if false, a leaf gets the spec of the first rule that matches, unchanged, whatever its
        size and rank; else specs are truncated to the rank.
      mesh: the mesh that the specs have to fit; None for no check.

    Returns:
      A prefix of specs, with an ``nnx.State`` for a module, a spec for an array or a Variable.

    Raises:
      TypeError: the rules are not pairs, or, with ``strict``, a spec is invalid.
      ValueError: a regular expression is invalid, arrays match no rule, or specs do not fit.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.constraints import match_partition_rules
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> specs = match_partition_rules([("kernel$", P(None, "model")), (".*", P())], model)
      >>> specs["kernel"] == P(None, "model"), specs["bias"] == P()
      (True, True)
    """
    pairs = read_patterns("match_partition_rules", rules, "regex")
    filters, specs = [filter_ for filter_, _ in pairs], [spec for _, spec in pairs]
    patterns = [repr(getattr(filter_, "text", filter_)) for filter_ in filters]
    wrong = [
        f"  {pattern}: {spec!r}{suggested_spec(spec)}"
        for pattern, spec in zip(patterns, specs, strict=True)
        if strict and spec is not None and not isinstance(spec, PartitionSpec)
    ]
    raise_listed(TypeError, "match_partition_rules: these rules have no PartitionSpec:", wrong)
    small = int(os.environ.get("MIN_SHARDING_SIZE", 16384)) if min_size is None else min_size
    matches: list[list[int]] = []
    unmatched: list[str] = []
    misfits: list[str] = []

    def choose(each: NamedVariable) -> Any:
        shapes = [tuple(x.shape) for x in each.arrays if hasattr(x, "shape")]
        shapes += [() for x in each.arrays if isinstance(x, bool | int | float | complex)]
        if strict and not shapes:
            return None
        numbers = [n for n, filter_ in enumerate(filters) if filter_(each.path, each.variable)]
        matches.append(numbers)
        if strict and all(math.prod(shape) < max(small, 2) for shape in shapes):
            return PartitionSpec()
        if not numbers:
            unmatched.append(f"  {each.name}" + (f", shape {shapes[0]}" if shapes else ""))
            return None
        spec = specs[numbers[0]]
        if spec is not None and strict:
            spec = with_entries(spec, spec.partitions[: min(map(len, shapes))])
        fits = (fit_sharding(spec, mesh, shape) for shape in shapes if mesh is not None)
        misfits.extend([fit.line(each.name) for fit in fits if fit.problems][:1])
        return spec

    result = map_variables(tree, choose)
    problems = {"no rule matches": unmatched, "these specs do not fit the mesh": misfits}
    if kinds := by_kind(problems):
        raise ValueError("match_partition_rules: " + "\n".join(kinds))
    lines = []
    for number, by in shadowed(len(filters), matches).items():
        if number == len(filters) - 1 and all(number in numbers for numbers in matches):
            continue
        earlier = ", ".join(patterns[other] for other in by)
        what = f"matches only what {earlier} before it matches" if by else "matches nothing"
        lines.append(f"  {patterns[number]} {what}")
    if lines:
        text = message("match_partition_rules: these rules are unused:", lines)
        report(UnusedFilterWarning, text, strict=False)
    return result


def create_pattern_based_partition_spec(
    pattern: str,
    mesh: Mesh | AbstractMesh | None = None,
    default_spec: PartitionSpec | None = None,
) -> Callable[[str, Any], PartitionSpec]:
    """Reads rules such as ``"attention|mlp->data,hidden->None.model"``.

    Args:
      pattern: rules separated by commas, each a regular expression, ``->`` and the axes of the
        dimensions, separated by dots (or commas); the first that is found in a name decides.
        ``None`` replicates a dimension, ``data+model`` shards it over both axes.
      mesh: a mesh that must have the axes; None for no check.
      default_spec: the spec of names that no rule matches; None for ``P()``.

    Returns:
      A function from a name and its array (or anything with a shape) to the spec, truncated to the
      rank.

    Raises:
      ValueError: the text is not of this form, or the mesh does not have the axes.

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
        regex, arrow, dimensions = map(str.strip, piece.rpartition("->"))
        if arrow:
            rules.append((regex, []))
        entries = [tuple(map(str.strip, entry.split("+"))) for entry in dimensions.split(".")]
        if not rules or not all(map(all, entries)) or (arrow and not regex):
            raise ValueError(
                f"expected rules such as 'up|gate->None.model', got {piece!r} in {pattern!r}."
            )
        rules[-1][1].extend(
            None if axes == ("None",) else axes if axes[1:] else axes[0] for axes in entries
        )
    default = default_spec or PartitionSpec()
    pairs = read_patterns(
        "create_pattern_based_partition_spec",
        [(regex, PartitionSpec(*entries)) for regex, entries in rules],
        "regex",
    )
    specs = [default, *(spec for _, spec in pairs)]
    problems = [str(p) for spec in specs for p in fit_sharding(spec, mesh).problems]
    if problems:
        raise ValueError(f"{pattern!r} does not fit the mesh: {'; '.join(problems)}.")

    def spec_of(name: str, array: Any) -> PartitionSpec:
        spec = next((spec for filter_, spec in pairs if filter_((name,), array)), default)
        return with_entries(spec, spec.partitions[: len(getattr(array, "shape", ()))])

    return spec_of
