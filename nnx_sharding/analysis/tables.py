"""Tables of text, drawn by rich (a dependency of Flax), which is imported on first use."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .units import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text


class Pictured:
    """An object that rich draws for ``print``, its own consoles and notebooks."""

    __slots__ = ()

    def _pictures(self, width: int) -> Iterable[RenderableType]:
        """What to draw in this many columns."""
        raise NotImplementedError

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        return self._pictures(options.max_width)

    def __str__(self) -> str:
        return drawn(self)

    def _repr_html_(self) -> str:
        from rich.terminal_theme import TerminalTheme

        # Colours with enough contrast on light and on dark: a notebook may be either.
        grey, colours = (118, 118, 118), [(211, 47, 47), (20, 132, 60), (150, 108, 0)]
        colours += [(46, 112, 220), (168, 75, 190), (0, 128, 142)]
        # Black and white are grey, too.
        theme = TerminalTheme((255, 255, 255), (0, 0, 0), [grey, *colours, grey])
        # Notebooks have other fonts, and break lines.
        style = "font-family: monospace; white-space: pre; overflow-x: auto"
        html = f'<div class="nnx-sharding"><pre style="{style}">{{code}}</pre></div>'
        console = _recording(self)
        return console.export_html(theme=theme, code_format=html, inline_styles=True)


def drawn(*pictures: RenderableType) -> str:
    """Pictures as plain text, in as many columns as they need."""
    lines = _recording(*pictures).export_text().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _recording(*pictures: RenderableType) -> Console:
    """A console that has drawn pictures, independent of environment variables."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), record=True, width=100_000, color_system=None,
        force_terminal=False, force_jupyter=False,
    )  # fmt: skip
    for picture in pictures:
        console.print(picture)
    return console


def text(content: Any, style: str = "", styles: Mapping[str, str] | None = None) -> Text:
    """Text without markup or control sequences, with a style, and styles for some words."""
    from rich.text import Text

    shown = Text(printable(content), style, overflow="fold")
    for word, word_style in (styles or {}).items():
        shown.highlight_regex(rf"(?<!\w){re.escape(printable(word))}(?!\w)", word_style)
    return shown


def table(
    header: Sequence[Any],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: int = 0,
    footer: Sequence[Any] | None = None,
    most: int | None = None,
) -> Table:
    """A table of texts, whose last columns may be numbers, with the first ``most`` rows."""
    from rich.box import Box
    from rich.table import Table

    rules = Box("    \n    \n -  \n    \n    \n -  \n    \n    \n")
    table = Table(
        box=rules, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="",
        show_footer=footer is not None,
    )  # fmt: skip
    for number, name in enumerate(header):
        table.add_column(
            _cell(name),
            _cell("" if footer is None else footer[number]),
            justify="left" if number < len(header) - numbers else "right",
            overflow="fold",  # names are never cut off
            no_wrap=number > 0,  # only the first column, with paths, is broken
        )
    rows = [*rows]
    for row in rows[:most]:
        table.add_row(*map(_cell, row))
    if most is not None and len(rows) > most:
        table.add_row(f"… and {len(rows) - most} more")
    return table


def _cell(content: Any) -> Text:
    return text(content) if isinstance(content, str) else content


def axis_styles(axes: Iterable[str]) -> dict[str, str]:
    """A colour for each mesh axis, in the order in which they first appear."""
    return dict(zip(dict.fromkeys(axes), itertools.cycle(COLOURS), strict=False))


# Colours that every terminal has and that are readable on light and dark.
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
