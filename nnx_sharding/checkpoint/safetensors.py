"""``load_safetensors`` and ``save_safetensors``: models in files like those of Hugging Face.

    names of tensors ── tensor_rules, tensor_matching ──► placements of tensors in arrays
    a shard's region ── tensor_layouts ──► boxes of tensors ── tensor_files ──► runs of bytes

To load, JAX asks for the region of each shard, and the boxes of the region are read. Saving goes
the same way in reverse: each process writes the boxes of its shards into files that all processes
share, and ``tensor_release`` publishes the files once they are complete.

A *region* of an array is a range of each of its dimensions. A *placement* says which part of a
tensor is which part of an array. So it also tells which elements of a region are in the tensor:
*boxes*, ranges of each axis of the tensor.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from .. import _compat
from ..analysis.memory import array_bytes
from ..core.constrain import sharding_of
from ..core.flatten import flatten
from ..core.memory import Bounds, aligned, bounds_of
from ..core.place import place_arrays
from ..core.problems import out_of_range
from ..diagnostics.progress import progress
from ..errors import CheckpointError, raise_if_any
from ..specs.fitting import without_reductions
from ..specs.types import AnyArray
from . import names, tensor_files
from .agreement import Operation
from .names import NamedArray
from .stored import as_folder, is_in_bucket
from .tensor_files import NAMES, Box, Region, StoredTensor, Tensors
from .tensor_layouts import Placement
from .tensor_matching import Filled, fill_by_rules
from .tensor_release import Release, new_release
from .tensor_rules import Rule, Rules, places_of_array, read_rules
from .tensor_table import loaded_rules

_LOAD, _SAVE = "load_safetensors", "save_safetensors"

# The filter for the content of files: all but the state of random streams.
WEIGHTS = nnx.Not(nnx.RngState)

_CHUNK = 2**24  # bytes that are converted, or moved to devices, at once
_SHORT = 2**26  # bytes; below, no progress is shown, because its thread takes 0.6 ms

# The tensors that fill an array, each with its placement in the array.
Parts: TypeAlias = list[tuple[Placement, StoredTensor]]

Array: TypeAlias = jax.Array | np.ndarray[Any, Any]


@_compat.api_boundary
def load_safetensors(
    path: str | os.PathLike[str],
    model: Any,
    rules: Mapping[str, Rule] | str | os.PathLike[str],
    *,
    cast: bool = False,
    only: Any = WEIGHTS,
) -> Any:
    r"""Reads a model from safetensors files, such as those of Hugging Face.

    Each process reads the bytes of its own shards and no others, directly into the shardings of
    the model.

    Args:
      path: a file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``, also
        in a bucket, such as ``gs://bucket/model``, if fsspec or TensorFlow can read it.
      model: what to fill, with arrays or abstract (:func:`~nnx_sharding.partition.abstract_init`).
        Modules and Variables are changed in place: all of them or, after an error, none.
      rules: where each tensor belongs: regular expressions for complete names of tensors, each with
        the path of an array, a :class:`Tensor`, a list of these, or None for tensors to ignore. The
        first that matches applies. Every tensor needs a rule. Or the path of a file with rules
        that :func:`match_tensors` inferred.
      cast: whether to convert tensors of another dtype to that of the model, among floating-point
        types, also those of 8 bits, and among integers.
      only: an NNX filter for what to load. The rest of the model is not changed, and tensors
        that belong there are ignored. The default is all but the state of random streams.

    Returns:
      ``model``.

    Raises:
      NoCheckpointError: the file does not exist.
      CheckpointError: a file is damaged, or does not fit: arrays without tensors, tensors without
        rules or arrays, different shapes and dtypes, all in one message; or ``cast`` would wrap
        integers or make numbers infinite.
      ValueError: a rule is not a regular expression or names a group that it does not have,
        ``only`` selects nothing, or a sharding has an abstract mesh.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import Tensor, load_safetensors, save_safetensors
      >>> rules = {
      ...     r"(\w+)\.weight": Tensor("{0}/kernel", "out in -> in out"),
      ...     r"(\w+)\.bias": "{0}/bias",
      ... }
      >>> model = nnx.Dict(up=nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
      >>> folder = tempfile.mkdtemp()
      >>> save_safetensors(folder, model, rules)
      >>> other = nnx.eval_shape(lambda: nnx.Dict(up=nnx.Linear(4, 8, rngs=nnx.Rngs(0))))
      >>> _ = load_safetensors(folder, other, rules)
      >>> np.testing.assert_array_equal(other.up.kernel, model.up.kernel)
    """
    flat = flatten(model)
    all_arrays = names.named_arrays(flat)
    # A process that has all shards waits for no other process, and may load another model.
    is_alone = not any(names.is_global(array.leaf) for array in all_arrays)
    with Operation(_LOAD, os.fspath(path), alone=is_alone) as operation:
        arrays = selected_weights(_LOAD, all_arrays, only)
        patterns = read_rules(_LOAD, loaded_rules(rules))
        leaves = {array_path: array.leaf for array_path, array in arrays.items()}
        paths = {array.path for array in all_arrays}
        head = f"{_LOAD}: {os.fspath(path)} does not fit the model."  # the first line of an error
        with tensor_files.open_tensors(_LOAD, path) as tensors:
            # 1. Find the tensors that fill each array, from the headers alone, so that an error is
            # raised before anything is read.
            filled_by = fill_by_rules(head, patterns, tensors, leaves, paths, cast=cast)
            # 2. Check that all processes load the same. If another job replaces the files, some
            # processes may have opened the files of another model.
            operation.agree(
                path=lambda: str(as_folder(path)),
                arrays=lambda: names.digest(arrays.values()),
                files=lambda: tensor_files.digest(tensors),
            )
            # 3. Each process reads its own shards, without waiting for the others.
            values = _load_arrays(arrays, filled_by, tensors)
        # 4. The devices of all processes move arrays together. The processes meet before that,
        # because a program would wait forever for a process that has failed to read. A process may
        # still fail later, so the others use `wait_for`.
        operation.agree()
        shardings = [names.present_sharding(leaf) for leaf in leaves.values()]
        placed = operation.wait_for(lambda: place_arrays(values, shardings))
    # 5. The operation has ended on all processes without an error, so the model is changed.
    return names.filled(flat, zip(arrays.values(), placed, strict=True), _LOAD)


def _load_arrays(
    arrays: Mapping[str, NamedArray], filled_by: Filled, tensors: Tensors
) -> list[Array]:
    """Reads all arrays, and returns them in the order of ``arrays``.

    Args:
      filled_by: for each path the names of the tensors that fill it, and their placements.

    Raises:
      CheckpointError: numbers do not fit into the model's dtypes; all such arrays are listed.
    """
    values: list[Array] = []
    overflows = []
    # The indices of values that are still on the host, but have to be on a device. Many are moved
    # at once, because that is faster. Not all are, because values on the host take memory.
    pending: list[int] = []
    pending_bytes = 0
    leaves = [array.leaf for array in arrays.values()]
    with progress(_LOAD, len(arrays), quiet=_num_bytes(leaves) < _SHORT) as advance:
        for path, array in arrays.items():
            misfits: set[str] = set()  # the dtypes of tensors whose numbers do not fit
            parts = [(placement, tensors[name]) for placement, name in filled_by[path]]
            value = _load_array(array.leaf, parts, misfits)  # adds to `misfits`
            if isinstance(value, np.ndarray) and not isinstance(array.leaf, np.ndarray):
                pending.append(len(values))
                pending_bytes += value.nbytes
            values.append(value)
            if pending_bytes >= _CHUNK:
                _put_on_device(values, pending)
                pending, pending_bytes = [], 0
            if misfits:
                dtypes = " and ".join(sorted(misfits))
                overflows.append(f"  {path}: {dtypes} as {array.leaf.dtype}")
            advance(path)
        _put_on_device(values, pending)
    head = f"{_LOAD}: cast=True would wrap integers, or make numbers infinite or NaN, in these:"
    raise_if_any(CheckpointError, head, overflows, "Use a larger dtype in the model.")
    return values


def _num_bytes(arrays: Iterable[AnyArray]) -> int:
    """Returns the size of arrays in memory."""
    return sum(array_bytes(x.shape, x.dtype) for x in arrays)


def _put_on_device(values: list[Array], indices: Sequence[int]) -> None:
    """Puts the values at these indices on the default device, uncommitted.

    CPUs adopt the memory of the NumPy arrays.
    """
    # One call for many arrays takes a third of the time of a call for each.
    arrays = jax.device_put([values[i] for i in indices])
    for i, array in zip(indices, arrays, strict=True):
        values[i] = array


def selected_weights(
    caller: str, all_arrays: Sequence[NamedArray], only: Any
) -> dict[str, NamedArray]:
    """Returns the arrays that a filter selects, by path; all of them can be in safetensors files.

    Args:
      caller: the function that the user called, for messages.
      all_arrays: the arrays of the model.
      only: an NNX filter for the arrays to return.

    Raises:
      TypeError: a selected array has a dtype that these files do not support.
      ValueError: there are no arrays, none is selected, two have one path, or one has a sharding
        without devices.
    """

    def is_supported(leaf: object) -> bool:
        """Whether a leaf is an array of a dtype that files may have; a number is not."""
        return getattr(getattr(leaf, "dtype", None), "name", None) in NAMES

    # `selected` raises an error if an array is not supported, or none is selected.
    weights = names.selected(
        caller,
        all_arrays,
        only,
        is_supported,
        what="arrays of a dtype that safetensors supports",
        remedy="Leave them out by only=...",
    )
    arrays: dict[str, NamedArray] = {}
    clashing_paths: set[str] = set()
    for array in weights:
        if array.path in arrays:
            clashing_paths.add(array.path)
        else:
            arrays[array.path] = array
    head = f"{caller}: each of these paths is that of several arrays:"
    lines = [f"  {path}" for path in sorted(clashing_paths)]
    raise_if_any(ValueError, head, lines, "Rename a key that has a slash.")
    if not arrays:
        raise ValueError(f"{caller}: the model has no arrays.")
    meshes = [(path, getattr(sharding_of(x.leaf), "mesh", None)) for path, x in arrays.items()]
    wrong = [f"  {path}" for path, mesh in meshes if isinstance(mesh, AbstractMesh)]
    head = f"{caller}: the meshes of these arrays are abstract, without devices:"
    raise_if_any(ValueError, head, wrong)
    return arrays


def _load_array(leaf: Any, parts: Parts, misfits: set[str]) -> Array:
    """Reads the new array for a leaf of the model.

    Args:
      leaf: the array of the model, which may be abstract.
      misfits: a set to which the dtypes of tensors are added whose numbers do not fit into the
        dtype of the leaf.

    Returns:
      An array in the sharding of the leaf, or a NumPy array, if the leaf has no sharding or is
      uncommitted. Unreduced and reduced axes are left out of the sharding, because
      `load_safetensors` places the array with them in the end.
    """
    sharding = None if isinstance(leaf, np.ndarray) else names.present_sharding(leaf)
    if sharding is None:
        return _read_region(leaf, parts, tuple((0, size) for size in leaf.shape), misfits)

    @functools.cache  # several devices may hold the same shard
    def read(bounds: Bounds) -> np.ndarray[Any, Any]:
        return _read_region(leaf, parts, bounds, misfits)

    def read_shard(index: Any) -> np.ndarray[Any, Any]:  # the index is a tuple of slices
        return read(bounds_of(index, leaf.shape))

    sharding_to_read = without_reductions(sharding)
    array: jax.Array = jax.make_array_from_callback(leaf.shape, sharding_to_read, read_shard)
    # Without waiting, the bytes of the next array would be in memory at the same time.
    jax.block_until_ready(array)
    return array


def _read_region(
    leaf: Any, parts: Parts, bounds: Region, misfits: set[str]
) -> np.ndarray[Any, Any]:
    """Reads the values of a region of an array from all tensors that fill it.

    Args:
      leaf: the array of the model, whose dtype the result has.
      parts: the tensors that fill the array, each with its placement. Together they fill all of it,
        because `fill_by_rules` has raised an error otherwise.
      misfits: a set to which the dtypes of tensors are added whose numbers do not fit into the
        dtype of ``leaf``.
    """
    result = aligned([last - first for first, last in bounds], leaf.dtype)
    for placement, tensor in parts:
        # `target` is a view of the elements of `result` that the box fills, in the tensor's order.
        for box, target in _boxes_in_region(placement, bounds, result):
            # Bytes can be read to their final place if nothing is converted or transposed.
            may_read_in_place = target.dtype == tensor.dtype and target.flags.c_contiguous
            values = tensor_files.read_box(tensor, box, target if may_read_in_place else None)
            if np.may_share_memory(values, target):  # `read_box` has read into `target`
                continue
            values = values.reshape(target.shape)
            # NumPy's warnings are off, because the caller reports misfits of all tensors at once.
            with np.errstate(over="ignore", invalid="ignore"):
                target[...] = values
            if not _fits(values, target):
                misfits.add(str(tensor.dtype))
    return result


def _boxes_in_region(
    placement: Placement, bounds: Region, data: np.ndarray[Any, Any]
) -> Iterator[tuple[Box, np.ndarray[Any, Any]]]:
    """Yields boxes of a tensor, each with a view of the same elements in a region of an array.

    Args:
      placement: the place of the tensor in the array.
      data: the values of the region, which may still be unset.
    """
    # The region is split into chunks, so that converting or transposing takes little memory.
    for chunk_bounds, chunk in _chunks(data, bounds):
        for piece in placement.pieces(chunk_bounds):
            yield piece.box, piece.view(chunk)


def _fits(values: np.ndarray[Any, Any], converted: np.ndarray[Any, Any]) -> bool:
    """Whether converting numbers wrapped no integer and made nothing infinite or NaN.

    Both dtypes are integers, or both are floats, or both complex, because `names.is_castable`
    allows no other pairs.

    Args:
      values: the numbers in the dtype of the file.
      converted: the same numbers in the dtype of the model.
    """
    old, new = values.dtype, converted.dtype
    if not values.size or old == new:
        return True
    if jnp.issubdtype(new, jnp.integer):
        return not out_of_range(values, new)
    old_largest, new_largest = (float(limits.max) for limits in map(jnp.finfo, (old, new)))
    # Counting takes time, so it is left out if the range is about as large. That includes float32
    # as bfloat16, whose largest number is 0.4 % smaller.
    if old_largest <= 1.01 * new_largest:
        return True
    return int(np.isfinite(converted).sum()) == int(np.isfinite(values).sum())


def _chunks(
    data: np.ndarray[Any, Any], bounds: Region
) -> Iterator[tuple[Region, np.ndarray[Any, Any]]]:
    """Splits a region of an array along one dimension into chunks of about `_CHUNK` bytes.

    The chunks are larger if no dimension is long enough for so many chunks.

    Yields:
      The region of a chunk, in the array, and a view of its values.
    """
    num_chunks = -(-data.nbytes // _CHUNK)  # rounded up
    if num_chunks <= 1:
        yield bounds, data
        return
    # The first dimension that is long enough is split, because parts along it are contiguous in
    # most files.
    long_enough = [axis for axis, size in enumerate(data.shape) if size >= num_chunks]
    axis = long_enough[0] if long_enough else int(np.argmax(data.shape))
    begin, end = bounds[axis]
    step = -(-data.shape[axis] // num_chunks)
    for first in range(begin, end, step):
        last = min(first + step, end)
        chunk_bounds = (*bounds[:axis], (first, last), *bounds[axis + 1 :])
        outer_slices = [slice(None)] * axis  # the dimensions before this one are whole
        yield chunk_bounds, data[(*outer_slices, slice(first - begin, last - begin))]


@_compat.api_boundary
def save_safetensors(
    path: str | os.PathLike[str],
    model: Any,
    rules: Mapping[str, Rule] | str | os.PathLike[str],
    *,
    max_shard_size: int = 5 * 10**9,
    only: Any = WEIGHTS,
    overwrite: bool = False,
) -> None:
    """Writes a model to safetensors files, with the names and layouts that Hugging Face uses.

    All processes call it, with a path on a file system that they share. Each writes the bytes
    of its own shards. After an error in it, the old files are still there.

    Args:
      path: a folder, which is created. It gets ``model.safetensors``, or several files and
        ``model.safetensors.index.json``. It cannot be in a bucket (``gs://…``).
      model: what to save.
      rules: as for :func:`load_safetensors`. As names are made from them, patterns are names with
        groups in parentheses, and each group is in the path or the dimensions.
      max_shard_size: the bytes of tensors in one file, unless a single tensor has more.
      only: an NNX filter for what to save. The default is all but the state of random streams.
      overwrite: whether to replace these files, and those that the folder's old index names, once
        the new ones are complete; else they are an error. Other files are kept.

    Raises:
      CheckpointError: the folder has such files already, or they cannot be written.
      ValueError: arrays have no rule, no name can be made from one, tensors are not filled by their
        arrays, ``only`` selects nothing, or the path is in a bucket.

    Example:
      See :func:`load_safetensors`.
    """
    folder = as_folder(path)
    if is_in_bucket(folder):  # in a bucket, no file can be written in part, or exchanged
        raise ValueError(
            f"{_SAVE}: files cannot be written to {folder}. Save to a file system that all "
            "processes share, and upload the files."
        )
    with Operation(_SAVE, folder) as operation:
        # 1. All processes find the same tensors.
        arrays = selected_weights(_SAVE, names.named_arrays(flatten(model)), only)
        wrong = [f"  {p}" for p, x in arrays.items() if isinstance(x.leaf, jax.ShapeDtypeStruct)]
        raise_if_any(TypeError, f"{_SAVE}: these arrays are abstract:", wrong)
        tensors = _tensors_to_write(arrays, read_rules(_SAVE, loaded_rules(rules)))
        operation.agree(path=str(folder), arrays=lambda: names.digest(arrays.values()))
        # 2. The first process creates the files in a draft, a folder next to the existing files,
        # and tells the other processes its path.
        groups = _group_into_files(tensors, max_shard_size)
        release, draft_and_files = None, None
        if operation.is_first:
            release_context = new_release(Path(folder), len(groups), overwrite=overwrite)
            release = operation.enter(release_context)
            _create_files(release, groups, tensors)
            draft_and_files = [str(release.draft.folder), release.files]
        draft, files = operation.agree(draft_and_files)
        # 3. Each process writes its shards into them.
        is_short = _num_bytes(tensors.values()) < _SHORT
        with progress(_SAVE, len(tensors), quiet=is_short) as advance:
            for name, group in zip(files, groups, strict=True):
                _fill_file(Path(draft, name), {x: tensors[x] for x in group}, advance)
        # 4. Once all have written, the first process publishes the files.
        operation.agree()
        if release is not None:
            release.publish()


def _create_files(
    release: Release, groups: Sequence[Sequence[str]], tensors: Mapping[str, NewTensor]
) -> None:
    """Creates the files without values, and their index, unless there is only `MODEL_FILE`.

    Args:
      release: the names of the files, and the draft to write them into.
      groups: for each file, the names of its tensors.
    """
    located: dict[str, str] = {}  # the name of the file of each tensor
    for name, group in zip(release.files, groups, strict=True):
        tensor_files.create(release.draft.folder / name, {x: tensors[x] for x in group})
        located.update(dict.fromkeys(group, name))
    if release.files != [tensor_files.MODEL_FILE]:
        index = {"metadata": {"total_size": _num_bytes(tensors.values())}, "weight_map": located}
        (release.draft.folder / tensor_files.INDEX_FILE).write_text(json.dumps(index, indent=2))


def _fill_file(
    path: Path, tensors: Mapping[str, NewTensor], advance: Callable[[str], object]
) -> None:
    """Writes this process's values of the tensors of one file, and syncs the file.

    Args:
      path: the file, whose header says where each tensor begins.
      advance: a function that is called with each name, to show the progress.
    """
    with path.open("r+b", buffering=0) as file:
        stored = tensor_files.read_header(_SAVE, path, file)
        writer = tensor_files.Writer(file)  # collects many small writes
        for name, tensor in tensors.items():
            for placement, value in tensor.parts:
                _write(writer, stored[name], placement, value)
            advance(name)
        writer.flush()
        # The first process syncs the file before it publishes it, but that does not suffice in a
        # network file system, because only the machine that wrote bytes can bring them to the disk.
        os.fsync(file.fileno())


def _write(
    writer: tensor_files.Writer, tensor: StoredTensor, placement: Placement, value: Array
) -> None:
    """Writes the shards of an array that this process holds into a tensor.

    Args:
      placement: the place of the tensor in the array.
    """
    for region, data in _shards(value):
        for box, values in _boxes_in_region(placement, region, data):
            writer.add(tensor, box, values)
        # The writer keeps `data` until it flushes. For an array on an accelerator, `data` is a copy
        # on the host, so the writer is flushed to keep large copies of several shards from being in
        # memory at once.
        if data.nbytes >= _CHUNK:
            writer.flush()


class NewTensor(NamedTuple):
    """A tensor to write, and the arrays from which its values come."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: list[tuple[Placement, Array]]  # the arrays that fill it, with its place in each


def _tensors_to_write(arrays: Mapping[str, NamedArray], rules: Rules) -> dict[str, NewTensor]:
    """Returns the tensors to write, by name.

    ``arrays`` has the arrays to save, by path.

    Raises:
      ValueError: arrays have no rule, or no names can be made; all are listed.
      CheckpointError: arrays do not fill tensors, or do not fit; all are listed.
    """
    values: dict[str, Array] = {}
    for path, array in arrays.items():
        # The value of a `jax.Ref` is saved. A reference is read by an index.
        values[path] = array.leaf[...] if names.is_reference(array.leaf) else array.leaf
    tensors: dict[str, NewTensor] = {}
    unnamed = []
    for path, value in values.items():
        try:
            for placement in places_of_array(rules, path, value.shape):
                new = NewTensor(placement.tensor_shape, np.dtype(value.dtype), parts=[])
                tensors.setdefault(placement.name, new)
        except ValueError as error:
            unnamed.append(f"  {path}, shape {value.shape}: {error}")
    raise_if_any(ValueError, f"{_SAVE}: these arrays cannot be written as tensors:", unnamed)
    # `fill_by_rules` raises an error unless arrays fill each tensor completely, and no part of an
    # array is lost. Its result is used for writing, because files have zeros where nothing is
    # written.
    head = f"{_SAVE}: the arrays do not fit the tensors of the rules."
    filled_by = fill_by_rules(
        head,
        rules,
        tensors,
        arrays=values,
        everything=values.keys(),
        reverse=True,
        nouns=("array", "tensor"),
    )
    for name, pairs in filled_by.items():
        for array_in_tensor, path in pairs:
            tensors[name].parts.append((array_in_tensor.inverse(name), values[path]))
    return tensors


def _group_into_files(tensors: Mapping[str, NewTensor], max_shard_size: int) -> list[list[str]]:
    """Returns the names of the tensors in each file, in order.

    A file has at most ``max_shard_size`` bytes of tensors, or a single tensor.
    """
    groups: list[list[str]] = [[]]
    total = 0
    for name, tensor in tensors.items():
        size = array_bytes(tensor.shape, tensor.dtype)
        if groups[-1] and total + size > max_shard_size:
            groups.append([])  # a tensor is never split between files
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def _shards(value: Array) -> Iterator[tuple[Region, np.ndarray[Any, Any]]]:
    """Yields the regions of an array that this process writes, with their values.

    All processes together write each element once.
    """
    # If each process has the whole array, the first one writes it.
    if not names.is_global(value) and jax.process_index() != 0:
        return
    if not isinstance(value, jax.Array):
        yield [(0, size) for size in value.shape], np.asarray(value)
        return
    # Each device has a summand of an unreduced array. A file has the sum.
    summed = value
    # `without_reductions` returns the same object if nothing is unreduced or reduced.
    sharding = without_reductions(value.sharding)
    if sharding is not value.sharding:
        [summed] = place_arrays([value], [sharding])
    for shard in summed.addressable_shards:
        if shard.replica_id == 0:  # one copy of each shard is written
            yield bounds_of(shard.index, summed.shape), np.asarray(shard.data)
