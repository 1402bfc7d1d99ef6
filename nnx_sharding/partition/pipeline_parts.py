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

Of the `TracedLoss`, this reads (all by position): the outputs ``x``, ``layers`` and ``others``,
which are what the layers get; the outputs ``returned``, and ``state``, which maps each output that
a Variable gets to the input with its old value; and the inputs ``results`` and ``written``, which
are what the layers return and write. A `Part` is some of the outputs, as a function of the inputs
that they depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .pipeline_loss import Part, TracedLoss, refuse_loss


class LossParts:
    """A traced loss in parts, each a function of the inputs of the loss.

    The module's docstring has the words.

    Attributes:
      targets: the positions of the inputs that are differentiated.
      early, late, ending, varying, fixed: the positions of outputs.
      fixed_with_gradients: the fixed outputs that are floating-point and depend on targets.
      x_with_gradients: the floating-point arrays among what the first layer gets.
      split: the split targets, with the name of each, such as ``model.up.kernel``.
      split_fixed: the fixed outputs that depend on split targets only, with the name of one.
      run_…: the parts. Each takes the inputs, by position, and returns its outputs, by position.

    ``_depends`` has for each output the positions of the inputs that it depends on.
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
          split: by position, the names of the targets whose gradients are kept as shard sums.

        Raises:
          ValueError: microbatches cannot pass each other in this loss.
        """
        self.loss, self.targets, self.split = loss, [*targets], split
        closed = loss.closed
        self._depends = [{*Part(closed, [i]).used} for i in range(len(closed.out_avals))]

        # New state, by when it is known: after the last microbatch, after the layers, before them.
        self.ending = self._dependent(loss.state, loss.written)
        others = [i for i in loss.state if i not in self.ending]
        self.late = list[int]()
        known_after = {*loss.results}  # the inputs that are known after the layers
        # What depends on late state is late, too, so this is repeated until nothing is added.
        while found := set(self._dependent(others, known_after)).difference(self.late):
            self.late += sorted(found)
            known_after.update(loss.state[i] for i in found)  # the next microbatch reads it there
        self.early = [i for i in others if i not in self.late]

        # What the layers get: what differs between microbatches, and all else. The inputs that
        # differ, and are known before the layers, are the batch and early state.
        known_before = {*rows, *(loss.state[i] for i in self.early)}
        self.varying = self._dependent(loss.others, known_before)
        self.fixed = [*loss.layers, *(i for i in loss.others if i not in self.varying)]

        self.fixed_with_gradients = [
            i for i in self._dependent(self.fixed, self.targets) if loss.has_gradient(i)
        ]
        self.x_with_gradients = [i for i in loss.x if loss.has_gradient(i)]
        # An array of layers may come from several targets: the blocks of a list, which are stacked.
        # Its gradient is kept as shard sums if all of theirs may be. Reports know it by a module,
        # so the name of one target has to do.
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
        # Callbacks run once for each microbatch, with its loss.
        self.run_suffix = Part(loss.with_callbacks, [*loss.returned, *self.late])
        self.run_ending = Part(closed, self.ending)

    def _dependent(self, outputs: Iterable[int], inputs: Iterable[int]) -> list[int]:
        """Returns those of some outputs that depend on any of some inputs."""
        return [i for i in outputs if self._depends[i].intersection(inputs)]

    def _check(self, known_before: set[int], known_after: set[int]) -> None:
        """Refuses a loss whose microbatches cannot pass each other.

        Args:
          known_before: the inputs that differ between microbatches, and are known before the
            layers: the batch and early state.
          known_after: the inputs that are known after the layers: their results and late state.

        Raises:
          ValueError: lists all reasons.
        """
        loss, reasons = self.loss, list[str]()
        of_microbatch = known_before | known_after  # all inputs that differ between microbatches
        # What layers write, and state that depends on it, is known after the last microbatch only.
        known_at_the_end = {*loss.written, *(loss.state[i] for i in self.ending)}

        # So no microbatch can read it, neither before nor after the layers; and what depends on it
        # is computed once, at the end, when no microbatch is there to be read.
        of_each_microbatch = [*loss.returned, *self.early, *self.late, *loss.x, *loss.others]
        is_read = self._dependent(of_each_microbatch, known_at_the_end)
        if is_read or self._dependent(self.ending, of_microbatch):
            reasons.append("what layers write is used outside of them")
        # A part with no outputs has all callbacks, and what these read.
        read_by_callbacks = Part(loss.with_callbacks, []).used
        if known_at_the_end.intersection(read_by_callbacks):
            reasons.append("a callback, such as jax.debug.print, reads what layers write")
        # A microbatch enters before the one in front of it has left the layers.
        if self._dependent([*loss.x, *self.varying], known_after):
            reasons.append("what layers get depends on what is written after they are called")
        # A stage has its layers once, and calls them with several microbatches.
        if self._dependent(loss.layers, of_microbatch):
            reasons.append("the parameters of layers depend on the microbatch")
        # The backward pass returns gradients of x and of what is fixed, but of nothing varying.
        varying_with_targets = self._dependent(self.varying, self.targets)
        if any(loss.has_gradient(i) for i in varying_with_targets):
            reasons.append("further arguments of layers depend on the microbatch and on parameters")
        refuse_loss(reasons, "Pass values from layer to layer, x, y = blocks((x, y)).")
