"""Makes results ahead of their use, in a thread that ends with its consumer.

The thread and the consumer share one condition and a bounded queue. A feed ends in one of three
ways: ``make`` raises (``StopIteration`` included), the consumer calls ``stop``, or the consumer is
dropped and its finalizer calls ``stop``. The thread therefore must not refer to the consumer.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# How long the end of the program waits for a thread that runs a user's loader.
_EXIT_SECONDS = 5.0


class Feed(Generic[T]):
    """The results of ``make``, in order, made up to ``depth`` ahead by a thread.

    With a ``depth`` of 0 there is no thread: :meth:`take` makes each result.

    What the thread and the consumer share, under the condition ``_change``:

        _ready     the results that were made and not yet taken
        _error     what ``make`` raised, until it is raised to the consumer
        _over      whether nothing more is made
        _stopped   whether nobody takes any more
    """

    def __init__(self, make: Callable[[], T], depth: int):
        """Prepares to make up to ``depth`` results ahead; no thread is started yet."""
        self._make, self._depth = make, depth
        self._ready: deque[T] = deque()
        self._lock = threading.RLock()  # not a Lock: a finalizer may call `stop` anywhere
        self._change = threading.Condition(self._lock)
        self._error: BaseException | None = None
        self._stopped = False
        self._over = False
        self._thread: threading.Thread | None = None

    def take(self) -> T:
        """Returns the next result, and waits for it.

        Raises:
          BaseException: what ``make`` raised, once, after all results that it made before.
          StopIteration: ``make`` raised it, its error was raised already, or the feed was stopped.
        """
        if self._depth == 0:
            return self._make_now()
        with self._change:
            if self._thread is None and not self._over:
                self._start()
            # `_make_one` wakes this for a result or the end, and `stop` for being stopped.
            while not (self._ready or self._over or self._stopped):
                self._change.wait()
            if self._ready:  # also after the end: what was made before an error comes first
                self._change.notify_all()  # the thread may wait for room
                return self._ready.popleft()
            error, self._error = self._error, None  # an error is raised once
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # its traceback holds this frame, and this frame would hold it

    def _make_now(self) -> T:
        """Makes the next result in the thread of the consumer; raises what :meth:`take` does.

        It passes through no queue, which took a third of what a batch costs besides placing it.
        """
        with self._lock:  # of consumers in several threads, one after the other uses the loader
            if self._over:
                raise StopIteration
            try:
                result = self._make()
            except BaseException:
                self._end()
                raise
            if self._stopped:  # by the loader, or by a finalizer
                raise StopIteration
            return result

    def stop(self, wait: float | None = 0.0) -> None:
        """Ends the feed, drops ready results, and waits up to ``wait`` seconds for the thread.

        None waits until the thread has ended, even if the loader takes forever.
        """
        with self._change:
            self._stopped = True
            self._ready.clear()
            self._change.notify_all()
            thread = self._thread
            # Nothing more is made from here on. A thread notes that itself, when `make` returns.
            if thread is None:
                self._end()
        # A finalizer may run in the thread itself, which cannot wait for its own end.
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait)

    def _start(self) -> None:
        # A daemon, since the program could not end while the loader is blocked.
        self._thread = threading.Thread(target=self._run, name="nnx_sharding-batches", daemon=True)
        # Exit handlers run in reverse order, so this one runs before JAX closes its connections.
        atexit.register(self.stop, _EXIT_SECONDS)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads: without one, `take` would wait
            atexit.unregister(self.stop)
            self._thread = None  # the next `take` tries again
            raise

    def _run(self) -> None:
        while self._has_room() and not self._over:
            self._make_one()
        with self._change:
            self._end()

    def _has_room(self) -> bool:
        """Waits for room in the queue; False if the feed was stopped instead."""
        with self._change:
            while not self._stopped and len(self._ready) >= self._depth:
                self._change.wait()
            return not self._stopped

    def _make_one(self) -> None:
        """Calls ``make`` once, and hands its result or error to the consumer."""
        if self._over:
            return
        try:
            result = self._make()  # in a thread without the lock, since it may take long
        except BaseException as error:  # the consumer raises it, KeyboardInterrupt too
            with self._change:
                # `take` raises StopIteration itself where nothing more is made.
                self._error = None if isinstance(error, StopIteration) else error
                self._end()  # sets `_over`, and wakes the consumer
        else:
            with self._change:
                if not self._stopped:  # else nobody takes it
                    self._ready.append(result)
                    self._change.notify_all()

    def _end(self) -> None:
        """Notes that nothing more is made, and wakes the consumer; with the lock held."""
        if not self._over:
            self._over = True
            atexit.unregister(self.stop)
            del self._make  # which holds the user's loader
        self._change.notify_all()
