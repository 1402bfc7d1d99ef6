"""What long work shows: a bar on terminals, and a line of log for each compilation."""

from __future__ import annotations

import functools
import io
import logging
import re
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit, shard_map
from nnx_sharding.checkpoint import (
    Checkpoints,
    load_safetensors,
    restore,
    safetensors,
    save,
    save_safetensors,
)
from nnx_sharding.diagnostics import progress
from nnx_sharding.partition import make_mesh, replicated, sharded_init
from nnx_sharding.report.compiling import compile_all

RULES = {"w": "kernel", "b": "bias"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class AtOnce:
    """A timer that does not wait, so that bars are shown for short work, too."""

    def __init__(self, delay, function):
        self.start = function

    def cancel(self):
        pass

    join = cancel


@pytest.fixture
def open_terminal(monkeypatch):
    """Makes stderr a terminal; within the test, because pytest sets it between its phases."""
    monkeypatch.setattr(progress.threading, "Timer", AtOnce)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv(progress.QUIET, raising=False)

    def start():
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return start


def linear():
    return nnx.Linear(4, 8, rngs=nnx.Rngs(0))


def test_long_work_shows_what_it_is(open_terminal, tmp_path, monkeypatch):
    terminal = open_terminal()
    model = linear()
    save_safetensors(tmp_path / "tensors", model, RULES)
    load_safetensors(tmp_path / "tensors", model, RULES)
    assert "safetensors" not in terminal.getvalue()  # of so few bytes it is short
    monkeypatch.setattr(safetensors, "_SHORT", 0)
    with Checkpoints(tmp_path / "steps") as checkpoints:
        checkpoints.save(3, model)
        checkpoints.resume(model)
    save(tmp_path / "model", model)
    restore(tmp_path / "model", model)
    save_safetensors(tmp_path / "tensors", model, RULES, overwrite=True)
    load_safetensors(tmp_path / "tensors", model, RULES)
    sharded_init(nnx.Linear, P("model"), make_mesh({"model": 8}), 8, 8, rngs=nnx.Rngs(0))
    jit(lambda x: x + 1).lower(jnp.ones(4)).compile()
    shown = terminal.getvalue()
    titles = ("save step 3", "restore step 3", "save model", "restore model", "sharded_init")
    assert [title for title in (*titles, "compile <lambda>") if title not in shown] == []
    for caller in ("save_safetensors", "load_safetensors"):
        assert re.search(rf"{caller}: \w+ .*2/2", shown), caller


def test_work_inside_of_other_work_shows_nothing_of_its_own(open_terminal):
    terminal = open_terminal()
    with progress.progress("outer"), progress.progress("inner"):
        pass
    assert "outer" in terminal.getvalue()
    assert "inner" not in terminal.getvalue()
    with pytest.raises(ZeroDivisionError), progress.progress("failed"):
        _ = 1 / 0
    with progress.progress("afterwards"):
        pass
    assert "afterwards" in terminal.getvalue()


@pytest.mark.parametrize(
    "why", ["quiet", "environment", "process", "file", "dumb", "none", "logger", "closed"]
)
def test_nothing_is_shown(why, open_terminal, monkeypatch):
    terminal = open_terminal()
    if why == "environment":
        monkeypatch.setenv("NNX_SHARDING_QUIET", "1")
    elif why == "process":
        monkeypatch.setattr(progress._compat, "process_id", lambda: 1)
    elif why == "file":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
        monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    elif why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif why == "none":
        monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    elif why == "logger":  # an object that only writes
        monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(write=terminal.write))
    elif why == "closed":
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        sys.stderr.close()
    with progress.progress("work", 2, quiet=why == "quiet") as advance:
        advance("one")
    assert terminal.getvalue() == ""


def test_logs_get_lines(open_terminal, monkeypatch):
    log = open_terminal()
    monkeypatch.setattr(log, "isatty", lambda: False)
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    running = ["one", "two"]
    with progress.progress("work", 3, running=lambda: running) as advance:
        _wait_for(log, "work: ")
        running.remove("one")
        advance("one")
        _wait_for(log, "work: 1 of 3 done, the last: one; now: two; ")
    assert log.getvalue().splitlines()[0] == "work: 0 of 3 done; now: one and two; 0 s so far"
    with progress.progress("other"):
        _wait_for(log, "other: 0 s so far")


def test_lines_name_the_programs_that_compile(open_terminal, monkeypatch):
    """Also one that is lowered; neither one that was, nor one that equals another."""
    log = open_terminal()
    monkeypatch.setattr(log, "isatty", lambda: False)
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    fun = jit(lambda x: 2 * x)
    lines = []

    def lower(name):
        def program():
            length = len(log.getvalue())
            _wait_for(log, f"{name}; ", length)
            lines.append(log.getvalue()[length:].splitlines()[-1])
            return fun.lower(jnp.ones(4)), None

        return program

    programs = {name: lower(name) for name in ("first", "equal", "last")}
    compile_all("search", programs, ruled_out={}, most=16)  # more than there are
    assert re.match(r"search: 0 of 3 done; now: first; \d+ s so far", lines[0])
    # Either the first one is still compiled, or it is done.
    for line, name, total in zip(lines[1:], ("equal", "last"), (3, 2), strict=True):
        states = f"(0 of {total} done; now: first and|1 of {total} done, the last: first; now:)"
        assert re.match(rf"search: {states} {name}; \d+ s so far", line)


def _wait_for(log, text, start=0):
    for _ in range(500):
        if text in log.getvalue()[start:]:
            return
        time.sleep(0.01)
    pytest.fail(f"{text!r} is not in {log.getvalue()!r}")


@pytest.mark.parametrize("name", ["ipywidgets", None])
def test_notebooks_need_ipywidgets(name, open_terminal, monkeypatch):
    """Without them, rich prints a warning in place of the bar."""
    terminal = open_terminal()
    monkeypatch.setattr(terminal, "isatty", lambda: name is None)
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=shell))
    monkeypatch.setattr(progress.importlib.util, "find_spec", {"ipywidgets": name}.get)
    assert progress._has_bar() is (name is not None)


def test_short_work_shows_nothing(monkeypatch):
    monkeypatch.delenv(progress.QUIET, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress._has_bar()
    with progress.progress("work"):
        pass
    assert sys.stderr.getvalue() == ""


SECONDS = r"traced in \d+\.\d\d s, lowered in \d+\.\d\d s, compiled in \d+\.\d\d s"


class Doubling(nnx.Module):
    @jit
    def __call__(self, x):
        return 2 * x


def compile_by_call(mesh):
    fun = jit(lambda model, x: model(x), in_shardings=(replicated(linear()), P("data")), mesh=mesh)
    for _ in range(2):
        fun(linear(), jnp.ones((8, 4)))


def compile_by_stages(mesh):
    fun = jit(lambda model, x: model(x), in_shardings=(replicated(linear()), P("data")), mesh=mesh)
    compiled = fun.lower(linear(), jnp.ones((8, 4))).compile()
    for _ in range(2):
        compiled(linear(), jnp.ones((8, 4)))


def compile_arrays(mesh):
    sharding = jax.NamedSharding(mesh, P("data"))
    jit(lambda x: x.sum())(jax.device_put(jnp.ones(8), sharding))


def compile_shard_map(mesh):
    shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(8))


@pytest.mark.parametrize(
    "compile", [compile_by_call, compile_by_stages, compile_arrays, compile_shard_map]
)
def test_each_compilation_logs_one_line(compile, caplog, uncached):
    mesh = make_mesh({"data": 2, "model": 4})
    compile(mesh)
    assert not caplog.records  # silent unless asked for
    jax.clear_caches()
    with caplog.at_level(logging.INFO, "nnx_sharding"):
        compile(mesh)
    [line] = [record.getMessage() for record in caplog.records if record.name == "nnx_sharding"]
    assert re.fullmatch(rf"<lambda> for 8 devices \('data': 2, 'model': 4\): {SECONDS}", line)


def test_the_line_names_the_function_of_a_partial(caplog, uncached):
    class Scale:
        def times(self, x):
            return 2 * x

    with caplog.at_level(logging.INFO, "nnx_sharding"):
        jit(functools.partial(Scale.times, Scale()))(jnp.ones(8))
    [line] = [record.getMessage() for record in caplog.records if record.name == "nnx_sharding"]
    assert line.startswith("Scale.times for 1 device: ")


def test_the_line_has_the_times_that_jax_reports(caplog, uncached):
    reported = []

    def report(event, seconds, **details):
        reported.append((event, seconds, details))

    jax.monitoring.register_event_duration_secs_listener(report)
    try:
        with caplog.at_level(logging.INFO, "nnx_sharding"):
            Doubling()(jnp.ones(8))
    finally:
        jax.monitoring.unregister_event_duration_listener(report)
    [line] = [record.getMessage() for record in caplog.records if record.name == "nnx_sharding"]
    prefix = "/jax/core/compile/"
    phases = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
    of_call = {e: s for e, s, details in reported if "__call__" in str(details.get("fun_name"))}
    times = [f"{of_call[f'{prefix}{phase}_duration']:.2f} s" for phase in phases]
    assert (
        line
        == "Doubling.__call__ for 1 device: traced in {}, lowered in {}, compiled in {}".format(
            *times
        )
    )
