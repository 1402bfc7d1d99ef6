"""Failed calls change no object; unused objects are freed; threads are independent."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import errors, nnx
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import Memory, Node
from nnx_sharding import StateSharding
from nnx_sharding.core import cache


class Model(nnx.Module):
    def __init__(self, value: float = 1.0):
        self.w = nnx.Param(jnp.asarray(value, jnp.float32), note="kept")
        self.pair = nnx.BatchStat({"x": jnp.ones(2), "y": jnp.zeros(2)})
        self.child = Node()
        self.child.parent = self
        self.child.w = self.w
        self.raw = jnp.arange(3.0)
        self.size = 1


def spoil(m: Model) -> None:
    """Changes of every kind, none of which may remain if the call fails later."""
    m.w[...] += 1
    m.w.set_metadata(note="changed")
    m.pair.set_value({"x": m.raw, "y": m.raw})
    m.raw = m.raw * 2
    m.size = 2
    m.child.new = nnx.Param(jnp.ones(1))
    m.child.w = m.child.new
    del m.child.parent


class Boom(Exception):
    pass


def raise_boom(*_: Any) -> Any:
    raise Boom


# Each fails after the function made all of these changes.


def in_the_function(m, x):
    spoil(m)
    raise Boom


def in_tracing(m, x):
    spoil(m)
    return x if m.w[...] > 0 else -x


def in_the_output(m, x):
    spoil(m)
    return m, "a string"


def in_shapes(m, x):
    spoil(m)
    return x @ jnp.ones((7, 7))


def in_an_io_callback(m, x):
    spoil(m)
    return io_callback(raise_boom, jax.ShapeDtypeStruct((), jnp.float32), x)


def in_a_pure_callback(m, x):
    spoil(m)
    return jax.pure_callback(raise_boom, jax.ShapeDtypeStruct((), jnp.float32), x)


def in_a_debug_callback(m, x):
    spoil(m)
    jax.debug.callback(raise_boom, x)
    return x


def fine(m, x):
    spoil(m)
    return x


def mesh() -> Mesh:
    return Mesh(jax.devices(), ("x",))


class NothingChangesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("in_the_function", in_the_function, {}, Boom),
        ("in_tracing", in_tracing, {}, jax.errors.TracerBoolConversionError),
        ("in_the_output", in_the_output, {}, TypeError),
        ("in_shapes", in_shapes, {}, (TypeError, ValueError)),
        ("in_an_io_callback", in_an_io_callback, {}, jax.errors.JaxRuntimeError),
        ("in_a_pure_callback", in_a_pure_callback, {}, jax.errors.JaxRuntimeError),
        ("in_a_debug_callback", in_a_debug_callback, {}, jax.errors.JaxRuntimeError),
        ("in_compiling", fine, {"compiler_options": {"xla_no_such_option": 1}}, Exception),
        (
            "no_filter_matches",
            fine,
            {"in_shardings": (StateSharding({nnx.Param: None}), None)},
            ValueError,
        ),
        ("too_few_specs", fine, {"in_shardings": (None,)}, ValueError),
        ("no_mesh", fine, {"in_shardings": P()}, ValueError),
        ("no_such_axis", fine, {"in_shardings": P("z"), "mesh": mesh}, ValueError),
        ("does_not_divide", fine, {"in_shardings": P("x"), "mesh": mesh}, ValueError),
        ("no_prefix", fine, {"out_shardings": (None, None)}, ValueError),
    )
    def test_no_object_changes_and_the_next_call_works(self, fails, options, error):
        options = {key: value() if key == "mesh" else value for key, value in options.items()}
        jitted = nnx_sharding.jit(fails, **options)
        model, x = Model(), jnp.asarray(2.0)
        memory = Memory(model)
        for _ in range(2):
            with pytest.raises(error):
                jitted(model, x)
            memory.assert_unchanged()
        assert float(nnx_sharding.jit(fine)(model, x)) == 2
        assert model.size == 2 and float(model.w[...]) == 2

    def test_the_same_function_works_without_the_cause(self):
        broken = [True]

        @nnx_sharding.jit
        def f(m, x):
            spoil(m)
            if broken:
                raise Boom
            return x

        model = Model()
        with pytest.raises(Boom):
            f(model, 1.0)
        broken.clear()
        assert float(f(model, 1.0)) == 1
        assert model.size == 2 and model.w.note == "changed"

    def test_failure_in_one_call_of_many(self):
        def check(x):
            if x > 2:
                raise Boom
            return x

        @nnx_sharding.jit
        def f(m, x):
            m.w[...] += x
            return io_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x)

        model = Model(0.0)
        f(model, jnp.asarray(1.0))
        memory = Memory(model)
        with pytest.raises(jax.errors.JaxRuntimeError):
            f(model, jnp.asarray(3.0))
        memory.assert_unchanged()
        f(model, jnp.asarray(2.0))
        assert float(model.w[...]) == 3

    def test_failed_stages(self):
        model = Model()
        memory = Memory(model)
        with pytest.raises(Boom):
            nnx_sharding.jit(in_the_function).lower(model, 1.0)
        with pytest.raises(Exception, match="xla_no_such_option"):
            nnx_sharding.jit(fine).lower(model, 1.0).compile({"xla_no_such_option": 1})
        memory.assert_unchanged()


@jax.tree_util.register_pytree_node_class
class Checked:
    """A loss that raises an error if it is NaN, where it is made for the caller."""

    made = 0

    def __init__(self, value: Any):
        self.value = value
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            Checked.made += 1
            if jnp.isnan(value):
                raise FloatingPointError("the loss is NaN")

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("changes_structure", [False, True])
@pytest.mark.parametrize("donated", [False, True])
def test_an_output_that_cannot_be_made(donated, changes_structure):
    """Donated arrays are gone by then, so the new ones are written; others stay as they were."""

    def step(m, x):
        m.w[...] = m.w[...] + x
        if changes_structure:
            m.calls = 1
        return Checked(x * m.w[...])

    run = nnx_sharding.jit(step, donate_argnums=0 if donated else ())
    m = Model()
    run(m, 1.0)
    for _ in range(2):  # the second one with a guard
        before, made = float(m.w[...]), Checked.made
        with pytest.raises(FloatingPointError, match="the loss is NaN"):
            run(m, jnp.nan)
        assert Checked.made == made + 1
        after = float(m.w[...])
        assert np.isnan(after) if donated else after == before


class CapturedTest(parameterized.TestCase):
    """Captured objects can be read, not changed."""

    @parameterized.named_parameters(
        ("value", lambda m: m.w.set_value(jnp.ones(()))),
        ("element", lambda m: m.w.__setitem__(..., 1.0)),
        ("metadata", lambda m: m.w.set_metadata(note=1)),
        ("static", lambda m: setattr(m, "size", 3)),
        ("attribute", lambda m: setattr(m.child, "more", nnx.Param(1.0))),
    )
    def test_change_of_a_captured_module(self, change):
        captured = Model()
        memory = Memory(captured)

        @nnx_sharding.jit
        def f(x):
            change(captured)
            return x

        with pytest.raises(errors.TraceContextError):
            f(1.0)
        memory.assert_unchanged()

    def test_change_through_an_outer_trace(self):
        captured = Model()

        @nnx_sharding.jit
        def inner(m):
            m.w[...] += 1

        @jax.jit
        def outer(x):
            inner(captured)
            return x

        memory = Memory(captured)
        with pytest.raises(errors.TraceContextError, match=r"(?s)another trace.*m\.child\.w"):
            outer(1.0)
        memory.assert_unchanged()


class ThreadsTest(parameterized.TestCase):
    def run_together(self, work: Callable[[int], Any], count: int = 4) -> list[Any]:
        barrier = threading.Barrier(count)

        def start(i: int) -> Any:
            barrier.wait()
            return work(i)

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return list(pool.map(start, range(count)))

    def test_one_trace_for_all_threads_afterwards(self):
        traces = []

        @nnx_sharding.jit
        def f(m):
            traces.append(1)
            return m.w[...] * 2

        self.run_together(lambda i: float(f(Model(float(i)))))
        traced = len(traces)
        assert 1 <= traced <= 4
        assert self.run_together(lambda i: float(f(Model(float(i))))) == [0, 2, 4, 6]
        assert len(traces) == traced

    def test_modes_of_one_thread_do_not_affect_another(self):
        def f(m):
            m.size += 1

        def work(i):
            model = Model()
            if i % 2:
                with nnx.set_graph_updates(False):
                    nnx_sharding.jit(f)(model)
            else:
                nnx_sharding.jit(f)(model)
            return model.size

        assert self.run_together(work) == [2, 1, 2, 1]


class FreeingTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("called", lambda f, m: f(m, 1.0)),
        ("staged", lambda f, m: f.lower(m, 1.0).compile()),
        ("evaluated", lambda f, m: f.eval_shape(m, 1.0)),
    )
    def test_plans_keep_no_model_alive(self, use):
        f = nnx_sharding.jit(fine)
        model = Model()
        references = [weakref.ref(x) for x in (model, model.child, model.w.get_raw_value())]
        kept = use(f, model)
        del model, kept
        gc.collect()
        assert [r() for r in references] == [None] * 3
        assert float(f(Model(), 1.0)) == 1

    def test_model_is_freed_after_a_failed_call(self):
        f = nnx_sharding.jit(in_the_function)
        model = Model()
        reference = weakref.ref(model)
        with pytest.raises(Boom):
            f(model, 1.0)
        del model
        gc.collect()
        assert reference() is None

    def test_captured_model_is_freed_with_the_function(self):
        # As in JAX: the wrapped function and what it captured live as long as the jitted one.
        model = Node()
        model.w = nnx.Param(jnp.ones(2))
        f = (lambda m: lambda v: m.w[...] * v[...])(model)
        g = nnx_sharding.jit(f)
        reference = weakref.ref(model)
        variable = nnx.Param(jnp.ones(2))
        del model
        g(variable)
        g(variable)
        del f
        assert reference() is not None
        np.testing.assert_array_equal(g(variable), [1, 1])
        del g
        assert reference() is None

    def test_bound_method_keeps_its_object_and_frees_it(self):
        class Counter(nnx.Module):
            def __init__(self):
                self.count = nnx.BatchStat(jnp.zeros(()))

            def step(self):
                self.count[...] += 1
                return self.count[...]

        model = Counter()
        f = nnx_sharding.jit(model.step)
        reference = weakref.ref(model)
        del model
        assert (float(f()), float(f())) == (1, 2)
        del f
        gc.collect()
        assert reference() is None


class CacheTest(parameterized.TestCase):
    """When a call traces the function again, and when it does not."""

    def test_more_structures_than_are_cached(self):
        f = nnx_sharding.jit(lambda m: m.w[...] * m.size)
        with mock.patch.object(cache, "MAX_PLANS", 2):
            for size in (1, 2, 3, 4, 1, 4):
                model = Model(2.0)
                model.size = size
                assert float(f(model)) == 2 * size
