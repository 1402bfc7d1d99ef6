"""``remat`` for functions that take and return NNX objects: recomputes instead of storing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

from .. import _compat
from ..activations.intercept import handler_here, with_handler
from ..core.call_context import Caller
from ..core.pure import Pure
from ..core.signature import Roles
from ..core.structure import NodeEntry
from ..core.unflatten import Built
from ..errors import raise_listed
from ..specs.filters import PathGlob, Predicate, to_predicate
from ..specs.fitting import suggestion
from ..specs.paths import Path, path_string
from .in_trace import KNOWN, Function, Inner, InnerTransform, Known
from .lifted import lift
from .residuals import equations

# What happens to the values that a filter chooses, between the forward and the backward pass.
Keep: TypeAlias = Literal["recompute", "save", "offload"]
_HOST = "pinned_host"
Policy: TypeAlias = (
    "Callable[..., bool] | str | Mapping[Any, Keep] | Iterable[tuple[Any, Keep]] | None"
)


class _Rules:
    """A policy by filters for modules, and by the names that ``checkpoint_name`` gives.

    The outputs of a module that is called in the trace get a name of their own, by which JAX
    identifies them.
    """

    def __init__(self, rules: Iterable[tuple[Any, Keep]]):
        self._rules = tuple(rules)
        wrong = [f"  {filter_!r}: {keep!r}" for filter_, keep in self._rules if keep not in _KEEPS]
        head = f"remat: expected one of {', '.join(map(repr, _KEEPS))} for each filter, got:"
        raise_listed(ValueError, head, wrong)
        self._tests: list[Predicate] = [
            PathGlob(x) if isinstance(x, str) else to_predicate(x) for x, _ in self._rules
        ]
        self._used: set[int] = set()
        self._called: dict[str, None] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rules) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def named(self, path: Path, module: Any, out: Any) -> Any:
        """The outputs of a module, under the name of the first rule that matches the module."""
        self._called[path_string(path)] = None
        index = next((i for i, test in enumerate(self._tests) if test(path, module)), None)
        if index is None:
            return out
        self._used.add(index)
        name = self._name(index)
        return jax.tree.map(lambda x: checkpoint_name(x, name) if _is_array(x) else x, out)

    def _name(self, index: int) -> str:
        filter_, keep = self._rules[index]
        return f"{keep} {filter_!r}"

    def policy(self) -> Callable[..., bool]:
        """The policy in the form of JAX."""
        names: dict[Any, list[str]] = {keep: [] for keep in _KEEPS}
        for index, (filter_, keep) in enumerate(self._rules):
            names[keep] += [self._name(index), *([filter_] if isinstance(filter_, str) else [])]
        policies: Any = jax.checkpoint_policies
        if not names["offload"]:
            return policies.save_only_these_names(*names["save"])  # type: ignore[no-any-return]
        return policies.save_and_offload_only_these_names(  # type: ignore[no-any-return]
            names_which_can_be_saved=names["save"],
            names_which_can_be_offloaded=names["offload"],
            offload_src="device",
            offload_dst=_HOST,
        )

    def check(self, names: Callable[[], set[str]]) -> None:
        """Raises an error for filters that match no called module and no name.

        Raises:
          ValueError: there are such filters.
        """
        unused = [i for i in range(len(self._rules)) if i not in self._used]
        if not unused:
            return
        known = names()
        self._used.update(i for i in unused if self._rules[i][0] in known)
        unused = [i for i in unused if i not in self._used]
        if unused:
            paths = [*filter(None, self._called)]
            candidates = [*paths, *sorted(known)]
            lines = [
                f"  {filter_!r}{suggestion(filter_, candidates)}"
                for filter_ in (self._rules[i][0] for i in unused)
            ]
            head = "remat: these match no called module and no name from checkpoint_name:"
            raise_listed(ValueError, head, lines, f"Modules: {', '.join(paths) or 'none'}.")


_KEEPS: tuple[Keep, ...] = get_args(Keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Remat(InnerTransform):
    """What ``remat`` decides: which values are kept for the backward pass."""

    counts_from_call: ClassVar[bool] = True

    name: str = "remat"
    in_name: str = "policy"
    policy: Callable[..., Any] | _Rules | None
    prevent_cse: bool

    @contextlib.contextmanager
    def tracing(
        self, pure: Pure, caller: Caller, built: Built, leaves: Sequence[Any]
    ) -> Iterator[Callable[..., Any]]:
        with super().tracing(pure, caller, built, leaves) as fun:
            if not isinstance(self.policy, _Rules):
                yield fun
                return
            rules, outer = self.policy, handler_here()
            modules = [(path, built.objects[i]) for i, path in _module_paths(pure).items()]
            known: Known = {id(module): (path, module) for path, module in modules}

            def named(module: Any, method: str, call: Any, args: Any, kwargs: Any) -> Any:
                if outer is None:
                    out = call(*args, **kwargs)
                else:
                    out = outer(module, method, call, args, kwargs)
                is_known = method == "__call__" and id(module) in known
                return rules.named(known[id(module)][0], module, out) if is_known else out

            token = KNOWN.set((*KNOWN.get(), known))
            try:
                yield functools.partial(with_handler, named, (), fun)
            finally:
                KNOWN.reset(token)

    def applied(
        self, pure: Pure, function: Function, in_specs: Sequence[Any], out_specs: Sequence[Any]
    ) -> Function:
        rules = self.policy if isinstance(self.policy, _Rules) else None
        policy: Any = self.policy if rules is None else rules.policy()
        options: dict[str, Any] = {"policy": policy, "prevent_cse": self.prevent_cse}
        checkpointed = jax.checkpoint(function, **options)

        def call(*leaves: Any) -> Any:
            # Flags and other non-arrays stay concrete.
            fixed = {slot: leaf for slot, leaf in enumerate(leaves) if not _is_traced(leaf)}
            if fixed:
                with_fixed = jax.checkpoint(_with(function, fixed, len(leaves)), **options)
                out = with_fixed(*(leaf for slot, leaf in enumerate(leaves) if slot not in fixed))
            else:
                out = checkpointed(*leaves)
            if rules is not None:
                rules.check(lambda: _names_in(function, leaves))
            return out

        return call


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _is_traced(leaf: Any) -> bool:
    return _compat.is_array_like(leaf) and not isinstance(leaf, bool)


def _with(function: Callable[..., Any], fixed: Mapping[int, Any], count: int) -> Callable[..., Any]:
    def call(*leaves: Any) -> Any:
        rest = iter(leaves)
        return function(*(fixed[i] if i in fixed else next(rest) for i in range(count)))

    return call


def _module_paths(pure: Pure) -> dict[int, Path]:
    """The modules of the arguments, each with its path from its argument."""
    parts = (part for target in pure.targets for part in target.parts)
    return {
        index: path
        for part in parts
        for index, [path] in pure.structure.paths_to_objects([((), part.child)]).items()
        if isinstance(pure.structure.entries[index], NodeEntry)
    }


def _names_in(function: Callable[..., Any], leaves: Sequence[Any]) -> set[str]:
    """The names that ``checkpoint_name`` gives in a function."""
    fixed = {slot: leaf for slot, leaf in enumerate(leaves) if not _is_traced(leaf)}
    arrays = [leaf for slot, leaf in enumerate(leaves) if slot not in fixed]
    jaxpr = jax.make_jaxpr(_with(function, fixed, len(leaves)))(*arrays)
    return {eqn.params["name"] for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "name"}


@_compat.api_boundary
def remat(
    fun: Any = None,
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
      fun: the function; it may take and return NNX objects.
      policy: what is kept anyway: a name in ``jax.checkpoint_policies``, such as
        ``"dots_saveable"``; a policy of JAX; or a mapping (or pairs) from filters to one of

        - ``"recompute"``: not kept;
        - ``"save"``: kept on the device;
        - ``"offload"``: kept in host memory (``pinned_host``), if the backend has it.

        A filter is a string, which is a :class:`~nnx_sharding.filters.PathGlob` pattern for the
        path of a module in its argument, or a name from ``jax.ad_checkpoint.checkpoint_name``; a
        module class; or any other NNX filter, called with the path of a module and the module. The
        first one that matches a called module applies to its outputs. Everything else is
        recomputed.
      prevent_cse: as in ``jax.checkpoint``; False within a loop, where it is not needed.
      static_argnums: positions of static arguments. Flags (``bool``), strings and None need not be
        declared: they are always static.
      static_argnames: their names.
      graph: as in :func:`~nnx_sharding.jit`.
      graph_updates: as in :func:`~nnx_sharding.jit`.

    Returns:
      A function with the same results.

    Raises:
      TypeError: ``policy`` is of another type.
      ValueError: ``jax.checkpoint_policies`` has no such policy; at a call, a filter matches
        neither a called module nor a name.

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
    chosen: Any = policy
    if isinstance(policy, str):
        names = [x for x in dir(jax.checkpoint_policies) if x not in _FACTORIES and x[0] != "_"]
        if policy not in names:
            raise ValueError(
                f"remat: jax.checkpoint_policies has no policy {policy!r}"
                f"{suggestion(policy, names)} (policies: {', '.join(names)})."
            )
        chosen = getattr(jax.checkpoint_policies, policy)
    elif isinstance(policy, Iterable):
        pairs: Any = policy.items() if isinstance(policy, Mapping) else policy
        chosen = _Rules(pairs)
    elif policy is not None and not callable(policy):
        raise TypeError(f"remat: policy must be a name, a callable or a mapping, got {policy!r}.")
    transform = _Remat(policy=chosen, prevent_cse=prevent_cse)
    roles = Roles.of(static_argnums, static_argnames)

    def decorate(fun: Callable[..., Any]) -> Any:
        return lift(Inner, fun, transform, roles, graph, graph_updates)

    return decorate if fun is None else decorate(fun)


# These make policies from their arguments.
_FACTORIES = frozenset(
    {
        "offload_dot_with_no_batch_dims",
        "save_and_offload_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_from_both_policies",
        "save_only_these_names",
    }
)
