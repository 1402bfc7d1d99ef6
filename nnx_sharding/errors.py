"""Errors and warnings beyond those of JAX and Flax.

Each error is also of the type that ``jax.jit`` raises for the same mistake, so code that catches
that type keeps working.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

_PACKAGE = str(Path(__file__).parent)


class NoMeshError(RuntimeError, ValueError):
    """A ``PartitionSpec`` has no mesh; a ``RuntimeError`` as from ``jax.jit``."""


class StrictError(ValueError):
    """Raised with ``strict=True`` in place of a :class:`ShardingWarning`."""


class ActivationError(ValueError):
    """Activations cannot be sharded as declared or, on Explicit axes, JAX cannot infer how."""


class DonatedError(RuntimeError, ValueError):
    """An array was already donated, or is donated and passed twice; JAX raises either type."""


class RetraceError(RuntimeError):
    """A function would be traced more often than ``max_traces`` or ``limit_traces`` allows."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit the model, which is left unchanged."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """The checkpoint does not exist; a ``FileNotFoundError`` as from Orbax."""


class ExportError(ValueError):
    """A file has no program, is damaged, or does not fit this machine, release or function."""


class ShardingWarning(UserWarning):
    """Valid, but probably unintended. With ``strict=True`` it is a :class:`StrictError`."""


class UnusedFilterWarning(ShardingWarning):
    """A filter of a ``StateSharding`` applies to no Variable."""


class CapturedArrayWarning(ShardingWarning):
    """A function captures a sharded array, which loses its sharding."""


class WrongGradientWarning(ShardingWarning):
    """XLA may compute a gradient in a program wrong, by a known fault."""


class CorrectedSpecWarning(ShardingWarning):
    """Specs were corrected to fit shapes, for ``on_indivisible="replicate"`` or ``"drop"``."""


class UnshardedWarning(ShardingWarning):
    """A strategy shards nothing, because all arrays have fewer elements than its ``min_size``."""


def see(error: E, anchor: str) -> E:
    """The error, with a note that names its section in ``docs/errors.md``, if it has one."""
    if anchor:
        error.add_note(f"See docs/errors.md#{anchor}.")
    return error


def report(
    category: type[ShardingWarning], message: str, *, strict: bool, anchor: str = ""
) -> None:
    """Issues a warning that points at the user code that led here.

    Raises:
      StrictError: ``strict`` is true.
    """
    if strict:
        raise see(StrictError(message), anchor)
    warnings.warn(message, category, stacklevel=_users_level())


def shortened(items: Iterable[str], indent: str = "") -> list[str]:
    """The first ten of these texts, and the number of further ones."""
    first, rest = [*items][:10], [*items][10:]
    return [*first, f"{indent}… {len(rest)} more"] if rest else first


def raise_listed(
    error: type[Exception], head: str, lines: Sequence[str], remedy: str = "", anchor: str = ""
) -> None:
    """Raises an error with a line for each thing that is wrong, if there is any."""
    if lines:
        raise see(error("\n".join([head, *lines, *filter(None, [remedy])])), anchor)


def _users_level() -> int:
    """The stack level of the nearest frame of user code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def is_library(filename: str) -> bool:
    """Whether a file belongs to this package, JAX or Flax."""
    return filename.startswith(_LIBRARIES)


def _folders(names: Iterable[str]) -> tuple[str, ...]:
    found = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return tuple(str(Path(file).parent) for file in found if file)


_LIBRARIES = (_PACKAGE, *_folders(("jax", "jaxlib", "flax")))
