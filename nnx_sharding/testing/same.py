"""``assert_same`` compares a step on one device and on a mesh, and names the first wrong module.

The step runs on one device and on the mesh, and each call of a module is recorded (`recording`).
The records are compared in the order of execution (`comparison`). `rounding` derives how far the
numbers may be apart, from runs on one device in which every record is changed by its rounding
error.

`assert_same` finds no error that one device has as well, and no error below the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _compat
from ..core.flatten import flatten
from ..diagnostics.progress import progress
from ..errors import raise_if_any
from ..partition.mesh import make_mesh
from ..specs.state_sharding import StateSharding
from ..transforms.jit import jit
from .arrays import copied, numbers
from .comparison import Comparison, Spread, unequal_runs
from .recording import Outcome, RecordedStep
from .rounding import SAMPLES, Rounding
from .virtual_devices import call_with_devices

__tracebackhide__ = True  # pytest shows the line of the test that failed


def assert_same(
    step: Callable[..., Any],
    *args: Any,
    shardings: Any,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    steps: int = 3,
    runs: int = 1,
    devices: int | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Fails if a step computes other numbers on a mesh than on one device.

    On one device, it runs on a mesh with the same axes of size 1, where collectives do nothing, and
    a :func:`~nnx_sharding.partition.pipeline` has one stage.
    After each call, what it returns and all arrays in its arguments are compared, on every device.
    The error names the first module, in the order of execution, whose output differs, or else the
    first one whose gradient does.

    It takes two to five times as long as compiling the step, since it compiles a program with
    records for one device and one for the mesh (and again in the second call, if arguments without
    ``shardings`` changed theirs), and runs the step ten times in each of ``steps`` calls.

    Arrays may differ by the rounding error of their type and of the longest sum in the step, and by
    what such errors in inputs and modules change on one device. In a ``shard_map``, devices may
    draw dropout masks of their own, which one device cannot repeat: ``nnx.Dropout`` returns its
    input there, and only its keys are checked. It is an error if it drops the same elements of
    different shards, or other elements of replicas so that what is declared replicated is not. The
    key in a subclass with its own ``__call__`` is unknown: masks are compared there, and equal ones
    count as shared if they are too large to be equal by chance.

    Args:
      step: a function that is not jitted, such as a training step, or the call of a model. It takes
        the mesh from the context; so does a ``shard_map`` in it.
      *args: its arguments, which are copied. Changes that a call makes to modules and optimizers
        are there in the next one.
      shardings: ``in_shardings`` of :func:`~nnx_sharding.jit`.
      mesh: the mesh, or the sizes of its axes by name.
      steps: the number of calls.
      runs: how often the step runs on the mesh; from 2 on, all runs have to be equal bit for bit.
      devices: None to run here, or the number of virtual CPU devices to run on, in a process of
        its own, to which the step and its arguments are sent: for a mesh as large as the job's.
      tolerance: the rounding error relative to the largest element of an array; None to derive it.
      **options: other options of :func:`~nnx_sharding.jit`.

    Raises:
      AssertionError: something differs.
      TypeError: the step is jitted, or an argument is abstract.
      ValueError: there are no calls or no runs, or the mesh has not as many devices as asked for.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import make_mesh
      >>> from nnx_sharding.testing import assert_same
      >>> class Mean(nnx.Module):
      ...     def __call__(self, x):
      ...         mean = lambda x: jax.lax.pmean(x.mean(), "data")
      ...         return jax.shard_map(mean, in_specs=P("data"), out_specs=P())(x)
      >>> forward = lambda model, x: model(x)
      >>> mesh, x = make_mesh({"data": 8}), jnp.arange(8.0)
      >>> assert_same(forward, Mean(), x, shardings=(None, P("data")), mesh=mesh)
    """
    if hasattr(step, "lower"):
        raise TypeError("assert_same compiles the step for two meshes: pass it without jit.")
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in flatten(args).leaves):
        raise TypeError(
            "assert_same runs the step, but some of its arguments are abstract, without data: pass "
            "a model with arrays, such as that of sharded_init, in a small size."
        )
    if min(steps, runs) < 1:  # nothing would be compared
        raise ValueError(f"assert_same: expected at least one of each, got {steps=}, {runs=}.")
    if devices is not None:
        options |= {"steps": steps, "runs": runs, "tolerance": tolerance}
        _check_size(mesh, devices)
        call_with_devices(
            devices, assert_same, step, *args, shardings=shardings, mesh=mesh, **options
        )
        return
    mesh = _with_devices(mesh)
    options["in_shardings"] = shardings
    reference = _Reference(step, args, mesh, options, tolerance)
    # On Manual axes devices draw masks of their own, so dropouts drop elements there only in
    # `run_dropping`.
    run_on_mesh = RecordedStep(step, mesh, options)
    run_dropping = RecordedStep(step, mesh, options, is_dropping=True)
    # Each run has its own copy of the arguments, because a run changes them for its next step.
    dropping_args, mesh_args = copied(args), [copied(args) for _ in range(runs)]
    name = getattr(step, "__name__", "the step")
    with progress(f"assert_same: {name} on {mesh.size} devices", 3 * steps) as advance:
        for count in range(1, steps + 1):
            # The compiler would warn that each record of a sharded array makes a copy of all of it.
            with _compat.without_compiler_warnings():
                before, on_device, spread = reference.call(advance)
                on_mesh, *repetitions = map(run_on_mesh, mesh_args)
                advance("the mesh")
            place = f"call {count} of {name}"
            for repetition in repetitions:
                head = f"{place} does not repeat bit for bit on {mesh.size} devices:"
                raise_if_any(AssertionError, head, unequal_runs(on_mesh, repetition))
            comparison = Comparison(before, on_device, spread, on_mesh, reference.rounding, mesh)
            # Shared masks come first, because they can be the cause of differences.
            lines = comparison.shared_masks() or comparison.differences()
            # Masks of replicas come last, because to check them takes another run.
            if not lines and comparison.has_draws():
                with _compat.without_compiler_warnings():
                    lines = comparison.masks_of_replicas(run_dropping(dropping_args))
            head = f"{place} is not the same on {mesh.size} devices:"
            raise_if_any(AssertionError, head, lines)


class _Reference:
    """Runs the step on one device, exactly and with rounding errors, to compare a mesh with it.

    Attributes:
      rounding: the sizes of the rounding errors of the step's arrays.
      _run: the step, recorded on the mesh of one device. It serves exact and rounded runs.
      _args: the arguments of the exact run. Each call changes modules and optimizers in them.
      _rounded_args: `SAMPLES` copies of the arguments with random rounding errors, for one run
        each. Each call changes these copies too, so they keep their errors in the next call.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        mesh: Mesh,
        options: dict[str, Any],
        tolerance: float | None,
    ):
        """Traces the step for the size of its rounding errors, and copies the arguments.

        Args:
          mesh: the mesh; the one device is its first.
          options: the options of `jit` on the mesh.
          tolerance: as for :func:`assert_same`.
        """
        device = mesh.devices.flat[0]
        device_options = dict(options)
        for name in ("in_shardings", "out_shardings"):
            if name in options:
                device_options[name] = jax.tree.map(
                    lambda x: _on_device(x, device), options[name], is_leaf=lambda x: x is None
                )
        device_mesh = _mesh_of_one(mesh, device)
        self._run = RecordedStep(step, device_mesh, device_options)
        self._args = copied(args)
        traced = jit(step, mesh=device_mesh, **device_options).trace(*self._args)
        self.rounding = Rounding.of(traced.jaxpr, mesh.size, tolerance)
        # These copies have random errors of that size. The results on the mesh may differ from the
        # results of one device as far as these errors move the latter (`Spread`).
        self._rounded_args = [copied(args, self.rounding, seed) for seed in range(SAMPLES)]

    def call(
        self, advance: Callable[[str], None]
    ) -> tuple[dict[str, np.ndarray[Any, Any]], Outcome, Spread]:
        """Runs the step once more on the arguments as the last call left them.

        Args:
          advance: the function of `progress` that is called after each part, with its name.

        Returns:
          (arrays in the arguments before the call, what the call computes, how far rounding errors
          move its results).
        """
        arrays = self._run.arrays(self._args)
        before = {name: numbers(array) for name, array in arrays.items()}
        exact = self._run(self._args)
        advance("one device")
        rounded = (self._run(args, self.rounding) for args in self._rounded_args)
        spread = Spread(exact, rounded)
        advance("rounding errors")
        return before, exact, spread


def _with_devices(mesh: Mesh | AbstractMesh | Mapping[str, int]) -> Mesh:
    """Returns a mesh with devices: an abstract mesh, or sizes by name, get the devices at hand."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, AbstractMesh):
        return make_mesh(dict(mesh.shape), mesh.axis_types)
    return make_mesh(dict(mesh))


def _check_size(mesh: Mesh | AbstractMesh | Mapping[str, int], devices: int) -> None:
    """Raises a ValueError unless a mesh takes this number of devices."""
    sizes = [*(mesh if isinstance(mesh, Mapping) else mesh.shape).values()]
    # An axis of size -1 takes the devices that the other axes leave, so nothing is checked then.
    if -1 not in sizes and np.prod(sizes) != devices:
        raise ValueError(
            f"assert_same: devices={devices}, but the axes of the mesh have the sizes {sizes}. "
            "Pass the sizes of the whole mesh by name, as in mesh={'data': 64, 'model': 16}."
        )


def _mesh_of_one(mesh: Mesh | AbstractMesh, device: jax.Device) -> Mesh:
    """Returns a mesh of one device with the same axes and axis types, each of size 1."""
    devices = np.array(device).reshape([1] * len(mesh.axis_names))
    return Mesh(devices, mesh.axis_names, mesh.axis_types)


def _on_device(sharding: Any, device: jax.Device) -> Any:
    """Returns the same sharding on a mesh of one device.

    Specs have no mesh and stay as they are, because the mesh of one device has the same axes. None
    becomes ``P()``, which means the same on one device. With None, an array would be committed only
    after the first call, so the second call would compile again.
    """
    if sharding is None:
        return P()
    if isinstance(sharding, StateSharding):
        shardings = [_on_device(x, device) for x in sharding.shardings]
        return StateSharding(
            zip(sharding.filters, shardings, strict=True),
            on_indivisible=sharding.on_indivisible,
            activations=sharding.activations,
        )
    if isinstance(sharding, NamedSharding):
        mesh = _mesh_of_one(sharding.mesh, device)
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding
