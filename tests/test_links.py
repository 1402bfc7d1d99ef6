"""Which links carry which mesh axes, and the least time that collectives take on them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import types
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import reports
from nnx_sharding.analysis import HARDWARE, Cost, Hardware, collectives_of, roofline_of
from nnx_sharding.analysis.collectives import Collectives
from nnx_sharding.analysis.meshes import MeshDescription, _coordinates
from nnx_sharding.report import Comparison, ProgramReport
from tpu.record import MESHES, mesh_of, recorded_mesh


@pytest.fixture(autouse=True)
def no_latency(monkeypatch):
    """What is tested here is the time for bytes."""
    for name, one in HARDWARE.items():
        monkeypatch.setitem(HARDWARE, name, dataclasses.replace(one, latency=None))


B = 16 * 2**20  # of the larger of operand and result


def sent(mesh, axes, *kinds, times=1):
    """Collectives of B bytes on each device over mesh axes."""
    lines = []
    for kind in kinds * times:
        groups = f"mesh[{','.join(f'{a!r}={n}' for a, n in mesh.axes.items())}]"
        groups += f" {{{','.join(map(repr, axes))}}}"
        size = np.prod([mesh.axes[axis] for axis in axes], dtype=int)
        bytes_ = B // size if kind == "reduce-scatter" else B
        lines.append(f"%c{len(lines)} = u8[{bytes_}]{{0}} {kind}(%x), replica_groups={groups}")
    found = collectives_of("\n".join(lines), mesh.axes)
    assert len(found) == len(kinds) * times and {one.axes for one in found} == {axes}
    return found


def described(**axes):
    """A mesh of virtual devices."""
    shape = (*axes.values(),)
    ids = np.arange(np.prod(shape)).reshape(shape).tolist()
    return MeshDescription(axes, dict.fromkeys(axes, "Auto"), ids)


def traffic(mesh, axes, *kinds, on="TPU v5e"):
    return roofline_of(None, sent(mesh, axes, *kinds), on, mesh).traffic


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
@pytest.mark.parametrize(
    ("name", "axes", "links", "chips", "count", "on"),
    [
        ("v5e:16x16", ("model",), "ICI x (ring of 16)", 16, 2, "TPU v5e"),
        ("v5e:16x16", ("data", "model"), "ICI x (ring of 16) + y (ring of 16)", 256, 4, "TPU v6e"),
        ("v5e:16x16 strided", ("model",), "ICI x (line of 8)", 8, 1, "TPU v5e"),
        (
            "v5e:16x16 strided",
            ("data",),
            "ICI x (ring of 2, 8 apart) + y (ring of 16)",
            32,
            2 + 2 / 8,
            "TPU v5e",
        ),
        ("v5e:4x4", ("data",), "ICI y (line of 4)", 4, 1, "TPU v5e"),
        ("v5e:4x4", ("data", "model"), "ICI x (line of 4) + y (line of 4)", 16, 2, "TPU v5e"),
        ("v4:2x2x1", ("data",), "ICI x (line of 2) + y (line of 2)", 4, 2, "TPU v4"),
        ("v5p:4x4x4", ("model",), "ICI x (ring of 4)", 4, 2, "TPU v5p"),
        ("v5p:4x4x4", ("data",), "ICI y (ring of 4) + z (ring of 4)", 16, 4, "TPU v5p"),
    ],
)
def test_by_hand(name, axes, links, chips, count, on, kind):
    [row] = traffic(recorded_mesh(name), axes, kind, on=on)
    link = {"TPU v4": 50e9, "TPU v5e": 50e9, "TPU v5p": 100e9, "TPU v6e": 100e9}[on]
    assert (row.axes, row.links, row.bandwidth) == (axes, links, pytest.approx(count * link))
    assert row.bytes_sent == B * (chips - 1) // chips * (2 if kind == "all-reduce" else 1)
    assert row.seconds == pytest.approx(row.bytes_sent / count / link)


def loads(shape, rings):
    """The most blocks that an all-to-all of all chips sends over one link, on shortest paths."""
    load = Counter()
    chips = list(itertools.product(*map(range, shape)))
    for source, target in itertools.permutations(chips, 2):
        here = list(source)
        for axis, (size, is_ring) in enumerate(zip(shape, rings, strict=True)):
            up = (target[axis] - here[axis]) % size if is_ring else target[axis] - here[axis]
            ways = {1: up, -1: size - up} if is_ring else {1 if up > 0 else -1: abs(up)}
            least = min(ways.values())
            ways = {step: hops for step, hops in ways.items() if hops == least}
            for step, hops in ways.items():
                for hop in range(hops):
                    at = (*here[:axis], (here[axis] + step * hop) % size, *here[axis + 1 :])
                    load[at, axis, step] += 1 / len(ways)
            here[axis] = target[axis]
    return max(load.values())


@pytest.mark.parametrize(
    ("shape", "rings"),
    [
        *(((n,), (False,)) for n in (2, 3, 5, 8)),
        ((16,), (True,)),
        ((4, 4), (False, False)),
        ((2, 16), (False, True)),
        ((3, 5), (False, False)),
    ],
)
def test_all_to_all_takes_as_long_as_on_shortest_paths(shape, rings):
    at = np.indices(shape).reshape(len(shape), -1).tolist()
    coordinates = {"slice": [0] * len(at[0]), **dict(zip("xy", at, strict=False))}
    mesh = dataclasses.replace(described(a=len(at[0])), coordinates=coordinates)
    [row] = traffic(mesh, ("a",), "all-to-all")
    assert [f"ring of {n}" in row.links for n in shape] == [*rings]
    assert row.seconds == pytest.approx(loads(shape, rings) * B / len(at[0]) / 50e9)


@pytest.mark.parametrize("name", ["v5e:16x16", "v5e:4x4"])  # a ring, a line
def test_messages_of_a_permutation_take_one_link(name):
    mesh = recorded_mesh(name)
    pairs = ",".join(f"{{{i},{i + 1}}}" for i in range(3))  # along "model", at the first "data"
    hlo = f"%p = u8[{B}]{{0}} collective-permute(%x), source_target_pairs={{{pairs}}}"
    found = roofline_of(None, collectives_of(hlo, mesh.axes), "TPU v5e", mesh)
    assert found.traffic[0].links.startswith("ICI x")
    assert found.interconnect_s == pytest.approx(B / 50e9)


def test_slices_and_chips_are_entered_once():
    mesh = recorded_mesh("v5e:2x4 slices")
    ici, dcn = traffic(mesh, ("data", "model"), "all-gather")
    assert ici.links == "ICI x (line of 2) + y (line of 4)" and dcn.links == "DCN"
    # Each slice of 8 receives the half that the other has.
    assert (dcn.bytes_sent, dcn.seconds) == (B / 2 / 8, pytest.approx(B / 2 / 8 / 3.125e9))
    assert ici.bytes_sent + dcn.bytes_sent == B * 15 // 16
    [ici, dcn] = traffic(mesh, ("data", "model"), "all-to-all")
    assert dcn.bytes_sent == B / 2
    # Chips of TPU7x are two devices: 8 devices of an axis are a ring of 4 chips.
    [ici] = traffic(recorded_mesh("tpu7x:4x4x4"), ("model",), "all-gather", on="TPU7x")
    assert (ici.links, ici.bytes_sent) == ("ICI x (ring of 4)", B * 3 / 8)
    assert ici.seconds == pytest.approx(B * 3 / 4 / (2 * 100e9))  # of the chip


def test_gpus():
    mesh = described(data=4, model=8)
    [row] = traffic(mesh, ("model",), "all-reduce", on="H100 SXM")
    assert row.links == "NVLink (nodes of 8 assumed)"
    assert row.seconds == pytest.approx(2 * B * 7 / 8 / 450e9)
    [row] = traffic(mesh, ("data",), "all-reduce", on="H100 SXM")
    assert (row.links, row.bandwidth) == ("network", 50e9)
    assert row.seconds == pytest.approx(2 * B * 3 / 4 / 50e9)
    inside, outside = traffic(mesh, ("data", "model"), "all-gather", on="H100 SXM")
    assert inside.seconds == pytest.approx(B * 7 / 8 / 450e9)
    assert outside.seconds == pytest.approx(B * 3 / 4 / 8 / 50e9)
    larger = dataclasses.replace(HARDWARE["B200"], domain=72)
    assert traffic(mesh, ("data",), "all-reduce", on=larger)[0].links == "NVLink"
    # Where the nodes are known, as JAX says: here the axis "data" is within a node.
    known = dataclasses.replace(mesh, coordinates={"slice": [*range(8)] * 4})
    [row] = traffic(known, ("data",), "all-reduce", on="H100 SXM")
    assert row.links == "NVLink"


def test_where_devices_are_unknown():
    """All links at once: no placement takes less."""
    mesh = described(data=16, model=16)
    [row] = traffic(mesh, ("model",), "all-reduce")
    assert (row.links, row.seconds) == ("all links", pytest.approx(2 * B * 15 / 16 / 200e9))
    placed = recorded_mesh("v5e:16x16")
    assert row.seconds <= traffic(placed, ("model",), "all-reduce")[0].seconds
    strange = "%a = u8[8]{0} all-reduce(%x), replica_groups={{0,5},{1,4},{2,7},{3,6}}"
    found = collectives_of(strange, {"data": 2, "model": 4})
    assert roofline_of(None, found, "TPU v5e", described(data=2, model=4)).traffic[0].axes is None
    # Groups of a part of an axis, which is in two slices.
    slices = recorded_mesh("v5e:2x4 slices")
    whole = MeshDescription({"data": 16}, {"data": "Auto"}, [*range(16)], slices.coordinates)
    parts = "%a = u8[80]{0} all-reduce(%x), replica_groups=[2,8]<=[16]"
    found = roofline_of(None, collectives_of(parts, whole.axes), "TPU v5e", whole)
    assert found.traffic[0].axes == ("data",) and found.interconnect_s is None
    # Coordinates of a torus with more dimensions than the device has.
    cube = recorded_mesh("v5p:4x4x4")
    assert traffic(cube, ("data",), "all-gather")[0].links == "all links"
    alone = dataclasses.replace(HARDWARE["H200"], interconnect_bandwidth=math.inf, domain=None)
    [row] = traffic(mesh, ("model",), "all-reduce", on=alone)
    assert (row.bandwidth, row.seconds) == (None, 0.0)
    no_network = Hardware("mine", 1e12, 2**30, 1e11, 1e10, 2)
    rows = traffic(recorded_mesh("v5e:2x4 slices"), ("data", "model"), "all-gather", on=no_network)
    assert [row.seconds is None for row in rows] == [False, True]


def test_links_work_at_once_and_one_link_in_turn():
    mesh = recorded_mesh("v5e:16x16")
    over = {
        axes: sent(mesh, axes, "all-gather", times=times)
        for axes, times in ((("data",), 2), (("model",), 3), (("data", "model"), 1))
    }
    ring, both = B * 15 / 16 / 100e9, B * 255 / 256 / 200e9
    collectives = Collectives([*over["data",], *over["model",]])
    found = roofline_of(Cost(197e12, 0.0, 0.0, ""), collectives, "TPU v5e", mesh)
    assert found.interconnect_s == pytest.approx(3 * ring)
    assert found.seconds == 1.0
    assert found.seconds_without_overlap == pytest.approx(1.0 + 5 * ring)
    # All links together do not send more than they can.
    collectives = Collectives([*over["data",], *over["data",], *over["data", "model"] * 4])
    found = roofline_of(None, collectives, "TPU v5e", mesh)
    assert found.interconnect_s == pytest.approx(4 * ring / 2 + 4 * both)


def test_reports_keep_the_coordinates():
    mesh = recorded_mesh("v5e:16x16 strided")
    report = dataclasses.replace(
        ProgramReport.from_dict(reports.report()),
        mesh=mesh,
        collectives=sent(mesh, ("model",), "all-reduce"),
    ).with_roofline("TPU v5e")
    again = ProgramReport.from_json(report.to_json())
    assert again == report
    assert again.with_roofline("TPU v5e") == report
    judged = Comparison({"tp": again}).judged(hardware="TPU v6e").reports["tp"].roofline
    assert judged.interconnect_s == report.roofline.interconnect_s / 2
    assert "ICI x (line of 8)  model  50.0 GB/s  28.0 MiB  587 µs" in str(report)
    assert "the compiler's own estimate: 1.90 µs" in str(report)


def test_coordinates_of_devices():
    def tpu(i, **more):
        return types.SimpleNamespace(
            id=i, platform="tpu", coords=[i // 2, 0, 0], core_on_chip=i % 2, **more
        )

    cores = {"slice": (0,) * 4, "x": (0, 0, 1, 1), "core": (0, 1, 0, 1)}
    assert _coordinates([tpu(i) for i in range(4)]) == cores
    sliced = [tpu(i, slice_index=i // 2) for i in range(4)]
    assert _coordinates(sliced) == cores | {"slice": (0, 0, 1, 1)}
    gpus = [types.SimpleNamespace(id=i, platform="gpu", slice_index=i // 2) for i in range(4)]
    assert _coordinates(gpus) == {"slice": (0, 0, 1, 1)}
    assert MeshDescription.of(Mesh(np.array(jax.devices()), ("a",))).coordinates == {}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("name", MESHES)
def test_recorded_meshes_are_those_of_the_compiler(name):
    assert mesh_of(name) == recorded_mesh(name)
