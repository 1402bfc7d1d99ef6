"""The table of activations: what modules return, how it is sharded, and what decided that."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from jax.sharding import PartitionSpec

from .memory import array_bytes
from .parameters import full_spec, shape_text, spec_styles, spec_text
from .tables import Pictured, table, text
from .units import bytes_text

ChosenBy: TypeAlias = Literal["user", "strategy", "types", "compiler"]


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationRow:
    """How one array that a module returns is sharded.

    Attributes:
      path: the module, such as ``model.blocks[0].up``.
      module: the name of its class.
      method: the method that returned the array.
      output: where the array is in the output of the method, such as ``[0]``; empty if it is all of
        the output.
      shape: the shape of the array in the call; without mapped dimensions under ``vmap``.
      dtype: its dtype.
      spec: its ``PartitionSpec``, with one entry per dimension; None if the compiler chooses.
      shard_shape: the shape of the shard of one device; None if the compiler chooses.
      bytes_per_device: the size of that shard.
      bytes_total: the size of the array.
      chosen_by: ``user`` if the transform was given the spec; ``strategy`` if it came with the
        shardings of an argument, or was inferred for them; ``types`` if it follows from the types
        of arrays on Explicit axes; ``compiler`` if none of these says how the array is sharded.
    """

    path: str
    module: str
    method: str
    output: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None
    shard_shape: tuple[int, ...] | None
    bytes_per_device: int | None
    bytes_total: int
    chosen_by: ChosenBy

    @property
    def name(self) -> str:
        """The path, the method unless it is ``__call__``, and the array's place in the output."""
        return self.path + f".{self.method}()" * (self.method != "__call__") + self.output


class ActivationTable(list[ActivationRow], Pictured):
    """Rows of activations; ``print`` and notebooks show them as a table."""

    def _pictures(self, width: int) -> Iterable[Any]:
        yield activations_table(self)


def activation_rows(calls: Iterable[Any]) -> ActivationTable:
    """The rows of recorded calls of modules, without duplicates, as from a loop traced twice."""
    return ActivationTable(dict.fromkeys(map(_row, calls)))


def _row(call: Any) -> ActivationRow:
    spec = shard_shape = bytes_per_device = None
    if call.sharding is not None:
        spec, shard_shape = call.sharding.spec, tuple(call.sharding.shard_shape(call.shape))
        spec = full_spec(spec, len(call.shape))
        bytes_per_device = array_bytes(shard_shape, call.dtype)
    dtype, total = str(call.dtype), array_bytes(call.shape, call.dtype)
    return ActivationRow(
        *(call.path, call.module, call.method, call.output, tuple(call.shape), dtype, spec),
        *(shard_shape, bytes_per_device, total, call.chosen_by),
    )


_HEADER = ("activation", "module", "shape", "dtype", "spec", "chosen by", "bytes/device", "bytes")


def activations_table(rows: Iterable[ActivationRow], most: int = 200) -> Any:
    """The table for consoles, with coloured axes, and units for bytes."""
    rows = list(rows)
    styles = spec_styles(rows)
    lines = (
        (
            *(row.name, row.module, shape_text(row.shape), row.dtype),
            *(text(spec_text(row.spec), styles=styles), row.chosen_by),
            *(bytes_text(row.bytes_per_device), bytes_text(row.bytes_total)),
        )
        for row in rows
    )
    return table(_HEADER, lines, numbers=2, most=most)
