"""Pictures for the terminal of the shards of arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..analysis.tables import COLOURS, table, text
from ..specs.fitting import axes_of, fit_sharding

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Where a slice of an array begins and ends in each dimension.
Spans: TypeAlias = tuple[tuple[int, int], ...]

_MAX_HOLDERS = 8


def show_array(
    array: Any,
    sharding: Sharding | PartitionSpec | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    console: Console | None = None,
) -> None:
    """Prints which slice of an array each device holds, to standard output or to ``console``.

    Like ``jax.debug.visualize_array_sharding``, but for arrays of any rank, also without data and
    on abstract meshes. An array that is partitioned in one or two dimensions is drawn as a grid of
    these, any other as a list.

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
    # A shape has none.
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
    """Yields a line, then a grid of the slices if it fits the width, else a list of them."""
    from rich.table import Table

    held = holders_of(shape, sharding)
    # The dimensions that are partitioned.
    split = [i for i in range(len(shape)) if len({spans[i] for spans in held}) > 1]
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    head = f"{shape} as {spec}; each device holds {tuple(sharding.shard_shape(shape))}"
    if len(split) == 2 < len(shape):
        head += f"; rows are dimension {split[0]}, columns dimension {split[1]}"
    yield text(head)
    shown = {}
    for (spans, holders), colour in zip(held.items(), itertools.cycle(COLOURS), strict=False):
        words = holders[:_MAX_HOLDERS]
        if len(holders) > _MAX_HOLDERS:
            words = [*words, f"… {len(holders) - _MAX_HOLDERS} more"]
        shown[spans] = text(" ".join(words), colour)
    columns = len({spans[split[-1]] for spans in held}) if split else 1
    fits = columns == 1 or (columns + 1) * (max(map(len, shown.values())) + 2) <= width
    if len(split) > 2 or not fits:
        slices = [f"[{', '.join(f'{start}:{stop}' for start, stop in spans)}]" for spans in shown]
        rows = [*zip(slices, shown.values(), strict=True)]
        yield table(("slice", "devices"), rows, most=512)
        return
    cells = {}
    for spans, cell in shown.items():
        row, column = ["", "", *(f"{spans[i][0]}:{spans[i][1]}" for i in split)][-2:]
        # A matrix whose rows are partitioned is drawn as a column.
        only_rows = split == [0] and len(shape) > 1
        cells[(column, row) if only_rows else (row, column or "full array")] = cell
    names, heads = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    grid = Table(box=None, show_header=False)
    if any(heads):
        grid.add_row("", *map(text, heads))
    for name in names:
        grid.add_row(text(name), *(cells[name, head] for head in heads))
    yield grid


def holders_of(shape: tuple[int, ...], sharding: Sharding) -> dict[Spans, list[str]]:
    """Lists the ids of devices, or positions such as ``data=0``, that hold each slice."""
    if isinstance(sharding, NamedSharding):
        fit = fit_sharding(sharding, None, shape)
        if fit.problems:
            raise ValueError(f"{sharding.spec} does not fit the shape {shape}: {fit.reasons}")
        if isinstance(sharding.mesh, AbstractMesh):
            return dict(_positions(shape, sharding.spec, sharding.mesh.shape))
    held: dict[Spans, list[str]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device in sorted(indices, key=lambda device: device.id):
        index = indices[device] or (slice(None),) * len(shape)  # of a scalar
        spans = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        held.setdefault(tuple(spans), []).append(str(device.id))
    return dict(sorted(held.items()))


def _positions(
    shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]
) -> Iterator[tuple[Spans, list[str]]]:
    """Yields each slice with its position on the axes that partition the array."""
    used = [axis for entry in spec.partitions for axis in axes_of(entry)]
    for position in itertools.product(*(range(sizes[axis]) for axis in used)):
        place = dict(zip(used, position, strict=True))
        spans = []
        for size, entry in itertools.zip_longest(shape, spec.partitions):
            number, parts = 0, 1
            for axis in axes_of(entry):  # the first is the major one
                number, parts = number * sizes[axis] + place[axis], parts * sizes[axis]
            spans.append((number * size // parts, (number + 1) * size // parts))
        yield tuple(spans), [", ".join(f"{axis}={i}" for axis, i in place.items()) or "all"]
