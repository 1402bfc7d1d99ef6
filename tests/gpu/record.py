"""Compiles the programs of ``tpu.programs`` for eight GPUs and records what the compiler returns.

It takes ``jax[cuda]`` and one GPU, whose kind the others have: in the folder of tests
``python -m gpu.record [PROGRAM ...]``.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

from tpu.programs import PROGRAMS
from tpu.record import trimmed

FOLDER = Path(__file__).parent / "recorded"
# The kernel is for TPUs, and the compiler for a topology leaves out the memory of the host.
NAMES = [name for name in PROGRAMS if name not in ("kernel", "offload")]


def recorded(name):
    """The text of a program."""
    return gzip.decompress((FOLDER / f"{name}.hlo.gz").read_bytes()).decode()


def main(names):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("", "cuda", topology="1x1x8").devices
    for name in names or NAMES:
        save(name, PROGRAMS[name](devices).compile().as_text())


def save(name, text):
    data = gzip.compress(trimmed(text).encode(), mtime=0)
    (FOLDER / f"{name}.hlo.gz").write_bytes(data)
    print(f"{name}: {len(text)} characters, {len(data)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
