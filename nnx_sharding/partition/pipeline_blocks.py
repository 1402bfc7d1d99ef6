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
    """A call of a block that runs later, and the block as it was at the call."""

    block: nnx.Module
    flat: Flat
    hidden: dict[int, Any]  # the values of Variables that are hidden, by index in ``flat``

    def hide(self, pending: PendingOutput) -> None:
        """Replaces the values of Variables that the block may write by what refuses to be read."""
        for index, variable in enumerate(self.flat.objects):
            # Parameters may be read at any time: no block writes to them.
            if _compat.is_variable(variable) and not isinstance(variable, nnx.Param):
                self.hidden[index] = _compat.get_value(variable)
                _compat.set_value(variable, pending)

    def unhide(self) -> bool:
        """Puts the values back; returns whether the block is as it was."""
        for index, value in self.hidden.items():
            # The model has written to the Variable in the meantime, which would be lost.
            if type(_compat.get_value(self.flat.objects[index])) is not PendingOutput:
                return False
            _compat.set_value(self.flat.objects[index], value)
        now = flatten_layer(self.block)
        pairs = zip(now.leaves, self.flat.leaves, strict=False)
        return now.structure == self.flat.structure and all(x is y for x, y in pairs)


class BlockCalls:
    """The calls of the blocks of one list, so far.

    Attributes:
      tag: the argument and the path of the list.
      x: what the first block got.
      length: the number of blocks.
    """

    def __init__(self, tag: Tag, length: int, x: Any, further: Further):
        self.tag, self.x, self.length = tag, x, length
        self._further = further
        self._calls: list[_BlockCall] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, tag: Tag, block: nnx.Module, further: Further) -> PendingOutput | None:
        """Adds a call of the next block, and hides its Variables.

        Returns:
          What the call returns to the model; None if it is the last one, which runs all.
        """
        # All blocks run as one loop, which gets them once.
        if problem := _difference(self._further, further):
            raise ValueError(_HOW_TO_CALL.format(tag.accessor, problem))
        call = _BlockCall(block, flatten_layer(block), {})
        self._calls.append(call)
        if len(self) == self.length:
            return None
        call.hide(PendingOutput(self, len(self), _NOT_WRITTEN))
        return PendingOutput(self, len(self))

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
        # Names with an underscore, as `__getattr__` refuses all that users may look for.
        self._calls, self._number = calls, number
        self._problem = problem or "returns what is not passed to the next one"
        self._element = element  # of the tuple that the block returns; None for all of it

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

    Args:
      tag: the argument and the path of the block.
      list_path: the path of its list.
      number: its index in that.
      x: what it gets, which has to be what the block before returned.
    """
    pending = x[0] if isinstance(x, tuple) and x else x
    if type(pending) is PendingOutput:
        calls = pending._calls
        # The output of the last call, so that no block is left out or called twice.
        is_next = pending._number == len(calls) == number
        is_list = (calls.tag.name, calls.tag.path) == (tag.name, list_path)
        if is_next and is_list and _is_whole(x, pending):
            return calls
    raise ValueError(_HOW_TO_CALL.format(tag.accessor, "gets something else"))


def _is_whole(x: object, pending: PendingOutput) -> bool:
    """Whether this is all that a block returns: as it is, or its elements in order."""
    if not isinstance(x, tuple):
        return pending._element is None
    numbers = [
        y._element if type(y) is PendingOutput and y._calls is pending._calls else None for y in x
    ]
    return numbers == [*range(len(pending._calls.x))]


class FurtherLeaf(NamedTuple):
    """A module, array or other leaf in the further arguments of layers."""

    parameter: str  # of the layer, as far as it has a name
    accessor: str
    value: Any


def further_leaves(further: Further, names: Sequence[str] = ()) -> list[FurtherLeaf]:
    """Lists the leaves in further arguments; ``names`` are the parameters of these positions."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(further, is_leaf=_compat.is_graph_object)
    found = []
    for (_, argument, *keys), value in leaves:
        if isinstance(argument, jax.tree_util.DictKey):
            name = argument.key
        else:
            name = f"argument {argument.idx + 2}"
            if argument.idx < len(names):
                name = names[argument.idx]
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
    for (_, name, x), (*_, y) in zip(further_leaves(further), further_leaves(other), strict=True):
        is_equal = x is y or _compat.is_made_alike(x, y)
        # Arrays of a trace have no values that could be compared.
        if not is_equal and type(x) is type(y) and not isinstance(x, jax.Array):
            is_equal = np.array_equal(x, y)
        if not is_equal:
            return f"gets another {name}, made by other operations or from other arrays"
    return ""
