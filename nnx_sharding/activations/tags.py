"""What a trace knows of a module, and what traces with the same declarations share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ..activation_sharding import ActivationSharding
from ..paths import Path, accessor


class Tag(NamedTuple):
    """What is known of a module, wherever Flax takes it."""

    name: str  # of its argument
    path: Path
    sources: tuple[ActivationSharding, ...]
    axes: frozenset[Any]  # over which its own Variables are gathered
    gathered: Mapping[Path, PartitionSpec]  # by own Variable, what it is while the module runs

    @property
    def accessor(self) -> str:
        """The module as an expression, such as ``model.blocks[0].up``."""
        return accessor(self.name, self.path)

    def __hash__(self) -> int:
        return hash((self.name, self.path))


class Declaration:
    """What traces with the same declarations share, so that they share inner functions, too.

    JAX does not trace those again, so filters that matched in them would seem to have no effect.
    """

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = set[tuple[int, int]]()  # the filters that matched, by source


# As long as JAX keeps traces for one.
DECLARATIONS: weakref.WeakValueDictionary[Any, Declaration] = weakref.WeakValueDictionary()
