"""Programs that the compiler for GPUs wrote, against hand, loops written out, and CPUs."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gpu.record import FOLDER, NAMES, recorded
from nnx_sharding.analysis import Cost, Hardware, collectives_of, roofline_of
from nnx_sharding.analysis.hlo import parse
from nnx_sharding.analysis.work import CUSTOM_CALLS, with_loops
from test_tpu_programs import F32, FLOPS, HIDDEN, KERNEL_PATHS, KERNELS, MESH, MIB, WIDTH, near
from tpu.programs import LAYERS, LOOPS, PROGRAMS

KNOWN = Cost(0.0, 0.0, 0.0, "s")


@functools.cache
def on_gpu(name):
    """The program as text is read, and what it costs with loops."""
    module = parse(recorded(name))
    return module, with_loops(KNOWN, module)


def test_all_are_recorded_and_small():
    files = list(FOLDER.glob("*.hlo.gz"))
    assert {file.name.removesuffix(".hlo.gz") for file in files} == set(NAMES)
    assert sum(file.stat().st_size for file in files) < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_is_read(name):
    module, cost = on_gpu(name)
    assert module.unread == []
    unknown = [cost.flops, cost.bytes_accessed, cost.transcendentals].count(None)
    assert unknown == (3 if name == "unknown_length" else 0)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_as_written_out(name):
    module, cost = on_gpu(name)
    plain, truth = on_gpu(f"{name}_written_out")
    assert any(runs.in_loop for runs in module.runs.values())
    assert near(cost.flops, truth.flops, 0.01) or cost.flops < 100 > truth.flops
    sent, truly_sent = (collectives_of(each, MESH).by_kind() for each in (module, plain))
    assert sent == truly_sent
    # Written out, some layers share fusions; in a loop, one reads and writes what it carries.
    assert 0.8 < cost.bytes_accessed / truth.bytes_accessed < 2


@pytest.mark.parametrize("name", sorted(FLOPS.keys() & set(NAMES)))
def test_flops_by_hand(name):
    assert near(on_gpu(name)[1].flops, FLOPS[name], 0.03)


def test_lengths_of_loops():
    counts = {name: sorted(on_gpu(name)[0].trip_counts.values()) for name in NAMES}
    assert {name: some for name, some in counts.items() if some} == {
        "layers": [6, 6],
        "stack_step": [6, 6],
        "scan": [12],
        "nested": [3, 5],
        "convolution": [5],
        "attention": [4],
        "ring": [8],
    }


@pytest.mark.parametrize("name, times", [("fsdp_step", 1), ("stack_step", LAYERS)])
def test_fsdp_gathers_parameters_and_scatters_gradients(name, times):
    rows = PROGRAMS[name](jax.devices()).compile().parameters()
    found = collectives_of(on_gpu(name)[0], MESH, rows)
    assert {one.purpose for one in found.of("all-gather")} == {"parameter"}
    assert {one.purpose for one in found.of("reduce-scatter")} == {"gradient"}
    paths = KERNEL_PATHS if times == 1 else {p.replace(".", ".nets.", 1) for p in KERNEL_PATHS}
    assert paths <= {path for one in found.of("all-gather") for path in one.parameters}
    # Without the results, it is not known what the gradient of a transposed kernel updates.
    assert paths & {path for one in found.of("reduce-scatter") for path in one.parameters}
    parameters = KERNELS + HIDDEN + WIDTH
    sent = times * parameters * F32 * 7 // 8
    # The loss is summed by an operation that starts and ends.
    assert found.by_kind() == {"all-gather": sent, "reduce-scatter": sent, "all-reduce": 7}


def test_groups_of_every_form():
    found = collectives_of(on_gpu("groups")[0], {"data": 2, "model": 4})
    for axis, size in (("data", 2), ("model", 4)):
        part = MIB * (size - 1) // size
        sums = {"reduce-scatter": part, "all-gather": part, "all-to-all": 2 * part}
        assert found.of(None, axis).by_kind() == {**sums, "all-reduce": 2 * part}


OWN = Hardware("own", 1e9, 2**30, 1e9, 1e9)  # one flop takes as long as one byte


def test_operations_take_the_larger_of_their_times_one_after_the_other():
    """A product that computes more than it reads, and a sum that reads more than it computes."""
    text = """HloModule two

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %product = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = f32[64,64]{1,0} add(%product, %x)
}
"""
    module = parse(text)
    found = roofline_of(with_loops(KNOWN, module), collectives_of(module), OWN, platform="cuda")
    product, array = 2 * 64**3, 64 * 64 * F32
    assert found.busy_s == pytest.approx((product + 3 * array) / 1e9)
    assert found.seconds == pytest.approx((product + 64 * 64) / 1e9)
    assert found.estimate == found.busy_s


@pytest.mark.parametrize("name", NAMES)
def test_an_estimate_lies_between_the_bounds(name):
    module, cost = on_gpu(name)
    for peak in (OWN, "H200", "TPU v5e"):
        found = roofline_of(cost, collectives_of(module, MESH), peak, platform="cuda")
        times = found.seconds, found.estimate, found.seconds_without_overlap
        if name == "unknown_length":
            assert times == (None, None, None) and "loops of unknown length" in str(found)
        else:
            assert times[0] <= times[1] <= 1.001 * times[2]


START = """HloModule start, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[64], y: f32[2]) -> (f32[64], f32[2]) {
  %x = f32[64]{0} parameter(0)
  %y = f32[2]{0} parameter(1)
  %start = SHAPE all-reduce-start(%x, %y), replica_groups={}, to_apply=%add
  %done = (f32[64]{0}, f32[2]{0}) all-reduce-done(%start)
}
"""


@pytest.mark.parametrize("shape", ["R", "(R, R)"])
def test_an_all_reduce_that_starts_is_its_result_with_or_without_its_operands(shape):
    text = START.replace("SHAPE", shape.replace("R", "(f32[64]{0}, f32[2]{0})"))
    [one] = collectives_of(text, MESH)
    assert (one.bytes, one.shapes) == (66 * F32, ((64,), (2,)))
    assert with_loops(KNOWN, parse(text)).flops == 66


CALLS = """HloModule calls, is_scheduled=true

%slice (p: f32[8,64], i: s32[]) -> f32[1,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,64]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,64}
  ROOT %twice = f32[1,64]{1,0} add(%part, %part)
}

ENTRY %main (x: f32[8,64], at: s32[], k: f32[64,32]) -> f32[1,32] {
  %x = f32[8,64]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %k = f32[64,32]{1,0} parameter(2)
  %start = ((f32[8,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%x, %at), kind=kLoop, calls=%slice
  %row = f32[1,64]{1,0} fusion-done(%start)
  %gemm = ((f32[1,64]{1,0}, f32[64,32]{1,0}), (f32[1,32]{1,0}, s8[4096]{0}), u32[]) custom-call-start(%row, %k), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %both = (f32[1,32]{1,0}, s8[4096]{0}) custom-call-done(%gemm)
  ROOT %out = f32[1,32]{1,0} get-tuple-element(%both), index=0
}
"""  # noqa: E501


def test_abbreviated_asynchronous_calls():
    """They cost what the same calls cost that are waited for; scratch memory costs nothing."""
    module = parse(CALLS)
    assert module.unread == []
    cost = with_loops(KNOWN, module)
    assert cost.flops == 64 + 2 * 64 * 32
    row, kernel, out = 64 * F32, 64 * 32 * F32, 32 * F32
    assert cost.bytes_accessed == 2 * row + (row + kernel + out)
    plain = CALLS.replace("-start(", "(").replace(
        "((f32[8,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[])", "f32[1,64]{1,0}"
    )
    plain = plain.replace(
        "((f32[1,64]{1,0}, f32[64,32]{1,0}), (f32[1,32]{1,0}, s8[4096]{0}), u32[])",
        "(f32[1,32]{1,0}, s8[4096]{0})",
    )
    plain = plain.replace("fusion-done(%start)", "copy(%start)").replace(" %row = ", " %r = ")
    plain = plain.replace("custom-call(%row", "custom-call(%start").replace(
        "custom-call-done", "bitcast"
    )
    again = with_loops(KNOWN, parse(plain))
    assert (again.flops, again.bytes_accessed) == (cost.flops, cost.bytes_accessed + 2 * row)


@pytest.mark.parametrize(
    "shape", ["f32[1,64]{1,0}", "()", "((f32[8,64]{1,0}, s32[]))", "(f32[2], u32[])"]
)
def test_abbreviated_calls_of_another_form_are_not_understood(shape):
    start = "((f32[8,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[])"
    module = parse(CALLS.replace(start, shape))
    assert module.unread != [] and with_loops(KNOWN, module) is None


def test_an_empty_all_reduce_that_starts():
    assert collectives_of(START.replace("SHAPE", "()"), MESH).bytes_sent == 0


def call(target, result, operands, rest):
    """A program of one library call."""
    given = [f"%p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    lines = [
        *given,
        f'ROOT %c = {result} custom-call({names}), custom_call_target="{target}"{rest}',
    ]
    return "HloModule one\n\nENTRY %main () -> f32[] {\n  " + "\n  ".join(lines) + "\n}\n"


def f32(*dims):
    return f"f32[{','.join(map(str, dims))}]"


@pytest.mark.parametrize("seed", range(12))
def test_convolutions_of_a_library_are_those_of_xla(seed):
    """The three passes multiply the same elements, those that the convolution for CPUs does."""
    draw = random.Random(seed)
    n, size, kernel = draw.randint(1, 3), draw.randint(5, 12), draw.randint(1, 4)
    inputs, outputs, stride = 2 * draw.randint(1, 3), 2 * draw.randint(1, 3), draw.randint(1, 3)
    groups, low, high = draw.choice([1, 2]), draw.randint(0, kernel - 1), draw.randint(0, 2)
    x, k = jnp.ones((n, inputs, size, size)), jnp.ones((outputs, inputs // groups, kernel, kernel))
    fun = functools.partial(
        lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding=((low, high), (low, high)),
        feature_group_count=groups,
    )
    y = jax.eval_shape(fun, x, k)
    at = (jnp.arange(y.shape[2])[:, None] * stride + jnp.arange(kernel) - low).ravel()
    inside = int(((at >= 0) & (at < size)).sum())
    by_hand = 2 * n * outputs * (inputs // groups) * inside**2
    window = (
        f"window={{size={kernel}x{kernel} stride={stride}x{stride} pad={low}_{high}x{low}_{high}}}"
    )
    rest = f", {window}, dim_labels=bf01_oi01->bf01, feature_group_count={groups}"
    shapes = {"x": f32(*x.shape), "k": f32(*k.shape), "y": f32(*y.shape)}
    for name, result, operands in (
        ("Forward", "y", "xk"),
        ("BiasActivationForward", "y", "xk"),
        ("BackwardInput", "x", "yk"),
        ("BackwardFilter", "k", "xy"),
    ):
        made = f"({shapes[result]}, u8[4096])"
        text = call(f"__cudnn$conv{name}", made, [shapes[o] for o in operands], rest)
        cost = with_loops(KNOWN, parse(text))
        assert cost.flops == by_hand, name
        arrays = [shapes[result], *(shapes[operand] for operand in operands)]
        assert cost.bytes_accessed == F32 * sum(map(elements, arrays)), name


def elements(shape):
    return functools.reduce(lambda a, b: a * int(b), shape[4:-1].split(","), 1)


B, H, S, T, D = 2, 4, 48, 64, 16


@pytest.mark.parametrize(
    "mask, window, positions",
    [
        ("NO_MASK", 0, S * T),
        ("ALIBI", 0, S * T),
        ("CAUSAL", 0, S * (S + 1) // 2),
        ("CAUSAL", 8, 8 * 9 // 2 + (S - 8) * 8),
        ("PADDING", 0, None),
        ("PADDING_CAUSAL", 0, None),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_attention_of_a_library(mask, window, positions, backward):
    """Two products forward, five backward, at the positions that the mask leaves."""
    gradients = '"bmm1_grad_gemm1_dot_dimension_numbers":{},' if backward else ""
    rest = (
        f', backend_config={{"cudnn_fmha_backend_config":{{{gradients}"intermediate_tensor_shape":'
        f'{{"dimensions":["{B}","{H}","{S}","{T}"]}},"is_paged_attention":false,'
        f'"bmm1_dot_dimension_numbers":{{"lhs_contracting_dimensions":["3"]}},'
        f'"mask_type":"{mask}","sliding_window_length":{window}}}}}'
    )
    q, k = f32(B, S, H, D), f32(B, T, H, D)
    target = f"__cudnn$fmhaSoftmax{'Backward' * backward}"
    made = f"({q}, {k}, {k}, u8[64])" if backward else f"({f32(B, H, S, D)}, u8[64])"
    cost = with_loops(KNOWN, parse(call(target, made, [q, k, k], rest)))
    products = 5 if backward else 2
    assert cost.flops == (positions and products * 2 * B * H * positions * D)
    assert (CUSTOM_CALLS in (cost.why or "")) == (positions is None)


def test_a_call_that_is_not_known_has_no_figure():
    text = call("__cudnn$norm", f32(8), [f32(8), f32(8)], "")
    assert with_loops(KNOWN, parse(text)).flops is None
