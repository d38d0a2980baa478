"""What a completion is worth: a reply, or the reason why it is none."""

from __future__ import annotations

import time

import msgspec

from rlm_kernel.engine.budget import Usage
from rlm_kernel.http_errors import ErrorDetail, Redactor, status_inside
from rlm_kernel.subcalls.endpoint import EndpointError, Reply, ToolUse
from rlm_kernel.subcalls.server.connection import MAX_BODY, Connection
from rlm_kernel.subcalls.server.refusals import Refused, refusal_of
from rlm_kernel.subcalls.server.sse import EventReader
from rlm_kernel.subcalls.server.tool_wire import UseParts
from rlm_kernel.subcalls.server.wire import (
    Choice,
    Completion,
    RequestForm,
    StreamedCompletion,
    decode_completion,
    estimated_usage,
    usage_of,
)

__all__ = ["StreamedReply", "decoded", "reply_of"]

_FINISHES = frozenset({"stop", "length", "tool_calls", "content_filter", "abort", "eos"})


class StreamedReply:
    """Takes the pieces of one streamed completion. See `connection.Sink`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reader = EventReader(MAX_BODY)
        self._stream = StreamedCompletion()
        self._done = False
        self._sent = time.monotonic()
        self.first_token_s: float | None = None

    def __call__(self, chunk: bytes) -> bool:
        for data in self._reader.feed(chunk):
            if data == b"[DONE]":
                self._done = True
                break
            self._stream.add(decoded(data, self._connection.url))
        if self.first_token_s is None and self._stream.begun:
            self.first_token_s = time.monotonic() - self._sent
        return self._done

    def whole(self) -> Completion:
        """The completion. Raises `EndpointError` where the stream broke off."""
        if not self._done and not self._stream.finished:
            raise EndpointError(
                f"the server at {self._connection.url} ended its stream in the middle: try again",
                retryable=True,
            )
        return self._stream.whole()


def decoded(body: bytes, url: str) -> Completion:
    """The completion in *body*.

    Raises
    ------
    EndpointError
        There is none, although the status was 200. It is worth another request: pages of proxies
        and the last words of engines come like this, and pass. The server may count the tokens of
        each. What is a completion and says nothing (see `reply_of`) is not sent again.
    """
    try:
        return decode_completion(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        what = "a web page" if body.lstrip()[:1] == b"<" else "something else than a completion"
        raise EndpointError(
            f"the server at {url} sent {what}: check that it speaks the OpenAI chat protocol",
            retryable=True,
            status=200,
        ) from None


def reply_of(
    completion: Completion,
    *,
    prompt: str,
    form: RequestForm,
    request: Refused,
    redact: Redactor,
    first_token_s: float | None = None,
) -> Reply:
    """The reply that *completion* is.

    Raises
    ------
    EndpointError
        It is empty, refused, aborted or of another form than was asked for by being cut; or the
        server failed after it had said that all is well. Its usage is that of the completion.
    """
    if completion.error is not None:
        raise _error_inside(completion, request, redact)
    usage = usage_of(completion.usage)
    if not completion.choices:
        raise EndpointError(
            f"the server at {request.url} sent a completion without choices: check that it "
            "speaks the OpenAI chat protocol",
            usage=usage,
            status=200,
        )
    choice = completion.choices[0]
    finish = choice.finish_reason or ""
    if finish not in _FINISHES:
        finish = redact(finish)[:60]
    text = choice.message.content or ""
    uses = _uses(choice) if request.tools and choice.message.tool_calls else []
    _check(choice, text, uses, finish=finish, usage=usage, form=form, request=request)
    if form.typed is not None:
        text = form.typed.taken(text)
    if redact.key and (redact.key in text or uses):
        # Replies are recorded and go to the worker.
        text = text.replace(redact.key, "***")
        uses = [_without(redact.key, use) for use in uses]
    return Reply(
        text=text,
        usage=usage or estimated_usage(prompt, text),
        finish=finish,
        uses=uses,
        first_token_s=first_token_s,
    )


def _uses(choice: Choice) -> list[ToolUse]:
    parts = UseParts()
    for asked in choice.message.tool_calls or ():
        parts.add(asked)
    return parts.whole()


def _without(key: str, use: ToolUse) -> ToolUse:
    return ToolUse(
        use_id=use.use_id.replace(key, "***"),
        name=use.name.replace(key, "***"),
        arguments=use.arguments.replace(key, "***"),
    )


def _check(
    choice: Choice,
    text: str,
    uses: list[ToolUse],
    *,
    finish: str,
    usage: Usage | None,
    form: RequestForm,
    request: Refused,
) -> None:
    """Raise `EndpointError` where the completion is none that was asked for."""
    if finish == "abort":
        raise EndpointError(
            f"the server at {request.url} aborted the completion: try again later",
            retryable=True,
            usage=usage,
            finish=finish,
            status=200,
        )
    if uses:
        return
    if _is_empty(text, form) or finish == "content_filter":
        reason = _why_empty(choice, finish)
        raise EndpointError(reason, usage=usage, finish=finish, status=200)
    if finish == "length" and form.typed is not None and not form.typed.is_whole(text):
        limit = f"max_tokens ({form.max_tokens:,})" if form.max_tokens else "the model's limit"
        raise EndpointError(
            f"the reply was cut at {limit} before it had the form that was asked for: "
            "raise max_tokens, or ask for less",
            usage=usage,
            finish=finish,
            status=200,
        )


def _is_empty(text: str, form: RequestForm) -> bool:
    """Whether *text* says nothing. Blanks alone do, unless they are one of the choices."""
    if text.strip():
        return False
    return not text or form.typed is None or text not in form.typed.choices


def _why_empty(choice: Choice, finish: str) -> str:
    shown = finish or "not given"
    if finish == "content_filter" or choice.message.refusal:
        return f"the model refused to answer (finish reason: {shown}): change the prompt"
    if choice.message.tool_calls:
        return (
            f"the model asked for a tool that it was not offered (finish reason: {shown}): "
            "change the prompt"
        )
    if choice.message.reasoning or choice.message.reasoning_content:
        return f"the model reasoned but gave no answer (finish reason: {shown}): raise max_tokens"
    return (
        f"the model gave an empty completion (finish reason: {shown}): "
        "change the prompt, or raise max_tokens"
    )


def _error_inside(completion: Completion, request: Refused, redact: Redactor) -> EndpointError:
    """The error in a reply whose status was 200: the engine failed after it was sent."""
    error = completion.error
    detail = error if isinstance(error, ErrorDetail) else ErrorDetail(message=error)
    return refusal_of(status_inside(detail), detail, {}, request=request, redact=redact)
