"""Prefix pytrees of specs → one spec for every Variable and array, each with its path."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..filters import Paths, is_opaque, misspelt, to_predicate
from ..fitting import Indivisible, describe_both, suggested_spec, suggestion
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
      indivisible: the slots for which a ``StateSharding`` says what to do where it does not divide.
      uses: what each ``StateSharding`` decided about.
    """

    slots: list[Any]
    variables: dict[int, tuple[str, Any]]
    indivisible: dict[int, Indivisible]
    uses: list[Use]


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

    def find(self, path: Path, variable: Any) -> tuple[int | None, Any]:
        """The function always has an answer, or raises an error of its own."""
        sharding = self._function(path, variable)
        return next((i for i, s in enumerate(self.shardings) if s == sharding), 0), sharding


class Specs:
    """A prefix of specs as the user wrote it, hashable, with what there is to know about it.

    Attributes:
      tree: the prefix itself.
      rules: every spec in it that is a leaf, a ``StateSharding`` as a whole.
      written: likewise, with those inside of a ``StateSharding`` instead of it.
      invalid: what stands in it and is no spec at all: where, and what to write instead.
      has_partition_spec: whether one of them needs a mesh.
      depend_on_values: whether shapes and dtypes decide as well, by a predicate of the user's.
      may_hold_none: whether single arguments can have None.
    """

    def __init__(self, tree: Any):
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_spec)
        self.invalid = list(_no_specs(tree, ()))
        leaves = list(map(_own_spec, leaves))
        self.tree = jax.tree_util.tree_unflatten(treedef, leaves)
        wrapped = [StateSharding(x) if isinstance(x, nnx.State) else x for x in leaves]
        self._key = (tuple(wrapped), treedef)
        self.rules: tuple[Any, ...] = tuple(wrapped)
        self.written: tuple[Any, ...] = tuple(
            part
            for spec in wrapped
            for part in (spec.shardings if isinstance(spec, StateSharding) else (spec,))
        )
        self.depend_on_values = any(
            isinstance(s, StateSharding) and s.depends_on_values for s in wrapped
        )
        self.has_partition_spec = any(isinstance(s, PartitionSpec) for s in self.written)
        self.may_hold_none = self.tree is not None and None in leaves

    def value_key(self, leaves: Sequence[Any]) -> Any:
        """The shapes and dtypes of arrays, for a resolution that depends on them."""
        try:
            return tuple(map(_SHAPE_AND_DTYPE, leaves))
        except AttributeError:  # a number
            return tuple((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Specs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.tree)


def _no_specs(tree: Any, path: Path) -> Iterator[str]:
    """What stands in a prefix and is no spec, with its place, and with what may be meant."""
    if is_spec(tree):
        return
    meant = suggested_spec(tree) if path or isinstance(tree, str) else ""
    parts, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if meant or is_leaf_treedef(treedef):
        yield f"{accessor('', path)}: {tree!r}{meant}"
        return
    for key, part in parts:
        yield from _no_specs(part, (*path, *map(path_key, key)))


_SHAPE_AND_DTYPE = operator.attrgetter("shape", "dtype")


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
    except ValueError:
        full = _skeleton(child)
        problems = [
            f"  {name}{where}: {what}" for where, what in _prefix_problems(prefix, full, ())
        ]
        if not problems:
            raise
        raise ValueError(
            "these specs are no tree prefix of the value they are for, in which modules and "
            "Variables count as leaves:\n" + "\n".join(problems)
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
    return list(_spread(prefix, _skeleton(child), 0))


def _skeleton(child: Child) -> Any:
    """The pytree of a child, with anything at its leaves."""
    if not isinstance(child, Container):
        return 0
    return child.treedef.unflatten(range(child.treedef.num_leaves))


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


def _prefix_problems(prefix: Any, full: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Why a prefix is none: where, and what is wrong there."""
    if is_spec(prefix):
        return
    where = accessor("", path)
    own, theirs = (_parts(tree) for tree in (prefix, full))
    if type(prefix) is not type(full) or not theirs:
        kind = type(full).__name__ if theirs else "module, Variable or array"
        yield where, f"the specs are a {type(prefix).__name__}, the value is a {kind}"
        return
    if isinstance(prefix, tuple | list) and len(own) != len(theirs):
        yield where, f"{len(own)} specs for {len(theirs)} values"
        return
    missing = [key for key in theirs if key not in own]
    extra = [key for key in own if key not in theirs]
    if missing:
        yield where, f"no spec for {', '.join(map(repr, missing))}"
    for key in extra:
        yield where, f"there is no {key!r}{suggestion(key, missing or theirs)}"
    for key in own:
        if key in theirs:
            yield from _prefix_problems(own[key], theirs[key], (*path, key))


def _parts(tree: Any) -> dict[Any, Any]:
    """The children of one level of a pytree by their keys."""
    parts, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return {} if is_leaf_treedef(treedef) else {path_key(path[0]): part for path, part in parts}


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
    result = Resolved([None] * len(leaves), dict(known or {}), {}, [])
    uses: dict[int, Use] = {}
    conflicts: list[str] = []
    for found in reached:
        place, spec = found.place, found.part.spec
        if found.target.name in settled and known and place.entry in known:
            spec = None
        elif isinstance(spec, StateSharding):
            use = uses.setdefault(id(spec), Use(spec))
            index = place.entry
            subject = leaves[place.slots[0]] if index is None else objects[index]
            # Inside a module paths start at the module, as in Flax.
            path = place.path or found.part.below
            which, spec = use.rules.find(path, subject)
            use.note(which, path, found.target.name)
            if which is None and place.slots:  # what holds no array needs no filter
                use.unmatched.append(f"  {found.name}: {_describe(subject)}")
                continue
            if use.rules.indivisible is not None:
                result.indivisible.update(dict.fromkeys(place.slots, use.rules.indivisible))
        _record(result, found, None if spec is None else spec_of(spec), conflicts)
    unmatched = [use for use in uses.values() if use.unmatched]
    if unmatched:
        raise ValueError(
            "no filter of the StateSharding matches:\n"
            + "\n".join(use.unmatched_lines() for use in unmatched)
            + "\nAdd a filter for them, or a last entry `...: PartitionSpec()`."
        )
    result.uses.extend(uses.values())
    if conflicts:
        raise ValueError(
            "Inconsistent aliasing: one Variable is reached with different shardings:\n"
            + "\n".join(conflicts)
            + "\nGive it the same sharding everywhere."
        )
    return result


class Use:
    """What one ``StateSharding`` decided about."""

    def __init__(self, rules: StateSharding):
        self.rules = rules
        self.unmatched: list[str] = []
        self._matched: set[int | None] = set()
        self._keys: dict[Any, None] = {}
        self._arguments: dict[str, None] = {}

    def note(self, which: int | None, path: Path, argument: str) -> None:
        """Notes one decision: the number of the filter, for what path and argument."""
        self._matched.add(which)
        self._keys.update(dict.fromkeys(path))
        self._arguments[argument] = None

    def copy(self) -> Use:
        """One that can be added to."""
        new = Use(self.rules)
        new.add(self)
        return new

    def add(self, other: Use) -> None:
        """Takes in the decisions of an equal one."""
        self._matched |= other._matched
        self._keys |= other._keys
        self._arguments |= other._arguments

    def unmatched_lines(self) -> str:
        """What no filter matched, and the filters that were tried."""
        return "\n".join([*self.unmatched, f"The filters are {', '.join(self.rules.names)}."])

    def unused_lines(self) -> Iterator[str]:
        """The filters that decided about nothing.

        A last resort may do so, a predicate that looks at shapes, and paths, which may be those of
        several arguments.
        """
        for index, filter_ in enumerate(self.rules.filters):
            may_rest = isinstance(filter_, Paths) or filter_ in (..., True, nnx.Everything())
            if index in self._matched or may_rest or is_opaque(to_predicate(filter_)):
                continue
            name = self.rules.names[index]
            near = misspelt(filter_, self._keys)
            yield f"  {name}, for {', '.join(self._arguments)}{near}"


def merged(uses: Iterable[Use]) -> list[Use]:
    """Uses of equal rules as one: each filter may be meant for one argument only."""
    found: list[Use] = []
    for use in uses:
        same = next((other for other in found if other.rules == use.rules), None)
        if same is None:
            found.append(use.copy())
        else:
            same.add(use)
    return found


def _record(result: Resolved, found: Found, spec: Any, conflicts: list[str]) -> None:
    index = found.place.entry
    if index is not None:
        first = result.variables.get(index)
        if first is None or first[1] is None:
            result.variables[index] = (found.name, spec)
        elif spec is not None and spec != first[1]:
            old, new = describe_both(first[1], spec)
            conflicts.append(f"  {first[0]}: {old}\n  {found.name}: {new}")
        spec = result.variables[index][1]
    for slot in found.place.slots:
        result.slots[slot] = spec


def _describe(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of shape {shape}"
