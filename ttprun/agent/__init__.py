"""The agent: one process per node that starts the ranks, notices what happens to them, and carries out recoveries.

Read `supervisor.py` first: it feeds events to the state machine of `ttprun.recovery` and carries out its actions.
`elastic_agent.py` is where torch's own agent asks how its workers are.
"""
