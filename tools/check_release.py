"""Checks that all places name the same version: ``python tools/check_release.py``.

``make release-check`` runs it after all gates, with the sdist and the wheel in ``dist/``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The file, and a pattern with one group for the version.
PLACES = {
    "nnx_sharding/_version.py": r'__version__ = "([^"]+)"',
    "CITATION.cff": r"^version: (\S+)$",
    "CHANGELOG.md": r"^## \[(\d[^\]]*)\]",  # the newest release
}


def main() -> int:
    """Prints the version of each place, and returns 1 if they differ or a file is missing."""
    versions = {}
    for name, pattern in PLACES.items():
        found = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        versions[name] = found[1] if found else "none"
    version = versions["nnx_sharding/_version.py"]
    for suffix in (".tar.gz", "*.whl"):
        pattern = f"nnx_sharding-{version}{'-' * suffix.startswith('*')}{suffix}"
        built = sorted(path.name for path in (ROOT / "dist").glob(pattern))
        versions[f"dist/{pattern}"] = version if built else "none"
    for place, found in versions.items():
        print(f"{place}: {found}")
    if len({*versions.values()}) > 1:
        print("The versions differ. Change the first three, and build again.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
