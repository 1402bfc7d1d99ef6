"""Models and arrays on one mesh, declared for another: axis types, shapes, orders, names, devices.

What comes out has the values, layout and type of ``jax.device_put``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding

from draws import specs
from nnx_sharding import StateSharding, jit, place, shard_map, sharded_init
from nnx_sharding.partition import with_sharding_constraint
from zoo import P, mesh_of

SHAPES = ((8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 2), (4,), (1,), (1, 1))
KINDS = (AxisType.Auto, AxisType.Explicit)
W = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
V = np.arange(8, dtype=np.float32)


class Model(nnx.Module):
    """A parameter, a statistic and an array that is an attribute."""

    def __init__(self, put=lambda x, spec: jnp.asarray(x), specs=(None, None, None)):
        self.w = nnx.Param(put(W, specs[0]))
        self.v = nnx.BatchStat(put(V, specs[1]))
        self.a = nnx.data(put(W, specs[2]))


def step(m, x):
    m.w[...] = m.w[...] + 1
    m.v[...] = m.v[...] * 2
    m.a = m.a * 3
    return x * 2 + 1


class Declared(NamedTuple):
    """A mesh, with the specs of the model on it and that of an array."""

    mesh: Mesh
    specs: tuple[P, P, P]
    x: P

    @property
    def of_model(self):
        w, v, a = self.specs
        return StateSharding({nnx.Param: w, nnx.BatchStat: v, ...: a})

    def put(self, x, spec):
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def model(self):
        return Model(self.put, self.specs)

    def check(self, x, spec, value):
        """An array has the values, the layout and the type of ``jax.device_put``."""
        np.testing.assert_array_equal(np.asarray(x), value)
        wanted = self.put(np.asarray(x), spec)
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim), (x.sharding, wanted.sharding)
        if AxisType.Explicit in self.mesh.axis_types:
            assert jax.typeof(x) == jax.typeof(wanted)
        else:  # JAX takes meshes with Auto axes for one another
            assert not any(jax.typeof(x).sharding.spec)

    def check_model(self, m, steps=0):
        values = W + steps, V * 2**steps, W * np.float32(3**steps)
        arrays = m.w[...], m.v[...], m.a
        for x, spec, value in zip(arrays, self.specs, values, strict=True):
            self.check(x, spec, value)


@st.composite
def meshes(draw, like: Mesh | None = None, shapes=SHAPES):
    """A mesh; one like another has the same devices in the same order."""
    shape = draw(st.sampled_from(shapes))
    devices = draw(st.permutations(jax.devices()))[: math.prod(shape)]
    if like is not None:
        shape, devices = like.devices.shape, like.devices
    names = draw(st.sampled_from(["abc", "bac", "xyz"]))[: len(shape)]
    kinds = draw(st.tuples(*[st.sampled_from(KINDS)] * len(shape)))
    return Mesh(np.reshape(devices, shape), tuple(names), axis_types=kinds)


@st.composite
def declared(draw, mesh: Mesh):
    matrix, vector, array, x = (draw(specs(mesh.axis_names, rank)) for rank in (2, 1, 2, 2))
    return Declared(mesh, (matrix, vector, array), x)


def in_context(draw, mesh):
    return jax.set_mesh(mesh) if draw(st.booleans()) else contextlib.nullcontext()


def run(draw: Any, source: Declared, goal: Declared) -> None:
    """Two calls with a model that is on one mesh, declared for another one."""
    model = source.model()
    transform = draw(st.sampled_from([jit, shard_map]))
    ins = "in_shardings" if transform is jit else "in_specs"
    same_devices = source.mesh.devices.tolist() == goal.mesh.devices.tolist()
    moves = transform is jit or not same_devices or draw(st.booleans())
    options: dict[str, Any] = {
        ins: (goal.of_model, goal.x),
        ins.replace("in_", "out_"): goal.x,
        "on_committed": "move" if moves else "reshard",
    }
    fun = transform(step, mesh=goal.mesh, **options)
    places = [W, goal.put(W, goal.x)]
    if moves or AxisType.Auto in goal.mesh.axis_types:
        places.append(source.put(W, source.x))
    x = draw(st.sampled_from(places))
    with in_context(draw, goal.mesh):
        if draw(st.booleans()):
            fun = fun.lower(model, x).compile()
        for steps in (1, 2):
            goal.check(fun(model, x), goal.x, W * 2 + 1)
            goal.check_model(model, steps)


@settings(max_examples=max(20, settings().max_examples // 10))
@given(st.data())
def test_from_one_mesh_to_another(data):
    mesh = data.draw(meshes())
    other = data.draw(meshes(like=mesh if data.draw(st.booleans()) else None))
    run(data.draw, data.draw(declared(mesh)), data.draw(declared(other)))


ALL = [
    mesh_of(shape, ("d", "m")[: len(shape)], kinds)
    for shape in ((8,), (2, 4), (4, 2))
    for kinds in itertools.product(KINDS, repeat=len(shape))
]


@pytest.mark.parametrize("spec", [P(), P("d"), P(None, "d")])
def test_all_pairs_on_the_same_devices(spec):
    for one, other in itertools.permutations(ALL, 2):
        goal = Declared(other, (spec, P(), spec), spec)
        options = {"in_shardings": (goal.of_model, spec), "out_shardings": spec, "mesh": other}
        model = Declared(one, (spec, P(), spec), spec).model()
        goal.check(jit(step, **options, on_committed="move")(model, W), spec, W * 2 + 1)
        goal.check_model(model, 1)


@settings(max_examples=max(20, settings().max_examples // 10))
@given(st.sampled_from(ALL), st.sampled_from(ALL), st.sampled_from([P(), P("d"), P(None, "d")]))
def test_arrays_of_another_mesh_are_taken_as_by_jax(one, other, spec):
    x, goal = jax.device_put(W, NamedSharding(one, spec)), Declared(other, (P(),) * 3, spec)
    sharding = NamedSharding(other, spec)
    fun = jit(lambda x: x * 2 + 1, in_shardings=spec, out_shardings=spec, mesh=other)
    try:
        jax.jit(lambda x: x * 2 + 1, in_shardings=sharding, out_shardings=sharding)(x)
    except ValueError:
        with pytest.raises(ValueError, match=r"x, shape \(16, 8\): is .* declared"):
            fun(x)
    else:
        goal.check(fun(x), spec, W * 2 + 1)


@pytest.mark.parametrize("other", ALL, ids=str)
def test_shardings_on_another_mesh_than_the_one_in_context(other):
    """As by JAX: the two differ in the types of their axes only."""

    def fun(x):
        return x * 2 + 1

    options = {"in_shardings": NamedSharding(other, P("d"))}
    kinds = (AxisType.Auto,) * other.devices.ndim
    with jax.set_mesh(mesh_of(other.devices.shape, other.axis_names, kinds)):
        wanted, x = jax.jit(fun, **options)(W), jit(fun, **options)(W)
    np.testing.assert_array_equal(x, wanted)
    assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)


@settings(max_examples=max(20, settings().max_examples // 10))
@given(st.data())
def test_arrays_that_have_no_mesh_yet(data):
    """Also where axes of both types are in one spec, in one dimension."""
    goal = data.draw(meshes(shapes=((2, 4), (2, 2, 2))).flatmap(declared))
    model, mesh, specs = Model(), goal.mesh, goal.of_model
    match data.draw(st.sampled_from(["jit", "shard_map", "uncompiled", "place", "init", "wsc"])):
        case "place":
            model, steps = place(model, specs, mesh), 0
        case "init":
            model, steps = sharded_init(Model, specs, mesh), 0
        case "wsc":
            model, steps = with_sharding_constraint(model, specs, mesh=mesh), 0
        case kind:
            steps, x = 1, data.draw(st.sampled_from([W, jnp.asarray(W), goal.put(W, goal.x)]))
            with in_context(data.draw, mesh):
                if kind == "jit":
                    options = {"in_shardings": (specs, goal.x), "out_shardings": goal.x}
                    fun = jit(step, mesh=mesh, **options)
                else:
                    options = {"in_specs": (specs, goal.x), "out_specs": goal.x}
                    fun = shard_map(step, mesh=mesh, jit=kind == "shard_map", **options)
                goal.check(fun(model, x), goal.x, W * 2 + 1)
    goal.check_model(model, steps)


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1], (AxisType.Explicit,) * 2], ids=str)
@pytest.mark.parametrize("present", [None, P(), P("d"), P("d", "m")], ids=str)
@pytest.mark.parametrize("spec", [P("m", "d"), P("d")], ids=str)
def test_shard_map_reshards_the_arrays_that_jax_reshards(kinds, present, spec):
    mesh = mesh_of((2, 4), ("d", "m"), kinds)
    x = jnp.asarray(W) if present is None else jax.device_put(W, NamedSharding(mesh, present))
    options = {"in_specs": spec, "out_specs": spec, "mesh": mesh}
    try:
        wanted = jax.shard_map(lambda x: x * 2, **options)(x)
    except ValueError:
        if present is not None:  # we give a type to an array that has none
            with pytest.raises(ValueError, match="part of an array's type"):
                shard_map(lambda x: x * 2, **options)(x)
            return
        wanted = jax.device_put(W * 2, NamedSharding(mesh, spec))
    got = shard_map(lambda x: x * 2, **options)(x)
    np.testing.assert_array_equal(got, wanted)
    assert got.sharding.is_equivalent_to(wanted.sharding, 2)


@pytest.mark.parametrize(
    "change", [lambda m: None, lambda m: setattr(m, "a", m.a + 1)], ids=["kept", "changed"]
)
def test_attributes_whose_spec_is_that_of_their_type(change):
    mesh = mesh_of((2, 4), ("d", "m"), "explicit")
    here = Declared(mesh, (P("d", "m"), P("m"), P("m", "d")), P("d"))
    model, x = here.model(), here.put(W, here.x)

    def fun(m, x):
        change(m)
        return x * 2

    here.check(shard_map(fun, out_specs=here.x, mesh=mesh)(model, x), here.x, W * 2)
    change(wanted := here.model())
    here.check(model.a, P("m", "d"), np.asarray(wanted.a))
    here.check(model.w[...], P("d", "m"), W)
