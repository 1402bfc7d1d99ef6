"""Calls of modules during a trace: their names in the program, and a record of their outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding

from .. import _compat
from ..core.call_context import Caller, called_by
from ..core.flatten import Flat
from ..core.placing import abstract, is_committed
from ..core.plan import Plan
from ..specs.fitting import axes_of_type

ChosenBy: TypeAlias = Literal["user", "strategy", "types", "compiler"]


class Call(NamedTuple):
    """One array that a call of a module returned.

    Attributes:
      path: the module as an expression, such as ``model.blocks[0].up``.
      module: the name of its class.
      method: the method that was called.
      output: where the array is in the method's output; empty if it is all of the output.
      shape: its shape.
      dtype: its dtype.
      sharding: how it is sharded, by its type or by choice; None if neither determines it.
      chosen_by: what decided that.
    """

    path: str
    module: str
    method: str
    output: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding | None
    chosen_by: ChosenBy


class Calls(list[Call]):
    """The calls during one trace."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


# As part of the keys of JAX's caches it also makes JAX retrace what it has traced before.
RECORD = jax.make_user_context()
_FRAME: ContextVar[Frame | None] = ContextVar("frame", default=None)


class Frame:
    """One call of a module that has not returned yet."""

    __slots__ = ("_calls", "_constrained", "chosen_by", "is_by_strategy", "path")

    def __init__(self, path: str):
        self.path = path
        self.chosen_by: ChosenBy = "compiler"  # whose specs are for this call
        self._calls: Calls | None = RECORD.value
        self.is_by_strategy = False  # whether a strategy chose the types of the output
        self._constrained: list[tuple[Any, NamedSharding]] = []

    def constrained(self, x: Any, sharding: NamedSharding) -> None:
        """Records the sharding that was chosen for an array."""
        self._constrained.append((x, sharding))

    def sharding_of(self, x: Any) -> NamedSharding | None:
        """The sharding that was chosen for an array, or None."""
        return next((sharding for array, sharding in self._constrained if array is x), None)

    def returned(self, module: Any, method: str, out: Any) -> None:
        """Records what the call returns."""
        if self._calls is None:
            return
        leaves, _ = jax.tree_util.tree_flatten_with_path(out, is_leaf=_compat.is_graph_object)
        for keys, x in leaves:
            if isinstance(x, jax.Array):
                name, output = type(module).__name__, jax.tree_util.keystr(keys)
                call = Call(self.path, name, method, output, x.shape, x.dtype, *self._sharding(x))
                self._calls.append(call)

    def _sharding(self, x: jax.Array) -> tuple[NamedSharding | None, ChosenBy]:
        if (sharding := self.sharding_of(x)) is not None:
            return sharding, self.chosen_by
        of_type = jax.typeof(x).sharding
        if axes_of_type(of_type.mesh, AxisType.Explicit):
            return of_type, "strategy" if self.is_by_strategy else "types"
        return None, "compiler"


def frame_here() -> Frame | None:
    """The innermost call of a module that has not returned yet."""
    return _FRAME.get()


@contextlib.contextmanager
def in_call(path: str, method: str) -> Iterator[Frame]:
    """Adds the path of a module to the names of what is traced within the block.

    A call within another one adds only the rest of its path below that one's, or, without one,
    the name of the method.
    """
    outer = _FRAME.get()
    inside = path if outer is None else path.removeprefix(outer.path)
    name = (inside.lstrip(".") or method) if inside[:1] in ("", ".", "[") else path
    frame = Frame(path)
    token = _FRAME.set(frame)
    try:
        with jax.named_scope(name):
            yield frame
    finally:
        _FRAME.reset(token)


class Recorder:
    """Traces a function once more, to record the calls of modules in it. It holds no arrays.

    Args:
      fun: the function.
      plan: the plan for its arguments.
      flat: the arguments.
      leaves: the arrays to trace with.
    """

    def __init__(self, fun: Callable[..., Any], plan: Plan, flat: Flat, leaves: Sequence[Any]):
        self._fun, self._plan = fun, plan
        mesh = _compat.context_mesh()
        self._mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh
        static = {*flat.structure.static_indices()}
        self._objects = [x if i in static else None for i, x in enumerate(flat.objects)]
        # The structure holds them weakly.
        self._held = [one.value for one in flat.structure.identities()]
        self.leaves = [abstract(x, x.sharding if is_committed(x) else None) for x in leaves]

    @functools.cached_property
    def calls(self) -> Calls:
        """The calls, in the order in which they return."""
        calls, caller = Calls(), Caller(self._fun, self._objects)
        with jax.sharding.use_abstract_mesh(self._mesh), RECORD(calls), called_by(caller):
            self._plan.program.staged.trace(*self.leaves)
        return calls
