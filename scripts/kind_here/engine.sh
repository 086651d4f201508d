# dockerd for kind, in folders of its own. Sourced by scripts/kind_here.sh.
#
# A root without CAP_SYS_RESOURCE cannot give it to a privileged container ("unable to apply caps"):
# where it is missing, the default runtime takes it out of what runc is told.

ENGINE_SECONDS=60
export DOCKER_HOST=unix://$work/docker.sock DOCKER_BUILDKIT=1

install_packages() {
    local missing=() package
    local packages=(conntrack containernetworking-plugins debootstrap docker.io ethtool iproute2
                    iptables jq nftables pigz procps runc util-linux)
    for package in "${packages[@]}"; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null \
            | grep -qx installed || missing+=("$package")
    done
    scripts/cluster_packages.sh
    ((${#missing[@]})) || return 0
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends \
        "${missing[@]}" > /dev/null
}

make_lean_runtime() {
    cat > "$work/bin/lean-runc" << 'RUNTIME'
#!/bin/bash
# runc for a root without CAP_SYS_RESOURCE: drops it from the bundle and from what exec is given.
words=("$@")
for ((i = 0; i < ${#words[@]}; i++)); do
    case ${words[i]} in
        --bundle | -b) file=${words[i + 1]}/config.json at=.process ;;
        --process | -p) file=${words[i + 1]} at= ;;
        *) continue ;;
    esac
    filter="if $at.capabilities then $at.capabilities |= map_values(map(select(. != \"CAP_SYS_RESOURCE\"))) else . end"
    lean=$(jq -c "$filter" "$file") && printf '%s' "$lean" > "$file"
done
exec /usr/sbin/runc "$@"
RUNTIME
    chmod +x "$work/bin/lean-runc"
}

lacks_sys_resource() {  # bit 24 of the effective capabilities
    local effective
    effective=$(awk '/^CapEff/ {print $2}' /proc/self/status)
    (((16#$effective >> 24 & 1) == 0))
}

start_engine() {
    ln -sf /usr/bin/docker "$work/bin/docker"  # the daemon's own client, whatever else is there
    docker info > /dev/null 2>&1 && return
    local runtime=()
    if lacks_sys_resource; then
        make_lean_runtime
        runtime=(--add-runtime "lean=$work/bin/lean-runc" --default-runtime lean)
    fi
    mkdir -p /lib/modules
    /usr/sbin/dockerd --data-root "$work/docker" --exec-root "$work/docker-run" \
        --host "$DOCKER_HOST" --pidfile "$work/docker.pid" "${runtime[@]}" \
        > "$work/dockerd.log" 2>&1 < /dev/null 3>&- 9>&- &  # no lock of a caller's is kept by it
    for ((i = 0; i < ENGINE_SECONDS; i++)); do
        if docker info > /dev/null 2>&1; then
            iptables -P FORWARD ACCEPT  # dockerd drops what others on this machine forward
            return
        fi
        sleep 1
    done
    tail "$work/dockerd.log" >&2
    echo "kind-here: dockerd does not answer after $ENGINE_SECONDS s" >&2
    return 1
}

stop_engine() {  # and what it did to the machine's packet filter and links
    local pid
    pid=$(cat "$work/docker.pid" 2> /dev/null) || return 0
    docker network rm kind > /dev/null 2>&1 || true
    kill "$pid" 2> /dev/null || true
    for ((i = 0; i < ENGINE_SECONDS; i++)); do
        kill -0 "$pid" 2> /dev/null || break
        sleep 1
    done
    iptables-save | grep -vE 'DOCKER|docker0|br-[0-9a-f]+' | iptables-restore || true
    ip link delete docker0 2> /dev/null || true
}
