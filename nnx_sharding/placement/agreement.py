"""Messages between processes about their batches, without the use of devices.

A collective from a background thread would run before that of the training step on one process and
after it on another, and both would wait forever. So messages go through the key-value store of
JAX's coordination service, which ``jax.distributed.initialize`` starts.
"""

from __future__ import annotations

import collections
import contextlib
import json
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax

from .. import _compat
from .feed import Consumer

# How often a waiting process checks whether its consumer is gone.
_INTERVAL_MS = 250

# How many agreements these processes have begun, which numbers them alike on all processes.
_BEGUN: collections.Counter[tuple[int, ...]] = collections.Counter()


class ConsumerGoneError(Exception):
    """The consumer of this process is gone, so nobody sees this."""


class Agreement:
    """An exchange of messages in turns: at each turn, every process gets the messages of all.

    The first process collects the messages and answers with all of them. ``processes`` are in
    ascending order; only seconds in which the consumer waits count towards ``timeout``.
    """

    def __init__(self, processes: Sequence[int], timeout: float, consumer: Consumer):
        self.processes = tuple(processes)
        self._timeout, self._consumer = timeout, consumer
        self._process, self._leader = jax.process_index(), self.processes[0]
        self._turn = 0
        self._is_over = len(self.processes) == 1
        if self._is_over:
            return
        self._store = _compat.key_value_store()
        if self._store is None:
            raise RuntimeError(
                "shard_batches: processes agree on the end of their batches through JAX's "
                "coordination service, which is not running. Call jax.distributed.initialize() "
                "first."
            )
        number = _BEGUN[self.processes]
        _BEGUN[self.processes] += 1
        group = zlib.crc32(repr(self.processes).encode())
        self._prefix = f"nnx_sharding/batches/{group:08x}/{number}"

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all processes at this turn, in their order."""
        if len(self.processes) == 1:
            return [message]
        turn = self._turn
        if self._process == self._leader:
            messages = [message, *(self._receive(turn, p, p) for p in self.processes[1:])]
            self._send("all", messages)
            if turn:  # all received the last turn's messages before they sent these
                self._store.key_value_delete(f"{self._prefix}/{turn - 1}")
            self._turn += 1
        else:
            self._send(self._process, message)
            self._turn += 1  # if it leaves now, its note is for the next turn
            messages = self._receive(turn, "all", self._leader)
        left = [m["left"] for m in messages if "left" in m]
        if left:
            self._is_over = True
            raise RuntimeError("shard_batches: " + "; ".join(left))
        return messages

    def leave(self, reason: str) -> None:
        """Informs the others, which may be waiting for this process, that it sends nothing more."""
        if self._is_over:
            return
        self._is_over = True
        note = {"left": f"process {self._process} {reason}"}
        # If the service is gone, so are the others, or JAX informs them.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._process == self._leader:
                self._send("all", [note])
            else:
                self._send(self._process, note)

    def end(self) -> None:
        """Ends the exchange when all processes know that there is nothing more to send."""
        self._is_over = True

    def _send(self, key: int | str, message: Any) -> None:
        self._store.key_value_set(f"{self._prefix}/{self._turn}/{key}", json.dumps(message))

    def _receive(self, turn: int, key: int | str, sender: int) -> Any:
        began = time.monotonic()
        while True:
            try:
                path = f"{self._prefix}/{turn}/{key}"
                return json.loads(self._store.blocking_key_value_get(path, _INTERVAL_MS))
            except jax.errors.JaxRuntimeError as error:
                if not _compat.is_timeout(error):
                    raise RuntimeError(
                        "shard_batches: the coordination service, through which processes agree on "
                        "the end of their batches, is no longer available."
                    ) from error
            if self._consumer.gone:
                raise ConsumerGoneError
            # While the consumer computes, other processes may compute as well without waiting.
            since = self._consumer.waiting_since
            if since is not None and time.monotonic() - max(began, since) >= self._timeout:
                raise TimeoutError(
                    f"shard_batches: process {sender} sent nothing about its next batch for "
                    f"{self._timeout:g} s. It may be blocked, slower than that (raise "
                    "timeout=...), or not iterating: all processes of a sharding have to iterate "
                    "over the same batches, in the same order."
                )
