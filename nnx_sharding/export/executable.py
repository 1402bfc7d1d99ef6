"""Compiled programs in files, which run on devices like those they were compiled for."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from .. import _compat
from .._version import __version__
from ..analysis.json_codec import as_data, read
from ..analysis.parameters import spec_text
from ..errors import ExportError, raise_listed
from ..stages import Compiled, Lowered
from . import files
from .manifest import MeshInfo, meshes_of


@dataclasses.dataclass(frozen=True)
class _Device:
    """A device by its id, with its location among TPUs."""

    id: int
    coords: tuple[int, ...]
    core: int
    slice: int

    @classmethod
    def of(cls, device: Any) -> _Device:
        coords = getattr(device, "coords", None) or ()
        places = (getattr(device, name, None) or 0 for name in ("core_on_chip", "slice_index"))
        return cls(device.id, tuple(coords), *places)

    def __str__(self) -> str:
        return f"coordinates {self.coords}, core {self.core}, slice {self.slice}"


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """What an executable was compiled from, and for what."""

    function: str
    inputs: dict[str, str]
    mesh: str
    stablehlo: str  # its SHA-256
    platform: str
    device_kind: str
    compiler: str
    devices: tuple[_Device, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, lowered: Any, origin: Any, devices: Sequence[Any]) -> _Manifest:
        plan, avals = origin.plan, lowered.in_avals[0]
        named = [one if isinstance(one, NamedSharding) else None for one in plan.shardings]
        specs = ["" if one is None else f" {spec_text(one.spec)}" for one in named]
        types = map("{}{}".format, avals, specs)
        return cls(
            function=plan.fun_name,
            inputs=dict(zip(plan.names, types, strict=True)),
            mesh="; ".join(str(MeshInfo.of(mesh)) for mesh in meshes_of(named)),
            stablehlo=hashlib.sha256(lowered.as_text().encode()).hexdigest(),
            platform=devices[0].platform,
            device_kind=devices[0].device_kind,
            compiler=devices[0].client.platform_version,
            devices=tuple(map(_Device.of, devices)),
            versions={
                "flax": metadata.version("flax"),
                "jax": jax.__version__,
                "jaxlib": metadata.version("jaxlib"),
                "nnx_sharding": __version__,
            },
        )


def save_executable(path: str | os.PathLike[str], compiled: Compiled) -> None:
    """Writes a compiled function to a file, so that other processes need not compile it.

    The program may be compiled for devices that are not attached to this machine, such as those of
    a TPU topology (:func:`~nnx_sharding.partition.planning_mesh`).

    Args:
      path: the file, a zip archive, whose ``manifest.json`` says what it was compiled for.
      compiled: what ``lower(...).compile()`` returned.

    Raises:
      TypeError: ``compiled`` is something else.
      ValueError: the program cannot be serialized, because it calls Python functions of this
        process, such as ``jax.debug.print``, or because the backend does not support it.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.export import load_executable, save_executable
      >>> path = tempfile.mkdtemp() + "/double.zip"
      >>> lowered = jit(lambda x: x * 2).lower(jnp.ones(4))
      >>> save_executable(path, lowered.compile())
      >>> load_executable(path, lowered)(jnp.ones(4)).tolist()
      [2.0, 2.0, 2.0, 2.0]
    """
    if not isinstance(compiled, Compiled):
        raise TypeError(
            "save_executable(path, compiled): expected the result of fun.lower(...).compile() for "
            f"compiled, got {compiled!r:.200}."
        )
    name = compiled._plan.fun_name
    assigned = filter(None, map(_compat.device_assignment, compiled.shardings()))
    devices = next(assigned, None) or jax.devices()[:1]
    try:
        program, _, _ = serialize_executable.serialize(compiled._stage)
    except Exception as error:  # of JAX, XLA or pickle
        raise ValueError(
            f"{name} cannot be saved: jax {jax.__version__} cannot serialize this program for "
            f"{devices[0].platform} ({type(error).__name__}: {error}). Leave out what calls Python "
            "or captures a jax.Ref, or use JAX's persistent compilation cache instead."
        ) from error
    manifest = _Manifest.of(compiled._lowered, compiled._origin, devices)
    files.write(path, as_data(manifest), program, files.EXECUTABLE)


def load_executable(path: str | os.PathLike[str], lowered: Lowered) -> Compiled:
    """Reads what :func:`save_executable` wrote, instead of ``lowered.compile()``.

    Because the function is traced and lowered, the program takes and returns modules like the
    function itself, and a file of another function, or of an older version of it, is refused.

    Warning:
      Loading an executable runs code of the file, which JAX keeps as a pickle. Load only files
      that you wrote, or that come from someone whom you would let run code here. The digest in the
      file detects damage, not forgery.

    Args:
      path: the file.
      lowered: what ``fun.lower(...)`` returns for the same function and arguments; these may be
        abstract.

    Returns:
      The compiled function, as from ``lowered.compile()``.

    Raises:
      TypeError: ``lowered`` is something else.
      ExportError: the file is of another kind or version, or damaged; jax, jaxlib, the compiler,
        the platform, the devices or their order differ, or the function does. All differences are
        listed.
      OSError: the file cannot be read.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import export, jit
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> lowered = jit(lambda model, x: model(x)).lower(model, jnp.ones((4, 2)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     export.save_executable(Path(folder, "forward.zip"), lowered.compile())
      ...     compiled = export.load_executable(Path(folder, "forward.zip"), lowered)
      >>> compiled(model, jnp.ones((4, 2))).shape
      (4, 3)
    """
    if not isinstance(lowered, Lowered):
        raise TypeError(
            "load_executable(path, lowered): expected the result of fun.lower(...) for lowered, "
            f"got {lowered!r:.200}."
        )
    data, program = files.read(path, files.EXECUTABLE)
    try:
        saved = read(_Manifest, data, "manifest")
    except (RecursionError, ValueError) as error:
        raise ExportError(f"{path} has a manifest that cannot be read: {error}") from None
    stage, origin = lowered._stage, lowered._origin
    try:
        available = jax.devices(saved.platform)
    except RuntimeError:  # this platform has none
        available = jax.devices()
    by_id = {device.id: device for device in available}
    devices = [by_id[device.id] for device in saved.devices if device.id in by_id]
    here = _Manifest.of(stage, origin, devices or available)
    lines = [*_other_machine(saved, here), *_other_order(origin.plan.shardings, devices)]
    lines = lines or [*_other_function(saved, here)]
    raise_listed(
        ExportError,
        f"{path} has an executable of {saved.function} that does not fit:",
        [f"  {line}" for line in lines],
        "Load it with the versions, devices and function that it was compiled for, or compile and "
        "save it again.",
    )
    try:
        loaded = serialize_executable.deserialize_and_load(
            program, stage.in_tree, stage.out_tree, devices[0].client, devices
        )
    except Exception as error:  # of pickle, JAX or XLA
        raise ExportError(
            f"{path} has an executable that jax {jax.__version__} cannot load ({error}). Compile "
            "and save it again."
        ) from error
    return Compiled(loaded, origin, stage)


def _other_machine(saved: _Manifest, here: _Manifest) -> Iterator[str]:
    """What differs in the libraries and the devices."""
    pairs = {
        name: (saved.versions.get(name), here.versions[name]) for name in ("jax", "jaxlib")
    } | {
        "platform": (saved.platform, here.platform),
        "device kind": (saved.device_kind, here.device_kind),
        "compiler": (_build(saved.compiler), _build(here.compiler)),
        "devices": (len(saved.devices), len(here.devices)),
    }
    yield from (f"{name}: {a!s}, here {b!s}" for name, (a, b) in pairs.items() if a != b)
    if saved.platform == here.platform:
        at = {device.id: device for device in here.devices}
        for device in saved.devices:
            if at.get(device.id, device) != device:
                yield f"device {device.id}: at {device}, here at {at[device.id]}"


def _other_order(shardings: Sequence[Any], devices: Sequence[Any]) -> Iterator[str]:
    """Whether the mesh has its devices in another order."""
    orders = (_compat.device_assignment(sharding) for sharding in shardings)
    order = next((order for order in orders if order is not None), tuple(devices))
    if order != tuple(devices):
        saved, here = ([device.id for device in some] for some in (devices, order))
        yield f"the devices of the mesh, by id: {saved}, here {here}"


def _other_function(saved: _Manifest, here: _Manifest) -> Iterator[str]:
    """What differs in the function and its arguments."""
    if saved.stablehlo == here.stablehlo:
        return
    before, after = ({**one.inputs, "mesh": one.mesh or "none"} for one in (saved, here))
    lines = [
        f"{name}: {before.get(name, 'missing')}, here {after.get(name, 'missing')}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    yield from lines or [f"{here.function}: the function is another one, or was changed"]


def _build(version: str) -> str:
    """The build of a compiler, in the same form with and without devices."""
    found = re.search(r"cl/\d+", version)
    return found[0] if found else version
