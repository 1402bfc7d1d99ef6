"""The base class of all transforms, and of ``jit`` and ``shard_map``: what a transform decides.

A *spec* says how an array enters or leaves: for ``jit`` it is a sharding, for ``vmap`` an axis. The
user writes specs as a prefix of arguments or outputs (``Specs``). The transform gives JAX their
*final* form. A *plan* (``plan.py``) has all that follows from specs for a structure of arguments.
A *slot* is the position of an array in the flat list of all arrays (``leaves``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from ..errors import NoMeshError, message
from ..specs.activation_sharding import ActivationSharding
from ..specs.fitting import (
    OnIndivisible,
    axes_of_type,
    possible_corrections,
    replace_spec,
    spec_and_mesh,
)
from ..specs.types import AnyMesh, Arrays, Spec
from .call_context import Caller
from .constrain import mesh_of_types, type_as, type_mesh
from .fingerprint import fingerprint_of
from .flatten import Flat
from .prefixes import Specs
from .problems import no_mesh
from .retyping import AxisTypeChange, RetypedArrays
from .signature import Parameters, Signature, SortedCall, sort_call
from .static_equality import strict_key
from .unflatten import Unflattened

if TYPE_CHECKING:  # plan.py imports this module
    from .plan import Plan

# What a call does with arrays that are committed to another sharding than declared: raise an error,
# reshard them on the same devices, move them from any devices, or keep their sharding.
OnCommitted: TypeAlias = Literal["error", "reshard", "move", "leave"]

NO_SPECS = Specs(None)


class Program(NamedTuple):
    """A pure function, transformed by JAX, in the forms in which calls use it."""

    staged: Any  # the form with ``trace``, ``lower`` and ``eval_shape``
    top_level: Callable[..., Any]  # what a call executes outside of any trace
    inline: Callable[..., Any]  # what a call executes inside another trace
    # What a call executes outside of any trace if no earlier trace is right for it.
    traced_each_time: Callable[..., Any]


class Dependencies(NamedTuple):
    """The facts on which a plan depends besides the structure of arguments and the options."""

    mesh: AnyMesh | None = None  # the mesh in context, if specs need a mesh
    types: tuple[Hashable, ...] | None = None  # shapes and dtypes of all arrays, if they matter
    specs: tuple[PartitionSpec, ...] | None = None  # the specs in types of arrays, if they matter
    filters: Hashable = None  # a key for what the user's functions that choose specs can read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transform:
    """A transform with the user's options; hashable.

    The specs of a transform are shardings or axes, so their type here is ``Any``.
    """

    name: str  # the name of the transform in messages
    in_name: str  # the name of the option for the specs of inputs
    in_specs: Specs = NO_SPECS  # the specs of inputs as the user wrote them
    out_specs: Specs = NO_SPECS  # the specs of outputs as the user wrote them

    context: ClassVar[Any] = None  # the mesh that applies to one plan
    strict: ClassVar[bool] = False  # whether warnings are errors
    returns_any: ClassVar[bool] = False  # whether results need not be arrays
    # Whether a program at top level keeps what its function captured when it was traced.
    keeps_captures: ClassVar[bool] = False
    # Whether negative positions count from the end of the call.
    counts_from_call: ClassVar[bool] = False
    # The names of the options on which no trace depends.
    untraced: ClassVar[frozenset[str]] = frozenset({"in_specs"})
    # Specs that the transform may choose for outputs, in addition to the user's specs.
    own_specs: ClassVar[tuple[Any, ...]] = ()

    @property
    def out_name(self) -> str:
        """The name of the option for the specs of outputs."""
        return self.in_name.replace("in_", "out_")

    def sort_call(
        self,
        parameters: Parameters,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> SortedCall:
        """Sorts the arguments of a call by their roles.

        Here, the roles are those that the user declared. ``shard_map`` also makes arguments static
        that are not arrays, and needs the parameters for that.

        Args:
          parameters: the parameters of the user's function.
          signature: the names and roles of the arguments of this call.
          args: the positional arguments.
          kwargs: the keyword arguments.
        """
        return sort_call(signature, args, kwargs)

    @property
    def reads_shapes(self) -> bool:
        """Whether a plan depends on shapes and dtypes."""
        return self.in_specs.depend_on_values

    @property
    def reads_context(self) -> bool:
        """Whether a plan depends on the mesh in context."""
        return False

    @property
    def infers_specs(self) -> bool:
        """Whether a plan depends on the shardings of arrays."""
        return False

    def dependencies(self, leaves: Arrays) -> Dependencies:
        """Returns what the plan of a call with these arrays depends on; ``specs`` is None here."""
        types = ((getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves)
        filters: Hashable = None
        predicates = (*self.in_specs.predicates, *self.out_specs.predicates)
        if predicates and not self.keeps_captures:
            filters = fingerprint_of(predicates)
            if filters is None:  # what the predicates read cannot be listed
                # A new object equals no other key, so the predicates are asked in each call.
                filters = object()
        return Dependencies(
            mesh=_compat.context_mesh() if self.reads_context else None,
            types=tuple(types) if self.reads_shapes else None,
            filters=filters,
        )

    @property
    def traced_filters(self) -> Sequence[Any]:
        """The user's predicates that a trace asks; the trace depends on what they read."""
        return self.out_specs.predicates

    def in_context(self) -> Self:
        """Returns this transform with the mesh that applies now."""
        return self

    @property
    def options_key(self) -> Hashable:
        """All options, which are compared as strictly as static arguments."""
        return self._key_without(())

    @property
    def trace_key(self) -> Hashable:
        """All options on which a trace depends; JAX traces once for all others."""
        return self._key_without(self.untraced)

    def _key_without(self, names: Collection[str]) -> Hashable:
        """Returns the class and the options except those with these names, in hashable form."""
        kept = [field.name for field in dataclasses.fields(self) if field.name not in names]
        return type(self), *(strict_key(getattr(self, name)) for name in kept)

    def spec_of(self, spec: Any) -> Any:
        """Returns the final, hashable form of a spec that the user wrote."""
        return spec

    def corrected(self, spec: Spec, on_indivisible: OnIndivisible | None) -> list[Any]:
        """Returns the specs that may take the place of a final spec which does not divide a shape.

        ``on_indivisible`` is the option of a ``StateSharding``, which overrides the transform's.
        """
        return []

    def input_specs(self, specs: list[Any], leaves: Arrays) -> list[Any]:
        """Returns the specs of all inputs, by slot; ``specs`` has None where the user gave none."""
        return specs

    def carried_objects(self, plan: Plan) -> frozenset[int]:
        """Returns the indices of objects that may be results even without graph updates."""
        return frozenset()

    def written_specs(self, plan: Plan, after: Flat) -> Mapping[int, Any]:
        """Returns specs other than declared for arrays that the function wrote, by slot.

        Slots are those of ``after``, the graph after the call.
        """
        return {}

    def sharding_of(self, spec: Spec) -> jax.sharding.Sharding | None:
        """Returns the sharding that a Variable with this final spec gets and keeps."""
        return None

    def retype_inputs(self, plan: Plan, leaves: Arrays, *, nested: bool) -> RetypedArrays:
        """Returns arrays with the types that they have while the function runs.

        Here, these are the types that JAX gives. A transform with shardings adds declared
        shardings, and may change the types of mesh axes (:class:`Sharded`).

        Args:
          plan: the plan of the call.
          leaves: the arrays, as JAX gives them to the trace.
          nested: whether the trace is part of another one.

        Returns:
          The arrays before and during the call, which can give its results their types outside.
        """
        return RetypedArrays.of(None, leaves)

    def tracing(
        self, plan: Plan, caller: Caller, unflattened: Unflattened, leaves: Arrays
    ) -> AbstractContextManager[Callable[..., Any]]:
        """Returns the context of the user's function in a trace; it yields the function to call.

        Here, that is the user's function itself. ``jit`` and ``shard_map`` also shard the
        activations of the modules that it calls.

        Args:
          plan: the plan of the call.
          caller: the call that is traced, with the user's function.
          unflattened: the objects of the arguments in the trace.
          leaves: the arrays of the arguments in the trace.
        """
        return nullcontext(caller.fun)

    def check_outputs(
        self, fun_name: str, names: Sequence[str], leaves: Arrays, specs: Sequence[Any]
    ) -> None:
        """Raises an error for arrays that cannot be outputs with these specs. Here, all can.

        ``names`` are the expressions for the arrays, such as ``output[0].kernel``.
        """

    def make_program(self, plan: Plan, function: Callable[..., Any]) -> Program:
        """Transforms the pure function of a plan by JAX. Nothing is traced or compiled yet.

        Args:
          plan: has a spec for each array that the function takes (``specs``), and for each group of
            arrays that it returns (``out_specs``).
          function: the pure function: takes all arrays, and returns the groups, then the outcome.

        Returns:
          The program of the plan; JAX traces and compiles it when it is first called.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded(Transform):
    """A transform whose specs are shardings, which have to fit a mesh."""

    # The mesh that JAX gets with each spec: the user's, or the concrete mesh in context. If the
    # user gives no mesh, it is None inside a trace, because the mesh in context is abstract there.
    mesh: Mesh | AbstractMesh | None = None
    # The mesh that applies, for checks: `mesh`, or the mesh in context, which may be abstract.
    context: Mesh | AbstractMesh | None = None  # type: ignore[misc]
    on_committed: OnCommitted = "error"
    on_indivisible: OnIndivisible = "error"  # what to do with specs that do not divide a shape
    strict: bool = False  # type: ignore[misc]
    activation_shardings: ActivationSharding | None = None  # for modules of all arguments
    # The Explicit axes that are Auto while the function runs; True for all of them.
    auto_axes: bool | tuple[Any, ...] = False

    # Whether JAX gets the shardings as an option, and not by the types of arrays.
    passes_shardings: ClassVar[bool] = True
    divides_outputs: ClassVar[bool] = True  # whether specs must divide the output arrays

    @property
    def usable_axes(self) -> frozenset[Any] | None:
        """The mesh axes that specs may name; None for all."""
        return None

    @property
    def _has_partition_spec(self) -> bool:
        """Whether the user gave a spec that needs a mesh."""
        return self.in_specs.has_partition_spec or self.out_specs.has_partition_spec

    @property
    def reads_context(self) -> bool:
        """Whether a plan depends on the mesh in context."""
        needs_mesh = self._has_partition_spec or self.activation_shardings is not None
        return self.mesh is None and needs_mesh

    @property
    def reads_shapes(self) -> bool:
        """Whether a plan depends on shapes and dtypes."""
        return super().reads_shapes or self.on_indivisible != "error"

    def in_context(self) -> Self:
        """Returns this transform with the mesh that applies now; raises if a spec has no mesh."""
        if not self.reads_context:  # the user gave a mesh, or nothing needs one
            return dataclasses.replace(self, context=self.mesh)
        mesh = _compat.context_mesh()
        if mesh is None and self._has_partition_spec:
            raise no_mesh(self.name)
        # The abstract mesh inside a trace is not put into specs, because JAX itself finds it for a
        # spec without a mesh, with the devices of the trace.
        concrete_mesh = mesh if isinstance(mesh, Mesh) else None
        return dataclasses.replace(self, mesh=concrete_mesh, context=mesh)

    def spec_of(self, spec: Spec) -> Any:
        """Returns the final form of a spec: a sharding on the mesh, if there is a mesh."""
        if isinstance(spec, PartitionSpec) and self.mesh is not None:
            return NamedSharding(self.mesh, spec)
        return spec

    def corrected(self, spec: Spec, on_indivisible: OnIndivisible | None) -> list[Any]:
        """Returns all parts of a spec that may be used if it does not divide a shape.

        For ``P(("data", "model"))`` and ``"drop"``, these are ``P("data")`` and ``P(None)``.
        """
        pair = spec_and_mesh(spec, self.context)  # None for a sharding without a spec
        if pair is None:
            return []
        partition_spec, _ = pair
        parts = possible_corrections(partition_spec, on_indivisible or self.on_indivisible)
        return [replace_spec(spec, part) for part in parts]

    def sharding_of(self, spec: Spec) -> jax.sharding.Sharding | None:
        """Returns the sharding that a Variable with this final spec gets and keeps."""
        if isinstance(spec, NamedSharding) and not isinstance(spec.mesh, Mesh):
            return None
        return spec if isinstance(spec, jax.sharding.Sharding) else None

    def retype_inputs(self, plan: Plan, leaves: Arrays, *, nested: bool) -> RetypedArrays:
        """Returns arrays with declared shardings in their types, and the function's axis types.

        Only arrays outside of objects get declared shardings here, because a call has placed the
        arrays of Variables as declared, so JAX types these right. JAX omits declared shardings from
        the types of uncommitted arrays, which are not bound to devices.

        Args:
          plan: the plan of the call.
          leaves: the arrays, as JAX gives them to the trace.
          nested: whether the trace is part of another one.
        """
        # 1. The sharding that the type of an array gets, by slot. Types have only Explicit axes.
        context_mesh = _compat.context_mesh()
        is_auto = self.context is not None and not axes_of_type(self.context, AxisType.Explicit)
        if is_auto and not nested:
            # The mesh of the call has Auto axes only. An array may come from another mesh with
            # Explicit axes, which would stay in its type.
            auto = NamedSharding(self.context, PartitionSpec())  # type: ignore[arg-type]
            targets = dict.fromkeys(plan.structure.root_slots, auto)
        elif context_mesh is not None and not axes_of_type(context_mesh, AxisType.Explicit):
            targets = {}  # under Auto axes, JAX computes with no types of Explicit axes
        else:
            targets = dict(plan.explicit_root_shardings)
        typed = [*leaves]
        for slot, target in targets.items():
            # In a nested trace, the outer function has given an array the mesh in its type.
            if not nested or type_mesh(leaves[slot]) is None:
                typed[slot] = type_as(leaves[slot], target)
        # 2. With ``auto_axes``, the function sees some or all Explicit axes of the mesh as Auto.
        mesh = mesh_of_types(typed, self.context) if self.auto_axes else None
        if mesh is None:
            return RetypedArrays.of(None, typed)
        options = {"name": self.name, "option": "auto_axes"}
        change = AxisTypeChange.of(mesh, self.auto_axes, AxisType.Auto, **options)
        return RetypedArrays.of(change, typed)

    def needing_devices(
        self, mesh: AbstractMesh, call: Callable[..., Any], *, from_arrays: bool
    ) -> Callable[..., Any]:
        """Wraps a program with an abstract mesh, to raise a clear error if no devices are known.

        Args:
          mesh: the abstract mesh of the program.
          call: the program.
          from_arrays: whether JAX takes the devices from arrays on a concrete mesh; if not, it
            takes them only from a mesh in context.
        """

        def checked(*leaves: object) -> Any:
            """Calls the program; raises a ``NoMeshError`` if no devices are known."""
            # The mesh of an array with data is concrete.
            have_devices = from_arrays and any(
                isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in leaves
            )
            if not have_devices and not isinstance(_compat.context_mesh(), Mesh):
                head = f"{self.name}: cannot run on an abstract mesh, which has no devices:"
                remedy = (
                    "Pass a jax.sharding.Mesh, or call within `with jax.set_mesh(mesh):`. Without "
                    "devices, use eval_shape or trace(...).lower(lowering_platforms=...)."
                )
                raise NoMeshError(message(head, [f"  {mesh}"], remedy))
            return call(*leaves)

        return checked
