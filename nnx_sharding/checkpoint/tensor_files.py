"""Files in the format of safetensors: their headers, and boxes of elements of their tensors.

A file is the length of a JSON header in eight bytes, the header, and the bytes of the tensors one
after the other, each in row-major order. A process reads and writes the part of a tensor that its
shards need: a box, which is a series of contiguous runs in the file.

The ``safetensors`` library is not used: it has no slices of float8 as NumPy arrays up to 0.8, takes
no paths in buckets, writes a file from one process, and keeps what it maps resident next to the
arrays (a peak of 2.00 × what is loaded; here 1.00 ×) or reads complete tensors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..analysis.json_codec import unique_json
from ..analysis.memory import array_bytes
from ..core.publishing import drafts
from ..errors import CheckpointError, NoCheckpointError, raise_listed, shortened
from ..specs.types import AnyArray
from .names import digest_of
from .stored import FilePath, as_folder, is_in_bucket, version_of

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

# Above this many bytes, memory is mapped; the number of mappings of a process is limited.
_LARGE = 2**20

# Below this many bytes, a read costs more than reading what is between it and the next one.
_SHORT = 256

# As many bytes are collected before they are written.
_AT_ONCE = 2**24

# A range of each dimension: where it begins and ends.
Region: TypeAlias = Sequence[tuple[int, int]]


class StoredTensor(NamedTuple):
    """One tensor of an open file: where its bytes begin, its shape and dtype."""

    file: BinaryIO
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | str  # a string, the name in the file, if NumPy has no such dtype


# The tensors of a file, or of all files of a folder, by name.
Tensors: TypeAlias = dict[str, StoredTensor]


@contextlib.contextmanager
def open_tensors(caller: str, path: str | os.PathLike[str]) -> Iterator[Tensors]:
    """Opens a file, or the files in a folder, and yields their tensors by name.

    Another job may replace the files. Those that are open stay what they are, and if the index has
    become another one while they were opened, they are opened again.
    """
    folder = as_folder(path)
    if not is_in_bucket(folder):
        folder = Path(folder)  # `epath` takes up to ten times as long for each operation
    index = folder / INDEX_FILE
    for _ in range(3):
        version = version_of(index)  # also if there is none
        with contextlib.ExitStack() as files:  # which closes them
            try:
                tensors = _open_indexed(caller, folder, files)
            except NoCheckpointError:
                # If the index is another one now, the old files may have been deleted before they
                # were opened. A damaged file is an error in any case.
                if version == version_of(index):
                    raise
                continue
            if version == version_of(index):
                yield tensors  # and then close the files
                return
    raise CheckpointError(f"{caller}: {folder} is being replaced by other jobs. Load it again.")


def digest(tensors: Tensors) -> str:
    """Returns a short text that tells the files of one model from those that replace them.

    Files of several have other names then. Of a single one, the numbers differ: the first of the
    largest tensor are read, which are hardly ever constant.
    """
    places = []
    for name, x in sorted(tensors.items()):
        path = getattr(x.file, "name", "")  # files in buckets may have none
        places.append((name, os.path.basename(path), x.offset))
    numbers = b""
    if tensors:
        largest = max(tensors.values(), key=lambda x: math.prod(x.shape))
        largest.file.seek(largest.offset)
        numbers = largest.file.read(_SHORT)
    return digest_of((places, numbers))


def _open_indexed(caller: str, folder: FilePath, files: contextlib.ExitStack) -> Tensors:
    """Opens the single file, or those that the index of a folder names."""
    if not (folder / INDEX_FILE).is_file():
        return _open_file(caller, folder / MODEL_FILE if folder.is_dir() else folder, files)
    try:
        located = read_index(folder)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{caller}: {folder / INDEX_FILE} is damaged: {error!r}") from error
    names = sorted({*located.values()})
    inside = {name: _open_file(caller, folder / name, files) for name in names}
    missing = [f"  {name}: {file}" for name, file in located.items() if name not in inside[file]]
    head = f"{caller}: these tensors are not in the file that {folder / INDEX_FILE} names:"
    raise_listed(CheckpointError, head, missing)
    return {name: inside[file][name] for name, file in located.items()}


def read_index(folder: FilePath) -> dict[str, str]:
    """Returns the name of the file of each tensor; the errors are those of wrong JSON data."""
    located = unique_json((folder / INDEX_FILE).read_bytes())["weight_map"]
    if type(located) is not dict:
        raise TypeError(f"weight_map is a {type(located).__name__}")
    # Names only: a path could lead out of the folder.
    if outside := [x for x in located.values() if type(x) is not str or Path(x).name != x]:
        raise ValueError(f"{outside[0]!r} is not the name of a file beside it")
    return located


def _open_file(caller: str, path: FilePath, files: contextlib.ExitStack) -> Tensors:
    """Opens a file, which stays open until ``files`` is closed, and reads its header."""
    try:
        # A buffer would read eight KiB (8192 bytes) each time that few bytes are needed.
        opened = files.enter_context(
            path.open("rb") if is_in_bucket(path) else Path(path).open("rb", buffering=0)  # noqa: SIM115
        )
        return read_header(caller, path, opened)
    except OSError as error:
        raise NoCheckpointError(
            f"{caller}: cannot read {path}: {error.strerror or error}.{_hint_at_files(path)}"
        ) from error


def _hint_at_files(path: FilePath) -> str:
    """Says what is in the folder of a file that cannot be read; empty if that is not known."""
    if is_in_bucket(path) or not path.parent.is_dir():
        return ""
    # A killed `save_safetensors` leaves its draft, whichever names its files were to have. That
    # explains more than a list of the files that are there.
    if drafts(Path(path.parent, MODEL_FILE)):
        return " Files were begun there, but not written completely."
    present = sorted(os.listdir(path.parent))
    hint = f" The folder has {', '.join(shortened(present)) or 'no files'}."
    if path.name == MODEL_FILE and any(name.endswith(".safetensors") for name in present):
        hint += (
            f" Of several files, {INDEX_FILE} has to say which has which tensor; if one "
            "has all, pass its path."
        )
    return hint


def read_header(caller: str, path: FilePath, file: BinaryIO) -> Tensors:
    """Reads the header of a file, which may be of anyone: nothing in it is believed unchecked."""
    try:
        first = file.read(8)  # fewer bytes if the file is shorter, which is refused below
        if first == b"version ":
            raise ValueError("it is a pointer of Git LFS, so the file itself has to be downloaded")
        start = 8 + int.from_bytes(first, "little")
        end = file.seek(0, os.SEEK_END)
        if not 8 < start <= end:  # before memory is allocated for it
            raise ValueError(f"a header of {start - 8} bytes in a file of {end}")
        file.seek(8)
        return _checked_tensors(file, unique_json(file.read(start - 8)), start, end)
    # The first of these also come from a header that is JSON, but of another form, such as a list.
    except (AttributeError, KeyError, TypeError, RecursionError, ValueError) as error:
        raise CheckpointError(
            f"{caller}: {path} is damaged, or not a safetensors file: {error}."
        ) from error


def _checked_tensors(file: BinaryIO, entries: Mapping[str, Any], start: int, end: int) -> Tensors:
    """Returns the tensors of a file, whose bytes have to follow each other without gaps.

    An entry of another form than ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}``
    raises any error of wrong JSON data, which `read_header` reports.

    Args:
      file: the file, for the tensors.
      entries: the header.
      start: where the bytes of the first tensor begin in the file.
      end: where the file ends.
    """
    tensors: Tensors = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise ValueError(f"{name} has the shape {shape} and bytes {first} to {last}")
        if type(code) is not str:
            raise ValueError(f"{name} has the dtype {code!r}")
        # A dtype that NumPy does not have stays a text: only using the tensor is an error. How many
        # bytes it needs is not known.
        dtype = jnp.dtype(DTYPES[code]) if code in DTYPES else code
        if isinstance(dtype, np.dtype) and last - first != array_bytes(shape, dtype):
            raise ValueError(f"{name} has bytes {first} to {last} of {end - start}")
        ranges.append((first, last, name))
        tensors[name] = StoredTensor(file, start + first, shape, dtype)
    begin = 0
    for first, last, name in sorted(ranges):  # nothing may hide between tensors
        if first != begin:
            raise ValueError(f"{name} begins at byte {first}, not at {begin}")
        begin = last
    if begin != end - start:
        raise ValueError(f"{end - start} bytes of tensors, not {begin}")
    return tensors


def create(path: FilePath, tensors: Mapping[str, AnyArray]) -> None:
    """Writes a file with the shapes and dtypes of its tensors, but not their values."""
    # Transformers only reads files whose metadata says that names and layouts are PyTorch's.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in tensors.items():
        dtype = jnp.dtype(x.dtype)
        begin, end = end, end + array_bytes(x.shape, dtype)
        header[name] = {"dtype": NAMES[dtype.name], "shape": x.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # which all processes can fill


class Box(NamedTuple):
    """A box of elements of a tensor, whose dimensions may be split into several axes each."""

    sizes: tuple[int, ...]  # of all axes, in the order of the tensor
    ranges: Region  # the elements along each axis

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis."""
        return tuple(last - first for first, last in self.ranges)

    def check(self) -> None:
        """Raises an error if the tensor does not have all of it: its bytes are of another one."""
        for (first, last), size in zip(self.ranges, self.sizes, strict=True):
            if not 0 <= first <= last <= size:
                raise CheckpointError(f"{first}:{last} is outside of an axis of size {size}.")

    def runs(self) -> tuple[int, list[int]]:
        """Returns the length of its contiguous runs, and where they begin, both in elements.

        Of the first 2 columns in (3, 4), the length is 2, and they begin at 0, 4 and 8.
        """
        shape = self.shape
        if shape == self.sizes:  # the whole tensor is one run
            return math.prod(shape), [0]
        # A run has all of the trailing axes that the box has completely, and the part that it has
        # of the axis before them. `num_outer` becomes the number of axes before that one.
        num_outer, run_length = len(self.sizes), 1
        while num_outer:
            num_outer -= 1
            run_length *= shape[num_outer]
            if shape[num_outer] != self.sizes[num_outer]:
                break
        strides = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        pairs = list(zip(self.ranges, strides, strict=True))
        # There is a run for each combination of indices of the outer axes; the other axes shift it.
        shift = sum(first * stride for (first, _), stride in pairs[num_outer:])
        offsets = [np.arange(first, last) * stride for (first, last), stride in pairs[:num_outer]]
        begins = functools.reduce(np.add.outer, offsets, np.array(shift))  # (outer axes…)
        return run_length, begins.reshape(-1).tolist()

    def widened(self, least: int) -> Box:
        """Returns a box around this one whose runs have at least so many elements, if possible.

        Its last axes are taken completely, one after the other, until the runs are long enough.
        """
        ranges = list(self.ranges)
        for axis in reversed(range(len(ranges))):
            run_length, _ = Box(self.sizes, ranges).runs()
            if run_length >= least:
                break
            ranges[axis] = (0, self.sizes[axis])
        return Box(self.sizes, ranges)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns where this box is in one around it."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple(slice(first - start, last - start) for (first, last), (start, _) in pairs)


def read_box(
    tensor: StoredTensor, box: Box, out: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Reads a box of a tensor, in the dtype of the tensor and the shape of the box.

    If possible, the values are read into ``out``, which has this dtype and is contiguous.
    """
    assert isinstance(tensor.dtype, np.dtype)  # others were refused
    box.check()
    file, itemsize = tensor.file, tensor.dtype.itemsize
    # Runs of less than `_SHORT` bytes are read with what is between them.
    least_elements = -(-_SHORT // itemsize)  # rounded up
    wide = box.widened(least_elements)
    if out is not None and wide.shape == box.shape:
        data = out.reshape(box.shape)
    else:
        data = _scratch(wide.shape, tensor.dtype)
    memory, done = data.reshape(-1).view("u1").data, 0  # in bytes
    run_length, begins = wide.runs()  # in elements
    for begin in begins:
        file.seek(tensor.offset + begin * itemsize)
        end = done + run_length * itemsize
        while done < end:  # a read may return less than it should
            if not (count := _read_into(file, memory[done:end])):
                raise CheckpointError(f"{file.name} became shorter while it was read.")
            done += count
    return data[box.within(wide)]


class Writer:
    """Writes boxes of the tensors of one file, many at once.

    After a large write, the processor's caches have lost all code and data, and what is done next
    takes several times as long. So this work is done for many boxes before any is written.
    """

    def __init__(self, file: BinaryIO):
        """Writes to a file that was opened without a buffer."""
        self._file, self._size = file, 0
        self._runs: list[tuple[int, memoryview]] = []  # where each begins in the file

    def add(self, tensor: StoredTensor, box: Box, values: np.ndarray[Any, Any]) -> None:
        """Adds a box of a tensor: values in its shape and dtype, with bytes in any order."""
        box.check()
        values = values.astype(tensor.dtype, copy=False)
        itemsize = values.dtype.itemsize
        memory = np.ascontiguousarray(values).reshape(-1).view("u1").data  # the bytes
        run_length, begins = box.runs()  # in elements
        run_bytes = run_length * itemsize
        for i, begin in enumerate(begins):
            part = memory[i * run_bytes : (i + 1) * run_bytes]
            self._runs.append((tensor.offset + begin * itemsize, part))
        self._size += len(memory)
        if self._size >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Writes what was added, which frees its memory."""
        for begin, memory in self._runs:
            self._file.seek(begin)
            while memory:  # a write may be shorter than it should, as on a full disk
                memory = memory[self._file.write(memory) :]
        self._runs, self._size = [], 0


def _read_into(file: BinaryIO, memory: memoryview) -> int:
    """Reads up to as many bytes as the memory has; the number of them, 0 at the end of the file."""
    if hasattr(file, "readinto"):
        return int(file.readinto(memory) or 0)
    data = file.read(len(memory))  # the files of TensorFlow, which etils may use for buckets
    memory[: len(data)] = data
    return len(data)


def _scratch(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an uninitialised array, in memory that returns to the system once it is unused.

    Repeated ``malloc`` would leave holes between the arrays that are kept.
    """
    size = math.prod(shape)
    if size * dtype.itemsize < _LARGE:  # also without elements, of which there is no mapping
        return np.empty(shape, dtype)
    # All pages at once, where the system can: one after the other takes 1.5 times as long.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    # The array keeps the mapping, which ends with it.
    return np.frombuffer(memory, dtype, size).reshape(shape)
