#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces with a link between them that lets RATE through in each direction (a
# token bucket on both ends), one rank in each, MPI over TCP. Runs apa-mpi bench with both exchanges, and checks what the
# link itself counted. Needs root, ip and tc.
#   bench/dist/link.sh APA_MPI RATE [arguments of apa-mpi bench ...]       RATE as tc has it: 100mbit, 1gbit
set -euo pipefail

program=$(realpath "$1") rate=$2
shift 2
id=apadist$$
a=${id}a b=${id}b
folder=$(mktemp -d)
cleanup() {
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT

ip netns add "$a"
ip netns add "$b"
ip link add va netns "$a" type veth peer name vb netns "$b"
for end in "$a va 10.213.7.1" "$b vb 10.213.7.2"; do
    read -r space device address <<<"$end"
    ip -n "$space" link set lo up
    ip -n "$space" addr add "$address/24" dev "$device"
    ip -n "$space" link set "$device" up
    ip netns exec "$space" tc qdisc add dev "$device" root tbf rate "$rate" burst 256kb latency 50ms
done

# What mpirun takes for ssh: runs the command "on" the other host.
cat >"$folder/agent" <<END
#!/bin/bash
shift
exec ip netns exec $b unshare --uts bash -c "hostname $b; \$*"
END
chmod +x "$folder/agent"

sent() { ip netns exec "$1" cat "/sys/class/net/$2/statistics/tx_bytes"; }

run() {
    local before
    before=$(($(sent "$a" va) + $(sent "$b" vb)))
    ip netns exec "$a" mpirun --allow-run-as-root -n 2 --host 10.213.7.1:1,10.213.7.2:1 --map-by node \
        --mca plm_rsh_agent "$folder/agent" --mca btl self,tcp --mca btl_tcp_if_include 10.213.7.0/24 \
        --mca oob_tcp_if_include 10.213.7.0/24 --mca hwloc_base_binding_policy none --mca mpi_yield_when_idle 1 \
        "$program" bench --no-alone "$@"
    echo "the link carried $((($(sent "$a" va) + $(sent "$b" vb) - before) / 1000)) kB, warm-up and repeats together"
}

for exchange in exact codes; do
    printf '\n== exchange %s over %s\n' "$exchange" "$rate"
    run --exchange "$exchange" "$@"
done
