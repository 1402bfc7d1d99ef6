"""How the batches of one iterable look, and how each of their arrays is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..core.flatten import flatten
from ..core.resolve import reach, resolve
from ..core.specs import Specs, target
from ..core.structure import PyTreeDef
from ..fitting import axis_problems, describe, shape_problems, spec_and_mesh
from ..paths import accessor, path_key
from .host_arrays import host_array
from .rows import cuts, next_size, row_parts, row_sharding, rows_by_process

_NAME = "shard_batches"


class Leaf(NamedTuple):
    """One leaf of a batch.

    Attributes:
      name: what the user would write to reach it.
      sharding: how it is laid out; None for what is handed on as it is.
      shape: its shape without rows; None for what is handed on.
      dtype: its type.
      has_rows: whether its first dimension is that of the batch.
    """

    name: str
    sharding: Sharding | None
    shape: tuple[int, ...] | None
    dtype: Any
    has_rows: bool

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}, as it is"
        sizes = (*(["rows"] if self.has_rows else []), *map(str, self.shape))
        return f"{self.name}: {self.dtype}[{', '.join(sizes)}]"


class BatchLayout:
    """What all batches have in common, taken from the first one.

    Attributes:
      treedef: their structure.
      leaves: their leaves.
      rows: how their rows are laid out, by the leaf that cuts them most.

    Raises:
      TypeError: leaves are no arrays.
      ValueError: specs do not fit, or no leaf has rows.
    """

    def __init__(self, batch: Any, specs: Specs, mesh: Mesh | None):
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(batch)
        names = [accessor("batch", tuple(map(path_key, path))) for path, _ in paths]
        values, wrong = _arrays(names, [leaf for _, leaf in paths])
        own = _specs(specs, self.treedef, values)
        _check_arrays([wrong[i] for i, spec in enumerate(own) if spec is not None and i in wrong])
        self.leaves = _leaves(names, values, own, mesh)
        cut = [leaf.sharding for leaf in self.leaves if leaf.has_rows and leaf.sharding is not None]
        if not cut:
            raise ValueError(
                f"{_NAME}: no array of the batch has rows: "
                + (", ".join(map(str, self.leaves)) or "it is empty")
                + ". Give at least one array with a leading dimension, and a spec for it."
            )
        self.rows = row_sharding(max(cut, key=row_parts))

    def arrays(self, batch: Any) -> list[Any]:
        """The leaves of a batch as host arrays; what is handed on as it is.

        Raises:
          TypeError: leaves are no arrays.
          ValueError: the batch differs from the first one in structure, shapes or dtypes.
        """
        treedef: PyTreeDef
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        if treedef != self.treedef:
            raise ValueError(_other_structure(self, batch))
        placed = [i for i, leaf in enumerate(self.leaves) if leaf.sharding is not None]
        found, wrong = _arrays([self.leaves[i].name for i in placed], [leaves[i] for i in placed])
        _check_arrays(list(wrong.values()))
        values = list(leaves)
        for i, value in zip(placed, found, strict=True):
            values[i] = value
        changed = [
            f"  {own} became {_show(own, value)}"
            for own, value in zip(self.leaves, values, strict=True)
            if own.shape is not None and _kind(own, value) != (own.shape, own.dtype)
        ]
        if changed:
            raise ValueError(
                f"{_NAME}: these leaves are not what they were in the first batch:\n"
                + "\n".join(changed)
                + "\nA training step would be compiled anew for each shape: pad them to one, or "
                "iterate over each by a shard_batches of its own."
            )
        return values

    def count(self, arrays: Sequence[Any]) -> int:
        """The number of rows of a batch.

        Raises:
          ValueError: leaves differ in it.
        """
        counts = {
            own.name: len(array)
            for own, array in zip(self.leaves, arrays, strict=True)
            if own.has_rows
        }
        if len(set(counts.values())) > 1:
            lines = "\n".join(f"  {name}: {count} rows" for name, count in counts.items())
            raise ValueError(
                f"{_NAME}: these leaves of one batch differ in their first dimension:\n{lines}\n"
                "Leave out what does not belong to rows, or give it the spec None, which hands "
                "it on as it is."
            )
        return next(iter(counts.values()))

    def check_size(self, size: int, processes: Sequence[int]) -> None:
        """Whether global batches of ``size`` rows can be laid out.

        Raises:
          ValueError: rows cannot be cut evenly, or leaves need different rows of a process.
        """
        own = [(x.name, x.sharding) for x in self.leaves if x.has_rows and x.sharding is not None]
        parts = int(np.lcm.reduce([row_parts(sharding) for _, sharding in own]))
        lines = [f"  {name} by {cuts(s)}" for name, s in own if size % row_parts(s)]
        if lines:
            good = next_size(size, parts)
            raise ValueError(
                f"{_NAME}: batches of {size} rows cannot be cut evenly:\n" + "\n".join(lines) + "\n"
                f"Load {good} rows, or pass batch_size={good}, with uneven='pad', to have each "
                "batch padded."
            )
        if len(processes) == 1:
            return
        held = rows_by_process(self.rows, size)
        others = [f"  {n}, cut by {cuts(s)}" for n, s in own if not _same_rows(s, size, held)]
        if others:
            raise ValueError(
                f"{_NAME}: a process would have to load other rows of these leaves than of those "
                f"that are cut by {cuts(self.rows)}:\n"
                + "\n".join(others)
                + "\nCut the first dimension of all leaves alike, and replicate in the step."
            )


def _arrays(names: Sequence[str], leaves: Sequence[Any]) -> tuple[list[Any], dict[int, str]]:
    """The leaves as arrays, and by place what is none."""
    values, wrong = list(leaves), {}
    for place, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        try:
            values[place] = host_array(leaf)
        except TypeError as error:
            wrong[place] = f"  {name}: {error}"
    return values, wrong


def _check_arrays(wrong: Sequence[str]) -> None:
    if wrong:
        raise TypeError(
            f"{_NAME}: these leaves are no arrays:\n" + "\n".join(wrong) + "\nLeave them out, or "
            "give them the spec None, which hands them on as they are."
        )


def _specs(specs: Specs, treedef: PyTreeDef, values: Sequence[Any]) -> list[Any]:
    """The spec of each leaf, as the user wrote it."""
    empty = jax.ShapeDtypeStruct((), np.bool_)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else empty for x in values
    ]
    skeleton = jax.tree_util.tree_unflatten(treedef, shapes)
    flat = flatten(skeleton)
    reached = reach(flat.structure, [target("batch", specs.tree, skeleton, flat.structure.root)])
    return resolve(reached, flat.objects, flat.leaves, lambda spec: spec).slots


def _leaves(
    names: Sequence[str], values: Sequence[Any], specs: Sequence[Any], mesh: Mesh | None
) -> tuple[Leaf, ...]:
    """Each leaf with its sharding."""
    leaves, faults = [], []
    for name, value, spec in zip(names, values, specs, strict=True):
        if spec is None:
            leaves.append(Leaf(name, None, None, None, has_rows=False))
            continue
        sharding, problems = _sharding(spec, mesh, value.shape)
        if problems:
            shape = tuple(value.shape)
            faults.append(f"  {name}, shape {shape}, {describe(spec)}: {'; '.join(problems)}")
        has_rows = value.ndim > 0
        leaves.append(Leaf(name, sharding, tuple(value.shape[1:]), value.dtype, has_rows))
    if faults:
        raise ValueError(f"{_NAME}: these specs do not fit:\n" + "\n".join(faults))
    return tuple(leaves)


def _sharding(spec: Any, mesh: Any, shape: Sequence[int]) -> tuple[Any, list[str]]:
    """The sharding of an array, and what is wrong with it apart from the number of rows."""
    own = spec_and_mesh(spec, mesh)
    if own is None:
        return spec, [] if isinstance(spec, Sharding) else ["give the Sharding without a layout"]
    kind = spec.memory_kind if isinstance(spec, NamedSharding) else None
    if not shape:  # a number belongs to all rows
        return NamedSharding(own[1], PartitionSpec(), memory_kind=kind), []
    problems = axis_problems(*own)
    if PartitionSpec.UNCONSTRAINED in own[0].partitions:
        problems.append("UNCONSTRAINED leaves open what has to be known; write None or an axis")
    if problems:
        return None, problems
    sharding = NamedSharding(own[1], own[0], memory_kind=kind)
    return sharding, shape_problems(*own, (row_parts(sharding), *shape[1:]))


def _kind(own: Leaf, value: Any) -> tuple[Any, Any]:
    shape = tuple(value.shape)
    is_same_rank = len(shape) == len(own.shape or ()) + own.has_rows
    return shape[int(own.has_rows) :] if is_same_rank else None, value.dtype


def _show(own: Leaf, value: Any) -> str:
    rest = tuple(map(str, value.shape))
    sizes = ("rows", *rest[1:]) if own.has_rows and rest else rest
    return f"{value.dtype}[{', '.join(sizes)}]"


def _other_structure(layout: BatchLayout, batch: Any) -> str:
    paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
    here = [accessor("batch", tuple(map(path_key, path))) for path, _ in paths]
    before = [leaf.name for leaf in layout.leaves]
    lines = [f"  {name}: new" for name in here if name not in before]
    lines += [f"  {name}: missing" for name in before if name not in here]
    lines = lines or [f"  {treedef}, before {layout.treedef}"]
    what = f"{_NAME}: the structure of this batch is not that of the first one:"
    return "\n".join([what, *lines])


def _same_rows(sharding: Sharding, size: int, held: dict[int, Any]) -> bool:
    own = rows_by_process(sharding, size)
    return own.keys() == held.keys() and all(np.array_equal(own[p], held[p]) for p in own)
