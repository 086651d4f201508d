"""What a process can have of its host's memory: of a pod, what its limits leave.

The system's files are written by the tests, as kernels of either version of cgroups write them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tests.engine_run.tiny_models import folder_of

from tandem.engine.config import EngineConfig
from tandem.engine.worker import medium, worker
from tandem.engine.worker.offload import Available, available
from tandem.protocol.errors import InvalidParameter

GIB = 2**30
V2 = "30 24 0:26 {top} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} {mount} rw,relatime shared:9 - cgroup cgroup rw,memory"
OTHER = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct"
MOUNT1 = "/sys/fs/cgroup/memory"
MOUNT2 = "/sys/fs/cgroup"
NOTHING_SET = 9223372036854771712
"""What the first version says of a cgroup without a limit."""


@dataclass
class Host:
    root: Path
    mounts: list[str] = field(default_factory=list)
    cgroups: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "proc/self").mkdir(parents=True)
        self.has(64 * GIB)

    def has(self, nbytes: int) -> None:
        text = f"MemTotal: 999999999 kB\nMemFree: 5 kB\nMemAvailable:   {nbytes // 1024} kB\n"
        (self.root / "proc/meminfo").write_text(text)

    def mounted(self, line: str, cgroup: str) -> None:
        """A hierarchy, and which of it this process is in."""
        self.mounts.append(line)
        self.cgroups.append(cgroup)
        (self.root / "proc/self/mountinfo").write_text("\n".join(self.mounts) + "\n")
        (self.root / "proc/self/cgroup").write_text("\n".join(self.cgroups) + "\n")

    def v2(self, at: str, limit: int | str, used: int, files: int) -> None:
        folder = self.root / at.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {files}\nactive_file 9\n")

    def v1(self, at: str, limit: int, used: int, files: int) -> None:
        folder = self.root / at.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {files}\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """One with 64 GiB left, and no cgroups."""
    return Host(tmp_path)


def test_without_cgroups_the_host_decides(host: Host) -> None:
    """Whatever has no limit is none."""
    assert available(host.root) == Available(64 * GIB, "this host")
    host.mounted(V2.format(top="/", mount=MOUNT2), "0::/user.slice/shell")
    host.v2(f"{MOUNT2}/user.slice", "max", 9 * GIB, 0)
    host.v2(f"{MOUNT2}/user.slice/shell", "max", 8 * GIB, 0)
    assert available(host.root) == Available(64 * GIB, "this host")


def test_a_pods_limit_counts_without_files_that_can_go(host: Host) -> None:
    """The second version, as a container sees itself: its own cgroup is the top."""
    host.mounted(V2.format(top="/", mount=MOUNT2), "0::/")
    host.v2(MOUNT2, 8 * GIB, 5 * GIB, 2 * GIB)
    left = available(host.root)
    assert left.nbytes == 5 * GIB
    assert left.of == f"the cgroup at {host.root}{MOUNT2}, of 8.0 GiB,"
    host.has(4 * GIB)
    assert available(host.root) == Available(4 * GIB, "this host")


def test_limits_around_a_process_count_too(host: Host) -> None:
    """The tightest, by what it has left and not by its size; one that is passed leaves nothing."""
    host.mounted(V2.format(top="/", mount=MOUNT2), "0::/kubepods/pod1/worker")
    host.v2(f"{MOUNT2}/kubepods", 60 * GIB, 59 * GIB, 0)
    host.v2(f"{MOUNT2}/kubepods/pod1", 16 * GIB, 4 * GIB, GIB)
    host.v2(f"{MOUNT2}/kubepods/pod1/worker", 8 * GIB, 3 * GIB, GIB)
    assert available(host.root).nbytes == GIB
    host.v2(f"{MOUNT2}/kubepods", 60 * GIB, 20 * GIB, 0)
    assert available(host.root).nbytes == 6 * GIB
    host.v2(f"{MOUNT2}/kubepods/pod1", 16 * GIB, 14 * GIB, 0)
    assert available(host.root).nbytes == 2 * GIB
    host.v2(f"{MOUNT2}/kubepods/pod1", 16 * GIB, 17 * GIB, 0)
    assert available(host.root).nbytes == 0


def test_the_first_version_says_the_same_in_other_words(host: Host) -> None:
    """Beside other hierarchies, and an empty one of the second version."""
    host.mounted(OTHER, "2:cpu,cpuacct:/pods/a")
    host.mounted(V1.format(top="/", mount=MOUNT1), "4:memory:/pods/a")
    host.mounted(V2.format(top="/", mount="/sys/fs/cgroup/unified"), "0::/pods/a")
    host.v1(MOUNT1, NOTHING_SET, 40 * GIB, 0)
    host.v1(f"{MOUNT1}/pods", 20 * GIB, 12 * GIB, 0)
    host.v1(f"{MOUNT1}/pods/a", NOTHING_SET, 5 * GIB, 0)
    assert available(host.root).nbytes == 8 * GIB
    host.v1(f"{MOUNT1}/pods/a", 6 * GIB, 5 * GIB, 3 * GIB)
    assert available(host.root).nbytes == 4 * GIB


@pytest.mark.parametrize("cgroup", ["/docker/4f2a", "/elsewhere", "/docker/4f2abc"])
def test_a_container_that_sees_the_hosts_names_finds_itself(host: Host, cgroup: str) -> None:
    """Its cgroup has the host's path, and is mounted; where the names do not meet, what is mounted
    is all it has. A path with a space is mounted as well."""
    mount = "/sys/fs/my memory"
    host.mounted(V1.format(top="/docker/4f2a", mount=r"/sys/fs/my\040memory"), f"4:memory:{cgroup}")
    host.v1(mount, 6 * GIB, 5 * GIB, 0)
    assert available(host.root).nbytes == GIB


def test_a_limit_decides_what_kv_may_have(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's slab takes a quarter of what the pod has left, and a tier in host memory that does
    not fit is refused by whose memory it is."""
    for each in (worker, medium):
        monkeypatch.setattr(each, "available", lambda: available(host.root))
    config = EngineConfig.of(
        folder_of("llama"), device="cpu", kv_offloading_size=0.5, max_num_seqs=1 << 20
    )
    cpu, size = torch.device("cpu"), config.layout.block_bytes
    assert worker.num_blocks(config, config.layout, cpu) == worker.CPU_LIMIT_BYTES // size
    assert medium.num_cpu_blocks(config, config.layout) == GIB // 2 // size
    host.mounted(V2.format(top="/", mount=MOUNT2), "0::/")
    host.v2(MOUNT2, GIB, GIB // 4, 0)
    assert medium.num_cpu_blocks(config, config.layout, promised=GIB // 4)
    with pytest.raises(InvalidParameter, match=r"at most 0\.4 GiB, .* next to 0\.4 GiB of blocks"):
        medium.num_cpu_blocks(config, config.layout, promised=GIB * 3 // 8)
    host.v2(MOUNT2, GIB, GIB * 3 // 4, 0)
    assert worker.num_blocks(config, config.layout, cpu) == GIB // 16 // size
    with pytest.raises(InvalidParameter, match=r"at most 0\.2 GiB, the memory that the cgroup at"):
        medium.num_cpu_blocks(config, config.layout)


def test_this_machine_has_some() -> None:
    assert available().nbytes > 0
