"""Puts other arrays into a flattened tree: its objects keep their identity, containers are new."""

from __future__ import annotations

from typing import Any

from .. import _compat
from ..specs.types import Arrays
from .flatten import Flat
from .structure import NodeEntry, VariableEntry
from .unflatten import assemble, node_changes, perform, update


def rebuild(
    flat: Flat,
    leaves: Arrays,
    caller: str = "with_sharding_constraint",
    *,
    foreign: bool = False,
) -> Any:
    """Returns the tree with other arrays: changes modules and Variables, makes new containers.

    It is an error of the ``caller`` if objects of another trace would change, unless ``foreign``.
    """
    structure, objects = flat.structure, flat.objects
    fresh = {i for i, leaf in enumerate(leaves) if leaf is not flat.leaves[i]}
    changed = [i for i, slots in enumerate(structure.slots) if not fresh.isdisjoint(slots)]
    stale = {type(objects[i]).__name__ for i in changed if not _compat.can_update(objects[i])}
    if stale and not foreign:
        raise _compat.TraceContextError(
            f"{caller} cannot change objects of another trace: {', '.join(sorted(stale))}. "
            "Pass the module as an argument of the function that is traced."
        )
    entries = [(i, structure.entries[i]) for i in changed]
    variables = [i for i, entry in entries if isinstance(entry, VariableEntry)]
    nodes = [node_changes(i, e, structure, fresh) for i, e in entries if isinstance(e, NodeEntry)]
    changes = [change for change in nodes if change is not None]
    perform(update(structure, leaves, objects, variables, nodes=changes))
    return assemble(structure.root, (leaves[slot] for slot in structure.root_slots), objects)
