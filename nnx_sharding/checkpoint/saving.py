"""``save``: models, optimizers and arrays to a checkpoint of Orbax."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from .. import _compat
from ..core.flatten import flatten
from ..core.transfer import transfer
from ..errors import CheckpointError
from ..fitting import unsummed
from .checksums import checksums, is_key
from .library import as_folder, beside, orbax
from .named import (
    Name,
    Named,
    clashes,
    is_reference,
    is_storable,
    kind_of,
    named,
)
from .stored import MANIFEST, first_line, holds_checkpoint


@_compat.api_boundary
def save(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Writes a model, an optimizer or any pytree of them and of arrays to a checkpoint.

    The checkpoint is one of Orbax: what ``StandardCheckpointer`` writes of ``nnx.state(tree)``,
    and it reads this one. A reference that is shared is stored once. Each process writes its own
    parts of the arrays; of arrays that are no global ones, of NumPy arrays and of numbers the
    first process writes what it has. It returns when all is written.

    Args:
      path: the directory that is made; its parents are, too.
      tree: what is saved. Nothing of it is changed.
      overwrite: whether a checkpoint that is there is replaced, after the new one is written.

    Raises:
      FileExistsError: there is something at ``path``, and ``overwrite`` is false, or it is no
        checkpoint.
      TypeError: something else than arrays and numbers is in ``tree``, or they are abstract.
      ValueError: arrays were donated or deleted, there are none, or two have the same name.
      CheckpointError: it could not be written. What was at ``path`` is still there.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import restore, save
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> save(folder, model)
      >>> other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> restore(folder, other) is other
      True
      >>> bool((other.kernel[...] == model.kernel[...]).all())
      True
    """
    ocp = orbax()
    folder = as_folder(path)
    taken = snapshot("save", tree)
    is_there = folder.exists()
    if is_there and not (overwrite and holds_checkpoint(folder)):
        no, yes = "is there already; overwrite=True replaces it", "is no checkpoint, so it is kept"
        raise FileExistsError(f"save: {folder} {yes if overwrite else no}.")
    target = beside(folder, "new") if is_there else folder
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(target, args=taken.request(), force=is_there)
        if is_there:
            _replace(folder, target)
    except Exception as error:
        raise CheckpointError(
            f"save: {folder} could not be written: {first_line(error)}"
        ) from error


def _replace(folder: Any, new: Any) -> None:
    """Puts a finished checkpoint in the place of an old one, on one process for all."""
    try:
        if jax.process_index() == 0:
            _swap(folder, new)
    finally:  # the others wait, whatever comes of it
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("nnx_sharding: a checkpoint was replaced")


def _swap(folder: Any, new: Any) -> None:
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


class Snapshot(NamedTuple):
    """What is given to Orbax: nested dicts of arrays, and what we note about them."""

    tree: dict[str, Any]
    manifest: dict[str, Any]

    def request(self) -> Any:
        """The arguments of Orbax's own ``save``."""
        return orbax().args.StandardSave(self.tree, custom_metadata={MANIFEST: self.manifest})


def snapshot(what: str, tree: Any) -> Snapshot:
    """The arrays of a tree by name, and their checksums.

    Raises:
      TypeError: as :func:`save` does, and so is ValueError.
    """
    flat = flatten(tree)
    found = list(named(flat))
    _check_storable(what, found, flat.leaves)
    leaves = transfer(flat.leaves, list(map(_stored_as, flat.leaves)))
    values = {each.name: _content(leaves[each.slot]) for each in found}
    full = {name: value for name, value in values.items() if np.size(value)}
    if not full:
        raise ValueError(f"{what}: there are no arrays with content to save.")
    sums = checksums(list(full.values()))
    keys = {each.name: flat.leaves[each.slot] for each in found}
    joined = {
        ".".join(name): total for name, total in zip(full, sums, strict=True) if total is not None
    }
    nested: dict[str, Any] = {}
    for name, value in full.items():
        _put(nested, name, value)
    manifest = {
        "version": 1,
        "checksums": joined,
        "keys": {
            ".".join(name): str(leaf.dtype)
            for name, leaf in keys.items()
            if name in full and is_key(leaf)
        },
        "empty": [
            [list(name), list(np.shape(value)), str(keys[name].dtype)]
            for name, value in values.items()
            if name not in full
        ],
    }
    return Snapshot(nested, manifest)


def _check_storable(what: str, found: Sequence[Named], leaves: Sequence[Any]) -> None:
    kinds, gone = [], []
    for each in found:
        leaf = leaves[each.slot]
        if isinstance(leaf, jax.ShapeDtypeStruct) or not is_storable(leaf):
            kinds.append(f"  {each.path or 'the root'}: {kind_of(leaf)}")
        elif isinstance(leaf, jax.Array) and not is_reference(leaf) and leaf.is_deleted():
            gone.append(f"  {each.path or 'the root'}")
    if kinds:
        raise TypeError(
            f"{what}: these are no arrays or numbers with a value:\n" + "\n".join(kinds)
        )
    if gone:
        raise ValueError(f"{what}: these arrays were donated or deleted:\n" + "\n".join(gone))
    same = clashes(list(found))
    if same:
        raise ValueError(
            f"{what}: these paths are the same once their keys are joined by dots:\n"
            + "\n".join(same)
            + "\nRename a key."
        )


def _stored_as(leaf: Any) -> Any:
    """Orbax knows neither unreduced nor reduced arrays; what is stored of them are the sums."""
    own = getattr(leaf, "sharding", None)
    stored = unsummed(own)
    return None if stored is own else stored


def _content(leaf: Any) -> Any:
    """What is written of an array; of one that is not global, as NumPy."""
    value = leaf[...] if is_reference(leaf) else leaf
    if not isinstance(value, jax.Array):
        return np.asarray(value) if isinstance(value, complex | np.generic) else value
    if jax.process_count() > 1 and value.is_fully_addressable:
        return np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return value


def _put(nested: dict[str, Any], name: Name, value: Any) -> None:
    for key in name[:-1]:
        nested = nested.setdefault(key, {})
    nested[name[-1]] = value
