"""The errors that several checks raise, and how messages show arrays and places.

From ``errors.py``:

    message        a text: the head, a line for each thing that is wrong, the remedy
    listed_error   the error with such a text; None without lines. `raise_if_any` raises it
    see            an error, with a note that names its section (``anchor``) of the page on errors
    merged         texts, of which those that differ only in numbers are merged, with a count
    shortened      the first ten texts, and how many more there are
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from .. import _compat
from ..errors import (
    CorrectedSpecWarning,
    NoMeshError,
    listed_error,
    merged,
    message,
    raise_if_any,
    see,
    shortened,
    warn_or_raise,
)
from ..specs.fitting import describe_both, show
from ..specs.types import AnyArray, Arrays


def join_paths(paths: Sequence[str]) -> str:
    """Returns some paths as text; if there are more than five, similar paths are merged."""
    return ", ".join(paths if len(paths) <= 5 else shortened(merged(paths)))


def no_tree(cls: type) -> Exception:
    """Returns the error for a class that tree mode does not accept."""
    return ValueError(
        f"{cls.__name__} is declared with pytree=False, so it cannot be used with graph=False. "
        "Use graph=True, or make the class a pytree."
    )


def array_line(path: str, array: AnyArray) -> str:
    """Returns a line of a message for an array, with its path and type."""
    return f"  {path}, {jax.typeof(array).str_short()}"


def not_arrays(head: str, names: Sequence[str], leaves: Arrays, remedy: str) -> Exception | None:
    """Returns the error for leaves that are not arrays; None if all are arrays.

    Args:
      head: the first line of the error.
      names: the expression for each leaf.
      leaves: the leaves.
      remedy: the last line.
    """
    lines = [
        f"  {name}: {show(leaf)} of type {type(leaf).__name__}"
        for name, leaf in zip(names, leaves, strict=True)
        if not _compat.is_array_like(leaf)
    ]
    return listed_error(TypeError, head, lines, remedy, anchor="not-an-array")


def arguments_not_arrays(names: Sequence[str], leaves: Arrays) -> Exception | None:
    """Returns the error for arguments that are not arrays; None if all are arrays."""
    return not_arrays(
        "these arguments are not arrays:",
        names,
        leaves,
        "Pass arrays or numbers, or make the argument static (static_argnums, static_argnames); in "
        "a module, a static attribute (nnx.static).",
    )


def no_mesh(name: str, places: Sequence[str] = ()) -> NoMeshError:
    """Returns the error for a ``PartitionSpec`` without a mesh; its text lists ``places``."""
    text = (
        f"{name}: a PartitionSpec needs a mesh, and none is in context. Pass mesh=..., call within "
        "`with jax.set_mesh(mesh):`, or pass NamedSharding(mesh, spec)."
    )
    return see(NoMeshError(message(text, places)), anchor="no-mesh")


class DeclaredArray(NamedTuple):
    """An array that has another sharding than the declared one."""

    name: str  # the expression for the array, in messages
    array: AnyArray
    declared: Sharding

    def line(self) -> str:
        """Returns a line of a message with both shardings."""
        actual, expected = describe_both(self.array.sharding, self.declared)
        return f"  {self.name}, shape {self.array.shape}: is {actual}, declared {expected}"


def committed_elsewhere(name: str, arrays: Iterable[DeclaredArray]) -> Exception | None:
    """Returns the error for arrays that are committed to other shardings; None for no arrays."""
    lines = [array.line() for array in arrays]
    return listed_error(
        ValueError,
        f"{name}: these arrays are committed to a sharding other than the declared one:",
        lines,
        "Declare the sharding that they have, place them as declared (models with "
        "nnx_sharding.place, arrays with jax.device_put), or let them be moved: "
        "on_committed='move'.",
        anchor="committed-to-another-sharding",
    )


def warn_of_corrections(head: str, lines: Sequence[str], *, strict: bool) -> None:
    """Warns of specs that were corrected, or raises if ``strict``; does nothing without lines.

    Args:
      head: begins the message: the function that the user called, and which specs do not fit what.
      lines: a line for each array whose spec was corrected.
      strict: whether the warning is an error.
    """
    if lines:
        text = message(f"{head} and were corrected:", lines)
        anchor = "when-a-spec-does-not-divide-a-shape"
        warn_or_raise(CorrectedSpecWarning, text, strict=strict, anchor=anchor)


def out_of_range(values: jax.Array | np.ndarray[Any, Any], dtype: np.dtype[Any]) -> str:
    """Returns the range of integers as text if another dtype cannot hold it; otherwise ""."""
    are_integers = jnp.issubdtype(values.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer)
    is_empty = values.size == 0  # an empty array has no smallest value
    if not are_integers or is_empty or dtype == values.dtype:
        return ""
    low, high = int(values.min()), int(values.max())
    limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    can_hold = limits.min <= low and high <= limits.max
    return "" if can_hold else f"{low} to {high}"


def check_mesh(name: str, mesh: object) -> None:
    """Raises a ``TypeError`` if the option ``mesh`` of a function is neither a mesh nor None."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{name}: mesh must be a Mesh or an AbstractMesh, got {show(mesh)}.")


def check_options(name: str, **options: tuple[Any, Sequence[Any]]) -> None:
    """Raises a ``ValueError`` if the value of an option is none of its choices.

    Args:
      name: the name of the function.
      **options: by option, a pair of the value and the choices: ``mode=("a", ("a", "b"))``.
    """
    lines = [
        f"  {option}: expected one of {', '.join(map(repr, choices))}, got {value!r}"
        for option, (value, choices) in options.items()
        if value not in choices
    ]
    raise_if_any(ValueError, f"{name}: these options have invalid values:", lines)
