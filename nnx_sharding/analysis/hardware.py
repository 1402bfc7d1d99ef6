"""The peak figures of accelerators, from their vendors."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The peak figures of one device, in JAX's sense of a device.

    Attributes:
      name: such as ``TPU v5e``.
      flops: additions and multiplications per second, dense bfloat16.
      memory_bytes: the size of its memory.
      memory_bandwidth: bytes per second from and to its memory.
      interconnect_bandwidth: bytes per second that it can send to others of its kind over all its
        links together, in one direction; ``math.inf`` for a single device.
      torus_dimensions: the dimensions of the torus that its links form, two links in each: 2 or 3;
        0 if each device can send to all others over all of its links, as through switches.
      domain: the number of devices that switched links connect, such as the 8 GPUs of a node with
        NVLink; None for any number.
      network_bandwidth: bytes per second that it can send to devices outside its slice or domain;
        None if that is unknown.
      sources: the page that each figure is from.

    Raises:
      ValueError: a figure is not positive, or ``torus_dimensions`` is none of 0, 2 and 3.

    Example:
      >>> from nnx_sharding.analysis import Device
      >>> mine = Device("mine", 1e12, 16 * 2**30, 1e11, 1e10, torus_dimensions=2)
      >>> mine.link_bandwidth
      2500000000.0
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    interconnect_bandwidth: float
    torus_dimensions: int = 0
    domain: int | None = None
    network_bandwidth: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        figures = {name: getattr(self, name) for name in _FIGURES}
        wrong = [  # "not n > 0" is also true of NaN
            f"{name} = {n!r}"
            for name, n in figures.items()
            if name != "torus_dimensions" and n is not None and not n > 0
        ]
        if wrong:
            raise ValueError(f"Device {self.name!r}: not positive: {', '.join(wrong)}.")
        if self.torus_dimensions not in (0, 2, 3):
            raise ValueError(
                f"Device {self.name!r}: expected torus_dimensions of 0, 2 or 3, got "
                f"{self.torus_dimensions!r}."
            )

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second over one link in one direction; without a torus, over all links."""
        return self.interconnect_bandwidth / (2 * self.torus_dimensions or 1)


_FIGURES = tuple(field.name for field in dataclasses.fields(Device))[1:-1]


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
    peak = known_device(name)
    if peak is None:
        keys = {key.lower(): key for key in DEVICES}
        close = difflib.get_close_matches(name.lower(), keys, 1, 0.75)
        hint = f" Did you mean {keys[close[0]]!r}?" if close else ""
        raise ValueError(
            f"unknown device {name!r}.{hint} Known are "
            f"{', '.join(map(repr, DEVICES))}; make a Device for another."
        )
    return peak


def known_device(name: str) -> Device | None:
    """As :func:`device`; None if the device is not in the table.

    Example:
      >>> import jax
      >>> from nnx_sharding.analysis import known_device
      >>> known_device(jax.devices()[0].device_kind) is None  # of a CPU
      True
    """
    kinds = {kind.lower(): key for kind, key in _KINDS.items()}
    keys = {key.lower(): key for key in DEVICES} | kinds
    return DEVICES.get(keys.get(name.lower(), ""))


_GIB = 2**30
_TPU = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_BOOK = "https://jax-ml.github.io/scaling-book/"


def _sources(page: str, **others: str) -> dict[str, str]:
    """One page for all figures but some."""
    return dict.fromkeys(_FIGURES, page) | others


def _gpu(page: str, network: str = _BOOK + "gpus/") -> dict[str, str]:
    return _sources(_NVIDIA + page, domain=_BOOK + "gpus/", network_bandwidth=network)


_V4 = _sources("https://arxiv.org/abs/2304.01433", network_bandwidth=_BOOK + "tpus/")
_V5E, _TPU7X = _sources(_TPU + "v5e"), _sources(_TPU + "tpu7x")
_V5P, _V6E = (_sources(_TPU + "tpu7x", torus_dimensions=_TPU + page) for page in ("v5p", "v6e"))
_A100 = _gpu("a100/", "https://developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100/")

# Bandwidths that a vendor gives for both directions together, and flops that it gives with
# sparsity, are halved. A TPU7x chip is two devices to JAX, each with half of its figures.
DEVICES: Mapping[str, Device] = {
    one.name: one
    for one in (
        Device("TPU v4", 275e12, 32 * _GIB, 1200e9, 300e9, 3, None, 6.25e9, _V4),
        Device("TPU v5e", 197e12, 16 * 10**9, 819e9, 200e9, 2, None, 3.125e9, _V5E),
        Device("TPU v5p", 459e12, 95 * _GIB, 2765e9, 600e9, 3, None, 6.25e9, _V5P),
        Device("TPU v6e", 918e12, 32 * _GIB, 1638e9, 400e9, 2, None, 12.5e9, _V6E),
        Device("TPU7x", 2307e12 / 2, 96 * _GIB, 7380e9 / 2, 300e9, 3, None, 6.25e9, _TPU7X),
        Device("A100 40GB", 312e12, 40 * 10**9, 1555e9, 300e9, 0, 8, 25e9, _A100),
        Device("A100 80GB", 312e12, 80 * 10**9, 2039e9, 300e9, 0, 8, 25e9, _A100),
        Device("H100 SXM", 1979e12 / 2, 80 * 10**9, 3350e9, 450e9, 0, 8, 50e9, _gpu("h100/")),
        Device("H200", 1979e12 / 2, 141 * 10**9, 4800e9, 450e9, 0, 8, 50e9, _gpu("h200/")),
        Device("B200", 2250e12, 180 * 10**9, 8000e9, 900e9, 0, 8, 50e9, _gpu("dgx-b200/")),
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
