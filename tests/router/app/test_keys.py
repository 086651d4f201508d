"""Keys of a folder: what is added, rewritten in place, swapped or removed counts at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import clear_text
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.errors import InvalidParameter
from tandem.router.config import RouterConfig
from tandem.router.http.access import KnownKeys
from tandem.router.tenant import Tenant


def test_a_key_file_that_changes_is_read_again(tmp_path: Path) -> None:
    """Also one of the same size, of the same times, and one that Kubernetes swaps by a link."""
    keys = KnownKeys((), str(tmp_path), admin=True)
    file = tmp_path / "one"

    def is_known(key: str) -> bool:
        tenant = keys.find({b"authorization": b"Bearer " + key.encode()})
        assert tenant in (None, Tenant.from_key(key.encode(), is_admin=True))
        return tenant is not None

    def becomes(new: str, old: str) -> None:
        wait_for(lambda: is_known(new) and not is_known(old))

    file.write_text("key-1\n")
    becomes("key-1", "key-0")
    for number in range(2, 8):
        file.write_text(f"key-{number}\n")  # in place, of the same size
        becomes(f"key-{number}", f"key-{number - 1}")
    stat = file.stat()
    file.write_text("key-8\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    becomes("key-8", "key-7")
    file.unlink()
    for name, key in (("..a", "key-a"), ("..b", "key-b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one").write_text(key)
    (tmp_path / "..data").symlink_to("..a")
    file.symlink_to("..data/one")
    becomes("key-a", "key-8")
    (tmp_path / "..new").symlink_to("..b")
    (tmp_path / "..new").rename(tmp_path / "..data")
    becomes("key-b", "key-a")
    file.unlink()
    wait_for(lambda: not is_known("key-b"))
    (tmp_path / "empty").write_text("\n")
    assert not is_known("")


def test_keys_are_looked_for_at_a_small_share_of_the_time(tmp_path: Path) -> None:
    """Of a thousand calls in a row few look at the folder's files."""
    for number in range(50):
        (tmp_path / str(number)).write_text(f"key-{number}")
    keys = KnownKeys((), str(tmp_path), admin=False)
    assert keys._folder is not None
    looks = 0
    look = keys._folder._look

    def counted() -> None:
        nonlocal looks
        looks += 1
        look()

    keys._folder._look = counted  # type: ignore[method-assign]
    for _ in range(1000):
        keys.find({b"x-api-key": b"key-1"})
    assert looks < 100


def test_administrators_keys_come_from_a_folder(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    """As clients' do: one that is rewritten counts, and the old one no more."""
    (tmp_path / "admin").write_text("boss")
    served = serve(wait=False, admin_api_keys_dir=str(tmp_path))
    served.wait_started()

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return clear_text.get(served.url + "/log_level", headers=headers).status_code

    assert (status("boss"), status("other")) == (200, 401)
    (tmp_path / "admin").write_text("king")
    wait_for(lambda: (status("boss"), status("king")) == (401, 200))


@pytest.mark.parametrize("keys", ["api_key", "api_keys_dir", "admin_api_key", "admin_api_keys_dir"])
def test_administration_is_not_opened_next_to_keys(keys: str) -> None:
    value = "/keys" if keys.endswith("dir") else ("k",)
    with pytest.raises(InvalidParameter, match="enable_admin_api"):
        RouterConfig(model="m", enable_admin_api=True, **{keys: value})  # type: ignore[arg-type]
