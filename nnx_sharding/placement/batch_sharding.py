"""The rows of a global batch that each process holds, and the sharding of each of its arrays.

The first dimension of each array is the rows of the batch. All arrays with rows must be sharded so
that a process holds the same rows of each; ``process_rows`` computes which. The first batch of an
iteration decides on structure, shapes and dtypes (``BatchSharding``), and all others must be alike:
a training step would be compiled again for another shape.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from ..core.arguments import Specs
from ..core.flatten import flatten
from ..core.problems import out_of_range, show
from ..core.tree_shardings import assign_shardings
from ..core.treedefs import PyTreeDef
from ..errors import raise_listed
from ..specs.fitting import axes_of, with_entries
from ..specs.paths import accessor, path_key
from .place import trim_to_rank

_NAME = "shard_batches"

# Indices of rows of a global batch, in ascending order.
Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.intp]]"

# An array of this process's rows. It may also be a leaf that is passed through, of any type.
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
    rows = jax.ShapeDtypeStruct((0,), np.bool_)  # 0 rows, which every spec divides
    specs = Specs(sharding)
    [concrete] = _assigned("process_rows", "rows", rows, specs, mesh, trim_to_rank)
    if not isinstance(concrete, Sharding):
        raise TypeError(f"process_rows: expected a PartitionSpec or a Sharding, got {sharding!r}.")
    check_has_devices("process_rows", concrete)
    parts = _parts(concrete)
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"process_rows: {batch_size} rows cannot be divided into {parts} equal parts "
            f"({_axes(concrete)}). Use {_next_size(batch_size, parts)} rows."
        )
    process = jax.process_index() if process is None else process
    held = rows_by_process(concrete, int(batch_size), process_of)
    check_process("process_rows", process, held)
    selected = held[process]
    first = int(selected[0])
    end = int(selected[-1]) + 1
    return slice(first, end) if end - first == len(selected) else selected


def check_integer(caller: str, option: str, value: object, least: int | None = None) -> None:
    """Raises an error if the value of an option is not an integer, or less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{caller}: {option} must be an integer, got {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{caller}: {option} must be at least {least}, got {value}.")


def check_process(caller: str, process: int, processes: Collection[int]) -> None:
    """Raises an error if a process has none of the devices that a sharding needs."""
    if process not in processes:
        raise ValueError(
            f"{caller}: process {process} has none of the devices of the sharding; the processes "
            f"that have some are {', '.join(map(str, processes))}."
        )


def check_has_devices(caller: str, sharding: Sharding) -> None:
    """Raises an error if a sharding is on an abstract mesh."""
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, AbstractMesh):
        raise ValueError(f"{caller}: {mesh} is abstract, without devices for batches.")


def _of_rows(sharding: Sharding) -> Sharding:
    """Returns the sharding of the first dimension alone."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = sharding.spec
    return NamedSharding(sharding.mesh, with_entries(spec, spec.partitions[:1]))


def _parts(sharding: Sharding) -> int:
    """Returns the number of parts into which the rows are sharded."""
    count = sharding.num_devices
    return count // int(_of_rows(sharding).shard_shape((count,))[0])


def _axes(sharding: Sharding) -> str:
    """Describes what shards the rows: ``'data' (2) × 'model' (4)``."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    axes = [axis for entry in sharding.spec.partitions[:1] for axis in axes_of(entry)]
    return " × ".join(f"{axis!r} ({sharding.mesh.shape[axis]})" for axis in axes) or "no axis"


def rows_by_process(
    sharding: Sharding, size: int, process_of: Callable[[jax.Device], int] | None = None
) -> dict[int, Rows]:
    """Returns the rows of a batch of ``size`` rows that each process holds."""
    blocks: dict[int, set[tuple[int, int]]] = {}
    indices: Mapping[Any, tuple[slice, ...]] = _of_rows(sharding).devices_indices_map((size,))
    for device, index in indices.items():
        process = device.process_index if process_of is None else process_of(device)
        blocks.setdefault(process, set()).add(index[0].indices(size)[:2])
    return {
        process: np.concatenate([np.arange(*block) for block in sorted(blocks[process])])
        for process in sorted(blocks)
    }


def _next_size(size: int, parts: int) -> int:
    """Returns the least positive number of rows from ``size`` on that ``parts`` divides."""
    return max(1, math.ceil(size / parts)) * parts


class Leaf(NamedTuple):
    """One leaf of a batch."""

    name: str  # where it is, as Python code
    sharding: Sharding | None  # None if it is passed through
    kind: str  # dtype and shape of its array: float32[rows, 2]
    has_rows: bool  # whether its first dimension is the rows of the batch

    def __str__(self) -> str:
        return f"{self.name}: {self.kind if self.sharding else 'passed through'}"


class BatchSharding:
    """The structure and shardings of all batches, taken from the first one."""

    def __init__(self, batch: Any, specs: Specs, mesh: Mesh | AbstractMesh | None):
        """Decides on the sharding of each array, from the first batch.

        Args:
          batch: the part of the first batch that this process has.
          specs: the user's specs, as a prefix of the batch.
          mesh: the mesh of each ``PartitionSpec``; None for the one in context.

        Raises:
          ValueError: specs do not fit the arrays, or no array has rows.
        """
        self._treedef: PyTreeDef
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(batch)
        names = _names(paths)
        arrays = [_host_array(leaf) for _, leaf in paths]
        shardings = _shardings(self._treedef, arrays, specs, mesh)
        _check_arrays(names, arrays, shardings)
        self.leaves = [
            Leaf(name, sharding, _kind(array), sharding is not None and array.ndim > 0)
            for name, sharding, array in zip(names, shardings, arrays, strict=True)
        ]
        self._by_rows: list[tuple[str, Sharding]] = [
            (leaf.name, leaf.sharding)
            for leaf in self.leaves
            if leaf.has_rows and leaf.sharding is not None
        ]
        if not self._by_rows:
            raise ValueError(
                f"{_NAME}: the batch has no array with rows: "
                + (", ".join(map(str, self.leaves)) or "it is empty")
                + ". Give at least one array with a leading dimension, and a spec for it."
            )
        # The rows are sharded like the leaf with the most shards along them.
        self.rows = _of_rows(max((s for _, s in self._by_rows), key=_parts))
        self.size = 0  # of a full global batch, once it is set
        self.own_rows: Rows = np.arange(0)  # the rows of such a batch that this process holds

    def arrays(self, batch: Any) -> list[HostArray]:
        """Returns the leaves of a batch, which must be like the first one, as host arrays."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
        names = [leaf.name for leaf in self.leaves]
        if treedef != self._treedef:
            found = _names(paths)
            lines = [f"  {name}: new" for name in found if name not in names]
            lines += [f"  {name}: missing" for name in names if name not in found]
            raise_listed(
                ValueError,
                f"{_NAME}: the structure of this batch differs from that of the first one:",
                lines or [f"  {treedef}, in the first batch {self._treedef}"],
            )
        shardings = [leaf.sharding for leaf in self.leaves]
        pairs = zip(paths, shardings, strict=True)
        arrays = [x if sharding is None else _host_array(x) for (_, x), sharding in pairs]
        _check_arrays(names, arrays, shardings)
        leaves = zip(arrays, self.leaves, strict=True)
        placed = [(x, leaf) for x, leaf in leaves if leaf.sharding is not None]
        raise_listed(
            ValueError,
            f"{_NAME}: these leaves differ from those of the first batch:",
            [f"  {leaf} became {_kind(x)}" for x, leaf in placed if _kind(x) != leaf.kind],
            "A training step would be compiled for each shape: pad them to one shape, or use a "
            "separate shard_batches for each.",
        )
        raise_listed(
            ValueError,
            f"{_NAME}: these integers do not fit the 32 bits that JAX has:",
            [f"  {leaf}, {value}" for x, leaf in placed if (value := _wrapping(x))],
            "Set jax_enable_x64, or make them smaller.",
        )
        return arrays

    def count(self, arrays: Sequence[HostArray]) -> int:
        """Returns the number of rows of a batch, in which all leaves must agree."""
        pairs = zip(self.leaves, arrays, strict=True)
        counts = {leaf.name: len(array) for leaf, array in pairs if leaf.has_rows}
        if len(set(counts.values())) > 1:
            raise_listed(
                ValueError,
                f"{_NAME}: these leaves of one batch differ in their first dimension:",
                [f"  {name}: {count} rows" for name, count in counts.items()],
                "Leave out what does not have rows, or give it the spec None, which passes it "
                "through.",
            )
        return next(iter(counts.values()))

    def set_size(self, size: int | None, loaded: int, *, is_alone: bool) -> None:
        """Sets the number of rows of a full global batch.

        None is the least size into which the rows fit that this process has ``loaded``, as if all
        processes had loaded in proportion to their parts.
        """
        if size is None:
            parts = _parts(self.rows)
            own_parts = len(rows_by_process(self.rows, parts)[jax.process_index()])
            size = -(-loaded * parts // own_parts)
        self.size = size
        good = _next_size(size, math.lcm(*(_parts(s) for _, s in self._by_rows)))
        raise_listed(
            ValueError,
            f"{_NAME}: batches of {size} rows cannot be sharded evenly:",
            [f"  {name} by {_axes(s)}" for name, s in self._by_rows if size % _parts(s)],
            f"Load {good} rows, or pass uneven='pad' with batch_size={good}, which pads each "
            "batch.",
        )
        held = rows_by_process(self.rows, size)
        self.own_rows = held[jax.process_index()]
        if is_alone:
            return
        raise_listed(
            ValueError,
            f"{_NAME}: a process would have to load different rows of these leaves than of those "
            f"with rows sharded by {_axes(self.rows)}:",
            [
                f"  {name}, by {_axes(sharding)}"
                for name, sharding in self._by_rows
                if not _are_equal(held, rows_by_process(sharding, size))
            ],
            "Shard the first dimension of all leaves alike, and replicate in the step.",
        )

    def place(self, arrays: Sequence[HostArray], mask: HostArray | None = None) -> Any:
        """Returns the global batch, paired with the mask if there is one.

        ``arrays``, and ``mask`` of shape (own rows,), are full: they have all of ``own_rows``.
        """
        leaves, local = list(self.leaves), list(arrays)
        if mask is not None:
            leaves.append(Leaf("mask", self.rows, "bool[rows]", has_rows=True))
            local.append(mask)
        places = [i for i, leaf in enumerate(leaves) if leaf.sharding is not None]
        shapes = [(self.size, *local[i].shape[1:]) if leaves[i].has_rows else () for i in places]
        placed = jax.make_array_from_process_local_data(
            [leaves[i].sharding for i in places], [local[i] for i in places], shapes
        )
        for i, array in zip(places, placed, strict=True):
            local[i] = array
        batch = self._treedef.unflatten(local[: len(arrays)])
        return batch if mask is None else (batch, local[-1])


def _are_equal(one: Mapping[int, Rows], other: Mapping[int, Rows]) -> bool:
    """Whether the same processes hold the same rows."""
    return [*one] == [*other] and all(map(np.array_equal, one.values(), other.values()))


def _shardings(
    treedef: PyTreeDef,
    arrays: Sequence[HostArray | TypeError],
    specs: Specs,
    mesh: Mesh | AbstractMesh | None,
) -> list[Sharding | None]:
    """Returns the sharding of each leaf, with specs that fit all dimensions except the rows."""
    # Loaded rows may be fewer than the rows of a batch, so each array counts as one with a number
    # of rows that any mesh axis divides.
    devices = [spec.num_devices for spec in specs.written if isinstance(spec, Sharding)]
    rows = math.lcm(*devices, 1 if mesh is None else mesh.size)

    def abstract(x: HostArray | TypeError) -> jax.ShapeDtypeStruct:
        shape = getattr(x, "shape", ())  # an error has none, and is reported later
        return jax.ShapeDtypeStruct((rows, *shape[1:])[: len(shape)], getattr(x, "dtype", bool))

    def adapt(spec: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        return spec if leaf.shape else trim_to_rank(spec, leaf)  # a number is the same for all rows

    tree = treedef.unflatten(map(abstract, arrays))
    return _assigned(_NAME, "batch", tree, specs, mesh, adapt)


def _assigned(
    caller: str,
    name: str,
    tree: Any,
    specs: Specs,
    mesh: Mesh | AbstractMesh | None,
    adapt: Callable[[Any, Any], Any],
) -> list[Sharding | None]:
    """Returns the sharding of each array of a tree, of specs that ``adapt`` fits to its rank."""
    options: Any = {"caller": caller, "name": name, "whole": True, "adapt": adapt}
    return assign_shardings(tree, flatten(tree), specs, mesh=mesh, **options)[1]


def _names(paths: Sequence[tuple[Sequence[Any], Any]]) -> list[str]:
    """Returns where each leaf is, as Python code: ``batch['x']``."""
    return [accessor("batch", tuple(map(path_key, path))) for path, _ in paths]


def _kind(array: HostArray | TypeError) -> str:
    """Returns the dtype and shape of an array for comparison and messages: ``float32[rows, 2]``."""
    if isinstance(array, TypeError):  # the leaf is passed through
        return ""
    sizes = ["rows", *map(str, array.shape[1:])] if array.ndim else []
    return f"{array.dtype}[{', '.join(sizes)}]"


def _wrapping(x: HostArray) -> str:
    """Returns the range of integers that JAX would shorten, if they do not fit then."""
    canonical = jax.dtypes.canonicalize_dtype
    return out_of_range(x, canonical(x.dtype)) if isinstance(x, np.ndarray) else ""


def _check_arrays(
    names: Sequence[str],
    arrays: Sequence[HostArray | TypeError],
    shardings: Sequence[Sharding | None],
) -> None:
    """Raises an error that lists all leaves with a sharding that are not arrays."""
    found = zip(names, arrays, shardings, strict=True)
    wrong = [f"  {n}: {x}" for n, x, s in found if s is not None and isinstance(x, TypeError)]
    remedy = "Leave them out, or give them the spec None, which passes them through."
    raise_listed(TypeError, f"{_NAME}: these leaves are not arrays:", wrong, remedy)


def _host_array(x: Any) -> Any:  # HostArray | TypeError; a checked leaf is an array
    """Returns an array that shares memory with ``x`` if possible, or a TypeError saying why not."""
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        return np.asarray(x, jnp.result_type(type(x)))
    if isinstance(x, jax.Array):
        return x
    try:
        array = np.asarray(x if isinstance(x, np.ndarray | np.generic) else _converted(x))
    except TypeError as error:
        return error
    if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
        return TypeError(f"an array of dtype {array.dtype}")
    return array


def _converted(x: object) -> np.ndarray[Any, Any]:
    """Returns a foreign array, such as a tensor of PyTorch, as a NumPy array."""
    try:
        if hasattr(x, "__array__"):
            with contextlib.suppress(TypeError):
                return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.asarray(jax.dlpack.from_dlpack(x))  # supports bfloat16, unlike NumPy
    except Exception as error:  # of another library, which may raise anything
        raise TypeError(f"a {type(x).__name__} that gives no array: {error}") from error
    raise TypeError(f"{show(x)} of type {type(x).__name__}")


def pad_rows(array: HostArray, rows: int, filler: HostArray | int | None) -> HostArray:
    """Returns the array with ``rows`` rows: repeats its last row, or ``filler`` if it has none.

    Zeros might become NaN in a model, which a mask does not remove from a sum.
    """
    count = len(array)
    if count == rows:
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(filler)) if isinstance(filler, jax.Array) else filler
        new = jnp.asarray(pad_rows(np.asarray(jax.random.key_data(array)), rows, words))
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(array))
    source = np.asarray(array)
    result = np.empty((rows, *source.shape[1:]), source.dtype)
    result[:count] = source
    result[count:] = source[-1:] if count else filler
    return result


def copied(array: HostArray) -> HostArray:
    """Returns the array in memory of its own."""
    return array.copy() if isinstance(array, jax.Array) else np.array(array)
