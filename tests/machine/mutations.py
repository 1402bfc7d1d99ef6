"""What users do to their objects between two calls.

Each is given a world and numbers; what they choose is taken modulo what there is.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from graphs import Loose, Node, Other, Tag, assign, is_ref

from .calls import choose
from .objects import (
    AlwaysEqual,
    Bare,
    Box,
    Config,
    FrozenConfig,
    Label,
    Lenient,
    Measured,
    NeverEqual,
    Pair,
    Record,
    Same,
    Scale,
    Slim,
    Twin,
    Value,
    Watchful,
    double,
    halve,
)
from .views import attributes, reachable
from .worlds import World


def objects_of(w: World) -> list[Any]:
    return reachable(w.models)


def nodes_of(w: World) -> list[Any]:
    """Modules that may get any attribute."""
    return [x for x in objects_of(w) if type(x) in (Node, Other, Loose) or type(x) is w.f.Method]


def variables_of(w: World) -> list[Any]:
    return [x for x in objects_of(w) if isinstance(x, nnx.Variable)]


def names_of(node: Any, kind: Callable[[Any], bool] = lambda _: True) -> list[str]:
    return [key for key, value, _ in attributes(node) if kind(value)]


def keep(w: World, thing: Any) -> None:
    w.kept = [*w.kept[-2:], thing]


NAMES = ("a", "b", "c", "w")
LIMIT = 14  # objects; a larger graph only takes longer


def set_static(w: World, a: int, b: int, c: int) -> None:
    options = (
        (1, True, 1.0),
        (0.0, -0.0, None),
        ("s", "t", (1, "u"), (True, "u")),
        (double, halve),
    )
    node = choose(nodes_of(w), a)
    if node is not None:
        assign(node, "klmn"[b % 4], choose(options[b % 4], c))


def delete(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node), b)):
        keep(w, vars(node)[name])
        delattr(node, name)


def restore(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and w.kept and len(objects_of(w)) < LIMIT:
        assign(node, choose(NAMES, b), w.kept.pop())


def add(w: World, a: int, b: int, c: int) -> None:
    node, new = choose(nodes_of(w), a), w.param(choose((nnx.Param, nnx.BatchStat), c))
    if node is not None and len(objects_of(w)) < LIMIT:
        assign(node, choose(NAMES, b), new)


def add_node(w: World, a: int, b: int, c: int) -> None:
    node, new = choose(nodes_of(w), a), w.node(w=w.param(), k=1)
    if node is not None and len(objects_of(w)) < LIMIT:
        assign(node, choose(NAMES, b), new)


def rename(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node), b)):
        value = vars(node)[name]
        delattr(node, name)
        assign(node, choose(NAMES, c), value)


def reorder(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node), b)):
        value = vars(node)[name]
        delattr(node, name)
        assign(node, name, value)


def swap(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (names := names_of(node)):
        one, two = choose(names, b), choose(names, c)
        first, second = vars(node)[one], vars(node)[two]
        assign(node, one, second)
        assign(node, two, first)


def exchange(w: World, a: int, b: int, c: int) -> None:
    """Attributes of two modules."""
    nodes = nodes_of(w)
    one, two = choose(nodes, a), choose(nodes, b)
    common = [key for key in names_of(one) if key in vars(two)] if nodes else []
    if name := choose(common, c):
        first, second = vars(one)[name], vars(two)[name]
        assign(one, name, second)
        assign(two, name, first)


def move_last(w: World, a: int, b: int, c: int) -> None:
    """So that the attributes of both modules, one after the other, look as before."""
    nodes = nodes_of(w)
    one, two = choose(nodes, a), choose(nodes, a + 1)
    if one is not two and (names := names_of(one)):
        value = vars(one)[names[-1]]
        delattr(one, names[-1])
        assign(two, "A", value)


def renew_variable(w: World, a: int, b: int, c: int) -> None:
    """An equal one in its place; others that hold it keep it."""
    node = choose(nodes_of(w), a)
    if node is not None:
        names = names_of(node, lambda x: isinstance(x, nnx.Variable))
        if name := choose(names, b):
            assign(node, name, vars(node)[name].copy())


def renew_node(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None:
        names = names_of(node, lambda x: isinstance(x, nnx.Pytree))
        if name := choose(names, b):
            assign(node, name, nnx.clone(vars(node)[name]))


# Freed memory is used again when what was freed later is used up. More would take longer.
TRIES = 5_000


def new_at(address: int, kind: type) -> Any:
    """A new object without content: at this address, if Python can be brought to it."""
    others = []
    for _ in range(TRIES):
        new: Any = object.__new__(kind)
        if id(new) == address:
            break
        others.append(new)
    return new


def fill(new: Any, *args: Any, **attributes: Any) -> None:
    """Gives a new object its content: a Variable its value and metadata, a module attributes."""
    if isinstance(new, nnx.Variable):
        new.__init__(*args, **attributes)  # type: ignore[misc]
        return
    vars(new).update(vars(type(new)()))
    for name, value in attributes.items():
        setattr(new, name, value)


def reborn(node: Any, name: str, kind: type, *args: Any, **attributes: Any) -> None:
    """Deletes an attribute and sets a new object, at the address of the old one if possible."""
    address = id(vars(node)[name])
    delattr(node, name)
    new = new_at(address, kind)
    fill(new, *args, **attributes)
    assign(node, name, new)


def reborn_variable(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node, _is_variable), b)):
        reborn(node, name, nnx.Param, w.array(), mark=c % 2)


def reborn_node(w: World, a: int, b: int, c: int) -> None:
    node = choose(nodes_of(w), a)
    if node is not None and (name := choose(names_of(node, _is_plain_node), b)):
        reborn(node, name, (Node, Other)[c % 2], w=w.param())


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_plain_node(x: Any) -> bool:
    return type(x) in (Node, Other)


# Containers


def make_containers(w: World) -> None:
    for _ in range(2):
        w.models.append(
            w.node(
                list=nnx.List([w.param(), w.node(w=w.param()), 7]),
                dict=nnx.Dict(a=w.param(), b="s"),
                plain=nnx.data([w.param(), [w.array()], "s", 1]),
                table=nnx.data({"a": w.array(), "b": (w.param(), None)}),
                pair=nnx.data(Pair(w.array(), w.param())),
                state=nnx.data(nnx.State({"a": w.param(), "b": {"c": w.param()}})),
                box=nnx.data(Box(w.array(), "t")),
                held=nnx.Param({"x": w.array(), "y": (w.array(),)}),
                items=nnx.static([1, "s"]),
                words=nnx.static({"a": 1, "b": [2]}),
            )
        )


def edit_list(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).list
    match b % 5:
        case 0 if len(own) < 4:
            own.append(w.param())
        case 1 if len(own):
            keep(w, own.pop())
        case 2 if len(own):
            own[c % len(own)] = w.param()
        case 3 if len(own) > 1:
            own[0], own[1] = own[1], own[0]
        case 4 if len(own) < 4:
            own.insert(c % 3, w.node(w=w.param()))


def edit_dict(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).dict
    name = choose("abc", b)
    if name in own:
        del own[name]
    own_value: Any = (None, w.param(), "s", "t", w.node(w=w.param()))[c % 5]
    if own_value is not None:
        own[name] = own_value


def edit_plain(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).plain
    match b % 7:
        case 0 if len(own) < 5:
            own.append(w.param())
        case 1 if len(own) > 1:
            own.pop()
        case 2:
            own[0] = (w.param(), w.array(), np.float32(w.number()), "s", 1)[c % 5]
        case 3:
            own.reverse()
        case 4:  # the leaves stay, but not what they are in
            own[:] = [[own[0]], *own[1:]] if not isinstance(own[0], list) else [*own[0], *own[1:]]
        case 5 if 1 in own or True in own:
            own[own.index(1)] = (1, True, 1.0)[c % 3]
        case 6:
            for index, part in enumerate(own):
                if isinstance(part, str):
                    own[index] = "st"[c % 2]


def edit_table(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).table
    match b % 5:
        case 0:
            own["abc"[c % 3]] = w.array()
        case 1:
            own.pop("abc"[c % 3], None)
        case 2:
            own["b"] = ((w.param(), None), (w.param(), ()), [w.param(), None])[c % 3]
        case 3 if own:
            name = sorted(own)[0]
            own["abc"[c % 3]] = own.pop(name)
        case 4:  # only the order
            for name in sorted(own, reverse=c % 2 == 0):
                own[name] = own.pop(name)


def edit_pair(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    kind = (Pair, Twin, lambda x, y: (x, y))[b % 3]
    m.pair = nnx.data(kind(*m.pair) if c % 2 else kind(m.pair[1], m.pair[0]))


def edit_state(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).state
    match b % 3:
        case 0:
            own["ad"[c % 2]] = w.param()
        case 1:
            if "ad"[c % 2] in own:
                del own["ad"[c % 2]]
        case 2:
            own.raw_mapping["b"] = {"c": w.param()} if c % 2 else w.param()


def edit_box(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).box
    match b % 3:
        case 0:
            own.tag = "tu"[c % 2]
        case 1:
            own.value = w.param() if c % 2 else w.array()
        case 2:
            own.value = [w.array(), w.param()] if c % 2 else w.array()


def edit_held(w: World, a: int, b: int, c: int) -> None:
    held = choose(w.models, a).held
    one, two = w.array(), w.array()
    options: list[Any] = [
        {"x": one, "y": (two,)},
        {"x": one, "y": (two, one)},
        {"x": one, "z": (two,)},
        {"x": one, "y": [two]},
        (one, two),
        [one, two],
        one,
        {"x": w.array((2,)), "y": (two,)},
    ]
    if b % 3 == 0 and isinstance(held.get_raw_value(), dict):  # in place
        held.get_raw_value()["x"] = options[c % 2]["x"]
        held.get_raw_value()["y"] = options[c % 3].get("y", (one,))
    else:
        held.set_raw_value(choose(options, c))


def edit_items(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).items
    match b % 3:
        case 0 if len(own) < 3:
            own.append((1, True, "s")[c % 3])
        case 1 if len(own) > 1:
            own.pop()
        case 2:
            own[0] = (1, True, 1.0, -1)[c % 4]


def edit_words(w: World, a: int, b: int, c: int) -> None:
    own = choose(w.models, a).words
    match b % 4:
        case 0:
            own["ac"[c % 2]] = 1
        case 1:
            own.pop("ac"[c % 2], None)
        case 2:
            own["b"][:] = [2] * (c % 3)
        case 3:
            own["a"] = (1, True, 1.0)[c % 3]


def renew_container(w: World, a: int, b: int, c: int) -> None:
    """An equal container, with the same parts."""
    m = choose(w.models, a)
    name = choose(("plain", "table", "state", "box", "items", "words"), b)
    value = vars(m)[name]
    if isinstance(value, nnx.State):
        new: Any = nnx.State(dict(value.raw_mapping))
    else:
        new = copy.copy(value)
    setattr(m, name, new)


def make_deep(w: World, a: int, b: int, c: int) -> None:
    """A container in a container becomes a node, or the node a container."""
    m = choose(w.models, a)
    if isinstance(vars(m).get("deep"), nnx.Pytree):
        m.deep = nnx.data({"w": m.deep.w})
    elif "deep" in vars(m):
        m.deep = w.node(w=m.deep["w"])
    else:
        m.deep = w.node(w=w.param())


# Variables


def make_variables(w: World) -> None:
    for _ in range(2):
        w.models.append(
            w.node(
                u=w.param(note="n"),
                v=w.param(nnx.BatchStat),
                t=w.param(Tag, mark=1),
                r=nnx.Variable(w.array(), ref=True),
                raw=w.array(),
                numpy=np.full((), w.number(), np.float32),
                scalar=nnx.data(2.0),
                many=nnx.Param((w.array(), w.array())),
                k=1,
            )
        )


def _value(w: World, kind: int) -> Any:
    number = w.number()
    options: list[Any] = [
        jnp.float32(number),
        np.asarray(number, np.float32),
        number,
        int(number),
        jnp.asarray(number),  # a weak type
        jnp.int32(number),
        jnp.full(2, number),
        jnp.float16(number),
        np.float32(number),
        bool(number % 2),
        jax.device_put(jnp.float32(number), jax.devices()[0]),
    ]
    return choose(options, kind)


def _own(w: World, a: int, names: str = "uvt") -> Any:
    """One Variable of one model, if it is still there."""
    own = vars(choose(w.models, a)).get(choose(names, a // 2))
    return own if isinstance(own, nnx.Variable) else nnx.Param(0.0)


def edit_value(w: World, a: int, b: int, c: int) -> None:
    _own(w, a).set_raw_value(_value(w, b))


def reset_values(w: World, a: int, b: int, c: int) -> None:
    """Plain arrays everywhere, so that not everything is of another kind all the time."""
    for m in w.models:
        for name in "uvt":
            if isinstance(vars(m).get(name), nnx.Variable):
                vars(m)[name].set_raw_value(w.array())


def edit_metadata(w: World, a: int, b: int, c: int) -> None:
    own = _own(w, a)
    match b % 6:
        case 0:
            own.set_metadata(note=choose((1, True, 1.0, "n", [1], {"a": 1}, np.arange(2)), c))
        case 1:
            own.set_metadata("mark", choose((1, True, 0.0, -0.0), c))
        case 2:
            for name in ("note", "mark")[: c % 3]:
                if own.has_metadata(name):
                    own.del_metadata(name)
        case 3:
            own.set_metadata({"note": "n"} if c % 2 else {})
        case 4:
            note = own.get_metadata().get("note")
            if isinstance(note, list):
                note.append(c % 2)
            elif isinstance(note, dict):
                note["a"] = (1, True)[c % 2]
            elif isinstance(note, np.ndarray):
                note[0] = c % 2
        case 5:
            own.set_metadata(dict(reversed(own.get_metadata().items())))


def edit_type(w: World, a: int, b: int, c: int) -> None:
    m, name = choose(w.models, a), choose("uvt", b)
    own = vars(m).get(name)
    if isinstance(own, nnx.Variable):
        kind = choose((nnx.Param, nnx.BatchStat, Scale), c)
        if a // 2 % 2:
            own.__class__ = kind
        else:
            setattr(m, name, kind.from_metadata(own.get_raw_value(), own.get_metadata()))


def edit_ref(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    match b % 4:
        case 0 if m.u._can_update:
            m.r = nnx.Variable(w.array(), ref=True)
        case 1:
            m.r = nnx.Variable(w.array())
        case 2:
            m.r[...] = w.array()
        case 3:  # one ref in two Variables
            raw = m.r.get_raw_value()
            if is_ref(raw):
                m.s = nnx.Variable.from_metadata(raw, m.r.get_metadata())
            elif "s" in vars(m):
                del m.s


def edit_raw(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    name = choose(("raw", "numpy", "scalar"), b)
    own = vars(m).get(name)
    if c % 12 == 11:
        setattr(m, name, nnx.Param(w.array()))
    elif not isinstance(own, jax.Array) or c % 2:
        setattr(m, name, nnx.data(_value(w, c)))
    else:
        setattr(m, name, w.array())


def edit_many(w: World, a: int, b: int, c: int) -> None:
    choose(w.models, a).many.set_raw_value(tuple(w.array() for _ in range(b % 4)))


def leak(w: World, a: int, b: int, c: int) -> None:
    """A Variable of another trace, with a value of this one; or an end to it."""
    m = choose(w.models, a)
    if not m.u._can_update:
        m.u = m.u.copy()
    elif c % 3 == 0:
        # A call that cannot update it fails after it ran, when refs have changed already.
        m.r = nnx.Variable(w.array())
        if "s" in vars(m):
            del m.s
        m.u = leaked(lambda value: nnx.Param(value, note="n"), w.array())


def leaked(make: Callable[[Any], Any], value: Any) -> Any:
    made: list[Any] = []

    def traced() -> Any:
        made.append(make(value))
        return jnp.zeros(())

    jax.eval_shape(traced)
    return made[0]


def flip_status(w: World, a: int, b: int, c: int) -> None:
    """A number is data or static."""
    choose(w.models, a).flip = nnx.data(3) if b % 2 else nnx.static(3)


# Aliases


def make_aliases(w: World) -> None:
    for _ in range(2):
        left, right = w.node(w=w.param(), v=w.param()), w.node(w=w.param(), v=w.param())
        w.models.append(w.node(left=left, right=right, w=w.param(), raw=w.array()))


def link(w: World, a: int, b: int, c: int) -> None:
    """One Variable in two places, of one model or of two."""
    nodes, variables = nodes_of(w), variables_of(w)
    if variables:
        assign(choose(nodes, a), choose("wv", b), choose(variables, c))


def link_node(w: World, a: int, b: int, c: int) -> None:
    nodes = nodes_of(w)
    assign(choose(nodes, a), choose(("left", "right", "up"), b), choose(nodes, c))


def link_cycle(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    targets = [m, *(x for x in vars(m).values() if type(x) is Node)]
    assign(choose(targets, b), "up", choose(targets, c))


def unlink(w: World, a: int, b: int, c: int) -> None:
    """A shared object gets a copy in one of its places."""
    m = choose(w.models, a)
    for child in (m, *(x for x in vars(m).values() if type(x) is Node)):
        if "up" in vars(child) and b % 2:
            del child.up
        if isinstance(vars(child).get("w"), nnx.Variable):
            child.w = child.w.copy()


def link_raw(w: World, a: int, b: int, c: int) -> None:
    """One array in two places, which is not an alias."""
    nodes, raw = nodes_of(w), w.array()
    for number in (a, b)[: 1 + c % 2]:
        assign(choose(nodes, number), "raw", raw)


def tidy(w: World, a: int, b: int, c: int) -> None:
    """New models, in place of those that have become one knot."""
    del w.models[:], w.kept[:]
    make_aliases(w)


def swap_models(w: World, a: int, b: int, c: int) -> None:
    w.models.reverse()


def copy_model(w: World, a: int, b: int, c: int) -> None:
    ways: tuple[Callable[[Any], Any], ...] = (
        nnx.clone,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: nnx.merge(*nnx.split(m)),
        copy.copy,
    )
    index = a % len(w.models)
    w.models[index] = choose(ways, b)(w.models[index])


def update_model(w: World, a: int, b: int, c: int) -> None:
    one, two = choose(w.models, a), choose(w.models, b)
    nnx.update(one, jax.tree.map(lambda x: x + 1, nnx.state(two)))


def update_in_two(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    graphdef, state = nnx.split(m)
    nnx.update(m, state)
    if b % 3 == 0:
        w.models[a % len(w.models)] = nnx.merge(graphdef, state)


# Classes


def make_classes(w: World) -> None:
    for _ in range(2):
        model = Node()
        for name, kind in CLASSES.items():
            child = kind()
            child.w = w.param()
            child.k = 1
            setattr(model, name, child)
        model.record = Record(w.param())
        model.label, model.value, model.same = Label("a"), Value("a"), Same("a")
        model.bare, model.slim, model.config = Bare("a"), Slim("a"), Config()
        model.frozen = FrozenConfig(1)
        w.models.append(model)


CLASSES: dict[str, type] = {
    "equal": AlwaysEqual,
    "equal_too": AlwaysEqual,
    "never": NeverEqual,
    "watchful": Watchful,
    "measured": Measured,
    "lenient": Lenient,
    "loose": Loose,
}


def swap_classes(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    names = [name for name in CLASSES if name != "loose"]
    one, two = choose(names, b), choose(names, c)
    first, second = vars(m)[one], vars(m)[two]
    setattr(m, one, second)
    setattr(m, two, first)


def renew_class(w: World, a: int, b: int, c: int) -> None:
    """Another object that calls itself equal."""
    m, name = choose(w.models, a), choose([*CLASSES], b)
    old = vars(m)[name]
    new = type(old)()
    new.w, new.k = w.param() if c % 2 else old.w, vars(old)["k"]
    setattr(m, name, new)


def renew_record(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    m.record = Record(m.record.w.copy() if b % 2 else m.record.w, choose((1, True), c))


def edit_class_static(w: World, a: int, b: int, c: int) -> None:
    child = vars(choose(w.models, a))[choose(("equal", "never", "loose", "record"), b)]
    child.k = choose((1, True), c)


def edit_property(w: World, a: int, b: int, c: int) -> None:
    child = choose(w.models, a).measured
    if isinstance(child, Measured):
        child.size = choose((1, True, 0.0, -0.0), b)


def edit_class(w: World, a: int, b: int, c: int) -> None:
    child = vars(choose(w.models, a))[choose([*CLASSES][:6], b)]
    object.__setattr__(child, "__class__", choose((AlwaysEqual, NeverEqual, Measured, Other), c))


STATIC_OBJECTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "label": (Label, "text"),
    "value": (Value, "text"),
    "same": (Same, "text"),
    "bare": (Bare, "text"),
    "slim": (Slim, "text"),
    "config": (Config, "scale"),
}


def edit_static_object(w: World, a: int, b: int, c: int) -> None:
    """In place."""
    name = choose([*STATIC_OBJECTS], b)
    setattr(vars(choose(w.models, a))[name], STATIC_OBJECTS[name][1], choose("ab", c))


def edit_static_number(w: World, a: int, b: int, c: int) -> None:
    """In place: numbers that are equal, and not the same."""
    m = choose(w.models, a)
    match b % 3:
        case 0:
            m.config.scale = choose((1, True, 0.0, -0.0), c)
        case 1:
            m.slim.text = choose((1, True), c)
        case 2:
            m.bare.text = choose((np.zeros(2), np.ones(2)), c)


def renew_static_object(w: World, a: int, b: int, c: int) -> None:
    name = choose([*STATIC_OBJECTS], b)
    setattr(choose(w.models, a), name, STATIC_OBJECTS[name][0](choose("ab", c)))


def edit_frozen(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    if isinstance(m.frozen.scale, list) and b % 2:
        m.frozen.scale.append(c % 2)
        del m.frozen.scale[:-2]
    else:
        m.frozen = FrozenConfig(choose((1, True, [1], [True]), c))


def share_static(w: World, a: int, b: int, c: int) -> None:
    one, two = w.models
    name = choose([*STATIC_OBJECTS], b)
    setattr(one, name, vars(two)[name])


def set_flag(w: World, a: int, b: int, c: int) -> None:
    m = choose(w.models, a)
    state = (m, m.equal, m.loose)[b % 3]._pytree__state
    if c % 3:
        state._initializing = not state._initializing
    else:
        state._is_setup = not state._is_setup
