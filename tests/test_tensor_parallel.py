"""Which dimension of which parameter tensor parallelism shards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit
from nnx_sharding.partition import fsdp, override, tensor_parallel
from nnx_sharding.partition.variables import variables
from zoo import MESH, MODELS, Normed, misfits, table

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
    )
    def test_names(self, name, role):
        specs = COLUMN if role == "column" else ROW

        def plain(rngs):
            return nnx.Dict({name: nnx.Linear(8, 8, rngs=rngs)})

        def wrapped(rngs):
            layer = nnx.Linear(8, 8, rngs=rngs)
            return nnx.Dict({name: nnx.List([nnx.LoRA(8, 4, 8, base_module=layer, rngs=rngs)])})

        self.check(plain, {f"{name}/{part}": spec for part, spec in specs.items()})
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

    def test_modules_of_the_user_with_other_subscripts(self):
        class Einsum(nnx.Module):
            def __init__(self, subscripts, *shapes):
                self.einsum_str = subscripts
                for i, shape in enumerate(shapes):
                    setattr(self, f"w{i}", nnx.Param(jnp.ones(shape)))

        self.check(lambda _: Einsum("BD,DF->BF", (8, 16), (8, 16)), {})  # which is it?
        self.check(lambda _: Einsum("BD,EDF->BEF", (8, 16)), {})
        self.check(lambda _: Einsum("BD,DF,F->BF", (8, 16)), {})
        self.check(lambda _: Einsum("a sentence, not a formula", (8, 16)), {})

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
