"""The base of transforms that become part of the surrounding trace, and compile nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeAlias

import jax

from .. import _compat
from ..activations.tracing import inherited, pass_paths, pass_tags
from ..core.arguments import PLAIN
from ..core.call import run
from ..core.call_context import Caller
from ..core.flatten import Flat
from ..core.functions import Several
from ..core.plan import Plan
from ..core.static_equality import Static
from ..core.transform import Program, Transform
from ..core.unflatten import Built
from ..errors import raise_listed
from .by_content import compiled_by_content
from .lifted import LiftedFunction, P, R, unbind
from .partial_sums import PARTIAL_SUMS, PartialSums

Function: TypeAlias = Callable[..., Any]


def is_array(x: Any) -> bool:
    """Whether something is an array or a number, and no Variable."""
    return _compat.is_array_like(x) and not _compat.is_graph_object(x)


def described(value: Any) -> str:
    """What something is, for messages: ``float32[2,4]``, ``a Linear``, ``the class Linear``."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return jax.typeof(value).str_short() if is_array(value) else f"a {type(value).__name__}"


def form(tree: Any) -> str:
    """A pytree with the types of its leaves, for messages."""
    types = jax.tree.map(described, tree, is_leaf=_compat.is_graph_object)
    return textwrap.shorten(repr(types).replace("'", ""), 300)


def replaced(leaves: Sequence[Any], slots: Iterable[int], arrays: Iterable[Any]) -> list[Any]:
    """Arrays with others in some slots."""
    new = dict(zip(slots, arrays, strict=True))
    return [new.get(slot, leaf) for slot, leaf in enumerate(leaves)]


def of_slots(function: Function, slots: Sequence[int], leaves: Sequence[Any]) -> Function:
    """A function of the arrays in some slots only; the others are fixed."""
    return lambda *arrays: function(*replaced(leaves, slots, arrays))


def is_traced(leaf: Any) -> bool:
    """Whether an argument is traced; flags and what is not an array stay as they are."""
    return _compat.is_array_like(leaf) and not isinstance(leaf, bool)


# What a call gets that is not an array, by slot.
Fixed: TypeAlias = Sequence[tuple[int, Static]]


def fixed_of(leaves: Sequence[Any]) -> Fixed:
    """The arguments that are not traced."""
    return tuple((s, Static.of(x)) for s, x in enumerate(leaves) if not is_traced(x))


def is_kept(fixed: Fixed) -> bool:
    """Whether a function with these arguments may be kept, for JAX to find its trace.

    It must not keep the user's objects alive.
    """
    return all(isinstance(static.value, PLAIN) for _, static in fixed)


def at_top_level(call: Function, compiled: Callable[[Function], Function] = jax.jit) -> Function:
    """The same function, compiled when called outside of any trace, where JAX keeps no trace."""

    @functools.lru_cache(maxsize=64)
    def program(fixed: Fixed, count: int) -> Function:
        known = {slot: static.value for slot, static in fixed}
        slots = [slot for slot in range(count) if slot not in known]
        leaves = [known.get(slot) for slot in range(count)]
        return compiled(of_slots(call, slots, leaves))

    def run(*leaves: Any) -> Any:
        if not _compat.trace_is_clean():
            return call(*leaves)
        fixed = fixed_of(leaves)
        if not is_kept(fixed):
            return call(*leaves)
        return program(fixed, len(leaves))(*filter(is_traced, leaves))

    return run


class Functions(Several):
    """The functions of one call of a transform that takes several; called, it is the first.

    What they are bound to, and callable modules, are ``objects``, the argument that comes first.
    """

    __slots__ = ("__name__", "__signature__", "bound", "objects")

    def __init__(self, name: str, functions: Mapping[str, Any], leading: Sequence[str], count: int):
        given = functions.values()
        wrong = [f"  {key}: {x!r:.200}" for key, x in functions.items() if not callable(x)]
        raise_listed(TypeError, f"{name}: expected functions, got:", wrong)
        pairs = [(type(x).__call__, (x,)) if _compat.is_node(x) else unbind(x) for x in given]
        self.__name__, self.functions = name, tuple(function for function, _ in pairs)
        self.objects = [*{id(x): x for _, own in pairs for x in own}.values()]
        # For each function the places of its objects.
        places = {id(x): place for place, x in enumerate(self.objects)}
        self.bound = tuple(tuple(places[id(x)] for x in own) for _, own in pairs)
        self.__signature__ = _signature(pairs[0], leading, count)

    def which(self, number: int) -> Function:
        """One of the functions, with the objects as its first argument."""
        function, bound = self.functions[number], self.bound[number]

        @functools.wraps(function, updated=())
        def call(objects: Sequence[Any], *args: Any) -> Any:
            return function(*(objects[place] for place in bound), *args)

        return call

    def __call__(self, *args: Any) -> Any:  # noqa: D102
        return self.which(0)(*args)


def _signature(
    function: tuple[Any, Sequence[Any]], leading: Sequence[str], count: int
) -> inspect.Signature:
    """The leading parameters, and those of a function, if they fit a call with so many operands."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    try:
        own = [*inspect.signature(function[0]).parameters][len(function[1]) :][:count]
    except (TypeError, ValueError):  # some functions written in C
        own = []
    names = [*leading, *own]
    parameters = [inspect.Parameter(name, kind) for name in dict.fromkeys(names)]
    if len(own) < count or len(parameters) < len(names):
        parameters = [inspect.Parameter(name, kind) for name in leading]
        parameters.append(inspect.Parameter("operands", inspect.Parameter.VAR_POSITIONAL))
    return inspect.Signature(parameters)


class InnerTransform(Transform):
    """What these transforms decide: no shardings, and anything may be an argument.

    Attributes:
      compiles_at_top_level: whether JAX compiles what it runs outside of any trace, as a loop.
    """

    compiles_at_top_level: ClassVar[bool] = False

    def tracing(  # noqa: D102
        self, plan: Plan, caller: Caller, built: Built, leaves: Sequence[Any]
    ) -> AbstractContextManager[Function]:
        pass_tags(caller, built)
        pass_paths(caller, built)
        return contextlib.nullcontext(self.wrapped(plan, caller, built))

    def wrapped(self, plan: Plan, caller: Caller, built: Built) -> Function:
        """What is called for the user's function."""
        fun: Function = caller.fun
        return fun

    def compile(  # noqa: D102
        self,
        plan: Plan,
        function: Function,
        in_specs: Sequence[Any],
        out_specs: Sequence[Any],
        donated: tuple[int, ...],
    ) -> Program:
        call = self.applied(plan, function, in_specs, out_specs)

        def inline(*leaves: Any) -> Any:
            sums = PARTIAL_SUMS.get()
            if sums is None or not self.can_pass_sums(sums, in_specs, leaves):
                return call(*leaves)
            found = {
                slot: partial
                for slot, leaf in enumerate(leaves)
                if (partial := sums.of(leaf)) is not None and self.passes_sums(in_specs[slot])
            }
            if not found:
                return call(*leaves)

            def with_sums(*every: Any) -> Any:
                pairs = zip((every[slot] for slot in found), every[len(leaves) :], strict=True)
                with sums.known(pairs):
                    return function(*every[: len(leaves)])

            names = [*plan.names, *(plan.names[slot] for slot in found)]
            specs = [*in_specs, *(in_specs[slot] for slot in found)]
            every = dataclasses.replace(plan, names=names)
            more = self.applied(every, with_sums, specs, out_specs)
            return more(*leaves, *found.values())

        by_content = at_top_level(inline, compiled_by_content)
        anew = by_content if self.compiles_at_top_level else inline
        return Program(staged=None, top_level=inline, inline=inline, traced_anew=anew)

    def can_pass_sums(
        self, sums: PartialSums, in_specs: Sequence[Any], leaves: Sequence[Any]
    ) -> bool:
        """Whether a call with these arrays can take partial sums at all."""
        return True

    def passes_sums(self, spec: Any) -> bool:
        """Whether the partial sums of a parameter go into the function in the same way."""
        return True

    def applied(
        self, plan: Plan, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        """What is called for a pure function; the arguments are those of :meth:`compile`."""
        return function


class Inner(LiftedFunction[P, R]):
    """A function that takes and returns NNX objects, transformed by JAX.

    Changes that it makes to its arguments are made to the caller's own objects. It is called
    within other transforms, such as :func:`~nnx_sharding.jit`, or at top level.
    """

    @_compat.api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; its changes are made to the caller's own objects."""
        plan, flat = self._found((*self._bound, *args), kwargs)
        return self._run(plan, flat, self._executed(plan, flat))  # type: ignore[no-any-return]

    def _run(self, plan: Plan, flat: Flat, execute: Function, fun: Any = None) -> Any:
        """Runs a call within the current trace, if any; ``fun`` takes the place of the function."""
        with inherited(flat.objects):
            return run(plan, flat, execute, fun or self._fun, nested=True)
