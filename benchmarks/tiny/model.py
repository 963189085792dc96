"""The tiny model's network for training: weights by their names in a checkpoint, and a forward pass to differentiate.

jaxkv's own decoder runs prompts through a cache; here all positions are wanted at once, in memory that fits two cores.
`tests/test_tiny_model.py` holds the logits of both against each other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

Weights = dict[str, jax.Array]
# Queries attended at a time: what lies to the right of them is not computed.
BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the network is made of.

    Attributes:
        vocab: tokens.
        embed: channels of the residual stream.
        layers: blocks.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: channels of a head.
        hidden: channels of an MLP.
        theta: base of the rotary embedding.
        positions: tokens that it is trained for.
    """

    vocab: int
    embed: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    hidden: int = 256
    theta: float = 500000.0
    positions: int = 2048

    def config(self, *, bos: int, eos: int) -> dict:
        """As `config.json` says it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.embed,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "rope_theta": self.theta,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "torch_dtype": "float16",
        }


def initial(shape: Shape, seed: int) -> Weights:
    """Weights before the first step: rows of unit scale, what writes to the residual stream smaller by depth."""
    rng = np.random.default_rng(seed)

    def matrix(out: int, into: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, scale * into**-0.5, (out, into)), jnp.float32)

    narrow = (2 * shape.layers) ** -0.5
    weights = {
        "model.embed_tokens.weight": jnp.asarray(
            rng.normal(0, 0.1, (shape.vocab, shape.embed)), jnp.float32
        ),
        "model.norm.weight": jnp.ones(shape.embed),
    }
    for layer in range(shape.layers):
        of = f"model.layers.{layer}."
        weights |= {
            f"{of}input_layernorm.weight": jnp.ones(shape.embed),
            f"{of}self_attn.q_proj.weight": matrix(shape.heads * shape.head_dim, shape.embed),
            f"{of}self_attn.k_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.embed),
            f"{of}self_attn.v_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.embed),
            f"{of}self_attn.o_proj.weight": matrix(
                shape.embed, shape.heads * shape.head_dim, narrow
            ),
            f"{of}post_attention_layernorm.weight": jnp.ones(shape.embed),
            f"{of}mlp.gate_proj.weight": matrix(shape.hidden, shape.embed),
            f"{of}mlp.up_proj.weight": matrix(shape.hidden, shape.embed),
            f"{of}mlp.down_proj.weight": matrix(shape.embed, shape.hidden, narrow),
        }
    weights |= _copying(weights, shape)
    weights |= _looking_back(weights, shape)
    return weights | _comparing(weights, shape, rng)


def _copying(weights: Weights, shape: Shape) -> Weights:
    """Heads begin by writing what they read: where one looks, that token grows likelier."""
    made, group = {}, shape.heads // shape.kv_heads
    for layer in range(1, shape.layers):
        of = f"model.layers.{layer}.self_attn."
        v = weights[f"{of}v_proj.weight"].reshape(shape.kv_heads, shape.head_dim, shape.embed)
        made[f"{of}o_proj.weight"] = 0.3 * jnp.repeat(v, group, axis=0).reshape(-1, shape.embed).T
    return made


def _looking_back(weights: Weights, shape: Shape) -> Weights:
    """The first block's heads begin by looking one to so many tokens back, which they would take most of a run to find.

    One channel of the residual stream is the same for all tokens. What queries and keys make of it is turned against
    each other, so that the rotation undoes it at the head's own distance.
    """
    embedding = weights["model.embed_tokens.weight"].at[:, 0].set(0.4)
    half, group, sharp = shape.head_dim // 2, shape.heads // shape.kv_heads, 6
    turns = shape.theta ** (-2 * np.arange(half) / shape.head_dim)
    size = 1.4 * (np.arange(half) < sharp)
    of = "model.layers.0.self_attn."
    q, k = (0.3 * weights[f"{of}{name}_proj.weight"] for name in ("q", "k"))
    for head in range(shape.heads):
        # A query that stands so far behind a key turns by that much more.
        angles = -turns * (head + 1)
        column = np.concatenate([size * np.cos(angles), size * np.sin(angles)])
        q = q.at[_rows(head, shape), 0].set(jnp.asarray(column, q.dtype))
        if head % group == 0:
            k = k.at[_rows(head // group, shape), 0].set(
                jnp.asarray(np.concatenate([size, 0 * size]), k.dtype)
            )
    return {
        "model.embed_tokens.weight": embedding,
        f"{of}q_proj.weight": q,
        f"{of}k_proj.weight": k,
    }


# What the second block's heads begin by comparing: a query's token so far back with a key's token so far back. A
# needle's number stands three behind its key, and is asked for six behind it.
_COMPARED = ((0, 1, 2), (1, 1, 2), (2, 6, 3), (3, 1, 3))


def _comparing(weights: Weights, shape: Shape, rng: np.random.Generator) -> Weights:
    """Half of the second block's heads begin by comparing words that the first block's have fetched from a distance.

    Those write in a code of their own each, all in the same one of the token; comparisons lie in the channels that
    the rotation turns least.
    """
    dim, half = shape.head_dim, shape.head_dim // 2
    first, second = (f"model.layers.{layer}.self_attn." for layer in (0, 1))
    # As many as fit the residual stream side by side.
    codes = np.linalg.qr(rng.normal(size=(shape.embed, shape.embed)))[0]
    written = {back: codes[:, at * dim : (at + 1) * dim] for at, back in enumerate((1, 2, 3, 6))}
    token = rng.normal(0, shape.embed**-0.5, (dim, shape.embed))
    token[:, 0] = 0.0
    v = jnp.asarray(np.tile(token, (shape.kv_heads, 1)), jnp.float32)
    out = 0.3 * weights[f"{first}o_proj.weight"]
    for back, code in written.items():
        out = out.at[:, _rows(back - 1, shape)].set(jnp.asarray(0.25 * code, out.dtype))
    slow = np.r_[half // 2 : half, half + half // 2 : dim]
    mixed = 2**0.5 * np.linalg.qr(rng.normal(size=(dim, dim)))[0][: len(slow)]
    q, k = (weights[f"{second}{name}_proj.weight"] for name in ("q", "k"))

    def reading(matrix: jax.Array, head: int, back: int) -> jax.Array:
        rows = np.zeros((dim, shape.embed))
        rows[slow] = 1.5 * mixed @ written[back].T
        of = _rows(head, shape)
        return matrix.at[of].set(0.3 * matrix[of] + jnp.asarray(rows, matrix.dtype))

    for head, asked, held in _COMPARED:
        q, k = reading(q, head, asked), reading(k, head * shape.kv_heads // shape.heads, held)
    return {
        f"{first}v_proj.weight": v,
        f"{first}o_proj.weight": out,
        f"{second}q_proj.weight": q,
        f"{second}k_proj.weight": k,
    }


def _rows(head: int, shape: Shape) -> slice:
    return slice(head * shape.head_dim, (head + 1) * shape.head_dim)


def hidden_states(weights: Weights, tokens: jax.Array, shape: Shape) -> jax.Array:
    """Normed hidden states `f32[B, S, E]` of token ids `i32[B, S]`; a token sees those to its left."""
    x = weights["model.embed_tokens.weight"][tokens]
    turns = shape.theta ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = jnp.arange(tokens.shape[1], dtype=jnp.float32)[:, None] * jnp.asarray(
        turns, jnp.float32
    )
    turn = jnp.cos(angles), jnp.sin(angles)
    for layer in range(shape.layers):
        of = f"model.layers.{layer}."
        x = x + _attention(
            weights,
            of + "self_attn.",
            _norm(x, weights[f"{of}input_layernorm.weight"]),
            turn,
            shape,
        )
        normed = _norm(x, weights[f"{of}post_attention_layernorm.weight"])
        gate, up = (normed @ weights[f"{of}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (jax.nn.silu(gate) * up) @ weights[f"{of}mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"])


def logits(weights: Weights, states: jax.Array) -> jax.Array:
    """Logits `f32[..., V]` of hidden states `f32[..., E]`."""
    return states @ weights["model.embed_tokens.weight"].T


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def _attention(
    weights: Weights, of: str, x: jax.Array, turn: tuple[jax.Array, jax.Array], shape: Shape
) -> jax.Array:
    batch, length, _ = x.shape

    def heads(name: str, count: int) -> jax.Array:
        return (
            (x @ weights[f"{of}{name}_proj.weight"].T)
            .reshape(batch, length, count, -1)
            .swapaxes(1, 2)
        )

    group = shape.heads // shape.kv_heads
    q = _rotate(heads("q", shape.heads), turn) * shape.head_dim**-0.5
    k, v = _rotate(heads("k", shape.kv_heads), turn), heads("v", shape.kv_heads)
    # A column of ones adds up the weights, in the product that is made anyway.
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    q = q.reshape(batch, shape.kv_heads, group, length, -1)
    if length <= BLOCK:
        out = _attended(q, k, v)
    else:
        # Head by head, and again on the way back: what lies between fits a core's cache.
        flat = [each.reshape(batch * shape.kv_heads, *each.shape[2:]) for each in (q, k, v)]
        out = jax.lax.map(jax.checkpoint(lambda of: _attended(*of)), tuple(flat))
        out = out.reshape(batch, shape.kv_heads, group, length, -1)
    merged = out.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1)
    return merged @ weights[f"{of}o_proj.weight"].T


def _attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`f32[..., G, S, D]` of queries `[..., G, S, D]`, keys `[..., S, D]` and values with their ones."""
    *front, group, length, dim = q.shape
    out = []
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        rows = q[..., begin:end, :].reshape(*front, group * (end - begin), dim)
        seen = jnp.arange(end) <= jnp.tile(jnp.arange(begin, end), group)[:, None]
        scores = jnp.where(seen, rows @ k[..., :end, :].swapaxes(-1, -2), -1e30)
        most = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
        sums = _exp(scores - most) @ v[..., :end, :]
        out.append((sums[..., :-1] / sums[..., -1:]).reshape(*front, group, end - begin, dim))
    return jnp.concatenate(out, axis=-2)


def _rotate(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = turn
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@jax.custom_jvp
def _exp(x: jax.Array) -> jax.Array:
    """The exponential, to 2e-7 of it, or 0 below -80, for x up to 80: many times as fast on a CPU as XLA's own."""
    power = jnp.clip(x, -80.0, 80.0) * 1.4426950408889634
    whole = jnp.round(power)
    part = (power - whole) * 0.6931471805599453
    series = 1 + part * (
        1 + part / 2 * (1 + part / 3 * (1 + part / 4 * (1 + part / 5 * (1 + part / 6))))
    )
    result = series * jax.lax.bitcast_convert_type(
        (whole.astype(jnp.int32) + 127) << 23, jnp.float32
    )
    return jnp.where(x < -80.0, 0.0, result)


@_exp.defjvp
def _exp_jvp(primals, tangents):
    result = _exp(*primals)
    return result, result * tangents[0]
