"""What most objects of a class have in common, while a guard is built."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ... import _compat
from ..static_equality import Static
from ..unflatten import picker


class Row:
    """The statics of the last object with certain names: most objects of a class share them."""

    def __init__(self, order: Sequence[int]):
        self.order = order  # positions in the entry of what an object holds, in its order
        self.others: Sequence[int] = range(len(order))  # all but those statics
        self.frozen: Sequence[int] = ()
        self.identities: Sequence[int] = ()
        self._pick = picker(())
        self._values: Sequence[Any] = ()
        self._children: Sequence[Any] = ()

    def matches(self, values: Sequence[Any], children: Sequence[Any]) -> bool:
        """Whether these are the same statics, with the same counterparts in the structure."""
        pairs = (self._pick(values), self._values), (self._pick(children), self._children)
        return bool(self._values) and all(all(map(operator.is_, *pair)) for pair in pairs)

    def remember(self, values: Sequence[Any], children: Sequence[Any]) -> None:
        """Stores the statics of an object that was compared."""
        statics = [
            i
            for i, (value, child) in enumerate(zip(values, children, strict=True))
            if type(child) is Static and not _compat.is_statuses(value)  # each object has its own
        ]
        self._pick = picker(statics)
        self._values, self._children = self._pick(values), self._pick(children)
        self.frozen = [i for i in statics if not children[i].by_identity]
        self.identities = [i for i in statics if children[i].by_identity]
        self.others = sorted({*range(len(values))}.difference(statics))
