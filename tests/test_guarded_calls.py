"""Calls that the C extension makes without Python code: they do what the others do."""

import gc
import signal
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, jit
from nnx_sharding.core.guard.native import FastestWalk
from nnx_sharding.core.guard.walk import PythonWalk

pytestmark = pytest.mark.skipif(FastestWalk is PythonWalk, reason="without the C extension")

MESH = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


class Model(nnx.Module):
    def __init__(self) -> None:
        self.w, self.count = nnx.Param(jnp.ones((4, 4))), nnx.Variable(jnp.zeros(()))
        self.rate = 1.0

    @jit
    def step(self, x: Any, scale: Any = 1.0) -> Any:
        return step(self, x, scale)


def step(model: Model, x: Any, scale: Any = 1.0) -> Any:
    model.count[...] += 1
    return {"y": x @ model.w * scale, "count": (model.count[...], None)}


def calls_in_python(monkeypatch: pytest.MonkeyPatch, function: Any) -> list[int]:
    """Grows with each call of a jitted function that Python makes."""
    made: list[int] = []
    kind = type(function)
    own = kind._flattened
    monkeypatch.setattr(
        kind, "_flattened", lambda self, *a, **k: (made.append(1), own(self, *a, **k))[1]
    )
    return made


X = jnp.ones((2, 4))


class TestRoutes:
    @pytest.mark.parametrize("donate", [None, 0])
    def test_the_third_call_and_later_ones(self, donate, monkeypatch):
        f, model = jit(step, donate_argnums=donate), Model()
        made = calls_in_python(monkeypatch, f)
        for i in range(6):
            out = f(model, X)
            assert float(out["count"][0]) == float(model.count[...]) == i + 1
            np.testing.assert_allclose(out["y"], X @ jnp.ones((4, 4)))
            assert out["count"][1] is None
        assert len(made) == 2

    def test_donation_where_no_signal_has_a_handler(self, monkeypatch):
        """As in jobs that a shell starts in the background, and in other threads."""
        f, model = jit(lambda *arguments: step(*arguments), donate_argnums=0), Model()
        made = calls_in_python(monkeypatch, f)
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(4):
                f(model, X)
        finally:
            signal.signal(signal.SIGINT, previous)
        assert len(made) == 2
        g, other = jit(lambda *arguments: step(*arguments), donate_argnums=0), Model()
        thread = threading.Thread(target=lambda: [g(other, X) for _ in range(4)])
        thread.start(), thread.join()
        assert float(other.count[...]) == 4
        assert len(made) == 4

    def test_what_changes_is_noticed(self, monkeypatch):
        f, model = jit(step), Model()
        made = calls_in_python(monkeypatch, f)
        for _ in range(3):
            f(model, X)
        before = len(made)
        model.w.set_value(2 * jnp.ones((4, 4)))
        np.testing.assert_allclose(f(model, X)["y"], 2 * X @ jnp.ones((4, 4)))
        np.testing.assert_allclose(f(model, X[:1])["y"], 2 * X[:1] @ jnp.ones((4, 4)))  # traces
        assert len(made) == before and float(model.count[...]) == 5
        model.rate = 2.0
        f(model, X)
        assert len(made) == before + 1

    def test_keywords_are_not_positions(self, monkeypatch):
        f, model = jit(lambda model, a, b: model.w.sum() * a - b), Model()
        one, two = jnp.ones(()), jnp.full((), 2.0)
        for _ in range(4):
            assert float(f(model, one, two)) == 14
            assert float(f(model, a=one, b=two)) == 14
            assert float(f(model, b=one, a=two)) == 31
        made = calls_in_python(monkeypatch, f)
        assert float(f(b=one, a=two, model=model)) == 31
        assert float(f(model, b=one, a=two)) == 31 and len(made) == 1
        with pytest.raises(TypeError):
            f(model, one, one, b=two)

    def test_methods_and_several_models(self, monkeypatch):
        models = [Model() for _ in range(6)]  # more than there are routes
        made = calls_in_python(monkeypatch, Model.step)
        for i in range(4):
            for model in models:
                assert float(model.step(X, scale=0.5 * 2)["count"][0]) == i + 1
        before = len(made)
        for _ in range(3):
            models[0].step(X, scale=1.0)
            models[1].step(X, scale=1.0)
        assert len(made) - before <= 2

    def test_a_static_that_is_new_each_time(self, monkeypatch):
        f = jit(lambda model, x, pair: x * float(pair[1]), static_argnums=2)
        model = Model()
        made = calls_in_python(monkeypatch, f)
        for text in ("1.5", "1.5", "1.5", "1.5"):
            f(model, X, ("a", float(text)))
        assert len(made) == 2
        assert float(f(model, X, ("a", 2.5))[0, 0]) == 2.5

    def test_end_of_a_model_and_of_the_plans(self):
        f, model = jit(step), Model()
        for _ in range(4):
            f(model, X)
        watched = weakref.ref(model)
        del model
        gc.collect()
        assert watched() is None and not f._guards.recent
        model = Model()
        for _ in range(4):
            f(model, X)
        f.clear_cache()
        assert not f._guards.recent and float(f(model, X)["count"][0]) == 5


class TestErrors:
    def test_of_the_function(self):
        f, model = jit(lambda model, x: model.fail() if x.ndim == 1 else step(model, x)), Model()
        for _ in range(3):
            f(model, X)
        with pytest.raises(AttributeError, match="fail"):
            f(model, X[0])
        assert float(f(model, X)["count"][0]) == 4

    def test_explained(self):
        specs = (StateSharding({...: P()}), P("d"))
        f, model = jit(step, in_shardings=specs, mesh=MESH), Model()
        x = jnp.ones((4, 4))
        for _ in range(4):
            f(model, x)
        with pytest.raises(ValueError, match=r"x.*does not divide|x.*divisible|x.*divide"):
            f(model, jnp.ones((3, 4)))

    def test_within_a_trace(self):
        f, model = jit(step), Model()
        for _ in range(3):
            f(model, X)
        total = jax.jit(lambda x: f(Model(), x)["y"].sum())(X)
        assert float(total) == 32 and float(model.count[...]) == 3


class TestPlacing:
    def test_arrays_that_move(self, monkeypatch):
        kernel, whole = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())
        rules = StateSharding({nnx.PathContains("w"): P("d"), ...: P()})
        f, model = jit(step, in_shardings=(rules, P()), mesh=MESH), Model()
        made = calls_in_python(monkeypatch, f)
        for i in range(5):
            f(model, X)
            assert model.w.sharding == kernel and model.count.sharding == whole
            assert float(model.count[...]) == i + 1
        before = len(made)
        model.w.set_value(jnp.full((4, 4), 3.0))  # is placed again, and stays there
        assert float(f(model, X)["y"][0, 0]) == 12 and model.w.sharding == kernel
        assert len(made) == before + 1
        for _ in range(3):
            f(model, X)
        assert len(made) <= before + 2

    def test_specs_that_depend_on_shapes(self, monkeypatch):
        def is_matrix(path: Any, x: Any) -> bool:
            return getattr(x, "ndim", 0) == 2

        rules = StateSharding({is_matrix: P("d"), ...: P()})
        f, model = jit(step, in_shardings=(rules, P()), mesh=MESH), Model()
        made = calls_in_python(monkeypatch, f)
        for _ in range(5):
            f(model, X)
        before = len(made)
        model.w.set_value(jnp.ones(4))  # a vector: another spec, which the plan has to know
        f(model, X)
        assert len(made) == before + 1 and model.w.sharding.spec == P()

    def test_mesh_in_context(self):
        f, model = jit(step, in_shardings=(P(), P("d"))), Model()
        every = jax.devices()
        for devices in (every[:2], every[2:4]) * 3:
            mesh = jax.sharding.Mesh(np.array(devices), ("d",))
            model = Model()
            with jax.set_mesh(mesh):
                for _ in range(3):
                    out = f(model, np.ones((4, 4), np.float32))
            assert out["y"].sharding.device_set == set(devices)


def test_threads():
    f, model = jit(lambda model, x: x + model.w.sum()), Model()
    for _ in range(3):
        f(model, X)
    wrong: list[Any] = []

    def run(i: int) -> None:
        own, x = Model(), jnp.full((2, 4), float(i))
        for _ in range(60):
            for each in (model, own):
                if float(f(each, x)[0, 0]) != i + 16:
                    wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled(monkeypatch):
    model = Model()
    compiled = jit(step).lower(model, X).compile()
    made = calls_in_python(monkeypatch, compiled)
    for i in range(5):
        assert float(compiled(model, X)["count"][0]) == i + 1
    assert len(made) == 2
    with pytest.raises(TypeError, match="x"):
        compiled(model, X[:1])
    assert float(model.count[...]) == 5
