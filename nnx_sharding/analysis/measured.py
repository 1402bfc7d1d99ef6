"""Times that a profile has measured, by the lines of the user's code.

XLA writes an event for each operation that a device runs, with the name of the instruction in the
compiled program; that program has the lines. A loop's event spans those of its body, so only
instructions that call nothing but fused computations count.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from .hlo import Module

Profile: TypeAlias = "jax.profiler.ProfileData | str | os.PathLike[str]"


class Event(NamedTuple):
    """One run of an operation on a device."""

    operation: str  # the name of the instruction
    run: tuple[Any, Any]  # the call of the program, and the device
    program: Any  # the number of the program in its process; None on TPUs
    seconds: float


def read_profile(profile: Profile) -> jax.profiler.ProfileData:
    """Reads a profile: itself, a file, or the newest in a folder that ``jax.profiler`` wrote."""
    if not isinstance(profile, str | os.PathLike):
        return profile
    path = Path(profile).expanduser()
    files = [*path.rglob("*.xplane.pb")] if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{os.fspath(profile)} has no profile (*.xplane.pb).")
    newest = max(files, key=lambda file: file.stat().st_mtime)
    return jax.profiler.ProfileData.from_file(str(newest))


def measured_seconds(profile: Profile, module: Module) -> dict[str, float]:
    """Returns the seconds of each instruction of a program by its name, in one call on one device.

    They are means over all calls and devices.

    Raises:
      ValueError: the profile has no call of this program, or calls of several with its name.
    """
    sums: defaultdict[str, float] = defaultdict(float)  # by the name of the instruction
    runs: set[tuple[Any, Any]] = set()  # (call of the program, device)
    programs = set[Any]()
    with warnings.catch_warnings():
        # Python 3.13 warns of types such as those of jaxlib's statistics. If the user makes
        # warnings errors, jaxlib cannot raise this one, and the process ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        for event in _events(read_profile(profile), module.name):
            home = module.homes.get(event.operation)
            if home is not None:
                runs.add(event.run)
                programs.add(event.program)
                opcode = module.within[home][event.operation].opcode
                # The time of these four callers is in the events of what they call. Other callers,
                # such as a fusion, run what they call as one kernel, with one event.
                if opcode not in ("while", "call", "conditional", "async-start"):
                    sums[event.operation] += event.seconds
    if not runs:
        raise ValueError(
            f"the profile has no operation of {module.name}. Call this compiled function within "
            "jax.profiler.trace(folder), and wait for its results there."
        )
    # A second program may be one for the last batch, which has fewer rows.
    if len(programs) > 1:
        raise ValueError(
            f"the profile has operations of {len(programs)} programs that are called "
            f"{module.name}, and nothing says which of them this one is. Call only this compiled "
            "function within jax.profiler.trace(folder)."
        )
    return {name: total / len(runs) for name, total in sums.items()}


def _events(profile: jax.profiler.ProfileData, name: str) -> Iterator[Event]:
    """Yields the operations that devices ran.

    On CPUs and GPUs, events name their program, so only events of the program ``name`` count. On
    TPUs, they do not, so all events count, and the name of an event is the text of its instruction.
    A profile has a *plane* for each device, or one for all virtual devices of a CPU. A plane has
    *lines* of events.
    """
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                stats = {key: value for key, value in event.stats if key in _STATS}
                instruction = _TPU_OPERATION.match(event.name)  # None on CPUs and GPUs
                if stats.get("hlo_module") == name:
                    # Without ``hlo_op`` the name is "None", and the caller finds no instruction.
                    operation = str(stats.get("hlo_op"))
                    device = stats.get("device_ordinal", plane.name)
                elif line.name == "XLA Ops" and instruction is not None:
                    operation, device = instruction[1], plane.name
                else:
                    continue
                call = stats.get("run_id")  # the same for all operations of one call
                yield Event(
                    operation,
                    run=(call, device),
                    program=stats.get("program_id"),
                    seconds=event.duration_ns * 1e-9,
                )


_STATS = {"hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal"}
# %fusion.3 = f32[8]{0} fusion(…)
_TPU_OPERATION = re.compile(r"%([\w.\-]+) = ")
