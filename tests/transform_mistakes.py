"""More mistakes with transforms, whose messages say enough without a section of their own.

``python tests/transform_mistakes.py`` writes them and Flax's into
``benchmarks/results/transform_mistakes.md``, which compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mistakes
import nnx_sharding
from libraries import FULL, TREE, Transforms

Library = Any
PAGE = Path(__file__).parents[1] / "benchmarks" / "results" / "transform_mistakes.md"
# Mistakes with a section of their own, which are beside Flax's messages here, too.
ALSO = ("not-divisible", "number-of-specs", "unknown-parameter", "no-mesh", "not-an-array")
ALSO += ("captured-array", "changed-from-outside-its-trace", "donated-twice", "used-after-donation")
ALSO += ("axes-that-arrays-do-not-have", "differs-between-elements", "number-of-steps")
ALSO += ("branches-that-differ", "carry-of-another-form", "nothing-to-differentiate")
ALSO += ("static-argument-that-is-not-hashable", "static-argument-with-arrays")


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


@mistake("a loss that is not a scalar", TypeError, "apply must return a scalar", "Reduce it")
def vector_loss(lib: Library) -> Any:
    return lib.grad(apply)(linear(), X)


@mistake("a loss that is an integer", TypeError, "must return a real floating", "got int32[]")
def integer_loss(lib: Library) -> Any:
    return lib.grad(lambda model, x: (model(x) > 0).sum())(linear(), X)


@mistake("`has_aux` without a second result", TypeError, "must return a pair (output, aux)")
def missing_aux(lib: Library) -> Any:
    return lib.value_and_grad(loss, has_aux=True)(linear(), X)


@mistake("a gradient of integers", TypeError, "model.ids: int32[3]", "wrt=nnx.Param", "allow_int")
def integer_parameters(lib: Library) -> Any:
    return lib.grad(loss)(Counter(), X)


@mistake("mapped axes of two sizes", ValueError, "size 8: axis 0 of argument x", "size 3")
def two_sizes(lib: Library) -> Any:
    return lib.vmap(lambda x, y: x + y)(X, X[:3])


@mistake("too few `in_axes`", ValueError, "1 entry for 2 positional parameters of apply", "x: no")
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


@mistake("a carry that grows", TypeError, "\n  c: float32[2] → float32[4]")
def growing_carry(lib: Library) -> Any:
    return lib.scan(lambda c, x: (jnp.concatenate([c, c]), x))(jnp.ones(2), X)


@mistake("a policy of `remat` that does not exist", ValueError, "no policy 'dots'", "dots_saveable")
def unknown_policy(lib: Library) -> Any:
    return lib.remat(apply, policy="dots")(linear(), X)


@mistake("a vector as the predicate of `cond`", TypeError, "pred must be a scalar", "bool[2]")
def vector_predicate(lib: Library) -> Any:
    return lib.cond(jnp.array([True, False]), apply, apply, linear(), X)


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


@mistake(
    "a body that returns another shape", TypeError, "\n  init_val[1]: float32[8,4] → float32[2,4]"
)
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


@mistake("`vmap` of nothing", ValueError, "axis_size")
def nothing_mapped(lib: Library) -> Any:
    return lib.vmap(apply, in_axes=(None, None))(linear(), X)


@mistake("models of two sizes in one `vmap`", ValueError, "size 2", "size 3")
def two_models(lib: Library) -> Any:
    models = [
        nnx.split_rngs(splits=n)(nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs)))(nnx.Rngs(0))
        for n in (2, 3)
    ]
    return lib.vmap(lambda one, other, x: one(other(x)), in_axes=(0, 0, None))(*models, X)


@mistake("random streams split for another size", ValueError, "size 3", "size 8")
def streams_of_another_size(lib: Library) -> Any:
    rngs = nnx.Rngs(0)
    with nnx.split_rngs(rngs, splits=3):
        return lib.vmap(lambda rngs, x: x + rngs.params().size)(rngs, X)


@mistake("`scan` without a carry in `out_axes`", ValueError, "Carry", "out_axes")
def no_carry_out(lib: Library) -> Any:
    return lib.scan(lambda c, x: (c, x), in_axes=(lib.Carry, 0), out_axes=(0, 0))(0.0, X)


@mistake("a carry of another dtype", TypeError, "\n  c: int32[] → float32[]")
def other_carry(lib: Library) -> Any:
    return lib.scan(lambda c, x: (c + x.sum(), None))(jnp.int32(0), X)


@mistake("a `length` that is not that of the arrays", ValueError, "length", "8", "5")
def other_length(lib: Library) -> Any:
    return lib.scan(lambda c, x: (c, x), length=5)(0.0, X)


@mistake("`scan` without anything that has a length", ValueError, "length")
def no_length(lib: Library) -> Any:
    axes = (None, lib.Carry)
    return lib.scan(apply, in_axes=axes, out_axes=lib.Carry)(linear(), X)


@mistake("branches that take other arguments", TypeError, "takes 1 positional argument but 2")
def other_operands(lib: Library) -> Any:
    return lib.cond(True, apply, lambda model: X, linear(), X)


@mistake("a captured model that a loop changes", Exception, "model.calls", "captures")
def captured_in_loop(lib: Library) -> Any:
    model = Counter()
    return lib.fori_loop(0, 3, lambda i, x: model(x), X)


@mistake("a body that returns nothing", TypeError, "returned: None")
def no_result_of_body(lib: Library) -> Any:
    return lib.while_loop(lambda c: c[1].sum() < 3, lambda c: None, (linear(), X))


@mistake("a loss that returns the model", TypeError, "must return a scalar", "Linear")
def loss_of_a_model(lib: Library) -> Any:
    return lib.grad(lambda model, x: model)(linear(), X)


@mistake("a backward rule with too few gradients", ValueError, "backward: ", "cotangents[1]: m")
def few_gradients(lib: Library) -> Any:
    def backward(model: Any, g: Any) -> Any:
        return (model,)

    fun = lib.custom_vjp(loss)
    fun.defvjp(lambda model, x: (loss(model, x), model), backward)
    return lib.grad(fun)(linear(), X)


@mistake("a gradient of another shape by a rule", TypeError, "backward: ", "expected float32[8,4]")
def gradient_shape(lib: Library) -> Any:
    def backward(_: Any, g: Any) -> Any:
        return (jnp.ones(4),)

    fun = lib.custom_vjp(lambda x: x.sum())
    fun.defvjp(lambda x: (x.sum(), None), backward)
    return lib.grad(fun)(X)


@mistake("a position of `nondiff_argnums` that there is not", ValueError, "(5,)", "2 arguments")
def missing_nondiff(lib: Library) -> Any:
    fun = lib.custom_vjp(loss, nondiff_argnums=(5,))
    fun.defvjp(lambda model, x: (loss(model, x), model), lambda *args: (None, None))
    return lib.grad(fun)(linear(), X)


@mistake("primals and tangents of two numbers", ValueError, "tangents[1]: missing")
def few_tangents(lib: Library) -> Any:
    return lib.jvp(lambda x, y: x * y, (X, X), (X,))


@mistake(
    "a Variable that steps change to another shape", TypeError, "init_val[0].scale", "float32[3]"
)
def reshaped_in_loop(lib: Library) -> Any:
    def body(_, carry):
        model, x = carry
        model.scale.set_value(jnp.ones(3))
        return model, x

    return lib.fori_loop(0, 3, body, (Counter(), X))


@mistake("a layer without its random stream", Exception, "rngs")
def forgotten_streams(lib: Library) -> Any:
    return lib.vmap(nnx.Dropout(0.5))(X)


def section(case: Any, flax: Library, tree: Library) -> str:
    """Our message about a mistake, and Flax's with graph updates and in tree mode."""
    who = {mistakes.message_of(case.run, nnx_sharding): "nnx_sharding"}
    for label, library in {"Flax": flax, "Flax in tree mode": tree}.items():
        message = mistakes.message_of(case.run, library) or "No error."
        who[message] = f"{who[message]}, {label}" if message in who else label
    # Flax's definitions of graphs are pages long.
    shown = {label: x[:700] + "…" * (len(x) > 700) for x, label in who.items()}
    blocks = [f"{label}:\n\n```text\n{x}\n```\n" for label, x in shown.items()]
    return "\n".join([f"**{case.title[0].upper()}{case.title[1:]}.**\n", *blocks])


def main() -> None:
    """Writes the page."""
    others = [case for case in mistakes.MISTAKES.values() if case.anchor in ALSO]
    sections = [
        section(x, Transforms(nnx, **FULL), Transforms(nnx, **TREE)) for x in MISTAKES.values()
    ]
    sections += [section(case, nnx, nnx) for case in others]
    head = "# Mistakes with transforms\n\n"
    head += "What our transforms say of a mistake, and what those of Flax say of it.\n\n"
    PAGE.write_text(head + "\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    import conftest  # noqa: F401  eight virtual devices; under pytest it is there already

    main()
