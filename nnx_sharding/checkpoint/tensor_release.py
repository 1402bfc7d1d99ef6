"""New safetensors files of a model in a folder that has other files, too: all of them or none.

A folder holds one model: what ``model.safetensors.index.json`` names or, without one,
``model.safetensors``. So one rename publishes any number of files: that of the index, or of the
single file. The others get names that are free, before, and the old ones are deleted, after.

A *draft* is a hidden folder next to the files (``core/publishing.py``). Files are written there,
and to publish one is to give it a second name in the folder, by a hard link.

The links also tell what a killed process has left: its draft has a link of each file that it has
added to the folder, and of each old file. To *sweep* is to delete those that are in the folder and
the draft, but not of the model that is there now.
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
    files: list[str]  # their names, the same in the draft and in the folder
    # What the index and the single file were when this began. Publishing replaces one of them, and
    # must not replace what another job has published since.
    was: dict[str, Identity]

    def publish(self) -> None:
        """Publishes the files, and deletes those of the old model that no longer belong there.

        A process may be killed after any line: then the folder has the old model or the new one,
        and the next draft sweeps the rest.
        """
        folder, draft = self.folder, self.draft.folder
        # 1. Nothing is changed unless all files are on the disk, and can be read.
        for name in self.files:
            with (draft / name).open("rb") as file:
                read_header(_CALLER, draft / name, file)  # raises an error for a damaged file
        old = _model_files(folder)
        new = self.files if self.files == [MODEL_FILE] else [*self.files, INDEX_FILE]
        for name in new:
            sync(draft / name)
        for name, version in self.was.items():
            check_unchanged(folder / name, version)
        # 2. Add the files, but not the last one, which makes them the model.
        *shards, last = new
        for name in shards:
            _link(draft / name, folder / name)
        for name in old.difference(new):  # so that they are swept if they are not deleted below
            # Not `_link`, whose rename would take them from the old model while that is needed. An
            # old file may be a symbolic link, which Python follows by default only from 3.14 on.
            with contextlib.suppress(OSError, NotImplementedError):  # without, they are not swept
                os.link(folder / name, draft / name, follow_symlinks=False)
        if shards:  # an index must not be on the disk before the files that it names
            sync(draft, deep=False)  # by which they are swept if there will be no index
            sync(folder, deep=False)
        # 3. From here on, readers find the new model.
        exchange(draft / last, folder / last)
        sync(folder, deep=False)
        if last == MODEL_FILE:  # until the old index is gone, readers take that first
            (folder / INDEX_FILE).unlink(missing_ok=True)
            sync(folder, deep=False)  # or after a crash, it may name files that are gone
        # 4. Delete the old files.
        for name in old.difference(new):
            (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def new_release(folder: Path, count: int, *, overwrite: bool) -> Iterator[Release]:
    """Begins a release of so many files, whose draft is deleted at the end.

    The caller writes the files to the draft and calls ``publish`` within the context. Without that,
    for example after an error, the folder stays as it was.
    """
    with Draft(
        folder / MODEL_FILE,
        is_ours=lambda name: name == INDEX_FILE or name.endswith(".safetensors"),
        sweep=lambda draft: _sweep(folder, draft),  # also the drafts of killed processes
    ) as draft:
        was = {name: identity(folder / name) for name in (INDEX_FILE, MODEL_FILE)}
        yield Release(folder, draft, _free_names(folder, count, overwrite=overwrite), was)


def _free_names(folder: Path, count: int, *, overwrite: bool) -> list[str]:
    """Returns names for so many files.

    A single file may have the name of the old one, which one rename replaces, unless the old index
    names that, too: readers would take other files of the old model with it until the index is
    gone. For this reason, no name of files with an index is in the folder yet.

    Raises:
      CheckpointError: the folder has a model, and ``overwrite`` is false.
    """
    names = [MODEL_FILE]
    has_index = count > 1 or MODEL_FILE in _indexed_files(folder)
    if has_index:
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    taken = [name for name in names if (folder / name).exists()]
    present = _model_files(folder).union(taken)
    if present and not overwrite:
        listed = ", ".join(sorted(present))
        raise CheckpointError(f"{_CALLER}: {folder} has {listed}; overwrite=True replaces it.")
    if taken and has_index:
        version = secrets.token_hex(4)
        names = [name.replace("model-", f"model-{version}-", 1) for name in names]
    return names


def _model_files(folder: Path) -> set[str]:
    """Finds the files of the model in a folder: the single one, or the index and what it names."""
    names = {MODEL_FILE, INDEX_FILE} | _indexed_files(folder)
    return {name for name in names if (folder / name).is_file()}


def _indexed_files(folder: Path) -> set[str]:
    """Returns the names of the files that the index of a folder names; none without an index."""
    if (folder / INDEX_FILE).is_file():
        # Of what is no index, nothing else is known to be of the model.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            return {*read_index(folder).values()}
    return set()


def _sweep(folder: Path, draft: Path) -> None:
    """Deletes the files in the folder that a draft has, too, and that are not of its model."""
    if not draft.is_dir():
        return
    # Also a single file beside an index, which may name it. If it is an old one that should have
    # been deleted, the next release deletes it.
    current = _model_files(folder)
    for name in os.listdir(draft):
        in_folder = folder / name
        if name in current or not os.path.lexists(in_folder):
            continue
        # A hard link; a file of another job may have its name. An old file may be a symbolic link,
        # which leads nowhere from the draft, so links are not followed.
        if os.path.samestat(in_folder.lstat(), (draft / name).lstat()):
            in_folder.unlink()


def _link(old: Path, new: Path) -> None:
    """Gives a file a second name, or in file systems without hard links, a new one.

    Without its old name, the file is not swept if this process is killed.

    Raises:
      OSError: there is a file of the new name, which is never replaced.
    """
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # there are no hard links
        if new.exists():  # `rename` would replace it
            raise
        old.rename(new)
