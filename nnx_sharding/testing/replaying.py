"""``replay`` runs one step of a training run again, from a checkpoint, to find a spike's cause.

If the step repeats bit for bit and returns the recorded result, the cause is the data or the model.
If the step repeats and returns another result, the state or the batch is not what the run had. If
the step does not repeat, the step itself is to blame.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint import restore
from ..errors import raise_if_any
from .arrays import arrays_of, unequal_arrays
from .rounding import is_inexact


def replay(
    step: Callable[..., Any],
    checkpoint: str | os.PathLike[str],
    *batch: Any,
    into: tuple[Any, ...],
    recorded: Any = None,
    runs: int = 2,
) -> Any:
    """Runs one step again from a checkpoint, and fails if the runs are not equal bit for bit.

    Args:
      step: the step, jitted or not, called with what is restored and then the batch.
      checkpoint: the directory of a checkpoint that was saved of ``into`` before the step, by
        :func:`~nnx_sharding.checkpoint.save`; of :class:`~nnx_sharding.checkpoint.Checkpoints`, the
        directory of one step.
      *batch: the other arguments of the step.
      into: what the checkpoint was saved of, such as ``(model, optimizer)``, with arrays or
        abstract. Modules are filled in place, and hold the state after the step in the end.
      recorded: what the step returned in the run, such as the logged loss; None if unknown.
      runs: how often the step runs.

    Returns:
      What the step returns.

    Raises:
      AssertionError: the runs differ, or their result is not the recorded one; it lists what.
      NoCheckpointError: there is no checkpoint.
      ValueError: there are no runs.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import jit
      >>> from nnx_sharding.checkpoint import save
      >>> from nnx_sharding.testing import replay
      >>> step = jit(lambda model, x: (model(x) ** 2).mean())
      >>> model, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> save(folder, (model,))
      >>> loss = step(model, x)
      >>> bool(replay(step, folder, x, into=(model,), recorded=loss) == loss)
      True
    """
    if runs < 1:
        raise ValueError(f"replay: expected at least one run, got runs={runs}.")
    name = getattr(step, "__name__", "the step")
    parameters = [*inspect.signature(step).parameters]
    first: dict[str, np.ndarray[Any, Any]] = {}  # the arrays after the first run, by expression
    result = None
    for run in range(1, runs + 1):
        args = restore(checkpoint, into)
        result = step(*args, *batch)
        # The first parameters get the restored arguments. The parameters that get the batch are
        # not named here, because a step does not change the batch.
        named = {"the result": result, **dict(zip(parameters, args, strict=False))}
        # Arrays are copied now, because the next run is restored into the same modules.
        arrays = {key: np.array(array) for key, array in arrays_of(named).items()}
        if run == 1:
            first = arrays
        else:
            head = f"run {run} of {name} is not equal bit for bit to the first:"
            raise_if_any(AssertionError, head, unequal_arrays(first, arrays))
    if recorded is not None:
        # A log has Python's numbers. They get the types of the result, because numbers of different
        # types are not equal bit for bit.
        alike = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), recorded, result)
        expected = arrays_of({"the result": alike})
        differences = unequal_arrays(_without_nan_bits(expected), _without_nan_bits(first))
        head = f"{name} repeats, but does not return what was recorded:"
        raise_if_any(AssertionError, head, differences)
    return result


def _without_nan_bits(arrays: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns arrays in which all NaN have the same bits.

    A log keeps neither the sign nor the payload of a NaN.
    """
    return {
        name: np.where(np.isnan(x), np.array(np.nan, x.dtype), x) if is_inexact(x) else x
        for name, x in arrays.items()
    }
