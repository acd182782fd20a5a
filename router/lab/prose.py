"""Readable pseudo-English from word lists, deterministic by seed: the raw material of the built-in workload.

Nothing here means anything; it only tokenizes like prose, so that a prompt aimed at n tokens has about n.
"""

import random

CHARS_PER_TOKEN = 5.1
"""Measured with SmolLM2's byte-level BPE on what this module writes; other vocabularies come close."""

_SUBJECTS = (
    "the customer", "the account holder", "a new member", "the branch office", "the warehouse",
    "our partner", "the support team", "the night shift", "the regional manager", "the courier",
    "a returning visitor", "the finance department", "the insurer", "the supplier", "the project lead",
    "the maintenance crew", "the review board", "the public library", "the harbour authority",
    "the survey team",
)  # fmt: skip
_VERBS = (
    "confirms", "requests", "updates", "cancels", "reviews", "forwards", "approves", "schedules",
    "records", "compares", "delivers", "returns", "inspects", "replaces", "summarizes", "measures",
    "reports", "expects", "prepares", "questions",
)  # fmt: skip
_ADJECTIVES = (
    "pending", "annual", "damaged", "complete", "written", "recent", "previous", "shared", "temporary",
    "formal", "detailed", "monthly", "original", "revised", "missing", "preliminary", "quiet",
    "ordinary", "local", "final",
)  # fmt: skip
_OBJECTS = (
    "invoice", "delivery note", "reservation", "contract", "refund", "password reset", "shipment",
    "inventory list", "insurance claim", "service plan", "travel budget", "weather report",
    "inspection log", "training manual", "meeting agenda", "power meter", "water sample",
    "passenger list", "repair order", "loan application",
)  # fmt: skip
_CLAUSES = (
    "before the end of the week", "as soon as the payment has cleared",
    "without asking for a second signature", "unless the system shows a warning",
    "after the morning inspection", "when two colleagues agree in writing",
    "because the old procedure took too long", "even if the office is closed",
    "while the investigation continues", "so that nobody has to wait in line",
    "in the order in which they arrived", "until further notice", "at the request of the other party",
    "with a short explanation of the reasons", "during the busy season",
    "according to the latest instructions",
)  # fmt: skip
_QUESTIONS = (
    "What happens when {subject} {verb} the {adjective} {object} {clause}?",
    "Who decides whether {subject} {verb} the {object} {clause}?",
    "Can you explain why {subject} {verb} the {adjective} {object}?",
    "Please tell me how long it takes until {subject} {verb} the {object} {clause}.",
    "Is it true that {subject} {verb} the {adjective} {object} {clause}?",
)
_STATEMENTS = (
    "{Subject} {verb} the {adjective} {object} {clause}.",
    "{Subject} {verb} the {object}, and {subject2} {verb2} the {adjective} {object2} {clause}.",
    "In most cases {subject} {verb} the {object} within {number} working days.",
    "If {subject} {verb} the {adjective} {object}, then {subject2} {verb2} the {object2} {clause}.",
    "About {number} percent of the time, {subject} {verb} the {object} {clause}.",
)


class Prose:
    """A source of sentences that draws from its own random generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def noun(self) -> str:
        """A thing, such as `travel budget`."""
        return self.rng.choice(_OBJECTS)

    def question(self) -> str:
        """One question, about 17 tokens."""
        return self._fill(_QUESTIONS)

    def sentence(self) -> str:
        """One statement, about 18 tokens."""
        return self._fill(_STATEMENTS)

    def text(self, tokens: float) -> str:
        """Statements up to about `tokens` tokens, at least one."""
        sentences = [self.sentence()]
        length = len(sentences[0])
        while length < (tokens - 8) * CHARS_PER_TOKEN:
            sentences.append(self.sentence())
            length += len(sentences[-1]) + 1
        return " ".join(sentences)

    def scramble(self, tokens: float) -> str:
        """Words in no order at all, about `tokens` tokens (one a word): shares no beginning with anything."""
        words: list[str] = []
        while len(words) < tokens:
            words += self.rng.choice(
                (_SUBJECTS, _VERBS, _ADJECTIVES, _OBJECTS)[self.rng.randrange(4)]
            ).split()
        self.rng.shuffle(words)
        return " ".join(words)

    def _fill(self, templates: tuple[str, ...]) -> str:
        choice = self.rng.choice
        subject = choice(_SUBJECTS)
        return choice(templates).format(
            subject=subject,
            Subject=subject[0].upper() + subject[1:],
            verb=choice(_VERBS),
            adjective=choice(_ADJECTIVES),
            object=choice(_OBJECTS),
            clause=choice(_CLAUSES),
            subject2=choice(_SUBJECTS),
            verb2=choice(_VERBS),
            object2=choice(_OBJECTS),
            number=self.rng.randrange(2, 90),
        )
