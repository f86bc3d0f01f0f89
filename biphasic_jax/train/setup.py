"""What has to stand before the first step: the rows, the model, the plan, and the state that it starts from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from biphasic_jax.config import differences, to_dict
from biphasic_jax.data.batches import row_hash
from biphasic_jax.data.prepare import ensure_rows
from biphasic_jax.data.shards import Rows
from biphasic_jax.data.tokenizer import vocabulary_of
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.model.transformer import ModelConfig, Transformer
from biphasic_jax.plan import Plan, content_key, make_plan
from biphasic_jax.train.checkpoint import Checkpointer, complete_steps, find, read_meta, read_params, read_state
from biphasic_jax.train.mesh import make_mesh, replicated, state_shardings, use_mesh
from biphasic_jax.train.optimizer import make_optimizer
from biphasic_jax.train.peak import peak_flops
from biphasic_jax.train.run_folder import RunFolder, check_config
from biphasic_jax.train.state import TrainState, init_state


@dataclass(frozen=True)
class Start:
    """Where a run starts from.

    mode: "new" (random weights), "full" or "weights" (another run's checkpoint), "resume" (its own).
    plan_start: the step at which the plan begins. parent_key: content key of what the plan builds on, or "".
    meta: of `checkpoint`. changes: what --override-schedule let pass.
    """

    mode: str = "new"
    checkpoint: str = ""
    step: int = 0
    plan_start: int = 0
    parent_key: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


@dataclass
class Run:
    """The fixed parts of a run. `rows`, `validation`: the two splits; yes, no: bools on the devices.

    peak: FLOP/s that all devices together can do at best.
    """

    folder: RunFolder
    config: ConfigDict
    plan: Plan
    start: Start
    rows: Rows
    validation: Rows
    vocabulary: Vocabulary
    tokenizer_json: str
    mesh: Mesh
    model: Transformer
    optimizer: optax.GradientTransformation
    checkpointer: Checkpointer
    yes: jax.Array
    no: jax.Array
    peak: float

    @property
    def fingerprint(self) -> str:
        return self.rows.manifest.fingerprint

    def meta(self, step: int) -> dict[str, Any]:
        """What is stored with the checkpoint of `step`, besides the loop's own counters."""
        return {
            "plan_start": self.plan.start,
            "parent_key": self.start.parent_key,
            "content_key": content_key(self.config, self.plan, step, self.fingerprint, self.start.parent_key),
            "config": to_dict(self.config),
            "vocabulary": self.rows.manifest.vocabulary,
            "tokenizer_sha256": self.rows.manifest.tokenizer["sha256"],
            "data": {"fingerprint": self.fingerprint, "next_batch": row_hash(self.rows, self.config, step)},
        }


def find_start(folder: RunFolder, config: ConfigDict, override_schedule: bool) -> Start:
    """From the run's own newest checkpoint, else from `init.checkpoint`, else from random weights."""
    steps = complete_steps(folder.file("checkpoints"))
    if steps:
        checkpoint = folder.file("checkpoints", str(steps[-1]))
        meta = read_meta(checkpoint)
        changes = tuple(check_config(folder.path, meta, config, override_schedule))
        # From here on the work is no longer what the plan says of earlier steps: a new parent.
        parent = meta["content_key"] if changes else meta["parent_key"]
        return Start("resume", checkpoint, meta["step"], meta["plan_start"], parent, meta, changes)
    if not config.init.checkpoint:
        return Start()
    checkpoint = find(config.init.checkpoint)
    meta = read_meta(checkpoint)
    step = meta["step"] if config.init.mode == "full" else 0
    return Start(config.init.mode, checkpoint, step, step, meta["content_key"], meta)


def set_up(folder: RunFolder, config: ConfigDict, override_schedule: bool) -> tuple[Run, TrainState]:
    """Everything but the compiled step; raises `UserError` where parts do not fit each other."""
    start = find_start(folder, config, override_schedule)
    plan = make_plan(config, start.plan_start)
    if start.step > plan.end:
        raise UserError(
            f"--workdir={folder.path}: its newest checkpoint is of step {start.step}, behind the plan's end at "
            f"{plan.end}; give config.phases more steps"
        )
    rows_folder = ensure_rows(config)
    rows, validation = Rows(rows_folder, "train"), Rows(rows_folder, "validation")
    vocabulary = vocabulary_of(rows_folder)
    check_fit(config, rows, vocabulary)
    if start.mode != "new":
        check_same_data(start, config, rows)
    if start.mode in ("full", "weights"):
        check_same_model(start, config)
    mesh = make_mesh(config)
    model = Transformer(ModelConfig.from_config(config.model, vocabulary.size, config.loss.z_loss))
    optimizer = make_optimizer(config)
    with open(os.path.join(rows_folder, rows.manifest.tokenizer["file"]), "rb") as file:
        tokenizer_json = file.read().decode()
    run = Run(
        folder=folder,
        config=config,
        plan=plan,
        start=start,
        rows=rows,
        validation=validation,
        vocabulary=vocabulary,
        tokenizer_json=tokenizer_json,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        checkpointer=_checkpointer(folder, config, plan),
        yes=jax.device_put(np.bool_(True), replicated(mesh)),
        no=jax.device_put(np.bool_(False), replicated(mesh)),
        peak=peak_flops(mesh.devices.flat[0]) * mesh.size,
    )
    with use_mesh(mesh):
        return run, starting_state(run)


def starting_state(run: Run) -> TrainState:
    """The state of `run.start.step`, laid out over the mesh."""
    start, model, optimizer = run.start, run.model, run.optimizer
    abstract = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    shardings = state_shardings(run.mesh, model, abstract)
    if start.mode == "new":
        return jax.jit(lambda seed: init_state(model, optimizer, seed), out_shardings=shardings)(run.config.seed)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    if start.mode == "weights":
        params = read_params(start.checkpoint, like.params)
        fresh = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
        return TrainState(jax.device_put(np.int32(0), shardings.step), params, fresh)
    return read_state(start.checkpoint, like, start.step)


def check_fit(config: ConfigDict, rows: Rows, vocabulary: Vocabulary) -> None:
    """Rows, tokenizer and model belong together."""
    wanted, there = config.model.vocab_size, vocabulary.size
    if wanted not in (0, there):
        raise UserError(f"config.model.vocab_size={wanted}, but the tokenizer has {there} ids; set it to 0 or {there}")
    if not len(rows):
        raise UserError(f"{rows.folder}: not one training row; give more text, or a smaller data.validation")


def check_same_data(start: Start, config: ConfigDict, rows: Rows) -> None:
    """What a checkpoint learnt from is what comes next: the tokenizer always, rows and their order if it goes on."""
    meta, manifest = start.meta, rows.manifest

    def need(what: str, old: Any, new: Any, mend: str) -> None:
        if old != new:
            raise UserError(f"{start.checkpoint}: its {what} is {old}, here it is {new}; {mend}")

    need("vocabulary", meta["vocabulary"], manifest.vocabulary, "prepare the rows with its tokenizer")
    need(
        "tokenizer (sha256)",
        meta["tokenizer_sha256"],
        manifest.tokenizer["sha256"],
        "prepare the rows with its tokenizer",
    )
    if start.mode == "weights":
        return
    mend = "put the old rows back" if start.mode == "resume" else "or set init.mode='weights' to start on other data"
    need("data fingerprint", meta["data"]["fingerprint"], manifest.fingerprint, mend)
    if start.mode == "full":
        need("seed", meta["config"]["seed"], config.seed, mend)
        need("batch.rows", meta["config"]["batch"]["rows"], config.batch.rows, mend)
    need(
        f"row numbers of batch {start.step} (hash)",
        meta["data"]["next_batch"],
        row_hash(rows, config, start.step),
        "the order of the data has changed: go on with the version that wrote it",
    )


def check_same_model(start: Start, config: ConfigDict) -> None:
    """Shapes alone do not tell heads from head sizes: the model's function must be the checkpoint's."""
    keys = ("layers", "width", "ff_width", "heads", "kv_heads", "head_size", "tied", "rope_theta", "norm_eps")
    old, new = ({key: model[key] for key in keys} for model in (start.meta["config"]["model"], config.model))
    if lines := differences(old, new, "model"):
        raise UserError(f"{start.checkpoint}: another model: {'; '.join(lines)}; set config.model to the checkpoint's")


def _checkpointer(folder: RunFolder, config: ConfigDict, plan: Plan) -> Checkpointer:
    c, ends = config.checkpoint, {phase.end for phase in plan.phases}
    if c.step_zero:
        ends.add(plan.start)

    def keep(step: int, steps: list[int]) -> bool:
        regular = bool(c.keep_every) and step % c.keep_every == 0
        return regular or step in ends or step in steps[-c.keep_last :]

    return Checkpointer(folder.file("checkpoints"), keep, c.asynchronous)
