"""``ActivationSharding``: how modules' inputs and outputs are sharded, chosen by filters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .filters import PathGlob, Paths, is_opaque, to_predicate
from .fitting import axes_of, suggested_spec
from .paths import Path


def is_activation_spec(x: Any) -> bool:
    """Whether ``x`` is the spec of one array; None leaves the array unchanged."""
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


class Activation:
    """Shardings of the inputs and outputs of a module.

    Args:
      output: a ``PartitionSpec``, a ``NamedSharding``, or a pytree prefix of them for a module that
        returns several arrays. None leaves the output unchanged.
      input: likewise for the first argument.
      axis_types: the type that the mesh's Explicit axes have while the module runs:
        ``AxisType.Auto`` leaves the shardings in it to the compiler; with ``AxisType.Explicit`` it
        and the modules that hold it run as they are written, for a method that uses
        ``out_sharding`` itself. By default, they are Auto where a strategy infers shardings, and
        in a layer with an ``output``.

    Raises:
      TypeError: a leaf of the specs is not a spec, or ``axis_types`` is of another type.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import Activation, ActivationSharding
      >>> by_sequence = Activation(P("data", "model"), input=P("data", None))
      >>> activations = ActivationSharding({"blocks/*": by_sequence, "head": P("data")})
    """

    __slots__ = ("_key", "axis_types", "input", "output")

    def __init__(
        self, output: Any = None, *, input: Any = None, axis_types: AxisType | None = None
    ):
        self.output, self.input, self.axis_types = output, input, axis_types
        if axis_types not in (None, AxisType.Auto, AxisType.Explicit):
            raise TypeError(
                "Activation: axis_types must be AxisType.Auto, AxisType.Explicit or None, got "
                f"{axis_types!r}."
            )
        flat = [jax.tree_util.tree_flatten(x, is_leaf=is_activation_spec) for x in (output, input)]
        wrong = [leaf for leaves, _ in flat for leaf in leaves if not is_activation_spec(leaf)]
        if wrong:
            got = ", ".join(f"{x!r}{suggested_spec(x)}" for x in wrong)
            raise TypeError(f"Activation: expected partition specs or NamedShardings, got {got}.")
        self._key = (*((tuple(leaves), treedef) for leaves, treedef in flat), axis_types)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        given = [] if self.output is None else [repr(self.output)]
        given += [] if self.input is None else [f"input={self.input!r}"]
        given += [f"axis_types=AxisType.{self.axis_types.name}"] if self.axis_types else []
        return f"Activation({', '.join(given)})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"input": self.input, "axis_types": self.axis_types}
        return functools.partial(Activation, **options), (self.output,)


class ActivationSharding:
    """Shardings of activations, by ordered filters for modules.

    The counterpart of :class:`~nnx_sharding.StateSharding` for the inputs and outputs of modules.
    It applies while a function is traced; neither the code of the model nor its objects change. The
    first filter that matches a module decides.

    Args:
      filters: a mapping from filters to specs, or an iterable of such pairs. A filter is a string,
        which is a :class:`~nnx_sharding.filters.PathGlob` pattern such as ``"blocks/*/up"``; a
        module class; or any other NNX filter, called with the path of a module and the module. A
        string that ends with ``.method`` applies to that method instead of ``__call__``. Paths
        start at the argument of the function; for a module that the function makes, at the
        outermost module that it calls. The path of that module itself is ``""``, so ``".encode"``
        is its method ``encode``. A spec is a ``PartitionSpec``, a ``NamedSharding``, a pytree
        prefix of them, None, or an :class:`Activation`.
      gather: mesh axes over which the parameters of a module are gathered while it runs, as FSDP
        does; True for the axes over which the first dimension of the data is sharded.
      infer: whether the modules that the function calls run with all Explicit axes Auto, so that
        the compiler chooses how arrays in them are sharded. Their outputs are sharded as declared;
        otherwise like the leading dimensions of their first input, and those of a layer in a model
        like the columns of its kernel in the last ones.
      strict: whether a filter that matches no called module is an error.

    Raises:
      TypeError: a filter or a spec has a wrong type.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import ActivationSharding
      >>> activations = ActivationSharding({"blocks/*/up": P("data", "model"), nnx.Conv: P("data")})
      >>> up = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> activations.find(("blocks", 3, "up"), up)[1].output == P("data", "model")
      True

    The plans of ``torch.distributed.tensor.parallel.parallelize_module`` are similar.
    """

    __slots__ = ("_filters", "_tests", "activations", "gather", "infer", "strict")

    def __init__(
        self,
        filters: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        /,
        *,
        gather: Any = (),
        infer: bool = False,
        strict: bool = True,
    ):
        items = filters.items() if isinstance(filters, Mapping) else filters
        try:
            pairs = [(filter_, spec) for filter_, spec in items]
        except (TypeError, ValueError):
            raise TypeError(
                "ActivationSharding takes a mapping from filters to specs, or such pairs, not "
                f"{filters!r}."
            ) from None
        self._filters = tuple(filter_ for filter_, _ in pairs)
        self._tests = tuple(map(_test, self._filters))
        self.activations = tuple(
            spec if isinstance(spec, Activation) else Activation(spec) for _, spec in pairs
        )
        self.gather: bool | tuple[Any, ...] = gather is True or axes_of(gather or None)
        self.infer = infer
        self.strict = strict

    def extended(
        self, filters: Mapping[Any, Any] | None = None, *, gather: Any = None
    ) -> ActivationSharding:
        """A copy with more filters, which come last and need not match, or another ``gather``."""
        pairs = [*zip(self._filters, self.activations, strict=True), *(filters or {}).items()]
        return ActivationSharding(
            pairs,
            gather=self.gather if gather is None else gather,
            infer=self.infer,
            strict=self.strict and not filters,
        )

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters in the order in which they are tried."""
        return self._filters

    @property
    def methods(self) -> frozenset[str]:
        """The methods that the filters are for."""
        return frozenset(method for _, method in self._tests)

    @property
    def depends_on_values(self) -> bool:
        """Whether a filter is a user's predicate, which may look at shapes and dtypes."""
        return any(is_opaque(test) for test, _ in self._tests)

    def find(
        self, path: Path, module: Any, method: str = "__call__"
    ) -> tuple[int | None, Activation | None]:
        """The index of the first filter that matches a call, with its shardings, or Nones."""
        for index, (predicate, name) in enumerate(self._tests):
            if name == method and predicate(path, module):
                return index, self.activations[index]
        return None, None

    def is_explicit(self, path: Path, module: Any) -> bool:
        """Whether a module is declared to run with Explicit axes."""
        return any(
            activation.axis_types is AxisType.Explicit and predicate(path, module)
            for (predicate, _), activation in zip(self._tests, self.activations, strict=True)
        )

    def __repr__(self) -> str:
        pairs = zip(self._filters, self.activations, strict=True)
        inside = ", ".join(f"{filter_!r}: {x.output!r}" for filter_, x in pairs)
        return f"ActivationSharding({{{inside}}}, gather={self.gather!r}, infer={self.infer!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActivationSharding) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self._filters, self.activations, self.gather, self.infer, self.strict

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = tuple(zip(self._filters, self.activations, strict=True))
        make = functools.partial(
            ActivationSharding, gather=self.gather, infer=self.infer, strict=self.strict
        )
        return make, (pairs,)


def activations(shardings: Any) -> ActivationSharding | None:
    """Activation shardings from what a user may pass: these, a mapping, or None."""
    if shardings is None or isinstance(shardings, ActivationSharding):
        return shardings
    return ActivationSharding(shardings)


def _test(filter_: Any) -> tuple[Any, str]:
    """The predicate of a filter, and the method that it is for."""
    if not isinstance(filter_, str):
        return to_predicate(filter_), "__call__"
    pattern, dot, method = filter_.rpartition(".")
    if not (dot and method.isidentifier()):
        pattern, method = filter_, "__call__"
    return PathGlob(pattern) if pattern else Paths([()]), method
