"""How the embedded engine is started beside a sidecar. Runs in the sidecar; imports nothing of torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..contract import Beside, Capabilities, EngineAdapter, HttpCall, Launch, set_flag

SERVER_MODULE = "midstream.adapters.transformers.server"


class TransformersAdapter(EngineAdapter):
    """midstream's own server on Hugging Face Transformers."""

    name = "transformers"
    capabilities = Capabilities(standby=True, in_place=True, disk=True, quiesce=True, hides_ids_as_null=False)
    private_paths = frozenset({"/midstream/quiesce", "/midstream/unquiesce", "/midstream/reservations/"})

    def recognises(self, argv: Sequence[str]) -> bool:
        return SERVER_MODULE in argv[:4]

    def start(self, argv: Sequence[str], port: int, beside: Beside, env: Mapping[str, str]) -> Launch:
        command = set_flag(set_flag(argv, "--port", str(port)), "--host", "127.0.0.1")
        return Launch(tuple(command), beside.environment(env))

    def attach(self, worker: str, state_dir: Path) -> Launch:
        return Launch((), {"MIDSTREAM_STATE_DIR": str(state_dir), "MIDSTREAM_WORKER": worker})

    def quiesce(self) -> HttpCall | None:
        return HttpCall("POST", "/midstream/quiesce")

    def unquiesce(self) -> HttpCall | None:
        return HttpCall("POST", "/midstream/unquiesce")
