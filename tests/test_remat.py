"""``remat`` and ``saved_residuals``: the same values and gradients, and fewer arrays kept."""

from __future__ import annotations

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from graphs import snapshot
from libraries import FLAX, FULL, OURS, assert_same, named, node, param, programs_of, stat
from nnx_sharding import jit, saved_residuals, stack
from zoo import MLP, Counter, Net, P, mesh_of

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
KEPT_BY_UP = 8 * 16 * 4  # bytes


class Deep(nnx.Module):
    """Three blocks, each with two layers."""

    def __init__(self, rngs):
        self.blocks = nnx.List([MLP(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return checkpoint_name(x, "last")


def loss(model, x=X):
    return jnp.mean(model(x) ** 2)


def deep():
    return Deep(nnx.Rngs(0))


# Programs for the transforms of any library. Each returns all that can be seen of the outcome.


def gradients(t):
    return t.value_and_grad(t.remat(loss))(deep(), X)


def of_a_method(t):
    class Model(MLP):
        @t.remat
        def __call__(self, x):
            return super().__call__(x)

    return t.value_and_grad(loss)(Model(), X)


def statistics_and_dropout(t):
    net, x = Net(features=3), jnp.ones((4, 3))
    run = t.remat(lambda m, x: m(x))
    grads = t.grad(lambda m: run(m, x).sum())(net)
    return run(net, x), grads, nnx.state(net)


def attributes_added(t):
    model = MLP()

    def fun(m, x):
        m.seen = nnx.Intermediate(x.mean())
        m.calls = 2
        return m(x).sum()

    grads = t.grad(t.remat(fun))(model, X)
    return grads, nnx.state(model), model.calls


def shared_variables(t):
    shared = param(2)
    a, b = node(w=shared), node(w=shared)

    def fun(a, b):
        a.w[...] *= 2
        return a.w[...] * b.w[...]

    return t.remat(fun)(a, b), t.grad(t.remat(fun), argnums=(0, 1))(a, b), shared[...]


def keyword_arguments(t):
    return t.remat(lambda m, x: m(x))(MLP(), x=X)


def static_arguments(t):
    fun = t.remat(lambda m, x, n: m(x).sum() * jnp.ones(n), static_argnums=2)
    return fun(MLP(), X, 3)


def policy_of_jax(t):
    policy = jax.checkpoint_policies.dots_saveable
    return t.value_and_grad(t.remat(loss, policy=policy))(deep(), X)


PROGRAMS = programs_of(globals())
POLICIES = (
    None,
    "dots_saveable",
    jax.checkpoint_policies.everything_saveable,
    {r"blocks/\d+/up$": "save"},
    {nnx.Linear: "save"},
    {"blocks/1/.*": "recompute", nnx.Linear: "save"},
    {"last": "save"},
    {"blocks/0$": "offload", lambda path, module: path[-1:] == ("down",): "save"},
)


class SameTest(parameterized.TestCase):
    @parameterized.named_parameters(named(PROGRAMS))
    def test_program(self, program):
        assert_same(program(OURS), program(FLAX))

    @parameterized.parameters(*((policy,) for policy in POLICIES))
    def test_gradients_with_any_policy(self, policy):
        expected = OURS.value_and_grad(loss)(deep(), X)
        fun = OURS.value_and_grad(OURS.remat(loss, policy=policy))
        assert_same(fun(deep(), X), expected)
        compiled = OURS.jit(fun)
        assert_same(compiled(deep(), X), expected, rtol=1e-5)
        assert_same(compiled(deep(), X), expected, rtol=1e-5)

    def test_flags_stay_what_they_are(self):
        def fun(m, x, flag, name, nothing, *, twice):
            assert (flag, name, nothing) == (True, "sum", None)
            return getattr(m(x), name)() * (2 if twice else 1)

        run = OURS.remat(fun)
        for twice in (True, False):
            value = run(MLP(), X, True, "sum", None, twice=twice)
            np.testing.assert_allclose(value, fun(MLP(), X, True, "sum", None, twice=twice))

    def test_method_of_an_object(self):
        model = MLP()
        np.testing.assert_array_equal(OURS.remat(model.__call__)(X), model(X))

    def test_references_and_failures(self):
        model = node(w=param(3), n=nnx.BatchStat(jnp.float32(0), ref=True), s=stat())

        def fun(m, fails):
            m.n[...] += 1
            m.s[...] += 1
            if fails:
                raise RuntimeError("no")
            return m.w[...] ** 2

        assert OURS.remat(fun)(model, False) == 9
        assert (model.n[...], model.s[...]) == (1, 1)
        plain = node(w=param(3), n=stat(), s=stat())
        before = snapshot(plain)
        with pytest.raises(RuntimeError, match="no"):
            OURS.remat(fun)(plain, True)
        assert snapshot(plain) == before


class PolicyTest(parameterized.TestCase):
    """What is kept, by ``saved_residuals``."""

    def kept(self, policy, fun=loss, make=deep):
        return saved_residuals(OURS.remat(fun, policy=policy), make(), X)

    def test_nothing(self):
        assert self.kept(None).bytes() == 0
        assert self.kept({nnx.Linear: "recompute"}).bytes() == 0

    @parameterized.parameters(
        ({r"blocks/\d+/up$": "save"}, ["m.blocks[0].up", "m.blocks[1].up", "m.blocks[2].up"]),
        ({"blocks/1/.*": "save"}, ["m.blocks[1].down", "m.blocks[1].up"]),
        ({"blocks/0/up": "recompute", "up$": "save"}, ["m.blocks[1].up", "m.blocks[2].up"]),
        ({nnx.PathContains("down"): "save"}, [f"m.blocks[{i}].down" for i in range(3)]),
        ({"last": "save"}, ["m"]),
    )
    def test_by_filter(self, policy, sources):
        def fun(m, x):
            return jnp.mean(jnp.sin(m(x)))

        found = self.kept(policy, fun)
        computed = sorted({x.source for x in found if x.operation != "argument"})
        assert [x.replace("model", "m") for x in computed] == sources

    def test_as_many_bytes_as_jax_says(self):
        """The list is that of ``jax.ad_checkpoint.print_saved_residuals``."""
        graphdef, state = nnx.split(deep())
        for policy in (None, jax.checkpoint_policies.dots_saveable):
            remat = jax.checkpoint(
                lambda state, x: loss(nnx.merge(graphdef, state), x), policy=policy
            )
            with contextlib.redirect_stdout(io.StringIO()) as text:
                jax.ad_checkpoint.print_saved_residuals(remat, state, X)
            lines = [x for x in text.getvalue().splitlines() if "from the argument" not in x]
            kept = [x for x in self.kept(policy) if x.operation != "argument"]
            assert len(kept) == len([x for x in lines if "from a constant" not in x])

    def test_offload(self):
        found = self.kept({r"blocks/\d+/up$": "offload"})
        assert (found.bytes(), found.bytes("host")) == (0, 3 * KEPT_BY_UP)
        assert "on the host" in str(found)

    def test_through_a_loop_over_layers(self):
        class Model(nnx.Module):
            def __init__(self):
                self.blocks = stack(MLP, 3, rngs=nnx.Rngs(0))

            def __call__(self, x):
                return self.blocks(x)

        assert self.kept({"blocks/layers/up": "save"}, make=Model).bytes() == 3 * KEPT_BY_UP
        assert self.kept(None, make=Model).bytes() == 0
        sources = {x.source for x in saved_residuals(loss, Model(), X) if x.shape == (3, 8, 16)}
        assert sources == {"model.blocks.layers"}

    def test_of_a_random_key(self):
        """Dropout that is computed again needs its key, whose dtype NumPy does not know."""

        @jax.checkpoint
        def drop(x, key):
            return jnp.sin(x * jax.random.bernoulli(key, 0.5, x.shape))

        def fun(x, key):
            return jnp.sum(drop(x * 2, jax.random.fold_in(key, 1)))

        found = saved_residuals(fun, X, jax.random.key(0))
        assert "key<fry>[]" in str(found)

    def test_of_a_while_loop(self):
        """What the body computes last is kept, though the condition returns one value as well."""

        def fun(x, y):
            start = jax.lax.stop_gradient(x)
            scale = jax.lax.while_loop(lambda z: z.sum() < 9, lambda z: jnp.sin(z * 2), start)
            return jnp.sum(scale * y)

        operations = {x.operation for x in saved_residuals(fun, X, X) if x.operation != "argument"}
        assert operations == {"sin"}

    @parameterized.parameters("jit", "remat", "vmap", "scan")
    def test_a_trace_of_another_call_is_not_used_again(self, name):
        """JAX has traced the inner function without filters, and for a block of another path."""
        call = {
            "jit": OURS.jit(MLP.__call__),
            "remat": OURS.remat(MLP.__call__),
            "vmap": OURS.vmap(MLP.__call__, in_axes=(None, 0)),
            "scan": OURS.scan(MLP.__call__, in_axes=(None, 0), out_axes=0),
        }[name]

        def fun(m, x):
            for block in m.blocks:
                x = jnp.tanh(call(block, x))
            return x.mean()

        OURS.jit(fun)(deep(), X)
        assert self.kept({"blocks/1/up": "save"}, fun).bytes() == KEPT_BY_UP
        assert self.kept({"blocks/[12]/up": "save"}, fun).bytes() == 2 * KEPT_BY_UP

    def test_through_vmap_and_remat(self):
        def fun(m, x):
            inner = OURS.remat(lambda m, x: m(x), policy={"down": "save"})
            return (OURS.vmap(inner, in_axes=(None, 0))(m, x) ** 2).mean()

        kept = self.kept({"up": "save", "down": "recompute"}, fun, MLP)
        assert kept.bytes() == KEPT_BY_UP

    def test_less_is_computed_again(self):
        def dots(policy):
            fun = jax.grad(lambda w: loss_of(w, policy))
            graphdef, state = nnx.split(deep())

            def loss_of(state, policy):
                return OURS.remat(loss, policy=policy)(nnx.merge(graphdef, state), X)

            return str(jax.make_jaxpr(fun)(state)).count("dot_general[")

        assert dots({nnx.Linear: "save"}) < dots({"blocks/0/up": "save"}) < dots(None)


class ErrorTest(parameterized.TestCase):
    @parameterized.parameters(
        (ValueError, "no policy 'dots_savable'; did you mean 'dots_saveable'", "dots_savable"),
        (ValueError, "expected one of 'recompute'.*\n  'a': 'keep'", {"a": "keep"}),
        (TypeError, "not an NNX filter", {5: "save"}),
        (TypeError, "a name, a callable or a mapping, got 5", 5),
    )
    def test_options(self, error, message, policy):
        with pytest.raises(error, match=message):
            OURS.remat(loss, policy=policy)

    @parameterized.parameters(
        ({"block/*/up": "save"}, "did you mean 'blocks/.* For globs, pass PathGlob"),
        ({r"blocks/\d+/up$": "save", nnx.Conv: "save"}, "  <class .*Conv'>"),
        ({"lasts": "save"}, "'lasts'; did you mean 'last'"),
    )
    def test_what_matches_nothing(self, policy, message):
        for transform in (lambda f: f, OURS.grad, OURS.jit):
            with pytest.raises(ValueError, match=f"match no called module(?s:.*){message}"):
                transform(OURS.remat(loss, policy=policy))(deep(), X)

    def test_names_of_modules_that_are_called(self):
        with pytest.raises(ValueError, match=r"Modules: up, down\."):
            OURS.remat(loss, policy={"blocks": "save"})(MLP(), X)


class SavedResidualsTest(parameterized.TestCase):
    def test_abstract_arguments(self):
        concrete = saved_residuals(loss, MLP(), X)
        model = nnx.eval_shape(MLP, **FULL)
        assert saved_residuals(loss, model, jax.ShapeDtypeStruct(X.shape, X.dtype)) == concrete
        assert saved_residuals(OURS.jit(loss), MLP(), X) == concrete

    def test_nothing_runs_and_nothing_changes(self):
        counter, calls = Counter(), []

        def fun(m, x):
            jax.debug.callback(lambda: calls.append(1))
            return m(x) ** 2

        before = snapshot(counter)
        found = saved_residuals(fun, counter, 2.0)
        assert snapshot(counter) == before and not calls
        assert found.bytes() == 4

    def test_table(self):
        found = saved_residuals(lambda m, x: m(x).sum(), MLP(), X)
        head, *rows = str(found).splitlines()
        assert head.endswith("B in whole arrays") and "each device holds a part" in rows.pop()
        assert any(row.split()[0] == "512" and row.endswith("m") for row in rows)
        assert found.bytes() == sum(x.bytes for x in found if x.operation != "argument")

    def test_bytes_on_each_device(self):
        """Types say the shardings on Explicit axes only."""

        def fun(x):
            return jnp.sin(x) ** 2

        for kind, expected in (("explicit", 32 * 4 // 8), ("auto", None)):
            with jax.set_mesh(mesh_of((4, 2), ("a", "b"), kind)):
                found = saved_residuals(fun, jax.device_put(X, P("a", "b")))
            for whole, of_device in ((x.bytes, x.bytes_per_device) for x in found):
                assert (whole, of_device) == (32 * 4, expected)
            count = len(found)
            assert count and found.bytes() == count * 32 * 4
            assert found.bytes_per_device() == (None if expected is None else count * expected)
            is_known = expected is not None
            words = f"{count * 16} B on each device" if is_known else "B in whole arrays"
            assert words in str(found).splitlines()[0]

    def test_static_arguments(self):
        def fun(m, x, name):
            return getattr(jnp, name)(m(x)).sum()

        options = {"static_argnames": "name"}
        assert saved_residuals(jit(fun, **options), MLP(), X, name="sin").bytes() > 0
