"""``restore``: a checkpoint into models, optimizers and arrays, each in its sharding."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .. import _compat
from ..apply import other_memory, rebuilt, sharding_of
from ..core.flatten import Flat, flatten
from ..core.transfer import transfer
from ..errors import CheckpointError, raise_listed
from ..filters import to_predicate
from ..fitting import fit_sharding, suggestion, unsummed
from ..partition.constrain import assign
from .names import Name, NamedArray, is_key, is_reference, is_storable, kind_of, named_arrays
from .read import Stored, key_kind, key_words, load, read

_SUGGESTIONS = 40  # comparing each name with each takes too long for a model of thousands
_NUMBERS = (bool, int, float, complex)
_NUMBER_KINDS = {"i": int, "f": float, "c": complex}
_range_of: Any = jnp.iinfo
_ON_HOST = (np.ndarray, np.generic, *_NUMBERS)  # these stay what they are


@_compat.api_boundary
def restore(
    path: str | os.PathLike[str],
    tree: Any,
    sharding: Any = None,
    mesh: Mesh | None = None,
    *,
    only: Any = ...,
    cast: bool = False,
) -> Any:
    """Reads a checkpoint into a model, an optimizer or any pytree of them and of arrays.

    Each array is read directly into its sharding: each process reads its own shards, whatever mesh
    and number of processes wrote it. The checkpoint may be one of :func:`save`, whose checksums are
    compared, or one that Orbax wrote of an ``nnx.state``.

    Args:
      path: the directory of the checkpoint, or of one step of several.
      tree: what to fill, with arrays or abstract (:func:`~nnx_sharding.partition.abstract_init`).
        Modules and Variables are changed in place: all of them or, after an error, none. NumPy
        arrays and numbers remain NumPy arrays and numbers.
      sharding: where to place arrays: anything that
        :func:`~nnx_sharding.partition.with_sharding_constraint` takes. None is the sharding of the
        array in ``tree``; an array without one goes to the default device.
      mesh: the mesh of partition specs; without ``sharding``, the mesh for the specs of the arrays
        in ``tree``.
      only: an NNX filter for what to restore, such as ``nnx.Param``. The rest of ``tree`` is left
        as it is, and the rest of the checkpoint is ignored.
      cast: whether to convert arrays of another dtype to that in ``tree``, among floating point,
        among integer and among complex types. Integers never wrap.

    Returns:
      ``tree``, with arrays outside of modules and Variables in new containers.

    Raises:
      NoCheckpointError: there is no checkpoint.
      CheckpointError: it cannot be read, is damaged, or does not fit: paths that are missing on
        either side, other shapes and dtypes, integers that ``cast`` would wrap, all in one
        message.
      TypeError: ``tree`` or ``sharding`` contains something of the wrong type.
      ValueError: arrays have no sharding, or none with devices; ``only`` matches nothing.
      TraceContextError: an object of ``tree`` belongs to another trace.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.checkpoint import restore, save
      >>> from nnx_sharding.partition import make_mesh
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> save(folder, nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
      >>> model = nnx.eval_shape(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
      >>> restore(folder, model, P("model"), make_mesh({"model": -1})).kernel.sharding.spec
      P('model', None)
    """
    flat = flatten(tree)
    if not _compat.trace_is_clean():
        raise ValueError("restore: a checkpoint cannot be read inside of a traced function.")
    arrays = _selected(named_arrays(flat), only)
    shardings = _shardings(tree, flat, arrays, sharding, mesh)
    stored = read("restore", path)
    targets = []
    for array in arrays:
        is_plain = array.name not in stored.entries and array.plain_name in stored.entries
        name = array.plain_name if is_plain else array.name
        targets.append(Target(array, name, shardings[array.slot]))
    _check_fit(stored, targets, is_part=only is not ..., cast=cast)
    # Integers that may wrap are read to the host: JAX may shorten them while it reads them.
    narrowed = [target for target in targets if _may_wrap(stored, target)]
    wanted = {t.name: t.sharding if _is_global(t.sharding) else None for t in targets}
    values = load("restore", stored, wanted | {target.name: None for target in narrowed})
    _check_range(narrowed, values)
    leaves, references = list(flat.leaves), []
    for array, name, array_sharding in targets:
        value = _like(values[name], array.leaf, array_sharding)
        if is_reference(array.leaf):
            references.append((array.leaf, value))
        else:
            leaves[array.slot] = value
    restored = rebuilt(flat, leaves, "restore")
    for reference, value in references:
        reference[...] = value
    return restored


class Target(NamedTuple):
    """One array to restore, its name in the checkpoint, and its sharding or None."""

    array: NamedArray
    name: Name
    sharding: Any


def _selected(arrays: Sequence[NamedArray], only: Any) -> list[NamedArray]:
    """The arrays that a filter selects, which all can be restored."""
    keep = to_predicate(only)
    selected = [array for array in arrays if keep(array.variable_path, array.variable)]
    if arrays and not selected:
        paths = ", ".join(array.path for array in arrays[:_SUGGESTIONS])
        more = ", …" if len(arrays) > _SUGGESTIONS else ""
        raise ValueError(f"restore: only={only!r} matches none of the arrays: {paths}{more}.")
    wrong = [f"  {x.path}: {kind_of(x.leaf)}" for x in selected if not is_storable(x.leaf)]
    raise_listed(TypeError, "restore: these are not arrays or numbers:", wrong)
    return selected


def _shardings(
    tree: Any, flat: Flat, arrays: Sequence[NamedArray], sharding: Any, mesh: Any
) -> dict[int, Any]:
    """The sharding of each slot; None for the default device, and for what stays on the host."""
    declared: list[Any] = [None] * len(flat.leaves)
    if sharding is not None:
        assigned = assign(tree, flat, sharding, mesh=mesh, strict=False, caller="restore")
        declared = [assignment.sharding for assignment in assigned]
    result: dict[int, Any] = {}
    problems = []
    for slot, leaf, *_, path, _, _ in arrays:
        target = None if isinstance(leaf, _ON_HOST) else declared[slot] or _present(leaf)
        if isinstance(target, NamedSharding):
            onto = target.mesh if sharding is not None or mesh is None else mesh
            fit = fit_sharding(target.spec, onto, leaf.shape)
            if isinstance(onto, AbstractMesh):
                fit = fit.refuse("the mesh is abstract, without devices; give a mesh")
            if fit.problems:
                problems.append(fit.line(path))
            elif onto != target.mesh:
                target = NamedSharding(onto, target.spec, memory_kind=other_memory(target))
        result[slot] = target
    raise_listed(ValueError, "restore: these shardings cannot be used:", problems)
    return result


def _present(leaf: Any) -> Any:
    """The sharding of an array; None if it is uncommitted."""
    is_free = isinstance(leaf, jax.Array) and not is_reference(leaf) and not leaf.committed
    present = None if is_free else sharding_of(leaf)
    return present.sharding if isinstance(present, Format) else present


def _check_fit(stored: Stored, targets: Sequence[Target], *, is_part: bool, cast: bool) -> None:
    """Raises an error if the arrays of the checkpoint differ from those to restore."""
    missing = {t.array.path: t.array.leaf for t in targets if t.name not in stored.entries}
    used = {target.name for target in targets}
    unknown = [
        entry.array.path or "the root" for name, entry in stored.entries.items() if name not in used
    ]
    shapes, dtypes = [], []
    for array, name, _ in targets:
        if name not in stored.entries:
            continue
        there = stored.entries[name].array
        shape, dtype = _type_of(array.leaf, is_stored_as_key=is_key(there))
        line = f"  {array.path}: "
        if there.shape != shape:
            shapes.append(f"{line}{there.shape} in the checkpoint, {shape} in the model")
        elif not _is_same_dtype(there.dtype, dtype, cast):
            text = dtype.__name__ if isinstance(dtype, type) else dtype
            dtypes.append(f"{line}{there.dtype} in the checkpoint, {text} in the model")
    may_suggest = len(missing) + len(unknown) < _SUGGESTIONS
    near = suggestion if may_suggest else lambda name, names: ""
    problems = {
        "Missing in the checkpoint": [
            f"  {path}, shape {np.shape(leaf)}{near(path, unknown)}"
            for path, leaf in missing.items()
        ],
        "Not in the model": []
        if is_part
        else [f"  {path}{near(path, missing)}" for path in unknown],
        "Of another shape": shapes,
        "Of another dtype (cast=True converts among floats and among integers)": dtypes,
    }
    listed = ["\n".join([f"{kind}:", *lines]) for kind, lines in problems.items() if lines]
    raise_listed(CheckpointError, f"restore: {stored.folder} does not fit the model.", listed)


def _type_of(leaf: Any, *, is_stored_as_key: bool) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype that an array should have in the checkpoint; the type of a number."""
    if isinstance(leaf, _NUMBERS):
        return (), type(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.weak_type:  # it was a number
        return tuple(leaf.shape), _NUMBER_KINDS.get(leaf.dtype.kind, leaf.dtype)
    if is_key(leaf) and not is_stored_as_key:  # Orbax does not record that they are keys
        leaf = key_words(leaf)
    return tuple(leaf.shape), leaf.dtype


def _is_same_dtype(there: Any, here: Any, cast: bool) -> bool:
    if isinstance(here, type):  # a dtype would be equal to float
        kind = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
        return bool(np.issubdtype(there, kind[here]))
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    return bool(there == here) or (
        cast and any(jnp.issubdtype(there, k) and jnp.issubdtype(here, k) for k in kinds)
    )


def _may_wrap(stored: Stored, target: Target) -> bool:
    """Whether integers of the checkpoint may be out of the range of those in the model."""
    there, leaf = stored.entries[target.name].array.dtype, target.array.leaf
    if isinstance(leaf, _NUMBERS):
        return False
    if not all(jnp.issubdtype(dtype, jnp.integer) for dtype in (there, leaf.dtype)):
        return False
    old, new = _range_of(there), _range_of(leaf.dtype)
    return bool(old.min < new.min or old.max > new.max)


def _check_range(narrowed: Sequence[Target], values: Mapping[Name, Any]) -> None:
    """Raises an error if a conversion would wrap integers."""
    lines = []
    for array, name, _ in narrowed:
        if np.size(values[name]):
            dtype = array.leaf.dtype
            low, high, info = int(np.min(values[name])), int(np.max(values[name])), _range_of(dtype)
            if low < info.min or high > info.max:
                lines.append(f"  {array.path}: {low} to {high}, {dtype}")
    raise_listed(
        CheckpointError,
        "restore: cast=True would wrap these integers, of this range in the checkpoint and of "
        "this dtype in the model:",
        lines,
        "Use a larger dtype in the model.",
    )


def _is_global(sharding: Any) -> bool:
    """Whether an array is sharded while it is read; one of this process alone is not."""
    return sharding is not None and not (jax.process_count() > 1 and sharding.is_fully_addressable)


def _like(value: Any, leaf: Any, sharding: Any) -> Any:
    """What was read, as the model has it."""
    if isinstance(leaf, _NUMBERS):
        return type(leaf)(np.asarray(value).item())
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(value)
    if isinstance(leaf, np.ndarray):
        return np.array(value, leaf.dtype)
    if is_key(leaf):
        words = _placed(value, value.dtype, sharding)
        return jax.random.wrap_key_data(words, impl=key_kind(leaf.dtype))
    return _placed(value, leaf.dtype, sharding)


def _placed(value: Any, dtype: Any, sharding: Any) -> Any:
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        return jnp.asarray(host) if sharding is None else transfer([host], [sharding])[0]
    if value.dtype == dtype:
        return value if unsummed(sharding) is sharding else transfer([value], [sharding])[0]
    return _conversion(dtype, sharding)(value)


@functools.lru_cache(maxsize=64)
def _conversion(dtype: Any, sharding: Any) -> Any:
    """A function that converts arrays of one sharding, which compiles once for each shape."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)
