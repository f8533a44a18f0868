"""The commands that look into the store of snapshots: `snapshots list`, `show`, `diff`, `verify`.

They read beside the mover that writes, take no lock and change nothing.
"""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..session.errors import ConfigError, StoreError
from ..session.ids import session_id
from .cli_inspect import show_facts, show_table
from .cli_options import AsJson, ConfigFile, StoreDir, settings_from
from .snapshot_diff import compare

if TYPE_CHECKING:
    from ..session.disk_store import DiskStore
    from ..session.manifest import Manifest

app = typer.Typer(help="Look into the store of snapshots on disk.", rich_markup_mode=None)

Session = Annotated[str, typer.Argument(help="The session's id, 32 hex digits.")]


@app.command("list")
def list_snapshots(store_dir: StoreDir = None, config: ConfigFile = None, as_json: AsJson = False) -> int:
    """List all snapshots, oldest first."""
    # As they lie on the disk, compressed; chunks that snapshots share count for each of them.
    rows = [_renamed(asdict(line), "size_bytes", "stored_bytes") for line in _open(store_dir, config).list()]
    if as_json:
        print(json.dumps({"snapshots": rows}))
        return 0
    for row in rows:
        row["created_at"] = _moment(row["created_at"])
    columns = ("snapshot", "session", "generation", "kv_len", "stored_bytes", "created_at", "latest", "finished")
    show_table("Snapshots", columns, rows)
    return 0


@app.command("show")
def show(session: Session, store_dir: StoreDir = None, config: ConfigFile = None, as_json: AsJson = False) -> int:
    """Show the snapshot that a restore of SESSION would take."""
    facts = asdict(_latest(_open(store_dir, config), session))
    if as_json:
        print(json.dumps(facts))
        return 0
    facts["created_at"] = _moment(facts["created_at"])
    facts["outputs"] = f"{len(facts['outputs'])} tokens"
    facts["chunks"] = f"{len(facts['chunks'])} chunks"
    show_facts(f"Snapshot of {session}", facts)
    return 0


@app.command("diff")
def diff(
    first: Annotated[str, typer.Argument(help="A snapshot's name or a session's id, whose newest one is meant.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    store_dir: StoreDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Compare two moments: what they have in common, and where they part.

    Exit status 1 when they differ in anything but how far they are.
    """
    store = _open(store_dir, config)
    found = compare(_moment_of(store, first), _moment_of(store, second))
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        show_facts(f"{first} and {second}", asdict(found))
    return int(not found.same_run)


@app.command("verify")
def verify(
    session: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the annotation
        typer.Argument(help="One session's id; all when left out."),
    ] = None,
    store_dir: StoreDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Read every byte that a restore would, and compare.

    Exit status 1 when something is damaged.
    """
    store = _open(store_dir, config)
    manifests = [_latest(store, session)] if session else _all_latest(store)
    rows = [_verified(store, manifest) for manifest in manifests]
    # Manifests that cannot be read are in no list; the store has counted them on the way.
    torn = store.figures().corrupt - sum(row["damaged_chunks"] for row in rows)
    damaged = any(row["damage"] for row in rows) or torn > 0
    if as_json:
        print(json.dumps({"snapshots": rows, "damaged_manifests": torn, "ok": not damaged}))
        return int(damaged)
    show_table("Verified", ("session", "kv_len", "chunks", "raw_bytes", "damage"), rows)
    if torn > 0:
        show_facts("Damaged manifests", f"{torn}; older snapshots or the journal are used instead")
    return int(damaged)


def _open(store_dir: str | None, config: Path | None) -> "DiskStore":
    settings = settings_from(config, None, store_dir=store_dir).settings
    if settings.store.dir is None:
        raise ConfigError("no store is set; name its folder with --store-dir DIR or the setting store.dir")
    from ..session.disk_store import DiskStore

    return DiskStore(Path(settings.store.dir), write=False)


def _latest(store: "DiskStore", session: str) -> "Manifest":
    try:
        found = store.latest(session_id(session))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if found is None:
        raise StoreError(f"session {session}: no snapshot that can be read; `midstream snapshots list` shows all")
    return replace(found, key=dict(found.key))


def _moment_of(store: "DiskStore", name: str) -> "Manifest":
    for line in store.list():
        if line.snapshot == name and (manifest := store.named(line.session, name)) is not None:
            return manifest
    try:
        session_id(name)
    except ValueError:
        raise StoreError(f"no snapshot {name!r}; `midstream snapshots list` shows all") from None
    return _latest(store, name)


def _all_latest(store: "DiskStore") -> "list[Manifest]":
    sessions = dict.fromkeys(line.session for line in store.list())
    return [manifest for s in sessions if (manifest := store.latest(s)) is not None]


def _verified(store: "DiskStore", manifest: "Manifest") -> dict[str, Any]:
    damage: list[str] = []
    raw_bytes = 0
    before = store.figures().corrupt
    for name in dict.fromkeys(manifest.chunks):
        try:
            raw = store.get_chunk(name)
        except StoreError as error:
            damage.append(str(error))
            continue
        raw_bytes += len(raw)
        if len(raw) != manifest.block_bytes:
            damage.append(f"chunk {name}: {len(raw)} bytes, expected {manifest.block_bytes}")
    return {
        "session": manifest.session,
        "kv_len": manifest.kv_len,
        "chunks": len(manifest.chunks),
        "raw_bytes": raw_bytes,
        "damage": damage,
        "damaged_chunks": store.figures().corrupt - before,
    }


def _renamed(row: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in row.items()}


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(sep=" ", timespec="seconds")
