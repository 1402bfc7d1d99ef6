"""The loop that ``scan`` runs: a pure function of arrays for each step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from .. import _compat
from ..activations.variables import resharded
from ..core.call_context import caller_here
from ..core.naming import name_of
from ..core.none_specs import PLAIN
from ..core.outcome import Outcome, OutputGroup
from ..core.pure import Pure
from ..core.static_equality import Static
from ..core.structure import NodeEntry, RefEntry, VariableEntry
from ..errors import raise_listed, see
from ..specs.mapped_axis import BROADCAST, CARRY
from ..specs.paths import accessor
from .axis_prefixes import captures


class Loop:
    """A loop over a pure function, itself a function of the same flat arrays.

    Arrays of objects that are not mapped are carried: the next step reads what a step writes to
    them. JAX turns those that no step writes into constants.
    """

    def __init__(
        self,
        options: Iterable[tuple[str, Static]],
        pure: Pure,
        function: Callable[..., Any],
        in_specs: Sequence[Any],
        out_specs: Sequence[Any],
    ):
        self._options = {key: option.value for key, option in options}
        self._function, self._structure, self._names = function, pure.structure, pure.names
        self._signature = pure.signature
        structure = pure.structure
        self._mapped = {s: x.index for s, x in enumerate(in_specs) if x.index is not None}
        self._carry = [s for s in structure.root_slots if in_specs[s] is CARRY]
        refs = structure.slots_of(RefEntry)
        if mapped_refs := [self._names[slot] for slot in refs.intersection(self._mapped)]:
            raise ValueError(
                f"scan: a jax.Ref cannot be mapped: {', '.join(sorted(mapped_refs))}. Give it the "
                "axis None: the next step then reads what a step writes to it."
            )
        # Where each other carried array belongs: the index of its object, and its place in that.
        # Without graph updates only Variables and the carry keep what a step writes.
        carried = pure.transform.carried_objects(pure)
        self._places = {
            slot: (index, number)
            for index, slots in enumerate(structure.slots)
            if pure.updates
            or index in carried
            or isinstance(structure.entries[index], VariableEntry)
            for number, slot in enumerate(slots)
            if slot not in self._mapped and slot not in refs
        }
        self._carried = [*self._carry, *self._places]
        used = {*self._carried, *self._mapped}
        self._others = [slot for slot in range(len(in_specs)) if slot not in used]
        self._has_refs = bool(refs)
        self._kept_step = functools.lru_cache(maxsize=64)(self._step)
        self._group_axes = [axis.index for axis in out_specs]
        self._carry_group = out_specs.index(CARRY) if CARRY in out_specs else None
        # Each step gets the same structure, so none may change the structure of what it passes on.
        self._fixed: set[int] = set()
        self._objects: dict[int, str] = {}
        stacked = {index for index in captures(structure) if not structure.slots[index]}
        for target in pure.targets:
            for part in target.parts:
                paths = structure.paths_to_objects([(part.keys, part.child)])
                self._fixed.update(
                    paths.keys() - stacked if part.spec in (None, BROADCAST, CARRY) else ()
                )
                self._objects |= {i: accessor(target.name, path) for i, [path] in paths.items()}

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """The outputs and the outcome of all steps, in the form that the function has for one."""
        self._check_lengths(leaves)
        others = [slot for slot in self._others if _is_carried(leaves[slot])]
        fixed = tuple((s, Static.of(leaves[s])) for s in self._others if s not in others)
        # At top level JAX compiles the loop again for each new function, so it is kept, but must
        # not keep the user's objects alive.
        is_kept = _compat.trace_is_clean() and not self._has_refs
        is_kept = is_kept and all(isinstance(leaves[s], PLAIN) for s, _ in fixed)
        step = (self._kept_step if is_kept else self._step)(fixed)
        carry = self._labelled([*self._carried, *others], leaves)
        mapped = [jnp.moveaxis(leaves[slot], axis, 0) for slot, axis in self._mapped.items()]
        last, (stacked, outcome) = jax.lax.scan(step, carry, mapped, **self._options)
        final = {
            outcome.sources[slot]: array
            for slot, array in zip(self._slots_after(outcome), last.arrays, strict=False)
        }
        groups = []
        for number, (group, axis) in enumerate(zip(stacked, self._group_axes, strict=True)):
            if axis is None:
                positions = sorted(position for group, position in final if group == number)
                arrays = [final[number, position] for position in positions]
            else:
                arrays = [jnp.moveaxis(array, 0, axis) for array in group.arrays]
            groups.append(OutputGroup(("",) * len(arrays), arrays))
        return (*groups, outcome)

    def _step(self, fixed: Sequence[tuple[int, Static]]) -> Callable[..., Any]:
        """What JAX runs at each step; ``fixed`` has what is not an array, by slot."""
        values = {slot: static.value for slot, static in fixed}
        slots = [*self._carried, *(slot for slot in self._others if slot not in values)]

        def step(carry: OutputGroup, slices: Sequence[Any]) -> tuple[OutputGroup, Any]:
            given = dict(zip([*slots, *self._mapped], [*carry.arrays, *slices], strict=True))
            given |= values
            every = [given[slot] for slot in range(len(given))]
            *groups, outcome = self._function(*every)
            self._check_structure(groups, outcome)
            arrays = outcome.arrays(every, groups)
            after = dict(zip(self._carried, self._slots_after(outcome), strict=True))
            new = [arrays[after[slot]] if slot in after else every[slot] for slot in slots]
            # As elsewhere, a new value in an object has the sharding of the old one.
            new = [
                resharded(x, every[slot]) if slot in self._places else x
                for slot, x in zip(slots, new, strict=True)
            ]
            pairs = zip(groups, self._group_axes, strict=True)
            out = [None if axis is None else group for group, axis in pairs], outcome
            return OutputGroup(carry.names, tuple(new)), out

        return step

    def _labelled(self, slots: Sequence[int], leaves: Sequence[Any]) -> OutputGroup:
        """The carry, labelled so that JAX's messages name the arrays."""
        names = tuple(self._names[slot] for slot in slots)
        return OutputGroup(names, tuple(leaves[slot] for slot in slots))

    def _slots_after(self, outcome: Outcome) -> list[int]:
        """The slot of each carried array after a step."""
        after = outcome.structure
        root = [s for s in after.root_slots if outcome.sources[s][0] == self._carry_group]
        return [*root, *(after.slots[index][number] for index, number in self._places.values())]

    def _check_lengths(self, leaves: Sequence[Any]) -> None:
        """Checks that all arrays have the same length along their axes.

        Raises:
          ValueError: they differ, or one has no such axis.
        """
        lengths: dict[Any, list[str]] = {}
        for slot, axis in self._mapped.items():
            shape = jnp.shape(leaves[slot])
            has_axis = -len(shape) <= axis < len(shape)
            length = f"length {shape[axis]}" if has_axis else f"no axis {axis}"
            lengths.setdefault(length, []).append(f"{self._names[slot]}{shape}")
        if not lengths and self._options["length"] is None:
            self._refuse_no_length()
        if length := self._options["length"]:
            lengths.setdefault(f"length {length}", []).append("the option length")
        if len(lengths) > 1 or any(not text.startswith("length") for text in lengths):
            lines = [
                f"  {length}: {', '.join(names[:5])}" + ", …" * (len(names) > 5)
                for length, names in lengths.items()
            ]
            head = "scan: everything mapped must have the same length:"
            raise_listed(ValueError, head, lines)

    def _refuse_no_length(self) -> NoReturn:
        fun: Any = caller_here().fun  # type: ignore[union-attr]
        arguments = dict.fromkeys(self._signature.keywords)
        try:
            inspect.signature(fun).bind(*self._signature.names, **arguments)
        except TypeError as error:
            missing = TypeError(f"scan: {name_of(fun)}: {error}.")
            raise see(missing, anchor="number-of-steps") from None
        unknown = ValueError(
            f"scan: no array is mapped along an axis, so {name_of(fun)} has no number of steps. "
            "Give length=..., or an axis in in_axes to an argument that is an array."
        )
        raise see(unknown, anchor="number-of-steps")

    def _check_structure(self, groups: Sequence[OutputGroup], outcome: Outcome) -> None:
        """Checks that a step did not change the structure of what it passes on.

        Raises:
          ValueError: it did.
        """
        own = {index for index, _ in self._places.values()}
        lines = [x for index in sorted(own | self._fixed) for x in self._changes(index, outcome)]
        if not lines:
            known = {outcome.sources[slot] for slot in self._slots_after(outcome)}
            lines = [
                f"  {name}: is new"
                for number, (group, axis) in enumerate(zip(groups, self._group_axes, strict=True))
                for position, name in enumerate(group.names)
                if axis is None and (number, position) not in known
            ]
        raise_listed(
            ValueError,
            "scan: a step changed the structure of what is the same for all steps, or carried:",
            lines,
            "Give it an axis, so that each step has its own, or make the change outside of the "
            "loop.",
        )

    def _changes(self, index: int, outcome: Outcome) -> list[str]:
        """What a step changed in the structure of one object."""
        before, after = self._structure.entries[index], outcome.structure.entries[index]
        if after is None or before == after:  # None without graph updates, which do not change it
            return []
        if not isinstance(before, NodeEntry) or not isinstance(after, NodeEntry):
            return [f"  {self._objects[index]}: is changed"]
        old, new = (dict(zip(x.keys, x.children, strict=True)) for x in (before, after))
        keys = dict.fromkeys([*old, *new])
        changed = [key for key in keys if (key in old, old.get(key)) != (key in new, new.get(key))]
        changed = [key for key in changed if key != _compat.STATUSES] or changed
        return [f"  {accessor(self._objects[index], (key,))}: is changed" for key in changed]


def _is_carried(leaf: Any) -> bool:
    """Whether JAX can carry something; flags and other settings are not traced."""
    is_array = _compat.is_array_like(leaf) and not _compat.is_ref(leaf)
    return is_array and not isinstance(leaf, bool | int)
