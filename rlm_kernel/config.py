"""Which models to ask and with which key: specs, and the environment behind them.

A *spec* names the root or the model of the sub-calls in one word:

    openai:MODEL[@URL]   any OpenAI-compatible server; without URL OPENAI_BASE_URL, else OpenAI
    vllm:MODEL[@URL]     a vLLM server; without URL those that ``jupyter rlm serve`` started
    vllm                 the model that they serve, where it is one
    embedded[:smollm2]   the small model that comes with rlm-kernel
    human                a person writes the cells (root only)
    playbook:FILE        cells from a .py or .ipynb file (root only)

URL may be several, with commas and no blanks between them, each with its ``http://``: servers of
one model.

This is the only module that reads environment variables for endpoints. What
it returns is frozen, and a spec never holds a key, so that it can be shown,
logged and recorded as it is.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec

from rlm_kernel.errors import UsageError

__all__ = [
    "EMBEDDED_MODEL",
    "OPENAI_URL",
    "EndpointSpec",
    "api_key_for",
    "is_private",
    "parse_root_spec",
    "parse_sub_spec",
]

Kind = Literal["openai", "vllm", "embedded", "human", "playbook"]

OPENAI_URL = "https://api.openai.com/v1"
EMBEDDED_MODEL = "smollm2"
KEY_NAMES = ("RLM_API_KEY", "OPENAI_API_KEY")
"""Environment variables with a key; the first that is set counts."""

_SUB_FORMS = ("openai:MODEL@URL", "openai:MODEL", "vllm:MODEL", "embedded")
_ROOT_FORMS = (*_SUB_FORMS, "human", "playbook:FILE")
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")


class EndpointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a spec names. ``str()`` is a spec again, in its normal form and without a key."""

    kind: Kind
    model: str = ""
    base_url: str = ""
    """Of kinds ``openai`` and ``vllm``: absolute, without user, query and trailing slash."""

    urls: tuple[str, ...] = ()
    """`base_url`, and after it those of further servers of the model. None where kind ``vllm``
    names no server: they are looked up when they are needed."""

    path: str = ""
    """Of kind ``playbook``: the file, as it was given."""

    def __post_init__(self) -> None:
        if self.urls[:1] == (self.base_url,):
            return
        if self.base_url:
            msgspec.structs.force_setattr(self, "urls", (self.base_url,))
        elif self.urls:
            msgspec.structs.force_setattr(self, "base_url", self.urls[0])

    @property
    def is_server(self) -> bool:
        """Whether it names a model behind HTTP."""
        return self.kind in ("openai", "vllm")

    def at(self, url: str) -> EndpointSpec:
        """The same model, behind *url* alone."""
        return EndpointSpec(kind=self.kind, model=self.model, base_url=url)

    def __str__(self) -> str:
        if self.is_server:
            model = f":{self.model}" if self.model else ""
            servers = f"@{','.join(self.urls)}" if self.urls else ""
            return f"{self.kind}{model}{servers}"
        if self.kind == "playbook":
            return f"playbook:{self.path}"
        return f"embedded:{self.model}" if self.kind == "embedded" else self.kind


def parse_root_spec(text: str, environ: Mapping[str, str] | None = None) -> EndpointSpec:
    """The root that *text* names. *environ* is the process's where ``None``.

    Raises
    ------
    UsageError
        It names none; the message lists the forms and the nearest one.
    """
    return _parse(text, "root", _ROOT_FORMS, os.environ if environ is None else environ)


def parse_sub_spec(text: str, environ: Mapping[str, str] | None = None) -> EndpointSpec:
    """The model of sub-calls that *text* names; else like `parse_root_spec`."""
    return _parse(text, "sub", _SUB_FORMS, os.environ if environ is None else environ)


def api_key_for(spec: EndpointSpec, environ: Mapping[str, str] | None = None) -> str:
    """The key to send to *spec*: of RLM_API_KEY, else of OPENAI_API_KEY.

    A server on this machine or in a private network needs none: ``"none"`` then.

    Raises
    ------
    UsageError
        No key is set for a public server, or it cannot be sent. The key is never shown.
    """
    environ = os.environ if environ is None else environ
    for name in KEY_NAMES:
        key = environ.get(name, "").strip()
        if key and not (key.isascii() and key.isprintable()):
            raise UsageError(f"the key in {name} has characters that no key has; set it again")
        if key:
            return key
    public = [url for url in spec.urls if not is_private(url)]
    if not public:
        return "none"
    raise UsageError(
        f"no API key for {public[0]}: set OPENAI_API_KEY (or RLM_API_KEY) in the environment"
    )


def is_private(url: str) -> bool:
    """Whether the host of *url* is this machine or in a private network, told by its name alone."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and ("." not in host or host.endswith(_PRIVATE_SUFFIXES))
    return address.is_private or address.is_loopback or address.is_link_local


def _parse(
    text: str, role: str, forms: tuple[str, ...], environ: Mapping[str, str]
) -> EndpointSpec:
    text = text.strip()
    kind, _, rest = text.partition(":")
    if kind == "openai" and rest:
        return _parse_openai(rest, environ)
    if text == "vllm":
        return EndpointSpec(kind="vllm")
    if kind == "vllm" and rest:
        return _parse_vllm(rest)
    if kind == "embedded" and (rest or EMBEDDED_MODEL) == EMBEDDED_MODEL:
        return EndpointSpec(kind="embedded", model=EMBEDDED_MODEL)
    if role == "root" and text == "human":
        return EndpointSpec(kind="human")
    if role == "root" and kind == "playbook" and rest:
        return EndpointSpec(kind="playbook", path=rest)
    raise UsageError(_unknown(text, role, forms))


def _unknown(text: str, role: str, forms: tuple[str, ...]) -> str:
    """Why *text* is no spec. It is cut short, and left out where it may hold a password."""
    shown = "what was given" if "@" in text and "//" in text else repr(text[:60])
    kind, _, rest = text.partition(":")
    hint = ""
    if role == "sub" and (kind == "playbook" or text == "human"):
        hint = f"; {kind} can only be a root"
    elif near := _nearest(kind, rest, forms):
        hint = f"; did you mean {near!r}?"
    return f"{shown} is no {role} spec: give {', '.join(forms[:-1])} or {forms[-1]}{hint}"


def _nearest(kind: str, rest: str, forms: tuple[str, ...]) -> str:
    heads = {form.partition(":")[0]: form for form in reversed(forms)}
    if kind in heads:
        return heads[kind]
    close = difflib.get_close_matches(kind.lower(), heads, n=1, cutoff=0.6)
    if close:
        form = heads[close[0]]
        return f"{close[0]}:{rest}" if ":" in form and rest and "@" not in rest else form
    # A bare model name, as other tools take it.
    return f"openai:{kind}" if kind and not rest and re.fullmatch(r"[\w./-]{3,60}", kind) else ""


_SERVER = re.compile(r"(?P<model>.*?)(?:@(?P<urls>https?://.*))?", re.IGNORECASE | re.DOTALL)
_BETWEEN_URLS = re.compile(r",(?=https?://)", re.IGNORECASE)
_NOT_IN_URLS = re.compile(r"[\s'\"]")
"""Where a spec that stands in a text ends, as whoever looks for specs in it sees it."""

_SCHEMELESS = re.compile(r"(?:localhost|[\w.-]+:\d+|\[[\da-f:.]+\])(?:[:/].*)?", re.IGNORECASE)
_VERSIONS = ("latest", "default", "main")
_HOST = re.compile(
    r"(?!v\d)[a-z][\w.-]*(?:/.*)?|\d+(?:\.\d+){3}(?:/.*)?", re.IGNORECASE | re.DOTALL
)
"""What a name of a host looks like; versions of models begin with a digit, or v and one."""


def _parse_openai(rest: str, environ: Mapping[str, str]) -> EndpointSpec:
    model, urls = _model_and_urls("openai", rest)
    if not urls:
        urls = _normal_urls(environ.get("OPENAI_BASE_URL", "").strip() or OPENAI_URL)
    return EndpointSpec(kind="openai", model=model, urls=urls)


def _parse_vllm(rest: str) -> EndpointSpec:
    model, urls = _model_and_urls("vllm", rest)
    return EndpointSpec(kind="vllm", model=model, urls=urls)


def _model_and_urls(kind: str, rest: str) -> tuple[str, tuple[str, ...]]:
    match = _SERVER.fullmatch(rest)
    model = match["model"].strip() if match else ""
    given = match["urls"] if match else None
    if not model:
        raise UsageError(f"the spec names no model: write {kind}:MODEL or {kind}:MODEL@URL")
    if given is None:
        _check_version(kind, model)
        return model, ()
    return model, _normal_urls(given)


def _normal_urls(given: str) -> tuple[str, ...]:
    """The URLs of *given*, each once, in their order."""
    if _NOT_IN_URLS.search(given):
        raise UsageError(
            "the URLs of servers have no blanks and no quotes in them or between them: "
            "write MODEL@http://HOST:PORT,http://HOST:PORT"
        )
    return tuple(dict.fromkeys(_normal_url(url) for url in _BETWEEN_URLS.split(given)))


def _check_version(kind: str, model: str) -> None:
    """Refuse a *model* with an end that whoever wrote it took for a URL.

    What is before it is left out of the message where it may hold a password.
    """
    name, at, last = model.rpartition("@")
    if not at:
        return
    if _SCHEMELESS.fullmatch(last) and ":/" not in name:
        shown = "MODEL" if "@" in name or not name else name
        raise UsageError(f"the URL in the spec has no scheme: write {kind}:{shown}@http://{last}")
    is_host = name and last not in _VERSIONS and _HOST.fullmatch(last)
    if not last.strip() or ":/" in model or is_host:
        raise UsageError(
            f"what follows the @ in the spec is no URL: write {kind}:MODEL@http://HOST:PORT/v1, "
            "also where the name of the model holds an @ itself"
        )


def _normal_url(url: str) -> str:
    """*url* as the base of the API: with ``/v1`` where it has no path, no slash at its end."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not match, characters that no host name has
        shown = "the URL in the spec" if "@" in url else repr(url[:80])
        raise UsageError(f"{shown} is no URL of an endpoint: write http://HOST:PORT/v1") from None
    if "@" in parts.netloc:
        raise UsageError(
            "the URL holds a user name or password: leave it out and set RLM_API_KEY instead"
        )
    if "," in url:
        raise UsageError(
            "the servers of a spec are URLs with commas between them, each with its own http://: "
            "write MODEL@http://HOST:PORT,http://HOST:PORT"
        )
    if parts.query or parts.fragment:
        raise UsageError("the URL of an endpoint has no query and no fragment: leave them out")
    if parts.scheme.lower() not in ("http", "https") or not _has_host(parts):
        raise UsageError(f"{url[:80]!r} is no URL of an endpoint: write http://HOST:PORT/v1")
    path = re.sub(r"//+", "/", parts.path).rstrip("/").removesuffix("/chat/completions")
    return urlunsplit((parts.scheme.lower(), parts.netloc.lower(), path or "/v1", "", ""))


def _has_host(parts: SplitResult) -> bool:
    try:
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
