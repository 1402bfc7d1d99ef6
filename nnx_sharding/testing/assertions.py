"""Assertions about compiled programs, for tests: their collectives, and the memory they take.

Each takes the result of ``lower(...).compile()`` or its report, and names the causes. It raises a
``TypeError`` for anything else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from ..analysis.activations import ActivationRow
from ..analysis.collectives import Collective, Kind
from ..analysis.parameters import ParameterRow, parameter_table
from ..analysis.units import bytes_text, read_bytes
from ..errors import raise_listed
from ..report.program import ProgramReport
from ..stages import Compiled
from .programs import (
    Axes,
    Program,
    at,
    checked_axes,
    collectives_over,
    listed,
    over_text,
    patterns,
    report_of,
    shortened,
)

__tracebackhide__ = True  # pytest shows the line of the test that failed

_Key: TypeAlias = tuple[Kind, frozenset[str] | None]


def assert_no_collective(
    program: Program,
    kind: Kind | None = None,
    axes: Axes | None = None,
    *,
    larger_than: int | str | None = None,
) -> None:
    """Fails if devices exchange anything, or anything of one kind or over some mesh axes.

    Args:
      program: a compiled function, or its report.
      kind: such as ``"all-gather"``; None for any.
      axes: a mesh axis, or several: collectives that run over any of them, or whose axes are not
        known. None for all.
      larger_than: the size on one device, in bytes or as in ``"64 KiB"``, up to which a collective
        is allowed; None allows none.

    Raises:
      AssertionError: there are such collectives; each is listed, with the line of your code.
      ValueError: the kind is unknown, the mesh has no such axis, or the size cannot be read.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_no_collective
      >>> from nnx_sharding.partition import make_mesh
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> fun = jit(lambda x: x.sum(1), in_shardings=P("data", "model"), mesh=mesh)
      >>> compiled = fun.lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
      >>> assert_no_collective(compiled, "all-gather")
      >>> assert_no_collective(compiled, axes="model")
      Traceback (most recent call last):
      AssertionError: <lambda> has 1 collective over 'model':
        all-reduce over model, 128 B, sends 192 B: jit(<lambda>)/reduce_sum, <doctest ...>:1
      ...
    """
    report, wanted, some = collectives_over(program, axes)
    allowed = -1 if larger_than is None else read_bytes(larger_than)
    hits = [one for one in some.of(kind) if one.bytes > allowed]
    if hits:
        what = f"{len(hits)} {kind or 'collective'}{'s' * (len(hits) > 1)}{over_text(wanted)}"
        raise AssertionError(
            f"{report.name} has {what}:\n{listed(hits)}\n"
            "Change the shardings, or constrain intermediate values "
            "(nnx_sharding.partition.with_sharding_constraint)."
        )


def assert_collectives(program: Program, expected: Mapping[tuple[Kind, Axes], int]) -> None:
    """Fails if the collectives of a program differ from these.

    Args:
      program: a compiled function, or its report.
      expected: the number of instructions for each kind and the mesh axes that it runs over, in any
        order: ``{("all-reduce", "model"): 2}``. One in a loop counts once.

    Raises:
      AssertionError: there are more, fewer or others; all differences are listed.
      ValueError: the kind is unknown, or the mesh has no such axis.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_collectives
      >>> from nnx_sharding.partition import make_mesh
      >>> fun = jit(lambda x: x.sum(1), in_shardings=P(None, "model"), mesh=make_mesh({"model": 8}))
      >>> compiled = fun.lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
      >>> assert_collectives(compiled, {("all-reduce", "model"): 1})
    """
    if not isinstance(expected, Mapping) or not all(
        isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) for key in expected
    ):
        raise TypeError(
            "expected must be a mapping such as {('all-reduce', 'model'): 2} from kind and axes to "
            f"a number, got {expected!r}."
        )
    report, _, collectives = collectives_over(program, None)
    wanted: Counter[_Key] = Counter()
    for (kind, axes), count in expected.items():
        collectives.of(kind)  # refuses unknown kinds
        wanted[kind, checked_axes(report, axes)] += count
    actual: dict[_Key, list[Collective]] = {key: [] for key in wanted}
    for one in collectives:
        axes_of_one = None if one.axes is None else frozenset(one.axes)
        actual.setdefault((one.kind, axes_of_one), []).append(one)
    lines: list[str] = []
    for (kind, over), some in actual.items():
        if len(some) != wanted[kind, over]:
            where = " over unknown axes" if over is None else over_text(over) or " over no axes"
            lines.append(f"  {kind}{where}: {len(some)}, expected {wanted[kind, over]}")
            lines += [f"  {line}" for line in listed(some).splitlines()]
    raise_listed(AssertionError, f"{report.name} has unexpected collectives:", lines)


def assert_bytes_sent_below(program: Program, limit: int | str, axes: Axes | None = None) -> None:
    """Fails if one device sends more than a limit to others in one call.

    Args:
      program: a compiled function, or its report.
      limit: bytes, or a text such as ``"1 GiB"``.
      axes: a mesh axis, or several: counts collectives over any of them. None for all.

    Raises:
      AssertionError: it sends more, or a loop is of unknown length; the largest collectives are
        listed.
      ValueError: the limit cannot be read, or the mesh has no such axis.

    Example:
      >>> import jax
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_bytes_sent_below
      >>> compiled = jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((64,), "float32")).compile()
      >>> assert_bytes_sent_below(compiled, "1 KiB")
    """
    most = read_bytes(limit)
    report, wanted, some = collectives_over(program, axes)
    if some.bytes_sent > most or some.has_unknown_times:
        largest = sorted(some, key=lambda one: -one.total_bytes_sent)
        more = " or more, as a loop is of unknown length," if some.has_unknown_times else ""
        raise AssertionError(
            f"{report.name} sends {bytes_text(some.bytes_sent)}{more} from each device"
            f"{over_text(wanted)} in a call; the limit is {bytes_text(most)}. The largest:\n"
            f"{listed(largest)}"
        )


def assert_peak_below(program: Program, limit: int | str) -> None:
    """Fails unless the memory that a program takes on one device is below a limit.

    Args:
      program: a compiled function, or its report.
      limit: bytes, or a text such as ``"2 GiB"``.

    Raises:
      AssertionError: it takes more; the parts of the memory and the largest arguments are listed.
      ValueError: the limit cannot be read, or the backend does not report the memory.

    Example:
      >>> import jax
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_peak_below
      >>> compiled = jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((256,), "float32")).compile()
      >>> assert_peak_below(compiled, "4 KiB")
      >>> assert_peak_below(compiled, "1 KiB")
      Traceback (most recent call last):
      AssertionError: <lambda> takes 2.00 KiB on each device at its peak; the limit is 1.00 KiB:
        arguments 1.00 KiB, outputs 1.00 KiB
      The largest arguments:
        x, shape (256,): 1.00 KiB
    """
    most, report = read_bytes(limit), report_of(program)
    memory = report.memory
    if memory is None or memory.peak is None:
        raise ValueError(f"the backend does not report the memory of {report.name}.")
    if memory.peak >= most:
        names = ("arguments", "outputs", "temporaries", "aliased", "generated_code")
        sizes = [(name.replace("_", " "), getattr(memory, name)) for name in names]
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes if size)
        used = (row for row in report.parameters if row.used)
        largest = f"The largest arguments:\n{_largest(used)}"
        if report.activations and (memory.temporaries or 0) > (memory.arguments or 0):
            largest += f"\nThe largest activations:\n{_largest(report.activations)}"
        raise AssertionError(
            f"{report.name} takes {bytes_text(memory.peak)} on each device at its peak; the limit "
            f"is {bytes_text(most)}:\n  {parts}\n{largest}"
        )


def _largest(rows: Iterable[ParameterRow | ActivationRow]) -> str:
    """The arrays that take the most memory on a device, in lines."""
    sizes = [(row.bytes_per_device or row.bytes_total, at(row)) for row in rows]
    sizes.sort(key=lambda pair: -pair[0])
    return shortened([f"  {name}: {bytes_text(size)}" for size, name in sizes])


def assert_no_parameter_replicated(
    program: Program | Any, *, min_size: int = 2**14, allowed: Iterable[str] = ()
) -> None:
    """Fails if a large array is fully replicated over several devices.

    For a program, this checks the arguments. For the replicated fraction of all bytes, see
    :func:`~nnx_sharding.testing.assert_sharded`.

    Args:
      program: a compiled function or its report; or a placed model, optimizer, or pytree of them.
      min_size: arrays with fewer elements may be replicated.
      allowed: regular expressions; an array may be replicated if one matches in its path.

    Raises:
      AssertionError: there are such arrays; all are listed, the largest first.
      ValueError: ``min_size`` is negative, or a pattern is not a regular expression or matches
        no path.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_no_parameter_replicated
      >>> from nnx_sharding.partition import make_mesh, replicated
      >>> model = nnx.eval_shape(lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)))
      >>> specs = (replicated(model), P("data"))
      >>> fun = jit(lambda model, x: model(x), in_shardings=specs, mesh=make_mesh({"data": -1}))
      >>> compiled = fun.lower(model, jax.ShapeDtypeStruct((8, 256), "float32")).compile()
      >>> assert_no_parameter_replicated(compiled, allowed=["kernel$"])
      >>> assert_no_parameter_replicated(compiled)
      Traceback (most recent call last):
      AssertionError: 1 of 3 arrays is fully replicated:
        model.kernel, shape (256, 256): 256 KiB, spec P(None, None)
      Partition them by specs, or allow it by allowed=... or min_size=...
    """
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"min_size must be a number of elements, got {min_size!r}.")
    rows: list[tuple[ParameterRow, int]]
    if isinstance(program, Compiled | ProgramReport):
        report = report_of(program)
        rows = [(row, report.num_devices) for row in report.parameters if row.used]
    else:
        rows = [(row, row.num_devices or 1) for row in parameter_table(program)]
    paths = [row.path for row, _ in rows]
    tests = patterns(allowed, paths)
    replicated = [
        row
        for row, num_devices in rows
        if num_devices > 1
        and row.shard_shape == row.shape
        and math.prod(row.shape) >= max(min_size, 2)
        and not any(test.search(row.path) for test in tests)
    ]
    if replicated:
        verb = "is" if len(replicated) == 1 else "are"
        raise_listed(
            AssertionError,
            f"{len(replicated)} of {len(rows)} arrays {verb} fully replicated:",
            [
                f"  {at(row)}: {bytes_text(row.bytes_total)}, spec {row.spec_text}"
                for row in sorted(replicated, key=lambda row: -row.bytes_total)
            ],
            "Partition them by specs, or allow it by allowed=... or min_size=...",
        )
