"""The work of a training step by formula: what MFU is a share of.

Compilers miscount (a scanned layer once, a fused kernel not at all), so model FLOPs are counted by hand, in
the convention of PaLM (arXiv 2204.02311, appendix B): a multiply-add is two; forward plus backward is three
times the forward; recomputation is not work; attention counts all L x L pairs, causal or not, packed or not.
"""

from biphasic_jax.model.transformer import ModelConfig


def forward_flops(config: ModelConfig, rows: int, length: int, predictions: int) -> int:
    """FLOPs of one forward pass over `rows` rows of `length` tokens with `predictions` positions at the head.

        blocks     2 * tokens * N * (D h (2 H + 2 K) + 3 D F)
        attention  4 * tokens * N * L H h                      (q k^T, and weights times v)
        head       2 * predictions * D V                       (only positions that are predicted reach it)

    Norms, activations, softmax and the embedding's lookup count as nothing.
    """
    c, tokens = config, rows * length
    matrices = c.width * c.head_size * (2 * c.heads + 2 * c.kv_heads) + 3 * c.width * c.ff_width
    blocks = 2 * tokens * c.layers * matrices
    attention = 4 * tokens * c.layers * length * c.heads * c.head_size
    head = 2 * predictions * c.width * c.vocab_size
    return blocks + attention + head


def training_flops(config: ModelConfig, rows: int, length: int, predictions: int) -> int:
    """FLOPs of one step, forward and backward: three times `forward_flops`.

    `predictions`: positions whose logits are computed in the step, over all rows: the room for masked
    positions in MLM, `rows * length` in CLM.
    """
    return 3 * forward_flops(config, rows, length, predictions)
