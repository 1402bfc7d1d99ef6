"""The memory that placing a model takes: ``python -m benchmarks.placing [--megabytes 256]``.

Each case runs in a process of its own, on 8 virtual devices. The memory of these is that of the
host, so what the process holds is what host and devices hold together: the old arrays, the new
ones, and whatever is in between. All figures are multiples of the size of the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DEVICES, ARRAYS = 8, 16


class Case(NamedTuple):
    """Where the model is, where it goes, and how."""

    source: str
    goal: str
    option: str = ""

    @property
    def name(self) -> str:
        return f"{self.source} → {self.goal}{', ' * bool(self.option)}{self.option}"


CASES = (
    Case("numpy", "rows"),
    Case("numpy", "replicated"),
    Case("one device", "rows"),
    Case("one device", "rows", "donate"),
    Case("rows", "columns"),
    Case("rows", "columns", "donate"),
    Case("rows", "columns", "copy"),
    Case("rows", "rows", "copy"),
    Case("rows", "reversed columns"),
    Case("half the devices", "rows"),
    Case("half the devices", "rows", "donate"),
    Case("rows", "pinned host"),
    Case("pinned host", "columns"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placing", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="the size of the model")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file as well")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(CASES[options.case], options.megabytes)))
        return
    rows = [child(number, options.megabytes) for number in range(len(CASES))]
    width = max(len(row["case"]) for row in rows)
    print(f"{'':{width}}   old   new  peak  in between  afterwards")
    for row in rows:
        between = max(row["peak"] - row["old"] - row["new"], 0.0)
        print(
            f"{row['case']:{width}}  {row['old']:4.2f}  {row['new']:4.2f}  {row['peak']:4.2f}"
            f"  {between:10.2f}  {row['after']:10.2f}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2), encoding="utf-8")


def child(case: int, megabytes: int) -> dict[str, Any]:
    """The figures of one case, from a process of its own."""
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", __spec__.name, "--megabytes", str(megabytes)]
    done = subprocess.run(
        [*command, "--case", str(case)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(case: Case, megabytes: int) -> dict[str, Any]:
    import jax

    from nnx_sharding.placement import place

    options = {case.option: True} if case.option else {}
    rows = megabytes * 2**20 // (ARRAYS * 4 * 1024)
    # The same with little data first: what JAX needs for itself is not of interest.
    jax.block_until_ready(place(source(case.source, DEVICES), goals()[case.goal], **options))
    before = resident("VmRSS")
    model = source(case.source, rows)
    gc.collect()
    old = resident("VmRSS") - before
    forget_peak()
    new = jax.block_until_ready(place(model, goals()[case.goal], **options))
    gc.collect()
    size = megabytes * 2**20
    # Copies on several devices of the CPU may be one.
    own = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for x in new
        for shard in x.addressable_shards
    }
    return {
        "case": case.name,
        "old": old / size,
        "new": sum(own.values()) / size,
        "peak": (resident("VmHWM") - before) / size,
        "after": (resident("VmRSS") - before) / size,
    }


def source(name: str, rows: int) -> list[Any]:
    """The arrays of a model, each with a value of its own."""
    import jax
    import numpy as np

    arrays = [np.full((rows, 1024), n, np.float32) for n in range(ARRAYS)]
    if name == "numpy":
        return arrays
    # Through a program, so that the memory is that of a device and not of NumPy.
    make: Callable[..., Any] = jax.jit(lambda *xs: [x + 1 for x in xs])
    return jax.block_until_ready(make(*(jax.device_put(x, goals()[name]) for x in arrays)))


def goals() -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("x",))
    rows, columns = PartitionSpec("x"), PartitionSpec(None, "x")
    return {
        "one device": SingleDeviceSharding(devices[0]),
        "rows": NamedSharding(mesh, rows),
        "columns": NamedSharding(mesh, columns),
        "replicated": NamedSharding(mesh, PartitionSpec()),
        "reversed columns": NamedSharding(Mesh(devices[::-1], ("x",)), columns),
        "half the devices": NamedSharding(Mesh(devices[:4], ("x",)), columns),
        "pinned host": NamedSharding(mesh, rows, memory_kind="pinned_host"),
    }


def resident(name: str) -> int:
    """The bytes that this process holds (VmRSS), or held at most (VmHWM)."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Resets VmHWM; see "clear_refs" in the manual page proc(5)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    main()
