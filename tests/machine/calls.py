"""The calls of the functions under test."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .functions import FUNCTIONS, eager
from .views import reachable
from .worlds import World

X = jnp.float32(0.5)
XS: tuple[Callable[[], Any], ...] = (
    lambda: X,
    lambda: 0.5,
    lambda: np.float32(0.5),
    lambda: jnp.arange(2.0),
    lambda: 3,
    lambda: True,
    lambda: (X, None),
)

Numbers = tuple[int, int, int]
Action = Callable[[World, int, int, int], Any]


def choose(options: Sequence[Any], number: int) -> Any:
    return options[number % len(options)] if options else None


def _plain(name: str) -> Action:
    def call(w: World, a: int, b: int, c: int) -> Any:
        return w.f[name](choose(w.models, a), X)

    return call


def call_pair(w: World, a: int, b: int, c: int) -> Any:
    return w.f["pair"](choose(w.models, a), choose(w.models, b), X)


def call_nested(w: World, a: int, b: int, c: int) -> Any:
    one, two = choose(w.models, a), choose(w.models, b)
    trees: list[Any] = [{"m": one, "n": (two, X)}, [one, two], (one, two), {"n": one, "m": [two]}]
    return w.f["step"](choose(trees, c), X)


def call_part(w: World, a: int, b: int, c: int) -> Any:
    """With an object, and another that is part of it."""
    model = choose(w.models, a)
    return w.f["pair"](model, choose(reachable(model), b), X)


def call_x(w: World, a: int, b: int, c: int) -> Any:
    return w.f["step"](choose(w.models, a), choose(XS, b)())


def call_keyword(w: World, a: int, b: int, c: int) -> Any:
    f, model = w.f["step"], choose(w.models, a)
    calls: list[Callable[[], Any]] = [
        lambda: f(model, X),
        lambda: f(model, x=X),
        lambda: f(tree=model, x=X),
        lambda: f(x=X, tree=model),
    ]
    return choose(calls, b)()


MODES = (1, True, 0.0, -0.0, (1,), (True,))


def call_static(w: World, a: int, b: int, c: int) -> Any:
    f, model = w.f[("static by name", "static by number")[a % 2]], choose(w.models, a)
    mode = choose(MODES, b)
    calls: list[Callable[[], Any]] = [
        lambda: f(model, X, mode=mode),
        lambda: f(model, 2.0, mode, twice=choose((1, True), b)),
        lambda: f(model),
        lambda: f(model, mode=mode),
        lambda: f(model, X, mode),
    ]
    return choose(calls, c)()


def call_threads(w: World, a: int, b: int, c: int) -> Any:
    """Two calls at once, on different models."""
    models = [choose(w.models, a), choose(w.models, a + 1)]
    if models[0] is models[1] or _meet(*models):
        return w.f["step"](models[0], X)
    barrier = threading.Barrier(2)

    def call(model: Any) -> Any:
        barrier.wait(10)
        return [w.f["step"](model, X) for _ in range(2)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(call, model) for model in models]
        return [future.result() for future in futures]


def _meet(one: Any, two: Any) -> bool:
    """Whether two graphs have an object in common: a race, in Python as well."""
    others = set(map(id, reachable(two)))
    return any(id(x) in others for x in reachable(one))


def call_inside(w: World, a: int, b: int, c: int) -> Any:
    """Within another transformation, which may read the model but not change it."""
    name = ("read", "read", "step", "grow static")[b % 4]
    f, model = w.f[name], choose(w.models, a)
    calls: list[Callable[[], Any]] = [
        lambda: jax.jit(lambda x: f(model, x))(X),
        lambda: jax.eval_shape(lambda x: f(model, x), X) and None,
        lambda: jax.vmap(lambda x: f(model, x)[1])(jnp.arange(2.0)),
        lambda: jax.grad(lambda x: f(model, x)[1])(X),
        lambda: jax.make_jaxpr(lambda x: f(model, x)[1])(X) and None,
    ]
    return choose(calls, c)()


def call_inside_new(w: World, a: int, b: int, c: int) -> Any:
    """Within another transformation, on a model that is made there."""
    model = choose(w.models, a)
    graphdef, state = nnx.split(model)

    def traced(state: Any, x: Any) -> Any:
        own = nnx.merge(graphdef, state)
        w.f["step"](own, x)
        return nnx.state(own), w.f["step"](own, x)

    if b % 4:
        return jax.eval_shape(traced, state, X) and None
    return jax.jit(traced)(state, X)[1]


def call_method(w: World, a: int, b: int, c: int) -> Any:
    model = next((x for x in w.models if isinstance(x, w.f.Method)), None)
    if model is None:
        return None
    mode = choose((0, 1), b)
    calls: list[Callable[[], Any]] = [
        lambda: model.step(X),
        lambda: model.step(X, mode),
        lambda: model.step(x=X),
        lambda: w.f.Method.step(model, X),
    ]
    return choose(calls, c)()


def call_lower(w: World, a: int, b: int, c: int) -> Any:
    """Stages that do not run the function. They must leave everything alone."""
    f, model = w.f["step"], choose(w.models, a)
    if w.f.wrap is eager:
        return None
    stages: list[Callable[[], Any]] = [
        lambda: f.lower(model, X),
        lambda: f.trace(model, X),
        lambda: f.eval_shape(model, X),
    ]
    choose(stages, b)()
    return None


def call_clear(w: World, a: int, b: int, c: int) -> Any:
    if w.f.wrap is not eager:
        w.f[("step", "read")[a % 2]].clear_cache()
    return w.f["step"](choose(w.models, b), X)


def call_donated(w: World, a: int, b: int, c: int) -> Any:
    model = choose(w.models, a)
    for x in reachable(model):  # no other object may lose its array by this
        if isinstance(x, nnx.Variable) and isinstance(x.get_raw_value(), jax.Array):
            x.set_raw_value(jnp.array(x.get_raw_value()))
    return w.f["donated"](model, X)


def call_other_mode(w: World, a: int, b: int, c: int) -> Any:
    name = ("values", "values, no updates", "values, tree")[b % 3]
    return w.f[name](choose(w.models, a), X)


CALLS: dict[str, Action] = {
    **{name: _plain(name) for name in FUNCTIONS if name not in ("pair", "donated")},
    "donated": call_donated,
    "pair": call_pair,
    "nested": call_nested,
    "part": call_part,
    "x": call_x,
    "keyword": call_keyword,
    "static": call_static,
    "threads": call_threads,
    "inside": call_inside,
    "inside, new": call_inside_new,
    "method": call_method,
    "lower": call_lower,
    "clear": call_clear,
    "mode": call_other_mode,
}

# Threads that trace at the same time may both do it.
UNCOUNTED = ("threads",)
