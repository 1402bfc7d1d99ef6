"""Decides what each collective of a program is for, from shapes, names and what it computes with.

The first rule that applies decides (`_Purposes.of`):

    parameter, state   it only moves arrays that are computed from Variables alone: parameters, or
                       others such as caches
    gradient           an array that it makes is of the backward pass of a module, has the shape of
                       a parameter of that module, or of a part of one, and is not a partial result
                       of a product with a parameter (those are activations of the same shape)
    sum                it adds up anything else: partial products, or a loss
    result             what it moves is returned, as it is or added to a Variable
    reshard            it moves anything else, such as activations

So the all-gather of a kernel sharded by `fsdp` is `parameter`, the reduce-scatter of its gradient
is `gradient`, and the all-reduce after a kernel sharded over rows by `tensor_parallel` is `sum`.

Names of operations alone do not tell these apart: the compiler moves collectives across operations
and out of loops, and merges several into one. That shapes decide is approximate where activations
have the shape of a parameter of their own module. From other modules:

    Module        the HLO program, of *computations* (lists of instructions): ``maker`` is the
                  instruction that makes a value; ``passed`` are the values that it hands on, such
                  as into a loop or out of a call; ``around`` are the calls around a computation
    Value         an array that an instruction makes, perhaps as an item of a tuple
    Located       an instruction (a collective), after the computation that it is in (its home)
    ParameterRow  an argument: its path, its shape, and that of its shard
    module_of     the path of the user's module that an operation is of, by its name; or None
    operations    the names that XLA has joined to the name of one instruction
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from ..specs.paths import enclosing_paths
from .hlo import Module
from .instructions import Instruction, arrays
from .names import common, module_of, operations
from .opcodes import ELEMENTWISE, PRODUCTS, REARRANGING, TRANSCENDENTAL
from .parameters import ParameterRow
from .values import Located, Value, reached

Purpose: TypeAlias = Literal["parameter", "state", "gradient", "sum", "result", "reshard"]


class Use(NamedTuple):
    """What a collective is for; ``Collective`` has the same fields."""

    purpose: Purpose | None = None
    parameters: tuple[str, ...] = ()
    module: str | None = None


def uses_of(
    module: Module,
    collectives: Sequence[Located],
    rows: Iterable[ParameterRow],
    updated: Sequence[str | None] = (),
) -> dict[str, Use]:
    """Decides what collectives are for.

    Args:
      module: the program.
      collectives: the collectives, each with the computation that it is in.
      rows: the arguments of the program.
      updated: for each array that the program returns, the path of the Variable that it updates, or
        None. Empty if that is not known.

    Returns:
      What each is for, by its name.
    """
    purposes = _Purposes(module, [row for row in rows if row.used], updated)
    return {collective.name: purposes.of(collective, home.name) for home, collective in collectives}


class _Purposes:
    """Decides what the collectives of one program are for."""

    def __init__(self, module: Module, used: Sequence[ParameterRow], updated: Sequence[str | None]):
        """Prepares to decide.

        Args:
          module: the program.
          used: the arguments that it takes, without those that it does not use.
          updated: as in `uses_of`.
        """
        self._module = module
        self._variables = _Variables(row for row in used if row.variable is not None)
        # The names of the program's inputs, by number: paths, as far as they are known, or else the
        # names that JAX or the compiler gave them, such as ``p.3``.
        rows = rows_of_inputs(module, used)
        arguments = {
            number: rows[number].path if number in rows else x.operation or x.name
            for number, x in module.parameters.items()
        }
        # Finds the arguments that a value is computed from.
        self._origins = Origins(module, arguments, self._variables.paths)
        # Name of an instruction whose result is returned → the paths that it updates.
        self._updated_by = _returned_by(module, updated)

    def of(self, collective: Instruction, home: str) -> Use:
        """Decides what a collective is for, by the rules at the top of this file.

        ``home`` is the name of the computation that it is in.
        """
        # For each array that it makes, the names of the user's operations.
        operations_of = _operations_of_arrays(collective, self._module.within[home])
        names = dict.fromkeys(name for names in operations_of for name in names)
        modules = [module_of(name, self._variables.modules) or "" for name in names] or [""]
        path = common(modules) or None  # the innermost module around all of them
        is_sum = collective.collective in ("all-reduce", "reduce-scatter")
        if not is_sum:  # it only moves arrays
            # For each operand, the names of the arguments that it is computed from.
            origins = [self._origins.of(Value(home, name)) for name in collective.operand_names]
            if origins and all(map(self._origins.are_variables, origins)):
                sources = frozenset().union(*origins)
                kind: Purpose = "state" if sources <= self._variables.states else "parameter"
                return Use(kind, parameters=tuple(sorted(sources)), module=path)
        if gradients := self._gradients(collective, home, operations_of, is_sum=is_sum):
            return Use("gradient", parameters=tuple(sorted(gradients)), module=path)
        if is_sum:
            return Use("sum", module=path)
        updated = self._updated_by.get(collective.name)  # the paths of Variables that it updates
        if updated is None:  # its result is not returned
            return Use("reshard", module=path)
        return Use("result", parameters=updated, module=path)

    def _gradients(
        self, collective: Instruction, home: str, operations_of: list[list[str]], *, is_sum: bool
    ) -> set[str]:
        """Collects the paths of the Variables whose gradients a collective makes.

        Args:
          collective: the collective.
          home: the name of the computation that it is in.
          operations_of: for each array that it makes, the names of the user's operations.
          is_sum: whether it adds up.
        """
        # How often the loops around it run; None for an unknown length. In a loop over layers, the
        # array is a part of one layer of a stacked Variable.
        callers = (caller for _, caller in self._module.around(home))
        loops = (caller.name for caller in callers if caller.opcode == "while")
        lengths = [*map(self._module.trip_counts.get, loops)]
        operands = [Value(home, name) for name in collective.operand_names]
        is_each = len(operands) == len(operations_of)  # each operand becomes one array
        dims_of_arrays = _dims_before_bitcasts(collective, self._module.within[home])
        paths: set[str] = set()
        for i, (dims, names) in enumerate(zip(dims_of_arrays, operations_of, strict=True)):
            # The modules of operations of the backward pass, which JAX makes by `transpose`; None
            # for an operation outside of modules.
            backward = {module_of(x, self._variables.modules) for x in names if "transpose(" in x}
            # A sum outside of modules may belong to any gradient, since the compiler merges sums.
            candidates = backward if is_sum else backward - {None}
            # The paths of the Variables of these modules of which the array can be a part.
            variables = self._variables.with_part(candidates, dims, lengths)
            own_operands = operands[i : i + 1] if is_each else operands
            # A gradient multiplies activations. A product with a parameter is an activation, too,
            # of the same shape.
            if variables and not any(map(self._origins.is_weighted, own_operands)):
                paths |= variables
        return paths


def _operations_of_arrays(
    collective: Instruction, by_name: Mapping[str, Instruction]
) -> list[list[str]]:
    """Returns the names of the user's operations for each array that a collective makes.

    XLA may have merged several collectives, and their names, into one, which makes a tuple::

        %sum = (f32[8], f32[4]) all-reduce(%a, %b), metadata={op_name="f/up/add;f/down/add"}
        %x = f32[8] get-tuple-element(%sum), index=0, metadata={op_name="f/up/add"}

    That the first array is of ``f/up/add`` is said by the name of its operand ``%a``, or of ``%x``,
    which takes it from the tuple. ``by_name`` has the instructions of the same computation.
    """
    joined, count = collective.operation, len(collective.results)
    if joined is None and len(collective.operand_names) == 1:
        # Of several slices, the compiler names none of the parts that it divides a sum into.
        operand = by_name.get(collective.operand_names[0])
        joined = None if operand is None else operand.operation
    merged = operations(joined or "")
    if count < 2 or count != len(collective.operand_names):
        return [merged] * count  # nothing says which array is of which, so each is of all
    taken_by = {  # index in the tuple of results → the name of the operation that takes it
        instruction.tuple_index: instruction.operation
        for instruction in by_name.values()
        if instruction.opcode == "get-tuple-element"
        and instruction.operand_names == (collective.name,)
    }
    operations_of = []
    for i, operand_name in enumerate(collective.operand_names):
        made_by = by_name[operand_name].operation if operand_name in by_name else None
        known = [operations(name) for name in (made_by, taken_by.get(i)) if name]
        # An operand may be named after something else, such as the loop that computes it: the
        # first name that shares an operation with the collective is the right one.
        shared = (names for names in known if not {*names}.isdisjoint(merged))
        operations_of.append(next(shared, known[0] if known else merged))
    return operations_of


def _dims_before_bitcasts(
    collective: Instruction, by_name: Mapping[str, Instruction]
) -> list[tuple[int, ...]]:
    """Returns the shapes of the arrays that a collective makes, as the program has them.

    Between slices, the compiler for TPUs reduces arrays as tiles::

        %tiles = f32[8,128] bitcast(f32[1024] %x)
        %sum = f32[8,128] all-reduce(%tiles)          an array of the shape (1024,)

    So if the only operand is a bitcast, and has the shape of the result, the shape in front of the
    bitcast counts. ``by_name`` has the instructions of the same computation.
    """
    dims = [array.dims for array in collective.results]
    if len(collective.operand_names) != 1 or len(dims) != 1:
        return dims
    operand = by_name.get(collective.operand_names[0])
    if operand is None or operand.opcode != "bitcast" or _dims_of(operand) != dims:
        return dims
    source = by_name.get(operand.operand_names[0])
    return dims if source is None else _dims_of(source)


def rows_of_inputs(module: Module, rows: Sequence[ParameterRow]) -> dict[int, ParameterRow]:
    """Finds the row of each parameter of a program, by the number of the parameter.

    They are in the order of the rows if each is one array of the shape of its row's shard, and none
    has the name of another row. JAX names a parameter after the path, but the TPU compiler may
    rename it. Otherwise those are known that have kept the path as their name.
    """
    by_path = {row.path: row for row in rows}
    inputs = module.parameters
    if inputs.keys() == {*range(len(rows))} and all(
        [shape.dims for shape in arrays(inputs[i].shape)] == [row.shard_shape]
        and by_path.get(inputs[i].operation or "", row) is row
        for i, row in enumerate(rows)
    ):
        return dict(enumerate(rows))
    names = {number: parameter.operation or "" for number, parameter in inputs.items()}
    return {number: by_path[name] for number, name in names.items() if name in by_path}


class _Variables:
    """The Variables among the arguments of a program."""

    def __init__(self, rows: Iterable[ParameterRow]):
        """Sorts the arguments by whether they may have gradients, and by their modules."""
        self.paths: set[str] = set()
        self.states: set[str] = set()  # the paths of Variables that are not parameters
        self.modules: set[str] = set()  # the paths of all modules that contain them
        # The rows that may have gradients: of the program (None), and of each module.
        self._rows: dict[str | None, list[ParameterRow]] = {}
        for row in rows:
            self.paths.add(row.path)
            outer = enclosing_paths(row.path)
            self.modules.update(outer)
            if row.role in ("optimizer state", "state"):
                self.states.add(row.path)
                continue
            # A Variable may be in lists and dicts of its module, as ``model.up.scales[0]`` is of
            # ``model.up``, but in no module in it: a dot after the path is that of another module.
            own = [path for path in outer if "." not in row.path[len(path) + 1 :]]
            for key in (None, *own):
                self._rows.setdefault(key, []).append(row)

    def with_part(
        self, modules: Iterable[str | None], dims: Sequence[int], lengths: Collection[int | None]
    ) -> set[str]:
        """Finds Variables of modules that can have a part of this shape, no smaller than a shard.

        Args:
          modules: the paths of modules; among these, None stands for all Variables of the program.
          dims: the shape of the part.
          lengths: how often the loops run in which the part is made. A loop over layers takes one
            from the first dimension.

        Returns:
          The paths of the Variables; empty without any.
        """
        if not dims:
            return set()
        # Without dimensions of size 1, which `vmap` and loops over one leave.
        long = tuple(size for size in dims if size > 1)
        # Gradients of products may be transposed. Five dimensions have too many orders to try.
        orders = itertools.permutations(long) if 1 < len(long) < 5 else [long]
        rows = [row for module in modules for row in self._rows.get(module, ())]
        for order in orders:
            paths = {row.path for row in rows if _can_have_part(row, order, lengths)}
            if paths:  # the order of the dimensions that fits first
                return paths
        return set()


class _Dimension(NamedTuple):
    """A dimension of an argument."""

    size: int
    shard: int  # its size on one device


def _can_have_part(row: ParameterRow, dims: Sequence[int], lengths: Collection[int | None]) -> bool:
    """Tells whether an array of these dimensions can be a part of a Variable, or one layer of it.

    A Variable of shape (12, 8, 16), with shards of (3, 8, 4), holds kernels of 12 layers. It has
    the part (3, 8, 16), for example; in a loop of 12 runs (8, 16); and so in a pipeline of 4 stages
    in a loop of 3 runs inside of the loop over ticks.

    Args:
      row: the Variable.
      dims: the dimensions of the array, without those of size 1.
      lengths: how often the loops run in which the array is made.
    """
    dimensions = [*map(_Dimension, row.shape, row.shard_shape)]
    if dimensions:
        layers, layers_of_stage = dimensions[0]
        # The loop over the layers of a stage is inside the loop over ticks, so there are two.
        is_in_stage = len(lengths) > 1 and layers_of_stage in lengths
        if layers in lengths or is_in_stage:  # the loop takes one layer in each run
            del dimensions[0]
    whole = [dimension for dimension in dimensions if dimension.size > 1]
    # A stage of one layer needs no loop: of (4, 8, 16) with shards of (1, 8, 4), a device has an
    # array of (8, 16) or (8, 4).
    of_device = [dimension for dimension in whole if dimension.shard > 1]
    return _is_part(dims, whole) or _is_part(dims, of_device)


def _is_part(dims: Sequence[int], dimensions: Sequence[_Dimension]) -> bool:
    """Tells whether an array of the shape ``dims`` can be one or several shards of a larger one.

    Of (8, 16) with shards of (2, 16) these are (2, 16), (4, 16) and (8, 16).
    """
    return len(dims) == len(dimensions) and all(
        part and dimension.size % part == 0 and part % dimension.shard == 0
        for part, dimension in zip(dims, dimensions, strict=True)
    )


# Opcodes of operations that pass on the elements that they are given.
_SAME = REARRANGING | {"convert", "get-tuple-element", "parameter", "tuple"}
# Opcodes of operations that compute each element from the elements there, as optimizers do.
_BY_ELEMENT = ELEMENTWISE | TRANSCENDENTAL | {"broadcast", "constant"}
_UNKNOWN = {"unknown"}  # stands for the opcodes of a computation that is not in the text


def _returned_by(module: Module, updated: Sequence[str | None]) -> dict[str, tuple[str, ...]]:
    """Finds the instructions whose values are returned, unchanged or added to a Variable.

    Args:
      module: the program.
      updated: the path of the Variable that each array of its result updates, or None.

    Returns:
      By the name of each such instruction the paths among ``updated`` that its value goes to.
    """
    # The instruction whose result the program returns: a tuple, or a single array.
    root = module.roots.get(module.entry.name) if module.entry else None
    if module.entry is None or root is None:
        return {}
    by_name = module.within[module.entry.name]
    opcodes_in = {c.name: {x.opcode for x in c.instructions} for c in module.computations}
    results = root.operand_names if root.opcode == "tuple" else (root.name,)
    paths = updated if len(updated) == len(results) else [None] * len(results)  # unknown otherwise
    # Names of instructions to look at, each with the Variable that its value goes to; None if it is
    # returned as something else.
    pending: list[tuple[str, str | None]] = [*zip(results, paths, strict=True)]
    returned: dict[str, tuple[str, ...]] = {}
    while pending:
        name, path = pending.pop()
        if name not in by_name:  # damaged text may lack it
            continue
        known = returned.get(name)
        if known is not None and (path is None or path in known):  # it was looked at
            continue
        returned[name] = (*(known or ()), *(() if path is None else (path,)))
        instruction = by_name[name]
        # What it does; for a fusion or a call, what the instructions inside do.
        inside = [opcodes_in.get(callee, _UNKNOWN) for callee in instruction.callees]
        opcodes = {instruction.opcode}.union(*inside) - {"fusion"}
        operands = [by_name[x] for x in instruction.operand_names if x in by_name]
        # The end of an asynchronous operation passes on what its start has made.
        if instruction.opcode.endswith("-done") or opcodes <= _SAME:
            pending += [(operand.name, path) for operand in operands]
        elif path is not None and opcodes <= _SAME | _BY_ELEMENT:
            # An update by element, such as of an optimizer: from operands of the same shape.
            dims = _dims_of(instruction)
            pending += [(operand.name, path) for operand in operands if _dims_of(operand) == dims]
    return returned


def _dims_of(instruction: Instruction) -> list[tuple[int, ...]]:
    """Lists the dimensions of each array in the result of an instruction."""
    return [shape.dims for shape in arrays(instruction.shape)]


# Values from the initial value of a loop back to constants: counters and zeros need few.
_MAX_STEPS = 64


class Origins:
    """Finds the arguments from which values are computed; some of these are Variables.

    What is found of arguments that are not Variables is kept for the next values.

    Args:
      module: the program.
      arguments: the names of its arguments, by their numbers.
      variables: the names of those that are in Variables.
    """

    def __init__(self, module: Module, arguments: Mapping[int, str], variables: Collection[str]):
        self._module = module
        self._arguments, self._variables = arguments, variables
        # Values that are known to be computed from an argument that is not a Variable. One such
        # argument is enough to know that a collective does not move Variables, so that a search
        # ends there, and most end soon.
        self._others: dict[Value, str] = {}

    def of(self, value: Value) -> frozenset[str]:
        """Returns the names of the arguments from which a value is computed.

        If they are Variables only, all of them; otherwise just the first other one. Callers only
        ask whether there is any, so the search back from the value ends there.
        """
        names: set[str] = set()
        # Each value that was reached → the one computed from it, on the way back to the start.
        user_of: dict[Value, Value | None] = {value: None}
        pending = [value]
        while pending:
            value = pending.pop()
            name = self._others.get(value)
            number = self._module.argument(value)
            if name is None and number is not None:
                name = self._arguments.get(number, value.name)  # always there but in damaged text
            if name is not None and name not in self._variables:
                user: Value | None = value
                while user is not None:  # all values on the way here are computed from it, too
                    self._others[user], user = name, user_of[user]
                return frozenset([name])
            if name is not None:
                names.add(name)
            for operand in self._computed_from(value):
                if operand not in user_of:
                    user_of[operand] = value
                    pending.append(operand)
        return frozenset(names)

    def is_weighted(self, value: Value) -> bool:
        """Tells whether a value is a partial result of a product with a parameter.

        The search goes back to the last products before the value. It does not go past a ``reduce``
        or ``scatter``: the gradient of a bias, for example, sums activations over the batch, which
        may be products with a parameter, but is none itself.
        """

        def is_one_of(x: Value, *opcodes: str) -> bool:
            instruction = self._module.maker(x)
            return instruction is not None and instruction.opcode in opcodes

        def computed_from(x: Value) -> list[Value]:
            is_last = is_one_of(x, "reduce", "scatter", *PRODUCTS)
            return [] if is_last else self._computed_from(x)

        products = (x for x in reached(value, computed_from) if is_one_of(x, *PRODUCTS))
        factors = (factor for product in products for factor in self._module.operands(product))
        return any(self.are_variables(self.of(factor)) for factor in factors)

    def are_variables(self, names: frozenset[str]) -> bool:
        """Tells whether these arguments are Variables only, and at least one."""
        return bool(names) and names <= {*self._variables}

    def _computed_from(self, value: Value) -> list[Value]:
        """Lists the values that a value is computed from in one step."""
        instruction = self._module.maker(value)
        if instruction is None:
            return []
        passed = self._module.passed(value)  # the values that it is an unchanged copy of
        if passed and instruction.opcode == "parameter":
            # It is passed by the callers of its computation; the body of a loop has only one.
            caller = self._module.callers[value.computation][0].instruction
            if caller.opcode == "while":
                # A loop carry is its initial value; or, where that is a constant to be overwritten,
                # such as zeros for the outputs of a scan, what the loop computes.
                initial, *after = passed
                return after if self._is_constant(initial) else [initial]
        if passed:  # a fusion, for example: the root inside says more than its operands
            return passed
        operands = self._module.operands(value)
        # A collective of several arrays makes a tuple, with one item for each operand.
        if value.index and len(operands) > 1 and len(operands) == len(instruction.results):
            item = value.index[0]
            return operands[item : item + 1]
        return operands

    def _is_constant(self, value: Value) -> bool:
        """Tells whether a value is computed from constants only.

        If it takes too many steps to find out, it counts as not constant.
        """

        def computed_from(x: Value) -> list[Value]:
            # What passes a value on, such as a fusion, is followed to what it passes.
            return self._module.passed(x) or self._module.operands(x)

        values = [*itertools.islice(reached(value, computed_from), _MAX_STEPS)]
        makers = filter(None, map(self._module.maker, values))
        is_fixed = all(maker.opcode not in ("parameter", "while") for maker in makers)
        return is_fixed and len(values) < _MAX_STEPS
