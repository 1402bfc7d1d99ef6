"""The fault of jaxlib that ``docs/status.md`` tells of, in plain JAX: does it still exist?"""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """\
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)


def swap(x):
    return jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])


def f(xs):
    looped = jax.lax.fori_loop(0, 8, lambda _, x: swap(x) + 1, xs[0])
    return looped, [swap(x) for x in xs], [jnp.sin(x) for x in xs]


mesh = jax.make_mesh((2,), ("x",))
f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
x = np.arange(128.0 * 64, dtype=np.float32).reshape(128, 64)
xs = [jax.device_put(x, NamedSharding(mesh, P("x")))] * 12
for _ in range(100):
    looped, swapped, _ = jax.device_get(f(xs))
    assert np.array_equal(looped, x + 8)
    assert np.array_equal(swapped, [np.roll(x, 64, 0)] * 12)
"""
# A program that hangs is stopped by XLA.
FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=5"


def runs(program, cache):
    """Whether a process of the program, with a persistent cache in a folder, ends without error."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": FLAGS,
    }
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        check=False,
        timeout=300,
    )
    return ran.returncode == 0


def test_cached_programs_for_several_cpu_devices_fail(tmp_path):
    """Without the fault, the warning about it, its page and the exception in conftest.py can go."""
    assert runs(PROGRAM, tmp_path), "it fails as compiled"
    assert list(tmp_path.iterdir()), "nothing was cached"
    # Which collectives meet is a matter of time.
    assert not all(runs(PROGRAM, tmp_path) for _ in range(5)), "jaxlib has mended it"
