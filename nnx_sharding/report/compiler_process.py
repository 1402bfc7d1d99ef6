"""Compilers in separate processes: a crash of one ends nothing else."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from typing import Any, BinaryIO, TypeAlias

import jax

from .. import _compat
from ..partition.topology import topology_devices
from ..transforms.stages import Compiled, Lowered

# A number of virtual CPU devices, or a TPU topology and its number of slices.
Devices: TypeAlias = int | tuple[str, int]


class CompilerCrash(RuntimeError):
    """A compiler ended its process."""


class CompilerProcess:
    """A process that compiles one program after another."""

    def __init__(self, devices: Devices):
        self._devices = devices
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None

    def compile(self, lowered: Lowered, options: dict[str, Any] | None) -> Compiled:
        """Compiles a program for its figures; it cannot be called.

        A ``CompilerCrash`` if the compiler ended its process.
        """
        program = _compat.compile_elsewhere(lowered._stage, options, self._ask)
        return lowered._compiled_to(program)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._ended(self._process)

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        """What a process that has ended printed to standard error."""
        process.communicate()
        assert self._errors is not None
        with self._errors as errors:
            errors.seek(0)
            self._process = None
            return errors.read().decode(errors="replace")

    def _ask(self, *request: Any) -> dict[str, Any]:
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            raise CompilerCrash(self._last_words(process)) from None
        if isinstance(answer, str):
            raise jax.errors.JaxRuntimeError(answer)
        result: dict[str, Any] = answer
        return result

    def _started(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if "force_host_platform_device_count" not in flag]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)}
        program = f"from {__name__} import serve; serve({self._devices!r})"
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        """How the process ended, with the check that failed in XLA or the error of Python."""
        code = process.wait()
        printed = self._ended(process)
        if code >= 0:  # an error of Python
            return f"the compiler could not start, with exit code {code}:\n{printed[-2000:]}"
        checks = re.findall(r"^F\d{4} .*", printed, re.M)
        return "\n".join([f"the compiler crashed with {signal.Signals(-code).name}", *checks])


def serve(devices: Devices) -> None:
    """Compiles the programs requested on standard input, until that ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries also print to standard output
    if isinstance(devices, int):
        jax.config.update("jax_num_cpu_devices", devices)
    found = jax.devices() if isinstance(devices, int) else topology_devices(*devices)
    by_id = {device.id: device for device in found}
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = _compat.compile_module(by_id, *request)
        except Exception as error:
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()
