"""Runs candidates of a plan on the devices at hand, which tells what no roofline counts.

Caches and devices that wait for each other decide between candidates whose estimates are close. So
the first few run in rounds, in which all take turns, in another order each time: what else the
machine does meets all of them alike. The first round compiles them, and does not count.

In its turn, a candidate gets arguments of zeros that are made where they belong, and that are
dropped at the end: only the arrays of one candidate are in memory at a time. Zeros are valid tokens
and keys. What depends on values is that for zeros, such as how long a ``while_loop`` runs, or which
experts a router chooses.

From other modules: `split` returns the structure of pytrees with modules and a state of their
arrays, `merge` makes the pytrees again; `place` returns them with the shardings of a candidate; a
`Failure` holds the text of an error in place of a result.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..diagnostics.progress import progress
from ..errors import raise_listed
from ..placement.place import place
from ..report.comparison import Failure
from ..transforms.jit import jit
from ..transforms.split_merge import merge, split
from .candidates import Candidate

_ROUNDS = 7  # the median counts
_TURN_S = 0.2  # about as long does a turn last, if that is not less than two calls
_CALLS = 20  # at most, in one turn


class Runner(NamedTuple):
    """What runs one candidate."""

    step: Callable[..., Any]  # of `jit`, with the shardings of the candidate
    make_args: Callable[[], tuple[Any, ...]]  # makes zeros on the devices
    mesh: Mesh

    @classmethod
    def of(
        cls,
        candidate: Candidate,
        fun: Callable[..., Any],
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Runner:
        """Makes the runner of a candidate.

        Args:
          candidate: its mesh and its shardings.
          fun: the step.
          args: its arguments, abstract, which are not changed, nor are the modules in them.
          options: those of ``jit``, other than mesh and shardings.
        """
        mesh, shardings = candidate.mesh, candidate.in_shardings
        step = jit(fun, in_shardings=shardings, mesh=mesh, **options)
        # The arguments are abstract: they get the shardings of the candidate, and no arrays yet.
        structure, state = split(place(tuple(args), shardings, mesh, copy=True))
        leaves, tree = jax.tree.flatten(state)
        # By their positions in the leaves; other leaves are numbers, which stay as they are.
        abstract = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}
        replicated = NamedSharding(mesh, PartitionSpec())  # for arrays that no strategy shards
        # One program makes all zeros where they belong. `full_like` also makes PRNG keys.
        make_zeros = jax.jit(
            lambda: {i: jax.lax.full_like(_unplaced(x), 0) for i, x in abstract.items()},
            out_shardings={i: x.sharding or replicated for i, x in abstract.items()},
        )

        def make_args() -> tuple[Any, ...]:
            """Makes the arguments anew, with zeros in all arrays."""
            zeros = make_zeros()
            arrays = [zeros.get(i, x) for i, x in enumerate(leaves)]
            made: tuple[Any, ...] = merge(structure, jax.tree.unflatten(tree, arrays))
            return made

        return cls(step, make_args, mesh)

    def take_turn(self) -> float:
        """Runs the step a few times with new arguments; returns the mean seconds of a call."""
        args: Any = self.make_args()
        with jax.set_mesh(self.mesh):  # also for constraints in the step, if it is traced now
            first = self._mean_seconds(args, calls=1)
            # A step that is donated arrays, and returns new ones instead of updating a module, can
            # be called with its arguments only once.
            if any(x.is_deleted() for x in _arrays(args)):
                args = None  # so that the memory is free for others
                return self._mean_seconds(self.make_args(), calls=1)
            return self._mean_seconds(args, calls=max(2, min(_CALLS, int(_TURN_S / first))))

    def _mean_seconds(self, args: Any, *, calls: int) -> float:
        """Returns the mean seconds of calls that are in flight together, as in training.

        All calls have the same arguments. A step that updates its modules in place finds the new
        arrays there, also if it has donated the old ones. What it returns is not passed on, so a
        step that is donated bare arrays can only be called once (`take_turn`).
        """
        jax.block_until_ready(_arrays(args))
        start = time.perf_counter()
        for _ in range(calls):
            result = self.step(*args)
        # Donated arrays are deleted, and cannot be waited for.
        jax.block_until_ready([x for x in _arrays((result, args)) if not x.is_deleted()])
        return (time.perf_counter() - start) / calls


def run_in_rounds(
    runners: Mapping[str, Runner], rounds: int = _ROUNDS, *, quiet: bool = False
) -> dict[str, list[float] | Failure]:
    """Runs candidates in rounds in which all take turns.

    Args:
      runners: by the name of the candidate.
      rounds: how many, besides the first, which compiles.
      quiet: whether to show no progress.

    Returns:
      By the name of the candidate: the seconds of a call in each round; or why it failed, after
      which it does not run again.
    """
    results: dict[str, list[float] | Failure] = {name: [] for name in runners}
    order, shuffle = [*runners], random.Random(0).shuffle
    running = [""]  # the name of the candidate that takes its turn
    num_turns = (1 + rounds) * len(order)
    with progress("plan: measuring", num_turns, running=lambda: running, quiet=quiet) as advance:
        for number in range(1 + rounds):
            shuffle(order)
            for name in order:
                times = results[name]
                if isinstance(times, Failure):
                    continue
                running[0] = name
                try:
                    seconds = runners[name].take_turn()
                    if number > 0:  # the first round compiles
                        times.append(seconds)
                except Exception as error:
                    # Without the error itself, whose traceback would keep the arrays in memory.
                    text = f"while it ran: {type(error).__name__}: {error}"
                    results[name] = Failure(text)
                advance(name)
    return results


def medians(
    results: Mapping[str, list[float] | Failure],
) -> tuple[dict[str, float], dict[str, Failure]]:
    """Returns the median seconds of each candidate that ran, and why others failed, by name.

    ``results`` is from :func:`run_in_rounds`.
    """
    failures = {name: result for name, result in results.items() if isinstance(result, Failure)}
    rounds = {name: result for name, result in results.items() if not isinstance(result, Failure)}
    return {name: statistics.median(seconds) for name, seconds in rounds.items()}, failures


def check_devices(measure: int, meshes: Sequence[Mesh]) -> None:
    """Raises a ValueError if candidates are to run, and their devices are not of this process.

    ``measure`` is the argument of ``plan``, how many are to run; ``meshes`` are all of theirs.
    """
    if not measure:
        return
    own = jax.local_devices()
    # The kinds of the devices that are not here; one, unless the user named meshes of several.
    others = {device.device_kind for mesh in meshes for device in {*mesh.devices.flat} - {*own}}
    if not others:
        return
    largest = max(mesh.size for mesh in meshes)
    needs = f"{largest} × {', '.join(sorted(others))}"
    raise_listed(
        ValueError,
        f"plan: measure={measure} runs candidates, but not all of their devices are here:",
        [f"  {needs}: this process has {len(own)} × {own[0].device_kind}"],
        "Leave out measure=, or plan for devices that this process has, without a topology.",
    )


def _unplaced(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype alone: the mesh of a sharding is not in context."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


def _arrays(tree: Any) -> list[jax.Array]:
    """Lists the arrays in a pytree of modules and other values."""
    return [x for x in jax.tree.leaves(split(tree)[1]) if isinstance(x, jax.Array)]
