"""Creates models sharded, or abstract.

The constructor becomes a function of its traced arguments alone, which ``jit`` compiles with the
shardings of the model as ``out_shardings``: so no parameter is ever in full on one device. Traced
are arrays and NNX objects, such as ``nnx.Rngs``; all other arguments, such as sizes, are *statics*.
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
from ..core.signature import Roles
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
      name: the function of the user, for messages.
      make_model: the user's class or function.
      sharding: the shardings of the model, or a function from the abstract model to these.
      mesh: the mesh of partition specs.
      arguments: those of ``make_model``, positional and by name.
      is_abstract: whether only its shapes are made.
    """
    # A model is often callable, too, but what it returns is no model.
    if _compat.is_graph_object(make_model) or not callable(make_model):
        raise TypeError(
            f"{name}: make_model must be a class, or a function that makes the model, got a "
            f"{type(make_model).__name__}: pass the function itself, as in {name}(make, ...), not "
            "what it returns. Arrays that exist are sharded by nnx_sharding.place."
        )
    build, arrays = _close_over_statics(make_model, arguments)  # the model is `build(*arrays)`
    try:
        with in_context(_mesh_inside(build, arrays, mesh)):
            if sharding is None or callable(sharding):
                # The shardings may depend on the model, so it is made abstractly first.
                abstract = jit(build).eval_shape(*arrays)
                sharding = (from_metadata if sharding is None else sharding)(abstract)
            specs = Specs(sharding)
            check_specs(name, sharding=specs)
            # A `jit` whose program returns the model in these shardings. It is made of its parts,
            # so that errors name the user's function and its option, and not those of `jit`.
            transform = Jit(name=name, in_name="sharding", out_specs=specs, mesh=mesh)
            make = lift(Lifted, build, transform, Roles(), graph=None, graph_updates=None)
            return make.eval_shape(*arrays) if is_abstract else make(*arrays)
    except ValueError as error:
        if "is not found in mesh" in str(error):  # JAX's, for what Flax shards when it is created
            error.add_note(
                "If the metadata of Variables has logical names, Flax needs the rules for them "
                "while the model is created: `with nnx.logical_axis_rules(rules):`."
            )
        raise


def _close_over_statics(
    make_model: Callable[..., object], arguments: tuple[tuple[object, ...], dict[str, object]]
) -> tuple[Callable[..., Any], list[Any]]:
    """Turns a call of the constructor into a function of what is traced, and those arguments.

    ``arguments`` are the positional ones and those by name; the function captures their statics.
    """
    leaves, treedef = jax.tree.flatten(arguments, is_leaf=_compat.is_graph_object)
    # Without arguments, it is the user's own function, so that an equal call finds the trace of the
    # last one. A class is traced in each call, as with arguments.
    if not leaves and not isinstance(make_model, type):
        return make_model, []
    slots = [slot for slot, leaf in enumerate(leaves) if _is_traced(leaf)]
    traced = [leaves[slot] for slot in slots]
    # What is traced is not captured: the caller's arrays would become constants of the program.
    statics = replace_slots(leaves, slots, [None] * len(slots))

    def make(*arrays: object) -> Any:
        all_leaves = replace_slots(statics, slots, arrays)
        args, kwargs = jax.tree.unflatten(treedef, all_leaves)
        return make_model(*args, **kwargs)

    return make, traced


def _is_traced(x: object) -> bool:
    """Whether an argument is traced: numbers are sizes and settings, which are not."""
    is_number = isinstance(x, int | float | complex | np.generic)
    return _compat.is_graph_object(x) or (not is_number and _compat.is_array_like(x))


def _mesh_inside(
    build: Callable[..., object], arrays: list[object], mesh: AnyMesh | None
) -> AnyMesh | None:
    """Returns the mesh that is in context while the constructor runs: with Auto axes if possible.

    On Explicit axes a constructor has to say how each value is sharded, which few do. JAX raises a
    ValueError if one that does so runs on Auto axes. That is tried first, by a trace of its own,
    which makes no arrays.

    Args:
      build: the constructor, as a function of ``arrays``.
      arrays: its traced arguments.
      mesh: the mesh of the call; None without one.
    """
    if mesh is None or not axes_of_type(mesh, AxisType.Explicit):
        return mesh
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    try:
        with in_context(auto):
            jit(build).eval_shape(*arrays)
    except ValueError:  # JAX's, for `out_sharding` with Auto axes
        return mesh  # on which any other error of the constructor will be raised again
    return auto
