"""``save_safetensors``: models to files like those of Hugging Face."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from .. import _compat
from ..core.flatten import flatten
from ..core.transfer import transfer
from ..diagnostics.progress import progress
from ..errors import CheckpointError, raise_listed
from ..specs.fitting import unsummed
from .name_rules import Rule, Rules, names_of_array, read_rules
from .names import NamedArray, is_reference
from .safetensors import WEIGHTS, select
from .tensor_files import (
    INDEX_FILE,
    MODEL_FILE,
    Region,
    StoredTensor,
    create,
    stored_tensors,
    write_region,
)
from .tensor_rules import Placement

_NAME = "save_safetensors"


@_compat.api_boundary
def save_safetensors(
    path: str | os.PathLike[str],
    model: Any,
    rules: Mapping[str, Rule],
    *,
    max_shard_size: int = 5 * 10**9,
    only: Any = WEIGHTS,
    overwrite: bool = False,
) -> None:
    """Writes a model to safetensors files, with the names and layouts that Hugging Face uses.

    All processes call it, with a path on a file system that they share. Each writes the bytes
    of its own shards.

    Args:
      path: a folder, which is created. It gets ``model.safetensors``, or several files and
        ``model.safetensors.index.json``.
      model: what to save.
      rules: as for :func:`load_safetensors`. As names are made from them, patterns are names with
        groups in parentheses, and each group is in the path or the dimensions.
      max_shard_size: the bytes of tensors in one file, unless a single tensor has more.
      only: an NNX filter for what to save. The default is all but the state of random streams.
      overwrite: whether to replace these files, and those that the folder's old index names, once
        the new ones are complete; else they are an error. Other files are kept.

    Raises:
      CheckpointError: the folder has such files already, or they cannot be written.
      TypeError: what ``only`` selects is not only arrays with values.
      ValueError: arrays have no rule, no name can be made from one, tensors are not filled by their
        arrays, or ``only`` selects nothing.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import save_safetensors
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> save_safetensors(tempfile.mkdtemp(), model, {"w": "kernel", "b": "bias"})
    """
    _, selected = select(_NAME, flatten(model), only)
    wrong = [f"  {p}" for p, x in selected.items() if isinstance(x.leaf, jax.ShapeDtypeStruct)]
    raise_listed(TypeError, f"{_NAME}: these arrays are abstract:", wrong)
    tensors = _tensors(selected, read_rules(_NAME, rules))
    folder, files = Path(path), _split(tensors, max_shard_size)
    stored: dict[str, StoredTensor] = {}

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found = _model_files(folder) | {name for name in files if (folder / name).exists()}
        if found and not overwrite:
            listed = ", ".join(sorted(found))
            raise CheckpointError(f"{_NAME}: {folder} has {listed}; overwrite=True replaces it.")
        for name, names in files.items():
            create(_unfinished(folder, name), {n: tensors[n] for n in names})
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
                "weight_map": {tensor: name for name, names in files.items() for tensor in names},
            }
            _unfinished(folder, INDEX_FILE).write_text(json.dumps(index, indent=2))

    def write() -> None:
        for name, names in files.items():
            file = _unfinished(folder, name)
            stored.update((n, t) for n, t in stored_tensors(_NAME, file).items())
            with file.open("r+b") as opened:
                for tensor in names:
                    _write(opened, stored[tensor], tensors[tensor].parts)
                    advance(tensor)

    def finish() -> None:
        old, new = _model_files(folder), [*files, *[INDEX_FILE] * (len(files) > 1)]
        if not old.isdisjoint(files):
            # Killed now, the folder has no index: better than one of old and of new tensors.
            (folder / INDEX_FILE).unlink(missing_ok=True)
        for name in new:
            _unfinished(folder, name).replace(folder / name)
        for name in old.difference(new):
            (folder / name).unlink(missing_ok=True)

    is_first = jax.process_index() == 0
    with progress(_NAME, len(tensors)) as advance:
        for step, takes_part in ((begin, is_first), (write, True), (finish, is_first)):
            _together(folder, step if takes_part else lambda: None)


class NewTensor(NamedTuple):
    """A tensor to write, and its parts."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: list[tuple[Placement, Any]]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def _tensors(selected: Mapping[str, NamedArray], rules: Rules) -> dict[str, NewTensor]:
    """The tensors to write, by name."""
    tensors: dict[str, NewTensor] = {}
    unnamed, differing = [], []
    for path, array in selected.items():
        value = array.leaf[...] if is_reference(array.leaf) else array.leaf
        try:
            placements = names_of_array(rules, path, value.shape)
        except ValueError as error:
            unnamed.append(f"  {path}, shape {value.shape}: {error}")
            continue
        for placement in placements:
            new = NewTensor(placement.tensor_shape, np.dtype(value.dtype), [])
            old = tensors.setdefault(placement.name, new)
            old.parts.append((placement, value))
            if old[:2] != new[:2]:
                here, there = (f"{x.dtype}{list(x.shape)}" for x in (new, old))
                differing.append(f"  {placement.name}: {here} by {path}, {there} by another array")
    raise_listed(ValueError, f"{_NAME}: these arrays cannot be written as tensors:", unnamed)
    raise_listed(ValueError, f"{_NAME}: arrays disagree about these tensors:", differing)
    raise_listed(
        ValueError,
        f"{_NAME}: the arrays of these tensors do not fill them exactly once:",
        [
            f"  {name}, shape {tensor.shape}"
            for name, tensor in tensors.items()
            if math.prod(tensor.shape)
            != sum(math.prod(axis.length for axis in p.axes.values()) for p, _ in tensor.parts)
        ],
    )
    return tensors


def _split(tensors: Mapping[str, NewTensor], max_shard_size: int) -> dict[str, list[str]]:
    """The names of the tensors in each file."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, tensor in tensors.items():
        if groups[-1] and total + tensor.nbytes > max_shard_size:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += tensor.nbytes
    if len(groups) == 1:
        return {MODEL_FILE: groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": g for i, g in enumerate(groups, 1)}


def _model_files(folder: Path) -> set[str]:
    """The files of the model in a folder: the single one, or the index and those that it names."""
    names = {name for name in (MODEL_FILE, INDEX_FILE) if (folder / name).exists()}
    if INDEX_FILE in names:
        try:
            listed = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError):
            return names  # not an index: nothing else is known to be of the model
        # A name with a folder in it is not one of ours.
        names.update(x for x in listed if type(x) is str and Path(x).name == x)
    return {name for name in names if (folder / name).is_file()}


def _unfinished(folder: Path, name: str) -> Path:
    return folder / f".{name}.unfinished"


def _write(file: BinaryIO, tensor: StoredTensor, parts: Iterable[tuple[Placement, Any]]) -> None:
    """Writes the parts of a tensor that this process holds."""
    for placement, value in parts:
        for bounds, data in _shards(value):
            for piece in placement.pieces(bounds):
                moved = zip(piece.array, bounds, strict=True)
                box = np.asarray(data)[tuple(slice(s.start - a, s.stop - a) for s, (a, _) in moved)]
                region = piece.tensor
                arranged = placement.to_tensor(box, region)
                write_region(file, tensor, placement.tensor_axes, region, arranged)


def _shards(value: Any) -> Iterable[tuple[Region, Any]]:
    """The regions of an array that this process writes, with their values."""
    is_global = isinstance(value, jax.Array) and not value.is_fully_addressable
    if not is_global and jax.process_index() != 0:
        return
    if not isinstance(value, jax.Array):
        yield [(0, size) for size in value.shape], value
        return
    value = transfer([value], [unsummed(value.sharding)])[0]
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            bounds = zip(shard.index, value.shape, strict=True)
            yield [index.indices(size)[:2] for index, size in bounds], shard.data


def _together(folder: Path, step: Callable[[], None]) -> None:
    """Runs a step on all processes, which all fail if one does."""
    error: Exception | None = None
    try:
        step()
    except OSError as caught:
        error = CheckpointError(f"{_NAME}: cannot write {folder}: {caught}.")
        error.__cause__ = caught
    except Exception as caught:
        error = caught
    failed = np.array([error is not None])
    if jax.process_count() > 1:
        failed = np.asarray(multihost_utils.process_allgather(failed)).reshape(-1)
    if error is not None:
        raise error
    if failed.any():
        process = int(np.argmax(failed))
        raise CheckpointError(f"{_NAME}: process {process} failed; its error says why.")
