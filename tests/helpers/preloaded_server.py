"""Run Python programs in forks of an interpreter that has imported modules, for `preloaded.py`.

Each request on the socket names a program. The forked process becomes what an interpreter is that was started
for the program alone, but for the modules that are imported already.
"""

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import select
import socket
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from multiprocessing import process as multiprocessing_process
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

_LONGEST_REQUEST = 1 << 20


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for every request.

    Returns:
        In a forked process the request and its streams; None at the end.
    """
    running: dict[int, tuple[int, int]] = {}  # by pidfd: which request, and the process's id
    while True:
        ready = select.select([channel.fileno(), *running], [], [])[0]
        for pidfd in set(ready) & running.keys():
            number, pid = running.pop(pidfd)
            status = os.waitpid(pid, 0)[1]
            os.close(pidfd)
            send(channel, {"number": number, "code": os.waitstatus_to_exitcode(status)})
        if channel.fileno() not in ready:
            continue
        text, streams = socket.recv_fds(channel, _LONGEST_REQUEST, 3)[:2]
        if not text:
            return None
        request: dict[str, Any] = json.loads(text)
        pid = os.fork()
        if pid == 0:
            for pidfd in running:
                os.close(pidfd)
            return request, streams
        running[os.pidfd_open(pid)] = (request["number"], pid)
        for stream in streams:
            os.close(stream)


def send(channel: socket.socket, facts: dict[str, int]) -> None:
    """Send an answer; nobody may wait for it any more."""
    try:
        channel.send(json.dumps(facts).encode())
    except BrokenPipeError:
        pass


def prepare(request: dict[str, Any], streams: list[int]) -> None:
    """Give this process the session, streams, folder, variables and arguments of the program."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    write_into_initial_environment(request["marker"])
    path, *args = request["command"]
    sys.argv[:] = [path, *args]
    sys.orig_argv[:] = [sys.executable, path, *args]
    installed = sys.path[len(_STARTED_WITH) :]
    sys.path[:] = [str(Path(path).resolve().parent), *python_path(), *installed]
    renew_what_imports_recorded()


def python_path() -> list[str]:
    """Return the folders of `PYTHONPATH`, as an interpreter puts them into `sys.path`."""
    return [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]  # noqa: PTH100


_STARTED_WITH = python_path()


def renew_what_imports_recorded() -> None:
    """Set again what the imported modules recorded or drew when they were imported.

    Python's `random` draws a seed after each fork by itself.
    """
    tempfile.tempdir = None
    multiprocessing_process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]  # in no stub
    multiprocessing.current_process().authkey = os.urandom(32)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def write_into_initial_environment(entry: str) -> None:
    """Replace the reserved variable in the memory that /proc/self/environ shows, and that of later forks.

    The tests find the processes of a program by this variable.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc_pid_stat(5)
    name = entry.partition("=")[0].encode()
    variables = ctypes.string_at(start, end - start)
    offset = (b"\0" + variables).index(b"\0" + name + b"=")
    reserved = variables.index(b"\0", offset) - offset
    content = entry.encode()
    assert len(content) <= reserved, entry
    ctypes.memmove(start + offset, content.ljust(reserved, b"/"), reserved)


def main_module(path: Path) -> ModuleType:
    """Return a new `__main__`, with the attributes that an interpreter sets for a file."""
    module = ModuleType("__main__")
    module.__file__ = str(path)
    module.__loader__ = SourceFileLoader("__main__", str(path))
    own = vars(sys.modules["__main__"])
    also = ("__annotations__", "__builtins__", "__cached__")  # as far as this version of Python sets them
    vars(module).update({name: own[name] for name in also if name in own})
    sys.modules["__main__"] = module
    return module


def code_of(path: Path) -> CodeType:
    """Compile the program."""
    return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)


def hide_these_frames() -> None:
    """Let the interpreter print the exception that ends the program without the frames of this file."""
    hook = sys.excepthook

    def without(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = without


if __name__ == "__main__":
    del sys.path[0]  # the tests' helpers must not be found in place of installed modules
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each program searches all of this for garbage when it ends
    send(channel, {"number": 0})
    if (found := serve(channel)) is not None:
        prepare(*found)
        send(channel, {"number": found[0]["number"], "pid": os.getpid()})
        channel.close()
        program = Path(found[0]["command"][0]).absolute()
        main = main_module(program)
        try:
            exec(code_of(program), vars(main))
        except BaseException as error:
            if not isinstance(error, SystemExit):
                hide_these_frames()
            raise
