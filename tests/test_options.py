"""Each plan serves only calls with the same options, and depends on no call before it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import ActivationSharding, StateSharding, jit, scan, stack, vmap
from nnx_sharding.transforms.jit import Jit

# Equal in Python, but not the same.
TWINS = [(1, True), (1, 1.0), (0, False), (0.0, -0.0), (b"1", bytearray(b"1"))]


def unrolled(fun, *args):
    (equation,) = [e for e in jax.make_jaxpr(fun)(*args).eqns if e.primitive.name == "scan"]
    return equation.params["unroll"]


def test_split_transpose(monkeypatch):
    of_jax, given = jax.lax.scan, []

    def recorded(*args, _split_transpose, **options):
        given.append(_split_transpose)
        return of_jax(*args, _split_transpose=_split_transpose, **options)

    monkeypatch.setattr(jax.lax, "scan", recorded)
    for options in {}, {"_split_transpose": True}:
        scan(lambda carry, x: (carry + x, carry), **options)(jnp.array(0.0), jnp.arange(4.0))
    assert given == [False, True]


@pytest.mark.parametrize("order", [(1, True), (True, 1)])
def test_unroll(order):
    def step(carry, x):
        return carry + x, carry

    xs = jnp.arange(4.0)
    for unroll in order:
        ours = unrolled(lambda xs, unroll=unroll: scan(step, unroll=unroll)(jnp.array(0.0), xs), xs)
        theirs = unrolled(
            lambda xs, unroll=unroll: jax.lax.scan(step, jnp.array(0.0), xs, unroll=unroll), xs
        )
        assert ours == theirs


@pytest.mark.parametrize("order", [(1, True), (True, 1)])
def test_unroll_of_a_stack(order):
    x = jnp.ones((2, 4))
    for unroll in order:
        layers = stack(nnx.Linear, 3, 4, 4, unroll=unroll, rngs=nnx.Rngs(0))
        assert unrolled(layers, x) == (3 if unroll is True else 1)


@pytest.mark.parametrize(("one", "other"), TWINS)
@pytest.mark.parametrize(
    "make",
    [
        lambda f, x: jit(f, compiler_options={"xla_embed_ir_in_executable": x}),
        lambda f, x: vmap(f, transform_metadata={"note": x}),
        lambda f, x: vmap(f, transform_metadata={"note": (x, jnp.sin)}),
        lambda f, x: vmap(f, axis_name=("a", x) if x.__hash__ else "b"),
    ],
)
def test_equal_options_share_plans_only_if_they_are_the_same(make, one, other):
    def f(x):
        return x

    assert make(f, one)._plans is not make(f, other)._plans
    if one.__hash__:
        assert make(f, one)._plans is make(f, one)._plans


def test_a_trace_depends_on_all_options_but_those_that_are_listed():
    """A new option is not ignored, unless it is listed."""
    options = {field.name for field in dataclasses.fields(Jit)}
    assert options >= Jit.untraced
    for name in options:
        changed = dataclasses.replace(Jit(), **{name: "another"})
        assert (changed.trace_key == Jit().trace_key) == (name in Jit.untraced)
        assert changed.options_key != Jit().options_key


class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x)


class TestOrderOfCalls:
    """A program is the same whatever ran before it."""

    @pytest.mark.parametrize("own", [True, False])
    def test_shardings_of_a_batch(self, own):
        mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
        batches = {
            name: jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, spec))
            for name, spec in {"replicated": P(), "rows": P("d"), "columns": P(None, "d")}.items()
        }
        gather = ActivationSharding(gather=True, infer=True)

        def programs(order):
            model = Model()
            kernel = jax.device_put(model.up.kernel[...], NamedSharding(mesh, P("d", None)))
            model.up.kernel.set_value(kernel)
            if own:
                sharding = StateSharding({...: P("d", None)}, activations=gather)
                f = jit(lambda m, x: m(x), in_shardings=(sharding, None))
            else:
                f = jit(lambda m, x: m(x), activation_shardings=gather)
            return {name: f.lower(model, batches[name]).compile().as_text() for name in order}

        def collectives(text):
            return [text.count(f"{kind}(") for kind in ("all-gather", "all-reduce", "all-to-all")]

        with jax.set_mesh(mesh):
            alone = {name: collectives(programs([name])[name]) for name in batches}
            for order in itertools.permutations(batches, 2):
                assert [*map(collectives, programs(order).values())] == [alone[x] for x in order]
        assert alone["rows"] != alone["replicated"]

    @pytest.mark.parametrize("order", ["nj", "jn"])
    def test_kinds_of_arrays_that_are_attributes(self, order):
        """A NumPy array stays, one of JAX is placed once; each as if it were called first."""
        mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

        class Table(nnx.Module):
            def __init__(self, kind):
                values = np.ones(8)
                self.table = nnx.data(values if kind == "n" else jnp.asarray(values))

        f = jit(lambda m: m.table.sum(), mesh=mesh, in_shardings=(StateSharding({...: P("d")}),))
        for kind in order:
            model = Table(kind)
            f(model)
            if kind == "n":
                assert type(model.table) is np.ndarray
            else:
                assert model.table.sharding == NamedSharding(mesh, P("d"))
