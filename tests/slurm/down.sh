#!/bin/bash
# Ends what up.sh DIR has started, by pid.
dir=$(realpath "${1:?directory}")
export SLURM_CONF="$dir/slurm.conf"
scancel -u "$(id -un)" 2>/dev/null; scancel --signal=KILL -u "$(id -un)" 2>/dev/null; sleep 0.5
for file in "$dir"/slurmd.*.pid "$dir/slurmctld.pid" "$dir/munge/pid"; do
    [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null
done
for ((t = 0; t < 50; t++)); do
    alive=0
    for file in "$dir"/slurmd.*.pid "$dir/slurmctld.pid" "$dir/munge/pid"; do
        [ -s "$file" ] && kill -0 "$(cat "$file")" 2>/dev/null && alive=1
    done
    [ $alive = 0 ] && exit 0
    sleep 0.2
done
exit 1
