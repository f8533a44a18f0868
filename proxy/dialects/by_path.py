"""Which dialect the requests to a path speak. Pure."""

from .events import EventDialect
from .generate import Generate
from .messages import Messages
from .responses import Responses

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
GENERATE_PATH = "/generate"

# An API that is none of OpenAI's completions.
OtherApi = EventDialect | Generate

_OTHERS: dict[str, OtherApi] = {RESPONSES_PATH: Responses(), MESSAGES_PATH: Messages(), GENERATE_PATH: Generate()}

# Requests to these may become sessions.
SESSION_PATHS = (COMPLETIONS_PATH, CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, GENERATE_PATH)


def events_of(path: str) -> OtherApi | None:
    """The dialect of a path whose streams are none of OpenAI's chunks; None where they are."""
    return _OTHERS.get(path)


def errors_of(path: str) -> OtherApi | None:
    """The dialect in whose shape errors are told; also for what lies below a path. None: OpenAI's."""
    return next((dialect for known, dialect in _OTHERS.items() if path == known or path.startswith(f"{known}/")), None)
