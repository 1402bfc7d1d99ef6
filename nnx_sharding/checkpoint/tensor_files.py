"""Files in the format of safetensors: their tensors, and the bytes of a region of one.

The ``safetensors`` library reads complete tensors for slices of their columns, and Orbax's layout
keeps the dimensions of tensors, which rules split, stack and transpose. So ranges are read here.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..core.place import out_of_range
from ..errors import CheckpointError, NoCheckpointError, raise_listed
from .stored import as_folder

INDEX_FILE, MODEL_FILE = "model.safetensors.index.json", "model.safetensors"
UNFINISHED = ".unfinished"  # the ending of files that are not complete

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

_limits: Any = jnp.finfo
_LARGE = 2**20  # bytes; the number of mappings that a process may have is limited

_Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

# A range of each dimension: where it begins and ends.
Region: TypeAlias = Sequence[tuple[int, int]]


class StoredTensor(NamedTuple):
    """One tensor of a file: where its bytes begin, its shape and dtype."""

    file: Any  # a path
    offset: int
    shape: tuple[int, ...]
    dtype: Any  # a NumPy dtype, or the name in the file if NumPy has none


def stored_tensors(caller: str, path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a file, or of the files in a folder, by name."""
    folder = as_folder(path)
    if not (folder / INDEX_FILE).is_file():
        if (folder / f".{INDEX_FILE}{UNFINISHED}").exists():
            raise CheckpointError(
                f"{caller}: {folder} was being replaced when the process was killed. All files are "
                f"complete: rename each .NAME{UNFINISHED} in it to NAME, {INDEX_FILE} as the last."
            )
        return _header(caller, folder / MODEL_FILE if folder.is_dir() else folder)
    try:
        located = dict(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"])
        if outside := [name for name in located.values() if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is not the name of a file beside it")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{caller}: {folder / INDEX_FILE} is damaged: {error!r}") from error
    inside = {name: _header(caller, folder / name) for name in sorted(set(located.values()))}
    raise_listed(
        CheckpointError,
        f"{caller}: these tensors are not in the file that {folder / INDEX_FILE} names:",
        [f"  {name}: {file}" for name, file in located.items() if name not in inside[file]],
    )
    return {name: inside[file][name] for name, file in located.items()}


def _header(caller: str, path: Any) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            end = path.stat().length
            if not 8 < start <= end:
                raise ValueError(f"a header of {start - 8} bytes in a file of {end}")
            return _tensors(path, json.loads(file.read(start - 8)), start, end)
    except OSError as error:
        raise NoCheckpointError(
            f"{caller}: cannot read {path}: {error.strerror or error}."
        ) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{caller}: {path} is damaged, or not a safetensors file: {error}."
        ) from error


def _tensors(path: Any, entries: Any, start: int, end: int) -> dict[str, StoredTensor]:
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


def create(path: Any, tensors: Mapping[str, Any]) -> None:
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


class Elements:
    """Elements of a tensor, as a box whose offsets are sums of one for each dimension."""

    def __init__(self, offsets: Sequence[_Ints]):
        orders = [_order(each) for each in offsets]
        runs = [_run(each[order]) for each, order in zip(offsets, orders, strict=True)]
        self.shape = tuple(map(len, offsets))
        # The dimension with the longest runs, which are put in their order.
        self._axis = axis = int(np.argmax(runs))
        self._run, self._inner = runs[axis], orders[axis]
        heads = [*offsets[:axis], offsets[axis][self._inner][:: self._run], *offsets[axis + 1 :]]
        starts = functools.reduce(np.add.outer, heads)
        self._heads = starts.shape
        self._outer = _order(starts.reshape(-1))
        found = starts.reshape(-1)[self._outer]
        firsts = np.append(0, np.flatnonzero(np.diff(found) != self._run) + 1)
        counts = np.diff(np.append(firsts, len(found))) * self._run
        self._blocks = list(zip(found[firsts].tolist(), counts.tolist(), strict=True))

    def read(self, file: BinaryIO, tensor: StoredTensor, target: np.ndarray[Any, Any]) -> bool:
        """Reads these elements, and no others; whether the dtype of the target can hold them."""
        is_sorted = isinstance(self._outer, slice) and isinstance(self._inner, slice)
        is_alike = target.flags.c_contiguous and target.dtype == tensor.dtype
        is_direct = is_sorted and is_alike and self._axis == len(self.shape) - 1
        data = target.reshape(-1) if is_direct else empty([math.prod(self.shape)], tensor.dtype)
        memory, size, done = data.view("u1").data, tensor.dtype.itemsize, 0
        for begin, count in self._blocks:
            file.seek(tensor.offset + begin * size)
            if _read_into(file, memory[done : done + count * size]) != count * size:
                raise CheckpointError(f"{tensor.file} became shorter while it was read.")
            done += count * size
        if is_direct:
            return True
        rows = _inverted(data.reshape(-1, self._run), self._outer, 0).reshape(*self._heads, -1)
        box = np.moveaxis(rows, -1, self._axis + 1).reshape(self.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            target[...] = _inverted(box, self._inner, self._axis).reshape(target.shape)
        return _fits(data, target)

    def write(self, file: BinaryIO, tensor: StoredTensor, box: np.ndarray[Any, Any]) -> None:
        """Writes these elements."""
        axis = self._axis
        box = _taken(box.reshape(self.shape), self._inner, axis)
        split = box.reshape(*self._heads[: axis + 1], self._run, *self._heads[axis + 1 :])
        rows = _taken(np.moveaxis(split, axis + 1, -1).reshape(-1, self._run), self._outer, 0)
        memory = np.ascontiguousarray(rows).reshape(-1).view("u1").data
        size, done = box.dtype.itemsize, 0
        for begin, count in self._blocks:
            file.seek(tensor.offset + begin * size)
            file.write(memory[done : done + count * size])
            done += count * size


def _read_into(file: Any, memory: Any) -> int:
    if hasattr(file, "readinto"):
        return int(file.readinto(memory))
    data = file.read(len(memory))  # the files of TensorFlow, which etils may use for buckets
    memory[: len(data)] = data
    return len(data)


def _fits(values: Any, converted: Any) -> bool:
    """Whether converting numbers wrapped no integer and made nothing infinite or NaN."""
    old, new = values.dtype, converted.dtype
    if not values.size or old == new:
        return True
    if jnp.issubdtype(new, jnp.integer):
        return not out_of_range(values, new)
    if float(_limits(old).max) <= 1.01 * float(_limits(new).max):  # float32 as bfloat16, too
        return True
    return int(np.isfinite(converted).sum()) == int(np.isfinite(values).sum())


def _order(offsets: _Ints) -> Any:
    """The indices that sort offsets; a slice if they are sorted."""
    return slice(None) if (np.diff(offsets) > 0).all() else np.argsort(offsets)


def _run(offsets: _Ints) -> int:
    """The greatest length into which all runs of successive offsets can be divided."""
    ends = np.flatnonzero(np.diff(offsets) != 1) + 1
    return int(np.gcd.reduce(np.append(ends, len(offsets))))


def _taken(data: Any, order: Any, axis: int) -> Any:
    return data if isinstance(order, slice) else data.take(order, axis)


def _inverted(data: Any, order: Any, axis: int) -> Any:
    return data if isinstance(order, slice) else data.take(np.argsort(order), axis)


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised array, in memory that returns to the system once it is unused.

    Repeated ``malloc`` would leave holes between the arrays that are kept.
    """
    size = math.prod(shape)
    if size * dtype.itemsize < _LARGE:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype, size).reshape(shape)
