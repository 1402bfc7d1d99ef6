"""Infers how the compiler shards values on Auto axes, from the program that it made.

The program before it is partitioned has the sharding of each value. Without it, the shapes on one
device say how a value is sharded, where mesh axes have different sizes:

    mesh data 2 × model 4     f32[8,64] in the trace, f32[4,16] on one device: P('data', 'model')

A value of the trace and an instruction belong together if they have the same *key*: line, name of
the operation, pass and module (`OperationKey`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from jax.sharding import PartitionSpec

from ..specs.fitting import axes_of, with_entries
from ..specs.paths import enclosing_paths
from .compiler_shardings import possible_entries, read_sharding, spec_of_entries
from .hlo import Module
from .instructions import Instruction
from .line_places import LineFinder, OperationKey, line_path
from .parameters import ActivationRow
from .traced_values import BY_COMPILER, MadeValue, Shape

FROM_PROGRAM = "specs on Auto axes come from the compiled program"


def compiled_values(
    made: Sequence[MadeValue],
    modules: Collection[str],
    module: Module,
    whole: Module | None,
    sizes: Mapping[str, int],
) -> list[MadeValue]:
    """Completes values whose specs the compiler chose by the specs in the compiled program.

    The program before it is partitioned has them as text (`_written_specs`); without that program,
    they are inferred from shapes on one device (`_specs_of_shards`).

    Args:
      made: the values of the trace.
      modules: the paths of the modules that it calls.
      module: the program for one device, whose shapes mostly say the spec.
      whole: the program before it is partitioned, which has all specs; None if it is not there.
      sizes: the sizes of the mesh axes.
    """
    finder = LineFinder(whole or module, made)
    keyed = [*finder.keys(modules)]  # pairs of a key and an instruction
    if whole is not None:
        specs = _written_specs(keyed, sizes)
    else:
        specs = _specs_of_shards(made, keyed, sizes)
    completed = []
    for value in made:
        spec = specs.get((_key(value), value.shape))
        if value.why == BY_COMPILER and spec is not None:
            value = value._replace(spec=spec, why=FROM_PROGRAM)
        completed.append(value)
    return completed


# Specs by the operation and the shape of the whole value. None if the spec is unknown, for example
# because several values of one operation and shape are sharded in different ways.
_Specs: TypeAlias = dict[tuple[OperationKey, Shape], PartitionSpec | None]


def _written_specs(
    keyed: Iterable[tuple[OperationKey, Instruction]], sizes: Mapping[str, int]
) -> _Specs:
    """Reads the specs of operations in a program that is not partitioned yet.

    A spec is known if all values of one key and shape have the same spec. ``keyed`` are
    instructions, each after the key of its operation; ``sizes`` has the sizes of the mesh axes.
    """
    found = defaultdict[tuple[OperationKey, Shape], set[PartitionSpec | None]](set)
    for key, instruction in keyed:
        sharding = instruction.attributes.get("sharding")  # the text of the sharding
        if sharding is not None and len(instruction.results) == 1:
            shape = instruction.results[0].dims
            found[key, shape].add(read_sharding(sharding, len(shape), sizes))
    return {key: specs.pop() if len(specs) == 1 else None for key, specs in found.items()}


def _specs_of_shards(
    made: Iterable[MadeValue],
    keyed: Iterable[tuple[OperationKey, Instruction]],
    sizes: Mapping[str, int],
) -> _Specs:
    """Infers specs from the shapes that operations have in the trace and on one device.

    An operation with several shapes of one rank is left out, because nothing says which shard
    belongs to which whole array.

    Args:
      keyed: the instructions of the program for one device, each after the key of its operation.
    """
    # The shapes in the trace and on one device, by the key of the operation and the rank.
    whole_shapes = defaultdict[tuple[OperationKey, int], set[Shape]](set)
    shard_shapes = defaultdict[tuple[OperationKey, int], set[Shape]](set)
    for value in made:
        whole_shapes[_key(value), len(value.shape)].add(value.shape)
    for key, instruction in keyed:
        for array in instruction.results:
            shard_shapes[key, len(array.dims)].add(array.dims)
    specs: _Specs = {}
    for (key, rank), shapes in whole_shapes.items():
        if len(shapes) == len(shard_shapes[key, rank]) == 1:
            [whole], [shard] = shapes, shard_shapes[key, rank]
            specs[key, whole] = spec_of_shard(whole, shard, sizes)
    return specs


def inferred_activations(
    rows: Iterable[ActivationRow], made: Iterable[MadeValue], sizes: Mapping[str, int]
) -> Iterator[ActivationRow]:
    """Fills in how activations are sharded in a compiled program, where the compiler chose.

    What a module returns is taken to be the last value of its dtype and shape that is made within
    its call, in the module itself or in one that it calls.

    Args:
      rows: the activations.
      made: the values of the trace, with the specs of the compiled program.
      sizes: the sizes of the mesh axes.
    """
    # Path, dtype and shape → the spec of the last such value that the module makes.
    last: dict[tuple[str, str, Shape], PartitionSpec | None] = {}
    for value in made:
        if value.backward:
            continue
        path = value.module or ""
        for outer in [*enclosing_paths(path), path]:  # The value is made within all their calls.
            key = outer, value.dtype, value.shape
            # A constraint may leave dimensions open: for these, the value before it counts.
            last[key] = _with_constraint(value.spec, last.get(key))
    for row in rows:
        spec = last.get((row.path, row.dtype, row.shape))
        if row.spec is not None:  # It has been chosen, and may leave dimensions to the compiler.
            spec = _with_constraint(row.spec, spec)
        if row.shard_shape is None and spec is not None:
            row = _with_spec(row, spec, sizes)
        yield row


def _with_spec(row: ActivationRow, spec: PartitionSpec, sizes: Mapping[str, int]) -> ActivationRow:
    """Returns the row of an activation that is sharded by an inferred spec."""
    # The number of parts of each dimension.
    counts = [
        math.prod(sizes.get(str(axis), 1) for axis in axes_of(entry)) for entry in spec.partitions
    ]
    # The sizes are rounded up: the last shard of a dimension may be smaller than the others.
    shard = tuple(-(-n // count) for n, count in zip(row.shape, counts, strict=True))
    size = row.bytes_total * math.prod(shard) // max(math.prod(row.shape), 1)
    chosen_by = "inferred" if row.spec is None else row.chosen_by
    return dataclasses.replace(
        row, spec=spec, shard_shape=shard, bytes_per_device=size, chosen_by=chosen_by
    )


def _with_constraint(
    spec: PartitionSpec | None, before: PartitionSpec | None
) -> PartitionSpec | None:
    """Returns the spec of a value after a constraint; None if it is unknown.

    Args:
      spec: the spec of the constraint, which may leave dimensions open (``UNCONSTRAINED``).
      before: the spec of the same value before the constraint, which decides on open dimensions;
        None if it is unknown.
    """
    if spec is None or PartitionSpec.UNCONSTRAINED not in spec.partitions:
        return spec
    if before is None or len(before) != len(spec):
        return None
    pairs = zip(spec.partitions, before.partitions, strict=True)
    # The entries of ``before`` replace those that are open.
    entries = [old if new is PartitionSpec.UNCONSTRAINED else new for new, old in pairs]
    return with_entries(spec, entries)


def _key(value: MadeValue) -> OperationKey:
    """Returns the key of the operation that makes a value."""
    return OperationKey(line_path(value.line), value.operation, value.backward, value.module)


def spec_of_shard(
    shape: Shape, shard_shape: Shape, sizes: Mapping[str, int], *, any_order: bool = False
) -> PartitionSpec | None:
    """Returns the only spec with which an array has shards of a shape; None for none or several.

    Args:
      shape: the shape of the whole array.
      shard_shape: the shape of a shard.
      sizes: the sizes of the mesh axes, in their order.
      any_order: whether axes over one dimension may be in any order; the spec then has them in the
        order of the mesh. Shapes do not tell the order, so False returns None for two such axes.

    Example:
      >>> from nnx_sharding.analysis.inferred_specs import spec_of_shard
      >>> spec_of_shard((8, 64), (4, 16), {"data": 2, "model": 4})
      P('data', 'model')
      >>> spec_of_shard((8, 64), (4, 64), {"data": 2, "model": 2}) is None
      True
      >>> spec_of_shard((8, 64), (1, 64), {"data": 2, "model": 4}) is None
      True
    """

    def divides(dimension: int, count: int) -> bool:
        """Tells whether ``count`` parts of a dimension have the size of the shard."""
        # The size of parts is rounded up, because the last part may be padded.
        return -(-shape[dimension] // count) == shard_shape[dimension]

    entries = possible_entries(len(shape), divides, sizes, any_order=any_order)
    possible = [*itertools.islice(entries, 2)]  # Two are enough to know that there are several.
    return spec_of_entries(possible[0]) if len(possible) == 1 else None
