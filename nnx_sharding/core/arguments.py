"""Prefix pytrees of specs → the parts of arguments and outputs, each with its spec.

A *spec* says how an array is laid out: a ``PartitionSpec``, a sharding, or an axis of ``vmap``. A
user gives specs as a *prefix* of an argument: a pytree that may end earlier, where one spec is for
all that is below. A *part* is what has one spec: a module, a Variable or an array. A module in an
argument is a leaf of its pytree; the filters of a ``StateSharding`` choose a spec for each Variable
in it. The *structure* is the table that describes all objects of a call (``structure.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .. import _compat
from ..errors import message, raise_listed, see
from ..specs.fitting import suggested_spec, suggestion
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import StateSharding, is_single_spec
from .problems import show
from .signature import ArgTree
from .structure import Child, Container, Structure
from .treedefs import PyTreeDef, container_keys, is_leaf_treedef


def is_spec(x: object) -> bool:
    """Whether ``x`` is a leaf of a prefix: a spec, None, or a mapping of filters."""
    return (
        is_single_spec(x)
        or isinstance(x, StateSharding | nnx.State)
        or _compat.is_node(x)
        or _compat.prefix_state(x) is not None
    )


class PathFunction(StateSharding):
    """What ``nnx.prefix`` returns in graph mode: a spec for each path, a function for new ones."""

    __slots__ = ("_by_path", "_function")

    def __init__(self, function: Callable[[Path, Any], Any], by_path: dict[Path, Any]):
        super().__init__((function, sharding) for sharding in dict.fromkeys(by_path.values()))
        self._function, self._by_path = function, by_path

    @property
    def depends_on_values(self) -> bool:
        """A function may look at anything."""
        return True

    def find(self, path: Path, variable: object) -> tuple[int | None, Any]:
        """Returns an index and the sharding; the function may raise an error of its own."""
        is_known = path in self._by_path
        sharding = self._by_path[path] if is_known else self._function(path, variable)
        is_listed = sharding in self.shardings
        return self.shardings.index(sharding) if is_listed else 0, sharding

    @property
    def _key(self) -> tuple[Any, ...]:
        return (*super()._key, tuple(self._by_path.items()))


def leaves_by_path(tree: object, is_leaf: Callable[[Any], bool]) -> dict[Path, Any]:
    """Returns the leaves of a pytree by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {tuple(map(path_key, path)): leaf for path, leaf in leaves}


def _normalized(spec: Any) -> Any:
    """Returns a spec in our own types, if the user wrote it in Flax's types.

    These are its ``StateSharding``, what ``nnx.prefix`` returns, and modules that hold specs in the
    place of arrays.
    """
    if type(spec) is getattr(nnx, "StateSharding", None):
        return StateSharding(zip(spec.filters, spec.shardings, strict=True))
    if _compat.is_unspecified(spec):
        return None
    prefix = _compat.prefix_state(spec)
    if prefix is not None:
        function, specs_by_path = prefix
        return PathFunction(function, leaves_by_path(specs_by_path, is_single_spec))
    if _compat.is_node(spec):
        # Variables hold their specs, or have been replaced by them.
        pairs = leaves_by_path(spec, lambda x: is_single_spec(x) or isinstance(x, nnx.Variable))
        return StateSharding(
            (nnx.filterlib.PathIn(path), x.get_raw_value() if isinstance(x, nnx.Variable) else x)
            for path, x in pairs.items()
        )
    return spec


class Specs:
    """A prefix of specs as the user wrote it, hashable.

    Attributes:
      tree: the prefix, in our own types.
      rules: its leaves: specs, and mappings from filters to specs.
      written: the specs among them, with those inside of mappings.
      invalid: the leaves that are not specs.
      depend_on_values: whether shapes and dtypes matter, to a user's predicate.
      has_partition_spec: whether any spec needs a mesh.
      may_hold_none: whether arguments, or parts of them, can have None.
    """

    def __init__(self, tree: object):
        """Reads a tree of specs; keeps what is not a spec in ``invalid``, for an error."""
        self.invalid = list(_invalid_leaves(tree, ()))
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_spec)
        leaves = list(map(_normalized, leaves))
        self.tree = jax.tree_util.tree_unflatten(treedef, leaves)
        # A State of specs has one for each path, as a StateSharding with filters for paths.
        self.rules: tuple[Any, ...] = tuple(
            StateSharding(x) if isinstance(x, nnx.State) else x for x in leaves
        )
        self._key = (self.rules, treedef)
        written: list[Any] = []
        self.depend_on_values = False
        for rule in self.rules:
            if isinstance(rule, StateSharding):
                written += rule.shardings
                self.depend_on_values |= rule.depends_on_values
            else:
                written.append(rule)
        self.written = tuple(written)
        self.has_partition_spec = any(isinstance(spec, PartitionSpec) for spec in written)
        self.may_hold_none = self.tree is not None and None in leaves

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
    """Yields the leaves of a prefix that are not specs."""
    if is_spec(tree):
        return
    # A tuple such as ("data", None) was probably meant as one spec; at the top, as one for each.
    hint = suggested_spec(tree) if path or not isinstance(tree, tuple | list) else ""
    parts, treedef = _one_level(tree)
    if hint or is_leaf_treedef(treedef):
        yield _InvalidLeaf(accessor("", path), tree, hint)
        return
    for key, part in parts:
        yield from _invalid_leaves(part, (*path, *map(path_key, key)))


def _one_level(tree: object) -> tuple[list[tuple[Any, Any]], PyTreeDef]:
    """Returns the children of a pytree with their key paths."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)


def check_specs(name: str, types: type | tuple[type, ...] = object, **options: Specs) -> None:
    """Raises a ``TypeError`` for leaves that are not specs, or not of these types.

    ``name`` is that of the transform in messages; ``options`` are its specs, by option, such as
    ``in_shardings=``.
    """
    lines = []
    for option, specs in options.items():
        lines += [f"  {option}{x.place}: {show(x.leaf)}{x.hint}" for x in specs.invalid]
        for spec in specs.written:
            if spec is not None and not isinstance(spec, types):
                lines.append(f"  {option}: {show(spec)}; write its PartitionSpec")
    remedy = "Use a PartitionSpec such as P('data', None), a Sharding, a StateSharding, or None."
    head = f"{name}: expected a sharding spec, got:"
    raise_listed(TypeError, head, lines, remedy, anchor="not-a-spec")


class Part(NamedTuple):
    """One graph object or array inside an argument or output."""

    keys: Path  # the path from the argument to it
    below: Path  # the end of this path, from the leaf of the prefix that is its spec
    spec: Any  # its spec, as the user wrote it
    child: Child  # where it is in the structure


class Argument(NamedTuple):
    """One argument or output: its name in messages, and its parts."""

    name: str
    parts: tuple[Part, ...]

    def objects_only(self) -> Argument:
        """Returns the argument without arrays, which a function cannot change in place."""
        return Argument(self.name, tuple(p for p in self.parts if isinstance(p.child, int)))


def named_parts(arguments: Iterable[Argument]) -> list[tuple[str, Child]]:
    """Returns all parts of some arguments, each with the expression for it."""
    pairs = ((argument, part) for argument in arguments for part in argument.parts)
    return [(accessor(argument.name, part.keys), part.child) for argument, part in pairs]


def split_arguments(
    structure: Structure, tree: ArgTree, specs: ArgTree, names: Sequence[str], caller: str = ""
) -> list[Argument]:
    """Splits each dynamic argument of a call into the parts that have a spec of their own.

    Args:
      structure: describes the arguments; its root has them in the order of the result.
      tree: the values of the arguments, positional and by keyword.
      specs: the user's prefix of specs for each, likewise.
      names: the names of the positional arguments.
      caller: the function and the option that the specs are from, in messages.
    """
    assert isinstance(structure.root, Container)
    children = iter(structure.root.children)
    (args, kwargs), (specs_by_position, specs_by_name) = tree, specs
    keywords = sorted(kwargs)
    values = [*args, *(kwargs[key] for key in keywords)]
    prefixes = [*specs_by_position, *(specs_by_name[key] for key in keywords)]
    # ``**kwargs`` may have the name of a positional-only parameter.
    labels = [*names, *(f"kwargs[{key!r}]" if key in names else key for key in keywords)]
    return [
        split_argument(name, prefix, value, _take(value, children), caller)
        for name, prefix, value in zip(labels, prefixes, values, strict=True)
    ]


def _take(value: object, children: Iterator[Child]) -> Child:
    """Returns the child that describes one argument, of as many children as it has leaves."""
    if _compat.is_graph_object(value):
        return next(children)
    treedef: PyTreeDef = jax.tree_util.tree_structure(value, is_leaf=_compat.is_graph_object)
    parts = tuple(next(children) for _ in range(treedef.num_leaves))
    return parts[0] if is_leaf_treedef(treedef) else Container(treedef, parts)


def split_argument(
    name: str, prefix: object, value: object, child: Child, caller: str = ""
) -> Argument:
    """Splits a pytree into its leaves (modules, Variables, arrays), each with its spec.

    Args:
      name: the name of the argument or output, in messages.
      prefix: the user's specs, as a prefix of the pytree.
      value: the pytree.
      child: the pytree, as the structure describes it.
      caller: the function and the option that the specs are from, in messages.

    Raises:
      ValueError: the specs are no prefix of the pytree.
    """
    paths: Sequence[Path] = ((),)
    children: Sequence[Child] = (child,)
    skeleton: Any = 0  # the same pytree, with numbers as its leaves
    if isinstance(child, Container):
        paths = container_keys(child.treedef)
        children = child.children
    if is_single_spec(prefix) or isinstance(prefix, StateSharding):
        specs = [(prefix, 0)] * len(children)  # some pytrees cannot be rebuilt without arrays
    else:
        if isinstance(child, Container):
            skeleton = child.treedef.unflatten(range(len(paths)))
        try:
            specs = list(_broadcast(prefix, skeleton, 0))
        except ValueError:
            mismatches = [f"  {line}" for line in _mismatches(prefix, skeleton, name)]
            if not mismatches:
                raise
            head = (
                "these specs are not a tree prefix of the value (modules and Variables are leaves):"
            )
            head = f"{caller}: {head}" if caller else head
            raise see(ValueError(message(head, mismatches)), anchor="not-a-tree-prefix") from None
    parts = []
    for path, part, (spec, depth) in zip(paths, children, specs, strict=True):
        # The first ``depth`` keys lead to the spec in the prefix; its filters see the rest.
        parts.append(Part(keys=path, below=path[depth:], spec=spec, child=part))
    return Argument(name, tuple(parts))


def _broadcast(prefix: Any, full: Any, depth: int) -> Iterator[tuple[Any, int]]:
    """Yields the spec of each leaf of a pytree, by a prefix of it, and the depth of that spec.

    Args:
      prefix: the user's specs for this part of the pytree.
      full: this part of the pytree; its leaves stand for modules, Variables and arrays.
      depth: the number of keys that lead to this part.
    """
    # A dict for a State, or for a module, has specs by path, as a State does.
    is_leaf = jax.tree_util.all_leaves([full])
    if isinstance(prefix, nnx.Variable) and is_leaf:  # of nnx.get_named_sharding, or a tree.map
        prefix = _compat.get_value(prefix)
    if isinstance(prefix, dict) and (isinstance(full, nnx.State) or is_leaf):
        prefix = nnx.State(prefix)
    if isinstance(prefix, nnx.State) and not isinstance(full, nnx.State):
        prefix = StateSharding(prefix)
    if is_single_spec(prefix) or isinstance(prefix, StateSharding):
        yield from [(prefix, depth)] * len(jax.tree_util.tree_leaves(full))
        return
    parts, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=lambda x: x is not prefix)
    if is_leaf_treedef(treedef):
        raise ValueError(f"expected a sharding spec, got {prefix!r}")
    subtrees: list[Any] = treedef.flatten_up_to(full)  # type: ignore[attr-defined]
    for part, subtree in zip(parts, subtrees, strict=True):
        yield from _broadcast(part, subtree, depth + 1)


def _mismatches(prefix: object, full: object, place: str) -> Iterator[str]:
    """Yields a text for each mismatch of a prefix and the tree; ``place`` is what both are at."""
    if is_spec(prefix):
        return
    specs, values = (_children(tree) for tree in (prefix, full))
    if type(prefix) is not type(full) or not values:
        kind = type(full).__name__ if values else "module, Variable or array"
        yield f"{place}: the specs are a {type(prefix).__name__}, the value is a {kind}"
        return
    if isinstance(prefix, tuple | list) and len(specs) != len(values):
        yield f"{place}: {len(specs)} specs for {len(values)} values"
        return
    missing = [key for key in values if key not in specs]
    if missing:
        yield f"{place}: no spec for {', '.join(map(repr, missing))}"
    for key in specs:
        if key in values:
            yield from _mismatches(specs[key], values[key], accessor(place, (key,)))
        else:
            yield f"{place}: unknown key {key!r}{suggestion(key, missing or values)}"


def _children(tree: object) -> dict[Any, Any]:
    """Returns the children of one level of a pytree by their keys."""
    parts, treedef = _one_level(tree)
    return {} if is_leaf_treedef(treedef) else {path_key(path[0]): part for path, part in parts}
