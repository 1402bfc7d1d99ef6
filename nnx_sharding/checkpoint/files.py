"""``save`` and ``restore``: single checkpoints, and models as items of Orbax's managers.

A new checkpoint is written next to an old one (``Draft``), and exchanged with it once it is
complete. So an error, a full disk or the end of the process leaves the old checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from jax.sharding import Mesh, Sharding

from .. import _compat
from .._publishing import Draft
from ..core.flatten import Flat, flatten
from ..core.memory import is_keys
from ..core.place import place_arrays
from ..diagnostics.progress import progress
from ..errors import raise_if_any
from ..specs.fitting import without_reductions
from . import names, stored
from .agreement import Operation
from .checksums import checksums
from .names import NamedArray
from .restore import restore_into
from .stored import FilePath

T = TypeVar("T")


@_compat.api_boundary
def save(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Writes a model, an optimizer or any pytree of them and of arrays to a checkpoint.

    The checkpoint has the format that Orbax's ``StandardCheckpointer`` writes for
    ``nnx.state(tree)``, and ``StandardCheckpointer`` can read it. It also has a checksum of each
    array, which :func:`restore` compares. A shared Variable is stored once. Each process writes its
    own shards of global arrays; the first process writes all other arrays and numbers.

    Args:
      path: the directory to make, with its parents.
      tree: the tree to save; it is not changed.
      overwrite: whether to replace an existing checkpoint, once the new one is written. A folder
        that holds anything else is not replaced, and nothing in a bucket (``gs://…``).

    Raises:
      FileExistsError: ``path`` exists, and ``overwrite`` is false or it is not only a checkpoint;
        or another job saves there at the same time.
      TypeError, ValueError: ``tree`` contains anything but arrays and numbers, arrays without
        values or two of the same name, or nothing.
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
    folder = stored.as_folder(path)
    with Operation("save", folder) as operation:
        operation.agree(path=str(folder))
        # 1. The first process makes the folder to write to. The folder is in a draft, which is
        # published at the end. In a bucket it is the final folder, because nothing can be renamed
        # there.
        new, draft = folder, None
        if operation.is_first:
            stored.check_replaceable(folder, overwrite)
            if not stored.is_in_bucket(folder):
                draft = operation.enter(Draft(Path(folder), is_ours=_is_of_orbax_in_draft))
                # The folder is checked again, because `publish` cannot notice changes that other
                # jobs have made before the draft was begun.
                stored.check_replaceable(folder, overwrite)
                new = draft.folder / _IN_DRAFT
            # Orbax lets the other processes wait until the first one makes this folder.
            stored.as_folder(new / "array_metadatas").mkdir(parents=True)
        new = stored.as_folder(operation.agree(str(new)))
        # 2. All processes write.
        with progress(f"save {folder.name}"):
            ModelHandler().save(new, args=ModelSave(tree))  # returns once all have written
        # 3. The first process publishes.
        if operation.is_first:
            (new / "commit_success.txt").write_text("")  # marks complete checkpoints for Orbax
            stored.opened("save", new)  # raises an error if the new checkpoint cannot be read
            if draft is not None:
                draft.publish(Path(new))


_IN_DRAFT = "checkpoint/"  # the folder of the new checkpoint in a draft


def _is_of_orbax_in_draft(path: str) -> bool:
    """Whether Orbax may have written a file, by its path in a draft.

    A draft only deletes such files, when it ends or is found after its process was killed.
    """
    return stored.is_of_orbax(path.removeprefix(_IN_DRAFT))


@_compat.api_boundary
def restore(
    path: str | os.PathLike[str],
    tree: Any,
    sharding: Any = None,
    mesh: Mesh | None = None,
    *,
    only: Any = None,
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
        arrays and numbers remain NumPy arrays and numbers. A module with another name than in the
        checkpoint is in a dict with the old one: ``{"encoder": model.body}``. An array in several
        parts of a tree is read from the first that the checkpoint has, so
        ``{"params": model, "rest": model}`` reads what ``nnx.split`` divided.
      sharding: where to place arrays: anything that
        :func:`~nnx_sharding.partition.with_sharding_constraint` takes. None is the sharding of the
        array in ``tree``; an array without one goes to the default device.
      mesh: the mesh of partition specs; without ``sharding``, the mesh for the specs of the arrays
        in ``tree``.
      only: an NNX filter for what to restore, such as ``nnx.Param``, or ``...`` for all of
        ``tree``. The rest of ``tree`` is not changed, and the rest of the checkpoint is ignored;
        the log names further layers of a list of which ``tree`` has fewer. With None, an array that
        only one of the two has is an error.
      cast: whether to convert arrays of another dtype to that in ``tree``, among floating point,
        among integer and among complex types. Integers never wrap.

    Returns:
      ``tree``, with arrays outside of modules and Variables in new containers.

    Raises:
      NoCheckpointError: the checkpoint does not exist.
      CheckpointError: it cannot be read, is damaged, or does not fit: paths that are missing on
        either side, different shapes and dtypes, integers that ``cast`` would wrap, all in one
        message.
      ValueError: shardings do not fit or have no devices, or ``only`` matches nothing.

    Example:
      See :func:`save`.
    """
    with Operation("restore", path) as operation:
        # The arrays are in the folder itself, or in the folder of an item in it.
        folder = stored.item_folder("restore", path)
        operation.agree(path=str(folder))
        # The arguments are a record because Orbax's managers pass them as one.
        arguments = ModelRestore(tree, sharding, mesh, only, cast)
        with progress(f"restore {folder.name}"):
            return restore_into(folder, arguments)


class ModelHandler(ocp.StandardCheckpointHandler):  # type: ignore[misc]
    """Saves and restores models; Orbax finds it by :class:`ModelSave` and :class:`ModelRestore`."""

    async def async_save(self, directory: FilePath, args: ModelSave) -> list[_Written]:
        """Starts to write the arrays of a :class:`ModelSave`; returns futures for Orbax.

        The list has one future, which waits for all arrays and then completes the checkpoint.
        """
        with Operation("save", directory) as operation:
            flat, arrays = check_storable(args.tree)
            # The processes have to agree before their devices compute together in the next line.
            operation.agree(arrays=lambda: names.digest(arrays))
            standard = operation.wait_for(lambda: _standard_args(flat, arrays))
            # The mesh in context is replaced by an empty one, because Orbax slices single shards,
            # and JAX 0.10 refuses that in a mesh.
            with _writing(directory), jax.set_mesh(Mesh(np.empty((), object), ())):
                futures = await super().async_save(directory, args=standard)
        finalize = functools.partial(super().finalize, directory)
        return [_Written(directory, Operation("save", directory), futures or (), finalize)]

    def save(self, directory: FilePath, args: ModelSave) -> None:
        """Writes a :class:`ModelSave`; Orbax would wait in a loop, and some releases nest loops."""
        [written] = _outside_of_loop(lambda: asyncio.run(self.async_save(directory, args)))
        written.result()  # waits for the arrays, and completes the checkpoint

    def finalize(self, directory: FilePath) -> None:
        """Does nothing, because :class:`_Written` has completed the checkpoint."""

    def restore(self, directory: FilePath, args: ModelRestore) -> Any:
        """Restores a :class:`ModelRestore`."""
        return restore_into(directory, args)


def _outside_of_loop(function: Callable[[], T]) -> T:
    """Calls a function that runs an event loop of asyncio, and returns its result.

    If this thread runs a loop already, as in a notebook, the function is called in a new thread,
    because asyncio refuses to run a loop within another.
    """
    try:
        asyncio.get_running_loop()
        is_in_loop = True
    except RuntimeError:
        is_in_loop = False
    # The function is not called in the `except` block, because its errors would have the
    # RuntimeError as context.
    if not is_in_loop:
        return function()
    # The thread gets a copy of the context, in which operations find the one that they are part of.
    context = copy_context()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, function).result()


@dataclasses.dataclass(frozen=True)
class _Written:
    """A future that Orbax waits for, perhaps in a thread: all processes have written their arrays.

    The future also completes the checkpoint. ``finalize`` of the handler does not do so, because if
    it failed in the first process alone, the other processes would wait.

    Attributes:
      folder: the folder of the checkpoint, for messages.
      operation: the operation in which the processes meet; `result` enters it.
      futures: Orbax's futures for the arrays of this process.
      finalize: Orbax's function that joins the files of all processes.
    """

    folder: FilePath
    operation: Operation
    futures: Sequence[Any]
    finalize: Callable[[], object]

    def result(self, timeout: float | None = None) -> None:
        """Waits until all arrays are written, and raises the error of any process."""
        with self.operation, _writing(self.folder):
            self.operation.wait_for(lambda: [future.result(timeout) for future in self.futures])
            self.operation.agree()
            if self.operation.is_first:
                _outside_of_loop(self.finalize)  # joins the files of all processes


def _writing(folder: FilePath) -> AbstractContextManager[None]:
    """Returns a context that turns errors of Orbax into errors about writing to a folder."""
    return stored.orbax_errors(f"save: {folder} could not be written")


@ocp.args.register_with_handler(ModelHandler, for_save=True)
@dataclasses.dataclass
class ModelSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Saves a model, an optimizer or any pytree of them and of arrays, as an item of Orbax.

    The item is what ``ocp.args.StandardSave(nnx.state(tree))`` writes, and
    ``ocp.args.StandardRestore`` can read it. The errors are those of :func:`save`. The tree may
    change as soon as ``save`` of an asynchronous manager returns, also by donation.

    Attributes:
      tree: what to save.

    Example:
      >>> import tempfile
      >>> import orbax.checkpoint as ocp
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import ModelRestore, ModelSave
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
      ...     saved = manager.save(1, args=ocp.args.Composite(model=ModelSave(model)))
      ...     restored = manager.restore(1, args=ocp.args.Composite(model=ModelRestore(model)))
      >>> saved, restored.model is model
      (True, True)
    """

    tree: Any


@ocp.args.register_with_handler(ModelHandler, for_restore=True)
@dataclasses.dataclass
class ModelRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restores an item of Orbax into a model, as :func:`~nnx_sharding.checkpoint.restore` does.

    Attributes, result and errors are the arguments, result and errors of that function. The item
    may be one of :class:`ModelSave`, or ``ocp.args.StandardSave`` of an ``nnx.state`` or of
    ``nnx.to_pure_dict``. See :class:`ModelSave` for an example.
    """

    tree: Any
    sharding: Any = None
    mesh: Mesh | None = None
    only: Any = None
    cast: bool = False


def _standard_args(flat: Flat, arrays: Sequence[NamedArray]) -> Any:
    """Returns the arguments for Orbax: nested dicts of arrays, and metadata (`manifest_of`).

    The metadata have the facts that Orbax does not keep, such as checksums and the kinds of PRNG
    keys.

    Args:
      arrays: the arrays of the tree, with the names under which they are stored.

    Raises:
      ValueError: no array has an element.
    """
    # The sums of unreduced and reduced arrays are stored, because Orbax supports neither.
    targets: list[Sharding | None] = []  # None leaves an array where it is
    for leaf in flat.leaves:
        sharding = getattr(leaf, "sharding", None)
        # `without_reductions` returns the same object if nothing is unreduced or reduced.
        summed_sharding = without_reductions(sharding)
        targets.append(None if summed_sharding is sharding else summed_sharding)
    leaves = place_arrays(flat.leaves, targets)
    contents = {array.name: _value_for_orbax(leaves[array.slot]) for array in arrays}
    # The manifest has the arrays without elements, which Orbax does not store.
    stored_contents = {name: content for name, content in contents.items() if np.size(content)}
    if not stored_contents:
        raise ValueError("save: expected arrays with at least one element, got none.")
    with progress("checksums"):
        sums = checksums(list(stored_contents.values()))
    metadata = stored.manifest_of(arrays, dict(zip(stored_contents, sums, strict=True)))
    nested = traverse_util.unflatten_dict(stored_contents)
    return ocp.args.StandardSave(nested, custom_metadata=metadata)


def check_storable(tree: Any) -> tuple[Flat, list[NamedArray]]:
    """Returns a tree, flattened, and its arrays with their names.

    Raises:
      TypeError, ValueError: some arrays cannot be saved; all are listed.
    """
    flat = flatten(tree)
    arrays = names.named_arrays(flat)
    wrong, deleted = [], []
    for array in arrays:
        leaf, path = array.leaf, array.path
        if isinstance(leaf, jax.ShapeDtypeStruct) or not names.is_storable(leaf):
            wrong.append(f"  {path}: {names.kind_of(leaf)}")
        elif isinstance(leaf, jax.Array) and not names.is_reference(leaf) and leaf.is_deleted():
            deleted.append(f"  {path}")
    head = "save: these are not arrays or numbers with a value:"
    raise_if_any(TypeError, head, wrong)
    raise_if_any(ValueError, "save: these arrays were donated or deleted:", deleted)
    names.check_unique("save", arrays)
    return flat, arrays


def _value_for_orbax(leaf: Any) -> Any:
    """Returns an array or a number in a form that Orbax can store.

    A reference becomes its value. Numbers that Orbax does not store, and arrays that only this of
    several processes has, become NumPy arrays. All other arrays and numbers are returned unchanged,
    except that the order of bytes may change.
    """
    value = leaf[...] if names.is_reference(leaf) else leaf
    if not isinstance(value, jax.Array):
        # Orbax stores bool, int and float, but no other numbers. NumPy numbers become arrays as
        # well, because a NumPy number may be a float to Python, and would lose its dtype.
        value = np.asarray(value) if isinstance(value, complex | np.generic) else value
        # The order of bytes is changed to this machine's, because TensorStore would ignore another.
        is_array = isinstance(value, np.ndarray)
        return value.astype(names.native(value.dtype), copy=False) if is_array else value
    # With several processes, Orbax refuses arrays that only one of them has, but takes NumPy
    # arrays. NumPy has no PRNG keys, so their words are stored. Orbax does the same for keys that
    # are on all processes.
    if jax.process_count() > 1 and value.is_fully_addressable:
        return np.asarray(jax.random.key_data(value) if is_keys(value) else value)
    return value
