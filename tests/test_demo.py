"""The demo: as a user runs it, its checks, and how it chooses devices."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import demo

from nnx_sharding.analysis import parameter_table

MESH = demo.make_mesh({"data": 2, "model": 4})
FLAG = "--xla_force_host_platform_device_count"


class CommandLineTest(parameterized.TestCase):
    def test_all_checks_pass(self):
        code, out = demo.main([]), self.capsys.readouterr().out
        assert code == 0, out
        assert "mesh: 2 (data) x 4 (model) of cpu devices" in out
        assert out.count("PASS") == 3
        assert "FAIL" not in out
        for section in ("model/up/kernel", "StableHLO", "flops", "peak"):
            assert section in out
        axes = re.findall(r"^all-reduce +(\S+) .* demo\.py:\d+$", out, re.MULTILINE)
        assert sorted(axes) == ["data", "model"]

    @pytest.fixture(autouse=True)
    def _capture(self, capsys):
        self.capsys = capsys

    @parameterized.parameters((True, True, 0), (True, False, 1), (False, False, 1))
    def test_exit_code(self, first, second, expected):
        checks = [
            demo.Check("first", "1", "at most 2", first),
            demo.Check("second", "", "", second),
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo, "run", lambda epochs, seed, devices: checks)
            assert demo.main(["--epochs", "3"]) == expected
        verdict = "PASS" if first else "FAIL"
        assert f"{verdict}  first: 1 (at most 2)" in self.capsys.readouterr().out

    @parameterized.parameters(
        (["--epochs", "0"], "at least 1, not 0"),
        (["--devices", "-1"], "at least 1, not -1"),
        (["--seed", "x"], "invalid int value"),
    )
    def test_bad_arguments(self, argv, message):
        with pytest.raises(SystemExit, match="2"):
            demo.main(argv)
        assert message in self.capsys.readouterr().err


class CheckTest(absltest.TestCase):
    def test_losses_that_differ(self):
        losses = np.array([1.0, 0.5])
        assert demo.check_losses(losses, losses + 1e-6).passed
        assert not demo.check_losses(losses, losses + np.array([0, 2e-4])).passed
        assert not demo.check_losses(losses, losses + np.array([0, np.nan])).passed

    def test_outputs_that_differ(self):
        images = np.ones((8, demo.PIXELS), np.float32)
        with jax.set_mesh(MESH):
            model = demo.MLP(nnx.Rngs(0))
            assert demo.check_outputs(model, images).passed
            model.up.kernel[...] *= np.nan
            assert not demo.check_outputs(model, images).passed

    def test_both_forms_give_what_plain_flax_gives(self):
        model = demo.MLP(nnx.Rngs(1))
        images = np.random.default_rng(0).random((8, demo.PIXELS), np.float32)
        expected = model(images)
        with jax.set_mesh(MESH):
            np.testing.assert_allclose(model.predict(images), expected, atol=1e-5)
            np.testing.assert_allclose(demo.predict_by_hand(model, images), expected, atol=1e-5)

    def test_optimizer_state_is_sharded_like_the_parameters(self):
        with jax.set_mesh(MESH):
            model, optimizer = demo.create_sharded(nnx.Rngs(0), steps=2)
            [batches] = demo.Digits.load(0).epochs(1, 0)
            demo.train_step(model, optimizer, *batches[0])
        moments = {row.path: row for row in parameter_table(optimizer.opt_state)}
        for row in parameter_table(model):
            for moment in ("mu", "nu"):
                found = moments[f"0/{moment}/{row.path}"]
                assert (found.spec, found.shard_shape) == (row.spec, row.shard_shape)


class DevicesTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, f"{FLAG}=4"),
        ({"XLA_FLAGS": "--xla_a=1"}, f"--xla_a=1 {FLAG}=4"),
        ({"XLA_FLAGS": f"{FLAG}=2 --xla_a=1"}, f"{FLAG}=2 --xla_a=1"),
        ({"JAX_NUM_CPU_DEVICES": "2"}, None),
    )
    def test_virtual_devices_are_asked_for_once(self, environment, expected):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", environment)
            demo.request_virtual_devices(4)
            assert environment.get("XLA_FLAGS") == expected

    @parameterized.parameters(
        (1, [1, 1]), (2, [1, 2]), (4, [2, 2]), (6, [2, 3]), (8, [2, 4]), (16, [4, 4])
    )
    def test_mesh_sizes(self, count, expected):
        sizes = demo.mesh_sizes(count)
        assert list(sizes) == ["data", "model"] and list(sizes.values()) == expected

    # Three do not divide the hidden layer.
    @parameterized.parameters((1, 1), (2, 2), (3, 2), (6, 4), (7, 4), (8, 8), (100, 8))
    def test_as_many_devices_as_divide(self, wanted, expected):
        assert demo.choose_devices(wanted) == jax.devices()[:expected]
