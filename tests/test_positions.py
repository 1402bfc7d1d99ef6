"""Positions and names of static and donated arguments mean what they mean in JAX."""

import inspect
import itertools
import random
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_sharding import grad, jit, remat


def three(x, y, z):
    return seen(x, y, z)


def default(x, y, z=True):
    return seen(x, y, z)


def two_defaults(x, y=2.0, z=True):
    return seen(x, y, z)


def positional_only(x, y, /, z=True):
    return seen(x, y, z)


def keyword_only(x, y, *, z=True):
    return seen(x, y, z)


def rest(x, *args):
    return seen(x, *args)


def only_rest(*args):
    return seen(*args)


def keywords(x, y=2.0, **kwargs):
    return seen(x, y, *kwargs.values())


class Owner:
    def method(self, x, y, z=True):
        return seen(x, y, z)


FUNCTIONS = (
    *(three, default, two_defaults, positional_only, keyword_only, rest, only_rest, keywords),
    Owner().method,
)
POSITIONS: tuple[Any, ...] = (
    *range(-4, 4),
    *itertools.combinations(range(-3, 3), 2),
)
NAMES: tuple[Any, ...] = ("x", "y", "z", ("x", "z"))
CALLS = (
    lambda a, b, c: ((a, b, c), {}),
    lambda a, b, c: ((a, b), {"z": c}),
    lambda a, b, c: ((a,), {"y": b, "z": c}),
    lambda a, b, c: ((a, b), {}),
    lambda a, b, c: ((a,), {"y": b}),
    lambda a, b, c: ((a,), {}),
)

IS_STATIC: list[bool] = []


def seen(*values):
    IS_STATIC[:] = [not isinstance(x, jax.core.Tracer) for x in values]
    return [x + 1 for x in values if isinstance(x, jax.core.Tracer)]


def copied(fun: Any) -> Any:
    """The same function as another object, for which there are no traces yet."""
    if isinstance(fun, types.MethodType):
        return types.MethodType(copied(fun.__func__), fun.__self__)
    new = types.FunctionType(fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__)
    new.__kwdefaults__ = fun.__kwdefaults__
    return new


def result(transform: Any, fun: Any, options: dict[str, Any], make_call: Any) -> Any:
    """What a transform does with a call: an error, or which arguments are static and donated."""
    is_static = "static" in next(iter(options))
    # Each of another shape, so that only its own buffer can be reused.
    values = (1.0, 2.0, 3.0) if is_static else [jnp.ones(2 + i) for i in range(3)]
    args, kwargs = make_call(*values)
    IS_STATIC.clear()
    fun = copied(fun)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            transform(fun, **options)(*args, **kwargs)
        except Exception:  # of different classes, some from JAX's own assertions
            return "error"
    return [*IS_STATIC], [getattr(x, "is_deleted", bool)() for x in values]


def accepts(fun: Any, make_call: Any) -> bool:
    args, kwargs = make_call(1, 2, 3)
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def options_of(fun: Any) -> list[dict[str, Any]]:
    numbers = [{f"{role}_argnums": x} for role in ("static", "donate") for x in POSITIONS]
    names = [{f"{role}_argnames": x} for role in ("static", "donate") for x in NAMES]
    return [*numbers, *names]


def cases(fun: Any) -> list[Any]:
    """All options with all calls, without positions before the first argument: errors here."""
    pairs = itertools.product(options_of(fun), CALLS)
    return [
        (options, call) for options, call in pairs if accepts(fun, call) and fits(options, call)
    ]


def fits(options: dict[str, Any], make_call: Any) -> bool:
    (given,) = options.values()
    positions = [x for x in (given if isinstance(given, tuple) else (given,)) if type(x) is int]
    return -len(make_call(1, 2, 3)[0]) <= min(positions, default=0)


# Ours are the rules of the newest JAX, on each release.
newest_rules = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="other rules for arguments that a call leaves out"
)


@newest_rules
@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("count", [8, 10_000])
def test_jit_as_in_jax(fun, count):
    every = cases(fun)
    for options, make_call in random.sample(every, min(count, len(every))):
        theirs = result(jax.jit, fun, options, make_call)
        if theirs != "error":
            assert result(jit, fun, options, make_call) == theirs, (options, make_call(1, 2, 3))


@pytest.mark.parametrize("fun", [three, default, rest, only_rest], ids=lambda fun: fun.__name__)
def test_remat_as_in_jax(fun):
    def transformed(rematted):
        def transform(f, **options):
            return lambda *args: jax.jit(lambda: rematted(f, **options)(*args))()

        return transform

    calls = [call for call in CALLS if accepts(fun, call) and not call(1, 2, 3)[1]]
    for position in (*range(-3, 3), (0, -1)):
        for make_call in calls:
            options = {"static_argnums": position}
            theirs = result(transformed(jax.checkpoint), fun, options, make_call)
            if theirs != "error":
                assert result(transformed(remat), fun, options, make_call) == theirs


@pytest.mark.parametrize("fun", [default, rest], ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("argnums", [0, 1, -1, -2, (0, -1)])
def test_grad_as_in_jax(fun, argnums):
    def loss(*args):
        return sum(i * x.sum() ** 2 for i, x in enumerate(args, 1))

    f = {default: lambda x, y, z=True: loss(x, y), rest: lambda x, *args: loss(x, *args)}[fun]
    args = jnp.ones(2), jnp.ones(3)
    ours, theirs = grad(f, argnums=argnums)(*args), jax.grad(f, argnums=argnums)(*args)
    assert str(ours) == str(theirs)


@newest_rules
def test_a_bound_method_of_a_module():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def step(self, x, y, z=True):
            seen(x, y, z)
            return self.w * x * y

    model = Model()
    for position in range(-3, 3):
        jax.jit(model.step, static_argnums=position)(1.0, 2.0)
        theirs = [*IS_STATIC]
        jit(model.step, static_argnums=position)(1.0, 2.0)
        assert theirs == IS_STATIC


def test_a_default_left_out_does_not_make_another_argument_static():
    def step(model, x, lr, debug=False):
        traces.append(lr)
        return model.w * x * lr

    traces: list[Any] = []
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    f = jit(step, static_argnums=-1)
    for i in range(4):
        f(model, 1.0, 0.1 * i)
    assert len(traces) == 1


class TestSameNames:
    """A keyword argument with the name of a positional-only parameter is another argument."""

    def test_donated(self):
        f = jit(lambda a, /, **kw: (a + 1, kw["a"] * 2), donate_argnums=0)
        x, y = jnp.ones(4), jnp.ones(5)
        f(x, a=y)
        assert x.is_deleted() and not y.is_deleted()

    def test_gradient(self):
        f = grad(lambda a, /, **kw: (a * kw["a"]).sum())
        assert f(jnp.ones(2), a=jnp.full(2, 3.0)).tolist() == [3.0, 3.0]

    @pytest.mark.parametrize("as_mapping", [True, False])
    def test_specs(self, as_mapping):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("d")
        specs = {"a": spec} if as_mapping else (spec,)
        f = jit(lambda a, /, **kw: (a, kw["a"]), mesh=mesh, in_shardings=specs)
        shardings = f.lower(jnp.ones(4), a=jnp.ones(3)).compile().input_shardings
        declared = jax.tree_util.tree_leaves(shardings)
        assert [s.is_fully_replicated for s in declared] == [False, True]

    def test_names(self):
        traced = jit(lambda a, /, **kw: (a, kw["a"])).trace(jnp.ones(4), a=jnp.ones(3))
        assert traced.arg_names == ("a", "kwargs['a']")
