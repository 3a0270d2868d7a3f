# Two "machines" on this one: network namespaces m1 and m2 with a cable between them, names and loopback of their own.
# To be sourced; needs root and iproute2. `machines_up` makes them, and they are removed when the script ends.

machines_possible() {
    [ "$(id -u)" = 0 ] && command -v ip >/dev/null && command -v unshare >/dev/null || return 1
    ip netns add "bd$$" 2>/dev/null && ip netns del "bd$$"
}

machines_up() {
    # Several scripts may run side by side, each with its own pair.
    pair=bd$$
    trap machines_down EXIT
    trap 'exit 1' INT TERM
    mkdir -p "/tmp/$pair"
    ip link add "$pair-1" type veth peer name "$pair-2" || return 1
    for n in 1 2; do
        mkdir -p "/etc/netns/$pair-$n"
        printf '127.0.0.1 localhost\n10.77.0.1 m1\n10.77.0.2 m2\n' >"/etc/netns/$pair-$n/hosts"
        ip netns add "$pair-$n" || return 1
        ip link set "$pair-$n" netns "$pair-$n"
        ip -n "$pair-$n" addr add "10.77.0.$n/24" dev "$pair-$n"
        ip -n "$pair-$n" link set lo up
        ip -n "$pair-$n" link set "$pair-$n" up
    done
    # A remote shell: `rsh m2 command…` joins the words and passes them to a shell, as ssh does; `at m2 command…` keeps them.
    rsh=/tmp/$pair/rsh
    cat >"$rsh" <<END
#!/bin/sh
while :; do case \$1 in -*) shift ;; *) break ;; esac; done
host=\$1; shift
exec ip netns exec $pair-\${host#m} unshare --uts sh -c "hostname \$host; \$*"
END
    at=/tmp/$pair/at
    cat >"$at" <<END
#!/bin/sh
host=\$1; shift
exec ip netns exec $pair-\${host#m} unshare --uts sh -c "hostname \$host; exec \"\\\$@\"" sh "\$@"
END
    chmod +x "$rsh" "$at"
    # "${on1[@]}" COMMAND…: runs a command on the first machine.
    on1=("$at" m1)
    on2=("$at" m2)
}

machines_down() {
    for n in 1 2; do
        ip netns pids "$pair-$n" 2>/dev/null | xargs -r kill -9 2>/dev/null
        ip netns del "$pair-$n" 2>/dev/null
        rm -rf "/etc/netns/$pair-$n"
    done
    rm -rf "/tmp/$pair"
}

# $two FLAGS -- COMMAND…: runs $burnrun on both machines, with two ranks each, and prints the exit codes of both. Exits with
# the code of the first machine, or of the second if the first succeeded.
burnrun_on_both() {
    two=/tmp/$pair/two
    cat >"$two" <<END
#!/bin/bash
for m in 1 2; do
    (
        $at m\$m $burnrun --nnodes 2 --node-rank \$((m - 1)) --master-addr m1 -n 2 "\$@" 2>&1 | sed -u "s/^/m\$m: /"
        code=\${PIPESTATUS[0]}
        echo "m\$m: ended with \$code after \$SECONDS s"
        exit \$code
    ) &
    pids+=(\$!)
done
for pid in \${pids[@]}; do wait \$pid || result=\${result:-\$?}; done
exit \${result:-0}
END
    chmod +x "$two"
}

cable() { # up, down
    ip -n "$pair-1" link set "$pair-1" "$1"
}
