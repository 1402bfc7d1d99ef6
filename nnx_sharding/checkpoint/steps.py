"""``Checkpoints``: the steps of a training run, in Orbax's ``CheckpointManager``.

A *step* of the manager is a checkpoint with two items: the model, and the *data*, which is the
state of each process's data iterator. The manager decides which steps are saved and kept.
``Checkpoints`` adds checks that a loop would otherwise have to make itself: a step comes after all
others, the model can be saved before the manager begins to, and an error in a restore leaves
everything as it was.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from .. import _compat
from ..core.flatten import flatten
from ..diagnostics.progress import progress
from ..errors import CheckpointError, NoCheckpointError, raise_if_any
from ..specs.fitting import show, suggestion
from .agreement import Operation
from .files import ModelRestore, ModelSave, check_storable
from .names import named_arrays
from .stored import DATA, MODEL, FilePath, as_folder

_SUM = ".crc32"  # the ending of the file with the checksum of a state


class Checkpoints:
    """The checkpoints of a training run: a model and the state of its data, by step.

    A thin layer over Orbax's ``CheckpointManager``, which is ``manager`` and decides which steps
    are saved and kept, also when the job is preempted. All further attributes are those of the
    manager: ``latest_step()``, ``best_step()``, ``all_steps()``, ``delete(step)``,
    ``reached_preemption(step)``, ``wait_until_finished()``. As a context manager it waits on exit
    for what is still being written.

    Args:
      directory: the directory of the steps, which is made, or a ``CheckpointManager``.
      **options: those of ``ocp.CheckpointManagerOptions``, such as ``max_to_keep`` and
        ``save_interval_steps``, with their defaults: all steps are kept.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import Checkpoints
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> with Checkpoints(tempfile.mkdtemp(), max_to_keep=2) as checkpoints:
      ...     start = checkpoints.resume(model) or 0  # nothing there yet
      ...     for step in range(start + 1, 6):
      ...         _ = checkpoints.save(step, model)
      ...     checkpoints.resume(model), checkpoints.all_steps()
      (5, [4, 5])
    """

    def __init__(self, directory: str | os.PathLike[str] | ocp.CheckpointManager, **options: Any):
        self.manager: Any = directory
        if not isinstance(directory, ocp.CheckpointManager):
            self.manager = ocp.CheckpointManager(
                as_folder(directory),
                options=ocp.CheckpointManagerOptions(**options),
                item_names=(MODEL, DATA),  # makes the manager expect items in each step
            )

    def __getattr__(self, name: str) -> Any:
        # `manager` is missing if __init__ failed. Without this, the next line would not end.
        if name == "manager":
            raise AttributeError(name)
        return getattr(self.manager, name)

    @_compat.api_boundary
    def save(
        self,
        step: int,
        tree: Any,
        *,
        data: Any = None,
        metrics: Any = None,
        force: bool = False,
    ) -> bool:
        """Saves one step if the manager decides to. Call it at each training step.

        Args:
          step: its number, larger than those of all saved steps.
          tree: a model, an optimizer, metrics, or any pytree of them, as for
            :class:`~nnx_sharding.checkpoint.ModelSave`. It may change as soon as this returns.
          data: the data iterator of the loop, with ``get_state`` and ``set_state``, such as one of
            Grain, or ``batches = iter(shard_batches(...))``; or its state: bytes or JSON values,
            with strings as keys. Each process saves its own, in the format of Grain's handler.
          metrics: numbers by name, for ``best_fn`` of the manager.
          force: whether to save regardless of what the manager decides.

        Returns:
          Whether the step is saved.

        Raises:
          ValueError: the step does not come after all saved steps, also those that another job has
            saved here.
          TypeError: ``data`` is neither an iterator with ``get_state`` nor a state.
          Exception: as for ``save`` of a model, or what Orbax raises if this step, or the one
            before, cannot be written.
        """
        # The first checks look at no files, because most calls save nothing.
        step = operator.index(step)
        latest = self.manager.latest_step()  # the latest step that this manager knows of
        if step < 0:
            raise ValueError(f"Checkpoints.save: expected a step of 0 or more, got {step}.")
        self._check_is_next(step, latest)
        if not force and not self.manager.should_save(step):
            return False
        # At `agree`, each process waits for all others, and fails if one has failed.
        with self._operation("save") as operation:
            # All processes have to mean the same step and folder.
            operation.agree(step=str(step), directory=str(self.manager.directory))
            self.manager.wait_until_finished()  # `manager.save` would wait as well
            self.manager.reload()  # finds the steps of other jobs
            # All processes take the latest step that the first process sees.
            newest = operation.agree(self.manager.latest_step())
            if newest != latest:
                self._check_is_next(step, newest, " Another job has saved it since this started.")
            # `check_storable` raises an error if the tree cannot be saved. The check is made here,
            # because Orbax's manager may fail later.
            check_storable(tree)
            items: dict[str, Any] = {MODEL: ModelSave(tree)}
            if data is not None:
                items[DATA] = _DataArgs(_encoded(data))
            operation.agree()  # all processes get here, so none has failed before the save
            args = ocp.args.Composite(**items)
            with progress(f"save step {step}"):
                # The save is forced, because the manager has already decided above.
                options = {"args": args, "metrics": metrics, "force": True}
                # `wait_for` is used because Orbax has barriers, at which the other processes would
                # wait for one that has failed.
                return bool(operation.wait_for(lambda: self.manager.save(step, **options)))

    def wait_until_finished(self) -> None:
        """Waits until all steps are written; raises a CheckpointError if one cannot be."""
        with self._operation("wait_until_finished", alone=True):
            self.manager.wait_until_finished()

    def _operation(self, name: str, *, alone: bool = False) -> Operation:
        """Returns an operation on the directory; ``alone`` if no other process takes part."""
        return Operation(f"Checkpoints.{name}", self.manager.directory, alone=alone)

    def _check_is_next(self, step: int, latest: int | None, cause: str = "") -> None:
        """Raises a ValueError, with ``cause`` in its text, unless a step comes after the latest."""
        if latest is not None and step <= latest:
            raise ValueError(
                f"Checkpoints.save: step {step} does not come after step {latest}, which exists in "
                f"{self.manager.directory}.{cause} To go back to an earlier step, "
                "resume(..., step=..., discard_later=True) deletes those after it."
            )

    @_compat.api_boundary
    def restore(
        self,
        tree: Any,
        sharding: Any = None,
        mesh: Mesh | None = None,
        *,
        step: int | None = None,
        data: Any = None,
        **options: Any,
    ) -> Any:
        """Restores one step, as :func:`~nnx_sharding.checkpoint.restore` does.

        ``step`` is its number, or None for the last one, and ``data`` is the data iterator, to be
        set to the state that was saved with the step. All other arguments are those of that
        function.

        Raises:
          NoCheckpointError: no step is stored, or not this one.
          TypeError: ``data`` has no ``get_state`` or ``set_state``.
          CheckpointError: as for ``restore``, or the step has no data state for this process, or
            ``data`` refuses it. Neither ``tree`` nor ``data`` is changed.
        """
        args = ModelRestore(tree, sharding, mesh, **options)
        restored = self._restored(step, args, data)  # raises an error if there is no such step
        if restored is None:  # there are no steps at all
            raise NoCheckpointError(
                f"Checkpoints.restore: no steps found in {self.manager.directory}."
            )
        _, filled = restored
        return filled

    @_compat.api_boundary
    def resume(
        self,
        tree: Any,
        sharding: Any = None,
        mesh: Mesh | None = None,
        *,
        step: int | None = None,
        data: Any = None,
        discard_later: bool = False,
        **options: Any,
    ) -> int | None:
        """Continues a training run in place, from the last step or, with ``step``, an earlier one.

        The arguments are those of :meth:`restore`. With ``discard_later=True``, all steps after
        ``step`` are deleted once it is restored, so that training can save them again. Otherwise
        nothing is deleted.

        Returns:
          The step, or None, and nothing is changed, if no step is stored.

        Raises:
          TypeError: ``tree`` has arrays outside of Variables, which cannot be changed in place.
          CheckpointError: as for :meth:`restore`.
        """
        with self._operation("resume"):
            flat = flatten(tree)
            root_slots = flat.structure.root_slots
            bare_arrays = [array.path for array in named_arrays(flat) if array.slot in root_slots]
            if bare_arrays:
                raise TypeError(
                    "Checkpoints.resume: these arrays belong to no module or Variable and cannot "
                    f"be changed in place: {', '.join(bare_arrays)}. "
                    "Use restore, which returns them."
                )
            restored = self._restored(step, ModelRestore(tree, sharding, mesh, **options), data)
            if restored is None:
                return None
            restored_step, _ = restored
            # The last step is deleted first, so that the remaining steps have no gap if this is
            # interrupted.
            for other_step in sorted(self.manager.all_steps(), reverse=True):
                if discard_later and other_step > restored_step:
                    self.manager.delete(other_step)
            return restored_step

    def _restored(self, step: int | None, args: ModelRestore, data: Any) -> tuple[int, Any] | None:
        """Restores a step as :meth:`restore` does, the same on all processes.

        Args:
          step: the number of the step; None for the last one.
          data: a data iterator to set to its state in the step, or None.

        Returns:
          The step and the tree; None if no steps are stored.

        Raises:
          NoCheckpointError: there are steps, but not this one.
          CheckpointError: the step cannot be read; the message names earlier steps.
        """
        with self._operation("restore") as operation:
            if data is not None and not (hasattr(data, "get_state") and hasattr(data, "set_state")):
                raise _no_iterator(data)
            self.manager.wait_until_finished()
            self.manager.reload()  # finds the steps of other jobs
            steps = sorted(self.manager.all_steps())
            last_step = steps[-1] if steps else None
            wanted_step = last_step if step is None else operator.index(step)
            # All processes restore the step that the first process wants. If the user gave none, it
            # is the last step that the first process sees. If the named facts differ among
            # processes, all raise an error with these texts.
            wanted_step = operation.agree(
                wanted_step,
                step=str(step),
                steps="a list of some" if steps else "an empty list",
                directory=str(self.manager.directory),
            )
            if wanted_step is None:
                return None
            if wanted_step not in steps:
                raise NoCheckpointError(
                    f"Checkpoints: step {wanted_step} is not in {self.manager.directory}, only "
                    f"{', '.join(map(str, steps)) or 'nothing'}"
                    f"{suggestion(wanted_step, steps) or '.'}"
                )
            earlier = [number for number in steps if number < wanted_step]
            with progress(f"restore step {wanted_step}"):
                return wanted_step, self._read(wanted_step, earlier, args, data)

    def _read(self, step: int, earlier: Sequence[int], args: ModelRestore, data: Any) -> Any:
        """Sets the data to its state in a step, then reads the model, and returns its tree.

        If reading the model fails, the tree is unchanged, and the data get their old state back.

        Args:
          earlier: the numbers of earlier steps, for messages.
          data: a data iterator, or None.
        """
        if data is None:
            return self._item(step, earlier, MODEL, args)
        content = self._item(step, earlier, DATA, _DataArgs())  # bytes, as `_encoded` returned them
        old_state = data.get_state()
        try:
            # The state is set before the model is read, because the iterator may refuse it.
            _set_state(data, step, content, is_json=not isinstance(old_state, bytes))
            return self._item(step, earlier, MODEL, args)
        except BaseException:
            data.set_state(old_state)
            raise

    def _item(self, step: int, earlier: Sequence[int], name: str, args: Any) -> Any:
        """Reads one item of a step, the model or the state of the data; errors name earlier steps.

        Args:
          earlier: the numbers of earlier steps.
          args: the arguments for Orbax: a ``ModelRestore`` or a ``_DataArgs``.
        """
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**{name: args}))[name]
        except KeyError as error:
            if f'"{name}"' not in str(error):  # a function of the user raised it, such as a filter
                raise
            # Orbax raises it if a step has no such item.
            raise CheckpointError(f"Checkpoints: step {step}: {error.args[0]}") from error
        except (CheckpointError, FileNotFoundError) as error:
            hint = (
                f"\nEarlier steps: {', '.join(map(str, earlier))}. resume(..., step=..., "
                "discard_later=True) continues from one of them, and deletes those after it."
            )
            raise CheckpointError(f"{error}{hint if earlier else ''}") from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        with self._operation("close", alone=True):
            self.manager.close()


class _DataHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """Keeps the state of a data iterator of each process, in the format of Grain's handler."""

    # This handler exists because Orbax's JSON items have one file for all processes, and Grain's
    # handler needs Grain.

    def save(self, directory: FilePath, args: _DataArgs) -> None:
        """Writes the state of this process, and its checksum."""
        with Operation("Checkpoints.save", directory):
            (directory / _file_name()).write_bytes(args.state)
            (directory / (_file_name() + _SUM)).write_text(str(zlib.crc32(args.state)))

    def restore(self, directory: FilePath, args: _DataArgs) -> bytes:
        """Reads the state of this process, and compares its checksum if there is one."""
        with Operation("Checkpoints.restore", directory):
            file, sums = directory / _file_name(), directory / (_file_name() + _SUM)
            if not file.exists():
                states = (path.name for path in directory.glob("process_*") if path.suffix != _SUM)
                raise CheckpointError(
                    f"restore: {directory} has no data state for this process, {file.name}, only "
                    f"{', '.join(sorted(states)) or 'nothing'}. Restore the model alone, or with "
                    "as many processes."
                )
            content: bytes = file.read_bytes()
            # There is no checksum if Grain's handler, which has the same format, wrote the state.
            if sums.exists() and sums.read_text() != str(zlib.crc32(content)):
                raise CheckpointError(f"restore: {file} is damaged: it is not what was written.")
            return content


@ocp.args.register_with_handler(_DataHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _DataArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """The data of a step, for Orbax: ``state`` has the bytes to save, and is unused to restore."""

    state: bytes = b""


def _file_name() -> str:
    """Returns the name of the file with the state of this process, in Grain's format."""
    return f"process_{jax.process_index()}-of-{jax.process_count()}.json"


# What `json` and bytes can hold.
_STATES = (bytes, str, int, float, list, tuple, dict)


def _no_iterator(data: object, or_state: str = "") -> TypeError:
    """Returns the error for data without a state, such as a loader in place of its iterator.

    Args:
      or_state: what else may be passed, for the text.
    """
    text = (
        f"Checkpoints: data must be an iterator with get_state and set_state, {or_state}"
        f"got {show(data)}."
    )
    if isinstance(data, Iterable) and not isinstance(data, Iterator):
        # `data=iter(loader)` in each call would save the state of an iterator that has not begun.
        text += " Make one iterator, batches = iter(...), for the loop and for data=batches."
    return TypeError(text)


def _set_state(data: Any, step: int, content: bytes, *, is_json: bool) -> None:
    """Sets a data iterator to the state that was saved with a step.

    Args:
      content: the state as `_encoded` has written it.
      is_json: whether states of the iterator are JSON values, not bytes.

    Raises:
      CheckpointError: the iterator refuses the state, because another kind of iterator saved it, or
        the state is not JSON.
    """
    try:
        data.set_state(json.loads(content) if is_json else content)
    except Exception as error:  # of any type, because the user has written `set_state`
        raise CheckpointError(
            f"Checkpoints: step {step}: data={show(data)} refuses the state that was saved with "
            f"the step: {type(error).__name__}: {error}\nPass an iterator like the one that was "
            "saved, such as iter(shard_batches(...)) around the same loader. Without data=..., "
            "only the model is restored."
        ) from error


def _encoded(iterator: Any) -> bytes:
    """Returns the bytes to write for a data iterator or a state.

    Raises:
      TypeError: it is neither an iterator with ``get_state`` nor a state, the state is neither
        bytes nor JSON values, or it has keys that are no strings.
    """
    if not isinstance(iterator, _STATES) and not hasattr(iterator, "get_state"):
        raise _no_iterator(iterator, "or its state of bytes or JSON values, ")
    state = iterator.get_state() if hasattr(iterator, "get_state") else iterator
    if isinstance(state, bytes):
        return state
    try:
        encoded = json.dumps(state, indent=4).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"save: expected a data state of bytes or JSON values, got {state!r}: {error}"
        ) from None
    # Other keys are refused, because `json` writes them as strings: 0 would come back as "0", or be
    # lost next to a "0".
    wrong = [f"  state{place}" for place in _places_of_other_keys(state)]
    head = "save: expected a data state whose keys are strings, got these keys:"
    raise_if_any(TypeError, head, wrong, "Use str(key), and convert it back in set_state.")
    return encoded


def _places_of_other_keys(value: Any) -> Iterator[str]:
    """Yields the places of keys that are no strings in a JSON value: ``['files'][2][0]``."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    for key, child in children:
        if isinstance(value, dict) and not isinstance(key, str):
            yield f"[{key!r}]"
        for place in _places_of_other_keys(child):
            yield f"[{key!r}]{place}"
