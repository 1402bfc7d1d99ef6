"""``remat`` for functions that take and return NNX objects: recomputes instead of storing.

JAX decides by a policy what is kept between the passes. A policy is a function of primitives, or
goes by names that `checkpoint_name` gives to arrays. A policy by modules is a policy by names:
while the function is traced, the outputs of each module that a filter matches get the name of the
filter's rule (:class:`_Rules`). A filter that is a string counts as both: as a regular expression
for paths of modules, and as a name that the user's code has given.

`jax.checkpoint` gets the pure function, of all *leaves* of the arguments: arrays, and flags, which
it does not trace. A *slot* is the position of a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

from .. import _compat
from .._compat import cached_property
from ..activations.intercept import current_handler, with_handler
from ..activations.trace_keys import KNOWN, Known
from ..core.call_context import Caller
from ..core.plan import Plan
from ..core.signature import Roles
from ..core.structure import NodeEntry
from ..core.unflatten import Unflattened
from ..errors import raise_if_any
from ..specs.filters import Predicate, filter_pairs, glob_hint, module_predicate
from ..specs.fitting import suggestion
from ..specs.paths import Path, path_string
from .in_trace import Function, Inner, InnerTransform, call_on_slots, is_traced
from .lifted import lift

# The treatment of the values that a filter chooses, between the forward and the backward pass.
Keep: TypeAlias = Literal["recompute", "save", "offload"]
Policy: TypeAlias = (
    "Callable[..., bool] | str | Mapping[Any, Keep] | Iterable[tuple[Any, Keep]] | None"
)
_KEEPS: tuple[Keep, ...] = get_args(Keep)


@dataclasses.dataclass(frozen=True)
class _Rules:
    """A policy by filters for modules, and by the names that ``checkpoint_name`` gives.

    Raises a ``ValueError`` or a ``TypeError`` for wrong rules when it is made. A trace calls
    `name_outputs` for each call of a module, which fills ``used`` and ``called``. After each call
    of the function, `check` raises an error for rules that have matched nothing so far.
    """

    rules: tuple[tuple[Any, Keep], ...]  # pairs of a filter and what happens to its matches
    # The numbers of the rules that have matched a module or a name.
    used: set[int] = dataclasses.field(default_factory=set, compare=False)
    # The paths of the modules that were called. The dict is an ordered set.
    called: dict[str, None] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        # The check is here and not in a trace, so that the error is at the user's line.
        wrong = [f"  {filter_!r}: {keep!r}" for filter_, keep in self.rules if keep not in _KEEPS]
        head = f"remat: expected one of {', '.join(map(repr, _KEEPS))} for each filter, got:"
        raise_if_any(ValueError, head, wrong)
        _ = self._predicates  # raises a `TypeError` if one is not a filter

    @cached_property
    def _predicates(self) -> list[Predicate]:
        """A function of path and module for each rule, in their order."""
        return [module_predicate(filter_) for filter_, _ in self.rules]

    def name_outputs(self, path: Path, module: object, out: object) -> Any:
        """Gives the outputs of a module the name of their rule, which JAX's policy knows.

        The rule is the first one whose filter matches the module. Without one, the outputs get no
        name. Records that the module was called, and that the rule is used.

        Args:
          path: the path of the module in its argument, such as ``("layers", 0)``.

        Returns:
          ``out`` with named arrays.
        """
        self.called[path_string(path)] = None
        predicates = enumerate(self._predicates)
        index = next((i for i, matches in predicates if matches(path, module)), None)
        if index is None:
            return out
        self.used.add(index)
        name = self._name(index)
        leaves, treedef = jax.tree.flatten(out)
        # A policy sees only arrays, so other outputs, such as modules, get no name.
        named = [checkpoint_name(x, name) if isinstance(x, jax.Array) else x for x in leaves]
        return jax.tree.unflatten(treedef, named)

    def _name(self, index: int) -> str:
        """Returns the name for the matches of a rule, such as ``save 'layers/0'``."""
        filter_, keep = self.rules[index]
        return f"{keep} {filter_!r}"

    def policy(self) -> Callable[..., bool]:
        """Returns the policy of JAX that saves or offloads the arrays with the names of the rules.

        It recomputes everything else, so a rule with ``"recompute"`` needs no entry. Such a rule is
        there to match before a more general rule.
        """
        saved, offloaded = list[str](), list[str]()
        for index, (filter_, keep) in enumerate(self.rules):
            names = [self._name(index)]  # `name_outputs` gives it to the outputs of modules
            if isinstance(filter_, str):  # the user may have given this name by `checkpoint_name`
                names.append(filter_)
            if keep == "save":
                saved += names
            elif keep == "offload":
                offloaded += names
        policies: Any = jax.checkpoint_policies
        if not offloaded:  # not all backends have a host memory, which the other policy needs
            return policies.save_only_these_names(*saved)  # type: ignore[no-any-return]
        return policies.save_and_offload_only_these_names(  # type: ignore[no-any-return]
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )

    def check(self, function: Function, leaves: Sequence[object]) -> None:
        """Raises a ``ValueError`` for filters that match no module and no name in the function.

        Args:
          function: the pure function. It was traced just now, so the rules that match modules have
            been recorded.
        """
        if len(self.used) == len(self.rules):
            return
        # Only a jaxpr shows the names that the user gave, so this traces once more. It gets here
        # only if there are such names, or if there will be an error.
        jaxpr = call_on_slots(jax.make_jaxpr, function, leaves)
        # ``name`` is the primitive of ``checkpoint_name``.
        named = (eqn for eqn in _compat.equations_in(jaxpr) if eqn.primitive.name == "name")
        names_given = {eqn.params["name"] for eqn in named}
        paths = [path for path in self.called if path]  # the module itself has the empty path
        lines = []
        for index, (filter_, _) in enumerate(self.rules):
            if filter_ in names_given:
                self.used.add(index)
            if index not in self.used:
                hint = suggestion(filter_, [*paths, *sorted(names_given)])  # a similar path or name
                # A glob such as "layers/*" is a valid regular expression with another meaning.
                hint += glob_hint(filter_) if isinstance(filter_, str) else ""
                lines.append(f"  {filter_!r}{hint}")
        head = "remat: these match no called module and no name from checkpoint_name:"
        raise_if_any(ValueError, head, lines, f"Modules: {', '.join(paths) or 'none'}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Remat(InnerTransform):
    """The options of ``remat``: which values are kept for the backward pass, and how."""

    # Negative positions of static arguments count from the end of a call, as in `jax.checkpoint`.
    counts_from_call: ClassVar[bool] = True

    name: str = "remat"
    in_name: str = "policy"
    policy: Callable[..., bool] | _Rules | None  # the policy; None to keep nothing
    prevent_cse: bool  # the option of ``jax.checkpoint``

    @property
    def traced_filters(self) -> Sequence[object]:
        """The filters of the policy, which are asked when a module is called."""
        if not isinstance(self.policy, _Rules):
            return ()
        return [filter_ for filter_, _ in self.policy.rules]

    def user_function(self, plan: Plan, caller: Caller, unflattened: Unflattened) -> Function:
        """Returns the user's function; with filters, one that names the outputs of modules.

        Returns:
          A function that calls the user's function with a handler for calls of modules.
        """
        if not isinstance(self.policy, _Rules):
            return super().user_function(plan, caller, unflattened)
        rules = self.policy
        outer_handler = current_handler()  # None if there is none
        known_modules = _modules_of(plan, unflattened)  # (path, module) by the id of the module

        def call_and_name(
            module: object, method: str, call: Function, args: tuple[Any, ...], kwargs: Any
        ) -> Any:
            # The outer handler, such as the one that shards activations, calls the method first.
            # Names are given to its result, because the next module gets that array.
            if outer_handler is None:
                out = call(*args, **kwargs)
            else:
                out = outer_handler(module, method, call, args, kwargs)
            if method != "__call__" or id(module) not in known_modules:
                return out
            path, _module = known_modules[id(module)]
            return rules.name_outputs(path, module, out)

        def call_with_names(*args: object, **kwargs: object) -> Any:
            # Transforms inside copy the modules. They find the paths of their copies by these
            # values, one `Known` for each `remat` around.
            token = KNOWN.set((*KNOWN.get(), known_modules))
            try:
                no_further_methods = ()  # rules are for `__call__` alone, which is intercepted
                return with_handler(call_and_name, no_further_methods, caller.fun, *args, **kwargs)
            finally:
                KNOWN.reset(token)

        return call_with_names

    def jax_transform(self, plan: Plan, function: Function) -> Function:
        """Returns a function of all leaves that runs the pure function under ``jax.checkpoint``."""
        rules = self.policy if isinstance(self.policy, _Rules) else None
        policy: Any = self.policy if rules is None else rules.policy()
        checkpoint = functools.partial(jax.checkpoint, policy=policy, prevent_cse=self.prevent_cse)
        # One object serves all calls, because JAX finds its traces by the object.
        checkpointed = checkpoint(function)

        def call(*leaves: object) -> Any:
            if all(map(is_traced, leaves)):
                out = checkpointed(*leaves)
            else:
                # Flags and other values that are not arrays are captured as they are in this call,
                # so this makes another function for JAX in each call.
                out = call_on_slots(checkpoint, function, leaves)
            if rules is not None:
                # The function is traced now, so it is known which filters have matched something.
                rules.check(function, leaves)
            return out

        return call


def _modules_of(plan: Plan, unflattened: Unflattened) -> Known:
    """Returns the modules in the arguments of a trace, by their ids, with their paths.

    Args:
      plan: has the parts of each argument: the modules in its pytree.
      unflattened: the objects of the trace, by index in the structure.
    """
    structure = plan.structure
    modules = {}
    for argument in plan.graph_arguments:
        for part in argument.parts:
            # Paths start at the part, because users write them so in filters. `paths_to_objects`
            # returns a list with one path for each object, by index: the shortest path, even if the
            # object is shared.
            start_path: Path = ()
            paths = structure.paths_to_objects([(start_path, part.child)])
            for index, [path] in paths.items():
                if isinstance(structure.entries[index], NodeEntry):
                    module = unflattened.objects[index]
                    # The module is kept with its path, so that no other object gets its id.
                    modules[id(module)] = (path, module)
    return Known(modules)


@_compat.api_boundary
def remat(
    f: Callable[..., object] | None = None,
    *,
    policy: Policy = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Recomputes the values of a function in the backward pass instead of keeping them until then.

    Args:
      f: the function; it may take and return NNX objects.
      policy: what is kept anyway: a name in ``jax.checkpoint_policies``, such as
        ``"dots_saveable"``; a policy of JAX; or a mapping (or pairs) from filters to one of

        - ``"recompute"``: not kept;
        - ``"save"``: kept on the device;
        - ``"offload"``: kept in host memory (``pinned_host``), if the backend has it.

        A filter is a string, a module class, or any other NNX filter, called with the path of a
        module and the module. A string is tried in two ways: as a regular expression that is
        searched in the path of a module in its argument
        (:class:`~nnx_sharding.filters.PathRegex`), and as a name from
        ``jax.ad_checkpoint.checkpoint_name``. The first filter that matches a called module applies
        to its outputs. Everything else is recomputed.
      prevent_cse: as in ``jax.checkpoint``; False within a loop, where it is not needed.
      static_argnums: positions of static arguments. Flags (``bool``), strings and None need not be
        declared: they are always static.
      static_argnames: the names of static arguments.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function with the same results.

    Raises:
      TypeError: ``policy`` has another type.
      ValueError: JAX has no policy of this name, or the value of a filter is not one of these
        three; at a call, a filter matches no called module and no name.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from nnx_sharding import grad, remat
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs))
      >>> @remat(policy={"layers/0": "save"})
      ... def loss(model, x):
      ...     return jnp.tanh(model(x)).sum()
      >>> sorted(grad(loss)(model, jnp.ones((2, 4)))["layers"])
      [0, 1]

    :func:`saved_residuals` lists what is kept. The semantics are those of ``jax.checkpoint`` and
    ``flax.nnx.remat``.
    """
    transform = _Remat(policy=_read_policy(policy), prevent_cse=prevent_cse)
    roles = Roles.of(static_argnums, static_argnames)

    def decorate(f: Callable[..., object]) -> Any:
        return lift(Inner, f, transform, graph, graph_updates, roles=roles)

    return decorate if f is None else decorate(f)


def _read_policy(policy: Policy) -> Callable[..., bool] | _Rules | None:
    """Reads and checks the option ``policy``.

    ``"dots_saveable"`` → the policy of JAX with this name; ``{"layers/0": "save"}`` → `_Rules`;
    a policy of JAX or None → itself.
    """
    if isinstance(policy, str):
        # The functions with these prefixes make policies from arguments, so they are left out.
        prefixes = ("_", "save_", "offload_")
        names = [x for x in dir(jax.checkpoint_policies) if not x.startswith(prefixes)]
        if policy not in names:
            raise ValueError(
                f"remat: jax.checkpoint_policies has no policy {policy!r}"
                f"{suggestion(policy, names)} (policies: {', '.join(names)})."
            )
        return getattr(jax.checkpoint_policies, policy)  # type: ignore[no-any-return]
    if isinstance(policy, Iterable):
        return _Rules(tuple(filter_pairs("remat: policy", policy)))
    if policy is not None and not callable(policy):
        raise TypeError(f"remat: policy must be a name, a callable or a mapping, got {policy!r}.")
    return policy
