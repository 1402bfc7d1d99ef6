"""Nodes, Variables and modes of Flax."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
from flax import nnx
from flax.errors import TraceContextError as TraceContextError
from flax.nnx import extract, graphlib, pytreelib, variablelib
from flax.typing import HashableMapping as HashableMapping

from .jax_names import ArrayImpl, private_name

# Without this, `nnx.cached_partial` has no cache.
_graph_context: Any = private_name("flax.nnx.graphlib", "GRAPH_CONTEXT", optional=True)


# Kinds of objects

_GRAPH_NODE_TYPES: dict[type, Any] = graphlib.GRAPH_REGISTRY


def is_node(x: Any) -> bool:
    """Whether ``x`` is a module or another object registered as an NNX graph node."""
    return type(x) in _GRAPH_NODE_TYPES


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a Variable whose value lives in the Python object.

    A Variable made with ``hijax=True`` is a JAX value of its own type: to us it is a leaf.
    """
    return nnx.Variable in type(x).__mro__


def is_graph_object(x: Any) -> bool:
    """Whether ``x`` has an identity that the graph keeps: a node or a Variable."""
    return type(x) in _GRAPH_NODE_TYPES or nnx.Variable in type(x).__mro__


def is_ref(x: Any) -> bool:
    """Whether ``x`` is a ``jax.Ref``, concrete or traced."""
    return type(x) is not ArrayImpl and variablelib.is_array_ref(x)


def is_hijax_variable(x: Any) -> bool:
    """Whether ``x`` is a Variable made with ``hijax=True``, concrete or traced."""
    return type(x) is not ArrayImpl and isinstance(x, nnx.Variable) and not is_variable(x)


def prefix_state(x: Any) -> tuple[Any, Any] | None:
    """The function of (path, value) and the State in what ``nnx.prefix(..., graph=True)`` returns.

    The State has the prefix at every path. None for anything else.
    """
    return (x.prefix_fn.value, x.state) if isinstance(x, extract.TreeState) else None


# Graph nodes

# Where a Pytree keeps which of its attributes are data, and the trace that it belongs to.
STATUSES = "_pytree__nodes"
_STATE = "_pytree__state"


class NodeItems(NamedTuple):
    """The attributes of a node in their canonical order.

    Nodes that were read with the same ``forms`` and differ only in values share ``keys``.
    """

    keys: tuple[Any, ...]
    values: Sequence[Any]
    is_data: tuple[bool | None, ...]  # None where the node type leaves that to the value
    metadata: Any  # what else belongs to the node, hashable


class _Form(NamedTuple):
    """The attributes of the nodes of one type that have the same names and data."""

    keys: tuple[str, ...]
    is_data: tuple[bool | None, ...]
    statuses: Any  # which of the attributes are data, as the first node has it
    position: int | None  # of that among the attributes, if nodes of this form cannot differ in it


def node_items(node: Any, forms: dict[Any, Any], *, tracing: bool) -> NodeItems:
    """The attributes of a node; ``tracing`` is whether JAX is.

    Every array among them is data, also where ``nnx.eval_shape`` has left a tracer.
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
        # What the general way below does for these types, several times as fast.
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
        [x.value if type(x) in marks else x for _, x in pairs],
        tuple(marks.get(type(x)) for _, x in pairs),
        metadata,
    )


def _form(node_type: type, own: dict[str, Any], statuses: Any, is_data: dict[str, bool]) -> _Form:
    keys = tuple(sorted(own))
    if not is_pytree_type(node_type):
        return _Form(keys, (None,) * len(keys), statuses, None)
    if type(statuses) is _Tagged:
        statuses = HashableMapping(is_data, copy=False)
    is_plain = type(statuses) is HashableMapping and {bool}.issuperset(map(type, is_data.values()))
    position = keys.index(STATUSES) if is_plain and STATUSES in own else None
    return _Form(keys, tuple(is_data.get(key, False) for key in keys), statuses, position)


class _Tagged(HashableMapping[Any, Any]):
    """The statuses of a node with something else that goes wherever Flax takes the node.

    Equal to the same statuses without it, so that graphs have the same structure; but not to those
    with something else, for which JAX must not use the same trace.
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


def tag_node(node: Any, tag: Any) -> None:
    """Attaches something to a node of the current trace, for :func:`tag_of`."""
    if is_plain_pytree(node) and is_statuses(statuses := vars(node).get(STATUSES)):
        object.__setattr__(node, STATUSES, _Tagged(statuses._mapping, tag))


def tag_of(node: Any) -> Any:
    """What :func:`tag_node` attached to a node, or to the one that Flax made it from."""
    return getattr(vars(node).get(STATUSES), "tag", None)


def is_statuses(x: Any) -> bool:
    """Whether ``x`` may be what says which attributes of a node are data."""
    return type(x) is HashableMapping


def are_same_statuses(a: Any, b: Any) -> bool:
    """Whether two objects both say the same about which attributes are data."""
    if not is_statuses(a) or not is_statuses(b):
        return False
    return bool(a._mapping == b._mapping) and all(
        {bool}.issuperset(map(type, x._mapping.values())) for x in (a, b)
    )


def _abstracted(items: NodeItems, left: Sequence[int]) -> NodeItems:
    """The items with a shape, as data, for each array that is a tracer of an ended trace."""
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
    # Other keys than the form's: nodes of this form are not alike.
    return NodeItems((*items.keys,), values, tuple(is_data), items.metadata)


def _shape_of(tracer: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of a tracer, as ``jax.eval_shape`` has them."""
    aval = jax.typeof(tracer)
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _has_plain_items(node_type: type) -> bool:
    return nnx.Pytree in node_type.__mro__ and not getattr(node_type, "_pytree__has_int_keys", True)


def mapping_items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """The items of one of Flax's hashable mappings, without its slow iterator."""
    return getattr(mapping, "_mapping", mapping).items()  # type: ignore[no-any-return]


def _adopt_tracers(node: Any) -> None:
    """Marks traced arrays in attributes as data, as concrete arrays are when they are set.

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
    """Whether the content of a node is all in its ``__dict__``, and nothing hides that."""
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


# What Flax notes on a Pytree while it is set up: a pytree without leaves, but not a constant.
_initializing: Any = private_name("flax.nnx.pytreelib", "PytreeState._initializing")
_is_setup: Any = private_name("flax.nnx.pytreelib", "PytreeState._is_setup")


def node_flags_of(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """The flags of the node state among some attributes."""
    state = attributes.get(_STATE)
    return node_flags(state) if is_node_state(state) else ()


new_node_state: Callable[..., Any] = pytreelib.PytreeState


def is_node_state(x: Any) -> bool:
    """Whether ``x`` is what Flax notes on a Pytree while it is set up."""
    return type(x) is pytreelib.PytreeState


def node_flags(state: Any) -> tuple[bool, bool]:
    """All in a node state that is part of its tree structure: arguments of ``new_node_state``."""
    return _initializing.__get__(state), _is_setup.__get__(state)


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
    """What changes some attributes of an existing node: functions with their arguments.

    ``attributes`` makes the complete list, for node types that can only be rewritten as one.
    """
    if not isinstance(node, nnx.Pytree):
        impl = _GRAPH_NODE_TYPES[type(node)]
        return [(impl.clear, node), (impl.init, node, attributes())]
    own = vars(node)
    operations: list[tuple[Any, ...]] = [(dict.pop, own, str(key), None) for key in removed]
    new = {str(key): value for key, value in changed if key != _STATE}  # belongs to the object
    left = [key for key in new if isinstance(own.get(key), jax.core.Tracer)]
    if left and STATUSES in own:  # see `node_items`
        new.setdefault(STATUSES, own[STATUSES].update(dict.fromkeys(left, True)))
    return [*operations, (dict.update, own, new)]


# Variables


def new_variable(variable_type: type, metadata: dict[str, Any]) -> Any:
    """A Variable of the current trace with ``metadata`` and no value yet."""
    return variable_type.from_metadata(None, metadata)  # type: ignore[attr-defined]


# Slots: no hook runs, and no trace is checked; callers check before they write.
_value: Any = private_name("flax.nnx.variablelib", "Variable._raw_value")
_metadata: Any = private_name("flax.nnx.variablelib", "Variable._var_metadata")
_trace: Any = private_name("flax.nnx.variablelib", "Variable._trace_state")
get_value: Callable[[Any], Any] = _value.__get__
set_value: Callable[[Any, Any], None] = _value.__set__
get_metadata: Callable[[Any], dict[str, Any]] = _metadata.__get__
set_metadata: Callable[[Any, dict[str, Any]], None] = _metadata.__set__
get_trace_state: Callable[[Any], Any] = _trace.__get__

# The slots that a guard reads, by the name of the step that does (core/guard/walk.py).
SLOTS = {
    "METADATA": _metadata,
    "VALUE": _value,
    "TRACE": _trace,
    "INITIALIZING": _initializing,
    "IS_SETUP": _is_setup,
}


def are_current(states: Iterable[Any]) -> bool:
    """Whether all of these, each of a Variable (its trace) or of a module, are of this trace."""
    current = jax.extend.core.get_opaque_trace_state()._trace_ref
    for state in states:
        trace = state._trace_state if type(state) is pytreelib.PytreeState else state
        if trace._jax_trace._trace_ref is not current:
            return False
    return True


def can_update(x: Any) -> bool:
    """Whether a Variable or node belongs to the current trace and may be changed in it."""
    if isinstance(x, nnx.Variable):
        return bool(x._can_update)
    state = getattr(x, _STATE, None)
    return state is None or bool(state.trace_state.is_valid())


# Pytrees

get_mapping: Callable[[nnx.State[Any, Any]], Any] = operator.attrgetter("raw_mapping")


def own_items(tree: Any) -> dict[Any, Any] | tuple[Any, ...] | list[Any] | None:
    """What a pytree consists of, if JAX sees just that: a mapping by key, or a sequence.

    None for a pytree whose class decides what its children are.
    """
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None:
        return None
    children = list(level[0])
    if type(tree) in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        return tree if _are_same(children, tree) else None
    if type(tree) not in (dict, nnx.State):
        return None
    mapping = tree if type(tree) is dict else get_mapping(tree)
    if type(mapping) is not dict or not {str, int}.issuperset(map(type, mapping)):
        return None  # other keys may be equal without being the same
    return mapping if _are_same(children, [mapping[key] for key in sorted(mapping)]) else None


def has_aux(kind: type, aux: Any) -> bool:
    """Whether a node of a tree structure keeps data beside its children, other than plain keys."""
    return aux is not None and kind not in (dict, nnx.State)


def _are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


# Modes


def graph_mode(graph: bool | None, graph_updates: bool | None) -> tuple[bool, bool]:
    """The two mode switches, with Flax's global flags for those left at None."""
    if graph is None:
        graph = nnx.set_graph_mode.current_value()
    if graph_updates is None:
        graph_updates = nnx.set_graph_updates.current_value()
    return bool(graph), bool(graph and graph_updates)


def leave_static_cache() -> None:
    """Discards what ``nnx.cached_partial`` prepares for ``nnx.jit``, which is not used here."""
    if _graph_context is not None and _graph_context.tmp_static_cache is not None:
        _graph_context.tmp_static_cache = None
