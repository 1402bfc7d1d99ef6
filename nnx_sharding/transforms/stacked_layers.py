"""Layers as flat lists of arrays, for ``Stack`` and for a pipeline of one.

The layers of a stack are one module, whose arrays have a leading dimension for the layers, except
for arrays that all layers share. Both a ``Stack`` and a pipeline take arrays out of that module by
slot, compute with them, and build another module around the results::

    flat = flatten_layer(layers)                      # structure, objects, arrays by slot
    slots = stacked_slots(flat, shared)               # the arrays with a dimension for layers
    first = with_arrays(flat, {slot: flat.leaves[slot][0] for slot in slots})
    name_axis(nnx.spmd.remove_axis, first, shared)    # in metadata, too
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
from flax import nnx

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.memory import memory_of
from ..core.signature import Signature
from ..core.structure import Container, Location, VariableEntry
from ..core.unflatten import unflatten
from ..diagnostics.differences import differences
from ..errors import raise_if_any
from ..specs.filters import Paths
from ..specs.paths import Path, accessor, path_key
from ..specs.types import AnyArray
from .carry_checks import type_changes
from .in_trace import replace_slots, tree_text
from .mapped_axes import Carry, StateAxes, change_names
from .remat import Policy, remat
from .scan import scan

# The dimension of the layers is not sharded, so its name in the logical axes of Variables is None.
_METADATA = {nnx.PARTITION_NAME: None}
# Options of transforms of layers. Layers may share Variables, whatever the global mode of Flax is.
LAYER_OPTIONS: Mapping[str, Any] = {
    "transform_metadata": _METADATA,
    "graph": True,
    "graph_updates": True,
}


def flatten_layer(layer: nnx.Module) -> Flat:
    """Flattens a layer like the only argument of a call, ``(positional, keywords)``."""
    return flatten(((layer,), {}))


def locations_of(flat: Flat) -> list[Location]:
    """Returns the locations of the arrays of a flattened layer; paths start at the layer."""
    arguments = cast(Container, flat.structure.root)
    # The walk takes slots of arrays outside of objects from an iterator. A layer has none.
    return [*flat.structure.walk(arguments.children[0], iter(()))]


def is_in_variable(flat: Flat, location: Location) -> bool:
    """Whether the array at a location is the value of a Variable, or a part of its value."""
    index = location.object_index
    return index is not None and isinstance(flat.structure.entries[index], VariableEntry)


def stacked_slots(flat: Flat, shared: Collection[Path]) -> list[int]:
    """Returns the slots of the arrays with a dimension for the layers."""
    return [slot for x in locations_of(flat) if x.path not in shared for slot in x.slots]


def layer_axes(shared: Collection[Path]) -> StateAxes:
    """Returns the axes of ``vmap`` and ``scan`` over layers: None for what is shared, 0 for others.

    ``shared`` has the paths of what all layers share.
    """
    return StateAxes({Paths(shared): None, ...: 0})


def with_arrays(flat: Flat, new_arrays: Mapping[int, object]) -> Any:
    """Returns a new layer with other arrays in some slots.

    A Variable that keeps its arrays stays the same object, shared with the given layer. Modules are
    always new, because a change of an attribute of one must not change the other.

    Args:
      flat: the given layer.
      new_arrays: the other arrays, by slot.
    """
    unchanged = {}  # the Variables that stay the same objects, by index
    for index, slots in enumerate(flat.structure.slots):
        is_variable = isinstance(flat.structure.entries[index], VariableEntry)
        has_no_new_array = new_arrays.keys().isdisjoint(slots)
        if is_variable and slots and has_no_new_array:  # a Variable without arrays is copied
            unchanged[index] = flat.objects[index]
    leaves = replace_slots(flat.leaves, new_arrays, new_arrays.values())
    rebuilt = unflatten(flat.structure, leaves, existing=unchanged, share=True)
    (layer,), _keywords = rebuilt.root  # the form that `flatten_layer` has flattened
    return layer


def name_axis(change: Callable[..., Any], layer: nnx.Module, shared: Collection[Path]) -> None:
    """Adds the layers to the logical axes (metadata) of Variables, or removes them.

    Args:
      change: ``nnx.spmd.add_axis`` or ``remove_axis``.
      layer: the layer whose Variables are changed.
      shared: the paths of what all layers share, which has no dimension for them.
    """
    flat = flatten_layer(layer)
    stacked = (x.object_index for x in locations_of(flat) if x.path not in shared)
    variables = [flat.objects[index] for index in stacked if index is not None]
    # The first dimension of each Variable is that of the layers.
    change_names(change, [(variable, 0) for variable in variables], _METADATA)


def layer_differences(flats: Sequence[Flat], name_of: Callable[[int], str]) -> list[str]:
    """Returns a line for each way in which layers differ from the first one, apart from values.

    ``name_of`` returns the expression for a layer by its number.
    """
    lines = list[str]()
    for number, flat in enumerate(flats[1:], start=1):
        lines += [f"  {name_of(number)}: {change}" for change in _differences(flats[0], flat)]
    return lines


def _differences(first_layer: Flat, other_layer: Flat) -> Iterator[str]:
    """Yields a text for each difference of two layers: in structure, or otherwise in array types.

    A type does not count the memory of an array.
    """
    if other_layer.structure != first_layer.structure:
        # `differences` compares calls: the signature and the structure of the arguments of each.
        # Both calls here are of a function with one parameter, which the texts name ``layer``.
        signature = Signature(
            names=("layer",), keywords=(), static=frozenset(), donated=frozenset()
        )
        yield from differences(
            (signature, first_layer.structure), (signature, other_layer.structure)
        )
        return
    for location in locations_of(other_layer):
        for slot in location.slots:  # the same slots in both, because their structures are equal
            first_type = _type_text(first_layer.leaves[slot])
            other_type = _type_text(other_layer.leaves[slot])
            if first_type != other_type:
                yield f"{accessor('layer', location.path)}: {first_type} → {other_type}"


def _type_text(x: AnyArray) -> str:
    """Returns the type of an array, such as ``float32[2,4]``, without the memory that it is in.

    A layer that is offloaded to the host has the same type as one on the device.
    """
    array_type = jax.typeof(x)
    if memory_of(x):
        array_type = array_type.update(memory_space=jax.memory.Space.Device)
    return str(array_type.str_short())


# The cache is needed because JAX finds a trace by the function, so equal options have to give the
# same loop. It is typed because ``unroll=True`` unrolls all layers, but ``unroll=1`` none.
@functools.lru_cache(maxsize=256, typed=True)
def loop_of_calls(
    axes: StateAxes, length: int, unroll: int | bool, policy: Policy | bool
) -> Callable[..., Any]:
    """Returns a loop that calls layers one after the other: ``(layers, x, args, kwargs) → x``.

    Args:
      axes: the axes of the Variables of ``layers``.
      length: the number of layers.
      unroll: how many layers one iteration of the loop runs.
      policy: what the backward pass keeps of each layer, as for ``remat``; True to keep nothing
        but its inputs, False for no recomputation.
    """
    step = call_layer if policy is False else _recomputed_call(policy)
    # A step gets a slice of the layers, the carried ``x``, and ``args`` and ``kwargs``, which are
    # the same in all steps. It returns the next ``x`` alone.
    in_axes, out_axes = (axes, Carry, None, None), Carry
    return loop(step, in_axes, out_axes, length, unroll)


def loop(
    step: Callable[..., object], in_axes: object, out_axes: object, length: int, unroll: int | bool
) -> Callable[..., Any]:
    """Returns a ``scan`` of a step over layers, with the options that layers need.

    Each iteration gets one layer. Layers may share Variables, which ``scan`` by itself refuses in
    tree mode: ``LAYER_OPTIONS`` choose graph mode, whatever Flax's default is.

    Args:
      step: the function of each layer.
      in_axes: the axes of its arguments, as for ``scan``.
      out_axes: the axes of its results.
      length: the number of layers.
      unroll: how many layers one iteration of the loop runs.
    """
    loop_over_layers: Callable[..., Any] = scan(
        step, in_axes=in_axes, out_axes=out_axes, length=length, unroll=unroll, **LAYER_OPTIONS
    )
    return loop_over_layers


def call_layer(layer: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls one layer of a loop, and checks that the next layer can take what it returns.

    ``x`` is the result of the layer before; ``args`` and ``kwargs`` are the same for all layers.

    Raises:
      TypeError: the layer returns another structure, shape or dtype than ``x``. The error of
        ``scan`` would be about its carry, not about the layer.
    """
    out = layer(x, *args, **kwargs)
    is_leaf = _compat.is_graph_object
    given_leaves, treedef_before = jax.tree_util.tree_flatten_with_path(x, is_leaf=is_leaf)
    returned_leaves, treedef_after = jax.tree_util.tree_flatten(out, is_leaf=is_leaf)
    if treedef_before != treedef_after:  # type: ignore[operator]
        lines = [f"  x: {tree_text(x)} → {tree_text(out)}"]
    else:  # a line for each array whose type has changed
        names = (accessor("x", tuple(map(path_key, keys))) for keys, _ in given_leaves)
        lines = type_changes(names, (leaf for _, leaf in given_leaves), returned_leaves)
    raise_if_any(
        TypeError,
        f"stack: a layer has to return what the next one gets, but {type(layer).__name__} returns "
        "another structure, shape or dtype than it gets:",
        lines,
        "Let all layers keep them, as by out.astype(x.dtype), and leave what changes them, such as "
        "a projection, out of the stack or pipeline.",
    )
    return out


def _recomputed_call(policy: Policy | Literal[True]) -> Callable[..., Any]:
    """Returns :func:`call_layer` under ``remat``, in which ints stay Python numbers.

    ``remat`` traces ints that are not static, but layers may use them as shapes. So ints are taken
    out of the arguments, and captured. Flags are captured, too, because they are ints for Python.

    Args:
      policy: what the backward pass keeps anyway (:func:`recompute_in_backward`).
    """

    def call(layer: object, x: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_compat.is_graph_object)
        ints = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, int)}
        num_leaves = len(leaves)

        def call_with_ints(layer: object, x: object, others: Iterable[object]) -> Any:
            next_not_int = iter(others)
            leaves = [ints[i] if i in ints else next(next_not_int) for i in range(num_leaves)]
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return call_layer(layer, x, args, kwargs)

        not_ints = [leaf for i, leaf in enumerate(leaves) if i not in ints]
        return recompute_in_backward(call_with_ints, policy)(layer, x, not_ints)

    return call


def recompute_in_backward(
    step: Callable[..., Any], policy: Policy | Literal[True]
) -> Callable[..., Any]:
    """Returns a function of a layer whose backward pass computes it again.

    Args:
      step: the function, which is the step of a loop over layers.
      policy: what the backward pass keeps anyway, as for ``remat``; True for nothing.
    """
    # `prevent_cse` is off because a loop already keeps the compiler from merging the forward pass
    # with its recomputation.
    remat_policy = None if policy is True else policy
    recomputed: Callable[..., Any] = remat(step, policy=remat_policy, prevent_cse=False)
    return recomputed
