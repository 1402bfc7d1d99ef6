"""Nodes, Variables and modes of Flax."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend
from flax import nnx
from flax.errors import TraceContextError as TraceContextError
from flax.nnx import extract, pytreelib, variablelib

from .flax_nodes import GRAPH_NODE_TYPES, STATE, initializing, is_setup
from .jax_names import ArrayImpl, private_name, trace_is_clean

# Without this, `nnx.cached_partial` has no cache.
_graph_context: Any = private_name("flax.nnx.graphlib", "GRAPH_CONTEXT", optional=True)


def is_node(x: Any) -> bool:
    """Whether ``x`` is a module or another object registered as an NNX graph node."""
    return type(x) in GRAPH_NODE_TYPES


def is_variable(x: Any) -> bool:
    """Whether ``x`` is a Variable whose value lives in the Python object, not a hijax one."""
    return nnx.Variable in type(x).__mro__


def is_graph_object(x: Any) -> bool:
    """Whether ``x`` has an identity that the graph keeps: a node or a Variable."""
    return type(x) in GRAPH_NODE_TYPES or nnx.Variable in type(x).__mro__


def is_plain_array(x: Any) -> bool:
    """Whether ``x`` is an array of JAX, concrete or traced, and neither a ref nor a Variable."""
    kind = type(x)
    traced = issubclass(kind, jax.core.Tracer) and type(x.aval) is jax.core.ShapedArray
    return kind is ArrayImpl or traced


def is_ref(x: Any) -> bool:
    """Whether ``x`` is a ``jax.Ref``, concrete or traced."""
    return not is_plain_array(x) and variablelib.is_array_ref(x)


def is_hijax_variable(x: Any) -> bool:
    """Whether ``x`` is a Variable made with ``hijax=True``, concrete or traced."""
    is_traced = isinstance(x, jax.core.Tracer) and isinstance(x, variablelib.HijaxVariable)
    return is_concrete_hijax(x) or is_traced


def is_concrete_hijax(x: Any) -> bool:
    """Whether ``x`` is a Variable made with ``hijax=True`` that is not traced."""
    return type(x) is variablelib.HijaxVariable


def plain_variable(x: Any) -> Any:
    """A Variable made with ``hijax=True`` as a plain one; any other Variable unchanged."""
    if is_variable(x):
        return x
    if is_concrete_hijax(x):
        return jax.tree.unflatten(get_treedef(x), get_leaves(x))
    variable = new_variable(x.type, x.get_metadata())
    set_value(variable, x.get_raw_value())
    return variable


def variable_operations(
    variable: Any, value: Any, metadata: dict[str, Any] | None
) -> list[tuple[Any, ...]]:
    """The calls that give a Variable a value, and metadata unless they are None.

    They run no Python code, except where the Variable is a traced one made with ``hijax=True``.
    """
    if is_concrete_hijax(variable):
        plain, treedef = plain_variable(variable), get_treedef(variable)
        new = new_variable(type(plain), get_metadata(plain) if metadata is None else metadata)
        set_value(new, value)
        leaves, new_treedef = jax.tree.flatten(new)
        operations: list[tuple[Any, ...]] = [(set_leaves, variable, tuple(leaves))]
        if metadata is not None or new_treedef != treedef:  # a guard knows the old one
            operations.append((set_treedef, variable, new_treedef))
        return operations
    if is_variable(variable):
        operations = [(set_value, variable, value), (set_metadata, variable, metadata)]
    else:
        operations = [(variable.set_raw_value, value), (variable.set_metadata, metadata)]
    return operations[: 1 if metadata is None else 2]


def prefix_state(x: Any) -> tuple[Any, Any] | None:
    """The function of (path, value) and the State of ``nnx.prefix(..., graph=True)``, or None."""
    return (x.prefix_fn.value, x.state) if isinstance(x, extract.TreeState) else None


def new_variable(variable_type: type, metadata: dict[str, Any], trace_state: Any = None) -> Any:
    """A plain Variable without a value; several may share the state of their trace, for speed."""
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
    """Whether all of these trace states, of Variables or modules, belong to the current trace."""
    current = jax.extend.core.get_opaque_trace_state()._trace_ref
    for state in states:
        trace = state._trace_state if type(state) is pytreelib.PytreeState else state
        if trace._jax_trace._trace_ref is not current:
            return False
    return True


def can_update(x: Any) -> bool:
    """Whether a Variable or node belongs to the current trace and may be changed in it."""
    if is_variable(x):
        return bool(x._can_update)
    if is_hijax_variable(x):  # a traced one was made in the trace, or Flax refuses to change it
        return isinstance(x, jax.core.Tracer) or trace_is_clean()
    state = getattr(x, STATE, None)
    return state is None or bool(state.trace_state.is_valid())


def get_mapping(state: Any) -> Any:
    """The dict in which an ``nnx.State`` has its items; an error if it has other attributes."""
    (mapping,) = vars(state).values()
    return mapping


def own_items(tree: Any) -> dict[Any, Any] | tuple[Any, ...] | list[Any] | None:
    """The items of a pytree, a mapping or a sequence; None if its class decides on its children."""
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None:
        return None
    children = list(level[0])
    if type(tree) in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        return tree if _are_same(children, tree) else None
    if type(tree) is not dict and (type(tree) is not nnx.State or len(vars(tree)) != 1):
        return None
    mapping = tree if type(tree) is dict else get_mapping(tree)
    if type(mapping) is not dict or not {str, int}.issuperset(map(type, mapping)):
        return None  # other keys may be equal without being the same
    return mapping if _are_same(children, [mapping[key] for key in sorted(mapping)]) else None


def has_aux(kind: type, aux: Any) -> bool:
    """Whether a node of a treedef has auxiliary data other than plain keys."""
    return aux is not None and kind not in (dict, nnx.State)


def _are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


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
