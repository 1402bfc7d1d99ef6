"""Several slices: meshes of their devices, strategies across them, programs for one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_sharding import jit
from nnx_sharding.analysis import collectives_of, roofline_of
from nnx_sharding.analysis.hlo import parse
from nnx_sharding.analysis.meshes import MeshDescription
from nnx_sharding.partition import fsdp, make_mesh, tensor_parallel, zero1
from nnx_sharding.planning import plan
from nnx_sharding.report.compiling import fingerprint
from zoo import MLP, P, mesh_of


@pytest.fixture
def two_slices(monkeypatch):
    """The virtual devices are in two slices."""
    kind = type(jax.devices()[0])
    monkeypatch.setattr(kind, "slice_index", property(lambda d: d.id // 4), raising=False)


def slices(mesh):
    return np.vectorize(lambda device: device.slice_index)(mesh.devices).tolist()


def test_slices_are_along_the_first_axes(two_slices):
    assert slices(make_mesh({"replica": 2, "data": -1})) == [[0] * 4, [1] * 4]
    assert slices(make_mesh({"model": 1, "data": 8})) == [[0] * 4 + [1] * 4]
    shuffled = np.random.default_rng(0).permutation(jax.devices()).tolist()
    mesh = make_mesh({"replica": 2, "data": 4}, devices=shuffled)
    assert slices(mesh) == [[0] * 4, [1] * 4]
    one = make_mesh({"data": 2, "model": 2}, devices=jax.devices()[:4])
    assert one == jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"2 slices do not form axes of the sizes \(1, 6\)"):
        make_mesh({"a": 1, "data": 6}, devices=jax.devices()[:6])
    with pytest.raises(ValueError, match=r"2 slices do not form .* \(3,\)"):
        make_mesh({"data": 3}, devices=jax.devices()[2:5])


def test_meshes_as_in_jax():
    for shape in ((8,), (2, 4), (4, 2), (2, 2, 2)):
        names = ("a", "b", "c")[: len(shape)]
        assert make_mesh(dict(zip(names, shape, strict=True))) == jax.make_mesh(shape, names)


def test_axes_across_slices_are_asked_for(two_slices):
    model = MLP(nnx.Rngs(0), 128, 256)
    mesh = make_mesh({"data": 8, "model": 1})
    for strategy, axis in ((fsdp, "data"), (fsdp, ("model", "data")), (tensor_parallel, "data")):
        with pytest.raises(ValueError, match="'data' are in different slices"):
            strategy(model, mesh=mesh, axis=axis)
        strategy(model, mesh=mesh, axis=axis, across_slices=True)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"make_mesh.*across_slices=True"):
        fsdp(model)
    fsdp(model, mesh=mesh.abstract_mesh)  # whose devices are not known
    tensor_parallel(model, mesh=mesh)
    hybrid = make_mesh({"replica": 2, "data": 4})
    assert fsdp(model, mesh=hybrid).map_prefix(("up", "kernel"), None) == P(None, "data")
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    zero1(model, mesh=mesh, optimizer=optimizer)  # sends no more than gradients


def make():
    model = MLP(nnx.Rngs(0), 128, 256)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.usefixtures("compile_here")
def test_a_plan_and_its_run_have_one_program(two_slices):
    x = jnp.ones((16, 128))
    options = {"devices": 8, "num_slices": 2, "strategies": ["hsdp"], "quiet": True}
    best = plan(train_step, *nnx.eval_shape(make), x, **options).best
    assert best.name == "hsdp, replica 2 × data 4"
    mesh = make_mesh(best.sizes)
    assert best.in_shardings[0].map_prefix(("up", "kernel"), None) == P(None, "data")
    by_hand = fsdp(make()[0], mesh=mesh, optimizer=make()[1])
    program, model, optimizer = [], *make()
    for where, specs in (
        (best.mesh, best.in_shardings),
        (mesh, best.in_shardings),
        (mesh, (by_hand, by_hand, P(("replica", "data")))),
    ):
        step = jit(train_step, in_shardings=specs, mesh=where)
        program.append(fingerprint(step.lower(model, optimizer, x), where))
    assert program[0] == program[1] == program[2]
    other = jit(train_step, in_shardings=best.in_shardings, mesh=mesh_of((4, 2), tuple(mesh.shape)))
    assert fingerprint(other.lower(model, optimizer, x), mesh) != program[0]
    options = jit(
        train_step,
        in_shardings=best.in_shardings,
        mesh=mesh,
        compiler_options={"xla_cpu_enable_fast_math": True},
    )
    assert fingerprint(options.lower(model, optimizer, x), mesh) != program[0]
    loss, plain = step(model, optimizer, x), make()
    np.testing.assert_allclose(loss, train_step(*plain, x), rtol=1e-5)
    np.testing.assert_allclose(model.up.kernel, plain[0].up.kernel, rtol=1e-4, atol=1e-6)


def exchange(kind, sent, received, target, name="psum_0"):
    """What the TPU compiler writes for a collective between slices."""
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale'
        f'_runtime",_xla_host_transfer_rendezvous="{name}",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    done = 'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}'
    return f"""\
HloModule m, num_partitions=4, entry_computation_layout={{()->f32[]}}

ENTRY %main (p: {sent}) -> {received} {{
  %p = {sent} parameter(0)
  %t = token[] after-all()
  %send = ({sent}, u32[], token[]) send(%p, %t), channel_id=1, {attributes}
  %recv = ({received}, u32[], token[]) recv(%t), channel_id=2, {attributes}
  %send-done = token[] send-done(%send), channel_id=1, is_host_transfer=true, {done}
  %recv-done = ({received}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true, {done}
  ROOT %r = {received} get-tuple-element(%recv-done), index=0
}}"""


ROW = 64 * 256 * 4
EACH = '"{1,2}x{0:3}"'
GROUPS, ALL = "{{0,4},{1,5},{2,6},{3,7}}", "{{0,1,2,3,4,5,6,7}}"
BOTH = ("replica", "data")
PAIRS = "{{0->4},{4->0},{1->5},{5->1},{2->6},{6->2},{3->7},{7->3}}"


@pytest.mark.parametrize(
    ("kind", "sent", "received", "target", "wanted"),
    [
        ("ALL_REDUCE", 64, 64, EACH, ("all-reduce", ("replica",), ROW, ROW)),
        ("ALL_GATHER", 64, 128, EACH, ("all-gather", ("replica",), 2 * ROW, ROW)),
        ("REDUCE_SCATTER", 128, 64, EACH, ("reduce-scatter", ("replica",), 2 * ROW, ROW)),
        ("ALL_TO_ALL", 64, 64, GROUPS, ("all-to-all", ("replica",), ROW, ROW // 2)),
        ("ALL_TO_ALL", 64, 64, ALL, ("all-to-all", BOTH, ROW, ROW * 7 // 8)),
        ("ONE_TO_ONE", 64, 64, PAIRS, ("collective-permute", ("replica",), ROW, ROW)),
        ("ALL_REDUCE", 64, 64, "{{0,5},{4,1}}", ("all-reduce", None, ROW, ROW)),
    ],
)  # fmt: skip
def test_exchanges_are_collectives(two_slices, kind, sent, received, target, wanted):
    text = exchange(kind, f"f32[{sent},256]{{1,0:T(8,128)}}", f"f32[{received},256]{{1,0}}", target)
    mesh = make_mesh({"replica": 2, "data": 4})
    assert parse(text).unread == []
    [one] = collectives_of(text, mesh)
    assert (one.kind, one.axes, one.bytes, one.bytes_sent) == wanted
    [unplaced] = collectives_of(text)
    assert (unplaced.kind, unplaced.axes, unplaced.bytes_sent) == (one.kind, None, one.bytes_sent)
    # The devices of TPUs: each slice is a square.
    corners = [(x, y) for _ in range(2) for x, y in ((0, 0), (1, 0), (1, 1), (0, 1))]
    x, y = zip(*corners, strict=True)
    places = {"slice": (0,) * 4 + (1,) * 4, "x": x, "y": y}
    described = MeshDescription({"replica": 2, "data": 4}, {}, None, places)
    roofline = roofline_of(None, collectives_of(text, mesh), "TPU v5e", described)
    links = {row.links: row.seconds for row in roofline.traffic}
    if one.axes == ("replica",):
        assert links == {"DCN": one.bytes_sent / 3.125e9 + 1e-6}
    elif one.axes is None:
        assert links == {"all links": None} and roofline.interconnect_s is None
    else:
        assert links["DCN"] == ROW / 2 / 3.125e9 + 1e-6 and len(links) == 2


def test_collectives_of_one_slice_are_in_all(two_slices):
    """Here the slices are along the second axis."""
    devices = np.array(jax.devices()).reshape(2, 4).T
    mesh = jax.sharding.Mesh(devices, ("data", "replica"))
    text = exchange("ALL_REDUCE", "f32[8]{0}", "f32[8]{0}", '"{1,2}x{0:3}"')
    own = "%a = f32[32]{0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
    own += ", use_global_device_ids=true"
    found = collectives_of(text.replace("  ROOT", f"  {own}\n  ROOT"), mesh)
    assert [(one.kind, one.axes, one.num_groups) for one in found] == [
        ("all-reduce", ("replica",), 4),
        ("all-gather", ("data",), 2),
    ]


@pytest.mark.parametrize(
    ("kind", "target"),
    [("ONE_TO_ONE", "{{0->9},{9->0}}"), ("ALL_REDUCE", "{{0,9}}"), ("ALL_REDUCE", '"{1,3}x{0:3}"')],
)
def test_devices_that_the_mesh_lacks(two_slices, kind, target):
    """Over which links they send is unknown, and so is the time."""
    mesh = make_mesh({"replica": 2, "data": 4})
    found = collectives_of(exchange(kind, "f32[8]{0}", "f32[8]{0}", target), mesh)
    [one] = found
    assert (one.axes, one.group_size, one.bytes_sent) == (None, 2, 32)
    roofline = roofline_of(None, found, "TPU v5e", MeshDescription.of(mesh))
    assert [row.seconds for row in roofline.traffic] == [None] and roofline.seconds is None


@pytest.mark.parametrize(
    "change",
    [
        ("ALL_REDUCE", "ALL_TOMORROW"),
        ("psum_0", "psum_1", 1),
        ("(f32[8]{0}, u32", "((f32[8]{0}), u32"),
    ],
)
def test_exchanges_that_are_not_understood(change):
    text = exchange("ALL_REDUCE", "f32[8]{0}", "f32[8]{0}", '"{1,2}x{0:3}"')
    assert collectives_of(text) is not None
    assert change[0] in text
    changed = text.replace(*change)
    assert parse(changed).unread and collectives_of(changed) is None
