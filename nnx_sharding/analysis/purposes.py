"""Decides what each collective of a program is for, from shapes, names and what it computes with.

The first rule that applies decides (`_Purposes.of`):

    parameter, state   the collective only moves arrays that are computed from Variables alone:
                       from parameters, or from other Variables such as caches
    gradient           the backward pass of a module computes an array that the collective makes;
                       the array has the shape of a parameter of that module, or of a part of one
                       (for sums also of a parameter of the modules inside it, if none of its own
                       has the shape, because a module may read these parameters itself);
                       and it is not a partial result of a product with a parameter, because such
                       a product is an activation of the same shape
    sum                the collective adds up anything else: partial products, or a loss
    result             the program returns the array, unchanged or added to a Variable
    reshard            the collective moves anything else, such as activations

The compiler merges collectives, so that one moves several arrays. Each array is then judged by
itself, and the collective has the purpose of most of its bytes: that of a sum of 1 MiB that was
merged with the gradient of a scale is ``sum``.

So the all-gather of a kernel sharded by `fsdp` is `parameter`, the reduce-scatter of its gradient
is `gradient`, and the all-reduce after a kernel sharded over rows by `tensor_parallel` is `sum`.
An all-reduce that joins parts in arrays of zeros only moves them (`Origins.is_padded_part`).

Names of operations alone do not tell the purposes apart, because the compiler moves collectives
across operations and out of loops, and merges several into one. Shapes are an approximation: they
mislead where activations have the shape of a parameter of their own module. Where a shape fits
several Variables, or no module is known, what the gradient updates decides (`updates.py`). The
*home* of a collective is the computation that it is in.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from ..specs.paths import enclosing_paths
from .hlo import Module
from .instructions import Instruction, arrays
from .names import common, module_of, operations
from .opcodes import ELEMENTWISE, PRODUCTS, REARRANGING, TRANSCENDENTAL
from .parameters import ParameterRow
from .updates import ArrayOf, Updates
from .values import Located, Value, reached

Purpose: TypeAlias = Literal["parameter", "state", "gradient", "sum", "result", "reshard"]


class ArrayUse(NamedTuple):
    """What one of several arrays of a collective is for."""

    array: _Array
    purpose: Purpose
    parameters: tuple[str, ...]  # as in `Use`
    module: str | None  # the innermost module around its operations; None without one


class Use(NamedTuple):
    """What a collective is for; ``Collective`` has fields of the same names."""

    purpose: Purpose | None = None  # None if it is unknown
    # The paths of the Variables that the collective moves, updates or makes gradients of, those of
    # larger arrays first. Empty for a ``sum`` or ``reshard``.
    parameters: tuple[str, ...] = ()
    module: str | None = None  # the innermost module around its operations; None without one
    arrays: tuple[ArrayUse, ...] = ()  # what each array is for, if there are several


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
      The `Use` of each collective, by the name of the collective.
    """
    purposes = _Purposes(module, collectives, [row for row in rows if row.used], updated)
    return {collective.name: purposes.of(collective, home.name) for home, collective in collectives}


class _Purposes:
    """Decides what the collectives of one program are for.

    Attributes:
      _module: the program.
      _collectives: its collectives, each with the computation that it is in.
      _variables: the Variables among the arguments that the program uses.
      _arguments: the names of the program's inputs, by number.
      _origins: the object that finds the arguments from which a value is computed.
      _updated_by: for each instruction whose result is returned, by its name, the paths of the
        Variables that the result updates; empty if it updates none. Other instructions are missing.
    """

    def __init__(
        self,
        module: Module,
        collectives: Sequence[Located],
        used: Sequence[ParameterRow],
        updated: Sequence[str | None],
    ):
        """Prepares to decide.

        Args:
          updated: as in `uses_of`.
        """
        self._module, self._collectives = module, collectives
        variables = (row for row in used if row.variable is not None)
        self._variables = _Variables(variables, {path for path in updated if path is not None})
        # An input is named by its path, or, if that is unknown, as JAX or the compiler named it,
        # such as ``p.3``.
        rows = rows_of_inputs(module, used)
        self._arguments = {
            number: rows[number].path if number in rows else x.operation or x.name
            for number, x in module.parameters.items()
        }
        self._origins = Origins(module, self._arguments, self._variables.paths)
        self._updated_by = _returned_by(module, updated)

    def of(self, collective: Instruction, home: str) -> Use:
        """Decides what a collective is for, by the rules at the top of this file.

        ``home`` is the name of the computation that it is in.
        """
        arrays = _arrays_of(collective, self._module.within[home])
        uses = [self._use_of(array, collective, home) for array in arrays]
        if len(uses) == 1:
            [use] = uses
            return Use(use.purpose, use.parameters, use.module)
        bytes_by_purpose: Counter[Purpose] = Counter()
        for use in uses:
            bytes_by_purpose[use.purpose] += use.array.bytes
        # If two purposes have as many bytes, the one of the first array counts.
        [(purpose, _)] = bytes_by_purpose.most_common(1)
        # By the path of a Variable, the bytes of its largest array, and the negative number of
        # Variables that this array may belong to: of equal arrays, those of only one come first.
        ranks: dict[str, tuple[int, int]] = {}
        for use in uses:
            if use.purpose == purpose:
                rank = use.array.bytes, -len(use.parameters)
                ranks |= {x: max(rank, ranks.get(x, rank)) for x in use.parameters}
        # The innermost module around the operations of all arrays with this purpose.
        operations_of = [use.array.operations for use in uses if use.purpose == purpose]
        return Use(
            purpose,
            # `sorted` keeps the order of paths for equal ranks, also if reversed.
            parameters=tuple(sorted(sorted(ranks), key=ranks.__getitem__, reverse=True)),
            module=self._module_around(itertools.chain.from_iterable(operations_of)),
            arrays=tuple(uses),
        )

    def _use_of(self, array: _Array, collective: Instruction, home: str) -> ArrayUse:
        """Decides what one array of a collective in the computation ``home`` is for."""
        # The array belongs to the innermost module around all of its operations, whichever rule
        # decides.
        path = self._module_around(array.operations)
        is_sum = collective.collective in ("all-reduce", "reduce-scatter") and not all(
            self._origins.is_padded_part(Value(home, name)) for name in array.operand_names
        )
        # A collective that does not sum only moves arrays.
        moved = frozenset[str]() if is_sum else self._moved_variables(array, home)
        if moved:
            kind: Purpose = "state" if moved <= self._variables.states else "parameter"
            return ArrayUse(array, kind, tuple(sorted(moved)), path)
        gradients = self._gradients(array, home, is_sum=is_sum)
        if gradients:
            return ArrayUse(array, "gradient", tuple(sorted(gradients)), path)
        if is_sum:
            return ArrayUse(array, "sum", (), path)
        # The paths of the Variables that the array updates; None if the program does not return it.
        updated = self._updated_by.get(collective.name)
        if array.takers:
            returned = [self._updated_by[x] for x in array.takers if x in self._updated_by]
            updated = tuple(dict.fromkeys(itertools.chain(*returned))) if returned else None
        if updated is None:
            return ArrayUse(array, "reshard", (), path)
        return ArrayUse(array, "result", updated, path)

    @functools.cached_property
    def _updates(self) -> Updates:
        """Tells apart the Variables that may have gradients, by what is computed from them."""
        paths = self._variables.paths - self._variables.states
        variables = {i: path for i, path in self._arguments.items() if path in paths}
        gradients = [
            Value(home.name, name)
            for home, collective in self._collectives
            for array in _arrays_of(collective, self._module.within[home.name])
            if any("jvp(" in operation for operation in array.operations)
            for name in array.operand_names
        ]
        return Updates(self._module, variables, gradients, self._origins.computed_from)

    def _module_around(self, operation_names: Iterable[str]) -> str | None:
        """Returns the path of the innermost module around all of these operations, else None."""
        names = dict.fromkeys(operation_names)  # unique
        modules = [module_of(name, self._variables.modules) for name in names]
        paths = [path for path in modules if path is not None]
        # No module is around an operation outside of modules.
        if not paths or len(paths) < len(modules):
            return None
        return common(paths) or None

    def _moved_variables(self, array: _Array, home: str) -> frozenset[str]:
        """Returns the paths of the Variables from which an array's operands are computed.

        The result is empty if an operand is also computed from something else. ``home`` is the name
        of the computation that the collective is in.
        """
        # For each operand, the names of the arguments that it is computed from: all of them if they
        # are Variables, else one that is not a Variable.
        origins = [self._origins.of(Value(home, name)) for name in array.operand_names]
        is_of_variables = all(map(self._origins.are_variables, origins))
        return frozenset[str]().union(*origins) if is_of_variables else frozenset()

    def _gradients(self, array: _Array, home: str, *, is_sum: bool) -> set[str]:
        """Collects the paths of the Variables of which an array is a gradient; empty for none.

        The array's shape chooses among the Variables of the modules that its operations are in. If
        it fits several, or if the operations are in no module, their updates choose (`Updates`).

        Args:
          home: the name of the computation that the collective is in.
          is_sum: whether the collective adds up arrays of several devices.
        """
        # How often each loop around the collective runs; None for an unknown length. In a loop over
        # layers, the array is a part of one layer of a stacked Variable.
        callers = (caller for _, caller in self._module.around(home))
        loops = (caller.name for caller in callers if caller.opcode == "while")
        trip_counts = [*map(self._module.trip_counts.get, loops)]
        # The modules of the operations of the backward pass, which JAX makes by `transpose`. An
        # operation outside of modules adds None.
        names = [name for name in array.operations if "transpose(" in name]
        backward = {module_of(name, self._variables.modules) for name in names}
        # A sum outside of modules may belong to any gradient, since the compiler merges sums.
        candidates = backward if is_sum else backward - {None}
        # The paths of the candidates' Variables that can have the array as a part.
        variables = self._variables.with_part(
            candidates, array.dims, trip_counts, search_inside=is_sum
        )
        operands = (Value(home, name) for name in array.operand_names)
        # A gradient is a product of activations. A product with a parameter is itself an
        # activation, so it is no gradient even if it has the shape of one.
        if variables and any(map(self._origins.is_weighted, operands)):
            return set()
        # Shapes do not tell moments from parameters, nor layers from each other.
        is_by_shape = len(variables) > 1 or (variables and None in candidates)
        return self._updates.parameters_of(array.key, variables) if is_by_shape else variables


class _Array(NamedTuple):
    """An array that a collective makes.

    XLA may have merged several collectives, and their names, into one, which makes a tuple::

        %sum = (f32[8], f32[4]) all-reduce(%a, %b), metadata={op_name="f/up/add;f/down/add"}
        %x = f32[8] get-tuple-element(%sum), index=0, metadata={op_name="f/up/add"}

    The first array belongs to ``f/up/add``: the name of its operand ``%a`` says so, or the name of
    ``%x``, which takes the array from the tuple.
    """

    key: ArrayOf
    dims: tuple[int, ...]  # as the program has them, see `_dims_before_bitcasts`
    bytes: int  # the size of the result
    operations: list[str]  # the names of the user's operations
    # The instruction that has these names, the operand's maker or a taker; None if nothing says
    # which array belongs to which operation. Each array then has all names of the collective.
    named: Instruction | None
    # The names of the operands that may become the array: one, or all if nothing says which one.
    operand_names: tuple[str, ...]
    takers: tuple[str, ...]  # the names of instructions that take it from a tuple of several


def _arrays_of(collective: Instruction, by_name: Mapping[str, Instruction]) -> list[_Array]:
    """Returns the arrays that a collective makes, with the names of the user's operations.

    ``by_name`` has the instructions of the same computation.
    """
    joined = collective.operation
    operand_names = collective.operand_names
    if joined is None and len(operand_names) == 1:
        # In a program for several slices, the compiler divides a sum into parts without names, so
        # the name of the operand counts.
        operand = by_name.get(operand_names[0])
        joined = None if operand is None else operand.operation
    merged = operations(joined or "")
    shapes = collective.results
    dims = _dims_before_bitcasts(collective, by_name)
    if len(shapes) < 2 or len(shapes) != len(operand_names):
        # Nothing says which array belongs to which operation, so each array gets all of them. Only
        # damaged text lacks the shape of a collective.
        sizes = [shape.bytes for shape in shapes] or [0]
        return [
            _Array((collective.name, i), array_dims, size, merged, None, operand_names, ())
            for i, (array_dims, size) in enumerate(zip(dims or [()], sizes, strict=True))
        ]
    takers: defaultdict[int | None, list[Instruction]] = defaultdict(list)  # by index in the tuple
    for instruction in by_name.values():
        is_item = instruction.opcode == "get-tuple-element"
        if is_item and instruction.operand_names == (collective.name,):
            takers[instruction.tuple_index].append(instruction)
    arrays_made = []
    for i, (operand_name, shape) in enumerate(zip(operand_names, shapes, strict=True)):
        # Damaged text may lack the maker. Of several takers, the last one counts.
        candidates = [by_name.get(operand_name), *takers[i][-1:]]
        with_name = [x for x in candidates if x is not None and x.operation]
        # An operand may be named after something else, such as the loop that computes it, so the
        # first name that shares an operation with the collective is the right one.
        shared = (x for x in with_name if not {*operations(x.operation or "")}.isdisjoint(merged))
        named = next(shared, with_name[0] if with_name else None)
        names = merged if named is None else operations(named.operation or "")
        names_of_takers = tuple(taker.name for taker in takers[i])
        arrays_made.append(
            _Array(
                key=(collective.name, i),
                dims=dims[i],
                bytes=shape.bytes,
                operations=names,
                named=named,
                operand_names=(operand_name,),
                takers=names_of_takers,
            )
        )
    return arrays_made


def _dims_before_bitcasts(
    collective: Instruction, by_name: Mapping[str, Instruction]
) -> list[tuple[int, ...]]:
    """Returns the shapes of the arrays that a collective makes, as the program has them.

    Between slices, the compiler for TPUs reduces arrays as tiles::

        %tiles = f32[8,128] bitcast(f32[1024] %x)
        %sum = f32[8,128] all-reduce(%tiles)          an array of the shape (1024,)

    If the only operand is a bitcast with the shape of the result, this function therefore returns
    the shape in front of the bitcast, here ``(1024,)``. ``by_name`` has the instructions of the
    same computation.
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

    Parameters are in the order of the rows if each parameter is one array of the shape of its row's
    shard, and if no parameter has the name of another row. JAX names a parameter after the path,
    but the TPU compiler may rename it. If the order does not fit, only the parameters that have
    kept the path as their name are found.
    """
    by_path = {row.path: row for row in rows}
    inputs = module.parameters

    def can_be(parameter: Instruction, row: ParameterRow) -> bool:
        """Tells whether a parameter has the shape of a row, and not the name of another row."""
        dims = [shape.dims for shape in arrays(parameter.shape)]
        named_row = by_path.get(parameter.operation or "")
        return dims == [row.shard_shape] and (named_row is None or named_row is row)

    has_as_many = inputs.keys() == {*range(len(rows))}
    if has_as_many and all(can_be(inputs[number], row) for number, row in enumerate(rows)):
        return dict(enumerate(rows))
    names = {number: parameter.operation or "" for number, parameter in inputs.items()}
    return {number: by_path[name] for number, name in names.items() if name in by_path}


class _Variables:
    """The Variables among the arguments of a program.

    Attributes:
      paths: the paths of all Variables.
      states: the paths of those that have no gradients: statistics, caches, optimizer state.
      modules: the paths of all modules that contain Variables, at any depth.
      _updated: the paths of those that the program updates.
      _owned: the rows of the Variables that may have gradients, by the path of a module: those that
        it owns, without those of modules inside.
      _inside: the same rows by the path of a module, with those of modules inside. The key None has
        the rows of the whole program.
    """

    def __init__(self, rows: Iterable[ParameterRow], updated: Collection[str]):
        """Sorts the arguments by whether they may have gradients, and by their modules."""
        self._updated = {*updated}
        self.paths: set[str] = set()
        self.states: set[str] = set()
        self.modules: set[str] = set()
        self._owned: dict[str | None, list[ParameterRow]] = {}
        self._inside: dict[str | None, list[ParameterRow]] = {}
        for row in rows:
            self.paths.add(row.path)
            around = enclosing_paths(row.path)  # of all objects that the Variable is in
            self.modules.update(around)
            if row.role in ("optimizer state", "state"):
                self.states.add(row.path)
                continue
            # A module owns the Variables in its lists and dicts: ``model.up`` has
            # ``model.up.scales[0]``. It does not own the Variables of a module inside it. Their
            # paths have one more dot behind the attribute with the inner module.
            for path in around:
                if "." not in row.path[len(path) + 1 :]:
                    self._owned.setdefault(path, []).append(row)
            for key in (None, *around):
                self._inside.setdefault(key, []).append(row)

    def with_part(
        self,
        modules: Collection[str | None],
        dims: Sequence[int],
        trip_counts: Collection[int | None],
        *,
        search_inside: bool,
    ) -> set[str]:
        """Finds Variables of modules that can have a part of this shape, no smaller than a shard.

        Args:
          modules: the paths of modules; among these, None stands for all Variables of the program.
          dims: the shape of the part.
          search_inside: whether Variables of the modules inside count if the modules themselves own
            none that fits. For those, as with None, shapes alone decide, so a Variable that the
            program does not update, such as a frozen one, only counts if no updated one fits.
          trip_counts: how often each loop around the part runs. A loop over layers takes one layer
            in each run: from the first dimension, or from another one that is as long as the loop.

        Returns:
          The paths of the Variables; empty without any.
        """
        if None not in modules:
            owned = [row for module in modules for row in self._owned.get(module, ())]
            paths = _rows_with_part(owned, dims, trip_counts)
            if paths or not search_inside:
                return paths
        inside = [row for module in modules for row in self._inside.get(module, ())]
        paths = _rows_with_part(inside, dims, trip_counts)
        return (paths & self._updated) or paths


def _rows_with_part(
    rows: Sequence[ParameterRow], dims: Sequence[int], trip_counts: Collection[int | None]
) -> set[str]:
    """Returns the paths of the rows that can have a part of this shape; empty without any.

    ``dims`` and ``trip_counts`` are as in `_Variables.with_part`.
    """
    if not dims:
        return set()
    # Dimensions of size 1 do not count, because `vmap` and loops over one layer leave them.
    long_dims = tuple(size for size in dims if size > 1)
    # Gradients of products may be transposed. Five dimensions have too many orders to try.
    has_few_orders = 1 < len(long_dims) < 5
    orders = [*itertools.permutations(long_dims)] if has_few_orders else [long_dims]
    # Layers are nearly always in the first dimension, so the others are tried only if no
    # Variable fits with that one.
    for find_shapes in (_usual_shape, _other_shapes):
        for order in orders:
            paths = {
                row.path
                for row in rows
                if any(_can_have_part(x, order) for x in find_shapes(row, trip_counts))
            }
            if paths:  # The first order that fits decides.
                return paths
    return set()


class _Dimension(NamedTuple):
    """A dimension of an argument."""

    size: int
    shard: int  # the size of the dimension on one device


def _usual_shape(row: ParameterRow, trip_counts: Collection[int | None]) -> list[list[_Dimension]]:
    """Returns the shape of what a loop takes of a Variable, if layers are its first dimension.

    For a Variable of shape (12, 8, 16) with the kernels of 12 layers, that is (8, 16) in a loop of
    12 runs over the layers, and all of it elsewhere. In a pipeline of 4 stages, the shards have 3
    layers, and the loop has 3 runs over the layers of a stage. It is inside of the loop over ticks.

    Args:
      trip_counts: how often each loop around the array runs, with one entry for each loop; None
        for a loop of unknown length.
    """
    dimensions = [*map(_Dimension, row.shape, row.shard_shape)]
    if dimensions:
        layers, layers_of_stage = dimensions[0]
        # The loop over the layers of a stage is inside the loop over ticks, so there are two loops
        # at least. A single loop of this length is not over the layers of a stage.
        is_in_stage = len(trip_counts) > 1 and layers_of_stage in trip_counts
        if layers in trip_counts or is_in_stage:  # The loop takes one layer in each run.
            del dimensions[0]
    return [dimensions]


def _other_shapes(row: ParameterRow, trip_counts: Collection[int | None]) -> list[list[_Dimension]]:
    """Returns the shapes that `_usual_shape` leaves out.

    Layers may be in another dimension, such as the second one of a Variable (8, 12, 16). And all of
    a Variable is used in each run of a loop over time that happens to be as long as its first
    dimension. ``trip_counts`` is as in `_usual_shape`.
    """
    dimensions = [*map(_Dimension, row.shape, row.shard_shape)]
    others = [i for i, x in enumerate(dimensions) if i and x.size in trip_counts]
    return [dimensions, *(dimensions[:i] + dimensions[i + 1 :] for i in others)]


def _can_have_part(dimensions: Sequence[_Dimension], dims: Sequence[int]) -> bool:
    """Tells whether an array can be a part of a Variable, or of one layer of it.

    A Variable of shape (12, 8, 16), with shards of (3, 8, 4), has the part (3, 8, 16), for example.
    ``dims`` are the dimensions of the array, without those of size 1.
    """
    long_dimensions = [dimension for dimension in dimensions if dimension.size > 1]
    # A stage of one layer needs no loop: for a Variable of (4, 8, 16) with shards of (1, 8, 4), a
    # device has an array of (8, 16) or (8, 4), so dimensions whose shard has size 1 may be missing.
    dimensions_in_shard = [dimension for dimension in long_dimensions if dimension.shard > 1]
    return _is_part(dims, long_dimensions) or _is_part(dims, dimensions_in_shard)


def _is_part(dims: Sequence[int], dimensions: Sequence[_Dimension]) -> bool:
    """Tells whether an array of the shape ``dims`` can be one or several shards of a larger one.

    An array of (8, 16) with shards of (2, 16) has the parts (2, 16), (4, 16) and (8, 16).
    """
    return len(dims) == len(dimensions) and all(
        part and dimension.size % part == 0 and part % dimension.shard == 0
        for part, dimension in zip(dims, dimensions, strict=True)
    )


# Opcodes of operations that pass on the elements of their operands unchanged.
_SAME = REARRANGING | {"convert", "get-tuple-element", "parameter", "tuple"}
# Opcodes of operations that compute each element from the operands' elements at the same position,
# as optimizers do.
_BY_ELEMENT = ELEMENTWISE | TRANSCENDENTAL | {"broadcast", "constant"}
_UNKNOWN = {"unknown"}  # stands for the opcodes of a computation that is not in the text


def _returned_by(module: Module, updated: Sequence[str | None]) -> dict[str, tuple[str, ...]]:
    """Finds the instructions whose values are returned, unchanged or added to a Variable.

    Args:
      updated: the path of the Variable that each array of its result updates, or None.

    Returns:
      A dict: the name of each such instruction → the paths among ``updated`` that its value goes
      to. The paths are empty if the program returns the value, but updates no Variable with it.
    """
    if module.entry is None:  # Only damaged text lacks the entry computation.
        return {}
    by_name = module.within[module.entry.name]
    opcodes_in = {c.name: {x.opcode for x in c.instructions} for c in module.computations}
    # The names of instructions still to look at, each with the path of the Variable that its value
    # goes to; None if the program returns the value as something else.
    pending = _results_with_paths(module.roots.get(module.entry.name), updated)
    returned: dict[str, tuple[str, ...]] = {}
    while pending:
        name, path = pending.pop()
        if name not in by_name:  # Damaged text may lack the instruction.
            continue
        known_paths = returned.get(name)
        new_paths = () if path is None else (path,)
        # An instruction that was looked at with this path is skipped, so that instructions with
        # several users, and cycles in damaged text, are followed once for each path.
        if known_paths is not None and {*new_paths} <= {*known_paths}:
            continue
        returned[name] = (known_paths or ()) + new_paths
        instruction = by_name[name]
        # The opcode of the instruction, and those of the instructions inside of a fusion or call.
        inside = [opcodes_in.get(callee, _UNKNOWN) for callee in instruction.callees]
        opcodes = {instruction.opcode}.union(*inside) - {"fusion"}
        operands = [by_name[x] for x in instruction.operand_names if x in by_name]
        # The end of an asynchronous operation passes on what its start has made.
        if instruction.opcode.endswith("-done") or opcodes <= _SAME:
            pending += [(operand.name, path) for operand in operands]
        elif path is not None and opcodes <= _SAME | _BY_ELEMENT:
            # An update by element, as an optimizer makes it, comes from operands of its own shape.
            dims = _dims_of(instruction)
            pending += [(operand.name, path) for operand in operands if _dims_of(operand) == dims]
    return returned


def _results_with_paths(
    root: Instruction | None, updated: Sequence[str | None]
) -> list[tuple[str, str | None]]:
    """Lists the instructions that make the results of a program, each with its path of ``updated``.

    ``root`` is the instruction whose value the program returns: a tuple of results, or a single
    one. Without one path for each result, it is unknown which Variables the results update, so the
    paths are None.
    """
    if root is None:  # Only damaged text lacks the root.
        return []
    results = root.operand_names if root.opcode == "tuple" else (root.name,)
    paths = updated if len(updated) == len(results) else [None] * len(results)
    return [*zip(results, paths, strict=True)]


def _dims_of(instruction: Instruction) -> list[tuple[int, ...]]:
    """Lists the dimensions of each array in the result of an instruction."""
    return [shape.dims for shape in arrays(instruction.shape)]


# The most values to look at between the initial value of a loop and constants. Counters and zeros
# need few.
_MAX_STEPS = 64
# What an array of zeros is made by; a computation has it as a parameter.
_FILLING = ("bitcast", "broadcast", "constant", "copy", "convert", "parameter", "reshape")


class Origins:
    """Finds the arguments from which values are computed; some of the arguments are Variables.

    Values that are computed from an argument which is not a Variable are kept between calls.

    Args:
      module: the program.
      arguments: the names of its arguments, by their numbers.
      variables: the names of the arguments that are in Variables.

    Attributes:
      _module: as given, like ``_arguments`` and ``_variables``.
      _others: each value that is known to be computed from an argument which is not a Variable →
        the name of that argument. One such argument shows that a collective does not move Variables
        alone, so a search ends there, and most searches end soon.
    """

    def __init__(self, module: Module, arguments: Mapping[int, str], variables: Collection[str]):
        self._module = module
        self._arguments, self._variables = arguments, variables
        self._others: dict[Value, str] = {}

    def of(self, value: Value) -> frozenset[str]:
        """Returns the names of the arguments from which a value is computed.

        If all these arguments are Variables, it returns all their names. Otherwise it returns only
        the name of the first argument found that is not a Variable: callers only ask whether there
        is one, so the search back from the value ends there.
        """
        names: set[str] = set()
        # Each value reached so far → the value that is computed from it, and from which the search
        # came; None for the first value.
        user_of: dict[Value, Value | None] = {value: None}
        pending = [value]
        while pending:
            value = pending.pop()
            # The name of an argument that the value is, or is computed from; else None.
            name = self._others.get(value)
            number = self._module.argument(value)
            if name is None and number is not None:
                name = self._arguments.get(number, value.name)  # Only damaged text lacks it.
            if name is not None and name not in self._variables:
                user: Value | None = value
                # All values on the way from the start to the argument are computed from it, too.
                while user is not None:
                    self._others[user], user = name, user_of[user]
                return frozenset([name])
            if name is not None:
                names.add(name)
            for operand in self.computed_from(value):
                if operand not in user_of:
                    user_of[operand] = value
                    pending.append(operand)
        return frozenset(names)

    def is_weighted(self, value: Value) -> bool:
        """Tells whether a value is a partial result of a product with a parameter.

        The search goes back to the last products before the value. It does not go past a ``reduce``
        or ``scatter``, because a sum of products with a parameter may be a gradient: that of a
        bias, for example, sums activations over the batch. These activations may be products with a
        parameter.
        """

        def is_one_of(x: Value, *opcodes: str) -> bool:
            """Tells whether an instruction with one of these opcodes makes a value."""
            instruction = self._module.maker(x)
            return instruction is not None and instruction.opcode in opcodes

        def computed_from(x: Value) -> list[Value]:
            """Lists the values to which the search goes on; empty where it ends."""
            is_last = is_one_of(x, "reduce", "scatter", *PRODUCTS)
            return [] if is_last else self.computed_from(x)

        for product in reached(value, computed_from):
            if is_one_of(product, *PRODUCTS):
                for factor in self._module.operands(product):
                    if self.are_variables(self.of(factor)):
                        return True
        return False

    def is_padded_part(self, value: Value) -> bool:
        """Tells whether a value is the part of one device in an array of zeros.

        The sum over devices then only joins their parts, as an all-gather does. The compiler for
        TPUs writes some gathers that way, such as those over 64 chips of a v5p::

            %whole = f32[64,8] dynamic-update-slice(%zeros, %part, %offset, %zero)
            %gathered = f32[64,8] all-reduce(%whole)

        where ``%offset`` is computed from the number of the device.
        """
        for copied in reached(value, self._module.passed):
            instruction = self._module.maker(copied)
            if instruction is None or instruction.opcode != "dynamic-update-slice":
                continue
            target, _, *offsets = self._module.operands(copied)
            makers = self._makers_behind(target)
            constants = [maker for maker in makers if maker.opcode == "constant"]
            # The literal of a constant is written where other instructions have operands.
            is_zero = constants and all(maker.operand_names == ("0",) for maker in constants)
            is_filled = all(maker.opcode in _FILLING for maker in makers)
            offset_makers = itertools.chain(*map(self._makers_behind, offsets))
            is_of_device = any(maker.opcode == "partition-id" for maker in offset_makers)
            return bool(is_zero and is_filled and is_of_device)
        return False

    def _makers_behind(self, value: Value) -> list[Instruction]:
        """Lists the instructions that compute a value, the last ones, `_MAX_STEPS` at most."""
        steps = itertools.islice(reached(value, self._module.sources), _MAX_STEPS)
        return [*filter(None, map(self._module.maker, steps))]

    def are_variables(self, names: frozenset[str]) -> bool:
        """Tells whether all these arguments are Variables; False for no arguments."""
        return bool(names) and names <= {*self._variables}

    def computed_from(self, value: Value) -> list[Value]:
        """Lists the values that a value is computed from in one step; empty for an argument."""
        instruction = self._module.maker(value)
        if instruction is None:
            return []
        # The values of which ``value`` is an unchanged copy.
        passed = self._module.passed(value)
        if passed and instruction.opcode == "parameter":
            # The callers of a computation pass its parameters. The first caller decides, because
            # the body of a loop has only one.
            caller = self._module.callers[value.computation][0].instruction
            if caller.opcode == "while":
                # A loop carry counts as computed from its initial value. If that is a constant to
                # be overwritten, such as zeros for the outputs of a scan, it counts as computed
                # from what the body returns.
                initial, *returned_by_body = passed
                return returned_by_body if self._is_constant(initial) else [initial]
        # For a fusion, for example, the root inside says more than the operands of the fusion.
        if passed:
            return passed
        operands = self._module.operands(value)
        # A collective of several arrays makes a tuple, with one item for each operand.
        if value.index and len(operands) > 1 and len(operands) == len(instruction.results):
            item = value.index[0]
            return operands[item : item + 1]
        return operands

    def _is_constant(self, value: Value) -> bool:
        """Tells whether a value is computed from constants only.

        A value counts as not constant if `_MAX_STEPS` steps are not enough to find out.
        """
        values = [*itertools.islice(reached(value, self._module.sources), _MAX_STEPS)]
        if len(values) == _MAX_STEPS:  # There may be more values.
            return False
        makers = filter(None, map(self._module.maker, values))
        return all(maker.opcode not in ("parameter", "while") for maker in makers)
