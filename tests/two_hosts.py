"""Two hosts with addresses of their own and a cable between them, made of network namespaces of this machine."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    name: str
    interface: str
    address: str

    def run(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True, capture_output=True)

    def torchrun(self, first: "Host", arguments: list[str]) -> list[str]:
        """The command that starts this host's rank of two; the launchers meet at the first host."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29500", "--rdzv-id=two-hosts"]
        # Launchers tell by name whose place the meeting is at, and the two share one.
        meeting += [f"--rdzv-conf=is_host={int(self == first)}"]
        options = [f"--local-addr={self.address}", "--max-restarts=5", "-m", "jcl"]
        return ["ip", "netns", "exec", self.name, *launcher, *meeting, *options, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class TwoHosts:
    first: Host
    second: Host

    def cut(self) -> None:
        """Pull the cable."""
        self.second.run("ip", "link", "set", self.second.interface, "down")

    def mend(self) -> None:
        self.second.run("ip", "link", "set", self.second.interface, "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Skips the test where network namespaces are not permitted."""
    names = [f"jcl{os.getpid() % 10000}{number}" for number in (next(_numbers), next(_numbers))]
    first, second = (Host(name, f"v{name}", f"10.77.0.{place}") for place, name in enumerate(names, 1))
    try:
        for host in (first, second):
            _root("netns", "add", host.name)
        cable = ("type", "veth", "peer", "name", second.interface, "netns", second.name)
        _root("link", "add", first.interface, "netns", first.name, *cable)
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        pytest.skip(f"network namespaces are not permitted: {error}")
    try:
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                host.run("ip", "link", "set", interface, "up")
        yield TwoHosts(first, second)
    finally:
        _remove(names)


def _root(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _remove(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
