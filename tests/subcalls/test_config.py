"""Specs: what they mean, what they refuse, and that they never show a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.config import (
    EndpointSpec,
    api_key_for,
    is_private,
    parse_root_spec,
    parse_sub_spec,
)
from rlm_kernel.errors import UsageError

KEY = "sk-proj-0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "model", "url"),
    [
        ("openai:gpt-5-mini", "gpt-5-mini", "https://api.openai.com/v1"),
        ("openai:m@http://localhost:8000", "m", "http://localhost:8000/v1"),
        ("openai:m@http://localhost:8000/", "m", "http://localhost:8000/v1"),
        ("openai:m@http://localhost:8000/v1", "m", "http://localhost:8000/v1"),
        ("openai:m@http://localhost:8000/v1/", "m", "http://localhost:8000/v1"),
        ("openai:m@http://h/v1/chat/completions", "m", "http://h/v1"),
        ("openai:m@https://openrouter.ai/api/v1", "m", "https://openrouter.ai/api/v1"),
        ("openai:m@HTTP://Host:1/V", "m", "http://host:1/V"),
        ("openai:Qwen/Qwen3-8B@http://h", "Qwen/Qwen3-8B", "http://h/v1"),
        ("openai:qwen3:8b@http://h", "qwen3:8b", "http://h/v1"),
        ("openai:models/x@20240101@http://h", "models/x@20240101", "http://h/v1"),
        ("openai:models/x@20240101", "models/x@20240101", "https://api.openai.com/v1"),
        ("openai:org/m@2024-01-01", "org/m@2024-01-01", "https://api.openai.com/v1"),
        ("openai:m@v1.2", "m@v1.2", "https://api.openai.com/v1"),
        ("openai:m@latest", "m@latest", "https://api.openai.com/v1"),
        ("openai:@cf/meta/m", "@cf/meta/m", "https://api.openai.com/v1"),
        ("openai:m@v1@http://h", "m@v1", "http://h/v1"),
        ("openai:m@http://[::1]:8000", "m", "http://[::1]:8000/v1"),
        (" openai:m@http://h ", "m", "http://h/v1"),
    ],
)
def test_an_openai_spec_is_a_model_and_a_normal_url(text: str, model: str, url: str) -> None:
    """Models may hold ``@``, ``/`` and ``:``; ``/v1`` is added once, where there is no path."""
    spec = parse_sub_spec(text, {})

    assert (spec.kind, spec.model, spec.base_url) == ("openai", model, url)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("openai:m@http://a,http://b:1/v1", "openai:m@http://a/v1,http://b:1/v1"),
        ("openai:m@http://a,HTTPS://B/x/,http://a/v1", "openai:m@http://a/v1,https://b/x"),
        ("vllm:org/m@http://a,http://b", "vllm:org/m@http://a/v1,http://b/v1"),
        ("vllm:m@http://a", "vllm:m@http://a/v1"),
        ("vllm:/models/m", "vllm:/models/m"),
        ("vllm:m@2024", "vllm:m@2024"),
        ("vllm", "vllm"),
    ],
)
def test_a_spec_names_several_servers_or_leaves_them_to_be_found(text: str, shown: str) -> None:
    """URLs stand in order, each once and in its normal form; the first is `base_url`."""
    spec = parse_sub_spec(text, {})

    assert str(spec) == shown
    assert spec.base_url == (spec.urls[0] if spec.urls else "")
    assert parse_root_spec(shown, {}) == spec


def test_a_spec_of_one_url_is_the_same_however_it_is_made() -> None:
    """`base_url` and `urls` cannot contradict each other."""
    by_base = EndpointSpec(kind="openai", model="m", base_url="http://h/v1")
    by_list = EndpointSpec(kind="openai", model="m", urls=("http://h/v1",))

    assert by_base == by_list
    assert by_list.at("http://i/v1").urls == ("http://i/v1",)


def test_a_spec_without_url_takes_it_from_the_environment() -> None:
    """OPENAI_BASE_URL is the default URL, in its normal form."""
    spec = parse_root_spec("openai:m", {"OPENAI_BASE_URL": "http://gpu:8000/"})

    assert str(spec) == "openai:m@http://gpu:8000/v1"


@pytest.mark.parametrize(
    "text", ["openai:a@b/c:d@https://h:8/x/v1", "embedded", "human", "playbook:a b.py"]
)
def test_a_spec_is_the_same_after_writing_and_reading(text: str) -> None:
    """``str(spec)`` is a spec that names the same thing."""
    spec = parse_root_spec(text, {})

    assert parse_root_spec(str(spec), {}) == spec


@given(st.text(min_size=1).filter(lambda model: model.strip() and "@" not in model))
def test_any_model_name_survives(model: str) -> None:
    """A name without ``@`` goes through a spec as it is, but for blanks around it."""
    spec = parse_sub_spec(f"openai:{model}@http://h", {})

    assert spec.model == model.strip()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("opnai:gpt-5", "did you mean 'openai:gpt-5'?"),
        ("gpt-5-mini", "did you mean 'openai:gpt-5-mini'?"),
        ("embeded", "did you mean 'embedded'?"),
        ("embedded:llama", "did you mean 'embedded'?"),
        ("Human", "did you mean 'human'?"),
        ("playbook:", "did you mean 'playbook:FILE'?"),
        ("", "is no root spec"),
        ("openai:", "did you mean 'openai:MODEL@URL'?"),
        ("openai:@http://h", "names no model"),
        ("openai:m@localhost:8000", "write openai:m@http://localhost:8000"),
        ("openai:m@[::1]:80/v1", "write openai:m@http://[::1]:80/v1"),
        ("openai:m@", "what follows the @ in the spec is no URL: write openai:MODEL@http://HOST"),
        ("openai:m@ ", "is no URL"),
        ("openai:m@ftp://a", "is no URL"),
        ("openai:m@http:/a", "is no URL"),
        ("openai:m@notaurl", "is no URL"),
        ("openai:m@gpu.example.org/v1", "is no URL"),
        ("openai:m@10.0.0.1", "is no URL"),
        ("openai:m@http://", "is no URL of an endpoint"),
        ("openai:m@http://h:99999", "is no URL of an endpoint"),
        ("openai:m@http://[oops", "is no URL of an endpoint"),
        ("openai:m@http://a]b/", "is no URL of an endpoint"),
        ("openai:m@http://\u2100.example/", "is no URL of an endpoint"),
        ("openai:m@http://h/v1?key=1", "no query"),
        ("openai:m@http://a,b:80", "each with its own http://"),
        ("openai:m@http://a , http://b", "no blanks and no quotes in them or between them"),
        ("vllm:m@http://a,http://b c", "no blanks and no quotes"),
        ("vllm:m@http://a'b", "no blanks and no quotes"),
        ("openai:m@http://a/v1,", "each with its own http://"),
        ("vllm:m@http://a,http://[oops", "is no URL of an endpoint"),
        ("vllm:m@localhost:8000", "write vllm:m@http://localhost:8000"),
        ("vllm:", "did you mean 'vllm:MODEL'?"),
        ("vllm:@http://h", "write vllm:MODEL"),
        ("vlm:m", "did you mean 'vllm:m'?"),
    ],
)
def test_what_is_no_spec_is_refused_with_the_nearest_that_is(text: str, hint: str) -> None:
    """The one-sentence error says what to write instead."""
    with pytest.raises(UsageError) as refused:
        parse_root_spec(text, {})

    assert hint in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["human", "playbook:x.py"])
def test_only_a_model_answers_sub_calls(text: str) -> None:
    """A person and a playbook are roots only."""
    with pytest.raises(UsageError, match="can only be a root"):
        parse_sub_spec(text, {})


@pytest.mark.parametrize(
    "text",
    [
        "openai:m@https://user:hunter2@h/v1",
        "openai:m@https://hunter2@h/v1",
        "opnai:m@https://user:hunter2@h/v1",
        "openai:m@https://h/v1?key=hunter2",
        "openai:m@http://user:hunter2@[oops",
        "openai:m@http://h,http://user:hunter2@i",
        "openai:m@http://h, http://user:hunter2@i",
        "vllm:m@http://user:hunter2@h",
        "openai:m@ftp://user:hunter2@h:80",
        "openai:m@ftp://user:hunter2@2",
        "openai:m@user:hunter2@h:80",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    """Neither the spec nor the error may carry a secret."""
    with pytest.raises(UsageError) as refused:
        parse_sub_spec(text, {})

    assert "hunter2" not in str(refused.value)


def test_the_key_comes_from_the_environment_ours_first() -> None:
    """RLM_API_KEY goes before OPENAI_API_KEY; empty is not set."""
    spec = parse_sub_spec("openai:m@https://api.example.org", {})

    assert api_key_for(spec, {"OPENAI_API_KEY": KEY}) == KEY
    assert api_key_for(spec, {"OPENAI_API_KEY": "other", "RLM_API_KEY": KEY}) == KEY
    assert api_key_for(spec, {"OPENAI_API_KEY": f" {KEY}\n", "RLM_API_KEY": ""}) == KEY


def test_a_spec_shows_no_key() -> None:
    """Text and repr of a spec are the same with and without a key in the environment."""
    environ = {"OPENAI_API_KEY": KEY}
    spec = parse_sub_spec("openai:m@https://api.example.org", environ)

    assert KEY not in str(spec) + repr(spec)


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("localhost:8000", True),
        ("127.0.0.1", True),
        ("[::1]:8000", True),
        ("10.1.2.3", True),
        ("192.168.0.9:80", True),
        ("gpu01", True),
        ("gpu01.lan", True),
        ("api.openai.com", False),
        ("8.8.8.8", False),
        ("localhost.example.com", False),
    ],
)
def test_only_servers_nearby_are_asked_without_a_key(host: str, private: bool) -> None:
    """A public server without a key is an error that says which variable to set."""
    spec = EndpointSpec(kind="openai", model="m", base_url=f"http://{host}/v1")

    assert is_private(spec.base_url) is private
    if private:
        assert api_key_for(spec, {}) == "none"
    else:
        with pytest.raises(UsageError, match="set OPENAI_API_KEY"):
            api_key_for(spec, {})


def test_one_public_server_of_several_needs_a_key() -> None:
    """A list is as public as the most public of its servers."""
    spec = parse_sub_spec("vllm:m@http://localhost:1,https://api.example.org", {})

    with pytest.raises(UsageError, match=r"no API key for https://api\.example\.org/v1"):
        api_key_for(spec, {})
    assert api_key_for(parse_sub_spec("vllm:m", {}), {}) == "none"


def test_a_key_that_no_header_can_carry_is_refused_unseen() -> None:
    """A key with a line break in it would be a second header."""
    spec = parse_sub_spec("openai:m", {})

    with pytest.raises(UsageError) as refused:
        api_key_for(spec, {"OPENAI_API_KEY": "secret\nX-Other: 1"})

    assert "secret" not in str(refused.value)
