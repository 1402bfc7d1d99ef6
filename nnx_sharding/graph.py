"""``split`` and ``merge``: a graph of NNX objects to a structure and arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from . import _compat
from .lifting.merge import assemble as _assemble
from .lifting.merge import metadata_of, node_changes, node_values, write_node
from .lifting.merge import unflatten as _unflatten
from .lifting.split import flatten as _flatten
from .lifting.structure import (
    Container,
    NodeEntry,
    Path,
    Place,
    Structure,
    VariableEntry,
    container_keys,
    path_string,
)


def split(graph: Any, /, *filters: Any) -> tuple[Any, ...]:
    """Takes a graph of NNX objects apart: a hashable structure, and its arrays by path.

    The graph is any pytree of modules, optimizers and Variables; they may share references,
    also with each other, and form cycles. This is what the transforms themselves work with.

    Args:
      graph: what to split. Nothing of it is changed.
      *filters: one group of arrays for each filter; an array goes to the first that matches.
        Without filters there is one group with all arrays.

    Returns:
      ``(structure, *groups)``. The :class:`~nnx_sharding.Structure` holds types, static
      attributes, metadata and sharing; equal structures mean that only arrays differ. Each
      group is an ``nnx.State`` with the arrays themselves as leaves, each under the first
      path that reaches it.

    Raises:
      ValueError: filters are given and some array matches none.
      TypeError: a filter is no NNX filter.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding import merge, split
      >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
      >>> structure, params, rest = split(model, nnx.Param, ...)
      >>> sorted(params), sorted(rest)
      (['bias', 'scale'], ['mean', 'var'])
      >>> type(merge(structure, params, rest)).__name__
      'BatchNorm'
    """
    predicates = [nnx.filterlib.to_predicate(f) for f in filters] or [lambda path, value: True]
    flat = _flatten(graph)
    groups: list[dict[Path, Any]] = [{} for _ in predicates]
    unmatched = []
    for place in _places(flat.structure):
        value = _value_at(flat.structure, place, flat.leaves)
        subject = value if place.entry is None else flat.objects[place.entry]
        for group, predicate in zip(groups, predicates, strict=True):
            if predicate(place.path, subject):
                group[place.path] = value
                break
        else:
            unmatched.append(f"  {path_string(place.path)}: {type(subject).__name__}")
    if unmatched:
        raise ValueError(
            "no filter matches:\n"
            + "\n".join(unmatched)
            + "\nAdd a last filter `...` for the rest."
        )
    return flat.structure, *map(_to_state, groups)


def merge(structure: Structure, /, *groups: Any, into: Any = None) -> Any:
    """Puts a graph together again: the opposite of :func:`split`.

    Args:
      structure: from :func:`split`.
      *groups: the arrays by path, in any number of ``nnx.State`` or nested mappings. Leaves
        may be anything that stands for an array, such as tracers or ``ShapeDtypeStruct``.
      into: an existing graph to bring to this content. Its objects are changed in place and
        keep their identities as far as they stand at the same path with the same type; the
        rest is made anew. Without it everything is new.

    Returns:
      The graph: new objects, or those of ``into``.

    Raises:
      ValueError: arrays are missing, or there are arrays for paths that do not exist; both
        lists are in the message. Nothing is changed then.
      TraceContextError: an object of ``into`` belongs to another trace.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding import merge, split
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> structure, state = split(model)
      >>> other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> merge(structure, state, into=other) is other
      True
      >>> bool((other.kernel[...] == model.kernel[...]).all())
      True
    """
    leaves = _leaves_by_slot(structure, groups)
    if into is None:
        return _unflatten(structure, leaves).root
    old = _flatten(into)
    pairs: dict[int, int] = {}
    _pair(old.structure, old.structure.root, structure, structure.root, pairs)
    existing = {new: old.objects[before] for new, before in pairs.items()}
    stale = [type(x).__name__ for x in existing.values() if not _compat.can_update(x)]
    if stale:
        raise _compat.TraceContextError(
            f"merge cannot change objects of another trace: {', '.join(sorted(set(stale)))}."
        )
    built = _unflatten(structure, leaves, existing)
    _write(structure, old.structure, pairs, leaves, built.objects)
    return built.root


def _write(
    structure: Structure, old: Structure, pairs: dict[int, int], leaves: list[Any], objects: Any
) -> None:
    """Brings paired objects to their new content; every value is made before the first is set."""
    changes, values = [], {}
    for index, before in pairs.items():
        entry = structure.entries[index]
        if isinstance(entry, VariableEntry):
            own = (leaves[slot] for slot in structure.slots[index])
            values[index] = _assemble(entry.value, own, objects)
        elif isinstance(entry, NodeEntry):
            old_entry = old.entries[before]
            assert isinstance(old_entry, NodeEntry)
            # Children are indices into different tables, so all are set, none compared.
            change = node_changes(index, None, structure, frozenset())
            removed = tuple(key for key in old_entry.keys if key not in entry.keys)
            if change is not None:
                changes.append(change._replace(removed=removed))
    attributes = node_values(changes, leaves, objects)
    for index, value in values.items():
        entry = structure.entries[index]
        assert isinstance(entry, VariableEntry)
        _compat.set_value(objects[index], value)
        _compat.set_metadata(objects[index], metadata_of(entry))
    for change, new in zip(changes, attributes, strict=True):
        write_node(change, new, structure, leaves, objects)


def _pair(old: Structure, a: Any, new: Structure, b: Any, pairs: dict[int, int]) -> None:
    """Pairs the objects that stand at the same path with the same type, new index to old."""
    if isinstance(a, Container) and isinstance(b, Container):
        before = dict(zip(container_keys(a.treedef), a.children, strict=True))
        for key, child in zip(container_keys(b.treedef), b.children, strict=True):
            if key in before:
                _pair(old, before[key], new, child, pairs)
    elif isinstance(a, int) and isinstance(b, int) and b not in pairs and a not in pairs.values():
        x, y = old.entries[a], new.entries[b]
        if x is None or y is None or x.type is not y.type:
            return
        pairs[b] = a
        if isinstance(x, NodeEntry) and isinstance(y, NodeEntry):
            before = dict(zip(x.keys, x.children, strict=True))
            for key, child in zip(y.keys, y.children, strict=True):
                if key in before:
                    _pair(old, before[key], new, child, pairs)


def _places(structure: Structure) -> list[Place]:
    return list(structure.walk(structure.root, iter(structure.root_slots)))


def _value_at(structure: Structure, place: Place, leaves: list[Any]) -> Any:
    entry = None if place.entry is None else structure.entries[place.entry]
    own = (leaves[slot] for slot in place.slots)
    if isinstance(entry, VariableEntry) and isinstance(entry.value, Container):
        return _assemble(entry.value, own, ())
    return next(own)


def _to_state(group: dict[Path, Any]) -> Any:
    return group[()] if () in group else nnx.from_flat_state(group)


def _leaves_by_slot(structure: Structure, groups: tuple[Any, ...]) -> list[Any]:
    leaves: list[Any] = [None] * structure.num_leaves
    missing, used = [], set()
    for place in _places(structure):
        found = [value for group in groups for value in _lookup(group, place.path)]
        if not found:
            missing.append(f"  {path_string(place.path) or 'the root'}")
            continue
        used.add(place.path)
        value = found[-1]
        value = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        own = [value] if len(place.slots) == 1 else jax.tree_util.tree_leaves(value)
        if place.entry is not None and isinstance(
            getattr(structure.entries[place.entry], "value", None), Container
        ):
            own = jax.tree_util.tree_leaves(value)
        if len(own) != len(place.slots):
            missing.append(
                f"  {path_string(place.path)}: {len(place.slots)} arrays, got {len(own)}"
            )
            continue
        for slot, leaf in zip(place.slots, own, strict=True):
            leaves[slot] = leaf
    places = {place.path for place in _places(structure)}
    unknown = [
        f"  {path_string(path)}"
        for group in groups
        for path in _paths_of(group)
        if not any(path[: len(p)] == p for p in places)
    ]
    if missing or unknown:
        raise ValueError(
            "the arrays do not fit the structure."
            + ("\nMissing:\n" + "\n".join(missing) if missing else "")
            + ("\nUnknown paths:\n" + "\n".join(unknown) if unknown else "")
        )
    return leaves


def _lookup(group: Any, path: Path) -> list[Any]:
    """What a group holds at a path, as a list of one, or nothing."""
    for key in path:
        if not isinstance(group, Mapping | nnx.State) or key not in group:
            return []
        group = group[key]
    return [group]


def _paths_of(group: Any) -> list[Path]:
    if isinstance(group, nnx.State):
        return [path for path, _ in nnx.to_flat_state(group)]
    if isinstance(group, Mapping):
        return [(key, *path) for key, value in group.items() for path in _paths_of(value)]
    return [()]
