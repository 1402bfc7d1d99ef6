"""The file: a zip archive with a manifest and a program, sealed by a digest.

The comment of the archive, which is the end of the file, is the SHA-256 of everything before it.
The digest protects against accidents; it is not a signature.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

from .._publishing import write_file
from ..analysis.json_codec import file_path
from ..errors import ExportError

_MANIFEST, _PROGRAM = "manifest.json", "program.bin"
_START = b"PK\x03\x04"  # the first bytes of each zip archive
_DIGEST = 64  # hexadecimal digits of SHA-256


def write(path: str | os.PathLike[str], manifest: str, program: bytes) -> None:
    """Writes a manifest (JSON) and a program to a file; equal contents make equal files.

    The file replaces an older one only after it has been written in full and read again.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ((_MANIFEST, manifest.encode()), (_PROGRAM, program)):
            # A fixed time makes the bytes the same whenever and wherever the entry is written.
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, so that the next line sets the permissions
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
        archive.comment = b"0" * _DIGEST  # room for the digest
    sealed = buffer.getvalue()[:-_DIGEST]
    write_file(Path(path), sealed + _digest(sealed), check=read)


def _digest(data: bytes) -> bytes:
    """Returns the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest().encode()


def read(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """Reads the manifest, which is JSON, and the program.

    Raises:
      ExportError: the file is of another kind, or was damaged or changed.
    """
    data = file_path(path).read_bytes()
    # A file that was cut within its first four bytes is damaged, not of another kind, so only as
    # many bytes are compared as there are.
    if not data or not _START.startswith(data[: len(_START)]):
        raise ExportError(f"{path} is not a file of nnx_sharding.export: it starts differently.")
    if _digest(data[:-_DIGEST]) != data[-_DIGEST:]:
        raise ExportError(
            f"{path} is damaged, or not a file of nnx_sharding.export: its digest is not that of "
            "its content. It was truncated or changed after it was written; copy or export it "
            "again."
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            # Names must be unique, because readers of archives differ in which file they take.
            if len(names) > len(set(names)):
                raise ValueError("it has a file twice")
            return archive.read(_MANIFEST), archive.read(_PROGRAM)
    except Exception as error:  # zipfile raises errors of many kinds
        raise ExportError(f"{path} is not a file of nnx_sharding.export: {error}.") from None
