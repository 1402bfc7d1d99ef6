"""``save`` and ``restore``: single checkpoints, each in its own directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from .. import _compat
from ..errors import CheckpointError
from ..progress import progress
from .items import ModelHandler, ModelRestore, ModelSave, standard_args
from .stored import as_folder, beside, first_line, holds_checkpoint, item_folder


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
      overwrite: whether to replace an existing checkpoint, which is kept until the new one is
        written.
      checksums: whether to store a checksum of each array, which :func:`restore` compares.

    Raises:
      FileExistsError: ``path`` exists, and ``overwrite`` is false or it is not a checkpoint.
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
    exists = folder.exists()
    if exists and not (overwrite and holds_checkpoint(folder)):
        hints = "exists; overwrite=True replaces it", "is not a checkpoint, so it is kept"
        raise FileExistsError(f"save: {folder} {hints[overwrite]}.")
    old, is_first = beside(folder, "old"), jax.process_index() == 0
    if exists and is_first:
        if old.exists():
            old.rmtree()
        folder.rename(old)  # the others wait for the first process when they begin to save
    try:
        handler = ocp.StandardCheckpointHandler()
        with progress(f"save {folder.name}"), ocp.AsyncCheckpointer(handler) as checkpointer:
            checkpointer.save(folder, args=args)
    except Exception as error:
        if exists and is_first:
            old.rename(folder)
        raise CheckpointError(
            f"save: {folder} could not be written: {first_line(error)}"
        ) from error
    if exists and is_first:
        old.rmtree()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("nnx_sharding: a checkpoint was replaced")


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
        ``{path: new path}``. A path is a regular expression for the full path in the checkpoint,
        as :func:`contents` lists it; a new path may refer to its groups, as in
        ``{r"encoder/(.*)": r"body/\1"}``. The first rule that matches is applied.

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
      P('model', None)
    """
    folder = item_folder("restore", path)
    args = ModelRestore(tree, sharding, mesh, only, cast, rename)
    with progress(f"restore {folder.name}"), ocp.Checkpointer(ModelHandler()) as checkpointer:
        return checkpointer.restore(folder, args=args)
