"""The agent: one process per node that starts the ranks, notices what happens to them, and carries out recoveries.

From a process's end to its replacement: `node/process_watch.py` sees it, `node/node_agent.py` reports it,
`lead/coordinator.py` asks the state machine of `ttprun.recovery` and carries out its actions, `lead/membership.py`
chooses the place, `node/node_agent.py` starts the process. `launcher/group.py` puts the parts together.
`elastic_agent.py` is where torch's own agent asks how its workers are.
"""
