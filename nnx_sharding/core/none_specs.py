"""Argument values that are static because their spec is None, as in ``jax.shard_map``."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from .. import _compat
from .signature import Parameters, Signature, align_specs
from .static_equality import Static
from .targets import is_spec

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def with_static_values(
    specs: Any,
    option: str,
    parameters: Parameters,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Signature, tuple[Any, ...], dict[str, Any]]:
    """A call in which non-arrays are static where their spec is None.

    ``specs`` are those of the option with the name ``option``, as the user wrote them.
    """
    # An argument without a spec may be a different number at each call, so it stays dynamic.
    positional, named = align_specs(specs, parameters, signature, option, default=PartitionSpec())
    found: dict[Any, Any] = {**dict(zip(signature.dynamic, positional, strict=True)), **named}
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    plain = {which for which, s in found.items() if s is None and isinstance(values[which], PLAIN)}
    signature = signature._replace(
        static=signature.static.union(plain.intersection(signature.dynamic)),
        static_keywords=signature.static_keywords.union(plain.intersection(named)),
    )
    values |= {which: _fixed(found[which], values[which]) for which in found.keys() - plain}
    return signature, tuple(map(values.get, range(len(args)))), {k: values[k] for k in kwargs}


def _fixed(spec: Any, value: Any) -> Any:
    """A pytree in which non-arrays with the spec None are static."""
    if spec is None:
        return jax.tree_util.tree_map(_if_no_array, value, is_leaf=_compat.is_graph_object)
    if is_spec(spec):
        return value
    specs, treedef = jax.tree_util.tree_flatten(spec, is_leaf=lambda x: x is not spec)
    try:
        parts: list[Any] = treedef.flatten_up_to(value)  # type: ignore[attr-defined]
    except ValueError:  # not a prefix; reported with all other problems
        return value
    return jax.tree_util.tree_unflatten(treedef, map(_fixed, specs, parts))


def _if_no_array(x: Any) -> Any:
    is_array = _compat.is_graph_object(x) or (not isinstance(x, PLAIN) and _compat.is_array_like(x))
    return x if is_array else Static.of(x)
