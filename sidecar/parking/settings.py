"""From the settings `park.*` to the limits of the state machine."""

from ...adapters.cuda_checkpoint.machine import Limits
from ..config import Settings


def limits_of(settings: Settings) -> Limits:
    """How long each step may take."""
    return Limits(lock_s=settings.park.lock_s, copy_s=settings.park.copy_s)
