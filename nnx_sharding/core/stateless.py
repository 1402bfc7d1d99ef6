"""Lists the libraries without state, whose code need not be opened to know what it computes.

The list of what a function can reach (``listing.py``) ends at such libraries. They compute from
their arguments, and from contexts that are a part of the key of a trace, such as JAX's
configuration.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types

# Names of libraries. Other modules of the standard library, such as `random`, `os` and `time`, read
# state.
_STATELESS = frozenset(
    (
        *("absl", "einops", "flax", "jax", "jaxlib", "ml_dtypes", "nnx_sharding", "numpy"),
        *("abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses"),
        *("enum", "functools", "inspect", "itertools", "logging", "math", "numbers", "operator"),
        *("optax", "re", "string", "textwrap", "types", "typing", "typing_extensions"),
        # The `__repr__` of each dataclass uses `_thread.get_ident`, and in tests each `assert` uses
        # `_pytest`.
        *("thread", "warnings", "_pytest"),
    )
)
STATEFUL_MODULES = frozenset(("numpy.random",))  # modules with state in these libraries
# Built-in functions that read values which no list of names shows.
STATEFUL_BUILTINS = frozenset(
    ("__import__", "eval", "exec", "globals", "input", "locals", "open", "vars")
)
# Functions and attributes by which code reads attributes whose names it does not show. BY_NAME has
# their names, as they are in code; READERS has the functions as objects.
BY_NAME = frozenset(
    ("getattr", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "getattr_static")
)
READERS = (operator.attrgetter, operator.methodcaller, inspect.getattr_static)
# Modules with functions that make classes for the user. Such a class may have the module's name as
# its `__module__`.
_MAKERS_OF_CLASSES = frozenset(("abc", "dataclasses", "enum", "types", "typing"))


@functools.lru_cache(maxsize=4096)
def is_stateless(module: str | None) -> bool:
    """Whether a module with this name, such as ``jax.numpy``, is in a library without state."""
    return module is not None and module.partition(".")[0] in _STATELESS


def is_stateless_class(cls: type) -> bool:
    """Whether a class belongs to a library without state, which did not make it for the user."""
    name = cls.__module__
    if name in _MAKERS_OF_CLASSES and getattr(sys.modules[name], cls.__name__, None) is not cls:
        return False
    return is_stateless(name)


def is_constant(value: object) -> bool:
    """Whether code that has an object can reach nothing through it that may change.

    The object is a class, a function, or one part of a value that is compared by value. Through a
    class, code reaches its methods; through a function, all that the function reads. What the
    object holds is not looked at, because the caller asks about each part of a value in turn.
    """
    if isinstance(value, type):
        return is_stateless_class(value)
    if isinstance(value, types.FunctionType):
        # A function that a library has made for the user may hold the user's functions in its cells
        # (the variables of enclosing functions).
        has_cells = bool(value.__code__.co_freevars)
        return is_stateless(value.__globals__.get("__name__")) and not has_cells
    return not callable(value)  # calling an object may read anything
