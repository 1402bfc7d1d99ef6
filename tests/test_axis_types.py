"""``reshard``, ``auto_axes``, ``explicit_axes`` and ``jit(auto_axes=)``, against plain JAX."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

from nnx_sharding import (
    ActivationSharding,
    InOutSharding,
    StateSharding,
    auto_axes,
    explicit_axes,
    grad,
    jit,
    place,
    remat,
    reshard,
    value_and_grad,
    vjp,
)
from nnx_sharding.errors import NoMeshError, UnshardedWarning
from nnx_sharding.partition import fsdp, tensor_parallel
from zoo import MLP, Net, Normed, P, assert_same_state, fails, mesh_of, mlp_specs

SHAPE, NAMES = (2, 4), ("data", "model")
EXPLICIT = mesh_of(SHAPE, NAMES, "explicit")
AUTO = mesh_of(SHAPE, NAMES, "auto")
MIXED = mesh_of(SHAPE, NAMES, (AxisType.Auto, AxisType.Explicit))
KERNELS = StateSharding({nnx.PathContains("kernel"): P("model"), ...: P()})
MESHES = {"explicit": EXPLICIT, "auto": AUTO, "mixed": MIXED}
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
W = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def put(x, *entries, mesh=EXPLICIT):
    return jax.device_put(x, NamedSharding(mesh, P(*entries)))


def types(tree):
    """The types of all arrays, those of Variables too."""
    return [str(jax.typeof(x)) for x in jax.tree.leaves(tree)]


def outcome(run):
    """The types and numbers that come out, or the type of the error."""
    try:
        out = run()
    except Exception as error:
        return type(error)
    shards = [x.addressable_shards for x in jax.tree.leaves(out)]
    return types(out), [[np.asarray(s.data) for s in each] for each in shards]


def assert_alike(ours, theirs):
    """Both are errors, or the same types and nearly the same numbers on each device."""
    if isinstance(theirs, type):
        assert isinstance(ours, type), (ours, theirs)
        return
    assert not isinstance(ours, type), (ours, theirs)
    assert ours[0] == theirs[0]
    for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


class ReshardTest(parameterized.TestCase):
    @parameterized.product(kind=("explicit", "auto"), committed=(False, True))
    def test_arrays_of_one_device(self, kind, committed):
        """A mesh that only the function names says not where its arguments are, as in JAX."""
        mesh, x = MESHES[kind], jax.device_put(X, jax.devices()[0] if committed else None)
        to, options = NamedSharding(mesh, P("data")), {"mesh": mesh, "in_shardings": P()}
        use = jax.sharding.reshard if kind == "explicit" else jax.lax.with_sharding_constraint
        ours = outcome(lambda: jit(lambda x: use(x, to) * 2, mesh=mesh)(x))
        theirs = outcome(lambda: jax.jit(lambda x: use(x, to) * 2)(x))
        assert_alike(ours, theirs)
        assert isinstance(ours, type) == (committed or kind == "explicit")
        declared = outcome(lambda: jit(lambda x: use(x, to) * 2, **options)(x))
        assert_alike(declared, outcome(lambda: put(2 * X, "data", mesh=mesh)))

    @parameterized.product(
        kind=list(MESHES),
        spec=(
            P("data"),
            P(None, "model"),
            P(("data", "model")),
            P("data", None, "model"),
            P("nope"),
            P("data", "data"),
            P(None, P.UNCONSTRAINED),
            P(unreduced={"data"}),
            P("data", reduced={"model"}),
        ),
    )
    def test_like_jax(self, kind, spec):
        def by(function, trace):
            return outcome(lambda: trace(lambda x: function(x, spec))(put(X, mesh=MESHES[kind])))

        with jax.set_mesh(MESHES[kind]):
            for trace in (jax.jit, lambda f: f):
                assert_alike(by(reshard, trace), by(jax.sharding.reshard, trace))

    @parameterized.parameters(True, False)
    def test_module(self, traced):
        model = MLP()
        with jax.set_mesh(EXPLICIT):
            place(model, StateSharding({...: P()}))
            want = [
                jax.typeof(jax.sharding.reshard(layer.kernel[...], spec))
                for layer, spec in ((model.up, P(None, "model")), (model.down, P("model", None)))
            ]

            seen = []

            def f(model):
                specs = {"model": mlp_specs(), "kernel": None, "name": None}
                out = reshard({"model": model, "kernel": model.up.kernel, "name": "a"}, specs)
                assert out["model"] is model and out["kernel"] is model.up.kernel
                seen.extend(jax.typeof(layer.kernel[...]) for layer in (model.up, model.down))

            before = nnx.clone(model)
            (jit(f) if traced else f)(model)
            assert seen == want
            assert [jax.typeof(layer.kernel[...]) for layer in (model.up, model.down)] == want
            assert_same_state(self, model, before)

    def test_prefixes(self):
        with jax.set_mesh(EXPLICIT):
            tree = {"a": (X, X[0]), "b": [X, 3, None]}
            out = reshard(tree, {"a": P("data"), "b": [P(None, "model"), None, None]})
            assert types((out["a"], out["b"][0])) == [
                "float32[8@data,8]",
                "float32[8@data]",
                "float32[8,8@model]",
            ]
            assert out["b"][1:] == [3, None]

    def test_mistakes_are_listed(self):
        model = MLP()
        with jax.set_mesh(EXPLICIT):
            with fails(ValueError, "down.kernel", "up.kernel", "the mesh has no axis 'modle'"):
                reshard(model, P("modle"))
            with fails(ValueError, "(4, 16)", "not divisible by 'data' (2) × 'model' (4) = 8"):
                reshard(model, P(("data", "model")))
            with fails(TypeError, "reshard", "out_shardings", "write P('data')"):
                reshard(model, "data")
            with fails(TypeError, "write its PartitionSpec"):
                reshard(model, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        with jax.set_mesh(MIXED), fails(ValueError, "'data' is of type Auto"):
            reshard(model, P("data"))
        with fails(NoMeshError, "reshard"):
            reshard(model, P("data"))
        assert isinstance(model.up.kernel.sharding, jax.sharding.SingleDeviceSharding)

    def test_variable_of_another_trace(self):
        model = place(MLP(), StateSharding({...: NamedSharding(EXPLICIT, P())}))

        @jax.jit
        def f(x):
            reshard(model, NamedSharding(EXPLICIT, P(None, "model")))
            return x

        with fails(TraceContextError, "reshard", "another trace"):
            f(X)


def product(x, w):
    return x @ w


def loss_of_product(x, w):
    return jnp.sum(jnp.tanh(x @ w))


def pair(x, w):
    return {"y": x @ w, "loss": jnp.sum(x @ w)}


class AutoAxesOfArraysTest(parameterized.TestCase):
    @parameterized.product(
        kind=list(MESHES),
        axes=(None, "model", ("data", "model")),
        trace=(lambda f: f, jax.jit, jax.vmap, jax.grad),
    )
    def test_like_jax(self, kind, axes, trace):
        mesh = MESHES[kind]
        out = P(None, "model") if kind != "auto" else P()
        x, w = put(X, "data", "model", mesh=mesh), put(W, "model", "data", mesh=mesh)

        def by(function):
            if trace is jax.grad:
                lifted = function(
                    lambda x, w: jnp.sum(jnp.tanh(x @ w)), axes=axes, out_sharding=P()
                )
                return outcome(lambda: trace(lifted, argnums=(0, 1))(x, w))
            if trace is jax.jit:  # it may also be given at the call
                lifted = functools.partial(function(product, axes=axes), out_sharding=out)
            else:
                lifted = function(axes=axes, out_sharding=out)(product)
            if trace is jax.vmap:
                return outcome(lambda: trace(lifted, in_axes=(None, 0))(x, put(W[None], mesh=mesh)))
            return outcome(lambda: trace(lifted)(x, w))

        with jax.set_mesh(mesh):
            ours, theirs = by(auto_axes), by(jax.sharding.auto_axes)
        assert_alike(ours, theirs)

    def test_more_than_jax_takes(self):
        """Keyword arguments, strings, and a mesh that only the types name."""

        @auto_axes(out_sharding={"y": P("data"), "loss": None})
        def f(kind, *, x, w):
            assert kind == "pair"
            return pair(x, w)

        args = {"x": put(X, "data", "model"), "w": put(W, "model", "data")}
        for trace in (lambda f: f, functools.partial(jax.jit, static_argnums=0)):
            out = trace(f)("pair", **args)
            assert types(out) == ["float32[]", "float32[8@data,8]"]
            np.testing.assert_allclose(out["y"], X @ W, rtol=1e-5, atol=1e-6)

    def test_partly_manual(self):
        @auto_axes(out_sharding=P("model"))
        def f(x):
            assert jax.sharding.get_abstract_mesh().axis_types == (AxisType.Manual, AxisType.Auto)
            return x @ x.T

        run = jax.shard_map(
            f, mesh=EXPLICIT, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
        with jax.set_mesh(EXPLICIT):
            out = jax.jit(run)(put(X, "data", "model"))
        halves = np.split(X, 2)
        np.testing.assert_allclose(out, np.concatenate([x @ x.T for x in halves]), rtol=1e-5)

    def test_mistakes(self):
        x, w = put(X, "data", "model"), put(W, "model")
        with jax.set_mesh(EXPLICIT):
            with fails(ValueError, "auto_axes: axes=('modle',)", "did you mean 'model'?"):
                auto_axes(product, axes="modle", out_sharding=P())(x, w)
            with fails(TypeError, "out_sharding is missing"):
                auto_axes(product)(x, w)
            with fails(TypeError, "out_sharding", "write P('data')"):
                auto_axes(product, out_sharding="data")
            with fails(ValueError, "output['y'], float32[8,8]", "out_sharding"):
                auto_axes(pair, out_sharding={"y": None, "loss": P()})(x, w)
            with fails(ValueError, "output['loss']", "a scalar has no dimension"):
                auto_axes(pair, out_sharding=P("data"))(x, w)
            with fails(ValueError, "auto_axes: out_sharding: these specs are not a tree prefix"):
                auto_axes(pair, out_sharding={"y": P()})(x, w)


def sharded_net():
    """A Net of which JAX cannot type the product on Explicit axes."""
    filters = {nnx.PathContains("kernel"): P("model", "data"), nnx.RngState: None, ...: P()}
    with jax.set_mesh(EXPLICIT):
        return place(Net(), StateSharding(filters))


def loss(net, x):
    return jnp.mean(net(x) ** 2)


def train(net, x, call):
    value, grads = nnx.value_and_grad(lambda net: call(net, x))(net)
    return value, grads


class AutoAxesOfModulesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(jax.set_mesh(EXPLICIT))
        self.x = put(X, "data", "model")
        self.plain = Net()
        self.want = train(self.plain, X, loss)

    def check(self, net, value, grads):
        np.testing.assert_allclose(value, self.want[0], rtol=1e-5)
        assert_same_state(self, net, self.plain, rtol=1e-5)
        before = sharded_net()
        for name in ("kernel", "bias"):
            ours, theirs = (getattr(tree.linear, name)[...] for tree in (grads, self.want[1]))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
            assert jax.typeof(ours) == jax.typeof(getattr(before.linear, name)[...])
        assert types(nnx.state(net, nnx.Not(nnx.RngState))) == types(
            nnx.state(before, nnx.Not(nnx.RngState))
        )

    def test_fails_without(self):
        with pytest.raises(Exception, match="ambiguous"):
            train(sharded_net(), self.x, loss)

    @parameterized.named_parameters(
        ("function", auto_axes(loss, out_sharding=P())),
        ("keywords", lambda n, x: auto_axes(loss, out_sharding=P())(x=x, net=n)),
        ("bound method", lambda n, x: loss(auto_axes(n.__call__, out_sharding=P("data")), x)),
        ("module", lambda n, x: loss(auto_axes(n, out_sharding=P("data")), x)),
        ("in a pytree", lambda n, x: auto_axes(lambda t: loss(*t[0]), out_sharding=P())([(n, x)])),
        ("scalar without a spec", lambda n, x: auto_axes(loss)(n, x, out_sharding=None)),
    )
    def test_training(self, call):
        for run in (lambda f: f, jit):
            net = sharded_net()
            value, grads = run(lambda net, x: train(net, x, call))(net, self.x)
            self.check(net, value, grads)

    def test_flax_transforms(self):
        net = sharded_net()
        call = auto_axes(loss, out_sharding=P())
        value, grads = nnx.jit(lambda net, x: train(net, x, nnx.remat(call)))(net, self.x)
        self.check(net, value, grads)

    def test_decorated_method(self):
        class Model(nnx.Module):
            def __init__(self):
                self.net = sharded_net()

            @auto_axes(out_sharding=P("data"))
            def encode(self, x):
                assert jax.typeof(self.net.linear.kernel[...]).sharding.spec == P(None, None)
                return self.net(x)

            @jit
            def __call__(self, x):
                return self.encode(x)

        model = Model()
        out = model(self.x)
        assert types(out) == ["float32[8@data,8]"]
        plain = Net()
        np.testing.assert_allclose(out, plain(X), rtol=1e-5, atol=1e-6)
        assert_same_state(self, model.net, plain, rtol=1e-5)

    def test_unchanged_variables_stay_the_same_arrays(self):
        net = sharded_net()
        before = {path: x.get_raw_value() for path, x in nnx.to_flat_state(nnx.state(net))}
        auto_axes(lambda net, x: net.linear(x), out_sharding=P("data"))(net, self.x)
        for path, x in nnx.to_flat_state(nnx.state(net)):
            assert x.get_raw_value() is before[path], path

    def test_exception_leaves_everything(self):
        class Holder(nnx.Module):
            def __init__(self):
                self.net = sharded_net()
                self.log = nnx.static([1])
                self.extra = nnx.data(put(X[0], "model"))

        holder = Holder()
        before = nnx.state(nnx.clone(holder))
        attributes = dict(vars(holder))
        extra = holder.extra

        @auto_axes(out_sharding=P())
        def f(holder, x):
            holder.net(x)
            holder.log.append(2)
            holder.new = nnx.Param(x)
            holder.extra = holder.extra + 1
            holder.net.linear.kernel.set_metadata(mark=True)
            del holder.net.dropout
            raise RuntimeError("stop")

        @jit
        def traced(holder, x):
            leaves = jax.tree.leaves(holder)
            with fails(RuntimeError, "stop"):
                f(holder, x)
            assert all(map(operator.is_, jax.tree.leaves(holder), leaves))

        for run in (f, traced):
            with fails(RuntimeError, "stop") if run is f else contextlib.nullcontext():
                run(holder, self.x)
            assert dict(vars(holder)) == attributes and holder.log == [1]
            assert holder.extra is extra
            assert "mark" not in holder.net.linear.kernel.get_metadata()
            assert types(nnx.state(holder)) == types(before)
            assert_same_state(self, holder.net, Net())

    def test_error_in_the_results_leaves_everything(self):
        net = sharded_net()
        with fails(ValueError, "output"):
            auto_axes(lambda net, x: net(x))(net, self.x, out_sharding=None)
        assert_same_state(self, net, Net())
        assert types(net.linear.kernel[...]) == types(sharded_net().linear.kernel[...])

    def test_new_modules_and_variables(self):
        @auto_axes(out_sharding=(KERNELS, P("data")))
        def f(net, x):
            net.count = nnx.BatchStat(jnp.ones((), jnp.int32))
            return nnx.Linear(8, 8, rngs=nnx.Rngs(0)), net(x)

        net = sharded_net()
        layer, out = jit(f)(net, self.x)
        assert types((layer.kernel[...], layer.bias[...], out)) == [
            "float32[8@model,8]",
            "float32[8]",
            "float32[8@data,8]",
        ]
        assert types(net.count[...]) == ["int32[]"]
        assert jax.typeof(net.count[...]).sharding.mesh == EXPLICIT.abstract_mesh

        @auto_axes(out_sharding=P())
        def attach(net, x):
            net.cache = nnx.Cache(x + 1)
            net.linear.bias = nnx.Param(jnp.concatenate([net.linear.bias[...]] * 2))
            return jnp.sum(x)

        net = sharded_net()
        with fails(ValueError, "net.cache, float32[8,8]", "net.linear.bias, float32[16]"):
            attach(net, self.x)
        assert not hasattr(net, "cache")

    def test_argument_in_the_result(self):
        @auto_axes(out_sharding=(None, P("data")))
        def f(net, x):
            return net, net(x)

        net = sharded_net()
        same, _ = f(net, self.x)
        assert same is net
        plain = Net()
        plain(X)
        assert_same_state(self, net, plain, rtol=1e-5)

    def test_shared_variables(self):
        class Tied(nnx.Module):
            def __init__(self):
                self.a = nnx.Param(put(W, "model", "data"))
                self.b = self.a
                self.me = self

        tied = Tied()

        @auto_axes(out_sharding=P())
        def f(tied):
            tied.a[...] = tied.a[...] @ tied.b[...]

        f(tied)
        assert tied.a is tied.b and tied.me is tied
        assert types(tied.a[...]) == ["float32[8@model,8@data]"]
        np.testing.assert_allclose(tied.a[...], W @ W, rtol=1e-4, atol=1e-5)


class ExplicitAxesTest(parameterized.TestCase):
    @parameterized.product(
        kind=list(MESHES),
        axes=(None, "data"),
        trace=(lambda f: f, jax.jit),
        specs=(P("data"), (P("data"), P()), P("nope")),
    )
    def test_like_jax(self, kind, axes, trace, specs):
        mesh = MESHES[kind]
        x, w = put(X, mesh=mesh), put(W, mesh=mesh)
        seen = []

        def f(x, w):
            seen.append(types((x, w)))
            return x @ w

        def by(function):
            if trace is jax.jit:  # it may also be given at the call
                run = functools.partial(function(f, axes=axes), in_sharding=specs)
            else:
                run = function(axes=axes, in_sharding=specs)(f)
            return outcome(lambda: trace(run)(x, w))

        with jax.set_mesh(mesh):
            ours, theirs = by(explicit_axes), by(jax.sharding.explicit_axes)
        assert_alike(ours, theirs)
        assert not seen or seen[0] == seen[-1]

    @parameterized.named_parameters(
        ("tuple", (KERNELS, P("data"))),
        ("mapping", {"x": P("data"), "net": KERNELS}),
    )
    def test_module(self, specs):
        seen = []

        @explicit_axes(in_sharding=specs)
        def f(net, x):
            seen.append(types((net.linear.kernel[...], x, net.linear(x))))
            return net(x)

        plain = Net()
        want = plain(X)
        with jax.set_mesh(AUTO):
            for run in (f, jit(f), lambda net, x: f(net, x=x)):
                net = place(Net(), StateSharding({nnx.RngState: None, ...: P()}))
                before = types(nnx.state(net))
                out = run(net, put(X, mesh=AUTO))
                np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
                assert types(out) == ["float32[8,8]"] and types(nnx.state(net)) == before
                assert_same_state(self, net, plain, rtol=1e-5)
        assert seen == [["float32[8@model,8]", "float32[8@data,8]", "float32[8@data,8]"]] * 3

    def test_mistakes(self):
        with jax.set_mesh(AUTO):
            net = place(Net(), StateSharding({nnx.RngState: None, ...: P()}))
            call = explicit_axes(lambda net, x: net(x), in_sharding={"x": P()})
            with fails(ValueError, "net.linear.kernel, float32[8,8]", "net.norm.mean"):
                call(net, put(X, mesh=AUTO))
            with fails(ValueError, "not parameters", "'y'"):
                explicit_axes(lambda x: x, in_sharding={"y": P()})(X)
            with fails(ValueError, "x, shape (3,)", "not divisible"):
                explicit_axes(lambda x: x, in_sharding=P("model"))(jnp.ones(3))
            with fails(TypeError, "in_sharding is missing"):
                explicit_axes(lambda x: x)(X)
        with fails(NoMeshError, "explicit_axes"):
            explicit_axes(lambda x: x, in_sharding=P())(X)

    def test_within_each_other(self):
        @explicit_axes(in_sharding=P("data", "model"))
        def inner(x):
            assert types(x) == ["float32[8@data,8@model]"]
            return x + 1

        @auto_axes(out_sharding=P("model"))
        def outer(x):
            assert types(x) == ["float32[8,8]"]
            return inner(x)

        for run in (outer, jit(outer)):
            with jax.set_mesh(EXPLICIT):
                out = run(put(X, "data"))
            assert types(out) == ["float32[8@model,8]"]
            np.testing.assert_array_equal(out, X + 1)


class JitTest(parameterized.TestCase):
    @parameterized.product(kind=list(MESHES), axes=(True, "model"), context=(True, False))
    def test_like_jax(self, kind, axes, context):
        """Results, types inside and outside, and collectives of `jax.jit` around `auto_axes`."""
        mesh = MESHES[kind]
        named = None if axes is True else axes
        out = P("data") if kind == "explicit" else P()
        x, w = put(X, "data", "model", mesh=mesh), put(W, "model", mesh=mesh)
        seen = []

        def f(x, w):
            seen.append((types((x, w)), jax.sharding.get_abstract_mesh().axis_types))
            return x @ w

        out = NamedSharding(mesh, out)
        ours = jit(f, auto_axes=axes, out_shardings=out)
        theirs = jax.jit(jax.sharding.auto_axes(f, axes=named, out_sharding=out), out_shardings=out)
        with jax.set_mesh(mesh) if context else contextlib.nullcontext():
            assert_alike(outcome(lambda: ours(x, w)), outcome(lambda: theirs(x, w)))
            assert seen[0] == seen[-1] or not context  # without one JAX does not know the mesh

    def net(self):
        with jax.set_mesh(EXPLICIT):
            return place(sharded_net(), StateSharding({nnx.RngState: P(), ...: None}))

    @parameterized.parameters("eager", "jit", "auto_axes", "lower")
    def test_training(self, within):
        optimizer = nnx.Optimizer(net := self.net(), optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
        plain = Net()
        plain_optimizer = nnx.Optimizer(plain, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
        before = types(nnx.state((net, optimizer)))

        def step(net, optimizer, x):
            value, grads = nnx.value_and_grad(loss)(net, x)
            optimizer.update(net, grads)
            return value

        run = fast = jit(step, auto_axes=True, donate_argnums=(0, 1))
        if within == "jit":
            run = jit(lambda *args: fast(*args) + 0)
        if within == "auto_axes":
            run = auto_axes(fast, out_sharding=P())
        with jax.set_mesh(EXPLICIT):
            x = put(X, "data", "model")
            if within == "lower":
                run = fast.lower(net, optimizer, x).compile()
            for _ in range(2):
                value = run(net, optimizer, x)
                want = jit(step)(plain, plain_optimizer, X)
                np.testing.assert_allclose(value, want, rtol=1e-5)
                assert types(nnx.state((net, optimizer))) == before
        assert_same_state(self, net, plain, rtol=1e-4)

    def test_types_of_results(self):
        @jit(auto_axes=True, out_shardings=(KERNELS, P("data"), None, None))
        def f(net, x):
            return nnx.Linear(8, 8, rngs=nnx.Rngs(0)), net(x), jnp.sum(x), net

        net = self.net()
        with jax.set_mesh(EXPLICIT):
            layer, y, total, same = f(net, put(X, "data", "model"))
        assert same is net
        assert types((layer.kernel[...], layer.bias[...], y, total)) == [
            "float32[8@model,8]",
            "float32[8]",
            "float32[8@data,8]",
            "float32[]",
        ]

    def test_types_within_another_trace(self):
        seen = []
        inner = jit(lambda x: x @ x, auto_axes=True, out_shardings=P("data"))
        with jax.set_mesh(EXPLICIT):
            jax.jit(lambda x: seen.extend(types(inner(x))))(put(X, "data", "model"))
        assert seen == ["float32[8@data,8]"]

    def test_undeclared_results_are_listed(self):
        @jit(auto_axes=True, out_shardings=None)
        def f(net, x):
            net.cache = nnx.Cache(x + 1)
            return {"y": net(x), "loss": jnp.sum(x)}, x @ x

        net = self.net()
        before = types(nnx.state(net))
        with jax.set_mesh(EXPLICIT):
            facts = ("jit: ", "output[0]['y']", "output[1]", "net.cache", "out_shardings")
            with fails(ValueError, *facts):
                f(net, put(X, "data"))
        assert types(nnx.state(net)) == before and not hasattr(net, "cache")

    def test_part_of_the_trace_key(self):
        count = []

        def f(x):
            count.append(jax.sharding.get_abstract_mesh().axis_types)
            return jnp.sum(x)

        with jax.set_mesh(EXPLICIT):
            for options in (
                {},
                {"auto_axes": True},
                {"auto_axes": "data"},
                {},
                {"auto_axes": True},
            ):
                jit(f, **options)(put(X, "data"))
        explicit, auto = AxisType.Explicit, AxisType.Auto
        assert count == [(explicit, explicit), (auto, auto), (auto, explicit)]

    def test_mistakes(self):
        with jax.set_mesh(EXPLICIT), fails(ValueError, "auto_axes", "did you mean 'model'?"):
            jit(lambda x: x, auto_axes="modle")(put(X))
        run = jax.shard_map(
            lambda x: jit(lambda x: x, auto_axes="data")(x),
            mesh=EXPLICIT,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        )
        with jax.set_mesh(EXPLICIT), fails(ValueError, "auto_axes", "mapped over 'data'"):
            jax.jit(run)(put(X, "data"))


def test_abstract_arguments_that_have_a_type():
    """Arrays that are made abstract in a mesh have replicated types; the declared specs win."""
    make = functools.partial(nnx.eval_shape, lambda: Normed(nnx.Rngs(0)))
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    sharding = fsdp(make(), mesh=EXPLICIT, min_size=0, base=tensor_parallel(make(), mesh=EXPLICIT))
    step = jit(lambda model, x: model(x), in_shardings=(sharding, P("data")), mesh=EXPLICIT)
    expected = step.lower(make(), batch)
    with jax.set_mesh(EXPLICIT):
        model, x = make(), jax.eval_shape(lambda: jnp.ones(batch.shape))
        assert x.sharding.spec == model.up.kernel.sharding.spec == P(None, None)
        found = step.lower(model, x)
        assert found.compile().collectives() == expected.compile().collectives()
        assert step.eval_shape(model, x).sharding.spec == P("data", None)
    assert model.up.kernel.sharding.spec == P(None, None)  # the caller's model is not changed


@pytest.mark.parametrize("kind", ["mesh", "device"])
def test_abstract_arguments_on_devices(kind):
    """They are like committed arrays."""
    mesh = jax.make_mesh((8,), ("data",))
    other = NamedSharding(mesh, P()) if kind == "mesh" else SingleDeviceSharding(jax.devices()[1])
    array = jax.device_put(jnp.ones((8, 8)), other)
    x = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=other)
    fun = functools.partial(jit, lambda x: x, in_shardings=P("data"), mesh=mesh)
    with pytest.raises(ValueError, match=r"x(:| is) ") as expected:
        fun()(array)
    with pytest.raises(ValueError) as found:
        fun().lower(x)
    assert str(found.value) == str(expected.value)
    assert fun(on_committed="move").lower(x).compile().input_shardings[0][0].spec == P("data")


def _pulled(function):
    def gradients(model, x):
        y, pull = vjp(function, model, x)
        return pull(jnp.ones_like(y))[0]

    return gradients


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
@pytest.mark.parametrize("inside", [lambda f: f, jit, remat], ids=["plain", "jit", "remat"])
@pytest.mark.parametrize(
    "transform",
    [grad, lambda f: lambda *args: value_and_grad(f)(*args)[1], _pulled],
    ids=["grad", "value_and_grad", "vjp"],
)
def test_gradients_of_arrays_on_no_mesh(transform, inside, kind):
    """A layer of which only the kernel is on the mesh; bare JAX cannot add up the bias's terms."""

    def loss(linear, x):
        return jnp.sum(jnp.sin(linear(x))) + jnp.sum(linear.bias[...])

    linear, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.asarray(X)
    expected = grad(loss)(linear, x)
    linear.kernel.set_value(put(linear.kernel[...], None, "model", mesh=MESHES[kind]))
    with jax.set_mesh(MESHES[kind]):
        found = transform(inside(loss))(linear, x)
    for name, spec in {"bias": P(None), "kernel": P(None, "model")}.items():
        gradient, truth = (getattr(of, name).get_value() for of in (found, expected))
        np.testing.assert_allclose(gradient, truth, rtol=1e-5)
        assert gradient.sharding.spec == spec


class WithCache(nnx.Module):
    """Makes keys: (requests, length, heads, features), padded, and stacked as those of layers."""

    def __init__(self, columns, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.k_proj = nnx.LinearGeneral(32, columns, rngs=rngs)

    def prefill(self, tokens):
        x = self.embed(tokens)
        keys = jnp.pad(
            self.k_proj(x).reshape(*tokens.shape, 4, 8), ((0, 0), (0, 16), (0, 0), (0, 0))
        )
        return x.sum(), keys, jnp.stack([keys, keys])


@pytest.mark.parametrize("columns", [32, (4, 8)])
def test_caches_that_a_module_makes(columns):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = nnx.eval_shape(lambda: WithCache(columns, nnx.Rngs(0)))
    options = {"in_shardings": (tensor_parallel(model, mesh=mesh), P("data")), "mesh": mesh}
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    specs = P(), P("data", None, "model"), P(None, "data", None, "model")
    declared = {"activation_shardings": {"^$": InOutSharding(specs, method="prefill")}}

    def is_gathered(step, **more):
        found = jit(step, **options, **more).lower(model, tokens).compile()
        return bool(found.collectives().of("all-gather"))

    def returned(model, tokens):
        return model.prefill(tokens)

    def used(model, tokens):
        return jax.tree.map(lambda x: x * 2, model.prefill(tokens))

    messages = {returned: "these results, whose", used: "typed like its first input"}
    for step, text in messages.items():
        with pytest.warns(UnshardedWarning, match=text) as caught:
            assert is_gathered(step)
        [warning] = caught
        assert warning.filename == __file__
        assert all(f"write {spec}" in str(warning.message) for spec in specs[1:])
    assert f"at {Path(__file__).name}:" in str(warning.message)
    with warnings.catch_warnings(action="error"):
        assert not is_gathered(returned, out_shardings=specs)
        assert not any(is_gathered(step, **declared) for step in messages)


class Pooled(nnx.Module):
    """Classes of a sequence, and a value for each token of it: both have two dimensions."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(64, 32, rngs=rngs), nnx.Linear(32, 24, rngs=rngs)
        self.value = nnx.Linear(32, 1, rngs=rngs)

    def classes(self, tokens):
        return self.head(self.embed(tokens).mean(1))

    def values(self, tokens):
        return self.value(self.embed(tokens))[..., 0]


@pytest.mark.parametrize(("method", "is_gathered"), [("classes", True), ("values", False)])
def test_outputs_with_fewer_dimensions(method, is_gathered):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = nnx.eval_shape(lambda: Pooled(nnx.Rngs(0)))
    options = {"in_shardings": (tensor_parallel(model, mesh=mesh), P("data")), "mesh": mesh}
    step = jit(lambda model, tokens: jnp.square(getattr(model, method)(tokens)).sum(), **options)
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = step.lower(model, jax.ShapeDtypeStruct((8, 16), jnp.int32)).compile()
    assert bool(found.collectives().of("all-gather", "model")) == is_gathered
    assert ["over 'model'" in str(x.message) for x in caught] == [True] * is_gathered


class Cache(nnx.Module):
    def __init__(self, keys):
        self.keys = nnx.Cache(keys)
        self.length = nnx.Variable(jnp.int32(keys.shape[1]))


class Wrapper(nnx.Module):
    """A layer of another layer, as that of an adapter."""

    def __init__(self, base):
        self.base = base

    def __call__(self, x):
        return self.base(x)


class MakesCache(nnx.Module):
    """A cache of four heads, of which a layer has as many outputs as its length times features."""

    def __init__(self, name, is_last, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        setattr(self, name, nnx.Linear(32, 32, use_bias=False, rngs=rngs))
        self.up = nnx.Linear(32, 128, use_bias=False, rngs=rngs)
        self.name, self.is_last = name, is_last

    def prefill(self, tokens):
        keys = getattr(self, self.name)(self.embed(tokens)).reshape(*tokens.shape, 4, 8)
        return keys if self.is_last else keys.swapaxes(1, 2)

    def cached(self, tokens):
        return Cache(self.prefill(tokens)), tokens.sum()


BY_HEADS = P(None, "model")


@pytest.mark.parametrize(
    ("name", "is_last", "kernel", "remedy", "wrap"),
    [
        ("k_proj", True, BY_HEADS, ": write P('data', None, 'model')", False),
        ("k_proj", True, BY_HEADS, ": write P('data', None, 'model')", True),
        ("k_proj", False, BY_HEADS, ": write P('data', 'model')", False),
        ("k_proj", True, P(), None, False),  # its heads are whole anyway
        ("unknown", True, BY_HEADS, "", False),  # two dimensions may be that of heads
    ],
)
def test_which_dimension_of_a_cache_has_the_heads(name, is_last, kernel, remedy, wrap):
    mesh = jax.make_mesh((2, 4), ("data", "model"))

    def make():
        model = MakesCache(name, is_last, nnx.Rngs(0))
        if wrap:
            setattr(model, name, Wrapper(getattr(model, name)))
        return model

    model = nnx.eval_shape(make)
    specs = StateSharding(
        {nnx.PathContains("up"): BY_HEADS, nnx.PathContains(name): kernel, ...: P()},
        activations=ActivationSharding(infer=True),
    )
    step = jit(lambda m, x: m.prefill(x) * 2, in_shardings=(specs, P("data")), mesh=mesh)
    with warnings.catch_warnings(record=True, action="always") as seen:
        step.lower(model, jax.ShapeDtypeStruct((8, 16), jnp.int32))
    lines = [line for w in seen for line in str(w.message).split("\n") if ".prefill: " in line]
    places = [re.fullmatch(r".* over 'model', at [\w.]+:\d+(.*)", line) for line in lines]
    assert [place and place[1] for place in places] == ([] if remedy is None else [remedy])


KEYS_BY_HEADS = {"keys": P("data", None, "model"), "length": P()}


@pytest.mark.parametrize(
    "specs",
    [
        StateSharding({nnx.Cache: KEYS_BY_HEADS["keys"], ...: P()}),
        nnx.State(KEYS_BY_HEADS),
    ],
    ids=["filters", "state"],
)
@pytest.mark.parametrize("option", ["activation_shardings", "out_shardings"])
@pytest.mark.parametrize("types", [AxisType.Explicit, AxisType.Auto])
def test_a_module_with_a_cache_is_declared_by_filters(types, option, specs):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(types, types))
    model, tokens = MakesCache("k_proj", True, nnx.Rngs(0)), jnp.ones((8, 16), jnp.int32)
    expected = model.prefill(tokens)
    options = {"in_shardings": (tensor_parallel(model, mesh=mesh), P("data")), "mesh": mesh}
    declared = (specs, P())
    if option == "activation_shardings":
        declared = {"^$": InOutSharding(declared, method="cached")}
    step = jit(lambda m, x: m.cached(x), **options, **{option: declared})
    with warnings.catch_warnings(action="error"):
        assert not step.lower(model, tokens).compile().collectives().of("all-gather")
    cache, total = step(model, tokens)
    np.testing.assert_allclose(cache.keys[...], expected, rtol=1e-5)
    assert cache.keys[...].sharding.spec[:3] == ("data", None, "model")
    assert (int(cache.length[...]), int(total)) == (16, 128)


def test_shardings_by_filters_of_a_module_hold_specs_of_arrays():
    with pytest.raises(TypeError, match=r"StateShardings of them, got .*SingleDevice"):
        InOutSharding(StateSharding({...: jax.sharding.SingleDeviceSharding(jax.devices()[0])}))
