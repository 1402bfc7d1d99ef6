"""More mistakes with transforms, whose messages say enough without a section of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Library = Any


class Mistake(NamedTuple):
    """What is wrong, the type of our error, and what its message has to contain."""

    title: str
    run: Callable[[Library], Any]
    error: type[Exception]
    facts: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}
X = np.ones((8, 4), np.float32)


def mistake(title: str, error: type[Exception], *facts: str) -> Any:
    def register(run: Callable[[Library], Any]) -> Callable[[Library], Any]:
        MISTAKES[run.__name__] = Mistake(title, run, error, facts)
        return run

    return register


def linear() -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(4))
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.ids = nnx.Param(jnp.arange(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return x * self.scale[...]


def apply(model: Any, x: Any) -> jax.Array:
    return model(x)


def loss(model: Any, x: Any) -> jax.Array:
    return model(x).sum()


def note(model: Any, x: Any) -> tuple[Any, Any]:
    model.extra = nnx.Param(jnp.ones(4))
    return model, x


@mistake("a loss that is not a scalar", TypeError, "apply must return a scalar", "float32[8,4]")
def vector_loss(lib: Library) -> Any:
    return lib.grad(apply)(linear(), X)


@mistake("`has_aux` without a second result", TypeError, "must return a pair (output, aux)")
def missing_aux(lib: Library) -> Any:
    return lib.value_and_grad(loss, has_aux=True)(linear(), X)


@mistake("a gradient of integers", TypeError, "model.ids: int32[3]", "wrt=nnx.Param", "allow_int")
def integer_parameters(lib: Library) -> Any:
    return lib.grad(loss)(Counter(), X)


@mistake("mapped axes of two sizes", ValueError, "size 8: axis 0 of argument x", "size 3")
def two_sizes(lib: Library) -> Any:
    return lib.vmap(lambda x, y: x + y)(X, X[:3])


@mistake("too few `in_axes`", ValueError, "1 entry for 2 positional parameters: model, x", "x: no")
def few_axes(lib: Library) -> Any:
    return lib.vmap(apply, in_axes=(0,))(linear(), X)


@mistake("`out_axes` for another structure", ValueError, "out_axes", "the specs are a tuple")
def out_axes(lib: Library) -> Any:
    return lib.vmap(apply, in_axes=(None, 0), out_axes=(0, 0))(linear(), X)


@mistake(
    "`StateAxes` without a filter that matches", ValueError, "model.kernel: Param", "...: None"
)
def unmatched_axes(lib: Library) -> Any:
    return lib.vmap(apply, in_axes=(lib.StateAxes({nnx.BatchStat: 0}), 0))(linear(), X)


@mistake("a captured random stream in `vmap`", Exception, "rngs.default.count", "captures")
def captured_stream(lib: Library) -> Any:
    rngs = nnx.Rngs(0)
    return lib.vmap(lambda x: x + rngs.params())(X)


@mistake("two carries", ValueError, "only one argument can be the carry", "in_axes=(Carry, Carry)")
def two_carries(lib: Library) -> Any:
    axes = (lib.Carry, lib.Carry)
    return lib.scan(lambda c, d: (c, d), in_axes=axes, out_axes=(lib.Carry, 0))(0.0, 0.0)


@mistake("steps of two lengths", ValueError, "length 3: model.bias(3, 4)", "length 8: x(8, 4)")
def two_lengths(lib: Library) -> Any:
    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs)))
    model = make(nnx.Rngs(0))
    axes = (lib.Carry, 0, 0)
    step = lib.scan(lambda c, model, x: (model(x) + c, None), in_axes=axes)
    return step(jnp.zeros(4), model, X)


@mistake("`scan` over a module that is not stacked", ValueError, "model.calls, float32[]: axis 0")
def not_stacked(lib: Library) -> Any:
    return lib.scan(lambda c, model: (model(c), None), in_axes=(lib.Carry, 0))(X, Counter())


@mistake("an attribute that a step of `scan` adds", ValueError, "model.extra: is nothing before")
def added_in_scan(lib: Library) -> Any:
    return lib.scan(note, in_axes=(lib.Carry, 0), out_axes=(lib.Carry, 0))(linear(), X)


@mistake("a carry that grows", TypeError, "carry.c has type float32[2]", "float32[4]")
def growing_carry(lib: Library) -> Any:
    return lib.scan(lambda c, x: (jnp.concatenate([c, c]), x))(jnp.ones(2), X)


@mistake("a policy of `remat` that does not exist", ValueError, "no policy 'dots'", "dots_saveable")
def unknown_policy(lib: Library) -> Any:
    return lib.remat(apply, policy="dots")(linear(), X)


@mistake("a vector as the predicate of `cond`", TypeError, "pred must be a scalar", "bool[2]")
def vector_predicate(lib: Library) -> Any:
    return lib.cond(jnp.array([True, False]), apply, apply, linear(), X)


@mistake("a branch of another dtype", TypeError, "int32[8,4] in false_fun", "Cast or reshape")
def other_dtype(lib: Library) -> Any:
    return lib.cond(True, apply, lambda model, x: model(x).astype(int), linear(), X)


@mistake("`switch` without branches", ValueError, "at least one function")
def no_branches(lib: Library) -> Any:
    return lib.switch(0, [], linear(), X)


@mistake("`switch` of a function, not a sequence", TypeError, "branches must be a sequence")
def one_branch(lib: Library) -> Any:
    return lib.switch(0, apply, linear(), X)


@mistake("a float as the index of `switch`", TypeError, "integer scalar", "float32[]")
def float_index(lib: Library) -> Any:
    return lib.switch(0.5, [apply, apply], linear(), X)


@mistake("a condition that is not a bool scalar", TypeError, "bool scalar", "float32[8,4]")
def vector_condition(lib: Library) -> Any:
    return lib.while_loop(lambda c: c[1], lambda c: c, (linear(), X))


@mistake("a body that returns another shape", TypeError, "init_val[1] has type float32[8,4]")
def shrinking_body(lib: Library) -> Any:
    return lib.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0], c[1][:2]), (linear(), X))


@mistake("a condition that changes a Variable", ValueError, "init_val[0].calls", "body_fun")
def changing_condition(lib: Library) -> Any:
    return lib.while_loop(lambda c: c[0](c[1]).sum() < 3, lambda c: c, (Counter(), X))


@mistake("a float as a bound of `fori_loop`", TypeError, "upper must be an integer scalar")
def float_bound(lib: Library) -> Any:
    return lib.fori_loop(0, 2.5, lambda i, c: c, (linear(), X))


@mistake("an attribute that `fori_loop` adds", ValueError, "init_val[0].extra: is nothing before")
def added_in_loop(lib: Library) -> Any:
    return lib.fori_loop(0, 3, lambda i, c: note(*c), (linear(), X))


@mistake("a cotangent of another shape", TypeError, "float32[2,4], expected float32[8,4]")
def cotangent_shape(lib: Library) -> Any:
    return lib.vjp(apply, linear(), X)[1](jnp.ones((2, 4)))


@mistake("one cotangent for two results", ValueError, "cotangents[1]: missing")
def one_cotangent(lib: Library) -> Any:
    return lib.vjp(lambda model, x: (model(x), x), linear(), X)[1](X)


@mistake("a tangent that is missing", ValueError, "tangents[0].kernel: missing")
def missing_tangent(lib: Library) -> Any:
    return lib.jvp(apply, (linear(), X), (X,))


@mistake("a tangent of another dtype", TypeError, "tangents[0]: int32[8,4], expected float32[8,4]")
def tangent_dtype(lib: Library) -> Any:
    return lib.jvp(lambda x: x * 2, (X,), (X.astype(np.int32),))


@mistake("`custom_vjp` without a rule", TypeError, "apply has no rule", "defvjp(fwd, bwd)")
def no_rule(lib: Library) -> Any:
    return lib.custom_vjp(apply)(linear(), X)


@mistake("a forward rule without residuals", TypeError, "a pair (output, residuals)")
def no_residuals(lib: Library) -> Any:
    fun = lib.custom_vjp(loss)
    fun.defvjp(loss, lambda residuals, g: (None, g))
    return lib.grad(fun)(linear(), X)
