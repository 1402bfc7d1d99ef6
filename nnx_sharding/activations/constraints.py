"""Errors about constraints in the user's code that name axes which are Explicit there."""

from __future__ import annotations

import re

from jax.sharding import AxisType

from .. import _compat
from ..errors import ActivationError, message, see
from ..specs.activation_sharding import InOutSharding
from ..specs.paths import Path, path_string


def exact_path(path: Path) -> str:
    """The regular expression for one path."""
    return f"^{re.escape(path_string(path))}$"


def refuse_constraint(error: Exception, name: str, module: str = "", path: Path = ()) -> None:
    """Raises our error for JAX's about ``with_sharding_constraint`` on Explicit axes, if it is one.

    Args:
      error: any error of the user's function.
      name: the transform, such as ``jit``.
      module: the innermost module that was called, as an expression; none outside of modules.
      path: the path of that module.
    """
    spec = _compat.spec_of_constraint(error)
    if spec is None:
        return
    place = module or "code outside of modules"
    mapped = ", ".join(map(repr, sorted(_compat.mapped_axes(), key=str)))
    if mapped and module:
        remedy = f"The surrounding vmap adds {mapped} to each spec in it: leave that out here."
    elif module:
        entry = {exact_path(path): InOutSharding(axis_types=AxisType.Auto)}
        remedy = (
            "Use jax.sharding.reshard there, or let the compiler choose in this module: "
            f"activation_shardings={entry!r}."
        )
    else:
        remedy = (
            "Use jax.sharding.reshard there, or nnx_sharding.with_sharding_constraint, which takes "
            "axes of all types. In a vmap, leave out the axes over which its arguments are sharded."
        )
    text = message(
        f"{name}: {place} passes {spec} to with_sharding_constraint, which JAX allows on Auto axes "
        "only; some of these are Explicit.",
        [],
        remedy,
    )
    raise see(ActivationError(text), "constraint-on-explicit-axes") from error
