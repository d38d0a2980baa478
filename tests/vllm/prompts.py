"""Prompts for tests and benchmarks."""

from __future__ import annotations

__all__ = ["INSTRUCTION"]

_LINES = (
    "You read one line of the log of a shop and decide which team has to look at it.",
    "Lines that tell of payments, refunds, invoices, cards or banks belong to billing.",
    "Lines that tell of parcels, couriers, addresses, delays or returns belong to shipping.",
    "Lines that tell of passwords, sessions, permissions or sign-in belong to accounts.",
    "Lines that tell of slow pages, full disks, timeouts or restarts belong to operations.",
    "Where two teams would fit, take the one whose work stands first in the line.",
    "Numbers, names of hosts and dates in the line mean nothing for your decision.",
    "A line that only says that something went well belongs to nobody: answer nobody.",
    "Do not explain your decision, do not repeat the line and do not add a full stop.",
    "Answer with the name of the team alone, in small letters: billing, shipping, accounts,",
    "operations or nobody. If the line is empty or is not in English, answer nobody as well.",
    "Remember that a courier who could not be paid is a case for billing, and that a customer",
    "who cannot sign in to change an address is a case for accounts, whatever they wanted then.",
    "Lines of the nightly import begin with the word import and always belong to operations.",
    "Lines of the test shop begin with the word staging and always belong to nobody.",
    "A line may be cut off at its end, in the middle of a word: decide by what is there of it.",
    "This is the line:",
)
INSTRUCTION = " ".join(_LINES)
"""About 300 tokens; the item follows."""
