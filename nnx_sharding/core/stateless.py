"""Which code need not be opened to know what it computes: that of libraries without state.

What a function can reach is listed down to such libraries (``listing.py``): they compute from their
arguments, and from contexts that are a part of the key of a trace, such as JAX's configuration.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys

# Others of the standard library, such as `random`, `os` and `time`, read other state.
_STATELESS = frozenset(
    (
        *("absl", "einops", "flax", "jax", "jaxlib", "ml_dtypes", "nnx_sharding", "numpy"),
        *("abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses"),
        *("enum", "functools", "inspect", "itertools", "logging", "math", "numbers", "operator"),
        *("optax", "re", "string", "textwrap", "types", "typing", "typing_extensions"),
        # `_thread.get_ident` is in the `__repr__` of each dataclass, `_pytest` in each `assert`.
        *("thread", "warnings", "_pytest"),
    )
)
STATEFUL_MODULES = frozenset(("numpy.random",))  # within these packages
# Built-in functions that read what no list of names shows.
STATEFUL_BUILTINS = frozenset(
    ("__import__", "eval", "exec", "globals", "input", "locals", "open", "vars")
)
# What reads attributes whose names the code does not show: by its name in code, and as an object.
BY_NAME = frozenset(
    ("getattr", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "getattr_static")
)
READERS = (operator.attrgetter, operator.methodcaller, inspect.getattr_static)
# Modules with functions that make classes for the user, whose `__module__` is then this module.
_MAKERS_OF_CLASSES = frozenset(("abc", "dataclasses", "enum", "types", "typing"))


@functools.lru_cache(maxsize=4096)
def is_stateless(module: str | None) -> bool:
    """Whether a module with this name, such as ``jax.numpy``, is of a library without state."""
    return module is not None and module.partition(".")[0] in _STATELESS


def is_stateless_class(cls: type) -> bool:
    """Whether a class is one of such a library, and not one that the library made for the user."""
    name = cls.__module__
    if name in _MAKERS_OF_CLASSES and getattr(sys.modules[name], cls.__name__, None) is not cls:
        return False
    return is_stateless(name)
