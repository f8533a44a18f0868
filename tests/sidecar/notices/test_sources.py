"""What clouds and Kubernetes announce, from servers that speak as theirs do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import pytest

from midstream.sidecar.fleet.kubernetes_access import Credential, KubernetesAccess
from midstream.sidecar.notices import kubernetes_node
from midstream.sidecar.notices.aws import Aws
from midstream.sidecar.notices.azure import Azure
from midstream.sidecar.notices.contract import Notice, NoticeError, Source
from midstream.sidecar.notices.gcp import Gcp
from midstream.sidecar.notices.kubernetes_node import KubernetesNode, notice_of
from midstream.sidecar.notices.metadata import Metadata
from support.announcing import AzureImds, ComputeEngine, Ec2, NodeApi, serving


async def seen(source: Metadata) -> Notice | None:
    async with aiohttp.ClientSession() as http:
        return await source.look(http)


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


async def test_aws_announces_a_spot_interruption_before_anything_else() -> None:
    ec2 = Ec2()
    async with serving(ec2.app()) as url:
        source = Aws(url)
        assert await seen(source) is None
        ec2.found["events/recommendations/rebalance"] = {"noticeTime": soon(0).isoformat()}
        assert await seen(source) == Notice("rebalance recommended")
        at = soon(100).strftime("%Y-%m-%dT%H:%M:%SZ")
        ec2.found["spot/instance-action"] = {"action": "terminate", "time": at}
        found = await seen(source)
        assert found is not None
        assert found.text == f"spot terminate at {at}"
        assert found.in_s == pytest.approx(100, abs=3)
        assert ec2.tokens_given == 1


async def test_awss_scheduled_events_count_while_they_are_active() -> None:
    ec2 = Ec2()
    event = {
        "Code": "system-reboot",
        "EventId": "instance-event-1",
        "NotBefore": format_datetime(soon(500), usegmt=True),
    }
    async with serving(ec2.app()) as url:
        source = Aws(url)
        ec2.found["events/maintenance/scheduled"] = [{**event, "State": "completed"}]
        assert await seen(source) is None
        ec2.found["events/maintenance/scheduled"] = [{**event, "State": "active"}]
        found = await seen(source)
        assert found is not None
        assert found.text == "system-reboot instance-event-1"
        assert found.in_s == pytest.approx(500, abs=3)


async def test_a_token_that_aws_does_not_know_any_more_is_asked_for_anew() -> None:
    ec2 = Ec2()
    async with serving(ec2.app()) as url:
        source = Aws(url)
        assert await seen(source) is None
        ec2.tokens.clear()
        assert await seen(source) is None
        assert ec2.tokens_given == 2


async def test_gcp_announces_the_end_of_a_machine_and_not_its_migration() -> None:
    engine = ComputeEngine()
    async with serving(engine.app()) as url:
        source = Gcp(url)
        assert await seen(source) is None
        engine.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
        assert await seen(source) is None
        engine.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
        assert await seen(source) == Notice("the host's maintenance ends this machine")
        engine.preempted = "TRUE"
        assert await seen(source) == Notice("preempted", 30.0)


async def test_azure_announces_events_that_end_this_machine() -> None:
    imds = AzureImds("vm-1")
    at = format_datetime(soon(300), usegmt=True)
    event = {"EventId": "E1", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["vm-1"],
             "EventStatus": "Scheduled", "NotBefore": at}  # fmt: skip
    async with serving(imds.app()) as url:
        source = Azure(url)
        assert await seen(source) is None
        for other in ({"Resources": ["vm-2"]}, {"EventType": "Freeze"}, {"EventStatus": "Completed"}):
            imds.events = [{**event, **other}]
            assert await seen(source) is None
        imds.events = [{**event, "EventId": "E0", "NotBefore": format_datetime(soon(900), usegmt=True)}, event]
        found = await seen(source)
        assert found is not None
        assert found.text == "Preempt E1"
        assert found.in_s == pytest.approx(300, abs=3)
        imds.events = [{**event, "EventStatus": "Started", "NotBefore": ""}]
        assert await seen(source) == Notice("Preempt E1")


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (Aws, {"/latest/api/token": "t", "/latest/meta-data/spot/instance-action": "<html>"}),
        (Aws, {"/latest/api/token": "t", "/latest/meta-data/spot/instance-action": '{"action": "dance"}'}),
        (Gcp, {"/computeMetadata/v1/instance/preempted": "FALSE"}),
        (Azure, {"/metadata/instance/compute/name": "vm", "/metadata/scheduledevents": "[]"}),
    ],
)
async def test_whoever_answers_in_other_words_is_no_source(source: Any, answers: dict[str, str]) -> None:
    app = web_app(lambda path: answers.get(path, ""))
    async with serving(app) as url:
        with pytest.raises(NoticeError):
            await seen(source(url))


@pytest.mark.parametrize("source", [Aws, Gcp, Azure])
async def test_a_metadata_server_that_is_not_there_is_named_with_a_remedy(source: Any) -> None:
    with pytest.raises(NoticeError, match=r"leave \w+ out of drain.notices"):
        await seen(source("http://127.0.0.1:1"))


def web_app(answer: Callable[[str], str]) -> Any:
    from aiohttp import web

    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=answer(request.path))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    return app


# ---- Kubernetes


def test_a_node_is_to_be_left_when_it_is_cordoned_tainted_in_a_condition_or_deleted() -> None:
    taints, conditions = {"karpenter.sh/disrupted"}, {"KernelDeadlock", "Ready=False"}

    def found(**node: Any) -> Notice | None:
        return notice_of(node, taints, conditions)

    assert found() is None
    assert found(spec={"unschedulable": False, "taints": [{"key": "gpu", "effect": "NoSchedule"}]}) is None
    assert found(status={"conditions": [{"type": "Ready", "status": "True"}]}) is None
    assert found(spec={"unschedulable": True}) == Notice("cordoned")
    tainted = found(spec={"unschedulable": True, "taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]})
    assert tainted == Notice("taint karpenter.sh/disrupted:NoSchedule")
    assert found(status={"conditions": [{"type": "KernelDeadlock", "status": "True"}]}) is not None
    assert found(status={"conditions": [{"type": "KernelDeadlock", "status": "False"}]}) is None
    assert found(status={"conditions": [{"type": "Ready", "status": "False"}]}) == Notice("condition Ready=False")
    assert found(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}) == Notice("the node is being deleted")


@asynccontextmanager
async def told_by(source: Source) -> AsyncIterator[list[Notice | None]]:
    told: list[Notice | None] = []
    following = asyncio.create_task(source.follow(told.append))
    try:
        yield told
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def node_source(url: str, token: str = "good") -> KubernetesNode:
    return KubernetesNode(KubernetesAccess(url, "default", False, Credential(token)), "n1", ["dying"], [])


async def test_a_watched_node_tells_at_once_what_becomes_of_it() -> None:
    api = NodeApi("n1")
    async with serving(api.app()) as url, told_by(node_source(url)) as told:
        await until(lambda: api.watches == 1)
        assert told == [None]
        await api.become(spec={"unschedulable": True})
        await until(lambda: told[-1] == Notice("cordoned"))
        await api.become(spec={})
        await until(lambda: told[-1] is None)


async def test_a_watch_that_breaks_off_and_whose_version_is_forgotten_begins_anew() -> None:
    api = NodeApi("n1")
    async with serving(api.app()) as url, told_by(node_source(url)) as told:
        await until(lambda: api.watches == 1)
        await api.become(spec={"taints": [{"key": "dying"}]})
        await until(lambda: told[-1] == Notice("taint dying:"))
        await api.cut()
        await until(lambda: api.watches == 2)
        await api.become(spec={})
        await until(lambda: told[-1] is None)


async def test_a_node_that_is_deleted_is_to_be_left_until_it_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_node, "GONE_AGAIN_S", 0.05)
    api = NodeApi("n1")
    async with serving(api.app()) as url, told_by(node_source(url)) as told:
        await until(lambda: api.watches == 1)
        await api.delete()
        await until(lambda: told[-1] == Notice("the node was deleted"))
        # It says so as often as it is asked, and is no error.
        await until(lambda: told.count(Notice("the node was deleted")) >= 3)
        await api.become(spec={})
        await until(lambda: told[-1] is None)


async def test_a_node_that_was_deleted_while_nobody_watched_is_to_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_node, "AGAIN_S", 0.05)
    api = NodeApi("n1")
    async with serving(api.app()) as url, told_by(node_source(url)) as told:
        await until(lambda: api.watches == 1)
        api.node = None
        await api.cut()
        await until(lambda: told[-1] == Notice("the node was deleted"))


async def test_a_node_that_never_was_there_is_a_wrong_name() -> None:
    api = NodeApi("other")
    async with serving(api.app()) as url:
        with pytest.raises(NoticeError, match=r"no node 'n1'.*drain.kubernetes_node"):
            await node_source(url).follow(lambda notice: None)


async def test_an_account_without_rights_is_told_what_it_needs() -> None:
    api = NodeApi("n1")
    async with serving(api.app()) as url:
        with pytest.raises(NoticeError, match="ClusterRole"):
            await node_source(url, "stolen").follow(lambda notice: None)
