"""Updates of optimizers on a mesh: with Auto axes, and with whole matrices in loops.

The types of what an update returns are known: its updates are sharded like the parameters, its new
state like the old one. So the compiler may choose everything in between.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.known_faults import jaxprs_of
from ..core.resharding import mesh_here
from ..core.retyping import Retyping, retyped, type_spec
from ..specs.fitting import axes_of, axes_of_type, only_axes, padded, spec_axes


@contextlib.contextmanager
def partitioned_update(
    optimizer: Any,
    model: Any,
    mesh: Any,
    declared_for: Callable[[Any], tuple[PartitionSpec, Any] | None],
) -> Iterator[None]:
    """Within the block, the transformation of an ``nnx.Optimizer`` runs with Auto axes.

    ``declared_for`` gives the spec of a Variable of the optimizer or its model, with its mesh.
    """
    before = vars(optimizer)["tx"]
    params = () if model is None else nnx.state(model, optimizer.wrt, graph=optimizer.graph)
    variables = jax.tree.leaves((optimizer.opt_state, params), is_leaf=_compat.is_variable)
    declared = [declared_for(x) for x in variables for _ in jax.tree.leaves(x)]
    vars(optimizer)["tx"] = _Partitioned(before, mesh, declared)
    try:
        yield
    finally:
        vars(optimizer)["tx"] = before


class _Partitioned:
    """A transformation of Optax, of which only ``update`` differs."""

    def __init__(self, tx: Any, mesh: Any, declared: Sequence[Any]):
        self._tx, self._mesh, self._declared = tx, mesh, declared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """The updates and the new state, sharded like the parameters and the old state."""
        here = jax.sharding.get_abstract_mesh()
        retyping = Retyping.of(here, True, AxisType.Auto, name="Optimizer.update")
        if retyping is None:
            return self._updated((state, updates, params, extra))
        outer, inner = retyping
        like = updates if params is None else params

        def inside(x: Any) -> Any:
            if not callable(x):
                return retyped(x, inner)

            @functools.wraps(x)
            def call(*args: Any, **kwargs: Any) -> Any:  # a loss, for a line search
                args = tuple(_typed_as(arg, like, outer) for arg in args)
                with jax.sharding.use_abstract_mesh(outer):
                    out = x(*args, **_typed_as(kwargs, (), outer))
                return jax.tree.map(lambda y: retyped(y, inner), out)

            return call

        arguments = state, _typed_as(updates, like, outer), params, extra
        with jax.sharding.use_abstract_mesh(inner):
            new = self._updated(jax.tree.map(inside, arguments))
        return _typed_as(new, (like, state), outer)

    def _updated(self, arguments: Any) -> Any:
        leaves, treedef = jax.tree.flatten(arguments)
        slots = [slot for slot, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def update(*arrays: Any) -> Any:
            new = dict(zip(slots, arrays, strict=True))
            mixed = [new.get(slot, leaf) for slot, leaf in enumerate(leaves)]
            state, updates, params, extra = jax.tree.unflatten(treedef, mixed)
            return self._tx.update(updates, state, params, **extra)

        arrays = [leaves[slot] for slot in slots]
        if self._mesh is None or all(x.ndim < 3 for x in arrays):
            return update(*arrays)
        traced, shapes = jax.make_jaxpr(update, return_shape=True)(*arrays)
        # The state comes first, then the gradients, which have the order of the parameters.
        known = {slot: pair[0] for slot, pair in enumerate(self._declared) if pair is not None}
        pairs = zip(traced.jaxpr.invars, slots, strict=True)
        declared = {var: known[slot] for var, slot in pairs if slot in known}
        whole = _with_whole_matrices(traced.jaxpr, mesh_here(self._mesh), declared)
        whole = traced.replace(jaxpr=whole)
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(whole)(*arrays))


def _typed_as(tree: Any, like: Any, mesh: AbstractMesh) -> Any:
    """A pytree with the types of another one of the same structure, else replicated."""
    leaves, treedef = jax.tree.flatten(tree)
    is_same = jax.tree.structure(like) == treedef  # type: ignore[operator]
    others = jax.tree.leaves(like) if is_same else [None] * len(leaves)

    def typed(x: Any, y: Any) -> Any:
        is_like = y is not None and jnp.shape(x) == jnp.shape(y)
        spec = (type_spec(y) if is_like else None) or PartitionSpec()
        return retyped(x, mesh, PartitionSpec(*spec.partitions)) if isinstance(x, jax.Array) else x

    return jax.tree.unflatten(treedef, map(typed, leaves, others))


def _with_whole_matrices(
    jaxpr: Any, mesh: Any, declared: Mapping[Any, PartitionSpec] = MappingProxyType({})
) -> Any:
    """A jaxpr in which loops have whole matrices, as a Newton-Schulz iteration should.

    In a loop that multiplies one stack of matrices, the stack is sharded over as many devices as
    divide the number of matrices. It is resharded where it was last combined with another array,
    and after the loop: from what is ``declared`` for the state, to that of the parameter.
    """
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    constraints = dict[Any, Any]()
    for eqn in jaxpr.eqns:
        if (stack := _stack(eqn)) is not None and (axes := _dividing(stack.aval.shape[0], mesh)):
            start, end = _start(stack, makers), _end(eqn, stack, jaxpr)
            found = {x: declared[x] for x in _sources(start, makers) if x in declared}
            # That of the state comes first, that of the gradient last.
            around: list[Any] = [found[x] for x in jaxpr.invars if x in found] or [None]
            constraints[start] = _constraint(start, mesh, _steps(around[0], axes, start))
            after = around[-1] if end.aval.shape == start.aval.shape else None
            constraints[end] = _constraint(end, mesh, _steps(after, axes, end)[::-1])

    def constrained(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The variables to assign instead, and the equations that assign these from them."""
        found = [constraints[var] for var in variables if var in constraints]
        new = [constraints[x].invars[0] if x in constraints else x for x in variables]
        return new, [eqn for each in found for eqn in each.eqns]

    invars, eqns = constrained(jaxpr.invars)
    for eqn in jaxpr.eqns:
        outvars, then = constrained(eqn.outvars)
        params = eqn.params
        if eqn.primitive.name in ("cond", "jit", "pjit"):
            params = {key: _inner(value, mesh) for key, value in params.items()}
        eqns += [eqn.replace(outvars=outvars, params=params), *then]
    return jaxpr.replace(invars=invars, eqns=eqns)


def _inner(value: Any, mesh: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_inner(x, mesh) for x in value)
    is_jaxpr = isinstance(getattr(value, "jaxpr", None), Jaxpr)
    return value.replace(jaxpr=_with_whole_matrices(value.jaxpr, mesh)) if is_jaxpr else value


def _constraint(var: Any, mesh: Any, specs: Sequence[PartitionSpec]) -> Any:
    """A jaxpr that assigns a variable from a new one, with one sharding after the other."""

    def constrain(x: Any) -> Any:
        shardings = (NamedSharding(mesh, spec) for spec in specs)
        return functools.reduce(jax.lax.with_sharding_constraint, shardings, x)

    jaxpr = jax.make_jaxpr(constrain)(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)).jaxpr
    return jaxpr.replace(eqns=[*jaxpr.eqns[:-1], jaxpr.eqns[-1].replace(outvars=[var])])


def _steps(before: PartitionSpec | None, axes: Sequence[Any], var: Any) -> list[PartitionSpec]:
    """Specs that shard the first dimension, over one axis more in each."""
    rank = var.aval.ndim
    entries: list[Any] = [None] * rank if before is None else padded(before, rank)
    used = [axis for axis in (() if before is None else spec_axes(before)) if axis in axes]
    order = [*used, *(axis for axis in axes if axis not in used)]
    specs = [] if before is None else [PartitionSpec(*entries)]
    for count in range(1, len(order) + 1):
        rest = only_axes(PartitionSpec(*entries), used[count:])
        first, *others = padded(rest, rank)
        specs.append(PartitionSpec((*order[:count], *axes_of(first)), *others))
    return specs


def _sources(var: Any, makers: Mapping[Any, Any]) -> Iterator[Any]:
    """The inputs of the same shape from which an array comes."""
    if var not in makers:
        yield var
        return
    for x in makers[var].invars:
        if not isinstance(x, Literal) and x.aval.shape == var.aval.shape:
            yield from _sources(x, makers)


def _stack(eqn: Any) -> Any:
    """The stack of matrices that a loop multiplies, if that is its only one."""
    if eqn.primitive.name not in ("scan", "while"):
        return None
    stacks = [var for var in eqn.invars if len(var.aval.shape) > 2]
    shapes = [var.aval.shape for var in eqn.outvars]
    is_one = len(stacks) == 1 and stacks[0].aval.shape in shapes
    return stacks[0] if is_one and any(map(_multiplies, jaxprs_of(eqn))) else None


def _multiplies(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "dot_general" or any(map(_multiplies, jaxprs_of(eqn)))
        for eqn in jaxpr.eqns
    )


def _start(var: Any, makers: Mapping[Any, Any]) -> Any:
    """The array from which others of its size come, until one is combined with another array."""
    while (eqn := makers.get(var)) is not None:
        parts = [
            x
            for x in eqn.invars
            if not isinstance(x, Literal) and x.aval.size == var.aval.size
            if x not in makers or makers[x].primitive.name != "broadcast_in_dim"
        ]
        if len(parts) != 1 or parts[0].aval.shape[:1] != var.aval.shape[:1]:
            break
        var = parts[0]
    return var


def _end(loop: Any, stack: Any, jaxpr: Jaxpr) -> Any:
    """The result of a loop, transposed if it is so at once."""
    var = next(var for var in loop.outvars if var.aval.shape == stack.aval.shape)
    users = [eqn for eqn in jaxpr.eqns if var in eqn.invars]
    is_transposed = len(users) == 1 and users[0].primitive.name == "transpose"
    return users[0].outvars[0] if is_transposed else var


def _dividing(size: int, mesh: Any) -> tuple[Any, ...]:
    """The mesh axes with the most devices in all that divide a dimension."""
    auto = [axis for axis in mesh.axis_names if axis in axes_of_type(mesh, AxisType.Auto)]
    choices = (x for count in range(len(auto) + 1) for x in itertools.combinations(auto, count))
    sizes = {axes: math.prod(mesh.shape[axis] for axis in axes) for axes in choices}
    return max((axes for axes in sizes if size % sizes[axes] == 0), key=lambda axes: sizes[axes])
