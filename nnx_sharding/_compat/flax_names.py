"""Nodes, Variables and modes of Flax.

A *node* is a module or another object that Flax registers as a part of graphs. Its attributes are
its *items*: by *keys* in the order in which Flax flattens them, by *names* in its ``__dict__``. The
*statuses* of a module say which of its attributes are data. What all nodes of one class with the
same names and statuses have in common is their *form* (:class:`NodeForm`).

Statuses are a mapping that cannot change: its ``update`` returns a new one. A *mark* is the value
that it has for one name: True for data, False for static. A module also has a *state*, with the
trace that it belongs to and how far it is set up. Statuses and state are attributes themselves,
with the names `STATUSES` and `STATE`. A *tag* is an object that :func:`tag_node` attaches to
statuses; it is no part of a form.

A *hijax* Variable (``hijax=True``) is a value of JAX. It holds a plain Variable, flattened: a
treedef and a tuple of leaves. In a trace it is a tracer, with the methods of Variables.

Values are read and written past the hooks and checks of Flax, by the descriptors of its slots.
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
    """What nodes of one type have in common that have the same names and data.

    Attributes:
      keys: the keys of the attributes, in the order in which Flax flattens them.
      is_data: by key, whether the attribute is data; None if it depends on the value.
      metadata: everything else about the nodes, hashable.
      names: the names of the attributes, in the order of the ``__dict__``.
      order: by key, the position among the names.
      pick: takes the values in the order of ``names``, and returns them in the order of ``keys``.
      statuses: one object that stands for the equal statuses of all these nodes; None if there are
        other marks than flags in them, or if the nodes have no statuses.
    """

    keys: tuple[Any, ...]
    is_data: tuple[bool | None, ...]
    metadata: Any
    names: tuple[str, ...]
    order: tuple[int, ...]
    pick: Callable[[Sequence[Any]], Iterable[Any]]
    statuses: Any = None

    @functools.cached_property
    def is_static(self) -> tuple[bool, ...]:
        """Whether the value under each key is static in any case."""
        return tuple(x is False for x in self.is_data)

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        """The positions of the keys whose values are data, or may be."""
        return tuple(i for i, static in enumerate(self.is_static) if not static)


class NodeItems(NamedTuple):
    """The attributes of a node."""

    form: NodeForm
    values: Sequence[Any]  # by key
    in_dict: Sequence[Any] | None  # by name; None if the ``__dict__`` has other attributes


def node_items(node: Node, forms: dict[Any, NodeForm], no_tracers: set[type] | None) -> NodeItems:
    """Returns the attributes of a node. Tracers of ended traces among them become abstract.

    Args:
      node: the node. In a trace, traced arrays in its attributes are marked as data.
      forms: the forms that were met while this model is flattened; new ones are added.
      no_tracers: types that are known not to be those of tracers, since to ask takes a third of a
        microsecond; new ones are added. None while a trace runs: tracers are valid there.
    """
    # In a trace, arrays are marked before the node is read, because this changes its statuses.
    if no_tracers is None:
        _adopt_tracers(node)
        return _items_by_form(node, forms)
    items = _items_by_form(node, forms)
    for kind in {*map(type, items.values)} - no_tracers:
        if issubclass(kind, jax.core.Tracer):
            # Tracers of all types, so no other kind has to be looked at.
            leaked = [i for i, x in enumerate(items.values) if isinstance(x, jax.core.Tracer)]
            return _abstracted(items, leaked)
        no_tracers.add(kind)
    return items


def _items_by_form(node: Node, forms: dict[Any, NodeForm]) -> NodeItems:
    """Reads a node by a known form, many times as fast as Flax; adds a form if there is none.

    Nodes of one form have the same class, names of attributes, and marks of which are data. Nearly
    all of them keep their attributes in the ``__dict__``, so a form only has to put these values in
    the order of the keys.

    Args:
      node: the node.
      forms: the forms that only this walk uses. Those that hold no objects of the user are in
        ``_FORMS`` instead, for all walks. A new form is added to one of the two.
    """
    # Whether all attributes are in the `__dict__`. Otherwise Flax has to read the node each time.
    is_plain = is_plain_pytree(node)
    attributes = get_dict(node) if is_plain else {}
    names, in_dict = tuple(attributes), list(attributes.values())
    # A form does not depend on the tag that `tag_node` attaches to statuses.
    statuses = _untagged(getattr(node, STATUSES, {}))
    # Name → mark: True for data, False for static, or what a user puts there. It is the dict in
    # Flax's mapping, whose own iterator is slow.
    mark_of: dict[str, Any] = getattr(statuses, "_mapping", statuses)
    marks = tuple(mark_of.values())
    # The key is one flat tuple, because a nested one takes longer to hash; None ends the names. The
    # types of the marks are in it because 1 equals True.
    key = (type(node), *names, None, *mark_of, *marks, *set(map(type, marks)))
    form = (forms.get(key) or _FORMS.get(key)) if is_plain else None
    if form is not None:
        values = list(form.pick(in_dict))  # by name → by key
        if form.statuses is not None:
            # Each node has its own equal statuses. With one object for all, `==` of structures
            # finds them identical and does not compare their marks.
            values[form.keys.index(STATUSES)] = form.statuses
        return NodeItems(form, values, in_dict)
    has_only_flags = type(statuses) is HashableMapping and all(type(x) is bool for x in marks)
    shared_statuses = statuses if has_only_flags else None
    items = _read_items(node, names, in_dict if is_plain else None, shared_statuses)
    # A form reads values from the `__dict__`. If Flax shows a node with other attributes than those
    # in its `__dict__`, then `items.in_dict` is None, and the node gets no form.
    if items.in_dict is not None:
        # Marks other than flags may be objects of the user, which `_FORMS` must not keep alive.
        is_kept = has_only_flags and len(_FORMS) < _MAX_FORMS
        known_forms = _FORMS if is_kept else forms
        known_forms[key] = items.form
    return items


def _read_items(
    node: Node, names: tuple[str, ...], in_dict: list[Any] | None, statuses: object
) -> NodeItems:
    """Reads a node as Flax flattens it, and makes its form.

    A module with ``self.b = nnx.Param(x); self.a = 1`` has the names ``("b", "a")``. Flax sorts
    them, so its keys are ``("a", "b")``, and the order of its form is ``(1, 0)``.

    Args:
      node: the node.
      names: of the attributes in its ``__dict__``.
      in_dict: their values; None if the node may have other attributes.
      statuses: the object that all nodes of its form share; None if they do not.

    Returns:
      The attributes, in which ``in_dict`` is None also if Flax sees others than these. The form is
      then for this node alone.
    """
    flattened, metadata = graphlib.get_node_impl(node).flatten(node)  # type: ignore[union-attr]
    pairs = list(flattened)
    # Flax wraps values that are data, or static, in any case. It does not wrap the others: whether
    # they are data depends on the value, and `is_data` is None.
    data_of_wrapper = {graphlib.DataElem: True, graphlib.StaticElem: False}
    keys = tuple(key for key, _ in pairs)
    values = [_untagged(x.value if type(x) in data_of_wrapper else x) for _, x in pairs]
    positions = None if in_dict is None else _positions_in_dict(keys, values, names, in_dict)
    # Without positions, no other node is read by this form, and its order has no effect.
    order = tuple(range(len(keys))) if positions is None else positions
    form = NodeForm(
        keys=keys,
        is_data=tuple(data_of_wrapper.get(type(x)) for _, x in pairs),  # True, False or None
        metadata=metadata,
        names=names,
        order=order,
        # For one position, an itemgetter would not give a sequence.
        pick=operator.itemgetter(*order) if len(order) > 1 else list,
        statuses=statuses if STATUSES in keys else None,
    )
    return NodeItems(form, values, None if positions is None else in_dict)


def _positions_in_dict(
    keys: Sequence[Any], values: Sequence[Any], names: Sequence[str], in_dict: Sequence[Any]
) -> tuple[int, ...] | None:
    """Returns the position of each key's value in a ``__dict__``: of (b, a) in (a, b), (1, 0).

    Returns None if what Flax sees is not what is there: a class may add attributes, or hide some.

    Args:
      keys: the attributes as Flax flattens the node: names, or numbers for those of an
        ``nnx.List``, which are ``"0"``, ``"1"``… in the ``__dict__``.
      values: their values; statuses without the tag of :func:`tag_node`.
      names: the attributes in the ``__dict__``.
      in_dict: their values.
    """
    position_of = {name: position for position, name in enumerate(names)}
    positions = tuple(position_of.get(str(key), -1) for key in keys)
    if sorted(positions) != list(range(len(names))):
        return None
    for key, value, position in zip(keys, values, positions, strict=True):
        in_place = in_dict[position]
        # Statuses without their tag are a new object, so only these are compared by value.
        is_same = _untagged(in_place) == value if key == STATUSES else in_place is value
        if not is_same:
            return None
    return positions


# Forms that hold nothing but names and flags. Flax keeps the classes of all nodes, too.
_FORMS: dict[Any, NodeForm] = {}
_MAX_FORMS = 4096


class _Tagged(HashableMapping[Any, Any]):
    """The statuses of a node with a tag; they have the same items and hash as without it.

    Structures compare statuses. So tagging a node is no change of it: tagged and untagged statuses
    are equal. Nodes with two different tags are different.
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
    """Returns the attributes of a node with abstract arrays in place of tracers; refs stay.

    A function stored the tracers in the node, and its trace is over. Where a tracer was static, as
    everything is that Flax has not seen as an array, the array is marked as data.

    Args:
      items: the attributes.
      leaked: the indices of the tracers among the values.
    """
    form, values, is_data = items.form, list(items.values), list(items.form.is_data)
    marks: dict[str, bool] = {}  # name → True, for Flax's record of which attributes are data
    for index in leaked:
        if isinstance(values[index], jax.Array):  # not a jax.Ref
            values[index] = _shape_of(values[index])
            # None means that Flax decides by the value, and it sees that an array is data.
            if is_data[index] is False:
                is_data[index] = True
                marks[str(form.keys[index])] = True
    if marks:  # Flax knew something to be static, so there are statuses
        position = form.keys.index(STATUSES)
        values[position] = values[position].update(marks)  # returns a new mapping
    return NodeItems(dataclasses.replace(form, is_data=tuple(is_data)), values, in_dict=None)


def _shape_of(tracer: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of a tracer, as from ``jax.eval_shape``."""
    aval: Any = jax.typeof(tracer)
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def mapping_items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the items of one of Flax's hashable mappings, without its slow iterator."""
    return getattr(mapping, "_mapping", mapping).items()  # type: ignore[no-any-return]


def _adopt_tracers(node: Node) -> None:
    """Marks traced arrays in attributes as data, or Flax would keep and leak them as static.

    Only modules that are pytrees have such marks: of others, Flax decides by the value.
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
    kind = type(node)
    is_plain = _HAS_PLAIN_DICT.get(kind)
    if is_plain is None:
        # A class may define ``__dict__`` itself, as a property for example.
        descriptors = (vars(cls)["__dict__"] for cls in kind.__mro__ if "__dict__" in vars(cls))
        is_default = isinstance(next(descriptors, None), types.GetSetDescriptorType)
        is_plain = _HAS_PLAIN_DICT[kind] = nnx.Pytree in kind.__mro__ and is_default
    # A `__getattribute__` of the class may show another dict, which `vars` then returns.
    return is_plain and vars(node) is get_dict(node)


# Whether nodes of a class have Python's own ``__dict__``, for each class that was asked for.
_HAS_PLAIN_DICT: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def get_dict(node: object) -> dict[str, Any]:
    """Returns the ``__dict__`` of a node, past any ``__getattribute__`` of its class."""
    attributes: dict[str, Any] = object.__getattribute__(node, "__dict__")
    return attributes


def is_pytree_type(node_type: type) -> bool:
    """Whether JAX itself can flatten this node type (``nnx.Pytree`` with ``pytree=True``)."""
    return bool(getattr(node_type, "_pytree__is_pytree", True))


# The attributes of a module class that Flax makes from its other ones.
DERIVED_FROM_CLASS = ("_pytree__is_pytree", "_pytree__nodes")
# The flags in the state of a node while it is set up: a pytree without leaves, but not constant.
initializing: Any = private_name("flax.nnx.pytreelib", "PytreeState._initializing")
is_setup: Any = private_name("flax.nnx.pytreelib", "PytreeState._is_setup")


def node_flags_of(attributes: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the flags of the node state among some attributes; none without a state."""
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
    """Returns the operations that change the attributes of a node; none is run here.

    An operation is a tuple of a function and its arguments. All operations of an update run one
    after the other, in C unless the node is no ``nnx.Pytree``, so that no signal interrupts it.

    Args:
      node: the node.
      changed: the keys and values of its new or changed attributes. A key is a name, or a number in
        an ``nnx.List``, whose ``__dict__`` has the name ``"0"`` for 0.
      removed: the keys of attributes to be removed.
      all_attributes: makes all keys and values, for node types that can only be rewritten.
    """
    if not isinstance(node, nnx.Pytree):
        impl = _GRAPH_NODE_TYPES[type(node)]
        return [(impl.clear, node), (impl.init, node, all_attributes())]
    attributes = vars(node)  # past the ``__setattr__`` of modules, which may raise
    operations: list[Operation] = [(dict.pop, attributes, str(key), None) for key in removed]
    # The state has the trace to which the node belongs, and that does not change.
    values = {str(key): value for key, value in changed if key != STATE}
    # An array may replace a tracer of a trace that is over. `node_items` has shown that tracer as
    # data, but the statuses of the node may still say that the attribute is static.
    leaked = [key for key in values if isinstance(attributes.get(key), jax.core.Tracer)]
    if leaked and STATUSES in attributes:
        new_statuses = attributes[STATUSES].update(dict.fromkeys(leaked, True))  # a new mapping
        values.setdefault(STATUSES, new_statuses)
    return [*operations, (dict.update, attributes, values)]


# Without this, `nnx.cached_partial` has no cache.
_graph_context: Any = private_name("flax.nnx.graphlib", "GRAPH_CONTEXT", optional=True)


def is_node(x: object) -> bool:
    """Whether ``x`` is a module or another object registered as an NNX graph node."""
    return type(x) in _GRAPH_NODE_TYPES


def is_variable(x: object) -> TypeGuard[nnx.Variable[Any]]:
    """Whether ``x`` is a Variable whose value lives in the Python object, not a hijax one."""
    return nnx.Variable in type(x).__mro__


def is_any_variable(x: object) -> TypeGuard[nnx.Variable[Any]]:
    """Whether ``x`` is a Variable of any kind: ``isinstance``, which runs Python code of Flax."""
    return nnx.Variable in type(x).__mro__ or (
        type(x) is not ArrayImpl and isinstance(x, nnx.Variable)
    )


def is_graph_object(x: object) -> bool:
    """Whether ``x`` has an identity that the graph keeps: a node or a Variable."""
    return type(x) in _GRAPH_NODE_TYPES or nnx.Variable in type(x).__mro__


def holds_arrays(x: object) -> bool:
    """Whether a graph object is a Variable, or a node that holds Variables or arrays."""
    kinds = (nnx.Variable, jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    # In tree mode, Flax would walk through data only.
    parts = iter_graph(x) if is_node(x) else [((), x)]
    return any(isinstance(part, kinds) for _, part in parts)


def iter_graph(root: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields each part of a graph after its path, as ``nnx.iter_graph(root, graph=True)`` does.

    Flax takes all subclasses of tuple for pytrees, and fails for those that JAX takes for leaves
    (``class Size(tuple)``). They are leaves here.
    """
    seen: set[int] = set()
    # The parts that are still to be yielded, the next one last.
    stack: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    while stack:
        path, part = stack.pop()
        impl = graphlib.get_node_impl(part)
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

    An operation is a tuple of a function and its arguments; the caller runs all operations later.
    They run no Python code, in which a signal could interrupt an update, except where the Variable
    is a traced one made with ``hijax=True``.

    Args:
      variable: the Variable, plain or hijax.
      value: its new value.
      metadata: its new metadata; None to keep the present metadata.
    """
    if is_concrete_hijax(variable):
        # A hijax Variable holds a plain Variable, flattened, so an updated plain Variable is
        # flattened into it.
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
    if is_variable(variable):  # a plain one
        operations = [(set_value, variable, value), (set_metadata, variable, metadata)]
    else:  # a tracer of one made with `hijax=True`
        operations = [(variable.set_raw_value, value), (variable.set_metadata, metadata)]
    return operations if metadata is not None else operations[:1]  # the first sets the value


class PrefixState(NamedTuple):
    """What ``nnx.prefix(..., graph=True)`` returns."""

    function: Any  # the user's: of a path and a value, returns a spec
    specs: Any  # a State of what it has returned


def prefix_state(x: Any) -> PrefixState | None:
    """Returns the content of what ``nnx.prefix(..., graph=True)`` made; None for anything else."""
    if not isinstance(x, extract.TreeState):
        return None
    return PrefixState(x.prefix_fn.value, x.state)


def new_variable(variable_type: type, metadata: dict[str, Any], trace_state: Any = None) -> Any:
    """Returns a plain Variable without a value; several may share the state of their trace."""
    variable: Any = object.__new__(variable_type)
    _trace.__set__(variable, trace_state or new_trace_state())
    set_metadata(variable, dict(metadata))
    set_value(variable, None)
    return variable


new_trace_state: Callable[[], Any] = private_name("flax.nnx.tracers", "TraceState")


# Slots, which run no hooks and check no trace; callers check before they write.
_value: Any = private_name("flax.nnx.variablelib", "Variable._raw_value")
_metadata: Any = private_name("flax.nnx.variablelib", "Variable._var_metadata")
_trace: Any = private_name("flax.nnx.variablelib", "Variable._trace_state")
get_value: Callable[[Any], Any] = _value.__get__
set_value: Callable[[Any, Any], None] = _value.__set__
get_metadata: Callable[[Any], dict[str, Any]] = _metadata.__get__
set_metadata: Callable[[Any, dict[str, Any]], None] = _metadata.__set__
get_trace_state: Callable[[Any], Any] = _trace.__get__

# The same for those made with ``hijax=True``.
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
    """Whether all of these trace states, of Variables or modules, belong to the current trace.

    A Variable has a ``TraceState`` of Flax, which a module has in a ``PytreeState``. It wraps JAX's
    opaque trace state, and that a weak reference to the trace. JAX makes this reference once for
    each trace, so ``is`` compares the traces.
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
        # A concrete one belongs to no trace. For a tracer of an outer trace, Flax itself raises.
        return isinstance(x, jax.core.Tracer) or trace_is_clean()
    state = getattr(x, STATE, None)  # a PytreeState, which modules and other Pytrees have
    # Nodes of other types do not know their trace, so Flax lets each trace change them.
    return state is None or bool(state.trace_state.is_valid())


def get_mapping(state: nnx.State[Any, Any]) -> Any:
    """Returns the dict with the items of an ``nnx.State``; an error if it has more attributes."""
    (mapping,) = vars(state).values()
    return mapping


def own_items(tree: Any) -> dict[Any, Any] | tuple[Any, ...] | list[Any] | None:
    """Returns the object that holds the children of a pytree: a tuple, a list, or a dict.

    A guard looks at this object in later calls, instead of flattening the pytree again. None for
    other pytrees than tuples, lists, dicts and States, and where a class flattens itself to other
    children than it holds.
    """
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None:  # a leaf
        return None
    children = list(level[0])
    # A named tuple may be registered with another flatten function, and then shows other children.
    is_named_tuple = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if type(tree) in (tuple, list) or is_named_tuple:
        return tree if _are_same(children, tree) else None
    if type(tree) is nnx.State and len(vars(tree)) == 1:  # all that it has is its mapping
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
    in_order = [mapping[key] for key in sorted(mapping)]
    return mapping if _are_same(children, in_order) else None


def has_aux(kind: type, aux: object) -> bool:
    """Whether a node of a treedef has auxiliary data other than plain keys."""
    return aux is not None and kind not in (dict, nnx.State)


def _are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


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
    """Returns Flax's settings in context, on which a trace depends: how it makes new Variables.

    These are the rules for logical axes, by which Variables are sharded, whether that is at once,
    whether Variables are hijax ones or have refs, and the modes of graphs.
    """
    return (
        tuple(map(repr, _axis_rules() or ())),
        nnx.using_eager_sharding(),
        *nnx.var_defaults().values(),
        nnx.set_graph_mode.current_value(),
        nnx.set_graph_updates.current_value(),
    )


def leave_static_cache() -> None:
    """Discards what ``nnx.cached_partial`` prepares for ``nnx.jit``, which is not used here."""
    if _graph_context is not None and _graph_context.tmp_static_cache is not None:
        _graph_context.tmp_static_cache = None
