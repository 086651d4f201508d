#!/usr/bin/env bash
# Debian's packages that the test cluster and its images need; does nothing where all are there.
# Go comes from elsewhere: tests/cluster/go.mod says which version, and Debian's is older.
set -euo pipefail

packages=(buildah containernetworking-plugins debootstrap iproute2 iptables nftables openssl
          procps runc util-linux)
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null \
        | grep -qx installed || missing+=("$package")
done
if ((${#missing[@]})); then
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends \
        "${missing[@]}" > /dev/null
fi
