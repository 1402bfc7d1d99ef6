"""The stages between a function and its execution, in the names of the user's own arguments.

A :class:`Traced` holds the jaxpr for certain shapes and structures; lowering it gives a
:class:`Lowered` with the compiler's input (StableHLO); compiling that gives a
:class:`Compiled`, which can be inspected and called. They are those of ``jax.stages``, with
every pytree in the form of the user's arguments and result: ``(positional, keywords)`` for
inputs, without static arguments, and the function's own result for outputs. In both a module
is an ``nnx.State`` by path, and a bare Variable stands for its value. Variables that the
function left alone are no outputs of the program; where an output holds them, what is said of
them is what was said of the input.

What a backend cannot answer is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from . import _compat
from ._late import late
from .analysis.collectives import Collectives, collectives_of
from .analysis.cost import COMPILED, LOWERED, Cost, cost_of
from .analysis.hardware import Device
from .analysis.hlo import parse
from .analysis.loops import with_loops
from .analysis.memory import Memory, memory_of
from .analysis.parameters import ParameterTable, argument_row, mesh_of
from .analysis.roofline import Roofline, roofline_of
from .core.call import run
from .core.flatten import Flat
from .core.guard.store import Guards
from .core.outcome import Outcome
from .core.plan import Plan
from .core.signature import Call, Signature
from .core.statics import Static
from .core.structure import LEAF, Child, Container, Group, StaticEntry, Structure
from .core.unflatten import value_at
from .diagnostics.differences import arguments_of, differences
from .diagnostics.failures import explained
from .paths import plain_key

if TYPE_CHECKING:
    from .report.program import ProgramReport

Split = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Call, Flat]]


class Stage:
    """What all stages have in common: the JAX stage, and the shape of the user's arguments.

    Args:
      stage: the object of ``jax.stages``.
      plan: what it was made from.
      split: takes the arguments of a call apart.
      bound: the objects to which the function is bound: its first arguments.
      statics: the static arguments that it was made for.
    """

    def __init__(
        self,
        stage: Any,
        plan: Plan,
        split: Split,
        bound: tuple[Any, ...],
        statics: tuple[Any, ...],
    ):
        self._stage = stage
        self._plan = plan
        self._split = split
        self._bound = bound
        self._statics = statics
        self._guards = Guards()
        empty = [None] * stage.out_tree.num_leaves
        self._outcome: Outcome = jax.tree_util.tree_unflatten(stage.out_tree, empty)[-1]

    @property
    def args_info(self) -> Any:
        """For each argument array its aval and whether it is donated (``jax.stages.ArgInfo``)."""
        return self._inputs(self._stage.args_info)

    @property
    def in_tree(self) -> jax.tree_util.PyTreeDef:
        """The tree structure of ``(positional, keywords)``."""
        return jax.tree_util.tree_structure(self.args_info)

    @property
    def in_avals(self) -> Any:
        """The aval of each argument array."""
        return self._inputs(self._stage.in_avals)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Which leaves of ``in_tree`` are donated."""
        infos = jax.tree_util.tree_leaves(self.args_info)
        return tuple(i for i, info in enumerate(infos) if info.donated)

    @property
    def out_info(self) -> Any:
        """Shape, dtype and, where it is known, sharding of each array of the result."""
        inputs = list(map(_shape_of, _arguments(self._stage.args_info)))
        return self._outputs(self._stage.out_info, inputs)

    @property
    def out_tree(self) -> jax.tree_util.PyTreeDef:
        """The tree structure of the result."""
        return jax.tree_util.tree_structure(self._outputs(None, None))

    @property
    def updates_info(self) -> Any:
        """Shape and dtype of the arrays that the call writes back, in the form of the inputs.

        Only changed Variables are in it. Objects that the call adds are not.
        """
        outcome, groups = self._outcome, self._stage.out_info[:-1]
        changed = {*outcome.values, *outcome.metadata}
        found: dict[int, Any] = {}
        for index in changed:
            before = self._plan.structure.slots[index]
            after = outcome.structure.slots[index]
            for slot, new in zip(before, after, strict=False):
                group, position = outcome.sources[new]
                if group >= 0:
                    found[slot] = groups[group].arrays[position]
        values = [found.get(slot) for slot in range(self._plan.structure.num_leaves)]
        return _user_tree(self._plan.structure, values, keep=lambda slots: slots[0] in found)

    def _inputs(self, per_argument: Any) -> Any:
        return _user_tree(self._plan.structure, _arguments(per_argument))

    def _outputs(self, per_output: Any, per_argument: Sequence[Any] | None) -> Any:
        """What JAX says of its outputs, or a 0 for each, in the form of the result."""
        sources = self._outcome.sources
        if per_output is None or per_argument is None:
            return _user_tree(self._outcome.structure, [0] * len(sources))
        values = self._outcome.arrays(per_argument, per_output[:-1])
        return _user_tree(self._outcome.structure, values)

    def __getattr__(self, name: str) -> Any:
        # What else a release of JAX has on this stage speaks of flat arrays, and is given as it is.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"<nnx_sharding.stages.{type(self).__name__} of {self._plan.fun_name}>"


class Traced(Stage):
    """A function traced for certain argument types; ready to be lowered."""

    @property
    def jaxpr(self) -> Any:
        """The jaxpr over flat arrays; its arguments are in the order of ``arg_names``."""
        return self._stage.jaxpr

    @property
    def arg_names(self) -> tuple[str, ...]:
        """For each argument of the jaxpr what the user would write: ``model.up.kernel``."""
        return tuple(self._plan.names)

    @property
    def fun_name(self) -> str:
        """The name of the function."""
        return str(self._stage.fun_name)

    @property
    def out_avals(self) -> Any:
        """The aval of each array of the result."""
        return self._outputs(self._stage.out_avals, _arguments(self._stage.in_avals))

    @_compat.api_boundary
    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, **unknown: Any
    ) -> Lowered:
        """Lowers to the compiler's input.

        Args:
          lowering_platforms: platforms to lower for, such as ``("tpu",)``, if not the one at
            hand.
          **unknown: refused; ``jax.export.export`` asks for more than there is here.

        Raises:
          TypeError: there are other options.
        """
        if unknown:
            raise TypeError(
                f"the lower of {self._plan.fun_name} has no option {', '.join(sorted(unknown))}. "
                "If this comes from jax.export.export: it takes functions of arrays only; use "
                "nnx_sharding.export.export in the same way."
            )
        lower = self._stage.lower
        avals = _arguments(self._stage.in_avals)
        leaves = list(map(_shape_of, avals))
        platforms = lowering_platforms
        lowered = explained(self._plan, leaves, lambda *_: lower(lowering_platforms=platforms))
        return Lowered(lowered, self._plan, self._split, self._bound, self._statics)

    @_compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the jaxpr for these arguments, and updates modules in place."""
        return _call(self, args, kwargs)


class Lowered(Stage):
    """A function lowered to the compiler's input; ready to be compiled."""

    @_compat.api_boundary
    def compile(
        self,
        compiler_options: dict[str, Any] | None = None,
        *,
        device_assignment: Sequence[jax.Device] | None = None,
    ) -> Compiled:
        """Compiles for the devices at hand.

        Args:
          compiler_options: options for XLA.
          device_assignment: the devices to compile for, where the shardings name none.
        """
        options = {} if device_assignment is None else {"device_assignment": device_assignment}
        compiled = self._stage.compile(compiler_options, **options)
        return Compiled(compiled, self._plan, self._split, self._bound, self._statics, self._stage)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text.

        Args:
          dialect: ``"stablehlo"`` (the default) or ``"hlo"``.
          debug_info: include source locations and the names of arguments.
        """
        return str(self._stage.as_text(dialect, debug_info=debug_info))

    def compiler_ir(self, dialect: str | None = None) -> Any | None:
        """The program as the compiler's object; None where there is none."""
        return self._stage.compiler_ir(dialect)

    def cost_analysis(self) -> Any | None:
        """Estimates made before optimisation, as JAX gives them; None if unavailable."""
        return self._stage.cost_analysis()

    def cost(self) -> Cost | None:
        """What the program of all devices computes, before optimisation; None if unavailable."""
        return cost_of(self.cost_analysis(), LOWERED)


class Compiled(Stage):
    """A compiled function. Calling it updates modules in place, like the function itself."""

    def __init__(
        self,
        stage: Any,
        plan: Plan,
        split: Split,
        bound: tuple[Any, ...],
        statics: tuple[Any, ...],
        lowered: Any = None,
    ):
        super().__init__(stage, plan, split, bound, statics)
        self._lowered = lowered

    @_compat.api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program.

        Static arguments may be given, or left out as with ``jax.stages.Compiled``.

        Raises:
          TypeError: structure, static arguments or static attributes differ from those that
            were lowered; shapes or dtypes do.
        """
        return _call(self, args, kwargs)

    @staticmethod
    def call(compiled: Compiled, /, *args: Any, **kwargs: Any) -> Any:
        """The call as a function of the compiled object."""
        return compiled(*args, **kwargs)

    @property
    def input_shardings(self) -> Any:
        """The sharding of each argument array; None for one that the program does not use."""
        return self._inputs(self._stage.input_shardings)

    @property
    def output_shardings(self) -> Any:
        """The sharding of each array of the result."""
        stage = self._stage
        return self._outputs(stage.output_shardings, _arguments(stage.input_shardings))

    @property
    def input_formats(self) -> Any:
        """The ``Format`` (layout and sharding) of each argument array."""
        return self._inputs(self._stage.input_formats)

    @property
    def input_layouts(self) -> Any:
        """The older name of ``input_formats``."""
        return self.input_formats

    @property
    def output_formats(self) -> Any:
        """The ``Format`` of each array of the result."""
        stage = self._stage
        return self._outputs(stage.output_formats, _arguments(stage.input_formats))

    def as_text(self) -> str | None:
        """The optimised program as text."""
        text: str | None = self._stage.as_text()
        return text

    def cost_analysis(self) -> Any | None:
        """Estimates for the optimised program, as JAX gives them; None if unavailable."""
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any | None:
        """Memory that the program needs per device, as JAX gives it; None if unavailable."""
        return self._stage.memory_analysis()

    def cost(self, *, loops: bool = False) -> Cost | None:
        """What one device computes in a call, after optimisation; None if unavailable.

        Args:
          loops: XLA counts the body of a loop once; whether to count the matrix products and
            bytes in it as often as it runs, where that is known.
        """
        cost, text = cost_of(self.cost_analysis(), COMPILED), self.as_text() if loops else None
        return cost if cost is None or text is None else with_loops(cost, parse(text))

    def lowered_cost(self) -> Cost | None:
        """What all devices compute in a call, before optimisation; None if unavailable."""
        return None if self._lowered is None else cost_of(self._lowered.cost_analysis(), LOWERED)

    def memory(self) -> Memory | None:
        """The memory that the program takes on one device; None if unavailable."""
        used = (row for row in self.parameters() if row.used)
        return memory_of(self.memory_analysis(), {row.path: row.bytes_per_device for row in used})

    def collectives(self) -> Collectives | None:
        """What the devices exchange, with bytes and mesh axes; None if unavailable."""
        text = self.as_text()
        return None if text is None else collectives_of(text, mesh_of(self.shardings()))

    def roofline(self, device: Device | str) -> Roofline:
        """The least time that a call can take, the bodies of loops counted as often as they run.

        Args:
          device: the peak figures of the device, or its name, such as ``"TPU v5e"``; see
            :data:`nnx_sharding.analysis.DEVICES`.

        Raises:
          ValueError: there is no device of this name in the table.
          TypeError: it is neither a device nor a name.
        """
        bytes_sent = (self.collectives() or Collectives()).bytes_sent
        return roofline_of(self.cost(loops=True), bytes_sent, device)

    def report(
        self, name: str | None = None, *, device: Device | str | None = None
    ) -> ProgramReport:
        """All of this in one object, which can be printed, saved as JSON and compared.

        Args:
          name: the name in the report; None for that of the function.
          device: for the roofline; None for the device that it was compiled for if the table has
            that, and no roofline otherwise.

        Raises:
          ValueError: there is no device of this name in the table.
          TypeError: ``device`` is neither a device nor a name.
        """
        name = self._plan.fun_name if name is None else name
        report: ProgramReport = late("report.program", "describe")(self, name, device)
        return report

    def parameters(self) -> ParameterTable:
        """How each argument array is sharded, also those that the program does not use."""
        plan, rows = self._plan, ParameterTable()
        shardings = zip(_arguments(self._stage.input_shardings), plan.shardings, strict=True)
        infos = _arguments(self._stage.args_info)
        for path, info, (actual, declared) in zip(plan.names, infos, shardings, strict=True):
            # A hijax Variable is a list of the arrays in it.
            arrays = jax.tree_util.tree_leaves(info, is_leaf=lambda x: hasattr(x, "shape"))
            each = actual if isinstance(actual, list | tuple) else [actual] * len(arrays)
            rows += [
                argument_row(path, array, declared if used is None else used, used=used is not None)
                for array, used in zip(arrays, each, strict=True)
            ]
        return rows

    def shardings(self) -> list[Any]:
        """The shardings of all arrays that the program is given and returns."""
        inputs = [*_arguments(self._stage.input_shardings), *self._plan.shardings]
        try:
            return [*inputs, *jax.tree_util.tree_leaves(self._stage.output_shardings)]
        except ValueError:  # JAX counts references among the outputs, and then finds too many
            return inputs

    def runtime_executable(self) -> Any | None:
        """The runtime's own object; None if unavailable."""
        return self._stage.runtime_executable()


def _call(stage: Traced | Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plan = stage._plan
    if stage._statics:
        args, kwargs = _with_statics(
            plan.signature, stage._statics, args, kwargs, len(stage._bound)
        )
    args = (*stage._bound, *args)
    if not _compat.trace_is_clean():
        return run(plan, _split_as_planned(stage, args, kwargs)[1], stage._stage)
    found = stage._guards.find(args, kwargs)
    if found is None:
        call, flat = _split_as_planned(stage, args, kwargs)
        stage._guards.add(plan, call, flat, args, kwargs, is_new=True)
    else:
        _, flat = found
    return run(plan, flat, stage._stage)


def _split_as_planned(
    stage: Traced | Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, Flat]:
    plan = stage._plan
    call, flat = stage._split(args, kwargs)
    if (call.signature, flat.structure) != (plan.signature, plan.structure):
        changed = list(_changes(plan, call.signature, flat.structure))
        raise TypeError(
            f"{plan.fun_name} was {type(stage).__name__.lower()} for other arguments than it is "
            "called with now:\n  " + "\n  ".join(changed) + "\nLower it again for these."
        )
    return call, flat


def _with_statics(
    signature: Signature,
    values: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fills in static arguments that the caller left out."""
    rest = iter(values)
    statics = {i: next(rest) for i in sorted(signature.static)}
    keywords = {name: next(rest) for name in sorted(signature.static_keywords)}
    own = {i: value for i, value in statics.items() if i >= bound}
    if own and len(args) == len(signature.names) - bound - len(own):
        given = iter(args)
        count = len(signature.names)
        args = tuple(own[i] if i in own else next(given) for i in range(bound, count))
    return args, {**keywords, **kwargs}


def _changes(plan: Plan, signature: Signature, structure: Structure) -> Iterator[str]:
    """In what a call differs from what its stage was made for."""
    before = plan.signature
    if before != signature:
        yield f"arguments {arguments_of(before)} → {arguments_of(signature)}"
    yield from differences((before, plan.structure), (signature, structure))


def _shape_of(aval: Any) -> Any:
    """The shape and dtype of an aval; itself for a hijax Variable, which has none."""
    try:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    except AttributeError:
        return aval


def _arguments(per_argument: Any) -> list[Any]:
    """What JAX says of each flat argument, by slot."""
    return list(per_argument[0])


def _user_tree(
    structure: Structure, values: Sequence[Any], keep: Callable[[Any], bool] = lambda _: True
) -> Any:
    """Values by slot in the form of the structure's root, modules as States."""
    return _user_child(structure, structure.root, values, iter(structure.root_slots), keep)


def _is_static(structure: Structure, child: Child) -> bool:
    return isinstance(child, int) and isinstance(structure.entries[child], StaticEntry)


def _user_child(
    structure: Structure, child: Child, values: Sequence[Any], slots: Any, keep: Any
) -> Any:
    if child is LEAF:
        slot = next(slots)
        return values[slot] if keep((slot,)) else None
    if isinstance(child, Static | Group) or _is_static(structure, child):
        return None
    if isinstance(child, Container):
        parts = [_user_child(structure, c, values, slots, keep) for c in child.children]
        return jax.tree_util.tree_unflatten(child.treedef, parts)
    assert isinstance(child, int)
    flat: dict[Any, Any] = {}
    for place in structure.walk(child, slots):
        if keep(place.slots):
            flat[tuple(map(plain_key, place.path))] = value_at(structure, place, values)
    if () in flat:
        return flat[()]
    return nnx.from_flat_state(flat)
