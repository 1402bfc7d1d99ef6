"""Differentiation at some arrays of NNX objects: a base, and ``vjp``, ``jvp``, ``linearize``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from ..core.arguments import leaves_by_path
from ..core.call_context import Caller
from ..core.flatten import Flat, flatten
from ..core.functions import name_of
from ..core.plan import Plan
from ..core.signature import Roles
from ..core.structure import Child, Container, Structure
from ..core.unflatten import Built, unflatten
from ..errors import raise_listed
from ..specs.paths import Path, accessor
from .in_trace import Function, Inner, InnerTransform, described, form, replaced
from .lifted import P, R, lift


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differentiation(InnerTransform):
    """What these transforms decide."""

    returns_any: ClassVar[bool] = True  # auxiliary data

    in_name: str = "primals"
    has_aux: bool = False

    def wrapped(self, plan: Plan, caller: Caller, built: Built) -> Function:  # noqa: D102
        def checked(*args: Any, **kwargs: Any) -> Any:
            out = caller.fun(*args, **kwargs)
            name = name_of(caller.fun)
            if self.has_aux:
                pair = f"with has_aux=True {name} must return a pair (output, aux)"
                check_pair(f"{self.name}: {pair}", out)
            self.check_output(name, out[0] if self.has_aux else out)
            return out

        return checked

    def check_output(self, fun_name: str, out: Any) -> None:
        """Raises an error for what cannot be differentiated."""


def check_pair(expected: str, out: Any) -> None:
    """Raises an error for what is no pair."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"{expected}, got {form(out)}.")


def is_inexact(x: Any) -> bool:
    """Whether something is an array that has a derivative; a ``jax.Ref`` has none."""
    is_array = _compat.is_array_like(x) and not _compat.is_ref(x)
    dtype = getattr(jax.typeof(x), "dtype", None) if is_array else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def tangent_type(x: Any) -> Any:
    """The type of tangents of an array, or of a value of a hijax type; None for what has none."""
    if is_inexact(x):
        return jax.typeof(x)
    if not _compat.is_array_like(x) or hasattr(aval := jax.typeof(x), "dtype"):
        return None
    try:
        aval = aval.to_tangent_aval()
    except NotImplementedError:
        return None
    return aval if jnp.issubdtype(getattr(aval, "dtype", float), jnp.inexact) else None


class Differentiable(Inner[P, R]):
    """A function that is called and differentiated at once."""

    _transform: Differentiation

    def at(
        self,
        plan: Plan,
        flat: Flat,
        slots: Sequence[int],
        differentiate: Callable[[Function, list[Any]], tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """Calls the function, and returns its output and its derivative at the arrays in slots.

        ``differentiate`` gets a function of these arrays, and them; the function returns the arrays
        of the output, without those of auxiliary data, and everything else that the call returns.
        Of that, ``differentiate`` returns the latter, after the derivative.
        """
        inline, derivatives = self._program(plan, flat).inline, list[Any]()

        def execute(*leaves: Any) -> Any:
            def function(arrays: Sequence[Any]) -> tuple[list[Any], Any]:
                every = replaced(leaves, slots, arrays)
                *groups, outcome = outputs = inline(*every)
                results = outcome.arrays(every, groups)
                chosen = _output_slots(outcome.structure, has_aux=self._transform.has_aux)
                return [results[slot] for slot in chosen], outputs

            derivative, outputs = differentiate(function, [leaves[slot] for slot in slots])
            derivatives.append(derivative)
            return outputs

        out = self._run(plan, flat, execute)
        return out, derivatives[0]


def _output_slots(structure: Structure, *, has_aux: bool) -> Iterable[int]:
    """The slots of what is differentiated in what a function returned."""
    child: Any = structure.root
    if has_aux:
        first = child.treedef.children()[0]
        parts = child.children[: first.num_leaves]
        is_leaf = jax.tree_util.treedef_is_leaf(first) and first.num_nodes == 1
        child = parts[0] if is_leaf else Container(first, parts)
    return (slot for slots in slots_by_path(structure, child).values() for slot in slots)


class Form:
    """The form of tangents: some pytrees of objects and arrays, and which arrays have tangents.

    Attributes:
      slots: those of the arrays that have tangents.
    """

    def __init__(self, flat: Flat, places: Mapping[Path, tuple[int, ...]]):
        """``places`` are the paths of what has tangents, with their slots in the structure."""
        self._structure, self._places = flat.structure, places
        every = dict.fromkeys(slot for slots in self._places.values() for slot in slots)
        types = {slot: tangent_type(flat.leaves[slot]) for slot in every}
        self._types = {slot: aval for slot, aval in types.items() if aval is not None}
        self.slots = [*self._types]
        self._rest = [without_tangent(x) for x in flat.leaves]

    def built(self, arrays: Sequence[Any]) -> Any:
        """New objects in the form of the whole structure, with these arrays."""
        leaves = replaced(self._rest, self.slots, arrays)
        return unflatten(self._structure, leaves, share=True).root

    def arrays(self, name: str, given: Any, *, may_omit: bool = False) -> list[Any]:
        """The tangents in such objects; with ``may_omit``, None where they have None instead."""
        found = flatten(given)
        places, leaves = slots_by_path(found.structure), found.leaves
        omitted = set[Path]()
        if may_omit:
            nones = leaves_by_path(given, lambda x: x is None or _compat.is_graph_object(x))
            starts = [path for path, x in nones.items() if x is None]
            omitted = {p for p in self._places if any(p[: len(x)] == x for x in starts)}
        own = {path: slots for path, slots in self._places.items() if path not in omitted}
        what = name.rpartition(" ")[2]
        lines = [
            f"  {accessor(what, path)}: {problem}"
            for path in dict.fromkeys((*own, *places))
            if (problem := _mismatch(own.get(path), places.get(path)))
        ]
        head = f"{name}: the structure of {form(given)} is not that of their values:"
        raise_listed(ValueError, head, lines)
        tangents = {
            slot: (accessor(what, path), leaves[position])
            for path, slots in own.items()
            for slot, position in zip(slots, places[path], strict=True)
            if slot in self._types
        }
        lines = [
            f"  {place}: {described(x)}, expected {self._types[slot].str_short()}"
            for slot, (place, x) in tangents.items()
            if not _fits(x, self._types[slot])
        ]
        head = f"{name}: these tangents have other types than their values:"
        raise_listed(TypeError, head, lines)
        return [
            as_array(tangents[slot][1], aval) if slot in tangents else None
            for slot, aval in self._types.items()
        ]


def as_array(x: Any, aval: Any = None) -> Any:
    """An array with the dtype of a type, or its own; a value of a hijax type as it is."""
    own = jax.typeof(x)
    return jnp.asarray(x, getattr(aval or own, "dtype", None)) if hasattr(own, "dtype") else x


def slots_by_path(structure: Structure, child: Child | None = None) -> dict[Path, tuple[int, ...]]:
    """The slots of the arrays in a child of a structure, by default its root, by path."""
    child = structure.root if child is None else child
    return {x.path: x.slots for x in structure.walk(child, iter(structure.root_slots))}


def without_tangent(x: Any) -> Any:
    """What JAX has for the tangent of an array that has none: zeros of a dtype of their own."""
    if not _compat.is_array_like(x) or _compat.is_ref(x):
        return x
    return np.zeros(np.shape(x), jax.dtypes.float0)


def _mismatch(own: Any, given: Any) -> str:
    if own is None or given is None:
        return "missing" if given is None else "unexpected"
    return "" if len(own) == len(given) else f"{len(given)} arrays, expected {len(own)}"


def _fits(x: Any, aval: Any) -> bool:
    if not _compat.is_array_like(x):
        return False
    own = jax.typeof(x)
    if not hasattr(aval, "dtype") or not hasattr(own, "dtype"):
        return bool(own == aval)
    is_same = own.dtype == aval.dtype or own.weak_type
    return bool(own.shape == aval.shape and is_same)


# Of a function of arrays, these, and the form of the primals: the derivative, and what the function
# returns besides its output.
_Differentiate = Callable[[Function, list[Any], Form], tuple[Any, Any]]


class _AtPoint(Differentiable[..., Any]):
    """A function that is differentiated with respect to all that is inexact in its arguments."""

    def along(self, primals: Sequence[Any], differentiate: _Differentiate) -> Any:
        """What the function returned, the derivative, and the forms of the primals and the output.

        The first is a tuple of the output and, if there are, auxiliary data.
        """
        arguments, count = (*self._bound, *primals), len(self._bound)
        call, flat = self._split(arguments, {})
        plan, _ = self._plan(call, flat)
        # The pullback may be called when the caller's objects are gone.
        held = flatten((arguments, {}), graph=self._modes["graph"])
        children: Any = held.structure.root
        treedef = jax.tree_util.tree_structure(tuple(primals), is_leaf=_compat.is_graph_object)
        of_primals = Container(treedef, children.children[count:])
        inputs = Form(held, slots_by_path(held.structure, of_primals))

        def at(function: Function, arrays: list[Any]) -> tuple[Any, Any]:
            def inexact(arrays: Sequence[Any]) -> tuple[list[Any], Any]:
                out, others = function(arrays)
                return [x for x in out if tangent_type(x) is not None], others

            return differentiate(inexact, [*map(as_array, arrays)], inputs)

        out, derivative = self.at(plan, flat, inputs.slots, at)
        out = tuple(out) if self._transform.has_aux else (out,)
        after = flatten(out[0])
        return out, derivative, inputs, Form(after, slots_by_path(after.structure))


def _along(
    name: str,
    fun: Any,
    has_aux: bool,
    modes: tuple[bool | None, bool | None],
    primals: Sequence[Any],
    differentiate: _Differentiate,
) -> Any:
    transform = Differentiation(name=name, has_aux=has_aux)
    lifted: Any = lift(_AtPoint, fun, transform, Roles(), *modes)
    return lifted.along(primals, differentiate)


@_compat.api_boundary
def vjp(
    fun: Any = None,
    *primals: Any,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and returns its output and the function that pulls cotangents back.

    Without primals it is a decorator, whose function takes them. Changes that ``fun`` makes to its
    arguments are made to the caller's own objects.

    Args:
      fun: the function. What it is bound to, if it is a method, is not differentiated.
      *primals: its arguments: modules, Variables, arrays, and pytrees of these.
      has_aux: whether ``fun`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, pullback)``, or ``(output, pullback, aux)``. ``pullback`` takes cotangents in the
      structure of the output, and returns a tuple with those of each primal: for a module a new
      module with the cotangents in place of its arrays, those of integers of dtype ``float0``. It
      can be called any number of times.

    Raises:
      TypeError: cotangents of another shape or dtype than the output; no pair with ``has_aux``.
      ValueError: cotangents of another structure.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import vjp
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> y, pullback = vjp(lambda model, x: model(x), model, jnp.ones((4, 2)))
      >>> of_model, of_x = pullback(jnp.ones_like(y))
      >>> of_model.bias[...], of_x.shape
      (Array([4., 4., 4.], dtype=float32), (4, 2))

    The semantics are those of ``jax.vjp`` and ``flax.nnx.vjp``.
    """
    if fun is None or not primals:
        options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}
        return functools.partial(vjp, *([] if fun is None else [fun]), has_aux=has_aux, **options)

    def differentiate(function: Function, arrays: list[Any], _: Form) -> tuple[Any, Any]:
        return jax.vjp(function, arrays, has_aux=True)[1:]

    modes = graph, graph_updates
    out, pull, inputs, outputs = _along("vjp", fun, has_aux, modes, primals, differentiate)

    def pullback(cotangents: Any) -> Any:
        [arrays] = pull(outputs.arrays("vjp: cotangents", cotangents))
        return inputs.built(arrays)[0][-len(primals) :]

    return out[0], pullback, *out[1:]


@_compat.api_boundary
def jvp(
    fun: Any = None,
    primals: Sequence[Any] | None = None,
    tangents: Sequence[Any] | None = None,
    *,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and pushes tangents of its arguments forward.

    Without primals it is a decorator, whose function takes primals and tangents.

    Args:
      fun: the function, as for :func:`vjp`.
      primals: its arguments, a tuple.
      tangents: a tuple with the tangent of each: for a module one of the same structure, such as
        ``jax.tree.map(jnp.ones_like, model)``. Those of integers are ignored.
      has_aux: whether ``fun`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, tangent)``, or ``(output, tangent, aux)``.

    Raises:
      TypeError: tangents of another shape or dtype than the primals; no pair with ``has_aux``.
      ValueError: tangents of another structure.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import jvp
      >>> model, x = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.ones(2)
      >>> tangent = jax.tree.map(jnp.ones_like, model)
      >>> jvp(lambda model, x: model(x), (model, x), (tangent, 0 * x))[1]
      Array([3.], dtype=float32)

    The semantics are those of ``jax.jvp`` and ``flax.nnx.jvp``.
    """
    if fun is None or primals is None or tangents is None:
        options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}
        return functools.partial(jvp, *([] if fun is None else [fun]), has_aux=has_aux, **options)

    def differentiate(function: Function, arrays: list[Any], inputs: Form) -> tuple[Any, Any]:
        directions = inputs.arrays("jvp: tangents", tuple(tangents))
        return jax.jvp(function, (arrays,), (directions,), has_aux=True)[1:]

    modes = graph, graph_updates
    out, derivative, _, outputs = _along("jvp", fun, has_aux, modes, primals, differentiate)
    return out[0], outputs.built(derivative), *out[1:]


@_compat.api_boundary
def linearize(
    fun: Any,
    *primals: Any,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls a function, and returns its output and its linear approximation there.

    Args:
      fun: the function, as for :func:`vjp`.
      *primals: its arguments.
      has_aux: whether ``fun`` returns a pair of its output and auxiliary data.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      ``(output, pushforward)``, or ``(output, pushforward, aux)``. ``pushforward`` takes a tangent
      for each primal, as :func:`jvp` does, and returns that of the output, any number of times.

    Raises:
      TypeError: as for :func:`jvp`.
      ValueError: as for :func:`jvp`.

    Example:
      >>> import jax.numpy as jnp
      >>> from nnx_sharding import linearize
      >>> y, pushforward = linearize(jnp.sin, 0.0)
      >>> pushforward(2.0)
      Array(2., dtype=float32)

    The semantics are those of ``jax.linearize``.
    """

    def differentiate(function: Function, arrays: list[Any], _: Form) -> tuple[Any, Any]:
        return jax.linearize(function, arrays, has_aux=True)[1:]

    modes = graph, graph_updates
    out, push, inputs, outputs = _along("linearize", fun, has_aux, modes, primals, differentiate)

    def pushforward(*given: Any) -> Any:
        return outputs.built(push(inputs.arrays("linearize: tangents", given)))

    return out[0], pushforward, *out[1:]
