"""Programs for TPU topologies: meshes, comparisons and the command line."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from configurations import without_cache
from module_programs import LAYERS, ROWS, WIDTH, Mlp
from nnx_sharding import accumulate_gradients, jit, planning, stack, value_and_grad
from nnx_sharding.cli.main import main
from nnx_sharding.experimental import (
    all_gather_attention,
    all_to_all_attention,
    dispatch_to_experts,
    ring_attention,
)
from nnx_sharding.partition import fsdp, make_mesh, pipeline, planning_mesh
from nnx_sharding.partition.mesh import topology_devices
from nnx_sharding.report import Comparison, Strategy, compare
from nnx_sharding.testing import assert_no_collective, assert_overlappable
from test_figure_grid import ProgramForTpu, check
from zoo import MLP, Block

HAS_COMPILER = importlib.util.find_spec("libtpu") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="libtpu is not installed")


def compiled(mesh):
    fun = jit(lambda x: x.sum(0), in_shardings=P("data"), out_shardings=P(), mesh=mesh)
    return fun.lower(jax.ShapeDtypeStruct((1024, 256), "float32")).compile()


PLAN = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from nnx_sharding import jit
from nnx_sharding.report import Strategy, compare


def apply(w, x):
    return x @ w


ARGUMENTS = (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32"))


def forward(mesh):
    return jit(apply, in_shardings=(P(), P("data")), mesh=mesh), *ARGUMENTS


def own():
    return compare({"dp": (P(), P("data"))}, apply, *ARGUMENTS, mesh={"data": 8})


def ways(mesh):
    sizes = {"data": mesh.size // 2, "model": 2}
    split = Strategy((P(None, "model"), P("data")), mesh=sizes)
    return {"dp": (P(), P("data")), "tp": split}, apply, *ARGUMENTS
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / f"{tmp_path.name}_plan.py"  # Python would not look twice at one name
    path.write_text(PLAN)
    return path


@pytest.mark.skipif(HAS_COMPILER, reason="libtpu is installed")
def test_the_compiler_is_missing(plan, capsys):
    with pytest.raises(ImportError, match=r"'v5e:4x4' .* pip install 'nnx_sharding\[tpu\]'"):
        planning_mesh("v5e:4x4", {"data": 16})
    with pytest.raises(ImportError, match="needs the TPU compiler"):
        compare({"dp": P()}, abs, 1.0, mesh={"data": 16}, topology="v5e:4x4")
    assert main(["inspect", f"{plan}:forward", "--topology", "v5e:4x4", "--mesh", "data=16"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("inspect: the topology 'v5e:4x4' needs the TPU compiler")
    assert '--mesh data=16 --hardware "TPU v5e" instead of --topology.' in line
    for topology, slices, options in (
        ("v5e:16x16", 1, '--devices 256 --hardware "TPU v5e"'),
        ("v5p:2x2x2", 4, '--devices 32 --hardware "TPU v5p"'),
        ("tpu7x:2x2x1", 1, '--devices 8 --hardware "TPU7x"'),
        ("v9:large", 1, '--devices 64 --hardware "TPU v5e"'),
    ):
        given = ["--topology", topology, "--slices", str(slices)]
        assert main(["plan", f"{plan}:forward", *given]) == 1
        assert f"this means {options} instead" in capsys.readouterr().err


def test_slices_need_a_topology(plan, capsys):
    assert main(["compare", f"{plan}:ways", "--slices", "2", "--mesh", "data=8"]) == 2
    assert "--slices needs --topology" in capsys.readouterr().err
    with pytest.raises(TypeError, match="num_slices needs a topology"):
        compare({"dp": P()}, abs, 1.0, num_slices=2)


def test_topologies_and_axes_come_together():
    for wrong in (("v5e:4x4",), ({"data": 8}, {"data": 8}), ("v5e:4x4", (4, 4))):
        with pytest.raises(TypeError, match="a topology needs the sizes of axes"):
            planning_mesh(*wrong)
    with pytest.raises(TypeError, match="a topology needs the sizes of axes"):
        planning_mesh({"data": 8}, num_slices=2)
    with pytest.raises(ValueError, match="num_slices of at least 1, got 0"):
        planning_mesh("v5e:4x4", {"data": 16}, num_slices=0)


def test_shardings_of_abstract_arguments_are_left_to_the_strategies():
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    x = jax.ShapeDtypeStruct((16, 4), "float32", sharding=sharding, weak_type=True)
    way = Strategy(P("rows"), mesh={"rows": 4})
    found = compare({"rows": way}, lambda x: x * jax.numpy.ones((), "bfloat16"), x)
    assert "->bf16[4,4]" in found.compiled["rows"].hlo  # the type is still weak
    assert found.compiled["rows"].mesh.axes == {"rows": 4}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("v4:2x2x1", "TPU v4", 4),
        ("v5e:16x16", "TPU v5 lite", 256),
        ("v5p:2x2x2", "TPU v5", 8),
        ("v6e:4x4", "TPU v6 lite", 16),
        ("tpu7x:2x2x1", "TPU7x", 8),  # two devices are one chip
    ],
)
def test_devices(name, kind, count):
    mesh = planning_mesh(name, {"data": -1, "model": 2})
    assert mesh.shape == {"data": count // 2, "model": 2}
    assert mesh.devices.flat[0].device_kind == kind
    assert len({*mesh.devices.flat}) == count


@needs_compiler
def test_equal_meshes():
    mesh = planning_mesh("v5e:2x4", {"data": 8})
    assert mesh == planning_mesh("v5e:2x4", {"data": -1}) != planning_mesh("v6e:2x4", {"data": 8})
    like = AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
    assert planning_mesh("v5e:2x4", like).abstract_mesh.axis_types == like.axis_types


@needs_compiler
def test_plan():
    x = jax.ShapeDtypeStruct((16, 128), "bfloat16")
    w = nnx.eval_shape(lambda: nnx.Param(jnp.ones((128, 128), "bfloat16")))
    options = {"topology": "v5e:2x2", "num_slices": 2, "strategies": "dp"}
    found = planning.plan(lambda w, x: x @ w[...], w, x, **options)
    assert found.best.sizes == {"replica": 2, "data": 4}
    [report] = found.comparison.compiled.values()
    assert (report.device_kind, report.num_devices) == ("TPU v5 lite", 8)
    assert report.roofline.hardware == "TPU v5e"
    assert report.memory.arguments == 128 * 128 * 2 + 2 * 128 * 2


@needs_compiler
def test_memory_and_flops_by_module_sum_to_the_total():
    mesh = planning_mesh("v5e:2x2", {"data": 4})
    fun = value_and_grad(lambda model, x: (model(x) ** 2).mean())
    model = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    with without_cache():  # from which programs for topologies cannot be loaded
        program = jit(fun, in_shardings=(P(), P("data")), mesh=mesh).lower(model, x).compile()
        table = program.by_module(hardware="TPU v5e")
        allocated = sum(one.size for one in program._figures.dumped.buffers.allocations)
    memory = program.memory()
    # Constants are no allocations of the call.
    assert 0 <= memory.peak - memory.generated_code - allocated < 2**16
    assert table.peak == memory.peak  # one figure, with the code
    cost, roofline = program.cost(), program.roofline("TPU v5e")
    assert table.total().flops == pytest.approx(cost.flops, rel=0.01)
    assert table.total("model").flops >= 0.95 * cost.flops
    # The gradient of the input is not needed.
    product = 2 * ROWS // 4 * WIDTH * 4 * WIDTH
    assert cost.flops >= (3 * 2 * LAYERS - 1) * product
    # Modules run one after another: their times sum to that of the program or more.
    assert roofline.seconds is not None
    assert table.total().seconds >= 0.99 * roofline.seconds


@needs_compiler
def test_slices_are_along_the_first_axes():
    mesh = planning_mesh("v5e:2x4", {"data": 4, "model": 8}, num_slices=4)
    assert [{d.slice_index for d in row} for row in mesh.devices] == [{0}, {1}, {2}, {3}]
    mesh = planning_mesh("v5e:2x4", {"replica": 2, "data": -1}, num_slices=4)
    assert [{d.slice_index for d in row} for row in mesh.devices] == [{0, 1}, {2, 3}]
    # Part of an axis is between slices: what that takes is not known.
    report = compiled(planning_mesh("v5e:2x4", {"data": 16}, num_slices=2)).report()
    assert report.collectives and report.roofline.interconnect_s is None
    report = compiled(planning_mesh("v5e:2x4", {"replica": 2, "data": 8}, num_slices=2)).report()
    assert_no_collective(report, axes="replica")


@needs_compiler
def test_plans_of_several_slices_are_ranked_by_time():
    def make():
        model = nnx.Linear(512, 512, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x).astype(jnp.float32) ** 2))(model)
        optimizer.update(model, grads)

    x = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)
    options = {"topology": "v5e:2x2", "num_slices": 2, "strategies": ["fsdp", "hsdp"]}
    found = planning.plan(step, *nnx.eval_shape(make), x, **options)
    assert [one.strategy for one in found.candidates.values()] == ["hsdp", "fsdp"]
    seconds = [each["roofline"] for each in found.comparison.figures.values()]
    assert seconds == sorted(seconds) and None not in seconds
    for report in found.comparison.compiled.values():
        rows = {row.axes: row for row in report.roofline.traffic}
        assert rows["replica",].links == "DCN" and rows["data",].links.startswith("ICI")


@needs_compiler
def test_names_and_sizes_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"unknown TPU topology 'v9:2x2': .* Examples are 'v5e:4x4'"
    ):
        planning_mesh("v9:2x2", {"data": 4})
    with pytest.raises(ValueError, match="unknown TPU topology 'v5e:3x5'"):
        planning_mesh("v5e:3x5", {"data": 15})
    with pytest.raises(ValueError, match="do not take the 8 devices"):
        planning_mesh("v5e:2x4", {"data": 3})


@needs_compiler
def test_the_real_compiler_compiles():
    before = dict(os.environ)
    report = compiled(planning_mesh("v5e:2x4", {"data": 8})).report()
    assert dict(os.environ) == before
    assert (report.platform, report.device_kind) == ("tpu", "TPU v5 lite")
    assert report.roofline.hardware == "TPU v5e"
    assert report.memory.arguments == 1024 * 256 * 4 // 8
    assert report.collectives.bytes_sent == 2 * 256 * 4 * 7 // 8
    [row] = report.roofline.traffic
    assert row.links == "ICI x (line of 2) + y (line of 4)"
    # The chip in the corner has two links.
    assert row.seconds == pytest.approx(1e-6 + 2 * 256 * 4 * 7 / 8 / 2 / 50e9)
    assert report.cost.optimal_seconds > 0
    assert "the compiler's own estimate" in str(report)


@needs_compiler
def test_strategies_on_a_topology():
    x = jax.ShapeDtypeStruct((256, 64), "float32")
    ways = {
        "sizes": P("data"),
        "own sizes": Strategy(P(("data", "model")), mesh={"data": -1, "model": 2}),
        "own mesh": Strategy(P("data"), mesh=jax.make_mesh((8,), ("data",))),
    }
    options = {"mesh": {"data": 16}, "topology": "v5e:2x4", "num_slices": 2}
    found = compare(ways, lambda x: x * 2, x, **options)
    kinds = {name: (r.num_devices, r.platform) for name, r in found.compiled.items()}
    assert kinds == {"sizes": (16, "tpu"), "own sizes": (16, "tpu"), "own mesh": (8, "cpu")}
    assert found.memory_limit is None  # the devices differ
    assert "compiled for 16 × TPU v5 lite, 8 × cpu" in str(found)
    found = Comparison({"sizes": found.compiled["sizes"]}).judged()
    assert found.memory_limit == round(15.75 * 2**30) and found.figures["sizes"]["roofline"] > 0
    assert found.judged(memory_limit="1 KiB").fitting == ()


@needs_compiler
def test_command_lines_side_by_side(plan):
    words = ["--topology", "v5e:2x4", "--mesh", "data=-1", "--slices", "2"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_", "XLA"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "nnx_sharding", command, f"{plan}:{function}", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, function in (("inspect", "forward"), ("compare", "ways"))
    ]
    outputs = [process.communicate() for process in processes]
    assert [error for _, error in outputs] == ["", ""]  # nothing of the TPU library either
    assert [process.returncode for process in processes] == [0, 0]
    assert "16 × TPU v5 lite" in outputs[0][0] and "16 × TPU v5 lite" in outputs[1][0]
    assert "data 8 × model 2" in outputs[1][0]


@needs_compiler
def test_a_comparison_that_a_function_makes(plan, capsys):
    assert main(["compare", f"{plan}:own", "--topology", "v5e:2x4"]) == 0
    assert "compiled for 8 × TPU v5 lite" in capsys.readouterr().out
    assert planning_mesh({"data": 8}).devices.flat[0].platform == "cpu"


@needs_compiler
def test_command_lines_that_do_not_fit(plan, capsys):
    for name, sizes in (("v9:2x2", "data=4"), ("v5e:2x4", "data=3")):
        assert main(["inspect", f"{plan}:forward", "--topology", name, "--mesh", sizes]) == 2
    error = capsys.readouterr().err
    assert "unknown TPU topology 'v9:2x2'" in error and "do not take the 8 devices" in error
    words = ["--topology", "v5e:2x4", "--mesh", "data=8", "--memory-limit", "1KiB"]
    assert main(["inspect", f"{plan}:forward", *words]) == 1


@needs_compiler
def test_gradients_of_a_list_are_scattered(uncached):
    """On Explicit axes. On Auto axes, the compiler sums up those of some programs instead."""
    mesh = make_mesh({"data": 8}, devices=topology_devices("v5e:2x4"))
    adam = optax.adam(1e-3)

    def make():
        options = {"dtype": jnp.bfloat16, "use_bias": False, "rngs": nnx.Rngs(0)}
        sizes = 2 * [(512, 2048), (2048, 512)]
        model = nnx.Sequential(*(nnx.Linear(*size, **options) for size in sizes))
        return model, nnx.Optimizer(model, adam, wrt=nnx.Param)

    def train(model, optimizer, x):
        gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)

    model, optimizer = nnx.eval_shape(make)
    sharding = fsdp(model, mesh=mesh, optimizer=optimizer)
    step = jit(train, in_shardings=(sharding, sharding, P("data")), mesh=mesh)
    x = jax.ShapeDtypeStruct((8 * 512, 512), jnp.bfloat16)
    sent = step.lower(model, optimizer, x).compile().collectives().by_purpose()
    kernels = 4 * 512 * 2048 * 2
    assert sent["parameter"] == pytest.approx(kernels * 7 / 8, rel=0.01)
    assert sent["gradient"] == pytest.approx(kernels * 7 / 8, rel=0.01)  # twice if all-reduced


@needs_compiler
@pytest.mark.parametrize("axis_types", [AxisType.Auto, AxisType.Explicit])
def test_a_stack_gathers_the_next_layer_beside_the_products_of_one(axis_types, uncached):
    devices = topology_devices("v5e:2x4")
    mesh = make_mesh({"data": 8}, axis_types=axis_types, devices=devices)
    model = nnx.eval_shape(lambda: stack(Block, 4, width=512, rngs=nnx.Rngs(0), remat=True))
    x = jax.ShapeDtypeStruct((8 * 512, 512), jnp.float32)
    programs = []
    for prefetch in (0, 1):
        sharding = fsdp(model, mesh=mesh, prefetch=prefetch)
        step = jit(
            value_and_grad(lambda model, x: (model(x) ** 2).mean()),
            in_shardings=(sharding, P("data")),
            mesh=mesh,
        )
        programs.append(step.lower(model, x).compile())
    before, after = programs
    assert_overlappable(after)
    with pytest.raises(AssertionError, match="independent of 0 of"):
        assert_overlappable(before)
    layer = 4 * (2 * 512 * 2048 + 512 + 2048)
    assert after.memory().peak <= before.memory().peak + 2 * layer
    shares = [each.roofline("TPU v5e").hidden_share for each in programs]
    assert shares[1] > 2 * shares[0]
    # Forward, behind both products of each layer, of 512 rows on a device.
    first = after.roofline("TPU v5e").hidden[0]
    assert first.kind == "all-gather"
    products = 4 * 2 * (2 * 512 * 512 * 2048) / 1.97e14
    assert first.compute_s == pytest.approx(products, rel=0.02)
    assert first.bytes_sent == 4 * 7 * (2 * 512 * 2048) // 8  # in bfloat16


@needs_compiler
@pytest.mark.parametrize("repeats", [1, 2])
def test_blocks_of_a_list_move_to_stages_of_tpus(repeats, uncached):
    devices = topology_devices("v5e:2x4")
    mesh = make_mesh({"stage": 4, "data": 2}, axis_types=AxisType.Auto, devices=devices)
    model = nnx.eval_shape(
        lambda: nnx.Sequential(*(Block(nnx.Rngs(i), width=512) for i in range(8)))
    )
    base = fsdp(model, mesh=mesh, min_size=0)
    sharding = pipeline(model, mesh=mesh, microbatches=4, repeats=repeats, base=base)
    gradient = value_and_grad(lambda model, x: (model(x) ** 2).mean())
    step = jit(gradient, in_shardings=(sharding, P("data")), mesh=mesh)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    moved = step.lower(model, x).compile().collectives().of("all-to-all", "stage")
    assert {each.times for each in moved} == {1}
    # Two kernels of eight layers, in bfloat16, and their gradients, in float32.
    held = (2 * 512 * 2048) * 8 // 8
    assert sum(each.bytes for each in moved) == pytest.approx((2 + 4) * held, rel=0.01)


@needs_compiler
def test_peaks_of_the_schedules_of_a_pipeline(uncached):
    """By hand: a stage keeps the inputs of M + S - 1 microbatches, with 1F1B those of 2S - 1."""
    stages, microbatches, rows, width = 4, 8, 2**15, 512
    mesh = planning_mesh("v5e:2x4", {"stage": stages, "data": 2})
    model = nnx.eval_shape(lambda: stack(nnx.Linear, 8, width, width, remat=True, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def loss(model, x):
        return (model(x) ** 2).mean()

    def compiled(schedule, gradient):
        sharding = pipeline(model, mesh=mesh, microbatches=microbatches, schedule=schedule)
        step = jit(gradient, in_shardings=(sharding, P("data")), mesh=mesh)
        return step.lower(model, x).compile()

    all_at_once = compiled("gpipe", value_and_grad(loss))
    in_turn = compiled("1f1b", accumulate_gradients(loss, steps=microbatches))
    microbatch = rows // microbatches // 2 * width * 4
    spared = (microbatches + stages - 1) - (2 * stages - 1)
    difference = all_at_once.memory().peak - in_turn.memory().peak
    # Also the batch at the input and at the output of the layers, which 1F1B has in parts.
    assert spared * microbatch <= difference <= (spared + 3 * microbatches) * microbatch
    # A device reduces the gradients of its two layers once, where GPipe does in each tick.
    held = 2 * (width * width + width) * 4
    reduced = [x for x in in_turn.collectives() if x.axes == ("data",) and x.bytes > 4]
    assert sum(x.bytes * x.times for x in reduced) == pytest.approx(held, rel=0.01)


@needs_compiler
@pytest.mark.parametrize("part", range(4))
def test_figures_of_random_programs_by_definition(part, uncached):
    """At least 500 cells in all, of which a few are None, each with a reason."""
    programs = map(ProgramForTpu, range(part, 320, 4))
    count, unknown = check(program for program in programs if program.is_as_written)
    assert count >= 500 / 4 and unknown < count / 3


@needs_compiler
def test_a_cache_update_touches_its_rows():
    """Of 32 sequences of 512 tokens, one row each: updates are read and rows written."""
    mesh = planning_mesh("v5e:2x4", {"data": 8})

    def update(cache, place, new):
        return cache.at[jnp.arange(32), place].set(new)

    shapes = ((32, 512, 1024), "bfloat16"), ((32,), "int32"), ((32, 1024), "bfloat16")
    step = jit(update, donate_argnums=0, mesh=mesh, in_shardings=(P(), P(), P()))
    with without_cache():
        compiled = step.lower(*(jax.ShapeDtypeStruct(*x) for x in shapes)).compile()
    assert compiled.cost().bytes_accessed == pytest.approx(2 * 32 * 1024 * 2, rel=0.05)


@needs_compiler
def test_keys_and_values_move_around_a_ring_of_tpus():
    mesh = planning_mesh("v5e:2x4", {"context": 8})
    like = jax.ShapeDtypeStruct((1, 1024, 4, 128), "bfloat16")
    fun = jax.grad(lambda *x: ring_attention(*x, is_causal=True).sum().astype("float32"), (0, 1, 2))
    step = jit(fun, in_shardings=P(None, "context"), mesh=mesh)
    with without_cache():
        sent = step.lower(like, like, like).compile().collectives()
    assert {each.kind for each in sent} == {"collective-permute"}
    block = 1024 // 8 * 4 * 128  # of keys or values; XLA sends some gradients in bfloat16
    assert sent.bytes_sent == pytest.approx(2 * 7 * 2 * (2 * block) + 8 * 2 * (4 * block), rel=0.05)


class AttentionByHand(NamedTuple):
    """What causal attention in the balanced order needs on one of 16 chips, in bytes.

    The model is one of 8 billion parameters: 32 heads, 8 key heads, 128 features, in bfloat16. All
    terms are of the backward pass, in which the peak is. Queries (Q) stand for what has their
    shape and dtype, such as outputs; keys (K) likewise for values.
    """

    length: int
    has_vmem: bool  # whether the compiler keeps what a loop writes in vector memory, as for v5e

    # What v5e has of vector memory, 128 MiB, but for the 16 MiB that it sets aside for kernels.
    VMEM = 112 * 2**20
    DEVICES = 16

    def queries(self):
        return self.length // self.DEVICES * 32 * 128 * 2

    def keys(self):
        return self.length // self.DEVICES * 8 * 128 * 2

    def passed(self):
        """Queries, keys, values and the gradient of the outputs; outputs and three gradients."""
        return 4 * self.queries() + 4 * self.keys()

    def scores(self, heads):
        """Scores of a block of queries and one of keys: weights in float32, as factors in bfloat16.

        The factors fit into vector memory; weights in float32 only if there are few heads.
        """
        weights, factors = heads * 1024**2 * 4, heads * 1024**2 * 2
        if not self.has_vmem:
            return weights + factors
        return weights if weights > self.VMEM else 0

    def block(self, heads):
        """A block of queries, of the gradient of its outputs, and in float32 of its own."""
        return 0 if self.has_vmem else heads * 1024 * 128 * (2 + 2 + 4)

    def all_to_all(self):
        q, k = self.queries(), 2 * self.keys()  # 16 devices exchange 8 key heads: each twice
        exchanged = 2 * q + 2 * k  # queries, and the gradient of the outputs; keys and values
        written = q + 4 * k  # gradients: of queries, and of keys and values in float32
        if self.has_vmem and exchanged + written <= self.VMEM:
            return self.passed()
        if self.has_vmem:
            written -= 2 * k  # of two arrays of 64 MiB, one fits
        heads = 32 // self.DEVICES
        return self.passed() + exchanged + written + self.scores(heads) + self.block(heads)

    def all_gather(self):
        q, k = self.queries(), self.DEVICES * self.keys()  # k: of the whole sequence
        moved = 2 * q  # queries in the balanced order, and the gradient of the outputs
        return self.passed() + moved + q + 2 * k + 4 * k + self.scores(32) + self.block(32)

    def ring(self):
        q, k = self.queries(), self.keys()
        # In the balanced order: queries, the gradient of the outputs.
        moved = 2 * q - self.moved_in_vmem()
        gradients = 2 * q + 4 * k  # in float32
        # Keys and values on their way, and those of the next step, or in the layout of the loop.
        moving = 4 * k
        block = self.block(32) if self.has_loop() else 0
        return self.passed() + moved + gradients + moving + self.scores(32) + block

    def has_loop(self):
        """Whether the halves of what a device of the ring has are longer than one block."""
        return self.length // self.DEVICES // 2 > 1024

    def moved_in_vmem(self):
        """What vector memory has of the ring's queries and the gradient of outputs, if they fit."""
        if 2 * self.queries() > self.VMEM:
            return 0
        # On v5e, factors and blocks leave place for one of the two.
        return self.queries() if self.has_vmem else 2 * self.queries()

    def gap(self, method):
        """The places of arrays that were moved, as far as nothing else fits there at the peak."""
        q, k = self.queries(), self.keys()
        if method == "all_to_all" and not self.has_vmem:
            # The exchange of queries has its source and its target at once. The target stays, and
            # only scores use the place of the source.
            return max(q - self.scores(2) - self.block(2), 0)
        if method == "ring" and self.has_loop():
            # So it is where the gradient of the outputs gets the layout of the loop. Keys and
            # values on their way use the place of the source.
            return q - 2 * k
        if method == "ring" and not self.has_vmem:
            return self.moved_in_vmem()
        return 0

    def bytes_sent(self, method):
        q, k = self.queries(), self.keys()
        others = self.DEVICES - 1
        if method == "all_to_all":
            return 2 * others / self.DEVICES * (2 * q + 2 * (2 * k))
        if method == "all_gather":  # gradients in float32, and moved queries
            return others * 2 * (k + 2 * k) + 4 * q
        # Keys and values forward and backward; their gradients in float32, in all steps; and the
        # move to the balanced order and back, forward and backward.
        return 2 * others * 2 * k + self.DEVICES * 2 * 2 * k + 4 * q + 4 * k


@needs_compiler
@pytest.mark.parametrize("length", [32768, 131072])
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x4"])
@pytest.mark.parametrize("function", [ring_attention, all_to_all_attention, all_gather_attention])
def test_peak_of_attention_over_a_sequence_by_hand(topology, function, length):
    by_hand = AttentionByHand(length, has_vmem=topology.startswith("v5e"))
    mesh = planning_mesh(topology, {"context": by_hand.DEVICES})
    query, key = (jax.ShapeDtypeStruct((1, length, n, 128), "bfloat16") for n in (32, 8))

    def step(query, key, value, d_out):
        attend = functools.partial(function, is_causal=True, balanced=True)
        out, pullback = jax.vjp(attend, query, key, value)
        # As in a model, where the gradient of the outputs is computed from these.
        out, d_out = jax.lax.optimization_barrier((out, d_out))
        return out, pullback(d_out)

    spec = P(None, "context")
    run = jit(step, mesh=mesh, in_shardings=spec, out_shardings=spec)
    with without_cache():
        compiled = run.lower(query, key, key, query).compile()
        in_use = max(compiled._figures.dumped.buffers.in_use())
    method = function.__name__.removesuffix("_attention")
    expected = getattr(by_hand, method)()
    sent = compiled.collectives().bytes_sent
    assert sent == pytest.approx(by_hand.bytes_sent(method), rel=0.01)
    assert in_use == pytest.approx(expected, rel=0.05)
    memory = compiled.memory()
    allocated = memory.peak - memory.generated_code
    assert allocated == pytest.approx(expected + by_hand.gap(method), rel=0.05)


@needs_compiler
def test_gradients_move_between_slices():
    """Within a slice they are scattered; between two, each device sends its shard once."""
    mesh = planning_mesh("v5e:2x4", {"replica": 2, "data": 8}, num_slices=2)
    model = nnx.eval_shape(lambda: MLP(nnx.Rngs(0), 1024, 4096))
    specs = fsdp(model, mesh=mesh), P(("replica", "data"))
    gradient = value_and_grad(lambda model, x: (model(x) ** 2).mean())
    step = jit(gradient, in_shardings=specs, mesh=mesh)
    with without_cache():
        compiled = step.lower(model, jax.ShapeDtypeStruct((16 * 256, 1024), "float32")).compile()
    shards = 2 * 1024 * 4096 * 4 / 8
    gradients = [each for each in compiled.collectives() if each.purpose == "gradient"]
    between = sum(each.bytes_sent for each in gradients if each.axes == ("replica",))
    assert between == pytest.approx(shards, rel=0.05)
    names = {path for each in gradients for path in each.parameters}
    assert {"model.up.kernel", "model.down.kernel"} <= names
    network = [row for row in compiled.roofline("TPU v5e").traffic if row.links == "DCN"]
    assert sum(row.seconds for row in network) == pytest.approx(shards / 3.125e9, rel=0.1)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_flops_of_ragged_products(dtype):
    mesh = planning_mesh("v5e:2x4", AbstractMesh((8,), ("data",), (AxisType.Auto,)))
    rows, features, out, groups = 4096, 512, 256, 8
    result = "int32" if dtype == "int8" else "float32"
    shapes = ((rows, features), dtype), ((groups, features, out), dtype), ((groups,), "int32")
    step = jit(
        lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes, preferred_element_type=result),
        mesh=mesh,
        in_shardings=(P(), P(), P()),
    )
    with without_cache():
        cost = step.lower(*(jax.ShapeDtypeStruct(*x) for x in shapes)).compile().cost()
    flops = 2 * rows * features * out
    assert cost.flops == pytest.approx(flops, rel=0.01)
    assert cost.int8_flops == (cost.flops if dtype == "int8" else 0)


@needs_compiler
def test_tokens_move_to_their_experts_on_tpus():
    mesh = planning_mesh("v5e:2x4", {"data": 2, "expert": 4})

    def loss(up, down, x):
        weights, indices = jax.lax.top_k(x[..., :8].astype("float32"), 2)

        def experts(rows, matmul):
            return matmul(jax.nn.relu(matmul(rows, up)), down)

        y, _ = dispatch_to_experts(x, weights, indices, experts, num_experts=8)
        return y.sum().astype("float32")

    shapes = (8, 256, 512), (8, 512, 256), (8, 128, 256)
    like = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    specs = (P("expert"), P("expert"), P(("data", "expert")))
    step = jit(jax.grad(loss, (0, 1, 2)), in_shardings=specs, mesh=mesh)
    with without_cache():
        sent = step.lower(*like).compile().collectives()
    ragged = [each for each in sent if each.kind == "ragged-all-to-all"]
    assert sum(each.times for each in ragged) == 4  # to the experts and back, twice
    assert {each.axes for each in ragged} == {("expert",)}
    choices = 128 * 2  # of the one group of a device, of 256 features
    assert sum(each.total_bytes_sent for each in ragged) == 4 * choices * 256 * 2
