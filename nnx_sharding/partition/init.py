"""Creates models sharded, or abstract.

The constructor becomes a function of its traced arguments alone. ``jit`` compiles this function
with the shardings of the model as ``out_shardings``, so no parameter is ever in full on one device.
Arrays and NNX objects, such as ``nnx.Rngs``, are traced. All other arguments, such as sizes, are
*statics*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from .. import _compat
from ..core.constrain import given_mesh, in_context
from ..core.prefixes import Specs, check_specs
from ..diagnostics.progress import progress
from ..specs.fitting import axes_of_type
from ..specs.types import AnyMesh
from ..transforms.in_trace import replace_slots
from ..transforms.jit import Jit, jit
from ..transforms.lifted import Lifted, lift
from .rules import from_metadata


@_compat.api_boundary
def sharded_init(
    make_model: Callable[..., object],
    sharding: object = None,
    mesh: Mesh | AbstractMesh | None = None,
    *args: object,
    **kwargs: object,
) -> Any:
    """Creates a model with each parameter sharded from the start, never in full on one device.

    The constructor is compiled with ``out_shardings``, as with ``nnx.jit`` in Flax. The random
    bits are the same as with plain ``jit`` if ``jax_threefry_partitionable`` is on, as by default.
    What is computed from them is the same up to rounding, as with ``jax.jit(out_shardings=...)``.
    All axes of the mesh are Auto in the constructor, unless it needs Explicit ones.

    Args:
      make_model: a class or function that makes the model, or any pytree, such as ``(model,
        optimizer)``; references shared between its parts stay shared.
      sharding: as ``out_shardings`` of :func:`~nnx_sharding.jit`; or a function from the abstract
        model to them, by default :func:`~nnx_sharding.partition.from_metadata`.
      mesh: the mesh of partition specs, in context while the constructor runs; None for the mesh
        in context.
      *args: passed to ``make_model``: arrays and NNX objects (``nnx.Rngs``) as traced values;
        everything else, such as sizes and configurations, unchanged.
      **kwargs: likewise.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding.partition import make_mesh, sharded_init
      >>> mesh = make_mesh({"model": -1})
      >>> model = sharded_init(nnx.Linear, P("model"), mesh, 64, 16, rngs=nnx.Rngs(0))
      >>> model.kernel.sharding.shard_shape(model.kernel.shape)
      (8, 16)
    """
    mesh = given_mesh("sharded_init", mesh)
    # In a trace the mesh is abstract, and the surrounding program has the devices.
    if isinstance(mesh, AbstractMesh) and _compat.trace_is_clean():
        raise ValueError(f"{mesh} has no devices to create arrays on. Use abstract_init.")
    with progress("sharded_init"):
        return _make("sharded_init", make_model, sharding, mesh, (args, kwargs), is_abstract=False)


@_compat.api_boundary
def abstract_init(
    make_model: Callable[..., object],
    sharding: object = None,
    mesh: Mesh | AbstractMesh | None = None,
    *args: object,
    **kwargs: object,
) -> Any:
    """Makes the model of :func:`sharded_init` without data, to restore a checkpoint into.

    Arguments and errors are as for :func:`sharded_init`, but ``mesh`` may be abstract, for
    devices that this machine does not have, and objects among the arguments are not changed. An
    array for which ``sharding`` has None gets no sharding.

    Returns:
      The model, with a sharded ``jax.ShapeDtypeStruct`` for each array.
    """
    mesh = given_mesh("abstract_init", mesh)
    return _make("abstract_init", make_model, sharding, mesh, (args, kwargs), is_abstract=True)


def _make(
    name: str,
    make_model: Callable[..., object],
    sharding: object,
    mesh: AnyMesh | None,
    arguments: tuple[tuple[object, ...], dict[str, object]],
    *,
    is_abstract: bool,
) -> Any:
    """Makes a model in its shardings.

    Args:
      name: the function that the user called, for messages.
      sharding: the shardings of the model, or a function from the abstract model to these.
      arguments: the arguments of ``make_model``, positional and by name.
      is_abstract: whether the model is made without data.
    """
    # A model is refused, although it is often callable, because it does not return a model.
    if _compat.is_graph_object(make_model) or not callable(make_model):
        raise TypeError(
            f"{name}: make_model must be a class, or a function that makes the model, got a "
            f"{type(make_model).__name__}: pass the function itself, as in {name}(make, ...), not "
            "what it returns. Arrays that exist are sharded by nnx_sharding.place."
        )
    build, arrays = _close_over_statics(make_model, arguments)  # the model is `build(*arrays)`
    try:
        with in_context(_mesh_for_constructor(build, arrays, mesh)):
            if sharding is None or callable(sharding):
                # The shardings depend on the model, so an abstract one is made first.
                abstract = jit(build).eval_shape(*arrays)
                find_sharding = from_metadata if sharding is None else sharding
                sharding = find_sharding(abstract)
            specs = Specs(sharding)
            check_specs(name, sharding=specs)
            # This is a `jit` whose program returns the model in these shardings. It is put together
            # from its parts, so that errors name the function and the option that the user knows.
            transform = Jit(name=name, in_name="sharding", out_specs=specs, mesh=mesh)
            make = lift(Lifted, build, transform, graph=None, graph_updates=None)
            return make.eval_shape(*arrays) if is_abstract else make(*arrays)
    except ValueError as error:
        # JAX raises this error for a parameter that Flax shards when it is created.
        if "is not found in mesh" in str(error):
            error.add_note(
                "If the metadata of Variables has logical names, Flax needs the rules for them "
                "while the model is created: `with nnx.logical_axis_rules(rules):`."
            )
        raise


def _close_over_statics(
    make_model: Callable[..., object], arguments: tuple[tuple[object, ...], dict[str, object]]
) -> tuple[Callable[..., Any], list[Any]]:
    """Turns a call of the constructor into a call of a function of traced arguments.

    Args:
      arguments: its positional arguments, and its arguments by name.

    Returns:
      A function of the traced arguments, which captures the statics, and the traced arguments.
    """
    leaves, treedef = jax.tree.flatten(arguments, is_leaf=_compat.is_graph_object)
    # Without arguments, the user's own function is returned, so that an equal call finds the trace
    # of the last one. A class is traced in each call, like a function with arguments.
    if not leaves and not isinstance(make_model, type):
        return make_model, []
    slots = [slot for slot, leaf in enumerate(leaves) if _is_traced(leaf)]
    traced = [leaves[slot] for slot in slots]
    # Traced arguments are not captured, because the arrays would become constants of the program.
    statics = replace_slots(leaves, slots, [None] * len(slots))

    def make(*arrays: object) -> Any:
        all_leaves = replace_slots(statics, slots, arrays)
        args, kwargs = jax.tree.unflatten(treedef, all_leaves)
        return make_model(*args, **kwargs)

    return make, traced


def _is_traced(x: object) -> bool:
    """Whether an argument is traced. Numbers are not, because they are sizes and settings."""
    is_number = isinstance(x, int | float | complex | np.generic)
    return _compat.is_graph_object(x) or (not is_number and _compat.is_array_like(x))


def _mesh_for_constructor(
    build: Callable[..., object], arrays: list[object], mesh: AnyMesh | None
) -> AnyMesh | None:
    """Returns the mesh for the constructor to run with: one with Auto axes if that is possible.

    On Explicit axes, a constructor has to say how each value is sharded, and few do. If it says so,
    JAX raises a ValueError on Auto axes. Auto axes are tried first, by a trace that makes no
    arrays.

    Args:
      build: the constructor, as a function of ``arrays``.
      mesh: the mesh of the call; None without one.
    """
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return mesh
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    try:
        with in_context(auto):
            jit(build).eval_shape(*arrays)
    # JAX raises a ValueError for `out_sharding` with Auto axes. If this is another error of the
    # constructor, it will be raised again on the mesh that is returned.
    except ValueError:
        return mesh
    return auto
