"""What `Compiled.why` returns: what was asked about, the facts, and what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from .tables import Pictured, text


@dataclasses.dataclass(frozen=True)
class Reason(Pictured):
    """Why something is as it is: what ``Compiled.why`` returns. ``print`` shows it.

    Attributes:
      subject: what it is about, and how it is sharded or what it sends.
      facts: why, one sentence each.
      instead: what to write for another result; empty if nothing is known.
      rule: what shards an argument: the filter of a rule, the strategies that list its path with
        what they shard, such as ``column of tensor_parallel, fsdp over dimension 0``, or the option
        that has its spec. Empty for what is not declared, and for collectives.
    """

    subject: str
    facts: tuple[str, ...]
    instead: str = ""
    rule: str = ""

    def _pictures(self, width: int) -> Iterable[Any]:
        yield text(self.subject, "bold")
        yield from (text(f"  {fact}") for fact in self.facts)
        if self.instead:
            yield text(f"  instead: {self.instead}")
