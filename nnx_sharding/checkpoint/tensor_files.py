"""Files in the format of safetensors: their headers, and boxes of elements of their tensors.

A file has three parts: the length of a JSON header in eight bytes, the header, and the bytes of the
tensors one after the other, each in row-major order. A process reads and writes the part of a
tensor that its shards need: a box, which is a series of contiguous runs in the file.

The ``safetensors`` library is not used, for several reasons. Up to 0.8, it has no slices of float8
as NumPy arrays. It takes no paths in buckets, and writes a file from one process. It reads complete
tensors, or keeps mapped memory resident next to the arrays (a peak of 2.00 × the loaded bytes; this
module has 1.00 ×).
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

from .._publishing import drafts
from ..analysis.json_codec import unique_json
from ..analysis.memory import array_bytes
from ..errors import CheckpointError, NoCheckpointError, raise_if_any, shortened
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

# Above this many bytes, memory is mapped. Less memory is not, because the number of mappings of a
# process is limited.
_LARGE = 2**20

# Below this many bytes, a read of its own costs more than reading the gap to the next one as well.
_SHORT = 256

# The number of bytes that are collected before they are written.
_AT_ONCE = 2**24

# The range of each dimension: its first index, and the index after the last one.
Region: TypeAlias = Sequence[tuple[int, int]]


class StoredTensor(NamedTuple):
    """One tensor of an open file."""

    file: BinaryIO  # the open file, which `open_tensors` closes
    offset: int  # the position in the file of the tensor's first byte
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | str  # a string, the name in the file, if NumPy has no such dtype


# The tensors of a file, or of all files of a folder, by name.
Tensors: TypeAlias = dict[str, StoredTensor]


@contextlib.contextmanager
def open_tensors(caller: str, path: str | os.PathLike[str]) -> Iterator[Tensors]:
    """Opens a file, or the files in a folder, and yields their tensors by name.

    Another job may replace the files. Open files keep their content. If the index has changed while
    the files were opened, they are opened again.

    Raises:
      NoCheckpointError: a file does not exist or cannot be read.
      CheckpointError: a file is damaged, or other jobs keep replacing the files.
    """
    folder = as_folder(path)
    if not is_in_bucket(folder):
        folder = Path(folder)  # `epath` takes up to ten times as long for each operation
    index = folder / INDEX_FILE
    for _ in range(3):
        version = version_of(index)
        with contextlib.ExitStack() as files:  # closes the files
            try:
                tensors = _open_indexed(caller, folder, files)
            except NoCheckpointError:
                # If the index has changed, another job may have deleted the old files before they
                # were opened. A damaged file raises another error in any case.
                if version == version_of(index):
                    raise
                continue
            if version == version_of(index):
                yield tensors
                return
    raise CheckpointError(f"{caller}: {folder} is being replaced by other jobs. Load it again.")


def digest(tensors: Tensors) -> str:
    """Returns a short text that differs between the files of a model and files that replace them.

    If there are several files, their names differ. If there is a single file, its numbers differ:
    the first numbers of the largest tensor are read, because they are hardly ever constant.
    """
    locations = []
    for name, x in sorted(tensors.items()):
        path = getattr(x.file, "name", "")  # files in buckets may have no name
        locations.append((name, os.path.basename(path), x.offset))
    numbers = b""
    if tensors:
        largest = max(tensors.values(), key=lambda x: math.prod(x.shape))
        largest.file.seek(largest.offset)
        numbers = largest.file.read(_SHORT)
    return digest_of((locations, numbers))


def _open_indexed(caller: str, folder: FilePath, files: contextlib.ExitStack) -> Tensors:
    """Opens the single file, or the files that the index of a folder names.

    ``files`` closes them. The tensors of all files are returned together.

    Raises:
      NoCheckpointError: a file cannot be read.
      CheckpointError: a file or the index is damaged, or a file lacks tensors of the index.
    """
    if not (folder / INDEX_FILE).is_file():
        return _open_file(caller, folder / MODEL_FILE if folder.is_dir() else folder, files)
    try:
        located = read_index(folder)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{caller}: {folder / INDEX_FILE} is damaged: {error!r}") from error
    file_names = sorted({*located.values()})
    by_file = {name: _open_file(caller, folder / name, files) for name in file_names}
    missing = [f"  {name}: {file}" for name, file in located.items() if name not in by_file[file]]
    head = f"{caller}: these tensors are not in the file that {folder / INDEX_FILE} names:"
    raise_if_any(CheckpointError, head, missing)
    return {name: by_file[file][name] for name, file in located.items()}


def read_index(folder: FilePath) -> dict[str, str]:
    """Returns the name of the file of each tensor.

    Raises:
      ValueError, KeyError, TypeError, RecursionError: the index has no data of this form.
    """
    located = unique_json((folder / INDEX_FILE).read_bytes())["weight_map"]
    if type(located) is not dict:
        raise TypeError(f"weight_map is a {type(located).__name__}")
    for name in located.values():
        # Only names of files are accepted, because a path could lead out of the folder.
        if type(name) is not str or Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file beside it")
    return located


def _open_file(caller: str, path: FilePath, files: contextlib.ExitStack) -> Tensors:
    """Opens a file, which stays open until ``files`` is closed, and reads its header.

    Raises:
      NoCheckpointError: the file cannot be read.
      CheckpointError: the file is damaged.
    """
    try:
        if is_in_bucket(path):
            opened = files.enter_context(path.open("rb"))
        else:
            # There is no buffer, because it would read 8 KiB each time that few bytes are needed.
            opened = files.enter_context(Path(path).open("rb", buffering=0))  # noqa: SIM115
        return read_header(caller, path, opened)
    except OSError as error:
        raise NoCheckpointError(
            f"{caller}: cannot read {path}: {error.strerror or error}.{_hint_at_files(path)}"
        ) from error


def _hint_at_files(path: FilePath) -> str:
    """Returns a text about the folder of a file that cannot be read; empty if nothing is known."""
    if is_in_bucket(path) or not path.parent.is_dir():
        return ""
    # A killed `save_safetensors` leaves its draft, whatever names its files should have got. The
    # draft explains more than a list of the files in the folder.
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
    """Reads the header of a file. All of it is checked, because anyone may have written the file.

    Raises:
      CheckpointError: the file is damaged, or it is not a safetensors file.
    """
    try:
        length_bytes = file.read(8)  # a shorter file gives fewer bytes, and is refused below
        if length_bytes == b"version ":
            raise ValueError("it is a pointer of Git LFS, so the file itself has to be downloaded")
        start = 8 + int.from_bytes(length_bytes, "little")
        end = file.seek(0, os.SEEK_END)
        # The length is checked before memory is allocated for the header.
        if not 8 < start <= end:
            raise ValueError(f"a header of {start - 8} bytes in a file of {end}")
        file.seek(8)
        return _checked_tensors(file, unique_json(file.read(start - 8)), start, end)
    # A header that is JSON of another form, such as a list, raises the first three of these.
    except (AttributeError, KeyError, TypeError, RecursionError, ValueError) as error:
        raise CheckpointError(
            f"{caller}: {path} is damaged, or not a safetensors file: {error}."
        ) from error


def _checked_tensors(file: BinaryIO, entries: Mapping[str, Any], start: int, end: int) -> Tensors:
    """Returns the tensors of a file, whose bytes have to follow each other without gaps.

    An entry of another form than ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}``
    raises any error of wrong JSON data. `read_header` catches and reports these errors.

    Args:
      start: the position of the first tensor's first byte in the file.
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
        # A dtype that NumPy does not have stays a text, because only using the tensor is an error.
        # The number of its bytes is not known, so it is not checked.
        dtype = jnp.dtype(DTYPES[code]) if code in DTYPES else code
        if isinstance(dtype, np.dtype) and last - first != array_bytes(shape, dtype):
            raise ValueError(f"{name} has bytes {first} to {last} of {end - start}")
        ranges.append((first, last, name))
        tensors[name] = StoredTensor(file, start + first, shape, dtype)
    begin = 0
    # There may be no bytes between tensors, because something could be hidden there.
    for first, last, name in sorted(ranges):
        if first != begin:
            raise ValueError(f"{name} begins at byte {first}, not at {begin}")
        begin = last
    if begin != end - start:
        raise ValueError(f"{end - start} bytes of tensors, not {begin}")
    return tensors


def create(path: FilePath, tensors: Mapping[str, AnyArray]) -> None:
    """Writes a file with the shapes and dtypes of its tensors, but not their values."""
    # The metadata say that names and layouts are PyTorch's, because Transformers reads no other
    # files.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in tensors.items():
        dtype = jnp.dtype(x.dtype)
        begin, end = end, end + array_bytes(x.shape, dtype)
        header[name] = {"dtype": NAMES[dtype.name], "shape": x.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # the full size, so that all processes can write parts


class Box(NamedTuple):
    """A box of elements of a tensor, whose dimensions may be split into several axes each."""

    sizes: tuple[int, ...]  # the sizes of all axes, in the order of the tensor
    ranges: Region  # the elements along each axis

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements along each axis."""
        return tuple(last - first for first, last in self.ranges)

    def check(self) -> None:
        """Raises a CheckpointError if the box is not in the tensor.

        Elements outside of it would be bytes of another tensor.
        """
        for (first, last), size in zip(self.ranges, self.sizes, strict=True):
            if not 0 <= first <= last <= size:
                raise CheckpointError(f"{first}:{last} is outside of an axis of size {size}.")

    def runs(self) -> tuple[int, list[int]]:
        """Returns the length of the box's contiguous runs, and where they begin, in elements.

        The first 2 columns of a (3, 4) tensor have runs of length 2, which begin at 0, 4 and 8.
        """
        shape = self.shape
        if shape == self.sizes:  # the whole tensor is one run
            return math.prod(shape), [0]
        # A run has the trailing axes that the box has completely, and the box's part of the axis
        # before these. `num_outer` becomes the number of axes before that axis.
        num_outer, run_length = len(self.sizes), 1
        while num_outer:
            num_outer -= 1
            run_length *= shape[num_outer]
            if shape[num_outer] != self.sizes[num_outer]:
                break
        strides = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        pairs = list(zip(self.ranges, strides, strict=True))
        # There is a run for each combination of indices of the outer axes. The other axes shift
        # all runs by the same number of elements.
        shift = sum(first * stride for (first, _), stride in pairs[num_outer:])
        offsets = [np.arange(first, last) * stride for (first, last), stride in pairs[:num_outer]]
        begins = functools.reduce(np.add.outer, offsets, np.array(shift))  # (outer axes…)
        return run_length, begins.reshape(-1).tolist()

    def widened(self, least: int) -> Box:
        """Returns a box around this one whose runs have at least so many elements, if possible.

        The last axes are made complete, one after the other, until the runs are long enough.
        """
        ranges = list(self.ranges)
        for axis in reversed(range(len(ranges))):
            run_length, _ = Box(self.sizes, ranges).runs()
            if run_length >= least:
                break
            ranges[axis] = (0, self.sizes[axis])
        return Box(self.sizes, ranges)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns the place of this box in a box around it."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple(slice(first - start, last - start) for (first, last), (start, _) in pairs)


def read_box(
    tensor: StoredTensor, box: Box, out: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Reads a box of a tensor, in the dtype of the tensor and the shape of the box.

    The values are read into ``out``, which has this dtype and is contiguous, unless the box is
    widened for the read. The caller has to use the result.

    Raises:
      CheckpointError: the box is not in the tensor, or the file ends before it.
    """
    assert isinstance(tensor.dtype, np.dtype)  # callers have refused tensors of other dtypes
    box.check()
    file, itemsize = tensor.file, tensor.dtype.itemsize
    # If runs are shorter than `_SHORT` bytes, the gaps between them are read as well.
    least_elements = -(-_SHORT // itemsize)  # rounded up
    wide_box = box.widened(least_elements)  # as large as `box` if runs are long enough
    if out is not None and wide_box.shape == box.shape:
        data = out.reshape(box.shape)
    else:
        data = _scratch(wide_box.shape, tensor.dtype)
    memory, num_read = data.reshape(-1).view("u1").data, 0  # in bytes
    run_length, begins = wide_box.runs()  # in elements
    for begin in begins:
        file.seek(tensor.offset + begin * itemsize)
        end = num_read + run_length * itemsize
        while num_read < end:  # a read may return fewer bytes than asked for
            count = _read_into(file, memory[num_read:end])
            if count == 0:  # the end of the file
                raise CheckpointError(f"{file.name} became shorter while it was read.")
            num_read += count
    return data[box.within(wide_box)]


class Writer:
    """Writes boxes of the tensors of one file, many at once.

    A large write empties the processor's caches of all code and data, so the work after it takes
    several times as long. So boxes are prepared one after the other, and then written together.

    ``_file`` is the file. ``_runs`` has the runs of bytes that `flush` will write, and ``_size`` is
    the number of bytes in them.
    """

    def __init__(self, file: BinaryIO):
        """Takes a file that was opened without a buffer."""
        self._file, self._size = file, 0
        self._runs: list[tuple[int, memoryview]] = []  # (position in the file, bytes)

    def add(self, tensor: StoredTensor, box: Box, values: np.ndarray[Any, Any]) -> None:
        """Adds a box of a tensor; writes all boxes if they have many bytes.

        The values have the shape of the box and the tensor's dtype, with bytes in any order.

        Raises:
          CheckpointError: the box is not in the tensor.
        """
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
        """Writes all boxes that were added, and frees their memory."""
        for begin, memory in self._runs:
            self._file.seek(begin)
            while memory:  # a write may be shorter than asked for, for example on a full disk
                memory = memory[self._file.write(memory) :]
        self._runs, self._size = [], 0


def _read_into(file: BinaryIO, memory: memoryview) -> int:
    """Reads bytes until the memory is full, or fewer.

    Returns:
      The number of bytes; 0 at the end of the file.
    """
    if hasattr(file, "readinto"):
        return int(file.readinto(memory) or 0)
    # Files of TensorFlow, which etils may use for buckets, have no `readinto`.
    data = file.read(len(memory))
    memory[: len(data)] = data
    return len(data)


def _scratch(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an uninitialised array, in memory that returns to the system once it is unused.

    Large arrays are mapped, because repeated ``malloc`` would leave holes between arrays that are
    kept.
    """
    size = math.prod(shape)
    # This includes arrays without elements, because a mapping cannot be empty.
    if size * dtype.itemsize < _LARGE:
        return np.empty(shape, dtype)
    # If the system can, it maps all pages at once, because one after the other takes 1.5 times as
    # long.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    # The array keeps the mapping alive, so the mapping ends with the array.
    return np.frombuffer(memory, dtype, size).reshape(shape)
