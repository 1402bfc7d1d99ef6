"""``StateSharding`` from rules for paths, and from the arrays of a placed model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..errors import listed
from ..specs.filters import PathRegex
from ..specs.fitting import OnIndivisible
from ..specs.state_sharding import StateSharding
from .variables import FOLLOWING, from_paths, variables

Pairs = Mapping[Any, Any] | Iterable[tuple[Any, Any]]


def read_pairs(caller: str, pairs: Any) -> list[tuple[Any, Any]]:
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
    for pattern, value in read_pairs(caller, pairs):
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
