"""The key of a trace besides the arguments that JAX compares: tags, paths and declarations.

JAX uses the trace of an inner function again if its arguments have the same types, and if its
*contexts* (``jax.make_user_context``) are equal. JAX does not see modules among the arguments, so
facts about modules on which a trace depends are put into contexts:

    CONTEXT     what is declared for activations; one object for each outermost trace
    _TAGS       the tags of the modules in the arguments, and their paths within a ``remat``
    PREFETCHED  what the loop around the trace has gathered already

JAX hashes all contexts for each primitive. So no context grows with the model: each holds one
object that is equal to itself only.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager

import jax

from .. import _compat
from ..core.call_context import Caller
from ..core.flatten import Flat
from ..core.unflatten import Unflattened
from ..specs.paths import Path
from ..specs.types import AxisName, Objects


@dataclasses.dataclass(eq=False, repr=False)
class TraceContext:
    """The state that the calls of modules in one trace share. It is equal only to itself."""

    batch_axes: frozenset[AxisName]  # the axes over which the rows of the data are sharded
    # The contexts within one outermost trace, by their declarations: equal declarations share a
    # context, and so traces.
    within_outermost: dict[Hashable, TraceContext]
    # The filters that have matched, as pairs: the number of the source, and of the filter in it.
    used: set[tuple[int, int]] = dataclasses.field(default_factory=set)


# Another outermost trace has another context, and so does not use the traces of inner functions
# again: filters that have matched in these traces would seem to have no effect.
CONTEXT = jax.make_user_context()
# The Variables that a surrounding loop has gathered, by name and path of their module.
PREFETCHED = jax.make_user_context()


def current_batch_axes() -> frozenset[AxisName]:
    """Returns the axes that shard the rows of the data of the current trace, as far as known."""
    context = CONTEXT.value
    return frozenset() if context is None else context.batch_axes


class _Key:
    """Stands for a value in a context of JAX, which hashes contexts for each primitive."""

    __slots__ = ("__weakref__",)


_TAGS: Callable[[_Key], AbstractContextManager[None]] = jax.make_user_context()
# Equal values have one key as long as a context or a cache of JAX holds it.
_KEYS = weakref.WeakValueDictionary[Hashable, _Key]()


class Known(dict[int, tuple[Path, object]]):
    """The modules known to a surrounding ``remat`` with filters: (path, module) by the id.

    A path begins at the module that the function of the ``remat`` gets in an argument. The module
    is kept with its path, so that no other object gets its id. ``key`` stands for this object in
    keys of JAX's caches, because these outlive the trace, and this object would keep its modules
    alive.
    """

    def __init__(self, modules: Mapping[int, tuple[Path, object]]):
        super().__init__(modules)
        self.key = object()

    def path_of(self, module: object) -> Path | None:
        """Returns the path of a module; None for any other object."""
        path_and_module = self.get(id(module))
        return None if path_and_module is None else path_and_module[0]


# There is one `Known` for each ``remat`` with filters around the current trace.
KNOWN: contextvars.ContextVar[tuple[Known, ...]] = contextvars.ContextVar("KNOWN", default=())


def key_traces_by_tags(objects: Objects) -> AbstractContextManager[None]:
    """Returns a context in which JAX uses only traces of modules with the same tags and paths.

    A trace depends on the tags of modules, and on their paths within a ``remat`` with filters. JAX
    sees neither in the arguments of the function, so both are made a part of its trace key.

    Args:
      objects: the objects among the arguments of the function.
    """
    tags = tuple(_compat.tag_of(x) if _compat.is_node(x) else None for x in objects)
    # For each surrounding ``remat``: its key, then the path in it for each object, or None.
    paths = tuple((known.key, *map(known.path_of, objects)) for known in KNOWN.get())
    if not paths and not any(tags):
        return contextlib.nullcontext()
    # JAX compares contexts with those of earlier traces, so equal tags and paths need one object
    # while JAX holds it. `_KEYS` holds it weakly, so it is forgotten afterwards.
    key = _KEYS.get((tags, paths))
    if key is None:
        key = _KEYS[tags, paths] = _Key()
    return _TAGS(key)  # `jax.make_user_context` has made it, a context manager


def pass_tags(originals: Caller | Flat, copies: Unflattened | Flat) -> None:
    """Gives copies of modules, for example in an inner trace, the tags of the originals."""
    for old, new in zip(originals.objects, copies.objects, strict=True):
        if _compat.is_node(old) and (tag := _compat.tag_of(old)) is not None:
            _compat.tag_node(new, tag)


def pass_paths(caller: Caller, unflattened: Unflattened) -> None:
    """Makes the modules of an inner trace known by the paths that a surrounding ``remat`` knows."""
    for known in KNOWN.get():
        for old, new in zip(caller.objects, unflattened.objects, strict=True):
            path = known.path_of(old)
            if path is not None:
                known[id(new)] = path, new
