"""The programs in ``examples/``."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import transformer

from models import mesh_of

pytestmark = pytest.mark.slow


class TransformerTest(parameterized.TestCase):
    CONFIG = transformer.Config(context=16, features=32, layers=1, batch=8)

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
