"""Held against transformers: EuroBERT is the bidirectional reference, Llama with the same weights the causal one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from biphasic_jax.model.transformer import ModelConfig, Transformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPES = {
    "mha": {"layers": 2, "width": 32, "ff_width": 80, "heads": 4, "kv_heads": 4, "head_size": 8},
    "gqa": {"layers": 3, "width": 48, "ff_width": 64, "heads": 6, "kv_heads": 2, "head_size": 8},
    "mqa, wide heads": {"layers": 2, "width": 24, "ff_width": 40, "heads": 4, "kv_heads": 1, "head_size": 16},
    "tied, theta": {"layers": 2, "width": 32, "ff_width": 40, "heads": 2, "kv_heads": 1, "head_size": 12}
    | {"tied": True, "rope_theta": 250_000.0},
}
ROWS, LENGTH, VOCAB = 3, 21, 97


def reference(config: ModelConfig, causal: bool):
    """The reference model with random weights, larger than at initialisation so that logits are of order 1."""
    keys = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.ff_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    if causal:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys))
    else:
        model = transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(mask_token_id=3, **keys))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.1 * torch.randn(p.shape) if "norm" in name else 0.2 * torch.randn(p.shape))
    return model.eval()


NAMES = {
    "attention/q": "self_attn.q_proj",
    "attention/k": "self_attn.k_proj",
    "attention/v": "self_attn.v_proj",
    "attention/o": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
    "attention_norm/scale": "input_layernorm",
    "mlp_norm/scale": "post_attention_layernorm",
}


def to_params(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict:
    """Our tree of a reference's tensors (weights or gradients), torch's (out, in) matrices turned."""
    params: dict = {"blocks": {}}
    for ours, theirs in NAMES.items():
        group, name = ours.split("/")
        layers = [tensors[f"model.layers.{i}.{theirs}.weight"].T for i in range(config.layers)]
        params["blocks"].setdefault(group, {})[name] = np.stack(layers)
    params["embedding"] = tensors["model.embed_tokens.weight"]
    params["final_norm"] = {"scale": tensors["model.norm.weight"]}
    if not config.tied:
        params["head"] = tensors["lm_head.weight"].T
    return params


CASES = [("mha", False, True), ("mha", True, False), ("gqa", False, False), ("gqa", True, True)]
CASES += [("mqa, wide heads", False, True), ("mqa, wide heads", True, True), ("tied, theta", False, False)]


@pytest.mark.parametrize(("shape", "causal", "padded"), CASES)
def test_logits_and_gradients_equal_the_reference(shape, causal, padded):
    config = ModelConfig(vocab_size=VOCAB, **SHAPES[shape])
    theirs = reference(config, causal)
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, VOCAB, (ROWS, LENGTH))
    lengths = [LENGTH, LENGTH - 5, 4] if padded else [LENGTH] * ROWS
    real = np.arange(LENGTH) < np.array(lengths)[:, None]
    probe = rng.normal(size=(ROWS, LENGTH, VOCAB)).astype(np.float32) * real[..., None]

    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(real.astype(np.int64))}
    their_logits = theirs(**inputs).logits
    (their_logits * torch.tensor(probe)).sum().backward()
    weights = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    params = to_params(weights, config)
    their_gradients = to_params({name: p.grad.numpy() for name, p in theirs.named_parameters()}, config)

    model = Transformer(config)
    segments = real.astype(np.int32) if padded else None

    def loss(params):
        logits = model.apply({"params": params}, jnp.asarray(tokens), segments, causal=causal)
        return (logits * probe).sum(), logits

    our_gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    difference = np.abs(np.asarray(logits) - their_logits.detach().numpy())[real]
    assert np.asarray(logits)[real].std() > 0.3
    assert difference.max() < 1e-4
    assert jax.tree.structure(our_gradients) == jax.tree.structure(their_gradients)
    for (path, ours), theirs_leaf in zip(
        jax.tree_util.tree_leaves_with_path(our_gradients), jax.tree.leaves(their_gradients), strict=True
    ):
        error = np.linalg.norm(ours - theirs_leaf) / np.linalg.norm(theirs_leaf)
        assert error < 1e-3, jax.tree_util.keystr(path)
