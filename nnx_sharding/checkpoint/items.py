"""Arguments with which Orbax saves and restores models and the states of data iterators.

For each kind of item: a pair of arguments for ``ocp.args.Composite``, and their Orbax handler.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from ..core.flatten import flatten
from ..core.transfer import transfer
from ..errors import CheckpointError, raise_listed
from ..specs.fitting import unsummed
from .checksums import checksums
from .names import NamedArray, is_key, is_reference, is_storable, kind_of, named_arrays
from .restore import prepare
from .stored import MANIFEST, VERSION


class ModelHandler(ocp.StandardCheckpointHandler):  # type: ignore[misc]
    """Saves and restores models by path, in the format of Orbax's ``StandardCheckpointHandler``.

    Orbax finds it by :class:`ModelSave` and :class:`ModelRestore`.
    """

    async def async_save(self, directory: Any, args: Any) -> Any:
        """Starts to write the arrays of ``args``, a :class:`ModelSave`."""
        return await super().async_save(directory, args=standard_args(args))

    def restore(self, directory: Any, args: Any) -> Any:
        """Restores ``args``, a :class:`ModelRestore`."""
        options = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
        is_dry_run = options.pop("dry_run")
        fill = prepare(directory, **options)
        return None if is_dry_run else fill()


@ocp.args.register_with_handler(ModelHandler, for_save=True)
@dataclasses.dataclass
class ModelSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Saves a model, an optimizer or any pytree of them and of arrays, as an item of Orbax.

    The item is what ``ocp.args.StandardSave(nnx.state(tree))`` writes, and
    ``ocp.args.StandardRestore`` can read it. A shared Variable is stored once. The tree may change
    as soon as ``save`` of an asynchronous manager returns, also by donation.

    Attributes:
      tree: what to save.
      checksums: whether to store a checksum of each array, which restoring compares.

    Raises:
      TypeError: when it is saved: ``tree`` contains anything but arrays and numbers, or abstract
        arrays.
      ValueError: when it is saved: arrays were donated or deleted, there are none, or two have the
        same name.

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
    checksums: bool = True


@ocp.args.register_with_handler(ModelHandler, for_restore=True)
@dataclasses.dataclass
class ModelRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restores an item of Orbax into a model, as :func:`~nnx_sharding.checkpoint.restore` does.

    Attributes, result and errors are the arguments, result and errors of that function. The item
    may be one of :class:`ModelSave`, or ``ocp.args.StandardSave`` of an ``nnx.state`` or of
    ``nnx.to_pure_dict``. See :class:`ModelSave` for an example.

    Attributes:
      dry_run: whether to read and compare everything, but to change and return nothing.
    """

    tree: Any
    sharding: Any = None
    mesh: Any = None
    only: Any = None
    cast: bool = False
    rename: Mapping[str, str] | None = None
    dry_run: bool = False


class DataHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """Saves and restores the state of a data iterator, in the format of Grain's handler.

    Orbax finds it by :class:`DataSave` and :class:`DataRestore`. Orbax's own JSON items have one
    file for all processes, and Grain's handler needs Grain, which loaders here do not.
    """

    def save(self, directory: Any, args: Any) -> None:
        """Writes the state of ``args``, a :class:`DataSave`, of this process."""
        (directory / _file_name()).write_bytes(encoded(args.iterator))

    def restore(self, directory: Any, args: Any) -> Any:
        """Restores ``args``, a :class:`DataRestore`."""
        file = directory / _file_name()
        if not file.exists():
            found = ", ".join(sorted(path.name for path in directory.glob("process_*")))
            raise CheckpointError(
                f"restore: {directory} has no data state for this process, {file.name}, only "
                f"{found or 'nothing'}. Restore the model alone, or with as many processes."
            )
        content = file.read_bytes()
        if args.iterator is None:
            return content
        is_bytes = isinstance(args.iterator.get_state(), bytes)
        try:
            state = content if is_bytes else json.loads(content)
        except ValueError as error:
            raise CheckpointError(f"restore: {file} is damaged: {error}") from error
        args.iterator.set_state(state)
        return args.iterator


@ocp.args.register_with_handler(DataHandler, for_save=True)
@dataclasses.dataclass
class DataSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Saves the state of a data iterator, as an item of Orbax. Each process saves its own.

    Attributes:
      iterator: an object with ``get_state`` and ``set_state``, such as an iterator of Grain, or a
        state. States are bytes or JSON values.

    Raises:
      TypeError: when it is saved: the state is something else.

    Example:
      See :class:`DataRestore`.
    """

    iterator: Any


@ocp.args.register_with_handler(DataHandler, for_restore=True)
@dataclasses.dataclass
class DataRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restores the state of a data iterator that this process saved.

    The item may be one of :class:`DataSave` or of Grain's ``CheckpointSave``.

    Attributes:
      iterator: the iterator to set to the state, which is returned; None returns the state as
        bytes, for JSON values as text.

    Raises:
      CheckpointError: another number of processes saved it.

    Example:
      >>> import json, tempfile
      >>> import orbax.checkpoint as ocp
      >>> from nnx_sharding.checkpoint import DataRestore, DataSave
      >>> with ocp.CheckpointManager(tempfile.mkdtemp(), item_names=("data",)) as manager:
      ...     _ = manager.save(1, args=ocp.args.Composite(data=DataSave({"row": 3})))
      ...     manager.wait_until_finished()
      ...     state = manager.restore(1, args=ocp.args.Composite(data=DataRestore()))["data"]
      >>> json.loads(state)
      {'row': 3}
    """

    iterator: Any = None


def _file_name() -> str:
    return f"process_{jax.process_index()}-of-{jax.process_count()}.json"


def encoded(iterator: Any) -> bytes:
    """The bytes to write for a data iterator or a state."""
    state = iterator.get_state() if hasattr(iterator, "get_state") else iterator
    if isinstance(state, bytes):
        return state
    try:
        return json.dumps(state, indent=4).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"save: expected a data state of bytes or JSON values, got {state!r}: {error}"
        ) from None


def standard_args(args: ModelSave) -> Any:
    """The arguments for Orbax: nested dicts of arrays, and as metadata what it does not store."""
    flat = flatten(args.tree)
    arrays = named_arrays(flat)
    check_storable(arrays)
    # Orbax supports neither unreduced nor reduced arrays; their sums are stored.
    shardings = [getattr(leaf, "sharding", None) for leaf in flat.leaves]
    summed = [None if unsummed(s) is s else unsummed(s) for s in shardings]
    leaves = transfer(flat.leaves, summed)
    contents = {array.name: _content(leaves[array.slot]) for array in arrays}
    stored = {name: content for name, content in contents.items() if np.size(content)}
    if not stored:
        raise ValueError("save: expected arrays with at least one element, got none.")
    sums = checksums(list(stored.values())) if args.checksums else []
    keys = [array for array in arrays if array.name in stored and is_key(array.leaf)]
    empty = [array for array in arrays if array.name not in stored]  # which Orbax does not store
    manifest = {
        "version": VERSION,
        "checksums": {
            ".".join(name): total
            for name, total in zip(stored, sums, strict=False)
            if total is not None
        },
        "keys": {".".join(array.name): str(array.leaf.dtype) for array in keys},
        "empty": [[list(x.name), list(x.leaf.shape), str(x.leaf.dtype)] for x in empty],
    }
    nested = traverse_util.unflatten_dict(stored)
    return ocp.args.StandardSave(nested, custom_metadata={MANIFEST: manifest})


def check_storable(arrays: Sequence[NamedArray]) -> None:
    """Raises an error if not all arrays can be saved."""
    wrong, deleted = [], []
    for _, leaf, *_, path, _, _ in arrays:
        if isinstance(leaf, jax.ShapeDtypeStruct) or not is_storable(leaf):
            wrong.append(f"  {path}: {kind_of(leaf)}")
        elif isinstance(leaf, jax.Array) and not is_reference(leaf) and leaf.is_deleted():
            deleted.append(f"  {path}")
    head = "save: these are not arrays or numbers with a value:"
    raise_listed(TypeError, head, wrong)
    raise_listed(ValueError, "save: these arrays were donated or deleted:", deleted)
    names = Counter(".".join(array.name) for array in arrays)  # as Orbax joins them
    same = [f"  {array.path}" for array in arrays if names[".".join(array.name)] > 1]
    raise_listed(
        ValueError,
        "save: these paths are the same once their keys are joined by dots:",
        same,
        "Rename a key.",
    )


def _content(leaf: Any) -> Any:
    """What is written for an array: a NumPy array unless it is global."""
    value = leaf[...] if is_reference(leaf) else leaf
    if not isinstance(value, jax.Array):
        return np.asarray(value) if isinstance(value, complex | np.generic) else value
    if jax.process_count() > 1 and value.is_fully_addressable:
        return np.asarray(jax.random.key_data(value) if is_key(value) else value)
    return value
