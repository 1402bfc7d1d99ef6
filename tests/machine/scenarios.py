"""Each kind of change alone: attributes, identity, types, aliases, metadata."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from graphs import Node, Other, Tag

from .calls import X
from .mutations import fill, new_at, reborn
from .objects import Pair, Scale, Twin, double, halve
from .worlds import Functions3, World, Worlds


class Scenario(NamedTuple):
    """Three calls, one change, two calls.

    Attributes:
      mutate: the change.
      make: fills a world.
      call: the call.
      retraces: whether a call that splits its arguments traces again after the change. None where
        that depends on more.
      truth: whether the plain Python function does the same.
      counting: whether the number of traces is compared.
    """

    mutate: Callable[[World], Any]
    make: Callable[[World], None]
    call: Callable[[World], Any]
    retraces: bool | None = True
    truth: bool = True
    counting: bool = True


SCENARIOS: dict[str, Scenario] = {}


def make_one(w: World) -> None:
    one = w.node(w=w.param(), z=w.param(), k=1)
    two = w.node(w=w.param(), k=1)
    model = w.node(a=one, b=two, w=w.param(), v=w.param(), k=1, f=double)
    model.raw, model.plain, model.tag = w.array(), Other(), w.param(Tag, mark=1)
    model.plain.w = w.param()
    w.models.append(model)


def call_step(w: World) -> Any:
    return w.f["step"](w.model, X)


def scenario(
    make: Callable[[World], None] = make_one,
    call: Callable[[World], Any] = call_step,
    **options: Any,
) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    """Adds a scenario, named after its change."""

    def add(mutate: Callable[[World], Any]) -> Callable[[World], Any]:
        name = mutate.__name__.strip("_")
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(mutate, make, call, **options)
        return mutate

    return add


def scenarios(
    changes: Mapping[str, Callable[[World], Any]],
    make: Callable[[World], None] = make_one,
    call: Callable[[World], Any] = call_step,
    **options: Any,
) -> None:
    """Adds several that are alike."""
    for name, mutate in changes.items():
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(mutate, make, call, **options)


def run_scenario(name: str) -> None:
    """Runs one scenario.

    Raises:
      AssertionError: a call did something else than one that splits its arguments, or than Python.
    """
    own = SCENARIOS[name]
    worlds = Worlds(Functions3.new(own.truth), own.make, counting=own.counting)
    for _ in range(3):
        worlds.call(own.call)
    failure = worlds.mutate(own.mutate)
    assert failure is None, failure
    traces = [worlds.call(own.call) for _ in range(2)]
    if own.retraces is not None and own.counting:
        assert bool(traces[0]) == own.retraces, f"traces without a guard: {traces}"


def put(path: str, value: Any) -> Callable[[World], None]:
    """Sets an attribute below the model: to the value, or to what a lambda makes for the world."""
    *parents, name = path.split(".")

    def mutate(w: World) -> None:
        target, new = functools.reduce(getattr, parents, w.model), _made(w, value)
        if isinstance(target, nnx.Pytree) and not isinstance(new, dataclasses.Field):
            status = target._pytree__nodes.get(name)
            if name in vars(target) and status != nnx.is_data(new):
                delattr(target, name)
        setattr(target, name, new)

    return mutate


def do(path: str, *args: Any, **kwargs: Any) -> Callable[[World], None]:
    """Calls a method of something below the model."""

    def mutate(w: World) -> None:
        method = functools.reduce(getattr, path.split("."), w.model)
        method(*(_made(w, arg) for arg in args), **{k: _made(w, x) for k, x in kwargs.items()})

    return mutate


def _made(w: World, value: Any) -> Any:
    is_lambda = isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"
    return value(w) if is_lambda else value


# Attributes

scenarios(
    {
        "attribute added": put("new", lambda w: w.param()),
        "static attribute added": put("new", 1),
        "module added": put("new", lambda w: w.node(w=w.param())),
        "raw array added": put("new", lambda w: w.array()),
        "attribute deleted": do("__delattr__", "v"),
        "last attribute deleted": do("__delattr__", "w"),
        "static attribute deleted": do("__delattr__", "k"),
        "module deleted": do("__delattr__", "a"),
        "static from 1 to True": put("k", True),
        "static from 1 to 1.0": put("k", 1.0),
        "static from 1 to 2": put("k", 2),
        "static from 1 to None": put("k", None),
        "static from 1 to a string": put("k", "1"),
        "static from 1 to a tuple": put("k", (1,)),
        "static function": put("f", halve),
        "static becomes a Variable": put("k", lambda w: w.param()),
        "static becomes a module": put("k", lambda w: w.node()),
        "Variable becomes static": put("v", 1),
        "Variable becomes a raw array": put("v", lambda w: w.array()),
        "raw array becomes a Variable": put("raw", lambda w: w.param()),
        "Variable becomes a module": put("v", lambda w: w.node(w=w.param())),
        "module becomes a Variable": put("a", lambda w: w.param()),
        "module of another type": put("plain", lambda w: w.node(w=w.param())),
        "static of a child": put("b.k", True),
    }
)


@scenario()
def attribute_renamed(w: World) -> None:
    value = w.model.v
    del w.model.v
    w.model.u = value


@scenario()
def static_attribute_renamed(w: World) -> None:
    del w.model.k
    w.model.m = 1


@scenario(retraces=False)
def attributes_reordered(w: World) -> None:
    for name in ("v", "a", "k"):
        value = vars(w.model)[name]
        delattr(w.model, name)
        setattr(w.model, name, value)


@scenario(retraces=False)
def attributes_swapped(w: World) -> None:
    w.model.w, w.model.v = w.model.v, w.model.w


@scenario()
def modules_swapped(w: World) -> None:
    w.model.a, w.model.b = w.model.b, w.model.a


@scenario(retraces=False)
def equal_modules_swapped(w: World) -> None:
    del w.model.a.z
    w.model.a, w.model.b = w.model.b, w.model.a


SCENARIOS["equal_modules_swapped"] = SCENARIOS["equal_modules_swapped"]._replace(
    make=lambda w: w.models.append(w.node(a=w.node(w=w.param()), b=w.node(w=w.param()))),
    mutate=lambda w: swap_parts(w.model, "a", w.model, "b"),
)


def swap_parts(one: Any, name: str, two: Any, other: str) -> None:
    first, second = vars(one)[name], vars(two)[other]
    setattr(one, name, second)
    setattr(two, other, first)


@scenario(retraces=False)
def attributes_of_two_modules_swapped(w: World) -> None:
    swap_parts(w.model.a, "w", w.model.b, "w")


@scenario()
def last_attribute_moved_to_the_next_module(w: World) -> None:
    value = w.model.a.z
    del w.model.a.z
    w.model.b.a = value


@scenario()
def static_moved_to_another_module(w: World) -> None:
    del w.model.a.k
    w.model.plain.k = 1


@scenario()
def dotted_names(w: World) -> None:
    """Names that together look as before."""
    setattr(w.model.a, "z.w", w.model.a.z)
    del w.model.a.z


@scenario(lambda w: w.models.append(w.node(zero=0.0, w=w.param())))
def static_from_0_to_minus_0(w: World) -> None:
    w.model.zero = -0.0


@scenario(lambda w: w.models.append(w.node(pair=(1, ("a", 0.0)), w=w.param())))
def static_in_a_tuple(w: World) -> None:
    w.model.pair = (1, ("a", -0.0))


@scenario(
    lambda w: w.models.append(w.node(pair=(1, ("a", 0.0)), w=w.param())),
    retraces=False,
)
def static_tuple_by_an_equal_one(w: World) -> None:
    w.model.pair = (int("1"), ("a", float("0")))


@scenario(lambda w: w.models.append(w.node(pair=Pair(1, 2), w=w.param())))
def static_named_tuple_of_another_type(w: World) -> None:
    w.model.pair = Twin(1, 2)


@scenario()
def number_becomes_data(w: World) -> None:
    del w.model.k
    w.model.k = nnx.data(1)


@scenario(lambda w: w.models.append(w.node(w=w.param(), k=nnx.data(1))))
def number_becomes_static(w: World) -> None:
    w.model.k = nnx.static(1)


@scenario(
    lambda w: w.models.append(w.node(w=w.param(), k=nnx.data(1))),
    retraces=False,
)
def data_number_changed(w: World) -> None:
    w.model.k = 3


# Identity

scenarios(
    {
        "Variable by an equal one": put("v", lambda w: w.model.v.copy()),
        "Variable by one with another value": put("v", lambda w: w.param()),
        "module by an equal one": put("a", lambda w: nnx.clone(w.model.a)),
        "child by its copy": put("a", lambda w: copy.deepcopy(w.model.a)),
        "model by its clone": lambda w: setattr(w, "model", nnx.clone(w.model)),
        "model by its copy": lambda w: setattr(w, "model", copy.deepcopy(w.model)),
        "model by its shallow copy": lambda w: setattr(w, "model", copy.copy(w.model)),
        "model by itself, pickled": lambda w: setattr(
            w, "model", pickle.loads(pickle.dumps(w.model))
        ),
        "model split and merged": lambda w: setattr(w, "model", nnx.merge(*nnx.split(w.model))),
        "model updated from a state": lambda w: nnx.update(
            w.model, jax.tree.map(lambda x: x + 1, nnx.state(w.model))
        ),
        "nothing": lambda w: None,
    },
    retraces=False,
)


def make_models(w: World) -> None:
    for _ in range(2):
        w.models.append(w.node(w=w.param(), child=w.node(w=w.param(), k=1)))


scenarios(
    {
        "another model of the same structure": lambda w: w.models.reverse(),
        "children of two models exchanged": lambda w: swap_parts(
            w.models[0], "child", w.models[1], "child"
        ),
        "a child that belongs to another model, too": lambda w: setattr(
            w.models[0], "child", w.models[1].child
        ),
    },
    make_models,
    retraces=False,
)


@scenario(make_models)
def another_model_of_another_structure(w: World) -> None:
    w.models.reverse()
    w.model.child.k = True


scenarios(
    {
        "other attributes at the address of the old module": lambda w: reborn(
            w.model, "plain", Other, v=w.param()
        ),
        "other static at the address of the old module": lambda w: reborn(
            w.model, "plain", Other, w=w.param(), k=1
        ),
        "module of another type at the address of the old one": lambda w: reborn(
            w.model, "plain", Node, w=w.param()
        ),
        "metadata at the address of the old Variable": lambda w: reborn(
            w.model, "v", nnx.Param, w.array(), mark=1
        ),
        "type at the address of the old Variable": lambda w: reborn(
            w.model, "v", nnx.BatchStat, w.array()
        ),
    }
)
scenarios(
    {
        "module at the address of the old one": lambda w: reborn(
            w.model, "plain", Other, w=w.param()
        ),
        "Variable at the address of the old one": lambda w: reborn(
            w.model, "v", nnx.Param, w.array()
        ),
    },
    retraces=False,
)


@scenario(lambda w: w.models.append(w.node(w=w.param(), k=1)))
def model_at_the_address_of_the_old_one(w: World) -> None:
    address = id(w.model)
    w.models.clear()
    new = new_at(address, Node)
    fill(new, w=w.param(), k=True)
    w.models.append(new)


# Types

scenarios(
    {
        "class of a module": lambda w: object.__setattr__(w.model.plain, "__class__", Node),
        "class of the model": lambda w: object.__setattr__(w.model, "__class__", Other),
        "class of a Variable": put("v.__class__", nnx.BatchStat),
        "class of a Variable, to a subclass": put("v.__class__", Scale),
        "Variable by one of another type": put(
            "v",
            lambda w: nnx.BatchStat.from_metadata(
                w.model.v.get_raw_value(), w.model.v.get_metadata()
            ),
        ),
    }
)


# Aliases


def make_alias(w: World) -> None:
    shared, child = w.param(), w.node(w=w.param())
    w.models.append(
        w.node(a=w.node(w=shared, v=w.param()), w=shared, one=child, two=child, v=w.param())
    )
    w.model.a.up = w.model


scenarios(
    {
        "alias broken": put("w", lambda w: w.model.w.copy()),
        "alias made": put("v", lambda w: w.model.a.v),
        "alias of another Variable": put("w", lambda w: w.model.a.v),
        "module alias broken": put("two", lambda w: nnx.clone(w.model.two)),
        "module alias made": put("one", lambda w: w.model.a),
        "cycle broken": do("a.__delattr__", "up"),
        "cycle to another module": put("a.up", lambda w: w.model.one),
        "cycle made": put("one.up", lambda w: w.model),
        "cycle to itself": put("me", lambda w: w.model),
        "cycle to a copy": put("a.up", lambda w: nnx.clone(w.model.one)),
    },
    make_alias,
)


@scenario(make_alias, retraces=False)
def aliases_exchanged(w: World) -> None:
    """Another Variable is shared in the same places."""
    w.model.w = w.model.a.w = w.param()


@scenario(retraces=False)
def one_array_in_two_variables(w: World) -> None:
    w.model.v.set_raw_value(w.model.w.get_raw_value())


@scenario(retraces=False)
def one_array_in_a_variable_and_an_attribute(w: World) -> None:
    w.model.raw = w.model.w.get_raw_value()


def call_two(w: World) -> Any:
    return w.f["pair"](*w.models, X)


scenarios(
    {
        "Variable shared between arguments": lambda w: setattr(w.models[1], "w", w.models[0].w),
        "module shared between arguments": lambda w: setattr(
            w.models[1], "child", w.models[0].child
        ),
        "one model twice": lambda w: w.models.__setitem__(1, w.models[0]),
        "child as argument": lambda w: w.models.__setitem__(1, w.models[0].child),
        "Variable as argument": lambda w: w.models.__setitem__(1, w.models[0].w),
        "arguments that point to each other": lambda w: (
            setattr(w.models[0], "up", w.models[1]),
            setattr(w.models[1], "up", w.models[0]),
        ),
    },
    make_models,
    call_two,
)
scenarios(
    {"arguments exchanged": lambda w: w.models.reverse()}, make_models, call_two, retraces=False
)


@scenario(
    lambda w: w.models.extend([w.node(w=w.param())] * 2),
    call_two,
)
def no_longer_one_model_twice(w: World) -> None:
    w.models[1] = nnx.clone(w.models[0])


# Metadata


def make_metadata(w: World) -> None:
    v = w.param(mark=1, zero=0.0, items=[1, [2]], table={"a": 1}, array=np.arange(2), name="n")
    w.models.append(w.node(v=v, w=w.param()))


def _metadata(w: World) -> dict[str, Any]:
    return w.model.v.get_metadata()


scenarios(
    {
        "metadata added": do("v.set_metadata", new=1),
        "metadata deleted": do("v.del_metadata", "mark"),
        "metadata renamed": do(
            "v.set_metadata",
            lambda w: {"note" if key == "mark" else key: x for key, x in _metadata(w).items()},
        ),
        "metadata from 1 to True": do("v.set_metadata", mark=True),
        "metadata from 1 to 2": do("v.set_metadata", "mark", 2),
        "metadata from 0 to minus 0": do("v.set_metadata", zero=-0.0),
        "metadata string": do("v.set_metadata", name="m"),
        "metadata list edited": lambda w: _metadata(w)["items"].append(1),
        "metadata list in a list edited": lambda w: _metadata(w)["items"][1].append(1),
        "metadata list from 1 to True": lambda w: _metadata(w)["items"].__setitem__(0, True),
        "metadata dict edited": lambda w: _metadata(w)["table"].update(a=True),
        "metadata array edited": lambda w: _metadata(w)["array"].__setitem__(0, 7),
        "metadata replaced": do("v.set_metadata", {}),
        "metadata moved": lambda w: (
            w.model.v.del_metadata("mark"),
            w.model.w.set_metadata(mark=1),
        ),
        "eager sharding": do("v.set_metadata", "eager_sharding", False),
    },
    make_metadata,
)
scenarios(
    {
        "metadata by an equal dict": do("v.set_metadata", lambda w: _metadata(w)),
        "metadata reordered": do("v.set_metadata", lambda w: dict(reversed(_metadata(w).items()))),
        "metadata list by an equal one": do("v.set_metadata", items=[1, [2]]),
    },
    make_metadata,
    retraces=False,
)
