"""Publishing files: at every moment a path holds all of the old content or all of the new.

    model/                           what readers see
    .model.nnx_sharding-lock         locked by the only writer
    .model.nnx_sharding-1f6a09c2…/   its draft: what is written, and later what was replaced

A writer locks the path, writes and syncs a draft, and exchanges both in one system call. The system
unlocks what a killed process had locked, so whoever has the lock knows that all other drafts of
this path were abandoned, and deletes them. What no writer could have made is never deleted.

Some file systems have no locks. There, drafts have different names, a draft is only published if
nobody has published another one since it was begun, and abandoned ones stay.
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

from .interrupts import signals_deferred

if sys.platform != "win32":
    import fcntl

_MARK = ".nnx_sharding-"

# Of `renameat2`, from <linux/fs.h>.
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2

# Of a file or folder: device, inode, and when it was changed last. Another one at the same path has
# another of these; inodes alone are used again. None if nothing is there.
Identity: TypeAlias = tuple[int, int, int] | None


class Draft:
    """A folder next to a path, for what is to be published there; a context manager.

    Args:
      path: what is to be replaced or made. Folders above it that are missing are made, and deleted
        again if nothing is published.
      is_ours: whether a writer could have made a file, by its path in the draft. Only these are
        deleted, so that a draft with anything else stays.
      sweep: is called with a draft before it is deleted, also with those of killed writers.

    Attributes:
      folder: the folder.

    ``_was`` is the identity of what was at the path when the draft was begun; it is set on entering
    the context. ``_cleanup`` has what is to be done at its end: the draft is deleted, the path
    unlocked, and empty folders above it are deleted.

    Raises:
      FileExistsError: another process is writing to this path.
    """

    def __init__(
        self,
        path: Path,
        is_ours: Callable[[str], object],
        sweep: Callable[[Path], None] = lambda draft: None,
    ):
        """Chooses the name of the draft's folder; it is made on entering the context."""
        self.path, self._is_ours, self._sweep = path, is_ours, sweep
        self._prefix = _prefix_of(path)
        self.folder = path.with_name(self._prefix + secrets.token_hex(8))
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Draft:
        """Locks the path, deletes what killed writers left, and makes the draft's own folder."""
        # The callbacks run in reverse order: at once if a line of the block raises, else when the
        # context of the draft ends.
        with contextlib.ExitStack() as stack:
            missing = [folder for folder in self.path.parents if not folder.exists()]
            for folder in reversed(missing):  # the highest one first
                folder.mkdir(exist_ok=True)
                stack.callback(_remove_empty, folder)
            # False if the file system has no locks. Other drafts may then be of busy writers.
            is_locked = stack.enter_context(_locked(self.path, self._prefix + "lock"))
            self._was = identity(self.path)
            if is_locked:
                for folder in drafts(self.path):  # all of killed writers; ours is not made yet
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
          new: the file or folder, in the draft's folder. If nothing is at the path, it is moved
            there; else the two are exchanged.

        Raises:
          FileExistsError: somebody else has made or replaced the path since the draft was begun.
        """
        sync(new)  # before it can be seen, or a crash could leave an incomplete file there
        # Only the lock keeps others from a change between these two lines. Without locks, this
        # finds those that were made before.
        check_unchanged(self.path, self._was)
        exchange(new, self.path)
        sync(self.path.parent, deep=False)

    def _delete(self, draft: Path) -> None:
        """Deletes the files in a draft that a writer could have made, and folders without others.

        A folder with a file of somebody else stays, and so does the draft that it is in.
        """
        self._sweep(draft)
        for root, _, names in os.walk(draft, topdown=False):  # the lowest folders first
            for path in (Path(root, name) for name in names):
                if self._is_ours(path.relative_to(draft).as_posix()):
                    path.unlink(missing_ok=True)
            _remove_empty(Path(root))  # does nothing if there is something in it


def _prefix_of(path: Path) -> str:
    """Returns how the names of the lock and drafts of a path begin: ``.model.nnx_sharding-``.

    A name of more than 50 characters ends in a digest there, since names of files have at most 255
    bytes, and a character has at most 4. Cut alone, two names could share a lock.
    """
    name = path.name
    if len(name) > 50:
        name = f"{name[:33]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    return f".{name}{_MARK}"


def drafts(path: Path) -> list[Path]:
    """Returns the drafts of a path that exist, of writers that are busy or were killed."""
    # The names that `Draft` gives them.
    pattern = re.compile(re.escape(_prefix_of(path)) + "[0-9a-f]{16}")
    if not path.parent.is_dir():
        return []
    return [x for x in path.parent.iterdir() if pattern.fullmatch(x.name) and x.is_dir()]


def write_file(path: Path, content: bytes, check: Callable[[Path], object] | None = None) -> None:
    """Writes a file: after an error, the old one is there; a link still names the same file.

    Args:
      path: the file, or a symbolic link to it.
      content: its new content.
      check: may raise an error for the new file before it is published; it gets its path.
    """
    path = path.expanduser()
    is_device = path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm")
    if (path.exists() and not path.is_file()) or is_device:
        path.write_bytes(content)  # a pipe or a terminal, which nothing can replace
        return
    target = Path(os.path.realpath(path))  # the file itself, so that a link is not replaced
    if not target.parent.is_dir():  # a draft would make it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    # The only file that a writer puts into a draft has the name of the target.
    with Draft(target, is_ours=lambda name: name == target.name) as draft:
        new = draft.folder / target.name
        new.write_bytes(content)
        if target.exists():  # else the new file has the mode that the system gives it
            shutil.copymode(target, new)
        if check is not None:
            check(new)
        draft.publish(new)


def check_unchanged(path: Path, was: Identity) -> None:
    """Raises an error if a path was made, replaced or deleted since it had this identity."""
    if identity(path) != was:
        raise FileExistsError(
            f"{path} was changed by another job while this one was writing. What is there now is "
            "complete and was kept; nothing is left of what this job has written."
        )


def identity(path: Path) -> Identity:
    """Returns what is different once a path is replaced; None if nothing is there."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def sync(path: Path, *, deep: bool = True) -> None:
    """Waits until a file or a folder, with all that is in it, is on the disk."""
    if deep and path.is_dir():
        for child in path.iterdir():
            sync(child)
    if path.is_dir() and os.name == "nt":  # which cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of folders, in some file systems
            raise
    finally:
        os.close(descriptor)


def exchange(new: Path, path: Path) -> None:
    """Moves a file or a folder to a path.

    What was there is then at ``new``; but where no system call exchanges two paths, an old file is
    gone.
    """
    if not path.exists():
        if not _renameat2(new, path, _NOREPLACE):
            new.rename(path)
    elif not _renameat2(new, path, _EXCHANGE):
        if path.is_file():
            new.replace(path)
        else:
            _exchange_folders(new, path)


def _exchange_folders(new: Path, path: Path) -> None:
    """Exchanges folders by renames, where no system call does.

    If the process is killed between two of these, no folder is at ``path``.
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


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Renames by Linux's system call, which can exchange two paths; False where there is none."""
    function = _renameat2_of_libc()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(new))


@functools.cache  # each CDLL defines a class
def _renameat2_of_libc() -> Any:
    """Returns the function of the C library; None where there is none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def _remove_empty(folder: Path) -> None:
    """Deletes a folder if nothing is in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[bool]:
    """Locks a path by a file next to it; yields False where the file system has no locks."""
    file = path.with_name(name)
    descriptor, is_locked = _lock(path, file)
    try:
        yield is_locked
    finally:
        # Deleted first, while it is locked. A process that has opened it before gets the lock of a
        # deleted file next, and `_lock` there tries again with a new one. In the other order, that
        # process would have the lock, and its file would be deleted.
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, file: Path) -> tuple[int, bool]:
    """Opens and locks a file; returns its descriptor, and whether it is locked.

    Where there are no locks, as on Windows and some file systems, it is only opened. Another
    process may delete the file between opening and locking; then this is repeated.

    Raises:
      FileExistsError: another process has locked it: it writes to ``path``.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform == "win32":  # Python has no `flock` there
                return descriptor, False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whether the file that was locked is still the one at this path.
            if os.path.samestat(file.stat(), os.fstat(descriptor)):
                return descriptor, True
        except BlockingIOError:
            os.close(descriptor)
            raise FileExistsError(
                f"{path} is being written by another job. Nothing of this job has been written."
            ) from None
        except FileNotFoundError:  # it was deleted after it was opened
            pass
        except OSError as error:
            # The codes by which file systems say that they have no locks.
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                return descriptor, False
            os.close(descriptor)
            raise
        os.close(descriptor)
