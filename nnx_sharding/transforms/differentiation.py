"""The base of ``grad``, ``vjp``, ``jvp`` and ``linearize``: differentiates at some arrays.

The pure function of a call takes all arrays of its arguments, each in a *slot* (its position). It
returns all arrays that the call returns or writes back, and an *outcome*, which says what these
are. Only some arguments and some outputs are differentiated. So JAX differentiates a function of
the arrays in some slots that returns the arrays of the output, and everything else as auxiliary
data (:meth:`Differentiable.differentiate`). The call changes the caller's objects like any other,
and also returns the derivative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..core.call_context import Caller
from ..core.constrain import type_as_in_jit
from ..core.flatten import Flat
from ..core.functions import name_of
from ..core.plan import Plan
from ..core.structure import Container, Structure
from ..core.unflatten import Unflattened
from .in_trace import Function, Inner, InnerTransform, replace_slots, tree_text
from .lifted import P, R


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differentiation(InnerTransform):
    """The options of these transforms, and a check of the user's output."""

    returns_any: ClassVar[bool] = True  # auxiliary data may be anything

    in_name: str = "primals"
    has_aux: bool = False  # whether the function returns a pair of its output and auxiliary data
    is_reverse: bool = False  # whether derivatives go from outputs to inputs, as in `grad`

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns the user's function, with a check that its result can be differentiated.

        Args:
          plan: is not used here.
          caller: the call that is being traced, which has the user's function.
          unflattened: is not used here.
        """

        def with_checked_output(*args: object, **kwargs: object) -> Any:
            out = caller.fun(*args, **kwargs)
            name = name_of(caller.fun)
            if self.has_aux:
                expected = f"with has_aux=True {name} must return a pair (output, aux)"
                check_pair(f"{self.name}: {expected}", out)  # raises for another result
            # The check is here, and not on flat arrays, so that the message can name what was
            # returned. `grad` overrides `check_output`.
            self.check_output(name, out[0] if self.has_aux else out)
            return out

        return with_checked_output

    def check_output(self, fun_name: str, out: object) -> None:
        """Raises an error for an output that cannot be differentiated; by default, never.

        Args:
          fun_name: the name of the user's function, for messages.
          out: the function's result, without auxiliary data.
        """


def check_pair(expected: str, out: object) -> None:
    """Raises a ``TypeError`` unless a result is a pair; ``expected`` begins the message."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"{expected}, got {tree_text(out)}.")


class Differentiable(Inner[P, R]):
    """A function that is called and differentiated in one call.

    From `LiftedFunction` it has `_program`, which returns the program for what the user's function
    can reach now; its ``inline`` is here the pure function, because these transforms leave that to
    `differentiate`.
    """

    _transform: Differentiation

    def differentiate(
        self,
        plan: Plan,
        flat: Flat,
        slots: Sequence[int],
        derivative_of: Callable[[Function, list[object]], tuple[object, object]],
    ) -> tuple[Any, Any]:
        """Calls the function, and differentiates it at the arrays in some slots.

        Args:
          plan: the plan of the call, which has its pure function.
          flat: its arguments, flattened.
          slots: the positions of the arrays.
          derivative_of: applies JAX's transform, such as ``jax.vjp`` with ``has_aux=True``, to a
            function at these arrays, its arguments. The function returns a pair: the arrays of the
            output, which are differentiated; and all outputs of the pure function, which are
            auxiliary for JAX. ``derivative_of`` returns the derivative and these outputs.

        Returns:
          The result of the user's function, and the derivative.
        """
        pure_function = self._program(plan, flat).inline  # a function of all leaves

        def execute(*leaves: object) -> tuple[Any, Any]:
            """Runs the pure function of the call; returns its outputs, and the derivative."""
            # The gradient of an array is a sum over its uses, whose terms have the type of the
            # array. On Explicit axes JAX cannot add terms with and without a mesh in their types.
            # Tangents are not added up, and get their types from the user.
            if self._transform.is_reverse:
                leaves = tuple(type_as_in_jit(leaves))

            def differentiable(arrays: Sequence[object]) -> tuple[list[Any], Any]:
                all_leaves = replace_slots(leaves, slots, arrays)
                pure_outputs = pure_function(*all_leaves)
                *groups, outcome = pure_outputs
                # By slot after the call: a new array is in a group, any other one is a leaf.
                arrays_after = outcome.arrays(all_leaves, groups)
                output_slots = _output_slots(outcome.structure, has_aux=self._transform.has_aux)
                return [arrays_after[slot] for slot in output_slots], pure_outputs

            derivative, pure_outputs = derivative_of(
                differentiable, [leaves[slot] for slot in slots]
            )
            return pure_outputs, derivative

        return self._run_with_result(plan, flat, execute)


def _output_slots(structure: Structure, *, has_aux: bool) -> list[int]:
    """Returns the slots of the arrays in the output, without arrays of auxiliary data.

    Args:
      structure: the structure of the objects after a call; its root is the function's result.
      has_aux: whether the result is a pair of the output and auxiliary data.
    """
    output: Any = structure.root
    if has_aux:
        # The children of the pair are the leaves of the output, then the auxiliary leaves.
        output_treedef, _ = output.treedef.children()
        output = Container(output_treedef, output.children[: output_treedef.num_leaves])
    slots: list[int] = []
    # Arrays outside of objects take their slots from the iterator, which begins with the output's.
    for location in structure.walk(output, iter(structure.root_slots)):
        slots += location.slots
    return slots
