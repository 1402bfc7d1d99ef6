"""``load_safetensors``: models from Hugging Face files, each array in its sharding."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from .. import _compat
from ..core.flatten import Flat, flatten
from ..core.resharding import rebuilt, sharding_of
from ..core.transfer import transfer
from ..diagnostics.progress import progress
from ..errors import CheckpointError, by_kind, raise_listed
from ..specs.filters import to_predicate
from ..specs.fitting import suggestion, unsummed
from .name_rules import Rule, Rules, read_rules
from .names import NamedArray, is_reference, kind_of, named_arrays
from .tensor_files import (
    NAMES,
    Region,
    StoredTensor,
    empty,
    read_region,
    stored_tensors,
)
from .tensor_rules import Placement, gaps

_NAME = "load_safetensors"

# What files of weights contain: all but the state of random streams.
WEIGHTS = nnx.Not(nnx.RngState)

_CHUNK = 2**24  # bytes
_SUGGESTIONS = 40  # comparing all pairs of names takes too long for thousands of arrays

Parts: TypeAlias = list[tuple[Placement, StoredTensor]]


@_compat.api_boundary
def load_safetensors(
    path: str | os.PathLike[str],
    model: Any,
    rules: Mapping[str, Rule],
    *,
    cast: bool = False,
    only: Any = WEIGHTS,
) -> Any:
    r"""Reads a model from safetensors files, such as those of Hugging Face.

    Each process reads the bytes of its own shards and no others, directly into the shardings of
    the model.

    Args:
      path: a file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.
      model: what to fill, with arrays or abstract (:func:`~nnx_sharding.partition.abstract_init`).
        Modules and Variables are changed in place: all of them or, after an error, none.
      rules: where each tensor belongs: regular expressions for complete names of tensors, each with
        the path of an array, a :class:`Tensor`, a list of these, or None for tensors to ignore. The
        first that matches applies. Every tensor needs a rule.
      cast: whether to convert floating-point tensors of another dtype to that of the model.
      only: an NNX filter for what to load. The rest of the model is not changed, and tensors
        that belong there are ignored. The default is all but the state of random streams.

    Returns:
      ``model``.

    Raises:
      NoCheckpointError: the file does not exist.
      CheckpointError: a file is damaged, or does not fit: arrays without tensors, tensors without
        rules or arrays, different shapes and dtypes, all in one message.
      TypeError: what ``only`` selects is not only arrays, or a rule has a wrong type.
      ValueError: a rule is not a regular expression or names a group that it does not have,
        ``only`` selects nothing, or a sharding has an abstract mesh.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import Tensor, load_safetensors, save_safetensors
      >>> rules = {
      ...     r"(\w+)\.weight": Tensor("{0}/kernel", "out in -> in out"),
      ...     r"(\w+)\.bias": "{0}/bias",
      ... }
      >>> model = nnx.Dict(up=nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
      >>> folder = tempfile.mkdtemp()
      >>> save_safetensors(folder, model, rules)
      >>> other = nnx.eval_shape(lambda: nnx.Dict(up=nnx.Linear(4, 8, rngs=nnx.Rngs(0))))
      >>> _ = load_safetensors(folder, other, rules)
      >>> np.testing.assert_array_equal(other.up.kernel, model.up.kernel)
    """
    flat = flatten(model)
    everything, selected = select(_NAME, flat, only)
    matchers = read_rules(_NAME, rules)
    tensors = stored_tensors(_NAME, path)
    parts = _matched(path, tensors, matchers, everything, selected, cast)
    leaves, references = list(flat.leaves), []
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context(file.open("rb")) for file in _files(parts)}
        advance = stack.enter_context(progress(_NAME, len(selected)))
        for array_path, array in selected.items():
            value = _loaded(array.leaf, parts[array_path], files)
            if is_reference(array.leaf):
                references.append((array.leaf, value))
            else:
                leaves[array.slot] = value
            advance(array_path)
    loaded = rebuilt(flat, leaves, _NAME)
    for reference, value in references:
        reference[...] = value
    return loaded


def select(
    caller: str, flat: Flat, only: Any
) -> tuple[dict[str, NamedArray], dict[str, NamedArray]]:
    """The arrays of a model by path, and those that a filter selects."""
    keep = to_predicate(only)
    everything = {array.path: array for array in named_arrays(flat)}
    selected = {p: x for p, x in everything.items() if keep(x.variable_path, x.variable)}
    if not selected:
        raise ValueError(f"{caller}: only={only!r} matches none of the arrays of the model.")
    wrong = [
        f"  {p}: {kind_of(x.leaf)}"
        for p, x in selected.items()
        if getattr(getattr(x.leaf, "dtype", None), "name", None) not in NAMES
    ]
    head = f"{caller}: these are not arrays of a dtype that safetensors supports:"
    raise_listed(TypeError, head, wrong, "Leave them out by only=...")
    meshes = {p: getattr(sharding_of(x.leaf), "mesh", None) for p, x in selected.items()}
    raise_listed(
        ValueError,
        f"{caller}: the meshes of these arrays are abstract, without devices:",
        [f"  {p}" for p, mesh in meshes.items() if isinstance(mesh, AbstractMesh)],
    )
    return everything, selected


def _matched(
    path: Any,
    tensors: Mapping[str, StoredTensor],
    rules: Rules,
    everything: Mapping[str, NamedArray],
    selected: Mapping[str, NamedArray],
    cast: bool,
) -> dict[str, Parts]:
    """The tensors of each array, which have to fill it; an error lists all that does not fit."""
    parts: dict[str, Parts] = {array_path: [] for array_path in selected}
    unknown, shapes, dtypes = [], [], []
    misfits = set()
    near = suggestion if len(tensors) < _SUGGESTIONS else lambda name, names: ""
    for name, tensor in tensors.items():
        targets = rules.targets(name)
        if targets is None:
            unknown.append(f"  {name}: no rule matches")
        for rule, array_path, groups in targets or ():
            if array_path not in everything:
                unknown.append(f"  {name}: no array {array_path}{near(array_path, everything)}")
            if array_path not in selected:
                continue
            leaf = selected[array_path].leaf
            where = f"{array_path}, shape {leaf.shape}"
            try:
                placement = rule.place(name, groups, leaf.shape)
            except ValueError as error:
                misfits.add(array_path)
                shapes.append(f"  {name}, shape {tensor.shape}: {where}: {error}")
                continue
            parts[array_path].append((placement, tensor))
            if placement.tensor_shape != tensor.shape:
                wanted = placement.tensor_shape
                shapes.append(f"  {name}, shape {tensor.shape}: {where} needs {wanted}")
            elif not _is_readable(tensor.dtype, leaf.dtype, cast):
                dtypes.append(f"  {name}: {tensor.dtype}, {array_path}: {leaf.dtype}")
    missing = [
        f"  {array_path}, shape {selected[array_path].leaf.shape}{gap}"
        for array_path, found in parts.items()
        if found or array_path not in misfits
        for gap in gaps(selected[array_path].leaf.shape, [placement for placement, _ in found])
    ]
    problems = {
        "Arrays without a tensor": missing,
        "Tensors without an array": unknown,
        "Of another shape": shapes,
        "Of another dtype (cast=True converts among floating-point types)": dtypes,
    }
    head = f"{_NAME}: {os.fspath(path)} does not fit the model."
    raise_listed(CheckpointError, head, by_kind(problems))
    return parts


def _is_readable(there: Any, here: Any, cast: bool) -> bool:
    floats = jnp.issubdtype(there, jnp.floating) and jnp.issubdtype(here, jnp.floating)
    return bool(there == here or (cast and floats))


def _files(parts: Mapping[str, Parts]) -> set[Path]:
    return {tensor.file for found in parts.values() for _, tensor in found}


def _loaded(leaf: Any, parts: Parts, files: Mapping[Path, BinaryIO]) -> Any:
    """The array that a leaf becomes, in its sharding."""

    @functools.cache  # devices may hold the same shard
    def read_once(bounds: Region) -> Any:
        return _read(leaf, parts, files, bounds)

    def read(index: Any) -> Any:
        pairs = zip(index, leaf.shape, strict=True)
        return read_once(tuple(part.indices(size)[:2] for part, size in pairs))

    everything = (slice(None),) * len(leaf.shape)
    if isinstance(leaf, np.ndarray):
        return read(everything)
    is_free = isinstance(leaf, jax.Array) and not is_reference(leaf) and not leaf.committed
    sharding = None if is_free else sharding_of(leaf)
    if sharding is None:
        return jnp.asarray(read(everything))
    array = jax.make_array_from_callback(leaf.shape, unsummed(sharding), read)
    # Otherwise what is read for the next array would take memory simultaneously.
    return transfer([array], [sharding])[0].block_until_ready()


def _read(leaf: Any, parts: Parts, files: Mapping[Path, BinaryIO], bounds: Region) -> Any:
    """The values of a region of an array."""
    starts = [first for first, _ in bounds]
    shape = [last - first for first, last in bounds]
    result = None
    for placement, tensor in parts:
        is_plain = placement.left == placement.right and tensor.dtype == leaf.dtype
        for part in [bounds] if is_plain else _chunks(bounds, leaf.dtype.itemsize):
            for piece in placement.pieces(part):
                box = read_region(files[tensor.file], tensor, placement.tensor_axes, piece.tensor)
                data = placement.to_array(box)
                if is_plain and list(data.shape) == shape:
                    return data
                if result is None:
                    result = empty(shape, leaf.dtype)
                moved = zip(piece.array, starts, strict=True)
                result[tuple(slice(s.start - first, s.stop - first) for s, first in moved)] = data
    return empty(shape, leaf.dtype) if result is None else result


def _chunks(bounds: Region, itemsize: int) -> Iterator[Region]:
    """A region in parts, so that converting or transposing takes little extra memory."""
    lengths = [last - first for first, last in bounds]
    size = math.prod(lengths) * itemsize
    if size <= _CHUNK:
        yield bounds
        return
    longest = lengths.index(max(lengths))
    first, last = bounds[longest]
    step = max(1, lengths[longest] * _CHUNK // size)
    for start in range(first, last, step):
        yield (*bounds[:longest], (start, min(start + step, last)), *bounds[longest + 1 :])
