"""Attention of one device: block by block, or by a function of the user, such as a kernel.

A function of the user is called with arrays of ``(batch, length, heads, features)``, and with
keywords. Each of these keywords is passed if it is needed and the function has a parameter for it:

    is_causal                           queries and keys are the whole sequence, in order; or
    is_causal, query_positions,         they are where these integers say, (length,) or
      key_positions                     (batch, length)
    window                              as for is_causal, in the same two cases
    query_segment_ids, key_segment_ids  integers, (batch, length)
    scale                               the factor of the scores, if it is not 1 / sqrt(features)
    precision                           of products, unless that is None
    dropout_rate, dropout_rng,          the key is different for each shard
      broadcast_dropout, deterministic

If the function has no parameter for causal, a window or segments, ``mask`` hides the keys: booleans
of ``(batch or 1, heads or 1, queries or 1, keys)``. Without a parameter for the scale, the queries
are multiplied by a factor.

Words from ``blocks.py``: the *rule* has the options, such as causal; the *info* of tokens are their
positions and segments; the *visibility* has the info of queries, a mask and the key of dropout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .attention_inputs import Inputs
from .blocks import AttentionArrays, Dropout, Rule, TokenInfo, attend_in_blocks, visible_by_info

# Called with the queries, keys and values of one device, and keywords.
AttentionFunction = Callable[..., jax.Array]
LocalAttention = Callable[[AttentionArrays], jax.Array]


def local_attention(
    caller: str, attention: AttentionFunction | None, inputs: Inputs, *, is_whole: bool
) -> LocalAttention:
    """Returns the function that attends on each device.

    Args:
      caller: the name of the public function, for errors.
      attention: a function of the user; None for that of this library.
      inputs: the arguments of the whole attention.
      is_whole: whether a device has all queries and all keys.

    Returns:
      A function of the arrays that one device has, which returns the outputs of its queries.

    Raises:
      ValueError: there is dropout, for which the function of the user has no parameter.
    """
    rule = inputs.rule
    if attention is None:
        return functools.partial(attend_in_blocks, rule)
    names = parameter_names(attention)
    if rule.dropout_rate and "dropout_rng" not in names:
        raise ValueError(f"{caller}: attention has no parameter dropout_rng, for dropout.")
    # Only for whole sequences in order do `is_causal` and `window` mean the same to a function that
    # gets no positions.
    in_order = is_whole and inputs.positions is None
    layout = inputs.layout
    # The axes along which devices get different keys of dropout. Axes that replicate the arrays are
    # left out, because devices along these axes have to compute the same.
    sharding = {*layout.batch, *layout.sequence, *layout.heads, *_compat.spmd_axes()}
    mapped = tuple(sorted(layout.mapped & sharding))

    def attend(arrays: AttentionArrays) -> jax.Array:
        """Calls the user's function with the keywords that it takes, and a mask for the rest."""
        query, key, value, key_info, visibility = arrays
        keywords, masks = _split_rule(
            rule, names, queries=visibility.query_info, keys=key_info, in_order=in_order
        )
        if rule.scale != query.shape[-1] ** -0.5:  # the scale that the function has by itself
            if "scale" in names:
                keywords["scale"] = rule.scale
            else:
                query = query * (rule.scale * query.shape[-1] ** 0.5)
        # A function without the parameter chooses its precision itself.
        if rule.precision is not None and "precision" in names:
            keywords["precision"] = rule.precision
        if visibility.dropout is not None:
            of_dropout = _dropout_keywords(rule, visibility.dropout, mapped)
            keywords |= {name: x for name, x in of_dropout.items() if name in names}
        mask = _join_masks(masks, visibility.mask)
        if mask is not None:
            keywords["mask"] = mask
        return attention(query, key, value, **keywords)

    return attend


def _dropout_keywords(rule: Rule, dropout: Dropout, mapped: tuple[str, ...]) -> dict[str, Any]:
    """Returns the keywords for dropout, with a key of this device, in a function of each device.

    Args:
      mapped: the axes along which devices get different keys; empty for one key. With one key for
        all devices, all shards would drop the weights at the same places.
    """
    device = jax.lax.axis_index(mapped) if mapped else 0
    # The key has two words, so it is a key of this implementation, whichever implementation is the
    # default of JAX.
    key_of_all = jax.random.wrap_key_data(dropout.words, impl="threefry2x32")
    return {
        "dropout_rate": rule.dropout_rate,
        "dropout_rng": jax.random.fold_in(key_of_all, device),
        # If all rows drop the same weights, `rows` has one number.
        "broadcast_dropout": dropout.rows.size == 1,
        "deterministic": False,
    }


def parameter_names(function: AttentionFunction) -> frozenset[str]:
    """Returns the names of a function's parameters; empty if Python does not know them (C code)."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def takes_positions(attention: AttentionFunction | None) -> bool:
    """Whether an attention function can be told the positions of tokens that are not in order.

    None is the attention of this library, which can.
    """
    needed = {"query_positions", "key_positions"}
    return attention is None or needed <= parameter_names(attention)


def _split_rule(
    rule: Rule, names: frozenset[str], *, queries: TokenInfo, keys: TokenInfo, in_order: bool
) -> tuple[dict[str, Any], list[jax.Array]]:
    """Splits what hides keys into keywords that the user's function takes, and masks for the rest.

    Args:
      in_order: whether both are the whole sequence, in its order.

    Returns:
      The keywords, and masks of (b or 1, queries, keys) for all that no keyword says.
    """
    keywords: dict[str, Any] = {}
    rest = rule  # the options for which there is no keyword
    # Out of order, causal and window depend on the positions of queries and of keys, so a function
    # has to take both.
    takes_positions = {"query_positions", "key_positions"} <= names
    if in_order or takes_positions:
        if rule.is_causal and "is_causal" in names:
            keywords["is_causal"] = True
            rest = rest._replace(is_causal=False)
        if rule.window is not None and "window" in names:
            keywords["window"] = rule.window
            rest = rest._replace(window=None)
        if keywords and takes_positions:  # tokens have no positions unless these ask for them
            keywords["query_positions"] = queries.positions
            keywords["key_positions"] = keys.positions
    segments = {"query_segment_ids": queries.segments, "key_segment_ids": keys.segments}
    if queries.segments is not None and segments.keys() <= names:
        keywords |= segments
        # `visible_by_info` makes no mask of segments if queries have none.
        queries = queries._replace(segments=None)
    return keywords, visible_by_info(rest, queries, keys)


def _join_masks(masks: list[jax.Array], user_mask: jax.Array | None) -> jax.Array | None:
    """Joins masks of (b or 1, queries, keys), and the user's mask, which has heads, into one mask.

    Returns:
      The mask, (b or 1, heads or 1, queries or 1, keys); None if there is none.
    """
    all_masks = [mask[:, None] for mask in masks]  # (b or 1, 1, queries, keys)
    if user_mask is not None:
        all_masks.append(user_mask)
    return functools.reduce(jnp.logical_and, all_masks) if all_masks else None
