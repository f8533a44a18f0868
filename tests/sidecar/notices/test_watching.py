"""What notices come to: orders that are given once, and taken back by the word of who gave them alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from midstream.session.errors import ConfigError
from midstream.sidecar.config import Drain, Fleet
from midstream.sidecar.notices.contract import Notice, NoticeError, Source, Tell
from midstream.sidecar.notices.opening import open_sources
from midstream.sidecar.notices.watching import Watching


class Spoken:
    """A source that says what a test has it say; an error ends its following."""

    def __init__(self, name: str = "aws") -> None:
        self.name = name
        self.words: asyncio.Queue[Notice | Exception | None] = asyncio.Queue()

    async def follow(self, tell: Tell) -> None:
        while True:
            word = await self.words.get()
            if isinstance(word, Exception):
                raise word
            tell(word)

    async def say(self, word: Notice | Exception | None) -> None:
        self.words.put_nowait(word)
        await asyncio.sleep(0.02)


@asynccontextmanager
async def watched(*sources: Source) -> AsyncIterator[tuple[list[str], Watching]]:
    """What comes of them: `+reason` an order, `-reason` its end."""
    log: list[str] = []
    watching = Watching(
        sources, lambda r: log.append("+" + r), lambda r: log.append("-" + r), lead_s=60, draw=lambda: 0.0
    )
    running = asyncio.create_task(watching.run())
    try:
        yield log, watching
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_notice_is_an_order_once_and_its_end_takes_it_back() -> None:
    aws = Spoken()
    async with watched(aws) as (log, _):
        for word in (None, Notice("spot"), Notice("spot"), None, None, Notice("spot")):
            await aws.say(word)
        assert log == ["+notice:aws", "-notice:aws", "+notice:aws"]


async def test_a_notice_for_later_waits_until_it_is_near() -> None:
    aws = Spoken()
    async with watched(aws) as (log, _):
        await aws.say(Notice("reboot", 86_400))
        assert log == []
        await aws.say(Notice("reboot", 59))
        assert log == ["+notice:aws"]


async def test_a_source_that_fails_takes_nothing_back_and_holds_up_no_other() -> None:
    aws, kubernetes = Spoken(), Spoken("kubernetes")
    async with watched(aws, kubernetes) as (log, watching):
        await aws.say(Notice("spot"))
        for error in (NoticeError("it does not answer"), RuntimeError("a defect")):
            await aws.say(error)
        assert watching.answers["aws"] is False
        await kubernetes.say(Notice("cordoned"))
        assert log == ["+notice:aws", "+notice:kubernetes"]


def test_settings_name_sources_or_say_what_is_wrong() -> None:
    assert open_sources(Drain(), Fleet()) == []
    assert [source.name for source in open_sources(Drain(notices="aws,gcp,azure"), Fleet())] == ["aws", "gcp", "azure"]
    with pytest.raises(ConfigError, match="none of kubernetes"):
        open_sources(Drain(notices="clouds"), Fleet())
    with pytest.raises(ConfigError, match=r"drain\.kubernetes_node"):
        open_sources(Drain(notices="kubernetes"), Fleet())
