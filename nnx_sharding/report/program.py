"""All that can be told of a compiled program, to be printed, kept and compared."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import flax
import jax
import numpy as np
from jax.sharding import Mesh

from .._version import __version__
from ..analysis.arguments import Parameter, device_of
from ..analysis.collectives import Collectives, collectives_of
from ..analysis.cost import Cost, Costs
from ..analysis.hardware import Device, known
from ..analysis.hlo import parse
from ..analysis.loops import with_loops
from ..analysis.memory import Memory
from ..analysis.roofline import Roofline, roofline_of
from ..analysis.units import bytes_text, printable
from .json_form import JsonForm
from .reading import as_data, read

FORMAT = "nnx_sharding.report"
VERSION = 1

DeviceIds: TypeAlias = Any  # numbers, nested like the mesh


@dataclasses.dataclass(frozen=True, slots=True)
class Versions:
    """The versions that a program was compiled with.

    Attributes:
      nnx_sharding: ours.
      jax: that of JAX.
      flax: that of Flax.
      python: that of Python.
    """

    nnx_sharding: str
    jax: str
    flax: str
    python: str


@dataclasses.dataclass(frozen=True, slots=True)
class MeshDescription:
    """A mesh without its devices.

    Attributes:
      axes: the sizes of the axes by name, major first.
      axis_types: their types, such as ``Auto``.
      device_ids: the ids of the devices in lists that are nested like the mesh; None for an
        abstract mesh.
    """

    axes: Mapping[str, int]
    axis_types: Mapping[str, str]
    device_ids: DeviceIds

    def __post_init__(self) -> None:
        if self.device_ids is not None and not _is_nested(self.device_ids, [*self.axes.values()]):
            raise ValueError(f"mesh.device_ids are not numbers nested like the mesh {self.axes}.")


def _is_nested(ids: Any, sizes: Sequence[int]) -> bool:
    """Whether ids are numbers in lists of these sizes."""
    if not sizes:
        return type(ids) is int
    return (
        isinstance(ids, list)
        and len(ids) == sizes[0]
        and all(_is_nested(part, sizes[1:]) for part in ids)
    )


@dataclasses.dataclass(frozen=True)
class ProgramReport(JsonForm):
    """A compiled program: what ``Compiled.report()`` returns. ``print`` shows a summary.

    Attributes:
      name: the name of the function, or the one that the user gave.
      made_with: the versions of what made it.
      platform: such as ``cpu`` or ``tpu``.
      device_kind: what JAX says the devices are.
      num_devices: how many it runs on.
      mesh: the mesh; None without one.
      parameters: the argument arrays, in path order.
      memory: what it takes on one device; None if the backend does not tell.
      cost: what it computes.
      collectives: what the devices exchange.
      roofline: the least time on a device, with loops multiplied out; None if none was asked for.
      hlo: the text of the compiled program; None if the backend does not tell.

    Example:
      >>> import jax
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.report import ProgramReport
      >>> x = jax.ShapeDtypeStruct((8, 4), "float32")
      >>> report = jit(lambda x: x * 2).lower(x).compile().report("double")
      >>> report.name, report.memory.by_path, report.cost.compiled.flops
      ('double', {'x': 128}, 32.0)
      >>> ProgramReport.from_json(report.to_json()) == report
      True
    """

    name: str
    made_with: Versions
    platform: str
    device_kind: str
    num_devices: int
    mesh: MeshDescription | None
    parameters: tuple[Parameter, ...]
    memory: Memory | None
    cost: Costs
    collectives: Collectives
    roofline: Roofline | None
    hlo: str | None

    _FORMAT = FORMAT
    _VERSION = VERSION
    _NOUN = "report of a program"

    def _parts(self) -> dict[str, Any]:
        data: dict[str, Any] = as_data(self)
        return data

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> ProgramReport:
        found = read(cls, parts, cls._NOUN)
        if found.memory is None:
            return found
        by_path = {row.path: row.bytes_per_device for row in found.parameters if row.used}
        return dataclasses.replace(found, memory=dataclasses.replace(found.memory, by_path=by_path))

    def with_roofline(self, device: Device | str) -> ProgramReport:
        """The same report with the roofline of another device.

        Args:
          device: its peak figures, or its name, such as ``"TPU v5e"``.

        Raises:
          ValueError: there is no device of this name in the table.
          TypeError: it is neither a device nor a name.
        """
        roofline = roofline_of(self.cost.executed, self.collectives.bytes_sent, device)
        return dataclasses.replace(self, roofline=roofline)

    def __str__(self) -> str:
        return printable("\n".join(_summary(self)), kept="\n")

    def _repr_html_(self) -> str:
        from .page.fragment import report_html

        return report_html(self)


def describe(
    *,
    name: str,
    mesh: Mesh | None,
    shardings: Sequence[Any],
    parameters: Iterable[Parameter],
    memory: Memory | None,
    lowered: Cost | None,
    compiled: Cost | None,
    hlo: str | None,
    device: Device | str | None = None,
) -> ProgramReport:
    """Puts a report together.

    Args:
      name: of the program.
      mesh: that it was compiled for.
      shardings: of what it is given and returns; without a mesh they tell the devices.
      parameters: its arguments.
      memory: what it takes on one device.
      lowered: what it computes, before optimisation.
      compiled: what it computes, after it.
      hlo: its text.
      device: for the roofline; None for its own if the table has that.

    Raises:
      ValueError: there is no device of this name in the table.
      TypeError: ``device`` is neither a device nor a name.
    """
    own, count = device_of(mesh, shardings)
    module = parse(hlo or "")
    found = collectives_of(module, mesh)
    device = known(own.device_kind) if device is None else device
    executed = None if compiled is None else with_loops(compiled, module)
    return ProgramReport(
        name=name,
        made_with=Versions(
            __version__, jax.__version__, flax.__version__, platform.python_version()
        ),
        platform=own.platform,
        device_kind=own.device_kind,
        num_devices=count,
        mesh=None if mesh is None else _mesh_description(mesh),
        parameters=tuple(parameters),
        memory=memory,
        cost=Costs(lowered, compiled, executed),
        collectives=found,
        roofline=None if device is None else roofline_of(executed, found.bytes_sent, device),
        hlo=hlo,
    )


def _mesh_description(mesh: Mesh) -> MeshDescription:
    types = (getattr(kind, "name", str(kind)) for kind in mesh.axis_types)
    names = tuple(map(str, mesh.axis_names))
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    return MeshDescription(
        axes=dict(zip(names, mesh.devices.shape, strict=True)),
        axis_types=dict(zip(names, types, strict=True)),
        device_ids=ids.tolist(),
    )


# The summary

_MOST_ROWS = 12


def _summary(report: ProgramReport) -> list[str]:
    made = report.made_with
    lines = [
        f"{report.name}: {report.num_devices} × {report.device_kind}, {_mesh(report.mesh)}",
        f"made with nnx_sharding {made.nnx_sharding}, jax {made.jax}, flax {made.flax}, "
        f"Python {made.python}",
        "",
        *_parameters(report.parameters),
        "",
        "memory of one device",
        *_indented("the backend does not tell" if report.memory is None else str(report.memory)),
        "",
    ]
    lowered, compiled, executed = report.cost.lowered, report.cost.compiled, report.cost.executed
    without_loops = compiled is None or executed is None or compiled.flops == executed.flops
    for cost in (lowered, compiled, None if without_loops else executed):
        if cost is not None:
            lines += [f"cost {cost.stage}", *_indented(str(cost).partition("\n")[2]), ""]
    lines += ["collectives", *_indented(str(report.collectives))]
    if report.roofline is not None:
        lines += ["", "roofline", *_indented(str(report.roofline))]
    return lines


def _mesh(mesh: MeshDescription | None) -> str:
    if mesh is None:
        return "no mesh"
    return "mesh " + " × ".join(f"{axis!r} ({size})" for axis, size in mesh.axes.items())


def _parameters(rows: tuple[Parameter, ...]) -> list[str]:
    """The largest arguments as a table, with a last line for the sums."""
    largest = sorted(rows, key=lambda row: -row.bytes_per_device)[:_MOST_ROWS]
    cells = [("argument", "shape", "dtype", "spec", "on one device"), *map(_cells, largest)]
    rest = len(rows) - len(largest)
    if rest:
        cells.append((f"… and {rest} more", "", "", "", ""))
    per_device = sum(row.bytes_per_device for row in rows)
    cells.append(("total", "", "", "", bytes_text(per_device)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _cells(row: Parameter) -> tuple[str, ...]:
    marks = [mark for mark, holds in (("donated", row.donated), ("unused", not row.used)) if holds]
    return (
        " ".join([row.path, *(f"({mark})" for mark in marks)]),
        "×".join(map(str, row.shape)) or "scalar",
        row.dtype,
        row.spec_text,
        bytes_text(row.bytes_per_device),
    )


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
