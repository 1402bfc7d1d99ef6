"""The file: a zip archive with a manifest and a program, sealed by a digest.

The two entries are stored uncompressed, so nothing grows when it is read. The comment of the
archive, which is the end of the file, is the SHA-256 of everything before it. It protects against
accidents; it is not a signature.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

from ..errors import ExportError

EXPORT, EXECUTABLE = "nnx_sharding export", "nnx_sharding executable"
VERSION = 1
_READERS = {EXPORT: "load", EXECUTABLE: "load_executable"}
# Bytes, enough for 40,000 arrays. Parsed JSON may take 20 times as much memory.
MAX_MANIFEST = 32 * 1024 * 1024

_MANIFEST, _PROGRAM = "manifest.json", "program.bin"
_START = b"PK\x03\x04"
_DIGEST = 64  # hexadecimal digits of SHA-256


def write(
    path: str | os.PathLike[str], manifest: dict[str, Any], program: bytes, kind: str = EXPORT
) -> None:
    """Writes a file; a ValueError if the manifest is larger than ``read`` allows."""
    head = {"format": kind, "version": VERSION, "program": _description(program)}
    text = json.dumps({**head, **manifest}, indent=1, sort_keys=True).encode()
    if len(text) > MAX_MANIFEST:
        raise ValueError(
            f"{path} cannot be written: expected a manifest of at most {MAX_MANIFEST} bytes, got "
            f"{len(text)}. Export a function of fewer arrays."
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ((_MANIFEST, text), (_PROGRAM, program)):
            # The same bytes whenever and wherever the entry is written.
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, data)
        archive.comment = b"0" * _DIGEST
    sealed = buffer.getvalue()[:-_DIGEST]
    Path(path).write_bytes(sealed + _digest(sealed))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _description(program: bytes) -> dict[str, Any]:
    return {"sha256": _digest(program).decode(), "bytes": len(program)}


def read(path: str | os.PathLike[str], kind: str = EXPORT) -> tuple[dict[str, Any], bytes]:
    """Reads the manifest as JSON data, and the program.

    Raises:
      ExportError: the file is of another kind or format, or damaged.
      OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    if not data or not _START.startswith(data[: len(_START)]):
        raise ExportError(f"{path} is not a file of nnx_sharding.export: it starts differently.")
    if _digest(data[:-_DIGEST]) != data[-_DIGEST:]:
        raise ExportError(
            f"{path} is damaged, or not a file of nnx_sharding.export: its digest is not that of "
            "its content. It was truncated or changed after it was written; copy or export it "
            "again."
        )
    try:
        return _unpacked(path, data, kind)
    except ExportError:
        raise
    except Exception as error:  # zipfile raises errors of many kinds
        raise ExportError(f"{path} is not a file of nnx_sharding.export: {error}.") from None


def _unpacked(path: str | os.PathLike[str], data: bytes, kind: str) -> tuple[dict[str, Any], bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        size = entries[0].file_size if entries else 0
        names = [entry.filename for entry in entries]
        sizes = [max(entry.file_size, entry.compress_size) for entry in entries]
        faults = {
            "it has other entries": names != [_MANIFEST, _PROGRAM],
            "its entries are compressed": any(entry.compress_type for entry in entries),
            "its entries are encrypted": any(entry.flag_bits & 1 for entry in entries),
            "its entries are larger than the file": sum(sizes) > len(data),
            f"its manifest has {size} bytes, more than {MAX_MANIFEST}": size > MAX_MANIFEST,
        }
        if any(faults.values()):
            raise ValueError(next(fault for fault, is_present in faults.items() if is_present))
        manifest, program = json.loads(archive.read(_MANIFEST)), archive.read(_PROGRAM)
    found = manifest.pop("format", None) if isinstance(manifest, dict) else None
    if found != kind:
        reader = _READERS.get(found) if isinstance(found, str) else None
        hint = f"; nnx_sharding.export.{reader} reads it" if reader else ""
        raise ValueError(f"its manifest is of another kind{hint}")
    version, described = manifest.pop("version", None), manifest.pop("program", None)
    if version != VERSION:
        raise ExportError(
            f"{path} has format {version!r}; this nnx_sharding reads format {VERSION}. Read it "
            "with the version that wrote it, or a newer one: "
            f"{manifest.get('versions')!s:.200}."
        )
    if described != _description(program):
        raise ExportError(
            f"{path} was changed after it was written: its program is {_description(program)}, its "
            f"manifest says {described!r:.120}. Export it again."
        )
    return manifest, program
