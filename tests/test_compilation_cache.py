"""JAX's persistent compilation cache: a second process compiles nothing of ours."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest

# What might make keys differ: names of arguments and axes, orders of sets and dicts, addresses.
PROGRAM = """
import json
import logging
import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from nnx_sharding import StateSharding, export, jit, shard_map

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("nnx_sharding").addHandler(handler)
logging.getLogger("nnx_sharding").setLevel("INFO")
events = {}
jax.monitoring.register_event_listener(
    lambda event, **_: events.__setitem__(event, events.get(event, 0) + 1)
)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Activation:
    def __call__(self, x):
        return jnp.tanh(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.names = frozenset({"one", "two", "three", "four"})
        self.activation = Activation()
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.steps[...] += 1
        return self.down(self.activation(self.up(x)))


def scaled(model, x, options, mode):
    for name in sorted(model.names):
        x = x + len(name)
    return {"y": model(x) * options["a"], "".join(sorted(mode)): options["b"]}


mesh = jax.make_mesh((2, 2, 2), ("data", "model", "rest"), axis_types=(AxisType.Auto,) * 3)
shardings = {"model": StateSharding({nnx.PathContains("kernel"): P(None, "model"), ...: P()})}
x = jnp.ones((8, 8))
functions = [
    jit(scaled, in_shardings=shardings, mesh=mesh, static_argnames="mode", donate_argnames="x"),
    shard_map(
        lambda model, x, options, mode: jax.lax.psum(model(x), ("data", "model")),
        mesh=mesh,
        in_specs=(P(), P(("data", "model")), P(), None),
        out_specs=P(),
        axis_names={"model", "data"},
        check_vma=False,
    ),
]
mode = frozenset({"some", "words", "in", "any", "order"})
for fun, static in zip(functions, (mode, None), strict=True):
    options = {"b": jnp.array(1.0), "a": jnp.array(2.0)}
    jax.block_until_ready(fun(Model(nnx.Rngs(0)), x + 1, options, static))
export.export(functions[0])(Model(nnx.Rngs(0)), x, options, mode).save(sys.argv[2])
prefix = "/jax/compilation_cache/"
found = {k.removeprefix(prefix): n for k, n in events.items() if k.startswith(prefix)}
print(json.dumps(found | {"lines": lines}))
"""


class TwoProcessesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def run_program(self, name, seed, source):
        """The events of a process, and the file that it exported."""
        script, exported = self.folder / f"{name}.py", self.folder / f"{name}.zip"
        script.write_text(source, encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, str(script), str(self.folder / "cache"), str(exported)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return json.loads(ran.stdout), exported.read_bytes()

    def test_the_second_compiles_nothing(self):
        """Neither hash order nor the place of the source in a file is part of a key."""
        first, exported = self.run_program("first", "1", PROGRAM)
        self.assertGreater(first["cache_misses"], 2)
        second, same = self.run_program("second", "2", "\n\n\n" + PROGRAM)
        self.assertNotIn("cache_misses", second)
        self.assertEqual(second["cache_hits"], second["compile_requests_use_cache"])
        requests = [run["compile_requests_use_cache"] for run in (first, second)]
        self.assertEqual(*requests)
        for run, cache in ((first, "miss"), (second, "hit")):
            self.assertLen(run["lines"], 2)
            for line in run["lines"]:
                self.assertEndsWith(line, f", persistent cache: {cache}")
        # The same holds for exported files, whose bytes contain still more.
        self.assertEqual(exported, same)
