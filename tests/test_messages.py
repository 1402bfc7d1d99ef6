"""The form of messages."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import (
    StateAxes,
    StateSharding,
    accumulate_gradients,
    jit,
    shard_map,
    stack,
    value_and_grad,
)
from nnx_sharding.errors import (
    MAX_LINES,
    MAX_WIDTH,
    StrictError,
    UnshardedWarning,
    by_kind,
    command_for,
    each_warning_once,
    listed,
    message,
    warn_or_raise,
)
from nnx_sharding.export import export
from nnx_sharding.partition import (
    abstract_init,
    from_rules,
    fsdp,
    make_mesh,
    optimizer_sharding,
    override,
    sharded_init,
    tensor_parallel,
)
from nnx_sharding.report import compare

words = st.text("abc[].0:, P()", min_size=1, max_size=300)
items = st.lists(words | st.lists(words, max_size=40).map("\n  ".join), max_size=300)


@given(words, items, st.lists(words.map(str.capitalize), max_size=4).map(". ".join))
def test_no_message_is_long(head, items, remedy):
    lines = message(head, items, remedy).split("\n")
    assert len(lines) <= MAX_LINES
    assert all(len(line) <= MAX_WIDTH or " " not in line.strip() for line in lines)


@given(st.dictionaries(words, items, max_size=4))
def test_no_list_of_several_kinds_is_long(kinds):
    lines = message("The head.", by_kind(kinds), "The remedy.").split("\n")
    assert len(lines) <= MAX_LINES


@given(st.lists(st.tuples(st.text("abyz", min_size=1), st.text("m1 .:[]→ä")), max_size=16))
def test_short_lists_are_complete(pairs):
    items = [f"  m.{name}: {text[:30]}" for name, text in pairs]
    assert listed(items) == items


@given(st.integers(9, 300), st.lists(st.sampled_from("abc"), min_size=2, max_size=3, unique=True))
def test_layers_are_merged(count, names):
    items = [f"  m[{i}].{name}, shape (3,): x" for i in range(count) for name in names]
    expected = [
        f"  m[0].{name}, shape (3,): x (and {count - 1} more, to m[{count - 1}].{name})"
        for name in names
    ]
    assert listed(items) == expected


def test_different_things_are_not_merged():
    shown = listed([f"  m[{i}].w, shape ({i},)" for i in range(200)])
    assert shown == [f"  m[{i}].w, shape ({i},)" for i in range(15)] + ["  … and 185 more"]


def test_the_rest_is_counted_in_items():
    items = [f"  {'abcdefghijklmnopqrstuvwxyz'[i]}: is\n    several\n    lines" for i in range(26)]
    *_, last = shown = listed(items)
    kept = sum(re.match("  [a-z]:", line) is not None for line in shown)
    assert last == f"  … and {26 - kept} more" and kept == 5


@pytest.mark.parametrize(
    "library",
    [
        "class A:\n  @cached_property\n  def x(self): warn()\ndef call(): return A().x",
        "@contextmanager\ndef block():\n  yield\n  warn()\ndef call():\n  with block(): pass",
    ],
)
def test_warnings_name_the_line_of_the_user(library):
    # As code of this package that is called through the standard library.
    names = {
        "cached_property": functools.cached_property,
        "contextmanager": contextlib.contextmanager,
        "warn": functools.partial(warn_or_raise, UnshardedWarning, "text", strict=False),
    }
    file = warn_or_raise.__code__.co_filename
    exec(compile(library, file, "exec"), names)
    with pytest.warns(UnshardedWarning) as caught:
        names["call"]()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("library", [jax, nnx_sharding])
def test_warnings_name_the_line_of_a_user_whose_package_has_a_similar_name(library):
    file = f"{Path(library.__file__).parent}_models/train.py"
    names = {"warn": functools.partial(warn_or_raise, UnshardedWarning, "text", strict=False)}
    with pytest.warns(UnshardedWarning) as caught:
        exec(compile("warn()", file, "exec"), names)
    assert [warning.filename for warning in caught] == [file]


def test_warnings_of_a_command_name_the_function_of_the_user():
    def warn():
        warn_or_raise(UnshardedWarning, "text", strict=False)

    def step():
        warn()

    # The command warns once itself, after the user's function, and once by a line of the user.
    file = str(Path(nnx_sharding.__file__).parent / "cli" / "programs.py")
    with pytest.warns(UnshardedWarning) as caught, command_for(step):
        names = {"warn": functools.partial(warn_or_raise, UnshardedWarning, "text", strict=False)}
        exec(compile("warn()", file, "exec"), names)
        exec(compile("step()", file, "exec"), {"step": step})
    lines = [step.__code__.co_firstlineno, warn.__code__.co_firstlineno + 1]
    assert [(x.filename, x.lineno) for x in caught] == [(__file__, line) for line in lines]


@pytest.mark.gate
def test_packages_are_known_before_they_are_imported():
    code = (
        "import sys, nnx_sharding.errors as errors\n"
        "import jax, flax\n"
        "assert errors.is_library(jax.__file__) and errors.is_library(flax.__file__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_warning_once():
    def warn(text):
        warn_or_raise(UnshardedWarning, text, strict=False)

    with (
        pytest.warns(UnshardedWarning) as caught,
        contextlib.suppress(ValueError),
        each_warning_once(),
    ):
        with each_warning_once():
            for text in ("one", "two", "one"):
                warn(text)
        thread = threading.Thread(target=warn, args=("of another thread",))
        thread.start()
        thread.join()
        assert [str(x.message) for x in caught] == ["of another thread"]
        warn("two")
        with pytest.raises(StrictError, match="three"):
            warn_or_raise(UnshardedWarning, "three", strict=True)
        raise ValueError
    assert [str(x.message) for x in caught] == ["of another thread", "one", "two"]
    assert {x.filename for x in caught[1:]} == {__file__}


class Logits(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(512, 64, rngs=rngs)
        self.head = nnx.Linear(64, 512, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.tokens(tokens))


MESH = make_mesh({"data": -1})
LARGE = nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(24)))

# A model in place of something else.
MISPLACED = {
    "function": lambda: sharded_init(LARGE, P()),
    "function, abstract": lambda: abstract_init(LARGE, P()),
    "mesh of jit": lambda: jit(len, mesh=LARGE),
    "mesh of shard_map": lambda: shard_map(len, mesh=LARGE, in_specs=P(), out_specs=P()),
    "mesh of sharded_init": lambda: sharded_init(Logits, P(), LARGE, nnx.Rngs(0)),
    "filters": lambda: StateSharding(LARGE),
    "sharding": lambda: StateSharding({nnx.Param: LARGE}),
    "rules": lambda: from_rules(LARGE),
    "base of a strategy": lambda: fsdp(LARGE, mesh=MESH, base=LARGE),
    "sharding of an optimizer": lambda: optimizer_sharding(LARGE, LARGE),
    "sharding to override": lambda: override(LARGE, {}),
    "layers": lambda: stack(LARGE, 3),
    "axis": lambda: StateAxes({nnx.Param: LARGE}),
    "sizes of a mesh": lambda: make_mesh(LARGE),
    "strategies": lambda: compare(LARGE, len, LARGE),
    "steps": lambda: accumulate_gradients(len, steps=LARGE),
    "function to export": lambda: export(LARGE),
}


@pytest.mark.parametrize("call", MISPLACED.values(), ids=MISPLACED)
def test_a_misplaced_model_is_named_in_short(call):
    with pytest.raises(TypeError, match="Sequential") as caught:
        call()
    assert len(str(caught.value)) < 400


def wrapped(step):
    """A decorator that passes an argument of its own: the call takes one less than ``step``."""

    @functools.wraps(step)
    def wrapper(model, optimizer):
        return step(model, optimizer, jnp.ones((8, 16)))

    return wrapper


def trained(model, optimizer, x, wrt=nnx.Param):
    loss, gradients = value_and_grad(lambda model: (model(x) ** 2).mean(), wrt=wrt)(model)
    optimizer.update(model, gradients)
    return loss


def with_optimizer(wrt=nnx.Param):
    model = nnx.LoRALinear(16, 8, lora_rank=2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=wrt)


@pytest.mark.parametrize(
    ("change", "count", "text"),
    [
        (functools.partial, 1, "trained.*: missing a required argument: 'x'"),
        (functools.partial, 4, "trained.*: too many positional arguments"),
        (functools.partial, 3, None),
        (wrapped, 2, None),
    ],
)
@pytest.mark.parametrize("method", ["__call__", "lower"])
def test_a_missing_argument_is_named_before_specs_that_do_not_fit(change, count, text, method):
    model, optimizer = with_optimizer()
    sharding = fsdp(model, mesh=MESH, optimizer=optimizer, min_size=0)

    def step(model, optimizer, x):
        return trained(model, optimizer, x)

    step.__name__ = "trained"
    step = jit(change(step), in_shardings=(sharding, sharding, P("data")), mesh=MESH)
    x = jnp.ones((8, 16))
    args = [model, x] if count == 1 else [model, optimizer, x, x][:count]
    with contextlib.nullcontext() if text is None else pytest.raises(Exception, match=text):
        getattr(step, method)(*args)


@pytest.mark.parametrize(
    "transform", [jit, lambda step: functools.partial(nnx_sharding.eval_shape, step)]
)
@pytest.mark.parametrize(
    ("of_optimizer", "of_gradient", "note"),
    [
        (nnx.Param, nnx.LoRAParam, r"wrt=Param, but the gradients \(LoRAParam\) are without bias"),
        (nnx.PathContains("kernel"), nnx.LoRAParam, "wrt=PathContains.* are without kernel"),
        (nnx.LoRAParam, nnx.Param, None),  # Flax takes the part that the optimizer updates
        (nnx.LoRAParam, nnx.LoRAParam, None),
    ],
)
def test_filters_of_optimizer_and_gradient(transform, of_optimizer, of_gradient, note):
    model, optimizer = with_optimizer(of_optimizer)
    step = transform(functools.partial(trained, wrt=of_gradient))
    if note is None:
        step(model, optimizer, jnp.ones((8, 16)))
        return
    with pytest.raises(ValueError, match="pytree structure error") as caught:
        step(model, optimizer, jnp.ones((8, 16)))
    [text] = [x for x in caught.value.__notes__ if x.startswith("The optimizer has ")]
    assert re.search(note, text) and "wrt=optimizer.wrt" in text


@pytest.mark.parametrize("again", ["report", "compile"])
def test_a_program_that_is_traced_again_repeats_no_warning(again):
    mesh = make_mesh({"data": 2, "model": 4})
    model = Logits(nnx.Rngs(0))
    specs = tensor_parallel(model, mesh=mesh), P("data")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # equal ones of one line once, as for users
        for _ in range(2):
            # The mean outside of the model gathers the columns of its output.
            step = jit(lambda model, x: model(x).mean(), in_shardings=specs, mesh=mesh)
            compiled = step.lower(model, jnp.ones((4, 8), jnp.int32)).compile()
            if again == "report":
                assert compiled.activations()
                break
    assert [x.category for x in caught] == [UnshardedWarning]
