"""Values that are hidden in configurations and texts, and those that are not."""

from __future__ import annotations

import os
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from roll.config.pipelines import definitions
from roll.config.reading.errors import Problem
from roll.config.reading.masking import MASK, is_secret, know_keys, masked, masked_text, register_secrets
from roll.config.reading.schema import declared_secrets
from roll.config.reading.secrecy import looks_random, tells_secret

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    "name",
    [
        *("judge_api_key", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "x-api-key", "apiKey", "hf_token", "accessToken"),
        *("GITHUB_PAT", "PGPASSWORD", "DB_PASS", "password", "client_secret", "credentials", "Authorization", "Cookie"),
        *("MY_TOKEN_X", "GITHUB_TOKEN_2", "API_KEYS", "PASSWORD_DB", "DB_PASSWORD_PROD", "my_api_keys", "TOKEN_HF_CI"),
        *("SSH_PRIVATE_KEY_B64", "service-account-key", "openai_api_key_2", "SESSION_COOKIES"),
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
        *("api_key_env", "--api-key-env", "API_KEY_FILE", "token_ids", "secret_name", "tokenizer"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        *((name, "system", False) for name in ("system_key", "input_key", "prompt_key", "reward_fn_key", "answer_key")),
        ("keys", "problem", False),
        *(("sort_key", 3, False), ("OPENAI_KEY", "7f3a9c2e1d", True), ("judge_key", "qZ7vTmXw2LkR9sBd", True)),
        *(("hf_token", "x", True), ("eos_token", "<|im_end|>", False), ("API_KEYS", {"a": "b"}, True)),
    ],
)
def test_the_value_decides_where_a_name_leaves_it_open(name: str, value: object, hidden: bool) -> None:
    assert masked({"data": {name: value}}) == {"data": {name: MASK if hidden else value}}


PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEAabcdefghijklmnop\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        *(PEM, PEM[:60], "npm_abcdefghijklmnopqrstuvwx", "gsk_abcdefghijklmnopqrstuv", "ya29.abcdefghijklmnop-qrst"),
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


@pytest.fixture
def schema() -> None:
    """The keys that every load makes known."""
    for pipeline in definitions():
        know_keys(declared_secrets(pipeline.config_class))


HEX = "9f86d081884c7d659a2feaa0c55ad015"
PLAIN = "correct-horse-battery"
UNKNOWN = "Zk3vQ9tLw8XbN2mRc7Yh"
PGP = "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQdGBF4abcdefgh\n-----END PGP PRIVATE KEY BLOCK-----"
SECRETS = [
    *(({name: PLAIN}, PLAIN) for name in ("HF_TOKENS", "STRIPE_KEYS_LIVE", "my_token_x", "dbPassword2", "aws_creds")),
    *(({name: PLAIN}, PLAIN) for name in ("hfToken", "HFTokens", "GITLAB_TOKEN_CI_2", "oauthToken", "session_token")),
    *(({name: PLAIN}, PLAIN) for name in ("db-password", "passphrase2", "smtp_pass", "SSH_KEYS", "clientSecrets")),
    *(({name: PLAIN}, PLAIN) for name in ("gcp_credentials_prod", "basic_auth", "signingKey", "bot_token", "MY_PAT_2")),
    *(({name: PLAIN}, PLAIN) for name in ("PGPASSWORD", "redis_passwd", "sessionCookie", "accessKeys", "hmac_key")),
    *(({name: PLAIN}, PLAIN) for name in ("githubtoken", "ENCRYPTION_KEY_V2", "admin_token", "deploy_key", "SIG_AUTH")),
    *(
        ({"note": f"it is {value} there"}, value)
        for value in (
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w",
            "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxMjM0In0",
            "xai-aK3dP0sV7tR2yQ9wE5uM1nB8",
            "pplx-aK3dP0sV7tR2yQ9wE5uM1nB8",
            "SG.aK3dP0sV7tR2yQ.wE5uM1nB8xC4zL6kJ",
            "glsa_aK3dP0sV7tR2yQ9wE5uM1nB8_1a2b3c4d",
            "hvs.CAESIaK3dP0sV7tR2yQ9wE5u",
            "ASIAIOSFODNN7EXAMPLE",
            "AKIAIOSFODNN7EXAMPLE",
            "npm_aK3dP0sV7tR2yQ9wE5uM1nB8",
            "gsk_aK3dP0sV7tR2yQ9wE5uM1nB8",
            "ya29.a0AfH6SMBx-aK3dP0sV7tR2",
            "sk-proj-aK3dP0sV7tR2yQ9wE5uM",
            "github_pat_11AAAAA_aK3dP0sV7tR2yQ",
            "xoxb-123456789012-aK3dP0sV7tR2",
            "AIzaSyaK3dP0sV7tR2yQ9wE5uM1nB8xC4zL6k",
            "newvendor_aK3dP0sV7tR2yQ9wE5uM1nB8",
            "acme-live-aK3dP0sV7tR2yQ9wE5uM1nB8",
            "lsv2_pt_aK3dP0sV7tR2yQ9wE5uM",
        )
    ),
    ({"note": PGP}, "lQdGBF4abcdefgh"),
    ({"note": "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXabcd"}, "B00000000"),
    ({"note": "https://discord.com/api/webhooks/1234/abcd-efgh"}, "abcd-efgh"),
    ({"note": f"redis://:{PLAIN}@cache:6379/0"}, PLAIN),
    ({"base_url": f"https://someone:{PLAIN}@host/v1"}, PLAIN),
    ({"note": f"https://host/blob?sv=2024&sig={PLAIN}"}, PLAIN),
    ({"system_envs": {"ACME_SESSION": UNKNOWN}}, UNKNOWN),
    ({"system_envs": {"ACME_SALT": HEX}}, HEX),
    ({"env_vars": {"acme": "q8w3e7r2t9y4"}}, "q8w3e7r2t9y4"),
    ({"env": {"ACME": "0a1b2c3d-4e5f-6a7b-8c9d-0e1f2a3b4c5d"}}, "0e1f2a3b4c5d"),
    ({"headers": {"X-Acme": PLAIN}}, PLAIN),
    ({"default_headers": {"x-goog-user": "1234"}}, "1234"),
    ({"extra_headers": {"Ocp-Apim-Subscription": "abc def"}}, "abc def"),
    ({"tracker_kwargs": {"handle": UNKNOWN}}, UNKNOWN),
    ({"tracker_kwargs": {"login_kwargs": {"who": [UNKNOWN]}}}, UNKNOWN),
    ({"tool_options": {"access": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}}, "wJalrXUtnFEMI"),
    ({"tool_options": {"access": "/Jalr8UtnFEMIK7MDENGbPxRfiCYKZ3M"}}, "K7MDENG"),
    ({"args": ["--api-token", PLAIN]}, PLAIN),
    ({"args": [f"--api-token={PLAIN}"]}, PLAIN),
    ({"service": {"signature": UNKNOWN}}, UNKNOWN),
    ({"search_key": "7f3a9c2e1d"}, "7f3a9c2e1d"),
    ({"lower": "mqzxvkwjtbrnpgdhslfc"}, "mqzxvkwjtbrnpgdhslfc"),
    ({"judge_api_key": "x"}, "x"),
]


@pytest.mark.usefixtures("schema")
@pytest.mark.parametrize(("tree", "secret"), SECRETS)
def test_secrets_in_a_configuration(tree: dict[str, Any], secret: str) -> None:
    text = yaml.safe_dump(masked(tree), width=1000)
    assert MASK in text and secret not in text
    assert masked(masked(tree)) == masked(tree)


@pytest.mark.usefixtures("schema")
@pytest.mark.parametrize(
    "tree",
    [
        {"start_token": "<s>", "end_of_turn_token": "<|im_end|>", "num_access_tokens": 4, "my_token": "<|eot|>"},
        {"sort_key": "the_full_text_of_the_question_with_its_context", "reward_fn_key": "data_source_of_prompts"},
        {"system_key": "qZ7vTmXw2LkR9sBd", "data": {"input_key": "problem_statement_text_2024"}},
        {"signature": "def solve(numbers: list[int]) -> int", "prompt": "token: none"},
        {"path": f"/data/{HEX}/model", "revision": HEX, "run_id": "0a1b2c3d-4e5f-6a7b-8c9d-0e1f2a3b4c5d"},
        {
            "wrap": ["Qwen3MoeDecoderLayer"],
            "cls": "my_package.rewards.GenerativeRewardModelWorkerV2",
            "model": "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8",
        },
        {"name": "rlvr_qwen2_5_7B_gsm8k_8gpu_v2x3", "file": f"{HEX}.safetensors", "url": f"s3://bucket/{HEX}/data"},
        {"system_envs": {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "A": "expandable_segments:True", "B": ":4096:8", "C": "INFO"}},
        {"headers": {"Content-Type": "application/json"}, "max_tokens_per_step": 64, "use_auth_token": True},
    ],
)
def test_other_things_in_a_configuration(tree: dict[str, Any]) -> None:
    assert masked(tree) == tree


CREDENTIALS = {"judge_api_key", "IFLOW_apiKey", "IFLOW_searchApiKey", "RAY_AUTH_TOKEN", "api_key", "secrets"}
"""Keys of the published files that hold credentials, or a place for one."""
ROOTS = [Path(__file__).parents[2] / "examples", Path(os.environ.get("PUBLIC_CONFIGS_DIR", "/nowhere"))]


def hidden_keys(before: Any, after: Any, key: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from hidden_keys(value, after[name], name)
    elif isinstance(before, list) and isinstance(after, list):
        for value, shown in zip(before, after, strict=True):
            yield from hidden_keys(value, shown, key)
    elif before != after:
        yield key


@cache
def trees_of(root: Path) -> list[tuple[Path, Any]]:
    """Of all YAML files below ``root``, read by libyaml where it is there: it takes a tenth of the time."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = sorted(root.rglob("*.yaml"))
    return [(file, tree) for file in files for tree in yaml.load_all(file.read_text("utf-8"), Loader=loader)]


@pytest.mark.usefixtures("schema")
@pytest.mark.parametrize("root", ROOTS, ids=["examples", "published"])
def test_values_of_whole_configurations_stay(root: Path) -> None:
    if not trees_of(root):
        pytest.skip("PUBLIC_CONFIGS_DIR does not name a folder of published configurations")
    for file, tree in trees_of(root):
        assert set(hidden_keys(tree, masked(tree))) <= CREDENTIALS, file


def test_a_field_with_the_name_of_a_secret_says_whether_it_is_one() -> None:
    """A column is known by its key, so a credential of the schema has to be declared."""
    for pipeline in definitions():
        keys = declared_secrets(pipeline.config_class)
        columns = {name for name in keys if name.endswith("_key")} - {"judge_api_key"}
        named = {name for name in keys if tells_secret(name, PLAIN)}
        assert {name for name, is_declared in keys.items() if is_declared} == named - columns


ALPHABETS = {
    "lower-case letters": string.ascii_lowercase,
    "lower-case letters and digits": string.ascii_lowercase + string.digits,
    "hexadecimal": string.digits + "abcdef",
    "base32": string.ascii_uppercase + "234567",
    "base32 in lower case": string.ascii_lowercase + "234567",
    "base64url": string.ascii_letters + string.digits + "-_",
}


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_random_texts_of_any_alphabet_are_recognised(alphabet: str) -> None:
    random = Random(0)
    found = [looks_random("".join(random.choices(ALPHABETS[alphabet], k=random.randint(20, 64)))) for _ in range(2000)]
    assert sum(found) >= 0.99 * len(found)
