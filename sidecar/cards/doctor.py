"""What `midstream doctor` says of the cards: their health now, and whether processes on them can be parked."""

from importlib.util import find_spec

from ...adapters.cuda_checkpoint.bindings import CALLS
from ...adapters.cuda_checkpoint.preflight import DRIVER_MIN, DRIVER_MOVE_MIN, MOVE_CALLS
from ...session.errors import EngineError
from ..doctor import Check, fail, ok, warn
from .health import Card, read
from .nvml import Library, opened
from .xid import Verdict

INSTALL = 'in the checkout of midstream: pip install ".[gpu]"'


def cards() -> list[Check]:
    """A finding for each card, one for what the driver tells by itself, and one for parking."""
    if find_spec("pynvml") is None:
        return [warn("cards", "their state is not watched: no NVML bindings", INSTALL)]
    try:
        nvml = opened()
    except EngineError as error:
        return [warn("cards", f"their state is not watched: {error}", "see whether nvidia-smi works here")]
    try:
        found = [_card(nvml, uuid) for uuid in nvml.cards()]
        found.append(
            ok("card events", "the driver tells of Xids and memory errors as they happen")
            if nvml.tells_events
            else warn("card events", "the driver tells of none here", "cards are looked at every cards.poll_s seconds")
        )
        found.append(parking(nvml.driver()))
    finally:
        nvml.close()
    return found


def _card(nvml: Library, uuid: str) -> Check:
    card, _ = read(Card(uuid), nvml.read(uuid), 0.0)
    reading = card.reading
    assert reading is not None
    name = f"card {uuid}"
    facts = [reading.model or "no name"]
    if reading.temperature_c is not None:
        facts.append(f"{reading.temperature_c} °C")
    if reading.free_bytes is not None and reading.total_bytes is not None:
        facts.append(f"{reading.free_bytes >> 20} of {reading.total_bytes >> 20} MiB free")
    if reading.ecc_uncorrected:
        facts.append(f"{reading.ecc_uncorrected} uncorrected memory errors since the driver was loaded")
    wrong = [finding.text for finding in card.found.values()]
    fact = "; ".join([", ".join(facts), *wrong])
    match card.verdict:
        case Verdict.MOVE:
            return fail(name, fact, "take it out of use; docs/card.md says what each reason means")
        case Verdict.WATCH:
            return warn(name, fact, "see docs/card.md; cooling and power for limits, a reset for remapped rows")
    return ok(name, fact)


def parking(driver: str) -> Check:
    """Whether the driver and its bindings can checkpoint a process."""
    major = int(driver.partition(".")[0]) if driver.partition(".")[0].isdigit() else 0
    if major < DRIVER_MIN:
        return warn("parking", f"driver {driver} cannot checkpoint processes", f"use {DRIVER_MIN} or newer")
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return warn("parking", "no CUDA bindings", INSTALL)
    from cuda.bindings import driver as bindings

    missing = [name for name in CALLS if not hasattr(bindings, name)]
    if not MOVE_CALLS.issuperset(missing):
        text = f"the CUDA bindings have no {', '.join(missing)}"
        return warn("parking", text, "install cuda-bindings 13.3.1 or newer")
    if major < DRIVER_MOVE_MIN or missing:
        text = f"driver {driver}, with these bindings, brings processes back on their own GPU alone"
        return warn("parking", text, f"to change GPUs, driver {DRIVER_MOVE_MIN} and cuda-bindings 13.3.1, or newer")
    return ok("parking", f"driver {driver} can checkpoint processes")
