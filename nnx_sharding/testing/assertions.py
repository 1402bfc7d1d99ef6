"""Assertions about compiled programs, for tests: what they exchange, and what they take.

Each takes what ``lower(...).compile()`` gives, or a report of it, and says in its message which
instructions or arrays are to blame.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..analysis.arguments import Parameter
from ..analysis.collectives import Collective, Collectives, Kind
from ..analysis.parameters import ParameterRow, parameter_table
from ..analysis.units import bytes_text
from ..fitting import suggestion
from ..report.limits import read_bytes
from ..report.program import ProgramReport
from ..stages import Compiled, Lowered, Traced

Axes: TypeAlias = str | tuple[str, ...]
Program: TypeAlias = Compiled | ProgramReport

_MOST = 10


def assert_no_collective(
    program: Program, kind: Kind | None = None, axes: Axes | None = None
) -> None:
    """Fails if devices exchange anything, or anything of one kind or over some mesh axes.

    Args:
      program: a compiled function, or its report.
      kind: such as ``"all-gather"``; None for any.
      axes: a mesh axis, or several: collectives that run over any of them. None for all, also
        those whose axes are not known.

    Raises:
      AssertionError: there are such collectives; each is named, with its bytes, axes, operation
        and the line of your code.
      ValueError: there is no such kind, or the mesh has no such axis.
      TypeError: ``program`` is something else.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_no_collective
      >>> from nnx_sharding.partition import make_mesh
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> fun = jit(lambda x: x.sum(1), in_shardings=P("data", "model"), mesh=mesh)
      >>> compiled = fun.lower(x).compile()
      >>> assert_no_collective(compiled, "all-gather")
      >>> assert_no_collective(compiled, axes="data")
      >>> assert_no_collective(compiled, axes="model")
      Traceback (most recent call last):
      AssertionError: <lambda> has 1 collective over 'model':
        all-reduce over model, 128 B, sends 192 B: jit(<lambda>)/reduce_sum, <doctest ...>:1
      ...
    """
    found, sizes = _collectives(program).of(kind), _axis_sizes(program)
    wanted = None if axes is None else _checked_axes(axes, sizes)
    # Those whose axes are not known may run over any.
    hits = [one for one in found if wanted is None or one.axes is None or wanted & {*one.axes}]
    if hits:
        what = f"{len(hits)} {kind or 'collective'}{'s' * (len(hits) > 1)}"
        over = "" if wanted is None else f" over {', '.join(map(repr, sorted(wanted)))}"
        raise AssertionError(
            f"{_name(program)} has {what}{over}:\n{_listed(hits)}\n"
            "Change the shardings, or constrain what is in between "
            "(nnx_sharding.partition.with_sharding_constraint)."
        )


def assert_collectives(program: Program, expected: Mapping[tuple[Kind, Axes], int]) -> None:
    """Fails if the collectives of a program are others than these.

    Args:
      program: a compiled function, or its report.
      expected: how many instructions there are for each kind and the mesh axes that it runs over,
        in any order: ``{("all-reduce", "model"): 2}``. One in a loop counts once.

    Raises:
      AssertionError: there are more, fewer or others; all differences are named, with the
        instructions.
      ValueError: there is no such kind, or the mesh has no such axis.
      TypeError: ``program`` or ``expected`` is something else.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_collectives
      >>> from nnx_sharding.partition import make_mesh
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> fun = jit(lambda x: x.sum(1), in_shardings=P("data", "model"), mesh=mesh)
      >>> compiled = fun.lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
      >>> assert_collectives(compiled, {("all-reduce", "model"): 1})
    """
    found, wanted = _collectives(program), _expected(program, expected)
    counts = Counter(_key(one) for one in found)
    wrong = [key for key in dict.fromkeys([*wanted, *counts]) if counts[key] != wanted[key]]
    if wrong:
        lines = []
        for kind, axes in wrong:
            own = [one for one in found if _key(one) == (kind, axes)]
            over = "unknown axes" if axes is None else " and ".join(sorted(map(repr, axes)))
            lines.append(
                f"  {kind} over {over or 'no axes'}: {len(own)}, expected {wanted[kind, axes]}"
            )
            lines += [f"  {line}" for line in _listed(own).splitlines()]
        raise AssertionError(f"{_name(program)} has other collectives:\n" + "\n".join(lines))


def assert_bytes_sent_below(program: Program, limit: int | str, axes: Axes | None = None) -> None:
    """Fails if one device sends more than a limit to others in one call.

    Args:
      program: a compiled function, or its report.
      limit: bytes, or a text such as ``"1 GiB"``.
      axes: a mesh axis, or several: only collectives that run over any of them count. None for
        all.

    Raises:
      AssertionError: it sends more, or may do so as a loop is of unknown length; the largest
        collectives are named.
      ValueError: the limit cannot be read, or the mesh has no such axis.
      TypeError: ``program`` or the limit is something else.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_bytes_sent_below
      >>> from nnx_sharding.partition import make_mesh
      >>> mesh = make_mesh({"data": 2, "model": 4})
      >>> fun = jit(lambda x: x.sum(1), in_shardings=P("data", "model"), mesh=mesh)
      >>> compiled = fun.lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
      >>> assert_bytes_sent_below(compiled, "1 KiB")
    """
    most, sizes = read_bytes(limit), _axis_sizes(program)
    wanted = None if axes is None else _checked_axes(axes, sizes)
    found = Collectives(
        one
        for one in _collectives(program)
        if wanted is None or one.axes is None or wanted & {*one.axes}
    )
    if found.bytes_sent > most or found.has_unknown_times:
        largest = sorted(found, key=lambda one: -one.total_bytes_sent)
        more = " or more, as a loop is of unknown length," if found.has_unknown_times else ""
        over = "" if wanted is None else f" over {', '.join(map(repr, sorted(wanted)))}"
        raise AssertionError(
            f"{_name(program)} sends {bytes_text(found.bytes_sent)}{more} from each device"
            f"{over} in a call; the limit is {bytes_text(most)}. Most is in:\n{_listed(largest)}"
        )


def assert_peak_below(program: Program, limit: int | str) -> None:
    """Fails if a program takes more memory on one device than a limit, or as much.

    Args:
      program: a compiled function, or its report.
      limit: bytes, or a text such as ``"2 GiB"``.

    Raises:
      AssertionError: it takes more; the parts of the memory and the largest arguments are named.
      ValueError: the limit cannot be read, or the backend does not tell the memory.
      TypeError: ``program`` or the limit is something else.

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
    most, report = read_bytes(limit), _report(program)
    memory = report.memory
    if memory is None or memory.peak is None:
        raise ValueError(f"the backend does not tell the memory of {report.name}.")
    if memory.peak >= most:
        parts = ("arguments", "outputs", "temporaries", "aliased", "generated_code")
        told = [(part.replace("_", " "), getattr(memory, part)) for part in parts]
        used = [row for row in report.parameters if row.used]
        largest = sorted(used, key=lambda row: -row.bytes_per_device)
        lines = [f"  {_at(row)}: {bytes_text(row.bytes_per_device)}" for row in largest]
        raise AssertionError(
            f"{report.name} takes {bytes_text(memory.peak)} on each device at its peak; the limit "
            f"is {bytes_text(most)}:\n  "
            + ", ".join(f"{part} {bytes_text(size)}" for part, size in told if size)
            + "\nThe largest arguments:\n"
            + _shortened(lines)
        )


def assert_no_parameter_replicated(
    program: Program | Any, *, min_size: int = 2**14, allowed: Iterable[str] = ()
) -> None:
    """Fails if a large array lies whole on each of several devices.

    Of a program these are its arguments. For the share of all bytes that is whole, however it is
    spread over arrays, see :func:`~nnx_sharding.testing.assert_sharded`.

    Args:
      program: a compiled function or its report; or a placed model, optimizer, or pytree of them.
      min_size: arrays with fewer elements may be whole, as with
        :func:`~nnx_sharding.partition.fsdp`.
      allowed: regular expressions; an array may be whole if one is found in its path.

    Raises:
      AssertionError: there are such arrays; all are named, the largest first.
      ValueError: ``min_size`` is negative, or a pattern is no regular expression or matches no
        path.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_no_parameter_replicated
      >>> from nnx_sharding.partition import make_mesh, replicated
      >>> model = nnx.eval_shape(lambda: nnx.Linear(256, 256, rngs=nnx.Rngs(0)))
      >>> fun = jit(
      ...     lambda model, x: model(x),
      ...     in_shardings=(replicated(model), P("data")),
      ...     mesh=make_mesh({"data": -1}),
      ... )
      >>> compiled = fun.lower(model, jax.ShapeDtypeStruct((8, 256), "float32")).compile()
      >>> assert_no_parameter_replicated(compiled, allowed=["kernel$"])
      >>> assert_no_parameter_replicated(compiled)
      Traceback (most recent call last):
      AssertionError: 1 of 3 arrays lies whole on each device:
        model.kernel, shape (256, 256): 256 KiB, spec (None, None)
      Give it a spec that cuts it, or allow it by allowed=... or min_size=...
    """
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"min_size is a number of elements, not {min_size!r}.")
    rows = _rows(program)
    patterns = _patterns([allowed] if isinstance(allowed, str) else allowed, rows)
    whole = [
        row
        for row, count in rows
        if count > 1
        and row.shard_shape == row.shape
        and _size(row) >= max(min_size, 2)
        and not any(pattern.search(row.path) for pattern in patterns)
    ]
    if whole:
        whole.sort(key=lambda row: -row.bytes_total)
        lines = [f"  {_at(row)}: {bytes_text(row.bytes_total)}, spec {_spec(row)}" for row in whole]
        verb, it = ("lies", "it a spec that cuts it") if len(whole) == 1 else ("lie", "them specs")
        raise AssertionError(
            f"{len(whole)} of {len(rows)} arrays {verb} whole on each device:\n"
            + "\n".join(lines)
            + f"\nGive {it}, or allow it by allowed=... or min_size=..."
        )


# What is asked


def _collectives(program: Program) -> Collectives:
    if isinstance(program, ProgramReport):
        return program.collectives
    found = _compiled(program).collectives()
    if found is None:
        raise ValueError(f"the backend does not tell the collectives of {_name(program)}.")
    return found


def _report(program: Program) -> ProgramReport:
    return program if isinstance(program, ProgramReport) else _compiled(program).report()


def _compiled(program: Any) -> Compiled:
    if isinstance(program, Compiled):
        return program
    hint = "; compile it first: lowered.compile()" if isinstance(program, Lowered) else ""
    hint = "; lower and compile it first" if isinstance(program, Traced) else hint
    raise TypeError(
        "this needs a function that nnx_sharding.jit compiled, or its report, not "
        f"{program!r}{hint}."
    )


def _name(program: Program) -> str:
    return program.name if isinstance(program, ProgramReport) else program._plan.fun_name


def _axis_sizes(program: Program) -> dict[str, int]:
    if isinstance(program, ProgramReport):
        return {} if program.mesh is None else dict(program.mesh.axes)
    mesh = _compiled(program)._mesh()
    return {} if mesh is None else {str(axis): size for axis, size in mesh.shape.items()}


def _checked_axes(axes: Axes, sizes: Mapping[str, int]) -> frozenset[str]:
    wanted = frozenset([axes] if isinstance(axes, str) else axes)
    unknown = [f"{axis!r}{suggestion(axis, sizes)}" for axis in sorted(wanted) if axis not in sizes]
    if unknown:
        known = ", ".join(map(repr, sizes)) or "none"
        raise ValueError(f"the mesh has no axis {'; '.join(unknown)}. It has the axes {known}.")
    return wanted


def _expected(program: Program, expected: Any) -> Counter[tuple[str, frozenset[str] | None]]:
    if not isinstance(expected, Mapping) or not all(
        isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) for key in expected
    ):
        raise TypeError(
            "expected is a mapping such as {('all-reduce', 'model'): 2} from kind and axes to a "
            f"number, not {expected!r}."
        )
    sizes = _axis_sizes(program)
    wanted: Counter[tuple[str, frozenset[str] | None]] = Counter()
    for (kind, axes), count in expected.items():
        Collectives().of(kind)
        wanted[kind, _checked_axes(axes, sizes)] += count
    return wanted


def _key(one: Collective) -> tuple[str, frozenset[str] | None]:
    return one.kind, None if one.axes is None else frozenset(one.axes)


def _rows(program: Any) -> list[tuple[Parameter | ParameterRow, int]]:
    """The arrays, each with the number of devices that hold a part of it."""
    if isinstance(program, Compiled | ProgramReport):
        report = _report(program)
        return [(row, report.num_devices) for row in report.parameters if row.used]
    return [(row, row.num_devices or 1) for row in parameter_table(program)]


def _patterns(allowed: Iterable[str], rows: Sequence[tuple[Any, int]]) -> list[re.Pattern[str]]:
    patterns, wrong = [], []
    for text in allowed:
        try:
            patterns.append(re.compile(text))
        except re.error as error:
            wrong.append(f"{text!r} is no regular expression: {error}")
            continue
        if not any(patterns[-1].search(row.path) for row, _ in rows):
            wrong.append(f"{text!r} matches no path, such as {rows[0][0].path if rows else 'none'}")
    if wrong:
        raise ValueError("allowed: " + "; ".join(wrong) + ".")
    return patterns


# How it is told


def _listed(found: Iterable[Collective]) -> str:
    return _shortened([f"  {_line(one)}" for one in found])


def _line(one: Collective) -> str:
    axes = "unknown axes" if one.axes is None else " and ".join(one.axes) or "no axes"
    times = {1: "", None: ", in a loop of unknown length"}.get(one.times, f", {one.times} times")
    from_ = ", ".join(part for part in (one.operation, one.source) if part) or one.name
    return (
        f"{one.kind} over {axes}, {bytes_text(one.bytes)}, sends {bytes_text(one.bytes_sent)}"
        f"{times}: {from_}"
    )


def _at(row: Parameter | ParameterRow) -> str:
    return f"{row.path or 'the root'}, shape {row.shape}"


def _spec(row: Parameter | ParameterRow) -> str:
    return "none" if row.spec is None else str(row.spec)


def _size(row: Parameter | ParameterRow) -> int:
    return math.prod(row.shape)


def _shortened(lines: Sequence[str]) -> str:
    rest = len(lines) - _MOST
    return "\n".join([*lines[:_MOST], *([f"  … {rest} more"] if rest > 0 else [])])
