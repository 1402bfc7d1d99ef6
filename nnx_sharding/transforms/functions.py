"""Calls of transforms that take several functions: the branches of `cond`, the steps of loops.

JAX traces one pure function for each plan, so the functions of a call become one. That function
takes all objects to which they are bound as its first argument, and the trace decides which of them
runs (:meth:`Functions.bind`). Callable modules, and the objects of bound methods, are arguments
like others, because the functions may change them: ``model.loss`` becomes ``Model.loss`` with the
object ``model``.

The transform (`InnerTransform`) says how JAX calls that pure function; `Inner` calls it as a part
of a trace.
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
from ..errors import raise_if_any
from ..specs.fitting import show
from .in_trace import Function, Inner, InnerTransform, type_text
from .lifted import unbind


class Functions(FunctionGroup):
    """The functions of one call, as one function of all objects and of further arguments.

    A trace calls `bind` of one of the functions. The group itself calls the first one.

    Attributes:
      functions: the functions, without the objects to which they are bound.
      objects: these objects, and the callable modules among the functions, each once. The list is
        the first argument of each function.
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
        """Separates the functions of a call from the objects to which they are bound.

        Args:
          name: the name of the transform, for messages.
          functions: the functions, by the names of the options for them.
          leading: the names of arguments that the transform adds before the operands.
          num_operands: the number of the user's further arguments.

        Raises:
          TypeError: some functions are not callable.
        """
        wrong = [f"  {key}: {show(x)}" for key, x in functions.items() if not callable(x)]
        raise_if_any(TypeError, f"{name}: expected functions, got:", wrong)
        pairs = [_unbind_callable(x) for x in functions.values()]
        self.__name__ = name
        self.functions = tuple(function for function, _ in pairs)
        # Each bound object counts once, because several functions may be methods of one module.
        objects_by_id = {id(x): x for _, bound in pairs for x in bound}
        self.objects = [*objects_by_id.values()]
        positions = {key: position for position, key in enumerate(objects_by_id)}
        # For each function, the positions of its objects in the list.
        self.bound = tuple(tuple(positions[id(x)] for x in bound) for _, bound in pairs)
        # The parameters of the first function name the operands in messages and in the program.
        first_function, first_objects = pairs[0]
        self.__signature__ = _signature(first_function, len(first_objects), leading, num_operands)

    def bind(self, number: int) -> Function:
        """Returns one function as a function of the list of all objects, then of its operands."""
        function = self.functions[number]
        bound = self.bound[number]

        # The name is for messages and for the program. The ``__dict__`` is not copied, because one
        # of the functions may be a class, whose ``__dict__`` has its methods.
        @functools.wraps(function, updated=())
        def call(objects: Sequence[object], *args: object) -> Any:
            return function(*(objects[position] for position in bound), *args)

        return call

    def __call__(self, *args: object) -> Any:  # noqa: D102
        return self.bind(0)(*args)


def _unbind_callable(fun: Callable[..., object]) -> tuple[Function, tuple[Any, ...]]:
    """Splits a callable into a function and the objects to which it is bound.

    ``model.loss`` → ``(Model.loss, (model,))``; a callable module → ``(Model.__call__, (model,))``.
    """
    if _compat.is_node(fun):
        return type(fun).__call__, (fun,)
    return unbind(fun)


def _signature(
    function: Function, num_bound: int, leading: Sequence[str], num_operands: int
) -> inspect.Signature:
    """Makes a signature of the leading parameters, and then the operands.

    The operands have the names of ``function``'s parameters, if it has a name for each of them:
    ``(selector, branches, x, y)``. Otherwise, or if a name is also the name of a leading parameter,
    the signature is ``(selector, branches, *operands)``.

    Args:
      function: a function of the operands, as in its class: its first parameters are for the
        objects to which it is bound.
      num_bound: the number of these first parameters, which are no operands.
      leading: the names of the parameters before the operands.
    """
    kind = inspect.Parameter.POSITIONAL_ONLY
    try:
        own_names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # some functions in C have no signature
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
    graph: bool | None,
    graph_updates: bool | None,
    *args: object,
) -> Any:
    """Calls a transform of several functions, which are one function to it.

    Args:
      functions: the functions. The transform decides which of them run, and when.
      transform: the transform, such as that of ``cond``, which knows the order of the arguments.
      graph: the user's option; None for Flax's global flag.
      graph_updates: the user's option; None for Flax's global flag.
      *args: the arguments of the transform. Among them are ``functions.objects``, the list of all
        objects to which the functions are bound, and the operands.

    Returns:
      The result of the transform.
    """
    graph, updates = _compat.graph_mode(graph, graph_updates)
    lifted: Any = Inner(functions, transform, graph=graph, updates=updates)
    return lifted(*args)


def scalar_value(name: str, argument: str, value: Any, kinds: str, expected: str) -> Any:
    """Returns the value of a scalar argument, which may be in a Variable.

    Args:
      name: the name of the transform, for messages.
      argument: the name of the argument.
      value: the argument.
      kinds: the allowed kinds of dtype, as ``np.dtype.kind``: ``"iu"`` for integers.
      expected: the expected type, for messages, such as ``"an integer scalar"``.

    Raises:
      TypeError: the argument is no scalar, or of another kind.
    """
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    is_scalar = _compat.is_array_like(value) and jnp.shape(value) == ()
    if not is_scalar or jnp.result_type(value).kind not in kinds:
        raise TypeError(f"{name}: {argument} must be {expected}, got {type_text(value)}.")
    return value
