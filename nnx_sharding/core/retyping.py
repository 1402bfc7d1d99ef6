"""Calls of a function under other axis types, as ``auto_axes`` makes: arrays before, in and after.

On the way in, an array keeps its sharding over the axes that remain Explicit. On the way out, an
unchanged array is the original one, a new one in an existing object gets the type of what it
replaces, and anything else needs a declared spec: on Auto axes, nobody knows its sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from .. import _compat
from ..errors import raise_listed
from ..specs.fitting import axes_of_type, fit_sharding, spec_and_mesh
from ..specs.types import Spec
from .constrain import retype, type_mesh, type_spec
from .flatten import Flat, flatten
from .problems import array_line
from .rebuild import rebuild
from .structure import Structure

# The parameters of the current trace whose gradients go to partial sums, each by its id with them.
PARTIAL: ContextVar[dict[int, tuple[Any, Any]] | None] = ContextVar("PARTIAL", default=None)


class AxisTypeChange(NamedTuple):
    """Axis types that change for the duration of a call."""

    outer: AbstractMesh  # the mesh around the call
    inner: AbstractMesh  # the mesh during the call

    @classmethod
    def of(
        cls, mesh: Any, axes: Any, kind: AxisType, *, name: str, option: str = "axes"
    ) -> AxisTypeChange | None:
        """The change of some axes (True or None: all that are not manual); None if none changes.

        A ValueError of the caller with this name if the mesh has no such axis, or it is manual.
        """
        outer = getattr(mesh, "abstract_mesh", mesh)
        free = [a for a in outer.axis_names if a not in axes_of_type(outer, AxisType.Manual)]
        chosen = free if axes is None or axes is True else axes
        expected = f"expected one of {', '.join(map(repr, free))}"
        wrong = [f"  {option}: {expected}, got {axis!r}" for axis in chosen if axis not in free]
        raise_listed(ValueError, f"{name}: these options have invalid values:", wrong)
        changed = dict.fromkeys(set(chosen) - axes_of_type(outer, kind), kind)
        return cls(outer, outer.update_axis_types(changed)) if changed else None


class RetypedArrays(NamedTuple):
    """The arrays that go into a call."""

    change: AxisTypeChange | None  # the axis types that change for the call; None if none do
    leaves: Sequence[Any]  # the arrays before the call
    inside: Sequence[Any]  # the same arrays during the call

    @classmethod
    def of(cls, change: AxisTypeChange | None, leaves: Sequence[Any]) -> RetypedArrays:
        """Arrays that keep their sharding over the axes that remain Explicit."""
        if change is None:
            return cls(None, leaves, leaves)
        inside = [retype(leaf, change.inner) for leaf in leaves]
        if (partial := PARTIAL.get()) is not None:
            pairs = ((new, partial.get(id(old))) for old, new in zip(leaves, inside, strict=True))
            # All are looked up before any is added, since an unchanged array keeps its id.
            partial.update(
                (id(new), (new, retype(found[1], change.inner))) for new, found in [*pairs] if found
            )
        return cls(change, leaves, inside)

    def context(self) -> AbstractContextManager[Any]:
        """The context of the call."""
        if self.change is None:
            return nullcontext()
        return jax.sharding.use_abstract_mesh(self.change.inner)

    def leave(self, before: Structure, after: Flat) -> tuple[list[Any], dict[int, Any]]:
        """The arrays after the call, and, by slot, those that have no type yet.

        Unchanged arrays are the original ones; new ones in existing objects have the type of what
        they replace; scalars are replicated. Both structures have the same objects first.
        """
        assert self.change is not None
        outer, inner = self.change
        # What the function returns unchanged is the original array, not its retyped copy.
        origins = {id(new): old for new, old in zip(self.inside, self.leaves, strict=True)}
        left = [origins.get(id(leaf), leaf) for leaf in after.leaves]
        untyped = {slot: x for slot, x in enumerate(left) if type_mesh(x) == inner}
        specs = {slot: PartitionSpec() for slot, x in untyped.items() if not x.ndim}
        for old_slots, slots in zip(before.slots, after.structure.slots, strict=False):
            if len(old_slots) == len(slots):
                old = (type_spec(self.leaves[slot]) or PartitionSpec() for slot in old_slots)
                specs.update(zip(slots, old, strict=True))
        for slot, spec in specs.items():
            if slot in untyped and not fit_sharding(spec, outer, left[slot].shape).problems:
                left[slot] = retype(untyped.pop(slot), outer, spec)
        return left, untyped

    def leave_as(
        self,
        before: Structure,
        after: Flat,
        specs: Sequence[Spec],
        names: Sequence[str],
        *,
        name: str,
        option: str,
    ) -> Flat:
        """The outputs with the types of :meth:`leave`, but as declared where there is a spec."""
        if self.change is None:
            return after
        left, untyped = self.leave(before, after)
        for slot, declared in enumerate(specs):
            pair = spec_and_mesh(declared, self.change.outer)
            if pair is not None and not _compat.is_ref(left[slot]):
                left[slot] = retype(left[slot], self.change.outer, pair[0])
                untyped.pop(slot, None)
        raise_listed(
            ValueError,
            f"{name}: these results were computed on Auto axes, and no spec says how they are "
            "sharded on the Explicit axes outside:",
            [array_line(names[slot], x) for slot, x in untyped.items()],
            f"Declare them in {option}; P() replicates.",
        )
        return after._replace(leaves=left)


def call_retyped(flat: Flat, arrays: RetypedArrays, call: Callable[[Any], Any]) -> Flat:
    """Calls a function of a tree under other axis types, and flattens what it returns.

    The objects of the tree hold the arrays of the call until the caller rebuilds the result with
    others or, after an exception, restores the old ones.
    """
    with arrays.context():
        out = call(rebuild(flat, arrays.inside, foreign=True))
    return flatten(out, known=flat.objects)
