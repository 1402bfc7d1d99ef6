"""A program with its manifest: from a function, or from a file.

A *program* (``jax.export.Exported``) takes and returns a list of arrays. The *manifest* says what
they mean: which array, by its path in an argument, is at which *position* of the inputs, and how
the outputs make up the result. A call goes from arguments to a list of arrays (``_bind``), to the
devices (``_mesh_for``, ``_placed``), through the program, and from arrays to the result. A program
is compiled once for each mesh that is in context. The manifest has all facts about the arguments,
so a mistake in them is reported by path, before JAX would report it by position.

A *tree* of the manifest describes the result, or the updates of an argument. It is a pytree in
which arrays are ``{"input": 3}`` or ``{"output": 0}``, by their kind and position in the program.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..analysis.meshes import MeshDescription
from ..analysis.tables import Pictured
from ..analysis.units import printable
from ..core.declared import is_committed
from ..core.flatten import flatten
from ..core.place import place_arrays
from ..errors import ExportError, by_kind, raise_if_any
from ..specs.fitting import suggestion
from ..specs.paths import Path, accessor, path_string
from . import files
from .manifest import ArrayInfo, LeafInfo, Manifest, build, leaves_of, meshes_of, tree_of

# Puts arrays by path into the form in which an argument was passed.
Form: TypeAlias = Callable[[Mapping[Path, Any]], Any]

# The shardings of all inputs, or of all outputs; None for a sharding that is left open.
Shardings: TypeAlias = tuple[NamedSharding | None, ...]


class Result(NamedTuple):
    """The result of a call of an exported function.

    Attributes:
      output: what the function returned. Tuples, lists and dicts keep their type; a module is an
        ``nnx.State``, and an object of any other class a dict.
      updates: the new arrays, by name of the argument, of each argument that the function changed:
        the values of changed and added Variables. They have the form in which the argument was
        passed: a mapping by path if it was a mapping, otherwise an ``nnx.State``.
    """

    output: Any
    updates: dict[str, Any]


class Exported(Pictured):
    """A lowered function that can be called without its code: a program and its manifest.

    :func:`export` and :func:`load` return it.

    Attributes:
      manifest: how it is called, and what it was made with; its ``str`` is a table.
      jax_exported: the program alone, over flat arrays in the order of ``manifest.inputs``.
    """

    # Private attributes:
    #   _data       the program as it was read from a file, which `save` writes again, because JAX
    #               would write other bytes; None if the program was not read
    #   _compiled   the compiled program and the shardings of its inputs, by the mesh that
    #               `_mesh_for` returns; the key is None for a program of one device

    def __init__(self, manifest: Manifest, program: jax.export.Exported, data: bytes | None = None):
        self.manifest = manifest
        self.jax_exported = program
        self._data = data
        self._compiled: dict[Mesh | None, tuple[Callable[..., Any], Shardings]] = {}

    @_compat.api_boundary
    def call(self, *args: Any, **kwargs: Any) -> Result:
        """Runs the program; inside another trace, makes it part of that trace.

        The arguments are not changed, but a call consumes the buffers of donated arguments.

        Args:
          *args: the arguments of the function, without static ones. A module is passed as its
            arrays by path, in any of these forms: an ``nnx.State``; nested dicts; a flat mapping
            by paths such as ``"up/kernel"`` or ``("up", "kernel")``; or a module. Arrays are moved
            to the mesh in context, which has to be like the exported one. Without a mesh in
            context, they are moved to the first devices.
          **kwargs: the arguments that are passed by name.

        Raises:
          TypeError: arguments or arrays are missing or unknown, or have other shapes or dtypes;
            all are listed by path.
          ExportError: this machine has too few devices, or the mesh in context is not like the
            exported one.
          ValueError: the program was exported for another platform.
        """
        arrays, forms = _bind(self.manifest, args, kwargs)
        # In a trace, the program becomes a part of that trace, so nothing is compiled or moved.
        program: Any = self.jax_exported.call
        if _compat.trace_is_clean():
            mesh = _mesh_for(self.manifest, self.jax_exported)
            if mesh not in self._compiled:
                self._compiled[mesh] = self._compile(mesh)
            program, shardings = self._compiled[mesh]
            arrays = _placed(arrays, shardings, mesh)
        # The result may also hold an input, which the function has returned unchanged.
        arrays_by_kind: Mapping[str, Sequence[Any]]
        arrays_by_kind = {"input": arrays, "output": program(*arrays)}
        updates = {}
        for name, tree in self.manifest.updates.items():
            new_arrays = {
                path: arrays_by_kind[kind][position] for path, kind, position in leaves_of(tree)
            }
            in_form_of_argument = forms[name]  # makes a flat mapping, for example
            updates[name] = in_form_of_argument(new_arrays)
        return Result(build(self.manifest.result, arrays_by_kind), updates)

    def save(self, path: str | os.PathLike[str], *, vjp_order: int = 0) -> None:
        """Writes program and manifest to one file; the same function results in the same bytes.

        Args:
          path: the file, a zip archive, whose ``manifest.json`` can be read with any tool.
          vjp_order: how many times the loaded program can be differentiated in reverse mode, as
            in ``jax.export``. A loaded program keeps the order that it was saved with.

        Raises:
          ImportError: flatbuffers is not installed.
          ValueError: a part of the program cannot be written, there are too many arrays, or the
            program was loaded and saved with a lower ``vjp_order`` than this one.
        """
        if self._data is not None:
            saved_order = _vjp_order(self.jax_exported)
            if vjp_order > saved_order:
                raise ValueError(
                    f"{self.manifest.function} was loaded from a file that was saved with "
                    f"vjp_order={saved_order}, so it cannot be saved with {vjp_order}. Export the "
                    f"function again, and save that with vjp_order={vjp_order}."
                )
        try:
            program = self._data or bytes(self.jax_exported.serialize(vjp_order=vjp_order))
        except ImportError as error:
            raise _no_flatbuffers("Exported.save") from error
        except KeyError as error:  # JAX raises it for a dtype for which it has no number
            raise ValueError(
                f"{self.manifest.function} cannot be saved: jax.export cannot write {error}."
            ) from None
        files.write(path, self.manifest.to_json(), program)

    def _compile(self, mesh: Mesh | None) -> tuple[Callable[..., Any], Shardings]:
        """Returns the program on the devices of a mesh, and the shardings of its inputs there."""
        abstract_inputs, abstract_outputs = _compat.exported_shardings(self.jax_exported)
        # A sharding is None if the program leaves it open, or if there is no mesh.
        inputs = tuple(_on_devices(mesh, sharding) for sharding in abstract_inputs)
        outputs = tuple(_on_devices(mesh, sharding) for sharding in abstract_outputs)
        if mesh is not None and all(sharding is None for sharding in (*inputs, *outputs)):
            # JAX learns from shardings on which devices a program runs, and here no sharding says
            # so. The program has several devices, so all arrays are replicated on them.
            replicated = NamedSharding(mesh, PartitionSpec())
            inputs, outputs = (replicated,) * len(inputs), (replicated,) * len(outputs)
        donated = [argument for argument in self.manifest.arguments if argument.donated]
        positions = sorted({leaf.position for argument in donated for leaf in argument.leaves})
        options: Any = {"in_shardings": inputs, "out_shardings": outputs}
        return jax.jit(self.jax_exported.call, donate_argnums=positions, **options), inputs

    def _pictures(self, width: int) -> Iterable[Any]:
        return self.manifest._pictures(width)

    def __repr__(self) -> str:
        return printable(f"<nnx_sharding.export.Exported of {self.manifest.function}>")


def load(path: str | os.PathLike[str]) -> Exported:
    """Reads a file of :meth:`Exported.save`; the code of the model is not needed.

    Reading runs no code of the file and needs none of the exported devices. But a *call* runs the
    program, so load files only from sources from which you would install a library.

    Args:
      path: the file.

    Raises:
      ExportError: the file is of another kind or version, damaged or changed.

    Example:
      See :func:`export`.
    """
    data, content = files.read(path)
    try:
        manifest = Manifest.from_json(data)
    except ValueError as error:
        raise ExportError(f"{path} cannot be read: {error}") from None
    version = manifest.calling_convention
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if not oldest <= version <= newest:  # JAX would read it, and fail in a call
        raise ExportError(
            f"{path} has version {version} of the calling convention of jax.export; jax "
            f"{jax.__version__} supports versions {oldest} to {newest}. Use one of the releases "
            f"that wrote it, or export it again: {manifest.versions}."
        )
    try:
        program = jax.export.deserialize(bytearray(content))  # the type that JAX declares
    except ImportError as error:  # flatbuffers is missing
        raise _no_flatbuffers("export.load") from error
    except Exception as error:  # JAX checks nothing, so the error may be of any kind
        raise ExportError(
            f"{path} has a program that jax {jax.__version__} cannot read ({error}); it was "
            f"written by {manifest.versions}."
        ) from None
    # The manifest may belong to another program. Types are compared as text: "float32[4,16]".
    described = [info.type for info in (*manifest.inputs, *manifest.outputs)]
    avals = (*program.in_avals, *program.out_avals)
    actual = [ArrayInfo.of("", aval, None).type for aval in avals]  # without names and shardings
    has_types = described == actual and len(manifest.inputs) == len(program.in_avals)
    if not has_types or manifest.devices != program.nr_devices:
        raise ExportError(f"{path} has a manifest that does not describe its program.")
    return Exported(manifest, program, content)


def _vjp_order(program: jax.export.Exported) -> int:
    """Returns how many times a loaded program can be differentiated in reverse mode.

    A file has the derivative of a program as another program, which may have a derivative, too.
    """
    order = 0
    while program.has_vjp():
        program = program.vjp()
        order += 1
    return order


def _no_flatbuffers(caller: str) -> ImportError:
    """Returns the error for a function that needs the package by which JAX writes programs."""
    return ImportError(
        f"{caller} needs the package flatbuffers: pip install 'nnx_sharding[export]', or "
        "flatbuffers alone."
    )


def _bind(
    manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Form]]:
    """Returns the array for each input of the program, and the form of each argument by its name.

    A form is a function that puts new arrays, by path, into an argument like the one passed.

    Args:
      manifest: describes the arguments; its ``inputs`` are the arrays of the program, by position.

    Raises:
      TypeError: arrays do not fit the manifest; all of them are listed.
    """
    arguments = _arguments_by_name(manifest, args, kwargs)
    # For the position of each input: its first place in the arguments, and the array there.
    passed: dict[int, tuple[LeafInfo, Any]] = {}
    forms: dict[str, Form] = {}
    # The lines of the message, for each kind of mistake.
    missing, unknown, wrong_type, not_shared = list[str](), list[str](), list[str](), list[str]()
    for argument in manifest.arguments:
        has_joined_paths = False  # whether the argument is a flat mapping with such paths
        for path, array in _arrays_by_path(arguments[argument.name]):
            # `by_path` has each path as ("up", "kernel"). It also has "up/kernel", a joined path,
            # which is the key in a flat mapping.
            leaf = argument.by_path.get(tuple(map(str, path)))
            if leaf is None:
                leaf = argument.by_path.get(path_string(path))
                if leaf is not None:
                    has_joined_paths = True
            if leaf is None:
                name = accessor(argument.name, path)
                hint = suggestion(name, [other.name for other in argument.leaves])
                unknown.append(f"  {name}{hint}")
                continue
            # An array that arguments shared when the function was exported is one input, so passing
            # another array for it is a mistake.
            first_leaf, first_array = passed.setdefault(leaf.position, (leaf, array))
            if first_array is not array:
                not_shared.append(f"  {leaf.name}: is {first_leaf.name}, passed as another array")
        forms[argument.name] = _form_of(arguments[argument.name], has_joined_paths=has_joined_paths)
    for position, info in enumerate(manifest.inputs):
        if position not in passed:
            missing.append(f"  {info.name}, {info}")
            continue
        first_leaf, array = passed[position]
        fault = _type_fault(array, info)
        if fault:
            wrong_type.append(f"  {first_leaf.name}: {fault}")
    faults = {
        "Missing": missing,
        "Unknown": unknown,
        "Of another type": wrong_type,
        "One array in the exported function, to be passed once": not_shared,
    }
    head = f"{manifest.function} was exported for other arrays than these."
    raise_if_any(TypeError, head, by_kind(faults))
    return [passed[position][1] for position in range(len(manifest.inputs))], forms


def _arguments_by_name(
    manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a call by name, as Python would bind them.

    Raises:
      TypeError: lists the arguments that are missing, unknown, static or passed twice.
    """
    # Static arguments are in neither list: they are part of the program.
    names = [argument.name for argument in manifest.arguments]
    positional = [argument.name for argument in manifest.arguments if not argument.keyword]
    # `zip` is not strict, because too many arguments are an error below, and missing ones may be
    # passed by keyword.
    bound = dict(zip(positional, args, strict=False))
    lines = []
    if len(args) > len(positional):
        lines.append(f"  got {len(args)} positional arguments, it takes {len(positional)}")
    for name, value in kwargs.items():
        if name in bound:
            lines.append(f"  {name}: passed twice")
        elif name in manifest.static:
            text = manifest.static[name]
            lines.append(f"  {name}: static, and part of the program as {text:.80}; leave it out")
        elif name not in names:
            lines.append(f"  {name}: unknown{suggestion(name, names)}")
        bound[name] = value
    lines += [f"  {name}: missing" for name in names if name not in bound]
    head = f"{manifest.function} was exported with the arguments ({', '.join(names)}), and cannot "
    raise_if_any(TypeError, f"{head}be called with these:", lines)
    return bound


def _arrays_by_path(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields each array of an argument with its path, in all forms in which it may be passed.

    ``path`` is the path of ``value`` in the argument.
    """
    # A State has Variables, and their arrays count. A Variable with another value, such as a
    # pytree, is flattened below.
    leaf = _compat.get_value(value) if _compat.is_variable(value) else value
    if isinstance(leaf, jax.Array | np.ndarray):  # the usual case
        yield path, leaf
    elif isinstance(value, Mapping):
        items = value.raw_mapping.items() if isinstance(value, nnx.State) else value.items()
        for key, part in items:
            keys = key if isinstance(key, tuple) else (key,)  # a flat mapping has paths as keys
            yield from _arrays_by_path(part, (*path, *keys))
    else:  # a module, or a pytree of any other class
        # This tree is the one that the manifest has for an argument, with the index of each array.
        flat = flatten(value)
        tree = tree_of(flat.structure, lambda index: {"input": index})
        for path_in_value, _kind, index in leaves_of(tree):
            yield path + path_in_value, flat.leaves[index]


def _form_of(value: Any, *, has_joined_paths: bool) -> Form:
    """Returns a function that puts new arrays, by path, into the form of an argument.

    Args:
      value: the argument: a module or a State, nested dicts, or a flat mapping by paths.
      has_joined_paths: whether it is flat with keys such as ``"up/kernel"``.
    """
    # The new arrays come by paths, ``{("up", "kernel"): array}``.
    if not isinstance(value, Mapping) or isinstance(value, nnx.State):
        # The path is empty if the argument is an array itself, in a Variable for example.
        return lambda arrays: arrays[()] if () in arrays else nnx.from_flat_state(arrays)
    if any(isinstance(key, tuple) for key in value):
        return dict  # the same paths are the keys
    if has_joined_paths:
        return lambda arrays: {path_string(path): array for path, array in arrays.items()}
    return unflatten_dict  # {"up": {"kernel": array}}


def _fits(size: int | str, exported: int | str) -> bool:
    """Whether a size can be the exported one; JAX decides for most symbolic sizes.

    Args:
      size: the size of the array that was passed; a text if it is symbolic.
      exported: the size in the manifest; a text if it is symbolic, such as ``"2*batch"``.
    """
    if isinstance(exported, int):
        return size == exported
    if isinstance(size, str):  # both are symbolic
        return True
    # Of symbolic sizes, only multiples of one variable are checked here: "batch", or "2*batch".
    multiple = re.fullmatch(r"(?:(\d+)\*)?[A-Za-z_]\w*", exported)
    if multiple is None:
        return True
    factor = int(multiple[1] or 1)
    return size > 0 and size % factor == 0


def _type_fault(leaf: Any, info: ArrayInfo) -> str:
    """Returns why a value cannot be the input that ``info`` describes; empty if it can.

    Dtypes have to be equal, and shapes have to fit (`_fits`). Shardings are not compared, because
    `_placed` moves arrays.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "a ShapeDtypeStruct, which has no values"
    try:
        # The type is the one that JAX gives a NumPy array or a number, such as float32 for float64.
        aval = leaf if isinstance(leaf, jax.Array) else jax.typeof(leaf)
        actual = ArrayInfo.of(name="", aval=aval, sharding=None)
    except (AttributeError, TypeError):
        return f"a {type(leaf).__name__}, not {info}"
    # An exported size may be symbolic, such as "2*batch".
    has_rank = len(actual.shape) == len(info.shape)
    has_shape = has_rank and all(map(_fits, actual.shape, info.shape))
    if has_shape and actual.dtype == info.dtype:
        return ""
    is_wide = info.dtype in ("float64", "int64", "uint64", "complex128")
    needs_x64 = is_wide and not jax.config.jax_enable_x64
    hint = "; set jax_enable_x64, as where it was exported" if needs_x64 else ""
    return f"{actual.type}, not {info.type}{hint}"


def _mesh_for(manifest: Manifest, program: jax.export.Exported) -> Mesh | None:
    """Returns a mesh like the exported one, of the devices in context or else of the first ones.

    The types of its axes are part of the program. The result is None for a program of one device.

    Args:
      program: the program, whose shardings say how the devices are arranged.

    Raises:
      ExportError: there are too few devices, or the mesh in context has another size or shape.
    """
    if manifest.devices == 1:
        return None
    context = _compat.context_mesh()
    mesh = context if isinstance(context, Mesh) else None  # an AbstractMesh has no devices
    inputs, outputs = _compat.exported_shardings(program)
    meshes = meshes_of((*inputs, *outputs))
    # Meshes of one program have the same devices, and the first mesh says how they are arranged. A
    # program without shardings runs on any mesh of so many devices.
    like = meshes[0] if meshes else AbstractMesh((manifest.devices,), ("devices",))
    exported = f"{manifest.function} was exported for {manifest.devices} devices (mesh "
    exported += f"{MeshDescription.of(like)})"
    if mesh is None:
        devices = jax.devices()
        if len(devices) < manifest.devices:
            raise ExportError(
                f"{exported}; here there are {len(devices)} of {devices[0].platform}. Call it "
                "where there are as many, or export it again for a smaller mesh."
            )
        grid = jax.make_mesh(like.axis_sizes, like.axis_names, devices=devices[: like.size]).devices
    elif mesh.size != manifest.devices or (meshes and mesh.shape != like.shape):
        raise ExportError(
            f"{exported}; the mesh in context is {MeshDescription.of(mesh)}. Call it within `with "
            "jax.set_mesh(mesh):` for one like it, or without, or export it again for this one."
        )
    else:
        # The mesh has this shape already, or the program has no shardings, so any shape will do.
        grid = mesh.devices.reshape(like.axis_sizes)
    return Mesh(grid, like.axis_names, axis_types=like.axis_types)


def _on_devices(mesh: Mesh | None, sharding: NamedSharding | None) -> NamedSharding | None:
    """Returns an exported sharding, whose mesh is abstract, on the devices of a mesh.

    Args:
      mesh: the mesh from `_mesh_for`; None for a program of one device.
      sharding: the sharding of an input or an output; None if it was left open.

    Returns:
      The sharding, with the same devices in the same order. None, which leaves it open, if there is
      no mesh on either side.
    """
    if mesh is None or sharding is None or sharding.mesh.empty:
        return None
    # A program may use several meshes of the same devices, with other axes.
    own_mesh = sharding.mesh
    devices = mesh.devices.reshape(own_mesh.axis_sizes)
    on_devices = Mesh(devices, own_mesh.axis_names, axis_types=own_mesh.axis_types)
    return NamedSharding(on_devices, sharding.spec, memory_kind=sharding.memory_kind)


def _placed(arrays: Sequence[Any], shardings: Shardings, mesh: Mesh | None) -> list[Any]:
    """Places the inputs of a program on its mesh.

    Args:
      shardings: the sharding that each input has to have. If it is open (None), an array only has
        to be on the same devices as the others, in any sharding.
      mesh: the mesh; None for a program of one device, for which nothing is moved.
    """
    if mesh is None:
        return list(arrays)
    devices, replicated = set(mesh.devices.flat), NamedSharding(mesh, PartitionSpec())
    targets = list(shardings)
    for i, array in enumerate(arrays):
        # JAX refuses arrays that are committed to other devices. It moves all other arrays itself.
        if targets[i] is None and is_committed(array) and array.sharding.device_set != devices:
            targets[i] = replicated
    return place_arrays(arrays, targets)
