"""``stack``: one module for many of equal structure, with stacked Variables, run in a loop.

A list of L layers is traced and compiled L times. A ``Stack`` holds one layer, whose arrays have a
leading dimension of size L, and calls it in one ``scan``::

    blocks[0].kernel, …, blocks[L-1].kernel    L arrays of shape (in, out)
    stack.layers.kernel                        one array of shape (L, in, out)

    x = stack(x)    =    x, _ = scan(lambda x, layer: layer(x), x, layers)

A Variable that all layers share keeps its shape, and each step of the scan gets it as it is. To
compute with the arrays of a module, the functions here flatten it: the *slot* of an array is its
position in the list of arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from ..activations.schedules import SCHEDULE_USES
from ..activations.variables import modules_in
from ..core.constrain import apply_shardings, sharding_of, type_spec
from ..core.flatten import Flat
from ..core.memory import compute
from ..core.rebuild import rebuild
from ..core.structure import Location, NodeEntry
from ..errors import raise_if_any
from ..specs.activation_sharding import checked_prefetch
from ..specs.fitting import pad_entries, show, with_entries
from ..specs.paths import Path, accessor
from .in_trace import replace_slots
from .mapped_axes import Carry, StateAxes
from .prefetching import prefetching
from .remat import Policy
from .stacked_layers import (
    LAYER_OPTIONS,
    flatten_layer,
    is_in_variable,
    layer_axes,
    layer_differences,
    locations_of,
    loop,
    loop_of_calls,
    name_axis,
    recompute_in_backward,
    stacked_slots,
    with_arrays,
)
from .vmap import vmap


def hashable_policy(
    remat: Policy | bool,
) -> Callable[..., bool] | str | tuple[tuple[Any, ...], ...] | bool | None:
    """Returns a policy in a hashable form, because JAX's loops are cached by it.

    A policy of filters is a mapping or pairs. A policy of JAX may be given by its name; a string is
    iterable, too.
    """
    if isinstance(remat, Iterable) and not isinstance(remat, str):
        pairs = remat.items() if isinstance(remat, Mapping) else remat
        return tuple(map(tuple, pairs))
    return remat


class Stack(nnx.Module):
    """One module for many of equal structure: a list of layers that compiles as a single layer.

    :func:`stack` makes it. Each Variable has a leading dimension for the layers. A call runs the
    layers one after the other by ``jax.lax.scan``, so that tracing and compiling take the same time
    for any number of them. Paths into a stack have ``layers`` where paths into a list have the
    index of a layer: ``blocks/layers/up/kernel``.

    A stack is indexed and iterated like a list. ``blocks[3]`` is a new module with the values of
    the fourth layer. ``blocks[3] = layer`` writes back the values that not all layers share.
    ``list(blocks)`` has all layers as separate modules; what they share stays shared.

    Attributes:
      layers: the module with stacked Variables.
      length: the number of layers.
      shared: the paths in ``layers`` of what all layers share, without a dimension for them:
        Variables that are the same object in all of them, and arrays outside of Variables.
      unroll: how many layers one iteration of the loop runs.
      remat: the policy of :func:`~nnx_sharding.remat` for each layer; True to keep only the inputs
        of a layer, False for no recomputation.
      prefetch: 1 to gather the parameters of the next layer while a layer computes, if a strategy
        gathers them, such as :func:`~nnx_sharding.partition.fsdp`.
    """

    def __init__(
        self,
        layers: Any,
        length: int,
        shared: Iterable[Path] = (),
        *,
        unroll: int | bool = 1,
        remat: Policy | bool = False,
        prefetch: int = 0,
    ):
        """Makes a stack of one layer whose arrays are stacked already.

        Args:
          layers: one layer, whose arrays have a leading dimension for the layers.
          length: the number of layers.
          shared: the paths in ``layers`` of the arrays without such a dimension.
          unroll: as in :func:`stack`.
          remat: as in :func:`stack`.
          prefetch: as in :func:`stack`.
        """
        self.layers = layers
        self.length = length
        self.shared = frozenset(shared)
        self.unroll = unroll
        self.remat = hashable_policy(remat)
        self.prefetch = checked_prefetch("stack", prefetch)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layers one after the other.

        Args:
          x: the input of the first layer. Every other layer gets the result of the previous one,
            which has to have the same structure, shapes and dtypes.
          *args: further arguments, the same for all layers.
          **kwargs: further keyword arguments, the same for all layers. Flags, ints and values that
            are not arrays are not traced, so that layers may use them as shapes.

        Returns:
          The result of the last layer.
        """
        axes = layer_axes(self.shared)  # 0, and None for what all layers share
        run = loop_of_calls(axes, self.length, self.unroll, self.remat)
        with self._prefetching():
            return run(self.layers, x, args, kwargs)

    def scan(self, step: Callable[..., Any], carry: Any, /, *xs: Any) -> tuple[Any, Any]:
        """Runs a function of each layer, a carry and slices of arrays.

        Args:
          step: called as ``step(layer, carry, *slices)``; returns ``(carry, y)``.
          carry: the carry of the first step.
          *xs: pytrees of arrays whose first dimension is the layers.

        Returns:
          The last carry, and all ``y``, stacked.
        """
        # A pipeline runs only calls of the stack, not this loop, so it has to be told.
        self._note_use()
        # The axes are for the layers, the carry, and each of `xs`; `step` returns a carry and what
        # the loop stacks.
        in_axes = (layer_axes(self.shared), Carry, *[0] * len(xs))
        out_axes = (Carry, 0)
        if self.remat is not False:  # True: recompute all but the inputs of a layer
            step = recompute_in_backward(step, self.remat)
        run = loop(step, in_axes, out_axes, self.length, self.unroll)
        with self._prefetching():
            return run(self.layers, carry, *xs)  # type: ignore[no-any-return]

    def _note_use(self) -> None:
        """Tells a strategy that runs whole stacks, such as a pipeline, that layers are used singly.

        Does nothing if there is no such strategy.
        """
        if (uses := SCHEDULE_USES.get()) is not None:
            uses.note_single_layers(self)

    def _prefetching(self) -> AbstractContextManager[None]:
        """Returns a context in which loops gather the parameters of the next layer ahead.

        Stacks inside a layer are left out, because their own loops gather their parameters.
        """
        inner = (module for _, module in modules_in(self.layers) if isinstance(module, Stack))
        return prefetching(self.layers, self.prefetch, [stack.layers for stack in inner])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """Returns one layer as a new module; for a slice, a new ``Stack``.

        Tells a strategy that runs whole stacks (`_note_use`).
        """
        self._note_use()  # a pipeline has to know that layers are used singly
        # `range` checks an index like a list: -1 is the last layer, and an index that is too large
        # raises an IndexError. For a slice it returns a range, of which only the length is used.
        layer_numbers = range(self.length)
        selected = layer_numbers[index if isinstance(index, slice) else operator.index(index)]
        key = selected if isinstance(selected, int) else index

        def take(array: jax.Array) -> jax.Array:  # (layers, …) → (…), or (layers of the slice, …)
            return _gather_layers(array)[key]

        flat = flatten_layer(self.layers)
        slots = stacked_slots(flat, self.shared)
        # An array in host memory stays there, and an abstract one stays abstract.
        layers = with_arrays(flat, {slot: _apply(take, flat.leaves[slot]) for slot in slots})
        if isinstance(selected, int):
            # Logical axes name each dimension, and a single layer has none for the layers.
            name_axis(nnx.spmd.remove_axis, layers, self.shared)
            return layers
        return Stack(
            layers,
            len(selected),
            self.shared,
            unroll=self.unroll,
            remat=self.remat,
            prefetch=self.prefetch,
        )

    def __setitem__(self, index: int, layer: nnx.Module) -> None:
        """Writes the values of a module of the same structure to one layer."""
        # `range` checks the index like a list: it may be negative, and raises an IndexError.
        number = range(self.length)[operator.index(index)]
        new_layer = flatten_layer(layer)
        # The new layer is compared with the present one, which has no dimension for layers either.
        present_layer = flatten_layer(self[number])
        # Raises unless both layers have the same structure and types.
        _check_equal(
            [present_layer, new_layer], name_of=lambda i: "the layers" if i == 0 else f"[{number}]"
        )
        # `layers` has the structure of one layer, so slots mean the same in both.
        stacked = flatten_layer(self.layers)
        slots = stacked_slots(stacked, self.shared)  # the arrays with a dimension for layers
        old_arrays = [stacked.leaves[slot] for slot in slots]  # (layers, …)
        new_arrays = [new_layer.leaves[slot] for slot in slots]  # (…)

        # Layers are gathered because JAX refuses an update along an axis of Explicit type.
        def with_layer(array: jax.Array, layer: jax.Array) -> jax.Array:
            return _gather_layers(array).at[number].set(layer)

        pairs = zip(old_arrays, new_arrays, strict=True)
        arrays = [compute(with_layer, old, new) for old, new in pairs]  # (layers, …)
        # On Explicit axes, each array gets back the sharding from which it was gathered. On Auto
        # axes it has kept its sharding, and None changes nothing.
        shardings = [None if type_spec(x) is None else sharding_of(x) for x in old_arrays]
        leaves = replace_slots(stacked.leaves, slots, apply_shardings(arrays, shardings))
        # `rebuild` writes all arrays in one step, of Variables and of attributes of modules, so an
        # error or an interrupt does not leave a part of the layer.
        rebuild(stacked, leaves, "stack")

    def __iter__(self) -> Iterator[Any]:
        """Yields the layers as separate modules; what they share stays shared."""
        return (self[i] for i in range(self.length))


def stack(
    layers: Iterable[nnx.Module] | Callable[..., Any],
    length: int | None = None,
    /,
    *args: Any,
    unroll: int | bool = 1,
    remat: Policy | bool = False,
    prefetch: int = 0,
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
      prefetch: 1 to gather the parameters of the next layer while a layer computes, if a strategy
        gathers them, such as :func:`~nnx_sharding.partition.fsdp`.
      **kwargs: keyword arguments for making a layer. An ``nnx.Rngs`` among the arguments is
        split.

    Returns:
      The stack, with copies of the values in the list. An object that all modules of the list share
      stays shared, even with a user outside of the stack, such as an embedding. A Variable of a
      single layer is copied, and no longer tied to other users of it.

    Raises:
      TypeError: ``layers`` is neither a list of modules nor makes one, or a list comes with
        arguments for making layers; or, when the stack is called, a layer returns another
        structure, shape or dtype than it gets.
      ValueError: there are no layers, they differ in more than the values of arrays, or some of
        them, but not all, share a Variable.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import stack
      >>> layers = stack(nnx.Linear, 3, 4, 4, rngs=nnx.Rngs(0))
      >>> len(layers), layers.layers.kernel.shape, layers[0].kernel.shape
      (3, (3, 4, 4), (4, 4))
      >>> layers(jnp.ones((2, 4))).shape
      (2, 4)
    """
    options: dict[str, Any] = {"unroll": unroll, "remat": remat, "prefetch": prefetch}
    # A module makes no layers, though it may be callable.
    if callable(layers) and not isinstance(layers, nnx.Module) and isinstance(length, int):
        if length < 1:
            raise ValueError(f"stack: expected a positive length, got {length}.")
        layer, shared = _make_layers(layers, length, args, kwargs)
        return Stack(layer, length, shared, **options)
    # `layers` must now be a list, without a length. A Stack is iterable, but its layers have the
    # form of one already.
    if isinstance(layers, Stack | str) or not isinstance(layers, Iterable) or length is not None:
        raise TypeError(
            "stack takes a list of modules, as in stack(blocks), or what makes one and the number "
            f"of layers, as in stack(Block, 24, rngs=rngs), got {show(layers)}"
            + ("." if length is None else f" and {length!r}.")
        )
    if kwargs:  # only functions that make layers take them
        raise TypeError(
            "stack: a list of modules takes no arguments for making layers, got "
            f"{', '.join(kwargs)}."
        )
    blocks = [*layers]
    wrong = [f"  [{i}]: {show(b)}" for i, b in enumerate(blocks) if not isinstance(b, nnx.Module)]
    raise_if_any(TypeError, "stack: expected modules, got:", wrong)
    if not blocks:
        raise ValueError("stack: expected at least one module, got an empty list.")
    layer, shared = _join_layers(blocks)
    return Stack(layer, len(blocks), shared, **options)


def _make_layers(
    make: Callable[..., Any], length: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Path]]:
    """Makes all layers by one ``vmap`` over their random streams.

    Each layer gets one part of each stream: `split` gives a stream a first dimension for the
    layers, over which `vmap` maps. Without any stream, `vmap` makes equal layers.

    Args:
      args: the positional arguments of ``make``; random streams among them are split.
      kwargs: its keyword arguments; random streams among them are split, too.

    Returns:
      One layer whose arrays have a first dimension for all layers, and the paths of the arrays that
      have none.
    """

    def is_stream(x: object) -> bool:
        return isinstance(x, nnx.Rngs | nnx.RngStream)

    # Only the streams are mapped, so they are arguments. The function captures all else.
    streams_by_position = {i: x.split(length) for i, x in enumerate(args) if is_stream(x)}
    streams_by_name = {key: x.split(length) for key, x in kwargs.items() if is_stream(x)}

    def make_one(by_position: dict[int, Any], by_name: dict[str, Any]) -> Any:
        positional = [by_position.get(i, x) for i, x in enumerate(args)]
        return make(*positional, **{**kwargs, **by_name})

    # Masks and other arrays outside of Variables are the same in all layers.
    out_axes = StateAxes({nnx.Not(nnx.Variable): None, ...: 0})
    make_all = vmap(make_one, out_axes=out_axes, axis_size=length, **LAYER_OPTIONS)
    layer = make_all(streams_by_position, streams_by_name)
    flat = flatten_layer(layer)
    # Arrays outside of Variables have no dimension for layers. A location without slots, such as a
    # Variable that holds an empty pytree, has no arrays, so it is not listed.
    unmapped = [x for x in locations_of(flat) if x.slots and not is_in_variable(flat, x)]
    return layer, [location.path for location in unmapped]


def _join_layers(blocks: Sequence[nnx.Module]) -> tuple[Any, list[Path]]:
    """Joins existing layers into one with stacked arrays, as `_make_layers` returns it.

    An object that is the same in all layers stays as it is, such as a Variable that all of them
    use. Equal arrays of different Variables are stacked, because they may differ after a step of
    training.

    Raises:
      ValueError: layers differ in more than the values of arrays, or only some share a Variable.
    """
    flats = [flatten_layer(block) for block in blocks]
    # Raises unless all layers have one structure, so slots mean the same in all of them.
    _check_equal(flats, name_of=lambda i: f"layer {i}")
    first_layer = flats[0]
    stacked_arrays: dict[int, Any] = {}  # by slot, (layers, …)
    shared: list[Path] = []
    for location in locations_of(first_layer):
        # A single layer shares nothing, so its Variables get the dimension, too.
        if location.slots and len(flats) > 1 and _is_same_in_all(location, flats):
            shared.append(location.path)
            continue
        for slot in location.slots:
            arrays = [flat.leaves[slot] for flat in flats]
            # Layers may be abstract, or offloaded, and their stack is then the same.
            stacked_arrays[slot] = _apply(lambda *arrays: jnp.stack(arrays), *arrays)
    _refuse_partly_shared(flats, shared)  # raises only if some layers share a Variable
    layer = with_arrays(first_layer, stacked_arrays)
    # Logical axes name each dimension, so the new one needs an entry.
    name_axis(nnx.spmd.add_axis, layer, shared)
    return layer, shared


def _refuse_partly_shared(flats: Sequence[Flat], shared: Collection[Path]) -> None:
    """Raises a ``ValueError`` for Variables that some layers share, but not all at one path.

    In a stack, such a Variable would become one slice for each of these layers, and the slices
    would train apart. ``shared`` has the paths of what all layers share.
    """
    expressions: dict[int, list[str]] = {}  # the expressions for each Variable, by its id
    for number, flat in enumerate(flats):
        for location in locations_of(flat):
            # `shared` lists no empty Variable, so without the test of slots, one that all layers
            # share would be refused here.
            if location.slots and is_in_variable(flat, location) and location.path not in shared:
                variable = flat.objects[cast(int, location.object_index)]
                place = accessor(f"layers[{number}]", location.path)
                expressions.setdefault(id(variable), []).append(place)
    raise_if_any(
        ValueError,
        "stack: these Variables are shared by some layers only, and would become separate copies:",
        [f"  {' is '.join(names)}" for names in expressions.values() if len(names) > 1],
        "Let all layers share them, make one layer of each group that repeats them, or keep a list "
        "of layers. If they are to be separate, pass a copy (nnx.clone).",
    )


def _is_same_in_all(location: Location, flats: Sequence[Flat]) -> bool:
    """Whether all layers have the same Variable, or the same arrays if they are in no Variable.

    Args:
      location: where the Variable or the arrays are in each layer.
    """
    first_layer, *other_layers = flats
    if is_in_variable(first_layer, location):
        index = cast(int, location.object_index)
        return all(flat.objects[index] is first_layer.objects[index] for flat in other_layers)
    return all(
        flat.leaves[slot] is first_layer.leaves[slot]
        for flat in other_layers
        for slot in location.slots
    )


def _gather_layers(x: jax.Array) -> jax.Array:
    """Puts all layers of a stacked array on each device, if an Explicit axis shards them.

    Shape and values stay: (layers, …). The array is gathered because JAX refuses to index a
    dimension that an Explicit axis shards. On Auto axes, XLA gathers what it needs.
    """
    spec = type_spec(x)  # over Explicit axes; None without any
    if spec is None:
        return x
    [layers_entry] = pad_entries(spec, 1)
    if layers_entry is None:  # no axis shards the layers
        return x
    unsharded = with_entries(spec, [None, *spec.partitions[1:]])
    [gathered] = apply_shardings([x], [NamedSharding(sharding_of(x).mesh, unsharded)])
    return cast(jax.Array, gathered)


def _apply(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a function of arrays or abstract ones; the result stays in the first array's memory."""
    is_abstract = isinstance(arrays[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(function, *arrays) if is_abstract else compute(function, *arrays)


def count_layer_dimensions(flat: Flat) -> dict[int, int]:
    """Returns how many leading dimensions of each array, by slot, are stacked layers.

    The array of a stack in a stack has two such dimensions. It is counted once for each stack,
    because both are in the graph. Arrays outside of stacks are not in the result.
    """
    structure = flat.structure
    counts = dict[int, int]()  # by slot
    # `walk` takes slots of arrays outside of objects from this iterator. Below a module there are
    # no such arrays.
    no_slots = iter(())
    for index, entry in enumerate(structure.entries):
        if not (isinstance(entry, NodeEntry) and issubclass(entry.type, Stack)):
            continue
        shared: frozenset[Path] = flat.objects[index].shared
        layers = entry.children[entry.keys.index("layers")]  # the attribute `Stack.layers`
        for path, _, slots in structure.walk(layers, no_slots):
            if path not in shared:
                for slot in slots:
                    counts[slot] = counts.get(slot, 0) + 1
    return counts


def _check_equal(flats: Sequence[Flat], name_of: Callable[[int], str]) -> None:
    """Raises a ``ValueError`` if layers differ in more than the values of arrays.

    ``name_of`` returns the expression for a layer by its number, such as ``layer 3``.
    """
    raise_if_any(
        ValueError,
        f"stack: layers may differ only in the values of arrays; compared with {name_of(0)}:",
        layer_differences(flats, name_of),
        "Make one layer of each repeating group, or use a list.",
    )
