"""Mistakes that users make, each as a program that runs with ``flax.nnx`` and with us.

``python tests/mistakes.py`` prints what either says, as the table in the documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding

Library = Any


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
      number: the group that it belongs to.
      title: what is wrong, for a reader.
      run: makes the mistake with a library.
      error: the type of our error.
      facts: what our message has to say.
    """

    number: int
    title: str
    run: Callable[[Library], Any]
    error: type[BaseException]
    facts: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}


def mistake(number: int, title: str, error: type[BaseException], *facts: str) -> Any:
    def register(run: Callable[[Library], Any]) -> Callable[[Library], Any]:
        MISTAKES[run.__name__] = Mistake(number, title, run, error, facts)
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


def forward(model: Model, x: jax.Array) -> jax.Array:
    return model(x)


X = np.ones((8, 4), np.float32)


def named(*spec: Any, mesh: Mesh | None = None) -> NamedSharding:
    return NamedSharding(mesh or grid(), P(*spec))


# 1


@mistake(1, "no filter matches some Variables", ValueError)
def unmatched(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): named(None, "model")})
    return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


# 2


@mistake(2, "dimensions that the mesh axes do not divide, in `jit`", ValueError)
def indivisible(lib: Library) -> Any:
    specs = lib.StateSharding({"up": named(None, ("data", "model")), nnx.PathContains("up"): named(None, ("data", "model")), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(Model(12), X)


@mistake(2, "the same in `shard_map`", ValueError)
def indivisible_shards(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
    f = lib.shard_map(forward, mesh=grid(), in_specs=(specs, P("data")), out_specs=P("data"))
    return f(Model(10), X)


@mistake(2, "a batch that the mesh axis does not divide, in `jit`", ValueError)
def indivisible_batch(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, named("data")))(Model(), X[:7])


@mistake(2, "the same in `shard_map`", ValueError)
def indivisible_batch_shards(lib: Library) -> Any:
    f = lib.shard_map(forward, mesh=grid(), in_specs=(P(), P("data")), out_specs=P("data"))
    return f(Model(), X[:7])


@mistake(2, "a result that the mesh axis does not divide", ValueError)
def indivisible_result(lib: Library) -> Any:
    return lib.jit(forward, out_shardings=named("data"))(Model(), X[:7])


# 3


@mistake(3, "a spec longer than the rank", ValueError)
def too_long(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): named(None, None, "model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(3, "the same in `shard_map`", ValueError)
def too_long_shards(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, None, "model"), ...: P()})
    return lib.shard_map(forward, mesh=grid(), in_specs=(specs, P()), out_specs=P())(Model(), X)


@mistake(3, "an axis that the mesh does not have, in `jit`", ValueError)
def no_axis(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "modle"), ...: P()})
    with jax.set_mesh(grid()):
        return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(3, "the same in `shard_map`", ValueError)
def no_axis_shards(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "modle"), ...: P()})
    return lib.shard_map(forward, mesh=grid(), in_specs=(specs, P()), out_specs=P())(Model(), X)


@mistake(3, "one axis used twice", ValueError)
def axis_twice(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): P("model", "model"), ...: P()})
    with jax.set_mesh(grid()):
        return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(3, "a spec that cuts a scalar", ValueError)
def scalar(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.BatchStat: named("model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


# 4


@mistake(4, "a string where a spec belongs", TypeError)
def bare_string(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, "data"))(Model(), X)


@mistake(4, "a tuple of names where a spec belongs", TypeError)
def bare_tuple(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, ("data", None)))(Model(), X)


@mistake(4, "the same in a `StateSharding`", TypeError)
def bare_in_filters(lib: Library) -> Any:
    specs = lib.StateSharding({nnx.PathContains("up"): (None, "model"), ...: P()})
    with jax.set_mesh(grid()):
        return lib.jit(forward, in_shardings=(specs, None))(Model(), X)


@mistake(4, "specs with other keys than the argument", ValueError)
def wrong_keys(lib: Library) -> Any:
    batch = {"x": X, "mask": X, "y": X}
    specs = {"x": named("data"), "masks": named("data"), "y": named("data")}
    return lib.jit(lambda m, b: m(b["x"]), in_shardings=(None, specs))(Model(), batch)


@mistake(4, "the same for a nested result", ValueError)
def wrong_result(lib: Library) -> Any:
    f = lib.jit(lambda m, x: (m(x), {"a": x}), out_shardings=(None, {"a": None, "b": None}))
    return f(Model(), X)


# 5


def many(model: Model, x: jax.Array, flag: bool, *more: jax.Array) -> jax.Array:
    return model(x) if flag else x


@mistake(5, "too few specs", ValueError)
def few_specs(lib: Library) -> Any:
    return lib.jit(many, in_shardings=(None, None), static_argnums=2)(Model(), X, True, X)


@mistake(5, "too many specs", ValueError)
def many_specs(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, None, named(), named()))(Model(), X)


@mistake(5, "a spec for a static argument", ValueError)
def static_spec(lib: Library) -> Any:
    f = lib.jit(many, in_shardings=(None, None, named("data")), static_argnums=2)
    return f(Model(), X, True)


@mistake(5, "too few specs in `shard_map`", ValueError)
def few_specs_shards(lib: Library) -> Any:
    return lib.shard_map(forward, mesh=grid(), in_specs=(P(),), out_specs=P())(Model(), X)


# 6


@mistake(6, "no mesh for a `PartitionSpec`", ValueError)
def no_mesh(lib: Library) -> Any:
    return lib.jit(forward, in_shardings=(None, P("data")))(Model(), X)


@mistake(6, "two meshes", ValueError)
def two_meshes(lib: Library) -> Any:
    other = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"))
    specs = (named(), named("data", mesh=other))
    return lib.jit(forward, in_shardings=specs)(Model(), X)


@mistake(6, "devices that do not match", ValueError)
def other_devices(lib: Library) -> Any:
    half = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(X, NamedSharding(half, P("data")))
    return lib.jit(forward, in_shardings=(named(), None))(Model(), x)


@mistake(6, "a Variable on other devices", ValueError)
def other_devices_variable(lib: Library) -> Any:
    model = Model()
    half = Mesh(np.array(jax.devices()[:4]), ("data",))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(half, P())))
    return lib.jit(forward, in_shardings=(None, named("data")))(model, X)


# 7


@mistake(7, "one Variable with two shardings", ValueError)
def aliased(lib: Library) -> Any:
    model = Model()
    f = lib.jit(lambda m, kernel, x: m(x), in_shardings=(named(), named("model"), None))
    return f(model, model.blocks[1].up, X)


# 8


@mistake(8, "a committed array laid out otherwise than declared", ValueError)
def committed(lib: Library) -> Any:
    model = Model()
    nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), named("model")))
    specs = lib.StateSharding({nnx.Param: named(None, "model"), ...: named()})
    return lib.jit(forward, in_shardings=(specs, None))(model, X)


@mistake(8, "the same for an array", ValueError)
def committed_array(lib: Library) -> Any:
    x = jax.device_put(X, named("model"))
    return lib.jit(forward, in_shardings=(None, named("data")))(Model(), x)


# 9


@mistake(9, "a spec that differs from the type of an explicit array", ValueError)
def explicit(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("model")))
    with jax.set_mesh(mesh):
        return lib.jit(forward, in_shardings=(None, P("data")))(Model(), x)


@mistake(9, "the same in `shard_map`", ValueError)
def explicit_shards(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(mesh, P("model")))
    with jax.set_mesh(mesh):
        f = lib.shard_map(forward, in_specs=(P(), P("data")), out_specs=P("data"))
        return f(Model(), x)


# 10


@mistake(10, "a result whose replication cannot be proved", ValueError)
def unproved(lib: Library) -> Any:
    def loss(model, x):
        return {"loss": (model(x) ** 2).mean(), "n": jnp.ones(())}

    f = lib.shard_map(loss, mesh=grid(), in_specs=(P(), P("data")), out_specs=P())
    return f(Model(), X)


@mistake(10, "an updated Variable whose replication cannot be proved", ValueError)
def unproved_update(lib: Library) -> Any:
    def count(model, x):
        model.blocks[0].count[...] += x.sum()

    lib.shard_map(count, mesh=grid(), in_specs=(P(), P("data")), out_specs=P())(Model(), X)


# 11


@mistake(11, "a sharded array captured by a closure, on other devices", ValueError)
def captured(lib: Library) -> Any:
    half = Mesh(np.array(jax.devices()[:4]), ("data",))
    table = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(half, P("data")))

    def look_up(model, x):
        return model(x) @ table

    return lib.jit(look_up, in_shardings=(named(), named("data")))(Model(), X)


@mistake(11, "the same in `shard_map`", Exception)
def captured_shards(lib: Library) -> Any:
    table = jax.device_put(np.ones((4, 4), np.float32), named("model"))

    def look_up(model, x):
        return model(x) @ table

    return lib.shard_map(look_up, mesh=grid(), in_specs=(P(), P("data")), out_specs=P("data"))(Model(), X)


@mistake(11, "the same on an explicit mesh", Exception)
def captured_explicit(lib: Library) -> Any:
    mesh = grid(AxisType.Explicit)
    with jax.set_mesh(mesh):
        table = jax.device_put(np.ones((4, 4), np.float32), P("model"))

        def look_up(model, x):
            return model(x) @ table

        return lib.shard_map(look_up, in_specs=(P(), P("data")), out_specs=P("data"))(Model(), X)


# 12


@mistake(12, "one array donated twice", Exception)
def donated_twice(lib: Library) -> Any:
    x = jnp.ones((8, 4))
    return lib.jit(lambda m, a, b: (a + 1, b + 1), donate_argnums=(1, 2))(Model(), x, x)


@mistake(12, "a donated array used later", RuntimeError)
def donated_before(lib: Library) -> Any:
    x = jnp.ones((8, 4))
    f = lib.jit(lambda m, x: x + 1, donate_argnums=1)
    f(Model(), x)
    return f(Model(), x)


@mistake(12, "a Variable that was donated elsewhere", RuntimeError)
def donated_variable(lib: Library) -> Any:
    model = Model()
    jax.jit(lambda x: x + 1, donate_argnums=0)(model.blocks[1].up[...])
    return lib.jit(forward)(model, X)


# 13


@mistake(13, "a module of an outer trace is changed", Exception)
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


@mistake(13, "a module captured by the closure is changed", Exception)
def captured_change(lib: Library) -> Any:
    model = Model()

    @lib.jit
    def f(x):
        model.blocks[0].count[...] += 1
        return model(x)

    return f(X)


@mistake(13, "one reference passed twice", ValueError)
def ref_twice(lib: Library) -> Any:
    ref = jax.new_ref(jnp.zeros(()))
    return lib.jit(lambda m, a, b: a[...] + b[...])(Model(), ref, ref)


@mistake(13, "a reference returned from `shard_map`", Exception)
def ref_returned(lib: Library) -> Any:
    f = lib.jit(lambda x: jax.lax.scan(lambda c, r: (c, r), x, jax.new_ref(x)))
    return f(X)


# 14


@mistake(14, "a static argument that is not hashable", ValueError)
def unhashable(lib: Library) -> Any:
    return lib.jit(lambda m, x, sizes: m(x), static_argnums=2)(Model(), X, [1, 2])


@mistake(14, "a module as a static argument", Exception)
def static_module(lib: Library) -> Any:
    model = Model()
    f = lib.jit(forward, static_argnums=0)
    f(model, X)
    model.blocks[0].up[...] *= 0
    assert not f(model, X).any(), "no error, but wrong numbers"


@mistake(14, "a string where an array is needed", TypeError)
def string_leaf(lib: Library) -> Any:
    return lib.jit(lambda m, batch: m(batch["x"]))(Model(), {"x": X, "names": ["a", "b"]})


@mistake(14, "a result that is no array", TypeError)
def string_result(lib: Library) -> Any:
    return lib.jit(lambda m, x: {"y": m(x), "name": "a"})(Model(), X)


# 15


def compiled(lib: Library) -> Any:
    model = Model()
    return model, lib.jit(many, static_argnums=2).lower(model, X, True).compile()


@mistake(15, "`Compiled` called with another shape", TypeError)
def compiled_shape(lib: Library) -> Any:
    model, f = compiled(lib)
    return f(model, X[:4])


@mistake(15, "with another dtype", TypeError)
def compiled_dtype(lib: Library) -> Any:
    model, f = compiled(lib)
    model.blocks[0].up.set_value(model.blocks[0].up[...].astype(jnp.bfloat16))
    return f(model, X)


@mistake(15, "with another structure", TypeError)
def compiled_structure(lib: Library) -> Any:
    model, f = compiled(lib)
    model.blocks[1].scale = 3
    return f(model, X)


@mistake(15, "with another static argument", TypeError)
def compiled_static(lib: Library) -> Any:
    model, f = compiled(lib)
    return f(model, X, False)


@mistake(15, "with other arguments", TypeError)
def compiled_arguments(lib: Library) -> Any:
    model, f = compiled(lib)
    return f(model, X, True, X)


# 16


@mistake(16, "an update of a shape that does not fit the sharding of its Variable", ValueError)
def changed_shape(lib: Library) -> Any:
    def shrink(model):
        model.blocks[0].up.set_value(model.blocks[0].up[...][:, :5])

    specs = lib.StateSharding({nnx.PathContains("up"): named(None, "model"), ...: named()})
    lib.jit(shrink, in_shardings=(specs,))(Model())


@mistake(16, "an update of another rank", ValueError)
def changed_rank(lib: Library) -> Any:
    def shrink(model):
        model.blocks[0].up.set_value(model.blocks[0].up[...].sum(1))

    specs = lib.StateSharding({nnx.PathContains("up"): named(None, "model"), ...: named()})
    lib.jit(shrink, in_shardings=(specs,))(Model())


@mistake(16, "the same in `shard_map`", ValueError)
def changed_rank_shards(lib: Library) -> Any:
    def shrink(model):
        model.blocks[0].up.set_value(model.blocks[0].up[...].sum(1))

    specs = lib.StateSharding({nnx.PathContains("up"): P(None, "model"), ...: P()})
    lib.shard_map(shrink, mesh=grid(), in_specs=(specs,), out_specs=P())(Model())


def said(run: Callable[[Library], Any], lib: Library) -> str:
    """What a library says about a mistake."""
    try:
        run(lib)
    except BaseException as error:
        notes = "".join(f"\n  [note] {note}" for note in getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error}{notes}"
    return "(nothing)"


def main() -> None:
    for name, own in MISTAKES.items():
        print(f"=== {own.number} {name}: {own.title}")
        for title, lib in (("nnx", nnx), ("ours", nnx_sharding)):
            print(f"--- {title}\n{said(own.run, lib)[:1500]}")


if __name__ == "__main__":
    main()
