"""Where an exported program runs: on devices like those that it was exported for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..core.plan import is_committed
from ..core.transfer import transfer
from ..errors import ExportError
from .manifest import Manifest, MeshInfo, meshes_of


def mesh_at_hand(manifest: Manifest, program: jax.export.Exported) -> Mesh | None:
    """The devices to run on, as a mesh like the exported one; None for a program of one device.

    The mesh in context if there is one, else the first devices.

    Raises:
      ExportError: this is another platform, there are too few devices, or the mesh in context
        is another one.
    """
    context = _compat.context_mesh()
    chosen = context if isinstance(context, Mesh) and manifest.devices > 1 else None
    _check_platform(manifest, program, chosen)
    if manifest.devices == 1:
        return None
    like = next(iter(meshes_of(_all_shardings(program))), None)
    wanted = "" if like is None else f" (mesh {MeshInfo.of(like)})"
    if chosen is not None:
        _check_mesh(manifest, chosen, like, wanted)
    devices = jax.devices() if chosen is None else list(chosen.devices.flat)
    if len(devices) < manifest.devices:
        raise ExportError(
            f"{manifest.function} was exported for {manifest.devices} devices{wanted}; here are "
            f"{len(devices)} of {devices[0].platform}. Call it where there are as many, or export "
            "it again for a smaller mesh."
        )
    if like is None:
        return Mesh(np.array(devices[: manifest.devices]), ("devices",))
    if chosen is None:
        chosen = jax.make_mesh(like.axis_sizes, like.axis_names, devices=devices[: like.size])
    return Mesh(chosen.devices, like.axis_names, axis_types=like.axis_types)


def _all_shardings(program: jax.export.Exported) -> list[Any]:
    inputs, outputs = _compat.exported_shardings(program)
    return [*inputs, *outputs]


def _check_platform(manifest: Manifest, program: jax.export.Exported, mesh: Mesh | None) -> None:
    is_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    here = "cpu" if is_cpu else jax.export.default_export_platform()
    is_checked = "platform" not in map(str, program.disabled_safety_checks)
    if is_checked and here not in manifest.platforms:
        raise ExportError(
            f"{manifest.function} was exported for {', '.join(manifest.platforms)}; this is {here}."
            f" Export it again with platforms=({here!r}, ...)."
        )


def _check_mesh(manifest: Manifest, mesh: Mesh, like: Any, wanted: str) -> None:
    fits = mesh.size == manifest.devices
    if like is not None:
        fits = (mesh.axis_names, mesh.axis_sizes) == (like.axis_names, like.axis_sizes)
    if not fits:
        raise ExportError(
            f"{manifest.function} was exported for {manifest.devices} devices{wanted}; the mesh in "
            f"context is {MeshInfo.of(mesh)}. Call it within `with jax.set_mesh(mesh):` for a mesh "
            "like the exported one, or without a mesh, or export it again for this one."
        )


class Layouts(NamedTuple):
    """The layout of each input and output; None where it is left open."""

    inputs: tuple[NamedSharding | None, ...]
    outputs: tuple[NamedSharding | None, ...]


def layouts_on(mesh: Mesh | None, program: jax.export.Exported) -> Layouts:
    """The layouts of a program on the devices of a mesh."""
    sides = _compat.exported_shardings(program)
    inputs, outputs = (tuple(_on_devices(mesh, own) for own in side) for side in sides)
    if mesh is not None and all(layout is None for layout in (*inputs, *outputs)):
        # Nothing says on which devices the program runs, so all of it does.
        everywhere = NamedSharding(mesh, PartitionSpec())
        return Layouts((everywhere,) * len(inputs), (everywhere,) * len(outputs))
    return Layouts(inputs, outputs)


def _on_devices(mesh: Mesh | None, sharding: Any) -> NamedSharding | None:
    if mesh is None or sharding is None or sharding.mesh.empty:
        return None
    own = sharding.mesh
    devices = mesh.devices.reshape(own.axis_sizes)
    same = Mesh(devices, own.axis_names, axis_types=own.axis_types)
    return NamedSharding(same, sharding.spec, memory_kind=sharding.memory_kind)


def place(
    arrays: Sequence[Any], layouts: Sequence[NamedSharding | None], mesh: Mesh | None
) -> list[Any]:
    """The arrays laid out as the program wants them; those that are open only on its devices."""
    if mesh is None:
        return list(arrays)
    devices = set(mesh.devices.flat)
    everywhere = NamedSharding(mesh, PartitionSpec())
    wanted = [
        everywhere if own is None and _is_elsewhere(array, devices) else own
        for array, own in zip(arrays, layouts, strict=True)
    ]
    return transfer(arrays, wanted)


def _is_elsewhere(array: Any, devices: set[jax.Device]) -> bool:
    return is_committed(array) and array.sharding.device_set != devices
