"""Pictures for the terminal of the shards of arrays.

A *slice* is the part of an array that a device holds, written ``[0:32, 0:128]``; its *spans* are
the beginning and the end in each dimension. Devices with the same slice are its *holders*.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..analysis.tables import COLOURS, Table, text
from ..specs.fitting import axes_of, fit_sharding

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# Where a slice of an array begins and ends in each dimension.
Spans: TypeAlias = tuple[tuple[int, int], ...]

_MAX_HOLDERS = 8  # the most holders that are named for a slice


def show_array(
    array: Any,
    sharding: Sharding | PartitionSpec | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    console: Console | None = None,
) -> None:
    """Prints which slice of an array each device holds, to standard output or to ``console``.

    It is like ``jax.debug.visualize_array_sharding``, but takes arrays of any rank, also without
    data and on abstract meshes. An array that is partitioned in one or two dimensions is drawn as a
    grid of these dimensions if the console is wide enough. Any other array is drawn as a list.

    Args:
      array: an array, a ``jax.ShapeDtypeStruct``, or a shape.
      sharding: its sharding, or a spec; None uses that of the array.
      mesh: the mesh of a spec.
      console: where to print.

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
    shape = getattr(array, "shape", array)
    try:
        shape = tuple(map(int, shape))
    except (TypeError, ValueError):
        raise TypeError(f"array must be an array or a shape, got {array!r}.") from None
    # A shape has no sharding of its own, so ``sharding`` is needed for one.
    sharding = getattr(array, "sharding", None) if sharding is None else sharding
    if isinstance(sharding, PartitionSpec):
        if mesh is None:
            raise ValueError(f"{sharding} has no mesh. Pass mesh=...")
        sharding = NamedSharding(mesh, sharding)
    if not isinstance(sharding, Sharding):
        raise ValueError("the array has no sharding. Pass sharding=..., and mesh=... for a spec.")
    from rich.console import Console

    console = Console() if console is None else console
    for picture in _pictures(shape, sharding, console.width):
        console.print(picture)


def _pictures(shape: tuple[int, ...], sharding: Sharding, width: int) -> Iterator[RenderableType]:
    """Yields what ``show_array`` prints: a line, and below it the holders of each slice.

    The holders are a grid if at most two dimensions are partitioned, and if the grid fits into
    ``width`` characters. Otherwise they are a list.
    """
    # A slice is named by its span (start, stop) in each dimension.
    held = holders_of(shape, sharding)
    # Slices have different spans in the dimensions that are partitioned.
    partitioned = [
        dimension
        for dimension in range(len(shape))
        if len({spans[dimension] for spans in held}) > 1
    ]
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    head = f"{shape} as {spec}; each device holds {tuple(sharding.shard_shape(shape))}"
    # For an array of two dimensions, it is clear what rows and columns are.
    if len(partitioned) == 2 and len(shape) > 2:
        head += f"; rows are dimension {partitioned[0]}, columns dimension {partitioned[1]}"
    yield text(head)
    cells = _cells(held)
    # The columns of a grid are the parts of the last partitioned dimension, and one for the titles
    # of rows. A grid with a single part in each row is drawn in any width.
    num_columns = len({spans[partitioned[-1]] for spans in held}) if partitioned else 1
    cell_width = max(map(len, cells.values())) + 2
    fits = num_columns == 1 or (num_columns + 1) * cell_width <= width
    if len(partitioned) <= 2 and fits:
        yield _grid(cells, partitioned, is_matrix=len(shape) > 1)
        return
    slices = [f"[{', '.join(f'{start}:{stop}' for start, stop in spans)}]" for spans in cells]
    rows = list(zip(slices, cells.values(), strict=True))
    # At most 512 rows are drawn, and a last row says how many are left out.
    yield Table(("slice", "devices"), rows, most=512)


def _cells(held: Mapping[Spans, Sequence[str]]) -> dict[Spans, Text]:
    """Writes the holders of each slice, in a colour. Colours repeat if there are many slices."""
    cells = {}
    for (spans, holders), colour in zip(held.items(), itertools.cycle(COLOURS), strict=False):
        words = [*holders[:_MAX_HOLDERS]]
        if len(holders) > _MAX_HOLDERS:
            words.append(f"… {len(holders) - _MAX_HOLDERS} more")
        cells[spans] = text(" ".join(words), colour)
    return cells


def _grid(
    cells: Mapping[Spans, Text], partitioned: Sequence[int], *, is_matrix: bool
) -> RenderableType:
    """Draws a cell for each slice, in rows and columns.

    Args:
      partitioned: the dimensions that are partitioned: two, one or none.
      is_matrix: whether the array has more than one dimension.
    """
    from rich.table import Table

    by_place: dict[tuple[str, str], Text] = {}  # by the titles of row and column
    for spans, cell in cells.items():
        titles = [f"{spans[dimension][0]}:{spans[dimension][1]}" for dimension in partitioned]
        if len(titles) == 2:
            row, column = titles
        elif partitioned == [0] and is_matrix:  # Parts of rows stand below each other.
            row, column = titles[0], ""
        else:
            row, column = "", titles[0] if titles else "full array"
        by_place[row, column] = cell
    rows = list(dict.fromkeys(row for row, _ in by_place))
    columns = list(dict.fromkeys(column for _, column in by_place))
    grid = Table(box=None, show_header=False)
    if any(columns):
        grid.add_row("", *map(text, columns))
    for row in rows:
        grid.add_row(text(row), *(by_place[row, column] for column in columns))
    return grid


def holders_of(shape: tuple[int, ...], sharding: Sharding) -> dict[Spans, list[str]]:
    """Lists which devices hold each slice of an array of this shape.

    ``{((0, 4),): ["0", "1"], ((4, 8),): ["2", "3"]}`` for a vector of 8. Devices are given by their
    ids; on an abstract mesh, by positions such as ``data=0``.

    Raises:
      ValueError: the sharding does not fit the shape.
    """
    if isinstance(sharding, NamedSharding):
        fit = fit_sharding(sharding, None, shape)  # None because the sharding has its own mesh
        if fit.problems:
            raise ValueError(f"{sharding.spec} does not fit the shape {shape}: {fit.reasons}")
        if isinstance(sharding.mesh, AbstractMesh):  # An abstract mesh has no devices.
            positions = _positions(shape, sharding.spec, sharding.mesh.shape)
            return {spans: [position] for spans, position in positions}
    held: dict[Spans, list[str]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device in sorted(indices, key=lambda device: device.id):
        # JAX may give no index at all for an array that each device has whole.
        index = indices[device] or (slice(None),) * len(shape)
        # ``slice.indices`` fills in what is None: (start, stop, step).
        spans = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        held.setdefault(tuple(spans), []).append(str(device.id))
    return dict(sorted(held.items()))


def _positions(
    shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]
) -> Iterator[tuple[Spans, str]]:
    """Yields each slice of an array on an abstract mesh, with its position: ``data=0, model=1``.

    Args:
      shape: the shape of the array, which the spec divides.
      spec: its spec. Without any axis in it, the position is ``all``.
    """
    used = [axis for entry in spec.partitions for axis in axes_of(entry)]
    for indices in itertools.product(*(range(sizes[axis]) for axis in used)):
        position = dict(zip(used, indices, strict=True))  # the index along each axis
        spans = []
        for size, entry in itertools.zip_longest(shape, spec.partitions):
            # The shard is the part ``number`` of ``num_parts`` of this dimension. The indices along
            # the dimension's axes are the digits of ``number``, and the first axis has the highest.
            number, num_parts = 0, 1
            for axis in axes_of(entry):
                number = number * sizes[axis] + position[axis]
                num_parts *= sizes[axis]
            spans.append((number * size // num_parts, (number + 1) * size // num_parts))
        text_of_position = ", ".join(f"{axis}={index}" for axis, index in position.items())
        yield tuple(spans), text_of_position or "all"
