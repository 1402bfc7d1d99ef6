"""Updates of an ``nnx.Optimizer`` in a trace, whose transformation of Optax runs with Auto axes.

Updates leave it with the types of the parameters, new state with those of the old one.
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
        # Tracing twice takes time: for single matrices, only if `optax.contrib.muon` has a state.
        is_muon = any(map(_has_coefficients, jax.tree.leaves(arguments, is_leaf=_has_coefficients)))
        if self._mesh is None or (all(x.ndim < 3 for x in arrays) and not is_muon):
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


def _has_coefficients(state: Any) -> bool:
    return hasattr(state, "ns_coeffs")


def _with_whole_matrices(jaxpr: Any, mesh: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with whole matrices on each device in Newton-Schulz iterations.

    Stacks of matrices are sharded over as many devices as divide their number within such a loop;
    loops of single matrices of one shape run as one, with zeros if the devices need some.
    """
    if not _has_stacks(jaxpr.jaxpr):
        return [*jaxpr_as_fun(jaxpr)(*arrays)]
    inner = jaxpr.jaxpr
    values = dict(zip([*inner.constvars, *inner.invars], [*jaxpr.consts, *arrays], strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for eqn, *others in _grouped(inner.eqns):
        invars = [*dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal))]
        alone = inner.replace(constvars=[], invars=invars, outvars=eqn.outvars, eqns=[eqn])
        call = jaxpr_as_fun(jaxpr.replace(jaxpr=alone, consts=[]))
        stack = _stack(eqn)
        if others:
            outputs = _as_one(call, [eqn, *others], invars, read, mesh)
        elif eqn.primitive.name in ("jit", "pjit"):
            outputs = _with_whole_matrices(eqn.params["jaxpr"], mesh, [*map(read, eqn.invars)])
        elif eqn.primitive.name == "cond":
            index, *operands = map(read, eqn.invars)
            branches = [
                functools.partial(_with_whole_matrices, branch, mesh)
                for branch in eqn.params["branches"]
            ]
            outputs = jax.lax.switch(index, branches, operands)
        elif stack is not None:
            axes = _dividing(stack.aval.shape[0], mesh)
            values[stack] = _constrained(values[stack], axes, mesh, into=True)
            outputs = [
                _constrained(x, axes, mesh, into=False) if x.shape == stack.aval.shape else x
                for x in call(*map(read, invars))
            ]
        else:
            outputs = call(*map(read, invars))
        outvars = [x for each in (eqn, *others) for x in each.outvars]
        values.update(zip(outvars, outputs, strict=True))
    return [*map(read, inner.outvars)]


def _grouped(eqns: Sequence[Any]) -> list[list[Any]]:
    """Equations in an order in which they can run, with equal loops of one matrix together."""
    levels: dict[Any, int] = {}
    groups: dict[Any, list[Any]] = {}
    for number, eqn in enumerate(eqns):
        known = [x for x in eqn.invars if not isinstance(x, Literal)]
        level = max((levels.get(x, 0) for x in known), default=0)
        stack = _stack(eqn)
        is_single = stack is not None and stack.aval.shape[0] == 1
        kind: Any = number
        if is_single:
            literals = [x.val if isinstance(x, Literal) else known.index(x) for x in eqn.invars]
            types = [x.aval for x in (*known, *eqn.outvars)]
            consts = [id(x) for value in eqn.params.values() for x in getattr(value, "consts", ())]
            kind = str((eqn.primitive, eqn.params, literals, types, consts))
        groups.setdefault((level, is_single, kind), []).append(eqn)
        levels |= dict.fromkeys(eqn.outvars, level + is_single)
    # Sorting is stable.
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


def _as_one(
    call: Callable[..., Any], eqns: Sequence[Any], invars: Sequence[Any], read: Any, mesh: Any
) -> list[Any]:
    """The outputs of equal loops, which run as one; ``call`` is the first, with these arguments."""
    sizes = _sizes(mesh)
    # As few matrices on each device as possible.
    axes = min(sizes, key=lambda axes: (-(-len(eqns) // sizes[axes]), sizes[axes]))
    missing = -len(eqns) % sizes[axes]
    operands, mapped = [], []
    for place in map(eqns[0].invars.index, invars):
        own = [eqn.invars[place] for eqn in eqns]
        x = read(own[0])
        mapped.append(None if len(set(own)) == 1 else 0)
        if mapped[-1] is not None:
            x = jnp.stack([*map(read, own), *[jnp.zeros_like(x)] * missing])
        operands.append(_constrained(x, axes, mesh, into=True) if x.ndim > 3 else x)
    stacks = jax.vmap(call, mapped)(*operands)
    for i, x in enumerate(stacks):
        if x.ndim > 3:  # all of it is resharded before it is split
            x = _constrained(x, axes, mesh, into=False)
            spec = PartitionSpec(None, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
            stacks[i] = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return [x[i] for i in range(len(eqns)) for x in stacks]


def _constrained(x: Any, axes: tuple[Any, ...], mesh: Any, *, into: bool) -> Any:
    """A stack of matrices over some mesh axes, for a loop that begins or that has ended."""
    order = range(1, len(axes) + 1)  # XLA reshards over one axis at a time without a gather
    for count in order if into else reversed(order):
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1) if count < len(axes) else []
        sharding = NamedSharding(mesh, PartitionSpec(axes[:count], *rest))
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


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
    sizes = _sizes(mesh)
    return max((axes for axes in sizes if size % sizes[axes] == 0), key=lambda axes: sizes[axes])


def _sizes(mesh: Any) -> dict[tuple[Any, ...], int]:
    """The devices of each choice of mesh axes."""
    auto = [axis for axis in mesh.axis_names if axis in axes_of_type(mesh, AxisType.Auto)]
    choices = (x for count in range(len(auto) + 1) for x in itertools.combinations(auto, count))
    return {axes: math.prod(mesh.shape[axis] for axis in axes) for axes in choices}
