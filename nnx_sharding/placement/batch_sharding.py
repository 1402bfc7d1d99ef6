"""What the batches of one iterable have in common, and the sharding of each of their arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from ..core.targets import Specs
from ..core.treedefs import PyTreeDef
from ..diagnostics.differences import show
from ..errors import raise_listed
from ..specs.paths import accessor, path_key
from .place import shardings_for, trimmed
from .rows import Rows, next_size, row_axes, row_parts, row_sharding, rows_by_process

_NAME = "shard_batches"


class Leaf(NamedTuple):
    """One leaf of a batch."""

    name: str  # where it is, as Python code
    sharding: Any  # None if it is passed through
    kind: str  # dtype and shape of its array: float32[rows, 2]
    has_rows: bool  # whether its first dimension is the rows of the batch

    def __str__(self) -> str:
        return f"{self.name}: {self.kind if self.sharding else 'passed through'}"


def _kind(array: Any) -> str:
    sizes = ["rows", *map(str, array.shape[1:])] if array.ndim else []
    return f"{array.dtype}[{', '.join(sizes)}]"


class BatchSharding:
    """The structure and shardings of all batches, taken from the first one."""

    def __init__(self, batch: Any, specs: Specs, mesh: Mesh | None):
        self._treedef: Any
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(batch)
        names, leaves = _names(paths), [leaf for _, leaf in paths]
        arrays, wrong = _host_arrays(names, leaves, [True] * len(leaves))
        shardings = _shardings(self._treedef, arrays, specs, mesh)
        _check_arrays([wrong[i] for i, s in enumerate(shardings) if s is not None and i in wrong])
        self.leaves = [
            Leaf(name, sharding, _kind(array), sharding is not None and array.ndim > 0)
            for name, array, sharding in zip(names, arrays, shardings, strict=True)
        ]
        self._by_rows = [(leaf.name, leaf.sharding) for leaf in self.leaves if leaf.has_rows]
        if not self._by_rows:
            raise ValueError(
                f"{_NAME}: the batch has no array with rows: "
                + (", ".join(map(str, self.leaves)) or "it is empty")
                + ". Give at least one array with a leading dimension, and a spec for it."
            )
        # The sharding of the rows: that of the leaf with the most shards along them.
        self.rows = row_sharding(max((s for _, s in self._by_rows), key=row_parts))
        self.size = 0  # of a full global batch, once it is set
        self.held: dict[int, Rows] = {}  # the rows of such a batch that each process holds

    def arrays(self, batch: Any) -> list[Any]:
        """The leaves of a batch, which must be like the first one, as host arrays."""
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        if treedef != self._treedef:
            self._refuse_structure(batch)
        is_wanted = [leaf.sharding is not None for leaf in self.leaves]
        leaves, wrong = _host_arrays([leaf.name for leaf in self.leaves], leaves, is_wanted)
        _check_arrays([*wrong.values()])
        raise_listed(
            ValueError,
            f"{_NAME}: these leaves differ from those of the first batch:",
            [
                f"  {leaf} became {_kind(array)}"
                for leaf, array in zip(self.leaves, leaves, strict=True)
                if leaf.sharding is not None and _kind(array) != leaf.kind
            ],
            "A training step would be compiled for each shape: pad them to one shape, or use a "
            "separate shard_batches for each.",
        )
        return leaves

    def _refuse_structure(self, batch: Any) -> None:
        paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
        names, first = _names(paths), [leaf.name for leaf in self.leaves]
        lines = [f"  {name}: new" for name in names if name not in first]
        lines += [f"  {name}: missing" for name in first if name not in names]
        raise_listed(
            ValueError,
            f"{_NAME}: the structure of this batch differs from that of the first one:",
            lines or [f"  {treedef}, in the first batch {self._treedef}"],
        )

    def count(self, arrays: Sequence[Any]) -> int:
        """The number of rows of a batch, in which all leaves must agree."""
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

    def set_size(self, batch_size: int | None, counts: dict[int, int | None]) -> None:
        """Sets the size of a full batch; None for the least into which the loaded rows fit."""
        if batch_size is None:
            parts = row_parts(self.rows)
            shares = rows_by_process(self.rows, parts)
            batch_size = max(-(-(n or 0) * parts // len(shares[p])) for p, n in counts.items())
        self.size = size = batch_size
        lines = [f"  {name} by {row_axes(s)}" for name, s in self._by_rows if size % row_parts(s)]
        good = next_size(size, math.lcm(*(row_parts(s) for _, s in self._by_rows)))
        raise_listed(
            ValueError,
            f"{_NAME}: batches of {size} rows cannot be sharded evenly:",
            lines,
            f"Load {good} rows, or pass uneven='pad' with batch_size={good}, which pads each "
            "batch.",
        )
        self.held = rows_by_process(self.rows, size)
        raise_listed(
            ValueError,
            f"{_NAME}: a process would have to load different rows of these leaves than of those "
            f"with rows sharded by {row_axes(self.rows)}:",
            [
                f"  {name}, by {row_axes(sharding)}"
                for name, sharding in self._by_rows
                if len(counts) > 1 and not self._has_rows_of(sharding)
            ],
            "Shard the first dimension of all leaves alike, and replicate in the step.",
        )

    def _has_rows_of(self, sharding: Sharding) -> bool:
        held = rows_by_process(sharding, self.size)
        return held.keys() == self.held.keys() and all(
            np.array_equal(rows, self.held[process]) for process, rows in held.items()
        )

    def place(self, arrays: Sequence[Any], mask: Any = None) -> Any:
        """The global batch of this process's full arrays, with the global mask if there is one."""
        leaves, local = list(self.leaves), list(arrays)
        if mask is not None:
            leaves.append(Leaf("mask", self.rows, "bool[rows]", has_rows=True))
            local.append(mask[self.held[jax.process_index()]])
        places = [i for i, leaf in enumerate(leaves) if leaf.sharding is not None]
        shapes = [(self.size, *local[i].shape[1:]) if leaves[i].has_rows else () for i in places]
        placed = jax.make_array_from_process_local_data(
            [leaves[i].sharding for i in places], [local[i] for i in places], shapes
        )
        for i, array in zip(places, placed, strict=True):
            local[i] = array
        return self.unflatten(local) if mask is None else (self.unflatten(local[:-1]), local[-1])

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """A batch of these leaves."""
        return self._treedef.unflatten(leaves)


def _shardings(treedef: PyTreeDef, arrays: Sequence[Any], specs: Specs, mesh: Any) -> list[Any]:
    """The sharding of each leaf, with specs that fit all dimensions except the rows."""
    devices = [spec.num_devices for spec in specs.written if isinstance(spec, Sharding)]
    rows = math.lcm(*devices, 1 if mesh is None else mesh.size)  # divisible by any mesh axis
    abstract = [
        jax.ShapeDtypeStruct((rows, *x.shape[1:]) if x.ndim else (), x.dtype) for x in arrays
    ]

    def adapt(spec: Any, leaf: Any) -> Any:
        return spec if leaf.shape else trimmed(spec, leaf)  # a number is the same for all rows

    tree = treedef.unflatten(abstract)
    return shardings_for(tree, specs, mesh, _NAME, name="batch", adapt=adapt)


def _names(paths: Sequence[Any]) -> list[str]:
    return [accessor("batch", tuple(map(path_key, path))) for path, _ in paths]


def _check_arrays(wrong: Sequence[str]) -> None:
    remedy = "Leave them out, or give them the spec None, which passes them through."
    raise_listed(TypeError, f"{_NAME}: these leaves are not arrays:", wrong, remedy)


def _host_arrays(
    names: Sequence[str], leaves: Sequence[Any], is_wanted: Sequence[bool]
) -> tuple[list[Any], dict[int, str]]:
    """The leaves, converted to host arrays where wanted, and a line for each that cannot be."""
    arrays, wrong = list(leaves), {}
    for i, leaf in enumerate(leaves):
        if is_wanted[i]:
            try:
                arrays[i] = _host_array(leaf)
            except TypeError as error:
                arrays[i], wrong[i] = np.zeros((), np.bool_), f"  {names[i]}: {error}"
    return arrays, wrong


def _host_array(x: Any) -> Any:
    """An array that shares the memory of ``x`` where possible, or a TypeError that says why not."""
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        return np.asarray(x, jnp.result_type(type(x)))
    if isinstance(x, jax.Array):
        return x
    array = np.asarray(x if isinstance(x, np.ndarray | np.generic) else _converted(x))
    if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
        raise TypeError(f"an array of dtype {array.dtype}")
    return array


def _converted(x: Any) -> Any:
    """A foreign array, such as a tensor of PyTorch, as a NumPy array."""
    try:
        if hasattr(x, "__array__"):
            try:
                return np.asarray(x)
            except TypeError:
                if not hasattr(x, "__dlpack__"):
                    raise
        if hasattr(x, "__dlpack__"):
            return np.asarray(jax.dlpack.from_dlpack(x))  # supports bfloat16, unlike NumPy
    except Exception as error:  # of another library, which may raise anything
        raise TypeError(f"a {type(x).__name__} that gives no array: {error}") from error
    raise TypeError(f"{show(x)} of type {type(x).__name__}")


def padded(array: Any, rows: int, filler: Any) -> Any:
    """The array with ``rows`` rows: its last row, or ``filler`` if it has none, is repeated.

    Zeros might become NaN in a model, which a mask does not remove from a sum.
    """
    count = len(array)
    if count == rows:
        return array
    source = np.asarray(array)
    result = np.empty((rows, *source.shape[1:]), source.dtype)
    result[:count] = source
    result[count:] = source[-1:] if count else filler
    return result
