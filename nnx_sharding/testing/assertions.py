"""Assertions about compiled programs and placed models, for tests.

Assertions about programs take the result of ``lower(...).compile()`` or its report. The
AssertionError lists each cause, with its path or the line of your code. An axis that the mesh does
not have, a size that cannot be read, and a pattern that matches nothing raise a ValueError.

A collective has two figures in bytes: ``bytes`` is the size of its result on one device,
``bytes_sent`` the number of bytes that one device sends. `read_bytes` reads ``64 KiB`` as a number.

A *row* is one array of a model, or of the arguments of a program, with its path, shape, spec and
bytes. In messages, `_line` writes a collective, `_at` a row, and `_over` the axes that the caller
asked for: `` over 'data'``, or nothing for any axes. `_fail` always raises the AssertionError, with
a line for each cause and a remedy. `_collectives` returns the report of a program, the set of the
axes that the caller asked for (None for any), and the collectives that may run over one of them.
`_not_allowed` leaves out what the patterns of ``allowed`` match.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

from jax.sharding import AbstractMesh, Mesh

from .. import errors
from ..analysis.collectives import Collective, Collectives, axes_text
from ..analysis.hlo import parse
from ..analysis.opcodes import CollectiveKind
from ..analysis.overlap import Overlap
from ..analysis.parameters import ActivationRow, ParameterRow, axes_in, parameter_table, spec_text
from ..analysis.program import ProgramReport
from ..analysis.units import bytes_text, read_bytes
from ..analysis.values import Value
from ..report.sharding import check_sharding, is_replicated
from ..specs.fitting import suggestion
from ..specs.state_sharding import StateSharding
from ..transforms.stages import Compiled, Lowered, Traced

__tracebackhide__ = True  # pytest shows the line of the test that failed

Axes: TypeAlias = str | tuple[str, ...]
# The kind and the set of axes of collectives; None for axes that are not known.
_Key: TypeAlias = tuple[CollectiveKind, frozenset[str] | None]
Program: TypeAlias = Compiled | ProgramReport
T = TypeVar("T")


def assert_no_collective(
    program: Program,
    kind: CollectiveKind | None = None,
    axes: Axes | None = None,
    *,
    larger_than: int | str | None = None,
) -> None:
    """Fails if devices exchange anything, or anything of one kind or over some mesh axes.

    Args:
      program: a compiled function, or its report.
      kind: the kind, such as ``"all-gather"``; None for any kind.
      axes: a mesh axis, or several. Collectives count if they run over any of them, or if their
        axes are not known. None for all collectives.
      larger_than: the size on one device, in bytes or as in ``"64 KiB"``, up to which a collective
        is allowed; None allows none.

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
    report, wanted, collectives = _collectives(program, axes)
    # Without `larger_than`, the limit is -1, because a collective of 0 bytes counts, too.
    allowed = -1 if larger_than is None else read_bytes(larger_than)
    hits = [collective for collective in collectives.of(kind) if collective.bytes > allowed]
    if hits:
        plural = "s" if len(hits) > 1 else ""
        what = f"{len(hits)} {kind or 'collective'}{plural}{_over(wanted)}"
        remedy = (
            "Change the shardings, or constrain intermediate values "
            "(nnx_sharding.partition.with_sharding_constraint)."
        )
        _fail(f"{report.name} has {what}:", map(_line, hits), remedy)


def assert_collectives(
    program: Program, expected: Mapping[tuple[CollectiveKind, Axes], int]
) -> None:
    """Fails if the collectives of a program differ from these.

    Args:
      program: a compiled function, or its report.
      expected: the number of instructions for each kind and the mesh axes that it runs over, in any
        order: ``{("all-reduce", "model"): 2}``. One in a loop counts once.

    Raises:
      AssertionError: they differ.
      ValueError: a kind is unknown, or the mesh has no such axis.
      TypeError: ``expected`` has another form.

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
        form = "{('all-reduce', 'model'): 2}"
        raise TypeError(f"expected must be a mapping such as {form}, got {expected!r}.")
    report, _, collectives = _collectives(program, None)
    wanted: Counter[_Key] = Counter()
    for (kind, axes), count in expected.items():
        collectives.of(kind)  # raises a ValueError if the kind is unknown; the result is not used
        # ("data", "model") and ("model", "data") are one set of axes, so both keys may be given.
        wanted[kind, _axis_set(report, axes)] += count
    # Wanted kinds and axes start with an empty list, so that missing collectives are reported.
    actual: dict[_Key, list[Collective]] = {key: [] for key in wanted}
    for collective in collectives:
        over = None if collective.axes is None else frozenset(collective.axes)
        actual.setdefault((collective.kind, over), []).append(collective)
    lines: list[str] = []
    for (kind, over), group in actual.items():
        if len(group) != wanted[kind, over]:
            # `_over` is empty for no axes.
            where = " over unknown axes" if over is None else _over(over) or " over no axes"
            lines.append(f"  {kind}{where}: {len(group)}, expected {wanted[kind, over]}")
            lines += [f"  {_line(collective)}" for collective in group]
    if lines:
        _fail(f"{report.name} has unexpected collectives:", lines)


def assert_bytes_sent_below(program: Program, limit: int | str, axes: Axes | None = None) -> None:
    """Fails if one device sends more than a limit to others in one call.

    Args:
      program: a compiled function, or its report.
      limit: bytes, or a text such as ``"1 GiB"``.
      axes: a mesh axis, or several: counts collectives over any of them. None for all.

    Raises:
      AssertionError: it sends more, or an unknown number of times.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.testing import assert_bytes_sent_below
      >>> fun = jit(lambda x: x.sum(1), in_shardings=P(None, "model"), mesh=make_mesh({"model": 8}))
      >>> compiled = fun.lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
      >>> assert_bytes_sent_below(compiled, 448)  # 2 · 256 · 7/8
    """
    most = read_bytes(limit)
    report, wanted, collectives = _collectives(program, axes)
    sent = collectives.bytes_sent
    if sent is None or sent > most:
        size = f"{bytes_text(sent)} from each device{_over(wanted)} in a call"
        if sent is None:
            size = f"an unknown number of bytes{_over(wanted)}, as a loop is of unknown length"

        def key(each: Collective) -> float:  # collectives in a loop of unknown length come first
            return math.inf if each.total_bytes_sent is None else each.total_bytes_sent

        _fail(
            f"{report.name} sends {size}; the limit is {bytes_text(most)}. The largest:",
            map(_line, sorted(collectives, key=key, reverse=True)),
        )


def assert_peak_below(program: Program, limit: int | str) -> None:
    """Fails unless the memory that a program takes on one device is below a limit.

    Args:
      program: a compiled function, or its report.
      limit: bytes, or a text such as ``"2 GiB"``.

    Raises:
      AssertionError: the program takes that much or more.
      ValueError: the backend does not report it.

    Example:
      >>> import jax
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.testing import assert_peak_below
      >>> double = jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((64,), "float32")).compile()
      >>> assert_peak_below(double, "1 KiB")
    """
    most, report = read_bytes(limit), _report(program)
    memory = report.memory
    if memory is None or memory.peak is None:
        raise ValueError(f"the backend does not report the memory of {report.name}.")
    if memory.peak >= most:
        names = ("arguments", "outputs", "temporaries", "aliased", "generated_code")
        sizes = [(name.replace("_", " "), getattr(memory, name)) for name in names]
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes if size)
        used = (row for row in report.parameters if row.used)
        largest = f"The largest arguments:\n{_largest(used)}"
        # Activations are temporaries, so they are listed only if temporaries exceed arguments.
        if report.activations and (memory.temporaries or 0) > (memory.arguments or 0):
            largest += f"\nThe largest activations:\n{_largest(report.activations)}"
        raise AssertionError(
            f"{report.name} takes {bytes_text(memory.peak)} on each device at its peak; the limit "
            f"is {bytes_text(most)}:\n  {parts}\n{largest}"
        )


def _largest(rows: Iterable[ParameterRow | ActivationRow]) -> str:
    """Lists the ten arrays that take the most memory on a device, as text.

    An array of which nobody knows how it is sharded has the bytes of all devices, and says so.
    """
    sizes = []
    for row in rows:
        size, where = row.bytes_per_device, ""
        if size is None:
            size, where = row.bytes_total, " on all devices together"
        sizes.append((size, f"  {_array_text(row)}: {bytes_text(size)}{where}"))
    sizes.sort(key=lambda pair: -pair[0])
    return "\n".join(errors.shortened((line for _, line in sizes), "  "))


def assert_no_resharding(
    program: Program, axes: Axes | None = None, *, allowed: Iterable[str] = ()
) -> None:
    """Fails if devices exchange activations other than to sum them.

    Gathered parameters, gradients, sums of partial results, and results that are moved to their
    shardings do not count; see :class:`~nnx_sharding.analysis.collectives.Collective`.

    Args:
      program: a compiled function, or its report.
      axes: a mesh axis, or several: collectives that run over any of them. None for all.
      allowed: regular expressions; a collective is allowed if one matches in its module, its
        operation or its line of code.
    """
    report, wanted, collectives = _collectives(program, axes)

    def name(collective: Collective) -> str:
        places = collective.module, collective.operation, collective.source
        return " ".join(filter(None, places))

    hits = _not_allowed(collectives.resharded, allowed, name)
    if hits:
        plural = "s" if len(hits) > 1 else ""
        what = f"{len(hits)} array{plural}{_over(wanted)}"
        remedy = "Constrain activations (activation_shardings of jit), or allow it by allowed=..."
        _fail(f"{report.name} reshards {what}:", map(_line, hits), remedy)


def assert_overlappable(program: Program, *, layers: int = 1) -> None:
    """Fails unless parameters that a loop gathers can be gathered while the loop computes.

    Each gather of parameters in a loop has to be independent of all matrix products of one layer in
    the same iteration: no product needs the result of the gather, and the gather needs the result
    of no product. The loop of a :class:`~nnx_sharding.Stack` with ``prefetch=1`` passes. The
    compiler and the device decide whether gathers and products do run at the same time.

    Args:
      program: a compiled function, or its report.
      layers: how many layers an iteration runs: the ``unroll`` of the stack.

    Raises:
      AssertionError: a gather depends on products, or nothing is gathered in a loop.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import jit, stack
      >>> from nnx_sharding.partition import fsdp, make_mesh
      >>> from nnx_sharding.testing import assert_overlappable
      >>> mesh = make_mesh({"data": 8})
      >>> model = nnx.eval_shape(lambda: stack(nnx.Linear, 3, 64, 64, rngs=nnx.Rngs(0)))
      >>> sharding = fsdp(model, mesh=mesh, min_size=0, prefetch=1)
      >>> forward = jit(lambda model, x: model(x), in_shardings=(sharding, P("data")), mesh=mesh)
      >>> x = jax.ShapeDtypeStruct((32, 64), "float32")
      >>> assert_overlappable(forward.lower(model, x).compile())
    """
    report, _, collectives = _collectives(program, None)
    if report.hlo is None:
        raise ValueError(f"the backend has no text of {report.name}.")
    overlap = Overlap(parse(report.hlo))
    is_any_in_loop = False
    lines: list[str] = []
    for gather in collectives:
        if gather.kind not in _GATHERS or gather.purpose != "parameter":
            continue
        count = overlap.products_beside(Value(gather.computation, gather.name))
        if count is None:  # the gather is in no loop, or moves initial values of loops
            continue
        is_any_in_loop = True
        # `total` counts the products of all layers in an iteration. The gather has to be
        # independent of as many products as one layer has.
        independent, total = count.products, count.of
        if independent * layers < total or total == 0:
            products = f"{independent} of {total} matrix products"
            lines.append(f"{_line(gather)}\n    independent of {products}")
    head = f"{report.name} cannot gather parameters while it computes"
    remedy = "Pass prefetch=1 to fsdp or to stack."
    if not is_any_in_loop:
        _fail(f"{head}: it gathers none in a loop.", (), remedy)
    if lines:
        _fail(f"{head}:", lines, remedy)


# With the purpose of a parameter, an all-reduce is a gather, too: the compiler for TPUs joins parts
# in arrays of zeros.
_GATHERS = ("all-gather", "all-reduce")


def assert_gathers_weights(
    program: Program, axes: Axes | None = None, *, allowed: Iterable[str] = ()
) -> None:
    """Fails if a module computes with a shard of a parameter, and not with all of it as in FSDP.

    The parameters of all modules that the program calls have to be gathered if they are sharded.

    Args:
      program: a compiled function, or its report.
      axes: a mesh axis, or several: parameters that are sharded over any of them. None for all.
      allowed: regular expressions; a parameter may stay sharded if one matches in its path.
    """
    report, wanted, collectives = _collectives(program, axes)
    # A module has activations in the report if the program calls it. The parameters of other
    # modules need not be gathered. Paths inside of ``model.up`` begin with ``model.up.`` or
    # ``model.up[``.
    in_called_module = tuple(f"{row.path}{end}" for row in report.activations for end in (".", "["))
    weights = []
    for row in report.parameters:
        row_axes = axes_in(row.spec)
        sharding_axes = row_axes if wanted is None else wanted.intersection(row_axes)
        is_used_variable = row.used and row.variable is not None
        if is_used_variable and sharding_axes and row.path.startswith(in_called_module):
            weights.append(row)
    if not weights:
        _fail(f"{report.name} calls no module with parameters that are sharded{_over(wanted)}.", ())
    gathered: set[str] = set()  # the paths of gathered Variables
    for collective in collectives:
        if collective.kind not in _GATHERS:
            continue
        for part in collective.parts or (collective,):
            # The purpose of Variables that are no parameters is "state".
            if part.purpose in ("parameter", "state"):
                gathered.update(part.parameters)
    checked = _not_allowed(weights, allowed, lambda row: row.path)
    not_gathered = [row for row in checked if row.path not in gathered]
    if not_gathered:
        _fail(
            f"{report.name} gathers {len(weights) - len(not_gathered)} of {len(weights)} parameters"
            f"{_over(wanted)}, but not:",
            (
                f"  {_array_text(row)}: {bytes_text(row.bytes_total)}, {spec_text(row.spec)}"
                for row in not_gathered
            ),
            "Gather them (ActivationSharding(gather=True)), or allow it by allowed=...",
        )


def assert_sharded(
    model: Program | Any,
    *,
    tolerance: float = 0.02,
    min_size: int = 0,
    allowed: Iterable[str] = (),
    sharding: StateSharding | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> None:
    """Fails if much of a model is fully replicated, as after a forgotten rule.

    Args:
      model: a placed model or optimizer, or a pytree or ``nnx.state(model, nnx.Param)`` of it; or a
        compiled function or its report, of which this checks the arguments.
      tolerance: the fraction of all bytes that may be replicated, from 0 to 1. Arrays on a mesh of
        one device do not count: they cannot be sharded.
      min_size: arrays with fewer elements may be replicated.
      allowed: regular expressions; an array may be replicated if one matches in its path.
      sharding: rules to check instead of the present shardings; the model may then be abstract.
      mesh: the mesh of these rules.

    Raises:
      AssertionError: more is replicated.
      ValueError: the rules do not fit the model, or a pattern of ``allowed`` matches nothing.

    Example:
      >>> from flax import nnx
      >>> from nnx_sharding.testing import assert_sharded
      >>> assert_sharded(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), allowed=["bias$"])
      Traceback (most recent call last):
      AssertionError: 512 B of 576 B (88.9%) are fully replicated, more than 2.0%:
        kernel, shape (8, 16): 512 B, spec SingleDeviceSharding(...)
      Give them specs, or allow it by tolerance=..., min_size=... or allowed=...

    The check, and its tolerance of 2%, follow ``assert_params_sufficiently_sharded`` of MaxText.
    """
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance must be a fraction of all bytes, 0 to 1, got {tolerance!r}.")
    if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0:
        raise ValueError(f"min_size must be a number of elements, got {min_size!r}.")
    rows, replicated_rows = _replicated_rows(model, sharding, mesh)
    large = {id(row) for row in replicated_rows if math.prod(row.shape) >= min_size}
    # Patterns are tried with all rows, because a pattern that matches only sharded arrays is no
    # typo.
    checked = _not_allowed(rows, allowed, lambda row: row.path)
    replicated = [row for row in checked if id(row) in large]
    replicated.sort(key=lambda row: -row.bytes_total)
    replicated_bytes = sum(row.bytes_total for row in replicated)
    total_bytes = sum(row.bytes_total for row in rows)
    if replicated_bytes > tolerance * total_bytes:
        share = replicated_bytes / total_bytes
        sizes = f"{bytes_text(replicated_bytes)} of {bytes_text(total_bytes)} ({share:.1%})"
        _fail(
            f"{sizes} are fully replicated, more than {tolerance:.1%}:",
            (
                f"  {_array_text(x)}: {bytes_text(x.bytes_total)}, spec {spec_text(x.spec)}"
                for x in replicated
            ),
            "Give them specs, or allow it by tolerance=..., min_size=... or allowed=...",
        )


def _replicated_rows(
    model: Any, sharding: StateSharding | None, mesh: Mesh | AbstractMesh | None
) -> tuple[Sequence[ParameterRow], list[ParameterRow]]:
    """Returns (all rows, replicated rows) for the arrays of a model or the arguments of a program.

    Raises a ValueError if ``sharding`` does not fit the model.

    Args:
      model: as for :func:`assert_sharded`.
      sharding: rules to check in place of the shardings that the arrays have; None for none.
    """
    if isinstance(model, Compiled | ProgramReport):
        program = _report(model)
        rows = [row for row in program.parameters if row.used]
        if program.num_devices == 1:  # nothing can be sharded
            return rows, []
        # The rows of a report have no sharding for `is_replicated`, so shapes are compared.
        return rows, [row for row in rows if row.shard_shape == row.shape]
    if sharding is None:
        table = parameter_table(model)
        return table, [*filter(is_replicated, table)]
    report = check_sharding(model, sharding, mesh)
    report.raise_for_problems()
    return report.rows, [*filter(is_replicated, report.rows)]


def _fail(head: str, lines: Iterable[str], remedy: str = "") -> NoReturn:
    """Fails the test with a message: the head, the lines, and what to do (``remedy``)."""
    raise AssertionError(errors.message(head, lines, remedy))


def _report(program: object) -> ProgramReport:
    """Returns the report of a program, or raises an error for anything else."""
    if isinstance(program, ProgramReport):
        return program
    if isinstance(program, Compiled):
        return program.report()
    hint = "; compile it first: lowered.compile()" if isinstance(program, Lowered | Traced) else ""
    raise TypeError(
        f"expected a function that nnx_sharding.jit compiled, or its report, got {program!r}{hint}."
    )


def _collectives(
    program: object, axes: Axes | None
) -> tuple[ProgramReport, frozenset[str] | None, Collectives]:
    """Finds the collectives of a program that may run over some axes; None for all collectives.

    Returns:
      The report of the program, the set of the axes, and the collectives.

    Raises:
      ValueError: collectives cannot be read from the program, or the mesh has no such axis.
    """
    report = _report(program)
    if report.collectives is None:
        why = "the backend has no text of the compiled program"
        if report.hlo:
            unread = "".join(f"\n  {line[:200]}" for line in parse(report.hlo).unread[:10])
            why = f"these parts of the program are not understood:{unread}\nReport this"
        raise ValueError(f"the collectives of {report.name} are unknown: {why}.")
    wanted = None if axes is None else _axis_set(report, axes)
    # Collectives over unknown axes may run over the wanted ones, so they count.
    collectives = [
        collective
        for collective in report.collectives
        if wanted is None or collective.axes is None or wanted.intersection(collective.axes)
    ]
    return report, wanted, Collectives(collectives)


def _axis_set(report: ProgramReport, axes: Axes) -> frozenset[str]:
    """Returns axes as a set; a ValueError if the mesh of the program does not have them."""
    wanted = frozenset([axes] if isinstance(axes, str) else axes)
    names = {} if report.mesh is None else report.mesh.axes
    unknown = [f"{axis!r}{suggestion(axis, names)}" for axis in sorted(wanted - {*names})]
    if unknown:
        known = ", ".join(map(repr, names)) or "none"
        raise ValueError(f"the mesh has no axis {'; '.join(unknown)}. It has the axes {known}.")
    return wanted


def _not_allowed(
    items: Sequence[T], allowed: str | Iterable[str], name: Callable[[T], str]
) -> list[T]:
    """Returns the items whose names no regular expression matches.

    Args:
      allowed: the regular expressions, which are searched in the names.

    Raises:
      ValueError: an expression is invalid, or matches no item, so nobody would notice a typo.
    """
    names = [name(item) for item in items]
    patterns: list[re.Pattern[str]] = []
    wrong: list[str] = []
    for text in [allowed] if isinstance(allowed, str) else allowed:
        try:
            pattern = re.compile(text)
        except re.error as error:
            wrong.append(f"{text!r} is not a regular expression: {error}")
            continue
        patterns.append(pattern)
        if not any(map(pattern.search, names)):
            # Without items, such as reshardings, nothing has to be allowed.
            example = f" matches no path, such as {names[0]}" if names else " is not needed"
            wrong.append(f"{text!r}{example}")
    if wrong:
        raise ValueError("allowed: " + "; ".join(wrong) + ".")
    return [
        item
        for item, text in zip(items, names, strict=True)
        if not any(pattern.search(text) for pattern in patterns)
    ]


def _over(axes: frozenset[str] | None) -> str:
    """Writes the axes of a question: `` over 'data', 'model'``; empty for None or no axes."""
    return f" over {', '.join(map(repr, sorted(axes)))}" if axes else ""


def _line(collective: Collective) -> str:
    """Describes a collective: ``all-reduce over model, 128 B, sends 192 B: dot, train.py:3``.

    The text ends with the operation and the line of the user's code, or with the collective's name
    in the program if both are unknown.
    """
    over, count = axes_text(collective.axes, words=True), collective.times
    if count is None:
        times = ", in a loop of unknown length"
    else:
        times = "" if count == 1 else f", {count} times"
    origin = ", ".join(filter(None, (collective.operation, collective.source)))
    sizes = f"{bytes_text(collective.bytes)}, sends {bytes_text(collective.bytes_sent)}"
    return f"  {collective.kind} over {over}, {sizes}{times}: {origin or collective.name}"


def _array_text(row: ParameterRow | ActivationRow) -> str:
    """Writes the name and the shape of an array."""
    name = row.name if isinstance(row, ActivationRow) else row.path
    return f"{name or 'the root'}, shape {row.shape}"
