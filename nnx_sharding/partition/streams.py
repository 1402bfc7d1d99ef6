"""Finds layers whose sharded outputs make a residual stream sharded.

A layer in front of the blocks of a model, such as the embedding of patches, has no partner that
takes its outputs. As a column layer it leaves them sharded, and so all that blocks add to them. A
norm in a block then needs sums over the devices, and a gather of what it returns:

    embed          (patch, width)    columns over 'model'
    blocks/0/norm  (width,)          takes the stream, (batch, patches, width)
    blocks/0/up    (width, hidden)   its partner is ``down``
"""

from __future__ import annotations

from collections.abc import Mapping

from flax import nnx
from jax.sharding import PartitionSpec

from ..specs.fitting import axes_of, pad_entries
from ..specs.paths import Path, path_string
from ..specs.types import AxisName
from .variables import Listing, NamedVariable, SpecsByPath

# Norms over features. Those over rows, such as BatchNorm, compute each feature alone.
_NORMS = (nnx.LayerNorm, nnx.RMSNorm)


def notes_of_sharded_streams(
    listing: Listing, known: Mapping[int | Path, NamedVariable], specs: SpecsByPath
) -> dict[Path, str]:
    """Says of kernels in front of a residual stream what it costs that their outputs stay sharded.

    Args:
      listing: the flattened model.
      known: its parameters, by any keys.
      specs: their specs, by path.

    Returns:
      A note by the path of the kernel.
    """
    modules = {path: listing.flat.objects[index] for path, index in listing.modules()}
    # The modules with norms of so many features in their blocks. A norm of the module itself may be
    # called right after the layer, which gathers once.
    has_blocks = set[tuple[Path, int]]()
    # Of kernels, the size and the mesh axes of their inputs, with the module around the layer; and
    # of their outputs, by path.
    inputs = set[tuple[Path, int, tuple[AxisName, ...]]]()
    outputs: dict[Path, tuple[int, tuple[AxisName, ...]]] = {}
    for parameter in known.values():
        path, spec, dimensions = parameter.path, specs[parameter.path], parameter.layer_dimensions
        if not dimensions or len(path) < 2:
            continue
        shape, layer = parameter.shapes[0], path[:-1]
        if isinstance(modules.get(layer), _NORMS):
            width = shape[dimensions[-1]]
            has_blocks.update((path[:length], width) for length in range(len(layer) - 1))
        elif path[-1] == "kernel" and len(dimensions) > 1 and isinstance(spec, PartitionSpec):
            entries = pad_entries(spec, len(shape))
            before, after = dimensions[-2:]
            inputs.add((layer[:-1], shape[before], axes_of(entries[before])))
            outputs[path] = shape[after], axes_of(entries[after])
    notes = {}
    for path, (width, axes) in outputs.items():
        layer, parent = path[:-1], path[:-2]
        # A layer of the same module that takes the outputs as they are sharded is the partner.
        has_partner = (parent, width, axes) in inputs
        if axes and (parent, width) in has_blocks and not has_partner:
            over = ", ".join(map(repr, axes))
            pattern = f"^{path_string(layer)}$"
            notes[path] = (
                f"its outputs stay sharded over {over}, and with them the residual stream: each "
                "norm sums and gathers. They are gathered once with "
                f"activation_shardings={{{pattern!r}: the spec of the batch}}"
            )
    return notes
