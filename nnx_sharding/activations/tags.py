"""What a trace knows about a module, and what traces with the same declarations share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from ..specs.activation_sharding import ActivationSharding
from ..specs.paths import Path, accessor

Shape: TypeAlias = tuple[int, ...]


class Tag(NamedTuple):
    """What is known about a module; Flax passes it on with the module."""

    name: str  # of its argument
    path: Path
    sources: tuple[ActivationSharding, ...]
    axes: frozenset[Any]  # over which its own Variables are gathered
    # The spec of each own Variable while the module runs, its shape outside of loops, and whether
    # it is gathered.
    specs: Mapping[Path, tuple[PartitionSpec, Shape, bool]]

    @property
    def accessor(self) -> str:
        """The module as an expression, such as ``model.blocks[0].up``."""
        return accessor(self.name, self.path)

    def __hash__(self) -> int:
        return hash((self.name, self.path))


class Declaration:
    """What traces with the same declarations share, as they share traces of inner functions.

    JAX does not retrace those, so filters that matched in them would seem to have no effect.
    """

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = set[tuple[int, int]]()  # the filters that matched, by source


# Each lives as long as JAX keeps traces for it.
DECLARATIONS: weakref.WeakValueDictionary[Any, Declaration] = weakref.WeakValueDictionary()
