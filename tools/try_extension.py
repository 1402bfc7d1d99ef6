"""Checks that the installed package has its C extension: ``python tools/try_extension.py``.

Needs neither JAX nor Flax, so that it runs wherever a wheel is built.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path


def main() -> None:
    """Loads the extension from the installed files."""
    folder = Path(sysconfig.get_path("platlib"), "nnx_sharding", "core", "guard")
    files = [p for s in importlib.machinery.EXTENSION_SUFFIXES for p in folder.glob(f"_native*{s}")]
    if not files:
        raise SystemExit(f"no extension in {folder}")
    spec = importlib.util.spec_from_file_location("nnx_sharding.core.guard._native", files[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(f"{files[0].name}: {module.FIELDS}")


if __name__ == "__main__":
    main()
