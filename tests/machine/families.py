"""Kinds of model with the changes and calls that suit them, to be mixed at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from graphs import OPERATIONS, Graph, Tag, build

from .calls import CALLS, Action, X, call_donated, choose
from .functions import FLIPPED, FUNCTIONS, MESH
from .mutations import (
    add,
    add_node,
    copy_model,
    delete,
    edit_box,
    edit_class,
    edit_class_static,
    edit_dict,
    edit_frozen,
    edit_held,
    edit_items,
    edit_list,
    edit_many,
    edit_metadata,
    edit_pair,
    edit_plain,
    edit_property,
    edit_raw,
    edit_ref,
    edit_state,
    edit_static_number,
    edit_static_object,
    edit_table,
    edit_type,
    edit_value,
    edit_words,
    exchange,
    flip_status,
    leak,
    link,
    link_cycle,
    link_node,
    link_raw,
    make_aliases,
    make_classes,
    make_containers,
    make_deep,
    make_variables,
    move_last,
    reborn_node,
    reborn_variable,
    rename,
    renew_class,
    renew_container,
    renew_node,
    renew_record,
    renew_static_object,
    renew_variable,
    reorder,
    reset_values,
    restore,
    set_flag,
    set_static,
    share_static,
    swap,
    swap_classes,
    swap_models,
    tidy,
    unlink,
    update_in_two,
    update_model,
    variables_of,
)
from .statics import edit_inside, make_statics, replace_config, step_config
from .views import reachable
from .worlds import World


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.two = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(self.dropout(self.norm(self.one(x))))


def train(model: Any, optimizer: Any, x: Any) -> Any:
    # Its own parameters serve as the gradient: a real one takes four times as long to compile.
    optimizer.update(model, nnx.state(model, nnx.Param))
    return optimizer.step[...], x


def forward(model: Any, x: Any) -> Any:
    return model(x)


# The tests wait for the compiler most of the time.
QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}
FUNCTIONS["train"] = (train, QUICK)
FUNCTIONS["forward"] = (forward, QUICK)
FUNCTIONS["forward, no updates"] = (forward, {"graph_updates": False, **QUICK})
BATCH = np.arange(6, dtype=np.float32).reshape(3, 2) / 4


def make_layers(w: World) -> None:
    for seed in range(2):
        model = Layers(nnx.Rngs(seed))
        w.models.append(model)
        w.kept.append(nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param))
    w.mode = optax.sgd(0.02)


def call_forward(w: World, a: int, b: int, c: int) -> Any:
    name = "forward, no updates" if b % 4 == 0 else "forward"
    return w.f[name](choose(w.models, a), BATCH)


def call_train(w: World, a: int, b: int, c: int) -> Any:
    return w.f["train"](choose(w.models, a), choose(w.kept, a), BATCH)


def set_training(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    if b % 2:
        model.train()
    else:
        model.eval()


def set_rate(w: World, a: int, b: int, c: int) -> None:
    choose(w.models, a).dropout.rate = choose((0.5, 0.0, 0), b)


def tie(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    model.two.kernel = model.one.kernel if b % 2 else model.one.kernel.copy()


def swap_layers(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    model.one, model.two = model.two, model.one


def exchange_layers(w: World, a: int, b: int, c: int) -> None:
    one, two = w.models
    name = choose(("one", "norm", "two"), a)
    first, second = getattr(one, name), getattr(two, name)
    setattr(one, name, second)
    setattr(two, name, first)


def new_layer(w: World, a: int, b: int, c: int) -> None:
    choose(w.models, a).two = nnx.Linear(2, 2, use_bias=b % 2 == 0, rngs=nnx.Rngs(c))


def new_optimizer(w: World, a: int, b: int, c: int) -> None:
    index = a % len(w.models)
    rate = w.mode if b % 2 else RATE
    w.kept[index] = nnx.Optimizer(w.models[index], rate, wrt=nnx.Param)


def reseed(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    model.dropout.rngs = nnx.Rngs(b)["default"].fork() if c % 2 else model.dropout.rngs.fork()


def copy_layers(w: World, a: int, b: int, c: int) -> None:
    copy_model(w, a, b % 4, c)


def update_layers(w: World, a: int, b: int, c: int) -> None:
    nnx.update(w.models[a % 2], nnx.state(w.models[(a + 1) % 2], nnx.Param))


RATE = optax.sgd(0.01)


def call_in_gradient(w: World) -> Any:
    """A function of the library in a gradient of Flax."""
    f = w.f["forward"]
    gradient = nnx.grad(lambda model: jnp.sum(f(model, BATCH)))(w.model)
    return jax.tree.leaves(gradient)


def call_in_jit(w: World) -> Any:
    f = w.f["forward"]
    return nnx.jit(lambda model, x: f(model, x) + 1)(w.model, BATCH)


# Shardings


def make_shardings(w: World) -> None:
    for _ in range(2):
        model = w.node(
            big=nnx.Param(jnp.arange(8.0) + w.number()),
            other=nnx.Param(jnp.arange(8.0) + w.number()),
            stat=nnx.BatchStat(jnp.arange(8.0) + w.number()),
            k=1,
        )
        w.models.append(model)


LAYOUTS: tuple[Callable[[], Any], ...] = (
    lambda: NamedSharding(MESH, P("x")),
    lambda: NamedSharding(MESH, P("y")),
    lambda: NamedSharding(MESH, P()),
    lambda: SingleDeviceSharding(jax.devices()[0]),
    lambda: SingleDeviceSharding(jax.devices()[3]),
)


def lay_out(w: World, a: int, b: int, c: int) -> None:
    variable = choose(variables_of(w), a)
    variable.set_raw_value(jax.device_put(variable.get_raw_value(), choose(LAYOUTS, b)()))


def lay_out_all(w: World, a: int, b: int, c: int) -> None:
    for variable in reachable(choose(w.models, a)):
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(jax.device_put(variable.get_raw_value(), choose(LAYOUTS, b)()))


def uncommit(w: World, a: int, b: int, c: int) -> None:
    """Values that are not placed yet."""
    for variable in reachable(choose(w.models, a)):
        if isinstance(variable, nnx.Variable):
            number = np.asarray(variable.get_raw_value())
            variable.set_raw_value(number if b % 3 == 0 else jnp.array(number))


def resize(w: World, a: int, b: int, c: int) -> None:
    size = (8, 16, 16, 3)[b % 4] if c % 4 == 0 else (8, 16)[b % 2]
    for variable in reachable(choose(w.models, a)):
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(jnp.arange(float(size)) + w.number())


def retype(w: World, a: int, b: int, c: int) -> None:
    model = choose(w.models, a)
    kind = choose((nnx.Param, nnx.BatchStat), b)
    model.other = kind(np.asarray(model.other.get_raw_value()))


def call_sharded(w: World, a: int, b: int, c: int) -> Any:
    names = ("sharded", "sharded by type", "sharded by shape", "mapped")
    return w.f[choose(names, b)](choose(w.models, a), X)


def call_in_mesh(w: World, a: int, b: int, c: int) -> Any:
    name = ("sharded in context", "mapped in context")[c % 2]
    f, model = w.f[name], choose(w.models, a)
    if b % 4 == 3:
        return f(model, X)  # refused
    with jax.set_mesh((MESH, FLIPPED)[b % 2]):
        return f(model, X)


def call_on_device(w: World, a: int, b: int, c: int) -> Any:
    with jax.default_device(jax.devices()[b % 2]):
        return w.f["count"](choose(w.models, a), X)


# Random graphs


def operation(name: str) -> Action:
    def mutate(w: World, a: int, b: int, c: int) -> None:
        objects = reachable(w.models)
        OPERATIONS[name](objects, [], a, b, c)

    return mutate


def make_graph(graph: Graph) -> Callable[[World], None]:
    def make(w: World) -> None:
        w.models += build(graph)

    return make


def call_all(w: World, a: int, b: int, c: int) -> Any:
    return w.f[("step", "read", "grow attribute")[a % 3]](w.models, X)


# Families


class Family(NamedTuple):
    """One kind of model, with what may happen to it.

    Attributes:
      make: fills a world.
      mutations: what may happen between calls.
      calls: the calls, by name; more often what is listed twice.
      truth: whether the plain Python function does the same. It does not where the user breaks
        the rules for statics: then what a call without a guard does is right.
      weight: its share of the tests. Layers take long to compile.
    """

    make: Callable[[World], None]
    mutations: dict[str, Action]
    calls: dict[str, Action]
    truth: bool = True
    weight: float = 1.0


def table(*actions: Action) -> dict[str, Action]:
    return {action.__name__.removeprefix("call_"): action for action in actions}


def calls(*names: str) -> dict[str, Action]:
    return {name: CALLS[name] for name in names}


def make_blocks(w: World) -> None:
    for _ in range(2):
        one, two = w.node(w=w.param(), v=w.param(), k=1), w.node(w=w.param(), k=1)
        w.models.append(w.node(a=one, b=two, w=w.param(), k=1))


def make_methods(w: World) -> None:
    for _ in range(2):
        model = w.f.Method()
        model.w, model.v, model.k = w.param(), w.param(), 1
        model.child = w.node(w=w.param(Tag))
        w.models.append(model)


FAMILIES: dict[str, Family] = {
    "attributes": Family(
        make_blocks,
        table(
            set_static, delete, restore, add, add_node, rename, reorder, swap, exchange, move_last,
            renew_variable, renew_node, reborn_variable, reborn_node,
        ),
        calls("step", "read", "pair", "grow links"),
    ),
    "containers": Family(
        make_containers,
        table(
            edit_list, edit_dict, edit_plain, edit_table, edit_pair, edit_state, edit_box,
            edit_held, edit_items, edit_words, renew_container, make_deep,
        ),
        calls("step", "read", "grow static"),
    ),
    "variables": Family(
        make_variables,
        table(
            edit_value, reset_values, edit_metadata, edit_type, edit_ref, edit_raw, edit_many, leak,
            flip_status,
        ),
        calls("step", "read", "grow metadata", "grow value", "fail"),
    ),
    "aliases": Family(
        make_aliases,
        table(
            link, link_node, link_cycle, unlink, link_raw, tidy, swap_models, copy_model,
            update_model, update_in_two, renew_variable, renew_node,
        ),
        calls("step", "pair", "nested", "part", "mode", "give", "grow links"),
    ),
    "classes": Family(
        make_classes,
        table(
            swap_classes, renew_class, renew_record, edit_class_static, edit_property, edit_class,
            edit_static_object, edit_static_number, renew_static_object, edit_frozen, share_static,
            set_flag,
        ),
        calls("step", "read"),
        truth=False,
    ),
    "statics": Family(
        make_statics,
        table(edit_inside, replace_config, step_config, set_static, copy_model, swap_models),
        calls("step", "read", "pair"),
    ),
    "calls": Family(
        make_methods,
        table(set_static, delete, add, swap_models, copy_model, renew_variable, reorder, link),
        calls(
            "step", "x", "keyword", "static", "method", "threads", "inside", "inside, new",
            "lower", "clear", "fail", "mode", "grow attribute", "donated", "count",
        ),
    ),
    "layers": Family(
        make_layers,
        table(
            set_training, set_rate, tie, swap_layers, exchange_layers, new_layer, new_optimizer,
            reseed, copy_layers, update_layers,
        ),
        table(call_forward, call_train),
        truth=False,  # which differs in the last digits, and after some training in more
        weight=0.4,
    ),
    "shardings": Family(
        make_shardings,
        table(lay_out, lay_out_all, uncommit, resize, retype, set_static, swap_models, reorder),
        table(call_sharded, call_in_mesh, call_donated, call_on_device),
    ),
    "graphs": Family(
        lambda w: None,  # what hypothesis draws
        {
            name: operation(name)
            for name in OPERATIONS
            if name not in ("scale variable", "mix variables", "return object", "return array")
        },
        table(call_all),
        weight=1.3,
    ),
}  # fmt: skip
