"""The planner: which mesh and strategy a step should run with, before there are devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from .. import _compat
from ..analysis.hardware import HARDWARE, Hardware, hardware_of
from ..analysis.tables import Pictured, text
from ..analysis.units import bytes_text, read_bytes
from ..errors import message, raise_listed
from ..partition.mesh import planning_mesh
from ..partition.topology import DEFAULT, on_topology, topology_devices
from ..report.comparison import Column, Comparison, Failure
from ..report.compiling import Group, Lower, search
from ..report.strategies import Strategy, abstract_of, lowered, unwrapped
from ..specs.fitting import suggestion
from .candidates import (
    STRATEGIES,
    Axes,
    Candidate,
    applies,
    check_meshes,
    has_stack,
    in_shardings_of,
    mesh_sizes,
    predict,
)


@dataclasses.dataclass(frozen=True)
class Plan(Pictured):
    """The result of :func:`plan`. ``print`` shows all candidates, best first.

    Attributes:
      comparison: the reports of the candidates that were compiled, best first, and why the others
        were not. It can be saved, and shown as a page.
      candidates: the candidates that were compiled, by name.
    """

    comparison: Comparison
    candidates: Mapping[str, Candidate]

    @property
    def best(self) -> Candidate | None:
        """The best candidate that fits; None if none does."""
        fitting = self.comparison.fitting
        return self.candidates[fitting[0]] if fitting else None

    @property
    def ruled_out(self) -> Mapping[str, str]:
        """Why each of the other candidates was not compiled, by name."""
        return self.comparison.ruled_out

    def _pictures(self, width: int) -> Iterable[Any]:
        yield from self.comparison._pictures(width)
        yield text(f"best: {'none fits' if self.best is None else self.best.name}", "bold")


@_compat.api_boundary
def plan(
    step: Callable[..., Any] | Mapping[str, Any],
    *args: Any,
    devices: int | None = None,
    topology: str | None = None,
    num_slices: int = 1,
    axes: Sequence[str] = ("data", "model"),
    meshes: Iterable[Mapping[str, int]] | None = None,
    strategies: Iterable[str] | Mapping[str, Any] = STRATEGIES,
    memory_limit: int | str | None = None,
    hardware: Hardware | str | None = None,
    most: int | None = 16,
    cache_dir: str | os.PathLike[str] | None = None,
    by_module: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Plan:
    """Searches for the mesh and strategy with which a step fits into memory and is fastest.

    Each strategy is tried on each mesh that the devices can form. What can be ruled out is not
    compiled: candidates whose arguments alone exceed the memory, those that shard everything like
    another one, and those that raise an error. The others are compiled side by side, those
    predicted to send the least first.

    The strategies have names such as ``"fsdp + tensor"``. Over the axes ``data`` and ``replica``:

    * ``dp``: data parallelism, parameters are replicated;
    * ``zero1``: the state of the optimizer is sharded;
    * ``fsdp``: parameters, gradients and the state of the optimizer are sharded;
    * ``hsdp``: the same over ``data`` only, and ``dp`` over ``replica`` (between slices).

    Over the axis ``model``, ``+ tensor`` is :func:`~nnx_sharding.partition.tensor_parallel`, and
    ``+ sequence`` the same with ``sequence=True``. For models with a ``Stack``, ``+ pipeline`` is
    :func:`~nnx_sharding.partition.pipeline` over that axis, with four microbatches for each stage,
    or the largest number that divides both these and the rows of a device. Stages that wait are in
    the roofline: they compute in each tick.

    Args:
      step: the function to run; of one that is wrapped by ``jit``, the shardings and the mesh are
        not used. Or variants of it by name, in order of preference, such as without and with
        ``remat``, or with more and more microbatches: a variant is compiled only if those before it
        do not fit. A variant is a function, or a tuple of a function and its own arguments.
      *args: its arguments, abstract or not. Modules are sharded by the strategy; an optimizer
        belongs to the model in front of it. Arrays outside of modules with the most frequent first
        dimension are the batch, others are replicated.
      devices: the number of devices; None for all of the topology, or of this process.
      topology: a TPU topology, such as ``"v5e:16x16"``, for which the TPU compiler compiles; None
        for the devices of this machine, or virtual ones.
      num_slices: the number of slices of the topology, over which the axis ``replica`` runs.
      axes: the names that your step uses for the axes ``data`` and ``model``; or three names, the
        first of them for ``replica``.
      meshes: the sizes of these axes in each mesh to try; None for all.
      strategies: the names of those to try; or, by name, functions from the abstract arguments to
        ``in_shardings``, called with the mesh in context. A function is tried on all meshes.
      memory_limit: the memory of a device in bytes, or a text such as ``"16 GiB"``. None uses that
        of ``hardware``.
      hardware: the peak figures for the roofline, or a key of ``HARDWARE``; None uses those of the
        topology.
      most: the maximum number of programs to compile; None for all.
      cache_dir: a folder for reports, as for :func:`~nnx_sharding.report.compare`.
      by_module: whether the report of the best candidate has memory and cost by module, for which
        it is compiled again.
      quiet: whether to show no progress on terminals.
      **options: for :func:`~nnx_sharding.jit`, the same for all: ``donate_argnums``, ….

    Returns:
      The candidates, ranked by the roofline, then by the bytes sent, then by memory; without
      known hardware by the last two. Those that do not fit come last, the smallest peak first,
      and those that failed.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding.planning import plan
      >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
      >>> x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> found = plan(lambda model, x: model(x), model, x, devices=8, memory_limit="5 MiB")
      >>> found.best.name
      'dp + tensor, data 1 × model 8'
    """
    _check_counts(topology, devices=devices, num_slices=num_slices, most=most)
    variants = _variants(step, args, options)
    if strategies is STRATEGIES and not any(has_stack(own) for *_, own in variants.values()):
        strategies = [name for name in STRATEGIES if "pipeline" not in name]
    strategies = _strategies(strategies)
    names = _axes(axes)
    with on_topology(topology, num_slices):
        on = DEFAULT.get()
        if meshes is None:
            count = jax.device_count() if on is None else len(topology_devices(*on))
            uses_model = any(f is not None or " + " in s for s, f in strategies.items())
            meshes = mesh_sizes(devices or count, num_slices, names, uses_model=uses_model)
        check_meshes(meshes := list(meshes), devices, strategies, names)
        built = [planning_mesh(sizes) for sizes in meshes]
    is_cpu = all(mesh.devices.flat[0].platform == "cpu" for mesh in built)
    compiled_for = max((mesh.size for mesh in built), default=0) if on is None and is_cpu else on
    peak = HARDWARE.get(built[0].devices.flat[0].device_kind) if built else None
    peak = peak if hardware is None else hardware_of(hardware)
    limit = None if peak is None else peak.memory_bytes
    limit = limit if memory_limit is None else read_bytes(memory_limit)

    groups: list[Group] = []
    programs: dict[str, Lower] = {}
    tried: dict[str, Candidate] = {}
    ruled_out: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for mesh, (strategy, function) in itertools.product(built, strategies.items()):
        if function is None and not applies(strategy, mesh.shape, names):
            continue
        group = Group({})
        for variant, (fun, kept, own) in variants.items():
            candidate = Candidate(strategy, dict(mesh.shape), variant, (), mesh)
            name = candidate.name
            try:
                shardings = _in_shardings(candidate, function, own, names)
                candidate = dataclasses.replace(candidate, in_shardings=shardings)
                prediction = predict(candidate, own, names.model)
            except Exception as error:
                ruled_out[name] = f"{type(error).__name__}: {error}"
                continue
            same = seen.setdefault((variant, prediction.key), name)
            if same != name:
                ruled_out[name] = f"shards everything like {same}"
            elif limit is not None and prediction.arguments > limit:
                taken = bytes_text(prediction.arguments)
                ruled_out[name] = f"the arguments take {taken} on each device"
            else:
                if not group.programs:
                    group.arguments, group.seconds = prediction.arguments, prediction.seconds(peak)
                way = Strategy(shardings, mesh)
                programs[name] = group.programs[name] = partial(lowered, way, fun, own, kept)
                tried[name] = candidate
        if group.programs:
            groups.append(group)
    if not groups:
        raise ValueError(_reasons("plan: no candidate can fit:", ruled_out))
    compiler = {"cache_dir": cache_dir, "devices": compiled_for, "quiet": quiet}
    judged: dict[str, Any] = {"memory_limit": limit, "hardware": peak, **compiler}
    found = search("plan", groups, ruled_out, most=most, **judged)
    mistakes = {
        name: failure
        for name, failure in found.reports.items()
        if isinstance(failure, Failure)
        and not isinstance(failure.exception, jax.errors.JaxRuntimeError)  # of the compiler
    }
    if len(mistakes) == len(found.reports):
        reasons = {name: failure.error for name, failure in mistakes.items()} | ruled_out
        cause = next(iter(mistakes.values())).exception
        raise ValueError(_reasons("plan: no candidate can be lowered:", reasons)) from cause
    order = sorted(found.reports, key=partial(_rank, found))
    reports = {name: found.reports[name] for name in order}
    if by_module and found.fits(order[0]):
        best = [Group({order[0]: programs[order[0]]})]
        reports |= search("modules of the best", best, by_module=True, **judged).compiled
    ranked = dataclasses.replace(found, reports=reports)
    return Plan(ranked, {name: tried[name] for name in order})


def _axes(names: Sequence[str]) -> Axes:
    listed = () if isinstance(names, str) else (*(["replica"] if len(names) == 2 else []), *names)
    if len(listed) != 3 or len({*listed}) != 3:
        raise ValueError(
            "plan: axes must be the names of the data and the model axis, as in ('data', 'model'), "
            f"or of these after the axis between slices; got {names!r}."
        )
    return Axes(*listed)


def _check_counts(topology: str | None, **counts: Any) -> None:
    wrong = [
        f"  {name}={count!r}: expected a number of at least 1"
        for name, count in counts.items()
        if (count is not None or name == "num_slices")
        and (isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1)
    ]
    if topology is not None and counts["devices"] is not None:
        wrong.append(f"  devices={counts['devices']!r}: topology={topology!r} has its own devices")
    raise_listed(ValueError, "plan: these arguments cannot be used:", wrong)


def _reasons(head: str, reasons: Mapping[str, str]) -> str:
    """A message in which each reason is named once, with the candidates that it holds for."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    of_one = {reason: f"{'; '.join(of)}: " * (len(names) > 1) for reason, of in names.items()}
    return message(head, [f"  {of}{reason}" for reason, of in of_one.items()])


def _variants(
    step: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Mapping[str, tuple[Callable[..., Any], dict[str, Any], Any]]:
    """The functions, the options of ``jit`` for them and their abstract arguments, by name."""
    variants = {}
    for name, entry in (step if isinstance(step, Mapping) else {"": step}).items():
        fun, *own = entry if isinstance(entry, tuple) else (entry, *args)
        variants[str(name)] = (*unwrapped("plan", fun, options), abstract_of(own))
    if not variants:
        raise ValueError("plan: expected at least one variant of the step, got none.")
    return variants


def _strategies(strategies: Any) -> dict[str, Any]:
    """The user's functions by name, with None for strategies of this library."""
    if not strategies or not isinstance(strategies, Iterable):
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(
            f"plan: strategies={strategies!r}: expected names of {known}, or functions."
        )
    if isinstance(strategies, Mapping):
        for name, function in strategies.items():
            if not callable(function):
                raise TypeError(
                    f"plan: strategies[{name!r}]: expected a function, got {function!r}."
                )
        return {str(name): function for name, function in strategies.items()}
    names = [strategies] if isinstance(strategies, str) else list(strategies)
    unknown = [
        f"{name!r}{suggestion(name, STRATEGIES)}" for name in names if name not in STRATEGIES
    ]
    if unknown:
        raise ValueError(f"plan: unknown strategies: {', '.join(unknown)}")
    return dict.fromkeys(names)


def _in_shardings(candidate: Candidate, function: Any, args: Sequence[Any], axes: Axes) -> Any:
    if function is None:
        return in_shardings_of(candidate.strategy, candidate.mesh, args, axes)
    with jax.set_mesh(candidate.mesh):
        found = function(*args)
    if not isinstance(found, tuple) or len(found) != len(args):
        raise TypeError(
            f"expected a tuple of {len(args)} shardings, as many as arguments, got {found!r}"
        )
    return found


def _rank(found: Comparison, name: str) -> tuple[Any, ...]:
    """The sort key of a candidate; unknown figures come last."""
    figures = found.figures.get(name, {})
    if not found.fits(name):
        return (True, figures.get("peak") or math.inf)  # the one that nearly fits first
    known = (figures[column] for column in _RANKED_BY)
    return (False, *(math.inf if figure is None else figure for figure in known))


_RANKED_BY: tuple[Column, ...] = ("roofline", "bytes_sent", "peak")
