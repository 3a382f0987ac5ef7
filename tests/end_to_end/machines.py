"""Machines of their own on this one: network, host name, processes and mounts by Linux namespaces, as containers have.

A machine is one process, the first of its namespace; all of it is gone when that process is killed, or when the test
that made it ends however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.77.0"
PORT = 6379
DASHBOARD = 8265
# A private /proc, so that Ray sees the machine's own processes; `setpriv` ends it with the test.
NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--mount-proc")
UNSHARE = ("setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child")


def possible() -> bool:
    """Whether this user may make namespaces and a network between them."""
    if any(shutil.which(program) is None for program in ("setpriv", "unshare", "nsenter", "ip")):
        return False
    trial = [*UNSHARE, "ip", "link", "add", "name", "switch", "type", "bridge"]
    return subprocess.run(trial, capture_output=True).returncode == 0


@dataclass
class Machine:
    """One of them: run programs on it, see what runs there."""

    name: str
    address: str
    folder: Path
    """For what belongs to it."""
    holder: subprocess.Popen = field(repr=False)
    first: int = 0
    """The process that holds the namespaces."""
    identity: str = ""
    """What the kernel calls its network."""

    def inside(self, *command: str, folder: Path | str = "/") -> list[str]:
        """The command as it is run there."""
        return ["nsenter", "-t", str(self.first), "-n", "-m", "-u", "-p", "env", "-C", str(folder), *command]

    def do(self, *command: str) -> str:
        done = subprocess.run(self.inside(*command), capture_output=True, text=True)
        assert done.returncode == 0, (self.name, command, done.stderr)
        return done.stdout

    def hide(self, target: Path, replacement: Path) -> None:
        """Put another file in the place of one, on this machine only."""
        self.do("mount", "--bind", str(replacement), str(target))

    def make_own(self, folder: Path) -> None:
        """From now on what is changed or removed in a folder on this machine stays on this machine."""
        changes = self.folder / "changes"
        changes.mkdir()
        self.do("mount", "-t", "tmpfs", "none", str(changes))  # an overlay cannot be laid over every file system
        self.do("mkdir", f"{changes}/new", f"{changes}/work")
        layers = f"lowerdir={folder},upperdir={changes}/new,workdir={changes}/work"
        self.do("mount", "-t", "overlay", "overlay", "-o", layers, str(folder))
        assert f"overlay {folder} overlay" in self.do("cat", "/proc/mounts")

    def start_ray(self, ray_folder: Path, head: Machine, environment: dict[str, str], *options: str) -> None:
        """`ray start` by hand; what it prints goes to the machine's folder."""
        where = f"{head.address}:{PORT}"
        role = (
            ["--head", f"--port={PORT}", "--dashboard-host=0.0.0.0", f"--temp-dir={ray_folder}"]
            if head is self
            else [f"--address={where}"]
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={self.address}"]
        command += ["--num-cpus=16", "--num-gpus=1", "--disable-usage-stats", "--block", *options]
        self.do("mount", "-t", "tmpfs", "none", str(ray_folder))  # no file of one machine is on another
        with open(self.folder / "ray.txt", "w") as log:
            self.ray = subprocess.Popen(self.inside(*command), env=environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (said := (self.folder / "ray.txt").read_text()):
            assert self.ray.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

    def processes(self) -> list[str]:
        """Command lines of what runs there."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/net") == self.identity:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # gone meanwhile
                continue
        return found


@contextmanager
def network(folder: Path, names: str) -> Iterator[list[Machine]]:
    """Machines named by one letter each, joined by a switch on the first."""
    machines: list[Machine] = []
    try:
        for number, name in enumerate(names, start=1):
            machines.append(_start(folder / f"machine-{name}", name, f"{NETWORK}.{number}"))
        hosts = "".join(f"{machine.address} {machine.name}\n" for machine in machines)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        first = machines[0]
        first.do("ip", "link", "add", "name", "switch", "type", "bridge")
        for machine in machines:
            machine.hide(Path("/etc/hosts"), folder / "hosts")
            machine.do("hostname", machine.name)
            machine.do("mount", "-t", "tmpfs", "none", "/dev/shm")
            machine.do("ip", "link", "set", "lo", "up")
            if machine is first:
                device = "switch"
            else:
                device = "net0"
                port = ["netns", str(first.first), "name", f"port{machine.name}"]
                subprocess.run(
                    ["ip", "link", "add", *port, "type", "veth", "peer", "name", device, "netns", str(machine.first)],
                    check=True,
                )
                first.do("ip", "link", "set", f"port{machine.name}", "master", "switch", "up")
            machine.do("ip", "address", "add", f"{machine.address}/24", "dev", device)
            machine.do("ip", "link", "set", device, "up")
        yield machines
    finally:
        for machine in machines:
            machine.holder.kill()
            machine.holder.wait()
        deadline = time.monotonic() + 10
        while any(machine.processes() for machine in machines) and time.monotonic() < deadline:
            time.sleep(0.05)


def _start(folder: Path, name: str, address: str) -> Machine:
    folder.mkdir(parents=True)
    machine = Machine(name, address, folder, subprocess.Popen([*UNSHARE, "sleep", "infinity"]))
    deadline = time.monotonic() + 10
    children = Path(f"/proc/{machine.holder.pid}/task/{machine.holder.pid}/children")
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline, f"machine {name} does not start"
        time.sleep(0.02)
    machine.first = int(found[0])
    while b"sleep" not in Path(f"/proc/{machine.first}/cmdline").read_bytes():  # its /proc is mounted
        assert time.monotonic() < deadline, f"machine {name} does not start"
        time.sleep(0.02)
    machine.identity = os.readlink(f"/proc/{machine.first}/ns/net")
    return machine
