"""A command as it may be shown around: with the values of whatever is named like a secret blanked. Pure.

Owns what counts as such a name. Invariant: rather too much is blanked than too little. Records, summaries and pages are
made to be handed on, and an engine's command line may carry tokens and keys.
"""

import re
from collections.abc import Sequence

BLANK = "***"
# How a part of such a name ends: `--hf-token`, `HF_TOKEN`, `apiKey`; not `--tokenizer`, nor `--max-num-batched-tokens`.
_ENDS = (
    "token", "key", "keys", "password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials",
    "auth", "authorization",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_ASSIGNED = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=.*", re.DOTALL)
_FLAG = re.compile(r"--.*|-[A-Za-z]", re.DOTALL)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VALUE = r"""(?P<value>"(?:[^"\\]|\\.)*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|(?:(?:bearer|basic)\s+)?[^\s"',;&}\]]+)"""
_AFTER_NAME = re.compile(rf"""["'\\]*\s*[=:]\s*{_VALUE}""", re.IGNORECASE)
_AFTER_FLAG = re.compile(rf"""(?:\s*=\s*|\s+){_VALUE}""", re.IGNORECASE)
_USER = re.compile(r"(://)[^/@\s]+@")


def without_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command, secrets blanked: after a flag up to the next one, after `=`, and within JSON and URLs."""
    shown: list[str] = []
    is_secret = False
    for word in command:
        if is_secret and not _FLAG.fullmatch(word):
            shown.append(BLANK)
            continue
        is_secret = word.startswith("-") and "=" not in word and _is_secret(word)
        assigned = _ASSIGNED.fullmatch(word)
        if assigned is not None and _is_secret(assigned[1]):
            shown.append(f"{assigned[1]}={BLANK}")
        else:
            shown.append(_USER.sub(rf"\1{BLANK}@", _within(word)))
    return shown


def _is_secret(name: str) -> bool:
    return any(part.endswith(_ENDS) for part in re.split(r"[-_.]", _CAMEL.sub("-", name).lower()))


def _within(text: str) -> str:
    """One word that may hold more: JSON, a header, or a line for a shell."""
    pieces, at = [], 0
    for name in _NAME.finditer(text):
        if name.start() < at or not _is_secret(name[0]):
            continue
        is_flag = text[: name.start()].endswith("-")
        value = (_AFTER_FLAG if is_flag else _AFTER_NAME).match(text, name.end())
        if value is not None:
            pieces += [text[at : value.start("value")], BLANK]
            at = value.end()
    return "".join([*pieces, text[at:]])
