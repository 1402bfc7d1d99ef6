"""Checks the built site: ``python tools/check_site.py docs/_build/html`` (``make docs``).

Each page has one heading of the first level and a description of its own, and a search for the
words of a task finds its page first.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

# Pages that Sphinx makes, without text of ours.
MADE = ("genindex", "py-modindex", "search")
DESCRIPTION = re.compile(r'<meta name="description" content="([^"]*)"')

FOUND_FIRST = {
    "kv cache": "cookbook/serving",
    "lora": "cookbook/lora",
    "ema": "cookbook/ema_and_freezing",
    "moe": "cookbook/mixture_of_experts",
    "mixed precision": "cookbook/mixed_precision",
    "ring attention": "guides/long_contexts",
    "hugging face": "guides/safetensors",
    "gradient accumulation": "guides/accumulation",
    "pipelines": "guides/pipeline",
    "profiling": "guides/profiling",
}


def faults_of_pages(site: Path) -> list[str]:
    """What is wrong with the headings and descriptions of all pages."""
    faults, descriptions = [], {}
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).with_suffix("").as_posix()
        if name.startswith(("_modules/", "_static/")) or name in MADE:
            continue
        text = page.read_text(encoding="utf-8")
        headings = len(re.findall(r"<h1\b", text))
        if headings != 1:
            faults.append(f"{name}: {headings} headings of the first level")
        found = DESCRIPTION.findall(text)
        if len(found) != 1 or len(found[0]) < 40:
            faults.append(f"{name}: its first paragraph is no description: {found}")
        descriptions[name] = found
    if not descriptions:
        return [f"no pages in {site}"]
    counts = Counter(str(one) for one in descriptions.values())
    return faults + [
        f"{name}: the description of another page, too"
        for name, one in descriptions.items()
        if counts[str(one)] > 1
    ]


def faults_of_search(site: Path) -> list[str]:
    """The searches that do not find their page, and only it, by headings, which rank first."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    faults = []
    for query, page in FOUND_FIRST.items():
        words = [index["titleterms"].get(stem(word, index), []) for word in query.split()]
        pages = [{one} if isinstance(one, int) else {*one} for one in words]
        found = sorted(index["docnames"][one] for one in set.intersection(*pages))
        if found != [page]:
            faults.append(f"the headings with “{query}” are in {found}, not in {page} alone")
    return faults


def stem(word: str, index: dict) -> str:
    """The form in which the index has a word: its longest start that is a term."""
    starts = (word[:end] for end in range(len(word), 1, -1))
    return next((start for start in starts if start in index["titleterms"]), word)


def main() -> int:
    """Prints what is wrong, and returns 1 if anything is."""
    site = Path(sys.argv[1])
    faults = [*faults_of_pages(site), *faults_of_search(site)]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
