"""Which models a node serves, by its engines' own word."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from midstream.sidecar import served_models
from midstream.sidecar.fleet.record import TEXT_MAX
from midstream.sidecar.served_models import NAMES_MAX, ServedModels, models_of


class Engines:
    """Engines with what each of them tells."""

    def __init__(self, **told: tuple[str, ...]) -> None:
        self.told = dict(told)
        self.asked: list[str] = []
        self.models = ServedModels(lambda: {name: name for name in self.told}, self._ask)

    async def _ask(self, url: str) -> tuple[str, ...]:
        self.asked.append(url)
        return self.told[url]

    async def names(self) -> tuple[str, ...]:
        self.models.names()
        await asyncio.sleep(0.01)
        return self.models.names()


async def test_what_all_engines_serve_is_served() -> None:
    engines = Engines(a=("m", "lora", "n"), b=("n", "m"))
    assert engines.models.names() == ()  # nobody waits
    assert await engines.names() == ("m", "n")
    for _ in range(3):
        await engines.names()
    assert sorted(engines.asked) == ["a", "b"]


async def test_while_one_has_not_told_nothing_is_known() -> None:
    engines = Engines(a=("m",), b=())
    assert await engines.names() == ()
    del engines.told["b"]
    assert await engines.names() == ("m",)


async def test_engines_are_asked_again_now_and_then_and_a_silence_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_models, "ASK_EVERY_S", 0.0)
    engines = Engines(a=("m",))
    assert await engines.names() == ("m",)
    engines.told["a"] = ("m", "lora")
    assert await engines.names() == ("m", "lora")
    engines.told["a"] = ()
    assert await engines.names() == ("m", "lora")
    await engines.models.close()


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ({"data": [{"id": "m", "object": "model"}, {"id": "n"}, {"id": "m"}]}, ("m", "n")),
        ({"data": []}, ()),
        ({"data": [{"id": str(i)} for i in range(NAMES_MAX + 1)]}, ()),
        ({"data": [{"id": ""}]}, ()),
        ({"data": [{"id": "m\n"}]}, ()),
        ({"data": [{"id": "m" * TEXT_MAX}]}, ("m" * TEXT_MAX,)),
        # A record has no place for that.
        ({"data": [{"id": "m" * (TEXT_MAX + 1)}]}, ()),
        ({"data": [{"id": f"{i}" * 500} for i in range(9)]}, ()),
        ({"models": []}, ()),
        ([], ()),
    ],
)
async def test_the_engines_own_list_is_read(answer: Any, names: tuple[str, ...]) -> None:
    async def told(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/v1/models", told)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        assert await models_of(f"http://127.0.0.1:{runner.addresses[0][1]}") == names
        assert await models_of(f"http://127.0.0.1:{runner.addresses[0][1]}/elsewhere") == ()
    finally:
        await runner.cleanup()
    assert await models_of("http://127.0.0.1:9") == ()
