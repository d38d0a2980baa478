"""A playbook: how to find one sentence in a prompt that is far too long to read.

`jupyter rlm demo` runs it as the root of a run. It is never imported: each
cell is proposed as a root model would propose it, and runs in the REPL, where
P, sub_RLM and Final are. The model of the sub-calls may be a very small one;
nothing here trusts what it says.
"""

# %% [markdown]
# **Look before you read.** `P` is a variable; I never print it whole. First its type, its
# length, and how it is divided.

# %%
import re

query = "{{query}}"
headers = re.findall(r"^===== .* =====$", P, flags=re.MULTILINE)
print(type(P).__name__, f"of {len(P):,} characters in {P.count(chr(10)):,} lines")
print(len(headers), "files, such as", headers[0], headers[len(headers) // 2], headers[-1])
print(repr(P[:160]))

# %% [markdown]
# **Narrow by code.** The query names a thing and what is asked about it. Searching costs
# nothing: I count the lines in which either is mentioned, without showing them.

# %%
match = re.search(r"the (.+?) for the (.+?)\?", query)
if match is None:
    raise ValueError("this playbook answers questions like: What is the X for the Y?")
wanted, subject = match.groups()


def lines_with(phrase):
    """Start and end of each line that has the phrase in it."""
    for hit in re.finditer(rf"\b{re.escape(phrase)}\b", P, flags=re.IGNORECASE):
        yield P.rfind("\n", 0, hit.start()) + 1, P.find("\n", hit.end())


about_wanted, about_subject = set(lines_with(wanted)), set(lines_with(subject))
hits = sorted(about_wanted | about_subject)
print(f"{wanted!r}: {len(about_wanted)} lines; {subject!r}: {len(about_subject)} lines")
print(f"both: {len(about_wanted & about_subject)}; either: {len(hits)} of {P.count(chr(10)):,}")

# %% [markdown]
# **Cut windows.** Each hit with the line before and after it: enough to understand it, short
# enough for a small model.

# %%
MARGIN = 120  # characters on either side, cut to whole lines


def window(start, end):
    before = P[max(start - MARGIN, 0) : start].split("\n")[-2:]
    after = P[end : end + MARGIN].split("\n")[:2]
    return "\n".join(before) + P[start:end] + "\n".join(after)


windows = [window(start, end) for start, end in hits]
shown = sum(map(len, windows))
print(f"{len(windows)} windows, {shown:,} characters: {shown / len(P):.4%} of P")

# %% [markdown]
# **Ask in a batch.** One short question for each window, all at once. A call that fails is an
# item of the list, so one failure never loses the others.

# %%
question = f"What is the {wanted} for the {subject}?"
SAMPLING = {"temperature": 0, "max_tokens": 24}


def ask(texts, template):
    prompts = [template.format(text=text.strip(), question=question) for text in texts]
    return sub_RLM(prompts, **SAMPLING)


replies = ask(windows, "{text}\n\n{question}")
failed = [reply for reply in replies if isinstance(reply, Exception)]
print(f"{len(replies) - len(failed)} replies, {len(failed)} failed")
print("three of them:", *map(repr, map(str, replies[:3])), sep="\n  ")

# %% [markdown]
# **Check each answer against its window.** A small model says something about every window,
# also where there is nothing to say. But it can copy. So a reply counts only if its sentence
# stands word for word in the window, names the subject, and holds a number.


# %%
def words(text):
    """The words of a text, with a space around each: so `12` is not found in `123`."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def checked(text, reply):
    """The number in a reply that its window bears out, else None."""
    if isinstance(reply, Exception):
        return None
    for sentence in re.split(r"(?<=[.!?])\s|\n", reply):
        number = re.search(r"\b\d+\b", sentence)
        quoted = words(sentence) in words(text)
        if number and quoted and words(subject) in words(sentence):
            return number[0]
    return None


found = [(text, checked(text, reply)) for text, reply in zip(windows, replies)]
borne_out = [(text, number) for text, number in found if number]
print(f"{len(borne_out)} of {len(replies)} replies are borne out by their window")
for text, number in borne_out:
    print(f"  {number}: {text.strip()!r}")

# %% [markdown]
# **Vote.** What is left is asked again in other words. An answer that depends on the wording
# of the question is none.

# %%
from collections import Counter

TEMPLATES = [
    "Text: {text}\n\nQuestion: {question}\nAnswer with the sentence from the text.",
    "Read this note:\n{text}\n\n{question}",
]
votes = Counter(number for _, number in borne_out)
survivors = [text for text, _ in borne_out]
for template in TEMPLATES:
    votes.update(filter(None, map(checked, survivors, ask(survivors, template))))
print(votes.most_common())

# %% [markdown]
# **Answer**, if there is one with a clear majority. Setting `Final` ends the run.

# %%
ranking = [*votes.most_common(2), (None, 0), (None, 0)]
(best, most), (_, next_most) = ranking[:2]
if most < 2 or most == next_most:
    raise ValueError(f"no clear majority among {votes}")
print(f"{best} has {most} of {1 + len(TEMPLATES)} votes")
Final = best
