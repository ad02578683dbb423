"""The mutation tester finds what tests do not check; and rankwise's tests check nearly all."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutation.judge import Judge, Verdict, portions
from tests.mutation.mutants import draw, mutants_of
from tests.mutation.reach import Record, records_of
from tests.mutation.report import FOLDERS, Report, judge_mutants
from tests.mutation.runner import Runner, at_once, runners

PROJECT = Path(__file__).parents[2]
SOURCE = """\
def count_to(limit):
    number = 0
    while number < limit:
        number += 1
    return number


def is_used():
    return []


def is_called():
    return []


def is_unused():
    return []


def is_shared():
    return []
"""
TESTS = """\
import subprocess, sys
import pytest
from example import count_to, is_called

def run(name, **options):
    program = f"import example; assert example.{name}() == []"
    subprocess.run([sys.executable, "-c", program], check=True, **options)

def test_count():
    assert count_to(3) == 3

def test_process():
    run("is_used")

def test_process_without_variables():
    is_called()
    run("is_called", env={})

def test_that_fails():
    assert count_to(3) == 4

@pytest.fixture(scope="module")
def shared():
    return subprocess.run([sys.executable, "-c", "import example; exit(example.is_shared() != [])"])

def test_that_starts_it(shared):
    assert shared is not None

def test_that_checks_it(shared):
    assert shared.returncode == 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one module with one file of tests."""
    for path, text in (("src/example.py", SOURCE), ("tests/unit/test_example.py", TESTS)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def runner(project: Path) -> Iterator[Runner]:
    with runners(project, 1, preload=()) as [only]:
        yield only


def result(verdict: Verdict) -> str:
    """Return what happened to a mutant, in a word or two."""
    if verdict.killer is None:
        return "survives" if verdict.reached else "not reached"
    return f"{'hangs' if verdict.has_hung else 'fails'} in {verdict.killer.partition('::')[2]}"


@pytest.mark.soak
def test_an_example(project: Path, runner: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    """A mutant is killed by a failure, also in another process, or by a hang; or it survives its tests."""
    [record] = records_of(project, ["tests/unit/test_example.py"], [runner])
    judge = Judge([record], slack_s=1.0)
    mutants = draw(project, ["src"], 0, 100)
    results = {(mutant.line, mutant.new): result(judge(runner, mutant)) for mutant in mutants}
    expected = {
        (2, "1"): "survives",
        (3, "number <= limit"): "fails in test_count",
        (3, "False"): "fails in test_count",
        (4, "number -= 1"): "hangs in test_count",
        (4, "2"): "fails in test_count",
        (5, "None"): "fails in test_count",
    }
    ends = {9: "fails in test_process", 13: "fails in test_process_without_variables", 17: "not reached"}
    ends[21] = "fails in test_that_checks_it"
    assert results == expected | {(line, "None"): end for line, end in ends.items()}
    assert record.failed == ["tests/unit/test_example.py::test_that_fails"]
    assert (runner.copy / "src" / "example.py").read_text() == SOURCE
    assert records_of(project, ["tests/unit/test_example.py"], [runner]) == [record]  # nothing runs again
    assert capfd.readouterr().out.count("recorded") == 1


def test_an_interruption_ends_what_runs(runner: Runner) -> None:
    """Where the results are not wanted any more, a test that waits is killed with its processes."""
    program = "import subprocess\ndef test_long(): subprocess.run(['sleep', '600'])"
    (runner.copy / "test_long.py").write_text(program)

    def run(_: Runner, is_long: bool) -> None:
        if is_long:
            runner.run(["test_long.py"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(at_once([runner, runner], run, [False, True]))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a == b", ["a != b"]),
        ("a < b < c", ["a <= b < c", "a < b <= c"]),
        ("a and not b", ["a or not b", "a and (b)"]),
        ("a + b * c", ["a - b * c", "a + b / c"]),
        ("f(3, True)", ["pass", "f(4, True)", "f(3, False)"]),
        ("any(a)", ["pass", "all(a)"]),
        ("a[1:]", ["a[:]", "a[2:]"]),
        ("a if b else c", ["a if True else c", "a if False else c"]),
        ("[a for a in b if a]", ["[a for a in b if True]"]),
        ("while a:\n    break", ["while False:\n    break", "while a:\n    continue"]),
        ("def f(a: int = 1): return a", ["def f(a: int = 2): return a", "def f(a: int = 1): return None"]),
        ("a: Literal[1] = b", []),
        ("Mode = Literal[1]", []),
        ("__all__ = [1]", []),
        ("_log.info('%s', a)", []),
        ("f'{a + 1}'", []),
        ("if TYPE_CHECKING:\n    f()", []),
        ("if sys.platform == 'darwin':\n    f()", []),
        ("class A:\n    def __repr__(self):\n        return a", []),
        ("@f(1)\ndef g(): pass", []),
    ],
)  # fmt: skip
def test_mutants_of_one_statement(tmp_path: Path, source: str, expected: list[str]) -> None:
    """Each node is changed on its own; types, texts and logging stay."""
    (tmp_path / "a.py").write_text(source)
    assert sorted(mutant.text for mutant in mutants_of(tmp_path, "a.py")) == sorted(expected)


def test_a_seed_draws_the_same(project: Path) -> None:
    """Seed, count and places say what is drawn; a mutant's diff is of one line."""
    drawn = draw(project, ["src"], 7, 5)
    assert drawn == draw(project, ["src/example.py"], 7, 5) != draw(project, ["src"], 8, 5)
    assert [mutant.line for mutant in draw(project, ["src/example.py:4"], 0, 100)] == [4, 4]
    (project / "src" / "example.py").write_text("def new(): return 1\n\n\n" + SOURCE)
    moved = {(mutant.line - 3, mutant.change) for mutant in draw(project, ["src"], 7, 6)}
    assert len(moved & {(mutant.line, mutant.change) for mutant in drawn}) >= 4
    (project / "src" / "example.py").write_text(SOURCE)
    for mutant in drawn:
        assert [line[0] for line in mutant.diff.splitlines()[2:] if line[0] != " "] == ["@", "-", "+"]
    with pytest.raises(FileNotFoundError):
        draw(project, ["elsewhere"], 0, 1)


def test_the_order_of_tests(project: Path) -> None:
    """Tests of the source file come first, then others by folder; process tests last, short ones first."""
    mutant = draw(project, ["src/example.py:2"], 0, 1)[0]
    folders = ("process/test_a.py", "unit/b/test_c.py", "unit/src/test_other.py", "unit/src/test_example.py")
    records = []
    for file in (f"tests/{place}" for place in folders):
        durations = {f"{file}::slow": 2.0, f"{file}::quick": 1.0}
        records.append(Record(file, "", durations, {"src/example.py": dict.fromkeys(durations, "4")}))
    tests = Judge(records).tests(mutant)
    names = [f"{place}::{name}" for place in reversed(folders) for name in ("quick", "slow")]
    assert list(tests) == [f"tests/{name}" for name in names]
    assert [len(portion) for portion in portions(dict.fromkeys(tests, 7.0))] == [2, 6]
    assert [len(portion) for portion in portions(dict.fromkeys(tests, 200.0))] == [1, 1]


def test_the_report(project: Path) -> None:
    """It has the rate, and the change of each survivor."""
    killed, survivor = draw(project, ["src/example.py:4"], 0, 2)
    verdicts = [Verdict(killed, "test", False, 1, 1, 3.0), Verdict(survivor, None, False, 4, 2, 1.0)]
    report = Report(verdicts, ["t"])
    assert report.rate == 0.5
    assert str(survivor.diff) in str(report)
    assert "SURVIVES 2 of the 4 tests" in str(report)
    assert "1 of 2 mutants killed (50%), 2.0 s" in str(report)
    assert "fails without a mutant: t" in str(report)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_rankwise() -> None:
    """The tests find 92 of 100 mistakes."""
    seed = int(os.environ.get("RANKWISE_TEST_MUTATION_SEED", "20261123"))
    report = judge_mutants(PROJECT, ["src/rankwise"], FOLDERS, seed=seed, count=100)
    assert report.rate >= 0.92, str(report)
