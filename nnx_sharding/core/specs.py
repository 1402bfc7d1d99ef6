"""Prefix pytrees of specs → the parts of arguments and outputs, each with its spec."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..fitting import suggested_spec, suggestion
from ..paths import Path, accessor, path_key
from ..state_sharding import StateSharding, is_single_spec
from .structure import Child, Container, PyTreeDef, Structure, container_keys, is_leaf_treedef


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
      may_hold_none: whether arguments, or parts of them, can have None.
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
    meant = suggested_spec(tree) if path or not isinstance(tree, tuple | list) else ""
    parts, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if meant or is_leaf_treedef(treedef):
        yield f"{accessor('', path)}: {tree!r}{meant}"
        return
    for key, part in parts:
        yield from _no_specs(part, (*path, *map(path_key, key)))


_SHAPE_AND_DTYPE = operator.attrgetter("shape", "dtype")


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
    if isinstance(prefix, dict) and (
        isinstance(full, nnx.State) or jax.tree_util.all_leaves([full])
    ):
        prefix = nnx.State(prefix)
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
