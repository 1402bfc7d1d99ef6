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

From other modules:

    Place       the path of a module (empty outside of modules) and whether it is the backward pass
    Buffer      an array in memory: the ``name`` of its instruction, and the ``first`` and ``last``
                step of the schedule at which it is live
    Allocation  a block of memory: an argument's (``parameter``, its number), a result's
                (``is_result``), or of ``values``, buffers that are there one after another
    Module      the HLO program. ``maker`` is the instruction that makes a value, ``argument`` the
                number of the argument that a value is, ``homes`` has computations by instruction
    dims_at     the shape of the part of a result at an index; () if there is none
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
      owners: by the number of the argument; others are inputs of which nothing is known.
      parameter_modules: the paths of the modules of those that are parameters, by number.
      modules: the paths of all modules around arguments.
      optimizers: the paths of modules that have the state of an optimizer, but no parameters.
      gradient_shapes: module → the shapes that gradients of its own parameters may have: whole or
        a shard, and without the first dimension in a loop over layers.
    """

    def __init__(self, module: Module, rows: Iterable[ParameterRow]):
        """Finds out what each argument is for.

        Args:
          module: the program.
          rows: its arguments, with their paths and roles.
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
                whole = {row.shape, row.shard_shape}
                of_layer = {dims[1:] for dims in whole}
                self.gradient_shapes[owner.place.path] |= whole | of_layer
        # A train state, which is around parameters as well as their moments, is no optimizer.
        self.optimizers = around_states - around_parameters

    def owner(self, number: int) -> Owner:
        """Returns what the argument with this number counts as."""
        return self.owners.get(number, Owner(None, "inputs"))


class BufferOwners:
    """Decides what the arrays in memory are for, by the rules at the top of this file.

    Args:
      module: the program.
      finder: finds the places of its instructions.
      arguments: what its arguments are for.
      buffers: what it keeps in memory.

    Attributes:
      arguments: as given.
      places: the place at each step of the schedule.
    """

    def __init__(self, module: Module, finder: PlaceFinder, arguments: Arguments, buffers: Buffers):
        self._module, self._finder, self.arguments = module, finder, arguments
        self.places = finder.places_of_schedule(buffers.schedule)
        self._backward_steps = [i for i, place in enumerate(self.places) if place.backward]

    def owner_of(self, buffer: Buffer, allocation: Allocation) -> Owner:
        """Decides what a buffer of an allocation counts as."""
        # Rule 1: an argument. The memory of a result may hold other arrays before: the result is
        # the one that is live to the end of the schedule.
        is_result = allocation.is_result and buffer.last >= len(self.places) - 1
        if is_result and allocation.parameter is not None:  # a donated argument, updated in place
            return self.arguments.owner(allocation.parameter)
        if buffer.name not in self._module.homes:  # the compiler's own, such as a call's stack
            return Owner(None, "intermediates")
        array = Value(self._module.homes[buffer.name], buffer.name, buffer.index)
        number = self._module.argument(computing_value(self._module, array, past_user_moves=True))
        if number is not None:
            argument = self.arguments.owner(number)
            return argument._replace(use="outputs") if is_result else argument
        # Rule 2: the place, which is that of the instruction that computes the array. A move that
        # the user wrote belongs to the module that moves it, so this time it is not followed.
        computed = computing_value(self._module, array)
        maker = self._module.maker(computed)
        assert maker is not None  # computing_value stops before what damaged text lacks
        place = self._finder.place_of(maker)
        shape = dims_at(maker, computed.index)
        if place is None or not place.path or place.path in self.arguments.optimizers:
            place = self._place_of_parameter(computed, shape) or place
        # Rule 3: the use.
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
        """Tells whether one of these steps of the schedule is in the backward pass."""
        steps = self._backward_steps  # in order
        return bisect.bisect(steps, after) < bisect.bisect(steps, until)

    def _last_step(self, buffer: Buffer, allocation: Allocation, computed: Value) -> int:
        """Returns the last step at which an array is live, through loops that carry it on.

        The compiler names it anew before, in and after a loop: as several buffers, one after
        another in one place, that are computed by one instruction. Each begins right after the one
        before, at the latest.

        Args:
          buffer: the array.
          allocation: the block of memory that it is in.
          computed: the value that computes it.
        """
        last = buffer.last
        for later in allocation.values:  # in the order of their first steps, for each offset
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
        search goes breadth-first over operands of that shape, up to those that are in a module. A
        gradient is preferred to a parameter, as it says the pass, too.
        """
        if not shape:  # numbers are everywhere
            return None
        pending, seen = [computed], {computed.name}
        found: Place | None = None  # the last one that was met
        while pending and len(seen) < _MAX_VALUES:
            value = pending.pop(0)
            place = self._place_of_value(value)
            if place is not None and place.path:  # the search ends at modules
                # A parameter, or an array of its shape that its module computes.
                if shape in self.arguments.gradient_shapes[place.path]:
                    found = place
                    if place.backward:  # a gradient
                        break
                continue
            instruction = self._module.maker(value)
            # A loop mixes all that it carries.
            if instruction is None or instruction.opcode == "while":
                continue
            for operand in self._module.operands(value):
                source = computing_value(self._module, operand)
                maker = self._module.maker(source)
                # An instruction may make a tuple: the shape is that of the array in it.
                if maker and maker.name not in seen and dims_at(maker, source.index) == shape:
                    seen.add(maker.name)
                    pending.append(source)
        return found

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

    The state of an optimizer belongs to the module of the parameter that its path ends like:
    ``optimizer.opt_state[0].mu.up.kernel`` to ``model.up``, of ``model.up.kernel``. If parameters
    of several modules end so, it belongs to where it is.
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
            module, use = row.path, "inputs"  # an input is listed by its own path
        owners.append(Owner(Place(module, False), use))
    return owners


def _module_around(path: str) -> str:
    """Returns the module that has an array at this path; the path itself without one."""
    return [path, *enclosing_paths(path)][-1]
