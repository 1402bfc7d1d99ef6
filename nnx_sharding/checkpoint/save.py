"""``save``: models, optimizers and arrays to a checkpoint of Orbax."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from jax.experimental import multihost_utils

from .. import _compat
from ..core.flatten import flatten
from ..core.transfer import transfer
from ..errors import CheckpointError, raise_listed
from ..fitting import unsummed
from .checksums import checksums
from .folder import MANIFEST, as_folder, beside, first_line, holds_checkpoint
from .names import NamedArray, is_key, is_reference, is_storable, kind_of, named_arrays


@_compat.api_boundary
def save(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Writes a model, an optimizer or any pytree of them and of arrays to a checkpoint.

    The checkpoint is what Orbax's ``StandardCheckpointer`` writes of ``nnx.state(tree)``, and
    ``StandardCheckpointer`` reads it. A shared Variable is stored once. Each process writes its own
    shards of global arrays; the first process writes all other arrays and numbers. ``save`` returns
    when everything is written.

    Args:
      path: the directory to make, with its parents.
      tree: what to save; it is not changed.
      overwrite: whether to replace an existing checkpoint, after the new one is written.

    Raises:
      FileExistsError: ``path`` exists, and ``overwrite`` is false or it is not a checkpoint.
      TypeError: ``tree`` contains something else than arrays and numbers, or abstract arrays.
      ValueError: arrays were donated or deleted, there are none, or two have the same name.
      CheckpointError: writing failed. What was at ``path`` is still there.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import restore, save
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> save(folder, model)
      >>> other = restore(folder, nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
      >>> bool((other.kernel[...] == model.kernel[...]).all())
      True
    """
    folder = as_folder(path)
    args = save_args("save", tree)
    exists = folder.exists()
    if exists and not (overwrite and holds_checkpoint(folder)):
        hint = (
            "is not a checkpoint, so it is kept"
            if overwrite
            else "exists; overwrite=True replaces it"
        )
        raise FileExistsError(f"save: {folder} {hint}.")
    target = beside(folder, "new") if exists else folder
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(target, args=args, force=exists)
        if exists:
            _replace(folder, target)
    except Exception as error:
        raise CheckpointError(
            f"save: {folder} could not be written: {first_line(error)}"
        ) from error


def _replace(folder: Any, new: Any) -> None:
    """Replaces an old checkpoint by a finished one, on one process for all."""
    try:
        if jax.process_index() == 0:
            old = beside(folder, "old")
            if old.exists():
                old.rmtree()
            folder.rename(old)
            try:
                new.rename(folder)
            except BaseException:
                old.rename(folder)
                raise
            old.rmtree()
    finally:  # the others wait, whatever happens
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("nnx_sharding: a checkpoint was replaced")


def save_args(caller: str, tree: Any) -> Any:
    """The arguments of Orbax's ``save``: nested dicts of arrays, checksums in the metadata."""
    flat = flatten(tree)
    arrays = named_arrays(flat)
    _check_storable(caller, arrays)
    # Orbax supports neither unreduced nor reduced arrays; their sums are stored.
    shardings = [getattr(leaf, "sharding", None) for leaf in flat.leaves]
    summed = [None if unsummed(s) is s else unsummed(s) for s in shardings]
    leaves = transfer(flat.leaves, summed)
    contents = {array.name: _content(leaves[array.slot]) for array in arrays}
    stored = {name: content for name, content in contents.items() if np.size(content)}
    if not stored:
        raise ValueError(f"{caller}: there are no arrays with content to save.")
    sums = zip(stored, checksums(list(stored.values())), strict=True)
    keys = [array for array in arrays if array.name in stored and is_key(array.leaf)]
    empty = [array for array in arrays if array.name not in stored]  # which Orbax does not store
    manifest = {
        "version": 1,
        "checksums": {".".join(name): total for name, total in sums if total is not None},
        "keys": {".".join(array.name): str(array.leaf.dtype) for array in keys},
        "empty": [[list(x.name), list(x.leaf.shape), str(x.leaf.dtype)] for x in empty],
    }
    nested = traverse_util.unflatten_dict(stored)
    return ocp.args.StandardSave(nested, custom_metadata={MANIFEST: manifest})


def _check_storable(caller: str, arrays: Sequence[NamedArray]) -> None:
    wrong, deleted = [], []
    for _, leaf, *_, path, _, _ in arrays:
        if isinstance(leaf, jax.ShapeDtypeStruct) or not is_storable(leaf):
            wrong.append(f"  {path}: {kind_of(leaf)}")
        elif isinstance(leaf, jax.Array) and not is_reference(leaf) and leaf.is_deleted():
            deleted.append(f"  {path}")
    head = f"{caller}: these are not arrays or numbers with a value:"
    raise_listed(TypeError, head, wrong)
    raise_listed(ValueError, f"{caller}: these arrays were donated or deleted:", deleted)
    names = Counter(".".join(array.name) for array in arrays)  # as Orbax joins them
    same = [f"  {array.path}" for array in arrays if names[".".join(array.name)] > 1]
    raise_listed(
        ValueError,
        f"{caller}: these paths are the same once their keys are joined by dots:",
        same,
        "Rename a key.",
    )


def _content(leaf: Any) -> Any:
    """What is written of an array; of one that is not global, a NumPy array."""
    value = leaf[...] if is_reference(leaf) else leaf
    if not isinstance(value, jax.Array):
        return np.asarray(value) if isinstance(value, complex | np.generic) else value
    if jax.process_count() > 1 and value.is_fully_addressable:
        return np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return value
