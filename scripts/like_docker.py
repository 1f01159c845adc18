"""Runs a command as an ordinary container would: with Docker's default capabilities, refused system calls and mounts.

    python -m scripts.like_docker COMMAND ...           as root; like on most hosts
    python -m scripts.like_docker --bare COMMAND ...    on a kernel without Landlock
    python -m scripts.like_docker --profile FILE COMMAND ...    with a seccomp profile that lists the calls it refuses

Mounts: 64 MiB of /dev/shm, a read-only home, a read-only /proc/sys. Network: only a loopback without IPv6. Images and
AppArmor profiles are not imitated.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from pathlib import Path

from rayapp.sandbox.local.levels import kernel, loopback, seccomp
from rayapp.sandbox.local.levels.seccomp import Block

CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
"""Docker's default capabilities: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service,
net_raw, sys_chroot, mknod, audit_write, setfcap."""
REFUSED = (
    "unshare", "mount", "umount2", "pivot_root", "setns", "open_tree", "move_mount", "fsopen", "fsmount", "fsconfig",
    "mount_setattr", "bpf", "perf_event_open", "userfaultfd", "keyctl", "add_key", "request_key", "kexec_load",
    "init_module", "finit_module", "delete_module", "mbind", "set_mempolicy", "get_mempolicy", "move_pages", "kcmp",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "acct", "quotactl", "name_to_handle_at",
    "open_by_handle_at", "swapon", "swapoff", "clock_settime", "settimeofday", "reboot", "syslog",
)  # fmt: skip
"""System calls that Docker's profile refuses without further capabilities."""
_LANDLOCK = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
_NAMESPACES = 0x7E020000
_LAST_CAPABILITY = 40


def main() -> None:
    """Apply Docker's restrictions to this process, and then execute the command in it."""
    is_bare, has_profile = sys.argv[1:2] == ["--bare"], sys.argv[1:2] == ["--profile"]
    command = sys.argv[1 + is_bare + 2 * has_profile :]
    if os.geteuid() != 0 or not command:
        sys.exit(__doc__)
    _enter_mounts_and_network()
    for capability in set(range(_LAST_CAPABILITY + 1)) - CAPABILITIES:
        kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
    rules = rules_of_profile(Path(sys.argv[2])) if has_profile else _rules(is_bare=is_bare)
    seccomp.install(seccomp.program(rules))
    os.execvp(command[0], command)


def _enter_mounts_and_network() -> None:
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    for setting in Path("/proc/sys/net/ipv6/conf").glob("*/disable_ipv6"):
        setting.write_text("1")
    with socket.socket() as sock:
        loopback.bring_up(sock)
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64m")
    for folder in (str(Path.home()), "/proc/sys"):
        kernel.mount(folder, folder, "", kernel.MS_BIND | kernel.MS_REC)
        kernel.mount("", folder, "", kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)


def rules_of_profile(file: Path) -> dict[str, Block]:
    """Read a profile in Docker's format that allows all calls except those that it lists."""
    profile = json.loads(file.read_text())
    if profile["defaultAction"] != "SCMP_ACT_ALLOW":
        sys.exit(f"{file} lists the calls that it allows; only lists of refused calls are imitated")
    return {name: seccomp.refuse() for entry in profile["syscalls"] for name in entry["names"]}


def _rules(*, is_bare: bool) -> dict[str, Block]:
    rules = {name: seccomp.refuse() for name in REFUSED}
    rules["clone"] = seccomp.without_bits(0, _NAMESPACES)
    missing = ("clone3", *(_LANDLOCK if is_bare else ()))
    return rules | {name: seccomp.refuse(errno.ENOSYS) for name in missing}


if __name__ == "__main__":
    main()
