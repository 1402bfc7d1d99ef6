"""Mistakes that users make, each as a program that runs with ``flax.nnx`` and with us.

``python tests/mistakes.py`` writes the first lines of our messages into ``docs/errors.md``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import configurations
import nnx_sharding
from nnx_sharding import accumulate_gradients, stack, value_and_grad
from nnx_sharding.core.call_context import CacheNotice
from nnx_sharding.errors import (
    ActivationError,
    CapturedArrayWarning,
    ShardingWarning,
    StrictError,
    UnshardedWarning,
    UnusedFilterWarning,
)
from nnx_sharding.filters import PathRegex
from nnx_sharding.partition import pipeline

Library = Any

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
      anchor: the section of ``docs/errors.md`` about the error.
      title: a description for readers.
      run: makes the mistake with a library.
      error: the type of our error.
      facts: what our message has to contain.
    """

    anchor: str
    title: str
    run: Callable[[Library], Any]
    error: type[BaseException]
    facts: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}


def mistake(anchor: str, title: str, error: type[BaseException], *facts: str) -> Any:
    def register(run: Callable[[Library], Any]) -> Callable[[Library], Any]:
        MISTAKES[run.__name__] = Mistake(anchor, title, run, error, facts)
        return run

    return register


class Block(nnx.Module):
    """``up`` (4, 16), ``down`` (16, 4) without biases, and a counter."""

    def __init__(self, hidden: int = 16):
        self.up = nnx.Param(jnp.ones((4, hidden)))
        self.down = nnx.Param(jnp.ones((hidden, 4)))
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.up[...]) @ self.down[...]


class Model(nnx.Module):
    def __init__(self, hidden: int = 16):
        self.blocks = nnx.List([Block(hidden), Block(hidden)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def grid(kind: AxisType = AxisType.Auto, names: tuple[str, str] = ("data", "model")) -> Mesh:
    return jax.make_mesh((2, 4), names, axis_types=(kind, kind))


def strict(lib: Library) -> dict[str, Any]:
    """The option that only we have."""
    return {"strict": True} if hasattr(lib, "explain_retraces") else {}


def forward(model: Model, x: jax.Array) -> jax.Array:
    return model(x)


X = np.ones((8, 4), np.float32)


def named(*spec: Any, mesh: Mesh | None = None) -> NamedSharding:
    return NamedSharding(mesh or grid(), P(*spec))


@mistake(
    "no-filter-matches",
    "Variables that no filter matches",
    ValueError,
    "model.blocks[0].count: BatchStat of shape ()",
    "model.blocks[1].down: Param of shape (16, 4)",
    "PathContains('up'",
    "`...: PartitionSpec()`",
)
def unmatched(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): named(None, "model")})
    return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(
    "no-filter-matches",
    "a Variable that the function adds to a model with a strategy",
    ValueError,
    "model.extra: Param of shape (4,)",
    "The function adds these",
    "override(sharding, {'^extra$': P()})",
)
def unmatched_new(lib: Library) -> Any:
    model = Model()

    def add(model: Model) -> None:
        model.extra = nnx.Param(jnp.ones(4))

    specs = nnx_sharding.fsdp(model, mesh=grid(), min_size=0)
    with jax.set_mesh(grid()):
        return lib.jit(add, in_shardings=specs)(model)


@mistake(
    "unused-filter",
    "a filter that matches nothing",
    UnusedFilterWarning,
    "PathContains('upp', exact=True), for model; did you mean 'up'?",
)
def unused(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("upp"): named(None, "model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(
    "unused-filter",
    "filters for the model, used for a module of it",
    UnusedFilterWarning,
    r"PathRegex('blocks/[01]/up'), for block; paths start at this argument, where PathRegex('up')",
    "all paths there: ",
)
def unused_outer(lib: Library) -> Any:
    block = Model().blocks[0]
    specs = lib.StateSharding({PathRegex(r"blocks/[01]/up"): named(None, "model"), ...: named()})
    return lib.jit(lambda block: block.up[...], in_shardings=(specs,))(block)


@mistake(
    "no-filter-matches",
    "filters for the model, used for a module of it",
    ValueError,
    "block.up: Param of shape (4, 16)",
    "Paths start at this argument, where PathRegex('up') would match.",
)
def unmatched_outer(lib: Library) -> Any:
    block = Model().blocks[0]
    specs = lib.StateSharding({PathRegex(r"blocks/[01]/up"): named(None, "model")})
    return lib.jit(lambda block: block.up[...], in_shardings=(specs,))(block)


@mistake(
    "unused-filter",
    "a filter for another model, with `strict=True`",
    StrictError,
    "PathContains('router', exact=True), for model",
)
def unused_strict(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("router"): named(None, "model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None), **strict(lib))(Model(), X)


@mistake(
    "not-divisible",
    "Variables, in `jit`",
    ValueError,
    "model.blocks[0].up, shape (4, 12), P(None, ('data', 'model'))",
    "model.blocks[1].up",
    "dimension 1 of size 12",
    "'data' (2) × 'model' (4) = 8",
    "on_indivisible='replicate' or 'drop'",
)
def indivisible(lib: Library) -> Any:
    specs = lib.StateSharding(
        {
            "up": named(None, ("data", "model")),
            nnx.PathContains("up"): named(None, ("data", "model")),
            ...: named(),
        }
    )
    return lib.jit(forward, in_shardings=(specs, None))(Model(12), X)


@mistake(
    "not-divisible",
    "Variables, in `shard_map`",
    ValueError,
    "model.blocks[0].up, shape (4, 10), P(None, 'model')",
    "model.blocks[1].up",
    "size 10 is not divisible by 'model' (4)",
)
def indivisible_shards(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
    f = lib.shard_map(forward, mesh=grid(), in_specs=(specs, P("data")), out_specs=P("data"))
    return f(Model(10), X)


@mistake(
    "not-divisible",
    "a batch, in `jit`",
    ValueError,
    "x, shape (7, 4), P('data',)",
    "dimension 0 of size 7 is not divisible by 'data' (2)",
)
def indivisible_batch(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, named("data")))(Model(), X[:7])


@mistake(
    "not-divisible",
    "a batch, in `shard_map`",
    ValueError,
    "x, shape (7, 4), P('data',)",
    "dimension 0 of size 7 is not divisible by 'data' (2)",
)
def indivisible_batch_shards(lib: Library) -> Any:
    f = lib.shard_map(forward, mesh=grid(), in_specs=(P(), P("data")), out_specs=P("data"))
    return f(Model(), X[:7])


@mistake(
    "not-divisible",
    "a result",
    ValueError,
    "results",
    "output, shape (7, 4), P('data',)",
)
def indivisible_result(lib: Library) -> Any:
    return lib.jit(forward, out_shardings=named("data"))(Model(), X[:7])


@mistake(
    "spec-too-long",
    "a spec longer than the rank, in `jit`",
    ValueError,
    "model.blocks[0].up, shape (4, 16)",
    "model.blocks[1].up",
    "3 entries",
    "2 dimensions",
)
def too_long(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): named(None, None, "model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(
    "spec-too-long",
    "a spec longer than the rank, in `shard_map`",
    ValueError,
    "model.blocks[0].up, shape (4, 16)",
    "model.blocks[1].up",
    "3 entries",
    "2 dimensions",
)
def too_long_shards(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, None, "model"), ...: P()})
    return lib.shard_map(forward, mesh=grid(), in_specs=(specs, P()), out_specs=P())(Model(), X)


@mistake(
    "specs-that-do-not-fit-the-mesh",
    "an axis that the mesh does not have, in `jit`",
    ValueError,
    "P(None, 'modle') for model.blocks[0].up, model.blocks[1].up",
    "did you mean 'model'?",
    "'data' (2), 'model' (4)",
)
def no_axis(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "modle"), ...: P()})
    with jax.set_mesh(grid()):
        return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(
    "specs-that-do-not-fit-the-mesh",
    "an axis that the mesh does not have, in `shard_map`",
    ValueError,
    "P(None, 'modle') for model.blocks[0].up, model.blocks[1].up",
    "did you mean 'model'?",
    "'data' (2), 'model' (4)",
)
def no_axis_shards(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "modle"), ...: P()})
    return lib.shard_map(forward, mesh=grid(), in_specs=(specs, P()), out_specs=P())(Model(), X)


@mistake(
    "specs-that-do-not-fit-the-mesh",
    "one axis used twice",
    ValueError,
    "P('model', 'model') for model.blocks[0].up, model.blocks[1].up",
    "used 2 times",
)
def axis_twice(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P("model", "model"), ...: P()})
    with jax.set_mesh(grid()):
        return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(
    "spec-too-long",
    "an axis for a scalar",
    ValueError,
    "model.blocks[0].count, shape ()",
    "model.blocks[1].count",
    "its spec is P()",
)
def scalar(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.BatchStat: named("model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake("not-a-spec", "a string as a spec", TypeError, "in_shardings[1]: 'data': write P('data')")
def bare_string(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, "data"))(Model(), X)


@mistake(
    "not-a-spec",
    "a tuple of names as a spec",
    TypeError,
    "in_shardings[1]: ('data', None): write P('data', None)",
)
def bare_tuple(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, ("data", None)))(Model(), X)


@mistake(
    "not-a-spec",
    "a tuple of names in a `StateSharding`",
    TypeError,
    "PathContains('up'",
    "(None, 'model'): write P(None, 'model')",
)
def bare_in_filters(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): (None, "model"), ...: P()})
    with jax.set_mesh(grid()):
        return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(
    "not-a-tree-prefix",
    "specs with other keys than the argument",
    ValueError,
    "jit: in_shardings: these specs are not a tree prefix",
    "b: no spec for 'mask'",
    "unknown key 'masks'; did you mean 'mask'?",
    "Write one spec for a whole value, or a container of the same type",
)
def wrong_keys(lib: Library) -> Any:
    batch = {"x": X, "mask": X, "y": X}
    specs = {"x": named("data"), "masks": named("data"), "y": named("data")}
    return lib.jit(lambda m, b: m(b["x"]), in_shardings=(None, specs))(Model(), batch)


@mistake(
    "not-a-tree-prefix",
    "specs with other keys than a nested result",
    ValueError,
    "jit: out_shardings: these specs are not a tree prefix",
    "output[1]: unknown key 'b'",
)
def wrong_result(lib: Library) -> Any:
    f = lib.jit(lambda m, x: (m(x), {"a": x}), out_shardings=(None, {"a": None, "b": None}))
    return f(Model(), X)


def many(model: Model, x: jax.Array, flag: bool, *more: jax.Array) -> jax.Array:
    return model(x) if flag else x


@mistake(
    "number-of-specs",
    "too few specs, in `jit`",
    ValueError,
    "2 entries",
    "4 positional parameters of many: model, x, flag, more[0]",
    "x: None",
    "flag: static, needs no entry, or None",
    "more[0]: no entry",
)
def few_specs(lib: Library) -> Any:
    return lib.jit(many, in_shardings=(None, None), static_argnums=2)(Model(), X, True, X)


@mistake(
    "number-of-specs",
    "too many specs",
    ValueError,
    "4 entries",
    "2 positional parameters of forward: model, x",
)
def many_specs(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, None, named(), named()))(Model(), X)


@mistake(
    "number-of-specs",
    "a spec for a static argument",
    ValueError,
    "3 entries",
    "flag: static, needs no entry, or None",
)
def static_spec(lib: Library) -> Any:
    def switch(model, x, flag):
        return model(x) if flag else x

    f = lib.jit(switch, in_shardings=(None, None, named("data")), static_argnums=2)
    return f(Model(), X, True)


@mistake(
    "number-of-specs",
    "too few specs, in `shard_map`",
    ValueError,
    "1 entry",
    "model: P()",
    "x: no entry",
)
def few_specs_shards(lib: Library) -> Any:
    return lib.shard_map(forward, mesh=grid(), in_specs=(P(),), out_specs=P())(Model(), X)


@mistake(
    "unknown-parameter",
    "a spec for a parameter that does not exist",
    ValueError,
    "in_shardings: these are not parameters of the function",
    "'modle'; did you mean 'model'?",
    "'model', 'x'",
)
def named_spec(lib: Library) -> Any:
    return lib.jit(forward, in_shardings={"modle": named(), "x": named("data")})(Model(), x=X)


@mistake(
    "unknown-parameter",
    "a donated parameter that does not exist",
    ValueError,
    "jit: donate_argnames: these are not parameters of the function",
    "'modle'; did you mean 'model'? (parameters: 'model', 'x')",
)
def unknown_name_donated(lib: Library) -> Any:
    return lib.jit(forward, donate_argnames="modle")(Model(), X)


@mistake(
    "unknown-parameter",
    "a static parameter of `remat` that does not exist",
    ValueError,
    "remat: static_argnames: these are not parameters of the function",
    "'trian'; did you mean 'train'?",
)
def unknown_name_static(lib: Library) -> Any:
    run = nnx_sharding.remat(lambda model, x, train: model(x), static_argnames="trian")
    return run(Model(), X, train=True)


@mistake(
    "no-mesh",
    "no mesh for a `PartitionSpec`",
    ValueError,
    "mesh=...",
    "jax.set_mesh",
    "NamedSharding",
)
def no_mesh(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, P("data")))(Model(), X)


@mistake(
    "different-devices",
    "two meshes",
    ValueError,
    "x: cpu 7, 6, 5, 4, 3, 2, 1, 0",
    "model.blocks[0].count",
)
def two_meshes(lib: Library) -> Any:
    other = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"))
    specs = (named(), named("data", mesh=other))
    return lib.jit(forward, in_shardings=specs)(Model(), X)


@mistake(
    "different-devices",
    "devices that do not match",
    ValueError,
    "x: cpu 0, 1, 2, 3\n",
    "model.blocks[0].count",
)
def other_devices(lib: Library) -> Any:
    half = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(X, NamedSharding(half, P("data")))
    return lib.jit(forward, in_shardings=(named(), None))(Model(), x)


@mistake(
    "different-devices",
    "a Variable on other devices",
    ValueError,
    "model.blocks[0].count",
    "x: cpu 0, 1, 2, 3, 4, 5, 6, 7",
)
def other_devices_variable(lib: Library) -> Any:
    model = Model()
    half = Mesh(np.array(jax.devices()[:4]), ("data",))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(half, P())))
    return lib.jit(forward, in_shardings=(None, named("data")))(model, X)


@mistake(
    "two-shardings-for-one-variable",
    "one Variable with two shardings",
    ValueError,
    "m.blocks[1].up: P()",
    "kernel: P('model',)",
)
def aliased(lib: Library) -> Any:
    model = Model()
    f = lib.jit(lambda m, kernel, x: m(x), in_shardings=(named(), named("model"), None))
    return f(model, model.blocks[1].up, X)


@mistake(
    "committed-to-another-sharding",
    "Variables that are committed",
    ValueError,
    "model.blocks[0].down, shape (16, 4): is P('model',), declared P(None, 'model')",
    "model.blocks[1].up",
    "on_committed='move'",
)
def committed(lib: Library) -> Any:
    model = Model()
    nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), named("model")))
    specs = lib.StateSharding({nnx.Param: named(None, "model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(model, X)


@mistake(
    "committed-to-another-sharding",
    "an array that is committed",
    ValueError,
    "x, shape (8, 4): is P('model',), declared P('data',)",
    "on_committed='move'",
)
def committed_array(lib: Library) -> Any:
    x = jax.device_put(X, named("model"))
    return lib.jit(forward, in_shardings=(None, named("data")))(Model(), x)


@mistake(
    "declared-otherwise-than-its-type",
    "an array on an explicit mesh, in `jit`",
    ValueError,
    "x is float32[8@model,4], declared P('data',)",
    "write P('model', None)",
    "reshard(x, P('data',))",
)
def explicit(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("model")))
    with jax.set_mesh(mesh):
        return lib.jit(forward, in_shardings=(None, P("data")))(Model(), x)


@mistake(
    "declared-otherwise-than-its-type",
    "an array on an explicit mesh, in `shard_map`",
    ValueError,
    "x is float32[8@model,4], declared P('data',)",
    "write P('model', None)",
    "reshard(x, P('data',))",
)
def explicit_shards(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("model")))
    with jax.set_mesh(mesh):
        f = lib.shard_map(forward, in_specs=(P(), P("data")), out_specs=P("data"))
        return f(Model(), x)


@mistake(
    "declared-otherwise-than-its-type",
    "an array without a sharding, in `shard_map` within `jit`",
    ValueError,
    "x is float32[8,4], declared P('data',)",
    "declare it in the jit around, too",
    "reshard(x, P('data',))",
)
def explicit_shards_in_a_trace(lib: Library) -> Any:
    with jax.set_mesh(grid(AxisType.Explicit)):
        f = lib.shard_map(forward, in_specs=(P(), P("data")), out_specs=P("data"))
        return nnx.jit(lambda model, x: f(model, x))(Model(), X)


@mistake(
    "declared-otherwise-than-its-type",
    "a module on an explicit mesh, in `shard_map` within `jit`",
    ValueError,
    "model.blocks[0].up is float32[4,16@model], declared P()",
    "write P(None, 'model')",
    "nnx_sharding.reshard(model, sharding)",
)
def explicit_module_in_a_trace(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    columns = lib.StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
    f = lib.shard_map(forward, in_specs=(P(), P("data")), out_specs=P("data"), mesh=mesh)
    shardings = (columns, P("data"))
    step = nnx_sharding.jit(lambda model, x: f(model, x), in_shardings=shardings, mesh=mesh)
    return step(Model(), X)


def explicit_shards_over_one_axis(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("model")))
    with jax.set_mesh(mesh):
        specs = {"in_specs": (P(), P()), "out_specs": P()}
        return lib.shard_map(forward, axis_names={"model"}, **specs)(Model(), x)


if jax.__version_info__ >= (0, 12):  # before, JAX reshards the array
    mistake(
        "declared-otherwise-than-its-type",
        "an array on an explicit mesh, in `shard_map` over one axis",
        ValueError,
        "x is float32[8@model,4], declared P()",
        "write P('model', None)",
    )(explicit_shards_over_one_axis)


@mistake(
    "not-proven-replicated",
    "a returned array",
    ValueError,
    "results of loss",
    "output['loss'], float32[]",
    "varies along 'data'",
    "jax.lax.pmean(x, 'data')",
    "psum",
)
def varying(lib: Library) -> Any:
    def loss(model, x):
        return {"loss": (model(x) ** 2).mean(), "n": jnp.ones(())}

    f = lib.shard_map(loss, mesh=grid(), in_specs=(P(), P("data")), out_specs=P())
    return f(Model(), X)


@mistake(
    "not-proven-replicated",
    "an updated Variable",
    ValueError,
    "results of count",
    "model.blocks[0].count",
    "varies along 'data'",
    "jax.lax.pmean(x, 'data')",
)
def varying_update(lib: Library) -> Any:
    def count(model, x):
        model.blocks[0].count[...] += x.sum()

    lib.shard_map(count, mesh=grid(), in_specs=(P(), P("data")), out_specs=P())(Model(), X)


def look_up_in(table: jax.Array) -> Callable[..., Any]:
    def look_up(model, x):
        return model(x) @ table

    return look_up


def table_on(mesh: Mesh) -> jax.Array:
    return jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, P("model")))


@mistake(
    "captured-array",
    "a sharded array",
    CapturedArrayWarning,
    "table, float32[4,4], P('model',)",
    "to every device",
    "Pass them as arguments",
)
def captured(lib: Library) -> Any:
    f = lib.jit(look_up_in(table_on(grid())), in_shardings=(named(), named("data")))
    return f(Model(), X)


@mistake(
    "captured-array-on-explicit-axes",
    "a sharded array on an explicit mesh",
    NotImplementedError,
    "look_up captures",
    "table, float32[4@model,4]",
)
def captured_explicit(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    look_up = look_up_in(table_on(mesh))
    specs = {"in_specs": (P(), P()), "out_specs": P()}
    return lib.shard_map(look_up, mesh=mesh, **specs)(Model(), X)


@mistake(
    "captured-array-on-explicit-axes",
    "an array on another mesh",
    ValueError,
    "look_up captures",
    "table, float32[4@model,4]",
)
def captured_other_mesh(lib: Library) -> Any:
    look_up = look_up_in(table_on(grid(AxisType.Explicit)))
    return lib.jit(look_up)(Model(), jax.device_put(X, named("data")))


@mistake("donated-twice", "one array passed twice", Exception, "float32[8,4]: a, b", "x.copy()")
def donated_twice(lib: Library) -> Any:
    x = jnp.ones((8, 4))
    return lib.jit(lambda m, a, b: (a + 1, b + 1), donate_argnums=(1, 2))(Model(), x, x)


@mistake(
    "used-after-donation",
    "an array used after it was donated",
    RuntimeError,
    "x, float32[8,4]",
    "donate_argnums",
)
def donated_before(lib: Library) -> Any:
    x = jnp.ones((8, 4))
    f = lib.jit(lambda m, x: x + 1, donate_argnums=1)
    f(Model(), x)
    return f(Model(), x)


@mistake(
    "used-after-donation",
    "a Variable that was donated elsewhere",
    RuntimeError,
    "model.blocks[1].up, float32[4,16]",
)
def donated_variable(lib: Library) -> Any:
    model = Model()
    jax.jit(lambda x: x + 1, donate_argnums=0)(model.blocks[1].up[...])
    return lib.jit(forward)(model, X)


@mistake(
    "donation-that-is-not-used",
    "an array that no result can use (`nnx_sharding` with `strict=True`)",
    StrictError,
    "x, float32[8,4]",
    "total has no result of their shape and dtype",
)
def donation_unused(lib: Library) -> Any:
    def total(model, x):
        return x.sum()

    return lib.jit(total, donate_argnums=1, **strict(lib))(Model(), jnp.ones((8, 4)))


@mistake(
    "changed-from-outside-its-trace",
    "a module of an outer trace is changed",
    Exception,
    "model.blocks[0].count",
    "Pass them into",
)
def outer_trace(lib: Library) -> Any:
    model = Model()

    @lib.jit
    def inner(model):
        model.blocks[0].count[...] += 1

    @jax.jit
    def outer(x):
        inner(model)
        return x

    return outer(X)


@mistake(
    "changed-from-outside-its-trace",
    "a captured module is changed",
    Exception,
    "model.blocks[0].count",
    "as one of its arguments",
)
def captured_change(lib: Library) -> Any:
    model = Model()

    @lib.jit
    def f(x):
        model.blocks[0].count[...] += 1
        return model(x)

    return f(X)


@mistake(
    "changed-from-outside-its-trace",
    "a captured module is changed in `grad`",
    Exception,
    "model.blocks[0].count, which <lambda> captures",
)
def captured_change_in_grad(lib: Library) -> Any:
    model = Model()
    return lib.grad(lambda scale: (counted(model, X) * scale).sum())(1.0)


@mistake(
    "changed-from-outside-its-trace",
    "a captured module is changed in `scan`",
    Exception,
    "model.blocks[0].count, which <lambda> captures",
)
def captured_change_in_scan(lib: Library) -> Any:
    model = Model()
    return lib.scan(lambda x, scale: (counted(model, x) * scale, None))(X, jnp.ones(3))


def counted(model: Model, x: jax.Array) -> jax.Array:
    model.blocks[0].count[...] += x.sum()
    return model(x)


@mistake(
    "changed-from-outside-its-trace",
    "a captured module is changed in `cond`",
    Exception,
    "model.blocks[0].count, which <lambda> captures",
)
def captured_change_in_cond(lib: Library) -> Any:
    model = Model()
    return lib.cond(X.sum() > 0, lambda x: counted(model, x), lambda x: model(x), X)


def noted(model: Model, x: jax.Array) -> jax.Array:
    model.seen = nnx.Intermediate(x)
    return model(x)


@mistake(
    "branches-that-differ",
    "a branch that adds an attribute",
    Exception,
    "model.seen: an Intermediate in true_fun, nothing in false_fun",
)
def branch_attribute(lib: Library) -> Any:
    return lib.cond(X.sum() > 0, noted, lambda model, x: model(x), Model(), X)


@mistake(
    "branches-that-differ",
    "branches with results of different structures",
    Exception,
    "output: float32[8,4] in branches[0], (float32[8,4], float32[8,4]) in branches[1]",
)
def branch_results(lib: Library) -> Any:
    return lib.switch(0, [lambda x: x, lambda x: (x, x)], X)


@mistake(
    "branches-that-differ",
    "branches with results of different types",
    TypeError,
    "output: float32[8,4] in true_fun, float32[] in false_fun",
)
def branch_types(lib: Library) -> Any:
    return lib.cond(X.sum() > 0, lambda x: x, lambda x: x.sum(), X)


def on_explicit_axes(lib: Library, f: Any) -> Any:
    """Calls ``jit(f)`` with a layer whose columns tensor_parallel shards, and with rows."""
    mesh = grid(AxisType.Explicit)
    model = nnx.Dict(up=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    shardings = nnx_sharding.tensor_parallel(model, mesh=mesh), P("data")
    return lib.jit(f, mesh=mesh, in_shardings=shardings)(model, X)


@mistake(
    "branches-that-differ",
    "branches with results of different shardings on Explicit axes",
    TypeError,
    "output: float32[8@data,4@model] in true_fun, float32[8@data,4] in false_fun",
    "activation_shardings={path: P('data', None)}",
    "jax.sharding.reshard(x, P('data', None)) in a branch",
    "jit(..., auto_axes=True)",
)
def branch_shardings(lib: Library) -> Any:
    def f(model, x):
        branches = (lambda model, x: model.up(x), lambda _, x: x)
        return nnx_sharding.cond(x.sum() > 0, *branches, model, x)

    return on_explicit_axes(lib, f)


class Dropped(nnx.Module):
    """Three layers in one, whose random streams are not split."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((3, 4, 4)))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x @ self.kernel[...])


@mistake(
    "axes-that-arrays-do-not-have",
    "random streams that are not split for `vmap`",
    ValueError,
    "model.dropout.rngs.count, uint32[]: axis 0",
    "nnx.split_rngs",
)
def streams_not_split(lib: Library) -> Any:
    return lib.vmap(lambda model, x: model(x), in_axes=(0, None))(Dropped(), X)


@mistake(
    "axes-that-arrays-do-not-have",
    "an axis that an argument does not have",
    ValueError,
    "x, float32[8,4]: axis 2",
)
def no_such_axis(lib: Library) -> Any:
    return lib.vmap(forward, in_axes=(None, 2))(Model(), X)


@mistake(
    "axes-that-arrays-do-not-have",
    "an axis that a result does not have",
    ValueError,
    "output, float32[4]: axis 2",
)
def no_such_out_axis(lib: Library) -> Any:
    return lib.vmap(forward, in_axes=(None, 0), out_axes=2)(Model(), X)


@mistake(
    "differs-between-elements",
    "a Variable that is not mapped, and written in `vmap`",
    ValueError,
    "model.blocks[0].count, float32[]",
    "StateAxes",
)
def written_in_vmap(lib: Library) -> Any:
    return lib.vmap(counted, in_axes=(None, 0))(Model(), X)


@mistake(
    "number-of-steps",
    "an argument of `scan` is missing",
    TypeError,
    "step: missing a required argument: 'x'",
)
def missing_argument(lib: Library) -> Any:
    def step(carry, x):
        return carry + x, carry

    return lib.scan(step)(jnp.ones(4))


@mistake(
    "number-of-steps",
    "`scan` of None",
    ValueError,
    "so step has no number of steps",
    "length=",
)
def no_length(lib: Library) -> Any:
    def step(carry, _):
        return carry * 2, carry

    return lib.scan(step)(jnp.ones(4), None)


@mistake(
    "carry-of-another-form",
    "a carry that the step returns in another structure",
    TypeError,
    "given: float32[8,4]",
    "returned: (float32[8,4], float32[8,4])",
)
def other_carry(lib: Library) -> Any:
    return lib.scan(lambda carry, x: ((carry, x), x))(X, jnp.ones((3, 8, 4)))


@mistake(
    "carry-of-another-form",
    "a step that returns the carry alone",
    TypeError,
    "a tuple whose item 0 is the carry (out_axes=(Carry, 0)), got float32[8,4]",
)
def carry_alone(lib: Library) -> Any:
    return lib.scan(lambda carry, x: carry * x)(X, jnp.ones(3))


@mistake(
    "carry-of-another-form",
    "a step that changes the sharding of the carry on Explicit axes",
    TypeError,
    "carry: float32[8@data,4] → float32[8@data,4@model]",
    "activation_shardings={path: P('data', None)}",
    "jax.sharding.reshard(x, P('data', None)) in the step",
    "jit(..., auto_axes=True)",
)
def carry_sharding(lib: Library) -> Any:
    def f(model, x):
        return nnx_sharding.scan(lambda carry, _: (model.up(carry), None), length=2)(x, None)

    return on_explicit_axes(lib, f)


@mistake(
    "carry-of-another-form",
    "a body of `while_loop` that changes the sharding of the carry on Explicit axes",
    TypeError,
    "init_val[1]: float32[8@data,4] → float32[8@data,4@model]",
    "jax.sharding.reshard(x, P('data', None)) in the step",
)
def loop_sharding(lib: Library) -> Any:
    def f(model, x):
        step = lambda carry: (carry[0], carry[0].up(carry[1]))  # noqa: E731
        return nnx_sharding.while_loop(lambda carry: carry[1].sum() > 0, step, (model, x))[1]

    return on_explicit_axes(lib, f)


def loss_of(model: Model, x: jax.Array) -> jax.Array:
    return model(x).sum()


@mistake(
    "carry-of-another-form",
    "a body of `while_loop` that returns another structure",
    Exception,
    "given: (float32[8,4], float32[])",
    "returned: float32[8,4]",
)
def loop_carry(lib: Library) -> Any:
    return lib.while_loop(lambda c: c[1] < 3, lambda c: c[0], (X, jnp.float32(0)))


@mistake(
    "nothing-to-differentiate",
    "a filter that matches nothing (`flax.nnx` with `DiffState`)",
    ValueError,
    "in model: no Variable matches LoRAParam",
    "BatchStat, Param",
)
def nothing_to_differentiate(lib: Library) -> Any:
    is_ours = hasattr(lib, "explain_retraces")
    diff_state = nnx.DiffState(0, nnx.LoRAParam)
    options = {"wrt": nnx.LoRAParam} if is_ours else {"argnums": diff_state}
    return lib.grad(loss_of, **options)(Model(), X)


@mistake(
    "unknown-parameter",
    "`grad` of an argument that does not exist",
    ValueError,
    "argnums=2, but loss_of has the arguments model, x",
)
def unknown_argnum(lib: Library) -> Any:
    return lib.grad(loss_of, argnums=2)(Model(), X)


class RefModel(nnx.Module):
    """A model whose Variables hold references."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((8, 4)), ref=True)


def add_one(model: RefModel) -> None:
    model.w[...] += 1


@mistake(
    "committed-to-another-sharding",
    "a reference with a sharding other than declared",
    ValueError,
    "model.w, shape (8, 4): is SingleDeviceSharding",
    "declared P('data',)",
    "cannot be resharded",
)
def ref_sharding(lib: Library) -> Any:
    return lib.jit(add_one, in_shardings=(named("data"),))(RefModel())


@mistake(
    "different-devices",
    "a reference on other devices than the mesh of `shard_map`",
    ValueError,
    "model.w: cpu 0",
)
def ref_devices(lib: Library) -> Any:
    f = lib.shard_map(add_one, mesh=grid(), in_specs=(P("data"),), out_specs=P())
    return f(RefModel())


@mistake(
    "static-argument-that-is-not-hashable",
    "a static argument that is not hashable",
    ValueError,
    "'sizes'",
    "list",
    "a tuple instead of a list",
)
def unhashable(lib: Library) -> Any:
    return lib.jit(lambda m, x, sizes: m(x), static_argnums=2)(Model(), X, [1, 2])


@mistake(
    "static-argument-that-is-not-hashable",
    "an array as a static argument",
    ValueError,
    "argument 'x' of type ndarray",
    "for an array, leave its argument out of the static ones",
)
def unhashable_array(lib: Library) -> Any:
    return lib.jit(forward, static_argnums=1)(Model(), X)


@mistake(
    "static-argument-with-arrays",
    "a module as a static argument",
    Exception,
    "static values must not hold Variables or arrays",
    "model: Model with arrays",
    "Pass them as ordinary arguments",
)
def static_module(lib: Library) -> Any:
    model = Model()
    f = lib.jit(forward, static_argnums=0)
    f(model, X)
    model.blocks[0].up[...] *= 0
    assert not f(model, X).any(), "no error, but wrong numbers"


@mistake(
    "not-an-array",
    "a string in an argument",
    TypeError,
    "batch['names'][0]: 'a' of type str",
    "batch['names'][1]",
    "static_argnums",
)
def string_leaf(lib: Library) -> Any:
    return lib.jit(lambda m, batch: m(batch["x"]))(Model(), {"x": X, "names": ["a", "b"]})


@mistake(
    "not-an-array", "a result that is not an array", TypeError, "output['name']: 'a' of type str"
)
def string_result(lib: Library) -> Any:
    return lib.jit(lambda m, x: {"y": m(x), "name": "a"})(Model(), X)


def compiled(lib: Library) -> Any:
    model = Model()
    return model, lib.jit(many, static_argnums=2).lower(model, X, True).compile()


@mistake(
    "compiled-for-other-types",
    "another shape",
    TypeError,
    "x: is float32[4,4], compiled for float32[8,4]",
)
def compiled_shape(lib: Library) -> Any:
    model, f = compiled(lib)
    return f(model, X[:4])


@mistake(
    "compiled-for-other-types",
    "another dtype",
    TypeError,
    "model.blocks[0].up: is bfloat16[4,16], compiled for float32[4,16]",
)
def compiled_dtype(lib: Library) -> Any:
    model, f = compiled(lib)
    model.blocks[0].up.set_value(model.blocks[0].up[...].astype(jnp.bfloat16))
    return f(model, X)


@mistake(
    "compiled-for-another-structure",
    "another structure",
    TypeError,
    "model.blocks[1].scale: missing → 3",
)
def compiled_structure(lib: Library) -> Any:
    model, f = compiled(lib)
    model.blocks[1].scale = 3
    return f(model, X)


@mistake(
    "compiled-for-another-structure",
    "an optimizer whose transformation is made anew",
    TypeError,
    "optimizer.tx.init is a new object",
    "create it once, outside of the loop or of the function that makes the model",
)
def compiled_transformation(lib: Library) -> Any:
    def make() -> tuple[Model, nnx.Optimizer[Any]]:
        model = Model()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    step = lib.jit(lambda model, optimizer: optimizer.step.get_value())
    return step.lower(*make()).compile()(*make())


@mistake(
    "compiled-for-another-structure",
    "another static argument",
    TypeError,
    "static argument flag: True → False",
)
def compiled_static(lib: Library) -> Any:
    model, f = compiled(lib)
    return f(model, X, False)


@mistake(
    "compiled-for-another-structure",
    "another number of arguments",
    TypeError,
    "(model, x, flag) → (model, x, flag, more[0])",
)
def compiled_arguments(lib: Library) -> Any:
    model, f = compiled(lib)
    return f(model, X, True, X)


@mistake(
    "compiled-for-other-shardings",
    "an array with another sharding",
    ValueError,
    "x, float32[8,4]: is P('data',), compiled for",
    "jax.ShapeDtypeStruct(..., sharding=...)",
)
def compiled_sharding(lib: Library) -> Any:
    model, specs = Model(), named()
    f = lib.jit(forward, in_shardings=(specs, None)).lower(model, jnp.ones((8, 4))).compile()
    return f(model, jax.device_put(X, named("data")))


@mistake(
    "abstract-arguments",
    "an abstract model in a call",
    TypeError,
    "model.up, float32[4,16]",
    "Pass them to lower or eval_shape",
)
def abstract_arguments(lib: Library) -> Any:
    return lib.jit(forward)(nnx.eval_shape(Block), X)


@mistake(
    "abstract-arguments",
    "a model that was loaded without its random streams",
    TypeError,
    "model.layers[0].rngs.count, uint32[]\n",
    "by nnx.update(model, nnx.state(make(), nnx.RngState))",
)
def abstract_streams(lib: Library) -> Any:
    model = nnx.Dict(layers=nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(0))]), up=nnx.Param(X))
    streams = nnx.eval_shape(lambda: nnx.state(nnx.clone(model), nnx.RngState))
    nnx.update(model, streams)
    return lib.jit(lambda model, x: model.layers[0](x))(model, X)


@mistake(
    "not-divisible",
    "an update with another shape",
    ValueError,
    "model.blocks[0].up, shape (4, 5) (was (4, 16)), P(None, 'model')",
    "size 5 is not divisible by 'model' (4)",
)
def changed_shape(lib: Library) -> Any:
    def shrink(model):
        model.blocks[0].up.set_value(model.blocks[0].up[...][:, :5])

    specs = lib.StateSharding({nnx.PathContains("up"): named(None, "model"), ...: named()})
    lib.jit(shrink, in_shardings=(specs,))(Model())


@mistake(
    "spec-too-long",
    "an update with another rank, in `jit`",
    ValueError,
    "model.blocks[0].up, shape (4,) (was (4, 16))",
    "2 entries",
    "1 dimension",
)
def changed_rank(lib: Library) -> Any:
    def shrink(model):
        model.blocks[0].up.set_value(model.blocks[0].up[...].sum(1))

    specs = lib.StateSharding({nnx.PathContains("up"): named(None, "model"), ...: named()})
    lib.jit(shrink, in_shardings=(specs,))(Model())


@mistake(
    "spec-too-long",
    "an update with another rank, in `shard_map`",
    ValueError,
    "model.blocks[0].up, shape (4,) (was (4, 4))",
    "2 entries",
)
def changed_rank_shards(lib: Library) -> Any:
    def shrink(model):
        model.blocks[0].up.set_value(model.blocks[0].up[...].sum(1))

    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
    lib.shard_map(shrink, mesh=grid(), in_specs=(specs,), out_specs=P())(Model())


@mistake(
    "output-that-jax-cannot-shard",
    "layers whose output JAX cannot shard on Explicit axes",
    ActivationError,
    "model.layers[1]: Linear of f32[8,16@model], f32[16@model,4], f32[4]",
    "Contracting dimensions are sharded",
    "activation_shardings={'^layers/1$': P()}",
    "auto_axes=True), with out_shardings",
)
def untyped_layers(lib: Library) -> Any:
    with jax.set_mesh(grid(AxisType.Explicit)):
        return lib.jit(lambda model, x: model(x))(layers_by_hand(), X)


def layers_by_hand() -> nnx.Sequential:
    """Two layers whose kernels (4, 16) and (16, 4) are sharded over `model`, without a strategy."""
    mesh, rngs = grid(AxisType.Explicit), nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs))
    for layer, spec in zip(model.layers, (P(None, "model"), P("model")), strict=True):
        kernel = jax.device_put(layer.kernel[...], NamedSharding(mesh, spec))
        layer.kernel = nnx.Param(kernel)
    return model


@mistake(
    "output-that-jax-cannot-shard",
    "layers of a model that the function captures",
    ActivationError,
    "Sequential.layers[1]: Linear of f32[8,16@model]",
    "The function captures or makes this Sequential",
    "pass it as one, with a strategy",
)
def untyped_captured(lib: Library) -> Any:
    model = layers_by_hand()
    with jax.set_mesh(grid(AxisType.Explicit)):
        return lib.jit(lambda x: model(x))(X)


@mistake(
    "output-that-jax-cannot-shard",
    "layers in a `shard_map` over the other axis",
    ActivationError,
    "shard_map(jit(f, activation_shardings={'^layers/1$': P()}), ...)",
)
def untyped_in_shard_map(lib: Library) -> Any:
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
    with jax.set_mesh(grid(AxisType.Explicit)):
        return lib.shard_map(lambda model, x: model(x), **specs)(layers_by_hand(), X)


@mistake(
    "operation-outside-of-modules",
    "an Optax loss of logits that are sharded over the classes",
    Exception,
    "The operation is outside of modules",
    "activation_shardings",
)
def untyped_loss(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    logits = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data", "model")))
    labels = jax.device_put(jnp.zeros(8, int), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        loss = optax.softmax_cross_entropy_with_integer_labels
        return lib.jit(lambda model, x, y: loss(x, y))(Model(), logits, labels)


@mistake(
    "operation-outside-of-modules",
    "sharded rows that are written into a replicated array",
    ValueError,
    "input type=float32[8@data,4] and requested type=float32[8,4]",
    "The operation is outside of modules",
    "give the operation an out_sharding",
)
def untyped_update(lib: Library) -> Any:
    return on_explicit_axes(lib, lambda model, x: jnp.zeros((8, 6)).at[:, :4].set(x))


@mistake(
    "output-that-jax-cannot-shard",
    "sharded rows that a module writes into a replicated array",
    ActivationError,
    "model: Padded of f32[8@data,4]",
    "activation_shardings={'^$': P('data',)}",
)
def untyped_update_in_module(lib: Library) -> Any:
    class Padded(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.zeros((8, 6)).at[:, :4].set(x)

    shardings = P(), P("data")
    return lib.jit(forward, mesh=grid(AxisType.Explicit), in_shardings=shardings)(Padded(), X)


class Head(nnx.Module):
    """A layer that is called by another method than ``__call__``."""

    def __init__(self) -> None:
        self.up = nnx.Linear(4, 16, rngs=nnx.Rngs(0))

    def logits(self, x: jax.Array) -> jax.Array:
        return self.up(x)


@mistake(
    "gathered-output",
    "logits of another method than `__call__`",
    UnshardedWarning,
    "activation_shardings={Head: InOutSharding(P('data',), method='logits')}",
)
def gathered_logits_of_method(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    shardings = nnx_sharding.tensor_parallel(Head(), mesh=mesh), P("data")
    f = lib.jit(lambda model, x: model.logits(x).max(), mesh=mesh, in_shardings=shardings)
    return f(Head(), X)


@mistake(
    "gathered-output",
    "a loss outside of a model whose logits are sharded over the classes",
    UnshardedWarning,
    "model: f32[8@data,16], 512 B, over 'model'",
    "method of the model",
)
def gathered_logits(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    model = nnx.Linear(4, 16, rngs=nnx.Rngs(0))
    shardings = nnx_sharding.tensor_parallel(model, mesh=mesh), P("data"), P("data")

    def loss(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    return lib.jit(loss, mesh=mesh, in_shardings=shardings)(model, X, np.zeros(8, int))


@mistake(
    "gathered-result",
    "logits that are returned without a declared sharding",
    UnshardedWarning,
    "model: f32[8@data,16], 512 B, over 'model': write P('data', 'model')",
    "Declare them in out_shardings",
    "If the first has to be whole, write P('data',).",
)
def gathered_result(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    model = nnx.Linear(4, 16, rngs=nnx.Rngs(0))
    shardings = nnx_sharding.tensor_parallel(model, mesh=mesh), P("data")
    return lib.jit(lambda model, x: model(x), mesh=mesh, in_shardings=shardings)(model, X)


class Prefill(nnx.Module):
    def __init__(self) -> None:
        self.k_proj = nnx.Linear(4, 16, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.k_proj(x).reshape(*x.shape[:2], 4, 4)


@mistake(
    "gathered-cache",
    "a cache that a model makes itself, as in a prefill, and that the function uses",
    UnshardedWarning,
    "model.__call__: f32[8@data,2,4,4], 1.00 KiB, over 'model', at ",
    "write P('data', None, 'model')",
    "activation_shardings={'^$': InOutSharding(specs, method='__call__')}",
)
def gathered_cache(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    model, x = Prefill(), np.zeros((8, 2, 4), np.float32)
    shardings = nnx_sharding.tensor_parallel(model, mesh=mesh), P("data")
    return lib.jit(lambda model, x: model(x)[:, :1], mesh=mesh, in_shardings=shardings)(model, x)


class Constrained(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * self.scale[...], P("data"))


@mistake(
    "constraint-on-explicit-axes",
    "with_sharding_constraint over an axis that is Explicit",
    ActivationError,
    "model passes P('data',) to with_sharding_constraint",
    "jax.sharding.reshard",
    "InOutSharding(axis_types=AxisType.Auto)",
)
def constraint_on_explicit_axes(lib: Library) -> Any:
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Explicit, AxisType.Auto))
    shardings = P(), P("data")
    return lib.jit(forward, mesh=mesh, in_shardings=shardings)(Constrained(), X)


class ConstrainedByMesh(Constrained):
    def __call__(self, x: jax.Array) -> jax.Array:
        sharding = NamedSharding(grid(AxisType.Explicit), P("data"))
        return jax.lax.with_sharding_constraint(x * self.scale[...], sharding)


@mistake(
    "constraint-on-explicit-axes",
    "a NamedSharding of the Explicit mesh in a module of a strategy",
    ValueError,
    "model runs with Auto axes",
    "Pass its spec alone, P('data',), to with_sharding_constraint",
    "nnx_sharding.with_sharding_constraint",
)
def constraint_by_mesh(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    shardings = nnx_sharding.fsdp(ConstrainedByMesh(), mesh=mesh, min_size=0), P("data")
    return lib.jit(forward, mesh=mesh, in_shardings=shardings)(ConstrainedByMesh(), X)


@mistake(
    "unused-filter-for-activations",
    "a filter for modules that run by another method",
    ActivationError,
    "Head: its modules ran by 'logits': write {Head: InOutSharding(P('data',), method='logits')}",
)
def unused_method_filter(lib: Library) -> Any:
    f = lib.jit(lambda model, x: model.logits(x), activation_shardings={Head: P("data")})
    return f(Head(), X)


@mistake(
    "unused-filter-for-activations",
    "filters for activations that match no called module",
    ActivationError,
    "'blocks/*/upp'. For globs, pass PathGlob('blocks/*/upp')",
    "strict=False",
)
def unused_activation_filter(lib: Library) -> Any:
    chosen = {"blocks/*/upp": P("data")}
    return lib.jit(forward, mesh=grid(), activation_shardings=chosen)(Model(), X)


@mistake(
    "activation-specs-that-do-not-fit",
    "specs that do not fit what a module returns",
    ActivationError,
    "output of model.blocks[0], shape (8, 4), P('data', None, 'model')",
    "output of model.blocks[1], shape (8, 4), P('data', None, 'model')",
    "3 entries",
)
def unfitting_activations(lib: Library) -> Any:
    chosen = {r"blocks/\d$": P("data", None, "model")}
    return lib.jit(forward, mesh=grid(), activation_shardings=chosen)(Model(), X)


@mistake(
    "arguments-in-host-memory",
    "an array in host memory is used without `fetched`",
    ValueError,
    "optimizer.opt_state[0].trace['blocks'][0]['down'], float32",
    "fetched(optimizer)",
)
def forgotten_fetch(lib: Library) -> Any:
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    on_host = NamedSharding(grid(), P(), memory_kind="pinned_host")
    offloaded = lib.StateSharding({nnx.PathContains("trace"): on_host, ...: None})

    def step(model, optimizer):
        optimizer.update(model, nnx.state(model, nnx.Param))

    return lib.jit(step, in_shardings=(None, offloaded))(model, optimizer)


@mistake(
    "cached-programs-for-several-cpu-devices",
    "JAX's persistent compilation cache is on for several CPU devices",
    ShardingWarning,
    "for 8 CPU devices",
    "hang, crash or return wrong numbers",
    "jax.config.update('jax_enable_compilation_cache', False)",
)
def cache_on_several_devices(lib: Library) -> Any:
    with configurations.with_cache(), mock.patch.object(CacheNotice, "is_due", True):
        return lib.jit(forward, in_shardings=(None, NamedSharding(grid(), P("data"))))(Model(), X)


class Layers(nnx.Module):
    """A ``Stack``, a parameter for its further argument, and how it is called."""

    def __init__(self, call: Callable[..., Any]):
        self.blocks = stack(Scaled, 4)
        self.scale = nnx.Param(jnp.ones(4))
        self.call = call

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(self, x)


class Scaled(Block):
    """A block with a further argument."""

    def __call__(self, x: jax.Array, scale: Any = 1) -> jax.Array:
        self.count[...] += 1
        return super().__call__(x) * scale


def in_turn(lib: Library, call: Callable[..., Any], transform: Any = None) -> Any:
    """Runs a step of a model on four stages with 1F1B."""
    model, mesh = Layers(call), grid(names=("data", "stage"))
    sharding = pipeline(model, mesh=mesh, microbatches=4, schedule="1f1b")
    transform = transform or functools.partial(accumulate_gradients, steps=4)
    gradient = transform(lambda model, x: (model(x) ** 2).mean())
    step = lib.jit(lambda *args: gradient(*args), mesh=mesh, in_shardings=(sharding, P("data")))
    return step(model, X)


@mistake(
    "gradient-outside-of-the-schedule",
    '`value_and_grad` of a pipeline with `schedule="1f1b"`',
    ValueError,
    'schedule="1f1b" has gradients only in accumulate_gradients',
    "accumulate_gradients(loss, steps=4)",
)
def gradient_outside_of_the_schedule(lib: Library) -> Any:
    return in_turn(lib, lambda model, x: model.blocks(x), value_and_grad)


INTERLEAVED = {
    "layers_called_twice": ("calls its layers twice", "more than once"),
    "layers_in_jit": ("calls its layers in `jit`", "another transform, such as jit", "remat=True"),
    "layers_not_called": ("does not call its layers", "does not call the layers"),
    "counter_of_layers_read": ("reads what layers write", "is used outside of them", "x, y ="),
    "rows_from_parameters": ("gives layers rows of parameters", "microbatch and on parameters"),
    "layers_from_rows": ("changes parameters by rows", "parameters of layers depend on the micro"),
    "callback_that_returns": ("has an `io_callback`", "that returns something", "pure_callback"),
    "printed_counter": ("prints what layers write", "a callback, such as jax.debug.print, reads"),
    "new_attribute": ("adds an attribute to the model", "changes the structure", "has_aux=True"),
}


def cannot_be_interleaved(run: Callable[[Any, jax.Array], Any]) -> Any:
    """Registers a loss that 1F1B refuses, by the name of how the model calls its layers."""
    title, *facts = INTERLEAVED[run.__name__]
    add = mistake(
        "loss-that-cannot-be-interleaved", f"a loss with 1F1B {title}", ValueError, *facts
    )

    def step(lib: Library) -> Any:
        return in_turn(lib, run)

    step.__name__ = run.__name__
    return add(step)


@cannot_be_interleaved
def layers_called_twice(model: Layers, x: jax.Array) -> jax.Array:
    return model.blocks(model.blocks(x))


@cannot_be_interleaved
def layers_in_jit(model: Layers, x: jax.Array) -> jax.Array:
    return nnx_sharding.jit(lambda model, x: model.blocks(x))(model, x)


@cannot_be_interleaved
def layers_not_called(model: Layers, x: jax.Array) -> jax.Array:
    return x * model.scale[...]


@cannot_be_interleaved
def counter_of_layers_read(model: Layers, x: jax.Array) -> jax.Array:
    return model.blocks(x) * model.blocks.layers.count.sum()


@cannot_be_interleaved
def rows_from_parameters(model: Layers, x: jax.Array) -> jax.Array:
    return model.blocks(x, scale=x * model.scale[...])


@cannot_be_interleaved
def layers_from_rows(model: Layers, x: jax.Array) -> jax.Array:
    up = model.blocks.layers.up
    up[...] = up[...] * x.mean()
    return model.blocks(x)


@cannot_be_interleaved
def callback_that_returns(model: Layers, x: jax.Array) -> jax.Array:
    return model.blocks(io_callback(lambda x: x, jax.typeof(x), x))


@cannot_be_interleaved
def printed_counter(model: Layers, x: jax.Array) -> jax.Array:
    x = model.blocks(x)
    jax.debug.print("{}", model.blocks.layers.count.sum())
    return x


@cannot_be_interleaved
def new_attribute(model: Layers, x: jax.Array) -> jax.Array:
    model.seen = nnx.BatchStat(x)
    return model.blocks(x)


def message_of(run: Callable[[Library], Any], lib: Library) -> str:
    """The error of a library about a mistake, or else its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            run(lib)
        except BaseException as error:
            notes = getattr(error, "__notes__", ())
            notes = [
                x for x in notes if "JAX_TRACEBACK" not in x and "nnx-sharding explain" not in x
            ]
            text = "\n".join([f"{type(error).__name__}: {error}", *notes])
        else:
            text = "\n".join(f"{w.category.__name__}: {w.message}" for w in seen)
    text = re.sub(r"mistakes\.py:\d+", "serve.py:24", text)  # else a new row changes the page
    return re.sub(r" at 0x[0-9a-f]+| with id=\d+| at /\S+|/\S+/site-packages/", "", text)


def headline(message: str) -> str:
    """The first sentence of a message, or its first line: what the page shows of it."""
    return message.splitlines()[0].split(". ")[0]


# A section of the page: its heading, and the block that shows its message.
SECTION = re.compile(r"^(### (.+)\n\n)```text\n(.*)\n```$", re.MULTILINE)


def anchor_of(heading: str) -> str:
    """The anchor that Sphinx makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def with_message(section: re.Match[str]) -> str:
    """A section that shows our message about its first mistake; unchanged if it has none."""
    anchor = anchor_of(section[2])
    case = next((case for case in MISTAKES.values() if case.anchor == anchor), None)
    if case is None:
        return section[0]
    with contextlib.redirect_stdout(io.StringIO()):  # JAX prints some objects
        ours = message_of(case.run, nnx_sharding)
    return f"{section[1]}```text\n{headline(ours)}\n```"


def main() -> None:
    """Writes the first lines of messages into the page, which has the rest of each section."""
    import conftest  # noqa: F401  eight virtual devices; under pytest it is there already

    PAGE.write_text(SECTION.sub(with_message, PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
