"""Why a function is traced or compiled again, and limits on that."""

from __future__ import annotations

import functools
import gc
import resource
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from nnx_sharding import explain_retraces, jit, limit_traces, shard_map
from nnx_sharding.diagnostics.retraces import MAX_TRACES
from nnx_sharding.errors import RetraceError
from zoo import P, mesh_of

REMEDY = "create it once, outside of the loop or of the function that makes the model"


class Block(nnx.Module):
    def __init__(self, static=1):
        self.static = nnx.static(static)
        self.w = nnx.Param(jnp.ones(2))


class Model(nnx.Module):
    def __init__(self, *statics):
        self.blocks = nnx.List([Block(static) for static in statics])

    @jit
    def __call__(self, x):
        return x * self.blocks[0].w[...]

    @jit
    def scale(self, x):
        return x * 2


def take(model, x=1.0, **more):
    return jnp.sum(x) * 2


def last_of(fun):
    return list(explain_retraces(fun)[-1].differences)


class NoEq:
    def __init__(self, rate=1):
        self.rate = rate


def scaled(rate):
    return lambda x: x * rate


class TestReport:
    def test_nearest(self):
        f = jit(lambda x, y: x)
        f(jnp.ones(2), jnp.ones(2))
        f(jnp.ones(3), jnp.ones(3))
        f(jnp.ones(2), jnp.ones(4))
        report = explain_retraces(f)
        assert [entry.number for entry in report] == [1, 2, 3]
        assert [entry.compared_to for entry in report] == [None, 1, 1]
        assert report[2].differences == ("y: shape (2,) → (4,)",)
        assert len(report[1].differences) == 2

    def test_calls_that_do_not_trace_are_not_listed(self):
        f = jit(lambda x: x)
        for _ in range(5):
            f(1.0)
        assert len(explain_retraces(f)) == 1
        assert str(explain_retraces(jit(lambda x: x))) == "<lambda> was not traced."

    def test_text(self):
        f = jit(take)
        f.clear_cache()
        f(Model(1), jnp.ones(3))
        f(Model(1), jnp.ones(4))
        report = explain_retraces(f)
        assert str(report) == repr(report)
        assert str(report).splitlines() == [
            "take was traced 2 times:",
            "  trace 1: the first that is recorded",
            "  trace 2, most similar to trace 1:",
            "    x: shape (3,) → (4,)",
        ]

    def test_donation_follows_from_the_arguments(self):
        f = jit(lambda m, x: x, donate_argnums=(0, 1), donate_argnames=())
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        f(model, jnp.ones(2))
        f(model, x=jnp.ones(2))
        assert "arguments (m, x) → (m, x=)" in last_of(f)
        assert "donated" not in str(explain_retraces(f))

    def test_methods_and_objects(self):
        model = Model(1)
        model(1.0)
        model(jnp.ones(2))
        for fun in (model.__call__, Model.__call__, functools.partial(model.__call__)):
            assert explain_retraces(fun)[-1].function == "Model.__call__"
        model.scale(1.0)
        assert {e.function for e in explain_retraces(model)} == {"Model.__call__", "Model.scale"}
        assert len(explain_retraces(Model)) == len(explain_retraces(model))

    @pytest.mark.parametrize("thing", [take, len, 3, None, jax.jit(take), Block()])
    def test_anything_else_is_an_error(self, thing):
        with pytest.raises(TypeError, match=r"a function returned by nnx_sharding\.jit"):
            explain_retraces(thing)

    def test_bounded(self):
        f = jit(lambda x, n: x, static_argnames="n")
        for n in range(MAX_TRACES + 3):
            f.eval_shape(1.0, n=n)
        report = explain_retraces(f)
        assert len(report) == MAX_TRACES
        assert report[-1].number == MAX_TRACES + 3
        assert "of which the last" in str(report)

    def test_clear_cache_forgets(self):
        f = jit(lambda x: x)
        f(1.0)
        f.clear_cache()
        assert len(explain_retraces(f)) == 0
        f(jnp.ones(2))
        assert explain_retraces(f)[0].compared_to is None

    def test_stages_count_and_share(self):
        f = jit(lambda x: x)
        f.lower(1.0).compile()
        f(1.0)
        assert len(explain_retraces(f)) == 1
        f.lower(jnp.ones(2))
        assert len(explain_retraces(f)) == 2

    def test_failed_traces_are_not_listed(self):
        f = jit(lambda x: x @ x)
        with pytest.raises(TypeError):
            f(jnp.ones((2, 3)))
        assert len(explain_retraces(f)) == 0

    def test_shard_map_and_nesting(self):
        mesh = mesh_of((8,), ("a",))
        f = shard_map(lambda x: x, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
        f(jnp.ones(8)), f(jnp.ones(16))
        assert last_of(f) == ["x: shape of each shard (1,) → (2,)"]
        assert not explain_retraces(f)[-1].nested
        jit(lambda x: f(x))(jnp.ones(24))
        assert explain_retraces(f)[-1].nested

    def test_uncompiled_shard_map_is_not_traced(self):
        mesh = mesh_of((8,), ("a",))
        f = shard_map(lambda x: x, mesh=mesh, in_specs=P("a"), out_specs=P("a"), jit=False)
        with limit_traces(0):
            f(jnp.ones(8))
        assert len(explain_retraces(f)) == 0

    def test_compiled_again_without_a_trace(self):
        mesh = mesh_of((8,), ("a",))

        def put(*spec):
            return jax.device_put(np.ones((8, 8)), NamedSharding(mesh, P(*spec)))

        f = jit(lambda model, x: x * 2)
        model = Block()
        f(model, put("a"))
        assert len(explain_retraces(f)) == 1
        for spec in (("a",), (None, "a"), (None, "a")):
            f(model, put(*spec))
        assert [entry.kind for entry in explain_retraces(f)] == ["trace", "compilation"]
        (line,) = last_of(f)
        assert line == f"x: sharding {P('a')} → {P(None, 'a')}"
        jax.clear_caches()
        f(model, put(None, "a"))
        assert [e.kind for e in explain_retraces(f)] == ["trace", "compilation", "trace"]

    def test_programs_compiled_while_tracing_are_not_listed(self):
        def f(x):
            with jax.ensure_compile_time_eval():
                jnp.ones(173) * 3
            return x

        f = jit(f)
        f(1.0), f(1.0)
        assert len(explain_retraces(f)) == 1

    def test_keeps_nothing_alive(self):
        model, x = Block(), jnp.ones(3)

        def local(model, x):
            return x * 2

        f = jit(local)
        f(model, x), f(model, jnp.ones(4))
        explain_retraces(f)
        alive = [weakref.ref(thing) for thing in (local, model, x, f._cache.log)]
        del local, f, model, x
        gc.collect()
        assert [ref() for ref in alive] == [None] * 4

    def test_threads(self):
        f = jit(lambda x, n: x, static_argnames="n")

        def work(start):
            for n in range(start, start + 20):
                f.eval_shape(1.0, n=n)

        threads = [threading.Thread(target=work, args=(20 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = explain_retraces(f)
        assert [entry.number for entry in report] == list(range(1, 81))

    def test_numbers_of_failed_and_cleared_traces(self):
        fails = [True]

        def f(x, n):
            if n in fails:
                f.clear_cache() if n == 2 else None
                raise ValueError
            return x

        f = jit(f, static_argnames="n")
        f(1.0, n=0)
        with pytest.raises(ValueError):
            f(1.0, n=True)
        f(1.0, n=3)
        assert [entry.number for entry in explain_retraces(f)] == [1, 2]
        fails.append(2)
        with pytest.raises(ValueError):
            f(1.0, n=2)
        f(1.0, n=4), f(1.0, n=5)
        assert [entry.number for entry in explain_retraces(f)] == [1, 2]


class TestLimits:
    def counting(self, **options):
        ran = []

        def step(model, x):
            ran.append(1)
            model.w[...] += 1
            return x

        return jit(step, **options), ran

    def test_max_traces(self):
        f, ran = self.counting(max_traces=2)
        model = Block()
        f(model, jnp.ones(2)), f(model, jnp.ones(3))
        with pytest.raises(RetraceError, match=r"max_traces=2(.|\n)*x: shape \(3,\) → \(4,\)"):
            f(model, jnp.ones(4))
        assert len(ran) == 2
        np.testing.assert_array_equal(model.w[...], [3.0, 3.0])
        f(model, jnp.ones(2))
        jax.clear_caches()
        f(model, jnp.ones(2))
        assert len(ran) == 3
        np.testing.assert_array_equal(model.w[...], [5.0, 5.0])
        f.clear_cache()
        f(model, jnp.ones(4))

    def test_the_limit_belongs_to_the_wrapper_and_the_trace_to_the_function(self):
        f, ran = self.counting()
        limited = jit(f.__wrapped__, max_traces=1)
        for n in (2, 3):
            f(Block(), jnp.ones(n))
            limited(Block(), jnp.ones(n))
        assert len(ran) == 2
        limited(Block(), jnp.ones(4))
        with pytest.raises(RetraceError):
            limited(Block(), jnp.ones(5))
        f(Block(), jnp.ones(5))
        limited(Block(), jnp.ones(5))

    def test_max_traces_of_methods_stages_and_shard_map(self):
        class Own(nnx.Module):
            @jit(max_traces=1)
            def call(self, x):
                return x

        Own().call(1.0)
        with pytest.raises(RetraceError, match=r"Own\.call"):
            Own().call(jnp.ones(2))
        f, _ = self.counting(max_traces=1)
        f.lower(Block(), 1.0)
        with pytest.raises(RetraceError):
            f.eval_shape(Block(), jnp.ones(2))
        options = {"mesh": mesh_of((8,), ("a",)), "in_specs": P("a"), "out_specs": P("a")}
        g = shard_map(lambda x: x, max_traces=1, **options)
        g(jnp.ones(8))
        with pytest.raises(RetraceError, match="shape of each shard"):
            g(jnp.ones(16))

    def test_failed_traces_do_not_count(self):
        f = jit(lambda x: x @ x, max_traces=1)
        with pytest.raises(TypeError):
            f(jnp.ones((2, 3)))
        f(jnp.ones((2, 2)))

    @pytest.mark.parametrize(
        ("value", "error"),
        [(0, ValueError), (-1, ValueError), ("a", TypeError), (True, ValueError)],
    )
    def test_invalid_limits(self, value, error):
        with pytest.raises(error, match="max_traces"):
            jit(take, max_traces=value)
        if value != 0:
            with pytest.raises(error, match="limit_traces"):
                limit_traces(value)

    def test_limit_traces(self):
        f, ran = self.counting()
        g = jit(lambda x: f(Block(), x))
        model = Block()
        f(model, 1.0)
        with limit_traces(0):
            f(model, 2.0)
            with pytest.raises(RetraceError, match="limit_traces=0"):
                f(model, jnp.ones(2))
        assert len(ran) == 1
        np.testing.assert_array_equal(model.w[...], [3.0, 3.0])
        with limit_traces(3), limit_traces(2), pytest.raises(RetraceError):
            g(jnp.ones(3)), g(jnp.ones(4))
        f(model, jnp.ones(2))

    def test_limit_traces_is_for_one_thread(self):
        f = jit(lambda x: x)
        with limit_traces(0):
            thread = threading.Thread(target=f, args=(1.0,))
            thread.start()
            thread.join()
            assert len(explain_retraces(f)) == 1


class TestNoWarnings:
    """However often a function is traced, it is not warned of: here warnings are errors."""

    @pytest.mark.parametrize("make", [NoEq, lambda: scaled(1), lambda: optax.adam(0.1)])
    def test_new_objects_that_look_the_same(self, make):
        f = jit(lambda model: model.w[...], strict=True)
        for _ in range(5):
            f(Block(make()))
        for entry in explain_retraces(f)[1:]:
            assert "is a new object that looks the same" in entry.differences[0]
            assert REMEDY in entry.differences[0]

    @pytest.mark.parametrize(
        "values",
        [
            range(5),
            [nnx.relu, nnx.gelu, nnx.silu, nnx.tanh],
            [scaled(n) for n in range(5)],
            [NoEq(n) for n in range(5)],
            [optax.adam(n / 10) for n in range(5)],
        ],
    )
    def test_other_values(self, values):
        f = jit(lambda model: model.w[...])
        for value in values:
            f(Block(value))
        assert len(explain_retraces(f)) == len(values)

    def test_new_functions_of_the_same_code(self):
        for _ in range(9):
            jit(lambda x: x + 1)(jnp.ones(2))

    def test_functions_that_do_different_things(self):
        for rate in range(6):
            jit(scaled(rate))(1.0)
            jit(lambda x, rate=rate: x * rate)(jnp.ones(rate + 1))

    def test_cleared_caches(self):
        f = jit(lambda x: x + 3)
        for _ in range(6):
            f(1.0)
            f.clear_cache()


def at_depth(depth, call):
    return call() if depth == 0 else at_depth(depth - 1, call)


def test_calls_of_a_trace_cross_no_end_of_a_chunk_of_the_stack():
    def faults(depth):
        def calls():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(500):
                at_depth(3, float)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        return at_depth(depth, calls)

    def most(each):
        return max(map(each, range(0, 160, 4)))

    def traced(depth):
        found = []
        jit(lambda: found.append(faults(depth)))()
        return found[0]

    if most(faults) < 400:
        pytest.skip("this Python keeps a chunk that it has left")
    assert most(traced) < 100


class Holder:
    def __init__(self):
        self.rate = 0.5

    def run(self, x):
        return x * self.rate


def changed_closure():
    scale = 2.0

    def change():
        nonlocal scale
        scale = 3.0

    return lambda x: x * scale, change, "captured scale: 2.0 → 3.0"


def changed_closure_of_a_function():
    inner, change, line = changed_closure()

    def helper(x):
        return inner(x)

    return lambda x: helper(x), change, f"captured helper, captured inner, {line}"


def changed_item():
    options = {"rates": [1, 2]}

    def change():
        options["rates"][1] = 5

    return lambda x: x * options["rates"][1], change, "captured options['rates'][1]: 2 → 5"


def changed_attribute():
    held = Holder()
    return (
        lambda x: held.run(x),
        lambda: vars(held).update(rate=0.7),
        "captured held.rate: 0.5 → 0.7",
    )


def changed_object_of_a_method():
    held = Holder()
    return held.run, lambda: vars(held).update(rate=0.7), "captured __self__.rate: 0.5 → 0.7"


def captured_array():
    w = jnp.ones(4)
    return lambda x: x * w, lambda: None, "captured w: float32[4], which is a constant of a trace"


def captured_model():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    return (
        lambda x: model(x),
        lambda: None,
        "captured model: a Linear, which is a constant of a trace",
    )


def captured_model_of_an_object():
    held = Holder()
    held.parts = {"model": nnx.Linear(4, 4, rngs=nnx.Rngs(0))}
    line = "captured held.parts['model']: a Linear, which is a constant of a trace"
    return lambda x: held.parts["model"](x), lambda: None, line


def captured_generator():
    numbers = iter(range(9))
    return (
        lambda x: x * next(numbers),
        lambda: None,
        "captured numbers: a range_iterator, whose content",
    )


@pytest.mark.parametrize(
    "case",
    [
        changed_closure,
        changed_closure_of_a_function,
        changed_item,
        changed_attribute,
        changed_object_of_a_method,
        captured_array,
        captured_model,
        captured_model_of_an_object,
        captured_generator,
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_captured_is_named(case, nested):
    fun, change, line = case()
    x = jnp.ones(4)
    if nested:  # within a trace, jit asks for what is captured, too
        inner = jit(fun)

        def run():
            return jax.make_jaxpr(lambda x: inner(x))(x)

    else:
        inner = shard_map(fun, mesh=mesh_of((1,), ("x",)), in_specs=P(), out_specs=P())

        def run():
            return inner(x)

    run()
    change()
    run()
    first, second = explain_retraces(inner)
    assert not first.differences
    assert [text.startswith(line) for text in second.differences] == [True]
    assert "captured" in str(explain_retraces(inner))


def test_what_is_captured_is_not_kept():
    held = Holder()
    dead = weakref.ref(held)
    fun = shard_map(held.run, mesh=mesh_of((1,), ("x",)), in_specs=P(), out_specs=P())
    fun(jnp.ones(4))
    log = fun.trace_log
    del fun, held
    gc.collect()
    assert log.traces() and dead() is None


def test_top_level_jit_does_not_speak_of_what_it_captures():
    fun, change, _ = changed_closure()
    step = jit(fun)
    step(jnp.ones(4))
    change()
    step(jnp.ones(5))
    assert explain_retraces(step)[1].differences == ("x: shape (4,) → (5,)",)
