#!/bin/bash
# Two "machines", each with a burnrun of its own and two ranks: network namespaces with a cable between them.
# Usage: netns.sh [PROGRAM [BURNRUN]]; needs root, ip and unshare, for the last two jobs also iptables.
# PROGRAM takes the flags of burn-ddp/comm/examples/hello.rs.
#    or: netns.sh --try [FLAGS] COMMAND…: runs one job of your own that way, with `burnrun FLAGS -n 2` on each machine.
mine=()
if [ "${1:-}" = --try ]; then
    mine=("${@:2}")
    set -- none
fi
. "$(dirname "$0")/launchers/common.sh"
find_burnrun "${2:-}"
machines_possible || { echo "needs root, ip and unshare" >&2; exit 1; }
machines_up || exit 1
burnrun_on_both
if [ ${#mine[@]} -gt 0 ]; then
    new_secret
    "$two" "${mine[@]}"
    exit
fi
long="--steps 3000 --pause 10"

job "without a secret" "$two" "$hello"
failed
said "burnrun secret"

new_secret
job "two machines" "$two" "$hello" --steps 20
all_done 4 burnrun
both_ended_with 0
said "local rank 1 of 2, machine 1"

unset BURN_DDP_SECRET_FILE
BURN_DDP_TRUST_NETWORK=1 job "two machines that trust their network" "$two" "$hello" --steps 20
all_done 4 burnrun
new_secret

job "a rank of the other machine killed" "$two" "$hello" $long --die 3:50:kill
both_ended_with 137
said "rank 3 (host m2"
within 20
no_rank_is_left

job "a rank of this machine panics" "$two" "$hello" $long --die 1:50:panic
both_ended_with 101
said "told to die"
within 20
no_rank_is_left

job "a rank leaves too early" "$two" "$hello" $long --die 2:50:exit
failed
said "rank 2 (host m2"
within 20
no_rank_is_left

# The rank dies only in the first generation.
job "a restart" "$two" --max-restarts 1 \
    bash -c "[ \$BURN_DDP_RESTART_COUNT = 1 ] && exec $hello --steps 20; exec $hello $long --die 3:50:kill"
said "sum 10" 4
both_ended_with 0
no_rank_is_left

after 3 cable down
after 6 cable up
job "the cable out for three seconds" "$two" "$hello" --steps 400 --pause 20
all_done 4 burnrun

after 3 cable down
job "the cable out for good" "$two" --peer-timeout 5 "$hello" $long
failed
said "m1: ended with"
said "m2: ended with"
within 30
no_rank_is_left
cable up

kill_machine() { cable down; ip netns pids "$pair-2" | xargs -r kill -9; }
after 3 kill_machine
job "a machine gone" "$two" --peer-timeout 5 "$hello" $long
failed
said "m1: ended with"
within 30
no_rank_is_left
cable up

kill_burnrun() {
    for pid in $(ip netns pids "$pair-2"); do
        case $(tr '\0' ' ' <"/proc/$pid/cmdline") in "$burnrun --nnodes"*) kill -9 "$pid" ;; esac
    done
}
after 3 kill_burnrun
job "the other machine's burnrun killed" "$two" --peer-timeout 5 "$hello" $long
failed
said "m1: ended with"
within 30
no_rank_is_left

# A firewall on the second machine that forgets connections after three idle seconds, as NATs do, and drops their later
# packets.
forgetful() {
    "${on2[@]}" iptables -A INPUT -m conntrack --ctstate INVALID -j DROP &&
        "${on2[@]}" iptables -A OUTPUT -m conntrack --ctstate INVALID -j DROP &&
        "${on2[@]}" sh -c 'cd /proc/sys/net/netfilter && echo 0 >nf_conntrack_tcp_loose &&
            echo 3 >nf_conntrack_tcp_timeout_established && echo 3 >nf_conntrack_tcp_timeout_unacknowledged'
}
if forgetful; then
    # Probes go out every second: a quarter of the peer timeout.
    job "a group idle for longer than the network remembers" "$two" --peer-timeout 4 "$hello" --steps 2 --pause 8000
    all_done 4 burnrun
    both_ended_with 0

    # The first probe would come after 15 seconds.
    BURN_DDP_TIMEOUT=10 job "a group idle for too long" "$two" --peer-timeout 60 "$hello" --steps 2 --pause 8000
    failed
    said "waited 10 s for"
    said "may have forgotten a connection that was idle"
    within 40
    no_rank_is_left
else
    echo "SKIPPED: a network that forgets idle connections needs iptables, and a kernel that tracks connections" >&2
fi
finish
