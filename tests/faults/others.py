"""Faults that one device has as well, so that a comparison with it finds nothing.

Other tools find these: `jit` warns of what a program keeps, and refuses what was donated, and
`replay` runs a recorded step again.
"""

from __future__ import annotations

import tempfile
import warnings

import jax

from nnx_sharding import jit, place
from nnx_sharding.checkpoint import save
from nnx_sharding.testing import replay

from .harness import NUMBERS, Net, add_fault, square_error, train_with, training


def found_by(tool, kind, where):
    """Adds a fault that another tool finds: a function that runs, with what may raise."""

    def add(function):
        def complaint(is_wrong, around):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    function(is_wrong, around)
                except (AssertionError, RuntimeError, Warning) as error:
                    return f"{type(error).__name__}: {error}"
            return ""

        return add_fault(function, kind, complaint, where, tool)

    return add


def trained(around):
    """A step, and what it is called with."""
    program = training(train_with(square_error), around, Net(), NUMBERS)
    step = jit(program.step, in_shardings=program.shardings, mesh=around.mesh)
    return step, *program.args


@found_by("jit", "captured weights", r"CapturedArrayWarning: .*\n  kernel, float32")
def evaluation_captures_the_weights_of_its_first_call(wrong, around):
    model = Net()
    place(model, around.strategy(model, mesh=around.mesh), mesh=around.mesh)
    kernel = model.up.kernel[...]
    if wrong:
        jit(lambda x: x @ kernel, mesh=around.mesh)(NUMBERS)
    else:
        jit(lambda x, kernel: x @ kernel, mesh=around.mesh)(NUMBERS, kernel)


@found_by("jit", "donated buffer", r"DonatedError: .*\n  x, float32")
def donated_batch_used_again(wrong, around):
    step = jit(lambda x: 2 * x, donate_argnums=0, mesh=around.mesh)
    x = jax.device_put(NUMBERS, jax.NamedSharding(around.mesh, jax.P("data")))
    y = step(x)
    step(x if wrong else y)


@found_by("replay", "state of another step", "AssertionError: train repeats, but does not")
def state_of_another_step_restored(wrong, around):
    step, model, optimizer, x = trained(around)
    folder = tempfile.mkdtemp()
    save(f"{folder}/0", (model, optimizer))
    step(model, optimizer, x)
    save(f"{folder}/1", (model, optimizer))
    loss = float(step(model, optimizer, x))
    replay(step, f"{folder}/{0 if wrong else 1}", x, into=(model, optimizer), recorded=loss)


@found_by("replay", "batch of another step", "AssertionError: train repeats, but does not")
def batch_of_another_step(wrong, around):
    step, model, optimizer, x = trained(around)
    folder = f"{tempfile.mkdtemp()}/0"
    save(folder, (model, optimizer))
    loss = float(step(model, optimizer, x))
    replay(step, folder, x[::-1] * 2 if wrong else x, into=(model, optimizer), recorded=loss)
