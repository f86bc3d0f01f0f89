"""A checkpoint opened for use: the model with its weights, and everything that is needed to feed it."""

from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict
from tokenizers import Tokenizer

from biphasic_jax.config import differences
from biphasic_jax.data.manifest import read_manifest
from biphasic_jax.data.tokenizer import vocabulary_of
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.model.transformer import Transformer
from biphasic_jax.plan import Plan, make_plan
from biphasic_jax.train.checkpoint import find, load, read_meta, read_vocabulary


@dataclass(frozen=True)
class Opened:
    """folder: of the checkpoint. meta: what was stored beside the weights. config: of its run, resolved."""

    folder: str
    meta: dict[str, Any]
    config: ConfigDict
    plan: Plan
    model: Transformer
    params: Any
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def phase(self) -> int:
        """The index of the phase whose update led to this step."""
        return self.plan.phase_of_update(max(self.plan.start, self.step - 1)).index

    @property
    def has_learnt_mlm(self) -> bool:
        """False where no update of MLM can have touched the weights."""
        began = any(phase.objective == "mlm" and phase.start < self.step for phase in self.plan.phases)
        return began or bool(self.meta["parent_key"])  # what an earlier run did is not known here

    def encode(self, text: str) -> list[int]:
        """The ids of a text as in training: without any frame but the end-of-text token behind it."""
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.vocabulary.eos]

    def check_rows(self, folder: str) -> None:
        """`UserError` unless the rows of `folder` were made with the tokenizer that the model was trained with."""
        vocabulary_of(folder)  # its own tokenizer.json is the one that made the rows
        manifest = read_manifest(folder)
        mine, theirs = self.meta["tokenizer_sha256"], manifest.tokenizer["sha256"]
        if mine != theirs:
            raise UserError(
                f"{folder}: its rows were made with another tokenizer (sha256 {theirs[:12]}) than {self.folder} was "
                f"trained with ({mine[:12]}); prepare them with `--tokenizer` of the run's folder"
            )
        if lines := differences(self.meta["vocabulary"], manifest.vocabulary):
            raise UserError(
                f"{folder}: special tokens are not those of {self.folder}: {'; '.join(lines)}; prepare the rows again"
            )


def open_checkpoint(path: str) -> Opened:
    """Opens a checkpoint's folder, or the newest complete checkpoint of a run; `UserError` where there is none."""
    folder = find(path)
    meta = read_meta(folder)
    model, params, tokenizer = load(folder)
    config = ConfigDict(meta["config"])
    with config.unlocked():
        config.phases = tuple(ConfigDict(phase) for phase in config.phases)
    plan = make_plan(config, meta["plan_start"])
    return Opened(folder, meta, config, plan, model, params, tokenizer, read_vocabulary(meta, tokenizer))
