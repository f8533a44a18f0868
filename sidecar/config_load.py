"""Settings from flags, then `MIDSTREAM_*` variables, then a YAML file, then defaults.

Owns the order of precedence and the naming of places: each value knows where it came from, and whatever is wrong is
named with its place and what was expected there. All mistakes are told at once. Ranges are those of `config.py`.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from ..session.errors import ConfigError
from .config import (
    Settings,
    WorkerUrl,
    check_workers,
    default_settings,
    expected,
    leaves,
    parse_worker,
)

FILE_BYTES_MAX = 1 << 20
PREFIX = "MIDSTREAM_"
# Variables of ours that are no settings: where the file and the cache are, what tests and engines' plugins are told.
_OTHER_VARIABLES = re.compile(r"MIDSTREAM_(CONFIG|CACHE|TEST_.*|WORKER|EPOCH|ARENA|ADOPT|HOLDER|LOAD_TIMEOUT_S)")
# Kubernetes gives every pod such variables for a service called `midstream`.
_SERVICE_LINKS = re.compile(r"MIDSTREAM_(SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_.*)?)")
_FOLDERS = ("state_dir", "store.dir")
_WORKER_KEYS = ("name", "url")
# Near enough to a setting's variable that it was surely meant to be one.
_MEANT = 0.85


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody gave it, and where."""

    key: str
    value: object
    place: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The effective settings, and for each where its value came from."""

    settings: Settings
    places: Mapping[str, str]


def load(flags: Iterable[Given] = (), environ: Mapping[str, str] | None = None, file: Path | None = None) -> Loaded:
    """The effective settings. ConfigError names every wrong key and value with its place."""
    environ = os.environ if environ is None else environ
    kinds = leaves()
    faults: list[str] = []
    if file is None and environ.get(f"{PREFIX}CONFIG"):
        file = Path(environ[f"{PREFIX}CONFIG"])
    chosen: dict[str, tuple[object, str]] = {}
    layers = (_from_file(file, kinds, faults), _from_environ(environ, kinds, faults), flags)
    for layer in layers:
        for given in layer:
            fault, value = _checked(given, kinds)
            if fault:
                faults.append(fault)
            else:
                chosen[given.key] = (value, given.place)
    if faults:
        raise ConfigError("\n".join(faults))
    return Loaded(
        _settings({key: value for key, (value, _) in chosen.items()}),
        {key: chosen[key][1] if key in chosen else "default" for key in kinds},
    )


def flag(key: str, value: object, name: str) -> Given:
    """A value from the command line flag `name`."""
    return Given(key, value, name, is_text=isinstance(value, str))


def assignment(text: str) -> Given:
    """A value from `--set KEY=VALUE`."""
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text}: expected KEY=VALUE, as in --set proxy.keepalive_s=5")
    key = key.strip()
    if key not in leaves():
        raise ConfigError(f"--set {key}: unknown setting{_nearest(key, leaves())}")
    return Given(key, value.strip(), f"--set {key}", is_text=True)


def variable(key: str) -> str:
    """The environment variable of a setting: `proxy.keepalive_s` is `MIDSTREAM_PROXY_KEEPALIVE_S`."""
    return PREFIX + key.replace(".", "_").upper()


def values(settings: Settings) -> dict[str, Any]:
    """Each setting's dotted name and its value, as JSON would have it."""
    tree = msgspec.to_builtins(settings)
    found: dict[str, Any] = {}
    for key in leaves():
        node: Any = tree
        for part in key.split("."):
            node = node[part]
        found[key] = node
    return found


def _settings(chosen: Mapping[str, object]) -> Settings:
    settings = default_settings()
    parts: dict[str, dict[str, object]] = {}
    for key, value in chosen.items():
        group, separator, name = key.partition(".")
        if separator:
            parts.setdefault(group, {})[name] = value
    changed = {g: msgspec.structs.replace(getattr(settings, g), **changes) for g, changes in parts.items()}
    plain = {key: value for key, value in chosen.items() if "." not in key}
    return settings.replace(**changed, **plain)


def _absolute(value: object) -> object:
    """A folder as it is seen from everywhere: engines and the mover may run in other folders."""
    return value if value is None else str(Path(str(value)).expanduser().absolute())


def _checked(given: Given, kinds: Mapping[str, object]) -> tuple[str, object]:
    kind = kinds[given.key]
    where = given.place if given.is_text else f"{given.place}: {given.key}"
    try:
        if given.key == "workers":
            return "", _workers(given.value, kind)
        value = msgspec.convert(_plain(given, kind), kind, strict=not given.is_text)
        return "", _absolute(value) if given.key in _FOLDERS else value
    except (msgspec.ValidationError, ValueError) as error:
        shown = _shown(given.value)
        if given.key == "workers" and not isinstance(error, msgspec.ValidationError):
            return f"{where}: {error}", None
        return f"{where}: expected {expected(kind)}, got {shown}", None


def _plain(given: Given, kind: object) -> object:
    if given.is_text:
        text = str(given.value)
        # msgspec takes only `true`, `false`, `1` and `0` from text; null is how a file says "none".
        can_be_null = get_args(kind)[:1] == (str | None,)
        return None if can_be_null and text.lower() in ("", "null", "none") else text
    # YAML reads `10` as an int where a float is meant; the reverse would lose something and stays an error.
    return given.value


def _workers(value: object, kind: object) -> tuple[WorkerUrl, ...]:
    if isinstance(value, str):
        value = [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list | tuple):
        raise msgspec.ValidationError("no list")
    workers = tuple(
        parse_worker(item, index) if isinstance(item, str) else _worker(item, index)
        for index, item in enumerate(value, 1)
    )
    check_workers(workers)
    return msgspec.convert(msgspec.to_builtins(workers), kind)  # type: ignore[no-any-return]


def _worker(item: object, index: int) -> WorkerUrl:
    """A worker as a file writes it; ValueError names the key that is wrong."""
    if not isinstance(item, Mapping):
        raise ValueError(f"worker {index}: expected {{name, url}}, got {_shown(item)}")
    for key in item:
        if key not in _WORKER_KEYS:
            near = difflib.get_close_matches(str(key), _WORKER_KEYS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else "; a worker has name and url"
            raise ValueError(f"worker {index}: unknown key {_shown(key)}{hint}")
    for key in _WORKER_KEYS:
        if not isinstance(item.get(key), str):
            got = f"got {_shown(item[key])}" if key in item else "it is missing"
            raise ValueError(f"worker {index}: {key}: expected text, {got}")
    return msgspec.convert(item, WorkerUrl)


def _from_environ(environ: Mapping[str, str], kinds: Mapping[str, object], faults: list[str]) -> Iterator[Given]:
    keys = {variable(key): key for key in kinds}
    for name in sorted(environ):
        if name in keys:
            yield Given(keys[name], environ[name], name, is_text=True)
        elif name.startswith(PREFIX) and not _OTHER_VARIABLES.fullmatch(name):
            if _SERVICE_LINKS.fullmatch(name):
                continue
            # Others may have variables with our prefix; only what was surely meant for us is an error.
            if difflib.get_close_matches(name, keys, n=1, cutoff=_MEANT):
                faults.append(f"{name}: unknown setting{_nearest(name, keys)}")


def _from_file(file: Path | None, kinds: Mapping[str, object], faults: list[str]) -> Iterator[Given]:
    if file is None:
        return
    for key, value in _flat(_read(file), kinds):
        if key in kinds:
            yield Given(key, value, file.name, is_text=False)
        elif any(known.startswith(f"{key}.") for known in kinds):
            faults.append(f"{file.name}: {key}: expected a group of settings, got {_shown(value)}")
        else:
            faults.append(f"{file.name}: {key}: unknown setting{_nearest(key, kinds)}")


def _flat(tree: Mapping[object, object], kinds: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    groups = {key.partition(".")[0] for key in kinds if "." in key}
    for name, value in tree.items():
        if isinstance(value, Mapping) and name in groups:
            for inner, leaf in value.items():
                yield f"{name}.{inner}", leaf
        elif value is None and name in groups:
            continue  # `proxy:` with every line under it commented out
        else:
            yield str(name), value


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice, where the ordinary loader quietly takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> Mapping[object, object]:
    try:
        with file.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); name a file with --config") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: larger than 1 MiB; this is not a configuration file of midstream")
    try:
        tree = yaml.load(data, Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{file.name}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file.name}: expected groups of settings, got {_shown(tree)}")
    return tree


def _nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not near:  # the right name in the wrong group, or none
        near = [name for name in names if name.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    return f"; did you mean {near[0]}?" if near else "; `midstream config` lists all settings"


def _shown(value: object) -> str:
    # Not what is in them: with aliases a small file can hold a list that is endless or larger than memory.
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"a group of {len(value)}"
    text = f'"{value}"' if isinstance(value, str) else "null" if value is None else str(value)
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else text
    return text if len(text) <= 120 else text[:117] + "..."
