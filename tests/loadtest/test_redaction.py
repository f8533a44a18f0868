"""What is shown of a command: enough to run it again, and nothing that must stay secret."""

import pytest

from midstream.loadtest.redaction import without_secrets

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "words",
    [
        ["--hf-token", SECRET],
        [f"--hf-token={SECRET}"],
        ["--api-key", SECRET, f"{SECRET}2", "--port", "1"],
        ["--api-key", f"-{SECRET}"],
        [f"--api_key={SECRET},{SECRET}&{SECRET}"],
        ["-p", "1", "--ssl-keyfile-password", SECRET],
        [f"--kv-transfer-config.kv_connector_extra_config.access_key={SECRET}"],
        ["env", f"HF_TOKEN={SECRET}", "vllm"],
        ["--config", f'{{"outer": {{"apiKey": "{SECRET} {SECRET}", "port": 1}}}}'],
        ["--config", f'{{"secret_access_keys": ["{SECRET}", "{SECRET}"]}}'],
        ["--config", f"{{'password': '{SECRET}'}}"],
        ["--header", f"Authorization: Bearer {SECRET}"],
        ["sh", "-c", f"OPENAI_API_KEY={SECRET} vllm serve m --api-key {SECRET} --hf-token={SECRET}"],
        ["--url", f"http://user:{SECRET}@host:1/v1"],
    ],
)
def test_no_secret_of_a_command_is_shown(words: list[str]) -> None:
    shown = without_secrets(["vllm", "serve", *words, "--seed", "3"])
    assert SECRET not in " ".join(shown)
    assert "***" in " ".join(shown)
    assert (shown[:2], shown[-2:]) == (["vllm", "serve"], ["--seed", "3"])


def test_everything_else_is_shown_as_it_is() -> None:
    words = [
        "vllm", "serve", "org/model", "--tokenizer", "org/tokenizer", "--max-num-batched-tokens", "8192",
        "--tokenizer-mode=slow", "--ssl-keyfile", "key.pem", "--chat-template", "a: b", "-tp", "2", "--port", "1",
        '{"num_speculative_tokens": 3}', "http://127.0.0.1:1/v1", "",
    ]  # fmt: skip
    assert without_secrets(words) == words


def test_a_flag_without_a_value_takes_none_from_the_next() -> None:
    assert without_secrets(["--hf-token", "--port", "1"]) == ["--hf-token", "--port", "1"]
    assert without_secrets(["--hf-token", "-q", "1"]) == ["--hf-token", "-q", "1"]
