"""Everything that takes arrays or batches, of which each process has a part."""

from preamble import RANK, assert_holds, mesh_of, spans_all  # isort: skip

import pickle
import re

import batches
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, explain_retraces, jit, limit_traces, merge, shard_map, split
from nnx_sharding.analysis import parameter_table
from nnx_sharding.checkpoint import Tensor
from nnx_sharding.compat.datarax import ArraySharder
from nnx_sharding.compat.eformer import make_shard_and_gather_fns
from nnx_sharding.errors import DonatedError
from nnx_sharding.experimental import transfer
from nnx_sharding.partition import (
    abstract_init,
    fsdp,
    sharded_init,
    tensor_parallel,
    with_sharding_constraint,
)
from nnx_sharding.placement import place
from nnx_sharding.report import check_sharding
from nnx_sharding.testing import assert_sharded
from zoo import Normed

MESH = mesh_of()
RULES = StateSharding(
    {
        nnx.All(nnx.PathContains("up"), nnx.PathContains("kernel")): P(None, "model"),
        nnx.All(nnx.PathContains("down"), nnx.PathContains("kernel")): P("model"),
        ...: P(),
    }
)
NUMBERS = np.random.default_rng(0).standard_normal((8, 16), np.float32)
ALONE = Normed(nnx.Rngs(0))
EXPECTED = np.asarray(ALONE(NUMBERS))


def placed(spec, array=NUMBERS, mesh=MESH):
    return with_sharding_constraint(array, spec, mesh=mesh)


def forward(**options):
    return jit(lambda m, x: m(x), in_shardings=(RULES, P("data")), mesh=MESH, **options)


def refused(function, kind, *parts):
    """A call that fails names all that it has to."""
    try:
        function()
    except kind as error:
        for part in parts:
            assert re.search(part, str(error)), (part, str(error))
    else:
        raise AssertionError(f"no {kind.__name__}")


def check_first_placement():
    """Models that each process made for itself, of JAX's arrays and of NumPy's."""
    apply = forward(out_shardings=P())
    for convert in (lambda x: x, np.asarray):
        model = Normed(nnx.Rngs(0))
        for variable in (model.up.kernel, model.down.kernel):
            variable.set_raw_value(convert(variable[...]))
        assert_holds(apply(model, placed(P("data"))), EXPECTED, 1e-5)
        assert spans_all(model.up.kernel[...]) and not model.up.kernel[...].is_fully_addressable
        assert_holds(model.up.kernel[...], ALONE.up.kernel[...])
        with limit_traces(0):
            apply(model, placed(P("data")))


def check_arguments():
    """Arrays of NumPy, of this process, donated ones, static ones."""
    model = sharded_init(Normed, RULES, MESH, nnx.Rngs(0))
    replicated = jit(lambda m, x: m(x), in_shardings=(RULES, P()), mesh=MESH)
    assert_holds(replicated(model, NUMBERS), EXPECTED, 1e-5)
    assert_holds(forward()(model, jnp.asarray(NUMBERS)), EXPECTED, 1e-5)
    scaled = jit(
        lambda m, x, n: n * m(x),
        in_shardings=(RULES, P("data")),
        donate_argnums=(0,),
        static_argnums=2,
        mesh=MESH,
    )
    old = model.up.kernel[...]
    for times in (2, 3):
        assert_holds(scaled(model, placed(P("data")), times), times * EXPECTED, 1e-4)
    assert old.is_deleted() and not model.up.kernel[...].is_deleted()


def check_shard_map():
    """The MLP by hand; and NumPy, which has to be the same in each process."""

    def by_hand(model, x):
        norm = model.norm
        h = jax.nn.gelu(model.up(x))
        mean = jax.lax.pmean(h.mean(-1, keepdims=True), "model")
        variance = jax.lax.pmean(((h - mean) ** 2).mean(-1, keepdims=True), "model")
        h = (h - mean) * jax.lax.rsqrt(variance + norm.epsilon) * norm.scale[...] + norm.bias[...]
        return jax.lax.psum(h @ model.down.kernel[...], "model") + model.down.bias[...]

    specs = StateSharding(
        {nnx.PathContains("bias"): P("model"), nnx.PathContains("scale"): P("model")}
    )
    specs = StateSharding(
        {
            nnx.All(nnx.PathContains("down"), nnx.PathContains("bias")): P(),
            nnx.All(nnx.PathContains("up"), nnx.PathContains("kernel")): P(None, "model"),
            ...: P("model"),
        }
    )
    apply = shard_map(by_hand, mesh=MESH, in_specs=(specs, P("data")), out_specs=P("data"))
    model = Normed(nnx.Rngs(0))
    for x in (placed(P("data")), NUMBERS):
        assert_holds(apply(model, x), EXPECTED, 1e-5)


def check_stages():
    """From tracing to calling what was compiled, and all that stages show."""
    model, x = Normed(nnx.Rngs(0)), placed(P("data"))
    traced = forward().trace(model, x)
    lowered = traced.lower()
    compiled = lowered.compile()
    for _ in range(2):
        assert_holds(compiled(model, x), EXPECTED, 1e-5)
    (shardings, _), _ = compiled.input_shardings
    assert shardings["up"]["kernel"].spec == P(None, "model")
    assert traced.out_info.shape == (8, 16)
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis() and compiled.cost_analysis()
    for stage in (traced, lowered, compiled, lowered.args_info, compiled.output_shardings):
        assert repr(stage)


def make():
    model = Normed(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def rules_of(both):
    model, optimizer = both
    base = tensor_parallel(model, mesh=MESH)
    return fsdp(model, mesh=MESH, base=base, min_size=0, optimizer=optimizer)


def check_init_and_reports():
    """Sharded creation of model and optimizer, and tables of it."""
    model, optimizer = sharded_init(make, rules_of, MESH)
    assert_holds(model.up.kernel[...], ALONE.up.kernel[...], 1e-6)
    abstract = abstract_init(make, rules_of, MESH)[0]
    assert abstract.up.kernel.sharding == model.up.kernel[...].sharding
    table = parameter_table({"model": model, "optimizer": optimizer})
    rows = {row.path: row for row in table}
    kernel = rows["model/up/kernel"]
    assert kernel.shard_shape == (8, 8) and kernel.bytes_total == 16 * 32 * 4
    # Of eight equal parts this process has four.
    assert kernel.bytes_addressable == 4 * kernel.bytes_per_device == kernel.bytes_total // 2
    assert rows["optimizer/opt_state/0/mu/up/kernel"].spec == kernel.spec
    assert "model/up/kernel" in str(table)
    report = check_sharding(model, rules_of((model, optimizer)), MESH)
    assert report.ok and len(report.device_bytes) == 8 and report.balance == 1
    assert str(report) and report.to_json()
    assert_sharded(model, tolerance=0.1)
    assert repr(model) and str(optimizer)


def check_constraints():
    """Arrays of NumPy, of this process, of all; another order of devices; gathered again."""
    for array in (NUMBERS, jnp.asarray(NUMBERS), placed(P("model", "data"))):
        assert_holds(placed(P("data", "model"), array), NUMBERS)
    model = Normed(nnx.Rngs(0))
    assert placed(RULES, model) is model
    assert_holds(model.up.kernel[...], ALONE.up.kernel[...])
    turned = Mesh(MESH.devices[::-1], MESH.axis_names, axis_types=(AxisType.Auto,) * 2)
    assert_holds(placed(P("data"), placed(P("data", "model")), turned), NUMBERS)
    shard, gather = make_shard_and_gather_fns({"x": P("data", "model")}, MESH)
    gathered = gather["x"](shard["x"](NUMBERS))
    np.testing.assert_array_equal(np.asarray(gathered), NUMBERS)


def check_metadata():
    """Specs that Variables carry."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(MESH):
        model = sharded_init(
            lambda: nnx.Linear(16, 32, kernel_init=init, rngs=nnx.Rngs(0)), mesh=MESH
        )
        out = jit(lambda m, x: m(x))(model, placed(P("data")))
    assert model.kernel[...].sharding.spec == P(None, "model")
    assert spans_all(out)


def check_retraces():
    """Retraces are explained without reading values."""
    model, apply = Normed(nnx.Rngs(0)), forward()
    apply(model, placed(P("data")))
    apply(model, placed(P("data"), np.ones((16, 16), np.float32)))
    model.note = 1
    apply(model, placed(P("data")))
    text = str(explain_retraces(apply))
    assert "3 times" in text and "note" in text and "(16, 16)" in text.replace("[", "("), text


def check_errors():
    """Messages about arrays that this process cannot read."""
    model, x = sharded_init(Normed, RULES, MESH, nnx.Rngs(0)), placed(P("data"))
    apply, other = forward(), placed(P("model"))
    refused(lambda: apply(model, NUMBERS), ValueError, r"x, shape \(8, 16\), P\('data'", "shard_b")
    refused(lambda: apply.lower(model, NUMBERS), ValueError, "shard_batches")
    refused(lambda: apply(model, x[:3]), ValueError, r"x, shape \(3, 16\)", "divisible by 'data'")
    refused(lambda: apply(model, other), ValueError, r"x, shape.*is P\('model'", "declared")
    local = jax.device_put(jnp.asarray(NUMBERS), jax.local_devices()[0])
    refused(lambda: apply(model, local), ValueError, "incompatible devices", "x: cpu")
    refused(lambda: jit(lambda x: x)([x, "word"]), TypeError, "'word'")
    refused(lambda: jit(lambda n: n, static_argnums=0)(x), ValueError, "static", "hash")
    refused(lambda: jit(lambda y: x + y)(x), UserWarning, "captures", "x, float32")
    model.up.kernel[...].delete()
    refused(lambda: apply(model, x), DonatedError, "model.up.kernel|m.up.kernel")


def check_graphs():
    """A model that is split, compared and merged."""
    model = sharded_init(Normed, RULES, MESH, nnx.Rngs(0))
    graph, state = split(model)
    assert graph == split(model)[0] and hash(graph) and repr(graph) and repr(state)
    assert pickle.loads(pickle.dumps(RULES)).map_prefix(("a",), model.up.bias) == P()
    again = merge(graph, state)
    assert again.up.kernel[...] is model.up.kernel[...]


def check_placing():
    """Models and arrays from NumPy, from one process and from elsewhere, to all devices."""
    before = nnx.to_pure_dict(nnx.state(ALONE))
    model = place(Normed(nnx.Rngs(0)), RULES, MESH)
    for path, array in nnx.to_flat_state(nnx.state(model)):
        value = before
        for key in path:
            value = value[key]
        assert_holds(array[...], value)
    assert spans_all(model.up.kernel[...]) and model.up.kernel.sharding.spec == P(None, "model")
    kernel = model.up.kernel[...]
    other = Mesh(MESH.devices[::-1].reshape(4, 2), ("a", "b"))
    moved = place(model, P("a"), other, copy=True)
    assert_holds(moved.up.kernel[...], ALONE.up.kernel[...])
    assert model.up.kernel[...] is kernel
    place(model, P(), MESH, donate=True)
    keys = place(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), P(), MESH)
    copied = place(keys, P(), MESH, copy=True).rngs.key[...]
    assert copied is not keys.rngs.key[...] and copied.sharding.is_fully_replicated
    assert kernel.is_deleted() and model.up.kernel.sharding.is_fully_replicated
    local = Mesh(np.array(jax.local_devices()), ("x",))
    refused(lambda: place(model, P(), local), ValueError, r"up\.kernel", "other processes")
    columns = {r"(\w+)/kernel": Tensor("{0}/kernel", "in out -> out in"), ".*": None}
    turned = {
        f"{n}/kernel": nnx.Param(jnp.zeros(s)) for n, s in (("up", (32, 16)), ("down", (16, 32)))
    }
    turned = place({n.split("/")[0]: {"kernel": x} for n, x in turned.items()}, P("a", "b"), other)
    transfer(moved, turned, columns)  # to another order of the devices
    assert_holds(turned["up"]["kernel"][...], ALONE.up.kernel[...].T)
    sharder = ArraySharder()
    batch = sharder.shard({"x": NUMBERS, "name": "numbers"}, NamedSharding(MESH, P("data")))
    assert_holds(batch["x"], NUMBERS)
    assert batch["name"] == "numbers"


if __name__ == "__main__":
    assert jax.process_count() == 2 and jax.local_device_count() == 4
    for name, check in list(globals().items()):
        if name.startswith("check_") and check.__module__ == "__main__":
            print(name, flush=True)
            check()
    batches.main()
    training.main()
    print(f"ok {RANK}", flush=True)
    import failing  # noqa: F401
