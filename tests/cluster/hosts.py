"""Two hosts on this machine: network namespaces with their own names and addresses, joined by a veth pair."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.preloaded import Place
from tests.helpers.processes import MARKER
from tests.helpers.scripts import inside

_NAMESPACES = Path("/etc/netns")  # `ip netns exec` puts the files in here over those in /etc

# As a login over ssh: with few variables, in the home folder, one text for the shell.
_REMOTE_SHELL = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done # options of ssh
host=$1; shift
cd /
exec env -i PATH="$PATH" {marker}="${marker}" ip netns exec "{prefix}$host" \\
    unshare --uts bash -c 'hostname "$0" && exec bash -c "$1"' "$host" "$*"
"""


class TwoHosts:
    """`hosta` and `hostb`, each with its own loopback, and an interface on which they reach each other only.

    The names resolve within them. A process enters with `command`, or is started in `place`, and is otherwise
    like any other: it has this machine's files, users and process ids.
    """

    names = ("hosta", "hostb")
    addresses = ("10.77.0.1", "10.77.0.2")
    interface = "eth0"

    def __init__(self) -> None:
        self._prefix = f"rankwise-{os.getpid()}-"
        self._spaces = {name: f"{self._prefix}{name}" for name in self.names}

    @staticmethod
    def problem() -> str | None:
        """Return why the hosts cannot be made here, or None."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
        if missing:
            return f"{', '.join(missing)} not installed (iproute2, util-linux, hostname)"
        probe = subprocess.run(["unshare", "-n", "-u", "true"], capture_output=True, text=True, check=False)
        return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else None

    def start(self) -> None:
        """Make the hosts and the cable between them."""
        entries = [f"{address} {name}\n" for name, address in zip(self.names, self.addresses, strict=True)]
        for space in self._spaces.values():
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            folder = _NAMESPACES / space
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(entries))
            (folder / "resolv.conf").write_text("")  # nobody to ask: what is not in the file above is unknown
        one, other = self._spaces.values()
        cable = ("link", "add", self.interface, "netns", one, "type", "veth")
        _ip(*cable, "peer", "name", self.interface, "netns", other)
        for space, address in zip(self._spaces.values(), self.addresses, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", self.interface)
        self.join()

    def stop(self) -> None:
        """Remove the hosts. Processes that are still inside keep their namespace until they end."""
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(_NAMESPACES / space, ignore_errors=True)
        with suppress(OSError):  # there are others in it, of tests that run at the same time
            _NAMESPACES.rmdir()

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a host."""
        return inside(command, self.place(name))

    def place(self, name: str) -> Place:
        """Return the place that is a host, for programs that a preloaded interpreter forks."""
        return self._spaces[name], name

    def remote_shell(self, folder: Path) -> Path:
        """Write a program that runs a command on a host as ssh does: `program HOST COMMAND...`."""
        path = folder / "remote_shell"
        path.write_text(_REMOTE_SHELL.format(marker=MARKER, prefix=self._prefix))
        path.chmod(0o755)
        return path

    @contextmanager
    def loopback_to_itself(self, name: str) -> Iterator[None]:
        """Resolve a host's own name to 127.0.1.1, as Debian does, for processes that the block starts."""
        file = _NAMESPACES / self._spaces[name] / "hosts"
        before = file.read_text()
        file.write_text(f"127.0.1.1 {name}\n{before}")
        try:
            yield
        finally:
            file.write_text(before)

    def cut(self) -> None:
        """Take the link between the hosts down."""
        _ip("-n", self._spaces[self.names[0]], "link", "set", self.interface, "down")

    def join(self) -> None:
        """Take the link between the hosts up, and wait until it works."""
        for space in self._spaces.values():
            _ip("-n", space, "link", "set", self.interface, "up")
        wait_until(lambda: all(self._carries(space) for space in self._spaces.values()), "the cable carries")

    def _carries(self, space: str) -> bool:
        return "state UP" in _ip("-n", space, "link", "show", self.interface)


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Wait until something holds; raise RuntimeError when it does not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {timeout_s:g} s, and still not: {what}")
        time.sleep(0.05)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
