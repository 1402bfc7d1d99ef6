"""Compiles in another process what JAX has lowered in this one.

A *stage* of JAX (``jax.stages.Lowered``) is compiled by its *backend*, a client of XLA. For the
time of one compilation, ``compile_elsewhere`` gives the stage another backend. That backend passes
on the *module*, the program as bytecode of MLIR, and returns an object with the figures of the
executable. The other process gets the figures by ``compile_module``.

``stage._lowering.compile_args`` are the arguments that JAX passes to the compilation of a stage,
among them the ``"backend"``. They are JAX's own dict, so each change is undone afterwards. XLA
writes its log to the standard error of the process, and has a level for the log that is global.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import sys
import tempfile
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax

from .jax_names import private_name

_xla_client: Any = private_name("jax._src.lib", "xla_client")
_make_ir_context: Any = private_name("jax._src.interpreters.mlir", "make_ir_context")
_Module: Any = private_name("jax._src.lib.mlir", "ir.Module")
_min_compile_time: Any = private_name("jax._src.config", "persistent_cache_min_compile_time_secs")
_set_log_level: Any = private_name("jax._src.lib", "utils.absl_set_min_log_level", optional=True)
_CompileOnlyClient: Any = private_name("jax._src.lib", "_jax.CompileOnlyPyClient")

T = TypeVar("T")
# Compiles a module with options for the devices with these ids; returns what is read from it.
Compile: TypeAlias = Callable[[bytes, bytes, Sequence[int]], Mapping[str, Any]]

# The methods of an executable whose results `compile_module` returns by the names of the methods.
_METHODS_TO_CALL = (
    "get_parameter_shardings",
    "get_output_shardings",
    "get_output_memory_kinds",
    "cost_analysis",
)


@contextlib.contextmanager
def without_compiler_warnings() -> Iterator[None]:
    """Lets XLA log only errors within the block, in all threads."""
    if _set_log_level is None:  # None: this release of JAX cannot set the level
        yield
        return
    _set_log_level(2)  # 2 is the level of errors
    try:
        yield
    finally:
        _reset_log_level()


def _reset_log_level() -> None:
    """Gives XLA's log the level that the user chose by JAX's option or the environment.

    XLA has no function that returns the level, so the one before a block cannot be kept.
    """
    option = jax.config.jax_logging_level
    variable = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1")
    default = int(variable) if variable.isdigit() else 1
    levels = {"DEBUG": 0, "INFO": 0, "WARN": 1, "WARNING": 1, "ERROR": 2, "CRITICAL": 3}
    _set_log_level(levels.get(str(option).upper(), default))  # None and "NOTSET": no choice


@contextlib.contextmanager
def compiler_log(read: Callable[[str], tuple[list[T], str]]) -> Iterator[list[T]]:
    """Reads the compiler's log of a block; yields a list that gets the findings after the block.

    XLA writes to the file descriptor of standard error. Within the block, this descriptor is that
    of a temporary file. If the process has no standard error, the list stays empty.

    Args:
      read: a function that returns (findings in the log, the rest of the log). The rest goes to
        standard error after the block. The function must not raise, because the log would be lost.
    """
    findings: list[T] = []
    try:
        sys.stderr.flush()
        user_stderr = os.dup(2)  # 2 is the descriptor of standard error
    except OSError:  # there is no standard error
        yield findings
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        if _set_log_level is not None:  # None: this release of JAX cannot set the level
            _set_log_level(1)  # 1 is the level of warnings; the user may have switched them off
        try:
            yield findings
        finally:
            if _set_log_level is not None:
                _reset_log_level()
            sys.stderr.flush()
            os.dup2(user_stderr, 2)
            os.close(user_stderr)
            file.seek(0)
            findings_in_log, rest = read(file.read().decode(errors="replace"))
            findings += findings_in_log
            sys.stderr.write(rest)


def compile_elsewhere(stage: Any, options: Mapping[str, Any] | None, compile: Compile) -> Any:
    """Compiles a stage elsewhere, and returns a result of ``stage.compile`` that cannot run.

    Args:
      stage: the lowered stage of JAX. No other thread may compile it at the same time.
      options: the options of the compiler.
      compile: compiles a module elsewhere, as ``Compile`` above says.
    """
    arguments = stage._lowering.compile_args  # the arguments that JAX passes to the compilation
    backend = arguments["backend"]
    arguments["backend"] = _Backend(backend, compile)
    try:
        # Options are passed even if there are none, because without them the stage would keep the
        # result, and return it to a user who wants to run the program.
        return stage.compile(dict(options or {}))
    finally:
        arguments["backend"] = backend


@contextlib.contextmanager
def without_cache(stage: Any) -> Iterator[None]:
    """Keeps JAX from reading or writing its persistent cache for a stage within the block.

    A caller needs this if it sets ``xla_dump_to``, by which the compiler writes files about a
    program. The keys of the cache leave this option out, and no compiler runs for a program from
    the cache.
    """
    arguments = stage._lowering.compile_args  # the arguments that JAX passes to the compilation
    backend = arguments["backend"]
    # JAX finds nothing in the cache, because the version of the backend is a part of each key, and
    # this backend has a new random version.
    arguments["backend"] = _Uncached(backend)
    try:
        # JAX writes nothing, because it writes only programs that take longer than this to compile.
        with _min_compile_time(math.inf):
            yield
    finally:
        arguments["backend"] = backend


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a program does not fit into memory, by the compiler or at run time."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


class _Client:
    """A client of JAX with a version of its own, which is part of the keys of the cache.

    Attributes:
      client: the client that this one stands for; it has all other attributes.
      platform_version: the version of that client, with an addition.
    """

    def __init__(self, backend: Any, version: str):
        self.client, self.platform_version = backend, f"{backend.platform_version}, {version}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


class _Uncached(_Client):
    """A client whose programs are in no cache, because its version is a new random one."""

    def __init__(self, backend: Any):
        super().__init__(backend, str(uuid.uuid4()))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # JAX asks by `isinstance` whether a client compiles for a topology, and `isinstance` also
        # accepts this class.
        return type(self.client)


class _Backend(_Client):
    """A client that compiles elsewhere, for figures about a program that will not run.

    JAX calls the methods of this client when it compiles a stage, or reads a program from its
    persistent cache, and takes their results for executables of XLA. The cache keeps the results
    under keys with a version that no client with programs to run has.

    ``compile_bytes`` is the function that compiles a module in the other process (`Compile`).
    """

    def __init__(self, backend: Any, compile: Compile):
        super().__init__(backend, "figures only")
        self.compile_bytes = compile

    def compile_and_load(
        self, module: Any, executable_devices: Any, compile_options: Any
    ) -> types.SimpleNamespace:
        """Compiles a module elsewhere; returns an object with the figures of the executable.

        Args:
          executable_devices: the devices to compile for, in their order.
        """
        bytecode = io.BytesIO()
        module.operation.write_bytecode(bytecode)
        ids = [device.id for device in executable_devices]
        # The figures by name, as `compile_module` returns them in the other process.
        options = compile_options.SerializeAsString()
        figures = dict(self.compile_bytes(bytecode.getvalue(), options, ids))
        return _executable(figures)

    def deserialize_executable(self, data: bytes, *_: Any) -> types.SimpleNamespace:
        """Returns an earlier result of :meth:`compile_and_load` from the cache."""
        return _executable(pickle.loads(data))


def _executable(parts: Mapping[str, Any]) -> types.SimpleNamespace:
    """Returns an object that JAX takes for an executable; its methods return the parts.

    Args:
      parts: the figures that `compile_module` returns: results by the names of the methods, and
        the sizes under ``"memory"``. JAX's cache stores what ``serialize`` makes of them.
    """
    results = {**parts, "get_compiled_memory_stats": types.SimpleNamespace(**parts["memory"])}
    # The result is the default of the lambda's parameter, because a lambda that used the variable
    # of the loop would return the last result.
    methods: dict[str, Any] = {
        name: lambda result=result: result for name, result in results.items()
    }
    return types.SimpleNamespace(**methods, serialize=lambda: pickle.dumps(parts))


def compile_module(
    devices: Mapping[int, jax.Device], module: bytes, options: bytes, ids: Sequence[int]
) -> dict[str, Any]:
    """Compiles for some of these devices, and returns the figures of the executable.

    Args:
      devices: the devices by id.
      module: the program, as bytecode of MLIR.
      options: the options of the compiler, serialized.
      ids: the ids of the devices to compile for, in their order.

    Returns:
      The results of an executable's methods, by their names, such as ``"cost_analysis"``; and
      under ``"memory"`` the sizes of its buffers, by name.
    """
    chosen = [devices[device_id] for device_id in ids]
    client: Any = chosen[0].client  # that of all devices
    # A client for a topology, which this machine does not have, cannot load a program.
    only_compiles = isinstance(client, _CompileOnlyClient)
    compile = client.compile if only_compiles else client.compile_and_load
    with _make_ir_context():
        executable = compile(
            _Module.parse(module),
            executable_devices=_xla_client.DeviceList(tuple(chosen)),
            compile_options=_xla_client.CompileOptions.ParseFromString(options),
        )
    results = {method: getattr(executable, method)() for method in _METHODS_TO_CALL}
    # The sizes are copied, because XLA's object with the sizes cannot be sent to another process.
    memory = executable.get_compiled_memory_stats()
    sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("in_bytes")}
    if hasattr(executable, "get_hlo_text"):
        text = executable.get_hlo_text()
    else:  # an executable that was compiled for a topology does not have this method
        text = "\n\n".join(hlo_module.to_string() for hlo_module in executable.hlo_modules())
    return {**results, "memory": sizes, "get_hlo_text": text}
