"""Eight virtual devices on the CPU, quick compilation, and the hypothesis profiles."""

import gc
import itertools
import os
import pathlib
import random
import re
import tempfile

# JAX reads both when its backend starts, so they are set before anything imports it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
# What tests draw at random. Workers inherit it; the header of a run shows it.
SEED = os.environ.setdefault("NNX_SHARDING_TEST_SEED", str(random.randrange(10**6)))
# Tests run most programs once. `make nightly` optimizes them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax._src import compiler  # noqa: E402
from jax._src.lru_cache import LRUCache  # noqa: E402

# Compiling takes as long as it takes, so examples have no deadline. `ci` tries the same examples in
# every run, `nightly` (`make nightly`) more, and others each time; `thorough` many new ones.
settings.register_profile("ci", max_examples=40, derandomize=True, deadline=None)
settings.register_profile("nightly", deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

import configurations  # noqa: E402
import schedule  # noqa: E402
from nnx_sharding.core.call_context import CacheNotice  # noqa: E402
from nnx_sharding.report.compiling import CompilerProcess  # noqa: E402

_finished = itertools.count(1)  # tests of this worker
_put, _cache_write = LRUCache.put, compiler._cache_write
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|(ragged-)?all-to-all|reduce-scatter|collective-\w+)(-start)?\("
)


def _put_at_once(cache, key, value):
    """Writes an entry so that no other worker reads a part of it."""
    with tempfile.TemporaryDirectory(dir=cache.path) as folder:
        _put(LRUCache(folder, max_size=-1), key, value)
        for entry in pathlib.Path(folder).iterdir():
            entry.replace(pathlib.Path(cache.path, entry.name))


def _write_unless_nested(key, seconds, name, backend, executable, *more):
    """Caches a program, except with a collective in a loop, a branch or a call.

    Such programs may fail when they come from the cache: test_cached_collectives.py has one.
    Planned programs are not run: only their figures are in the cache.
    """
    if not backend.platform_version.endswith("figures only"):
        for module in executable.hlo_modules():
            nested, *_ = module.to_string().partition("\nENTRY ")  # the entry computation is last
            if _COLLECTIVE.search(nested):
                return
    _cache_write(key, seconds, name, backend, executable, *more)  # older JAX passes one more


def pytest_configure(config):
    # Workers send their reports to the process that started them.
    if config.option.record_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(schedule.Recorder())
    for line in configurations.ignored_warnings():
        config.addinivalue_line("filterwarnings", line)
    # All workers and stages share what they compile. Programs that tests start do not: some of them
    # are killed while they write.
    LRUCache.put = _put_at_once
    compiler._cache_write = _write_unless_nested
    CacheNotice.is_due = False  # about programs that are not cached here
    folder = config.rootpath / ".cache" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)  # source lines
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_report_header():
    return f"NNX_SHARDING_TEST_SEED={SEED}"


def pytest_runtest_setup(item):
    random.seed(f"{SEED} {item.nodeid}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    result = yield
    if next(_finished) % 20 == 0:
        _release_programs()
    return result


def _release_programs():
    """Forgets all programs before Linux refuses to map more memory.

    A program takes nine mappings, and a process may have 65,530 (``vm.max_map_count``). Workers of
    nights, which compile thousands of programs, have crashed in XLA's allocations.
    """
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser):
    schedule.add_options(parser)


def pytest_collection_modifyitems(config, items):
    configurations.skip(items)
    schedule.select(config, items, SEED)


@pytest.fixture
def uncached():
    """Everything is compiled: nothing comes from the persistent cache."""
    with configurations.without_cache():
        yield


@pytest.fixture
def compile_here(monkeypatch):
    """Plans compile in this process: starting others takes longer than compiling small programs."""
    monkeypatch.setattr(
        CompilerProcess, "compile", lambda _, lowered, options: lowered.compile(options)
    )
