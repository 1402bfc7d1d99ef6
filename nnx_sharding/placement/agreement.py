"""What processes tell each other about their batches, past the devices.

A collective from a background thread would run before the training step's on one process and
after it on another, and both would wait forever. So processes speak through the key-value store
of JAX's coordination service, which ``jax.distributed.initialize`` starts.
"""

from __future__ import annotations

import collections
import contextlib
import json
import time
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from .. import _compat
from .feed import Consumer

Message: TypeAlias = dict[str, Any]

# A wait is cut into pieces, between which it is seen whether the consumer has gone.
_PIECE_MS = 250

# How many conversations these processes have begun: each has the same number on all of them.
_BEGUN: collections.Counter[tuple[int, ...]] = collections.Counter()


class GoneError(Exception):
    """The consumer of this process has gone; nobody sees it."""


class Agreement:
    """A conversation in turns: at each one every process says a message and hears all of them.

    The first process collects them and answers all at once: three messages for each process,
    not one for each pair.

    Args:
      processes: the indices of those that take part, in ascending order.
      timeout: how long to wait for another process, in seconds, while the consumer waits, too.
      consumer: who waits.

    Raises:
      RuntimeError: there are several, and no coordination service.
    """

    def __init__(self, processes: Sequence[int], timeout: float, consumer: Consumer):
        self.processes = tuple(processes)
        self._timeout, self._consumer = timeout, consumer
        self._own, self._leader = jax.process_index(), self.processes[0]
        self._turn = 0
        self._is_over = len(self.processes) == 1
        if self._is_over:
            return
        self._store = _compat.key_value_store()
        if self._store is None:
            raise RuntimeError(
                "shard_batches: processes agree on the end of their batches by JAX's coordination "
                "service, which does not run. Call jax.distributed.initialize() first."
            )
        number = _BEGUN[self.processes]
        _BEGUN[self.processes] += 1
        together = zlib.crc32(repr(self.processes).encode())
        self._prefix = f"nnx_sharding/batches/{together:08x}/{number}"

    def exchange(self, message: Message) -> list[Message]:
        """The messages of all processes at this turn, in their order.

        Raises:
          RuntimeError: another process has left, or cannot be reached.
          TimeoutError: another process says nothing.
          GoneError: the consumer has gone.
        """
        if len(self.processes) == 1:
            return [message]
        if self._own == self._leader:
            others = [self._hear(p, self.processes.index(p)) for p in self.processes[1:]]
            messages = [message, *others]
            self._say("all", messages)
            if self._turn:  # who speaks at this turn has heard all of the last one
                self._store.key_value_delete(f"{self._prefix}/{self._turn - 1}")
            self._turn += 1
        else:
            self._say(self._own, message)
            self._turn += 1
            messages = self._hear("all", 0, turn=self._turn - 1)
        left = [m["left"] for m in messages if "left" in m]
        if left:
            self._is_over = True
            raise RuntimeError("shard_batches: " + "; ".join(left))
        return messages

    def leave(self, reason: str) -> None:
        """Tells the others, who may wait for this process, that it will not speak again."""
        if self._is_over:
            return
        self._is_over = True
        note = {"left": f"process {self._own} {reason}"}
        # Where the service has gone, so have the others, or they learn it from JAX.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._own == self._leader:
                self._say("all", [note])
            else:
                self._say(self._own, note)

    def end(self) -> None:
        """All processes know that there is nothing more to say."""
        self._is_over = True

    def _say(self, who: int | str, message: Any) -> None:
        self._store.key_value_set(f"{self._prefix}/{self._turn}/{who}", json.dumps(message))

    def _hear(self, who: int | str, place: int, turn: int | None = None) -> Any:
        """What a process says at this turn, or the leader of all."""
        key = f"{self._prefix}/{self._turn if turn is None else turn}/{who}"
        began = time.monotonic()
        while True:
            try:
                return json.loads(self._store.blocking_key_value_get(key, _PIECE_MS))
            except jax.errors.JaxRuntimeError as error:
                if not _compat.is_timeout(error):
                    raise RuntimeError(
                        "shard_batches: the coordination service, by which processes agree on "
                        "the end of their batches, cannot be reached any more."
                    ) from error
            if self._consumer.gone:
                raise GoneError
            self._check_patience(began, self.processes[place])

    def _check_patience(self, began: float, process: int) -> None:
        since = self._consumer.waiting_since
        # While this process computes, the others may compute as well and ask for nothing.
        if since is None or time.monotonic() - max(began, since) < self._timeout:
            return
        raise TimeoutError(
            f"shard_batches: process {process} said nothing of its next batch for "
            f"{self._timeout:g} s. It may be stuck, slower than that (raise timeout=...), or not "
            "iterating: all processes of a sharding have to iterate over the same batches, in "
            "the same order."
        )
