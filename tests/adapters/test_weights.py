"""What identifies a model: every change that matters changes it, and nothing else does."""

import json
from pathlib import Path

import pytest

from midstream.adapters.prompt import prompt_hash
from midstream.adapters.weights import SAMPLE_BYTES, SAMPLES, model_fingerprint, tokenizer_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layers": 2}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_fingerprints_are_of_content_and_not_of_place(folder: Path, tmp_path: Path) -> None:
    before = model_fingerprint(folder), tokenizer_fingerprint(folder)
    assert all(len(print_) == 32 and set(print_) <= set("0123456789abcdef") for print_ in before)
    moved = folder.rename(tmp_path / "elsewhere")
    (moved / "config.json").touch()
    assert (model_fingerprint(moved), tokenizer_fingerprint(moved)) == before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "extra.bin"])
def test_configuration_and_weights_are_the_models(folder: Path, name: str) -> None:
    before = model_fingerprint(folder), tokenizer_fingerprint(folder)
    (folder / name).write_bytes(b"changed")
    assert model_fingerprint(folder) != before[0]
    assert tokenizer_fingerprint(folder) == before[1]


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.txt", "merges.txt", "added_tokens.json", "chat_template.jinja"]
)
def test_what_makes_tokens_is_the_tokenizers(folder: Path, name: str) -> None:
    before = model_fingerprint(folder), tokenizer_fingerprint(folder)
    (folder / name).write_bytes(b"changed")
    assert model_fingerprint(folder) == before[0]
    assert tokenizer_fingerprint(folder) != before[1]


@pytest.mark.parametrize("name", ["README.md", ".cache.json", ".gitattributes", "model.safetensors.lock"])
def test_what_no_engine_reads_changes_nothing(folder: Path, name: str) -> None:
    before = model_fingerprint(folder), tokenizer_fingerprint(folder)
    (folder / name).write_bytes(b"changed")
    (folder / "original").mkdir()
    assert (model_fingerprint(folder), tokenizer_fingerprint(folder)) == before


def test_a_renamed_file_is_another_model(folder: Path) -> None:
    before = model_fingerprint(folder)
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    assert model_fingerprint(folder) != before


def test_every_byte_of_a_file_within_the_samples_counts(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    before = model_fingerprint(folder)
    for at in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert model_fingerprint(folder) != before


def test_a_large_file_is_known_by_its_beginning_its_end_and_its_size(folder: Path) -> None:
    path = folder / "model.safetensors"
    size = SAMPLE_BYTES * (SAMPLES + 8)
    prints = set()
    for at, length in ((None, size), (0, size), (size - 1, size), (size // SAMPLES, size), (None, size + 1)):
        with path.open("wb") as file:
            file.truncate(length)
            if at is not None:
                file.seek(at)
                file.write(b"\1")
        prints.add(model_fingerprint(folder))
    assert len(prints) == 5


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        model_fingerprint(folder / "nowhere")


def test_a_prompt_is_known_by_its_ids_in_order() -> None:
    known = {prompt_hash(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1], [258], [2**32 - 1])}
    assert len(known) == 7
