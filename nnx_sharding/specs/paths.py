"""Paths from the root of a model to its Variables and other parts, in the keys that NNX uses.

A path is a tuple of keys: the names of attributes, indices, and the keys of dicts. Filters see a
path as ``blocks/3/up/kernel``, and messages show it as ``model.blocks[3].up.kernel``.
"""

from __future__ import annotations

import functools
import re
from typing import Any, TypeAlias

import jax

Path: TypeAlias = tuple[Any, ...]

# Names of projections to heads, in Flax's layers and in published models.
QUERIES = re.compile("query|(to_|w)?q(_proj)?")
KEYS = re.compile("key|value|(to_|w)?[kv](_proj)?")  # projections to keys and to values

# Attributes of wrappers for the layer within them: those of Flax (`nnx.LoRA`, `nnx.LoRALinear`,
# `nnx.SpectralNorm`), of PEFT, and a usual one of users. They do not say what the layer is for, so
# its name is the key before them: `q_proj` for `q_proj/base_module/kernel`.
WRAPPERS = frozenset({"base_module", "lora", "layer_instance", "base_layer", "base"})


class Item(str):
    """A string that is a key of a dict in a path: equal to the string, but shown as ``['key']``."""

    __slots__ = ()


class Metadata(str):
    """A key of the metadata of a Variable in a path."""

    __slots__ = ()


def path_key(key: object) -> Any:
    """Returns a key of a JAX key path as NNX writes it: index, dict key, attribute name."""
    if isinstance(key, jax.tree_util.DictKey):
        return dict_key(key.key)
    # SequenceKey has an index in `idx`, FlattenedIndexKey one in `key`, and GetAttrKey a `name`.
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)  # the user may register a class with keys of another type


def dict_key(key: Any) -> Any:
    """Returns a key of a dict as it is in paths.

    A string becomes an `Item`, because messages would show ``.up`` for ``["up"]`` otherwise.
    """
    return Item(key) if type(key) is str else key


def plain_key(key: object) -> Any:
    """Returns a key of a path as a plain Python object."""
    return str(key) if isinstance(key, Item) else key


def path_string(path: Path) -> str:
    """Returns a path as a user writes it: ``blocks/3/up/kernel``."""
    return "/".join(map(str, path))


def accessor(name: str, path: Path) -> str:
    """Returns a path as Python code: ``model.blocks[3].up.kernel``."""
    return name + "".join(map(_accessed, path))


# Results are cached, because models have thousands of paths, with few different keys.
@functools.lru_cache(maxsize=4096, typed=True)
def _accessed(key: object) -> str:
    if type(key) is str and key.isidentifier():
        return f".{key}"
    return f", metadata {str(key)!r}" if type(key) is Metadata else f"[{plain_key(key)!r}]"


# The beginning of an attribute or a key in an expression such as ``model.blocks[0].up``.
_PART = re.compile(r"(?<!^)[.\[]")


def enclosing_paths(path: str) -> list[str]:
    """Returns the expressions for all objects that an array or module is in, outermost first."""
    return [path[: match.start()] for match in _PART.finditer(path)]
