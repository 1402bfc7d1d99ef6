"""Methods of modules are replaced once: what that leaves as it is, and what interrupts it."""

from __future__ import annotations

import abc
import contextvars
import functools
import inspect
import pickle
import random
import sys
from collections.abc import Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_sharding import jit, remat
from nnx_sharding.activations import calls as record
from nnx_sharding.activations import intercept
from nnx_sharding.activations.intercept import Method, current_handler, with_handler

AUTO = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jnp.ones((8, 4))
OPTIONS = {"mesh": AUTO, "activation_shardings": {"^$": P("data")}}


class Scale(nnx.Module):
    def __init__(self, factor=2.0):
        self.factor = nnx.Param(jnp.array(factor))

    def __call__(self, x, *, shift=1.0):
        """Scales and shifts."""
        return self.scaled(x) + shift

    def scaled(self, x):
        return x * self.factor[...]

    @jit
    def jitted(self, x):
        return self.scaled(x)


def call(module, x):
    return module(x)


def intercepted(fun, *args, named=()):
    """The result of a function, and the methods that it calls."""
    seen = []

    def handler(module, name, method, args, kwargs):
        seen.append(f"{type(module).__name__}.{name}")
        return method(*args, **kwargs)

    return with_handler(handler, named, fun, *args), seen


def test_a_method_is_replaced_once():
    intercepted(call, Scale(), X)
    before = {kind: dict(vars(kind)) for kind in (Scale, nnx.Linear, nnx.Dropout)}
    for _ in range(1000):
        intercepted(lambda: None)
    for kind, attributes in before.items():
        assert {name: id(value) for name, value in vars(kind).items()} == {
            name: id(value) for name, value in attributes.items()
        }


def test_outside_of_a_trace_methods_are_what_they_were():
    class Later(nnx.Module):
        def __call__(self, x):
            return x

        method = __call__

    class Plain:
        def method(self):
            return 1

    before = Later.__call__, Later.method, Plain.method
    module = Later()
    assert intercepted(lambda: (module(1), module.method(2))) == (
        (1, 2),
        ["Later.__call__", "Later.method"],
    )
    assert type(vars(Later)["__call__"]) is Method
    assert (Later.__call__, Later.method, Plain.method) == before
    assert module.__call__.__func__ is before[0]
    assert inspect.signature(Later.__call__) == inspect.signature(before[0])
    assert pickle.loads(pickle.dumps(nnx.Linear.__call__)) is nnx.Linear.__call__
    assert (
        type(vars(object)["__repr__"]) is not Method and type(vars(Plain)["method"]) is not Method
    )


def test_attributes_of_transformed_methods():
    module = Scale()
    intercepted(call, module, X)
    assert module.jitted.lower(X).compile() is not None
    np.testing.assert_array_equal(module.jitted(X), 2 * X)


def test_in_a_trace_methods_keep_their_names():
    def fun(module):
        bound = module.scaled
        return (
            bound.__name__,
            bound.__qualname__,
            bound.__self__ is module,
            inspect.signature(bound),
        )

    module = Scale()
    expected = "scaled", "Scale.scaled", True, inspect.signature(module.scaled)
    assert intercepted(fun, module)[0] == expected == fun(module)
    unbound, _ = intercepted(lambda: Scale.__call__)
    assert (unbound.__doc__, unbound.__wrapped__) == ("Scales and shifts.", Scale.__call__)
    assert unbound(module, X, shift=0.0)[0, 0] == 2


class Outer(nnx.Module):
    def __init__(self):
        self.inner = Scale()

    def __call__(self, x):
        return jit(self.inner.__call__)(x) + jax.jit(self.inner.scaled)(x)


class Helped(nnx.Module):
    """Calls functions that its class holds, which are no methods of a module."""

    def masked(mask, x, other=None):
        return x if mask is None else mask * other

    def shifted(x, shift=0.0):
        return x + shift

    def __call__(self, x):
        return Helped.masked(None, x, 2 * x) + Helped.shifted(x=x, shift=3.0)


def test_functions_that_a_class_holds_as_helpers():
    np.testing.assert_array_equal(intercepted(Helped(), X)[0], Helped()(X))
    np.testing.assert_array_equal(jit(call, **OPTIONS)(Helped(), X), 2 * X + 3)


@pytest.mark.parametrize(
    "transform",
    [jit, remat, functools.partial(jit, **OPTIONS)],
    ids=["jit", "remat", "jit with options"],
)
def test_names_in_the_program(transform):
    text = jit(lambda module, x: transform(call)(module, x), **OPTIONS).lower(Outer(), X)
    assert "intercepted" not in text.as_text() and "replacement" not in text.as_text()
    plain = jit(call).trace(Outer(), X).jaxpr.eqns
    found = jit(call, mesh=AUTO, activation_shardings={"inner": P("data")}).trace(Outer(), X)
    names = [[eqn.params.get("name") for eqn in eqns] for eqns in (plain, found.jaxpr.eqns)]
    assert {"__call__", "scaled"} <= {*names[0]}
    assert [x for x in names[1] if x in names[0]] == names[0]


def test_methods_that_the_user_replaces(monkeypatch):
    module = Scale()
    assert intercepted(call, module, X)[1] == ["Scale.__call__", "Scale.scaled"]
    with monkeypatch.context() as patch:
        patch.setattr(Scale, "scaled", lambda self, x: x * 5)
        out, seen = intercepted(call, module, X)
        assert (out[0, 0], seen) == (6, ["Scale.__call__", "Scale.scaled"])
        assert module(X)[0, 0] == 6
    assert intercepted(call, module, X)[0][0, 0] == module(X)[0, 0] == 3
    old = Scale.scaled
    try:  # by hand, around the old one
        Scale.scaled = functools.wraps(old)(lambda self, x: old(self, x) * 10)
        assert intercepted(call, module, X)[0][0, 0] == module(X)[0, 0] == 21
        assert intercepted(call, module, X)[1] == ["Scale.__call__", "Scale.scaled"]
    finally:
        Scale.scaled = old
    assert intercepted(call, module, X)[0][0, 0] == module(X)[0, 0] == 3


@pytest.mark.parametrize("order", ["inside", "outside"])
@pytest.mark.parametrize("patched_before", [False, True])
def test_capture_of_outputs_of_methods(order, patched_before):
    """Its marks come and go with it."""

    class Layer(nnx.Module):
        def __call__(self, x):
            return self.double(x) + 1

        def double(self, x):
            return 2 * x

    layer, plain = Layer(), dict(vars(Layer))
    if patched_before:
        intercepted(call, layer, X)
    if order == "outside":
        fun = nnx.capture(layer, nnx.Intermediate, method_outputs=nnx.Intermediate)
        (out, captured), seen = intercepted(fun, X)
    else:
        fun = lambda x: intercepted(layer, x)  # noqa: E731
        captured = nnx.capture(
            lambda layer, x: fun(x), nnx.Intermediate, method_outputs=nnx.Intermediate
        )(layer, X)
        (out, seen), captured = captured
    assert out[0, 0] == 3
    assert {*captured} == {"__call__", "double"}
    assert [len(captured[name]) for name in captured] == [1, 1]
    assert sorted(seen) == ["Layer.__call__", "Layer.double"]
    assert Layer.__call__ is plain["__call__"] and Layer.double is plain["double"]
    assert not hasattr(Layer.__call__, "_does_capturing")


def test_classes_of_python_stay_as_they_are():
    class Model(nnx.Module, Sequence, Generic[TypeVar("T")]):
        __getitem__ = __len__ = None

        def __call__(self, x):
            return x

    Model.__module__ = "builtins"  # as in an interactive session without a name
    before = [dict(vars(kind)) for kind in (Sequence, Generic, abc.ABC, object)]
    assert intercepted(call, Model(), 1)[1] == ["Model.__call__"]
    assert [dict(vars(kind)) for kind in (Sequence, Generic, abc.ABC, object)] == before


def test_super_and_mixins():
    class Mixin:
        def __call__(self, x):
            return self.twice(x) + 1

        def twice(self, x):
            return 2 * x

    class Base(Mixin, nnx.Module):
        def twice(self, x):
            return super().twice(x)

    class Derived(Base):
        def __call__(self, x):
            return super().__call__(x) + Base.__call__(self, x)

    plain = Mixin()
    assert intercepted(Derived(), 1) == (6, ["Derived.__call__"] + ["Derived.twice"] * 2)
    assert intercepted(plain, 1) == (3, [])


def test_classes_are_pickled_without_it():
    source = (
        "from flax import nnx\nclass Remote(nnx.Module):\n  def __call__(self, x): return x + 1"
    )
    scope = {"__name__": "__main__"}
    exec(source, scope)
    kind = scope["Remote"]
    assert intercepted(kind(), 1) == (2, ["Remote.__call__"])
    by_value = pytest.importorskip("cloudpickle").dumps(kind)
    assert b"nnx_sharding" not in by_value
    assert pickle.loads(by_value)()(1) == 2


def test_named_methods_are_intercepted_only_where_they_are_named():
    class Private(nnx.Module):
        def __call__(self, x):
            return self._hidden(x)

        def _hidden(self, x):
            return x

    for named, expected in (((), 1), (("_hidden",), 2), ((), 1)):
        assert len(intercepted(Private(), 1, named=named)[1]) == expected


def test_context_variables_that_the_function_sets():
    mine = contextvars.ContextVar("mine")
    intercepted(lambda: mine.set(3))
    assert mine.get() == 3
    assert current_handler() is None


# Interrupts


def lines_of(run, act, wanted):
    """Calls ``act`` at one line, by number, that runs in the modules of interception."""
    files, count = {intercept.__file__, record.__file__}, 0

    def tracer(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return tracer if event == "call" else None
        if event == "line":
            count += 1
            if count == wanted:
                sys.settrace(None)
                act()
        return tracer

    old = sys.gettrace()
    sys.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(old)
    return count


def traced(factor):
    jit(lambda module, x: factor * module(x), **OPTIONS).trace(Scale(), X)


def test_an_interrupt_leaves_nothing_behind():
    def interrupt():
        raise KeyboardInterrupt

    traced(1)
    total = lines_of(lambda: traced(1), None, -1)
    text = jit(call, **OPTIONS).lower(Scale(), X).as_text()
    for wanted in random.Random(0).sample(range(1, total + 1), min(total, 40)):
        with pytest.raises(KeyboardInterrupt):
            lines_of(lambda: traced(1), interrupt, wanted)
        assert current_handler() is None and record.FRAME.get() is None
        assert Scale()(X)[0, 0] == 3
    assert jit(call, **OPTIONS).lower(Scale(), X).as_text() == text


def test_a_function_that_interrupts_to_trace():
    """As a signal handler does; no lock may be held."""
    total, count = lines_of(lambda: traced(2), None, -1), 0

    def act():
        nonlocal count
        traced(3)
        count += 1

    chosen = random.Random(1).sample(range(1, total + 1), 20)
    for wanted in chosen:
        lines_of(lambda: traced(2), act, wanted)
    assert count == len(chosen)
