"""The base of ``grad``, ``vjp``, ``jvp`` and ``linearize``: differentiates at some arrays.

The pure function of a call takes all arrays of its arguments, of which each has a *slot* (its
position), and returns all arrays that the call returns or writes back, and an *outcome*, which says
what these are. What is differentiated is a part of both. So JAX differentiates a
function of the arrays in some slots that returns the arrays of the output, and everything else as
auxiliary data (:meth:`Differentiable.differentiate`): the call changes the caller's objects like
any other, and returns the derivative besides.

From other modules:

    Plan            its ``structure`` describes the arguments; a trace needs it before the arrays
    replace_slots   a copy of a list of leaves with others in some slots
    slots_by_path   the slots of the arrays in an object, by their paths from it
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
    is_reverse: bool = False  # whether derivatives go from outputs to arrays

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Checks what the function returns."""

        def with_checked_output(*args: object, **kwargs: object) -> Any:
            out = caller.fun(*args, **kwargs)
            name = name_of(caller.fun)
            if self.has_aux:
                pair = f"with has_aux=True {name} must return a pair (output, aux)"
                check_pair(f"{self.name}: {pair}", out)
            # Here, and not on the flat arrays, so that the message can name what was returned.
            self.check_output(name, out[0] if self.has_aux else out)
            return out

        return with_checked_output

    def check_output(self, fun_name: str, out: object) -> None:
        """Raises an error for what cannot be differentiated."""


def check_pair(expected: str, out: object) -> None:
    """Raises an error for what is not a pair; ``expected`` is the beginning of its message."""
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
          derivative_of: JAX's transform, such as ``jax.vjp`` with ``has_aux=True``. It gets a
            function and these arrays. The function returns a pair: the arrays of the output,
            without those of the user's auxiliary data, which are differentiated; and everything
            that the call returns, which is auxiliary for JAX. It returns the derivative, and the
            latter.

        Returns:
          What the user's function returns, and the derivative.
        """
        # The pure function in its form for a call within a trace: it is traced as a part of that.
        inline = self._program(plan, flat).inline
        derivatives = list[Any]()

        def execute(*leaves: object) -> Any:
            """Is what `_run` runs as the program of the call: returns the program's outputs."""
            if self._transform.is_reverse:  # cotangents get the types of the arrays
                leaves = tuple(type_as_in_jit(leaves))

            def differentiable(arrays: Sequence[object]) -> tuple[list[Any], Any]:
                all_leaves = replace_slots(leaves, slots, arrays)
                # Groups of new arrays, and what says which array of the result each is.
                *groups, outcome = outputs = inline(*all_leaves)
                results = outcome.arrays(all_leaves, groups)  # by slot after the call
                output_slots = _output_slots(outcome.structure, has_aux=self._transform.has_aux)
                return [results[slot] for slot in output_slots], outputs

            derivative, outputs = derivative_of(differentiable, [leaves[slot] for slot in slots])
            derivatives.append(derivative)  # `_run` wants the outputs only
            return outputs

        returned = self._run(plan, flat, execute)
        return returned, derivatives[0]


def _output_slots(structure: Structure, *, has_aux: bool) -> Iterable[int]:
    """Returns the slots of the arrays in the output, without auxiliary data."""
    child: Any = structure.root
    if has_aux:
        # The root is a pair: its children are the leaves of the output, then of the auxiliary data.
        output = child.treedef.children()[0]
        children = child.children[: output.num_leaves]
        child = children[0] if is_leaf_treedef(output) else Container(output, children)
    return (slot for slots in slots_by_path(structure, child).values() for slot in slots)
