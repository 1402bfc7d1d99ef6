"""Compiled programs in files, which run on devices like those they were compiled for."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from .. import _compat
from .._version import __version__
from ..analysis.meshes import MeshDescription
from ..analysis.parameters import spec_text
from ..core.plan import Plan
from ..errors import ExportError, raise_listed
from ..transforms.stages import Compiled, Lowered
from . import files
from .manifest import meshes_of

# How the machine code of Linux and of macOS begins.
_CODE = (b"\x7fELF", b"\xcf\xfa\xed\xfe")


def save_executable(path: str | os.PathLike[str], compiled: Compiled) -> None:
    """Writes a compiled function to a file, so that other processes need not compile it.

    The program may be compiled for devices that are not attached to this machine, such as those of
    a TPU topology (:func:`~nnx_sharding.partition.planning_mesh`). To save time on one machine, use
    JAX's persistent compilation cache, which needs no files of yours.

    Args:
      path: the file, a zip archive, whose ``manifest.json`` says what it was compiled for.
      compiled: what ``lower(...).compile()`` returned.

    Raises:
      ValueError: the program cannot be serialized, because it calls Python functions of this
        process, such as ``jax.debug.print``, because the backend does not support it, or because
        a program for CPUs comes from JAX's persistent compilation cache.

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
    name, shardings = compiled._plan.fun_name, compiled.shardings()
    devices = _devices(shardings) or jax.devices()[:1]
    try:
        program, _, _ = serialize_executable.serialize(compiled._stage)
    except Exception as error:  # of JAX, XLA or pickle
        raise ValueError(
            f"{name} cannot be saved: jax {jax.__version__} cannot serialize this program for "
            f"{devices[0].platform} ({type(error).__name__}: {error}). Leave out what calls Python "
            "or captures a jax.Ref, or use JAX's persistent compilation cache instead."
        ) from error
    is_cached = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    if devices[0].platform == "cpu" and is_cached and not any(code in program for code in _CODE):
        raise ValueError(
            f"{name} cannot be saved: XLA writes it without machine code, as it does with programs "
            "for CPUs from JAX's persistent compilation cache. Compile it in a process with "
            "jax.config.update('jax_enable_compilation_cache', False)."
        )
    manifest = _manifest(compiled._lowered, compiled._plan, devices)
    files.write(path, manifest, program, files.EXECUTABLE)


def load_executable(path: str | os.PathLike[str], lowered: Lowered) -> Compiled:
    """Reads what :func:`save_executable` wrote, instead of ``lowered.compile()``.

    Because the function is traced and lowered, the program takes and returns modules like the
    function itself, and a file of another function, or of an older version of it, is refused.

    Warning:
      Loading runs code of the file, which JAX keeps as a pickle. Load only files from people whom
      you would let run code here. The digest in the file detects damage, not forgery.

    Args:
      path: the file.
      lowered: what ``fun.lower(...)`` returns for the same function and arguments; these may be
        abstract.

    Returns:
      The compiled function, as from ``lowered.compile()``.

    Raises:
      ExportError: the file is of another kind or version, or damaged; jax, jaxlib, the compiler,
        the platform, the devices or their order differ, or the function does. All differences are
        listed.

    Example:
      See :func:`save_executable`.
    """
    if not isinstance(lowered, Lowered):
        raise TypeError(
            "load_executable(path, lowered): expected the result of fun.lower(...) for lowered, "
            f"got {lowered!r:.200}."
        )
    saved, program = files.read(path, files.EXECUTABLE)
    stage, plan = lowered._stage, lowered._plan
    try:
        available = {device.id: device for device in _available(saved["machine"]["platform"])}
        # Those of the shardings may be devices of a topology, which run nothing.
        ids = [device.id for device in _devices(plan.shardings)] or saved["devices"]
        devices = [available[id_] for id_ in ids if id_ in available] or jax.devices()[:1]
        here = _manifest(stage, plan, devices)
        lines = _differing(saved["machine"], here["machine"])
        if not lines and saved["stablehlo"] != here["stablehlo"]:
            lines = _differing(saved["inputs"], here["inputs"])
            lines += _differing({"mesh": saved["mesh"]}, {"mesh": here["mesh"]})
            lines = lines or [f"{here['function']}: the function is another one, or was changed"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ExportError(f"{path} has a manifest that cannot be read: {error!r}") from None
    raise_listed(
        ExportError,
        f"{path} has an executable of {saved['function']} that does not fit:",
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
    return lowered._compiled_to(loaded)


def _available(platform: str) -> list[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # there are none
        return jax.devices()


def _devices(shardings: Sequence[Any]) -> list[Any]:
    """The devices of a program, in its order; none if its shardings name none."""
    return list(next(filter(None, map(_compat.device_assignment, shardings)), ()))


def _manifest(lowered: Any, plan: Plan, devices: Sequence[Any]) -> dict[str, Any]:
    """What an executable was compiled from, and for what."""
    avals = lowered.in_avals[0]
    named = [one if isinstance(one, NamedSharding) else None for one in plan.shardings]
    specs = ["" if one is None else f" {spec_text(one.spec)}" for one in named]
    compiler = devices[0].client.platform_version
    # The build of a compiler has the same form with and without devices.
    build = re.search(r"cl/\d+", compiler)
    machine = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    machine |= {"platform": devices[0].platform, "device kind": devices[0].device_kind}
    machine |= {"compiler": build[0] if build else compiler}
    machine |= {f"device {i}": _place(device) for i, device in enumerate(devices)}
    return {
        "function": plan.fun_name,
        "inputs": dict(zip(plan.names, map("{}{}".format, avals, specs), strict=True)),
        "mesh": "; ".join(str(MeshDescription.of(mesh)) for mesh in meshes_of(named)) or "none",
        "stablehlo": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        "machine": machine,
        "devices": [device.id for device in devices],
        "versions": {"flax": metadata.version("flax"), "nnx_sharding": __version__},
    }


def _place(device: Any) -> str:
    """A device by its id, with its location among TPUs."""
    core, slice_ = (getattr(device, x, None) or 0 for x in ("core_on_chip", "slice_index"))
    place = [*getattr(device, "coords", ())]
    return f"id {device.id}, coordinates {place}, core {core}, slice {slice_}"


def _differing(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
    names.sort(key=lambda name: name[-1].isdigit())  # the devices last
    return [f"{n}: {saved.get(n, 'missing')}, here {here.get(n, 'missing')}" for n in names]
