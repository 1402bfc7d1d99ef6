"""The caller of a trace: what a trace needs of its call, and who observes it.

JAX calls a pure function with arrays only when it traces. The trace needs more, such as the user's
function and objects, and the call stores that in ``CALLER`` before, for its thread. JAX also
reports the phases of each compilation here (``jax.monitoring``). They are attributed to the call,
logged, and passed on to its observer.

A `Plan` (``plan.py``) is what a function needs to know of one structure of arguments, such as
specs and names. While JAX compiles for a plan, ``plan.reported`` has what JAX reported so far, by
the name of the event: the seconds of each phase, and 1 for a hit of the persistent cache.
``plan.fun()`` returns the user's function, or None once the function is gone. ``plan.programs`` has
the programs of the plan; ``top_level`` of each is what a call executes outside of a trace.

Between a compilation with donated arrays and the write-back, signals are deferred
(``defer_signals``), and the call delivers them at its end. ``defer_signals`` does nothing if
signals are deferred already.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import _compat
from ..errors import ShardingWarning, warn_or_raise
from ..specs.types import AnyMesh, Arrays, Objects
from .functions import qualified_name_of
from .interrupts import defer_signals, unmark_direct

if TYPE_CHECKING:  # these import modules that import this one
    from ..diagnostics.retraces import Observer
    from .plan import Plan


class Caller(NamedTuple):
    """The call in which a trace is made.

    A plan also serves equal functions and equal static objects, but a trace must get the function
    and the objects of its own call.
    """

    fun: Any  # the user's function; None when a program is compiled that was traced before
    objects: Objects  # the objects of the arguments, by index
    observer: Observer | None = None  # is notified of traces and compilations
    nested: bool = False  # whether the call is part of a trace
    plan: Plan | None = None  # the plan, if JAX may compile for it; None within a trace
    leaves: Arrays = ()  # the arrays of a call at top level


class _Current(threading.local):
    """The call in which this thread makes a trace."""

    # The fields of a `Caller`, in a plain tuple for speed. None while a function is traced.
    fields: tuple[Any, ...] | None = None


CALLER = _Current()  # a context variable is not used, because its changes slow down other ones


def current_caller() -> Caller | None:
    """Returns the call to which a trace belongs; None if nothing is traced for a call."""
    fields = CALLER.fields
    return None if fields is None else Caller(*fields)


@contextlib.contextmanager
def called_by(caller: Caller | None) -> Iterator[None]:
    """Attributes traces within the block to this call; to none if ``caller`` is None."""
    outer_fields = CALLER.fields
    CALLER.fields = caller
    try:
        yield
    finally:
        CALLER.fields = outer_fields


_LOGGER = logging.getLogger("nnx_sharding")


def _on_event(event: str, **_: object) -> None:
    """Records for the plan of the current call that its program was in JAX's persistent cache.

    JAX calls this for every event; ``event`` is its name.
    """
    if event != _compat.CACHE_HIT:
        return
    caller = current_caller()
    if caller is not None and caller.plan is not None:
        caller.plan.reported[event] = 1  # any number: only the key matters


def _on_duration(event: str, duration_secs: float, **details: object) -> None:
    """Records for the plan of the current call how long a phase of its compilation took.

    JAX reports each phase when it ends, in the thread that compiles: tracing, lowering, and last
    the compilation proper.
    """
    if event not in (_compat.TRACING, _compat.LOWERING, _compat.COMPILATION):
        return
    caller = current_caller()
    if caller is None or caller.plan is None:
        return
    plan = caller.plan
    # JAX reports the name of the function. Programs that move arguments to their shardings have
    # other names, and are not counted, though JAX compiles these in the same call.
    if details.get("fun_name") not in (plan.fun_name, f"jit({plan.fun_name})"):
        return
    plan.reported[event] = duration_secs
    if event == _compat.LOWERING:
        # JAX asks its cache after lowering: an earlier hit was for a program that moves arguments.
        plan.reported.pop(_compat.CACHE_HIT, None)
    if event == _compat.COMPILATION:
        _after_compilation(plan, caller)


def _after_compilation(plan: Plan, caller: Caller) -> None:
    """Tells the log and the observer of a call that its program has just been compiled.

    JAX runs the program next. If the program deletes arrays of the caller, this defers signals, and
    the call delivers them when the new arrays are written back. Also removes the mark ``DIRECT``
    from the programs of the plan, and warns of the persistent cache on CPUs.
    """
    _warn_of_cache(plan, caller.leaves)
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info("%s", _compilation_text(plan, caller.leaves))
    plan.reported.clear()  # a later compilation may be for arrays of other shapes
    # The new program may run Python code, and its first outputs show that. A call in C does not
    # look at the outputs if no signals are deferred: in other threads than the main one, or if no
    # signal has a handler in Python yet. So without the mark, the next call is one in Python.
    for program in [*plan.programs.values()]:
        unmark_direct(program.top_level)
    # A signal before the new arrays are written back would lose the model. A program that is only
    # compiled, by `lower(...).compile()`, is not run, and its caller has no function.
    if plan.donated and caller.fun is not None:
        defer_signals()
    if caller.observer is not None:
        caller.observer.compiled(plan, caller.leaves)


def _compilation_text(plan: Plan, leaves: Arrays) -> str:
    """Returns a line for the log: ``step for 8 devices ('data': 8): traced in 0.10 s, …``.

    ``leaves`` are the arrays of the call. They show the devices if no sharding is declared.
    """
    fun = plan.fun()  # None once the function is gone
    name = plan.fun_name if fun is None else qualified_name_of(fun)
    count, mesh = _devices_of(plan, leaves)
    devices = "1 device" if count == 1 else f"{count} devices"
    if mesh is not None and mesh.shape:
        devices += f" ({', '.join(f'{axis!r}: {size}' for axis, size in mesh.shape.items())})"
    phases = (_compat.TRACING, _compat.LOWERING, _compat.COMPILATION)
    traced, lowered, compiled = (plan.reported.get(phase, 0.0) for phase in phases)  # seconds
    if _compat.CACHE_HIT in plan.reported:
        cache = ", persistent cache: hit"
    elif jax.config.jax_compilation_cache_dir:
        cache = ", persistent cache: miss"
    else:  # there is no cache
        cache = ""
    return (
        f"{name} for {devices}: traced in {traced:.2f} s, lowered in {lowered:.2f} s, "
        f"compiled in {compiled:.2f} s{cache}"
    )


def _devices_of(plan: Plan, leaves: Arrays) -> tuple[int, AnyMesh | None]:
    """Returns the number of devices that a program is for, and their mesh or None.

    The mesh is that of the transform, of a declared sharding, or of an array. The first one counts,
    because JAX compiles a program for one set of devices, so all meshes have the same devices.
    """
    shardings = [*plan.shardings, *(getattr(leaf, "sharding", None) for leaf in leaves)]
    meshes = [plan.transform.context, *(getattr(sharding, "mesh", None) for sharding in shardings)]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is not None:
        return mesh.size, mesh  # an abstract mesh has no devices, but a size
    counts = [len(sharding.device_set) for sharding in shardings if sharding is not None]
    # A function without any array, such as one that makes arrays, runs on the default device.
    return max(counts, default=1), None


class CacheNotice:
    """The warning of the persistent cache, which a process gives once.

    tests/test_cached_collectives.py fails when a release of jaxlib no longer needs the warning.
    """

    is_due = True  # False once the warning was given


def _warn_of_cache(plan: Plan, leaves: Arrays) -> None:
    """Warns that programs for several CPU devices may fail when they come from JAX's cache.

    The warning is given even if this program did not come from the cache, because it may be read
    from there later. The fault is in jaxlib; `CacheNotice` names the test that says when it is
    mended. Does nothing if the cache is off, on other platforms, or for one device.
    """
    cache_is_on = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    if not (CacheNotice.is_due and cache_is_on and jax.default_backend() == "cpu"):
        return
    count, _ = _devices_of(plan, leaves)
    if count > 1:
        CacheNotice.is_due = False
        warn_or_raise(
            ShardingWarning,
            f"{plan.transform.name}: {plan.fun_name} is compiled for {count} CPU devices while "
            "JAX's persistent compilation cache is on.\nBy a fault of jaxlib, such programs may "
            "hang, crash or return wrong numbers when they are read back from the cache, also in a "
            "later process.\n"
            "Turn it off: jax.config.update('jax_enable_compilation_cache', False), or "
            "use one device.",
            strict=False,
            anchor="cached-programs-for-several-cpu-devices",
        )


jax.monitoring.register_event_listener(_on_event)
jax.monitoring.register_event_duration_secs_listener(_on_duration)
