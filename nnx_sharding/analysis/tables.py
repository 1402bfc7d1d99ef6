"""Tables of text, drawn by rich (a dependency of Flax), which is imported on first use.

A report is `Pictured`: it yields *pictures* (texts, tables, and others like it), which rich draws
on consoles and in notebooks. ``str`` and ``print`` do not wait for rich, which takes long for large
tables: `drawn` lays them out itself, with the same result.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .units import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

Cell: TypeAlias = "str | Text"
_WIDTH = 100_000  # the columns of plain text, which are more than any table has


class Pictured:
    """An object that rich draws for ``print``, its own consoles and notebooks.

    A subclass defines only ``_pictures``, which yields what to draw from top to bottom: texts
    (`text`), tables (`Table`) and other objects of this kind.
    """

    __slots__ = ()

    def _pictures(self, width: int) -> Iterable[RenderableType]:
        """Yields what to draw, from top to bottom, in ``width`` characters."""
        raise NotImplementedError

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        return self._pictures(options.max_width)

    def __str__(self) -> str:
        return drawn(self)

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks, drawn by rich, with colours for any background."""
        from rich.terminal_theme import TerminalTheme

        # A notebook may be light or dark, so each of the eight colours of terminals (black, red,
        # green, yellow, blue, magenta, cyan, white) gets a shade with enough contrast on both.
        # Black and white have no such shade, so both are grey.
        grey, red, green, yellow = (118, 118, 118), (211, 47, 47), (20, 132, 60), (150, 108, 0)
        blue, magenta, cyan = (46, 112, 220), (168, 75, 190), (0, 128, 142)
        colours = [grey, red, green, yellow, blue, magenta, cyan, grey]
        theme = TerminalTheme(background=(255, 255, 255), foreground=(0, 0, 0), normal=colours)
        # The style is needed because notebooks have other fonts, and break lines.
        style = "font-family: monospace; white-space: pre; overflow-x: auto"
        # rich replaces ``{code}``.
        html = f'<div class="nnx-sharding"><pre style="{style}">{{code}}</pre></div>'
        console = _recording(self)
        return console.export_html(theme=theme, code_format=html, inline_styles=True)


def drawn(*pictures: RenderableType) -> str:
    """Returns pictures as plain text, in as many columns as they need."""
    return "\n".join(line.rstrip() for picture in pictures for line in _lines(picture))


def _lines(picture: RenderableType) -> Iterable[str]:
    """Lays out a picture as rich does, and returns its lines.

    rich itself takes 0.6 ms for each row of a table, so rich is only asked for pictures that are
    neither tables (`Table`, the class below) nor texts that fit into a line.
    """
    from rich.text import Text

    if isinstance(picture, Pictured):
        return itertools.chain.from_iterable(map(_lines, picture._pictures(_WIDTH)))
    if isinstance(picture, Table):
        return picture.lines()
    # If the text as a whole is shorter than a line, none of its lines needs wrapping.
    if isinstance(picture, Text) and len(picture) < _WIDTH:
        return picture.plain.split("\n")
    return _recording(picture).export_text().splitlines()


def _recording(*pictures: RenderableType) -> Console:
    """Returns a console that has drawn pictures, and exports them as text or HTML.

    The arguments make it draw the same everywhere, because rich would otherwise take the width and
    the colours from the terminal, and from variables such as ``COLUMNS``. The recording has styles
    even without colours.
    """
    from rich.console import Console

    console = Console(
        file=io.StringIO(), record=True, width=_WIDTH, color_system=None,
        force_terminal=False, force_jupyter=False,
    )  # fmt: skip
    for picture in pictures:
        console.print(picture)
    return console


def text(content: Any, style: str = "", styles: Mapping[str, str] | None = None) -> Text:
    """Makes a text without markup or control sequences, in a style.

    ``styles`` has other styles for some words, by the word.
    """
    from rich.text import Text

    shown = Text(printable(content), style, overflow="fold")
    for word, word_style in (styles or {}).items():
        shown.highlight_regex(rf"(?<!\w){re.escape(printable(word))}(?!\w)", word_style)
    return shown


class Table:
    """A table of texts, which rich draws, and breaks where it is too wide.

    Attributes:
      _header: the titles of the columns.
      _rows: the cells of the rows that are shown; the last one counts the others if some are not.
      _footer: the cells of the row of sums; None without one.
      _is_number: whether the cells of each column are aligned to the right.
    """

    def __init__(
        self,
        header: Sequence[Cell],
        rows: Iterable[Sequence[Cell]],
        *,
        numbers: int = 0,
        footer: Sequence[Cell] | None = None,
        most: int | None = None,
    ):
        """Keeps what is shown.

        Args:
          header: the titles of the columns.
          rows: the cells of each row.
          numbers: how many of the last columns are aligned to the right.
          footer: a row of sums below a rule; None for none.
          most: how many rows are shown; one more row counts the others. None shows all.
        """
        all_rows = [*rows]
        self._header, self._rows, self._footer = header, all_rows[:most], footer
        if most is not None and len(all_rows) > most:
            more = f"… and {len(all_rows) - most} more"
            self._rows.append((more, *[""] * (len(header) - 1)))
        self._is_number = [i >= len(header) - numbers for i in range(len(header))]

    def __rich__(self) -> RenderableType:
        """Returns the table as rich draws it: without borders, with a rule below the header."""
        from rich.box import Box
        from rich.table import Table

        # The characters of lines between rows, for each of eight kinds of rows: there are dashes
        # below the header and above the footer.
        rules = Box("    \n    \n -  \n    \n    \n -  \n    \n    \n")
        table = Table(
            box=rules, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="",
            show_footer=self._footer is not None,
        )  # fmt: skip
        footer = self._footer or [""] * len(self._header)
        for number, (title, total, is_number) in enumerate(
            zip(self._header, footer, self._is_number, strict=True)
        ):
            table.add_column(
                _cell(title),
                _cell(total),
                justify="right" if is_number else "left",
                overflow="fold",  # Names are never cut off.
                no_wrap=number > 0,  # Only the first column, with paths, is broken.
            )
        for row in self._rows:
            table.add_row(*map(_cell, row))
        return table

    def lines(self) -> list[str]:
        """Lays out the table in full width, as rich does.

        Each row is one line, because its cells are printable texts without line breaks.
        """
        footers = [] if self._footer is None else [self._footer]
        rows = [[_plain(cell) for cell in row] for row in (self._header, *self._rows, *footers)]
        widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
        # rich puts a space to the right of each column except the last one, and draws dashes below
        # this space, too. Another space separates the columns. Each column has one dash at least.
        dashes = ["-" * (width + 1) for width in widths[:-1]]
        rule = " ".join([*dashes, "-" * max(widths[-1], 1)])
        header, *lines = [self._line(row, widths) for row in rows]
        if footers:
            lines.insert(-1, rule)  # above the footer, which is the last line
        return [header, rule, *lines]

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        """Joins the cells of a row, each filled up to the width of its column."""
        cells = []
        for cell, width, is_number in zip(row, widths, self._is_number, strict=True):
            # rich aligns a cell without the spaces at its end, although they count for the width
            # of the column.
            shown = cell.rstrip()
            space = " " * (width - _width(shown))
            cells.append(space + shown if is_number else shown + space)
        return "  ".join(cells)


def legend(header: Iterable[Cell], phrases: Mapping[str, str]) -> Iterator[Text]:
    """Yields what the columns of a table are, a line for each: ``peak: the most memory in use``.

    Args:
      header: the titles of the columns that are shown.
      phrases: what a column is, by its title; columns without a phrase have no line.
    """
    for title in map(str.strip, map(_plain, header)):
        if title in phrases:
            yield text(f"  {title}: {phrases[title]}", "dim")


def _cell(content: Cell) -> Text:
    return text(content) if isinstance(content, str) else content


def _plain(content: Cell) -> str:
    return printable(content) if isinstance(content, str) else content.plain


def _width(content: str) -> int:
    """Counts the columns of a terminal that a text takes."""
    if content.isascii():
        return len(content)
    from rich.cells import cell_len

    return cell_len(content)


def axis_styles(axes: Iterable[str]) -> dict[str, str]:
    """Chooses a colour for each mesh axis, in the order in which axes first appear."""
    return dict(zip(dict.fromkeys(axes), itertools.cycle(COLOURS), strict=False))


# Colours that every terminal has and that are readable on light and dark.
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
