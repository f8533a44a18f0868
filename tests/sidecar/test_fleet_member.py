"""A node that is a member of its fleet while it runs."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from midstream.proxy.fleet import Unproven
from midstream.proxy.headers import FLEET
from midstream.session.errors import ConfigError, CoordinationError
from midstream.sidecar import fleet_member
from midstream.sidecar.config import Fleet, Settings
from midstream.sidecar.fleet.coordination import Membership
from midstream.sidecar.fleet.local import LocalCoordination
from midstream.sidecar.fleet.record import Readiness, Record, Role
from midstream.sidecar.fleet_access import believer_of, node_url, prover_of
from midstream.sidecar.fleet_member import as_member, standing_of, stay
from midstream.sidecar.fleet_standing import Standing

READY = Record("a", Role.NODE, "http://a:1", readiness=Readiness.READY, slot_count=8)


class Node:
    record = READY

    def now(self) -> Record:
        return self.record


async def readiness(fleet: LocalCoordination) -> list[str]:
    async for picture in fleet.watch():
        return [member.record.readiness.value for member in picture.members.values()]
    return []


async def models(fleet: LocalCoordination) -> tuple[str, ...]:
    async for picture in fleet.watch():
        [member] = picture.members.values()
        return member.record.models
    return ()


async def until(fleet: LocalCoordination, wanted: list[str]) -> None:
    async with asyncio.timeout(3):
        while await readiness(fleet) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_changes_is_told_and_the_end_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_member, "LOOK_EVERY_S", 0.01)
    fleet, node = LocalCoordination(), Node()
    staying = asyncio.create_task(stay(Standing(fleet, 5), node.now, 10))
    await until(fleet, ["ready"])
    node.record = replace(READY, readiness=Readiness.DRAINING)
    await until(fleet, ["draining"])
    staying.cancel()
    await asyncio.gather(staying, return_exceptions=True)
    await until(fleet, [])


async def test_a_service_that_is_silent_at_first_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_member, "_RETRY_FIRST_S", 0.01)

    class SilentAtFirst(LocalCoordination):
        silences = 2

        async def join(self, record: Record, lease_s: int) -> Membership:
            if self.silences:
                self.silences -= 1
                raise CoordinationError("no answer")
            return await super().join(record, lease_s)

    fleet = SilentAtFirst()
    staying = asyncio.create_task(stay(Standing(fleet, 5), Node().now, 10))
    await until(fleet, ["ready"])
    assert caplog.text.count("event=fleet_not_joined") == 2
    staying.cancel()
    await asyncio.gather(staying, return_exceptions=True)


async def test_what_cannot_be_told_is_logged_once_and_costs_no_stream_its_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_member, "LOOK_EVERY_S", 0.01)
    fleet, names = LocalCoordination(), ["m"]
    standing = Standing(fleet, 1)
    async with as_member(standing, lambda: replace(READY, models=tuple(names)), 10):
        await until(fleet, ["ready"])
        stream = standing.now()
        names[0] = "x" * 600
        await asyncio.sleep(0.1)
        assert stream.may_send()
        assert (await models(fleet), caplog.text.count("event=record_not_told")) == (("m",), 1)
        names[0] = "n"
        async with asyncio.timeout(3):
            while await models(fleet) != ("n",):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await standing.close()


async def test_an_unfit_record_at_first_is_told_once_it_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_member, "_RETRY_FIRST_S", 0.01)
    fleet, names = LocalCoordination(), ["x" * 600]
    standing = Standing(fleet, 1)
    async with as_member(standing, lambda: replace(READY, models=tuple(names)), 10):
        await asyncio.sleep(0.05)
        assert "event=fleet_not_joined" in caplog.text
        names[0] = "m"
        await until(fleet, ["ready"])
    await standing.close()


async def test_without_a_service_nothing_is_done() -> None:
    def never() -> Record:
        raise AssertionError

    assert standing_of(Settings(state_dir="x")) is None
    async with as_member(None, never, 10):
        await asyncio.sleep(0)


async def test_a_service_that_is_not_there_keeps_no_node_from_serving_or_ending() -> None:
    fleet = Fleet(coordination="etcd", etcd_endpoints="http://127.0.0.1:9", when_alone="stop")
    standing = standing_of(Settings(state_dir="x", fleet=fleet))
    assert standing is not None
    async with asyncio.timeout(8):
        async with as_member(standing, Node().now, fleet.lease_s):
            await asyncio.sleep(0.2)
            # It is nobody's yet whose sessions another could take up.
            assert standing.now().may_send()
        await standing.close()


def test_where_a_node_is_reached_must_be_an_address() -> None:
    assert node_url(Fleet(), "0.0.0.0", "http://127.0.0.1:8800") == "http://127.0.0.1:8800"
    assert node_url(Fleet(url="http://10.0.0.1:8800/"), "0.0.0.0", "http://127.0.0.1:8800") == "http://10.0.0.1:8800"
    with pytest.raises(ConfigError, match=r"fleet\.url"):
        node_url(Fleet(coordination="etcd"), "0.0.0.0", "http://127.0.0.1:8800")
    with pytest.raises(ConfigError, match=r"fleet\.url"):
        node_url(Fleet(url="10.0.0.1:8800"), "10.0.0.1", "http://10.0.0.1:8800")


def test_what_was_recorded_before_a_process_began_is_not_believed_by_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_bytes(b"of this fleet, and of no other 0")
    fleet = Fleet(secret_file=str(file))
    prover, before = prover_of(fleet), believer_of(fleet)
    said = ("GET", "/midstream/v1/fleet/node")
    recorded = prover.headers(*said, b"")[FLEET]
    time.sleep(0.005)
    after = believer_of(fleet)
    assert before is not None
    assert after is not None
    before.check(*said, recorded).require(b"")
    with pytest.raises(Unproven, match="before this process began"):
        after.check(*said, recorded)
    after.check(*said, prover.headers(*said, b"")[FLEET]).require(b"")
