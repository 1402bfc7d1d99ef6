"""New safetensors files of a model in a folder that has other files, too: all of them or none.

A folder holds one model: what ``model.safetensors.index.json`` names or, without one,
``model.safetensors``. So one rename publishes any number of files: that of the index, or of the
single file. The others get names that are free, before, and the old ones are deleted, after.

What a killed process has left is told by hard links: its draft (see ``core/publishing.py``) has one
of each file that it adds, and of each that it replaces. Of these, the folder keeps those of the
model that is there now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ..core.publishing import Draft, Identity, check_unchanged, exchange, identity, sync
from ..errors import CheckpointError
from .tensor_files import INDEX_FILE, MODEL_FILE, read_header, read_index

_CALLER = "save_safetensors"


@dataclasses.dataclass
class Release:
    """Files of a new model, which are written to a draft and then published in a folder."""

    folder: Path
    draft: Draft
    files: list[str]
    was: dict[str, Identity]  # of the index and the single file, one of which publishing replaces

    def publish(self) -> None:
        """Publishes the files, and deletes those of the old model that no longer belong there."""
        folder, local = self.folder, self.draft.folder
        for name in self.files:
            with (local / name).open("rb") as file:
                read_header(_CALLER, local / name, file)
        old = _model_files(folder)
        new = self.files if self.files == [MODEL_FILE] else [*self.files, INDEX_FILE]
        *shards, last = new  # the last one makes them a model
        for name in new:
            sync(local / name)
        for name, version in self.was.items():
            check_unchanged(folder / name, version)
        for name in shards:
            _link(local / name, folder / name)
        for name in old.difference(new):
            with contextlib.suppress(OSError):  # without links, what is left is not swept
                _link(folder / name, local / name)
        if shards:  # an index must not be on the disk before the files that it names
            sync(local, deep=False)  # by which they are swept if there will be no index
            sync(folder, deep=False)
        exchange(local / last, folder / last)
        sync(folder, deep=False)
        if last == MODEL_FILE:  # until now, readers found the old index first
            (folder / INDEX_FILE).unlink(missing_ok=True)
        for name in old.difference(new):
            (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def new_release(folder: Path, count: int, *, overwrite: bool) -> Iterator[Release]:
    """Begins a release of so many files; at the end, what was not published is deleted."""
    with Draft(
        folder / MODEL_FILE,
        is_ours=lambda name: name == INDEX_FILE or name.endswith(".safetensors"),
        sweep=lambda draft: _sweep(folder, draft),
    ) as draft:
        was = {name: identity(folder / name) for name in (INDEX_FILE, MODEL_FILE)}
        yield Release(folder, draft, _free_names(folder, count, overwrite=overwrite), was)


def _free_names(folder: Path, count: int, *, overwrite: bool) -> list[str]:
    """Returns names for files; those of several are new, so the old index names none of them."""
    names = [MODEL_FILE]
    if count > 1:
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    taken = [name for name in names if (folder / name).exists()]
    present = _model_files(folder).union(taken)
    if present and not overwrite:
        listed = ", ".join(sorted(present))
        raise CheckpointError(f"{_CALLER}: {folder} has {listed}; overwrite=True replaces it.")
    if taken and count > 1:
        version = secrets.token_hex(4)  # readers of the old index find the old files
        names = [name.replace("model-", f"model-{version}-", 1) for name in names]
    return names


def _model_files(folder: Path) -> set[str]:
    """Finds the files of the model in a folder: the single one, or the index and what it names."""
    names = {name for name in (MODEL_FILE, INDEX_FILE) if (folder / name).exists()}
    if INDEX_FILE in names:
        # Of what is no index, nothing else is known to be of the model.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            names.update(read_index(folder).values())
    return {name for name in names if (folder / name).is_file()}


def _sweep(folder: Path, draft: Path) -> None:
    """Deletes the files that a draft has, too, and that are not of the model in the folder."""
    if not draft.is_dir():
        return
    current = _model_files(folder)
    if INDEX_FILE in current:
        current.discard(MODEL_FILE)  # readers take the index first
    for name in os.listdir(draft):
        in_folder = folder / name
        if name not in current and in_folder.exists() and in_folder.samefile(draft / name):
            in_folder.unlink()


def _link(old: Path, new: Path) -> None:
    """Gives a file a second name, or a new one in file systems without hard links."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:
        if new.exists():
            raise
        old.rename(new)
