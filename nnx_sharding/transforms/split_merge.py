"""``split`` and ``merge``: a graph of NNX objects to a structure and arrays, and back.

Both are thin, because the core flattens and unflattens for every call. This file makes the form in
which users see the arrays: states by path, in groups by filter. For `merge` into an existing graph
it pairs old and new objects by path and type. A structure (``core/structure.py``) is a table: each
object has an *entry* in it at the *index* of the object, and *children* refer to objects by index.
The arrays are in a list, each in a *slot*. Objects are modules, Variables and refs (``jax.Ref``),
and static ones, such as functions. `merge` changes modules and Variables in place
(``_CHANGED_IN_PLACE``), and makes all other objects again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.guard.known import flatten_known
from ..core.in_c import perform
from ..core.rebuild import NodeChange, node_changes, rebuild, update_operations
from ..core.structure import Container, NodeEntry, Structure, VariableEntry, locations_in, parts_of
from ..core.unflatten import pytree_of, unflatten, value_at
from ..errors import by_kind, raise_if_any
from ..specs.filters import subject_text, to_predicate
from ..specs.paths import Path, path_string

_NO_STRUCTURE = (
    "merge: the first argument is of type {type}, not a Structure. Pass what "
    "nnx_sharding.split returned, the Structure first; nnx.merge merges what nnx.split returned."
)


def split(graph: object, /, *filters: object) -> tuple[Any, ...]:
    """Splits a graph of NNX objects into a hashable structure, and its arrays by path.

    The graph is any pytree of modules, optimizers and Variables. They may share references, even
    with each other, and form cycles. The graph is not changed.

    Args:
      graph: what to split.
      *filters: one group of arrays for each filter; an array goes to the first one that matches.
        Without filters there is one group with all arrays.

    Returns:
      ``(structure, *groups)``. The :class:`~nnx_sharding.Structure` holds types, static attributes,
      metadata and sharing: graphs with equal structures differ only in their arrays. Each group is
      an ``nnx.State`` with the arrays as leaves, each under its first path; for a ``jax.Ref`` the
      ref itself.

    Raises:
      ValueError: filters are given and some array matches none.
      TypeError: a filter is not an NNX filter.

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
    predicates = [to_predicate(filter_) for filter_ in filters or (...,)]
    flat = flatten(graph)
    groups: list[dict[Path, Any]] = [{} for _ in predicates]  # by path
    unmatched = []  # the lines of an error
    for location in locations_in(flat.structure):
        value = value_at(flat.structure, location, flat.leaves)
        subject = value if location.object_index is None else flat.objects[location.object_index]
        # An array goes to the group of the first filter that matches.
        for group, predicate in zip(groups, predicates, strict=True):
            if predicate(location.path, subject):
                group[location.path] = value
                break
        else:
            unmatched.append(f"  {path_string(location.path)}: {subject_text(subject)}")
    remedy = "Add a last filter `...` for the rest."
    raise_if_any(ValueError, "no filter matches:", unmatched, remedy)
    # A bare array or Variable has the empty path, and is its own group.
    states = [group[()] if () in group else nnx.from_flat_state(group) for group in groups]
    return flat.structure, *states


def merge(structure: Structure, /, *groups: object, into: object = None) -> Any:
    """Merges a structure and arrays into a graph: the inverse of :func:`split`.

    Args:
      structure: from :func:`split`.
      *groups: the arrays by path, in any number of ``nnx.State`` or nested mappings. Leaves may be
        anything in place of arrays, such as tracers or ``ShapeDtypeStruct``.
      into: an existing graph to update to this content. Its objects are changed in place where they
        are at the same path with the same type; all others are new. Without it everything is new.

    Returns:
      The graph.

    Raises:
      ValueError: arrays are missing, or there are arrays for paths that do not exist; all are
        listed, and nothing is changed.
      TypeError: the first argument is not a Structure, such as a ``GraphDef`` from ``nnx.split``.
      TraceContextError: an object of ``into`` belongs to another trace.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding import merge, split
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> structure, state = split(model)
      >>> other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> merge(structure, state, into=other) is other
      True
    """
    if not isinstance(structure, Structure):
        raise TypeError(_NO_STRUCTURE.format(type=type(structure).__name__))
    leaves = _leaves_by_slot(structure, groups)
    if into is None:
        # An object that is shared in the old graph is shared in the new one, in any mode of Flax.
        return unflatten(structure, leaves, share=True).root
    old_flat = flatten_known(into)
    # Nearly all merges change only arrays, for example of a restored state. `rebuild` writes these
    # right into the objects. Objects such as refs have to be made again: only `_merge_into` does.
    only_arrays_differ = old_flat.structure == structure
    if only_arrays_differ and all(isinstance(x, _CHANGED_IN_PLACE) for x in structure.entries):
        if not old_flat.updatable:  # `_merge_into` makes the same check itself
            _refuse_other_traces(old_flat.objects)  # raises if one belongs to another trace
        return rebuild(old_flat, leaves)
    return _merge_into(old_flat, structure, leaves)


def _merge_into(old_flat: Flat, structure: Structure, leaves: Sequence[object]) -> Any:
    """Changes the objects of a graph to the content of another structure.

    Args:
      old_flat: the graph, flattened. An object is kept if the new structure has one of the same
        type at the same path.

    Returns:
      The graph.
    """
    # The keys are indices in the new structure; the values are indices in the old one.
    pairs = _pair_objects(old_flat.structure, structure)
    existing = {index: old_flat.objects[old_index] for index, old_index in pairs.items()}
    _refuse_other_traces(existing.values())  # raises if one belongs to another trace
    # Everything is built and checked before anything is changed.
    unflattened = unflatten(structure, leaves, existing=existing, share=True)
    # A pair is of two modules or of two Variables, because no other objects are paired.
    variables = [index for index in pairs if isinstance(structure.entries[index], VariableEntry)]
    changes = _module_changes(old_flat.structure, structure, pairs)
    # `update_operations` makes everything new, but changes nothing; so `perform` cannot fail.
    operations = update_operations(
        structure,
        leaves,
        unflattened.objects,
        values=variables,
        metadata=variables,  # a Variable may also differ in its metadata
        nodes=changes,
    )
    perform(operations)
    return unflattened.root


def _module_changes(
    old_structure: Structure, new_structure: Structure, pairs: Mapping[int, int]
) -> list[NodeChange]:
    """Returns the changes of attributes that turn modules into those of another structure.

    ``pairs`` has the index of each old object by the index of the new one.
    """
    changes = []
    for index, old_index in pairs.items():
        entry, old_entry = new_structure.entries[index], old_structure.entries[old_index]
        if not isinstance(entry, NodeEntry) or not isinstance(old_entry, NodeEntry):
            continue
        # All attributes of the module are set, as if it was new (``before=None``). They cannot be
        # compared with the old ones, because children are indices into different tables. Without an
        # old table, ``fresh`` does not matter.
        change = node_changes(index, before=None, after=new_structure, fresh=frozenset())
        if change is not None:
            removed = tuple(key for key in old_entry.keys if key not in entry.keys)
            changes.append(change._replace(removed=removed))
    return changes


# Objects that `merge` changes in place; all others are made again.
_CHANGED_IN_PLACE = (NodeEntry, VariableEntry)


def _refuse_other_traces(objects: Iterable[object]) -> None:
    """Raises an error that names the types of objects that belong to another trace."""
    names = {type(x).__name__ for x in objects if not _compat.can_update(x)}
    if names:
        raise _compat.TraceContextError(
            f"merge cannot change objects of another trace: {', '.join(sorted(names))}."
        )


def _pair_objects(old_structure: Structure, new_structure: Structure) -> dict[int, int]:
    """Pairs modules and Variables of one type that are at the same path.

    The walk goes through both graphs at once, from the roots, along the paths that both have.

    Returns:
      The indices of objects in the old structure, by the index in the new one.
    """
    pairs: dict[int, int] = {}
    paired: set[int] = set()  # the objects of the old structure that have a partner
    # Pairs of children at the same path in both: containers, leaves, or the indices of objects.
    stack: list[tuple[Any, Any]] = [(old_structure.root, new_structure.root)]
    while stack:  # no recursion: models may be nested deeply
        old_child, new_child = stack.pop()
        old_part, new_part = old_child, new_child  # the parts that may hold other children
        if isinstance(old_child, int) and isinstance(new_child, int):  # two objects
            if old_child in paired or new_child in pairs:
                continue  # an object is paired once, at its first path, however often it is shared
            old_part, new_part = old_structure.entries[old_child], new_structure.entries[new_child]
            # An entry is None if the structure does not describe its object. A structure after a
            # call has such entries.
            if not isinstance(old_part, _CHANGED_IN_PLACE) or new_part is None:
                continue
            if old_part.type is not new_part.type:
                continue
            pairs[new_child] = old_child
            paired.add(old_child)
        if all(isinstance(x, Container | NodeEntry) for x in (old_part, new_part)):
            old_parts, new_parts = parts_of(old_part), parts_of(new_part)  # children by path
            common = [path for path in new_parts if path in old_parts]
            # The order is reversed because the last item comes off the stack first.
            stack += [(old_parts[path], new_parts[path]) for path in reversed(common)]
    return pairs


# Values of these types are certainly leaves of pytrees. JAX finds other leaves.
_ARRAYS = (_compat.ArrayImpl, jax.core.Tracer, jax.ShapeDtypeStruct)
_TREEDEF_OF_ARRAY = jax.tree_util.tree_structure(0)


def _leaves_by_slot(structure: Structure, groups: Sequence[object]) -> list[Any]:
    """Returns the arrays of all groups in the order of the structure.

    Args:
      structure: knows the path and the slots of each array or Variable.
      groups: the arrays by path: states, or nested mappings.

    Raises:
      ValueError: arrays are missing, have unknown paths, or are pytrees of another form.
    """
    leaves: list[Any] = [None] * structure.num_leaves
    locations = {location.path: location for location in locations_in(structure)}
    values: dict[Path, Any] = {}  # an array, a Variable, or the pytree that a Variable holds
    for group in groups:
        values.update(_values(group, locations))
    missing: list[str] = []  # lines for paths without a value in the groups
    different: list[str] = []  # lines for values that are other pytrees than the Variable holds
    for path, location in locations.items():
        where = path_string(path) or "the root"
        if path not in values:
            if location.slots:  # an empty pytree is never missing
                missing.append(f"  {where}")
            continue
        # A Variable nearly always holds an array. Then the pytree is None.
        index = location.object_index
        pytree = None if index is None else pytree_of(structure.entries[index])
        expected = _TREEDEF_OF_ARRAY if pytree is None else pytree.treedef
        arrays, treedef = _flatten_value(values[path])  # one array, nearly always
        if treedef != expected:
            expected_text = "an array" if pytree is None else expected
            different.append(f"  {where}: {treedef}, not {expected_text}")
            continue
        for slot, array in zip(location.slots, arrays, strict=True):
            leaves[slot] = array
    unknown = [f"  {path_string(path)}" for path in values if path not in locations]
    problems = {"Missing": missing, "Unknown paths": unknown, "Of another form": different}
    raise_if_any(ValueError, "the arrays do not fit the structure.", by_kind(problems))
    return leaves


def _flatten_value(value: Any) -> tuple[Sequence[object], Any]:
    """Returns the arrays in a value that :func:`_values` yields, and their treedef."""
    if isinstance(value, nnx.Variable):
        value = value.get_raw_value()
    if isinstance(value, _ARRAYS):  # a shortcut for nearly all values, because it is faster
        return (value,), _TREEDEF_OF_ARRAY
    return jax.tree_util.tree_flatten(value)


def _values(group: object, known_paths: Collection[Path]) -> Iterator[tuple[Path, Any]]:
    """Yields the content of a group, by path: ``{"a": {"b": x}}`` → ``("a", "b"), x``.

    Mappings are opened, but not at the path of a Variable, because its value may be a mapping.

    Args:
      group: a state or a mapping, or a bare array or Variable.
      known_paths: the paths of the Variables and arrays of the structure.
    """
    stack: list[tuple[Path, Any]] = [((), group)]
    while stack:  # no recursion: models may be nested deeply
        path, part = stack.pop()
        # `part[key]` would not do, because a State returns any dict in it as another State, even
        # one that is the value of a Variable.
        content = part.raw_mapping if isinstance(part, nnx.State) else part
        if isinstance(content, Mapping):
            # A bare Variable has the empty path. An empty group, which `split` makes for a filter
            # that matches nothing, is no value of that Variable.
            is_empty_group = not path and not content
            if path not in known_paths or is_empty_group:
                stack += [((*path, key), value) for key, value in reversed([*content.items()])]
                continue
        yield path, part
