"""A call computes with what its function can reach at that call, whatever was traced before.

Each way in which a function can reach a value is tried with each transform, in each surrounding:
the function is called, what it reaches is changed, and it is called again. Eager Python is right.
"""

import abc
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import inspect
import itertools
import logging
import operator
import os
import pathlib
import random
import sys
import tempfile
import threading
import types
import weakref

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import configurations
import nnx_sharding
from nnx_sharding import Carry
from nnx_sharding.core.fingerprint import fingerprint_of
from nnx_sharding.transforms import by_content
from zoo import compilations

# Ways: each is a generator function. It yields a function of an argument `layer` and a number x,
# and is then sent one value after the other, with which that function multiplies x.

WAYS = {}


def way(*kinds):
    """Registers a way for values of these kinds: Python numbers, NumPy arrays, arrays of JAX."""

    def register(make):
        WAYS[make.__name__] = make, kinds or ("number", "numpy", "array")
        return make

    return register


class Plain:
    """An object that knows nothing of JAX."""

    scale = 1.0

    def __init__(self, scale=1.0):
        self.own = scale

    def method(self, layer, x):
        return self.own * x


class Slotted:
    __slots__ = ("own",)


@dataclasses.dataclass(frozen=True)
class Config:
    scale: object

    def method(self, layer, x):
        return self.scale * x


Point = collections.namedtuple("Point", "scale")
GLOBAL = 1.0
CONTEXT = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
MODULE = types.ModuleType("a_module_of_the_user")
sys.modules[MODULE.__name__] = MODULE


def reads_global(layer, x):
    return GLOBAL * x


def set_global(value):
    global GLOBAL
    GLOBAL = value


@way()
def default():
    def fun(layer, x, scale=1.0):
        return scale * x

    value = yield fun
    while True:
        fun.__defaults__ = (value,)
        value = yield


@way()
def keyword_default():
    def fun(layer, x, *, scale=1.0):
        return scale * x

    value = yield fun
    while True:
        fun.__kwdefaults__["scale"] = value
        value = yield


@way()
def closure():
    scale = yield lambda layer, x: scale * x
    while True:
        scale = yield


@way()
def closure_of_a_called_function():
    def inner(x):
        return scale * x

    scale = yield lambda layer, x: inner(x)
    while True:
        scale = yield


@way()
def global_variable():
    value = yield reads_global
    while True:
        set_global(value)
        value = yield


@way()
def global_of_a_called_function():
    value = yield lambda layer, x: reads_global(None, x)
    while True:
        set_global(value)
        value = yield


@way()
def function_attribute():
    def fun(layer, x):
        return fun.scale * x

    value = yield fun
    while True:
        fun.scale = value
        value = yield


@way()
def code():
    def fun(layer, x):
        return scale * x

    def other(layer, x):
        return (scale + 0.0) * x

    scale = yield fun
    while True:
        fun.__code__, other.__code__ = other.__code__, fun.__code__
        scale = yield


@way()
def object_attribute():
    plain = Plain()
    value = yield lambda layer, x: plain.own * x
    while True:
        plain.own = value
        value = yield


@way()
def object_in_an_object():
    plain = Plain(Plain())
    value = yield lambda layer, x: plain.own.own * x
    while True:
        plain.own.own = value
        value = yield


@way()
def slot():
    slotted = Slotted()
    value = yield lambda layer, x: slotted.own * x
    while True:
        slotted.own = value
        value = yield


@way()
def bound_method():
    plain = Plain()
    value = yield plain.method
    while True:
        plain.own = value
        value = yield


@way()
def captured_bound_method():
    plain = Plain()
    method = plain.method
    value = yield lambda layer, x: method(layer, x)
    while True:
        plain.own = value
        value = yield


@way()
def frozen_dataclass():
    config = Config(1.0)
    value = yield lambda layer, x: config.method(layer, x)
    while True:
        config = Config(value)
        value = yield


@way()
def named_tuple():
    point = Point(1.0)
    value = yield lambda layer, x: point.scale * x
    while True:
        point = Point(value)
        value = yield


@way()
def dict_item():
    settings = {"a": [1.0]}
    value = yield lambda layer, x: settings["a"][0] * x
    while True:
        settings["a"][0] = value
        value = yield


@way()
def ordered_dict():
    settings = collections.OrderedDict(scale=1.0)
    value = yield lambda layer, x: settings["scale"] * x
    while True:
        settings["scale"] = value
        value = yield


@way("number")
def set_item():
    settings = {1.0}
    value = yield lambda layer, x: max(settings) * x
    while True:
        settings.clear()
        settings.add(value)
        value = yield


@way()
def deque_item():
    settings = collections.deque([1.0])
    value = yield lambda layer, x: settings[0] * x
    while True:
        settings[0] = value
        value = yield


@way("number")
def numpy_in_place():
    array = np.ones(())
    value = yield lambda layer, x: float(array) * x  # JAX does not copy arrays in constants
    while True:
        array[...] = value
        value = yield


@way("number", "array")
def variable():
    scale = None
    value = yield lambda layer, x: scale[...] * x
    for count in itertools.count():
        array = jnp.asarray(value, jnp.float32)
        if count % 3:
            scale.set_value(array)
        else:  # of another trace
            scale = nnx.Variable(array)
        value = yield


@way("number", "array")
def module_variable():
    dense = None
    value = yield lambda layer, x: dense(x)
    for count in itertools.count():
        if count % 3:
            dense.scale.set_value(jnp.asarray(value, jnp.float32))
        else:  # of another trace
            dense = Layer(value)
        value = yield


@way("number")
def module_attribute():
    dense = None
    value = yield lambda layer, x: dense.setting * x
    for count in itertools.count():
        if count % 3 == 0:  # of another trace
            dense = Layer()
        dense.setting = value
        value = yield


@way()
def another_module():
    dense = Layer()
    value = yield lambda layer, x: dense(x)
    while True:
        dense = Layer(value)
        value = yield


@way()
def partial_argument():
    def fun(scale, layer, x):
        return scale[0] * x

    given = [1.0]
    value = yield functools.partial(fun, given)
    while True:
        given[0] = value
        value = yield


@way()
def partial_keyword():
    def fun(layer, x, scale):
        return scale * x

    partial = functools.partial(fun, scale=1.0)
    value = yield partial
    while True:
        partial.keywords["scale"] = value
        value = yield


@way()
def wrapped():
    @functools.wraps(jnp.tanh)  # whose names it takes
    def fun(layer, x):
        return scale * x

    scale = yield fun
    while True:
        scale = yield


@way()
def wrapped_by_a_library():
    def inner(x):
        return scale * x

    scale = yield lambda layer, x: jax.vmap(inner)(x[None])[0]
    while True:
        scale = yield


@way()
def lifted():
    @nnx_sharding.remat
    def inner(x):
        return scale * x

    scale = yield lambda layer, x: inner(x)
    while True:
        scale = yield


@way("number")  # JAX lets no tracers into these
def custom_derivative():
    @jax.custom_jvp
    def inner(x):
        return scale * x

    inner.defjvp(lambda primals, tangents: (scale * primals[0], scale * tangents[0]))
    scale = yield lambda layer, x: inner(x)
    while True:
        scale = yield


@way()
def class_attribute():
    class Own(Plain):
        pass

    value = yield lambda layer, x: Own.scale * x
    while True:
        Own.scale = value
        value = yield


@way()
def base_class_attribute():
    class Base:
        scale = 1.0

    class Own(Base):
        pass

    value = yield lambda layer, x: Own().scale * x
    while True:
        Base.scale = value
        value = yield


@way()
def method_of_a_class():
    class Own:
        def method(self, x):
            return x

    value = yield lambda layer, x: Own().method(x)
    while True:
        Own.method = lambda self, x, value=value: value * x
        value = yield


@way()
def property_of_a_class():
    class Own:
        @property
        def scale(self):
            return scale

    scale = yield lambda layer, x: Own().scale * x
    while True:
        scale = yield


@way()
def static_method():
    class Own:
        @staticmethod
        def method(x):
            return scale * x

        @classmethod
        def other(cls, x):
            return cls.method(x)

    scale = yield lambda layer, x: Own.other(x)
    while True:
        scale = yield


@way()
def subclasses():
    class Base:
        pass

    children = []  # keeps them alive
    value = yield lambda layer, x: Base.__subclasses__()[-1].scale * x
    while True:
        children.append(type("Child", (Base,), {"scale": value}))
        value = yield


@way("number")
def name_of_a_class():
    class Named:
        pass

    value = yield lambda layer, x: float(Named.__name__) * x
    while True:
        Named.__name__ = str(value)
        value = yield


@way("number")
def name_of_a_function():
    def named():
        pass

    value = yield lambda layer, x: float(named.__name__) * x
    while True:
        named.__name__ = str(value)
        value = yield


@way("number")
def enumeration():
    class Own(enum.Enum):
        SCALE = 1.0

        def method(self, x):
            return scale * x

    scale = yield lambda layer, x: Own.SCALE.method(x)
    while True:
        scale = yield


@way()
def attribute_of_a_python_module():
    value = yield lambda layer, x: MODULE.scale * x
    while True:
        MODULE.scale = value
        value = yield


@way()
def attribute_by_name():
    value = yield lambda layer, x: getattr(MODULE, "sc" + "ale") * x
    while True:
        MODULE.scale = value
        value = yield


@way()
def attribute_by_an_attrgetter():
    make = operator.attrgetter
    value = yield lambda layer, x: make("no_code_" + "names_this")(MODULE) * x
    while True:
        MODULE.no_code_names_this = value
        value = yield


@way()
def attribute_by_getattr_static():
    value = yield lambda layer, x: inspect.getattr_static(MODULE, "no_code_" + "names_this") * x
    while True:
        MODULE.no_code_names_this = value
        value = yield


@way()
def attribute_of_a_class_that_a_library_made():
    """Its ``__module__`` is that of the library: ``types``, or ``abc``."""
    made = types.new_class("Made"), abc.ABCMeta("Also", (), {})
    value = yield lambda layer, x: made[0].scale * made[1].scale * x
    while True:
        made[0].scale, made[1].scale = value, 1.0
        value = yield


@way()
def attribute_in_the_dict_of_a_python_module():
    value = yield lambda layer, x: MODULE.__dict__["hidden"] * x  # a name that no other code has
    while True:
        MODULE.hidden = value
        value = yield


@way()
def attribute_that_a_python_module_computes():
    scales = []
    lazy = types.ModuleType("a_lazy_module_of_the_user")
    lazy.__getattr__ = lambda name: scales[-1]
    value = yield lambda layer, x: lazy.scale * x
    while True:
        scales.append(value)
        value = yield


@way()
def import_from_a_package():
    # A module of the user that has the name of one of Python, from which `fun` imports.
    package, own = (types.ModuleType(name) for name in ("a_package", "a_package.types"))
    package.__path__ = []
    sys.modules.update({module.__name__: module for module in (package, own)})
    scope = {"__package__": "a_package"}
    exec("def fun(layer, x):\n    from .types import SCALE\n    return SCALE * x", scope)
    value = yield scope["fun"]
    while True:
        own.SCALE = value
        value = yield


@way()
def method_in_c():
    item = (1.0,).__getitem__
    value = yield lambda layer, x: item(0) * x
    while True:
        item = (value,).__getitem__
        value = yield


@way()
def context_variable():
    value = yield lambda layer, x: CONTEXT.get() * x
    while True:
        CONTEXT.set(value)
        value = yield


@way()
def thread_local():
    value = yield lambda layer, x: LOCAL.scale * x
    while True:
        LOCAL.scale = value
        value = yield


@way("number")
def environment():
    value = yield lambda layer, x: float(os.environ["SCALE_OF_A_TEST"]) * x
    while True:
        os.environ["SCALE_OF_A_TEST"] = str(value)
        value = yield


@way("number")
def file_of_a_path():
    handle, name = tempfile.mkstemp()
    os.close(handle)
    path = pathlib.Path(name)
    try:
        value = yield lambda layer, x: float(path.read_text()) * x
        while True:
            path.write_text(str(value))
            value = yield
    finally:
        path.unlink()


@way("number")
def random_numbers():
    value = yield lambda layer, x: random.random() * x
    while True:
        random.seed(value)
        value = yield


@way("number")
def random_numbers_of_numpy():
    value = yield lambda layer, x: np.random.rand() * x
    while True:
        np.random.seed(int(value))
        value = yield


@way()
def argument_method():
    value = yield lambda layer, x: layer.reads_a_global(x)
    while True:
        set_global(value)
        value = yield


@way()
def argument_class():
    value = yield lambda layer, x: layer.factor * x
    while True:
        Layer.factor = value
        value = yield


@way()
def argument_setting():
    def setting(x):
        return scale * x

    scale = yield lambda layer, x: layer.function(x), setting
    while True:
        scale = yield


@way()
def argument_setting_that_is_a_python_module():
    value = yield lambda layer, x: layer.function.scale * x, MODULE
    while True:
        MODULE.scale = value
        value = yield


class Layer(nnx.Module):
    """The module among the arguments, and one that is captured."""

    factor = 1.0

    def __init__(self, scale=1.0, function=None):
        self.scale = nnx.Variable(jnp.asarray(scale, jnp.float32))
        self.setting = 1.0
        self.function = function

    def __call__(self, x):
        return self.scale[...] * x

    def reads_a_global(self, x):
        return reads_global(None, x)


# Transforms: each calls a function of a layer and a number, and returns a number.


def eager(fun):
    return fun


def jit(fun):
    return nnx_sharding.jit(fun)


def remat(fun):
    return nnx_sharding.remat(fun)


def remat_anew(fun):
    return lambda layer, x: nnx_sharding.remat(fun)(layer, x)


def vmap(fun):
    run = nnx_sharding.vmap(fun, in_axes=(None, 0))
    return lambda layer, x: run(layer, x[None])[0]


def scan(fun):
    run = nnx_sharding.scan(
        lambda carry, layer: (fun(layer, carry), carry), length=1, in_axes=(Carry, None)
    )
    return lambda layer, x: run(x, layer)[0]


def scan_of_the_function(fun):
    run = nnx_sharding.scan(fun, in_axes=(None, Carry), out_axes=Carry, length=1)
    return run


def ignore_layer(layer, x):
    return x


def cond(fun):
    return lambda layer, x: nnx_sharding.cond(x == x, fun, ignore_layer, layer, x)


def switch(fun):
    return lambda layer, x: nnx_sharding.switch(jnp.int32(1), [ignore_layer, fun], layer, x)


def while_loop(fun):
    def below(carry):
        return carry[0] < 1

    def body(carry):
        return carry[0] + 1, carry[1], fun(carry[1], carry[2])

    return lambda layer, x: nnx_sharding.while_loop(below, body, (0, layer, x))[2]


def fori_loop(fun):
    def body(i, carry):
        return carry[0], fun(*carry)

    return lambda layer, x: nnx_sharding.fori_loop(0, 1, body, (layer, x))[1]


def fori_loop_of_unknown_length(fun):
    def body(i, carry):
        return carry[0], fun(*carry)

    return lambda layer, x: nnx_sharding.fori_loop(0, jnp.int32(x == x), body, (layer, x))[1]


def grad(fun):
    run = nnx_sharding.grad(fun, argnums=1)
    return lambda layer, x: x * run(layer, x)


def value_and_grad(fun):
    run = nnx_sharding.value_and_grad(fun, argnums=1)
    return lambda layer, x: run(layer, x)[0]


def vjp(fun):
    return lambda layer, x: nnx_sharding.vjp(fun, layer, x)[0]


def jvp(fun):
    return lambda layer, x: x * nnx_sharding.jvp(lambda x: fun(layer, x), (x,), (1.0 + 0 * x,))[1]


def linearize(fun):
    return lambda layer, x: nnx_sharding.linearize(lambda x: fun(layer, x), x)[1](x)


def custom_vjp(fun):
    run = nnx_sharding.custom_vjp(fun)
    run.defvjp(lambda layer, x: (fun(layer, x), None), lambda _, g: (None, g[1]))
    return run


def custom_jvp(fun):
    run = nnx_sharding.custom_jvp(fun)
    run.defjvp(lambda primals, tangents: (fun(*primals), fun(primals[0], tangents[1])))
    return run


def rule_of_custom_jvp(fun):
    run = nnx_sharding.custom_jvp(lambda layer, x: x)
    run.defjvp(lambda primals, tangents: (primals[1], fun(primals[0], tangents[1])))
    return lambda layer, x: nnx_sharding.jvp(lambda x: run(layer, x), (x,), (x,))[1]


def condition_of_while_loop(fun):
    def below(carry):
        return carry[0] < fun(carry[1], jnp.float32(1))

    def body(carry):
        return carry[0] + 1, carry[1]

    return lambda layer, x: nnx_sharding.while_loop(below, body, (0, layer))[0] * x


def checkify(fun):
    run = nnx_sharding.checkify(fun)
    return lambda layer, x: run(layer, x)[1]


def shard_map(fun):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    run = nnx_sharding.shard_map(fun, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return lambda layer, x: run(layer, x)


def make_jaxpr(fun):
    run = nnx_sharding.make_jaxpr(fun)

    def evaluated(layer, x):
        closed = run(layer, x)
        return jax.extend.core.jaxpr_as_fun(closed)(*jax.tree.leaves(layer), x)[0]

    return evaluated


def eval_shape(fun):
    def shaped(layer, x):
        return jnp.zeros(int(100 * fun(None, 1.0)))

    return lambda layer, x: len(nnx_sharding.eval_shape(shaped, layer, x).shape) * x


def stacked(fun):
    class Block(nnx.Module):
        def __init__(self):
            self.layer = Layer()

        def __call__(self, x):
            return fun(self.layer, x)

    stack = nnx_sharding.stack([Block()])
    return lambda layer, x: stack(x)


def scan_of_a_stack(fun):
    stack = nnx_sharding.stack([Layer()])

    def step(layer, carry):
        return fun(layer, carry), None

    return lambda layer, x: stack.scan(step, x)[0]


TRANSFORMS = (
    *(remat, remat_anew, vmap, scan, scan_of_the_function, cond, switch, while_loop, fori_loop),
    *(fori_loop_of_unknown_length, grad, value_and_grad, vjp, jvp, linearize, custom_vjp),
    *(custom_jvp, rule_of_custom_jvp, condition_of_while_loop),
    *(checkify, shard_map, make_jaxpr, stacked, scan_of_a_stack, jit),
)
# Each calls a function of x, which returns three numbers, in a trace or in none.


def in_a_stack(fun, x):
    class Block(nnx.Module):
        def __call__(self, xs):
            return fun(xs[0])

    return nnx_sharding.stack([Block()])((x, x, x))


def in_while_loop(fun, x):
    def body(carry):
        return carry[0] + 1, fun(carry[1][0])

    return nnx_sharding.while_loop(lambda carry: carry[0] < 1, body, (0, (x, x, x)))[1]


def in_custom_vjp(fun, x):
    run = nnx_sharding.custom_vjp(lambda x: fun(x))
    run.defvjp(lambda x: (fun(x), None), lambda _, g: (x,))
    return run(x)


def in_shard_map(fun, x):
    mesh = jax.make_mesh((2,), ("y",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    return nnx_sharding.shard_map(lambda x: fun(x), **options)(x)


def first(tree):
    return jax.tree.map(lambda y: y[0], tree)


SURROUNDINGS = {
    "top level": lambda fun, x: fun(x),
    "jax.jit": lambda fun, x: jax.jit(lambda x: fun(x))(x),
    "nnx.jit": lambda fun, x: nnx.jit(lambda x: fun(x))(x),
    "jit": lambda fun, x: nnx_sharding.jit(lambda x: fun(x))(x),
    "remat": lambda fun, x: nnx_sharding.remat(lambda x: fun(x))(x),
    "grad": lambda fun, x: nnx_sharding.grad(lambda x: (x, fun(x)), has_aux=True)(x)[1],
    "vjp": lambda fun, x: nnx_sharding.vjp(lambda x: (x, fun(x)), x, has_aux=True)[2],
    "jvp": lambda fun, x: nnx_sharding.jvp(lambda x: fun(x), (x,), (x,))[0],
    "linearize": lambda fun, x: nnx_sharding.linearize(lambda x: fun(x), x)[0],
    "custom_vjp": in_custom_vjp,
    "vmap": lambda fun, x: first(nnx_sharding.vmap(lambda x: fun(x))(x[None])),
    "scan": lambda fun, x: first(
        nnx_sharding.scan(lambda x: fun(x), in_axes=0, out_axes=0)(x[None])
    ),
    "cond": lambda fun, x: nnx_sharding.cond(x == x, lambda x: fun(x), lambda x: (x, x, x), x),
    "switch": lambda fun, x: nnx_sharding.switch(
        jnp.int32(0), [lambda x: fun(x), lambda x: (x, x, x)], x
    ),
    "while_loop": in_while_loop,
    "fori_loop": lambda fun, x: nnx_sharding.fori_loop(0, 1, lambda i, xs: fun(xs[0]), (x, x, x)),
    "checkify": lambda fun, x: nnx_sharding.checkify(lambda x: fun(x))(x)[1],
    "shard_map": in_shard_map,
    "stack": in_a_stack,
    # All functions here are linear, so that their derivative times x is what they return.
    "derivative": lambda fun, x: tuple(x * slope for slope in jax.jacrev(fun)(x)),
}
LOOPS_OF_UNKNOWN_LENGTH = while_loop, fori_loop_of_unknown_length, condition_of_while_loop


def exists(name, transform, surrounding, kind):
    """Whether a cell is a program at all."""
    if transform is jit and surrounding in ("top level", "custom_vjp"):
        return False  # not in a trace, so it keeps what it captured, as jax.jit does
    if transform is custom_vjp and surrounding in ("jvp", "linearize"):
        return False  # it has no forward mode
    custom = custom_vjp, custom_jvp, rule_of_custom_jvp
    derivatives = "grad", "vjp", "jvp", "linearize", "custom_vjp", "derivative"
    if transform in custom and kind == "array" and surrounding in derivatives:
        return False  # JAX lets no tracers of derivatives into these
    if surrounding == "derivative" and transform in (*LOOPS_OF_UNKNOWN_LENGTH, custom_vjp):
        return False  # without reverse mode, or with a derivative of its own
    if transform in (condition_of_while_loop, custom_jvp) and name.startswith("random_"):
        return False  # no numbers of steps, and others in the rule than in the function
    if transform is shard_map and surrounding == "shard_map":
        return False  # over another mesh
    unbound = ("default", "keyword_default", "partial_keyword", "wrapped")
    if transform in (custom_vjp, custom_jvp) and name in unbound:
        return False  # its rules get all arguments by position
    if name.startswith("argument_setting") and transform in (stacked, scan_of_a_stack):
        return False  # their layers are no arguments
    if transform is while_loop and surrounding == "grad":
        return False
    return not (kind == "numpy" and name in ("variable", "module_variable"))


def cells():
    for name, (_, kinds) in WAYS.items():
        for transform, surrounding, kind in itertools.product(TRANSFORMS, SURROUNDINGS, kinds):
            if exists(name, transform, surrounding, kind):
                yield name, transform, surrounding, kind


def value_of(kind, number, x):
    """A value of a kind; in a trace, an array is one that only that trace knows."""
    if kind == "number":
        return number
    return np.float32(number) * np.ones(()) if kind == "numpy" else jnp.float32(number) + 0 * x


def results(name, transform, surrounding, kind, *, is_eager):
    """What three calls return, between which the value is changed and changed back."""
    make, _ = WAYS[name]
    reader = make()
    fun = next(reader)
    fun, setting = fun if isinstance(fun, tuple) else (fun, None)
    layer = Layer(function=setting)
    run = fun if is_eager else transform(fun)

    def three_calls(x):
        outputs = []
        for number in (2.0, 3.0, 2.0):
            reader.send(value_of(kind, number, x))
            outputs.append(run(layer, x))
        return tuple(outputs)

    x = jnp.float32(1.5)
    if surrounding == "top level":
        return three_calls(x)
    return three_calls(x) if is_eager else SURROUNDINGS[surrounding](three_calls, x)


def check(cell):
    expected = results(*cell, is_eager=True)
    found = results(*cell, is_eager=False)
    np.testing.assert_allclose(
        [float(y) for y in found], [float(y) for y in expected], rtol=1e-6, err_msg=str(cell)
    )


CELLS = [*cells()]


@pytest.fixture(autouse=True)
def without_values_of_other_tests():
    set_global(1.0)
    Layer.factor = MODULE.scale = 1.0


@pytest.mark.parametrize("name", WAYS)
def test_each_way(name):
    check(random.choice([cell for cell in CELLS if cell[0] == name]))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_transform(transform):
    check(random.choice([cell for cell in CELLS if cell[1] is transform]))


@pytest.mark.parametrize("name", WAYS)
def test_a_hundred_cells(name):
    """Five thousand of all cells, of which there are some 50,000."""
    of_way = [cell for cell in CELLS if cell[0] == name]
    for cell in random.sample(of_way, min(100, len(of_way))):
        check(cell)


# Filters that the user gives as functions, which read what they reach as the functions do.


class Pair(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))


class Pairs(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.b(jnp.tanh(self.a(x))).sum())


def of_shapes(pair):
    """A number that differs if another one of both arrays has lost its dimension, or a part."""
    return jnp.float32(2 * pair.a.size + pair.b.size)


def vmap_by_filter(chosen):
    run = nnx_sharding.vmap(of_shapes, in_axes=nnx_sharding.StateAxes({chosen: 0, ...: None}))
    return lambda: run(Pair())[0]


def vmap_of_results_by_filter(chosen):
    axes = nnx_sharding.StateAxes({chosen: 0, ...: None})
    run = nnx_sharding.vmap(Pair, out_axes=axes, axis_size=3)
    return lambda: of_shapes(run())


def scan_by_filter(chosen):
    axes = Carry, nnx_sharding.StateAxes({chosen: 0, ...: None})
    run = nnx_sharding.scan(lambda carry, pair: (carry, of_shapes(pair)), in_axes=axes)
    return lambda: run(0.0, Pair())[1][0]


def shard_map_by_filter(chosen):
    mesh = jax.make_mesh((2,), ("z",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = nnx_sharding.StateSharding({chosen: P("z"), ...: P()})
    options = {"mesh": mesh, "in_specs": specs, "out_specs": P(), "check_vma": False}
    run = nnx_sharding.shard_map(of_shapes, **options)
    return lambda: run(Pair())


def grad_by_filter(chosen):
    run = nnx_sharding.grad(lambda pair: pair.a.sum() + pair.b.sum(), wrt=chosen)
    return lambda: 1.0 if "a" in run(Pair()) else 0.0


def remat_by_filter(chosen):
    run = nnx_sharding.remat(lambda pairs, x: pairs(x), policy={chosen: "save"})
    residuals = nnx_sharding.make_jaxpr(nnx_sharding.grad(run, argnums=1))

    def named():
        text = str(residuals(Pairs(), jnp.ones((1, 2))))
        first, last = text.index("name["), text.rindex("tanh")
        return float(text.count("dot_general", 0, first)) + 0.0 * last

    return named


BY_FILTER = (
    *(vmap_by_filter, vmap_of_results_by_filter, scan_by_filter, shard_map_by_filter),
    *(grad_by_filter, remat_by_filter),
)


def results_by_filter(transform, name, surrounding):
    """What three calls return, and what they would if the filter was given anew in each."""
    reader = WAYS[name][0]()
    fun = next(reader)

    def chosen(path, _):
        with jax.ensure_compile_time_eval():  # a filter decides while a function is traced
            return (fun(None, 1.0) > 2.5) == ("a" in path)

    numbers = 2.0, 3.0, 2.0
    expected = [transform(lambda path, _, n=n: (n > 2.5) == ("a" in path))() for n in numbers]
    run = transform(chosen)

    def three_calls(x):
        found = []
        for number in numbers:
            reader.send(number)
            found.append(x * run())
        return tuple(found)

    return SURROUNDINGS[surrounding](three_calls, jnp.float32(1)), expected


@pytest.mark.parametrize("transform", BY_FILTER)
@pytest.mark.parametrize("is_nested", (False, True))
def test_each_transform_by_a_filter(transform, is_nested):
    """A filter may be a function that reads a global, and choose otherwise in the next call."""
    # No arguments, nor what is an array of a trace: a filter decides while a function is traced.
    others = "argument_", "random_", "variable", "module_variable", "another_module", "wrapped_by"
    names = [name for name in WAYS if not name.startswith(others)]
    surrounding = random.choice([*SURROUNDINGS][1:]) if is_nested else "top level"
    cell = transform, random.choice(names), surrounding
    found, expected = results_by_filter(*cell)
    assert expected[0] != expected[1]
    assert [*map(float, found)] == [*map(float, expected)], cell


# What is used again, and what cannot be listed.


def key(*values):
    return fingerprint_of(values)


def test_equal_as_long_as_nothing_changes():
    plain, settings = Plain(2.0), {"scale": [1.0]}

    class Abstract(abc.ABC):  # noqa: B024
        pass

    def fun(layer, x):
        if isinstance(plain, Abstract):
            return x
        return jnp.tanh(x) * plain.own * settings["scale"][0] + reads_global(layer, x)

    set_global(1.0)
    first = key(fun, Layer)
    assert first is not None
    assert first == key(fun, Layer)
    assert hash(first) == hash(key(fun, Layer))
    for change in (
        lambda: setattr(plain, "own", 3.0),
        lambda: settings["scale"].append(1.0),
        lambda: settings.update(other=1),
        lambda: set_global(1),  # no longer a float
        lambda: setattr(Plain, "scale", 5.0),
        lambda: setattr(Plain, "__doc__", "Changed."),
        lambda: Abstract.register(Slotted),
    ):
        change()
        second = key(fun, Layer)
        assert second is not None
        assert first != second
        first = second
    Plain.scale = 1.0


class Registry(type):
    pass


class Registered(metaclass=Registry):
    size = 3

    def __init__(self, array):
        self.array = array


LISTED = {
    "numbers": lambda: (1, 2.5, 1j, True, None, "text", b"bytes", ...),
    "numpy scalar": lambda: np.float32(1),
    "dtype": lambda: jnp.bfloat16,
    "containers": lambda: [(1,), {"a": {2}}, frozenset({3}), collections.deque([4])],
    "mesh": lambda: jax.make_mesh((1,), ("x",)),
    "function of jax": lambda: jax.nn.gelu,
    "optimizer": lambda: __import__("optax").adam(1e-3),
    "initializer": nnx.initializers.lecun_normal,
    "dataclass": lambda: Config(1.0),
    "metaclass": lambda: Registered(3),
    "logger": lambda: __import__("logging").getLogger("a"),
    "cycle": lambda: (lambda x: (x.append(x), x)[1])([]),
    "namedtuple": lambda: Point(3),
    "enum": lambda: enum.Enum("Color", "RED"),
}
NOT_LISTED = {
    "array": lambda: jnp.ones(3),
    "array in an object": lambda: Registered([{"a": jnp.ones(3)}]),
    "numpy array": lambda: np.ones(3),
    "Variable": lambda: nnx.Param(jnp.ones(3)),
    "module": Layer,
    "generator": lambda: (x for x in range(3)),
    "iterator": lambda: iter([1, 2]),
    "file": lambda: sys.stdout,
    "lock": threading.Lock,
    "random generator": lambda: random.Random(0),
    "random generator of numpy": lambda: np.random.default_rng(0),
    "thread local": threading.local,
    "weak reference": lambda: __import__("weakref").ref(Layer),
    "method of an array": lambda: jnp.ones(3).sum,
    "jax.Ref": lambda: jax.new_ref(jnp.ones(3)),
    "a long list of functions": lambda: [lambda x, i=i: x + i for i in range(5000)],
}


@pytest.mark.parametrize("name", LISTED)
def test_listed(name):
    value = LISTED[name]()
    assert key(lambda: value) is not None
    assert key(value) == key(value)


@pytest.mark.parametrize("name", NOT_LISTED)
def test_not_listed(name):
    value = NOT_LISTED[name]()
    assert key(lambda: value) is None


@pytest.mark.parametrize(
    "code",
    (
        *("eval('1')", "open('x')", "globals()", "os.getcwd()", "random.random()", "sys.argv"),
        *("np.random.rand()", "__import__('os')", "threading.current_thread()"),
    ),
)
def test_functions_that_read_the_state_of_the_process(code):
    assert key(eval(f"lambda x: {code}", globals())) is None


@pytest.mark.parametrize(
    "statement",
    (
        "import numpy as own; own.random",
        "from numpy import random as own",
        "import numpy.random as own",
    ),
)
def test_functions_that_import_the_random_numbers_of_numpy(statement):
    scope = {}
    exec(f"def fun(x):\n    {statement}\n    return own.rand()", scope)
    assert key(scope["fun"]) is None


def test_a_closure_over_numpy_that_draws_random_numbers():
    own = np
    assert key(lambda x: x * own.tanh(1.0)) is not None
    assert key(lambda x: x * own.random.rand()) is None


SETTINGS = {
    "graph mode": (nnx.set_graph_mode, nnx.set_graph_mode.current_value),
    "graph updates": (nnx.set_graph_updates, nnx.set_graph_updates.current_value),
    "eager sharding": (nnx.use_eager_sharding, nnx.using_eager_sharding),
    "hijax Variables": (
        lambda value: nnx.var_defaults(hijax=value),
        lambda: nnx.var_defaults()["hijax"],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_flax_in_context(name):
    setting, current = SETTINGS[name]
    run = nnx_sharding.jit(lambda x: x * (2 if current() else 3))

    def both(x):
        with setting(True):
            first = run(x)
        with setting(False):
            return first, run(x)

    assert [*map(float, jax.jit(both)(1.0))] == [2.0, 3.0]


class Rule:
    """A rule for the derivative of a function that returns its argument."""

    def __call__(self, residuals, cotangent):
        # From our `custom_vjp`, a pair: the cotangents of updates, and that of the output.
        return (GLOBAL * (cotangent[1] if isinstance(cotangent, tuple) else cotangent),)


@pytest.mark.parametrize("custom", (nnx_sharding.custom_vjp, jax.custom_vjp))
@pytest.mark.parametrize("rule", (Rule().__call__, Rule()), ids=("method", "object"))
def test_rules_of_derivatives_are_read_again(custom, rule):
    inner = custom(lambda x: x)
    inner.defvjp(lambda x: (x, None), rule)
    run = nnx_sharding.jit(lambda x: inner(x))
    gradients = []
    for scale in (2.0, 3.0, 2.0):
        set_global(scale)
        gradients.append(float(jax.grad(lambda x: run(x))(1.0)))
    assert gradients == [2.0, 3.0, 2.0]


def test_a_function_goes_with_its_last_reference():
    def fresh():
        held = Plain()

        def fun(x):
            return x * held.own

        def both(x):
            return nnx_sharding.remat(fun)(x) + nnx_sharding.cond(True, fun, fun, x)

        nnx_sharding.jit(both)(1.0)
        nnx_sharding.cond(True, fun, fun, jnp.ones(()))
        return [weakref.ref(x) for x in (held, fun)]

    references = fresh()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_traces_are_used_again_where_nothing_is_captured():
    def fun(layer, x):
        TRACES.info("traced")
        return layer(x)

    run = nnx_sharding.remat(fun)
    layers = [Layer(float(i)) for i in range(4)]
    with self_logs() as lines:
        nnx_sharding.jit(lambda layers, x: sum(run(layer, x) for layer in layers))(layers, 1.0)
    assert lines == ["traced"]


# Programs found by their content.


@contextlib.contextmanager
def self_logs():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    TRACES.addHandler(handler)
    TRACES.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        TRACES.removeHandler(handler)


TRACES = logging.getLogger("traces of functions")


def captures_a_module():
    """Returns a function of a module that it captures, and what sets that module's factor."""
    dense = Layer(1.0)

    def call(layer, x):
        return jnp.tanh(dense(x))

    return call, lambda factor: dense.scale.set_value(jnp.float32(factor))


def counts_its_calls():
    """Returns a function that reaches another number in each call; its argument has the factor."""
    count = [0]

    def call(layer, x):
        count[0] += 1
        return jnp.tanh(layer(x))

    return call, lambda factor: None


@pytest.mark.parametrize("make", (captures_a_module, counts_its_calls))
@pytest.mark.parametrize(
    "transform", (cond, switch, while_loop, fori_loop, scan_of_the_function, shard_map, eager)
)
def test_compiled_once_for_all_values_that_are_captured(transform, make):
    fun, set_factor = make()
    run = transform(fun)

    def call(factor):
        set_factor(factor)
        return run(Layer(factor), x)

    x = jnp.float32(0.5)
    factors = [jnp.float32(i) for i in range(5)]
    results, counts = [], []
    with configurations.without_cache():
        for factor in factors:
            with compilations() as compiled:
                results.append(jax.block_until_ready(call(factor)))
            counts.append(len(compiled))
    np.testing.assert_allclose(results, jnp.tanh(jnp.arange(5) * 0.5), rtol=1e-6)
    assert counts[2:] == [0, 0, 0], counts


def programs():
    """Functions whose jaxprs differ in one thing each."""
    x, table = jnp.linspace(0.1, 1, 4), jnp.arange(4.0)
    key = jax.random.key(0)
    yield lambda: x + 1.0
    yield lambda: x + 2.0
    yield lambda: x - 1.0
    yield lambda: 1.0 - x
    yield lambda: x[:2]
    yield lambda: x[1:3]
    yield lambda: jnp.sin(x) + jnp.cos(x)
    yield lambda: jnp.sin(jnp.cos(x))
    yield lambda: jnp.cos(jnp.sin(x))
    yield lambda: x.astype(jnp.bfloat16)
    yield lambda: x.astype(jnp.float16)
    yield lambda: jax.nn.relu(x)
    yield lambda: jax.nn.silu(x)
    yield lambda: table * x
    yield lambda: x * table
    yield lambda: jax.random.normal(key, (4,))
    yield lambda: jax.random.uniform(key, (4,))
    yield lambda: jax.lax.scan(lambda c, y: (c + y, c), x[0], x)[0]
    yield lambda: jax.lax.scan(lambda c, y: (c + y, c), x[0], x)[1]
    yield lambda: jax.lax.scan(lambda c, y: (c + y, c), x[0], x, reverse=True)[1]
    yield lambda: jax.lax.scan(lambda c, y: (c * y, c), x[0], x)[1]
    yield lambda: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    yield lambda: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x)
    yield lambda: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x)
    yield lambda: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 3, x)
    yield lambda: jnp.dot(x, x)
    yield lambda: jnp.dot(x, x, precision="highest")
    yield lambda: jnp.concatenate([x, table])
    yield lambda: jnp.sort(x)[::-1]
    yield lambda: jnp.take(x, jnp.array([0, 2]), mode="clip")
    yield lambda: jnp.take(x, jnp.array([0, 2]), mode="fill")
    yield lambda: jnp.linalg.inv(jnp.diag(x))
    yield lambda: jnp.fft.fft(x).real
    yield lambda: jax.checkpoint(jnp.sin)(x)
    yield lambda: (x, table)
    yield lambda: (table, x)


def test_different_programs_have_different_contents():
    for _ in range(2):
        for run in programs():
            found = by_content.compiled_by_content(lambda run=run: run())()
            jax.tree.map(np.testing.assert_allclose, found, jax.jit(lambda run=run: run())())
    contents = [by_content.content_of(jax.make_jaxpr(run)().jaxpr) for run in programs()]
    again = [by_content.content_of(jax.make_jaxpr(run)().jaxpr) for run in programs()]
    assert contents == again
    # `(x, table)` and `(table, x)` name their captured arrays in the order in which they meet them.
    assert len({*contents}) == len(contents) - 2


def callback(x):
    return 2 * x


def test_a_callback_that_was_defined_again(monkeypatch):
    captured = jnp.ones(())

    def step(carry, _):
        return captured * jax.pure_callback(callback, jax.typeof(carry), carry), None

    run = nnx_sharding.scan(step, in_axes=(Carry, 0))
    before, _ = run(jnp.float32(1.0), jnp.zeros(1))

    def other(x):
        return 3 * x

    other.__name__ = other.__qualname__ = "callback"  # as in a cell of a notebook that runs again
    monkeypatch.setitem(globals(), "callback", other)
    after, _ = run(jnp.float32(1.0), jnp.zeros(1))
    assert (float(before), float(after)) == (2.0, 3.0)
