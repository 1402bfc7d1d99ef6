"""Specs as a user writes them: a prefix of a pytree, in types of JAX, of Flax or of ours.

A *spec* says how an array is laid out: a ``PartitionSpec``, a sharding, or an axis of ``vmap``. A
*prefix* is a pytree of specs that may end earlier than the value that it is for: one spec is for
all that is below. A ``StateSharding`` has a spec for each of its filters, and may take the place of
a spec. :class:`Specs` is a prefix with all of that in our own types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..errors import raise_listed
from ..specs.filters import is_opaque, to_predicate
from ..specs.fitting import show, suggested_spec
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import StateSharding, is_single_spec
from .treedefs import PyTreeDef, is_leaf_treedef


def is_spec(x: object) -> bool:
    """Whether ``x`` is a leaf of a prefix of specs, not a container of further ones.

    Such leaves are a single spec or None, and what has specs for all Variables of a module: a
    ``StateSharding``, an ``nnx.State`` or a module of specs, or what ``nnx.prefix`` returns.
    """
    return (
        is_single_spec(x)  # of one array, or None
        or isinstance(x, StateSharding | nnx.State)
        or _compat.is_node(x)  # a module, with specs in place of its arrays
        or _compat.prefix_state(x) is not None  # from `nnx.prefix`
    )


class PathFunction(StateSharding):
    """What ``nnx.prefix`` returns in graph mode: a spec for each path, a function for new ones.

    It is a ``StateSharding`` whose filter, for each of its specs, is that function. But a path that
    is known does not ask it.
    """

    __slots__ = ("_by_path", "_function")

    def __init__(self, function: Callable[[Path, Any], Any], by_path: dict[Path, Any]):
        super().__init__((function, sharding) for sharding in dict.fromkeys(by_path.values()))
        self._function, self._by_path = function, by_path

    @property
    def depends_on_values(self) -> bool:
        """A function may look at anything."""
        return True

    def find(self, path: Path, variable: object) -> tuple[int | None, Any]:
        """Returns the sharding for a path, and the number of a filter that has matched.

        The number says which filters are unused, for a warning. All filters here are the same
        function, one for each sharding, so any number will do for one that is not listed.

        The user's function may raise an error of its own.
        """
        is_known = path in self._by_path
        sharding = self._by_path[path] if is_known else self._function(path, variable)
        is_listed = sharding in self.shardings
        return self.shardings.index(sharding) if is_listed else 0, sharding

    @property
    def _key(self) -> tuple[Any, ...]:
        return (*super()._key, tuple(self._by_path.items()))


def leaves_by_path(tree: object, is_leaf: Callable[[Any], bool]) -> dict[Path, Any]:
    """Returns the leaves of a pytree by their paths: ``{"a": [x]}`` → ``{("a", 0): x}``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {tuple(map(path_key, path)): leaf for path, leaf in leaves}


def _normalized(spec: Any) -> Any:
    """Returns a spec in our own types: a sharding, a ``StateSharding``, or None for no spec.

    What the user wrote in types of Flax or JAX is converted; anything else is returned as it is.
    """
    if type(spec) is getattr(nnx, "StateSharding", None):  # which Flax is going to remove
        return StateSharding(zip(spec.filters, spec.shardings, strict=True))
    if _compat.is_unspecified(spec):  # JAX's default for ``in_shardings``
        return None
    # What ``nnx.prefix(model, function)`` has returned: a State with a spec for each path, and the
    # function, which is asked about Variables that the traced function adds.
    prefix = _compat.prefix_state(spec)
    if prefix is not None:
        return PathFunction(prefix.function, leaves_by_path(prefix.specs, is_single_spec))
    if _compat.is_node(spec):
        # A module with specs instead of arrays: in its Variables, as `nnx.get_named_sharding`
        # makes it, or in their places. Each becomes a filter for its path.
        parts = leaves_by_path(spec, lambda x: is_single_spec(x) or isinstance(x, nnx.Variable))
        pairs = []
        for path, part in parts.items():
            sharding = part.get_raw_value() if isinstance(part, nnx.Variable) else part
            pairs.append((nnx.filterlib.PathIn(path), sharding))
        return StateSharding(pairs)
    return spec


class Specs:
    """A prefix of specs as the user wrote it, hashable.

    For ``(P("data"), StateSharding({nnx.Param: P("model"), ...: P()}))``, ``rules`` has these two,
    and ``written`` the three specs in them.

    Attributes:
      tree: the prefix, in our own types.
      invalid: the leaves that are not specs, for an error.
      rules: its leaves: a spec, or a ``StateSharding`` with one for each filter.
      written: all specs, with those in a ``StateSharding``.
      depend_on_values: whether shapes and dtypes matter, to a predicate of the user.
      predicates: the filters in ``rules`` that are functions or objects of the user.
      has_partition_spec: whether any spec needs a mesh.
      may_hold_none: whether arguments, or parts of them, can have None.
    """

    def __init__(self, tree: object):
        """Reads a tree of specs; what is wrong with it is kept in ``invalid``."""
        self.invalid = list(_invalid_leaves(tree, ()))
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_spec)
        leaves = list(map(_normalized, leaves))
        # A State of specs stays one in ``tree``: only if it is for a State, it is matched with that
        # level by level. As a rule, it is a StateSharding with a filter for each path.
        self.tree = jax.tree_util.tree_unflatten(treedef, leaves)
        self.rules: tuple[Any, ...] = tuple(
            StateSharding(x) if isinstance(x, nnx.State) else x for x in leaves
        )
        self._key = (self.rules, treedef)  # by which two prefixes are equal
        written: list[Any] = []
        self.depend_on_values = False
        self.predicates: list[Any] = []
        for rule in self.rules:
            if isinstance(rule, StateSharding):
                written += rule.shardings
                self.depend_on_values |= rule.depends_on_values
                self.predicates += filter(is_opaque, map(to_predicate, rule.filters))
            else:
                written.append(rule)
        self.written = tuple(written)
        self.has_partition_spec = any(isinstance(spec, PartitionSpec) for spec in written)
        self.may_hold_none = self.tree is not None and any(leaf is None for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Specs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.tree)


class _InvalidLeaf(NamedTuple):
    """A leaf of a prefix that is not a spec."""

    place: str  # the expression for it, from the prefix
    leaf: Any
    hint: str  # a suggestion, or nothing


def _invalid_leaves(tree: object, path: Path) -> Iterator[_InvalidLeaf]:
    """Yields the leaves of a prefix that are not specs; ``path`` leads from the prefix to ``tree``.

    ``{"x": ("data", None)}`` gives one leaf, the tuple, with the hint to write ``P("data", None)``.
    """
    if is_spec(tree):
        return
    # Strings and None in a tuple were probably meant as one spec. Not at the top: there a tuple has
    # one spec for each argument.
    is_for_arguments = not path and isinstance(tree, tuple | list)
    hint = "" if is_for_arguments else suggested_spec(tree)  # such as ": write P('data', None)"
    parts, treedef = one_level(tree)  # its children, each with its key
    # With a hint, the whole tuple is reported, not each string in it.
    if hint or is_leaf_treedef(treedef):
        yield _InvalidLeaf(accessor("", path), tree, hint)
        return
    for key_path, part in parts:
        yield from _invalid_leaves(part, (*path, *map(path_key, key_path)))


def one_level(tree: object) -> tuple[list[tuple[Any, Any]], PyTreeDef]:
    """Returns the children of a pytree, each after its key path (of one key), and the treedef."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)


def check_specs(name: str, types: type | tuple[type, ...] = object, **options: Specs) -> None:
    """Raises a ``TypeError`` for leaves that are not specs, or not of these types.

    Args:
      name: that of the transform, in messages.
      types: the types of specs that it takes. ``shard_map`` takes a ``PartitionSpec`` only.
      **options: its specs, by option, such as ``in_shardings=``.
    """
    lines = []
    for option, specs in options.items():
        # 1. What is no spec at all, with its place in the prefix and perhaps a hint.
        lines += [f"  {option}{x.place}: {show(x.leaf)}{x.hint}" for x in specs.invalid]
        # 2. Specs of other types than the transform takes, such as a sharding with its mesh.
        for spec in specs.written:
            if spec is not None and not isinstance(spec, types):
                lines.append(f"  {option}: {show(spec)}; write its PartitionSpec")
    remedy = "Use a PartitionSpec such as P('data', None), a Sharding, a StateSharding, or None."
    head = f"{name}: expected a sharding spec, got:"
    raise_listed(TypeError, head, lines, remedy, anchor="not-a-spec")
