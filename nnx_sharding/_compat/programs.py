"""Operations of traced programs: which are used, and running them one by one.

A *program* is a jaxpr, with constants or without, and an *equation* is one operation in it. The
parameters of an equation may be further programs, such as the body of a ``scan``. In older releases
of JAX, a program with constants wraps one without, its ``jaxpr``. In newer ones, the ``jaxpr`` of a
program is the program itself. *Effects* are what a program does besides computing its results, such
as callbacks.

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
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # without constants
    all_outputs = [True] * len(jaxpr.outvars)
    without_unused, _ = partial_eval.dce_jaxpr(jaxpr, all_outputs)
    return without_unused.eqns


def used_part(closed: Any, is_used: Sequence[bool]) -> tuple[Any, tuple[int, ...]]:
    """Returns the part of a traced program that computes some outputs, and which inputs it reads.

    Equations with effects, such as callbacks, and all that they read, are in every part, because
    JAX keeps them.

    Args:
      closed: the program, with constants.
      is_used: for each output of the program, whether the part has it.

    Returns:
      The part, and for each input of the part the position of this input in ``closed``.
    """
    part, is_input_read = partial_eval.dce_jaxpr(closed.jaxpr, [*is_used])
    positions = tuple(i for i, is_read in enumerate(is_input_read) if is_read)
    return closed.replace(jaxpr=part), positions


def without_callbacks(program: Any) -> Any:
    """Returns a traced program without callbacks that have no results, such as ``jax.debug.print``.

    Such callbacks are also removed from the programs in parameters of equations, such as the body
    of a ``scan`` or of a ``custom_vjp``.
    """
    if getattr(program, "jaxpr", program) is not program:  # older JAX: wraps one without constants
        return program.replace(jaxpr=without_callbacks(program.jaxpr))
    # An equation that has effects and no results is such a callback.
    kept = [equation for equation in program.eqns if equation.outvars or not equation.effects]
    equations = [_without_inner_callbacks(equation) for equation in kept]
    return program.replace(eqns=equations, effects=_join_effects(equations))


def has_effects(program: Any) -> bool:
    """Whether a traced program does something that JAX keeps even if no result is used."""
    no_outputs = [False] * len(program.out_avals)
    kept, _ = partial_eval.dce_jaxpr(program.jaxpr, no_outputs)
    return bool(kept.eqns)


def _without_inner_callbacks(equation: Any) -> Any:
    """Returns an equation without callbacks in the programs that are among its parameters."""

    def stripped_value(value: Any) -> Any:
        """Returns a parameter without callbacks: a program, several of them, or another value."""
        if isinstance(value, tuple | list) and any(map(_is_program, value)):
            return type(value)(map(stripped_value, value))
        return without_callbacks(value) if _is_program(value) else value

    params = {name: stripped_value(value) for name, value in equation.params.items()}
    stripped = equation.replace(params=params)
    # The effects of an equation include those of its programs. Effects that only the callbacks had
    # are removed, because JAX would otherwise keep the equation even if its results are not used.
    removed_effects = _join_effects(jaxprs_of(equation)) - _join_effects(jaxprs_of(stripped))
    return stripped.replace(effects=equation.effects - removed_effects)


def jaxprs_of(equation: Any) -> Iterator[Any]:
    """Yields the programs in the parameters of an equation, such as the body of a loop.

    The programs have no constants in older releases of JAX.
    """
    for value in equation.params.values():
        # The branches of a `cond`, for example, are a tuple of programs.
        items = value if isinstance(value, tuple | list) else (value,)
        for item in items:
            # Nearly all parameters are of these types, and looking for an attribute that they do
            # not have is slow.
            if type(item) in _HOLD_NO_JAXPR:
                continue
            inner = getattr(item, "jaxpr", item)
            if _is_program(inner):
                yield inner


_HOLD_NO_JAXPR = frozenset({bool, int, float, str, type(None), NamedSharding, PartitionSpec})


def equations_in(program: Any) -> Iterator[Any]:
    """Yields the equations of a program, each before those of the programs in its parameters."""
    for equation in program.eqns:
        yield equation
        for inner in jaxprs_of(equation):
            yield from equations_in(inner)


def _join_effects(parts: Iterable[Any]) -> set[Any]:
    """Returns all effects of some programs or equations."""
    return set().union(*(part.effects for part in parts))


def _is_program(x: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, with constants or without."""
    return hasattr(x, "eqns")


def run_equation(
    equation: Any, inputs: Sequence[Any], mesh: AbstractMesh | None = None
) -> list[Any]:
    """Runs one equation of a traced program, with the mesh and settings that it was traced with.

    Args:
      equation: the equation.
      inputs: the arrays for the ``invars`` of the equation, in order.
      mesh: a mesh that is set instead of the mesh of the trace; None for the mesh of the trace.

    Returns:
      The arrays for the ``outvars`` of the equation, in order.
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
    """Returns a context in which new operations get the names and the source line of an equation.

    The names are its name stack, which ``jax.named_scope`` and ``jit`` add to the names of
    operations. The name stack of the equation comes after the current one.
    """
    if source_info_util is None:  # a private module that this release does not have
        return contextlib.nullcontext()
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    context: AbstractContextManager[object] = source_info_util.user_context(
        equation.source_info.traceback, name_stack=names
    )
    return context
