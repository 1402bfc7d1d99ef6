"""Finds words to avoid: ``python tools/check_words.py [FILE_OR_FOLDER ...]`` (``make lint``).

The project uses the terms of JAX's documentation: shard, replicate, partition, reshard, leaf,
pytree prefix, trace, retrace, cache hit, donate, upper bound, roofline.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = "README.md CONTRIBUTING.md CHANGELOG.md docs nnx_sharding tests examples benchmarks tools"
SUFFIXES = {".py", ".pyi", ".md", ".c", ".js", ".html"}

INSTEAD = {
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
    r"(?:is|are|was|were) no(?! longer| more|w)": "is not a, has no, without",
    r"taken apart|takes apart|take apart": "split, flattened",
    r"in the way of|by way of": "like",
}
PATTERNS = {re.compile(rf"\b(?:{words})\b"): instead for words, instead in INSTEAD.items()}


def files(paths: list[Path]) -> list[Path]:
    """The text files that are, or are in, these paths."""
    paths = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    texts = (p for p in paths if p.suffix in SUFFIXES and "_build" not in p.parts)
    return sorted(p for p in texts if p.name != Path(__file__).name)


def main(arguments: list[str]) -> int:
    """Prints each of the words; returns 1 if there are any."""
    count = 0
    for path in files([Path(a) for a in arguments] or [ROOT / name for name in CHECKED.split()]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, instead in PATTERNS.items():
                for match in pattern.finditer(line):
                    print(f"{path}:{number}: {match[0]!r} (write: {instead}): {line.strip()}")
                    count += 1
    if count:
        print(f"{count} words to avoid", file=sys.stderr)
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
