"""Runs the programs with any ``jit``, sharded or not."""

import collections
import functools
import types

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding.partition import (
    from_logical,
    from_rules,
    fsdp,
    optimizer_sharding,
    tensor_parallel,
)

STEPS = 5


def strategies(program, mesh):
    """Shardings for a model, or for what follows ``model``, such as its optimizer."""

    def by_shapes(tree, model=None):
        if model is None:
            return fsdp(tree, mesh=mesh, min_size=0)
        return fsdp(model, mesh=mesh, min_size=0, optimizer=tree)

    def by_layers(tree, model=None):
        if model is None:
            return tensor_parallel(tree, mesh=mesh)
        return tensor_parallel(model, mesh=mesh, optimizer=tree)

    def by_rules(tree, model=None):
        rules = from_rules(program.RULES, default=P())
        return rules if model is None else optimizer_sharding(tree, rules, model=model)

    def by_names(tree, model=None):
        if model is None:
            return from_logical(tree, program.LOGICAL, mesh=mesh)
        return optimizer_sharding(tree, by_names(model), model=model)

    found = {"fsdp": by_shapes, "tensor": by_layers, "rules": by_rules}
    return found | ({"logical": by_names} if hasattr(program, "LOGICAL") else {})


def shardings(program, strategy, objects):
    """The sharding of each object that ``train_step`` takes."""
    if hasattr(program, "shardings"):
        return program.shardings(strategy, *objects)
    model, optimizer = objects
    return strategy(model), strategy(optimizer, model)


def counting(jit, counts, functions):
    """``jit`` that counts the traces of each function, and keeps what it returns by name."""

    def count(fun, **options):
        inner = getattr(fun, "__func__", fun)

        @functools.wraps(inner)
        def traced(*args, **kwargs):
            counts[inner.__qualname__] += 1
            return inner(*args, **kwargs)

        bound = isinstance(fun, types.MethodType)
        compiled = jit(types.MethodType(traced, fun.__self__) if bound else traced, **options)
        functions[inner.__name__] = compiled
        return compiled

    return count


class Run:
    """What a program computed: its results, its objects afterwards, traces, and functions."""

    def __init__(self, program, jit, objects=None):
        self.counts, self.functions = collections.Counter(), {}
        self.objects = program.make() if objects is None else objects
        count = counting(jit, self.counts, self.functions)
        self.results = program.train(count, self.objects, STEPS)

    @property
    def values(self):
        return numbers(self.results), numbers(nnx.state(self.objects))


def batch_specs(program):
    """The specs of the arguments of ``train_step`` after its objects."""
    return getattr(program, "BATCH", (P("data"),) * len(program.batch(0)))


def sharding_jit(program, specs, mesh):
    """``jit`` with ``in_shardings`` for the training step; other functions follow the arrays."""

    def jit(fun, **options):
        if fun.__name__ == program.train_step.__name__:
            options |= {"in_shardings": (*specs, *batch_specs(program)), "mesh": mesh}
        return nnx_sharding.jit(fun, **options)

    return jit


def numbers(tree):
    """The arrays of a tree by path."""

    def number(x):
        is_key = jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): number(leaf) for path, leaf in leaves}
