"""The programs in ``examples/``."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import resnet
import train_deep
import train_lm
import train_moe
import transformer

from nnx_sharding.analysis import HARDWARE, Hardware
from nnx_sharding.checkpoint import restore
from nnx_sharding.partition import make_mesh
from zoo import mesh_of

LAUNCH = ["-m", "nnx_sharding", "launch", "--processes", "2", "--devices-per-process", "4"]
# Compiling takes most of the time of these processes, and less without optimization.
QUICK = os.environ["XLA_FLAGS"] + " --xla_backend_optimization_level=0"
# Devices add in another order, and float32 has 24 bits. The first losses are about 6.
ROUNDING = 1e-5


class TransformerTest(parameterized.TestCase):
    CONFIG = transformer.Config(context=16, features=32, layers=1, batch=8)

    @pytest.mark.gate
    def test_losses_match_one_device(self):
        mesh = mesh_of((2, 4), ("data", "model"))
        model, optimizer, losses = transformer.train_sharded(self.CONFIG, 20, mesh)
        alone = transformer.train_alone(self.CONFIG, 20)
        np.testing.assert_allclose(losses, alone, rtol=2e-4)
        self.assertLess(losses[-1], 0.9 * losses[0])
        for kernel in (model.blocks[0].up.kernel, model.blocks[0].down.kernel, model.head.kernel):
            self.assertEqual(len(set(kernel.sharding.spec) - {None}), 2, kernel.sharding)
            shards = {shard.data.shape for shard in kernel[...].addressable_shards}
            self.assertEqual({8 * np.prod(shape) for shape in shards}, {kernel[...].size})
        states = jax.tree.leaves(optimizer.opt_state)
        large = [x for x in states if x.size >= 1024]
        self.assertNotEmpty(large)
        self.assertEmpty([x.sharding for x in large if x.sharding.spec == P()])


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 4, "microbatches": 4},
        {"stages": 2, "repeats": 2, "microbatches": 4, "remat": True},
        {"stages": 2, "microbatches": 2, "explicit": True},
        {"stages": 1, "prefetch": 1, "microbatches": 2},
    ],
    ids=str,
)
def test_deep_models_match_one_device(options):
    small = {"steps": 3, "batch": 16, "context": 16, "layers": 4, "features": 32}
    config = train_deep.Config(**small, **options)
    losses, report = train_deep.train(config, train_deep.mesh_of(config))
    alone, _ = train_deep.train(config, None)
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    axes = {axis for each in report.collectives for axis in each.axes}
    assert axes == ({"stage", "data"} if config.stages > 1 else {"data"})


@pytest.mark.parametrize("options", [{"experts_axis": 2}, {"capacity": 4, "explicit": True}])
def test_mixtures_of_experts_match_one_device(options):
    small = {"steps": 3, "batch": 16, "context": 16, "features": 32}
    config = train_moe.Config(**small, **options)
    losses, statistics, report = train_moe.train(config, train_moe.mesh_of(config))
    alone, statistics_alone, _ = train_moe.train(config, None)
    np.testing.assert_allclose(losses, alone, rtol=1e-4)
    assert sum(each.kind == "all-to-all" for each in report.collectives)
    dropped = [int(each.dropped.sum()) for each in statistics]
    assert dropped == [int(each.dropped.sum()) for each in statistics_alone]
    assert any(dropped) == bool(config.capacity)


STEPS = 10
SMALL = "--layers 1 --features 64 --context 64 --dtype float32 --save-every 2 --evaluate-every 4"
SMALL = [*SMALL.split(), "--steps", str(STEPS)]


def metrics_of(folder):
    """What a run computed in each step, without what depends on time."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = ("step", "loss", "evaluation", "evaluated")
    return [{name: line[name] for name in names if name in line} for line in lines]


def state_of(folder):
    """The model and the optimizer of the last checkpoint of a run, on one device."""
    config = train_lm.Config(**json.loads((folder / "config.json").read_text()))
    return restore(folder / "checkpoints" / str(STEPS) / "model", train_lm.make(config))


def assert_same_state(one, other):
    leaves = (jax.tree.leaves(nnx.to_pure_dict(nnx.state(x))) for x in (one, other))
    for a, b in zip(*leaves, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def kill(words, folder, **environment):
    """Starts a run, and kills it with all its processes at a random step."""
    at = random.randint(3, STEPS - 2)
    words = [sys.executable, *words, str(folder), *SMALL]
    with subprocess.Popen(words, env=os.environ | environment) as run:
        deadline = time.monotonic() + 120
        while run.poll() is None and time.monotonic() < deadline:
            path = folder / "metrics.jsonl"
            if path.exists() and f'"step": {at},' in path.read_text():
                break
            time.sleep(0.01)
        assert run.poll() is None, "it ended before it was killed"
        run.kill()
    steps = [line["step"] for line in metrics_of(folder)]
    assert at <= steps[-1] < STEPS, (at, steps)
    assert not (folder / "checkpoints" / str(STEPS)).exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run on 8 devices that was not interrupted, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    with mock.patch("builtins.print") as printed:
        train_lm.main([str(folder), *SMALL, "--check"])
    return folder, "\n".join(call.args[0] for call in printed.call_args_list)


def test_language_model_as_on_one_device(run):
    folder, out = run
    assert float(re.search(r"largest difference .*: (\S+)", out)[1]) < ROUNDING
    metrics = metrics_of(folder)
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < 0.75 * losses[0]
    model, _ = state_of(folder)
    _, held_out = train_lm.texts(64)
    rows = held_out.astype(np.int32)
    alone = nnx.jit(train_lm.Model.losses)(nnx.view(model, deterministic=True), rows)
    assert rows.shape[0] % 16  # so the last batch is padded
    assert metrics[-1]["evaluated"] == alone.size
    np.testing.assert_allclose(metrics[-1]["evaluation"], alone.mean(), rtol=ROUNDING)
    with pytest.raises(SystemExit):  # another run
        train_lm.main([str(folder), *SMALL, "--batch", "8"])
    assert metrics_of(folder) == metrics


def test_language_model_with_all_flags(tmp_path):
    pytest.importorskip("tensorboardX")
    flags = "--steps 6 --layers 2 --features 64 --context 64 --stack --remat dots_saveable"
    flags += " --microbatches 2 --model-parallel 2 --report --profile --check"
    mine = Hardware("mine", 1e12, 2**34, 1e11, 1e10)
    with (
        mock.patch.dict(HARDWARE, {jax.devices()[0].device_kind: mine}),
        mock.patch("builtins.print") as printed,
    ):
        train_lm.main([str(tmp_path), *flags.split()])
    # bfloat16 has 8 bits, so one rounding changes a loss of 6 by up to 0.02.
    assert float(printed.call_args.args[0].split()[-1]) < 0.02
    first, *_ = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert 0 < first["utilization"] < 1
    assert "<html" in (tmp_path / "report.html").read_text()
    assert [*tmp_path.glob("events.out.tfevents.*")]
    assert [*tmp_path.rglob("*.xplane.pb")]


def test_killed_language_model_resumes_exactly(run, tmp_path):
    folder, _ = run
    kill([train_lm.__file__], tmp_path)
    train_lm.main([str(tmp_path), *SMALL])
    assert metrics_of(tmp_path) == metrics_of(folder)
    assert_same_state(state_of(tmp_path), state_of(folder))


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    """The folder of a language model that was killed and resumed; what a ResNet printed then."""
    folder = tmp_path_factory.mktemp("two")
    kill([*LAUNCH, train_lm.__file__], folder, XLA_FLAGS=QUICK)
    both = Path(__file__).parent / "processes" / "examples.py"
    of_resnet = "--steps", str(ResNetTest.STEPS), "--stages", *map(str, ResNetTest.STAGES)
    words = [sys.executable, *LAUNCH, str(both), str(folder), *SMALL, "+", *of_resnet]
    environment = os.environ | {"XLA_FLAGS": QUICK}
    ran = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return folder, ran.stdout


def test_language_model_in_two_processes(run, in_two_processes):
    """One that is killed and resumed, against one in a single process that is not."""
    found, expected = metrics_of(in_two_processes[0]), metrics_of(run[0])
    for one, want in zip(found, expected, strict=True):
        assert one == pytest.approx(want, rel=ROUNDING)


class ResNetTest(parameterized.TestCase):
    STAGES, STEPS = (8, 16), 8

    def test_as_on_one_device(self):
        mesh = make_mesh({"data": 8})
        model, losses, correct, total = resnet.train(self.STAGES, self.STEPS, mesh)
        alone = resnet.train_alone(self.STAGES, self.STEPS)
        np.testing.assert_allclose(losses, alone, rtol=ROUNDING)
        _, images, _, labels = resnet.digits()
        self.assertTrue(len(labels) % resnet.BATCH)  # so the last batch is padded
        model.eval()
        self.assertEqual(
            correct, int((nnx.jit(lambda m, x: m(x))(model, images).argmax(-1) == labels).sum())
        )
        self.assertEqual(total, len(labels))


def test_resnet_in_two_processes(in_two_processes):
    _, out = in_two_processes
    shown = [float(x) for x in re.findall(r"^\[0\] step +\d+  loss ([\d.]+)", out, re.MULTILINE)]
    mesh = make_mesh({"data": 8})
    _, losses, correct, total = resnet.train(ResNetTest.STAGES, ResNetTest.STEPS, mesh)
    np.testing.assert_allclose(shown, losses, atol=1e-4)  # 4 digits are shown
    assert f"accuracy on {total} held-out images: {correct / total:.2%}" in out
