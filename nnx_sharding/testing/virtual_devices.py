"""Calls a function in a new process that has a given number of virtual CPU devices.

JAX fixes the number of devices when it starts, so a test with 8 devices cannot have 1,024. The
function and its arguments go to the new process as a pickle. An error that the function raises
comes back; its result does not. The new process rebuilds meshes from its own devices, and random
keys from their words.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..diagnostics.progress import QUIET, progress
from ..partition.mesh import make_mesh
from .launcher import with_virtual_cpus

# Without cloudpickle, only functions that can be imported by name can be sent.
_HAS_CLOUDPICKLE = importlib.util.find_spec("cloudpickle") is not None


def call_with_devices(count: int, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls a function in a new process that has ``count`` virtual CPU devices.

    Raises:
      TypeError: the function or an argument cannot be sent to another process.
      RuntimeError: the process ended without an answer, such as for lack of memory.
      BaseException: what the function raises.
    """
    try:
        call = _pickled((function, args, kwargs))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        remedy = "" if _HAS_CLOUDPICKLE else " Or install cloudpickle, which can send any function."
        raise TypeError(
            f"devices={count} runs the step in another process, and cannot send it there: {error}. "
            f"Define the step and its modules at the top level of a module.{remedy}"
        ) from error
    with tempfile.TemporaryDirectory() as folder, progress(f"{count:,} virtual devices"):
        Path(folder, "call").write_bytes(call)
        # The program is passed with -c, because -m would import this file twice.
        program = f"import sys; from {__name__} import answer; answer(sys.argv[1])"
        command = [sys.executable, "-c", program, folder]
        result = subprocess.run(command, env=_environment(count), check=False)
        outcome = Path(folder, "answer")
        if not outcome.exists():
            raise RuntimeError(
                f"the process with {count} virtual devices ended with code {result.returncode} and "
                "without an answer; what it printed is above. It may have run out of memory: use a "
                "smaller model."
            )
        raised = pickle.loads(outcome.read_bytes())
    if raised is not None:
        raise raised


def _environment(count: int) -> dict[str, str]:
    """Returns the variables of a process with virtual devices, which prints no line of XLA."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return with_virtual_cpus(count) | {
        "JAX_PLATFORMS": "cpu",
        QUIET: "1",  # the new process shows no progress, because this one does
        "PYTHONPATH": paths,  # tests import modules from their own folder
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _pickled(value: Any) -> bytes:
    """Pickles functions, modules, arrays, keys, meshes and shardings.

    A mesh and a key hold objects of this process, so the other process rebuilds them.
    """
    base: Any = pickle.Pickler
    if _HAS_CLOUDPICKLE:  # cloudpickle can send functions that cannot be imported
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]

        base = cloudpickle.Pickler

    class Pickler(base):  # type: ignore[misc]
        # `pickle` calls this method first for each value. The method returns a function that makes
        # the value in the other process, with its arguments, or NotImplemented for the usual way.
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Mesh):
                return make_mesh, (dict(value.shape), value.axis_types)
            if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                words = np.asarray(jax.random.key_data(value))
                return _key, (words, str(jax.random.key_impl(value)))
            return super().reducer_override(value) if _HAS_CLOUDPICKLE else NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _key(words: Any, implementation: str) -> jax.Array:
    """Rebuilds a random key from its words."""
    return jax.random.wrap_key_data(words, impl=implementation)


def answer(path: str) -> None:
    """Runs in the other process: makes the call in a folder, and writes the error of the call.

    The file ``call`` in the folder has the pickled function and its arguments. The file ``answer``
    gets the pickled error, or None.
    """
    folder, error = Path(path), None
    try:
        function, args, kwargs = pickle.loads((folder / "call").read_bytes())
        function(*args, **kwargs)
    except BaseException as raised:
        error = raised.with_traceback(None)
        error.__cause__ = error.__context__ = None  # errors that might not be picklable
    try:
        outcome = pickle.dumps(error)
        pickle.loads(outcome)
    except Exception:  # an error of the user's code whose class cannot be sent
        outcome = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    # The file is renamed when it is complete, so that half an answer does not count as one.
    (folder / "part").write_bytes(outcome)
    (folder / "part").rename(folder / "answer")
