"""What `growth.py` measures: for each size the library's way to do something, and a peer's.

A case makes, for one size, its ways by name. A way is a function that prepares one measurement, and
returns what is timed: a first call needs another function each time, a later call does not.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding as ns
from nnx_sharding.checkpoint import Tensor, load_safetensors, restore, save, save_safetensors
from nnx_sharding.experimental import all_to_all_attention, ring_attention
from nnx_sharding.placement import shard_batches
from nnx_sharding.report import check_sharding

from . import models
from .ways import Flat

Timed: TypeAlias = Callable[[], Any]
Maker: TypeAlias = Callable[[], Timed]


class Row(NamedTuple):
    """A comparison of two ways of a case."""

    title: str
    ours: str
    peer: str
    wanted: float | str  # at the largest size: the ratio, or our time


class Case(NamedTuple):
    """What is measured together, at some sizes."""

    unit: str
    sizes: tuple[int, ...]
    make: Callable[[int], Mapping[str, Maker]]
    rows: tuple[Row, ...]


FEATURES, BATCH, LENGTH = 32, 16, 8
ADAM = optax.adam(1e-3)
X = np.ones((BATCH, LENGTH, FEATURES), np.float32)


# A model of six Variables a layer, and the same by hand


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, layers: int):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: Model, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def with_optimizer(model: Any) -> tuple[Any, Any]:
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def of_variables(count: int) -> Model:
    """About so many Variables."""
    return Model(count // 6)


def arrays_of(model: Model) -> list[dict[str, jax.Array]]:
    return [
        {
            "scale": block.norm.scale[...],
            "bias": block.norm.bias[...],
            "up": block.up.kernel[...],
            "up_bias": block.up.bias[...],
            "down": block.down.kernel[...],
            "down_bias": block.down.bias[...],
        }
        for block in model.blocks
    ]


def plain_block(
    params: Mapping[str, jax.Array], x: jax.Array, hidden: Any = None, out: Any = None
) -> jax.Array:
    """A block by hand; ``hidden`` and ``out`` shard the results of its products."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    h = (x - mean) * jax.lax.rsqrt(variance + 1e-6) * params["scale"] + params["bias"]
    h = jnp.dot(h, params["up"], out_sharding=hidden) + params["up_bias"]
    return x + jnp.dot(jax.nn.gelu(h), params["down"], out_sharding=out) + params["down_bias"]


def plain_loss(params: Any, x: jax.Array) -> jax.Array:
    for block in params:
        x = plain_block(block, x)
    return (x**2).mean()


# The shards over "data" of the kernels and their layout in the layer; biases are left as they are.
STORED = {"up": P("data", "model"), "up_bias": P("model"), "down": P("model", "data")}
IN_LAYER = {"up": P(None, "model"), "down": P("model", None)}


def loss_by_hand(params: Any, x: jax.Array) -> jax.Array:
    for block in params:
        whole = {name: jax.sharding.reshard(block[name], spec) for name, spec in IN_LAYER.items()}
        x = plain_block(block | whole, x, P("data", None, "model"), P("data", None, None))
    return (x**2).mean()


def loss_of_layers(graphdef: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the loss of the same NNX layers in plain JAX: merged from their parameters."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return loss_of(nnx.merge(graphdef, params), x)

    return loss


def loss_of_layers_by_hand(graphdef: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """The same on the Explicit mesh, sharded by hand as the strategies do: all over "data" too."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for block in nnx.merge(graphdef, params).blocks:
            for variable, spec in (
                (block.norm.scale, P()),
                (block.norm.bias, P()),
                (block.up.kernel, P(None, "model")),
                (block.up.bias, P("model")),
                (block.down.kernel, P("model", None)),
                (block.down.bias, P()),
            ):
                variable.set_value(jax.sharding.reshard(variable[...], spec))
            hidden = block.up(block.norm(x), out_sharding=P("data", None, "model"))
            x = x + block.down(jax.nn.gelu(hidden), out_sharding=P("data", None, None))
        return (x**2).mean()

    return loss


def plain_step(loss: Callable[..., Any], params: Any, state: Any, x: jax.Array) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, x)
    updates, state = ADAM.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def step(model: Model, optimizer: Any, x: jax.Array) -> jax.Array:
    value, gradients = ns.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return value


def new_function(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as a new object, of which JAX has no trace."""
    return lambda *args: fun(*args)


def lowering(jit: Callable[..., Any], fun: Callable[..., Any], *args: Any) -> Maker:
    """Traces and lowers a function that JAX has not seen, with empty caches."""

    def make() -> Timed:
        jax.clear_caches()
        return functools.partial(jit(new_function(fun)).lower, *args)

    return make


def explicit_mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


PLAIN, BY_HAND = "plain JAX", "Explicit mesh by hand"
# The floor of our ratios to layers by hand: Flax's layers have more operations, with or without us.
LAYERS, LAYERS_BY_HAND = "NNX layers", "NNX layers, Explicit mesh by hand"
OURS, OURS_ON_MESH = "ours", "ours, Explicit mesh"


def traces(layers: int) -> dict[str, Maker]:
    mesh, model = explicit_mesh(), Model(layers)
    plain = functools.partial(plain_step, plain_loss)
    params = arrays_of(model)

    def sharded(name: str, x: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, STORED.get(name, P())))

    on_mesh = [{name: sharded(name, x) for name, x in block.items()} for block in params]
    data = jax.device_put(X, NamedSharding(mesh, P("data")))
    graphs = with_optimizer(model)
    sharding = ns.fsdp(
        model,
        mesh=mesh,
        optimizer=graphs[1],
        base=ns.tensor_parallel(model, mesh=mesh),
        min_size=0,
    )
    placed = ns.place(with_optimizer(Model(layers)), sharding, mesh=mesh)
    ours = functools.partial(ns.jit, in_shardings=(sharding, sharding, P("data")), mesh=mesh)
    by_hand = functools.partial(plain_step, loss_by_hand)
    with jax.set_mesh(mesh):
        state_on_mesh = ADAM.init(on_mesh)

    def lowering_on_mesh(fun: Callable[..., Any], *args: Any) -> Maker:
        def make() -> Timed:
            lower = lowering(jax.jit, fun, *args)()

            def call() -> Any:
                with jax.set_mesh(mesh):
                    return lower()

            return call

        return make

    graphdef, state = nnx.split(model)
    layers_step = functools.partial(plain_step, loss_of_layers(graphdef))
    layers_by_hand = functools.partial(plain_step, loss_of_layers_by_hand(graphdef))
    layers_on_mesh = nnx.state(placed[0])
    with jax.set_mesh(mesh):
        layers_state_on_mesh = ADAM.init(layers_on_mesh)
    return {
        PLAIN: lowering(jax.jit, plain, params, ADAM.init(params), X),
        LAYERS: lowering(jax.jit, layers_step, state, ADAM.init(state), X),
        BY_HAND: lowering_on_mesh(by_hand, on_mesh, state_on_mesh, data),
        LAYERS_BY_HAND: lowering_on_mesh(
            layers_by_hand, layers_on_mesh, layers_state_on_mesh, data
        ),
        OURS: lowering(ns.jit, step, *graphs, X),
        OURS_ON_MESH: lowering(ours, step, *placed, data),
    }


def strategies(count: int) -> dict[str, Maker]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model, optimizer = with_optimizer(of_variables(count))

    def ours() -> Any:
        base = ns.tensor_parallel(model, mesh=mesh)
        return ns.fsdp(model, mesh=mesh, optimizer=optimizer, base=base, min_size=0)

    def loop() -> Any:
        """By size alone: the largest dimension over "data", of parameters and state alike."""
        specs = {}
        for path, variable in nnx.to_flat_state(nnx.state((model, optimizer))):
            shape = variable.shape
            largest = max(range(len(shape)), key=shape.__getitem__, default=None)
            entries = ("data" if i == largest else None for i in range(len(shape)))
            specs[path] = P(*entries)
        return specs

    return {"a loop": lambda: loop, OURS: lambda: ours}


def printing(count: int) -> dict[str, Maker]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model = of_variables(count)
    sharding = ns.fsdp(model, mesh=mesh, min_size=0)

    def check() -> Any:
        return check_sharding(model, sharding, mesh)

    return {
        "computing it": lambda: check,
        OURS: lambda: functools.partial(str, check()),
    }


def merging(count: int) -> dict[str, Maker]:
    model = of_variables(count)
    structure, arrays = ns.split(model)
    graphdef, state = nnx.split(model)
    calls = {
        "nnx.merge": functools.partial(nnx.merge, graphdef, state),
        "merge": functools.partial(ns.merge, structure, arrays),
        "nnx.update": functools.partial(nnx.update, model, state),
        "merge(into=)": functools.partial(ns.merge, structure, arrays, into=model),
    }
    return {name: lambda call=call: call for name, call in calls.items()}


def reports(layers: int) -> dict[str, Maker]:
    compiled = ns.jit(step).lower(*with_optimizer(Model(layers)), X).compile()
    calls = {
        "collectives()": compiled.collectives,
        "by_module()": compiled.by_module,
        "memory()": compiled.memory,
    }
    for call in calls.values():
        call()  # what is measured is the second one
    return {name: lambda call=call: call for name, call in calls.items()}


def batches(kilobytes: int) -> dict[str, Maker]:
    mesh = jax.make_mesh((8,), ("data",))
    sharding, rows = NamedSharding(mesh, P("data")), 64
    half = np.ones((rows, kilobytes * 1024 // rows // 4 // 2), np.float32)
    # A short epoch: what each loader takes once, 0.3 ms to read specs, is 1 or 2 µs a batch.
    batch, count = {"x": half, "y": half.copy()}, 200
    ready: queue.Queue[Any] = queue.Queue(2)

    def put() -> Any:
        for _ in range(count):
            out = jax.device_put(batch, sharding)
        return jax.block_until_ready(out)

    def put_ahead() -> Any:
        """Puts batches on devices in a thread, as a loop by hand would to load ahead."""

        def put_all() -> None:
            for _ in range(count):
                ready.put(jax.device_put(batch, sharding))

        thread = threading.Thread(target=put_all)
        thread.start()
        for _ in range(count):
            out = ready.get()
        thread.join()
        return jax.block_until_ready(out)

    def ours(prefetch: int) -> Timed:
        def call() -> Any:
            for out in shard_batches([batch] * count, sharding, prefetch=prefetch):  # noqa: B007
                pass
            return jax.block_until_ready(out)

        return call

    ways = {
        "device_put": put,
        "device_put in a thread": put_ahead,
        "prefetch=0": ours(0),
        "prefetch=2": ours(2),
    }
    return {name: lambda way=way: way for name, way in ways.items()}


class Arrays(nnx.Module):
    """Square arrays of 1 MB."""

    def __init__(self, megabytes: int):
        keys = jax.random.split(jax.random.key(0), megabytes)
        self.layers = nnx.List(nnx.Param(jax.random.normal(key, (512, 512))) for key in keys)


def files(megabytes: int) -> dict[str, Maker]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model, names = Arrays(megabytes), itertools.count()
    arrays = {f"layers.{i}": layer[...] for i, layer in enumerate(model.layers)}
    rules = {r"layers\.(\d+)": Tensor("layers/{0}")}
    save_safetensors(folder / "ours", model, rules)
    file = next((folder / "ours").glob("*.safetensors"))
    save(folder / "saved", model)
    orbax, state = ocp.StandardCheckpointer(), nnx.state(model)
    orbax.save(folder / "orbax", state)
    orbax.wait_until_finished()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state
    )

    def load() -> Any:
        return jax.block_until_ready(jax.device_put(safetensors.numpy.load_file(file)))

    def save_plain() -> Any:
        target = folder / f"{next(names)}.safetensors"
        safetensors.numpy.save_file({k: np.asarray(x) for k, x in arrays.items()}, target)
        target.unlink()

    def save_ours() -> Any:
        target = folder / str(next(names))
        save_safetensors(target, model, rules)
        shutil.rmtree(target)

    ways: dict[str, Timed] = {
        "safetensors save_file": save_plain,
        "save_safetensors": save_ours,
        "safetensors load_file": load,
        "load_safetensors": functools.partial(load_safetensors, folder / "ours", model, rules),
        "Orbax": functools.partial(orbax.restore, folder / "orbax", abstract),
        "restore": functools.partial(restore, folder / "saved", model),
    }
    return {name: lambda way=way: way for name, way in ways.items()}


def accumulation(layers: int) -> dict[str, Maker]:
    model = Model(layers)
    graphs, params, steps = with_optimizer(model), arrays_of(model), 4
    graphdef, layers_state = nnx.split(model)

    def by_hand(loss: Callable[..., Any], params: Any, state: Any, x: jax.Array) -> Any:
        def microbatch(total: Any, rows: jax.Array) -> tuple[Any, None]:
            new = jax.value_and_grad(loss)(params, rows)
            return jax.tree.map(jnp.add, total, new), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        parts = x.reshape(steps, -1, *x.shape[1:])  # (steps, rows, length, features)
        total, _ = jax.lax.scan(microbatch, zeros, parts)
        value, gradients = jax.tree.map(lambda x: x / steps, total)
        updates, state = ADAM.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def ours(model: Model, optimizer: Any, x: jax.Array) -> jax.Array:
        value, gradients = ns.accumulate_gradients(loss_of, steps=steps)(model, x)
        optimizer.update(model, gradients)
        return value  # type: ignore[no-any-return]

    return {
        "a scan by hand": lowering(
            jax.jit, functools.partial(by_hand, plain_loss), params, ADAM.init(params), X
        ),
        LAYERS: lowering(
            jax.jit,
            functools.partial(by_hand, loss_of_layers(graphdef)),
            layers_state,
            ADAM.init(layers_state),
            X,
        ),
        OURS: lowering(ns.jit, ours, *graphs, X),
    }


def attention(tokens: int) -> dict[str, Maker]:
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    by_position = NamedSharding(mesh, P(None, "context"))
    shape = (1, tokens, 8, 32)  # (batch, length, heads, features)
    inputs = [
        jax.device_put(jax.random.normal(jax.random.key(i), shape), by_position) for i in range(3)
    ]

    def gradients(attend: Callable[..., jax.Array]) -> Maker:
        def loss(*inputs: jax.Array) -> jax.Array:
            return jnp.sum(attend(*inputs, is_causal=True) ** 2)

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

        def call() -> Any:
            return jax.block_until_ready(grad(*inputs))

        return lambda: call

    return {
        "dot_product_attention": gradients(jax.nn.dot_product_attention),
        "ring": gradients(functools.partial(ring_attention, mesh=mesh)),
        "all_to_all": gradients(functools.partial(all_to_all_attention, mesh=mesh)),
    }


def calls(count: int) -> dict[str, Maker]:
    program = models.trivial(count // 6)
    flat, graphs = Flat(program), program.make()
    ours, floor = _ours(program, graphs), flat.way(jax.jit(flat))
    return {"jax.jit": lambda: floor, OURS: lambda: ours}


def first_calls(count: int) -> dict[str, Maker]:
    """In a case of their own: what clears JAX's caches makes every other function new, too."""
    program = models.trivial(count // 6)
    flat, graphs = Flat(program), program.make()

    def first(make: Callable[[], Timed]) -> Maker:
        def prepare() -> Timed:
            jax.clear_caches()
            return make()

        return prepare

    return {
        "jax.jit": first(lambda: flat.way(jax.jit(new_function(flat)))),
        OURS: first(lambda: _ours(program, graphs)),
    }


def _ours(program: models.Program, graphs: Sequence[Any]) -> Timed:
    return functools.partial(ns.jit(new_function(program.fun)), *graphs, *program.data)


CASES: dict[str, Case] = {
    "traces": Case(
        "layers",
        (8, 32, 128),
        traces,
        (
            Row(
                "trace, lower a training step: Explicit mesh, FSDP over TP",
                OURS_ON_MESH,
                PLAIN,
                1.5,
            ),
            Row("the same", OURS_ON_MESH, BY_HAND, 1.0),
            Row("the same", OURS_ON_MESH, LAYERS_BY_HAND, 1.1),
            Row("the same without a mesh", OURS, PLAIN, 1.3),
            Row("the same without a mesh", OURS, LAYERS, 1.1),
        ),
    ),
    "strategies": Case(
        "Variables",
        (500, 2000, 8000),
        strategies,
        (Row("`fsdp(tensor_parallel)` with optimizer", OURS, "a loop", "1 s"),),
    ),
    "printing": Case(
        "rows",
        (500, 2000, 8000),
        printing,
        (Row("`print(check_sharding)`", OURS, "computing it", 1.5),),
    ),
    "merging": Case(
        "Variables",
        (250, 1000, 4000),
        merging,
        (
            Row("`merge`", "merge", "nnx.merge", 1.1),
            Row("`merge(into=)`", "merge(into=)", "nnx.update", 1.1),
        ),
    ),
    "reports": Case(
        "layers",
        (4, 12, 36),
        reports,
        (
            Row("second `by_module()`", "by_module()", "collectives()", 2.0),
            Row("second `memory()`", "memory()", "collectives()", 2.0),
        ),
    ),
    "batches": Case(
        "kB",
        (64, 1024, 16384),
        batches,
        (
            Row("`shard_batches`, two leaves", "prefetch=0", "device_put", 1.1),
            Row("the same, `prefetch=2`", "prefetch=2", "device_put in a thread", 1.1),
            Row("the same", "prefetch=2", "device_put", "as a thread"),
        ),
    ),
    "files": Case(
        "MB",
        (8, 24, 64),
        files,
        (
            Row("`save_safetensors`", "save_safetensors", "safetensors save_file", 1.2),
            Row("`load_safetensors`", "load_safetensors", "safetensors load_file", 1.1),
            Row("`restore`", "restore", "Orbax", 1.1),
        ),
    ),
    "accumulation": Case(
        "layers",
        (2, 8, 32),
        accumulation,
        (
            Row("accumulation: trace, lower", OURS, "a scan by hand", 1.3),
            Row("the same", OURS, LAYERS, 1.1),
        ),
    ),
    "attention": Case(
        "tokens",
        (1024, 2048, 4096),
        attention,
        (
            Row("`ring_attention`, gradients", "ring", "dot_product_attention", 1.0),
            Row("`all_to_all_attention`, gradients", "all_to_all", "dot_product_attention", 1.0),
        ),
    ),
    "calls": Case(
        "Variables",
        (481, 1921, 7801),
        calls,
        (Row("a call", OURS, "jax.jit", 1.15),),
    ),
    "first_calls": Case(
        "Variables",
        (481, 1921, 7801),
        first_calls,
        (Row("a first call", OURS, "jax.jit", 3.0),),
    ),
}
