"""``context_parallel``: sequences over a mesh axis, in models that know nothing of it."""

from __future__ import annotations

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit, stack
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.experimental import context_parallel, ring_attention
from nnx_sharding.partition import fsdp, make_mesh, pipeline, specs_by_path, tensor_parallel
from zoo import WIDTH, Causal, Tied, assert_trains_alike, batch_of, cross_entropy, layer

# The loss is outside of the model, so what that returns is gathered on Explicit axes.
pytestmark = pytest.mark.filterwarnings("ignore:.*operations outside of modules")
LENGTH = 24
FUNCTIONS = {"plain": nnx.dot_product_attention}
if hasattr(nnx, "dot_product_attention_with_rope"):  # not in the oldest Flax
    FUNCTIONS["rope"] = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
BATCH = functools.partial(batch_of, cross_entropy, 4, LENGTH)


@functools.cache
def model_of(function=nnx.dot_product_attention, blocks="stack"):
    """What makes a language model with such attention in two layers."""

    def make(rngs):
        attention = functools.partial(Causal, function=function)
        layers = [layer(rngs, attention) for _ in range(2)]
        return nnx.List(layers) if blocks == "list" else stack(layers, remat=blocks == "remat")

    return functools.partial(Tied, blocks=make)


DIMENSIONS = {
    "function": FUNCTIONS,
    "blocks": ("list", "stack", "remat"),
    "kind": ("Auto", "Explicit", "mixed"),
    "base": ("", "fsdp", "tensor", "sequence", "tensor and fsdp", "pipeline"),
    "rows": (P("data", "context"), P("data"), P(("context", "data"))),
    "method": ("ring", "all_to_all", "all_gather"),
    "order": [*itertools.permutations(("data", "context", "third"))],
}


def cases():
    found = [dict(zip(DIMENSIONS, x, strict=True)) for x in itertools.product(*DIMENSIONS.values())]
    found = [x for x in found if x["base"] != "pipeline" or x["blocks"] != "list"]
    found = random.Random(0).sample(found, 48)
    return [pytest.param(x, id="-".join("".join(map(str, y)) for y in x.values())) for x in found]


@pytest.mark.parametrize("case", cases())
def test_a_step_is_that_of_one_device(case):
    third = "stage" if case["base"] == "pipeline" else "model"
    sizes = {third if axis == "third" else axis: 2 for axis in case["order"]}
    kinds = {"Auto": [AxisType.Auto] * 3, "Explicit": [AxisType.Explicit] * 3}
    mixed = [AxisType.Auto, AxisType.Explicit, AxisType.Auto]

    def strategy(model, **options):
        base = None
        if case["base"].startswith(("tensor", "sequence")):
            base = tensor_parallel(model, sequence=case["base"] == "sequence", **options)
        found = context_parallel(model, base=base, method=case["method"], **options)
        if case["base"].endswith("fsdp"):
            return fsdp(model, base=found, axis=("data", "context"), min_size=0, **options)
        if case["base"] == "pipeline":
            return pipeline(model, base=found, microbatches=2, **options)
        return found

    make = model_of(DIMENSIONS["function"][case["function"]], case["blocks"])
    mesh = make_mesh(sizes, kinds.get(case["kind"], mixed))
    options = {"loss": cross_entropy, "batch": BATCH, "steps": 1, "spec": case["rows"]}
    assert_trains_alike(make, strategy, mesh, **options)


def make():
    return model_of()(nnx.Rngs(0))


class Twice(nnx.MultiHeadAttention):
    def twice(self, x):
        return self(self(x))


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_attention_that_another_method_calls(axes):
    mesh = make_mesh({"context": 4}, [axes], devices=jax.devices()[:4])
    model = Twice(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
    sharding = context_parallel(model, mesh=mesh)
    forward = jit(lambda m, x: m.twice(x), mesh=mesh, in_shardings=(sharding, P(None, "context")))
    np.testing.assert_allclose(forward(model, x), model.twice(x), atol=1e-5)


def compiled(model, *, tokens=True, **options):
    mesh = make_mesh({"context": 4}, devices=jax.devices()[:4])
    sharding = context_parallel(model, mesh=mesh, **options)
    forward = jit(lambda model, x: model(x), mesh=mesh, in_shardings=(sharding, P(None, "context")))
    shape = jax.ShapeDtypeStruct((2, LENGTH), "int32") if tokens else jnp.zeros((2, LENGTH, WIDTH))
    return forward.lower(model, shape).compile()


@pytest.mark.parametrize("balanced", [False, True])
def test_what_is_sent(balanced):
    sent = compiled(nnx.eval_shape(make), balanced=balanced).collectives()
    assert {each.kind for each in sent} == {"collective-permute"}  # nobody gathers a sequence
    block = 2 * LENGTH // 4 * WIDTH * 4
    # In each layer, keys and values, and four bytes for each position, go to three more devices.
    moved = 2 * 3 * (2 * block + LENGTH // 4 * 4)
    # Both halves of queries, keys, values and outputs, from most devices to another one.
    moved += 2 * 4 * block * balanced
    assert sent.bytes_sent == moved


class Mine(nnx.Module):
    """Attention with a function of its own, which no strategy may replace."""

    def __init__(self, *, rngs):
        self.project = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.attention_fn = lambda q, k, v: jnp.tanh(jax.nn.dot_product_attention(q, k, v))

    def __call__(self, x):
        heads = self.project(x).reshape(*x.shape[:2], 3, 2, -1)
        return self.attention_fn(*jnp.moveaxis(heads, 2, 0)).reshape(x.shape)


class OfClass(Mine):
    """The function of the class, which all of its modules share."""

    attention_fn = staticmethod(nnx.dot_product_attention)

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        del self.attention_fn


WRAPS = {
    "module": lambda make: make(),
    "abstract": nnx.eval_shape,
    "list": lambda make: nnx.List([make()]),
    "stack": lambda make: stack([make()]),
    "vmap": lambda make: nnx.vmap(lambda _: make(), axis_size=2)(None),
}


@pytest.mark.parametrize("make", [Mine, OfClass])
def test_functions_of_the_user_stay(make):
    model = make(rngs=nnx.Rngs(0))
    before, x = dict(vars(model)), jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
    with pytest.warns(UnshardedWarning, match="no module of the model has attention"):
        program = compiled(model, tokens=False)
    assert any(each.kind == "all-gather" for each in program.collectives())  # as the warning says
    np.testing.assert_allclose(program(model, x), model(x), rtol=1e-5, atol=1e-6)
    assert vars(model).keys() == before.keys()


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_warning_says_whether_any_attention_is_known(wrap):
    """One module of many is enough; a single device gathers nothing; a State says nothing."""
    mesh, one = (AbstractMesh((size,), ("context",)) for size in (4, 1))
    unknown = wrap(lambda: Mine(rngs=nnx.Rngs(0)))
    with pytest.warns(UnshardedWarning, match=r"set self\.attention_fn"):
        context_parallel(unknown, mesh=mesh)
    context_parallel(unknown, mesh=one)
    context_parallel(nnx.state(unknown), mesh=mesh)
    for function in nnx.dot_product_attention, functools.partial(ring_attention, axis="context"):
        attention = functools.partial(nnx.MultiHeadAttention, 2, WIDTH, attention_fn=function)
        known = wrap(lambda make=attention: make(decode=False, rngs=nnx.Rngs(0)))
        context_parallel({"a": unknown, "b": known}, mesh=mesh)


def test_a_single_query_needs_no_ring():
    mesh = make_mesh({"data": 2, "context": 4})
    layer = nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((2, 8, WIDTH))
    own, x = nnx.clone(layer), jnp.ones((2, 1, WIDTH))
    sharding = context_parallel(layer, mesh=mesh)
    forward = jit(lambda layer, x: layer(x), mesh=mesh, in_shardings=(sharding, P("data")))
    for _ in range(2):
        np.testing.assert_allclose(forward(layer, x), own(x), rtol=1e-5)
    assert layer.attention_fn is own.attention_fn


def test_the_specs_are_those_of_base():
    mesh, model = AbstractMesh((2, 4), ("data", "context")), nnx.eval_shape(make)
    base = fsdp(model, mesh=mesh, min_size=0)
    found = context_parallel(model, mesh=mesh, base=base)
    assert specs_by_path(model, found) == specs_by_path(model, base)
    assert found == context_parallel(model, mesh=mesh, base=base)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"axis": "contxt"}, "did you mean 'context'"),
        ({"axis": ("data", "context")}, "the name of one axis"),
        ({"base": P()}, "base must be a StateSharding"),
        ({"method": "all_to_al"}, "did you mean 'all_to_all'"),
        ({"attention": jax.nn.dot_product_attention}, "a ring adds up its blocks itself"),
    ],
)
def test_wrong_options(options, text):
    mesh = AbstractMesh((2, 4), ("data", "context"))
    with pytest.raises((TypeError, ValueError), match=text):
        context_parallel(nnx.eval_shape(make), mesh=mesh, **options)


@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_dropout_of_weights(method):
    """The same weights are dropped on any mesh, though others than on one device by Flax."""
    options = {"dropout_rate": 0.3, "deterministic": False, "decode": False}
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))

    def outputs(devices, method):
        layer = nnx.MultiHeadAttention(4, WIDTH, **options, rngs=nnx.Rngs(0))
        mesh = make_mesh({"context": devices}, devices=jax.devices()[:devices])
        sharding = context_parallel(layer, mesh=mesh, method=method)
        forward = jit(
            lambda m, x, rngs: (m(x, rngs=rngs), m(x, deterministic=True)),
            mesh=mesh,
            in_shardings=(sharding, P(), P()),
        )
        return forward(layer, x, nnx.Rngs(1))

    found, without = outputs(4, method)
    np.testing.assert_allclose(found, outputs(1, "ring")[0], atol=1e-5)
    assert not np.allclose(found, without, atol=1e-3)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_two_axes(axes):
    mesh = make_mesh({"outer": 2, "data": 2, "inner": 2}, [axes] * 3)
    strategy = functools.partial(context_parallel, method="all_to_all", axis=("inner", "outer"))
    spec = P("data", ("outer", "inner"))
    options = {"loss": cross_entropy, "batch": BATCH, "steps": 1, "spec": spec}
    assert_trains_alike(model_of(blocks="remat"), strategy, mesh, **options)
