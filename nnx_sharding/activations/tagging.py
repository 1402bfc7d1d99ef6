"""Tags modules: each gets its path in the user's arguments, and the specs of its own Variables.

The specs are those declared for the arrays of the call, or, on Explicit axes, those in their types.
A tag has two for each array: the spec outside of its module (``outside``), and the spec with which
the module uses it (``inside``). With a kernel of ``P("data", "model")`` that FSDP gathers over
``data``::

    outside   P("data", "model")
    inside    P(None, "model")

*Sources* are the declarations for a module, of the user and of strategies: whether to gather its
parameters (``gather``), over which axes not to gather (``kept``), and specs for its methods
(``shardings``). One of these may have a ``schedule``, which runs the module's layers on the stages
of a pipeline.

The arguments of a call are flattened: modules and Variables are a list of objects, each with an
*index*, and arrays are a list, each with a *slot*. In a `Plan`, ``structure.slots`` has the slots
of the arrays of each object, by its index, and ``object_specs`` has the declared spec of each array
of an object, by its slot. ``batch_axes`` are the mesh axes that shard the rows of the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
from jax.sharding import AbstractMesh, Mesh

from .. import _compat
from .._compat import cached_property
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
      plan: the plan of the call, with the spec that is declared for each of its arrays.
      unflattened: the arguments in the trace.
      mesh: the mesh of the trace; None if there is none.
      axes: the axes of the mesh that are not Manual.
      explicit_axes: the Explicit axes in the types of the arguments.

    Its private attributes:

        _foreign   the tag of each module that is in no argument, by the id of the module, as a pair
                   with the module, which keeps another object from getting the same id
        _indices   the index of each object of the arguments, by its id
    """

    plan: Plan
    unflattened: Unflattened
    mesh: Mesh | AbstractMesh | None
    axes: frozenset[AxisName]
    explicit_axes: frozenset[AxisName]

    def __post_init__(self) -> None:
        """Starts with no tags."""
        self._foreign: dict[int, tuple[Tag, object]] = {}

    @cached_property
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
          name: the name of the argument that holds the module.
          path: the path of the module in the argument.
          sources: the declarations of the user and of strategies for the module.
          module: the module in the trace.
          is_in_argument: whether it is in an argument of the function.
        """
        gathered_axes = self.axes.intersection(self._gathered_axes(sources))
        # The axis of a pipeline shards a stack of layers. A module sees one layer, which a stage
        # has as a whole, so that axis shards nothing in it.
        schedules = [x.schedule for source in sources for x in source.shardings]
        stage_axes = {schedule.axis for schedule in schedules if schedule is not None}
        inside_axes = self.axes - gathered_axes - stage_axes
        specs: dict[Path, VariableSpecs] = {}
        # On Auto axes alone, specs are only needed to gather, because the compiler infers the rest.
        if gathered_axes or self.explicit_axes:
            for own_path, variable in own_variables(module):
                variable_specs = self._variable_specs(variable, gathered_axes, inside_axes)
                if variable_specs is not None:  # None: nothing is known of its sharding
                    specs[own_path] = variable_specs
        return Tag(
            name=name,
            path=path,
            sources=sources,
            axes=gathered_axes,
            specs=specs,
            mesh=self.mesh,
            is_in_argument=is_in_argument,
        )

    def _gathered_axes(self, sources: Iterable[ActivationSharding]) -> set[AxisName]:
        """Returns the axes over which sources gather parameters while their module runs.

        An axis that one source keeps is gathered by no other source. For example, experts stay
        divided over their axis, though rows are sharded over it as well, and a base such as
        ``fsdp`` would gather them.
        """
        gathered_axes = set[AxisName]()
        kept_axes = set[AxisName]()
        for source in sources:
            if source.gather is True:  # True: gather over the axes that shard the batch
                gathered_axes.update(self.plan.batch_axes)
            elif source.gather:
                gathered_axes.update(source.gather)
            kept_axes.update(source.kept)
        return gathered_axes - kept_axes

    def _variable_specs(
        self, variable: Variable, gathered: frozenset[AxisName], inside_axes: frozenset[AxisName]
    ) -> VariableSpecs | None:
        """Returns how a Variable is sharded, or None if it has no spec.

        Args:
          gathered: the axes over which parameters of its module are gathered.
          inside_axes: the axes that may shard it while its module runs.
        """
        value = _compat.get_value(variable)
        # A spec is declared for the Variable's array. A Variable in no argument has none. A
        # Variable with several arrays, such as a quantized one, counts as if it had none.
        index = self._indices.get(id(variable))
        slots = () if index is None else self.plan.structure.slots[index]
        declared = self.plan.object_specs.get(slots[0]) if len(slots) == 1 else None
        pair = spec_and_mesh(type_spec(value) if declared is None else declared, self.mesh)
        if pair is None or not isinstance(value, jax.Array):
            return None
        spec, _ = pair
        shape = jax.typeof(value).shape
        inside_spec = keep_axes(spec, inside_axes)
        # Both specs get an entry for each dimension, because their readers expect it.
        return VariableSpecs(
            inside=with_entries(inside_spec, pad_entries(inside_spec, len(shape))),
            shape=shape,
            is_gathered=is_parameter(variable) and not gathered.isdisjoint(spec_axes(spec)),
            outside=with_entries(spec, pad_entries(spec, len(shape))),
        )

    def tag_foreign(self, module: object, sources: tuple[ActivationSharding, ...]) -> Tag:
        """Returns the tag of a module that is in no argument, and has no tag.

        The function has captured or made the module. Its path begins at itself, unless it is in a
        module that came here before: then it got its tag together with that module. All modules in
        it get tags now, too. Tags are kept here by the ids of modules, because modules that the
        function captures must not be changed.

        Args:
          module: the module.
          sources: the declarations of the user and of strategies.
        """
        if id(module) not in self._foreign:
            name = type(module).__name__  # the class, because no argument has a name for it
            for path, inner in modules_in(module):
                if _compat.tag_of(inner) is None:  # not None: it is in an argument as well
                    tag = self.tag(name, path, sources, inner, is_in_argument=False)
                    # An inner module that was called before the outer one keeps its first tag.
                    self._foreign.setdefault(id(inner), (tag, inner))
        tag, _ = self._foreign[id(module)]
        return tag
