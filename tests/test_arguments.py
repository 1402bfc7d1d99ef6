"""What may be an argument or a result, and how arguments may be passed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx_sharding
from graphs import Loose, Memory, Node
from libraries import param


def linear() -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def assert_close(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(_numbers(a), _numbers(b), rtol=1e-4, atol=1e-6)


def _numbers(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x


@nnx.dataclass
class Config(nnx.Pytree):
    w: nnx.Param
    scale: float = nnx.static(default=2.0)
    extra: Any = nnx.data(default=None)


class Point(NamedTuple):
    x: Any
    y: Any


# Each case: what makes the arguments, and a function of them.


def train(model, optimizer, x):
    loss, gradient = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, gradient)
    return loss


def optimizer_args(tx: Callable[[], Any]) -> Callable[[], Any]:
    def make():
        model = linear()
        return model, nnx.Optimizer(model, tx(), wrt=nnx.Param), jnp.ones((3, 2))

    return make


def chain():
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.1, 0.01, 10)),
        optax.trace(0.9),
    )


def with_metrics(model, optimizer, metrics, x):
    loss = train(model, optimizer, x)
    metrics.update(loss=loss)
    return metrics.compute()


def nested(tree, x):
    tree["blocks"][0].w[...] += x
    tree["blocks"][1][0][...] *= 3
    return {"sum": tree["blocks"][0].w[...] + tree["array"], "none": tree["none"]}


def containers(layers, table):
    for layer in layers:
        layer.w[...] += 1
    layers.append(table["b"])
    table["c"] = layers[0]
    return len(layers)


def dynamic_scalars(m, i, f, b, c):
    m.w[...] += i * f
    return jnp.where(b, c, 1j), m.w[...] * i


def pytree_values(m):
    value = m.w.get_value()
    m.w.set_value({"a": value["b"][0], "b": (value["a"] + 1,)})
    return m.w.get_value()["a"]


def raw_arrays(m):
    m.table = m.table * 2
    m.boxed = nnx.data([m.boxed[1] + m.table.sum(), m.boxed[0]])
    return m.kept.sum()


def data_scalar(m):
    return m.number + 1, m.w[...] * m.number


def plain_lists(m):
    for block in m.blocks:
        block.w[...] *= 2
    m.blocks.append(m.blocks[0])
    m.table["new"] = m.blocks[1]
    return m.blocks[-1].w[...]


def dataclass_module(c):
    c.w[...] *= c.scale
    c.extra = param(7)
    return c.w[...]


def bare_variables(a, pair):
    a[...] += pair[0][...]
    pair[1][...], pair[0][...] = a[...], pair[1][...]
    return a[...] - 1


def streams(rngs, key_holder):
    return rngs.params(), rngs["noise"].normal((2,)), key_holder["rngs"].params.uniform(())


def shared_streams():
    rngs = nnx.Rngs(params=0, noise=1)
    return rngs, {"rngs": rngs}


def named_tuple(p):
    p.x.w[...] += p.y
    return Point(p.x.w[...], p.y)


def loose_args():
    model = Loose()
    model.blocks = [Node(), Node()]
    for i, block in enumerate(model.blocks):
        block.w = param(i + 1)
    model.table = {"k": model.blocks[0]}
    return (model,)


def node_args(**attributes: Any) -> Callable[[], Any]:
    def make():
        model = Node()
        model.w = param(2)
        for name, value in attributes.items():
            setattr(model, name, value() if callable(value) else value)
        return (model,)

    return make


CASES = (
    ("sgd", optimizer_args(lambda: optax.sgd(0.1, momentum=0.9)), train),
    ("optax_chain", optimizer_args(chain), train),
    (
        "metrics",
        lambda: (
            *optimizer_args(lambda: optax.adam(0.1))()[:2],
            nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
            jnp.ones((3, 2)),
        ),
        with_metrics,
    ),
    (
        "nested",
        lambda: (
            {
                "blocks": (node_args()()[0], [param(5)]), "array": np.ones(2, np.float32),
                "none": None, "empty": [],
            },
            2.0,
        ),
        nested,
    ),
    (
        "list_and_dict",
        lambda: (
            nnx.List([node_args()()[0], node_args()()[0]]),
            nnx.Dict(a=param(3), b=node_args()()[0]),
        ),
        containers,
    ),
    ("scalars", lambda: (*node_args()(), 3, 0.5, True, 2j), dynamic_scalars),
    (
        "numpy_scalars",
        lambda: (*node_args()(), np.int32(3), np.float32(2), np.bool_(0), 1j),
        dynamic_scalars,
    ),
    (
        "pytree_value",
        node_args(w=lambda: nnx.Param({"a": jnp.ones(2), "b": (jnp.zeros(2),)})),
        pytree_values,
    ),
    (
        "raw_arrays",
        node_args(
            table=lambda: np.arange(3.0, dtype=np.float32),
            kept=lambda: np.ones(2),
            boxed=lambda: nnx.data([jnp.ones(()), jnp.zeros(())]),
        ),
        raw_arrays,
    ),
    ("data_scalar", node_args(number=lambda: nnx.data(3)), data_scalar),
    ("plain_lists", loose_args, plain_lists),
    ("dataclass", lambda: (Config(param(3)),), dataclass_module),
    ("bare_variables", lambda: (param(1), (param(2), nnx.BatchStat(jnp.ones(())))), bare_variables),
    ("rngs", shared_streams, streams),
    ("named_tuple", lambda: (Point(node_args()()[0], 2.0),), named_tuple),
)  # fmt: skip


class KindsTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES)
    def test_three_calls_as_eager_and_nnx_jit(self, make, function):
        ours, eager, theirs = make(), make(), make()
        lifted, reference = nnx_sharding.jit(function), nnx.jit(function)
        for _ in range(3):
            result = lifted(*ours)
            assert_close(result, jax.tree.map(jnp.asarray, function(*eager)))
            assert_close(result, reference(*theirs))
            assert_close(nnx.state(ours), nnx.state(eager))
            assert_close(nnx.state(ours), nnx.state(theirs))

    @parameterized.named_parameters(*(case for case in CASES if case[0] not in ("rngs", "sgd")))
    def test_structure_as_eager(self, make, function):
        def shape(tree: Any) -> Any:
            return nnx.graphdef(nnx.List([x for x in jax.tree.leaves(
                tree, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable)
            ) if isinstance(x, nnx.Pytree | nnx.Variable)]))  # fmt: skip

        ours, eager = make(), make()
        nnx_sharding.jit(function)(*ours)
        function(*eager)
        if not isinstance(ours[0], nnx.Linear):  # optimizers hold new functions
            assert shape(ours) == shape(eager)

    def test_abstract_arguments_are_for_stages_only(self):
        model = nnx.eval_shape(linear)
        x = jax.ShapeDtypeStruct((3, 2), jnp.float32)
        lifted = nnx_sharding.jit(lambda m, x: m(x))
        assert lifted.eval_shape(model, x).shape == (3, 2)
        assert lifted.lower(model, x).compile()(linear(), jnp.ones((3, 2))).shape == (3, 2)
        with pytest.raises(TypeError):
            lifted(model, jnp.ones((3, 2)))

    def test_state_and_graphdef_as_arguments(self):
        model = linear()
        graphdef, state = nnx.split(model)

        def f(graphdef, state, x):
            return nnx.merge(graphdef, state)(x)

        x = jnp.ones((1, 2))
        assert_close(nnx_sharding.jit(f)(graphdef, state, x), model(x))
        assert_close(nnx_sharding.jit(f, static_argnums=0)(graphdef, state, x), model(x))


# Ways to pass arguments


class Recorder:
    """A function that notes, at tracing, of which type its parameter ``n`` is."""

    def __init__(self) -> None:
        self.traces: list[Any] = []

    def __call__(self, m, n, x=1.0, *, k=2.0):
        self.traces.append((type(n), n) if not isinstance(n, jax.core.Tracer) else "traced")
        m.w[...] += n * x
        return m.w[...] + k


def model() -> Node:
    return node_args()()[0]


class ClassTest(parameterized.TestCase):
    def test_a_class_whose_methods_have_the_names_of_ours(self):
        class Own(nnx.Module):
            def __init__(self):
                self.w = param(3)

            def lower(self):
                return "own"

            def __call__(self):
                return "own"

        make = nnx_sharding.jit(Own)
        for made in (make(), make.lower().compile()()):
            assert type(made) is Own and made.lower() == "own"
            assert float(made.w[...]) == 3


class StaticTest(parameterized.TestCase):
    OPTIONS = (
        ("number", {"static_argnums": 1}),
        ("numbers", {"static_argnums": (1,)}),
        ("name", {"static_argnames": "n"}),
        ("names", {"static_argnames": ["n"]}),
        ("both", {"static_argnums": 1, "static_argnames": "n"}),
    )

    @parameterized.named_parameters(*OPTIONS)
    def test_by_position_and_by_keyword(self, options):
        f = Recorder()
        lifted = nnx_sharding.jit(f, **options)
        for call in (
            lambda m: lifted(m, 3),
            lambda m: lifted(m, n=3),
            lambda m: lifted(n=3, m=m),
            lambda m: lifted(m, n=3, x=1.0),
            lambda m: lifted(m, 3, k=2.0),
        ):
            m = model()
            assert float(call(m)) == 7 and float(m.w[...]) == 5
        assert set(f.traces) == {(int, 3)}

    @parameterized.named_parameters(*OPTIONS)
    def test_unhashable(self, options):
        m = model()
        memory = Memory(m)
        lifted = nnx_sharding.jit(Recorder(), **options)
        plain = jax.jit(lambda m, n: n, **options)
        for args, keywords in (([1],), {}), ((), {"n": {"a": 1}}):
            with pytest.raises((TypeError, ValueError)) as theirs:
                plain(0.0, *args, **keywords)
            with pytest.raises(theirs.type, match="argument 'n'"):
                lifted(m, *args, **keywords)
        memory.assert_unchanged()

    def test_static_keyword_only(self):
        kinds = []

        @nnx_sharding.jit(static_argnames="k")
        def f(m, *, k="default"):
            kinds.append(k)
            return m.w[...]

        f(model())
        f(model(), k="given")
        f(model(), k="given")
        assert kinds == ["default", "given"]

    def test_a_module_without_arrays_as_static_argument(self):
        class Config(nnx.Module):
            def __init__(self):
                self.scale = 2

        config = Config()
        lifted = nnx_sharding.jit(lambda v, c: v[...] * c.scale, static_argnums=1)
        assert float(lifted(param(4), config)) == 8

    @parameterized.parameters("static_argnums", "donate_argnums")
    def test_number_out_of_range_as_in_jax(self, option):
        with pytest.raises(ValueError) as theirs:
            jax.jit(lambda x: x, **{option: 5})
        with pytest.raises(ValueError) as ours:
            nnx_sharding.jit(lambda x: x, **{option: 5})
        assert str(ours.value) == str(theirs.value)


class PassingTest(parameterized.TestCase):
    def test_defaults_may_be_left_out(self):
        lifted = nnx_sharding.jit(Recorder())
        m = model()
        assert float(lifted(m, 1.0)) == 5
        assert float(lifted(m, 1.0, 2.0)) == 7
        assert float(lifted(m, 1.0, x=3.0, k=0.0)) == 8

    def test_a_default_that_is_a_module_is_a_captured_one(self):
        default = model()
        lifted = nnx_sharding.jit(lambda x, m=default: m.w[...] * x)
        assert float(lifted(3.0)) == 6

    def test_variadic(self):
        @nnx_sharding.jit
        def f(first, *rest, scale=1.0, **others):
            for m in (first, *rest, *others.values()):
                m.w[...] *= scale
            return len(rest), sum(m.w[...] for m in others.values())

        models = [model() for _ in range(4)]
        count, total = f(models[0], models[1], models[0], a=models[2], scale=2.0, b=models[3])
        assert (int(count), float(total)) == (2, 8)
        assert [float(m.w[...]) for m in models] == [8, 4, 4, 4]

    def test_shared_by_positional_and_keyword(self):
        @nnx_sharding.jit
        def f(m, *, again):
            again.w[...] += 1
            return m is again

        m = model()
        assert bool(f(m, again=m)) and float(m.w[...]) == 3

    def test_positional_only(self):
        @nnx_sharding.jit
        def f(m, /, **others):
            return m.w[...] + others["m"]

        assert float(f(model(), m=5.0)) == 7

    def test_partial_with_keyword_and_model(self):
        f = Recorder()
        lifted = nnx_sharding.jit(functools.partial(f, k=10.0), static_argnames="n")
        m = model()
        assert float(lifted(m, n=3)) == 15
        assert float(lifted(m, n=3, k=0.0)) == 8
        assert f.traces[0] == (int, 3)

    @parameterized.named_parameters(
        ("too_few", lambda f, m: f(m)),
        ("too_many", lambda f, m: f(m, 1.0, 2.0, 3.0)),
        ("unknown_keyword", lambda f, m: f(m, 1.0, z=3)),
        ("twice", lambda f, m: f(m, 1.0, n=2.0)),
    )
    def test_wrong_calls_are_the_errors_of_python(self, call):
        m = model()
        memory = Memory(m)
        f = Recorder()
        with pytest.raises(TypeError) as python:
            call(f, model())
        with pytest.raises(TypeError) as ours:
            call(nnx_sharding.jit(f), m)
        assert str(python.value).split("__call__")[1] in str(ours.value)
        memory.assert_unchanged()

    def test_a_class_as_argument_is_refused_as_by_jax(self):
        with pytest.raises(TypeError):
            jax.jit(lambda kind, x: x)(int, 1.0)
        with pytest.raises(TypeError):
            nnx_sharding.jit(lambda kind, x: x)(int, 1.0)

    def test_same_array_in_many_places(self):
        x = jnp.arange(3.0)
        m = Node()
        m.a, m.v = x, nnx.Param(x)

        @nnx_sharding.jit
        def f(m, x, y):
            m.v[...] += 1
            return m.a + x + y

        np.testing.assert_array_equal(f(m, x, x), 3 * np.arange(3))
        np.testing.assert_array_equal(m.v[...], np.arange(3) + 1)
        assert m.a is x


@pytest.mark.parametrize(
    "make_specs", [nnx.get_named_sharding, lambda state, _: nnx.get_partition_spec(state)]
)
def test_states_whose_variables_hold_specs(make_specs):
    """As `nnx.get_named_sharding` makes them: for a State in a tree, and for a module."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    with jax.set_mesh(mesh):
        model = nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(model)
        specs = make_specs(state, mesh)
    x = jnp.ones((8, 8))
    options = {"in_shardings": ({"s": specs, "x": P("data")},), "mesh": mesh}
    step = nnx_sharding.jit(lambda tree: nnx.merge(graphdef, tree["s"])(tree["x"]), **options)
    assert step({"s": state, "x": x}).sharding.spec == P("data", "model")
    # New Variables: in tree mode those of an input can't be returned.
    double = functools.partial(jax.tree.map, lambda leaf: 2 * leaf)
    back = nnx_sharding.jit(double, out_shardings=specs, mesh=mesh)(state)
    assert back["kernel"].sharding.spec == P(None, "model")
    call = nnx_sharding.jit(lambda model, x: model(x), in_shardings=(specs, P("data")), mesh=mesh)
    assert call(model, x).sharding.spec == P("data", "model")
