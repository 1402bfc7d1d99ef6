"""JAX's errors about types of axes, in the names of the user's modules and with what to write.

On Explicit axes the sharding of an array is a part of its type; on Auto axes the compiler chooses
it. A strategy runs modules on Auto axes where it infers shardings (``is_by_strategy`` of a frame,
which is the call of a module; its ``tag`` has the path and an expression for the module).

:func:`refuse_constraint` is about ``with_sharding_constraint`` on Explicit axes, :func:`explain`
about operations that need types in a module whose axes a strategy made Auto, and
:func:`refuse_untyped` about operations whose result JAX cannot type. :func:`see` adds to an error
how to read its section of ``docs/errors.md``.
"""

from __future__ import annotations

import re
from typing import NoReturn

import jax
from jax.sharding import AxisType, PartitionSpec

from .. import _compat
from ..core.constrain import type_spec
from ..errors import ActivationError, message, see
from ..specs.activation_sharding import InOutSharding
from ..specs.fitting import axes_of_type
from ..specs.paths import Path, path_string
from .axis_types import arrays_in, first_with_explicit_spec
from .calls import Frame
from .variables import is_layer, own_variables


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
    spec = _compat.spec_of_constraint(error)  # None if JAX raised it for something else
    if spec is None:
        return
    place = module or "code outside of modules"
    # The mesh axes that a `vmap` around puts in front of each spec.
    mapped = ", ".join(map(repr, sorted(_compat.mapped_axes(), key=str)))
    if mapped and module:
        remedy = f"The surrounding vmap adds {mapped} to each spec in it: leave that out here."
    elif module:
        # As the user writes it: activation_shardings={'^blocks/3$': InOutSharding(...)}.
        entry = {exact_path(path): InOutSharding(axis_types=AxisType.Auto)}
        remedy = (
            "Use jax.sharding.reshard there, or let the compiler choose in this module: "
            f"activation_shardings={entry!r}."
        )
    else:  # no filter for modules names this code; the remedy is for a vmap, too
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


def explain(error: ValueError, name: str, frame: Frame) -> None:
    """Explains an error of JAX about axis types, in the name of the module that raised it.

    The modules around that one, through which the error passes next, leave it as it is. There are
    two kinds of errors, and any other is left alone:

    * The module runs on Explicit axes, as it is written, and calls ``with_sharding_constraint``,
      which needs Auto ones. This raises another error in place of it.
    * The module runs on Auto axes, as a strategy chose, and uses an operation that needs Explicit
      ones. The error gets a note that says how to run it on those.

    Args:
      error: the error, raised in a method of a module.
      name: the transform, such as ``jit``.
      frame: the call of the method.
    """
    if is_explained(error):
        return
    path, module = frame.tag.path, frame.tag.accessor
    mesh = jax.sharding.get_abstract_mesh()
    runs_as_written = axes_of_type(mesh, AxisType.Explicit) and not frame.is_by_strategy
    if runs_as_written:
        refuse_constraint(error, name, module, path)
    elif _NEEDS_EXPLICIT_AXES.search(str(error)):
        as_written = InOutSharding(method=frame.method, axis_types=AxisType.Explicit)
        entry = {exact_path(path): as_written}
        error.add_note(f"{module} {_RUNS_WITH_AUTO_AXES} activation_shardings={entry!r}.")


def refuse_untyped(error: Exception, name: str, frame: Frame, inputs: object) -> NoReturn:
    """Raises an error that names the innermost module in which JAX cannot type an operation.

    A layer is named with the types of its input and parameters, and the remedy is to declare its
    output: then a layer runs on Auto axes. A module with others in it has to be told to do so.

    Args:
      error: JAX's error.
      name: the transform, such as ``jit``.
      frame: the call of the module.
      inputs: a pytree of the arguments of the call.
    """
    module, method = frame.module, frame.method
    values = [_compat.get_value(variable) for _, variable in own_variables(module)]
    avals = map(jax.typeof, arrays_in((inputs, values)))
    types = tuple(aval.str_short(short_dtypes=True) for aval in avals)  # such as f32[8@data,4]
    # What to write for the module: a spec alone is for the `__call__` of a layer.
    entry: PartitionSpec | InOutSharding = _suggested_output(inputs)
    if not is_layer(module):
        entry = InOutSharding(entry, method=method, axis_types=AxisType.Auto)
    elif method != "__call__":
        entry = InOutSharding(entry, method=method)
    # The first sentence; others say how to use `out_sharding`, as the message below does, too.
    reason = str(error).partition(". ")[0].partition("\n")[0]
    line = f"  {frame.tag.accessor}: {type(module).__name__} of {', '.join(types)}"
    option = f"activation_shardings={{{exact_path(frame.tag.path)!r}: {entry!r}}}"
    # A shard_map has no such option, but the function that it maps may be one of jit.
    code = f"shard_map(jit(f, {option}), ...)" if name == "shard_map" else f"jit(..., {option})"
    if frame.tag.is_in_argument:
        remedy = (
            f"Declare its output: {code}; within the module, the compiler then chooses. "
            "Patterns such as r'blocks/\\d+/up$' match several. Strategies such as fsdp or "
            "from_rules do so for all modules in arguments."
        )
    else:
        remedy = (
            f"The function captures or makes this {frame.tag.name}, and strategies are for modules "
            "in arguments: pass it as one, with a strategy such as fsdp or from_rules in "
            f"in_shardings. Or declare its output: {code}."
        )
    text = message(
        f"{name}: on these Explicit axes JAX cannot know how a module shards "
        "the result of an operation:",
        [f"{line}\n    {reason}"],
        f"{remedy} Or give the operation an out_sharding, or use jit(..., auto_axes=True), with "
        "out_shardings.",
    )
    # Without JAX's error before it, whose first sentence is in the text.
    raise see(ActivationError(text), anchor="output-that-jax-cannot-shard") from None


def _suggested_output(inputs: object) -> PartitionSpec:
    """Returns a spec to suggest for the output of a method: that of its first typed input.

    Without the last dimension, the features, which the output need not have, and without trailing
    dimensions that nothing shards.
    """
    spec = type_spec(first_with_explicit_spec(inputs)) or PartitionSpec()
    entries = [*spec.partitions[:-1]]
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*entries)


def add_hint_outside(error: Exception) -> None:
    """Adds to an error of JAX that it cannot type an operation outside of modules what to write.

    An error that passes through several functions of ours gets the hint of the innermost one only,
    with which it has notes already.
    """
    if not hasattr(error, "__notes__"):
        error.add_note(
            "The operation is outside of modules, so nothing was inferred for it. Shard its "
            "inputs with activation_shardings={...} for the module that returns them, give the "
            "operation an out_sharding, or let the compiler choose with jit(..., "
            "auto_axes=True), with out_shardings."
        )
    see(error, "operation-outside-of-modules")


def is_explained(error: Exception) -> bool:
    """Returns whether a module inside has said already that it runs with Auto axes."""
    return any(_RUNS_WITH_AUTO_AXES in note for note in getattr(error, "__notes__", ()))


# A part of the notes of :func:`explain`, after the name of the module.
_RUNS_WITH_AUTO_AXES = (
    "runs with Auto axes, because its shardings are inferred. For a method that uses out_sharding, "
    "reshard or a mesh itself, pass"
)
# Messages of JAX about arrays on Auto axes where it wants Explicit ones.
_NEEDS_EXPLICIT_AXES = re.compile("of type Auto|only refer to Auto|context mesh", re.IGNORECASE)
