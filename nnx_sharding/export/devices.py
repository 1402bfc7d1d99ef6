"""Where an exported program runs: on devices like those that it was exported for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.placing import is_committed
from ..core.transfer import transfer
from ..errors import ExportError
from .manifest import Manifest, MeshInfo, meshes_of

# Of all inputs, or of all outputs; None where the sharding is left open.
Shardings: TypeAlias = tuple[NamedSharding | None, ...]


def mesh_for(manifest: Manifest, program: jax.export.Exported) -> Mesh | None:
    """A mesh like the exported one; None for a program of one device.

    It has the devices of the mesh in context, if there is one, else the first devices.

    Raises:
      ExportError: the platform or the mesh in context differs, or there are too few devices.
    """
    context = _compat.context_mesh()
    mesh = context if isinstance(context, Mesh) and manifest.devices > 1 else None
    is_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    here = "cpu" if is_cpu else jax.export.default_export_platform()
    is_checked = "platform" not in map(str, program.disabled_safety_checks)
    if is_checked and here not in manifest.platforms:
        raise ExportError(
            f"{manifest.function} was exported for {', '.join(manifest.platforms)}; this is {here}."
            f" Export it again with platforms=({here!r}, ...)."
        )
    if manifest.devices == 1:
        return None
    inputs, outputs = _compat.exported_shardings(program)
    like = next(iter(meshes_of((*inputs, *outputs))), None)
    exported = f"{manifest.function} was exported for {manifest.devices} devices"
    exported += "" if like is None else f" (mesh {MeshInfo.of(like)})"
    if mesh is None:
        devices = jax.devices()
        if len(devices) < manifest.devices:
            raise ExportError(
                f"{exported}; here there are {len(devices)} of {devices[0].platform}. Call it "
                "where there are as many, or export it again for a smaller mesh."
            )
        if like is None:
            return Mesh(np.array(devices[: manifest.devices]), ("devices",))
        mesh = jax.make_mesh(like.axis_sizes, like.axis_names, devices=devices[: like.size])
    elif (
        mesh.size != manifest.devices
        if like is None
        else (mesh.axis_names, mesh.axis_sizes) != (like.axis_names, like.axis_sizes)
    ):
        raise ExportError(
            f"{exported}; the mesh in context is {MeshInfo.of(mesh)}. Call it within `with "
            "jax.set_mesh(mesh):` for a mesh like the exported one, or without a mesh, or export "
            "it again for this one."
        )
    return mesh if like is None else Mesh(mesh.devices, like.axis_names, axis_types=like.axis_types)


def shardings_on(mesh: Mesh | None, program: jax.export.Exported) -> tuple[Shardings, Shardings]:
    """The shardings of the inputs and of the outputs of a program on the devices of a mesh."""
    sides = _compat.exported_shardings(program)
    inputs, outputs = (tuple(_on_devices(mesh, sharding) for sharding in side) for side in sides)
    if mesh is not None and not any((*inputs, *outputs)):
        # No sharding names the devices of the program, and yet all arrays have to be on them.
        everywhere = NamedSharding(mesh, PartitionSpec())
        return (everywhere,) * len(inputs), (everywhere,) * len(outputs)
    return inputs, outputs


def _on_devices(mesh: Mesh | None, sharding: Any) -> NamedSharding | None:
    if mesh is None or sharding is None or sharding.mesh.empty:
        return None
    like = sharding.mesh
    devices = mesh.devices.reshape(like.axis_sizes)
    same = Mesh(devices, like.axis_names, axis_types=like.axis_types)
    return NamedSharding(same, sharding.spec, memory_kind=sharding.memory_kind)


def place(arrays: Sequence[Any], shardings: Shardings, mesh: Mesh | None) -> list[Any]:
    """The arrays with these shardings; those without one are only moved to the mesh's devices."""
    if mesh is None:
        return list(arrays)
    devices = set(mesh.devices.flat)
    everywhere = NamedSharding(mesh, PartitionSpec())
    targets = [
        everywhere
        if sharding is None and is_committed(array) and array.sharding.device_set != devices
        else sharding
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    return transfer(arrays, targets)
