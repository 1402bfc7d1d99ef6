"""Checks of a traced function: refuses changes of the graph that mean nothing outside its trace.

The checks run once for each trace. The mistakes that they refuse would otherwise show later and
elsewhere: a leaked tracer in a static value, a captured object in two graphs, arrays that became
constants. Two tables of objects (``structure.py``) describe the modules before and after the call,
with the same objects first. An *entry* describes one object, and the object's *index* is its place
in the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeGuard

import jax

from .. import _compat
from ..errors import CapturedArrayWarning, StrictError, message, raise_if_any, warn_or_raise
from ..specs.fitting import describe
from ..specs.paths import Path, accessor
from ..specs.types import AnyArray, Arrays
from .arguments import Argument, named_parts
from .constrain import type_spec
from .flatten import Flat
from .functions import captured_shards
from .problems import array_line
from .resolve import NamedSpec
from .static_equality import Static
from .structure import (
    Child,
    Container,
    Entry,
    NodeEntry,
    StaticObject,
    Structure,
    VariableEntry,
    children_of,
    identities_in,
    locations_in,
    parts_of,
)


class _Misuse(NamedTuple):
    """A kind of change that has no meaning outside of the trace, and the error for it."""

    head: str  # what is wrong
    remedy: str
    error: type[Exception] = ValueError


_BOTH_MODES = "graph=True and graph_updates=True"
_TRACER_IN_STATIC = _Misuse(
    "these static values hold traced arrays, which do not exist outside of the function:",
    "Keep them in a Variable or as an attribute of a module (nnx.data), or return them.",
    jax.errors.UnexpectedTracerError,
)
_CAPTURED_OBJECT = _Misuse(
    "these objects were captured from outside of the function, and cannot be returned or attached "
    "to its arguments:",
    "Pass them as arguments, or return a copy made by nnx.clone.",
)
_CLASS_CHANGED = _Misuse(
    "the function assigned another __class__ to these objects:",
    "Make an object of the other class instead.",
)
_STATIC_CHANGED = _Misuse(
    "without graph updates the function cannot change static objects, but it changed:",
    f"Use {_BOTH_MODES}, or make the change outside of the function.",
)


class _Misused(NamedTuple):
    """An object with a misuse."""

    entry: int  # the index of the object
    path: Path  # the path from the object to what is wrong in it; empty for the object itself


def check_objects(
    old_structure: Structure,
    flat_after: Flat,
    arguments: Sequence[Argument],
    static_ids: Set[int],
    *,
    name: str,
    updates: bool,
) -> None:
    """Raises an error for changes that cannot be written back to the caller's objects.

    Args:
      old_structure: the structure of the arguments.
      flat_after: the graph after the call, with the same objects first.
      arguments: the arguments of the call, after which messages name objects.
      static_ids: the ids of static values from before the call that are compared by identity.
      name: the name of the transform, in messages.
      updates: whether changes of structure are written back.
    """
    structure = flat_after.structure
    num_before = len(old_structure.entries)
    kinds = _TRACER_IN_STATIC, _CAPTURED_OBJECT, _CLASS_CHANGED, _STATIC_CHANGED
    misused: dict[_Misuse, list[_Misused]] = {misuse: [] for misuse in kinds}
    for index, entry in enumerate(structure.entries):
        # None: the object is new.
        old_entry = old_structure.entries[index] if index < num_before else None
        # Most objects are unchanged, and an unchanged object has kept its entry.
        if old_entry is entry and old_entry is not None:
            continue
        traced_paths = _paths_to_tracers(entry, static_ids)
        misused[_TRACER_IN_STATIC] += (_Misused(index, path) for path in traced_paths)
        if isinstance(entry, NodeEntry | VariableEntry):
            # The object is new in the graph, but was not made in this trace.
            if old_entry is None and not _compat.can_update(flat_after.objects[index]):
                misused[_CAPTURED_OBJECT].append(_Misused(index, ()))
            elif old_entry is not None and old_entry.type is not entry.type:
                misused[_CLASS_CHANGED].append(_Misused(index, ()))
        elif isinstance(entry, StaticObject):
            is_changed = old_entry is not None and old_entry != entry
            if is_changed and not updates:
                misused[_STATIC_CHANGED].append(_Misused(index, ()))
    # Only one kind of misuse is reported, because the others may follow from it.
    misuse = next((misuse for misuse in kinds if misused[misuse]), None)
    if misuse is None:
        return
    starts = named_parts(arguments)
    names = structure.names([*starts, ("output", structure.root)])
    # Names from the arguments have priority, because the user knows objects by these.
    names.update(old_structure.names(starts))
    lines = []
    for index, path in misused[misuse]:
        expression = accessor(names.get(index, "an object"), path)  # "model.config" + ["scale"]
        lines.append(f"  {expression}: {type(flat_after.objects[index]).__name__}")
    raise_if_any(misuse.error, f"{name}: {misuse.head}", lines, misuse.remedy)


def check_output(
    flat_after: Flat, variables: Mapping[int, NamedSpec], carried: Set[int], *, name: str
) -> None:
    """Raises an error if an output is an input or captured Variable, for calls without updates.

    Args:
      flat_after: the graph after the call.
      variables: the names and specs of the Variables of the arguments, by index.
      carried: the indices of objects that may be outputs all the same.
      name: the name of the transform, in messages.
    """
    lines = []
    # These are the places of the Variables and arrays of the output.
    for location in locations_in(flat_after.structure):
        index = location.object_index
        path = accessor("output", location.path)
        # A bare array has no index, and is fine because the caller gets a new array from JAX.
        if index is None or index in carried:
            continue
        if index in variables:
            lines.append(f"  {path}: the input {variables[index].name}")
        elif not _compat.can_update(flat_after.objects[index]):  # made outside of this trace
            lines.append(f"  {path}: captured")
    raise_if_any(
        ValueError,
        f"{name}: Variable aliasing is not supported without graph updates: these outputs are "
        "Variables of the inputs, or were captured:",
        lines,
        f"Return a copy made by nnx.clone, or use {_BOTH_MODES}.",
    )


def check_captured(fun: Callable[..., Any], leaves: Arrays, *, name: str, strict: bool) -> None:
    """Warns about captured sharded arrays, which become replicated constants of the program.

    An array on Explicit axes may be captured if it is only indexed, because its type shards what is
    read.

    Args:
      fun: the user's function.
      leaves: the arrays of the arguments.
      name: the name of the transform, in messages.
      strict: whether the warning is an error.
    """
    # `isinstance` is not used, because it would load the target of a lazy proxy.
    constants = [x for x in _compat.trace_constants() if type(x) is _compat.ArrayImpl]
    sharded = [x for x in constants if not x.is_fully_replicated]
    if sharded:  # JAX's checkify makes arguments constants as well
        argument_ids = set(map(id, leaves))
        sharded = [x for x in sharded if id(x) not in argument_ids]
    if not sharded:
        return
    # By the id of an array: the names of the primitives that use it.
    operations = _compat.operations_on_constants()
    lines = []
    # An expression is ``table`` or ``model.kernel``, for example.
    for expression, array in captured_shards(fun, sharded):
        names = operations.get(id(array), set())
        is_only_indexed = bool(names) and names <= _INDEXING
        is_on_explicit_axes = type_spec(array) is not None
        if not (is_only_indexed and is_on_explicit_axes):
            lines.append(f"{array_line(expression, array)}, {describe(array.sharding)}")
    if lines:
        head = (
            f"{name}: the function captures sharded arrays, which become constants of the program, "
            "copied to every device:"
        )
        text = message(head, lines, "Pass them as arguments.")
        warn_or_raise(CapturedArrayWarning, text, strict=strict, anchor="captured-array")


_INDEXING = frozenset({"dynamic_slice", "gather", "slice", "squeeze"})  # primitives of JAX


def _paths_to_tracers(entry: Entry | None, static_ids: Set[int]) -> Iterator[Path]:
    """Yields the paths to traced arrays, Variables and modules among an object's static values.

    For a module with ``self.config = {"scale": x}``, where ``config`` is static, the path of ``x``
    is ``("config", "scale")``.

    Args:
      static_ids: the ids of static values that were there before the call, and are left out.
    """
    # Nearly all objects have no such values. This test looks at the same static values, at any
    # depth, and is much faster than the search with paths.
    if not any(map(_is_traced, identities_in(children_of(entry)))):
        return
    pending = list(parts_of(entry).items())  # a list, because statics may be nested too deeply
    while pending:
        path, child = pending.pop()
        if isinstance(child, Container):
            # The leaves of a pytree are data, where arrays may be. Only the node data is static,
            # such as the settings of a registered class, and it has no path of its own.
            pending += [(path, aux) for aux in child.aux]
        elif isinstance(child, StaticObject):
            pending += [(path + key, part) for key, part in parts_of(child).items()]
        elif _is_traced(child) and _compat.identity(child.value) not in static_ids:
            yield path


def _is_traced(child: Child) -> TypeGuard[Static]:
    """Whether a child is a static value that is a traced array, a Variable or a module."""
    value = child.value if isinstance(child, Static) else None
    return isinstance(value, jax.core.Tracer) or _compat.is_graph_object(value)


def check_donated(
    donated: Mapping[int, tuple[str, Any]], outputs: Iterable[AnyArray], *, name: str, fun: str
) -> None:
    """Raises a ``StrictError`` if outputs cannot reuse the buffers of all donated arrays.

    If there are fewer outputs of a shape and dtype than donated arrays, the error lists all of
    these donated arrays, because XLA decides which of them is not reused.

    Args:
      donated: the name and the array of each donated argument, by slot.
      outputs: all results of the program.
      name: the name of the transform, in messages.
      fun: the name of the user's function.
    """
    if not donated:
        return
    # XLA reuses a donated buffer for any one output of its shape and dtype. ``surplus`` is the
    # number of outputs less the number of donated arrays, by shape and dtype.
    surplus = Counter(map(_shape_and_dtype, outputs))
    surplus.subtract(_shape_and_dtype(leaf) for _, leaf in donated.values())
    lines = [
        array_line(argument, leaf)
        for argument, leaf in donated.values()
        if surplus[_shape_and_dtype(leaf)] < 0
    ]
    raise_if_any(
        StrictError,
        f"{name}: these arguments are donated, but {fun} has no result of their shape and dtype "
        "that could reuse their memory:",
        lines,
        "Do not donate them (donate_argnums, donate_argnames).",
        anchor="donation-that-is-not-used",
    )


def _shape_and_dtype(leaf: AnyArray) -> tuple[Any, Any]:
    """Returns the shape and dtype of an array; for another value of JAX, (None, its type)."""
    array_type = jax.typeof(leaf)
    return getattr(array_type, "shape", None), getattr(array_type, "dtype", array_type)
