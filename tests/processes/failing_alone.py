"""Each process fails alone in each operation on files: all of them raise the error, in seconds."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    import preamble  # noqa: F401  (joins the others before anything is computed)

import jax
import numpy as np
import orbax.checkpoint as ocp
from checkpoint import Data, Model, assert_same, mesh_of
from flax import nnx

from nnx_sharding import _publishing as publishing
from nnx_sharding.checkpoint import (
    Checkpoints,
    files,
    load_safetensors,
    restore,
    safetensors,
    save,
    save_safetensors,
    steps,
    stored,
    tensor_files,
    tensor_release,
)
from nnx_sharding.errors import CheckpointError

reading = sys.modules["nnx_sharding.checkpoint.restore"]  # the name is that of the function
LIMIT = 30.0  # seconds on a machine with other work; by itself, each takes less than three
RULES = {"kernel": "kernel", "bias": "bias"}
HANDLER = ocp.StandardCheckpointHandler
FIRST = "only the first process does it"


def failing(where, name, error=OSError):
    return mock.patch.object(where, name, side_effect=error("broken"))


class BrokenFuture:
    """A write that fails in the background."""

    def result(self, timeout=None):
        raise OSError("broken")


def failing_later():
    async def async_save(self, directory, args):
        return [BrokenFuture()]

    return mock.patch.object(HANDLER, "async_save", async_save)


def weights(scale):
    model = Model(mesh_of((2, 4)), scale=scale)
    return nnx.Dict(kernel=model.kernel, bias=model.bias)


class Operations:
    """What is called, with `is_failing` in the process that has another argument."""

    def __init__(self, folder):
        self.one, self.many, self.tensors = (folder / name for name in ("one", "many", "tensors"))
        save(self.one, Model(mesh_of((2, 4))))
        save(folder / "two", Model(mesh_of((2, 4)), scale=2))
        with self.checkpoints() as checkpoints:
            checkpoints.save(1, Model(mesh_of((2, 4))), data=Data())
        save_safetensors(self.tensors, weights(1), RULES)
        save_safetensors(folder / "tensors-two", weights(2), RULES)

    def checkpoints(self):
        return Checkpoints(self.many)

    def save(self, tree=None, path=None):
        save(path or self.one, tree or Model(mesh_of((2, 4)), scale=2), overwrite=True)

    def save_step(self, step=2, data=None, wait=False):
        with self.checkpoints() as checkpoints:
            checkpoints.save(step, Model(mesh_of((2, 4)), scale=2), data=data or Data())

    def save_tensors(self, model=None, path=None):
        model = model or weights(2)
        save_safetensors(path or self.tensors, model, RULES, overwrite=True, max_shard_size=1)

    def restore(self, path=None, **options):
        self.read(lambda model: restore(path or self.one, model, **options))

    def restore_replicated(self):
        restore(self.one, Model(mesh_of((2, 4)), scale=3), only=nnx.PathContains("bias"))

    def resume(self, **options):
        with self.checkpoints() as checkpoints:
            self.read(lambda model: checkpoints.resume(model, data=Data(), **options))

    def load(self, path=None, **options):
        model = weights(3)
        try:
            load_safetensors(path or self.tensors, model, RULES, **options)
        finally:
            self.loaded = model

    def read(self, function):
        model = Model(mesh_of((2, 4)), scale=3)
        try:
            function(model)
        except BaseException:
            assert_same(model, Model(mesh_of((2, 4)), scale=3))  # nothing has changed
            raise
        assert_same(model, Model(mesh_of((2, 4))))

    def check(self):
        """What was there before is there, and nothing else."""
        self.restore()
        self.resume()
        self.load()
        np.testing.assert_array_equal(
            self.loaded.bias.addressable_shards[0].data, np.arange(16.0, dtype=np.float32)
        )
        if jax.process_index() == 0:
            left = [x.name for x in self.one.parent.iterdir()]
            known = {"one", "two", "many", "tensors", "tensors2", "tensors-two"}
            assert set(left) <= known, left
            left = [x.name for x in self.tensors.iterdir()]
            assert left == ["model.safetensors"], left


def replaced(where, name, by):
    """This process opens the other checkpoint, as if a job had replaced the one of the caller."""
    function = getattr(where, name)

    def open_other(caller, folder):
        return function(caller, Path(folder).parent / by)

    return mock.patch.object(where, name, open_other)


def other(**arguments):
    """Calls the operation with other arguments, in the process that fails."""
    return arguments


CASES = {
    "save: what cannot be stored": ("save", other(tree={"x": object()})),
    "save: another tree": ("save", other(tree={"kernel": np.ones(3)})),
    "save: another path": ("save", other(path=Path("elsewhere").absolute())),
    "save: begins to write": ("save", failing(HANDLER, "async_save")),
    "save: writes": ("save", failing_later()),
    "save: interrupted": ("save", failing(HANDLER, "async_save", KeyboardInterrupt)),
    "save: finalizes": ("save", failing(HANDLER, "finalize"), FIRST),
    "save: makes the draft": ("save", failing(publishing.Path, "mkdir"), FIRST),
    "save: publishes": ("save", failing(publishing, "exchange"), FIRST),
    "restore: no such path": ("restore", other(path=Path("nowhere").absolute())),
    "restore: a chunk is cut": ("restore", failing(stored, "_read", CheckpointError)),
    "restore: another tree": ("restore", other(only=nnx.Param)),
    "restore: another checkpoint": ("restore_replicated", replaced(reading, "opened", "two")),
    "restore: converts": ("restore", failing(reading, "_converted", CheckpointError)),
    "save_step: another step": ("save_step", other(step=3)),
    "save_step: what is no state": ("save_step", other(data={"x": object()})),
    "save_step: begins to write": ("save_step", failing(HANDLER, "async_save")),
    "save_step: writes": ("save_step", failing_later()),
    "save_step: writes the state": ("save_step", failing(steps, "_file_name")),
    "save_step: finalizes": ("save_step", failing(HANDLER, "finalize"), FIRST),
    "resume: a chunk is cut": ("resume", failing(stored, "_read", CheckpointError)),
    "resume: the state is missing": ("resume", failing(steps, "_file_name")),
    "resume: sees no steps": (
        "resume",
        mock.patch.object(ocp.CheckpointManager, "all_steps", lambda *_: []),
    ),
    "resume: another step": ("resume", other(step=7)),
    "load: no such path": ("load", other(path=Path("nowhere").absolute())),
    "load: is cut": ("load", failing(tensor_files, "_read_into")),
    "load: other files": ("load", replaced(tensor_files, "open_tensors", "tensors-two")),
    "load: another tree": ("load", other(only=nnx.PathContains("bias"))),
    "save_tensors: another tree": (
        "save_tensors",
        other(model=nnx.Dict(bias=nnx.Param(np.ones(3)))),
    ),
    "save_tensors: another path": ("save_tensors", other(path=Path("elsewhere").absolute())),
    "save_tensors: writes": ("save_tensors", failing(tensor_files.Writer, "flush")),
    "save_tensors: creates": ("save_tensors", failing(tensor_files, "create"), FIRST),
    "save_tensors: publishes": ("save_tensors", failing(tensor_release, "exchange"), FIRST),
}

# After these, a program waits on the devices, or Orbax in a barrier: the job has to be restarted.
LAST = {
    "save: computes checksums": ("save", failing(files, "checksums", MemoryError)),
    "restore: computes checksums": ("restore", failing(stored, "checksums", MemoryError)),
    "restore: computes": ("restore", failing(reading, "_converted", MemoryError)),
    "load: computes": ("load", failing(safetensors, "place_arrays", MemoryError)),
    "save_step: in Orbax": ("save_step", failing(ocp.CheckpointManager, "_validate_args")),
    "save_step: in Orbax, later": (
        "save_step",
        failing(ocp.CheckpointManager, "_get_old_steps_to_remove"),
    ),
}


def run(operations, name, rank):
    """One process fails; returns the seconds until this one has its error."""
    operation, fault, *first = (CASES | LAST)[name]
    if first and rank:
        return None
    is_failing = jax.process_index() == rank
    arguments = fault if isinstance(fault, dict) and is_failing else {}
    context = fault if is_failing and not isinstance(fault, dict) else contextlib.nullcontext()
    start = time.monotonic()
    try:
        with context:
            getattr(operations, operation)(**arguments)
    except BaseException as caught:
        error = caught
    else:
        raise AssertionError(f"{name}, {rank}: no error")
    seconds = time.monotonic() - start
    text = f"{type(error).__name__}: {error}"
    assert seconds < LIMIT, f"{name}, {rank}: {seconds:.1f} s until {text}"
    is_interrupted = is_failing and "interrupted" in name
    expected = KeyboardInterrupt if is_interrupted else (CheckpointError, TypeError, ValueError)
    if name in LAST:
        expected = (*expected, MemoryError) if is_failing else CheckpointError
    assert isinstance(error, expected), f"{name}, {rank}: {text}"
    known = f"process {rank} failed" in str(error) or "the same arguments" in str(error)
    assert is_failing or known, f"{name}, {rank}: {text}"
    return seconds


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    operations = Operations(folder)
    os.chdir(folder.parent)
    chosen = sys.argv[2:] or [*CASES]
    if chosen[0] in LAST:
        [name, rank] = chosen
        seconds = run(operations, name, int(rank))
        print(json.dumps([1, seconds]), flush=True)
        time.sleep(2)  # for the others, which would hear that this one has ended
        os._exit(0)  # threads may wait for ever
    longest = 0.0
    count = 0
    for name in chosen:
        for rank in range(jax.process_count()):
            seconds = run(operations, name, rank)
            if seconds is not None:
                longest, count = max(longest, seconds), count + 1
                print(f"{name} ({rank}): {seconds:.1f} s", file=sys.stderr, flush=True)
                operations.check()
    print(json.dumps([count, longest]), flush=True)
