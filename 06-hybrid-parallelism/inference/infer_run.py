"""A program that generates text: requests in, streamed text out, and a table of times at the end.

The first request that has not ended streams its tokens as they come; the others run beside it, and their text appears
when their turn comes.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Row

from common import comm
from common.data.tokenizer import Stream, Tokenizer
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.runner import console, write_records

from infer_engine import Engine
from infer_metrics import Meter
from infer_options import Choice, GenerateOptions, read_file
from infer_scheduler import Request, Sequence
from infer_tokens import stop_tokens, tokenizer_of

USUAL = 64  # tokens of a text whose length nobody gives


class Screen:
    """Prints sequences in their order: the first that has not ended streams, the others wait for their turn."""

    def __init__(self, sequences: Row[Sequence], tokens: Tokenizer, shown: bool) -> None:
        self.left, self.tokens, self.shown = list(sequences), tokens, shown
        self.begin()

    def begin(self) -> None:
        """Print the prompt of the next sequence."""
        self.printed = 0
        if self.left:
            self.stream = Stream(self.tokens)
            self.stream.shown = list(self.left[0].request.prompt)
            self.write(self.tokens.decode(self.stream.shown))

    def write(self, text: str) -> None:
        if self.shown:
            print(text, end="", flush=True)

    def show(self) -> None:
        """Print what is new."""
        while self.left:
            sequence = self.left[0]
            new = sequence.written[self.printed :]
            self.printed += len(new)
            self.write("".join(map(self.stream.add, new)))
            if not sequence.ended:
                return
            self.write(self.stream.rest() + "\n")
            self.left.pop(0)
            self.begin()


def generate(engine: Engine, sequences: Row[Sequence], tokens: Tokenizer, meter: Meter, shown: bool) -> None:
    """Run sequences to their ends, and print their texts if `shown`."""
    screen = Screen(sequences, tokens, shown)
    meter.start(sequences)
    while engine.busy:
        begin = time.perf_counter()
        chosen = engine.step()
        meter.add(chosen, begin)
        screen.show()


def make_request(text: str, choice: Choice, tokens: Tokenizer, stop: frozenset[int], longest: int) -> Request:
    """Return the request for a prompt. longest: tokens of the longest sequence that the model takes."""
    c = choice
    prompt = tuple(tokens.encode(text, special=True))
    most = c.tokens or max(1, min(USUAL, longest - len(prompt)))
    return Request(prompt, most, c.temperature, c.top_k, c.top_p, c.seed, stop | frozenset(c.stop))


def lines_of_terminal(rt: Runtime) -> Iterable[str]:
    """Yield the lines of rank 0's standard input, on all ranks; while none comes, tell them to go on waiting."""
    lines = lines_or_nothing(rt.timeout / 3) if rt.rank == 0 else None
    while True:
        (line, *_) = comm.everyones(next(lines, None) if lines else None, rt.world)
        if line is None:
            return
        if line.strip():
            yield line


def lines_or_nothing(seconds: float) -> Iterator[str]:
    """Yield the lines of the standard input, and "" whenever none has come for so long."""
    rest, decoder = "", codecs.getincrementaldecoder(sys.stdin.encoding)("replace")
    while True:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            yield ""
            continue
        came = os.read(sys.stdin.fileno(), 2**16)
        *lines, rest = (rest + decoder.decode(came)).split("\n")
        yield from lines
        if not came:
            yield rest
            return


def main(rt: Runtime, o: GenerateOptions) -> bool:
    """Generate the texts of all requests, and print a table of times and bytes."""
    out = console(rt)  # from here on, texts may have characters that the terminal lacks
    engine, meter = o.engine(rt, o.mesh(rt)), Meter()
    tokens, stop = tokenizer_of(o.checkpoint), stop_tokens(o.checkpoint)
    longest = engine.scheduler.longest
    asked: list[tuple[str, Choice]] = [(text, o) for text in o.prompts]
    if o.file:
        asked += read_file(o.file, o)
        if not asked:
            raise UsageError(f"--file {o.file} has no prompt")
    done = [engine.add(make_request(text, choice, tokens, stop, longest)) for text, choice in asked]
    generate(engine, done, tokens, meter, rt.rank == 0)
    for text in () if asked else lines_of_terminal(rt):
        try:
            sequence = engine.add(make_request(text, o, tokens, stop, longest))
        except UsageError as error:  # the next line may be better
            out.print(f"error: {error}", style="red")
            continue
        generate(engine, [sequence], tokens, meter, rt.rank == 0)
        done.append(sequence)
    if done:
        out.print(meter.table(engine, done))
    if rt.rank == 0:
        write_records(o.json, [meter.record(s) | {"text": tokens.decode(s.text)} for s in done])
    return True
