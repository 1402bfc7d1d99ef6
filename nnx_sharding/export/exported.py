"""A program with its manifest: from a function, or from a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from .. import _compat
from ..analysis.tables import Pictured
from ..analysis.units import printable
from ..errors import ExportError
from . import files, trees
from .bind import bind
from .devices import Shardings, mesh_for, place, shardings_on
from .manifest import ArrayInfo, Manifest


class Result(NamedTuple):
    """The result of a call of an exported function.

    Attributes:
      output: what the function returned. Tuples, lists and dicts keep their type; a module is an
        ``nnx.State``, and an object of any other class a dict.
      updates: the new arrays, by name of the argument, of each argument that the function changed:
        those of changed and added Variables. They have the form in which the argument was passed: a
        mapping by path if it was a mapping, else an ``nnx.State``.
    """

    output: Any
    updates: dict[str, Any]


class Exported(Pictured):
    """A lowered function that can be called without its code: a program and its manifest.

    Returned by :func:`export` and :func:`load`.

    Attributes:
      manifest: how it is called, and what it was made with; its ``str`` is a table.
      jax_exported: the program alone, over flat arrays in the order of ``manifest.inputs``.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.export import export
      >>> predict = jit(lambda model, x: model(x))
      >>> model, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
      >>> exported = export(predict)(model, x)
      >>> exported.call(model, x).output.shape, exported.manifest.inputs[0].type
      ((8, 2), 'float32[2]')
    """

    manifest: Manifest
    jax_exported: jax.export.Exported

    def __init__(self, manifest: Manifest, program: jax.export.Exported, data: bytes | None = None):
        self.manifest = manifest
        self.jax_exported = program
        self._data = data  # the program as it was read; JAX would write other bytes
        self._compiled: dict[Mesh | None, tuple[Any, Shardings]] = {}

    @property
    def args_info(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(positional, keywords)`` with a ``ShapeDtypeStruct`` for each array.

        A module is an ``nnx.State``. A declared sharding has an ``AbstractMesh``.
        """
        shardings, _ = _compat.exported_shardings(self.jax_exported)
        arrays = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(self.jax_exported.in_avals, shardings, strict=True)
        ]
        infos = [(a, trees.build(a.tree, {"input": arrays})) for a in self.manifest.arguments]
        positional = tuple(info for argument, info in infos if not argument.keyword)
        return positional, {a.name: info for a, info in infos if a.keyword}

    @_compat.api_boundary
    def call(self, *args: Any, **kwargs: Any) -> Result:
        """Runs the program; inside another trace, makes it part of that trace.

        The arguments are not changed, but the buffers of donated ones are consumed.

        Args:
          *args: the arguments of the function, without static ones. A module is passed as its
            arrays by path, in any of these forms: an ``nnx.State``; nested dicts; a flat mapping
            by paths such as ``"up/kernel"`` or ``("up", "kernel")``; or a module. Arrays are moved
            to the mesh in context, which has to be like the exported one, or without one to the
            first devices.
          **kwargs: the arguments that are passed by name.

        Raises:
          TypeError: arguments or arrays are missing or unknown, or have other shapes or dtypes;
            all are listed by path.
          ExportError: this machine has another platform or too few devices, or the mesh in context
            is not like the exported one.
        """
        arrays, forms = bind(self.manifest, args, kwargs)
        program: Any = self.jax_exported.call
        if _compat.trace_is_clean():
            mesh = mesh_for(self.manifest, self.jax_exported)
            if mesh not in self._compiled:
                self._compiled[mesh] = self._compile(mesh)
            program, shardings = self._compiled[mesh]
            arrays = place(arrays, shardings, mesh)
        known: Mapping[str, Sequence[Any]] = {"input": arrays, "output": program(*arrays)}
        updates = {}
        for name, tree in self.manifest.updates.items():
            flat = {path: known[kind][i] for path, kind, i in trees.leaves(tree)}
            updates[name] = forms[name](flat)
        return Result(trees.build(self.manifest.result, known), updates)

    def save(self, path: str | os.PathLike[str], *, vjp_order: int = 0) -> None:
        """Writes program and manifest to one file; the same function results in the same bytes.

        Args:
          path: the file, a zip archive, whose ``manifest.json`` can be read with any tool.
          vjp_order: how many times the loaded program can be differentiated in reverse mode, as
            in ``jax.export``. A loaded program keeps the order that it was saved with.

        Raises:
          ImportError: ``flatbuffers`` is missing, which ``jax.export`` needs.
          ValueError: a part of the program cannot be written, or there are too many arrays.
        """
        try:
            program = self._data or bytes(self.jax_exported.serialize(vjp_order=vjp_order))
        except ImportError:
            raise ImportError(_NO_FLATBUFFERS) from None
        except KeyError as error:  # of JAX, for a dtype that it has no number for
            raise ValueError(
                f"{self.manifest.function} cannot be saved: jax.export cannot write {error}."
            ) from None
        files.write(path, self.manifest.to_json(), program)

    def _compile(self, mesh: Mesh | None) -> tuple[Any, Shardings]:
        inputs, outputs = shardings_on(mesh, self.jax_exported)
        donated = [argument for argument in self.manifest.arguments if argument.donated]
        positions = sorted({leaf.position for argument in donated for leaf in argument.leaves})
        options: dict[str, Any] = {"donate_argnums": positions}
        if mesh is not None:
            options |= {"in_shardings": inputs, "out_shardings": outputs}
        return jax.jit(self.jax_exported.call, **options), inputs

    def _pictures(self, width: int) -> Iterable[Any]:
        return self.manifest._pictures(width)

    def __repr__(self) -> str:
        return printable(f"<nnx_sharding.export.Exported of {self.manifest.function}>")


def load(path: str | os.PathLike[str]) -> Exported:
    """Reads what :meth:`Exported.save` wrote; the code of the model is not needed.

    Reading runs no code of the file and needs none of the exported devices. But a *call* runs the
    program, so load files only from sources from which you would install a library.

    Args:
      path: the file.

    Raises:
      ExportError: the file is of another kind or version, damaged or changed.
      ImportError: ``flatbuffers`` is missing, which ``jax.export`` needs.
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
    data, content = files.read(path)
    try:
        manifest = Manifest.from_json(data)
    except (RecursionError, ValueError) as error:
        raise ExportError(f"{path} has a manifest that cannot be read: {error}") from None
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    version = manifest.calling_convention
    if not oldest <= version <= newest:
        remedy = "a newer jax" if version > newest else "an older jax, or export it again"
        raise ExportError(
            f"{path} has version {version} of the calling convention of jax.export; jax "
            f"{jax.__version__} supports versions {oldest} to {newest}. Use {remedy}. It was "
            f"written by {manifest.versions}."
        )
    try:
        program = jax.export.deserialize(bytearray(content))
    except ImportError:
        raise ImportError(_NO_FLATBUFFERS) from None
    except Exception as error:  # JAX checks nothing, so it may be of any kind
        raise ExportError(
            f"{path} has a program that jax {jax.__version__} cannot read ({error}); it was "
            f"written by {manifest.versions}."
        ) from None
    sides = ((manifest.inputs, program.in_avals), (manifest.outputs, program.out_avals))
    types = [[ArrayInfo.of("", aval, None).type for aval in avals] for _, avals in sides]
    if types != [[info.type for info in infos] for infos, _ in sides]:
        raise ExportError(f"{path} has a manifest that does not describe its program.")
    return Exported(manifest, program, content)


_NO_FLATBUFFERS = (
    "jax.export needs flatbuffers to write and read programs: "
    "pip install 'nnx_sharding[export]', or pip install flatbuffers."
)
