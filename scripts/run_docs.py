"""Runner of documents: it runs the commands of the pages as written, in copies of the working tree.

The pages are README.md, CONTRIBUTING.md and docs/*.md.

A line before each block of shell commands says whether it can run; it is not visible when the page
is rendered:

    <!-- runnable -->               run it, and expect exit status 0
    <!-- runnable: server -->       start it, wait until Triton is ready on port 8000, leave it
                                    running until the next such block or the end of the page, then
                                    stop it as Ctrl-C does
    <!-- runnable: with server -->  the same as the first, but start a server with the tiny model
                                    if none is running
    <!-- not runnable: REASON -->   do not run it

Blocks of Python may have such a line. Blocks of other languages have none.

Each page has a copy of its own, in which stand-ins have the names that pages use:
`path/to/Fun-CosyVoice3-0.5B` is the tiny model, `server.yaml` a file of settings,
`out/demo_tokens.npy` and `out/demo_voice.safetensors` are made for the tests, and `my_llm` is a
program that prints these tokens. `.venv/bin` is not on PATH, as in a reader's shell.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from token2wav_server import PortInUseError, Ports
from token2wav_server.launcher.ports import LOOPBACK, fetched

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
ENVIRONMENT = ROOT / ".venv"  # in which the blocks run
STAMP = ENVIRONMENT / "setup-stamp"  # of `make setup`
DEFAULT_SERVER = ".venv/bin/token2wav serve tests/data/tiny"
BLOCK_SECONDS = 900.0
STARTING_SECONDS = 180.0
STOPPING_SECONDS = 60.0

_ANY_MARK = re.compile(r"<!-- (?:not )?runnable")
_MARK = re.compile(
    r"<!-- (?:runnable(?:: (?P<kind>server|with server))?|(?P<skipped>not) runnable: \S.*) -->"
)
_MARKS = "runnable, runnable: server, runnable: with server, and not runnable: REASON"
_FENCE = re.compile(r"(?P<fence>```+)(?P<language>\w*)$")
_SHELL = ("", "bash", "sh", "console")
_INDENT = "    "
_SHOWN_LINES = 30


@dataclass(frozen=True)
class Code:
    """Block of code of a page: its lines from `start` up to `stop`, and its text and language.

    An indented block has no language.
    """

    start: int
    stop: int
    language: str
    text: str


@dataclass(frozen=True)
class Block:
    """Block of commands in a page, and its use of a server."""

    page: Path
    code: Code
    kind: str | None

    def __str__(self) -> str:
        first = self.code.text.strip().splitlines()[0]
        shown = first if len(first) <= 60 else first[:57] + "..."
        return f"{self.page.name}:{self.code.start + 1}: {shown}"

    @property
    def command(self) -> list[str]:
        if self.code.language == "python":
            return [".venv/bin/python", "-c", self.code.text]
        return ["bash", "-euo", "pipefail", "-c", self.code.text]


class MarkError(ValueError):
    """Mark that cannot be used, or that is missing."""


def blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page that are marked as runnable, in order.

    Raises:
        MarkError: a mark is misspelt, stands before nothing that can run, or is missing before
            shell commands.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    marks = {number: line for number, line in enumerate(lines) if _ANY_MARK.match(line)}
    runnable_blocks = []
    for code in code_in(lines):
        if code.language not in (*_SHELL, "python"):
            continue
        number = max((index for index in range(code.start) if lines[index]), default=0)
        line = marks.pop(number, None)
        mark = None if line is None else _MARK.fullmatch(line)
        if line is not None and mark is None:
            raise MarkError(f"{page.name}:{number + 1}: {line!r} is not a mark; use {_MARKS}")
        if mark is None and code.language in _SHELL:
            raise MarkError(
                f"{page.name}:{code.start + 1}: these commands have no mark; use {_MARKS}"
            )
        if mark is not None and not mark["skipped"]:
            runnable_blocks.append(Block(page, code, mark["kind"]))
    if marks:
        raise MarkError(
            f"{page.name}:{min(marks) + 1}: no block of shell commands or Python follows the mark"
        )
    return runnable_blocks


def code_in(lines: Sequence[str]) -> Iterator[Code]:
    """Yields the blocks of code in the lines of a page."""
    number = 0
    while number < len(lines):
        start, inside = number, []
        if fence := _FENCE.match(lines[start]):
            closing = (
                index
                for index in range(start + 1, len(lines))
                if lines[index].startswith(fence["fence"])
            )
            number = next(closing) + 1
            text = "\n".join(lines[start + 1 : number - 1])
            yield Code(start, number, fence["language"], text)
        elif lines[start].startswith(_INDENT):
            while number < len(lines) and (not lines[number] or lines[number].startswith(_INDENT)):
                inside.append(lines[number].removeprefix(_INDENT))
                number += 1
            if start == 0 or not lines[start - 1]:  # else it goes on with a paragraph
                yield Code(start, number, "", "\n".join(inside).rstrip())
        else:
            number += 1


@contextmanager
def scratch() -> Iterator[Path]:
    """Makes a copy of the working tree with the stand-ins and the environment."""
    with tempfile.TemporaryDirectory(prefix="token2wav-docs-") as folder:
        tree = Path(folder) / "token2wav"
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        )
        for name in filter(None, listing.stdout.decode().split("\0")):
            if (ROOT / name).is_file():  # a file may be deleted and not committed yet
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        _link_environment(tree)
        _put_stand_ins(tree)
        yield tree


def _link_environment(tree: Path) -> None:
    """Links the entries of the environment, never the folder itself: `scripts/setup.sh` may clear
    .venv.
    """
    target = tree / ".venv"
    target.mkdir()
    for item in ENVIRONMENT.iterdir():
        if item.name not in ("setup-stamp", "setup.log"):
            (target / item.name).symlink_to(item)
    # By the stamp setup.sh knows that .venv is up to date.
    version, *_, digest = STAMP.read_text().split()
    (target / "setup-stamp").write_text(f"{version} {tree} {digest}\n")


def _put_stand_ins(tree: Path) -> None:
    demo, tiny = tree / "tests/data/demo", tree / "tests/data/tiny"
    shutil.copytree(tiny, tree / "path/to/Fun-CosyVoice3-0.5B")
    (tree / "server.yaml").write_text("limits: {streams: 8}\n")
    (tree / "out").mkdir()
    for name in ("tokens.npy", "voice.safetensors"):
        shutil.copy2(demo / name, tree / "out" / f"demo_{name}")
    programs = tree / "stand-ins"
    programs.mkdir()
    language_model = programs / "my_llm"
    language_model.write_text(
        "#!/usr/bin/env python3\n"
        "import numpy\n"
        f"for token in numpy.load({str(demo / 'tokens.npy')!r}):\n"
        "    print(f'<|s_{token}|>', end='', flush=True)\n"
    )
    language_model.chmod(0o755)


class Page:
    """Run of one page: its blocks run in one copy of the tree, with one server at a time."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._log = tree.parent / "server.log"
        self._server: subprocess.Popen[bytes] | None = None
        inherited = [
            folder
            for folder in os.environ["PATH"].split(os.pathsep)
            if Path(folder) != ENVIRONMENT / "bin"
        ]
        self._variables = {
            **os.environ,
            "PATH": os.pathsep.join([str(tree / "stand-ins"), *inherited]),
        }

    def run(self, block: Block) -> str:
        """Runs a block and returns a message about its failure, or an empty string."""
        if block.kind == "server":
            return self._serve(block.command)
        if block.kind == "with server" and self._server is None:
            problem = self._serve(["bash", "-c", DEFAULT_SERVER])
            if problem:
                return problem
        process = self._start(block.command, subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=BLOCK_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return f"still running after {BLOCK_SECONDS:g} s\n{_tail(output)}"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return (
            "" if process.returncode == 0 else f"exit status {process.returncode}\n{_tail(output)}"
        )

    def close(self) -> None:
        """Stops the page's server, if it has one."""
        server, self._server = self._server, None
        if server is None:
            return
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(STOPPING_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    def _serve(self, command: Sequence[str]) -> str:
        self.close()
        try:
            Ports().check_free(LOOPBACK)
        except PortInUseError as error:
            return str(error)
        with self._log.open("wb") as log:
            self._server = self._start(command, log.fileno())
        deadline = time.monotonic() + STARTING_SECONDS
        while time.monotonic() < deadline and self._server.poll() is None:
            if fetched(Ports.http, "/v2/health/ready") is not None:
                return ""
            time.sleep(0.5)
        ended = self._server.poll()
        self.close()
        failure = (
            f"not ready after {STARTING_SECONDS:g} s" if ended is None else f"exit status {ended}"
        )
        return f"{failure}\n{_tail(self._log.read_bytes())}"

    def _start(self, command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self._tree,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _tail(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join(f"    {line}" for line in lines)


def run_page(page_blocks: Sequence[Block]) -> int:
    """Runs the blocks of one page; prints a line for each, and returns how many failed."""
    failed = 0
    with scratch() as tree, closing(Page(tree)) as page:
        for block in page_blocks:
            begun = time.monotonic()
            problem = page.run(block)
            failed += bool(problem)
            print(
                f"{'FAILED' if problem else 'ok':<7}{time.monotonic() - begun:6.1f} s  {block}",
                flush=True,
            )
            if problem:
                print(f"    {problem.rstrip()}", flush=True)
    return failed


def main() -> int:
    """Runs the command; returns 1 if a block failed, 2 if there is no environment, or a mark cannot
    be read.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "pages",
        nargs="*",
        type=Path,
        help="pages to run (default: README.md, CONTRIBUTING.md and docs/*.md)",
    )
    options = parser.parse_args()
    # so that servers are stopped
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("run_docs: terminated"))
    if not STAMP.is_file():
        print(f"run_docs: {STAMP} is missing; run: make setup", file=sys.stderr)
        return 2
    try:
        pages = [blocks(page) for page in options.pages or PAGES]
    except MarkError as error:
        print(f"run_docs: {error}", file=sys.stderr)
        return 2
    failed = sum(run_page(page) for page in pages if page)
    print(f"run_docs: {sum(map(len, pages))} blocks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
