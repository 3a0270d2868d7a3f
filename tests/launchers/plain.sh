#!/bin/bash
# Ranks started by a shell that sets plain variables. Usage: plain.sh [PROGRAM]; root for two machines.
. "$(dirname "$0")/common.sh"
ranks=$here/ranks.sh

job "three ranks on this machine" "$ranks" 3 0 3 "$hello" --steps 20
all_done 3 variables

job "alone" "$hello"
all_done 1 nobody

job "a rank that is killed" "$ranks" 3 0 3 "$hello" --steps 500 --pause 10 --die 1:20:kill
failed
within 30
said "rank 1 (host" 2
no_rank_is_left

BURN_DDP_JOIN_TIMEOUT=2 job "a rank that never comes" "$ranks" 3 0 2 env -u LOCAL_RANK -u LOCAL_WORLD_SIZE "$hello"
failed
said "missing: rank 2" 2

WORLD_SIZE=1 job "every rank told that it is alone" "$ranks" 3 0 3 "$hello"
failed

job "no rank told" "$ranks" 2 0 2 env -u RANK "$hello"
failed
said "but RANK is not" 2

if machines_possible && machines_up; then
    # two COMMAND…: two ranks on each machine.
    cat >"/tmp/$pair/two" <<END
#!/bin/sh
$at m1 $ranks 4 0 2 "\$@" & first=\$!
$at m2 $ranks 4 2 2 "\$@"; result=\$?
wait \$first || result=\$?
exit \$result
END
    chmod +x "/tmp/$pair/two"
    two=/tmp/$pair/two
    export MASTER_ADDR=m1

    job "two machines without a secret" "$two" "$hello"
    failed
    said "burnrun secret"

    BURN_DDP_TRUST_NETWORK=1 job "two machines that trust their network" "$two" "$hello" --steps 20
    all_done 4 variables

    new_secret
    job "two machines" "$two" "$hello" --steps 20
    all_done 4 variables
    said "local rank 1 of 2, machine 1"

    chmod 644 "$BURN_DDP_SECRET_FILE"
    job "a secret that others may read" "$two" "$hello"
    failed
    said "chmod 600"
else
    echo "skipped: two machines (needs root, ip and unshare)"
fi
finish
