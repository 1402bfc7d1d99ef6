"""``Checkpoints``: the checkpoints of a training, by step."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .. import _compat
from ..core.flatten import flatten
from ..errors import CheckpointError, NoCheckpointError
from ..fitting import suggestion
from .library import as_folder, orbax
from .named import named
from .restoring import restore
from .saving import snapshot
from .stored import first_line

T = TypeVar("T")

_TRIES = 20


class Checkpoints:
    """The checkpoints of a training: one for each step that was saved, the last few kept.

    A thin layer over Orbax's ``CheckpointManager``, whose directories these are. It is a context
    manager, which waits for what is being written.

    Args:
      directory: where the steps are; it is made.
      keep: how many steps are kept; None keeps all.
      keep_every: steps that are a multiple of this are kept besides.
      every: :meth:`save` skips steps that are no multiple of this.
      asynchronous: whether :meth:`save` returns as soon as the arrays may change again, and the
        writing goes on by itself.

    Raises:
      ValueError: a number is less than 1.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import Checkpoints
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> folder = tempfile.mkdtemp()
      >>> with Checkpoints(folder, keep=2) as checkpoints:
      ...     start = checkpoints.resume(model) or 0  # nothing there yet
      ...     for step in range(start + 1, 6):
      ...         _ = checkpoints.save(step, model)
      >>> with Checkpoints(folder, keep=2) as checkpoints:
      ...     checkpoints.steps, checkpoints.resume(model)
      ((4, 5), 5)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        every: int = 1,
        asynchronous: bool = True,
    ):
        numbers = {"keep": keep, "keep_every": keep_every, "every": every}
        wrong = [f"{k}={n!r}" for k, n in numbers.items() if n is not None and n < 1]
        if wrong:
            raise ValueError(f"Checkpoints: {', '.join(wrong)} must be at least 1.")
        self._folder = as_folder(directory)
        self._every = every
        ocp = orbax()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, enable_async_checkpointing=asynchronous
        )
        self._manager = self._listed(
            lambda: ocp.CheckpointManager(
                self._folder, options=options, item_handlers=ocp.StandardCheckpointHandler()
            )
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, in order."""
        return tuple(sorted(self._manager.all_steps()))

    @property
    def latest(self) -> int | None:
        """The last of them; None if there is none."""
        return max(self.steps, default=None)

    @_compat.api_boundary
    def save(self, step: int, tree: Any, *, force: bool = False) -> bool:
        """Saves one step, as :func:`~nnx_sharding.checkpoint.save` does.

        Args:
          step: its number, larger than those there are.
          tree: what is saved. It may change as soon as this returns.
          force: whether it is saved even if its turn has not come.

        Returns:
          Whether it was its turn.

        Raises:
          ValueError: the step is negative, there is this step, or a later one; or as for ``save``.
          TypeError: the step is not an integer, or as for ``save``.
          CheckpointError: this one, or one whose writing went on since, could not be written.
        """
        step = _step_number("save", step)
        if step % self._every and not force:
            return False
        taken = snapshot("Checkpoints.save", tree)
        latest = self._manager.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"Checkpoints.save: step {step} does not come after step {latest}, which is there."
            )
        try:
            return bool(self._manager.save(step, args=taken.request(), force=True))
        except Exception as error:
            raise self._failed(error) from error

    @_compat.api_boundary
    def restore(
        self,
        tree: Any,
        sharding: Any = None,
        mesh: Any = None,
        *,
        step: int | None = None,
        only: Any = ...,
        cast: bool = False,
    ) -> Any:
        """Restores one step, the last by default, as :func:`~nnx_sharding.checkpoint.restore` does.

        Args:
          tree: what is filled.
          sharding: as there, and so are ``mesh``, ``only`` and ``cast``.
          mesh: likewise.
          step: which step; None for the last one.
          only: likewise.
          cast: likewise.

        Returns:
          ``tree``, as there.

        Raises:
          NoCheckpointError: there is no step, or not this one.
          CheckpointError: it cannot be read or does not fit; and the others that ``restore`` has.
          TypeError: the step is not an integer.
          ValueError: the step is negative.
        """
        self.wait()

        def read(step: int) -> Any:
            path = self._folder / str(step)
            return restore(path, tree, sharding, mesh, only=only, cast=cast)

        if step is None:
            last = self._last(read)
            if last is None:
                raise NoCheckpointError(f"Checkpoints.restore: no steps found in {self._folder}.")
            return last[1]
        step, steps = _step_number("restore", step), self.steps
        if step not in steps:
            raise NoCheckpointError(
                f"Checkpoints.restore: there is no step {step} in {self._folder}, only "
                f"{', '.join(map(str, steps)) or 'nothing'}{suggestion(step, steps)}."
            )
        return read(step)

    @_compat.api_boundary
    def resume(self, tree: Any, sharding: Any = None, mesh: Any = None) -> int | None:
        """Brings a training to its last step, in place, if there is one.

        If another process writes steps here and deletes the last one while it is read, the one
        that is the last then is taken.

        Args:
          tree: modules, optimizers and Variables, filled or abstract.
          sharding: as for :meth:`restore`.
          mesh: likewise.

        Returns:
          The step, or None: then nothing is changed.

        Raises:
          TypeError: ``tree`` has arrays outside of Variables, which cannot be changed in place.
          CheckpointError: the last step cannot be read or does not fit. An earlier one may:
            ``restore(tree, step=…)``.
        """
        flat = flatten(tree)
        outside = [each.path for each in named(flat) if each.slot in flat.structure.root_slots]
        if outside:
            raise TypeError(
                "Checkpoints.resume: these arrays belong to no module or Variable and cannot be "
                f"changed in place: {', '.join(outside)}. Use restore, which returns them."
            )
        self.wait()
        last = self._last(lambda step: restore(self._folder / str(step), tree, sharding, mesh))
        return None if last is None else last[0]

    def _last(self, read: Callable[[int], T]) -> tuple[int, T] | None:
        """The last step and what ``read`` makes of it; None if there is no step.

        Raises:
          CheckpointError: it cannot be read, although nobody deletes it.
        """
        step = self.latest
        for _ in range(_TRIES):
            if step is None:
                return None
            try:
                return step, read(step)
            except CheckpointError as error:
                tried = step
                self._listed(self._manager.reload)
                step = self.latest
                if step == tried:
                    raise
                if step is None:
                    raise NoCheckpointError(
                        f"Checkpoints: step {tried} in {self._folder} was deleted while it was "
                        "read, and no other step is left."
                    ) from error
        raise self._deleted()

    def _listed(self, read: Callable[[], T]) -> T:
        """What ``read`` makes of the list of steps, which fails while another process deletes."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return read()
        raise self._deleted()

    def _deleted(self) -> NoCheckpointError:
        return NoCheckpointError(
            f"Checkpoints: {_TRIES} times, steps in {self._folder} were deleted while they were "
            "read. Let the process that writes them keep more, by keep=..."
        )

    @_compat.api_boundary
    def wait(self) -> None:
        """Waits until all that was saved is written.

        Raises:
          CheckpointError: it could not be.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    @_compat.api_boundary
    def close(self) -> None:
        """Waits, and ends what runs in the background. There is no ``save`` afterwards."""
        try:
            self._manager.close()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"Checkpoints: a step in {self._folder} could not be written: {first_line(error)}"
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step_number(method: str, step: Any) -> int:
    """The number of a step, of NumPy or of Python.

    Raises:
      TypeError: it is not an integer.
      ValueError: it is negative.
    """
    message = f"Checkpoints.{method}: expected a step of 0 or more, got {step!r}."
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(message) from None
    if isinstance(step, bool | np.bool_):
        raise TypeError(message)
    if number < 0:
        raise ValueError(message)
    return number
