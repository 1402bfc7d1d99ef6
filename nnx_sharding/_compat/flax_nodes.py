"""Nodes of Flax: their attributes, and which of them are data."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx import graphlib, pytreelib
from flax.typing import HashableMapping as HashableMapping

from .jax_names import identity, private_name

GRAPH_NODE_TYPES: dict[type, Any] = graphlib.GRAPH_REGISTRY

# The attributes in which a Pytree keeps which of its attributes are data, and its trace.
STATUSES = "_pytree__nodes"
STATE = "_pytree__state"
# The attribute with the Variables in which `nnx.capture` collects.
CAPTURES = "__captures__"


class NodeForm(NamedTuple):
    """What nodes of one type have in common that have the same names and data."""

    keys: tuple[Any, ...]  # of the attributes, in their canonical order
    is_data: tuple[bool | None, ...]  # by key; None if it depends on the value
    is_static: tuple[bool, ...]  # by key
    others: tuple[int, ...]  # the positions of all keys that are not static
    metadata: Any  # hashable; everything else about the nodes
    names: tuple[str, ...]  # of the attributes, in the order of the ``__dict__``
    order: tuple[int, ...]  # by key: the position among the names
    statuses: Any = None  # which of the attributes are data, if equal in all these nodes

    @classmethod
    def of(cls, keys: tuple[Any, ...], is_data: tuple[bool | None, ...], *rest: Any) -> NodeForm:
        """The form of nodes with these attributes."""
        is_static = tuple(x is False for x in is_data)
        others = tuple(i for i, static in enumerate(is_static) if not static)
        return cls(keys, is_data, is_static, others, *rest)


class NodeItems(NamedTuple):
    """The attributes of a node."""

    form: NodeForm
    values: Sequence[Any]  # by key
    own: Sequence[Any] | None  # as they are in the ``__dict__``; None if that has others


def node_items(node: Any, forms: dict[Any, NodeForm], *, tracing: bool) -> NodeItems:
    """The attributes of a node; what is read with the same ``forms`` shares them."""
    if tracing:
        _adopt_tracers(node)
        return _own_items(node, forms)
    items = _own_items(node, forms)
    # Not each value by itself: an isinstance with Tracer takes a third of a microsecond.
    if not any(issubclass(x, jax.core.Tracer) for x in {*map(type, items.values)} - _NO_TRACERS):
        return items
    left = [i for i, x in enumerate(items.values) if isinstance(x, jax.core.Tracer)]
    return _abstracted(items, left)


_NO_TRACERS = frozenset(
    {str, int, float, bool, type(None), types.FunctionType, HashableMapping, pytreelib.PytreeState}
)


def _own_items(node: Any, forms: dict[Any, NodeForm]) -> NodeItems:
    has_own = is_plain_pytree(node)
    own, statuses = get_dict(node) if has_own else {}, _untagged(getattr(node, STATUSES, {}))
    is_data: dict[str, Any] = getattr(statuses, "_mapping", statuses)
    names, in_own = (*own,), [*own.values()]
    key = (type(node), *names, None, *is_data, *map(identity, is_data.values()))
    form = (forms.get(key) or _FORMS.get(key)) if has_own else None
    if form is not None:  # many times as fast as Flax
        values = [*map(in_own.__getitem__, form.order)]
        if form.statuses is not None:
            values[form.keys.index(STATUSES)] = form.statuses
        return NodeItems(form, values, in_own)
    items, metadata = graphlib.get_node_impl(node).flatten(node)  # type: ignore[union-attr]
    marks = {graphlib.DataElem: True, graphlib.StaticElem: False}
    pairs = [*items]
    keys = tuple(key for key, _ in pairs)
    values = [_untagged(x.value if type(x) in marks else x) for _, x in pairs]
    places = {name: place for place, name in enumerate(names)}
    order = tuple(places.get(str(key[0] if type(key) is tuple else key), -1) for key in keys)
    is_same = (
        has_own
        and sorted(order) == [*range(len(names))]
        and all(
            _untagged(in_own[place]) == value if keys[i] == STATUSES else in_own[place] is value
            for i, (place, value) in enumerate(zip(order, values, strict=True))
        )
    )
    is_plain = type(statuses) is HashableMapping and {bool}.issuperset(map(type, is_data.values()))
    shared = statuses if is_plain and STATUSES in keys else None
    is_data_of = tuple(marks.get(type(x)) for _, x in pairs)
    if not is_same:
        order = tuple(range(len(keys)))
    form = NodeForm.of(keys, is_data_of, metadata, names, order, shared)
    if is_same:
        (_FORMS if is_plain and len(_FORMS) < _MAX_FORMS else forms)[key] = form
    return NodeItems(form, values, in_own if is_same else None)


# Forms that hold nothing but names and flags. Flax keeps the classes of all nodes, too.
_FORMS: dict[Any, NodeForm] = {}
_MAX_FORMS = 4096


class _Tagged(HashableMapping[Any, Any]):
    """The statuses of a node with a tag: equal to those without one, not to another tag."""

    def __init__(self, mapping: Any, tag: Any):
        super().__init__(mapping, copy=False)
        self.tag = tag

    def __eq__(self, other: object) -> bool:
        same = not isinstance(other, _Tagged) or self.tag == other.tag
        return same and bool(super().__eq__(other))

    __hash__ = HashableMapping.__hash__

    def update(self, other: Any) -> _Tagged:
        return _Tagged(super().update(other)._mapping, self.tag)


def _untagged(x: Any) -> Any:
    """Statuses as they were before :func:`tag_node`; any other value unchanged."""
    return HashableMapping(x._mapping, copy=False) if type(x) is _Tagged else x


def tag_node(node: Any, tag: Any) -> None:
    """Attaches a tag to a node of the current trace, for :func:`tag_of`."""
    statuses = vars(node).get(STATUSES)
    if is_plain_pytree(node) and type(statuses) is HashableMapping:
        object.__setattr__(node, STATUSES, _Tagged(statuses._mapping, tag))


def tag_of(node: Any) -> Any:
    """What :func:`tag_node` attached to a node, or to the one that Flax made it from."""
    return getattr(vars(node).get(STATUSES), "tag", None)


def _abstracted(items: NodeItems, left: Sequence[int]) -> NodeItems:
    """The items, with tracers of ended traces replaced by their shapes, as data."""
    form, values, is_data = items.form, list(items.values), list(items.form.is_data)
    marks = {}
    for index in left:
        if isinstance(values[index], jax.Array):  # not a jax.Ref
            values[index] = _shape_of(values[index])
            if is_data[index] is False:
                is_data[index] = marks[str(form.keys[index])] = True
    if marks:
        position = form.keys.index(STATUSES)
        values[position] = values[position].update(marks)
    return NodeItems(NodeForm.of(form.keys, tuple(is_data), *form[4:]), values, None)


def _shape_of(tracer: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of a tracer, as from ``jax.eval_shape``."""
    aval = jax.typeof(tracer)
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def mapping_items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """The items of one of Flax's hashable mappings, without its slow iterator."""
    return getattr(mapping, "_mapping", mapping).items()  # type: ignore[no-any-return]


def _adopt_tracers(node: Any) -> None:
    """Marks traced arrays in attributes as data, or Flax would keep and leak them as static."""
    statuses = getattr(node, STATUSES, None)
    if statuses is None or not is_pytree_type(type(node)):
        return
    missed = {
        name: True
        for name, value in vars(node).items()
        if isinstance(value, jax.core.Tracer) and not statuses.get(name, False)
    }
    if missed:
        object.__setattr__(node, STATUSES, statuses.update(missed))


def is_plain_pytree(node: Any) -> bool:
    """Whether all content of a node is in its ``__dict__``, and nothing hides that."""
    kind = type(node)
    is_plain = _HAS_PLAIN_DICT.get(kind)
    if is_plain is None:
        own = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), 0)
        is_plain = nnx.Pytree in kind.__mro__ and isinstance(own, types.GetSetDescriptorType)
        _HAS_PLAIN_DICT[kind] = is_plain
    return is_plain and vars(node) is get_dict(node)


_HAS_PLAIN_DICT: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def get_dict(node: Any) -> dict[str, Any]:
    """The ``__dict__`` of a node, past any ``__getattribute__`` of its class."""
    own: dict[str, Any] = object.__getattribute__(node, "__dict__")
    return own


def is_pytree_type(node_type: type) -> bool:
    """Whether JAX itself can flatten this node type (``nnx.Pytree`` with ``pytree=True``)."""
    return bool(getattr(node_type, "_pytree__is_pytree", True))


# The state of a Pytree while it is set up: a pytree without leaves, but not constant.
initializing: Any = private_name("flax.nnx.pytreelib", "PytreeState._initializing")
is_setup: Any = private_name("flax.nnx.pytreelib", "PytreeState._is_setup")


def node_flags_of(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """The flags of the node state among some attributes."""
    state = attributes.get(STATE)
    return node_flags(state) if is_node_state(state) else ()


new_node_state: Callable[..., Any] = pytreelib.PytreeState


def is_node_state(x: Any) -> bool:
    """Whether ``x`` is Flax's state of a Pytree while it is set up."""
    return type(x) is pytreelib.PytreeState


def node_flags(state: Any) -> tuple[bool, bool]:
    """The parts of a node state that are in its treedef: arguments of ``new_node_state``."""
    return initializing.__get__(state), is_setup.__get__(state)


def new_node(node_type: type, metadata: Any) -> Any:
    """An object of ``node_type`` with no attributes yet."""
    return GRAPH_NODE_TYPES[node_type].create_empty(metadata)


def fill_node(node: Any, attributes: Iterable[tuple[Any, Any]]) -> None:
    """Gives a new, empty node its attributes."""
    GRAPH_NODE_TYPES[type(node)].init(node, attributes)


def node_operations(
    node: Any,
    changed: Sequence[tuple[Any, Any]],
    removed: Sequence[Any],
    attributes: Callable[[], list[tuple[Any, Any]]],
) -> list[tuple[Any, ...]]:
    """Functions with arguments that change a node; ``attributes`` makes all, to rewrite it."""
    if not isinstance(node, nnx.Pytree):
        impl = GRAPH_NODE_TYPES[type(node)]
        return [(impl.clear, node), (impl.init, node, attributes())]
    own = vars(node)
    operations: list[tuple[Any, ...]] = [(dict.pop, own, str(key), None) for key in removed]
    new = {str(key): value for key, value in changed if key != STATE}  # belongs to the object
    left = [key for key in new if isinstance(own.get(key), jax.core.Tracer)]
    if left and STATUSES in own:  # see `node_items`
        new.setdefault(STATUSES, own[STATUSES].update(dict.fromkeys(left, True)))
    return [*operations, (dict.update, own, new)]
