"""Blocks of an ``nnx.List`` as the layers of a pipeline: their calls wait for the last one.

A model calls its blocks one after the other, and nothing says so before it has::

    for block in self.blocks:
        x = block(x, mask)        # blocks 0 … n-2: nothing runs, x is a PendingOutput
    return self.head(x)           # the call of block n-1 has run all of them

So each call but the last returns a :class:`PendingOutput`, which only the next block may take, and
refuses all else with an error that says how blocks have to be called. Where blocks get and return
tuples, ``x, total = block((x, total))``, it can be unpacked: it has as many elements as what the
first block got, and the next block may take all of them, in order. All blocks get the same
further arguments, or arrays that the same operations make anew for each. Variables that a block may
write, all but parameters, are hidden in the same way until then.

*Further* arguments are all but x: a pair of the positional ones, (mask, …), and those by name. A
block is known by its *tag*: the name of the argument of the user's function that holds it, and the
path in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from .. import _compat
from ..activations.calls import Tag
from ..core.flatten import Flat
from ..specs.paths import Path, accessor, path_key
from ..transforms.stacked_layers import flatten_layer
from .staged_layers import Further


class _BlockCall(NamedTuple):
    """A call of a block that runs later.

    Attributes:
      block: the block.
      flat: the block as it was at the call, flattened, with its ``objects`` by index.
      hidden: the values of the Variables that are hidden, by the same index.
    """

    block: nnx.Module
    flat: Flat
    hidden: dict[int, Any]

    def hide(self, pending: PendingOutput) -> None:
        """Replaces the values of Variables that the block may write by what refuses to be read."""
        for index, variable in enumerate(self.flat.objects):
            # Parameters may be read at any time: no block writes to them.
            if _compat.is_variable(variable) and not isinstance(variable, nnx.Param):
                self.hidden[index] = _compat.get_value(variable)
                _compat.set_value(variable, pending)

    def unhide(self) -> bool:
        """Puts the values back; returns whether the block is as it was at the call.

        If not, the caller raises an error, so a block with some of its values is never used.
        """
        for index, value in self.hidden.items():
            variable = self.flat.objects[index]
            if type(_compat.get_value(variable)) is not PendingOutput:
                return False  # the model has written to it since, which `value` would undo
            _compat.set_value(variable, value)
        now = flatten_layer(self.block)
        if now.structure != self.flat.structure:  # with equal ones, there are as many arrays
            return False
        return all(x is y for x, y in zip(now.leaves, self.flat.leaves, strict=True))


class BlockCalls:
    """The calls of the blocks of one list, so far.

    Attributes:
      tag: the tag of the list.
      x: what the first block got.
      length: the number of blocks.

    ``_calls`` has the calls in order, and ``_further`` the further arguments of the first one.
    """

    def __init__(self, tag: Tag, length: int, x: Any, further: Further):
        """Starts without calls; ``further`` are the further arguments of the first block."""
        self.tag, self.x, self.length = tag, x, length
        self._further = further
        self._calls: list[_BlockCall] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, tag: Tag, block: nnx.Module, further: Further) -> PendingOutput | None:
        """Adds a call of the next block, and hides its Variables.

        Args:
          tag: the tag of the block, for errors.
          block: the block. That it is the next one, `calls_before` has checked.
          further: its further arguments.

        Returns:
          What the call returns to the model; None if it is the last one, which runs all.
        """
        # All blocks run as one loop, which gets further arguments once: those of the first block.
        problem = _difference(self._further, further)  # such as "gets another mask"
        if problem:
            raise ValueError(_HOW_TO_CALL.format(tag.accessor, problem))
        call = _BlockCall(block, flatten_layer(block), hidden={})
        self._calls.append(call)
        number = len(self)  # of calls so far
        if number == self.length:
            return None
        call.hide(PendingOutput(self, number, problem=_NOT_WRITTEN))
        return PendingOutput(self, number)

    def finish(self) -> nnx.List[Any]:
        """Returns the blocks with their values, unless one has changed since it was called."""
        for number, call in enumerate(self._calls):
            if not call.unhide():
                raise ValueError(_HOW_TO_CALL.format(f"{self.tag.accessor}[{number}]", _CHANGED))
        return nnx.List([call.block for call in self._calls])


class PendingOutput:
    """Stands for what a block returns or writes, before the last one is called."""

    def __init__(
        self, calls: BlockCalls, number: int, problem: str = "", element: int | None = None
    ):
        """Makes the output of a call.

        Args:
          calls: the calls of the list.
          number: the number of calls when it was made, the one that returns it included.
          problem: what the block does if this is used, for the error.
          element: which element of the tuple that the block returns; None for all it returns.
        """
        # Names with an underscore, as `__getattr__` refuses all that users may look for.
        self._calls, self._number = calls, number
        self._problem = problem or "returns what is not passed to the next one"
        self._element = element

    def __getattr__(self, name: str) -> Any:
        block = f"{self._calls.tag.accessor}[{self._number - 1}]"
        raise ValueError(_HOW_TO_CALL.format(block, self._problem))

    def check_ran(self) -> None:
        """Refuses calls of blocks, of which this is the last, without that of the last block."""
        if self._number == len(self._calls) < self._calls.length:
            self._refuse()

    def __len__(self) -> int:
        # Layers return what they get, so this is as long as what the first one got.
        is_tuple = self._element is None and isinstance(self._calls.x, tuple)
        return len(self._calls.x) if is_tuple else self._refuse()

    def __iter__(self) -> Iterator[PendingOutput]:
        elements = range(len(self))
        return (PendingOutput(self._calls, self._number, self._problem, i) for i in elements)

    def _refuse(self, *_: object) -> Any:
        return self.used  # there is no such attribute, so `__getattr__` raises the error


# Python looks for these in the class, not by `__getattr__`.
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod matmul rmatmul pow "
    "rpow neg pos abs invert eq ne lt le gt ge getitem array float int"
)
for _name in _OPERATORS.split():
    setattr(PendingOutput, f"__{_name}__", PendingOutput._refuse)

_HOW_TO_CALL = (
    "pipeline: {} {}. The blocks of an nnx.List run when its last one is called: each has to get "
    "what the one before returned, as it is, once, and equal further arguments, as in "
    "`for block in self.blocks: x = block(x, mask)`. What they return besides x goes through all, "
    "with a dimension for the rows: `x, loss = block((x, loss))`. Else use a Stack, "
    "self.blocks = stack(blocks)."
)
_NOT_WRITTEN = "may write this Variable, which is read before it has run"
_CHANGED = "has changed since it was called, before the last one is"


def calls_before(tag: Tag, list_path: Path, number: int, x: object) -> BlockCalls:
    """Finds the calls that the call of a block continues.

    That is not the first block of its list, which has none before it.

    Args:
      tag: the tag of the block.
      list_path: the path of its list.
      number: the index of the block in the list: 1 for the second one.
      x: what it gets, which has to be what the block before returned.

    Raises:
      ValueError: it gets anything else.
    """
    pending = x[0] if isinstance(x, tuple) and x else x  # any element knows the calls
    if type(pending) is PendingOutput:
        calls = pending._calls
        # Before block 1 there has been one call, which returned this. With another number, a block
        # is left out or called twice.
        is_of_last_call = pending._number == len(calls)
        is_next = len(calls) == number
        # A module may hold two lists, or one model be two arguments.
        is_same_list = calls.tag.name == tag.name and calls.tag.path == list_path
        if is_of_last_call and is_next and is_same_list and _is_whole_output(x, pending):
            return calls
    raise ValueError(_HOW_TO_CALL.format(tag.accessor, "gets something else"))


def _is_whole_output(x: object, pending: PendingOutput) -> bool:
    """Whether a block gets all that the block before it returned.

    Args:
      x: what it gets: that output as it is, or a tuple of all elements of it, in order.
      pending: the output, or an element of it.
    """
    if not isinstance(x, tuple):
        return pending._element is None  # an element alone is not all
    elements = []  # of the output: [0, 1, …] if it has been unpacked, and packed again
    for part in x:
        is_of_this = type(part) is PendingOutput and part._calls is pending._calls
        elements.append(part._element if is_of_this else None)
    return elements == [*range(len(pending._calls.x))]


class FurtherLeaf(NamedTuple):
    """A module, array or other leaf in the further arguments of layers."""

    parameter: str  # of the layer, such as ``mask``; ``argument 2`` if its name is not known
    accessor: str  # an expression for the leaf, such as ``mask['causal']``
    value: Any


def further_leaves(further: Further, names: Sequence[str] = ()) -> list[FurtherLeaf]:
    """Lists the leaves in the further arguments of a call.

    Args:
      further: the arguments: ``(args, kwargs)``, without x.
      names: the names of the parameters after x, for what is passed by position.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(further, is_leaf=_compat.is_graph_object)
    found = []
    # The first key tells args from kwargs, the second one which argument it is.
    for (_, argument, *keys), value in leaves:
        if isinstance(argument, jax.tree_util.DictKey):
            name = argument.key
        elif argument.idx < len(names):
            name = names[argument.idx]
        else:
            name = f"argument {argument.idx + 2}"  # counted from 1, and x is the first
        found.append(FurtherLeaf(name, accessor(name, tuple(map(path_key, keys))), value))
    return found


def _difference(further: Further, other: Further) -> str:
    """Says how the further arguments of two calls differ; empty if they are the same.

    Arrays are the same if they are one array, or if the same operations have made them from the
    same arrays, as where each block gets a causal mask of its own. Other arguments are the same if
    they are equal.
    """
    treedef: Any = jax.tree.structure(further)
    if treedef != jax.tree.structure(other):
        return "gets other further arguments"
    for leaf, other_leaf in zip(further_leaves(further), further_leaves(other), strict=True):
        x, y = leaf.value, other_leaf.value
        # The same object, or two arrays of a trace that equal operations have made.
        is_equal = x is y or _compat.is_made_alike(x, y)
        # Arrays of a trace have no values that could be compared; all else has.
        if not is_equal and type(x) is type(y) and not isinstance(x, jax.Array):
            is_equal = np.array_equal(x, y)
        if not is_equal:
            name = leaf.accessor
            return f"gets another {name}, made by other operations or from other arrays"
    return ""
