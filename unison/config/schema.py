"""The typed configuration of every component, kept together. Imports no torch.

Each field carries its doc as ``Meta(description=...)``; a test holds that none is missing.
Checks that need a component (a name in a registry, a setting without effect) belong to that
component's build step; checks between plain numbers are in ``unison.config.checks``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from unison.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, ReferenceConfig
from unison.config.section import Options, Schedule, Section
from unison.config.serving import ServersConfig

Dtype = Literal["auto", "bfloat16", "float32"]
Numerics = Literal["auto", "exact", "fast"]


class RunConfig(Section, frozen=True, kw_only=True):
    dir: Annotated[str | None, Meta(description="Run folder; by default runs/<name>.")] = None
    name: Annotated[str, Meta(description="Name of the run, shown in its folder and its plot.")] = "run"
    seed: Annotated[int, Meta(ge=0, description="Seed of everything random in the run.")] = 0
    threads: Annotated[int, Meta(ge=0, le=4096, description="CPU threads of torch; 0 takes the machine's cores.")] = 0
    fork: Annotated[
        str | None,
        Meta(
            description="Begin from the state of another run at a step, as RUN_FOLDER@STEP; without @STEP its newest."
        ),
    ] = None
    hooks: Annotated[
        list[str], Meta(description="module:object of your own, told of samples, steps, evaluations and checkpoints.")
    ] = []


class ModelConfig(Section, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="Folder of a Hugging Face model, or a short name like smollm2-135m.")]
    dtype: Annotated[Dtype, Meta(description="Compute dtype of rollout and training; auto asks the machine.")] = "auto"
    numerics: Annotated[
        Numerics,
        Meta(description="exact: rollout equals training bit for bit. fast: any kernel. auto: exact where it holds."),
    ] = "auto"


Layout = Literal["unison", "verl", "slime"]


class MixConfig(Section, frozen=True, kw_only=True):
    weight: Annotated[
        float, Meta(gt=0, description="Share of the prompts drawn from this part, relative to the others' weights.")
    ] = 1.0
    source: Annotated[str, Meta(description="As data.source, for this part.")] = "jsonl"
    train: Annotated[str | None, Meta(description="As data.train, for this part.")] = None
    layout: Annotated[Layout, Meta(description="As data.layout, for this part.")] = "unison"
    prompt_key: Annotated[str, Meta(description="As data.prompt_key, for this part.")] = ""
    label_key: Annotated[str | None, Meta(description="As data.label_key, for this part.")] = ""
    metadata_key: Annotated[str | None, Meta(description="As data.metadata_key, for this part.")] = ""
    filter: Annotated[str | None, Meta(description="As data.filter, for this part.")] = None
    options: Annotated[Options, Meta(description="As data.options, for this part.")] = {}


class DataConfig(Section, frozen=True, kw_only=True):
    source: Annotated[
        str,
        Meta(description="jsonl, parquet, datasets (a folder or hub name), reasoning_gym, sums, or module:object."),
    ] = "jsonl"
    train: Annotated[
        str | None, Meta(description="Training file, folder or data set name of the source; path@[a:b] takes a slice.")
    ] = None
    eval: Annotated[
        str | None, Meta(description="Held-out file, folder or data set name of the source; path@[a:b] takes a slice.")
    ] = None
    layout: Annotated[
        Layout,
        Meta(description="Keys of rows: prompt and label (unison), or what verl's or slime's data files call them."),
    ] = "unison"
    prompt_key: Annotated[
        str,
        Meta(
            description="Key of the prompt, a string or a list of chat messages; dots go into nested objects; empty "
            "takes the layout's."
        ),
    ] = ""
    label_key: Annotated[
        str | None,
        Meta(description="Key of the reference answer; null where there is none; empty takes the layout's."),
    ] = ""
    metadata_key: Annotated[
        str | None,
        Meta(
            description="Key of an object whose entries are the row's metadata; null: all other keys are; empty takes "
            "the layout's."
        ),
    ] = ""
    on_bad_row: Annotated[
        Literal["fail", "skip"], Meta(description="A broken row stops the run, or is skipped and counted.")
    ] = "fail"
    filter: Annotated[
        str | None,
        Meta(description="module:function (row) -> bool of your own: training rows it is false for are left out."),
    ] = None
    chat: Annotated[
        bool, Meta(description="Render string prompts as one user turn of the chat template, instead of as they are.")
    ] = False
    system_prompt: Annotated[
        str | None, Meta(description="System message put before chat prompts that have none of their own.")
    ] = None
    template_options: Annotated[
        Options, Meta(description="Arguments of the chat template, e.g. enable_thinking = false.")
    ] = {}
    special_tokens: Annotated[
        Literal["plain", "parse"],
        Meta(description="Control tokens spelt out in a raw prompt: encoded as plain text, or parsed."),
    ] = "plain"
    min_prompt_tokens: Annotated[int, Meta(ge=1, description="Shorter prompts are left out and counted.")] = 1
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="Longer prompts are handled by on_long_prompt.")] = 4096
    on_long_prompt: Annotated[
        Literal["fail", "skip", "truncate_left", "truncate_middle", "truncate_right"],
        Meta(
            description="A prompt over the limit stops the run, is skipped and counted, or (raw prompts only) loses "
            "the tokens on its left, in its middle or on its right."
        ),
    ] = "fail"
    shuffle: Annotated[bool, Meta(description="Shuffle the training prompts anew each epoch.")] = True
    curriculum: Annotated[
        Literal["none", "success_rate"],
        Meta(description="success_rate: in later epochs leave out prompts solved too often or too rarely."),
    ] = "none"
    curriculum_low: Annotated[float, Meta(ge=0, le=1, description="Prompts with a mean reward below it rest.")] = 0.05
    curriculum_high: Annotated[float, Meta(ge=0, le=1, description="Prompts with a mean reward above it rest.")] = 0.95
    curriculum_rest: Annotated[
        int, Meta(ge=1, description="Epochs that a resting prompt is left out before it is tried again.")
    ] = 3
    options: Annotated[
        Options,
        Meta(
            description="Options of the source, e.g. max_operand of sums, dataset of reasoning_gym, split of datasets."
        ),
    ] = {}
    mix: Annotated[
        dict[str, MixConfig], Meta(description="A mixture: parts by name, in place of data.source and data.train.")
    ] = {}


class RewardPartConfig(Section, frozen=True, kw_only=True):
    function: Annotated[str, Meta(description="As reward.function, for this part.")]
    weight: Annotated[float, Meta(description="Its factor in the sum; 0 only logs it.")] = 1.0
    timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=86400)] | None,
        Meta(description="As reward.timeout_s, for this part; null takes that one."),
    ] = None
    options: Annotated[Options, Meta(description="As reward.options, for this part.")] = {}


class RewardConfig(Section, frozen=True, kw_only=True):
    function: Annotated[
        str, Meta(description="Registered reward (exact_answer, ...) or module:function of your own.")
    ] = "exact_answer"
    options: Annotated[Options, Meta(description="Keyword arguments given to the reward function.")] = {}
    parts: Annotated[
        dict[str, RewardPartConfig],
        Meta(description="A weighted sum: parts by name, each logged, in place of reward.function."),
    ] = {}
    isolation: Annotated[
        Literal["process", "none"],
        Meta(description="process: graders run in processes of their own that can be killed. none: in this one."),
    ] = "process"
    timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="Deadline in seconds of one call: a sample, a group or a batch.")
    ] = 10.0
    on_timeout: Annotated[
        Literal["unscorable", "zero"],
        Meta(description="A sample whose grader ran out of time or memory, or died: left out and counted, or given 0."),
    ] = "unscorable"
    workers: Annotated[int, Meta(ge=1, le=256, description="Grader processes that run at once.")] = 2
    memory_mb: Annotated[int, Meta(ge=64, description="Memory limit of one grader process, in MB.")] = 4096


class RolloutConfig(Section, frozen=True, kw_only=True):
    engine: Annotated[
        Literal["in_process", "server"],
        Meta(description="Where samples are drawn: in the trainer's own process, or by servers, as [server] says."),
    ] = "in_process"
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
    function: Annotated[
        str | None, Meta(description="module:function of your own that draws one sample, in place of a single answer.")
    ] = None
    timeout_s: Annotated[
        float,
        Meta(
            gt=0, le=604800, description="Deadline in seconds of one sample under rollout.function, which fails then."
        ),
    ] = 21600.0
    filter: Annotated[
        str | None,
        Meta(description="Which groups are trained: no_contrast drops those scored alike, or module:function."),
    ] = None
    refill: Annotated[
        int, Meta(ge=0, description="Times that prompts are drawn anew in a step for groups the filter has dropped.")
    ] = 0


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


class TrainerConfig(Section, frozen=True, kw_only=True):
    steps: Annotated[int, Meta(ge=0, description="Training steps, each of one rollout.")] = 20
    epochs: Annotated[int, Meta(ge=1, le=1000, description="Passes over the samples of a rollout.")] = 1
    mini_batches: Annotated[
        int, Meta(ge=0, description="Optimizer steps of a pass; 0 derives it from batch_samples.")
    ] = 0
    batch_samples: Annotated[
        int, Meta(ge=0, description="Samples of one optimizer step, the global batch; 0 derives it from mini_batches.")
    ] = 0
    shuffle_samples: Annotated[
        bool, Meta(description="Cut the mini-batches from the samples in a new order in each pass.")
    ] = False
    micro_batch_tokens: Annotated[int, Meta(ge=8, description="Token budget of one forward and backward.")] = 2048
    logprob_chunk_tokens: Annotated[
        int, Meta(ge=8, description="Rows of the vocabulary projection computed at a time.")
    ] = 256
    gradient_checkpointing: Annotated[
        bool, Meta(description="Keep no activations inside a layer, and compute them once more on the way back.")
    ] = False
    learning_rate: Annotated[float, Meta(ge=0, le=1, description="Peak learning rate of AdamW.")] = 1e-6
    schedule: Annotated[Schedule, Meta(description="Course of the learning rate after warm-up.")] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0, description="Optimizer steps of linear warm-up.")] = 0
    min_learning_rate: Annotated[float, Meta(ge=0, description="Where the linear and cosine schedules end.")] = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1, description="AdamW beta1.")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1, description="AdamW beta2.")] = 0.999
    adam_epsilon: Annotated[float, Meta(ge=1e-16, le=1, description="AdamW epsilon.")] = 1e-8
    weight_decay: Annotated[
        float, Meta(ge=0, description="AdamW weight decay, on matrices only (never on norms and biases).")
    ] = 0.0
    max_grad_norm: Annotated[float, Meta(ge=0, description="Clip the global gradient norm; 0 is off.")] = 1.0


class EvalSetConfig(Section, frozen=True, kw_only=True):
    source: Annotated[str, Meta(description="As data.source, for this set.")] = "jsonl"
    path: Annotated[str | None, Meta(description="As data.eval, for this set.")] = None
    layout: Annotated[Layout, Meta(description="As data.layout, for this set.")] = "unison"
    prompt_key: Annotated[str, Meta(description="As data.prompt_key, for this set.")] = ""
    label_key: Annotated[str | None, Meta(description="As data.label_key, for this set.")] = ""
    metadata_key: Annotated[str | None, Meta(description="As data.metadata_key, for this set.")] = ""
    options: Annotated[Options, Meta(description="As data.options, for this set.")] = {}
    reward: Annotated[str | None, Meta(description="Reward function of this set; null takes the run's reward.")] = None
    reward_options: Annotated[Options, Meta(description="Keyword arguments of this set's reward.")] = {}
    problems: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Prompts of this set; null takes all.")] = (
        None
    )
    samples: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None, Meta(description="As eval.samples, for this set.")
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="As eval.temperature, for this set.")
    ] = None
    greedy: Annotated[bool | None, Meta(description="As eval.greedy, for this set.")] = None
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest response in this set; null takes rollout.max_new_tokens."),
    ] = None


class EvalConfig(Section, frozen=True, kw_only=True):
    problems: Annotated[int, Meta(ge=0, description="Held-out prompts per evaluation; 0 is off.")] = 0
    every: Annotated[int, Meta(ge=0, description="Evaluate every so many steps; 0: only before and after.")] = 0
    samples: Annotated[int, Meta(ge=1, le=4096, description="Samples of each prompt in the sampled evaluation.")] = 1
    temperature: Annotated[float, Meta(gt=0, description="Temperature of the sampled evaluation.")] = 1.0
    greedy: Annotated[bool, Meta(description="Also evaluate greedily.")] = True
    confidence: Annotated[float, Meta(gt=0, le=0.999999, description="Level of the confidence interval.")] = 0.95
    before: Annotated[bool, Meta(description="Evaluate once before the first step, as the baseline.")] = True
    pass_k: Annotated[
        list[int], Meta(description="Values of k for pass@k, each at most the samples of a prompt, e.g. [1, 4, 16].")
    ] = []
    pass_threshold: Annotated[float, Meta(description="A sample passes with at least this reward.")] = 1.0
    sets: Annotated[
        dict[str, EvalSetConfig], Meta(description="Further held-out sets by name, beside that of data.eval.")
    ] = {}


class CheckpointConfig(Section, frozen=True, kw_only=True):
    every: Annotated[
        int, Meta(ge=0, description="Save every so many steps; 0: only at the end and when interrupted.")
    ] = 10
    keep_last: Annotated[int, Meta(ge=1, description="Checkpoints kept, newest first.")] = 2
    keep_best: Annotated[int, Meta(ge=0, description="Best checkpoints kept beside them, by best_metric.")] = 1
    best_metric: Annotated[
        str | None,
        Meta(description="Metric of an evaluation, higher is better; null takes the accuracy of the first set."),
    ] = None
    keep_every: Annotated[
        int, Meta(ge=0, description="Checkpoints of every so many steps are kept for good; 0: none.")
    ] = 0
    background: Annotated[bool, Meta(description="Write while the run goes on; false: the run waits for the disk.")] = (
        True
    )
    on_error: Annotated[
        Literal["stop", "warn"], Meta(description="A checkpoint that cannot be written stops the run, or warns.")
    ] = "stop"


class LogConfig(Section, frozen=True, kw_only=True):
    rollouts_per_step: Annotated[int, Meta(ge=0, description="Samples of each step written to rollouts.jsonl.")] = 8
    progress: Annotated[
        Literal["auto", "on", "off"], Meta(description="Progress bar; auto shows it on a terminal.")
    ] = "auto"
    export: Annotated[bool, Meta(description="Export the trained model into the run folder at the end.")] = True
    plot: Annotated[bool, Meta(description="Draw plot.png into the run folder at the end.")] = True
    samples: Annotated[
        bool, Meta(description="Keep every step's samples in the run folder, for unison replay and for reading.")
    ] = True
    trackers: Annotated[
        list[str], Meta(description="Where metrics go beside the run folder: tensorboard, wandb, trackio, mlflow.")
    ] = []
    tracker_options: Annotated[
        Options, Meta(description="Settings of the trackers, e.g. wandb.project or mlflow.tracking_uri.")
    ] = {}


class AlarmConfig(Section, frozen=True, kw_only=True):
    enabled: Annotated[bool, Meta(description="Watch the metrics and say in one sentence what looks wrong.")] = True
    window: Annotated[int, Meta(ge=2, description="Steps over which a drift is judged.")] = 5
    repeat: Annotated[int, Meta(ge=1, description="Steps after which a standing alarm is said again.")] = 20
    mismatch: Annotated[
        float, Meta(gt=0, description="Mean log-prob difference of rollout and training, in nats, under fast numerics.")
    ] = 0.05
    entropy_share: Annotated[
        float, Meta(ge=0, lt=1, description="Entropy below this share of its beginning is a collapse.")
    ] = 0.1
    no_contrast_share: Annotated[float, Meta(gt=0, le=1, description="Share of groups scored alike over a window.")] = (
        0.9
    )
    length_ratio: Annotated[
        float, Meta(gt=1, description="Mean length over, or under 1 by, this multiple of its beginning.")
    ] = 3.0
    truncated_share: Annotated[float, Meta(gt=0, le=1, description="Share of truncated samples over a window.")] = 0.5
    unscorable_share: Annotated[
        float, Meta(gt=0, le=1, description="Share of samples that could not be scored, over a window.")
    ] = 0.2
    grad_norm_ratio: Annotated[
        float, Meta(gt=1, description="Gradient norm over this multiple of the median of the window before.")
    ] = 10.0


class TrainConfig(Section, frozen=True, kw_only=True):
    model: ModelConfig
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    server: ServersConfig = ServersConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: CorrectionConfig = CorrectionConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    alarm: AlarmConfig = AlarmConfig()
