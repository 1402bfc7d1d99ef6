"""The peak figures of accelerators, from their vendors."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The peak figures of one device, as JAX counts devices.

    Attributes:
      name: such as ``TPU v5e``.
      flops: additions and multiplications per second, dense bfloat16.
      memory_bytes: the size of its memory.
      memory_bandwidth: bytes per second from and to its memory.
      interconnect_bandwidth: bytes per second that it can send to others of its kind over all
        of its links together, in one direction; ``math.inf`` for a single device.
      source: the source of the figures.

    Raises:
      ValueError: a figure is not positive.

    Example:
      >>> from nnx_sharding.analysis import Device
      >>> Device("mine", 1e12, 16 * 2**30, 1e11, 1e10).flops
      1000000000000.0
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    interconnect_bandwidth: float
    source: str = ""

    def __post_init__(self) -> None:
        _, *figures, _ = dataclasses.asdict(self).items()
        wrong = [f"{name} = {n!r}" for name, n in figures if not n > 0]  # or is NaN
        if wrong:
            raise ValueError(f"Device {self.name!r}: not positive: {', '.join(wrong)}.")


def device(name: str) -> Device:
    """The figures of a device.

    Args:
      name: a key of ``DEVICES`` or a ``jax.Device.device_kind``, in upper or lower case.

    Raises:
      ValueError: the device is not in the table.

    Example:
      >>> from nnx_sharding.analysis import device
      >>> device("TPU v5 lite") == device("tpu v5e")
      True
      >>> device("TPU v5e").flops
      197000000000000.0
    """
    peak = known(name)
    if peak is None:
        keys = {key.lower(): key for key in DEVICES}
        close = difflib.get_close_matches(name.lower(), keys, 1, 0.75)
        hint = f" Did you mean {keys[close[0]]!r}?" if close else ""
        raise ValueError(
            f"there are no figures for the device {name!r}.{hint} Known are "
            f"{', '.join(map(repr, DEVICES))}; make a Device for another."
        )
    return peak


def known(name: str) -> Device | None:
    """As :func:`device`; None if the device is not in the table."""
    kinds = {kind.lower(): key for kind, key in _KINDS.items()}
    keys = {key.lower(): key for key in DEVICES} | kinds
    return DEVICES.get(keys.get(name.lower(), ""))


_GIB = 2**30
_TPU = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

# Halved are bandwidths that a vendor gives for both directions together, and flops that it gives
# with sparsity. A chip of TPU7x is two devices to JAX, each with half of its figures.
DEVICES: Mapping[str, Device] = {
    one.name: one
    for one in (
        Device("TPU v4", 275e12, 32 * _GIB, 1200e9, 300e9, "https://arxiv.org/abs/2304.01433"),
        Device("TPU v5e", 197e12, 16 * 10**9, 819e9, 200e9, _TPU + "v5e"),
        Device("TPU v5p", 459e12, 95 * _GIB, 2765e9, 600e9, _TPU + "tpu7x"),
        Device("TPU v6e", 918e12, 32 * _GIB, 1638e9, 400e9, _TPU + "tpu7x"),
        Device("TPU7x", 2307e12 / 2, 96 * _GIB, 7380e9 / 2, 300e9, _TPU + "tpu7x"),
        Device("A100 40GB", 312e12, 40 * 10**9, 1555e9, 300e9, _NVIDIA + "a100/"),
        Device("A100 80GB", 312e12, 80 * 10**9, 2039e9, 300e9, _NVIDIA + "a100/"),
        Device("H100 SXM", 1979e12 / 2, 80 * 10**9, 3350e9, 450e9, _NVIDIA + "h100/"),
        Device("H200", 1979e12 / 2, 141 * 10**9, 4800e9, 450e9, _NVIDIA + "h200/"),
        Device("B200", 2250e12, 180 * 10**9, 8000e9, 900e9, _NVIDIA + "dgx-b200/"),
    )
}

# By jax.Device.device_kind.
_KINDS = {
    "TPU v5 lite": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "Ironwood": "TPU7x",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}
