"""The values that a traced function makes: lines of the user's code, types, and specs.

On Explicit axes the types of values have specs. The line of an operation is the innermost frame of
its traceback that is not in a library. JAX traces a function such as `jnp.where` once for all of
its callers, so frames outside of the innermost trace belong to the first caller, and an operation
without a line inside of it has that of the call:

    jit[name=_where]     model.py:10     from the traceback of the call
      select_n           model.py:10     as there is no user's frame within the trace of _where
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .names import module_of
from .parameters import full_spec
from .source_frames import users_frame

Line: TypeAlias = tuple[str, int]  # file, line
Shape: TypeAlias = tuple[int, ...]

# What is a product of matrices in a program, `PRODUCTS`, is one of these operations in the trace.
TRACED_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
_UNDER_SHARD_MAP = "specs under shard_map, where each shape is that of one device"
BY_COMPILER = "specs on Auto axes or without a mesh in the trace, which the compiler chooses"


class MadeValue(NamedTuple):
    """A value of the trace."""

    line: Line | None  # None if no line of the user made it
    operation: str  # the name of the operation, such as ``dot_general``
    dtype: str
    shape: Shape  # of the whole value; under ``shard_map`` of the part on one device
    spec: PartitionSpec | None  # None if it is unknown
    why: str | None  # why the spec is unknown, or lacks axes; None if it is complete
    backward: bool  # whether it is made in the backward pass
    module: str | None  # the path of the innermost module; None outside of modules
    times: int  # in one call of the function; the body of a `while` loop counts once


def made_values(traced: jax.stages.Traced, modules: Collection[str]) -> list[MadeValue]:
    """Lists what a traced function makes; ``modules`` are the paths of those that it calls."""
    jaxpr = traced.jaxpr.jaxpr
    return [*_walk(jaxpr, line_around=None, scope_around="", times=1, modules=modules)]


def _walk(
    jaxpr: Jaxpr, line_around: Line | None, scope_around: str, times: int, modules: Collection[str]
) -> Iterator[MadeValue]:
    """Yields the values that a jaxpr makes, with those of the jaxprs inside it.

    Args:
      line_around: the user's line that calls it, for equations without a line of their own.
      scope_around: the name scopes around it, which say the module and the pass.
      modules: the paths of the modules that are called.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        avals: list[Any] = [x.aval for x in equation.outvars]
        line = _line_of(equation) or line_around
        scope = f"{scope_around}{equation.source_info.name_stack}/"
        # A kernel works on parts of arrays, which are no values of the program.
        inner_jaxprs = [] if name == "pallas_call" else [*_compat.jaxprs_of(equation)]
        runs = times * equation.params["length"] if name == "scan" else times
        for inner in inner_jaxprs:
            yield from _walk(inner, line, scope, runs, modules)
        # The results of a call, such as a `jit`, are values that its jaxpr makes, with the same
        # types. They were yielded above. The results of a `scan` have other types, because it
        # stacks the results of its runs, so they are values of their own.
        if any([x.aval for x in inner.outvars] == avals for inner in inner_jaxprs):
            continue
        backward, module = "transpose(" in scope, module_of(scope, modules)
        for aval in avals:
            if hasattr(aval, "shape"):  # Tokens have no shape, and are left out.
                spec, why = _spec_of(aval)
                # The type has no spec if all axes are Auto, but a constraint has one.
                if name == "sharding_constraint" and why == BY_COMPILER and spec is None:
                    spec, why = _constrained(equation.params["sharding"], len(aval.shape))
                yield MadeValue(
                    line=line,
                    operation=name,
                    dtype=str(aval.dtype),
                    shape=tuple(aval.shape),
                    spec=spec,
                    why=why,
                    backward=backward,
                    module=module,
                    times=times,
                )


def _line_of(equation: JaxprEqn) -> Line | None:
    """Returns the user's line of an equation, from the frames inside of the innermost trace.

    Returns None if these frames are all in libraries.
    """
    traceback = equation.source_info.traceback
    frames: list[Any] = [] if traceback is None else traceback.frames  # innermost first
    # JAX's function `trace_to_jaxpr…` starts a trace, so the frames before it are inside.
    inside = itertools.takewhile(lambda x: "trace_to_jaxpr" not in x.function_name, frames)
    return users_frame((frame.file_name, frame.line_num) for frame in inside)


def _spec_of(aval: Any) -> tuple[PartitionSpec | None, str | None]:
    """Returns the spec in the type of a traced value, and why it is unknown or lacks axes.

    ``aval`` is the type, of a class of JAX. The reason, such as `BY_COMPILER`, is a text for the
    user; it is None for a spec that is complete. On a mesh with Explicit and Auto axes, there are
    both a spec and a reason, because the spec has only the Explicit axes.
    """
    sharding = getattr(aval, "sharding", None)
    if not aval.shape:  # A number has no dimension to shard.
        return PartitionSpec() if sharding is None else sharding.spec, None
    if sharding is None or sharding.mesh.empty:
        return None, BY_COMPILER
    sizes = zip(sharding.mesh.axis_types, sharding.mesh.axis_sizes, strict=True)
    # Axes of size 1 do not count, because they divide nothing.
    kinds = {kind for kind, size in sizes if size > 1}
    if AxisType.Manual in kinds:
        return None, _UNDER_SHARD_MAP
    why = BY_COMPILER if AxisType.Auto in kinds else None
    return (None if kinds == {AxisType.Auto} else sharding.spec), why


def _constrained(sharding: Sharding, rank: int) -> tuple[PartitionSpec | None, str | None]:
    """Returns the spec of a constraint on Auto axes, and why the spec lacks axes.

    The spec is None for a sharding that has none. The reason is None if the spec is complete: a
    constraint may leave dimensions to the compiler, which are ``UNCONSTRAINED`` in the spec.
    ``rank`` is the number of dimensions of the array.
    """
    if not isinstance(sharding, NamedSharding):  # Other shardings have no spec.
        return None, BY_COMPILER
    spec = full_spec(sharding.spec, rank)
    is_whole = PartitionSpec.UNCONSTRAINED not in spec.partitions
    return spec, None if is_whole else BY_COMPILER
