"""Programs that the compiler for TPUs wrote: figures against hand, loops written out and the CPU.

They are recorded; with ``NNX_SHARDING_TPU_COMPILER=1`` they are compiled again, which takes
``jax[tpu]``, but no TPU.
"""

from __future__ import annotations

import functools
import os

import jax
import pytest

from nnx_sharding.analysis import Cost, collectives_of, cost_of, roofline_of
from nnx_sharding.analysis.collectives import Collectives
from nnx_sharding.analysis.hlo import parse
from nnx_sharding.analysis.instructions import arrays
from nnx_sharding.analysis.work import with_loops
from tpu.programs import BATCH, HIDDEN, LAYERS, LOOPS, PROGRAMS, SIZES, WIDTH
from tpu.record import FOLDER, compiled, recorded

F32, BF16, MIB = 4, 2, 2**20
MESH = {"data": 8}
KERNELS = 2 * WIDTH * HIDDEN  # of the net that is trained
KERNEL_PATHS = {"model.up.kernel", "model.down.kernel"}

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="compares with what the compiler for CPUs writes"
)


@functools.cache
def on_tpu(name):
    """The program as text is read, and what it costs with loops."""
    if os.environ.get("NNX_SHARDING_TPU_COMPILER"):
        text, cost = compiled(name)
    else:
        text, cost = recorded(name)
    module = parse(text)
    return module, with_loops(cost_of(cost, "TPU"), module)


@functools.cache
def on_cpu(name):
    program = PROGRAMS[name](jax.devices()).compile()
    module = parse(program.as_text())
    return module, with_loops(cost_of(program.cost_analysis(), "CPU"), module)


def sent(module, mesh=MESH):
    return collectives_of(module, mesh).by_kind()


def near(figure, expected, tolerance=0.01):
    return figure == pytest.approx(expected, rel=tolerance)


def test_all_are_recorded_and_small():
    files = list(FOLDER.glob("*.hlo.gz"))
    assert {file.name.removesuffix(".hlo.gz") for file in files} == set(PROGRAMS)
    assert sum(file.stat().st_size for file in files) < 300_000


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_of_it_is_read(name):
    module, cost = on_tpu(name)
    assert module.unread == []
    unknown = [cost.flops, cost.bytes_accessed, cost.transcendentals].count(None)
    assert unknown == (3 if name == "unknown_length" else 0)


@pytest.mark.parametrize("on", [on_tpu, on_cpu])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_as_written_out(name, on):
    module, cost = on(name)
    plain, truth = on(f"{name}_written_out")
    assert not any(runs.in_loop for runs in plain.runs.values())
    assert any(runs.in_loop for runs in module.runs.values())
    assert near(cost.flops, truth.flops, 0.05) or cost.flops < 100 > truth.flops
    assert near(cost.transcendentals, truth.transcendentals, 0.05)
    assert sent(module) == sent(plain)


# By hand: products, and of what is done once for each element the most.
FLOPS = {
    "scan": 12 * (2 * BATCH * WIDTH * WIDTH + 2 * BATCH * WIDTH),
    "nested": 5 * (3 * 2 * 32 * WIDTH * WIDTH + 3 * 32 * WIDTH),
    # 46 positions of a window of 3 in 16 elements are not in the padding.
    "convolution": 5 * 2 * 8 * 46 * 46 * 128 * 128,
    "attention": 4 * (2 * 2 * 2 * 4 * 128 * 128 * 64 + 4 * 2 * 4 * 128 * 128),
    "layers": LAYERS * 3 * (2 * BATCH // 8 * WIDTH * WIDTH + BATCH // 8 * WIDTH),
    "collective_matmul": 2 * 8192 * 8192 * 1024,
    "stack_step": LAYERS * 6 * 2 * BATCH // 8 * WIDTH * HIDDEN,
    "fsdp_step": 5 * 2 * BATCH // 8 * WIDTH * HIDDEN,
    "tensor_parallel_step": 5 * 2 * BATCH // 2 * WIDTH * HIDDEN // 4,
    "kernel": 7 * 1000,
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_by_hand(name):
    assert near(on_tpu(name)[1].flops, FLOPS[name], 0.02)
    assert name == "kernel" or near(on_cpu(name)[1].flops, FLOPS[name], 0.02)


def test_transcendentals_by_hand():
    assert on_tpu("scan")[1].transcendentals == 12 * BATCH * WIDTH
    assert on_tpu("nested")[1].transcendentals == 5 * 32 * WIDTH
    assert on_tpu("ring")[1].transcendentals == 8 * 128 * WIDTH
    assert on_tpu("attention")[1].transcendentals == 4 * 2 * 4 * 128 * 128
    assert on_tpu("kernel")[1].transcendentals == 7 * 100


def test_only_bytes_of_the_main_memory_count():
    def accessed(name):
        module, _ = on_tpu(name)
        return with_loops(Cost(0.0, 1e12, 0.0, "TPU"), module).bytes_accessed

    # Kernel and input are read, the result is written; what runs carry stays in the vector memory.
    assert near(accessed("scan"), (WIDTH * WIDTH + 2 * BATCH * WIDTH) * F32)
    assert near(accessed("attention"), 2 * 2 * 128 * 4 * 64 * F32)
    assert near(accessed("ring"), 2 * 128 * WIDTH * F32)
    for name in LOOPS:
        assert near(accessed(name), accessed(f"{name}_written_out"), 0.1), name


def test_lengths_of_loops():
    counts = {name: sorted(on_tpu(name)[0].trip_counts.values()) for name in PROGRAMS}
    assert {name: some for name, some in counts.items() if some} == {
        "layers": [6, 6],
        "stack_step": [6, 6],
        "scan": [12],
        "nested": [3, 5],
        "convolution": [5],
        "attention": [4],
        "ring": [8],
        "kernel": [7],
        "collective_matmul": [2],  # two shards from both sides in each run
    }


def test_what_is_not_known_is_said():
    stage = "after optimisation, one device, loops multiplied out, bytes of the main memory"
    assert on_tpu("scan")[1].stage == stage
    assert on_tpu("unknown_length")[1].why == "loops of unknown length: jit(fun)/while"
    module, cost = on_tpu("branches")
    assert cost.stage == f"{stage}, of conditionals the largest branch"
    [found] = collectives_of(module, MESH)
    assert (found.conditional, found.times) == (True, 1)
    assert "≤ 1" in str(found)
    assert "of conditionals the branch that sends most" in str(collectives_of(module, MESH))
    assert not any(one.conditional for one in collectives_of(on_tpu("layers")[0], MESH))


def fsdp_collectives(on, name="fsdp_step"):
    """With what they are for; the arguments are the same for each compiler."""
    rows = PROGRAMS[name](jax.devices()).compile().parameters()
    return collectives_of(on(name)[0], MESH, rows)


def test_fsdp_gathers_parameters_and_scatters_gradients():
    found = fsdp_collectives(on_tpu)
    [scatter] = found.of("reduce-scatter", "data")
    assert (scatter.purpose, set(scatter.parameters)) == ("gradient", KERNEL_PATHS)
    assert scatter.bytes == KERNELS * F32
    assert scatter.bytes_sent == KERNELS * F32 * 7 // 8
    assert {*scatter.shapes} == {(WIDTH, HIDDEN // 8), (HIDDEN // 8, WIDTH)}
    assert "transpose" in scatter.operation
    gathers = [one for one in found.of("all-gather") if KERNEL_PATHS & {*one.parameters}]
    assert {one.purpose for one in gathers} == {"parameter"}
    # Each once, though the compiler repeats what is under way while others run.
    assert sorted(path for one in gathers for path in one.parameters) == sorted(KERNEL_PATHS)
    # Its matrix products take bfloat16, so it sends half of what a CPU does.
    assert sum(one.bytes_sent for one in gathers) == KERNELS * BF16 * 7 // 8


def test_fsdp_in_a_loop_over_layers():
    """The compiler gives arguments that only the loop uses the name of the loop."""
    found = fsdp_collectives(on_tpu, "stack_step")
    paths = {"model.nets.up.kernel", "model.nets.down.kernel"}
    [scatter] = found.of("reduce-scatter", "data")
    assert (scatter.purpose, {*scatter.parameters}, scatter.times) == ("gradient", paths, LAYERS)
    assert scatter.total_bytes_sent == LAYERS * KERNELS * F32 * 7 // 8
    gathers = [one for one in found.of("all-gather") if paths & {*one.parameters}]
    assert [(one.purpose, one.times) for one in gathers] == [("parameter", LAYERS)] * 2
    assert sum(one.total_bytes_sent for one in gathers) == LAYERS * KERNELS * BF16 * 7 // 8
    assert not found.resharded


def test_fsdp_on_cpus_sums_gradients_as_a_whole():
    found = fsdp_collectives(on_cpu)
    assert found.counts()["reduce-scatter"] == 0
    assert found.by_purpose() == {
        "parameter": (KERNELS + HIDDEN + WIDTH) * F32 * 7 // 8,
        # With the gradients of biases, and the loss.
        "gradient": 2 * (KERNELS + HIDDEN + WIDTH) * F32 * 7 // 8 + 7,
    }


def test_tensor_parallel_sums_over_both_axes():
    for on in (on_tpu, on_cpu):
        found = collectives_of(on("tensor_parallel_step")[0], SIZES["tensor_parallel_step"])
        assert {one.kind for one in found} == {"all-reduce"}
        by_axes = found.by_axes()
        assert by_axes["model",] == 2 * BATCH // 2 * WIDTH * F32 * 3 // 4
        gradients = (KERNELS // 4 + HIDDEN // 4 + WIDTH) * F32
        assert near(by_axes["data",], gradients)


def test_groups_of_every_form():
    found = collectives_of(on_tpu("groups")[0], {"data": 2, "model": 4})
    assert {one.axes for one in found} == {("data",), ("model",)}
    for axis, size in (("data", 2), ("model", 4)):
        each = found.of(None, axis)
        assert {(one.group_size, one.num_groups) for one in each} == {(size, 8 // size)}
        part = MIB * (size - 1) // size
        sums = each.by_kind()
        assert (sums["all-gather"], sums["all-to-all"]) == (part, 2 * part)
        # Over one of the axes it sums the full array, and takes the part of the device.
        scattered = {"reduce-scatter": part, "all-reduce": 2 * part}
        summed = {"all-reduce": 4 * part}
        sums = {kind: size for kind, size in sums.items() if "reduce" in kind}
        assert sums in (scattered, summed)


def test_a_ring_belongs_to_its_product():
    module, _ = on_tpu("collective_matmul")
    found = collectives_of(module, MESH)
    assert {one.kind for one in found} == {"collective-permute"}
    assert {one.operation for one in found} == {"jit(<lambda>)/dot_general"}
    shard = 1024 * 8192 * BF16
    # It starts with the shards at both sides, and sends in its last run what nothing uses.
    assert found.bytes_sent == 9 * shard
    on_cpus = collectives_of(on_cpu("collective_matmul")[0], MESH)
    assert on_cpus.by_kind() == {"all-gather": 7 * shard * F32 // BF16}


def test_memory_of_the_host():
    spaces = {
        (one.opcode, shape.memory_space)
        for computation in on_tpu("offload")[0].computations
        for one in computation.instructions
        for shape in arrays(one.shape)
        if shape.memory_space == 5
    }
    assert ("parameter", 5) in spaces and ("copy-start", 5) in spaces
    # The kernel is copied to the device, and its update back.
    assert on_tpu("offload")[1].host_bytes == 2 * 256 * 256 * F32
    assert on_tpu("scan")[1].host_bytes == 0


IN_A_LOOP = """HloModule layers, is_scheduled=true

%body (p: (s32[], f32[8,64], f32[8,64])) -> (s32[], f32[8,64], f32[8,64]) {
  %p = (s32[], f32[8,64]{1,0:S(5)}, f32[8,64]{1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %layers = f32[8,64]{1,0:S(5)} get-tuple-element(%p), index=1
  %results = f32[8,64]{1,0:S(5)} get-tuple-element(%p), index=2
  %zero = s32[] constant(0)
  %layer = f32[1,64]{1,0} dynamic-slice(%layers, %i, %zero), dynamic_slice_sizes={1,64}
  %twice = f32[1,64]{1,0} add(%layer, %layer)
  %next = f32[8,64]{1,0:S(5)} dynamic-update-slice(%results, %twice, %i, %zero)
  %same = f32[8,64]{1,0:S(5)} copy(%layers)
  ROOT %out = (s32[], f32[8,64]{1,0:S(5)}, f32[8,64]{1,0:S(5)}) tuple(%i, %same, %next)
}

%condition (q: (s32[], f32[8,64], f32[8,64])) -> pred[] {
  %q = (s32[], f32[8,64]{1,0:S(5)}, f32[8,64]{1,0:S(5)}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[8,64], f32[8,64])) -> (s32[], f32[8,64], f32[8,64]) {
  %a = (s32[], f32[8,64]{1,0:S(5)}, f32[8,64]{1,0:S(5)}) parameter(0)
  ROOT %loop = (s32[], f32[8,64]{1,0:S(5)}, f32[8,64]{1,0:S(5)}) while(%a), body=%body, TRIPS
}
"""


def test_copies_to_the_host_in_a_loop():
    trips = 'condition=%condition, backend_config={"known_trip_count":{"n":"8"}}'
    cost = with_loops(Cost(0.0, 0.0, 0.0, "s"), parse(IN_A_LOOP.replace("TRIPS", trips)))
    assert cost.host_bytes == 8 * 2 * 64 * F32


def test_lower_bounds_leave_out_loops_of_unknown_length():
    module = parse(IN_A_LOOP.replace("TRIPS", "condition=%condition"))
    cost = with_loops(Cost(0.0, 0.0, 0.0, "s"), module)
    assert (cost.flops, cost.bytes_accessed, cost.host_bytes) == (None, None, None)
    assert (cost.at_least.flops, cost.at_least.host_bytes) == (0, 0)
    assert cost.at_least.stage == f"{cost.stage}, without what is unknown"
    assert "≥ 0" in str(cost) and "loops of unknown length: loop" in str(cost)
    roofline = roofline_of(cost, Collectives(), "TPU v5e")
    assert (roofline.estimate, roofline.at_least) == (None, 0)
    assert str(roofline).startswith("≥ 0 s, at peak rates")


def test_figures_do_not_need_estimates_of_the_compiler():
    """Which knows none of a program with a custom call, such as that of ``top_k``."""
    module, cost = on_tpu("scan")
    assert with_loops(Cost(None, None, None, "s"), module) == cost
