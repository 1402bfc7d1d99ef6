"""Names for the pure function, so that JAX's messages and HLO show the user's names."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any


def name_as(pure: Callable[..., Any], fun: Any, parameters: Sequence[str]) -> None:
    """Names a function of arrays like ``fun``, and its parameters by the paths of the arrays."""
    fun = _behind_partial(fun)
    pure.__name__ = name_of(fun)
    pure.__qualname__ = getattr(fun, "__qualname__", pure.__name__)
    code = getattr(inspect.unwrap(fun), "__code__", None)
    if code is not None:
        # From this JAX finds the file and line by which messages name functions.
        pure.__wrapped__ = types.SimpleNamespace(  # type: ignore[attr-defined]
            __code__=code, __name__=pure.__name__
        )
    if len(set(parameters)) == len(parameters):
        pure.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [_SlotParameter(name) for name in parameters]
        )


def _behind_partial(fun: Any) -> Any:
    return _behind_partial(fun.func) if isinstance(fun, functools.partial) else fun


def name_of(fun: Any) -> str:
    """The name of a function."""
    return str(getattr(_behind_partial(fun), "__name__", "<unnamed function>"))  # as JAX calls it


class _SlotParameter(inspect.Parameter):
    """A parameter whose name is the path of an array, so that JAX's messages and HLO show it."""

    def __init__(self, label: str):
        super().__init__("_", inspect.Parameter.POSITIONAL_ONLY)
        # The constructor accepts only identifiers, not paths.
        self._name = label
