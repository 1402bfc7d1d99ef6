"""What is measured, and what the figures should be."""

from __future__ import annotations

import contextlib
import functools
import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import nnx_sharding

from . import models, ways
from .measure import Figure, Figures, Times, Unavailable, Way, Ways, time_calls, time_first_calls
from .models import Program
from .report import Row, Target, at_most, faster
from .ways import (
    CACHED_PARTIAL,
    EQUINOX,
    FLOOR,
    JIT_PARTIAL,
    NNX_JIT,
    NNX_TREE,
    ON_STATE,
    OTHER_ARRAYS,
    OURS,
)

P = PartitionSpec


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
      large: blocks of the large model; ``small`` of the small one.
      width: of the model that is trained, and ``batch`` its batch.
      matrix: rows and columns of the slow computation, and ``seconds`` how long it takes.
      models: how many large models are alive at once, ``functions`` how many functions, and
        ``dropped`` how many tiny models come and go.
      repeats: how often calls are measured; ``few`` is for what takes long.
    """

    large: int = 32
    small: int = 8
    width: int = 16
    batch: int = 16
    matrix: int = 1024
    seconds: float = 0.5
    models: int = 20
    functions: int = 3
    dropped: int = 1000
    repeats: int = 200
    few: int = 10


SMOKE = Sizes(
    large=2,
    small=1,
    width=8,
    batch=4,
    matrix=64,
    seconds=0.01,
    models=3,
    functions=2,
    dropped=20,
    repeats=5,
    few=2,
)


def both_rows(
    name: str,
    title: str,
    times: Times,
    targets: Iterable[Target] = (),
    in_loop: Iterable[Target] = (),
    *,
    floor: str = FLOOR,
    ours: str = OURS,
    until_ready: bool = False,
    not_peers: tuple[str, ...] = (),
) -> Iterator[Row]:
    """A row for calls in a loop, and one for calls after other work."""
    loop, turns = (
        (times.loop_ready, times.ready) if until_ready else (times.loop_returned, times.returned)
    )
    title += ", until the result is ready" if until_ready else ", until the call returns"
    for suffix, when, figures, own in (
        ("_loop", "in a loop", loop, in_loop),
        ("", "after other work", turns, targets),
    ):
        if figures:
            full = f"{title}, {when}"
            yield Row(name + suffix, full, "µs", figures, floor, ours, tuple(own), not_peers)


def measure_forward(
    name: str, blocks: int, repeats: int, turns: float, loop: float, config: str = "bare"
) -> Iterator[Row]:
    """In a loop without the network itself: there, its execution would hide what calls cost."""
    title = _size(blocks)
    if config != "bare":
        title += f", each block with its configuration ({config})"
    peers = [] if blocks == 1 else [faster(60, NNX_JIT)]
    for program, what, options in (
        (models.trivial(blocks, config), "one counter updated", {"turns": False}),
        (models.forward(blocks, config), "forward with one counter updated", {"loop": False}),
    ):
        times = time_calls(ways.jit_ways(program), repeats, FLOOR, [OURS], **options)
        targets = [at_most(turns, turns, FLOOR), *peers]
        in_loop = [at_most(loop, loop, FLOOR), *peers]
        yield from both_rows(name, f"{what}: {title}", times, targets, in_loop)


def configured(sizes: Sizes) -> Iterator[Row]:
    for config in ("frozen dataclass", "dataclass", "one shared dataclass", "list"):
        name = f"configured {config}".replace(" ", "_")
        yield from measure_forward(name, sizes.large, sizes.repeats, 1.2, 1.2, config)


def deep(sizes: Sizes) -> Iterator[Row]:
    """Only the floor and ours: compiling takes minutes for each way."""
    for blocks, config in (
        (10 * sizes.large, "bare"),
        (10 * sizes.large, "frozen dataclass"),
        (40 * sizes.large, "bare"),
    ):
        program = models.trivial(blocks, config)
        flat = ways.Flat(program)
        calls: Ways = {
            FLOOR: flat.way(jax.jit(flat, keep_unused=True)),
            OURS: functools.partial(
                nnx_sharding.jit(program.fun, keep_unused=True), *program.make(), *program.data
            ),
        }
        times = time_calls(calls, max(sizes.repeats // 4, 5), FLOOR, [OURS])
        title = f"one counter updated: {_size(blocks)}, {config}"
        name = f"deep_{blocks}_{config}".replace(" ", "_")
        targets = (at_most(1.1, 1.1, FLOOR),)
        yield from both_rows(name, title, times, targets, targets)


def first_call(sizes: Sizes) -> Iterator[Row]:
    yield _first_call("first_call_32", sizes.large, 2.0, sizes.few)
    yield _first_call("first_call", 40 * sizes.large, 3.0, sizes.few)


def _first_call(name: str, blocks: int, most: float, repeats: int) -> Row:
    program = models.trivial(blocks)
    flat, graphs = ways.Flat(program), program.make()
    makers: Ways = {
        FLOOR: lambda: flat.way(jax.jit(lambda *args: flat(*args))),
        OURS: lambda: functools.partial(
            nnx_sharding.jit(lambda *args: program.fun(*args)), *graphs, *program.data
        ),
        NNX_JIT: lambda: functools.partial(
            nnx.jit(lambda *args: program.fun(*args)), *graphs, *program.data
        ),
    }
    figures = time_first_calls(makers, max(3, repeats // 2))
    title = f"first call of a function that does nearly nothing: {_size(blocks)}"
    targets = (at_most(most, 2.0, FLOOR),)
    return Row(name, title, "µs", figures, FLOOR, OURS, targets)


def pure_python(sizes: Sizes) -> Iterator[Row]:
    """Without the C extension, which the environment of this case leaves out."""
    small = models.training(sizes.small, sizes.width, sizes.batch)
    for name, what, program, most in (
        ("32", _size(sizes.large), models.trivial(sizes.large), 3.0),
        ("1", _size(1), models.trivial(1), 2.5),
        ("train", f"training step, {sizes.small} blocks", small, 1.5),
    ):
        all_ways = ways.jit_ways(program)
        calls = {way: all_ways[way] for way in (FLOOR, OURS)}
        times = time_calls(calls, sizes.repeats, FLOOR, [OURS])
        title, targets = f"without the C extension: {what}", (at_most(most, 1.5, FLOOR),)
        yield from both_rows(f"pure_python_{name}", title, times, targets, targets)


def new_models(sizes: Sizes) -> Iterator[Row]:
    """Each call gets a model that the function has not seen, of a structure that it knows.

    The processor's caches hold nothing of it, so the floor is given with other arrays as well.
    """
    program = models.forward(sizes.large)
    flat, jitted = ways.Flat(program), nnx_sharding.jit(program.fun)
    compiled = jax.jit(flat)
    theirs, tree = nnx.jit(program.fun), nnx.jit(program.fun, graph=False)
    count = 4 * (min(sizes.repeats, 50) + 20)  # as warming up takes some

    def fresh(jitted: Callable[..., Any]) -> Way:
        made = iter([program.make() for _ in range(count)])
        kept: list[Any] = []

        def call() -> Any:
            kept.append(next(made))
            return jitted(*kept[-1], *program.data)

        return call

    others = [ways.Flat(program, flat.changed).way(compiled) for _ in range(count)]
    each = iter(others)
    calls: Ways = {
        FLOOR: flat.way(compiled),
        OTHER_ARRAYS: lambda: next(each)(),
        OURS: fresh(jitted),
        NNX_JIT: fresh(theirs),
        NNX_TREE: fresh(tree),
    }
    repeats = min(sizes.repeats, 50)
    times = time_calls(calls, repeats, FLOOR, [OURS], compare=False, loop=False)
    title = f"forward of another model at each call: {_size(sizes.large)}"
    targets = (at_most(2.5, 2.0, FLOOR),)
    yield from both_rows("new_models", title, times, targets, not_peers=(OTHER_ARRAYS,))


def forward32(sizes: Sizes) -> Iterator[Row]:
    yield from measure_forward("forward32", sizes.large, sizes.repeats, 1.1, 1.15)


def forward1(sizes: Sizes) -> Iterator[Row]:
    yield from measure_forward("forward1", 1, sizes.repeats, 1.3, 1.4)


def train8(sizes: Sizes) -> Iterator[Row]:
    program = models.training(sizes.small, sizes.width, sizes.batch)
    times = time_calls(ways.jit_ways(program), sizes.repeats, FLOOR, [OURS])
    arrays = len(ways.Flat(program).arrays)
    title = (
        f"training step with Adam: {sizes.small} blocks of width {sizes.width}, batch "
        f"{sizes.batch}, {arrays} arrays"
    )
    targets = (at_most(1.05, 1.05, FLOOR), faster(8, NNX_JIT))
    yield from both_rows("train8", title, times, targets, targets, until_ready=True)


def per_variable(sizes: Sizes) -> Iterator[Row]:
    """The slope between two sizes, of which the calls take turns."""
    both = {
        (name, blocks): way
        for blocks in (sizes.small, sizes.large)
        for name, way in ways.jit_ways(models.forward(blocks)).items()
    }
    floor, ours = (FLOOR, sizes.large), [(OURS, sizes.small), (OURS, sizes.large)]
    times = time_calls(both, sizes.repeats, floor, ours, compare=False, loop=False).returned
    more = 6 * (sizes.large - sizes.small)
    figures = {
        name: _slope(times[name, sizes.small], times[name, sizes.large], more)
        for name, blocks in times
        if blocks == sizes.small
    }
    title = f"each of {more} more Variables: {_size(sizes.small)} → {_size(sizes.large)}"
    yield Row("per_variable", title, "µs", figures, FLOOR, OURS, (at_most(2.5, 1.5, FLOOR),))


def _slope(
    small: Figure | Unavailable, large: Figure | Unavailable, more: int
) -> Figure | Unavailable:
    if isinstance(small, Unavailable):
        return small
    if isinstance(large, Unavailable):
        return large
    return Figure(
        (large.median - small.median) / more,
        (large.low - small.high) / more,
        (large.high - small.low) / more,
        min(small.repeats, large.repeats),
    )


def sharded32(sizes: Sizes) -> Iterator[Row]:
    layout = ways.Layout(
        make_mesh(), {nnx.PathContains("kernel"): P(None, "model"), ...: P()}, P("data")
    )
    program = models.forward(sizes.large)
    times = time_calls(ways.sharded_ways(program, layout), sizes.repeats, FLOOR, [OURS])
    title = f"the same with shardings: {_size(sizes.large)}, mesh {_mesh_size(layout.mesh)}"
    targets = (at_most(1.15, 1.1, FLOOR),)
    yield from both_rows("sharded32", title, times, targets, targets)


def predicate32(sizes: Sizes) -> Iterator[Row]:
    """The same with a spec that depends on shapes."""

    def is_matrix(path: Any, x: Any) -> bool:
        return getattr(x, "ndim", 0) == 2

    layout = ways.Layout(make_mesh(), {is_matrix: P(None, "model"), ...: P()}, P("data"))
    program = models.forward(sizes.large)
    all_ways = ways.sharded_ways(program, layout)
    calls = {name: all_ways[name] for name in (FLOOR, OURS, NNX_JIT, NNX_TREE)}
    times = time_calls(calls, sizes.repeats, FLOOR, [OURS])
    title = f"the same, sharded by a predicate on shapes: {_size(sizes.large)}"
    targets = (at_most(1.15, 1.1, FLOOR),)
    yield from both_rows("predicate32", title, times, targets, targets)


def shard_map_mlp(sizes: Sizes) -> Iterator[Row]:
    specs = {
        nnx.All(nnx.PathContains("up"), nnx.PathContains("kernel")): P(None, "model"),
        nnx.All(nnx.PathContains("up"), nnx.PathContains("bias")): P("model"),
        nnx.All(nnx.PathContains("down"), nnx.PathContains("kernel")): P("model", None),
        ...: P(),
    }
    layout = ways.Layout(make_mesh(), specs, P("data"))
    program = models.tensor_parallel(width=64, batch=8)
    floor, ours = ways.FLOOR_SHARD_MAP, ways.OUR_SHARD_MAP
    times = time_calls(ways.shard_map_ways(program, layout), sizes.repeats, floor, [ours])
    title = f"tensor-parallel MLP by hand: 4 Variables, mesh {_mesh_size(layout.mesh)}"
    targets = (at_most(1.3, 1.2, floor),)
    yield from both_rows("shard_map_mlp", title, times, targets, targets, floor=floor, ours=ours)


def compiled(sizes: Sizes) -> Iterator[Row]:
    for name, blocks in (("compiled32", sizes.large), ("compiled1", 1)):
        program = models.forward(blocks)
        calls = _compiled_ways(program)
        times = time_calls(calls, sizes.repeats, FLOOR, [OURS, OUR_COMPILED])
        title = f"the compiled program against the jitted function: {_size(blocks)}"
        # Never slower; two per cent are what the measurement itself is good for.
        targets = (at_most(1.02, 1.0, OURS),)
        own = (OURS, FLAT_COMPILED)
        in_loop = (*targets, at_most(1.15, 1.15, FLAT_COMPILED))
        yield from both_rows(name, title, times, targets, in_loop, ours=OUR_COMPILED, not_peers=own)


OUR_COMPILED = "nnx_sharding.jit, Compiled"
FLAT_COMPILED = "jax.jit on flat arrays, Compiled"


def _compiled_ways(program: Program) -> Ways:
    fun, make, data = program.fun, program.make, program.data

    def pair(jitted: Any) -> tuple[Way, Way]:
        compiled = jitted.lower(*make(), *data).compile()
        return (
            functools.partial(jitted, *make(), *data),
            functools.partial(compiled, *make(), *data),
        )

    flat = ways.Flat(program)
    flat_jit = jax.jit(flat)
    ours, our_compiled = pair(nnx_sharding.jit(fun))
    theirs, their_compiled = pair(nnx.jit(fun))
    return {
        FLOOR: flat.way(flat_jit),
        FLAT_COMPILED: flat.way(flat_jit.lower(flat.arrays, *flat.data).compile()),
        OURS: ours,
        OUR_COMPILED: our_compiled,
        NNX_JIT: theirs,
        "nnx.jit, Compiled": their_compiled,
    }


def checked(sizes: Sizes) -> Iterator[Row]:
    """What it costs a call to be strict, and to have its traces counted: nothing."""
    for name, blocks in (("checked32", sizes.large), ("checked1", 1)):
        program = models.forward(blocks)
        flat = ways.Flat(program)

        def ours(program: Program = program, **options: Any) -> Way:
            jitted = nnx_sharding.jit(program.fun, **options)
            return functools.partial(jitted, *program.make(), *program.data)

        calls: Ways = {
            FLOOR: flat.way(jax.jit(flat)),
            OURS: ours(),
            OUR_CHECKED: ours(strict=True, max_traces=1),
        }
        times = time_calls(calls, sizes.repeats, FLOOR, [OURS, OUR_CHECKED])
        title = f"strict, with a limit of one trace, against neither: {_size(blocks)}"
        targets = (at_most(1.02, 1.0, OURS),)
        yield from both_rows(
            name, title, times, targets, targets, ours=OUR_CHECKED, not_peers=(OURS,)
        )


OUR_CHECKED = "nnx_sharding.jit(strict=True, max_traces=1)"


def lowering(sizes: Sizes) -> Iterator[Row]:
    figures = time_first_calls(_lowering_ways(models.forward(sizes.large)), sizes.few)
    title = f"trace and lower, of a new function with empty caches: {_size(sizes.large)}"
    targets = (at_most(1.15, 1.05, FLOOR),)
    yield Row("lowering", title, "µs", figures, FLOOR, OURS, targets, not_peers=(SPLIT_MERGE,))


SPLIT_MERGE = "the same, by nnx_sharding.split, merge"


def _lowering_ways(program: Program) -> Ways:
    """For each way what makes a new function, ready to be lowered."""
    fun, make, data = program.fun, program.make, program.data
    flat, own = ways.Flat(program), ways.equinox_program(program)
    step, state = ways.state_program(program)
    structure, split = nnx_sharding.split(make())

    def merged(arrays: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        (model,) = nnx_sharding.merge(structure, arrays)
        return fun(model, x), model.calls[...]

    def maker(jit: Callable[..., Any], fun: Callable[..., Any], *arguments: Any) -> Way:
        # JAX knows functions by their identity, so each time there is a new one.
        return lambda: functools.partial(jit(lambda *a: fun(*a)).lower, *arguments, *data)

    def equinox() -> Way | Unavailable:
        if isinstance(own, Unavailable):
            return own
        from equinox import filter_jit

        return maker(filter_jit, own.fun, own.state)

    model, another = make(), make()
    tree_jit = functools.partial(nnx.jit, graph=False)
    return {
        FLOOR: maker(jax.jit, flat, flat.arrays),
        SPLIT_MERGE: maker(jax.jit, merged, split),
        OURS: maker(nnx_sharding.jit, fun, *make()),
        NNX_JIT: maker(nnx.jit, fun, *model),
        NNX_TREE: maker(tree_jit, fun, *another),
        CACHED_PARTIAL: Unavailable("it has no lower"),
        JIT_PARTIAL: maker(lambda f: nnx.jit_partial(f, *another, graph=False), fun),
        ON_STATE: maker(jax.jit, step, state),
        EQUINOX: equinox(),
    }


def lowering_training(sizes: Sizes) -> Iterator[Row]:
    """Against plain JAX: the same step, with what depth costs to trace."""
    for blocks in (sizes.small, 8 * sizes.small):
        program = models.training(blocks, sizes.width, sizes.batch)
        flat, (model, optimizer) = ways.Flat(program), program.make()

        def maker(jit: Callable[..., Any], fun: Callable[..., Any], *arguments: Any) -> Way:
            return lambda: functools.partial(jit(lambda *a: fun(*a)).lower, *arguments)

        makers: Ways = {
            FLOOR: maker(jax.jit, flat, flat.arrays, *flat.data),
            OURS: maker(nnx_sharding.jit, program.fun, model, optimizer, *program.data),
            NNX_JIT: maker(nnx.jit, program.fun, model, optimizer, *program.data),
        }
        figures = time_first_calls(makers, max(3, sizes.few // 2))
        title = f"trace and lower of a training step with Adam, {blocks} blocks"
        targets = (at_most(1.1, 1.03, FLOOR),)
        yield Row(f"lowering_training{blocks}", title, "µs", figures, FLOOR, OURS, targets)


def returns(sizes: Sizes) -> Iterator[Row]:
    """How much of the device's work a call waits for."""
    x, steps = jnp.ones((sizes.matrix, sizes.matrix)), _steps(sizes)
    program = Program(
        models.slow,
        lambda: (nnx.Linear(sizes.matrix, sizes.matrix, rngs=nnx.Rngs(0)),),
        (x, jnp.array(steps)),
        equinox="",
    )
    flat, ours = ways.Flat(program), nnx_sharding.jit(program.fun)
    pair: Ways = {
        FLOOR: flat.way(jax.jit(flat)),
        OURS: functools.partial(ours, *program.make(), *program.data),
    }
    times = time_calls(pair, min(3, sizes.few), FLOOR, [OURS], loop=False)
    title = f"a slow call, {steps} products of {sizes.matrix} × {sizes.matrix} matrices, until"
    yield Row("returns", f"{title} it returns", "µs", times.returned, FLOOR, OURS)
    yield Row("ready", f"{title} its result is ready", "µs", times.ready, FLOOR, OURS)


def _steps(sizes: Sizes) -> int:
    """How many matrix products take the wanted time here."""
    product = functools.partial(jax.jit(jnp.matmul), *jnp.ones((2, sizes.matrix, sizes.matrix)))
    [one] = time_calls({FLOOR: product}, 5, FLOOR, [], loop=False).ready.values()
    return max(1, round(sizes.seconds * 1e6 / one.median))


def memory(sizes: Sizes) -> Iterator[Row]:
    program = models.forward(sizes.large)
    size = f"{_size(sizes.large)}, host memory"
    yield Row(
        "memory_model",
        f"kept for each of {sizes.models} further models that a function is called with: {size}",
        "bytes",
        _memory_of_models(program, sizes.models),
        FLOOR,
        OURS,
    )
    yield Row(
        "memory_function",
        f"kept for each further function that a model is called with: {size}",
        "bytes",
        _memory_of_functions(program, sizes.functions),
        FLOOR,
        OURS,
    )
    for cyclic in (False, True):
        yield from _memory_of_dropped(cyclic, sizes.dropped)


def _memory_of_models(program: Program, count: int) -> Figures:
    flat, ours = ways.Flat(program), nnx_sharding.jit(program.fun)
    jitted = jax.jit(flat)

    def floor(_: int) -> Way:
        return flat.way(jitted)

    def own(_: int) -> Way:
        return functools.partial(ours, *program.make(), *program.data)

    return {FLOOR: _bytes_each(floor, count), OURS: _bytes_each(own, count)}


def _memory_of_functions(program: Program, count: int) -> Figures:
    flat, graphs = ways.Flat(program), program.make()

    def floor(_: int) -> Way:
        return flat.way(jax.jit(lambda *args: flat(*args)))

    def own(_: int) -> Way:
        jitted = nnx_sharding.jit(lambda *args: program.fun(*args))
        return functools.partial(jitted, *graphs, *program.data)

    return {FLOOR: _bytes_each(floor, count), OURS: _bytes_each(own, count)}


def _bytes_each(make: Callable[[int], Way], count: int) -> Figure:
    """What two calls of each of some ways leave behind as long as the ways live."""
    jax.block_until_ready(make(0)())
    calls = [make(i) for i in range(count)]
    with _allocated() as found:
        _call_twice(calls)
    return _exactly(found["bytes"] / count, count)


def _memory_of_dropped(cyclic: bool, count: int) -> Iterator[Row]:
    jitted, x = nnx_sharding.jit(models.call_model), jnp.ones(())

    def use(count: int) -> None:
        for _ in range(count):
            _call_twice([functools.partial(jitted, models.Tiny(cyclic), x)])

    use(10)  # what is kept for the function, and by JAX
    with _allocated() as found:
        use(count)
    kind = "tiny models with cycles" if cyclic else "tiny models"
    for unit in ("objects", "bytes"):
        name = f"dropped{'_cyclic' if cyclic else ''}_{unit}"
        title = f"{unit} left of {count} {kind} that were called twice and dropped"
        yield Row(name, title, unit, {OURS: _exactly(found[unit], 1)}, None, OURS)


def _call_twice(calls: Iterable[Way]) -> None:
    for call in calls:
        for _ in range(2):
            jax.block_until_ready(call())


@contextlib.contextmanager
def _allocated() -> Iterator[dict[str, float]]:
    """How many bytes and objects there are more after the block, without garbage."""
    found: dict[str, float] = {}
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    try:
        yield found
        gc.collect()
        found["bytes"] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    found["objects"] = len(gc.get_objects()) - before


def _exactly(value: float, repeats: int) -> Figure:
    return Figure(value, value, value, repeats)


def make_mesh() -> Mesh:
    """All devices up to 8, as (2, 4) if there are so many."""
    devices = jax.devices()[:8]
    while len(devices) not in (1, 2, 4, 8):
        devices.pop()
    data = 2 if len(devices) > 2 else 1
    return Mesh(np.array(devices).reshape(data, -1), ("data", "model"))


def _mesh_size(mesh: Mesh) -> str:
    return " × ".join(map(str, mesh.devices.shape))


def _size(blocks: int) -> str:
    return f"{blocks} block{'s' if blocks > 1 else ''}, {6 * blocks + 1} Variables"


CASES: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    case.__name__: case
    for case in (
        forward32,
        configured,
        train8,
        forward1,
        deep,
        per_variable,
        new_models,
        sharded32,
        predicate32,
        shard_map_mlp,
        compiled,
        checked,
        lowering,
        lowering_training,
        first_call,
        pure_python,
        returns,
        memory,
    )
}
