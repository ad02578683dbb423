"""The README's code runs and prints what the README shows; links in all pages resolve."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, REPOSITORY, blocks
from tests.helpers.scripts import ScriptRunner

README = (REPOSITORY / "README.md").read_text()
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
PROGRAMS, OUTPUTS = blocks(README), blocks(README, "text")


def test_the_complete_file_prints_its_output(run_script: ScriptRunner) -> None:
    """The complete file has at most 25 lines and prints the output under it, once."""
    source = PROGRAMS[0]
    assert len(source.splitlines()) <= 25
    result = run_script(source, siblings=1)
    assert result.returncode == 0, result
    shown, printed = OUTPUTS[0], result.stdout
    number = re.compile(r"\d+\.\d+")  # the loss differs in its last digits between machines
    assert number.sub("*", printed) == number.sub("*", shown)
    losses, expected = ([float(loss) for loss in number.findall(text)] for text in (printed, shown))
    assert losses == pytest.approx(expected, abs=0.05)


def test_the_failure_looks_like_that(run_script: ScriptRunner) -> None:
    """The same file with a raise on rank 1 ends as shown: same text, traceback last, exit code 1."""
    line = "        loss = cross_entropy(self.net(batch[0]), batch[1])\n"
    fault = "        if self.global_rank == 1 and batch_idx == 20:\n"
    fault += '            raise ValueError("loss is nan")\n'
    source = PROGRAMS[0]
    assert line in source
    result = run_script(source.replace(line, line + fault), siblings=1)
    assert result.returncode == 1, result
    shown = OUTPUTS[1].splitlines()
    assert result.stderr.splitlines()[-1] == shown[-1] == "ValueError: loss is nan"
    assert result.stderr.count("in training_step") == 1, result
    first_words = re.split("host|pid", shown[0])[0]
    assert first_words in result.stderr, result


def test_the_custom_strategy_runs(run_script: ScriptRunner) -> None:
    """The README's class works by its registered name, and its wrapper is used."""
    source = PROGRAMS[1]
    assert len([line for line in source.splitlines() if line.strip()]) <= 12
    use = """
def train(strategy):
    import torch
    wrapped = strategy.setup_module(torch.nn.Linear(2, 1))
    wrapped(torch.ones(1, 2)).sum().backward()
    return type(wrapped).__name__, wrapped.calls

if __name__ == "__main__":
    strategy = StrategyRegistry.create("ddp_counting", devices=2)
    value = strategy.launch(train)
    if strategy.is_global_zero:
        print(value)
"""
    result = run_script(source + use, siblings=1)
    assert result.returncode == 0, result
    assert result.stdout == "('Counting', 1)\n"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [heading.strip().lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    """Every link to a file of the project leads to one, and to a heading of it if it names one."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text())
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    assert [path for path, _ in targets if not path.exists()] == []
    assert [anchor for path, anchor in targets if anchor and anchor not in anchors(path)] == []


def test_the_commands_are_one_line_each() -> None:
    """The README has one command that trains on two processes, and one that runs the tests."""
    commands = blocks(README, "bash")[:2]
    assert [len(command.splitlines()) for command in commands] == [1, 1]
    assert "examples/digits.py" in commands[0]
    assert "pytest" in commands[1]
