"""Mixtures of experts: the numbers of a loop over all experts, what is sent, and the specs."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit, shard_map, stack, value_and_grad
from nnx_sharding.experimental import dispatch_to_experts, expert_parallel
from nnx_sharding.partition import fsdp, make_mesh, pipeline, specs_by_path, tensor_parallel
from zoo import assert_close, assert_trains_alike

GROUPS, TOKENS, FEATURES, HIDDEN, EXPERTS = 8, 6, 4, 8, 8
MESHES = {
    "expert": {"expert": 8},
    "data": {"data": 2, "expert": 4},
    "all": {"data": 2, "expert": 2, "model": 2},
}
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


class Moe(nnx.Module):
    """Experts with a router; ``dense`` computes the same in a loop over all experts."""

    def __init__(self, k=2, capacity=None, *, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.k, self.capacity = k, capacity
        self.router = nnx.Linear(FEATURES, EXPERTS, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (EXPERTS, FEATURES, HIDDEN)))
        self.up_bias = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, HIDDEN)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, FEATURES)))

    def choices(self, x):
        logits = self.router(x)
        return logits, *jax.lax.top_k(nnx.softmax(logits), self.k)

    def __call__(self, x):
        logits, weights, indices = self.choices(x)
        options = {"num_experts": EXPERTS, "capacity": self.capacity, "logits": logits}
        return dispatch_to_experts(x, weights, indices, self.experts, **options)

    def experts(self, rows, matmul):
        hidden = jnp.tanh(matmul(rows, self.up[...], self.up_bias[...]))
        return matmul(hidden, self.down[...])

    def dense(self, x):
        _, weights, indices = self.choices(x)
        in_order = indices.swapaxes(1, 2).reshape(len(x), -1)
        chosen = nnx.one_hot(in_order, EXPERTS, dtype=int)
        place = (jnp.cumsum(chosen, 1) * chosen).sum(-1) - 1
        kept = place < (x.shape[1] * self.k if self.capacity is None else self.capacity)
        kept = kept.reshape(len(x), self.k, -1).swapaxes(1, 2)
        outputs = 0.0
        for expert in range(EXPERTS):
            up, bias, down = (p[...][expert] for p in (self.up, self.up_bias, self.down))
            share = ((indices == expert) * kept * weights).sum(-1, keepdims=True)
            outputs += share * (jnp.tanh(x @ up + bias) @ down)
        return outputs, (~kept).sum()


def tokens(groups=GROUPS):
    return jax.random.normal(jax.random.key(1), (groups, TOKENS, FEATURES))


def loss(model, x):
    y, statistics = model(x)
    return (y**2).mean(), (y, statistics)


def dense_loss(model, x):
    y, dropped = model.dense(x)
    return (y**2).mean(), (y, dropped)


def cases(count):
    dimensions = {"mesh": MESHES, "kind": KINDS, "k": (1, 2), "capacity": (None, 1, 2)}
    every = [dict(zip(dimensions, x, strict=True)) for x in itertools.product(*dimensions.values())]
    random.Random(0).shuffle(every)
    return [pytest.param(case, id="-".join(map(str, case.values()))) for case in every[:count]]


def sharded(model, mesh, fun, **options):
    """A function of a model and tokens, with the model's experts and the tokens sharded."""
    base = tensor_parallel(model, mesh=mesh) if "model" in mesh.shape else None
    sharding = expert_parallel(model, mesh=mesh, base=base)
    of_tokens = P(tuple(name for name in ("data", "expert") if name in mesh.shape))
    return jit(fun, in_shardings=(sharding, of_tokens), mesh=mesh, **options)


@pytest.mark.parametrize("capacity", [None, 1, 2])
def test_dropped_tokens_and_padding_one_by_one(capacity):
    """Each choice takes the next place of its expert in its group, as long as there is one."""
    model, x = Moe(2, capacity, rngs=nnx.Rngs(0)), tokens()
    mesh = make_mesh({"data": 2, "expert": 4})
    *_, indices = model.choices(x)
    found = sharded(model, mesh, lambda model, x: model(x)[1])(model, x)
    dropped = taken = 0
    for group in np.asarray(indices):  # (tokens, k)
        places = [0] * EXPERTS
        for expert in group.T.ravel():  # first choices before second ones
            has_place = capacity is None or places[expert] < capacity
            places[expert] += has_place
            dropped += not has_place
        taken += sum(places)
    assert int(found.dropped) == dropped
    if capacity is None:
        assert found.padding is None
    else:
        assert int(found.padding) == len(indices) * EXPERTS * capacity - taken


@pytest.mark.parametrize("case", cases(36))
def test_equals_a_loop_over_all_experts(case):
    mesh = make_mesh(MESHES[case["mesh"]], axis_types=KINDS[case["kind"]])
    model, x = Moe(case["k"], case["capacity"], rngs=nnx.Rngs(0)), tokens()
    (value, (y, dropped)), grads = value_and_grad(dense_loss, has_aux=True)(model, x)
    step = sharded(model, mesh, value_and_grad(loss, has_aux=True))
    (own_value, (own_y, statistics)), own_grads = step(model, x)
    np.testing.assert_allclose(own_value, value, rtol=1e-5)
    np.testing.assert_allclose(own_y, y, rtol=1e-4, atol=1e-5)
    assert_close(own_grads, grads, 1e-4)
    assert statistics.dropped == dropped
    assert statistics.tokens.sum() == GROUPS * TOKENS * case["k"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("rows",), ("outer", "data")])
def test_rows_stay_where_jit_has_them(names, kind):
    axes = (*names, "expert")
    devices = jax.devices()[: 2 ** len(axes)]
    mesh = make_mesh(dict.fromkeys(axes, 2), axis_types=KINDS[kind], devices=devices)
    model = Moe(rngs=nnx.Rngs(0))
    in_shardings = expert_parallel(model, mesh=mesh), P(axes)
    step = jit(value_and_grad(loss, has_aux=True), in_shardings=in_shardings, mesh=mesh)
    found = step.lower(model, tokens()).compile().collectives()
    assert {each.axes for each in found.of("all-to-all")} == {("expert",)}
    # Where JAX chooses experts, it gathers what it chooses by; else there are sums.
    gathered = {each.operation.rpartition("/")[2] for each in found.of("all-gather")}
    assert gathered <= {"div", "top_k"}
    kinds = {each.kind for each in found if each.axes != ("expert",)}
    assert kinds - {"all-gather"} == {"all-reduce"}


class Normalized(Moe):
    """Its experts have no gradient at zero."""

    def experts(self, rows, matmul):
        return super().experts(rows / jnp.linalg.norm(rows, axis=-1, keepdims=True), matmul)


@pytest.mark.parametrize("mesh", [None, *MESHES])
@pytest.mark.parametrize("capacity", [None, 1, 2 * TOKENS])
def test_unused_places_have_no_part_in_gradients(capacity, mesh):
    model, x = Normalized(2, capacity, rngs=nnx.Rngs(0)), tokens()
    x /= jnp.linalg.norm(x, axis=-1, keepdims=True)  # so `dense` computes the same
    expected = value_and_grad(dense_loss, has_aux=True)(model, x)[1]
    step = value_and_grad(loss, has_aux=True)
    step = step if mesh is None else sharded(model, make_mesh(MESHES[mesh]), step)
    grads = step(model, x)[1]
    assert_close(grads, expected, 1e-4)


class Scaled(Moe):
    """Its norms have no epsilon, so none has a gradient at zero, and scales, so sums show that."""

    def __init__(self, k=2, capacity=None, *, rngs):
        super().__init__(k, capacity, rngs=rngs)
        self.scale = nnx.Param(1 + jnp.arange(FEATURES) / 8)
        self.hidden_scale = nnx.Param(1 + jnp.arange(HIDDEN) / 8)

    def experts(self, rows, matmul):
        rows /= jnp.linalg.norm(rows, axis=-1, keepdims=True)
        hidden = matmul(self.scale[...] * rows, self.up[...])
        hidden /= jnp.linalg.norm(hidden, axis=-1, keepdims=True)
        return matmul(self.hidden_scale[...] * hidden, self.down[...])

    def in_a_loop(self, x):
        _, weights, indices = self.choices(x)
        outputs = 0.0
        for expert in range(EXPERTS):
            share = ((indices == expert) * weights).sum(-1, keepdims=True)
            outputs += share * self.experts(x, lambda rows, kernel, i=expert: rows @ kernel[i])
        return outputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [None, *MESHES])
@pytest.mark.parametrize("capacity", [None, 2 * TOKENS])
@pytest.mark.parametrize("first_only", [False, True])
def test_unused_places_have_no_part_in_gradients_of_scales(capacity, mesh, kind, first_only):
    """The first experts may get all tokens, so that other devices compute padding only."""
    model, x = Scaled(2, capacity, rngs=nnx.Rngs(0)), tokens()
    if first_only:
        model.router.bias[...] = jnp.where(jnp.arange(EXPERTS) < 2, 100.0, 0)
    expected = value_and_grad(lambda model, x: (model.in_a_loop(x) ** 2).mean())(model, x)
    step = value_and_grad(lambda model, x: (model(x)[0] ** 2).mean())
    if mesh is not None:
        step = sharded(model, make_mesh(MESHES[mesh], axis_types=KINDS[kind]), step)
    assert_close(step(model, x), expected, 1e-4)


@pytest.mark.parametrize("batch_axes", [(), ("rows",)])
def test_other_axes_may_shard_the_groups(batch_axes):
    mesh = make_mesh({"rows": 2, "expert": 4})
    model, x = Moe(capacity=2, rngs=nnx.Rngs(0)), tokens()
    expected, dropped = model.dense(x)
    chosen = model.choices(x)[1:]
    options = {"num_experts": EXPERTS, "capacity": 2, "mesh": mesh, "batch_axes": batch_axes}

    @jax.jit
    def run(x, weights, indices):
        return dispatch_to_experts(x, weights, indices, model.experts, **options)

    y, statistics = run(x, *chosen)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert statistics.dropped == dropped


def test_equals_a_loop_over_all_experts_in_float64():
    with jax.enable_x64(True):
        model = Moe(rngs=nnx.Rngs(0))
        model = nnx.merge(
            nnx.graphdef(model), jax.tree.map(lambda x: x.astype("float64"), nnx.state(model))
        )
        x = tokens().astype("float64")
        for capacity in (None, 2):
            model.capacity = capacity
            y, dropped = jit(lambda model, x: model.dense(x))(model, x)
            own, statistics = jit(lambda model, x: model(x))(model, x)
            assert own.dtype == np.float64
            assert statistics.tokens.dtype == statistics.dropped.dtype == np.int32
            np.testing.assert_allclose(own, y, rtol=1e-13, atol=1e-15)
            assert statistics.dropped == dropped


@pytest.mark.parametrize("capacity", [None, 2])
def test_without_rank_promotion(capacity):
    model, x = Moe(capacity=capacity, rngs=nnx.Rngs(0)), tokens()
    step = sharded(model, make_mesh(MESHES["data"]), value_and_grad(loss, has_aux=True))
    with jax.numpy_rank_promotion("raise"):
        step.lower(model, x)


def test_what_is_sent():
    mesh = make_mesh(MESHES["data"])
    for capacity, rows in ((2, EXPERTS * 2 * 2), (None, 4 * 2 * (2 * TOKENS))):
        model, x = Moe(2, capacity, rngs=nnx.Rngs(0)), jnp.ones((16, TOKENS, FEATURES))
        fun = value_and_grad(lambda model, x: (model(x)[0] ** 2).mean())
        sent = sharded(model, mesh, fun).lower(model, x).compile().collectives()
        moved = [each for each in sent if each.kind == "all-to-all" and each.bytes > 100]
        # To the experts and back, and gradients of the outputs; the tokens have none here.
        assert sum(each.times for each in moved) == 3
        assert {each.purpose for each in moved} == {"reshard"}
        assert {each.axes for each in moved} == {("expert",)}
        assert (
            sum(each.bytes_sent * each.times for each in moved) == 3 * rows * FEATURES * 4 * 3 / 4
        )


def test_statistics():
    model, x = Moe(1, 1, rngs=nnx.Rngs(0)), tokens()
    logits, _, indices = model.choices(x)
    statistics = jit(lambda model, x: model(x))(model, x)[1]
    counts = np.bincount(np.ravel(indices), minlength=EXPERTS)
    np.testing.assert_array_equal(statistics.tokens, counts)
    probability = np.asarray(nnx.softmax(logits)).mean((0, 1))
    balance = EXPERTS * (counts / counts.sum() * probability).sum()
    np.testing.assert_allclose(statistics.balance_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(
        statistics.z_loss, np.mean(np.log(np.exp(np.asarray(logits)).sum(-1)) ** 2), rtol=1e-5
    )
    model.router.kernel[...] *= 0
    equal = jnp.tile(jnp.arange(TOKENS)[:, None] % 2, (GROUPS, 1, 1))
    weights, uniform = jnp.ones(equal.shape), jnp.zeros((GROUPS, TOKENS, 2))
    _, statistics = dispatch_to_experts(
        x, weights, equal, lambda rows, matmul: rows, num_experts=2, logits=uniform
    )
    assert statistics.balance_loss == 1
    _, statistics = dispatch_to_experts(x, weights, equal, lambda rows, matmul: rows, num_experts=2)
    assert statistics.balance_loss is None


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_fsdp_equals_one_device(kind):
    def objective(model, x):
        y, statistics = model(x)
        return ((y - x) ** 2).mean() + 0.01 * statistics.balance_loss

    def strategy(model, mesh, optimizer):
        base = tensor_parallel(model, mesh=mesh)
        base = expert_parallel(model, experts=EXPERTS, mesh=mesh, base=base)
        return fsdp(model, base=base, mesh=mesh, optimizer=optimizer, min_size=0)

    def make(rngs):
        return Moe(rngs=rngs)

    mesh = make_mesh(MESHES["all"], axis_types=KINDS[kind])
    options = {"loss": objective, "batch": tokens, "spec": P(("data", "expert"))}
    _, (model, *_) = assert_trains_alike(make, strategy, mesh, **options)
    assert set(jax.tree.leaves(tuple(model.up.sharding.spec))) == {"data", "expert", "model"}


class Outputs(Moe):
    def __call__(self, x):
        return x + super().__call__(x)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 2])
def test_in_a_pipeline(kind, capacity):
    """JAX cannot lower a ``shard_map`` over some axes in a ``vmap`` over another one."""
    mesh = make_mesh({"data": 2, "stage": 2, "expert": 2}, axis_types=KINDS[kind])
    model, x = stack([Outputs(2, capacity, rngs=nnx.Rngs(i)) for i in range(2)]), tokens()
    base = expert_parallel(model, mesh=mesh)
    sharding = pipeline(model, mesh=mesh, base=base, microbatches=2)
    step = value_and_grad(lambda model, x: (model(x) ** 2).mean())
    expected = step(model, x)
    run = jit(step, mesh=mesh, in_shardings=(sharding, P(("expert", "data"))))
    assert_close(run(model, x), expected, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 2])
def test_in_a_shard_map_over_the_rows(kind, capacity):
    """``jit`` shards the groups over ``data``, too, which is mapped at the call of the experts."""
    mesh = make_mesh({"data": 2, "expert": 4}, axis_types=KINDS[kind])
    model, x = Outputs(2, capacity, rngs=nnx.Rngs(0)), tokens()

    def objective(model, x):
        return (model(x) ** 2).mean()

    def of_shard(model, x):
        value, grads = value_and_grad(objective)(model, x)
        return jax.tree.map(lambda x: jax.lax.pmean(x, "data"), (value, grads))

    mapped = shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    expected = value_and_grad(objective)(model, x)
    sharding = expert_parallel(model, mesh=mesh)
    run = jit(mapped, mesh=mesh, in_shardings=(sharding, P(("data", "expert"))))
    assert_close(run(model, x), expected, 1e-4)


def test_in_a_stack_with_recomputation():
    mesh = make_mesh(MESHES["data"])
    blocks = [Moe(rngs=nnx.Rngs(i)) for i in range(3)]
    model = stack(blocks, remat=True)
    assert specs_by_path(model, expert_parallel(model, experts=EXPERTS, mesh=mesh))

    def objective(model, x):
        return (model(x) ** 2).mean()

    model = stack([Outputs(rngs=nnx.Rngs(i)) for i in range(3)], remat=True)
    x = tokens()
    expected = value_and_grad(objective)(model, x)
    assert_close(sharded(model, mesh, value_and_grad(objective))(model, x), expected, 1e-4)


class Attending(nnx.Module):
    """Its attention has as many heads as there are experts."""

    def __init__(self, *, rngs):
        self.attention = nnx.MultiHeadAttention(EXPERTS, 16, decode=False, rngs=rngs)
        self.moe = Moe(rngs=rngs)


def test_which_weights_are_sharded():
    mesh = AbstractMesh((2, 4), ("model", "expert"))
    model = nnx.eval_shape(lambda: Attending(rngs=nnx.Rngs(0)))
    base = tensor_parallel(model, mesh=mesh)
    sharding = expert_parallel(model, experts=8, mesh=mesh, base=base)
    assert sharding == expert_parallel(model, mesh=mesh, base=base)  # by the router
    specs = {path: spec for path, spec in specs_by_path(model, sharding).items() if "moe" in path}
    assert {path[-1]: spec for path, spec in specs.items() if "router" not in path} == {
        "up": P("expert", None, "model"),
        "up_bias": P("expert", None),
        "down": P("expert", "model", None),
    }
    assert "expert" not in str(specs_by_path(model, sharding)[("attention", "out", "kernel")])
    chosen = expert_parallel(model, experts=8, mesh=mesh, where=nnx.PathContains("down"))
    sharded_paths = {path for path, spec in specs_by_path(model, chosen).items() if spec != P()}
    assert sharded_paths == {("moe", "down")}


def test_weights_stacked_by_vmap():
    mesh = AbstractMesh((4,), ("expert",))
    make = nnx.vmap(lambda rngs: nnx.Linear(4, 6, rngs=rngs))
    model = nnx.eval_shape(lambda: nnx.Dict(experts=make(nnx.Rngs(0).split(8))))
    sharding = expert_parallel(model, experts=8, mesh=mesh, where=nnx.PathContains("experts"))
    assert sharding.map_prefix(("experts", "kernel"), model.experts.kernel) == P(
        "expert", None, None
    )


class Raw(nnx.Module):
    """Experts and a router as parameters of one module, beside matrices that are none."""

    def __init__(self, sizes):
        self.gate_w = nnx.Param(jnp.ones((FEATURES, sizes[0])))
        self.first, self.second = (
            nnx.Param(jnp.ones((size, *shape)))
            for size, shape in zip(sizes, ((FEATURES, HIDDEN), (HIDDEN, FEATURES)), strict=True)
        )
        self.tokens, self.logits = nnx.Param(jnp.ones((32, 4))), nnx.Param(jnp.ones((4, 32)))


def test_weights_of_any_name():
    mesh = AbstractMesh((2, 4), ("model", "expert"))
    for wrap in (nnx.Dict, lambda **x: stack([x["moe"]] * 3)):
        model = nnx.eval_shape(lambda wrap=wrap: wrap(moe=Raw((8, 8))))
        sharding = expert_parallel(model, mesh=mesh, base=tensor_parallel(model, mesh=mesh))
        specs = specs_by_path(model, sharding)
        assert {path[-1]: spec.partitions[-3:] for path, spec in specs.items()} == {
            "gate_w": (),
            "first": ("expert", None, "model"),
            "second": ("expert", "model", None),
            "tokens": ("model", None),  # the vocabulary
            "logits": (None, "model"),
        }


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda: Raw((8, 6)), None),
        (lambda: nnx.Dict(a=Raw((8, 8)), b=Raw((4, 4))), "may be 4 or 8"),
        (lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), "is not known"),
    ],
)
def test_the_number_of_experts_by_the_router(make, known):
    model, mesh = nnx.eval_shape(make), AbstractMesh((4,), ("expert",))
    if known is None:
        sharding = expert_parallel(model, mesh=mesh)
        assert [path for path, spec in specs_by_path(model, sharding).items() if spec != P()] == [
            ("first",)
        ]
        return
    with pytest.raises(ValueError, match=f"number of experts {known}. Pass experts="):
        expert_parallel(model, mesh=mesh)


def test_models_without_such_weights():
    mesh, model = AbstractMesh((3,), ("expert",)), nnx.eval_shape(lambda: Moe(rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="no weights of 7 experts"):
        expert_parallel(model, experts=7, mesh=mesh)
    with pytest.raises(ValueError, match=r"(?s)model\.down: .*model\.up: .*model\.up_bias: "):
        expert_parallel(model, experts=8, mesh=mesh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((6, 4))}, r"x: shape \(6, 4\), expected \(groups, tokens, features\)"),
        ({"indices": jnp.ones((8, 6, 2))}, "indices: float32"),
        ({"weights": jnp.ones((8, 6, 3))}, r"weights: shape \(8, 6, 3\), but indices have"),
        ({"x": jnp.ones((8, 0, 4))}, r"x: shape \(8, 0, 4\), expected at least one group, token"),
        ({"logits": jnp.ones((8, 6, 3))}, r"logits: shape \(8, 6, 3\), expected \(8, 6, 8\)"),
        ({"capacity": 0}, "capacity=0: expected at least 1"),
        ({"axis": "experts"}, "axis 'experts'.*'expert'"),
        ({"num_experts": 6}, "6 experts: 'expert' of size 4 does not divide them"),
        ({"x": jnp.ones((6, 6, 4)), "indices": jnp.ones((6, 6, 2), int),
          "weights": jnp.ones((6, 6, 2))}, "6 groups: 8 shards over data, expert"),
        ({"experts": lambda rows, matmul: rows[:3], "mesh": None}, r"float32\[3,4\] for 96 rows"),
        ({"experts": lambda rows, matmul: rows[0], "mesh": None}, r"float32\[4\] for 96 rows"),
    ],
)  # fmt: skip
def test_mistakes(change, message):
    arguments = {
        "x": tokens(),
        "weights": jnp.ones((8, 6, 2)),
        "indices": jnp.ones((8, 6, 2), int),
        "experts": lambda rows, matmul: rows,
        "num_experts": 8,
        "mesh": make_mesh(MESHES["data"]),
    }
    with pytest.raises(ValueError, match=message):
        dispatch_to_experts(**{**arguments, **change})


def test_an_axis_that_is_mapped_already():
    mesh, x = make_mesh(MESHES["data"]), tokens()
    weights, indices = jnp.ones((8, 6, 2)), jnp.ones((8, 6, 2), int)

    def call(x):
        return dispatch_to_experts(
            x, weights, indices, lambda rows, _: rows, num_experts=8, mesh=mesh, batch_axes=["data"]
        )

    mapped = shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"})
    with pytest.raises(ValueError, match="'data': the call is in a shard_map over it already"):
        jit(mapped)(x)


def test_kernels_of_other_shapes():
    def wrong(rows, matmul):
        return matmul(rows, jnp.ones((FEATURES, HIDDEN)))

    indices = jnp.zeros((GROUPS, TOKENS, 1), int)
    with pytest.raises(ValueError, match=r"kernel: shape \(4, 8\), expected \(8, 4, 'out'\)"):
        dispatch_to_experts(tokens(), jnp.ones(indices.shape), indices, wrong, num_experts=8)
