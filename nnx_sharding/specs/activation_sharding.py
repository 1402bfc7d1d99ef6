"""``ActivationSharding``: how modules' inputs and outputs are sharded, chosen by filters.

While a function is traced, each call of a module asks the first *filter* that matches the module's
path for an ``InOutSharding``: the specs of the call's input and output. A strategy may also replace
the call, for example to run layers in the stages of a pipeline (``CallSchedule``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._compat import cached_property
from ..errors import shortened
from .filters import Predicate, filter_pairs, module_predicate
from .fitting import axes_of, show, suggested_spec
from .paths import Path
from .state_sharding import StateSharding
from .types import AxisName

if TYPE_CHECKING:
    from ..activations.calls import Tag


def is_activation_spec(x: object) -> bool:
    """Whether ``x`` is a spec of arrays or of the contents of a module; None changes nothing."""
    return x is None or isinstance(x, PartitionSpec | NamedSharding | StateSharding)


@dataclasses.dataclass(frozen=True)
class CallSchedule:
    """How a strategy runs calls of a module in another way, such as in the stages of a pipeline.

    For each call of a method of a module for which the schedule was declared, tracing calls the
    methods in the order in which they are defined here. Only ``wrap`` has no default. A schedule is
    hashable, and equal to any schedule that does the same, because it is part of keys of traces.

    Attributes:
      axis: the mesh axis that distributes the calls; in the module, no data is sharded over it.
    """

    axis: str

    @property
    def is_running(self) -> bool:
        """Whether the schedule is running a call, so that calls within it are left unchanged."""
        return False

    def redirect(
        self, tag: Tag, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tag, Any, Any]:
        """Returns the tag, the module and the arguments of the call that runs instead.

        The third item has both kinds of arguments. If the module is None, nothing runs yet, and the
        third item is what the call returns. By default, the module itself runs.
        """
        return tag, module, (args, kwargs)

    def wrap(
        self,
        module: Any,
        call: Callable[..., Any],
        mesh: Mesh,
        batch_axes: Iterable[Any],
        axes_of_rows: Callable[[jax.Array], Set[AxisName]],
        prefetch: bool,
    ) -> Callable[..., Any]:
        """Returns the function that runs instead of a module's method, with the same arguments.

        Args:
          module: the module.
          call: the bound method of the module.
          mesh: the mesh of the traced function, on which the schedule runs.
          batch_axes: the mesh axes that shard the first dimension of any array of the batch.
          axes_of_rows: returns, for one array such as an argument of the call, the mesh axes that
            are declared to shard its first dimension.
          prefetch: whether the parameters of layers are gathered one layer ahead.
        """
        raise NotImplementedError

    def module_path(self, path: Path) -> Path:
        """Returns the path of the module that runs as a whole, given that of one of its layers."""
        return path

    def report_unscheduled(self, module: str) -> None:
        """Reports that a module did not run by the schedule although its layers ran, if harmful."""

    def report_other_method(self, tag: Tag, method: str, args: tuple[Any, ...], out: Any) -> None:
        """Reports that a method other than ``__call__`` ran without the schedule, if harmful."""


@dataclasses.dataclass(frozen=True, repr=False)
class InOutSharding:
    """Shardings of the inputs and outputs of a method of a module.

    Args:
      output: a ``PartitionSpec``, a ``NamedSharding``, or a pytree prefix of these for a method
        that returns several arrays. For a module in the output, such as a cache, it is a
        ``StateSharding`` or an ``nnx.State``, which chooses specs by the paths in the module. None
        leaves the output unchanged.
      input: the same for the first argument.
      method: the name of the method.
      axis_types: the type that the mesh's Explicit axes have while the method runs.
        ``AxisType.Auto`` leaves the shardings in the method to the compiler. With
        ``AxisType.Explicit``, the method and the modules that hold the module run as they are
        written, for a method that uses ``out_sharding`` itself. By default, the axes are Auto if a
        strategy infers shardings, and in a layer with an ``output``.
      schedule: strategies such as ``pipeline`` call this instead of the method.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import ActivationSharding, InOutSharding
      >>> split = InOutSharding(P("data", "model"), input=P("data"))
      >>> ActivationSharding({"up$": split}).shardings == (split,)
      True
    """

    output: Any = None
    _: dataclasses.KW_ONLY
    input: Any = None
    method: str = "__call__"
    axis_types: AxisType | None = None
    schedule: CallSchedule | None = None
    # The leaves of ``output`` and ``input``: specs, StateShardings and None. The hash uses them.
    _leaves: tuple[Any, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Turns States of specs into filters; raises a ``TypeError`` for invalid arguments."""
        if self.axis_types not in (None, AxisType.Auto, AxisType.Explicit):
            raise TypeError(
                "InOutSharding: axis_types must be AxisType.Auto, AxisType.Explicit or None, got "
                f"{self.axis_types!r}."
            )
        if not isinstance(self.method, str):
            raise TypeError(f"InOutSharding: method must be a name, got {self.method!r}.")
        for name in ("output", "input"):  # `object.__setattr__`, because the class is frozen
            object.__setattr__(self, name, _with_states_as_filters(getattr(self, name)))
        # The leaves of both prefixes have to be specs, and so do the shardings in a StateSharding.
        # Any other leaf that JAX finds, such as a number, is wrong.
        leaves = jax.tree_util.tree_leaves((self.output, self.input), is_leaf=is_activation_spec)
        # The leaves are kept for the hash. When Python exits, a weak dictionary may need the hash
        # to delete an item, and JAX may be gone then, so the prefixes cannot be flattened again.
        object.__setattr__(self, "_leaves", tuple(leaves))
        specs_by_path = [leaf.shardings for leaf in leaves if isinstance(leaf, StateSharding)]
        specs = [leaf for leaf in leaves if not isinstance(leaf, StateSharding)]
        wrong = [x for x in itertools.chain(specs, *specs_by_path) if not is_activation_spec(x)]
        if wrong:
            got = ", ".join(shortened(f"{show(leaf)}{suggested_spec(leaf)}" for leaf in wrong))
            raise TypeError(
                "InOutSharding: expected partition specs, NamedShardings or StateShardings of "
                f"them, got {got}."
            )

    def __hash__(self) -> int:
        # The leaves are hashed, because a prefix may be a list or a dict, which have no hash.
        return hash((self._leaves, self.method, self.axis_types, self.schedule))

    def __repr__(self) -> str:
        given = []
        if self.output is not None:
            given.append(repr(self.output))
        if self.input is not None:
            given.append(f"input={self.input!r}")
        if self.method != "__call__":
            given.append(f"method={self.method!r}")
        if self.axis_types is not None:
            given.append(f"axis_types=AxisType.{self.axis_types.name}")
        if self.schedule is not None:
            given.append(f"schedule={self.schedule!r}")
        return f"InOutSharding({', '.join(given)})"


def _with_states_as_filters(specs: Any) -> Any:
    """Returns specs with a ``StateSharding`` instead of each ``nnx.State`` of specs.

    Both choose the specs of the contents of a module by paths. But to JAX, a State is a pytree with
    a spec for each path, and a StateSharding is a leaf. Other specs stay as they are.
    """

    def convert(x: object) -> object:
        return StateSharding(x) if isinstance(x, nnx.State) else x

    def is_leaf(x: object) -> bool:
        return is_activation_spec(x) or isinstance(x, nnx.State)

    return jax.tree_util.tree_map(convert, specs, is_leaf=is_leaf)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ActivationSharding:
    r"""Shardings of activations, by ordered filters for modules.

    This is the counterpart of :class:`~nnx_sharding.StateSharding` for the inputs and outputs of
    modules. It applies while a function is traced; neither the code of the model nor its objects
    change. The first filter that matches a module decides.

    Args:
      filters: a mapping from filters to specs, or an iterable of such pairs. A filter is a string,
        which is a regular expression that is searched in the path
        (:class:`~nnx_sharding.filters.PathRegex`), such as ``r"blocks/\d+/up$"``; a
        :class:`~nnx_sharding.filters.PathGlob`; a module class; or any other NNX filter, called
        with the path of a module and the module. Paths start at the argument of the function; for a
        module that the function makes, at the outermost module that it calls. The path of that
        module itself is empty: ``"^$"``. A spec is a ``PartitionSpec``, a ``NamedSharding``, a
        pytree prefix of them, None, or an :class:`InOutSharding`.
      gather: mesh axes over which the ``nnx.Param`` Variables of a module are gathered while
        it runs, as FSDP does; True for the axes over which the first dimension of the data is
        sharded. Variables of other types are used as they are sharded.
      kept: mesh axes over which parameters stay sharded, even if the data is sharded over them.
      infer: whether the modules that the function calls run with all Explicit axes Auto, so that
        the compiler chooses how arrays in them are sharded. Their outputs are sharded as declared.
        If nothing is declared, the leading dimensions of an output are sharded like those of the
        first input, and the last dimensions of a layer's output like the columns of its kernel.
      strict: whether a filter that matches no called module is an error.
      prefetch: how many layers ahead a :class:`~nnx_sharding.Stack` gathers parameters: 0 or 1.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> from nnx_sharding import ActivationSharding, InOutSharding
      >>> encoded = InOutSharding(P("data"), input=P("data", "model"), method="encode")
      >>> activations = ActivationSharding(
      ...     {r"blocks/\d+/up$": P("data", "model"), nnx.Conv: encoded}
      ... )
      >>> up = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> activations.find(("blocks", 3, "up"), up)[1].output == P("data", "model")
      True

    The plans of ``torch.distributed.tensor.parallel.parallelize_module`` are similar.
    """

    filters: tuple[Any, ...]  # the filters in the order in which they are tried
    shardings: tuple[InOutSharding, ...]  # one for each filter
    gather: bool | tuple[Any, ...]  # True for the axes of the data; () for no axes
    infer: bool
    strict: bool
    prefetch: int
    kept: tuple[Any, ...]  # () for no axes

    def __init__(
        self,
        filters: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        /,
        *,
        gather: AxisName | tuple[AxisName, ...] | bool | None = (),
        kept: AxisName | tuple[AxisName, ...] | None = (),
        infer: bool = False,
        strict: bool = True,
        prefetch: int = 0,
    ):
        """Reads the filters, and brings specs and axes into one form.

        Raises a ``TypeError`` or ``ValueError`` for invalid filters, specs or options.
        """
        pairs = filter_pairs("ActivationSharding", filters)
        shardings = [
            spec if isinstance(spec, InOutSharding) else InOutSharding(spec) for _, spec in pairs
        ]
        # Attributes are set through `__dict__`, because the class is frozen.
        self.__dict__.update(
            filters=tuple(filter_ for filter_, _ in pairs),
            shardings=tuple(shardings),
            gather=True if gather is True else axes_of(gather or None),
            kept=axes_of(kept or None),
            infer=infer,
            strict=strict,
            prefetch=checked_prefetch("ActivationSharding", prefetch),
        )
        _ = self._predicates  # raises a `TypeError` if one is not a filter

    @cached_property
    def _predicates(self) -> tuple[Predicate, ...]:
        """The predicate of each filter; raises a ``TypeError`` for what is no filter."""
        return tuple(map(module_predicate, self.filters))

    def extended(
        self,
        filters: Mapping[Any, Any] | None = None,
        *,
        gather: object = None,
        prefetch: int = 0,
        kept: tuple[Any, ...] = (),
    ) -> ActivationSharding:
        """Returns a copy with other options and more filters.

        Args:
          filters: more filters, which come last. With them, no filter has to match a module.
          gather: replaces ``gather``; None keeps it.
          prefetch: replaces ``prefetch``; 0 keeps it.
          kept: more axes for ``kept``.
        """
        pairs = list(zip(self.filters, self.shardings, strict=True))
        return ActivationSharding(
            [*pairs, *(filters or {}).items()],
            gather=self.gather if gather is None else gather,
            infer=self.infer,
            strict=self.strict and not filters,
            prefetch=prefetch or self.prefetch,
            kept=(*self.kept, *kept),
        )

    def find(
        self, path: Path, module: object, method: str = "__call__"
    ) -> tuple[int | None, InOutSharding | None]:
        """Returns the index and the shardings of the first filter that matches, or two Nones.

        Args:
          path: the keys from the argument of the function to the module.
          module: the module.
          method: the name of the method that is called; filters for other methods do not count.
        """
        for index, (predicate, sharding) in enumerate(self._pairs):
            if sharding.method == method and predicate(path, module):
                return index, sharding
        return None, None

    def find_schedule(self, path: Path, module: object, method: str) -> CallSchedule | None:
        """Returns the first schedule for a call, even if another filter decides on its shardings.

        The arguments are those of :meth:`find`. Returns None if the method runs as it is written.
        """
        for predicate, sharding in self._pairs:
            has_schedule = sharding.schedule is not None and sharding.method == method
            if has_schedule and predicate(path, module):
                return sharding.schedule
        return None

    def is_explicit(self, path: Path, module: object) -> bool:
        """Whether a module is declared to run with Explicit axes."""
        return any(
            sharding.axis_types is AxisType.Explicit and predicate(path, module)
            for predicate, sharding in self._pairs
        )

    @property
    def _pairs(self) -> Iterable[tuple[Predicate, InOutSharding]]:
        """The predicate and the shardings of each filter, in the order in which they are tried."""
        return zip(self._predicates, self.shardings, strict=True)

    def __repr__(self) -> str:
        pairs = zip(self.filters, self.shardings, strict=True)
        items = ", ".join(f"{filter_!r}: {x.output!r}" for filter_, x in pairs)
        prefetch = f", prefetch={self.prefetch}" if self.prefetch else ""
        options = f"gather={self.gather!r}, infer={self.infer!r}{prefetch}"
        return f"ActivationSharding({{{items}}}, {options})"


def indices_for_other_methods(
    source: ActivationSharding, path: Path, module: object, method: str
) -> Iterator[int]:
    """Yields the index of each filter that matches a module, but declares another method.

    The arguments are the declarations, and those of :meth:`ActivationSharding.find`.
    """
    for index, (predicate, sharding) in enumerate(source._pairs):
        if sharding.method != method and predicate(path, module):
            yield index


def checked_prefetch(name: str, prefetch: object) -> int:
    """Returns the option ``prefetch``; raises a ``ValueError`` if it is invalid."""
    if isinstance(prefetch, bool) or prefetch not in (0, 1):
        raise ValueError(f"{name}: prefetch must be 0 or 1 (layers), got {prefetch!r}.")
    return int(prefetch)


def activations(shardings: Any) -> ActivationSharding | None:
    """Returns the user's activation shardings, which may be a mapping from filters, or None."""
    if shardings is None or isinstance(shardings, ActivationSharding):
        return shardings
    return ActivationSharding(shardings)
