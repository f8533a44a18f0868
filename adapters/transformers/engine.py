"""The decode loop: sessions in turn, one forward of one session at a time.

Owns the order of things in a step: block table, forward, sample, journal, hand over. Invariants:
* a session's tokens depend on nothing but the session (batch-invariant by construction: there is no batch);
* a token is journaled before anybody else can see it;
* blocks have one owner, and what another process may still be writing into is nobody's until that has passed.

One thread does all of it; the asyncio side submits jobs, takes pieces and closes. No torch here: the
model comes in as a `Runner`, the sampler as a factory.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...session.arena import Counter, LoadState
from ...session.marker import KvSource, Resume
from ..prompt import prompt_hash
from .adopt import Reservations
from .extents import Extents, Run
from .fields import RequestError
from .job import Job, Limits, Phase, Runner, SamplerLike, Session
from .outbox import Outbox
from .output import Finish, Output, Piece
from .recording import Record, Recorder

CHUNK_TOKENS = 512
# The mover may still be writing for a restore that was given up: its blocks rest until it has answered, at most this.
QUARANTINE_S = 120.0
# A sidecar that asked for quiet and died must not leave the engine still.
QUIET_S = 60.0
FAILURES_MAX = 3
_POLL_LOAD_S = 0.001
_IDLE_S = 0.5
_QUIET_POLL_S = 0.05

log = logging.getLogger("midstream.transformers")


class Engine:
    """Decodes all sessions of one model."""

    def __init__(
        self,
        runner: Runner,
        extents: Extents,
        limits: Limits,
        *,
        make_sampler: Callable[[Job], SamplerLike],
        make_output: Callable[[Job], Output],
        recorder: Recorder,
        reservations: Reservations,
        prepare_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._extents = extents
        self._limits = limits
        self._make_sampler = make_sampler
        self._make_output = make_output
        self._recorder = recorder
        self._reservations = reservations
        self._prepare_thread = prepare_thread
        self._clock = clock
        self._wake = threading.Condition()
        self._submitted: deque[Session] = deque()
        self._closing: deque[Session] = deque()
        self._open_count = 0
        self._waiting_count = 0
        self._failures = 0
        self._stopping = False
        self._aborting = False
        self._quiet_until_s = 0.0
        self._is_quiet = threading.Event()
        # Resumed sessions go before new ones: somebody is in the middle of reading them.
        self._resumed: deque[Session] = deque()
        self._fresh: deque[Session] = deque()
        self._active: list[Session] = []
        self._quarantine: list[tuple[float, Run, Record]] = []
        self._final = False
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    # The asyncio side.

    def start(self) -> None:
        """Start the decode thread."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the decode thread runs and its forwards succeed."""
        return self._thread.is_alive() and not self._dead and self._failures < FAILURES_MAX

    @property
    def open_count(self) -> int:
        """Sessions that were submitted and not closed yet."""
        return self._open_count

    def blocks_for(self, prompt_len: int, max_tokens: int) -> int:
        """Blocks that a session may need in all."""
        return -(-(prompt_len + max_tokens) // self._limits.block_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Positions that fit into the pool if one session has all of it."""
        return self._extents.block_count * self._limits.block_tokens

    def submit(self, job: Job) -> Session:
        """Take a job in; call from a coroutine. RequestError when it can never fit or too many wait."""
        needed = self.blocks_for(len(job.prompt_ids), job.max_tokens)
        if needed > self._extents.block_count:
            raise RequestError(
                f"{len(job.prompt_ids)} prompt tokens and max_tokens {job.max_tokens} need {needed} blocks of "
                f"KV memory, the pool has {self._extents.block_count} (of {self._limits.block_tokens} tokens); "
                "ask for fewer tokens or start the engine with more --kv-cache-bytes",
                param="max_tokens",
            )
        session = Session(
            job,
            Outbox(asyncio.get_running_loop(), self._notify),
            self._make_output(job),
            self._make_sampler(job),
            list(job.prompt_ids),
        )
        with self._wake:
            if self._dead:
                raise RequestError("the decode loop has failed; send this to another engine", status=503)
            if self._waiting_count >= self._limits.waiting_max:
                raise RequestError(
                    f"{self._waiting_count} requests are waiting, which is the limit; try again later",
                    status=429,
                    retry_after_s=1,
                )
            self._waiting_count += 1
            self._open_count += 1
            self._submitted.append(session)
            self._wake.notify()
        return session

    def close(self, session: Session) -> None:
        """The client has everything, or is gone: free what the session holds. Calling it again does nothing."""
        with self._wake:
            if session.closed:
                return
            session.closed = True
            self._open_count -= 1
            self._closing.append(session)
            self._wake.notify()

    def abort_all(self) -> None:
        """End every stream in good order, with finish reason `abort`: the process is about to exit.

        From then on no block changes its owner and every record stays, so that the sessions can be taken up elsewhere.
        """
        with self._wake:
            self._aborting = True
            self._wake.notify()

    def quiesce(self) -> bool:
        """Stop at a step's end, for QUIET_S unless asked again: no step, and no block changes its owner; blocks.

        False when the step under way does not end in time.
        """
        with self._wake:
            self._is_quiet.clear()
            self._quiet_until_s = self._clock() + QUIET_S
            self._wake.notify()
        return self._is_quiet.wait(QUIET_S / 2)

    def unquiesce(self) -> None:
        """Go on."""
        with self._wake:
            self._quiet_until_s = 0.0
            self._wake.notify()

    def stop(self) -> None:
        """End the decode thread after its step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=30.0)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # The decode thread.

    def _run(self) -> None:
        try:
            self._prepare_thread()
            self._loop()
        except Exception:
            # Nobody is left to decode: every client is told, and health says so.
            log.exception("event=decode_loop_failed")
            self._dead = self._final = True
            for session in [*self._active, *self._resumed, *self._fresh, *self._submitted]:
                self._fail(session, "the engine's decode loop failed; the request can be sent to another")

    def _loop(self) -> None:
        while True:
            with self._wake:
                if self._stopping:
                    return
                quiet = self._clock() < self._quiet_until_s and not self._aborting
                if not quiet:
                    submitted, self._submitted = self._submitted, deque()
                    closing, self._closing = self._closing, deque()
                    aborting, self._aborting = self._aborting, False
            if quiet:
                self._is_quiet.set()
                self._rest(_QUIET_POLL_S)
                continue
            for session in submitted:
                (self._fresh if session.resume is None else self._resumed).append(session)
            for session in closing:
                self._free(session)
            if aborting:
                self._abort_every()
            if not self.turn():
                loading = any(s.phase is Phase.LOADING for s in self._active)
                self._rest(_POLL_LOAD_S if loading else _IDLE_S)

    def _rest(self, limit_s: float) -> None:
        with self._wake:
            quiet = self._clock() < self._quiet_until_s
            if self._stopping or self._aborting or (not quiet and (self._submitted or self._closing)):
                return
            self._wake.wait(limit_s)

    def turn(self) -> bool:
        """One step of every session that can have one; False when there was none."""
        now_s = self._clock()
        for run in self._reservations.returned(now_s):
            self._extents.give(run)
        self._end_quarantine(now_s)
        if not self._final:
            self._admit()
        progressed = False
        for session in list(self._active):
            if session.closed:
                continue
            if session.phase is Phase.LOADING:
                progressed |= self._poll_load(session)
            elif not session.outbox.full:
                with self._failing_alone(session):
                    self._step(session)
                progressed = True
        return progressed

    def _admit(self) -> None:
        """Let waiting sessions in, oldest first, as long as there is a place and a run of blocks for the next one."""
        while len(self._active) < self._limits.sessions_max:
            queue = self._resumed or self._fresh
            if not queue:
                return
            session = queue[0]
            covered = self._place(session)
            if session.run is None:
                return
            queue.popleft()
            with self._wake:
                self._waiting_count -= 1
            self._active.append(session)
            with self._failing_alone(session):
                self._begin(session, covered)

    def _place(self, session: Session) -> int:
        """Give a session its run, if there is one; returns how many of its positions hold valid KV already."""
        needed = self.blocks_for(len(session.job.prompt_ids), session.job.max_tokens)
        resume, marker = session.resume, session.job.marker
        if marker is not None and not session.cold:
            if (
                resume is not None
                and resume.kv is KvSource.HELD
                and self._reservations.peek(marker.session) is not None
            ):
                # The mover copies out of the reserved blocks: nobody may compute into them before it has answered.
                session.run = self._extents.take(needed)
                if session.run is not None:
                    return 0
                session.source_lost = True
            reservation = self._reservations.take(marker.session)
            if reservation is not None:
                covered = 0
                if resume is not None and resume.kv is KvSource.IN_PLACE and resume.prompt_hash == self._hash(session):
                    covered = reservation.positions_for(len(session.job.prompt_ids), resume.prompt_hash, resume.outputs)
                if covered and reservation.run.count >= needed:
                    session.run = reservation.run
                    return covered
                self._extents.give(reservation.run)
        session.run = self._extents.take(needed)
        return 0

    def _begin(self, session: Session, covered: int) -> None:
        """Record the session, replay what it had said, and find out where its KV comes from."""
        assert session.run is not None
        resume = session.resume
        outputs = () if resume is None else resume.outputs
        if not session.begun:
            session.begun = True
            marker = session.job.marker
            if marker is not None:
                session.record = self._recorder.admit(
                    marker.session, marker.generation, len(session.job.prompt_ids), self._hash(session), outputs
                )
            session.ids.extend(outputs)
            session.resumed_len = len(session.ids) if outputs else 0
        session.record.blocks(session.run.blocks)
        session.cache = self._runner.cache(session.run)
        session.phase = Phase.RUNNING
        if outputs and session.output.count == 0:
            for token in outputs:
                session.sampler.observe(token)
            self._hand_over(session, session.output.replay(outputs))
        if not outputs or resume is None or session.cold or session.phase is Phase.ENDED:
            return
        if covered:
            self._loaded(session, covered)
        elif resume.kv is KvSource.NONE:
            self._not_loaded(session, LoadState.NONE)
        elif resume.kv is KvSource.IN_PLACE:
            self._recorder.count(Counter.RESERVATIONS_LOST)
            self._not_loaded(session, LoadState.FAILED)
        elif not self._can_load(session, resume):
            self._not_loaded(session, LoadState.FAILED)
        else:
            session.phase = Phase.LOADING
            session.load_until_s = self._clock() + self._limits.load_timeout_s
            session.record.report(LoadState.WAITING, 0, 0)

    def _can_load(self, session: Session, resume: Resume) -> bool:
        if session.source_lost or not self._limits.can_load:
            return False
        return session.record.alive and resume.prompt_hash == self._hash(session)

    def _poll_load(self, session: Session) -> bool:
        """Look for the mover's answer; False while there is none."""
        state, positions = session.record.inbox()
        if state is LoadState.DONE and positions > 0:
            session.phase = Phase.RUNNING
            self._loaded(session, min(positions, len(session.ids) - 1))
            return True
        if state in (LoadState.DONE, LoadState.FAILED) and session.record.alive:
            # The mover has let go of the blocks, so they can be computed into.
            session.phase = Phase.RUNNING
            self._not_loaded(session, LoadState.FAILED)
            return True
        if session.record.alive and self._clock() < session.load_until_s:
            return False
        self._recorder.count(Counter.LOADS_TIMED_OUT)
        self._not_loaded(session, LoadState.FAILED)
        self._rest_run(session)
        self._active.remove(session)
        session.phase, session.cold = Phase.QUEUED, True
        with self._wake:
            self._waiting_count += 1
        self._resumed.appendleft(session)
        return True

    def _loaded(self, session: Session, positions: int) -> None:
        """Go on behind `positions`. It is reported with the first new token, when what was computed again is known."""
        session.kv_len = session.loaded = positions
        session.load = LoadState.DONE
        self._source_is_done(session)
        log.info("event=resumed session=%s loaded=%d of=%d", session.job.name, positions, len(session.ids) - 1)

    def _not_loaded(self, session: Session, load: LoadState) -> None:
        """Compute everything again. Reported at once: whoever still copies for this session has to stop."""
        session.kv_len = session.loaded = 0
        session.load = load
        session.record.report(load, 0, 0)
        self._source_is_done(session)
        log.info("event=recomputing session=%s positions=%d", session.job.name, len(session.ids))

    def _source_is_done(self, session: Session) -> None:
        """Nothing of the session's is read any more from blocks that the engine before has left here."""
        if session.job.marker is not None:
            self._reservations.give_up(session.job.marker.session)

    @contextmanager
    def _failing_alone(self, session: Session) -> Iterator[None]:
        """One session's failure is its own: its stream ends with an error and the others go on."""
        try:
            yield
        except Exception as error:
            log.exception("event=session_failed session=%s", session.job.name)
            self._fail(session, f"the engine failed on this request: {error!r:.300}")

    def _fail(self, session: Session, text: str) -> None:
        session.output.finish = Finish.ERROR
        self._hand_over(session, Piece((), "", Finish.ERROR, error=text))

    def _step(self, session: Session) -> None:
        """Compute the next chunk; when it reaches the end, choose a token, journal it, hand it over."""
        total = len(session.ids)
        end = chunk_end(session.kv_len, total)
        # Counted here and nowhere else: a model that cannot compute any more is the engine's fault, not a request's.
        self._failures += 1
        logits = self._runner.forward(session.ids[session.kv_len : end], session.kv_len, session.cache)
        self._failures = 0
        session.kv_len = end
        if end < total:
            return
        token, logprobs = session.sampler.sample(logits, session.output.count)
        if session.resumed_len:
            session.record.report(session.load, session.loaded, session.resumed_len - session.loaded)
            session.resumed_len = 0
        session.record.token(token)
        session.ids.append(token)
        session.sampler.observe(token)
        self._hand_over(session, session.output.push(token, logprobs))

    def _hand_over(self, session: Session, piece: Piece) -> None:
        """Give the front end a piece; an ending leaves the session with its blocks until it is closed."""
        if piece.finish is not None:
            session.phase = Phase.ENDED
            if session in self._active:
                self._active.remove(session)
        session.outbox.put(piece)

    def _abort_every(self) -> None:
        self._final = True
        for session in [*self._active, *self._resumed, *self._fresh]:
            self._hand_over(session, Piece((), session.output.abort(), Finish.ABORT))
        with self._wake:
            self._waiting_count -= len(self._resumed) + len(self._fresh)
        self._resumed.clear()
        self._fresh.clear()

    def _free(self, session: Session) -> None:
        """Let go of everything that a closed session holds."""
        if self._final:
            return
        for queue in (self._resumed, self._fresh):
            if session in queue:
                queue.remove(session)
                with self._wake:
                    self._waiting_count -= 1
        if session in self._active:
            self._active.remove(session)
        finish = session.output.finish or Finish.ABORT
        session.record.end(finish.value)
        if session.run is None:
            return
        if session.phase is Phase.LOADING:
            self._rest_run(session)
            self._source_is_done(session)
        else:
            self._extents.give(session.run)
            session.run = None
        session.phase, session.cache = Phase.ENDED, None

    def _rest_run(self, session: Session) -> None:
        """Set a session's blocks aside: a restore may still be writing to them."""
        assert session.run is not None
        self._quarantine.append((self._clock() + QUARANTINE_S, session.run, session.record))
        session.run, session.cache = None, None

    def _end_quarantine(self, now_s: float) -> None:
        resting = []
        for until_s, run, record in self._quarantine:
            if now_s >= until_s or record.answered:
                self._extents.give(run)
            else:
                resting.append((until_s, run, record))
        self._quarantine = resting

    def _hash(self, session: Session) -> str:
        return prompt_hash(session.job.prompt_ids)


def chunk_end(start: int, total: int) -> int:
    """Where the forward that begins at `start` ends, of `total` positions: at the next fixed border at the latest.

    Borders are multiples of CHUNK_TOKENS whatever the load is, so the same prompt is always computed the same way.
    """
    return min((start // CHUNK_TOKENS + 1) * CHUNK_TOKENS, total)
