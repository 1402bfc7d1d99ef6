"""The parts of a traced loss: what is before the layers of a pipeline, at them, and after them.

``pipeline_loss.py`` traces the loss of one microbatch, and names everything by its position among
the inputs or the outputs of that trace. Here these are sorted by when they are known. For
microbatch i, in a pipeline that computes several microbatches at once::

    fixed      what layers get with all microbatches alike: their own arrays, and constants
    prefix     what is before the layers, such as an embedding: gives x, varying and early
    suffix     what is after them, such as a head: gives what the loss returns, and late

    varying    what else layers get with microbatch i, such as a mask
    early      state that microbatch i+1 needs to enter: that before the layers (random streams)
    late       state that microbatch i+1 needs to leave: that after the layers (statistics)
    ending     state that depends on what layers write to their own Variables: known after the last

*Targets* are the inputs that are differentiated, parameters. Gradients of *split* targets are kept
as one sum for each shard of the rows (``shard_sums.py``) until all microbatches are done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .pipeline_loss import Part, TracedLoss, refuse_loss


class LossParts:
    """A traced loss in parts, each a function of the inputs of the loss.

    The module's docstring has the words. All are lists of positions: of inputs for ``targets``, of
    outputs for the others.

    Attributes:
      fixed_with_gradients: the fixed ones that depend on targets.
      x_with_gradients: those of what the first layer gets that are floating-point numbers.
      split: the names of the split targets, by position.
      split_fixed: the same for fixed ones with gradients whose targets are all split.
    """

    def __init__(
        self,
        loss: TracedLoss,
        targets: Sequence[int],
        rows: Collection[int],
        split: Mapping[int, str],
    ):
        """Cuts a loss.

        Args:
          loss: the loss.
          targets: the positions of the inputs that are differentiated.
          rows: the positions of the inputs that differ between microbatches.
          split: the names of the targets whose gradients are kept as shard sums.

        Raises:
          ValueError: microbatches cannot pass each other in this loss.
        """
        self.loss, self.targets, self.split = loss, [*targets], split
        closed = loss.closed
        # For each output the inputs on which it depends.
        self._depends = [{*Part(closed, [i]).used} for i in range(len(closed.out_avals))]
        self.ending = self._dependent(loss.state, loss.written)
        outside = [i for i in loss.state if i not in self.ending]
        self.late = list[int]()
        known_after = {*loss.results}  # the inputs that are known after the layers
        # What depends on late state is late, too.
        while found := set(self._dependent(outside, known_after)).difference(self.late):
            self.late += sorted(found)
            known_after.update(loss.state[i] for i in found)
        self.early = [i for i in outside if i not in self.late]
        # The inputs that differ between microbatches, and are known before the layers.
        known_before = {*rows, *(loss.state[i] for i in self.early)}
        self.varying = self._dependent(loss.others, known_before)
        self.fixed = [*loss.layers, *(i for i in loss.others if i not in self.varying)]
        self.fixed_with_gradients = [
            i for i in self._dependent(self.fixed, self.targets) if loss.has_gradient(i)
        ]
        self.x_with_gradients = [i for i in loss.x if loss.has_gradient(i)]
        # An array of layers may come from several targets, such as the blocks of a list.
        self.split_fixed = dict[int, str]()
        for i in self.fixed_with_gradients:
            sources = sorted(self._depends[i].intersection(targets))
            if all(source in split for source in sources):
                self.split_fixed[i] = split[sources[0]]
        self._check(known_before, known_after)

        self.run_fixed = Part(closed, self.fixed)
        self.run_fixed_with_gradients = Part(closed, self.fixed_with_gradients)
        self.run_prefix = Part(closed, [*loss.x, *self.varying, *self.early])
        self.run_x_with_gradients = Part(closed, self.x_with_gradients)
        self.run_suffix = Part(loss.with_callbacks, [*loss.returned, *self.late])
        self.run_ending = Part(closed, self.ending)

    def _dependent(self, outputs: Iterable[int], inputs: Iterable[int]) -> list[int]:
        """Returns those of some outputs that depend on any of some inputs."""
        return [i for i in outputs if self._depends[i].intersection(inputs)]

    def _check(self, known_before: set[int], known_after: set[int]) -> None:
        """Refuses a loss whose microbatches cannot pass each other.

        Args:
          known_before: the inputs that differ between microbatches, known before the layers.
          known_after: those that are known after the layers.
        """
        loss = self.loss
        of_microbatch = known_before | known_after
        # What layers write, and state that depends on it, is known after the last microbatch.
        known_at_the_end = {*loss.written, *(loss.state[i] for i in self.ending)}
        outside = [*loss.returned, *self.early, *self.late, *loss.x, *loss.others]
        varying_of_targets = self._dependent(self.varying, self.targets)
        problems: dict[str, object] = {
            "what layers write is used outside of them": self._dependent(outside, known_at_the_end)
            or self._dependent(self.ending, of_microbatch),
            "a callback, such as jax.debug.print, reads what layers write": (
                known_at_the_end.intersection(Part(loss.with_callbacks, []).used)
            ),
            "what layers get depends on what is written after they are called": self._dependent(
                [*loss.x, *self.varying], known_after
            ),
            "the parameters of layers depend on the microbatch": self._dependent(
                loss.layers, of_microbatch
            ),
            "further arguments of layers depend on the microbatch and on parameters": any(
                map(loss.has_gradient, varying_of_targets)
            ),
        }
        refuse_loss(
            [problem for problem, found in problems.items() if found],
            "Pass values from layer to layer, x, y = blocks((x, y)).",
        )
