"""Docs and READMEs: links and anchors resolve, commands name files that exist and options that these take."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mpi.launch import BINARIES, need_binary, python, run

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()
    if (ROOT / name).is_file()
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
WORK_IN = re.compile(r"[Ww]ork in `([^`]+)`")
TARGET = re.compile(r"\.(py|sh|sbatch)$|^(\./|(.*/)?build/bin/)\w+$")
PROGRAM = re.compile(r"^(python |mpirun |make )|\.py\b")  # as inline code
ASSIGNMENT = re.compile(r"^\w+=")
# a sample of the commands of docs, each a few seconds; lessons are run by other tests
RUN = [
    "python 02-pipeline-parallelism/pytorch/pp_schedules.py --schedule 1f1b --ranks 2 --micro-batches 2",
    "python common/utils/communication_demo.py --nproc 4",
    "mpirun -np 4 build/bin/dp_mpi",
]

BY_HAND = {  # by prefix of the lesson: its chapter, whose page shows what it prints
    "dp": "01-data-parallelism",
    "pp": "02-pipeline-parallelism",
    "tp": "03-tensor-parallelism",
    "sp": "04-sequence-parallelism",
    "ep": "05-expert-parallelism",
}


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the page's headings."""
    found: Counter[str] = Counter()
    names = set()
    every = tokens(page)
    for opening, inline in itertools.pairwise(every):
        if opening.type == "heading_open":
            text = "".join(t.content for t in inline.children or () if t.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
            found[slug] += 1
    return names


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        for child in token.children or ():
            target = child.attrGet("href" if child.type == "link_open" else "src")
            if child.type in ("link_open", "image") and target:
                yield str(target)


def test_pages_and_readmes_are_short() -> None:
    lengths = {page.relative_to(ROOT): len(page.read_text().splitlines()) for page in PAGES}
    long = {name: n for name, n in lengths.items() if n > (100 if name.name == "README.md" else 600)}
    assert set(long) <= {Path("README.md")}, long  # the project's own README is not a chapter's


@pytest.mark.parametrize("chapter", [*sorted(BY_HAND.values()), "06-hybrid-parallelism"])
def test_chapters_end_with_a_quiz_whose_answers_are_folded(chapter: str) -> None:
    quiz = (ROOT / "docs" / f"{chapter}.md").read_text().split("\n## Quiz\n")[1]
    asked, answered = quiz.split("<details><summary>Answers</summary>")
    numbers = [re.findall(r"^(\d)\. \S", part, re.M) for part in (asked, answered)]
    assert numbers == [list("12345")] * 2
    assert answered.count("</details>") == 1
    assert answered.strip().endswith("</details>")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_anchors_resolve(page: Path) -> None:
    wrong = []
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(ROOT)
        if (
            not inside
            or not target.exists()
            or (anchor and (target.suffix != ".md" or anchor not in anchors(target)))
        ):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_blocks_are_of_known_kinds(page: Path) -> None:
    """Commands stand in sh blocks, which the tests below read."""
    kinds = {token.info.split()[0] for token in tokens(page) if token.type == "fence" and token.info}
    assert kinds <= {"sh", "python", "cpp"}


@dataclass(frozen=True)
class Command:
    """A command of a page: the folder it starts in, the program that takes the arguments, as it is written."""

    folder: Path
    program: str
    arguments: tuple[str, ...]
    line: str


def shell_lines(block: str) -> Iterator[list[str]]:
    """Yield the words of each line of a block: continued lines joined, here-documents left out, loops unrolled.

    Operators and parentheses are words of their own.
    """
    block = re.sub(r"<<-?'?(\w+)'?.*?^\1$", "", block, flags=re.S | re.M)
    loop = re.search(r"for (\w+) in ([^;]+);", block)
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        name, values = (f"${loop[1]}", loop[2].split()) if loop else ("", [])
        for text in [line.replace(name, value) for value in values] if name and name in line else [line]:
            lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;()")
            lexer.whitespace_split = True
            words = list(lexer)
            if words and words[0] not in ("for", "done"):
                yield words


@cache
def commands(page: Path) -> list[Command]:
    """Return the commands of the page's sh blocks. `cd` holds for those that follow, and "Work in `folder`" too."""
    folder, found = ROOT, []
    for token in tokens(page):
        if token.type == "inline" and (work := WORK_IN.search(token.content)):
            folder = ROOT / work[1]
        if token.type != "fence" or token.info.split()[:1] != ["sh"]:
            continue
        for line in shell_lines(token.content):
            outside = folder
            for operator, part in itertools.groupby(line, lambda word: word.strip("&|;()") == ""):
                words = list(itertools.dropwhile(ASSIGNMENT.match, part))
                words = list(itertools.takewhile(lambda word: not word.startswith(">"), words))
                if operator or not words:
                    continue
                if words[0] == "cd":
                    folder = (folder / words[1]).resolve()
                    continue
                programs = [i for i, word in enumerate(words) if TARGET.search(word)]
                cut = programs[-1] + 1 if programs and "pytest" not in words else 0
                found.append(
                    Command(folder, words[cut - 1] if cut else "", tuple(words[cut:]), " ".join(words))
                )
            folder = outside if line[0] == "(" else folder
    return found


def exists(command: Command) -> bool:
    """Return True if the program is there, is built by make setup, or is a target of its folder's build."""
    program = Path(os.path.normpath(command.folder / command.program))  # build may be a link
    if program.suffix in (".py", ".sh", ".sbatch"):
        return program.is_file()
    if program.parent == BINARIES:
        return need_binary(program.name).exists()
    builds = [
        program.parent / "Makefile",
        *(p / "CMakeLists.txt" for p in program.parents if p.is_relative_to(ROOT)),
    ]
    return any(program.name in build.read_text() for build in builds if build.is_file())


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_name_files_that_exist(page: Path) -> None:
    wrong = [c.line for c in commands(page) if c.program and not exists(c)]
    for command in commands(page):
        words = command.arguments
        if not command.program and words[0] == "make" and command.folder == ROOT:
            names = [word for word in words[1:] if not ASSIGNMENT.match(word)]
            makefile = (ROOT / "Makefile").read_text()
            wrong += [command.line for name in names if not re.search(rf"^{name}:", makefile, re.M)]
        wrong += [command.line for word in words if word.startswith("tests/") and not (ROOT / word).is_file()]
    assert not wrong


def test_programs_take_the_options_that_docs_give_them() -> None:
    every = {
        (str(c.folder), c.program, *c.arguments): c.line
        for page in PAGES
        for c in commands(page)
        if c.program.endswith(".py")
        and "parse" in (text := (c.folder / c.program).read_text()) + "parse" * ("run(main" in text)
    }
    assert len(every) > 100
    parse = [str(python()), str(ROOT / "tests" / "scripts" / "parse_only.py")]
    said = subprocess.run(parse, input=json.dumps([*every]), capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stderr
    wrong = {line: why for line, why in zip(every.values(), json.loads(said.stdout), strict=True) if why}
    assert not wrong


def test_binaries_take_the_options_that_docs_give_them() -> None:
    given: dict[str, set[str]] = {}
    for page in PAGES:
        for command in commands(page):
            program = command.folder / command.program
            if program.parent == BINARIES:
                options = {word for word in command.arguments if word.startswith("--")} - {"--help"}
                given.setdefault(program.name, set()).update(options)
    assert given
    for name, options in given.items():
        known = set(re.findall(r"--[a-z-]+", run([str(need_binary(name)), "--help"]).stdout))
        assert options <= known, name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_tables_that_programs_print_stand_under_their_command(page: Path) -> None:
    """The command stands before the table: in a block of the same section, as inline code, or as "$ command"."""
    named, wrong = False, []
    for token in tokens(page):
        if token.type == "heading_open" and token.tag in ("h1", "h2"):
            named = False
        elif token.type == "inline":
            named |= any(PROGRAM.search(c.content) for c in token.children or () if c.type == "code_inline")
        elif token.type == "fence":
            named |= token.info.split()[:1] == ["sh"] or token.content.startswith("$ ")
            if not token.info and re.search("^│ ", token.content, re.M) and not named:
                wrong.append(token.content.splitlines()[0])
    assert not wrong


def program_of(command: str) -> list[str]:
    """Return the words of a command; Python forks from a process with torch imported."""
    words = shlex.split(command)
    return [str(python()), *words[1:]] if words[0] == "python" else words


def printed_after(page: Path, command: str) -> list[str]:
    """Return the lines of the block that follows the sh block with the command."""
    every = [token for token in tokens(page) if token.type == "fence"]
    at = next(i for i, token in enumerate(every) if token.content.strip() == command)
    return every[at + 1].content.splitlines()


@pytest.mark.parametrize("lesson", BY_HAND)
def test_worked_examples_print_what_docs_show(lesson: str) -> None:
    chapter = BY_HAND[lesson]
    command = f"python {chapter}/pytorch/{lesson}_by_hand.py --nproc 2"
    done = run(program_of(command), timeout=240)
    assert done.returncode == 0, done.stderr
    kept = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith(("┏", "┡", "├", "└"))]
    assert [line.replace("┃", "│") for line in kept] == printed_after(
        ROOT / "docs" / f"{chapter}.md", command
    )


@pytest.mark.parametrize("line", RUN)
def test_commands_of_docs_run(line: str) -> None:
    assert any(line in c.line for page in PAGES for c in commands(page)), "no page has this command"
    done = run(program_of(line), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
