#!/bin/bash
# A real Slurm on one machine: up.sh DIR [NODES [CPUS_PER_NODE]]; then `. DIR/env` and sbatch, srun, scontrol, ...
# Needs Debian's slurm-wlm and munge. Nothing outside DIR is written. Node i is 127.0.1.i, one slurmd each.
set -eu
dir=$(realpath -m "${1:?directory}") nodes=${2:-3} cpus=${3:-4}
base=${SLURM_BASE_PORT:-$((20000 + $$ % 500 * 20))}
mkdir -p "$dir"/{state,spool,log,munge}
chmod 755 "$dir"; chmod 700 "$dir/munge"
me=$(id -un) host=$(hostname)

# munge: its own key and socket
[ -s "$dir/munge/key" ] || (umask 077; head -c 1024 /dev/urandom > "$dir/munge/key")
munge="$dir/munge/socket"
munged --key-file="$dir/munge/key" --socket="$munge" --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" \
    --seed-file="$dir/munge/seed" --num-threads=2 --force
chmod 755 "$dir/munge" # clients must reach the socket

cat > "$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
AuthInfo=socket=$munge
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,defer_batch=0,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=${SLURMD_TIMEOUT:-15}
SlurmctldTimeout=10
InactiveLimit=0
KillWait=${KILL_WAIT:-30}
MinJobAge=600
SlurmdParameters=config_overrides
CONF
for ((i = 1; i <= nodes; i++)); do
    echo "NodeName=127.0.1.$i NodeHostname=$host NodeAddr=127.0.1.$i Port=$((base + i)) CPUs=$cpus RealMemory=1000"
done >> "$dir/slurm.conf"
echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP" >> "$dir/slurm.conf"
printf 'CgroupPlugin=cgroup/v1\n' > "$dir/cgroup.conf"

export SLURM_CONF="$dir/slurm.conf"
echo "export SLURM_CONF=$dir/slurm.conf" > "$dir/env"
slurmctld -i
for ((i = 1; i <= nodes; i++)); do
    slurmd -N "127.0.1.$i"
done
for ((t = 0; t < 100; t++)); do
    [ "$(sinfo -h -t idle -o %D 2>/dev/null | awk '{s+=$1} END {print s+0}')" = "$nodes" ] && { sinfo; exit 0; }
    sleep 0.2
done
sinfo; tail -n 5 "$dir"/log/*; exit 1
