"""Publishes new safetensors files of a model in a folder with other files: all of them or none.

A folder holds one model: the files that ``model.safetensors.index.json`` names or, without such an
index, ``model.safetensors``. So one rename publishes any number of files: the rename of the index,
or of the single file. Before it, the other new files get names that are free. After it, the old
files are deleted.

A *draft* is a hidden folder next to the files (``_publishing.py``). Files are written there,
and to publish one is to give it a second name in the folder, by a hard link.

The links also tell which files a killed process has left, because its draft has a link of each file
that it has added to the folder, and of each old file. To *sweep* is to delete files that are in the
folder and in the draft, but do not belong to the model that is in the folder now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .._publishing import Draft, Identity, check_unchanged, exchange, identity, sync
from ..errors import CheckpointError
from .tensor_files import INDEX_FILE, MODEL_FILE, read_header, read_index

_CALLER = "save_safetensors"


@dataclasses.dataclass
class Release:
    """Files of a new model, which are written to a draft and then published in a folder."""

    folder: Path  # the folder in which the model is published
    draft: Draft  # the draft; its ``folder`` is the hidden folder with the new files
    files: list[str]  # the names of the files, which are the same in the draft and in the folder
    # The identities of the index and the single file when the release began. Publishing replaces
    # one of them, and must not replace a file that another job has published since.
    old_identities: dict[str, Identity]

    def publish(self) -> None:
        """Publishes the files, and deletes those of the old model that no longer belong there.

        A process may be killed after any line. The folder then has the old model or the new one,
        and the next draft sweeps the other files.

        Raises:
          CheckpointError: a file in the draft is damaged; nothing was changed.
          FileExistsError: another job has published a model since; nothing was changed.
        """
        folder, draft = self.folder, self.draft.folder
        # 1. Nothing is changed unless all files are on the disk, and can be read.
        for name in self.files:
            with (draft / name).open("rb") as file:
                read_header(_CALLER, draft / name, file)  # raises an error for a damaged file
        old_names = _model_files(folder)
        new_names = self.files if self.files == [MODEL_FILE] else [*self.files, INDEX_FILE]
        for name in new_names:
            sync(draft / name)
        for name, old_identity in self.old_identities.items():
            check_unchanged(folder / name, old_identity)
        # 2. Add the files, but not the last one, which makes them the model.
        *shards, last_name = new_names
        for name in shards:
            _link(draft / name, folder / name)
        # The draft gets links of the old files, so that they are swept if they are not deleted
        # below.
        for name in old_names.difference(new_names):
            # `_link` is not used, because its rename would take a file from the old model, which
            # still needs it. `follow_symlinks` is given because an old file may be a symbolic link,
            # and the default depends on the release of Python (3.14 changed it). If there can be no
            # link, the file is not swept.
            with contextlib.suppress(OSError, NotImplementedError):
                os.link(folder / name, draft / name, follow_symlinks=False)
        # The files have to be on the disk before an index that names them. The links in the draft
        # have to be there as well, because the files are swept by them if there will be no index.
        if shards:
            sync(draft, deep=False)
            sync(folder, deep=False)
        # 3. From here on, readers find the new model.
        exchange(draft / last_name, folder / last_name)
        sync(folder, deep=False)
        # Readers prefer an index to a single file, so the old index is deleted first. The index has
        # to be off the disk before the old files, because after a crash it could name missing
        # files.
        if last_name == MODEL_FILE:
            (folder / INDEX_FILE).unlink(missing_ok=True)
            sync(folder, deep=False)
        # 4. Delete the old files.
        for name in old_names.difference(new_names):
            (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def new_release(folder: Path, count: int, *, overwrite: bool) -> Iterator[Release]:
    """Begins a release of ``count`` files; sweeps the folder, and deletes the draft at the end.

    Without ``overwrite``, a CheckpointError is raised if the folder has a model.

    The caller writes the files to the draft and calls ``publish`` within the context. Without that,
    for example after an error, the folder stays as it was.
    """
    with Draft(
        folder / MODEL_FILE,
        is_ours=lambda name: name == INDEX_FILE or name.endswith(".safetensors"),
        # The function is called for the drafts of killed processes as well.
        sweep=lambda draft: _sweep(folder, draft),
    ) as draft:
        old_identities = {name: identity(folder / name) for name in (INDEX_FILE, MODEL_FILE)}
        names = _free_names(folder, count, overwrite=overwrite)
        yield Release(folder, draft, names, old_identities)


def _free_names(folder: Path, count: int, *, overwrite: bool) -> list[str]:
    """Returns names for ``count`` files of a new model.

    A single file may have the name of the old one, because one rename replaces it. If the old index
    names that file, it may not, because readers would take the new file together with other files
    of the old model until the index is gone. For the same reason, files with an index get names
    that are not in the folder yet.

    Raises:
      CheckpointError: the folder has a model, and ``overwrite`` is false.
    """
    names = [MODEL_FILE]
    has_index = count > 1 or MODEL_FILE in _indexed_files(folder)
    if has_index:
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    taken_names = [name for name in names if (folder / name).exists()]
    present_names = _model_files(folder).union(taken_names)
    if present_names and not overwrite:
        listed = ", ".join(sorted(present_names))
        raise CheckpointError(f"{_CALLER}: {folder} has {listed}; overwrite=True replaces it.")
    if taken_names and has_index:
        version = secrets.token_hex(4)
        names = [name.replace("model-", f"model-{version}-", 1) for name in names]
    return names


def _model_files(folder: Path) -> set[str]:
    """Returns the names of a model's files in a folder: the single file, the index, its files."""
    names = {MODEL_FILE, INDEX_FILE} | _indexed_files(folder)
    return {name for name in names if (folder / name).is_file()}


def _indexed_files(folder: Path) -> set[str]:
    """Returns the names of the files that the index of a folder names.

    The set is empty without an index, or if the index is damaged.
    """
    if (folder / INDEX_FILE).is_file():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            return {*read_index(folder).values()}
    return set()


def _sweep(folder: Path, draft: Path) -> None:
    """Deletes the files in the folder that a draft has links of, but not the folder's model."""
    if not draft.is_dir():
        return
    # A single file next to an index counts as the model as well, because the index may name it. If
    # it is an old file that should have been deleted, the next release deletes it.
    current_names = _model_files(folder)
    for name in os.listdir(draft):
        file = folder / name
        if name in current_names or not os.path.lexists(file):
            continue
        # The files are compared, because a file of another job may have the same name. Symbolic
        # links are not followed, because an old file may be one, which leads nowhere from the
        # draft.
        if os.path.samestat(file.lstat(), (draft / name).lstat()):
            file.unlink()


def _link(old: Path, new: Path) -> None:
    """Gives a file a second name; in file systems without hard links, renames it.

    A file that was renamed is not swept if this process is killed, because it is not in the draft.

    Raises:
      OSError: there is a file of the new name, which is never replaced.
    """
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # there are no hard links
        if new.exists():  # checked because `rename` would replace the file
            raise
        old.rename(new)
