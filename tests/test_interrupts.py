"""A signal at any moment of a call: the model is wholly that before it, or wholly that after it."""

import contextlib
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_sharding import grad, jit, place, shard_map
from nnx_sharding.core.interrupts import signals_deferred

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of Unix"),
    # The signal may come while Python runs a finalizer or a callback, which cannot raise.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Model(nnx.Module):
    def __init__(self, *, keys: bool = False):
        self.w = nnx.List([nnx.Param(jnp.zeros((8, 4))) for _ in range(3)])
        if keys:
            self.key = nnx.Variable(jax.random.key(0))


def add(model: Model, x: Any) -> Any:
    for w in model.w:
        w[...] += x
    return x + 1


def state(model: Model) -> set[float]:
    """The number of steps that each array of a model has seen, which has to be readable."""
    return {float(np.max(w[...])) for w in model.w}


def with_key(model: Model, x: Any) -> Any:
    model.key[...] = jax.random.split(model.key[...])[0]
    return add(model, x)


def with_callback(model: Model, x: Any) -> Any:
    jax.debug.callback(lambda _: None, x)
    return add(model, x)


def with_grad(model: Model, x: Any) -> Any:
    grads = grad(lambda m: sum(w[...].sum() for w in m.w))(model)
    for w, g in zip(model.w, grads.w.values(), strict=True):
        w[...] += g[...] * x
    return x


def with_structure(model: Model, x: Any) -> Any:
    model.steps = (*getattr(model, "steps", ()), 1)
    model.last = nnx.Variable(x)
    return add(model, x)


class Compiled:
    """A function that is compiled ahead of time."""

    def __init__(self, step: Any):
        self.step, self.program = step, None

    def __call__(self, model: Model, x: Any) -> Any:
        if self.program is None:
            self.program = self.step.lower(model, x).compile()
        return self.program(model, x)


def with_callback_for_vectors(model: Model, x: Any) -> Any:
    return with_callback(model, x) if x.ndim else add(model, x)


class AfterOtherShape:
    """A function that was called before with a scalar, for which JAX runs no Python code.

    The first call with a vector may be made while no signal has a handler, as in the background.
    """

    def __init__(self, step: Any, *, in_background: bool = False):
        self.step, self.vector, self.in_background = step, None, in_background

    def __call__(self, model: Model, x: Any) -> Any:
        if self.vector is not None:
            return self.step(model, self.vector)
        other = Model()
        self.step(other, x), self.step(other, x)
        self.vector = jnp.broadcast_to(x, 4)  # once: a signal in an operation would break JAX
        before = signal.getsignal(signal.SIGINT)
        try:
            if self.in_background:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            return self.step(model, self.vector)
        finally:
            signal.signal(signal.SIGINT, before)


MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SPECS = {"mesh": MESH, "in_specs": (P("d"), P()), "out_specs": P()}
KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "jit": lambda options: jit(add, **options),
    "mesh": lambda options: jit(add, mesh=MESH, in_shardings=(P("d"), P()), **options),
    "key": lambda options: jit(with_key, **options),
    "callback": lambda options: jit(with_callback, **options),
    "callback for one shape": lambda options: AfterOtherShape(
        jit(with_callback_for_vectors, **options)
    ),
    "callback for one shape in the background": lambda options: AfterOtherShape(
        jit(with_callback_for_vectors, **options), in_background=True
    ),
    "grad": lambda options: jit(with_grad, **options),
    "structure": lambda options: jit(with_structure, **options),
    "compiled": lambda options: Compiled(jit(add, **options)),
    "shard_map": lambda options: jit(shard_map(add, **SPECS), **options),
}
DONATED = {"donate_argnums": 0}


class Stop(KeyboardInterrupt):
    """What the handler raises."""

    number = 0

    def __init__(self) -> None:
        Stop.number += 1


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """With a handler that raises, which is still there afterwards."""

    def stop(*_: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield
        assert signal.getsignal(signal.SIGALRM) is stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(step: Any, model: Model, x: Any, stopped: Callable[[], Any]) -> bool:
    """Runs ``stopped``, and checks the model after it; returns whether it was interrupted."""
    (before,) = state(model)
    interrupted, number = False, Stop.number
    try:
        stopped()
    except Stop:
        interrupted = True
    except Exception:  # JAX's own, where its C++ code called Python, such as an `__eq__`
        assert Stop.number > number
        interrupted = True
    (after,) = state(model)
    assert after in ((before, before + 1) if interrupted else (before + 1,))
    step(model, x)
    assert state(model) == {after + 1}
    return interrupted


@contextlib.contextmanager
def stop_at(number: int) -> Iterator[list[int]]:
    """Raises a signal at this line that Python runs; gives the number of lines."""
    count = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_lines = True
        count[0] += 1
        if count[0] == number:
            signal.raise_signal(signal.SIGALRM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def lines_of(step: Any, model: Model, x: Any) -> int:
    with stop_at(-1) as count:
        step(model, x)
    return count[0]


@pytest.mark.parametrize("donates", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_at_each_line(kind, donates):
    """Later calls, at many of their lines; what JAX does between them cannot be interrupted."""
    step, model, x = (
        KINDS[kind](DONATED if donates else {}),
        Model(keys=kind == "key"),
        jnp.ones(()),
    )
    step(model, x), step(model, x), step(model, x)
    lines = lines_of(step, model, x)
    count = 12 if kind == "structure" else 60  # that traces each time
    found = 0
    with stopping():
        for number in sorted(random.sample(range(1, lines + 1), min(count, lines))):

            def stopped(number=number):
                with stop_at(number):
                    step(model, x)

            found += check(step, model, x, stopped)
    assert found


def test_place_with_donation():
    """A model that is moved, and whose old arrays are deleted, is never without arrays."""
    mesh, x = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jnp.ones(())

    def moved(model, _=None):
        place(model, P("d") if model.w[0].sharding.num_devices == 1 else P(), mesh, donate=True)

    moved(Model())
    lines = lines_of(moved, Model(), x)
    with stopping():
        for number in random.sample(range(1, lines), 80):
            model = Model()
            with contextlib.suppress(Stop), stop_at(number):
                moved(model)
            assert state(model) == {0.0}


@pytest.mark.parametrize("kind", ["jit", "key", "callback", "mesh"])
def test_first_call(kind):
    """A call that is traced and compiled first, at random lines and at the last ones."""
    x, options = jnp.ones(()), DONATED
    lines = lines_of(KINDS[kind](options), Model(keys=kind == "key"), x)
    with stopping():
        for number in (
            *random.sample(range(lines), 3),
            *random.sample(range(lines - 400, lines), 6),
        ):
            model = Model(keys=kind == "key")
            step = KINDS[kind](options)

            def stopped(step=step, model=model, number=number):
                with stop_at(number):
                    step(model, x)

            check(step, model, x, stopped)


@pytest.mark.parametrize("kind", ["jit", "key", "compiled", "mesh", "callback"])
def test_at_random_moments(kind):
    """Real signals, before, while and after the program runs."""
    step, model, x = KINDS[kind](DONATED), Model(keys=kind == "key"), jnp.ones(())
    step(model, x), step(model, x)
    with stopping():
        for delay in np.random.default_rng().uniform(1e-5, 1.5e-3, 150):

            def stopped(delay=delay):
                signal.setitimer(signal.ITIMER_REAL, delay)
                step(model, x)
                signal.setitimer(signal.ITIMER_REAL, 0)

            check(step, model, x, lambda: with_alarm(stopped))


def with_alarm(stopped: Callable[[], Any]) -> None:
    """Runs ``stopped``; a signal after the step counts as one in it."""
    try:
        stopped()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_no_python_code_runs_before_the_results_are_stored():
    """So a repeated call needs no handler of its own: it costs no time to be safe."""
    step, model, x = jit(add, donate_argnums=0), Model(), jnp.ones(())
    step(model, x), step(model, x)
    events: list[tuple[str, str]] = []

    def profile(frame, event, argument):
        name = getattr(argument, "__name__", "") if event.startswith("c_") else frame.f_code.co_name
        events.append((event, name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step(model, x)
    finally:
        sys.setprofile(before)
    assert ("call", "hold") not in events
    if ("c_call", "extend") in events:  # without the extension
        assert events[events.index(("c_call", "extend")) + 1][0] == "c_return"
    else:
        later = events[events.index(("return", "_is_ready")) :]
        assert not any(kind == "call" for kind, _ in later)


def test_a_signal_that_was_deferred_is_delivered():
    """Its handler is called after the write-back, and the handlers are the user's again."""
    model, x, seen = Model(keys=True), jnp.ones(()), []
    step = jit(with_key, donate_argnums=0)
    for _ in range(4):  # a model like those before gets its guard in the second call
        step(model, x)
    lines = lines_of(step, model, x)
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(state(model)))
    try:
        for number in range(1, lines, 7):
            start = state(model)
            with stop_at(number):
                step(model, x)
            assert seen.pop() in (start, state(model)) and not seen
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_raises_keeps_no_other_signal_from_being_delivered():
    def stop(*_):
        raise Stop

    seen = []
    # Not SIGINT, which has no handler in a job in the background.
    handlers = {signal.SIGUSR1: stop, signal.SIGALRM: lambda *_: seen.append("alarm")}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(Stop), signals_deferred():
            for number in handlers:
                signal.raise_signal(number)
            assert not seen
        assert seen == ["alarm"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
