"""What the devices exchange: each collective of a compiled program, with bytes and mesh axes.

A `Collectives` holds the collectives of a program, and draws them as a table. `collectives_of` in
`compiled_collectives.py` reads them from the text of the program.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, get_args

from .json_codec import UNWRITTEN
from .names import folded, in_module, operations
from .opcodes import COLLECTIVES, CollectiveKind
from .purposes import Purpose
from .tables import Pictured, Table, text
from .units import bound_text, bytes_text, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

MeshAxes: TypeAlias = tuple[str, ...] | None
K = TypeVar("K")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One array of a collective that moves several, because the compiler merges collectives.

    Attributes:
      shape: the shape of the result on one device.
      bytes: the share of ``Collective.bytes``.
      purpose: as of a collective that moves only this array, like the next fields.
      parameters: the paths of the parameters or other Variables.
      module: the module whose call it is in.
      operation: the operation that it was made from; None if nothing says which one.
      source: the line of the user's code; None if nothing says which one.
    """

    shape: tuple[int, ...]
    bytes: int
    purpose: Purpose
    parameters: tuple[str, ...]
    module: str | None
    operation: str | None
    source: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    ``bytes_sent`` is what a ring algorithm sends for n devices in a group, as in the documentation
    of NCCL's tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
    2·bytes·(n-1)/n for an all-reduce, bytes·(n-1)/n for all-gather, reduce-scatter and all-to-all.
    A permutation sends all bytes, and so does a broadcast. Of a ragged all-to-all the smaller of
    operand and result counts: devices send no more than they have, and on average no more than they
    take.

    Attributes:
      kind: such as ``all-reduce``.
      name: the name of the instruction.
      computation: the name of the computation that it is in.
      dtype: the dtype of the arrays, as HLO writes it; several are joined by ``+``.
      shapes: the shapes of its results on one device.
      bytes: the size of the larger of operand and result on one device.
      bytes_sent: the bytes that one device sends to others in one run; the maximum over devices.
      group_size: the number of devices in a group; the maximum over groups.
      num_groups: the number of groups.
      axes: the mesh axes that it runs over, or over parts of which, in the order of the mesh,
        without axes of size 1; None if no set of axes has these groups, or the mesh is not known or
        lacks one of the devices.
      axis_parts: how much of each of ``axes`` a group covers, as (2, 4) for pairs on an axis of 4;
        empty if groups cover all of each axis, and for permutations.
      in_loop: whether it is in a loop.
      conditional: whether it is in a branch of a conditional, which may not be taken.
      times: how often it runs in one call, if conditionals take the branch that sends most: 0 in
        other branches. None in a loop of unknown length.
      operation: the operation that it was made from, such as ``jit(f)/mlp/dot_general``. If the
        compiler merged several, this and the next two are those of the largest array with the
        purpose of most bytes, and the names of other operations follow.
      source: the line of the user's code, such as ``model.py:12``.
      purpose: ``parameter`` if it moves parameters to where they are used, on TPUs also by an
        all-reduce of parts in arrays of zeros; ``state`` if it does so with other Variables, such
        as a cache; ``gradient`` if it sums or moves gradients of parameters; ``sum`` if it adds up
        partial results of an operation; ``result`` if it moves what the program returns;
        ``reshard`` if it moves anything else, such as activations. None if the arguments are not
        known.
      parameters: the paths of the parameters or other Variables, those of larger arrays first; for
        results, of those updated. If the program leaves open which parameter a gradient is of,
        those that it may be of.
      module: the module whose call it is in, such as ``model.blocks[0].up``, if that is known.
      flops_beside: what the device is scheduled to compute while one run is in progress, which the
        compiler for TPUs chooses; 0 if the device waits for it.
      bytes_beside: what it reads and writes meanwhile.
      beside: the operations with most of these flops.
      parts: what each array is for, if there are several and the arguments are known. JSON omits
        it.
    """

    kind: CollectiveKind
    name: str
    computation: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    bytes_sent: int
    group_size: int
    num_groups: int
    axes: tuple[str, ...] | None
    axis_parts: tuple[tuple[int, int], ...]
    in_loop: bool
    conditional: bool
    times: int | None
    operation: str | None
    source: str | None
    purpose: Purpose | None = None
    parameters: tuple[str, ...] = ()
    module: str | None = None
    flops_beside: int = 0
    bytes_beside: int = 0
    beside: tuple[str, ...] = ()
    parts: tuple[Part, ...] = dataclasses.field(default=(), compare=False, metadata=UNWRITTEN)

    @property
    def main_part(self) -> int | None:
        """The position of the part that it is named after; None without ``parts``.

        That is the largest one with its purpose. Of several, it is that of the first parameter.
        """
        ranks = {
            i: (part.bytes, part.parameters[:1] == self.parameters[:1])
            for i, part in enumerate(self.parts)
            if part.purpose == self.purpose
        }
        return max(ranks, key=ranks.__getitem__, default=None)

    @property
    def total_bytes_sent(self) -> int | None:
        """The bytes that one device sends in all runs; None in a loop of unknown length."""
        if not self.bytes_sent:  # The number of runs does not matter.
            return 0
        return None if self.times is None else self.bytes_sent * self.times

    @property
    def over(self) -> str:
        """The mesh axes in words, with the part that a group covers: ``data+model (2 of 4)``."""
        return axes_text(self.axes, self.axis_parts)

    @property
    def of(self) -> str:
        """The paths of the first two parameters, or else the operation; empty without either."""
        more = ("…",) if len(self.parameters) > 2 else ()
        return ", ".join((*self.parameters[:2], *more)) or self.operation or ""

    def __str__(self) -> str:
        return printable("  ".join(cell for cell in _cells(self) if cell))


class Collectives(tuple[Collective, ...], Pictured):
    """The collectives of a program, in its order; ``print`` shows them as a table.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> mean = jit(lambda x: x.mean(0), in_shardings=P("data"), out_shardings=P(), mesh=mesh)
      >>> [c] = mean.lower(jnp.ones((16, 4))).compile().collectives()
      >>> c.kind, c.axes, c.bytes, c.bytes_sent
      ('all-reduce', ('data',), 16, 28)
    """

    def of(self, kind: CollectiveKind | None = None, *axes: str) -> Collectives:
        """Selects collectives by kind and by the set of mesh axes that they run over.

        Args:
          kind: such as ``all-reduce``; None for all kinds.
          *axes: exactly these axes, in any order; no axes match all axes.

        Raises:
          ValueError: ``kind`` is not a kind of collective.
        """
        if kind is not None and kind not in COLLECTIVES:
            raise ValueError(
                f"{kind!r} is not a kind of collective; use one of {sorted(COLLECTIVES)}."
            )
        chosen = []
        for collective in self:
            is_of_kind = kind is None or collective.kind == kind
            # Collectives with unknown axes (None) are chosen only if no axes are given.
            is_over_axes = not axes or {*(collective.axes or ())} == {*axes}
            if is_of_kind and is_over_axes:
                chosen.append(collective)
        return Collectives(chosen)

    @property
    def resharded(self) -> Collectives:
        """The collectives whose purpose is ``reshard``: they move activations, for example."""
        return Collectives(collective for collective in self if collective.purpose == "reshard")

    @property
    def bytes_sent(self) -> int | None:
        """The bytes that one device sends in one call; None if a loop is of unknown length."""
        return self._sums(lambda _: "all").get("all", 0)

    @property
    def bytes_sent_at_least(self) -> int:
        """The same without collectives in loops of unknown length."""
        return sum(collective.total_bytes_sent or 0 for collective in self)

    def counts(self) -> dict[CollectiveKind, int]:
        """Counts the instructions of each kind, including zeros; one in a loop counts once."""
        # Zeros are included because users' tests compare tables of all kinds.
        counts = Counter(collective.kind for collective in self)
        return {kind: counts[kind] for kind in get_args(CollectiveKind)}

    def by_kind(self) -> dict[CollectiveKind, int | None]:
        """Sums the bytes that one device sends in one call, by kind; None as in `bytes_sent`."""
        return self._sums(lambda collective: collective.kind)

    def by_axes(self) -> dict[MeshAxes, int | None]:
        """Sums the bytes that one device sends in one call, by mesh axes; None for unknown axes."""
        return self._sums(lambda collective: collective.axes)

    def by_purpose(self) -> dict[Purpose | None, int | None]:
        """Sums the bytes that one device sends in one call, by what they are for."""
        return self._sums(lambda collective: collective.purpose)

    def totals(self) -> dict[tuple[CollectiveKind, MeshAxes], tuple[int, int | None]]:
        """Counts instructions, and sums the bytes that one device sends, by kind and mesh axes."""
        numbers = Counter((collective.kind, collective.axes) for collective in self)
        sent = self._sums(lambda collective: (collective.kind, collective.axes))
        return {key: (number, sent[key]) for key, number in numbers.items()}

    def _sums(self, key: Callable[[Collective], K]) -> dict[K, int | None]:
        """Sums the bytes that one device sends in one call, by a key of each collective.

        A sum is None if the bytes of one of its collectives are unknown.
        """
        sums: dict[K, int | None] = {}
        for collective in self:
            total, sent = sums.get(key(collective), 0), collective.total_bytes_sent
            sums[key(collective)] = None if total is None or sent is None else total + sent
        return sums

    def _pictures(self, width: int) -> Iterable[RenderableType]:
        """Yields what ``print`` shows: a table of the collectives, and the sum of what they send.

        Collectives with equal cells, such as those of the modules of a list, share one row, which
        says how many they are.
        """
        if not self:
            yield text("no collectives")
            return
        yield Table(_HEADER, _counted_rows(Counter(map(_row, self))))
        sent = bound_text(self.bytes_sent, self.bytes_sent_at_least, bytes_text)
        line = f"sent by one device in one call: {sent}"
        if self.bytes_sent is None:
            line += ", as a loop is of unknown length"
        if any(collective.conditional for collective in self):
            line += ", of conditionals the branch that sends most"
        yield text(line)


def axes_text(axes: MeshAxes, parts: Sequence[tuple[int, int]] = (), *, words: bool = False) -> str:
    """Writes mesh axes as tables show them: ``data+model``, ``-`` for none, ``?`` if unknown.

    With ``words``, the latter two are ``no axes`` and ``unknown axes``. With ``parts``
    (``Collective.axis_parts``), the first one is ``data+model (2 of 4)``, for example.
    """
    unknown, none = ("unknown axes", "no axes") if words else ("?", "-")
    if axes is None:
        return unknown
    covered = [f" ({part} of {size})" if part < size else "" for part, size in parts]
    return "+".join(map("".join, zip(axes, covered or [""] * len(axes), strict=True))) or none


class _Row(NamedTuple):
    """The cells of a collective in a table."""

    kind: str
    axes: str
    bytes: str
    sent: str
    times: str
    purpose: str
    of: str
    source: str


_HEADER = _Row._fields


def _cells(collective: Collective) -> _Row:
    """Writes the cells of a collective in full."""
    times = "?" if collective.times is None else str(collective.times)
    if collective.conditional and collective.times is not None:
        times = f"≤ {times}"
    return _Row(
        kind=collective.kind,
        axes=collective.over,
        bytes=bytes_text(collective.bytes),
        sent=bytes_text(collective.bytes_sent),
        times=times,
        purpose=collective.purpose or "",
        of=collective.of,
        source=collective.source or "",
    )


def _row(collective: Collective) -> _Row:
    """Writes the cells of a collective in a table, so that they are equal for modules of a list.

    For example, ``model.blocks[0].up.kernel`` and ``model.blocks[1].up.kernel`` both become
    ``model.blocks[*].up.kernel``. The column "of" has the parameters, or else the operations, whose
    names begin with the path of the module: ``model.blocks[*].down/dot_general``. If there are
    several arrays, it has the first name and the number of other arrays: ``model.up.kernel +3``. A
    gradient that may be of several parameters has the number of these: ``model.up.kernel or 2
    others``.
    """
    row = _cells(collective)
    of = row.of
    names = collective.parameters or operations(collective.operation or "")
    if names:
        first = names[0]
        if not collective.parameters and collective.module:
            first = in_module(first, collective.module)
        # The shapes of an all-to-all are no arrays, but what is exchanged with each device.
        is_exchange = collective.kind.endswith("all-to-all")
        arrays = 1 if is_exchange else len(collective.shapes)
        # An array may be moved for several parameters, but it is the gradient of only one. More
        # names than arrays are therefore the parameters that it may be of.
        is_gradient = collective.purpose == "gradient"
        others = (arrays if is_gradient else max(len(names), arrays)) - 1
        of = f"{first} +{others}" if others else first
        if is_gradient and len(names) > arrays:
            of = _or_others(names) + (f" +{others}" if others else "")
    of = _FUNCTION.sub("", of)  # "jit(step)/up/dot_general" → "up/dot_general"
    return row._replace(of=folded(of), source=_end(row.source, longest=15))


def _or_others(names: Sequence[str]) -> str:
    """Writes a name of which any may be meant: ``model.up.kernel or 2 others``.

    Names of the modules of a list count as one, because a row does not tell them apart.
    """
    count = len({*map(folded, names)}) - 1
    return f"{names[0]} or {count} other{'s' if count > 1 else ''}" if count else names[0]


def _counted_rows(row_counts: Mapping[_Row, int]) -> list[_Row]:
    """Writes how many collectives share a row, and shortens the column "of" so that rows fit.

    ``row_counts`` has the different rows, each with the number of collectives that share it.
    """
    columns = zip(_HEADER, *row_counts, strict=True)
    widths = dict(zip(_HEADER, (max(map(len, column)) for column in columns), strict=True))
    # Texts in the column "of" are cut to 26 characters at most, or to fewer, so that a row fits
    # into 100 characters with the two spaces after each cell. With fewer than 22, the parameters of
    # several layers would look the same.
    width_of_others = sum(widths.values()) - widths["of"] + 2 * len(widths)
    longest = max(22, min(26, 100 - width_of_others))
    rows = []
    for row, count in row_counts.items():
        number = f" ({count} ×)" if count > 1 else ""
        of = _end(row.of, longest=longest - len(number)) + number
        rows.append(row._replace(of=of))
    return rows


def _end(name: str, longest: int) -> str:
    """Shortens a name to its last ``longest`` characters, but to no fewer than 8."""
    longest = max(longest, 8)
    return f"…{name[1 - longest :]}" if len(name) > longest else name


# The traced function, with which the name of each operation begins.
_FUNCTION = re.compile(r"^jit\([^/]*\)/")
