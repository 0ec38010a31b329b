"""The scheduler: who runs, who waits, and the loop of rounds."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import warnings
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from .bells import wake
from .errors import CapacityError, InvalidArgumentError, QueueFullError, SpecrtError
from .locks import FairLock
from .observer import Observer

if TYPE_CHECKING:
    from .bells import Waker
    from .delivery import Delivery
    from .parts import OwnDrafter
    from .request import Request

    Result = tuple[int, list[int], Any, Any, str, _core.SequenceCounters | None, str]

__all__ = ["OVERTAKEN_AT_MOST", "Scheduler"]

OVERTAKEN_AT_MOST = 64
"""Requests of later arrival that may be admitted before one that waits, whatever their priority."""


RESERVED_TOKENS = 64
"""Of output, that there must be room for when a request is let in, so that it is not soon out."""


class Scheduler:
    """Runs requests together, a round at a time.

    Whoever waits for a request runs rounds, for everybody's; once something has been submitted to
    the background, one thread does instead. Rounds and the decoder are under `lock`; submitting
    and cancelling never wait for a round.

    Requests are admitted by rank: priority (lower first), then arrival. The first that does not fit
    holds up those behind it, and one that has been overtaken `OVERTAKEN_AT_MOST` times goes first,
    so everyone gets in. Where the KV cache runs full, the last by rank gives its blocks back and is
    computed again once there is room. The first by rank never does, so everyone ends.
    """

    def __init__(
        self,
        decoder: _core.Decoder,
        drafter: OwnDrafter | None,
        *,
        num_speculative_tokens: int,
        max_batch_size: int,
        max_queued_requests: int | None,
        preemption: bool,
        observer: Observer | None = None,
    ) -> None:
        self.lock = FairLock()
        self.decoder: _core.Decoder | None = decoder
        self.drafter: OwnDrafter | None = drafter
        self.observer = observer or Observer()
        self.num_speculative_tokens = num_speculative_tokens
        self._reserve = RESERVED_TOKENS if preemption else -1
        self._most_running = max_batch_size
        self._most_queued = max_queued_requests
        self._arrivals = 0
        self._inbox: deque[Request] = deque()
        """Submitted since the last round."""
        self._gate = threading.Lock()
        """Between those who submit."""
        self._waiting: list[Request] = []
        """By rank."""
        self._running: dict[int, Request] = {}
        self._results: deque[Result] = deque()
        """Of the last round, not delivered yet."""
        self._left: deque[Request] = deque()
        """To be cancelled: their callers have gone."""
        self._woken: list[Waker] = []
        self._inside: int | None = None
        """The thread that is inside a round."""
        self._closing = False
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._rung = False
        """Whether the thread will look at everything once more, as it has been told already."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # Submitting and waiting.

    def open_decoder(self) -> _core.Decoder:
        self.refuse_in_a_fork()
        decoder = self.decoder
        if decoder is None or self._closing:
            raise InvalidArgumentError("[engine] expected an open engine, got a closed one")
        return decoder

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait, and how many run."""
        return len(self._inbox) + len(self._waiting), len(self._running)

    def submit(self, requests: list[Request], delivery: Delivery) -> None:
        """Take requests in. Raises QueueFullError, taking none, where they are too many to wait."""
        self.open_decoder()
        with self._gate:
            self.open_decoder()
            if self._most_queued is not None:
                preempted = sum(one.preempted for one in self._waiting)
                fresh = len(self._inbox) + len(self._waiting) - preempted
                # For whom the next round has a place does not queue.
                places = max(0, self._most_running - len(self._running) - preempted)
                if fresh + len(requests) - places > self._most_queued:
                    raise QueueFullError(
                        f"[max_queued_requests] expected room for {len(requests)} more beside at "
                        f"most {self._most_queued} that wait, got {max(0, fresh - places)} waiting"
                    )
            for request in requests:
                request.arrival = self._arrivals
                self._arrivals += 1
                request.delivery = delivery
                self._tell(self.observer.queued, request)
            self._inbox.extend(requests)
        if self._closing:  # in between: perhaps nobody else will look at them
            with self.lock:
                self._end_waiting()

    def serve(self) -> None:
        """From now on a thread of the scheduler's own runs rounds. Raises CapacityError."""
        with self._gate:
            if self._thread is None and not self._closing:
                thread = threading.Thread(
                    target=_serve,
                    args=(weakref.ref(self), self._wake),
                    name="specrt-rounds",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    raise CapacityError(
                        f"[engine] expected a thread to run rounds on, got none: {error}"
                    ) from error
                weakref.finalize(self, self._wake.put, False)
                _SERVING.add(self)
                self._thread = thread
        self._ring()

    def _ring(self) -> None:
        """Make the thread look at everything that there is now. Takes no lock."""
        if not self._rung:
            self._rung = True
            self._wake.put(True)

    def wait(self, delivery: Delivery) -> None:
        """Until all of it is over, running rounds where nobody else does."""
        while not delivery.over:
            self.advance(delivery)

    def advance(self, delivery: Delivery) -> None:
        """Wait for news of it, running a round where nobody else does."""
        self.refuse_inside_a_round()
        if self._thread is None:
            self.step()
        else:
            self._ring()
            delivery.wait_for_news()

    def refuse_in_a_fork(self) -> None:
        """A forked process has none of the threads, and locks as they happened to be."""
        if os.getpid() != self._process:
            raise InvalidArgumentError(
                f"[engine] expected the process that made the engine, {self._process}, got a fork "
                f"of it, {os.getpid()}: make an engine after forking"
            )

    def refuse_inside_a_round(self) -> None:
        self.refuse_in_a_fork()
        if self._inside == threading.get_ident():
            raise InvalidArgumentError(
                "[engine] expected no call from inside a drafter or grammar, got one"
            )

    def withdraw(self, requests: Sequence[Request]) -> None:
        """Cancel what is not done. Waits for nothing: a round under way comes first."""
        if os.getpid() != self._process:
            return
        self.abandon(requests)
        self._settle()

    def abandon(self, requests: Sequence[Request]) -> None:
        """Leave word that they are to be cancelled; takes no lock, so that the collector may."""
        left = [one for one in requests if not one.done]
        self._left.extend(left)
        if left and self._thread is not None:
            self._ring()

    def close(self) -> None:
        """End everything. Results of a round that was run are delivered first."""
        if os.getpid() != self._process:
            return  # its parent's
        self.refuse_inside_a_round()
        self._closing = True
        with self.lock:
            if self.decoder is not None:
                self._deliver_results(self.decoder)
                for request in list(self._running.values()):
                    self._end(request, SpecrtError("[engine] closed while the request was running"))
                self._end_waiting()
                self.decoder = None
                self.drafter = None
        if self._thread is not None:
            self._wake.put(False)
            self._thread.join()

    @contextlib.contextmanager
    def between_rounds(self) -> Iterator[_core.Decoder]:
        """The decoder, while no round is under way."""
        self.refuse_in_a_fork()
        try:
            with self.lock:
                yield self.open_decoder()
        finally:
            self._settle()

    # Rounds.

    def step(self) -> None:
        """One round for everything that runs, whoever asked for it."""
        with self.lock:
            me = threading.get_ident()
            if self._inside == me:
                self.refuse_inside_a_round()
            decoder = self.decoder
            if decoder is None or self._closing:
                return
            self._inside = me
            try:
                if not self._results:
                    if self._inbox or self._waiting:
                        self._admit(decoder)
                    if self._running:
                        self._run_round(decoder)
                # What an interrupt leaves here is delivered by the next step.
                self._deliver_results(decoder)
            finally:
                self._inside = None
                if self._left:
                    self._cancel_left()
                if self._woken:  # also where the round was lost
                    self._wake_readers()
        if self._left:
            self._settle()

    def _run_round(self, decoder: _core.Decoder) -> None:
        began = time.monotonic()
        try:
            while (done := decoder.policy_round(self.num_speculative_tokens)) is None:
                # The pool lacks blocks for it: the last by rank give theirs back.
                self._preempt(decoder, max(self._running.values(), key=_rank))
            plan, results = done
            self._results.extend(results)
        except BaseException as error:
            self._fail_running(decoder, error)
            raise
        self._tell(self.observer.round, plan, results, time.monotonic() - began)

    def _preempt(self, decoder: _core.Decoder, request: Request) -> None:
        assert request.id is not None
        try:
            decoder.preempt(request.id)
        except Exception as error:  # its drafter's
            self._drop(decoder, request)
            self._end(request, _as_own(error))
            return
        del self._running[request.id]
        request.preempted = True
        request.preemptions += 1
        insort(self._waiting, request, key=_rank)
        self._tell(self.observer.preempted, request)

    def _fail_running(self, decoder: _core.Decoder, error: BaseException) -> None:
        """A round whose results were lost, to Ctrl-C say: whoever was in it would have a gap."""
        for request in list(self._running.values()):
            self._drop(decoder, request)
            self._end(request, SpecrtError(f"[engine] a round was lost: {type(error).__name__}"))

    def _drop(self, decoder: _core.Decoder, request: Request) -> _core.SequenceCounters | None:
        """End its sequence; None where the core has ended it already."""
        assert request.id is not None
        with contextlib.suppress(InvalidArgumentError):
            return decoder.cancel(request.id)
        return None

    # Who gets in.

    def _take_in(self) -> None:
        while self._inbox:  # to which others append meanwhile
            insort(self._waiting, self._inbox.popleft(), key=_rank)

    def _admit(self, decoder: _core.Decoder) -> None:
        self._take_in()
        place = 0
        while place < len(self._waiting):
            request = self._waiting[place]
            if not request.may_start:
                place += 1  # it waits for its own first sample, others need not
                continue
            if not self._fits(decoder, request):
                break
            del self._waiting[place]
            try:
                self._enter(decoder, request)
            except BaseException:  # Ctrl-C, say: whoever did not get in waits on
                if request.id not in self._running and not request.done:
                    self._wait_on(decoder, request, place)
                raise
            self._note_overtaken(request)

    def _wait_on(self, decoder: _core.Decoder, request: Request, place: int) -> None:
        if request.preempted:
            assert request.id is not None
            try:
                decoder.can_resume(request.id, self._reserve)
            except InvalidArgumentError:  # it has got in, which nobody has noted yet
                self._running[request.id] = request
                request.preempted = False
                return
        self._waiting.insert(place, request)

    def _fits(self, decoder: _core.Decoder, request: Request) -> bool:
        if request.preempted:
            assert request.id is not None
            return decoder.can_resume(request.id, self._reserve)
        most = request.params.max_tokens
        assert most is not None  # Intake's have one
        return decoder.can_add(len(request.prompt), most, self._reserve)

    def _enter(self, decoder: _core.Decoder, request: Request) -> None:
        try:
            if request.preempted:
                assert request.id is not None
                decoder.resume(request.id, self._reserve)
            else:
                request.id = self._add(decoder, request)
                request.admitted = time.monotonic()
        except Exception as error:  # whosever it is, a drafter's say: others have no part in it
            if request.preempted:
                self._drop(decoder, request)
            self._end(request, _as_own(error))
            return
        self._running[request.id] = request
        request.preempted = False
        self._tell(self.observer.admitted, request)

    def _add(self, decoder: _core.Decoder, request: Request) -> int:
        constraint = None
        if request.constraint is not None:
            constraint = _core.make_python_constraint(request.constraint)
        drafter = None
        if self.drafter is not None and request.core_params.drafts:
            drafter = self.drafter.for_request()
        return decoder.add(
            request.prompt,
            request.core_params,
            drafter,
            constraint,
            self._reserve,
            max(0.0, time.monotonic() - request.arrived),
        )

    def _note_overtaken(self, admitted: Request) -> None:
        if not self._waiting or self._waiting[-1].priority <= admitted.priority:
            return  # none of those behind it came before it
        late = False
        for request in self._waiting:
            if request.arrival < admitted.arrival:
                request.overtaken += 1
                late = late or request.overtaken == OVERTAKEN_AT_MOST
        if late:
            self._waiting.sort(key=_rank)

    # What comes out.

    def _deliver_results(self, decoder: _core.Decoder) -> None:
        now = time.monotonic()
        results, running, woken = self._results, self._running, self._woken
        result: Result | None = None
        try:
            while results:
                result = results[0]
                sequence, tokens, logprobs, prompt_logprobs, finish, _, error = result
                request = running.get(sequence)
                if request is None:
                    pass
                elif finish or error or prompt_logprobs or request.looks_for_stops:
                    self._deliver(decoder, request, now, result)
                elif tokens:  # most of them
                    request.feed(now, tokens, logprobs)
                    if request.delivery is not None:
                        request.delivery.put(request, woken)
                results.popleft()
        except BaseException as caught:  # the others' are delivered by the next step
            if results and results[0] is result:
                results.popleft()
                if (request := running.get(result[0])) is not None:
                    self._fail(decoder, request, caught)
            raise

    def _deliver(
        self, decoder: _core.Decoder, request: Request, now: float, result: Result
    ) -> None:
        """A round that ends the request, or may."""
        sequence, tokens, logprobs, prompt_logprobs, finish, counters, error = result
        if error:
            self._end(request, request.failure(error))
            return
        try:
            if prompt_logprobs is not None:
                request.transcript.add_prompt(request.prompt, prompt_logprobs)
            if tokens:
                request.feed(now, tokens, logprobs)
            if tokens and request.looks_for_stops:
                cut = request.transcript.find_stop(finish)
                if cut >= 0:
                    # It ends before the core would have ended it, or in the same round.
                    counters = decoder.stop(sequence, cut)
                    finish = "stop"
            if finish:
                request.end(finish, counters, told=not tokens)
                self._end(request)
            elif tokens and request.delivery is not None:
                request.delivery.put(request, self._woken)
        except Exception as caught:  # a tokenizer's, say: it ends this request and no other
            self._fail(decoder, request, caught)

    def _fail(self, decoder: _core.Decoder, request: Request, caught: BaseException) -> None:
        self._drop(decoder, request)
        self._end(request, SpecrtError(f"[output] {type(caught).__name__}: {caught}"))

    def _end(self, request: Request, error: SpecrtError | None = None) -> None:
        """It is over, with its finish reason or with an error: nothing else comes of it."""
        if request.finished is not None:
            return
        if request.id is not None:
            self._running.pop(request.id, None)
        if error is not None:
            request.error = error
        request.finished = time.monotonic()
        try:
            self._tell(self.observer.finished, request)
        finally:  # an interrupt may come here, too
            if request.delivery is not None:
                if error is None:
                    request.delivery.put(request, self._woken)
                request.delivery.end_one(self._woken)

    def _wake_readers(self) -> None:
        wake(self._woken)
        self._woken.clear()

    def _end_waiting(self) -> None:
        self._take_in()
        for request in self._waiting:
            self._end(request, SpecrtError("[engine] closed while the request was waiting"))
        self._waiting.clear()
        self._wake_readers()

    # Who leaves early.

    def _settle(self) -> None:
        """Cancel those that left, unless somebody holds the lock, who will once done with it.

        This thread may be that somebody: the collector ends generators wherever it comes.
        """
        while self._left and not self.lock.held() and self.lock.try_enter():
            try:
                self._cancel_left()
            finally:
                self.lock.__exit__()

    def _cancel_left(self) -> None:
        while self._left:
            request = self._left.popleft()
            if request.done:
                continue
            counters = None
            if request.id is not None and self.decoder is not None:
                counters = self._drop(self.decoder, request)
            self._take_in()
            if request in self._waiting:
                self._waiting.remove(request)
            request.end("abort", counters, told=True)
            self._end(request, request.transcript.error)
        self._wake_readers()

    # The thread.

    def _run_until_idle(self) -> None:
        self._rung = False  # whoever rings from here on may have come too late for what follows
        while not self._closing and (
            self._inbox or self._waiting or self._running or self._results or self._left
        ):
            try:
                self.step()
            except BaseException as error:  # its requests have been told; the thread goes on
                _warn(f"a round ended in {type(error).__name__}: {error}")

    def _tell(self, hook: Callable[..., None], *what: Any) -> None:
        try:
            hook(*what)
        except Exception as error:
            _warn(f"an observer raised {type(error).__name__}: {error}")


def _as_own(error: Exception) -> SpecrtError:
    if isinstance(error, SpecrtError):
        return error
    return SpecrtError(f"[engine] {type(error).__name__}: {error}")


def _warn(text: str) -> None:
    with contextlib.suppress(Exception):  # made an error by a filter; it has nowhere to go
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _rank(request: Request) -> tuple[bool, int, int]:
    """Whose turn it is: the smallest."""
    return (request.overtaken < OVERTAKEN_AT_MOST, request.priority, request.arrival)


_SERVING: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that is inside the core when the interpreter goes would not survive it.
    for scheduler in list(_SERVING):
        scheduler.close()


def _serve(reference: weakref.ref[Scheduler], wake_up: queue.SimpleQueue[bool]) -> None:
    # Between requests the thread does not keep the engine alive.
    while wake_up.get():
        scheduler = reference()
        if scheduler is None:
            return
        scheduler._run_until_idle()
        del scheduler
