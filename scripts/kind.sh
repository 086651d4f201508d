#!/usr/bin/env bash
# The cluster suite on kind: a cluster of two nodes in Docker, the images built and loaded, the suite.
# Needs docker, kind, kubectl and helm. The cluster stays afterwards, for a look:
# `kind delete cluster --name tandem` removes it. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

name=tandem
for tool in docker kind kubectl helm; do
    if ! command -v "$tool" > /dev/null; then
        echo "make kind: $tool is not installed; \`make e2e\` needs none of docker and kind" >&2
        exit 1
    fi
done
if ! docker info > /dev/null 2>&1; then
    echo "make kind: no docker daemon answers; \`make e2e\` needs none" >&2
    exit 1
fi

folder=.cluster/kind
mkdir -p "$folder"
kubeconfig=$folder/kubeconfig
if ! kind get clusters | grep -qx "$name"; then
    kind create cluster --name "$name" --kubeconfig "$kubeconfig" --wait 120s --config - << 'CONFIG'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
CONFIG
fi
kind get kubeconfig --name "$name" > "$kubeconfig"

.venv/bin/python -m scripts.images --tool docker
version=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("tandem"))')
for role in operator router worker; do
    kind load docker-image --name "$name" "ghcr.io/tandem-serving/tandem-$role:$version"
done
exec .venv/bin/python -m tests.e2e_cluster --kubeconfig "$kubeconfig" "$@"
