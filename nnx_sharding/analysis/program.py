"""A compiled program in one object that can be printed, saved and compared.

A `ProgramReport` has a part for each subject: arguments, memory, cost, collectives, roofline. Each
draws itself where it is printed: `_pictures` yields what `print` and notebooks show, texts, tables
and other parts. A part that is not known is None, and ``why_unread`` says why.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax
import jax
from jax.sharding import Sharding

from .._version import __version__
from .by_line import LineTable
from .by_module import ModuleTable
from .collectives import Collectives, axes_text
from .cost import Cost
from .hardware import HARDWARE, Hardware
from .hlo import why_unread
from .json_codec import JsonForm
from .memory import Memory
from .meshes import MeshDescription
from .parameters import ActivationRow, ParameterRow, activations_table, mesh_of, rows_table
from .reasons import Reason
from .roofline import Roofline, cpu_caveat, roofline_of
from .tables import Table, axis_styles, text
from .units import bytes_text, time_text


@dataclasses.dataclass(frozen=True)
class ProgramReport(JsonForm):
    """A compiled program: what ``Compiled.report()`` returns. ``print`` shows a summary.

    Attributes:
      name: the name of the function, or the one that the user gave.
      made_with: the versions of the libraries and of Python with which it was compiled.
      platform: such as ``cpu`` or ``tpu``.
      device_kind: the kind of the devices, as JAX names it.
      num_devices: how many it runs on.
      mesh: the mesh; None without one.
      parameters: the argument arrays, in path order.
      memory: what it takes on one device; None if the backend does not report it.
      cost: what a device computes, with loop bodies counted as often as they run; None if the text
        is not understood.
      collectives: what the devices exchange; None if the text is not understood.
      activations: what modules return, in the order of their calls.
      roofline: the time at peak rates, with loop bodies counted as often as they run; None if the
        hardware is not known.
      hlo: the text of the compiled program; None if the backend has none.
      by_module: memory and cost by module; None unless it was asked for.
      by_line: types, cost and memory by line, with ``by_module``.
      reasons: what ``Compiled.why`` says, by the path of an argument or the name of a collective,
        with ``by_module``.

    Example:
      >>> import jax
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.report import ProgramReport
      >>> x = jax.ShapeDtypeStruct((8, 4), "float32")
      >>> report = jit(lambda x: x * 2).lower(x).compile().report("double")
      >>> report.name, report.memory.by_path, report.cost.flops
      ('double', {'x': 128}, 32.0)
      >>> ProgramReport.from_json(report.to_json()) == report
      True
    """

    name: str
    made_with: Mapping[str, str]
    platform: str
    device_kind: str
    num_devices: int
    mesh: MeshDescription | None
    parameters: tuple[ParameterRow, ...]
    memory: Memory | None
    cost: Cost | None
    collectives: Collectives | None
    activations: tuple[ActivationRow, ...]
    roofline: Roofline | None
    hlo: str | None
    by_module: ModuleTable | None = None
    by_line: LineTable | None = None
    reasons: Mapping[str, Reason] = dataclasses.field(default_factory=dict)

    _FORMAT = "nnx_sharding.report"
    _VERSION = 12
    _NOUN = "report of a program"

    def save(self, path: str | os.PathLike[str], *, hlo: bool = True) -> None:
        """Writes it to a file as JSON; an existing file is replaced.

        Args:
          path: the file.
          hlo: whether to write the text of the program, which is most of a report.
        """
        if not hlo:
            dataclasses.replace(self, hlo=None).save(path)
            return
        super().save(path)

    def with_roofline(self, hardware: Hardware | str) -> ProgramReport:
        """Returns the same report with another roofline.

        Args:
          hardware: the peak figures, or a key of ``HARDWARE``, such as ``"TPU v5e"``.
        """
        roofline = roofline_of(self.cost, self.collectives, hardware, self.mesh, self.platform)
        return dataclasses.replace(self, roofline=roofline)

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields the parts of the report, from top to bottom, for a terminal of this width.

        An empty text is an empty line between two parts.
        """
        mesh = "no mesh" if self.mesh is None else f"mesh {self.mesh}"
        yield text(f"{self.name}: {self.num_devices} × {self.device_kind}, {mesh}", "bold")
        versions = ", ".join(f"{name} {version}" for name, version in self.made_with.items())
        yield text(f"made with {versions}", "dim")
        # The largest arrays are what matters to memory.
        largest = sorted(self.parameters, key=lambda row: -row.bytes_per_device)
        yield ""
        yield rows_table(largest, width, most=12)
        yield ""
        if self.activations:
            yield activations_table(self.activations, most=12)
            yield ""
        yield text("memory: unknown") if self.memory is None else self.memory
        if self.by_module is not None:
            yield ""
            yield self.by_module
        yield ""
        yield self.cost or text(f"cost: unknown, {why_unread(self.hlo)}")
        yield ""
        yield self._sums_of_collectives()
        collectives = self.collectives or Collectives()
        sent = collectives.by_purpose()
        if any(sent):
            parts = (f"{purpose} {bytes_text(size)}" for purpose, size in sent.items())
            yield text(f"sent for: {', '.join(parts)}")
        if collectives.resharded:
            yield ""
            yield collectives.resharded
        if self.roofline is not None:
            yield ""
            yield self.roofline
            if (caveat := cpu_caveat(self.roofline, self.platform)) is not None:
                yield text(caveat)
        if self.cost is not None and self.cost.optimal_seconds is not None:
            estimate = time_text(self.cost.optimal_seconds)
            yield text(f"the compiler's own estimate: {estimate}, bodies of loops counted once")
        # An example of what `Compiled.why` explains, which takes the name of a collective or the
        # path of an argument: first those that a user may want to change.
        subjects = [x.name for x in collectives.resharded]
        subjects += [row.path for row in self.parameters]
        if subjects:
            line = f'compiled.why("{subjects[0]}") says why it is so; as for any path above'
            yield text(line, "dim")

    def _sums_of_collectives(self) -> Any:
        """Draws what one device sends, by kind and mesh axes."""
        if self.collectives is None:
            return text(f"collectives: unknown, {why_unread(self.hlo)}")
        if not self.collectives:
            return text("no collectives")
        styles = axis_styles(() if self.mesh is None else self.mesh.axes)
        rows = [
            (kind, text(axes_text(axes), styles=styles), str(number), bytes_text(sent))
            for (kind, axes), (number, sent) in self.collectives.totals().items()
        ]
        total = ("total", "", str(len(self.collectives)), bytes_text(self.collectives.bytes_sent))
        return Table(("collectives", "axes", "count", "sent"), rows, numbers=2, footer=total)


def describe(
    compiled: Any, name: str, hlo: str | None, activations: Iterable[ActivationRow]
) -> ProgramReport:
    """Makes the report of a program.

    Args:
      compiled: a ``Compiled``, whose method ``report`` calls this. Its class is not imported: it is
        in ``transforms``, which this package does not depend on.
      name: the name of the function.
      hlo: the text of the compiled program; None if the backend has none.
      activations: what modules return.
    """
    # The shardings of all arguments and results; some are None.
    shardings = compiled.shardings()
    mesh = mesh_of(shardings)
    first, *others = devices_of(shardings)
    versions = {"nnx_sharding": __version__, "jax": jax.__version__, "flax": flax.__version__}
    memory = compiled.memory()
    report = ProgramReport(
        name=name,
        made_with=versions | {"python": platform.python_version()},
        platform=first.platform,
        device_kind=first.device_kind,
        num_devices=1 + len(others),
        mesh=None if mesh is None else MeshDescription.of(mesh),
        parameters=tuple(compiled.parameters()),
        # The function of ``memory`` that makes the table by module is removed, because it refers to
        # the program, which would stay in memory as long as the report.
        memory=None if memory is None else dataclasses.replace(memory, by_module=None),
        cost=compiled.cost(),
        collectives=compiled.collectives(),
        activations=tuple(activations),
        roofline=None,
        hlo=hlo,
    )
    hardware = HARDWARE.get(first.device_kind)  # None for virtual CPU devices
    return report if hardware is None else report.with_roofline(hardware)


def devices_of(shardings: Sequence[Sharding | None]) -> list[jax.Device]:
    """Lists the devices that run a program, by the shardings of its arguments and results."""
    mesh = mesh_of(shardings)
    if mesh is not None:
        return [*mesh.devices.flat]
    # Without a mesh, the arguments that are on most devices say which run the program.
    sets = [sharding.device_set for sharding in shardings if isinstance(sharding, Sharding)]
    devices = max(sets, key=len, default={jax.devices()[0]})
    return sorted(devices, key=lambda device: device.id)
