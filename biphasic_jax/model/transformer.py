"""The Llama-shaped transformer that every phase trains (arXiv 2507.00994, table 1).

Pre-norm blocks with RMSNorm, rotary positions, grouped-query attention and SwiGLU; no biases, no
dropout. The attention mode is an argument of each call and no property of the model. Shapes: B rows,
L row length, D width, H heads, K key/value heads, h head size, F feed-forward width, V vocabulary,
N layers.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from biphasic_jax.model.attention import attention, choose_backend, positions_from_segments
from biphasic_jax.model.head import head_kernel, project, shards_of

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The keys of `config.model`; `vocab_size` resolved, and the weight of the z-loss beside them."""

    layers: int
    width: int
    ff_width: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    init_std: float = 0.02
    dtype: str = "float32"
    scan_layers: bool = True
    remat: str = "none"
    attention: str = "auto"
    loss_chunk: int = 1024
    z_loss: float = 0.0

    @classmethod
    def from_config(cls, model: Mapping[str, Any], vocab_size: int, z_loss: float = 0.0) -> "ModelConfig":
        """Of `config.model`, the tokenizer's `vocab_size` and `config.loss.z_loss`."""
        return cls(**{**dict(model), "vocab_size": vocab_size, "z_loss": z_loss})


def rms_norm(x: Array, scale_D: Array, eps: float) -> Array:
    """x / rms(x) * scale over the last axis, in f32, returned in the type of x (arXiv 1910.07467)."""
    x_f32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + eps)
    return (x_f32 * inverse * scale_D).astype(x.dtype)


def rope_tables(positions: Array, head_size: int, theta: float) -> tuple[Array, Array]:
    """(cos, sin) of the rotary angles, each positions.shape + (h,) f32, as `rope` wants them (arXiv 2104.09864)."""
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def rope(x_BxLxHxh: Array, tables: tuple[Array, Array]) -> Array:
    """Turns the pairs (i, i + h/2) of each head by their angles, in f32: the rotate-half layout."""
    cos, sin = (table[:, :, None, :] for table in tables)
    x = x_BxLxHxh.astype(jnp.float32)
    return (x * cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin).astype(x_BxLxHxh.dtype)


class Weights(nn.Module):
    """Makes a module's parameters: f32, with their logical axes."""

    config: ModelConfig

    def matrix(self, name: str, shape: tuple[int, int], axes: tuple[str, str]) -> Any:
        return self.param(name, nn.with_logical_partitioning(nn.initializers.normal(self.config.init_std), axes), shape)

    def linear(self, name: str, x: Array, size: int, axes: tuple[str, str]) -> Array:
        """x @ W, W (last axis of x, size), in the compute dtype.

        As a product of two matrices: with a gradient that contracts rows and length as two axes, XLA on CPU
        transposes activations element by element, and a step takes 1.2 times as long. But where devices split
        the length, one axis out of rows and length could not be split, and would be gathered.
        """
        kernel = self.matrix(name, (x.shape[-1], size), axes).astype(x.dtype)
        if shards_of("length") > 1:
            return x @ kernel
        return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], size)

    def scale(self) -> Any:
        return self.param("scale", nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), (self.config.width,))


class Norm(Weights):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale(), self.config.norm_eps)


class Attention(Weights):
    @nn.compact
    def __call__(self, x_BxLxD: Array, tables: tuple[Array, Array], segments_BxL: Array | None, causal: bool) -> Array:
        c = self.config
        B, L, D = x_BxLxD.shape
        q = self.linear("q", x_BxLxD, c.heads * c.head_size, ("embed", "heads"))
        k = self.linear("k", x_BxLxD, c.kv_heads * c.head_size, ("embed", "kv"))
        v = self.linear("v", x_BxLxD, c.kv_heads * c.head_size, ("embed", "kv"))
        q_BxLxHxh = rope(q.reshape(B, L, c.heads, c.head_size), tables)
        k_BxLxKxh = rope(k.reshape(B, L, c.kv_heads, c.head_size), tables)
        v_BxLxKxh = v.reshape(B, L, c.kv_heads, c.head_size)
        # A device has the queries of its part of a row, and the keys and values of the whole.
        out_BxLxHxh = attention(
            nn.with_logical_constraint(q_BxLxHxh, ("batch", "length", "heads", None)),
            nn.with_logical_constraint(k_BxLxKxh, ("batch", None, "kv", None)),
            nn.with_logical_constraint(v_BxLxKxh, ("batch", None, "kv", None)),
            segments_BxL,
            causal=causal,
            backend=choose_backend(c.attention)[0],
        )
        return self.linear("o", out_BxLxHxh.reshape(B, L, -1), D, ("heads", "embed"))


class MLP(Weights):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    @nn.compact
    def __call__(self, x_BxLxD: Array) -> Array:
        D, F = self.config.width, self.config.ff_width
        gate_BxLxF = self.linear("gate", x_BxLxD, F, ("embed", "mlp"))
        up_BxLxF = self.linear("up", x_BxLxD, F, ("embed", "mlp"))
        return self.linear("down", nn.silu(gate_BxLxF) * up_BxLxF, D, ("mlp", "embed"))


class Block(nn.Module):
    config: ModelConfig
    causal: bool

    @nn.compact
    def __call__(self, x_BxLxD: Array, tables: tuple[Array, Array], segments_BxL: Array | None) -> tuple[Array, None]:
        c = self.config
        y_BxLxD = Norm(c, name="attention_norm")(x_BxLxD)
        x_BxLxD = constrain(x_BxLxD + Attention(c, name="attention")(y_BxLxD, tables, segments_BxL, self.causal))
        x_BxLxD = constrain(x_BxLxD + MLP(c, name="mlp")(Norm(c, name="mlp_norm")(x_BxLxD)))
        return x_BxLxD, None


def constrain(x_BxLxD: Array) -> Array:
    """Keeps activations split by rows: left alone, the partitioner follows the weights and replicates rows."""
    return nn.with_logical_constraint(x_BxLxD, ("batch", "length", "embed"))


REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Network(Weights):
    """Tokens to final hidden states; its parameter tree is the model's."""

    @nn.compact
    def __call__(
        self, tokens_BxL: Array, segments_BxL: Array | None, positions_BxL: Array | None, causal: bool
    ) -> Array:
        c = self.config
        if positions_BxL is None:
            one_segment_1xL = jnp.ones((1, tokens_BxL.shape[1]), jnp.int32)
            positions_BxL = positions_from_segments(one_segment_1xL if segments_BxL is None else segments_BxL)
        # Behind a barrier, lest XLA compute the sines again in every layer and head.
        tables = jax.lax.optimization_barrier(rope_tables(positions_BxL, c.head_size, c.rope_theta))

        embedding_VxD = self.matrix("embedding", (c.vocab_size, c.width), ("vocab", "embed"))
        if not c.tied:
            self.matrix("head", (c.width, c.vocab_size), ("embed", "vocab"))
        # Looked up in the whole width: where devices hold parts of it, the partitioner would give all of them all rows.
        embedding_VxD = nn.with_logical_constraint(embedding_VxD, ("vocab", None))
        x_BxLxD = jnp.take(embedding_VxD, tokens_BxL, axis=0).astype(c.dtype)
        if segments_BxL is not None:  # padding is zero at the bottom, and so, without biases, all the way up
            x_BxLxD = jnp.where((segments_BxL != 0)[:, :, None], x_BxLxD, 0)
        x_BxLxD = constrain(x_BxLxD)

        block = Block
        if c.remat != "none":
            block = nn.remat(Block, policy=REMAT_POLICIES[c.remat], prevent_cse=not c.scan_layers)
        blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=c.layers,
            unroll=1 if c.scan_layers else c.layers,  # unrolled, the tree is still stacked: one tree for both
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x_BxLxD, _ = blocks(c, causal, name="blocks")(x_BxLxD, tables, segments_BxL)
        return constrain(Norm(c, name="final_norm")(x_BxLxD))


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The model as functions of its parameters, a nested dict of f32 arrays.

        embedding (V, D)    final_norm/scale (D,)    head (D, V), absent if tied
        blocks/attention_norm/scale, blocks/mlp_norm/scale (N, D)
        blocks/attention/q (N, D, H h), k, v (N, D, K h), o (N, H h, D)
        blocks/mlp/gate, up (N, D, F), down (N, F, D)

    Hashable, and equal for equal configs: may be closed over or be a static argument of `jax.jit`.
    """

    config: ModelConfig

    def init_params(self, seed: int | Array) -> dict[str, Any]:
        """Normal(0, init_std) matrices, norm scales 1; may be jitted, or made abstract by `jax.eval_shape`."""
        return nn.meta.unbox(self._boxed(seed))

    def logical_axes(self) -> dict[str, Any]:
        """The tree of the parameters with a tuple of logical axis names at each leaf.

        Names: "vocab", "embed", "heads", "kv", "mlp", "layers". Activations are constrained as
        ("batch", "length", "embed").
        """
        boxed = jax.eval_shape(functools.partial(self._boxed, 0))
        return jax.tree.map(
            lambda leaf: tuple(leaf.names), boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
        )

    def features(
        self,
        variables: Mapping[str, Any],
        tokens_BxL: Array,
        segments_BxL: Array | None = None,
        positions_BxL: Array | None = None,
        *,
        causal: bool,
    ) -> Array:
        """Final hidden states after the last norm: (B, L, D) in the compute dtype, 0 at padding.

        tokens_BxL: int32. segments_BxL: int32, 0 for padding, equal where positions may see each other;
        None: one segment, no padding. positions_BxL: int32; None: restarting in each segment.
        causal: whether a position sees later ones (False) or not (True).
        """
        network: Any = Network(self.config)
        return network.apply(variables, tokens_BxL, segments_BxL, positions_BxL, causal)

    def apply(
        self,
        variables: Mapping[str, Any],
        tokens_BxL: Array,
        segments_BxL: Array | None = None,
        positions_BxL: Array | None = None,
        *,
        causal: bool,
        method: str | None = None,
    ) -> Array:
        """Logits (B, L, V) f32; with `method="features"` the final hidden states. Arguments as in `features`."""
        if method not in (None, "features"):
            raise ValueError(f"method={method!r}: a Transformer has features, or None for logits")
        x_BxLxD = self.features(variables, tokens_BxL, segments_BxL, positions_BxL, causal=causal)
        if method == "features":
            return x_BxLxD
        return project(x_BxLxD, head_kernel(variables["params"]))

    def _boxed(self, seed: int | Array) -> Any:
        tokens_1xL = jnp.zeros((1, 2), jnp.int32)
        return Network(self.config).init(jax.random.key(seed), tokens_1xL, None, None, False)["params"]
