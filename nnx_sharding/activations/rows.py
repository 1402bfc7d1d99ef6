"""How the rows of an array are declared to be sharded: its first dimension, such as the batch.

Code that makes microbatches asks for this, because a declaration is for one array and does not pass
on to the results of operations on it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from ..core.constrain import mesh_in_trace, type_spec
from ..core.plan import Plan
from ..specs.fitting import axes_of, first_axes, pad_entries, spec_and_mesh
from ..specs.types import AnyMesh, Arrays, AxisName


class DeclaredRows:
    """Finds how the rows of arrays are declared to be sharded in one trace.

    The private attributes ``_plan``, ``_leaves``, ``_mesh`` and ``_axes`` hold the arguments.
    """

    def __init__(self, plan: Plan, leaves: Arrays, mesh: AnyMesh | None, axes: frozenset[AxisName]):
        """Keeps what is known of the trace.

        Args:
          plan: has the shardings that are declared for arguments, and the transform with its mesh.
          leaves: the tracers of the arguments, by slot (their position).
          mesh: the mesh of the trace; None if there is none.
          axes: the axes of this mesh, except those that are Manual in a `shard_map`.
        """
        self._plan, self._leaves, self._mesh, self._axes = plan, leaves, mesh, axes

    def axes(self, x: jax.Array) -> frozenset[AxisName]:
        """Returns the axes over which the first dimension of an array is declared to be sharded.

        Axes of all declarations count. :meth:`sharding` takes the first declaration instead.
        """
        return first_axes(self._declared_shardings(x), self._plan.transform.context)

    def sharding(self, x: jax.Array) -> NamedSharding | None:
        """Returns the declared sharding of the rows of an array (its first dimension), or None.

        Other dimensions are left to the compiler, because only rows are divided into microbatches.
        """
        if self._mesh is None or type_spec(x) is not None:  # not None: the type says the sharding
            return None
        other_dimensions = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        # A declaration may be missing, or shard other dimensions only; the first that fits counts.
        for sharding in self._declared_shardings(x):
            pair = spec_and_mesh(sharding, self._plan.transform.context)
            if pair is None:  # None: the sharding has no spec
                continue
            spec, _ = pair
            [first_entry, *_] = pad_entries(spec, 1)
            # The axes of a `shard_map` are left out, because it has divided the rows over them.
            axes = tuple(axis for axis in axes_of(first_entry) if axis in self._axes)
            if axes:
                sharding_of_rows = PartitionSpec(axes, *other_dimensions)
                return NamedSharding(mesh_in_trace(self._mesh), sharding_of_rows)
        return None

    def _declared_shardings(self, x: jax.Array) -> list[Any]:
        """Lists the shardings that are declared for an array; an item may be None.

        Only declarations for the array itself count: for an argument of the function, in the
        array's type, or by a constraint. They do not count for results of operations on the array.
        """
        # Within `grad` another tracer stands for the argument, so the argument is looked up.
        value = _compat.differentiated_value(x)
        # Arguments outside of modules are found by their tracers, because each has its own.
        slots = self._plan.structure.root_slots
        argument_shardings = [
            self._plan.shardings[slot] for slot in slots if self._leaves[slot] is value
        ]
        type_sharding = jax.typeof(x).sharding  # a type names no Auto axes
        # None unless a constraint has made the array.
        constraint_sharding = _compat.constrained_by(value)
        return [*argument_shardings, type_sharding, constraint_sharding]
