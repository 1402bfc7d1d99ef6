"""Explains errors of JAX in terms of the user's arguments.

Nothing here runs before JAX has refused a call. If the arguments show the reason (``checks.py``),
the user gets an error that names the arguments. Otherwise JAX's error is kept, with a note if the
function captures something, or if arguments are in host memory.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .. import _compat
from ..errors import NoMeshError
from ..specs.paths import path_string
from ..specs.types import Arrays
from .checks import first_mistake
from .declared import note_host_arrays
from .functions import note_captured_arrays, note_captured_object
from .plan import Plan
from .pure import call_and_pack
from .transform import Sharded

_LOGGER = logging.getLogger("nnx_sharding")


def raise_explained(plan: Plan, leaves: Arrays, error: Exception, fun: Any = None) -> None:
    """Raises an error that says what is wrong with the arguments, if they show it; else returns.

    An error of the user's function, or of the program while it runs, is never replaced; at most it
    gets a note. If this returns, the caller raises the original error.

    Args:
      plan: the plan of the call.
      leaves: the arrays of the call, by slot.
      error: the error by which JAX refused the arrays.
      fun: the user's function; None for the function of the plan.
    """
    # `raise_instead` calls the lambda, because an error in the explanation must not hide the
    # original one.
    raise_instead(error, lambda: _explanation(plan, leaves, error, fun or plan.fun()))


def call_with_explained_errors(plan: Plan, leaves: Arrays, function: Callable[..., Any]) -> Any:
    """Returns the result of a function of the arrays; explains an error before it is raised."""
    try:
        return function(*leaves)
    except Exception as error:
        raise_explained(plan, leaves, error)
        raise


def raise_instead(error: Exception, explain: Callable[[], Exception | None]) -> None:
    """Raises the error that ``explain`` returns instead of ``error``; returns if that is None.

    If ``explain`` itself raises, this logs its error and returns, and the caller raises ``error``.
    """
    try:
        explanation = explain()
    except Exception:
        _LOGGER.warning("The following error cannot be explained:", exc_info=True)
        return
    if explanation is not None:
        # The frames of JAX's error are all internal. The user wants to see these only if JAX's
        # filter of tracebacks is off.
        shows_internals = jax.config.jax_traceback_filtering == "off"
        raise explanation from (error if shows_internals else None)


def _explanation(
    plan: Plan, leaves: Arrays, error: Exception, fun: Callable[..., Any]
) -> Exception | None:
    """Returns the error for the first reason that the arguments show; None if they show none.

    Adds notes to ``error`` about captured objects and arguments in host memory.

    Args:
      error: the error by which JAX refused the arrays.
    """
    # Errors of the user's function get notes as well, so the notes come before all checks.
    if isinstance(error, _compat.TraceContextError):
        note_captured_object(fun, plan.fun_name, error)
    elif isinstance(error, ValueError | NotImplementedError) and _compat.is_mesh_error(error):
        # `jit` gets its mesh from its arguments. Transforms such as `grad` run operations one by
        # one, for which JAX takes the mesh in context, so to pass the arrays would not help.
        is_compiled = isinstance(plan.transform, Sharded)
        if is_compiled or not _compat.lacks_mesh_in_context(error):
            note_captured_arrays(fun, plan.fun_name, error)
    elif isinstance(error, ValueError):
        _note_missing_gradients(error)
    # An inner function has explained an error that refers to docs/errors.md by its anchor, because
    # ``errors.see`` gives each explained error this attribute.
    is_explained = hasattr(error, "anchor")
    if _compat.is_memory_error(error) and not is_explained:
        note_host_arrays(plan, leaves, error)
    # An error of the user's function is about its computation, so the arguments are not checked.
    frames = traceback.walk_tb(error.__traceback__)
    is_from_function = any(frame.f_code is call_and_pack.__code__ for frame, _ in frames)
    if isinstance(error, NoMeshError) or is_from_function:
        return None
    return first_mistake(plan, leaves, error)


def _note_missing_gradients(error: ValueError) -> None:
    """Adds a note if an optimizer got gradients of other Variables than it updates.

    Optax then says that two pytrees differ, and shows neither filter. The note names both, if the
    error is from ``nnx.Optimizer.update``: the arguments of that call say which gradients miss.
    """
    # The method is in wrappers of Flax, and in ours if modules of a strategy have run. The code of
    # ours is that of all intercepted methods, whose frames have no such arguments.
    code = inspect.unwrap(nnx.Optimizer.update).__code__
    calls = [f.f_locals for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code is code]
    if not calls:
        return
    optimizer, model, gradients = (calls[-1][name] for name in ("self", "model", "grads"))
    updated = dict(nnx.to_flat_state(nnx.state(model, optimizer.wrt)))
    given = dict(nnx.to_flat_state(nnx.state(gradients)))
    missing = [path_string(path) for path in updated if path not in given]
    if not missing:
        return
    kinds = sorted({type(variable).__name__ for variable in given.values()})
    wrt = getattr(optimizer.wrt, "__name__", optimizer.wrt)  # mostly a class, such as nnx.Param
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    note = (
        f"The optimizer has wrt={wrt}, but the gradients ({', '.join(kinds) or 'none'}) are "
        f"without {missing[0]}{more}. Choose both by one filter: "
        "value_and_grad(loss, wrt=optimizer.wrt)."
    )
    if note not in getattr(error, "__notes__", ()):  # a nested call may have added it
        error.add_note(note)
