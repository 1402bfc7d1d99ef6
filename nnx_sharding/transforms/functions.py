"""Calls of transforms that take several functions: the branches of `cond`, the steps of loops.

JAX traces one pure function for each plan, so the functions of a call become one: it takes all
objects that they are bound to as its first argument, and which of them runs is decided in the trace
(:meth:`Functions.bind`). Callable modules, and the objects of bound methods, are arguments like
others, so that the functions may change them: ``model.loss`` becomes ``Model.loss`` with the object
``model``.

A transform of them (`InnerTransform`) says how JAX calls that pure function; `Inner` calls it as a
part of a trace. `Roles` are static and donated arguments, of which these transforms have none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from .. import _compat
from ..core.functions import FunctionGroup
from ..core.signature import Roles
from ..errors import raise_listed
from ..specs.fitting import show
from .in_trace import Function, Inner, InnerTransform, type_text
from .lifted import Modes, unbind


class Functions(FunctionGroup):
    """The functions of one call, as one function of all objects and of further arguments.

    What a trace calls is `bind` of one of them. To be called itself, it is the first one.

    Attributes:
      functions: the functions, without what they are bound to.
      objects: what they are bound to, and the callable modules among them, each once. It is the
        first argument of each function.
      bound: for each function, the positions of its objects.
    """

    __slots__ = ("__name__", "__signature__", "bound", "objects")

    def __init__(
        self,
        name: str,
        functions: Mapping[str, Callable[..., object]],
        leading: Sequence[str],
        num_operands: int,
    ):
        """Separates the functions of a call from the objects that they are bound to.

        Args:
          name: the name of the transform, for messages.
          functions: the functions, by the names of the options that they are given as.
          leading: the names of arguments that the transform adds before the operands.
          num_operands: the number of the user's further arguments.

        Raises:
          TypeError: some are not callable.
        """
        wrong = [f"  {key}: {show(x)}" for key, x in functions.items() if not callable(x)]
        raise_listed(TypeError, f"{name}: expected functions, got:", wrong)
        # Each function without what it is bound to, and the tuple of that: for `model.loss`,
        # `(Model.loss, (model,))`.
        pairs = [
            # A callable module is its class's ``__call__``, bound to the module.
            (type(x).__call__, (x,)) if _compat.is_node(x) else unbind(x)
            for x in functions.values()
        ]
        self.__name__ = name
        self.functions = tuple(function for function, _ in pairs)
        # Each bound object once: several functions may be methods of one module.
        unique = {id(x): x for _, bound in pairs for x in bound}
        self.objects = [*unique.values()]
        positions = {key: position for position, key in enumerate(unique)}
        # For each function, the positions of what it is bound to among the objects.
        self.bound = tuple(tuple(positions[id(x)] for x in bound) for _, bound in pairs)
        # The parameters of the first one name the operands in messages and in the program.
        first, first_bound = pairs[0]
        self.__signature__ = _signature(first, len(first_bound), leading, num_operands)

    def bind(self, number: int) -> Function:
        """Returns one of the functions as a function of all objects, then of its own arguments."""
        function = self.functions[number]
        bound = self.bound[number]

        # With its name, for messages and for the program. Not with its ``__dict__``: one of the
        # functions may be a class, whose ``__dict__`` has its methods.
        @functools.wraps(function, updated=())
        def call(objects: Sequence[object], *args: object) -> Any:
            return function(*(objects[position] for position in bound), *args)

        return call

    def __call__(self, *args: object) -> Any:  # noqa: D102
        return self.bind(0)(*args)


def _signature(
    function: Function, num_bound: int, leading: Sequence[str], num_operands: int
) -> inspect.Signature:
    """Makes a signature of the leading parameters, and then the operands.

    Operands are called as ``function`` calls its parameters, if it has a name for each:
    ``(selector, branches, x, y)``. If it has not, or a name is also that of a leading parameter,
    they are ``(selector, branches, *operands)``.

    Args:
      function: a function of the operands, as in its class: with a parameter for what it is bound
        to.
      num_bound: the number of its first parameters that are bound, and so no operands.
      leading: the names of the parameters before the operands.
      num_operands: the number of operands.
    """
    kind = inspect.Parameter.POSITIONAL_ONLY
    try:
        own_names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # some functions written in C
        own_names = []
    operands = own_names[num_bound:][:num_operands]
    names = [*leading, *operands]
    has_all_names = len(operands) == num_operands
    are_distinct = len({*names}) == len(names)
    if has_all_names and are_distinct:
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])
    parameters = [inspect.Parameter(name, kind) for name in leading]
    parameters.append(inspect.Parameter("operands", inspect.Parameter.VAR_POSITIONAL))
    return inspect.Signature(parameters)


def call_functions(
    functions: Functions,
    transform: InnerTransform,
    modes: Modes,
    *args: object,
) -> Any:
    """Calls a transform of several functions, which are one function for it.

    Args:
      functions: the functions; which of them run, and when, is for the transform to decide.
      transform: the transform, such as that of ``cond``, which knows the order of the arguments.
      modes: how the user wants graphs to be treated.
      *args: what the transform takes: among others ``functions.objects``, the list of all objects
        that the functions are bound to, and the operands.

    Returns:
      What the transform returns.
    """
    no_roles = Roles()
    graph, updates = _compat.graph_mode(*modes)
    lifted: Any = Inner(functions, transform, no_roles, graph=graph, updates=updates)
    return lifted(*args)


def scalar_value(name: str, argument: str, value: Any, kinds: str, expected: str) -> Any:
    """Returns the value of a scalar argument, which may be in a Variable.

    Args:
      name: the name of the transform, for messages.
      argument: the name of the argument.
      value: the argument.
      kinds: the allowed kinds of dtype, as ``np.dtype.kind``: ``"iu"`` for integers.
      expected: what it should be, for messages, such as ``"an integer scalar"``.

    Raises:
      TypeError: it is no scalar, or of another kind.
    """
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    is_scalar = _compat.is_array_like(value) and jnp.shape(value) == ()
    if not is_scalar or jnp.result_type(value).kind not in kinds:
        raise TypeError(f"{name}: {argument} must be {expected}, got {type_text(value)}.")
    return value
