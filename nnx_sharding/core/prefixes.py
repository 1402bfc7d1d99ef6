"""Specs as a user writes them: a prefix of a pytree, in types of JAX, of Flax or of ours.

A *spec* says how an array is laid out: a ``PartitionSpec``, a sharding, or an axis of ``vmap``. A
*prefix* is a pytree of specs that may end earlier than the value that it is for: one spec is then
for all leaves below. A ``StateSharding`` has a spec for each of its filters, and may take the place
of a spec. :class:`Specs` is a prefix whose leaves are converted to our own types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..errors import raise_if_any
from ..specs.filters import is_opaque, to_predicate
from ..specs.fitting import show, suggested_spec
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import StateSharding, is_single_spec
from .treedefs import PyTreeDef, is_leaf_treedef


def is_spec(x: object) -> bool:
    """Whether ``x`` is a leaf of a prefix of specs, not a container of further specs.

    A leaf is a single spec, None, or an object with specs for all Variables of a module: a
    ``StateSharding``, an ``nnx.State`` or a module of specs, or what ``nnx.prefix`` returns.
    """
    return (
        is_single_spec(x)  # the spec of one array, or None
        or isinstance(x, StateSharding | nnx.State)
        or _compat.is_node(x)  # a module with specs instead of arrays
        or _compat.prefix_state(x) is not None  # what `nnx.prefix` returns
    )


class PathFunction(StateSharding):
    """What ``nnx.prefix`` returns in graph mode: a spec for each path, a function for new paths.

    As a ``StateSharding``, it has this function as the filter for each of its specs. The function
    is asked only about paths that have no spec.

    Private attributes:

        _by_path    the spec of each path that was there when the user called ``nnx.prefix``
        _function   the user's function ``(path, variable) -> spec``
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
        """Returns the number of the filter that decides about a path, and the path's sharding.

        The caller uses the number to warn of unused filters. All filters here are the same
        function, and there is one for each known sharding. If the function returns another
        sharding, the number is 0. The function may raise an error of its own.
        """
        is_known = path in self._by_path
        sharding = self._by_path[path] if is_known else self._function(path, variable)
        number = self.shardings.index(sharding) if sharding in self.shardings else 0
        return number, sharding

    @property
    def _key(self) -> tuple[Any, ...]:
        return (*super()._key, tuple(self._by_path.items()))


def leaves_by_path(tree: object, is_leaf: Callable[[Any], bool]) -> dict[Path, Any]:
    """Returns the leaves of a pytree by their paths: ``{"a": [x]}`` → ``{("a", 0): x}``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {tuple(map(path_key, path)): leaf for path, leaf in leaves}


def _normalized(spec: Any) -> Any:
    """Returns a spec in our own types: a sharding, a ``StateSharding``, or None for no spec.

    Specs in types of Flax or JAX are converted; anything else is returned as it is.
    """
    if type(spec) is getattr(nnx, "StateSharding", None):  # Flax is going to remove the class
        return StateSharding(zip(spec.filters, spec.shardings, strict=True))
    if _compat.is_unspecified(spec):  # JAX's default for ``in_shardings``
        return None
    # ``nnx.prefix(model, function)`` returns a State with a spec for each path, and the function,
    # which is asked about Variables that the traced function adds.
    prefix = _compat.prefix_state(spec)
    if prefix is not None:
        return PathFunction(prefix.function, leaves_by_path(prefix.specs, is_single_spec))
    if _compat.is_node(spec):
        # A module has specs instead of arrays: in its Variables, as `nnx.get_named_sharding` makes
        # it, or in the places of Variables. Each spec becomes a filter for its path.
        parts = leaves_by_path(spec, lambda x: is_single_spec(x) or isinstance(x, nnx.Variable))
        pairs = []
        for path, part in parts.items():
            sharding = part.get_raw_value() if isinstance(part, nnx.Variable) else part
            pairs.append((nnx.filterlib.PathIn(path), sharding))
        return StateSharding(pairs)
    return spec


class Specs:
    """A prefix of specs as the user wrote it, hashable.

    For ``(P("data"), StateSharding({nnx.Param: P("model"), ...: P()}))``, ``rules`` has the two
    items, and ``written`` has the three specs in these.

    Attributes:
      tree: the prefix, in our own types.
      invalid: the leaves that are not specs, for an error.
      rules: the leaves: each is a spec, or a ``StateSharding`` with a spec for each filter.
      written: all specs, including those in a ``StateSharding``.
      depend_on_values: whether shapes and dtypes matter, to a predicate of the user.
      predicates: the filters in ``rules`` that are functions or objects of the user.
      has_partition_spec: whether any spec needs a mesh.
      may_hold_none: whether an argument, or a part of one, can have None as its spec.

    Two prefixes are equal if their ``_key`` is: the rules, and the treedef of the prefix.
    """

    def __init__(self, tree: object):
        """Reads a tree of specs; leaves that are not specs are kept in ``invalid``."""
        self.invalid = list(_invalid_leaves(tree, ()))
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_spec)
        leaves = list(map(_normalized, leaves))
        # A State of specs stays a State in ``tree``, because it is matched level by level if it is
        # for a State. In ``rules``, it is a StateSharding with a filter for each path.
        self.tree = jax.tree_util.tree_unflatten(treedef, leaves)
        self.rules: tuple[Any, ...] = tuple(
            StateSharding(x) if isinstance(x, nnx.State) else x for x in leaves
        )
        self._key = (self.rules, treedef)
        written: list[Any] = []
        self.depend_on_values = False
        self.predicates: list[Any] = []
        for rule in self.rules:
            if isinstance(rule, StateSharding):
                written += rule.shardings
                if rule.depends_on_values:
                    self.depend_on_values = True
                predicates = map(to_predicate, rule.filters)
                self.predicates += (predicate for predicate in predicates if is_opaque(predicate))
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

    place: str  # the expression for the leaf, from the prefix on
    leaf: Any
    hint: str  # a suggestion, or ""


def _invalid_leaves(tree: object, path: Path) -> Iterator[_InvalidLeaf]:
    """Yields the leaves of a prefix that are not specs; ``path`` leads from the prefix to ``tree``.

    ``{"x": ("data", None)}`` gives one leaf, the tuple, with the hint to write ``P("data", None)``.
    """
    if is_spec(tree):
        return
    # Strings and None in a tuple were probably meant as one spec. A tuple at the top has a spec for
    # each argument instead.
    is_for_arguments = not path and isinstance(tree, tuple | list)
    hint = "" if is_for_arguments else suggested_spec(tree)  # for example ": write P('data', None)"
    parts, treedef = one_level(tree)  # the treedef is a leaf if the tree is no container
    # If there is a hint, the whole tuple is reported, and not each string in it.
    if hint or is_leaf_treedef(treedef):
        yield _InvalidLeaf(accessor("", path), tree, hint)
        return
    for key_path, part in parts:
        yield from _invalid_leaves(part, (*path, *map(path_key, key_path)))


def one_level(tree: object) -> tuple[list[tuple[Any, Any]], PyTreeDef]:
    """Returns the children of a pytree as pairs (path of one key, child), and the treedef."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)


def check_specs(name: str, types: type | tuple[type, ...] = object, **options: Specs) -> None:
    """Raises a ``TypeError`` for leaves that are not specs, or not of these types.

    Args:
      name: the name of the transform, in messages.
      types: the types of specs that the transform takes. ``shard_map`` takes a ``PartitionSpec``
        only.
      **options: the specs of the transform, by option, such as ``in_shardings=``.
    """
    lines = []
    for option, specs in options.items():
        # 1. Leaves that are no specs at all, with their places in the prefix and perhaps hints.
        lines += [f"  {option}{x.place}: {show(x.leaf)}{x.hint}" for x in specs.invalid]
        # 2. Specs of other types than the transform takes, such as a sharding with its mesh.
        for spec in specs.written:
            if spec is not None and not isinstance(spec, types):
                lines.append(f"  {option}: {show(spec)}; write its PartitionSpec")
    remedy = (
        "Use a PartitionSpec such as P('data', None), a Sharding, a StateSharding, or None. "
        "P() replicates; None declares nothing."
    )
    head = f"{name}: expected a sharding spec, got:"
    raise_if_any(TypeError, head, lines, remedy, anchor="not-a-spec")
