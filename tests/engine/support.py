"""What the tests of the engine share: requests, an engine that checks itself, and the oracle it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from unison.config.schema import EngineConfig
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.engine.logit_edits import make_edits
from unison.engine.sampler import SamplerRow
from unison.engine.sampler import sample as sample_rows
from unison.models.decoder import Decoder
from unison.ops.padding import EXACT
from unison.ops.plan import packed_plan
from unison.ops.vocab import vocabulary_logits
from unison.text.tokenizer import Tokenizer


def request(
    name: str, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **sampling: Any
) -> GenerationRequest:
    sampling = {"seed": 5, "max_new_tokens": 8} | sampling
    return GenerationRequest(
        request_id=name, prompt_ids=tuple(prompt), output_ids=tuple(output), sampling=SamplingParams(**sampling)
    )


def make_engine(
    model: Decoder,
    *,
    tokenizer: Tokenizer | None = None,
    end_ids: Sequence[int] = (),
    staging: Literal["shadow", "in_place"] = "shadow",
    **config: Any,
) -> Engine:
    settings = {"kv_tokens": 1024, "poison_freed_pages": True} | config
    return Engine(
        model,
        path=EXACT,
        config=EngineConfig(**settings),
        tokenizer=tokenizer,
        end_ids=frozenset(end_ids),
        staging=staging,
    )


def check_pages(engine: Engine) -> None:
    """Each page is free or held, none is lost; sequences hold the pages of their tokens and no more."""
    engine.check()
    sequences = engine.scheduler.running
    held = {page for sequence in sequences for page in sequence.pages}
    ahead = int(engine.config.overlap)  # the page of the next token, where a step is planned before it is drawn
    for sequence in sequences:
        fewest, most = (engine.pool.pages_for(n) for n in (sequence.num_cached, len(sequence.token_ids) + ahead))
        assert fewest <= len(sequence.pages) <= most
    assert all(not sequence.pages for sequence in engine.scheduler.waiting)
    nodes = list(engine.cache._roots.values()) if engine.cache is not None else []
    while nodes:
        node = nodes.pop()
        held.update(node.pages)
        nodes += node.children.values()
    assert engine.pool.num_free_pages == engine.pool.num_pages - len(held)


def assert_idle(engine: Engine) -> None:
    """Nothing is left in the engine, and every page is free."""
    engine.check()
    assert not engine.has_work
    engine.flush_cache()
    assert engine.pool.num_free_pages == engine.pool.num_pages


def assert_works(engine: Engine) -> None:
    """A plain request gets its plain answer: what a test calls after each thing that went wrong."""
    assert_idle(engine)
    expected = naive_answer(engine.model, request("n"))
    ((output,),) = engine.generate([[1, 2, 3]], SamplingParams(seed=5, max_new_tokens=8))
    assert (output.token_ids, output.logprobs) == expected
    assert_idle(engine)


def sample(logits_NV: torch.Tensor, rows: Sequence[SamplerRow]) -> tuple[list[int], list[float]]:
    draws = sample_rows(logits_NV, rows)
    return draws.ids, draws.logprobs


def answer_of(output: GenerationOutput) -> tuple[list[int], list[float]]:
    return output.token_ids, output.logprobs


@torch.no_grad()
def next_logits(model: Decoder, ids: Sequence[int]) -> torch.Tensor:
    """Logits [1, V] after ``ids``: the whole sequence at once, no cache."""
    plan = packed_plan([len(ids)], path=EXACT)
    padding = [0] * (plan.num_rows - len(ids))
    positions = torch.tensor([[*range(len(ids)), *padding]])
    hidden = model(torch.tensor([*ids, *padding]), positions, plan)
    return vocabulary_logits(hidden[len(ids) - 1 : len(ids)], model.head_weight(), EXACT)


def naive_answer(
    model: Decoder, request: GenerationRequest, end_ids: Sequence[int] = (), max_tokens: int | None = None
) -> tuple[list[int], list[float]]:
    """What a request must answer: everything is computed again for each token, alone and without a cache."""
    sampling = request.sampling
    assert sampling.seed is not None
    ids = [*request.prompt_ids, *request.output_ids]
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_ids)}
    budget = min(sampling.max_new_tokens, model.spec.max_positions - len(request.prompt_ids)) - len(request.output_ids)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < (budget if max_tokens is None else min(budget, max_tokens)):
        output = ids[len(request.prompt_ids) :]
        edits = make_edits(sampling, vocab_size=model.spec.vocab_size, prompt_ids=request.prompt_ids, end_ids=ends)
        for token in output if edits is not None else ():
            edits.observe(token)
        forced = sampling.forced_ids[len(output)] if len(output) < len(sampling.forced_ids) else None
        row = SamplerRow(sampling, sampling.seed, len(ids), edits, forced)
        (token,), (logprob,) = sample(next_logits(model, ids), [row])
        ids.append(token)
        tokens.append(token)
        logprobs.append(logprob)
        if token in ends and len(output) + 1 >= max(sampling.min_new_tokens, len(sampling.forced_ids)):
            break
    return tokens, logprobs


def piece_tokenizer(pieces: Sequence[str], *, byte_level: bool = False) -> Tokenizer:
    """A tokenizer whose id i is ``pieces[i]``, joined as they are; with byte_level in GPT-2's stand-ins of bytes."""
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    backend.decoder = decoders.ByteLevel() if byte_level else decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
