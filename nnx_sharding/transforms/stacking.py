"""``stack``: makes a ``Stack`` of a list of modules, or of layers that it makes together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.structure import VariableEntry
from ..errors import raise_listed
from ..specs.paths import Path
from .axis_prefixes import StateAxes, change_names
from .batching import vmap
from .stack_module import (
    METADATA,
    OPTIONS,
    Stack,
    built_layer,
    check_equal,
    flat_layer,
    slots_by_path,
    stacked_variables,
)


def stack(
    layers: Any,
    length: int | None = None,
    /,
    *args: Any,
    unroll: int | bool = 1,
    remat: Any = False,
    **kwargs: Any,
) -> Stack:
    """Makes a :class:`Stack` of layers: from a list of modules, or by making them.

    ``stack(Block, 24, config, rngs=rngs)`` makes 24 layers like ``Block(config, rngs=rngs)``,
    together, by ``vmap``. Each layer has its own random streams, split from ``rngs``.
    ``stack(blocks)`` takes existing modules, and its results are exactly theirs. For a repeating
    pattern, such as two layers of local attention and one of global attention, let one layer be a
    module that holds these three.

    Args:
      layers: a list of modules, or a class or function that makes one.
      length: the number of layers to make, if ``layers`` makes them.
      *args: positional arguments for making a layer.
      unroll: how many layers one iteration of the loop runs.
      remat: whether the backward pass recomputes each layer: True, or a policy of
        :func:`~nnx_sharding.remat`, whose paths start at the layer.
      **kwargs: keyword arguments for making a layer. An ``nnx.Rngs`` among the arguments is
        split.

    Returns:
      The stack, with copies of the values in the list; what all modules of the list share stays
      shared.

    Raises:
      TypeError: ``layers`` is neither a list of modules nor a callable with a ``length``.
      ValueError: the list is empty, ``length`` is not positive, or the modules differ in more than
        the values of arrays; the message lists the differences.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import stack
      >>> layers = stack(nnx.Linear, 3, 4, 4, rngs=nnx.Rngs(0))
      >>> layers.layers.kernel.shape, layers[0].kernel.shape
      ((3, 4, 4), (4, 4))
      >>> layers(jnp.ones((2, 4))).shape
      (2, 4)
    """
    if callable(layers) and isinstance(length, int):
        if length < 1:
            raise ValueError(f"stack: expected a positive length, got {length}.")
        layer, shared = _made(layers, length, args, kwargs)
        return Stack(layer, length, shared, unroll=unroll, remat=remat)
    if isinstance(layers, Stack | str) or not isinstance(layers, Iterable) or length is not None:
        raise TypeError(
            "stack takes a list of modules, as in stack(blocks), or what makes one and the number "
            f"of layers, as in stack(Block, 24, rngs=rngs), got {layers!r}"
            + ("." if length is None else f" and {length!r}.")
        )
    blocks = [*layers]
    wrong = [f"  [{i}]: {b!r}" for i, b in enumerate(blocks) if not isinstance(b, nnx.Module)]
    raise_listed(TypeError, "stack: expected modules, got:", wrong)
    if not blocks:
        raise ValueError("stack: expected at least one module, got an empty list.")
    flats = [flat_layer(block) for block in blocks]
    check_equal(flats, lambda i: f"layer {i}")
    first = flats[0]
    leaves, stacked, shared = [*first.leaves], set[int](), list[Path]()
    entries = first.structure.entries
    same = {
        slot
        for index, slots in enumerate(first.structure.slots)
        for slot in slots
        if all(
            flat.objects[index] is first.objects[index]
            if isinstance(entries[index], VariableEntry)
            else flat.leaves[slot] is first.leaves[slot]
            for flat in flats[1:]
        )
    }
    if len(flats) == 1:
        same = set()
    for path, slots in slots_by_path(first):
        if slots and same.issuperset(slots):
            shared.append(path)
            continue
        stacked.update(slots)
        for slot in slots:
            leaves[slot] = _stacked([flat.leaves[slot] for flat in flats])
    layer = built_layer(first, leaves, stacked)
    change_names(nnx.spmd.add_axis, ((x, 0) for x in stacked_variables(layer, shared)), METADATA)
    return Stack(layer, len(blocks), shared, unroll=unroll, remat=remat)


def _made(
    make: Callable[..., Any], length: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Sequence[Path]]:
    """Layers that are made together, and the paths of what they share."""
    given = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    streams = {name: x for name, x in given.items() if isinstance(x, nnx.Rngs | nnx.RngStream)}

    def make_one(streams: dict[str, Any]) -> Any:
        every = given | streams
        return make(*(every[str(i)] for i in range(len(args))), **{k: every[k] for k in kwargs})

    # Masks and other arrays outside of Variables are the same in all layers.
    out_axes = StateAxes({_is_array: None, ...: 0})
    run = vmap(make_one, out_axes=out_axes, axis_size=length, **OPTIONS)
    layer = run({name: x.split(length) for name, x in streams.items()})
    flat = flat_layer(layer)
    entries, owners = flat.structure.entries, flat.structure.slots
    arrays = {
        slot
        for entry, slots in zip(entries, owners, strict=True)
        if not isinstance(entry, VariableEntry)
        for slot in slots
    }
    paths = slots_by_path(flat)
    return layer, [path for path, slots in paths if slots and arrays.issuperset(slots)]


def _is_array(path: Path, value: Any) -> bool:
    return not isinstance(value, nnx.Variable)


def _stacked(arrays: Sequence[Any]) -> Any:
    first = arrays[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(arrays), *first.shape), first.dtype)
    return jnp.stack(arrays)
