"""Measures how fast HLO text is read: ``python -m benchmarks.hlo [--megabytes N] [--file F]``.

The text is that of a compiled training step of a transformer, repeated under other names; or of a
file of your own. The time (of the CPU) is that of parsing, of all collectives with their axes, and
of the cost with loops.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPEATS = 5
TARGET = 1.0  # seconds for 10 MB


def main() -> None:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hlo", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the text")
    parser.add_argument("--file", type=Path, help="read this text instead")
    options = parser.parse_args()
    text = options.file.read_text() if options.file else _repeated(_program(), options.megabytes)
    _report(text)


def _report(text: str) -> None:
    from nnx_sharding.analysis import Cost, collectives_of
    from nnx_sharding.analysis.hlo import parse
    from nnx_sharding.analysis.work import with_loops

    module = parse(text)
    count = sum(len(computation.instructions) for computation in module.computations)
    sizes = {"data": 2, "model": 4}
    print(
        f"{len(text) / 1e6:.1f} MB, {count} instructions, {len(module.computations)} computations"
    )
    ways: dict[str, Callable[[], Any]] = {
        "parse": lambda: parse(text),
        "parse + collectives": lambda: collectives_of(text, sizes),
        "parse + collectives + loops": lambda: (
            collectives_of(module := parse(text), sizes),
            with_loops(Cost(0.0, 0.0, 0.0, ""), module),
        ),
    }
    for name, way in ways.items():
        seconds = statistics.median(_seconds(way) for _ in range(REPEATS))
        print(f"{name:<30}{seconds:8.2f} s   {len(text) / 1e6 / seconds:8.1f} MB/s")
    print(f"the target is {TARGET} s for 10 MB")


def _seconds(way: Callable[[], Any]) -> float:
    start = time.process_time()
    way()
    return time.process_time() - start


def _program() -> str:
    """The HLO of a training step with a loop over layers, on 2 × 4 devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def layer(x: Any, kernels: Any) -> tuple[Any, None]:
        up, down = kernels
        return x + jax.nn.gelu(x @ up) @ down, None

    def loss(kernels: Any, x: Any) -> Any:
        return (jax.lax.scan(layer, x, kernels)[0] ** 2).mean()

    def array(spec: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    up, down = array(P(None, None, "model"), 8, 64, 256), array(P(None, "model"), 8, 256, 64)
    step = jax.jit(jax.grad(loss)).lower((up, down), array(P("data"), 32, 64))
    return str(step.compile().as_text())


def _repeated(text: str, megabytes: float) -> str:
    """A text as long as that, with the same computations again and again under other names."""
    start = text.index("\n%")
    head, body = text[:start], text[start:]
    copies = max(1, round(megabytes * 1e6 / len(body)))
    names = re.compile(r"%([\w.\-]+)")
    parts = [names.sub(rf"%\1_{i}", body.replace("ENTRY ", "")) for i in range(1, copies)]
    return head + "".join([*parts, body])


if __name__ == "__main__":
    main()
