"""Runs a method of a module with Auto axes where the axes around it are Explicit.

On Explicit axes the type of each array says how it is sharded, and JAX refuses operations whose
result it cannot type. A strategy infers shardings, so its modules run with Auto axes, as in
``jax.sharding.auto_axes``::

    inputs   typed on the Explicit axes → the same arrays on Auto axes
    method   the compiler chooses
    outputs  get a type again: each unchanged or updated array its old one, new ones by `retype`

New arrays are typed by what is declared for them. One with the shape and dtype of an input, such as
a cache that is passed in and returned, is typed like that; others like the leading dimensions of
the first input (:func:`output_spec`): those of the batch, which most methods keep.

From the core: `flatten` takes the arrays (``leaves``) out of modules, and `rebuild` puts others
into them; `AxisTypeChange` and `RetypedArrays` give arrays the types of other axes and back.
`LEFT_AUTO_AXES` notes, for a function with Auto axes around, what such arrays were inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..core.constrain import type_spec
from ..core.flatten import flatten
from ..core.rebuild import rebuild
from ..core.retyping import LEFT_AUTO_AXES, AxisTypeChange, RetypedArrays, call_retyped
from ..specs.activation_sharding import ActivationSharding, InOutSharding
from ..specs.fitting import keep_axes, spec_axes
from ..specs.types import AxisName
from .calls import Tag
from .intercept import Keywords
from .variables import is_layer, modules_in

Inputs = TypeVar("Inputs")


def with_auto_axes(
    inputs: Inputs,
    call: Callable[[Inputs], object],
    axes: frozenset[AxisName],
    retype: Callable[[jax.Array], jax.Array],
) -> object:
    """Calls a function while some Explicit axes are Auto.

    Args:
      inputs: a pytree of arrays, and of modules, which the function may change.
      call: the function of ``inputs``.
      axes: the axes.
      retype: gives a new array of the result its type on the axes outside.

    Returns:
      What the function returns, with the types of the axes outside.
    """
    mesh = jax.sharding.get_abstract_mesh()
    change = AxisTypeChange.of(mesh, axes, AxisType.Auto, name="activation_shardings")
    if change is None:
        return call(inputs)
    before = flatten(inputs)
    arrays = RetypedArrays.of(change, before.leaves)
    try:
        after = call_retyped(before, arrays, call)
    except BaseException:
        # The modules hold arrays of the Auto axes; a caller that catches the error uses them.
        rebuild(before._replace(leaves=arrays.inside), before.leaves, foreign=True)
        raise
    leaves, untyped = arrays.leave(before.structure, after)  # with old types; new arrays by slot
    left = LEFT_AUTO_AXES.get()
    for slot, x in untyped.items():
        leaves[slot] = retype(x)
        if left is not None:
            left.add(leaves[slot], x)
    return rebuild(after, leaves, foreign=True)


def inferred_axes(
    module: object,
    tag: Tag,
    chosen: InOutSharding,
    explicit: frozenset[AxisName],
    inputs: tuple[tuple[Any, ...], Keywords],
) -> frozenset[AxisName]:
    """Returns which Explicit axes are Auto in a method: all or none of them.

    They are Auto if that is declared, and by default where shardings are inferred, and in a
    layer with a declared output. Methods that get no array with a sharding in its type, or that
    are told the sharding of their output, run unchanged.

    Args:
      module: the module.
      tag: its tag.
      chosen: the shardings that are declared for the method.
      explicit: the Explicit axes of the mesh.
      inputs: the positional and keyword arguments of the call.
    """
    args, kwargs = inputs
    has_types = first_with_explicit_spec((args, kwargs)) is not None
    if not explicit or not has_types or kwargs.get("out_sharding") is not None:
        return frozenset()
    if chosen.axis_types is not None:
        return explicit if chosen.axis_types is AxisType.Auto else frozenset()
    if any(_is_explicit_within(source, tag, module) for source in tag.sources):
        return frozenset()
    is_inferred = any(source.infer for source in tag.sources)
    is_declared = chosen.output is not None and is_layer(module)
    return explicit if is_inferred or is_declared else frozenset()


def _is_explicit_within(source: ActivationSharding, tag: Tag, module: object) -> bool:
    """Returns whether a module, or one in it, is declared to run on Explicit axes, as written.

    It could not run so within one whose axes are Auto.
    """
    if not any(x.axis_types is AxisType.Explicit for x in source.shardings):
        return False  # without a walk through the module
    return any(source.is_explicit((*tag.path, *p), inner) for p, inner in modules_in(module))


def output_spec(x: jax.Array, first: jax.Array, spec: PartitionSpec | None) -> PartitionSpec:
    """Returns the spec on Explicit axes of an output of a method that ran with Auto axes.

    Args:
      x: the output.
      first: the input that it is typed like.
      spec: what is known of the output's spec, with ``OPEN`` where nothing is; None for nothing.

    Returns:
      ``spec``, with open dimensions like those of the input as long as sizes are equal. The last
      dimension, of features, stays whole, unless all of the shape is that of the input, or there is
      no other.
    """
    is_like = x.shape == first.shape and spec is None
    # The number of dimensions that may be like the input's. The only dimension of an output, such
    # as a value for each row, is one of rows if the input has others than features.
    has_rows = x.ndim == 1 and first.ndim > 1
    count = x.ndim if is_like or has_rows else max(x.ndim - 1, 0)
    leading = []
    entries = jax.typeof(first).sharding.spec.partitions
    for size, size_of_first, entry in zip(x.shape[:count], first.shape, entries, strict=False):
        if size != size_of_first:
            break
        leading.append(entry)
    like_first = PartitionSpec(*leading)
    if spec is None:
        return like_first
    # An axis can shard one dimension only, so those of the known spec are left out.
    free_axes = {*spec_axes(like_first)}.difference(spec_axes(spec))
    entries = keep_axes(like_first, free_axes).partitions
    pairs = itertools.zip_longest(spec.partitions, entries)
    return PartitionSpec(*(entry if known is OPEN else known for known, entry in pairs))


def opened(spec: PartitionSpec | None) -> PartitionSpec | None:
    """Returns a spec that leaves dimensions without an axis open; None for None."""
    return None if spec is None else PartitionSpec(*(x or OPEN for x in spec.partitions))


OPEN = PartitionSpec.UNCONSTRAINED


def first_with_explicit_spec(inputs: object) -> jax.Array | None:
    """Returns the first array with a sharding over Explicit axes in its type, or None."""
    return next((x for x in arrays_in(inputs) if type_spec(x) is not None), None)


def input_like(x: jax.Array, inputs: object) -> jax.Array | None:
    """Returns the input by which an output is typed: of its shape and dtype, else the first one.

    Only inputs with a sharding over Explicit axes in their types count; None without any.
    """
    typed = [array for array in arrays_in(inputs) if type_spec(array) is not None]
    alike = (array for array in typed if array.shape == x.shape and array.dtype == x.dtype)
    return next(alike, typed[0] if typed else None)


def arrays_in(tree: object) -> list[jax.Array]:
    """Lists the arrays in a pytree, except arrays in modules."""
    leaves = jax.tree.leaves(tree, is_leaf=_compat.is_graph_object)
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
