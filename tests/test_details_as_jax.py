"""Small things that jit does as jax.jit: layouts, open dimensions, captured arrays, events."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_sharding import StateSharding, grad, jit, shard_map, vmap
from nnx_sharding.errors import CapturedArrayWarning

AUTO = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
ROWS = NamedSharding(AUTO, P("d"))
FORMATS = {
    "layout": Format(Layout((1, 0)), ROWS),
    "open layout": Format(Layout.AUTO, ROWS),
    "no layout": Format(None, ROWS),
    "open layout alone": Format(Layout.AUTO),
    "sharding": ROWS,
}


def linear():
    return nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))


def step(model, x):
    model.kernel[...] += 1
    return model(x)


OPEN = P.UNCONSTRAINED
UNCONSTRAINED = {
    "array": lambda: jit(step, mesh=AUTO, in_shardings=(None, P(OPEN, None))),
    "second dimension": lambda: jit(step, mesh=AUTO, in_shardings=(None, P("d", OPEN))),
    "named": lambda: jit(step, in_shardings=(None, NamedSharding(AUTO, P(OPEN)))),
    "format": lambda: jit(step, in_shardings=(None, Format(None, NamedSharding(AUTO, P(OPEN))))),
    "module": lambda: jit(step, mesh=AUTO, in_shardings=(StateSharding({...: P(OPEN)}), None)),
    "explicit": lambda: jit(step, mesh=EXPLICIT, in_shardings=(None, P(OPEN))),
    "result": lambda: jit(step, mesh=AUTO, out_shardings=P(OPEN)),
    "shard_map": lambda: shard_map(step, mesh=AUTO, in_specs=(None, P(OPEN)), out_specs=P()),
}


@pytest.mark.parametrize("case", UNCONSTRAINED)
@pytest.mark.parametrize("stage", ["call", "lower", "traced"])
def test_unconstrained_dimensions_are_an_error(case, stage):
    f, x = UNCONSTRAINED[case](), jnp.ones((8, 8))
    with pytest.raises(ValueError, match=r"(?i)unconstrained"):
        if stage == "call":
            f(linear(), x)
        elif stage == "lower":
            f.lower(linear(), x)
        else:
            jax.jit(lambda x: f(linear(), x))(x)


@pytest.mark.parametrize("given", FORMATS)
@pytest.mark.parametrize("declared", FORMATS)
def test_eval_shape_keeps_formats(given, declared):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    options = {"in_shardings": FORMATS[given], "out_shardings": FORMATS[declared]}
    theirs = jax.jit(lambda x: (x, x * 2), **options).eval_shape(x)
    ours = jit(lambda x: (x, x * 2), **options).eval_shape(x)
    assert [a.format for a in ours] == [a.format for a in theirs]


@pytest.mark.parametrize("declared", FORMATS)
def test_eval_shape_keeps_formats_of_modules(declared):
    given = FORMATS[declared]
    made = jit(linear, out_shardings=StateSharding({...: given})).eval_shape()
    theirs = jax.jit(lambda: jnp.ones((8, 8)), out_shardings=given).eval_shape()
    assert made.kernel.get_raw_value().format == theirs.format


@pytest.mark.parametrize("side", ["in", "out"])
def test_an_open_layout_alone(side):
    """The compiler chooses the layout; nothing says how the array is sharded."""
    alone, x = Format(Layout.AUTO), jnp.ones((8, 8))
    specs = StateSharding({...: alone}), alone
    options = {"in_shardings": specs} if side == "in" else {"out_shardings": alone}
    model = linear()
    before = model.kernel[...]
    assert jit(step, **options)(model, x).format == jax.jit(jnp.copy)(x).format
    assert (model.kernel[...] == before + 1).all()


class TestCapturedArrays:
    """On Explicit axes, an array that is only indexed is sharded as its type says."""

    CASES = {
        "column": (True, lambda big, i: big[:, 0]),
        "columns": (True, lambda big, i: big[:, 1:3]),
        "rows": (True, lambda big, i: big.at[i].get(out_sharding=P("d"))),
        "both": (True, lambda big, i: (big[:, 0], big.at[i].get(out_sharding=P("d")))),
        "product": (False, lambda big, i: big * 2),
        "resharded": (False, lambda big, i: jax.sharding.reshard(big, P()) * 2),
        "column and sum": (False, lambda big, i: big[:, 0] + big.sum()),
    }

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("explicit", [True, False])
    def test_warning(self, case, explicit):
        is_quiet, function = self.CASES[case]
        mesh = EXPLICIT if explicit else AUTO
        big = jax.device_put(jnp.arange(128.0).reshape(16, 8), NamedSharding(mesh, P("d")))
        if case in ("rows", "both", "resharded"):
            function = function if explicit else lambda big, i: big[i]
        with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CapturedArrayWarning)
            ours = jit(lambda i: function(big, i))(jnp.arange(8))
            theirs = jax.jit(lambda i: function(big, i))(jnp.arange(8))
        warned = any(issubclass(w.category, CapturedArrayWarning) for w in caught)
        assert warned == (not (is_quiet and explicit))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs)
        assert all(jax.tree.leaves(same))


def named(x):
    return jnp.sin(x).sum()


class Callable:
    def __call__(self, x):
        return x + 1

    def method(self, x):
        return x + 1


MAP = {"mesh": AUTO, "in_specs": P("d"), "out_specs": P("d")}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: jit(named), lambda: jax.jit(named)),
        (lambda: jit(lambda x: x), lambda: jax.jit(lambda x: x)),
        (lambda: jit(functools.partial(named)), lambda: jax.jit(functools.partial(named))),
        (lambda: jit(Callable()), lambda: jax.jit(Callable())),
        (lambda: jit(Callable().method), lambda: jax.jit(Callable().method)),
        (lambda: jit(vmap(named)), lambda: jax.jit(jax.vmap(named))),
        (lambda: jit(grad(named)), lambda: jax.jit(jax.grad(named))),
        (
            lambda: shard_map(Callable().method, **MAP),
            lambda: jax.jit(jax.shard_map(Callable().method, **MAP)),
        ),
    ],
)
def test_events_have_the_name_of_the_function(ours, theirs):
    events = []

    def listen(event, _, **details):
        events.append((event, details.get("fun_name")))

    x = jax.device_put(jnp.ones(8), ROWS)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        seen = []
        for make in (ours, theirs):
            jax.clear_caches()
            f = make()
            events.clear()
            f(x)
            seen.append([e for e in events if "/core/compile/" in e[0]])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert seen[0] == seen[1] and len(seen[0]) >= 3
