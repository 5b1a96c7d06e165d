"""Print what the launcher has put into the environment, and exit."""

import os

SAME_IN_EVERY_RUN = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS",
]
OTHERS = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"]

rank = os.environ.get("RANK", "?")
for name in SAME_IN_EVERY_RUN:
    print(f"[rank {rank}] {name}={os.environ.get(name)}")
for name in OTHERS:
    print(f"[rank {rank}] {name} is {'set' if os.environ.get(name) else 'missing'}")
