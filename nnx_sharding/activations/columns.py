"""The sharding of the columns of a layer's output, which is that of its kernel's columns.

A kernel (…, in, out) makes (batch, …, out). So with a kernel of ``P(None, "model")`` the last
dimension of the output is sharded over ``model``, and nothing is known of the others (``OPEN``).
The kernel of a layer with several dimensions of features, such as ``nnx.MultiHeadAttention``'s
(in, heads, features), shards as many dimensions of the output.

Only sizes tell which Variable of a layer is its kernel. A wrong guess costs a reshard, but the
numbers stay right, because specs do not change them.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from .. import _compat
from ..specs.fitting import keep_axes
from ..specs.types import AxisName
from .axis_types import OPEN
from .calls import Tag
from .gathering import spec_of_slice
from .variables import own_variables


def spec_of_columns(
    module: object, tag: Tag, x: jax.Array, axes: frozenset[AxisName]
) -> PartitionSpec | None:
    """Returns the spec of an output of a layer, which is open except for the columns.

    Args:
      module: the layer.
      tag: its tag, with the specs of its own Variables.
      x: the output.
      axes: the axes that may shard columns.

    Returns:
      The spec, or None if the module has no kernel that can have made the output.
    """
    features = getattr(module, "out_features", None)
    count = len(features) if isinstance(features, tuple) else 1  # the dimensions of columns
    if x.ndim <= count:
        return None
    for path, variable in own_variables(module):
        shape = getattr(_compat.get_value(variable), "shape", ())
        # A kernel has inputs in front of its columns; a bias has no inputs.
        is_kernel = len(shape) > count and shape[-count:] == x.shape[-count:]
        if is_kernel and path in tag.specs:
            # In a loop over layers, the value is a slice of a stacked array, whose spec is known.
            stacked = tag.specs[path]
            spec = spec_of_slice(stacked.inside, stacked.shape, shape)
            columns = keep_axes(PartitionSpec(*spec.partitions[-count:]), axes)
            return PartitionSpec(*[OPEN] * (x.ndim - count), *columns.partitions)
    return None
