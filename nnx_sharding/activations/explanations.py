"""JAX's errors about types of axes, with the names of the user's modules and what to write.

On Explicit axes the sharding of an array is a part of its type; on Auto axes the compiler chooses
it. A strategy that infers shardings runs modules on Auto axes (``is_by_strategy`` of a frame, which
is the call of a module; its ``tag`` has the path and an expression for the module).

:func:`raise_if_constraint` is about ``with_sharding_constraint`` on Explicit axes, :func:`explain`
about operations that need types in a module whose axes a strategy made Auto, and
:func:`refuse_untyped` about operations whose result JAX cannot type. :func:`see` adds to an error
how to read its section of ``docs/errors.md``, and returns the error.
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
    """Returns a regular expression that matches one path only."""
    return f"^{re.escape(path_string(path))}$"


def raise_if_constraint(error: Exception, name: str, module: str = "", path: Path = ()) -> None:
    """Raises our error for JAX's about ``with_sharding_constraint`` on Explicit axes.

    Returns for any other error.

    Args:
      error: any error of the user's function.
      name: the transform, such as ``jit``.
      module: the innermost module that was called, as an expression; empty outside of modules.
      path: the path of that module.
    """
    spec = _compat.spec_of_constraint(error)  # None if JAX raised it for something else
    if spec is None:
        return
    place = module or "code outside of modules"
    # A surrounding `vmap` puts these mesh axes in front of each spec.
    mapped = ", ".join(map(repr, sorted(_compat.mapped_axes(), key=str)))
    if mapped and module:
        remedy = f"The surrounding vmap adds {mapped} to each spec in it: leave that out here."
    elif module:
        # The user writes it so: activation_shardings={'^blocks/3$': InOutSharding(...)}.
        entry = {exact_path(path): InOutSharding(axis_types=AxisType.Auto)}
        remedy = (
            "Use jax.sharding.reshard there, or let the compiler choose in this module: "
            f"activation_shardings={entry!r}."
        )
    else:  # no filter for modules matches this code; the remedy is for a vmap, too
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


def explain(error: Exception, name: str, frame: Frame) -> None:
    """Explains an error of JAX about axis types, in the name of the module that raised it.

    The error then passes through the modules around that one, which leave it as it is. There are
    two kinds of errors, and any other is left alone:

    * The module runs on Explicit axes, as it is written, and calls ``with_sharding_constraint``,
      which needs Auto axes. Then this raises another error instead.
    * The module runs on Auto axes, as a strategy chose, and uses an operation that needs Explicit
      axes. Then the error gets a note that says how to run the operation on Explicit axes. For
      ``with_sharding_constraint`` with a NamedSharding, it says how to run it on Auto axes.

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
        raise_if_constraint(error, name, module, path)  # returns for any other error
        return
    # A plain spec is for the mesh in context, whose axes are Auto here. Only the Explicit mesh of a
    # NamedSharding is refused. It is None for any other error.
    spec = _compat.spec_of_constraint(error)
    if spec is not None:
        text = (
            f"{module} {_RUNS_WITH_AUTO_AXES}, but the mesh of this NamedSharding has Explicit "
            f"ones. Pass its spec alone, {spec}, to with_sharding_constraint, or use "
            "nnx_sharding.with_sharding_constraint, which takes both."
        )
        error.add_note(message(text, []))
        see(error, "constraint-on-explicit-axes")
    elif _NEEDS_EXPLICIT_AXES.search(str(error)):
        as_written = InOutSharding(method=frame.method, axis_types=AxisType.Explicit)
        entry = {exact_path(path): as_written}
        error.add_note(
            f"{module} {_RUNS_WITH_AUTO_AXES}. For a method that uses out_sharding, reshard or a "
            f"mesh itself, pass activation_shardings={entry!r}."
        )


def refuse_untyped(error: Exception, name: str, frame: Frame, inputs: object) -> NoReturn:
    """Raises an error that names the innermost module in which JAX cannot type an operation.

    The error names a layer with the types of its input and parameters. The remedy is to declare its
    output, because a layer then runs on Auto axes. A module with submodules has to be told to run
    on Auto axes.

    Args:
      error: JAX's error.
      name: the transform, such as ``jit``.
      frame: the call of the module.
      inputs: a pytree of the arguments of the call.
    """
    module = frame.module
    values = [_compat.get_value(variable) for _, variable in own_variables(module)]
    avals = map(jax.typeof, arrays_in((inputs, values)))
    types = tuple(aval.str_short(short_dtypes=True) for aval in avals)  # for example, f32[8@data,4]
    entry = _suggested_declaration(frame, inputs)
    # The reason is the first sentence. Others tell how to use `out_sharding`, as the message does.
    reason = str(error).partition(". ")[0].partition("\n")[0]
    line = f"  {frame.tag.accessor}: {type(module).__name__} of {', '.join(types)}"
    option = f"activation_shardings={{{exact_path(frame.tag.path)!r}: {entry!r}}}"
    # A `shard_map` has no such option, but it may map a function of `jit` that has.
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
    # JAX's error is not shown before this one, because its first sentence is in the text.
    raise see(ActivationError(text), anchor="output-that-jax-cannot-shard") from None


def _suggested_declaration(frame: Frame, inputs: object) -> PartitionSpec | InOutSharding:
    """Returns what the user may declare for a method, so that it runs on Auto axes.

    A spec alone is for the ``__call__`` of a layer.
    """
    output = _suggested_output(inputs)
    if not is_layer(frame.module):
        return InOutSharding(output, method=frame.method, axis_types=AxisType.Auto)
    if frame.method != "__call__":
        return InOutSharding(output, method=frame.method)
    return output


def _suggested_output(inputs: object) -> PartitionSpec:
    """Returns a spec to suggest for the output of a method: that of its first typed input.

    The last dimension is left out, because the output need not have these features. Trailing
    dimensions that nothing shards are left out, too.
    """
    # `type_spec` returns None for None, that is, if no input has a typed sharding.
    spec = type_spec(first_with_explicit_spec(inputs)) or PartitionSpec()
    entries = [*spec.partitions[:-1]]
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*entries)


def add_hint_outside(error: Exception) -> None:
    """Adds a note to an error of JAX about an operation outside of modules: what to write.

    An error that passes through several functions of ours gets the note of the innermost one only,
    because outside of it the error has notes already.
    """
    if not hasattr(error, "__notes__"):
        text = (
            "The operation is outside of modules, so nothing was inferred for it. Shard its "
            "inputs with activation_shardings={...} for the module that returns them, give the "
            "operation an out_sharding, or let the compiler choose with jit(..., "
            "auto_axes=True), with out_shardings."
        )
        error.add_note(message(text, []))
    see(error, "operation-outside-of-modules")


def is_explained(error: Exception) -> bool:
    """Returns whether the error has a note that a module runs with Auto axes (`explain`)."""
    return any(_RUNS_WITH_AUTO_AXES in note for note in getattr(error, "__notes__", ()))


# The notes of :func:`explain` have this text after the name of the module.
_RUNS_WITH_AUTO_AXES = "runs with Auto axes, because its shardings are inferred"
# JAX's errors about arrays on Auto axes have these words if it wants Explicit axes.
_NEEDS_EXPLICIT_AXES = re.compile("of type Auto|only refer to Auto|context mesh", re.IGNORECASE)
