"""Grouped convolutions whose gradients XLA computes right on meshes of several axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core.retyping import type_spec
from ..specs.fitting import axes_of_type, only_axes, spec_axes


def with_right_gradient(
    module: Any, call: Callable[..., Any], batch_axes: Iterable[Any]
) -> Callable[..., Any]:
    """A method of a module, in which a grouped convolution has the right gradient.

    XLA multiplies the gradient of the kernel by the size of each mesh axis over which the rows are
    not sharded. Over these axes, the convolution is therefore computed in a ``shard_map``. Where no
    axis is Explicit, ``batch_axes`` are those that shard the rows.
    """
    grouped = isinstance(module, nnx.Conv) and module.feature_group_count > 1
    if not grouped or module.conv_general_dilated is not jax.lax.conv_general_dilated:
        return call

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        convolution = functools.partial(_convolution, frozenset(batch_axes))
        attributes = vars(module)
        attributes["conv_general_dilated"] = convolution
        try:
            return call(*args, **kwargs)
        finally:
            attributes["conv_general_dilated"] = jax.lax.conv_general_dilated

    return called


def _convolution(batch_axes: frozenset[Any], x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    mesh, spec, out = jax.sharding.get_abstract_mesh(), type_spec(x), kwargs.pop("out_sharding")
    # Next to Explicit axes, XLA need not keep the rows sharded over Auto ones.
    used = batch_axes if spec is None else frozenset(spec_axes(spec))
    used |= axes_of_type(mesh, AxisType.Manual)
    free = {axis for axis, size in mesh.shape.items() if size > 1} - used
    inner = None if out is None else only_axes(out, frozenset(mesh.axis_names) - free)
    call = functools.partial(_in_order, args, kwargs | {"out_sharding": inner})
    if not free:
        return call(x, kernel)
    if (own := type_spec(kernel)) is not None:
        kept = only_axes(own, frozenset(mesh.axis_names) - free)
        kernel = jax.sharding.reshard(kernel, NamedSharding(mesh, kept))
    everywhere = PartitionSpec()
    y = jax.shard_map(call, in_specs=everywhere, out_specs=everywhere, axis_names=free)(x, kernel)
    return y if out is None else jax.sharding.reshard(y, NamedSharding(mesh, out))


def _in_order(args: Any, kwargs: Any, x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, *args, **kwargs)
