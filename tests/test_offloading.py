"""Optimizer state in the memory of the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from nnx_sharding import errors, jit, value_and_grad
from nnx_sharding.partition import fsdp
from nnx_sharding.training import fetched, offload
from zoo import mean_square, step_of

P = PartitionSpec
X = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def made():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_training(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    results = []
    for is_offloaded in (False, True):
        model, optimizer = made()
        sharding = fsdp(model, mesh=mesh, optimizer=optimizer, min_size=0)
        of_optimizer = offload(sharding, optimizer, mesh=mesh) if is_offloaded else sharding

        step = jit(
            step_of(value_and_grad(mean_square), fetches=True),
            in_shardings=(sharding, of_optimizer, P("data")),
            donate_argnums=(0, 1),
            mesh=mesh,
            max_traces=1,
        )
        losses = [step(model, optimizer, X) for _ in range(3)]
        results.append((losses, jax.tree.map(np.asarray, nnx.state(model))))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(optimizer.opt_state) if x.ndim}
        assert kinds == {"pinned_host" if is_offloaded else "device"}
        assert {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(model))} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_filter_and_scalars():
    mesh = jax.make_mesh((8,), ("data",))
    model, optimizer = made()
    sharding = fsdp(model, mesh=mesh, optimizer=optimizer, min_size=0)
    some = offload(sharding, optimizer, nnx.PathContains("nu"), mesh=mesh)

    def kind(*path):
        return getattr(some.map_prefix(path, None), "memory_kind", None)

    assert kind("opt_state", 0, "nu", "kernel") == "pinned_host"
    assert kind("opt_state", 0, "mu", "kernel") is None
    assert kind("opt_state", 0, "count") is None
    assert some.activations == sharding.activations


def test_exception_puts_it_back():
    mesh = jax.make_mesh((8,), ("data",))
    host = jax.sharding.NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    variable = nnx.Param(jax.device_put(jnp.ones((8, 4)), host))
    with pytest.raises(KeyError), fetched({"a": variable}):
        assert variable[...].sharding.memory_kind == "device"
        variable[...] = variable[...] + 1
        raise KeyError
    assert variable[...].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(variable[...], np.full((8, 4), 2.0))


def test_what_cannot_be_fetched_leaves_the_rest_on_the_host():
    mesh = jax.make_mesh((8,), ("data",))
    host = jax.sharding.NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    kept, deleted = (nnx.Param(jax.device_put(jnp.ones(8), host)) for _ in range(2))
    deleted[...].delete()
    with pytest.raises(RuntimeError, match="deleted"), fetched((kept, deleted)):
        pass
    assert kept[...].sharding.memory_kind == "pinned_host"


def test_errors():
    model, optimizer = made()
    sharding = fsdp(model, mesh=jax.make_mesh((8,), ("data",)), optimizer=optimizer, min_size=0)
    with pytest.raises(errors.NoMeshError, match="offload has no mesh"):
        offload(sharding, optimizer)
    mesh = jax.make_mesh((8,), ("data",))
    with pytest.raises(ValueError, match="no array of the Optimizer matches"):
        offload(sharding, optimizer, nnx.PathContains("typo"), mesh=mesh)
