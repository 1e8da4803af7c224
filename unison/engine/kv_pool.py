"""Keys and values of all running sequences, in pages that may lie anywhere.

A page is the unit of accounting and reuse: ``page_size`` tokens of one sequence, from a position that is a
multiple of it. It is made of attention blocks, which decoding reads in place. Prompts that are shared are
shared by page; nothing is ever moved.

Layout of each layer: keys and values [blocks, K kv heads, KEY_BLOCK, D head dim].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from unison.core.errors import CapacityError
from unison.models.spec import DecoderSpec
from unison.ops.attention import LayerCache
from unison.ops.blocks import KEY_BLOCK


class KvPool:
    """Pages of keys and values, handed out lowest address first.

    Pages are counted: a sequence holds one reference to each of its pages, and so does every node of
    the prefix cache that spans it. A page is free when nobody holds it.
    """

    def __init__(
        self, spec: DecoderSpec, num_tokens: int, page_size: int, dtype: torch.dtype, *, poison_freed: bool = False
    ) -> None:
        if page_size < 1 or page_size % KEY_BLOCK:
            raise ValueError(f"page_size={page_size} is no multiple of {KEY_BLOCK}, the keys of an attention block")
        self.page_size = page_size
        self.num_pages = -(-num_tokens // page_size)
        self._blocks_per_page = page_size // KEY_BLOCK
        num_blocks = self.num_pages * self._blocks_per_page
        self._shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, KEY_BLOCK, spec.head_dim)
        self._dtype = dtype
        self._held = torch.empty(self._shape, dtype=dtype)
        self.layers: list[LayerCache] = self._layers()
        self._poison_freed = poison_freed
        self._references = np.zeros(self.num_pages, dtype=np.int32)
        self._owners = np.zeros(self.num_pages, dtype=np.int32)
        """References of sequences; the others are the prefix cache's."""

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Memory that all pages take."""
        return math.prod(self._shape) * self._dtype.itemsize

    def release_memory(self) -> int:
        """Free the memory of all pages, none of which may be in use; the bytes freed. The books stay."""
        if (self._references > 0).any():
            raise ValueError(f"{int((self._references > 0).sum())} pages are in use; their memory cannot be freed")
        freed = self._held.numel() * self._held.element_size()
        self.layers = []
        self._held = self._held.new_empty(0)
        return freed

    def restore(self) -> None:
        """Take the memory of all pages again, after ``release_memory``."""
        self._held = torch.empty(self._shape, dtype=self._dtype)
        self.layers = self._layers()

    @property
    def num_free_pages(self) -> int:
        return int((self._references == 0).sum())

    @property
    def num_cached_pages(self) -> int:
        """Pages that only the prefix cache holds."""
        return int(((self._owners == 0) & (self._references > 0)).sum())

    @property
    def num_owned_pages(self) -> int:
        """Pages that sequences hold."""
        return int((self._owners > 0).sum())

    @property
    def num_shared_pages(self) -> int:
        """Pages that several sequences hold."""
        return int((self._owners > 1).sum())

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def check_fits(self, num_tokens: int) -> int:
        """Pages of num_tokens. Raises CapacityError where even the empty pool has too few."""
        needed = self.pages_for(num_tokens)
        if needed > self.num_pages:
            raise CapacityError(
                f"{num_tokens} tokens of keys and values need {needed} pages of {self.page_size}; "
                f"the pool has {self.num_pages} in all; raise engine.kv_tokens or ask for fewer tokens"
            )
        return needed

    def blocks_of(self, pages: Sequence[int]) -> list[int]:
        """The attention blocks of pages, in order of position."""
        if self._blocks_per_page == 1:
            return list(pages)
        return [page * self._blocks_per_page + i for page in pages for i in range(self._blocks_per_page)]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` zeroed pages for a sequence, or None where fewer are free."""
        if count < 1:
            raise ValueError(f"{count} pages cannot be allocated; at least one is needed")
        pages = np.flatnonzero(self._references == 0)[:count]
        if len(pages) < count:
            return None
        # Attention reads whole blocks and masks the tail; a mask does not stop 0 x NaN.
        self._fill(pages, 0.0)
        self._references[pages] = 1
        self._owners[pages] = 1
        return [int(page) for page in pages]

    def share(self, pages: Sequence[int]) -> None:
        """One more sequence takes pages that are in use; it may read, not write them."""
        held = self._used(pages)
        self._references[held] += 1
        self._owners[held] += 1

    def free(self, pages: Sequence[int]) -> None:
        """A sequence gives pages back; what the prefix cache or others hold too stays as it is."""
        held = list(pages)
        if not (self._owners[held] > 0).all():
            raise ValueError(f"pages {held} are not all a sequence's")
        self._owners[held] -= 1
        self._drop(held)

    def retain(self, pages: Sequence[int]) -> None:
        """The prefix cache takes one more reference to each page."""
        self._references[self._used(pages)] += 1

    def release(self, pages: Sequence[int]) -> int:
        """The prefix cache drops one reference to each page; the number of pages that became free."""
        return self._drop(self._used(pages))

    def num_only_cached(self, pages: Iterable[int]) -> int:
        """How many of the pages no sequence holds."""
        return int((self._owners[list(pages)] == 0).sum())

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the keys and values of the first num_tokens tokens of one page to another."""
        full, rest = divmod(num_tokens, KEY_BLOCK)
        from_block, to_block = source * self._blocks_per_page, target * self._blocks_per_page
        if full:
            self._held[:, :, to_block : to_block + full] = self._held[:, :, from_block : from_block + full]
        if rest:
            self._held[:, :, to_block + full, :, :rest] = self._held[:, :, from_block + full, :, :rest]

    def check(self, num_cache_references: int, owned: Sequence[Sequence[int]]) -> None:
        """Raise RuntimeError unless the references add up.

        num_cache_references: pages held by the prefix cache, as it counts them. owned: pages of each sequence.
        """
        owners = np.zeros(self.num_pages, dtype=np.int32)
        for pages in owned:
            if len(set(pages)) != len(pages):
                raise RuntimeError(f"a sequence holds a page twice: {list(pages)}")
            owners[list(pages)] += 1
        wrong = np.flatnonzero(owners != self._owners)
        if len(wrong):
            page = int(wrong[0])
            raise RuntimeError(
                f"page {page} has {int(owners[page])} owners and is counted as having {self._owners[page]}"
            )
        others = self._references - owners
        if others.min(initial=0) < 0:
            raise RuntimeError(f"page {int(others.argmin())} is owned but counted as free")
        if int(others.sum()) != num_cache_references:
            raise RuntimeError(f"{int(others.sum())} page references beside the owners', {num_cache_references} known")

    def _layers(self) -> list[LayerCache]:
        return [(layer[0], layer[1]) for layer in self._held]

    def _used(self, pages: Sequence[int]) -> list[int]:
        held = list(pages)
        if not (self._references[held] > 0).all():
            raise ValueError(f"pages {held} are not all in use")
        return held

    def _drop(self, pages: list[int]) -> int:
        self._references[pages] -= 1
        freed = np.asarray(pages, dtype=np.int64)[self._references[pages] == 0]
        if self._poison_freed and len(freed):
            self._fill(freed, float("nan"))
        return len(freed)

    def _fill(self, pages: np.ndarray[tuple[int], np.dtype[np.int64]], value: float) -> None:
        blocks = pages[:, None] * self._blocks_per_page + np.arange(self._blocks_per_page)
        self._held.index_fill_(2, torch.from_numpy(blocks.reshape(-1)), value)
