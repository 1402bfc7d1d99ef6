"""Passes the calls of modules to a handler while a function is traced.

Models are not written for this, so it changes their classes: each method is replaced by a
descriptor (:class:`Method`). A class is never changed back, because other threads may call it
meanwhile. The handler is in a context variable, so it belongs to one thread and one trace:

    module.method(x)                        the user's code
      Method.__get__                        without a handler: returns the method itself
      Method.__call__                       with a handler:
        handler(module, name, call, …)      `call` is the method, bound; the handler calls it

`_KINDS` are the classes whose methods are intercepted: ``nnx.Module`` and ``nnx.Optimizer``. Their
methods are plain functions or other descriptors, such as decorated functions. In a class that has
been changed they are `Method` objects, whose ``original`` is the method as the user defined it.
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

Call: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
# A handler is called instead of a method: with the module, the name of the method, the bound
# method, and its positional and keyword arguments.
Handler: TypeAlias = Callable[[Any, str, Call, Arguments, Keywords], Any]


class _Current(NamedTuple):
    """The handler in a context."""

    handler: Handler
    named: frozenset[str]  # the methods to intercept besides `__call__` and public methods


_CURRENT: contextvars.ContextVar[_Current | None] = contextvars.ContextVar("handler", default=None)


class Method:
    """A descriptor that replaces a method of a class of modules.

    ``original`` is the method as the user defined it: a function or another descriptor.

    Its private attributes:

        _name          the name of the method
        _intercepted   a plain function that calls this object; while there is a handler for the
                       method, ``Class.method`` is this function, and ``module.method`` binds it
    """

    __slots__ = ("_intercepted", "_name", "original")

    def __init__(self, name: str, original: Any):
        """Wraps the method ``original``, whose calls go through the current handler."""
        self._name, self.original = name, original

        def intercepted(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        # This is a plain function, because libraries ask for the signature and `__wrapped__` of
        # methods. The attributes of the original are not copied, because `nnx.capture` marks
        # methods with one.
        self._intercepted = functools.update_wrapper(intercepted, original, updated=())

    def __get__(self, module: object, cls: type | None = None) -> Any:
        current = _CURRENT.get()
        if current is None or not _is_intercepted_method(self._name, self.original, current.named):
            return self.original.__get__(module, cls)
        if module is None:
            return self._intercepted
        return types.MethodType(self._intercepted, module)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of a module, the first argument. A handler gets the call instead."""
        if not args or args[0] is None:
            # A class may hold a function as a helper, which is called as `Model.masked(None, x)`.
            # Binding it would lose the None, because to Python that means an access by the class.
            return self.original.__get__(None, object)(*args, **kwargs)
        module, *other_args = args
        current = _CURRENT.get()
        call = self.original.__get__(module, type(module))
        # A method called through `super()` is part of the subclass's method.
        if current is None or not isinstance(module, _KINDS) or not self._is_method_of(module):
            return call(*other_args, **kwargs)
        return current.handler(module, self._name, call, tuple(other_args), kwargs)

    def _is_method_of(self, module: object) -> bool:
        """Returns whether ``module.name`` is this method, so that no subclass overrides it.

        If a subclass overrides it, the subclass's method has called this one by ``super().name()``.
        """
        # Python takes the attribute of the first class that has one.
        owners = (cls for cls in type(module).__mro__ if self._name in vars(cls))
        first_owner = next(owners, None)
        method = None if first_owner is None else vars(first_owner)[self._name]
        # A decorator on a method of a class that was changed before wraps the `Method`.
        while method is not None and type(method) is not Method:
            method = getattr(method, "__wrapped__", None)
        return method is self

    def __getattr__(self, name: str) -> Any:  # for example, the mark of `nnx.capture`
        return getattr(self.original, name)

    def __reduce__(self) -> tuple[Any, ...]:  # a class may be pickled by value, with its methods
        return operator.itemgetter(0), ((self.original,),)


def current_handler() -> Handler | None:
    """Returns the current handler of the calls of modules; None if there is none."""
    current = _CURRENT.get()
    return None if current is None else current.handler


def with_handler(
    handler: Handler, named: Collection[str], fun: Call, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function, and passes the calls of modules in it to a handler.

    Args:
      handler: the handler. It may call the surrounding handler (:func:`current_handler`).
      named: the names of further methods to pass on, which may be private.
      fun: the function.
      *args: its arguments.
      **kwargs: its keyword arguments.

    Returns:
      The result of the function.
    """
    surrounding = _CURRENT.get()
    # Methods that an outer handler intercepts stay intercepted.
    named = frozenset(named) if surrounding is None else surrounding.named.union(named)
    for cls in _module_types():
        for name, value in [*vars(cls).items()]:
            if type(value) is not Method and _is_intercepted_method(name, value, named):
                type.__setattr__(cls, name, Method(name, value))

    # The function runs in a context of its own, which ends with the call wherever an interrupt
    # arrives. A `finally` that resets the variable would not do, because an interrupt may arrive in
    # it. After an error the context is dropped, with the handler in it.
    def call() -> Any:
        _CURRENT.set(_Current(handler, named))
        out = fun(*args, **kwargs)
        _CURRENT.set(surrounding)  # the loop below would set the handler outside
        return out

    context = contextvars.copy_context()
    out = context.run(call)
    # Other context variables keep what the function has set. `context` stands for "not set here",
    # because it is no value of any variable.
    for variable, value in context.items():
        if variable.get(context) is not value:
            variable.set(value)
    return out


def original_of(method: Any) -> Any:
    """Returns a method of a class as the user defined it: without the `Method` around it."""
    return method.original if type(method) is Method else method


_KINDS = (nnx.Module, nnx.Optimizer)  # the classes whose methods are intercepted

_OF_EVERY_MODULE = frozenset(dir(nnx.Module))
# Packages with bases of modules, such as `typing.Generic`. Their classes are not changed, because
# none of their methods is a call of a module.
_FOREIGN = (*sys.stdlib_module_names, "jax", "jaxlib", "numpy")


def _module_types() -> Iterator[type]:
    """Yields all existing classes of `_KINDS`, and the bases from which they inherit methods.

    It looks for them at each trace, because classes may have been defined after the last one.
    """
    # `nnx.Optimizer` has a method to intercept, ``update``. `nnx.Module` itself has none.
    classes: set[type] = {nnx.Optimizer}
    pending: list[Any] = [*_KINDS]  # the classes whose subclasses are still to be listed
    while pending:
        new_classes = [cls for cls in pending.pop().__subclasses__() if cls not in classes]
        classes.update(new_classes)
        pending += new_classes
    # Mixins that are no modules have methods of modules as well. The bases of `nnx.Module` are left
    # out, because what all modules inherit, such as ``train`` and ``sow``, computes nothing.
    with_bases = {base for cls in classes for base in cls.__mro__}
    with_bases -= {*nnx.Module.__mro__}
    return (cls for cls in with_bases if not _is_foreign(cls))


def _is_foreign(cls: type) -> bool:
    """Returns whether a class belongs to Python or JAX, such as ``typing.Generic``."""
    # The name of the module alone is not enough, because a user's class may have it as well.
    is_there = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return is_there and cls.__module__.partition(".")[0] in _FOREIGN


def _is_intercepted_method(name: str, value: object, named: Collection[str]) -> bool:
    """Returns whether an attribute of a class is a method to intercept.

    Args:
      name: the name of the attribute. ``__call__`` is always a method to intercept. A method with
        another name is one if it is public, and not in every module.
      named: the names of methods for which the user declares something.
    """
    if name == "__call__" or name in named:
        # The name says that it is a method, so any descriptor is one: a decorator may have returned
        # an object with `__get__`. There are three exceptions: Python does not give the module to a
        # static method or a class method, and a property is read, not called.
        is_other_kind = isinstance(value, (staticmethod, classmethod, property))
        return hasattr(value, "__get__") and not is_other_kind
    # Under any other name, a descriptor may be an attribute, so only plain functions are methods.
    is_public = not name.startswith("_") and name not in _OF_EVERY_MODULE
    return is_public and isinstance(value, types.FunctionType)
