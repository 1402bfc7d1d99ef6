"""Runs candidates of a plan on the devices at hand, because no roofline counts everything.

Caches and devices that wait for each other decide between candidates whose estimates are close. So
the first few candidates run in rounds, in which all take turns, in another order in each round.
Other work of the machine then slows all candidates alike. The first round compiles the candidates,
and does not count.

In its turn, a candidate gets arguments of zeros that are made where they belong, and are dropped at
the end, so only the arrays of one candidate are in memory at a time. Zeros are valid tokens and
keys. If the work of a step depends on values, it is the work for zeros: for example, the number of
iterations of a ``while_loop``, or the experts that a router chooses.
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
from ..errors import raise_if_any
from ..placement.place import place
from ..report.comparison import Failure
from ..transforms.jit import jit
from ..transforms.split_merge import merge, split
from .candidates import Candidate

_ROUNDS = 7  # the number of rounds that count; the result is their median
_TURN_S = 0.2  # about the seconds of a turn, unless two calls take longer
_CALLS = 20  # the maximum number of calls in one turn


class Runner(NamedTuple):
    """A step and its arguments, to run one candidate."""

    step: Callable[..., Any]  # the step in `jit`, with the shardings of the candidate
    make_args: Callable[[], tuple[Any, ...]]  # returns arguments of zeros on the devices
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
          candidate: the candidate, which has the mesh and the shardings.
          fun: the step.
          args: the arguments of the step, abstract. They and the modules in them are not changed.
          options: the options of ``jit`` other than mesh and shardings.
        """
        mesh, shardings = candidate.mesh, candidate.in_shardings
        step = jit(fun, in_shardings=shardings, mesh=mesh, **options)
        # The arguments are abstract, so `place` only sets the shardings of the candidate.
        structure, state = split(place(tuple(args), shardings, mesh, copy=True))
        leaves, tree = jax.tree.flatten(state)
        # Position among the leaves → abstract array. Other leaves are numbers, and stay the same.
        abstract = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}
        replicated = NamedSharding(mesh, PartitionSpec())  # for arrays that no strategy shards
        # One program makes all zeros where they belong. It uses `full_like` because that can make
        # PRNG keys, too.
        make_zeros = jax.jit(
            lambda: {i: jax.lax.full_like(_unplaced(x), 0) for i, x in abstract.items()},
            out_shardings={i: x.sharding or replicated for i, x in abstract.items()},
        )

        def make_args() -> tuple[Any, ...]:
            """Returns new arguments with zeros in all arrays."""
            zeros = make_zeros()
            arrays = [zeros.get(i, x) for i, x in enumerate(leaves)]
            made: tuple[Any, ...] = merge(structure, jax.tree.unflatten(tree, arrays))
            return made

        return cls(step, make_args, mesh)

    def take_turn(self) -> float:
        """Runs the step a few times with new arguments; returns the mean seconds of a call."""
        args: Any = self.make_args()
        # The first call traces the step, and its constraints need the mesh in context.
        with jax.set_mesh(self.mesh):
            first_seconds = self._mean_seconds(args, calls=1)
            # Deleted arrays were donated by a step that returns new arrays instead of updating a
            # module. Such a step can be called with the same arguments only once.
            if any(x.is_deleted() for x in _arrays(args)):
                args = None  # frees the memory for the new arguments
                return self._mean_seconds(self.make_args(), calls=1)
            calls_in_turn = int(_TURN_S / first_seconds)
            return self._mean_seconds(args, calls=max(2, min(_CALLS, calls_in_turn)))

    def _mean_seconds(self, args: Any, *, calls: int) -> float:
        """Returns the mean seconds of calls that are in flight together, as in training.

        All calls have the same arguments. A step that updates its modules in place finds the new
        arrays in the modules, even if it has donated the old arrays. The results of a call are not
        passed to the next call, so a step with donated bare arrays can only be called once
        (`take_turn`).
        """
        jax.block_until_ready(_arrays(args))
        start = time.perf_counter()
        for _ in range(calls):
            result = self.step(*args)
        # Donated arrays are deleted, and JAX cannot wait for deleted arrays.
        jax.block_until_ready([x for x in _arrays((result, args)) if not x.is_deleted()])
        return (time.perf_counter() - start) / calls


def run_in_rounds(
    runners: Mapping[str, Runner], rounds: int = _ROUNDS, *, quiet: bool = False
) -> dict[str, list[float] | Failure]:
    """Runs candidates in rounds in which all take turns.

    Args:
      runners: name of a candidate → its runner.
      rounds: the number of rounds that count. One more round, the first, compiles.
      quiet: whether to show no progress.

    Returns:
      Name of a candidate → the seconds of a call in each round that counts, or the failure. A
      candidate that has failed does not run again.
    """
    results: dict[str, list[float] | Failure] = {name: [] for name in runners}
    order = [*runners]
    shuffle = random.Random(0).shuffle  # the same orders in each search
    running = [""]  # the name of the candidate whose turn it is, for the progress line
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
                    # The failure holds no error object, because its traceback would keep the arrays
                    # in memory.
                    text = f"while it ran: {type(error).__name__}: {error}"
                    results[name] = Failure(text)
                advance(name)
    return results


def medians(
    results: Mapping[str, list[float] | Failure],
) -> tuple[dict[str, float], dict[str, Failure]]:
    """Returns two dicts by name: the median seconds of candidates that ran, and the failures.

    ``results`` is from :func:`run_in_rounds`.
    """
    failures = {name: result for name, result in results.items() if isinstance(result, Failure)}
    rounds = {name: result for name, result in results.items() if not isinstance(result, Failure)}
    return {name: statistics.median(seconds) for name, seconds in rounds.items()}, failures


def check_devices(measure: int, meshes: Sequence[Mesh]) -> None:
    """Raises a ValueError if candidates are to run on devices that this process does not have.

    Args:
      measure: the argument of ``plan``: how many candidates are to run.
      meshes: the meshes of all candidates.
    """
    if not measure:
        return
    own = jax.local_devices()
    # The kinds of devices that this process does not have. There are several kinds only if
    # the user named meshes of several.
    missing_kinds = {
        device.device_kind for mesh in meshes for device in {*mesh.devices.flat} - {*own}
    }
    if not missing_kinds:
        return
    largest = max(mesh.size for mesh in meshes)
    needs = f"{largest} × {', '.join(sorted(missing_kinds))}"
    raise_if_any(
        ValueError,
        f"plan: measure={measure} runs candidates, but not all of their devices are here:",
        [f"  {needs}: this process has {len(own)} × {own[0].device_kind}"],
        "Leave out measure=, or plan for devices that this process has, without a topology.",
    )


def _unplaced(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns an abstract array without its sharding, whose mesh is not in context."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


def _arrays(tree: Any) -> list[jax.Array]:
    """Lists the arrays in a pytree of modules and other values."""
    return [x for x in jax.tree.leaves(split(tree)[1]) if isinstance(x, jax.Array)]
