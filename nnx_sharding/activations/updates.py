"""Updates of an ``nnx.Optimizer`` in a trace, whose transformation of Optax runs with Auto axes.

The updates leave the transformation with the types of the parameters, its new state like the old
one. So the compiler may choose everything in between.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..core.known_faults import jaxprs_of
from ..core.resharding import mesh_here
from ..core.retyping import Retyping, retyped, type_spec
from ..specs.fitting import axes_of_type


def update(optimizer: Any, call: Callable[..., Any], args: Any, kwargs: Any, mesh: Any) -> Any:
    """Calls ``update`` of an ``nnx.Optimizer``, whose transformation runs with Auto axes."""
    tx = optimizer.tx
    like = object.__new__(type(optimizer))  # other threads may use the user's object
    vars(like).update(vars(optimizer), tx=_Partitioned(tx, mesh))
    out = types.MethodType(call.__func__, like)(*args, **kwargs)  # type: ignore[attr-defined]
    vars(optimizer).update(vars(like), tx=tx)
    return out


class _Partitioned:
    """A transformation of Optax, of which only ``update`` differs."""

    def __init__(self, tx: Any, mesh: Any):
        self._tx, self._mesh = tx, mesh

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
        new = _with_whole_matrices(traced, mesh_here(self._mesh), arrays)
        # What is constant in the program is no JAX array, and Flax would not update it.
        return jax.tree.unflatten(jax.tree.structure(shapes), [*map(jnp.asarray, new)])


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


def _with_whole_matrices(jaxpr: Any, mesh: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with whole matrices on each device in loops that multiply them.

    That is, in a Newton-Schulz iteration of a stack of matrices, which is then sharded over as many
    devices as divide the number of matrices: where the loop begins, and where it ends.
    """
    if not _has_stacks(jaxpr.jaxpr):
        return [*jaxpr_as_fun(jaxpr)(*arrays)]
    inner = jaxpr.jaxpr
    values = dict(zip([*inner.constvars, *inner.invars], [*jaxpr.consts, *arrays], strict=True))

    def constrained(x: Any, into: bool) -> Any:
        axes = _dividing(x.shape[0], mesh)
        order = range(1, len(axes) + 1)  # XLA reshards over one axis at a time without a gather
        for count in order if into else reversed(order):
            rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1) if count < len(axes) else []
            sharding = NamedSharding(mesh, PartitionSpec(axes[:count], *rest))
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for eqn in inner.eqns:
        stack = _stack(eqn)
        if stack is not None:
            values[stack] = constrained(values[stack], True)
        if eqn.primitive.name in ("jit", "pjit"):
            outputs = _with_whole_matrices(eqn.params["jaxpr"], mesh, [*map(read, eqn.invars)])
        elif eqn.primitive.name == "cond":
            index, *operands = map(read, eqn.invars)
            branches = [
                functools.partial(_with_whole_matrices, branch, mesh)
                for branch in eqn.params["branches"]
            ]
            outputs = jax.lax.switch(index, branches, operands)
        else:
            invars = [*dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal))]
            alone = inner.replace(constvars=[], invars=invars, outvars=eqn.outvars, eqns=[eqn])
            outputs = jaxpr_as_fun(jaxpr.replace(jaxpr=alone, consts=[]))(*map(read, invars))
        if stack is not None:
            outputs = [constrained(x, False) if x.shape == stack.aval.shape else x for x in outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, inner.outvars)]


def _has_stacks(jaxpr: Any) -> bool:
    """Whether a loop in a jaxpr multiplies a stack of matrices."""
    return any(
        _stack(eqn) is not None or any(map(_has_stacks, jaxprs_of(eqn))) for eqn in jaxpr.eqns
    )


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


def _dividing(size: int, mesh: Any) -> tuple[Any, ...]:
    """The mesh axes with the most devices in all that divide a dimension."""
    auto = [axis for axis in mesh.axis_names if axis in axes_of_type(mesh, AxisType.Auto)]
    choices = (x for count in range(len(auto) + 1) for x in itertools.combinations(auto, count))
    sizes = {axes: math.prod(mesh.shape[axis] for axis in axes) for axes in choices}
    return max((axes for axes in sizes if size % sizes[axes] == 0), key=lambda axes: sizes[axes])
