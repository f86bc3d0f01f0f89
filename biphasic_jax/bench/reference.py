"""The same work in PyTorch, with the models and the optimizer that transformers' Trainer takes.

MLM is EuroBertForMaskedLM, CLM is LlamaForCausalLM; attention sdpa, AdamW fused (the Trainer's default), clipping
by global norm. No attention mask is passed: the rows are full, and without one torch takes its fastest path.
"""

import itertools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from biphasic_jax.bench.workload import Workload, batches, workload

INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install transformers"


def missing() -> str:
    """How to install what a comparison with PyTorch needs; "" where all of it is there."""
    from importlib.util import find_spec

    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    return f"not installed: {' and '.join(absent)}; {INSTALL}" if absent else ""


class Reference:
    """One optimizer step of PyTorch. `gathered`: only the masked positions reach the head (MLM)."""

    def __init__(self, work: Workload, gathered: bool, threads: int):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.work, self.gathered = work, gathered
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        config = work.config()
        self.clip = config.optimizer.clip
        self.model = _model(work).to(self.device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self.batches = itertools.cycle([_tensors(work, *batch, self.device) for batch in batches(work)])
        self.facts = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def step(self) -> dict[str, float]:
        import torch

        tokens_BxL, labels_BxL = next(self.batches)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.work.dtype == "bfloat16"):
            if self.gathered:
                features_BxLxD = self.model.model(input_ids=tokens_BxL).last_hidden_state
                where_BxL = labels_BxL != -100
                logits_PxV = self.model.lm_head(features_BxLxD[where_BxL])
                loss = torch.nn.functional.cross_entropy(logits_PxV.float(), labels_BxL[where_BxL])
            else:
                loss = self.model(input_ids=tokens_BxL, labels=labels_BxL).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.item()}


def _model(work: Workload) -> Any:
    import transformers

    config = work.config().model
    sizes = {
        "vocab_size": work.vocab_size,
        "hidden_size": work.width,
        "intermediate_size": work.ff_width,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.kv_heads,
        "head_dim": work.head_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 3,
        "attn_implementation": "sdpa",
    }
    if work.objective == "mlm":
        return transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(**sizes, mask_token_id=2))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))


def _tensors(work: Workload, rows: Any, examples: Any, device: str) -> tuple[Any, Any]:
    """(tokens, labels), int64: -100 where nothing is predicted. transformers shifts the labels of CLM itself."""
    import torch

    if work.objective == "clm":
        labels_BxL = rows.tokens_BxL
    else:
        labels_BxL = np.where(examples.weights_BxL > 0, examples.targets_BxL, -100)
    tensors = (torch.from_numpy(array.astype(np.int64)).to(device) for array in (examples.tokens_BxL, labels_BxL))
    return tuple(tensors)  # type: ignore[return-value]


def build(settings: Mapping[str, Any]) -> Reference:
    """Settings: a workload's, `gathered`, and `threads` (0: one a core)."""
    return Reference(workload(settings), settings["gathered"], settings.get("threads") or os.cpu_count() or 1)
