"""Arguments that are static because they are not arrays, and have the spec None.

``jax.shard_map`` passes such values to the function as they are; other transforms refuse them.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from .. import _compat
from .argument_specs import align_specs
from .prefixes import is_spec
from .signature import Parameters, Signature
from .static_equality import Static

# The types of values that are static if their spec is None, as in `jax.shard_map`.
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))


def with_static_values(
    specs: object,
    option: str,
    parameters: Parameters,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Signature, tuple[Any, ...], dict[str, Any]]:
    """Makes arguments static that are not arrays and whose spec is None, as `jax.shard_map` does.

    Args:
      specs: the specs of the arguments, as the user wrote them.
      option: the name of the specs in messages.
      parameters: the parameters of the function.
      signature: the roles of the arguments.
      args: the positional arguments.
      kwargs: the keyword arguments.

    Returns:
      The signature, with more static arguments; the positional arguments; the keyword arguments. A
      leaf of a pytree that is static for the same reason is a ``Static`` value.
    """
    # The default spec of an argument that the specs do not mention is P(), and not None, because
    # such an argument may be a different number in each call. So it stays dynamic.
    positional, named = align_specs(specs, parameters, signature, option, default=PartitionSpec())
    # The key is the position of an argument, or its name if it is passed by keyword.
    spec_of: dict[Any, Any] = {**dict(zip(signature.dynamic, positional, strict=True)), **named}
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    # 1. Arguments that are static as a whole.
    without_spec = [key for key, spec in spec_of.items() if spec is None]
    new_static = {key for key in without_spec if isinstance(values[key], PLAIN_TYPES)}
    signature = signature._replace(static=signature.static | new_static)
    # 2. Leaves of other arguments.
    for key in spec_of.keys() - new_static:
        values[key] = _with_static_leaves(spec_of[key], values[key])
    args = tuple(values[i] for i in range(len(args)))
    return signature, args, {name: values[name] for name in kwargs}


def _with_static_leaves(spec: Any, value: object) -> Any:
    """Returns a pytree in which leaves that are no arrays are ``Static`` if their spec is None.

    ``{"a": None, "b": P()}`` and ``{"a": 3, "b": 4}`` give ``{"a": Static(3), "b": 4}``.
    """
    if spec is None:  # the spec is for all leaves of the value
        return jax.tree_util.tree_map(_static_unless_array, value, is_leaf=_compat.is_graph_object)
    if is_spec(spec):
        return value
    # Only one level of both trees is opened. Everything below the root counts as a leaf, even None,
    # so that the next call sees it.
    specs, treedef = jax.tree_util.tree_flatten(spec, is_leaf=lambda x: x is not spec)
    try:
        parts: list[Any] = treedef.flatten_up_to(value)  # type: ignore[attr-defined]
    except ValueError:  # the specs are no prefix, which is reported later
        return value
    return jax.tree_util.tree_unflatten(treedef, map(_with_static_leaves, specs, parts))


def _static_unless_array(x: object) -> Any:
    """Returns an array or an object of a graph unchanged, and anything else as a ``Static``."""
    is_array = _compat.is_graph_object(x) or (
        not isinstance(x, PLAIN_TYPES) and _compat.is_array_like(x)
    )
    return x if is_array else Static.of(x)
