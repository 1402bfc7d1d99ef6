"""Errors of later calls, which no check precedes: as short as those of first calls.

Tracebacks have the user's frames only, and nothing that JAX prints names a file of the library.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import nnx_sharding
from nnx_sharding import jit, shard_map
from nnx_sharding.errors import DonatedError
from zoo import P, mesh_of

OURS, JAX = (os.path.dirname(library.__file__) for library in (nnx_sharding, jax))
MESHES = {kind: mesh_of((2, 4), ("data", "model"), kind) for kind in ("auto", "explicit")}
X = np.ones((8, 8), np.float32)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return x @ self.w[...]


def as_jit(mesh, **options):
    return jit(lambda m, x: m(x), in_shardings=(P(), P("data")), mesh=mesh, **options)


def as_shard_map(mesh):
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return shard_map(lambda m, x: m(x), mesh=mesh, **specs)


def as_method(mesh):
    class Other(Model):
        call = as_jit(mesh)

    def call(model, x):
        other = Other()
        other.w = model.w
        return other.call(x)

    return call


def as_lowered(mesh):
    return as_jit(mesh).lower


CALLS: dict[str, Callable[..., Any]] = {
    "jit": as_jit,
    "shard_map": as_shard_map,
    "method": as_method,
    "lower": as_lowered,
}


def elsewhere(x):
    return jax.device_put(x, jax.devices()[3])


def placed_elsewhere(model):
    model.w.set_value(elsewhere(model.w[...]))


def deleted(model):
    model.w.get_raw_value().delete()


# What is wrong with the later call: its batch, or a change of the model; and the lines about it.
MISTAKES: dict[str, tuple[Any, Callable[[Model], None], type[Exception], str]] = {
    "short batch": (X[:7], id, ValueError, "x, shape (7, 8), P('data',): dimension 0 of size 7"),
    "scalar": (np.float32(1), id, ValueError, "x, shape (), P('data',): a scalar has no dimension"),
    "not an array": ("x", id, TypeError, "x: 'x' of type str"),
    "batch elsewhere": (elsewhere(X), id, ValueError, "x"),
    "model elsewhere": (X, placed_elsewhere, ValueError, "m.w, shape (8, 8): is SingleDevice"),
    "deleted": (X, deleted, DonatedError, "m.w, float32[8,8]"),
}


def check(capsys, call: Callable[..., Any], kind: type[Exception], text: str) -> None:
    """A call fails with a message that has this text, and shows the user's frames only."""
    handled = sys.exception()
    with pytest.raises(kind) as caught:
        call()
    # CPython may still hold one of an earlier test, whose handling a signal interrupted.
    if caught.value.__context__ is handled:
        caught.value.__context__ = None
    shown = traceback.format_exception(caught.value)
    assert text in str(caught.value)
    assert len("".join(shown).splitlines()) < 20, "".join(shown)
    frames = [line for line in shown if line.startswith("  File")]
    assert not [line for line in frames if OURS in line or JAX in line], frames
    assert OURS not in capsys.readouterr().out


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("call", CALLS)
def test_later_call(capsys, call, kind, mistake):
    x, change, error, text = MISTAKES[mistake]
    if call == "lower" and mistake in ("deleted", "model elsewhere"):
        pytest.skip("lowering needs no data")
    fun, model = CALLS[call](MESHES[kind]), Model()
    fun(model, X)
    change(model)
    check(capsys, lambda: fun(model, x), error, text)


def test_compiled(capsys):
    model = Model()
    compiled = jit(lambda m, x: m(x)).lower(model, X).compile()
    compiled(model, X)
    check(capsys, lambda: compiled(model, X[:7]), TypeError, "x: is float32[7,8], compiled for")
    sharded = jax.device_put(X, NamedSharding(MESHES["auto"], P("data")))
    check(capsys, lambda: compiled(model, sharded), ValueError, "x, float32[8,8]: is P('data',)")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib crashes, plain jax.jit as well")
def test_donated(capsys):
    fun, model = as_jit(MESHES["auto"], donate_argnums=0), Model()
    fun(model, X)
    old = model.w.get_raw_value()
    fun(model, X)
    model.w.set_value(old)
    check(capsys, lambda: fun(model, X), DonatedError, "m.w, float32[8,8]")


def test_one_array_donated_twice(capsys):
    fun, x = jit(lambda a, b: (a + 1, b + 1), donate_argnums=0), jnp.ones(8)
    fun(x + 1, x)
    check(capsys, lambda: fun(x, x), DonatedError, "float32[8]: a, b")


def test_one_reference_twice(capsys):
    fun, ref = jit(lambda a, b: None), jax.new_ref(jnp.ones(8))
    fun(ref, jax.new_ref(jnp.ones(8)))
    check(capsys, lambda: fun(ref, ref), ValueError, "appeared at both a and b")


def test_in_a_trace(capsys):
    inner = as_jit(MESHES["auto"])
    outer = jit(lambda m, x: inner(m, x))
    outer(Model(), X)
    check(capsys, lambda: outer(Model(), X[:7]), ValueError, "x, shape (7, 8)")


def test_all_frames_on_demand():
    fun, model = as_jit(MESHES["auto"]), Model()
    fun(model, X)
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(ValueError, match=r"shape \(7, 8\)") as caught:
            fun(model, X[:7])
    finally:
        jax.config.update("jax_traceback_filtering", before)
    # Older releases say less of the argument.
    part = "pytree key path x" if jax.__version_info__ >= (0, 11) else "(full shape: (7, 8)"
    assert part in str(caught.value.__cause__)
    assert any(OURS in frame.filename for frame in traceback.extract_tb(caught.tb))
