"""Compiles the programs for eight TPU v5e and records what the compiler returns, and meshes.

It takes ``jax[tpu]``, but no TPU: in the folder of tests ``python -m tpu.record [PROGRAM ...]``.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

from nnx_sharding.analysis.json_codec import as_data, read
from nnx_sharding.analysis.meshes import MeshDescription
from nnx_sharding.partition import planning_mesh
from nnx_sharding.partition.mesh import topology_devices
from tpu.programs import PROGRAMS

FOLDER = Path(__file__).parent / "recorded"

# Topologies, with the axes of a mesh and the number of slices.
MESHES = {
    "v5e:16x16": ({"data": 16, "model": 16}, 1),
    "v5e:16x16 strided": ({"data": 32, "model": 8}, 1),
    "v5e:4x4": ({"data": 4, "model": 4}, 1),
    "v5e:2x4 slices": ({"data": 4, "model": 4}, 2),
    "v4:2x2x1": ({"data": 4}, 1),
    "v5p:4x4x4": ({"data": 16, "model": 4}, 1),
    "tpu7x:4x4x4": ({"data": 16, "model": 8}, 1),
}

# What of the configuration of an instruction is read; the rest is most of the text.
_KEPT = ("known_trip_count", "async_collective_fusion_config", "custom_call_config")
_KEPT += ("gemm_backend_config", "cudnn_fmha_backend_config")  # for GPUs


def compiled(name):
    """The text of a program, and the estimates of the compiler."""
    program = PROGRAMS[name](topology_devices("v5e:2x4")).compile()
    cost = program.cost_analysis()
    return program.as_text(), {key: cost.get(key, 0.0) for key in ("flops", "transcendentals")}


def trimmed(text):
    """The text without the tables of source lines, and without most of the configuration."""
    head, tables, rest = text.partition("\n\nFileNames\n")
    text = head + rest[rest.index("\n\n\n") :] if tables else text
    return re.sub(r"backend_config=\{.*", _short, text)


def _short(match):
    text = match[0].removeprefix("backend_config=")
    config, end = json.JSONDecoder().raw_decode(text)
    kept = {key: config[key] for key in _KEPT if key in config}
    kept.get("custom_call_config", {}).pop("body", None)
    return f"backend_config={json.dumps(kept, separators=(',', ':'))}{text[end:]}"


def recorded(name):
    """What :func:`compiled` returned when it was recorded."""
    text = gzip.decompress((FOLDER / f"{name}.hlo.gz").read_bytes()).decode()
    return text, json.loads((FOLDER / "costs.json").read_text())[name]


def mesh_of(name):
    """The description of a mesh over the devices of a topology."""
    axes, num_slices = MESHES[name]
    return MeshDescription.of(planning_mesh(name.split()[0], axes, num_slices=num_slices))


def recorded_mesh(name):
    """What :func:`mesh_of` returned when it was recorded."""
    data = json.loads((FOLDER / "meshes.json").read_text())[name]
    return read(MeshDescription, data, "mesh")


def main(names):
    meshes = (f'"{name}": {json.dumps(as_data(mesh_of(name)))}' for name in MESHES)
    (FOLDER / "meshes.json").write_text("{\n" + ",\n".join(meshes) + "\n}\n")
    file = FOLDER / "costs.json"
    costs = json.loads(file.read_text()) if file.exists() else {}
    for name in names or PROGRAMS:
        text, costs[name] = compiled(name)
        data = gzip.compress(trimmed(text).encode(), mtime=0)
        (FOLDER / f"{name}.hlo.gz").write_bytes(data)
        print(f"{name}: {len(text)} characters, {len(data)} bytes")
    file.write_text(json.dumps(costs, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
