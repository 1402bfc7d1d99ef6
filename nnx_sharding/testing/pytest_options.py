"""A plugin for pytest: ``pytest --update-locks`` writes the lock files of ``assert_unchanged``.

Put ``pytest_plugins = "nnx_sharding.testing.pytest_options"`` into the ``conftest.py`` of the root.
It is not found by itself, because importing it imports JAX, whose options have to be set before.
"""

from __future__ import annotations

from typing import Any

from . import lock


def pytest_addoption(parser: Any) -> None:
    """Adds the option."""
    parser.getgroup("nnx_sharding").addoption(
        "--update-locks", action="store_true", help="write lock files instead of comparing"
    )


def pytest_configure(config: Any) -> None:
    """Applies the option to all tests."""
    lock.update_all = config.getoption("--update-locks")
