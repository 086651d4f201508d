#!/usr/bin/env bash
# The cluster suite on kind: a cluster of two nodes in Docker, the images built and loaded, the suite.
# Needs docker, kind, kubectl and helm; `make kind-here` brings them. The cluster stays afterwards,
# for a look: `kind delete cluster --name tandem` removes it. Further arguments go to pytest.
# TANDEM_KIND_NODE_IMAGE names another node image than kind's own, TANDEM_KIND_ARCHIVES a folder with
# archives of Tandem's images that are loaded instead of built.
set -euo pipefail
cd "$(dirname "$0")/.."

name=tandem
for tool in docker kind kubectl helm; do
    if ! command -v "$tool" > /dev/null; then
        echo "make kind: $tool is not installed; \`make kind-here\` brings it" >&2
        exit 1
    fi
done
if ! docker info > /dev/null 2>&1; then
    echo "make kind: no docker daemon answers; \`make kind-here\` starts one" >&2
    exit 1
fi

folder=.cluster/kind
mkdir -p "$folder"
kubeconfig=$folder/kubeconfig
node_image=${TANDEM_KIND_NODE_IMAGE:+--image=$TANDEM_KIND_NODE_IMAGE}
if ! kind get clusters | grep -qx "$name"; then
    kind create cluster --name "$name" ${node_image:+"$node_image"} --kubeconfig "$kubeconfig" \
        --wait 120s --config - << 'CONFIG'
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
CONFIG
fi
kind get kubeconfig --name "$name" > "$kubeconfig"

version=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("tandem"))')
archives=${TANDEM_KIND_ARCHIVES:-}
if [[ -z $archives ]]; then
    DOCKER_BUILDKIT=1 .venv/bin/python -m scripts.images --tool docker
fi
for role in operator router worker; do
    if [[ $archives ]]; then
        kind load image-archive --name "$name" "$archives/$role.tar"
    else
        kind load docker-image --name "$name" "ghcr.io/tandem-serving/tandem-$role:$version"
    fi
done
exec .venv/bin/python -m tests.e2e_cluster --kubeconfig "$kubeconfig" "$@"
