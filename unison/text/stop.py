"""Stop strings over streamed text, whatever the pieces it comes in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unison.core.errors import RequestError


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    The match that wins is the one whose last character comes first; of several that end there, the
    longest. So the outcome is a function of the text alone, never of how it was cut into pieces,
    and generation ends with the token that completes it. An Aho-Corasick automaton reads each
    character once: cost is linear in the text, whatever the number of stop strings.

    Raises RequestError where a stop string is empty or no string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError(f"stop={stops!r} must be a sequence of strings, not a string")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop contains {stop!r}; each stop string must be a non-empty string")
        self._nodes = _build(stops)
        self._node = self._nodes[0]
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, if any."""
        return self._matched

    def push(self, text: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Take the next piece: (text that is safe to emit, the stop string found or None).

        With may_match off, stop strings that end in this piece are passed over; one that begins in it
        may still be completed later.

        Held back is exactly the longest tail that may still begin a stop string. Once a stop was
        found, all further text is trimmed and the same stop is returned.
        """
        if self._matched is not None:
            return "", self._matched
        if len(self._nodes) == 1:
            return text, None
        buffer = self._held + text
        node = self._node
        for i in range(len(self._held), len(buffer)):
            node = _step(self._nodes[0], node, buffer[i])
            if may_match and node.match is not None:
                self._matched, self._held = node.match, ""
                return buffer[: i + 1 - len(node.match)], node.match
        safe = len(buffer) - node.depth
        self._node, self._held = node, buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """The text held back, when no more is to come; empty after a match."""
        held, self._held, self._node = self._held, "", self._nodes[0]
        return held


class _Node:
    """A prefix of some stop string; ``fail`` is its longest proper suffix that is one too."""

    __slots__ = ("children", "depth", "fail", "match")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.depth = depth
        self.fail: _Node | None = None
        self.match: str | None = None


def _build(stops: Iterable[str]) -> list[_Node]:
    """All nodes, breadth first, the root at index 0."""
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.match = stop
    nodes = [root]
    for node in nodes:
        for character, child in node.children.items():
            child.fail = root if node.fail is None else _step(root, node.fail, character)
            if child.match is None:
                child.match = child.fail.match
            nodes.append(child)
    return nodes


def _step(root: _Node, node: _Node, character: str) -> _Node:
    current: _Node | None = node
    while current is not None:
        found = current.children.get(character)
        if found is not None:
            return found
        current = current.fail
    return root
