"""Finds words that are not the field's: ``python tools/check_words.py [FILE_OR_FOLDER ...]``.

The terms of the project are those of JAX's documentation: shard, replicate, partition, reshard,
leaf, pytree prefix, trace, retrace, cache hit, donate, upper bound, roofline. What is listed here
has been written in their place before.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "nnx_sharding", "tests")
HERE += ("examples", "benchmarks", "tools")
KINDS = {".py", ".pyi", ".md", ".c", ".js", ".html"}

BANNED = {
    r"cuts?|cutting": "shard, partition",
    r"whole": "fully replicated, full, complete",
    r"anew": "again; for a layout: reshard",
    r"lays? out|laid out": "shard, place",
    r"stands?|stood|standing": "is, belongs, appears",
    r"bears?|bore|borne": "has, carries",
    r"mends?|mended|mending": "fix",
    r"tells?|telling|told": "says, shows, reports",
    r"said": "stated, given, reported",
    r"of no use": "unused, useless",
    r"lies|lie|lay": "is, is placed",
    r"reaches|reached|reach": "is reachable, arrives, gets to",
    r"(?<!there )(?<!There )(?:is|are|was|were) no(?! longer| more|w)": "is not a",
    r"taken apart|takes apart|take apart": "split, flattened",
    r"in the way of|by way of": "like",
}
PATTERN = re.compile("|".join(rf"\b(?P<g{i}>{p})\b" for i, p in enumerate(BANNED)))
INSTEAD = dict(enumerate(BANNED.values()))


def files(places: list[str]) -> list[Path]:
    """All text files in these places."""
    found = []
    for place in places or [str(ROOT / name) for name in HERE]:
        path = Path(place)
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [p for p in inside if p.suffix in KINDS and "_build" not in p.parts]
    return [path for path in found if path.name != Path(__file__).name]


def main(places: list[str]) -> int:
    """Prints each place of a banned word; returns 1 if there is any."""
    count = 0
    for path in files(places):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in PATTERN.finditer(line):
                instead = INSTEAD[int((match.lastgroup or "g0")[1:])]
                print(f"{path}:{number}: {match[0]!r} (write: {instead}): {line.strip()}")
                count += 1
    if count:
        print(f"{count} banned words", file=sys.stderr)
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
