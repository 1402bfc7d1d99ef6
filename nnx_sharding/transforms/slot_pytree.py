"""Values by slot → the user's own pytree, in which a module is an ``nnx.State`` by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from ..core.static_equality import Static
from ..core.structure import LEAF, Child, Container, Group, StaticEntry, Structure
from ..core.unflatten import value_at
from ..specs.paths import plain_key


def user_tree(
    structure: Structure,
    values: Sequence[Any],
    keep: Callable[[tuple[int, ...]], bool] = lambda _: True,
    objects: Sequence[Any] | None = None,
) -> Any:
    """Values by slot in the form of the structure's root, with None for those not to ``keep``.

    States hold the ``objects`` by entry, or the values of Variables.
    """

    def build(child: Child, slots: Iterator[int]) -> Any:
        if child is LEAF:
            slot = next(slots)
            return values[slot] if keep((slot,)) else None
        if isinstance(child, Container):
            parts = [build(part, slots) for part in child.children]
            return jax.tree_util.tree_unflatten(child.treedef, parts)
        if isinstance(child, Static | Group):
            return None
        assert isinstance(child, int)
        if isinstance(structure.entries[child], StaticEntry):
            return None
        flat = {
            tuple(map(plain_key, x.path)): value_at(structure, x, values)
            if objects is None or x.entry is None
            else objects[x.entry]
            for x in structure.walk(child, slots)
            if keep(x.slots)
        }
        return flat[()] if () in flat else nnx.from_flat_state(flat)

    return build(structure.root, iter(structure.root_slots))
