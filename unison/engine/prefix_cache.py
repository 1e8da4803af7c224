"""Keys and values that outlive their request: a radix tree over token ids.

A node holds a run of tokens and the pages their keys and values lie in; a path from a root
spells a prefix. Roots are namespaces (weight version, adapter), so what another policy computed can
never be hit. Hits are token-granular, whatever the page size: a match may end inside a node.

The tree holds references to pages. A page is shared by the nodes it spans and by the running
sequence that wrote it; it is free when the last of them lets go.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

Namespace = Hashable
TokenKey = Hashable
"""A token's key: its id, or (id, content hash) where an image stands behind it."""


_SPARE_ENTRIES = 64


class PageHolder(Protocol):
    """What the tree needs of a pool: references to pages."""

    def retain(self, pages: Sequence[int]) -> None: ...

    def release(self, pages: Sequence[int]) -> int:
        """Drop one reference to each page; the number of pages that became free."""
        ...

    def num_only_cached(self, pages: Iterable[int]) -> int:
        """How many of the pages no sequence holds."""
        ...


@dataclass(eq=False, slots=True)
class Node:
    """``tokens`` from position ``start`` on, and the pages that hold them (from page ``start // page_size`` on)."""

    tokens: list[TokenKey]
    start: int
    pages: list[int]
    parent: Node | None
    children: dict[TokenKey, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens, and the pages that hold it. Lock it for as long as they are read.

    The last page may hold less than a page of the prefix; what else lies in it belongs to others.
    """

    num_tokens: int
    pages: tuple[int, ...]
    node: Node


class PrefixCache:
    """match, lock, insert, evict. Knows pages only through ``holder``."""

    def __init__(self, holder: PageHolder, page_size: int) -> None:
        self._holder = holder
        self._page_size = page_size
        self._roots: dict[Namespace, Node] = {}
        self._clock = count(1)
        # Leaves by last use. Entries go stale when a node is used again or grows children; they are
        # dropped or pushed back when they surface, so an eviction costs O(log n), not a walk.
        self._leaves: list[tuple[int, int, Node]] = []
        self._ties = count()
        self._num_nodes = 0
        self.num_tokens = 0
        """Tokens held, over all namespaces."""
        self.num_evicted_tokens = 0

    def match(self, namespace: Namespace, tokens: Sequence[TokenKey], limit: int | None = None) -> Match:
        """The longest cached prefix of tokens[:limit], marked as used now."""
        node = self._root(namespace)
        pages: list[int] = []
        at, end = 0, len(tokens) if limit is None else min(limit, len(tokens))
        now = next(self._clock)
        node.last_used = now
        while at < end:
            child = node.children.get(tokens[at])
            if child is None:
                break
            shared = _common(child.tokens, tokens, at, end)
            child.last_used = now
            # A page that two nodes span was written by the sequence of the lower one, from its first position on.
            first = child.start // self._page_size
            pages[first:] = child.pages[: self._num_pages(child.start, shared)]
            at += shared
            node = child
            if shared < len(child.tokens):
                break
        return Match(at, tuple(pages), node)

    def lock(self, match: Match) -> None:
        """Keep the matched nodes from being evicted."""
        self._add_locks(match.node, 1)

    def unlock(self, match: Match) -> None:
        self._add_locks(match.node, -1)

    def insert(self, namespace: Namespace, tokens: Sequence[TokenKey], pages: Sequence[int]) -> int:
        """Remember that the keys and values of tokens lie in pages, in order.

        What the tree already holds is kept where it is; only the new tail is taken, with references
        to its pages. Returns the number of tokens that were new.
        """
        node, at, now = self._root(namespace), 0, next(self._clock)
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                self._attach(node, list(tokens[at:]), at, pages, now)
                return len(tokens) - at
            shared = _common(child.tokens, tokens, at, len(tokens))
            if shared < len(child.tokens):
                if at + shared == len(tokens):
                    child.last_used = now
                    return 0
                child = self._split(child, shared)
            child.last_used = now
            at += shared
            node = child
        return 0

    def evict(self, num_pages: int) -> int:
        """Let go of least recently used leaves until num_pages became free, or nothing is left to evict.

        Leaves whose pages running sequences hold go last, and only where that frees what lies above them.
        """
        num_freed = 0
        in_use: dict[int, Node] = {}
        """By identity: the heap may name a leaf twice."""
        while num_freed < num_pages:
            leaf = self._pop_leaf()
            if leaf is None:
                leaf = next((node for node in in_use.values() if self._hides_pages(node)), None)
                if leaf is None:
                    break
                del in_use[id(leaf)]
            elif not self._holder.num_only_cached(leaf.pages):
                in_use[id(leaf)] = leaf
                continue
            num_freed += self._drop(leaf)
        for leaf in in_use.values():
            self._push_leaf(leaf)
        return num_freed

    def _hides_pages(self, leaf: Node) -> bool:
        """Whether pages that no sequence holds lie above a leaf, and no lock below them."""
        node = leaf.parent
        while node is not None and node.parent is not None and not node.num_locks:
            if self._holder.num_only_cached(node.pages):
                return True
            node = node.parent
        return False

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget one namespace, or all. Locked nodes are given up by their holders' next unlock."""
        for name in [namespace] if namespace is not None else list(self._roots):
            root = self._roots.pop(name, None)
            if root is not None:
                self._release_below(root)
        self._rebuild_leaves()

    def check(self) -> int:
        """Raise RuntimeError unless the tree is a radix tree and its counts are right.

        Returns the page references its nodes hold, for the pool to compare.
        """
        total, num_references = 0, 0
        for root in self._roots.values():
            stack = list(root.children.items())
            while stack:
                first, node = stack.pop()
                if not node.tokens or node.tokens[0] != first:
                    raise RuntimeError(f"node at position {node.start} hangs under the wrong token")
                if node.parent is None or node.parent.children.get(first) is not node:
                    raise RuntimeError(f"node at position {node.start} is not known to its parent")
                if node.num_locks < sum(child.num_locks for child in node.children.values()):
                    raise RuntimeError(f"node at position {node.start} has fewer locks than its children")
                total += len(node.tokens)
                if len(node.pages) != self._num_pages(node.start, len(node.tokens)):
                    raise RuntimeError(f"node at position {node.start} holds {len(node.pages)} pages")
                num_references += len(node.pages)
                stack += node.children.items()
        if total != self.num_tokens:
            raise RuntimeError(f"the tree holds {total} tokens but counts {self.num_tokens}")
        return num_references

    def _root(self, namespace: Namespace) -> Node:
        return self._roots.setdefault(namespace, Node([], 0, [], None))

    def _num_pages(self, start: int, count: int) -> int:
        """Pages that positions [start, start + count) lie in."""
        return -(-(start + count) // self._page_size) - start // self._page_size

    def _attach(self, parent: Node, tokens: list[TokenKey], start: int, pages: Sequence[int], now: int) -> None:
        first = start // self._page_size
        own = list(pages[first : first + self._num_pages(start, len(tokens))])
        node = Node(tokens, start, own, parent, last_used=now)
        parent.children[tokens[0]] = node
        self._holder.retain(own)
        self.num_tokens += len(tokens)
        self._num_nodes += 1
        self._push_leaf(node)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper half. A page under the cut gains a reference."""
        self._num_nodes += 1
        cut = node.start + at
        pages = node.pages[: self._num_pages(node.start, at)]
        upper = Node(node.tokens[:at], node.start, pages, node.parent, {}, node.num_locks, node.last_used)
        if node.parent is not None:
            node.parent.children[upper.tokens[0]] = upper
        node.pages = node.pages[cut // self._page_size - node.start // self._page_size :]
        if cut % self._page_size:
            self._holder.retain(node.pages[:1])
        node.tokens = node.tokens[at:]
        node.start = cut
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def _add_locks(self, node: Node, change: int) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.num_locks += change
            if at.num_locks < 0:
                raise RuntimeError(f"node at position {at.start} was unlocked more often than locked")
            if at.num_locks == 0 and not at.children:
                self._push_leaf(at)
            at = at.parent

    def _push_leaf(self, node: Node) -> None:
        heapq.heappush(self._leaves, (node.last_used, next(self._ties), node))
        if len(self._leaves) > 2 * self._num_nodes + _SPARE_ENTRIES:
            self._rebuild_leaves()

    def _rebuild_leaves(self) -> None:
        """Keep one entry for each leaf: stale ones hold on to dead nodes and their tokens."""
        leaves, stack = [], list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None and not node.children:
                leaves.append((node.last_used, next(self._ties), node))
        heapq.heapify(leaves)
        self._leaves = leaves

    def _pop_leaf(self) -> Node | None:
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if node.children or node.num_locks or parent is None or parent.children.get(node.tokens[0]) is not node:
                continue
            if used != node.last_used:
                self._push_leaf(node)
                continue
            return node
        return None

    def _drop(self, leaf: Node) -> int:
        parent = leaf.parent
        if parent is None:
            raise RuntimeError("a root cannot be evicted")
        del parent.children[leaf.tokens[0]]
        self._num_nodes -= 1
        leaf.parent = None
        self.num_tokens -= len(leaf.tokens)
        self.num_evicted_tokens += len(leaf.tokens)
        if parent.parent is not None and not parent.children and not parent.num_locks:
            self._push_leaf(parent)
        return self._holder.release(leaf.pages)

    def _release_below(self, root: Node) -> None:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            node.parent, node.children = None, {}
            self._num_nodes -= 1
            self.num_tokens -= len(node.tokens)
            self._holder.release(node.pages)


def _common(node_tokens: Sequence[TokenKey], tokens: Sequence[TokenKey], at: int, end: int) -> int:
    """Length of the common prefix of node_tokens and tokens[at:end]."""
    return common_prefix(node_tokens, tokens, 0, at, min(len(node_tokens), end - at))


def common_prefix(
    first: Sequence[TokenKey], second: Sequence[TokenKey], first_at: int, second_at: int, longest: int
) -> int:
    """How many of the next ``longest`` tokens from first_at and second_at on are equal, before one that is not.

    By halves, for whole stretches are compared many times faster than one by one.
    """
    count = 0
    while longest > 0:
        half = (longest + 1) // 2
        one = first[first_at + count : first_at + count + half]
        other = second[second_at + count : second_at + count + half]
        if list(one) == list(other):
            count += half
            longest -= half
        elif half == 1:
            break
        else:
            longest = half - 1 if half > 1 else 0
    return count
