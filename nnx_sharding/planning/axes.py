"""The names of mesh axes by their roles.

Each mesh axis has a name that the user may choose, and a *role* (`Axes`), which says what the axis
divides:

    data, replica   rows of the batch; replicas are on different slices of TPUs
    model           features, for ``tensor`` and ``sequence``
    expert          experts, and rows of the batch outside of the experts
    stage           layers, for ``pipeline``
    context, ring   positions in sequences, for ``context``: heads are exchanged along ``context``,
                    keys and values go around ``ring``
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from ..partition.mesh import axes_across_slices
from ..specs.fitting import axes_of

ROWS = ("replica", "data", "expert")  # the roles of axes that shard the rows of the batch
# The roles of axes along which the devices of a replica have different tokens of the batch.
# Strategies may shard parameters over these axes; devices then gather the parameters.
SHARDING = ("data", "expert", "ring", "context")


class Axes(NamedTuple):
    """The names of mesh axes by their roles, in the order of the mesh.

    Each role has one axis, and ``model`` may have two.
    """

    replica: tuple[str, ...] = ("replica",)
    stage: tuple[str, ...] = ("stage",)
    data: tuple[str, ...] = ("data",)
    expert: tuple[str, ...] = ("expert",)
    ring: tuple[str, ...] = ("ring",)
    context: tuple[str, ...] = ("context",)
    model: tuple[str, ...] = ("model",)

    @classmethod
    def of(cls, names: Sequence[str] | Mapping[str, Any]) -> Axes:
        """Reads axes by role, or the tuples (data, model) or (replica, data, model), of the user.

        Raises:
          ValueError: a role is unknown, a name is used twice, or the number of names is wrong.
        """
        if not isinstance(names, Mapping):
            roles_by_count = {2: ("data", "model"), 3: ("replica", "data", "model")}
            names_in_order = () if isinstance(names, str) else tuple(names)
            roles = roles_by_count.get(len(names_in_order))
            # The number of names is wrong if `roles` is None, and the error below says so.
            by_role = dict(zip(roles or (), map(axes_of, names_in_order), strict=False))
            is_count_known = roles is not None
        else:
            by_role = {role: axes_of(name) for role, name in names.items()}
            is_count_known = True
        known_roles = {role: axes for role, axes in by_role.items() if role in cls._fields}
        axes = Axes(**known_roles)
        every_name = [*itertools.chain(*axes)]
        are_different = len({*every_name}) == len(every_name)
        # A role without an axis is wrong as well: the user gave it None or ().
        have_right_number = all(
            len(x) == 1 or (role == "model" and len(x) > 1) for role, x in known_roles.items()
        )
        are_known = is_count_known and len(known_roles) == len(by_role)
        if not are_known or not have_right_number or not are_different:
            raise ValueError(
                "plan: axes must be the names of the data and the model axis, as in ('data', "
                "'model'), or different names by role, as in {'data': 'dp', 'model': ('x', 'y')}, "
                f"of which only model may have several: {', '.join(cls._fields)}; got {names!r}."
            )
        return axes

    def in_mesh(self, sizes: Mapping[str, int], *roles: str, least: int = 1) -> tuple[str, ...]:
        """Returns the names of the axes of a mesh that have one of these roles.

        Args:
          sizes: name of an axis of the mesh → its size.
          *roles: fields of this class, such as ``"data"``.
          least: the smallest size that counts: 2 leaves out axes that shard nothing.
        """
        names = (name for role in roles for name in getattr(self, role))
        return tuple(name for name in names if sizes.get(name, 0) >= least)

    def between_slices(self, mesh: Mesh | AbstractMesh, num_slices: int) -> set[str]:
        """Finds the axes of a mesh along which there are different slices of TPUs.

        Virtual devices have no slices. This function takes them to be divided into ``num_slices``
        along the first axes of the mesh: if a mesh replica 2 × stage 4 is on four slices, there are
        two slices along ``replica``, and two along ``stage``.
        """
        crossing = axes_across_slices(mesh)
        if crossing:
            return crossing
        slices_left = num_slices  # the number of slices that later axes have to divide
        for name, size in mesh.shape.items():
            slices_along = math.gcd(size, slices_left)  # the number of slices along this axis
            if slices_along > 1:
                crossing.add(name)
            slices_left //= slices_along
        return crossing
