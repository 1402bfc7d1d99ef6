"""Publishes files: at every moment a path holds all of the old content or all of the new.

    model/                           what readers see
    .model.nnx_sharding-lock         locked by the only writer
    .model.nnx_sharding-1f6a09c2…/   the writer's draft: first the new content, then the old

A writer locks the path, writes and syncs a draft, and exchanges the draft and the path in one call
of the system. The system unlocks what a killed process had locked. So whoever has the lock knows
that all other drafts of this path were abandoned, and deletes them. A file that no writer could
have made is never deleted.

Some file systems have no locks. Drafts have different names, so several writers can be busy there.
A draft is only published if nobody has published another one since it was begun, and abandoned
drafts stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from .core.interrupts import signals_deferred

if sys.platform != "win32":
    import fcntl

_MARK = ".nnx_sharding-"

# Constants of the system call `renameat2`, from <linux/fs.h>.
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2

# The device, the inode and the time of the last change of a file or folder; None if there is none
# at a path. The time is needed because a new file may get the inode of one that was deleted.
Identity: TypeAlias = tuple[int, int, int] | None


class Draft:
    """A folder next to a path, for what is to be published there; a context manager.

    Args:
      path: the file or folder that is to be replaced or made. Missing folders above it are made,
        and deleted again if nothing is published.
      is_ours: whether a writer could have made a file, given the file's path in the draft. Only
        such files are deleted, so a draft with any other file stays.
      sweep: is called with a draft before it is deleted, also with drafts of killed writers.

    Attributes:
      path: the path.
      folder: the folder of the draft, next to the path.

    Private attributes:

        _is_ours, _sweep   the arguments with these names
        _prefix    how the names of the path's lock and of all drafts of the path begin
        _was       the identity of what was at the path when the draft was begun; None if nothing
                   was there. Entering the context sets it, and `publish` compares it
        _cleanup   what leaving the context does: it deletes the draft, unlocks the path, and
                   deletes empty folders above it that were made

    Raises:
      FileExistsError: another process is writing to this path.
    """

    def __init__(
        self,
        path: Path,
        is_ours: Callable[[str], object],
        sweep: Callable[[Path], None] = lambda draft: None,
    ):
        """Chooses the name of the draft's folder; entering the context makes the folder."""
        self.path, self._is_ours, self._sweep = path, is_ours, sweep
        self._prefix = _prefix_of(path)
        self.folder = path.with_name(self._prefix + secrets.token_hex(8))
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Draft:
        """Locks the path, deletes what killed writers left, and makes the draft's own folder."""
        # The callbacks run in reverse order. They run at once if a line of the block raises, and
        # otherwise when the context of the draft ends.
        with contextlib.ExitStack() as stack:
            missing = [folder for folder in self.path.parents if not folder.exists()]
            for folder in reversed(missing):  # the highest one first
                folder.mkdir(exist_ok=True)
                stack.callback(_remove_empty, folder)
            # False: the file system has no locks. Raises if another process has the lock.
            is_locked = stack.enter_context(_locked(self.path, self._prefix + "lock"))
            self._was = identity(self.path)
            if is_locked:
                # All drafts are those of killed writers, because a busy writer would have the lock,
                # and our draft is not made yet.
                for folder in drafts(self.path):
                    self._delete(folder)
            stack.callback(self._delete, self.folder)
            self.folder.mkdir()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def publish(self, new: Path) -> None:
        """Puts a file or a folder of the draft at the path; what was there is then in the draft.

        Args:
          new: the file or folder, in the draft's folder. It is moved to the path if nothing is
            there, and exchanged with what is there otherwise.

        Raises:
          FileExistsError: somebody else has made, replaced or deleted the path since the draft was
            begun.
        """
        # The content is on the disk before readers see it, because a crash could otherwise leave an
        # incomplete file at the path.
        sync(new)
        # Only the lock keeps other writers from publishing between these two lines. On a file
        # system without locks, the check finds what others have published before it.
        check_unchanged(self.path, self._was)
        exchange(new, self.path)
        sync(self.path.parent, deep=False)

    def _delete(self, draft: Path) -> None:
        """Deletes the files in a draft that a writer could have made, and folders left empty.

        A folder with a file of somebody else stays, and so does the draft that it is in.
        """
        self._sweep(draft)
        for root, _, names in os.walk(draft, topdown=False):  # the innermost folders come first
            for path in (Path(root, name) for name in names):
                if self._is_ours(path.relative_to(draft).as_posix()):
                    path.unlink(missing_ok=True)
            _remove_empty(Path(root))  # does nothing if the folder is not empty


def _prefix_of(path: Path) -> str:
    """Returns how the names of the lock and drafts of a path begin: ``.model.nnx_sharding-``.

    A name of more than 50 characters is cut, because names of files have at most 255 bytes, and a
    character has at most 4. A digest is added to the rest, because two names that are only cut
    could share a lock.
    """
    name = path.name
    if len(name) > 50:
        name = f"{name[:33]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    return f".{name}{_MARK}"


def drafts(path: Path) -> list[Path]:
    """Returns the existing drafts of a path, of writers that are busy or were killed."""
    # `Draft` gives its folder a name of this form.
    pattern = re.compile(re.escape(_prefix_of(path)) + "[0-9a-f]{16}")
    if not path.parent.is_dir():
        return []
    return [x for x in path.parent.iterdir() if pattern.fullmatch(x.name) and x.is_dir()]


def write_file(path: Path, content: bytes, check: Callable[[Path], object] | None = None) -> None:
    """Writes a file in one step: after an error, the old file is still there.

    If ``path`` is a symbolic link, the file that it names is replaced. A pipe, a terminal or
    another device gets the content directly, because it cannot be replaced.

    Args:
      path: the file, or a symbolic link to it.
      content: the new content of the file.
      check: gets the path of the new file before it is published, and may raise an error.

    Raises:
      FileNotFoundError: the folder of the file does not exist.
      FileExistsError: another process writes to the file, or has changed it meanwhile.
    """
    path = path.expanduser()
    is_device = path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm")
    if (path.exists() and not path.is_file()) or is_device:
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))  # the file itself, so that a link is not replaced
    if not target.parent.is_dir():  # `Draft` would make the folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    # A writer puts only one file into the draft, and the file has the name of the target.
    with Draft(target, is_ours=lambda name: name == target.name) as draft:
        new = draft.folder / target.name
        new.write_bytes(content)
        if target.exists():  # a file that did not exist gets the mode that the system gives it
            shutil.copymode(target, new)
        if check is not None:
            check(new)
        draft.publish(new)


def check_unchanged(path: Path, was: Identity) -> None:
    """Raises a ``FileExistsError`` if a path was made, replaced or deleted.

    Args:
      path: the path.
      was: what :func:`identity` returned for the path before.
    """
    if identity(path) != was:
        raise FileExistsError(
            f"{path} was changed by another job while this one was writing. What is there now is "
            "complete and was kept; nothing is left of what this job has written."
        )


def identity(path: Path) -> Identity:
    """Returns the identity of a file or folder, which differs once it is replaced.

    Returns None if nothing is at the path.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def sync(path: Path, *, deep: bool = True) -> None:
    """Waits until a file or a folder is on the disk, if ``deep`` with all that is in the folder."""
    if deep and path.is_dir():
        for child in path.iterdir():
            sync(child)
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync folders, and say so by one of these codes.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def exchange(new: Path, path: Path) -> None:
    """Moves a file or a folder to a path; what was at the path is then at ``new``.

    If the system cannot exchange two paths, an old file is lost, and an old folder is moved.

    Raises:
      OSError: a path cannot be renamed, for example because somebody has made ``path`` meanwhile.
    """
    if not path.exists():
        # If the system has no such call, a file that somebody makes after `exists` is replaced. The
        # lock keeps other writers of this module from that.
        if not _try_renameat2(new, path, _NOREPLACE):
            new.rename(path)
    elif not _try_renameat2(new, path, _EXCHANGE):
        if path.is_file():
            new.replace(path)
        else:
            _exchange_folders(new, path)


def _exchange_folders(new: Path, path: Path) -> None:
    """Exchanges two folders by three renames; if one fails, the old folder is moved back.

    If the process is killed between the first two, no folder is at ``path``. Signals are deferred,
    so that none interrupts it there.
    """
    aside = new.with_name(f"{new.name}.replaced")
    with signals_deferred():
        path.rename(aside)
        try:
            new.rename(path)
        except BaseException:
            aside.rename(path)
            raise
        aside.rename(new)


def _try_renameat2(old: Path, new: Path, flags: int) -> bool:
    """Renames by a system call of Linux, which can exchange two paths; returns whether it did.

    False means that the system or the file system has no such call, and nothing was renamed.

    Raises:
      OSError: the call exists, and has failed.
    """
    function = _renameat2_of_libc()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(new))


@functools.cache  # kept, because each CDLL defines a class
def _renameat2_of_libc() -> Any:
    """Returns ``renameat2`` of the C library; None if there is none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _remove_empty(folder: Path) -> None:
    """Deletes a folder if nothing is in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[bool]:
    """Locks a path by a file next to it; yields False if the file system has no locks.

    Raises a ``FileExistsError`` if another process has the lock. Deletes the file in the end.
    """
    file = path.with_name(name)
    descriptor, is_locked = _lock(path, file)
    try:
        yield is_locked
    finally:
        # The file is deleted while it is locked. A process that has opened the file before then
        # gets the lock of a deleted file, and its `_lock` tries again with a new file. If the lock
        # ended first, that process would get it, and we would delete the file of a busy writer.
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, file: Path) -> tuple[int, bool]:
    """Opens and locks a file; returns its descriptor, and whether the file is locked.

    If there are no locks, as on Windows and some file systems, the file is only opened. Another
    process may delete the file between opening and locking, and then both are repeated.

    Raises:
      FileExistsError: another process has locked the file, because it writes to ``path``.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        if sys.platform == "win32":  # Python has no `flock` there
            return descriptor, False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file that was locked may not be the one at this path any more.
            is_at_path = os.path.samestat(file.stat(), os.fstat(descriptor))
        except BlockingIOError:
            os.close(descriptor)
            raise FileExistsError(
                f"{path} is being written by another job. Nothing of this job has been written."
            ) from None
        except FileNotFoundError:  # another process has deleted the file after it was opened
            is_at_path = False
        except OSError as error:
            # The codes by which file systems say that they have no locks.
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                return descriptor, False
            os.close(descriptor)
            raise
        if is_at_path:
            return descriptor, True
        os.close(descriptor)
