"""Checkpoints: a small wrapper over Orbax that knows which folders are complete.

    checkpoints/STEP/params, optimizer   arrays, each tree as an item of its own: weights load alone
    checkpoints/STEP/meta, tokenizer     JSON: what `load` and a resume need to know

Orbax writes into a temporary folder and renames it when all of it is on disk; a commit marker is written
last. Its CheckpointManager takes every folder with an integer name for a step, so the steps, their order
and their deletion are kept here, on top of its AsyncCheckpointer.
"""

import contextlib
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from biphasic_jax.config import to_dict
from biphasic_jax.data.tokenizer import Roles, make_vocabulary
from biphasic_jax.data.vocabulary import Vocabulary
from biphasic_jax.errors import UserError
from biphasic_jax.model.presets import PAPER_VOCABULARY, preset
from biphasic_jax.model.transformer import ModelConfig, Transformer
from biphasic_jax.train.state import TrainState, flatten, unflatten

FORMAT = 1
MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")
TEMPORARY = (".orbax-checkpoint-tmp", ".deleted")


def complete(folder: str) -> bool:
    """Whether `folder` is a checkpoint whose save came to its end."""
    return all(os.path.isfile(os.path.join(folder, marker)) for marker in MARKERS)


def complete_steps(folder: str) -> list[int]:
    """The steps of the complete checkpoints in `folder`, ascending; warns of others that look like one."""
    if not os.path.isdir(folder):
        return []
    steps = []
    for name in os.listdir(folder):
        if not name.isdecimal():
            continue
        if complete(os.path.join(folder, name)):
            steps.append(int(name))
        else:
            warnings.warn(f"{os.path.join(folder, name)} is not a complete checkpoint: skipped", stacklevel=2)
    return sorted(steps)


def find(path: str) -> str:
    """The folder of the checkpoint that `path` means: itself, or the newest complete one of a run."""
    if complete(path):
        return path
    if not os.path.isdir(path):
        raise UserError(f"{path}: there is no such folder; give a run's folder or a checkpoint's")
    for folder in (os.path.join(path, "checkpoints"), path):
        if steps := complete_steps(folder):
            return os.path.join(folder, str(steps[-1]))
    raise UserError(f"{path}: no complete checkpoint in it; give a run's folder or a checkpoint's")


def read_meta(folder: str) -> dict[str, Any]:
    """What was stored beside the arrays: step, phase, config, vocabulary, fingerprint, content_key, ..."""
    meta = _read_json(folder, "meta")
    if meta.get("format") != FORMAT:
        raise UserError(f"{folder}: checkpoint format {meta.get('format')!r}; this version reads {FORMAT}")
    return meta


def read_tokenizer(folder: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(_read_json(folder, "tokenizer")["text"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # as where the rows were made: specials in a text are text
    return tokenizer


def read_vocabulary(meta: Mapping[str, Any], tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a checkpoint's tokenizer, with the special ids that it was trained with."""
    facts = meta["vocabulary"]
    vocabulary = make_vocabulary(tokenizer, Roles(**{k: v for k, v in facts.items() if k != "size"}))
    if vocabulary.size != facts["size"]:
        raise UserError(f"the checkpoint's tokenizer has {vocabulary.size} ids, its model {facts['size']}")
    return vocabulary


def read_model(meta: Mapping[str, Any]) -> Transformer:
    """The model that a checkpoint's config describes."""
    config = meta["config"]
    size = meta["vocabulary"]["size"]
    return Transformer(ModelConfig.from_config(config["model"], size, config["loss"]["z_loss"]))


def load(path: str) -> tuple[Transformer, dict[str, Any], Tokenizer]:
    """(model, params, tokenizer) of a run's newest complete checkpoint, or of a checkpoint's folder.

    params: f32 arrays on the default device, for `model.apply({"params": params}, tokens_BxL, segments_BxL,
    causal=...)`. Raises `UserError` where there is none or it does not fit.
    """
    folder = find(os.fspath(path))
    model = read_model(read_meta(folder))
    params = jax.eval_shape(lambda: model.init_params(0))
    return model, read_params(folder, _on_one_device(params)), read_tokenizer(folder)


def build(config: ConfigDict | str, vocab_size: int = 0, seed: int = 0) -> tuple[Transformer, dict[str, Any]]:
    """(model, params) with random weights, of a config or of a size by name ("tiny", "210m", "610m", "1b").

    vocab_size: 0 for the config's own, or, of a size by name, the paper's.
    """
    if isinstance(config, str):
        settings, size, z_loss = preset(config), PAPER_VOCABULARY, 0.0
    else:
        settings, z_loss = to_dict(config.model), config.loss.z_loss
        size = config.model.vocab_size or (0 if config.data.tokenizer else config.data.vocab_size)
    if not (size := vocab_size or size):
        raise UserError("build: give vocab_size, since this config takes it from a tokenizer")
    model = Transformer(ModelConfig.from_config(settings, size, z_loss))
    return model, jax.jit(model.init_params)(seed)


def read_params(folder: str, like: Any) -> Any:
    """The weights alone, into the shapes and shardings of the abstract tree `like`."""
    return _read_tree(folder, "params", like)


def read_state(folder: str, like: TrainState, step: int) -> TrainState:
    """Weights and optimizer, into the shapes and shardings of the abstract state `like`."""
    # Orbax names a tree's containers in its own way; by path, both sides have the same names.
    optimizer = _read_tree(folder, "optimizer", flatten(like.opt_state))
    counter = jax.device_put(jax.numpy.asarray(step, jax.numpy.int32), like.step.sharding)
    return TrainState(counter, read_params(folder, like.params), unflatten(like.opt_state, optimizer))


class Checkpointer:
    """Saves the states of one run under `folder`, and keeps those steps for which `keep(step, complete)` holds.

    `complete`: all complete steps, ascending. Where `asynchronous`, `save` returns when the arrays are off
    the devices; `wait` on every way out. Raises `UserError` naming the folder where a save fails.
    """

    def __init__(self, folder: str, keep: Callable[[int, list[int]], bool], asynchronous: bool = True):
        self.folder = os.path.abspath(folder)
        self.asynchronous = asynchronous
        self._keep = keep
        self._saving: str | None = None
        os.makedirs(self.folder, exist_ok=True)
        self._remove_temporary()
        _quiet_orbax()
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())

    def path(self, step: int) -> str:
        return os.path.join(self.folder, str(step))

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any], tokenizer: str) -> None:
        """Writes step `step`; `meta` is plain JSON, `tokenizer` the text of tokenizer.json."""
        self.wait()
        self._saving = self.path(step)
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            optimizer=ocp.args.StandardSave(flatten(state.opt_state)),
            meta=ocp.args.JsonSave({"format": FORMAT, "step": step, **to_dict(meta)}),
            tokenizer=ocp.args.JsonSave({"text": tokenizer}),
        )
        with self._explained():
            self._orbax.save(self._saving, args=items, force=True)  # force: over an incomplete folder of that name
        if not self.asynchronous:
            self.wait()

    def check(self) -> None:
        """Raises where the save under way has failed already."""
        with self._explained():
            self._orbax.check_for_errors()

    def wait(self) -> None:
        """Returns when nothing is being written, and deletes what need not be kept."""
        if self._saving is None:
            return
        with self._explained():
            self._orbax.wait_until_finished()
        self._saving = None
        steps = complete_steps(self.folder)
        for step in steps:
            if not self._keep(step, steps):
                # Renamed first: half a deletion must not look like a checkpoint.
                os.rename(self.path(step), self.path(step) + ".deleted")
                shutil.rmtree(self.path(step) + ".deleted")

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._orbax.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what Orbax raises of a save into one line that names the folder, and gives its space back."""
        try:
            yield
        except Exception as error:
            folder, self._saving = self._saving or self.folder, None
            self._remove_temporary()
            raise UserError(
                f"{folder}: the checkpoint could not be saved ({_first_line(error)}); earlier ones are whole: "
                f"free some space there, and the same command goes on from the newest"
            ) from error

    def _remove_temporary(self) -> None:
        for name in os.listdir(self.folder):
            if any(mark in name for mark in TEMPORARY):
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)


def compare_trees(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One line for each leaf, by path, that is missing, extra or of another shape in `stored`."""
    lines = [f"{path} is missing" for path in wanted if path not in stored]
    lines += [f"{path} is extra" for path in stored if path not in wanted]
    lines += [
        f"{path} has shape {stored[path]}, not {shape}"
        for path, shape in wanted.items()
        if path in stored and stored[path] != shape
    ]
    return lines


def _read_tree(folder: str, item: str, like: Any) -> Any:
    path = epath.Path(os.path.abspath(folder)) / item
    try:
        tree = ocp.StandardCheckpointHandler().metadata(path).tree
    except Exception as error:
        raise UserError(f"{folder}: {item} cannot be read ({_first_line(error)}); use another checkpoint") from error
    stored = {name: tuple(leaf.shape) for name, leaf in flatten(tree).items()}
    wanted = {name: tuple(leaf.shape) for name, leaf in flatten(like).items()}
    if lines := compare_trees(stored, wanted):
        raise UserError(f"{folder}: its {item} do not fit this config's: {'; '.join(lines)}")
    try:
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(path, like)
    except Exception as error:
        raise UserError(f"{folder}: {item} cannot be read ({_first_line(error)}); use another checkpoint") from error


def _read_json(folder: str, item: str) -> dict[str, Any]:
    try:
        return ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(os.path.join(os.path.abspath(folder), item))
    except Exception as error:
        raise UserError(f"{folder}: {item} cannot be read ({_first_line(error)}); use another checkpoint") from error


def _quiet_orbax() -> None:
    """Orbax logs the traceback of every error in every thread that meets it; they are raised as well."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    sys.unraisablehook = _unraisable


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _unraisable(unraisable: Any) -> None:
    """TensorStore answers an event loop that is gone when another write has failed: no news."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def _first_line(error: Exception) -> str:
    """The reason in a line; of a full disk, which Orbax wraps in names of files, no more than that."""
    text = str(error)
    for reason in ("No space left on device", "Disk quota exceeded", "File too large"):
        if reason in text:
            return reason
    return next((line for line in text.splitlines() if line.strip()), type(error).__name__)[:300]


def _on_one_device(tree: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
