"""Checks for changes of the graph by a traced function that have no meaning outside the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax

from .. import _compat
from ..specs.paths import Path, accessor
from .flatten import Flat
from .problems import Problem, refuse, warn
from .retyping import type_spec
from .static_equality import Static
from .structure import (
    Container,
    Group,
    NodeEntry,
    StaticEntry,
    Structure,
    VariableEntry,
    children_of,
    identities_in,
    parts_of,
)
from .targets import Target


def check_objects(
    before: Structure,
    after: Flat,
    targets: Sequence[Target],
    borrowed: Set[int],
    *,
    name: str,
    updates: bool,
) -> None:
    """Checks what would be written back to the caller's objects.

    Refuses traced arrays as static values, captured objects that are returned or attached, changed
    classes, and, without graph updates, changed static objects. ``borrowed`` are the ids of the
    earlier static values that are compared by identity.
    """
    structure, count = after.structure, len(before.entries)
    in_order = (Problem.TRACER_IN_STATIC, Problem.CAPTURED_OBJECT, Problem.CLASS_CHANGED)
    places: dict[Problem, list[tuple[int, Path]]]
    places = {kind: [] for kind in (*in_order, Problem.STATIC_CHANGED)}
    for index, entry in enumerate(structure.entries):
        old = before.entries[index] if index < count else None
        if old is entry and old is not None:
            continue
        places[Problem.TRACER_IN_STATIC] += [(index, path) for path in _tracers(entry, borrowed)]
        if isinstance(entry, NodeEntry | VariableEntry):
            if old is None and not _compat.can_update(after.objects[index]):
                places[Problem.CAPTURED_OBJECT].append((index, ()))
            elif old is not None and old.type is not entry.type:
                places[Problem.CLASS_CHANGED].append((index, ()))
        elif isinstance(entry, StaticEntry) and not updates and old not in (None, entry):
            places[Problem.STATIC_CHANGED].append((index, ()))
    problem = next((problem for problem, found in places.items() if found), None)
    if problem is None:
        return
    starts = [
        (accessor(target.name, part.keys), part.child)
        for target in targets
        for part in target.parts
    ]
    names = structure.names([*starts, ("output", structure.root)])
    names.update(before.names(starts))
    offenders = [
        (accessor(names.get(index, "an object"), path), after.objects[index])
        for index, path in places[problem]
    ]
    refuse(problem, offenders, name=name)


def check_output(
    after: Flat, known: Mapping[int, tuple[str, Any]], carried: Set[int], *, name: str
) -> None:
    """Checks that, without graph updates, no output is an input or captured Variable.

    Those in ``carried`` may be.
    """
    offenders: list[tuple[str, str | None]] = []
    structure = after.structure
    for location in structure.walk(structure.root, iter(structure.root_slots)):
        index, path = location.entry, accessor("output", location.path)
        if index is None or index in carried:
            continue
        if index in known:
            offenders.append((path, known[index][0]))
        elif not _compat.can_update(after.objects[index]):
            offenders.append((path, None))
    if offenders:
        refuse(Problem.OUTPUT_IS_INPUT, offenders, name=name)


def check_captured(fun: Any, *, name: str, strict: bool) -> None:
    """Warns about captured sharded arrays, which become replicated constants, not arguments.

    On Explicit axes an array may be indexed: its type shards what is read.
    """
    captured = [x for x in _compat.trace_constants() if _is_sharded(x)]
    if captured:
        operations = _compat.operations_on_constants()
        others = [(x,) for x in captured if not _is_indexed(x, operations.get(id(x), set()))]
        if others:
            warn(Problem.CAPTURED_ARRAY, others, name=name, strict=strict, fun=fun)


def _is_sharded(value: Any) -> bool:  # by type: isinstance loads the target of a lazy proxy
    return type(value) is _compat.ArrayImpl and not value.is_fully_replicated


_INDEXING = frozenset({"dynamic_slice", "gather", "slice", "squeeze"})


def _is_indexed(array: Any, operations: Set[str]) -> bool:
    return type_spec(array) is not None and bool(operations) and operations <= _INDEXING


def _tracers(entry: Any, borrowed: Set[int]) -> Iterator[Path]:
    """The paths to traced arrays among the static values of an entry, without borrowed ones."""
    if not any(isinstance(s.value, jax.core.Tracer) for s in identities_in(children_of(entry))):
        return
    stack = list(parts_of(entry).items())
    while stack:
        path, child = stack.pop()
        if isinstance(child, Container):
            stack += [(path, aux) for aux in child.aux]
        elif isinstance(child, Group):
            stack += [(path + key, part) for key, part in parts_of(child).items()]
        elif (
            isinstance(child, Static)
            and isinstance(child.value, jax.core.Tracer)
            and id(child.value) not in borrowed
        ):
            yield path


def check_donated(
    donated: Mapping[int, tuple[str, Any]], outputs: Iterable[Any], *, name: str, fun: str
) -> None:
    """Checks that every donated array has an output of its type, which can reuse its buffer."""
    if not donated:
        return
    left = Counter(map(_shape_and_dtype, outputs))
    left.subtract(_shape_and_dtype(leaf) for _, leaf in donated.values())
    offenders = [pair for pair in donated.values() if left[_shape_and_dtype(pair[1])] < 0]
    if offenders:
        refuse(Problem.DONATION_UNUSED, offenders, name=name, fun_name=fun)


def _shape_and_dtype(leaf: Any) -> tuple[Any, Any]:
    aval = jax.typeof(leaf)
    return getattr(aval, "shape", None), getattr(aval, "dtype", aval)
