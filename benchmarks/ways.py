"""The ways to call one program: the floor, the library, and its peers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnx_sharding

from .measure import Unavailable, Way, Ways
from .models import Program

P = PartitionSpec

FLOOR = "jax.jit on flat arrays"
OTHER_ARRAYS = "jax.jit on other flat arrays at each call"
OURS = "nnx_sharding.jit"
NNX_JIT = "nnx.jit"
NNX_TREE = "nnx.jit(graph=False)"
CACHED_PARTIAL = "nnx.cached_partial(nnx.jit)"
JIT_PARTIAL = "nnx.jit_partial(graph=False)"
ON_STATE = "jax.jit on nnx.State"
EQUINOX = "equinox.filter_jit"


class Flat:
    """A program over the list of its arrays; only those that it changes come out.

    Args:
      program: the program.
      changed: the positions of the arrays that it changes; None finds them out by tracing.
    """

    def __init__(self, program: Program, changed: Sequence[int] | None = None):
        self._fun = program.fun
        # As pytrees, modules are put together faster than by any split and merge.
        self.arrays, self._treedef = jax.tree.flatten(program.make())
        self.data = program.data
        self.changed = self._trace() if changed is None else list(changed)

    def __call__(self, arrays: list[Any], *data: Any) -> tuple[Any, list[Any]]:
        result, after = self._run(arrays, *data)
        return result, [after[i] for i in self.changed]

    def _run(self, arrays: list[Any], *data: Any) -> tuple[Any, list[Any]]:
        graphs = jax.tree.unflatten(self._treedef, arrays)
        result = self._fun(*graphs, *data)
        return result, jax.tree.leaves(graphs)

    def _trace(self) -> list[int]:
        changed: list[int] = []

        def run(arrays: list[Any], *data: Any) -> None:
            _, after = self._run(arrays, *data)
            pairs = enumerate(zip(arrays, after, strict=True))
            changed.extend(i for i, (old, new) in pairs if old is not new)

        jax.eval_shape(run, self.arrays, *self.data)
        return changed

    def way(self, jitted: Callable[..., Any]) -> Way:
        """Calls a compiled form of this, and puts what is new into the list."""
        arrays, changed, data = list(self.arrays), self.changed, self.data

        def call() -> Any:
            result, new = jitted(arrays, *data)
            for i, array in zip(changed, new, strict=True):
                arrays[i] = array
            return result

        return call


def carried(step: Callable[..., Any], state: Any, data: tuple[Any, ...]) -> Way:
    """Calls a function that takes a state and returns the next one."""

    def call() -> Any:
        nonlocal state
        result, state = step(state, *data)
        return result

    return call


def state_program(program: Program) -> tuple[Callable[..., Any], Any]:
    """The program as a function that takes and returns an ``nnx.State``, and the first State."""
    graphdef, state = nnx.split(program.make())

    def step(state: Any, *data: Any) -> tuple[Any, Any]:
        graphs = nnx.merge(graphdef, state)
        result = program.fun(*graphs, *data)
        return result, nnx.state(graphs)

    return step, state


def equinox_program(program: Program) -> Any:
    """The program in Equinox, or why there is none."""
    try:
        found = importlib.import_module(".equinox_models", __package__)
    except ModuleNotFoundError as error:
        return Unavailable(f"{error.name} is not installed")
    return getattr(found, program.equinox)(*program.make())


def equinox_way(program: Program) -> Way | Unavailable:
    own = equinox_program(program)
    if isinstance(own, Unavailable):
        return own
    import equinox

    return carried(equinox.filter_jit(own.fun), own.state, program.data)


def jit_ways(program: Program) -> dict[str, Way | Unavailable]:
    """All ways to compile a program for one device."""
    fun, make, data = program.fun, program.make, program.data
    flat = Flat(program)
    step, state = state_program(program)
    return {
        FLOOR: flat.way(jax.jit(flat)),
        OURS: functools.partial(nnx_sharding.jit(fun), *make(), *data),
        NNX_JIT: functools.partial(nnx.jit(fun), *make(), *data),
        NNX_TREE: functools.partial(nnx.jit(fun, graph=False), *make(), *data),
        CACHED_PARTIAL: functools.partial(nnx.cached_partial(nnx.jit(fun), *make()), *data),
        JIT_PARTIAL: functools.partial(nnx.jit_partial(fun, *make(), graph=False), *data),
        ON_STATE: carried(jax.jit(step), state, data),
        EQUINOX: equinox_way(program),
    }


class Layout:
    """How a model is sharded: a mesh, and a spec for each filter.

    It says the same thing in the words of each way to call.
    """

    def __init__(self, mesh: Mesh, specs: dict[Any, PartitionSpec], data: PartitionSpec):
        self.mesh, self.specs, self.data = mesh, specs, data
        self.rules = nnx_sharding.StateSharding(specs)

    def named(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @property
    def shardings(self) -> dict[Any, NamedSharding]:
        return {filter_: self.named(spec) for filter_, spec in self.specs.items()}

    def flat_specs(self, program: Program) -> list[PartitionSpec]:
        return jax.tree.leaves(
            nnx.prefix(program.make(), self.specs, graph=False), is_leaf=_is_spec
        )

    def state_specs(self, state: Any) -> Any:
        found = nnx.to_flat_state(state)
        return nnx.from_flat_state([(path, self.rules.map_prefix(path, v)) for path, v in found])

    def all_named(self, specs: Any) -> Any:
        return jax.tree.map(self.named, specs, is_leaf=_is_spec)

    def placed(self, program: Program) -> Program:
        """The same program with its data placed as declared."""
        return program._replace(data=jax.device_put(program.data, self.named(self.data)))


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def sharded_ways(program: Program, layout: Layout) -> dict[str, Way | Unavailable]:
    """All ways to compile a program with ``in_shardings`` and ``out_shardings``."""
    program = layout.placed(program)
    fun, make, data = program.fun, program.make, program.data
    data_sharding = layout.named(layout.data)

    def nnx_jit() -> Any:
        rules = nnx.StateSharding(layout.shardings)
        return nnx.jit(
            fun,
            in_shardings=(rules, data_sharding),
            out_shardings=data_sharding,
            graph=True,
            graph_updates=True,
        )

    def nnx_tree() -> Way:
        (model,) = make()
        rules = nnx.prefix(model, layout.shardings, graph=False)
        jitted = nnx.jit(
            fun, in_shardings=(rules, data_sharding), out_shardings=data_sharding, graph=False
        )
        return functools.partial(jitted, model, *data)

    ours = nnx_sharding.jit(
        fun, in_shardings=(layout.rules, layout.data), out_shardings=layout.data, mesh=layout.mesh
    )
    return {
        FLOOR: _sharded_flat(program, layout),
        OURS: functools.partial(ours, *make(), *data),
        NNX_JIT: functools.partial(nnx_jit(), *make(), *data),
        NNX_TREE: nnx_tree(),
        CACHED_PARTIAL: functools.partial(nnx.cached_partial(nnx_jit(), *make()), *data),
        f"{JIT_PARTIAL}, placed before": _sharded_partial(program, layout),
        ON_STATE: _sharded_state(program, layout),
        EQUINOX: _sharded_equinox(program, layout),
    }


def _sharded_flat(program: Program, layout: Layout) -> Way:
    flat = Flat(program)
    shardings, data_sharding = (
        layout.all_named(layout.flat_specs(program)),
        layout.named(layout.data),
    )
    flat.arrays = jax.device_put(flat.arrays, shardings)
    outputs = [shardings[i] for i in flat.changed]
    return flat.way(
        jax.jit(
            flat, in_shardings=(shardings, data_sharding), out_shardings=(data_sharding, outputs)
        )
    )


def _sharded_partial(program: Program, layout: Layout) -> Way:
    # It takes no shardings for parts of a module; it uses the shardings of the arrays.
    graphs = program.make()
    state = nnx.state(graphs)
    nnx.update(graphs, jax.device_put(state, layout.all_named(layout.state_specs(state))))
    jitted = nnx.jit_partial(
        program.fun, *graphs, out_shardings=layout.named(layout.data), graph=False
    )
    return functools.partial(jitted, *program.data)


def _sharded_state(program: Program, layout: Layout) -> Way:
    step, state = state_program(program)
    shardings, data_sharding = (
        layout.all_named(layout.state_specs(state)),
        layout.named(layout.data),
    )
    jitted = jax.jit(
        step, in_shardings=(shardings, data_sharding), out_shardings=(data_sharding, shardings)
    )
    return carried(jitted, jax.device_put(state, shardings), program.data)


def _sharded_equinox(program: Program, layout: Layout) -> Way | Unavailable:
    own = equinox_program(program)
    if isinstance(own, Unavailable):
        return own
    import equinox

    from .equinox_models import network_specs

    shardings, data_sharding = layout.all_named(network_specs(own.state)), layout.named(layout.data)

    def step(state: Any, *data: Any) -> tuple[Any, Any]:
        result, state = own.fun(state, *data)
        return equinox.filter_shard(result, data_sharding), equinox.filter_shard(state, shardings)

    return carried(equinox.filter_jit(step), jax.device_put(own.state, shardings), program.data)


OUR_SHARD_MAP = "nnx_sharding.jit(nnx_sharding.shard_map)"
FLOOR_SHARD_MAP = "jax.jit(jax.shard_map) on flat arrays"


def shard_map_ways(program: Program, layout: Layout) -> Ways:
    """All ways to map a program over shards; it may not change its model."""
    program = layout.placed(program)
    fun, make, data = program.fun, program.make, program.data
    mesh, data_sharding = layout.mesh, layout.data

    def nnx_shard_map() -> Any:
        specs = (nnx.StateSharding(layout.specs), data_sharding)
        return nnx.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=data_sharding)

    def nnx_tree_shard_map() -> Any:
        specs = (nnx.prefix(make()[0], layout.specs, graph=False), data_sharding)
        return nnx.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=data_sharding, graph=False)

    ours = nnx_sharding.shard_map(
        fun, mesh=mesh, in_specs=(layout.rules, data_sharding), out_specs=data_sharding
    )
    # The shardings put the model on the mesh, once; a `shard_map` of its own does that, too.
    jitted = nnx_sharding.jit(ours, in_shardings=(layout.rules, data_sharding), mesh=mesh)
    tree_jit = nnx.jit(nnx_tree_shard_map(), graph=False)
    cached = nnx.cached_partial(nnx.jit(nnx_shard_map()), *make())
    partial = nnx.jit_partial(nnx_tree_shard_map(), *make(), graph=False)
    return {
        FLOOR_SHARD_MAP: _mapped_flat(program, layout),
        OUR_SHARD_MAP: functools.partial(jitted, *make(), *data),
        "nnx_sharding.shard_map": functools.partial(ours, *make(), *data),
        "nnx.shard_map": functools.partial(nnx_shard_map(), *make(), *data),
        "nnx.jit(nnx.shard_map)": functools.partial(nnx.jit(nnx_shard_map()), *make(), *data),
        "nnx.jit(nnx.shard_map, graph=False)": functools.partial(tree_jit, *make(), *data),
        "nnx.cached_partial(nnx.jit(nnx.shard_map))": functools.partial(cached, *data),
        "nnx.jit_partial(nnx.shard_map, graph=False)": functools.partial(partial, *data),
        "jax.jit(jax.shard_map) on nnx.State": _mapped_state(program, layout),
        "equinox.filter_jit(jax.shard_map)": _mapped_equinox(program, layout),
    }


def _mapped(fun: Callable[..., Any], layout: Layout, specs: Any) -> Any:
    return jax.shard_map(
        fun, mesh=layout.mesh, in_specs=(specs, layout.data), out_specs=layout.data
    )


def _mapped_flat(program: Program, layout: Layout) -> Way:
    flat = Flat(program, changed=[])
    specs = layout.flat_specs(program)
    arrays = jax.device_put(flat.arrays, layout.all_named(specs))
    mapped = _mapped(lambda arrays, x: flat(arrays, x)[0], layout, specs)
    return functools.partial(jax.jit(mapped), arrays, *program.data)


def _mapped_state(program: Program, layout: Layout) -> Way:
    step, state = state_program(program)
    specs = layout.state_specs(state)
    mapped = _mapped(lambda state, x: step(state, x)[0], layout, specs)
    placed = jax.device_put(state, layout.all_named(specs))
    return functools.partial(jax.jit(mapped), placed, *program.data)


def _mapped_equinox(program: Program, layout: Layout) -> Way | Unavailable:
    own = equinox_program(program)
    if isinstance(own, Unavailable):
        return own
    import equinox

    from .equinox_models import mlp_specs

    specs = mlp_specs(own.state)
    mapped = _mapped(lambda state, x: own.fun(state, x)[0], layout, specs)
    placed = jax.device_put(own.state, layout.all_named(specs))
    return functools.partial(equinox.filter_jit(mapped), placed, *program.data)
