"""Limits on how often functions may be traced."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


class TraceLimit:
    """How many traces one wrapped function, or one block of code, may have."""

    def __init__(self, limit: int, option: str):
        self.limit = limit
        self.option = option
        self._used: list[None] = []  # a list, because its methods cannot be interrupted

    def take(self) -> bool:
        """Uses up one trace, if there is one left."""
        self._used.append(None)
        if len(self._used) <= self.limit:
            return True
        self.give_back()
        return False

    def give_back(self) -> None:
        """Takes back one trace."""
        self._used.pop()

    def reset(self) -> None:
        """Takes back all."""
        self._used.clear()

    @classmethod
    def of(cls, limit: Any, option: str, least: int) -> TraceLimit:
        """A limit that the user gave.

        Raises:
          TypeError: it is not an integer.
          ValueError: it is less than ``least``.
        """
        try:
            number = operator.index(limit)
        except TypeError:
            raise TypeError(f"{option} is a number of traces, not {limit!r}.") from None
        if number < least or isinstance(limit, bool):
            raise ValueError(f"{option} is a number of traces, at least {least}, not {limit!r}.")
        return cls(number, option)


LIMITS: ContextVar[tuple[TraceLimit, ...]] = ContextVar("limits", default=())


def limit_traces(limit: int) -> contextlib.AbstractContextManager[None]:
    """Lets no more than ``limit`` traces happen within a block, of any functions of this library.

    Around a loop whose first step has run, ``limit_traces(0)`` turns a step that is compiled
    again by mistake into an error that says what changed. It counts the traces of this thread.

    Args:
      limit: how many traces there may be in all, 0 or more.

    Returns:
      A context manager. Blocks may be nested; each counts for itself.

    Raises:
      TypeError: ``limit`` is no integer.
      ValueError: it is negative.
      RetraceError: within the block, by the call that would have to trace once more. The
        function does not run, and nothing of the caller's is changed.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding import jit, limit_traces
      >>> double = jit(lambda x: 2 * x)
      >>> batches = [jnp.ones(32), jnp.ones(32), jnp.ones(31)]
      >>> _ = double(batches[0])
      >>> with limit_traces(0):
      ...     for x in batches:
      ...         _ = double(x)
      Traceback (most recent call last):
      ...
      nnx_sharding.errors.RetraceError: ...
        x: shape (32,) → (31,)
      ...
    """
    return _limited(TraceLimit.of(limit, "limit_traces", 0))


@contextlib.contextmanager
def _limited(limit: TraceLimit) -> Iterator[None]:
    token = LIMITS.set((*LIMITS.get(), limit))
    try:
        yield
    finally:
        LIMITS.reset(token)
