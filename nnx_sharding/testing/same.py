"""``assert_same``: a step on one device and on a mesh, and the first module where they differ.

The step runs on one device and on the mesh. Each call of a module is recorded: callbacks in the
program keep what it takes and returns, on each device, and a ``custom_vjp`` keeps the gradients.
The records of one call of the step are compared in the order in which the modules ran, backwards
for gradients, so the first difference is where the error is. `rounding` derives how far the numbers
may be apart, from runs on one device in which every record is changed by its rounding error.

It finds no error that one device has as well, and none that stays below the tolerance.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from .. import _compat
from ..activations.axis_types import arrays_in
from ..activations.calls import FRAME, RECORD, Calls
from ..activations.intercept import current_handler, with_handler
from ..activations.variables import own_variables
from ..analysis.parameters import spec_text
from ..core.constrain import type_spec
from ..core.flatten import flatten
from ..core.unflatten import unflatten
from ..diagnostics.progress import progress
from ..errors import message
from ..partition.mesh import make_mesh
from ..specs.fitting import axes_of_type, spec_axes
from ..specs.paths import accessor, path_string
from ..specs.state_sharding import StateSharding
from ..transforms.jit import jit
from .rounding import QUANTILE, SAMPLES, Rounding, is_inexact
from .virtual_devices import call_with_devices

Array: TypeAlias = "jax.Array | np.ndarray[Any, Any]"

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

    Arrays may differ by the rounding error of their type and of the longest sum in the step, and by
    what such errors in inputs and modules change on one device. In a ``shard_map``, ``nnx.Dropout``
    returns its input, and it is an error if it drops the same elements of different shards.

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
      TypeError: the step is jitted.

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
    if devices is not None:
        options |= {"steps": steps, "runs": runs, "tolerance": tolerance}
        mesh = _sized(mesh, devices)
        call_with_devices(
            devices, assert_same, step, *args, shardings=shardings, mesh=mesh, **options
        )
        return
    mesh = _with_devices(mesh)
    device = np.array(mesh.devices.flat[:1]).reshape([1] * mesh.devices.ndim)
    device_mesh = Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)
    options["in_shardings"] = shardings
    run_on_mesh = _RecordedStep(step, mesh, options)
    for name in {"in_shardings", "out_shardings"} & options.keys():
        options[name] = jax.tree.map(lambda x: _on_device(x, device.flat[0]), options[name])
    # Each run changes its own copy, which is its input in the next step.
    device_args, mesh_args = _copy(args), [_copy(args) for _ in range(runs)]
    traced = jit(step, mesh=device_mesh, **options).trace(*device_args)
    rounding = Rounding.of(traced.jaxpr, mesh.size)
    if tolerance is not None:
        rounding = rounding.with_tolerance(tolerance)
    run_on_device = _RecordedStep(step, device_mesh, options)
    run_rounded = _RecordedStep(step, device_mesh, options, rounding)
    rounded_args = [_copy(args, rounding, seed) for seed in range(SAMPLES)]
    name = getattr(step, "__name__", "the step")
    with progress(f"assert_same: {name} on {mesh.size} devices", 3 * steps) as advance:
        for count in range(1, steps + 1):
            # The compiler would warn of each copy that a record of a sharded array is.
            with _compat.without_compiler_warnings():
                arrays = run_on_device.arrays(device_args)
                before = {name: _numbers(array) for name, array in arrays.items()}
                on_device = run_on_device(device_args)
                advance("one device")
                spread = _Spread(on_device, (run_rounded(args) for args in rounded_args))
                advance("rounding errors")
                on_mesh, *others = map(run_on_mesh, mesh_args)
                advance("the mesh")
            place = f"call {count} of {name}"
            for other in others:
                if lines := _unequal_runs(on_mesh, other):
                    head = f"{place} does not repeat bit for bit on {mesh.size} devices:"
                    raise AssertionError(message(head, lines))
            comparison = _Comparison(before, on_device, spread, on_mesh, rounding, mesh)
            if lines := comparison.shared_masks() or comparison.differences():
                head = f"{place} is not the same on {mesh.size} devices:"
                raise AssertionError(message(head, lines))


def _with_devices(mesh: Mesh | AbstractMesh | Mapping[str, int]) -> Mesh:
    """Makes a mesh of the devices at hand, if it has none."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, AbstractMesh):
        return make_mesh(dict(mesh.shape), mesh.axis_types)
    return make_mesh(dict(mesh))


def _sized(
    mesh: Mesh | AbstractMesh | Mapping[str, int], devices: int
) -> Mesh | AbstractMesh | Mapping[str, int]:
    """Returns a mesh, unless it does not take this number of devices."""
    sizes = [*dict(mesh).values()] if isinstance(mesh, Mapping) else [*mesh.shape.values()]
    if -1 not in sizes and np.prod(sizes) != devices:
        raise ValueError(
            f"assert_same: devices={devices}, but the axes of the mesh have the sizes {sizes}. "
            "Pass the sizes of the whole mesh by name, as in mesh={'data': 64, 'model': 16}."
        )
    return mesh


def arrays_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arrays in named values by expressions for them; of random keys, their words."""
    flat = flatten(dict(named))
    structure, arrays = flat.structure, {}
    for location in structure.walk(structure.root, iter(structure.root_slots)):
        for i, slot in enumerate(location.slots):
            leaf, (name, *path) = flat.leaves[slot], location.path
            if len(location.slots) > 1:  # a Variable that holds a pytree
                path.append(i)
            if isinstance(leaf, jax.Array):
                arrays[accessor(str(name), tuple(path))] = _raw(leaf)
    return arrays


def _on_device(sharding: Any, device: jax.Device) -> Any:
    """Returns the same sharding on a mesh of one device; specs have none."""
    if isinstance(sharding, StateSharding):
        shardings = [_on_device(x, device) for x in sharding.shardings]
        return StateSharding(
            zip(sharding.filters, shardings, strict=True),
            on_indivisible=sharding.on_indivisible,
            activations=sharding.activations,
        )
    if isinstance(sharding, NamedSharding):
        axes = sharding.mesh.axis_names
        mesh = Mesh(np.array(device).reshape([1] * len(axes)), axes, sharding.mesh.axis_types)
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


# The values of a site on each device, in the order of the calls. Keys are the number of the site
# and whether it is the gradient; a device is named by its indices along the site's Manual axes.
Values: TypeAlias = "dict[tuple[int, bool], dict[tuple[int, ...], list[np.ndarray[Any, Any]]]]"


class _Site(NamedTuple):
    """An array that a call of a module takes or returns."""

    module: str  # such as ``model.blocks[0].up (Linear)``
    side: str  # "input", "output", or "mask" of a dropout
    axes: tuple[Any, ...]  # the Manual ones, along which each device has its own value
    start: int  # the first site of the call
    inputs: list[str]  # of the call, with their specs


class _Outcome(NamedTuple):
    """What one call of a step computed."""

    arrays: dict[str, Any]  # those returned and those in the arguments, by expressions for them
    sites: list[_Site]
    values: Values


class _RecordedStep:
    """A step compiled for one mesh, with records of what its modules take and return.

    A *site* is one array that one call of a module takes or returns. Sites are numbered while the
    step is traced, so a number means the same on all meshes.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        options: dict[str, Any],
        rounding: Rounding | None = None,  # None to change nothing
    ):
        @functools.wraps(step)
        def recorded_step(*args: Any) -> Any:
            handler_of_jit: Any = current_handler()
            handler = functools.partial(self._record_call, handler_of_jit)
            return with_handler(handler, (), step, *args)

        self._parameters, self._mesh, self._rounding = inspect.signature(step), mesh, rounding
        self._fun = jit(recorded_step, mesh=mesh, **options)
        self._calls = Calls()  # where calls are recorded, `jit` names all modules
        self._sites: list[_Site] = []  # filled by the first call, which traces the step
        self._values: Values = {}  # filled by the callbacks of each call

    def __call__(self, args: Any) -> _Outcome:
        """Runs the step, and returns what it computed."""
        self._values = defaultdict(lambda: defaultdict(list))
        with RECORD(self._calls):
            out = self._fun(*args)
        arrays = self.arrays(args, {_RESULT: out})
        # Both, because a callback may run after the arrays are ready.
        jax.block_until_ready(arrays)
        jax.effects_barrier()
        return _Outcome(arrays, self._sites, self._values)

    def arrays(
        self, args: tuple[Any, ...], more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns all arrays in the arguments, and in ``more``, by expressions for them."""
        return arrays_of({**(more or {}), **self._parameters.bind(*args).arguments})

    def _record_call(
        self,
        outer: Callable[..., Any],
        module: Any,
        method: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Handles the call of a method in the trace: makes ``outer`` record it.

        Args:
          outer: what handles calls in `jit`, such as by constraining activations.
          module: a module, or an optimizer, whose calls are not recorded.
          method: the name of the method.
          call: the method, bound to the module.
          args: its arguments.
          kwargs: its keyword arguments.
        """
        if not isinstance(module, nnx.Module):
            return outer(module, method, call, args, kwargs)

        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            manual = axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)
            axes = tuple(axis for axis in self._mesh.axis_names if axis in manual)
            frame: Any = FRAME.get()  # of this call, since it is within the handler of `jit`
            name = frame.tag.accessor
            if method != "__call__":
                name += f".{method}"
            site = _Site(f"{name} ({type(module).__name__})", "input", axes, len(self._sites), [])
            for x in arrays_in((args, kwargs)):
                _add_input(site, "", x)
            for path, variable in own_variables(module):
                _add_input(site, f"{path_string(path)}: ", _compat.get_value(variable))
            args, kwargs = self._record_arrays(site, (args, kwargs))
            out = call(*args, **kwargs)
            if isinstance(module, nnx.Dropout) and axes:
                # Each device draws its own mask, so the result cannot be that of one device. The
                # mask is recorded, and the input returned instead.
                [x] = arrays_in(args[:1] or kwargs["inputs"])
                if out is not x:
                    self._record_arrays(site._replace(side="mask"), out != 0)
                    out = x
            return self._record_arrays(site._replace(side="output"), out)

        return outer(module, method, recorded_call, args, kwargs)

    def _record_arrays(self, site: _Site, tree: Any) -> Any:
        """Returns the same tree, whose arrays and their gradients the program records.

        Each array becomes a site of its own. The gradient of the result is the one that is
        recorded, so the caller has to go on with what is returned.
        """

        def record_array(x: Any) -> Any:
            if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            number = len(self._sites)
            self._sites.append(site)

            def record(x: jax.Array, backward: bool) -> None:
                def keep(x: Any, *indices: Any) -> None:
                    device = tuple(map(int, indices))
                    self._values[number, backward][device].append(np.array(x))

                jax.debug.callback(keep, x, *map(jax.lax.axis_index, site.axes))

            def record_value(x: jax.Array) -> jax.Array:
                x = x if self._rounding is None else self._rounding.rounded(x)
                record(x, backward=False)
                return x

            def record_gradient(_: None, gradient: jax.Array) -> tuple[jax.Array]:
                gradient = gradient if self._rounding is None else self._rounding.rounded(gradient)
                record(gradient, backward=True)
                return (gradient,)

            if not is_inexact(x):
                record(x, backward=False)
                return x
            identity = jax.custom_vjp(record_value)
            identity.defvjp(lambda x: (record_value(x), None), record_gradient)
            return identity(x)

        return jax.tree.map(record_array, tree, is_leaf=_compat.is_graph_object)


def _add_input(site: _Site, label: str, x: Any) -> None:
    """Adds the type of an array to ``site.inputs``; anything else is left out.

    On Auto axes, the compiler decides the spec: it is added when the program is compiled.
    """
    if not isinstance(x, jax.Array):
        return
    text, index = label + jax.typeof(x).str_short(short_dtypes=True), len(site.inputs)
    site.inputs.append(text)

    def add_spec(sharding: Any) -> None:
        site.inputs[index] = f"{text} {spec_text(getattr(sharding, 'spec', None))}"

    if not site.axes and type_spec(x) is None:
        jax.debug.inspect_array_sharding(x, callback=add_spec)


class _Error(NamedTuple):
    """How far an array is from the same one on one device, and how far it may be."""

    distance: float  # NaN where only one of them is NaN
    limit: float

    @property
    def is_wrong(self) -> bool:
        """Whether it is too far; a NaN is, which is why this is not ``distance > limit``."""
        return not self.distance <= self.limit

    def __str__(self) -> str:
        return f"max error {self.distance:.2g}, tolerance {self.limit:.2g}"


class _Spread:
    """How far the arrays and records of rounded runs are from those of an exact one.

    For each, the root of the mean square of the largest difference in each run: the estimate of its
    standard deviation. It is NaN where only one of the runs is NaN.
    """

    def __init__(self, exact: _Outcome, rounded: Iterable[_Outcome]):
        squares: dict[Any, Any] = defaultdict(float)
        for outcome in rounded:
            for name, array in exact.arrays.items():
                distance = _distance(_numbers(array), _numbers(outcome.arrays[name]))
                squares[name] += distance**2 / SAMPLES
            for key, devices in exact.values.items():
                for calls, others in zip(
                    devices.values(), outcome.values.get(key, {}).values(), strict=False
                ):
                    for index, (x, other) in enumerate(zip(calls, others, strict=False)):
                        distance = _distance(_numbers(x), _numbers(other))
                        squares[(*key, index)] += distance**2 / SAMPLES
        self._squares = squares

    def __getitem__(self, key: Any) -> float:
        return float(self._squares.get(key, 0.0) ** 0.5)


class _Comparison:
    """One call of a step on one device, there with rounding errors, and on the mesh."""

    def __init__(
        self,
        before: dict[str, np.ndarray[Any, Any]],
        on_device: _Outcome,
        spread: _Spread,
        on_mesh: _Outcome,
        rounding: Rounding,
        mesh: Mesh,
    ):
        self._on_device, self._spread, self._on_mesh = on_device, spread, on_mesh
        self._before, self._rounding, self._mesh = before, rounding, mesh

    def _limit(self, x: Array, key: Any) -> float:
        """Returns by how much an array may differ from ``x``, its value on one device."""
        return self._rounding.of_array(x) + QUANTILE * self._spread[key]

    def differences(self) -> list[str]:
        """Lists the arrays that differ after the call, after the first module that does."""
        lines = []
        for name, array in self._on_mesh.arrays.items():
            if name in self._on_device.arrays:
                expected = self._on_device.arrays[name]
                limit = self._limit(expected, name)
            else:  # only the mesh has it, so it is wrong
                expected, limit = np.array(np.nan), 0.0
            expected = _numbers(expected)
            shards = [(shard.index, _numbers(shard.data)) for shard in array.addressable_shards]
            distance = max(
                _distance(shard, expected[index] if expected.ndim else expected)
                for index, shard in shards
            )
            error = _Error(distance, limit)
            if error.is_wrong:
                # Of an array that the step changes, the change is what may be multiplied.
                start = self._before.get(name, np.zeros_like(expected))
                change, right = _numbers(array) - start, expected - start
                factor = _multiple(change, right, limit, self._mesh)
                lines.append(f"  {name}: {error}{factor}{_unequal_replicas(array, shards, limit)}")
        return [self._first_wrong_module(lines), *lines] if lines else []

    def _first_wrong_module(self, lines: list[str]) -> str:
        """Describes the first module, in the order of execution, that computes something else.

        Outputs are looked at first, then gradients. On Manual axes a device may hold a term of a
        sum that comes later, so a wrong value there counts last, and only if nothing else is wrong.

        Args:
          lines: what :meth:`differences` has found.
        """
        # If what the step returns is right, a wrong output on Manual axes is a term of a sum.
        returns_something = any(name.startswith(_RESULT) for name in self._on_mesh.arrays)
        is_result_right = returns_something and not any(
            line.startswith(f"  {_RESULT}") for line in lines
        )
        for backward, with_manual in ((False, not is_result_right), (True, True), (False, True)):
            if text := self._first_wrong_site(backward, with_manual):
                return text
        # All that modules took and returned is right: it was a module that changed its own state.
        modules = {site.module: site.module.split(" ")[0] for site in self._on_mesh.sites}
        for line in lines:
            owners = [site for site, path in modules.items() if line.startswith(f"  {path}.")]
            if owners:
                return f"  {max(owners, key=len)} is the first module with an array that differs"
        return "  outside of modules: their outputs and gradients are the same"

    def _first_wrong_site(self, backward: bool, with_manual: bool) -> str:
        """Describes the first site with a wrong value, or gradient; empty if there is none.

        Args:
          backward: look at gradients, in the order of the backward pass, where what a module
            computes is the gradient of its input.
          with_manual: look also at sites on Manual axes, outside of modules that are right.
        """
        sites = self._on_mesh.sites
        computed_side = "input" if backward else "output"
        errors = {}
        for number in range(len(sites)):
            if error := self._site_error(number, backward):
                errors[number] = error
        wrong = [number for number, error in errors.items() if error.is_wrong]
        # Calls of modules are named by their first site.
        checked_calls = {sites[i].start for i in errors if sites[i].side == computed_side}
        wrong_calls = {sites[i].start for i in wrong if sites[i].side == computed_side}
        right_calls = checked_calls - wrong_calls
        last_site = {site.start: number for number, site in enumerate(sites)}
        for number in sorted(wrong, reverse=backward):
            site = sites[number]
            if site.axes:
                is_within_right = any(start <= number <= last_site[start] for start in right_calls)
                if is_within_right or not with_manual:
                    continue
            if site.side == computed_side:
                what = "gradient" if backward else "output"
                text = f"{site.module} is the first module whose {what} differs"
            else:
                place = "after" if backward else "before"
                text = f"outside of modules, {place} {site.module}"
            return f"  {text}: {errors[number]}\n    inputs: {', '.join(site.inputs)}"
        return ""

    def _site_error(self, number: int, backward: bool) -> _Error | None:
        """Returns the largest error of a site over its limit; None if it is unknown.

        A site in a loop has several values. It is unknown if the runs did not record as many.
        """
        key, site = (number, backward), self._on_mesh.sites[number]
        if site.side == "mask" or self._on_device.sites[number][:2] != site[:2]:
            return None
        shards = dict(sorted(self._on_mesh.values.get(key, {}).items()))
        expected = [*self._on_device.values.get(key, {}).values()]
        if len(expected) != 1 or not shards:
            return None
        calls = [expected[0], *shards.values()]
        if len({*map(len, calls)}) > 1:
            return None
        axis_sizes = [index + 1 for index in max(shards)]
        errors = []
        for index, (x, *parts) in enumerate(zip(*calls, strict=True)):
            stacked = np.array([*map(_numbers, parts)])
            by_axis = stacked.reshape(*axis_sizes, *stacked.shape[1:])
            distance = _distance_of_shards(_numbers(x), by_axis)
            if distance is None:
                return None
            errors.append(_Error(distance, self._limit(x, (number, backward, index))))
        return max(errors, key=lambda error: error.is_wrong, default=None)

    def shared_masks(self) -> list[str]:
        """Lists each dropout that drops the same elements of shards with different inputs."""
        axes_by_module = {}
        for (number, backward), masks in self._on_mesh.values.items():
            module, side, axes, *_ = self._on_mesh.sites[number]
            if backward or side != "mask":
                continue
            inputs = self._on_mesh.values[number - 1, False]
            for device, other in itertools.combinations(masks, 2):
                kept = np.mean(masks[device])
                # Masks with different keys are equal with this probability.
                by_chance = (kept**2 + (1 - kept) ** 2) ** np.size(masks[device])
                is_shared = np.array_equal(masks[device], masks[other]) and by_chance <= _CHANCE
                if is_shared and not np.array_equal(inputs[device], inputs[other]):
                    indices = zip(axes, device, other, strict=True)
                    axes_by_module[module] = [axis for axis, i, j in indices if i != j]
        text = "drops the same elements of shards with different inputs, over"
        remedy = "Give each its own key: jax.random.fold_in(key, jax.lax.axis_index(...))."
        return [
            f"  {module} {text} {' and '.join(map(repr, axes))}.\n    {remedy}"
            for module, axes in axes_by_module.items()
        ]


_RESULT = "the result"
_CHANCE = 1e-6


def _unequal_replicas(
    array: jax.Array, shards: list[tuple[Any, np.ndarray[Any, Any]]], limit: float
) -> str:
    """Says so, if devices have different values of the same part of an array.

    Args:
      array: the array.
      shards: the index and the numbers of each shard.
      limit: by how much they may differ.
    """
    first = {str(index): shard for index, shard in reversed(shards)}
    distance = max(_distance(shard, first[str(index)]) for index, shard in shards)
    if distance <= limit or not isinstance(array.sharding, NamedSharding):
        return ""
    used = [*spec_axes(array.sharding.spec)]
    unused = [axis for axis in array.sharding.mesh.axis_names if axis not in used]
    return f"; its replicas over {', '.join(map(repr, unused))} are not equal"


def _multiple(
    x: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], limit: float, mesh: Mesh
) -> str:
    """Says so, if an array is the right one, multiplied or divided by the sizes of mesh axes."""
    if x.shape != expected.shape or not np.isfinite(x).all() or not np.isfinite(expected).all():
        return ""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            factor = int(np.prod([mesh.shape[axis] for axis in chosen]))
            names = " and ".join(map(repr, chosen))
            if _distance(x, factor * expected) <= factor * limit:
                return f"; {factor} times as large: summed once too often over {names}"
            if _distance(x * factor, expected) <= factor * limit < np.abs(expected).max(initial=0):
                return f"; {factor} times too small: not summed over {names}, or divided twice"
    return ""


def _unequal_runs(first: _Outcome, second: _Outcome) -> list[str]:
    """Lists what two runs of one program on one mesh have not in common, bit for bit."""
    lines = []
    for number, site in enumerate(first.sites):
        for backward in (False, True):
            key = number, backward
            runs = [outcome.values.get(key, {}) for outcome in (first, second)]
            pairs = [(runs[0][device], runs[1].get(device, [])) for device in runs[0]]
            if not all(map(_all_equal, *zip(*pairs, strict=True))) if pairs else False:
                what = "gradient" if backward else site.side
                lines.append(f"  the {what} of {site.module} differs first")
                break
        if lines:
            break
    return lines + unequal_arrays(first.arrays, second.arrays)


def unequal_arrays(first: Mapping[str, Array], second: Mapping[str, Array]) -> list[str]:
    """Lists the arrays that are not equal bit for bit."""
    lines = []
    for name, array in first.items():
        if not _all_equal([array], [second[name]]):
            distance = _distance(_numbers(array), _numbers(second[name]))
            lines.append(f"  {name}: largest difference {distance:.2g}")
    return lines


def _all_equal(arrays: Sequence[Array], others: Sequence[Array]) -> bool:
    """Whether arrays have the same bytes, so that NaN equals itself and 0.0 is not -0.0."""
    pairs = itertools.zip_longest(map(np.asarray, arrays), map(np.asarray, others))
    return all(x is not None and y is not None and x.tobytes() == y.tobytes() for x, y in pairs)


def _distance_of_shards(x: np.ndarray[Any, Any], shards: np.ndarray[Any, Any]) -> float | None:
    """Returns the largest difference between an array and its shards, put together at best.

    How they are laid out is not known where they are recorded. So all layouts are tried, and the
    best one counts: a wrong layout of right values differs much more.

    Args:
      x: the array.
      shards: of shape (size of each mesh axis…, shape of a shard…).

    Returns:
      None if no layout has the shape of the array.
    """
    num_axes, distances = shards.ndim - x.ndim, []
    # Along a mesh axis shards are replicas (-1), or slices of a dimension of the array.
    for layout in itertools.product(range(-1, x.ndim), repeat=num_axes):
        whole = shards
        for mesh_axis, dimension in reversed([*enumerate(layout)]):  # the last varies fastest
            if dimension >= 0:
                # (…, n, …, size, …) → (…, 1, …, n · size, …)
                position = num_axes - 1 + dimension
                whole = np.moveaxis(whole, mesh_axis, position)
                merged = [*whole.shape[:position], -1, *whole.shape[position + 2 :]]
                whole = np.expand_dims(whole.reshape(merged), mesh_axis)
        if whole.shape[num_axes:] == x.shape:
            distances.append(_distance(whole, x))
    return min(distances, default=None)


def _copy(args: Any, rounding: Rounding | None = None, seed: int = 0) -> Any:
    """Copies arguments to new arrays on no particular device, changed by rounding errors or not."""
    flat, random = flatten(args), np.random.default_rng(seed)

    def copy_leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        array = np.asarray(_raw(x))
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(x))
        if rounding is not None and is_inexact(x):
            array = array * (1 + random.choice([-1, 1], x.shape) * rounding.relative(x.dtype))
        # First in NumPy: JAX warns if it is asked for a dtype that it narrows, such as int64.
        return jnp.array(np.asarray(array, x.dtype))

    return unflatten(flat.structure, [*map(copy_leaf, flat.leaves)]).root


def _raw(x: jax.Array | np.ndarray[Any, Any]) -> Any:
    """Returns an array; of PRNG keys, their words."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _numbers(x: Array) -> np.ndarray[Any, Any]:
    """Returns an array in the largest type, in which differences are exact enough."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _distance(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Returns the largest difference; 0 where both are the same infinity or NaN."""
    with np.errstate(invalid="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        return float(np.where(same, 0, np.abs(x - y)).max(initial=0))
