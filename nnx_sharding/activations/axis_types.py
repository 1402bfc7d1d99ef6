"""Runs a method of a module with Auto axes if the axes around it are Explicit.

On Explicit axes the type of each array says how it is sharded, and JAX refuses operations whose
result it cannot type. A strategy infers shardings, so its modules run with Auto axes, as in
``jax.sharding.auto_axes``::

    inputs   typed on the Explicit axes → the same arrays on Auto axes
    method   the compiler chooses
    outputs  get a type again: each unchanged or updated array its old one, new ones by `retype`

New arrays are typed as they are declared. Without a declaration, an array with the shape and dtype
of an input is typed like that input, such as a cache that is passed in and returned. Any other
array is typed like the leading dimensions of the first input (:func:`output_spec`), because these
are the batch, which most methods keep.

The declarations for a module are *sources* (`ActivationSharding`), of the user and of strategies:
``tag.sources``. If a strategy infers shardings, its source has ``infer``. ``axis_types`` of a
declaration (`InOutSharding`) chooses the type of the axes for one method; ``is_explicit`` of a
source says whether it chooses Explicit axes for the module at a path. `modules_in` yields a module
and all modules in it, each after its path; a *layer* (`is_layer`) is a module without submodules.
`type_spec` is the spec over Explicit axes in the type of an array; None without such axes.

From the core: `flatten` takes the arrays (``leaves``) out of modules, and `rebuild` puts others
into them; with ``foreign`` it also changes modules that another trace has made. `AxisTypeChange`
and `RetypedArrays` give arrays the types of other axes and back.
`RetypedArrays.with_outer_types` returns by slot the arrays with the types outside, and the new
arrays, whose types outside are not known. `LEFT_AUTO_AXES` keeps new arrays with their types
inside, too: if the traced function returns one with a declared sharding, the array goes there
directly from the Auto axes.
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
from ..specs.activation_sharding import ActivationSharding
from ..specs.fitting import keep_axes, spec_axes
from ..specs.types import AxisName
from .calls import Frame, Shape, Tag
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
      The result of the function, with the types of the axes outside.
    """
    mesh = jax.sharding.get_abstract_mesh()
    change = AxisTypeChange.of(mesh, axes, AxisType.Auto, name="activation_shardings")
    if change is None:  # all of these axes are Auto already
        return call(inputs)
    flat_inputs = flatten(inputs)
    # Each array of the inputs with both types: outside of the call, and inside.
    retyped_inputs = RetypedArrays.of(change, flat_inputs.leaves)
    try:
        # The result of the function and the changed modules, flattened.
        flat_after = call_retyped(flat_inputs, retyped_inputs, call)
    except BaseException:
        # The modules hold arrays with the types inside. A caller that catches the error may use the
        # modules again, so they get the arrays back that they had.
        # `rebuild` changes the modules in place, so its result is not needed here.
        flat_inside = flat_inputs._replace(leaves=retyped_inputs.inside)
        rebuild(flat_inside, flat_inputs.leaves, foreign=True)
        raise
    # By slot: arrays with the types outside (unchanged arrays, and arrays that replace others), and
    # the new arrays, whose types outside are not known.
    outer_leaves, new_arrays = retyped_inputs.with_outer_types(flat_inputs.structure, flat_after)
    left_auto_axes = LEFT_AUTO_AXES.get()  # None outside of a lifted function
    for slot, new_array in new_arrays.items():
        outer_leaves[slot] = retype(new_array)
        if left_auto_axes is not None:
            left_auto_axes.add(outer_leaves[slot], new_array)
    return rebuild(flat_after, outer_leaves, foreign=True)


def inferred_axes(
    frame: Frame, explicit: frozenset[AxisName], inputs: tuple[tuple[Any, ...], Keywords]
) -> frozenset[AxisName]:
    """Returns which Explicit axes are Auto in a method: all or none of them.

    The first of these rules that applies decides:

    1. None are Auto if the method gets no array on Explicit axes, or gets the option
       ``out_sharding``, which needs Explicit axes.
    2. The declaration for the method (``axis_types``) decides.
    3. None are Auto if a module in this one is declared to run on Explicit axes.
    4. All are Auto if a strategy infers shardings, or if this is a layer with a declared output.

    Args:
      frame: the call of the method, with what is declared for it.
      explicit: the Explicit axes of the mesh.
      inputs: the positional and keyword arguments of the call.
    """
    args, kwargs = inputs
    module, tag, declared = frame.module, frame.tag, frame.declared
    has_types = first_with_explicit_spec((args, kwargs)) is not None
    if not explicit or not has_types or kwargs.get("out_sharding") is not None:
        return frozenset()
    if declared.axis_types is not None:
        return explicit if declared.axis_types is AxisType.Auto else frozenset()
    if any(_is_explicit_within(source, tag, module) for source in tag.sources):
        return frozenset()
    is_inferred = any(source.infer for source in tag.sources)
    is_declared = declared.output is not None and is_layer(module)
    return explicit if is_inferred or is_declared else frozenset()


def _is_explicit_within(source: ActivationSharding, tag: Tag, module: object) -> bool:
    """Returns whether a source declares Explicit axes for a module, or for one in it.

    If it does, the outer module has to run on Explicit axes as well, because inside Auto axes the
    inner one would find no Explicit ones.

    Args:
      tag: the tag of the module, with its path.
    """
    # This shortcut is for nearly all sources, because asking each module of a model takes time.
    if not any(x.axis_types is AxisType.Explicit for x in source.shardings):
        return False
    return any(
        source.is_explicit((*tag.path, *path_within), inner)
        for path_within, inner in modules_in(module)
    )


def output_spec(x: jax.Array, like: jax.Array, spec: PartitionSpec | None) -> PartitionSpec:
    """Returns the spec on Explicit axes of an output of a method that ran with Auto axes.

    If nothing is known of the output, its leading dimensions are sharded like those of an input, as
    long as sizes are equal, because most methods keep the batch. The last dimension, of features,
    stays whole, with two exceptions: if all of the shape is that of the input, or if the output has
    one dimension, as a value for each row has. With the input f32[8@data, 4@model]::

        f32[8, 16]   →   P("data")                 rows like the input's, whole features
        f32[8, 4]    →   P("data", "model")        the same shape
        f32[8]       →   P("data")                 a value for each row
        f32[8, 16], if P(OPEN, "model") is known   →   P("data", "model")

    Args:
      x: the output.
      like: the input like which the output is typed.
      spec: what is known of the output's spec, with ``OPEN`` for unknown entries; None for nothing.

    Returns:
      ``spec``, with an entry of the input, or None, for each dimension that is open.
    """
    has_same_shape = x.shape == like.shape
    is_value_per_row = x.ndim == 1 and like.ndim > 1
    # An equal shape counts only if nothing is known of the output.
    is_like_input = (spec is None and has_same_shape) or is_value_per_row
    # The number of leading dimensions that may be like the input's: all, or all but the features.
    count = x.ndim if is_like_input else max(x.ndim - 1, 0)
    leading_spec = _spec_of_equal_dimensions(x.shape[:count], like)
    if spec is None:
        return leading_spec
    # An axis can shard one dimension only, so the axes of the known spec are left out.
    free_axes = {*spec_axes(leading_spec)}.difference(spec_axes(spec))
    free_entries = keep_axes(leading_spec, free_axes).partitions
    # Either list of entries may be shorter. A missing entry is None, for a whole dimension.
    pairs = itertools.zip_longest(spec.partitions, free_entries)
    return PartitionSpec(*(free if known is OPEN else known for known, free in pairs))


def _spec_of_equal_dimensions(shape: Shape, like: jax.Array) -> PartitionSpec:
    """Returns the entries of an array's type for its leading dimensions that have these sizes.

    For the sizes (8, 16), the spec of an array f32[8@data, 4@model] is ``P("data")``.
    """
    entries = []
    like_entries = jax.typeof(like).sharding.spec.partitions
    for size, like_size, entry in zip(shape, like.shape, like_entries, strict=False):
        if size != like_size:
            break
        entries.append(entry)
    return PartitionSpec(*entries)


def opened(spec: PartitionSpec | None) -> PartitionSpec | None:
    """Returns a spec whose dimensions without an axis are `OPEN`; None for None."""
    return None if spec is None else PartitionSpec(*(x or OPEN for x in spec.partitions))


OPEN = PartitionSpec.UNCONSTRAINED


def first_with_explicit_spec(inputs: object) -> jax.Array | None:
    """Returns the first array with a sharding over Explicit axes in its type; None without one."""
    return next((x for x in arrays_in(inputs) if type_spec(x) is not None), None)


def input_like(x: jax.Array, inputs: object) -> jax.Array | None:
    """Returns the input by which an output is typed: of its shape and dtype, or else the first.

    Only inputs with a sharding over Explicit axes in their types count; without any, the result is
    None.

    Args:
      x: the output.
      inputs: a pytree of the inputs. Arrays in modules do not count.
    """
    typed = [array for array in arrays_in(inputs) if type_spec(array) is not None]
    alike = (array for array in typed if array.shape == x.shape and array.dtype == x.dtype)
    return next(alike, typed[0] if typed else None)


def arrays_in(tree: object) -> list[jax.Array]:
    """Lists the arrays in a pytree, except arrays in modules."""
    leaves = jax.tree.leaves(tree, is_leaf=_compat.is_graph_object)
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
