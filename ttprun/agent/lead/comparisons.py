"""Who holds the same weights, as the ranks report it, and what follows when replicas part. Begin with `take`.

Who is a replica of whom is worked out in `ttprun.recovery.replicas`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace

from msgspec import structs

from ttprun import recovery
from ttprun.agent.lead.incidents import Incidents
from ttprun.agent.lead.rows import Lead, Row, Wire
from ttprun.agent.lead.schedules import SnapshotTimes
from ttprun.agent.lead.topology_report import topology_of
from ttprun.errors import in_short
from ttprun.observe.run_directory import replace_file
from ttprun.protocol import from_rank, node_messages, to_rank
from ttprun.protocol.reason import Reason
from ttprun.protocol.snapshot_messages import Share
from ttprun.rank.verification import PROOF_STEPS
from ttprun.recovery.replicas import Divergence, Look, Looks, Replicas
from ttprun.recovery.state_origins import may_rewind
from ttprun.state.cost_limits import in_words

logger = logging.getLogger("ttprun")

_MOST_RANKS = 8  # that are named
LOOK_AHEAD = 20  # boundaries, by which all ranks have heard of it


class MirrorShares:
    """Which ranks keep mirrors, and how much of their node's memory for that each may take."""

    def __init__(self, node: Lead) -> None:
        self._node = node
        self._orders: dict[int, to_rank.KeepMirror] = {}  # by rank

    @property
    def why_off(self) -> str:
        """Why no rank may keep a mirror; "" if they may."""
        config, rungs = self._node.config, self._node.rungs
        is_used = "replace" in rungs or ("persist" in rungs and "rewind" not in rungs)
        is_off = config.buddy == "off" or config.mindio or not is_used
        return "it is switched off" if is_off else ""

    def share_out(self, weights: Mapping[int, int], of_results: Collection[int] = ()) -> bool:
        """These ranks are to keep mirrors: each may take of the memory what its weights are of all their weights.

        weights      by rank: bytes of its own, or of its parts
        of_results   those that keep results alone
        returns      whether it is other than before
        """
        node_of, together = self._node.peers.node_of, Counter[int]()
        for rank, size in weights.items():
            together[node_of(rank)] += size
        orders = {
            rank: to_rank.KeepMirror(rank, size / (together[node_of(rank)] or 1), rank in of_results)
            for rank, size in weights.items()
        }
        if self.why_off or orders == self._orders:
            return False
        self._orders = orders
        return True

    def order_for(self, rank: int) -> to_rank.KeepMirror | None:
        """What the node of a rank must know to keep its mirror; None: it is to keep none."""
        return self._orders.get(rank)


class Comparisons:
    """Compares what the ranks of one group hold."""

    def __init__(self, node: Lead, wire: Wire, times: SnapshotTimes, incidents: Incidents) -> None:
        self._node = node
        self._wire = wire
        self._mirrors = MirrorShares(node)
        self._is_hybrid = False  # see _looks_hybrid
        self._times = times
        self._incidents = incidents
        self._looks = Looks(world_size=len(node.slots))
        self.why_not_stored = ""  # why neither snapshots nor checkpoints can hold the shards
        self._cuts: dict[int, Mapping[str, tuple[str, str]]] = {}  # by rank: of each sharded parameter, which part
        self._names: dict[str, str] = {}  # of parameters, for people
        self._groups: dict[int, list[from_rank.Group]] = {}  # by rank
        self._repaired: tuple[tuple[int, ...], int] = ((), 0)  # ranks, boundary
        self._weights: dict[int, int] = {}  # by rank: bytes
        self._mirror_reports: dict[int, from_rank.StateMirrored] = {}  # by rank: the newest report
        self._not_copied: set[int] = set()  # ranks of whose mirrors the next node could keep no copy
        self._said_of_mirrors = ""
        self._has_said_no_step = False

    def begin_resumed(self, replicas: Replicas) -> None:
        """The ranks go on from a checkpoint, whose writers were replicas so far."""
        self._looks = replace(self._looks, replicas=replicas)
        self._names |= replicas.names

    def note_repair(self, ranks: tuple[int, ...], boundary: int) -> None:
        """These ranks get the others' weights of a boundary, which is checked: there all are alike."""
        before, repaired_at = self._repaired
        self._repaired = ((*before, *ranks) if repaired_at == boundary else ranks, boundary)
        self._looks = replace(self._looks, agreed_at=boundary, reported={})

    def take(self, slot: Row, message: from_rank.Held) -> None:
        """A rank reports digests of what it holds; the last one's report shows who is a replica of whom."""
        before = self._looks
        self._names |= message.names
        self._groups[slot.rank] = message.groups or self._groups.get(slot.rank, [])
        if message.is_full:
            self._cuts[slot.rank] = message.shards
            self._weights[slot.rank] = message.bytes
        if message.why_not_stored:
            self._times.is_off, self._times.why_off = True, message.why_not_stored
        self._looks, look = before.note(slot.rank, message.boundary, message.held, message.is_full, message.shards)
        if look is None:
            return
        if look.differing and self._is_proof(look):
            self._looks = replace(self._looks, replicas=before.replicas)
            what = f"{self.names_of(look.differing)}, or its gradient or optimizer state"
            self._refuse_repair(slot, look.boundary, what)
            return
        if look.is_full or look.differing:
            self._look_at_shards()
            self._share_out_mirrors()
            self._note_replicas(self._looks.replicas, look.boundary)
            self._write_topology()
        repaired, repaired_at = self._repaired
        if (
            look.is_full
            and not look.differing
            and look.divergence is None
            and look.boundary <= repaired_at + PROOF_STEPS
        ):
            everyone = range(len(self._node.slots))
            for rank in (rank for rank in sorted({*repaired}) if self._looks.replicas.peers(rank, everyone)):
                equal = f"weights, gradients and optimizer state, those of its replicas, at boundary {look.boundary}"
                self._incidents.note_compared(rank, [equal], [])
        if look.is_full:
            for each in self._node.slots:
                each.send_if_present(to_rank.AllCompared(look.boundary))
        job = self._node.job
        if look.divergence is not None and (job.incident is None or job.phase is recovery.JobPhase.RESUMING):
            self._answer_divergence(slot, look.divergence)

    def _look_at_shards(self) -> None:
        """Nothing is stored of parts that do not make one whole."""
        everyone = range(len(self._node.slots))
        cuts = [self._cuts.get(rank, {}) for rank in everyone]
        self.why_not_stored = str(self._looks.why_not_one_whole(cuts, self._names))
        if self.why_not_stored:
            self._times.is_off, self._times.why_off = True, self.why_not_stored

    def _is_proof(self, look: Look) -> bool:
        """Whether a rank that was repaired a moment ago differs now from those that it was repaired from."""
        ranks, repaired_at = self._repaired
        everyone = range(len(self._node.slots))
        if not ranks or look.boundary > repaired_at + PROOF_STEPS or {*ranks} == {*everyone}:
            return False
        unequal = self._node.job.replicas.unequal
        return any(
            unequal.get(key, owners)[rank] == unequal.get(key, owners)[other] or key not in unequal
            for key, owners in look.differing.items()
            for rank in ranks
            for other in everyone
            if owners[rank] != owners[other]
        )

    def _refuse_repair(self, slot: Row, boundary: int, what: str) -> None:
        """What the repaired ranks do is not what the lost ones did.

        what   which ranks hold what
        """
        ranks, repaired_at = self._repaired
        who = ", ".join(map(str, sorted({*ranks})))
        reason = (
            f"since rank {who} was repaired at boundary {repaired_at} the ranks hold different weights at boundary "
            f"{boundary} ({what}): ttprun's repair has missed something that the steps use"
        )
        self._mismatch(slot, reason)

    def _mismatch(self, slot: Row, what: str) -> None:
        self._node.report_mismatch(slot.rank, self._node.job.generation, Reason("other-weights", what))

    def _note_replicas(self, replicas: Replicas, boundary: int) -> None:
        """It is known who is a replica of whom: the machine, the ranks and the operator hear what is new."""
        node = self._node
        replicas = replace(replicas, names={key: self._names.get(key, key) for key in replicas.unequal})
        self._looks = replace(self._looks, replicas=replicas)
        before = node.job.replicas
        if replicas == before:
            return
        node.advance(recovery.RanksCompared(at_s=time.monotonic(), replicas=replicas))
        if replicas.unequal == before.unequal:
            return
        node.log("shards_found", boundary=boundary, names=replicas.all_names, groups=replicas.groups)
        if not replicas.single_holders or self._mirrors.why_off:
            logger.warning("%s", self._cost_of(replicas))
        else:
            self._say_mirrored()
        for slot in node.slots:
            self.report_owners(slot)
        if replicas.single_holders:
            self._times.take_one_at_once()

    def note_mirrored(self, slot: Row, message: from_rank.StateMirrored) -> None:
        """A rank has mirrored its state for the first time, or cannot."""
        node, mirrored = self._node, self._looks.replicas.mirrored
        node.log("state_mirrored", rank=slot.rank, **structs.asdict(message))
        self._mirror_reports[slot.rank] = message
        mirrored = mirrored - {slot.rank} if message.why_not else mirrored | {slot.rank}
        self._looks = replace(self._looks, replicas=replace(self._looks.replicas, mirrored=mirrored))
        node.advance(recovery.RanksCompared(at_s=time.monotonic(), replicas=self._looks.replicas))
        self._say_mirrored()
        self._write_topology()
        if message.why_not and slot.rank not in self._looks.replicas.single_holders:
            for other in node.slots:  # of this one no results are kept: all keep what these are made of
                self.report_owners(other)

    def note_mirror_copied(self, slot: Row, message: from_rank.MirrorCopied) -> None:
        """A rank of the next node keeps another one's mirror, or cannot."""
        self._node.log("mirror_copied", rank=slot.rank, **structs.asdict(message))
        if not message.why_not:
            self._not_copied.discard(message.of)
            return
        self._not_copied.add(message.of)
        logger.warning(
            "the mirror of rank %d, which takes %s, is not kept on %s: %s (%s may be used for all that it keeps, "
            "--buddy-memory); if the node of rank %d is lost, %s",
            *(message.of, in_words(message.bytes), self._node.peers.name_of(self._node.peers.node_of(slot.rank))),
            *(message.why_not, in_words(message.limit_bytes), message.of, recovery.cost_of_a_loss(self._node.job)),
        )

    def lose_mirrors(self, ranks: Collection[int]) -> None:
        """The node of these ranks is gone, with their mirrors; the next one may keep copies of them."""
        peers, mirrored, gone = self._node.peers, self._looks.replicas.mirrored, {*ranks}
        if self._node.keeps_mirrors_twice:
            gone = {rank for rank in ranks if not peers.is_connected((peers.node_of(rank) + 1) % peers.size)}
            gone |= self._not_copied & {*ranks}
        if mirrored.isdisjoint(gone):
            return
        self._looks = replace(self._looks, replicas=replace(self._looks.replicas, mirrored=mirrored - gone))
        self._node.advance(recovery.RanksCompared(at_s=time.monotonic(), replicas=self._looks.replicas))

    @property
    def _awaits_mirrors(self) -> bool:
        """Some rank that alone holds something has not answered yet whether it can mirror that."""
        return not self._mirrors.why_off and not self._looks.replicas.single_holders <= self._mirror_reports.keys()

    def _say_mirrored(self) -> None:
        """Report, once each rank has answered, what is mirrored of what it alone holds, and what the rest costs."""
        replicas, reports = self._looks.replicas, self._mirror_reports
        if self._awaits_mirrors:
            return
        by_reason: dict[str, list[int]] = {}  # why they are not mirrored, or "" -> ranks
        for rank in sorted(replicas.single_holders):
            by_reason.setdefault(reports[rank].why_not, []).append(rank)
        mirrored = by_reason.pop("", [])
        said = []
        if mirrored:
            size = in_words(sum(reports[rank].bytes for rank in mirrored))
            where = ""
            if self._node.keeps_mirrors_twice:
                where = ", and once more on the next node"
            elif self._node.peers.size > 1:
                where = ", lost with its node (not so: --buddy node)"
            said.append(f"{_hold(mirrored)}: mirrored in {size} of memory{where} (--buddy off to save it)")
        for why_not, ranks in by_reason.items():
            size_bytes = sum(reports[rank].bytes for rank in ranks)
            limit = sum(reports[rank].limit_bytes for rank in ranks)
            sizes = (
                f": {in_words(size_bytes)}, and {in_words(limit)} may be used (--buddy-memory)" if size_bytes else ""
            )
            said.append(f"{_hold(ranks)}, not mirrored: {why_not}{sizes}")
        text = f"{self._finding(replicas)}; {'; '.join(said)}"
        if text == self._said_of_mirrors:
            return
        self._said_of_mirrors = text
        logger.warning("%s", f"{text}; {self._cost_without_source()}" if by_reason else text)
        why_no_step = next((reports[rank].why_no_step for rank in mirrored if reports[rank].why_no_step), "")
        if why_no_step and not self._has_said_no_step:
            self._has_said_no_step = True
            logger.warning("inside its step a rank is not replaced: %s; %s", why_no_step, self._cost_without_source())

    def note_collective_steps(self, slot: Row, message: from_rank.CollectiveStep) -> None:
        """An optimizer communicates inside step(): a lost rank's state can only come from its mirror."""
        if self._looks.replicas.has_collective_steps:
            return
        self._looks = replace(self._looks, replicas=replace(self._looks.replicas, has_collective_steps=True))
        self._node.advance(recovery.RanksCompared(at_s=time.monotonic(), replicas=self._looks.replicas))
        self._share_out_mirrors()

    def _share_out_mirrors(self) -> None:
        """Let the ranks that hold what no other one does keep mirrors, and HSDP's the results of their reductions."""
        self._is_hybrid = self._looks_hybrid()
        singles, ranks = self._looks.replicas.single_holders, {slot.rank for slot in self._node.slots}
        of_results = ranks - singles if self._is_hybrid else set()
        if self._mirrors.share_out({rank: self._weights.get(rank, 0) for rank in singles | of_results}, of_results):
            for rank in singles | of_results:
                self.report_owners(self._node.slots[rank])

    def _looks_hybrid(self) -> bool:
        """Each rank has a replica, and its shards are of a group on its own node: whoever loses a node loses the group.

        What the members of such a group have put into a reduction only they need. Looked at once a comparison.
        """
        replicas, node_of = self._looks.replicas, self._node.peers.node_of
        if not replicas.shards or replicas.single_holders:
            return False
        alike = {rank: ranks[0] for ranks in replicas.groups for rank in ranks}
        meshes = {tuple(group.ranks) for groups in self._groups.values() for group in groups if group.dimension}
        sharded = [ranks for ranks in meshes if len({alike[rank] for rank in ranks}) > 1]
        return bool(sharded) and all(len(set(map(node_of, ranks))) == 1 for ranks in sharded)

    def _write_topology(self) -> None:
        """Let `ttprun topology` know who holds what."""
        node = self._node
        groups = itertools.chain.from_iterable(self._groups.values())
        replicas = self._looks.replicas
        mirrors = {rank: self._mirror_reports[rank].bytes for rank in replicas.mirrored & self._mirror_reports.keys()}
        text = topology_of(replace(node.job, replicas=replicas), groups, mirrors).to_json()
        with contextlib.suppress(OSError):  # the status says already that the run's files cannot be written
            replace_file(node.run.topology, text)
        node.peers.to_all(node_messages.Published("topology", text))

    def names_of(self, keys: Iterable[str]) -> str:
        """What the script calls these parameters, the first few."""
        return in_short([self._names.get(key, key) for key in keys])

    def why_not_alike(self, replicas: Replicas, shares: Mapping[int, Share]) -> str:
        """Why what ranks have written is no state of one model: replicas hold different values; "" if they do not."""
        keys = replicas.contradicted_by({rank: share.digests for rank, share in shares.items()})
        differ = "ranks that were replicas of each other hold different values of"
        return f"{differ} {self.names_of(keys)}" if keys else ""

    def look_soon(self, boundary: int) -> None:
        """Replicas have been found to differ: all ranks are asked for a full look at one boundary, a little later."""
        for slot in self._node.slots:
            slot.send_if_present(to_rank.LookAt(boundary + LOOK_AHEAD))

    def report_owners(self, slot: Row) -> None:
        """Let a rank know what not all ranks hold alike, which it must write into a snapshot itself, or mirror."""
        if order := self._mirrors.order_for(slot.rank):
            self._wire.order(slot.rank, order)
        is_none_alike = all(len(ranks) == 1 for ranks in self._looks.replicas.groups)
        keep_results = self._is_hybrid and not self._mirrors.why_off
        keep_results = keep_results and not any(report.why_not for report in self._mirror_reports.values())
        # Results of operations are in no copy of a mirror: the others keep what they had put into them.
        if self._looks.replicas.groups:
            may = (is_none_alike or keep_results) and not self._node.keeps_mirrors_twice
            slot.send_if_present(to_rank.DropReduced(may))
        owners = self._looks.replicas.differing
        if owners:
            slot.send_if_present(to_rank.NotAlike({key: list(ranks) for key, ranks in owners.items()}))

    def _finding(self, replicas: Replicas) -> str:
        """Which parameters not all ranks hold alike."""
        names = replicas.all_names
        several = len(names) > 1
        if replicas.differing:
            differ = "parameters or their" if several else "parameter or its"
            return f"{len(names)} {differ} optimizer state differ between the ranks ({in_short(names)})"
        are = "parameters are" if several else "parameter is"
        return f"{len(names)} {are} sharded over the ranks ({in_short(names)})"

    def _cost_of(self, replicas: Replicas) -> str:
        """What the operator must know of ranks that are no replicas of each other."""
        finding, why_off = self._finding(replicas), self._mirrors.why_off
        if not replicas.single_holders:
            groups = " and ".join(", ".join(map(str, ranks)) for ranks in replicas.groups)
            return f"{finding}: the ranks {groups} hold the same, and a lost rank is repaired from those of its group"
        finding = f"{finding}: no other rank holds what such a rank holds"
        return f"{finding}, so none can be replaced (--buddy: {why_off}); {self._cost_without_source()}"

    def _cost_without_source(self) -> str:
        """What the loss of a rank costs now whose state no other rank holds."""
        job = self._node.job
        cost = f"if one is lost now, {recovery.cost_of_a_loss(job)}"
        if may_rewind(job):
            return cost
        if self._times.is_off or "rewind" not in job.settings.rungs:
            return f"no snapshots are taken ({self._times.why_off or '--snapshot-every'}), and {cost}"
        return f"no snapshot is taken yet (--snapshot-every {self._node.config.snapshot_every}), and {cost}"

    def note_snapshot(self) -> None:
        """There is a snapshot to which all ranks can go back, and there was none."""
        job = self._node.job
        if job.replicas.needs_snapshots and may_rewind(job) and not self._awaits_mirrors:
            cost, most_lost = recovery.cost_of_a_loss(job), self._times.most_lost
            at_most = f": {most_lost}" if most_lost else ""
            logger.warning("the first snapshot is taken: if a rank is lost, %s%s", cost, at_most)
        self._write_topology()

    def _answer_divergence(self, slot: Row, divergence: Divergence) -> None:
        """Replica peers hold different weights, though they were alike and have had the same gradients."""
        new = [odd for odd in (self._node.slots[rank] for rank in divergence.ranks) if not odd.divergence]
        if not new and divergence.ranks:
            return  # it has been ordered to stop, and is on its way there
        self._node.log("replicas_diverged", **asdict(divergence))
        reason = divergence.sentence
        ranks, repaired_at = self._repaired
        refutes_repair = (
            bool(ranks) and divergence.boundary <= repaired_at + PROOF_STEPS and {*divergence.ranks} <= {*ranks}
        )
        if refutes_repair:
            self._refuse_repair(slot, divergence.boundary, divergence.held)
            return
        if not divergence.ranks:
            self._mismatch(slot, reason)
            return
        for odd in new:
            odd.divergence = divergence.sentence
            odd.send(to_rank.StopDivergent())


def _hold(ranks: list[int]) -> str:
    """The beginning of a sentence on what they hold."""
    who = in_short([*map(str, ranks)], _MOST_RANKS)
    return f"{f'rank {who} holds' if len(ranks) == 1 else f'ranks {who} each hold'} what no other rank holds"
