"""Which dimension of which parameter tensor parallelism shards."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import Carry, jit, scan, stack
from nnx_sharding.errors import UnshardedWarning
from nnx_sharding.partition import fsdp, override, replicated, tensor_parallel, zero1
from nnx_sharding.partition.variables import variables
from nnx_sharding.report import check_sharding
from nnx_sharding.specs.fitting import spec_axes
from zoo import (
    MESH,
    MODELS,
    WIDTH,
    WORDS,
    Normed,
    assert_trains_alike,
    cross_entropy,
    mesh_of,
    misfits,
    table,
)

COLUMN = {"kernel": P(None, "model"), "bias": P("model")}
ROW = {"kernel": P("model", None)}
HEADS = {
    f"{name}/{part}": P(None, "model", None) if part == "kernel" else P("model", None)
    for name in ("query", "key", "value")
    for part in ("kernel", "bias")
}
# fmt: off
LAYERS = {
    "grows": (lambda r: nnx.Linear(8, 16, rngs=r), COLUMN),
    "is square": (lambda r: nnx.Linear(8, 8, rngs=r), COLUMN),
    "head": (lambda r: nnx.Dict(head=nnx.Linear(16, 8, rngs=r)), {
        f"head/{name}": spec for name, spec in COLUMN.items()}),
    "shrinks": (lambda r: nnx.Linear(16, 8, rngs=r), ROW),
    "only inputs": (lambda r: nnx.Linear(16, 18, rngs=r), ROW),
    "only outputs": (lambda r: nnx.Linear(18, 16, rngs=r), COLUMN),
    "neither": (lambda r: nnx.Linear(9, 7, rngs=r), {}),
    "heads": (lambda r: nnx.MultiHeadAttention(4, 16, rngs=r, normalize_qk=True),
              {**HEADS, "out/kernel": P("model", None, None)}),
    "odd heads": (lambda r: nnx.MultiHeadAttention(2, 16, rngs=r), {}),
    "words": (lambda r: nnx.Embed(8, 16, rngs=r), {"embedding": P("model", None)}),
    "odd words": (lambda r: nnx.Embed(7, 16, rngs=r), {"embedding": P(None, "model")}),
    "conv": (lambda r: nnx.Conv(4, 8, (3,), rngs=r),
             {"kernel": P(None, None, "model"), "bias": P("model")}),
    "conv inputs": (lambda r: nnx.Conv(4, 7, (3,), rngs=r), {"kernel": P(None, "model", None)}),
    "transposed": (lambda r: nnx.ConvTranspose(4, 8, (3,), transpose_kernel=True, rngs=r),
                   {"kernel": P(None, "model", None), "bias": P("model")}),
    "norm": (lambda r: nnx.BatchNorm(8, rngs=r), {}),
    "lora": (lambda r: nnx.LoRALinear(8, 16, lora_rank=4, rngs=r),
             {**COLUMN, "lora/lora_b": P(None, "model")}),
    "lora row": (lambda r: nnx.LoRALinear(16, 8, lora_rank=4, rngs=r),
                 {**ROW, "lora/lora_a": P("model", None)}),
    "features in heads": (lambda r: nnx.LinearGeneral(8, (4, 2), rngs=r),
                          {"kernel": P(None, "model", None), "bias": P("model", None)}),
    "second feature": (lambda r: nnx.LinearGeneral(8, (3, 4), rngs=r),
                       {"kernel": P(None, None, "model"), "bias": P(None, "model")}),
    "einsum": (lambda r: nnx.Einsum("btd,dhk->bthk", (6, 4, 3), (4, 3), rngs=r),
               {"kernel": P(None, "model", None), "bias": P("model", None)}),
    "einsum shrinks": (lambda r: nnx.Einsum("bthk,hkd->btd", (4, 8, 4), (4,), rngs=r),
                       {"kernel": P("model", None, None)}),
    "experts": (lambda r: nnx.Einsum("ebd,edf->ebf", (4, 6, 6), rngs=r),
                {"kernel": P("model", None, None)}),
    "dots": (lambda r: nnx.Einsum("...d,...df->...f", (6, 8), rngs=r),
             {"kernel": P(None, "model")}),
    "gates": (lambda r: nnx.GRUCell(6, 8, rngs=r),
              {"dense_h/kernel": P(None, "model"), "dense_i/kernel": P(None, "model"),
               "dense_i/bias": P("model")}),
    "odd gates": (lambda r: nnx.LSTMCell(8, 6, rngs=r), {}),
}
# fmt: on


class TensorParallelTest(parameterized.TestCase):
    def check(self, make, expected, mesh=MESH, **options):
        model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        sharding = tensor_parallel(model, mesh=mesh, **options)
        self.assertEqual(misfits(model, sharding, mesh), [])
        self.assertEqual(table(model, sharding), expected)

    @parameterized.parameters(*LAYERS)
    def test_layer(self, name):
        self.check(*LAYERS[name])

    @parameterized.parameters(*MODELS)
    def test_everything_is_sharded_that_can_be(self, name):
        model = nnx.eval_shape(lambda: MODELS[name](nnx.Rngs(0)))
        sharded = table(model, tensor_parallel(model, mesh=MESH))
        kernels = {
            each.name
            for each in variables(model)
            if len(each.shapes[0]) > 1 and each.path[-1] != "bias"
        }
        # Of the two factors of LoRA one has the features that are not sharded; 2 heads of keys and
        # values are not divided.
        left = {
            "lora": {"up/lora/lora_a", "down/lora_b"},
            "grouped query": {"key/kernel", "value/kernel"},
        }
        self.assertEqual(kernels - set(sharded), left.get(name, set()))

    def test_every_gate(self):
        model = nnx.LSTMCell(64, 8, rngs=nnx.Rngs(0))
        found = table(model, tensor_parallel(model, mesh=MESH))
        kernels = {name for name in found if name.endswith("kernel")}
        self.assertLen(kernels, 8)
        self.assertEqual({found[name] for name in kernels}, {P(None, "model")})

    @parameterized.parameters(
        ("up", "column"),
        ("down", "row"),
        ("fc1", "column"),
        ("out", "row"),
        ("other", "column"),
        ("proj", "row"),
        ("output", "row"),
        ("lm_head", "column"),
    )
    def test_names(self, name, role):
        specs = COLUMN if role == "column" else ROW

        def plain(rngs):
            return nnx.Dict({name: nnx.Linear(8, 8, rngs=rngs)})

        def wrapped(rngs):
            layer = nnx.Linear(8, 8, rngs=rngs)
            return nnx.Dict({name: nnx.List([nnx.LoRA(8, 4, 8, base_module=layer, rngs=rngs)])})

        self.check(plain, {f"{name}/{part}": spec for part, spec in specs.items()})
        filters = tensor_parallel(plain(nnx.Rngs(0)), mesh=MESH).filters
        self.assertEqual({x.strategy for x in filters}, {f"{role} of tensor_parallel"})
        adapter = ("lora_b", P(None, "model")) if role == "column" else ("lora_a", P("model", None))
        base = {f"{name}/0/base_module/{part}": spec for part, spec in specs.items()}
        self.check(wrapped, base | {f"{name}/0/{adapter[0]}": adapter[1]})

    @parameterized.parameters(
        # subscripts, shape, what is sharded over four devices
        ("BTD,NDH->BTNH", (4, 8, 6), P("model", None, None)),  # heads
        ("BTD,SNDH->SBTNH", (4, 8, 16, 2), P(None, "model", None, None)),  # not query, key, value
        ("BTNH,NHD->BTD", (4, 8, 6), P("model", None, None)),  # summed over heads
        ("BTNH, NHD -> BTD", (3, 8, 6), P(None, "model", None)),
        ("BTNH,NHD->BTD", (4, 2, 16), P("model", None, None)),  # whatever the sizes
        ("BTD,NDH->BTNH", (4, 16, 2), P("model", None, None)),
        ("ebf,efd->ebd", (3, 16, 8), P(None, "model", None)),
        ("...F,NHF->...NH", (2, 16, 8), P(None, "model", None)),
        ("ebd,edf->ebf", (4, 6, 6), P("model", None, None)),  # experts
    )
    def test_modules_of_the_user_with_subscripts(self, subscripts, shape, spec):
        class Einsum(nnx.Module):
            def __init__(self, rngs):
                self.einsum_str, self.dtype = subscripts, "float32"
                self.w = nnx.Param(jax.random.normal(rngs.params(), shape))
                self.w_lora_a = nnx.LoRAParam(jnp.ones(shape))

        self.check(Einsum, {"w": spec})
        self.check(lambda rngs: nnx.vmap(Einsum)(rngs.split(3)), {"w": P(None, *spec)})

    @parameterized.parameters("key", "v_proj", "kv_einsum", "to_q")
    def test_heads_are_not_divided(self, name):
        def general(heads, rngs):
            return nnx.Dict({name: nnx.LinearGeneral(8, (heads, 8), rngs=rngs)})

        def einsum(heads, rngs):
            return nnx.Dict({name: nnx.Einsum("btd,cdnh->cbtnh", (2, 8, heads, 8), rngs=rngs)})

        many = {"kernel": P(None, "model", None), "bias": P("model", None)}
        self.check(functools.partial(general, 4), {f"{name}/{x}": y for x, y in many.items()})
        self.check(functools.partial(general, 2), {})
        self.check(functools.partial(einsum, 4), {f"{name}/kernel": P(None, None, "model", None)})
        self.check(functools.partial(einsum, 2), {})

    @parameterized.parameters("base_module", "base_layer", "base")
    def test_heads_within_a_wrapper(self, wrapper):
        class Heads(nnx.Module):
            def __init__(self, rngs):
                self.w = nnx.Param(rngs.normal((8, 4, 8)))

        def wrapped(rngs):
            return nnx.Dict(q_proj=nnx.Dict({wrapper: Heads(rngs)}))

        self.check(wrapped, {f"q_proj/{wrapper}/w": P(None, "model", None)})
        stacked = {f"layers/q_proj/{wrapper}/w": P(None, None, "model", None)}
        self.check(lambda rngs: stack(wrapped, 3, rngs=rngs), stacked)

    def test_modules_of_the_user_with_other_subscripts(self):
        class Einsum(nnx.Module):
            def __init__(self, subscripts, *shapes):
                self.einsum_str = subscripts
                for i, shape in enumerate(shapes):
                    setattr(self, f"w{i}", nnx.Param(jnp.ones(shape)))

        self.check(lambda _: Einsum("BD,DF->BF", (8, 16), (8, 16)), {})  # which is it?
        self.check(lambda _: Einsum("BD,EDF->BEF", (8, 16)), {})
        kernel = {"w0": P(None, "model")}  # as any class with one kernel
        self.check(lambda _: Einsum("BD,DF,F->BF", (8, 16)), kernel)
        self.check(lambda _: Einsum("a sentence, not a formula", (8, 16)), kernel)

    def test_a_subclass_and_a_stack(self):
        class Own(nnx.Linear):
            pass

        def stack(rngs):
            return nnx.vmap(lambda r: Own(8, 16, rngs=r), graph=True)(rngs.split(3))

        self.check(stack, {"kernel": P(None, None, "model"), "bias": P(None, "model")})

    def test_several_axes(self):
        both = {"kernel": P(None, ("data", "model")), "bias": P(("data", "model"))}
        self.check(lambda r: nnx.Linear(3, 16, rngs=r), both, axis=("data", "model"))
        first = {"kernel": P(None, "data"), "bias": P("data")}
        self.check(lambda r: nnx.Linear(3, 6, rngs=r), first, axis=("data", "model"))

    def test_on_top_of_fsdp(self):
        model = nnx.Linear(9, 16, rngs=nnx.Rngs(0))
        base = fsdp(model, mesh=MESH, min_size=100)
        found = table(model, tensor_parallel(model, mesh=MESH, base=base))
        self.assertEqual(found, {"kernel": P(None, ("data", "model")), "bias": P("model")})

    def test_override(self):
        model = nnx.eval_shape(lambda: Normed(nnx.Rngs(0)))
        rules = {nnx.PathContains("up"): P(), "norm/": P("data")}
        found = table(model, override(tensor_parallel(model, mesh=MESH), rules))
        norm = {"norm/bias": P("data"), "norm/scale": P("data")}
        self.assertEqual(found, {**norm, "down/kernel": P("model", None)})


def of_class(name, **shapes):
    """What makes a module of a class that nobody knows, with parameters of these shapes."""

    def init(self, rngs):
        for parameter, shape in shapes.items():
            setattr(self, parameter, nnx.Param(rngs.normal(shape)))

    return type(name, (nnx.Module,), {"__init__": init})


ROWS_OF_TABLE = P("model", None)
# fmt: off
CLASSES = {
    # an embedding, by its own name or that of its class, with words in front or behind
    "input_embedding": (of_class("Words", input_embedding=(32, 8)),
                        {"input_embedding": ROWS_OF_TABLE}),
    "Embedder": (of_class("Embedder", w=(32, 8)), {"w": ROWS_OF_TABLE}),
    "words behind": (of_class("Embedder", w=(8, 32)), {"w": P(None, "model")}),
    "odd words": (of_class("Embedder", w=(33, 8)), {"w": P(None, "model")}),
    "two tables": (of_class("Model", wte=(32, 8), wpe=(16, 8)), {"wte": ROWS_OF_TABLE}),
    # what is added to activations
    "positions": (of_class("Model", pos_embedding=(32, 8)), {}),
    "PositionEmbedding": (of_class("PositionEmbedding", w=(32, 8)), {}),
    "a token": (of_class("Vit", cls_token=(1, 1, 8), mask_token=(4, 8)), {}),
    "broadcast": (of_class("Scale", gamma=(1, 1, 8)), {}),
    # one kernel is a linear layer
    "kernel": (of_class("Own", kernel=(8, 16), bias=(16,)),
               {"kernel": P(None, "model"), "bias": P("model")}),
    "kernel of fewer": (of_class("Own", kernel=(16, 8), bias=(8,)), {"kernel": P("model", None)}),
    "transposed": (of_class("Own", weight=(16, 8), bias=(16,)),
                   {"weight": P("model", None), "bias": P("model")}),
    "transposed of fewer": (of_class("Own", weight=(8, 16), bias=(8,)),
                            {"weight": P(None, "model")}),
    "scaled": (of_class("Own", kernel=(8, 16), scale=(16,)),
               {"kernel": P(None, "model"), "scale": P("model")}),
    "scaled with keepdims": (of_class("Own", kernel=(8, 16), scale=(1, 16)),
                             {"kernel": P(None, "model"), "scale": P(None, "model")}),
    "scaled inputs or outputs": (of_class("Own", kernel=(8, 8), scale=(8,)),
                                 {"kernel": P(None, "model")}),
    "scaled sums": (of_class("Own", kernel=(16, 8), scale=(8,)), {"kernel": P("model", None)}),
    "a filter": (of_class("Own", kernel=(3, 3, 8, 16)), {"kernel": P(None, None, None, "model")}),
    # by their names
    "attention": (of_class("Own", wq=(8, 8), wk=(8, 8), wv=(8, 8), wo=(8, 8)),
                  {**dict.fromkeys(("wq", "wk", "wv"), P(None, "model")), "wo": P("model", None)}),
    "heads": (of_class("Own", w_q=(8, 4, 2), w_k=(8, 2, 2), w_o=(4, 2, 8)),
              {"w_q": P(None, "model", None), "w_o": P("model", None, None)}),
    "heads with a bias": (lambda rngs: nnx.Dict(q_proj=of_class(
        "Own", kernel=(8, 4, 2), bias=(4, 2))(rngs)),
        {"q_proj/kernel": P(None, "model", None), "q_proj/bias": P("model", None)}),
    "scaled heads": (lambda rngs: nnx.Dict(q_proj=of_class(
        "Own", w=(8, 4, 2), scale=(4, 2))(rngs), v_proj=of_class(
        "Own", w=(8, 4, 2), scales=(1, 4, 2))(rngs), o_proj=of_class(
        "Own", w=(4, 2, 8), scale=(4, 8))(rngs)),
        {"q_proj/w": P(None, "model", None), "q_proj/scale": P("model", None),
         "v_proj/w": P(None, "model", None), "v_proj/scales": P(None, "model", None),
         "o_proj/w": P("model", None, None)}),
    # in a wrapper, which has the name of the layer
    "wrapped heads": (lambda rngs: nnx.Dict(q_proj=nnx.Dict(
        inner=of_class("Own", w=(8, 4, 2))(rngs), a=nnx.LoRAParam(rngs.normal((8, 4))),
        b=nnx.LoRAParam(rngs.normal((4, 8))))), {"q_proj/inner/w": P(None, "model", None)}),
    "wrapped next to LoRA": (lambda rngs: nnx.Dict(q_proj=nnx.Dict(
        base=of_class("Own", w=(8, 4, 2))(rngs), adapter=nnx.LoRA(8, 2, 8, rngs=rngs))),
        {"q_proj/base/w": P(None, "model", None), "q_proj/adapter/lora_b": P(None, "model")}),
    "wrapped in a list": (lambda rngs: nnx.Dict(up_proj=nnx.List([nnx.Dict(
        scale=nnx.Param(rngs.normal((8,))), inner=of_class("Own", kernel=(16, 8))(rngs))])),
        {"up_proj/0/inner/kernel": P(None, "model")}),
    "two layers in one": (lambda rngs: nnx.Dict(up=nnx.Dict(
        a=of_class("Own", kernel=(8, 16))(rngs), b=of_class("Own", kernel=(16, 8))(rngs))),
        {"up/a/kernel": P(None, "model"), "up/b/kernel": P("model", None)}),
    "gated": (of_class("Own", gate_up_proj=(8, 64), down_proj=(32, 8)),
              {"gate_up_proj": P(None, "model"), "down_proj": P("model", None)}),
    "with a layer": (lambda rngs: nnx.Dict(layer=nnx.Linear(8, 9, rngs=rngs), a=nnx.Param(
        rngs.normal((8, 16)))), {"layer/kernel": P("model", None)}),
    "unknown": (of_class("Own", a=(8, 16), b=(8, 12)), {}),
    # into hidden features and back
    "pair": (of_class("Own", a=(3, 8, 16), b=(3, 16, 8)),
             {"a": P(None, None, "model"), "b": P(None, "model", None)}),
}
# fmt: on


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_users(name):
    make, expected = CLASSES[name]
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    sharding = tensor_parallel(model, mesh=MESH)
    assert misfits(model, sharding, MESH) == []
    assert table(model, sharding) == expected


class Strange(nnx.Module):
    """A language model in classes of its own, and in none of Flax's."""

    def __init__(self, rngs):
        self.embedder = of_class("Embedder", input_embedding=(WORDS, WIDTH))(rngs)
        self.q_proj = of_class("Own", kernel=(WIDTH, WIDTH), bias=(WIDTH,))(rngs)
        self.mlp = of_class("Own", gate_up_proj=(WIDTH, 64), down_proj=(32, WIDTH))(rngs)
        self.out = of_class("Own", weight=(WIDTH, WIDTH), bias=(WIDTH,))(rngs)

    def __call__(self, words):
        table = self.embedder.input_embedding[...]
        x = table[words] / 4
        x = x + jnp.tanh(x @ self.q_proj.kernel[...] + self.q_proj.bias[...])
        gate, up = jnp.split(x @ self.mlp.gate_up_proj[...], 2, -1)
        x = x + jnp.tanh(gate * up) @ self.mlp.down_proj[...] / 8
        x = jnp.tanh(x @ self.out.weight[...].T + self.out.bias[...])
        return x @ table.T


# The loss is outside of the model, so what that returns is gathered on Explicit axes.
@pytest.mark.filterwarnings("ignore:.*operations outside of modules")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_model_in_classes_of_users(axis_type):
    mesh = mesh_of((2, 4), ("data", "model"), (axis_type,) * 2)
    model = nnx.eval_shape(lambda: Strange(nnx.Rngs(0)))
    report = check_sharding(model, tensor_parallel(model, mesh=mesh), mesh)
    assert {row.path for row in report.rows if row.shard_shape == row.shape} == {"out/bias"}
    assert_trains_alike(Strange, tensor_parallel, mesh, loss=cross_entropy)


class FusedAttention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(64, 3 * 64, use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((8, 8), 64, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x, order):
        qkv, shape = self.qkv(x), x.shape[:-1]
        if order == "heads first":
            parts = jnp.split(qkv.reshape(*shape, 8, 3 * 8), 3, axis=-1)
        elif order == "split first":
            parts = [part.reshape(*shape, 8, 8) for part in jnp.split(qkv, 3, axis=-1)]
        else:
            parts = jnp.moveaxis(qkv.reshape(*shape, 3, 8, 8), -3, 0)
        return self.out(nnx.dot_product_attention(*parts))


@pytest.mark.parametrize(
    ("order", "sent"),
    [
        ("heads first", {"all-reduce"}),
        ("split first", {"all-reduce", "collective-permute"}),
        ("three first", {"all-reduce", "all-gather"}),
    ],
)
def test_query_key_and_value_in_one_kernel(order, sent):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = nnx.eval_shape(lambda: FusedAttention(nnx.Rngs(0)))
    specs = tensor_parallel(model, mesh=mesh), P("data")
    apply = jit(lambda model, x: model(x, order), in_shardings=specs, mesh=mesh)
    x = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)
    assert {one.kind for one in apply.lower(model, x).compile().collectives()} == sent


class FewHeads(nnx.Module):
    """8 heads of queries, 2 of keys and values, in layers that do not show them."""

    def __init__(self, rngs):
        sizes = {"q_proj": 64, "k_proj": 16, "v_proj": 16, "o_proj": 64}
        for name, size in sizes.items():
            setattr(self, name, nnx.Linear(64, size, use_bias=False, rngs=rngs))

    def __call__(self, x):
        q, k, v = (
            layer(x).reshape(*x.shape[:2], -1, 8)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


@pytest.mark.parametrize(("rules", "gathers"), [({}, 2), ({"(k|v)_proj": P()}, 0)])
def test_fewer_heads_than_devices_in_flat_layers(rules, gathers):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = nnx.eval_shape(lambda: FewHeads(nnx.Rngs(0)))
    specs = override(tensor_parallel(model, mesh=mesh), rules), P("data")
    apply = jit(lambda model, x: model(x), in_shardings=specs, mesh=mesh)
    x = jax.ShapeDtypeStruct((4, 16, 64), jnp.float32)
    found = apply.lower(model, x).compile().collectives()
    assert len(found.of("all-gather")) == gathers


@dataclasses.dataclass(frozen=True)
class Heads:
    num_key_value_heads: int = 2
    num_attention_heads: int = 8


@dataclasses.dataclass(slots=True)
class SlottedHeads:
    heads: int = 8
    kv_heads: int = 2


@pytest.mark.parametrize(
    ("attributes", "split"),
    [
        ({}, set()),  # nothing says how many there are
        ({"num_kv_heads": 2}, {"k_proj", "v_proj"}),
        ({"num_heads": 8, "head_dim": 8}, {"k_proj", "v_proj"}),
        ({"config": Heads()}, {"k_proj", "v_proj"}),
        ({"c": SlottedHeads()}, {"k_proj", "v_proj"}),  # a dataclass by any name
        ({"heads": 2, "kv_heads": 8}, {"q_proj"}),
        ({"num_kv_heads": 4}, set()),
        ({"head_dim": 4}, set()),
        ({"num_heads": 2, "num_kv_heads": 8}, {"q_proj"}),
    ],
)
def test_split_heads_are_noted(attributes, split):
    def build():
        model = FewHeads(nnx.Rngs(0))
        for name, value in attributes.items():
            setattr(model, name, value)
        return nnx.Dict(attention=model)

    mesh = AbstractMesh((2, 4), ("data", "model"))
    model = nnx.eval_shape(build)
    alone = tensor_parallel(model, mesh=mesh)
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(build(), optax.adam(1e-3), wrt=nnx.Param))
    both = fsdp(model, mesh=mesh, base=alone, min_size=0)
    sharded_state = zero1(model, mesh=mesh, base=alone, optimizer=optimizer, min_size=0)
    for sharding in (alone, both, sharded_state, replicated(model, mesh=mesh, base=both)):
        rows = check_sharding(model, sharding, mesh).rows
        notes = {row.path.split("/")[1]: row.reason for row in rows if row.reason}
        assert set(notes) == split
        assert all("heads are split within a head over 'model' (4)" in x for x in notes.values())
    # What the note proposes makes the heads whole; what is added later still shards them.
    for path, note in notes.items():
        [code] = re.findall(r"base=override\(tensor_parallel\(...\), (.*)\)", note)
        rules = eval(code)
        assert list(rules) == [path]
        base = override(alone, rules)
        sharding = fsdp(model, mesh=mesh, base=base, optimizer=optimizer, min_size=0)
        for start in ((), ("opt_state", 0, "mu")):
            full_path = (*start, "attention", path, "kernel")
            assert {*spec_axes(sharding.map_prefix(full_path, model))} == {"data"}


def test_split_heads_are_noted_within_a_wrapper():
    def build():
        attention = FewHeads(nnx.Rngs(0))
        attention.num_kv_heads, base = 2, attention.k_proj
        attention.k_proj = nnx.LoRA(64, 4, 16, base_module=base, rngs=nnx.Rngs(0))
        return attention

    mesh, model = AbstractMesh((2, 4), ("data", "model")), nnx.eval_shape(build)
    rows = check_sharding(model, tensor_parallel(model, mesh=mesh), mesh).rows
    noted = {row.path for row in rows if "heads are split" in (row.reason or "")}
    assert noted == {"k_proj/base_module/kernel", "k_proj/lora_b", "v_proj/kernel"}


def test_split_heads_are_noted_in_wrappers():
    def build():
        model = FewHeads(nnx.Rngs(0))
        model.num_kv_heads = 2
        model.k_proj = nnx.Dict(inner=model.k_proj)
        model.v_proj = nnx.List([nnx.LoRA(64, 2, 16, base_module=model.v_proj, rngs=nnx.Rngs(0))])
        return model

    mesh = AbstractMesh((4,), ("model",))
    model = nnx.eval_shape(build)
    rows = check_sharding(model, tensor_parallel(model, mesh=mesh), mesh).rows
    notes = {row.path for row in rows if "its 2 heads are split" in (row.reason or "")}
    assert notes >= {"k_proj/inner/kernel", "v_proj/0/base_module/kernel"}


class Unnamed(nnx.Module):
    """A kernel that nothing tells what it is for, and a layer."""

    def __init__(self, size):
        self.table = nnx.Param(jnp.zeros((size, size)))
        self.up = nnx.Linear(64, 256, rngs=nnx.Rngs(0))


def test_a_large_replicated_parameter_is_named():
    mesh = AbstractMesh((4,), ("model",))
    with pytest.warns(UnshardedWarning, match="over 'model':\n  table, 94% of all: of no layer"):
        sharding = tensor_parallel(nnx.eval_shape(lambda: Unnamed(512)), mesh=mesh)
    # Warnings are errors here: a spec of the user's, one device, or a small model bring none.
    base = override(sharding, {"^table$": P("model")})
    tensor_parallel(nnx.eval_shape(lambda: Unnamed(512)), mesh=mesh, base=base)
    tensor_parallel(nnx.eval_shape(lambda: Unnamed(512)), mesh=AbstractMesh((1,), ("model",)))
    tensor_parallel(nnx.eval_shape(lambda: Unnamed(128)), mesh=mesh)


def test_the_scale_of_a_norm_of_ones_own_needs_no_spec():
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(64))
            self.up = nnx.Linear(64, 256, rngs=nnx.Rngs(0))

    mesh = AbstractMesh((4,), ("model",))
    for layers in (Scaled, lambda: stack(lambda rngs: Scaled(), 3, rngs=nnx.Rngs(0))):
        model = nnx.eval_shape(layers)
        rows = check_sharding(model, tensor_parallel(model, mesh=mesh), mesh).rows
        [reason] = [row.reason for row in rows if row.path.endswith("scale")]
        assert "a vector of no layer" in reason and "override" not in reason


OF_NO_LAYER = "of no layer that tensor_parallel knows. Give it a spec by override(...)"
NOTES_OF_UNNAMED = {
    "tensor_parallel": {
        "table": f"replicated: 4096 elements, {OF_NO_LAYER}",
        "dropout/rngs/count": "replicated: 1 elements, the count of a random stream",
        "dropout/rngs/key": "replicated: 1 elements, the key of a random stream",
    },
    "fsdp": {"table": f"tensor_parallel leaves it whole: {OF_NO_LAYER}"},
    "fsdp of large ones": {
        "table": "replicated: 4096 elements, fewer than min_size=10000; tensor_parallel leaves it "
        f"whole: {OF_NO_LAYER}",
    },
    "tensor_parallel after fsdp of large ones": {
        "table": f"replicated: 4096 elements, {OF_NO_LAYER}; fsdp leaves it whole: fewer than "
        "min_size=10000",
        "up/bias": "fsdp leaves it whole: fewer than min_size=10000",
    },
    "zero1": {"table": f"replicated: 4096 elements, {OF_NO_LAYER}"},
}


@pytest.mark.parametrize("order", NOTES_OF_UNNAMED)
def test_the_reason_of_each_strategy_is_kept(order):
    def build():
        model = Unnamed(64)
        model.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
        return model

    mesh = AbstractMesh((2, 4), ("data", "model"))
    model = nnx.eval_shape(build)
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(build(), optax.adam(1e-3), wrt=nnx.Param))
    alone = tensor_parallel(model, mesh=mesh)
    shardings = {
        "tensor_parallel": lambda: alone,
        "fsdp": lambda: fsdp(model, mesh=mesh, base=alone, min_size=0),
        "fsdp of large ones": lambda: fsdp(model, mesh=mesh, base=alone, min_size=10_000),
        "tensor_parallel after fsdp of large ones": lambda: tensor_parallel(
            model, mesh=mesh, base=fsdp(model, mesh=mesh, min_size=10_000)
        ),
        "zero1": lambda: zero1(model, mesh=mesh, base=alone, optimizer=optimizer, min_size=0),
    }
    rows = check_sharding(model, shardings[order](), mesh).rows
    reasons = {row.path: row.reason for row in rows if row.reason}
    assert reasons == NOTES_OF_UNNAMED["tensor_parallel"] | NOTES_OF_UNNAMED[order]


class Weight(nnx.Variable):
    pass


def quantized(shape, rngs):
    return {"q": rngs.normal(shape), "scale": jnp.ones(shape[-1:])}


# What makes a module, and why its parameters stay whole over four devices.
REASONS = {
    "row": (lambda r: nnx.Linear(16, 8, rngs=r), {"bias": "added to sums over 'model'"}),
    "scale": (of_class("Own", kernel=(16, 8), scale=(8,)),
              {"scale": "of outputs that are sums over 'model'"}),
    "LoRA": (lambda r: nnx.LoRA(8, 4, 16, rngs=r),
             {"lora_a": "'model' shards lora_b of its layer instead"}),
    "LoRA of a row": (lambda r: nnx.LoRA(16, 4, 8, rngs=r),
                      {"lora_b": "'model' shards lora_a of its layer instead"}),
    "bias": (lambda r: nnx.Linear(16, 18, rngs=r),
             {"bias": "added to sums over 'model'"}),
    "neither": (lambda r: nnx.Linear(9, 7, use_bias=False, rngs=r),
                {"kernel": "'model' (4) divides no dimension to shard: 7 or 9"}),
    "no Param": (lambda r: nnx.Dict(kernel=Weight(r.normal((8, 16)))),
                 {"kernel": "Weight is not an nnx.Param, and tensor_parallel shards only these"}),
    "a dict": (lambda r: nnx.Dict(kernel=nnx.Param(quantized((8, 16), r))), dict.fromkeys(
        ("kernel/q", "kernel/scale"),
        "its arrays have different shapes, and a Variable has one spec: use several")),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_of_what_stays_whole(name):
    make, expected = REASONS[name]
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    mesh = AbstractMesh((4,), ("model",))
    rows = check_sharding(model, tensor_parallel(model, mesh=mesh), mesh).rows
    reasons = {row.path: row.reason.partition("elements, ")[2] for row in rows if row.reason}
    assert reasons == expected


def test_heads_that_the_axis_does_not_divide_are_the_reason():
    mesh = AbstractMesh((4,), ("model",))
    model = nnx.eval_shape(lambda: nnx.MultiHeadAttention(6, 96, decode=False, rngs=nnx.Rngs(0)))
    report = check_sharding(model, tensor_parallel(model, mesh=mesh), mesh)
    reasons = {row.path: row.reason for row in report.rows}
    for layer in ("query", "key", "value", "out"):
        assert "'model' (4) divides no dimension to shard: 6" in reasons[f"{layer}/kernel"]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)


class OwnLinear(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (12, 16)))


class OwnMLP(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (16, 64)))
        self.down = nnx.Param(init(rngs.params(), (64, 16)))


class OwnHeads(nnx.Module):
    def __init__(self, rngs, *shape):
        self.weight = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))


@pytest.mark.parametrize(
    "make, rows",
    [
        (
            lambda rngs: nnx.Dict(v_proj=OwnHeads(rngs, 16, 4, 8), o_proj=OwnHeads(rngs, 4, 8, 16)),
            {("o_proj",)},
        ),
        (lambda rngs: nnx.List([Block(rngs), Block(rngs)]), {(0, "down"), (1, "down")}),
        (FewHeads, {("o_proj",)}),
        (lambda rngs: nnx.Dict(mlp=OwnMLP(rngs), down=OwnLinear(rngs)), {("mlp",), ("down",)}),
        (lambda rngs: nnx.MultiHeadAttention(4, 16, rngs=rngs), {("out",)}),
        (lambda rngs: nnx.Linear(64, 16, use_bias=False, rngs=rngs), {()}),
    ],
)
def test_only_outputs_of_row_layers_are_sharded_by_the_sequence(make, rows):
    mesh = AbstractMesh((4,), ("model",))
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    assert not tensor_parallel(model, mesh=mesh).activations.filters
    filters = tensor_parallel(model, mesh=mesh, sequence=True).activations.filters
    assert {path for filter_ in filters for path in filter_.paths} == rows


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_own_matrices_in_stacked_layers(axis, kind):
    """By name and shape, they may be kernels to and from heads: a note says so, and `scan` too."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    dense = of_class("Dense", weight=(8, 8))

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.q_proj, self.o_proj = dense(rngs), dense(rngs)

        def __call__(self, x):
            return jnp.tanh(x @ self.q_proj.weight[...]) @ self.o_proj.weight[...]

    def build():
        return nnx.vmap(Block, out_axes=axis)(nnx.Rngs(0).split(4))

    def apply(layers, x):
        axes = (axis, Carry)
        return scan(lambda layer, x: layer(x), in_axes=axes, out_axes=Carry)(layers, x)

    model = nnx.eval_shape(build)
    sharding = tensor_parallel(model, mesh=mesh)
    notes = {row.path: row.reason for row in check_sharding(model, sharding, mesh).rows}
    assert "taken as (in, heads, features)" in notes["q_proj/weight"]
    assert "taken as (heads, features, out)" in notes["o_proj/weight"]
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    # Each strategy's mistake is one of the two arrays, whose axis of layers "model" shards.
    wrong = "o_proj" if axis == 0 else "q_proj"
    step = jit(apply, in_shardings=(sharding, P("data")), mesh=mesh)
    if kind is AxisType.Explicit:
        with pytest.raises(ValueError, match=rf"layer\.{wrong}\.weight.*axis {axis}") as error:
            step.lower(model, x)
        assert "override(sharding, {path: spec})" in str(error.value)
    else:  # the compiler gathers; numbers are right
        step.lower(model, x).compile()
    row = P(None, "model") if axis == 0 else P("model")
    corrected = override(sharding, {"q_proj": P(None, None, "model"), "o_proj": row})
    notes = {row.path: row.reason for row in check_sharding(model, corrected, mesh).rows}
    assert not any(notes.values())
    jit(apply, in_shardings=(corrected, P("data")), mesh=mesh).lower(model, x)
