from collections.abc import Callable, Sequence
from typing import Any

from .recipe import Pins, Recipe

FIELDS: dict[str, tuple[str, ...]]

class Walk:
    def __init__(self, recipe: Recipe) -> None: ...
    def follow(
        self, pins: Pins, arguments: tuple[Any, ...]
    ) -> tuple[Sequence[Any], Sequence[Any]] | None: ...

def set_up(
    *,
    get_mapping: Callable[..., Any],
    open_tree: Callable[..., Any],
    open_static: Callable[..., Any],
    same_value: Callable[..., Any],
    **slots: Any,
) -> None: ...
