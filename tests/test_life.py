"""How long things live, and what threads, signals and the garbage collector may do meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_sharding
from nnx_sharding import jit
from nnx_sharding.core import cache
from nnx_sharding.core import call as run
from nnx_sharding.errors import StrictError


def model(**statics: Any) -> Any:
    return nnx.Dict(
        w=nnx.Param(jnp.float32(2)), **{name: nnx.static(x) for name, x in statics.items()}
    )


class Trainer:
    def __init__(self, scale=1.0):
        self.scale = scale

    def step(self, x):
        return x * 2 * self.scale

    @dataclasses.dataclass(frozen=True)
    class Call:
        factor: Any

        def __call__(self, x):
            return x * self.factor


class TestEqualFunctions:
    def test_method_of_a_plain_object_twice(self):
        trainer = Trainer()
        trainer.fast = jit(trainer.step)
        trainer.fast(jnp.ones(2))
        trainer.fast = jit(trainer.step)  # the first one is gone
        np.testing.assert_array_equal(trainer.fast(jnp.ones(3)), [2.0] * 3)

    def test_methods_of_one_object_share_traces(self):
        trainer = Trainer()
        one, two = jit(trainer.step), jit(trainer.step)
        one(1.0), two(1.0)
        assert len(nnx_sharding.explain_retraces(two)) == 1

    def test_methods_of_equal_objects_do_not(self):
        class Same(Trainer):
            def __eq__(self, other):
                return True

            def __hash__(self):
                return 1

        one, two = Same(1.0), Same(3.0)
        assert float(jit(one.step)(1.0)) == 2.0
        assert float(jit(two.step)(1.0)) == 6.0

    def test_callables_that_compare_equal(self):
        one, two = Trainer.Call(1), Trainer.Call(1.0)
        assert one == two
        assert jit(one)(jnp.int32(1)).dtype == jnp.int32
        assert jit(two)(jnp.int32(1)).dtype == jnp.float32


class TestLife:
    def freed(self, make) -> bool:
        found = make()
        gc.collect()
        return found() is None

    def test_a_function_that_is_a_static_of_its_own_argument(self):
        def make():
            own = model()

            def f(m):
                return m.w[...]

            g = jit(f)
            own.f = nnx.static(f)
            g(own), g(own), g(own)
            return weakref.ref(f)

        assert self.freed(make)

    def test_a_function_that_closes_over_a_model_that_holds_it(self):
        def make():
            own = model()

            def f(m):
                return m.w[...] * len(own)

            own.f = nnx.static(f)
            g = jit(f)
            g(own), g(own)
            return weakref.ref(f)

        assert self.freed(make)

    @pytest.mark.parametrize("kept", [[], {}, {1}, Trainer(), np.ones(2)])
    def test_static_objects(self, kept):
        class Options:
            def __init__(self, kept):
                self.kept = kept

        f = jit(lambda m: m.w[...])

        def make():
            options = Options(kept)
            own = model(c=options)
            f(own), f(own)
            return weakref.ref(options)

        assert self.freed(make)

    def test_another_object_at_the_address_of_a_dead_function(self):
        f = jit(lambda m: m.w[...] * m.f())
        own = model(f=lambda: 1)
        f(own), f(own)
        for number in range(2, 200):
            address = id(own.f)
            del own.f
            own.f = nnx.static(lambda number=number: number)
            assert float(f(own)) == 2.0 * number
            if id(own.f) == address:
                break

    def test_evicted_plans(self):
        with mock.patch.object(cache, "MAX_PLANS", 3):
            f = jit(lambda m: m.w[...] * m.k)
            for k in range(10):
                f(model(k=k))
            gc.collect()
            assert len(f._plans._plans) == 3
            assert len(f._cache.traced) == 3


@contextlib.contextmanager
def tracing(function):
    """Every step of Python goes through the function."""
    before = sys.gettrace()  # that of a coverage tool
    sys.settrace(function)
    try:
        yield
    finally:
        sys.settrace(before)


class TestInterruptions:
    def test_an_update_is_one_step(self):
        """A signal between two Variables of an update would be between two steps of Python."""
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = [P(), P("x")]

        def all_steps(m):
            for variable in m.values():
                variable[...] += 1

        own = nnx.Dict(
            {
                f"v{i}": nnx.Param(jax.device_put(jnp.ones(8), NamedSharding(mesh, specs[i % 2])))
                for i in range(6)
            }
        )
        sharding = nnx_sharding.StateSharding(
            {nnx.PathContains(f"v{i}"): specs[i % 2] for i in range(6)}
        )
        f = jit(all_steps, in_shardings=sharding, mesh=mesh)
        f(own), f(own)
        changes: list[int] = []
        before = [v.get_raw_value() for v in own.values()]

        def count(frame, event, _):
            changed = sum(
                v.get_raw_value() is not x for v, x in zip(own.values(), before, strict=True)
            )
            changes.append(changed)
            frame.f_trace_opcodes = True
            return count

        with tracing(count):
            f(own)
        assert set(changes) == {0, 6}

    def test_changed_structure_is_one_step(self):
        def grow(m):
            m.w[...] += 1
            m.new = nnx.Param(jnp.ones(()))
            m.c.append(1)
            m.w.set_metadata(note="new")

        own = model(c=[])
        states = set()

        def look(frame, event, _):
            states.add(("new" in vars(own), len(own.c), "note" in own.w.get_metadata()))
            frame.f_trace_opcodes = True
            return look

        f = jit(grow)
        f(model(c=[]))  # without the trace, in which the function changes what it was given
        with tracing(look):
            f(own)
        assert states == {(False, 0, False), (True, 1, True)}

    # The signal may come while Python runs a finalizer or a callback, which cannot raise.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of Unix")
    def test_ctrl_c(self):
        own = nnx.Dict({f"v{i}": nnx.Param(jnp.zeros(())) for i in range(50)})

        @jit
        def step(m):
            for variable in m.values():
                variable[...] += 1

        step(own), step(own)

        def stop(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, stop)
        try:
            for delay in np.linspace(2e-5, 4e-4, 300):
                with tracing(None):  # a signal would leave the locks of a coverage tool taken
                    try:
                        signal.setitimer(signal.ITIMER_REAL, delay)
                        step(own), step(own)
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except KeyboardInterrupt:
                        pass
                assert len({float(v[...]) for v in own.values()}) == 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


SHOWN_TO_THE_COLLECTOR = """
import faulthandler, gc, sys
faulthandler.enable()
import jax, jax.numpy as jnp
from flax import nnx
from nnx_sharding import jit

looks = False

@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, v):
        self.v = v

    def tree_flatten(self):
        if looks:
            for found in gc.get_objects():
                if type(found) is tuple:
                    for item in found:
                        type(item)
        return (self.v,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

model = nnx.Dict(b=nnx.data(Box(jnp.ones(()))), w=nnx.Param(jnp.ones(())))
f = jit(lambda m: m.w[...] + m.b.v)
f(model), f(model)
looks = True
for _ in range(3):
    f(model)
"""

FINALIZERS = """
import gc, threading
import jax, jax.numpy as jnp
from flax import nnx
from nnx_sharding import explain_retraces, jit

@jit
def f(m, x):
    return x * m.w[...]

calls = 0

class Calls:
    def __init__(self):
        self.me = self

    def __del__(self):
        global calls
        calls += 1
        done = []
        thread = threading.Thread(target=lambda: done.append(call(("inner", calls))))
        thread.start()
        thread.join(20)
        assert done, "deadlock"

def call(k):
    return f(nnx.Dict(w=nnx.Param(jnp.float32(1)), k=nnx.static(k)), 1.0)

call(0)
gc.collect()
gc.freeze()
for number in range(1, 120):
    gc.disable()
    Calls()
    gc.set_threshold(number * 5, 10, 10)
    gc.enable()
    f.eval_shape(nnx.Dict(w=nnx.Param(jnp.float32(1)), k=nnx.static(number)), 1.0)
    explain_retraces(f)
    gc.set_threshold(700, 10, 10)
    if number % 10 == 0:
        f.clear_cache()
assert calls > 50, calls
"""

QUEUE = """
import jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from nnx_sharding import jit

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
rngs = nnx.Rngs(0)
model = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(6)])
nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
x, y = (
    jax.device_put(array, NamedSharding(mesh, P("data")))
    for array in (jnp.ones((64, 256)), jnp.ones((64,), int))
)

@jit
def evaluate(model, x, y):
    for layer in model:
        x = jax.nn.relu(layer(x))
    return x.mean(), (x.argmax(-1) == y).mean()

for _ in range(2000):
    found = evaluate(model, x, y)
jax.block_until_ready(found)
"""


@pytest.mark.parametrize(
    ("program", "pure"),
    [
        (SHOWN_TO_THE_COLLECTOR, ""),
        (SHOWN_TO_THE_COLLECTOR, "1"),
        (FINALIZERS, ""),
        (FINALIZERS, "1"),
        (QUEUE, ""),
    ],
    ids=["collector", "collector-python", "finalizers", "finalizers-python", "queue"],
)
def test_programs(program, pure, monkeypatch):
    monkeypatch.setenv("NNX_SHARDING_PURE_PYTHON", pure)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


class TestStrictDonation:
    def test_decided_while_tracing(self):
        f = jit(lambda x, y: x.sum() + y, donate_argnums=(0, 1), strict=True)
        with pytest.raises(StrictError, match=r"donated.*\n  x, float32\[4\]\n"):
            f(jnp.ones(4), jnp.ones(()))

    def test_warnings_of_other_threads_stay_as_they_are(self):
        f = jit(lambda x: x + 1, donate_argnums=0, strict=True)
        f(jnp.ones(4))
        with mock.patch("warnings.catch_warnings", side_effect=AssertionError):
            f(jnp.ones(4))


def test_threads_trace_one_function_each_with_its_own_objects():
    class Options:
        def __init__(self, scale):
            self.scale = scale

    start = threading.Barrier(4)
    found: dict[int, float] = {}

    def f(m):
        return m.w[...] * m.c.scale

    call = jit(f)

    def work(number):
        own = model(c=Options(number))
        start.wait()
        for _ in range(20):
            found[number] = float(call(own))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: 2.0 * number for number in range(4)}


def test_no_program_waits_on_other_devices():
    elsewhere = mock.patch.object(run, "is_bounded", return_value=False)
    with elsewhere, mock.patch.object(run, "wait_for_some", side_effect=AssertionError):
        jit(lambda m: m.w[...])(model())
