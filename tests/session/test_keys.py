"""Keys go only to servers that a person or a program named, whatever code asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_kernel import RLM
from rlm_kernel.errors import UsageError
from rlm_kernel.session.models import Models
from rlm_kernel.session.settings import Settings
from tests.session.conftest import Serve

KEY = "sk-never-shown-anywhere"


def test_code_of_the_root_cannot_send_prompts_or_the_key_elsewhere(
    serve: Serve, tmp_path: Path
) -> None:
    elsewhere = serve(reply=lambda prompt: "got it")
    root = serve(
        [
            (
                "```repl\ntry:\n"
                f"    r = sub_RLM(['x'], model='openai:scripted@{elsewhere.base_url}')\n"
                "except Exception as error:\n    Final = str(error)\n```"
            ),
        ]
    )
    rlm = RLM(
        root=f"openai:scripted@{root.base_url}",
        record=tmp_path / "r.sqlite",
        environ={"OPENAI_API_KEY": KEY},
    )
    done = rlm.completion("text", query="q")
    assert "named by code alone" in done.response
    assert elsewhere.requests == []
    assert root.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert KEY.encode() not in (tmp_path / "r.sqlite").read_bytes()


def test_a_spec_in_a_persons_text_is_trusted_and_no_other() -> None:
    models = Models({"OPENAI_API_KEY": KEY, "RLM_SUB": "openai:m@http://sub.example"})
    models.trust("%%rlm --root openai:m@https://root.example/v1 --sub embedded\nopenai: what?")
    for spec in ("openai:m@http://sub.example", "openai:other@https://root.example", "openai:m"):
        assert models.sub(Settings(), spec).spec.startswith("openai:")
    with pytest.raises(UsageError, match="named by code alone"):
        models.sub(Settings(), "openai:m@http://evil.example")
    with pytest.raises(UsageError, match="named by code alone"):
        models.check_root("openai:m@http://evil.example")


@pytest.mark.parametrize("between", [",", " , ", ", ", "\n,"])
def test_servers_that_a_persons_text_names_are_all_asked_or_the_spec_is_refused(
    between: str,
) -> None:
    """What is found in the text is what is read of the spec: not only the first of its servers."""
    spec = f"openai:m@http://one.local{between}http://two.local"
    models = Models({})
    models.name(f"sub_RLM(['x'], model='{spec}')")
    if between == ",":
        assert (
            models.sub(Settings(), spec).spec == "openai:m@http://one.local/v1,http://two.local/v1"
        )
    else:
        with pytest.raises(UsageError, match="no blanks"):
            models.sub(Settings(), spec)


def test_a_key_is_asked_for_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        RLM(root="openai:m@https://api.example.com", environ={})


def test_another_model_of_the_same_server_may_be_asked(rlm: Callable[..., RLM]) -> None:
    made = rlm("r = sub_RLM(['x'], model='other')\nFinal = str(r[0])")
    assert "other" in made.completion("text", query="q").response
