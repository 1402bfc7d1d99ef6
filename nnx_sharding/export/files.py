"""The file: a zip archive with a manifest and a program, sealed by a digest.

The two entries are stored as they are, so any zip tool shows the manifest, and nothing grows when
it is read. The comment of the archive, which is the end of the file, is the SHA-256 of all before
it: whatever is cut off or changed shows. That is a seal against accidents, not a signature.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ExportError

FORMAT = "nnx_sharding export"
VERSION = 1
# Bytes; that of 40,000 arrays fits. What JSON is read into may take 20 times as much.
MAX_MANIFEST = 32 * 1024 * 1024

_MANIFEST, _PROGRAM = "manifest.json", "program.bin"
_START = b"PK\x03\x04"
_DIGEST = 64  # hexadecimal digits of SHA-256


class Content(NamedTuple):
    """What a file holds: the manifest as plain data, and the program."""

    manifest: dict[str, Any]
    program: bytes


def write(path: str | os.PathLike[str], content: Content) -> None:
    """Writes a file; the same content gives the same bytes.

    Raises:
      ValueError: the manifest is larger than what is read.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        **content.manifest,
        "program": {
            "sha256": hashlib.sha256(content.program).hexdigest(),
            "bytes": len(content.program),
        },
    }
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    if len(text) > MAX_MANIFEST:
        raise ValueError(
            f"{path} cannot be written: expected a manifest of at most {MAX_MANIFEST} bytes, got "
            f"{len(text)}. Export a function of fewer arrays."
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ((_MANIFEST, text), (_PROGRAM, content.program)):
            archive.writestr(_entry(name), data)
        archive.comment = b"0" * _DIGEST
    sealed = buffer.getvalue()[:-_DIGEST]
    Path(path).write_bytes(sealed + hashlib.sha256(sealed).hexdigest().encode())


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry that looks the same whenever and wherever it was made."""
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system = 3
    info.external_attr = 0o644 << 16
    return info


def read(path: str | os.PathLike[str]) -> Content:
    """Reads a file.

    Raises:
      ExportError: it is no such file, is damaged, or of a format that is not known here.
      OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    start = data[: len(_START)]
    if not data or not _START.startswith(start):
        raise ExportError(f"{path} is no file of nnx_sharding.export: it does not start as one.")
    sealed, seal = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(sealed).hexdigest().encode() != seal:
        raise ExportError(
            f"{path} is damaged, or no file of nnx_sharding.export: its digest is not that of "
            "its content. It was cut short or changed after it was written; copy or export it "
            "again."
        )
    try:
        return _unpacked(path, data)
    except ExportError:
        raise
    except Exception as error:  # zipfile raises errors of many kinds
        raise ExportError(f"{path} is no file of nnx_sharding.export: {error}.") from None


def _unpacked(path: str | os.PathLike[str], data: bytes) -> Content:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if [entry.filename for entry in entries] != [_MANIFEST, _PROGRAM]:
            raise ValueError("it holds other entries")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("its entries are compressed")
        if any(entry.flag_bits & 1 for entry in entries):
            raise ValueError("its entries are encrypted")
        if sum(max(entry.file_size, entry.compress_size) for entry in entries) > len(data):
            raise ValueError("its entries are larger than the file")
        if entries[0].file_size > MAX_MANIFEST:
            raise ValueError(
                f"its manifest has {entries[0].file_size} bytes, more than {MAX_MANIFEST}"
            )
        manifest = json.loads(archive.read(_MANIFEST))
        program = archive.read(_PROGRAM)
    if not isinstance(manifest, dict) or manifest.pop("format", None) != FORMAT:
        raise ValueError("its manifest is of another kind")
    version, described = manifest.pop("version", None), manifest.pop("program", None)
    if version != VERSION:
        raise ExportError(
            f"{path} has format {version!r}; this nnx_sharding reads format {VERSION}. Read it "
            "with the version that wrote it, or a newer one: "
            f"{manifest.get('versions')!s:.200}."
        )
    digest = hashlib.sha256(program).hexdigest()
    if described != {"sha256": digest, "bytes": len(program)}:
        raise ExportError(
            f"{path} was changed after it was written: the digest of its program is {digest}, its "
            f"manifest says {described!r:.120}. Export it again."
        )
    return Content(manifest, program)
