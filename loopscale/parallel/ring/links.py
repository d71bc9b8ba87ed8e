"""The channels between neighbouring stages of the ring.

States travel home -> stages 1 .. p-1 -> home, gradients the other way. Each direction of each neighbour pair has a channel
of its own: with two stages both neighbours are the same rank, and messages of different directions that share one can be
taken for each other without any error. A receiver takes messages in its sender's planned order and
keeps those that it does not need yet; receives are posted ahead, so that messages travel while the stage computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from loopscale.parallel.ring.plan import Message, MessageKind, Plan
from loopscale.parallel.waits import Waits

POSTED = 2
"""Receives posted ahead on a channel."""


class Links:
    """The links of one rank to the stages before and behind it; with one stage, a table of what it hands to itself.

    ``ring``: global ranks of the stages in order, this one among them. Making links is a collective of all ranks.
    """

    def __init__(self, ring: Sequence[int], rank: int, device: torch.device, timeout: timedelta, waits: Waits):
        self.stage, self._device = ring.index(rank), device
        self._kept: dict[Message, Tensor] = {}
        self._senders: dict[MessageKind, _Sender] = {}
        self._receivers: dict[MessageKind, _Receiver] = {}
        self.bytes_sent = 0
        p = len(ring)
        for kind in MessageKind if p > 1 else ():
            # Two groups over all ranks, by turns: with two stages the way there and the way back join the same two ranks.
            groups = [_group(timeout, device) for _ in range(2)]
            for s, ahead in ((s, (s + 1) % p) for s in range(p)):
                source, target = (s, ahead) if kind is MessageKind.STATE else (ahead, s)
                if self.stage == source:
                    self._senders[kind] = _Sender(groups[s % 2], ring[target], waits)
                elif self.stage == target:
                    self._receivers[kind] = _Receiver(groups[s % 2], ring[source], waits)
        self._warm_up()

    @classmethod
    def alone(cls) -> Links:
        """The links of a ring of one stage."""
        return cls([0], 0, torch.device("cpu"), timedelta(), Waits(torch.device("cpu")))

    def open(self, plan: Plan, shape: Callable[[int], Sequence[int]]) -> None:
        """Begins ``plan``; ``shape`` gives the shape of a microbatch's messages, fp32."""
        messages = plan.messages(self.stage)
        expected = {MessageKind.STATE: messages.states_received, MessageKind.GRADIENT: messages.gradients_received}
        for kind, receiver in self._receivers.items():
            receiver.open([(m, torch.Size(shape(m.microbatch))) for m in expected[kind]], self._device)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Hands ``tensor`` on; it must not change afterwards."""
        if not self._senders:
            self._kept[message] = tensor
            return
        self.bytes_sent += tensor.numel() * tensor.element_size()
        self._senders[message.kind].send(message.microbatch, tensor.contiguous())

    def take(self, message: Message) -> Tensor:
        """Waits for what the neighbour sends as ``message``."""
        while message not in self._kept:
            arrived, tensor = self._receivers[message.kind].next()
            self._kept[arrived] = tensor
        for sender in self._senders.values():
            sender.answered(message.microbatch)
        return self._kept.pop(message)

    def close(self) -> None:
        """Ends a plan: everything sent has left."""
        for sender in self._senders.values():
            sender.finish()
        assert not self._kept, f"messages nobody took: {list(self._kept)}"

    def _warm_up(self) -> None:
        """One message each way, since backends connect at the first use: all senders first, none of them waits."""
        probe = torch.zeros(1, device=self._device)
        for sender in self._senders.values():
            sender.send(0, probe)
        for receiver in self._receivers.values():
            receiver.open([(Message(MessageKind.STATE, 0, 0), probe.shape)], self._device)
            receiver.next()
        self.close()


def _group(timeout: timedelta, device: torch.device) -> dist.ProcessGroup:
    group = dist.new_group(timeout=timeout, backend="nccl" if device.type == "cuda" else "gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


class _Sender:
    """A tensor must live until it has left, and gloo tells of that only when waited for. A microbatch is a chain of
    operations: whoever takes a message about it knows that all it has sent about it before has arrived."""

    def __init__(self, group: dist.ProcessGroup, target: int, waits: Waits):
        self._group, self._target, self._waits = group, target, waits
        self._leaving: dict[int, list[tuple[dist.Work, Tensor]]] = {}  # by microbatch

    def send(self, microbatch: int, tensor: Tensor) -> None:
        work = dist.isend(tensor, self._target, group=self._group)
        assert work is not None
        self._leaving.setdefault(microbatch, []).append((work, tensor))

    def answered(self, microbatch: int) -> None:
        """Lets go of what was sent about ``microbatch``."""
        for work, _ in self._leaving.pop(microbatch, ()):
            with self._waits.waiting(self._target):
                work.wait()

    def finish(self) -> None:
        for microbatch in list(self._leaving):
            self.answered(microbatch)


class _Receiver:
    def __init__(self, group: dist.ProcessGroup, source: int, waits: Waits):
        self._group, self._source, self._waits = group, source, waits
        self._expected: deque[tuple[Message, torch.Size]] = deque()
        self._posted: deque[tuple[Message, dist.Work, Tensor]] = deque()
        self._device = torch.device("cpu")

    def open(self, expected: Sequence[tuple[Message, torch.Size]], device: torch.device) -> None:
        self._expected, self._device = deque(expected), device
        self._post()

    def next(self) -> tuple[Message, Tensor]:
        message, work, tensor = self._posted.popleft()
        with self._waits.waiting(self._source):
            work.wait()
        self._post()
        return message, tensor

    def _post(self) -> None:
        while self._expected and len(self._posted) < POSTED:
            message, shape = self._expected.popleft()
            tensor = torch.empty(shape, device=self._device)
            work = dist.irecv(tensor, self._source, group=self._group)
            assert work is not None
            self._posted.append((message, work, tensor))
