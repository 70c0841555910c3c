"""What was sent and not yet received, found by what it holds; and how two descriptions differ."""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from typing import Any

from halos.core.messages import Event, NodeId, Received


class Mail:
    """Messages and notices that were sent and not yet received, by what they hold."""

    def __init__(self) -> None:
        self._sent = 0
        self._boxes: dict[NodeId, dict[str, deque[tuple[int, Event]]]] = defaultdict(dict)
        self._newest: dict[tuple[NodeId, str | None], int] = {}  # received, by receiver and sender

    def put(self, node: NodeId, event: Event, described: dict[str, Any]) -> None:
        self._sent += 1
        box = self._boxes[node].setdefault(text_of(described), deque())
        box.append((self._sent, event))

    def take(self, node: NodeId, described: dict[str, Any]) -> Event | None:
        """The oldest that is equal."""
        text = text_of(described)
        box = self._boxes[node].get(text)
        if box is None:
            return None
        number, event = box.popleft()
        if not box:
            del self._boxes[node][text]
        pair = node, described.get("sender")
        self._newest[pair] = max(number, self._newest.get(pair, 0))
        return event

    def alike(self, node: NodeId, described: dict[str, Any]) -> dict[str, Any] | None:
        """The oldest of the same kind and sender after the last one that was received."""
        newest = self._newest.get((node, described.get("sender")), 0)
        waiting = sorted((box[-1][0], text) for text, box in self._boxes[node].items())
        for number, text in waiting:
            other: dict[str, Any] = json.loads(text)
            if number > newest and _kind(other) == _kind(described):
                return other
        return None

    def overtaken(self) -> Counter[NodeId]:
        """How many of each sender's still wait although a later one was received."""
        return Counter(
            event.sender
            for node, boxes in self._boxes.items()
            for box in boxes.values()
            for number, event in box
            if isinstance(event, Received) and number < self._newest.get((node, event.sender), 0)
        )


def first_difference(recorded: Any, came: Any, at: str = "") -> tuple[str, Any, Any]:
    """Where two JSON values first differ, and what each has there; ``None`` is nothing."""
    if isinstance(recorded, dict) and isinstance(came, dict):
        pairs = {key: (recorded.get(key), came.get(key)) for key in {**recorded, **came}}
        named = {f"{at}.{key}" if at else key: pair for key, pair in pairs.items()}
    elif isinstance(recorded, list) and isinstance(came, list) and len(recorded) == len(came):
        named = {f"{at}[{i}]": pair for i, pair in enumerate(zip(recorded, came, strict=True))}
    else:
        return at, recorded, came
    for name, (mine, theirs) in named.items():
        if text_of(mine) != text_of(theirs):
            return first_difference(mine, theirs, name)
    return at, recorded, came


def text_of(value: Any) -> str:
    """Equal for equal values, with NaN equal to itself."""
    return json.dumps(value, sort_keys=True)


def _kind(event: dict[str, Any]) -> tuple[Any, ...]:
    content = event.get("message") or event.get("notice") or {}
    return event["type"], event.get("sender"), content.get("type")
