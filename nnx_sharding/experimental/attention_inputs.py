"""What attention over a sharded sequence is called with: checked, and in one form for all methods.

``ring``, ``all_to_all`` and ``all_gather`` take the same arguments: those of Flax's attention
functions and some more. `inputs_of` raises an error that lists all arguments that do not fit, and
turns the arguments into:

    Rule         what is known while tracing: causal, window, scale, dropout rate
    Layout       the mesh axes of the sequence, the batch and the heads
    AttentionArrays
                 queries; keys and values, which are padded until the devices divide them
    TokenInfo    of queries, or of keys: their positions for causal attention and windows, their
                 segments, and their places in the whole sequence, for dropout
    Visibility   the TokenInfo of queries, a 4-D mask, the key of dropout

Methods differ in two points. In an all-to-all, devices *exchange* heads for positions within some
axes of the sequence, so the number of these devices has to divide the heads. A function of the user
for each device, such as a kernel, is *opaque*: the compiler cannot split it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from ..core.constrain import given_mesh, retype, type_mesh, type_spec
from ..errors import raise_if_any
from ..specs.fitting import pad_entries, suggestion
from .blocks import AttentionArrays, Dropout, Rule, TokenInfo, Visibility, reshape
from .layout import Axes, Layout, layout_of


class AttentionOptions(TypedDict, total=False):
    """The keywords that all methods share; :func:`ring_attention` describes them."""

    is_causal: bool
    window: int | None
    input_positions: ArrayLike | None
    segment_ids: jax.Array | None
    rope: Callable[..., jax.Array] | None
    scale: float | None
    balanced: bool
    mesh: Mesh | AbstractMesh | None
    batch_axis: str | Axes | None
    head_axis: str | Axes | None
    dtype: DTypeLike | None
    precision: jax.lax.PrecisionLike
    dropout_rate: float
    deterministic: bool
    module: object
    broadcast_dropout: bool
    dropout_rng: jax.Array | None
    promote_dtype: object


class Inputs(NamedTuple):
    """The arguments of an attention, in one form."""

    rule: Rule
    layout: Layout
    arrays: AttentionArrays  # their positions are None unless attention is causal or has a window
    positions: ArrayLike | None  # the positions as given; None if tokens are in order
    balanced: bool  # whether tokens may be moved to the balanced order

    @property
    def moves_tokens(self) -> bool:
        """Whether tokens move to the balanced order before attention, and outputs move back."""
        size, length = self.layout.count(self.layout.sequence), self.arrays.query.shape[1]
        # In causal attention, devices with later tokens have more work.
        is_uneven = self.rule.is_causal and size > 1
        has_chunks = length % (2 * size) == 0  # two of equal length for each device
        # Positions and a mask of the user are in the order of the tokens, so these have to stay.
        is_in_order = self.positions is None and self.arrays.visibility.mask is None
        return self.balanced and is_uneven and has_chunks and is_in_order


def inputs_of(
    caller: str,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    bias: object,
    mask: ArrayLike | None,
    sequence: Axes,
    *,
    is_opaque: bool = False,
    exchanged: Axes = (),
    options: AttentionOptions,
) -> Inputs:
    """Checks the arguments of an attention, and brings them in one form.

    Args:
      caller: the name of the function of the user.
      arrays: queries, keys and values.
      bias: not supported.
      mask: as given.
      sequence: the mesh axes that shard the sequence, major first.
      is_opaque: whether the attention of each device is a function of the user.
      exchanged: the axes of ``sequence`` within which heads are exchanged for positions; empty if
        heads stay.
      options: the keywords.

    Raises:
      ValueError: they do not fit each other or the mesh; all faults are listed.
    """
    query, key, value = arrays
    layout = _checked_layout(
        caller, arrays, bias, mask, sequence, is_opaque, exchanged, options=options
    )
    positions = options.get("input_positions")
    if (rope := options.get("rope")) is not None:
        query, key = (_rotate(rope, x, positions) for x in (query, key))
    dtype = options.get("dtype") or arrays[0].dtype
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    # The axes of the heads shard key heads, too, and an exchange shards them further. 2 key heads
    # on 4 devices become 4.
    num_devices = layout.count((*layout.heads, *exchanged))
    key, value = (_repeat_heads(x, num_devices) for x in (key, value))
    scale = options.get("scale")
    rule = Rule(
        is_causal=options.get("is_causal", False),
        window=options.get("window"),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        precision=options.get("precision"),
        dropout_rate=0.0 if options.get("deterministic") else options.get("dropout_rate", 0.0),
    )
    visibility, key_info = _visibility(rule, query, key, mask, options)
    prepared = AttentionArrays(query, key, value, key_info, visibility)
    padding = -key.shape[1] % layout.count(sequence)  # up to a multiple of the devices
    if padding:
        prepared = _pad_keys(padding, prepared)
    spec = layout.token_spec(sequence)
    prepared = prepared._replace(
        query=layout.typed(prepared.query, spec),
        key=layout.typed(prepared.key, spec),
        value=layout.typed(prepared.value, spec),
    )
    return Inputs(rule, layout, prepared, positions, options.get("balanced", False))


def _checked_layout(
    caller: str,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    bias: object,
    mask: ArrayLike | None,
    sequence: Axes,
    is_opaque: bool,
    exchanged: Axes,
    *,
    options: AttentionOptions,
) -> Layout:
    """Returns the layout of an attention; its arguments are those of :func:`inputs_of`.

    Raises:
      ValueError: the arguments do not fit each other, or the mesh.
    """
    mesh = given_mesh(caller, options.get("mesh"))
    named = dict(zip(("query", "key", "value"), arrays, strict=True))
    # The functions of this library need tokens. A function of the user may know what it returns
    # without tokens, as the one of Flax does. But on a mesh keys are needed, because devices
    # exchange them.
    if not is_opaque:
        needed = named
    elif mesh is not None:
        needed = {"key": named["key"], "value": named["value"]}
    else:
        needed = {}
    faults = [
        *_wrong_shapes(named, mask, options),
        *_without_tokens(needed),
        *_wrong_mesh(mesh, sequence),
        *_unsupported(bias, options),
    ]
    raise_if_any(ValueError, f"{caller}:", [f"  {line}" for line in faults])
    layout = layout_of(
        mesh,
        named["query"],
        sequence,
        batch=options.get("batch_axis"),
        heads=options.get("head_axis"),
        is_opaque=is_opaque,
    )
    # The layout tells what has to be divided. A wrong mesh has no layout, so lengths are checked
    # only now.
    faults = [*_wrong_lengths(named, layout, exchanged)]
    raise_if_any(ValueError, f"{caller}:", [f"  {line}" for line in faults])
    return layout


def _visibility(
    rule: Rule,
    query: jax.Array,
    key: jax.Array,
    mask: ArrayLike | None,
    options: AttentionOptions,
) -> tuple[Visibility, TokenInfo]:
    """Returns what decides to which keys queries attend, and the info of the keys.

    Queries and keys have the same positions and segments, because these are of one sequence.

    Args:
      query: the queries, (b, queries, heads, features).
      key: the keys, (b, keys, key heads, features).
      mask: the mask of the user, with up to four dimensions; None without one.

    Returns:
      The visibility, which has the info of the queries, and the info of the keys.
    """
    length, num_keys = query.shape[1], key.shape[1]
    positions: Any = None  # only causal attention and windows compare positions
    if rule.is_causal or rule.window:
        given = options.get("input_positions")
        positions = jnp.asarray(np.arange(length) if given is None else given, jnp.int32)
    segments = options.get("segment_ids")
    if mask is not None:
        mask = jnp.asarray(mask)
        mask = jnp.expand_dims(mask, range(4 - mask.ndim))  # (batch, heads, length, keys)
        # Blocks are cut from all columns of the mask. Other dimensions of size 1 stay so.
        mask = jnp.broadcast_to(mask, (*mask.shape[:3], num_keys))
    if not rule.dropout_rate:  # without it, nothing asks for the places of tokens
        info = TokenInfo(positions, segments)
        return Visibility(info, mask), info
    rng = options["dropout_rng"]
    assert rng is not None, "refused by _unsupported"
    # The random bits of a weight are a hash of its row, its head, and the places of its query and
    # key. As in Flax, all rows and heads drop the same weights by default.
    if options.get("broadcast_dropout", True):
        rows, head_numbers = jnp.arange(1), jnp.zeros((1, 1), int)
    else:
        heads, key_heads = query.shape[2], key.shape[2]
        rows = jnp.arange(query.shape[0])
        head_numbers = jnp.arange(heads).reshape(key_heads, heads // key_heads)
    dropout = Dropout(jax.random.bits(rng, (2,), jnp.uint32), rows, head_numbers)
    query_info = TokenInfo(positions, segments, places=jnp.arange(length))
    key_info = TokenInfo(positions, segments, places=jnp.arange(num_keys))
    return Visibility(query_info, mask, dropout), key_info


def _pad_keys(padding: int, arrays: AttentionArrays) -> AttentionArrays:
    """Adds keys to which no query attends, because they are in a segment of their own.

    The user's positions and segments are None here, so they need no padding. With them,
    :func:`_wrong_shapes` requires as many keys as queries. The number of devices divides the
    number of queries, so keys with positions or segments need no padding.
    """
    query, key, value, key_info, visibility = arrays
    batch, num_keys = key.shape[:2]
    num_padded = num_keys + padding
    key, value = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (key, value))
    mask = visibility.mask  # (batch, heads, length, keys)
    if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, padding)))
    # Queries and keys are in segment 0, the padding is in segment 1.
    is_padding = (jnp.arange(num_padded) >= num_keys).astype(jnp.int32)
    key_segments = jnp.broadcast_to(is_padding, (batch, num_padded))
    query_segments = jnp.zeros((batch, query.shape[1]), jnp.int32)
    # Places number the keys. They are None without dropout.
    places = None if key_info.places is None else jnp.arange(num_padded)
    query_info = visibility.query_info._replace(segments=query_segments)
    return AttentionArrays(
        query=query,
        key=key,
        value=value,
        key_info=TokenInfo(positions=None, segments=key_segments, places=places),
        visibility=visibility._replace(query_info=query_info, mask=mask),
    )


def _repeat_heads(x: jax.Array, num_devices: int) -> jax.Array:
    """Repeats key heads until their number is divisible by the number of devices.

    Each head is next to its copies: (b, keys, key heads, d) → (b, keys, key heads · times, d).
    """
    batch, length, heads, features = x.shape
    times = math.lcm(heads, num_devices) // heads
    if times == 1:
        return x
    shape = (batch, length, heads, times, features)
    copies = jnp.broadcast_to(x[:, :, :, None], shape)
    # The joined dimension has the sharding of the heads (source 2). Source 4 are the features.
    return reshape(copies, (batch, length, heads * times, features), sources=(0, 1, 2, 4))


def _unsupported(bias: object, options: AttentionOptions) -> Iterator[str]:
    """Yields a line for each option that is wrong, or that sharded sequences do not support."""
    window, rate = options.get("window"), options.get("dropout_rate", 0.0)
    if bias is not None:
        yield "bias: not supported"
    if rate and not options.get("deterministic") and options.get("dropout_rng") is None:
        yield f"dropout_rate={rate}: dropout_rng, a random key, is needed; or deterministic=True"
    if not 0 <= rate < 1:
        yield f"dropout_rate={rate}: expected at least 0, and less than 1"
    if options.get("module") is not None:
        yield "sowing weights: not supported, they are never in memory"
    if window is not None and window < 1:
        yield f"window={window!r}: expected at least 1"


def _wrong_shapes(
    arrays: Mapping[str, jax.Array], mask: ArrayLike | None, options: AttentionOptions
) -> Iterator[str]:
    """Yields a line for each shape that does not fit the query or the other shapes."""
    not_4d = [name for name, x in arrays.items() if x.ndim != 4]
    for name in not_4d:
        yield f"{name}: shape {arrays[name].shape}, not 4-D"
    if not_4d:
        return
    empty = [name for name, x in arrays.items() if 0 in x.shape[2:]]
    for name in empty:
        yield f"{name}: shape {arrays[name].shape} has no heads or features"
    if empty:
        return
    query, key, value = (arrays[name].shape for name in ("query", "key", "value"))
    batch, length, heads, features = query
    if key[:3] != value[:3] or key[0] != batch or key[3] != features:
        yield f"query {query}, key {key} and value {value} do not fit"
    elif heads % key[2]:
        yield f"{key[2]} heads of keys do not divide {heads} heads of queries"
    whole = (batch, heads, length, key[1])
    if mask is not None and not _broadcasts(np.shape(mask), whole):
        yield f"mask: shape {np.shape(mask)} does not broadcast to {whole}"
    positions, segments = options.get("input_positions"), options.get("segment_ids")
    if positions is not None and np.shape(positions) not in ((length,), (batch, length)):
        given = np.shape(positions)
        yield f"input_positions: shape {given}, not ({length},) or ({batch}, {length})"
    if segments is not None and segments.shape != (batch, length):
        yield f"segment_ids: shape {segments.shape}, not ({batch}, {length})"
    # These options compare a query with a key of the same sequence. A window of 0 does not count
    # here, because `_unsupported` refuses it.
    is_of_one_sequence = (
        options.get("is_causal")
        or options.get("window")
        or positions is not None
        or segments is not None
    )
    if is_of_one_sequence and length != key[1]:
        yield "is_causal, window, positions and segments: for as many keys as queries"


def _without_tokens(arrays: Mapping[str, jax.Array]) -> Iterator[str]:
    """Yields a line for each array without tokens, because it cannot be divided into blocks."""
    for name, x in arrays.items():
        if x.ndim == 4 and x.shape[1] == 0:
            yield f"{name}: shape {x.shape} has no tokens, expected at least one"


def _wrong_lengths(
    arrays: Mapping[str, jax.Array], layout: Layout, exchanged: Axes
) -> Iterator[str]:
    """Yields a line for each number of queries or heads that the devices do not divide.

    Keys are not checked, because they are padded. Queries are not padded, because outputs would
    have padding, too. Devices along ``exchanged`` shard the sequence before an exchange, and the
    heads after it.
    """
    length, heads = arrays["query"].shape[1:3]
    head_axes = (*layout.heads, *exchanged)
    size, parts = layout.count(layout.sequence), layout.count(head_axes)
    if length % size:
        name = " and ".join(map(repr, layout.sequence))
        yield f"{size} devices along {name} do not divide {length} queries; pad them"
    if heads % parts:
        yield (
            f"{parts} devices along {' and '.join(map(repr, head_axes))} do not "
            f"divide {heads} heads; exchange them over fewer devices, as in "
            "axis=('inner', 'outer'), with a ring over the other axis"
        )


def _wrong_mesh(mesh: Mesh | AbstractMesh | None, axes: Axes) -> Iterator[str]:
    """Yields a line for each axis that the mesh lacks; none without a mesh, for one device."""
    if mesh is None:
        return
    for axis in axes:
        if axis not in mesh.shape:
            known = ", ".join(map(repr, mesh.shape))
            yield f"axis={axis!r}{suggestion(axis, mesh.shape)}: the mesh has {known}"


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of one shape can be broadcast to the other one."""
    if len(shape) > len(whole):
        return False
    trailing = whole[len(whole) - len(shape) :]
    return all(size in (1, full) for size, full in zip(shape, trailing, strict=True))


def _rotate(rope: Callable[..., jax.Array], x: jax.Array, positions: ArrayLike | None) -> jax.Array:
    """Rotates queries or keys, (batch, length, heads, features).

    Args:
      rope: the function of the user, of (batch, heads, length, features), and positions.
      positions: the positions of tokens, (length,) for all rows, or (batch, length); None if tokens
        are in order.
    """
    x = x.swapaxes(1, 2)  # (batch, heads, length, features)
    if positions is None:
        x = rope(x)
    elif np.ndim(positions) == 1:
        x = rope(x, jnp.asarray(positions))
    else:
        # `rope` takes positions of (length,), so it is called for one row at a time.
        positions = jnp.asarray(positions)
        spec = type_spec(x)
        if spec is not None:
            # `vmap` refuses arguments whose batch is sharded differently over Explicit axes.
            batch_entry = pad_entries(spec, 4)[0]
            positions = retype(positions, type_mesh(x), P(batch_entry))
        x = jax.vmap(rope)(x, positions)
    return x.swapaxes(1, 2)
