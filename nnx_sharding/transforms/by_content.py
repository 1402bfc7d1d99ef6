"""Programs that are found by the content of their jaxpr, for functions that capture arrays.

A function that captures arrays has no fingerprint (:mod:`~nnx_sharding.core.fingerprint`), so it is
traced at each call. A function that counts its calls has another fingerprint in each of them. At
top level the new jaxpr would also be compiled at each call, which takes ten times as long, although
in most cases only the values of captured arrays differ. So these arrays become inputs of the
program, and a jaxpr uses the program of the first jaxpr with the same content:

    f(x), which captures the array w
      → trace:    { lambda w; x. let y = dot w x in (y,) }, and the value of w
      → content:  the equations, with variables as numbers and parameters by value
      → program:  jit(jaxpr)(w, x), compiled once for this content

Derivative rules are not part of the content, because nothing is differentiated at top level. A
jaxpr with parameters that are not compared by value, such as the functions of callbacks, has no
content and is compiled at each call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Sharding

from .. import _compat
from ..core.bounded import make_room
from ..core.static_equality import Static, value_key
from ..core.static_parts import has_hidden_state, open_object

# Primitives that hold rules for derivatives. They compute the jaxpr in ``call_jaxpr``.
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")
# The programs by content. A program holds no values of captured arrays.
_PROGRAMS: dict[Hashable, Callable[..., Any]] = {}
_MAX_PROGRAMS = 64


class _NoContentError(Exception):
    """A jaxpr has parameters that are not compared by value."""


def compiled_by_content(
    function: Callable[..., object],
    *,
    in_shardings: Sequence[Sharding] | None = None,
    out_shardings: object = None,
) -> Callable[..., Any]:
    """Compiles a function of arrays once for all its traces with the same content.

    Args:
      function: a function of arrays that returns a pytree of arrays.
      in_shardings: a sharding for each argument, as in ``jax.jit``; None to leave all arguments.
      out_shardings: the shardings of the results, as a pytree prefix of them; None to leave them.

    Returns:
      A function that traces ``function`` at each call, and compiles only for a new content.
    """

    def call(*leaves: object) -> Any:
        # The function is traced each time, but only a new content is compiled, which takes longer.
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*leaves)
        # Each result gets a sharding, or None, which leaves it to JAX. `is_leaf` is needed because
        # None is an empty pytree for JAX.
        per_result = jax.tree.broadcast(out_shardings, shapes, is_leaf=_is_none)
        flat_shardings = (*jax.tree.leaves(per_result, is_leaf=_is_none),)
        # `consts` are the captured arrays, which become arguments of the program. A `jax.Ref`
        # cannot become one, so with refs the jaxpr runs uncompiled, operation by operation.
        if any(map(_compat.is_ref, closed.consts)):
            arrays = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
        else:
            program = _program_of(closed.jaxpr, in_shardings, flat_shardings)
            arrays = program(closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    return call


def _is_none(x: object) -> bool:
    return x is None


def _program_of(
    jaxpr: Jaxpr,
    in_shardings: Sequence[Sharding] | None,
    out_shardings: tuple[Sharding | None, ...],
) -> Callable[..., Any]:
    """Finds the program of an earlier jaxpr with this content, or makes one.

    Args:
      in_shardings: a sharding for each argument; None to keep the shardings of the arrays.
      out_shardings: the sharding of each result, or None.

    Returns:
      A function of two lists: the constants of the jaxpr, and its arguments.
    """
    try:
        # The key is hashable, and equal for equal jaxprs and shardings.
        key = content_of(jaxpr), _value_of(in_shardings), _value_of(out_shardings)
    except _NoContentError:  # there is no key, so no other jaxpr can use the program
        return _make_program(jaxpr, in_shardings, out_shardings)
    program = _PROGRAMS.get(key)
    if program is None:
        # `setdefault` takes the program of another thread that was faster, because that program may
        # be compiled already.
        program = _PROGRAMS.setdefault(key, _make_program(jaxpr, in_shardings, out_shardings))
        make_room(_PROGRAMS, _MAX_PROGRAMS)
    return program


def _make_program(
    jaxpr: Jaxpr,
    in_shardings: Sequence[Sharding] | None,
    out_shardings: tuple[Sharding | None, ...],
) -> Callable[..., Any]:
    """Makes a program of a jaxpr, ``program(constants, arguments)``; JAX compiles it when called.

    Args:
      jaxpr: the jaxpr. Its constants become arguments, so that their values may differ.
      in_shardings: a sharding for each argument; None to keep the shardings of the arrays.
      out_shardings: the sharding of each result, or None.
    """

    def program(constants: Sequence[object], leaves: Sequence[object]) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, constants, *leaves)

    options: dict[str, Any] = {}
    if in_shardings is not None:
        # The constants keep the shardings that they have.
        options["in_shardings"] = (None, in_shardings)
    if any(sharding is not None for sharding in out_shardings):
        options["out_shardings"] = [*out_shardings]
    return jax.jit(program, **options)


def content_of(jaxpr: Jaxpr) -> Hashable:
    """Returns a hashable form of a jaxpr that is equal for equal programs: variables as numbers.

    The jaxpr ``{ a. let b = sin a; c = mul a b in (c,) }`` has variables 0, 1, 2, and roughly the
    content ``(type of a), ("sin", (0,), type of b), ("mul", (0, 1), type of c), (2,)``. The content
    leaves out debug info, such as lines and names, because it does not change the results, and
    effects, because they follow from the equations. A jaxpr in a parameter, such as the body of a
    loop, has numbers of its own.

    Raises:
      _NoContentError: the jaxpr has parameters or literals that are not compared by value.
    """
    numbers: dict[Var, int] = {}  # in the order in which the variables are defined

    def define(variables: Sequence[Var]) -> tuple[Hashable, ...]:
        """Gives variables their numbers; returns their types."""
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple(variable.aval for variable in variables)

    def use(atoms: Iterable[Var | Literal]) -> tuple[Hashable, ...]:
        """Returns the numbers of variables, and literals by type and value."""
        return tuple(
            (x.aval, _literal(x.val)) if isinstance(x, Literal) else numbers[x] for x in atoms
        )

    inputs = define(jaxpr.constvars), define(jaxpr.invars)
    equations = [
        (
            equation.primitive.name,
            use(equation.invars),
            _parameters(equation),  # by name, in a hashable form
            _value_of(equation.ctx),  # the context of JAX in the trace, such as the mesh
            define(equation.outvars),
        )
        for equation in jaxpr.eqns
    ]
    return *inputs, *equations, use(jaxpr.outvars)


def _parameters(equation: JaxprEqn) -> Hashable:
    """Returns the parameters of an equation by name, without rules for derivatives.

    The rules are left out because nothing is differentiated at top level.
    """
    if equation.primitive.name in _WITH_RULES:
        return _value_of(equation.params["call_jaxpr"])
    return tuple((name, _value_of(value)) for name, value in sorted(equation.params.items()))


def _literal(value: object) -> Hashable:
    """Returns a key for a number in a jaxpr, by its bits.

    Values would not do, because 0.0 equals -0.0, and NaN does not equal itself.
    """
    if isinstance(value, jax.Array):  # reading it from its device would wait for it
        raise _NoContentError
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def _value_of(value: object) -> Hashable:
    """Returns a hashable form of a parameter of an equation, equal for equal parameters.

    Parameters are jaxprs, functions, plain values, objects of JAX's own classes, or lists of these.

    Raises:
      _NoContentError: the parameter is not compared by value, such as a function with a closure.
    """
    jaxpr = getattr(value, "jaxpr", value)  # a ClosedJaxpr has a jaxpr and constants
    if isinstance(jaxpr, Jaxpr):
        # Constants that are arrays have no form here, because only the constants of the outermost
        # jaxpr become arguments of the program.
        return content_of(jaxpr), tuple(map(_value_of, getattr(value, "consts", ())))
    if isinstance(value, tuple | list):
        return type(value), *map(_value_of, value)
    # A function that its module defines by name is the same object in each trace. If it was defined
    # again, for example in a notebook, it is another object. Other functions are new in each trace.
    if isinstance(value, types.FunctionType) and _is_defined_by_name(value):
        return Static.of(value)
    # The key is for numbers, strings, dtypes, meshes and similar values; None for a value that is
    # not compared by value. Arrays are refused below, because their key would copy the data.
    key = None if isinstance(value, jax.Array) else value_key(value)
    if key is not None:
        return key
    cls = type(value)
    # JAX's own classes, for trees, options, …, are compared by the contents of their objects. An
    # object that is implemented in C may hold something that Python does not see
    # (`has_hidden_state`).
    if cls.__module__.partition(".")[0] != "jax" or has_hidden_state(cls):
        raise _NoContentError
    kind, parts = open_object(value)  # the class with names, and the values
    return kind, *map(_value_of, parts)


def _is_defined_by_name(function: types.FunctionType) -> bool:
    """Whether a function is an attribute of its module, where each trace finds the same object."""
    module = sys.modules.get(function.__module__)
    return getattr(module, function.__qualname__, None) is function
