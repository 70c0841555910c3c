"""What a server does toward its parent: push and merge, resume after an outage, ask for samples."""

from __future__ import annotations

from halos.core.downstream import Downstream
from halos.core.ledger import Pending
from halos.core.membership import session_of
from halos.core.messages import (
    Drain,
    Effect,
    FenceStale,
    Grant,
    NodeId,
    Push,
    PushAnswer,
    Refused,
    Resume,
    Resumed,
    Send,
    Tell,
)
from halos.core.server_state import InFlight
from halos.core.tensors import Payload


class Upstream:
    """One server's exchange with ``parent``, over the state that it shares with ``downstream``.

    A session begins with ``Resume`` and its answer, which settle what the parent knows of us;
    whatever is of an earlier session is ignored.
    """

    def __init__(self, parent: NodeId, downstream: Downstream) -> None:
        self.parent = parent
        self.downstream = downstream
        self.name = downstream.name
        self.settings = downstream.settings
        self.accumulation = self.settings.accumulation  # read at every event
        self.state = downstream.state
        self.tensors = downstream.tensors
        self.leasing = downstream.leasing

    # ------------------------------------------------------------ the algorithm

    def push(self) -> list[Effect]:
        """Push once K updates came since the last merge and no push is in flight.

        When nothing is left to issue, what there is goes at once; while the parent is away, nothing
        is cut: only it knows whether we are where it left us.
        """
        state = self.state
        if state.push is not None or not state.resumed:
            return []
        due = state.version >= state.merged_version + self.accumulation
        if not (due or self.leasing.draining) or not state.pending:
            return []
        state.sequence += 1
        return self._cut()

    def _cut(self) -> list[Effect]:
        """Cut ``u = base - theta`` and send it."""
        state = self.state
        assert state.fence is not None
        report = state.pending.to_report()
        state.push = InFlight(state.sequence, state.fence, report)
        state.pending = Pending()
        payload, holds = self.tensors.cut(), self.tensors.holds()
        push = Push(state.sequence, state.fence, state.base_version, report, payload, holds)
        return [Send(self.parent, push)]

    def merge(self, answer: PushAnswer) -> list[Effect]:
        """Blend the parent's model in; what was applied since the cut is dropped or carried."""
        push = self.state.push
        if answer.fence != self.state.fence or push is None or push.sequence != answer.sequence:
            return []  # a repeat, or of an earlier session
        model = self.tensors.whole(answer.payload, answer.against)
        if model is None:  # a session begins with a whole one
            return [Tell(session_of(self.name), FenceStale())]
        carry = self.settings.in_flight == "carry" or self.leasing.exhausted
        self._blend(model, answer.version, carry=carry)
        return []

    def _blend(self, model: Payload, version: int, *, carry: bool) -> None:
        state = self.state
        self.tensors.blend(model, merge_weight=self.settings.merge_weight, carry=carry)
        if not carry:
            state.pending.drop()
        state.push = None
        state.merged_version = state.version
        state.base_version = version

    # ------------------------------------------------------------ the parent comes and goes

    def joined(self, fence: int) -> list[Effect]:
        state = self.state
        state.fence, state.resumed = fence, False
        resume = Resume(
            fence=fence,
            tenure=state.tenure,
            sequence=state.sequence,
            in_flight=state.push is not None,
            base_version=state.base_version,
            granted=self.leasing.state.granted,
            pushed_under=state.push.fence if state.push is not None else 0,
        )
        return [Send(self.parent, resume)]

    def resumed(self, resumed: Resumed, now: float) -> list[Effect]:
        """Go on where the parent knows us to be, or start again.

        An outage costs no work: a push that never arrived is cut again with all work since, and
        what was done while its answer was lost is carried.
        """
        state = self.state
        if resumed.fence != state.fence or state.resumed:
            return []  # of an earlier session, or a repeat
        state.resumed = True
        whole = resumed.payload
        model = self.tensors.whole(whole, None) if whole is not None else None
        if resumed.reset:
            return self._start_again(resumed, model, now)
        effects: list[Effect] = []
        if state.push is not None:
            if model is not None:
                self._blend(model, resumed.version, carry=True)
            else:
                state.pending.add(state.push.report)
                effects = self._cut()  # under the same number
        return effects + self.downstream.serve_all(now)

    def _start_again(self, resumed: Resumed, model: Payload | None, now: float) -> list[Effect]:
        """Our state does not continue what the parent knows: take its model, drop the rest."""
        state = self.state
        if model is not None:
            self.tensors.adopt(model)
            state.pristine = False
        state.tenure, state.sequence = resumed.tenure, resumed.sequence
        state.push, state.pending = None, Pending()
        state.merged_version, state.base_version = state.version, resumed.version
        effects = self.downstream.void()
        state.ready = True
        return effects + self.downstream.open(now)

    def refused(self, refused: Refused) -> list[Effect]:
        if refused.fence != self.state.fence:
            return []  # of an earlier session
        return [Tell(session_of(self.name), FenceStale())]

    # ------------------------------------------------------------ samples

    def ask(self, now: float) -> list[Effect]:
        """Ask the parent for samples when stock is short."""
        state = self.state
        if state.fence is None or not state.resumed:
            return []
        request = self.leasing.next_request(state.fence, now=now)
        return [Send(self.parent, request)] if request is not None else []

    def granted(self, grant: Grant, now: float) -> list[Effect]:
        if grant.fence != self.state.fence or not self.leasing.receive(grant):
            return []
        return self.downstream.serve_all(now)

    def drain(self, drain: Drain, now: float) -> list[Effect]:
        """The parent has nothing left: those who wait get the rest, or are told."""
        if drain.fence != self.state.fence:
            return []
        self.leasing.state.drained_after = drain.granted
        return self.downstream.serve_all(now)
