"""The base of ``grad``, ``vjp``, ``jvp`` and ``linearize``: differentiates at some arrays.

The pure function of a call takes all arrays of its arguments, of which each has a *slot* (its
position), and returns all arrays that the call returns or writes back, and an *outcome*, which says
what these are. What is differentiated is a part of both. So JAX differentiates a
function of the arrays in some slots that returns the arrays of the output, and everything else as
auxiliary data (:meth:`Differentiable.differentiate`): the call changes the caller's objects like
any other, and returns the derivative besides.

From other modules:

    Plan            its ``structure`` describes the arguments; a trace needs it before the arrays
    Container       a pytree in a structure: its ``treedef``, and a child for each leaf
    replace_slots   a copy of a list of leaves with others in some slots
    slots_by_path   the slots of the arrays in an object, by their paths from it
    type_as_in_jit  gives arrays the types that they would have as arguments of `jax.jit`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from ..core.call_context import Caller
from ..core.constrain import type_as_in_jit
from ..core.flatten import Flat
from ..core.functions import name_of
from ..core.plan import Plan
from ..core.structure import Container, Structure
from ..core.treedefs import is_leaf_treedef
from ..core.unflatten import Unflattened
from .in_trace import Function, Inner, InnerTransform, replace_slots, tree_text
from .lifted import P, R
from .tangents import slots_by_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differentiation(InnerTransform):
    """What these transforms decide."""

    returns_any: ClassVar[bool] = True  # auxiliary data

    in_name: str = "primals"
    has_aux: bool = False  # whether the function returns a pair of its output and auxiliary data
    is_reverse: bool = False  # whether derivatives go from outputs to inputs, as in `grad`

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns the user's function, with a check that its result can be differentiated."""

        def with_checked_output(*args: object, **kwargs: object) -> Any:
            out = caller.fun(*args, **kwargs)
            name = name_of(caller.fun)
            if self.has_aux:
                expected = f"with has_aux=True {name} must return a pair (output, aux)"
                check_pair(f"{self.name}: {expected}", out)
            # Here, and not on the flat arrays, so that the message can name what was returned.
            self.check_output(name, out[0] if self.has_aux else out)
            return out

        return with_checked_output

    def check_output(self, fun_name: str, out: object) -> None:
        """Raises an error for an output that cannot be differentiated; by default for none."""


def check_pair(expected: str, out: object) -> None:
    """Raises a ``TypeError`` for what is not a pair; ``expected`` begins its message."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"{expected}, got {tree_text(out)}.")


class Differentiable(Inner[P, R]):
    """A function that is called and differentiated at once."""

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
            function of these arrays, which returns a pair: the arrays of the output, which are
            differentiated; and all outputs of the pure function, which are auxiliary for JAX.
            Returns the derivative and these outputs.

        Returns:
          What the user's function returns, and the derivative.
        """
        pure_function = self._program(plan, flat).inline  # of all leaves, for use in a trace
        derivatives = list[Any]()  # one item, from the only call of `execute`

        def execute(*leaves: object) -> Any:
            """Is what `_run` runs as the program of the call: returns the program's outputs."""
            if self._transform.is_reverse:  # cotangents get the types of the arrays
                leaves = tuple(type_as_in_jit(leaves))

            def differentiable(arrays: Sequence[object]) -> tuple[list[Any], Any]:
                all_leaves = replace_slots(leaves, slots, arrays)
                # Groups of new arrays, and what says which array after the call each is.
                *groups, outcome = outputs = pure_function(*all_leaves)
                arrays_after = outcome.arrays(all_leaves, groups)  # by slot after the call
                output_slots = _output_slots(outcome.structure, has_aux=self._transform.has_aux)
                return [arrays_after[slot] for slot in output_slots], outputs

            derivative, outputs = derivative_of(differentiable, [leaves[slot] for slot in slots])
            derivatives.append(derivative)  # `_run` wants the outputs only
            return outputs

        returned = self._run(plan, flat, execute)
        return returned, derivatives[0]


def _output_slots(structure: Structure, *, has_aux: bool) -> Iterable[int]:
    """Returns the slots of the arrays in the output, without those of auxiliary data.

    Args:
      structure: of the objects after a call; its root is what the function returned.
      has_aux: whether that is a pair of the output and auxiliary data.
    """
    output: Any = structure.root
    if has_aux:
        # The children of the pair are the leaves of the output, then those of auxiliary data.
        treedef = output.treedef.children()[0]
        children = output.children[: treedef.num_leaves]
        output = children[0] if is_leaf_treedef(treedef) else Container(treedef, children)
    return (slot for slots in slots_by_path(structure, output).values() for slot in slots)
