"""What a checkpoint holds: names, shapes and dtypes, and the arrays themselves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..analysis.memory import array_bytes
from ..core.structure import PyTreeDef
from ..errors import CheckpointError, NoCheckpointError
from ..fitting import unsummed
from ..paths import path_key, path_string
from .checksums import checksums, is_key
from .library import as_folder, beside, orbax
from .named import VALUE, Name

# Where Orbax keeps the names, and what a `CheckpointManager` calls the only item of a step.
_NAMES_FILE, _ITEM = "_METADATA", "default"
_UNFINISHED = ".orbax-checkpoint-tmp"

# Our own part of a checkpoint's metadata.
MANIFEST = "nnx_sharding"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredArray:
    """One array, or number, of a checkpoint.

    Attributes:
      path: the way to it in the tree that was saved, such as ``up/kernel``.
      shape: its shape.
      dtype: its dtype, a NumPy one or that of PRNG keys.
      nbytes: its size as it was in memory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int


def contents(path: str | os.PathLike[str]) -> tuple[StoredArray, ...]:
    """Lists what a checkpoint holds, without its model and without reading an array.

    Args:
      path: the directory of a checkpoint, or of one step of several.

    Returns:
      One row for each array, sorted by path.

    Raises:
      NoCheckpointError: there is none.
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
    stored = read("contents", path)
    rows = [
        StoredArray(stored.shown(name), own.shape, own.dtype, own.nbytes)
        for name, own in stored.arrays.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.path))


class Entry(NamedTuple):
    """What is known of one array before it is read.

    Attributes:
      shape: its shape; of PRNG keys, without the words of each.
      dtype: its dtype.
      nbytes: its size in memory.
      position: its number among Orbax's leaves; None if it is empty, which Orbax does not store.
      is_number: whether it was a Python number.
      checksum: of its content, if it is known.
    """

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    position: int | None
    is_number: bool
    checksum: int | None


class Stored(NamedTuple):
    """A checkpoint that was opened.

    Attributes:
      folder: where it is.
      tree: Orbax's metadata.
      arrays: what it holds by name.
      variables: the names of what looks like Variables: all that is in them is a value.
    """

    folder: Any
    tree: Any
    arrays: Mapping[Name, Entry]
    variables: frozenset[Name]

    def shown(self, name: Name) -> str:
        """A name as a path of the model."""
        levels = (at for at, key in enumerate(name) if key == VALUE and name[:at] in self.variables)
        at = next(levels, len(name))
        return path_string(name[:at] + name[at + 1 :])


def read(what: str, path: str | os.PathLike[str]) -> Stored:
    """Opens a checkpoint; ``what`` is the name of the caller in messages.

    Raises:
      NoCheckpointError: there is none.
      CheckpointError: it cannot be read.
    """
    ocp = orbax()

    folder = _item_folder(what, as_folder(path))
    try:
        found = ocp.PyTreeCheckpointHandler().metadata(folder)
        arrays = dict(_entries(found))
    except Exception as error:
        raise CheckpointError(f"{what}: {damaged(folder)}: {first_line(error)}") from error
    return Stored(folder, found.tree, arrays, _variables(arrays))


def _variables(names: Iterable[Name]) -> frozenset[Name]:
    inside: dict[Name, set[str]] = {}
    for name in names:
        for at, key in enumerate(name):
            inside.setdefault(name[:at], set()).add(key)
    return frozenset(name for name, keys in inside.items() if keys == {VALUE})


def holds_checkpoint(folder: Any) -> bool:
    """Whether a folder looks like a checkpoint, finished and whole or not."""
    return any((folder / below / _NAMES_FILE).exists() for below in ("", _ITEM))


def damaged(folder: Any) -> str:
    """What is said of a checkpoint that cannot be read."""
    return f"{folder} is damaged, or it is no checkpoint of a model"


def first_line(error: BaseException) -> str:
    """The kind of an error and the beginning of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _item_folder(what: str, folder: Any) -> Any:
    """The folder with the arrays: the one that is named, or the item of a step in it."""
    if _UNFINISHED in folder.name:
        raise CheckpointError(f"{what}: {folder} was not written to its end.")
    if not folder.exists():
        near = [f for f in _children(folder.parent) if f.name.startswith(folder.name + ".")]
        unfinished = any(_UNFINISHED in f.name for f in near)
        hint = " One with this name was begun, but not written to its end." if unfinished else ""
        old = beside(folder, "old")  # a process died while it put a new one in its place
        hint += f" The one that was to be replaced is {old}." if old.exists() else ""
        raise NoCheckpointError(f"{what}: there is no checkpoint {folder}.{hint}")
    for below in (folder, folder / _ITEM):
        if (below / _NAMES_FILE).exists():
            return below
    inside = sorted(child.name for child in _children(folder) if holds_checkpoint(child))
    hint = f" There are checkpoints in it: {', '.join(inside)}. Name one." if inside else ""
    raise CheckpointError(f"{what}: {damaged(folder)}: it has no file {_NAMES_FILE}.{hint}")


def _children(folder: Any) -> list[Any]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # it may be deleted meanwhile
        return []


def _entries(found: Any) -> Iterator[tuple[Name, Entry]]:
    manifest = (found.custom_metadata or {}).get(MANIFEST, {})
    sums, keys = manifest.get("checksums", {}), manifest.get("keys", {})
    leaves, _ = jax.tree_util.tree_flatten_with_path(found.tree)
    for position, (path, leaf) in enumerate(leaves):
        name = tuple(str(path_key(key)) for key in path)
        joined, is_number = ".".join(name), type(leaf).__name__ == "ScalarMetadata"
        shape, dtype = tuple(leaf.shape), leaf.dtype
        nbytes = array_bytes(shape, dtype)
        if joined in keys:
            shape, dtype = shape[:-1], key_dtype(keys[joined])
        yield name, Entry(shape, dtype, nbytes, position, is_number, sums.get(joined))
    for name, shape, dtype in manifest.get("empty", ()):
        kind = key_dtype(dtype) if dtype.startswith("key<") else jax.numpy.dtype(dtype)
        yield tuple(name), Entry(tuple(shape), kind, 0, None, False, None)


_KEY_KINDS = ("threefry2x32", "rbg", "unsafe_rbg")


def key_dtype(name: str) -> Any:
    """The dtype of PRNG keys with this name, such as ``key<fry>``."""
    found = next((dtype for dtype in map(_dtype_of, _KEY_KINDS) if str(dtype) == name), None)
    if found is None:
        raise ValueError(f"there is no kind of PRNG keys {name}")
    return found


def key_kind(dtype: Any) -> str:
    """What ``jax.random`` calls the kind of PRNG keys with this dtype."""
    return next(kind for kind in _KEY_KINDS if _dtype_of(kind) == dtype)


def _dtype_of(kind: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=kind)).dtype


def load(what: str, stored: Stored, wanted: Mapping[Name, Any]) -> dict[Name, Any]:
    """Reads arrays, each process its own parts of them, and compares their checksums.

    Args:
      what: the name of the caller in messages.
      stored: the checkpoint.
      wanted: names, with the sharding of each array; None for one of NumPy.

    Returns:
      The arrays by name; those of PRNG keys as words.

    Raises:
      CheckpointError: something of it cannot be read, or is not what was written.
    """
    ocp = orbax()

    leaves, found = jax.tree_util.tree_flatten(stored.tree)
    treedef: PyTreeDef = found
    items: list[Any] = [ocp.PLACEHOLDER] * len(leaves)
    options: list[Any] = [ocp.RestoreArgs()] * len(leaves)
    for name, sharding in wanted.items():
        entry = stored.arrays[name]
        if entry.position is not None:
            items[entry.position] = 0
            options[entry.position] = _how(entry, sharding)
    result: list[Any] = []
    if any(item == 0 for item in items):
        request = ocp.args.PyTreeRestore(treedef.unflatten(items), treedef.unflatten(options))
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                result = treedef.flatten_up_to(checkpointer.restore(stored.folder, args=request))
        except Exception as error:
            raise CheckpointError(
                f"{what}: {damaged(stored.folder)}: {first_line(error)}"
            ) from error
    arrays = {
        name: _empty(entry) if entry.position is None else _words(result[entry.position])
        for name, entry in ((name, stored.arrays[name]) for name in wanted)
    }
    _compare(what, stored, arrays)
    return arrays


def _how(entry: Entry, sharding: Any) -> Any:
    ocp = orbax()

    if entry.is_number:
        return ocp.RestoreArgs()
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=unsummed(sharding))


def _empty(entry: Entry) -> Any:
    if not isinstance(entry.dtype, np.dtype):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(entry.shape, entry.dtype))
        return np.zeros(words.shape, words.dtype)
    return np.zeros(entry.shape, entry.dtype)


def _words(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x


def _compare(what: str, stored: Stored, arrays: Mapping[Name, Any]) -> None:
    """Compares arrays with the checksums that were written with them."""
    entries = {name: stored.arrays[name] for name in arrays}
    # With 64 bits switched off JAX shortens what it reads; that is told elsewhere.
    known = [
        name
        for name, entry in entries.items()
        if entry.checksum is not None
        and (not isinstance(arrays[name], jax.Array) or _same_type(arrays[name], entry))
    ]
    sums = checksums([arrays[name] for name in known])
    wrong = [
        f"  {stored.shown(name)}"
        for name, found in zip(known, sums, strict=True)
        if found is not None and found != entries[name].checksum
    ]
    if wrong:
        raise CheckpointError(
            f"{what}: {stored.folder} is damaged. These arrays are not what was written:\n"
            + "\n".join(wrong)
        )


def _same_type(array: Any, entry: Entry) -> bool:
    return not isinstance(entry.dtype, np.dtype) or bool(array.dtype == entry.dtype)
