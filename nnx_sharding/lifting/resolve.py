"""Prefix pytrees of specs → one spec for every Variable and array, each with its path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..state_sharding import StateSharding, is_single_spec
from .structure import (
    Child,
    Container,
    Path,
    Place,
    PyTreeDef,
    Structure,
    accessor,
    container_keys,
    is_leaf_treedef,
    path_key,
)


class Part(NamedTuple):
    """One graph object or array inside an argument or output.

    Attributes:
      keys: the way to it from the argument.
      below: the last of these keys, from the place on where its spec stands.
      spec: its spec, as the user wrote it.
      child: where it stands in the structure.
    """

    keys: Path
    below: Path
    spec: Any
    child: Child


class Target(NamedTuple):
    """One argument or output: what messages call it, and the parts that it consists of."""

    name: str
    parts: tuple[Part, ...]

    def objects_only(self) -> Target:
        """The target without its arrays, which a function cannot change in place."""
        return Target(self.name, tuple(p for p in self.parts if isinstance(p.child, int)))


class Resolved(NamedTuple):
    """The outcome of resolving.

    Attributes:
      slots: the spec of each array, by slot.
      variables: for each Variable or ref that was reached, its spec and where it was found.
    """

    slots: list[Any]
    variables: dict[int, tuple[str, Any]]


def is_spec(x: Any) -> bool:
    """Whether ``x`` ends a prefix: a spec, None, or a mapping of filters."""
    return (
        is_single_spec(x)
        or isinstance(x, StateSharding | nnx.State)
        or _compat.is_node(x)
        or _compat.prefix_state(x) is not None
    )


def _own_spec(spec: Any) -> Any:
    """A spec in our own form: what Flax has for the same, and modules of specs, included."""
    if type(spec) is getattr(nnx, "StateSharding", None):
        return StateSharding(zip(spec.filters, spec.shardings, strict=True))
    if _compat.is_unspecified(spec):
        return None
    prefix = _compat.prefix_state(spec)
    if prefix is not None:
        return PathFunction(prefix[0], jax.tree_util.tree_leaves(prefix[1], is_leaf=is_single_spec))
    if _compat.is_node(spec):
        leaves, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=is_single_spec)
        paths = ((tuple(map(path_key, path)), leaf) for path, leaf in leaves)
        return StateSharding((nnx.filterlib.PathIn(path), leaf) for path, leaf in paths)
    return spec


class PathFunction(StateSharding):
    """A ``StateSharding`` given by a function of path and value, as ``nnx.prefix`` makes it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[Path, Any], Any], shardings: Iterable[Any]):
        super().__init__((function, sharding) for sharding in dict.fromkeys(shardings))
        self._function = function

    @property
    def depends_on_values(self) -> bool:
        """A function may look at anything."""
        return True

    def find(self, path: Path, variable: Any) -> tuple[bool, Any]:
        """The function always has an answer, or raises an error of its own."""
        return True, self._function(path, variable)


class Specs:
    """A prefix of specs as the user wrote it, hashable, with what there is to know about it.

    Attributes:
      tree: the prefix itself.
      written: every spec in it that is a leaf, those inside of ``StateSharding`` included.
      invalid: those of them that are no specs at all.
      has_partition_spec: whether one of them needs a mesh.
      depend_on_values: whether shapes and dtypes decide as well, by a predicate of the user's.
      may_hold_none: whether single arguments can have None.
    """

    def __init__(self, tree: Any):
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_spec)
        leaves = list(map(_own_spec, leaves))
        self.tree = jax.tree_util.tree_unflatten(treedef, leaves)
        wrapped = [StateSharding(x) if isinstance(x, nnx.State) else x for x in leaves]
        self._key = (tuple(wrapped), treedef)
        self.written: tuple[Any, ...] = tuple(
            part
            for spec in wrapped
            for part in (spec.shardings if isinstance(spec, StateSharding) else (spec,))
        )
        self.depend_on_values = any(
            isinstance(s, StateSharding) and s.depends_on_values for s in wrapped
        )
        self.invalid = [spec for spec in self.written if not is_single_spec(spec)]
        self.has_partition_spec = any(isinstance(s, PartitionSpec) for s in self.written)
        self.may_hold_none = self.tree is not None and None in leaves

    def value_key(self, leaves: Sequence[Any]) -> Any:
        """What a resolution depends on besides the structure: shapes, if a predicate asks."""
        if not self.depend_on_values:
            return None
        avals = map(jax.typeof, leaves)
        return tuple((getattr(a, "shape", None), getattr(a, "dtype", None)) for a in avals)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Specs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.tree)


def argument_targets(
    structure: Structure,
    tree: tuple[tuple[Any, ...], dict[str, Any]],
    specs: tuple[tuple[Any, ...], dict[str, Any]],
    names: Sequence[str],
) -> list[Target]:
    """One target for each dynamic argument of a call, in the order of the structure's root."""
    assert isinstance(structure.root, Container)
    children = iter(structure.root.children)
    keywords = sorted(tree[1])
    values = [*tree[0], *(tree[1][k] for k in keywords)]
    prefixes = [*specs[0], *(specs[1][k] for k in keywords)]
    return [
        target(name, prefix, value, _take(value, children))
        for name, prefix, value in zip([*names, *keywords], prefixes, values, strict=True)
    ]


def target(name: str, prefix: Any, value: Any, child: Child) -> Target:
    """A target for a pytree: spreads a prefix of specs over its parts.

    Raises:
      ValueError: the specs are no tree prefix of the value.
    """
    if isinstance(child, Container):
        keys, children = container_keys(child.treedef), child.children
    else:
        keys, children = ((),), (child,)
    try:
        spread = _spread_over(prefix, child, len(children))
    except ValueError as error:
        raise ValueError(
            f"the specs for {name} are no tree prefix of its value, in which modules and "
            f"Variables count as leaves: {error}"
        ) from None
    return Target(
        name,
        tuple(
            Part(path, path[depth:], spec, part)
            for path, part, (spec, depth) in zip(keys, children, spread, strict=True)
        ),
    )


def _spread_over(prefix: Any, child: Child, count: int) -> list[tuple[Any, int]]:
    """For each part of a child its spec, and how many keys lead to the place of the spec."""
    if is_single_spec(prefix) or isinstance(prefix, StateSharding):
        return [(prefix, 0)] * count  # without a look at the pytree, which may not like numbers
    full = child.treedef.unflatten(range(count)) if isinstance(child, Container) else 0
    return list(_spread(prefix, full, 0))


def _spread(prefix: Any, full: Any, depth: int) -> Iterator[tuple[Any, int]]:
    """For each leaf of ``full`` its spec, and how many keys lead to the place of the spec."""
    over_module = isinstance(prefix, nnx.State) and not isinstance(full, nnx.State)
    if is_single_spec(prefix) or isinstance(prefix, StateSharding) or over_module:
        spec = StateSharding(prefix) if over_module else prefix
        for _ in jax.tree_util.tree_leaves(full):
            yield spec, depth
        return
    parts, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=lambda x: x is not prefix)
    if is_leaf_treedef(treedef):
        raise ValueError(f"{prefix!r} is no spec")
    subtrees: list[Any] = treedef.flatten_up_to(full)  # type: ignore[attr-defined]
    for part, below in zip(parts, subtrees, strict=True):
        yield from _spread(part, below, depth + 1)


def _take(value: Any, children: Iterator[Child]) -> Child:
    """The next children of the root, as the child that stands for one argument."""
    if _compat.is_graph_object(value):
        return next(children)
    treedef: PyTreeDef = jax.tree_util.tree_structure(value, is_leaf=_compat.is_graph_object)
    own = tuple(next(children) for _ in range(treedef.num_leaves))
    return own[0] if is_leaf_treedef(treedef) else Container(treedef, own)


class Found(NamedTuple):
    """A place that a target reaches: the target, the part of it, and the place.

    ``name`` is what the user would write to reach it: ``model.blocks[3].kernel``.
    """

    target: Target
    part: Part
    place: Place
    name: str


def reach(structure: Structure, wanted: Sequence[Target]) -> list[Found]:
    """All places that the targets reach, in their order; shared ones once for each part.

    The arrays that the targets hold outside of objects must be those of the structure's root.
    """
    slots = iter(structure.root_slots)
    return [
        Found(goal, part, place, accessor(goal.name, (*part.keys, *place.path)))
        for goal in wanted
        for part in goal.parts
        for place in structure.walk(part.child, slots)
    ]


def slot_names(num_leaves: int, reached: Sequence[Found]) -> list[str]:
    """For each array what the user would write to reach it, or nothing if no target does."""
    names = [""] * num_leaves
    for found in reached:
        for slot in found.place.slots:
            names[slot] = names[slot] or found.name
    return names


def resolve(
    reached: Sequence[Found],
    objects: Sequence[Any],
    leaves: Sequence[Any],
    spec_of: Callable[[Any], Any],
    *,
    known: Mapping[int, tuple[str, Any]] | None = None,
    settled: Set[str] = frozenset(),
) -> Resolved:
    """Gives every array that targets reach its spec.

    Args:
      reached: what they reach.
      objects: the object of each entry.
      leaves: the arrays, by slot.
      spec_of: turns a spec as the user wrote it into its final form.
      known: Variables that have their spec already, and where they were found.
      settled: names of targets that have no say about known Variables.

    Raises:
      ValueError: no filter matches some Variables; or one Variable is reached with two
        different specs.
    """
    result = Resolved([None] * len(leaves), dict(known or {}))
    unmatched: list[str] = []
    conflicts: list[str] = []
    for found in reached:
        place, spec = found.place, found.part.spec
        if found.target.name in settled and known and place.entry in known:
            spec = None
        elif isinstance(spec, StateSharding):
            index = place.entry
            subject = leaves[place.slots[0]] if index is None else objects[index]
            # Inside a module paths start at the module, as in Flax.
            matched, spec = spec.find(place.path or found.part.below, subject)
            if not matched:
                unmatched.append(f"  {found.name}: {_describe(subject)}, by {found.part.spec!r}")
                continue
        _record(result, found, None if spec is None else spec_of(spec), conflicts)
    if unmatched:
        raise ValueError(
            "no filter of the StateSharding matches:\n"
            + "\n".join(unmatched)
            + "\nAdd a filter for them, or a last entry `...: PartitionSpec()`."
        )
    if conflicts:
        raise ValueError(
            "Inconsistent aliasing: one Variable is reached with different shardings:\n"
            + "\n".join(conflicts)
            + "\nGive it the same sharding everywhere."
        )
    return result


def _record(result: Resolved, found: Found, spec: Any, conflicts: list[str]) -> None:
    index = found.place.entry
    if index is not None:
        first = result.variables.get(index)
        if first is None or first[1] is None:
            result.variables[index] = (found.name, spec)
        elif spec is not None and spec != first[1]:
            conflicts.append(f"  {first[0]}: {first[1]}\n  {found.name}: {spec}")
        spec = result.variables[index][1]
    for slot in found.place.slots:
        result.slots[slot] = spec


def _describe(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of shape {shape}"
