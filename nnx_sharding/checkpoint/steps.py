"""``Checkpoints``: the checkpoints of a training run, by step."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import orbax.checkpoint as ocp

from .. import _compat
from ..core.flatten import flatten
from ..errors import CheckpointError, NoCheckpointError
from ..fitting import suggestion
from .folder import as_folder, first_line
from .names import named_arrays
from .restore import restore
from .save import save_args

T = TypeVar("T")

_TRIES = 20


class Checkpoints:
    """The checkpoints of a training run: one for each saved step, of which the last few are kept.

    A thin layer over Orbax's ``CheckpointManager``, with its directories and the names of its
    options. As a context manager it waits at its end for what is still being written.

    Args:
      directory: the directory of the steps; it is made.
      max_to_keep: how many steps are kept; None keeps all.
      keep_period: steps that are a multiple of this are kept as well.
      save_interval_steps: :meth:`save` skips steps that are not a multiple of this.
      enable_async_checkpointing: whether :meth:`save` returns as soon as the arrays may change
        again, and writes in the background.

    Raises:
      ValueError: a number is less than 1.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from nnx_sharding.checkpoint import Checkpoints
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> with Checkpoints(tempfile.mkdtemp(), max_to_keep=2) as checkpoints:
      ...     start = checkpoints.resume(model) or 0  # nothing there yet
      ...     for step in range(start + 1, 6):
      ...         _ = checkpoints.save(step, model)
      ...     checkpoints.resume(model), checkpoints.steps
      (5, (4, 5))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 3,
        keep_period: int | None = None,
        save_interval_steps: int = 1,
        enable_async_checkpointing: bool = True,
    ):
        kept = {"max_to_keep": max_to_keep, "keep_period": keep_period}
        numbers = {**kept, "save_interval_steps": save_interval_steps}
        wrong = [f"{k}={n!r}" for k, n in numbers.items() if n is not None and n < 1]
        if wrong:
            raise ValueError(f"Checkpoints: {', '.join(wrong)} must be at least 1.")
        self._folder = as_folder(directory)
        self._interval = save_interval_steps  # Orbax would save the first step in any case
        options = ocp.CheckpointManagerOptions(
            enable_async_checkpointing=enable_async_checkpointing, **kept
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
        """The last step; None if there is none."""
        return max(self.steps, default=None)

    @_compat.api_boundary
    def save(self, step: int, tree: Any, *, force: bool = False) -> bool:
        """Saves one step, as :func:`~nnx_sharding.checkpoint.save` does.

        Args:
          step: its number, larger than those of all saved steps.
          tree: what to save. It may change as soon as this returns.
          force: whether to save a step that is not a multiple of ``save_interval_steps``.

        Returns:
          Whether the step was saved.

        Raises:
          TypeError, ValueError: the step is not an integer, negative or not after all saved steps;
            or as for ``save``.
          CheckpointError: this step, or one that was still being written, could not be written.
        """
        step = _step_number("save", step)
        if step % self._interval and not force:
            return False
        args = save_args("Checkpoints.save", tree)
        latest = self._manager.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"Checkpoints.save: step {step} does not come after step {latest}, which exists."
            )
        with self._writing():
            return bool(self._manager.save(step, args=args, force=True))

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
        """Restores one step, as :func:`~nnx_sharding.checkpoint.restore` does.

        The arguments, the result and the errors are those of that function. ``step`` is the number
        of the step; None for the last one.

        Raises:
          NoCheckpointError: there is no step, or not this one.
          TypeError, ValueError: the step is not an integer, or negative.
        """
        self.wait()

        def read(step: int) -> Any:
            return restore(self._folder / str(step), tree, sharding, mesh, only=only, cast=cast)

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
        """Restores the last step of a training run in place, if there is one.

        If another process deletes the last step while it is read, the step that is the last by
        then is restored.

        Args:
          tree: modules, optimizers and Variables, with arrays or abstract.
          sharding: where to place arrays, as for :meth:`restore`.
          mesh: the mesh of partition specs.

        Returns:
          The step, or None: then nothing is changed.

        Raises:
          TypeError: ``tree`` has arrays outside of Variables, which cannot be changed in place.
          CheckpointError: the last step cannot be read or does not fit. An earlier one may:
            ``restore(tree, step=…)``.
        """
        flat = flatten(tree)
        outside = [x.path for x in named_arrays(flat) if x.slot in flat.structure.root_slots]
        if outside:
            raise TypeError(
                "Checkpoints.resume: these arrays belong to no module or Variable and cannot be "
                f"changed in place: {', '.join(outside)}. Use restore, which returns them."
            )
        self.wait()
        last = self._last(lambda step: restore(self._folder / str(step), tree, sharding, mesh))
        return None if last is None else last[0]

    def _last(self, read: Callable[[int], T]) -> tuple[int, T] | None:
        """The last step and what ``read`` returns for it; None if there is no step."""
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
        """What ``read``, which lists the steps, returns; it fails while another process deletes."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return read()
        raise self._deleted()

    def _deleted(self) -> NoCheckpointError:
        return NoCheckpointError(
            f"Checkpoints: {_TRIES} times, steps in {self._folder} were deleted while they were "
            "read. Let the process that writes them keep more, by max_to_keep=..."
        )

    @_compat.api_boundary
    def wait(self) -> None:
        """Waits until everything that was saved is written.

        Raises:
          CheckpointError: something could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()

    @_compat.api_boundary
    def close(self) -> None:
        """Waits, and ends what runs in the background; nothing can be saved afterwards."""
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"Checkpoints: a step in {self._folder} could not be written: {first_line(error)}"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step_number(method: str, step: Any) -> int:
    """The number of a step, a Python or NumPy integer."""
    message = f"Checkpoints.{method}: expected a step of 0 or more, got {step!r}."
    if isinstance(step, bool | np.bool_):
        raise TypeError(message)
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(message) from None
    if number < 0:
        raise ValueError(message)
    return number
