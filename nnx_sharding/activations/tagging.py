"""Tags modules: each gets its path in the user's arguments, and the specs of its own Variables.

The specs are those declared for the arrays of the call, or, on Explicit axes, those in their types.
A tag has each twice: as the array is outside of its module (``outside``), and as the module uses it
(``inside``). With a kernel of ``P("data", "model")`` that FSDP gathers over ``data``::

    outside   P("data", "model")
    inside    P(None, "model")

*Sources* are what is declared for a module, by the user and by strategies: whether to gather its
parameters, over which axes not (``kept``), and specs for its methods (``shardings``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
from jax.sharding import AbstractMesh, Mesh

from .. import _compat
from ..core.constrain import type_spec
from ..core.plan import Plan
from ..core.unflatten import Unflattened
from ..specs.activation_sharding import ActivationSharding
from ..specs.fitting import keep_axes, pad_entries, spec_and_mesh, spec_axes, with_entries
from ..specs.paths import Path
from ..specs.types import AxisName
from .calls import Tag, VariableSpecs
from .variables import Variable, is_parameter, modules_in, own_variables


@dataclasses.dataclass
class Tagger:
    """Makes the tags of modules in one trace.

    Args:
      plan: that of the call: which spec is declared for each of its arrays.
      unflattened: the arguments in the trace.
      mesh: the mesh of the trace, if there is one.
      axes: its axes, except those that are Manual.
      explicit_axes: the Explicit axes in the types of the arguments.
    """

    plan: Plan
    unflattened: Unflattened
    mesh: Mesh | AbstractMesh | None
    axes: frozenset[AxisName]
    explicit_axes: frozenset[AxisName]

    def __post_init__(self) -> None:
        """Starts with no tags."""
        # Tags of modules that the function has from elsewhere, by id, with the module itself, so
        # that no other one gets its id.
        self._foreign: dict[int, tuple[Tag, object]] = {}

    @functools.cached_property
    def _indices(self) -> dict[int, int]:
        """The index of each object of the arguments, by its id."""
        return {id(x): i for i, x in enumerate(self.unflattened.objects)}

    def tag(
        self,
        name: str,
        path: Path,
        sources: tuple[ActivationSharding, ...],
        module: object,
        *,
        is_in_argument: bool = True,
    ) -> Tag:
        """Makes the tag of a module, with the specs of its own Variables.

        Args:
          name: the name of the argument that the module is in.
          path: the path of the module in it.
          sources: what the user and strategies declare for the module.
          module: the module in the trace.
          is_in_argument: whether it is in an argument of the function.
        """
        gathered = self.axes.intersection(self._gathered_axes(sources))
        # Over the stages of a pipeline, layers are sharded, but not what is in them.
        schedules = (x.schedule for source in sources for x in source.shardings)
        inside = self.axes - gathered - {schedule.axis for schedule in schedules if schedule}
        specs: dict[Path, VariableSpecs] = {}
        if gathered or self.explicit_axes:
            for own_path, variable in own_variables(module):
                variable_specs = self._variable_specs(variable, gathered, inside)
                if variable_specs is not None:
                    specs[own_path] = variable_specs
        return Tag(
            name=name,
            path=path,
            sources=sources,
            axes=gathered,
            specs=specs,
            mesh=self.mesh,
            is_in_argument=is_in_argument,
        )

    def _gathered_axes(self, sources: Iterable[ActivationSharding]) -> set[AxisName]:
        """Returns the axes over which sources gather parameters while their module runs.

        ``gather=True`` stands for the axes that shard the batch.
        """
        gathered = set[AxisName]()
        for source in sources:
            gathered.update(self.plan.batch_axes if source.gather is True else source.gather or ())
        return gathered.difference(*(source.kept for source in sources))

    def _variable_specs(
        self, variable: Variable, gathered: frozenset[AxisName], inside: frozenset[AxisName]
    ) -> VariableSpecs | None:
        """Returns how a Variable is sharded, or None if it has no spec.

        Args:
          variable: the Variable in the trace.
          gathered: the axes over which parameters of its module are gathered.
          inside: the axes that may shard it while its module runs.
        """
        value = _compat.get_value(variable)
        # What is declared for its array. One of several arrays, as of a quantized type, has none.
        index = self._indices.get(id(variable))
        slots = () if index is None else self.plan.structure.slots[index]
        declared = self.plan.object_specs.get(slots[0]) if len(slots) == 1 else None
        pair = spec_and_mesh(type_spec(value) if declared is None else declared, self.mesh)
        if pair is None or not isinstance(value, jax.Array):
            return None
        spec, _ = pair
        shape = jax.typeof(value).shape
        kept = keep_axes(spec, inside)
        return VariableSpecs(
            inside=with_entries(kept, pad_entries(kept, len(shape))),
            shape=shape,
            is_gathered=is_parameter(variable) and not gathered.isdisjoint(spec_axes(spec)),
            outside=with_entries(spec, pad_entries(spec, len(shape))),
        )

    def tag_foreign(self, module: object, sources: tuple[ActivationSharding, ...]) -> Tag:
        """Returns the tag of a module that is not from the arguments: the root of a path.

        All modules in it get tags, too. They are kept here, because what the function has captured
        or made is not to be changed.
        """
        if id(module) not in self._foreign:
            name = type(module).__name__
            for path, inner in modules_in(module):
                if _compat.tag_of(inner) is None:
                    tag = self.tag(name, path, sources, inner, is_in_argument=False)
                    self._foreign.setdefault(id(inner), (tag, inner))
        tag, _ = self._foreign[id(module)]
        return tag
