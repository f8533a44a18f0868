"""What each Xid means for a worker on that card: leave it now, keep an eye on it, or nothing. Pure; a table.

By NVIDIA's catalog (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, for Ampere and newer):
`action` is its bucket for the immediate action. The rule (docs/card.md): what asks for a reset or a restart of more
than the application is a reason to move; what is the application's own fault is told by its death; what is not known is
watched.
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What to do about a card."""

    IGNORE = "ignore"
    WATCH = "watch"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class Xid:
    """One code. `is_suspect`: what lies in the card's memory may be wrong. `is_of_links`: it concerns groups alone."""

    code: int
    name: str
    action: str
    verdict: Verdict
    is_suspect: bool = False
    is_of_links: bool = False


_APPLICATION = "RESTART_APP"
_RESET = "RESET_GPU"

# Reset, restart, or memory that is not what was written.
_MOVE = (
    Xid(46, "GPU stopped processing", _RESET, Verdict.MOVE),
    Xid(48, "double bit ECC error", "WORKFLOW_XID_48", Verdict.MOVE, is_suspect=True),
    Xid(54, "auxiliary power is not connected", "CHECK_MECHANICALS", Verdict.MOVE),
    Xid(62, "internal micro-controller halt", _RESET, Verdict.MOVE),
    Xid(64, "row remapping failed", _RESET, Verdict.MOVE, is_suspect=True),
    Xid(79, "GPU has fallen off the bus", "RESTART_BM", Verdict.MOVE, is_suspect=True),
    # The application's, says NVIDIA; but a held pool is not one process's, and its page was the one that broke.
    Xid(94, "contained memory error", _APPLICATION, Verdict.MOVE, is_suspect=True),
    Xid(95, "uncontained memory error", _RESET, Verdict.MOVE, is_suspect=True),
    Xid(109, "context switch timeout", _RESET, Verdict.MOVE),
    Xid(110, "security fault", _RESET, Verdict.MOVE),
    Xid(119, "GSP RPC timeout", _RESET, Verdict.MOVE),
    Xid(120, "GSP error", _RESET, Verdict.MOVE),
    Xid(140, "unrecovered ECC error", _RESET, Verdict.MOVE, is_suspect=True),
    Xid(143, "GPU initialization error", _RESET, Verdict.MOVE),
    Xid(151, "key rotation error", "RESTART_VM", Verdict.MOVE),
    Xid(156, "resource retirement event", _RESET, Verdict.MOVE),
    Xid(158, "GPU fatal timeout", _RESET, Verdict.MOVE),
    Xid(167, "PCIe fatal timeout", "", Verdict.MOVE, is_suspect=True),
    Xid(171, "uncorrectable DRAM error", "", Verdict.MOVE, is_suspect=True),
    Xid(172, "uncorrectable SRAM error", "", Verdict.MOVE, is_suspect=True),
)
_LINKS = (
    Xid(74, "NVLink error", "WORKFLOW_NVLINK_ERR", Verdict.MOVE, is_of_links=True),
    Xid(136, "link training failed", _RESET, Verdict.MOVE, is_of_links=True),
    *(
        Xid(code, f"NVLink: {name} error", "WORKFLOW_NVLINK5_ERR", Verdict.MOVE, is_of_links=True)
        for code, name in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"), 144)
    ),
    Xid(155, "NVLink: software defined error", _RESET, Verdict.MOVE, is_of_links=True),
)
# An application's fault, most likely: its process ends by it, or is found to hang.
_OF_APPLICATIONS = (
    Xid(8, "GPU stopped processing", _APPLICATION, Verdict.WATCH),
    Xid(11, "invalid or corrupted push buffer stream", _APPLICATION, Verdict.WATCH),
    Xid(13, "graphics engine exception", _APPLICATION, Verdict.WATCH),
    Xid(25, "invalid or illegal push buffer stream", _APPLICATION, Verdict.WATCH),
    Xid(31, "GPU memory page fault", _APPLICATION, Verdict.WATCH),
    Xid(32, "invalid or corrupted push buffer stream", _APPLICATION, Verdict.WATCH),
    *(Xid(code, "copy engine exception", _APPLICATION, Verdict.WATCH) for code in (39, 40, 41)),
    Xid(69, "graphics engine class error", _APPLICATION, Verdict.WATCH),
    *(Xid(code, "copy engine error", _APPLICATION, Verdict.WATCH) for code in (70, 71, 72, 75, 76, 77, 85)),
    *(Xid(code, "copy engine error", _APPLICATION, Verdict.WATCH) for code in range(126, 136)),
    Xid(80, "corrupted data sent to GPU", _APPLICATION, Verdict.WATCH),
)
# Nothing is wrong yet, or only in part.
_OTHERS = (
    Xid(63, "row remapping event", "IGNORE", Verdict.WATCH),
    Xid(92, "high single-bit ECC error rate", "IGNORE", Verdict.WATCH),
    Xid(93, "InfoROM wear limit exceeded", "IGNORE", Verdict.WATCH),
    Xid(121, "C2C error", "IGNORE", Verdict.WATCH),
    Xid(137, "NVLink privilege error", "IGNORE", Verdict.WATCH),
    Xid(141, "CUDA fast path error", "IGNORE", Verdict.WATCH),
    # What it is about is read: the recovery action (health.py).
    Xid(154, "GPU recovery action changed", "XID_154", Verdict.WATCH),
    Xid(157, "resource retirement failure", "IGNORE", Verdict.WATCH),
    Xid(160, "channel retirement event", "IGNORE", Verdict.WATCH),
    Xid(161, "channel retirement failure", "IGNORE", Verdict.WATCH),
    Xid(168, "reduced GPU memory capacity", "", Verdict.WATCH),
    Xid(37, "driver firmware error", "IGNORE", Verdict.IGNORE),
    Xid(38, "driver firmware error", "IGNORE", Verdict.IGNORE),
    Xid(43, "a process's channel was reset", "IGNORE", Verdict.IGNORE),
    Xid(44, "graphics engine fault during context switch", "IGNORE", Verdict.IGNORE),
    # Of a process that was killed, among others.
    Xid(45, "preemptive cleanup", "WORKFLOW_XID_45", Verdict.IGNORE),
    Xid(66, "illegal access by driver", "IGNORE", Verdict.IGNORE),
    Xid(67, "illegal access by driver", "IGNORE", Verdict.IGNORE),
    Xid(106, "SMBPBI test message", "IGNORE", Verdict.IGNORE),
    Xid(107, "SMBPBI test message", "IGNORE", Verdict.IGNORE),
)
TABLE = {xid.code: xid for xid in (*_MOVE, *_LINKS, *_OF_APPLICATIONS, *_OTHERS)}


def known(code: int) -> Xid:
    """What is known of a code; one that is not in the table is watched."""
    return TABLE.get(code) or Xid(code, "not in the table", "", Verdict.WATCH)
