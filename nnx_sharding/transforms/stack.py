"""``stack``: modules of equal structure as one, with stacked Variables, run in a loop."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from .. import _compat
from ..activations.schedules import SCHEDULE_USES
from ..activations.variables import modules_in
from ..core.constrain import apply_shardings, sharding_of, type_spec
from ..core.flatten import Flat, flatten
from ..core.signature import Signature
from ..core.structure import Location, NodeEntry, VariableEntry
from ..core.unflatten import perform, unflatten, update
from ..diagnostics.differences import differences
from ..errors import raise_listed
from ..specs.activation_sharding import checked_prefetch
from ..specs.filters import Paths
from ..specs.fitting import with_entries
from ..specs.paths import Path, accessor, path_key
from .carry_checks import type_changes
from .in_trace import replace_slots, tree_text
from .mapped_axes import Carry, StateAxes, change_names
from .prefetching import prefetching
from .remat import remat as remat_
from .scan import scan
from .vmap import vmap

# Layers may share Variables, whatever the mode of Flax.
_METADATA = {nnx.PARTITION_NAME: None}
_OPTIONS: Any = {"transform_metadata": _METADATA, "graph": True, "graph_updates": True}


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
      prefetch: 1 to gather the parameters of the next layer while one computes, as by
        :func:`~nnx_sharding.partition.fsdp`, where a strategy gathers them.

    """

    def __init__(
        self,
        layers: Any,
        length: int,
        shared: Iterable[Path] = (),
        *,
        unroll: int | bool = 1,
        remat: Any = False,
        prefetch: int = 0,
    ):
        self.layers = layers
        self.length = length
        self.shared = frozenset(shared)
        self.unroll = unroll
        if isinstance(remat, Iterable) and not isinstance(remat, str):  # in hashable form
            remat = tuple(map(tuple, remat.items() if isinstance(remat, Mapping) else remat))
        self.remat = remat
        self.prefetch = checked_prefetch("stack", prefetch)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layers one after the other.

        Args:
          x: what the first layer gets; every other layer gets what the previous one returned, which
            has to have the same structure, shapes and dtypes.
          *args: further arguments, the same for all layers.
          **kwargs: likewise. Flags, ints and what is not an array are not traced, so that layers
            may use them as shapes.

        Returns:
          What the last layer returned.
        """
        options = (self._axes, self.length, self.unroll, self.remat)
        with self._prefetching():
            return _loop_of_calls(*options)(self.layers, x, args, kwargs)

    def scan(self, step: Callable[..., Any], carry: Any, /, *xs: Any) -> tuple[Any, Any]:
        """Runs a function of each layer, a carry and slices of arrays.

        Args:
          step: called as ``step(layer, carry, *slices)``; returns ``(carry, y)``.
          carry: what the first step gets.
          *xs: pytrees of arrays whose first dimension is the layers.

        Returns:
          The last carry, and all ``y``, stacked.
        """
        self._note_use()
        in_axes = (self._axes, Carry, *[0] * len(xs))
        step = step if self.remat is False else _recomputed(step, self.remat)
        run = _loop(step, in_axes, (Carry, 0), self.length, self.unroll)
        with self._prefetching():
            return run(self.layers, carry, *xs)  # type: ignore[no-any-return]

    def _note_use(self) -> None:
        """Notes that layers are used one by one, where a strategy would run all of them."""
        if (uses := SCHEDULE_USES.get()) is not None:
            uses.take_out(self)

    def _prefetching(self) -> AbstractContextManager[None]:
        inside = (x for _, x in modules_in(self.layers) if isinstance(x, Stack))
        return prefetching(self.layers, self.prefetch, [x.layers for x in inside])

    @property
    def _axes(self) -> StateAxes:
        return StateAxes({Paths(self.shared): None, ...: 0})

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """One layer as a new module; for a slice, a new ``Stack``."""
        self._note_use()
        numbers = range(self.length)[index if isinstance(index, slice) else operator.index(index)]
        flat = _flat(self.layers)
        slots = self._stacked_slots(flat)
        key = numbers if isinstance(numbers, int) else index
        parts = {slot: _applied(lambda x: _all_layers(x)[key], flat.leaves[slot]) for slot in slots}
        layers = _built(flat, parts)
        if not isinstance(numbers, int):
            options: Any = {"unroll": self.unroll, "remat": self.remat}
            options["prefetch"] = self.prefetch
            return Stack(layers, len(numbers), self.shared, **options)
        _name_axis(nnx.spmd.remove_axis, layers, self.shared)
        return layers

    def __setitem__(self, index: int, layer: Any) -> None:
        """Writes the values of a module of the same structure to one layer."""
        number = range(self.length)[operator.index(index)]
        new = _flat(layer)
        _check_equal([_flat(self[number]), new], lambda i: f"[{number}]" if i else "the layers")
        flat = _flat(self.layers)
        slots = self._stacked_slots(flat)
        old = [flat.leaves[slot] for slot in slots]
        pairs = zip(old, (new.leaves[slot] for slot in slots), strict=True)
        arrays = [_all_layers(x).at[number].set(y) for x, y in pairs]
        typed = [None if type_spec(x) is None else sharding_of(x) for x in old]
        arrays = apply_shardings(arrays, typed)
        entries = enumerate(flat.structure.entries)
        variables = [i for i, entry in entries if isinstance(entry, VariableEntry)]
        leaves = replace_slots(flat.leaves, slots, arrays)
        perform(update(flat.structure, leaves, flat.objects, variables))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.length))

    def unstack(self) -> list[Any]:
        """The layers as separate modules; what they share stays shared."""
        return [*self]

    def _stacked_slots(self, flat: Flat) -> list[int]:
        return [s for x in _locations(flat) if x.path not in self.shared for s in x.slots]


def stack(
    layers: Any,
    length: int | None = None,
    /,
    *args: Any,
    unroll: int | bool = 1,
    remat: Any = False,
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
      prefetch: 1 to gather the parameters of the next layer while one computes, where a strategy
        such as :func:`~nnx_sharding.partition.fsdp` gathers them.
      **kwargs: keyword arguments for making a layer. An ``nnx.Rngs`` among the arguments is
        split.

    Returns:
      The stack, with copies of the values in the list; what all modules of the list share stays
      shared.

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
    if callable(layers) and isinstance(length, int):
        if length < 1:
            raise ValueError(f"stack: expected a positive length, got {length}.")
        layer, shared = _made(layers, length, args, kwargs)
        return Stack(layer, length, shared, unroll=unroll, remat=remat, prefetch=prefetch)
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
    layer, shared = _stacked(blocks)
    return Stack(layer, len(blocks), shared, unroll=unroll, remat=remat, prefetch=prefetch)


def _made(
    make: Callable[..., Any], length: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Path]]:
    """Layers that are made together, and the paths of what they share."""
    given = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    streams = {name: x for name, x in given.items() if isinstance(x, nnx.Rngs | nnx.RngStream)}

    def make_one(streams: dict[str, Any]) -> Any:
        every = given | streams
        return make(*(every[str(i)] for i in range(len(args))), **{k: every[k] for k in kwargs})

    # Masks and other arrays outside of Variables are the same in all layers.
    out_axes = StateAxes({_is_array: None, ...: 0})
    run = vmap(make_one, out_axes=out_axes, axis_size=length, **_OPTIONS)
    layer = run({name: x.split(length) for name, x in streams.items()})
    flat = _flat(layer)
    return layer, [x.path for x in _locations(flat) if x.slots and not _is_variable(flat, x)]


def _is_array(path: Path, value: Any) -> bool:
    return not isinstance(value, nnx.Variable)


def _stacked(blocks: Sequence[Any]) -> tuple[Any, list[Path]]:
    """One layer with the arrays of all, and the paths of what they share."""
    flats = [_flat(block) for block in blocks]
    _check_equal(flats, lambda i: f"layer {i}")
    first, *others = flats
    new, shared = dict[int, Any](), list[Path]()
    for x in _locations(first):
        if _is_variable(first, x):
            index: Any = x.entry
            same = all(flat.objects[index] is first.objects[index] for flat in others)
        else:
            same = all(flat.leaves[s] is first.leaves[s] for flat in others for s in x.slots)
        if same and others and x.slots:
            shared.append(x.path)
        else:
            joined = (_applied(_joined, *(flat.leaves[slot] for flat in flats)) for slot in x.slots)
            new |= zip(x.slots, joined, strict=True)
    layer = _built(first, new)
    _name_axis(nnx.spmd.add_axis, layer, shared)
    return layer, shared


def _joined(*arrays: Any) -> Any:
    return jnp.stack(arrays)


def _all_layers(x: jax.Array) -> jax.Array:
    """Stacked arrays with all layers on each device, if an Explicit axis shards them.

    JAX does not index such a dimension; on Auto axes, XLA gathers what it needs.
    """
    spec = type_spec(x)
    if spec is None or spec.partitions[:1] in ((), (None,)):
        return x
    whole = NamedSharding(sharding_of(x).mesh, with_entries(spec, [None, *spec.partitions[1:]]))
    [found] = apply_shardings([x], [whole])
    return found  # type: ignore[no-any-return]


def _applied(function: Callable[..., Any], *arrays: Any) -> Any:
    """The result of a function of arrays, which may be abstract."""
    is_abstract = isinstance(arrays[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(function, *arrays) if is_abstract else function(*arrays)


def _call(layer: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = layer(x, *args, **kwargs)
    is_leaf = _compat.is_graph_object
    given, before = jax.tree_util.tree_flatten_with_path(x, is_leaf=is_leaf)
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


# The ints among further arguments, by their place among the leaves of these.
_Settings: TypeAlias = tuple[tuple[int, int], ...]


def _call_with_settings(layer: Any, x: Any, further: Any, settings: _Settings) -> Any:
    leaves, treedef = jax.tree.flatten(further, is_leaf=_compat.is_graph_object)
    for place, number in settings:
        leaves[place] = number
    return _call(layer, x, *jax.tree.unflatten(treedef, leaves))


def _recomputed_call(policy: Any) -> Callable[..., Any]:
    """The call of a layer by ``remat``, which would trace ints that are not static."""
    run = _recomputed(_call_with_settings, policy, static_argnums=3)

    def call(layer: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_compat.is_graph_object)
        settings = tuple((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, int))
        further = replace_slots(
            leaves, dict(settings), [False] * len(settings)
        )  # flags stay leaves
        return run(layer, x, jax.tree.unflatten(treedef, further), settings)

    return call


def _recomputed(step: Callable[..., Any], policy: Any, **options: Any) -> Any:
    return remat_(step, policy=None if policy is True else policy, prevent_cse=False, **options)


@functools.lru_cache(maxsize=256, typed=True)  # so that JAX finds what it traced before
def _loop_of_calls(axes: StateAxes, length: int, unroll: Any, policy: Any) -> Any:
    step = _call if policy is False else _recomputed_call(policy)
    return _loop(step, (axes, Carry, None, None), Carry, length, unroll)


def _loop(step: Callable[..., Any], in_axes: Any, out_axes: Any, length: int, unroll: Any) -> Any:
    return scan(step, in_axes=in_axes, out_axes=out_axes, length=length, unroll=unroll, **_OPTIONS)


def _flat(layer: Any) -> Flat:
    """A layer, flattened like the only argument of a call."""
    return flatten(((layer,), {}))


def _locations(flat: Flat) -> list[Location]:
    """Where the arrays of a flattened layer are."""
    root: Any = flat.structure.root
    return [*flat.structure.walk(root.children[0], iter(()))]


def _is_variable(flat: Flat, x: Location) -> bool:
    return x.entry is not None and isinstance(flat.structure.entries[x.entry], VariableEntry)


def _built(flat: Flat, new: Mapping[int, Any]) -> Any:
    """A layer with other arrays in some slots, and the same Variables without these."""
    same = {
        index: flat.objects[index]
        for index, slots in enumerate(flat.structure.slots)
        if isinstance(flat.structure.entries[index], VariableEntry)
        if slots and new.keys().isdisjoint(slots)
    }
    leaves = replace_slots(flat.leaves, new, new.values())
    (layer,), _ = unflatten(flat.structure, leaves, same, share=True).root
    return layer


def _name_axis(change: Callable[..., Any], layer: Any, shared: Iterable[Path]) -> None:
    """Adds the axis of the layers to the logical axes of what is not shared, or removes it."""
    flat = _flat(layer)
    own = (x.entry for x in _locations(flat) if x.entry is not None and x.path not in shared)
    change_names(change, ((flat.objects[index], 0) for index in own), _METADATA)


def layer_dimensions(flat: Flat) -> dict[int, int]:
    """The number of leading dimensions for the layers of a ``Stack``, by slot."""
    structure, counts = flat.structure, dict[int, int]()
    for index, entry in enumerate(structure.entries):
        if isinstance(entry, NodeEntry) and issubclass(entry.type, Stack):
            child = entry.children[entry.keys.index("layers")]
            for path, _, slots in structure.walk(child, iter(())):
                for slot in slots if path not in flat.objects[index].shared else ():
                    counts[slot] = counts.get(slot, 0) + 1
    return counts


def _check_equal(flats: Sequence[Flat], name_of: Callable[[int], str]) -> None:
    """Checks that layers differ only in the values of arrays."""
    raise_listed(
        ValueError,
        f"stack: layers may differ only in the values of arrays; compared with {name_of(0)}:",
        _unequal(flats, name_of),
        "Make one layer of each repeating group, or use a list.",
    )


def _unequal(flats: Sequence[Flat], name_of: Callable[[int], str]) -> list[str]:
    """How layers differ from the first one, apart from the values of arrays."""
    first, lines = flats[0], list[str]()
    signature = Signature(("layer",), (), *[frozenset[Any]()] * 4)
    for number, flat in enumerate(flats[1:], start=1):
        if flat.structure != first.structure:
            changes = differences((signature, first.structure), (signature, flat.structure))
            lines += [f"  {name_of(number)}: {change}" for change in changes]
            continue
        types = [[jax.typeof(x).str_short() for x in each.leaves] for each in (first, flat)]
        lines += [
            f"  {name_of(number)}: {accessor('layer', x.path)}: {types[0][slot]} → {types[1][slot]}"
            for x in _locations(flat)
            for slot in x.slots
            if types[0][slot] != types[1][slot]
        ]
    return lines
