"""Which dialect the requests to a path speak. Pure."""

from .events import EventDialect
from .messages import Messages
from .responses import Responses

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"

_EVENTS: dict[str, EventDialect] = {RESPONSES_PATH: Responses(), MESSAGES_PATH: Messages()}

# Requests to these may become sessions.
SESSION_PATHS = (COMPLETIONS_PATH, CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH)


def events_of(path: str) -> EventDialect | None:
    """The dialect of a path whose streams are events without token ids; None where they are OpenAI's chunks."""
    return _EVENTS.get(path)


def errors_of(path: str) -> EventDialect | None:
    """The dialect in whose shape errors are told; also for what lies below a path. None: OpenAI's."""
    return next((dialect for known, dialect in _EVENTS.items() if path == known or path.startswith(f"{known}/")), None)
