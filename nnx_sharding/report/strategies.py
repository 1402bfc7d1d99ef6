"""``compare``: strategies compiled side by side, before there are devices.

A *strategy* is a way to shard the arguments of a function. Arguments become abstract, each strategy
shards them on its mesh, and the programs are compiled for their figures, such as memory, only
(`compiling.py`). `unwrapped`, `abstract_of` and `lowered` serve ``plan`` as well. A *planning mesh*
has devices to compile for, which need not be attached; `on_topology` puts a TPU topology in context
for it. A `Lifted` is a function that a transform such as `jit` has wrapped, and its ``_transform``
says which one and with which options; `unjitted` takes such a function and the options apart again.
`split` replaces modules by a structure and arrays, and `merge` is its inverse.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from .. import _compat
from ..analysis.hardware import Hardware, hardware_of
from ..analysis.units import read_bytes
from ..partition.mesh import on_topology, planning_mesh
from ..specs.fitting import show
from ..specs.state_sharding import StateSharding
from ..transforms.jit import Jit, jit, unjitted
from ..transforms.lifted import Lifted
from ..transforms.split_merge import merge, split
from ..transforms.stages import Lowered
from .comparison import Comparison
from .compiling import Lower, compile_all

AnyMesh: TypeAlias = Mesh | AbstractMesh | Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to shard the arguments of a function, for :func:`compare`.

    Attributes:
      in_shardings: as for :func:`~nnx_sharding.jit`; or a function that returns them, called with
        the abstract arguments and with the mesh in context.
      mesh: the mesh of this strategy, as for :func:`compare`; None uses that of the comparison.
      out_shardings: as for :func:`~nnx_sharding.jit`.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.report import Strategy, compare
      >>> meshes = {"4 × 2": {"a": 4, "b": 2}, "8": {"a": 8}}
      >>> strategies = {name: Strategy(P("a"), mesh=mesh) for name, mesh in meshes.items()}
      >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> compare(strategies, lambda x: x + 1, x).best("arguments")
      '8'
    """

    in_shardings: Any
    mesh: AnyMesh | None = None
    out_shardings: Any = None


@_compat.api_boundary
def compare(
    strategies: Mapping[str, Any],
    fun: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | None = None,
    topology: str | None = None,
    num_slices: int = 1,
    memory_limit: int | str | None = None,
    hardware: Hardware | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    by_module: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Comparison:
    """Compiles a function once for each strategy and shows what each needs.

    Nothing is run: arguments may be abstract and far larger than memory, and meshes larger than the
    machine (see :func:`~nnx_sharding.partition.planning_mesh`). The error of a strategy that fails
    is kept.

    Args:
      strategies: by name, the ``in_shardings`` for :func:`~nnx_sharding.jit`; a function that makes
        them from the abstract arguments, called with the mesh in context; or a :class:`Strategy`.
      fun: the function; of one that is wrapped by ``jit``, the shardings and the mesh are not used.
      *args: its arguments, abstract or not. Only shapes and dtypes of arrays are used.
      mesh: the mesh, an abstract one, or the sizes of its axes by name; None for the one in
        context.
      topology: a TPU topology, such as ``"v5e:16x16"``, on which abstract meshes and sizes are
        placed; None for the devices of this machine, or virtual ones.
      num_slices: the number of slices of this topology.
      memory_limit: the memory of a device in bytes, or a text such as ``"16 GiB"``. None uses the
        memory of ``hardware``, or of the devices compiled for if it is known.
      hardware: the hardware that rooflines are for: peak figures, or a key of ``HARDWARE``, such as
        ``"TPU v5e"``. None uses the figures of the devices compiled for, if they are known.
      cache_dir: a folder for reports, so that no program is compiled twice with the same versions.
      by_module: whether reports have memory and cost by module, for which each program is compiled
        once more.
      quiet: whether to show no progress on terminals.
      **options: for :func:`~nnx_sharding.jit`, the same for all: ``donate_argnums``, ….

    Returns:
      The comparison. Without a topology, the figures of a mesh larger than the machine are those of
      XLA for CPUs, which computes bfloat16 in float32: temporaries and the bytes sent are upper
      bounds.

    Raises:
      TypeError: an option is one that ``compare`` sets itself, such as ``in_shardings``, or
        ``fun`` is wrapped by something else than ``jit``.
      KeyboardInterrupt: Ctrl-C was pressed. The error shows the programs that were compiled until
        then, and has their comparison as ``result``.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.report import compare
      >>> from nnx_sharding.partition import fsdp, replicated
      >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
      >>> x = jax.ShapeDtypeStruct((64, 1024), "float32")
      >>> strategies = {
      ...     "dp": lambda model, x: (replicated(model), P("data")),
      ...     "fsdp": lambda model, x: (fsdp(model), P("data")),
      ... }
      >>> comparison = compare(strategies, lambda model, x: model(x), model, x, mesh={"data": 64})
      >>> comparison.best("arguments")
      'fsdp'
    """
    if not isinstance(strategies, Mapping):
        raise TypeError(f"strategies must be a mapping from names, got {show(strategies)}.")
    fun, options = unwrapped("compare", fun, options)
    if not strategies:
        raise ValueError("expected strategies to compare, got none.")
    if topology is None and num_slices != 1:
        raise TypeError("num_slices needs a topology, such as topology='v5e:16x16'.")
    limit = None if memory_limit is None else read_bytes(memory_limit)
    peak = None if hardware is None else hardware_of(hardware)
    mesh = _compat.context_mesh() if mesh is None else mesh
    # All strategies share the abstract arguments, because they only read them.
    abstract = abstract_of(args)
    programs: dict[str, Lower] = {}
    for name, entry in strategies.items():
        strategy = entry if isinstance(entry, Strategy) else Strategy(entry)
        if strategy.mesh is None:
            strategy = dataclasses.replace(strategy, mesh=mesh)
        programs[str(name)] = partial(lowered, strategy, fun, abstract, options)
    # Programs are lowered in `compile_all`, where `planning_mesh` then places meshes of sizes on
    # the topology.
    with on_topology(topology, num_slices):
        return compile_all(
            "compare",
            programs,
            memory_limit=limit,
            hardware=peak,
            cache_dir=cache_dir,
            by_module=by_module,
            quiet=quiet,
        )


def unwrapped(
    name: str, fun: Any, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Takes a function out of ``jit``, so that it can be jitted again with other shardings.

    Args:
      name: the function that the user called, for messages.
      fun: a function, or one that ``jit`` returned.
      options: the user's options for ``jit``, which have priority over those of ``fun``.

    Returns:
      The plain function, and the options of ``jit`` for it, except shardings and mesh.

    Raises:
      TypeError: the options say where arguments are, by a mesh, shardings, a device or a backend;
        or ``fun`` is no function for ``jit``.
    """
    taken = {"in_shardings", "mesh", "device", "backend"} & options.keys()
    if taken:
        raise TypeError(
            f"{name} places the arguments itself; leave out {'=..., '.join(sorted(taken))}=..."
        )
    if isinstance(fun, Lifted) and isinstance(fun._transform, Jit):
        fun, kept = unjitted(fun)
        del kept["in_shardings"], kept["out_shardings"]
        options = {**kept, **options}
    if isinstance(fun, Lifted) or not callable(fun):
        raise TypeError(f"{name} needs a function that is not wrapped, or one of jit, got {fun!r}.")
    # The result is not used: this call raises an error for wrong options, once instead of for each
    # strategy.
    jit(fun, **options)
    return fun, dict(options)


def abstract_of(args: Sequence[Any]) -> Any:
    """Replaces arrays by their shapes and dtypes, without shardings: strategies choose them."""
    structure, arrays = split(args)  # `split` also takes modules apart.
    return merge(structure, jax.tree_util.tree_map(_abstract, arrays))


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        aval = jax.typeof(leaf)  # A NumPy array gets the dtype that it has in a call.
        weak_type = getattr(aval, "weak_type", False)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)
    return leaf


def lowered(
    strategy: Strategy, fun: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Lowered, Mesh | None]:
    """Lowers a function with the shardings of a strategy; also returns the mesh that it is for.

    Args:
      strategy: the shardings, or a function that makes them, and the mesh.
      fun: the function.
      args: its abstract arguments.
      options: other options of ``jit``.
    """
    # `planning_mesh` chooses devices of this machine, virtual ones, or those of the topology in
    # context.
    mesh = None if strategy.mesh is None else planning_mesh(strategy.mesh)
    # The mesh is in context for constraints in the function, and for functions that make shardings.
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        in_shardings = strategy.in_shardings
        # A user's subclass of a spec, a sharding or a mapping may have a ``__call__``, but is no
        # function that makes shardings.
        if callable(in_shardings) and not isinstance(in_shardings, _SPECS):
            in_shardings = in_shardings(*args)
        # The output shardings of the strategy replace those in ``options``, which are for all
        # strategies.
        if strategy.out_shardings is not None:
            options = {**options, "out_shardings": strategy.out_shardings}
        wrapped = jit(fun, in_shardings=in_shardings, mesh=mesh, **options)
        return wrapped.lower(*args), mesh


_SPECS = (PartitionSpec, Sharding, StateSharding, Mapping)
