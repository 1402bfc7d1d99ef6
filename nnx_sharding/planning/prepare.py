"""Makes what ``plan`` searches: a `Search` with all candidates, predicted.

A candidate is a strategy on a mesh for a variant of the step. Strategies and meshes that go
together are paired first, then each pair is predicted for each variant (`Search.add`). Nothing is
compiled here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..analysis.hardware import HARDWARE, Hardware, hardware_of
from ..analysis.units import read_bytes
from ..diagnostics.progress import progress
from ..errors import message, raise_if_any
from ..partition.mesh import DEFAULT, on_topology, planning_mesh, topology_devices
from ..partition.variables import models_unchanged
from ..report.comparison import names_by_value
from ..report.compiling import Devices
from ..report.strategies import AnyMesh
from .arguments import Arguments
from .axes import Axes
from .chains import applies, checked_strategies, strategies_of
from .measuring import check_devices
from .mesh_sizes import check_meshes, mesh_sizes
from .remedies import remedies
from .search import Search
from .variants import variants_of

# Name of a strategy → a function of the user, or None for a chain of this library.
Strategies: TypeAlias = Mapping[str, Callable[..., Any] | None]


def prepare(
    step: Callable[..., Any] | Mapping[str, Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    devices: int | None,
    topology: str | None,
    num_slices: int,
    axes: Sequence[str] | Mapping[str, Any],
    meshes: Iterable[AnyMesh] | None,
    strategies: Iterable[str] | Mapping[str, Any] | None,
    variants: Mapping[str, Sequence[Any]] | None,
    maximize: Literal["batch"] | None,
    memory_limit: int | str | None,
    hardware: Hardware | str | None,
    most: int | None,
    measure: int,
    quiet: bool,
) -> Search:
    """Makes and predicts all candidates, without compiling any. The arguments are those of `plan`.

    Raises:
      ValueError: no candidate can fit, or an argument of the search is wrong.
    """
    # 1. Read what the user asks for.
    counts = {"devices": devices, "num_slices": num_slices, "most": most, "measure": measure}
    _check_arguments(maximize, topology, counts)
    step_variants = variants_of(step, args, variants or {}, options)
    named_axes, functions = Axes.of(axes), _read_strategies(strategies)
    arguments = step_variants[0].arguments

    # 2. Pair strategies and meshes.
    with on_topology(topology, num_slices):
        target = DEFAULT.get()  # the topology and its slices; None for the devices of this machine
        count = _number_of_devices(devices, target)
        # If the user names no strategies, all chains that suit the models are tried.
        functions = functions or dict.fromkeys(strategies_of(arguments, count))
        if meshes is None:
            pairs = _all_pairs(functions, count, num_slices, named_axes, arguments)
        else:
            pairs = _given_pairs(functions, [*meshes], devices, named_axes)
    pairs = _useful_pairs(pairs, functions, named_axes, count)
    meshes_of_pairs = [mesh for _, mesh in pairs]
    check_devices(measure, meshes_of_pairs)

    # 3. Find the rates and the limit of memory.
    peak, limit = _peak_and_limit(meshes_of_pairs[0], hardware, memory_limit)
    if maximize and (limit is None or not arguments.rows):
        needed = "a batch, and memory_limit=... or hardware=..."
        raise ValueError(f"plan: maximize='batch' needs {needed}")

    # 4. Predict all candidates.
    search = Search(
        variants=step_variants,
        functions=functions,
        axes=named_axes,
        hardware=peak,
        limit=limit,
        most=most,
        maximize=maximize is not None,
        num_slices=num_slices,
        compile_on=_devices_of_compilers(meshes_of_pairs, target),
    )
    _add_all(search, pairs, quiet=quiet)
    return search


def _number_of_devices(named: int | None, target: tuple[str, int] | None) -> int:
    """Returns how many devices the meshes of candidates have.

    Args:
      named: the number that the user names; None for all.
      target: a topology and its slices; None for the devices of this machine.
    """
    if named is not None:
        return named
    return jax.device_count() if target is None else len(topology_devices(*target))


def _peak_and_limit(
    mesh: Mesh, hardware: Hardware | str | None, memory_limit: int | str | None
) -> tuple[Hardware | None, int | None]:
    """Returns the peak rates and the bytes of a device, by the user or by the kind of device.

    What the user does not say is None if `HARDWARE` does not have this kind of device.
    """
    kind = mesh.devices.flat[0].device_kind
    peak = HARDWARE.get(kind) if hardware is None else hardware_of(hardware)
    if memory_limit is not None:
        return peak, read_bytes(memory_limit)
    return peak, None if peak is None else peak.memory_bytes


def _check_arguments(maximize: object, topology: str | None, counts: Mapping[str, Any]) -> None:
    """Raises a ValueError if ``maximize`` or a count is wrong, or a topology has ``devices``."""
    wrong = []  # lines of the error
    if maximize not in (None, "batch"):
        wrong.append(f"  maximize={maximize!r}: expected 'batch' or None")
    for name, count in counts.items():
        least = 0 if name == "measure" else 1
        if count is None and name in ("devices", "most"):  # None means all
            continue
        is_number = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if not is_number or count < least:
            wrong.append(f"  {name}={count!r}: expected a number of at least {least}")
    if topology is not None and counts["devices"] is not None:
        wrong.append(f"  devices={counts['devices']!r}: topology={topology!r} has its own devices")
    raise_if_any(ValueError, "plan: these arguments cannot be used:", wrong)


def _read_strategies(
    strategies: Iterable[str] | Mapping[str, Any] | None,
) -> Strategies:
    """Returns the strategies of the user by name; empty if the user names none.

    Raises:
      ValueError: a name is unknown, or ``strategies`` is empty or not iterable.
      TypeError: a dict has a value that is no function.
    """
    if strategies is None:
        return {}
    if not strategies or not isinstance(strategies, Iterable):
        raise ValueError(
            f"plan: strategies={strategies!r}: expected names as in 'fsdp + tensor', or functions."
        )
    if isinstance(strategies, Mapping):
        for name, function in strategies.items():
            if not callable(function):
                raise TypeError(
                    f"plan: strategies[{name!r}]: expected a function, got {function!r}."
                )
        return {str(name): function for name, function in strategies.items()}
    names = [strategies] if isinstance(strategies, str) else [*strategies]
    return dict.fromkeys(checked_strategies(names))


def _useful_pairs(
    pairs: Sequence[tuple[str, Mesh]], functions: Strategies, axes: Axes, count: int
) -> list[tuple[str, Mesh]]:
    """Selects the pairs whose mesh has devices along the axes that the strategy uses.

    A function of the user keeps all its meshes, because the axes that it needs are not known.

    Raises:
      ValueError: none of the meshes of ``count`` devices is of use to any strategy.
    """
    useful = [
        (strategy, mesh)
        for strategy, mesh in pairs
        if functions[strategy] is not None or applies(strategy, mesh.shape, axes)
    ]
    if not useful:
        raise ValueError(
            f"plan: no mesh of {count} devices has the axes of {', '.join(functions)}, with sizes "
            "that divide layers, experts and the batch."
        )
    return useful


def _all_pairs(
    functions: Strategies, count: int, num_slices: int, axes: Axes, arguments: Arguments
) -> list[tuple[str, Mesh]]:
    """Pairs each strategy with each mesh that so many devices can form.

    Args:
      num_slices: the number of TPU slices that the devices are on.
      axes: the names of mesh axes by their roles.
      arguments: the arguments of the step. Their shapes limit the sizes of axes.
    """
    pairs: list[tuple[str, Mesh]] = []
    meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}  # ((axis, size), …) → mesh
    for strategy, function in functions.items():
        # The axes that a function of the user needs are not known. Most functions need the axes of
        # these two chains.
        chains = [strategy] if function is None else ["dp", "dp + tensor"]
        for chain in chains:
            for sizes in mesh_sizes(count, num_slices, axes, chain, arguments):
                key = tuple(sizes.items())
                if key not in meshes:
                    meshes[key] = planning_mesh(sizes)
                pairs.append((strategy, meshes[key]))
    return pairs


def _given_pairs(
    functions: Strategies, meshes: Sequence[AnyMesh], devices: int | None, axes: Axes
) -> list[tuple[str, Mesh]]:
    """Pairs each strategy, by its name, with each mesh of the user.

    Args:
      meshes: the meshes, or the sizes of their axes.
      devices: the number of devices that each mesh must have; None for any number.
      axes: the names of the axes that strategies of this library use.
    """
    sizes = [mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh for mesh in meshes]
    # If all strategies are functions of the user, meshes may have axes with any names.
    has_chains = any(function is None for function in functions.values())
    check_meshes(sizes, devices, axes, has_chains=has_chains)
    return [*itertools.product(functions, map(planning_mesh, meshes))]


def _add_all(search: Search, pairs: Sequence[tuple[str, Mesh]], *, quiet: bool) -> None:
    """Predicts the candidates of all pairs for all variants.

    Raises:
      ValueError: no candidate can fit. The error lists the reasons, and what would fit.
    """
    predicting = progress("plan: predicting", len(pairs), quiet=quiet)
    # In `models_unchanged`, strategies list the parameters of a model once for all calls.
    with predicting as advance, models_unchanged():
        for strategy, mesh in pairs:
            for variant in search.variants:
                search.add(strategy, mesh, variant)
            advance(strategy)
    if not search.programs:
        # Nothing was compiled, so there are no reports, and only the bytes of arguments are known.
        remedies_text = "; or ".join(remedies(search, reports={}))
        remedy = ""
        if remedies_text:
            remedy = f"By the arguments alone, one of these would fit: {remedies_text}."
        raise ValueError(listed_once("plan: no candidate can fit:", search.ruled_out, remedy))


def _devices_of_compilers(meshes: Sequence[Mesh], target: Devices | None) -> Devices | None:
    """Returns the devices that other processes compile for; None if only this process can compile.

    Other processes cannot share the devices of this process.

    Args:
      target: the topology that the user named, and the number of its slices; None without one.

    Returns:
      The topology; without one, on CPUs, the number of virtual devices of the largest mesh; on
      other devices None.
    """
    if target is not None:
        return target
    if all(mesh.devices.flat[0].platform == "cpu" for mesh in meshes):
        return max(mesh.size for mesh in meshes)
    return None


def listed_once(head: str, reasons: Mapping[str, str], remedy: str = "") -> str:
    """Returns a message with each reason once, after the names of the candidates that have it.

    ``reasons`` maps the name of a candidate to its reason. If all candidates have the same reason,
    the message has no names.
    """
    candidates_by_reason = names_by_value(reasons)
    is_single = len(candidates_by_reason) < 2
    lines = [
        f"  {reason}" if is_single else f"  {'; '.join(candidates)}: {reason}"
        for reason, candidates in candidates_by_reason.items()
    ]
    return message(head, lines, remedy)
