"""Intercepts the calls of modules while a function is traced.

A method is replaced in the class that defines it for as long as a trace needs that, and calls the
original directly if no trace of this thread handles it.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

from flax import nnx

# Called in place of a method, with the module, the name of the method, the bound method, and its
# arguments.
Handler: TypeAlias = Callable[[Any, str, Callable[..., Any], Any, Any], Any]

_HANDLER: contextvars.ContextVar[Handler | None] = contextvars.ContextVar("handler", default=None)
_LOCK = threading.Lock()
_patches: dict[tuple[type, str], _Patch] = {}


class _Patch:
    """One method of one class while it is intercepted."""

    def __init__(self, kind: type, name: str):
        self.kind, self.name, self.users = kind, name, 0
        original = self.original = vars(kind)[name]

        def intercepted(module: Any, *args: Any, **kwargs: Any) -> Any:
            handler = _HANDLER.get()
            call = original.__get__(module, type(module))
            # A method called through `super()` is part of the subclass's method.
            if handler is None or getattr(type(module), name, None) is not intercepted:
                return call(*args, **kwargs)
            if not isinstance(module, nnx.Module):
                return call(*args, **kwargs)
            return handler(module, name, call, args, kwargs)

        # Not by functools.wraps, which would copy the mark that `nnx.capture` sets on a method.
        intercepted.__wrapped__ = original  # type: ignore[attr-defined]
        self.replacement = intercepted

    def install(self) -> None:
        if not self.users:
            type.__setattr__(self.kind, self.name, self.replacement)
        self.users += 1

    def remove(self) -> None:
        self.users -= 1
        if not self.users and vars(self.kind).get(self.name) is self.replacement:
            type.__setattr__(self.kind, self.name, self.original)


def handler_here() -> Handler | None:
    """The current handler of the calls of modules."""
    return _HANDLER.get()


@contextlib.contextmanager
def intercepting(handler: Handler, methods: Collection[str] | None) -> Iterator[None]:
    """Passes the calls of modules to ``handler``, in this thread only.

    Args:
      handler: gets the module, the name of the method, the bound method and the arguments.
      methods: the methods besides ``__call__``; None for all public ones.
    """
    with _LOCK:
        installed = [
            _patches.setdefault((kind, name), _Patch(kind, name))
            for kind in _module_types()
            for name, value in vars(kind).items()
            if _is_method(name, value, methods)
        ]
        for patch in installed:
            patch.install()
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)
        with _LOCK:
            for patch in installed:
                patch.remove()
                if not patch.users:
                    _patches.pop((patch.kind, patch.name), None)


def is_intercepted() -> bool:
    """Whether a trace of this thread handles the calls of modules."""
    return _HANDLER.get() is not None


_NOT_METHODS = (staticmethod, classmethod, property)
_OF_EVERY_MODULE = frozenset(dir(nnx.Module))


def _module_types() -> set[type]:
    """All existing module classes, and the classes from which they inherit methods."""
    kinds, pending = set[type](), [nnx.Module]
    while pending:
        new = [kind for kind in pending.pop().__subclasses__() if kind not in kinds]
        kinds.update(new)
        pending += new
    return {base for kind in kinds for base in kind.__mro__}.difference(nnx.Module.__mro__)


def _is_method(name: str, value: Any, methods: Collection[str] | None) -> bool:
    if name == "__call__" or (methods and name in methods):
        return hasattr(value, "__get__") and not isinstance(value, _NOT_METHODS)
    is_public = methods is None and not name.startswith("_") and name not in _OF_EVERY_MODULE
    return is_public and isinstance(value, types.FunctionType)
