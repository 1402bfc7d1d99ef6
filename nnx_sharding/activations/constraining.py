"""Constrains what a module takes and returns to the specs that are declared for it.

Activations are a pytree, and the user declares a prefix of it, with specs as leaves. A part may be
a module, such as a cache, or a pytree of several arrays. For such a part, a ``StateSharding``
chooses a spec for each array by its path. Specs that do not fit are collected, for one error at the
end of the trace.

A `Frame` (``calls.py``) is the call of a module: its ``tag`` has the expression for the module
(``accessor``), and ``is_strict`` says whether it is an error if specs do not fit. That is true for
specs of the user, unless they have ``strict=False``. ``note_sharding`` of a frame records what was
chosen for an array of this call; ``note_declared`` tells the calls around this one, too.
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
      transform: has the name for messages, and the option for specs that do not divide a shape.
      mesh: the mesh of each ``PartitionSpec``; None if there is none.
      axes: the axes of the mesh that specs may name.

    The private attributes ``_transform``, ``_mesh`` and ``_axes`` hold these arguments.

    Attributes:
      mismatches: the lines for the error, in order, each once, as the keys of a dict. `Scope`
        (``tracing.py``) raises the error at the end of the trace.
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
          The same pytree with constrained arrays. If ``prefix`` has another structure, the pytree
          is returned unchanged, and a mismatch is recorded.
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
          frame: the call that takes or returns the tree.

        Returns:
          The same module, or a new pytree.
        """
        flat = flatten(tree)
        leaves = [*flat.leaves]  # the arrays; a slot is a position among them
        # A location is a Variable or an array outside of Variables, with its path and its slots.
        for location in locations_in(flat.structure):
            index = location.object_index  # the index of the Variable; None for a bare array
            subject = leaves[location.slots[0]] if index is None else flat.objects[index]
            # The spec of the first filter that matches; None if no filter does.
            _index_of_filter, spec = rules.find(location.path, subject)
            array_name = accessor(name, location.path)
            for slot in location.slots:
                leaves[slot] = self._constrain_array(leaves[slot], spec, frame, array_name)
        # With ``foreign``, a module of a surrounding trace is changed, too. A module is one if it
        # is called within a `remat`, for example.
        return rebuild(flat, leaves, foreign=True)

    def _constrain_array(
        self, x: AnyArray, spec: PartitionSpec | NamedSharding | None, frame: Frame, name: str
    ) -> AnyArray:
        """Constrains an activation to a spec, or returns it unchanged if the spec does not fit.

        ``on_indivisible`` may drop axes from the spec that do not divide the shape. Other problems
        are a mismatch, which is recorded if the call is strict.

        Args:
          x: the activation. A value that is not a JAX array is returned as it is.
          spec: the spec; None for none.
          frame: the call that takes or returns the activation.
        """
        if spec is None or not isinstance(x, jax.Array):
            return x
        pair = spec_and_mesh(spec, self._mesh)
        if pair is None:  # None: ``spec`` is a PartitionSpec, and there is no mesh
            raise no_mesh(self._transform.name)
        partition_spec, mesh = pair
        mesh = mesh_in_trace(mesh)
        fit = fit_sharding(
            partition_spec,
            mesh,
            x.shape,
            on_indivisible=self._transform.on_indivisible,
            # None means all axes: without axes of its own, the trace has no mesh but the spec's.
            usable=self._axes or None,
        )
        if fit.problems:
            # A strategy declares for models of any shape, so its spec is no error if it does not
            # fit.
            if frame.is_strict:
                line = fit.line(name).strip()
                self.mismatches[line] = None  # a key, so that calls of one module add it once
            return x
        fitted: Any = fit.sharding  # the spec without the axes that were dropped
        if AxisType.Auto not in mesh.axis_types:  # JAX supports UNCONSTRAINED on Auto axes only
            fitted = without_unconstrained(fitted, x, mesh)
        sharding = NamedSharding(mesh, fitted)
        [constrained] = apply_shardings([x], [sharding])
        # The record is for reports, and for the type that the array gets if this call has Auto
        # axes. A user's declaration also holds for the modules around this one, if they return the
        # array.
        frame.note_sharding(constrained, sharding)
        if frame.is_strict:
            frame.note_declared(constrained, sharding)
        return constrained
