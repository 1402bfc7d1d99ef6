"""``restore``: a checkpoint into models, optimizers and arrays, each in its sharding."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.transfer import transfer
from ..errors import CheckpointError
from ..filters import to_predicate
from ..fitting import (
    axis_problems,
    describe,
    shape_problems,
    suggestion,
    unsummed,
)
from ..partition.apply import has_memory, rebuilt, sharding_of
from ..partition.constrain import assign
from .checksums import is_key
from .named import Name, Named, is_reference, is_storable, kind_of, named
from .stored import Entry, Stored, key_kind, load, read

_SUGGESTIONS = 40  # comparing each name with each takes too long for a model of thousands


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

    Each array is read straight into its sharding: each process reads its own parts, whatever
    mesh, and however many processes, wrote it. The checkpoint may be one of :func:`save`, or one
    that Orbax wrote of an ``nnx.state``. With ours, checksums are compared.

    Args:
      path: the directory of the checkpoint, or of one step of several.
      tree: what is filled, with arrays or abstract (:func:`~nnx_sharding.partition.abstract_init`).
        Modules and Variables are changed in place, all of them or, after an error, none. What is
        NumPy or a number stays so.
      sharding: where arrays go: all that
        :func:`~nnx_sharding.partition.with_sharding_constraint` takes. None is the sharding that
        the array in ``tree`` has; without one it goes to the default device.
      mesh: what partition specs refer to; without ``sharding``, the mesh on which the specs that
        the arrays in ``tree`` have are used.
      only: an NNX filter for what is restored, such as ``nnx.Param``. The rest is left as it is,
        and so is what the checkpoint has besides.
      cast: whether arrays of another dtype are converted to that in ``tree``, among floating
        point, among integer and among complex types. Integers are never wrapped.

    Returns:
      ``tree``, with arrays outside of modules and Variables in new containers.

    Raises:
      NoCheckpointError: there is none.
      CheckpointError: it cannot be read, is damaged, or does not fit: paths that are missing on
        either side, other shapes and dtypes, integers that ``cast`` would wrap, all in one
        message.
      TypeError: something in ``tree``, or in ``sharding``, is of the wrong kind.
      ValueError: no sharding for some arrays, or none with devices; ``only`` matches nothing.
      TraceContextError: an object of ``tree`` belongs to another trace.

    Example:
      >>> import jax, tempfile
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import StateSharding
      >>> from nnx_sharding.partition import abstract_init
      >>> from nnx_sharding.checkpoint import restore, save
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> make = lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0))
      >>> save(folder, make())
      >>> mesh = jax.make_mesh((jax.device_count(),), ("model",))
      >>> rules = StateSharding({nnx.PathContains("kernel"): P("model"), ...: P()})
      >>> model = restore(folder, abstract_init(make, rules, mesh))
      >>> model.kernel.sharding.spec == P("model")
      True
    """
    flat = flatten(tree)
    if not _compat.trace_is_clean():
        raise ValueError("restore: a checkpoint cannot be read inside of a traced function.")
    keep = to_predicate(only)
    everything = list(named(flat))
    found = [each for each in everything if keep(each.place, each.subject)]
    if everything and not found:
        known = ", ".join(each.path or "the root" for each in everything[:_SUGGESTIONS])
        more = ", …" if len(everything) > _SUGGESTIONS else ""
        raise ValueError(f"restore: only={only!r} matches none of the arrays: {known}{more}.")
    _check_targets(flat, found)
    goals = _shardings(tree, flat, found, sharding, mesh)
    stored = read("restore", path)
    sources = _sources(stored, found)
    _check_fit(stored, flat, found, sources, is_part=only is not ..., cast=cast)
    # On the host: JAX may shorten integers while it reads them.
    narrowed = {e.slot: e for e in found if _may_wrap(stored.arrays[sources[e.slot]], flat, e)}
    wanted = {
        sources[slot]: goal if _is_global(goal) and slot not in narrowed else None
        for slot, goal in goals.items()
    }
    arrays = load("restore", stored, wanted)
    _check_range(flat, {slot: (e, arrays[sources[slot]]) for slot, e in narrowed.items()})
    leaves, references = list(flat.leaves), []
    for each in found:
        leaf = flat.leaves[each.slot]
        value = _like(arrays[sources[each.slot]], leaf, goals[each.slot])
        if is_reference(leaf):
            references.append((leaf, value))
        else:
            leaves[each.slot] = value
    for reference, value in references:
        reference[...] = value
    return rebuilt(flat, leaves, "restore")


def _check_targets(flat: Flat, found: Sequence[Named]) -> None:
    """Refuses what cannot be filled, before anything is read."""
    kinds = [
        f"  {each.path or 'the root'}: {kind_of(flat.leaves[each.slot])}"
        for each in found
        if not is_storable(flat.leaves[each.slot])
    ]
    if kinds:
        raise TypeError("restore: these are no arrays or numbers:\n" + "\n".join(kinds))
    slots = {each.slot for each in found}
    owners = (
        x for x, own in zip(flat.objects, flat.structure.slots, strict=True) if slots & set(own)
    )
    stale = sorted({type(x).__name__ for x in owners if not _compat.can_update(x)})
    if stale:
        raise _compat.TraceContextError(
            f"restore cannot change objects of another trace: {', '.join(stale)}."
        )


def _shardings(
    tree: Any, flat: Flat, found: Sequence[Named], sharding: Any, mesh: Any
) -> dict[int, Any]:
    """The sharding of each slot; None for the default device, and for what is no JAX array."""
    given = None
    if sharding is not None:
        given = assign(tree, flat, sharding, mesh=mesh, strict=False, caller="restore")
    goals: dict[int, Any] = {}
    faults = []
    for each in found:
        leaf = flat.leaves[each.slot]
        if isinstance(leaf, _ON_HOST):
            goals[each.slot] = None
            continue
        goal = _present(leaf) if given is None else given[each.slot].sharding or _present(leaf)
        if isinstance(goal, NamedSharding):
            onto = mesh if given is None and mesh is not None else goal.mesh
            problems = _problems(goal.spec, onto, leaf.shape)
            what = f"{each.path or 'the root'}, shape {tuple(leaf.shape)}, {describe(goal)}"
            faults += [f"  {what}: {problem}" for problem in problems]
            if not problems and onto != goal.mesh:
                kind = goal.memory_kind if has_memory(goal) else None
                goal = NamedSharding(onto, goal.spec, memory_kind=kind)
        goals[each.slot] = goal
    if faults:
        raise ValueError("restore: these shardings cannot be used:\n" + "\n".join(faults))
    return goals


# What stays as it is wherever JAX arrays go.
_ON_HOST = (np.ndarray, np.generic, bool, int, float, complex)


def _present(leaf: Any) -> Any:
    """The sharding of an array; None where it is on the default device just because."""
    is_free = isinstance(leaf, jax.Array) and not is_reference(leaf) and not leaf.committed
    found = None if is_free else sharding_of(leaf)
    return found.sharding if isinstance(found, Format) else found


def _problems(spec: Any, mesh: Any, shape: Sequence[int]) -> list[str]:
    if isinstance(mesh, AbstractMesh):
        return ["the mesh is abstract, without devices; give a mesh"]
    return axis_problems(spec, mesh) or shape_problems(spec, mesh, shape)


def _sources(stored: Stored, found: Sequence[Named]) -> dict[int, Name]:
    """For each slot the name under which the checkpoint may have it.

    That of ``nnx.state``, or that of ``nnx.to_pure_dict``, which leaves the Variables out.
    """
    return {
        each.slot: each.plain
        if each.name not in stored.arrays and each.plain in stored.arrays
        else each.name
        for each in found
    }


def _check_fit(
    stored: Stored,
    flat: Flat,
    found: Sequence[Named],
    sources: Mapping[int, Name],
    *,
    is_part: bool,
    cast: bool,
) -> None:
    """Compares what the checkpoint holds with what is to be filled.

    Raises:
      CheckpointError: they differ.
    """
    missing = {e.path: flat.leaves[e.slot] for e in found if sources[e.slot] not in stored.arrays}
    used = set(sources.values())
    unknown = [stored.shown(name) for name in stored.arrays if name not in used]
    shapes, dtypes = [], []
    for each in found:
        entry = stored.arrays.get(sources[each.slot])
        if entry is None:
            continue
        there, here = _types(entry, flat.leaves[each.slot])
        line = f"  {each.path or 'the root'}: "
        if there[0] != here[0]:
            shapes.append(f"{line}{there[0]} in the checkpoint, {here[0]} in the model")
        elif not _is_same_dtype(there[1], here[1], cast):
            dtypes.append(
                f"{line}{there[1]} in the checkpoint, {_dtype_name(here[1])} in the model"
            )
    may_suggest = len(missing) + len(unknown) < _SUGGESTIONS
    near = suggestion if may_suggest else lambda name, names: ""
    problems = {
        "Missing in the checkpoint": [
            f"  {path or 'the root'}, shape {np.shape(leaf)}{near(path, unknown)}"
            for path, leaf in missing.items()
        ],
        "Not in the model": []
        if is_part
        else [f"  {path or 'the root'}{near(path, missing)}" for path in unknown],
        "Of another shape": shapes,
        "Of another dtype (cast=True converts among floats and among integers)": dtypes,
    }
    listed = ["\n".join([f"{kind}:", *lines]) for kind, lines in problems.items() if lines]
    if listed:
        raise CheckpointError(
            "\n".join([f"restore: {stored.folder} does not fit the model.", *listed])
        )


def _types(entry: Entry, leaf: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Shape and dtype of one array in the checkpoint and in the model."""
    if isinstance(leaf, _NUMBERS):
        return (entry.shape, entry.dtype), ((), type(leaf))
    shape, dtype = tuple(leaf.shape), leaf.dtype
    if is_key(leaf) and not is_key(entry):  # Orbax does not tell that they are keys
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = words.shape, words.dtype
    return (entry.shape, entry.dtype), (shape, dtype)


_NUMBERS = (bool, int, float, complex)
_KINDS = (jnp.floating, jnp.integer, jnp.complexfloating)


def _is_same_dtype(there: Any, here: Any, cast: bool) -> bool:
    if isinstance(here, type):  # a dtype would be equal to float
        kind = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
        return bool(np.issubdtype(there, kind[here]))
    if there == here:
        return True
    return cast and any(jnp.issubdtype(there, k) and jnp.issubdtype(here, k) for k in _KINDS)


_range_of: Any = jnp.iinfo


def _may_wrap(entry: Entry, flat: Flat, each: Named) -> bool:
    """Whether integers of the checkpoint may be outside of the range of those in the model."""
    there, leaf = entry.dtype, flat.leaves[each.slot]
    if isinstance(leaf, _NUMBERS) or not all(
        jnp.issubdtype(dtype, jnp.integer) for dtype in (there, leaf.dtype)
    ):
        return False
    old, new = map(_range_of, (there, leaf.dtype))
    return bool(old.min < new.min or old.max > new.max)


def _check_range(flat: Flat, arrays: Mapping[int, tuple[Named, Any]]) -> None:
    """Refuses integers that a conversion would wrap.

    Raises:
      CheckpointError: there are some; all arrays that have them are named.
    """
    lines = []
    for slot, (each, value) in arrays.items():
        if np.size(value):
            dtype = flat.leaves[slot].dtype
            low, high, info = int(np.min(value)), int(np.max(value)), _range_of(dtype)
            if low < info.min or high > info.max:
                lines.append(f"  {each.path or 'the root'}: {low} to {high}, {dtype}")
    if lines:
        raise CheckpointError(
            "restore: cast=True would wrap these integers, of this range in the checkpoint and of "
            "this dtype in the model:\n" + "\n".join(lines) + "\nUse a larger dtype in the model."
        )


def _dtype_name(dtype: Any) -> str:
    return dtype.__name__ if isinstance(dtype, type) else str(dtype)


def _is_global(goal: Any) -> bool:
    """Whether an array is laid out while it is read; one of this process alone is not."""
    return goal is not None and not (jax.process_count() > 1 and goal.is_fully_addressable)


def _like(value: Any, leaf: Any, goal: Any) -> Any:
    """What was read as what the model has at its place."""
    if isinstance(leaf, _NUMBERS):
        return type(leaf)(np.asarray(value).item())
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(value)
    if isinstance(leaf, np.ndarray):
        return np.array(value, leaf.dtype)
    if is_key(leaf):
        words = _placed(value, value.dtype, goal)
        return jax.random.wrap_key_data(words, impl=key_kind(leaf.dtype))
    return _placed(value, leaf.dtype, goal)


def _placed(value: Any, dtype: Any, goal: Any) -> jax.Array:
    if not isinstance(value, jax.Array):
        host = np.asarray(value, dtype)
        return jnp.asarray(host) if goal is None else transfer([host], [goal])[0]
    if value.dtype == dtype:
        placed: jax.Array = value if unsummed(goal) is goal else transfer([value], [goal])[0]
        return placed
    converted: jax.Array = _converted(dtype, goal)(value)
    return converted


@functools.lru_cache(maxsize=64)
def _converted(dtype: Any, goal: Any) -> Any:
    """A function that converts arrays of one sharding, which compiles once for each shape."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=goal)
