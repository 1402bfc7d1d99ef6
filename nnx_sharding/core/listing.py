"""Lists what a function can read besides its arguments, to tell whether its trace is still valid.

The listing starts with the function's code, defaults, closure and globals, and goes on from there,
depth first; ``fingerprint.py`` says why. The result is a list of hashable *tokens*: plain values,
and ids of codes, classes and objects. The token of an object that was met before is its *number*:
0 for the first object that was met, and so on. Two functions with equal lists can read the same. A
function that returns ``x * scale``, with a global ``scale = 2``, has

    "function", id of its code, () of keyword defaults, () of attributes, (int, 2), True

*Stateless* libraries (``stateless.py``), such as JAX and ``math``, read nothing that may change,
so the list only says which of their functions and classes are used. :class:`NotListed` is raised
for anything that cannot be listed soundly: what holds arrays, what reads other state
(``STATEFUL_BUILTINS``, ``random``), and what Python does not show. The function is then traced at
each call.

    open_object        returns the kind of an object (class, names of attributes, ``detail``: what a
                       built-in class keeps besides items, such as a shape), and a list of its parts
    has_hidden_state   says whether objects of a class hold something that Python does not show
    value_key          returns a key for an object that is compared by value, such as a float; None
                       for any other object
    READERS            functions that read attributes by names which are not in the code
    BY_NAME            the names of such functions
    names_of           the names of globals, attributes and imports that a code uses
    closure            the variables of enclosing functions that a function uses, by name
"""

from __future__ import annotations

import abc
import builtins
import collections
import contextvars
import functools
import logging
import sys
import types
import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from .. import _compat
from .functions import Names, closure, names_of
from .stateless import (
    BY_NAME,
    READERS,
    STATEFUL_BUILTINS,
    STATEFUL_MODULES,
    is_stateless,
    is_stateless_class,
)
from .static_equality import ATOMIC_TYPES, LIBRARY_VALUES, value_key
from .static_parts import has_hidden_state, is_builtin, open_object

# Attributes of classes that no method computes with, or that nobody changes in place. They are left
# out because listing the annotations and fields of each dataclass would double the time.
_NOT_READ = frozenset(
    (
        *("__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__"),
        *("__annotations_cache__", "__dataclass_fields__", "__dataclass_params__", "__dict__"),
        *("__firstlineno__", "__orig_bases__", "__parameters__", "__static_attributes__"),
        *("__weakref__", "_abc_impl", *_compat.DERIVED_FROM_CLASS),
    )
)
_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
# The most objects that are listed, because listing more would take as long as tracing the function.
_LIMIT = 4000


class NotListed(Exception):
    """Something that a function can reach cannot be listed, or holds arrays."""


class Listing:
    """What has been listed so far, depth first.

    Attributes:
      tokens: the list.
      codes: the codes whose ids are in the list, kept alive.
      weak: weak references to the classes and other objects whose ids are in the list.
      met: all objects that were listed, kept alive while listing goes on. The number of an object
        is its position here.

    ``_PARTS`` and ``_LISTERS`` say for some types how their objects are listed: by which of their
    attributes, or by which method. What code reads of Python modules is listed at the end
    (``add_module_attributes``). Private attributes:

        _number       the number of each object that was met, by its id
        _modules      the user's modules that were met
        _attributes   the names of all attributes that some listed code reads. If one of ``BY_NAME``
                      is among them, the code may read any attribute
    """

    def __init__(self) -> None:
        """Starts an empty list."""
        self.tokens: list[Hashable] = []
        self.codes: list[types.CodeType] = []
        self.weak: list[weakref.ref[Any]] = []
        self.met: list[Any] = []
        self._number: dict[int, int] = {}
        self._modules: list[types.ModuleType] = []
        self._attributes: set[str] = set()

    def add(self, value: object) -> None:
        """Adds the tokens of a value and of all that is reached from it; may raise `NotListed`."""
        cls = type(value)
        if cls in ATOMIC_TYPES:
            self.tokens.append((cls, value))
            return
        number = self._number.get(id(value))
        if number is not None:  # met before; this also ends cycles
            self.tokens.append(number)
            return
        if len(self.met) > _LIMIT:
            raise NotListed
        self._number[id(value)] = len(self.met)
        self.met.append(value)
        self.tokens.append(cls.__name__)  # for a class of the user, its id follows
        # By a reader, such as `operator.attrgetter`, code may read any attribute, as by `getattr`.
        # The value may also be the class of a getter that the code holds.
        if any(value is reader for reader in READERS):
            self._attributes.add("getattr")
        if cls in _PARTS:
            self._add_all(getattr(value, name) for name in _PARTS[cls])
        elif cls in _LISTERS:
            _LISTERS[cls](self, value)
        elif isinstance(value, type):
            self._add_class(value)
        else:
            self._add_object(value)

    def add_module_attributes(self) -> None:
        """Lists what the code met so far may read from Python modules, such as ``config.width``.

        Which code reads which module is not known, so each attribute that some code names is listed
        for all modules. The values of these attributes may hold more code, which names more
        attributes and modules, so this goes on until there is nothing new.

        Raises:
          NotListed: code may read any attribute of a module.
        """
        done = set[tuple[str, str]]()  # the name of a module, and the name of an attribute
        while True:
            pending: list[tuple[types.ModuleType, str]] = []
            for module in self._modules:
                # Names are sorted so that equal functions have equal lists. ``__getattr__`` is
                # listed because Python calls it for attributes that a module does not have.
                for name in sorted({*self._attributes, "__getattr__"}):
                    if (module.__name__, name) not in done:
                        pending.append((module, name))
            if not pending:
                return
            if not BY_NAME.isdisjoint(self._attributes):  # code may read any attribute of a module
                raise NotListed
            for module, name in pending:
                done.add((module.__name__, name))
                if name in vars(module):
                    self.tokens.append((module.__name__, name))
                    self.add(vars(module)[name])

    def _add_all(self, values: Iterable[object]) -> None:
        for value in values:
            self.add(value)

    def _add_items(self, items: Mapping[str, Any]) -> None:
        """Lists the names of attributes, arguments or the like, then their values."""
        self.tokens.append((*items,))
        self._add_all(items.values())

    def _add_function(self, function: types.FunctionType) -> None:
        """Lists the code of a function, and all that the code can read.

        The code is enough for a function of a stateless library. If this is a closure, a decorator
        of the library may have put the user's functions into it, so all but its globals is listed.
        """
        code = function.__code__
        self._add_code(code)
        self.tokens.append((function.__name__, function.__qualname__))
        # The globals say which module defines the function, because `functools.wraps` changes its
        # `__module__`.
        is_of_library = is_stateless(function.__globals__.get("__name__"))
        is_closure = bool(code.co_freevars)
        if is_of_library and not is_closure:
            return
        self._add_all(function.__defaults__ or ())
        self._add_items(function.__kwdefaults__ or {})
        self._add_items(function.__dict__)
        for cell in function.__closure__ or ():
            self.add(cell)
        if not is_of_library:
            self._add_globals(function)

    def _add_code(self, code: types.CodeType) -> None:
        self.tokens.append(id(code))
        self.codes.append(code)

    def _add_globals(self, function: types.FunctionType) -> None:
        """Lists the globals that the code of a function reads.

        Adds the names of attributes that the code reads to ``_attributes``.
        """
        names = names_of(function.__code__)
        self._attributes |= names.attributes
        _refuse_stateful(function, names)
        scope = function.__globals__
        for name in names.globals:
            if name in scope:
                self.add(scope[name])
            elif name in STATEFUL_BUILTINS:  # `open`, for example, reads files
                raise NotListed
            elif name == "getattr":  # by the built-in function, code reads names that are not in it
                self._attributes.add(name)
            # A name that is no global is a built-in function, or is not defined. It may become a
            # global later, so the list says for each name whether it is one.
            self.tokens.append(name in scope)

    def _add_cell(self, cell: types.CellType) -> None:
        """Lists what a variable of an enclosing function holds."""
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        self.add(content)

    def _add_class(self, cls: type) -> None:
        """Lists a class, its bases, methods and other attributes; of libraries, only the class."""
        self.tokens.append(id(cls))
        if type(cls) is abc.ABCMeta:  # `isinstance` depends on what is registered with it
            self.tokens.append(abc.get_cache_token())  # each `register` changes the token
        if is_stateless_class(cls):
            return
        # The class is not kept alive, because it may hold the function. The list is void once the
        # class is collected.
        self.weak.append(weakref.ref(cls))
        if type(cls) is not type:  # the user's metaclass may have methods
            self.add(type(cls))
        self._add_all(cls.__bases__)
        self.tokens.append((cls.__name__, cls.__qualname__))
        # Properties and the descriptors of slots are listed like methods.
        self._add_items({name: x for name, x in vars(cls).items() if name not in _NOT_READ})

    def _add_module(self, module: types.ModuleType) -> None:
        """Lists a Python module; ``add_module_attributes`` lists later what code reads of it."""
        self.tokens.append(module.__name__)
        if module.__name__ in STATEFUL_MODULES:  # `numpy.random` is in a stateless library
            raise NotListed
        if is_stateless(module.__name__):
            return
        # All other modules of the standard library, such as `time`, may read state that they do not
        # show.
        if module.__name__.partition(".")[0] in sys.stdlib_module_names:
            raise NotListed
        self._modules.append(module)  # any other module is the user's

    def _add_builtin(self, function: types.BuiltinFunctionType) -> None:
        """Lists a function in C, or a method in C with the object that it is bound to."""
        owner = function.__self__  # for a function, its module or None; for a method, its object
        self.tokens.append(function.__qualname__)
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.add(owner)
            return
        # Modules in C have a leading underscore: `operator` takes its functions from `_operator`.
        name = getattr(owner, "__name__", "builtins").lstrip("_")
        if not is_stateless(name) or function.__name__ in STATEFUL_BUILTINS:
            raise NotListed

    def _add_tuple_field(self, field: object) -> None:
        self.tokens.append(field.__reduce__()[1])  # the index of the field, and its docstring

    def _add_context_variable(self, variable: contextvars.ContextVar[Any]) -> None:
        self.tokens.append(variable.name)
        self.add(variable.get(None))

    def _add_object(self, value: Any) -> None:
        """Lists an object whose type is neither in ``_PARTS`` nor in ``_LISTERS``, and no class.

        If Python shows all that the object holds, its class and its parts are listed. Otherwise a
        key is listed that is equal for equal values. The first cases are types for which less is
        enough.

        Raises:
          NotListed: the object holds arrays, or is neither shown by Python nor compared by value.
        """
        cls = type(value)
        if holds_values(value):
            raise NotListed
        if isinstance(value, _DESCRIPTORS):
            # The interpreter makes descriptors, so the name says what they do.
            self.tokens.append(value.__qualname__)
        elif isinstance(value, logging.Logger):  # no result of the function depends on a logger
            self._add_identity(value)
        elif is_stateless(cls.__module__) and callable(getattr(value, "__wrapped__", None)):
            self._add_wrapper(value)
        # A mesh has parts, but its key is enough. The key of a path, which is compared by value
        # elsewhere, is not, because the methods of a path read files.
        elif issubclass(cls, LIBRARY_VALUES):
            self._add_value(value)
        elif is_builtin(cls) or not has_hidden_state(cls):
            self.add(cls)
            kind, parts = open_object(value)
            self.tokens.append((kind.detail, kind.names))
            self._add_all(parts)
        else:
            self._add_value(value)

    def _add_wrapper(self, wrapper: Any) -> None:
        """Lists a library's wrapper, such as ``jax.jit(f)``, with the functions that it holds.

        The options of a wrapper cannot change as long as it is the same object, so its id is enough
        for these.
        """
        self._add_identity(wrapper)
        functions = [wrapper.__wrapped__]
        for attribute in getattr(wrapper, "__dict__", {}).values():
            # The rules of a derivative are in a tuple, and may be objects that can be called.
            parts = attribute if type(attribute) is tuple else (attribute,)
            functions += filter(callable, parts)
        self._add_all(functions)

    def _add_identity(self, value: object) -> None:
        """Lists an object by its id; raises `NotListed` if it cannot have weak references."""
        try:
            self.weak.append(weakref.ref(value))
        except TypeError:
            raise NotListed from None
        self.tokens.append(id(value))

    def _add_value(self, value: object) -> None:
        """Lists an object by a key for its value; raises `NotListed` if it has none."""
        key = value_key(value)
        if key is None:
            raise NotListed
        self.tokens.append(key)


def _refuse_stateful(function: types.FunctionType, names: Names) -> None:
    """Raises `NotListed` if the names that a function uses show that it may read state."""
    if not all(map(is_stateless, names.imports)):  # other modules are known only once imported
        raise NotListed
    if not STATEFUL_MODULES.isdisjoint(names.imports):
        raise NotListed
    # `np.random` is the one attribute of these libraries that has state. It has to be looked for
    # here, because the list has only the name of `np`, and none of its attributes.
    captured = [*map(function.__globals__.get, names.globals), *closure(function).values()]
    reads_numpy = "numpy" in names.imports or any(x is np for x in captured)
    if reads_numpy and "random" in names.attributes:
        raise NotListed
    if "__subclasses__" in names.attributes:  # any code may define another subclass
        raise NotListed


def holds_values(value: Any) -> bool:
    """Whether an object is an array, or an object of JAX or Flax that holds arrays.

    A trace has the values of such arrays as constants, so it is wrong for other values.
    """
    return (
        # A lazy proxy would load the object that it stands for if isinstance were used here.
        issubclass(type(value), jax.Array | np.ndarray)
        or _compat.is_graph_object(value)
        or _compat.is_ref(value)
        or _compat.is_hijax_variable(value)
    )


# For objects of exactly these types: the attributes that are listed instead of the object.
_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    types.MethodWrapperType: ("__qualname__", "__self__"),  # the type of `(1, 2).__getitem__`
    property: ("fget", "fset", "fdel"),
    **dict.fromkeys((functools.cached_property, _compat.cached_property), ("func",)),
    **dict.fromkeys((staticmethod, classmethod, type(functools.lru_cache(len))), ("__wrapped__",)),
}
# For objects of exactly these types: the method that lists them.
_LISTERS: dict[type, Any] = {
    types.FunctionType: Listing._add_function,
    types.CodeType: Listing._add_code,
    types.CellType: Listing._add_cell,
    types.ModuleType: Listing._add_module,
    types.BuiltinFunctionType: Listing._add_builtin,
    type: Listing._add_class,
    contextvars.ContextVar: Listing._add_context_variable,
    type(vars(collections.namedtuple("Single", "field"))["field"]): Listing._add_tuple_field,
    **dict.fromkeys((float, complex), Listing._add_value),
}
assert vars(builtins).keys() >= STATEFUL_BUILTINS
