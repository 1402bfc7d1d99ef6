"""Nodes, Variables and modes of Flax.

A *node* is a module or another object that Flax registers as a part of graphs. Each attribute of a
node has a *key*, by which Flax knows it, and a *name* in the ``__dict__``. The two differ only in
an ``nnx.List``, whose first item has the key 0 and the name ``"0"``. Flax flattens the attributes
of a module in the order of their sorted keys.

Two attributes of a module are Flax's own records:

    statuses (``STATUSES``)   which attributes are data: a mapping from names to *marks*, which are
                              True for data and False for static. The mapping cannot change, and its
                              ``update`` returns a new one
    state (``STATE``)         the trace that the module belongs to, and how far it is set up

All nodes of one class with the same names and statuses have one *form* (:class:`NodeForm`). A *tag*
is an object that :func:`tag_node` attaches to statuses; it is no part of a form.

A *hijax* Variable (``hijax=True``) is a value of JAX. It holds a plain Variable, flattened: a
treedef and a tuple of leaves. In a trace it is a tracer, with the methods of Variables.

Values are read and written by the descriptors of Flax's slots, past its hooks and checks.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.extend
import numpy as np
from flax import nnx
from flax.errors import TraceContextError as TraceContextError
from flax.nnx import extract, graphlib, pytreelib, variablelib
from flax.typing import HashableMapping as HashableMapping

from .jax_names import ArrayImpl, private_name, trace_is_clean

# A module, or an object of another class that Flax registers.
Node: TypeAlias = Any
# A function with its arguments, which changes an object when it is called.
Operation: TypeAlias = tuple[Any, ...]

_GRAPH_NODE_TYPES: dict[type, Any] = graphlib.GRAPH_REGISTRY

# The attributes in which a Pytree keeps which of its attributes are data, and its trace.
STATUSES = "_pytree__nodes"
STATE = "_pytree__state"
# The attribute with the Variables in which `nnx.capture` collects.
CAPTURES = "__captures__"


@dataclasses.dataclass(frozen=True, eq=False)
class NodeForm:
    """What nodes of one class with the same names and statuses have in common.

    Attributes:
      keys: the keys of the attributes, in the order in which Flax flattens them.
      is_data: for each key, whether the attribute is data; None if it depends on the value.
      metadata: everything else about the nodes, hashable.
      names: the names of the attributes, in the order of the ``__dict__``.
      order: for each key, the position of its value in the ``__dict__``.
      in_key_order: takes the values in the order of ``names``, and returns them in that of
        ``keys``.
      statuses: one object that stands for the equal statuses of all these nodes; None if there are
        other marks than flags in them, or if the nodes have no statuses.
    """

    keys: tuple[Any, ...]
    is_data: tuple[bool | None, ...]
    metadata: Any
    names: tuple[str, ...]
    order: tuple[int, ...]
    in_key_order: Callable[[Sequence[Any]], Iterable[Any]]
    statuses: Any = None

    @functools.cached_property
    def is_static(self) -> tuple[bool, ...]:
        """Whether the value under each key is static in any case."""
        return tuple(is_data is False for is_data in self.is_data)

    @functools.cached_property
    def may_be_data(self) -> tuple[int, ...]:
        """The positions of the keys whose values are data, or may be."""
        return tuple(i for i, is_static in enumerate(self.is_static) if not is_static)


class NodeItems(NamedTuple):
    """The attributes of a node."""

    form: NodeForm
    values: Sequence[Any]  # in the order of ``form.keys``
    # The values in the order of ``form.names``; None if the ``__dict__`` has other attributes.
    dict_values: Sequence[Any] | None


def node_items(node: Node, forms: dict[Any, NodeForm], no_tracers: set[type] | None) -> NodeItems:
    """Returns the attributes of a node; abstract arrays replace tracers of ended traces.

    In a trace, this marks traced arrays in the node's attributes as data.

    Args:
      node: the node.
      forms: the forms that were met while this model is flattened; new ones are added.
      no_tracers: types that are known not to be those of tracers; new ones are added, because
        asking takes a third of a microsecond. None within a trace, because tracers are valid there.
    """
    # In a trace, arrays are marked before the node is read, because this changes its statuses.
    if no_tracers is None:
        _adopt_tracers(node)
        return _items_by_form(node, forms)
    items = _items_by_form(node, forms)
    for value_type in {*map(type, items.values)} - no_tracers:
        if issubclass(value_type, jax.core.Tracer):
            # The list has tracers of all types, so no further type has to be looked at.
            leaked = [i for i, x in enumerate(items.values) if isinstance(x, jax.core.Tracer)]
            return _abstracted(items, leaked)
        no_tracers.add(value_type)
    return items


def _items_by_form(node: Node, forms: dict[Any, NodeForm]) -> NodeItems:
    """Returns the attributes of a node, with the form that other nodes of its kind have as well.

    Nearly all nodes keep their attributes in the ``__dict__``. By a known form, these values only
    have to be put in the order of the keys, which is many times as fast as Flax. A node of an
    unknown form is read by Flax, and its form is added to ``forms`` or ``_FORMS``.

    Args:
      forms: the forms that only this walk uses. A form that holds no objects of the user is in
        ``_FORMS`` instead, which all walks use.
    """
    # Whether all attributes are in the `__dict__`. Otherwise Flax has to read the node each time.
    is_plain = is_plain_pytree(node)
    attributes = get_dict(node) if is_plain else {}
    names, dict_values = tuple(attributes), list(attributes.values())
    # A form does not depend on the tag that `tag_node` attaches to statuses.
    statuses = _untagged(getattr(node, STATUSES, {}))
    # By name: the mark, which is True for data, False for static, or what a user puts there. This
    # is the dict in Flax's mapping, because the iterator of the mapping is slow.
    mark_of: dict[str, Any] = getattr(statuses, "_mapping", statuses)
    marks = tuple(mark_of.values())
    # The key is one flat tuple, because a nested one takes longer to hash; None ends the names. The
    # types of the marks are in it because 1 equals True.
    key = (type(node), *names, None, *mark_of, *marks, *set(map(type, marks)))
    form = (forms.get(key) or _FORMS.get(key)) if is_plain else None
    if form is not None:
        values = list(form.in_key_order(dict_values))
        if form.statuses is not None:
            # Each node has its own equal statuses. With one object for all, `==` of structures
            # finds them identical and does not compare their marks.
            values[form.keys.index(STATUSES)] = form.statuses
        return NodeItems(form, values, dict_values)
    has_only_flags = type(statuses) is HashableMapping and all(type(x) is bool for x in marks)
    shared_statuses = statuses if has_only_flags else None
    items = _read_items(node, names, dict_values if is_plain else None, shared_statuses)
    # A form reads values from the `__dict__`. If Flax shows other attributes than those in the
    # `__dict__`, then `items.dict_values` is None, and the form is not used again.
    if items.dict_values is not None:
        # Marks other than flags may be objects of the user, which `_FORMS` must not keep alive.
        is_kept = has_only_flags and len(_FORMS) < _MAX_FORMS
        known_forms = _FORMS if is_kept else forms
        known_forms[key] = items.form
    return items


def _read_items(
    node: Node, names: tuple[str, ...], dict_values: list[Any] | None, statuses: object
) -> NodeItems:
    """Returns the attributes of a node as Flax flattens it, with a new form.

    A module with ``self.b = nnx.Param(x); self.a = 1`` has the names ``("b", "a")``. Flax sorts
    them, so the keys are ``("a", "b")``, and the order of the form is ``(1, 0)``.

    Args:
      names: the names of the attributes in the ``__dict__``.
      dict_values: the values of these attributes; None if the node may have other attributes.
      statuses: the object that all nodes of the form share as their statuses; None if each node
        has its own.

    Returns:
      The attributes. ``dict_values`` in these is None if Flax shows other attributes than the
      ``__dict__``. The form is then for this node alone.
    """
    flattened, metadata = graphlib.get_node_impl(node).flatten(node)  # type: ignore[union-attr]
    # Flax wraps a value that is data, or static, in any case. It does not wrap other values,
    # because the value itself then decides, and `is_data` is None.
    is_data_by_wrapper = {graphlib.DataElem: True, graphlib.StaticElem: False}
    keys: list[Any] = []
    values: list[Any] = []
    is_data: list[bool | None] = []
    for key, value in flattened:
        is_wrapped = type(value) in is_data_by_wrapper
        keys.append(key)
        values.append(_untagged(value.value if is_wrapped else value))
        is_data.append(is_data_by_wrapper.get(type(value)))
    positions = None
    if dict_values is not None:
        positions = _positions_in_dict(keys, values, names, dict_values)
    # Without positions, no other node is read by this form, and its order has no effect.
    order = tuple(range(len(keys))) if positions is None else positions
    form = NodeForm(
        keys=tuple(keys),
        is_data=tuple(is_data),
        metadata=metadata,
        names=names,
        order=order,
        # For one position, an itemgetter would return the value itself. ``list`` returns a list.
        in_key_order=operator.itemgetter(*order) if len(order) > 1 else list,
        statuses=statuses if STATUSES in keys else None,
    )
    return NodeItems(form, values, None if positions is None else dict_values)


def _positions_in_dict(
    keys: Sequence[Any], values: Sequence[Any], names: Sequence[str], dict_values: Sequence[Any]
) -> tuple[int, ...] | None:
    """Returns for each key the position of its value in a ``__dict__``; None if they do not agree.

    For the keys ``("b", "a")`` and the names ``("a", "b")``, the result is ``(1, 0)``. Flax and the
    ``__dict__`` do not agree if the class of a node adds attributes or hides some.

    Args:
      keys: the keys of the attributes as Flax flattens the node.
      values: the values as Flax flattens the node; statuses are without the tag of
        :func:`tag_node`.
      names: the names in the ``__dict__``.
      dict_values: the values in the ``__dict__``.
    """
    position_of = {name: position for position, name in enumerate(names)}
    positions = tuple(position_of.get(str(key), -1) for key in keys)  # -1: not in the `__dict__`
    if sorted(positions) != list(range(len(names))):
        return None
    for key, value, position in zip(keys, values, positions, strict=True):
        dict_value = dict_values[position]
        # Statuses without their tag are a new object, so only these are compared by value.
        is_same = _untagged(dict_value) == value if key == STATUSES else dict_value is value
        if not is_same:
            return None
    return positions


# The forms that all walks use. They hold nothing but names, flags and classes, and Flax keeps the
# classes of all nodes alive anyway.
_FORMS: dict[Any, NodeForm] = {}
_MAX_FORMS = 4096


class _Tagged(HashableMapping[Any, Any]):
    """The statuses of a node with a tag; they have the same items and hash as without it.

    Structures compare statuses. Tagged and untagged statuses are equal, so that tagging a node does
    not count as a change of the node. Statuses with two different tags are not equal.
    """

    def __init__(self, mapping: Any, tag: Any):
        super().__init__(mapping, copy=False)
        self.tag = tag

    def __eq__(self, other: object) -> bool:
        has_other_tag = isinstance(other, _Tagged) and self.tag != other.tag
        return not has_other_tag and bool(super().__eq__(other))

    __hash__ = HashableMapping.__hash__

    def update(self, other: Any) -> _Tagged:
        return _Tagged(super().update(other)._mapping, self.tag)


def _untagged(x: Any) -> Any:
    """Returns statuses as they were before :func:`tag_node`; any other value unchanged."""
    return HashableMapping(x._mapping, copy=False) if type(x) is _Tagged else x


def tag_node(node: Node, tag: object) -> None:
    """Attaches a tag to a node of the current trace, for :func:`tag_of`.

    The tag is kept in the statuses, because Flax copies them into the nodes that its transforms
    make of this node. A node that has a tag keeps it. Nodes without statuses get no tag.
    """
    statuses = vars(node).get(STATUSES)
    # The exact type is compared, because a `_Tagged` mapping has a tag already.
    if is_plain_pytree(node) and type(statuses) is HashableMapping:
        # A module's own `__setattr__` would check the trace, and mark the attribute.
        object.__setattr__(node, STATUSES, _Tagged(statuses._mapping, tag))


def tag_of(node: Node) -> Any:
    """Returns what :func:`tag_node` attached to a node, or to the one that Flax made it from.

    Returns None for a node without a tag.
    """
    return getattr(vars(node).get(STATUSES), "tag", None)


def _abstracted(items: NodeItems, leaked: Sequence[int]) -> NodeItems:
    """Returns the attributes of a node with abstract arrays instead of tracers; refs stay.

    A function stored the tracers in the node, and its trace is over. If Flax has the attribute of a
    tracer as static, the result has it as data, because an abstract array is data.

    Args:
      leaked: the positions of the tracers among the values.
    """
    form = items.form
    values, is_data = list(items.values), list(form.is_data)
    new_marks: dict[str, bool] = {}  # by name: True, for the statuses
    for position in leaked:
        if not isinstance(values[position], jax.Array):  # a jax.Ref
            continue
        values[position] = _abstract_array(values[position])
        # None means that Flax decides by the value, and it sees that an array is data.
        if is_data[position] is False:
            is_data[position] = True
            new_marks[str(form.keys[position])] = True
    if new_marks:  # an attribute was marked as static, so the node has statuses
        statuses_position = form.keys.index(STATUSES)
        # `update` returns a new mapping, so the statuses of the node itself do not change.
        values[statuses_position] = values[statuses_position].update(new_marks)
    new_form = dataclasses.replace(form, is_data=tuple(is_data))
    # ``dict_values`` is None because the ``__dict__`` still has the tracers.
    return NodeItems(new_form, values, dict_values=None)


def _abstract_array(tracer: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns an abstract array with the shape, dtype and sharding of a tracer."""
    aval: Any = jax.typeof(tracer)
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def mapping_items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the items of one of Flax's hashable mappings, without its slow iterator."""
    return getattr(mapping, "_mapping", mapping).items()  # type: ignore[no-any-return]


def _adopt_tracers(node: Node) -> None:
    """Marks traced arrays in attributes as data, because Flax would keep and leak static ones.

    A node without statuses, or whose class is no pytree, is left alone, because Flax then decides
    by the values.
    """
    statuses = getattr(node, STATUSES, None)  # name → whether the attribute is data
    if statuses is None or not is_pytree_type(type(node)):
        return
    new_marks = {
        name: True
        for name, value in vars(node).items()
        if isinstance(value, jax.core.Tracer) and not statuses.get(name, False)
    }
    if new_marks:
        # `update` returns a new mapping. The `__setattr__` of modules would mark it as static.
        object.__setattr__(node, STATUSES, statuses.update(new_marks))


def is_plain_pytree(node: object) -> bool:
    """Whether a node is an ``nnx.Pytree`` that shows all its attributes in its ``__dict__``.

    Its attributes can then be read without Flax. A node of any other type is read by the function
    with which its type was registered.
    """
    node_type = type(node)
    is_plain_type = _IS_PLAIN_TYPE.get(node_type)
    if is_plain_type is None:
        # A class may define ``__dict__`` itself, as a property for example. The first class in the
        # order of inheritance that has a descriptor for it decides.
        owners = (cls for cls in node_type.__mro__ if "__dict__" in vars(cls))
        owner = next(owners, object)
        is_default = isinstance(vars(owner).get("__dict__"), types.GetSetDescriptorType)
        is_plain_type = nnx.Pytree in node_type.__mro__ and is_default
        _IS_PLAIN_TYPE[node_type] = is_plain_type
    # A `__getattribute__` of the class may show another dict, which `vars` then returns.
    return is_plain_type and vars(node) is get_dict(node)


# Whether a class is an ``nnx.Pytree`` whose objects have Python's own ``__dict__``, by class.
_IS_PLAIN_TYPE: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def get_dict(node: object) -> dict[str, Any]:
    """Returns the ``__dict__`` of a node, past any ``__getattribute__`` of its class."""
    attributes: dict[str, Any] = object.__getattribute__(node, "__dict__")
    return attributes


def is_pytree_type(node_type: type) -> bool:
    """Whether JAX itself can flatten this node type (``nnx.Pytree`` with ``pytree=True``)."""
    return bool(getattr(node_type, "_pytree__is_pytree", True))


# The attributes of a module class that Flax makes from its other ones.
DERIVED_FROM_CLASS = ("_pytree__is_pytree", "_pytree__nodes")
# The slots of the two flags in a node's state, which say how far the node is set up.
initializing: Any = private_name("flax.nnx.pytreelib", "PytreeState._initializing")
is_setup: Any = private_name("flax.nnx.pytreelib", "PytreeState._is_setup")


def node_flags_of(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the flags of the node state among some attributes; () if there is no state."""
    state = attributes.get(STATE)
    return node_flags(state) if is_node_state(state) else ()


new_node_state: Callable[..., Any] = pytreelib.PytreeState


def is_node_state(x: object) -> bool:
    """Whether ``x`` is Flax's state of a Pytree while it is set up."""
    return type(x) is pytreelib.PytreeState


def node_flags(state: Any) -> tuple[bool, bool]:
    """Returns the parts of a node state that are in its treedef, for ``new_node_state``."""
    return initializing.__get__(state), is_setup.__get__(state)


def new_node(node_type: type, metadata: object) -> Node:
    """Returns an object of ``node_type`` with no attributes yet."""
    return _GRAPH_NODE_TYPES[node_type].create_empty(metadata)


def fill_node(node: Node, attributes: Iterable[tuple[Any, Any]]) -> None:
    """Sets the attributes of a node that `new_node` made: pairs of a key and a value."""
    _GRAPH_NODE_TYPES[type(node)].init(node, attributes)


def node_operations(
    node: Node,
    changed: Sequence[tuple[Any, Any]],
    removed: Sequence[Any],
    all_attributes: Callable[[], list[tuple[Any, Any]]],
) -> list[Operation]:
    """Returns the operations that change the attributes of a node; runs none of them.

    An operation is a tuple of a function and its arguments. The operations for an ``nnx.Pytree``
    run in C, so that no signal can come between them. Those for any other node are Flax's own.

    Args:
      node: the node.
      changed: the keys and values of new or changed attributes.
      removed: the keys of attributes to be removed.
      all_attributes: makes all keys and values, for node types that can only be rewritten.
    """
    if not isinstance(node, nnx.Pytree):
        impl = _GRAPH_NODE_TYPES[type(node)]
        return [(impl.clear, node), (impl.init, node, all_attributes())]
    # The ``__dict__`` is changed directly, because the ``__setattr__`` of modules may raise.
    attributes = vars(node)
    removals: list[Operation] = [(dict.pop, attributes, str(key), None) for key in removed]
    # The state stays, because it has the trace to which the node belongs.
    new_values = {str(key): value for key, value in changed if key != STATE}
    # An array may replace a tracer of a trace that is over. `node_items` has shown that tracer as
    # data, but the statuses of the node may still say that the attribute is static.
    leaked = [name for name in new_values if isinstance(attributes.get(name), jax.core.Tracer)]
    if leaked and STATUSES in attributes:
        new_marks = dict.fromkeys(leaked, True)
        # `setdefault` keeps statuses that are among the changed attributes.
        new_values.setdefault(STATUSES, attributes[STATUSES].update(new_marks))
    return [*removals, (dict.update, attributes, new_values)]


# None if this release of Flax has no such context; `leave_static_cache` then does nothing.
_graph_context: Any = private_name("flax.nnx.graphlib", "GRAPH_CONTEXT", optional=True)


def is_node(x: object) -> bool:
    """Whether ``x`` is a module or another object registered as an NNX graph node."""
    return type(x) in _GRAPH_NODE_TYPES


def is_variable(x: object) -> TypeGuard[nnx.Variable[Any]]:
    """Whether ``x`` is a Variable whose value lives in the Python object, not a hijax one."""
    return nnx.Variable in type(x).__mro__


def is_any_variable(x: object) -> TypeGuard[nnx.Variable[Any]]:
    """Whether ``x`` is a Variable of any kind, plain, hijax or traced."""
    if nnx.Variable in type(x).__mro__:
        return True
    # `isinstance` runs Python code of Flax, so it is not called for the many arrays.
    return type(x) is not ArrayImpl and isinstance(x, nnx.Variable)


def is_graph_object(x: object) -> bool:
    """Whether ``x`` has an identity that the graph keeps: a node or a Variable."""
    return type(x) in _GRAPH_NODE_TYPES or nnx.Variable in type(x).__mro__


def holds_arrays(x: object) -> bool:
    """Whether a graph object is a Variable, or a node that holds Variables or arrays."""
    array_types = (nnx.Variable, jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    # `iter_graph` also yields what is in static attributes. In tree mode, Flax's own function would
    # walk through data only.
    parts = (part for _, part in iter_graph(x)) if is_node(x) else iter([x])
    return any(isinstance(part, array_types) for part in parts)


def iter_graph(root: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields a pair (path, part) for each part of a graph, as ``nnx.iter_graph`` in graph mode.

    Unlike there, a subclass of tuple that JAX takes for a leaf (``class Size(tuple)``) is a leaf
    here. Flax takes it for a pytree, and fails.
    """
    seen: set[int] = set()  # the ids of nodes and containers
    # The parts that are still to be yielded, the next one last.
    stack: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    while stack:
        path, part = stack.pop()
        impl = graphlib.get_node_impl(part)  # None for what Flax takes for a leaf
        if impl is not None and (is_node(part) or not jax.tree_util.all_leaves([part])):
            if id(part) in seen:  # shared, or in a cycle
                continue
            seen.add(id(part))
            children = impl.node_dict(part)
            stack += [((*path, key), child) for key, child in reversed(children.items())]
        yield path, part


def is_plain_array(x: Any) -> bool:
    """Whether ``x`` is an array of JAX, concrete or traced, and neither a ref nor a Variable."""
    if type(x) is ArrayImpl:
        return True
    # The type of a traced ref or hijax Variable is of another class.
    return issubclass(type(x), jax.core.Tracer) and type(x.aval) is jax.core.ShapedArray


def is_ref(x: object) -> bool:
    """Whether ``x`` is a ``jax.Ref``, concrete or traced."""
    return not is_plain_array(x) and variablelib.is_array_ref(x)


def is_hijax_variable(x: object) -> bool:
    """Whether ``x`` is a Variable made with ``hijax=True``, concrete or traced."""
    is_traced = isinstance(x, jax.core.Tracer) and isinstance(x, variablelib.HijaxVariable)
    return is_concrete_hijax(x) or is_traced


def is_concrete_hijax(x: object) -> bool:
    """Whether ``x`` is a Variable made with ``hijax=True`` that is not traced."""
    return type(x) is variablelib.HijaxVariable


def plain_variable(x: Any) -> Any:
    """Returns a Variable made with ``hijax=True`` as a plain one; any other Variable unchanged."""
    if is_variable(x):
        return x
    if is_concrete_hijax(x):  # a hijax Variable holds a plain Variable, flattened
        return jax.tree.unflatten(get_treedef(x), get_leaves(x))
    # `x` is a tracer of a hijax Variable. It has no leaves, but methods to read it in the trace.
    variable = new_variable(x.type, x.get_metadata())
    set_value(variable, x.get_raw_value())
    return variable


def variable_operations(
    variable: Any, value: object, metadata: dict[str, Any] | None
) -> list[Operation]:
    """Returns the operations that give a Variable a value, and metadata unless they are None.

    An operation is a tuple of a function and its arguments. The caller runs all operations later,
    in C, so that no signal can come between them. Only a traced hijax Variable is changed by Python
    code.

    Args:
      variable: the Variable, plain or hijax.
      value: its new value.
      metadata: its new metadata; None to keep the present metadata.
    """
    if is_concrete_hijax(variable):
        # A hijax Variable holds a plain Variable, flattened. So an updated plain Variable is made,
        # and flattened.
        plain, treedef = plain_variable(variable), get_treedef(variable)
        updated = new_variable(type(plain), get_metadata(plain) if metadata is None else metadata)
        set_value(updated, value)
        leaves, new_treedef = jax.tree.flatten(updated)
        operations: list[Operation] = [(set_leaves, variable, tuple(leaves))]
        # An equal treedef stays the same object, because a guard compares treedefs by identity, and
        # a new object would make it flatten the model again.
        if metadata is not None or new_treedef != treedef:
            operations.append((set_treedef, variable, new_treedef))
        return operations
    if is_variable(variable):
        operations = [(set_value, variable, value)]
        if metadata is not None:
            operations.append((set_metadata, variable, metadata))
    else:  # a tracer of a hijax Variable
        operations = [(variable.set_raw_value, value)]
        if metadata is not None:
            operations.append((variable.set_metadata, metadata))
    return operations


class PrefixState(NamedTuple):
    """What ``nnx.prefix(..., graph=True)`` returns."""

    function: Any  # the user's function of a path and a value, which returns a spec
    specs: Any  # an ``nnx.State`` of the specs that the function has returned


def prefix_state(x: Any) -> PrefixState | None:
    """Returns the content of what ``nnx.prefix(..., graph=True)`` made; None for anything else."""
    if not isinstance(x, extract.TreeState):
        return None
    return PrefixState(x.prefix_fn.value, x.state)


def new_variable(variable_type: type, metadata: dict[str, Any], trace_state: Any = None) -> Any:
    """Returns a plain Variable without a value.

    Args:
      variable_type: the class of the Variable.
      metadata: the metadata, of which the Variable gets a copy.
      trace_state: Flax's record of the current trace, which Variables may share; None for a new
        record.
    """
    variable: Any = object.__new__(variable_type)
    _trace.__set__(variable, trace_state or new_trace_state())
    set_metadata(variable, dict(metadata))
    set_value(variable, None)
    return variable


new_trace_state: Callable[[], Any] = private_name("flax.nnx.tracers", "TraceState")


# The slots of a plain Variable. Writing to one runs no hooks and checks no trace, so callers check.
_value: Any = private_name("flax.nnx.variablelib", "Variable._raw_value")
_metadata: Any = private_name("flax.nnx.variablelib", "Variable._var_metadata")
_trace: Any = private_name("flax.nnx.variablelib", "Variable._trace_state")
get_value: Callable[[Any], Any] = _value.__get__
set_value: Callable[[Any, Any], None] = _value.__set__
get_metadata: Callable[[Any], dict[str, Any]] = _metadata.__get__
set_metadata: Callable[[Any, dict[str, Any]], None] = _metadata.__set__
get_trace_state: Callable[[Any], Any] = _trace.__get__

# The slots of a hijax Variable.
_treedef: Any = private_name("flax.nnx.variablelib", "HijaxVariable._treedef")
_leaves: Any = private_name("flax.nnx.variablelib", "HijaxVariable._leaves")
get_treedef: Callable[[Any], Any] = _treedef.__get__
set_treedef: Callable[[Any, Any], None] = _treedef.__set__
get_leaves: Callable[[Any], tuple[Any, ...]] = _leaves.__get__
set_leaves: Callable[[Any, tuple[Any, ...]], None] = _leaves.__set__

# The slots that a guard reads, by the name of the step that reads it (core/guard/walk.py).
SLOTS = {
    "METADATA": _metadata,
    "VALUE": _value,
    "TRACE": _trace,
    "INITIALIZING": initializing,
    "IS_SETUP": is_setup,
    "TREEDEF": _treedef,
    "LEAVES": _leaves,
}


def are_current(states: Iterable[Any]) -> bool:
    """Whether all of these states, of Variables or modules, belong to the current trace.

    The state of a Variable is Flax's ``TraceState``. The state of a module is a ``PytreeState``,
    which has a ``TraceState``. A ``TraceState`` has JAX's opaque trace state, and this has a weak
    reference to the trace. JAX makes one such reference for each trace, so two traces are the same
    if their references are the same object.
    """
    current_ref = jax.extend.core.get_opaque_trace_state()._trace_ref
    for state in states:
        trace_state = state._trace_state if type(state) is pytreelib.PytreeState else state
        if trace_state._jax_trace._trace_ref is not current_ref:
            return False
    return True


def can_update(x: Any) -> bool:
    """Whether a Variable or node belongs to the current trace and may be changed in it."""
    if is_variable(x):
        return bool(x._can_update)
    if is_hijax_variable(x):
        # A concrete hijax Variable can be changed outside of traces only. A tracer counts as one of
        # the current trace, because Flax itself raises an error for a tracer of an outer trace.
        return isinstance(x, jax.core.Tracer) or trace_is_clean()
    state = getattr(x, STATE, None)  # a `PytreeState`, which modules and other Pytrees have
    # Nodes of other types do not know their trace, so Flax lets each trace change them.
    return state is None or bool(state.trace_state.is_valid())


def get_mapping(state: nnx.State[Any, Any]) -> Any:
    """Returns the dict with the items of a State; a ``ValueError`` if it has more attributes."""
    (mapping,) = vars(state).values()
    return mapping


def own_items(tree: Any) -> dict[Any, Any] | tuple[Any, ...] | list[Any] | None:
    """Returns the object that holds the children of a pytree: a tuple, a list, or a dict.

    A guard looks at this object in later calls, instead of flattening the pytree again. Returns
    None if the pytree is no tuple, list, dict or State, or if JAX flattens it to other children
    than it holds.
    """
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None:  # a leaf
        return None
    children = [*level[0]]  # as JAX flattens the pytree
    # A named tuple may be registered with another flatten function, and then shows other children.
    is_named_tuple = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if type(tree) in (tuple, list) or is_named_tuple:
        return tree if _are_same(children, tree) else None
    if type(tree) is nnx.State and len(vars(tree)) == 1:  # the State has nothing but its mapping
        mapping = get_mapping(tree)
    elif type(tree) is dict:
        mapping = tree
    else:
        return None
    # A guard compares keys by `==`. Keys of other types may be equal and still be different: 1.0
    # and 1, or objects with an `__eq__` of the user.
    if type(mapping) is not dict or not {str, int}.issuperset(map(type, mapping)):
        return None
    # JAX has sorted the keys to flatten the dict, so they are all strings or all numbers.
    sorted_values = [mapping[key] for key in sorted(mapping)]
    return mapping if _are_same(children, sorted_values) else None


def has_aux(kind: type, aux: object) -> bool:
    """Whether a node of a treedef has auxiliary data other than plain keys."""
    return aux is not None and kind not in (dict, nnx.State)


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects, in the same order."""
    return len(first) == len(second) and all(map(operator.is_, first, second))


def graph_mode(graph: bool | None, graph_updates: bool | None) -> tuple[bool, bool]:
    """Returns the modes ``graph`` and ``graph_updates``, with Flax's global flags for None.

    Updates of graphs need graphs, so the second mode is False if the first one is.
    """
    if graph is None:
        graph = nnx.set_graph_mode.current_value()
    if graph_updates is None:
        graph_updates = nnx.set_graph_updates.current_value()
    return bool(graph), bool(graph and graph_updates)


_axis_rules: Callable[[], Any] = private_name("flax.core.spmd", "get_logical_axis_rules")


def context_settings() -> tuple[Any, ...]:
    """Returns Flax's settings in context on which a trace depends, in hashable form."""
    return (
        tuple(map(repr, _axis_rules() or ())),  # the rules for logical axes of new Variables
        nnx.using_eager_sharding(),  # whether new Variables are sharded at once
        *nnx.var_defaults().values(),  # whether new Variables are hijax ones, or have refs
        nnx.set_graph_mode.current_value(),
        nnx.set_graph_updates.current_value(),
    )


def leave_static_cache() -> None:
    """Discards what ``nnx.cached_partial`` prepares for ``nnx.jit``, which is not used here."""
    if _graph_context is not None and _graph_context.tmp_static_cache is not None:
        _graph_context.tmp_static_cache = None
