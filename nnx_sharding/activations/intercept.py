"""Passes the calls of modules to a handler while a function is traced.

Each method is replaced for good by a descriptor, which gives the method itself without a handler.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

from flax import nnx

# Called in place of a method, with the module, the name of the method, the bound method, and its
# arguments.
Handler: TypeAlias = Callable[[Any, str, Callable[..., Any], Any, Any], Any]


class _Current(NamedTuple):
    handler: Handler
    named: frozenset[str]  # the methods to intercept besides __call__ and public ones


_CURRENT: contextvars.ContextVar[_Current | None] = contextvars.ContextVar("handler", default=None)


class Method:
    """A method of a module class, in the place of the original one."""

    __slots__ = ("_name", "_replacement", "original")

    def __init__(self, name: str, original: Any):
        self._name, self.original = name, original

        def replacement(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self(module, *args, **kwargs)

        # Without its attributes: `nnx.capture` marks methods with one.
        self._replacement = functools.update_wrapper(replacement, original, updated=())

    def __get__(self, module: Any, kind: Any = None) -> Any:
        current = _CURRENT.get()
        if current is None or not _is_method(self._name, self.original, current.named):
            return self.original.__get__(module, kind)
        if module is None:
            return self._replacement
        return types.MethodType(self._replacement, module)

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of a module, by the handler if there is one."""
        current, call = _CURRENT.get(), self.original.__get__(module, type(module))
        # A method called through `super()` is part of the subclass's method.
        if current is None or not isinstance(module, _KINDS) or not self._is_in(type(module)):
            return call(*args, **kwargs)
        return current.handler(module, self._name, call, args, kwargs)

    def _is_in(self, kind: type) -> bool:
        """Whether it is the method of a class, perhaps wrapped, and not one that is overridden."""
        owner = next((base for base in kind.__mro__ if self._name in vars(base)), kind)
        found = vars(owner).get(self._name)
        while found is not None and type(found) is not Method:
            found = getattr(found, "__wrapped__", None)
        return found is self

    def __getattr__(self, name: str) -> Any:  # such as the mark of `nnx.capture`
        return getattr(self.original, name)

    def __reduce__(self) -> tuple[Any, ...]:  # of a class that is pickled by value
        return operator.itemgetter(0), ((self.original,),)


def handler_here() -> Handler | None:
    """The current handler of the calls of modules."""
    current = _CURRENT.get()
    return None if current is None else current.handler


def with_handler(
    handler: Handler, named: Collection[str], fun: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function, and passes calls of modules, ``named`` methods too, to a handler."""
    outer = _CURRENT.get()
    named = frozenset(named) if outer is None else outer.named.union(named)
    for kind in _module_types():
        for name, value in [*vars(kind).items()]:
            if type(value) is not Method and _is_method(name, value, named):
                type.__setattr__(kind, name, Method(name, value))

    def call() -> Any:
        _CURRENT.set(_Current(handler, named))
        out = fun(*args, **kwargs)
        _CURRENT.set(outer)
        return out

    # In a context of its own, which ends with the call wherever an interrupt arrives.
    context = contextvars.copy_context()
    out = context.run(call)
    for variable, value in context.items():  # those that the function has set
        if variable.get(context) is not value:
            variable.set(value)
    return out


def original_of(method: Any) -> Any:
    """The method of a class as it was defined."""
    return method.original if type(method) is Method else method


_KINDS = (nnx.Module, nnx.Optimizer)
_NOT_METHODS = (staticmethod, classmethod, property)
_OF_EVERY_MODULE = frozenset(dir(nnx.Module))
_FOREIGN = (*sys.stdlib_module_names, "jax", "jaxlib", "numpy")


def _module_types() -> Iterator[type]:
    """All existing classes of these kinds, and the classes from which they inherit methods."""
    kinds: set[type] = {nnx.Optimizer}
    pending: list[Any] = [*_KINDS]
    while pending:
        new = [kind for kind in pending.pop().__subclasses__() if kind not in kinds]
        kinds.update(new)
        pending += new
    bases = {base for kind in kinds for base in kind.__mro__}.difference(nnx.Module.__mro__)
    return (kind for kind in bases if not _is_foreign(kind))


def _is_foreign(kind: type) -> bool:
    """Whether a class belongs to Python or JAX, such as ``typing.Generic``."""
    is_there = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return is_there and kind.__module__.partition(".")[0] in _FOREIGN


def _is_method(name: str, value: Any, named: Collection[str]) -> bool:
    if name == "__call__" or name in named:
        return hasattr(value, "__get__") and not isinstance(value, _NOT_METHODS)
    is_public = not name.startswith("_") and name not in _OF_EVERY_MODULE
    return is_public and isinstance(value, types.FunctionType)
