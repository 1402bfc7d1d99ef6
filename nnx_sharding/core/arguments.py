"""Splits arguments and outputs into parts by prefix pytrees of specs: each part has one spec.

A *prefix* is a pytree of specs that may end earlier than the argument that it is for
(``prefixes.py``): one spec is then for all leaves below. A *part* is a module, a Variable or an
array, and has one spec. A module in an argument is a leaf of the argument's pytree, and the filters
of a ``StateSharding`` choose a spec for each Variable in the module. The *structure* is the table
that describes all objects of a call (``structure.py``). A *child* describes one part: it is the
index of an object, ``LEAF`` for an array, or for a pytree a ``Container`` with one child for each
leaf.

    is_single_spec     whether an object is one spec or None, and not a pytree of specs
    is_spec            whether an object is a leaf of a prefix: a single spec, or an object with
                       specs for all Variables of a module, such as a ``StateSharding``
    one_level          the children of a pytree as pairs of a path of one key and a child, and the
                       treedef
    container_keys     the path of each leaf of a pytree: ``{"a": [*, *]}`` has ``("a", 0)`` and
                       ``("a", 1)``
    is_leaf_treedef    whether a treedef is that of a single leaf
    accessor           the expression for a path: ``models[0].kernel``
    suggestion         "; did you mean 'x'?" if a name is close to one of others, else ""
    see                adds a reference to docs/errors.md to an error, and returns the error
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

    keys: Path  # the path from the argument to the part
    below: Path  # the end of this path, from the leaf of the prefix that is the spec
    spec: Any  # the spec, as the user wrote it
    child: Child  # the child that describes the part in the structure


class Argument(NamedTuple):
    """One argument or output: its name in messages, and its parts."""

    name: str
    parts: tuple[ArgumentPart, ...]

    def objects_only(self) -> Argument:
        """Returns the argument without its bare arrays, which a function cannot change in place."""
        # The child of an object is its index.
        objects = tuple(part for part in self.parts if isinstance(part.child, int))
        return Argument(self.name, objects)


def named_parts(arguments: Iterable[Argument]) -> list[tuple[str, Child]]:
    """Returns all parts of some arguments as pairs of an expression and a child.

    An expression is ``models[0]``, for example.
    """
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
      specs: the user's prefix of specs for each argument, in the same form.
      names: the names of the positional arguments.
      caller: the function and the option with the specs, in messages.
    """
    assert isinstance(structure.root, Container)
    (args, kwargs), (specs_by_position, specs_by_name) = tree, specs
    keywords = sorted(kwargs)  # JAX flattens a dict in this order
    values = [*args, *(kwargs[key] for key in keywords)]
    prefixes = [*specs_by_position, *(specs_by_name[key] for key in keywords)]
    # A keyword in ``**kwargs`` may be the name of a positional-only parameter. It gets another name
    # in messages, so that names are unique.
    keyword_names = [f"kwargs[{key!r}]" if key in names else key for key in keywords]
    arguments = []
    remaining = iter(structure.root.children)  # each argument takes the children for its leaves
    for name, prefix, value in zip([*names, *keyword_names], prefixes, values, strict=True):
        child = _take_child(value, remaining)
        arguments.append(split_argument(name, prefix, child, caller))
    return arguments


def _take_child(value: object, children: Iterator[Child]) -> Child:
    """Takes the children for the leaves of an argument; returns one child for the argument.

    Args:
      children: the children for the leaves of this and all later arguments, one after the other.
    """
    if _compat.is_graph_object(value):  # a leaf here, but JAX would flatten a module further
        return next(children)
    treedef: PyTreeDef = jax.tree_util.tree_structure(value, is_leaf=_compat.is_graph_object)
    leaf_children = tuple(next(children) for _ in range(treedef.num_leaves))
    return leaf_children[0] if is_leaf_treedef(treedef) else Container(treedef, leaf_children)


def split_argument(name: str, prefix: object, child: Child, caller: str = "") -> Argument:
    """Splits a pytree into its leaves (modules, Variables, arrays), each with its spec.

    Args:
      name: the name of the argument or output, in messages.
      prefix: the user's specs, as a prefix of the pytree.
      child: the child that describes the pytree in the structure.
      caller: the function and the option with the specs, in messages.

    Raises:
      ValueError: the specs are no prefix of the pytree.
    """
    paths: Sequence[Path] = ((),)  # from the argument to each leaf; () if it is itself the leaf
    leaves: Sequence[Child] = (child,)
    if isinstance(child, Container):
        paths, leaves = container_keys(child.treedef), child.children
    if is_single_spec(prefix) or isinstance(prefix, StateSharding):
        # One spec is for all leaves. `_broadcast` is not used, because some pytrees cannot be
        # rebuilt without arrays.
        specs = [_SpecAt(prefix, depth=0)] * len(leaves)
    else:
        # The skeleton is the pytree with a number instead of each module, Variable and array.
        skeleton: Any = 0
        if isinstance(child, Container):
            skeleton = child.treedef.unflatten(range(len(leaves)))
        specs = _broadcast_or_raise(prefix, skeleton, name, caller)
    parts = []
    for path, leaf, spec_at in zip(paths, leaves, specs, strict=True):
        # The first ``depth`` keys of a path lead to the spec in the prefix. The filters of the spec
        # see only the rest of the path: in a tuple with a StateSharding for each module, they do
        # not see the position in the tuple.
        below = path[spec_at.depth :]
        parts.append(ArgumentPart(keys=path, below=below, spec=spec_at.spec, child=leaf))
    return Argument(name, tuple(parts))


class _SpecAt(NamedTuple):
    """The spec for one leaf of a pytree."""

    spec: Any  # a spec or a StateSharding, as the user wrote it
    depth: int  # the number of keys that lead to the spec in the prefix


def _broadcast_or_raise(prefix: Any, skeleton: Any, name: str, caller: str) -> list[_SpecAt]:
    """Returns the spec of each leaf of an argument; a ``ValueError`` lists all mismatches.

    Args:
      skeleton: the argument, with numbers instead of modules, Variables and arrays.
      caller: the function and the option with the specs, in messages.
    """
    try:
        return list(_broadcast(prefix, skeleton, 0))
    except ValueError:
        mismatches = [f"  {line}" for line in _mismatches(prefix, skeleton, name)]
        if not mismatches:  # the error of `_broadcast` is the best explanation
            raise
        head = "these specs are not a tree prefix of the value (modules and Variables are leaves):"
        head = f"{caller}: {head}" if caller else head
        remedy = (
            "Write one spec for a whole value, or a container of the same type with a spec for "
            "each item."
        )
        error = ValueError(message(head, mismatches, remedy))
        raise see(error, anchor="not-a-tree-prefix") from None


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
    # ``specs`` is a container, so the value has to be one: otherwise `flatten_up_to` raises. Only
    # one level is opened, because everything but ``specs`` itself counts as a leaf.
    parts, treedef = jax.tree_util.tree_flatten(specs, is_leaf=lambda x: x is not specs)
    if is_leaf_treedef(treedef):
        raise ValueError(f"expected a sharding spec, got {show(specs)}")
    subtrees: list[Any] = treedef.flatten_up_to(full)  # type: ignore[attr-defined]
    for part, subtree in zip(parts, subtrees, strict=True):
        yield from _broadcast(part, subtree, depth + 1)


def _with_state_by_path(prefix: Any, full: Any) -> Any:
    """Returns the user's specs; an ``nnx.State`` or dict is converted to the form that fits.

    Such specs by path become a ``StateSharding`` for a module, and an ``nnx.State`` for a State.
    Other specs are returned unchanged.

    Args:
      prefix: the specs for one part of a pytree.
      full: the same part of the value; its leaves stand for modules, Variables and arrays.
    """
    full_is_leaf = jax.tree_util.all_leaves([full])
    # nnx.get_named_sharding, or a tree.map over Variables, returns Variables that hold specs.
    if isinstance(prefix, nnx.Variable) and full_is_leaf:
        prefix = _compat.get_value(prefix)
    # A dict for a State, or for a module, has specs by path, as a State does. A dict for a dict is
    # left alone, because it has a spec for each key.
    if isinstance(prefix, dict) and (isinstance(full, nnx.State) or full_is_leaf):
        prefix = nnx.State(prefix)
    # If ``full`` is no State, the paths of the specs are filters for the Variables below.
    if isinstance(prefix, nnx.State) and not isinstance(full, nnx.State):
        return StateSharding(prefix)
    return prefix


def _mismatches(prefix: object, full: object, place: str) -> Iterator[str]:
    """Yields a line for each mismatch of specs and a pytree, such as ``batch: no spec for 'y'``.

    Args:
      full: the pytree; its leaves stand for modules, Variables and arrays.
      place: the expression for the pytree, such as ``batch["x"]``.
    """
    if is_spec(prefix):  # one spec is for all leaves of ``full``
        return
    # The keys are indices in a tuple, names of attributes, and so on.
    specs = _children(prefix)
    values = _children(full)  # empty if ``full`` is a leaf
    # The children of containers of different types cannot be compared.
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
    """Returns the children of a pytree, one level deep, by their keys; {} for a leaf."""
    parts, treedef = one_level(tree)  # ``parts`` has pairs of a path of one key and a child
    return {} if is_leaf_treedef(treedef) else {path_key(path[0]): part for path, part in parts}
