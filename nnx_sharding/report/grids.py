"""Grids of devices: their places in a mesh, and the slices of an array that each holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from ..analysis.meshes import MeshDescription
from ..analysis.tables import COLOURS, axis_styles, grid, table, text
from ..specs.fitting import axes_of, fit_sharding

if TYPE_CHECKING:
    from rich.console import RenderableType

# Where a slice of an array begins and ends in each dimension.
Spans: TypeAlias = tuple[tuple[int, int], ...]

_MAX_DEVICES = 512
_MAX_HOLDERS = 8


def mesh_pictures(mesh: MeshDescription) -> Iterator[RenderableType]:
    """The axes in a line, then grids of the last two, one for each place on the others."""
    names, sizes = list(mesh.axes), tuple(mesh.axes.values())
    styles = axis_styles(names)
    kinds = (f"{name} {mesh.axes[name]} ({mesh.axis_types.get(name, '?')})" for name in names)
    yield text(f"mesh {' × '.join(kinds)}", styles=styles)
    if math.prod(sizes) > _MAX_DEVICES:
        yield text(f"{math.prod(sizes)} devices, too many to draw")
        return
    ids = np.full(sizes, "·") if mesh.device_ids is None else np.reshape(mesh.device_ids, sizes)
    row, column = ["", "", *names][-2:]
    for place in np.ndindex(*sizes[:-2]):
        if place:
            yield text(", ".join(f"{name} {i}" for name, i in zip(names, place, strict=False)))
        lines = np.atleast_2d(ids[place]).tolist()
        heads = [f"{column} {i}" for i in range(len(lines[0]))] if column else []
        body = [[f"{row} {i}" if row else "", *line] for i, line in enumerate(lines)]
        yield grid([["", *heads], *body] if heads else body, styles)


def array_pictures(
    shape: tuple[int, ...], sharding: Sharding, width: int
) -> Iterator[RenderableType]:
    """A line, then a grid of the slices if it fits the width, else a list of them."""
    held = holders_of(shape, sharding)
    split = [i for i in range(len(shape)) if len({spans[i] for spans in held}) > 1]
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    head = f"{shape} as {spec}; each device holds {tuple(sharding.shard_shape(shape))}"
    if len(split) == 2 < len(shape):
        head += f"; rows are dimension {split[0]}, columns dimension {split[1]}"
    yield text(head)
    shown = {}
    for (spans, holders), colour in zip(held.items(), itertools.cycle(COLOURS), strict=False):
        more = [f"… {len(holders) - _MAX_HOLDERS} more"] * (len(holders) > _MAX_HOLDERS)
        shown[spans] = text(" ".join([*holders[:_MAX_HOLDERS], *more]), colour)
    columns = len({spans[split[-1]] for spans in held}) if split else 1
    fits = columns == 1 or (columns + 1) * (max(map(len, shown.values())) + 2) <= width
    if len(split) <= 2 and fits:
        cells = {}
        for spans, cell in shown.items():
            row, column = ["", "", *(f"{spans[i][0]}:{spans[i][1]}" for i in split)][-2:]
            only_rows = split == [0] and len(shape) > 1
            cells[(column, row) if only_rows else (row, column or "full array")] = cell
        rows, heads = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
        body = [[row, *(cells[row, head] for head in heads)] for row in rows]
        yield grid([["", *heads], *body] if any(heads) else body)
        return
    slices = (f"[{', '.join(f'{start}:{stop}' for start, stop in spans)}]" for spans in shown)
    yield table(("slice", "devices"), [*zip(slices, shown.values(), strict=True)][:_MAX_DEVICES])
    if len(shown) > _MAX_DEVICES:
        yield text(f"… {len(shown) - _MAX_DEVICES} more")


def holders_of(shape: tuple[int, ...], sharding: Sharding) -> dict[Spans, list[str]]:
    """The ids of the devices that hold each slice of an array, in the order of the slices.

    On an abstract mesh they are positions, such as ``data=0``.

    Raises:
      ValueError: the sharding does not divide the shape.
    """
    if isinstance(sharding, NamedSharding):
        fit = fit_sharding(sharding, None, shape)
        if fit.problems:
            raise ValueError(f"{sharding.spec} does not fit the shape {shape}: {fit.reasons}")
        if isinstance(sharding.mesh, AbstractMesh):
            return dict(_positions(shape, sharding))
    held: dict[Spans, list[str]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device in sorted(indices, key=lambda device: device.id):
        index = indices[device] or (slice(None),) * len(shape)
        spans = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        held.setdefault(tuple(spans), []).append(str(device.id))
    return dict(sorted(held.items()))


def _positions(
    shape: tuple[int, ...], sharding: NamedSharding
) -> Iterator[tuple[Spans, list[str]]]:
    """Each slice with its position on the axes that partition the array."""
    sizes = sharding.mesh.shape
    entries = [axes_of(entry) for entry in sharding.spec.partitions]
    entries += [()] * (len(shape) - len(entries))
    used = [axis for axes in entries for axis in axes]
    for position in itertools.product(*(range(sizes[axis]) for axis in used)):
        at = dict(zip(used, position, strict=True))
        spans = []
        for size, axes in zip(shape, entries, strict=True):
            number = 0
            for axis in axes:  # the first is the major one
                number = number * sizes[axis] + at[axis]
            length = size // math.prod(sizes[axis] for axis in axes)
            spans.append((number * length, (number + 1) * length))
        yield tuple(spans), [", ".join(f"{axis}={i}" for axis, i in at.items()) or "all"]
