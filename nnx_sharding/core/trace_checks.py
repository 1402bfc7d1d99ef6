"""Checks of what a traced function did: changes of the graph that mean nothing outside its trace.

They run once for each trace. What they refuse would otherwise surface later and elsewhere: a leaked
tracer in a static value, a captured object in two graphs, arrays that became constants. The modules
before and after the call are described by two tables of objects (``structure.py``), with the same
objects first: an *entry* describes one object, and its *index* is its place in the table.

From other modules:

    Flat        what was flattened: a structure, the arrays by slot, the objects by index
    Static      a static value; ``by_identity`` if it equals only itself
    NamedSpec   the name of a Variable, such as ``model.kernel``, and its spec
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeGuard

import jax

from .. import _compat
from ..errors import CapturedArrayWarning, StrictError, message, raise_listed, warn_or_raise
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

    entry: int  # its index
    path: Path  # from the object to what is wrong in it; empty for the object itself


def check_objects(
    before: Structure,
    after: Flat,
    arguments: Sequence[Argument],
    static_ids: Set[int],
    *,
    name: str,
    updates: bool,
) -> None:
    """Raises an error for what cannot be written back to the caller's objects.

    Args:
      before: the structure of the arguments.
      after: the graph after the call, with the same objects first.
      arguments: those of the call, by whose names the user knows objects.
      static_ids: the ids of earlier static values that are compared by identity.
      name: of the transform, in messages.
      updates: whether changes of structure are written back.
    """
    structure = after.structure
    num_before = len(before.entries)
    kinds = _TRACER_IN_STATIC, _CAPTURED_OBJECT, _CLASS_CHANGED, _STATIC_CHANGED
    misused: dict[_Misuse, list[_Misused]] = {misuse: [] for misuse in kinds}
    for index, entry in enumerate(structure.entries):
        old = before.entries[index] if index < num_before else None  # None: the object is new
        # Most objects: what the function did not change has kept its entry.
        if old is entry and old is not None:
            continue
        traced_paths = _tracers(entry, static_ids)  # in its static values
        misused[_TRACER_IN_STATIC] += (_Misused(index, path) for path in traced_paths)
        if isinstance(entry, NodeEntry | VariableEntry):
            # One that is new in the graph, but was not made in this trace.
            if old is None and not _compat.can_update(after.objects[index]):
                misused[_CAPTURED_OBJECT].append(_Misused(index, ()))
            elif old is not None and old.type is not entry.type:
                misused[_CLASS_CHANGED].append(_Misused(index, ()))
        elif isinstance(entry, StaticObject):
            is_changed = old is not None and old != entry
            if is_changed and not updates:
                misused[_STATIC_CHANGED].append(_Misused(index, ()))
    # One kind of misuse at a time: the others may follow from it.
    misuse = next((misuse for misuse in kinds if misused[misuse]), None)
    if misuse is None:
        return
    starts = named_parts(arguments)
    names = structure.names([*starts, ("output", structure.root)])
    names.update(before.names(starts))  # the user knows objects by the names of the arguments
    lines = []
    for index, path in misused[misuse]:
        expression = accessor(names.get(index, "an object"), path)  # "model.config" + ["scale"]
        lines.append(f"  {expression}: {type(after.objects[index]).__name__}")
    raise_listed(misuse.error, f"{name}: {misuse.head}", lines, misuse.remedy)


def check_output(
    after: Flat, variables: Mapping[int, NamedSpec], carried: Set[int], *, name: str
) -> None:
    """Checks that, without graph updates, no output is an input or captured Variable.

    Args:
      after: the graph after the call.
      variables: the names and specs of the Variables of the arguments, by index.
      carried: the indices of objects that may be outputs all the same.
      name: of the transform, in messages.
    """
    lines = []
    structure = after.structure
    # Each Variable and array of the output; ``root_slots`` are those of arrays outside of objects.
    for location in structure.walk(structure.root, iter(structure.root_slots)):
        index = location.object_index
        path = accessor("output", location.path)
        # A bare array has no index. The caller gets a new one from JAX in any case.
        if index is None or index in carried:
            continue
        if index in variables:
            lines.append(f"  {path}: the input {variables[index].name}")
        elif not _compat.can_update(after.objects[index]):  # it was not made in this trace
            lines.append(f"  {path}: captured")
    raise_listed(
        ValueError,
        f"{name}: Variable aliasing is not supported without graph updates: these outputs are "
        "Variables of the inputs, or were captured:",
        lines,
        f"Return a copy made by nnx.clone, or use {_BOTH_MODES}.",
    )


def check_captured(fun: Callable[..., Any], leaves: Arrays, *, name: str, strict: bool) -> None:
    """Warns about captured sharded arrays, which become replicated constants of the program.

    An array on Explicit axes may be captured if it is only indexed: its type shards what is read.

    Args:
      fun: the user's function.
      leaves: the arrays of its arguments.
      name: of the transform, in messages.
      strict: whether the warning is an error.
    """
    # Not by `isinstance`, which asks a lazy proxy for the class of its target, and so loads that.
    constants = [x for x in _compat.trace_constants() if type(x) is _compat.ArrayImpl]
    sharded = [x for x in constants if not x.is_fully_replicated]
    if sharded:  # JAX's checkify makes arguments constants as well
        argument_ids = set(map(id, leaves))
        sharded = [x for x in sharded if id(x) not in argument_ids]
    if not sharded:
        return
    operations = _compat.operations_on_constants()  # by id of the array, the primitives' names
    lines = []
    # Each array with the user's expression for it, such as ``table`` or ``model.kernel``.
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


def _tracers(entry: Entry | None, static_ids: Set[int]) -> Iterator[Path]:
    """Yields the paths to Variables and traced arrays among the static values of an object.

    A module with ``self.config = {"scale": x}``, where ``config`` is static, has ``x`` at
    ``("config", "scale")``.

    Args:
      entry: describes the object.
      static_ids: the ids of static values that were there before the call, and are left out.
    """
    # Nearly all objects have none, which is much faster to see than with the paths: this looks at
    # the same static values, at any depth.
    if not any(map(_is_traced, identities_in(children_of(entry)))):
        return
    pending = list(parts_of(entry).items())  # no recursion: statics may be nested deeply
    while pending:
        path, child = pending.pop()
        if isinstance(child, Container):
            # The leaves of a pytree are data, and arrays may be there. What is static is its node
            # data, such as the settings of a registered class. It has no path of its own.
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

    If there are fewer outputs of a shape and dtype than donated arrays, all of the latter are
    listed: which of them is not reused is up to XLA.

    Args:
      donated: the name and the array of each donated argument, by slot.
      outputs: all results of the program.
      name: that of the transform, in messages.
      fun: that of the user's function.
    """
    if not donated:
        return
    # XLA reuses a donated buffer for any one output of its shape and dtype.
    surplus = Counter(map(_shape_and_dtype, outputs))  # outputs less donated arrays, by type
    surplus.subtract(_shape_and_dtype(leaf) for _, leaf in donated.values())
    lines = [
        array_line(argument, leaf)
        for argument, leaf in donated.values()
        if surplus[_shape_and_dtype(leaf)] < 0
    ]
    raise_listed(
        StrictError,
        f"{name}: these arguments are donated, but {fun} has no result of their shape and dtype "
        "that could reuse their memory:",
        lines,
        "Do not donate them (donate_argnums, donate_argnames).",
        anchor="donation-that-is-not-used",
    )


def _shape_and_dtype(leaf: AnyArray) -> tuple[Any, Any]:
    """Returns the shape and dtype of an array; of another value of JAX its type."""
    array_type = jax.typeof(leaf)
    return getattr(array_type, "shape", None), getattr(array_type, "dtype", array_type)
