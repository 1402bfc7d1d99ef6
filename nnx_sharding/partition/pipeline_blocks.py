"""Blocks of an ``nnx.List`` as the layers of a pipeline: their calls wait for the last one.

A model calls its blocks one after the other, but it is only known that it does so when it has::

    for block in self.blocks:
        x = block(x, mask)        # blocks 0 … n-2: nothing runs, x is a PendingOutput
    return self.head(x)           # the call of block n-1 has run all of them

So each call but the last returns a :class:`PendingOutput`. Only the next block may take this
object. Any other use raises an error that says how blocks have to be called. If blocks get and
return tuples, ``x, total = block((x, total))``, a pending output can be unpacked: it has as many
elements as the first block's input, and the next block may take all of them, in order. All blocks
get the same further arguments, or arrays that the same operations make anew for each block.
Variables that a block may write (all but parameters) hold a pending output until the last call.

*Further* arguments are all but x: a pair of the positional arguments, (mask, …), and the arguments
by name. A block is known by its *tag*: the name of the argument of the user's function that holds
it, and the path in this argument.

A block is flattened (``Flat``) into its arrays, the ``leaves``, its ``objects`` (modules and
Variables), and a ``structure`` that describes the rest.
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

    The block is not changed until then, except that `hide` puts pending outputs in its Variables.

    Attributes:
      block: the block.
      flat: the block as it was at the call, flattened, with its ``objects`` by index.
      hidden: the values of the Variables that are hidden, by the index of the Variable.
    """

    block: nnx.Module
    flat: Flat
    hidden: dict[int, Any]

    def hide(self, pending: PendingOutput) -> None:
        """Replaces the values of Variables that the block may write by a pending output.

        Reading such a Variable is then an error.
        """
        for index, variable in enumerate(self.flat.objects):
            # Parameters may be read at any time, because no block writes to them.
            if _compat.is_variable(variable) and not isinstance(variable, nnx.Param):
                self.hidden[index] = _compat.get_value(variable)
                _compat.set_value(variable, pending)

    def try_unhide(self) -> bool:
        """Puts the values back; returns whether the block is as it was at the call.

        If it is not, the caller raises an error, so a block with only some of its values put back
        is never used.
        """
        for index, value in self.hidden.items():
            variable = self.flat.objects[index]
            # The model has written to the Variable since the call, and `value` would undo that.
            if type(_compat.get_value(variable)) is not PendingOutput:
                return False
            _compat.set_value(variable, value)
        flat_now = flatten_layer(self.block)
        # If the structures are equal, there are as many arrays, so `strict` raises no error below.
        if flat_now.structure != self.flat.structure:
            return False
        return all(x is y for x, y in zip(flat_now.leaves, self.flat.leaves, strict=True))


class BlockCalls:
    """The calls of the blocks of one list, so far.

    Attributes:
      tag: the tag of the list.
      x: the first block's input.
      length: the number of blocks.

    ``_calls`` has the calls in order, and ``_further`` the further arguments of the first block.
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
          block: the block; `calls_before` has checked that it is the next one.
          further: the further arguments of the block.

        Returns:
          The pending output that the call returns to the model; None for the last block, after
          which all blocks run.

        Raises:
          ValueError: the further arguments differ from those of the first block.
        """
        # The further arguments have to be equal, because all blocks run as one loop, which gets
        # further arguments once. The difference is a text such as "gets another mask".
        difference = _difference(self._further, further)
        if difference:
            raise ValueError(_HOW_TO_CALL.format(tag.accessor, difference))
        call = _BlockCall(block, flatten_layer(block), hidden={})
        self._calls.append(call)
        num_calls = len(self)
        if num_calls == self.length:
            return None
        call.hide(PendingOutput(self, num_calls, problem=_NOT_WRITTEN))
        return PendingOutput(self, num_calls)

    def finish(self) -> nnx.List[Any]:
        """Returns the blocks with their values.

        Raises:
          ValueError: a block has changed since it was called.
        """
        for number, call in enumerate(self._calls):
            if not call.try_unhide():
                raise ValueError(_HOW_TO_CALL.format(f"{self.tag.accessor}[{number}]", _CHANGED))
        return nnx.List([call.block for call in self._calls])


class PendingOutput:
    """Stands for a value that a block returns or writes, before the last block is called.

    Any use but as the input of the next block raises an error. Its private attributes:

        _calls     the calls of the list that the block is in
        _number    the number of calls up to the one that returned this output, so it is the index
                   of the next block
        _problem   what the block does, for the error about a use, such as "may write this Variable"
        _element   the index of this element in the tuple that the block returns; None for the whole
    """

    def __init__(
        self, calls: BlockCalls, number: int, problem: str = "", element: int | None = None
    ):
        """Makes the output of a call.

        Args:
          calls: the calls of the list.
          number: the number of calls so far, including the call that returns this output.
          problem: the text of the error about a use of this output, which says what the block
            does; empty for the usual one.
          element: the index in the tuple that the block returns; None for all that it returns.
        """
        # All attributes have an underscore, so that `__getattr__` gets every public name that users
        # may read, and refuses it.
        self._calls, self._number = calls, number
        self._problem = problem or "returns what is not passed to the next one"
        self._element = element

    def __getattr__(self, name: str) -> Any:
        """Raises a ValueError that says how blocks have to be called."""
        block = f"{self._calls.tag.accessor}[{self._number - 1}]"
        raise ValueError(_HOW_TO_CALL.format(block, self._problem))

    def check_ran(self) -> None:
        """Raises a ValueError if this is the output of the latest call, and blocks are missing."""
        num_calls = len(self._calls)
        is_latest = self._number == num_calls
        if is_latest and num_calls < self._calls.length:
            self._refuse()

    def __len__(self) -> int:
        # Layers return as many values as they get, so this is as long as the first block's input.
        is_tuple = self._element is None and isinstance(self._calls.x, tuple)
        return len(self._calls.x) if is_tuple else self._refuse()

    def __iter__(self) -> Iterator[PendingOutput]:
        elements = range(len(self))
        return (PendingOutput(self._calls, self._number, self._problem, i) for i in elements)

    def _refuse(self, *_: object) -> Any:
        """Raises the ValueError of any use of this object."""
        return self.used  # no such attribute exists, so `__getattr__` raises the error


# Python looks for the methods of operators in the class, not by `__getattr__`.
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod matmul rmatmul pow "
    "rpow neg pos abs invert eq ne lt le gt ge getitem array float int"
)
for _name in _OPERATORS.split():
    setattr(PendingOutput, f"__{_name}__", PendingOutput._refuse)

# The error about a use of blocks: the expression for a block, and what the block does wrong.
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
    """Returns the calls so far, for the call of a block that is not the first one of its list.

    Args:
      tag: the tag of the block.
      list_path: the path of its list.
      number: the index of the block in the list: 1 for the second one.
      x: the block's input, which has to be the output of the block before.

    Raises:
      ValueError: x is anything else.
    """
    pending = x[0] if isinstance(x, tuple) and x else x  # any element knows the calls
    if type(pending) is PendingOutput:
        calls = pending._calls
        # Block 1 comes after one call, whose output is x. With another number, a block is left out
        # or called twice.
        is_latest_output = pending._number == len(calls)
        is_next = len(calls) == number
        # The list is compared, because a module may hold two lists, or one model be two arguments.
        is_same_list = calls.tag.name == tag.name and calls.tag.path == list_path
        if is_latest_output and is_next and is_same_list and _is_whole_output(x, pending):
            return calls
    raise ValueError(_HOW_TO_CALL.format(tag.accessor, "gets something else"))


def _is_whole_output(x: object, pending: PendingOutput) -> bool:
    """Whether a block gets all that the block before it returned.

    Args:
      x: the block's input. The input is whole if it is the output itself, or a tuple of all
        elements of the output, in order.
    """
    if not isinstance(x, tuple):
        return pending._element is None  # an element alone is not the whole output
    # The elements are [0, 1, …] if the output has been unpacked, and packed again.
    elements = []
    for part in x:
        is_element = type(part) is PendingOutput and part._calls is pending._calls
        elements.append(part._element if is_element else None)
    return elements == [*range(len(pending._calls.x))]


class FurtherLeaf(NamedTuple):
    """A module, array or other leaf in the further arguments of layers."""

    parameter: str  # the layer's parameter, ``mask``; ``argument 2`` if its name is not known
    accessor: str  # an expression for the leaf, such as ``mask['causal']``
    value: Any


def further_leaves(further: Further, names: Sequence[str] = ()) -> list[FurtherLeaf]:
    """Lists the leaves in the further arguments of a call.

    Args:
      further: the arguments: ``(args, kwargs)``, without x.
      names: the names of the parameters after x, for arguments that are passed by position.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(further, is_leaf=_compat.is_graph_object)
    named_leaves = []
    # The first key tells args from kwargs, and the second one tells which argument it is.
    for (_, argument, *keys), value in leaves:
        if isinstance(argument, jax.tree_util.DictKey):
            name = argument.key
        elif argument.idx < len(names):
            name = names[argument.idx]
        else:
            name = f"argument {argument.idx + 2}"  # counted from 1, and x is the first
        named_leaves.append(FurtherLeaf(name, accessor(name, tuple(map(path_key, keys))), value))
    return named_leaves


def _difference(further: Further, other: Further) -> str:
    """Returns a text that says how the further arguments of two calls differ.

    The text is empty if they are the same. Arrays are the same if they are one array, or if the
    same operations have made them from the same arrays, for example if each block gets a causal
    mask of its own. Other arguments are the same if they are equal.
    """
    treedef: Any = jax.tree.structure(further)
    if treedef != jax.tree.structure(other):
        return "gets other further arguments"
    for leaf, other_leaf in zip(further_leaves(further), further_leaves(other), strict=True):
        if not _are_same(leaf.value, other_leaf.value):
            name = leaf.accessor
            return f"gets another {name}, made by other operations or from other arrays"
    return ""


def _are_same(x: Any, y: Any) -> bool:
    """Whether two leaves of further arguments are the same, as `_difference` defines it."""
    if x is y or _compat.is_made_alike(x, y):
        return True
    # JAX arrays are not compared by value, because arrays of a trace have none.
    if type(x) is not type(y) or isinstance(x, jax.Array):
        return False
    return np.array_equal(x, y)
