"""The one file that touches names which JAX or Flax do not document.

Everything else in the package speaks to Flax and JAX through public names or through
the functions below. A new release of either breaks this file and its test, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import re
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from flax import errors as flax_errors
from flax import nnx
from flax.nnx import graphlib, pytreelib, variablelib
from flax.typing import HashableMapping as HashableMapping
from jax.sharding import AbstractMesh, Mesh

F = TypeVar("F", bound=Callable[..., Any])

TraceContextError = flax_errors.TraceContextError


def _private(module: str, name: str) -> Any:
    """An undocumented name of JAX, or None in a release that no longer has it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


# Without these: any array takes the general path; a legacy `with mesh:` is not seen;
# tracebacks show our frames.
ArrayImpl: Any = _private("jax._src.array", "ArrayImpl")
_thread_resources: Any = _private("jax._src.mesh", "thread_resources")
_traceback_util: Any = _private("jax._src", "traceback_util")
IndivisibleError: Any = _private("jax._src.sharding", "IndivisibleError") or ValueError
_trace_state_clean: Any = _private("jax._src.core", "trace_state_clean")
_trace_context: Any = _private("jax._src.config", "trace_context")
_trace_context_names: Any = _private("jax._src.config", "trace_context_names")
_trace_ctx: Any = _private("jax._src.core", "trace_ctx")
_distributed: Any = _private("jax._src.distributed", "global_state")
_make_cpu_client: Any = _private("jaxlib.xla_client", "make_cpu_client")
_frames_in_locations: Any = _private("jax._src.config", "traceback_in_locations_limit")


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


def is_unspecified(x: Any) -> bool:
    """Whether ``x`` is what JAX writes for a sharding that nobody gave."""
    return type(x).__name__ == "UnspecifiedValue"


def prefix_state(x: Any) -> tuple[Any, Any] | None:
    """What ``nnx.prefix(..., graph=True)`` made: its function of (path, value), and a State.

    The State has the prefix at every path. None for anything else.
    """
    if type(x).__name__ != "TreeState":
        return None
    return x.prefix_fn.value, x.state


# Graph nodes

# Where a Pytree keeps which of its attributes are data, and the trace that it belongs to.
STATUSES = "_pytree__nodes"
_STATE = "_pytree__state"
_Tracer = jax.core.Tracer


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
    found = [(key, *_unwrap(value)) for key, value in items]
    return NodeItems(
        [key for key, _, _ in found],
        [value for _, value, _ in found],
        [is_data for _, _, is_data in found],
        metadata,
    )


def _unwrap(value: Any) -> tuple[Any, bool | None]:
    if isinstance(value, graphlib.DataElem):
        return value.value, True
    if isinstance(value, graphlib.StaticElem):
        return value.value, False
    return value, None


def mapping_items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """The items of one of Flax's hashable mappings, without its slow iterator."""
    items: Iterable[tuple[Any, Any]] = getattr(mapping, "_mapping", mapping).items()
    return items


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
        if isinstance(value, _Tracer) and not statuses.get(name, False)
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
_NodeState: Any = getattr(pytreelib, "PytreeState", None)
_initializing: Any = getattr(_NodeState, "_initializing", None)
_is_setup: Any = getattr(_NodeState, "_is_setup", None)
_NODE_STATE_KNOWN = hasattr(_initializing, "__get__") and hasattr(_is_setup, "__get__")


def is_node_state(x: Any) -> bool:
    """Whether ``x`` is what Flax notes on a Pytree while it is set up."""
    return _NODE_STATE_KNOWN and type(x) is _NodeState


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

    ``attributes`` makes the complete list; it is asked only by node types that can be
    rewritten as a whole and no other way.
    """
    if not isinstance(node, nnx.Pytree):
        impl = _GRAPH_NODE_TYPES[type(node)]
        return [(impl.clear, node), (impl.init, node, attributes())]
    own = vars(node)
    operations: list[tuple[Any, ...]] = [(dict.pop, own, str(key), None) for key in removed]
    new = {str(key): value for key, value in changed if key != _STATE}  # belongs to the object
    return [*operations, (dict.update, own, new)]


def leave_static_cache() -> None:
    """Takes up what ``nnx.cached_partial`` prepares for ``nnx.jit``, which has no use here."""
    context: Any = getattr(graphlib, "GRAPH_CONTEXT", None)
    if getattr(context, "tmp_static_cache", None) is not None:
        context.tmp_static_cache = None


# Variables


def new_variable(variable_type: type, metadata: dict[str, Any]) -> Any:
    """A Variable of the current trace with ``metadata`` and no value yet."""
    return variable_type.from_metadata(None, metadata)  # type: ignore[attr-defined]


_raw_value: Any = getattr(nnx.Variable, "_raw_value", None)
_raw_metadata: Any = getattr(nnx.Variable, "_var_metadata", None)

if hasattr(_raw_value, "__set__") and hasattr(_raw_metadata, "__set__"):
    # Slot descriptors: no hook runs and no trace is checked; callers check before they write.
    get_value: Callable[[Any], Any] = _raw_value.__get__
    set_value: Callable[[Any, Any], None] = _raw_value.__set__
    get_metadata: Callable[[Any], dict[str, Any]] = _raw_metadata.__get__
    set_metadata: Callable[[Any, dict[str, Any]], None] = _raw_metadata.__set__
else:

    def get_value(variable: Any) -> Any:
        return variable.get_raw_value()

    def set_value(variable: Any, value: Any) -> None:
        variable.set_raw_value(value)

    def get_metadata(variable: Any) -> dict[str, Any]:
        return dict(variable.get_metadata())

    def set_metadata(variable: Any, metadata: dict[str, Any]) -> None:
        variable.set_metadata(metadata)


# The trace that a Variable belongs to; a guard compares it by identity.
_raw_trace_state: Any = getattr(nnx.Variable, "_trace_state", None)
get_trace_state: Callable[[Any], Any] = (
    _raw_trace_state.__get__
    if hasattr(_raw_trace_state, "__set__")
    else operator.attrgetter("_trace_state")
)


# Where a guard looks by position in memory, if these are slots.
GUARDED_SLOTS = (_raw_value, _raw_metadata, _raw_trace_state, _initializing, _is_setup)


def can_update(x: Any) -> bool:
    """Whether a Variable or node belongs to the current trace and may be changed in it."""
    if isinstance(x, nnx.Variable):
        return bool(x._can_update)
    state = getattr(x, _STATE, None)
    return state is None or bool(state.trace_state.is_valid())


# Pytrees

get_mapping: Callable[[Any], dict[Any, Any]] = operator.attrgetter("_mapping")


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
    mapping = tree if type(tree) is dict else getattr(tree, "_mapping", None)
    if type(tree) not in (dict, nnx.State) or type(mapping) is not dict:
        return None
    if not {str, int}.issuperset(map(type, mapping)):
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


if _trace_state_clean is not None:

    def trace_is_clean() -> bool:
        """Whether no JAX transformation is being traced on this thread."""
        return bool(_trace_state_clean())

else:
    _TOP_LEVEL = jax.extend.core.get_opaque_trace_state(convention="nnx")

    def trace_is_clean() -> bool:
        return bool(jax.extend.core.get_opaque_trace_state(convention="nnx") == _TOP_LEVEL)


# What is told of JAX's configuration where it does not tell itself what a trace depends on.
_TRACE_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_device",
    "jax_disable_jit",
)


def trace_context() -> dict[str, Any]:
    """What in JAX's configuration and contexts a trace depends on, by name."""
    if _trace_context is not None and _trace_context_names is not None:
        names, values = tuple(_trace_context_names()), tuple(_trace_context())
        if len(names) == len(values):
            return dict(zip(names, values, strict=True))
    options = {name: getattr(jax.config, name, None) for name in _TRACE_OPTIONS}
    return {**options, "abstract_mesh_context_manager": context_mesh()}


def is_eager_tracer(x: Any) -> bool:
    """Whether ``x`` stands for the shards of an array while a ``shard_map`` runs uncompiled."""
    return type(x).__name__ == "ShardMapTracer"


def device_assignment(sharding: Any) -> tuple[jax.Device, ...] | None:
    """The devices of a sharding in their order; None if it has none, or does not tell."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return None
    if isinstance(sharding, jax.sharding.NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return None
    devices: tuple[jax.Device, ...] | None = getattr(sharding, "_device_assignment", None)
    return None if devices is None else tuple(devices)


def in_order_of(
    sharding: Any, other: jax.sharding.NamedSharding
) -> jax.sharding.NamedSharding | None:
    """The same layout as a sharding that lists its devices in the order of another one.

    The devices of both are the same. None if a release of JAX, or the kind of sharding, has no
    way to say it.
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


# The event by which JAX reports each compilation to ``jax.monitoring``.
COMPILATION = "/jax/core/compile/backend_compile_duration"


def trace_constants() -> list[Any]:
    """The arrays that the trace at hand has taken from its surroundings, as far as JAX tells."""
    trace = getattr(_trace_ctx, "trace", None)
    found: dict[Any, Any] = getattr(getattr(trace, "frame", None), "constvar_to_val", {})
    return list(found.values())


def is_deleted_error(error: BaseException) -> bool:
    """Whether JAX refuses to run a program because an argument was deleted, or donated twice."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" not in text and bool(re.search("deleted|donate", text))


# Where arrays that a function captures are in the way of JAX.
_CAPTURED = re.compile("mesh|closing over", re.IGNORECASE)


def is_captured_error(error: BaseException) -> bool:
    """Whether JAX may refuse a function because of the arrays that it captures."""
    types = (ValueError, NotImplementedError)
    return isinstance(error, types) and bool(_CAPTURED.search(str(error)))


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which a value inside of ``shard_map`` is not known to be the same.

    Empty also where a release of JAX does not tell; JAX then checks with a message of its own.
    """
    aval = jax.typeof(x)
    kind = getattr(aval, "mat", None)
    found: frozenset[Any] = getattr(kind, "vur", getattr(aval, "vma", frozenset()))
    return found


def manual_axes(mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """The axes of a mesh over which an enclosing ``shard_map`` is mapped."""
    axes: tuple[Any, ...] = getattr(mesh, "manual_axes", ())
    return axes


# Exported programs


def exported_shardings(exported: jax.export.Exported) -> tuple[Sequence[Any], Sequence[Any]]:
    """The shardings of the inputs and outputs of an exported program; None for open ones.

    Each is a ``NamedSharding`` on the abstract mesh of its own, empty for one device.
    """
    # JAX asks for a mesh to put in; without one it leaves what is there, which it does not say.
    no_mesh: Any = None
    return exported.in_shardings_jax(no_mesh), exported.out_shardings_jax(no_mesh)


def no_source_locations() -> contextlib.AbstractContextManager[Any]:
    """While it lasts, programs are lowered without the files and lines that they came from.

    Those are of this machine, and differ with whoever calls.
    """
    return contextlib.nullcontext() if _frames_in_locations is None else _frames_in_locations(0)


# Processes


def key_value_store() -> Any:
    """The client of the coordination service by which processes can speak; None without one."""
    return getattr(_distributed, "client", None)


# Devices


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
    # JAX's traceback filtering leaves out our frames, too.
    _traceback_util.register_exclusion(str(Path(__file__).parent))
