"""The typed configuration of every component, kept together. Imports no torch.

Each field carries its doc as ``Meta(description=...)``; a test holds that none is missing.
Checks that need a component (a name in a registry, a setting without effect) belong to that
component's build step; checks between plain numbers are in ``unison.config.checks``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["auto", "bfloat16", "float32"]
Numerics = Literal["auto", "exact", "fast"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keywords only, unknown keys refused."""


class RunConfig(Section, frozen=True, kw_only=True):
    dir: Annotated[str | None, Meta(description="Run folder; by default runs/<name>.")] = None
    name: Annotated[str, Meta(description="Name of the run, shown in its folder and its plot.")] = "run"
    seed: Annotated[int, Meta(ge=0, description="Seed of everything random in the run.")] = 0
    threads: Annotated[int, Meta(ge=0, le=4096, description="CPU threads of torch; 0 takes the machine's cores.")] = 0


class ModelConfig(Section, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="Folder of a Hugging Face model, or a short name like smollm2-135m.")]
    dtype: Annotated[Dtype, Meta(description="Compute dtype of rollout and training; auto asks the machine.")] = "auto"
    numerics: Annotated[
        Numerics,
        Meta(description="exact: rollout equals training bit for bit. fast: any kernel. auto: exact where it holds."),
    ] = "auto"


class DataConfig(Section, frozen=True, kw_only=True):
    source: Annotated[
        str, Meta(description="jsonl, a registered procedural source (sums), or a user's module:object.")
    ] = "jsonl"
    train: Annotated[str | None, Meta(description="Training file of the jsonl source.")] = None
    eval: Annotated[str | None, Meta(description="Held-out file of the jsonl source.")] = None
    prompt_key: Annotated[str, Meta(description="Key of the prompt: a string, or a list of chat messages.")] = "prompt"
    label_key: Annotated[str | None, Meta(description="Key of the reference answer; null where there is none.")] = (
        "label"
    )
    on_bad_row: Annotated[
        Literal["fail", "skip"], Meta(description="A broken row stops the run, or is skipped and counted.")
    ] = "fail"
    chat: Annotated[
        bool, Meta(description="Render string prompts as one user turn of the chat template, instead of as they are.")
    ] = False
    special_tokens: Annotated[
        Literal["plain", "parse"],
        Meta(description="Control tokens spelt out in a raw prompt: encoded as plain text, or parsed."),
    ] = "plain"
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="Longer prompts are handled by on_long_prompt.")] = 4096
    on_long_prompt: Annotated[
        Literal["fail", "skip"], Meta(description="A prompt over the limit stops the run, or is skipped and counted.")
    ] = "fail"
    shuffle: Annotated[bool, Meta(description="Shuffle the training prompts anew each epoch.")] = True
    options: Annotated[
        dict[str, int | float | str | bool], Meta(description="Options of a procedural source, e.g. max_operand.")
    ] = {}


class RewardConfig(Section, frozen=True, kw_only=True):
    function: Annotated[
        str, Meta(description="Registered reward (exact_answer, ...) or module:function of your own.")
    ] = "exact_answer"
    options: Annotated[
        dict[str, int | float | str | bool], Meta(description="Keyword arguments given to the reward function.")
    ] = {}


class RolloutConfig(Section, frozen=True, kw_only=True):
    prompts_per_step: Annotated[int, Meta(ge=1, description="Prompts drawn for each training step.")] = 16
    samples_per_prompt: Annotated[int, Meta(ge=1, le=4096, description="Samples of each prompt: the group.")] = 8
    temperature: Annotated[float, Meta(ge=0, description="Sampling temperature.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus; below 1 needs allow_filtered_sampling.")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="Top-k; -1 is off; else needs allow_filtered_sampling.")] = -1
    max_new_tokens: Annotated[int, Meta(ge=1, description="Longest response, in tokens.")] = 128
    stop: Annotated[list[str], Meta(description="Strings that end a response.")] = []
    stop_token_ids: Annotated[
        list[int], Meta(description="Token ids that end a response, beside the model's own.")
    ] = []
    ignore_eos: Annotated[
        bool, Meta(description="Sample on past the model's end tokens, so that every response has max_new_tokens.")
    ] = False
    allow_filtered_sampling: Annotated[
        bool,
        Meta(description="Allow top_p, top_k or temperature 0 in training, which the trainer does not replay."),
    ] = False


class EngineConfig(Section, frozen=True, kw_only=True):
    page_size: Annotated[int, Meta(ge=64, le=4096, multiple_of=64, description="Tokens in a page of the KV pool.")] = 64
    kv_tokens: Annotated[int, Meta(ge=0, description="Size of the KV pool in tokens; 0 sizes it from memory.")] = 0
    max_running: Annotated[int, Meta(ge=1, le=4096, description="Most sequences decoded together.")] = 64
    max_batch_tokens: Annotated[
        int, Meta(ge=8, description="Most tokens of one step: decode rows and prefill chunks together.")
    ] = 2048
    prefill_chunk: Annotated[int, Meta(ge=1, description="Most tokens of one prompt prefilled in one step.")] = 512
    max_waiting: Annotated[int, Meta(ge=1, description="Requests that may wait; more are refused.")] = 100_000
    policy: Annotated[
        Literal["fcfs", "longest_prefix", "priority"],
        Meta(description="Which waiting request runs next; pushed back and long waiting ones go first under all."),
    ] = "fcfs"
    new_token_ratio: Annotated[
        float,
        Meta(
            gt=0, le=1, description="Share of max_new_tokens set aside at admission; 1 reserves it all, never retracts."
        ),
    ] = 0.7
    prefix_cache: Annotated[
        bool, Meta(description="Keep keys and values of finished requests for later ones that begin alike.")
    ] = True
    overlap: Annotated[
        bool, Meta(description="Plan the next step while this one computes; pays where cores are idle meanwhile.")
    ] = False
    prepack_linears: Annotated[
        bool,
        Meta(
            description="Hold a second copy of the weight matrices in their kernel's layout (bfloat16 only): decoding "
            "a few sequences takes a third less time, for the model's size in memory once more."
        ),
    ] = True
    poison_freed_pages: Annotated[
        bool, Meta(description="Debugging: fill freed pages with NaN, so that a stale read shows.")
    ] = False


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="Advantage estimator: grpo.")] = "grpo"
    normalize_std: Annotated[
        bool, Meta(description="Divide the group advantage by the group's sample standard deviation (n - 1).")
    ] = True
    std_epsilon: Annotated[float, Meta(gt=0, description="Added to the standard deviation.")] = 1e-6
    clip_low: Annotated[float, Meta(ge=0, lt=1, description="Lower clip of the ratio: 1 - clip_low.")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="Upper clip of the ratio: 1 + clip_high.")] = 0.28
    kl_coef: Annotated[float, Meta(ge=0, description="Weight of the k3 KL to the reference in the loss; 0 is off.")] = (
        0.0
    )
    truncated: Annotated[
        Literal["mask", "keep"],
        Meta(description="Truncated samples count in their group; mask leaves them out of the loss."),
    ] = "mask"


class TrainerConfig(Section, frozen=True, kw_only=True):
    steps: Annotated[int, Meta(ge=0, description="Training steps; one optimizer step each.")] = 20
    micro_batch_tokens: Annotated[int, Meta(ge=8, description="Token budget of one forward and backward.")] = 2048
    logprob_chunk_tokens: Annotated[
        int, Meta(ge=8, description="Rows of the vocabulary projection computed at a time.")
    ] = 256
    learning_rate: Annotated[float, Meta(ge=0, le=1, description="Peak learning rate of AdamW.")] = 1e-6
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], Meta(description="Course of the learning rate after warm-up.")
    ] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, description="Optimizer steps of linear warm-up.")] = 0
    min_learning_rate: Annotated[float, Meta(ge=0, description="Where the linear and cosine schedules end.")] = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1, description="AdamW beta1.")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="AdamW beta2.")] = 0.999
    adam_epsilon: Annotated[float, Meta(ge=1e-16, le=1, description="AdamW epsilon.")] = 1e-8
    weight_decay: Annotated[
        float, Meta(ge=0, description="AdamW weight decay, on matrices only (never on norms and biases).")
    ] = 0.0
    max_grad_norm: Annotated[float, Meta(ge=0, description="Clip the global gradient norm; 0 is off.")] = 1.0


class EvalConfig(Section, frozen=True, kw_only=True):
    problems: Annotated[int, Meta(ge=0, description="Held-out prompts per evaluation; 0 is off.")] = 0
    every: Annotated[int, Meta(ge=0, description="Evaluate every so many steps; 0: only before and after.")] = 0
    samples: Annotated[int, Meta(ge=1, le=4096, description="Samples of each prompt in the sampled evaluation.")] = 1
    temperature: Annotated[float, Meta(gt=0, description="Temperature of the sampled evaluation.")] = 1.0
    greedy: Annotated[bool, Meta(description="Also evaluate greedily.")] = True
    confidence: Annotated[float, Meta(gt=0, le=0.999999, description="Level of the confidence interval.")] = 0.95


class LogConfig(Section, frozen=True, kw_only=True):
    rollouts_per_step: Annotated[int, Meta(ge=0, description="Samples of each step written to rollouts.jsonl.")] = 8
    progress: Annotated[
        Literal["auto", "on", "off"], Meta(description="Progress bar; auto shows it on a terminal.")
    ] = "auto"
    export: Annotated[bool, Meta(description="Export the trained model into the run folder at the end.")] = True
    plot: Annotated[bool, Meta(description="Draw plot.png into the run folder at the end.")] = True


class TrainConfig(Section, frozen=True, kw_only=True):
    model: ModelConfig
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
