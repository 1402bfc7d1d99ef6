"""``eval_shape``, ``make_jaxpr`` and ``checkify``: what ``jax`` and ``flax.nnx`` return."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.checkify import JaxRuntimeError, check, float_checks, user_checks
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from libraries import FULL, MODES, TREE, assert_same
from nnx_sharding import checkify, eval_shape, jit, make_jaxpr


class Model(nnx.Module):
    def __init__(self, value=1.0):
        self.w = nnx.Param(jnp.full(3, value, jnp.float32))
        self.count = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        self.count[...] += 1
        check(x > 0, "x must be positive, is {x}", x=x)
        return x / self.w[...]


def apply(model, x):
    return model(x)


def make(rngs):
    model = Model()
    model.linear = nnx.Linear(2, 4, rngs=rngs, kernel_metadata={"out_sharding": ("data", None)})
    return model, jnp.ones(2)


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_shapes_as_flax(modes):
    rngs = nnx.Rngs(0)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        ours, theirs = (t.eval_shape(make, rngs, **modes) for t in (nnx_sharding, nnx))
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert described(ours) == described(theirs)
        assert ours[0].linear.kernel.get_value().sharding.spec == P("data", None)
    assert int(rngs.default.count[...]) == 0


def described(tree):
    """Shapes, dtypes and specs; a constant may have none, which is a replicated one."""
    leaves = jax.tree.leaves(tree)
    specs = (getattr(x.sharding, "spec", None) or () for x in leaves)
    return [(x.shape, x.dtype, [*filter(None, s)]) for x, s in zip(leaves, specs, strict=True)]


def test_shapes_by_metadata_on_auto_axes():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        for modes in MODES.values():
            model, _ = eval_shape(make, nnx.Rngs(0), **modes)
            assert model.linear.kernel.get_value().sharding.spec == P("data", None)


def test_shapes_of_abstract_models_and_methods():
    model = eval_shape(Model)
    x = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    plain = eval_shape(lambda model, x: model.w[...] * x, model, x=x)
    assert plain == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert isinstance(model.count.get_value(), jax.ShapeDtypeStruct)
    assert jit(lambda m: eval_shape(lambda m: m.w[...], m).shape[0] + 0 * m.w[0])(Model()) == 3


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_jaxpr_as_jax(modes):
    def twice(w, x):
        return jnp.sin(w) * x

    w, x = nnx.Param(jnp.ones(3)), jnp.ones(3)
    expected = str(jax.make_jaxpr(twice)(w.get_value(), x))
    assert str(make_jaxpr(lambda w, x: twice(w[...], x), **modes)(w, x)) == expected


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jaxpr_on_a_mesh_as_jax(kind):
    def scaled(w, x):
        return jnp.sin(w) * x

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        w, x = (jax.device_put(jnp.ones(8), NamedSharding(mesh, P(a))) for a in ("data", None))
        expected = jax.make_jaxpr(scaled)(w, x)
        ours = make_jaxpr(lambda w, x: scaled(w[...], x))(nnx.Param(w), x)
    assert str(ours) == str(expected) and ours.out_avals == expected.out_avals
    assert ("@data" in str(ours)) == (kind is AxisType.Explicit)


def test_jaxpr_of_changes_methods_and_static_arguments():
    model = Model()

    def scaled(model, power):
        model.count[...] += 1
        return model.w[...] ** power

    jaxpr = make_jaxpr(static_argnums=1)(scaled)(model, 2)
    assert [str(aval) for aval in jaxpr.out_avals] == ["float32[3]", "int32[]"]
    assert "integer_pow[y=2]" in str(jaxpr) and int(model.count[...]) == 0
    with pytest.raises(TypeError, match="missing"):
        make_jaxpr(model.__call__)()


def outcomes(library, modes, compiled):
    checked = library.checkify(apply, user_checks | float_checks, **modes)
    checked = library.jit(checked, **modes) if compiled else checked
    found = []
    for model, x in ((Model(), 1.0), (Model(), -1.0), (Model(0.0), 2.0)):
        error, y = checked(model, jnp.float32(x))
        found.append((error.get(), np.asarray(y), nnx.state(model)))
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("modes", [FULL, TREE])
def test_errors_as_flax(modes, compiled):
    pairs = zip(*(outcomes(t, modes, compiled) for t in (nnx_sharding, nnx)), strict=True)
    for (ours, y, state), (theirs, expected, other) in pairs:
        assert (ours is None) == (theirs is None)
        # Only the location of the check differs.
        assert ours is None or ours.partition("(")[0] == theirs.partition("(")[0]
        assert_same((y, state), (expected, other))


def test_errors_of_methods_and_flags():
    model = Model()
    error, _ = checkify(model.__call__)(jnp.float32(-1))
    assert int(model.count[...]) == 1
    with pytest.raises(JaxRuntimeError, match=r"x must be positive, is -1\.0"):
        error.throw()
    error, y = checkify(lambda m, flag: m.w[...] if flag else None)(model, True)
    assert error.get() is None and y.shape == (3,)
    error, _ = checkify(lambda x: 1 / x, {*float_checks})(jnp.float32(0))  # any set, as in JAX
    assert error.get().startswith("division by zero")
    with pytest.raises(ValueError, match="checkify"):
        jit(apply)(model, jnp.float32(1))  # a check needs checkify
