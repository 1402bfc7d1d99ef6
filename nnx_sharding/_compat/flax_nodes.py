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

from .jax_names import private_name

_GRAPH_NODE_TYPES: dict[type, Any] = graphlib.GRAPH_REGISTRY

# The attributes in which a Pytree keeps which of its attributes are data, and its trace.
STATUSES = "_pytree__nodes"
STATE = "_pytree__state"
# The attribute with the Variables in which `nnx.capture` collects.
CAPTURES = "__captures__"


class NodeItems(NamedTuple):
    """The attributes of a node in their canonical order.

    Nodes that were read with the same ``forms`` and differ only in values share ``keys``.
    """

    keys: tuple[Any, ...]
    values: Sequence[Any]
    is_data: tuple[bool | None, ...]  # None if it depends on the value
    metadata: Any  # hashable; everything else about the node


class _Form(NamedTuple):
    """The attributes of the nodes of one type that have the same names and data."""

    keys: tuple[str, ...]
    is_data: tuple[bool | None, ...]
    statuses: Any  # which of the attributes are data, from the first node
    position: int | None  # of the statuses among the attributes, if equal in all these nodes


def node_items(node: Any, forms: dict[Any, Any], *, tracing: bool) -> NodeItems:
    """The attributes of a node; ``tracing`` says whether JAX is tracing.

    Every array among them is data, even if ``nnx.eval_shape`` left a tracer in its place.
    """
    if tracing:
        _adopt_tracers(node)
        return _own_items(node, forms)
    items = _own_items(node, forms)
    left = [i for i, x in enumerate(items.values) if isinstance(x, jax.core.Tracer)]
    return _abstracted(items, left) if left else items


def _own_items(node: Any, forms: dict[Any, Any]) -> NodeItems:
    node_type = type(node)
    if _has_plain_items(node_type):
        # The same as the general code below, several times as fast for these types.
        own, statuses = vars(node), getattr(node, STATUSES, {})
        is_data: dict[str, bool] = getattr(statuses, "_mapping", statuses)
        key = (node_type, *own, None, *is_data, *map(id, is_data.values()))
        form = forms.get(key)
        if form is None:
            form = forms[key] = _form(node_type, own, statuses, is_data)
        values = [*map(own.__getitem__, form.keys)]
        if form.position is not None:
            values[form.position] = form.statuses
        return NodeItems(form.keys, values, form.is_data, node_type)
    impl = graphlib.get_node_impl(node)
    assert impl is not None
    items, metadata = impl.flatten(node)
    marks = {graphlib.DataElem: True, graphlib.StaticElem: False}
    pairs = [*items]
    return NodeItems(
        tuple(key for key, _ in pairs),
        [_untagged(x.value if type(x) in marks else x) for _, x in pairs],
        tuple(marks.get(type(x)) for _, x in pairs),
        metadata,
    )


def _form(node_type: type, own: dict[str, Any], statuses: Any, is_data: dict[str, bool]) -> _Form:
    keys = tuple(sorted(own))
    if not is_pytree_type(node_type):
        return _Form(keys, (None,) * len(keys), statuses, None)
    statuses = _untagged(statuses)
    is_plain = type(statuses) is HashableMapping and {bool}.issuperset(map(type, is_data.values()))
    position = keys.index(STATUSES) if is_plain and STATUSES in own else None
    return _Form(keys, tuple(is_data.get(key, False) for key in keys), statuses, position)


class _Tagged(HashableMapping[Any, Any]):
    """The statuses of a node with a tag, which Flax copies along with the node.

    Equal to the same statuses without a tag, so that graphs have the same structure, but not to
    those with another tag, for which JAX must not use the same trace.
    """

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
    if is_plain_pytree(node) and is_statuses(statuses := vars(node).get(STATUSES)):
        object.__setattr__(node, STATUSES, _Tagged(statuses._mapping, tag))


def tag_of(node: Any) -> Any:
    """What :func:`tag_node` attached to a node, or to the one that Flax made it from."""
    return getattr(vars(node).get(STATUSES), "tag", None)


def is_statuses(x: Any) -> bool:
    """Whether ``x`` may be the statuses of a node, which say which attributes are data."""
    return type(x) is HashableMapping


def are_same_statuses(a: Any, b: Any) -> bool:
    """Whether two objects are statuses with the same data attributes."""
    if not is_statuses(a) or not is_statuses(b):
        return False
    return bool(a._mapping == b._mapping) and all(
        {bool}.issuperset(map(type, x._mapping.values())) for x in (a, b)
    )


def _abstracted(items: NodeItems, left: Sequence[int]) -> NodeItems:
    """The items, with tracers of ended traces replaced by their shapes, as data."""
    values, is_data = list(items.values), list(items.is_data)
    marks = {}
    for index in left:
        if isinstance(values[index], jax.Array):  # not a jax.Ref
            values[index] = _shape_of(values[index])
            if is_data[index] is False:
                is_data[index] = marks[str(items.keys[index])] = True
    if marks:
        position = items.keys.index(STATUSES)
        values[position] = values[position].update(marks)
    # A new tuple of keys, not the form's: nodes of this form are not alike.
    return NodeItems((*items.keys,), values, tuple(is_data), items.metadata)


def _shape_of(tracer: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of a tracer, as from ``jax.eval_shape``."""
    aval = jax.typeof(tracer)
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _has_plain_items(node_type: type) -> bool:
    return nnx.Pytree in node_type.__mro__ and not getattr(node_type, "_pytree__has_int_keys", True)


def mapping_items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """The items of one of Flax's hashable mappings, without its slow iterator."""
    return getattr(mapping, "_mapping", mapping).items()  # type: ignore[no-any-return]


def _adopt_tracers(node: Any) -> None:
    """Marks traced arrays in attributes as data, as Flax does for concrete arrays.

    ``nnx.is_data`` does not recognise tracers, so Flax would keep them as static attributes,
    and they would leak out of the trace.
    """
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
    return _GRAPH_NODE_TYPES[node_type].create_empty(metadata)


def fill_node(node: Any, attributes: Iterable[tuple[Any, Any]]) -> None:
    """Gives a new, empty node its attributes."""
    _GRAPH_NODE_TYPES[type(node)].init(node, attributes)


def node_operations(
    node: Any,
    changed: Sequence[tuple[Any, Any]],
    removed: Sequence[Any],
    attributes: Callable[[], list[tuple[Any, Any]]],
) -> list[tuple[Any, ...]]:
    """The operations that change some attributes of an existing node: functions with arguments.

    ``attributes`` makes the complete list, for node types that can only be rewritten as one.
    """
    if not isinstance(node, nnx.Pytree):
        impl = _GRAPH_NODE_TYPES[type(node)]
        return [(impl.clear, node), (impl.init, node, attributes())]
    own = vars(node)
    operations: list[tuple[Any, ...]] = [(dict.pop, own, str(key), None) for key in removed]
    new = {str(key): value for key, value in changed if key != STATE}  # belongs to the object
    left = [key for key in new if isinstance(own.get(key), jax.core.Tracer)]
    if left and STATUSES in own:  # see `node_items`
        new.setdefault(STATUSES, own[STATUSES].update(dict.fromkeys(left, True)))
    return [*operations, (dict.update, own, new)]
