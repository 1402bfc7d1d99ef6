"""Layers as flat lists of arrays: what a ``Stack`` and a pipeline of one are made of.

The layers of a stack are one module, whose arrays have a leading dimension for the layers, apart
from those that all layers share. Both a ``Stack`` and a pipeline take arrays out of that module by
slot, compute with them, and build another module around the results::

    flat = flatten_layer(layers)                      # structure, objects, arrays by slot
    slots = stacked_slots(flat, shared)               # of arrays with a dimension for layers
    first = with_arrays(flat, {slot: flat.leaves[slot][0] for slot in slots})
    name_axis(nnx.spmd.remove_axis, first, shared)    # in metadata, too

From other modules:

    Flat        structure, arrays by slot and objects by index of a flattened layer
    Location    where arrays are: a path, and the Variable with its index; None for a bare array
    StateAxes   the axis of each Variable, by filters
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import jax
from flax import nnx

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.memory import memory_of
from ..core.signature import Signature
from ..core.structure import Container, Location, VariableEntry
from ..core.unflatten import unflatten
from ..diagnostics.differences import differences
from ..errors import raise_listed
from ..specs.filters import Paths
from ..specs.paths import Path, accessor, path_key
from ..specs.types import AnyArray
from .carry_checks import type_changes
from .in_trace import replace_slots, tree_text
from .mapped_axes import Carry, StateAxes, change_names
from .remat import Policy, remat
from .scan import scan

_METADATA = {nnx.PARTITION_NAME: None}
# Of transforms of layers: these may share Variables, whatever the mode of Flax.
LAYER_OPTIONS: Mapping[str, Any] = {
    "transform_metadata": _METADATA,
    "graph": True,
    "graph_updates": True,
}


def flatten_layer(layer: nnx.Module) -> Flat:
    """Flattens a layer like the only argument of a call."""
    return flatten(((layer,), {}))


def locations_of(flat: Flat) -> list[Location]:
    """Returns where the arrays of a flattened layer are."""
    root = cast(Container, flat.structure.root)  # of the arguments of a call
    return [*flat.structure.walk(root.children[0], iter(()))]


def is_in_variable(flat: Flat, location: Location) -> bool:
    """Whether the array of a location is the value of a Variable."""
    index = location.entry
    return index is not None and isinstance(flat.structure.entries[index], VariableEntry)


def stacked_slots(flat: Flat, shared: Collection[Path]) -> list[int]:
    """Returns the slots of the arrays with a dimension for the layers."""
    return [slot for x in locations_of(flat) if x.path not in shared for slot in x.slots]


def layer_axes(shared: Collection[Path]) -> StateAxes:
    """Returns the axes of ``vmap`` and ``scan`` over layers: the first, but of what is shared."""
    return StateAxes({Paths(shared): None, ...: 0})


def with_arrays(flat: Flat, new: Mapping[int, object]) -> Any:
    """Returns a new layer with other arrays in some slots.

    A Variable that keeps its arrays stays the same object, shared with the given layer.
    """
    unchanged = {}
    for index, slots in enumerate(flat.structure.slots):
        is_variable = isinstance(flat.structure.entries[index], VariableEntry)
        if is_variable and slots and new.keys().isdisjoint(slots):
            unchanged[index] = flat.objects[index]
    leaves = replace_slots(flat.leaves, new, new.values())
    (layer,), _ = unflatten(flat.structure, leaves, unchanged, share=True).root
    return layer


def name_axis(change: Callable[..., Any], layer: nnx.Module, shared: Collection[Path]) -> None:
    """Adds the layers to the logical axes of what is not shared, or removes them.

    ``change`` is ``nnx.spmd.add_axis`` or ``remove_axis``.
    """
    flat = flatten_layer(layer)
    stacked = (x.entry for x in locations_of(flat) if x.path not in shared)
    change_names(change, ((flat.objects[i], 0) for i in stacked if i is not None), _METADATA)


def layer_differences(flats: Sequence[Flat], name_of: Callable[[int], str]) -> list[str]:
    """Returns a line for each way in which layers differ from the first one, apart from values.

    ``name_of`` returns the expression for a layer by its number.
    """
    lines = list[str]()
    for number, flat in enumerate(flats[1:], start=1):
        lines += [f"  {name_of(number)}: {change}" for change in _differences(flats[0], flat)]
    return lines


def _differences(first: Flat, other: Flat) -> Iterator[str]:
    """Yields the differences of two layers: in structure, or else in the types of arrays."""
    if other.structure != first.structure:
        # Compared as the arguments of a function whose only parameter is named so.
        signature = Signature(("layer",), (), static=frozenset(), donated=frozenset())
        yield from differences((signature, first.structure), (signature, other.structure))
        return
    for location in locations_of(other):
        for slot in location.slots:  # the same in both, as their structures are equal
            old, new = _type_text(first.leaves[slot]), _type_text(other.leaves[slot])
            if old != new:
                yield f"{accessor('layer', location.path)}: {old} → {new}"


def _type_text(x: AnyArray) -> str:
    """Returns the type of an array, whatever memory it is in: layers may be offloaded."""
    array_type = jax.typeof(x)
    if memory_of(x):
        array_type = array_type.update(memory_space=jax.memory.Space.Device)
    return str(array_type.str_short())


# JAX finds what it has traced before by the function, so equal options have to give the same one.
@functools.lru_cache(maxsize=256, typed=True)
def loop_of_calls(
    axes: StateAxes, length: int, unroll: int | bool, policy: Policy | bool
) -> Callable[..., Any]:
    """Returns a loop that calls layers one after the other: ``(layers, x, args, kwargs) → x``.

    With a ``policy`` other than False, the backward pass recomputes each layer.
    """
    step = call_layer if policy is False else _recomputed_call(policy)
    return loop(step, (axes, Carry, None, None), Carry, length, unroll)


def loop(
    step: Callable[..., object], in_axes: object, out_axes: object, length: int, unroll: int | bool
) -> Callable[..., Any]:
    """Returns a ``scan`` over layers."""
    made: Callable[..., Any] = scan(
        step, in_axes=in_axes, out_axes=out_axes, length=length, unroll=unroll, **LAYER_OPTIONS
    )
    return made


def call_layer(layer: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a layer returns; a ``TypeError`` if the next layer cannot take that.

    ``x`` is what the layer before has returned; ``args`` and ``kwargs`` are the same for all.
    """
    out = layer(x, *args, **kwargs)
    is_leaf = _compat.is_graph_object
    given, before = jax.tree_util.tree_flatten_with_path(x, is_leaf=is_leaf)
    # `scan` would say so too, but of its carry, not of the layer.
    returned, after = jax.tree_util.tree_flatten(out, is_leaf=is_leaf)
    names = (accessor("x", tuple(map(path_key, keys))) for keys, _ in given)
    lines = type_changes(names, (leaf for _, leaf in given), returned)
    if before != after:  # type: ignore[operator]
        lines = [f"  x: {tree_text(x)} → {tree_text(out)}"]
    raise_listed(
        TypeError,
        f"stack: a layer has to return what the next one gets, but {type(layer).__name__} returns "
        "another structure, shape or dtype than it gets:",
        lines,
        "Let all layers keep them, as by out.astype(x.dtype), and leave what changes them, such as "
        "a projection, out of the stack or pipeline.",
    )
    return out


# The ints among further arguments, each with its position among their leaves.
_Settings: TypeAlias = tuple[tuple[int, int], ...]


def _call_with_settings(layer: object, x: object, further: object, settings: _Settings) -> Any:
    leaves, treedef = jax.tree.flatten(further, is_leaf=_compat.is_graph_object)
    for position, number in settings:
        leaves[position] = number
    return call_layer(layer, x, *jax.tree.unflatten(treedef, leaves))


def _recomputed_call(policy: Policy | Literal[True]) -> Callable[..., Any]:
    """Returns a call of a layer by ``remat``, which would trace ints that are not static."""
    run = recompute_in_backward(_call_with_settings, policy, static_argnums=3)

    def call(layer: object, x: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_compat.is_graph_object)
        settings = tuple((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, int))
        # Their places keep a leaf, but one that is equal for all ints.
        further = replace_slots(leaves, dict(settings), [False] * len(settings))
        return run(layer, x, jax.tree.unflatten(treedef, further), settings)

    return call


def recompute_in_backward(
    step: Callable[..., Any], policy: Policy | Literal[True], **options: Any
) -> Callable[..., Any]:
    """Returns a function of a layer whose backward pass computes it again."""
    # Loops keep the compiler from merging both computations, so that `remat` need not.
    chosen = None if policy is True else policy
    made: Callable[..., Any] = remat(step, policy=chosen, prevent_cse=False, **options)
    return made
