"""What is declared for the activations of one trace, and which declarations were used.

A *source* is one `ActivationSharding` of the user or of a strategy: filters for modules, each with
shardings for a method. The first source that has a filter for a call of a module decides. A strict
source has filters of the user, each of which has to match a call, because one that does not is
probably a mistake.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .._compat import cached_property
from ..errors import ActivationError, raise_if_any
from ..specs.activation_sharding import (
    ActivationSharding,
    InOutSharding,
    indices_for_other_methods,
)
from ..specs.filters import glob_hint
from ..specs.types import AxisName
from .calls import Frame
from .trace_keys import CONTEXT, TraceContext


class Declarations:
    """The sources of one trace.

    Attributes:
      sources: the user's source for the whole function, if there is one, then those of strategies.
        Equal sources are one.

    Its private attributes:

        _num_declared    the number of the user's sources: 1 or 0
        _batch_axes      the mesh axes that shard the rows of the data
        _other_methods   for a filter, by the numbers of its source and of the filter: the methods
                         that ran of modules that match it, but for which it declares nothing
    """

    def __init__(self, declared: ActivationSharding | None, batch_axes: frozenset[AxisName]):
        """Starts with the source that is declared for the whole function; None without one."""
        self.sources = [] if declared is None else [declared]
        self._num_declared = len(self.sources)
        self._batch_axes = batch_axes
        self._other_methods: dict[tuple[int, int], set[str]] = {}

    def add(self, source: ActivationSharding) -> None:
        """Adds the source of a strategy, which is declared for an argument."""
        if source not in self.sources:
            self.sources.append(source)

    @cached_property
    def context(self) -> TraceContext:
        """The key of this trace for JAX: one object for equal declarations. All sources are known.

        JAX uses the trace of an inner function again only for the same object, so inner functions
        with equal declarations share a trace. Another outermost trace has other objects, because
        filters that have matched in an earlier trace would seem to match nothing.
        """
        outer_context: TraceContext | None = CONTEXT.value
        # All contexts in one outermost trace share this dictionary.
        contexts = {} if outer_context is None else outer_context.within_outermost
        key = tuple(self.sources), self._batch_axes
        if key not in contexts:
            contexts[key] = TraceContext(self._batch_axes, contexts)
        return contexts[key]

    def choose(self, frame: Frame) -> None:
        """Chooses the shardings of the first source that has a filter for the call.

        Writes into ``frame`` what is declared, by whom, and whether specs that do not fit are an
        error. The user's source comes first, so it precedes strategies. The filters that match in
        all sources count as used, though only one decides, because none of them is a mistake.
        """
        is_chosen = False
        for source in frame.tag.sources:
            number = self.sources.index(source)
            call = frame.tag.path, frame.module, frame.method
            if source.strict:  # only these have to be used
                for other in indices_for_other_methods(source, *call):
                    self._other_methods.setdefault((number, other), set()).add(frame.method)
            # The first filter of the source that matches this path, class and method.
            index, sharding = source.find(*call)
            if sharding is None or index is None:  # None: no filter of this source matches
                continue
            self.context.used.add((number, index))
            if not is_chosen:
                is_chosen = True
                frame.declared, frame.is_strict = sharding, source.strict
                frame.chosen_by = "user" if number < self._num_declared else "strategy"

    def raise_if_unused(self, name: str) -> None:
        """Raises an error for filters that matched no call, if their source is strict.

        Args:
          name: the name of the transform, such as ``jit``.
        """
        unused, has_paths = [], False
        for number, source in enumerate(self.sources):
            for index, sharding in enumerate(source.shardings):
                if not source.strict or (number, index) in self.context.used:
                    continue
                methods = sorted(self._other_methods.get((number, index), ()))
                unused.append(_unused_line(source.filters[index], sharding, methods))
                # A path that matches modules is right, and only its method is not.
                has_paths |= isinstance(source.filters[index], str) and not methods
        explanation = ""
        if has_paths:
            explanation = (
                "Strings are regular expressions for the paths of modules within the argument, "
                "such as blocks/3/up. "
            )
        raise_if_any(
            ActivationError,
            f"{name}: these filters of activation_shardings match no called module:",
            unused,
            f"{explanation}Correct the filters, or pass ActivationSharding(..., strict=False).",
            anchor="unused-filter-for-activations",
        )


def _unused_line(filter_: object, sharding: InOutSharding, methods: Sequence[str]) -> str:
    """Returns a line about a filter that matched no call, with what to write if that is known.

    Args:
      methods: the names of other methods that ran, of modules that match the filter.
    """
    text = filter_.__name__ if isinstance(filter_, type) else repr(filter_)
    method = "" if sharding.method == "__call__" else f", method {sharding.method!r}"
    if methods:  # modules match, so the filter is right, and the method is not
        right = dataclasses.replace(sharding, method=methods[0])
        ran = ", ".join(map(repr, methods))
        return f"  {text}{method}: its modules ran by {ran}: write {{{text}: {right!r}}}"
    hint = glob_hint(filter_) if isinstance(filter_, str) else ""
    return f"  {text}{method}{hint and '.' + hint}"
