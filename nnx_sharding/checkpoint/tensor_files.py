"""Files in the format of safetensors: their tensors, and the bytes of a region of one.

The ``safetensors`` library reads a complete tensor for a slice of its columns, and has no NumPy
dtype for float8. Orbax's layout makes one array of each tensor, with its dimensions, and holds the
shards of a file in host memory; rules split, stack and transpose tensors. So the ranges are read
here. The format is a length of 8 bytes, a JSON header of that length, and the tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..errors import CheckpointError, NoCheckpointError, raise_listed

INDEX_FILE, MODEL_FILE = "model.safetensors.index.json", "model.safetensors"

DTYPES = {
    "BOOL": "bool",
    **{f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("I", "int"), ("U", "uint"))
       for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
NAMES = {name: code for code, name in DTYPES.items()}

_LARGE = 2**20  # bytes; the number of mappings that a process may have is limited

# A range of each dimension: where it begins and ends.
Region: TypeAlias = Sequence[tuple[int, int]]


class StoredTensor(NamedTuple):
    """One tensor of a file: where its bytes begin, its shape and dtype."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: Any  # a NumPy dtype, or the name in the file if NumPy has none


def stored_tensors(caller: str, path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a file, or of the files in a folder, by name.

    Raises:
      NoCheckpointError: the file does not exist.
      CheckpointError: a file is damaged, or lacks a tensor that the index of the folder names.
    """
    path = Path(path)
    if not (path / INDEX_FILE).is_file():
        return _header(caller, path / MODEL_FILE if path.is_dir() else path)
    try:
        located = dict(json.loads((path / INDEX_FILE).read_bytes())["weight_map"])
        if outside := [name for name in located.values() if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is not the name of a file beside it")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{caller}: {path / INDEX_FILE} is damaged: {error!r}") from error
    inside = {name: _header(caller, path / name) for name in sorted(set(located.values()))}
    raise_listed(
        CheckpointError,
        f"{caller}: these tensors are not in the file that {path / INDEX_FILE} names:",
        [f"  {name}: {file}" for name, file in located.items() if name not in inside[file]],
    )
    return {name: inside[file][name] for name, file in located.items()}


def _header(caller: str, path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            end = os.fstat(file.fileno()).st_size
            if not 8 < start <= end:
                raise ValueError(f"a header of {start - 8} bytes in a file of {end}")
            return _tensors(path, json.loads(file.read(start - 8)), start, end)
    except OSError as error:
        raise NoCheckpointError(f"{caller}: cannot read {path}: {error.strerror}.") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{caller}: {path} is damaged, or not a safetensors file: {error}."
        ) from error


def _tensors(path: Path, entries: Any, start: int, end: int) -> dict[str, StoredTensor]:
    """The tensors of a file, whose bytes have to follow each other without gaps."""
    tensors, ranges = {}, []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise ValueError(f"{name} has the shape {shape} and bytes {first} to {last}")
        dtype = jnp.dtype(DTYPES[code]) if code in DTYPES else code
        size = math.prod(shape) * getattr(dtype, "itemsize", 0)
        if code in DTYPES and last - first != size:
            raise ValueError(f"{name} has bytes {first} to {last} of {end - start}")
        ranges.append((first, last, name))
        tensors[name] = StoredTensor(path, start + first, shape, dtype)
    begin = 0
    for first, last, name in sorted(ranges):
        if first != begin:
            raise ValueError(f"{name} begins at byte {first}, not at {begin}")
        begin = last
    if begin != end - start:
        raise ValueError(f"{end - start} bytes of tensors, not {begin}")
    return tensors


def create(path: Path, tensors: Mapping[str, Any]) -> None:
    """Writes a file with the shapes and dtypes of its tensors, but not their values."""
    # Transformers only reads files whose metadata says that names and layouts are PyTorch's.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in tensors.items():
        begin, end = end, end + math.prod(x.shape) * x.dtype.itemsize
        entry = {"dtype": NAMES[x.dtype.name], "shape": x.shape, "data_offsets": (begin, end)}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def read_region(
    file: BinaryIO, tensor: StoredTensor, shape: Sequence[int], region: Region
) -> np.ndarray[Any, Any]:
    """Reads the bytes of a region of a tensor, viewed in this shape, and no others."""
    run, starts = _runs(shape, region)
    size = tensor.dtype.itemsize
    data = empty([last - first for first, last in region], tensor.dtype)
    if not data.size:
        return data
    for row, start in zip(data.reshape(-1).view("u1").reshape(-1, run * size), starts, strict=True):
        file.seek(tensor.offset + start * size)
        if file.readinto(row.data) != run * size:  # type: ignore[attr-defined]
            raise CheckpointError(f"{tensor.file} became shorter while it was read.")
    return data


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised array, in memory that returns to the system once it is unused.

    Repeated ``malloc`` would leave holes between the arrays that are kept.
    """
    size = math.prod(shape)
    if size * dtype.itemsize < _LARGE:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype, size).reshape(shape)


def write_region(
    file: BinaryIO,
    tensor: StoredTensor,
    shape: Sequence[int],
    region: Region,
    data: np.ndarray[Any, Any],
) -> None:
    """Writes a region of a tensor, viewed in this shape."""
    run, starts = _runs(shape, region)
    if not data.size:
        return
    rows = np.ascontiguousarray(data).reshape(-1).view("u1").reshape(-1, run * data.itemsize)
    for row, start in zip(rows, starts, strict=True):
        file.seek(tensor.offset + start * data.itemsize)
        file.write(row.data)


def _runs(shape: Sequence[int], region: Region) -> tuple[int, Iterator[int]]:
    """The number of elements in each contiguous run of a region, and where the runs begin."""
    lengths = [last - first for first, last in region]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(first * stride for (first, _), stride in zip(region, strides, strict=True))
    partial = [i for i, size in enumerate(shape) if lengths[i] != size]
    outer = partial[-1] if partial else 0
    starts = (
        base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        for index in np.ndindex(*lengths[:outer])
    )
    return math.prod(lengths[outer:]), starts
