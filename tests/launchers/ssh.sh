#!/bin/bash
# `burnrun --hostfile` by real ssh: two "machines" with an sshd each, from a terminal on the first.
# Usage: ssh.sh [PROGRAM [BURNRUN]]; needs root, ip, unshare, and Debian's openssh-client and openssh-server.
. "$(dirname "$0")/common.sh"
find_burnrun "${2:-}"
sshd=$(command -v /usr/sbin/sshd sshd | head -n 1)
[ -n "$sshd" ] || { echo "sshd is not installed: apt-get install openssh-server" >&2; exit 1; }
machines_possible || { echo "needs root, ip and unshare" >&2; exit 1; }
machines_up || exit 1

# Keys, known hosts and logins that only these two machines use.
dir=/tmp/$pair
mkdir -p /run/sshd
for key in user stranger host; do ssh-keygen -q -t ed25519 -N '' -f "$dir/$key"; done
chmod 700 "$dir"
for m in m1 m2; do printf '%s %s\n' "$m" "$(cut -d ' ' -f 1,2 "$dir/host.pub")"; done >"$dir/known_hosts"
cat >"$dir/sshd_config" <<END
HostKey $dir/host
AuthorizedKeysFile $dir/user.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
END
cat >"$dir/ssh_config" <<END
Host *
    IdentityFile $dir/user
    IdentitiesOnly yes
    UserKnownHostsFile $dir/known_hosts
    StrictHostKeyChecking yes
END
for m in m1 m2; do "$at" "$m" "$sshd" -D -e -f "$dir/sshd_config" >"$dir/$m.log" 2>&1 & done
for _ in $(seq 100); do
    [ "$(grep -l 'Server listening' "$dir"/m?.log | wc -l)" = 2 ] && break
    sleep 0.1
done

printf 'm1 slots=2\nm2 slots=2 env=PLACE=second # the other\n' >"$dir/hosts"
export BURNRUN_REMOTE_BURNRUN=$burnrun
here=("${on1[@]}" "$burnrun" --hostfile "$dir/hosts" --join-timeout 30)
by=(--ssh "ssh -F $dir/ssh_config")
long="--steps 3000 --pause 10"

job "two machines" "${here[@]}" "${by[@]}" "$hello" --steps 20
all_done 4 burnrun
said "local rank 1 of 2, machine 1"

job "variables and directory" "${here[@]}" "${by[@]}" -x "OURS=it's" --working-dir /usr sh -c 'echo "$PWD $OURS $PLACE."'
succeeded
said "/usr it's ." 2
said "/usr it's second." 2

job "a rank that fails" "${here[@]}" "${by[@]}" "$hello" $long --die 3:50:kill
[ "$code" = 137 ] || wrong "the exit code is $code"
said "burnrun: rank 3 (host m2" 1
within 20
no_rank_is_left

job "Ctrl-C" "${on1[@]}" timeout --preserve-status -s INT -k 60 4 "${here[@]:2}" "${by[@]}" "$hello" $long
[ "$code" = 130 ] || wrong "the exit code is $code"
within 20
no_rank_is_left

job "burnrun killed" "${on1[@]}" timeout -s KILL 4 "${here[@]:2}" "${by[@]}" "$hello" $long
failed
within 20
no_rank_is_left

kill_burnrun() {
    for pid in $(ip netns pids "$pair-2"); do
        case $(tr '\0' ' ' <"/proc/$pid/cmdline") in "$burnrun remote"*) kill -9 "$pid" ;; esac
    done
}
after 4 kill_burnrun
job "the other machine's burnrun killed" "${here[@]}" "${by[@]}" "$hello" $long
failed
said "burnrun: host m2 is lost" 1
within 40
no_rank_is_left

job "no burnrun there" "${here[@]}" "${by[@]}" --remote-burnrun /no/such/burnrun "$hello"
failed
said ": no burnrun " 1

sed -i '/^m2/d' "$dir/known_hosts"
job "a host key that is not known" "${here[@]}" "${by[@]}" "$hello"
failed
said "host m2: its host key is not known: run" 1

printf 'm2 %s\n' "$(cut -d ' ' -f 1,2 "$dir/stranger.pub")" >>"$dir/known_hosts"
job "a host key that has changed" "${here[@]}" "${by[@]}" "$hello"
failed
said "host m2: its host key is not the known one" 1
sed -i '/^m2/d' "$dir/known_hosts"
printf 'm2 %s\n' "$(cut -d ' ' -f 1,2 "$dir/host.pub")" >>"$dir/known_hosts"

sed "s,$dir/user$,$dir/stranger," "$dir/ssh_config" >"$dir/refused"
job "a login that is refused" "${here[@]}" --ssh "ssh -F $dir/refused" "$hello"
failed
said "the login was refused" 1

ip netns pids "$pair-2" | xargs kill -STOP
job "a host that hangs" "${here[@]}" "${by[@]}" --host-timeout 6 "$hello"
failed
said "host m2: " 1
within 20
ip netns pids "$pair-2" | xargs kill -CONT

cable down
job "a host that is dead" "${here[@]}" "${by[@]}" --host-timeout 6 "$hello"
failed
said "host m2: not reached: does the machine run" 1
within 20
cable up

after 5 cable down
job "the cable out for good" "${here[@]}" "${by[@]}" --peer-timeout 5 "$hello" $long
failed
within 80
no_rank_is_left
finish
