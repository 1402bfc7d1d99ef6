"""Operations of traced programs: which are used, and running them one by one.

A *program* is a jaxpr, with constants or without, and an *equation* is one operation in it. The
parameters of an equation may be further programs, such as the body of a ``scan``. In older releases
of JAX, a program with constants wraps one without, its ``jaxpr``. In newer ones, the ``jaxpr`` of a
program is the program itself.

``dce_jaxpr`` of JAX takes a program and a flag for each of its outputs. It returns a program that
computes the flagged outputs only, and a flag for each input that this program still reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .jax_names import source_info_util


def used_equations(jaxpr: Any) -> Any:
    """Returns the equations of a traced program, without those whose results are not used."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0].eqns


def used_part(closed: Any, is_used: Sequence[bool]) -> tuple[Any, tuple[int, ...]]:
    """Returns what computes some outputs of a traced program, and the positions of its inputs.

    Callbacks belong to every part: JAX keeps what has an effect, and all that it reads.

    Args:
      closed: the program, with constants.
      is_used: for each of its outputs, whether it is wanted.

    Returns:
      A program with the wanted outputs, and for each of its inputs the position in ``closed``.
    """
    part, inputs = partial_eval.dce_jaxpr(closed.jaxpr, [*is_used])
    return closed.replace(jaxpr=part), tuple(i for i, used in enumerate(inputs) if used)


def without_callbacks(program: Any) -> Any:
    """Returns a traced program without callbacks that have no results, as of ``jax.debug.print``.

    Such callbacks are also removed from the programs within its operations, such as the body of a
    ``scan`` or of a ``custom_vjp``.
    """
    if getattr(program, "jaxpr", program) is not program:  # with constants, in older JAX
        return program.replace(jaxpr=without_callbacks(program.jaxpr))
    # An equation that has effects and no results is such a callback.
    kept = [equation for equation in program.eqns if equation.outvars or not equation.effects]
    equations = [_without_inner_callbacks(equation) for equation in kept]
    return program.replace(eqns=equations, effects=_join_effects(equations))


def has_effects(program: Any) -> bool:
    """Whether a traced program does something that JAX keeps though no result is used."""
    kept, _ = partial_eval.dce_jaxpr(program.jaxpr, [False] * len(program.out_avals))
    return bool(kept.eqns)


def _without_inner_callbacks(equation: Any) -> Any:
    """Returns an operation without the callbacks in the programs among its parameters."""

    def strip(value: Any) -> Any:
        """Strips a parameter that is a program, or a tuple of them."""
        if isinstance(value, tuple | list) and any(map(_is_program, value)):
            return type(value)(map(strip, value))
        return without_callbacks(value) if _is_program(value) else value

    params = {name: strip(value) for name, value in equation.params.items()}
    stripped = equation.replace(params=params)
    # The effects of the operation include those of its programs. Those that only a callback had
    # are dropped, or JAX would keep the operation even if its results are not used.
    effects_before = _join_effects(jaxprs_of(equation))
    effects_after = _join_effects(jaxprs_of(stripped))
    return stripped.replace(effects=equation.effects - (effects_before - effects_after))


def jaxprs_of(equation: Any) -> Iterator[Any]:
    """Yields the programs in the parameters of an operation, such as the body of a loop."""
    for value in equation.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            # Nearly all parameters are of these types, and to ask them for attributes is slow.
            if type(x) in _HOLD_NO_JAXPR:
                continue
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield inner


_HOLD_NO_JAXPR = frozenset({bool, int, float, str, type(None), NamedSharding, PartitionSpec})


def _join_effects(parts: Iterable[Any]) -> set[Any]:
    """Returns all effects of some programs or equations."""
    return set().union(*(part.effects for part in parts))


def _is_program(x: Any) -> bool:
    """Whether a parameter of an operation is a jaxpr, with constants or without."""
    return hasattr(x, "eqns")


def run_equation(
    equation: Any, inputs: Sequence[Any], mesh: AbstractMesh | None = None
) -> list[Any]:
    """Runs one operation of a traced program, with the mesh and settings that it was traced with.

    Args:
      equation: the operation.
      inputs: the arrays for its ``invars``, in order.
      mesh: a mesh to set instead of the one of the trace; None to keep that.

    Returns:
      The arrays for its ``outvars``, in order.
    """
    # For some primitives, ``bind`` takes other parameters than those in the equation.
    parameters = equation.primitive.get_bind_params(equation.params)
    with contextlib.ExitStack() as stack:
        stack.enter_context(equation.ctx.manager)
        if mesh is not None:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        out = equation.primitive.bind(*inputs, **parameters)
    return [*out] if equation.primitive.multiple_results else [out]


def in_scope_of(equation: Any) -> AbstractContextManager[object]:
    """Gives what is traced within the block the names and the line of an operation.

    A name stack is what ``jax.named_scope`` and ``jit`` add to the names of operations. The one of
    the operation comes within the current one.
    """
    if source_info_util is None:  # a private module that this release does not have
        return contextlib.nullcontext()
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    context: AbstractContextManager[object] = source_info_util.user_context(
        equation.source_info.traceback, name_stack=names
    )
    return context
