"""Constrains what a module takes and returns to the specs that are declared for it.

Activations are a pytree, and the user declares a prefix of it, with specs as leaves. Where a part
is a module, such as a cache, or a pytree of several arrays, a ``StateSharding`` chooses a spec for
each of them by its path. What does not fit is collected, for one error at the end of the trace.

A `Frame` (``calls.py``) is the call of a module: its ``tag`` has the expression for the module
(``accessor``), and ``is_strict`` says whether it is an error if specs do not fit. That is so where
the user declares them, unless with ``strict=False``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..core.constrain import apply_shardings, mesh_in_trace, without_unconstrained
from ..core.flatten import flatten
from ..core.problems import no_mesh
from ..core.rebuild import rebuild
from ..core.structure import locations_in
from ..core.transform import Sharded
from ..specs.activation_sharding import is_activation_spec
from ..specs.fitting import fit_sharding, spec_and_mesh
from ..specs.paths import accessor
from ..specs.state_sharding import StateSharding
from ..specs.types import AnyArray, AxisName
from .calls import Frame


class Constrainer:
    """Constrains the activations of one trace.

    Args:
      transform: has the name for messages, and what to do where a spec does not divide a shape.
      mesh: the mesh of each ``PartitionSpec``; None if there is none.
      axes: the axes of the mesh that specs may name.

    Attributes:
      mismatches: the lines for the error, in order, each once.
    """

    def __init__(
        self, transform: Sharded, mesh: Mesh | AbstractMesh | None, axes: frozenset[AxisName]
    ):
        """Starts with no mismatches."""
        self._transform, self._mesh, self._axes = transform, mesh, axes
        self.mismatches: dict[str, None] = {}

    def constrain(self, tree: Any, prefix: object, frame: Frame, *, side: str) -> Any:
        """Constrains what a method takes or returns to the specs declared for it.

        Args:
          tree: a pytree of activations.
          prefix: a pytree prefix of it, with specs as leaves; None leaves activations unchanged.
          frame: the call.
          side: ``input`` or ``output``, for messages.

        Returns:
          The same pytree with constrained arrays. If ``prefix`` has another structure, that is a
          mismatch, and the pytree is unchanged.
        """
        name = f"{side} of {frame.tag.accessor}"
        specs, treedef = jax.tree_util.tree_flatten(prefix, is_leaf=is_activation_spec)
        try:
            parts = treedef.flatten_up_to(tree)  # type: ignore[attr-defined]
        except ValueError as error:
            self.mismatches[f"{name}: {error}"] = None
            return tree
        constrained = []
        for part, spec in zip(parts, specs, strict=True):
            if isinstance(spec, StateSharding):
                constrained.append(self._constrain_by_path(part, spec, frame, name))
            else:
                constrain = functools.partial(
                    self._constrain_array, spec=spec, frame=frame, name=name
                )
                constrained.append(jax.tree.map(constrain, part))
        return jax.tree_util.tree_unflatten(treedef, constrained)

    def _constrain_by_path(
        self, tree: object, rules: StateSharding, frame: Frame, name: str
    ) -> object:
        """Constrains the Variables and arrays in a module, or a pytree, by their paths in it.

        Args:
          tree: the module or pytree.
          rules: has a spec for each of its filters, which see these paths.
          frame: the call that takes or returns the tree.
          name: the expression for the tree, in messages.

        Returns:
          The same module, or a new pytree.
        """
        flat = flatten(tree)
        leaves = [*flat.leaves]  # the arrays; a slot is a position among them
        # For each Variable, and each array outside of Variables: its path, and its slots.
        for location in locations_in(flat.structure):
            index = location.object_index  # of the Variable; None for an array in none
            subject = leaves[location.slots[0]] if index is None else flat.objects[index]
            _, spec = rules.find(location.path, subject)  # after the number of the filter
            array_name = accessor(name, location.path)
            for slot in location.slots:
                leaves[slot] = self._constrain_array(leaves[slot], spec, frame, array_name)
        # A module may be of the trace around, as when it is called within a `remat`.
        return rebuild(flat, leaves, foreign=True)

    def _constrain_array(
        self, x: AnyArray, spec: PartitionSpec | NamedSharding | None, frame: Frame, name: str
    ) -> AnyArray:
        """Constrains an activation to a spec, or to the part of it that fits its shape.

        Args:
          x: the activation. What is no JAX array is returned as it is.
          spec: the spec; None for none.
          frame: the call that takes or returns it.
          name: the expression for it, in messages.
        """
        if spec is None or not isinstance(x, jax.Array):
            return x
        pair = spec_and_mesh(spec, self._mesh)
        if pair is None:  # a PartitionSpec, and no mesh
            raise no_mesh(self._transform.name)
        partition_spec, mesh = pair
        mesh = mesh_in_trace(mesh)
        fit = fit_sharding(
            partition_spec,
            mesh,
            x.shape,
            on_indivisible=self._transform.on_indivisible,
            usable=self._axes or None,  # None for all axes: the trace has no mesh but the spec's
        )
        if fit.problems:
            # What a strategy declares is for models of any shape, so there it is no error.
            if frame.is_strict:
                line = fit.line(name).strip()
                self.mismatches[line] = None  # a key, so that calls of one module add it once
            return x
        fitted: Any = fit.sharding  # the spec, or what is left of it
        if AxisType.Auto not in mesh.axis_types:  # there JAX does not support UNCONSTRAINED
            fitted = without_unconstrained(fitted, x, mesh)
        sharding = NamedSharding(mesh, fitted)
        [constrained] = apply_shardings([x], [sharding])
        # For reports, and for the type that the array gets if this call has Auto axes. What the
        # user declares also holds for the modules around this one, if they return the array.
        frame.note_sharding(constrained, sharding)
        if frame.is_strict:
            frame.note_declared(constrained, sharding)
        return constrained
