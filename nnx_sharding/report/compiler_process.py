"""Compilers in separate processes: a crash of one ends nothing else.

A ``ProcessPoolExecutor`` would import the user's program in each process, and a crash of one would
end them all.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

from .. import _compat
from ..partition.topology import topology_devices
from ..transforms.stages import Compiled, Lowered

# A number of virtual CPU devices, or a TPU topology and its number of slices.
Devices: TypeAlias = int | tuple[str, int]


class CompilerCrash(jax.errors.JaxRuntimeError):  # type: ignore[misc]
    """A compiler ended its process."""


class CompilerProcess:
    """A process that compiles one program after another."""

    def __init__(self, devices: Devices):
        self._devices = devices
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
        """Compiles a program for its figures; it cannot be called.

        A ``CompilerCrash`` if the compiler ended its process.
        """

        def compile_with(stage: Any, more: Mapping[str, Any]) -> Any:
            return _compat.compile_elsewhere(stage, {**(options or {}), **more}, self._ask)

        return lowered._compiled_to(compile_with(lowered._stage, {}), compile_with)

    def close(self) -> None:
        """Ends the process."""
        self._errors.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, *request: Any) -> dict[str, Any]:
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer: dict[str, Any] | str = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            self._process = None
            raise CompilerCrash(self._last_words(process)) from None
        if isinstance(answer, str):
            raise jax.errors.JaxRuntimeError(answer)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if "force_host_platform_device_count" not in flag]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)}
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({self._devices!r})"]
        pipe, errors = subprocess.PIPE, self._errors
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        """How the process ended, with the check that failed in XLA or the error of Python."""
        process.communicate()
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace")
        self._errors.truncate(self._errors.seek(0))
        if process.returncode >= 0:
            return f"the compiler could not start:\n{printed[-2000:]}"
        name = signal.Signals(-process.returncode).name
        return "\n".join([f"the compiler crashed with {name}", *re.findall(_CHECK, printed)])


_CHECK = re.compile(r"^F\d{4} .*", re.MULTILINE)


def serve(devices: Devices) -> None:
    """Compiles the programs requested on standard input, until that ends."""
    requests: Any = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries also print to standard output
    if isinstance(devices, int):
        jax.config.update("jax_num_cpu_devices", devices)
    found = jax.devices() if isinstance(devices, int) else topology_devices(*devices)
    by_id = {device.id: device for device in found}
    while requests.peek(1):
        try:
            answer: Any = _compat.compile_module(by_id, *pickle.load(requests))
        except Exception as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()
