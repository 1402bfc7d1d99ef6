from collections.abc import Callable, Sequence
from typing import Any

from .walk import Pins, Recipe

class Walk:
    def __init__(self, recipe: Recipe) -> None: ...
    def follow(
        self, pins: Pins, arguments: tuple[Any, ...]
    ) -> tuple[Sequence[Any], Sequence[Any]] | None: ...

def set_up(
    open_tree: Callable[..., Any],
    open_static: Callable[..., Any],
    same_value: Callable[..., Any],
    value: Any,
    metadata: Any,
    trace_state: Any,
    initializing: Any,
    is_setup: Any,
    /,
) -> None: ...
