#!/usr/bin/env bash
# `make kind` on a Debian machine without a container engine: brings dockerd, kind and a node image
# made by hand, runs scripts/kind.sh and the suite there, and takes everything down again.
# Needs root, Go and this checkout's .venv; reaches Debian's packages and Go modules, no registry.
# TANDEM_KIND_DIR moves what it keeps (programs, node image, archives), TANDEM_CLUSTER_DIR the
# Kubernetes components, which are those of tests/cluster. KEEP=1 leaves cluster and dockerd up.
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

export TANDEM_CLUSTER_DIR=${TANDEM_CLUSTER_DIR:-$PWD/.cluster}
work=${TANDEM_KIND_DIR:-$PWD/.cluster/kind-here}
name=tandem
node_image=localhost/tandem-kind-node:v1.36.3
mkdir -p "$work/bin" "$work/archives"
export PATH="$work/bin:$TANDEM_CLUSTER_DIR/bin:$PATH"

say() { printf '== %5d s  %s\n' "$SECONDS" "$*"; }

for part in engine programs node_image network; do
    # shellcheck source=/dev/null
    source "scripts/kind_here/$part.sh"
done

# Tests that a kind cluster cannot pass, by name: it has no NetworkPolicies (kindnetd's modules are
# not to be had), and its nodes are not ours to kill (those skip themselves).
isolation=tests/e2e_cluster/test_isolation.py
left_out=(
    "$isolation::test_a_stranger_reaches_no_port_of_a_worker"
    "$isolation::test_a_neighbour_reaches_no_port_of_a_worker"
    "$isolation::test_workers_have_no_way_out"
)

down() {
    [[ ${KEEP:-} ]] && return
    say "down"
    kind delete cluster --name "$name" || true
    stop_engine
}

say "Debian's packages"
install_packages
say "programs"
build_programs
say "engine"
trap down EXIT
start_engine
say "node image"
make_node_image
say "archives of Tandem's images"
export PYTHONPATH=$PWD
ca=/etc/ssl/certs/ca-certificates.crt
.venv/bin/python -m scripts.images --tool buildah --make-base --thin --work "$work" \
    --save "$work/archives" --ca "$ca"
.venv/bin/python -c "
import shutil; from pathlib import Path; from tandem.hub import DEFAULT_MODEL, prepare
place = Path('$work/models/smollm2')
place.is_dir() or shutil.copytree(prepare(DEFAULT_MODEL, progress=False).path, place)"
say "cluster"
create_cluster
set_up_network
say "suite"
export TANDEM_KIND_ARCHIVES=$work/archives
export TANDEM_E2E_MOUNTED=$NODE_FOLDER/mounted TANDEM_E2E_MODELS=$NODE_FOLDER/models
deselect=()
for test in "${left_out[@]}"; do deselect+=("--deselect=$test"); done
status=0
scripts/kind.sh "${deselect[@]}" "$@" || status=$?
say "suite ended with status $status; left out by name: ${left_out[*]}"
exit "$status"
