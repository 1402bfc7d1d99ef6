"""The rows of a global batch that each process holds, and the sharding of each of its arrays.

A *row* is one example: an index along the first dimension of the arrays of a batch. Each process
loads only the rows that its devices hold, its *own rows*:

    P("data") over 4 devices, 2 processes, 8 rows     process 0: rows 0 to 3    process 1: 4 to 7

All arrays with rows must be sharded so that a process holds the same rows of each. ``process_rows``
computes these rows. The first batch of an iteration decides on structure, shapes and dtypes
(``BatchSharding``). All other batches must have the same, because a training step would be compiled
again for another shape. A leaf of a batch whose spec is None is *passed through*, and may be
anything.

`BatchSharding` is used in this order (``global_batches.py``): the constructor gets the first batch;
``arrays`` checks each batch and ``count`` counts its rows; ``set_size`` gets the number of rows of
a full batch, once, before the first batch is placed; and ``place`` assembles a batch that has all
rows of this process. ``full_arrays`` is a shortcut for all checks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.flatten import flatten
from ..core.prefixes import Specs
from ..core.problems import out_of_range
from ..core.tree_shardings import assign_shardings
from ..core.treedefs import PyTreeDef
from ..errors import raise_if_any
from ..specs.fitting import axes_of, show, with_entries
from ..specs.paths import accessor, path_key
from .place import trim_to_rank

NAME = "shard_batches"  # the function that the user called, in messages

# Indices of rows of a global batch, in ascending order.
Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"

# An array of this process's rows, or a leaf of any type that is passed through.
HostArray: TypeAlias = "np.ndarray[Any, Any] | jax.Array"


@_compat.api_boundary
def process_rows(
    sharding: PartitionSpec | Sharding,
    batch_size: int,
    process: int | None = None,
    *,
    mesh: Mesh | None = None,
    process_of: Callable[[jax.Device], int] | None = None,
) -> slice | Rows:
    """Selects the rows of a global batch that a process has to load for its devices.

    ``jax.make_array_from_process_local_data`` and :func:`shard_batches` take the rows in this
    order. Processes whose devices hold the same rows load the same rows.

    Args:
      sharding: how the batch is sharded; only the first dimension matters.
      batch_size: the number of rows of the global batch.
      process: the index of a process; None for this one.
      mesh: the mesh of a ``PartitionSpec``; None for the mesh in context.
      process_of: maps a device to its process, to plan for processes that do not exist yet.

    Returns:
      A slice where the rows are contiguous, else their indices in ascending order.

    Raises:
      NoMeshError: a ``PartitionSpec`` has no mesh.
      ValueError: the spec does not fit the mesh, the mesh is abstract, the rows cannot be sharded
        evenly, or the process has none of the devices.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.placement import process_rows
      >>> mesh = make_mesh({"model": 2, "data": 4})
      >>> process_rows(P("data"), 32, 1, mesh=mesh, process_of=lambda device: device.id % 4 // 2)
      slice(16, 32, None)
    """
    check_integer("process_rows", "batch_size", batch_size)
    # The spec is fitted to an array with 0 rows, because every spec divides 0. The check below says
    # whether it divides `batch_size`.
    no_rows = jax.ShapeDtypeStruct((0,), np.bool_)
    specs = Specs(sharding)
    [concrete] = _assign_specs("process_rows", "rows", no_rows, specs, mesh, trim_to_rank)
    if not isinstance(concrete, Sharding):  # None, for which nothing is placed
        raise TypeError(f"process_rows: expected a PartitionSpec or a Sharding, got {sharding!r}.")
    check_has_devices("process_rows", concrete)
    num_parts = _num_parts(concrete)
    if batch_size < 1 or batch_size % num_parts:
        raise ValueError(
            f"process_rows: {batch_size} rows cannot be divided into {num_parts} equal parts "
            f"({_axes_text(concrete)}). Use {_next_size(batch_size, num_parts)} rows."
        )
    process = jax.process_index() if process is None else process
    held_rows = rows_by_process(concrete, int(batch_size), process_of)
    check_process("process_rows", process, held_rows)
    selected = held_rows[process]
    first_row = int(selected[0])
    end_row = int(selected[-1]) + 1
    # The indices are ascending and distinct, so they have no gaps if there are as many as there are
    # rows from the first one to the end.
    is_contiguous = end_row - first_row == len(selected)
    return slice(first_row, end_row) if is_contiguous else selected


def check_integer(caller: str, option: str, value: object, least: int | None = None) -> None:
    """Raises a TypeError if an option is no integer, and a ValueError if it is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{caller}: {option} must be an integer, got {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{caller}: {option} must be at least {least}, got {value}.")


def check_process(caller: str, process: int, processes: Collection[int]) -> None:
    """Raises a ValueError unless a process is one of ``processes``, which have devices."""
    if process not in processes:
        raise ValueError(
            f"{caller}: process {process} has none of the devices of the sharding; the processes "
            f"that have some are {', '.join(map(str, processes))}."
        )


def check_has_devices(caller: str, sharding: Sharding) -> None:
    """Raises a ValueError if a sharding is on an abstract mesh."""
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, AbstractMesh):
        raise ValueError(f"{caller}: {mesh} is abstract, without devices for batches.")


def _rows_sharding(sharding: Sharding) -> Sharding:
    """Returns the sharding of the first dimension alone, for arrays of rank 1.

    A sharding that has no spec is returned as it is.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = sharding.spec
    return NamedSharding(sharding.mesh, with_entries(spec, spec.partitions[:1]))


def _num_parts(sharding: Sharding) -> int:
    """Returns the number of parts into which the rows are sharded."""
    # The spec divides so many rows, because the number of its parts divides the number of devices.
    num_rows = sharding.num_devices
    rows_of_part = int(_rows_sharding(sharding).shard_shape((num_rows,))[0])
    return num_rows // rows_of_part


def _axes_text(sharding: Sharding) -> str:
    """Returns the axes that shard the rows as text: ``'data' (2) × 'model' (4)``."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    axes = [axis for entry in sharding.spec.partitions[:1] for axis in axes_of(entry)]
    return " × ".join(f"{axis!r} ({sharding.mesh.shape[axis]})" for axis in axes) or "no axis"


def rows_by_process(
    sharding: Sharding, size: int, process_of: Callable[[jax.Device], int] | None = None
) -> dict[int, Rows]:
    """Returns the indices of the rows of a batch that each process holds, by process.

    For 8 rows and ``P("data")`` over 4 devices in 2 processes, the result is
    ``{0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}``.

    Args:
      sharding: the sharding of an array with rows.
      size: the number of rows of the batch.
      process_of: maps a device to its process; None for the process that it belongs to.
    """
    if process_of is None and jax.process_count() == 1:
        return {jax.process_index(): np.arange(size)}
    blocks: dict[int, set[tuple[int, int]]] = {}  # by process, (first row, end) of its blocks
    # By device, the slice of its rows, in a tuple for the only dimension.
    indices: Mapping[Any, tuple[slice, ...]] = _rows_sharding(sharding).devices_indices_map((size,))
    for device, (row_slice,) in indices.items():
        process = device.process_index if process_of is None else process_of(device)
        start, end, _ = row_slice.indices(size)
        # The blocks are a set, because several devices of a process may hold the same rows.
        blocks.setdefault(process, set()).add((start, end))
    return {
        process: np.concatenate([np.arange(start, end) for start, end in sorted(blocks[process])])
        for process in sorted(blocks)
    }


def _next_size(size: int, parts: int) -> int:
    """Returns the least positive multiple of ``parts`` from ``size`` on: 12 for 9 and 4."""
    return max(1, math.ceil(size / parts)) * parts


class Leaf(NamedTuple):
    """One leaf of a batch."""

    name: str  # the place in the batch, as Python code: batch['x']
    sharding: Sharding | None  # None if the leaf is passed through
    kind: str  # the dtype and shape of its array: float32[rows, 2]
    has_rows: bool  # whether its first dimension is the rows of the batch
    # The dtype and the shape of a row. A NumPy array with both can be placed as it is, because JAX
    # does not change this dtype. None if each array has to be checked.
    unchecked_row: tuple[np.dtype[Any], tuple[int, ...]] | None = None

    def needs_no_check(self, value: Any) -> bool:
        """Whether a value is passed through, or is a NumPy array that can be placed as it is."""
        if self.sharding is None:
            return True
        is_array = type(value) is np.ndarray and value.ndim > 0
        return is_array and (value.dtype, value.shape[1:]) == self.unchecked_row

    def __str__(self) -> str:
        return f"{self.name}: {self.kind if self.sharding else 'passed through'}"


class BatchSharding:
    """The structure and shardings of all batches, taken from the first one.

    Attributes:
      leaves: the leaves of a batch, in the order of its pytree.
      rows: the sharding of the rows, for an array of rank 1.
      size: the number of rows of a full global batch; 0 until :meth:`set_size`.
      own_rows: the indices of the rows of a full batch that this process holds.

    Its private attributes:

        _treedef     the pytree structure of each batch
        _with_rows   the name and the sharding of each leaf with rows
        _placed      the positions of the leaves that are placed, not passed through
        _shardings   the shardings of these leaves
        _common      the sharding of all these leaves; None if they differ
        _full_kinds  the dtype and the shape of each leaf in a full batch of this process; None for
                     a leaf that is passed through. The list is empty until `set_size`, and if a
                     leaf always has to be checked; then `full_arrays` returns None for all batches
    """

    def __init__(self, batch: Any, specs: Specs, mesh: Mesh | AbstractMesh | None):
        """Decides on the sharding of each array, from the first batch.

        Args:
          batch: the part of the first batch that this process has.
          specs: the user's specs, as a prefix of the batch.
          mesh: the mesh of each ``PartitionSpec``; None for the one in context.

        Raises:
          TypeError: a leaf with a spec is not an array.
          ValueError: specs do not fit the arrays, or no array has rows.
        """
        self._treedef: PyTreeDef
        leaves_with_path, self._treedef = jax.tree_util.tree_flatten_with_path(batch)
        names = _names(leaves_with_path)
        # 1. Arrays and their shardings. `arrays` has a TypeError for a leaf that is no array.
        # `_check_arrays` raises an error for such leaves, unless their spec is None.
        arrays = [_as_host_array(leaf) for _, leaf in leaves_with_path]
        shardings = _shardings(self._treedef, arrays, specs, mesh)
        _check_arrays(names, arrays, shardings)
        # 2. The facts about each leaf, for the checks of later batches.
        self.leaves: list[Leaf] = []
        self._with_rows: list[tuple[str, Sharding]] = []
        for name, sharding, array in zip(names, shardings, arrays, strict=True):
            leaf = _leaf_of(name, sharding, array)
            self.leaves.append(leaf)
            if sharding is not None and leaf.has_rows:
                self._with_rows.append((name, sharding))
        if not self._with_rows:
            leaves_text = ", ".join(map(str, self.leaves)) or "it is empty"
            raise ValueError(
                f"{NAME}: the batch has no array with rows: {leaves_text}. Give at least one "
                "array with a leading dimension, and a spec for it."
            )
        # 3. The leaves that are placed, and the sharding of the rows.
        sharded = [(i, leaf.sharding) for i, leaf in enumerate(self.leaves) if leaf.sharding]
        self._placed = [index for index, _ in sharded]
        self._shardings = [sharding for _, sharding in sharded]
        # A common sharding is kept because JAX takes 5 to 10 µs more to match a list of shardings
        # with two arrays than one sharding.
        are_alike = self._shardings.count(self._shardings[0]) == len(self._shardings)
        self._common = self._shardings[0] if are_alike else None
        # The leaf with the most parts of rows decides how the rows are sharded. `set_size` checks
        # that this suits all other leaves.
        shardings_with_rows = [sharding for _, sharding in self._with_rows]
        self.rows = _rows_sharding(max(shardings_with_rows, key=_num_parts))
        self.size = 0
        self.own_rows: Rows = np.arange(0)
        self._full_kinds: list[tuple[np.dtype[Any], tuple[int, ...]] | None] = []

    def full_arrays(self, batch: Any) -> list[HostArray] | None:
        """Returns the leaves of a batch if they can be placed as they are; None if unknown.

        NumPy arrays with the structure, the dtypes and the shapes of a full batch can be, because
        they pass all checks of `arrays`, `count` and `set_size`, which depend on nothing else.
        """
        values, treedef = jax.tree.flatten(batch)
        if not self._full_kinds or treedef != self._treedef:
            return None
        for value, kind in zip(values, self._full_kinds, strict=True):
            if kind is None:  # the leaf is passed through, whatever it is
                continue
            # `type` leaves out subclasses, which are converted, or refused as masked arrays are.
            if type(value) is not np.ndarray or (value.dtype, value.shape) != kind:
                return None
        return values

    def arrays(self, batch: Any) -> list[HostArray]:
        """Returns the leaves of a batch as host arrays, if they are like the first batch's.

        Leaves that are passed through are returned as they are.

        Raises:
          ValueError: the structure, shapes or dtypes differ from those of the first batch, or
            integers do not fit the dtypes that JAX gives them.
          TypeError: a leaf is not an array, and is not passed through.
        """
        values, treedef = jax.tree.flatten(batch)
        # The shortcut is for batches with fewer rows or with a mask, because the checks below take
        # 5 µs for each leaf.
        if treedef == self._treedef and all(map(Leaf.needs_no_check, self.leaves, values)):
            return values
        # 1. The structure has to be the same.
        if treedef != self._treedef:
            self._refuse_structure(batch, treedef)
        # 2. All leaves have to be arrays, except those that are passed through.
        arrays = [
            value if leaf.sharding is None else _as_host_array(value)
            for value, leaf in zip(values, self.leaves, strict=True)
        ]
        names = [leaf.name for leaf in self.leaves]
        _check_arrays(names, arrays, [leaf.sharding for leaf in self.leaves])
        # 3. Shapes and dtypes have to be the same as in the first batch, and JAX has to hold all
        # integers.
        self._check_kinds(arrays)
        return arrays

    def _refuse_structure(self, batch: Any, treedef: PyTreeDef) -> None:
        """Raises a ValueError for a batch with another structure, ``treedef``, than the first."""
        leaves_with_path, _ = jax.tree_util.tree_flatten_with_path(batch)
        new_names = _names(leaves_with_path)
        names = [leaf.name for leaf in self.leaves]
        lines = [f"  {name}: new" for name in new_names if name not in names]
        lines += [f"  {name}: missing" for name in names if name not in new_names]
        raise_if_any(
            ValueError,
            f"{NAME}: the structure of this batch differs from that of the first one:",
            # Without new or missing names, containers differ, such as a list and a tuple.
            lines or [f"  {treedef}, in the first batch {self._treedef}"],
        )

    def _check_kinds(self, arrays: Sequence[HostArray]) -> None:
        """Raises a ValueError for other shapes or dtypes than in the first batch.

        Integers that do not fit the dtype that JAX gives them are an error as well.
        """
        changed: list[str] = []
        too_large: list[str] = []
        for array, leaf in zip(arrays, self.leaves, strict=True):
            if leaf.sharding is None:  # the leaf is passed through, whatever it is
                continue
            limits = ""  # the range of integers, if they do not fit the dtype that JAX gives them
            if isinstance(array, np.ndarray):
                limits = out_of_range(array, jax.dtypes.canonicalize_dtype(array.dtype))
            kind = _kind(array)
            if limits:
                too_large.append(f"  {leaf}, {limits}")
            elif kind != leaf.kind:
                changed.append(f"  {leaf} became {kind}")
        raise_if_any(
            ValueError,
            f"{NAME}: these leaves differ from those of the first batch:",
            changed,
            "A training step would be compiled for each shape: pad them to one shape, or use a "
            "separate shard_batches for each.",
        )
        raise_if_any(
            ValueError,
            f"{NAME}: these integers do not fit the 32 bits that JAX has:",
            too_large,
            "Set jax_enable_x64, or make them smaller.",
        )

    def count(self, arrays: Sequence[HostArray]) -> int:
        """Returns the number of rows that this process has of a batch.

        Raises:
          ValueError: leaves have different numbers of rows.
        """
        pairs = zip(self.leaves, arrays, strict=True)
        counts = {leaf.name: len(array) for leaf, array in pairs if leaf.has_rows}
        if len(set(counts.values())) > 1:
            raise_if_any(
                ValueError,
                f"{NAME}: these leaves of one batch differ in their first dimension:",
                [f"  {name}: {count} rows" for name, count in counts.items()],
                "Leave out what does not have rows, or give it the spec None, which passes it "
                "through.",
            )
        # There is a leaf with rows, because the constructor refuses a batch without one.
        return next(iter(counts.values()))

    def set_size(self, size: int | None, loaded: int, *, is_alone: bool) -> None:
        """Sets the number of rows of a full global batch, and the rows of this process.

        Args:
          size: the number of rows of all processes. None for the least number that the ``loaded``
            rows fit into, if all processes have loaded rows in proportion to their parts.
          loaded: the number of rows that this process has of the first batch.
          is_alone: whether no other process has devices of the sharding.

        Raises:
          ValueError: leaves cannot be sharded evenly, or a process would hold different rows of
            different leaves.
        """
        if size is None:
            size = self._size_for(loaded)
        self.size = size
        # The next size that can be divided for all leaves, for the message.
        all_parts = [_num_parts(sharding) for _, sharding in self._with_rows]
        divisible = _next_size(size, math.lcm(*all_parts))
        raise_if_any(
            ValueError,
            f"{NAME}: batches of {size} rows cannot be sharded evenly:",
            [
                f"  {name} by {_axes_text(sharding)}"
                for name, sharding in self._with_rows
                if size % _num_parts(sharding)
            ],
            f"Load {divisible} rows, or pass uneven='pad' with batch_size={divisible}, which pads "
            "each batch.",
        )
        held_rows = rows_by_process(self.rows, size)  # process → indices of its rows
        self.own_rows = held_rows[jax.process_index()]
        self._full_kinds = self._kinds_in_full_batch()
        if is_alone:  # this process holds all rows of each leaf
            return
        raise_if_any(
            ValueError,
            f"{NAME}: a process would have to load different rows of these leaves than of those "
            f"with rows sharded by {_axes_text(self.rows)}:",
            [
                f"  {name}, by {_axes_text(sharding)}"
                for name, sharding in self._with_rows
                if not _are_equal(held_rows, rows_by_process(sharding, size))
            ],
            "Shard the first dimension of all leaves alike, and replicate in the step.",
        )

    def _size_for(self, loaded: int) -> int:
        """Returns the least number of rows of all processes that the rows of this one fit into.

        If this process has 2 of 4 parts of the rows and has ``loaded`` 6 rows, there are 12.
        """
        num_parts = _num_parts(self.rows)
        # The parts of a process are its rows in a batch with one row for each part.
        own_parts = len(rows_by_process(self.rows, num_parts)[jax.process_index()])
        return math.ceil(loaded * num_parts / own_parts)

    def _kinds_in_full_batch(self) -> list[tuple[np.dtype[Any], tuple[int, ...]] | None]:
        """Returns the value for ``_full_kinds``; ``own_rows`` has to be set."""
        kinds: list[tuple[np.dtype[Any], tuple[int, ...]] | None] = []
        for leaf in self.leaves:
            if leaf.sharding is None:
                kinds.append(None)
            elif leaf.unchecked_row is None:
                return []
            else:
                dtype, row = leaf.unchecked_row
                kinds.append((dtype, (len(self.own_rows), *row)))
        return kinds

    def place(self, arrays: Sequence[HostArray], mask: HostArray | None = None) -> Any:
        """Assembles a global batch from the rows of this process.

        Args:
          arrays: the leaves of the batch, with all rows that this process holds.
          mask: of shape (own rows,), whether each row was loaded and not filled in.

        Returns:
          The batch; with a mask, a pair of the batch and the global mask.
        """
        leaves: list[Any] = list(arrays)
        # The positions of the leaves that are placed, and their shardings.
        positions, shardings, common = self._placed, self._shardings, self._common
        if mask is not None:  # the mask is placed with the arrays, as one more leaf with rows
            leaves.append(mask)
            positions = [*positions, len(arrays)]
            shardings = [*shardings, self.rows]
            if common != self.rows:
                common = None
        own_arrays = [leaves[index] for index in positions]  # (own rows, …), or () for a number
        # With one process, `device_put` does the same as the other function, and is a tenth faster.
        if jax.process_count() == 1:
            global_arrays = jax.device_put(own_arrays, shardings if common is None else common)
        else:
            global_shapes = [  # (rows, …), or () for a number
                (self.size, *array.shape[1:]) if array.ndim else () for array in own_arrays
            ]
            global_arrays = jax.make_array_from_process_local_data(
                shardings, own_arrays, global_shapes
            )
        for index, array in zip(positions, global_arrays, strict=True):
            leaves[index] = array  # all other leaves are passed through
        if mask is None:
            return self._treedef.unflatten(leaves)
        *leaves, global_mask = leaves
        return self._treedef.unflatten(leaves), global_mask


def _leaf_of(name: str, sharding: Sharding | None, array: Any) -> Leaf:
    """Returns the facts about a leaf of the first batch.

    Args:
      name: the place of the leaf in the batch.
      sharding: the sharding of the leaf; None if it is passed through.
      array: the array. A ``TypeError`` in its place is possible only without a sharding, because
        `_check_arrays` has refused all others.
    """
    has_rows = sharding is not None and array.ndim > 0
    unchecked_row = None
    if has_rows and isinstance(array, np.ndarray):
        # If JAX changes the dtype, as by default with 64 bits, each array is checked, because
        # integers may be too large for 32 bits.
        is_dtype_kept = array.dtype == jax.dtypes.canonicalize_dtype(array.dtype)
        unchecked_row = (array.dtype, array.shape[1:]) if is_dtype_kept else None
    return Leaf(name, sharding, _kind(array), has_rows, unchecked_row)


def _are_equal(rows: Mapping[int, Rows], other_rows: Mapping[int, Rows]) -> bool:
    """Whether the same processes hold the same rows.

    The arguments are results of `rows_by_process`, whose keys are in ascending order.
    """
    has_same_processes = [*rows] == [*other_rows]
    return has_same_processes and all(map(np.array_equal, rows.values(), other_rows.values()))


def _shardings(
    treedef: PyTreeDef,
    arrays: Sequence[HostArray | TypeError],
    specs: Specs,
    mesh: Mesh | AbstractMesh | None,
) -> list[Sharding | None]:
    """Returns the sharding of each leaf of a batch; None for a leaf that is passed through.

    A sharding has to divide all dimensions except the rows, whose number `set_size` checks.

    Args:
      arrays: the leaves of the batch; a ``TypeError`` in place of a leaf that is no array.
      specs: the user's specs, as a prefix of the batch.
      mesh: the mesh of each ``PartitionSpec``; None for the one in context.

    Raises:
      ValueError, TypeError, NoMeshError: specs do not fit.
    """
    # Fewer rows may be loaded than a batch has, so the specs are fitted to arrays with a number of
    # rows that any mesh axis divides.
    num_devices = [spec.num_devices for spec in specs.written if isinstance(spec, Sharding)]
    num_rows = math.lcm(*num_devices, 1 if mesh is None else mesh.size)

    def abstract(array: HostArray | TypeError) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a leaf, with a number of rows that any axis divides."""
        # A leaf that is no array gets a placeholder. Later it is passed through or refused.
        if isinstance(array, TypeError):
            return jax.ShapeDtypeStruct((), bool)
        shape = (num_rows, *array.shape[1:]) if array.ndim else ()
        return jax.ShapeDtypeStruct(shape, array.dtype)

    def adapt(spec: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        """Returns the spec that has to fit a leaf: the user's, except for a number."""
        # P("data") for all leaves replicates a number, because it has no rows to shard. Too many
        # entries for an array with rows are an error.
        return spec if leaf.shape else trim_to_rank(spec, leaf)

    tree = treedef.unflatten(map(abstract, arrays))
    return _assign_specs(NAME, "batch", tree, specs, mesh, adapt)


def _assign_specs(
    caller: str,
    name: str,
    tree: Any,
    specs: Specs,
    mesh: Mesh | AbstractMesh | None,
    adapt: Callable[[Any, Any], Any],
) -> list[Sharding | None]:
    """Returns the sharding of each array of an abstract tree; None where the spec is None.

    Args:
      caller: the function that the user called, in messages.
      mesh: the mesh of each ``PartitionSpec``; None for the one in context.
      adapt: takes a spec and its array, and returns the spec that has to fit.

    Raises:
      ValueError, TypeError, NoMeshError: specs do not fit.
    """
    _, shardings = assign_shardings(
        flatten(tree),
        specs,
        mesh=mesh,
        caller=caller,
        name=name,
        # UNCONSTRAINED is refused, because there is no compiler that could choose a sharding.
        whole=True,
        adapt=adapt,
    )
    return shardings


def _names(leaves_with_path: Sequence[tuple[Sequence[Any], Any]]) -> list[str]:
    """Returns the place of each leaf as Python code: ``batch['x']``."""
    return [accessor("batch", tuple(map(path_key, path))) for path, _ in leaves_with_path]


def _kind(array: HostArray | TypeError) -> str:
    """Returns the dtype and shape of an array for comparison and messages: ``float32[rows, 2]``."""
    if isinstance(array, TypeError):  # the leaf is passed through
        return ""
    return _kind_of_rows(array.dtype, array.shape[1:] if array.ndim else None)


@functools.lru_cache(maxsize=1024)  # called for each leaf of each batch; a text takes microseconds
def _kind_of_rows(dtype: np.dtype[Any], row: tuple[int, ...] | None) -> str:
    """Returns the text for `_kind`; ``row`` is the shape of a row, or None for a number."""
    sizes = [] if row is None else ["rows", *map(str, row)]
    return f"{dtype}[{', '.join(sizes)}]"


def _check_arrays(
    names: Sequence[str],
    arrays: Sequence[HostArray | TypeError],
    shardings: Sequence[Sharding | None],
) -> None:
    """Raises a TypeError that lists all leaves with a sharding that are not arrays."""
    wrong = [
        f"  {name}: {array}"
        for name, array, sharding in zip(names, arrays, shardings, strict=True)
        if sharding is not None and isinstance(array, TypeError)
    ]
    remedy = "Leave them out, or give them the spec None, which passes them through."
    raise_if_any(TypeError, f"{NAME}: these leaves are not arrays:", wrong, remedy)


def _as_host_array(leaf: Any) -> Any:  # HostArray | TypeError; a checked leaf is an array
    """Returns a leaf of a batch as an array, which shares the leaf's memory if possible.

    For a leaf that is no array, a ``TypeError`` that says why is returned. The error is not raised,
    because the spec of the leaf may be None, which passes it through, and one error lists all other
    leaves.
    """
    # NumPy numbers are left out: ``np.float64`` is a ``float``, but has a dtype of its own.
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        try:
            return np.asarray(leaf, jnp.result_type(type(leaf)))  # the dtype that JAX gives it
        except OverflowError:  # an integer that this dtype cannot hold
            # NumPy gives it 64 bits, and `arrays` refuses it with its path if it is placed. A
            # larger integer gets the dtype O, which is refused below.
            leaf = np.asarray(leaf)
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ma.MaskedArray):  # as in JAX, since `np.asarray` would lose its mask
        return TypeError("a masked array: yield its data and its mask, or what filled() returns")
    is_of_numpy = isinstance(leaf, np.ndarray | np.generic)
    try:
        # An array of another library, such as a tensor of PyTorch, is converted.
        array = np.asarray(leaf if is_of_numpy else _from_library(leaf))
    except TypeError as error:
        return error
    # JAX has no objects (O), bytes (S), text (U), dates (M) or time spans (m), and no records.
    # Records are found by the type `np.void`, because their kind, V, is that of bfloat16 as well.
    if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
        return TypeError(f"an array of dtype {array.dtype}")
    return array


def _from_library(x: object) -> np.ndarray[Any, Any]:
    """Returns an array of another library, such as a tensor of PyTorch, as a NumPy array.

    Raises:
      TypeError: x is not an array, or cannot be converted, such as a tensor on a GPU.
    """
    try:
        if hasattr(x, "__array__"):
            # PyTorch raises a TypeError for bfloat16, which NumPy lacks. DLPack is tried then.
            with contextlib.suppress(TypeError):
                return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.asarray(jax.dlpack.from_dlpack(x))
    except Exception as error:  # another library may raise anything
        raise TypeError(f"a {type(x).__name__} that gives no array: {error}") from error
    # The object has neither method, or only `__array__`, which raised a TypeError.
    raise TypeError(f"{show(x)} of type {type(x).__name__}")


def pad_rows(array: HostArray, rows: int, filler: HostArray | int | None) -> HostArray:
    """Fills an array up to a number of rows, with copies of its last row.

    Zeros are not used, because they might become NaN in a model, and a mask does not remove NaN
    from a sum.

    Args:
      array: the array, of shape (at most ``rows``, …).
      rows: the number of rows of the result.
      filler: the row for an array without rows: an array of shape (1, …), of random keys if the
        array has random keys, or a number. None if the array has rows.
    """
    count = len(array)
    if count == rows:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        # NumPy has no random keys, so the integers in them are padded: (rows,) → (rows, words).
        key_data = np.asarray(jax.random.key_data(array))
        if isinstance(filler, jax.Array):  # a row of keys
            filler = np.asarray(jax.random.key_data(filler))
        padded = jnp.asarray(pad_rows(key_data, rows, filler))
        return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(array))
    source = np.asarray(array)
    result = np.empty((rows, *source.shape[1:]), source.dtype)
    result[:count] = source
    result[count:] = source[-1:] if count else filler
    return result


def copied(array: HostArray) -> HostArray:
    """Returns the array in memory of its own."""
    return array.copy() if isinstance(array, jax.Array) else np.array(array)
