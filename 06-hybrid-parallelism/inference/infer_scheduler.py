"""Continuous batching: in each step every running sequence computes some tokens, and sequences join and leave between.

    step       1        2        3        4
    a      prefill 6   decode   decode   ends         prefill: the tokens of the prompt, at once or in parts
    b        waits    prefill 3 decode   decode       decode: the one token that the step before has chosen
    c        waits     waits    prefill 4 of 9 ...    a step computes at most `budget` tokens

Sequences that run already come first, so a long prompt does not stop them: it gets what the budget leaves (Agrawal et
al., "Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve", 2024, arXiv:2403.02310). If no block is
free, the youngest sequence returns its blocks and waits; its prompt and what it has written are computed again later.

No decision needs a message: all ranks schedule the same sequences from the same tokens.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from common.errors import UsageError

from infer_cache import Blocks


@dataclass(frozen=True)
class Request:
    """Prompt, and how its continuation is chosen. The text depends on this object alone.

    Raises UsageError for a number out of bounds.
    """

    prompt: tuple[int, ...]
    tokens: int
    """Most tokens to write."""
    temperature: float = 0.0
    """0: the likeliest token; 1: drawn from the model's distribution."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities reach this sum."""
    seed: int = 0
    stop: frozenset[int] = frozenset()
    """Tokens that end the text; the last one written is one of them."""

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1 and min(self.top_k, self.seed) >= 0):
            raise UsageError(
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}, seed {self.seed}: "
                "give none below 0, and a top_p above 0 and up to 1"
            )


@dataclass(eq=False)
class Sequence:
    """State of a request: its tokens so far, and the blocks that hold keys and values of the first `cached` ones."""

    number: int
    request: Request
    text: list[int]
    cached: int = 0
    table: list[int] = field(default_factory=list)
    ended: str = ""
    """Reason of the end: length, stop or cancelled; empty while the sequence waits or runs."""

    @property
    def written(self) -> list[int]:
        return self.text[len(self.request.prompt) :]


class Scheduler:
    """Waiting and running sequences; `peak` is the largest number of blocks that a step has used.

    most: the largest number that runs at once. longest: tokens of a sequence. Raises UsageError for a budget that is
    smaller than `most`, since each sequence that runs computes a token per step.
    """

    def __init__(self, blocks: Blocks, most: int, budget: int, longest: int) -> None:
        if most < 1:
            raise UsageError(f"{most} sequences at once: give at least 1")
        if budget < most:
            raise UsageError(
                f"a budget of {budget} tokens per step is too small for {most} sequences at once"
            )
        self.blocks, self.most, self.budget, self.longest = blocks, most, budget, longest
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.added = self.preempted = self.peak = 0

    def add(self, request: Request) -> Sequence:
        """Let a request wait for its first step. Raises UsageError if it can never run."""
        length = len(request.prompt) + request.tokens
        if not request.prompt or request.tokens < 1:
            raise UsageError(
                "a request needs a prompt of at least one token, and at least one token to write"
            )
        if length > self.longest:
            raise UsageError(
                f"a prompt of {len(request.prompt)} tokens and {request.tokens} new ones exceed the model's "
                f"longest sequence, {self.longest}"
            )
        # the last token is never read again
        if self.blocks.needed(length - 1) > self.blocks.count:
            raise UsageError(
                f"{length} tokens need {self.blocks.needed(length - 1)} blocks of {self.blocks.size}, "
                f"the cache has {self.blocks.count}"
            )
        sequence = Sequence(self.added, request, list(request.prompt))
        self.added += 1
        self.waiting.append(sequence)
        return sequence

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return the sequences of the next step, each with the number of tokens that it computes."""
        chosen: list[tuple[Sequence, int]] = []
        left = self.budget
        for sequence in list(self.running):
            count = min(len(sequence.text) - sequence.cached, left)
            if count and self.make_room(sequence, sequence.cached + count):
                chosen.append((sequence, count))
                left -= count
        while self.waiting and left and len(self.running) < self.most:
            sequence = self.waiting[0]
            if self.blocks.needed(len(sequence.text)) > len(self.blocks.free):
                break
            count = min(len(sequence.text), left)
            self.blocks.lengthen(sequence.table, count)
            self.running.append(self.waiting.popleft())
            chosen.append((sequence, count))
            left -= count
        self.peak = max(self.peak, self.blocks.taken)
        return chosen

    def make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Let the sequence's table hold that many tokens, at the cost of younger ones. False if it was the youngest."""
        while sequence in self.running:
            if self.blocks.lengthen(sequence.table, tokens):
                return True
            youngest = self.running.pop()
            self.blocks.release(youngest.table)
            youngest.cached = 0
            self.waiting.appendleft(youngest)
            self.preempted += 1
        return False

    def write(self, sequence: Sequence, token: int) -> None:
        """Append the chosen token; end the sequence if it was the last one."""
        sequence.text.append(token)
        if token in sequence.request.stop:
            self.end(sequence, "stop")
        elif len(sequence.written) == sequence.request.tokens:
            self.end(sequence, "length")

    def end(self, sequence: Sequence, reason: str) -> None:
        """Return the sequence's blocks. No-op if it has ended. Raises ValueError for one of another scheduler."""
        if sequence.ended:
            return
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        sequence.ended = reason
        self.blocks.release(sequence.table)
