"""``remat`` for functions that take and return NNX objects: recompute instead of keeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .. import _compat
from ..core.signature import Roles
from ..core.transform import Program
from ..fitting import suggestion
from ..lifted_function import lift
from .inner import Inner, InnerTransform


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Remat(InnerTransform):
    """What ``remat`` decides: what the backward pass finds kept."""

    name: str = "remat"
    in_name: str = "policy"
    policy: Callable[..., Any] | None
    prevent_cse: bool

    def compile(
        self,
        pure: Any,
        function: Callable[..., Any],
        in_specs: Sequence[Any],
        out_specs: Sequence[Any],
        donated: tuple[int, ...],
    ) -> Program:
        fun = jax.checkpoint(function, policy=self.policy, prevent_cse=self.prevent_cse)
        return self.program(fun)
