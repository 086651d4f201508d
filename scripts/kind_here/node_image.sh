# kind's node image without a registry: Debian by debootstrap, kind's own files from its module, the
# components from Go modules, their images put into containerd. Sourced by scripts/kind_here.sh.

NODE_PACKAGES=systemd,systemd-sysv,dbus,conntrack,iptables,nftables,iproute2,ethtool,mount,kmod
NODE_PACKAGES+=,libseccomp2,pigz,ca-certificates,curl,jq,procps,runc,hostname
BASE_IMAGE=localhost/tandem-kind-base:bookworm
PAUSE_IMAGE=registry.k8s.io/pause:3.10
COMPONENTS=(kube-apiserver kube-controller-manager kube-scheduler etcd coredns pause)

make_node_image() {
    docker image inspect "$node_image" > /dev/null 2>&1 && return
    make_base_root
    tar --create --directory "$work/base" . | docker import - "$BASE_IMAGE-files" > /dev/null
    printf 'FROM %s\nENV container=docker\nSTOPSIGNAL SIGRTMIN+3\n' "$BASE_IMAGE-files" \
        | docker build --quiet --tag "$BASE_IMAGE" - > /dev/null
    pack_components
    import_components
}

make_base_root() {
    local root=$work/base files
    [[ -d $root ]] && return
    files=$(go env GOMODCACHE)/sigs.k8s.io/kind@$KIND_VERSION/images/base/files
    rm -rf "$root.partial"
    debootstrap --variant=minbase "--include=$NODE_PACKAGES" bookworm "$root.partial" > /dev/null
    # The module's files are read-only and lost their modes: scripts 755, the rest 644.
    cp -r --no-preserve=mode,ownership "$files/." "$root.partial/"
    chmod 755 "$root.partial"/usr/local/bin/* "$root.partial"/kind/bin/*
    fit_systemd "$root.partial"
    add_programs "$root.partial"
    fit_to_machine "$root.partial"
    rm -rf "$root.partial"/var/cache/apt/* "$root.partial"/var/lib/apt/lists/*
    mv "$root.partial" "$root"
}

fit_systemd() {  # as the Dockerfile of kind's base does
    local root=$1 wants
    find "$root/lib/systemd/system/sysinit.target.wants" -name systemd-tmpfiles-setup.service -delete
    rm -f "$root"/lib/systemd/system/multi-user.target.wants/* "$root"/etc/systemd/system/*.wants/*
    rm -f "$root"/lib/systemd/system/local-fs.target.wants/*
    for wants in udev initctl; do
        rm -f "$root"/lib/systemd/system/sockets.target.wants/*"$wants"*
    done
    rm -f "$root"/lib/systemd/system/basic.target.wants/*
    echo "ReadKMsg=no" >> "$root/etc/systemd/journald.conf"
    systemctl --root="$root" enable kubelet.service containerd.service undo-mount-hacks.service \
        > /dev/null 2>&1
    systemctl --root="$root" mask systemd-binfmt.service > /dev/null 2>&1
    mkdir -p "$root/etc/kubernetes/manifests"
}

add_programs() {
    local root=$1 bin=$TANDEM_CLUSTER_DIR/bin plugin
    install "$bin/containerd" "$bin/ctr" "$bin/containerd-shim-runc-v2" "$work/bin/crictl" \
        "$root/usr/local/bin/"
    install "$bin/kubelet" "$bin/kubectl" "$work/bin/kubeadm" "$root/usr/bin/"
    ln -sf /usr/sbin/runc "$root/usr/local/sbin/runc"
    mkdir -p "$root/opt/cni/bin" "$root/kind/manifests"
    for plugin in ptp host-local loopback portmap; do
        install "/usr/lib/cni/$plugin" "$root/opt/cni/bin/"
    done
    echo "$KUBERNETES_VERSION" > "$root/kind/version"
    "$bin/ctr" oci spec | jq '.hooks.createContainer += [{"path": "/kind/bin/mount-product-files.sh"}]
        | del(.process.rlimits)' > "$root/etc/containerd/cri-base.json"
}

fit_to_machine() {  # cgroup v1, and no CAP_SYS_RESOURCE, where that is so
    local root=$1
    sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' \
        "$root/etc/containerd/config.toml"
    if ! [[ -f /sys/fs/cgroup/cgroup.controllers ]]; then
        sed -i 's/^KUBELET_EXTRA_ARGS=.*/& --fail-cgroupv1=false/' "$root/etc/default/kubelet"
    fi
    if lacks_sys_resource; then
        sed -i '/"CAP_SYS_RESOURCE",\?/d' "$root/etc/containerd/cri-base.json"
    fi
}

wanted_image() {  # NAME: what kubeadm calls the image of a component
    [[ $1 == pause ]] && echo "$PAUSE_IMAGE" && return
    kubeadm config images list --kubernetes-version "$KUBERNETES_VERSION" 2> /dev/null \
        | grep "/$1:"
}

pack_components() {  # one program each; kube-proxy wants nft or iptables beside it
    local name folder
    for name in "${COMPONENTS[@]}"; do
        folder=$work/component/$name
        mkdir -p "$folder/usr/local/bin"
        install "$TANDEM_CLUSTER_DIR/bin/$name" "$folder/usr/local/bin/"
        ln -sf "usr/local/bin/$name" "$folder/$name"
        .venv/bin/python -c "
from pathlib import Path; from tests.cluster.archives import pack
pack('$(wanted_image "$name")', Path('$folder'), Path('$work/component/$name.tar'), entrypoint=['/$name'])"
    done
    folder=$work/component/kube-proxy
    mkdir -p "$folder"
    install "$TANDEM_CLUSTER_DIR/bin/kube-proxy" "$folder/"
    printf 'FROM %s\nCOPY kube-proxy /usr/local/bin/\n' "$BASE_IMAGE" > "$folder/Dockerfile"
    docker build --quiet --tag "$(wanted_image kube-proxy)" "$folder" > /dev/null
    docker save --output "$work/component/kube-proxy.tar" "$(wanted_image kube-proxy)"
}

import_components() {  # into the image's own containerd, as `kind build` does
    local made archive
    made=$(docker run --detach --privileged --entrypoint sleep "$BASE_IMAGE" infinity)
    docker exec --detach "$made" containerd
    for archive in "$work"/component/*.tar; do
        docker cp "$archive" "$made:/image.tar"
        docker exec "$made" bash -c 'for i in {1..30}; do
            ctr -n k8s.io images import --no-unpack --label io.cri-containerd.pinned=pinned \
                /image.tar > /tmp/import 2>&1 && exit; sleep 1; done; cat /tmp/import >&2; exit 1'
    done
    docker exec "$made" bash -c 'pkill -x containerd; sleep 1; rm -rf /image.tar /run/containerd'
    docker commit --change 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' \
        "$made" "$node_image" > /dev/null
    docker rm --force "$made" > /dev/null
}
