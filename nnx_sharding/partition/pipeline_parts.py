"""The parts of a traced loss: before the layers of a pipeline, at them, and after them.

``pipeline_loss.py`` traces the loss of one microbatch, and names everything by its position among
the inputs or the outputs of that trace. This module sorts them by the time when they are known. For
microbatch i, in a pipeline that computes several microbatches at once::

    fixed      values that layers get with all microbatches alike: their own arrays, and constants
    prefix     the part before the layers, such as an embedding: computes x, varying and early
    suffix     the part after them, such as a head: computes the loss's results, and late

    varying    other values that layers get with microbatch i, such as a mask
    early      state before the layers (random streams): microbatch i+1 needs it to enter
    late       state after the layers (statistics): microbatch i+1 needs it to leave
    ending     state that depends on arrays that layers write to their own Variables: known after
               the last microbatch

*Targets* are the inputs that are differentiated, parameters. Gradients of *split* targets are kept
as one sum for each shard of the rows (``shard_sums.py``) until all microbatches are done.

This module reads from the `TracedLoss` (all by position): the outputs ``x``, ``layers`` and
``others``, which are the layers' inputs; the outputs ``returned``, and ``state``, which maps each
output that a Variable gets to the input with its old value; and the inputs ``results`` and
``written``, which are the arrays that the layers return and write. ``closed`` is the trace without
callbacks, and ``with_callbacks`` is the trace with them. ``has_gradient`` says whether an output is
floating-point or complex.

A `Part` is some of the outputs, as a function of the inputs that they depend on (``used``).
`refuse_loss` raises an error only if there are reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .pipeline_loss import Part, TracedLoss, refuse_loss


class LossParts:
    """A traced loss in parts, each a function of the inputs of the loss.

    The docstring of the module explains the words.

    Attributes:
      loss: the traced loss.
      targets: the positions of the inputs that are differentiated.
      early, late, ending, varying, fixed: the positions of outputs.
      fixed_with_gradients: the fixed outputs that are floating-point and depend on targets.
      x_with_gradients: the floating-point arrays in the first layer's input x.
      split: the split targets, with the name of each, such as ``model.up.kernel``.
      split_fixed: the fixed outputs with a gradient that depend on split targets only, each with
        the name of one of these targets.
      run_…: the parts. Each takes the inputs, by position, and returns its outputs, by position:

        run_fixed, run_ending       the outputs in ``fixed``, and in ``ending``
        run_prefix                  x, and the outputs in ``varying`` and ``early``
        run_suffix                  what the loss returns, and the outputs in ``late``
        run_…_with_gradients        the outputs in the attribute of this name, to differentiate

    ``_inputs_of`` has for each output the positions of the inputs that it depends on.
    """

    def __init__(
        self,
        loss: TracedLoss,
        targets: Sequence[int],
        rows: Collection[int],
        split: Mapping[int, str],
    ):
        """Cuts a loss into parts.

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
        self._inputs_of = [{*Part(closed, [i]).used} for i in range(len(closed.out_avals))]

        # New state is sorted by the time when it is known: after the last microbatch (ending),
        # after the layers (late), or before them (early).
        self.ending = self._outputs_reading(loss.state, loss.written)
        early_or_late = [i for i in loss.state if i not in self.ending]
        self.late = list[int]()
        known_after = {*loss.results}  # the inputs that are known after the layers
        # State that depends on late state is late as well, so this is repeated until nothing is
        # added. The next microbatch reads late state from the input with the Variable's old value.
        new_late = self._outputs_reading(early_or_late, known_after)
        while new_late:
            self.late += new_late
            known_after.update(loss.state[i] for i in new_late)
            reads_late = self._outputs_reading(early_or_late, known_after)
            new_late = [i for i in reads_late if i not in self.late]
        self.early = [i for i in early_or_late if i not in self.late]

        # The layers' inputs besides x are varying or fixed. The inputs of the loss that differ
        # between microbatches and are known before the layers are the batch and early state. The
        # layers' own arrays are fixed, because `_check` refuses a loss in which they are not.
        known_before = {*rows, *(loss.state[i] for i in self.early)}
        self.varying = self._outputs_reading(loss.others, known_before)
        self.fixed = [*loss.layers, *(i for i in loss.others if i not in self.varying)]

        self.fixed_with_gradients = [
            i for i in self._outputs_reading(self.fixed, self.targets) if loss.has_gradient(i)
        ]
        self.x_with_gradients = [i for i in loss.x if loss.has_gradient(i)]
        # An array of layers may depend on several targets, because the blocks of a list are
        # stacked. The array's gradient is kept as shard sums if all these targets are split. The
        # name of one target is enough, because reports only take the module from it.
        self.split_fixed = dict[int, str]()
        for i in self.fixed_with_gradients:
            # There is at least one source, because `_outputs_reading` has found it.
            sources = sorted(self._inputs_of[i].intersection(targets))
            if all(source in split for source in sources):
                self.split_fixed[i] = split[sources[0]]
        self._check(known_before, known_after)

        self.run_fixed = Part(closed, self.fixed)
        self.run_fixed_with_gradients = Part(closed, self.fixed_with_gradients)
        self.run_prefix = Part(closed, [*loss.x, *self.varying, *self.early])
        self.run_x_with_gradients = Part(closed, self.x_with_gradients)
        # Only the suffix has callbacks, so they run once for each microbatch.
        self.run_suffix = Part(loss.with_callbacks, [*loss.returned, *self.late])
        self.run_ending = Part(closed, self.ending)

    def _outputs_reading(self, outputs: Iterable[int], inputs: Iterable[int]) -> list[int]:
        """Returns the outputs that depend on at least one of these inputs."""
        return [i for i in outputs if self._inputs_of[i].intersection(inputs)]

    def _check(self, known_before: set[int], known_after: set[int]) -> None:
        """Raises a ValueError for a loss whose microbatches cannot pass each other.

        Args:
          known_before: the inputs that differ between microbatches, and are known before the
            layers: the batch and early state.
          known_after: the inputs that are known after the layers: their results and late state.

        Raises:
          ValueError: lists all reasons.
        """
        loss, reasons = self.loss, list[str]()
        microbatch_inputs = known_before | known_after  # all that differ between microbatches
        # Arrays that layers write, and state that depends on them, are known after the last
        # microbatch only. So no microbatch can read them, neither before nor after the layers.
        # State that depends on them is computed once, at the end, so it cannot read a microbatch.
        known_at_the_end = {*loss.written, *(loss.state[i] for i in self.ending)}
        microbatch_outputs = [*loss.returned, *self.early, *self.late, *loss.x, *loss.others]
        reads_end_too_early = self._outputs_reading(microbatch_outputs, known_at_the_end)
        if reads_end_too_early or self._outputs_reading(self.ending, microbatch_inputs):
            reasons.append("what layers write is used outside of them")
        # A part with no outputs has all callbacks, so it uses the inputs that callbacks read.
        read_by_callbacks = Part(loss.with_callbacks, []).used
        if known_at_the_end.intersection(read_by_callbacks):
            reasons.append("a callback, such as jax.debug.print, reads what layers write")
        # The layers' inputs cannot depend on results or late state, because a microbatch enters
        # before the one in front of it has left the layers.
        if self._outputs_reading([*loss.x, *self.varying], known_after):
            reasons.append("what layers get depends on what is written after they are called")
        # The layers' arrays cannot differ between microbatches, because a stage has its layers
        # once, and calls them with several microbatches.
        if self._outputs_reading(loss.layers, microbatch_inputs):
            reasons.append("the parameters of layers depend on the microbatch")
        # A varying value cannot have a gradient, because the backward pass only returns gradients
        # of x and of fixed values.
        varying_with_targets = self._outputs_reading(self.varying, self.targets)
        if any(loss.has_gradient(i) for i in varying_with_targets):
            reasons.append("further arguments of layers depend on the microbatch and on parameters")
        refuse_loss(reasons, "Pass values from layer to layer, x, y = blocks((x, y)).")
