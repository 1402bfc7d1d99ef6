"""The figures of accelerators: at their peak, from their vendors, or measured.

Each figure has a *source*, the page that it is from. Links between devices form a torus of two or
three dimensions, as those of TPUs, or connect all devices of a *domain*, as NVLink in a node of
GPUs. Outside of that, devices send over a network.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .json_codec import JsonForm
from .tables import Table, text
from .units import UNKNOWN, bytes_text, count_text, time_text


@dataclasses.dataclass(frozen=True)
class Hardware(JsonForm):
    """The figures of one device, in JAX's sense of a device: at their peak, or measured.

    Attributes:
      name: such as ``TPU v5e``.
      flops: additions and multiplications per second, dense bfloat16.
      memory_bytes: the size of its memory; of a TPU, what its compiler lets a program take.
      memory_bandwidth: bytes per second from and to its memory.
      interconnect_bandwidth: bytes per second that it can send to others of its kind over all its
        links together, in one direction; ``math.inf`` for a single device.
      torus_dimensions: the dimensions of the torus that its links form, two links in each: 2 or 3;
        0 if each device can send to all others over all of its links, as through switches.
      domain: the number of devices that switched links connect, such as the 8 GPUs of a node with
        NVLink; None for any number.
      network_bandwidth: bytes per second that it can send to devices outside its slice or domain;
        None if that is unknown.
      int8_flops, fp8_flops: additions and multiplications per second of dense products of integers,
        or of floats, of 8 bits; None if they take as long as products in bfloat16.
      sources: the page that each figure is from.
      latency: the seconds that a collective takes in addition to sending its bytes. For TPUs, the
        time of one hop between chips, which is the least that it may be; None if unknown.
      spread: the largest difference between a measured time and its estimate from these figures, in
        parts of the estimate; None for peak figures, which :func:`~nnx_sharding.planning.calibrate`
        did not measure.

    Raises:
      ValueError: a figure is not positive, or ``torus_dimensions`` is none of 0, 2 and 3.

    Example:
      >>> from nnx_sharding.analysis import Hardware
      >>> mine = Hardware("mine", 1e14, 16 * 2**30, 1e12, 1e11, torus_dimensions=2)
      >>> mine.link_bandwidth  # four links
      25000000000.0
    """

    name: str
    flops: float
    memory_bytes: int
    memory_bandwidth: float
    interconnect_bandwidth: float
    torus_dimensions: int = 0
    domain: int | None = None
    network_bandwidth: float | None = None
    int8_flops: float | None = None
    fp8_flops: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    latency: float | None = None
    spread: float | None = None

    _FORMAT = "nnx_sharding.hardware"
    _NOUN = "description of hardware"

    def __post_init__(self) -> None:
        figures = {name: getattr(self, name) for name in _FIGURES if name != "torus_dimensions"}
        # NaN is refused, too, because `not n > 0` is true for NaN, and `n <= 0` is false.
        wrong = [f"{name} = {n!r}" for name, n in figures.items() if n is not None and not n > 0]
        if wrong:
            raise ValueError(f"Hardware {self.name!r}: not positive: {', '.join(wrong)}.")
        if self.torus_dimensions not in (0, 2, 3):
            raise ValueError(
                f"Hardware {self.name!r}: expected torus_dimensions of 0, 2 or 3, got "
                f"{self.torus_dimensions!r}."
            )

    def _pictures(self, width: int) -> Iterable[Any]:
        """Yields what ``print`` shows: the name, and each figure with its unit and source."""
        yield text(self.name, "bold")
        rows = []
        for name in _FIGURES:  # the names of the fields that are figures
            figure, source = getattr(self, name), self.sources.get(name, "")
            # A figure that `calibrate` could not measure is None, and its source says why.
            if figure is not None or source:
                unit = name.rpartition("_")[2]  # "memory_bandwidth" → "bandwidth"
                to_text = _TO_TEXT.get(unit, str)
                rows.append((name, UNKNOWN if figure is None else to_text(figure), source))
        yield Table(("figure", "value", "source"), rows)

    def _parts(self) -> dict[str, Any]:
        """Returns the data for JSON, which has no infinity: None stands for it."""
        bandwidth = self.interconnect_bandwidth
        written = None if bandwidth == math.inf else bandwidth
        return super()._parts() | {"interconnect_bandwidth": written}

    @classmethod
    def _of_parts(cls, parts: dict[str, Any]) -> Hardware:
        """Reads what `_parts` returned."""
        # None stands for infinity. A missing bandwidth stays missing, because that is an error.
        if parts.get("interconnect_bandwidth", 0) is None:
            parts["interconnect_bandwidth"] = math.inf
        return super()._of_parts(parts)

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second over one link in one direction; without a torus, over all links."""
        num_links = 2 * self.torus_dimensions  # A torus has two links in each dimension.
        return self.interconnect_bandwidth / (num_links or 1)


_FIGURES = tuple(
    field.name for field in dataclasses.fields(Hardware) if field.name not in ("name", "sources")
)


# How figures are written, by the last word of their names.
_TO_TEXT: dict[str, Callable[[float], str]] = {
    "flops": lambda x: f"{count_text(x)}FLOP/s",
    "bytes": bytes_text,
    "bandwidth": lambda x: "unlimited" if x == math.inf else f"{count_text(x)}B/s",
    "latency": time_text,
    "spread": lambda x: f"± {100 * x:.0f} %",
}


def hardware_of(hardware: Hardware | str) -> Hardware:
    """Returns hardware given by itself, by a key of ``HARDWARE`` in any case, or by a JSON file.

    Raises:
      ValueError: it is not in the table, or the file is not one of hardware.
      TypeError: it is neither hardware nor a name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise TypeError(f"expected Hardware or the name of some, got {hardware!r}.")
    if hardware.endswith(".json"):
        return Hardware.load(hardware)
    keys = {key.lower(): key for key in HARDWARE}
    if hardware.lower() not in keys:
        # Hints are the names for users, without the kinds that JAX gives devices.
        names = {key.lower(): key for key in _BY_NAME}
        # Only a name that is close is a hint, because another one would mislead.
        close = difflib.get_close_matches(hardware.lower(), names, n=1, cutoff=0.75)
        hint = f" Did you mean {names[close[0]]!r}?" if close else ""
        known = ", ".join(map(repr, _BY_NAME))
        raise ValueError(
            f"unknown hardware {hardware!r}.{hint} Known are {known}; make a Hardware for another."
        )
    return HARDWARE[keys[hardware.lower()]]


def _gib(size: float) -> int:
    return round(size * 2**30)


_GB = 10**9
_TPU = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_BOOK = "https://jax-ml.github.io/scaling-book/"


def _sources(page: str, **others: str) -> dict[str, str]:
    """Returns the source of each figure: ``others`` by the name of the figure, else ``page``."""
    return dict.fromkeys(_FIGURES, page) | others


def _gpu(page: str, network: str = _BOOK + "gpus/") -> dict[str, str]:
    """Returns the source of each figure of a GPU.

    ``page`` is a page of NVIDIA. How GPUs are connected has other sources.
    """
    return _sources(_NVIDIA + page, domain=_BOOK + "gpus/", network_bandwidth=network)


_XLA = {
    "latency": _BOOK + "sharding/",
    "memory_bytes": "https://pypi.org/project/libtpu/",
    "int8_flops": _BOOK + "tpus/",
}
_V4 = _sources("https://arxiv.org/abs/2304.01433", network_bandwidth=_BOOK + "tpus/", **_XLA)
_V5E, _TPU7X = (_sources(_TPU + page, **_XLA) for page in ("v5e", "tpu7x"))
_V5P, _V6E = (
    _sources(_TPU + "tpu7x", torus_dimensions=_TPU + page, **_XLA) for page in ("v5p", "v6e")
)
_A100 = _gpu("a100/", "https://developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100/")


# Bandwidths that a vendor gives for both directions together, and flops that it gives with
# sparsity, are halved. A TPU7x chip is two devices to JAX, each with half of its figures. The
# memory of TPUs is what their compiler says it has when it refuses a program (libtpu 0.0.50).
_TABLE = (
    Hardware(
        name="TPU v4", flops=275e12, memory_bytes=_gib(30.75), memory_bandwidth=1200e9,
        interconnect_bandwidth=300e9, torus_dimensions=3, network_bandwidth=6.25e9,
        sources=_V4,
    ),
    Hardware(
        name="TPU v5e", flops=197e12, memory_bytes=_gib(15.75), memory_bandwidth=819e9,
        interconnect_bandwidth=200e9, torus_dimensions=2, network_bandwidth=3.125e9,
        int8_flops=394e12, sources=_V5E,
    ),
    Hardware(
        name="TPU v5p", flops=459e12, memory_bytes=_gib(95.73), memory_bandwidth=2765e9,
        interconnect_bandwidth=600e9, torus_dimensions=3, network_bandwidth=6.25e9,
        int8_flops=918e12, sources=_V5P,
    ),
    Hardware(
        name="TPU v6e", flops=918e12, memory_bytes=_gib(31.24), memory_bandwidth=1638e9,
        interconnect_bandwidth=400e9, torus_dimensions=2, network_bandwidth=12.5e9,
        int8_flops=1836e12, sources=_V6E,
    ),
    Hardware(
        name="TPU7x", flops=2307e12 / 2, memory_bytes=_gib(94.74), memory_bandwidth=7380e9 / 2,
        interconnect_bandwidth=300e9, torus_dimensions=3, network_bandwidth=6.25e9,
        fp8_flops=4614e12 / 2, sources=_TPU7X,
    ),
    Hardware(
        name="A100 40GB", flops=312e12, memory_bytes=40 * _GB, memory_bandwidth=1555e9,
        interconnect_bandwidth=300e9, domain=8, network_bandwidth=25e9,
        int8_flops=624e12, sources=_A100,
    ),
    Hardware(
        name="A100 80GB", flops=312e12, memory_bytes=80 * _GB, memory_bandwidth=2039e9,
        interconnect_bandwidth=300e9, domain=8, network_bandwidth=25e9,
        int8_flops=624e12, sources=_A100,
    ),
    Hardware(
        name="H100 SXM", flops=1979e12 / 2, memory_bytes=80 * _GB, memory_bandwidth=3350e9,
        interconnect_bandwidth=450e9, domain=8, network_bandwidth=50e9,
        int8_flops=3958e12 / 2, fp8_flops=3958e12 / 2, sources=_gpu("h100/"),
    ),
    Hardware(
        name="H200", flops=1979e12 / 2, memory_bytes=141 * _GB, memory_bandwidth=4800e9,
        interconnect_bandwidth=450e9, domain=8, network_bandwidth=50e9,
        int8_flops=3958e12 / 2, fp8_flops=3958e12 / 2, sources=_gpu("h200/"),
    ),
    Hardware(
        name="B200", flops=2250e12, memory_bytes=180 * _GB, memory_bandwidth=8000e9,
        interconnect_bandwidth=900e9, domain=8, network_bandwidth=50e9,
        int8_flops=9e15 / 2, fp8_flops=9e15 / 2, sources=_gpu("dgx-b200/"),
    ),
)  # fmt: skip

# jax.Device.device_kind → the name in the table.
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

# By the names that users know, which messages list. One hop between TPUs takes about a microsecond:
# https://jax-ml.github.io/scaling-book/sharding
_BY_NAME = {
    known.name: dataclasses.replace(known, latency=1e-6 if known.torus_dimensions else None)
    for known in _TABLE
}
# By these names, and by the kinds of devices as well.
HARDWARE: Mapping[str, Hardware] = _BY_NAME | {k: _BY_NAME[name] for k, name in _KINDS.items()}
