"""The same transforms of Flax and of this library, for programs that run with either."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_sharding
from graphs import Node
from zoo import numbers

# The modes, whatever Flax's defaults are. Without a graph there are no updates of it either.
FULL = {"graph": True, "graph_updates": True}
NO_UPDATES = {"graph": True, "graph_updates": False}
TREE = {"graph": False, "graph_updates": False}
WITHOUT_UPDATES = (TREE, NO_UPDATES)
MODES = {
    "graph=True,updates=True": FULL,
    "graph=True,updates=False": NO_UPDATES,
    "graph=False,updates=True": {"graph": False, "graph_updates": True},
    "graph=False,updates=False": TREE,
}


class Transforms:
    """The transforms of a library in one mode."""

    def __init__(self, library: Any, **modes: bool):
        self.Carry, self.StateAxes, self.modes = library.Carry, library.StateAxes, modes
        names = ["grad", "value_and_grad", "vmap", "scan", "remat", "jit", "cond", "switch"]
        names += ["while_loop", "fori_loop", "vjp", "jvp", "linearize", "checkify", "custom_jvp"]
        names += ["custom_vjp", "shard_map", "make_jaxpr", "eval_shape"]
        for name in names:
            if hasattr(library, name):  # Flax has no linearize
                setattr(self, name, functools.partial(getattr(library, name), **modes))


OURS, FLAX = Transforms(nnx_sharding, **FULL), Transforms(nnx, **FULL)


def programs_of(namespace):
    """The functions of a test file that take only transforms ``t``: each is a case of its test."""
    functions = (x for x in namespace.values() if inspect.isfunction(x))
    return [f for f in functions if [*inspect.signature(f).parameters] == ["t"]]


def named(programs):
    """Programs as the cases of a parameterized test."""
    return ((program.__name__, program) for program in programs)


def assert_same(ours, theirs, rtol=1e-6):
    """Equal pytrees, with the types, the metadata and the numbers of Variables."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert getattr(a, "dtype", type(a)) == getattr(b, "dtype", type(b))
        if getattr(a, "dtype", None) != jax.dtypes.float0:
            np.testing.assert_allclose(numbers(a), numbers(b), rtol=rtol, atol=1e-6)


def param(value=1.0):
    return nnx.Param(jnp.asarray(value, jnp.float32))


def stat(value=0.0):
    return nnx.BatchStat(jnp.asarray(value, jnp.float32))


def node(**attributes):
    """A module with these attributes."""
    result = Node()
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


class Statistics(nnx.Module):
    """A parameter, two statistics, one of which counts, and a random stream."""

    def __init__(self):
        self.w = nnx.Param(jnp.arange(1.0, 4.0))
        self.count = nnx.BatchStat(jnp.int32(0))
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
