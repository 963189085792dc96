"""A model that reads chosen rows beside windows, token by token: choices and attention in plain loops, in float64."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import oracles as o

from jaxkv.models.rope import apply_rope, compute_rope_tables


def paid(query, keys):
    """What each head of one query `[H, D]` pays to keys `[n, D]`, one array of these for each of K kv heads."""
    group, out = len(query) // len(keys), []
    for head, each in enumerate(query):
        logits = (
            keys[head // group].astype(np.float64) @ each.astype(np.float64) / math.sqrt(each.size)
        )
        weights = np.exp(logits - logits.max())
        out.append(weights / weights.sum())
    return out


@dataclasses.dataclass(kw_only=True)
class Slow:
    """One sequence: keys, values and queries of all its tokens by layer, and the rows of its prompt that are held.

    Attributes:
        model: of layers with windows and without.
        sources: for each layer that reads a choice the filter that makes it; of Quest the layer itself.
        budget: rows read.
        ages: weights of a filter's last queries, the newest first.
        generated: tokens after the prompt are read only if they are chosen.
        page: rows of Quest's pages; None where filters choose.
        kept: of the prompt, by layer and kv head; None for all.
        prompt: its tokens.
    """

    model: object
    sources: dict
    budget: int
    ages: tuple = (1.0,)
    generated: bool = False
    page: int | None = None
    kept: list | None = None
    prompt: int = 0

    def __post_init__(self):
        flat, layers = self.model.flat_decoder, range(self.model.config.layers)
        self.blocks = [
            flat.get_layer_graphs(layer).rebuild_block(flat.blocks[layer]) for layer in layers
        ]
        self.ends, self.rows = (
            flat.graphs.rebuild_embedding_and_head(flat.ends),
            [[] for _ in layers],
        )

    def read(self, tokens, how):
        """The logits behind tokens that are read `"whole"`, `"one"` by one as sampled ones are, or as a `"chunk"`."""
        config, first = self.model.config, len(self.rows[0])
        stands = jnp.arange(first, first + len(tokens))[None]
        x, chosen = self.ends.embed_tokens(jnp.asarray([tokens])), {}
        for layer, block in enumerate(self.blocks):
            normed, by = (
                block.normalise_for_attention(x),
                compute_rope_tables(stands, config.get_layer_spec(layer).rope, config.head_dim),
            )
            q, (k, v) = (
                block.compute_rotated_queries(normed, by)[0],
                block.compute_keys_values(normed),
            )
            q = np.moveaxis(np.asarray(q), 2, 0).reshape(len(tokens), -1, config.head_dim)
            k, v = np.asarray(apply_rope(k, by))[0], np.asarray(v)[0]
            self.rows[layer] += [(q[at], k[:, at], v[:, at]) for at in range(len(tokens))]
            if layer in self.sources.values() and self.page is None and how != "whole":
                chosen[layer] = self.choose(layer, first, how)
            out = [
                self.attended(layer, first + at, first, how, chosen) for at in range(len(tokens))
            ]
            shape = (len(tokens), config.kv_heads, config.group_size, config.head_dim)
            out = np.moveaxis(np.stack(out).reshape(shape), 0, 2)[None]
            x = block.apply_output_and_mlp(x, jnp.asarray(out, jnp.float32))
        return np.asarray(self.ends.compute_logits(x[:, -1]))[0]

    def held(self, layer, head, last):
        """The positions up to `last` that a head holds."""
        mine = range(self.prompt) if self.kept is None else self.kept[layer][head]
        return [each for each in [*mine, *range(self.prompt, last + 1)] if each <= last]

    def choose(self, layer, first, how):
        """The positions that a filter chooses among those before `first`, or, if sampled, among the prompt's."""
        below = first if how == "chunk" or self.generated else self.prompt
        asking = (
            range(first, len(self.rows[layer]))
            if how == "chunk"
            else range(first, first - len(self.ages), -1)
        )
        weights, scores = (1.0,) * len(asking) if how == "chunk" else self.ages, np.zeros(below)
        for at, weight in zip(asking, weights, strict=True):
            if at < 0:
                continue
            heads = range(self.model.config.kv_heads)
            seen = [[each for each in self.held(layer, head, at) if each < below] for head in heads]
            keys = [self.of(layer, 1, head, seen[head]) for head in heads]
            if not all(map(len, keys)):
                continue
            best = np.zeros(below)
            for head, shares in enumerate(paid(self.rows[layer][at][0], keys)):
                mine = seen[head // self.model.config.group_size]
                best[mine] = np.maximum(best[mine], shares)
            scores += weight * best
        if len(self.ages) > 1 and not self.generated and how == "one":
            scores[max(0, first - len(self.ages) + 1) :] = np.inf
        return sorted(sorted(range(below), key=lambda each: (-scores[each], each))[: self.budget])

    def attended(self, layer, at, first, how, chosen):
        """Attention output `[H, D]` of the token at a position."""
        config, window = self.model.config, self.model.config.sliding_windows[layer]
        heads, query = range(config.kv_heads), self.rows[layer][at][0]
        seen = [self.held(layer, head, at) for head in heads]
        if window is not None:
            seen = [list(range(max(0, at - window + 1), at + 1))] * config.kv_heads
        elif layer in self.sources and how != "whole" and self.page is not None:
            keys = np.stack([self.of(layer, 1, head, seen[head]) for head in heads]).astype(
                np.float64
            )
            rows, _ = o.quest_rows(
                query.astype(np.float64), keys, budget=self.budget, page=self.page
            )
            seen = [[seen[head][row] for row in rows[head]] for head in heads]
        elif layer in self.sources and how != "whole":
            behind = first if how == "chunk" else at if self.generated else self.prompt
            read = set(chosen[self.sources[layer]]) | set(range(behind, at + 1))
            seen = [[each for each in mine if each in read] for mine in seen]
        keys = [self.of(layer, 1, head, seen[head]) for head in heads]
        shares = paid(query, keys)
        values = [self.of(layer, 2, head, seen[head]).astype(np.float64) for head in heads]
        return np.stack(
            [share @ values[head // config.group_size] for head, share in enumerate(shares)]
        )

    def of(self, layer, which, head, positions):
        """A head's keys (1) or values (2) at these positions, `[n, D]`."""
        return np.asarray([self.rows[layer][each][which][head] for each in positions])
