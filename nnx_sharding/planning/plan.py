"""The planner: which mesh and strategy a step should run with, before there are devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh

from .. import _compat
from ..analysis.hardware import Device, known_device
from ..analysis.hardware import device as device_named
from ..analysis.tables import Pictured, text
from ..analysis.units import bytes_text, read_bytes
from ..diagnostics.progress import progress
from ..errors import message
from ..partition.mesh import planning_mesh
from ..partition.topology import DEFAULT, on_topology, topology_devices
from ..report.comparison import Comparison, Failure
from ..report.compiling import Compilers, Finished
from ..report.strategies import Strategy, abstract_of, lowered
from ..specs.fitting import suggestion
from ..transforms.lifted import Lifted
from .candidates import (
    STRATEGIES,
    Candidate,
    applies,
    check_meshes,
    in_shardings_of,
    mesh_sizes,
)
from .predict import predict


@dataclasses.dataclass(frozen=True)
class Plan(Pictured):
    """The result of :func:`plan`. ``print`` shows all candidates, best first.

    Attributes:
      comparison: the reports of the candidates that were compiled, best first, and why the others
        were not. It can be saved, and shown as a page.
      candidates: the candidates that were compiled, by name.

    Example:
      See :func:`plan`.
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


@dataclasses.dataclass
class _Group:
    """The variants of a step with one strategy on one mesh, and the prediction for the first."""

    variants: list[Candidate]
    arguments: int
    seconds: float


@_compat.api_boundary
def plan(
    step: Callable[..., Any] | Mapping[str, Any],
    *args: Any,
    devices: int | None = None,
    topology: str | None = None,
    num_slices: int = 1,
    meshes: Iterable[Mapping[str, int]] | None = None,
    strategies: Iterable[str] | Mapping[str, Any] = STRATEGIES,
    memory_limit: int | str | None = None,
    device: Device | str | None = None,
    most: int | None = 16,
    cache_dir: str | os.PathLike[str] | None = None,
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
    ``+ sequence`` the same with ``sequence=True``.

    Args:
      step: the function to run, not yet wrapped by ``jit``. Or variants of it by name, in order of
        preference, such as without and with ``remat``, or with more and more microbatches: a
        variant is compiled only if those before it do not fit. A variant is a function, or a tuple
        of a function and its own arguments.
      *args: its arguments, abstract or not. Modules are sharded by the strategy; an optimizer
        belongs to the model in front of it. Arrays outside of modules with the most frequent first
        dimension are the batch, others are replicated.
      devices: the number of devices; None for all of the topology, or of this process.
      topology: a TPU topology, such as ``"v5e:16x16"``, for which the TPU compiler compiles; None
        for the devices of this machine, or virtual ones.
      num_slices: the number of slices of the topology, over which the axis ``replica`` runs.
      meshes: the sizes of the axes ``replica``, ``data`` and ``model`` of each mesh to try; None
        for all.
      strategies: the names of those to try; or, by name, functions from the abstract arguments to
        ``in_shardings``, called with the mesh in context. A function is tried on all meshes.
      memory_limit: the memory of a device in bytes, or a text such as ``"16 GiB"``. None uses that
        of ``device``.
      device: the device for the roofline; None uses that of the topology.
      most: the maximum number of programs to compile; None for all.
      cache_dir: a folder for reports, as for :func:`~nnx_sharding.report.compare`.
      quiet: whether to show no progress on terminals.
      **options: for :func:`~nnx_sharding.jit`, the same for all: ``donate_argnums``, ….

    Returns:
      The candidates, ranked by the roofline of the device, then by the bytes sent, then by memory;
      without a device by the last two. Those that do not fit come last, the smallest peak first,
      and those that failed.

    Raises:
      TypeError: ``step`` or a strategy is not a function, or ``step`` is wrapped by ``jit``.
      ValueError: a strategy is unknown, the devices do not form a mesh, no candidate can fit, a
        limit cannot be read, or the device or the topology is not known.
      ImportError: the compiler for the topology is not installed.

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
    variants = _variants(step, args)
    strategies = _strategies(strategies)
    with on_topology(topology, num_slices):
        on = DEFAULT.get()
        if meshes is None:
            count = jax.device_count() if on is None else len(topology_devices(*on))
            uses_model = any(f is not None or " + " in s for s, f in strategies.items())
            meshes = mesh_sizes(devices or count, num_slices, uses_model=uses_model)
        check_meshes(meshes := list(meshes), devices, strategies)
        built = [planning_mesh(sizes) for sizes in meshes]
    is_cpu = all(mesh.devices.flat[0].platform == "cpu" for mesh in built)
    compiled_for = max((mesh.size for mesh in built), default=0) if on is None and is_cpu else on
    if device is None and built:
        device = known_device(built[0].devices.flat[0].device_kind)
    device = device_named(device) if isinstance(device, str) else device
    limit = getattr(device, "memory_bytes", None)
    limit = limit if memory_limit is None else read_bytes(memory_limit)

    groups, ruled_out = _groups(variants, strategies, built, limit, device)
    if not groups:
        reasons = [f"  {name}: {reason}" for name, reason in ruled_out.items()]
        raise ValueError(message("plan: no candidate can fit:", reasons))
    compilers = Compilers(cache_dir, compiled_for)
    lower = functools.partial(_lowered, variants, options)
    with compilers, progress("plan", most, quiet=quiet) as advance:
        finished = _search(groups, compilers, lower, most, limit, ruled_out, advance)
    tried = {one.key.name: one.key for one in finished}
    reports = {one.key.name: one.report for one in finished}
    seconds = {one.key.name: round(one.seconds, 3) for one in finished}
    comparison = Comparison(reports, None, seconds, ruled_out)
    comparison = comparison.judged(memory_limit=limit, device=device)
    order = sorted(reports, key=functools.partial(_rank, comparison))
    ranked = dataclasses.replace(comparison, reports={n: comparison.reports[n] for n in order})
    return Plan(ranked, {name: tried[name] for name in order})


def _search(
    groups: list[_Group],
    compilers: Compilers,
    lower: Callable[[Candidate], Any],
    most: int | None,
    limit: int | None,
    ruled_out: dict[str, str],
    advance: Callable[[str], None],
) -> list[Finished]:
    """Compiles candidates in the order of their predictions, and notes why not the others."""
    submitted: list[str] = []
    finished: list[Finished] = []
    fits = False
    while True:
        while groups and (most is None or len(submitted) < most) and not compilers.is_busy:
            # As long as nothing fits, the second half goes to those with the smallest arguments.
            by_memory = most is not None and not fits and 2 * len(submitted) >= most
            group = min(groups, key=lambda x: x.arguments if by_memory else x.seconds)
            groups.remove(group)
            candidate = group.variants.pop(0)
            submitted.append(candidate.name)
            compilers.submit((candidate, group), functools.partial(lower, candidate))
        if compilers.is_idle:
            break
        one = compilers.next()
        candidate, group = one.key
        finished.append(one._replace(key=candidate))
        advance(candidate.name)
        if _fits(one.report, limit):
            fits = True
            ruled_out.update({rest.name: f"{candidate.name} fits" for rest in group.variants})
        elif group.variants:
            groups.append(group)
    for group in groups:
        reason = f"the {most} compiled are predicted to be better"
        ruled_out.update({rest.name: reason for rest in group.variants})
    return sorted(finished, key=lambda one: submitted.index(one.key.name))


_Variants: TypeAlias = Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]


def _variants(step: Any, args: Sequence[Any]) -> _Variants:
    """The functions and their abstract arguments, by name."""
    entries = step if isinstance(step, Mapping) else {"": step}
    variants = {}
    for name, entry in entries.items():
        fun, *own = entry if isinstance(entry, tuple) else (entry, *args)
        if isinstance(fun, Lifted) or not callable(fun):
            raise TypeError(f"plan: expected a function that is not wrapped by jit, got {fun!r}.")
        variants[str(name)] = (fun, abstract_of(own))
    if not variants:
        raise ValueError("plan: expected at least one variant of the step, got none.")
    return variants


def _strategies(strategies: Any) -> dict[str, Any]:
    """The user's functions by name, with None for strategies of this library."""
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


def _lowered(variants: _Variants, options: Mapping[str, Any], candidate: Candidate) -> Any:
    fun, arguments = variants[candidate.variant]
    return lowered(Strategy(candidate.in_shardings, candidate.mesh), fun, arguments, options)


def _groups(
    variants: _Variants,
    strategies: Mapping[str, Any],
    meshes: Sequence[Mesh],
    limit: int | None,
    device: Device | None,
) -> tuple[list[_Group], dict[str, str]]:
    """What may be compiled, and what is ruled out without compiling."""
    groups: list[_Group] = []
    ruled_out: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for mesh, (strategy, function) in itertools.product(meshes, strategies.items()):
        if function is None and not applies(strategy, mesh.shape):
            continue
        fitting: list[Candidate] = []
        for variant, (_, args) in variants.items():
            candidate = Candidate(strategy, dict(mesh.shape), variant, (), mesh)
            try:
                candidate = _with_shardings(candidate, function, args)
                prediction = predict(candidate, args)
            except Exception as error:
                ruled_out[candidate.name] = f"{type(error).__name__}: {error}"
                continue
            same = seen.setdefault((variant, prediction.key), candidate.name)
            if same != candidate.name:
                ruled_out[candidate.name] = f"shards everything like {same}"
            elif limit is not None and prediction.arguments > limit:
                taken = bytes_text(prediction.arguments)
                ruled_out[candidate.name] = f"the arguments take {taken} on each device"
            else:
                if not fitting:
                    first = prediction
                fitting.append(candidate)
        if fitting:
            groups.append(_Group(fitting, first.arguments, first.seconds(device)))
    return groups, ruled_out


def _with_shardings(candidate: Candidate, function: Any, args: Sequence[Any]) -> Candidate:
    mesh = candidate.mesh
    if function is None:
        shardings = in_shardings_of(candidate.strategy, mesh, args)
    else:
        with jax.set_mesh(mesh):
            shardings = function(*args)
    return dataclasses.replace(candidate, in_shardings=shardings)


def _fits(report: Any, limit: int | None) -> bool:
    """Whether a program fits into memory, if that is known."""
    if isinstance(report, Failure):
        return False
    peak = None if report.memory is None else report.memory.peak
    return limit is None or peak is None or peak <= limit


def _rank(comparison: Comparison, name: str) -> tuple[Any, ...]:
    """The sort key of a candidate; unknown figures come last."""
    figures = comparison.figures.get(name, {})
    if not comparison.fits(name):
        return (True, figures.get("peak") or math.inf)  # the one that nearly fits first
    columns = [figures["roofline"], figures["bytes_sent"], figures["peak"]]
    return (False, *(math.inf if figure is None else figure for figure in columns))
