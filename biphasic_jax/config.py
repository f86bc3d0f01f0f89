"""The settings of a run: defaults with their units, what is derived from them, and the one check.

A config is an `ml_collections.ConfigDict`. `resolve` fills what can be derived (steps of phases, warm-up and
decay in steps) and checks everything before anything is built.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from biphasic_jax.errors import UserError
from biphasic_jax.overrides import nearest

SEGMENT_POLICIES = ("documents", "random_split", "row")
LONGEST_ROW = 2**20  # tokens: what attention could ever hold
MOST_TOKENS = 2**31  # a step
SCHEDULE_SHAPES = ("linear", "cosine", "sqrt")
# Keys that may differ between two starts of one run: none of them reaches the weights.
FREE_KEYS = ("data.rows", "data.workers", "mesh", "checkpoint", "log")
MESH_AXES = ("data", "fsdp", "tensor", "sequence")


def default_config() -> ConfigDict:
    """Every key that a config may have, with its default and its unit."""
    c = ConfigDict()
    c.seed = 0  # fixes initial weights, row order and masks

    c.data = ConfigDict()
    c.data.rows = ""  # folder of prepared rows; empty: prepared from `sources` when missing
    c.data.sources = ()  # "PATH[:WEIGHT]", as `prepare --source` takes them
    c.data.tokenizer = ""  # tokenizer.json; empty: trained on `sources`
    c.data.vocab_size = 8192  # of a tokenizer that is trained here, specials included
    c.data.row_length = 512  # tokens
    c.data.segments = "documents"  # what attends to itself: documents, random_split (paper), row
    c.data.validation = 0.01  # share of the documents held out
    c.data.mask_token = "auto"  # a token's name, "add", or "auto": a known name, else added
    c.data.seed = 0  # of the held-out cut and the random splits: part of the rows, not of the run
    c.data.workers = 0  # grain worker processes; the batches do not depend on it

    c.model = ConfigDict()
    c.model.layers = 12
    c.model.width = 768
    c.model.ff_width = 3072
    c.model.heads = 12
    c.model.kv_heads = 12
    c.model.head_size = 64  # apart from width / heads
    c.model.vocab_size = 0  # 0: the tokenizer's; else it must equal the tokenizer's
    c.model.rope_theta = 10_000.0
    c.model.norm_eps = 1e-5
    c.model.tied = False  # one matrix for embedding and head
    c.model.init_std = 0.02
    c.model.dtype = "float32"  # of the computation: float32 or bfloat16; weights stay float32
    c.model.scan_layers = True  # one compiled layer; False unrolls: slower to compile, faster on CPU
    c.model.remat = "none"  # what the backward pass computes again: none, dots, full
    c.model.attention = "auto"  # backend: auto, xla
    c.model.loss_chunk = 1024  # positions whose logits exist at one time

    c.batch = ConfigDict()
    c.batch.rows = 64  # rows a step, over all devices and micro-batches
    c.batch.accumulation = 1  # micro-batches a step

    c.mesh = ConfigDict()  # devices along each axis, for what they split; one may be -1: all that are left
    c.mesh.data = -1  # rows; weights are held whole
    c.mesh.fsdp = 1  # rows, and weights over the model's width: less memory for weights and optimizer
    c.mesh.tensor = 1  # heads, feed-forward width, vocabulary: for models too wide for one device
    c.mesh.sequence = 1  # the length of rows: for rows too long for one device
    c.mesh.slices = 1  # of a multi-slice TPU: what `data` runs over first

    c.budget_steps = 0  # what a phase's `share` is a share of; or
    c.budget_tokens = 0  # the same in tokens
    c.phases = (phase("clm", steps=1000), phase("mlm", steps=3000, mask_rate=0.4))

    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"  # adamw, muon
    c.optimizer.learning_rate = 5e-4  # peak
    c.optimizer.beta1 = 0.9
    c.optimizer.beta2 = 0.95
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.1
    c.optimizer.decay = "matrices"  # what decays: matrices (no norms, no embeddings), all (paper)
    c.optimizer.clip = 1.0  # global norm; 0: none

    c.schedule = ConfigDict()
    c.schedule.span = "plan"  # one warm-up, constant, decay over the plan, or one per phase
    c.schedule.warmup = 0.05  # steps (int), or a share of the span (float below 1)
    c.schedule.decay = 0.05  # the same
    c.schedule.shape = "linear"  # of the decay: linear, cosine, sqrt (1 - sqrt)

    c.init = ConfigDict()
    c.init.checkpoint = ""  # a run or a checkpoint from which the first phase starts
    c.init.mode = "full"  # full: weights, optimizer, step and data position; weights: weights only

    c.loss = ConfigDict()
    c.loss.z_loss = 0.0  # weight of log(Z)^2

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 500  # steps; 0: only at phase ends
    c.checkpoint.minutes = 0.0  # save too when this long has passed; 0: never
    c.checkpoint.keep_last = 2
    c.checkpoint.keep_every = 0  # steps; 0: no further ones are kept
    c.checkpoint.step_zero = False  # keep the state before the first update
    c.checkpoint.asynchronous = True

    c.evaluation = ConfigDict()
    c.evaluation.every = 500  # steps; 0: only at phase ends
    c.evaluation.rows = 256  # held-out rows, at most; 0: all
    c.evaluation.batch_rows = 0  # rows a batch; 0: as in training; no figure depends on it
    c.evaluation.mask_rates = (0.15, 0.4)  # MLM is evaluated at each
    c.evaluation.seed = 1234  # of the frozen masks

    c.guards = ConfigDict()
    c.guards.non_finite = "stop"  # stop, or skip the step
    c.guards.causality_probe = True  # at start and after each switch

    c.log = ConfigDict()
    c.log.every = 1  # steps a line of metrics.jsonl
    c.log.tensorboard = True
    c.log.progress = True  # a progress bar where stdout is a terminal
    return c


def phase(objective: str, **settings: Any) -> ConfigDict:
    """One entry of `config.phases`: an objective, its length (`steps`, `tokens` or `share`) and settings.

    Besides the objective's own settings a phase may hold `optimizer` ("carry" or "reset" at its
    start) and, where `schedule.span` is "phase", its own `warmup`, `decay` and `learning_rate`.
    """
    return ConfigDict({"objective": objective, **settings})


# The keys of a phase that belong to no objective.
PHASE_KEYS = ("objective", "steps", "tokens", "share", "optimizer", "warmup", "decay", "learning_rate")


def resolve(config: ConfigDict, objectives: Mapping[str, Any]) -> ConfigDict:
    """A locked copy with every duration in steps and every objective's settings filled in; checked."""
    config = ConfigDict(to_dict(config))
    check_keys(config, default_config(), "")
    with config.unlocked():
        if not all(isinstance(p, dict | ConfigDict) for p in config.phases):
            raise UserError(f"config.phases={to_dict(config.phases)!r}: each must be made by phase('clm', steps=...)")
        config.phases = tuple(ConfigDict(p) for p in config.phases)
        _resolve_phases(config, objectives)
        total = sum(p.steps for p in config.phases)
        if config.schedule.span == "plan":
            for key in ("warmup", "decay"):
                steps = _steps(config.schedule[key], total, f"schedule.{key}")
                del config.schedule[key]  # a ConfigDict would keep the float type of a share
                config.schedule[key] = steps
        else:
            for i, p in enumerate(config.phases):
                for key in ("warmup", "decay"):
                    p[key] = _steps(p.get(key, config.schedule[key]), p.steps, f"phases[{i}].{key}")
    check(config)
    config.lock()
    return config


def check_keys(config: ConfigDict, known: ConfigDict, prefix: str) -> None:
    """Raises for the first key that `known` lacks, naming the nearest, or whose value is of another kind."""
    for name, value in config.items():
        key = prefix + name
        if name not in known:
            raise UserError(f"config: unknown key {key!r}{nearest(name, list(known.keys()))}")
        if isinstance(known[name], ConfigDict) and isinstance(value, ConfigDict):
            check_keys(value, known[name], f"{key}.")
            continue
        kinds, words = KINDS[type(known[name])]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"config.{key}={value!r} must be {words}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"config.{key}={value!r} must be a finite number")


# Of a default: the kinds of value that may stand in its place, and how to say so. Numbers are checked further.
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int, float), "a number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    tuple: ((tuple, list), "a list"),
    ConfigDict: ((ConfigDict,), "a group of keys"),
}


def _resolve_phases(config: ConfigDict, objectives: Mapping[str, Any]) -> None:
    if not config.phases:
        raise UserError("config.phases is empty: give at least one phase, such as phase('mlm', steps=1000)")
    tokens_a_step = config.batch.rows * config.data.row_length
    budget = config.budget_steps or math.ceil(config.budget_tokens / max(tokens_a_step, 1))
    for i, p in enumerate(config.phases):
        where = f"config.phases[{i}]"
        name = p.get("objective", "")
        if name not in objectives:
            raise UserError(f"{where}.objective={name!r} is not an objective{nearest(str(name), list(objectives))}")
        objective = objectives[name]
        allowed = (*PHASE_KEYS, *objective.defaults)
        for key in p:
            if key not in allowed:
                raise UserError(f"{where}: unknown key {key!r}{nearest(key, allowed)}")
        lengths = [key for key in ("steps", "tokens", "share") if p.get(key)]
        if len(lengths) != 1:
            raise UserError(f"{where}: give exactly one of steps, tokens, share; it has {lengths or 'none'}")
        if lengths[0] == "share":
            if not budget:
                raise UserError(f"{where}.share={p.share}: give budget_steps or budget_tokens, of which it is a share")
            p.steps = round(p.share * budget)
        elif lengths[0] == "tokens":
            p.steps = math.ceil(p.tokens / max(tokens_a_step, 1))
        for key in ("tokens", "share"):
            if key in p:
                del p[key]
        for key, value in objective.defaults.items():
            if key not in p:
                p[key] = value
        p.optimizer = p.get("optimizer", "carry")
        if config.schedule.span == "plan":
            own = [key for key in ("warmup", "decay", "learning_rate") if key in p]
            if own:
                raise UserError(f"{where}.{own[0]}: a phase has its own schedule only under schedule.span='phase'")
        else:
            p.learning_rate = p.get("learning_rate", config.optimizer.learning_rate)
        settings = {key: p[key] for key in objective.defaults}
        try:
            objective.check(settings)
        except UserError as error:
            raise UserError(f"{where}.{error}") from None


def _steps(length: float, span: int, key: str) -> int:
    """A length given in steps (int) or as a share of `span` (float below 1), in steps."""
    if isinstance(length, bool) or not isinstance(length, int | float) or length < 0:
        raise UserError(f"config.{key}={length!r}: give steps (an int) or a share of the span (a float below 1)")
    return round(length * span) if isinstance(length, float) and length < 1 else int(length)


def check(config: ConfigDict) -> None:
    """Every rule that a resolved config must keep, in one place; raises `UserError` for the first broken one."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise UserError(f"config.{message}")

    def one_of(key: str, value: Any, choices: Sequence[str]) -> None:
        need(value in choices, f"{key}={value!r} is not one of {', '.join(choices)}{nearest(str(value), choices)}")

    m, b, d, o = config.model, config.batch, config.data, config.optimizer
    for key in ("layers", "width", "ff_width", "heads", "kv_heads", "head_size", "loss_chunk"):
        need(isinstance(m[key], int) and m[key] > 0, f"model.{key}={m[key]!r} must be a positive int")
    need(m.heads % m.kv_heads == 0, f"model.heads={m.heads} must be a multiple of model.kv_heads={m.kv_heads}")
    need(m.head_size % 2 == 0, f"model.head_size={m.head_size} must be even: rotary embedding turns pairs")
    need(isinstance(m.vocab_size, int) and m.vocab_size >= 0, f"model.vocab_size={m.vocab_size!r} must be 0 or more")
    one_of("model.dtype", m.dtype, ("float32", "bfloat16"))
    one_of("model.remat", m.remat, ("none", "dots", "full"))
    one_of("model.attention", m.attention, ("auto", "xla"))

    for key, seed in (("seed", config.seed), ("data.seed", d.seed), ("evaluation.seed", config.evaluation.seed)):
        need(isinstance(seed, int) and 0 <= seed < 2**31, f"{key}={seed!r} must be an int of 0 to {2**31 - 1}")
    one_of("data.segments", d.segments, SEGMENT_POLICIES)
    need(8 <= d.row_length <= LONGEST_ROW, f"data.row_length={d.row_length} must be 8 to {LONGEST_ROW:,} tokens")
    need(all(isinstance(x, str) for x in d.sources), f"data.sources={tuple(d.sources)!r}: each must be PATH[:WEIGHT]")
    need(0 <= d.validation < 1, f"data.validation={d.validation} must be a share below 1")
    need(bool(d.rows or d.sources), "data: give data.rows (a folder that `prepare` wrote) or data.sources")
    need(d.workers >= 0, f"data.workers={d.workers} must be 0 or more")

    need(
        0 < b.rows <= MOST_TOKENS // d.row_length,
        f"batch.rows={b.rows} must be positive, and at most {MOST_TOKENS:,} tokens a step",
    )
    need(
        b.accumulation > 0 and b.rows % b.accumulation == 0,
        f"batch.rows={b.rows} must be a multiple of batch.accumulation={b.accumulation}",
    )
    for axis in MESH_AXES:
        size = config.mesh[axis]
        need(isinstance(size, int) and (size > 0 or size == -1), f"mesh.{axis}={size!r} must be a positive int, or -1")
    left = [axis for axis in MESH_AXES if config.mesh[axis] == -1]
    need(len(left) < 2, f"mesh: only one axis can take all devices that are left (-1), not both {' and '.join(left)}")
    slices = config.mesh.slices
    need(isinstance(slices, int) and slices > 0, f"mesh.slices={slices!r} must be a positive int")
    one_of("optimizer.name", o.name, ("adamw", "muon"))
    one_of("optimizer.decay", o.decay, ("matrices", "all"))
    need(o.learning_rate > 0, f"optimizer.learning_rate={o.learning_rate} must be positive")
    need(0 <= o.beta1 < 1 and 0 <= o.beta2 < 1, f"optimizer.beta1={o.beta1}, beta2={o.beta2} must be in [0, 1)")
    need(o.weight_decay >= 0 and o.eps > 0, f"optimizer.weight_decay={o.weight_decay}, eps={o.eps}: 0 or more, above 0")
    need(o.clip >= 0, f"optimizer.clip={o.clip} must be 0 (none) or more")

    s = config.schedule
    one_of("schedule.span", s.span, ("plan", "phase"))
    one_of("schedule.shape", s.shape, SCHEDULE_SHAPES)
    for i, p in enumerate(config.phases):
        need(isinstance(p.steps, int) and p.steps > 0, f"phases[{i}].steps={p.steps!r} must be a positive int")
        one_of(f"phases[{i}].optimizer", p.optimizer, ("carry", "reset"))
        if s.span == "phase":
            need(
                p.warmup + p.decay <= p.steps,
                f"phases[{i}]: warmup={p.warmup} and decay={p.decay} steps are more than its {p.steps} steps",
            )
    total = sum(p.steps for p in config.phases)
    need(total < 2**31, f"phases: {total:,} steps in all are more than {2**31 - 1:,}")
    if s.span == "plan":
        need(
            s.warmup + s.decay <= total,
            f"schedule: warmup={s.warmup} and decay={s.decay} steps are more than the plan's {total} steps",
        )
    one_of("init.mode", config.init.mode, ("full", "weights"))

    k, e = config.checkpoint, config.evaluation
    need(k.every >= 0 and k.keep_every >= 0, f"checkpoint.every={k.every}, keep_every={k.keep_every}: 0 or more")
    need(k.keep_last >= 1, f"checkpoint.keep_last={k.keep_last} must be at least 1")
    need(k.minutes >= 0, f"checkpoint.minutes={k.minutes} must be 0 (never) or more")
    for key in ("every", "rows", "batch_rows"):
        need(isinstance(e[key], int) and e[key] >= 0, f"evaluation.{key}={e[key]!r} must be an int of 0 or more")
    for rate in e.mask_rates:
        need(
            isinstance(rate, int | float) and 0 < rate <= 1,
            f"evaluation.mask_rates={tuple(e.mask_rates)}: each must be in (0, 1]",
        )
    need(bool(e.mask_rates), "evaluation.mask_rates is empty: give at least one rate, such as (0.15,)")
    one_of("guards.non_finite", config.guards.non_finite, ("stop", "skip"))
    need(config.log.every > 0, f"log.every={config.log.every} must be positive")


def to_dict(config: Any) -> Any:
    """Plain dicts, lists and scalars, as `config.json` holds them."""
    if isinstance(config, ConfigDict | dict):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    return config


def to_json(config: ConfigDict) -> str:
    """The config as indented JSON, keys in their order."""
    return json.dumps(to_dict(config), indent=2)


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf in which two configs (as dicts) differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in list(old) + [k for k in new if k not in old]:
            lines += differences(
                old.get(key, "(absent)"), new.get(key, "(absent)"), f"{prefix}.{key}" if prefix else key
            )
        return lines
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line for i, (a, b) in enumerate(zip(old, new, strict=True)) for line in differences(a, b, f"{prefix}[{i}]")
        ]
    return [] if old == new else [f"{prefix}: {old!r} -> {new!r}"]
