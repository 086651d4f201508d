"""Everything from nothing to the suite's last line, with the seconds that each step took.

    python -m tests.e2e_cluster [PYTEST ARGUMENT...]             on a cluster raised here
    python -m tests.e2e_cluster --kubeconfig FILE [ARGUMENT...]  on another one

Called by `make e2e`. Raised here: components, images and the prepared model are made where they are
not there yet, the cluster comes up with two nodes, and goes down whatever happens (`--keep` leaves
it up). Another cluster must be able to pull the images; TANDEM_E2E_IMAGE_PREFIX and _TAG name them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import archives, build, layout, lifecycle
from tests.cluster.processes import ClusterError
from tests.e2e_cluster import older, setup

MODEL = "smollm2"
MODEL_IMAGE = "docker.io/local/smollm2:1"
SUITE_SECONDS = 3000.0
CA = Path("/etc/ssl/certs/ca-certificates.crt")
UPGRADE = "tests/e2e_cluster/test_upgrade.py"
"""Begins with the release before: its images take minutes to build, so it runs only if named."""


class Steps:
    """Times of the steps, printed as they end and once more as a table."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self._start = time.monotonic()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One step; it is in the table even when it fails."""
        start = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            yield
        finally:
            self.taken[name] = time.monotonic() - start
            print(f"== {name}: {self.taken[name]:.1f} s", flush=True)

    def table(self) -> str:
        """All steps, some of them beside each other, and the time since the start."""
        rows = [*self.taken.items(), ("in all", time.monotonic() - self._start)]
        return "\n".join(f"{seconds:8.1f} s  {name}" for name, seconds in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """pytest's exit status, or 1 with the reason when the cluster cannot be had."""
    top = argparse.ArgumentParser(
        prog="python -m tests.e2e_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--kubeconfig", type=Path, help="run against this cluster")
    top.add_argument("--keep", action="store_true", help="leave the cluster up")
    given, rest = top.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was raised is ended
    steps = Steps()
    try:
        if given.kubeconfig is not None:
            with steps.step("suite"):
                return suite({setup.ENV_RUN: "given", "KUBECONFIG": str(given.kubeconfig)}, rest)
        return on_own_cluster(steps, rest, keep=given.keep)
    except ClusterError as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 1
    finally:
        print(steps.table(), flush=True)


def on_own_cluster(steps: Steps, arguments: Sequence[str], *, keep: bool) -> int:
    """Raise, run, take down; pytest's exit status."""
    has_nightly = not any("not nightly" in word for word in arguments)
    models = prepared(steps, with_older=upgrades(arguments), with_model_image=has_nightly)
    try:
        with steps.step("cluster"):
            lifecycle.up(2)
        environment = {
            setup.ENV_RUN: "own",
            setup.ENV_MOUNTED: str(layout.ROOT / "mounted"),
            setup.ENV_MODELS: str(models),
            setup.ENV_MODEL_IMAGE: MODEL_IMAGE if has_nightly else "",
            "KUBECONFIG": str(layout.KUBECONFIG),
            "PATH": f"{layout.BIN}:{os.environ['PATH']}",
        }
        with steps.step("suite"):
            return suite(environment, arguments)
    finally:
        if not keep:
            with steps.step("down"):
                lifecycle.down()


def upgrades(arguments: Sequence[str]) -> bool:
    """Return whether pytest's arguments name the test that begins with the release before."""
    return any(word.partition("::")[0] == UPGRADE for word in arguments)


def prepared(steps: Steps, *, with_older: bool = False, with_model_image: bool = False) -> Path:
    """Components, images and the model, made where they are not there; the folder of models.

    The components are compiled beside the rest, which mostly waits for disks and downloads.
    """

    def components() -> None:
        with steps.step("components"):
            build.build()

    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(components)
        with steps.step("images"):
            images()
        if with_older:
            with steps.step("images of the release before"):
                older.make_images()
        with steps.step("model"):
            models = model_folder()
            if with_model_image:
                model_image(models / MODEL)
        with steps.step("rest of the components"):
            compiled.result()
    return models


def images() -> None:
    """Operator and router from their Dockerfiles, and the worker without its biggest packages."""
    words = ["--tool", "buildah", "--make-base", "--thin", "--save", str(layout.IMAGES)]
    words += ["--work", str(layout.ROOT)]
    if CA.exists():
        words += ["--ca", str(CA)]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.images", *words], cwd=layout.REPOSITORY, check=False
    )
    if done.returncode:
        raise ClusterError("the images cannot be built")


def model_folder() -> Path:
    """A folder with the prepared embedded model in it: what a volume of models looks like."""
    from tandem.hub import DEFAULT_MODEL, prepare

    prepared = prepare(DEFAULT_MODEL, progress=False).path
    place = layout.ROOT / "models" / MODEL
    stamp = place.parent / f"{MODEL}.source"
    if not stamp.exists() or stamp.read_text() != prepared.name:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(prepared, place)
        stamp.write_text(prepared.name)
    return place.parent


def model_image(folder: Path) -> None:
    """An archive with the model alone, which every node imports: for image volumes."""
    archive = layout.IMAGES / "model.tar"
    stamp = archive.with_suffix(".inputs")
    digest = (folder.parent / f"{folder.name}.source").read_text()
    if not archive.exists() or not stamp.exists() or stamp.read_text() != digest:
        archives.pack(MODEL_IMAGE, folder, archive)
        stamp.write_text(digest)


def suite(environment: dict[str, str], arguments: Sequence[str]) -> int:
    chosen = [word for word in arguments if word.startswith("tests")] or ["tests/e2e_cluster"]
    options = [word for word in arguments if not word.startswith("tests")]
    if not upgrades(arguments):
        options.append(f"--ignore={UPGRADE}")
    words = [sys.executable, "-m", "pytest", "-m", "cluster", "-v", "--durations=0"]
    done = subprocess.run(
        [*words, "--durations-min=1", "-p", "no:cacheprovider", *options, *chosen],
        cwd=layout.REPOSITORY,
        env={**os.environ, **environment},
        timeout=SUITE_SECONDS,
        check=False,
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
