"""``assert_same``: a step on one device and on a mesh, and the first module where they differ.

The step runs three times: on one device, there with inputs changed by a rounding error, and on the
mesh. How much the second differs from the first says how much the third may. Each call of a module
is recorded: callbacks in the program keep what it takes and returns, on each device, and a
``custom_vjp`` keeps the gradients. The records of one call of the step are compared in the order in
which the modules ran, backwards for gradients, so the first difference is where the error is.

It finds no error that one device has as well, and none that stays below the tolerance.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from .. import _compat
from ..activations.axis_types import arrays_in
from ..activations.calls import FRAME, RECORD, Calls
from ..activations.intercept import handler_here, with_handler
from ..activations.variables import own_variables
from ..analysis.parameters import spec_text
from ..core.constrain import type_spec
from ..core.flatten import flatten
from ..core.unflatten import unflatten
from ..errors import message
from ..specs.fitting import axes_of_type, spec_axes
from ..specs.paths import accessor, path_string
from ..transforms.jit import jit

Array: TypeAlias = "jax.Array | np.ndarray[Any, Any]"

__tracebackhide__ = True  # pytest shows the line of the test that failed


def assert_same(
    step: Callable[..., Any],
    *args: Any,
    shardings: Any,
    mesh: Mesh,
    steps: int = 3,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Fails if a step computes other numbers on a mesh than on one device.

    On one device, it runs on a mesh with the same axes of size 1, where collectives do nothing, and
    a :func:`~nnx_sharding.partition.pipeline` has one stage.
    After each call, what it returns and all arrays in its arguments are compared, on every device.
    The error names the first module, in the order of execution, whose output differs, or else the
    first one whose gradient does.

    Arrays may differ by ``tolerance`` times their largest element, and by 8 times what changes on
    one device if all inputs change by their rounding error. In a ``shard_map``, where each device
    draws its own random numbers, ``nnx.Dropout`` returns its input, and it is an error if it drops
    the same elements of different shards.

    Args:
      step: a function that is not jitted, such as a training step, or the call of a model. It takes
        the mesh from the context; so does a ``shard_map`` in it.
      *args: its arguments, which are copied. Changes that a call makes to modules and optimizers
        are there in the next one.
      shardings: ``in_shardings`` of :func:`~nnx_sharding.jit`.
      mesh: the mesh.
      steps: the number of calls.
      tolerance: relative; None for the square root of the machine epsilon of the least precise
        type among all arrays: 3e-4 for float32, 0.09 for bfloat16.
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
    device = np.array(mesh.devices.flat[:1]).reshape([1] * mesh.devices.ndim)
    alone = Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)
    one, many = (_Run(step, m, {"in_shardings": shardings, **options}) for m in (alone, mesh))
    inputs = (one, _copied(args)), (one, _copied(args, rounded=True)), (many, _copied(args))
    for count in range(1, steps + 1):
        # The compiler would warn of each copy that a record of a sharded array is.
        with _compat.without_compiler_warnings():
            outcomes = [run(copies) for run, copies in inputs]
        compared = _Compared(*outcomes, tolerance=tolerance)
        if lines := compared.shared_masks() or compared.differences():
            name = getattr(step, "__name__", "the step")
            head = f"call {count} of {name} is not the same on {mesh.size} devices:"
            raise AssertionError(message(head, lines))


# By the number of a site, and whether it is the gradient: the values on each device, in order. A
# device is named by its indices along the Manual axes.
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


class _Run:
    """A step compiled for one mesh, with records of what its modules take and return.

    A *site* is one array that one call of a module takes or returns; the number of a site is the
    same on all meshes, since tracing is the same.
    """

    def __init__(self, step: Callable[..., Any], mesh: Mesh, options: dict[str, Any]):
        @functools.wraps(step)
        def recorded(*args: Any) -> Any:
            return with_handler(functools.partial(self._call, handler_here()), (), step, *args)

        self._parameters, self._mesh = inspect.signature(step), mesh
        self._fun = jit(recorded, mesh=mesh, **options)
        self._calls = Calls()  # where calls are recorded, `jit` names all modules
        self._sites: list[_Site] = []
        self._values: Values = {}

    def __call__(self, args: Any) -> _Outcome:
        """Runs the step, and returns what it computed."""
        self._values = defaultdict(lambda: defaultdict(list))
        with RECORD(self._calls):
            out = self._fun(*args)
        flat = flatten({_RESULT: out, **self._parameters.bind(*args).arguments})
        arrays = {}
        for location in flat.structure.walk(flat.structure.root, iter(flat.structure.root_slots)):
            for i, slot in enumerate(location.slots):
                path = (*location.path[1:], *[i] * (len(location.slots) > 1))
                if isinstance(x := flat.leaves[slot], jax.Array):
                    arrays[accessor(str(location.path[0]), path)] = _raw(x)
        jax.block_until_ready(arrays)
        jax.effects_barrier()
        return _Outcome(arrays, self._sites, self._values)

    def _call(self, outer: Any, module: Any, method: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Calls a method as `jit` does, with records before and after it."""
        if not isinstance(module, nnx.Module):  # an optimizer
            return outer(module, method, call, args, kwargs)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            manual = axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)
            axes = tuple(axis for axis in self._mesh.axis_names if axis in manual)
            frame: Any = FRAME.get()
            name = frame.tag.accessor + f".{method}" * (method != "__call__")
            start, kind = len(self._sites), type(module).__name__
            site = _Site(f"{name} ({kind})", "input", axes, start, [])
            for x in arrays_in((args, kwargs)):
                _describe(site, "", x)
            for path, variable in own_variables(module):
                _describe(site, f"{path_string(path)}: ", _compat.get_value(variable))
            args, kwargs = self._tapped(site, (args, kwargs))
            out = call(*args, **kwargs)
            if isinstance(module, nnx.Dropout) and axes:
                # Each device draws its own mask, so the result cannot be that of one device. The
                # mask is recorded, and the input returned instead.
                [x] = arrays_in(args[:1] or kwargs["inputs"])
                if out is not x:
                    self._tapped(site._replace(side="mask"), (out != 0) + 0 * out)
                    out = x
            return self._tapped(site._replace(side="output"), out)

        return outer(module, method, recorded, args, kwargs)

    def _tapped(self, site: _Site, tree: Any) -> Any:
        """Returns the same tree, whose arrays and gradients the program records."""

        def tap(x: Any) -> Any:
            if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            number = len(self._sites)
            self._sites.append(site)

            def record(x: Any, backward: bool) -> Any:
                def keep(x: Any, *where: Any) -> None:
                    self._values[number, backward][tuple(map(int, where))].append(np.array(x))

                jax.debug.callback(keep, x, *map(jax.lax.axis_index, site.axes))
                return x

            record(x, False)
            # The identity, whose derivative records the gradient that it passes on.
            identity = jax.custom_vjp(lambda x: x)
            identity.defvjp(lambda x: (x, None), lambda _, gradient: (record(gradient, True),))
            return identity(x) if _is_inexact(x) else x

        return jax.tree.map(tap, tree, is_leaf=_compat.is_graph_object)


def _describe(site: _Site, label: str, x: Any) -> None:
    """Adds an input with its type, or the spec that it has when the program is compiled."""
    if isinstance(x, jax.Array):
        text, index = label + jax.typeof(x).str_short(short_dtypes=True), len(site.inputs)
        site.inputs.append(text)

        def compiled(sharding: Any) -> None:
            site.inputs[index] = f"{text} {spec_text(getattr(sharding, 'spec', None))}"

        if not site.axes and type_spec(x) is None:
            jax.debug.inspect_array_sharding(x, callback=compiled)


class _Compared:
    """One call of a step on one device, there with rounded inputs, and on the mesh."""

    def __init__(
        self, one: _Outcome, rounded: _Outcome, many: _Outcome, *, tolerance: float | None
    ):
        self._one, self._rounded, self._many = one, rounded, many
        recorded = [x for of in one.values.values() for xs in of.values() for x in xs[:1]]
        eps = [_epsilon(x.dtype) for x in (*one.arrays.values(), *recorded) if _is_inexact(x)]
        self._tolerance = max(eps, default=0.0) ** 0.5 if tolerance is None else tolerance

    def _limit(self, x: Array, rounded: Array) -> float:
        """Returns by how much an array may differ from that on one device."""
        scale = np.abs(_numbers(x)).max(initial=0) if _is_inexact(x) else 0
        return float(scale * self._tolerance + 8 * _distance(_numbers(x), _numbers(rounded)))

    def differences(self) -> list[str]:
        """Lists the arrays that differ after the call, after the first module that does."""
        lines = []
        for name, array in self._many.arrays.items():
            x, limit = np.array(np.nan), 0.0
            if name in self._one.arrays:
                x = _numbers(self._one.arrays[name])
                limit = self._limit(self._one.arrays[name], self._rounded.arrays[name])
            shards = [(shard.index, _numbers(shard.data)) for shard in array.addressable_shards]
            error = max(_distance(shard, x[index] if x.ndim else x) for index, shard in shards)
            if not error <= limit:
                first = {str(index): shard for index, shard in reversed(shards)}
                apart = max(_distance(shard, first[str(index)]) for index, shard in shards)
                note = ""
                if not apart <= limit and isinstance(array.sharding, NamedSharding):
                    used, axes = [*spec_axes(array.sharding.spec)], array.sharding.mesh.axis_names
                    over = ", ".join(repr(axis) for axis in axes if axis not in used)
                    note = f"; its replicas over {over} are not equal"
                lines.append(f"  {name}: {_error(error, limit)}{note}")
        return [self._first(lines), *lines] if lines else []

    def _first(self, lines: list[str]) -> str:
        """Describes the first module, in the order of execution, that differs.

        Outputs are looked at first, then gradients. On Manual axes, what a device has may be a term
        of a sum that comes later, so such outputs count last, and only if nothing else is wrong.
        """
        sites = self._many.sites
        last = {site.start: number for number, site in enumerate(sites)}
        # If the results are right, each shard of an output may hold a term of a later sum.
        is_right = any(name.startswith(_RESULT) for name in self._many.arrays) and not any(
            line.startswith(f"  {_RESULT}") for line in lines
        )
        for backward, shards in ((False, not is_right), (True, True), (False, True)):
            what, own = ("gradient", "input") if backward else ("output", "output")
            found = {i: x for i in range(len(sites)) if (x := self._deviation(i, backward))}
            wrong = {i: x for i, x in found.items() if not x[0] <= x[1]}
            right = {sites[i].start for i in found if sites[i].side == own}
            right -= {sites[i].start for i in wrong if sites[i].side == own}
            for number in sorted(wrong, reverse=backward):
                # Within a module that is right, shards may hold terms of a sum.
                is_term = any(start <= number <= last[start] for start in right) or not shards
                if is_term and sites[number].axes:
                    continue
                site, text = sites[number], _error(*wrong[number])
                text = f"{site.module} is the first module whose {what} differs: {text}"
                if site.side != own:
                    where = ("after", "output") if backward else ("before", "input")
                    text = f"outside of modules, {where[0]} {site.module}: {text.split(': ', 1)[1]}"
                return f"  {text}\n    inputs: {', '.join(site.inputs)}"
        names = {site.module: site.module.split(" ")[0] for site in sites}
        for line in lines:
            if owners := [x for x, name in names.items() if line.startswith(f"  {name}.")]:
                return f"  {max(owners, key=len)} is the first module with an array that differs"
        return "  outside of modules: their outputs and gradients are the same"

    def _deviation(self, number: int, backward: bool) -> tuple[float, float] | None:
        """Returns the largest error of a site over its limit, and this limit; None if unknown.

        A site in a loop has several values. It is unknown if the runs did not record as many.
        """
        site, found = self._many.sites[number], []
        values = [run.values.get((number, backward), {}) for run in (self._one, self._rounded)]
        shards = dict(sorted(self._many.values.get((number, backward), {}).items()))
        calls = [*itertools.chain(*(x.values() for x in (*values, shards)))]
        is_same = len(calls) == 2 + len(shards) > 2 and len({*map(len, calls)}) == 1
        if not is_same or site.side == "mask" or self._one.sites[number][:2] != site[:2]:
            return None
        sizes = [index + 1 for index in max(shards)]
        for x, rounded, *parts in zip(*calls, strict=True):
            each = np.array([*map(_numbers, parts)])
            error = _error_of_shards(_numbers(x), each.reshape(*sizes, *each.shape[1:]))
            if error is None:
                return None
            found.append((error, self._limit(x, rounded)))
        return max(found, key=lambda pair: not pair[0] <= pair[1])

    def shared_masks(self) -> list[str]:
        """Lists each dropout that drops the same elements of shards with different inputs."""
        found = {}
        for (number, backward), masks in self._many.values.items():
            module, side, axes, *_ = self._many.sites[number]
            if backward or side != "mask":
                continue
            inputs = self._many.values[number - 1, False]
            for a, b in itertools.combinations(masks, 2):
                kept = np.mean(masks[a])
                by_chance = (kept**2 + (1 - kept) ** 2) ** np.size(masks[a]) > _CHANCE
                is_shared = np.array_equal(masks[a], masks[b]) and not by_chance
                if is_shared and not np.array_equal(inputs[a], inputs[b]):
                    over = [axis for axis, i, j in zip(axes, a, b, strict=True) if i != j]
                    found[module] = " and ".join(map(repr, over))
        text = "drops the same elements of shards with different inputs, over"
        remedy = "Give each its own key: jax.random.fold_in(key, jax.lax.axis_index(...))."
        return [f"  {name} {text} {over}.\n    {remedy}" for name, over in found.items()]


_RESULT = "the result"
_CHANCE = 1e-6  # up to which masks with different keys are not the same by chance


def _error_of_shards(x: np.ndarray[Any, Any], shards: np.ndarray[Any, Any]) -> float | None:
    """Returns how much shards, with leading dimensions for axes, differ from an array, at best.

    Their spec is not known where they are recorded. So all layouts of axes are tried, and the best
    one counts: a wrong layout of right values differs much more. None if no layout has the shape.
    """
    count, errors = shards.ndim - x.ndim, []
    # Along an axis they are replicas (-1), or slices of a dimension.
    for layout in itertools.product(range(-1, x.ndim), repeat=count):
        whole = shards
        for i, dimension in reversed([*enumerate(layout)]):  # the last axis is the innermost one
            if dimension >= 0:
                at = count - 1 + dimension
                whole = np.moveaxis(whole, i, at)
                shape = [*whole.shape[:at], -1, *whole.shape[at + 2 :]]
                whole = np.expand_dims(whole.reshape(shape), i)
        if whole.shape[count:] == x.shape:
            errors.append(_distance(whole, x))
    return min(errors, default=None)


def _copied(args: Any, *, rounded: bool = False) -> Any:
    """Copies arguments to new arrays on no particular device, changed by rounding errors or not."""
    flat, random = flatten(args), np.random.default_rng(0)

    def copied(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        array = np.asarray(_raw(x))
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(x))
        if rounded and _is_inexact(x):
            array = array * (1 + random.choice([-1, 1], x.shape) * _epsilon(x.dtype))
        # First in NumPy: JAX warns if it is asked for a dtype that it narrows, such as int64.
        return jnp.array(np.asarray(array, x.dtype))

    return unflatten(flat.structure, [*map(copied, flat.leaves)]).root


def _raw(x: jax.Array | np.ndarray[Any, Any]) -> Any:
    """Returns an array; of PRNG keys, their words."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _numbers(x: Array) -> np.ndarray[Any, Any]:
    """Returns an array in the largest type, in which differences are exact enough."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _epsilon(dtype: np.dtype[Any]) -> float:
    """Returns the rounding error of a type, relative to 1."""
    return float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _is_inexact(x: Array) -> bool:
    """Whether an array has numbers that are rounded."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _distance(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Returns the largest difference; 0 where both are the same infinity or NaN."""
    with np.errstate(invalid="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        return float(np.where(same, 0, np.abs(x - y)).max(initial=0))


def _error(error: float, limit: float) -> str:
    return f"max error {error:.2g}, tolerance {limit:.2g}"
