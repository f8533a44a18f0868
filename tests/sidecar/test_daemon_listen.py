"""The daemon's port: whatever is wrong with it is an error that names it."""

from pathlib import Path

import pytest

from midstream.session.errors import ConfigError
from midstream.sidecar.config import Settings
from midstream.sidecar.daemon import _Daemon
from midstream.sidecar.listening import listen

ENGINE = ["python", "-m", "midstream.adapters.transformers.server", "--model", "m"]


async def test_a_port_of_the_engine_s_command_that_is_none_is_named(tmp_path: Path) -> None:
    daemon = _Daemon(Settings(state_dir=str(tmp_path)), [*ENGINE, "--port", "99999"])
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:99999 .*choose another --port"):
        listen("127.0.0.1", daemon._port())


def test_a_port_in_use_is_named() -> None:
    taken = listen("127.0.0.1", 0)
    try:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\)"):
            listen("127.0.0.1", port)
    finally:
        taken.close()
