#!/usr/bin/env bash
# Machines out of namespaces: `namespaces.sh up DIR 3` starts hosts 198.18.77.11, .12 and .13, each with a network,
# a process tree, a home, /tmp and /dev/shm of its own, and sshd; `namespaces.sh down DIR` takes them away again.
#
# For tests of `ray up` with the `local` provider. Root's key for all hosts is DIR/key, their homes DIR/1/home ...
# The process trees matter: `ray stop` ends every Ray process it can see. The bridge has no way out.
set -euo pipefail

readonly BRIDGE=warmroute0 NET=198.18.77 # RFC 2544 sets these addresses aside for tests

up() {
    local dir=$1 count=$2
    mkdir -p "$dir"
    [ -e "$dir/key" ] || ssh-keygen -q -t ed25519 -N '' -f "$dir/key"
    ip link add "$BRIDGE" type bridge
    ip addr add "$NET.1/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    for number in $(seq "$count"); do
        wire "$number"
        prepare "$dir/$number"
        ip netns exec "warmroute$number" unshare --mount --uts --pid --fork --kill-child \
            "$0" host "$dir/$number" "warmroute$number" >"$dir/$number/sshd.log" 2>&1 &
        echo $! >"$dir/$number/pid"
    done
    for number in $(seq "$count"); do
        timeout 20 bash -c "until </dev/tcp/$NET.1$number/22; do sleep 0.1; done" 2>/dev/null
    done
}

# A network namespace with one cable to the bridge.
wire() {
    local name=warmroute$1
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip link set "$name" master "$BRIDGE" up
    ip -n "$name" addr add "$NET.1$1/24" dev eth0
    ip -n "$name" link set lo up
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default dev eth0 # leads nowhere; Ray reads its own address off it
}

# Files of one host: its home with the key, and its sshd.
prepare() {
    local host=$1
    rm -rf "$host/tmp" "$host/host_key"
    mkdir -p "$host/home/.ssh" "$host/tmp"
    chmod 700 "$host/home" "$host/home/.ssh"
    chmod 1777 "$host/tmp"
    cp "$host/../key.pub" "$host/home/.ssh/authorized_keys"
    touch "$host/home/.bashrc"
    echo "export PATH=$(python3 -c "import sys; print(sys.base_prefix)")/bin:\$PATH" >"$host/home/.profile"
    sed "s|^root:\(.*\):[^:]*:\([^:]*\)$|root:\1:$host/home:\2|" /etc/passwd >"$host/passwd"
    ssh-keygen -q -t ed25519 -N '' -f "$host/host_key"
    printf '%s\n' "HostKey $host/host_key" "PidFile none" "PermitRootLogin prohibit-password" \
        "UsePAM no" "UseDNS no" "StrictModes no" "AcceptEnv RAY_*" >"$host/sshd_config"
}

# Runs inside the new namespaces, as the first process there.
host() {
    local host=$1 name=$2
    mount --make-rprivate /
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$host/passwd" /etc/passwd
    mkdir -p /run/sshd
    hostname "$name"
    cd /
    mount --bind "$host/tmp" /tmp
    exec "$(command -v sshd)" -D -e -f "$host/sshd_config"
}

down() {
    local dir=$1
    for host in "$dir"/[0-9]*; do
        [ -e "$host/pid" ] && kill -KILL "$(cat "$host/pid")" 2>/dev/null || true
    done
    for name in $(ip -o netns list | awk '/^warmroute[0-9]/ {print $1}'); do
        ip link del "$name" 2>/dev/null || true # the namespace may linger, and its cable with it
        ip netns del "$name"
    done
    ip link del "$BRIDGE" 2>/dev/null || true
}

"$@"
