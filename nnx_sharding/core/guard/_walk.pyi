from collections.abc import Callable
from typing import Any

from .recipe import Match, Pins, Recipe

FIELDS: dict[str, tuple[str, ...]]

class Walk:
    def __init__(self, recipe: Recipe) -> None: ...
    def follower(self, pins: Pins) -> Callable[[tuple[Any, ...]], Any]: ...
    def match(self, pins: Pins, arguments: tuple[Any, ...]) -> Match | None: ...

def call(self: Any, *args: Any, **kwargs: Any) -> Any: ...
def set_up_calls(**hooks: Any) -> None: ...
def set_up(
    *,
    get_mapping: Callable[..., Any],
    open_tree: Callable[..., Any],
    open_static: Callable[..., Any],
    same_value: Callable[..., Any],
    **slots: Any,
) -> None: ...
