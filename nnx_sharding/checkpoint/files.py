"""``save`` and ``restore``: single checkpoints, each in its own directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from .. import _compat
from ..diagnostics.progress import progress
from ..errors import CheckpointError
from .items import ModelHandler, ModelRestore, ModelSave, standard_args
from .stored import as_folder, beside, first_line, foreign_entries, is_checkpoint, item_folder


@_compat.api_boundary
def save(
    path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False, checksums: bool = True
) -> None:
    """Writes a model, an optimizer or any pytree of them and of arrays to a checkpoint.

    The checkpoint is what Orbax's ``StandardCheckpointer`` writes for ``nnx.state(tree)``, and
    ``StandardCheckpointer`` can read it. A shared Variable is stored once. Each process writes its
    own shards of global arrays; the first process writes all other arrays and numbers. ``save``
    returns when everything is written.

    Args:
      path: the directory to make, with its parents.
      tree: what to save; it is not changed.
      overwrite: whether to replace an existing checkpoint, once the new one is written. A folder
        that holds anything else is not replaced.
      checksums: whether to store a checksum of each array, which :func:`restore` compares.

    Raises:
      FileExistsError: ``path`` exists, and ``overwrite`` is false or it is not only a checkpoint.
      TypeError: ``tree`` contains anything but arrays and numbers, or abstract arrays.
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
    with progress(f"checksums of {folder.name}"):
        args = standard_args(ModelSave(tree, checksums))
    exists, reason = _from_first_process(lambda: _obstacle(folder, overwrite))
    if reason:
        raise FileExistsError(f"save: {folder} {reason}.")
    new = beside(folder, "new") if exists else folder
    try:
        handler = ocp.StandardCheckpointHandler()
        with progress(f"save {folder.name}"), ocp.AsyncCheckpointer(handler) as checkpointer:
            checkpointer.save(new, args=args, force=exists)  # `new` may be left from a killed job
    except Exception as error:
        raise CheckpointError(
            f"save: {folder} could not be written: {first_line(error)}"
        ) from error
    if exists:
        if jax.process_index() == 0:
            _replace(folder, new)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("nnx_sharding: a checkpoint was replaced")


def _obstacle(folder: Any, overwrite: bool) -> tuple[bool, str]:
    """Whether a folder exists, and why nothing can be saved there."""
    if not folder.exists():
        return False, ""
    if not overwrite:
        return True, "exists; overwrite=True replaces it if it is a checkpoint"
    if not is_checkpoint(folder):
        return True, "is not a checkpoint, so it is kept"
    others = foreign_entries(folder)
    listed = ", ".join(others[:5]) + (", …" if others[5:] else "")
    return True, f"has files that are not of a checkpoint, so it is kept: {listed}" * bool(others)


def _from_first_process(decide: Callable[[], Any]) -> Any:
    """What the first process decides: another one might see a file system that has changed."""
    if jax.process_count() == 1:
        return decide()
    text = ""
    if jax.process_index() == 0:
        try:
            text = json.dumps(decide())
        except OSError as error:  # the others wait for an answer
            text = json.dumps((True, f"cannot be read: {first_line(error)}"))
    buffer = np.frombuffer(text.encode().ljust(_BROADCAST_BYTES), np.uint8)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer))).decode())


_BROADCAST_BYTES = 4096


def _replace(folder: Any, new: Any) -> None:
    """Puts a new checkpoint in the place of an old one, or leaves the old one there."""
    old = beside(folder, "old")
    if old.exists():
        old.rmtree()
    folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if not folder.exists():
            old.rename(folder)
        raise
    old.rmtree()


@_compat.api_boundary
def restore(
    path: str | os.PathLike[str],
    tree: Any,
    sharding: Any = None,
    mesh: Mesh | None = None,
    *,
    only: Any = None,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
) -> Any:
    r"""Reads a checkpoint into a model, an optimizer or any pytree of them and of arrays.

    Each array is read directly into its sharding: each process reads its own shards, whatever mesh
    and number of processes wrote it. The checkpoint may be one of :func:`save`, whose checksums are
    compared, or one that Orbax wrote of an ``nnx.state``. A checkpoint of a list of blocks also
    fits a :func:`~nnx_sharding.stack` of them, and the reverse.

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
      only: an NNX filter for what to restore, such as ``nnx.Param``, or ``...`` for all of
        ``tree``. The rest of ``tree`` is not changed, and the rest of the checkpoint is ignored.
        None restores all of both: what is in one of them only is an error.
      cast: whether to convert arrays of another dtype to that in ``tree``, among floating point,
        among integer and among complex types. Integers never wrap.
      rename: the paths that arrays of the checkpoint have in ``tree``, if they differ: rules
        ``{pattern: replacement}``. The first regular expression that is found in a path, as
        :func:`contents` lists it, replaces that part, as ``re.sub`` does:
        ``{r"^encoder/": "body/"}``.

    Returns:
      ``tree``, with arrays outside of modules and Variables in new containers.

    Raises:
      NoCheckpointError: the checkpoint does not exist.
      CheckpointError: it cannot be read, is damaged, or does not fit: paths that are missing on
        either side, different shapes and dtypes, integers that ``cast`` would wrap, all in one
        message.
      TypeError: ``tree`` or ``sharding`` contains something of the wrong type.
      NoMeshError: ``sharding`` contains a ``PartitionSpec``, and no mesh is in context.
      ValueError: arrays have no sharding, or none with devices; ``only`` or a rule of ``rename``
        matches nothing, or rules give several arrays the same path.
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
      P('model',)
    """
    folder = item_folder("restore", path)
    args = ModelRestore(tree, sharding, mesh, only, cast, rename)
    with progress(f"restore {folder.name}"), ocp.Checkpointer(ModelHandler()) as checkpointer:
        return checkpointer.restore(folder, args=args)
