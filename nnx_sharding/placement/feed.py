"""Makes results ahead of their use, in a thread that ends with its consumer.

The thread and the consumer share one condition and a bounded queue. A feed ends in one of three
ways: ``make`` raises an error (``StopIteration`` included), the consumer calls ``stop``, or the
consumer is dropped and its finalizer calls ``stop``. The thread must not refer to the consumer,
because the consumer would then never be dropped.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# The time that the end of the program waits for a thread that runs a user's loader.
_EXIT_SECONDS = 5.0


class Feed(Generic[T]):
    """The results of ``make``, in order, made up to ``depth`` ahead by a thread.

    With a ``depth`` of 0 there is no thread: :meth:`take` makes each result.

    Its private attributes:

        _make      the function; it is deleted at the end
        _depth     the number of results that are made ahead
        _lock      the lock of ``_change``, which may be taken again in the same thread
        _change    the condition that is notified of each change of the attributes below
        _thread    the thread; None before the first `take`, and with a depth of 0

    The thread and the consumer share these attributes, under the condition ``_change``:

        _ready     the results that were made and not yet taken
        _error     the error that ``make`` raised, until the consumer raises it
        _over      whether nothing more is made
        _stopped   whether the consumer takes nothing more
    """

    def __init__(self, make: Callable[[], T], depth: int):
        """Prepares to make up to ``depth`` results ahead; no thread is started yet."""
        self._make, self._depth = make, depth
        self._ready: deque[T] = deque()
        # The lock is an RLock, because a finalizer may call `stop` in a thread that holds it.
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._error: BaseException | None = None
        self._stopped = False
        self._over = False
        self._thread: threading.Thread | None = None

    def take(self) -> T:
        """Returns the next result, and waits for it.

        Raises:
          BaseException: the error that ``make`` raised, once, after all results before it.
          StopIteration: ``make`` raised it, its error was raised already, or the feed was stopped.
        """
        if self._depth == 0:
            return self._make_now()
        with self._change:
            if self._thread is None and not self._over:
                self._start()
            # `_make_one` notifies of a result or the end, and `stop` of being stopped.
            while not (self._ready or self._over or self._stopped):
                self._change.wait()
            # Results are taken even after the end, because those before an error come first.
            if self._ready:
                self._change.notify_all()  # the thread may wait for room
                return self._ready.popleft()
            error = self._error
            self._error = None  # an error is raised once
        try:
            raise StopIteration if error is None else error
        finally:
            # The error's traceback holds this frame, so the frame must not hold the error: they
            # would keep each other in memory.
            del error

    def _make_now(self) -> T:
        """Makes the next result in the thread of the consumer; the errors are those of `take`.

        The result passes through no queue, because that took a third of the cost of a batch besides
        placing it.
        """
        # The lock is for consumers in several threads: one after the other uses the loader.
        with self._lock:
            if self._over:
                raise StopIteration
            try:
                result = self._make()
            except BaseException:
                self._end()
                raise
            if self._stopped:  # the loader, or a finalizer, has called `stop` meanwhile
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
            # A thread calls `_end` itself, when `make` returns. Without one, it is called here.
            if thread is None:
                self._end()
        # A finalizer may run in the thread itself, which cannot wait for its own end.
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait)

    def _start(self) -> None:
        """Starts the thread; raises a RuntimeError if the system has no more threads."""
        # The thread is a daemon, because the program could not end while the loader is blocked.
        self._thread = threading.Thread(target=self._run, name="nnx_sharding-batches", daemon=True)
        # Exit handlers run in reverse order, so this one runs before JAX closes its connections.
        atexit.register(self.stop, _EXIT_SECONDS)
        try:
            self._thread.start()
        except RuntimeError:
            atexit.unregister(self.stop)
            # The next `take` tries again. With the old thread, `take` would wait forever.
            self._thread = None
            raise

    def _run(self) -> None:
        """Makes results until the end; the thread runs this."""
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
        if self._over:  # `_make` is deleted then
            return
        try:
            result = self._make()  # in a thread without the lock, since it may take long
        except BaseException as error:  # the consumer raises any error, even KeyboardInterrupt
            with self._change:
                # StopIteration is not kept, because `take` raises it itself if nothing more is
                # made.
                self._error = None if isinstance(error, StopIteration) else error
                self._end()  # sets `_over`, and wakes the consumer
        else:
            with self._change:
                if not self._stopped:  # a stopped consumer takes nothing
                    self._ready.append(result)
                    self._change.notify_all()

    def _end(self) -> None:
        """Notes that nothing more is made, and wakes the consumer. The caller holds the lock."""
        if not self._over:
            self._over = True
            atexit.unregister(self.stop)
            del self._make  # frees the user's loader, which `make` holds
        self._change.notify_all()
