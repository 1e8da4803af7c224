"""A filter of system calls for programs inside: what they never need, and what would get round a limit.

Denied with EPERM: memory that no process maps (memfd, System V shared memory and queues), which no limit would count;
key rings, which no namespace separates; looking into other processes; io_uring, bpf, perf, userfaultfd, mounts and
namespaces, where most holes of kernels were found. Sockets of other families than Unix, IP and netlink are denied with
EAFNOSUPPORT: vsock reaches the host of a virtual machine past any network namespace.

The filter is a classic BPF program over ``struct seccomp_data`` (Documentation/userspace-api/seccomp_filter.rst).
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from dataclasses import dataclass
from typing import Final

from unison.core.errors import SandboxError

_BOTH: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "mount_setattr": 442,
    "memfd_secret": 447,
}
_X86_64: Final = _BOTH | {
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "ptrace": 101,
    "mount": 165,
    "mq_open": 240,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "memfd_create": 319,
    "bpf": 321,
    "userfaultfd": 323,
}
_AARCH64: Final = _BOTH | {
    "mount": 40,
    "unshare": 97,
    "ptrace": 117,
    "mq_open": 180,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "perf_event_open": 241,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
}


@dataclass(frozen=True, slots=True)
class _Machine:
    audit_arch: int
    denied: dict[str, int]
    socket: int


_MACHINES: Final = {
    "x86_64": _Machine(0xC000003E, _X86_64, 41),
    "aarch64": _Machine(0xC00000B7, _AARCH64, 198),
}
_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""16 is AF_NETLINK, by which programs list network interfaces."""
_X32_BIT: Final = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000


def seccomp_program(machine: str | None = None) -> bytes:
    """The filter for this kind of processor. Raises SandboxError for one whose numbers are not known."""
    name = machine or platform.machine()
    known = _MACHINES.get(name)
    if known is None:
        raise SandboxError(f"there is no filter of system calls for {name} processors, only for {', '.join(_MACHINES)}")
    numbers = sorted(known.denied.values())
    # Laid out from the end: [families] [wrong family] [allow] [deny]. A jump counts the instructions it skips.
    sockets = len(_FAMILIES) + 2
    lines = [(_LOAD, 0, 0, _ARCH_AT), (_IF_EQUAL, 0, len(numbers) + sockets + 4, known.audit_arch)]
    lines += [(_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, len(numbers) + sockets + 2, 0, _X32_BIT)]
    for i, number in enumerate(numbers):
        lines.append((_IF_EQUAL, len(numbers) - 1 - i + sockets + 2, 0, number))
    lines.append((_IF_EQUAL, 0, sockets, known.socket))
    lines.append((_LOAD, 0, 0, _FIRST_ARGUMENT_AT))
    for i, family in enumerate(_FAMILIES):
        lines.append((_IF_EQUAL, len(_FAMILIES) - i, 0, int(family)))
    lines.append((_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT))
    lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
