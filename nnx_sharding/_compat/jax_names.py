"""Messages, contexts, traces and processes of JAX.

A *program* (jaxpr) consists of *equations*. Each is an operation (``primitive``) with parameters,
and has a variable for each input (``invars``) and each output (``outvars``). While JAX traces, an
array is a *tracer*. The variable that stands for a tracer in the program is its ``val``, and the
equation that has made the tracer is its ``parent``.

An equation of the current trace is either *finished*, as in a jaxpr, or *unfinished*. An unfinished
equation has the tracers of its inputs, ``in_tracers``, and JAX gives it ``invars`` at the end of
the trace. JAX may hold an equation by a weak reference, and drops it if nothing uses its results.

A private name of JAX may be missing in a release. If the name is ``optional``, it is then None.
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

# Returns a number for an object, as `id` does. `id` takes seven times as long if `filelock` is
# installed: `id` raises an audit event, JAX imports `filelock`, and this has a hook in Python for
# audit events.
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
# With these, `except` catches all for which :func:`is_sharding_error` may be true.
SHARDING_OR_VALUE_ERRORS: tuple[type[Exception], ...] = (*SHARDING_ERRORS, ValueError)
JittedFunction: Any = type(jax.jit(len))  # callable from C
trace_is_clean: Callable[[], bool] = private_name("jax._src.core", "trace_state_clean")
_trace_ctx: Any = private_name("jax._src.core", "trace_ctx")
_trace_context: Any = private_name("jax._src.config", "trace_context")
_trace_context_names: Any = private_name("jax._src.config", "trace_context_names")
_distributed: Any = private_name("jax._src.distributed", "global_state")
_ShardMapTracer: Any = private_name("jax._src.shard_map", "ShardMapTracer")
# Each of these may be None. The package then works with a limit: it does not see a legacy `with
# mesh:`, tracebacks and the locations of operations show its own frames, exported programs contain
# source locations, or strategies are compared on the present devices only.
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
# The text of JAX's warning that it frees donated buffers, because new ones have other sizes.
UNUSED_DONATION = "Some donated buffers were not usable"


# JAX has no types of its own for these errors, so their texts decide.


def is_deleted_error(error: BaseException) -> bool:
    """Whether JAX refuses to run a program because an argument was deleted, or donated twice."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:  # the text may list donated buffers, but memory ran out
        return False
    return bool(re.search("deleted|donate", text))


def is_mesh_error(error: BaseException) -> bool:
    """Whether JAX refuses to trace because of a mesh, for example that of a captured array."""
    return bool(re.search("mesh|closing over", str(error), re.IGNORECASE))


def lacks_mesh_in_context(error: BaseException) -> bool:
    """Whether JAX ran one operation on its own, and asks for a mesh in context for it."""
    return "Length of device assignment" in str(error)


def is_of_stacked_key(error: BaseException) -> bool:
    """Whether several random keys were used as one."""
    return "accepts a single key" in str(error)


def is_memory_error(error: BaseException) -> bool:
    """Whether JAX refuses to compute with arrays in different memories."""
    return "memory_space of all inputs" in str(error)


def compiled_count(jitted: Any) -> int:
    """Returns how many programs JAX has compiled for calls of a jitted function."""
    return int(jitted._cache_size())


def is_sharding_error(error: BaseException) -> bool:
    """Whether JAX refuses an operation because of the types of its inputs on Explicit axes.

    That is one of ``SHARDING_ERRORS``, or its ValueError for an array that cannot be broadcast to
    an equal shape, as in ``y.at[:4].set(x)``, because the two are sharded differently.
    """
    if isinstance(error, SHARDING_ERRORS):
        return True
    match = re.search(r"input type=(\S+) and requested type=(\S+)", str(error))
    # Our own errors, which are subclasses, quote the text of JAX's.
    if match is None or type(error) is not ValueError:
        return False
    # float32[8@data,16] and float32[8,16] are of one shape.
    given, requested = (re.sub(r"@(\([^)]*\)|\w+)", "", text) for text in match.groups())
    return given == requested and match[1] != match[2]


def spec_of_constraint(error: BaseException) -> str | None:
    """Returns the spec of a constraint that JAX refuses because it names an Explicit axis.

    Returns None for any other error.
    """
    match = re.search(
        r"can only refer to Auto axes of the mesh\. Got spec=(.*?) and mesh", str(error)
    )
    return None if match is None else match[1]


def is_array_like(x: object) -> bool:
    """Whether JAX accepts ``x`` as an array, or as another value of one of its own types.

    JAX accepts arrays, tracers, abstract arrays, numbers, references and values of hijax types. It
    does not accept NumPy arrays of strings or objects.
    """
    # These types are tried first, because nearly all values are of these, and `jax.typeof` takes a
    # hundred times as long (2.5 µs).
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
    """Returns the mesh in context: of ``jax.set_mesh``, or of the legacy ``with mesh:``, or None.

    Within a trace, the mesh of ``jax.set_mesh`` is abstract.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        if trace_is_clean():  # within a trace, `get_mesh` raises an error
            mesh = jax.sharding.get_mesh()
            if not mesh.empty:  # empty if the context has an abstract mesh only
                return mesh
        return abstract
    if _thread_resources is not None:
        legacy: Mesh = _thread_resources.env.physical_mesh
        if not legacy.empty:
            return legacy
    return None


_convert_element_type: Any = private_name("jax._src.lax.lax", "_convert_element_type")


def converted(x: jax.Array, dtype: np.dtype[Any], weak_type: bool) -> jax.Array:
    """Returns an array as another dtype, perhaps weakly typed, which ``jax.lax`` cannot make."""
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
    """Returns the axes of ``spmd_axis_name`` of surrounding ``vmap``.

    A ``shard_map`` in the ``vmap`` is manual over these axes.
    """
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
    """Returns an equal sharding, on a mesh whose devices are in the order of another sharding.

    JAX compiles a program for devices in one order, and refuses arrays with another order. The
    result puts the same parts on the same devices, because private ids say which part each device
    has. With the devices [b, a] in ``sharding`` and [a, b] in ``other``, the mesh of the result is
    [a, b] and the ids are (1, 0): the first part is on the second device of the mesh.

    Args:
      sharding: the sharding.
      other: a sharding over the same devices, in the order of the program.

    Returns:
      The sharding on the other mesh; None if ``sharding`` is no ``NamedSharding`` with a concrete
      mesh, or if this release of JAX cannot express the result.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    position_of = {device: position for position, device in enumerate(other.mesh.devices.flat)}
    # For each part: the position of its device on the other mesh.
    ids = tuple(position_of[device] for device in sharding.mesh.devices.flat)
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
    """Returns the trace that operations are added to; None if this release does not show it."""
    return getattr(_trace_ctx, "trace", None)


def trace_of(x: object) -> Any:
    """Returns the trace to which an array belongs; None for an array that is not traced."""
    return getattr(x, "_trace", None)


def _frame() -> Any:
    """Returns JAX's record of the current trace; None if this release does not show it.

    The attribute ``tracing_eqns`` of the record has an entry for each equation so far, in the order
    of tracing: the equation, or a weak reference to an equation without effects.
    ``constvar_to_val`` has the arrays that the trace has captured, by the variables that stand for
    these in the program.
    """
    return getattr(current_trace(), "frame", None)


def _equation_of(entry: Any) -> Any:
    """Returns the equation of an entry of ``tracing_eqns``; None if JAX has dropped it."""
    return entry() if isinstance(entry, weakref.ref) else entry


def trace_constants() -> list[Any]:
    """Returns the arrays that the current trace has captured."""
    return [*getattr(_frame(), "constvar_to_val", {}).values()]


def operations_on_constants() -> dict[int, set[str]]:
    """Returns the names of the operations on each array that the trace has captured.

    The keys are the ids of the arrays; an array on which there are no operations is left out. An
    operation on a resharded array counts as one on the array itself, because JAX inserts the
    resharding.
    """
    captured = getattr(_frame(), "constvar_to_val", {})  # by variable: the array
    equations = trace_equations()
    operations: dict[int, set[str]] = {}
    for variable, array in captured.items():
        # The ids of the variables that stand for this array, resharded or not. One pass finds all
        # of them, because an equation comes after the equations that made its inputs.
        variable_ids = {id(variable)}
        for equation in equations:
            tracers = getattr(equation, "in_tracers", ())
            input_ids = {id(getattr(tracer, "val", None)) for tracer in tracers}
            if variable_ids.isdisjoint(input_ids):
                continue
            if str(equation.primitive) == "reshard":
                variable_ids.update(map(id, equation.outvars))
            else:
                operations.setdefault(id(array), set()).add(str(equation.primitive))
    return operations


def trace_has_effects() -> bool:
    """Whether the current trace has side effects; True if this release does not show it."""
    entries = getattr(_frame(), "tracing_eqns", None)
    if entries is None:
        return True
    # An entry that is a weak reference has no ``effects``, and its equation has none either.
    return any(getattr(entry, "effects", ()) for entry in entries)


def trace_equations() -> list[Any]:
    """Returns the equations of the current trace so far; none if this release does not show them.

    They are JAX's own objects, finished and unfinished ones.
    """
    entries: list[Any] = getattr(_frame(), "tracing_eqns", [])
    return [equation for equation in map(_equation_of, entries) if equation is not None]


def operand_types(equation: Any) -> list[Any]:
    """Returns the types of the operands of an equation, finished or unfinished."""
    tracers = getattr(equation, "in_tracers", None)  # None for a finished equation
    operands = equation.invars if tracers is None else tracers
    return [operand.aval for operand in operands]


def replace_equations(replace: Callable[[Any], tuple[Any, dict[str, Any]] | None]) -> None:
    """Gives equations of the current trace other primitives, before JAX makes a jaxpr of them.

    Args:
      replace: a function of an equation, which has the attributes ``primitive``, ``params`` and
        ``invars``. Returns the new primitive and parameters; None to leave the equation as it is.
    """
    entries: list[Any] = getattr(_frame(), "tracing_eqns", [])
    for number, entry in enumerate(entries):
        equation: Any = _equation_of(entry)
        if equation is None:  # nothing uses the results of the equation
            continue
        is_finished = not hasattr(equation, "in_tracers")
        replacement = replace(equation if is_finished else _WithInvars(equation))
        if replacement is None:
            continue
        primitive, params = replacement
        # A finished equation cannot be changed, so a new one takes its entry.
        if is_finished:
            entries[number] = equation.replace(primitive=primitive, params=params)
        else:
            equation.primitive, equation.params = primitive, params


class _WithInvars:
    """An unfinished equation, with the attributes of a finished one.

    Attributes:
      equation: JAX's equation, which has all other attributes.
      invars: the variables of the inputs.
    """

    def __init__(self, equation: Any):
        self.equation = equation
        self.invars = [tracer.val for tracer in equation.in_tracers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.equation, name)


def is_made_alike(x: object, y: object) -> bool:
    """Whether the same operations have made two arrays from the same arrays, so they are equal.

    This follows the operations of the trace back from both arrays. Where no operation of the trace
    has made an array, the two have to be the same object, or constants of NumPy with equal values.
    """
    pairs: list[tuple[Any, Any]] = [(x, y)]  # arrays that have to be alike
    # The ids of pairs that were compared. No id is used twice, because `x` and `y` lead to
    # equations that keep all of these arrays alive.
    seen = set[tuple[int, int]]()
    while pairs:
        first, second = pairs.pop()
        ids = identity(first), identity(second)
        if first is second or ids in seen:
            continue
        seen.add(ids)
        first_maker, second_maker = _maker(first), _maker(second)
        if first_maker is None or second_maker is None:
            if not _is_same_constant(first, second):
                return False
            continue
        # The two are alike if equal operations have made them of inputs that are alike.
        if not _is_same_operation(first_maker, second_maker):
            return False
        if _output_number(first) != _output_number(second):
            return False
        pairs += zip(first_maker.in_tracers, second_maker.in_tracers, strict=True)
    return True


def differentiated_value(x: Any) -> Any:
    """Returns the array whose value a tracer of a derivative has; any other value unchanged.

    Within ``jax.grad``, an argument is a new tracer, which pairs the outer array (its ``primal``)
    with a tangent. The caller needs the outer array, because it finds facts about arrays by their
    identity. Nested derivatives nest such tracers.
    """
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
        x = x.primal
    return x


def constrained_by(x: object) -> jax.sharding.Sharding | None:
    """Returns the sharding that an array got from the operation that has made it, or None.

    After a constraint, this is the sharding of the constraint. After a ``reshard`` to Auto axes, it
    is the sharding in the type of the operand, because types have no sharding over Auto axes.
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
    elif name == "jit":
        # `core.constrain` jits the constraints of several arrays. Any other `jit` is a function of
        # the user, and nothing is known about its outputs.
        jaxpr = params["jaxpr"].jaxpr
        if all(inner.primitive.name == "sharding_constraint" for inner in jaxpr.eqns):
            variable = jaxpr.outvars[_output_number(x)]  # stands for ``x`` in the jaxpr
            constraints = [inner for inner in jaxpr.eqns if variable in inner.outvars]
            sharding = constraints[0].params["sharding"] if constraints else None
    return sharding


def _maker(x: object) -> Any:
    """Returns the unfinished equation that has made an array; None if there is none."""
    equation = getattr(x, "parent", None) if isinstance(x, jax.core.Tracer) else None
    return equation if hasattr(equation, "in_tracers") else None


def _output_number(x: Any) -> int:
    """Returns which output of its equation a tracer is: 0 for the first output."""
    return next(i for i, variable in enumerate(x.parent.outvars) if variable is x.val)


def _is_same_operation(first: Any, second: Any) -> bool:
    """Whether two unfinished equations compute the same from equal inputs.

    The inputs themselves are not compared. An equation with effects equals no other one.
    """
    if first.primitive is not second.primitive or first.effects or second.effects:
        return False
    context, other_context = first.ctx, second.ctx
    params, other_params = first.params, second.params
    return (
        context.cur_abstract_mesh == other_context.cur_abstract_mesh
        # This setting decides how random bits are made.
        and context.threefry_partitionable == other_context.threefry_partitionable
        and len(first.in_tracers) == len(second.in_tracers)
        and params.keys() == other_params.keys()
        # JAX caches the jaxpr of a function in `jit`, which is then the same object.
        and all(x is other_params[name] or x == other_params[name] for name, x in params.items())
    )


def _is_same_constant(x: Any, y: Any) -> bool:
    """Whether two values are one object, or constants of NumPy with the same type and values."""
    # In a trace, JAX wraps a constant in a tracer, and `full_lower` returns the constant. For any
    # other tracer, it returns the tracer.
    if isinstance(x, jax.core.Tracer):
        x = x.full_lower()
    if isinstance(y, jax.core.Tracer):
        y = y.full_lower()
    if x is y:
        return True
    # The values of a `jax.Array` are not compared, because that would wait for a device.
    if isinstance(x, jax.Array) or isinstance(y, jax.Array) or type(x) is not type(y):
        return False
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
    axes: frozenset[Any]
    manual_type: Any = getattr(array_type, "mat", None)  # the "manual axis type" of newer releases
    if hasattr(manual_type, "vur"):
        axes = manual_type.vur
    else:  # older releases have the axes in the type of the array, or do not know them
        axes = getattr(array_type, "vma", frozenset())
    return axes


def exported_shardings(exported: jax.export.Exported) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the shardings of inputs and of outputs, on abstract meshes.

    A sharding is None if it was left to the compiler.
    """
    no_mesh: Any = None  # keeps the meshes unchanged; JAX does not document it
    return exported.in_shardings_jax(no_mesh), exported.out_shardings_jax(no_mesh)


def no_source_locations() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which programs are lowered without files and lines of their sources."""
    return contextlib.nullcontext() if _frames_in_locations is None else _frames_in_locations(0)


def process_id() -> int:
    """Returns the index of this process; unlike JAX's own function, initializes no backend."""
    return getattr(_distributed, "process_id", None) or 0


def distributed_client() -> Any:
    """Returns the client of the service that connects processes: a table that they share.

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
