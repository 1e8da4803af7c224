"""A model whose weights went bad: its requests end with an error, never with a token."""

from __future__ import annotations

import math

import pytest

from tests.engine.support import answer_of, assert_idle, assert_works, make_engine, naive_answer, request
from unison.core.errors import NonFiniteError, NonFiniteLogitsError
from unison.core.sampling import SamplingParams
from unison.models.decoder import Decoder


def poisoned(model: Decoder, token: int = 77) -> Decoder:
    """Every sequence with ``token`` in it comes to logits of NaN."""
    model.embed.data[token] = math.nan
    return model


def test_logits_of_nan_end_their_request_with_an_error_and_no_other(own_model: Decoder) -> None:
    clean = [naive_answer(own_model, request("n", [4, 5], max_new_tokens=6, seed=seed)) for seed in (1, 2)]
    engine = make_engine(poisoned(own_model))
    engine.add_request(request("good", [4, 5], max_new_tokens=6, seed=1))
    engine.add_request(request("bad", [77, 5], max_new_tokens=6))
    with pytest.raises(NonFiniteLogitsError, match=r"logits of 1 requests \(bad\).*weight version 0") as failure:
        engine.run()
    assert isinstance(failure.value, NonFiniteError)
    (partial,) = failure.value.outputs
    assert (partial.request_id, partial.token_ids, partial.logprobs, partial.finish_reason) == ("bad", [], [], "abort")
    (output,) = engine.run()
    assert answer_of(output) == clean[0]
    assert engine.stats.num_sampled_tokens == 6
    assert_idle(engine)
    # The pages that held NaN are used again.
    engine.add_request(request("next", [4, 5], max_new_tokens=6, seed=2))
    assert answer_of(engine.run()[0]) == clean[1]


def test_a_request_that_breaks_on_its_way_tells_what_it_had_sampled(own_model: Decoder) -> None:
    wanted = request("r", max_new_tokens=8)
    tokens, logprobs = naive_answer(own_model, wanted)
    engine = make_engine(poisoned(own_model, token=tokens[4]))
    engine.add_request(wanted)
    with pytest.raises(NonFiniteLogitsError) as failure:
        engine.run()
    (partial,) = failure.value.outputs
    assert answer_of(partial) == (tokens[:5], logprobs[:5])
    assert_idle(engine)


def test_generate_over_broken_weights_leaves_nothing_behind(own_model: Decoder) -> None:
    engine = make_engine(poisoned(own_model))
    with pytest.raises(NonFiniteLogitsError):
        engine.generate([[1], [77], [2]], SamplingParams(n=2))
    assert_works(engine)
