"""All private names of JAX and Flax, and the texts of their messages that are recognized.

The rest of the package uses public names and the functions below, so a new release of either can
break this file and its test, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import flax
import jax
import jax.extend
import numpy as np
from flax import nnx
from flax.errors import TraceContextError as TraceContextError
from flax.nnx import extract, graphlib, pytreelib, variablelib
from flax.typing import HashableMapping as HashableMapping
from jax.sharding import AbstractMesh, Mesh

from ._version import __version__

F = TypeVar("F", bound=Callable[..., Any])


def _private(module: str, name: str, *, optional: bool = False) -> Any:
    """A private name; None for an optional one that is not in the installed release."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        if optional:
            return None
        raise ImportError(
            f"nnx_sharding {__version__} needs {module}.{name}, which JAX {jax.__version__} with "
            f"Flax {flax.__version__} does not have. Install a newer nnx_sharding, or earlier "
            "releases of JAX and Flax."
        ) from error


ArrayImpl: Any = _private("jax._src.array", "ArrayImpl")
IndivisibleError: Any = _private("jax._src.sharding", "IndivisibleError")
trace_is_clean: Callable[[], bool] = _private("jax._src.core", "trace_state_clean")
_trace_ctx: Any = _private("jax._src.core", "trace_ctx")
_trace_context: Any = _private("jax._src.config", "trace_context")
_trace_context_names: Any = _private("jax._src.config", "trace_context_names")
_distributed: Any = _private("jax._src.distributed", "global_state")
_ShardMapTracer: Any = _private("jax._src.shard_map", "ShardMapTracer")
# Without these: a legacy `with mesh:` is not seen; tracebacks show our frames; exported programs
# contain source locations; `nnx.cached_partial` has no cache; strategies are compared on the
# devices at hand only.
_thread_resources: Any = _private("jax._src.mesh", "thread_resources", optional=True)
_traceback_util: Any = _private("jax._src", "traceback_util", optional=True)
_frames_in_locations: Any = _private(
    "jax._src.config", "traceback_in_locations_limit", optional=True
)
_graph_context: Any = _private("flax.nnx.graphlib", "GRAPH_CONTEXT", optional=True)
_make_cpu_client: Any = _private("jaxlib.xla_client", "make_cpu_client", optional=True)


# Messages of JAX

# The event by which JAX reports each compilation to ``jax.monitoring``.
COMPILATION = "/jax/core/compile/backend_compile_duration"
# Its warning that donated buffers have another size than the new ones: they are freed.
UNUSED_DONATION = "Some donated buffers were not usable"


def is_deleted_error(error: BaseException) -> bool:
    """Whether JAX refuses to run a program because an argument was deleted, or donated twice."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" not in text and bool(re.search("deleted|donate", text))


def is_mesh_error(error: BaseException) -> bool:
    """Whether JAX refuses to trace because of a mesh, as where a function captures arrays."""
    return bool(re.search("mesh|closing over", str(error), re.IGNORECASE))


def is_timeout(error: BaseException) -> bool:
    """Whether the coordination service had no answer in time."""
    return "DEADLINE_EXCEEDED" in str(error)


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


def is_array_like(x: Any) -> bool:
    """Whether JAX takes ``x`` as an array, or as another value of a type of its own."""
    if isinstance(x, jax.Array | int | float | complex):
        return True
    if not isinstance(x, np.ndarray | np.generic) and hasattr(x, "shape") and hasattr(x, "dtype"):
        return True
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


_UNSPECIFIED: Any = inspect.signature(jax.jit).parameters["in_shardings"].default


def is_unspecified(x: Any) -> bool:
    """Whether ``x`` is JAX's default for ``in_shardings``."""
    return x is _UNSPECIFIED


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

    Attributes:
      keys: their names.
      values: their values.
      is_data: whether each is data; None where the node type leaves that to the value.
      metadata: what else belongs to the node, hashable.
    """

    keys: Sequence[Any]
    values: Sequence[Any]
    is_data: Sequence[bool | None]
    metadata: Any


def node_items(node: Any) -> NodeItems:
    """The attributes of a node."""
    if not trace_is_clean():
        _adopt_tracers(node)
    node_type = type(node)
    if nnx.Pytree in node_type.__mro__ and not getattr(node_type, "_pytree__has_int_keys", True):
        # What the general way below does for these types, several times as fast.
        own = vars(node)
        keys = sorted(own)
        values = [own[key] for key in keys]
        if not is_pytree_type(node_type):
            return NodeItems(keys, values, [None] * len(keys), node_type)
        statuses = getattr(node, STATUSES, {})
        is_data = getattr(statuses, "_mapping", statuses).get
        return NodeItems(keys, values, [is_data(key, False) for key in keys], node_type)
    impl = graphlib.get_node_impl(node)
    assert impl is not None
    items, metadata = impl.flatten(node)
    marks = {graphlib.DataElem: True, graphlib.StaticElem: False}
    pairs = [*items]
    return NodeItems(
        [key for key, _ in pairs],
        [x.value if type(x) in marks else x for _, x in pairs],
        [marks.get(type(x)) for _, x in pairs],
        metadata,
    )


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
    bases = type(node).__mro__
    if nnx.Pytree not in bases:
        return False
    own = next(vars(base)["__dict__"] for base in bases if "__dict__" in vars(base))
    return isinstance(own, types.GetSetDescriptorType) and vars(node) is get_dict(node)


def get_dict(node: Any) -> dict[str, Any]:
    """The ``__dict__`` of a node, past any ``__getattribute__`` of its class."""
    own: dict[str, Any] = object.__getattribute__(node, "__dict__")
    return own


def is_pytree_type(node_type: type) -> bool:
    """Whether JAX itself can flatten this node type (``nnx.Pytree`` with ``pytree=True``)."""
    return bool(getattr(node_type, "_pytree__is_pytree", True))


# What Flax notes on a Pytree while it is set up: a pytree without leaves, but not a constant.
_NodeState = pytreelib.PytreeState
_initializing: Any = _private("flax.nnx.pytreelib", "PytreeState._initializing")
_is_setup: Any = _private("flax.nnx.pytreelib", "PytreeState._is_setup")


def is_node_state(x: Any) -> bool:
    """Whether ``x`` is what Flax notes on a Pytree while it is set up."""
    return type(x) is _NodeState


def node_flags(state: Any) -> tuple[bool, bool]:
    """All in a node state that is part of its tree structure."""
    return _initializing.__get__(state), _is_setup.__get__(state)


def new_node_state(*flags: bool) -> Any:
    """A node state with these flags."""
    return _NodeState(*flags)


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
    return [*operations, (dict.update, own, new)]


def leave_static_cache() -> None:
    """Discards what ``nnx.cached_partial`` prepares for ``nnx.jit``, which is not used here."""
    if _graph_context is not None and _graph_context.tmp_static_cache is not None:
        _graph_context.tmp_static_cache = None


# Variables


def new_variable(variable_type: type, metadata: dict[str, Any]) -> Any:
    """A Variable of the current trace with ``metadata`` and no value yet."""
    return variable_type.from_metadata(None, metadata)  # type: ignore[attr-defined]


# Slots: no hook runs, and no trace is checked; callers check before they write.
_value: Any = _private("flax.nnx.variablelib", "Variable._raw_value")
_metadata: Any = _private("flax.nnx.variablelib", "Variable._var_metadata")
_trace: Any = _private("flax.nnx.variablelib", "Variable._trace_state")
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
        trace = state._trace_state if type(state) is _NodeState else state
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


# Modes and contexts


def graph_mode(graph: bool | None, graph_updates: bool | None) -> tuple[bool, bool]:
    """The two mode switches, with Flax's global flags for those left at None."""
    if graph is None:
        graph = nnx.set_graph_mode.current_value()
    if graph_updates is None:
        graph_updates = nnx.set_graph_updates.current_value()
    return bool(graph), bool(graph and graph_updates)


def context_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of ``jax.set_mesh``, else of the legacy ``with mesh:``, else None."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        if trace_is_clean():
            mesh = jax.sharding.get_mesh()
            if not mesh.empty:
                return mesh
        return abstract
    if _thread_resources is not None:
        legacy: Mesh = _thread_resources.env.physical_mesh
        if not legacy.empty:
            return legacy
    return None


_CONTEXT_LABELS = {
    "abstract_mesh_context_manager": "mesh in context",
    "mesh_context_manager": "mesh in context (`with mesh:`)",
    "axis_env_state": "named axes in context",
}


def trace_context() -> dict[str, Any]:
    """What in JAX's configuration and contexts a trace depends on, by a name for messages."""
    labels = (_CONTEXT_LABELS.get(name, name) for name in _trace_context_names())
    return dict(zip(labels, _trace_context(), strict=True))


def is_eager_tracer(x: Any) -> bool:
    """Whether ``x`` has the shards of an array while a ``shard_map`` runs uncompiled."""
    return isinstance(x, _ShardMapTracer)


def device_assignment(sharding: Any) -> tuple[jax.Device, ...] | None:
    """The devices of a sharding in their order; None if it has none, or does not show them."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return None
    if isinstance(sharding, jax.sharding.NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return None
    devices: tuple[jax.Device, ...] | None = getattr(sharding, "_device_assignment", None)
    return None if devices is None else tuple(devices)


def in_order_of(
    sharding: Any, other: jax.sharding.NamedSharding
) -> jax.sharding.NamedSharding | None:
    """A sharding with its devices listed in the order of another one with the same devices.

    None if a release of JAX, or the kind of sharding, cannot express it.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    order = {device: i for i, device in enumerate(other.mesh.devices.flat)}
    ids = tuple(order[device] for device in sharding.mesh.devices.flat)
    mesh = Mesh(
        other.mesh.devices.reshape(sharding.mesh.devices.shape),
        sharding.mesh.axis_names,
        axis_types=sharding.mesh.axis_types,
    )
    try:
        return jax.sharding.NamedSharding(
            mesh, sharding.spec, memory_kind=sharding.memory_kind, _logical_device_ids=ids
        )
    except TypeError:
        return None


def trace_constants() -> list[Any]:
    """The arrays that the current trace has captured, as far as JAX shows them."""
    trace = getattr(_trace_ctx, "trace", None)
    return [*getattr(getattr(trace, "frame", None), "constvar_to_val", {}).values()]


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which a value inside of ``shard_map`` is not known to be the same.

    Empty also where a release of JAX does not show them; JAX then checks them itself.
    """
    aval = jax.typeof(x)
    kind = getattr(aval, "mat", None)
    found: frozenset[Any] = getattr(kind, "vur", getattr(aval, "vma", frozenset()))
    return found


def manual_axes(mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """The axes of a mesh over which an enclosing ``shard_map`` is mapped."""
    return tuple(getattr(mesh, "manual_axes", ()))


# Exported programs


def exported_shardings(exported: jax.export.Exported) -> tuple[Sequence[Any], Sequence[Any]]:
    """The shardings of the inputs and outputs of an exported program; None for open ones.

    Each is a ``NamedSharding`` on the abstract mesh of its own, empty for one device.
    """
    no_mesh: Any = None  # which leaves the meshes as they are; JAX does not document it
    return exported.in_shardings_jax(no_mesh), exported.out_shardings_jax(no_mesh)


def no_source_locations() -> contextlib.AbstractContextManager[Any]:
    """A context in which programs are lowered without the files and lines of their sources."""
    return contextlib.nullcontext() if _frames_in_locations is None else _frames_in_locations(0)


# Processes and devices


def key_value_store() -> Any:
    """The client of the coordination service by which processes can speak; None without one."""
    return getattr(_distributed, "client", None)


@functools.lru_cache(maxsize=8)
def virtual_cpu_devices(count: int) -> list[jax.Device] | None:
    """CPU devices beside those of ``jax.devices()``; None if a release of JAX makes none."""
    if _make_cpu_client is None:
        return None
    try:
        return list(_make_cpu_client(num_devices=count).devices())
    except TypeError:
        return None


# Tracebacks


def api_boundary(function: F) -> F:
    """Marks a function as an entry from user code, where tracebacks are filtered."""
    if _traceback_util is None:
        return function
    boundary: Any = _traceback_util.api_boundary(function)
    return cast(F, functools.wraps(function)(boundary))


if _traceback_util is not None:
    _traceback_util.register_exclusion(os.path.join(str(Path(__file__).parent), ""))
