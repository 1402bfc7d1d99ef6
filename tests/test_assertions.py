"""The assertions about programs: when they pass, and their messages when they fail."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import NamedSharding

from nnx_sharding import jit, testing
from nnx_sharding.analysis.collectives import Collectives
from nnx_sharding.partition import replicated, tensor_parallel
from nnx_sharding.testing import (
    assert_bytes_sent_below,
    assert_collectives,
    assert_no_collective,
    assert_peak_below,
    assert_sharded,
)
from zoo import MLP, P, mesh_of

pytest_plugins = "pytester"

F32 = 4
WIDTH, HIDDEN, ROWS = 64, 256, 16
MESH = mesh_of((2, 4), ("data", "model"))
OUTPUT = ROWS // 2 * WIDTH * F32  # of one device


def make():
    return MLP(nnx.Rngs(0), WIDTH, HIDDEN)


@functools.cache
def lowered(strategy=tensor_parallel):
    with jax.set_mesh(MESH):
        sharding = strategy(make())

    @jit(in_shardings=(sharding, P("data")), out_shardings=P("data"), mesh=MESH)
    def forward(model, x):
        return model(x)

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return forward.lower(nnx.eval_shape(make), x)


@functools.cache
def compiled(strategy=tensor_parallel):
    return lowered(strategy).compile()


def programs(strategy=tensor_parallel):
    """The program and its report, which give the same results."""
    return compiled(strategy), compiled(strategy).report()


def message(function, *args, **options):
    with pytest.raises(AssertionError) as caught:
        function(*args, **options)
    return str(caught.value)


class CollectiveTest(parameterized.TestCase):
    def test_expected_collectives(self):
        for program in programs():
            assert_collectives(program, {("all-reduce", "model"): 1})
            assert_collectives(program, {("all-reduce", ("model",)): 1, ("all-gather", "data"): 0})
            assert_no_collective(program, "all-gather")
            assert_no_collective(program, "all-gather", "model")
            assert_no_collective(program, axes="data")
        for program in programs(replicated):
            assert_no_collective(program)
            assert_collectives(program, {})

    def test_unexpected_collectives(self):
        line = (
            f"  all-reduce over model, 2.00 KiB, sends {2 * OUTPUT * 3 // 4 / 1024:.2f} KiB: "
            "jit(forward)/"
        )
        for program in programs():
            text = message(assert_no_collective, program)
            assert text.startswith("forward has 1 collective:\n" + line), text
            assert re.search(r"dot_general, zoo\.py:\d+$", text, re.MULTILINE), text
            text = message(assert_no_collective, program, "all-reduce", ("data", "model"))
            assert text.startswith("forward has 1 all-reduce over 'data', 'model':\n"), text
            assert_no_collective(program, larger_than="2 KiB")
            assert text == message(
                assert_no_collective, program, "all-reduce", ("data", "model"), larger_than=2047
            )

    def test_other_numbers(self):
        for program in programs():
            expected = {("all-gather", "model"): 2, ("all-reduce", ("model", "data")): 1}
            text = message(assert_collectives, program, expected)
            assert "  all-gather over 'model': 0, expected 2\n" in text
            assert "  all-reduce over 'data', 'model': 0, expected 1\n" in text
            assert (
                "  all-reduce over 'model': 1, expected 0\n    all-reduce over model, 2.0" in text
            )

    def test_bytes_sent(self):
        sent = 2 * OUTPUT * 3 // 4
        for program in programs():
            assert_bytes_sent_below(program, sent)
            assert_bytes_sent_below(program, "3 KiB")
            assert_bytes_sent_below(program, 0, axes="data")
            text = message(assert_bytes_sent_below, program, sent - 1, axes="model")
            assert text.startswith(
                "forward sends 3.00 KiB from each device over 'model' in a call; the limit is "
            )
            assert "\n  all-reduce over model, 2.00 KiB" in text

    def test_unknown_axes_and_times(self):
        report = compiled().report()
        one = report.collectives[0]
        nowhere = dataclasses.replace(one, axes=None)
        in_loop = dataclasses.replace(one, times=None, in_loop=True)
        unknown = dataclasses.replace(report, collectives=Collectives([nowhere]))
        assert "over unknown axes" in message(assert_no_collective, unknown, axes="data")
        assert "over unknown axes: 1, expected 0" in message(assert_collectives, unknown, {})
        endless = dataclasses.replace(report, collectives=Collectives([in_loop]))
        text = message(assert_bytes_sent_below, endless, "1 GiB")
        assert "sends an unknown number of bytes, as a loop is of unknown length;" in text
        assert "in a loop of unknown length: " in text
        often = dataclasses.replace(report, collectives=Collectives([one] * 25))
        assert "(and 24 more, to " in message(assert_no_collective, often)

    @parameterized.parameters(assert_no_collective, assert_bytes_sent_below)
    def test_misspelt_axes(self, function):
        options = {"limit": 1} if function is assert_bytes_sent_below else {}
        for program in programs():
            with pytest.raises(ValueError, match="no axis 'modle'; did you mean 'model'"):
                function(program, axes=("data", "modle"), **options)

    def test_bad_arguments(self):
        program = compiled()
        with pytest.raises(ValueError, match="'all-gathre' is not a kind"):
            assert_no_collective(program, "all-gathre")
        with pytest.raises(ValueError, match="'all-gathre' is not a kind"):
            assert_collectives(program, {("all-gathre", "model"): 1})
        with pytest.raises(ValueError, match="no axis 'x'"):
            assert_collectives(program, {("all-gather", "x"): 1})
        for wrong in ({"all-reduce": 1}, [("all-reduce", "model")], 3):
            with pytest.raises(TypeError, match="expected must be a mapping"):
                assert_collectives(program, wrong)
        with pytest.raises(ValueError, match="is not a size"):
            assert_bytes_sent_below(program, "much")
        with pytest.raises(ValueError, match="is not a size"):
            assert_no_collective(program, larger_than="much")

    @parameterized.parameters(
        assert_no_collective,
        lambda program: assert_collectives(program, {}),
        lambda program: assert_bytes_sent_below(program, 1),
        lambda program: assert_peak_below(program, 1),
    )
    def test_not_compiled(self, function):
        with pytest.raises(TypeError, match="compile it first"):
            function(lowered())
        with pytest.raises(TypeError, match=r"nnx_sharding\.jit compiled"):
            function(make())


class PeakTest(parameterized.TestCase):
    def test_limit(self):
        memory = compiled().memory()
        for program in programs():
            assert_peak_below(program, memory.peak + 1)
            text = message(assert_peak_below, program, memory.peak)
            assert text.startswith("forward takes ") and "arguments 34.0 KiB" in text
            kernels = 2 * WIDTH * HIDDEN // 4 * F32
            assert memory.arguments == kernels + ROWS // 2 * WIDTH * F32
            assert "\n  model.down.kernel, shape (256, 64): 16.0 KiB\n" in text
            assert text.index("model.up.kernel") < text.index("x, shape (16, 64)")

    def test_temporaries(self):
        report = compiled().report()
        assert "largest activations" not in message(assert_peak_below, report, 1)
        memory = dataclasses.replace(report.memory, temporaries=report.memory.arguments + 1)
        text = message(assert_peak_below, dataclasses.replace(report, memory=memory), 1)
        assert "The largest activations:\n  model.up, shape (16, 256): " in text
        # Of an array that is sharded in an unknown way, only the bytes of all devices are known.
        rows = [dataclasses.replace(row, bytes_per_device=None) for row in report.activations]
        unknown = dataclasses.replace(report, memory=memory, activations=tuple(rows))
        text = message(assert_peak_below, unknown, 1)
        assert "\n  model.up, shape (16, 256): 16.0 KiB on all devices together" in text
        rows = [dataclasses.replace(row, method="logits") for row in report.activations]
        report = dataclasses.replace(report, memory=memory, activations=tuple(rows))
        assert "\n  model.up.logits(), shape (16, 256): " in message(assert_peak_below, report, 1)

    def test_unknown(self):
        report = dataclasses.replace(compiled().report(), memory=None)
        with pytest.raises(ValueError, match="does not report the memory of forward"):
            assert_peak_below(report, 1)
        with pytest.raises(TypeError, match="a size must be"):
            assert_peak_below(compiled(), 1.5)


class ReplicatedTest(parameterized.TestCase):
    def test_programs(self):
        for program in programs():
            assert_sharded(program, tolerance=0)
        for program in programs(replicated):
            assert_sharded(program, min_size=WIDTH * HIDDEN + 1)
            assert_sharded(program, allowed="kernel$")
            assert_sharded(program, tolerance=0.99)
            text = message(assert_sharded, program, allowed=["up/|up.k"])
            assert text == (
                "64.0 KiB of 132 KiB (48.5%) are fully replicated, more than 2.0%:\n"
                "  model.down.kernel, shape (256, 64): 64.0 KiB, spec P(None, None)\n"
                "Give them specs, or allow it by tolerance=..., min_size=... or allowed=..."
            )
            text = message(assert_sharded, program)
            assert "\n  model.down.kernel" in text and "\n  model.up.kernel" in text

    def test_placed_models(self):
        model = make()
        specs = {"up": P(), "down": P("model")}
        for name, spec in specs.items():
            kernel = getattr(model, name).kernel
            kernel.set_value(jax.device_put(kernel[...], NamedSharding(MESH, spec)))
        text = message(assert_sharded, model, tolerance=0, min_size=2**14)
        assert "  up/kernel, shape (64, 256): 64.0 KiB, spec P" in text
        assert "down" not in text

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match=r"'modle' matches no path, such as model\.down"):
            assert_sharded(compiled(), allowed=["modle"])
        with pytest.raises(ValueError, match="is not a regular expression"):
            assert_sharded(compiled(), allowed=["("])
        for wrong in (-1, 1.5, True, None):
            with pytest.raises(ValueError, match="min_size must be a number"):
                assert_sharded(compiled(), min_size=wrong)


FAILING = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from flax import nnx
from nnx_sharding import jit, stack, testing
from nnx_sharding.partition import fsdp, make_mesh, replicated

MESH = make_mesh({"data": 8})
MODEL = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
OPTIONS = {"in_shardings": (replicated(MODEL), P("data")), "out_shardings": P("data")}
FUN = jit(lambda m, x: m(x) @ m(x).T, mesh=MESH, auto_axes=True, **OPTIONS)
COMPILED = FUN.lower(MODEL, jnp.ones((8, 256))).compile()

LAYERS = stack(nnx.Linear, 2, 64, 64, rngs=nnx.Rngs(0))
SHARDED = fsdp(LAYERS, mesh=MESH, min_size=0)
LOOP = jit(lambda m, x: m(x), in_shardings=(SHARDED, P("data")), mesh=MESH)

def MESH_SIZE():
    return jax.sharding.get_abstract_mesh().size

def test_assert_bytes_sent_below():
    testing.assert_bytes_sent_below(COMPILED, 0)

def test_assert_collectives():
    testing.assert_collectives(COMPILED, {})

def test_assert_gathers_weights():
    testing.assert_gathers_weights(COMPILED)

def test_assert_no_collective():
    testing.assert_no_collective(COMPILED)

def test_assert_same():
    testing.assert_same(lambda x: x * MESH_SIZE(), jnp.ones(8), shardings=(P("data"),), mesh=MESH)

def test_assert_no_resharding():
    testing.assert_no_resharding(COMPILED)

def test_assert_overlappable():
    testing.assert_overlappable(LOOP.lower(LAYERS, jnp.ones((8, 64))).compile())

def test_assert_peak_below():
    testing.assert_peak_below(COMPILED, 1)

def test_assert_sharded():
    testing.assert_sharded(MODEL, sharding=replicated(MODEL), mesh=MESH)

def test_assert_unchanged(tmp_path):
    testing.assert_unchanged(COMPILED, tmp_path / "step.lock", update=True)
    changed = LOOP.lower(LAYERS, jnp.ones((8, 64))).compile()
    testing.assert_unchanged(changed, tmp_path / "step.lock")

def test_unknown_axis():
    testing.assert_no_collective(COMPILED, axes="modle")
"""


def test_pytest_shows_the_line_of_the_test(pytester):
    file = pytester.makepyfile(FAILING)
    output = pytester.runpytest_inprocess("-p", "no:cacheprovider").outlines
    frames = [line for line in output if re.match(r"\S+\.py:\d+: ", line)]
    calls = [line for line in output if line.startswith(">       testing.assert_")]
    names = [name for name in testing.__all__ if name.startswith("assert_")]
    assert len(frames) == len(calls) == len(names) + 1
    assert all(line.startswith(file.name) for line in frames)
    assert [name for name in names if not any(f".{name}(" in line for line in calls)] == []
