"""How a run reads where it is shown in one output: HTML, Markdown and plain text.

Each function gives a MIME bundle with the three alternatives. The HTML has no
script and no style sheet: outputs of a notebook that is not trusted lose
both. Its colours come from the theme (``currentColor``, the variables of
JupyterLab) with fallbacks that read on light and dark. Everything that a
model or a cell wrote is escaped.
"""

from __future__ import annotations

from html import escape

from rlm_kernel.driver.task_counts import task_lines
from rlm_kernel.driver.trajectory import Counts, Trajectory, Turn
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.fences import fence_for
from rlm_kernel.text import without_ansi

__all__ = ["Bundle", "answer_bundle", "run_bundle", "turn_bundle"]

Bundle = dict[str, str]
"""Texts by MIME type."""

_SHOWN = 20_000
"""Characters of one text that are shown; the record has the whole."""

_STREAMED = 2_000
"""Last characters of a reply that comes in."""

_WAITED = 0.05
"""Seconds of waiting from which on they are told."""

_ACCENT = "var(--jp-brand-color1, #3b82c4)"
_GOOD = "var(--jp-success-color1, #2e9e5b)"
_BAD = "var(--jp-error-color1, #d9534f)"
_WARN = "var(--jp-warn-color1, #c98a1b)"
_QUIET = "opacity:.7"
_COLOURS = {
    "done": _GOOD,
    "answered": _GOOD,
    "failed": _BAD,
    "stopped": _WARN,
    "skipped": _WARN,
    "waiting": _WARN,
}
_TEXT = "color:inherit;line-height:1.45;font-size:var(--jp-ui-font-size1, 13px)"
_CODE = "background:none;color:inherit;font:inherit;padding:0"
"""Against the rules that themes have for code: they would paint a strip behind each line."""

_BLOCK = (
    "margin:4px 0;padding:6px 10px;border:none;border-radius:4px;overflow-x:auto;"
    "white-space:pre-wrap;overflow-wrap:anywhere;color:inherit;"
    "background:rgba(128,128,128,.13);"
    "font-family:var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace);"
    "font-size:var(--jp-code-font-size, 12px);line-height:1.4"
)


def turn_bundle(turn: Turn, *, now: float, awaiting: bool = False) -> Bundle:
    """One turn; *now* is in seconds since the epoch."""
    state = "waiting for a decision" if awaiting else _state(turn)
    facts = _facts(state, turn.seconds(now), turn.usage, turn.counts)
    if turn.result is not None and turn.result.waited_s >= _WAITED:
        cell = f"cell {_seconds(turn.result.seconds)}, waiting {_seconds(turn.result.waited_s)}"
        facts.insert(2, cell)
    title = f"turn {turn.number}"
    prose, source = _prose(turn), _clip(turn.source)
    observation = _clip(without_ansi(turn.observation))
    return {
        "text/html": _turn_html(turn, title, facts, prose, source, observation, awaiting),
        "text/markdown": _join(
            f"**{title}** · {' · '.join(facts)}",
            prose,
            _fenced(source, "python"),
            *(f"> {remark}" for remark in _remarks(turn)),
            observation and f"observation:\n\n{_fenced(observation)}",
        ),
        "text/plain": _join(
            f"── {title} · {' · '.join(facts)}",
            prose,
            _indented(source),
            *(f"! {remark}" for remark in _remarks(turn)),
            observation and f"observation:\n{_indented(observation)}",
        ),
    }


def run_bundle(run: Trajectory, query: str) -> Bundle:
    """The head of a run: what is asked of what, by whom, and how far it is."""
    state = "waiting for a decision" if run.awaiting else str(run.state)
    end = run.now if run.ended is not None or run.turns else run.at
    facts = _facts(state, max(end - run.at, 0.0), run.usage, run.counts)
    started = run.started
    about = f"{_prompt(run)} · root {started.root} · sub {started.sub}"
    return {
        "text/html": (
            f'<div style="{_TEXT}">'
            f'<div style="font-weight:600">{_lines(_clip(query))}</div>'
            f'<div style="{_QUIET}">{escape(about)}</div>'
            f"<div>{_facts_html(facts, _colour(run.state, run.awaiting))}</div></div>"
        ),
        "text/markdown": _join(f"**{_one_line(query)}**", about, " · ".join(facts)),
        "text/plain": f"{_clip(query)}\n{about}\n{' · '.join(facts)}",
    }


def answer_bundle(run: Trajectory) -> Bundle:
    """What the run came to: its answer, or why there is none."""
    ended = run.ended
    response = "" if ended is None else ended.response
    if run.state == "answered":
        title, text = "answer", _clip(response)
    else:
        title, text = f"{run.state} without an answer", _clip(run.reason)
    colour = _colour(run.state)
    return {
        "text/html": (
            f'<div style="{_TEXT};border:1px solid {colour};border-left-width:4px;'
            f'border-radius:4px;padding:8px 12px;margin:6px 0">'
            f'<div style="color:{colour};font-weight:600">{escape(title)}</div>'
            f'<div style="font-size:115%;white-space:pre-wrap;overflow-wrap:anywhere">'
            f"{escape(text)}</div></div>"
        ),
        "text/markdown": _join(f"**{title}:**", text),
        "text/plain": f"{title}: {text}",
    }


# --- html -------------------------------------------------------------------------------------


def _turn_html(
    turn: Turn,
    title: str,
    facts: list[str],
    prose: str,
    source: str,
    observation: str,
    awaiting: bool,
) -> str:
    failed = turn.result is not None and not turn.result.ok
    colour = _BAD if failed else _colour(turn.state, awaiting)
    edge = f"border-left:3px solid {colour}"
    parts = [
        f'<div style="{_TEXT};{edge};padding:2px 0 2px 12px;margin:6px 0">',
        f"<div><b>{escape(title)}</b> · {_facts_html(facts, colour)}</div>",
    ]
    if prose:
        parts.append(f'<div style="margin:4px 0">{_lines(prose)}</div>')
    if source:
        parts.append(f'<pre style="{_BLOCK}"><code style="{_CODE}">{escape(source)}</code></pre>')
    parts += [
        f'<div style="color:{_WARN};margin:4px 0">{_lines(remark)}</div>'
        for remark in _remarks(turn)
    ]
    if observation:
        label = f"observation · {len(turn.observation):,} characters"
        parts.append(
            f'<details><summary style="cursor:pointer;{_QUIET}">{escape(label)}</summary>'
            f'<pre style="{_BLOCK}">{escape(observation)}</pre></details>'
        )
    return "".join([*parts, "</div>"])


def _facts_html(facts: list[str], colour: str) -> str:
    """The state in its colour, the rest quietly."""
    state, *rest = facts
    quiet = "".join(f" · {escape(fact)}" for fact in rest)
    return (
        f'<span style="color:{colour};font-weight:600">{escape(state)}</span>'
        f'<span style="{_QUIET}">{quiet}</span>'
    )


def _lines(text: str) -> str:
    return f'<span style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(text)}</span>'


def _colour(state: str, awaiting: bool = False) -> str:
    return _COLOURS.get("waiting" if awaiting else state, _ACCENT)


# --- texts ------------------------------------------------------------------------------------


def _state(turn: Turn) -> str:
    if turn.result is not None and not turn.result.ok and turn.result.error is not None:
        return f"raised {turn.result.error.ename}"
    if turn.action == "edit" and turn.state == "done":
        return "done, edited"
    return turn.state


def _remarks(turn: Turn) -> list[str]:
    """What is remarkable of *turn*, one sentence each."""
    notes = [
        f"{number:,} sub-call{'' if number == 1 else 's'}: {note}"
        for note, number in turn.notes.items()
    ]
    unfit = {task: counts for task, counts in turn.tasks.items() if counts.unfit}
    return [*turn.remarks, *notes, *task_lines(unfit)]


def _facts(state: str, seconds: float, usage: Usage, counts: Counts) -> list[str]:
    facts = [state, _seconds(seconds)]
    if usage.tokens:
        facts.append(f"{'≈ ' if usage.estimated else ''}{usage.tokens:,} tokens")
    if counts.total:
        facts.append(f"sub-calls {_counts(counts)}")
    return facts


def _counts(counts: Counts) -> str:
    parts = [f"{counts.done:,} done"]
    if counts.running:
        parts.append(f"{counts.running:,} running")
    for number, word in (
        (counts.failed, "failed"),
        (counts.cached, "cached"),
        (counts.retried, "retried"),
    ):
        if number:
            parts.append(f"{number:,} {word}")
    return ", ".join(parts)


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def _prompt(run: Trajectory) -> str:
    prompt = run.started.prompt
    items = "" if prompt.kind == "str" else f" in {prompt.items:,} items"
    source = f" from {prompt.source}" if prompt.source else ""
    return f"P has {prompt.chars:,} characters{items}{source}"


def _prose(turn: Turn) -> str:
    """What the root said before its cell; while the reply comes in, its last part."""
    if turn.state != "proposing" or turn.prose:
        return _clip(turn.prose.strip())
    reply = "".join(turn.reply)
    return reply if len(reply) <= _STREAMED else f"… {reply[-_STREAMED:]}"


def _one_line(text: str) -> str:
    return " ".join(_clip(text).split())


def _clip(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    half = _SHOWN // 2
    cut = len(text) - 2 * half
    return f"{text[:half]}\n… {cut:,} characters are in the record …\n{text[-half:]}"


def _fenced(text: str, info: str = "") -> str:
    if not text:
        return ""
    mark = fence_for(text)
    return f"{mark}{info}\n{text}\n{mark}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
