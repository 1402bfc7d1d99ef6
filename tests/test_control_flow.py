"""``cond``, ``switch``, ``while_loop`` and ``fori_loop``: what eager Python and ``flax.nnx`` do."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import Memory
from libraries import (
    FLAX,
    FULL,
    MODES,
    OURS,
    TREE,
    Statistics,
    assert_same,
    named,
    node,
    param,
    programs_of,
)
from nnx_sharding import cond, fori_loop, switch, while_loop

# Not a list, which would be something that a function reaches, and that changes.
TRACES = logging.getLogger("traces")
X = np.linspace(-1, 1, 3, dtype=np.float32)


class Model(Statistics):
    def counted(self, x):
        self.count[...] += 1
        return self.w[...] * x

    def averaged(self, x):
        self.mean[...] = 0.5 * self.mean[...] + x
        return self.dropout(self.w[...] - x)

    def same(self, x):
        return x


def counted(m, x):
    return m.counted(x)


def averaged(m, x):
    return m.averaged(x)


def same(m, x):
    return m.same(x)


BRANCHES = (counted, averaged, same)


def doubled(carry):
    m, x = carry
    m.count[...] += 1
    m.mean[...] += x
    return m, 2 * x


def stepped(i, carry):
    m, x = carry
    m.count[...] += i
    m.mean[...] += x
    return m, m.dropout(x + i * m.w[...])


def below(carry):
    return carry[1].sum() < 40


# The same in Python.


class Eager:
    """The transforms as statements of Python."""

    @staticmethod
    def cond(pred, true_fun, false_fun, *operands):
        return (true_fun if pred else false_fun)(*operands)

    @staticmethod
    def switch(index, branches, *operands):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)

    @staticmethod
    def while_loop(cond_fun, body_fun, init_val):
        while cond_fun(init_val):
            init_val = body_fun(init_val)
        return init_val

    @staticmethod
    def fori_loop(lower, upper, body_fun, init_val, unroll=None):
        for i in range(int(lower), int(upper)):
            init_val = body_fun(i, init_val)
        return init_val


# Programs for any library. Each returns all that can be seen of the outcome.


def conditions(t):
    m = Model()
    outs = [t.cond(x > 0, counted, averaged, m, X * x) for x in (1, -1, 2)]
    return outs, nnx.state(m)


def numbers_as_conditions(t):
    return [t.cond(p, lambda x: x, lambda x: -x, X) for p in (0, 2, 0.0, -0.5, np.True_)]


def switches(t):
    m = Model()
    outs = [t.switch(i, BRANCHES, m, X) for i in (-3, 0, 1, 2, 7)]
    return outs, nnx.state(m)


def one_branch(t):
    m = Model()
    return t.switch(0, [counted], m, X), nnx.state(m)


def trees_of_operands(t):
    operands = {"m": [Model(), X], "n": Model()}

    def one(d):
        return {"y": d["m"][0].counted(d["m"][1])}

    def other(d):
        return {"y": d["n"].averaged(d["m"][1])}

    outs = [t.cond(p, one, other, operands) for p in (True, False)]
    return outs, nnx.state(operands["m"][0]), nnx.state(operands["n"])


def shared_variables(t):
    w = param(2.0)
    a, b = node(w=w), node(w=w)

    def add(a, b):
        a.w[...] += 1.0
        return b.w[...]

    def multiply(a, b):
        b.w[...] *= 3.0
        return a.w[...]

    return [t.cond(p, add, multiply, a, b) for p in (True, False)], w[...]


def new_modules(t):
    make = (lambda x: node(w=nnx.Param(x)), lambda x: node(w=nnx.Param(-x)))
    return [nnx.state(t.cond(p, *make, X)) for p in (True, False)]


def attributes_set_in_both(t):
    m = node()

    def fill(value):
        def branch(m, x):
            m.new, m.mode = nnx.Param(x * value), "filled"

        return branch

    t.cond(False, fill(1.0), fill(2.0), m, X)
    return nnx.state(m), m.mode == "filled"


def nested_conditions(t):
    m = Model()

    def inner(m, x):
        return t.cond(x.sum() > 1, counted, averaged, m, x)

    return [t.cond(p, inner, same, m, X + p) for p in (0, 1, 2)], nnx.state(m)


def no_results(t):
    m = Model()

    def add(m):
        m.count[...] += 1

    t.cond(True, add, lambda m: None, m)
    return nnx.state(m)


def loop_while(t):
    m, x = t.while_loop(below, doubled, (Model(), jnp.ones(3)))
    return x, nnx.state(m)


def loop_while_never(t):
    m, x = t.while_loop(lambda carry: carry[1].sum() < 0, doubled, (Model(), jnp.ones(3)))
    return x, nnx.state(m)


def condition_reads_the_module(t):
    m, x = t.while_loop(lambda c: c[0].mean[...].sum() < 9, doubled, (Model(), jnp.ones(3)))
    return x, nnx.state(m)


def loop_for(t):
    m, x = t.fori_loop(2, 5, stepped, (Model(), jnp.ones(3)))
    return x, nnx.state(m)


def loop_for_unrolled(t):
    outs = [t.fori_loop(0, 4, stepped, (Model(), jnp.ones(3)), unroll=u) for u in (2, True, False)]
    return [(x, nnx.state(m)) for m, x in outs]


def loop_for_nothing(t):
    m, x = t.fori_loop(5, 2, stepped, (Model(), jnp.ones(3)))
    return x, nnx.state(m)


def loop_of_pytrees(t):
    carry = {"a": [Model(), jnp.ones(3)], "b": (Model(), jnp.float32(0))}

    def body(i, carry):
        (one, x), (two, y) = carry["a"], carry["b"]
        return {"a": [one, one.counted(x) / 2], "b": (two, y + two.averaged(x).sum())}

    out = t.fori_loop(0, 3, body, carry)
    return out["a"][1], out["b"][1], nnx.state(out["a"][0]), nnx.state(out["b"][0])


def loops_in_loops(t):
    def outer(i, carry):
        m, x = t.fori_loop(0, 2, stepped, carry)
        return t.while_loop(lambda c: c[1].sum() < 10, doubled, (m, x))

    m, x = t.fori_loop(0, 2, outer, (Model(), jnp.ones(3)))
    return x, nnx.state(m)


def conditions_in_loops(t):
    def body(i, carry):
        m, x = carry
        return m, t.switch(i, BRANCHES, m, x)

    m, x = t.fori_loop(0, 4, body, (Model(), jnp.ones(3)))
    return x, nnx.state(m)


PROGRAMS = programs_of(globals())


FAST = (conditions, switches, trees_of_operands, loop_while, conditions_in_loops)
NOT_IN_FLAX = (attributes_set_in_both,)  # static attributes become arrays


def in_python(program):
    return jax.tree.map(jnp.asarray, program(Eager))


class ProgramsTest(parameterized.TestCase):
    @parameterized.named_parameters(*named(FAST))
    def test_in_jit_as_in_python(self, program):
        run = nnx_sharding.jit(functools.partial(program, OURS))
        assert_same(run(), in_python(program), 1e-5)

    def test_in_tree_mode_as_in_flax(self):
        check_in_mode(**TREE)


def check_in_mode(**modes):
    states = []
    for library in (nnx_sharding, nnx):
        m = Model()
        y = library.cond(True, counted, averaged, m, X, **modes)
        z = library.switch(1, BRANCHES, m, X, **modes)
        m, x = library.while_loop(below, doubled, (m, jnp.ones(3)), **modes)
        m, x = library.fori_loop(0, 2, stepped, (m, x), **modes)
        states.append((x, y, z, nnx.state(m)))
    assert_same(*states)


class AllProgramsTest(parameterized.TestCase):
    @parameterized.named_parameters(*named(PROGRAMS))
    def test_as_in_python(self, program):
        assert_same(jax.tree.map(jnp.asarray, program(OURS)), in_python(program), 1e-5)

    @parameterized.named_parameters(*named(p for p in PROGRAMS if p not in NOT_IN_FLAX))
    def test_as_flax(self, program):
        assert_same(program(OURS), program(FLAX))

    @parameterized.parameters(*MODES.values())
    def test_in_every_mode_as_in_flax(self, **modes):
        check_in_mode(**modes)

    def test_on_every_mesh_as_on_one_device(self):
        check_sharded(*meshes())


class ModesTest(parameterized.TestCase):
    def test_the_carry_is_the_callers_module(self):
        for modes in MODES.values():
            m = Model()
            same_one, _ = while_loop(below, doubled, (m, jnp.ones(3)), **modes)
            assert int(m.count[...]) == 4
            assert same_one is m or not modes["graph"] or not modes["graph_updates"]

    def test_attributes_stay_without_graph_updates(self):
        def branch(m):
            m.mode, m.new = "set", param()
            m.count[...] += 1

        for modes in MODES.values():
            m = Model()
            cond(True, branch, branch, m, **modes)
            assert hasattr(m, "new") == (modes is FULL) and int(m.count[...]) == 1


class BoundTest(parameterized.TestCase):
    """What branches and loop bodies are bound to is an argument."""

    def test_methods_and_modules(self):
        for modes in MODES.values():
            one, other, third = Model(), Model(), nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            for i in (0, 1, 2, 1):
                y = switch(i, [one.counted, other.averaged, third], X, **modes)
                assert y.shape == (3,)
            assert int(one.count[...]) == 1 and int(other.dropout.rngs.count[...]) == 2
            np.testing.assert_array_equal(third(X), switch(2, [one.same, other.same, third], X))

    def test_the_same_object_in_several(self):
        m = Model()
        for i in (0, 1, 0):
            switch(i, [m.counted, m.averaged, m.same], X)
        assert int(m.count[...]) == 2 and int(m.dropout.rngs.count[...]) == 1

    def test_which_object_belongs_to_which_branch(self):
        a, b = Model(), Model()
        for functions in ([a.counted, a.counted, b.counted], [a.counted, b.counted, b.counted]):
            switch(1, functions, X)
        assert int(a.count[...]) == int(b.count[...]) == 1

    def test_loops(self):
        m = Model()
        x = fori_loop(0, 3, lambda i, x: x + i, 0)
        y = while_loop(lambda x: x.sum() < 20, m.counted, jnp.ones(3))
        assert int(x) == 3 and int(m.count[...]) == 3
        np.testing.assert_array_equal(y, [1, 8, 27])
        for _ in range(2):  # new values of the object are seen
            m.w[...] = m.w[...] * 0 + 5
            np.testing.assert_array_equal(cond(True, m.counted, m.same, X), 5 * X)
            m.w[...] = m.w[...] + 1
            np.testing.assert_array_equal(cond(True, m.counted, m.same, X), 6 * X)


class TracesTest(parameterized.TestCase):
    def test_traced_once_for_all_calls(self):
        def one(m, x):
            TRACES.info("one")
            return m.counted(x)

        def other(m, x):
            TRACES.info("other")
            return m.averaged(x)

        def body(i, carry):
            TRACES.info("body")
            return stepped(i, carry)

        m = Model()
        with self.assertLogs(TRACES) as traces:
            for i in range(4):
                cond(i % 2, one, other, m, X * i)
                fori_loop(0, 3, body, (m, X))
        assert [x.getMessage() for x in traces.records] == ["one", "other", "body"]

    def test_functions_and_models_are_not_kept(self):
        def fresh():
            m = Model()
            held = Model()
            cond(True, lambda m, x: x + held.w[...], averaged, m, X)
            while_loop(lambda x: x < held.w[...].sum(), lambda x: x + 1, 0.0)
            return weakref.ref(m), weakref.ref(held)

        references = fresh()
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    @parameterized.named_parameters(*MODES.items())
    def test_a_branch_is_traced_once_for_equal_operands(self, modes):
        def note(name, out):
            TRACES.info("%s %s", name, out.shape)
            return out

        one = lambda m, x: note("one", m.counted(x))  # noqa: E731
        other = lambda m, x: note("other", m.counted(x) * m.w[...].sum())  # noqa: E731

        def program(t, models, x, fail=None, **modes):
            for number, m in enumerate(models):
                x = t.cond(x.sum() > number, one, other, m, x, **modes)
                x = t.switch(number, [other, one, other, other], m, x, **modes)
                if fail is not None:
                    t.cond(x.sum() > 0, one, lambda m, x: x[:1], m, x, **modes)
            return x

        for shape, fresh in itertools.product([(3,), (2, 3)], (True, False)):
            if fresh:
                jax.clear_caches()
            models, equal = ([Model() for _ in range(4)] for _ in range(2))
            x = jnp.linspace(-1, 1, np.prod(shape)).reshape(shape)
            call = nnx_sharding.jit(functools.partial(program, OURS, **modes), **modes)
            with self.assertLogs(TRACES) as traces:
                TRACES.info("start")  # at least one line is expected
                found = call(models, x)
            # Of cond and of switch.
            lines = sorted(2 * fresh * [f"one {shape}", f"other {shape}"])
            assert sorted(x.getMessage() for x in traces.records[1:]) == lines
            np.testing.assert_allclose(found, program(Eager, equal, x), rtol=1e-5)
            for m, expected in zip(models, equal, strict=True):
                assert m.count[...] == expected.count[...] == 2
            with self.assertRaisesRegex(TypeError, "output: float32.* in true_fun, float32"):
                call(models, x, fail=True)

    def test_functions_may_capture_other_arrays_at_the_next_call(self):
        @nnx_sharding.jit
        def program(x):
            y = model = None
            captured = functools.partial(lambda add, x: add(x), lambda x: x + y)
            step = lambda carry, _: (captured(carry) * model.w[...], None)  # noqa: E731
            loop = nnx_sharding.scan(step, length=1, in_axes=(nnx_sharding.Carry, None))
            results = []
            for i in range(3):
                y, model = x * 10**i, node(w=nnx.Param(x + i))
                results += [cond(x.sum() > 0, captured, lambda x: x, x), loop(x, None)[0]]
                results += [fori_loop(0, 1, lambda i, x: captured(x), x)]
            return results

        x = jnp.float32(1)
        sums = [1 + 10**i for i in range(3)]
        expected = [[total, total * (1 + i), total] for i, total in enumerate(sums)]
        assert [float(y) for y in program(x)] == np.ravel(expected).tolist()

    def test_traces_are_of_their_context(self):
        def precise(m, x):
            return jnp.dot(m.w[...], x)

        m, x = Model(), jnp.ones(3)
        call = lambda: str(  # noqa: E731
            nnx_sharding.make_jaxpr(lambda m, x: cond(x[0] > 0, precise, precise, m, x))(m, x)
        )
        plain = call()
        with jax.default_matmul_precision("highest"):
            precise_ = call()
        assert "HIGHEST" in precise_ and "HIGHEST" not in plain and call() == plain

    def test_flags_stay_flags(self):
        def one(x, flag):
            return x if flag else -x

        for flag in (True, False, True):
            np.testing.assert_array_equal(cond(True, one, one, X, flag), X if flag else -X)

    def test_inputs_that_no_branch_writes_are_no_outputs(self):
        jaxpr = jax.make_jaxpr(lambda p: cond(p, counted, same, Model(), X))(True)
        [equation] = [x for x in jaxpr.eqns if x.primitive.name == "cond"]
        assert len(equation.outvars) == 2  # the result and the counter

    def test_loops_copy_only_what_they_write(self):
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        model.count = nnx.BatchStat(jnp.int32(0))

        def body(carry):
            m, x = carry
            m.count[...] += 1
            return m, jnp.tanh(m(x))

        def run(m, x):
            return while_loop(lambda carry: carry[1].sum() > 1, body, (m, x))[1]

        jaxpr = nnx_sharding.jit(run).trace(model, jnp.ones(64)).jaxpr
        [loop] = [x for x in jaxpr.eqns if x.primitive.name == "while"]
        assert [x.aval.shape for x in loop.outvars] == [(64,), ()]
        text = nnx_sharding.jit(run).lower(model, jnp.ones(64)).compile().as_text()
        assert not re.search(r"f32\[64,64\]\S* copy", text)

    def test_trip_counts_are_known(self):
        run = nnx_sharding.jit(lambda m, x: fori_loop(0, 7, stepped, (m, x))[1])
        text = run.lower(Model(), jnp.ones(3)).compile().as_text()
        assert '"known_trip_count":{"n":"7"}' in text


def meshes():
    for types in (
        (AxisType.Auto, AxisType.Auto),
        (AxisType.Explicit, AxisType.Explicit),
        (AxisType.Explicit, AxisType.Auto),
    ):
        yield jax.make_mesh((2, 4), ("data", "model"), axis_types=types)


def sharded(mesh):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model.mean = nnx.BatchStat(jnp.zeros((4, 8)))
    specs = {"kernel": P(None, "model"), "bias": P("model"), "mean": P("data")}
    for name, spec in specs.items():
        variable = getattr(model, name)
        variable.set_value(jax.device_put(variable.get_value(), NamedSharding(mesh, spec)))
    x = jnp.linspace(-1, 1, 32, dtype=jnp.float32).reshape(4, 8)
    return model, jax.device_put(x, NamedSharding(mesh, P("data"))), specs


def sharded_program(t, model, x):
    def one(m, x):
        m.mean[...] = 0 * m.mean[...]
        return jnp.tanh(m.kernel[...].sum() * x)

    def other(m, x):
        m.mean[...] += x
        m.bias[...] = m.bias[...] * 2
        return jnp.tanh(x)

    def step(i, carry):
        m, x = carry
        return m, x + other(m, x) * i

    y = t.cond(x.sum() > 0, one, other, model, x)
    z = t.switch(jnp.int32(1), [one, other], model, x)
    _, x = t.fori_loop(0, 3, step, (model, x + y + z))
    return t.while_loop(lambda c: jnp.abs(c[1]).sum() < 300, lambda c: step(2, c), (model, x))[1]


def check_sharded(*meshes):
    model, x, _ = sharded(jax.make_mesh((1, 1), ("data", "model"), axis_types=AUTO))
    expected = sharded_program(Eager, model, x), nnx.state(model)
    for mesh in meshes:
        with jax.set_mesh(mesh):
            model, x, specs = sharded(mesh)
            y = nnx_sharding.jit(functools.partial(sharded_program, OURS))(model, x)
        assert y.sharding.is_equivalent_to(x.sharding, 2)
        np.testing.assert_allclose(y, expected[0], rtol=1e-5)
        for name, spec in specs.items():
            value = getattr(model, name).get_value()
            assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)
            np.testing.assert_allclose(value, expected[1][name].get_value(), rtol=1e-5)


AUTO = (AxisType.Auto, AxisType.Auto)


class ShardedTest(parameterized.TestCase):
    def test_on_a_mixed_mesh(self):
        check_sharded([*meshes()][-1])


def attribute(name, value):
    def branch(m, x):
        setattr(m, name, value)
        return x

    return branch


def changed(carry, change):
    change(carry[0])
    return carry


def shrunk(i, carry):
    m, x = carry
    m.w.set_value(m.w[:1])
    m.mean.set_value(m.mean[:2])
    return m, x


class ErrorsTest(parameterized.TestCase):
    """Each names what is wrong and where, and changes nothing."""

    @parameterized.parameters(
        (
            TypeError,
            "expected functions, got:\n  true_fun: 1\n  false_fun: None",
            lambda m: cond(True, 1, None, m),
        ),
        (TypeError, "got:\n  branches[1]: 2", lambda m: switch(0, [same, 2], m, X)),
        (TypeError, "got:\n  body_fun: None", lambda m: while_loop(below, None, (m, X))),
        (
            TypeError,
            "fori_loop: a step .*\n  init_val[0].mean: float32[3] → float32[2]\n"
            "  init_val[0].w: float32[3] → float32[1]\n",
            lambda m: fori_loop(0, 2, shrunk, (m, X)),
        ),
        (TypeError, "cond: pred must be a scalar.*float32[3]", lambda m: cond(X, same, same, m, X)),
        (TypeError, "pred must be a scalar.*a str", lambda m: cond("yes", same, same, m, X)),
        (TypeError, "index must be an integer.*float32[]", lambda m: switch(1.0, BRANCHES, m, X)),
        (ValueError, "branches is empty", lambda m: switch(0, [], m, X)),
        (
            ValueError,
            "m.mode: 'a' in true_fun, 'b' in false_fun",
            lambda m: cond(True, attribute("mode", "a"), attribute("mode", "b"), m, X, **FULL),
        ),
        (
            ValueError,
            "m.mode: nothing in branches[0], 1 in branches[2]",
            lambda m: switch(0, [counted, same, attribute("mode", 1)], m, X, **FULL),
        ),
        (
            ValueError,
            "m.w: a Param in true_fun, nothing in false_fun",
            lambda m: cond(True, same, lambda m, x: (delattr(m, "w"), x)[1], m, X, **FULL),
        ),
        (
            ValueError,
            "output: float32[3] in true_fun, (float32[3], float32[3]) in false_fun",
            lambda m: cond(True, same, lambda m, x: (x, x), m, X),
        ),
        (
            ValueError,
            "output.use_bias: True in true_fun, False in false_fun",
            lambda m: cond(
                True,
                *(
                    lambda x, b=b: nnx.Linear(2, 2, use_bias=b, rngs=nnx.Rngs(0))
                    for b in (True, False)
                ),
                X,
            ),
        ),
        (
            TypeError,
            "output: float32[3] in true_fun, float32[] in false_fun",
            lambda m: cond(True, same, lambda m, x: x.sum(), m, X),
        ),
        (
            TypeError,
            "m.mean: float32[3] in true_fun, int32[3] in false_fun",
            lambda m: cond(True, same, lambda m, x: (m.mean.set_value(jnp.arange(3)), x)[1], m, X),
        ),
        (
            TraceContextError,
            "This is m.count, which <lambda> captures",
            lambda m: cond(True, lambda x: m.counted(x), lambda x: x, X),
        ),
        (
            TraceContextError,
            "This is m.count, which <lambda> captures",
            lambda m: while_loop(lambda x: x.sum() < 9, lambda x: m.counted(x), X),
        ),
        (
            TypeError,
            "must return a bool scalar, got float32[3]",
            lambda m: while_loop(lambda x: x, lambda x: x, X),
        ),
        (
            TypeError,
            "must return a bool scalar, got (bool[], bool[])",
            lambda m: while_loop(lambda x: (True, jnp.bool_(False)), lambda x: x, X),
        ),
        (
            ValueError,
            "the condition <lambda> changes these.*init_val[0].count",
            lambda m: while_loop(lambda c: c[0].counted(X).sum() < 9, doubled, (m, X)),
        ),
        (
            TypeError,
            "carry of a different structure.*given: (a Model, float32[3])",
            lambda m: while_loop(below, lambda c: c[1], (m, X)),
        ),
        (
            TypeError,
            "init_val[1]: float32[3] → float32[]",
            lambda m: while_loop(below, lambda c: (c[0], c[1].sum()), (m, X)),
        ),
        (
            ValueError,
            "different objects in the carry.*carry[0]: Model",
            lambda m: fori_loop(0, 2, lambda i, c: (Model(), c[1]), (m, X)),
        ),
        (
            ValueError,
            "fori_loop: a step changed the structure.*init_val[0].new: is nothing before, a Param",
            lambda m: fori_loop(
                0, 2, lambda i, c: changed(c, lambda m: setattr(m, "new", param())), (m, X)
            ),
        ),
        (
            ValueError,
            "init_val[0].mode: is nothing before, 1 after it.*Make the change outside",
            lambda m: while_loop(
                below, lambda c: changed(c, lambda m: setattr(m, "mode", 1)), (m, X)
            ),
        ),
        (TypeError, "lower must be an integer", lambda m: fori_loop(0.5, 2, stepped, (m, X))),
        (
            TypeError,
            "must have one type, got int32[] and int8[]",
            lambda m: jax.jit(lambda a, b: fori_loop(a, b, stepped, (Model(), X))[1])(
                jnp.int32(0), jnp.int8(1)
            ),
        ),
        (
            TypeError,
            "must have one type, got int8[] and int32[]",
            lambda m: fori_loop(np.int8(0), np.int32(1), stepped, (m, X)),
        ),
        (
            ValueError,
            "unroll=2 needs a known number of steps",
            lambda m: jax.jit(lambda n: fori_loop(0, n, lambda i, x: x, X, unroll=2))(3),
        ),
        (
            ValueError,
            "shared references",
            lambda m: cond(True, lambda a, b: X, lambda a, b: X, m, m, graph=False),
        ),
        (
            ValueError,
            "output.w: the input m.w",
            lambda m: cond(True, lambda m: m, lambda m: m, m, graph_updates=False),
        ),
    )
    def test_error(self, kind, message, call):
        model = Model()
        memory = Memory(model)
        pattern = "(?s)" + ".*".join(map(re.escape, message.split(".*")))
        for _ in range(2):  # the second call finds what is kept of the first one
            with pytest.raises(kind, match=pattern):
                call(model)
        memory.assert_unchanged()


WITHOUT_JIT = {
    "cond": lambda m: m.cond(False, jnp.sin, jnp.cos, 1.0),
    "switch": lambda m: m.switch(2, [jnp.sin, jnp.cos, jnp.exp], 1.0),
    "while_loop": lambda m: m.while_loop(lambda x: x < 3, lambda x: x * 2, 1.0),
    "while_loop of no step": lambda m: m.while_loop(lambda x: x < 0, lambda x: x * 2, 1.0),
    "fori_loop": lambda m: m.fori_loop(0, 3, lambda i, x: x + i, 1.0),
    "fori_loop of no step": lambda m: m.fori_loop(0, 0, lambda i, x: x + i, 1.0),
}


@pytest.mark.parametrize("case", WITHOUT_JIT)
def test_without_jit_as_in_jax(case):
    with jax.disable_jit():
        assert float(WITHOUT_JIT[case](nnx_sharding)) == float(WITHOUT_JIT[case](jax.lax))


def test_without_jit_models_keep_what_no_step_changes():
    model = Model()
    memory = Memory(model)
    with jax.disable_jit():
        same_model, _ = while_loop(lambda c: c[1].sum() > 99, doubled, (model, X))
    assert same_model is model
    memory.assert_unchanged()


@pytest.mark.parametrize("is_fori", [False, True])
def test_each_device_has_its_own_number_of_steps(is_fori):
    def steps(m, x):
        if is_fori:
            return m.fori_loop(0, x[0], lambda i, x: x + i, x)
        return m.while_loop(lambda x: x[0] < 10, lambda x: 2 * x + 1, x)

    results = [
        jax.jit(
            jax.shard_map(
                functools.partial(steps, m),
                mesh=jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)),
                in_specs=P("d"),
                out_specs=P("d"),
            )
        )(jnp.arange(8))
        for m in (nnx_sharding, jax.lax)
    ]
    np.testing.assert_array_equal(*results)
