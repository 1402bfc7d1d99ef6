"""An open checkpoint: its folder, the names, shapes and dtypes of its arrays, their values.

A checkpoint is a folder of Orbax for an ``nnx.state``. The *name* of an array is its path in that
state, as a tuple of strings. A Variable may be a dict in the state, with its array under the key
``value``; the *plain* name and the ``path`` leave this key out. The metadata of the checkpoint have
a *manifest*, under the name of this library, with the facts that Orbax does not keep: checksums,
the kinds of PRNG keys (Orbax stores their integers, the *words*), and arrays without elements. A
checkpoint that Orbax alone wrote has no manifest, and can be read as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding

from .._publishing import Identity, drafts, identity
from ..analysis.json_codec import file_path
from ..analysis.memory import array_bytes
from ..analysis.tables import Pictured, Table
from ..analysis.units import bytes_text
from ..core.memory import is_keys
from ..errors import CheckpointError, NoCheckpointError, raise_if_any
from ..specs.fitting import without_reductions
from ..specs.paths import path_key, path_string
from .agreement import Operation, first_line
from .checksums import checksums
from .names import VALUE, Name, NamedArray, digest_of

# A path here or in a bucket. ``epath`` has no type stubs.
FilePath: TypeAlias = Any

MODEL, DATA = "model", "data"  # the items of a step of `Checkpoints`
_VERSION = 1  # the version of the manifest
_MANIFEST = "nnx_sharding"  # the entry of this library in the metadata of a checkpoint

_NAMES_FILE = "_METADATA"  # Orbax's file with the names of arrays
# The files of a checkpoint. TensorStore first writes each under a name that ends in ``.__lock``.
_OF_ORBAX = re.compile(
    r"(_METADATA|_CHECKPOINT_METADATA|_sharding|commit_success\.txt|array_metadatas(/process_\d+)?|"
    r"ocdbt\.process_\d+|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d(/[0-9a-f]{32})?))(\.__lock)?"
)
# The names of the kinds of PRNG keys in ``jax.random``, by the names of their dtypes.
KEY_KINDS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
# The folders below a folder that may have its arrays: the folder itself, or an item of a step of
# `Checkpoints` or of Orbax. Orbax calls the only item of a step "default".
_BELOW = ("", MODEL, "default")
_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredArray:
    """One array, or number, of a checkpoint.

    Attributes:
      path: the path in the tree that was saved, such as ``up/kernel``.
      shape: the shape.
      dtype: the dtype, of NumPy or of PRNG keys.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        """The size of the array in memory."""
        return array_bytes(self.shape, self.dtype)


class Contents(tuple[StoredArray, ...], Pictured):
    """The arrays that :func:`contents` lists; ``print`` and notebooks show them as a table."""

    def _pictures(self, width: int) -> Iterable[Any]:
        rows = [(x.path, str(x.shape), str(x.dtype), bytes_text(x.nbytes)) for x in self]
        yield Table(("path", "shape", "dtype", "bytes"), rows, numbers=1)


def contents(path: str | os.PathLike[str]) -> Contents:
    """Lists the arrays of a checkpoint, without a model and without reading their values.

    Args:
      path: the directory of a checkpoint, or of one step of several.

    Returns:
      A row for each array, sorted by path, with ``path``, ``shape``, ``dtype`` and ``nbytes`` in
      memory. Numbers have the shape ``()``.

    Raises:
      NoCheckpointError: the checkpoint does not exist.
      CheckpointError: it cannot be read.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import contents, save
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> save(folder, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> for row in contents(folder):
      ...     print(row.path, row.shape, row.dtype)
      bias (3,) float32
      kernel (2, 3) float32
    """
    entries = opened("contents", item_folder("contents", path)).entries.values()
    return Contents(sorted((entry.array for entry in entries), key=lambda array: array.path))


class Entry(NamedTuple):
    """One array of a checkpoint before it is read, as Orbax's metadata and the manifest say."""

    array: StoredArray  # for PRNG keys, without the dimension of their words
    plain_name: Name  # the name without the key of the Variable's value
    position: int | None = None  # the index among Orbax's leaves; None without elements
    is_number: bool = False  # whether a Python number was saved
    checksum: int | None = None  # the checksum in the manifest; None if the manifest has none


class Stored(NamedTuple):
    """An open checkpoint: its folder, Orbax's metadata and its arrays by name."""

    folder: FilePath
    version: Identity  # the identity of the folder; another process may replace the folder
    tree: Any  # Orbax's tree of metadata; ``Entry.position`` counts its leaves
    entries: Mapping[Name, Entry]  # by the complete name of an array


def opened(caller: str, folder: FilePath) -> Stored:
    """Opens a checkpoint; raises a CheckpointError if it cannot be read."""
    with orbax_errors(_damaged(caller, folder)):
        version = version_of(folder)  # taken before anything is read, to notice a later change
        metadata = ocp.PyTreeCheckpointHandler().metadata(folder)
        return Stored(folder, version, metadata.tree, _entries(caller, folder, metadata))


def digest(stored: Stored) -> str:
    """Returns a short text that is the same for equal arrays, as far as there are checksums."""
    return digest_of(sorted((name, entry.checksum) for name, entry in stored.entries.items()))


@contextlib.contextmanager
def orbax_errors(head: str) -> Iterator[None]:
    """Within the block, turns all errors into a CheckpointError that begins with ``head``.

    Orbax and TensorStore raise errors of many kinds.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{head}: {first_line(error)}") from error


def _damaged(caller: str, folder: FilePath) -> str:
    """Returns the beginning of an error's message; a reason may follow."""
    return f"{caller}: {folder} is damaged, or it is not a checkpoint of a model"


def as_folder(path: str | os.PathLike[str]) -> FilePath:
    """Returns a path in Orbax's form: absolute with links resolved, or in a bucket."""
    text = os.fspath(path)
    # Links are resolved, so that a later step replaces the folder and not a link to it.
    return epath.Path(text if "://" in text else os.path.realpath(file_path(text)))


def is_in_bucket(path: FilePath) -> bool:
    """Whether a path is in a bucket, where nothing can be exchanged, locked or written in part."""
    return "://" in os.fspath(path)


def version_of(path: FilePath) -> Identity:
    """Returns the identity of a file or folder, which differs once it is replaced.

    Returns None if nothing is at the path, or if it is in a bucket.
    """
    return None if is_in_bucket(path) else identity(Path(path))


def is_checkpoint(folder: FilePath) -> bool:
    """Whether a folder itself is a checkpoint, not one of its subfolders."""
    return bool((folder / _NAMES_FILE).exists())


def check_replaceable(folder: FilePath, overwrite: bool) -> None:
    """Raises a FileExistsError if a folder exists and is not to be replaced.

    Without ``overwrite``, no folder is to be replaced. With it, only a folder with nothing but a
    checkpoint may be replaced, because all files in it are then deleted.
    """
    if not folder.exists():
        return
    reason = ""
    if is_in_bucket(folder):  # refused even with `overwrite`
        reason = "exists, and nothing can be replaced at once in a bucket; delete it first"
    elif not overwrite:
        reason = "exists; overwrite=True replaces it if it is a checkpoint"
    elif not is_checkpoint(folder):
        reason = "is not a checkpoint, so it is kept"
    else:
        foreign = [name[:100] for name in _foreign_entries(folder)]
        if foreign:
            listed = ", ".join(foreign[:5]) + (", …" if len(foreign) > 5 else "")
            reason = f"has files that are not of a checkpoint, so it is kept: {listed}"
    if reason:
        raise FileExistsError(f"save: {folder} {reason}.")


def _foreign_entries(folder: FilePath, prefix: str = "") -> Iterator[str]:
    """Yields the paths in a checkpoint, at any depth, that Orbax did not write.

    ``prefix`` is the path of ``folder`` in the checkpoint, such as ``"ocdbt.process_0/"``.
    """
    for path in sorted(folder.iterdir()):
        path_in_checkpoint = prefix + path.name
        # A link is foreign, because Orbax makes none. The folder that it names is not searched.
        if not is_of_orbax(path_in_checkpoint) or os.path.islink(path):
            yield path_in_checkpoint
        elif path.is_dir():
            yield from _foreign_entries(path, f"{path_in_checkpoint}/")


def is_of_orbax(path: str) -> bool:
    """Whether Orbax may have written a file or made a folder, by its path in a checkpoint."""
    return _OF_ORBAX.fullmatch(path) is not None


def item_folder(caller: str, path: str | os.PathLike[str]) -> FilePath:
    """Finds the folder with the arrays: the given one, or the item of a step in it.

    Args:
      caller: the function that the user called, for messages.
      path: the folder of a checkpoint, or of a step.

    Raises:
      NoCheckpointError: there is no such folder.
      CheckpointError: the folder has several steps, or no checkpoint, or an incomplete one.
    """
    folder = as_folder(path)
    if _UNFINISHED in folder.name:  # Orbax renames a folder once it is complete
        raise CheckpointError(f"{caller}: {folder} was not written completely.")
    if not folder.exists():
        # A checkpoint may have been begun, because Orbax and `save` write under another name first.
        has_begun = any(folder.parent.glob(f"{folder.name}*{_UNFINISHED}*"))
        if not has_begun and not is_in_bucket(folder):
            has_begun = bool(drafts(Path(folder)))
        hint = " One with this name was begun, but not written completely." if has_begun else ""
        raise NoCheckpointError(f"{caller}: no checkpoint found at {folder}.{hint}")
    for below in _BELOW:
        if is_checkpoint(folder / below):
            return folder / below
    steps = []  # the paths of the checkpoints in the folder
    for path_in_folder in folder.glob("*"):
        if any(is_checkpoint(path_in_folder / below) for below in _BELOW):
            steps.append(str(path_in_folder))
    if steps:
        paths = ", ".join(sorted(steps))
        raise CheckpointError(f"{caller}: expected one checkpoint, got a folder of some: {paths}.")
    raise CheckpointError(f"{_damaged(caller, folder)}: it has no file {_NAMES_FILE}.")


def manifest_of(arrays: Sequence[NamedArray], sums: Mapping[Name, int | None]) -> dict[str, Any]:
    """Returns the metadata of a checkpoint: a manifest of the facts that Orbax does not keep.

    ``sums`` has the checksums of the arrays that Orbax stores. All other arrays have no elements.
    """
    keys = [array for array in arrays if array.name in sums and is_keys(array.leaf)]
    empty = [array for array in arrays if array.name not in sums]
    manifest = {
        "version": _VERSION,
        # The first process writes its manifest. An array of which it holds no shard has None as its
        # checksum, and gets no entry.
        "checksums": {".".join(name): total for name, total in sums.items() if total is not None},
        "keys": {".".join(array.name): str(array.leaf.dtype) for array in keys},
        "empty": [
            [list(array.name), list(array.leaf.shape), str(array.leaf.dtype)] for array in empty
        ],
    }
    return {_MANIFEST: manifest}


def _entries(caller: str, folder: FilePath, metadata: Any) -> dict[Name, Entry]:
    """Describes the arrays of a checkpoint by name, before any is read.

    Arrays that Orbax stored come first, in the order of its tree. Arrays without elements, which
    only the manifest has, come last (`manifest_of` makes the manifest).

    Args:
      caller: the function that the user called, for messages.
      metadata: Orbax's description of the checkpoint, of a type that Orbax does not export.

    Raises:
      CheckpointError: the manifest has another version.
    """
    # A checkpoint that Orbax alone wrote has no manifest.
    manifest = (metadata.custom_metadata or {}).get(_MANIFEST, {})
    version = manifest.get("version", _VERSION)
    if version != _VERSION:
        raise CheckpointError(
            f"{caller}: {folder}: its manifest has version {version}; this release of nnx_sharding "
            f"reads {_VERSION}."
        )
    checksums_by_name, key_dtypes = manifest.get("checksums", {}), manifest.get("keys", {})
    # By name, an object with the shape and dtype of each array: a leaf of Orbax's own type in
    # `stored`, and a `StoredArray` in `empty`.
    leaves, _ = jax.tree_util.tree_flatten_with_path(metadata.tree)
    stored = {tuple(str(path_key(key)) for key in path): leaf for path, leaf in leaves}
    empty = {
        tuple(name): StoredArray("", tuple(shape), _dtype_of(dtype))  # the path is made below
        for name, shape, dtype in manifest.get("empty", ())
    }
    variables = _names_of_variables([*stored, *empty])
    entries = {}
    for position, (name, leaf) in enumerate((stored | empty).items()):
        # The manifest joins names by dots. That is safe because `names.check_unique` has refused
        # names that would be the same; Orbax joins names in the same way in its files.
        joined, shape, dtype = ".".join(name), tuple(leaf.shape), leaf.dtype
        if joined in key_dtypes:  # Orbax stores the words of keys, in one more dimension
            shape, dtype = shape[:-1], _dtype_of(key_dtypes[joined])
        plain_name = _without_value(name, variables)
        entries[name] = Entry(
            StoredArray(path_string(plain_name), shape, dtype),
            plain_name,
            position=position if name in stored else None,
            is_number=isinstance(leaf, ocp.metadata.ScalarMetadata),
            checksum=checksums_by_name.get(joined),
        )
    return entries


def _without_value(name: Name, variables: Collection[Name]) -> Name:
    """Returns the plain name of an array, without the key of the value of its Variable.

    ``variables`` has the names of the Variables. Other names are returned unchanged.
    """
    for level, key in enumerate(name):
        if key == VALUE and name[:level] in variables:
            return name[:level] + name[level + 1 :]
    return name


def _names_of_variables(names: Iterable[Name]) -> set[Name]:
    """Returns the names of dicts that look like Variables: their only key is that of a value."""
    keys_of: dict[Name, set[str]] = {}  # name of a dict → its keys
    for name in names:
        for level, key in enumerate(name):
            keys_of.setdefault(name[:level], set()).add(key)
    return {name for name, keys in keys_of.items() if keys == {VALUE}}


@functools.cache
def _dtype_of(text: str) -> Any:
    """Returns the dtype of arrays, or of PRNG keys, that a manifest names."""
    if text not in KEY_KINDS:
        return jax.numpy.dtype(text)
    return jax.eval_shape(functools.partial(jax.random.key, 0, impl=KEY_KINDS[text])).dtype


def key_words(keys: jax.Array | StoredArray) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the words of PRNG keys, which may be abstract."""
    abstract = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    words: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, abstract)
    return words


def load(
    stored: Stored, wanted: Mapping[Name, Sharding | None], operation: Operation
) -> dict[Name, Any]:
    """Reads arrays and compares their checksums.

    Args:
      stored: the checkpoint.
      wanted: the sharding for each array, by its name in the checkpoint. Each process reads its own
        shards. None reads the array to the host.
      operation: the processes that load together.

    Returns:
      The arrays, by name. PRNG keys are their words.

    Raises:
      CheckpointError: arrays cannot be read, their checksums differ, or another job has replaced
        the checkpoint.
    """
    arrays = _read(stored, wanted)
    # If the checkpoint was replaced, some arrays may be from the old one and some from the new one,
    # because Orbax opens files one after the other.
    if version_of(stored.folder) != stored.version:
        raise CheckpointError(
            f"restore: another job replaced {stored.folder} while it was read. Read it again."
        )
    to_compare: dict[Name, Any] = {}
    for name, array in arrays.items():
        entry = stored.entries[name]
        # With 64 bits disabled, JAX may shorten the numbers while it reads them, so their checksum
        # cannot be compared. Another dtype shows that, except for keys, because these are read as
        # words.
        has_own_dtype = isinstance(array, jax.Array) and not is_keys(entry.array)
        is_shortened = has_own_dtype and array.dtype != entry.array.dtype
        if entry.checksum is not None and not is_shortened:
            to_compare[name] = array
    operation.agree()  # all processes meet here, because their devices compute together next
    sums = operation.wait_for(lambda: checksums([*to_compare.values()]))
    wrong = []
    for name, total in zip(to_compare, sums, strict=True):
        entry = stored.entries[name]
        # None: this process holds no shard, and another process compares the checksum.
        if total is not None and total != entry.checksum:
            wrong.append(f"  {entry.array.path or 'the root'}")
    head = f"restore: {stored.folder} is damaged. These arrays are not what was written:"
    raise_if_any(CheckpointError, head, wrong)
    return arrays


def _read(stored: Stored, wanted: Mapping[Name, Sharding | None]) -> dict[Name, Any]:
    """Reads arrays as :func:`load` does, but compares no checksums.

    ``wanted`` has the sharding of each array by its name; None to read it to the host. Arrays
    without elements, which Orbax has not stored, are made here.
    """
    treedef: Any = jax.tree.structure(stored.tree)
    # The request to Orbax has a value and options for each of its leaves, in its order. Orbax skips
    # leaves whose value is a placeholder, and reads leaves with any other value.
    read_request: Any = 0
    requests: list[Any] = [ocp.PLACEHOLDER] * treedef.num_leaves
    options: list[Any] = [ocp.RestoreArgs()] * treedef.num_leaves  # the default is for numbers
    positions: dict[Name, int] = {}
    for name, sharding in wanted.items():
        entry = stored.entries[name]
        if entry.position is None:
            continue
        positions[name] = entry.position
        requests[entry.position] = read_request
        if entry.is_number:
            continue
        if sharding is None:
            options[entry.position] = ocp.RestoreArgs(restore_type=np.ndarray)
        else:  # without reductions, because Orbax has neither unreduced nor reduced arrays
            options[entry.position] = ocp.ArrayRestoreArgs(sharding=without_reductions(sharding))
    values: list[Any] = []
    if positions:  # Orbax refuses an empty request
        args = ocp.args.PyTreeRestore(treedef.unflatten(requests), treedef.unflatten(options))
        with orbax_errors(_damaged("restore", stored.folder)):
            restored = ocp.PyTreeCheckpointHandler().restore(stored.folder, args=args)
            values = treedef.flatten_up_to(restored)
    arrays: dict[Name, Any] = {}
    for name in wanted:
        array = stored.entries[name].array
        if name not in positions:  # the array has no elements, so Orbax has not stored it
            form = key_words(array) if is_keys(array) else array
            arrays[name] = np.zeros(form.shape, form.dtype)
        else:
            value = values[positions[name]]
            arrays[name] = jax.random.key_data(value) if is_keys(value) else value
    return arrays
