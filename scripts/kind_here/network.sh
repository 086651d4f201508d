# The cluster, and the pods' network in place of kindnetd: each node's plugin is told its range, and
# each node the way to the others' pods. Sourced by scripts/kind_here.sh. No NetworkPolicies.

NODE_FOLDER=/srv/tandem
POD_RANGE=10.244.0.0/16

create_cluster() {
    local mount="{hostPath: $work/mounted, containerPath: $NODE_FOLDER/mounted, readOnly: true}"
    mount+=", {hostPath: $work/models, containerPath: $NODE_FOLDER/models, readOnly: true}"
    cat > "$work/config.yaml" << CONFIG
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
networking: {disableDefaultCNI: true, podSubnet: $POD_RANGE}
nodes:
- {role: control-plane, extraMounts: [$mount]}
- {role: worker, extraMounts: [$mount]}
- {role: worker, extraMounts: [$mount]}
CONFIG
    kind get clusters 2> /dev/null | grep -qx "$name" && return
    kind create cluster --name "$name" --image "$node_image" --config "$work/config.yaml" \
        --kubeconfig "$work/kubeconfig"
}

on_cluster() { kubectl --kubeconfig "$work/kubeconfig" "$@"; }

set_up_network() {
    local node range address path='{range .items[*]}{.metadata.name} {.spec.podCIDR} '
    path+='{.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}'
    for ((i = 0; i < 60; i++)); do  # the controllers give each node its range
        on_cluster get nodes -o "jsonpath=$path" > "$work/nodes"
        awk 'NF != 3 {exit 1}' "$work/nodes" && break
        sleep 1
    done
    while read -r node range address; do
        tell_plugin "$node" "$range"
        route_to "$node" "$range" "$address"
    done < "$work/nodes"
    on_cluster wait --for=condition=Ready nodes --all --timeout=120s
    on_cluster -n kube-system rollout status deployment coredns --timeout=120s
}

tell_plugin() {  # NODE RANGE
    local ipam="{\"type\": \"host-local\", \"ranges\": [[{\"subnet\": \"$2\"}]], \"routes\": [{\"dst\": \"0.0.0.0/0\"}], \"dataDir\": \"/run/cni-ipam-state\"}"
    docker exec -i "$1" tee /etc/cni/net.d/10-tandem.conflist > /dev/null << PLUGINS
{"cniVersion": "0.3.1", "name": "tandem", "plugins": [
  {"type": "ptp", "ipMasq": false, "ipam": $ipam},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
PLUGINS
    docker exec -i "$1" nft -f - << RULES
table ip tandem-masquerade {
  chain postrouting {
    type nat hook postrouting priority srcnat;
    ip saddr $2 ip daddr != $POD_RANGE masquerade
  }
}
RULES
}

route_to() {  # NODE RANGE ADDRESS: the others learn the way
    local other rest
    while read -r other rest; do
        [[ $other == "$1" ]] && continue
        docker exec "$other" ip route replace "$2" via "$3" < /dev/null
    done < "$work/nodes"
}
