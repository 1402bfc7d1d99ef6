"""Our transforms inside those of Flax and JAX, those inside ours, and ours inside ours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx
from jax.sharding import NamedSharding

from nnx_sharding import StateSharding, jit, shard_map
from zoo import MLP, Counter, P, assert_same_state, mesh_of, mlp_specs, numbers

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def close(ours, theirs, rtol=1e-5, atol=1e-6):
    a, b = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(numbers(x), numbers(y), rtol=rtol, atol=atol)


class MixedTest(parameterized.TestCase):
    """Ours and Flax's or JAX's own, one inside the other."""

    def test_plain_jax_transforms_of_ours(self):
        fun = jit(lambda x, m: (m(x) ** 2).sum())
        model, other = MLP(), MLP()
        plain = lambda x: (other(x) ** 2).sum()  # noqa: E731
        for transform in (jax.grad, jax.vmap, jax.jit, jax.hessian, jax.jacfwd, jax.checkpoint):
            ours, theirs = transform(lambda x: fun(x, model)), transform(plain)
            close(ours(X[0:2]), theirs(X[0:2]), rtol=1e-4, atol=1e-5)

    def test_vmap_axis_name(self):
        fun = jit(lambda x: jax.lax.psum(x, "i"))
        close(
            jax.vmap(fun, axis_name="i")(X),
            jax.vmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(X),
        )

    def test_eval_shape_and_make_jaxpr_of_ours(self):
        fun = jit(lambda m, x: m(x))
        self.assertEqual(nnx.eval_shape(lambda: fun(MLP(), X)).shape, (8, 4))
        names = [e.primitive.name for e in jax.make_jaxpr(lambda x: fun(MLP(), x))(X).eqns]
        self.assertIn("jit", names)

    def test_model_made_inside_of_a_trace(self):
        @jax.jit
        def outer(x):
            model = Counter()
            jit(lambda m, x: m(x))(model, x)
            return jit(lambda m, x: m(x))(model, x)

        self.assertEqual(float(outer(1.0)), 4.0)

    def test_model_of_an_outer_trace_can_be_read(self):
        model = MLP()
        close(jax.jit(lambda x: jit(lambda m, x: m(x))(model, x))(X), model(X))

    def test_disable_jit(self):
        model, expected = Counter(), Counter()
        with jax.disable_jit():
            out = jit(lambda m, x: m(x))(model, 1.0)
        self.assertEqual(float(out), float(expected(1.0)))
        assert_same_state(self, model, expected)

    def test_callbacks_and_debug_print(self):
        seen = []

        @jit
        def fun(model, x):
            jax.debug.callback(lambda v: seen.append(float(v)), model(x))
            return jax.pure_callback(
                lambda v: np.float32(v) * 2, jax.ShapeDtypeStruct((), jnp.float32), x
            )

        self.assertEqual(float(fun(Counter(), 1.0)), 2.0)
        jax.effects_barrier()
        self.assertEqual(seen, [3.0])


class ShardedTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.mesh = mesh_of((8,), ("model",))
        self.mapped = shard_map(
            lambda m, x: jax.lax.psum(m(x), "model"),
            mesh=self.mesh,
            in_specs=(mlp_specs(), P()),
            out_specs=P(),
        )

    def test_training_step_of_jit_over_shard_map(self):
        def make():
            model = MLP()
            return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        def step(forward):
            def run(model, optimizer, x):
                value, grads = nnx.value_and_grad(lambda m: jnp.mean(forward(m, x) ** 2))(model)
                optimizer.update(model, grads)
                return value

            return run

        model, optimizer = make()
        plain, plain_optimizer = make()
        ours = jit(step(self.mapped), in_shardings=(mlp_specs(), None, None), mesh=self.mesh)
        for _ in range(3):
            value = ours(model, optimizer, X)
            expected = step(lambda m, x: m(x))(plain, plain_optimizer, X)
            np.testing.assert_allclose(value, expected, rtol=1e-4)
        assert_same_state(self, model, plain, rtol=1e-4)
        self.assertEqual(model.up.kernel.sharding, NamedSharding(self.mesh, P(None, "model")))

    @parameterized.named_parameters(("flax", nnx.jit), ("ours", jit))
    def test_inside_of_jit(self, decorator):
        model = MLP()
        close(decorator(lambda m, x: self.mapped(m, x))(model, X), MLP()(X))

    def test_inside_of_plain_jax_jit(self):
        graph, state = nnx.split(MLP())
        close(jax.jit(lambda s, x: self.mapped(nnx.merge(graph, s), x))(state, X), MLP()(X))

    def test_inside_of_flax_scan_and_remat(self):
        model = MLP()

        @nnx.scan(in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=3)
        def repeat(model, x):
            return self.mapped(model, x)

        @nnx.scan(in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=3)
        def plain(model, x):
            return model(x)

        close(jit(lambda m, x: repeat(m, x))(model, X), plain(MLP(), X))
        remat = nnx.remat(self.mapped)
        close(nnx.grad(lambda m: remat(m, X).sum())(MLP()), nnx.grad(lambda m: m(X).sum())(MLP()))

    def test_flax_shard_map_inside_of_ours(self):
        spec = nnx.StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P("model", None)})
        theirs = nnx.shard_map(
            lambda m, x: jax.lax.psum(m(x), "model"),
            mesh=self.mesh,
            in_specs=(spec, P()),
            out_specs=P(),
        )
        close(jit(lambda m, x: theirs(m, x))(MLP(), X), MLP()(X))

    def test_updates_in_shard_map_inside_of_jit(self):
        def count(model):
            model.count[...] += jax.lax.psum(1, "model")

        mapped = shard_map(count, mesh=self.mesh, in_specs=(P(),), out_specs=P())
        model = Counter()

        def outer(model):
            mapped(model), mapped(model)

        jit(outer)(model)
        self.assertEqual(int(model.count[...]), 16)

    def test_in_shardings_of_a_jit_inside_of_a_jit(self):
        spec = StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P("model", None)})
        inner = jit(lambda m, x: m(x), in_shardings=(spec, None), mesh=self.mesh)
        outer = jit(lambda m, x: inner(m, x))
        model = MLP()
        close(outer(model, X), MLP()(X))

    def test_constraint_inside(self):
        def fun(model, x):
            hidden = jax.nn.relu(model.up(x))
            hidden = jax.lax.with_sharding_constraint(
                hidden, NamedSharding(self.mesh, P(None, "model"))
            )
            return model.down(hidden), hidden

        out, hidden = jit(fun, in_shardings=(mlp_specs(), None), mesh=self.mesh)(MLP(), X)
        close(out, MLP()(X))
        self.assertEqual(hidden.sharding.spec[1], "model")
