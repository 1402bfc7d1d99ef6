"""Calls of modules during a trace: their names in the program, and a record of their outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from ..core.call_context import Caller, called_by
from ..core.declared import abstract, is_committed
from ..core.flatten import Flat
from ..core.plan import Plan
from ..specs.activation_sharding import ActivationSharding
from ..specs.fitting import axes_of_type
from ..specs.paths import Path, accessor

if TYPE_CHECKING:  # a trace needs nothing of `analysis`, which takes long to import
    from ..analysis.parameters import ChosenBy

Shape: TypeAlias = tuple[int, ...]


class ReturnedArray(NamedTuple):
    """An array that a call of a module returned, from which reports make a row."""

    path: str  # the module, such as ``model.blocks[0].up``
    module: str  # the name of its class
    method: str
    output: str  # where the array is in what the method returned
    aval: jax.ShapeDtypeStruct
    sharding: NamedSharding | None  # None if the compiler chooses
    chosen_by: ChosenBy


class Calls(list[ReturnedArray]):
    """What calls of modules returned during one trace."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


# As part of the keys of JAX's caches it also makes JAX retrace what it has traced before.
RECORD = jax.make_user_context()
# The innermost call of a module that has not returned yet.
FRAME: ContextVar[Frame | None] = ContextVar("FRAME", default=None)


class Tag(NamedTuple):
    """What is known about a module; Flax passes it on with the module."""

    name: str  # of its argument
    path: Path
    sources: tuple[ActivationSharding, ...]
    axes: frozenset[Any]  # over which its own Variables are gathered
    # The spec of each own Variable while the module runs, its shape outside of loops, whether it is
    # gathered, and its spec outside.
    specs: Mapping[Path, tuple[PartitionSpec, Shape, bool, PartitionSpec]]
    mesh: Any  # that of the trace

    @property
    def accessor(self) -> str:
        """The module as an expression, such as ``model.blocks[0].up``."""
        return accessor(self.name, self.path)

    def __hash__(self) -> int:
        return hash((self.name, self.path))


class Frame:
    """One call of a module that has not returned yet."""

    def __init__(self, tag: Tag, module: Any, method: str):
        self.tag, self.module, self.method = tag, module, method
        self.chosen_by: ChosenBy = "compiler"  # whose specs are for this call
        self.is_strict = False  # whether it is an error if they do not fit
        self.is_by_strategy = False  # whether a strategy chose the types of the output
        self.is_outermost = FRAME.get() is None
        self._calls: Calls | None = RECORD.value
        self._constrained: list[tuple[Any, NamedSharding]] = []

    def constrained(self, x: Any, sharding: NamedSharding) -> None:
        """Records the sharding that was chosen for an array."""
        self._constrained.append((x, sharding))

    def sharding_of(self, x: Any) -> NamedSharding | None:
        """The sharding that was chosen for an array, or None."""
        return next((sharding for array, sharding in self._constrained if array is x), None)

    def returned(self, out: Any) -> None:
        """Records what the call returns."""
        if self._calls is None:
            return
        path, name = self.tag.accessor, type(self.module).__name__
        leaves, _ = jax.tree_util.tree_flatten_with_path(out, is_leaf=_compat.is_graph_object)
        for keys, x in leaves:
            if isinstance(x, jax.Array):
                aval, output = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.tree_util.keystr(keys)
                where = path, name, self.method, output
                self._calls.append(ReturnedArray(*where, aval, *self._sharding(x)))

    def _sharding(self, x: jax.Array) -> tuple[NamedSharding | None, ChosenBy]:
        if (sharding := self.sharding_of(x)) is not None:
            return sharding, self.chosen_by
        of_type = jax.typeof(x).sharding
        if axes_of_type(of_type.mesh, AxisType.Explicit):
            return of_type, "strategy" if self.is_by_strategy else "types"
        return None, "compiler"


@contextlib.contextmanager
def in_call(frame: Frame) -> Iterator[Frame]:
    """Adds the path of a module, below that of the call around it, to names in the program."""
    outer, path = FRAME.get(), frame.tag.accessor
    inside = path if outer is None else path.removeprefix(outer.tag.accessor)
    name = (inside.lstrip(".") or frame.method) if inside[:1] in ("", ".", "[") else path
    token = FRAME.set(frame)
    try:
        with jax.named_scope(name):
            yield frame
    finally:
        FRAME.reset(token)


class Recorder:
    """Traces a function once more, to record the calls of modules in it. It holds no arrays."""

    def __init__(self, fun: Callable[..., Any], plan: Plan, flat: Flat, leaves: Sequence[Any]):
        self._fun, self._plan = fun, plan
        mesh = _compat.context_mesh()
        self._mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
        static = {*flat.structure.static_indices()}
        self._objects = [x if i in static else None for i, x in enumerate(flat.objects)]
        # The structure holds them weakly.
        self._held = [one.value for one in flat.structure.identities()]
        shardings = [x.sharding if is_committed(x) else None for x in leaves]
        types = [x.aval if type(x) is _compat.ArrayImpl else abstract(x) for x in leaves]
        self._types = [*zip(types, shardings, strict=True)]

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """The arrays of the call, as abstract ones."""
        return [abstract(own, sharding) for own, sharding in self._types]

    @functools.cached_property
    def calls(self) -> Calls:
        """The calls, in the order in which they return."""
        return self._recorded[0]

    @property
    def traced(self) -> Any:
        """The stage of JAX, with the paths of modules in the names of all operations."""
        return self._recorded[1]

    @functools.cached_property
    def _recorded(self) -> tuple[Calls, Any]:
        calls, caller = Calls(), Caller(self._fun, self._objects)
        with jax.sharding.use_abstract_mesh(self._mesh), RECORD(calls), called_by(caller):
            return calls, self._plan.program.staged.trace(*self.leaves)
