"""Transforms in transforms, ours in Flax's too, in all modes: what eager Python computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnx_sharding
from graphs import snapshot
from libraries import FULL, MODES, Transforms
from nestings import (
    ALL,
    MESHES,
    NAMES,
    OF_FLAX,
    OF_OBJECTS,
    TRANSFORMS,
    Model,
    base,
    check,
    exists,
    flax_jit,
    jit,
    shard_map,
)


def few():
    """Each transform around another one, in one mode, on one device or one kind of mesh."""
    transforms, modes, meshes = [*ALL], [*MODES], [None, *MESHES]
    for i, inner in enumerate(transforms):
        outer = transforms[(i + 7) % len(transforms)]
        mesh = meshes[i // 2 % 4]
        if mesh == "mixed" and shard_map in (inner, outer) and jax.__version_info__ < (0, 12):
            mesh = "explicit"  # what shard_map leaves alone loses its sharding there
        if exists(inner, outer):
            yield pytest.param(
                inner,
                outer,
                modes[i % 4],
                mesh,
                id=f"{outer.__name__}-{inner.__name__}",
            )


@pytest.mark.parametrize(("inner", "outer", "mode", "mesh"), [*few()])
def test_some_programs(inner, outer, mode, mesh):
    check((inner, outer), mode, mesh=mesh)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", [x for x in TRANSFORMS if "flax" not in x.__name__])
def test_a_failure_changes_nothing(transform, compiled):
    def fails(m, x):
        base(m, x)
        m.new, m.a.seen = nnx.Param(x), 1
        m.u.set_metadata(note="new")
        raise RuntimeError("of the user")

    t, model = Transforms(nnx_sharding, **FULL), Model(shared=True)
    run, before = transform(t, fails), snapshot(model)
    with pytest.raises(RuntimeError, match="of the user"):
        (t.jit(run) if compiled else run)(model, jnp.float32(0.3))
    assert snapshot(model) == before


@pytest.mark.parametrize("outer", [jit, shard_map, flax_jit], ids=lambda x: x.__name__)
@pytest.mark.parametrize("program", OF_OBJECTS, ids=lambda x: x.__name__)
def test_objects_in_nested_calls(program, outer):
    check((program, outer), "graph=True,updates=True")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", sorted(NAMES))
def test_on_every_mesh(name, mesh):
    for transforms in ((NAMES[name],), (NAMES[name], jit)):
        check(transforms, "graph=True,updates=True", mesh=mesh)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", sorted(ALL, key=lambda x: x.__name__), ids=lambda x: x.__name__)
def test_all_programs_to_depth_2(inner, mode):
    failures = {}
    for outer in (None, *ALL):
        transforms = (inner,) if outer is None else (inner, outer)
        try:
            if exists(*transforms) and not OF_FLAX.keys() >= {*transforms}:
                check(transforms, mode)
        except Exception as error:
            failures[outer and outer.__name__] = error
    if failures:
        raise ExceptionGroup(
            f"around {inner.__name__}: {', '.join(map(str, failures))}", [*failures.values()]
        )


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from([*TRANSFORMS]), min_size=3, max_size=3).filter(lambda x: exists(*x)),
    st.sampled_from([*MODES]),
    st.floats(-1, 1, width=16),
)
def test_random_programs(transforms, mode, x):
    check(transforms, mode, x)
