"""Prefix pytrees of specs → the parts of arguments and outputs, each with its spec.

A *prefix* is a pytree of specs that may end earlier than the argument that it is for
(``prefixes.py``): one spec is for all that is below. A *part* is what has one spec: a module,
a Variable or an array. A module in an argument is a leaf of its pytree; the filters of a
``StateSharding`` choose a spec for each Variable in it. The *structure* is the table that describes
all objects of a call (``structure.py``); a *child* is what it says of a part: the index of an
object, or ``LEAF`` for an array, or of a pytree a ``Container`` with one child for each leaf.

    is_single_spec     whether something is one spec, or None, not a pytree of specs
    container_keys     the path of each leaf of a pytree: ``{"a": [*, *]}`` has ``("a", 0)`` and
                       ``("a", 1)``
    is_leaf_treedef    whether a treedef is that of a single leaf
    accessor           the expression for a path: ``models[0].kernel``
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from .. import _compat
from ..errors import message, see
from ..specs.fitting import show, suggestion
from ..specs.paths import Path, accessor, path_key
from ..specs.state_sharding import StateSharding, is_single_spec
from .prefixes import is_spec, one_level
from .signature import ArgTree
from .structure import Child, Container, Structure
from .treedefs import PyTreeDef, container_keys, is_leaf_treedef


class ArgumentPart(NamedTuple):
    """One graph object or array inside an argument or output."""

    keys: Path  # the path from the argument to it
    below: Path  # the end of this path, from the leaf of the prefix that is its spec
    spec: Any  # its spec, as the user wrote it
    child: Child  # where it is in the structure


class Argument(NamedTuple):
    """One argument or output: its name in messages, and its parts."""

    name: str
    parts: tuple[ArgumentPart, ...]

    def objects_only(self) -> Argument:
        """Returns the argument without arrays, which a function cannot change in place."""
        objects = tuple(part for part in self.parts if isinstance(part.child, int))  # an index
        return Argument(self.name, objects)


def named_parts(arguments: Iterable[Argument]) -> list[tuple[str, Child]]:
    """Returns all parts of some arguments, each after its expression, such as ``models[0]``."""
    pairs = ((argument, part) for argument in arguments for part in argument.parts)
    return [(accessor(argument.name, part.keys), part.child) for argument, part in pairs]


def split_arguments(
    structure: Structure, tree: ArgTree, specs: ArgTree, names: Sequence[str], caller: str = ""
) -> list[Argument]:
    """Splits each dynamic argument of a call into the parts that have a spec of their own.

    Args:
      structure: describes the arguments. The children of its root are the leaves of all of them,
        in the order of the result.
      tree: the values of the arguments: ``(positional, by keyword)``.
      specs: the user's prefix of specs for each, in the same form.
      names: the names of the positional arguments.
      caller: the function and the option that the specs are from, in messages.
    """
    assert isinstance(structure.root, Container)
    (args, kwargs), (specs_by_position, specs_by_name) = tree, specs
    keywords = sorted(kwargs)  # the order of their leaves, as JAX flattens a dict
    values = [*args, *(kwargs[key] for key in keywords)]
    prefixes = [*specs_by_position, *(specs_by_name[key] for key in keywords)]
    # In messages, each has a name of its own: a keyword in ``**kwargs`` may be that of a
    # positional-only parameter.
    keyword_names = [f"kwargs[{key!r}]" if key in names else key for key in keywords]
    arguments = []
    remaining = iter(structure.root.children)  # each argument takes the children for its leaves
    for name, prefix, value in zip([*names, *keyword_names], prefixes, values, strict=True):
        child = _take_child(value, remaining)
        arguments.append(split_argument(name, prefix, value, child, caller))
    return arguments


def _take_child(value: object, children: Iterator[Child]) -> Child:
    """Takes the children for the leaves of an argument, and returns one that describes it all.

    Args:
      value: the argument.
      children: those for the leaves of this and all later arguments, one after the other.
    """
    if _compat.is_graph_object(value):  # a leaf, which JAX would flatten further
        return next(children)
    treedef: PyTreeDef = jax.tree_util.tree_structure(value, is_leaf=_compat.is_graph_object)
    own_children = tuple(next(children) for _ in range(treedef.num_leaves))
    return own_children[0] if is_leaf_treedef(treedef) else Container(treedef, own_children)


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
    paths: Sequence[Path] = ((),)  # from the argument to its leaves; here to itself
    leaves: Sequence[Child] = (child,)
    if isinstance(child, Container):
        paths, leaves = container_keys(child.treedef), child.children
    if is_single_spec(prefix) or isinstance(prefix, StateSharding):
        # One spec for all. Not by `_broadcast`: some pytrees cannot be rebuilt without arrays.
        specs = [_SpecAt(prefix, depth=0)] * len(leaves)
    else:
        # The pytree, with a number in place of each module, Variable and array.
        skeleton: Any = 0
        if isinstance(child, Container):
            skeleton = child.treedef.unflatten(range(len(leaves)))
        specs = _broadcast_or_raise(prefix, skeleton, name, caller)
    parts = []
    for path, leaf, spec_at in zip(paths, leaves, specs, strict=True):
        # The first ``depth`` keys of a path lead to the spec in the prefix; its filters see the
        # rest: in a tuple with a StateSharding for each module, not the position in the tuple.
        below = path[spec_at.depth :]
        parts.append(ArgumentPart(keys=path, below=below, spec=spec_at.spec, child=leaf))
    return Argument(name, tuple(parts))


class _SpecAt(NamedTuple):
    """The spec for one leaf of a pytree."""

    spec: Any  # a spec or a StateSharding, as the user wrote it
    depth: int  # the number of keys that lead to it in the prefix


def _broadcast_or_raise(prefix: Any, skeleton: Any, name: str, caller: str) -> list[_SpecAt]:
    """Returns the spec of each leaf of an argument; a ``ValueError`` lists all mismatches.

    Args:
      prefix: the user's specs for the argument.
      skeleton: the argument, with numbers in place of modules, Variables and arrays.
      name: the name of the argument, in messages.
      caller: the function and the option that the specs are from, in messages.
    """
    try:
        return list(_broadcast(prefix, skeleton, 0))
    except ValueError:
        mismatches = [f"  {line}" for line in _mismatches(prefix, skeleton, name)]
        if not mismatches:
            raise
        head = "these specs are not a tree prefix of the value (modules and Variables are leaves):"
        head = f"{caller}: {head}" if caller else head
        raise see(ValueError(message(head, mismatches)), anchor="not-a-tree-prefix") from None


def _broadcast(prefix: Any, full: Any, depth: int) -> Iterator[_SpecAt]:
    """Yields a spec for each leaf of a pytree, in order.

    For ``{"a": P("x"), "b": None}`` and ``{"a": (0, 1), "b": 2}``, these are ``P("x")`` twice, then
    None.

    Args:
      prefix: the user's specs for this part of the pytree.
      full: this part of the pytree; its leaves stand for modules, Variables and arrays.
      depth: the number of keys that lead to this part.

    Raises:
      ValueError: the specs are no prefix of the pytree.
    """
    specs = _with_state_by_path(prefix, full)
    if is_single_spec(specs) or isinstance(specs, StateSharding):
        yield from [_SpecAt(specs, depth)] * len(jax.tree_util.tree_leaves(full))
        return
    # A container of specs, so the value has to be one, too: `flatten_up_to` raises otherwise. Only
    # its own level is opened: all but itself counts as a leaf.
    parts, treedef = jax.tree_util.tree_flatten(specs, is_leaf=lambda x: x is not specs)
    if is_leaf_treedef(treedef):
        raise ValueError(f"expected a sharding spec, got {show(specs)}")
    subtrees: list[Any] = treedef.flatten_up_to(full)  # type: ignore[attr-defined]
    for part, subtree in zip(parts, subtrees, strict=True):
        yield from _broadcast(part, subtree, depth + 1)


def _with_state_by_path(prefix: Any, full: Any) -> Any:
    """Returns the user's specs, where they are an ``nnx.State`` or dict in the form that fits.

    For a module, such specs by path become a ``StateSharding``; for a State, an ``nnx.State``.
    Others are returned unchanged.

    Args:
      prefix: the specs for one part of a pytree.
      full: this part; its leaves stand for modules, Variables and arrays.
    """
    full_is_leaf = jax.tree_util.all_leaves([full])
    # A Variable that holds a spec, as nnx.get_named_sharding or a tree.map over Variables returns.
    if isinstance(prefix, nnx.Variable) and full_is_leaf:
        prefix = _compat.get_value(prefix)
    # A dict for a State, or for a module, has specs by path, as a State does. For a dict it has one
    # for each key.
    if isinstance(prefix, dict) and (isinstance(full, nnx.State) or full_is_leaf):
        prefix = nnx.State(prefix)
    # For anything but a State, its paths are tried on the Variables below.
    if isinstance(prefix, nnx.State) and not isinstance(full, nnx.State):
        return StateSharding(prefix)
    return prefix


def _mismatches(prefix: object, full: object, place: str) -> Iterator[str]:
    """Yields a text for each mismatch of specs and a pytree, such as ``batch: no spec for 'y'``.

    Args:
      prefix: the specs.
      full: the pytree; its leaves stand for modules, Variables and arrays.
      place: the expression for the pytree, such as ``batch["x"]``.
    """
    if is_spec(prefix):  # one for all that is below
        return
    specs = _children(prefix)  # by key: the index in a tuple, the name of an attribute, and so on
    values = _children(full)  # empty for a leaf
    # Below containers of different types, nothing can be compared.
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
    """Returns the children of one level of a pytree by their keys; empty for a leaf."""
    parts, treedef = one_level(tree)  # parts: pairs of a path of one key and a child
    return {} if is_leaf_treedef(treedef) else {path_key(path[0]): part for path, part in parts}
