"""Values that are hidden in configurations and texts, and those that are not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.reading.errors import Problem
from roll.config.reading.masking import MASK, is_secret, masked, masked_text, register_secrets

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    "name",
    [
        *("judge_api_key", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "x-api-key", "apiKey", "hf_token", "accessToken"),
        *("GITHUB_PAT", "PGPASSWORD", "DB_PASS", "password", "client_secret", "credentials", "Authorization", "Cookie"),
        *("MY_TOKEN_X", "GITHUB_TOKEN_2", "API_KEYS", "PASSWORD_DB", "DB_PASSWORD_PROD", "my_api_keys", "TOKEN_HF_CI"),
        *(
            "SSH_PRIVATE_KEY_B64",
            "service-account-key",
            "openai_api_key_2",
            "SESSION_COOKIES",
            "my_token_x",
            "aws_creds",
        ),
        *(
            "dbPassword2",
            "STRIPE_SECRETS_LIVE",
            "githubToken",
            "SLACK_TOKEN_2",
            "refresh_token",
            "webhook_key",
            "clientSecret",
        ),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert masked({"outer": [{name: SECRET}]}) == {"outer": [{name: MASK}]}
    assert SECRET not in str(Problem(f"rewards.{name}", SECRET, "must be something else"))


@pytest.mark.parametrize(
    "name",
    [
        *("max_new_tokens", "top_k", "pass_k", "stop_token_ids", "path", "keep_local_file", "tokens", "eos_token"),
        *("pad_token", "TOKENIZERS_PARALLELISM", "monkey", "token_level_loss", "passes", "author", "compass"),
        *("api_key_env", "--api-key-env", "API_KEY_FILE", "token_ids", "secret_name", "start_token", "max_tokens"),
        *(
            "end_of_turn_token",
            "num_access_tokens",
            "signature",
            "tokens_per_second",
            "pass_at_k",
            "keyword",
            "hotkeys",
        ),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        *((name, "system", False) for name in ("system_key", "input_key", "prompt_key", "reward_fn_key", "answer_key")),
        *(("sort_key", 3, False), ("OPENAI_KEY", "7f3a9c2e1d", True), ("judge_key", "a" * 24, True)),
        *(("hf_token", "x", True), ("eos_token", "<|im_end|>", False), ("API_KEYS", {"a": "b"}, True)),
        *(("HF_TOKENS", "hf1a2b3c4d5e,f6a7b8c9d0e1", True), ("STRIPE_KEYS_LIVE", "k1a2b3c4d5e6f7", True)),
        *(("input_key", "the_question_of_the_second_round", False), ("num_access_tokens", 5, False)),
        *(("signature", "def f(x: list[int]) -> int", False), ("signature", "9f86d081884c7d659a2feaa0c55ad015", True)),
        *(("max_tokens", 4096, False), ("train_keys", ["question", "answer"], False), ("key", "solution", False)),
    ],
)
def test_the_value_decides_where_a_name_leaves_it_open(name: str, value: object, hidden: bool) -> None:
    assert masked({"data": {name: value}}) == {"data": {name: MASK if hidden else value}}


PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEAabcdefghijklmnop\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        *(PEM, PEM[:60], "npm_abcdefghijklmnopqrstuvwx", "gsk_abcdefghijklmnopqrstuv", "ya29.abcdefghijklmnop-qrst"),
        *(
            PEM.replace("RSA PRIVATE KEY", "PGP PRIVATE KEY BLOCK"),
            "xai-abcdefghijklmnopqrst",
            "hvs.abcdefghijklmnopqrst",
        ),
        *("pplx-abcdefghijklmnopqrst", "SG.abcdefghijklmnopqrst.abcdefghijklmnopqrst", "glsa_abcdefghijklmnopqrst"),
        *(
            "ASIAABCDEFGHIJKLMNOP",
            "https://hooks.slack.com/services/T0/B0/abcdefghijklmnop",
            "sk_test_abcdefghijklmnopq",
        ),
        *(
            "xapp-1-abcdefghijklmnopqrst",
            "https://discord.com/api/webhooks/12/abcdefghijklmnop",
            "whsec_abcdefghijklmnopqr",
        ),
        *(
            "dapi0123456789abcdef0123456789abcdef",
            "123456789:AAabcdefghijklmnopqrstuvwxyz0123456",
            "r8_abcdefghijklmnopqr",
        ),
        *("the unknown Zx9Kq2Lm7Pv4Rt8Wn3Bs6Yd1Fh5Jc0 of a service", "figd_abcdefghijklmnopqrst"),
        f"https://user:{SECRET}@host/path",
        f"postgresql://user:{SECRET}@host/db",
        f"https://host/score?x=1&token={SECRET}&y=2",
        f"https://host/score?key={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"{{'Authorization': 'Bearer {SECRET}'}}",
        f"-H 'x-api-key: {SECRET}'",
        f"PGPASSWORD={SECRET} psql",
        f'{{"api_key": "{SECRET}"}}',
        f"['--token', '{SECRET}']",
        f"judge_api_key: {SECRET}",
        "Incorrect API key provided: sk-abcdefghijklmnopqrst",
        "https://ghp_abcdefghijklmnopqrstuvwxyz0123@github.com/a/b",
        "hf_abcdefghijklmnopqrstuvwx",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w",
    ],
)
def test_secrets_in_texts(text: str) -> None:
    hidden = masked_text(text)
    assert MASK in hidden
    assert SECRET not in hidden
    assert "abcdefghijklmnop" not in hidden
    assert masked_text(hidden) == hidden
    assert masked({"note": [text]}) == {"note": [hidden]}, "under whatever name"


@pytest.mark.parametrize(
    "text",
    [
        "unexpected token: foo",
        "Qwen2ForSequenceClassification Qwen3VLMoeForConditionalGeneration of Qwen/Qwen2.5-VL-72B-Instruct-AWQ",
        "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b, id 123e4567-e89b-12d3-a456-426614174000",
        "roll.pipelines.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
        "sorted(rows, key=len)",
        "max_new_tokens=5 prompt_key=problem top_k=3",
        "step 3  actor/pg_loss=0.0123 token/response_length/mean=12",
        "git@github.com:a/b and http://127.0.0.1:8000/v1",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert masked_text(text) == text


def test_values_that_were_met_under_a_secret_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PAT", "from-the-environment")
    register_secrets({"rewards": {"judge": {"judge_api_key": "given-in-1-file"}}, "sort_key": "solution"})
    text = "the service said: from-the-environment and given-in-1-file are wrong for the solution"
    assert masked_text(text) == f"the service said: {MASK} and {MASK} are wrong for the solution"


def test_the_working_directory_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/someone/project")
    monkeypatch.setenv("DB_PWD", "horse-battery-staple")
    text = "no such file: /home/someone/project/data.jsonl"
    assert masked_text(text) == text
    assert masked_text("it is horse-battery-staple") == f"it is {MASK}"


@pytest.mark.parametrize("section", ["env", "system_envs", "headers", "extra_headers"])
def test_whatever_looks_random_among_variables_and_headers(section: str) -> None:
    values = {"SERVICE": "a8f3k2m9x7q1z5w0", "OMP": "8", "NCCL_IB_HCA": "mlx5_0,mlx5_1", "HOME": "/home/user1234567890"}
    values |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "URL": "http://127.0.0.1:8000/v1"}
    assert masked({section: values}) == {section: values | {"SERVICE": MASK}}


def test_nothing_else_is_masked_in_published_files() -> None:
    folders = [Path(__file__).resolve().parents[2] / "examples", Path(os.environ.get("PUBLIC_CONFIGS_DIR", "/none"))]
    for file in (file for folder in folders for file in folder.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        hidden = [key for key, value in leaves(data) if masked({key: value}) != {key: value}]
        assert set(hidden) <= KNOWN, file


KNOWN = {
    "IFLOW_apiKey",
    "IFLOW_searchApiKey",
    "WANDB_API_KEY",
    "api_key",
    "wandb_api_key",
    "SWANLAB_API_KEY",
    "judge_api_key",
}


def leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, str(key))
    elif isinstance(data, list):
        for value in data:
            yield from leaves(value, name)
    elif data is not None:
        yield name, data
