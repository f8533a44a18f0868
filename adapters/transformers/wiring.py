"""Everything wired together: model, pool and who keeps it, arena, engine, HTTP, signals.

Owns the order of a start: whatever can be wrong is found before the port answers, so a server that answers is one that
serves. What belongs to snapshots (arena, holder, the old pool) never keeps it from serving.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from aiohttp import web

from ...session.arena_writer import ArenaWriter
from ...session.errors import EngineError, LifelineError, MidstreamError
from ...session.layout import PoolLayout
from ...session.lifeline import hold_lifeline, lifeline_of
from ..alive import told_processes
from .adopt import OldPool, Reservations
from .api import Api, Served
from .engine import Engine
from .extents import Extents
from .identity import compatibility_key
from .job import Job, Limits
from .kv import KvPool
from .model import Model
from .output import Output
from .placement import PlacedPool, Placement, Surroundings
from .recording import Recorder
from .sampling import Sampler, seed_of_session
from .text import Text

FACTS_VERSION = 1
# Numeric kernels may round differently on memory of another alignment, and a session can lie at any block.
ALIGNMENT_BYTES = 64
POOL_BYTES_MAX = 4 * 1024**3
LAST_WORDS_S = 3.0

log = logging.getLogger("midstream.transformers")


class PooledModel:
    """The engine's Runner: the model over the pool."""

    def __init__(self, model: Model, pool: KvPool) -> None:
        self.forward = model.forward
        self.cache = pool.cache


def _without_lifeline(error: LifelineError) -> None:
    log.warning("event=no_lifeline reason=%s effect=its_death_is_told_later", error)


class Server:
    """One engine process."""

    def __init__(self, args: argparse.Namespace, listener: socket.socket) -> None:
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(args.threads)
        self._args = args
        self._around = Surroundings.of_environment()
        self._listener = listener
        folder = Path(args.model)
        self._model = Model(folder, dtype=args.dtype, device=args.device)
        self._text = Text(folder)
        layout = self._layout()
        key = compatibility_key(
            folder=folder,
            model=self._model,
            layout_fingerprint=layout.fingerprint(),
            block_tokens=args.block_tokens,
            threads=args.threads,
            dtype=args.dtype,
        )
        placed = Placement(self._around, self._model, layout, key).place()
        self._extents = Extents(layout.block_count)
        self._reservations = self._reserved(placed.old)
        arena = self._open_arena()
        self._recorder = Recorder(arena)
        self._publish(arena, placed, key)
        if self._around.arena is not None:
            hold_lifeline(lifeline_of(self._around.arena), "server", on_failure=_without_lifeline)
        self._engine = self._make_engine(placed)
        self._served = Served(
            args.served_model_name or folder.name,
            transformers.__version__,
            int(time.time()),
            self._model.context_tokens,
            self._model.vocab_size,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then finish what runs, within `--grace-seconds`; a second signal ends it."""
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        at_once = asyncio.Event()

        def on_signal() -> None:
            (at_once if asked.is_set() else asked).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        api = Api(self._engine, self._text, self._served, self._reservations)
        runner = web.AppRunner(
            api.application(), handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S
        )
        await runner.setup()
        self._engine.start()
        host, port = self._listener.getsockname()[:2]
        try:
            await web.SockSite(runner, self._listener, backlog=1024).start()
        except OSError as error:
            # Somebody else began to listen while the model was loaded.
            raise EngineError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        log.info("event=ready model=%s host=%s port=%d pid=%d", self._served.name, host, port, os.getpid())
        await asked.wait()
        api.draining = True
        log.info("event=draining sessions=%d grace_s=%g", self._engine.open_count, self._args.grace_seconds)
        await self._until_idle(self._args.grace_seconds, at_once)
        self._engine.abort_all()
        await self._until_idle(LAST_WORDS_S, at_once)
        await runner.cleanup()
        self._engine.stop()
        self._text.close()
        self._recorder.close()
        log.info("event=stopped")

    async def _until_idle(self, limit_s: float, at_once: asyncio.Event) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._engine.open_count and time.monotonic() < deadline_s and not at_once.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(at_once.wait(), 0.02)

    def _layout(self) -> PoolLayout:
        block_bytes = self._args.block_tokens * self._model.kv_shape.token_bytes
        size_bytes = self._args.kv_cache_bytes or self._default_pool_bytes()
        if self._args.block_tokens * self._model.kv_shape.plane_token_bytes % ALIGNMENT_BYTES:
            raise EngineError(
                f"--block-tokens {self._args.block_tokens}: a block's part in a plane must be a multiple of "
                f"{ALIGNMENT_BYTES} bytes, one position has {self._model.kv_shape.plane_token_bytes}; use 16 or 32"
            )
        count = size_bytes // block_bytes
        if count < 1:
            raise EngineError(
                f"--kv-cache-bytes {size_bytes} is below one block of {block_bytes} bytes; give more memory"
            )
        return self._model.kv_shape.layout(count, self._args.block_tokens)

    def _default_pool_bytes(self) -> int:
        """Room for every session at full length, as far as a quarter of the memory and POOL_BYTES_MAX allow."""
        if self._model.device.type == "cuda":
            memory = torch.cuda.mem_get_info(self._model.device)[0]
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        wanted = self._args.max_sessions * self._model.context_tokens * self._model.kv_shape.token_bytes
        return min(wanted, memory // 4, POOL_BYTES_MAX)

    def _reserved(self, old: OldPool | None) -> Reservations:
        """Keep the old sessions' blocks out of the free ones."""
        if old is None:
            return Reservations()
        kept = tuple(r for r in old.reservations if self._extents.reserve(r.run))
        log.info("event=adopted pool=%s sessions=%d of=%d", old.name, len(kept), len(old.reservations))
        return Reservations(kept, now_s=time.monotonic(), arena=self._around.adopt)

    def _open_arena(self) -> ArenaWriter | None:
        if self._around.arena is None:
            return None
        try:
            return ArenaWriter.open(self._around.arena)
        except MidstreamError as error:
            log.warning("event=no_arena reason=%s effect=serving_without_snapshots", error)
            return None

    def _publish(self, arena: ArenaWriter | None, placed: PlacedPool, key: dict[str, Any]) -> None:
        facts = {
            "v": FACTS_VERSION,
            "engine": "transformers",
            "engine_version": transformers.__version__,
            "pid": os.getpid(),
            **told_processes(),
            "key": key,
            "pools": list(placed.names),
            "adopted": placed.old is not None,
            "block_tokens": self._args.block_tokens,
            "max_sessions": self._args.max_sessions,
            "capabilities": {
                "held": bool(placed.names),
                "in_place": bool(placed.names),
                "disk": bool(placed.names),
                "seedless_resume": True,
                "batch_invariant": True,
            },
        }
        if arena is not None:
            try:
                arena.publish(facts)
            except Exception as error:
                self._recorder.failed("publish", error)

    def _make_engine(self, placed: PlacedPool) -> Engine:
        args, model = self._args, self._model

        def make_sampler(job: Job) -> Sampler:
            seed = seed_of_session(job.params.seed, job.name)
            return Sampler(job.params, seed, job.prompt_ids, model.vocab_size, model.eos_ids)

        def make_output(job: Job) -> Output:
            decode = self._text.decoder(skip_special_tokens=job.params.skip_special_tokens)
            return Output(job.params, job.max_tokens, model.eos_ids, decode, job.prompt_ids)

        return Engine(
            PooledModel(model, placed.pool),
            self._extents,
            Limits(
                args.block_tokens,
                args.max_sessions,
                args.max_waiting,
                self._around.load_timeout_s,
                can_load=bool(placed.names),
            ),
            make_sampler=make_sampler,
            make_output=make_output,
            recorder=self._recorder,
            reservations=self._reservations,
            # OpenMP counts threads for each thread that uses it, so the decode thread has to be told as well.
            prepare_thread=lambda: torch.set_num_threads(args.threads),
        )
