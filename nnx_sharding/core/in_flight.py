"""Limits how many programs are in flight on virtual CPU devices, for releases of JAX before 0.12.

XLA runs all virtual CPU devices of a process on one thread pool, and in a collective each device
waits for the others. If many programs are queued, all threads may wait for devices that have no
thread, and after a while XLA aborts the process. With jax 0.10.2 on 2 cores, 2,000 evaluation steps
abort without the limit, and run with it. With jax 0.12 they run without the limit, also with 64
devices on one core.
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

MAX_IN_FLIGHT = 16  # the most programs that may be queued in one thread


@functools.cache
def is_bounded() -> bool:
    """Whether the devices are virtual CPU devices, of a JAX that needs the limit."""
    is_virtual = jax.default_backend() == "cpu" and jax.local_device_count() > 1
    return is_virtual and jax.__version_info__ < (0, 12)


class _InFlight(threading.local):
    """The number of programs that this thread has started and not waited for."""

    count = 0


_IN_FLIGHT = _InFlight()


def wait_for_some(groups: Sequence[OutputGroup]) -> None:
    """Waits for a program on several devices, once ``MAX_IN_FLIGHT`` have been started.

    Programs on the same devices run in their order, so all earlier programs have ended as well.

    Args:
      groups: the outputs of the program that was started last.
    """
    _IN_FLIGHT.count += 1
    if _IN_FLIGHT.count >= MAX_IN_FLIGHT:
        # False: the program runs on one device, so the next program is waited for instead. The
        # count stays at the limit or above until then.
        has_waited = wait(groups)
        if has_waited:
            _IN_FLIGHT.count = 0


def wait(groups: Sequence[OutputGroup]) -> bool:
    """Waits for a program if it runs on several devices; returns whether it has waited."""
    # All results of a program are on the same devices, and ready at the same time, so one is
    # enough. Values of other types, such as hijax Variables, have no sharding.
    first: Any = next((group.arrays[0] for group in groups if group.arrays), None)
    if type(first) is not _compat.ArrayImpl or first.sharding.num_devices == 1:
        return False
    smallest = min((x for group in groups for x in group.arrays), key=jnp.size)
    jax.block_until_ready(smallest)
    return True
