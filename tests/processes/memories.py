"""Each operation on arrays in each memory, of two sizes, sharded or not: nothing leaves its memory.

``tests/test_memory_kinds.py`` runs the operations in one process, and this file in several ones.
"""

import itertools
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    import preamble  # noqa: F401  (joins the others before anything is computed)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import Stack, StateSharding, jit, merge, place, split, stack
from nnx_sharding.checkpoint import (
    Checkpoints,
    Tensor,
    load_safetensors,
    restore,
    save,
    save_safetensors,
)
from nnx_sharding.experimental import transfer
from nnx_sharding.partition import abstract_init, sharded_init
from nnx_sharding.training import fetched

KINDS = ("device", "pinned_host", "unpinned_host")
SIZES = {"small": 16, "large": 96}  # large arrays have 147 KiB, more than NumPy sums
SPECS = {"sharded": P(None, "data", "model"), "replicated": P()}
LAYERS = 4


class Layer(nnx.Module):
    """One array, which a stack gives a dimension."""

    def __init__(self, values):
        self.w = nnx.Param(values)


class Case:
    """Arrays of one size and sharding in one memory."""

    def __init__(self, kind, size, spec, axis_type=AxisType.Auto):
        devices = np.array(jax.devices()).reshape(2, -1)
        self.mesh = Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)
        self.kind, self.size, self.spec = kind, SIZES[size], SPECS[spec]
        shape = (LAYERS, self.size, self.size)
        self.values = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def sharding(self, spec=None, kind=None):
        spec = self.spec if spec is None else spec
        return NamedSharding(self.mesh, spec, memory_kind=kind or self.kind)

    def array(self, values=None, spec=None, kind=None):
        values = self.values if values is None else values
        return place(values, self.sharding(spec, kind))

    def stack(self, values=None):
        layers = Layer(self.array(values))
        return Stack(layers, LAYERS)

    def layer_sharding(self):
        return self.sharding(P(*self.spec[1:]))

    def check(self, array, values=None, sharding=None):
        """An array has these values, this sharding and this memory."""
        array = array[...] if isinstance(array, nnx.Variable) else array
        sharding = sharding or self.sharding()
        assert array.sharding.memory_kind == sharding.memory_kind, array.sharding
        assert array.sharding.is_equivalent_to(sharding, array.ndim), array.sharding
        values = self.values if values is None else values
        assert array.dtype == values.dtype and array.shape == values.shape
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def place_elsewhere(case, folder):
    array = case.array()
    case.check(place(array, P("data"), case.mesh), sharding=case.sharding(P("data"), "device"))
    for kind in KINDS:
        goal = case.sharding(P(None, None, "model"), kind)
        case.check(place(array, goal), sharding=goal)
    case.check(array)
    case.check(place(case.array(), goal, donate=True), sharding=goal)


def place_copies(case, folder):
    model = nnx.Dict(w=nnx.Param(case.array()))
    for sharding in (None, case.sharding()):
        copy = place(model, sharding, copy=True)
        case.check(copy.w)
        assert copy.w[...] is not model.w[...]


def save_and_restore(case, folder):
    model = nnx.Dict(w=nnx.Param(case.array()))
    save(folder / "saved", model)
    save(folder / "saved", model, overwrite=True)
    other = nnx.Dict(w=nnx.Param(case.array(case.values * 0)))
    case.check(restore(folder / "saved", other).w)
    for kind in KINDS:
        goal = case.sharding(P("data"), kind)
        case.check(restore(folder / "saved", other, {"w": goal}).w, sharding=goal)


def restore_converted(case, folder):
    """To another dtype."""
    model = case.stack()
    save(folder / "stack", model)
    half = jax.eval_shape(lambda: jnp.zeros(case.values.shape, jnp.bfloat16))
    half = Stack(Layer(half.update(sharding=case.sharding())), LAYERS)
    case.check(restore(folder / "stack", half, cast=True).layers.w, case.values.astype("bfloat16"))


def checkpoints(case, folder):
    """The model changes as soon as a step is saved."""
    model = nnx.Dict(w=nnx.Param(case.array()))

    @jit(in_shardings=(case.sharding(),), donate_argnums=0)
    def clear(model):
        with fetched(model):
            model.w[...] = model.w[...] * 0

    with Checkpoints(folder / "steps") as steps:
        for step in (1, 2):
            steps.save(step, model)
            clear(model)
        assert steps.resume(model, step=1) == 1
    case.check(model.w)


def tensors(case, folder):
    rules = {"(.*)": Tensor("w", "a b c -> c (a b)", a=LAYERS)}
    model = nnx.Dict(w=nnx.Param(case.array()))
    save_safetensors(folder / "tensors", model, {"w": Tensor("w", "c (a b) -> a b c", a=LAYERS)})
    other = nnx.Dict(w=nnx.Param(case.array(case.values * 0)))
    rules = {"w": Tensor("w", "c (a b) -> a b c", a=LAYERS)}
    case.check(load_safetensors(folder / "tensors", other, rules).w)
    half = jax.ShapeDtypeStruct(case.values.shape, jnp.bfloat16, sharding=case.sharding())
    half = load_safetensors(folder / "tensors", nnx.Dict(w=nnx.Param(half)), rules, cast=True)
    case.check(half.w, case.values.astype("bfloat16"))


def transfers(case, folder):
    """Between memories, with another sharding, dtype and layout."""
    for kind, spec, dtype in itertools.product(
        KINDS, (case.spec, P("data")), (np.float32, jnp.bfloat16)
    ):
        source = nnx.Dict(w=nnx.Param(case.array()))
        values = case.values.astype(dtype)
        target = nnx.Dict(w=nnx.Param(case.array(values * 0, spec, kind)))
        transfer(source, target, cast=True)
        case.check(target.w, values, case.sharding(spec, kind))
        case.check(source.w)


def transfers_of_layers(case, folder):
    rules = {r"(\d)/w": Tensor("layers/w", "a b -> {0} a b")}
    layers = nnx.List(Layer(case.array(x, P(*case.spec[1:]))) for x in case.values)
    model = case.stack(case.values * 0)
    transfer(layers, model, rules)
    case.check(model.layers.w)
    layers = nnx.List(Layer(case.array(x * 0, P(*case.spec[1:]))) for x in case.values)
    transfer(model, layers, rules, reverse=True)
    for layer, values in zip(layers, case.values, strict=True):
        case.check(layer.w, values, case.layer_sharding())


def layers_of_a_stack(case, folder):
    model, goal = case.stack(), case.layer_sharding()
    for found, values in zip(model, case.values, strict=True):
        case.check(found.w, values, goal)
    case.check(model[-1].w, case.values[-1], goal)
    case.check(model[1:3].layers.w, case.values[1:3])
    case.check(model[::-2].layers.w, case.values[::-2])
    model[1] = model[0]
    case.check(model.layers.w, case.values[[0, 0, 2, 3]])
    model[2] = Layer(case.array(case.values[3], goal.spec, "device"))
    case.check(model.layers.w, case.values[[0, 0, 3, 3]])
    joined = stack([Layer(case.array(x, goal.spec)) for x in case.values])
    case.check(joined.layers.w)


def layers_in_a_program(case, folder):
    model, goal = case.stack(), case.layer_sharding()

    @jit(in_shardings=(case.sharding(),), out_shardings=goal)
    def take(model):
        model[1] = model[0]
        return [model[0], model[1:3][0]]

    for layer in take(model):
        case.check(layer.w, case.values[0], goal)
    case.check(model.layers.w, case.values[[0, 0, 2, 3]])


def fetches(case, folder):
    """Also of a Variable that holds arrays in several memories."""
    pair = {"w": case.array(), "count": case.array(np.ones(3, np.float32), P(), "device")}
    model = nnx.Dict(pair=nnx.Variable(pair))
    with fetched(model):
        value = model.pair.get_value()
        assert {x.sharding.memory_kind for x in value.values()} == {"device"}
        model.pair.set_value({name: x + 1 for name, x in value.items()})
    value = model.pair.get_value()
    case.check(value["w"], case.values + 1)
    case.check(value["count"], np.full(3, 2, np.float32), case.sharding(P(), "device"))


def programs(case, folder):
    model = nnx.Dict(w=nnx.Param(case.array()))
    where = StateSharding({...: case.sharding()})

    @jit(in_shardings=(where,), donate_argnums=0)
    def step(model):
        with fetched(model):
            model.w[...] = model.w[...] + 1

    for count in (1, 2):
        step(model)
        case.check(model.w, case.values + np.float32(1) + np.float32(count - 1))


def splits(case, folder):
    model = nnx.Dict(w=nnx.Param(case.array()))
    structure, state = split(model)
    case.check(merge(structure, state).w)


def initializes(case, folder):
    where = StateSharding({...: case.sharding()})

    def make():
        return nnx.Dict(w=nnx.Param(jnp.asarray(case.values)))

    case.check(sharded_init(make, where, case.mesh).w)
    assert abstract_init(make, where, case.mesh).w.sharding == case.sharding()


OPERATIONS = {
    x.__name__: x
    for x in (
        place_elsewhere,
        place_copies,
        save_and_restore,
        restore_converted,
        checkpoints,
        tensors,
        transfers,
        transfers_of_layers,
        layers_of_a_stack,
        layers_in_a_program,
        fetches,
        programs,
        splits,
        initializes,
    )
}


def main(folder):
    """Runs all cases, and lists those that fail."""
    failed = []
    for name, *words in itertools.product(OPERATIONS, KINDS, SIZES, SPECS):
        case, where = Case(*words), folder / "-".join([name, *words])
        try:
            where.mkdir(exist_ok=True)
            OPERATIONS[name](case, where)
        except Exception:
            failed.append(f"{name} {words}:\n{traceback.format_exc()}")
    for text in failed:
        print(text, flush=True)
    assert not failed
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
