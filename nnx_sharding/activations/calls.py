"""The facts about calls of modules during a trace.

    Tag       for each module: its path from the user's argument, and what is declared for it
    Frame     for each call: what was chosen for its arrays; the calls around it are a stack,
              `FRAME`
    Calls     for a trace that is made for a report: one `ReturnedArray` for each output
    Recorder  makes such a trace, later, without the arrays of the call

`LEFT_AUTO_AXES` (``core/retyping.py``) lists the arrays that modules on Auto axes have returned to
a function on Explicit axes. When the function returns, the list knows for which of them the user
declares shardings, and tells everybody who has asked (``note_declared``).

From the core: `abstract` turns an array or its type into a ``jax.ShapeDtypeStruct``, with a
sharding if one is given. `is_committed` says whether an array has to stay on its devices.
`unflatten` makes the objects that a structure describes, with other arrays. `called_by` sets the
`Caller` whom a traced function asks for the user's function and for the objects of the call.

The paths are also the name scopes of operations. XLA keeps these, so the compiled program says for
each operation which module it belongs to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from .._compat import cached_property
from ..core.call_context import Caller, called_by
from ..core.declared import abstract, is_committed
from ..core.flatten import Flat
from ..core.plan import Plan
from ..core.retyping import LEFT_AUTO_AXES
from ..core.unflatten import unflatten
from ..errors import warnings_collected
from ..specs.activation_sharding import ActivationSharding, InOutSharding
from ..specs.fitting import axes_of_type, with_entries
from ..specs.paths import Path, accessor
from ..specs.types import AnyMesh, Arrays, AxisName

if TYPE_CHECKING:  # a trace needs nothing of `analysis`, which takes long to import
    from ..analysis.parameters import ChosenBy

Shape: TypeAlias = tuple[int, ...]


class ReturnedArray(NamedTuple):
    """An array that a call of a module returned. Reports make a row of it."""

    path: str  # the path of the module, such as ``model.blocks[0].up``
    module: str  # the name of its class
    method: str
    output: str  # the place of the array in the method's result
    aval: jax.ShapeDtypeStruct
    sharding: NamedSharding | None  # None if the compiler chooses
    chosen_by: ChosenBy
    is_part: bool = False  # whether this is the part on one device, in a `shard_map` over all axes


class Calls(list[ReturnedArray]):
    """The arrays that calls of modules returned during one trace."""

    # Records are compared by identity, because a context of JAX is a part of the keys of its
    # caches, and this list is filled meanwhile.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def note_result(self, index: int, sharding: NamedSharding) -> None:
        """Changes a row for an array that the function returns with a declared sharding.

        Until the function returns, the array has the type for operations outside of modules.
        """
        self[index] = self[index]._replace(sharding=sharding, chosen_by="user")


# The record of the current trace; None without one. A new record makes JAX trace again what it has
# traced before.
RECORD = jax.make_user_context()
# The innermost call of a module that has not returned yet.
FRAME: ContextVar[Frame | None] = ContextVar("FRAME", default=None)


# Made once, because that takes 10 µs, and each call of a module in a trace has one.
_NOTHING_DECLARED = InOutSharding()


class VariableSpecs(NamedTuple):
    """The specs of a Variable of a module, outside of loops over layers."""

    inside: PartitionSpec  # the spec while the module runs
    shape: Shape
    is_gathered: bool  # whether its value is replaced by a gathered one while the module runs
    outside: PartitionSpec  # the spec before and after that


class Tag(NamedTuple):
    """The facts about a module, which Flax passes on with the module."""

    name: str  # the argument of the user's function that holds it; without one, its root's class
    path: Path  # the path in that argument, or in the root
    sources: tuple[ActivationSharding, ...]  # the declarations for it, the user's first
    axes: frozenset[AxisName]  # the axes over which its own Variables are gathered while it runs
    specs: Mapping[Path, VariableSpecs]  # the specs of its own Variables
    mesh: AnyMesh | None  # the mesh of the trace; None if there is none
    is_in_argument: bool  # False: the user's function captures or makes the module

    @property
    def accessor(self) -> str:
        """The module as an expression, such as ``model.blocks[0].up``."""
        return accessor(self.name, self.path)

    def __hash__(self) -> int:
        return hash((self.name, self.path))  # without ``specs``, because mappings have no hash


class Frame:
    """One call of a module that has not returned yet.

    Attributes:
      tag: the tag of the module.
      module: the module.
      method: the name of the method.
      declared: the specs of input and output that are declared for this call; each may be None.
      chosen_by: who has declared these specs.
      is_strict: whether it is an error if the specs do not fit.
      is_by_strategy: whether a strategy chose the types of the output.
      is_outermost: whether no other module called this one.

    Its private attributes:

        _outer             the call of the module that called this one; None for an outermost call
        _calls             the record of the trace; None unless it is made for a report
        _chosen            arrays with the shardings that were chosen for them in this call
        _declared_within   arrays with the shardings that the user declares for them in calls inside
                           this one, because a module often returns what an inner one has returned
        _trace             the trace of JAX in which the call runs
    """

    def __init__(self, tag: Tag, module: object, method: str):
        """Starts the record of one call of a module; ``method`` is the name of the method."""
        self.tag, self.module, self.method = tag, module, method
        self.declared = _NOTHING_DECLARED
        self.chosen_by: ChosenBy = "compiler"
        self.is_strict = False
        self.is_by_strategy = False
        self._outer = FRAME.get()
        self.is_outermost = self._outer is None
        self._calls: Calls | None = RECORD.value
        # Pairs in lists are used, because tracers have no hash, and the id of a dead array is used
        # again.
        self._chosen: list[tuple[jax.Array, NamedSharding]] = []
        self._declared_within: list[tuple[jax.Array, NamedSharding]] = []
        self._trace = _compat.current_trace()

    def note_sharding(self, x: jax.Array, sharding: NamedSharding) -> None:
        """Records the sharding that was chosen for an array."""
        self._chosen.append((x, sharding))

    def sharding_of(self, x: jax.Array) -> NamedSharding | None:
        """Returns the sharding that was chosen for an array; None if none was chosen."""
        return next((sharding for array, sharding in self._chosen if array is x), None)

    def note_declared(self, x: jax.Array, sharding: NamedSharding) -> None:
        """Records an array of this call and the sharding that the user declares for it.

        The record is in the calls around this one. A model often returns what its head returns, so
        the declaration for the head holds for the model, which asks by :meth:`declared_within`.
        """
        outer_frame = self._outer
        while outer_frame is not None:
            # An outer call in another trace, for example around a scan, cannot return this array.
            # And JAX checks that nobody holds a tracer when its trace has ended
            # (``jax.checking_leaks``).
            if _compat.trace_of(x) is outer_frame._trace:
                outer_frame._declared_within.append((x, sharding))
            outer_frame = outer_frame._outer

    def declared_within(self, x: jax.Array) -> NamedSharding | None:
        """Returns what the user declares for an array in calls inside this one, or None."""
        return next((declared for y, declared in self._declared_within if y is x), None)

    def record(self, out: object) -> None:
        """Adds the arrays that the call returns to the record, if the trace is made for one.

        Each array becomes one `ReturnedArray`, named by its place in ``out``.
        """
        if self._calls is None:
            return
        leaves, _ = jax.tree_util.tree_flatten_with_path(out, is_leaf=_compat.is_graph_object)
        left_auto_axes = LEFT_AUTO_AXES.get()
        for keys, x in leaves:
            if not isinstance(x, jax.Array):
                continue
            sharding, chosen_by = self._final_sharding(x)
            axis_types = {*jax.typeof(x).sharding.mesh.axis_types}
            # A declared sharding of the function's result counts more than a strategy's choice. If
            # the function returns this array with one, `note_result` corrects this row then.
            if left_auto_axes is not None and chosen_by == "strategy":
                row_number = len(self._calls)
                correct_row = functools.partial(self._calls.note_result, row_number)
                left_auto_axes.note_declared(x, correct_row)
            self._calls.append(
                ReturnedArray(
                    path=self.tag.accessor,
                    module=type(self.module).__name__,
                    method=self.method,
                    output=jax.tree_util.keystr(keys),
                    aval=jax.ShapeDtypeStruct(x.shape, x.dtype),
                    sharding=sharding,
                    chosen_by=chosen_by,
                    is_part=axis_types == {AxisType.Manual},
                )
            )

    def _final_sharding(self, x: jax.Array) -> tuple[NamedSharding | None, ChosenBy]:
        """Returns how an output is sharded, and who decided so.

        The sharding is None on Auto axes, if nothing was chosen for this array. The second item is
        then ``"compiler"``.
        """
        if (sharding := self.sharding_of(x)) is not None:
            return sharding, self.chosen_by
        type_sharding = jax.typeof(x).sharding
        if axes_of_type(type_sharding.mesh, AxisType.Explicit):
            if AxisType.Auto in type_sharding.mesh.axis_types:
                # Over Auto axes, the compiler may shard dimensions that are whole in the type.
                entries = [
                    entry or PartitionSpec.UNCONSTRAINED for entry in type_sharding.spec.partitions
                ]
                type_sharding = type_sharding.update(spec=with_entries(type_sharding.spec, entries))
            return type_sharding, "strategy" if self.is_by_strategy else "types"
        return None, "compiler"


@contextlib.contextmanager
def in_call(frame: Frame) -> Iterator[Frame]:
    """Makes a call the innermost one, and adds its module's path to names in the program.

    Scopes are nested, so a module inside another one adds only the rest of its path.
    """
    outer_frame = FRAME.get()
    path = frame.tag.accessor
    rest_of_path = path if outer_frame is None else path.removeprefix(outer_frame.tag.accessor)
    if not rest_of_path:  # the module of the outer call calls another method of itself
        name = frame.method
    elif rest_of_path[0] in ".[":  # "model.up" and "model[0]" are within "model"
        name = rest_of_path.lstrip(".")
    else:  # no outer call, or a call of another module, such as "model_2"
        name = path
    token = FRAME.set(frame)
    try:
        with jax.named_scope(name):
            yield frame
    finally:
        FRAME.reset(token)


class Recorder:
    """Traces a function once more, to record the calls of modules in it. It holds no arrays.

    Its private attributes:

        _fun, _plan    the user's function, and the plan of the call
        _mesh          the mesh in context at the call; the trace may be made under another one
        _objects       the static objects of the arguments, by index; None for other objects
        _identities    objects to which the structure has only weak references, kept alive
        _types         the type of each array, and its sharding if it is committed
    """

    def __init__(self, fun: Callable[..., Any], plan: Plan, flat: Flat, leaves: Arrays):
        """Keeps what a later trace needs: types and static objects, but no arrays and no models.

        Args:
          fun: the user's function.
          plan: the plan of the call.
          flat: the arguments of the call.
          leaves: the arrays of the call, with the declared shardings.
        """
        self._fun, self._plan = fun, plan
        mesh = _compat.context_mesh()
        # Without a mesh in context, this is JAX's empty abstract mesh, which a trace can set, too.
        self._mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
        # A trace makes its own modules and Variables, and asks the caller only for static objects.
        static_indices = {*flat.structure.static_indices()}
        self._objects = [x if i in static_indices else None for i, x in enumerate(flat.objects)]
        self._identities = [static.value for static in flat.structure.identities()]
        self._types: list[tuple[Any, jax.sharding.Sharding | None]] = []
        for leaf in leaves:
            # JAX's own arrays have their type at hand, and making an abstract array takes longer.
            aval = leaf.aval if type(leaf) is _compat.ArrayImpl else abstract(leaf)
            self._types.append((aval, leaf.sharding if is_committed(leaf) else None))

    @cached_property
    def leaves(self) -> list[Any]:
        """The arrays of the call, as abstract ones."""
        return [abstract(aval, sharding) for aval, sharding in self._types]

    @cached_property
    def objects(self) -> list[Any]:
        """The objects of the call, with abstract arrays."""
        existing = {index: x for index, x in enumerate(self._objects) if x is not None}
        return unflatten(self._plan.structure, self.leaves, existing).objects

    @cached_property
    def calls(self) -> Calls:
        """The calls, in the order in which they return."""
        return self._recorded[0]

    @property
    def traced(self) -> Any:
        """The ``Traced`` stage of JAX, with the paths of modules in the names of all operations."""
        return self._recorded[1]

    @cached_property
    def _recorded(self) -> tuple[Calls, Any]:
        """The record of the calls, and the stage ``Traced`` of JAX, from one trace.

        JAX traces anew even if it has traced this function with these types, because `RECORD` is a
        part of the key of a trace, and this record is equal to itself only.
        """
        calls = Calls()
        # The traced function asks the caller for the user's function and the objects of the call.
        caller = Caller(self._fun, self._objects)
        with (
            jax.sharding.use_abstract_mesh(self._mesh),
            RECORD(calls),
            called_by(caller),
            warnings_collected(),  # dropped: the first trace has shown them to the user
        ):
            return calls, self._plan.program.staged.trace(*self.leaves)
