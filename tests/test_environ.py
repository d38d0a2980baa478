"""What of an environment a worker may see."""

from __future__ import annotations

import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.environ import scrub

SECRET_NAMES = [
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "HF_TOKEN",
    "GITHUB_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "MYTOKEN",
    "DB_PASSWORD",
    "PGPASSWORD",
    "MYSQL_PWD",
    "SSHPASS",
    "KEYRING_PASSPHRASE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "NETRC_CREDS",
    "SSH_AUTH_SOCK",
    "XAUTHORITY",
    "GH_PAT",
    "COOKIE",
    "PHPSESSID",
    "SESSION_ID",
    "SESSIONID",
    "JUPYTER_TOKEN",
    "JPY_API_TOKEN",
    "AUTHORIZATION",
    "BASIC_AUTH",
    "api_key",
    "ApiKey",
    "SENTRY_DSN",
    "SLACK_WEBHOOK_URL",
    "STRIPE_SIGNATURE",
    "DATABASE_PASS",
    "apikey",
    "Secret",
    "JWT",
]

SECRET_VALUES = {
    "openai": "sk-proj-abcdefghijklmnop",
    "anthropic": "sk-ant-api03-abcdefghijklmnop",
    "stripe": "sk_live_abcdefghijklmnop",
    "github": "ghp_abcdefghijklmnopqrstuvwxyzabcdefghij",
    "github, fine": "github_pat_11AAAA_bbbb",
    "gitlab": "glpat-abcdefghijklmnopqrst",
    "hugging face": "hf_abcdefghijklmnopqrstuvwxyz",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "slack": "xoxb-1234-abcd",
    "google": "AIzaSyA-abcdefghijklmnopqrstuvwxyz012345",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
    "pem": "-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
    "url": "postgres://me:hunter2@db.example/x",
    "url, user": "https://0123456789abcdef@sentry.example/1",
    "header": "Authorization: Bearer abcdefgh",
    "connection string": "Server=db;User=me;Password=hunter2",
    "hex": "9f86d081884c7d659a2feaa0c55ad015",
    "base64": "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZmdoaWprbG1u",
    "uuid": "8932f937-d72c-4106-c12f-20bd9faed9f6",
    "within text": "--header x --opaque 9f86d081884c7d659a2feaa0c55ad015",
}

PLAIN = {
    "PATH": "/usr/local/bin:/usr/bin:/home/me/.nvm/versions/node/v20.11.0/bin",
    "HOME": "/home/me",
    "PWD": "/home/me/work",
    "OLDPWD": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "en_GB.UTF-8",
    "VIRTUAL_ENV": "/home/me/.cache/envs/a1b2c3d4e5f60718293a4b5c6d7e8f90",
    "PYTHONPATH": "/home/me/src:/opt/lib",
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "OMP_NUM_THREADS": "8",
    "TOKENIZERS_PARALLELISM": "false",
    "HOSTNAME": "notebook-7d4b9c6f5-x2x9z",
    "LS_COLORS": "rs=0:di=01;34:ln=01;36:mh=00:pi=40;33:so=01;35:do=01;35:bd=40;33;01",
    "GIT_AUTHOR_NAME": "A. Person",
    "TERM": "xterm-256color",
    "JPY_SESSION_NAME": "/home/me/Analysis of 2024 sales, final version 3.ipynb",
    "NIX_STORE": "/nix/store/0c6q5x1dbf4b1mqb9z1nwz3ll4vzcx1y-python3-3.11.7/lib",
    "HTTP_PROXY": "http://proxy.example:3128",
    "TITLE": "an-ordinary-sentence-with-many-words-from-2024",
    "EMPTY": "",
}


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_variable_with_a_telling_name_is_left_out_whatever_it_holds(name: str) -> None:
    assert name not in scrub({name: "x"})


@pytest.mark.parametrize("kind", SECRET_VALUES)
def test_variable_with_a_telling_value_is_left_out_whatever_its_name(kind: str) -> None:
    assert "HARMLESS" not in scrub({"HARMLESS": SECRET_VALUES[kind]})


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_variable_passes(name: str) -> None:
    assert scrub({name: PLAIN[name]})[name] == PLAIN[name]


@given(
    st.sampled_from(["TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIALS", "COOKIE"]),
    st.from_regex(r"[A-Z]{0,8}_?", fullmatch=True),
    st.from_regex(r"_?[A-Z0-9]{0,8}", fullmatch=True),
    st.text(max_size=20),
)
def test_telling_word_anywhere_in_a_name_is_enough(
    word: str, before: str, after: str, value: str
) -> None:
    for name in (before + word + after, (before + word + after).lower()):
        if not word.endswith("KEY") or not after.upper().startswith(("BOARD", "MAP", "WORD")):
            assert name not in scrub({name: value})


@pytest.mark.parametrize("size", [24, 32, 64])
def test_random_bytes_in_any_common_coding_are_left_out(size: int) -> None:
    """Of 1000 secrets no more than a few pass for a path or for plain text."""
    randbytes = random.Random(size).randbytes
    passed = 0
    for _ in range(250):
        data = randbytes(size)
        codings = base64.b64encode(data), base64.urlsafe_b64encode(data), base64.b32encode(data)
        for text in (data.hex(), *(coded.decode() for coded in codings)):
            passed += "HARMLESS" in scrub({"HARMLESS": text})

    assert passed <= 15


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=60), max_size=8))
def test_what_passes_is_unchanged_and_passes_again(environ: dict[str, str]) -> None:
    kept = scrub(environ)

    assert kept.items() <= environ.items()
    assert scrub(kept) == kept
