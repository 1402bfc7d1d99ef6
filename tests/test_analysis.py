"""``analysis``: flops, bytes, memory and collectives against figures computed by hand."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from nnx_sharding import StateSharding, jit, shard_map
from nnx_sharding.analysis import (
    HARDWARE,
    Cost,
    Hardware,
    collectives_of,
    cost_of,
    memory_of,
    parameter_table,
    roofline_of,
)
from nnx_sharding.analysis.collectives import Collectives
from nnx_sharding.analysis.hardware import hardware_of
from nnx_sharding.analysis.memory import Memory
from nnx_sharding.analysis.roofline import Roofline
from nnx_sharding.analysis.tables import drawn
from nnx_sharding.analysis.traffic import Traffic
from nnx_sharding.analysis.units import bytes_text
from nnx_sharding.checkpoint import contents, save
from nnx_sharding.report import ProgramReport
from zoo import MLP, P, mesh_of, mlp_specs

MESH = mesh_of((2, 4), ("data", "model"))
F32 = 4


def abstract(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(fun, *args, **options):
    return jit(fun, **options).lower(*args).compile()


def bytes_sent(found):
    """What a program sends by kind and axes."""
    sums = {}
    for one in found:
        key = (one.kind, one.axes)
        sums[key] = sums.get(key, 0) + one.total_bytes_sent
    return {key: sent for key, sent in sums.items() if sent}


class CostTest(parameterized.TestCase):
    def test_matmul(self):
        m, k, n = 64, 32, 48
        lowered = jit(jnp.matmul).lower(abstract(m, k), abstract(k, n))
        for cost in (lowered.cost(), lowered.compile().cost()):
            assert cost.flops == 2 * m * k * n
            assert cost.bytes_accessed == F32 * (m * k + k * n + m * n)
            assert cost.transcendentals == 0
            assert cost.arithmetic_intensity == cost.flops / cost.bytes_accessed

    def test_before_optimisation_of_all_devices_and_after_it_of_one(self):
        m, k, n = 64, 32, 48
        specs = (P("data", None), P(None, "model"))
        fun = jit(jnp.matmul, in_shardings=specs, out_shardings=P("data", "model"), mesh=MESH)
        lowered = fun.lower(abstract(m, k), abstract(k, n))
        # XLA counts -1 for each annotation of a sharding.
        assert 0 <= 2 * m * k * n - lowered.cost().flops <= 3
        assert lowered.cost().stage == "before optimisation, all devices, bodies of loops once"
        own = lowered.compile().cost(loops=False)
        assert own.flops == 2 * (m // 2) * k * (n // 4)
        assert own.bytes_accessed == F32 * (m // 2 * k + k * n // 4 + m // 2 * n // 4)
        assert own.stage == "after optimisation, one device"

    def test_inside_of_shard_map_counts_as_written(self):
        specs = (P("data", None), P(None, "model"))
        fun = shard_map(jnp.matmul, mesh=MESH, in_specs=specs, out_specs=P("data", "model"))
        lowered = jit(fun).lower(abstract(64, 32), abstract(32, 48))
        flops = 2 * 32 * 32 * 12
        assert lowered.compile().cost().flops == flops
        assert 0 <= flops - lowered.cost().flops <= 3

    def test_transcendentals(self):
        cost = compiled(jnp.exp, abstract(8, 16)).cost()
        assert (cost.flops, cost.transcendentals) == (0, 128)

    def test_unknown_figures(self):
        raw = {"flops": -1.0, "bytes accessed": math.inf, "transcendentals": math.nan}
        assert cost_of(raw, "s") == Cost(None, None, None, "s")
        assert cost_of({"flops": 3}, "s") == Cost(3.0, 0.0, 0.0, "s")
        for nothing in (None, {}, [], "?"):
            assert cost_of(nothing, "s") is None
        assert Cost(None, 1.0, 0.0, "s").arithmetic_intensity is None
        assert Cost(1.0, 0.0, 0.0, "s").arithmetic_intensity is None
        assert "–" in str(Cost(None, 1.0, 0.0, "s"))  # noqa: RUF001

    @parameterized.parameters(False, True)
    def test_loops_multiplied_out_are_those_written_out(self, gradient):
        length, batch, width = 6, 16, 32

        def layer(x, kernel):
            return jnp.tanh(x @ kernel), None

        def loop(kernels, x):
            return lax.scan(layer, x, kernels)[0].sum()

        def written_out(kernels, x):
            for kernel in kernels:
                x, _ = layer(x, kernel)
            return x.sum()

        args = abstract(length, width, width), abstract(batch, width)
        # By both arguments: otherwise the program without a loop has one product less.
        change = functools.partial(jax.grad, argnums=(0, 1)) if gradient else lambda fun: fun
        ours, plain = (compiled(change(fun), *args) for fun in (loop, written_out))
        once, more, truth = ours.cost(loops=False), ours.cost(), plain.cost(loops=False)
        product = 2 * batch * width * width
        products = 3 * length if gradient else length
        assert truth.flops >= products * product
        assert once.flops < truth.flops / 3
        assert abs(more.flops / truth.flops - 1) < 0.05
        assert more.transcendentals == truth.transcendentals == length * batch * width
        # What a loop carries is copied, so it reads and writes more than the program without.
        assert truth.bytes_accessed * 0.9 < more.bytes_accessed < truth.bytes_accessed * 2.5
        assert more.stage == "after optimisation, one device, loops multiplied out"
        known = dict.fromkeys(("host_bytes", "int8_flops", "fp8_flops"), 0.0)
        cost = plain.cost()
        assert abs(cost.bytes_accessed / truth.bytes_accessed - 1) < 1e-3
        known |= {"bytes_accessed": cost.bytes_accessed, "stage": more.stage}
        assert cost == dataclasses.replace(truth, **known)


def exchange(mesh):
    """One collective of each kind over the axes of a mesh, on blocks of 8 × 16 floats."""
    first, *_, last = mesh.axis_names
    size = mesh.shape[last]

    def block(x):
        assert x.shape == (8, 16)
        results = (
            lax.psum(x, first),
            lax.psum(x, last),
            lax.psum(x, mesh.axis_names),
            lax.all_gather(x, last, tiled=True),
            lax.psum_scatter(x, first, tiled=True),
            lax.all_to_all(x, last, 0, 0, tiled=True),
            lax.ppermute(x, last, [(i, (i + 1) % size) for i in range(size)]),
        )
        return [jnp.sum(result * result, keepdims=True) for result in results]

    out_specs = P(mesh.axis_names)
    return jax.shard_map(
        block, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=out_specs, check_vma=False
    )


def meshes():
    devices = np.array(jax.devices())
    return {
        "data_model": MESH,
        "model_data": mesh_of((4, 2), ("model", "data")),
        "transposed": Mesh(devices.reshape(2, 4).T, ("model", "data")),
        "three_axes_reversed": Mesh(devices[::-1].reshape(2, 2, 2), ("a", "b", "c")),
        "with_an_axis_of_one": mesh_of((1, 2, 4), ("pipe", "data", "model")),
        "shuffled": Mesh(devices[[3, 1, 0, 2, 7, 6, 4, 5]].reshape(2, 4), ("data", "model")),
        "explicit": mesh_of((2, 4), ("data", "model"), "explicit"),
        "half": mesh_of((2, 2), ("data", "model")),
    }


class CollectivesTest(parameterized.TestCase):
    @parameterized.parameters(*meshes())
    def test_kinds_axes_and_bytes(self, name):
        mesh = meshes()[name]
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        x = abstract(8 * mesh.size, 16, sharding=sharding)
        with jax.set_mesh(mesh):
            found = compiled(exchange(mesh), x).collectives()
        first, *_, last = mesh.axis_names
        n, m, total = mesh.shape[first], mesh.shape[last], mesh.size
        block = 8 * 16 * F32
        axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
        expected = {
            ("all-reduce", (first,)): 2 * block * (n - 1) // n,
            ("all-reduce", (last,)): 2 * block * (m - 1) // m,
            ("all-reduce", axes): 2 * block * (total - 1) // total,
            ("all-gather", (last,)): block * (m - 1),
            ("reduce-scatter", (first,)): block * (n - 1) // n,
            ("all-to-all", (last,)): block * (m - 1) // m,
            ("collective-permute", (last,)): block,
        }
        assert bytes_sent(found) == {key: sent for key, sent in expected.items() if sent}
        sizes = {one.group_size for one in found if one.axes == axes}
        assert sizes == {total}
        assert all(one.group_size * one.num_groups == total for one in found)
        assert found.bytes_sent == sum(expected.values())
        assert sum(found.by_kind().values()) == sum(found.by_axes().values()) == found.bytes_sent
        assert len(found.of("all-reduce", *reversed(axes))) == 1
        assert not found.of("all-gather", first)

    @parameterized.parameters(((8,), ("data",)), ((2, 4), ("data", "model")))
    def test_data_parallel_gradient(self, shape, names):
        mesh = mesh_of(shape, names)
        model = nnx.eval_shape(lambda: MLP(features=16, hidden=32))

        @jit(in_shardings=(P(), P(names)), out_shardings=P(), mesh=mesh)
        def gradient(model, x):
            return nnx.grad(lambda model: (model(x) ** 2).sum())(model)

        found = gradient.lower(model, abstract(32, 16)).compile().collectives()
        parameters = 2 * 16 * 32 * F32
        assert {one.kind for one in found} == {"all-reduce"}
        # The compiler may send it along one axis after the other.
        assert {axis for one in found for axis in one.axes} == set(names)
        per_axis = {names: sum(one.bytes for one in found if one.axes == names)}
        for axis in names:
            per_axis[axis] = sum(one.bytes for one in found if one.axes == (axis,))
        assert per_axis[names] == parameters or {per_axis[axis] for axis in names} == {parameters}

    @parameterized.parameters("auto", "explicit")
    def test_megatron(self, kind):
        mesh = mesh_of((2, 4), ("data", "model"), kind)
        model = nnx.eval_shape(lambda: MLP(features=16, hidden=32))
        options = {"in_shardings": (mlp_specs(), P("data")), "mesh": mesh}
        batch, features = 32, 16
        x = abstract(batch, features, sharding=NamedSharding(mesh, P("data")))

        def forward(model, x):
            hidden = nnx.relu(model.up(x))
            kernel = model.down.kernel[...]
            data = NamedSharding(mesh, P("data")) if kind == "explicit" else None
            return jnp.dot(hidden, kernel, out_sharding=data)

        def gradient(model, x):
            return nnx.grad(lambda model, x: (forward(model, x) ** 2).sum(), argnums=1)(model, x)

        activations = batch // 2 * features * F32
        [found] = compiled(forward, model, x, **options).collectives()
        assert (found.kind, found.axes, found.bytes) == ("all-reduce", ("model",), activations)
        assert found.bytes_sent == 2 * activations * 3 // 4
        assert (found.times, found.in_loop) == (1, False)
        assert found.operation.endswith("dot_general")
        both = compiled(gradient, model, x, **options).collectives()
        assert [(one.kind, one.axes, one.bytes) for one in both] == [
            ("all-reduce", ("model",), activations)
        ] * 2

    def test_fsdp(self):
        model = nnx.eval_shape(lambda: MLP(features=16, hidden=32))
        sharding = StateSharding({...: P("data")})
        mesh = mesh_of((8,), ("data",))

        def gradient(model, x):
            shards = nnx.state(model)

            def loss(shards):
                gathered = jax.tree.map(lambda one: lax.all_gather(one, "data", tiled=True), shards)
                hidden = nnx.relu(x @ gathered["up"]["kernel"][...])
                return ((hidden @ gathered["down"]["kernel"][...]) ** 2).sum()

            return jax.grad(loss)(shards)

        fun = shard_map(gradient, mesh=mesh, in_specs=(sharding, P("data")), out_specs=P("data"))
        found = jit(fun).lower(model, abstract(32, 16)).compile().collectives()
        kernels = 2 * 16 * 32 * F32
        assert bytes_sent(found) == {
            ("all-gather", ("data",)): kernels * 7 // 8,
            ("reduce-scatter", ("data",)): kernels * 7 // 8,
        }
        assert sum(one.bytes for one in found.of("reduce-scatter")) == kernels

    def test_loops(self):
        mesh = mesh_of((2, 4), ("data", "model"))

        def block(x, limit):
            def inner(x, _):
                return lax.psum(x, "model") * 0.1, None

            def outer(x, _):
                x = lax.scan(inner, x, None, length=3)[0]
                return lax.pmean(x, "data"), None

            x = lax.scan(outer, x, None, length=5)[0]
            return lax.while_loop(
                lambda x: x[0, 0] < limit, lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), x
            )

        fun = jax.shard_map(
            block,
            mesh=mesh,
            in_specs=(P("data", "model"), P()),
            out_specs=P("data", "model"),
            check_vma=False,
        )
        found = compiled(fun, abstract(8, 16), abstract()).collectives()
        runs = {(*one.axes, one.kind): (one.times, one.in_loop) for one in found}
        assert runs == {
            ("model", "all-reduce"): (15, True),
            ("data", "all-reduce"): (5, True),
            ("data", "collective-permute"): (None, True),
        }
        block = 4 * 4 * F32
        sent = {"all-reduce": 15 * (2 * block * 3 // 4) + 5 * block, "collective-permute": None}
        assert (found.bytes_sent, found.by_kind()) == (None, sent)
        assert found.by_axes() == {("model",): 15 * (2 * block * 3 // 4), ("data",): None}
        assert found.bytes_sent_at_least == sent["all-reduce"]
        known = bytes_text(sent["all-reduce"])
        assert f"in one call: ≥ {known}, as a loop is of unknown length" in str(found)

    def test_source_is_the_line_of_the_user_also_through_flax(self):
        model = nnx.eval_shape(MLP)
        lines = {}

        def apply(model, x):
            lines["up"] = inspect.currentframe().f_lineno + 1
            hidden = model.up(x)
            lines["down"] = inspect.currentframe().f_lineno + 1
            return model.down(hidden)

        specs = (mlp_specs(), P("data"))
        [found] = compiled(
            apply, model, abstract(8, 4), in_shardings=specs, mesh=MESH
        ).collectives()
        assert found.source == f"test_analysis.py:{lines['down']}"

    @parameterized.parameters(
        ("[2,4]<=[8]", "model", ()),
        ("[1,8]<=[8]", "data+model", ()),
        ("[4,2]<=[2,2,2]T(0,2,1)", "model (2 of 4)", ((2, 4),)),
        ("mesh['data'=2,'model'=4] {'model':(1)2}", "model (2 of 4)", ((2, 4),)),
        ("{{0,1,4,5},{2,3,6,7}}", "data+model (2 of 4)", ((2, 2), (2, 4))),
    )
    def test_groups_over_a_part_of_an_axis(self, groups, over, parts):
        hlo = f"%a = f32[64]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
        [found] = collectives_of(hlo, {"data": 2, "model": 4})
        assert (found.over, found.axis_parts) == (over, parts)
        assert "+".join(found.axes) == over.split(" ")[0]
        assert f"all-reduce  {over}  256 B" in str(found)

    def test_groups_that_no_axes_explain(self):
        hlo = "%a = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,4},{3,5},{6,7}}"
        [found] = collectives_of(hlo, MESH)
        assert (found.axes, found.group_size, found.num_groups) == (None, 2, 4)
        [found] = collectives_of(hlo)
        assert found.axes is None
        assert "?" in str(found)

    def test_sequence(self):
        hlo = "%a = f32[8]{0} all-reduce(%x)\n%b = f32[8]{0} all-gather(%x)"
        found = collectives_of(hlo, {"data": 2})
        assert (len(found), len(found[:1]), found[1].kind) == (2, 1, "all-gather")
        assert found[:] == found and hash(found[:]) == hash(found)
        assert found != Collectives() and found != 1
        assert str(Collectives()) == "no collectives"
        pairs = ",".join(f"{{{i},{1 - i}}}" for i in range(2))
        hlo = f"%c = f32[999999]{{0}} collective-permute(%x), source_target_pairs={{{pairs}}}, "
        hlo += f'metadata={{op_name="jit(f)/{"some_module/" * 9}split"}}'
        of = {"data": "…_module/some_module/split", "replica_and_data": "…ule/some_module/split"}
        for axis, shown in of.items():
            [_, rule, row, _] = str(collectives_of(hlo, {axis: 2})).splitlines()
            assert row.rstrip().endswith(f" {shown}") and len(rule) <= 104
        assert "all-gather" in str(found) and "Collective(" in repr(found)
        with self.assertRaisesRegex(ValueError, "'allreduce' is not a kind of collective"):
            found.of("allreduce")


class MemoryTest(parameterized.TestCase):
    @parameterized.parameters(
        "int2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "bool", "bfloat16", "complex64"
    )
    def test_bytes_are_those_of_xla(self, dtype):
        x = jax.ShapeDtypeStruct((7, 9), dtype)
        found = compiled(lambda x: x, x)
        expected = found.memory_analysis().argument_size_in_bytes
        assert found.memory().by_path == {"x": expected}
        [row] = parameter_table({"x": x})
        assert (row.bytes_per_device, row.bytes_total) == (expected, expected)
        assert found.report().parameters[0].bytes_total == expected
        if dtype in ("int2", "uint4"):  # which Orbax does not write
            return
        with tempfile.TemporaryDirectory() as folder:
            save(f"{folder}/x", {"x": jnp.zeros((7, 9), dtype)})
            assert contents(f"{folder}/x")[0].nbytes == expected

    def test_bytes_by_path_are_those_of_the_arrays(self):
        specs = {nnx.PathContains("up"): P(None, "model"), nnx.PathContains("down"): P("model")}

        @jit(out_shardings=StateSharding({**specs, ...: P()}), mesh=MESH)
        def create(rngs):
            model = MLP(rngs)
            return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        model, optimizer = create(nnx.Rngs(0))
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(MESH, P("data")))

        def step(model, optimizer, x, unused):
            gradients = nnx.grad(lambda model: (model(x) ** 2).sum())(model)
            optimizer.update(model, gradients)

        result = compiled(step, model, optimizer, x, jnp.ones(3), donate_argnums=0)
        memory = result.memory()
        assert (
            memory.by_path["model.up.kernel"]
            == model.up.kernel[...].addressable_shards[0].data.nbytes
        )
        state = jax.tree.leaves((nnx.state(model), nnx.state(optimizer), x))
        own = sorted(array.addressable_shards[0].data.nbytes for array in state)
        assert sorted(memory.by_path.values()) == own
        assert "unused" not in memory.by_path
        assert sum(memory.by_path.values()) == memory.arguments
        raw = result.memory_analysis()
        assert memory.outputs == raw.output_size_in_bytes
        assert memory.temporaries == raw.temp_size_in_bytes
        assert memory.aliased == raw.alias_size_in_bytes
        # The kernels are donated and updated.
        assert memory.aliased == 2 * 4 * 16 // 4 * F32
        assert (
            memory.arguments
            <= memory.peak
            <= memory.arguments + memory.outputs + memory.temporaries
        )
        assert memory.host_arguments == 0

        rows = {row.path: row for row in result.report().parameters}
        assert not rows["unused"].used and not rows["unused"].donated
        assert rows["model.up.kernel"].donated and rows["model.up.kernel"].used
        assert rows["model.up.kernel"].spec == P(None, "model")
        assert rows["model.up.kernel"].shard_shape == (4, 4)
        assert rows["x"].spec == P("data", None)

    def test_peak_is_what_has_to_be_free(self):
        class Analysis:
            argument_size_in_bytes = 10
            output_size_in_bytes = 6
            alias_size_in_bytes = 4
            temp_size_in_bytes = 3
            generated_code_size_in_bytes = 1
            host_temp_size_in_bytes = -1

        memory = memory_of(Analysis())
        assert memory.peak == 10 + 6 - 4 + 3 + 1
        assert (memory.host_temporaries, memory.host_outputs) == (None, None)
        Analysis.peak_memory_in_bytes = 12  # as on CPUs, without the temporaries
        assert memory_of(Analysis()).peak == 16
        Analysis.peak_memory_in_bytes = 20  # as on TPUs, with their vector memory
        assert memory_of(Analysis()).peak == 16
        Analysis.total_allocation_bytes = 14  # as on TPUs: the temporaries have one gap, not two
        assert (memory_of(Analysis()).peak, memory_of(Analysis()).temporaries) == (15, 2)
        for wrong in 0, -1, 11, 16:  # of other backends
            Analysis.total_allocation_bytes = wrong
            assert memory_of(Analysis()) == memory
        del Analysis.alias_size_in_bytes
        assert memory_of(Analysis()).peak is None
        assert memory_of(None) is None
        assert "unknown" in str(Memory())

    def test_no_mesh_and_no_arrays(self):
        result = compiled(lambda: jnp.ones(4))
        assert result.memory().by_path == {}
        report = result.report()
        assert (report.mesh, report.num_devices, report.parameters) == (None, 1, ())
        assert len(report.collectives) == 0
        assert ProgramReport.from_json(report.to_json()) == report

    def test_keys_and_scalars(self):
        result = compiled(lambda key, x: jax.random.normal(key) * x, jax.random.key(0), 2.0)
        assert result.memory().by_path == {"key": 8, "x": 4}
        assert result.memory().arguments == 12

    def test_references_and_methods(self):
        class Model(nnx.Module):
            def __init__(self):
                self.kernel = nnx.Param(jnp.ones((16, 16)))
                self.calls = nnx.BatchStat(jnp.array(0))

            @jit(in_shardings=(None, P("data")), mesh=MESH, static_argnames="factor")
            def step(self, x, *, factor=2):
                self.calls[...] += 1
                return x @ self.kernel * factor

        report = Model().step.lower(abstract(8, 16), factor=3).compile().report()
        assert report.name == "step"
        by_path = {"self.calls": 4, "self.kernel": 16 * 16 * F32, "x": 4 * 16 * F32}
        assert report.memory.by_path == by_path

        result = compiled(lambda ref, x: ref[...] + x, jax.new_ref(jnp.ones(4)), abstract(4))
        assert result.memory().by_path == {"ref": 16, "x": 16}
        assert [row.path for row in result.report("other").parameters] == ["ref", "x"]
        assert result.report("other").name == "other"


class RooflineTest(parameterized.TestCase):
    def test_by_hand(self):
        own = Hardware("own", 1e12, 2**30, 1e11, 1e10)
        hlo = "%p = u8[10000000000]{0} collective-permute(%x), source_target_pairs={{0,1}}"
        sent = collectives_of(hlo)
        found = roofline_of(Cost(4e12, 1e11, 0.0, "s"), sent, own)
        traffic = (Traffic(None, "all links", 1e10, 10**10, 1.0),)
        assert found == Roofline(
            "own", 4.0, 1.0, 1.0, "compute", 40.0, traffic, (), None, 1.0, {}, None
        )
        assert found.estimate == 5.0  # the device waits for it
        assert (found.seconds, found.seconds_without_overlap) == (4.0, 6.0)
        assert roofline_of(Cost(1.0, 1e12, 0.0, "s"), sent, own).bound_by == "memory"
        assert roofline_of(None, sent, own).interconnect_s == 1.0
        words = "bound by compute; 4.00 s if all of it overlaps, 6.00 s if nothing does"
        assert str(found).startswith("5.00 s, at peak rates of own, as scheduled:")
        assert str(found).endswith(words)
        # A program for CPUs has not the schedule of an accelerator; measured figures are its own.
        others = roofline_of(Cost(4e12, 1e11, 0.0, "s"), sent, own, platform="cpu")
        assert (others.exposed_s, others.estimate) == (None, 4.0)
        assert "own, as if all of it overlapped: compute" in str(others)
        own = dataclasses.replace(own, spread=0.1)
        measured = roofline_of(Cost(4e12, 1e11, 0.0, "s"), sent, own, platform="cpu")
        assert (measured.exposed_s, measured.estimate) == (1.0, 5.0)

    @parameterized.product(
        form=["pair", "wrapped", "waits"], in_loop=[False, True], times=[0.5, 1.0, 2.0]
    )
    def test_what_hides_behind_compute_by_hand(self, form, in_loop, times):
        gather = (
            "replica_groups=[1,4]<=[4], dimensions={0}, channel_id=1, use_global_device_ids=true"
        )
        start = {
            "pair": f"(f32[32,128], f32[128,128]) all-gather-start(%k), {gather}",
            "wrapped": "((f32[32,128]), f32[128,128]) async-start(%k), calls=%gathers",
            "waits": f"f32[128,128] all-gather(%k), {gather}",
        }[form]
        done = {
            "pair": "f32[128,128] all-gather-done(%start)",
            "wrapped": "f32[128,128] async-done(%start)",
            "waits": "f32[128,128] copy(%start)",
        }[form]
        multiply = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        named = 'metadata={op_name="jit(f)/beside"}'
        hlo = f"""HloModule test, is_scheduled=true, num_partitions=4

%gathers (k.1: f32[32,128]) -> f32[128,128] {{
  %k.1 = f32[32,128] parameter(0)
  ROOT %inner = f32[128,128] all-gather(%k.1), {gather}
}}

%multiplies (p.1: f32[128,128]) -> f32[128,128] {{
  %p.1 = f32[128,128] parameter(0)
  ROOT %twice = f32[128,128] dot(%p.1, %p.1), {multiply}
}}

%layer (x: f32[128,128], k: f32[32,128]) -> f32[128,128] {{
  %x = f32[128,128] parameter(0)
  %k = f32[32,128] parameter(1)
  %before = f32[128,128] dot(%x, %x), {multiply}
  %start = {start}
  %beside = f32[128,128] fusion(%before), kind=kOutput, calls=%multiplies, {named}
  %done = {done}
  ROOT %after = f32[128,128] dot(%beside, %done), {multiply}
}}

%body (state: (s32[], f32[128,128], f32[32,128])) -> (s32[], f32[128,128], f32[32,128]) {{
  %state = (s32[], f32[128,128], f32[32,128]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %y = f32[128,128] get-tuple-element(%state), index=1
  %w = f32[32,128] get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %call = f32[128,128] call(%y, %w), to_apply=%layer
  ROOT %new = (s32[], f32[128,128], f32[32,128]) tuple(%next, %call, %w)
}}

%condition (state.1: (s32[], f32[128,128], f32[32,128])) -> pred[] {{
  %state.1 = (s32[], f32[128,128], f32[32,128]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %five), direction=LT
}}

ENTRY %main (a: f32[128,128], b: f32[32,128]) -> f32[128,128] {{
  %a = f32[128,128] parameter(0)
  %b = f32[32,128] parameter(1)
  %zero = s32[] constant(0)
  %tuple = (s32[], f32[128,128], f32[32,128]) tuple(%zero, %a, %b)
  %while = (s32[], f32[128,128], f32[32,128]) while(%tuple), condition=%condition, body=%body
  ROOT %result = f32[128,128] get-tuple-element(%while), index=1
}}
"""
        if not in_loop:
            hlo = hlo.partition("%body")[0].replace("%layer (x", "ENTRY %layer (x")
        if form != "wrapped":
            hlo = hlo.replace(hlo[hlo.index("%gathers") : hlo.index("%multiplies")], "")
        runs = 5 if in_loop else 1
        flops, sent = 2 * 128**3, 3 * 128 * 128 * 4 // 4  # of a product; of a gather of 4 parts
        # So that a gather takes so many times as long as the product.
        own = Hardware("own", flops, 2**30, 1e9, sent / times)
        cost = Cost(3 * runs * flops, 0.0, 0.0, "s")
        found = roofline_of(cost, collectives_of(hlo, {"data": 4}), own)
        waits = times if form == "waits" else max(0, times - 1)
        assert found.exposed_s == pytest.approx(runs * waits)
        assert found.estimate == pytest.approx(runs * (3 + waits))
        if form == "waits":
            assert found.hidden == () and found.hidden_share == 0
            return
        behind = ("jit(f)/beside",)
        [hidden] = found.hidden
        expected = "all-gather", "", runs * sent, runs * times, runs * 1.0, behind
        assert dataclasses.astuple(hidden) == expected
        assert found.hidden_share == hidden.share == min(1, 1 / times)
        assert f"; {100 * hidden.share:.0f} % of the bytes can hide" in str(found)
        assert f"  {100 * hidden.share:.0f} %" in drawn(found)

    def test_a_collective_does_not_hide_behind_another(self):
        gather = "replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true"
        hlo = f"""HloModule test, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[128,128], k: f32[32,128]) -> f32[128,128] {{
  %x = f32[128,128] parameter(0)
  %k = f32[32,128] parameter(1)
  %one = (f32[32,128], f32[128,128]) all-gather-start(%k), channel_id=1, {gather}
  %other = (f32[32,128], f32[128,128]) all-gather-start(%k), channel_id=2, {gather}
  %last = f32[128,128] all-gather(%k), channel_id=3, {gather}
  %y = f32[128,128] add(%x, %x)
  %a = f32[128,128] all-gather-done(%one)
  %b = f32[128,128] all-gather-done(%other)
  ROOT %z = f32[128,128] add(%a, %b)
}}
"""
        read = 3 * 128 * 128 * 4  # by the first sum, with what it writes
        found = collectives_of(hlo, {"data": 4})
        assert sorted(x.bytes_beside for x in found) == [0, read, read]

    @parameterized.parameters(0.25, 0.5, 1.0, 2.0, 4.0)
    def test_collectives_wait_for_what_does_not_hide(self, seconds):
        gather = "replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true"
        dot = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        hlo = f"""HloModule test, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[128,128], k: f32[32,128]) -> f32[128,128] {{
  %x = f32[128,128] parameter(0)
  %k = f32[32,128] parameter(1)
  %one = (f32[32,128], f32[128,128]) all-gather-start(%k), channel_id=1, {gather}
  %y = f32[128,128] dot(%x, %x), {dot}
  %other = (f32[32,128], f32[128,128]) all-gather-start(%k), channel_id=2, {gather}
  %waits = f32[128,128] all-gather(%k), channel_id=3, {gather}
  %u = f32[128,128] dot(%y, %waits), {dot}
  %a = f32[128,128] all-gather-done(%one)
  %b = f32[128,128] all-gather-done(%other)
  ROOT %z = f32[128,128] dot(%a, %b), {dot}
}}
"""
        product = 2 * 128**3
        own = Hardware("own", product, 2**30, 1e9, 3 * 128 * 128 * 4 // 4 / seconds)
        found = roofline_of(Cost(3 * product, 0.0, 0.0, "s"), collectives_of(hlo, {"data": 4}), own)
        # The first hides behind two products, the second behind one, and the third behind none.
        assert [row.compute_s for row in found.hidden] == [2, 1]
        waits = max(0, seconds - 2) + max(0, seconds - 1) + seconds
        assert found.exposed_s == pytest.approx(waits)
        assert found.estimate == pytest.approx(max(3 * seconds, 3 + waits))

    def test_a_time_needs_all_its_figures(self):
        own = Hardware("own", 1e12, 2**30, 1e11, 1e10)
        hlo = "%p = u8[10]{0} collective-permute(%x), source_target_pairs={{0,1}}"
        costs = [None, *(Cost(f, b, 0.0, "s") for f in (None, 1.0) for b in (None, 1.0))]
        for cost, sent in itertools.product(costs, (None, collectives_of(hlo))):
            found = roofline_of(cost, sent, own)
            is_known = cost == Cost(1.0, 1.0, 0.0, "s") and sent is not None
            times = found.seconds, found.seconds_without_overlap, found.bound_by
            assert [time is not None for time in times] == [is_known] * 3
            assert ("bound by –" in str(found)) != is_known  # noqa: RUF001

    def test_of_a_program(self):
        result = compiled(jnp.matmul, abstract(64, 32), abstract(32, 48))
        found = result.roofline("tpu v5e")
        assert found.compute_s == 2 * 64 * 32 * 48 / 197e12
        assert found.interconnect_s == 0
        assert found.sources == HARDWARE["TPU v5e"].sources
        assert found.exposed_s is None  # it is scheduled for a CPU
        assert result.report(hardware="H200").roofline == result.roofline("H200")
        assert result.report().roofline is None

    def test_table(self):
        for name, found in HARDWARE.items():
            figures = {field.name for field in dataclasses.fields(Hardware)} - {"name", "sources"}
            assert HARDWARE[found.name] is found and found.sources.keys() == figures
            assert all(url.startswith("https://") for url in found.sources.values())
            assert hardware_of(name.upper()) is hardware_of(found) is found
            # The ridge point is between 50 and 1000 flops per byte on all of them.
            assert 50 < found.flops / found.memory_bandwidth < 1000
            assert found.interconnect_bandwidth < found.memory_bandwidth
            assert found.network_bandwidth < found.link_bandwidth
        assert HARDWARE["NVIDIA H100 80GB HBM3"].name == "H100 SXM"

    def test_mistakes(self):
        with self.assertRaisesRegex(ValueError, r"'TPU v5x'\. Did you mean 'TPU v5[ep]'\?.*'H200'"):
            hardware_of("TPU v5x")
        with self.assertRaisesRegex(ValueError, "unknown hardware 'abacus'. Known"):
            hardware_of("abacus")
        with self.assertRaisesRegex(ValueError, "not positive: flops = 0, memory_bandwidth = nan"):
            Hardware("own", 0, 1, math.nan, 1.0)
        with self.assertRaisesRegex(ValueError, "not positive: domain = 0"):
            Hardware("own", 1, 1, 1, 1.0, domain=0)
        with self.assertRaisesRegex(ValueError, "expected torus_dimensions of 0, 2 or 3, got 1"):
            Hardware("own", 1, 1, 1, 1.0, 1)
        with self.assertRaisesRegex(TypeError, "Hardware or the name of some, got 3"):
            roofline_of(None, None, 3)
        with self.assertRaisesRegex(TypeError, r"got Compiled\. Pass compiled\.as_text\(\)"):
            collectives_of(compiled(jnp.sin, abstract(4)))

    def test_abstract_meshes(self):
        hlo = "%a = f32[64]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add"
        [one] = collectives_of(hlo, AbstractMesh((2, 4), ("data", "model")))
        assert one.axes == ("model",)


def small_report():
    def run(x):
        return x * 2

    with jax.set_mesh(MESH):
        return compiled(run, abstract(8, 4), in_shardings=P("data")).report(hardware="TPU v4")


class ReportTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.report = small_report()

    def test_round_trip(self):
        report = self.report
        again = ProgramReport.from_json(report.to_json())
        assert again == report
        assert again.memory.by_path == report.memory.by_path == {"x": 4 * 4 * F32}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            report.save(path)
            assert ProgramReport.load(path) == report

    def test_content(self):
        report = self.report
        data = json.loads(report.to_json())
        assert (data["format"], data["version"]) == ("nnx_sharding.report", 12)
        assert data["mesh"] == {
            "axes": {"data": 2, "model": 4},
            "axis_types": {"data": "Auto", "model": "Auto"},
            "device_ids": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "coordinates": {},
        }
        [row] = data["parameters"]
        assert (row["path"], row["shape"], row["spec"]) == ("x", [8, 4], ["data", None])
        assert (report.name, report.platform, report.num_devices) == ("run", "cpu", 8)
        assert data["cost"]["flops"] == 4 * 4
        assert data["memory"]["by_path"] == {"x": 4 * 4 * F32}
        assert data["hlo"].startswith("HloModule")
        assert data["roofline"]["hardware"] == "TPU v4"
        text = str(report)
        for part in ("run: 8 × cpu, mesh data 2 × model 4", "no collectives", "TPU v4"):
            assert part in text

    def test_summary_of_many_arguments(self):
        rows = tuple(
            dataclasses.replace(self.report.parameters[0], path=f"model.p{i}") for i in range(30)
        )
        report = dataclasses.replace(
            self.report, parameters=rows, memory=None, mesh=None, roofline=None
        )
        text = str(report)
        assert "… and 18 more" in text and "memory: unknown" in text

    @parameterized.parameters(
        ("[", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it has no format, expected 'nnx_sharding.report'"),
        ('{"format": "x"}', "its format is 'x'"),
        (
            '{"format": "nnx_sharding.report", "version": 1}',
            "has the version 1; .* version 12",
        ),
        ('{"format": "nnx_sharding.report", "version": true}', "has the version True"),
        ('{"format": "nnx_sharding.report", "version": 12}', "name, .*reasons missing or unknown"),
    )
    def test_other_text(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            ProgramReport.from_json(text)

    @parameterized.parameters(
        ({"extra": 1}, "extra missing or unknown"),
        ({"collectives": [{"kind": "all-reduce"}]}, "bytes.* missing or unknown"),
        ({"parameters": 3}, "not a valid report"),
        ({"cost": {}}, "flops, .* missing"),
    )
    def test_another_form(self, parts, message):
        with self.assertRaisesRegex(ValueError, message):
            ProgramReport.from_dict(self.report.as_dict() | parts)

    def test_file_in_the_message(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            with self.assertRaises(FileNotFoundError):
                ProgramReport.load(path)
            path.write_text("{}")
            with self.assertRaisesRegex(ValueError, "report.json: not a report"):
                ProgramReport.load(path)
