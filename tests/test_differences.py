"""How two calls are described of which the second one is traced again."""

from __future__ import annotations

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_sharding
from nnx_sharding import explain_retraces, jit
from nnx_sharding.core.signature import Parameters, Roles
from nnx_sharding.diagnostics.differences import differences
from test_retraces import REMEDY, Block, Model, NoEq, last_of, scaled
from zoo import P, mesh_of


def last(before, after, **options):
    """The differences of a second call."""
    f = jit(lambda *args, **kwargs: jnp.zeros(()), **options)
    for args, kwargs in (before, after):
        f(*args, **kwargs)
    assert len(explain_retraces(f)) == 2
    return last_of(f)


def one(*args, **kwargs):
    return args, kwargs


class BadRepr(NoEq):
    def __repr__(self):
        raise RuntimeError("no repr")


@dataclasses.dataclass
class Config:
    table: np.ndarray


class TestArguments:
    @pytest.mark.parametrize(
        ("before", "after", "line"),
        [
            ((32, 64), (31, 64), "args[0]: shape (32, 64) → (31, 64)"),
            (jnp.float32, jnp.bfloat16, "args[0]: dtype float32 → bfloat16"),
            (1.0, jnp.float32(1), "args[0]: weak_type True → False"),
        ],
    )
    def test_arrays(self, before, after, line):
        def make(x):
            return jnp.ones(x) if isinstance(x, tuple) else jnp.ones(3, x) if callable(x) else x

        assert last(one(make(before)), one(make(after))) == [line]

    def test_names_are_those_of_the_parameters(self):
        f = jit(lambda model, x: x)
        f(Model(1), jnp.ones(2))
        f(Model(1), jnp.ones(3))
        assert last_of(f) == ["x: shape (2,) → (3,)"]

    def test_static_argument(self):
        f = jit(lambda n, x: x, static_argnames="n")
        f(1, 1.0), f(2, 1.0)
        assert last_of(f) == ["static argument n: 1 → 2"]

    def test_other_ways_to_call(self):
        f = jit(lambda model, x=1.0, train=True: x)
        f(1.0, 2.0), f(1.0, 2.0, train=2.0)
        assert last_of(f) == ["arguments (model, x) → (model, x, train=)"]

    def test_modules(self):
        model = Model(1, 1)
        f = jit(lambda model: None)
        f(model)
        model.blocks[1].static = 2
        f(model)
        assert last_of(f) == ["model.blocks[1].static: 1 → 2"]
        model.new = nnx.Param(jnp.ones(1))
        f(model)
        assert last_of(f) == ["model.new: missing → a Param"]
        model.blocks[0].w.set_metadata(note="a")
        f(model)
        assert last_of(f) == ["model.blocks[0].w, metadata 'note': missing → 'a'"]

    def test_arrays_of_models_that_differ_are_compared_by_name(self):
        a, b = Block(1), Block(2)
        b.w = nnx.Param(jnp.ones(3))
        assert last(one(a), one(b)) == [
            "args[0].static: 1 → 2",
            "args[0].w: shape (2,) → (3,)",
        ]

    def test_sharing(self):
        a, b = nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))
        assert last(one([a, b]), one([a, a]), graph=True) == [
            "args[0][1]: a Param → a Param, shared with args[0][0]"
        ]

    def test_options(self):
        def f(x):
            return x

        jit(f, graph=True)(1.0)
        jit(f, graph=True, out_shardings=P(), mesh=mesh_of((8,), ("a",)))(1.0)
        lines = last_of(jit(f))
        assert f"out_shardings: None → {P()}" in lines
        assert "mesh: none → a 8, Auto" in lines
        jit(f, graph=False)(1.0)
        assert "graph: True → False" in last_of(jit(f))

    def test_context(self):
        f, x = jit(lambda x: x), jnp.ones(8)
        f(x)
        with jax.default_matmul_precision("float32"):
            f(x)
        assert last_of(f) == ["jax_default_matmul_precision: None → 'float32'"]
        with jax.set_mesh(mesh_of((8,), ("a",))):
            f(x)
        assert last_of(f) == ["mesh in context: none → a 8, Auto"]

    def test_nothing_that_we_see(self):
        f = jit(lambda x: x + 1)
        f(1.0)
        jax.clear_caches()
        f(1.0)
        assert explain_retraces(f)[1].compared_to == 1
        assert last_of(f) == []
        assert "JAX dropped the trace" in str(explain_retraces(f))


class TestStatics:
    """The differences of two values of a static attribute."""

    def lines(self, a, b):
        lines = last(one(Block(a)), one(Block(b)))
        return "\n".join(line.removeprefix("args[0].static") for line in lines)

    def test_parts(self):
        assert self.lines((1, 2), (1, 3)) == "[1]: 2 → 3"
        assert self.lines({"a": [1]}, {"a": [True]}) == "['a'][0]: 1 → True"
        assert self.lines(scaled(1), scaled(2)) == ", captured rate: 1 → 2"
        assert self.lines(functools.partial(max, 1), functools.partial(max, 2)) == ".args[0]: 1 → 2"
        assert self.lines(NoEq(1), NoEq(2)) == ".rate: 1 → 2"
        assert self.lines(nnx.relu, nnx.gelu) == ": relu → gelu"
        assert self.lines(mesh_of((8,), ("a",)), mesh_of((2, 4), ("a", "b"))) == (
            ": mesh a 8, Auto → mesh a 2 × b 4, Auto"
        )
        assert self.lines([1], [1, 2]) == "[1]: missing → 2"
        assert self.lines(optax.adam(0.1), optax.adam(0.2)).endswith("step_size: -0.1 → -0.2")

    def test_numpy_arrays(self):
        def lines(*tables):
            return self.lines(*map(Config, tables)).removeprefix(".table")

        before, after = np.zeros((2, 3)), np.zeros((2, 3))
        after[1, 2] = 7
        assert lines(before, after) == "[1, 2]: 0.0 → 7.0"
        assert lines(before, after - 1) == "[0, 0]: 0.0 → -1.0, and 5 other elements"
        assert lines(before, after[0]) == ": float64[2,3] → float64[3]"
        assert lines(before, before > 0) == ": float64[2,3] → bool[2,3]"
        assert lines(np.array(0.0), np.array(-0.0)) == ": 0.0 → -0.0"

    def test_an_object_that_is_gone_equals_itself(self):
        f, model = jit(lambda model, x: x), Block(scaled(1))
        f(model, jnp.ones(2))
        f(model, jnp.ones(3))
        model.static = None
        gc.collect()
        assert last_of(f) == ["x: shape (2,) → (3,)"]

    @pytest.mark.parametrize(
        ("make", "kind"),
        [(NoEq, "NoEq"), (lambda: scaled(1), "function"), (lambda: optax.adam(0.1), "function")],
    )
    def test_look_alikes(self, make, kind):
        lines = self.lines(make(), make())
        assert "is a new object that looks the same" in lines
        assert f"{kind} defines no __eq__" in lines
        assert REMEDY in lines

    def test_a_list_of_a_look_alike(self):
        lines = self.lines(NoEq([1]), NoEq([1]))
        assert lines.startswith(" is a new object") and "NoEq defines no __eq__" in lines

    def test_the_part_is_named(self):
        lines = self.lines(optax.sgd(0.1), optax.sgd(0.1)).splitlines()
        assert [line.split()[0] for line in lines] == [".init", ".update"]

    def test_long_and_bad_reprs(self):
        assert len(self.lines("x" * 9000, "y" * 9000)) < 300
        assert self.lines(BadRepr(BadRepr()), BadRepr(1)) == ".rate: a BadRepr → 1"

    def test_cycles(self):
        a, b = NoEq(), NoEq()
        a.rate, b.rate = a, b
        assert "looks the same" in self.lines(a, b)

    def test_deep_models(self):
        def nested(static):
            model = Block(static)
            for _ in range(2000):
                outer = nnx.Dict(child=model)
                model = outer
            return model

        signature = Parameters(lambda model: None, Roles()).signature(1, ())
        old, new = ((signature, nnx_sharding.split(((nested(s),), {}))[0]) for s in (1, 2))
        (line,) = differences(old, new)
        assert line.endswith(".child.static: 1 → 2")
        assert len(line) < 300

    def test_parts_of_variables(self):
        def block(value):
            model = Block()
            model.w = nnx.Param(value)
            return model

        x = jnp.ones(1)
        assert last(one(block(x)), one(block({"a": x}))) == [
            "args[0].w[...]: an array → PyTreeDef({'a': *})"
        ]
        (line,) = last(one([x]), one((x,)))
        assert line.startswith("the arguments: PyTreeDef((([*],)")

    def test_names_that_begin_alike(self):
        a, b = Block((1, (2,))), Block((1, (2,)))
        a.static_2, b.static_2 = 1, 2
        b.static = (1, 5)
        assert last(one(a), one(b)) == ["args[0].static[1]: (2,) → 5", "args[0].static_2: 1 → 2"]
