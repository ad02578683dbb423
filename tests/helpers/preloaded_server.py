"""Run Python programs in forks of an interpreter that has imported modules, for `preloaded.py`.

Each request on the socket names a program. The forked process becomes what an interpreter is that was started
for the program alone, but for the modules that are imported already.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from importlib.machinery import SourceFileLoader
from multiprocessing import process as multiprocessing_process
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tests.helpers import huge_pages, kept_modules

_LONGEST_REQUEST = 1 << 20
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000  # clone(2)
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000  # mount(2)


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for every request; return the request and its streams in a fork, and None at the end."""
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
        if request["context"] is not None:
            record_as(request["context"])
        pid = os.fork()
        if pid == 0:
            for pidfd in running:
                os.close(pidfd)
            return request, streams
        running[os.pidfd_open(pid)] = (request["number"], pid)
        for stream in streams:
            os.close(stream)


def record_as(context: str) -> None:
    """Let coverage, if it measures this process, record the lines of its forks under this name."""
    coverage: Any = sys.modules.get("coverage")
    if coverage is not None and (current := coverage.Coverage.current()) is not None:
        current.set_option("run:context", context)


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
    if request["place"][0]:
        enter(*request["place"])
    write_into_initial_environment(request["marker"])


def enter(namespace: str, host: str) -> None:
    """Enter a network namespace, as `ip netns exec` does: with its files in /etc; and get a host's name."""
    libc, own_files = ctypes.CDLL(None), Path("/etc/netns", namespace)
    with Path("/run/netns", namespace).open() as file:
        assert libc.setns(file.fileno(), _CLONE_NEWNET) == 0
    assert libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS) == 0
    assert libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) == 0
    for each in own_files.iterdir() if own_files.exists() else ():
        assert libc.mount(bytes(each), bytes(Path("/etc", each.name)), None, _MS_BIND, None) == 0
    if host:
        socket.sethostname(host)


def run(request: dict[str, Any]) -> None:
    """Run the program, in its folder, with its variables and arguments."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.orig_argv[:] = [sys.executable, *request["command"]]
    if request["command"][0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # of an interpreter that prints
    path, *args = [word for word in request["command"] if word != "-u"]
    installed, spec, folder = sys.path[len(_STARTED_WITH) :], None, str(Path(path).resolve().parent)
    if path == "-m":
        name, folder = args.pop(0), str(Path.cwd())
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None, name
        path = str(spec.origin)
    sys.argv[:] = [path, *args]
    sys.path[:] = [folder, *python_path(), *installed]
    renew_what_imports_recorded()
    main = main_module(Path(path).absolute())
    if spec is not None:
        main.__spec__, main.__package__ = spec, spec.parent
    try:
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))
    except BaseException as error:
        if not isinstance(error, SystemExit):
            hide_these_frames()
        raise


def reserve(count: int) -> dict[str, Any] | None:
    """Fork processes which become the first programs that `subprocess.Popen` starts with this interpreter.

    They have imported what this process has imported now. What no program needs ends with this process.

    Returns:
        In a forked process, the request; None in this one.
    """
    reserved: list[tuple[socket.socket, int]] = []
    for _ in range(count):
        ours, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for each in (ours, *(channel for channel, _ in reserved)):
                each.close()
            return become_started(others)
        others.close()
        reserved.append((ours, pid))
    if reserved:
        start_reserved(reserved)
    return None


def start_reserved(reserved: list[tuple[socket.socket, int]]) -> None:
    """Let `subprocess.Popen` use these processes, as long as there are any."""
    plain: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # in no stub
    parameters = inspect.signature(plain)

    def execute(popen: Any, *arguments: Any) -> None:
        given = parameters.bind(popen, *arguments).arguments
        executable, *command = map(str, given["args"])
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        has_pipes = given["p2cwrite"] != -1 or given["c2pread"] != -1 or given["errread"] != -1
        first = command[command[:1] == ["-u"]]
        is_program = first == "-m" or first.endswith(".py")
        if not reserved or executable != sys.executable or not is_program or has_pipes:
            plain(popen, *arguments)
            return
        channel, pid = reserved.pop(0)
        streams = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        request = {
            "command": command,
            "cwd": str(given["cwd"] or Path.cwd()),
            "env": {**(os.environ if given["env"] is None else given["env"])},
            "descriptors": [0, 1, 2, *given["pass_fds"]],
            "new_session": given["start_new_session"],
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "ignored": [each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
        }
        with channel:
            socket.send_fds(channel, [json.dumps(request).encode()], [*streams, *given["pass_fds"]])
            channel.recv(1)
        popen.pid, popen._child_created = pid, True

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]  # in no stub


def become_started(channel: socket.socket) -> dict[str, Any]:
    """Wait for a request, and take its descriptors, session and signals."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # which the whole process group may get
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    text, received = socket.recv_fds(channel, _LONGEST_REQUEST, 64)[:2]
    if not text:
        os._exit(0)
    request: dict[str, Any] = json.loads(text)
    highest = max(request["descriptors"]) + 1
    with_room = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, highest) for number in received]
    if channel.fileno() < highest:
        moved = socket.socket(fileno=fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, highest))
        channel.close()
        channel = moved
    for number in received:
        os.close(number)
    for number, target in zip(with_room, request["descriptors"], strict=True):
        os.dup2(number, target)
        os.close(number)
    if request["new_session"]:
        os.setsid()
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    channel.send(b"1")
    channel.close()
    return request


def python_path() -> list[str]:
    """Return the folders of `PYTHONPATH`, as an interpreter puts them into `sys.path`."""
    return [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]  # noqa: PTH100


_STARTED_WITH = python_path()


def renew_what_imports_recorded() -> None:
    """Set again what imported modules recorded or drew; Python's `random` draws after each fork by itself."""
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


def hide_these_frames() -> None:
    """Let the interpreter print the exception that ends the program without the frames of this file."""
    hook = sys.excepthook

    def without(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = without


def leave_modules(imported: dict[str, ModuleType]) -> None:
    """Leave the modules that were imported here as they are at a program's end, except `torch.distributed`.

    All others are cleared, with what they hold, as at the end of every interpreter.
    """
    for name, module in imported.items():
        if sys.modules.get(name) is module and not name.startswith("torch.distributed"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            sys.modules[name] = None  # type: ignore[assignment]  # as Python sets it


def shorten_exit() -> None:
    """Leave out, at a program's end, what takes half a second for torch: unregistering each operator."""
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # in no stub
        finalizer.atexit = False
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # in place of all functions that were registered before
    libc.on_exit(libc.fcloseall, None)  # called before that one


if __name__ == "__main__":
    del sys.path[0]  # the tests' helpers must not be found in place of installed modules
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # imports leave little garbage, and each search takes longer
    here, imported = set(sys.modules), dict[str, ModuleType]()
    atexit.register(leave_modules, imported)  # is called after what the modules register
    for name in sys.argv[2:]:
        if name == "rankwise":
            sys.meta_path.insert(0, kept_modules.KeptModules())
        else:
            importlib.import_module(name)
    imported.update({name: module for name, module in sys.modules.items() if name not in here})
    shorten_exit()
    gc.enable()
    gc.collect()
    gc.freeze()  # else each program searches all of this for garbage when it ends
    huge_pages.use()
    send(channel, {"number": 0})
    if (found := serve(channel)) is not None:
        prepare(*found)
        send(channel, {"number": found[0]["number"], "pid": os.getpid()})
        channel.close()
        request = found[0]
        run(reserve(request["siblings"]) or request)
