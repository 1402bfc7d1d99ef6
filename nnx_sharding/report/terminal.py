"""Pictures for the terminal: parameters, meshes, who holds what, and reports.

Flax requires ``rich``, which draws them; it is imported when the first picture is drawn. All
functions print to a ``rich.console.Console`` of the user's if there is one, which can also write to
a file, with or without colours, in any width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..analysis.parameters import ParameterRow, parameter_table
from ..analysis.units import bytes_text, count_text, printable, time_text
from .page.data import (
    COMPARISON,
    bound_time,
    entry_axes,
    made_with,
    moved,
    report_data,
    reports_of,
    sent_by_kind,
    spec_axes,
    summing_text,
)
from .page.fragment import row_data
from .slices import Part, Slices, parts_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

# Colours that every terminal has and that show on light and dark.
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
_MOST_ROWS = 200
_MOST_DEVICES = 512
_MOST_HOLDERS = 8


def show_parameters(tree: Any, *, console: Console | None = None) -> None:
    """Prints the table of parameters, coloured by the mesh axes that cut them, with sums.

    Args:
      tree: a model, an optimizer or a pytree of them, or what
        :func:`~nnx_sharding.analysis.parameter_table` made of it.
      console: where to print; None for the standard output.

    Raises:
      ValueError: shardings do not divide the shapes of their arrays.

    Example:
      >>> import jax
      >>> from nnx_sharding.report.terminal import show_parameters
      >>> show_parameters({"up": jax.ShapeDtypeStruct((64, 256), "float32")})
      ... # doctest: +NORMALIZE_WHITESPACE
       path    type      shape and axes   bytes/device      bytes
      ────────────────────────────────────────────────────────────
       up      float32   64 × 256             64.0 KiB   64.0 KiB
      ────────────────────────────────────────────────────────────
       total                                  64.0 KiB   64.0 KiB
    """
    is_table = isinstance(tree, list) and all(isinstance(row, ParameterRow) for row in tree)
    rows = tree if is_table else parameter_table(tree)
    data = [row_data(row) for row in rows]
    colours = _Colours(spec_axes(row["spec"]) for row in data)
    console = _console(console)
    _print(console, _parameters(data, colours, console.width))


def show_mesh(mesh: Mesh | AbstractMesh, *, console: Console | None = None) -> None:
    """Prints a mesh: its axes, and the ids of its devices in their places.

    Args:
      mesh: the mesh; an abstract one has no ids.
      console: where to print; None for the standard output.

    Example:
      >>> import jax
      >>> from nnx_sharding.report.terminal import show_mesh
      >>> show_mesh(jax.make_mesh((2, 4), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2))
      ... # doctest: +NORMALIZE_WHITESPACE
      mesh data 2 (Auto) × model 4 (Auto)
              model 0  model 1  model 2  model 3
       data 0    0        1        2        3
       data 1    4        5        6        7
    """
    data = _mesh_data(mesh)
    _print(console, *_mesh(data, _Colours([data["axes"]])))


def show_array(
    array: Any,
    sharding: Sharding | PartitionSpec | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    console: Console | None = None,
) -> None:
    """Prints which part of an array each device holds.

    As ``jax.debug.visualize_array_sharding``, but for arrays of any rank, also without data
    and on abstract meshes. An array that is cut in one or two dimensions becomes a picture of
    them, any other a list.

    Args:
      array: an array, abstract or not, or a shape.
      sharding: how it is laid out; None for how it lies. A ``PartitionSpec`` needs ``mesh``.
      mesh: the mesh of a ``PartitionSpec``.
      console: where to print; None for the standard output.

    Raises:
      TypeError: ``array`` is neither an array nor a shape.
      ValueError: there is no sharding, or it does not fit the shape.

    Example:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> from nnx_sharding.report.terminal import show_array
      >>> show_array((64, 256), P("data", "model"), AbstractMesh((2, 2), ("data", "model")))
      ... # doctest: +NORMALIZE_WHITESPACE
      (64, 256) as P('data', 'model'); each device holds (32, 128)
                      0:128          128:256
       0:32   data=0, model=0  data=0, model=1
       32:64  data=1, model=0  data=1, model=1
    """
    shape = _shape_of(array)
    laid_out = _sharding_of(array, sharding, mesh)
    parts = parts_of(shape, laid_out)
    spec = laid_out.spec if isinstance(laid_out, NamedSharding) else laid_out
    head = f"{shape} as {spec}; each device holds {tuple(laid_out.shard_shape(shape))}"
    cut = [i for i in range(len(shape)) if len({part.slices[i].start for part in parts}) > 1]
    if len(cut) == 2 < len(shape):
        head += f"; rows are dimension {cut[0]}, columns dimension {cut[1]}"
    console = _console(console)
    _print(console, _text(head), _parts(parts, cut, console.width))


def show_report(report: Any, *, console: Console | None = None) -> None:
    """Prints the summary of a report, or the table of a comparison.

    Args:
      report: a ``ProgramReport`` or a comparison, or the JSON form of one as a dictionary.
      console: where to print; None for the standard output.

    Raises:
      TypeError: ``report`` is neither a dictionary nor can become one.
      ValueError: it is of another format, or of a version that this release does not know.

    Example:
      >>> from nnx_sharding.report.terminal import show_report
      >>> report = {"format": "nnx_sharding.report", "version": 1, "name": "train_step"}
      >>> show_report(report)
      train_step
      ...
    """
    data = report_data(report)
    if data["format"] == COMPARISON:
        _print(console, *_comparison(data))
    else:
        console = _console(console)
        _print(console, *_report(data, console.width))


class _Colours:
    """The colour of each mesh axis, in the order in which they are first met."""

    def __init__(self, axes: Iterable[Iterable[str]]):
        names = dict.fromkeys(itertools.chain.from_iterable(axes))
        self._of = dict(zip(names, itertools.cycle(_COLOURS), strict=False))

    def __call__(self, axis: str) -> str:
        return self._of.get(axis, "")


def _console(console: Console | None) -> Console:
    from rich.console import Console

    return Console() if console is None else console


def _print(console: Console | None, *pictures: RenderableType) -> None:
    console = _console(console)
    for picture in pictures:
        console.print(picture)


def _text(content: Any, style: str = "") -> Text:
    """Text that is neither markup nor a control sequence, whatever is in it."""
    from rich.text import Text

    return Text(printable(content), style, overflow="fold")


def _table(header: Sequence[Any], *, footer: bool = False) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_edge=False, show_footer=footer)
    for number, (name, justify) in enumerate(header):
        table.add_column(name, justify=justify, overflow="fold", no_wrap=number > 0)
    return table


# Parameters


def _parameters(rows: Sequence[Mapping[str, Any]], colours: _Colours, width: int) -> Table:
    """One line for each array; a narrow table leaves out what can be told from the rest."""
    is_wide = width >= 100
    header = ("path", "type", "shape and axes", "each device holds", "bytes/device", "bytes")
    columns = [(name, "right" if "bytes" in name else "left") for name in header]
    table = _table([column for column in columns if is_wide or column[0] != header[3]], footer=True)
    for row in rows[:_MOST_ROWS]:
        held = " × ".join(map(str, row["shard_shape"])) or "scalar"
        table.add_row(
            _text(row["path"]),
            _text(row["dtype"]),
            _layout(row, colours),
            *([held] if is_wide else []),
            bytes_text(row["bytes_per_device"]),
            bytes_text(row["bytes_total"]),
        )
    if len(rows) > _MOST_ROWS:
        table.add_row(f"… {len(rows) - _MOST_ROWS} more")
    table.columns[0].footer = "total"
    for column, key in zip(table.columns[-2:], ("bytes_per_device", "bytes_total"), strict=True):
        column.footer = bytes_text(sum(row[key] for row in rows))
    return table


def _layout(row: Mapping[str, Any], colours: _Colours) -> Text:
    """The shape, with the axes after each dimension that they cut."""
    shape, spec = row["shape"], row["spec"]
    text = _text("" if shape else "scalar")
    entries = [*(() if spec is None or isinstance(spec, str) else spec), *[None] * len(shape)]
    for number, (size, entry) in enumerate(zip(shape, entries, strict=False)):
        text.append(f"{' × ' if number else ''}{size}")
        for axis in entry_axes(entry):
            text.append("/").append_text(_text(axis, colours(axis)))
    return text.append_text(_text(f" {spec}" if isinstance(spec, str) else summing_text(row)))


# Meshes


def _mesh_data(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """A mesh in the form that reports have in JSON."""
    names = tuple(map(str, mesh.axis_names))
    types = [getattr(kind, "name", str(kind)) for kind in mesh.axis_types]
    ids = None
    if isinstance(mesh, Mesh):
        ids = np.reshape([device.id for device in mesh.devices.flat], mesh.devices.shape).tolist()
    return {
        "axes": dict(zip(names, mesh.axis_sizes, strict=True)),
        "axis_types": dict(zip(names, types, strict=True)),
        "device_ids": ids,
    }


def _mesh(mesh: Mapping[str, Any], colours: _Colours) -> list[RenderableType]:
    """The axes in a line, then grids of the last two, one for each place on the others."""
    axes: dict[str, int] = mesh["axes"]
    types = mesh.get("axis_types") or {}
    line = _text("mesh")
    for number, (axis, size) in enumerate(axes.items()):
        line.append(" × " if number else " ").append_text(_text(axis, colours(axis)))
        line.append_text(_text(f" {size} ({types.get(axis, '?')})"))
    count = math.prod(axes.values())
    if count > _MOST_DEVICES:
        return [line, _text(f"{count} devices, too many to draw")]
    ids = np.full(tuple(axes.values()), "·") if mesh["device_ids"] is None else mesh["device_ids"]
    grid = np.reshape(np.asarray(ids).astype(str), tuple(axes.values()))
    names = list(axes)
    pictures: list[RenderableType] = [line]
    for place in np.ndindex(*grid.shape[:-2]):
        if place:
            told = zip(names, place, strict=False)
            pictures.append(_text(", ".join(f"{axis} {i}" for axis, i in told)))
        pictures.append(_grid(grid[place], names[-2:], colours))
    return pictures


def _grid(ids: np.ndarray[Any, Any], names: Sequence[str], colours: _Colours) -> Table:
    from rich.table import Table

    rows = np.atleast_2d(ids)
    table = Table(box=None, show_header=False)
    column, row = (names[-1] if names else ""), (names[0] if len(names) > 1 else "")
    heads = [_text(f"{column} {i}", colours(column)) for i in range(rows.shape[1])]
    table.add_row("", *(heads if column else ()))
    for number, line in enumerate(rows):
        head = _text(f"{row} {number}" if row else "", colours(row))
        table.add_row(head, *map(_text, line))
    return table


# Arrays


def _shape_of(array: Any) -> tuple[int, ...]:
    shape = getattr(array, "shape", array)
    try:
        return tuple(map(int, shape))
    except (TypeError, ValueError):
        raise TypeError(f"array is an array or a shape, not {array!r}.") from None


def _sharding_of(array: Any, sharding: Any, mesh: Any) -> Sharding:
    sharding = getattr(array, "sharding", None) if sharding is None else sharding
    if isinstance(sharding, PartitionSpec):
        if mesh is None:
            raise ValueError(f"{sharding} has no mesh. Pass mesh=...")
        sharding = NamedSharding(mesh, sharding)
    if not isinstance(sharding, Sharding):
        raise ValueError("the array has no sharding. Pass sharding=..., and mesh=... for a spec.")
    return sharding


def _parts(parts: Sequence[Part], cut: Sequence[int], width: int) -> Table:
    """A picture if there can be one that is no wider than this, else a list."""
    columns = len({part.slices[cut[-1]].start for part in parts}) if cut else 1
    widest = max(len(_holders(part)) for part in parts)
    fits = (columns + 1) * (widest + 2) <= width or columns == 1
    return _part_grid(parts, cut) if len(cut) <= 2 and fits else _part_list(parts)


def _part_list(parts: Sequence[Part]) -> Table:
    table = _table([("part", "left"), ("devices", "left")])
    for part, colour in zip(parts[:_MOST_DEVICES], itertools.cycle(_COLOURS), strict=False):
        table.add_row(_text(_bounds(part.slices)), _text(_holders(part), colour))
    if len(parts) > _MOST_DEVICES:
        table.add_row(f"… {len(parts) - _MOST_DEVICES} more")
    return table


def _part_grid(parts: Sequence[Part], cut: Sequence[int]) -> Table:
    """Rows are the first of two dimensions that are cut, columns the second."""
    from rich.table import Table

    def place(part: Part) -> tuple[str, str]:
        along = [_bounds((part.slices[i],))[1:-1] for i in cut]
        if len(along) == 2:
            return along[0], along[1]
        is_rows = list(cut) == [0] and len(part.slices) > 1
        [only] = along or ["whole"]
        return (only, "") if is_rows else ("", only)

    cells = {place(part): part for part in parts}
    columns = list(dict.fromkeys(column for _, column in cells))
    colours = itertools.cycle(_COLOURS)
    table = Table(box=None, show_header=False)
    if any(columns):
        table.add_row("", *map(_text, columns))
    for row in dict.fromkeys(row for row, _ in cells):
        line = (_text(_holders(cells[row, column]), next(colours)) for column in columns)
        table.add_row(_text(row), *line)
    return table


def _bounds(slices: Slices) -> str:
    return f"[{', '.join(f'{dim.start}:{dim.stop}' for dim in slices)}]"


def _holders(part: Part) -> str:
    left = len(part.holders) - _MOST_HOLDERS
    shown = " ".join(part.holders[:_MOST_HOLDERS])
    return f"{shown} … {left} more" if left > 0 else shown


# Reports


def _report(data: Mapping[str, Any], width: int) -> Iterable[RenderableType]:
    parameters, collectives = data.get("parameters") or [], data.get("collectives") or []
    mesh = data.get("mesh")
    colours = _Colours(
        [*([] if mesh is None else [mesh["axes"]]), *(spec_axes(row["spec"]) for row in parameters)]
    )
    yield _text(data.get("name") or "report", "bold")
    yield _text(made_with(data), "dim")
    if mesh is not None:
        yield from _mesh(mesh, colours)
    if data.get("memory"):
        yield from ("", _memory(data["memory"]))
    yield from ("", _figures(data))
    if collectives:
        yield from ("", _sent(collectives, colours))
    if parameters:
        yield from ("", _parameters(parameters, colours, width))


def _memory(memory: Mapping[str, Any]) -> Table:
    table = _table([("memory of each device", "left"), ("", "left"), ("", "right")])
    known = {
        name: n for name, n in memory.items() if isinstance(n, int) and (n or "host" not in name)
    }
    most = max(known.values(), default=0)
    for name, size in known.items():
        bar = "█" * (round(24 * size / most) if most else 0)
        table.add_row(_text(name.replace("_", " ")), _text(bar, "blue"), bytes_text(size))
    return table


def _figures(data: Mapping[str, Any]) -> Table:
    cost = (data.get("cost") or {}).get("executed") or {}
    table = _table([("on each device", "left"), ("", "right")])
    table.add_row("floating point operations", count_text(cost.get("flops")))
    table.add_row("bytes accessed", bytes_text(cost.get("bytes_accessed")))
    table.add_row(
        "sent to other devices", bytes_text(sum(map(moved, data.get("collectives") or [])))
    )
    roofline = data.get("roofline")
    if roofline:
        for kind in ("compute", "memory", "interconnect"):
            bound = "  ← the bound" if kind == roofline.get("bound_by") else ""
            least = f"{kind} on {roofline.get('device')} takes at least{bound}"
            table.add_row(
                _text(least, "bold" if bound else ""), time_text(roofline.get(f"{kind}_s"))
            )
    return table


def _sent(collectives: Sequence[Mapping[str, Any]], colours: _Colours) -> Table:
    header = [("collectives", "left"), ("axes", "left"), ("count", "right"), ("sent", "right")]
    table = _table(header)
    for sent in sent_by_kind(collectives):
        axes = _text("no axes fit" if sent.axes is None else "" if sent.axes else "none")
        for axis in sent.axes or ():
            axes.append_text(_text(axis, colours(axis))).append(" ")
        table.add_row(_text(sent.kind), axes, str(sent.number), bytes_text(sent.bytes_sent))
    return table


def _comparison(data: Mapping[str, Any]) -> Iterable[RenderableType]:
    """A row for each strategy, the best of those that fit marked; then what failed."""
    reports = reports_of(data)
    figures = {name: _compared(each) for name, each in reports.items() if "error" not in each}
    limit = data.get("memory_limit")
    fitting = [own for own in figures.values() if limit is None or (own[0] or 0) <= limit]
    columns = list(zip(*fitting, strict=True)) or [()] * 4
    best = [min((n for n in column if n is not None), default=None) for column in columns]
    header = ("strategy", "peak memory", "sent by each device", "operations", "takes at least")
    table = _table([(name, "right" if number else "left") for number, name in enumerate(header)])
    shown = (bytes_text, bytes_text, count_text, time_text)
    for name, own in figures.items():
        cells = []
        for value, lowest, show in zip(own, best, shown, strict=True):
            is_best = value is not None and value == lowest and len(figures) > 1
            cells.append(_text(f"{'★ ' if is_best else ''}{show(value)}", "green" * is_best))
        if limit is not None and own[0] is not None and own[0] > limit:
            cells[0].append_text(_text(" does not fit", "red"))
        table.add_row(_text(name), *cells)
    yield table
    for name, each in reports.items():
        if "error" in each:
            yield _text(f"{name} failed:", "red")
            yield from (_text(f"  {line}") for line in str(each["error"]).splitlines())


def _compared(report: Mapping[str, Any]) -> tuple[float | None, ...]:
    cost = (report.get("cost") or {}).get("executed") or {}
    return (
        (report.get("memory") or {}).get("peak"),
        sum(map(moved, report.get("collectives") or [])),
        cost.get("flops"),
        bound_time(report),
    )
