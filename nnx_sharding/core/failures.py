"""Explains errors of JAX in terms of the user's arguments.

Nothing here runs before JAX has refused a call. If the arguments show the reason (``checks.py``),
the user gets an error that names the arguments. Otherwise JAX's error is kept, with a note if the
function captures something, or if arguments are in host memory.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import jax

from .. import _compat
from ..errors import NoMeshError
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
