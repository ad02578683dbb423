"""Record which tests run which lines, and keep the record for the next run.

Each test file runs once under coverage, in an overlay, with the name of the test as coverage's context, also
in the processes that the test starts. The record is used until the source, the file or a helper changes.
"""

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.mutants import Mutant
from tests.mutation.runner import Runner, at_once
from tests.mutation.worker import TEST_VARIABLE

FOLDER = ".coverage.mutation"
SOURCE = "src"
CONFIG = """\
[run]
source = {source}
data_file = {data}/data
parallel = true
context = ${{{variable}-}}
core = ctrace
patch = _exit, fork
disable_warnings = no-data-collected, module-not-imported
"""
BITS = """
select file.path, context.context, line_bits.numbits
from line_bits join file on file.id = file_id join context on context.id = context_id
where context.context != ''
"""


@dataclass
class Record:
    """What the tests of one file did: seconds by test, lines by source file and test, and the failed tests.

    The lines are the bits of a number, in hexadecimal digits. Those under the name of the file are of what
    its tests share, such as processes that a fixture of the module starts: every test may depend on them.
    """

    file: str
    digest: str
    durations: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def reaching(self, mutant: Mutant) -> Iterator[str]:
        """Return the tests that pass and run one of the lines of a mutant."""
        wanted = sum(1 << line for line in mutant.lines)
        lines = {test: int(bits, 16) for test, bits in self.lines.get(mutant.path, {}).items()}
        shared = lines.get(self.file, 0)
        yield from (test for test in self.durations if (lines.get(test, 0) | shared) & wanted)


def records_of(project: Path, files: Sequence[str], runners: Sequence[Runner]) -> list[Record]:
    """Return the records of test files, of each that has none or an old one after running it."""
    common = _common_digest(project)
    known = [_read(project, file, common) for file in files]
    missing = [record for record in known if not record.durations and not record.failed]
    missing.sort(key=lambda record: (project / record.file).stat().st_size, reverse=True)

    def record_and_keep(runner: Runner, record: Record) -> Record:
        record_file(runner, record)
        _path(project, record.file).write_text(json.dumps(vars(record)))
        return record

    for number, record in enumerate(at_once(runners, record_and_keep, missing), 1):
        print(f"[{number}/{len(missing)}] recorded {record.file}: {len(record.durations)} tests", flush=True)
        for test in record.failed:
            print(f"  fails without a mutant: {test}", flush=True)
    return known


def record_file(runner: Runner, record: Record) -> None:
    """Run the tests of a file under coverage. What fails is tried again without."""
    data = runner.copy.parent / "coverage"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    config = data / "config"
    config.write_text(CONFIG.format(source=runner.copy / SOURCE, data=data, variable=TEST_VARIABLE))
    outcome = runner.run([record.file], config=config)
    record.durations |= outcome.durations
    _add_lines(record, runner.copy, data)
    suspects = [*outcome.failed, *filter(None, [outcome.hung])]
    for test in suspects:
        again = runner.run([record.file], [test])
        record.durations |= again.durations
        if test not in again.durations:
            record.failed.append(test)


def _add_lines(record: Record, copy: Path, data: Path) -> None:
    lines: dict[str, dict[str, int]] = {}
    for file in data.glob("data.*"):
        for path, test, bits in _line_bits(file):
            tests = lines.setdefault(str(Path(path).relative_to(copy)), {})
            tests[test] = tests.get(test, 0) | int.from_bytes(bits, "little")
    record.lines = {
        path: {test: f"{bits:x}" for test, bits in tests.items()} for path, tests in lines.items()
    }


def _line_bits(file: Path) -> list[tuple[str, str, bytes]]:
    """Read a data file of coverage; an empty list if its process was killed while it wrote it."""
    try:
        connection = sqlite3.connect(file)
        try:
            return connection.execute(BITS).fetchall()
        finally:
            connection.close()
    except sqlite3.DatabaseError:
        return []


def _read(project: Path, file: str, common: bytes) -> Record:
    digest = hashlib.sha256(common + (project / file).read_bytes()).hexdigest()
    path = _path(project, file)
    if path.exists():
        record = Record(**json.loads(path.read_text()))
        if record.digest == digest:
            return record
    return Record(file, digest)


def _path(project: Path, file: str) -> Path:
    folder = project / FOLDER
    folder.mkdir(exist_ok=True)
    return folder / (file.replace("/", ".") + ".json")


def _common_digest(project: Path) -> bytes:
    """Return the digest of the source and of all in `tests` that is no test file, but for this tool."""
    digest = hashlib.sha256()
    for path in sorted(_common_files(project)):
        digest.update(str(path.relative_to(project)).encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _common_files(project: Path) -> Iterable[Path]:
    yield from (project / SOURCE).rglob("*.py")
    tool = Path(__file__).parent
    for path in (project / "tests").rglob("*.py"):
        if not path.name.startswith("test_") and tool not in path.parents:
            yield path
