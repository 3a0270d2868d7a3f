#!/bin/bash
# Faults of machines and of the network between them: lossy and slow wires, firewalls, names, clocks, full disks, few processes.
# No job hangs, and its error names the faulty rank or machine and the cause. Prints a line per case, also for cases that are skipped
# because this machine does not allow them.
# Usage: faults_of_machines.sh [PROGRAM [BURNRUN]]; needs root. PROGRAM takes the flags of burn-ddp/comm/examples/hello.rs.
. "$(dirname "$0")/launchers/common.sh"
find_burnrun "${2:-}"
machines_possible || { echo "needs root, ip and unshare" >&2; exit 1; }
machines_up || exit 1
burnrun_on_both
new_secret
skipped() { printf 'skipped: %s\n' "$1"; }
dir=/tmp/$pair
long="--steps 3000 --pause 10"

# on MACHINE COMMAND…: runs a command in the network of a machine, but without its host names.
on() { ip netns exec "$pair-$1" "${@:2}"; }
# Firewalls: each machine has its own.
firewall() { on "$1" iptables -w "${@:2}"; }
no_firewall() { for m in 1 2; do firewall $m -F; done; }
loses() { for m in 1 2; do firewall $m -A INPUT -i "$pair-$m" -m statistic --mode random --probability "$1" -j DROP; done; }

if command -v iptables >/dev/null && loses 0.01 2>/dev/null; then
    job "a network that loses 1 % of the packets" "$two" "$hello" --steps 300
    all_done 4 burnrun
    no_firewall

    loses 0.05
    job "a network that loses 5 % of the packets" "$two" "$hello" --steps 300
    all_done 4 burnrun

    job "a rank killed behind a network that loses 5 %" "$two" "$hello" $long --die 3:30:kill
    both_ended_with 137
    said "rank 3 (host m2"
    within 40
    no_rank_is_left
    no_firewall

    # Drops all packets to the second machine without an answer. Rank 0 runs on the first one.
    cut_off() { firewall 2 -A INPUT -i "$pair-2" -p tcp -j DROP; }
    after 3 cut_off
    job "a firewall that swallows everything from now on" "$two" --peer-timeout 5 "$hello" $long
    failed
    said "m1: ended with"
    said "m2: ended with"
    said "rank 2 (host m2"
    said "node 1 is lost"
    said "node 0's launcher cannot be reached"
    within 24
    no_rank_is_left
    no_firewall

    # Firewalls that forget connections after 4 idle seconds and drop their later packets.
    forgets() {
        for m in 1 2; do
            on $m sysctl -q -w net.netfilter.nf_conntrack_tcp_timeout_established=4 net.netfilter.nf_conntrack_tcp_loose=0
            firewall $m -A INPUT -i "$pair-$m" -p tcp -m conntrack --ctstate INVALID -j DROP
        done
    }
    if forgets 2>/dev/null; then
        job "a firewall that forgets idle connections, with probes" "$two" --peer-timeout 8 "$hello" --steps 2 --pause 6000
        all_done 4 burnrun

        # Probes come every 15 seconds.
        BURN_DDP_TIMEOUT=8 job "a firewall that forgets idle connections sooner than probes come" \
            "$two" --peer-timeout 60 "$hello" --steps 2 --pause 6000
        failed
        # The first error ends the world, so the output shows only some waits. One between ranks 0 and 2 is always among them.
        across='rank 0 (had )?waited 8(\.0)? s for ranks? ([0-9, and]*)2|rank 2 (had )?waited 8(\.0)? s for ranks? 0'
        across="$across|data from rank 0 do not reach rank 2|data from rank 2 do not reach rank 0"
        printf '%s\n' "$out" | grep -Eq "$across" || wrong "no wait across the firewalls is named"
        said "a firewall or NAT between their machines may have forgotten a connection that was idle"
        within 30
        no_rank_is_left
        no_firewall
    else
        skipped "this kernel tracks no connections"
    fi
else
    skipped "lossy networks and firewalls need iptables"
fi

# Wires between the machines that delay each packet by 100 ms each way.
if [ -c /dev/net/tun ] && command -v python3 >/dev/null; then
    python3 "$here/launchers/slow_wire.py" "$pair-t1" "$pair-t2" 100 >"$dir/wire" &
    wire=$!
    for _ in $(seq 100); do grep -q ready "$dir/wire" && break; sleep 0.1; done
    for m in 1 2; do
        ip link set "$pair-t$m" netns "$pair-$m"
        ip -n "$pair-$m" addr add "10.78.0.$m" peer "10.78.0.$((3 - m))" dev "$pair-t$m"
        ip -n "$pair-$m" link set "$pair-t$m" up
        cp "/etc/netns/$pair-$m/hosts" "$dir/hosts-$m"
        sed -i 's/10\.77/10.78/' "/etc/netns/$pair-$m/hosts"
    done
    job "a network of 200 ms there and back" "$two" "$hello" --steps 20
    all_done 4 burnrun

    job "a rank killed behind a network of 200 ms" "$two" "$hello" $long --die 3:20:kill
    both_ended_with 137
    said "rank 3 (host m2"
    within 40
    no_rank_is_left
    for m in 1 2; do cat "$dir/hosts-$m" >"/etc/netns/$pair-$m/hosts"; done
    kill "$wire"
else
    skipped "a slow network needs /dev/net/tun and python3"
fi

# All processes of a machine, its burnrun too.
freeze() { ip netns pids "$pair-2" | xargs -r kill -STOP; }
thaw() { ip netns pids "$pair-2" | xargs -r kill -CONT; }
after 3 freeze
after 6 thaw
job "a machine frozen for three seconds" "$two" --peer-timeout 20 "$hello" --steps 300 --pause 20
all_done 4 burnrun

after 3 freeze
after 20 thaw
job "a machine frozen for longer than the peer timeout" "$two" --peer-timeout 5 "$hello" $long
failed
said "m1: ended with"
said "m2: ended with"
said "like all of its machine (ranks 2 and 3): that machine is frozen, overloaded or cut off"
said "node 1 is lost"
within 40
no_rank_is_left

# Names.
names=/etc/netns/$pair-2/hosts
cp "$names" "$dir/names"
sed -i /m1/d "$names"
knows_m1() { cat "$dir/names" >"$names"; }
after 3 knows_m1
job "a name that resolves after three seconds" "$two" "$hello" --steps 20
all_done 4 burnrun

sed -i /m1/d "$names"
job "a name that never resolves" "$two" --join-timeout 6 "$hello" --steps 20
failed
said "node 0's launcher was not reached at m1:29500 within 6 s"
within 30
knows_m1

# The wall clock.
if command -v cc >/dev/null && cc -shared -fPIC -o "$dir/clock_jump.so" "$here/launchers/clock_jump.c" -ldl; then
    jumps=(env "LD_PRELOAD=$dir/clock_jump.so" JUMP_AFTER=1)
    job "clocks that jump by days" "${jumps[@]}" "$two" --peer-timeout 5 "$hello" --steps 150 --pause 20
    all_done 4 burnrun

    job "a rank killed while clocks jump by days" "${jumps[@]}" "$two" --peer-timeout 5 "$hello" $long --die 3:150:kill
    both_ended_with 137
    said "rank 3 (host m2"
    within 30
    no_rank_is_left

    job "a rank stopped while clocks jump by days" "${jumps[@]}" "$two" --peer-timeout 4 \
        bash -c "[ \$RANK = 3 ] && (sleep 2; kill -STOP \$\$) & exec $hello $long"
    failed
    said "rank 3 (host m2"
    within 30
    no_rank_is_left
else
    skipped "a jump of the clock needs a C compiler"
fi

# No space for logs, reports, events and the timeline.
mkdir "$dir/full"
on_full_disk() { mount -t tmpfs -o size=64k none "$dir/full" && head -c 1M /dev/zero >"$dir/full/zeros" 2>/dev/null; "$@"; }
export -f on_full_disk
export dir
job "a full disk for all that is written" unshare --mount bash -c 'on_full_disk "$@"' bash \
    env "TMPDIR=$dir/full" "$burnrun" -n 3 --log-dir "$dir/full" "$hello" $long --die 1:20:panic
failed
said "told to die"
said "rank 1 (host"
within 30
no_rank_is_left
finish
