"""``split`` and ``merge``: a graph of NNX objects to a structure and arrays, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from . import _compat
from .core import unflatten as _merged
from .core.flatten import flatten as _flatten
from .core.structure import (
    Container,
    Location,
    NodeEntry,
    StaticEntry,
    Structure,
    VariableEntry,
    container_keys,
)
from .filters import to_predicate
from .paths import Path, path_string


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
      path that reaches it. In the place of a ``jax.Ref`` stands the ref itself, which a graph
      merged from it shares.

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
    predicates = [to_predicate(f) for f in filters or (...,)]
    flat = _flatten(graph)
    groups: list[dict[Path, Any]] = [{} for _ in predicates]
    unmatched = []
    for place in _places(flat.structure):
        value = _merged.value_at(flat.structure, place, flat.leaves)
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
        return _merged.unflatten(structure, leaves, share=True).root
    old = _flatten(into)
    pairs = _pair(old.structure, structure)
    existing = {new: old.objects[before] for new, before in pairs.items()}
    stale = [type(x).__name__ for x in existing.values() if not _compat.can_update(x)]
    if stale:
        raise _compat.TraceContextError(
            f"merge cannot change objects of another trace: {', '.join(sorted(set(stale)))}."
        )
    built = _merged.unflatten(structure, leaves, existing, share=True)
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
            values[index] = _merged.assemble(entry.value, own, objects)
        elif isinstance(entry, NodeEntry):
            old_entry = old.entries[before]
            assert isinstance(old_entry, NodeEntry)
            # Children are indices into different tables, so all are set, none compared.
            change = _merged.node_changes(index, None, structure, frozenset())
            removed = tuple(key for key in old_entry.keys if key not in entry.keys)
            if change is not None:
                changes.append(change._replace(removed=removed))
    attributes = _merged.node_values(changes, leaves, objects)
    operations = []
    for index, value in values.items():
        entry = structure.entries[index]
        assert isinstance(entry, VariableEntry)
        operations.append((_compat.set_value, objects[index], value))
        metadata = _merged.metadata_of(entry, objects)
        operations.append((_compat.set_metadata, objects[index], metadata))
    for change, new in zip(changes, attributes, strict=True):
        operations += _merged.node_operations(change, new, structure, leaves, objects)
    _merged.perform(operations)


def _pair(old: Structure, new: Structure) -> dict[int, int]:
    """Pairs the objects that stand at the same path with the same type, new index to old."""
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    stack: list[tuple[Any, Any]] = [(old.root, new.root)]
    while stack:
        a, b = stack.pop()
        if isinstance(a, Container) and isinstance(b, Container):
            stack += _common(
                zip(container_keys(a.treedef), a.children, strict=True),
                zip(container_keys(b.treedef), b.children, strict=True),
            )
        elif isinstance(a, int) and isinstance(b, int) and b not in pairs and a not in taken:
            x, y = old.entries[a], new.entries[b]
            if x is None or y is None or x.type is not y.type or isinstance(x, StaticEntry):
                continue
            pairs[b] = a
            taken.add(a)
            if isinstance(x, NodeEntry) and isinstance(y, NodeEntry):
                stack += _common(
                    zip(x.keys, x.children, strict=True), zip(y.keys, y.children, strict=True)
                )
    return pairs


def _common(
    old: Iterable[tuple[Any, Any]], new: Iterable[tuple[Any, Any]]
) -> list[tuple[Any, Any]]:
    """The children under the same keys, the last first, so that a stack gives the first."""
    before = dict(old)
    return [(before[key], child) for key, child in new if key in before][::-1]


def _places(structure: Structure) -> list[Location]:
    return list(structure.walk(structure.root, iter(structure.root_slots)))


def _to_state(group: dict[Path, Any]) -> Any:
    return group[()] if () in group else nnx.from_flat_state(group)


def _leaves_by_slot(structure: Structure, groups: tuple[Any, ...]) -> list[Any]:
    """The arrays of all groups in the order of the structure.

    Raises:
      ValueError: the groups do not have the paths of the structure, or not its values.
    """
    leaves: list[Any] = [None] * structure.num_leaves
    known: dict[Path, Any] = {}  # path to the treedef of a value that is a pytree
    missing: list[str] = []
    different: list[str] = []
    for place in _places(structure):
        entry = None if place.entry is None else structure.entries[place.entry]
        pytree = _merged.pytree_of(entry)
        treedef = None if pytree is None else pytree.treedef
        known[place.path] = treedef
        found = [value for group in groups for value in _lookup(group, place.path)]
        where = path_string(place.path) or "the root"
        if not found:
            missing.append(f"  {where}")
            continue
        value = found[-1].get_raw_value() if isinstance(found[-1], nnx.Variable) else found[-1]
        own, given = jax.tree_util.tree_flatten(value)
        if given != (treedef or jax.tree_util.tree_structure(0)):
            different.append(f"  {where}: {given}, not {treedef or 'an array'}")
            continue
        for slot, leaf in zip(place.slots, own, strict=True):
            leaves[slot] = leaf
    paths = (path for group in groups for path in _paths_of(group))
    unknown = [f"  {path_string(path)}" for path in paths if not _is_in(path, known)]
    problems = {"Missing": missing, "Unknown paths": unknown, "Of another form": different}
    listed = ["\n".join([f"{kind}:", *lines]) for kind, lines in problems.items() if lines]
    if listed:
        raise ValueError("\n".join(["the arrays do not fit the structure.", *listed]))
    return leaves


def _is_in(path: Path, known: dict[Path, Any]) -> bool:
    """Whether a path is known, or lies inside a value that is a pytree."""
    return path in known or any(known.get(path[:i]) is not None for i in range(len(path)))


def _lookup(group: Any, path: Path) -> list[Any]:
    """What a group holds at a path, as a list of one, or nothing."""
    for key in path:
        group = _mapping(group)
        if not isinstance(group, Mapping) or key not in group:
            return []
        group = group[key]
    is_empty_group = not path and isinstance(_mapping(group), Mapping) and not group
    return [] if is_empty_group else [group]


def _mapping(group: Any) -> Any:
    # Indexing a State wraps what is a dict, also one that is the value of a Variable.
    return group.raw_mapping if isinstance(group, nnx.State) else group


def _paths_of(group: Any) -> list[Path]:
    """The paths in a group that end at something else than a mapping."""
    found: list[Path] = []
    stack: list[tuple[Path, Any]] = [((), group)]
    while stack:  # no recursion: models may be nested deeply
        path, part = stack.pop()
        part = _mapping(part)
        if isinstance(part, Mapping):
            stack += [((*path, key), value) for key, value in reversed([*part.items()])]
        else:
            found.append(path)
    return found
