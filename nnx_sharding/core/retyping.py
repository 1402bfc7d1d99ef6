"""Types of the arrays before, in and after a call under other axis types, such as ``auto_axes``.

The axes of a mesh have types. Over an Explicit axis, the sharding of an array is a part of the
array's type in a trace. Over an Auto axis, the compiler chooses the sharding. An array that gets
other axis types is *retyped*. On the way into the call, an array keeps its sharding over the axes
that remain Explicit. On the way out, an unchanged array is the original one, and a new array in an
existing object gets the type of the array that it replaces. Any other array needs a declared spec,
because nobody knows its sharding on Auto axes.

The objects before and after the call are described by two tables (``structure.py``) with the same
objects first. A *slot* is the position of an array in the list of all arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..errors import raise_if_any
from ..specs.fitting import axes_of_type, describe_mesh, fit_sharding, keep_axes, spec_and_mesh
from ..specs.types import AnyMesh, Arrays, AxisName, Spec
from .constrain import retype, retype_all, type_mesh, type_spec
from .flatten import Flat, flatten
from .problems import array_line
from .rebuild import rebuild
from .structure import Structure


class _Left(NamedTuple):
    """One array of a trace that left Auto axes; kept alive, so that ids of arrays stay unique."""

    typed: jax.Array  # the array outside, with a sharding over Explicit axes in its type
    inside: jax.Array  # the same array, still on Auto axes


class LeftAutoAxes:
    """Arrays of one trace that left Auto axes, each with the same array still on Auto axes.

    Modules of a strategy run on Auto axes, and their outputs are typed before anyone knows what the
    function does with them. They are whole in the dimensions of columns, because JAX refuses many
    operations on sharded columns. If the function only returns an output, that type would gather
    what the declared sharding then divides again. So a result goes from the Auto axes directly to
    its declared sharding.

    Attributes:
      declared: the ids of the arrays outside that are results with a declared sharding;
        :meth:`as_declared` adds them.

    Private attributes, whose keys are ids, because tracers have no hash:

        _trace   the trace to which the arrays belong
        _left    by the id of an array that left: the array, and the same array on Auto axes
        _notes   by this id: functions that are called with the declared sharding of the array
    """

    def __init__(self) -> None:
        """Starts with no arrays, in the current trace."""
        self._trace = _compat.current_trace()
        self._left: dict[int, _Left] = {}
        self.declared = set[int]()
        self._notes: dict[int, list[Callable[[NamedSharding], None]]] = {}

    def add(self, typed: jax.Array, inside: jax.Array) -> None:
        """Records an array: as it is outside, and as it is still on Auto axes.

        Arrays of inner traces are left out, because they cannot be results, and JAX would take
        references to them for leaks.
        """
        if _compat.trace_of(inside) is self._trace:
            self._left[id(typed)] = _Left(typed, inside)

    def note_declared(self, typed: jax.Array, note: Callable[[NamedSharding], None]) -> None:
        """Remembers to call ``note`` with the declared sharding of an array, if it has one.

        :meth:`as_declared` calls ``note`` when the function has returned, if the array is a result.
        The report of activations uses this. An array that did not leave Auto axes is ignored.
        """
        if id(typed) in self._left:
            self._notes.setdefault(id(typed), []).append(note)

    def as_declared(self, flat_after: Flat, specs: Sequence[Spec]) -> Flat:
        """Returns the graph after a call, with arrays that left Auto axes typed as declared.

        Args:
          flat_after: the graph.
          specs: the declared spec of each of its arrays.
        """
        if not self._left:  # most functions run no module of a strategy on Auto axes
            return flat_after
        leaves = [*flat_after.leaves]
        for slot, declared in enumerate(specs):
            left = self._left.get(id(leaves[slot]))
            if left is None or not isinstance(declared, PartitionSpec | NamedSharding):
                continue  # the array did not leave Auto axes, or nothing is declared for it
            mesh = type_mesh(left.typed)
            pair = spec_and_mesh(declared, mesh)  # a plain spec is for ``mesh``
            assert pair is not None  # safe because ``declared`` has a spec
            spec, declared_mesh = pair
            has_same_axes = declared_mesh.axis_names == mesh.axis_names
            # An array on Auto axes can get any sharding as its type, with two exceptions: types
            # have no UNCONSTRAINED dimensions, and a whole array is not an unreduced sum.
            is_type = not spec.unreduced and PartitionSpec.UNCONSTRAINED not in spec
            if has_same_axes and is_type:
                self.declared.add(id(left.typed))
                explicit = axes_of_type(mesh, AxisType.Explicit)
                leaves[slot] = retype(left.inside, mesh, keep_axes(spec, explicit))
                for note in self._notes.get(id(left.typed), ()):
                    note(jax.typeof(leaves[slot]).sharding)
        return flat_after._replace(leaves=leaves)


# The arrays of the innermost lifted function that is being traced; None outside of one.
LEFT_AUTO_AXES: ContextVar[LeftAutoAxes | None] = ContextVar("LEFT_AUTO_AXES", default=None)


@contextmanager
def recorded_leaving() -> Iterator[LeftAutoAxes]:
    """Records the arrays that leave Auto axes in the block."""
    left = LeftAutoAxes()
    token = LEFT_AUTO_AXES.set(left)
    try:
        yield left
    finally:
        LEFT_AUTO_AXES.reset(token)


_MANUAL = AxisType.Manual


class AxisTypeChange(NamedTuple):
    """Axis types that change for the duration of a call."""

    outer: AbstractMesh  # the mesh around the call
    inner: AbstractMesh  # the mesh during the call

    @classmethod
    def of(
        cls,
        mesh: AnyMesh,
        axes: Collection[AxisName] | bool | None,
        kind: AxisType,
        *,
        name: str,
        option: str = "axes",
    ) -> AxisTypeChange | None:
        """Returns the change of some axes of a mesh to one type; None if all have it already.

        Args:
          mesh: the mesh.
          axes: the axes. True or None stand for all axes but Manual ones, which cannot change. The
            caller must not pass False.
          kind: the type that the axes get.
          name: the function that the user called, for messages.
          option: the option with the axes, for messages.

        Raises:
          ValueError: the mesh has no such axis, or an enclosing ``shard_map`` maps over it.
        """
        outer = mesh.abstract_mesh
        allowed = [axis for axis in outer.axis_names if axis not in axes_of_type(outer, _MANUAL)]
        chosen = allowed if axes is None or isinstance(axes, bool) else axes
        # A spec with these axes fits the mesh if the mesh has all of them, if none is Manual, and
        # if none is named twice.
        reasons = fit_sharding(PartitionSpec(*chosen), outer).reasons  # "" if it fits
        if reasons:
            raise ValueError(
                f"{name}: {option}={axes!r}: {reasons}\nThe mesh is {describe_mesh(outer)}."
            )
        changed = dict.fromkeys(set(chosen) - axes_of_type(outer, kind), kind)
        return cls(outer, outer.update_axis_types(changed)) if changed else None


class LeavingArrays(NamedTuple):
    """The arrays of a result, on their way out of a call under other axis types."""

    arrays: list[Any]  # all arrays by slot; those in ``untyped`` have the types of the call
    untyped: dict[int, Any]  # by slot: arrays whose types outside of the call are not known


class RetypedArrays(NamedTuple):
    """The arrays that go into a call, before and during it.

    Attributes:
      change: the mesh outside and inside of the call; None if no axis type changes.
      leaves: the arrays before the call, on the outer mesh.
      inside: the same arrays during the call, on the inner mesh.
    """

    change: AxisTypeChange | None
    leaves: Arrays
    inside: Arrays

    @classmethod
    def of(cls, change: AxisTypeChange | None, leaves: Arrays) -> RetypedArrays:
        """Returns arrays that keep their sharding over the axes that remain Explicit."""
        inside = leaves if change is None else retype_all(leaves, change.inner)
        return cls(change, leaves, inside)

    def context(self) -> AbstractContextManager[Any]:
        """Returns the context in which the function has to be called; it sets the inner mesh."""
        if self.change is None:
            return nullcontext()
        return jax.sharding.use_abstract_mesh(self.change.inner)

    def with_outer_types(self, old_structure: Structure, flat_after: Flat) -> LeavingArrays:
        """Returns the arrays of a result with their types outside of the call, if these are known.

        A type is known if the sharding over Explicit axes is. An unchanged array is the original
        one, a new array in an old object has the type of the array that it replaces, and scalars
        are replicated.

        Args:
          old_structure: the structure of the arguments.
          flat_after: the graph after the call, with the same objects first.
        """
        assert self.change is not None
        outer, inner = self.change
        # If the function returns an array unchanged, the result has the original array, and not
        # its retyped copy.
        originals = {id(new): old for new, old in zip(self.inside, self.leaves, strict=True)}
        arrays: list[Any] = [originals.get(id(leaf), leaf) for leaf in flat_after.leaves]
        # The slots of arrays that still have the types of the call. All other arrays need no new
        # type, because they are original ones, or on no mesh.
        inner_slots = [slot for slot, array in enumerate(arrays) if type_mesh(array) == inner]
        specs = self._old_specs(old_structure, flat_after.structure)
        for slot in inner_slots:
            if arrays[slot].ndim == 0 and slot not in specs:
                specs[slot] = PartitionSpec()
        # An update may have another shape, which the old spec does not divide.
        typed_slots = [
            slot
            for slot in sorted(specs.keys() & {*inner_slots})
            if not fit_sharding(specs[slot], outer, arrays[slot].shape).problems
        ]
        typed_arrays = retype_all(
            [arrays[slot] for slot in typed_slots], outer, [specs[slot] for slot in typed_slots]
        )
        for slot, array in zip(typed_slots, typed_arrays, strict=True):
            arrays[slot] = array
        untyped = {slot: arrays[slot] for slot in sorted({*inner_slots} - {*typed_slots})}
        return LeavingArrays(arrays, untyped)

    def _old_specs(
        self, old_structure: Structure, new_structure: Structure
    ) -> dict[int, PartitionSpec]:
        """Returns the specs that arrays of old objects had in their types before the call.

        The keys are slots after the call. If an object has another number of arrays than before,
        its arrays are left out, because nothing tells which of them replaces which old array.
        """
        specs: dict[int, PartitionSpec] = {}
        # zip is not strict, because objects that the function made come after the old ones.
        for old_slots, slots in zip(old_structure.slots, new_structure.slots, strict=False):
            if len(old_slots) == len(slots):
                for old_slot, slot in zip(old_slots, slots, strict=True):
                    old_spec = type_spec(self.leaves[old_slot])
                    # None: no axis of the array's mesh is Explicit.
                    specs[slot] = PartitionSpec() if old_spec is None else old_spec
        return specs

    def with_declared_types(
        self,
        old_structure: Structure,
        flat_after: Flat,
        specs: Sequence[Spec],
        names: Sequence[str],
        *,
        name: str,
        option: str,
    ) -> Flat:
        """Returns the graph after a call, with the types of the outer mesh.

        The declared spec of an array decides on its type. If there is none,
        :meth:`with_outer_types` decides.

        Args:
          old_structure: the structure of the arguments.
          flat_after: the graph after the call, with the same objects first.
          specs: the declared spec of each array of ``flat_after``.
          names: the expression for each array of ``flat_after``, for messages.
          name: the name of the transform, for messages.
          option: the name of the option that declares specs of results, for messages.

        Raises:
          ValueError: a result was computed on Auto axes and has no declared spec.
        """
        if self.change is None:
            return flat_after
        # ``untyped`` has the arrays whose types outside of the call are not known, by slot.
        arrays, untyped = self.with_outer_types(old_structure, flat_after)
        for slot, declared in enumerate(specs):
            pair = spec_and_mesh(declared, self.change.outer)  # None without a declared spec
            # A ref has no sharding in its type, so it is left out here and in ``untyped``.
            if pair is not None and not _compat.is_ref(arrays[slot]):
                spec, _ = pair
                arrays[slot] = retype(arrays[slot], self.change.outer, spec)
                untyped.pop(slot, None)
        raise_if_any(
            ValueError,
            f"{name}: these results were computed on Auto axes, and no spec says how they are "
            "sharded on the Explicit axes outside:",
            [array_line(names[slot], array) for slot, array in untyped.items()],
            f"Declare them in {option}; P() replicates.",
        )
        return flat_after._replace(leaves=arrays)


def call_retyped(flat: Flat, arrays: RetypedArrays, call: Callable[[Any], Any]) -> Flat:
    """Calls a function of a tree under other axis types, and flattens what it returns.

    This changes the user's modules in place: they hold the arrays of the call, even after it. The
    caller then has to give them other arrays, by `rebuild` with the result. After an exception, the
    caller has to give them the old arrays.

    Args:
      flat: the tree, flattened.
      arrays: the arrays of the tree, before and during the call.
      call: a function of the tree.

    Returns:
      The result, with the objects of the tree first, at the same indices as in ``flat``.
    """
    with arrays.context():  # the mesh with the axis types of the call
        # ``foreign=True`` is safe because the modules get their arrays back when the call is over.
        # So they may also belong to an outer trace.
        out = call(rebuild(flat, arrays.inside, foreign=True))
    return flatten(out, first_objects=flat.objects)
