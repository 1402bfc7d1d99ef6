"""Decides what each array in memory is for, and the module that it belongs to: its *owner*.

The compiler says which arrays are in memory at which steps of the schedule (`buffers.py`), by the
name of the instruction that makes each. The first of these rules that applies decides (`owner_of`):

 1. An argument, or a copy, a slice or the gathered whole of one, counts as what the argument is:
    `parameters`, `optimizer state` (of the module of the parameter whose path it ends in), …; or
    as `outputs` if the program returns it in other memory.
 2. Otherwise the array is followed through copies, tuples, calls and loops to the instruction that
    computes it, whose place it has (`places.py`). Outside of modules, such as in the update of an
    optimizer, it belongs to a parameter of its shape among what it is computed from.
 3. It is in `outputs` if the program returns it; in `gradients` if it has the shape of a parameter
    of its module and is from the backward pass; in `activations` if it is from the forward pass and
    still live at an instruction of the backward pass; else in `intermediates`.

With `x` → `up` → `down` → loss, a hidden layer that the compiler keeps for the gradient of `down`:

    schedule   up dot   down dot   loss   down dot, backward   up dot, backward
    %dot.1     made     read       .      read                 .        activations of model.up
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..specs.paths import enclosing_paths
from .buffers import Allocation, Buffer, Buffers
from .by_module import MemoryUse
from .hlo import Module
from .instructions import dims_at
from .moves import computing_value
from .parameters import ParameterRow
from .places import Place, PlaceFinder
from .purposes import rows_of_inputs
from .values import Value

# Real programs need a few dozen values; damaged text may have cycles.
_MAX_VALUES = 128


class Owner(NamedTuple):
    """What an array in memory counts as; the place is None if it is unknown."""

    place: Place | None
    use: MemoryUse


class Arguments:
    """What the arguments of a program are for.

    Attributes:
      owners: the owners of arguments, by the number of the argument. Unknown ones are missing.
      parameter_modules: for each argument that is a parameter, by number, the path of its module.
      modules: the paths of all modules around arguments.
      optimizers: the paths of modules that have the state of an optimizer, but no parameters.
      gradient_shapes: module → the shapes that gradients of its own parameters may have: whole or
        a shard, and without the first dimension in a loop over layers.
    """

    def __init__(self, module: Module, rows: Iterable[ParameterRow]):
        """Finds out what each argument is for.

        Args:
          module: the program.
          rows: the arguments of the program, with their paths and roles.
        """
        rows = [row for row in rows if row.used]
        owners = owners_of_rows(rows)  # in the order of the rows
        by_path = dict(zip((row.path for row in rows), owners, strict=True))
        inputs = rows_of_inputs(module, rows)
        self.owners = {number: by_path[row.path] for number, row in inputs.items()}
        self.parameter_modules = {
            number: owner.place.path or ""
            for number, owner in self.owners.items()
            if owner.use == "parameters" and owner.place is not None
        }
        self.modules = {path for row in rows for path in enclosing_paths(row.path)}
        self.gradient_shapes = defaultdict[str | None, set[tuple[int, ...]]](set)
        around_states, around_parameters = set[str](), set[str]()
        for row, owner in zip(rows, owners, strict=True):
            if owner.use == "optimizer state":
                around_states.update(enclosing_paths(row.path))
            elif owner.use == "parameters" and owner.place is not None:
                around_parameters.update(enclosing_paths(row.path))
                whole_shapes = {row.shape, row.shard_shape}
                layer_shapes = {dims[1:] for dims in whole_shapes}
                self.gradient_shapes[owner.place.path] |= whole_shapes | layer_shapes
        # A train state is around parameters as well as their moments, so it is no optimizer.
        self.optimizers = around_states - around_parameters

    def owner(self, number: int) -> Owner:
        """Returns the owner of the argument with this number; an unknown one is an input."""
        return self.owners.get(number, Owner(None, "inputs"))


class BufferOwners:
    """Decides what the arrays in memory are for, by the rules at the top of this file.

    Args:
      module: the program.
      finder: the object that finds the places of its instructions.
      arguments: the arguments of the program, which know what each is for.
      buffers: the arrays that the program keeps in memory.

    Attributes:
      arguments: as given, like ``_module`` and ``_finder``.
      places: the place at each step of the schedule.
      _backward_steps: the steps of the schedule that are in the backward pass, in increasing order.
    """

    def __init__(self, module: Module, finder: PlaceFinder, arguments: Arguments, buffers: Buffers):
        self._module, self._finder, self.arguments = module, finder, arguments
        self.places = finder.places_of_schedule(buffers.schedule)
        self._backward_steps = [i for i, place in enumerate(self.places) if place.backward]

    def owner_of(self, buffer: Buffer, allocation: Allocation) -> Owner:
        """Decides what a buffer of an allocation counts as, by rules 1 to 3 in this order."""
        # Rule 1 is for arguments. The memory of a result may hold other arrays before; only the
        # array that is live to the end of the schedule is the result.
        is_result = allocation.is_result and buffer.last >= len(self.places) - 1
        # A result in the memory of an argument is a donated argument that is updated in place.
        if is_result and allocation.parameter is not None:
            return self.arguments.owner(allocation.parameter)
        # A buffer without an instruction is the compiler's own: the stack of a call, for example.
        if buffer.name not in self._module.homes:
            return Owner(None, "intermediates")
        array = Value(self._module.homes[buffer.name], buffer.name, buffer.index)
        number = self._module.argument(computing_value(self._module, array, past_user_moves=True))
        if number is not None:
            argument = self.arguments.owner(number)
            return argument._replace(use="outputs") if is_result else argument
        # Rule 2 finds the place of the instruction that computes the array. A move that the user
        # wrote belongs to the module that moves it, so this time such moves are not followed.
        computed = computing_value(self._module, array)
        maker = self._module.maker(computed)
        # The maker exists because `computing_value` stops before values that damaged text lacks.
        assert maker is not None
        place = self._finder.place_of(maker)
        shape = dims_at(maker, computed.index)
        if place is None or not place.path or place.path in self.arguments.optimizers:
            place = self._place_of_parameter(computed, shape) or place
        # Rule 3 finds the use.
        if is_result:
            return Owner(place, "outputs")
        if place is None:
            return Owner(None, "intermediates")
        if place.backward:
            is_gradient = shape in self.arguments.gradient_shapes[place.path]
            return Owner(place, "gradients" if is_gradient else "intermediates")
        last = self._last_step(buffer, allocation, computed)
        is_kept = self._has_backward_step(after=buffer.first, until=last)
        return Owner(place, "activations" if is_kept else "intermediates")

    def _has_backward_step(self, *, after: int, until: int) -> bool:
        """Tells whether a step behind ``after``, up to ``until``, is in the backward pass."""
        steps = self._backward_steps  # in increasing order, as `bisect` needs them
        return bisect.bisect(steps, after) < bisect.bisect(steps, until)

    def _last_step(self, buffer: Buffer, allocation: Allocation, computed: Value) -> int:
        """Returns the last step at which an array is live, through loops that carry it on.

        The compiler gives the array a new name before, in and after a loop, so the array is several
        buffers. They follow each other in the same memory, and one instruction computes all of
        them. Each buffer begins right after the one before, at the latest.

        Args:
          allocation: the block of memory that the buffer is in.
        """
        last = buffer.last
        # The buffers at one offset are in the order of their first steps.
        for later in allocation.values:
            is_next = buffer.first < later.first <= last + 1
            is_same_memory = (later.offset, later.size) == (buffer.offset, buffer.size)
            if is_next and is_same_memory and later.name in self._module.homes:
                array = Value(self._module.homes[later.name], later.name, later.index)
                if computing_value(self._module, array) == computed:
                    last = max(last, later.last)
        return last

    def _place_of_parameter(self, computed: Value, shape: tuple[int, ...]) -> Place | None:
        """Finds the module of a parameter of this shape that a value is computed from.

        Optimizers compute outside of modules, from gradients and parameters of one shape. The
        search goes breadth-first over operands of that shape, up to operands that are in a module.
        It prefers a gradient to a parameter, because the place of a gradient has the pass, too.

        Returns None if the search meets neither.
        """
        if not shape:  # Numbers are everywhere, so their shape says nothing.
            return None
        pending, seen = [computed], {computed.name}
        # The place of the last parameter or gradient that was met.
        place_of_match: Place | None = None
        while pending and len(seen) < _MAX_VALUES:
            value = pending.pop(0)
            place = self._place_of_value(value)
            if place is not None and place.path:  # The search ends at modules.
                # The value is a parameter, or its module computes an array of a parameter's shape.
                if shape in self.arguments.gradient_shapes[place.path]:
                    place_of_match = place
                    if place.backward:  # The value is a gradient.
                        break
                continue
            instruction = self._module.maker(value)
            # The search does not go into a loop, because a loop mixes everything that it carries.
            if instruction is None or instruction.opcode == "while":
                continue
            for operand in self._module.operands(value):
                source = computing_value(self._module, operand)
                maker = self._module.maker(source)
                # If an instruction makes a tuple, the shape of the array in the tuple counts.
                if maker and maker.name not in seen and dims_at(maker, source.index) == shape:
                    seen.add(maker.name)
                    pending.append(source)
        return place_of_match

    def _place_of_value(self, value: Value) -> Place | None:
        """Returns the place of an argument, or of the instruction that computes a value."""
        number = self._module.argument(value)
        if number is not None:
            return self.arguments.owner(number).place
        instruction = self._module.maker(value)
        return None if instruction is None else self._finder.place_of(instruction)


# A key in a path: `model.layers[0]['kernel']` has the keys model, layers, 0 and kernel.
_KEY = re.compile(r"[^.\[\]'\"]+")


def owners_of_rows(rows: Sequence[ParameterRow]) -> list[Owner]:
    """Decides what the argument of each row counts as.

    The state of an optimizer belongs to the module of the parameter whose path has the same end:
    ``optimizer.opt_state[0].mu.up.kernel`` belongs to ``model.up``, because ``model.up.kernel`` is
    a parameter. If parameters of several modules have this end, the state belongs to the module
    that it is in.
    """
    paths = [tuple(_KEY.findall(row.path)) for row in rows]  # ("model", "up", "kernel")
    # End of the path of a parameter, ("up", "kernel") or ("kernel",) or all of it → the modules of
    # the parameters whose paths end so.
    modules_by_end: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    inside_arguments = set()  # the paths of parameters without the name of the argument
    for row, path in zip(rows, paths, strict=True):
        if row.role == "parameter":
            inside_arguments.add(path[1:])
            for start in range(len(path)):
                modules_by_end[path[start:]].add(_module_around(row.path))
    owners = []
    for row, path in zip(rows, paths, strict=True):
        module = _module_around(row.path)
        ends = [path[start:] for start in range(1, len(path))]  # longest first
        is_array = row.variable is None  # The argument is an array outside of Variables.
        # A mirror is an array in a tree of the form of the parameters, such as Optax's own state.
        is_mirror = is_array and any(end in inside_arguments for end in ends)
        use: MemoryUse = "other state"
        if row.role == "parameter":
            use = "parameters"
        elif is_mirror or row.role == "optimizer state":
            use = "optimizer state"
            longest_end = next((end for end in ends if end in modules_by_end), None)
            modules = set() if longest_end is None else modules_by_end[longest_end]
            module = next(iter(modules)) if len(modules) == 1 else module
        elif is_array:
            use = "inputs"
            module = row.path  # An input is listed under its own path.
        owners.append(Owner(Place(module, False), use))
    return owners


def _module_around(path: str) -> str:
    """Returns the module that has an array at this path; the path itself without one."""
    return [path, *enclosing_paths(path)][-1]
