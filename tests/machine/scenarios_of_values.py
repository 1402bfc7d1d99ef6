"""Each kind of change alone: values, containers, statics, traces, arguments, layouts."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from graphs import Node, is_ref

from .calls import X, call_threads
from .families import (
    call_forward,
    call_in_gradient,
    call_in_jit,
    call_train,
    exchange_layers,
    lay_out,
    lay_out_all,
    make_layers,
    make_methods,
    make_shardings,
    new_layer,
    new_optimizer,
    resize,
    swap_layers,
    uncommit,
)
from .functions import FLIPPED, MESH, eager
from .mutations import leaked, make_classes, make_containers
from .objects import (
    AlwaysEqual,
    Bare,
    Box,
    Config,
    FrozenConfig,
    Label,
    Pair,
    Record,
    Same,
    Slim,
    Title,
    Twin,
    Value,
    double,
    halve,
)
from .scenarios import (
    SCENARIOS,
    call_step,
    do,
    make_models,
    make_one,
    put,
    scenario,
    scenarios,
    swap_parts,
)
from .views import reachable
from .worlds import Failure, World, attempt


def make_values(w: World) -> None:
    w.models.append(
        w.node(
            v=w.param(),
            w=w.param(),
            raw=w.array(),
            numpy=np.full(2, w.number(), np.float32),
            many=nnx.Param((w.array(), w.array())),
            table=nnx.Param({"a": w.array(), "b": w.array()}),
            ref=nnx.Variable(w.array(), ref=True),
        )
    )


def _set_value(kind: Callable[[World], Any]) -> Callable[[World], None]:
    return lambda w: w.model.v.set_raw_value(kind(w))


scenarios(
    {
        "value of another dtype": _set_value(lambda w: w.array(dtype=jnp.int32)),
        "value of another shape": _set_value(lambda w: w.array((2,))),
        "value of a weak type": _set_value(lambda w: jnp.asarray(w.number())),
        "value becomes a float": _set_value(lambda w: w.number()),
        "value becomes an int": _set_value(lambda w: 3),
        "value becomes a bool": _set_value(lambda w: True),
        "value becomes a tuple": _set_value(lambda w: (w.array(), w.array())),
        "value becomes a dict": _set_value(lambda w: {"a": w.array()}),
        "value becomes None": _set_value(lambda w: None),
        "container grows": do("many.set_raw_value", lambda w: (w.array(), w.array(), w.array())),
        "container shrinks": do("many.set_raw_value", lambda w: (w.array(),)),
        "container becomes empty": do("many.set_raw_value", ()),
        "container of another type": do("many.set_raw_value", lambda w: [w.array(), w.array()]),
        "container nests": do("many.set_raw_value", lambda w: (w.array(), (w.array(),))),
        "container becomes an array": do("many.set_raw_value", lambda w: w.array()),
        "container dict grows in place": lambda w: w.model.table.get_raw_value().update(
            c=w.array()
        ),
        "container dict renamed in place": lambda w: w.model.table.get_raw_value().update(
            c=w.model.table.get_raw_value().pop("a")
        ),
        "raw array of another dtype": put("raw", lambda w: w.array(dtype=jnp.int32)),
        "raw array becomes a container": put("raw", lambda w: nnx.data([w.array()])),
        "ref becomes an array": put("ref", lambda w: nnx.Variable(w.array())),
        "array becomes a ref": put("v", lambda w: nnx.Param(w.array(), ref=True)),
        "ref of another shape": put("ref", lambda w: nnx.Variable(w.array((2,)), ref=True)),
        "one ref in two Variables": put(
            "v",
            lambda w: nnx.Variable.from_metadata(
                w.model.ref.get_raw_value(), w.model.ref.get_metadata()
            ),
        ),
    },
    make_values,
)
scenarios(
    {
        "value changed": _set_value(lambda w: w.array()),
        "value becomes a NumPy array": _set_value(lambda w: np.float32(w.number())[None][0:1][0]),
        "value becomes a NumPy array of one dimension less": _set_value(
            lambda w: np.full((), w.number(), np.float32)
        ),
        "container dict reordered in place": lambda w: w.model.table.get_raw_value().update(
            a=w.model.table.get_raw_value().pop("a")
        ),
        "container by an equal one": do(
            "table.set_raw_value", lambda w: dict(w.model.table.get_raw_value())
        ),
        "raw array changed": put("raw", lambda w: w.array()),
        "raw array becomes a NumPy array": put(
            "raw", lambda w: np.full((), w.number(), np.float32)
        ),
        "NumPy array edited in place": do("numpy.__setitem__", 0, 7),
        "NumPy array becomes a JAX array": put("numpy", lambda w: w.array((2,))),
        "ref changed": do("ref.__setitem__", ..., lambda w: w.array()),
        "ref by another one": put("ref", lambda w: nnx.Variable(w.array(), ref=True)),
    },
    make_values,
    retraces=False,
)
scenarios(
    {
        "committed to the first device": _set_value(
            lambda w: jax.device_put(w.array(), jax.devices()[0])
        ),
        "all on another device": lambda w: [
            x.set_raw_value(jax.device_put(x.get_raw_value(), jax.devices()[3]))
            for x in reachable(w.model)
            if isinstance(x, nnx.Variable) and not is_ref(x.get_raw_value())
        ],
        "value on a mesh": _set_value(
            lambda w: jax.device_put(w.array(), NamedSharding(MESH, P()))
        ),
        "two devices": lambda w: (
            w.model.v.set_raw_value(jax.device_put(w.array(), jax.devices()[1])),
            w.model.w.set_raw_value(jax.device_put(w.array(), jax.devices()[2])),
        ),
    },
    lambda w: w.models.append(w.node(v=w.param(), w=w.param())),
    retraces=None,
)


# Containers

scenarios(
    {
        "list grows": do("list.append", lambda w: w.param()),
        "list shrinks": do("list.pop"),
        "list gets another item": do("list.__setitem__", 0, lambda w: w.node()),
        "list: items swapped": lambda w: swap_parts(w.model.list, "0", w.model.list, "1"),
        "dict grows": do("dict.__setitem__", "c", lambda w: w.param()),
        "dict shrinks": do("dict.__delitem__", "a"),
        "static in a dict": do("dict.__setitem__", "b", "t"),
        "data list grows": do("plain.append", lambda w: w.param()),
        "data list grows inside": lambda w: w.model.plain[1].append(w.array()),
        "data list shrinks": do("plain.pop", 0),
        "data list nests": do(
            "plain.__setitem__", slice(None), lambda w: [[w.model.plain[0]], *w.model.plain[1:]]
        ),
        "data list reversed": do("plain.reverse"),
        "data list: Variable becomes an array": do("plain.__setitem__", 0, lambda w: w.array()),
        "data list: Variable becomes another type": do(
            "plain.__setitem__", 0, lambda w: w.param(nnx.BatchStat)
        ),
        "data list: static string": do("plain.__setitem__", 2, "t"),
        "data list: static from 1 to True": do("plain.__setitem__", 3, True),
        "data dict grows": do("table.update", c=lambda w: w.array()),
        "data dict renamed": do("table.update", c=lambda w: w.model.table.pop("a")),
        "data dict: None becomes a tuple": do(
            "table.update", b=lambda w: (w.model.table["b"][0], ())
        ),
        "data dict: tuple becomes a list": do("table.update", b=lambda w: [*w.model.table["b"]]),
        "data list becomes a tuple": put("plain", lambda w: nnx.data((*w.model.plain,))),
        "named tuple of another type": put("pair", lambda w: nnx.data(Twin(*w.model.pair))),
        "named tuple becomes a tuple": put("pair", lambda w: nnx.data(tuple(w.model.pair))),
        "state grows": do("state.__setitem__", "z", lambda w: w.param()),
        "state shrinks": do("state.__delitem__", "a"),
        "state: Variable replaced by another type": do(
            "state.__setitem__", "a", lambda w: w.param(nnx.BatchStat)
        ),
        "state grows inside": lambda w: w.model.state.raw_mapping["b"].update(d=w.param()),
        "pytree of the user's: static part": put("box.tag", "u"),
        "pytree of the user's: child becomes a list": put(
            "box.value", lambda w: [w.array(), w.array()]
        ),
        "pytree of the user's: child becomes a Variable": put("box.value", lambda w: w.param()),
        "static list grows": do("items.append", 1),
        "static list shrinks": do("items.pop"),
        "static list from 1 to True": do("items.__setitem__", 0, True),
        "static dict grows": do("words.update", c=1),
        "static dict from 1 to True": do("words.update", a=True),
        "static list in a dict grows": lambda w: w.model.words["b"].append(1),
        "static list becomes a tuple": put("items", lambda w: (*w.model.items,)),
    },
    make_containers,
)
scenarios({"list: an item twice": do("list.append", lambda w: w.model.list[0])}, make_containers)
scenarios(
    {
        "data list: Variable by an equal one": do(
            "plain.__setitem__", 0, lambda w: w.model.plain[0].copy()
        ),
        "data list: array changed": lambda w: w.model.plain[1].__setitem__(0, w.array()),
        "data list by an equal one": put("plain", lambda w: nnx.data([*w.model.plain])),
        "data dict reordered": do("table.update", a=lambda w: w.model.table.pop("a")),
        "data dict: array becomes a NumPy array": do(
            "table.update", a=lambda w: np.full((), w.number(), np.float32)
        ),
        "state: Variable by an equal one": do(
            "state.__setitem__", "a", lambda w: w.model.state["a"].copy()
        ),
        "state reordered": do(
            "state.__setitem__", "a", lambda w: w.model.state.raw_mapping.pop("a")
        ),
        "pytree of the user's: array changed": put("box.value", lambda w: w.array()),
        "pytree of the user's by an equal one": put(
            "box", lambda w: nnx.data(Box(w.model.box.value, "t"))
        ),
        "static list by an equal one": put("items", lambda w: [*w.model.items]),
        "static dict by an equal one": put("words", lambda w: dict(w.model.words)),
    },
    make_containers,
    retraces=False,
)
scenarios(
    {"pytree of the user's: static part from 1 to True": put("box.tag", True)},
    lambda w: w.models.append(w.node(box=nnx.data(Box(w.array(), 1)), w=w.param())),
)


# Statics with content, classes that make it hard


def _static_object(name: str, attribute: str, value: Any) -> Callable[[World], None]:
    return lambda w: setattr(vars(w.model)[name], attribute, value)


scenarios(
    {
        "static without a hash, in place": _static_object("bare", "text", "b"),
        "static without a dict, in place": _static_object("slim", "text", "b"),
        "static with a hash of its content, in place": _static_object("value", "text", "b"),
        "static dataclass, in place": _static_object("config", "scale", 2),
        "static dataclass from 1 to True": _static_object("config", "scale", True),
        "static frozen dataclass": put("frozen", FrozenConfig(True)),
        "static object by another one": put("label", Label("a")),
        "static object by one of another type": put("bare", Slim("a")),
        "flag: initializing": put("_pytree__state._initializing", True),
        "flag: set up": put("equal._pytree__state._is_setup", True),
        "flag of a module that is not a pytree": put("loose._pytree__state._initializing", True),
        "static of a module that is always equal": put("equal.k", True),
        "static of a module that cannot be compared": put("never.k", True),
        "static of a module that is not a pytree": put("loose.k", True),
        "class to one that is always equal": lambda w: object.__setattr__(
            w.model.never, "__class__", AlwaysEqual
        ),
        "property": put("measured.size", True),
        "data in a module that is not a pytree": put("loose.v", lambda w: [w.array(), "s"]),
        "record by one with True for 1": put("record", lambda w: Record(w.model.record.w, True)),
        "always equal modules become one": put("equal_too", lambda w: w.model.equal),
        "static object by identity, in place": _static_object("label", "text", "b"),
        "static object that is always equal, in place": _static_object("same", "text", "b"),
        "static object that is always equal, another": put("same", Same("b")),
    },
    make_classes,
    truth=False,
)
scenarios(
    {
        "static object by an equal one": put("value", Value("a")),
        "static without a hash, by an equal one": put("bare", Bare("a")),
        "always equal modules swapped": lambda w: swap_parts(
            w.model, "equal", w.model, "equal_too"
        ),
        "always equal module by another": put("equal", lambda w: nnx.clone(w.model.equal)),
        "record by an equal one": put("record", lambda w: Record(w.param())),
        "model by itself, without hash": put("never", lambda w: w.model.never),
    },
    make_classes,
    retraces=False,
    truth=False,
)


def make_static_contents(w: World) -> None:
    w.models.append(
        w.node(
            frozen=FrozenConfig([1]),
            bare=Bare(np.zeros(2)),
            nested=(1, [2, Config(1)]),
            value=(Value(1), 2),
            values=[Value(1)],
            config=Config(Value(1)),
            label=Label("a"),
            labels=(Label("a"), 1),
            set={1},
            bytes=bytearray(b"ab"),
            space=types.SimpleNamespace(a=1),
            queue=collections.deque([1]),
            ordered=collections.OrderedDict(a=1, b=2),
            box=nnx.data(Box(w.array(), Value("a"))),
            inner=nnx.data(Box((w.array(),), "t")),
            w=w.param(note=Value("a")),
        )
    )


scenarios(
    {
        "list in a frozen dataclass": do("frozen.scale.append", 1),
        "array in a static without a hash": do("bare.text.__setitem__", 0, 1),
        "list in a static tuple": lambda w: w.model.nested[1].append(1),
        "dataclass in a list in a static tuple": lambda w: setattr(
            w.model.nested[1][1], "scale", True
        ),
        "static with a hash of its content in a tuple": lambda w: setattr(
            w.model.value[0], "text", 3
        ),
        "static with a hash of its content in a list": lambda w: setattr(
            w.model.values[0], "text", 3
        ),
        "static with a hash of its content in a dataclass": put("config.scale.text", 3),
        "static with a hash of its content as metadata": lambda w: setattr(
            w.model.w.get_metadata("note"), "text", "b"
        ),
        "class of a static": put("label.__class__", Title),
        "class of a static in a tuple": lambda w: setattr(w.model.labels[0], "__class__", Title),
        "set": do("set.add", 2),
        "set from 1 to True": lambda w: (w.model.set.clear(), w.model.set.add(True)),
        "bytes": do("bytes.append", 3),
        "namespace": put("space.a", 2),
        "queue": do("queue.append", 2),
        "ordered dict": do("ordered.update", a=True),
        "pytree of the user's: tuple in it becomes a list": put(
            "inner.value", lambda w: [*w.model.inner.value]
        ),
        "ordered dict reordered": do("ordered.move_to_end", "a"),
        "from 1 to True in a static that calls them equal": lambda w: setattr(
            w.model.value[0], "text", True
        ),
        "static with a hash of its content in a pytree of the user's": put("box.tag.text", "b"),
    },
    make_static_contents,
)
scenarios(
    {
        "function of a static tuple": put("act", (double, 1)),
        "function of a partial": put("bound", functools.partial(double, 1)),
        "argument of a partial": put("bound", functools.partial(halve, True)),
    },
    lambda w: w.models.append(
        w.node(act=(halve, 1), bound=functools.partial(halve, 1), w=w.param())
    ),
)


# Traces


@scenario(retraces=False)
def variable_of_another_trace(w: World) -> None:
    w.model.v = leaked(lambda value: nnx.Param(value), w.array())


@scenario(retraces=False)
def module_of_another_trace(w: World) -> None:
    new = leaked(lambda value: Node(), None)
    new.__dict__.update({key: x for key, x in vars(w.model).items() if key != "_pytree__state"})
    w.model = new


@scenario(call=lambda w: w.mode(w) if w.mode else call_step(w), retraces=None)
def within_a_trace(w: World) -> None:
    """The model belongs outside, where a call within another trace cannot change it."""
    w.mode = lambda w: jax.jit(lambda x: w.f["step"](w.model, x))(X)


@scenario(
    call=lambda w: w.mode(w) if w.mode else w.f["read"](w.model, X)[:2],
    retraces=None,
)
def read_within_a_trace(w: World) -> None:
    w.mode = lambda w: jax.jit(lambda x: w.f["read"](w.model, x)[:2])(X)


@scenario(
    call=lambda w: w.mode(w) if w.mode else w.f["read"](w.model, X)[1],
    retraces=None,
)
def read_within_a_gradient(w: World) -> None:
    w.mode = lambda w: jax.grad(lambda x: w.f["read"](w.model, x)[1])(X)


@scenario(call=lambda w: w.mode(w) if w.mode else call_step(w), retraces=None)
def new_model_within_a_trace(w: World) -> None:
    graphdef, state = nnx.split(w.model)

    def traced(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return [w.f["step"](model, x) for _ in range(3)], nnx.state(model)

    w.mode = lambda w: jax.jit(traced)(state, X)[0]


@scenario(call=lambda w: w.mode(w) if w.mode else call_step(w), retraces=None)
def tracer_put_into_the_model(w: World) -> None:
    """In place of an array, within a trace; then taken out again."""

    def call(w: World) -> Any:
        def traced(x: Any) -> Any:
            old = vars(w.model)["raw"]
            object.__setattr__(w.model, "raw", x)
            try:
                return w.f["read"](w.model, x)[:2]
            finally:
                object.__setattr__(w.model, "raw", old)

        return jax.jit(traced)(X), w.f["read"](w.model, X)[:2]

    w.mode = call


# Arguments and options


def call_with_mode(w: World) -> Any:
    args, kwargs = w.mode or ((X, 1), {})
    return w.f["static by number"](w.model, *args, **kwargs)


def _arguments(*args: Any, **kwargs: Any) -> Callable[[World], None]:
    return lambda w: setattr(w, "mode", (args, kwargs))


scenarios(
    {
        "static argument from 1 to True": _arguments(X, True),
        "static argument from 1 to 1.0": _arguments(X, 1.0),
        "static argument by keyword": _arguments(X, mode=1),
        "static argument left out": _arguments(X),
        "another static argument": _arguments(X, 1, twice=True),
        "argument by keyword": _arguments(x=X, mode=1),
        "argument left out": _arguments(mode=1),
        "argument of another type": _arguments(1.0, 1),
        "argument None": _arguments(None, 1),
        "argument of another shape": _arguments(jnp.arange(2.0), 1),
        "argument a tuple": _arguments((X, X), 1),
    },
    call=call_with_mode,
)
scenarios(
    {
        "argument a NumPy array": _arguments(np.float32(2), 1),
        "argument of another value": _arguments(X + 1, 1),
    },
    call=call_with_mode,
    retraces=False,
)


@scenario(
    call=lambda w: w.f["static by name"](w.model, **(w.mode or {"x": X, "mode": 1, "twice": 2})),
    retraces=False,
)
def keywords_reordered(w: World) -> None:
    w.mode = {"twice": 2, "mode": 1, "x": X}


@scenario(
    call=lambda w: w.f["static by name"](w.model, **(w.mode or {"x": X, "mode": 1, "twice": 2})),
)
def keywords_exchanged(w: World) -> None:
    w.mode = {"x": X, "mode": 2, "twice": 1}


@scenario(
    lambda w: (make_one(w), setattr(w, "mode", Value("a"))),  # type: ignore[func-returns-value]
    lambda w: w.f["static by name"](w.model, X, mode=w.mode),
)
def static_argument_in_place(w: World) -> None:
    w.mode.text = "b"


def _trees(w: World) -> Any:
    one, two = w.models
    return w.f["step"](w.mode(one, two) if w.mode else {"a": one, "b": [two, X]}, X)


scenarios(
    {
        "tree: another key": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "c": [b, X]}),
        "tree: another container": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "b": (b, X)}),
        "tree: another nesting": lambda w: setattr(w, "mode", lambda a, b: {"a": [a, b], "b": X}),
        "tree: less": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "b": [b]}),
        "tree: one model twice": lambda w: setattr(w, "mode", lambda a, b: {"a": a, "b": [a, X]}),
        "tree: a named tuple": lambda w: setattr(w, "mode", lambda a, b: Pair(a, [b, X])),
        "tree: a part of a model": lambda w: setattr(
            w, "mode", lambda a, b: {"a": a, "b": [a.child, X]}
        ),
    },
    make_models,
    _trees,
)
scenarios(
    {
        "tree: another order": lambda w: setattr(w, "mode", lambda a, b: {"b": [b, X], "a": a}),
        "tree: models exchanged": lambda w: setattr(w, "mode", lambda a, b: {"a": b, "b": [a, X]}),
    },
    make_models,
    _trees,
    retraces=False,
)
scenarios(
    {
        "tree: static in a model": lambda w: setattr(w.models[1].child, "k", True),
        "tree: attribute deleted": lambda w: delattr(w.models[1].child, "k"),
        "tree: Variable shared": lambda w: setattr(w.models[1], "w", w.models[0].w),
    },
    make_models,
    _trees,
)


def each(*names: str) -> Callable[[World], Any]:
    """Calls some functions, one after the other."""
    return lambda w: [w.f[name](w.model, X) for name in names]


scenarios(
    {
        "grow attribute": lambda w: None,
        "grow static": lambda w: None,
        "grow metadata": lambda w: None,
        "grow links": lambda w: None,
        "grow value": lambda w: None,
        "fail": lambda w: None,
        "give": lambda w: None,
    },
    retraces=None,
)
for _name in ("grow attribute", "grow static", "grow metadata", "grow links", "grow value", "give"):
    SCENARIOS[_name] = SCENARIOS[_name]._replace(call=each(_name))


def call_and_fail(w: World) -> Any:
    result = call_step(w)
    if w.f.wrap is not eager:  # a function that fails under jit changes nothing
        failure = attempt(lambda: w.f["fail"](w.model, X))
        assert isinstance(failure, Failure) and failure.kind == "Boom", failure
    return result


SCENARIOS["fail"] = SCENARIOS["fail"]._replace(call=call_and_fail)
scenarios(
    {"other options of the same function": put("b.k", True)},
    call=each("values", "values, no updates", "values, tree"),
    retraces=None,
)
scenarios(
    {"other functions": put("b.k", True)},
    call=each("read", "step", "donated", "grow attribute", "count"),
    retraces=None,
)
scenarios(
    {"a function that changes, then a change": put("b.k", True)},
    call=each("grow static"),
    retraces=None,
)
scenarios(
    {
        "without updates: static": put("b.k", True),
        "without updates: alias": put("v", lambda w: w.model.w),
    },
    call=each("values, no updates"),
)
scenarios(
    {"tree mode: static": put("b.k", True)},
    call=each("values, tree"),
)
scenarios(
    {
        "tree mode: alias": put("v", lambda w: w.model.w),
        "tree mode: cycle": put("me", lambda w: w.model),
    },
    call=each("values, tree"),
    retraces=False,  # refused
)


@scenario(make_methods, lambda w: [w.model.step(X), w.f.Method.step(w.model, X)])
def method(w: World) -> None:
    w.model.child.k = 2


@scenario(make_methods, lambda w: w.model.step(X), retraces=False)
def method_of_another_object(w: World) -> None:
    w.models.reverse()


@scenario(retraces=None)
def cache_cleared(w: World) -> None:
    if w.f.wrap is not eager:
        w.f["step"].clear_cache()


@scenario(retraces=None)
def all_caches_cleared(w: World) -> None:
    jax.clear_caches()


@scenario(retraces=False)
def lowered_between(w: World) -> None:
    if w.f.wrap is not eager:
        w.f["step"].lower(w.model, X)


def _in(context: Callable[[], Any]) -> Callable[[World], None]:
    return lambda w: setattr(w, "mode", context)


def call_in_context(w: World) -> Any:
    with w.mode() if w.mode else contextlib.nullcontext():
        return w.f["count"](w.model, X)


scenarios(
    {
        "without jit": _in(jax.disable_jit),
        "with 64 bits": _in(lambda: jax.enable_x64(True)),
        "on another device": _in(lambda: jax.default_device(jax.devices()[2])),
        "with another precision": _in(lambda: jax.default_matmul_precision("highest")),
        "in a mesh": _in(lambda: jax.set_mesh(MESH)),
        "evaluated at once": _in(jax.ensure_compile_time_eval),
        "in a named scope": _in(lambda: jax.named_scope("scope")),
    },
    call=call_in_context,
    retraces=None,
    counting=True,
)


@scenario(make_models, lambda w: call_threads(w, 0, 0, 0), counting=False, retraces=None)
def two_threads(w: World) -> None:
    for model in w.models:
        model.child.k = True


# Shardings


def call_sharding(name: str) -> Callable[[World], Any]:
    return lambda w: w.f[name](w.model, X)


def call_in_a_mesh(w: World) -> Any:
    with jax.set_mesh(w.mode or MESH):
        return w.f["sharded in context"](w.model, X)


@scenario(make_shardings, call_in_a_mesh)
def mesh_in_context(w: World) -> None:
    for model in w.models:  # not yet on the new mesh
        uncommit(w, w.models.index(model), 0, 0)
    w.mode = FLIPPED


@scenario(make_shardings, call_in_a_mesh, retraces=False)  # refused
def mesh_in_context_with_arrays_of_the_old_one(w: World) -> None:
    w.mode = FLIPPED


@scenario(make_shardings, lambda w: w.mode(w) if w.mode else call_in_a_mesh(w), retraces=False)
def no_mesh_in_context(w: World) -> None:
    w.mode = lambda w: w.f["sharded in context"](w.model, X)


@scenario(make_shardings, call_sharding("sharded by shape"))
def shape_that_a_filter_looks_at(w: World) -> None:
    for name in ("big", "other", "stat"):
        vars(w.model)[name].set_raw_value(jnp.arange(16.0) + w.number())


@scenario(make_shardings, call_sharding("sharded by type"))
def type_that_a_filter_looks_at(w: World) -> None:
    w.model.stat = nnx.Param(np.asarray(w.model.stat.get_raw_value()))


@scenario(make_shardings, call_sharding("sharded"))
def name_that_a_filter_looks_at(w: World) -> None:
    value = np.asarray(w.model.big.get_raw_value())
    del w.model.big
    w.model.large = nnx.Param(value)


scenarios(
    {
        "value that is not yet placed": lambda w: uncommit(w, 0, 1, 0),
        "NumPy value that is not yet placed": lambda w: uncommit(w, 0, 0, 0),
        "value with another sharding": lambda w: lay_out(w, 0, 1, 0),
        "value on one device": lambda w: lay_out(w, 0, 3, 0),
        "value on another device": lambda w: lay_out(w, 0, 4, 0),
        "value with the declared sharding": lambda w: lay_out(w, 0, 0, 0),
        "value of a shape that does not fit": do("big.set_raw_value", jnp.arange(3.0)),
    },
    make_shardings,
    call_sharding("sharded"),
    retraces=None,
)
scenarios(
    {"sharded: static": put("k", True)},
    make_shardings,
    call_sharding("sharded"),
)
scenarios(
    {"donated: values renewed": lambda w: uncommit(w, 0, 1, 0)},
    make_shardings,
    call_sharding("donated"),
    retraces=False,
)


scenarios(
    {"mapped: static": put("k", True)},
    make_shardings,
    call_sharding("mapped"),
)
scenarios(
    {
        "mapped: value of another shape": lambda w: resize(w, 0, 1, 1),
        "mapped: value that is not yet placed": lambda w: uncommit(w, 0, 0, 0),
        "mapped: value with another sharding": lambda w: lay_out_all(w, 0, 1, 0),
        "mapped: value on one device": lambda w: lay_out(w, 0, 3, 0),
    },
    make_shardings,
    call_sharding("mapped"),
    retraces=None,
)


@scenario(make_shardings, lambda w: _in_mesh(w.mode or MESH, w.f["mapped in context"], w.model))
def mapped_over_the_mesh_in_context(w: World) -> None:
    uncommit(w, 0, 0, 0)
    w.mode = FLIPPED


def _in_mesh(mesh: Mesh, function: Any, model: Any) -> Any:
    with jax.set_mesh(mesh):
        return function(model, X)


# Layers


scenarios(
    {
        "eval": lambda w: w.model.eval(),
        "rate of dropout": put("dropout.rate", 0.0),
        "kernels tied": put("two.kernel", lambda w: w.model.one.kernel),
        "layer without a bias": lambda w: new_layer(w, 0, 1, 0),
        "layers with other dtypes": put("one.dtype", jnp.float16),
    },
    make_layers,
    lambda w: call_forward(w, 0, 1, 0),
    truth=False,
)
scenarios(
    {
        "layers swapped": lambda w: swap_layers(w, 0, 0, 0),
        "layers of two models exchanged": lambda w: exchange_layers(w, 0, 0, 0),
        "streams renewed": put("dropout.rngs", lambda w: w.model.dropout.rngs),
    },
    make_layers,
    lambda w: call_forward(w, 0, 1, 0),
    retraces=False,
    truth=False,
)
scenarios(
    {
        "another optimizer": lambda w: new_optimizer(w, 0, 1, 0),
        "eval of a model with an optimizer": lambda w: w.model.eval(),
    },
    make_layers,
    lambda w: call_train(w, 0, 0, 0),
    truth=False,
)
scenarios(
    {
        "a new optimizer of the same kind": lambda w: new_optimizer(w, 0, 0, 0),
        "the optimizer of another model": lambda w: w.kept.reverse(),
    },
    make_layers,
    lambda w: call_train(w, 0, 0, 0),
    truth=False,
    retraces=None,
)
scenarios(
    {"eval, in a gradient": lambda w: w.model.eval()}, make_layers, call_in_gradient, truth=False
)
scenarios({"eval, in nnx.jit": lambda w: w.model.eval()}, make_layers, call_in_jit, truth=False)
