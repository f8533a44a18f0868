"""What SGLang itself was told: its options, in the process that has them, and its version."""

from typing import Any


def server_options() -> Any:
    """The options of the server, as SGLang resolved them."""
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def engine_version() -> str:
    """The version of SGLang's package."""
    import sglang

    return str(getattr(sglang, "__version__", "unknown"))
