"""Limits the programs in flight on virtual CPU devices.

There, XLA runs all devices of a process on one thread pool, and in a collective each device waits
for the others. With many programs queued, all threads may wait for devices that have no thread, and
after a while XLA aborts the process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .outcome import OutputGroup

# Without a limit, 2,000 evaluation steps hang with jax 0.10.2 on 2 cores; with this one they run.
MAX_IN_FLIGHT = 16


@functools.cache
def is_bounded() -> bool:
    """Whether the devices are virtual CPU devices."""
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1


class _Count(threading.local):
    value = 0


_COUNT = _Count()


def wait_for_some(groups: Sequence[OutputGroup]) -> None:
    """Waits for every 16th program on several devices, which ends after all earlier ones."""
    _COUNT.value += 1
    if _COUNT.value >= MAX_IN_FLIGHT and wait(groups):
        _COUNT.value = 0


def wait(groups: Sequence[OutputGroup]) -> bool:
    """Waits for a program, if it runs on several devices; returns whether it does."""
    first: Any = next((group.arrays[0] for group in groups if group.arrays), None)
    # All results of a program are on the same devices.
    if type(first) is not _compat.ArrayImpl or first.sharding.num_devices == 1:
        return False
    jax.block_until_ready(min((x for group in groups for x in group.arrays), key=jnp.size))
    return True
