"""``cond`` and ``switch`` for functions of NNX objects.

Each branch is the same *pure function* of all leaves of the operands (arrays, numbers, flags; a
*slot* is the position of one), traced with another function of the user in it. The pure function
returns arrays, in groups, and an *outcome*: what the call did to objects, and their *structure*
after it, a table of objects without arrays.

A branch returns the array in each slot after the call, changed or not, so all branches return the
same arrays. JAX makes no output of an array that no branch changes. The outcome of the call is the
union of the branches' outcomes (:func:`~.outcome.union`): an array that one branch changes is
written back, and is the old array if another branch ran.

All branches have to leave the same structure, because only the program knows which of them runs,
and the caller's objects can change in one way only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _compat
from ..activations.variables import reshard_like
from ..core.arguments import named_parts
from ..core.call_context import called_by, current_caller
from ..core.constrain import type_spec
from ..core.outcome import INPUT, Outcome, OutputGroup, union
from ..core.plan import Plan
from ..core.rebuild import slots_before
from ..errors import raise_if_any
from ..specs.fitting import spec_axes
from .carry_checks import resharding_remedy, structure_changes
from .functions import Functions, call_functions, scalar_value
from .in_trace import (
    Function,
    InnerTransform,
    StaticLeaves,
    compile_at_top_level,
    is_traced,
    may_keep,
    static_leaves,
    tree_text,
    with_static,
)


@_compat.api_boundary
def cond(
    pred: object,
    true_fun: Callable[..., object],
    false_fun: Callable[..., object],
    *operands: object,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls one of two functions, chosen by a condition while the program runs.

    Args:
      pred: the condition, a scalar: a bool, or a number that is true unless it is 0.
      true_fun: the function that is called if it is true; a function like a branch of
        :func:`switch`.
      false_fun: the function that is called if it is false.
      *operands: their arguments.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The result of the function.

    Raises:
      TypeError: ``pred`` is not a scalar, or the functions return arrays of different types.
      ValueError: the functions leave or return different structures.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import cond
      >>> model, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
      >>> cond(x.sum() > 5, model, lambda x: -x, x)
      Array([[-1., -1.]], dtype=float32)

    The semantics are those of ``jax.lax.cond`` and ``flax.nnx.cond``.
    """
    pred = scalar_value("cond", "pred", pred, "biuf", "a scalar, a bool or a number")
    branches = {"true_fun": true_fun, "false_fun": false_fun}
    return _call_branches("cond", pred, branches, operands, graph, graph_updates)


@_compat.api_boundary
def switch(
    index: object,
    branches: Sequence[Callable[..., object]],
    *operands: object,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Calls one of several functions, chosen by a number while the program runs.

    A branch may be a function, a bound method, or a callable module. Its changes to the operands,
    and to the object to which it is bound, are made to the caller's objects. Branches may change
    different Variables: all are outputs. They have to return the same structure, with arrays of the
    same types, and to leave the same structure in what they are given.

    Args:
      index: the number of the branch, an integer scalar. A number out of range counts as the
        nearest one.
      branches: the functions.
      *operands: their arguments. All leaves are traced except flags (``bool``).
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      The result of the branch.

    Raises:
      TypeError: ``index`` is not an integer scalar, or the branches return different types.
      ValueError: the branches leave or return different structures.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import switch
      >>> experts = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)]
      >>> switch(jnp.int32(1), experts, jnp.ones((1, 2))).shape
      (1, 2)

    The semantics are those of ``jax.lax.switch`` and ``flax.nnx.switch``.
    """
    if not isinstance(branches, Sequence):
        raise TypeError(f"switch: branches must be a sequence of functions, got {branches!r:.200}.")
    if not branches:
        raise ValueError("switch: branches is empty; it needs at least one function.")
    index = scalar_value("switch", "index", index, "iu", "an integer scalar")
    by_label = {f"branches[{number}]": branch for number, branch in enumerate(branches)}
    return _call_branches("switch", index, by_label, operands, graph, graph_updates)


def _call_branches(
    name: str,
    selector: object,
    branches: Mapping[str, Callable[..., object]],
    operands: tuple[object, ...],
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    """Calls ``cond`` or ``switch``, and returns what the chosen branch returns.

    The objects to which branches are bound, such as the model of a method, are an argument of all
    branches. So a model that two branches share is one object, and its updates are written back.

    Args:
      name: ``cond`` or ``switch``.
      selector: the condition, or the number of the branch.
      branches: the user's functions, by their labels in messages, such as ``branches[0]``.
      graph: the user's option, as for `cond`.
      graph_updates: the user's option, as for `cond`.
    """
    # In messages, the first two of `args` below are called "selector" and "branches". The operands
    # have the names of the first branch's parameters.
    functions = Functions(
        name, branches, leading=("selector", "branches"), num_operands=len(operands)
    )
    # The objects are an argument because branches may change them. Which objects a branch uses is a
    # setting of the transform, because another choice is another program.
    args = jnp.asarray(selector), functions.objects, *operands
    transform = _Switch(name=name, labels=(*branches,), bound=functions.bound)
    return call_functions(functions, transform, graph, graph_updates, *args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Switch(InnerTransform):
    """The options of ``cond`` and ``switch``: the labels of the branches, and their objects."""

    compiles_at_top_level: ClassVar[bool] = True

    in_name: str = "operands"
    labels: tuple[str, ...]  # the names of the branches in messages
    # Each item has the positions of one branch's objects in the second argument: ((0,), ()) if the
    # first of two branches is a method, and the second one a plain function.
    bound: tuple[tuple[int, ...], ...]

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        """Returns a function of all leaves that calls ``jax.lax.cond`` or ``jax.lax.switch``.

        The outputs are those of the branch that runs, in one group; see :class:`_Branches`.
        """

        # JAX finds the traces of branches by the identity of their functions, so the functions are
        # kept. For other types of the operands, or in another context (such as a mesh), JAX traces
        # the branches again, and they may do something else to objects. `_Branches` records what
        # they did, so there is one `_Branches` for each set of types and each context.
        @functools.lru_cache(maxsize=64)
        def kept_branches(static: StaticLeaves, types: Hashable, context: Hashable) -> _Branches:
            return _Branches(self, plan, function, static)

        def call(*leaves: object) -> Any:
            static = static_leaves(leaves)
            operands = [*filter(is_traced, leaves)]  # all leaves that are not static
            # A kept trace must hold neither the user's objects nor refs: it would keep them alive,
            # and it would be used for a later call with other refs.
            if may_keep(static) and not any(map(_compat.is_ref, operands)):
                types = tuple(map(jax.typeof, operands))
                branches = kept_branches(static, types, _compat.context_key())
            else:
                branches = _Branches(self, plan, function, static)
            # The first operand is the selector. The branches get it as well, because the pure
            # function has a slot for it, but no branch reads it.
            if self.name == "cond":
                results = jax.lax.cond(operands[0], *branches.functions, operands)
            else:
                results = jax.lax.switch(operands[0], branches.functions, operands)
            return branches.outputs(results)

        return compile_at_top_level(call)


class _Branches:
    """The branches for operands of some types, and what each does, as its last trace shows.

    JAX calls ``functions``, which fill the records when they are traced. After that, `outputs` can
    say what the call did. A kept ``_Branches`` serves later calls without a trace, by its records.

    Attributes:
      functions: the functions that JAX gets, one for each branch. Each takes the list of operands
        (the leaves that JAX traces), and returns the array in each slot after the branch.
      _name, _labels: the name of the transform, and of each branch, for messages.
      _plan, _function: the plan of the call, and its pure function, of all leaves.
      _static: the leaves that JAX does not trace, in pairs with their slots.
      _outcomes, _returned, _types: records of traces, by the number of the branch: what it did to
        objects, a text that describes what it returned, and the name and type of the array in each
        slot after it. Equal branches have one record, under the number of the first of them.
    """

    def __init__(self, transform: _Switch, plan: Plan, function: Function, static: StaticLeaves):
        """Makes a function for each branch; equal branches share one, which JAX traces once.

        Args:
          transform: the transform, with the names of the branches.
          plan: what is known before the trace: structure and names of the operands.
          static: the leaves that JAX does not trace, such as flags.
        """
        self._name, self._labels = transform.name, transform.labels
        self._plan = plan
        self._function = function
        self._static = static
        self._outcomes: dict[int, Outcome] = {}
        self._returned: dict[int, str] = {}
        self._types: dict[int, list[_NamedType]] = {}
        caller = current_caller()
        assert caller is not None  # branches are only made in a call
        # Equal branches are traced under the number of the first of them. An expert per branch is
        # often one method of several objects, so the object of a branch counts, too. The functions
        # keep their ids, because the caller holds them.
        keys = [*zip(map(id, caller.fun.functions), transform.bound, strict=True)]
        first_equal = [keys.index(key) for key in keys]  # [0, 0, 2]: the first two are equal
        traces = {number: functools.partial(self._trace, number) for number in first_equal}
        self.functions = [traces[number] for number in first_equal]

    def _trace(self, number: int, operands: Sequence[object]) -> list[Any]:
        """Traces one branch, as a function of the operands.

        Records what the branch does to objects. Raises an error if another branch does something
        else, because JAX would only see another number of results.

        Args:
          operands: the traced leaves of the arguments, in the order of their slots.

        Returns:
          The array in each slot after the branch; None for a leaf that JAX cannot pass on.

        Raises:
          ValueError: another branch has left another structure.
          TypeError: another branch has left arrays of other types.
        """
        leaves = with_static(self._static, operands)  # all leaves by slot, for the pure function
        *groups, outcome = self._call_branch(number, leaves)
        self._outcomes[number] = outcome
        # Structures are compared first, because slots after branches only mean the same if the
        # structures are equal.
        self._check_structures(number)
        arrays_after = outcome.arrays(leaves, groups)  # by slot after the branch
        self._reshard_like_old(outcome, leaves, arrays_after)  # changes `arrays_after`
        # JAX cannot pass on refs, hijax values and flags from a branch. A hijax value can only be
        # an operand that the branch returns unchanged: the same Python object.
        hijax_values = {id(x) for x in operands if not _compat.is_plain_array(x)}
        results = []
        for x in arrays_after:
            can_pass_on = is_traced(x) and not _compat.is_ref(x) and id(x) not in hijax_values
            results.append(x if can_pass_on else None)
        self._types[number] = self._named_types(outcome, groups, results)
        self._check_types(number)  # raises unless all branches leave the same types
        return results

    def _named_types(
        self, outcome: Outcome, groups: Sequence[OutputGroup], results: Sequence[object]
    ) -> list[_NamedType]:
        """Returns the name and the type of the array in each slot after a branch.

        Args:
          groups: its outputs, with the names of these arrays.
          results: the array in each slot; None for a leaf that JAX cannot pass on.
        """
        named_types = []
        for (group, position), result in zip(outcome.sources, results, strict=True):
            # The source of an unchanged input is its slot in the arguments, and so is its name.
            name = self._plan.names[position] if group == INPUT else groups[group].names[position]
            if result is None:
                named_types.append(_NamedType(name, "none", "none", None))
                continue
            aval: Any = jax.typeof(result)
            text = aval.str_short(short_dtypes=False)
            # A value of a hijax type has no shape and no dtype, so its text stands for them.
            has_shape = hasattr(aval, "dtype") and hasattr(aval, "shape")
            unsharded = f"{aval.dtype}{aval.shape}" if has_shape else text
            named_types.append(_NamedType(name, text, unsharded, type_spec(result)))
        return named_types

    def _call_branch(self, number: int, leaves: Sequence[object]) -> Sequence[Any]:
        """Calls the pure function with one branch as the user's function.

        Returns:
          The result of the pure function: groups of outputs, and last the outcome.
        """
        caller = current_caller()
        assert caller is not None
        branch = caller.fun.bind(number)

        def recorded_branch(_selector: object, objects: object, *operands: object) -> Any:
            returned = branch(objects, *operands)  # the user's functions get no selector
            # The error shows this text if another branch returns something else.
            self._returned[number] = tree_text(returned)
            return returned

        with called_by(caller._replace(fun=recorded_branch)):
            return self._function(*leaves)  # type: ignore[no-any-return]

    def _reshard_like_old(
        self, outcome: Outcome, leaves: Sequence[object], results: list[object]
    ) -> None:
        """Reshards new arrays in objects like the arrays that they replace.

        On Explicit axes the sharding is a part of the type, and all branches have to return the
        same types, even if one branch replaces an array and another one leaves it.

        Args:
          results: the arrays after it, by slot; changed in place.
        """
        structure_before, structure_after = self._plan.structure, outcome.structure
        for index, slots in enumerate(structure_before.slots):
            if not slots:  # most of a model's objects are modules without arrays of their own
                continue
            # Each slot of the object after the branch is paired with the slot before the branch.
            # The object has the same index in both structures.
            for slot, old_slot in slots_before(structure_before, structure_after, index).items():
                old_array = leaves[old_slot]
                # A flag has no sharding, and a ref is changed in place, so neither is resharded.
                if is_traced(old_array) and not _compat.is_ref(old_array):
                    results[slot] = reshard_like(results[slot], old_array)

    def outputs(self, results: Sequence[object]) -> tuple[OutputGroup, Outcome]:
        """Returns what the pure function returns: a group of outputs, and what was done to objects.

        ``results`` are the arrays after the branch that ran, one for each slot. All branches leave
        the same structure, so they have the same slots.
        """
        # The union has the changes of all branches.
        outcome = union(self._plan.structure, [*self._outcomes.values()])
        # An array that no branch changes is no output, because the caller keeps it. The outputs are
        # in the order of their slots.
        arrays = []
        for array, source in zip(results, outcome.sources, strict=True):
            if source.group != INPUT:
                arrays.append(array)
        return OutputGroup.unnamed(arrays), outcome

    def _first_traced(self) -> int:
        """Returns the number of the branch with which other branches are compared.

        JAX traces all branches in order. Under ``jax.disable_jit`` it calls only one, so the first
        one that was traced need not have the number 0.
        """
        return next(iter(self._outcomes))

    def _check_structures(self, number: int) -> None:
        """Raises a ``ValueError`` if a branch leaves other objects than the first one.

        Both branches have been traced, so the structures after them are recorded.
        """
        first_number = self._first_traced()
        first_structure = self._outcomes[first_number].structure
        other_structure = self._outcomes[number].structure
        if first_structure == other_structure:
            return
        # Objects are compared if they have the same name, and so the same place, after both
        # branches. Names start at the arguments, such as `model.blocks[0]`, or at the output.
        starts = named_parts(self._plan.graph_arguments)
        # Each object that is there after a branch has a name, by index.
        names = first_structure.names([*starts, ("output", first_structure.root)])
        other_names = other_structure.names([*starts, ("output", other_structure.root)])
        same_names = {
            index: name for index, name in names.items() if other_names.get(index) == name
        }
        lines = []
        differences = [
            # The texts of what the two branches returned may be equal.
            ("output", self._returned[first_number], self._returned[number]),
            # The other differences are places in these objects, such as `model.scale`.
            *structure_changes(same_names, first_structure, other_structure),
        ]
        for place, text_in_first, text_in_other in differences:
            # If the texts of a place are equal, such as "a Linear", the line would say nothing.
            if text_in_first != text_in_other:
                label, other_label = self._labels[first_number], self._labels[number]
                lines.append(
                    f"  {place}: {text_in_first} in {label}, {text_in_other} in {other_label}"
                )
        raise_if_any(
            ValueError,
            f"{self._name}: the branches return different structures, or change the structure of "
            "their operands differently:",
            # Without lines, only objects without a common name differ, such as new ones.
            lines or ["  the objects that they make"],
            "Let each branch return the same structure, and set the same attributes; arrays may "
            "differ.",
            anchor="branches-that-differ",
        )

    def _check_types(self, number: int) -> None:
        """Raises a ``TypeError`` if arrays after a branch have other types than after the first."""
        first_number = self._first_traced()
        pairs = zip(self._types[first_number], self._types[number], strict=True)
        different = [(first, other) for first, other in pairs if first.text != other.text]
        lines = [
            f"  {first.name}: {first.text} in {self._labels[first_number]}, "
            f"{other.text} in {self._labels[number]}"
            for first, other in different
        ]
        remedy = "Cast or reshape them in the branches, so that all agree."
        specs = [array.spec for pair in different for array in pair if array.spec is not None]
        if specs and all(first.differs_in_spec(other) for first, other in different):
            # The spec with fewer axes is suggested, because it is that of unsharded columns.
            fewest = min(specs, key=lambda spec: len({*spec_axes(spec)}))
            remedy = resharding_remedy("in a branch", fewest)
        raise_if_any(
            TypeError,
            f"{self._name}: the branches return, or write to the operands, arrays of different "
            "types:",
            lines,
            remedy,
            anchor="branches-that-differ",
        )


class _NamedType(NamedTuple):
    """The type of an array after a branch.

    Attributes:
      name: the expression for the array.
      text: its type, such as ``float32[2@data,4]``; "none" for a leaf that JAX cannot pass on. A
        weak type has the same text as a strong one, because JAX promotes it.
      unsharded: a text for its shape and dtype alone.
      spec: the spec in its type; None if no axis is Explicit.
    """

    name: str
    text: str
    unsharded: str
    spec: PartitionSpec | None

    def differs_in_spec(self, other: _NamedType) -> bool:
        """Whether two types differ in their specs, and in neither shape nor dtype."""
        return self.unsharded == other.unsharded and self.spec != other.spec
