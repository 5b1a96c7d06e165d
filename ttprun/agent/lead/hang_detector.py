"""The hang_detector: a few times a second it looks at the board and at /proc, and says which rank hangs.

What it sees goes to `ttprun.recovery.hangs`, which judges; a rank that hangs is reported with its Python stack, and
becomes an event of the state machine, which kills it and has it replaced. A script that ttprun cannot repair is only
reported, unless the user has set a limit himself: ttprun must not end a job that might have gone on.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict

from ttprun import recovery
from ttprun.agent.base import life_signs, stack_dumps
from ttprun.agent.base.ground import Failure
from ttprun.agent.lead.repairs import Repairs
from ttprun.agent.lead.rows import Lead, Row
from ttprun.device.device_errors import DeviceFault
from ttprun.errors import in_short
from ttprun.observe.run_directory import RankStack, groups_of
from ttprun.protocol.board import OPERATION_NAMES, Field, Phase
from ttprun.protocol.from_rank import Broken
from ttprun.recovery.hang_observations import Doing, Observation
from ttprun.recovery.hangs import HangVerdict, HangWatch, Hung, Stalled, Straggler, Way

logger = logging.getLogger("ttprun")

EVERY_S = 0.25
_OFTEN, _RARELY = 2048, 4.0  # ranks; more are looked at less often: never more rarely than LOOK_AWAY_S of HangWatch
_STALE_S = 2.0
_SAY_AFTER_S = 3.0
_STUCK_S = 1.0  # in a collective that has broken: then it is no moment of the script's end
_REPAIRING = (
    recovery.JobPhase.FREEZING,
    recovery.JobPhase.REPLAYING,
    recovery.JobPhase.TRANSFERRING,
    recovery.JobPhase.RESUMING,
)
_IN_SCRIPT = (Way.IDLE, Way.HELD, Way.BUSY)
_IN_STEP = (recovery.JobPhase.RUNNING, recovery.JobPhase.RESUMING)
_DOING = {phase: Doing(phase.name.lower()) for phase in Phase if phase is not Phase.FROZEN} | {
    Phase.FROZEN: Doing.COMPUTING
}


class HangDetector:
    """Watches the ranks of a node."""

    def __init__(self, node: Lead, repairs: Repairs) -> None:
        self._node = node
        self._repairs = repairs
        limit = node.config.hang_timeout_s
        self._limit_s = None if limit == "auto" else float(limit)
        self._watch = HangWatch(self._limit_s)
        self._of_alone: dict[int, HangWatch] = {}  # by rank
        self._next_s = 0.0
        self._is_repairing = False
        self._reported: set[tuple[int, int]] = set()  # what has been reported already
        self._waited_for: set[tuple[int, int]] = set()  # pid and boundary of ranks that were named as late
        self._reported_pids: set[int] = set()  # whose stacks have been reported
        self._asked_pids: set[int] = set()  # whose stacks are being taken: it may last, if a thread holds the GIL
        self._broken: dict[int, tuple[int, float, Broken]] = {}  # rank -> pid, since when, what broke as one left

    @property
    def is_off(self) -> bool:
        """The user does not want hangs to be found."""
        return self._limit_s == 0.0

    def look(self) -> None:
        """Look if it is time to, and act on what is seen."""
        now = time.monotonic()
        if self.is_off or now < self._next_s:
            return
        self._next_s = now + EVERY_S * min(_RARELY, max(1.0, len(self._node.slots) / _OFTEN))
        self._node.domains.look("hang detection", lambda: self._look(now))

    def _look(self, now: float) -> None:
        phase = self._node.job.phase
        if self._repairs.is_paused:
            self._is_repairing = True  # nobody is expected to get on, and afterwards all begin anew
            return
        if phase is recovery.JobPhase.RUNNING:
            if self._is_repairing:
                self._watch.begin_anew(now)
            self._is_repairing = False
            self._look_at_broken(now)
            self._look_at_ended(now)
            verdicts = self._watch_all(now)
        elif phase in _REPAIRING:
            self._is_repairing = True
            replaying = [
                member.rank
                for member in self._node.job.replacements
                if phase is recovery.JobPhase.REPLAYING and member.has_orders and not member.has_replayed
            ]
            verdicts = self._watch.look_at_repair(now, self._observations(), replaying, self._stepping())
        else:
            self._watch.note(now, self._observations())  # for the deadlines
            return
        for verdict in verdicts:
            self._act(verdict)

    def _watch_all(self, now: float) -> tuple[HangVerdict, ...]:
        """Ranks that wait for each other are judged together, others each for itself."""
        job, observations = self._node.job, self._observations()
        if not (job.settings.is_alone or job.are_alone) or (job.settings.world_size == 1 and self._limit_s is None):
            has_left = any(slot.is_finished for slot in self._node.slots)
            return self._watch.look(
                now, observations, has_left=has_left
            )  # one rank alone may wait for a person, who debugs it
        verdicts: tuple[HangVerdict, ...] = ()
        for observation in observations:
            watch = self._of_alone.setdefault(observation.rank, HangWatch(self._limit_s))
            verdicts += watch.look(now, [observation], is_alone=True)
        return verdicts

    def _stepping(self) -> list[int]:
        """Replacements that run the step which they take over."""
        job = self._node.job
        is_in_step = job.phase is recovery.JobPhase.RESUMING
        return [m.rank for m in job.replacements if is_in_step and m.has_rebuilt and not m.has_reissued]

    def do_all_work(self, ranks: Sequence[int]) -> bool:
        """Whether each of these ranks works, or is judged by its own clock in a step; False if there are none."""
        now, watch, stepping = time.monotonic(), self._watch, self._stepping()
        return bool(ranks) and all(
            watch.is_busy(now, rank) or (rank in stepping and watch.is_in_own_call(now, rank)) for rank in ranks
        )

    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the present phase of a recovery up, as far as the board shows; () if it does not."""
        node, now = self._node, time.monotonic()
        job, board = node.job, node.board
        observations = self._observations()
        dead = tuple(
            observation.rank
            for observation in observations
            if observation.is_stopped or (observation.pulse_at_s and self._watch.is_silent(observation, now))
        )
        slots = [node.slots[rank] for rank in job.survivors]
        if dead or job.phase not in (recovery.JobPhase.FREEZING, recovery.JobPhase.RESUMING):
            return dead
        if job.phase is recovery.JobPhase.RESUMING:
            # Who connects reports its port to the others first; who has not done so is waited for by all.
            has_any = any(slot.reported_in == job.generation for slot in node.slots)
            return tuple(slot.rank for slot in node.slots if has_any and slot.reported_in < job.generation)
        late = tuple(slot.rank for slot in slots if board.get(slot.rank, Field.HELD) < job.generation)
        boundary = max(board.get(slot.rank, Field.APPLIED) for slot in slots)
        return late or tuple(slot.rank for slot in slots if board.get(slot.rank, Field.APPLIED) < boundary)

    def is_late(self, slot: Row) -> bool:
        """Whether a deadline has condemned a rank whose stack has not been reported yet."""
        return slot.pid not in self._reported_pids and self._node.job.phase in _REPAIRING and slot.is_present

    def take_broken(self, slot: Row, message: Broken) -> None:
        """A rank says that an operation has failed, though it has heard of no fault."""
        node, now = self._node, time.monotonic()
        generation, fault = message.generation, message.device_fault
        fields = {"generation": generation, "reason": message.reason, "device_fault": fault}
        node.log("connection_broken", rank=slot.rank, **fields)
        if generation != node.job.generation:
            return
        rows = (node.board_row(other.rank) for other in node.slots if not other.is_finished)
        is_leaving = any(row[Field.LEAVING] or row[Field.ENDED] for row in rows)
        is_leaving = is_leaving or any(other.is_finished for other in node.slots)
        if is_leaving or any(
            life_signs.has_ended(each.pid) for each in node.slots if each.is_here and not each.is_lost
        ):
            self._broken[slot.rank] = (slot.pid, now, message)  # an exit is the fault, of which the agent hears next
            return
        self._watch.look(now, self._observations())
        is_time_out = "imed out" in message.reason or fault == DeviceFault.COLLECTIVE_TIMEOUT
        is_in_step = node.job.phase in _IN_STEP
        laggards = self._watch.laggards() if is_time_out and is_in_step else ()
        for observation in laggards:
            self._report(self._watch.why_absent(now, observation.rank))
        if not laggards:
            reason = f"rank {slot.rank}: {message.reason}"
            rank = slot.rank if fault == DeviceFault.LINK else None  # a suspect or a time-out says nothing of this one
            self._break(self._boundary(), message.after_s, reason, rank, fault)

    def _look_at_broken(self, now: float) -> None:
        """Find a rank that stands in a collective which broke as another rank left: it still needs that one."""
        node = self._node
        for rank, (pid, since_s, message) in list(self._broken.items()):
            slot = node.slots[rank]
            is_over = slot.pid != pid or slot.is_lost or slot.is_finished or message.generation != node.job.generation
            if is_over or not any(other.is_finished for other in node.slots):
                if is_over:
                    del self._broken[rank]
                continue
            if Phase(node.board_row(slot.rank)[Field.PHASE]) not in (Phase.COLLECTIVE, Phase.WAITING):
                self._broken[rank] = (pid, now, message)
            elif now - since_s > _STUCK_S:
                del self._broken[rank]
                self._break(self._boundary(), message.after_s, f"rank {rank}: {message.reason}")

    def _look_at_ended(self, now: float) -> None:
        """Say which ranks have come to their end while all others wait in a collective; they stay for a while."""
        node = self._node
        living = [slot for slot in node.slots if not (slot.is_finished or slot.is_lost)]
        ended = [slot.rank for slot in living if node.board.get(slot.rank, Field.ENDED)]
        if not ended:
            return
        rows = [node.board_row(slot.rank) for slot in living if slot.rank not in ended]
        is_awaited = bool(rows) and all(
            Phase(row[Field.PHASE]) in (Phase.COLLECTIVE, Phase.WAITING)
            and now - row[Field.SEEN_NS] / 1e9 > _SAY_AFTER_S
            for row in rows
        )
        if is_awaited and (-1, ended[0]) not in self._reported:
            self._reported.add((-1, ended[0]))
            ranks, operation = in_short(list(map(str, ended))), OPERATION_NAMES[rows[0][Field.OPERATION]]
            node.log("ended_early", ranks=ended, operation=operation)
            logger.warning(
                "rank %s has reached the end of its script while the others wait in %s: unless they go on within "
                "seconds, the job ends",
                *(ranks, operation),
            )

    def _boundary(self) -> int:
        board, away = self._node.board, self._node.job.away
        slots = [slot for slot in self._node.slots if not slot.is_finished]
        return min(board.get(slot.rank, Field.APPLIED) for slot in slots if slot.rank not in away)

    def _act(self, verdict: HangVerdict) -> None:
        node = self._node
        if isinstance(verdict, Straggler):
            observation = verdict.observation
            node.log(
                "straggler",
                rank=observation.rank,
                step=observation.boundary,
                took_s=verdict.took_s,
                usual_s=verdict.usual_s,
            )
            logger.warning("%s", verdict.reason)
        elif isinstance(verdict, Stalled):
            self._stall(verdict)
        else:
            self._report(verdict)

    def _stall(self, verdict: Stalled) -> None:
        generation = self._node.job.generation
        episode = (-1 - generation, verdict.boundary)
        if episode in self._reported:
            return
        self._reported.add(episode)
        take = self._node.eyes.take_all() if verdict.apart else tuple

        def conclude(stacks: tuple[RankStack, ...]) -> None:
            if self._node.job.generation != generation:
                return
            reason = verdict.described({stack.rank: stack_dumps.innermost_user_frame(stack.main) for stack in stacks})
            self._node.log("stalled", boundary=verdict.boundary, for_s=verdict.for_s, reason=reason)
            logger.warning("%s", reason)
            self._break(verdict.boundary, verdict.for_s, reason, is_silent=True)

        def without_stacks(error: Exception) -> None:
            self._node.domains.note("stacks", error)
            conclude(())

        self._node.in_background(take, conclude, without_stacks)

    def _break(
        self,
        boundary: int,
        for_s: float,
        reason: str,
        rank: int | None = None,
        device_fault: str = "",
        is_silent: bool = False,
    ) -> None:
        self._node.advance(
            recovery.ConnectionBroken(
                at_s=time.monotonic(),
                generation=self._node.job.generation,
                boundary=boundary,
                rank=rank,
                detected_after_s=for_s,
                device_fault=device_fault,
                reason=reason,
                is_silent=is_silent,
            )
        )

    def _report(self, hung: Hung) -> None:
        node, observation = self._node, hung.observation
        slot = node.slots[observation.rank]
        if slot.is_lost or slot.pid != observation.pid or slot.pid in self._asked_pids:
            return  # what was done about another rank has ended this process, or it has been reported
        if self._is_waited_for(hung):
            if (slot.pid, observation.boundary) in self._waited_for:
                return
            self._waited_for.add((slot.pid, observation.boundary))
            self._take_stacks(hung, is_only_reported=True)
            return
        is_only_reported = self._limit_s is None and self._is_unrepairable(observation.rank)
        is_only_reported = is_only_reported or recovery.is_last_survivor(node.job, observation.rank)
        is_known = (observation.rank, observation.boundary) in self._reported
        if is_known and not is_only_reported and recovery.is_alone(node.job, observation.rank):
            is_only_reported = True  # it stands there again: it waits for something, and not for another rank
            if slot.pid in self._reported_pids:
                return
        elif is_known and is_only_reported:
            return
        self._reported.add((observation.rank, observation.boundary))
        self._take_stacks(hung, is_only_reported)

    def _is_waited_for(self, hung: Hung) -> bool:
        """Whether a rank may still come: its limit is not over, or the process before it was as slow there."""
        node, slot = self._node, self._node.slots[hung.observation.rank]
        return not hung.is_due or (
            self._is_in_script(hung)
            and not hung.is_overdue
            and recovery.has_hung_before(node.job, slot.rank, self._reached(slot))
        )

    def _is_in_script(self, hung: Hung) -> bool:
        return hung.way in _IN_SCRIPT and self._node.job.phase in _IN_STEP

    def _reached(self, slot: Row) -> int:
        return self._node.reached(slot.rank, self._node.board.get(slot.rank, Field.RECORDED))

    def _take_stacks(self, hung: Hung, is_only_reported: bool) -> None:
        """Conclude with the rank's stack, as far as it can be had, once that is taken."""
        node, observation, slot = self._node, hung.observation, self._node.slots[hung.observation.rank]
        self._reported_pids.add(slot.pid)
        if slot.is_here:
            take_own = node.eyes.take_stack(slot.rank, observation.is_stopped)
            take_others = node.eyes.take_all(without=slot.rank)

            def take() -> tuple[tuple[RankStack, ...], list[str]]:
                taken = (take_own(), *take_others())
                return taken, stack_dumps.flight_records([stack.rank for stack in taken], time.time() - hung.for_s)

            def conclude(result: tuple[tuple[RankStack, ...], list[str]]) -> None:
                self._asked_pids.discard(observation.pid)
                taken, records = result
                groups = [asdict(group) for group in groups_of(taken)]
                node.log("stacks", because_of=observation.rank, groups=groups, flight_records=records)
                self._conclude(hung, taken[0].all_threads, is_only_reported)

            def without_stacks(error: Exception) -> None:
                self._asked_pids.discard(observation.pid)
                node.domains.note("stacks", error)
                self._conclude(hung, "", is_only_reported)

            self._asked_pids.add(observation.pid)
            node.in_background(take, conclude, without_stacks)
        else:
            self._conclude(hung, "", is_only_reported)

    def _conclude(self, hung: Hung, text: str, is_only_reported: bool) -> None:
        """A rank that hangs, and its stack, as far as it could be had."""
        node, observation = self._node, hung.observation
        slot = node.slots[observation.rank]
        if slot.is_lost or slot.pid != observation.pid:
            return  # it has ended meanwhile
        # Meanwhile the others may have been lost, too.
        is_waited_for = self._is_waited_for(hung)
        is_only_reported = is_only_reported or is_waited_for or recovery.is_last_survivor(node.job, observation.rank)
        main_thread = stack_dumps.main_thread_of(text, slot.main_thread)
        frame = stack_dumps.innermost_user_frame(main_thread)
        reason = hung.reason + (f"; innermost frame: {frame}" if frame else "")
        line = stack_dumps.innermost_user_line(main_thread)
        boundary, is_in_script = self._reached(slot), self._is_in_script(hung)
        is_again = is_in_script and recovery.has_hung_before(node.job, slot.rank, boundary)
        node.log(
            "rank_late" if is_waited_for else "rank_hung",
            rank=observation.rank,
            pid=observation.pid,
            way=hung.way.name.lower(),
            phase=observation.doing,
            step=observation.boundary,
            operation=hung.awaited.operation if hung.awaited is not None else None,
            number=hung.awaited.meetings if hung.awaited is not None else None,
            awaited_by=hung.awaited.rank if hung.awaited is not None else None,
            for_s=round(hung.for_s, 3),
            limit_s=hung.limit_s,
            frame=frame,
            line=line,
            is_again=is_again,
            stack=text,
        )
        stack = f"\n{main_thread}" if main_thread else ""
        action = "it cannot be replaced, so it is not killed" if is_only_reported else "it is killed"
        again = " again" if is_again else ""
        if is_waited_for:
            where = f"{frame} (`{line}`)" if line else frame or observation.where
            may_end = self._limit_s is not None or not self._is_unrepairable(slot.rank)
            logger.warning("%s", hung.late(where, is_again, may_end))
        else:
            logger.warning("rank %d hangs%s (%s): %s%s", observation.rank, again, reason, action, stack)
        if not is_only_reported:
            node.note_failure(
                Failure(observation.rank, observation.pid, -signal.SIGKILL, f"hung: {reason}", main_thread)
            )
            if recovery.is_alone(node.job, slot.rank) and slot.is_here:
                # It must not keep another state while it is decided to which one it goes back.
                node.eyes.end_at_once(slot.rank)
                node.report_what_is_left(slot.rank)
            node.advance(
                recovery.RankHung(
                    at_s=time.monotonic(),
                    rank=observation.rank,
                    pid=observation.pid,
                    boundary=boundary,
                    detected_after_s=hung.for_s,
                    reason=reason,
                    is_in_script=is_in_script,
                    is_overdue=hung.is_overdue,
                )
            )

    def _is_unrepairable(self, rank: int) -> bool:
        job = self._node.job
        if recovery.is_alone(job, rank):
            return self._node.eyes.newest(rank) is None
        is_replaceable = "replace" in job.settings.rungs and not job.unprotected_reason
        return not is_replaceable and bool(recovery.why_not_without(job, (rank,)))

    def _observations(self) -> list[Observation]:
        observed = (self._observation(slot) for slot in self._node.slots if not slot.is_finished and not slot.is_lost)
        return [observation for observation in observed if observation is not None]

    def _seen_elsewhere(self, slot: Row) -> tuple[str, float]:
        """State and processor time of a rank on another node; nothing if its agent has not been heard of late."""
        peers = self._node.peers
        is_fresh = peers.unheard_s(peers.node_of(slot.rank)) < _STALE_S
        return (slot.state, slot.cpu_s) if is_fresh else ("", 0.0)

    def _observation(self, slot: Row) -> Observation | None:
        """One rank now; None if its process has just ended."""
        row = self._node.board_row(slot.rank)
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, cpu_s = life_signs.state_of(slot.pid) if slot.is_here else self._seen_elsewhere(slot)
            if state in "ZX":  # also if it is not known
                return None
            phase = Phase(row[Field.PHASE])
            if phase is Phase.COLLECTIVE and row[Field.NONE_IN_FLIGHT]:  # e.g. behind DDP's backward pass
                phase = Phase.COMPUTING
            return Observation(
                rank=slot.rank,
                pid=slot.pid,
                boundary=row[Field.APPLIED],
                meetings=row[Field.MEETINGS],
                doing=_DOING[phase],
                operation=OPERATION_NAMES[row[Field.OPERATION]],
                seen_at_s=row[Field.SEEN_NS] / 1e9,
                pulse_at_s=row[Field.PULSE_NS] / 1e9,
                beats=row[Field.MAIN_BEATS],
                cpu_s=cpu_s,
                is_stopped=state == "T",
                is_in_io=state == "D",
            )
        return None
