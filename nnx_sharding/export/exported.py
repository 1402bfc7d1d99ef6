"""A program with its manifest: from a function, or from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from .. import _compat
from ..analysis.units import printable
from ..errors import ExportError
from . import files, trees
from .devices import Layouts, layouts_on, mesh_at_hand, place
from .given import given
from .manifest import ArrayInfo, Manifest


class Result(NamedTuple):
    """What a call of an exported function gives.

    Attributes:
      output: what the function returned. Tuples, lists and dicts come back as they are, a module
        as an ``nnx.State``, and an object of any other class as a dict.
      updates: for each argument that the function changed, by name, its new arrays: those of
        changed and of added Variables. They have the form in which the argument was given: a
        mapping by path if it was a mapping, else an ``nnx.State``.
    """

    output: Any
    updates: dict[str, Any]


class Exported:
    """A lowered function that needs no code of its model: a program and its manifest.

    Made by :func:`export` and :func:`load`.

    Attributes:
      manifest: how it is called, and what it was made with; ``str`` of it is a table.
    """

    manifest: Manifest

    def __init__(self, manifest: Manifest, program: jax.export.Exported, data: bytes | None = None):
        self.manifest = manifest
        self._program = program
        self._data = data  # the program as it was read; JAX would write it in another way
        self._compiled: dict[Mesh | None, tuple[Any, Layouts]] = {}

    @property
    def args_info(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(positional, keywords)`` with a ``ShapeDtypeStruct`` for each array.

        Modules are ``nnx.State``s. Where a layout is declared it is on an ``AbstractMesh``.
        """
        shardings, _ = _compat.exported_shardings(self._program)
        pairs = zip(self._program.in_avals, shardings, strict=True)
        arrays = {"input": [trees.struct(aval, sharding) for aval, sharding in pairs]}
        infos = [(a, trees.build(a.tree, arrays)) for a in self.manifest.arguments]
        positional = tuple(info for argument, info in infos if not argument.keyword)
        return positional, {a.name: info for a, info in infos if a.keyword}

    @property
    def jax_exported(self) -> jax.export.Exported:
        """The program alone, over flat arrays in the order of ``manifest.inputs``."""
        return self._program

    @_compat.api_boundary
    def call(self, *args: Any, **kwargs: Any) -> Result:
        """Runs the program; inside of another trace, makes it part of that.

        Nothing that was given is changed; but the memory of donated arguments is taken.

        Args:
          *args: the arguments of the function, without static ones. In place of a module stand
            its arrays by path, in any of these forms: an ``nnx.State``; nested dicts; a flat
            mapping by paths such as ``"up/kernel"`` or ``("up", "kernel")``; or a module.
            Arrays are brought to where the program wants them. That is the mesh in context, if
            it has the sizes and names of the exported one; without one, the first devices.
          **kwargs: those that are given by name.

        Returns:
          The result of the function, and what it changed.

        Raises:
          TypeError: arguments or arrays are missing or unknown, or have other shapes or dtypes;
            all of them are listed by path.
          ExportError: this machine has another platform, too few devices, or a mesh in context
            that is not like the exported one.
        """
        bound = given(self.manifest, args, kwargs)
        if _compat.trace_is_clean():
            program, arrays = self._on_devices(bound.arrays)
        else:
            program, arrays = self._program.call, bound.arrays
        outputs = program(*arrays)
        known: Mapping[str, Sequence[Any]] = {"input": arrays, "output": outputs}
        updates = {}
        for name, tree in self.manifest.updates.items():
            flat = {path: known[kind][i] for path, kind, i in trees.places(tree)}
            updates[name] = bound.form[name](flat)
        return Result(trees.build(self.manifest.result, known), updates)

    def save(self, path: str | os.PathLike[str], *, vjp_order: int = 0) -> None:
        """Writes program and manifest to one file; the same function gives the same bytes.

        Args:
          path: where to. The file is a zip archive, whose ``manifest.json`` can be read with any
            tool.
          vjp_order: how many times what is loaded can be differentiated in reverse mode, as in
            ``jax.export``. What was loaded keeps the order that it was saved with.

        Raises:
          ImportError: ``flatbuffers`` is missing, which ``jax.export`` writes with.
          ValueError: a dtype or another part of the program has no form in a file, or there are
            too many arrays.
        """
        try:
            program = self._data or bytes(self._program.serialize(vjp_order=vjp_order))
        except ImportError:
            raise ImportError(_NO_FLATBUFFERS) from None
        except KeyError as error:  # what JAX raises for a dtype that it has no number for
            raise ValueError(
                f"{self.manifest.function} cannot be saved: jax.export has no form for {error}."
            ) from None
        files.write(path, files.Content(self.manifest.to_json(), program))

    def _on_devices(self, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The compiled program for the devices at hand, and the arrays where it wants them."""
        mesh = mesh_at_hand(self.manifest, self._program)
        if mesh not in self._compiled:
            layouts = layouts_on(mesh, self._program)
            options: dict[str, Any] = {"donate_argnums": self._donated_positions()}
            if mesh is not None:
                options |= {"in_shardings": layouts.inputs, "out_shardings": layouts.outputs}
            program = jax.jit(self._program.call, **options)
            self._compiled[mesh] = program, layouts
        program, layouts = self._compiled[mesh]
        return program, place(arrays, layouts.inputs, mesh)

    def _donated_positions(self) -> tuple[int, ...]:
        donated = [argument for argument in self.manifest.arguments if argument.donated]
        return tuple(sorted({place.position for argument in donated for place in argument.places}))

    def __str__(self) -> str:
        return str(self.manifest)

    def __repr__(self) -> str:
        return printable(f"<nnx_sharding.export.Exported of {self.manifest.function}>")


def load(path: str | os.PathLike[str]) -> Exported:
    """Reads what :meth:`Exported.save` wrote, where the code of the model need not be.

    Reading runs no code of the file and needs none of the exported devices: a program for a
    machine that is not here can be looked at. But a *call* runs the program, with the rights of
    this process; so take files only from where you would take a library.

    Args:
      path: the file.

    Raises:
      ExportError: it is no such file; it is damaged, or was changed; its format is unknown; or
        this JAX cannot read programs of its age.
      ImportError: ``flatbuffers`` is missing, which ``jax.export`` reads with.
      OSError: the file cannot be read.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import export, jit
      >>> model = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
      >>> exported = export.export(jit(lambda model, x: model(x)))(model, jnp.ones((4, 2)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     exported.save(Path(folder, "forward.zip"))
      ...     loaded = export.load(Path(folder, "forward.zip"))
      >>> loaded.call({"kernel": jnp.ones((2, 3))}, jnp.ones((4, 2))).output[0]
      Array([2., 2., 2.], dtype=float32)
    """
    content = files.read(path)
    try:
        manifest = Manifest.from_json(content.manifest)
    except ValueError as error:
        raise ExportError(f"{path} has a manifest that cannot be read: {error}.") from None
    _check_convention(path, manifest)
    try:
        program = jax.export.deserialize(bytearray(content.program))
    except ImportError:
        raise ImportError(_NO_FLATBUFFERS) from None
    except Exception as error:  # JAX checks nothing, so anything may come out of it
        raise ExportError(
            f"{path} holds a program that jax {jax.__version__} cannot read ({error}); it was "
            f"written by {manifest.versions}."
        ) from None
    sides = ((manifest.inputs, program.in_avals), (manifest.outputs, program.out_avals))
    if not all(_describes(infos, avals) for infos, avals in sides):
        raise ExportError(f"{path} has a manifest that does not describe its program.")
    return Exported(manifest, program, content.program)


_NO_FLATBUFFERS = (
    "jax.export needs flatbuffers to write and read programs: "
    "pip install 'nnx_sharding[export]', or pip install flatbuffers."
)


def _check_convention(path: str | os.PathLike[str], manifest: Manifest) -> None:
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    own = manifest.calling_convention
    if not oldest <= own <= newest:
        remedy = "a newer jax" if own > newest else "an older jax, or export it again"
        raise ExportError(
            f"{path} has version {own} of the calling convention of jax.export; jax "
            f"{jax.__version__} takes versions {oldest} to {newest}. Use {remedy}. It was written "
            f"by {manifest.versions}."
        )


def _describes(infos: Sequence[ArrayInfo], avals: Sequence[Any]) -> bool:
    own = [ArrayInfo.of("", aval, None) for aval in avals]
    return [(i.shape, i.dtype) for i in infos] == [(i.shape, i.dtype) for i in own]
