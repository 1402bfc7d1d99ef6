"""Messages, contexts, traces and processes of JAX.

A *program* (jaxpr) consists of *equations*, each an operation (``primitive``) with parameters. In a
trace that has not ended, an array is a *tracer*. The equation that has made it is its ``parent``,
its variable in the program is its ``val``, and ``in_tracers`` are the arrays that an equation
takes. A finished equation has variables in their place, ``invars`` and ``outvars``. An equation of
the current trace may be of either kind; one of which JAX holds only a weak reference is gone if
nothing uses its results.

Names of JAX that are private may be missing in a release: what is ``optional`` is then None.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import flax
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .._version import __version__

F = TypeVar("F", bound=Callable[..., Any])

# A number for an object, as `id` gives it. But `id` raises an audit event, and `filelock`, which
# JAX imports where it is installed, has a hook in Python for these: they take seven times as long.
identity: Callable[[Any], int] = object.__hash__


def private_name(module: str, name: str, *, optional: bool = False) -> Any:
    """Imports a private name of JAX or Flax.

    Args:
      module: the module, such as ``jax._src.core``.
      name: the name in it, with dots for an attribute of a class.
      optional: whether the result is None if this release does not have it.

    Raises:
      ImportError: a required name is missing; it says with which releases.
    """
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


ArrayImpl: Any = private_name("jax._src.array", "ArrayImpl")
IndivisibleError: Any = private_name("jax._src.sharding", "IndivisibleError")
# What JAX raises for an operation whose output it cannot shard by the types of its inputs.
SHARDING_ERRORS: tuple[type[Exception], ...] = (
    private_name("jax._src.core", "ShardingTypeError"),
    private_name("jax._src.named_sharding", "DuplicateSpecError"),
)
JittedFunction: Any = type(jax.jit(len))  # callable from C
trace_is_clean: Callable[[], bool] = private_name("jax._src.core", "trace_state_clean")
_trace_ctx: Any = private_name("jax._src.core", "trace_ctx")
_trace_context: Any = private_name("jax._src.config", "trace_context")
_trace_context_names: Any = private_name("jax._src.config", "trace_context_names")
_distributed: Any = private_name("jax._src.distributed", "global_state")
_ShardMapTracer: Any = private_name("jax._src.shard_map", "ShardMapTracer")
# Without these, a legacy `with mesh:` is not seen, tracebacks and the locations of operations show
# our frames, exported programs contain source locations, and strategies are compared only on the
# present devices.
_thread_resources: Any = private_name("jax._src.mesh", "thread_resources", optional=True)
_traceback_util: Any = private_name("jax._src", "traceback_util", optional=True)
source_info_util: Any = private_name("jax._src", "source_info_util", optional=True)
_frames_in_locations: Any = private_name(
    "jax._src.config", "traceback_in_locations_limit", optional=True
)
_make_cpu_client: Any = private_name("jaxlib.xla_client", "make_cpu_client", optional=True)


# The events by which JAX reports to ``jax.monitoring`` the phases of each compilation, and hits of
# its persistent cache.
TRACING = "/jax/core/compile/jaxpr_trace_duration"
LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILATION = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
# JAX's warning that the sizes of donated buffers differ from the new ones: they are freed.
UNUSED_DONATION = "Some donated buffers were not usable"


# JAX has no types of its own for these errors, so their texts decide.


def is_deleted_error(error: BaseException) -> bool:
    """Whether JAX refuses to run a program because an argument was deleted, or donated twice."""
    text = str(error)  # when memory runs out, it may list donated buffers
    return "RESOURCE_EXHAUSTED" not in text and bool(re.search("deleted|donate", text))


def is_mesh_error(error: BaseException) -> bool:
    """Whether JAX refuses to trace because of a mesh, as where a function captures arrays."""
    return bool(re.search("mesh|closing over", str(error), re.IGNORECASE))


def is_of_stacked_key(error: BaseException) -> bool:
    """Whether several random keys were used as one."""
    return "accepts a single key" in str(error)


def is_memory_error(error: BaseException) -> bool:
    """Whether JAX refuses to compute with arrays in different memories."""
    return "memory_space of all inputs" in str(error)


def compiled_count(jitted: Any) -> int:
    """Returns how many programs JAX has compiled for calls of what ``jax.jit`` returned."""
    return int(jitted._cache_size())


def spec_of_constraint(error: BaseException) -> str | None:
    """Returns the spec of a constraint that JAX refuses for Explicit axes in it; else None."""
    match = re.search(
        r"can only refer to Auto axes of the mesh\. Got spec=(.*?) and mesh", str(error)
    )
    return match and match[1]


def is_array_like(x: object) -> bool:
    """Whether JAX accepts ``x`` as an array, or as another value of one of its own types.

    That is so for arrays and tracers, abstract arrays, numbers, references, and values of hijax
    types, but not for NumPy arrays of strings or objects.
    """
    # Nearly all are of these types; `jax.typeof` takes a hundred times as long (2.5 µs).
    if type(x) is ArrayImpl or isinstance(x, (jax.Array, int, float, complex)):
        return True
    # Variables and arrays of other libraries are not passed to `jax.typeof`, because it would raise
    # other errors than a TypeError.
    if not isinstance(x, np.ndarray | np.generic) and hasattr(x, "shape") and hasattr(x, "dtype"):
        return True
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


_UNSPECIFIED: Any = inspect.signature(jax.jit).parameters["in_shardings"].default


def is_unspecified(x: object) -> bool:
    """Whether ``x`` is JAX's default for ``in_shardings``."""
    return x is _UNSPECIFIED


def context_mesh() -> Mesh | AbstractMesh | None:
    """Returns the mesh of ``jax.set_mesh``, else of the legacy ``with mesh:``, else None."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        if trace_is_clean():  # in a trace, JAX does not give the mesh with devices
            mesh = jax.sharding.get_mesh()
            if not mesh.empty:
                return mesh
        return abstract
    if _thread_resources is not None:
        legacy: Mesh = _thread_resources.env.physical_mesh
        if not legacy.empty:
            return legacy
    return None


_convert_element_type: Any = private_name("jax._src.lax.lax", "_convert_element_type")


def converted(x: jax.Array, dtype: np.dtype[Any], weak_type: bool) -> jax.Array:
    """Returns an array of another dtype; ``jax.lax`` cannot make a weakly typed one."""
    array: jax.Array = _convert_element_type(x, dtype, weak_type=weak_type)
    return array


_CONTEXT_LABELS = {
    "abstract_mesh_context_manager": "mesh in context",
    "mesh_context_manager": "mesh in context (`with mesh:`)",
    "axis_env_state": "named axes in context",
}


# JAX's configuration and contexts on which a trace depends, as one value.
context_key: Callable[[], Any] = _trace_context


def trace_context() -> dict[str, Any]:
    """Returns the parts of JAX's configuration and contexts on which a trace depends, by name."""
    labels = (_CONTEXT_LABELS.get(name, name) for name in _trace_context_names())
    return dict(zip(labels, _trace_context(), strict=True))


# Returns what surrounding transforms such as `vmap` map: names, sizes and mesh axes.
_axis_env: Any = private_name("jax._src.core", "get_axis_env")


def spmd_axes() -> frozenset[Any]:
    """Returns the ``spmd_axis_name`` of surrounding ``vmap``: a ``shard_map`` is manual over it."""
    axes: frozenset[Any] = _axis_env().spmd_axis_names
    return axes


def mapped_axes() -> frozenset[Any]:
    """Returns the mesh axes that surrounding ``vmap`` have taken.

    These are their ``spmd_axis_name``, and the Explicit axes over which mapped arrays are sharded.
    JAX puts them in front of the spec of each constraint within the ``vmap``, so such a spec must
    not name them.
    """
    env = _axis_env()
    axes: frozenset[Any] = env.spmd_axis_names | env.explicit_mesh_axis_names
    return axes


def is_eager_tracer(x: object) -> bool:
    """Whether ``x`` has the shards of an array while a ``shard_map`` runs uncompiled."""
    return isinstance(x, _ShardMapTracer)


def device_assignment(sharding: Any) -> tuple[jax.Device, ...] | None:
    """Returns the devices of a sharding in the order for which JAX compiles; None without any.

    A sharding on an abstract mesh has none. A class of sharding that another library defines may
    not have JAX's private attribute, and then also gives None.
    """
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    if is_named and not isinstance(sharding.mesh, Mesh):  # the attribute below would raise an error
        return None
    devices = getattr(sharding, "_device_assignment", None)
    return None if devices is None else tuple(devices)


def in_order_of(
    sharding: jax.sharding.Sharding, other: jax.sharding.NamedSharding
) -> jax.sharding.NamedSharding | None:
    """Rewrites a sharding on a mesh whose devices are in the order of another sharding.

    JAX compiles a program for devices in one order, and refuses arrays with another one. The result
    puts the same parts on the same devices: its mesh has them in the other order, and private ids
    say which part each of them has. With devices [b, a] here and [a, b] in ``other``, the mesh is
    [a, b] and the ids are (1, 0): the first part is on the second device of the mesh.

    Args:
      sharding: the sharding.
      other: a sharding over the same devices, in the order of the program. Other devices are a
        ``KeyError``.

    Returns:
      The sharding; None if this release of JAX cannot express it.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    # ids[i] is the position, on the mesh of the program, of the device that has part i.
    position = {device: i for i, device in enumerate(other.mesh.devices.flat)}
    ids = tuple(position[device] for device in sharding.mesh.devices.flat)
    mesh = Mesh(
        other.mesh.devices.reshape(sharding.mesh.devices.shape),
        sharding.mesh.axis_names,
        axis_types=sharding.mesh.axis_types,
    )
    try:
        return jax.sharding.NamedSharding(
            mesh, sharding.spec, memory_kind=sharding.memory_kind, _logical_device_ids=ids
        )
    except TypeError:  # a release without this private parameter
        return None


def current_trace() -> Any:
    """Returns the trace that operations are added to; None where a release does not show it."""
    return getattr(_trace_ctx, "trace", None)


def trace_of(x: object) -> Any:
    """Returns the trace to which an array belongs; None for an array that is not traced."""
    return getattr(x, "_trace", None)


def _frame() -> Any:
    """Returns JAX's record of the current trace; None where a release does not show it.

    Its ``tracing_eqns`` are the equations so far, in the order of tracing; JAX may hold those
    without effects by weak references. ``constvar_to_val`` has the arrays that the trace has
    captured, by the variables that stand for them in the program.
    """
    return getattr(current_trace(), "frame", None)


def trace_constants() -> list[Any]:
    """Returns the arrays that the current trace has captured."""
    return [*getattr(_frame(), "constvar_to_val", {}).values()]


def operations_on_constants() -> dict[int, set[str]]:
    """Returns the names of the operations on each array that the trace has captured, by its id.

    An error about a captured array uses the names to say what was computed with the array.
    Operations on a resharded array count as operations on the array itself, because JAX inserts the
    resharding.
    """
    captured = getattr(_frame(), "constvar_to_val", {})  # variable of the program → array
    equations = trace_equations()
    operations: dict[int, set[str]] = {}
    for variable, array in captured.items():
        # The ids of the variables that stand for this array, resharded or not. One pass finds all
        # of them, because an equation comes after the equations that made its inputs.
        ids = {id(variable)}
        for equation in equations:
            # A tracer has its variable in `val`.
            inputs = getattr(equation, "in_tracers", ())
            if ids.isdisjoint(id(getattr(tracer, "val", None)) for tracer in inputs):
                continue
            if str(equation.primitive) == "reshard":
                ids |= set(map(id, equation.outvars))
            else:
                operations.setdefault(id(array), set()).add(str(equation.primitive))
    return operations


def trace_has_effects() -> bool:
    """Whether the current trace has side effects."""
    equations = getattr(_frame(), "tracing_eqns", None)
    # Some entries may be weak references, but JAX holds equations with effects directly.
    return equations is None or any(getattr(equation, "effects", ()) for equation in equations)


def trace_equations() -> list[Any]:
    """Returns the equations of the current trace so far; none where a release does not show them.

    They are JAX's own objects. Some are equations of a jaxpr, with ``invars``. The others, which
    JAX finishes at the end of the trace, have ``in_tracers`` in their place: `operand_types` reads
    either.
    """
    entries: list[Any] = getattr(_frame(), "tracing_eqns", [])
    equations = (entry() if isinstance(entry, weakref.ref) else entry for entry in entries)
    # None for an equation that JAX has dropped, because nothing holds its results any more.
    return [equation for equation in equations if equation is not None]


def operand_types(equation: Any) -> list[Any]:
    """Returns the types of the operands of an equation, of a jaxpr or of an unfinished trace."""
    # Some equations of a trace are final (of a jaxpr); others change until it ends.
    operands = getattr(equation, "in_tracers", None)
    return [x.aval for x in (equation.invars if operands is None else operands)]


def replace_equations(replace: Callable[[Any], tuple[Any, dict[str, Any]] | None]) -> None:
    """Gives equations of the current trace other primitives, before JAX makes a jaxpr of them.

    Args:
      replace: is asked for each equation, which has the attributes ``primitive``, ``params`` and
        ``invars`` of one in a jaxpr. It returns the new primitive and parameters; None to leave the
        equation as it is.
    """
    entries: list[Any] = getattr(_frame(), "tracing_eqns", [])
    for number, entry in enumerate(entries):
        equation: Any = entry() if isinstance(entry, weakref.ref) else entry
        if equation is None:  # JAX has dropped it, because nothing holds its results any more
            continue
        # Some equations are final (of a jaxpr). Others have tracers instead of `invars`.
        is_final = not hasattr(equation, "in_tracers")
        replacement = replace(equation if is_final else _Equation(equation))
        if replacement is None:
            continue
        primitive, params = replacement
        # A final equation cannot be changed, so another one takes its place.
        if is_final:
            entries[number] = equation.replace(primitive=primitive, params=params)
        else:
            equation.primitive, equation.params = primitive, params


class _Equation:
    """An equation of an unfinished trace, with the attributes of an equation of a jaxpr.

    Attributes:
      equation: JAX's equation, which has all other attributes.
      invars: the variables of its inputs in the program.
    """

    def __init__(self, equation: Any):
        self.equation = equation
        self.invars = [tracer.val for tracer in equation.in_tracers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.equation, name)


def is_made_alike(x: object, y: object) -> bool:
    """Whether the same operations have made two arrays from the same arrays, so they are equal.

    The operations of the trace are followed back to arrays that both share. Constants of NumPy are
    the same if their values are. All other arrays, such as arrays that a transform differentiates,
    are compared by identity.
    """
    pairs: list[tuple[Any, Any]] = [(x, y)]  # arrays that have to be alike
    # The ids of pairs that were compared. All of these arrays are inputs of equations that `x` and
    # `y` lead to, which keep them alive, so no id is used twice.
    seen = set[tuple[int, int]]()
    while pairs:
        x, y = pairs.pop()
        if x is y or (identity(x), identity(y)) in seen:
            continue
        seen.add((identity(x), identity(y)))
        x_maker, y_maker = _maker(x), _maker(y)  # None for what no operation of the trace has made
        if x_maker is None or y_maker is None:
            if not _is_same_constant(x, y):
                return False
            continue
        # The same primitive with equal parameters; their inputs are compared next.
        if not _is_same_operation(x_maker, y_maker):
            return False
        if _output_number(x) != _output_number(y):  # other results of equal operations
            return False
        pairs += zip(x_maker.in_tracers, y_maker.in_tracers, strict=True)
    return True


def differentiated_value(x: Any) -> Any:
    """Returns the array whose value a tracer of a derivative has, such as an argument; else ``x``.

    Within ``jax.grad``, an argument is a new tracer that pairs the outer array, its ``primal``,
    with a tangent. What is known of the outer array is found by its identity.
    """
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):  # one for each nested derivative
        x = x.primal
    return x


def constrained_by(x: object) -> jax.sharding.Sharding | None:
    """Returns the sharding that an array was given by the operation that has made it, or None.

    That is the sharding of a constraint; or, of an array that a ``reshard`` has brought to Auto
    axes, the one in its type before: on Auto axes, types say nothing of the sharding.
    """
    equation = _maker(x)
    if equation is None:
        return None
    sharding: jax.sharding.Sharding | None = None
    name, params = equation.primitive.name, equation.params
    if name == "reshard":
        sharding = jax.typeof(equation.in_tracers[0]).sharding
    elif name == "sharding_constraint":
        sharding = params["sharding"]
    elif name == "jit":  # `core.constrain` compiles constraints, of several arrays together
        jaxpr = params["jaxpr"].jaxpr
        # Any other `jit` is a function of the user: its outputs are what it has computed.
        if all(inner.primitive.name == "sharding_constraint" for inner in jaxpr.eqns):
            output = jaxpr.outvars[_output_number(x)]  # the variable in `jit` that `x` comes from
            makers = [inner for inner in jaxpr.eqns if output in inner.outvars]
            sharding = makers[0].params["sharding"] if makers else None
    return sharding


def _maker(x: object) -> Any:
    """Returns the equation of an unfinished trace that has made an array; None without any."""
    equation = getattr(x, "parent", None) if isinstance(x, jax.core.Tracer) else None
    return equation if hasattr(equation, "in_tracers") else None


def _output_number(x: Any) -> int:
    """Returns which output of its equation a tracer is: 0 for the first one."""
    return next(i for i, variable in enumerate(x.parent.outvars) if variable is x.val)


def _is_same_operation(first: Any, second: Any) -> bool:
    """Whether two equations of an unfinished trace compute the same from equal inputs.

    The inputs themselves are not compared. An equation with effects equals no other one.
    """
    if first.primitive is not second.primitive or first.effects or second.effects:
        return False
    context, other_context = first.ctx, second.ctx
    params, other_params = first.params, second.params
    return (
        context.cur_abstract_mesh == other_context.cur_abstract_mesh
        # How random bits are made.
        and context.threefry_partitionable == other_context.threefry_partitionable
        and len(first.in_tracers) == len(second.in_tracers)
        and params.keys() == other_params.keys()
        # JAX caches the jaxpr of a function in `jit`, which is then the same object.
        and all(x is other_params[name] or x == other_params[name] for name, x in params.items())
    )


def _is_same_constant(x: Any, y: Any) -> bool:
    """Whether two constants of NumPy, perhaps in a trace, have the same type and values."""
    # In a trace, JAX wraps a constant in a tracer. Its `full_lower` returns the constant; that of
    # any other tracer returns the tracer.
    x, y = (c.full_lower() if isinstance(c, jax.core.Tracer) else c for c in (x, y))
    if x is y:
        return True
    if any(isinstance(c, jax.Array) for c in (x, y)) or type(x) is not type(y):
        return False  # to compare arrays on devices would wait for them
    return bool(np.array_equal(x, y)) and np.asarray(x).dtype == np.asarray(y).dtype


def varies_in_vmap(x: Any) -> bool:
    """Whether a value may differ between the elements of the innermost ``vmap``."""
    return getattr(x, "batch_dim", None) is not None and trace_of(x) is current_trace()


def direct_form(stage: Any) -> Any:
    """Returns the function in C that a compiled stage has after its first call; else the stage."""
    return getattr(stage, "_call", None) or stage


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mesh axes along which a value in ``shard_map`` may differ; none if unknown."""
    array_type = jax.typeof(x)
    # Newer releases have them in `mat`, the "manual axis type", as `vur`. Others have them in the
    # type of the array, as `vma`, or do not know them.
    manual_type = getattr(array_type, "mat", None)
    older_axes: frozenset[Any] = getattr(array_type, "vma", frozenset())
    axes: frozenset[Any] = getattr(manual_type, "vur", older_axes)
    return axes


def exported_shardings(exported: jax.export.Exported) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the shardings of inputs and outputs, on abstract meshes; None for open ones."""
    no_mesh: Any = None  # keeps the meshes unchanged; JAX does not document it
    return exported.in_shardings_jax(no_mesh), exported.out_shardings_jax(no_mesh)


def no_source_locations() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which programs are lowered without files and lines of their sources."""
    return contextlib.nullcontext() if _frames_in_locations is None else _frames_in_locations(0)


def process_id() -> int:
    """Returns the index of this process; unlike JAX's own function, initializes no backend."""
    return getattr(_distributed, "process_id", None) or 0


def distributed_client() -> Any:
    """Returns the client of the service that connects processes, where they share keys and values.

    Raises:
      RuntimeError: ``jax.distributed.initialize()`` was not called.
    """
    if _distributed.client is None:
        raise RuntimeError("several processes need jax.distributed.initialize()")
    return _distributed.client


def is_timeout(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether an error of the service says that a key was not set in time."""
    return "DEADLINE_EXCEEDED" in str(error)


@functools.lru_cache(maxsize=8)
def virtual_cpu_devices(count: int) -> list[jax.Device] | None:
    """Returns CPU devices in addition to ``jax.devices()``; None if JAX cannot make them.

    They are for meshes with more devices than this machine has.
    """
    if _make_cpu_client is None:  # a private function that this release does not have
        return None
    try:
        return list(_make_cpu_client(num_devices=count).devices())
    except TypeError:  # in this release, it has other parameters
        return None


def api_boundary(function: F) -> F:
    """Marks a function as an entry from user code, where tracebacks are filtered."""
    if _traceback_util is None:
        return function
    boundary: Any = _traceback_util.api_boundary(function)
    return cast(F, functools.wraps(function)(boundary))


for _module in filter(None, (_traceback_util, source_info_util)):
    _module.register_exclusion(f"{Path(__file__).parent.parent}/")
