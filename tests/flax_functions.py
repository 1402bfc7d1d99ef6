"""The functions of Flax that take and change models, each in a program of a model and a row.

A test runs them within our transforms, and as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    """A layer, a counter, and random numbers that may be switched off."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.float32(0))
        self.rngs = nnx.Rngs(noise=1)
        self.deterministic = False

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        noise = 0 if self.deterministic else jax.random.normal(self.rngs.noise(), x.shape)
        return jnp.sum(self.linear(x) + noise) * self.calls[...]


PROGRAMS: dict[str, Callable[[Model, jax.Array], Any]] = {}


def program(*names: str) -> Any:
    """A program that calls these functions."""

    def register(function: Callable[[Model, jax.Array], Any]) -> Any:
        PROGRAMS[" ".join(names)] = function
        return function

    return register


@program("split_rngs")
def splits(m: Model, x: jax.Array) -> Any:
    with nnx.split_rngs(m, splits=2):
        count = m.rngs.noise.count.size
    return m(x) * count


@program("restore_rngs", "compat.backup_keys")
def restores(m: Model, x: jax.Array) -> Any:
    backups = nnx.split_rngs(m, splits=2)
    count = m.rngs.noise.count.size
    nnx.restore_rngs(backups)
    backups = nnx.compat.backup_keys(m)
    y = m(x) * count
    nnx.restore_rngs(backups)
    return y + m(x)


@program("fork_rngs")
def forks(m: Model, x: jax.Array) -> Any:
    with nnx.fork_rngs(m):
        y = m(x)
    return y + m(x)


@program("with_rngs")
def forked(m: Model, x: jax.Array) -> Any:
    other = nnx.with_rngs(m, fork=..., graph=False, graph_updates=False)
    return other(x) + m(x)


@program("reseed")
def reseeds(m: Model, x: jax.Array) -> Any:
    nnx.reseed(m, noise=3)
    return m(x)


@program("map", "recursive_map")
def maps(m: Model, x: jax.Array) -> Any:
    doubled = nnx.map(lambda path, x: x * 2 if "kernel" in path else x, m)
    return doubled(x) + nnx.recursive_map(lambda path, x: x, m)(x)


@program("call")
def calls(m: Model, x: jax.Array) -> Any:
    y, (_, state) = nnx.call(nnx.split(m))(x)
    nnx.update(m, state)
    return y


@program("as_pure", "state", "variables")
def reads(m: Model, x: jax.Array) -> Any:
    weights = nnx.as_pure(nnx.state(m, nnx.Param)), nnx.as_pure(nnx.variables(m, nnx.Param))
    return m(x) + sum(jnp.sum(array) for array in jax.tree.leaves(weights))


@program("split", "merge", "graphdef", "update")
def splits_and_merges(m: Model, x: jax.Array) -> Any:
    _, state = nnx.split(m)
    other = nnx.merge(nnx.graphdef(m), state)
    y = other(x)
    nnx.update(m, nnx.state(other))
    return y


@program("flatten", "unflatten", "unpack", "GraphState", "clone")
def copies(m: Model, x: jax.Array) -> Any:
    others = nnx.unflatten(*nnx.flatten(m)), nnx.clone(m), nnx.merge(nnx.unpack(m))
    return sum(other(x) for other in others)


@program("pop")
def pops(m: Model, x: jax.Array) -> Any:
    m.cache = nnx.Cache(m(x))
    return sum(jax.tree.leaves(nnx.pop(m, nnx.Cache)))


@program("iter_graph", "iter_modules", "iter_children", "iter_module_children", "find_duplicates")
def walks(m: Model, x: jax.Array) -> Any:
    children = nnx.iter_children(m), nnx.iter_module_children(m)
    found = nnx.iter_graph(m), nnx.iter_modules(m), nnx.find_duplicates(m), *children
    return m(x) * sum(len([*each]) for each in found)


@program("view", "view_info", "with_attributes")
def views(m: Model, x: jax.Array) -> Any:
    assert "deterministic" not in nnx.view_info(m)
    other = nnx.view(m) if m.deterministic else nnx.with_attributes(m, deterministic=True)
    return other(x) + m(x)


@program("set_metadata")
def notes(m: Model, x: jax.Array) -> Any:
    other = nnx.clone(m)  # a branch that changed metadata of its argument would differ from others
    nnx.set_metadata(other, only=nnx.BatchStat, note="seen")
    return other(x) * len(other.calls.get_metadata("note"))


@program("capture")
def captures(m: Model, x: jax.Array) -> Any:
    y, _ = nnx.capture(m, nnx.Intermediate)(x)
    return y


@program("prefix")
def prefixes(m: Model, x: jax.Array) -> Any:
    axes = nnx.prefix(m, {nnx.Param: 1, ...: 2})
    return m(x) * sum(jax.tree.leaves(axes))


@program("to_tree", "from_tree")
def trees(m: Model, x: jax.Array) -> Any:
    other, x = nnx.from_tree(nnx.to_tree((m, x)))
    return other(x)


@program("split_context", "merge_context", "update_context", "current_update_context")
def contexts(m: Model, x: jax.Array) -> Any:
    with nnx.split_context() as splits:
        graphdef, state = splits.split(m)
    with nnx.merge_context() as merges:
        other = merges.merge(graphdef, state)
    with nnx.update_context("model"):
        nnx.current_update_context("model")
    return other(x)


@program("with_vars")
def other_variables(m: Model, x: jax.Array) -> Any:
    return nnx.with_vars(m, ref=True)(x)


@program("get_partition_spec", "get_named_sharding", "as_abstract")
def specs(m: Model, x: jax.Array) -> Any:
    state, mesh = nnx.state(m, nnx.Param), jax.make_mesh((1,), ("data",))
    found = nnx.get_partition_spec(state), nnx.get_named_sharding(state, mesh)
    found += (nnx.as_abstract(state),)
    return m(x) * sum(len(jax.tree.leaves(each)) for each in found)
