# Programs from Go modules: kind, crictl, kubeadm, and the components of tests/cluster.
# Sourced by scripts/kind_here.sh. go.mod and go.sum beside this file pin what is compiled with
# Kubernetes; kind has a module of its own, whose sums Go's database holds.

KIND_VERSION=v0.33.0
KUBERNETES_VERSION=v1.36.3

build_programs() {
    .venv/bin/python -m tests.cluster build
    export CGO_ENABLED=0
    [[ -x $work/bin/kind ]] || GOBIN=$work/bin go install "sigs.k8s.io/kind@$KIND_VERSION"
    local program package=k8s.io/component-base/version numbers=${KUBERNETES_VERSION#v}
    local stamps="-s -w -X $package.gitVersion=$KUBERNETES_VERSION -X $package.gitTreeState=clean"
    stamps+=" -X $package.gitMajor=${numbers%%.*} -X $package.gitMinor=$(cut -d. -f2 <<< "$numbers")"
    for program in k8s.io/kubernetes/cmd/kubeadm sigs.k8s.io/cri-tools/cmd/crictl; do
        [[ -x $work/bin/${program##*/} ]] && continue
        (cd scripts/kind_here && go build -trimpath -buildvcs=false -ldflags "$stamps" \
            -o "$work/bin/" "$program")
    done
}
