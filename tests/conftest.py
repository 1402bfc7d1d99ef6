"""Eight virtual devices on the CPU for every test, and the hypothesis profiles."""

import os

# JAX reads both when its backend starts, so they are set before anything imports it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

from hypothesis import settings  # noqa: E402

# Compiling takes as long as it takes, so examples have no deadline. `ci` tries the same examples in
# every run; `thorough` looks for new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

import configurations  # noqa: E402


def pytest_configure(config):
    for line in configurations.ignored_warnings():
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items):
    configurations.skip(items)
