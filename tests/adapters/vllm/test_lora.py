"""A session's KV belongs to the weights of its adapter, whatever they are called and wherever they lie."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from midstream.adapters.vllm import lora
from midstream.adapters.vllm.lora import fingerprint_of, session_hash

HASH = "ab" * 16


@dataclass
class Wanted:
    """A request's adapter as vLLM names it."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "mine"


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    """Each test begins with an engine that has loaded nothing."""
    lora._loaded.clear()
    yield
    lora._loaded.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(b"weights" * 100)
    return folder


def other_weights(folder: Path) -> None:
    """Somebody writes weights of the same size, at another time."""
    path = folder / "adapter_model.safetensors"
    path.write_bytes(b"WEIGHTS" * 100)
    os.utime(path, (1, 1))


def test_without_an_adapter_the_hash_is_the_prompt_s() -> None:
    assert session_hash(HASH, None) == HASH


def test_the_same_weights_elsewhere_and_under_another_name_are_the_same(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "b")
    one = session_hash(HASH, Wanted(str(folder)))
    assert one == session_hash(HASH, Wanted(str(copy), 7, "yours"))
    assert one != HASH
    assert one != session_hash("cd" * 16, Wanted(str(folder)))
    assert (len(one), int(one, 16) > 0) == (32, True)


def test_other_weights_under_the_same_name_are_not(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "b")
    other_weights(copy)
    assert session_hash(HASH, Wanted(str(folder))) != session_hash(HASH, Wanted(str(copy)))
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(b"weights" * 100)
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 2}')
    assert session_hash(HASH, Wanted(str(folder))) != session_hash(HASH, Wanted(str(copy), 2))


def test_a_folder_that_changed_since_it_was_loaded_says_nothing_of_what_was_loaded(folder: Path) -> None:
    loaded = fingerprint_of(Wanted(str(folder)))
    assert fingerprint_of(Wanted(str(folder))) == loaded
    other_weights(folder)
    assert len({loaded, fingerprint_of(Wanted(str(folder))), fingerprint_of(Wanted(str(folder)))}) == 3


def test_what_is_loaded_again_is_known_again(folder: Path) -> None:
    engine: list[Wanted] = []
    add_lora = lora._remembering(lambda self, request: engine.append(request))
    add_lora(None, Wanted(str(folder)))
    before = fingerprint_of(Wanted(str(folder)))
    other_weights(folder)
    add_lora(None, Wanted(str(folder)))
    after = fingerprint_of(Wanted(str(folder)))
    assert after == fingerprint_of(Wanted(str(folder)))
    assert after != before
    assert len(engine) == 2


def test_an_adapter_that_cannot_be_found_is_equal_to_none(tmp_path: Path) -> None:
    wanted = Wanted(str(tmp_path / "nowhere"))
    assert fingerprint_of(wanted) != fingerprint_of(wanted)
    # The engine's own loading decides what is wrong with it.
    assert lora._remembering(lambda self, request: "loaded")(None, wanted) == "loaded"


def test_what_is_remembered_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "KNOWN_MAX", 3)
    for number in range(9):
        fingerprint_of(Wanted(str(folder), number))
    assert [number for number, _ in lora._loaded] == [6, 7, 8]
