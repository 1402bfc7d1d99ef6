"""Measured figures: what an estimate from them is of, and what is said where there is none."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from nnx_sharding.analysis import HARDWARE, Cost, Hardware, collectives_of, roofline_of
from nnx_sharding.analysis.hardware import hardware_of
from nnx_sharding.analysis.units import UNKNOWN
from nnx_sharding.planning import calibrate, calibration


def seconds(clock, fun, *args):
    """A time that grows with the arguments, however busy this machine is."""
    jax.block_until_ready(fun(*args))
    return 1e-3 + 1e-9 * sum(x.nbytes for x in jax.tree.leaves(args))


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(calibration._Clock, "median_seconds", seconds)
    return calibrate(dtype=jnp.float32, side=256)


def test_figures_of_these_devices(measured, tmp_path):
    assert measured.name.startswith("cpu, measured ")
    assert math.isfinite(measured.interconnect_bandwidth) and measured.spread > 0
    assert all("8 devices" in source for source in measured.sources.values())
    measured.save(tmp_path / "mine.json")
    assert Hardware.load(tmp_path / "mine.json") == measured
    assert hardware_of(str(tmp_path / "mine.json")) == measured


def test_one_device(tmp_path):
    alone = calibrate(jax.devices()[:1], dtype=jnp.float32, side=64)
    assert (alone.interconnect_bandwidth, alone.latency) == (math.inf, None)
    assert Hardware.from_json(alone.to_json()) == alone


@pytest.mark.parametrize("rate, side", [(1e9, 256), (2e11, 1024), (7e14, 4096)])
def test_slow_devices_multiply_small_matrices(monkeypatch, rate, side):
    monkeypatch.setattr(calibration, "_measure_flops", lambda *_: rate)
    clock, mesh = calibration._Clock(40.0), jax.make_mesh((8,), ("device",))
    assert calibration._side_in_time(clock, mesh, jnp.float32) == side


def test_without_time_each_rate_is_measured_once(monkeypatch):
    calls = []

    def mean_seconds(fun, args, *, calls: int, made=calls):
        return made.append(calls) or 1e-3

    monkeypatch.setattr(calibration, "_mean_seconds", mean_seconds)
    rough = calibrate(dtype=jnp.float32, time_limit=0.0)
    # Of two products, memory, one all-gather and a step, each once to see how long it takes.
    assert calls == [1, 1] * 5
    assert rough.latency is None and rough.spread > 0
    assert "1 of 7 sizes" in rough.sources["latency"]
    assert "1 of 3 training steps" in rough.sources["spread"]
    unknown = {row.split()[0] for row in str(rough).splitlines() if f" {UNKNOWN} " in row}
    assert unknown == {"latency"}


def test_devices_that_cannot_be_measured():
    with pytest.raises(ValueError, match="of one kind and of one process, got none"):
        calibrate([])


def test_every_collective_takes_the_latency():
    gather = "%a = u8[800]{0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}"
    sent = collectives_of(f"{gather}\n{gather.replace('%a', '%b')}", {"data": 8})
    mine = Hardware("mine", 1e12, 2**30, 1e11, 1e6, latency=1e-3, spread=0.25)
    found = roofline_of(Cost(1e9, 0.0, 0.0, ""), sent, mine)
    assert found.interconnect_s == pytest.approx(2 * (1e-3 + 700 / 1e6))
    assert str(found).startswith(
        "4.40 ms, estimate ± 25 % by the figures of mine, as scheduled: comp"
    )
    unknown = dataclasses.replace(mine, latency=None, spread=None)
    found = roofline_of(Cost(1e9, 0.0, 0.0, ""), sent, unknown)
    assert found.interconnect_s == pytest.approx(2 * 700 / 1e6)
    assert str(found).startswith("2.40 ms, at peak rates of mine, as scheduled: ")
    assert all(one.spread is None for one in HARDWARE.values())
    # One hop of a TPU is the least for each of two.
    found = roofline_of(Cost(1e9, 0.0, 0.0, ""), sent, "TPU v5e")
    assert found.interconnect_s == pytest.approx(2 * (1e-6 + 700 / 200e9))
    assert str(found).startswith("7.08 µs, at peak rates of TPU v5e, as scheduled: compute")
