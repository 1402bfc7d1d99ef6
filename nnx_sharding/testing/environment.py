"""What each process is told about the others, in the variables that JAX reads on clusters."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

DEVICE_COUNT = "--xla_force_host_platform_device_count"


def reserve_port() -> socket.socket:
    """A socket that keeps a free port on the loopback interface for as long as it is open.

    The coordinator of JAX listens there nevertheless, since gRPC sets ``SO_REUSEPORT``, too.
    Systems without that get a port that was free a moment ago.
    """
    held = socket.socket()
    if hasattr(socket, "SO_REUSEPORT"):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    if not hasattr(socket, "SO_REUSEPORT"):
        held.close()
    return held


def environment_of(
    rank: int,
    processes: int,
    devices: int,
    platform: str,
    address: str,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The environment of one process.

    JAX itself reads an address from the environment, but no rank and no number of processes: it
    asks the scheduler that it finds. So each process sees the variables of a Slurm step, the five
    by which JAX knows one.

    Args:
      rank: the number of the process, from 0.
      processes: how many there are.
      devices: how many devices it has.
      platform: the backend of JAX.
      address: host and port of the coordinator.
      inherited: the environment of the launcher.
    """
    # JAX looks for Open MPI first. The other is a second way to say what XLA_FLAGS says.
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("OMPI_") and name != "JAX_NUM_CPU_DEVICES"
    }
    return {
        **kept,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # else it listens on all interfaces
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(rank * devices + i) for i in range(devices)),
        "JAX_PLATFORMS": platform,
        "PYTHONUNBUFFERED": "1",
        "SLURM_JOB_ID": kept.get("SLURM_JOB_ID", "0"),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "XLA_FLAGS": _with_devices(kept.get("XLA_FLAGS", ""), devices),
    }


def _with_devices(flags: str, devices: int) -> str:
    """The user's flags, with another number of virtual devices."""
    others = re.sub(rf"{DEVICE_COUNT}=\S*", "", flags).split()
    return " ".join([*others, f"{DEVICE_COUNT}={devices}"])
