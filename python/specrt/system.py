"""Facts about the machine that the core does not need."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory"]


def available_memory() -> int | None:
    """Bytes that this process may still take without swapping; None where the system won't say."""
    found = [one for one in (_meminfo(), _cgroup_room()) if one is not None]
    return min(found, default=None)


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_room() -> int | None:
    """What the control group's limit leaves, page cache counted as free."""
    base = Path("/sys/fs/cgroup")
    try:
        limit = (base / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((base / "memory.current").read_text())
        stat = dict(line.split() for line in (base / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("file", 0)))
    except (OSError, ValueError):
        return None
