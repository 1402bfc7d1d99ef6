"""The context of a function while it is traced: the scope that shards its activations."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx

from .. import _compat
from ..core.call_context import Caller
from ..core.pure import Pure
from ..core.retyping import type_spec
from ..core.transform import Sharded
from ..core.unflatten import Built
from ..errors import see
from .intercept import original_of, with_handler
from .scope import Scope

# Makes activation shardings part of the key of JAX's cached traces of inner functions.
_CONTEXT = jax.make_user_context()
_TAGS = jax.make_user_context()


def inherited(objects: Sequence[Any]) -> AbstractContextManager[Any]:
    """A context in which JAX reuses no trace made for modules with other declarations.

    Args:
      objects: the objects of a call within a trace.
    """
    tags = tuple(_compat.tag_of(x) if _compat.is_node(x) else None for x in objects)
    return _TAGS(tags) if any(tags) else contextlib.nullcontext()


@contextlib.contextmanager
def sharded_activations(
    pure: Pure,
    caller: Caller,
    built: Built,
    leaves: Sequence[Any],
) -> Iterator[Callable[..., Any]]:
    """Shards the activations of the modules that are called within the block.

    Args:
      pure: what is traced.
      caller: the call in which it is traced.
      built: the objects of the arguments in the trace.
      leaves: the arrays in the trace.

    Yields:
      What to call for the user's function.

    Raises:
      ValueError: after the call, if a spec did not fit, or a filter matched no module.
    """
    assert isinstance(pure.transform, Sharded)
    scope = Scope(pure, pure.transform, built, leaves)
    if not scope.is_needed:
        pass_tags(caller, built)
        yield caller.fun
        return
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_CONTEXT(scope.declaration))
            if (mesh := _type_mesh(leaves)) is not None:
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            yield functools.partial(_checked_call, scope, caller.fun)
    except BaseException as error:
        scope.forget()
        if isinstance(error, _compat.SHARDING_ERRORS):
            if not hasattr(error, "__notes__"):
                error.add_note(_NOTE)
            see(error, "operation-outside-of-modules")
        raise


def pass_tags(caller: Caller, built: Built) -> None:
    """Passes the surrounding trace's declarations for modules on to an inner trace."""
    for old, new in zip(caller.objects, built.objects, strict=True):
        if _compat.is_node(old) and (tag := _compat.tag_of(old)) is not None:
            _compat.tag_node(new, tag)


_NOTE = (
    "The operation is outside of modules, so nothing was inferred for it. Shard its inputs with "
    "activation_shardings={...} for the module that returns them, give the operation an "
    "out_sharding, or let the compiler choose with jit(..., auto_axes=True), with out_shardings."
)


def _checked_call(scope: Scope, fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    out = with_handler(scope, scope.named_methods, _call, scope, fun, *args, **kwargs)
    scope.check()  # here, because an error at the end of the block would show frames of contextlib
    return out


def _call(scope: Scope, fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function; a module's method is called as a method."""
    name = getattr(fun, "__name__", "")
    if args and isinstance(args[0], nnx.Module):
        method = original_of(inspect.getattr_static(type(args[0]), name, None))
        while method is not None and method is not fun:
            method = original_of(getattr(method, "__wrapped__", None))
        if method is fun:
            bound = functools.partial(fun, args[0])
            return scope(args[0], name, bound, args[1:], kwargs)
    return fun(*args, **kwargs)


def _type_mesh(leaves: Sequence[Any]) -> Any:
    """The mesh in the types of arrays on Explicit axes, if none is in context."""
    if not jax.sharding.get_abstract_mesh().empty:
        return None
    meshes = (jax.typeof(x).sharding.mesh for x in leaves if type_spec(x) is not None)
    return next(meshes, None)
