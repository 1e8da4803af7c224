"""What a source holds, in a few bytes: enough to notice at resume that the data has changed."""

from __future__ import annotations

import hashlib
import json

from unison.data.source import PromptSource, identity_of


def source_digest(source: PromptSource) -> str:
    """Digest of the row ids, prompts and labels in their order; of a generated source, of its identity."""
    digest = hashlib.blake2b(digest_size=16)
    identity = identity_of(source)
    if identity is not None:
        digest.update(f"identity {identity}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
    for index in range(len(source)):
        row = source[index]
        # A label of a type of the user's own counts by its type alone: its repr may hold an address.
        text = json.dumps([row.row_id, row.prompt, row.label], default=lambda value: type(value).__qualname__)
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()
