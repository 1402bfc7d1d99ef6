"""Prefix pytrees of specs → the parts of arguments and outputs, each with its spec."""

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
from .signature import ArgTree, Parameters, Signature, align_specs
from .static_equality import Static
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
        """The function always has an answer, or raises an error of its own."""
        is_known = path in self._by_path
        sharding = self._by_path[path] if is_known else self._function(path, variable)
        return next((i for i, s in enumerate(self.shardings) if s == sharding), 0), sharding

    @property
    def _key(self) -> tuple[Any, ...]:
        return (*super()._key, tuple(self._by_path.items()))


def leaves_by_path(tree: object, is_leaf: Callable[[Any], bool]) -> dict[Path, Any]:
    """Returns the leaves of a pytree by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {tuple(map(path_key, path)): leaf for path, leaf in leaves}


def _normalized(spec: Any) -> Any:
    """Returns a spec in our own types, from those of Flax: StateSharding, prefixes, modules."""
    if type(spec) is getattr(nnx, "StateSharding", None):
        return StateSharding(zip(spec.filters, spec.shardings, strict=True))
    if _compat.is_unspecified(spec):
        return None
    prefix = _compat.prefix_state(spec)
    if prefix is not None:
        return PathFunction(prefix[0], leaves_by_path(prefix[1], is_single_spec))
    if _compat.is_node(spec):
        # Variables hold their specs, or have been replaced by them.
        pairs = leaves_by_path(spec, lambda x: is_single_spec(x) or isinstance(x, nnx.Variable))
        return StateSharding(
            (nnx.filterlib.PathIn(path), x.get_raw_value() if isinstance(x, nnx.Variable) else x)
            for path, x in pairs.items()
        )
    return spec


class Specs:
    """A prefix of specs as the user wrote it, hashable."""

    def __init__(self, tree: Any):
        # The place of what is not a spec in it, the value, and a suggestion.
        self.invalid = list(_invalid_leaves(tree, ()))
        leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_spec)
        leaves = list(map(_normalized, leaves))
        self.tree = jax.tree_util.tree_unflatten(treedef, leaves)
        self.rules: tuple[Any, ...] = tuple(
            StateSharding(x) if isinstance(x, nnx.State) else x for x in leaves
        )
        self._key = (self.rules, treedef)
        filtered = [x for x in self.rules if isinstance(x, StateSharding)]
        # The same, with those inside a `StateSharding` instead of that.
        self.written: tuple[Any, ...] = tuple(
            part
            for spec in self.rules
            for part in (spec.shardings if isinstance(spec, StateSharding) else (spec,))
        )
        # Whether shapes and dtypes matter, to a user's predicate.
        self.depend_on_values = any(x.depends_on_values for x in filtered)
        self.has_partition_spec = any(isinstance(s, PartitionSpec) for s in self.written)
        # Whether arguments, or parts of them, can have None.
        self.may_hold_none = self.tree is not None and None in leaves

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Specs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.tree)


def _invalid_leaves(tree: object, path: Path) -> Iterator[tuple[str, Any, str]]:
    if is_spec(tree):
        return
    meant = suggested_spec(tree) if path or not isinstance(tree, tuple | list) else ""
    parts, treedef = _one_level(tree)
    if meant or is_leaf_treedef(treedef):
        yield accessor("", path), tree, meant
        return
    for key, part in parts:
        yield from _invalid_leaves(part, (*path, *map(path_key, key)))


def _one_level(tree: object) -> tuple[list[tuple[Any, Any]], PyTreeDef]:
    """Returns the children of a pytree with their key paths."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)


def check_specs(name: str, kinds: Any = object, **options: Specs) -> None:
    """Raises a ``TypeError`` if a leaf of a prefix is no spec, or one of other types than these."""
    lines = []
    for option, specs in options.items():
        lines += [f"  {option}{place}: {show(x)}{meant}" for place, x, meant in specs.invalid]
        others = (x for x in specs.written if x is not None and not isinstance(x, kinds))
        lines += [f"  {option}: {show(x)}; write its PartitionSpec" for x in others]
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
    """Splits the dynamic arguments of a call, in the order of the structure's root."""
    assert isinstance(structure.root, Container)
    children = iter(structure.root.children)
    keywords = sorted(tree[1])
    values = [*tree[0], *(tree[1][k] for k in keywords)]
    prefixes = [*specs[0], *(specs[1][k] for k in keywords)]
    # ``**kwargs`` may have the name of a positional-only parameter.
    labels = [*names, *(f"kwargs[{k!r}]" if k in names else k for k in keywords)]
    return [
        split_argument(name, prefix, value, _take(value, children), caller)
        for name, prefix, value in zip(labels, prefixes, values, strict=True)
    ]


def _take(value: object, children: Iterator[Child]) -> Child:
    """Takes the next children of the root as the child for one argument."""
    if _compat.is_graph_object(value):
        return next(children)
    treedef: PyTreeDef = jax.tree_util.tree_structure(value, is_leaf=_compat.is_graph_object)
    parts = tuple(next(children) for _ in range(treedef.num_leaves))
    return parts[0] if is_leaf_treedef(treedef) else Container(treedef, parts)


def split_argument(
    name: str, prefix: object, value: object, child: Child, caller: str = ""
) -> Argument:
    """Splits a pytree into parts, and broadcasts a prefix of specs over them.

    ``child`` is where the pytree is in the structure, ``caller`` the function and the option that
    the specs are from, in messages.
    """
    if isinstance(child, Container):
        keys, children = container_keys(child.treedef), child.children
    else:
        keys, children = ((),), (child,)
    if is_single_spec(prefix) or isinstance(prefix, StateSharding):
        specs = [(prefix, 0)] * len(children)  # some pytrees cannot be rebuilt without arrays
    else:
        skeleton = child.treedef.unflatten(range(len(keys))) if isinstance(child, Container) else 0
        try:
            specs = list(_broadcast(prefix, skeleton, 0))
        except ValueError:
            mismatches = [f"  {name}{x}: {why}" for x, why in _mismatches(prefix, skeleton, ())]
            if not mismatches:
                raise
            head = (
                "these specs are not a tree prefix of the value (modules and Variables are leaves):"
            )
            head = f"{caller}: {head}" if caller else head
            raise see(ValueError(message(head, mismatches)), anchor="not-a-tree-prefix") from None
    return Argument(
        name,
        tuple(
            Part(path, path[depth:], spec, part)
            for path, part, (spec, depth) in zip(keys, children, specs, strict=True)
        ),
    )


def _broadcast(prefix: Any, full: Any, depth: int) -> Iterator[tuple[Any, int]]:
    """Yields the spec of each leaf of ``full``, and the number of keys that lead to the spec."""
    if isinstance(prefix, dict) and (
        isinstance(full, nnx.State) or jax.tree_util.all_leaves([full])
    ):
        prefix = nnx.State(prefix)
    over_module = isinstance(prefix, nnx.State) and not isinstance(full, nnx.State)
    if is_single_spec(prefix) or isinstance(prefix, StateSharding) or over_module:
        spec = StateSharding(prefix) if over_module else prefix
        yield from [(spec, depth)] * len(jax.tree_util.tree_leaves(full))
        return
    parts, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=lambda x: x is not prefix)
    if is_leaf_treedef(treedef):
        raise ValueError(f"expected a sharding spec, got {prefix!r}")
    subtrees: list[Any] = treedef.flatten_up_to(full)  # type: ignore[attr-defined]
    for part, below in zip(parts, subtrees, strict=True):
        yield from _broadcast(part, below, depth + 1)


def _mismatches(prefix: object, full: object, path: Path) -> Iterator[tuple[str, str]]:
    """Yields where a prefix does not match the tree, and why."""
    if is_spec(prefix):
        return
    place = accessor("", path)
    specs, values = (_children(tree) for tree in (prefix, full))
    if type(prefix) is not type(full) or not values:
        kind = type(full).__name__ if values else "module, Variable or array"
        yield place, f"the specs are a {type(prefix).__name__}, the value is a {kind}"
        return
    if isinstance(prefix, tuple | list) and len(specs) != len(values):
        yield place, f"{len(specs)} specs for {len(values)} values"
        return
    missing = [key for key in values if key not in specs]
    if missing:
        yield place, f"no spec for {', '.join(map(repr, missing))}"
    for key in specs:
        if key in values:
            yield from _mismatches(specs[key], values[key], (*path, key))
        else:
            yield place, f"unknown key {key!r}{suggestion(key, missing or values)}"


def _children(tree: object) -> dict[Any, Any]:
    """Returns the children of one level of a pytree by their keys."""
    parts, treedef = _one_level(tree)
    return {} if is_leaf_treedef(treedef) else {path_key(path[0]): part for path, part in parts}


# What is static where its spec is None, as in `jax.shard_map`.
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def with_static_values(
    specs: object,
    option: str,
    parameters: Parameters,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Signature, tuple[Any, ...], dict[str, Any]]:
    """Makes arguments static that are no arrays and whose spec is None, as `jax.shard_map` does.

    Args:
      specs: those of the arguments, as the user wrote them.
      option: their name in messages.
      parameters: of the function.
      signature: the roles of the arguments.
      args: the positional arguments.
      kwargs: those by keyword.

    Returns:
      The signature, with more static arguments, and the arguments, in which leaves of pytrees that
      are static for the same reason are ``Static`` values.
    """
    # An argument without a spec may be a different number at each call, so it stays dynamic.
    positional, named = align_specs(specs, parameters, signature, option, default=PartitionSpec())
    spec_of: dict[Any, Any] = {**dict(zip(signature.dynamic, positional, strict=True)), **named}
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    unspecified = [key for key, spec in spec_of.items() if spec is None]
    plain = {key for key in unspecified if isinstance(values[key], PLAIN)}
    signature = signature._replace(static=signature.static | plain)
    for key in spec_of.keys() - plain:
        values[key] = _with_static_leaves(spec_of[key], values[key])
    args = tuple(values[i] for i in range(len(args)))
    return signature, args, {name: values[name] for name in kwargs}


def _with_static_leaves(spec: Any, value: object) -> Any:
    """Returns a pytree in which non-arrays are marked as static where a prefix of specs is None."""
    if spec is None:
        return jax.tree_util.tree_map(_static_unless_array, value, is_leaf=_compat.is_graph_object)
    if is_spec(spec):
        return value
    specs, treedef = jax.tree_util.tree_flatten(spec, is_leaf=lambda x: x is not spec)
    try:
        parts: list[Any] = treedef.flatten_up_to(value)  # type: ignore[attr-defined]
    except ValueError:  # not a prefix; reported with all other problems
        return value
    return jax.tree_util.tree_unflatten(treedef, map(_with_static_leaves, specs, parts))


def _static_unless_array(x: object) -> Any:
    """Returns a leaf as it is if it is an array or an object of a graph, else as a static value."""
    is_array = _compat.is_graph_object(x) or (not isinstance(x, PLAIN) and _compat.is_array_like(x))
    return x if is_array else Static.of(x)
