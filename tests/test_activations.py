"""Activation shardings: which calls are intercepted, what is constrained, what stays as it is."""

from __future__ import annotations

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import (
    ActivationSharding,
    InOutSharding,
    StateSharding,
    grad,
    jit,
    remat,
    shard_map,
    stack,
)
from nnx_sharding.activations.calls import Tag
from nnx_sharding.errors import ActivationError, UnshardedWarning
from nnx_sharding.partition import fsdp, override, replicated, tensor_parallel
from nnx_sharding.specs.filters import PathGlob
from nnx_sharding.testing import assert_no_collective
from zoo import fails

EXPLICIT = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
AUTO = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
AS_WRITTEN = InOutSharding(axis_types=AxisType.Explicit)
X = jnp.ones((4, 8))


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))

    def encode(self, x):
        return self.up(x)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([MLP(rngs), MLP(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def network():
    return Network(nnx.Rngs(0))


def call(model, x):
    return model(x)


_CONSTRAINT = re.compile(r"sdy\.sharding_constraint .*<@mesh, \[(.*)\]> : tensor<([\dx]*?)x?f32>")


def of_model(x):
    """By hand what ``P(None, "model")`` does for a module."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(AUTO, P(None, "model")))


def constraints(fun, *args, **options) -> list[tuple[str, str]]:
    """The shape and spec of each sharding constraint in a program, in order."""
    text = jit(fun, mesh=AUTO, **options).lower(*args).as_text()
    return [(shape, spec.replace('"', "")) for spec, shape in _CONSTRAINT.findall(text)]


class TestFilters:
    """The same language as for parameters."""

    @pytest.mark.parametrize(
        ("filter_", "count"),
        [
            (r"blocks/\d+/up", 2),
            ("blocks/0/up", 1),
            ("up$", 2),
            (PathGlob("blocks/*/up"), 2),
            (nnx.PathContains("up"), 2),
            (lambda path, module: getattr(module, "out_features", 0) == 16, 2),
            (nnx.All(nnx.OfType(nnx.Linear), nnx.PathContains("up")), 2),
        ],
        ids=["regex", "index", "end", "PathGlob", "PathContains", "predicate", "All"],
    )
    def test_choose_the_layer(self, network, filter_, count):
        chosen = {filter_: P(None, "model")}
        found = constraints(call, network, X, activation_shardings=chosen)
        assert found == [("4x16", "{}, {model}")] * count

    def test_by_type(self, network):
        found = constraints(call, network, X, activation_shardings={nnx.Linear: P("data")})
        assert [shape for shape, _ in found] == ["4x16", "4x8"] * 2

    def test_first_filter_decides(self, network):
        chosen = {"blocks/0/up": P("data"), "up$": P(None, "model")}
        found = constraints(call, network, X, activation_shardings=chosen)
        assert found == [("4x16", "{data}, {}"), ("4x16", "{}, {model}")]

    def test_method(self, network):
        chosen = {"blocks/0": InOutSharding(P(None, "model"), method="encode")}
        found = constraints(
            lambda m, x: m.blocks[0].encode(x), network, X, activation_shardings=chosen
        )
        assert found == [("4x16", "{}, {model}")]

    @pytest.mark.parametrize(
        ("method", "expected"),
        [
            ("__call__", lambda m, x: (of_model(m(x)), m.encode(x))),
            ("encode", lambda m, x: (m(x), of_model(m.encode(x)))),
        ],
        ids=["module", "method"],
    )
    def test_argument_itself(self, method, expected):
        def fun(model, x):
            return model(x), model.encode(x)

        model, chosen = MLP(nnx.Rngs(0)), InOutSharding(P(None, "model"), method=method)
        found = constraints(fun, model, X, activation_shardings={"^$": chosen})
        assert found == constraints(expected, model, X)
        assert len(found) == 1

    def test_two_methods_of_a_module(self):
        model, by_rows, by_columns = MLP(nnx.Rngs(0)), P("data"), P(None, "model")
        encode = InOutSharding(by_columns, method="encode")
        chosen = ActivationSharding([("^$", by_rows), ("^$", encode)])
        assert chosen.find((), model) == (0, InOutSharding(by_rows))
        assert chosen.find((), model, "encode") == (1, encode)
        assert chosen.find(("up",), model.up) == (None, None)
        found = constraints(lambda m, x: (m(x), m.encode(x)), model, X, activation_shardings=chosen)
        assert [spec for _, spec in found] == ["{data}, {}", "{}, {model}"]

    def test_modules_made_inside_themselves(self):
        fun = lambda x: MLP(nnx.Rngs(0))(x)  # noqa: E731
        found = constraints(fun, X, activation_shardings={"^$": P(None, "model")})
        assert found == [("4x8", "{}, {model}")]

    def test_input(self, network):
        chosen = {"blocks/1$": InOutSharding(input=P("data"))}
        assert constraints(call, network, X, activation_shardings=chosen) == [("4x8", "{data}, {}")]

    def test_prefix_of_several_outputs(self):
        class Pair(nnx.Module):
            def __call__(self, x):
                return x, {"a": x + 1, "b": x.sum()}

        chosen = {nnx.Module: (P("data"), {"a": P(None, "model"), "b": None})}
        found = constraints(call, Pair(), X, activation_shardings=chosen)
        assert found == [("4x8", "{data}, {}"), ("4x8", "{}, {model}")]

    def test_come_with_the_shardings_of_an_argument(self, network):
        own = ActivationSharding({"up$": P("data")})
        sharding = StateSharding({...: P()}, activations=own)
        options = {"in_shardings": (sharding, None)}
        up = ("4x16", "{data}, {}")
        assert [x for x in constraints(call, network, X, **options) if x == up] == [up] * 2
        chosen = {"up$": P(None, "model")}
        found = constraints(call, network, X, activation_shardings=chosen, **options)
        assert up not in found
        assert found.count(("4x16", "{}, {model}")) == 2

    def test_of_each_argument_are_its_own(self):
        def fun(a, b, x):
            return b(a(x))

        models = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        shardings = [
            StateSharding({...: None}, activations=ActivationSharding({nnx.Linear: spec}))
            for spec in (P("data"), P("model"))
        ]
        found = constraints(fun, *models, X, in_shardings=(*shardings, None))
        assert found == [("4x16", "{data}, {}"), ("4x8", "{model}, {}")]


def through_grad(model, x):
    return nnx.value_and_grad(lambda model: model(x).sum())(model)[0]


def through_jax_grad(model, x):
    graphdef, state = nnx.split(model)
    return jax.grad(lambda state: nnx.merge(graphdef, state)(x).sum())(state)


def through_clone(model, x):
    return nnx.clone(model)(x)


def through_jit(model, x):
    return nnx.jit(call)(model, x)


def through_own_jit(model, x):
    return jit(call)(model, x)


def through_vmap(model, x):
    return nnx.vmap(call, in_axes=(None, 0))(model, x)


def through_cond(model, x):
    return nnx.cond(x.sum() > 0, call, lambda model, x: x, model, x)


class TestReach:
    """Wherever Flax and JAX take a module, its declaration goes with it."""

    @pytest.mark.parametrize(
        "fun",
        [
            pytest.param(call, id="call"),
            pytest.param(through_grad, id="nnx.value_and_grad"),
            pytest.param(through_jax_grad, id="jax.grad"),
            pytest.param(nnx.remat(call), id="nnx.remat"),
            pytest.param(jax.checkpoint(call), id="jax.checkpoint"),
            pytest.param(through_clone, id="nnx.clone"),
            pytest.param(through_jit, id="nnx.jit"),
            pytest.param(through_own_jit, id="jit"),
            pytest.param(through_cond, id="nnx.cond"),
            pytest.param(lambda m, x: jax.tree.map(lambda a: a * 2, m)(x), id="jax.tree.map"),
            pytest.param(lambda m, x: type(m).__call__(m, x), id="unbound"),
        ],
    )
    def test_through_transformations(self, network, fun):
        chosen = {r"blocks/\d/up": P(None, "model")}
        found = constraints(lambda m, x: fun(m, x), network, X, activation_shardings=chosen)
        assert found.count(("4x16", "{}, {model}")) >= 2

    def test_in_vmap(self, network):
        chosen = {r"blocks/\d/up": P("model")}
        found = constraints(through_vmap, network, X, activation_shardings=chosen)
        assert len(found) == 2

    def test_in_a_scan_over_stacked_layers(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return MLP(rngs)

        class Deep(nnx.Module):
            def __init__(self):
                self.layers = make(nnx.Rngs(0))

            def __call__(self, x):
                def body(x, layer):
                    return x + layer(x)

                return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

        chosen = {"layers/up": P(None, "model")}
        found = constraints(call, Deep(), X, activation_shardings=chosen)
        assert found == [("4x16", "{}, {model}")]

    def test_modules_made_inside(self):
        def fun(x):
            return Network(nnx.Rngs(0))(x)

        chosen = {r"blocks/\d/up": P(None, "model")}
        found = constraints(fun, X, activation_shardings=chosen)
        assert found.count(("4x16", "{}, {model}")) == 2

    def test_modules_from_outside(self, network):
        graphdef, state = nnx.split(network)
        chosen = {r"blocks/\d/up": P(None, "model")}

        def fun(state, x):
            return nnx.merge(graphdef, state)(x)

        assert len(constraints(fun, state, X, activation_shardings=chosen)) == 2

    def test_methods_that_call_layers(self, network):
        chosen = {"up$": P(None, "model")}
        found = constraints(
            lambda m, x: m.blocks[1].encode(x), network, X, activation_shardings=chosen
        )
        assert len(found) == 1

    def test_subclass_that_calls_its_base(self):
        class Scaled(nnx.Linear):
            def __call__(self, x):
                return 2 * super().__call__(x)

        model = Scaled(8, 16, rngs=nnx.Rngs(0))
        found = constraints(call, model, X, activation_shardings={nnx.Linear: P("data")})
        assert len(found) == 1

    def test_decorated_method_is_a_call_of_its_module(self):
        class Model(MLP):
            @jit(mesh=AUTO, activation_shardings={Network: P(), MLP: P("data")})
            def __call__(self, x):
                return super().__call__(x)

        with pytest.raises(ValueError, match="Network"):
            Model(nnx.Rngs(0))(X)


class InRemat(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.mlp = MLP(rngs)

    def __call__(self, x):
        return x + remat(MLP.__call__)(self.mlp, x)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_no_array_of_a_layer_outlives_its_trace(mesh):
    """What is declared within a remat within a Stack is noted for the calls around them."""
    layers = stack(InRemat, 2, rngs=nnx.Rngs(0))
    step = jit(
        through_grad,
        mesh=mesh,
        in_shardings=(tensor_parallel(layers, mesh=mesh), P("data")),
        activation_shardings={"up": P("data", None)},
    )
    with jax.checking_leaks():
        step.trace(layers, X)


class TestNothingElseChanges:
    def test_objects_and_classes(self, network):
        before = {kind: dict(vars(kind)) for kind in (nnx.Linear, MLP, Network, nnx.Embed)}
        graphdef = nnx.graphdef(network)
        seen = {}

        def fun(model, x):
            seen["type"] = type(model.blocks[0].up) is nnx.Linear
            seen["graphdef"] = nnx.graphdef(model) == graphdef
            seen["names"] = vars(model).keys() == vars(network).keys()
            seen["tree"] = jax.tree.structure(model) == jax.tree.structure(network)
            jax.tree.map(lambda a, b: a, model, Network(nnx.Rngs(1)))
            return model(x)

        jit(fun, mesh=AUTO, activation_shardings={"up$": P("data")})(network, X)
        assert all(seen.values()), seen
        assert nnx.graphdef(network) == graphdef
        assert {kind: dict(vars(kind)) for kind in before} == before
        for node in (network, network.blocks, network.blocks[0].up):
            assert type(node._pytree__nodes) is nnx.graphlib.HashableMapping

    def test_structure_of_arguments_stays(self, network):
        traces = []

        def fun(model, x):
            traces.append(1)
            model.extra = nnx.data([x])  # so that the structure is written back
            return model(x)

        step = jit(fun, mesh=AUTO, activation_shardings={"up$": P("data")})
        for _ in range(3):
            step(network, X)
        assert len(traces) == 2  # the second with the attribute
        assert type(network.blocks._pytree__nodes) is nnx.graphlib.HashableMapping

    def test_returned_modules_are_plain(self, network):
        chosen = {"up$": P("data")}
        fun = jit(lambda m, x: (nnx.clone(m), m(x))[0], mesh=AUTO, activation_shardings=chosen)
        new = fun(network, X)
        assert nnx.graphdef(new) == nnx.graphdef(network)
        assert type(new.blocks[0].up._pytree__nodes) is nnx.graphlib.HashableMapping

    def test_changed_modules_are_plain(self, network):
        def grow(model, x):
            model.blocks.append(nnx.clone(model.blocks[0]))
            model.blocks[0].up.bias[...] += 1
            return model(x)

        expected = nnx.clone(network)
        chosen = {"up$": P("data")}
        fun = jit(grow, mesh=AUTO, activation_shardings=chosen)
        fun(network, X)
        grow(expected, X)
        assert nnx.graphdef(network) == nnx.graphdef(expected)
        nodes = [node for _, node in nnx.iter_modules(network)]
        kinds = {type(node): type(node._pytree__nodes) for node in nodes}
        assert set(kinds.values()) == {nnx.graphlib.HashableMapping}, kinds

    def test_step_that_changes_a_list_of_modules_is_traced_once(self, network):
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))

        optimizer = nnx.Optimizer(network, optax.sgd(0.1), wrt=nnx.Param)
        options = {"activation_shardings": {"up$": P("data")}, "max_traces": 1}
        fun = jit(step, mesh=AUTO, in_shardings=(P(), P(), P("data")), **options)
        for _ in range(2):
            fun(network, optimizer, X)
        assert type(network.blocks._pytree__nodes) is nnx.graphlib.HashableMapping

    def test_error_in_the_function_leaves_the_classes(self, network):
        original = nnx.Linear.__call__

        def fail(model, x):
            model(x)
            raise RuntimeError("of the user")

        with pytest.raises(RuntimeError, match="of the user"):
            jit(fail, mesh=AUTO, activation_shardings={"up$": P("data")})(network, X)
        assert nnx.Linear.__call__ is original

    def test_capture_inside_and_around(self, network):
        original = nnx.Linear.__call__
        fun = jit(call, mesh=AUTO, activation_shardings={"up$": P("data")})
        np.testing.assert_allclose(fun(network, X), network(X), rtol=1e-6)
        assert nnx.Linear.__call__ is original

    def test_threads_have_their_own(self):
        """Two threads that trace the same class at the same time, with different specs."""
        barrier, results = threading.Barrier(2), {}

        def work(axis):
            def fun(model, x):
                barrier.wait(timeout=60)
                y = model(x)
                barrier.wait(timeout=60)
                return y

            chosen = {"up$": P(None, axis)}
            results[axis] = constraints(fun, Network(nnx.Rngs(0)), X, activation_shardings=chosen)

        threads = [threading.Thread(target=work, args=(axis,)) for axis in ("data", "model")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {a: [("4x16", f"{{}}, {{{a}}}")] * 2 for a in ("data", "model")}

    def test_inner_functions_are_traced_for_each_declaration(self, network):
        inner = jax.jit(lambda model, x: model(x))

        def fun(model, x):
            return inner(model, x)

        for spec, text in ((P("data"), "{data}, {}"), (P(None, "model"), "{}, {model}")):
            found = constraints(fun, network, X, activation_shardings={"up$": spec})
            assert found == [("4x16", text)] * 2
        assert constraints(fun, network, X) == []

    def test_an_inner_function_with_declarations_captures_a_module(self, network):
        """What is declared around it holds for the module that it captures."""

        def fun(model, x):
            def inner(block, x):
                return block(model.blocks[0](x))

            chosen = {"up$": P(None, "model")}
            return jit(inner, activation_shardings=chosen)(model.blocks[1], x)

        found = constraints(fun, network, X, activation_shardings={"blocks/0/up": P("data")})
        assert found == [("4x16", "{data}, {}"), ("4x16", "{}, {model}")]

    def test_inner_functions_are_traced_for_each_layer(self, network):
        inner = jax.checkpoint(lambda model, x: model(x))

        def fun(model, x):
            return inner(model.blocks[1], inner(model.blocks[0], x))

        chosen = {"blocks/0/up": P("data"), "blocks/1/up": P(None, "model")}
        found = constraints(fun, network, X, activation_shardings=chosen)
        assert found == [("4x16", "{data}, {}"), ("4x16", "{}, {model}")]

    @pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
    @pytest.mark.parametrize("options", [{}, {"graph": False}, {"graph_updates": False}], ids=str)
    def test_inner_jit_of_equal_layers(self, mesh, options):
        """As with constraints by hand, though the calls have the same structure and types."""

        class Pair(nnx.Module):
            def __init__(self, rngs):
                self.a, self.b = (nnx.Linear(8, 16, rngs=rngs) for _ in range(2))

        specs = {"a": P("data"), "b": P("data", "model")}
        inner, seen = jit(call, **options), []

        def fun(model, x):
            outputs = inner(model.a, x), inner(model.b, x)
            seen.append([jax.typeof(y) for y in outputs])
            return outputs

        def by_hand(model, x):
            constrain = jax.lax.with_sharding_constraint
            return (
                constrain(model.a(x), NamedSharding(AUTO, specs["a"])),
                constrain(model.b(x), NamedSharding(AUTO, specs["b"])),
            )

        pair = Pair(nnx.Rngs(0))
        if mesh is AUTO:
            found = constraints(fun, pair, X, activation_shardings=specs)
            assert found == constraints(by_hand, pair, X)
        else:
            chosen = {"in_shardings": (P(), P("data")), "activation_shardings": specs}
            jit(fun, mesh=mesh, **chosen)(pair, X)
            y = jnp.ones((4, 16))
            placed = [jax.device_put(y, NamedSharding(mesh, s)) for s in specs.values()]
            assert seen == [[jax.typeof(x) for x in placed]]

    def test_inner_jit_gathers_for_each_layer(self):
        seen = []

        def show(layer, x):
            return jax.tree.map(lambda y: seen.append(jax.typeof(y).sharding.spec) or y, layer(x))

        inner, network = jit(show), Network(nnx.Rngs(0))
        sharding = fsdp(network, mesh=EXPLICIT, min_size=0)

        def fun(model, x):
            return inner(model.blocks[1].up, inner(model.blocks[0], x))

        step = jit(fun, mesh=EXPLICIT, in_shardings=(sharding, P("data")))
        compiled = step.lower(network, X).compile()
        assert seen == [P("data", None), P("data", None)]
        assert len(compiled.collectives().of("all-gather", "data")) == 6  # one for each parameter

    @pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, nnx.jit, nnx.remat, jit])
    def test_inner_functions_that_were_traced_before(self, network, transform):
        """Filters that matched in them have an effect, and what is wrong in them stays wrong."""
        inner = transform(lambda model, x: model(x))
        for factor in (1, 2):
            chosen = {"blocks/0/up": P("data")}
            found = constraints(
                lambda model, x, factor=factor: factor * inner(model.blocks[0], x),
                network,
                X,
                activation_shardings=chosen,
            )
            assert found == [("4x16", "{data}, {}")]
        wrong = {"mesh": AUTO, "activation_shardings": {"blocks/0/up": P("nope")}}
        fun = jit(lambda model, x: inner(model.blocks[0], x), **wrong)
        for _ in range(2):
            with pytest.raises(ActivationError, match="no axis 'nope'"):
                fun(network, X)

    def test_part_of_the_cache_key(self, network):
        traces = []

        def fun(model, x):
            traces.append(1)
            return model(x)

        for _ in range(2):
            for spec in (P("data"), P(None, "model")):
                options = {"mesh": AUTO, "activation_shardings": {"up$": spec}}
                jit(fun, **options)(network, X)
        assert len(traces) == 2

    @pytest.mark.parametrize("transform", [grad, remat])
    def test_what_a_trace_hashes_does_not_grow_with_it(self, network, transform, monkeypatch):
        """JAX hashes its contexts for each primitive, so these must not hold all modules."""
        hashed = []
        monkeypatch.setattr(Tag, "__hash__", lambda tag: hashed.append(tag) or hash(tag.path))

        def count(repeats: int) -> int:
            def fun(model, x):
                for _ in range(repeats):
                    x = jnp.sin(x)
                return model(x).sum()

            hashed.clear()
            options = {"mesh": AUTO, "activation_shardings": {"up$": P("data")}}
            jit(lambda model, x: transform(fun)(model, x), **options).trace(network, X)
            return len(hashed)

        count(1)  # later ones find what stands for these modules
        assert count(40) == count(1) > 0


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_cache_stays_where_the_batch_is(mesh):
    def decoder():
        attention = nnx.MultiHeadAttention(4, 32, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((8, 16, 32))
        return attention

    model, reference, x = decoder(), decoder(), jnp.ones((8, 1, 32))
    heads = tensor_parallel(model, mesh=mesh)
    sharding = override(heads, {"cached_(key|value)$": P("data", None, "model")})
    step = jit(lambda model, x: model(x), in_shardings=(sharding, P("data")), mesh=mesh)
    np.testing.assert_allclose(step(model, x), reference(x), rtol=1e-5)
    np.testing.assert_allclose(step(model, 2 * x), reference(2 * x), rtol=1e-5)
    assert model.cached_key.sharding.spec.partitions[:3] == ("data", None, "model")
    assert_no_collective(step.lower(model, x).compile(), axes="data")


class Prefill(nnx.Module):
    """Makes keys (batch, length, heads, features); its only input is a number."""

    def __init__(self):
        self.k_proj = nnx.Linear(4, 16, rngs=nnx.Rngs(0))

    def __call__(self, scale):
        return self.k_proj(jnp.ones((8, 2, 4)) * scale).reshape(8, 2, 4, 4)


def test_a_new_cache_of_a_model_without_rows():
    model, scale = Prefill(), jnp.float32(2)
    shardings = tensor_parallel(model, mesh=EXPLICIT), P()
    first_key = jit(lambda model, x: model(x)[:, :1], mesh=EXPLICIT, in_shardings=shardings)
    with pytest.warns(UnshardedWarning, match=r"write P\(None, None, 'model'\)"):
        found = first_key(model, scale)
    np.testing.assert_allclose(found, Prefill()(scale)[:, :1], rtol=1e-5)


class OfPytreeCache(nnx.Module):
    """Takes keys (layers, batch, length, heads, features) and a position, and returns new ones."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.key = nnx.LinearGeneral(32, (4, 8), rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens, cache):
        keys, position = cache
        new = self.key(self.embed(tokens))
        keys = jax.lax.dynamic_update_slice(keys, new[None], (0, 0, position, 0, 0))
        seen = jnp.einsum("bqhd,bkhd->bqd", new, keys[0])
        return self.up(jnp.tile(seen, 4)), (keys, position + 1)

    def next_tokens(self, tokens, cache):
        logits, cache = self(tokens, cache)
        return logits.argmax(-1), cache


@pytest.mark.parametrize("is_keyword", [False, True])
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_cache_that_is_returned_keeps_its_sharding(mesh, is_keyword):
    """It is not gathered, and the next call takes what the last one returned."""
    model = OfPytreeCache(nnx.Rngs(0))
    spec = P(None, "data", None, "model")
    cache = jnp.zeros((1, 8, 16, 4, 8)), jnp.int32(0)
    tokens = jnp.arange(8)[:, None]
    expected = [tokens, cache]
    placed = tuple(NamedSharding(mesh, each) for each in (spec, P(), P("data")))
    *sharded, first_tokens = jax.device_put((*cache, tokens), placed)

    def step(model, tokens, cache):
        if is_keyword:
            return model.next_tokens(tokens, cache=cache)
        return model.next_tokens(tokens, cache)

    specs = tensor_parallel(model, mesh=mesh), P("data"), (spec, P())
    # A second trace would say that the returned cache has another type than the first one.
    fun = jit(step, in_shardings=specs, mesh=mesh, max_traces=1)
    sent = fun.lower(model, first_tokens, (*sharded,)).compile().collectives()
    cache_bytes = 8 * 16 * 4 * 8 * 4
    assert sent.bytes_sent < cache_bytes / 8
    found = [first_tokens, (*sharded,)]
    for _ in range(3):
        found = fun(model, *found)
        expected = OfPytreeCache(nnx.Rngs(0)).next_tokens(*expected)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1][0], expected[1][0], rtol=1e-5, atol=1e-6)
        assert found[1][0].sharding.is_equivalent_to(sharded[0].sharding, 5)


class PerRow(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(x).sum(-1)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT])
def test_a_value_for_each_row_is_sharded_like_rows(mesh):
    model, x = PerRow(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (16, 8))
    sharding = fsdp(model, mesh=mesh, min_size=0)
    fun = jit(lambda model, x: model(x), in_shardings=(sharding, P("data")), mesh=mesh)
    out = fun(model, x)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    np.testing.assert_allclose(out, PerRow(nnx.Rngs(0))(x), rtol=1e-5)


class TestErrors:
    def test_filters_without_effect(self, network):
        chosen = {"blocks/*/upp": P("data"), nnx.Conv: P(), "up$": P()}
        with pytest.raises(ValueError, match="upp") as info:
            jit(call, mesh=AUTO, activation_shardings=chosen)(network, X)
        assert "For globs, pass PathGlob('blocks/*/upp')" in str(info.value)
        assert "Conv" in str(info.value)
        assert "up$" not in str(info.value)
        lenient = ActivationSharding(chosen, strict=False)
        jit(call, mesh=AUTO, activation_shardings=lenient)(network, X)

    @pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
    def test_specs_that_do_not_fit_are_listed(self, network, mesh):
        chosen = {
            "blocks/0/up": P("nope"),
            "blocks/0/down": P("data", None, None),
            "blocks/1/up": P(("data", "model")),
        }
        names = ("blocks[0].up", "'nope'", "blocks[0].down", "3 entries", "blocks[1].up")
        with fails(ValueError, "do not fit", *names):
            jit(call, mesh=mesh, in_shardings=P(), activation_shardings=chosen)(network, X)

    @pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
    @pytest.mark.parametrize("axes", ["modle", ("data", "modle")])
    def test_unknown_axis_to_gather(self, network, mesh, axes):
        chosen = ActivationSharding(gather=axes)
        message = "(?s)do not fit.*gather, .*'modle'; did you mean 'model'"
        with pytest.raises(ActivationError, match=message):
            jit(call, mesh=mesh, in_shardings=P(), activation_shardings=chosen)(network, X)

    @pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
    @pytest.mark.parametrize("side", ["input", "output"])
    def test_axis_that_is_used_twice(self, network, mesh, side):
        spec = P("data", "data")
        with pytest.raises(Exception, match="duplicate entries"):
            NamedSharding(mesh, spec)
        chosen = {"blocks/0/up": InOutSharding(**{side: spec})}
        twice = "P('data', 'data'): 'data' is used 2 times"
        with fails(ActivationError, "do not fit", f"{side} of model.blocks[0].up", twice):
            jit(call, mesh=mesh, in_shardings=P(), activation_shardings=chosen)(network, X)

    def test_operation_that_jax_cannot_type(self):
        class Cached(nnx.Module):
            def __init__(self):
                self.kernel = nnx.Param(jnp.ones((8, 8)))
                self.cache = nnx.Cache(jnp.zeros((16, 8)))

            def __call__(self, x):
                x = jnp.einsum("bi,io->bo", x, self.kernel[...], out_sharding=P("data"))
                self.cache[...] = jax.lax.dynamic_update_slice(self.cache[...], x, (0, 0))
                return x

        x = jax.device_put(jnp.ones((8, 8)), NamedSharding(EXPLICIT, P("data")))
        model = nnx.Dict(first=Cached())
        with pytest.raises(ActivationError, match=r"model\.first: Cached of f32.8@data") as info:
            jit(lambda model, x: model.first(x))(model, x)
        assert "dynamic_update_slice" in str(info.value)
        assert "activation_shardings={'^first$': P('data',)}" in str(info.value)

    def test_operation_that_uses_an_axis_twice(self):
        """Rows of a table by indices, both over one axis: JAX's rule raises another error."""

        class Table(nnx.Module):
            def __init__(self):
                self.rows = nnx.Param(jnp.arange(128.0).reshape(16, 8))

            def __call__(self, indices):
                return self.rows[...][indices]

        specs, indices = (P(None, "data"), P("data")), jnp.arange(4)
        arrays = jax.device_put(
            (jnp.ones((16, 8)), indices), tuple(NamedSharding(EXPLICIT, spec) for spec in specs)
        )
        with pytest.raises(Exception, match="duplicate entries"):
            jax.jit(lambda rows, indices: rows[indices])(*arrays)
        by_hand = StateSharding({...: specs[0]})
        fun = jit(call, mesh=EXPLICIT, in_shardings=(by_hand, specs[1]))
        with pytest.raises(ActivationError, match="model: Table of i32") as info:
            fun(Table(), indices)
        assert "duplicate entries" in str(info.value)
        inferring = StateSharding({...: specs[0]}, activations=ActivationSharding(infer=True))
        fun = jit(call, mesh=EXPLICIT, in_shardings=(inferring, specs[1]))
        np.testing.assert_array_equal(fun(Table(), indices), Table()(indices))

    def test_prefix_that_does_not_match(self, network):
        with pytest.raises(ValueError, match=r"blocks\[0\]\.up"):
            jit(call, mesh=AUTO, activation_shardings={"up$": (P(), P())})(network, X)

    def test_no_mesh(self, network):
        with pytest.raises(ValueError, match="mesh"):
            jit(call, activation_shardings={"up$": P("data")})(network, X)

    def test_values_of_other_types(self):
        with pytest.raises(TypeError, match=r"P\('data'\)"):
            ActivationSharding({"up": "data"})
        with pytest.raises(TypeError, match="filter"):
            ActivationSharding({5: P()})
        with pytest.raises(TypeError, match="mapping"):
            ActivationSharding(3)
        with pytest.raises(TypeError, match="method"):
            InOutSharding(method=nnx.Linear.__call__)

    def test_layer_that_cannot_be_typed_is_named_with_the_remedy(self):
        model = Network(nnx.Rngs(0))
        specs = StateSharding(
            {
                lambda path, x: path[-1] == "bias": P(),
                nnx.PathContains("down"): P("model"),
                ...: P(None, "model"),
            }
        )
        fun = jit(call, mesh=EXPLICIT, in_shardings=(specs, P("data")))
        with pytest.raises(ValueError, match="Explicit") as info:
            fun(model, X)
        message = str(info.value)
        assert "model.blocks[0].down: Linear of f32[4@data,16@model]" in message
        assert "activation_shardings={'^blocks/0/down$': P('data',)}" in message
        chosen = {r"blocks/\d+/down": P("data")}
        fun = jit(call, mesh=EXPLICIT, in_shardings=(specs, P("data")), activation_shardings=chosen)
        np.testing.assert_allclose(fun(model, X), Network(nnx.Rngs(0))(X), rtol=1e-5)

    def test_errors_of_the_model_stay_as_they_are(self, network):
        wrong = jnp.ones((4, 7))
        for mesh in (AUTO, EXPLICIT):
            with pytest.raises(TypeError, match="dot_general"):
                jit(call, mesh=mesh, in_shardings=(replicated(network), P("data")))(network, wrong)


class TestExplicitAxes:
    def test_declared_arguments_are_typed(self):
        seen = []
        fun = jit(lambda x: seen.append(jax.typeof(x)) or x, mesh=EXPLICIT, in_shardings=P("data"))
        for x in (
            X,
            np.ones((4, 8), np.float32),
            jax.device_put(X, NamedSharding(EXPLICIT, P("data"))),
            jax.device_put(X, NamedSharding(AUTO, P("data"))),
        ):
            assert fun(x).sharding.spec == P("data", None)
        assert {t.sharding.spec for t in seen} == {P("data", None)}

    @pytest.mark.parametrize("spec", [P(None, "model"), P()], ids=str)
    @pytest.mark.parametrize("stage", ["call", "lower"])
    def test_declared_variables_are_typed(self, spec, stage):
        """Also those that are there already, but on Auto axes."""
        seen, model = [], nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
        kernel = model.kernel[...]
        model.kernel.set_value(jax.device_put(kernel, NamedSharding(AUTO, spec)))

        def fun(model, x):
            seen.append(jax.typeof(model.kernel[...]))
            return model(x)

        step = jit(fun, mesh=EXPLICIT, in_shardings=(spec, P("data")))
        (step.lower if stage == "lower" else step)(model, X)
        jax.jit(lambda x: seen.append(jax.typeof(x)))(
            jax.device_put(kernel, NamedSharding(EXPLICIT, spec))
        )
        assert seen[0] == seen[1]
        on = AUTO if stage == "lower" else EXPLICIT
        assert model.kernel[...].sharding.mesh == on

    def test_layer_that_falls_back_to_auto_axes_runs_once(self):
        """What a first attempt changed is taken back: statistics, counters."""

        class Layer(nnx.Module):
            def __init__(self):
                self.kernel = nnx.Param(jnp.arange(64.0).reshape(8, 8) / 64)
                self.calls = nnx.Variable(jnp.array(0))
                self.rngs = nnx.Rngs(0)

            def __call__(self, x):
                self.calls[...] += 1
                noise = jax.random.normal(self.rngs(), ())
                return jnp.dot(x, self.kernel[...]) + noise  # contracts a sharded dimension

        expected, model = Layer(), Layer()
        y = expected(X)
        sharding = tensor_parallel(model, mesh=EXPLICIT)
        sharding = StateSharding(
            {nnx.Param: P("model"), ...: P()}, activations=sharding.activations
        )
        x_spec = P("data", "model")
        fun = jit(call, mesh=EXPLICIT, in_shardings=(sharding, x_spec))
        np.testing.assert_allclose(fun(model, X), y, rtol=1e-5)
        assert int(model.calls[...]) == 1
        assert int(model.rngs.default.count[...]) == int(expected.rngs.default.count[...])
        assert model.kernel[...].sharding.spec == P("model")

    def test_layers_that_the_function_calls_stay_sharded(self):
        """One all-reduce, as by hand with plain JAX: nothing is gathered between the layers."""

        def fun(model, x):
            return model.down(jax.nn.relu(model.up(x)))

        def by_hand(up, up_bias, down, down_bias, x):
            hidden = jax.nn.relu(x @ up + up_bias)
            return (
                jnp.dot(hidden, down, out_sharding=NamedSharding(EXPLICIT, P("data"))) + down_bias
            )

        model = MLP(nnx.Rngs(0))
        arrays = model.up.kernel, model.up.bias, model.down.kernel, model.down.bias
        specs = P(None, "model"), P("model"), P("model"), P(), P("data")
        plain = jax.jit(by_hand).lower(
            *(
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(EXPLICIT, spec))
                for x, spec in zip([*(a[...] for a in arrays), X], specs, strict=True)
            )
        )
        assert set(re.findall(r"all-\w+(?=\()", plain.compile().as_text())) == {"all-reduce"}
        options = {"in_shardings": (tensor_parallel(model, mesh=EXPLICIT), P("data"))}
        step = jit(fun, mesh=EXPLICIT, **options)
        compiled = step.lower(model, X).compile()
        assert [c.kind for c in compiled.collectives()] == ["all-reduce"]
        np.testing.assert_allclose(step(model, X), MLP(nnx.Rngs(0))(X), rtol=1e-5)

    def test_model_in_another_module_returns_what_a_loss_can_take(self):
        """What it returns is sharded as its inputs are, though it is not the argument itself."""

        def loss(optimizer, x, labels):
            logits = optimizer.model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        class Classifier(nnx.Module):
            def __init__(self, rngs):
                self.head = nnx.Linear(8, 16, rngs=rngs)

            def __call__(self, x):
                return self.head(x)

        optimizer = nnx.ModelAndOptimizer(Classifier(nnx.Rngs(0)), optax.sgd(0.1))
        labels = jnp.arange(4)
        expected = loss(optimizer, X, labels)
        specs = StateSharding(
            {
                nnx.PathContains("kernel"): P(None, "model"),
                nnx.PathContains("bias"): P("model"),
                ...: P(),
            },
            activations=ActivationSharding(infer=True),
        )
        step = jit(loss, mesh=EXPLICIT, in_shardings=(specs, P("data"), P("data")))
        with pytest.warns(UnshardedWarning, match=r"optimizer.model: f32\[4@data,16\], .* 'model'"):
            found = step(optimizer, X, labels)
        np.testing.assert_allclose(found, expected, rtol=1e-5)

    def test_unconstrained_dimensions_stay(self):
        """Among them the batch of tensor_parallel(sequence=True)."""
        seen = []

        class Seen(MLP):
            def __call__(self, x):
                y = super().__call__(x)
                seen.append(jax.typeof(y).sharding.spec)
                return y

        model, x = Seen(nnx.Rngs(0)), jnp.ones((4, 8, 8))
        sharding = tensor_parallel(model, mesh=EXPLICIT, sequence=True)
        options = {"mesh": EXPLICIT, "in_shardings": (sharding, P("data"))}
        out = jit(call, activation_shardings={"^$": AS_WRITTEN}, **options)(model, x)
        assert seen == [P("data", "model", None)]
        np.testing.assert_allclose(out, MLP(nnx.Rngs(0))(x), rtol=1e-5)

    @pytest.mark.parametrize("chosen", [None, {"^$": AS_WRITTEN}], ids=["auto", "explicit"])
    @pytest.mark.parametrize("use_bias", [False, True])
    def test_heads_stay_sharded_where_the_sequence_was(self, use_bias, chosen):
        """Each device computes its heads, of one gathered sequence: no kernel is gathered."""

        def attention():
            return nnx.MultiHeadAttention(4, 64, decode=False, use_bias=use_bias, rngs=nnx.Rngs(0))

        model, rows = attention(), P("data", "model")
        x = jax.random.normal(jax.random.key(0), (8, 32, 64))
        sharding = tensor_parallel(model, mesh=EXPLICIT, sequence=True)
        options = {"in_shardings": (sharding, rows), "mesh": EXPLICIT}
        forward = jit(call, activation_shardings=chosen, **options)
        np.testing.assert_allclose(forward(model, x), attention()(x), rtol=1e-4, atol=1e-5)
        specs = {row.path: row.spec for row in forward.trace(model, x).activations()}
        assert specs["model.query"] == (chosen and P("data", None, "model", None))
        [gathered] = forward.lower(model, x).compile().collectives().of("all-gather")
        assert gathered.shapes == ((4, 32, 64),)

    def test_parameters_are_gathered_while_a_layer_runs(self):
        seen = []

        class Layer(nnx.Module):
            def __init__(self):
                self.kernels = nnx.List([nnx.Param(jnp.ones((8, 8)))])

            def __call__(self, x):
                seen.append(jax.typeof(self.kernels[0][...]).sharding.spec)
                return x @ self.kernels[0][...]

        model = Layer()
        sharding = fsdp(model, mesh=EXPLICIT, min_size=0)
        step = jit(
            nnx.grad(lambda m, x: m(x).sum()), mesh=EXPLICIT, in_shardings=(sharding, P("data"))
        )
        gradients = step(model, X)
        assert seen == [P(None, None)]
        assert gradients["kernels"][0][...].sharding.spec == P(None, "data")
        assert model.kernels[0][...].sharding.spec == P(None, "data")


def test_fsdp_gathers_kernels_and_moves_no_activations():
    model = Network(nnx.Rngs(0))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = fsdp(model, mesh=mesh, min_size=0)
    step = nnx.grad(lambda model, x: (model(x) ** 2).sum())
    options = {"mesh": mesh, "in_shardings": (sharding, P("data")), "out_shardings": sharding}
    compiled = jit(step, **options).lower(model, jnp.ones((64, 8))).compile()
    batch = {(64, 8), (64, 16), (8, 8), (8, 16)} - {(8, 16), (8, 8)}
    moved = {tuple(shape) for op in compiled.collectives() for shape in op.shapes}
    assert moved.isdisjoint(batch)
    gathered = [op for op in compiled.collectives() if op.kind == "all-gather"]
    assert gathered


def test_derivatives_of_gathered_parameters_on_auto_axes():
    model = Network(nnx.Rngs(0))
    options = {"mesh": AUTO, "in_shardings": (fsdp(model, mesh=AUTO, min_size=0), P("data"))}

    def along_ones(model, x):
        """The derivatives of values and of gradients, as jvp, vmap and linearize have them."""
        graph, state = nnx.split(model)
        ones = jax.tree.map(jnp.ones_like, state)

        def outputs(state, x=x):
            return nnx.merge(graph, state)(x)

        def loss(state, row):
            return (outputs(state, row) ** 2).sum()

        rows = jax.vmap(jax.grad(loss), (None, 0))(state, x)
        of_gradients = jax.jvp(lambda state: jax.grad(loss)(state, x), (state,), (ones,))[1]
        along = jax.jvp(outputs, (state,), (ones,))[1]
        return along, jax.linearize(outputs, state)[1](ones), rows, of_gradients

    want, got = along_ones(model, X), jit(along_ones, **options)(model, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), want, got)


def test_shard_map_constrains_its_automatic_axes(network):
    fun = shard_map(
        call,
        mesh=AUTO,
        in_specs=(replicated(network), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        activation_shardings={"up$": P(None, "model")},
    )
    np.testing.assert_allclose(fun(network, X), network(X), rtol=1e-5)
    found = _CONSTRAINT.findall(fun.lower(network, X).as_text())
    assert ('{}, {"model"}', "2x16") in found


def test_a_model_whose_output_a_strategy_gathers():
    model, x = nnx.Sequential(nnx.Linear(16, 128, rngs=nnx.Rngs(0))), jnp.ones((8, 4, 16))
    shardings = tensor_parallel(model, mesh=EXPLICIT), P("data")
    forward = jit(call, in_shardings=shardings, mesh=EXPLICIT)
    with pytest.warns(UnshardedWarning, match="these results, whose shardings are not declared"):
        rows = {row.path: row for row in forward.trace(model, x).activations()}
    assert rows["model.layers[0]"].chosen_by == "compiler"
    assert rows["model"].spec == P("data", None, None)
    assert rows["model"].chosen_by == "strategy"
