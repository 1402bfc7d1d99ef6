"""Figures of programs of which each line counts: text of the compilers, with figures by hand."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_sharding
from nnx_sharding import jit
from nnx_sharding.analysis import HARDWARE, Cost, collectives_of, memory_of, roofline_of
from nnx_sharding.analysis.hlo import parse
from nnx_sharding.analysis.instructions import padded_bytes
from nnx_sharding.analysis.work import with_loops
from nnx_sharding.testing.lock import _collective_name
from zoo import P, mesh_of

TPU = "HloModule jit_f, entry_computation_layout={(f32[8,128]{1,0:T(8,128)})->f32[]}\n\n"
LAYER = 256 * 256 * 4  # bytes of one of twelve layers

FUSIONS = """%slice (s: f32[12,256,256], i: s32[]) -> f32[256,256] {
  %s = f32[12,256,256]{2,1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %z = s32[]{:T(128)} constant(0)
  %ds = f32[1,256,256]{2,1,0:T(8,128)} dynamic-slice(%s, %i, %z, %z)
  ROOT %b = f32[256,256]{1,0:T(8,128)} bitcast(%ds)
}

%product (x: f32[8,256], s: f32[12,256,256], i: s32[]) -> f32[8,256] {
  %x.1 = f32[8,256]{1,0:T(8,128)S(1)} parameter(0)
  %s.1 = f32[12,256,256]{2,1,0:T(8,128)} parameter(1)
  %i.1 = s32[]{:T(128)S(6)} parameter(2)
  %w = f32[256,256]{1,0:T(8,128)} fusion(%s.1, %i.1), kind=kLoop, calls=%slice
  ROOT %dot = f32[8,256]{1,0:T(8,128)S(1)} convolution(%x.1, %w), dim_labels=bf_io->bf
}

"""
LOOP = """%body (c: (f32[8,256], f32[12,256,256], s32[])) -> (f32[8,256], f32[12,256,256], s32[]) {
  %c = (f32[8,256]{1,0:T(8,128)S(1)}, f32[12,256,256]{2,1,0:T(8,128)}, s32[]{:T(128)S(6)}) \
parameter(0)
  %x.2 = f32[8,256]{1,0:T(8,128)S(1)} get-tuple-element(%c), index=0
  %s.2 = f32[12,256,256]{2,1,0:T(8,128)} get-tuple-element(%c), index=1
  %i.2 = s32[]{:T(128)S(6)} get-tuple-element(%c), index=2
  %y = STEP
  ROOT %r = (f32[8,256]{1,0:T(8,128)S(1)}, f32[12,256,256]{2,1,0:T(8,128)}, \
s32[]{:T(128)S(6)}) tuple(%y, %s.2, %i.2)
}

%condition (d: (f32[8,256], f32[12,256,256], s32[])) -> pred[] {
  ROOT %t = pred[] constant(true)
}

ENTRY %main (x: f32[8,256], s: f32[12,256,256]) -> f32[8,256] {
  %a = (f32[8,256]{1,0:T(8,128)S(1)}, f32[12,256,256]{2,1,0:T(8,128)}, s32[]{:T(128)S(6)}) \
parameter(0)
  ROOT %l = (f32[8,256]{1,0:T(8,128)S(1)}, f32[12,256,256]{2,1,0:T(8,128)}, \
s32[]{:T(128)S(6)}) while(%a), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
}
"""


def cost_with_loops(text):
    module = parse(text)
    assert module.unread == []
    return with_loops(Cost(0.0, 1.0, 0.0, "TPU"), module)


@pytest.mark.parametrize(
    ("fusions", "step"),
    [
        # A slice within a fusion within a fusion: each run reads one layer from the main memory.
        (
            FUSIONS,
            "f32[8,256]{1,0:T(8,128)S(1)} fusion(%x.2, %s.2, %i.2), kind=kOutput, calls=%product",
        ),
        # A slice from the main memory into the vector memory, which is not written to either.
        ("", "f32[1,256,256]{2,1,0:T(8,128)S(1)} dynamic-slice(%s.2, %i.2, %i.2, %i.2)"),
    ],
)
def test_layers_of_a_stack_are_read_once(fusions, step):
    assert cost_with_loops(TPU + fusions + LOOP.replace("STEP", step)).bytes_accessed == 12 * LAYER


def test_a_slice_that_is_written_to_the_main_memory_counts_twice():
    step = "f32[1,256,256]{2,1,0:T(8,128)} dynamic-slice(%s.2, %i.2, %i.2, %i.2)"
    text = TPU + LOOP.replace("STEP", step)
    assert cost_with_loops(text).bytes_accessed == 12 * 2 * LAYER


def test_products_of_narrow_numbers():
    lines = "".join(
        f"  %{d}.a = {d}[64,32]{{1,0}} parameter({2 * i})\n"
        f"  %{d}.b = {d}[32,16]{{1,0}} parameter({2 * i + 1})\n"
        f"  %{d}.c = {out}[64,16]{{1,0}} dot(%{d}.a, %{d}.b), lhs_contracting_dims={{1}}\n"
        for i, (d, out) in enumerate((("s8", "s32"), ("f8e4m3fn", "f32"), ("bf16", "f32")))
    )
    cost = cost_with_loops(f"HloModule m\n\nENTRY %e {{\n{lines}  ROOT %z = s32[] constant(0)\n}}")
    flops = 2 * 64 * 32 * 16
    assert (cost.int8_flops, cost.fp8_flops) == (flops, flops)
    cost = Cost(3 * flops, 0.0, 0.0, "s", None, None, flops, flops)
    none = collectives_of("HloModule m\n\nENTRY %e {\n  ROOT %z = s32[] constant(0)\n}")
    v5e, h100 = (roofline_of(cost, none, name).compute_s for name in ("TPU v5e", "H100 SXM"))
    assert v5e == pytest.approx(flops / 394e12 + 2 * flops / 197e12)  # it has no faster fp8
    assert h100 == pytest.approx(2 * flops / 1979e12 + flops / 989.5e12)


@pytest.mark.parametrize("dtype", ["bf16", "s8", "f8e4m3fn"])
def test_ragged_products_of_tpus(dtype):
    """Kernels of the compiler: one counts the rows of each group, the other estimates itself."""
    flops = 2 * 4096 * 512 * 256
    target = 'custom_call_target="tpu_custom_call"'
    estimate = f'{{"cost_estimate":{{"flops":"{flops}","bytes_accessed":"8388640"}}}}'
    text = (
        f"ENTRY %e (x: {dtype}[4096,512], w: {dtype}[8,512,256], g: s32[8]) -> f32[4096,256] {{\n"
        f"  %x = {dtype}[4096,512]{{1,0:T(8,128)}} parameter(0)\n"
        f"  %w = {dtype}[8,512,256]{{2,1,0:T(8,128)}} parameter(1)\n"
        "  %g = s32[8]{0:T(128)} parameter(2)\n"
        f"  %rows = s32[9]{{0:T(128)S(1)}} custom-call(%g), {target}, "
        'metadata={op_name="ragged-dot-metadata"}, backend_config={"custom_call_config":{}}\n'
        f"  ROOT %y = f32[4096,256]{{1,0:T(8,128)}} custom-call(%rows, %x, %w), {target}, "
        'frontend_attributes={ragged_dot_tiling="128,512,256"}, '
        'metadata={op_name="jit(f)/ragged_dot_general/ragged-dot-none"}, '
        f'backend_config={{"custom_call_config":{estimate}}}\n}}\n'
    )
    cost = cost_with_loops(TPU + text)
    by_hand = flops, flops * (dtype == "s8"), flops * (dtype == "f8e4m3fn")
    assert (cost.flops, cost.int8_flops, cost.fp8_flops) == by_hand
    assert cost.why is None


def test_bytes_of_a_kernel_whose_operands_were_copied_into_the_vector_memory():
    """They are read from the main memory once, by the copy."""
    size = 1024 * 2048 * 2
    estimate = f'{{"cost_estimate":{{"flops":"7","bytes_accessed":"{2 * size}"}}}}'
    text = (
        "ENTRY %e (w: bf16[1024,2048]) -> bf16[1024,2048] {\n"
        "  %w = bf16[1024,2048]{1,0:T(8,128)(2,1)} parameter(0)\n"
        "  %s = (bf16[1024,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,2048]{1,0:T(8,128)(2,1)}, "
        "u32[]{:S(2)}) copy-start(%w)\n"
        "  %d = bf16[1024,2048]{1,0:T(8,128)(2,1)S(1)} copy-done(%s)\n"
        "  ROOT %y = bf16[1024,2048]{1,0:T(8,128)(2,1)} custom-call(%d), "
        'custom_call_target="tpu_custom_call", '
        f'backend_config={{"custom_call_config":{estimate}}}\n}}\n'
    )
    cost = cost_with_loops(TPU + text)
    assert (cost.flops, cost.bytes_accessed) == (7, 2 * size)


def test_attributes_over_several_lines():
    text = (
        "ENTRY %e (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        '  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"a":"{\\"b\\": 128}"\n}}, '
        'metadata={op_name="f/kernel"}, backend_config={"custom_call_config":'
        '{"cost_estimate":{"flops":7,"transcendentals":5,"bytes_accessed":3}}}\n'
        "  ROOT %r = f32[8]{0} all-reduce(%k), replica_groups={{0,1}}, to_apply=%add\n}\n"
    )
    module = parse("HloModule m\n\n" + text)
    assert module.unread == []
    kernel = module.entry.instructions[1]
    assert (kernel.operation, len(module.entry.instructions)) == ("f/kernel", 3)
    assert len(collectives_of(module)) == 1
    cost = with_loops(Cost(1.0, 1.0, 1.0, "s"), module)
    assert (cost.flops, cost.transcendentals) == (7 + 8, 5)  # with the sums of the all-reduce
    # Without an estimate, the flops are unknown, and so is the time.
    cost = with_loops(Cost(1.0, 1.0, 1.0, "s"), parse(text.replace("cost_estimate", "other")))
    assert (cost.flops, cost.transcendentals) == (None, None)
    assert cost.why == "custom calls of unknown cost: tpu_custom_call"
    assert roofline_of(cost, collectives_of(module), "TPU v5e").seconds is None


@pytest.mark.parametrize(
    ("fun", "flops"),
    [  # of 16 rows of 16, after which 1 is added to each
        (jnp.linalg.cholesky, None),  # XLA calls LAPACK, and counts it as -1
        (lambda x: jnp.linalg.svd(x)[1], None),
        (lambda x: jax.pure_callback(np.sin, x, x), 16 * 16),  # the host computes it
        (lambda x: jax.lax.top_k(x, 4)[0], 16 * 16 * 4 + 16 * 4),  # sorts of 16 by 4 steps
        (lambda x: x[jnp.arange(4)], 4 * 16),
    ],
)
def test_flops_of_library_calls_are_unknown_or_right(fun, flops):
    compiled = jax.jit(lambda x: fun(x) + 1).lower(jnp.ones((16, 16))).compile()
    cost = with_loops(Cost(0.0, 0.0, 0.0, "s"), parse(compiled.as_text()))
    assert cost.flops == flops
    assert ("custom calls of unknown cost" in (cost.why or "")) == (flops is None)
    # XLA knows none of the figures of a program with a custom call.
    lowered = jit(lambda x: fun(x) + 1).lower(jnp.ones((16, 16)))
    assert lowered.compile().cost().flops == flops
    # Before optimisation, XLA counts such a call as -1.
    assert ("custom calls of unknown cost" in (lowered.cost().why or "")) == (flops is None)
    assert flops is not None or lowered.cost().flops is None


FP8 = "float8_e4m3fn"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
@pytest.mark.parametrize(
    ("dtypes", "convert", "narrow"),
    [  # of both factors, and what the user converts them to
        (("int8", "int8"), None, "int8_flops"),
        ((FP8, FP8), None, "fp8_flops"),
        (("float8_e5m2", FP8), None, "fp8_flops"),
        ((FP8, FP8), "bfloat16", None),
        (("bfloat16", "int8"), "bfloat16", None),
        (("bfloat16", "bfloat16"), FP8, "fp8_flops"),
    ],
)
def test_products_of_narrow_numbers_on_cpus(dtypes, convert, narrow):
    """Whose compiler multiplies wider ones, though the program does not say so."""

    def product(*factors):
        factors = [x if convert is None else x.astype(convert) for x in factors]
        return jax.lax.dot(*factors, preferred_element_type="float32")

    args = shape(64, 32, dtype=dtypes[0]), shape(32, 16, dtype=dtypes[1])
    cost = jit(product).lower(*args).compile().cost()
    for name in ("int8_flops", "fp8_flops"):
        assert getattr(cost, name) == (2 * 64 * 32 * 16 if name == narrow else 0)


def test_bytes_of_rows_that_an_index_chooses():
    """Those of the rows, not of the table, of which XLA counts all."""
    lookup = jit(lambda table, i: table[i])
    shapes = jax.ShapeDtypeStruct((10_000, 64), "float32"), jax.ShapeDtypeStruct((32,), "int32")
    cost = lookup.lower(*shapes).compile().cost()
    assert cost.bytes_accessed == pytest.approx(2 * 32 * 64 * 4, rel=0.05)


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def max_pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 7, 7, 1), (1, 1, 1, 1), "SAME")


COMPLEX = {"dtype": "complex64"}
# A function, its arguments, and its flops by hand.
BY_HAND = {
    # A multiply-add of complex numbers is 4 multiplications and 4 additions.
    "product": (jnp.matmul, [shape(16, 32, **COMPLEX), shape(32, 8, **COMPLEX)], 8 * 16 * 32 * 8),
    "multiply": (jnp.multiply, [shape(64, **COMPLEX), shape(64, **COMPLEX)], 6 * 64),
    "add": (jnp.add, [shape(64, **COMPLEX), shape(64, **COMPLEX)], 2 * 64),
    # 32 FFTs of 64 points, and 64 of 32: 5 n log2 n for each.
    "fft": (jnp.fft.fft2, [shape(64, 32, **COMPLEX)], 5 * 64 * 32 * (6 + 5)),
    # Rows of 16 by 4 steps, not 256 elements by 8.
    "sort": (lambda x: jax.lax.sort(x, dimension=1), [shape(16, 16)], 16 * 16 * 4),
    "columns": (lambda x: jax.lax.sort(x, dimension=0), [shape(32, 8)], 8 * 32 * 5),
    # Of a window of 7, 4 5 6 7 6 5 4 elements are in the image; joined to one by one less.
    "window": (max_pool, [shape(8, 7, 7, 16)], 8 * 16 * (37**2 - 7**2)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_flops_by_their_definitions(name):
    fun, args, flops = BY_HAND[name]
    assert jit(fun).lower(*args).compile().cost().flops == flops


@pytest.mark.parametrize("adds", [False, True])
def test_bytes_of_rows_that_are_written_into_a_donated_array(adds):
    """Rows of updates are read and written, and those of the array read, if they are added."""
    rows, size = 64, 256 * 4

    def update(table, i, new):
        return table.at[i].add(new) if adds else table.at[i].set(new)

    args = shape(10_000, 256), shape(rows, dtype="int32"), shape(rows, 256)
    compiled = jit(update, donate_argnums=0).lower(*args).compile()
    assert compiled.memory().aliased == 10_000 * size
    by_hand = (3 if adds else 2) * rows * size
    assert compiled.cost().bytes_accessed == pytest.approx(by_hand, rel=0.05)


def test_bytes_of_complex_numbers_on_tpus():
    """Which their compiler reads and writes as two arrays, by custom calls."""
    lines = [
        f'  %h{i} = f32[1024]{{0:T(1024)S(1)}} custom-call(%a), custom_call_target="X64Split{half}"'
        for i, half in enumerate(("High", "Low"))
    ]
    text = "\n".join(
        [
            "ENTRY %main (a: c64[1024]) -> c64[1024] {",
            "  %a = c64[1024]{0:T(1024)} parameter(0)",
            *lines,
            "  ROOT %r = c64[1024]{0:T(1024)} custom-call(%h0, %h1), "
            'custom_call_target="X64Combine"',
            "}",
        ]
    )
    cost = cost_with_loops(TPU + text)
    assert (cost.bytes_accessed, cost.flops) == (2 * 8 * 1024, 0)


@pytest.mark.parametrize(
    ("attributes", "is_known"),
    [
        ('custom_call_target="mine"', True),  # XLA may repeat it, so it waits for no device
        ('custom_call_target="mine", custom_call_has_side_effect=true', False),
        ('custom_call_target="xla_ffi_python_cpu_callback", custom_call_has_side_effect=true', 1),
        ('custom_call_target="MegaScaleCollectiveInputStart"', False),
    ],
)
def test_custom_calls(attributes, is_known):
    found = collectives_of(f"%m {{\n  %a = f32[8]{{0}} custom-call(%x), {attributes}\n}}")
    assert (found is not None) == bool(is_known)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ('(f32[4]{0}) custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"', 48),
        ('(f32[4]{0}) custom-call(%x), custom_call_target="xla_ffi_python_cpu_callback"', 0),
        ("(f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true", 32),
        ("(f32[4]{0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true", 16),
        ("(f32[4]{0}, token[]) infeed(%t)", 16),
        ("token[] outfeed(%x, %t)", 32),
        ("f32[8]{0:S(5)} copy(%x)", 32),
        ("f32[8]{0} copy(%x)", 0),
    ],
)
def test_bytes_between_device_and_host(line, size):
    makers = "  %x = f32[8]{0} parameter(0)\n  %t = token[] after-all()\n"
    cost = cost_with_loops(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{makers}  ROOT %r = {line}\n}}")
    assert cost.host_bytes == size


def test_the_branch_that_sends_most_counts():
    branch = "%b{i} (p{i}: f32[8]) -> f32[8] {{\n{lines}  ROOT %o{i} = f32[8]{{0}} negate(%x)\n}}\n"
    gather = "  %{n} = f32[{k}]{{0}} all-gather(%x), replica_groups={{{{0,1}}}}\n"
    texts = [
        branch.format(i=0, lines=gather.format(n="g0", k=16)),
        branch.format(i=1, lines=gather.format(n="g1", k=32) + gather.format(n="g2", k=64)),
        branch.format(i=2, lines=""),
    ]
    entry = (
        "ENTRY %e (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
        "  %i = s32[] constant(0)\n"
        "  %c = f32[8]{0} conditional(%i, %x, %x, %x), branch_computations={%b0, %b1, %b2}\n"
        + gather.format(n="g3", k=128)
        + "  ROOT %z = f32[8]{0} copy(%c)\n}"
    )
    found = collectives_of("HloModule m\n\n" + "".join(texts) + entry)
    assert {one.name: one.times for one in found} == {"g0": 0, "g1": 1, "g2": 1, "g3": 1}
    assert found.bytes_sent == (32 + 64 + 128) * 4 // 2
    assert "of conditionals the branch that sends most" in str(found)


@pytest.mark.parametrize(("operand", "result"), [(1024, 16384), (16384, 1024)])
def test_a_ragged_exchange_sends_what_is_taken_at_most(operand, result):
    text = (
        f"%m {{\n  %x = bf16[{operand},64]{{1,0}} parameter(0)\n  %s = bf16[{result},64]{{1,0}} "
        "ragged-all-to-all(%x, %o, %i, %i, %i, %i), replica_groups=[1,16]<=[16]\n}"
    )
    [one] = collectives_of(text)
    assert one.bytes == one.bytes_sent == 1024 * 64 * 2


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),  # two of four, twice
        ("{{0,2},{1,3},{4,6},{5,7}}", ("model",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "model")),
        ("{{0,5},{1,4},{2,7},{3,6}}", None),
        ("{{0,1},{2,4},{3,5},{6,7}}", None),
        ("{{0,1},{2,3}}", None),
    ],
)
def test_groups_over_parts_of_axes(groups, axes):
    text = f"%a = f32[8]{{0}} all-reduce(%x), replica_groups={groups}"
    assert collectives_of(text, {"data": 2, "model": 4})[0].axes == axes


@pytest.mark.parametrize(
    ("shape", "size"),
    [  # the figures that the compiler for TPUs reports for such arguments
        ("pred[8,8,8,8]{3,2,1,0:T(8,128)(4,1)}", 8 * 8 * 8 * 128),
        ("f32[100000,3]{0,1:T(4,128)}", 4 * 100096 * 4),
        ("s4[8192,4]{0,1:T(8,128)(8,1)E(4)}", 8 * 8192 // 2),
        ("bf16[300]{0:T(512)(128)(2,1)}", 512 * 2),
        ("f32[]{:T(128)}", 128 * 4),
        ("f32[3,5]{1,0}", 3 * 5 * 4),
        ("(f32[0,4]{1,0:T(8,128)}, s32[2]{0:T(128)})", 128 * 4),
    ],
)
def test_bytes_with_tiles(shape, size):
    assert padded_bytes(shape) == size


def test_the_peak_is_that_of_the_device():
    names = ("argument", "output", "temp", "alias", "generated_code")
    sizes = {f"{name}_size_in_bytes": 10 for name in names}
    on_host = {f"host_{name}": 0 for name in sizes} | {"host_argument_size_in_bytes": 1000}
    analysis = types.SimpleNamespace(**sizes, **on_host, peak_memory_in_bytes=1030)
    assert memory_of(analysis).peak == 10 + 10 - 10 + 10 + 10


def test_memory_of_tpus_is_what_their_compiler_gives():
    """``... exceeds available HBM (15.75G)``; others have other limits."""
    limits = {"TPU v4": 30.75, "TPU v5e": 15.75, "TPU v5p": 95.73, "TPU v6e": 31.24}
    for name, gib in (limits | {"TPU7x": 94.74}).items():
        assert HARDWARE[name].memory_bytes == round(gib * 2**30)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.norm(self.linear(x)))


class Stack(nnx.Module):
    def __init__(self, rngs):
        make = nnx_sharding.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs), axis_size=4)
        self.layers = nnx.split_rngs(splits=4)(make)(rngs)

    def __call__(self, x):
        return nnx_sharding.scan(lambda x, layer: (nnx.gelu(layer(x)), None))(x, self.layers)[0]


def gradients_of(make):
    """The collectives of gradients in a training step on 2 × 4 devices, and all others."""
    mesh = mesh_of((2, 4), ("data", "model"))

    def both():
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(both)
    base = nnx_sharding.tensor_parallel(model, mesh=mesh)
    sharding = nnx_sharding.fsdp(model, mesh=mesh, base=base, optimizer=optimizer, min_size=0)

    @jit(in_shardings=(sharding, sharding, P("data")), mesh=mesh)
    def step(model, optimizer, x):
        grads = nnx_sharding.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    found = step.lower(model, optimizer, jax.ShapeDtypeStruct((8, 16), "float32")).compile()
    found = found.collectives()
    assert all(one.axes for one in found)
    return [one for one in found if one.purpose == "gradient"], found


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
def test_names_of_gradients():
    found, every = gradients_of(Stack)
    summed = [one for one in found if one.kind == "all-reduce"]
    # One reduction of both, and none of what products with the kernel return.
    assert {one.parameters for one in summed if "data" in one.axes} == {
        ("model.layers.kernel", "model.layers.bias")
    }
    assert not [one for one in summed if "model" in one.axes]
    assert [one for one in every if one.purpose == "sum" and one.in_loop]
    found, _ = gradients_of(Block)
    named = {path for one in found for path in one.parameters}
    assert "model.linear.kernel" in named
    assert not named & {"model.norm.mean", "model.norm.var"}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
def test_gradients_of_the_layers_of_a_stage():
    """In each of 5 ticks, those of 4 of 8 layers are summed over the data."""
    mesh = mesh_of((2, 4), ("stage", "data"))
    make = nnx_sharding.stack
    model = nnx.eval_shape(lambda: make(nnx.Linear, 8, 64, 64, rngs=nnx.Rngs(0)))
    sharding = nnx_sharding.partition.pipeline(model, mesh=mesh, microbatches=4)
    gradient = nnx_sharding.value_and_grad(lambda model, x: (model(x) ** 2).mean())
    step = jit(gradient, in_shardings=(sharding, P("data")), mesh=mesh)
    sent = step.lower(model, shape(64, 64)).compile().collectives()
    found = [one for one in sent if one.purpose == "gradient"]
    assert {path for one in found for path in one.parameters} == {
        "model.layers.bias", "model.layers.kernel"
    }  # fmt: skip
    assert sum(one.bytes * one.times for one in found) == 5 * 4 * (64 * 64 + 64) * 4


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 256, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.up(self.norm(x)).reshape(*x.shape, 4).sum(-1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
def test_gradients_of_a_stack_in_microbatches():
    """That of the norm is reduced once, for which the backward pass is evaluated anew."""
    mesh = mesh_of((8,), ("data",), "explicit")
    model = nnx.eval_shape(lambda: nnx_sharding.stack(Normed, 4, rngs=nnx.Rngs(0)))
    sharding = nnx_sharding.fsdp(model, mesh=mesh, min_size=1024)
    gradient = nnx_sharding.accumulate_gradients(lambda model, x: (model(x) ** 2).mean(), steps=2)
    step = jit(lambda model, x: gradient(model, x), in_shardings=(sharding, P("data")), mesh=mesh)
    sent = step.lower(model, shape(32, 8, 64)).compile().collectives()
    assert {(one.parameters, one.times) for one in sent if one.purpose == "gradient"} == {
        (("model.layers.up.kernel",), 8), (("model.layers.norm.scale",), 1)
    }  # fmt: skip
    assert all(one.shapes == ((),) for one in sent if one.purpose == "sum")


@pytest.mark.parametrize("layers_of_stage", [2, 3])
def test_gradients_of_a_pipeline(layers_of_stage):
    """They are named also with three layers, where the loop over them is as long as over ticks."""
    mesh = mesh_of((2, 4), ("stage", "data"))
    make_stack = nnx_sharding.stack
    model = nnx.eval_shape(lambda: make_stack(Normed, 2 * layers_of_stage, rngs=nnx.Rngs(0)))
    base = nnx_sharding.fsdp(model, mesh=mesh, min_size=1024)
    sharding = nnx_sharding.partition.pipeline(model, mesh=mesh, microbatches=2, base=base)

    def step(model, x):
        return nnx_sharding.grad(lambda model: (model(x) ** 2).mean())(model)

    program = jit(step, in_shardings=(sharding, P("data")), mesh=mesh)
    sent = program.lower(model, shape(16, 64)).compile().collectives()
    named = {path for one in sent if one.purpose == "gradient" for path in one.parameters}
    assert named == {"model.layers.norm.scale", "model.layers.up.kernel"}


class Words(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.head = nnx.Linear(16, 64, use_bias=False, rngs=rngs)

    def __call__(self, words):
        return self.head(self.embed(words))


def test_the_gradient_of_an_embedding_is_named():
    """It adds up products with the kernel of the head, by a scatter; both may be in one sum."""
    mesh = mesh_of((8,), ("data",))
    model = nnx.eval_shape(lambda: Words(nnx.Rngs(0)))

    def step(model, words):
        return nnx_sharding.grad(lambda model: (model(words) ** 2).mean())(model)

    shardings = nnx_sharding.partition.replicated(model), P("data")
    words = jax.ShapeDtypeStruct((64, 8), "int32")
    program = jit(step, in_shardings=shardings, mesh=mesh).lower(model, words).compile()
    gradients = [x for x in program.collectives() if x.purpose == "gradient"]
    named = {path for one in gradients for path in one.parameters}
    assert named == {"model.embed.embedding", "model.head.kernel"}
    kernels = 2 * 64 * 16 * 4
    assert kernels <= sum(one.bytes for one in gradients) < kernels + 64


class Frozen(nnx.Param):
    """A parameter that is not trained."""


class Table(nnx.Module):
    def __init__(self, rngs):
        self.table = Frozen(rngs.params.normal((16, 16)))
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x @ self.table[...]))


TRAINED = nnx.All(nnx.Param, nnx.Not(Frozen))


def update(model, x):
    gradient = nnx.grad(lambda m: (m(x) ** 2).mean(), argnums=nnx.DiffState(0, TRAINED))(model)
    params = nnx.state(model, TRAINED)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, params, gradient))


def return_gradient(model, x):
    return nnx_sharding.grad(lambda m: (m(x) ** 2).mean())(model)


@pytest.mark.parametrize(
    ("step", "sharding", "is_named"),
    [
        (update, P(), False),
        (update, nnx_sharding.StateSharding({...: P()}), False),
        (update, nnx_sharding.partition.from_rules({}, default=P()), False),
        (return_gradient, P(), True),  # its gradient is computed, and nothing is updated
    ],
    ids=["spec", "filters", "strategy", "gradient of all"],
)
def test_a_frozen_parameter_has_no_gradient(step, sharding, is_named):
    """The table has the shape of the head, and only a strategy puts modules into names."""
    mesh = mesh_of((8,), ("data",))
    model = nnx.eval_shape(lambda: Table(nnx.Rngs(0)))
    program = jit(step, in_shardings=(sharding, P("data")), mesh=mesh)
    sent = program.lower(model, shape(64, 16)).compile().collectives()
    named = {path for one in sent if one.purpose == "gradient" for path in one.parameters}
    trained = {"model.head.kernel", "model.norm.bias", "model.norm.scale"}
    assert named == trained | ({"model.table"} if is_named else set())


@pytest.mark.parametrize(
    ("dims", "is_gradient"),
    [  # of a stack of 4 layers, of which a stage has one
        ((1, 1, 1, 256, 128), True),
        ((1, 256, 128), True),
        ((128, 256), True),
        ((4, 256, 128), True),
        ((3, 256, 128), False),
        ((256, 64), False),
    ],
)
def test_gradients_of_one_layer_for_each_stage(dims, is_gradient):
    from nnx_sharding.analysis.parameters import ParameterRow

    shapes = (4, 256, 128), "float32", None, (1, 256, 128)
    rows = [ParameterRow("m.up.kernel", *shapes, 1, 1, variable="Param")]
    text = (
        "HloModule m\n\nENTRY %e {\n  %a = f32[1,256,128]{2,1,0} parameter(0)\n"
        f"  %g = f32[{','.join(map(str, dims))}]{{0}} negate(%a)\n"
        f"  ROOT %s = f32[{','.join(map(str, dims))}]{{0}} all-reduce(%g), "
        'replica_groups={{0,1}}, metadata={op_name="jit(f)/transpose(jvp(m))/up/dot_general"}\n}'
    )
    [one] = collectives_of(text, {"data": 2}, rows)
    assert (one.purpose == "gradient") == is_gradient


# Merged collectives: (shape of an array, its operation) for each array, of lines 1, 2, ...; then
# the purpose, the column "of", the line, and the name in a lock file.
UP, DOWN, NORM = (
    "transpose(jvp(m))/up/dot",
    "transpose(jvp(m))/down/dot",
    "transpose(jvp(m))/norm/sum",
)
MERGED = {
    "two gradients": (
        [((64, 16), DOWN), ((16, 64), UP)],
        ("gradient", "m.down.kernel +1", "m.py:1", "m.down.kernel and m.up.kernel"),
    ),
    "the largest is not the first": (
        [((8,), NORM), ((16, 64), UP)],
        ("gradient", "m.up.kernel +1", "m.py:2", "m.norm.scale and m.up.kernel"),
    ),
    "three": (
        [((8,), NORM), ((64, 16), DOWN), ((16, 64), UP)],
        ("gradient", "m.down.kernel +2", "m.py:2", "m.down.kernel and 2 others"),
    ),
    "a loss": (
        [((), "jvp(m)/sum"), ((16, 64), UP)],
        ("gradient", "m.up.kernel +1", "m.py:2", "m.up.kernel"),
    ),
    "a larger sum": (
        [((), "jvp(m)/sum"), ((8,), NORM), ((99, 8), "transpose(jvp(m))/jit(sort)/scatter")],
        ("sum", "m/jit(sort)/scatter +2", "m.py:3", "m"),
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_collective_is_named_after_most_of_it(name):
    from nnx_sharding.analysis.collectives import _row
    from nnx_sharding.analysis.parameters import ParameterRow

    arrays, expected = MERGED[name]
    shapes = {"m.up.kernel": (16, 64), "m.down.kernel": (64, 16), "m.norm.scale": (8,)}
    rows = [
        ParameterRow(path, shape, "float32", None, shape, 1, 1, variable="Param")
        for path, shape in shapes.items()
    ]
    types = [f"f32[{','.join(map(str, dims))}]" for dims, _ in arrays]
    operands = [f"  %p{i} = {kind} parameter({i})" for i, kind in enumerate(types)]
    items = [
        f"  %g{i} = {types[i]} get-tuple-element(%s), index={i}, metadata={{"
        f'op_name="jit(f)/{operation}" stack_frame_id={i + 1}}}'
        for i, (_, operation) in enumerate(arrays)
    ]
    joined = ":".join(operation for _, operation in arrays)
    names = ", ".join(f"%p{i}" for i in range(len(arrays)))
    total = (
        f"  %s = ({', '.join(types)}) all-reduce({names}), replica_groups={{{{0,1}}}}, "
        f'metadata={{op_name="jit(f)/({joined})" stack_frame_id=9}}'
    )
    end = "  ROOT %z = f32[] constant(0)\n}"
    numbers = range(1, 10)
    tables = [
        'FileNames\n1 "/u/m.py"\n\nFunctionNames\n1 "f"\n\nFileLocations',
        *(f"{n} {{file_name_id=1 function_name_id=1 line={n} column=1}}" for n in numbers),
        "\nStackFrames",
        *(f"{n} {{file_location_id={n} parent_frame_id={n}}}" for n in numbers),
    ]
    head = ["HloModule m\n", *tables, "\nENTRY %e {"]
    text = "\n".join([*head, *operands, total, *items, end])
    [one] = collectives_of(text, {"data": 2}, rows)
    locked = _collective_name(one).partition(" of ")[2]
    assert (one.purpose, _row(one).of, one.source, locked) == expected
    assert _row(dataclasses.replace(one, parts=())) == _row(one)  # as read from JSON
    assert [part.shape for part in one.parts] == [dims for dims, _ in arrays]
    assert sum(part.bytes for part in one.parts) == one.bytes


class Scoped(nnx.Module):
    """Four layers of one shape, in scopes that tell in a program which layer an operation is of."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, use_bias=False, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(layer(x))
        return x


def as_tuples(model):
    return tuple((nnx.Param(layer.kernel[...]),) for layer in model.layers)


def as_dict(model):
    return {f"w{i}": nnx.Param(layer.kernel[...]) for i, layer in enumerate(model.layers)}


def as_state(model):
    return nnx.state(model, nnx.Param)


def muon(rate):
    """Its updates are products of moments."""

    def updated(m):
        return m @ m.T @ m * -rate

    def update(grads, trace, params=None):
        trace = jax.tree.map(lambda m, g: 0.9 * m + g, trace, grads)
        return jax.tree.map(updated, trace), trace

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
WITH_DECAY = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
SCHEDULED = optax.adamw(optax.linear_schedule(0.0, 0.01, 5), weight_decay=0.1)
# What a step is of: optimizer, the form of the parameters, and what differs from the usual step.
STEPS_OF_TREES = [
    (optax.sgd(0.1), as_state, {}),
    (optax.adam(0.01), as_state, {"donated": True}),
    (optax.adam(0.01), as_dict, {"state_first": True}),
    (CLIPPED, as_state, {}),
    (CLIPPED, as_tuples, {"state_first": True, "donated": True}),
    (CLIPPED, as_dict, {"kind": "explicit", "spec": P()}),
    (CLIPPED, as_dict, {"steps": 2}),
    (WITH_DECAY, as_state, {}),  # the decay puts parameters into the new moments
    (SCHEDULED, as_tuples, {"steps": 2, "spec": P()}),
    (optax.chain(optax.adam(0.01), optax.ema(0.9)), as_dict, {}),
    (optax.MultiSteps(optax.adam(0.01), 2), as_state, {}),
    # Nothing says which parameter of its shape a gradient is of that is returned, and little if
    # products are on the way to the update.
    (muon(0.1), as_state, {"one_of": True}),
    (None, as_dict, {"one_of": True}),
]


@pytest.mark.parametrize(("optimizer", "form", "other"), STEPS_OF_TREES)
def test_gradients_of_trees_are_those_of_parameters(optimizer, form, other):
    from nnx_sharding.analysis.collectives import _row

    mesh = mesh_of((4, 2), ("data", "model"), other.get("kind", "auto"))
    model = Scoped(nnx.Rngs(0))
    graphdef, params = nnx.graphdef(model), form(model)
    structure, spec = jax.tree.structure(as_state(model)), other.get("spec", P("data", "model"))

    def loss(params, x):
        state = jax.tree.unflatten(structure, jax.tree.leaves(params))
        return jnp.mean((nnx.merge(graphdef, state)(x) - x) ** 2)

    def update(params, opt_state, x):
        steps = other.get("steps")
        gradient = nnx_sharding.accumulate_gradients(loss, steps=steps) if steps else None
        value, grads = (gradient or jax.value_and_grad(loss))(params, x)
        if optimizer is None:
            return grads, opt_state, value
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def with_state_first(opt_state, params, x):
        params, opt_state, value = update(params, opt_state, x)
        return opt_state, params, value

    trees = params, () if optimizer is None else optimizer.init(params)
    if other.get("state_first"):
        trees = trees[::-1]
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda x: jax.NamedSharding(mesh, spec if x.ndim else P()), trees)
        x = jax.device_put(jnp.ones((16, 32)), jax.NamedSharding(mesh, P("data")))
        trees = jax.device_put(trees, shardings)
        step = jit(
            with_state_first if other.get("state_first") else update,
            in_shardings=(*shardings, P("data")),
            out_shardings=(*shardings, P()),
            donate_argnums=(0, 1) if other.get("donated") else (),
        )
        found = step.lower(*trees, x).compile().collectives()
    paths = {f"params{jax.tree_util.keystr(key)}" for key, _ in paths_of(params)}
    gradients = [one for one in found if one.purpose == "gradient"]
    named = set()
    for one in gradients:
        others = re.search(r"\+(\d+)$", _row(one).of)
        assert int(others[1] if others else 0) == len(one.shapes) - 1
        for part in one.parts or [one]:
            if part.purpose == "gradient":
                [number] = re.findall(r"layer_(\d)", part.operation)
                owners = {path for path in part.parameters if number in path}
                assert owners and {*part.parameters} <= paths
                assert other.get("one_of") or owners == {*part.parameters}
                named |= owners
    assert named == paths


def paths_of(params):
    return jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Param))


def test_a_gradient_in_another_order_is_that_of_what_it_updates():
    """As (64, 32) the gradient of `up` has the shape of `down`, of which a device has half."""
    sizes, mesh = {"up": (32, 128), "down": (128, 32)}, mesh_of((4, 2), ("data", "model"))
    params = {path: nnx.Param(jnp.ones(size)) for path, size in sizes.items()}
    shardings = {"up": P("data", "model"), "down": P("model", "data")}

    def step(params, x):
        def loss(params):
            with jax.named_scope("up"):
                y = jnp.tanh(x @ params["up"][...])
            with jax.named_scope("down"):
                return jnp.mean((y @ params["down"][...]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    program = jit(step, in_shardings=(shardings, P("data")), out_shardings=shardings, mesh=mesh)
    found = program.lower(params, jnp.ones((16, 32))).compile().collectives()
    parts = [part for one in found for part in one.parts or [one] if part.purpose == "gradient"]
    assert parts
    for part in parts:
        [scope] = re.findall("up|down", part.operation)
        assert part.parameters == (f"params['{scope}']",)


@pytest.mark.parametrize(
    ("names", "arrays", "text"),
    [  # names of equal shape, the number of summed arrays, and the column "of"
        (["w.a"], 1, "w.a"),
        (["w.a", "w.b"], 1, "w.a or 1 other"),
        (["w.a", "w.b", "w.c"], 1, "w.a or 2 others"),
        (["w.a", "w.b", "w.c"], 2, "w.a or 2 others +1"),
        (["w.a", "w.b", "w.c"], 3, "w.a +2"),
        (["w[0].a", "w[1].a", "w[2].a"], 1, "w[*].a"),
    ],
)
def test_a_gradient_of_one_of_several_parameters(names, arrays, text):
    from nnx_sharding.analysis.collectives import _row
    from nnx_sharding.analysis.parameters import ParameterRow

    shape = (8, 8)
    rows = [
        ParameterRow(path, shape, "float32", None, shape, 1, 1, variable="Param") for path in names
    ]
    inputs = [f"  %p{i} = f32[8,8] parameter({i})" for i in range(len(names))]
    made = [f"  %g{i} = f32[8,8] negate(%p{i})" for i in range(arrays)]
    operands = ", ".join(f"%g{i}" for i in range(arrays))
    kind = "f32[8,8]" if arrays == 1 else f"({', '.join(['f32[8,8]'] * arrays)})"
    total = (
        f"  ROOT %s = {kind} all-reduce({operands}), replica_groups={{{{0,1}}}}, "
        'metadata={op_name="jit(f)/transpose(jvp())/dot"}\n}'
    )
    hlo = "\n".join(["HloModule m\n\nENTRY %e {", *inputs, *made, total])
    [one] = collectives_of(hlo, {"data": 2}, rows)
    assert (one.purpose, _row(one).of) == ("gradient", text)


PADDED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%pad (p0: f32[8,4], p1: f32[2,4], p2: s32[]) -> f32[8,4] {
  %p0 = f32[8,4] parameter(0)
  %p1 = f32[2,4] parameter(1)
  %p2 = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %u = f32[8,4] dynamic-update-slice(%p0, %p1, %p2, %z)
}

ENTRY %e (p: f32[2,4], n: s32[], y: f32[2,4], whole: f32[8,4]) -> f32[8,4] {
  %p = f32[2,4] parameter(0)
  %n = s32[] parameter(1)
  %y = f32[2,4] parameter(2)
  %whole = f32[8,4] parameter(3)
  %x = f32[2,4] exponential(%y)
  %fill = f32[] constant(FILL)
  %zeros = f32[8,4] broadcast(%fill), dimensions={}
  %id = u32[] partition-id()
  %rows = u32[] constant(2)
  %at = u32[] multiply(%id, %rows)
  %offset = s32[] convert(%at)
  %padded = f32[8,4] fusion(%TARGET, %PART, %OFFSET), kind=kLoop, calls=%pad
  ROOT %all = f32[8,4] all-reduce(%padded), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    "fill, target, part, offset, purpose",
    [
        ("0", "zeros", "p", "offset", "parameter"),
        ("1", "zeros", "p", "offset", "sum"),  # the sum of the rest is no part
        ("0", "whole", "p", "offset", "sum"),
        ("0", "zeros", "p", "n", "sum"),  # all devices may write the same rows
        ("0", "zeros", "x", "offset", "result"),  # what is joined is no parameter
    ],
)
def test_a_sum_of_parts_in_zeros_is_a_gather(fill, target, part, offset, purpose):
    """As the compiler for TPUs gathers over all chips of a v5p 4 × 4 × 4."""
    from nnx_sharding.analysis.parameters import ParameterRow

    words = {"FILL": fill, "TARGET": target, "PART": part, "OFFSET": offset}
    text = re.sub("|".join(words), lambda word: words[word[0]], PADDED)
    rows = [
        ParameterRow("m.w", (8, 4), "float32", P("data"), (2, 4), 128, 32, variable="Param"),
        ParameterRow("n", (), "int32", P(), (), 4, 4),
        ParameterRow("y", (8, 4), "float32", P("data"), (2, 4), 128, 32),
        ParameterRow("whole", (8, 4), "float32", P(), (8, 4), 128, 128),
    ]
    [one] = collectives_of("HloModule m\n" + text, {"data": 4}, rows)
    assert (one.kind, one.purpose, one.bytes_sent) == ("all-reduce", purpose, 192)


class Projections(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.Linear(64, 64, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.o_proj(jnp.tanh(self.q_proj(x)))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPUs")
@pytest.mark.parametrize(
    ("axis", "scan"), [(0, "nnx_sharding"), (1, "nnx_sharding"), (1, "nnx"), (2, "nnx_sharding")]
)
def test_gradients_in_a_scan_over_any_axis(axis, scan):
    mesh = mesh_of((2, 4), ("data", "model"))
    carry = nnx.Carry if scan == "nnx" else nnx_sharding.Carry
    scan = nnx.scan if scan == "nnx" else nnx_sharding.scan
    make = nnx.split_rngs(splits=4)(nnx.vmap(Projections, in_axes=0, out_axes=axis))
    layers = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    base = nnx_sharding.tensor_parallel(layers, mesh=mesh)
    sharding = nnx_sharding.fsdp(layers, mesh=mesh, base=base, min_size=0)

    def loss(layers, x):
        run = scan(lambda layer, x: layer(x), in_axes=(axis, carry), out_axes=carry)
        return (run(layers, x) ** 2).mean()

    step = jit(nnx_sharding.grad(loss), in_shardings=(sharding, P("data")), mesh=mesh)
    program = step.lower(layers, jax.ShapeDtypeStruct((8, 64), "float32")).compile()
    [one] = [x for x in program.collectives().of("all-reduce", "data") if x.bytes > 4]
    assert one.purpose == "gradient"
    assert one.parameters == ("layers.o_proj.kernel", "layers.q_proj.kernel")


def test_a_sum_of_two_operations_has_the_name_of_the_first():
    text = (
        "%s = f32[8] all-reduce(%a), replica_groups={{0,1}}, "
        'metadata={op_name="jit(f)/m/(up/dot_general:reduce_sum)"}'
    )
    found = collectives_of(text, {"data": 2}, [])
    assert "  m/up/dot_general +1" in str(found)
    assert _collective_name(found[0]).endswith(" for sum of dot_general and reduce_sum")
