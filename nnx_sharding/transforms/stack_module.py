"""``Stack``: modules of equal structure as one, with stacked Variables, run in a loop."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ..core.flatten import Flat, flatten
from ..core.signature import Signature
from ..core.structure import NodeEntry, VariableEntry
from ..core.unflatten import perform, unflatten, update
from ..diagnostics.differences import differences
from ..errors import raise_listed
from ..specs.filters import Paths
from ..specs.paths import Path, accessor
from .axis_prefixes import Carry, StateAxes, change_names
from .loops import scan
from .recompute import remat as remat_


class Stack(nnx.Module):
    """Modules of equal structure as one: a list of layers that compiles as a single layer.

    Made by :func:`stack`. Each Variable has a leading dimension for the layers. A call runs the
    layers one after the other by ``jax.lax.scan``, so that tracing and compiling take the same time
    for any number of them. Paths into it have ``layers`` where paths into a list have the index of
    a layer: ``blocks/layers/up/kernel``.

    It is indexed and iterated like a list. ``blocks[3]`` is a new module with the values of the
    fourth layer; ``blocks[3] = layer`` writes them back.

    Attributes:
      layers: the module with stacked Variables.
      length: the number of layers.
      shared: the paths in ``layers`` of what all layers share, without a dimension for them:
        Variables that are the same object in all of them, and arrays outside of Variables.
      unroll: how many layers one iteration of the loop runs.
      remat: the policy of :func:`~nnx_sharding.remat` for each layer; True to keep only the inputs
        of a layer, False for no recomputation.

    Raises:
      IndexError: the stack has no such layer.
      ValueError: a layer that is written back differs in more than the values of its arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import stack
      >>> layers = stack(nnx.Linear, 3, 4, 4, rngs=nnx.Rngs(0))
      >>> len(layers), layers[1].kernel.shape, layers(jnp.ones((2, 4))).shape
      (3, (4, 4), (2, 4))
    """

    def __init__(
        self,
        layers: Any,
        length: int,
        shared: Iterable[Path] = (),
        *,
        unroll: int | bool = 1,
        remat: Any = False,
    ):
        self.layers = layers
        self.length = length
        self.shared = frozenset(shared)
        self.unroll = unroll
        self.remat = _as_static(remat)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layers one after the other.

        Args:
          x: what the first layer gets; every other layer gets what the previous one returned, which
            has to have the same structure, shapes and dtypes.
          *args: further arguments, the same for all layers.
          **kwargs: likewise. Values other than arrays, such as flags, are not traced.

        Returns:
          What the last layer returned.
        """
        options = (self._axes, self.length, self.unroll, self.remat)
        return _loop_of_calls(*options)(self.layers, x, args, kwargs)

    def scan(self, step: Callable[..., Any], carry: Any, /, *xs: Any) -> tuple[Any, Any]:
        """Runs a function of each layer, a carry and slices of arrays.

        Args:
          step: called as ``step(layer, carry, *slices)``; returns ``(carry, y)``.
          carry: what the first step gets.
          *xs: pytrees of arrays whose first dimension is the layers.

        Returns:
          The last carry, and all ``y``, stacked.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from nnx_sharding import stack
          >>> layers = stack(nnx.Linear, 3, 4, 4, rngs=nnx.Rngs(0))
          >>> def step(layer, x, scale):
          ...     x = layer(x) * scale
          ...     return x, x.mean()
          >>> x, means = layers.scan(step, jnp.ones((2, 4)), jnp.arange(3.0))
          >>> x.shape, means.shape
          ((2, 4), (3,))
        """
        in_axes = (self._axes, Carry, *[0] * len(xs))
        run = _loop(step, in_axes, (Carry, 0), self.length, self.unroll, self.remat)
        return run(self.layers, carry, *xs)  # type: ignore[no-any-return]

    @property
    def _axes(self) -> StateAxes:
        return StateAxes({Paths(self.shared): None, ...: 0})

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """One layer as a new module; for a slice, a new ``Stack``."""
        if isinstance(index, slice):
            layers = self._map(lambda array: _sliced(array, index))
            length, options = len(range(self.length)[index]), {"unroll": self.unroll}
            return Stack(layers, length, self.shared, remat=self.remat, **options)
        number = range(self.length)[operator.index(index)]
        layer = self._map(lambda array: _sliced(array, number))
        variables = stacked_variables(layer, self.shared)
        change_names(nnx.spmd.remove_axis, ((x, 0) for x in variables), METADATA)
        return layer

    def __setitem__(self, index: int, layer: Any) -> None:
        """Writes the values of a module of the same structure to one layer.

        Raises:
          ValueError: its structure differs.
        """
        number = range(self.length)[operator.index(index)]
        new, old = flat_layer(layer), flat_layer(self[number])
        check_equal([old, new], lambda i: f"[{number}]" if i else "the layers")
        flat = flat_layer(self.layers)
        leaves = [*flat.leaves]
        for slot in self._stacked_slots(flat):
            leaves[slot] = leaves[slot].at[number].set(new.leaves[slot])
        variables = [
            i for i, entry in enumerate(flat.structure.entries) if isinstance(entry, VariableEntry)
        ]
        perform(update(flat.structure, leaves, flat.objects, variables))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.length))

    def unstack(self) -> list[Any]:
        """The layers as separate modules; what they share stays shared."""
        return [*self]

    def _map(self, function: Callable[[Any], Any]) -> Any:
        """A copy of the layers, with a function applied to each stacked array."""
        flat = flat_layer(self.layers)
        leaves, stacked = [*flat.leaves], self._stacked_slots(flat)
        for slot in stacked:
            leaves[slot] = function(leaves[slot])
        return built_layer(flat, leaves, stacked)

    def _stacked_slots(self, flat: Flat) -> set[int]:
        return {
            slot for path, slots in slots_by_path(flat) if path not in self.shared for slot in slots
        }


METADATA = {nnx.PARTITION_NAME: None}
# Layers may share Variables, whatever the mode of Flax.
OPTIONS: Any = {"transform_metadata": METADATA, "graph": True, "graph_updates": True}


def _as_static(remat: Any) -> Any:
    """The option ``remat`` in hashable form."""
    if isinstance(remat, Mapping):
        return tuple(remat.items())
    is_pairs = isinstance(remat, Iterable) and not isinstance(remat, str)
    return tuple((filter_, keep) for filter_, keep in remat) if is_pairs else remat


def _call(layer: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(x, *args, **kwargs)


@functools.lru_cache(maxsize=256, typed=True)  # so that JAX finds what it traced before
def _loop_of_calls(axes: StateAxes, length: int, unroll: Any, policy: Any) -> Any:
    return _loop(_call, (axes, Carry, None, None), Carry, length, unroll, policy)


def _loop(
    step: Callable[..., Any], in_axes: Any, out_axes: Any, length: int, unroll: Any, policy: Any
) -> Any:
    if policy is not False:
        step = remat_(step, policy=None if policy is True else policy, prevent_cse=False)
    return scan(step, in_axes=in_axes, out_axes=out_axes, length=length, unroll=unroll, **OPTIONS)


def _sliced(array: Any, index: int | slice) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = (len(range(array.shape[0])[index]),) if isinstance(index, slice) else ()
        return jax.ShapeDtypeStruct((*shape, *array.shape[1:]), array.dtype)
    return array[index]


def flat_layer(layer: Any) -> Flat:
    """A layer, flattened like the only argument of a call."""
    return flatten(((layer,), {}))


def slots_by_path(flat: Flat) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """The paths in a layer, each with its slots."""
    root: Any = flat.structure.root
    for location in flat.structure.walk(root.children[0], iter(())):
        yield location.path, location.slots


def built_layer(flat: Flat, leaves: Sequence[Any], stacked: set[int]) -> Any:
    """A layer with other arrays, and the same shared Variables."""
    entries = flat.structure.entries
    same = {
        index: flat.objects[index]
        for index, slots in enumerate(flat.structure.slots)
        if isinstance(entries[index], VariableEntry) and slots and stacked.isdisjoint(slots)
    }
    (layer,), _ = unflatten(flat.structure, leaves, same, share=True).root
    return layer


def stacked_variables(layer: Any, shared: Iterable[Path]) -> Iterator[Any]:
    """The Variables of a layer, or of all, that are not shared."""
    flat = flat_layer(layer)
    root: Any = flat.structure.root
    for path, index, _ in flat.structure.walk(root.children[0], iter(())):
        if index is not None and path not in shared:
            variable = flat.objects[index]
            if isinstance(variable, nnx.Variable):
                yield variable


def layer_dimensions(flat: Flat) -> dict[int, int]:
    """The number of leading dimensions for the layers of a ``Stack``, by slot."""
    structure, counts = flat.structure, dict[int, int]()
    for index, entry in enumerate(structure.entries):
        if not isinstance(entry, NodeEntry) or not issubclass(entry.type, Stack):
            continue
        shared = flat.objects[index].shared
        child = entry.children[entry.keys.index("layers")]
        for path, _, slots in structure.walk(child, iter(())):
            for slot in slots if path not in shared else ():
                counts[slot] = counts.get(slot, 0) + 1
    return counts


def check_equal(flats: Sequence[Flat], name_of: Callable[[int], str]) -> None:
    """Checks that layers differ only in the values of arrays.

    Raises:
      ValueError: they differ in anything else.
    """
    first, lines = flats[0], list[str]()
    signature = Signature(("layer",), (), *[frozenset[Any]()] * 4)
    for number, flat in enumerate(flats[1:], start=1):
        if flat.structure != first.structure:
            changes = differences((signature, first.structure), (signature, flat.structure))
            lines += [f"  {name_of(number)}: {change}" for change in changes]
            continue
        types = [[jax.typeof(x).str_short() for x in each.leaves] for each in (first, flat)]
        lines += [
            f"  {name_of(number)}: {accessor('layer', path)}: {types[0][slot]} → {types[1][slot]}"
            for path, slots in slots_by_path(flat)
            for slot in slots
            if types[0][slot] != types[1][slot]
        ]
    raise_listed(
        ValueError,
        f"stack: layers may differ only in the values of arrays; compared with {name_of(0)}:",
        lines,
        "Make one layer of each repeating group, or use a list.",
    )
