"""Namespaces: a private root folder, no network devices, and process ids that reach no process outside."""

import ctypes
import errno
import os

import kernel

_NEWUSER = 0x10000000
# mounts, cgroup, uts, ipc, pid, net
_ALL = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_DETACH = 2
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4


def enter():
    """Leave the parent's namespaces; without the privilege, inside a user namespace that grants it.

    The caller must fork, since the pid namespace holds only later children.
    """
    try:
        kernel.call("unshare", _ALL)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        user, group = os.geteuid(), os.getegid()
        kernel.call("unshare", _NEWUSER | _ALL)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    kernel.call("mount", b"none", b"/", None, _REC | _PRIVATE, None)


def change_root(place, readable, size, files):
    """Make `place` the root: a tmpfs of `size` bytes and `files` files with read-only `readable` folders and /tmp.

    A readable folder that is a symbolic link, such as /lib to /usr/lib, becomes a symbolic link in the new root.
    """
    options = f"size={size},nr_inodes={files},mode=755"
    kernel.call("mount", b"tmpfs", place.encode(), b"tmpfs", _NOSUID | _NODEV, options.encode())
    bound = []
    for folder in sorted({os.path.realpath(folder) for folder in readable}):
        if not any(os.path.commonpath([folder, above]) == above for above in bound):
            _bind(folder, place + folder)
            bound.append(folder)
    for folder in readable:
        if not os.path.lexists(place + folder):
            os.makedirs(os.path.dirname(place + folder), exist_ok=True)
            os.symlink(os.path.realpath(folder), place + folder)
    os.makedirs(place + "/tmp", exist_ok=True)
    os.chmod(place + "/tmp", 0o777)
    os.chdir(place)
    kernel.call("pivot_root", b".", b".")  # the old root now lies on the new one
    kernel.call("umount2", b".", _DETACH)
    os.chdir("/tmp")


def _bind(folder, target):
    os.makedirs(target)
    kernel.call("mount", folder.encode(), target.encode(), None, _BIND | _REC, None)
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    arguments = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    kernel.syscall("mount_setattr", _MOUNT_SETATTR, *arguments)
