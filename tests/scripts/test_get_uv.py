import hashlib
import importlib.util
import io
import platform
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "get_uv.py"


@pytest.fixture
def get_uv() -> ModuleType:
    """The script as a module of this test's own."""
    spec = importlib.util.spec_from_file_location("get_uv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("filename", "fits"),
    [
        ("uv-1.2.3-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("uv-1.2.3-py3-none-musllinux_1_1_x86_64.whl", False),
        ("uv-1.2.3-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", False),
        ("uv-1.2.30-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", False),
        ("uv-1.2.3.tar.gz", False),
    ],
)
def test_only_the_wheel_of_this_machine(
    get_uv: ModuleType, monkeypatch: pytest.MonkeyPatch, filename: str, fits: bool
):
    """Version, system, C library and processor have to match."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert get_uv.fits(f"{filename}#sha256=0", "1.2.3") is fits


@pytest.mark.parametrize("honest", [True, False])
def test_program_is_taken_from_a_checked_wheel(
    get_uv: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, honest: bool
):
    """The program of a wheel with the stated digest is put in place; of another, it is not."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("uv-1.2.3.data/scripts/uv", "the program")
    wheel = packed.getvalue()
    digest = hashlib.sha256(wheel if honest else b"another").hexdigest()
    page = f'<a href="../../w/uv-1.2.3-py3-none-any.whl#sha256={digest}">uv</a>'.encode()
    monkeypatch.setattr(get_uv, "fits", lambda filename, version: True)
    monkeypatch.setattr(get_uv, "fetch", lambda url: page if url == get_uv.INDEX else wheel)
    if honest:
        get_uv.from_index("1.2.3", tmp_path)
        assert (tmp_path / "uv").read_text() == "the program"
        assert (tmp_path / "uv").stat().st_mode & 0o111
    else:
        with pytest.raises(SystemExit, match="does not have the digest"):
            get_uv.from_index("1.2.3", tmp_path)
        assert not (tmp_path / "uv").exists()
