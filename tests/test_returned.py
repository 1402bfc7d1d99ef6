"""Objects that functions return: in each mode and transform the same ones as with ``flax.nnx``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from libraries import FULL, NO_UPDATES, TREE
from zoo import mesh_of

MESH = mesh_of((2,), ("x",))
MODES = [FULL, NO_UPDATES, TREE]


class Leaf(nnx.Pytree):
    def __init__(self, data):
        self.data = nnx.data(data)
        self.tag = "leaf"


class Box(nnx.Module):
    def __init__(self, value=0.0, *, has_variable=False):
        self.data = nnx.data(jnp.arange(2.0) + value)
        self.sub = Leaf(jnp.ones(2))
        self.tag = "box"
        if has_variable:
            self.w = nnx.Param(jnp.zeros(2))


def change_array(m):
    m.data = m.data + 1


def change_nested(m):
    m.sub.data = m.sub.data * 2 + m.data


def change_variable(m):
    if hasattr(m, "w"):
        m.w[...] += m.data


def change_static(m):
    m.tag = f"{getattr(m, 'tag', '')}+"


def remove_static(m):
    if hasattr(m, "tag"):
        del m.tag


def add_array(m):
    m.new = nnx.data(m.data + 2)


def add_variable(m):
    m.extra = nnx.Param(m.data + 3)


def replace_module(m):
    m.sub = Leaf(m.data + 4)


def share_module(m):
    m.again = m.sub


VALUES = [change_array, change_nested, change_variable]
CHANGES = [
    *VALUES,
    change_static,
    remove_static,
    add_array,
    add_variable,
    replace_module,
    share_module,
]


def within_new(m):
    new = Leaf(m.data)
    new.inner = nnx.data(m)
    return new


RETURNS = {
    "itself": lambda m: m,
    "part": lambda m: m.sub,
    "twice": lambda m: (m, m),
    "with its part": lambda m: {"a": [m, m.sub]},
    "within a new one": within_new,
    "variable": lambda m: getattr(m, "w", None),
    "array": lambda m: m.data,
}


def jitted(lib, f, modes):
    return lib.jit(f, **modes)


def rematerialized(lib, f, modes):
    return lib.remat(f, **modes)


def mapped(lib, f, modes):
    return lib.vmap(f, in_axes=0, out_axes=0, **modes)


def sharded(lib, f, modes):
    return lib.shard_map(f, mesh=MESH, in_specs=(P("x"),), out_specs=P("x"), **modes)


def differentiated(lib, f, modes):
    if lib is nnx:  # which cannot return auxiliary modules in each mode
        return lib.jit(f, **modes)
    loss = lib.value_and_grad(lambda m: (m.data.sum(), f(m)), has_aux=True, argnums=0, **modes)
    return lambda m: loss(m)[0][1]


def compiled(lib, f, modes):
    return lib.jit(f, **modes).lower(Box()).compile()


TRANSFORMS = [jitted, rematerialized, mapped, sharded, differentiated]


def described(x: Any, callers: dict[int, str], seen: dict[int, int]) -> Any:
    """A value with all attributes, and which objects in it are the caller's or the same."""
    if isinstance(x, nnx.Pytree | nnx.Variable):
        if id(x) in seen:
            return seen[id(x)]
        seen[id(x)] = len(seen)
        fields = {"": x[...]} if isinstance(x, nnx.Variable) else vars(x)
        items = {
            key: described(fields[key], callers, seen)
            for key in sorted(fields)
            if not key.startswith("_")
        }
        return type(x).__name__, callers.get(id(x), "new"), items
    if isinstance(x, dict):
        return {key: described(value, callers, seen) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return [described(value, callers, seen) for value in x]
    return np.asarray(x).tolist() if isinstance(x, jax.Array) else x


def outcome(call, model) -> Any:
    """What a call returned and what became of its argument, or the type of its error."""
    callers = {id(model): "the argument", id(model.sub): "its part"}
    callers |= {id(model.w): "its variable"} if hasattr(model, "w") else {}
    try:
        out = call(model)
    except Exception as error:
        return type(error)
    return described(out, callers, {}), described(model, callers, {})


def outcomes(lib, transform, changes, returned, modes, has_variable) -> list[Any]:
    """Those of a first call, of later ones with the same model, and of one with a new model."""

    def f(m):
        for change in changes:
            change(m)
        return RETURNS[returned](m)

    models = [Box(has_variable=has_variable), Box(5.0, has_variable=has_variable)]
    call = transform(lib, f, modes)
    return [outcome(call, model) for model in (models[0], models[0], models[0], models[1])]


def assert_same(transform, changes, returned, modes, has_variable) -> None:
    arguments = transform, changes, returned, modes, has_variable
    ours, theirs = (outcomes(lib, *arguments) for lib in (nnx_sharding, nnx))
    assert ours == theirs, f"{ours}\n{theirs}"


@settings(max_examples=40)
@given(
    st.sampled_from(TRANSFORMS),
    st.lists(st.sampled_from(CHANGES), max_size=3),
    st.sampled_from(sorted(RETURNS)),
    st.sampled_from(MODES),
    st.booleans(),
)
@example(jitted, [change_array], "itself", NO_UPDATES, False)
@example(jitted, [change_array], "itself", TREE, False)
@example(jitted, [change_static, add_array, share_module], "twice", TREE, False)
@example(jitted, [change_variable, change_nested], "part", NO_UPDATES, True)
@example(mapped, [replace_module], "within a new one", NO_UPDATES, False)
@example(sharded, [change_nested], "with its part", TREE, False)
@example(differentiated, [change_array], "itself", NO_UPDATES, False)
def test_same_as_flax(transform, changes, returned, modes, has_variable):
    assert_same(transform, changes, returned, modes, has_variable)


@settings(max_examples=1000)
@given(
    st.sampled_from(TRANSFORMS),
    st.lists(st.sampled_from(CHANGES), max_size=4),
    st.sampled_from(sorted(RETURNS)),
    st.sampled_from(MODES),
    st.booleans(),
)
def test_same_as_flax_in_many_cases(transform, changes, returned, modes, has_variable):
    assert_same(transform, changes, returned, modes, has_variable)


@pytest.mark.parametrize("modes", MODES)
def test_compiled(modes):
    assert_same(compiled, [change_array, change_static], "with its part", modes, False)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("twice", ["arguments", "attributes"])
def test_module_that_is_passed_twice(modes, twice):
    """In a tree, each place has its own copy."""

    def f(one, two):
        one.data = one.data + 1
        return one, two

    found = []
    for lib in (nnx_sharding, nnx):
        model = Leaf(jnp.zeros(2))
        pair = nnx.Dict(one=model, two=model)
        call = lib.jit(f, **modes)
        attributes = lib.jit(lambda pair, f=f: f(pair.one, pair.two), **modes)
        results = []
        for _ in range(3):
            out = call(model, model) if twice == "arguments" else attributes(pair)
            results.append(described((out, model), {id(model): "caller"}, {}))
        found.append(results)
    assert found[0] == found[1]


def scanned(lib, changes, modes, has_variable, out=lambda m: m.data) -> Any:
    def step(m, x):
        for change in changes:
            change(m)
        m.data = m.data + x
        return m, out(m)

    axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    call = lib.scan(step, **axes, **modes)
    model = Box(has_variable=has_variable)
    return [outcome(lambda m: call(m, jnp.arange(3.0)), model) for _ in range(2)]


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("has_variable", [False, True])
def test_carry(modes, has_variable):
    for changes in ([], [change_array], [change_nested, change_variable], VALUES):
        found = [scanned(lib, changes, modes, has_variable) for lib in (nnx_sharding, nnx)]
        assert found[0] == found[1]


@pytest.mark.parametrize("modes", MODES[1:])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_static, r"m\.tag"),
        (remove_static, r"m\.tag"),
        (add_array, r"m\.new"),
        (add_variable, r"m\.extra"),
        (replace_module, r"m\.sub"),
    ],
)
def test_step_that_changes_the_structure_of_the_carry(modes, change, named):
    def step(m, x):
        change(m)
        return m, x

    axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    with pytest.raises(ValueError, match=named):
        nnx_sharding.scan(step, **axes, **modes)(Box(), jnp.arange(3.0))


@pytest.mark.parametrize("modes", MODES[1:])
def test_module_that_is_the_same_for_all_steps(modes):
    def step(m, total, x):
        m.data = m.data + x
        return total + x, m

    axes = {"in_axes": (None, nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    found = []
    for lib in (nnx_sharding, nnx):
        call = lib.scan(step, **axes, **modes)
        found.append(outcome(lambda m, call=call: call(m, jnp.zeros(()), jnp.arange(3.0)), Box()))
    assert found[0] == found[1] and found[0] is not ValueError


@pytest.mark.parametrize("modes", MODES)
def test_module_in_the_carry_and_in_what_is_stacked(modes):
    """Its arrays cannot be both, unless each place has its own copy."""
    found = [scanned(lib, [], modes, False, lambda m: m) for lib in (nnx_sharding, nnx)]
    assert found[0] == (found[1] if modes is TREE else [ValueError] * 2)


@pytest.mark.parametrize("modes", MODES[1:])
def test_shardings_are_those_of_outputs(modes):
    """Attributes of arguments are not placed without graph updates, but those of results are."""
    one, two = (NamedSharding(MESH, spec) for spec in (P("x"), P()))
    for declared in (one, two):
        shardings = {"in_shardings": (one,), "out_shardings": declared}
        model = Box()
        out = nnx_sharding.jit(lambda m: m, **shardings, **modes)(model)
        assert out is not model and out.data.sharding.is_equivalent_to(declared, 1)
        assert out.sub.data.sharding.is_equivalent_to(declared, 1)
        assert isinstance(model.data.sharding, jax.sharding.SingleDeviceSharding)
