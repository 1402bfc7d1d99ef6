"""Finds the layers in front of a residual stream, whose outputs are gathered once.

A layer in front of the blocks of a model, such as the embedding of patches, has no partner that
takes its outputs. As a column layer it leaves them sharded, and so all that blocks add to them. A
norm in a block then needs sums over the devices, and a gather of what it returns:

    embed          (patch, width)    columns over 'model'
    blocks/0/norm  (width,)          takes the stream, (batch, patches, width)
    blocks/0/up    (width, hidden)   its partner is ``down``

The rule: **a layer with sharded outputs is in front of a residual stream if there are blocks beside
it with norms of as many features and row layers that return as many, and it neither takes as many
nor has a partner.** A module of which it is the only sharded layer, such as a ``PatchEmbed`` around
a convolution, counts as the layer. Where only column layers return as many, as where a norm follows
``up`` or a convolution, the features stay sharded behind each of them, and a norm's sums cost less
than to gather them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from ..specs.paths import Path
from .layer_styles import Style
from .variables import Listing, NamedVariable

# Classes of norms over features, also a user's own. Those over rows, such as BatchNorm, compute
# each feature alone.
_NORM = re.compile("(layer|rms)_?norm", re.IGNORECASE)


class StyledLayer(NamedTuple):
    """A layer that is sharded in a style."""

    path: Path
    style: Style
    deciding: NamedVariable  # the parameter that the style has to shard

    @property
    def features(self) -> int:
        """The size of the dimension that is sharded: of outputs in a column layer."""
        return self.deciding.layer_shape[self._sharded_dimension]

    @property
    def whole(self) -> set[int]:
        """The sizes of the other dimensions: among them that of outputs in a row layer."""
        shape = self.deciding.layer_shape
        return {size for d, size in enumerate(shape, -len(shape)) if d != self._sharded_dimension}

    @property
    def _sharded_dimension(self) -> int:
        dimension = self.style.dimensions[self.style.deciding]
        assert dimension is not None  # a style has to shard this parameter
        return dimension


def layers_before_streams(layers: Collection[StyledLayer], listing: Listing) -> list[Path]:
    """Returns the paths of the layers in front of a residual stream.

    Args:
      layers: the sharded layers of a model.
      listing: the model.
    """
    blocks = _modules_with_norms(listing) & _modules_with_rows(layers)
    # How many sharded layers are in each module, which may be one itself.
    counts = Counter(
        layer.path[:length] for layer in layers for length in range(len(layer.path) + 1)
    )
    partners = {(layer.path[:-1], layer.features) for layer in layers if layer.style.role == "row"}
    found = []
    for layer in layers:
        if layer.style.role not in ("column", "features") or counts[layer.path] > 1:
            continue
        features = layer.features
        parent = layer.path[:-1]
        while parent and counts[parent] == 1:
            parent = parent[:-1]
        takes_stream = layer.deciding.layer_shape.count(features) > 1
        is_before = (parent, features) in blocks and (parent, features) not in partners
        if layer.path and is_before and not takes_stream:
            found.append(layer.path)
    return found


def _modules_with_rows(layers: Collection[StyledLayer]) -> set[tuple[Path, int]]:
    """Returns the modules that hold blocks with row layers, and the features that these return.

    Attention ends in such a layer, and returns as many features as it takes.
    """
    return {
        (layer.path[:n], size)
        for layer in layers
        if layer.style.role in ("row", "heads")
        for size in layer.whole
        for n in range(len(layer.path) - 1)
    }


def _modules_with_norms(listing: Listing) -> set[tuple[Path, int]]:
    """Returns the modules that hold blocks with norms, and the features of the norms.

    A norm of the module itself may be called right after the layer, which gathers once.
    """
    modules = {path: listing.flat.objects[index] for path, index in listing.modules()}
    found = set[tuple[Path, int]]()
    for parameter in listing.variables:
        module = modules.get(parameter.path[:-1])
        is_norm = any(_NORM.search(cls.__name__) for cls in type(module).__mro__)
        if is_norm and len(parameter.layer_shape) == 1:
            [features] = parameter.layer_shape
            found.update((parameter.path[:n], features) for n in range(len(parameter.path) - 2))
    return found
